"""The ``benchmarks`` stage: held-out prompts as canonical conversations, one Parquet file a benchmark."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from foredraft.artifacts import Manifest, open_artifact, publish
from foredraft.benchmarks.config import BenchmarksConfig
from foredraft.conversations.files import data_files, read_rows
from foredraft.conversations.messages import UnusableRow
from foredraft.conversations.readers import READERS
from foredraft.conversations.schema import Conversation, conversation_id, read_conversations, to_record, write_records
from foredraft.sources.config import FetchConfig, RowShape
from foredraft.sources.download import download


def build_benchmarks(config: BenchmarksConfig, fetch: FetchConfig, out: Path) -> dict[str, Any]:
    """Fetch every benchmark of the params and write its prompts, ordered by hash; returns their accounts by name.

    Raises:
        ValueError: a benchmark yields no prompt.
    """
    manifest = Manifest("benchmarks")
    with publish(out, manifest) as folder:
        for name, benchmark in sorted(config.sets.items()):
            with tempfile.TemporaryDirectory() as raw:
                download(benchmark, fetch, Path(raw))
                rows, skipped = _prompts(name, benchmark, Path(raw), config.max_prompt_chars)
            if not rows:
                raise ValueError(f"benchmarks.sets.{name}: no usable prompt; skipped {dict(skipped)}")
            write_records([to_record(row) for row in rows], folder / f"{name}.parquet")
            manifest.counts[name] = {
                "rows_in": len(rows) + skipped.total(),
                "rows_out": len(rows),
                "skipped": dict(sorted(skipped.items())),
            }
    return manifest.counts


def read_benchmarks(folder: Path) -> tuple[Manifest, dict[str, list[Conversation]]]:
    """Verify and read the artefact: prompts by benchmark, in the order to take them."""
    manifest = open_artifact(folder, "benchmarks", "dvc repro benchmarks")
    return manifest, {name: list(read_conversations(folder / f"{name}.parquet")) for name in manifest.counts}


def _prompts(name: str, benchmark: RowShape, raw: Path, max_chars: int) -> tuple[list[Conversation], Counter[str]]:
    skipped: Counter[str] = Counter()
    rows: dict[str, Conversation] = {}
    for row in (row for path in data_files(raw) for row in read_rows(path, benchmark.rows)):
        try:
            (draft,) = READERS[benchmark.format](row, benchmark)
        except UnusableRow as reason:
            draft = reason
        if isinstance(draft, UnusableRow):
            skipped[str(draft)] += 1
            continue
        identity = conversation_id(draft.messages, draft.tools)
        if sum(len(message["content"]) for message in draft.messages) > max_chars:
            skipped["too_long"] += 1
        elif identity in rows:
            skipped["duplicate"] += 1
        else:
            rows[identity] = Conversation(
                id=identity,
                messages=draft.messages,
                tools=draft.tools,
                kind="benchmark",
                origin=name,
                licence=benchmark.licence,
                split="test",
                group=identity,
            )
    return [rows[identity] for identity in sorted(rows)], skipped
