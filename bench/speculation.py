"""Wall-clock of speculation on this machine, one prompt at a time, beside the target's own greedy loop.

usage: make bench-speculation     (after make repro, whose data/ it reads; for GPUs: bench/speculation_gpu.py)

Both sides take turns, prompt by prompt and round by round: Transformers' ``generate`` with its cache, and the drafter's
chain. What a step costs by the tokens that it reads says how many tokens it must commit to pay.
"""

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from foredraft.artifacts import write_json
from foredraft.benchmarks.build import read_benchmarks
from foredraft.chat.render import Renderer
from foredraft.layouts.zlab import read_zlab
from foredraft.params import load_section
from foredraft.provenance import commit, versions
from foredraft.sources.config import FetchConfig
from foredraft.speculation.config import EvaluateConfig
from foredraft.speculation.evaluate import take_prompts
from foredraft.speculation.proposers import DFlashProposer
from foredraft.speculation.speed import compare_clocks, measure_cost
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import load_target
from foredraft.target.tokenizer import read_tokenizer
from foredraft.target.weights import checkpoint_folder

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench/results/speculation-cpu.json"
ROUNDS, PROMPTS, NEW = 3, 4, 64
SIZES = (1, 2, 4, 8, 16)


def main() -> None:
    """Measure, print and write."""
    params, data = ROOT / "params.yaml", ROOT / "data"
    target = load_section(params, "target", TargetConfig).model_copy(update={"dtype": "bfloat16"})
    config = load_section(params, "evaluate", EvaluateConfig).model_copy(update={"prompts": PROMPTS})
    drafter = read_zlab(data / "export/zlab", torch.bfloat16)
    folder = checkpoint_folder(target, load_section(params, "fetch", FetchConfig))
    frozen = load_target(folder, target, drafter.shape.target_layer_ids)
    eos = open_interface(data / "target", target).facts["eos_token_ids"]
    _, rows = read_benchmarks(data / "benchmarks")
    prompts, _ = take_prompts(rows, Renderer(read_tokenizer(data / "target"), target.thinking), config)
    make = partial(DFlashProposer, drafter, frozen)

    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in sorted(rows)}
    for _ in range(ROUNDS):
        for name, found in rounds.items():
            own = [prompt.ids for prompt in prompts if prompt.benchmark == name]
            found.append(compare_clocks(frozen, make, own, NEW, eos))
    cost = measure_cost(frozen, make(), max((prompt.ids for prompt in prompts), key=len), SIZES)
    plain = 1 / statistics.median(one["plain_tokens_per_s"] for found in rounds.values() for one in found)
    block = drafter.shape.choice.block_size
    report = {
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "benchmarks": {
            name: {
                "speed_up": statistics.median(one["speed_up"] for one in found),
                "speed_up_by_round": [round(one["speed_up"], 3) for one in found],
                "tokens_per_s": statistics.median(one["tokens_per_s"] for one in found),
                "plain_tokens_per_s": statistics.median(one["plain_tokens_per_s"] for one in found),
                "drafter_share": statistics.median(one["drafter_share"] for one in found),
                "tokens_per_step": found[0]["tokens_per_step"],
            }
            for name, found in rounds.items()
        },
        "verify_seconds": cost.verify,
        "draft_seconds": cost.draft,
        "plain_seconds_per_token": plain,
        # Of whole answers, beside each other; the cost of single steps swings more than that.
        "break_even_tokens_per_step": statistics.median(
            one["tokens_per_step"] / one["speed_up"] for found in rounds.values() for one in found
        ),
        "break_even_by_cost": (cost.of(block) + cost.draft) / plain,
    }
    write_json(OUT, report)
    show(report)


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    table = Table(title=f"One prompt at a time, {report['threads']} threads")
    for title in (
        "benchmark",
        "tokens/step",
        "plain tokens/s",
        "speculation tokens/s",
        "speed-up",
        "by round",
        "drafting",
    ):
        table.add_column(title, justify="left" if title == "benchmark" else "right")
    for name, found in report["benchmarks"].items():
        table.add_row(
            name,
            f"{found['tokens_per_step']:.2f}",
            f"{found['plain_tokens_per_s']:.1f}",
            f"{found['tokens_per_s']:.1f}",
            f"{found['speed_up']:.2f}",
            ", ".join(f"{one:.2f}" for one in found["speed_up_by_round"]),
            f"{found['drafter_share']:.0%}",
        )
    console = Console(width=120)
    console.print(table)
    console.print(f"even at {report['break_even_tokens_per_step']:.2f} tokens per step")


if __name__ == "__main__":
    main()
