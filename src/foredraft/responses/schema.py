"""Answers as token ids, and their Parquet form."""

from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from foredraft.artifacts import Manifest, open_artifact

RESPONSES = "responses.parquet"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("split", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class Response:
    """One answered prompt.

    ``response_ids`` are used as generated and never rendered again; they end with the end-of-turn token if and only if
    ``finish_reason`` is ``stop`` (otherwise it is ``length``: none is invented).
    """

    id: str
    split: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str


def write_responses(rows: list[Response], path: Path) -> None:
    """Write rows as Parquet, in the order given."""
    with path.open("wb") as stream:
        pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA), stream)


def read_responses(path: Path) -> list[Response]:
    """Read what :func:`write_responses` wrote."""
    with path.open("rb") as stream:
        return [Response(**record) for record in pq.read_table(stream).to_pylist()]


def open_responses(folder: Path, name: str) -> tuple[Manifest, list[Response]]:
    """Verify and read the answers of source ``name``."""
    manifest = open_artifact(folder, "responses", f"dvc repro respond@{name}")
    return manifest, read_responses(folder / RESPONSES)
