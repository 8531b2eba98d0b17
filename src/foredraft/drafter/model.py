"""The DFlash drafter (arXiv 2602.06036): a few transformer layers that read the target's hidden states.

State-dict keys are those of the published checkpoints: ``fc``, ``hidden_norm``, ``layers.*``, ``norm``. Embeddings and
LM head are the target's and are not held here.

Shapes: ``B`` rows, ``T`` context tokens, ``Q`` slots, ``L`` taps, ``D`` hidden size, ``H`` heads, ``d`` head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foredraft.drafter import float8
from foredraft.drafter.attention import Attention, KeysValues
from foredraft.drafter.config import FLOAT8_MULTIPLE, DrafterShape


class Drafter(nn.Module):
    """Block-diffusion drafter.

    Training calls it as a whole. In decoding the context goes in once, by :meth:`read_context`, and is kept; blocks are
    then filled by :meth:`fill`.
    """

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.fc = nn.Linear(len(shape.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.choice.num_layers))
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)

    def forward(
        self,
        target_hidden: Tensor,
        context_positions: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        attention: dict[str, Attention],
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Read the context and fill blocks.

        Args:
            target_hidden: ``(B, T, L, D)``, the target's features.
            context_positions: ``(B, T)``.
            embeddings: ``(B, Q, D)``, the target's embeddings of the ids in the slots.
            positions: ``(B, Q)``.
            attention: for each layer type in use.
            wanted: ``(M)`` numbers of slots; None for all. What no attention reads any more is left out for the others.

        Returns:
            hidden states for the target's LM head, ``(B, Q, D)``, or ``(B, M, D)``.
        """
        context, context_rotation = self.project_context(target_hidden), self.rotary(context_positions)
        hidden, rotation = embeddings, self.rotary(positions)
        for layer, kind in zip(self.layers, self.shape.choice.layer_types, strict=True):
            last = layer is self.layers[-1]
            hidden = layer(hidden, rotation, context, context_rotation, attention[kind], wanted if last else None)
        return self.norm(hidden)

    def read_context(self, target_hidden: Tensor, positions: Tensor) -> list[KeysValues]:
        """Keys and values of every layer for the target's features ``(B, T, L, D)`` at ``positions (B, T)``."""
        context, rotation = self.project_context(target_hidden), self.rotary(positions)
        return [layer.read_context(context, rotation) for layer in self.layers]  # type: ignore[operator]

    def fill(
        self, embeddings: Tensor, positions: Tensor, context: list[KeysValues], attention: dict[str, Attention]
    ) -> Tensor:
        """Fill blocks over a context that was read before; otherwise as :meth:`forward`."""
        hidden, rotation = embeddings, self.rotary(positions)
        for layer, kind, kept in zip(self.layers, self.shape.choice.layer_types, context, strict=True):
            hidden = layer.fill(hidden, rotation, kept, attention[kind])  # type: ignore[operator]
        return self.norm(hidden)

    def project_context(self, target_hidden: Tensor) -> Tensor:
        """What every layer reads of the target: ``(B, T, L, D)`` -> ``(B, T, D)``."""
        return self.hidden_norm(linear(target_hidden.flatten(2), self.fc.weight))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :func:`rotary`."""
        return rotary(positions, self.shape.choice.head_dim, self.shape.rope_theta)

    def train_in_float8(self) -> None:
        """Let the layers' products over slots be in float8 wherever gradients are wanted.

        Raises:
            ValueError: a size is no multiple of 16.
        """
        sizes = {size for name, weight in self.layers.named_parameters() for size in weight.shape if weight.dim() > 1}
        if odd := sorted(size for size in sizes if size % FLOAT8_MULTIPLE):
            raise ValueError(f"train.float8 needs sizes that are multiples of 16: not {', '.join(map(str, odd))}")
        for module in self.modules():
            if isinstance(module, DrafterLayer | ContextAttention | SwiGLU):
                module.linear = linear_in_float8

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile what stands before and behind attention, forward and backward, for the few shapes that training has."""
        torch._dynamo.config.recompile_limit = 32
        for norm in (self.hidden_norm, self.norm):
            norm.forward = torch.compile(norm.forward, dynamic=False, backend=backend)  # type: ignore[method-assign]
        for layer in self.layers:
            for name in ("read_context", "project", "finish"):
                setattr(layer, name, torch.compile(getattr(layer, name), dynamic=False, backend=backend))


def made_again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)``, which compiled layers do not keep for the backward pass: it is large, and cheap to make again."""
    if not torch.compiler.is_compiling():
        return function(x)
    again: Tensor = checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return again


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` in the type of ``x``, whatever the type in which the weight is kept."""
    return F.linear(x, weight.to(x.dtype))


def linear_in_float8(x: Tensor, weight: Tensor) -> Tensor:
    """The same by products in float8 where there will be a backward pass; elsewhere, as it will be served."""
    return float8.linear(x, weight.to(x.dtype)) if torch.is_grad_enabled() else linear(x, weight)


