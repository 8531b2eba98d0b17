"""A conversation while it is being answered, turn by turn: each turn sees the target's own earlier answers."""

from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.chat.render import CLOSE, OPEN, Renderer, UnrenderablePrompt
from foredraft.conversations.schema import Conversation

PROMPT_END = 8
"""Tokens at the end of a prompt in which an opening tag is looked for."""


@dataclass(frozen=True)
class Answer:
    """What the target said to ``prompt_ids``; ``response_ids`` end with the end-of-turn token iff it stopped by itself."""

    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str


@dataclass
class Outcome:
    """The answers of one conversation, and why it went no further, if it did not come to its end."""

    id: str
    answers: list[Answer] = field(default_factory=list)
    stopped: str = ""
    asked: int = 0
    """Turns that there were to answer."""

    def to_json(self) -> dict[str, Any]:
        """For the log."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Outcome":
        """Parse :meth:`to_json`."""
        return cls(**{**record, "answers": [Answer(**answer) for answer in record["answers"]]})


class Dialogue:
    """Asks for the turns of one conversation, in order."""

    def __init__(self, row: Conversation, renderer: Renderer, tokenizer: Any, max_prompt_tokens: int):
        """``max_prompt_tokens``: a turn with a longer prompt ends the conversation."""
        self._row, self._renderer, self._tokenizer = row, renderer, tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._places = places_to_answer(row.messages) if row.input_ids is None else []
        self._said: list[str] = []
        self.outcome = Outcome(row.id, asked=len(self._places))
        self.prompt_ids: list[int] | None = None
        """What is to be answered next; None when the conversation has come to its end."""
        if row.input_ids is not None:
            self.outcome.asked, self.outcome.stopped = 1, "already_tokenised"
        self._next()

    def answer(self, response_ids: list[int], finish_reason: str) -> None:
        """Take in the answer to :attr:`prompt_ids`, and go on to the next turn."""
        assert self.prompt_ids is not None
        self.outcome.answers.append(Answer(self.prompt_ids, response_ids, finish_reason))
        said = self._tokenizer.decode(response_ids, skip_special_tokens=True)
        opened = opens_thinking(self._tokenizer.decode(self.prompt_ids[-PROMPT_END:])) or OPEN in said
        self._said.append(said)
        if opened and CLOSE not in said and len(self._said) < len(self._places):
            self.stop("after_unclosed_thinking")  # its thoughts would go into history as if they were its answer
        else:
            self._next()

    def stop(self, reason: str) -> None:
        """End the conversation here: the answer to :attr:`prompt_ids` cannot be used."""
        self.outcome.stopped, self.prompt_ids = reason, None

    def _next(self) -> None:
        turn = len(self._said)
        self.prompt_ids = None
        if turn == len(self._places):
            return
        try:
            prompt = self._renderer.prompt_ids(self._history(turn), self._row.tools)
        except UnrenderablePrompt as reason:
            self.outcome.stopped = str(reason)
            return
        if len(prompt) > self._max_prompt_tokens:
            self.outcome.stopped = "prompt_too_long"
        else:
            self.prompt_ids = prompt

    def _history(self, turn: int) -> list[dict[str, Any]]:
        """The messages that turn ``turn`` answers, with the target's own answers in between."""
        history: list[dict[str, Any]] = []
        start = 0
        for place, said in zip(self._places[:turn], self._said, strict=False):
            history += [*self._row.messages[start:place], {"role": "assistant", "content": said}]
            start = place
        return [*history, *self._row.messages[start : self._places[turn]]]


def places_to_answer(messages: list[dict[str, Any]]) -> list[int]:
    """Numbers of messages behind which the target answers.

    Where nothing of an assistant is in the history: behind each of the user's. Otherwise it is a record, and only what
    follows its last message can be answered.
    """
    if any(message["role"] in {"assistant", "tool"} for message in messages):
        return [len(messages)]
    return [i + 1 for i, message in enumerate(messages) if message["role"] == "user"]


def opens_thinking(prompt_text: str) -> bool:
    """Whether a prompt ends with the opening tag, so that the answer begins inside of it."""
    return prompt_text.rstrip().endswith(OPEN)
