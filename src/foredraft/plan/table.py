"""The one table at the end of ``make repro``."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foredraft.benchmarks.config import OTHER_KEYS

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
    reports = {"drafter": metrics, **metrics["baselines"]}
    columns = {"drafter": "drafter"}
    for budget, found in metrics["trees"].items():
        reports[budget], columns[budget] = found, f"tree of {budget}"
    columns |= COLUMNS
    for title in columns.values():
        table.add_column(title, justify="right")
    names = [name for name in metrics if name not in OTHER_KEYS]
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
        drafts, tree = advice["best_drafts"], advice["best_tree_budget"]
        fastest = f"fastest with {drafts} draft{'s' * (drafts != 1)} (trained with {advice['trained_drafts']})"
        fastest += f", or a tree of {tree}" if tree else ""
        if max([*advice["speed_up_by_drafts"].values(), *advice["speed_up_by_tree_budget"].values()]) < 1:
            fastest = "the plain loop is faster"
        lines += [
            "speed-up over Transformers' own greedy loop, one prompt at a time: "
            + ", ".join(f"{name} {found['speed_up']:.2f}" for name, found in speed.items()),
            f"{best}: {speed[best]['tokens_per_s']:.1f} tokens/s, the first after "
            f"{speed[best]['seconds_to_first_token']:.2f} s, drafting {speed[best]['drafter_share']:.0%} of the time",
            f"even at {advice['break_even_tokens_per_step']:.2f} tokens per step; {fastest}",
        ]
    lines.append(
        f"training: {trained['steps']} steps, {trained['anchors_per_second']:.0f} anchors/s, "
        f"validation {trained['val']['tokens_per_step']:.2f} tokens per step"
    )
    return lines


def main(evaluate: Path, train: Path) -> None:
    """Print the table and where to look next."""
    try:
        metrics, trained = (json.loads(path.read_text(encoding="utf-8")) for path in (evaluate, train))
        table, lines = build_table(metrics), told(metrics, trained)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"Error: {evaluate} and {train} are not the figures of a whole run ({type(error).__name__}: {error}): "
            "make repro, or git checkout metrics for those that were committed"
        ) from None
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    for line in lines:
        console.print(line)
    console.print(
        "next: data/export/ holds the drafter for vLLM, SGLang, z-lab and Transformers; "
        "metrics/, dvc plots show; dvc exp run --temp -S train.lr=1e-3, make experiments"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
