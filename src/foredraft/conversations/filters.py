"""Named reasons for leaving a conversation out."""

import json
import re
from collections.abc import Iterable
from typing import Any

from foredraft.conversations.config import CurateConfig
from foredraft.conversations.readers import Draft

WORD = re.compile(r"\w+")


def prompt_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """All that a prompt says, tool schemas included, for lengths and overlaps."""
    parts = [message["content"] for message in messages]
    return "\n".join([*parts, *(json.dumps(tool, sort_keys=True) for tool in tools)])


def ngrams(text: str, n: int) -> set[str]:
    """Runs of ``n`` lower-case words; of a shorter text, the whole of it."""
    words = [word.lower() for word in WORD.findall(text)]
    return {" ".join(words[i : i + n]) for i in range(max(1, len(words) - n + 1))} if words else set()


class Filters:
    """Decides on drafts one after the other; knows what it has seen."""

    def __init__(self, config: CurateConfig, benchmark_prompts: Iterable[str]):
        self._config = config
        self._held_out = {gram for text in benchmark_prompts for gram in ngrams(text, config.contamination_words)}
        self._patterns = {reason: re.compile(pattern) for reason, pattern in config.drop_matching.items()}
        self._seen: set[str] = set()

    def reason_to_drop(self, draft: Draft, identity: str) -> str | None:
        """The first reason that applies, or None to keep the draft."""
        text = prompt_text(draft.messages, draft.tools)
        if not any(message["role"] == "user" and message["content"].strip() for message in draft.messages):
            return "no_user_turn"
        if len(text) < self._config.min_prompt_chars:
            return "too_short"
        if len(text) > self._config.max_prompt_chars:
            return "too_long"
        if identity in self._seen:
            return "duplicate"
        self._seen.add(identity)
        for reason, pattern in self._patterns.items():
            if pattern.search(text):
                return reason
        turns = (message["content"] for message in draft.messages)
        if any(not self._held_out.isdisjoint(ngrams(turn, self._config.contamination_words)) for turn in turns):
            return "contaminated"
        return None
