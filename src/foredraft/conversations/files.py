"""Raw data files -> rows, each a plain mapping, whatever the container."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".arrow", ".csv")


def data_files(folder: Path) -> list[Path]:
    """The data files below ``folder``, sorted; licences and the manifest are not data."""
    return sorted(
        path for path in folder.rglob("*") if path.name.endswith(DATA_SUFFIXES) and path.name != "manifest.json"
    )


def read_rows(path: Path, key: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of one file: JSON Lines, a JSON array, Parquet, Arrow or CSV; ``.gz`` of the first two.

    ``key`` names the list of rows in a file that is one JSON object.

    Whether a ``.json`` file holds lines or an array is seen from its first character, since both are found under
    either name. Lines end at ``\\n`` alone: U+2028 and its kin are legal inside a JSON string.

    Raises:
        ValueError: names the file and line that cannot be read.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(path).to_pylist()
    elif path.suffix == ".arrow":
        from datasets import Dataset

        yield from Dataset.from_file(str(path))
    elif path.suffix == ".csv":
        import pandas as pd

        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        yield from ({str(key): value for key, value in row.items()} for row in table.to_dict("records"))
    else:
        yield from _read_json(path, key)


def _read_json(path: Path, key: str | None) -> Iterator[dict[str, Any]]:
    try:
        text = _decompressed(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    if key is not None or text.lstrip()[:1] == "[":
        rows = _parse_whole(text, path, key)
    else:
        rows = (_parse_line(line, path, number) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} is {type(row).__name__}, expected an object")
        yield row


def _parse_whole(text: str, path: Path, key: str | None) -> Any:
    try:
        content = json.loads(text)
        return content if key is None else content[key]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    except (KeyError, TypeError):
        raise ValueError(f"{path}: has no rows under the key {key!r}") from None


def _decompressed(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: not a complete gzip file ({error})") from error


def _parse_line(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {number} is not JSON ({error})") from error
