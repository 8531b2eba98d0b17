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


Reader = Callable[[dict[str, Any], RowShape], Iterator[Draft]]


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


def read_sharegpt(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """ShareGPT rows: ``conversations`` of ``from`` and ``value``, or of ``role`` and ``content``; optional ``system``."""
    turns = row.get("conversations", row.get("conversation"))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow("no_messages")
    messages = [
        {"role": SHAREGPT_ROLES.get(role := turn.get("from", turn.get("role")), role), "content": _said(turn)}
        for turn in turns
    ]
    yield Draft(normalise(_with_system(row, messages)), group=_group(row, source))


def read_alpaca(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """Alpaca rows: ``instruction``, with ``input`` behind it where there is one, and ``output``; optional ``system``."""
    if not isinstance(row.get("instruction"), str):
        raise UnusableRow("no_field_instruction")
    asked = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
    yield Draft(normalise(_with_system(row, _exchange(asked, row.get("output")))), group=_group(row, source))


def read_pairs(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """A question and its answer under any of their usual names, or a question alone."""
    question = next((row[name] for name in QUESTIONS if isinstance(row.get(name), str)), None)
    if question is None:
        raise UnusableRow("no_question")
    answer = next((row[name] for name in ANSWERS if row.get(name)), None)
    yield Draft(normalise(_with_system(row, _exchange(question, answer))), group=_group(row, source))


def read_auto(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """Read a row by the reader that its fields name."""
    for fields, reader in SHAPES:
        if any(field in row for field in fields):
            yield from reader(row, source)
            return
    raise UnusableRow("unknown_shape")


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


SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
QUESTIONS = ("prompt", "question", "query", "problem")
ANSWERS = ("response", "completion", "answer", "solution")
SHAPES: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("messages",), read_messages),
    (("conversations", "conversation"), read_sharegpt),
    (("instruction",), read_alpaca),
    (QUESTIONS, read_pairs),
)
"""Fields that give a row's shape away, and its reader."""

READERS: dict[str, Reader] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
    "pairs": read_pairs,
    "auto": read_auto,
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
        content = _text(message.get("content"))
        if not isinstance(content, str | type(None)):
            raise UnusableRow("content_not_text")
        kept = {key: value for key, value in message.items() if value is not None}
        clean.append({**kept, "content": content or ""})
    return _one_system_message(clean)


def _text(content: Any) -> Any:
    """Text of a list of content parts, if all are text; anything else as it is."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def _said(turn: dict[str, Any]) -> Any:
    return turn.get("value", turn.get("content"))


def _exchange(question: str, answer: Any) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": question}]
    return [*asked, {"role": "assistant", "content": answer}] if answer else asked


def _with_system(row: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": row["system"]}, *messages] if row.get("system") else messages


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
