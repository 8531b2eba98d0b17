"""The DFlash drafter (arXiv 2602.06036): a few transformer layers that read the target's hidden states.

State-dict keys are those of the published checkpoints: ``fc``, ``hidden_norm``, ``layers.*``, ``norm``. Embeddings and
LM head are the target's and are not held here.

Shapes: ``B`` rows, ``T`` context tokens, ``Q`` slots, ``L`` taps, ``D`` hidden size, ``H`` heads, ``d`` head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.drafter.attention import Attention, KeysValues
from foredraft.drafter.config import DrafterShape


class Drafter(nn.Module):
    """Block-diffusion drafter.

    The context goes in once, by :meth:`read_context`, and can be kept; blocks are then filled by :meth:`forward`.
    """

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.shape = shape
        hidden = shape.hidden_size
        self.fc = nn.Linear(len(shape.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape) for _ in range(shape.choice.num_layers))
        self.norm = RMSNorm(hidden, shape.rms_norm_eps)

    def read_context(self, target_hidden: Tensor, positions: Tensor) -> list[KeysValues]:
        """Project the target's features for every layer.

        Args:
            target_hidden: ``(B, T, L, D)``.
            positions: ``(B, T)``.
        """
        context = self.hidden_norm(self.fc(target_hidden.flatten(2)))  # (B, T, D)
        rotation = rotary(positions, self.shape.choice.head_dim, self.shape.rope_theta)
        return [layer.self_attn.read_context(context, rotation) for layer in self.layers]  # type: ignore[union-attr,operator]

    def forward(
        self, embeddings: Tensor, positions: Tensor, context: list[KeysValues], attention: dict[str, Attention]
    ) -> Tensor:
        """Fill blocks.

        Args:
            embeddings: ``(B, Q, D)``, the target's embeddings of the ids in the slots.
            positions: ``(B, Q)``.
            attention: for each layer type in use.

        Returns:
            hidden states for the target's LM head, ``(B, Q, D)``.
        """
        rotation = rotary(positions, self.shape.choice.head_dim, self.shape.rope_theta)
        hidden = embeddings
        for layer, kind, kept in zip(self.layers, self.shape.choice.layer_types, context, strict=True):
            hidden = layer(hidden, rotation, kept, attention[kind])
        return self.norm(hidden)


class DrafterLayer(nn.Module):
    """Pre-norm decoder layer whose attention reads the context beside the block."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        self.self_attn = ContextAttention(shape)
        self.mlp = SwiGLU(shape.hidden_size, shape.choice.ffn_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], context: KeysValues, attention: Attention
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, context, attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class ContextAttention(nn.Module):
    """Grouped-query attention of block slots over context and block, with RMS-normed queries and keys."""

    def __init__(self, shape: DrafterShape):
        super().__init__()
        choice = shape.choice
        self.head_dim = choice.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, choice.num_heads * choice.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, choice.num_kv_heads * choice.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, choice.num_kv_heads * choice.head_dim, bias=False)
        self.o_proj = nn.Linear(choice.num_heads * choice.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RotaryNorm(choice.head_dim, shape.rms_norm_eps)
        self.k_norm = RotaryNorm(choice.head_dim, shape.rms_norm_eps)

    def read_context(self, context: Tensor, rotation: tuple[Tensor, Tensor]) -> KeysValues:
        """Keys and values of the context ``(B, T, D)``."""
        keys = self.k_norm(self._heads(self.k_proj(context)), rotation)
        return KeysValues(keys, self._heads(self.v_proj(context)))

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], context: KeysValues, attention: Attention
    ) -> Tensor:
        queries = self.q_norm(self._heads(self.q_proj(hidden)), rotation)  # (B, H, Q, d)
        out = attention(queries, context, self.read_context(hidden, rotation))
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward."""

    def __init__(self, hidden_size: int, ffn_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)
        self.gate = SiluGate()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.gate(self.gate_proj(hidden), self.up_proj(hidden)))


class SiluGate(nn.Module):
    """SiLU of the first times the second."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and returned in the input's type."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(hidden.dtype) * wide.to(hidden.dtype)


class RotaryNorm(RMSNorm):
    """Norm of each head of ``(B, H, T, d)``, then its rotation."""

    def forward(self, heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return rotate(super().forward(heads), rotation)


def compile_pointwise(drafter: Drafter) -> None:
    """Compile what stands between the matrix products, forward and backward, for the few shapes that training has."""
    torch._dynamo.config.recompile_limit = 64
    for module in drafter.modules():
        if isinstance(module, RMSNorm | SiluGate):
            module.compile(dynamic=False)


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
