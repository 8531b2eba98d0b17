"""The target's side of a decoding: read trees of drafts, then keep what was accepted and forget the rest.

* :class:`TreeSession`: one pass of the target a step, for every target whose layers attend to everything or are gated
  delta rules (Qwen3.5, Qwen3-Next, OLMo-hybrid), any tree, any number of rows. Accepted slots are gathered from keys and
  values, rows that accepted fewer have slots that are masked out for good; recurrent states are rebuilt from what the
  block fed them (:mod:`foredraft.speculation.recurrent`). Transformers' ``Cache.crop`` would leave them polluted without
  an error.
* :class:`ReplaySession`: the simple oracle, and for targets with other layers, such as windows. Drafts are read on a copy
  of the cache, path by path, and what was accepted is read again. One row at a time.

Shapes: ``B`` rows, ``S`` slots of a block, ``K`` kept slots, ``L`` taps, ``D`` hidden size, ``V`` vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from foredraft.speculation.recurrent import RecurrentLayers, delta_rule_layers, merge, select
from foredraft.speculation.tree import Block, Tree, paths_tensor
from foredraft.target.frozen import FrozenTarget


@dataclass(frozen=True)
class Slots:
    """Tokens that the target has read: taps ``(B, K, L, D)``, positions and whether committed, ``(B, K)``."""

    taps: Tensor
    positions: Tensor
    valid: Tensor


class Session(Protocol):
    """One batch of prompts on one target.

    Attributes:
        passes: forward passes of the target, the prompt's among them.
        fed: tokens read in them, fillings not counted.
    """

    passes: int
    fed: int

    def prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Slots]:
        """Read the prompts; returns the logits after each, ``(B, V)``, and their slots."""

    def verify(self, roots: list[int], trees: list[Tree]) -> Tensor:
        """Read a tree a row, on top of what is committed; returns logits ``(B, S, V)``, the root's in slot 0.

        Args:
            roots: the token each row committed last, which no pass has read yet.
        """

    def commit(self, paths: list[list[int]]) -> Slots:
        """Keep these slots of the trees just verified, root first; of a row that is done, none. Returns them."""

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the batch alone."""


