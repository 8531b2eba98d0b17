"""A tap of a batch: its tokens picked out of the padding, checked, and put where they are stored.

Shapes: ``R`` rows of the batch with padding, ``N`` tokens without it, ``D`` hidden size.
"""

import torch
from torch import Tensor

from foredraft.features.layout import quantise

NOT_FINITE, CONSTANT = 1, 2


def take_tap(states: Tensor, places: Tensor, hidden: Tensor, scale: Tensor | None, faults: Tensor) -> Tensor:
    """Copy ``states (R, D)`` at ``places (N)`` into ``hidden (N, D)``, in bfloat16 or in float8 with a ``scale (N)``.

    ``faults (N)`` becomes 0 where a state is sane, or what is wrong with it: counted before any cast to the stored type.

    Returns:
        sums over the tokens of values, of squares and of zeros, ``(3)`` float64.
    """
    rows = states.index_select(0, places)
    found, sums = inspect(rows)
    faults.copy_(found)
    if scale is None:
        hidden.copy_(rows)
    else:
        stored, scales = quantise(rows)
        hidden.copy_(stored)
        scale.copy_(scales)
    return sums


def inspect(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Faults of each of ``(N, D)`` states, and the sums of values, of squares and of zeros."""
    squares = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).square()
    bottom, top = torch.aminmax(rows, dim=-1)
    not_finite = ~(bottom.isfinite() & top.isfinite())
    faults = not_finite.to(torch.uint8) * NOT_FINITE + ((bottom == top) & ~not_finite).to(torch.uint8) * CONSTANT
    zeros = rows.shape[-1] - rows.count_nonzero(dim=-1)
    sums = [rows.sum(-1, dtype=torch.float32), squares, zeros]
    return faults, torch.stack([part.double().sum() for part in sums])
