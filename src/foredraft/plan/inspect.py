"""``make inspect SOURCE=...``: what became of a source's rows, and samples with their loss mask in colour."""

import json
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foredraft.artifacts import MANIFEST, ArtifactError, Manifest
from foredraft.params import read_params
from foredraft.tokens.writer import LENGTH_BINS

FOLDERS = {"curate": "conversations", "respond": "responses", "prepare": "tokens", "extract": "features"}
UNITS = {"curate": "conversations", "respond": "turns", "prepare": "documents", "extract": "documents"}
BAR, SAMPLE_TOKENS = 40, 400
SUPERVISED, CONTEXT = "bold green", "dim"


def inspect(source: str, data: Path, samples: int, console: Console) -> None:
    """Print rows and reasons by stage, the lengths of documents, and the first documents with their mask.

    Raises:
        ValueError: params have no such source; names those that there are.
        ArtifactError: nothing of it is there yet.
    """
    sources = read_params(Path("params.yaml")).get("sources") or {}
    if source not in sources:
        raise ValueError(f"no source {source!r} in params.yaml; there are: {', '.join(sources)}")
    manifests = {stage: found for stage in FOLDERS if (found := _manifest(data / FOLDERS[stage] / source)) is not None}
    if not manifests:
        raise ArtifactError(data / "conversations" / source, "nothing is there yet", f"run: dvc repro curate@{source}")
    console.print(rows_table(source, manifests))
    if "prepare" not in manifests:
        console.print(f"no documents yet: dvc repro prepare@{source} makes them")
        return
    console.print(lengths_table(manifests["prepare"].facts))
    documents = _first_documents(data / "tokens" / source, manifests["prepare"], samples)
    for panel in sample_panels(documents, data / "target", colour=console.color_system is not None):
        console.print(panel)


def rows_table(source: str, manifests: dict[str, Manifest]) -> Table:
    """Rows in, rows out and reasons of each stage that has run."""
    table = Table(title=f"rows of {source}", title_justify="left")
    for title in ("stage", "of", "in", "out"):
        table.add_column(title, justify="left" if title in {"stage", "of"} else "right")
    table.add_column("left out")
    for stage, manifest in manifests.items():
        counts = manifest.counts
        reasons = sorted(counts["skipped"].items(), key=lambda item: -item[1])
        told = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
        faults = ", ".join(f"{count:,} {fault}" for fault, count in manifest.facts.get("faults", {}).items() if count)
        notes = "; ".join(filter(None, [told, f"with a fault, kept or not: {faults}" if faults else ""]))
        table.add_row(stage, UNITS[stage], f"{counts['rows_in']:,}", f"{counts['rows_out']:,}", notes)
    return table


def lengths_table(facts: dict[str, Any]) -> Group:
    """The histogram of document lengths, and what the documents hold in all."""
    lengths: dict[str, int] = facts["lengths"]
    bins = [name for name in [*map(str, LENGTH_BINS), "more"] if name in lengths]
    most = max(lengths.values())
    table = Table(title="document lengths, tokens", title_justify="left", box=None, show_header=False)
    for name in bins:
        up_to = "longer" if name == "more" else f"up to {int(name):,}"
        table.add_row(up_to, f"{lengths[name]:,}", "█" * max(1, round(BAR * lengths[name] / most)))
    share = facts["supervised"] / facts["tokens"]
    summary = f"{facts['tokens']:,} tokens, {facts['supervised']:,} of them supervised ({share:.0%})"
    left_out = f", {facts['turns_left_out']:,} turns not on the served prefix" if facts["turns_left_out"] else ""
    return Group(table, f"{summary}; {facts['cut']:,} documents cut at the limit{left_out}")


def sample_panels(documents: list[tuple[str, Any, Any]], target: Path, colour: bool) -> Iterator[RenderableType]:
    """Documents as text: what is supervised is green, or where there is no colour, between brackets."""
    from foredraft.target.tokenizer import read_tokenizer

    if not target.is_dir():
        raise ArtifactError(
            target, "is not there, and its tokenizer is needed", "run: dvc repro target, or dvc pull target"
        )
    tokenizer: Any = read_tokenizer(target)
    for title, ids, mask in documents:
        shown = Text()
        pairs = zip(ids[:SAMPLE_TOKENS].tolist(), mask[:SAMPLE_TOKENS].tolist(), strict=True)
        for supervised, part in groupby(pairs, key=lambda pair: pair[1]):
            text = tokenizer.decode([token for token, _ in part])
            shown.append(text if colour or not supervised else f"⟦{text}⟧", SUPERVISED if supervised else CONTEXT)
        if len(ids) > SAMPLE_TOKENS:
            shown.append(f"\n… {len(ids) - SAMPLE_TOKENS} tokens more", "italic")
        yield Panel(shown, title=f"{title}: {len(ids)} tokens, {int(mask.sum())} supervised", title_align="left")


def _first_documents(folder: Path, manifest: Manifest, count: int) -> list[tuple[str, Any, Any]]:
    from foredraft.tokens.shards import open_tokens, read_shard

    open_tokens(folder, folder.name)
    found: list[tuple[str, Any, Any]] = []
    for name in sorted(manifest.facts["shards"]):
        shard = read_shard(folder / name)
        for index in range(min(len(shard), count - len(found))):
            found.append((f"{name} document {index}", *shard.document(index)))
    return found


def _manifest(folder: Path) -> Manifest | None:
    path = folder / MANIFEST
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise ArtifactError(path, str(error), "rerun or pull it") from error


def main(arguments: list[str]) -> None:
    """``inspect SOURCE SAMPLES``."""
    source, samples = arguments
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "110")))
    try:
        if not samples.isdigit():
            raise ValueError(f"SAMPLES = {samples!r}: expected a number")
        inspect(source, Path("data"), int(samples), console)
    except (ValueError, ArtifactError, json.JSONDecodeError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
