"""The functions of :mod:`foredraft.target.pointwise` as Triton kernels: same arguments, same results, one pass each.

Rows may lie apart in memory (a part of a wider projection); only the last dimension must be whole. All lengths are arguments
and all sizes of the model are constants, so no kernel is compiled again for another batch.
"""

# mypy: disallow-untyped-defs = false
import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.target.pointwise import NormParts

TOKENS = 64
"""Tokens that one program of the convolution handles."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """See :func:`foredraft.target.pointwise.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    rows = x.numel() // size
    block = triton.next_power_of_2(size)
    _rms_norm[(rows,)](x, out, weight, x.stride(-2), size, eps, centred, block, num_warps=8 if block > 2048 else 4)
    return out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`foredraft.target.pointwise.gated_rms_norm`."""
    heads, size = x.shape[-2:]
    out = torch.empty((*x.shape[:-2], heads * size), dtype=x.dtype, device=x.device)
    grid = (x.numel() // (heads * size),)
    _gated_rms_norm[grid](
        x, gate, out, weight, gate.stride(-2), eps, heads, size, triton.next_power_of_2(heads), num_warps=8
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See :func:`foredraft.target.pointwise.silu_mul`."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_mul[(out.numel() // size, triton.cdiv(size, block))](gate_up, out, size, block, num_warps=4)
    return out


def sigmoid_gate(x: Tensor, projected: Tensor) -> Tensor:
    """See :func:`foredraft.target.pointwise.sigmoid_gate`."""
    heads, size = projected.shape[-2], projected.shape[-1] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (x.numel() // (heads * size),)
    _sigmoid_gate[grid](
        x, projected, out, projected.stride(-3), heads, size, triton.next_power_of_2(heads), num_warps=8
    )
    return out


def norm_and_rotate(x: Tensor, norm: NormParts | None, cos: Tensor, sin: Tensor) -> Tensor:
    """See :func:`foredraft.target.pointwise.norm_and_rotate`."""
    heads, size = x.shape[-2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (x.numel() // (heads * size),)
    cos, sin = (part.expand(len(x), -1, -1).contiguous() for part in (cos, sin))  # some decoders make them for one row
    weight, eps, centred = norm or (x, 0.0, False)
    strides = (x.stride(-3), x.stride(-2))
    _norm_and_rotate[grid](
        x,
        out,
        weight,
        cos,
        sin,
        *strides,
        eps,
        norm is not None,
        centred,
        heads,
        size,
        cos.shape[-1],
        triton.next_power_of_2(heads),
        num_warps=4,
    )
    return out


def delta_inputs(
    projected: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, key_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`foredraft.target.pointwise.delta_inputs`; keys and values must have heads of one size."""
    rows, length, width = projected.shape
    heads, size = len(a_log), key_size // key_heads
    assert value_size == heads * size, f"heads of keys ({size}) and of values ({value_size // heads}) differ in size"
    assert len(conv) == 4, f"a convolution over {len(conv)} tokens instead of 4"
    group = next(count for count in (8, 4, 2, 1) if key_heads % count == 0 and heads % count == 0)
    unit = projected.new_empty(2, rows, length, key_heads, size)
    value = projected.new_empty(rows, length, heads, size)
    decay = torch.empty(rows, length, heads, dtype=torch.float32, device=projected.device)
    strength = projected.new_empty(rows, length, heads)
    blocks, channels, stride = triton.cdiv(length, TOKENS), conv.shape[1], projected.stride(1)
    for out, begin, count, of in ((unit, 0, 2 * key_heads, key_heads), (value, 2 * key_size, heads, heads)):
        grid = (blocks, count // group, rows)
        _convolve[grid](
            projected,
            conv,
            out,
            length,
            stride,
            out.stride(0),
            begin,
            of,
            size,
            channels,
            group,
            TOKENS,
            out is unit,
            num_warps=4,
        )
    _decay_and_strength[(rows * length,)](
        projected,
        a_log,
        dt_bias,
        decay,
        strength,
        projected.stride(1),
        width - 2 * heads,
        heads,
        triton.next_power_of_2(heads),
        num_warps=1,
    )
    return unit[0], unit[1], value, decay, strength


@triton.jit
def _rms_norm(
    x, out, weight, stride, size: tl.constexpr, eps: tl.constexpr, centred: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    loaded = tl.load(x + row * stride + at, mask=inside, other=0.0)
    values = loaded.to(tl.float32)
    unit = values * tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    result = _scaled(unit, scale, loaded.dtype, centred)
    tl.store(out + row * size + at, result.to(loaded.dtype), mask=inside)


@triton.jit
def _scaled(unit, weight, dtype: tl.constexpr, centred: tl.constexpr):
    if centred:
        return unit * (1.0 + weight.to(tl.float32))
    return weight.to(tl.float32) * unit.to(dtype).to(tl.float32)


@triton.jit
def _gated_rms_norm(
    x, gate, out, weight, stride, eps: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, block)[:, None], tl.arange(0, size)[None, :]
    inside = head < heads
    place = head * size + at
    loaded = tl.load(x + row * heads * size + place, mask=inside, other=0.0)
    values = loaded.to(tl.float32)
    unit = values * tl.rsqrt(tl.sum(values * values, 1) / size + eps)[:, None]
    scaled = tl.load(weight + at).to(tl.float32) * unit.to(loaded.dtype).to(tl.float32)
    gates = tl.load(gate + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    result = scaled.to(loaded.dtype).to(tl.float32) * gates * tl.sigmoid(gates)
    tl.store(out + row * heads * size + place, result.to(loaded.dtype), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    silu = (gate.to(tl.float32) * tl.sigmoid(gate.to(tl.float32))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + at, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _sigmoid_gate(x, projected, out, stride, heads: tl.constexpr, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, block)[:, None], tl.arange(0, size)[None, :]
    inside = head < heads
    values = tl.load(x + row * heads * size + head * size + at, mask=inside, other=0.0)
    gate = tl.load(projected + row * stride + head * 2 * size + size + at, mask=inside, other=0.0)
    opened = tl.sigmoid(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)
    result = (values.to(tl.float32) * opened).to(values.dtype)
    tl.store(out + row * heads * size + head * size + at, result, mask=inside)


@triton.jit
def _norm_and_rotate(
    x,
    out,
    weight,
    cos,
    sin,
    stride,
    head_stride,
    eps: tl.constexpr,
    normed: tl.constexpr,
    centred: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    turned: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, block)[:, None], tl.arange(0, size)[None, :]
    inside = head < heads
    start = x + row * stride + head * head_stride
    loaded = tl.load(start + at, mask=inside, other=0.0)
    values = loaded.to(tl.float32)
    if normed:
        root = tl.rsqrt(tl.sum(values * values, 1) / size + eps)[:, None]
        values = _scaled(values * root, tl.load(weight + at), loaded.dtype, centred).to(loaded.dtype).to(tl.float32)
    # Each value of the rotated part meets the one half a turn away.
    half: tl.constexpr = turned // 2
    other = tl.where(at < half, at + half, at - half)
    rotated = at < turned
    partner = tl.load(start + other, mask=inside & rotated, other=0.0).to(tl.float32)
    if normed:
        other_weight = tl.load(weight + other, mask=rotated, other=0.0)
        partner = _scaled(partner * root, other_weight, loaded.dtype, centred).to(loaded.dtype).to(tl.float32)
    partner = tl.where(at < half, -partner, partner)
    c = tl.load(cos + row * turned + at, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + row * turned + at, mask=rotated, other=0.0).to(tl.float32)
    result = (values * c).to(loaded.dtype).to(tl.float32)
    result += (partner * s).to(loaded.dtype).to(tl.float32)
    tl.store(out + row * heads * size + head * size + at, result.to(loaded.dtype), mask=inside)


@triton.jit
def _convolve(
    projected,
    conv,
    out,
    length,
    stride,
    part_stride,
    begin: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    channels: tl.constexpr,
    group: tl.constexpr,
    tokens: tl.constexpr,
    unit: tl.constexpr,
):
    """A run of tokens of some heads: each value is read once, and the three before it are still at hand."""
    head, row = tl.program_id(1) * group, tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * tokens
    offset = tl.arange(0, group)[:, None] * size + tl.arange(0, size)[None, :]
    channel = begin + head * size + offset
    w0 = tl.load(conv + channel).to(tl.float32)
    w1 = tl.load(conv + channels + channel).to(tl.float32)
    w2 = tl.load(conv + 2 * channels + channel).to(tl.float32)
    w3 = tl.load(conv + 3 * channels + channel).to(tl.float32)
    source = projected + (row * length + first) * stride + channel
    part = (head // heads).to(tl.int64)
    target = out + part * part_stride + ((row * length + first) * heads + head % heads) * size + offset
    dtype = projected.dtype.element_ty
    place = first + offset * 0
    x0 = tl.load(source - 3 * stride, mask=place >= 3, other=0.0).to(tl.float32)
    x1 = tl.load(source - 2 * stride, mask=place >= 2, other=0.0).to(tl.float32)
    x2 = tl.load(source - stride, mask=place >= 1, other=0.0).to(tl.float32)
    for _ in range(0, tokens, 2):
        x3 = tl.load(source, mask=place < length, other=0.0).to(tl.float32)
        x4 = tl.load(source + stride, mask=place + 1 < length, other=0.0).to(tl.float32)
        even = _silu_unit(x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3, unit, dtype)
        odd = _silu_unit(x1 * w0 + x2 * w1 + x3 * w2 + x4 * w3, unit, dtype)
        tl.store(target, even, mask=place < length)
        tl.store(target + heads * size, odd, mask=place + 1 < length)
        x0, x1, x2 = x2, x3, x4
        source += 2 * stride
        target += 2 * heads * size
        place += 2


@triton.jit
def _silu_unit(total, unit: tl.constexpr, dtype: tl.constexpr):
    total = total.to(dtype).to(tl.float32)
    total = (total * tl.sigmoid(total)).to(dtype).to(tl.float32)
    if unit:
        total = total * tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None]
    return total.to(dtype)


@triton.jit
def _decay_and_strength(
    projected, a_log, dt_bias, decay, strength, stride, start, heads: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block)
    inside = head < heads
    source = projected + row * stride + start
    write = tl.load(source + head, mask=inside, other=0.0)
    step = tl.load(source + heads + head, mask=inside, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    soft = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
    rate = tl.exp(tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(decay + row * heads + head, -rate * soft, mask=inside)
    opened = tl.sigmoid(write.to(tl.float32)).to(write.dtype)
    tl.store(strength + row * heads + head, opened, mask=inside)
