"""Faults of an answer, by name: what makes a drafter learn nonsense when nobody looks."""

from collections.abc import Sequence

from foredraft.chat.render import CLOSE, OPEN
from foredraft.loops import periodic_tail

FAULTS = ("truncated", "empty", "unclosed_thinking", "looping")
"""In the order in which they name an answer that is left out."""


def faults_of(
    text: str, ids: Sequence[int], finish_reason: str, prompt_opens_thinking: bool, loop_tokens: int
) -> list[str]:
    """The faults of one answer, in the order of :data:`FAULTS`.

    Args:
        text: the answer without control tokens.
        ids: its token ids, without the end-of-turn token.
        prompt_opens_thinking: whether the prompt ended with the opening tag.
    """
    thinking = prompt_opens_thinking or OPEN in text
    found = {
        "truncated": finish_reason == "length",
        "empty": not text.rpartition(CLOSE)[2].strip() and not (thinking and CLOSE not in text),
        "unclosed_thinking": thinking and CLOSE not in text,
        "looping": periodic_tail(ids)[0] >= loop_tokens,
    }
    return [fault for fault in FAULTS if found[fault]]
