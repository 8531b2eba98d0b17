"""Useful tokens a second of ``extract`` on a CPU, beside a plain loop over the same documents in the same run.

usage: make bench-extract     (after make repro, whose data/tokens it reads; for GPUs: bench/extract_gpu.py)

The plain loop is what one writes first: documents in file order, as many rows each time, padded to the longest of them,
``output_hidden_states=True``, the taps kept. Ours does what the stage does: batches by length, checks, top-k, files. Both
run in bfloat16 with the same threads, and take turns.
"""

import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foredraft.features.batching import ShardPlan, batches_by_tokens
from foredraft.features.config import ExtractConfig
from foredraft.features.engine import read_shard
from foredraft.features.reading import Reader
from foredraft.features.storing import Store
from foredraft.imports import ROOT
from foredraft.params import load_section
from foredraft.provenance import commit, versions
from foredraft.scratch import Scratch
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, load_target
from foredraft.target.kernels import accelerate, choose_tools
from foredraft.target.weights import checkpoint_folder
from foredraft.tokens.shards import read_shard as read_tokens

ROUNDS, ROWS = 5, 16
TOKENS = 30_000
"""Useful tokens of a round."""
OUT = ROOT / "bench/results/extract-cpu.json"
Documents = list[tuple[Tensor, Tensor]]


def main() -> None:
    """Measure, print and write."""
    params = ROOT / "params.yaml"
    config = load_section(params, "extract", ExtractConfig)
    target = load_section(params, "target", TargetConfig)
    folder = checkpoint_folder(target, load_section(params, "fetch", FetchConfig))
    frozen = load_target(folder, target, config.target_layer_ids)
    accelerated = load_target(folder, target, config.target_layer_ids)
    accelerate(accelerated, choose_tools())
    documents = real_documents(ROOT / "data/tokens")
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for number in range(ROUNDS + 1):  # the first warms up
        part = documents[:ROWS] if number == 0 else documents
        for name, work, model in (("plain", plain_loop, frozen), ("ours", ours, accelerated)):
            start = time.perf_counter()
            work(model, part, config)
            seconds[name] += [time.perf_counter() - start] * (number > 0)
    tokens = sum(len(ids) for ids, _ in documents)
    report = {
        "useful_tokens_per_s": round(ROUNDS * tokens / sum(seconds["ours"])),
        "plain_useful_tokens_per_s": round(ROUNDS * tokens / sum(seconds["plain"])),
        "ratio": round(sum(seconds["plain"]) / sum(seconds["ours"]), 2),
        "ratio_by_round": [round(a / b, 2) for a, b in zip(seconds["plain"], seconds["ours"], strict=True)],
        "tokens": tokens,
        "documents": len(documents),
        "mean_length": round(tokens / len(documents)),
        "supervised": round(sum(int(mask.sum()) for _, mask in documents) / tokens, 3),
        "padding": round(1 - tokens / plan_of(documents, config).padded_tokens, 4),
        "plain_padding": round(1 - tokens / padded_in_file_order(documents), 4),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": versions(),
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }
    OUT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)


def real_documents(folder: Path) -> Documents:
    """Documents of every source in file order, up to :data:`TOKENS` in all."""
    chosen: Documents = []
    shards = [read_tokens(path) for path in sorted(folder.glob("*/train-*.safetensors"))]
    if not shards:
        raise SystemExit(f"{folder} holds no token shards: make repro")
    held = 0
    for number in range(max(map(len, shards))):  # in turn, so that all sources are among them
        for shard in (shard for shard in shards if number < len(shard)):
            ids, mask = shard.document(number)
            if held < TOKENS:
                chosen.append((ids, mask))
                held += len(ids)
    return chosen


@torch.inference_mode()
def plain_loop(frozen: FrozenTarget, documents: Documents, config: ExtractConfig) -> None:
    """What one writes first."""
    for start in range(0, len(documents), ROWS):
        batch = [ids.long() for ids, _ in documents[start : start + ROWS]]
        padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in batch], batch_first=True)
        output = frozen.model(input_ids=padded, attention_mask=mask, output_hidden_states=True, use_cache=False)
        torch.stack([output.hidden_states[layer_id + 1] for layer_id in config.target_layer_ids], dim=2)


def ours(frozen: FrozenTarget, documents: Documents, config: ExtractConfig) -> None:
    """What the stage does with a shard."""
    plan = plan_of(documents, config)
    with tempfile.TemporaryDirectory(dir=ROOT / "data") as folder:
        reader = Reader(frozen, getattr(torch, config.storage), config.top_k)
        with Store(Scratch(Path(folder)), "bench", config.target_layer_ids, lambda _tokens: None) as store:
            read_shard(reader, store, plan, [documents[number] for number in plan.documents])


def plan_of(documents: Documents, config: ExtractConfig) -> ShardPlan:
    """All documents as one shard."""
    lengths = [len(ids) for ids, _ in documents]
    batches = tuple(batches_by_tokens(lengths, config.batch_tokens))
    return ShardPlan("bench.safetensors", "bench", batches, tuple(lengths[i] for batch in batches for i in batch))


def padded_in_file_order(documents: Documents) -> int:
    """Tokens that the plain loop's batches hold."""
    lengths = [len(ids) for ids, _ in documents]
    batches = [lengths[start : start + ROWS] for start in range(0, len(lengths), ROWS)]
    return sum(len(batch) * max(batch) for batch in batches)


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(title=f"{report['documents']} documents, {report['tokens']:,} tokens, {report['threads']} threads")
    for column in ("", "useful tokens/s", "padding"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("plain loop", f"{report['plain_useful_tokens_per_s']:,}", f"{report['plain_padding']:.1%}")
    table.add_row("extract", f"{report['useful_tokens_per_s']:,}", f"{report['padding']:.1%}")
    console = Console()
    console.print(table)
    console.print(f"{report['ratio']} times (by round: {report['ratio_by_round']})", highlight=False)


if __name__ == "__main__":
    main()
