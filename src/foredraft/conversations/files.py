"""Raw data files -> rows, each a plain mapping, whatever the container.

A file is cut into chunks of whole rows. Cutting is cheap and done by one process; reading the rows of a chunk is not,
and is done by any.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from backports import zstd

TEXT_SUFFIXES = tuple(f"{kind}{packed}" for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst"))
DATA_SUFFIXES = (*TEXT_SUFFIXES, ".parquet", ".arrow", ".csv")
CHUNK_BYTES = 4 << 20
CHUNK_ROWS = 2000
UNREADABLE = (OSError, EOFError, zlib.error, zstd.ZstdError, pa.ArrowException)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
BOM = b"\xef\xbb\xbf"


class BrokenRow(Exception):
    """A line that is no row; the message is the counted reason."""


@dataclass(frozen=True)
class Chunk:
    """Some whole rows of a file.

    ``content`` is lines of JSON as bytes, or rows that had to be read to be cut; ``first`` is the position of the first,
    counted from 0 (lines: from 1).
    """

    file: str
    unit: str
    first: int
    content: bytes | list[Any]

    def rows(self) -> Iterator[tuple[str, dict[str, Any] | BrokenRow]]:
        """Yield each row with its place, such as ``x.jsonl line 3``; empty lines are none."""
        if isinstance(self.content, bytes):
            lines = enumerate(self.content.split(b"\n"), self.first)
            rows: Iterator[tuple[int, Any]] = ((number, _parse(line)) for number, line in lines if line.strip())
        else:
            rows = enumerate(self.content, self.first)
        for number, row in rows:
            fit = row if isinstance(row, dict | BrokenRow) else BrokenRow("not_an_object")
            yield f"{self.file} {self.unit} {number}", fit


def data_files(folder: Path) -> list[Path]:
    """The data files below ``folder``, sorted; not licences, the manifest, or notes of ``datasets``."""
    found = [path for path in folder.rglob("*") if path.name.lower().endswith(DATA_SUFFIXES)]
    arrow = {path.parent for path in found if path.suffix == ".arrow"}
    about = {parent / name for parent in arrow for name in ("state.json", "dataset_info.json")}
    return sorted(path for path in found if path.name != "manifest.json" and path not in about)


def read_rows(path: Path, key: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file, for small ones in which every row must be whole.

    Raises:
        ValueError: names the file, and the row or line that cannot be read.
    """
    for chunk in read_chunks(path, key):
        for place, row in chunk.rows():
            if isinstance(row, BrokenRow):
                raise ValueError(f"{path.parent / place}: {row}")
            yield row


def read_chunks(path: Path, key: str | None = None) -> Iterator[Chunk]:
    """Cut one file: JSON Lines or a JSON array, also ``.gz`` and ``.zst``; Parquet, Arrow, CSV.

    ``key`` names the list of rows in a file that is one JSON object.

    Whether a ``.json`` file holds lines or an array is seen from its first character, since both are found under either
    name. Lines are read as a stream; an array has to be held whole.

    Raises:
        ValueError: the file cannot be read as what its name says.
    """
    try:
        if path.suffix == ".parquet":
            yield from _rows_in_chunks(path, _parquet_rows(path))
        elif path.suffix == ".arrow":
            yield from _rows_in_chunks(path, _arrow_rows(path))
        elif path.suffix == ".csv":
            yield from _rows_in_chunks(path, _csv_rows(path))
        else:
            yield from _json_chunks(path, key)
    except UNREADABLE as error:
        raise ValueError(f"{path}: damaged, or not what its name says ({error})") from error


def _json_chunks(path: Path, key: str | None) -> Iterator[Chunk]:
    with _opened(path) as stream:
        head = stream.read(CHUNK_BYTES).removeprefix(BOM)
        if key is not None or head.lstrip()[:1] == b"[":
            rows = _whole(head + stream.read(), path, key)
            yield from _rows_in_chunks(path, iter(rows))
            return
        first, rest = 1, head
        while rest:
            # Lines end at \n alone: U+2028 and its kin are legal inside a JSON string.
            end = rest.rfind(b"\n") + 1
            if end:
                yield Chunk(path.name, "line", first, rest[:end])
                first += rest.count(b"\n", 0, end)
            more = stream.read(CHUNK_BYTES)
            if not more:
                if rest[end:]:
                    yield Chunk(path.name, "line", first, rest[end:])
                return
            rest = rest[end:] + more


def _opened(path: Path) -> Any:
    """The file's content, unpacked as it is read; one that is cut off raises at its end."""
    opener: Any = {".gz": gzip.open, ".zst": zstd.open}.get(path.suffix)
    if opener and path.stat().st_size == 0:
        raise EOFError("it is empty")
    return opener(path) if opener else path.open("rb")


def _whole(content: bytes, path: Path, key: str | None) -> list[Any]:
    try:
        rows = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: neither a JSON array of rows nor a row a line ({error})") from error
    if key is not None:
        if not isinstance(rows, dict) or key not in rows:
            raise ValueError(f"{path}: has no rows under the key {key!r}")
        rows = rows[key]
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, found {type(rows).__name__}")
    return rows


def _rows_in_chunks(path: Path, rows: Iterator[Any]) -> Iterator[Chunk]:
    held: list[Any] = []
    first = 0
    for row in rows:
        held.append(row)
        if len(held) == CHUNK_ROWS:
            yield Chunk(path.name, "row", first, held)
            first, held = first + len(held), []
    if held:
        yield Chunk(path.name, "row", first, held)


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(CHUNK_ROWS):
            yield from batch.to_pylist()


def _arrow_rows(path: Path) -> Iterator[Any]:
    """An Arrow IPC stream, as ``datasets`` writes it, or an IPC file, as Feather does."""
    with path.open("rb") as end:
        end.seek(-min(8, path.stat().st_size), 2)
        if not end.read().endswith((END_OF_STREAM, b"ARROW1")):
            raise EOFError("it has no end")
    with pa.memory_map(str(path)) as source:
        try:
            batches: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()


def _csv_rows(path: Path) -> Iterator[Any]:
    import pandas as pd

    try:
        for table in pd.read_csv(path, dtype=str, keep_default_na=False, chunksize=CHUNK_ROWS):
            yield from ({str(key): value for key, value in row.items()} for row in table.to_dict("records"))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as CSV ({' '.join(str(error).split())})") from error


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return _parse_leniently(line)


def _parse_leniently(line: bytes) -> Any:
    """What Python's own parser takes and the fast one does not, such as NaN."""
    try:
        row = json.loads(line.decode("utf-8"))
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        return BrokenRow("not_utf8")
    except UnicodeEncodeError:  # "\ud800" alone is JSON, and no text
        return BrokenRow("half_a_surrogate_pair")
    except (json.JSONDecodeError, RecursionError):
        return BrokenRow("not_json")
    return row
