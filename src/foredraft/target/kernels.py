"""A faster forward pass for decoder blocks that we know, beside Transformers' own.

Projections of one input are one matrix product (their weights become views of one tensor, so nothing is held twice and the
stock path goes on working), residuals are added by the product itself, in place, and what is between is
:mod:`foredraft.target.pointwise`, or on a GPU :mod:`foredraft.target.fused` and :mod:`foredraft.target.fused_delta`.
Blocks of any other make stay as they are. A caller compares both paths before it trusts this one.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from foredraft.target import pointwise
from foredraft.target.frozen import FrozenTarget
from foredraft.target.pointwise import NormParts

KNOWN_BLOCKS = {
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3_5DecoderLayer",
    "Qwen3_5MoeDecoderLayer",
}
"""Blocks that are norm, mixer, sum, norm, feed-forward, sum, and nothing else."""

LONG, LENGTH_STEP = 1024, 256
"""From how many tokens on a row counts as long, and to what its length is then rounded for attention."""
DELTA_HEADS, CONVOLVED = (64, 128), 4
"""Sizes of a head that the delta rule is made for, and how many tokens the convolution before it sees."""

Forward = Callable[..., Tensor]
DeltaRule = Callable[..., Tensor]
Mixer = Callable[[Tensor, Tensor, dict[str, Any]], None]
"""Adds to its second argument what it makes of the first; the third is what the decoder passes to its blocks."""


class Toolbox:
    """The functions a fast block is put together from: Triton's on a GPU, plain ones elsewhere.

    Args:
        delta_rule: of query and key ``(B, T, H, E)``, value, decay ``g`` and strength ``beta``; gives ``(B, T, H, E)``.
    """

    def __init__(self, fused: bool, delta_rule: DeltaRule | None):
        functions: Any = pointwise
        if fused:
            from foredraft.target import fused as functions
        self.rms_norm = functions.rms_norm
        self.gated_rms_norm = functions.gated_rms_norm
        self.silu_mul = functions.silu_mul
        self.sigmoid_gate = functions.sigmoid_gate
        self.norm_and_rotate = functions.norm_and_rotate
        self.delta_inputs = functions.delta_inputs
        self.delta_rule = delta_rule


def fast_forward(block: Any, tools: Toolbox) -> Forward | None:
    """A forward for ``block``, or ``None`` where it is of a make that is not known here."""
    if type(block).__name__ not in KNOWN_BLOCKS:
        return None
    before, after = _norm(block.input_layernorm, tools), _norm(block.post_attention_layernorm, tools)
    mixer, feed_forward = _mixer(block, tools), _feed_forward(block.mlp, tools)

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        mixer(before(hidden_states), hidden_states, kwargs)
        feed_forward(after(hidden_states), hidden_states)
        return hidden_states

    return forward


def merge(*layers: nn.Linear) -> Tensor:
    """The weights of layers that read the same input, as one; each layer's own becomes a view of it."""
    weight = torch.cat([layer.weight.data for layer in layers])
    for layer, part in zip(layers, weight.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part
    return weight


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """``total (B, T, D) += x (B, T, F) @ weight.T``, in one product."""
    flat = total.view(-1, total.shape[-1])
    torch.addmm(flat, x.reshape(-1, x.shape[-1]), weight.t(), out=flat)


def _norm(norm: nn.Module, tools: Toolbox) -> Callable[[Tensor], Tensor]:
    weight, eps, centred = _norm_parts(norm)
    return lambda x: tools.rms_norm(x, weight, eps, centred)


def _norm_parts(norm: Any) -> NormParts:
    """Weight, epsilon, and whether the weight is zero-centred."""
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    ones = norm(torch.ones(1, norm.weight.shape[0], dtype=norm.weight.dtype, device=norm.weight.device))
    centred = not torch.allclose(ones[0].float(), norm.weight.float(), rtol=0.01, atol=0.01)
    return norm.weight, eps, centred


def _feed_forward(mlp: Any, tools: Toolbox) -> Callable[[Tensor, Tensor], None]:
    layers = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = all(isinstance(layer, nn.Linear) and layer.bias is None for layer in layers)
    if not plain or type(mlp.act_fn).__name__ not in {"SiLU", "SiLUActivation"}:
        return lambda x, total: _add(total, mlp(x))
    gate_up, down = merge(mlp.gate_proj, mlp.up_proj), mlp.down_proj.weight
    return lambda x, total: add_product(total, tools.silu_mul(F.linear(x, gate_up)), down)


def _mixer(block: Any, tools: Toolbox) -> Mixer:
    mixer = getattr(block, "linear_attn", None) or block.self_attn
    if tools.delta_rule is not None and _is_plain_delta_net(mixer):
        return _delta_net(mixer, tools)
    if hasattr(mixer, "q_proj") and _is_plain_attention(mixer):
        return _attention(mixer, tools, gated=mixer.q_proj.out_features == 2 * mixer.o_proj.in_features)

    def stock(x: Tensor, total: Tensor, kwargs: dict[str, Any]) -> None:
        output = mixer(hidden_states=x, **kwargs)
        _add(total, output[0] if isinstance(output, tuple) else output)

    return stock


def _delta_net(mixer: Any, tools: Toolbox) -> Mixer:
    """Gated DeltaNet as Qwen3.5 has it: one projection each for queries, keys and values, gate, strength, step."""
    weight = merge(mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
    conv, output = mixer.conv1d.weight.squeeze(1).t().contiguous(), mixer.out_proj.weight
    mixed = mixer.in_proj_qkv.out_features
    delta_rule = tools.delta_rule
    assert delta_rule is not None

    def forward(x: Tensor, total: Tensor, _kwargs: dict[str, Any]) -> None:
        projected = F.linear(x, weight)
        query, key, value, decay, strength = tools.delta_inputs(
            projected, conv, mixer.A_log, mixer.dt_bias, mixer.num_k_heads, mixer.key_dim, mixer.value_dim
        )
        read = delta_rule(query, key, value, g=decay, beta=strength)
        gate = projected[..., mixed : mixed + mixer.value_dim]
        gated = tools.gated_rms_norm(read, gate, mixer.norm.weight, mixer.norm.variance_epsilon)
        add_product(total, gated, output)

    return forward


def _is_plain_delta_net(mixer: Any) -> bool:
    if not hasattr(mixer, "in_proj_qkv"):
        return False
    return (
        mixer.head_k_dim == mixer.head_v_dim and mixer.head_k_dim in DELTA_HEADS and mixer.conv_kernel_size == CONVOLVED
    )


def _attention(mixer: Any, tools: Toolbox, gated: bool) -> Mixer:
    """Full attention over rotated heads, which may be normed (Qwen3) and gated by a second half of the query (Qwen3.5)."""
    layers = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    weight, sizes = merge(*layers), [layer.out_features for layer in layers]
    bias = None if mixer.q_proj.bias is None else torch.cat([layer.bias for layer in layers])
    size, output = mixer.head_dim, mixer.o_proj.weight
    widths = (2 * size if gated else size, size, size)
    norms = [_norm_parts(norm) if norm else None for norm in (getattr(mixer, n, None) for n in ("q_norm", "k_norm"))]

    def forward(x: Tensor, total: Tensor, kwargs: dict[str, Any]) -> None:
        parts = F.linear(x, weight, bias).split(sizes, -1)
        query, key, value = (part.unflatten(-1, (-1, width)) for part, width in zip(parts, widths, strict=True))
        turned = tools.norm_and_rotate(query[..., :size], norms[0], *kwargs["position_embeddings"])
        key = tools.norm_and_rotate(key, norms[1], *kwargs["position_embeddings"])
        read = attend(turned, key, value, mixer.scaling)
        add_product(total, tools.sigmoid_gate(read, query) if gated else read, output)

    return forward


def _is_plain_attention(mixer: Any) -> bool:
    layers = [getattr(mixer, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    window = getattr(mixer, "sliding_window", getattr(mixer.config, "sliding_window", None))
    return all(isinstance(layer, nn.Linear) for layer in layers) and mixer.o_proj.bias is None and window is None


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of ``(B, T, H, E)`` over keys and values of as many or fewer heads; gives ``(B, T, H * E)``.

    Right padding needs no mask: no token looks ahead. cuDNN is the fastest, but plans for each new shape: long rows
    come to it in few lengths, and short ones, whose attention is little, do not come to it.
    """
    length = query.shape[1]
    heads = [query, key, value]
    if length >= LONG and (left := -length % LENGTH_STEP):
        heads = [F.pad(x, (0, 0, 0, 0, 0, left)) for x in heads]
    backends = [SDPBackend.CUDNN_ATTENTION] * (length >= LONG) + [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    query, key, value = (x.transpose(1, 2) for x in heads)
    with sdpa_kernel(backends, set_priority=True):
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=scale)
    return read.transpose(1, 2)[:, :length].flatten(-2).contiguous()


def _add(total: Tensor, x: Tensor) -> None:
    total += x


@contextmanager
def stock_blocks(target: FrozenTarget) -> Iterator[None]:
    """Every block as Transformers has it, for a while."""
    fast = [block.__dict__.pop("forward", None) for block in target.blocks]
    target.in_place = False
    try:
        yield
    finally:
        for block, forward in zip(target.blocks, fast, strict=True):
            if forward is not None:
                block.forward = forward
        target.in_place = True


def accelerate(target: FrozenTarget, tools: Toolbox) -> int:
    """Give ``target`` a fast forward wherever one is known for a block; returns how many there are."""
    fast = 0
    for block in target.blocks:
        if (forward := fast_forward(block, tools)) is not None:
            block.forward = forward
            fast += 1
    target.in_place = fast > 0
    return fast


def choose_tools() -> Toolbox:
    """What this machine has: with a GPU and Triton everything; otherwise merged products, and the plain functions."""
    if torch.cuda.is_available() and has_triton():
        return Toolbox(fused=True, delta_rule=fused_delta_rule())
    return Toolbox(fused=False, delta_rule=None)


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def fused_delta_rule() -> DeltaRule | None:
    """The chunked delta rule on a GPU, where flash-linear-attention, which solves its chunks, is installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from foredraft.target.fused_delta import delta_rule

    return delta_rule


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting for what the device is doing: from pageable memory a copy would."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def describe(kernels: str) -> dict[str, str]:
    """Which path states are read by, for the contract: features of two paths never mix.

    Args:
        kernels: ``auto`` or ``stock``, as the params have it.
    """
    on_gpu = torch.cuda.is_available()
    packages = ("fla-core", "triton", "causal-conv1d", "flash-attn") if on_gpu else ()
    return {
        "device": "cuda" if on_gpu else "cpu",
        "blocks": "stock" if kernels == "stock" else "fused" if on_gpu and has_triton() else "merged",
        **{name: found for name in packages if (found := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
