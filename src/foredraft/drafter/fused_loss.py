# mypy: disallow-untyped-defs = false
"""Passes over whole rows of logits: the functions of these names in :mod:`foredraft.drafter.loss`, as Triton kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that a program looks at together."""


def normaliser_and_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`foredraft.drafter.loss.normaliser_and_best`."""
    rows, size = logits.shape
    normaliser = torch.empty(rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _normaliser_and_best[(rows,)](logits, normaliser, best, logits.stride(0), size, BLOCK, num_warps=8)
    return normaliser, best


def scale_softmax(logits: Tensor, normaliser: Tensor, share: Tensor) -> None:
    """See :func:`foredraft.drafter.loss.scale_softmax`."""
    rows, size = logits.shape
    grid = (rows, triton.cdiv(size, BLOCK))
    _scale_softmax[grid](logits, normaliser, share, logits.stride(0), size, BLOCK, num_warps=8)


@triton.jit
def _normaliser_and_best(logits, normaliser, best, stride, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    largest = tl.full((block,), -float("inf"), tl.float32)
    total = tl.zeros((block,), tl.float32)
    place = tl.zeros((block,), tl.int32)
    for start in range(0, size, block):
        values = tl.load(logits + row * stride + start + at, mask=start + at < size, other=-float("inf")).to(tl.float32)
        greater = values > largest
        place = tl.where(greater, start + at, place)
        above = tl.maximum(largest, values)
        # Where nothing was seen yet both are minus infinity, and their difference is no number.
        scaled = tl.where(above == -float("inf"), 0.0, total * tl.exp(largest - above) + tl.exp(values - above))
        total, largest = scaled, above
    top = tl.max(largest, 0)
    summed = tl.sum(total * tl.exp(largest - top), 0)
    tl.store(normaliser + row, top + tl.log(summed))
    tl.store(best + row, tl.min(tl.where(largest == top, place, size), 0).to(tl.int64))


@triton.jit
def _scale_softmax(logits, normaliser, share, stride, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    values = tl.load(logits + row * stride + at, mask=inside, other=0.0)
    scaled = tl.exp(values.to(tl.float32) - tl.load(normaliser + row)) * tl.load(share + row)
    tl.store(logits + row * stride + at, scaled.to(values.dtype), mask=inside)
