"""The LM head in float8: twice the rate of its two products, which are a third of a training step at a large vocabulary.

The head is frozen, so it is rounded once: float8 e4m3 with one scale, in the order of either product. Hidden states get a
scale for each call. Gradients by logits are at most the sum of the terms' weights in size and most are tiny; e5m2 at a
fixed scale holds them from 1e-9 on.

Shapes: ``M`` slots, ``V`` rows, ``D`` hidden size; ``V`` and ``D`` are multiples of 16.
"""

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max
GRADIENT_SCALE = 2.0**14
"""Gradients up to 3.5 come out below the largest e5m2, 57,344."""


class Float8Head:
    """Rows ``(V, D)`` of the LM head.

    Raises:
        ValueError: a size is no multiple of 16, which the products ask for; or the GPU has none.
    """

    def __init__(self, rows: Tensor):
        if rows.shape[0] % 16 or rows.shape[1] % 16:
            raise ValueError(
                f"train.head_float8 needs sizes that are multiples of 16, the head's are {tuple(rows.shape)}"
            )
        if rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 9):
            raise ValueError("train.head_float8: this GPU has no products in float8")
        self._rows, self._scale = rounded(rows)
        self._columns = self._rows.T.contiguous().T  # the same, column by column

    def __len__(self) -> int:
        return len(self._rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden (M, D) @ rows.T``, in the type of ``hidden``."""
        if not len(hidden):
            return hidden.new_empty(0, len(self))
        states, scale = rounded(hidden)
        return torch._scaled_mm(states, self._rows.T, scale, self._scale, out_dtype=hidden.dtype)

    def pull_back(self, gradient: Tensor, out: Tensor) -> None:
        """``gradient (M, V) @ rows`` into ``out (M, D)``."""
        if not len(out):
            return
        small = (gradient * GRADIENT_SCALE).to(torch.float8_e5m2)
        scale = torch.tensor(1 / GRADIENT_SCALE, device=gradient.device)
        torch._scaled_mm(small, self._columns, scale, self._scale, out_dtype=out.dtype, out=out)


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 e4m3 and the scale, float32, by which the largest becomes float8's largest."""
    scale = (values.abs().amax().float().clamp(min=1e-12) / LARGEST).to(values.dtype)
    return (values / scale).to(torch.float8_e4m3fn), scale.float()
