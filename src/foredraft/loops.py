"""Text that goes round in circles."""

from collections.abc import Sequence

REPEATS = 3


def periodic_tail(ids: Sequence[int]) -> tuple[int, int]:
    """Length of the longest tail that is one piece :data:`REPEATS` times or more, and of the piece; 0 if there is none.

    The last repetition may be a part of the piece.
    """
    longest = piece = 0
    for period in range(1, len(ids) // REPEATS + 1):
        position = len(ids) - 1
        while position >= period and ids[position] == ids[position - period]:
            position -= 1
        length = len(ids) - 1 - position + period
        if length >= REPEATS * period and length > longest:
            longest, piece = length, period
            if longest == len(ids):
                break  # no longer one can follow
    return longest, piece
