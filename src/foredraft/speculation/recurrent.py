"""Recurrent layers under speculation: what a state is after any node of a tree, without reading a token twice.

A gated delta rule's state cannot be cropped: it has taken in the rejected drafts. But what it takes in of a token is small
(a key, and what is new about its value) and for a block has a closed form, which :func:`delta_rule_on_tree` writes for
trees. So while the target reads a block the states stay as they are, and once it is known which drafts are right they are
moved along the path of these alone. The short convolution before it likewise: its state is the last few columns of its
input, and on a tree it reaches back along each node's own path. That is exact, needs no second pass of the target, and a
rejected token leaves no trace.

Transformers 5.24 writes these layers alike (Qwen3-Next, Qwen3.5, OLMo-hybrid): they call ``causal_conv1d_fn`` and
``torch_chunk_gated_delta_rule`` by these names of their module, which is where a block is taken over.

Shapes: ``B`` rows, ``S`` slots, ``K`` kept slots, ``C`` channels, ``W`` width of the convolution, ``H`` heads, ``E`` a
key's size, ``d`` a value's.
"""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionLayer

from foredraft.speculation.tree import Block

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu}


@dataclass(frozen=True)
class Fed:
    """What delta rules take in of a block, float32; of all layers one after the other where they are moved.

    Attributes:
        keys: ``(B, H, S, E)``.
        news: what is new about each value, ``(B, H, S, d)``.
        decays: logarithms, summed along the path to each slot, ``(B, H, S)``.
    """

    keys: Tensor
    news: Tensor
    decays: Tensor

    def along(self, path: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What moves a state to the end of ``path (B, K)``, of which it follows the slots that are ``kept``.

        Returns:
            a factor ``(B, H, 1, 1)`` for the state, and ``(B, H, K, E)`` and ``(B, H, K, d)`` whose product is added to it.
        """
        slots = path[:, None].expand(-1, self.decays.shape[1], -1)  # (B, H, K)
        decays = self.decays.gather(2, slots).masked_fill(~kept[:, None], torch.inf)
        end = decays.amin(-1, keepdim=True)  # sums fall along a path: the least is its end
        end = end.masked_fill(end == torch.inf, 0.0)
        keys, news = (x.gather(2, slots[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (self.keys, self.news))
        return end.exp()[..., None], keys * (end - decays).exp()[..., None], news


class RecurrentLayers:
    """The :func:`delta_rule_layers` of a model, and what the last block fed them."""

    def __init__(self, model: Any):
        self.numbers = delta_rule_layers(model)
        self._module = _module_of(model) if self.numbers else None
        self._columns: list[Tensor] = []
        self._fed: list[Fed] = []

    @contextmanager
    def reading(self, block: Block) -> Iterator[None]:
        """While the target reads ``block`` on top of a cache, in one pass."""
        if self._module is None:
            yield
            return
        self._columns, self._fed = [], []
        size = block.tokens.shape[1]
        columns = functools.cache(lambda before, width: window_columns(block, before, width))

        def convolution(
            x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any
        ) -> Tensor:
            self._columns.append(x)
            windows = gather_columns(x, columns(x.shape[-1] - size, weight.shape[-1]))  # (B, C, S, W)
            summed = (windows * weight[:, None].float()).sum(-1)
            return ACTIVATIONS[activation](summed if bias is None else summed + bias[:, None].float()).to(x.dtype)

        def delta_rule(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
            before, unit = more["initial_state"], more.get("use_qk_l2norm_in_kernel", False)
            output, fed = delta_rule_on_tree(query, key, value, more["g"], more["beta"], before, block.sees, unit)
            self._fed.append(fed)
            return output, before

        stock = {name: getattr(self._module, name) for name in (CONVOLUTION, DELTA_RULE)}
        try:
            setattr(self._module, CONVOLUTION, convolution)
            setattr(self._module, DELTA_RULE, delta_rule)
            yield
        finally:
            for name, function in stock.items():
                setattr(self._module, name, function)
        if len(self._fed) != len(self.numbers) or len(self._columns) != len(self.numbers):
            raise ValueError(f"{len(self.numbers)} recurrent layers, but {len(self._fed)} were heard")

    def commit(self, cache: Any, path: Tensor, kept: Tensor) -> None:
        """Put ``cache`` where it would be had it read, of the block, the slots ``path (B, K)`` that are ``kept`` alone.

        All layers are of one shape: what is small is done for all of them at once.
        """
        if self._module is None or not path.shape[1]:
            return
        layers: list[Any] = [cache.layers[number] for number in self.numbers]
        rows, size, width = len(path), self._fed[0].keys.shape[2], layers[0].conv_kernel_size[0]
        before = self._columns[0].shape[-1] - size
        read = torch.cat([torch.arange(before, device=path.device).expand(rows, -1), before + path], 1)
        ends = torch.arange(before - width, before, device=path.device) + kept.sum(1, keepdim=True)  # (B, width)
        path, kept, ends = (x.repeat(len(layers), 1) for x in (path, kept, read.gather(1, ends)))
        convolved = gather_columns(torch.cat(self._columns), ends).split(rows)
        fed = Fed(*(torch.cat([getattr(one, field.name) for one in self._fed]) for field in fields(Fed)))
        moves = (part.split(rows) for part in fed.along(path, kept))
        for layer, columns, (factor, keys, news) in zip(layers, convolved, zip(*moves, strict=True), strict=True):
            layer.conv_states[0] = columns
            layer.recurrent_states[0] = (layer.recurrent_states[0] * factor).add_(keys.mT @ news)


def delta_rule_on_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    state: Tensor,
    sees: Tensor,
    unit: bool = False,
) -> tuple[Tensor, Fed]:
    """The gated delta rule (arXiv 2412.06464) where every slot follows its parent.

    A token decays its parent's state by ``exp(decay)``, and adds of its value what the state does not say of its key yet:
    ``news = rate (value - key state)``. Along a path each slot's news are thus linear in its ancestors', with a triangular
    matrix of ones on the diagonal. All slots are solved at once.

    Args:
        query, key: ``(B, S, G, E)``; each of the ``G`` serves ``H / G`` heads of values one after the other.
        value: ``(B, S, H, d)``.
        decay, rate: ``(B, S, H)``; decay is a logarithm, 0 or less.
        state: before the block, ``(B, H, E, d)`` in float32; it is left as it is.
        sees: which slots each slot follows, and itself, ``(B, S, S)``; parents come first.
        unit: bring queries and keys to unit length, as these layers do.

    Returns:
        what each slot reads, ``(B, S, H, d)`` in the value's dtype, and what the block feeds the state.
    """
    pair = torch.stack([query, key]).float().transpose(2, 3)  # (2, B, G, S, E)
    if unit:
        pair = pair * torch.rsqrt(pair.square().sum(-1, keepdim=True) + 1e-6)
    pair = pair.repeat_interleave(value.shape[2] // key.shape[2], 2)  # (2, B, H, S, E)
    keys = pair[1]
    decays = (sees.float() @ decay.float()).transpose(1, 2)  # (B, H, S)
    between = (decays[..., :, None] - decays[..., None, :]).masked_fill(~sees[:, None], -torch.inf).exp()
    queried, known = between * (pair @ keys.mT)  # (B, H, S, S) each
    recalled, recited = decays.exp()[..., None] * (pair @ state)  # (B, H, S, d) each: what the state says of them
    rates, values = rate.float().transpose(1, 2)[..., None], value.float().transpose(1, 2)
    # Ones on the diagonal are implied, what stands there is not read.
    news = torch.linalg.solve_triangular(rates * known, rates * (values - recited), upper=False, unitriangular=True)
    read = (recalled + queried @ news) * query.shape[-1] ** -0.5
    return read.transpose(1, 2).to(value.dtype), Fed(keys, news, decays)


def window_columns(block: Block, before: int, width: int) -> Tensor:
    """Which columns each slot's convolution reads, ``(B, S, width)``: its path's, and what was there before the block.

    Args:
        before: columns before the block; at least ``width - 1``.
    """
    steps = torch.arange(width - 1, -1, -1, device=block.tokens.device)  # back along the path
    up = block.depths[..., None] - steps  # (B, S, width) depth of what is read; negative: before the block
    return before + torch.where(up < 0, up, block.above.gather(2, up.clamp_min(0)))


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Columns ``(B, ...)`` of ``x (B, C, T)``: ``(B, C, ...)``."""
    flat = columns.flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, flat).unflatten(2, columns.shape[1:])


