"""Row of a known shape -> conversations in OpenAI's message form.

A reader yields one :class:`Draft` a conversation, and raises :class:`UnusableRow` with a named reason for a row that
holds none; nothing is dropped without being counted.
"""

import json
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from foredraft.conversations.schema import ROLES
from foredraft.sources.config import RowShape


class UnusableRow(Exception):
    """A row that cannot become a conversation; the message is the counted reason."""


@dataclass(frozen=True)
class Draft:
    """A conversation before it has an id and a split."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    group: str = ""


def read_messages(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """OpenAI chat rows: ``messages`` (or ``input``), optional ``tools``."""
    messages = row.get("messages", row.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    tools = row.get("tools") or []
    yield Draft(normalise(messages), json.loads(tools) if isinstance(tools, str) else tools, _group(row, source))


def read_prompt(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """One user turn, made of the row's fields by ``source.template``."""
    template = source.template or ""
    fields = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    if missing := sorted(fields - row.keys()):
        raise UnusableRow(f"no_field_{missing[0]}")
    text = template.format_map({name: row[name] for name in fields})
    yield Draft(normalise([{"role": "user", "content": text}]), group=_group(row, source))


def read_bfcl(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """Berkeley Function Calling Leaderboard: the first turn of ``question``, schemas in ``function``."""
    turns = row.get("question")
    if not isinstance(turns, list) or not turns or not turns[0]:
        raise UnusableRow("no_question")
    tools = [{"type": "function", "function": schema} for schema in row.get("function") or []]
    yield Draft(normalise(turns[0]), tools, _group(row, source))


def read_traces(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """A recorded agent trace: one prompt for each assistant turn, with as much history as ``window_chars`` holds.

    Whole messages only; a turn whose last message alone is longer than the window is passed over.
    """
    messages = normalise(row.get("messages"))
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    replies.append(len(messages))
    for reply in replies:
        window = _window(messages[:reply], source.window_chars or 0)
        if window and window[-1]["role"] != "assistant":
            yield Draft(window, group=_group(row, source))


def read_turns(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """The first user turn of a list of them (MT-Bench)."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise UnusableRow("no_turns")
    yield Draft(normalise([{"role": "user", "content": turns[0]}]), group=_group(row, source))


READERS: dict[str, Callable[[dict[str, Any], RowShape], Iterator[Draft]]] = {
    "messages": read_messages,
    "prompt": read_prompt,
    "bfcl": read_bfcl,
    "traces": read_traces,
    "turns": read_turns,
}


def normalise(messages: Any) -> list[dict[str, Any]]:
    """Check roles and turn null or absent content into the empty string; every other field is kept.

    Raises:
        UnusableRow: not a list of messages, or a role that no template knows.
    """
    if not isinstance(messages, list) or not messages:
        raise UnusableRow("no_messages")
    clean = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UnusableRow("unknown_role")
        content = message.get("content")
        if not isinstance(content, str | type(None)):
            raise UnusableRow("content_not_text")
        kept = {key: value for key, value in message.items() if value is not None}
        clean.append({**kept, "content": content or ""})
    return _one_system_message(clean)


def _one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join system messages that follow each other; where nobody but the system speaks last, it is the user's turn."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "system" and message is not messages[-1]:
            joined[-1] = {"role": "system", "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    if joined[-1]["role"] == "system":
        joined[-1] = {**joined[-1], "role": "user"}
    return joined


def _window(messages: list[dict[str, Any]], budget: int) -> list[dict[str, Any]]:
    start, used = len(messages), 0
    while start and used + len(messages[start - 1]["content"]) <= budget:
        start -= 1
        used += len(messages[start]["content"])
    return messages[start:]


def _group(row: dict[str, Any], source: RowShape) -> str:
    return str(row[source.group]) if source.group and source.group in row else ""
