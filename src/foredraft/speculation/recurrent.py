"""Recurrent layers under speculation: what a state is after any node of a tree, without reading a token twice.

A gated delta rule's state cannot be cropped: it has taken in the rejected drafts. But what it takes in of a token is small
(a key, a value, a decay and a rate), and does not depend on the state. So while the target reads a block those are kept,
and once it is known which drafts are right the states are taken from before the block and fed these tokens' alone. The
short convolution before it likewise: its state is the last few columns of its input. That is exact, needs no second pass
of the target, and a rejected token leaves no trace.

On a tree a node's state is its parent's, fed the node, and its convolution reaches back along its own path.

Transformers 5.24 writes these layers alike (Qwen3-Next, Qwen3.5, OLMo-hybrid): they call ``causal_conv1d_fn`` and
``torch_chunk_gated_delta_rule`` by these names of their module, which is where this listens.

Shapes: ``B`` rows, ``S`` slots, ``K`` kept slots, ``C`` channels, ``W`` width of the convolution, ``H`` heads, ``d``
their size.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionLayer

from foredraft.speculation.tree import Block

CONVOLUTION, CHUNK_RULE, STEP_RULE = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu}


@dataclass(frozen=True)
class Fed:
    """What one layer's delta rule was given for a block: keys, values ``(B, S, H, d)``, decays and rates ``(B, S, H)``."""

    keys: Tensor
    values: Tensor
    decays: Tensor
    rates: Tensor
    state: Tensor
    """Before the block, ``(B, H, d, d)``."""
    options: dict[str, Any]


class RecurrentLayers:
    """The :func:`delta_rule_layers` of a model, and what the last block fed them."""

    def __init__(self, model: Any):
        self.numbers = delta_rule_layers(model)
        self._module = _module_of(model) if self.numbers else None
        self._columns: list[Tensor] = []
        self._fed: list[Fed] = []

    @contextmanager
    def listening(self, block: Block) -> Iterator[None]:
        """While the target reads ``block`` on top of a cache, in one pass."""
        if self._module is None:
            yield
            return
        self._columns, self._fed = [], []
        convolve, rule, step = (getattr(self._module, name) for name in (CONVOLUTION, CHUNK_RULE, STEP_RULE))
        size = block.tokens.shape[1]

        def convolution(
            x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **more: Any
        ) -> Tensor:
            self._columns.append(x)
            if block.is_chain:
                found: Tensor = convolve(x, weight, bias, activation=activation, **more)
                return found
            windows = gather_columns(x, window_columns(block, x.shape[-1] - size, weight.shape[-1]))  # (B, C, S, W)
            summed = (windows.float() * weight[:, None].float()).sum(-1)
            return ACTIVATIONS[activation](summed if bias is None else summed + bias[:, None].float()).to(x.dtype)

        def delta_rule(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
            options = {name: more[name] for name in ("use_qk_l2norm_in_kernel",) if name in more}
            before = more["initial_state"].clone()  # the cache overwrites its own
            self._fed.append(Fed(key, value, more["g"], more["beta"], before, options))
            if block.is_chain:
                found: tuple[Tensor, Tensor] = rule(query, key, value, **more)
                return found
            return along_tree(block, step, query, self._fed[-1])

        try:
            setattr(self._module, CONVOLUTION, convolution)
            setattr(self._module, CHUNK_RULE, delta_rule)
            yield
        finally:
            setattr(self._module, CONVOLUTION, convolve)
            setattr(self._module, CHUNK_RULE, rule)
        if len(self._fed) != len(self.numbers) or len(self._columns) != len(self.numbers):
            raise ValueError(f"{len(self.numbers)} recurrent layers, but {len(self._fed)} were heard")

    def commit(self, cache: Any, path: Tensor, kept: Tensor) -> None:
        """Put ``cache`` where it would be had it read, of the block, the slots ``path (B, K)`` that are ``kept`` alone."""
        if self._module is None:
            return
        step = getattr(self._module, STEP_RULE)
        row = torch.arange(len(path), device=path.device)[:, None]
        for number, columns, fed in zip(self.numbers, self._columns, self._fed, strict=True):
            layer: Any = cache.layers[number]
            before = columns.shape[-1] - fed.keys.shape[1]
            width = layer.conv_kernel_size[0]
            read = torch.cat([torch.arange(before, device=path.device).expand(len(path), -1), before + path], 1)
            last = torch.arange(before - width, before, device=path.device) + kept.sum(1, keepdim=True)  # (B, width)
            layer.conv_states[0] = gather_columns(columns, read.gather(1, last))
            keys, values, decays, rates = (x[row, path] for x in (fed.keys, fed.values, fed.decays, fed.rates))
            # Neither decayed nor fed: what is not kept changes nothing.
            decays, rates = (torch.where(kept[..., None], x, 0.0) for x in (decays, rates))
            if path.shape[1]:
                _, state = step(
                    keys,
                    keys,
                    values,
                    g=decays,
                    beta=rates,
                    initial_state=fed.state,
                    output_final_state=True,
                    **fed.options,
                )
            else:
                state = fed.state
            layer.recurrent_states[0] = state.to(fed.state.dtype)


def along_tree(block: Block, step: Any, queries: Tensor, fed: Fed) -> tuple[Tensor, Tensor]:
    """The delta rule where every slot follows its parent: outputs ``(B, S, H, d)``, and the states before the block."""
    size = block.tokens.shape[1]
    states = fed.state[:, None].repeat(1, size, 1, 1, 1)  # (B, S, H, d, d) after each slot
    outputs = torch.empty_like(fed.values)
    for depth in range(int(block.depths.max()) + 1):
        row, slot = (block.depths == depth).nonzero(as_tuple=True)
        parent = block.parents[row, slot]
        before = states[row, parent] if depth else fed.state[row]
        at = (x[row, slot][:, None] for x in (queries, fed.keys, fed.values))
        decays, rates = (x[row, slot][:, None] for x in (fed.decays, fed.rates))
        output, after = step(*at, g=decays, beta=rates, initial_state=before, output_final_state=True, **fed.options)
        outputs[row, slot], states[row, slot] = output[:, 0], after.to(states.dtype)
    return outputs, fed.state


def window_columns(block: Block, before: int, width: int) -> Tensor:
    """Which columns each slot's convolution reads, ``(B, S, width)``: its path's, and what was there before the block.

    Args:
        before: columns before the block; at least ``width - 1``.
    """
    rows, size = block.tokens.shape
    columns = torch.empty(rows, size, width, dtype=torch.long, device=block.tokens.device)
    row = torch.arange(rows, device=columns.device)
    columns[:, 0] = torch.arange(before - width + 1, before + 1, device=columns.device)
    for slot in range(1, size):
        columns[:, slot, :-1] = columns[row, block.parents[:, slot], 1:]
        columns[:, slot, -1] = before + slot
    return columns


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
    found = [module for module in modules if all(hasattr(module, n) for n in (CONVOLUTION, CHUNK_RULE, STEP_RULE))]
    return found[0] if len(found) == 1 else None
