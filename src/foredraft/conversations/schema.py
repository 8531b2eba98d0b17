"""The canonical conversation, and its Parquet form.

Messages and tools travel as JSON text: Arrow would give one struct to a whole column, and so invent nulls or refuse
rows whose tool arguments differ in type.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foredraft.artifacts import Manifest, open_artifact

GROUP_ROWS = 1024
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """One conversation in OpenAI's message form, with where it came from.

    A row that came tokenised has ``input_ids`` and ``loss_mask``, and no messages. ``group`` names what must stay on one
    side of the train/validation split (a trace, or the row itself).
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    kind: str
    origin: str
    licence: str
    split: str
    group: str
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None


SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("id", "messages", "tools", "kind", "origin", "licence", "split", "group")]
    + [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))]
)


def conversation_id(messages: list[dict[str, Any]], tools: list[dict[str, Any]], tokens: Any = None) -> str:
    """Hash of what the model will see (``tokens``: ids and mask of a row that came tokenised), equal on every machine."""
    body = json.dumps([messages, tools] if tokens is None else tokens, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(body.encode()).hexdigest()[:24]


def to_record(row: Conversation) -> dict[str, Any]:
    """The row as it stands in Parquet and in between."""
    texts = {
        "messages": json.dumps(row.messages, ensure_ascii=False),
        "tools": json.dumps(row.tools, ensure_ascii=False),
    }
    return {**vars(row), **texts}


def write_records(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Write rows as Parquet, in the order given, a group at a time."""
    rows = iter(records)
    with pq.ParquetWriter(path, SCHEMA) as writer:
        while group := list(islice(rows, GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))


def row_groups(path: Path) -> int:
    """How many groups of rows a file has, each of which can be read alone."""
    return pq.read_metadata(path).num_row_groups


def read_conversations(path: Path, group: int | None = None) -> Iterator[Conversation]:
    """Read what :func:`write_records` wrote, all of it or one group of rows, a batch at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(GROUP_ROWS, row_groups=None if group is None else [group]):
            for record in batch.to_pylist():
                texts = {name: json.loads(record[name]) for name in ("messages", "tools")}
                yield Conversation(**{**record, **texts})


def open_conversations(folder: Path, name: str) -> tuple[Manifest, list[Path]]:
    """Verify the conversations of source ``name``; returns their files, for :func:`read_conversations`."""
    manifest = open_artifact(folder, "conversations", f"dvc repro curate@{name}")
    return manifest, [folder / file for file in sorted(manifest.files)]
