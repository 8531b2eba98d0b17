"""Answers as token ids, and their Parquet form."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from foredraft.artifacts import Manifest, open_artifact

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("turn", pa.int32()),
        ("split", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class Response:
    """One answered turn of the conversation ``id``; turns count from 0.

    ``response_ids`` are used as generated and never rendered again; they end with the end-of-turn token if and only if
    ``finish_reason`` is ``stop`` (otherwise it is ``length``: none is invented). ``prompt_ids`` is all that the target
    saw before it, its own earlier answers included.
    """

    id: str
    turn: int
    split: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str


def write_responses(rows: list[Response], path: Path) -> None:
    """Write rows as Parquet, in the order given."""
    with path.open("wb") as stream:
        pq.write_table(pa.Table.from_pylist([vars(row) for row in rows], schema=SCHEMA), stream)


def read_responses(path: Path) -> Iterator[Response]:
    """Read what :func:`write_responses` wrote, a batch at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(1024):
            yield from (Response(**record) for record in batch.to_pylist())


def open_responses(folder: Path, name: str) -> tuple[Manifest, list[Path]]:
    """Verify the answers of source ``name``.

    Returns:
        the manifest, and the files: of :class:`Response` where ``facts["answers"]`` is ``generate``, and of
        conversations, as curated, where it is ``keep``.
    """
    manifest = open_artifact(folder, "responses", f"dvc repro respond@{name}")
    return manifest, [folder / file for file in sorted(manifest.files)]
