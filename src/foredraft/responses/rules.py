"""Faults of an answer, by name: what makes a drafter learn nonsense when nobody looks."""

from collections.abc import Sequence

from foredraft.chat.render import CLOSE, OPEN

FAULTS = ("truncated", "empty", "unclosed_thinking", "looping")
"""In the order in which they name an answer that is left out."""
REPEATS = 3


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
        "looping": periodic_tail(ids) >= loop_tokens,
    }
    return [fault for fault in FAULTS if found[fault]]


def periodic_tail(ids: Sequence[int]) -> int:
    """Length of the longest tail that is one piece repeated :data:`REPEATS` times or more; 0 if there is none.

    The last repetition may be a part of the piece.
    """
    longest = 0
    for period in range(1, len(ids) // REPEATS + 1):
        position = len(ids) - 1
        while position >= period and ids[position] == ids[position - period]:
            position -= 1
        length = len(ids) - 1 - position + period
        if length >= REPEATS * period:
            longest = max(longest, length)
            if longest == len(ids):
                break  # no longer one can follow
    return longest