class TreeSession:
    """One pass a step, exact on attention and on recurrent states."""

    def __init__(self, target: FrozenTarget):
        self._target, self._recurrent = target, RecurrentLayers(target.model)
        self.passes = self.fed = 0

    def prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Slots]:
        device = self._target.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._lengths = lengths  # (B) committed tokens
        self._valid = torch.arange(int(lengths.max()), device=device) < lengths[:, None]  # (B, slots so far)
        positions = torch.arange(self._valid.shape[1], device=device)[None].expand_as(self._valid)
        # A recurrent state would take in the padding of a batch.
        taps, logits = self._prefill_by_row(prompts) if self._recurrent.numbers else self._prefill_padded(prompts)
        return logits, Slots(taps, positions, self._valid)

    def verify(self, roots: list[int], trees: list[Tree]) -> Tensor:
        # A single token takes another way through recurrent layers.
        self._block = block = Block.build(roots, trees, self._target.device, least=2 if self._recurrent.numbers else 1)
        self._positions = self._lengths[:, None] + block.depths  # (B, S)
        seen = torch.cat([self._valid[:, None].expand(-1, block.tokens.shape[1], -1), block.sees], -1)[:, None]
        with self._recurrent.reading(block):
            self._taps, logits = self._read(
                block.tokens, attention_mask=self._additive(seen), position_ids=self._positions
            )
        self.fed += sum(1 + len(tree) for tree in trees)
        return logits

    def commit(self, paths: list[list[int]]) -> Slots:
        path, kept = paths_tensor(paths, self._target.device)
        row, before = torch.arange(len(paths), device=path.device)[:, None], self._valid.shape[1]
        for layer in self._cache.layers:
            if not isinstance(layer, LinearAttentionLayer):
                for name in ("keys", "values"):
                    held = getattr(layer, name)  # (B, G, slots, d)
                    new = held[:, :, before:].transpose(1, 2)[row, path].transpose(1, 2)
                    setattr(layer, name, torch.cat([held[:, :, :before], new], 2))
        self._recurrent.commit(self._cache, path, kept)
        self._valid = torch.cat([self._valid, kept], 1)
        self._lengths = self._lengths + kept.sum(1)
        return Slots(self._taps[row, path], self._positions[row, path], kept)

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self._target.device)
        select(self._cache, index)
        self._lengths, self._valid = self._lengths[index], self._valid[index]

    def _prefill_padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        padded = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True).to(self._target.device)
        self._cache = DynamicCache(config=self._target.model.config)
        # Logits of all positions would be the largest tensor by far: only where some row ends.
        ends, end_of_row = (self._lengths - 1).unique(return_inverse=True)
        taps, logits = self._read(padded, attention_mask=self._valid.long(), logits_to_keep=ends)
        self.fed += sum(map(len, prompts))
        return taps, logits[torch.arange(len(prompts), device=logits.device), end_of_row]

    def _prefill_by_row(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        rows, caches = [], []
        for prompt in prompts:
            self._cache = DynamicCache(config=self._target.model.config)
            rows.append(self._read(torch.tensor([prompt], device=self._target.device), logits_to_keep=1))
            caches.append(self._cache)
            self.fed += len(prompt)
        self._cache = merge(caches, self._valid.shape[1])
        return pad_sequence([taps[0] for taps, _ in rows], batch_first=True), torch.cat(
            [last[:, -1] for _, last in rows]
        )

    def _additive(self, seen: Tensor) -> Tensor:
        """As every implementation of attention takes a mask."""
        dtype = self._target.model.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)

    def _read(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.passes += 1
        return self._target.step(input_ids, self._cache, **kwargs)


class ReplaySession:
    """One row of any target, by copies of its cache: two passes and more a step."""

    def __init__(self, target: FrozenTarget):
        self._target = target
        self.passes = self.fed = 0

    def prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Slots]:
        if len(prompts) != 1:
            raise ValueError(f"this target decodes one prompt at a time, not {len(prompts)}")
        self._length = 0
        self._cache = DynamicCache(config=self._target.model.config)
        slots, logits = self._read(prompts[0], self._cache, logits_to_keep=1)
        self._length = len(prompts[0])
        return logits[:, -1], slots

    def verify(self, roots: list[int], trees: list[Tree]) -> Tensor:
        self._tokens, (tree,) = [*roots, *trees[0].tokens], trees
        found: dict[int, Tensor] = {}
        for leaf in (slot for slot, children in enumerate(tree.children) if not children):
            path = [leaf]
            while path[-1]:
                path.append(tree.parents[path[-1] - 1] + 1)
            path.reverse()
            _, logits = self._read([self._tokens[slot] for slot in path], copy.deepcopy(self._cache))
            found |= dict(zip(path, logits[0], strict=True))
        return torch.stack([found[slot] for slot in range(len(self._tokens))])[None]

    def commit(self, paths: list[list[int]]) -> Slots:
        (path,) = paths
        slots, _ = self._read([self._tokens[slot] for slot in path], self._cache)
        self._length += len(path)
        return slots

    def keep(self, rows: list[int]) -> None:
        """There is only one."""

    def _read(self, tokens: list[int], cache: Any, **kwargs: Any) -> tuple[Slots, Tensor]:
        self.passes += 1
        self.fed += len(tokens)
        taps, logits = self._target.step(torch.tensor([tokens], device=self._target.device), cache, **kwargs)
        positions = self._length + torch.arange(len(tokens), device=logits.device)[None]
        return Slots(taps, positions, torch.ones_like(positions, dtype=torch.bool)), logits


def reads_trees(target: FrozenTarget) -> bool:
    """Whether every layer of the target's cache is one that :class:`TreeSession` handles."""
    kinds = [type(layer) for layer in DynamicCache(config=target.model.config).layers]
    recurrent = [number for number, kind in enumerate(kinds) if kind is LinearAttentionLayer]
    return set(kinds) <= {DynamicLayer, LinearAttentionLayer} and recurrent == delta_rule_layers(target.model)


def open_session(target: FrozenTarget) -> Session:
    """The fastest exact session for this target."""
    return TreeSession(target) if reads_trees(target) else ReplaySession(target)
