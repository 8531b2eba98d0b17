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
GROUPS = {"pooled", "baselines", "trees", "sampled", "settings", "gap", "overlap", "commit"}
GROUPS |= {"speed", "costs", "recommendation"}
"""Keys of the metrics that are no benchmark."""


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
    reports = {"drafter": metrics, **metrics["baselines"]}
    columns = {"drafter": "drafter"}
    for budget, found in metrics["trees"].items():
        reports[budget], columns[budget] = found, f"tree of {budget}"
    columns |= COLUMNS
    for title in columns.values():
        table.add_column(title, justify="right")
    names = [name for name in metrics if name not in GROUPS]
    for name in [*names, "pooled"]:
        table.add_section() if name == "pooled" else None
        cells = [f"{reports[proposer][name]['tokens_per_step']:.2f}" for proposer in columns]
        table.add_row(name, str(metrics[name]["prompts"]), *cells)
    return table


def told(metrics: dict[str, Any], trained: dict[str, Any]) -> list[str]:
    """What else there is to say of a run, a line each."""
    pooled = metrics["pooled"]
    slots = ", ".join(f"{share:.2f}" for share in pooled["acceptance_by_slot"])
    differences, interval = pooled["differences_from_greedy"], pooled["interval"]
    lines = [f"acceptance by slot: {slots}; accepted drafts per step: {pooled['accepted_per_step']:.2f}"]
    if interval:
        lines.append(f"drafter, pooled, 95 % interval over prompts: {interval['low']:.2f} to {interval['high']:.2f}")
    lines += [
        f"{name.replace('_', ' ')}: {found['pooled']['tokens_per_step']:.2f} tokens per step"
        for name, found in metrics["sampled"].items()
    ]
    lines.append(
        f"answers that leave plain greedy decoding at a near-tie of the target's logits: {differences['near_ties']} "
        f"of {pooled['prompts']} (largest margin {differences['largest_margin']:.3f})"
    )
    shares = ", ".join(f"{found['prompts_seen']}/{found['prompts']}" for found in metrics["overlap"].values())
    lines.append(
        f"prompts whose words share 13 tokens with what was trained on: {shares} ({', '.join(metrics['overlap'])})"
    )
    if speed := metrics.get("speed"):
        best = max(speed, key=lambda name: speed[name]["speed_up"])
        advice = metrics["recommendation"]
        lines += [
            "speed-up over Transformers' own greedy loop, one prompt at a time: "
            + ", ".join(f"{name} {found['speed_up']:.2f}" for name, found in speed.items()),
            f"{best}: {speed[best]['tokens_per_s']:.1f} tokens/s, the first after "
            f"{speed[best]['seconds_to_first_token']:.2f} s, drafting {speed[best]['drafter_share']:.0%} of the time",
            f"even at {advice['break_even_tokens_per_step']:.2f} tokens per step; fastest with {advice['best_drafts']} "
            f"drafts (trained with {advice['trained_drafts']}), or a tree of {advice['best_tree_budget']}",
        ]
    lines.append(
        f"training: {trained['steps']} steps, {trained['anchors_per_second']:.0f} anchors/s, "
        f"validation {trained['val']['tokens_per_step']:.2f} tokens per step"
    )
    return lines


def main(evaluate: Path, train: Path) -> None:
    """Print the table and where to look next."""
    metrics = json.loads(evaluate.read_text(encoding="utf-8"))
    trained = json.loads(train.read_text(encoding="utf-8"))
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(build_table(metrics))
    for line in told(metrics, trained):
        console.print(line)
    console.print(
        "next: data/export/ holds the drafter for vLLM, SGLang, z-lab and Transformers; "
        "metrics/, dvc plots show; dvc exp run --temp -S train.lr=1e-3, make experiments"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
