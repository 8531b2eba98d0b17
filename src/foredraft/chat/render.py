"""Conversation -> the text and token ids that a server would see before the assistant's turn.

The target's own chat template renders; what a template cannot express is put into text by a rule that is named in the
contract, never dropped.
"""

import json
import re
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from foredraft.chat.tokens import TextTokenizer

PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
}
PROBE = [{"role": "user", "content": "probe"}]
PROBE_CALL = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": {"key": "probe"}}}
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
OPEN, CLOSE = "<think>", "</think>"


class UnrenderablePrompt(Exception):
    """The template refuses this conversation; the message is the counted reason."""


class Renderer:
    """Renders conversations for one tokenizer.

    Attributes:
        tools_as: ``template`` if the template shows the tools it is given, ``system_text`` if it ignores them: then the
            schemas are written into the system message.
        calls_as: ``template``, or ``text`` if the template ignores the tool calls of earlier turns: then they stand as JSON
            behind a turn's content.
        reasoning_as: ``template`` if the template shows ``reasoning_content``, ``think_tags`` if it does not: then it
            stands between the tags before the content.
        appends: whether a plain turn is told as it was when it was the last, once others follow.
        has_generation_tags: whether the template marks the assistant's words itself.
        tokens: tokenises what was rendered.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: bool):
        self._tokenizer: Any = tokenizer
        self.tokens = TextTokenizer(tokenizer)
        self._thinking = thinking
        said: dict[str, Any] = {"role": "assistant", "content": "probe"}
        plain = self._probed([*PROBE, said])
        self.tools_as = (
            "template" if self._probed(PROBE, [PROBE_TOOL]) not in {None, self._probed(PROBE)} else "system_text"
        )
        calling = self._probed([*PROBE, {**said, "tool_calls": [PROBE_CALL]}])
        self.calls_as = "template" if calling not in {None, plain} else "text"
        reasoning = self._probed([*PROBE, {**said, "reasoning_content": "because"}])
        self.reasoning_as = "template" if reasoning not in {None, plain} else "think_tags"
        whole = self._probed([*PROBE, said, *PROBE, said])
        self.appends = None not in {plain, whole} and str(whole).startswith(str(plain))
        self._thinks = self.reasoning_as == "template" or CLOSE in tokenizer.get_vocab()
        self.has_generation_tags = bool(GENERATION_TAG.search(str(tokenizer.chat_template)))
        self._control_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= {str(tokenizer.eos_token)} - {"", "None"}  # it may be an added token like any other
        self._control_tokens = re.compile("|".join(map(re.escape, sorted(special))) or "(?!)")

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of the history and the opening of the assistant's turn.

        Raises:
            UnrenderablePrompt: the template raises (roles out of order, ...), or text inside a message is read as a
                control token.
        """
        return self.tokens.ids(self.text(*self.fitted(messages, tools), opening=True))

    def fitted(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Messages and tools as this template can show them.

        Raises:
            UnrenderablePrompt: text inside a message would be read as a control token.
        """
        if any(self._has_control_token(message) for message in messages) or any(map(self._has_control_token, tools)):
            raise UnrenderablePrompt("control_token_in_text")
        if tools and self.tools_as == "system_text":
            messages, tools = with_tools_in_system(messages, tools), []
        return [self._fitted(turn) if turn["role"] == "assistant" else turn for turn in messages], tools

    def _has_control_token(self, part: dict[str, Any]) -> bool:
        """Whether any text of a message or of a schema would be read as one."""
        text = part["content"] if part.keys() == {"role", "content"} else json.dumps(part, ensure_ascii=False)
        return self._control_tokens.search(text) is not None

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._thinks:  # to any other target the tags are words like others
            message = with_reasoning_apart(message)
        if self.reasoning_as == "think_tags" and "reasoning_content" in message:
            reasoning = message["reasoning_content"]
            message = {key: value for key, value in message.items() if key != "reasoning_content"}
            message["content"] = f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{message['content']}"
        if message.get("tool_calls"):
            message = with_argument_objects(message)
            return message if self.calls_as == "template" else with_calls_in_text(message)
        return message

    def text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], opening: bool) -> str:
        """Render what :meth:`fitted` gave, with or without the opening of the assistant's turn behind it.

        Raises:
            UnrenderablePrompt: the template raises.
        """
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=opening,
                tokenize=False,
                enable_thinking=self._thinking,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise UnrenderablePrompt("template_refuses") from error

    def is_control(self, token: int) -> bool:
        """Whether a token id is a control token."""
        return token in self._control_ids

    def generation_mask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """The mask that the template's own generation tags give, one bit for each token of the rendering."""
        rendered = self._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            enable_thinking=self._thinking,
        )
        return rendered["assistant_masks"]

    def end_id(self, end_ids: list[int]) -> int:
        """The one of several end-of-turn tokens that the template writes behind an answer."""
        text = self._probed([*PROBE, {"role": "assistant", "content": "probe"}]) or ""
        written = [token for token in self.tokens.ids(text) if token in end_ids]
        return written[-1] if written else end_ids[0]

    def _probed(self, messages: list[dict[str, Any]], tools: Any = ()) -> str | None:
        """A rendering, or None where the template refuses it."""
        try:
            return self.text(messages, list(tools), opening=False)
        except UnrenderablePrompt:
            return None


def with_tools_in_system(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write tool schemas into the system message, for templates that ignore ``tools``."""
    schemas = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = f"You can call these functions. Answer with a JSON object that has name and arguments.\n{schemas}"
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_in_text(message: dict[str, Any]) -> dict[str, Any]:
    """Put an assistant turn's tool calls as JSON behind its content, for templates that ignore them."""
    calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in message["tool_calls"]]
    return {**message, "content": "\n".join(filter(None, [message["content"], *calls]))}


def with_argument_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Tool calls with their arguments as objects, which templates expect; OpenAI's servers send them as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            try:
                function = {**function, "arguments": json.loads(function["arguments"])}
            except json.JSONDecodeError:
                raise UnrenderablePrompt("tool_call_not_json") from None
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def with_reasoning_apart(message: dict[str, Any]) -> dict[str, Any]:
    """Move what stands before a closing tag without an opening one out of the content.

    Where the opening tag is part of the prompt, an answer holds the closing one alone; a template would put a second,
    empty pair before it.
    """
    content = message["content"]
    if CLOSE not in content or OPEN in content or message.get("reasoning_content"):
        return message
    reasoning, _, answer = content.partition(CLOSE)
    return {**message, "reasoning_content": reasoning.strip("\n"), "content": answer.lstrip("\n")}
