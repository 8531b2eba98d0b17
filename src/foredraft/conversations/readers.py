"""Row of a known shape -> conversations in OpenAI's message form.

A reader yields one :class:`Draft` a conversation, and raises :class:`UnusableRow` with a named reason for a row that
holds none (or yields it, where the row holds others); nothing is dropped without being counted.
"""

import hashlib
import json
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foredraft.conversations.messages import UnusableRow, normalise, pieces_of
from foredraft.sources.config import RowShape


@dataclass(frozen=True)
class Draft:
    """A conversation before it has an id and a split.

    ``recorded``: the assistant's earlier turns are part of what happened, so only the turn behind the last message can be
    answered anew. ``ids`` and ``mask``: a row that came tokenised, which has no messages.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    group: str = ""
    recorded: bool = False
    ids: list[int] | None = None
    mask: list[int] | None = None

    @cached_property
    def pieces(self) -> list[list[str]]:
        """Words and marks of each message."""
        return [pieces_of(message["content"]) for message in self.messages]


Reader = Callable[[dict[str, Any], RowShape], Iterator[Draft | UnusableRow]]


def read_messages(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """OpenAI chat rows: ``messages`` (or ``input``), optional ``tools``."""
    messages = _from_json(row.get("messages") or row.get("input"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise UnusableRow("no_messages")
    yield Draft(normalise(_with_system(row, messages)), _tools(row), _group(row, source))


def read_prompt(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """One user turn, made of the row's fields by ``source.template``."""
    template = source.template or ""
    fields = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    if missing := sorted(fields - row.keys()):
        raise UnusableRow(f"no_field_{missing[0]}")
    if empty := sorted(name for name in fields if row[name] is None):
        raise UnusableRow(f"nothing_in_field_{empty[0]}")
    text = template.format_map({name: row[name] for name in fields})
    yield Draft(normalise([{"role": "user", "content": text}]), group=_group(row, source))


