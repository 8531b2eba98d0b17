"""Named reasons for leaving a conversation out, each seen from the conversation alone."""

import json
import re
from collections.abc import Iterable
from typing import Any

from foredraft.conversations.config import CurateConfig
from foredraft.conversations.messages import pieces_of, words_among
from foredraft.conversations.readers import Draft

LANGUAGE_CHARS = 2000
"""A language shows in this much text; the whole would only cost time."""
TELLING_CHARS = 40
"""In fewer letters it does not show."""


def prompt_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """All that is said, in words, thoughts and calls, and the tools' schemas: for lengths and patterns."""
    parts: list[str] = []
    for message in messages:
        parts += filter(None, [message["content"], message.get("reasoning_content")])
        parts += [json.dumps(call, sort_keys=True, ensure_ascii=False) for call in message.get("tool_calls", [])]
    return "\n".join([*parts, *(json.dumps(tool, sort_keys=True, ensure_ascii=False) for tool in tools)])


class HeldOut:
    """Finds runs of ``n`` words that a text shares with benchmark prompts.

    A prompt that is shorter than ``n`` words counts as one run, and so does a text.
    """

    def __init__(self, prompts: Iterable[str], n: int):
        self._n = n
        self._runs: set[str] = set()
        self._words: set[str] = set()
        for words in (words_among(pieces_of(prompt)) for prompt in prompts):
            self._words.update(words)
            self._runs.update(" ".join(words[i : i + n]) for i in range(max(1, len(words) - n + 1)) if words)

    def shares_a_run(self, words: list[str]) -> bool:
        """Whether a text, given as its words, has a run in common with a prompt."""
        n = self._n
        if len(words) < n:
            return bool(words) and " ".join(words) in self._runs
        # Runs are put together only where every word is a benchmark's: seldom, so most texts cost a look-up a word.
        known = "".join(["1" if word in self._words else "0" for word in words])
        start = known.find("1" * n)
        while start >= 0:
            if " ".join(words[start : start + n]) in self._runs:
                return True
            start = known.find("1" * n, start + 1)
        return False


class Filters:
    """Decides on drafts, whatever their order."""

    def __init__(self, config: CurateConfig, benchmark_prompts: Iterable[str]):
        self._config = config
        self._held_out = HeldOut(benchmark_prompts, config.contamination_words)
        self._patterns = {reason: re.compile(pattern) for reason, pattern in config.drop_matching.items()}

    def reason_to_drop(self, draft: Draft) -> str | None:
        """The first reason that applies, or None to keep the draft.

        A row that came tokenised has no text to look at: nothing but its own masks and the limits on tokens decide on it.
        """
        if draft.ids is not None:
            return None
        text = prompt_text(draft.messages, draft.tools)
        if not any(message["role"] == "user" and message["content"].strip() for message in draft.messages):
            return "no_user_turn"
        if len(text) < self._config.min_prompt_chars:
            return "too_short"
        if len(text) > self._config.max_prompt_chars:
            return "too_long"
        if self._config.languages is not None and _language(draft.messages) not in {None, *self._config.languages}:
            return "other_language"
        for reason, pattern in self._patterns.items():
            if pattern.search(text):
                return reason
        if any(self._held_out.shares_a_run(words_among(pieces)) for pieces in draft.pieces):
            return "contaminated"
        return None


def _language(messages: list[dict[str, Any]]) -> str | None:
    """The likeliest language of what the user says; None where that is too little to tell."""
    import py3langid

    said = "\n".join(message["content"] for message in messages if message["role"] == "user")
    return py3langid.classify(said[:LANGUAGE_CHARS])[0] if len(said) >= TELLING_CHARS else None
