"""The ``curate`` stage: raw rows -> canonical conversations, filtered, capped and split."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from foredraft.artifacts import Manifest, open_artifact, publish
from foredraft.conversations.config import CurateConfig
from foredraft.conversations.files import data_files, read_rows
from foredraft.conversations.filters import Filters, prompt_text
from foredraft.conversations.readers import READERS, Draft, UnusableRow
from foredraft.conversations.schema import Conversation, conversation_id, read_conversations, write_conversations
from foredraft.sources.config import SourceConfig

CONVERSATIONS = "conversations.parquet"


def curate(name: str, source: SourceConfig, config: CurateConfig, raw: Path, benchmarks: Path, out: Path) -> None:
    """Write the conversations of source ``name`` as the artefact ``out``.

    Every conversation read is kept or counted under a reason: ``rows_in = rows_out + sum(skipped)``. A raw row that
    yields several conversations (a trace) counts as that many.

    Raises:
        ValueError: no conversation is left, or more than ``max_skip_ratio`` of the rows cannot be used; names the
            reasons and the first row of each.
    """
    open_artifact(raw, "raw", f"dvc repro fetch@{name}")
    open_artifact(benchmarks, "benchmarks", "dvc repro benchmarks")
    held_out = [
        prompt_text(row.messages, [])
        for path in sorted(benchmarks.glob("*.parquet"))
        for row in read_conversations(path)
    ]
    filters = Filters(config, held_out)
    skipped: Counter[str] = Counter()
    first: dict[str, int] = {}
    kept: list[Conversation] = []
    unusable = 0
    for row, draft in _drafts(raw, source):
        if isinstance(draft, UnusableRow):
            reason: str | None = str(draft)
            unusable += 1
        else:
            conversation = _conversation(draft, row, name, source, config)
            reason = filters.reason_to_drop(draft, conversation.id)
        if reason is None:
            kept.append(conversation)
        else:
            skipped[reason] += 1
            first.setdefault(reason, row)

    rows_in = len(kept) + skipped.total()
    if rows_in == 0:
        raise ValueError(f"sources.{name}: no row in {raw} (data files: {len(data_files(raw))})")
    account = ", ".join(f"{count} {reason} (first: row {first[reason]})" for reason, count in skipped.most_common())
    if not kept or unusable > config.max_skip_ratio * rows_in:
        problem = "no usable row" if not kept else f"more than curate.max_skip_ratio = {config.max_skip_ratio} unusable"
        raise ValueError(f"sources.{name}: {problem} of {rows_in}: {account}")

    kept.sort(key=lambda conversation: conversation.id)
    chosen = kept[: source.limit]
    if len(chosen) < len(kept):
        skipped["over_limit"] = len(kept) - len(chosen)
    manifest = Manifest(
        "conversations",
        counts={"rows_in": rows_in, "rows_out": len(chosen), "skipped": dict(sorted(skipped.items()))},
        facts={"source": name, "kind": source.kind, "licence": source.licence},
    )
    with publish(out, manifest) as folder:
        write_conversations(chosen, folder / CONVERSATIONS)


def open_conversations(folder: Path, name: str) -> tuple[Manifest, list[Conversation]]:
    """Verify and read the conversations of source ``name``."""
    manifest = open_artifact(folder, "conversations", f"dvc repro curate@{name}")
    return manifest, read_conversations(folder / CONVERSATIONS)


def split_of(group: str, validation_share: float) -> str:
    """``train`` or ``validation``, by hash alone: the same on every machine, and stable when rows are added."""
    position = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64
    return "validation" if position < validation_share else "train"


def _drafts(raw: Path, source: SourceConfig) -> Iterator[tuple[int, Draft | UnusableRow]]:
    rows = (row for path in data_files(raw) for row in read_rows(path, source.rows))
    for number, row in enumerate(rows):
        try:
            for draft in READERS[source.format](row, source):
                yield number, draft
        except UnusableRow as reason:
            yield number, reason


def _conversation(draft: Draft, row: int, name: str, source: SourceConfig, config: CurateConfig) -> Conversation:
    identity = conversation_id(draft.messages, draft.tools)
    group = draft.group or identity
    return Conversation(
        id=identity,
        messages=draft.messages,
        tools=draft.tools,
        kind=source.kind,
        origin=name,
        licence=source.licence,
        split=split_of(group, config.validation_share),
        group=group,
        row=row,
    )
