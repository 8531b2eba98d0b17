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
    values = rows.float()
    not_finite = ~values.isfinite().all(-1)
    constant = values.amax(-1) == values.amin(-1)
    faults = not_finite.to(torch.uint8) * NOT_FINITE + (constant & ~not_finite).to(torch.uint8) * CONSTANT
    sums = [values.sum(-1), values.square().sum(-1), (values == 0).sum(-1)]
    return faults, torch.stack([part.double().sum() for part in sums])
