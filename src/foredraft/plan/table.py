"""The one table at the end of ``make repro``."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = {
    "drafter": "drafter",
    "prompt_lookup": "prompt lookup",
    "random_drafter": "random drafter",
    "greedy": "plain greedy",
}


def build_table(metrics: dict[str, Any]) -> Table:
    """Tokens per step by benchmark and proposer."""
    pooled, settings = metrics["pooled"], metrics["settings"]
    drafts = len(pooled["acceptance_by_slot"])
    table = Table(
        title=f"Tokens per target step (bonus token included), greedy, {settings['dtype']}, {drafts} drafts a step",
        caption="Tokens committed per target step; plain greedy decoding commits one.",
    )
    table.add_column("benchmark")
    table.add_column("prompts", justify="right")
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    reports = {"drafter": metrics, **metrics["baselines"]}
    names = [name for name in metrics if name not in {"pooled", "baselines", "settings", "commit"}]
    for name in [*names, "pooled"]:
        table.add_section() if name == "pooled" else None
        cells = [f"{reports[proposer][name]['tokens_per_step']:.2f}" for proposer in COLUMNS]
        table.add_row(name, str(metrics[name]["prompts"]), *cells)
    return table


def main(evaluate: Path, train: Path) -> None:
    """Print the table and where to look next."""
    metrics = json.loads(evaluate.read_text(encoding="utf-8"))
    trained = json.loads(train.read_text(encoding="utf-8"))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(build_table(metrics))
    differences = metrics["pooled"]["differences_from_greedy"]
    slots = ", ".join(f"{share:.2f}" for share in metrics["pooled"]["acceptance_by_slot"])
    console.print(
        f"acceptance by slot: {slots}; accepted drafts per step: {metrics['pooled']['accepted_per_step']:.2f}"
    )
    console.print(
        f"answers that leave plain greedy decoding at a near-tie of the target's logits: {differences['near_ties']} "
        f"of {metrics['pooled']['prompts']} (largest margin {differences['largest_margin']:.3f})"
    )
    console.print(
        f"training: {trained['steps']} steps, {trained['anchors_per_second']:.0f} anchors/s, "
        f"validation {trained['val']['tokens_per_step']:.2f} tokens per step"
    )
    console.print(
        "next: data/export/ holds the drafter for vLLM, SGLang, z-lab and Transformers; "
        "metrics/, dvc plots show; dvc exp run --temp -S train.lr=1e-3, make experiments"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
