"""A conversation in text -> documents: token ids, and where the assistant speaks.

The prefix rule: a turn is supervised only on the prefix that a server would have seen, the rendering of the turns before
it with the assistant's opening. One rendering of the whole conversation is used where that holds for every turn.
Where the template rewrites history (thinking is taken out of earlier turns) or a token crosses the border between the
opening and the answer, each turn becomes a document of its own.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from foredraft.chat.render import CLOSE, Renderer, UnrenderablePrompt
from foredraft.chat.tokens import Encoded

LONGEST_TAIL = 64
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Document:
    """Token ids, and the spans ``[start, end)`` of them that the target says itself, its end-of-turn token included."""

    ids: list[int]
    spans: list[tuple[int, int]]

    def mask(self) -> list[int]:
        """One bit for each token."""
        bits = [0] * len(self.ids)
        for start, end in self.spans:
            bits[start:end] = [1] * (end - start)
        return bits


class Supervisor:
    """Finds the assistant's words in conversations, for one tokenizer.

    Attributes:
        turns_left_out: assistant turns that no document supervises, since history was rewritten even for them alone.

    Args:
        end_ids: every token that ends the target's turn.
        bos_id: the token that a text must not begin with twice.
    """

    def __init__(self, renderer: Renderer, end_ids: list[int], bos_id: int | None):
        self._renderer = renderer
        self._ends = frozenset(end_ids)
        self._bos_id = bos_id
        self._endings: dict[str, list[int]] = {}
        self.turns_left_out = 0

    def documents(self, messages: Messages, tools: list[dict[str, Any]]) -> list[Document]:
        """Documents of a conversation, each with at least one supervised span.

        Raises:
            UnrenderablePrompt: the template refuses it, a mask cannot be proven, or the template's own generation tags
                mark other words.
        """
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        if not messages:
            raise UnrenderablePrompt("no_answer_to_keep")
        messages, tools = self._renderer.fitted(messages, tools)
        # What comes before anything was asked (a greeting) is context: no server is asked to say it.
        asked = next((i for i, turn in enumerate(messages) if turn["role"] == "user"), len(messages))
        turns = [i for i, turn in enumerate(messages) if turn["role"] == "assistant" and i > asked]
        if not turns:
            raise UnrenderablePrompt("no_answer_to_keep")
        if any(not (messages[i]["content"].strip() or messages[i].get("tool_calls")) for i in turns):
            raise UnrenderablePrompt("empty_answer")
        whole = self._renderer.text(messages, tools, opening=False)
        prefixes = [self._renderer.text(messages[:turn], tools, opening=True) for turn in turns]
        told = [self._told(messages, tools, turn, prefix, whole) for turn, prefix in zip(turns, prefixes, strict=True)]
        document = self._in_one(whole, prefixes) if all(told) else None
        if document is None:
            return self._one_a_turn(messages, tools, turns, prefixes)
        self._check_tags(document, messages, tools)
        return [document]

    def _told(self, messages: Messages, tools: list[dict[str, Any]], turn: int, prefix: str, whole: str) -> bool:
        """Whether the whole rendering has a turn where a server would have put it, and as it was when it was the last.

        A turn that is told otherwise once others follow was not generated like that.
        """
        if not whole.startswith(prefix):
            return False
        message = messages[turn]
        plain = message.keys() == {"role", "content"} and CLOSE not in message["content"]
        if plain and self._renderer.appends and whole.startswith(message["content"], len(prefix)):
            return True  # nothing but its words, and they stand there: no need to render it again
        return whole.startswith(self._renderer.text(messages[: turn + 1], tools, opening=False))

    def _in_one(self, whole: str, prefixes: list[str]) -> Document | None:
        """The rendering as one document, if no token crosses the border of any turn."""
        encoded = self._renderer.tokens.encode(whole)
        starts = []
        for prefix in prefixes:
            start = encoded.token_at(len(prefix.encode()))
            if start is None or not self._ends_alike(prefix, encoded, start):
                return None
            starts.append(start)
        ids = encoded.ids
        spans = [(start, self._end(ids, start, limit)) for start, limit in pairwise([*starts, len(ids)])]
        return self._checked(Document(ids[: spans[-1][1]], spans))

    def _ends_alike(self, prefix: str, encoded: Encoded, start: int) -> bool:
        """Whether the tokens before ``start`` are those of ``prefix`` alone: none came out otherwise for what follows.

        Control tokens cut a text before anything else happens to it, so only what follows the last one is compared.
        """
        if not self._renderer.tokens.by_width:  # a piece of text is not tokenised as it is behind others
            return encoded.ids[:start] == self._renderer.tokens.ids(prefix)
        control = next((i for i in range(start - 1, -1, -1) if self._renderer.is_control(encoded.ids[i])), -1)
        behind = int(encoded.begins[start] - encoded.begins[control + 1])
        tail = prefix.encode()[-behind:].decode() if behind else ""
        if len(tail) > LONGEST_TAIL:  # no header of the template's, but what somebody said
            return encoded.ids[control + 1 : start] == self._renderer.tokens.ids(tail)
        if tail not in self._endings:
            self._endings[tail] = self._renderer.tokens.ids(tail)
        return encoded.ids[control + 1 : start] == self._endings[tail]

    def _one_a_turn(
        self, messages: Messages, tools: list[dict[str, Any]], turns: list[int], prefixes: list[str]
    ) -> list[Document]:
        documents = []
        for turn, prefix in zip(turns, prefixes, strict=True):
            said = self._renderer.text(messages[: turn + 1], tools, opening=False)
            prompt = self._renderer.tokens.ids(prefix)
            answer = self._answer(said, prefix, prompt)
            if answer is None:
                self.turns_left_out += 1  # even alone the turn is not what a server would have gone on with
                continue
            end = self._end(answer, 0, len(answer))
            document = Document(prompt + answer[:end], [(len(prompt), len(prompt) + end)])
            documents.append(self._checked(document))
            if (
                document.ids == self._renderer.tokens.ids(said)[: len(document.ids)]
            ):  # else its tags are of other tokens
                self._check_tags(document, messages[: turn + 1], tools)
        if not documents:
            raise UnrenderablePrompt("not_on_the_served_prefix")
        return documents

    def _answer(self, said: str, prefix: str, prompt: list[int]) -> list[int] | None:
        """Token ids of the turn that ``said`` ends with, as they follow ``prompt``; None if they do not."""
        if not said.startswith(prefix):
            return None
        if self._renderer.tokens.by_width:
            return self._renderer.tokens.ids(said[len(prefix) :])
        encoded = self._renderer.tokens.encode(said)
        start = encoded.token_at(len(prefix.encode()))
        return encoded.ids[start:] if start is not None and encoded.ids[:start] == prompt else None

    def _end(self, ids: list[int], start: int, limit: int) -> int:
        """Behind the first token that ends a turn: what follows it the template writes, not the target."""
        end = next((i for i in range(start, limit) if ids[i] in self._ends), None)
        if end is None:
            raise UnrenderablePrompt("no_end_of_turn")
        return end + 1

    def _checked(self, document: Document) -> Document:
        if self._bos_id is not None and document.ids[:2] == [self._bos_id] * 2:
            raise UnrenderablePrompt("doubled_bos")
        supervised = sum(end - start for start, end in document.spans)
        if not 0 < supervised < len(document.ids):
            raise UnrenderablePrompt("mask_all_ones" if supervised else "mask_all_zeros")
        return document

    def _check_tags(self, document: Document, messages: Messages, tools: list[dict[str, Any]]) -> None:
        """Compare with the template's own marks, if it has any.

        They may leave out the end-of-turn token, which the target says all the same, and take in what the template writes
        behind it.
        """
        if not self._renderer.has_generation_tags:
            return
        tags = self._renderer.generation_mask(messages, tools)
        limits = [*(start for start, _ in document.spans[1:]), len(tags)]
        for (start, end), limit in zip(document.spans, limits, strict=True):
            marked = [i for i in range(start, limit) if tags[i]]
            if (
                marked[:1] != [start]
                or marked != list(range(start, start + len(marked)))
                or len(marked) < end - start - 1
            ):
                raise UnrenderablePrompt("generation_tags_disagree")
