"""Messages in OpenAI's form, whatever wrote them; and the words that they say."""

import re
from typing import Any

from foredraft.conversations.schema import ROLES

OPENAI_ROLES = {"developer": "system", "function": "tool"}
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
"""Scripts that put no space between words: each of their letters counts as a word."""
PIECE = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")


def pieces_of(text: str) -> list[str]:
    """Lower-case words, and every other mark alone: `2 + 3` is not `2 - 3`."""
    return PIECE.findall(text.lower())


def words_among(pieces: list[str]) -> list[str]:
    """The words alone."""
    return [piece for piece in pieces if piece[0].isalnum() or piece[0] == "_"]


class UnusableRow(Exception):
    """A row that cannot become a conversation; the message is the counted reason."""


def normalise(messages: Any) -> list[dict[str, Any]]:
    """Check roles, turn null or absent content into the empty string, and keep the fields that templates read.

    Raises:
        UnusableRow: not a list of messages, a role that no template knows, content that is no text, a call that is none.
    """
    if not isinstance(messages, list) or not messages:
        raise UnusableRow("no_messages")
    clean = []
    for message in messages:
        role = str(message.get("role")) if isinstance(message, dict) else ""
        if (role := OPENAI_ROLES.get(role, role)) not in ROLES:
            raise UnusableRow("unknown_role")
        content = _text(message.get("content"))
        if not isinstance(content, str | type(None)):
            raise UnusableRow("content_not_text")
        clean.append({"role": role, "content": content or "", **_what_templates_read(message)})
    return _one_system_message(clean)


def _what_templates_read(message: dict[str, Any]) -> dict[str, Any]:
    """The other fields of a message that templates know, OpenAI's older ``function_call`` as a tool call; nothing else."""
    kept = {key: message[key] for key in ("name", "tool_call_id") if message.get(key) is not None}
    if isinstance(message.get("reasoning_content"), str):
        kept["reasoning_content"] = message["reasoning_content"]
    calls = message.get("tool_calls") or []
    if message.get("function_call"):
        calls = [{"type": "function", "function": message["function_call"]}]
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise UnusableRow("not_a_tool_call")
    return {**kept, "tool_calls": calls} if calls else kept


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and "name" in function


def _text(content: Any) -> Any:
    """Text of a list of content parts, if all are text; anything else as it is."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


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