def read_sharegpt(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """ShareGPT rows: ``conversations`` of ``from`` and ``value``, or of ``role`` and ``content``; optional ``system``."""
    turns = _from_json(row.get("conversations") or row.get("conversation"))
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow("no_messages")
    messages = [_sharegpt_message(turn) for turn in turns]
    yield Draft(normalise(_with_system(row, messages)), _tools(row), _group(row, source))


def read_alpaca(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """Alpaca rows: ``instruction``, ``input``, ``output``; Dolly's: ``instruction``, ``context``, ``response``."""
    if not isinstance(row.get("instruction"), str):
        raise UnusableRow("no_field_instruction")
    parts = [row["instruction"], row.get("input") or row.get("context") or ""]
    if not all(isinstance(part, str) for part in parts):
        raise UnusableRow("field_not_text")
    asked = "\n\n".join(filter(None, parts))
    answered = _exchange(asked, row.get("output") or row.get("response"))
    yield Draft(normalise(_with_system(row, answered)), _tools(row), _group(row, source))


def read_pairs(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """A question and its answer under any of their usual names, or a question alone; either may be a list of messages."""
    question = next(
        (row[name] for name in QUESTIONS if isinstance(row.get(name), str) or _is_messages(row.get(name))), None
    )
    if question is None:
        raise UnusableRow("no_question")
    answer = next((row[name] for name in ANSWERS if row.get(name)), None)
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    if answer is not None:
        messages = [*messages, *(answer if _is_messages(answer) else [{"role": "assistant", "content": answer}])]
    yield Draft(normalise(_with_system(row, messages)), _tools(row), _group(row, source))


def read_tokens(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """A row that came tokenised: ``input_ids`` with ``loss_mask``, or with ``labels`` that are -100 where no loss is."""
    ids, mask = _integers(row.get("input_ids")), _integers(row.get("loss_mask"))
    if not mask:
        mask = [int(label != IGNORED) for label in _integers(row.get("labels"))]
    if not ids or min(ids) < 0 or max(ids) >= 2**31:
        raise UnusableRow("no_token_ids")
    if not mask or not set(mask) <= {0, 1}:
        raise UnusableRow("no_loss_mask")
    if len(ids) != len(mask):
        raise UnusableRow("ids_and_mask_of_different_length")
    if len(set(mask)) == 1:
        raise UnusableRow("mask_all_ones" if mask[0] else "mask_all_zeros")
    yield Draft([], group=_group(row, source), ids=ids, mask=mask)


def read_auto(row: dict[str, Any], source: RowShape) -> Iterator[Draft | UnusableRow]:
    """Read a row by the reader that its fields name."""
    for fields, reader in SHAPES:
        if any(row.get(field) is not None for field in fields):
            yield from reader(row, source)
            return
    raise UnusableRow("unknown_shape")


def read_bfcl(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """Berkeley Function Calling Leaderboard: the first turn of ``question``, schemas in ``function``."""
    turns = row.get("question")
    if not isinstance(turns, list) or not turns or not turns[0]:
        raise UnusableRow("no_question")
    tools = [{"type": "function", "function": schema} for schema in row.get("function") or []]
    yield Draft(normalise(turns[0]), tools, _group(row, source), recorded=True)


def read_traces(row: dict[str, Any], source: RowShape) -> Iterator[Draft | UnusableRow]:
    """A recorded agent trace: one prompt for each assistant turn, with as much history as ``window_chars`` holds.

    Whole messages only; a turn whose last message alone is longer than the window is left out.
    """
    messages = normalise(row.get("messages"))
    # Without a field that says so, a trace belongs together: its windows overlap.
    group = _group(row, source) or hashlib.sha256(repr(messages).encode()).hexdigest()
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    replies.append(len(messages))
    for reply in replies:
        asked = messages[:reply]
        window = _window(asked, source.window_chars or 0)
        if asked and asked[-1]["role"] != "assistant" and not window:
            yield UnusableRow(TOO_LONG_FOR_WINDOW)
        elif window and window[-1]["role"] != "assistant":
            yield Draft(window, _tools(row), group, recorded=True)


def read_turns(row: dict[str, Any], source: RowShape) -> Iterator[Draft]:
    """The first user turn of a list of them (MT-Bench)."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise UnusableRow("no_turns")
    yield Draft(normalise([{"role": "user", "content": turns[0]}]), group=_group(row, source))


SHAREGPT_ROLES = {
    "human": "user",
    "observation": "tool",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant"),
}
IGNORED = -100
QUESTIONS = ("prompt", "question", "query", "problem")
ANSWERS = ("response", "completion", "solution", "answer")
TOO_LONG_FOR_WINDOW = "longer_than_window"
SHAPES: tuple[tuple[tuple[str, ...], Reader], ...] = (
    (("input_ids",), read_tokens),
    (("messages",), read_messages),
    (("conversations", "conversation"), read_sharegpt),
    (("instruction",), read_alpaca),
    (QUESTIONS, read_pairs),
    (("input",), read_messages),
)
"""Fields that give a row's shape away, and its reader."""

READERS: dict[str, Reader] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
    "pairs": read_pairs,
    "tokens": read_tokens,
    "auto": read_auto,
    "prompt": read_prompt,
    "bfcl": read_bfcl,
    "traces": read_traces,
    "turns": read_turns,
}


def _sharegpt_message(turn: dict[str, Any]) -> dict[str, Any]:
    role, said = str(turn.get("from", turn.get("role"))), turn.get("value", turn.get("content"))
    if role == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": _calls(said)}
    extra: dict[str, Any] = {
        key: turn[key] for key in ("tool_calls", "tool_call_id", "name", "reasoning_content") if key in turn
    }
    return {**extra, "role": SHAREGPT_ROLES.get(role, role), "content": said}


def _calls(text: Any) -> list[dict[str, Any]]:
    """Tool calls that are written as JSON text: one object, or a list of them."""
    try:
        calls = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError:
        raise UnusableRow("tool_call_not_json") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise UnusableRow("tool_call_not_json")
    return [{"type": "function", "function": call} for call in calls]


def _tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Tool schemas of a row, as a list or as JSON text, each in OpenAI's envelope."""
    tools = row.get("tools") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except json.JSONDecodeError:
        raise UnusableRow("tools_not_json") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UnusableRow("tools_not_json")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _from_json(value: Any) -> Any:
    """What a cell that can hold only text holds, where that is JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)


def _integers(value: Any) -> list[int]:
    """A list of integers as such, anything else as none."""
    return [int(item) for item in value] if isinstance(value, list) and all(isinstance(i, int) for i in value) else []


def _exchange(question: str, answer: Any) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": question}]
    return [*asked, {"role": "assistant", "content": answer}] if answer else asked


def _with_system(row: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": row["system"]}, *messages] if row.get("system") else messages


def _window(messages: list[dict[str, Any]], budget: int) -> list[dict[str, Any]]:
    start, used = len(messages), 0
    while start and used + len(messages[start - 1]["content"]) <= budget:
        start -= 1
        used += len(messages[start]["content"])
    return messages[start:]


def _group(row: dict[str, Any], source: RowShape) -> str:
    if source.group and row.get(source.group) is None:
        raise UnusableRow(f"no_field_{source.group}")
    return str(row[source.group]) if source.group else ""