def merge(caches: list[Any], length: int) -> Any:
    """Caches of one row each -> one of all rows; keys and values are padded on the right to ``length`` tokens."""
    merged = caches[0]
    for layer, *others in zip(*(cache.layers for cache in caches), strict=True):
        rows = [layer, *others]
        if isinstance(layer, LinearAttentionLayer):
            layer.conv_states[0] = torch.cat([row.conv_states[0] for row in rows])
            layer.recurrent_states[0] = torch.cat([row.recurrent_states[0] for row in rows])
        else:
            layer.keys, layer.values = (
                torch.cat([F.pad(getattr(row, name), (0, 0, 0, length - row.keys.shape[2])) for row in rows])
                for name in ("keys", "values")
            )
    return merged


def select(cache: Any, rows: Tensor) -> None:
    """Leave these rows of a cache."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            states: Any
            for states in (layer.conv_states, layer.recurrent_states):
                states[0] = states[0][rows]
        else:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def delta_rule_layers(model: Any) -> list[int]:
    """Numbers of the layers that can be listened to; recurrent layers of another kind are not among them."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    return [n for n, kind in enumerate(kinds) if kind == "linear_attention"] if _module_of(model) else []


def _module_of(model: Any) -> ModuleType | None:
    """The one module of Transformers that writes the model's delta rules, if there is one."""
    modules = {sys.modules[type(part).__module__] for part in model.modules() if hasattr(part, "conv1d")}
    found = [module for module in modules if all(hasattr(module, name) for name in (CONVOLUTION, DELTA_RULE))]
    return found[0] if len(found) == 1 else None
