"""What stands between the matrix products of a decoder block, as plain functions.

Each is the arithmetic of Transformers' own modules, written so that one pass over memory does: projections that read the
same input come out of one product, and are read here where they lie. On a GPU the kernels of the same names in
:mod:`foredraft.target.fused` stand for them, elsewhere they run as they are. Tests compare both, and these with the stock.

Shapes: ``B`` rows, ``T`` tokens, ``D`` hidden size, ``H`` heads of size ``E``, ``R`` rotated part of a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NormParts = tuple[Tensor, float, bool]


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """Root-mean-square norm of ``(..., D)``; a zero-``centred`` weight multiplies by one more than itself."""
    unit = _unit_mean(x.float(), eps)
    if centred:
        return (unit * (1.0 + weight.float())).to(x.dtype)
    return weight * unit.to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of each head of ``(B, T, H, E)``, times SiLU of ``gate (B, T, H * E)``; returns ``(B, T, H * E)``."""
    unit = weight * _unit_mean(x.float(), eps).to(x.dtype)
    return (unit.float() * F.silu(gate.unflatten(-1, x.shape[-2:]).float())).to(x.dtype).flatten(-2)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of ``(B, T, 2 * F)`` times its second half."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def sigmoid_gate(x: Tensor, projected: Tensor) -> Tensor:
    """``x (B, T, H * E)`` times the sigmoid of the gates that lie behind each head's query in ``(B, T, H, 2 * E)``."""
    gate = projected[..., projected.shape[-1] // 2 :].flatten(-2)
    return x * torch.sigmoid(gate)


def norm_and_rotate(x: Tensor, norm: NormParts | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm, if any, of each head of ``(B, T, H, E)``, and rotary embedding of its first ``R`` values.

    Args:
        norm: weight, epsilon, and whether the weight is zero-centred.
        cos, sin: ``(B, T, R)``, or ``(1, T, R)`` for all rows.
    """
    x = x if norm is None else rms_norm(x, *norm)
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution over time, and SiLU: ``(B, T, C)``, ``weight (W, C)``; its last row meets the token."""
    width, length = len(weight), x.shape[1]
    total = x.float() * weight[width - 1].float()
    for back in range(1, width):
        earlier = F.pad(x, (0, 0, back, 0))[:, :length]
        total = total + earlier.float() * weight[width - 1 - back].float()
    return F.silu(total.to(x.dtype))


def unit_heads(x: Tensor, heads: int) -> Tensor:
    """``(B, T, H * E)`` -> ``(B, T, H, E)`` of length one each, as the delta rule wants queries and keys."""
    heads_of = x.unflatten(-1, (heads, -1)).float()
    return (heads_of * torch.rsqrt((heads_of * heads_of).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def delta_inputs(
    projected: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, key_heads: int, key_size: int, value_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value, decay and write strength of a Gated DeltaNet layer, out of one projection.

    Args:
        projected: ``(B, T, 2 * key_size + 2 * value_size + 2 * H)``: queries, keys, values, gates, strengths, steps.
        conv: ``(W, 2 * key_size + value_size)``.
        a_log, dt_bias: ``(H)``.

    Returns:
        query and key ``(B, T, key_heads, E)`` of length one, value ``(B, T, H, E)``, decay ``(B, T, H)`` as a logarithm in
        float32, strength ``(B, T, H)``.
    """
    heads = len(a_log)
    mixed = short_convolution(projected[..., : 2 * key_size + value_size], conv)
    query, key, value = mixed.split([key_size, key_size, value_size], -1)
    strength, step = projected[..., -2 * heads :].chunk(2, -1)
    decay = -a_log.float().exp() * F.softplus(step.float() + dt_bias)
    return (
        unit_heads(query, key_heads),
        unit_heads(key, key_heads),
        value.unflatten(-1, (heads, -1)),
        decay,
        torch.sigmoid(strength),
    )


def _unit_mean(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
