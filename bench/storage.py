"""What storing features in float8 costs a drafter: tokens per step after training on either, over seeds.

usage: python -m bench.storage [SEEDS]     (after make repro; about three minutes for each seed and type on two cores)

The same tokens are read twice, the drafter of the params is trained on either with the same seeds, and every drafter
decodes the same held-out prompts. A seed decides the order of the data and the anchors of each step.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from foredraft.artifacts import write_json
from foredraft.benchmarks.build import read_benchmarks
from foredraft.chat.render import Renderer
from foredraft.export.config import ExportConfig
from foredraft.export.export import export
from foredraft.features.config import ExtractConfig
from foredraft.features.engine import extract
from foredraft.imports import ROOT
from foredraft.layouts.zlab import read_zlab
from foredraft.params import load_section, read_params
from foredraft.provenance import commit, versions
from foredraft.sources.config import FetchConfig
from foredraft.speculation.acceptance import pool
from foredraft.speculation.config import EvaluateConfig
from foredraft.speculation.decode import decode
from foredraft.speculation.evaluate import take_prompts
from foredraft.speculation.proposers import DFlashProposer
from foredraft.speculation.session import open_session
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, load_target
from foredraft.target.tokenizer import read_tokenizer
from foredraft.target.weights import checkpoint_folder
from foredraft.training.config import TrainConfig
from foredraft.training.stage import train

PARAMS = ROOT / "params.yaml"
DATA = ROOT / "data"
OUT = ROOT / "bench/results/storage-cpu.json"
STORAGES = ("bfloat16", "float8_e4m3fn")
PROMPTS, BATCH = 24, 32
"""Held-out prompts of each benchmark, and how many decode together."""


def main(seeds: int) -> None:
    """Measure, print and write."""
    target, fetch = load_section(PARAMS, "target", TargetConfig), load_section(PARAMS, "fetch", FetchConfig)
    extracting = load_section(PARAMS, "extract", ExtractConfig)
    training = load_section(PARAMS, "train", TrainConfig)
    frozen = load_target(checkpoint_folder(target, fetch), target, extracting.target_layer_ids)
    rows: dict[str, list[dict[str, float]]] = {storage: [] for storage in STORAGES}
    with tempfile.TemporaryDirectory(dir=DATA) as name:
        folder = Path(name)
        for storage in STORAGES:
            config = extracting.model_copy(update={"storage": storage})
            features = {source: folder / storage / source for source in sorted(read_params(PARAMS)["sources"])}
            for source, out in features.items():
                extract(source, config, target, fetch, DATA / "tokens" / source, DATA / "target", out)
            for seed in range(1, seeds + 1):
                chosen = training.model_copy(update={"seed": seed})
                rows[storage].append(train_and_decode(chosen, features, frozen, target, folder / f"{storage}-{seed}"))
                print(storage, seed, rows[storage][-1], flush=True)
    write_json(OUT, report_of(rows))
    show(rows)


def train_and_decode(
    config: TrainConfig, features: dict[str, Path], frozen: FrozenTarget, target: TargetConfig, folder: Path
) -> dict[str, float]:
    """Train a drafter and decode with it; gives tokens per step, teacher-forced and generated."""
    folder.mkdir()
    train(config, features, DATA / "target", folder / "drafter", folder / "train.json", folder / "live")
    export(load_section(PARAMS, "export", ExportConfig), folder / "drafter", DATA / "target", folder / "export")
    drafter = read_zlab(folder / "export/zlab", frozen.embeddings.weight.dtype)
    interface = DATA / "target"
    eos = open_interface(interface).facts["eos_token_ids"]
    evaluating = load_section(PARAMS, "evaluate", EvaluateConfig).model_copy(update={"prompts": PROMPTS})
    renderer = Renderer(read_tokenizer(interface), target.thinking)
    taken, _ = take_prompts(read_benchmarks(DATA / "benchmarks")[1], renderer, evaluating)
    prompts = [prompt.ids for prompt in taken]
    traces = []
    for start in range(0, len(prompts), BATCH):
        proposer = DFlashProposer(drafter, frozen)
        traces += decode(open_session(frozen), proposer, prompts[start : start + BATCH], evaluating.max_new_tokens, eos)
    validation = json.loads((folder / "train.json").read_text(encoding="utf-8"))["val"]
    generated = pool(traces).report()
    return {
        "tokens_per_step": generated["tokens_per_step"],
        "target_steps": generated["target_steps"],
        "validation_tokens_per_step": validation["tokens_per_step"],
    }


def report_of(rows: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Means, spreads over seeds, and the difference of pairs of one seed."""
    report: dict[str, Any] = {"seeds": len(rows[STORAGES[0]]), "prompts_per_benchmark": PROMPTS}
    for metric in ("tokens_per_step", "validation_tokens_per_step"):
        values = {storage: [row[metric] for row in rows[storage]] for storage in STORAGES}
        differences = [b - a for a, b in zip(*values.values(), strict=True)]
        report[metric] = {
            **{storage: summary(of_storage) for storage, of_storage in values.items()},
            "difference": summary(differences),
        }
    return {
        **report,
        "runs": rows,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": versions(),
    }


def summary(values: list[float]) -> dict[str, float]:
    """Mean, and standard deviation over seeds."""
    return {"mean": round(statistics.mean(values), 4), "spread": round(statistics.stdev(values), 4)}


def show(rows: dict[str, list[dict[str, float]]]) -> None:
    """Print the table."""
    report = report_of(rows)
    table = Table(title=f"tokens per step over {report['seeds']} seeds: mean ± standard deviation")
    for column in ("features", "generated", "validation"):
        table.add_column(column, justify="left" if column == "features" else "right")
    for name in (*STORAGES, "difference"):
        cells = (report[metric][name] for metric in ("tokens_per_step", "validation_tokens_per_step"))
        table.add_row(name, *(f"{cell['mean']:.3f} ± {cell['spread']:.3f}" for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