class DrafterLayer(nn.Module):
    """Pre-norm decoder layer whose attention reads the context beside the block."""

    linear = staticmethod(linear)

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.self_attn = ContextAttention(shape)
        self.mlp = SwiGLU(shape.hidden_size, shape.choice.ffn_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        context: Tensor,
        context_rotation: tuple[Tensor, Tensor],
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Slots ``(B, Q, D)`` that read the context ``(B, T, D)``; gives those that are ``wanted``."""
        return self.fill(hidden, rotation, self.read_context(context, context_rotation), attention, wanted)

    def fill(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        context: KeysValues,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """The same over keys and values that are there."""
        queries, own = self.project(hidden, rotation)
        attended = attention(queries, context, own)
        if wanted is not None:
            hidden, attended = hidden.index_select(1, wanted), attended.index_select(2, wanted)
        return self.finish(hidden, attended)

    def read_context(self, context: Tensor, rotation: tuple[Tensor, Tensor]) -> KeysValues:
        """Keys and values of the context ``(B, T, D)``."""
        return self.self_attn.keys_values(context, rotation)

    def project(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, KeysValues]:
        """What attention is over: queries ``(B, H, Q, d)``, and the block's own keys and values."""
        return self.self_attn.queries_keys_values(made_again(self.input_layernorm, hidden), rotation)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """All that comes after attention ``(B, H, Q, d)``."""
        hidden = hidden + self.linear(attended.transpose(1, 2).flatten(2), self.self_attn.o_proj.weight)
        return hidden + self.mlp(made_again(self.post_attention_layernorm, hidden))


class ContextAttention(nn.Module):
    """Projections of grouped-query attention over context and block, with RMS-normed queries and keys."""

    linear = staticmethod(linear)

    def __init__(self, shape: DrafterShape):
        super().__init__()
        choice = shape.choice
        self.head_dim = choice.head_dim
        wide, narrow = choice.num_heads * choice.head_dim, choice.num_kv_heads * choice.head_dim
        self.sizes = [wide, narrow, narrow]
        self.qkv = nn.Parameter(torch.empty(wide + 2 * narrow, shape.hidden_size))
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(choice.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(choice.head_dim, shape.rms_norm_eps)
        show_apart(self, "qkv", dict(zip(("q_proj", "k_proj", "v_proj"), self.sizes, strict=True)))

    def queries_keys_values(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, KeysValues]:
        """Of the block's slots ``(B, Q, D)``."""
        queries, keys, values = (self._heads(part) for part in self.linear(hidden, self.qkv).split(self.sizes, -1))
        return rotate(self.q_norm(queries), rotation), KeysValues(rotate(self.k_norm(keys), rotation), values)

    def keys_values(self, context: Tensor, rotation: tuple[Tensor, Tensor]) -> KeysValues:
        """Of the context ``(B, T, D)``."""
        both = linear(context, self.qkv[self.sizes[0] :]).split(self.sizes[1:], -1)
        keys, values = (self._heads(part) for part in both)
        return KeysValues(rotate(self.k_norm(keys), rotation), values)

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward."""

    linear = staticmethod(linear)

    def __init__(self, hidden_size: int, ffn_size: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * ffn_size, hidden_size))
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)
        show_apart(self, "gate_up", {"gate_proj": ffn_size, "up_proj": ffn_size})

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(made_again(silu_mul, self.linear(hidden, self.gate_up)), self.down_proj.weight)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of ``(..., 2 * F)`` times its second half."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def show_apart(module: nn.Module, merged: str, parts: dict[str, int]) -> None:
    """Let a parameter that is several layers' weights, one below the other, be those layers in the state dict."""

    def split(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: object) -> None:
        weights = state.pop(prefix + merged).split(list(parts.values()))
        state.update({f"{prefix}{name}.weight": weight for name, weight in zip(parts, weights, strict=True)})

    def join(_module: nn.Module, state: dict[str, Tensor], prefix: str, *_rest: object) -> None:
        names = [f"{prefix}{name}.weight" for name in parts]
        if all(name in state for name in names):
            state[prefix + merged] = torch.cat([state.pop(name) for name in names])

    module.register_state_dict_post_hook(split)
    module.register_load_state_dict_pre_hook(join)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and returned in the input's type."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.device.type == "cpu":
            normed: Tensor = _RMSNorm.apply(hidden, self.weight, self.eps)
            return normed
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(hidden.dtype) * wide.to(hidden.dtype)


class _RMSNorm(torch.autograd.Function):
    """The same with its gradient written down: where nothing is fused, every pass over the numbers costs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32).square_()
        inverse = squares.div_(hidden.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        return (hidden * inverse).to(hidden.dtype) * weight.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, inverse = ctx.saved_tensors
        wide, normed = gradients[0].to(torch.float32, copy=True), hidden * inverse
        both = wide * normed
        lean = (both @ weight.float()[:, None]).div_(hidden.shape[-1])
        by_hidden = wide.mul_(weight).sub_(normed.mul_(lean)).mul_(inverse)
        return by_hidden.to(hidden.dtype), both.flatten(0, -2).sum(0).to(weight.dtype), None


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of plain 1-D RoPE over the whole head, ``(B, 1, T, d)`` in fp32; nothing of the target's is taken."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``(B, H, T, d)``: the two halves of a head are the two coordinates."""
    cos, sin = (part.to(heads.dtype) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


@torch.no_grad()
def initialise_random(drafter: Drafter, generator: torch.Generator, std: float = 0.02) -> None:
    """Normal matrices, unit norms."""
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, std, generator=generator)
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
