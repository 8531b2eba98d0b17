"""The canonical conversation, and its Parquet form.

Messages and tools travel as JSON text: Arrow would give one struct to a whole column, and so invent nulls or refuse
rows whose tool arguments differ in type.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """One conversation in OpenAI's message form, with where it came from.

    ``group`` names what must stay on one side of the train/validation split (a trace, or the row itself); ``row`` is the
    position in the raw data, for messages about it.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    kind: str
    origin: str
    licence: str
    split: str
    group: str
    row: int


SCHEMA = pa.schema(
    [("row", pa.int64())]
    + [(name, pa.string()) for name in ("id", "messages", "tools", "kind", "origin", "licence", "split", "group")]
)


def conversation_id(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """Hash of what the model will see: equal conversations have equal ids, on every machine."""
    body = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(body.encode()).hexdigest()[:24]


def write_conversations(rows: list[Conversation], path: Path) -> None:
    """Write rows as Parquet, in the order given."""
    records = [
        {
            **asdict(row),
            "messages": json.dumps(row.messages, ensure_ascii=False),
            "tools": json.dumps(row.tools, ensure_ascii=False),
        }
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(records, schema=SCHEMA), path)


def read_conversations(path: Path) -> list[Conversation]:
    """Read what :func:`write_conversations` wrote."""
    return [
        Conversation(**{**record, "messages": json.loads(record["messages"]), "tools": json.loads(record["tools"])})
        for record in pq.read_table(path).to_pylist()
    ]
