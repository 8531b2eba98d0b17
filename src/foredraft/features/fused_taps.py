# mypy: disallow-untyped-defs = false
"""The function of :mod:`foredraft.features.taps` as a Triton kernel: one pass over the states."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.features.layout import LARGEST_FLOAT8
from foredraft.features.taps import CONSTANT, NOT_FINITE


def take_tap(states: Tensor, places: Tensor, hidden: Tensor, scale: Tensor | None, faults: Tensor) -> Tensor:
    """See :func:`foredraft.features.taps.take_tap`."""
    size = states.shape[-1]
    sums = torch.empty(len(places), 3, dtype=torch.float32, device=states.device)
    block = triton.next_power_of_2(size)
    _take_tap[(len(places),)](
        states,
        places,
        hidden,
        scale if scale is not None else sums,
        faults,
        sums,
        states.stride(0),
        hidden.stride(0),
        scale.stride(0) if scale is not None else 0,
        faults.stride(0),
        size,
        scale is not None,
        LARGEST_FLOAT8,
        NOT_FINITE,
        CONSTANT,
        block,
        num_warps=8 if block > 2048 else 4,
    )
    return sums.sum(0, dtype=torch.float64)


@triton.jit
def _take_tap(
    states,
    places,
    hidden,
    scale,
    faults,
    sums,
    stride,
    hidden_stride,
    scale_stride,
    faults_stride,
    size: tl.constexpr,
    scaled: tl.constexpr,
    largest: tl.constexpr,
    not_finite: tl.constexpr,
    constant: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(places + token).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    loaded = tl.load(states + row * stride + at, mask=inside, other=0.0)
    values = loaded.to(tl.float32)
    # What is neither a number nor finite is not itself minus itself.
    broken = tl.max(tl.where(inside & ((values - values) != 0.0), 1, 0), 0)
    top = tl.max(tl.where(inside, values, float("-inf")), 0)
    bottom = tl.min(tl.where(inside, values, float("inf")), 0)
    fault = tl.where(broken > 0, not_finite, tl.where(top == bottom, constant, 0))
    tl.store(faults + token * faults_stride, fault.to(tl.uint8))
    tl.store(sums + token * 3, tl.sum(values, 0))
    tl.store(sums + token * 3 + 1, tl.sum(values * values, 0))
    tl.store(sums + token * 3 + 2, tl.sum(tl.where(inside & (values == 0.0), 1.0, 0.0), 0))
    if scaled:
        unit = tl.maximum(top, -bottom) / largest
        tl.store(scale + token * scale_stride, unit)
        values = values / unit
    tl.store(hidden + token * hidden_stride + at, values.to(hidden.dtype.element_ty), mask=inside)
