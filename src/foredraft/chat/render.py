"""Conversation -> the token ids that a server would see before the assistant's turn.

The target's own chat template renders; what a template cannot express is put into text by a rule that is named in the
contract, never dropped.
"""

import json
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}
PROBE = [{"role": "user", "content": "probe"}]
PROBE_CALL = {"type": "function", "id": "call_0", "function": {"name": "probe", "arguments": {"key": "probe"}}}


class UnrenderablePrompt(Exception):
    """The template refuses this conversation; the message is the counted reason."""


class Renderer:
    """Renders prompts for one tokenizer.

    Attributes:
        tools_as: ``template`` if the template shows the tools it is given, ``system_text`` if it ignores them: then the
            schemas are written into the system message. Tool calls of earlier turns are treated likewise.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool):
        self._tokenizer: Any = tokenizer
        self._thinking = thinking
        self.tools_as = "template" if self._text(PROBE, [PROBE_TOOL]) != self._text(PROBE, []) else "system_text"
        silent: list[dict[str, Any]] = [*PROBE, {"role": "assistant", "content": ""}]
        calling: list[dict[str, Any]] = [*PROBE, {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}]
        self._calls_in_template = self._text(silent, []) != self._text(calling, [])
        added = tokenizer.added_tokens_decoder.values()
        self._control_tokens = {str(token) for token in added if token.special}

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of the history and the opening of the assistant's turn.

        Raises:
            UnrenderablePrompt: the template raises (roles out of order, ...), or text inside a message is read as a
                control token.
        """
        if tools and self.tools_as == "system_text":
            messages, tools = with_tools_in_system(messages, tools), []
        if not self._calls_in_template:
            messages = [with_calls_in_text(message) for message in messages]
        try:
            text = self._text(messages, tools)
        except (TemplateError, TypeError, ValueError) as error:
            raise UnrenderablePrompt("template_refuses") from error
        if any(self._has_control_token(message["content"]) for message in messages):
            raise UnrenderablePrompt("control_token_in_text")
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer_ids(self, content: str) -> list[int]:
        """Token ids of a text answer and the end-of-turn token, as they follow :meth:`prompt_ids`."""
        ids = self._tokenizer(content, add_special_tokens=False)["input_ids"]
        return [*ids, self._tokenizer.eos_token_id]

    def _text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=self._thinking,
        )

    def _has_control_token(self, text: str) -> bool:
        return any(token in text for token in self._control_tokens)


def with_tools_in_system(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write tool schemas into the system message, for templates that ignore ``tools``."""
    schemas = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = f"You can call these functions. Answer with a JSON object that has name and arguments.\n{schemas}"
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_in_text(message: dict[str, Any]) -> dict[str, Any]:
    """Give an assistant turn that holds nothing but tool calls their JSON as content, for templates that ignore them."""
    if message.get("tool_calls") and not message["content"]:
        return {
            **message,
            "content": "\n".join(json.dumps(call.get("function", call)) for call in message["tool_calls"]),
        }
    return message
