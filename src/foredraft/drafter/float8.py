"""Products in float8: twice the rate of bfloat16 on GPUs that have them.

**The head's**, a third of a training step at a large vocabulary. It is frozen, so it is rounded once: float8 e4m3 with one
scale, in the order of either product. Hidden states get a scale for each call. Gradients by logits are at most the sum of
the terms' weights in size and most are tiny; e5m2 at a fixed scale holds them from 1e-9 on.

**The layers'**: :func:`linear`. All three products of a layer, of tensors that are rounded as they come with one scale
each (arXiv 2209.05433: e4m3 for what goes forward, e5m2 for gradients). Nothing is kept in float8 between the passes.

Shapes: ``M`` slots, ``V`` rows, ``D`` hidden size; ``V`` and ``D`` are multiples of 16, as all sizes of :func:`linear`.
"""

from typing import Any

import torch
from torch import Tensor

from foredraft.drafter.config import FLOAT8_MULTIPLE

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT_SCALE = 2.0**14
"""Gradients by logits up to 3.5 come out below the largest e5m2, 57,344."""


def require_float8(device: torch.device) -> None:
    """Refuse a GPU that has no such products.

    Raises:
        ValueError: names it.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"train.float8: {torch.cuda.get_device_name(device)} has no products in float8")


class Float8Head:
    """Rows ``(V, D)`` of the LM head.

    Raises:
        ValueError: a size is no multiple of 16.
    """

    def __init__(self, rows: Tensor):
        if any(size % FLOAT8_MULTIPLE for size in rows.shape):
            raise ValueError(f"train.float8 needs a head whose sizes are multiples of 16, not {tuple(rows.shape)}")
        self._scale = scale_of(rows, FORWARD)
        self._rows = rounded(rows, self._scale, FORWARD)
        self._columns = by_column(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden (M, D) @ rows.T``, in the type of ``hidden``."""
        if not len(hidden):
            return hidden.new_empty(0, len(self))
        scale = scale_of(hidden, FORWARD)
        states = rounded(hidden, scale, FORWARD)
        return torch._scaled_mm(states, self._rows.T, scale, self._scale, out_dtype=hidden.dtype)

    def pull_back(self, gradient: Tensor, out: Tensor) -> None:
        """``gradient (M, V) @ rows`` into ``out (M, D)``; ``gradient`` is overwritten."""
        if not len(out):
            return
        scale = torch.tensor(1 / GRADIENT_SCALE, device=gradient.device)
        small = gradient.mul_(GRADIENT_SCALE).to(
            BACKWARD
        )  # rows as wide as the vocabulary: no copy more than is needed
        torch._scaled_mm(small, self._columns, scale, self._scale, out_dtype=out.dtype, out=out)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x (..., D) @ weight (O, D).T`` in the type of ``x``, and both gradients, by products in float8.

    The leading sizes of ``x`` multiply to a multiple of 16, since they are what the weight's gradient is summed over.
    """
    found: Tensor = _Linear.apply(x.flatten(0, -2), weight)
    return found.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        of_x, of_weight = scale_of(x, FORWARD), scale_of(weight, FORWARD)
        ctx.save_for_backward(x, weight, of_x, of_weight)
        columns = rounded(weight, of_weight, FORWARD).T
        return torch._scaled_mm(rounded(x, of_x, FORWARD), columns, of_x, of_weight, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, of_x, of_weight = ctx.saved_tensors
        (gradient,) = gradients
        scale = scale_of(gradient, BACKWARD)
        small = rounded(gradient, scale, BACKWARD)
        rows = by_column(rounded(weight, of_weight, FORWARD))
        by_x = torch._scaled_mm(small, rows, scale, of_weight, out_dtype=x.dtype)
        states = by_column(rounded(x, of_x, FORWARD))
        by_weight = torch._scaled_mm(small.T.contiguous(), states, scale, of_x, out_dtype=x.dtype)
        return by_x, by_weight.to(weight.dtype)


def scale_of(values: Tensor, kind: torch.dtype) -> Tensor:
    """By what ``values`` are to be divided so that the largest is ``kind``'s largest: one number in float32.

    It is one that the type of ``values`` has, too, so that they can be divided in that. For the same reason the largest may
    come out a little larger; what is within half a step of ``kind``'s largest is rounded to that.
    """
    return (values.abs().amax().float().clamp(min=1e-12) / torch.finfo(kind).max).to(values.dtype).float()


def rounded(values: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """``values / scale`` in float8."""
    return (values / scale.to(values.dtype)).to(kind)


def by_column(matrix: Tensor) -> Tensor:
    """The same matrix, laid out column by column, which the products want of their second factor."""
    return matrix.T.contiguous().T
