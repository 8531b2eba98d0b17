"""The target's side of a decoding: verify a block, then keep what was accepted and forget the rest.

Two ways to forget, by what the target's cache is made of:

* :class:`SlotSession`: every layer attends to everything. A rejected token's slot stays in the cache and is masked out for
  good, so rows of a batch may accept different numbers of drafts, and nothing is ever cropped.
* :class:`ReplaySession`: some layer has a recurrent state (GDN) or a window. A state cannot be cropped, and Transformers'
  ``Cache.crop`` leaves it polluted without an error; so what a crop cannot mend is copied before a block and put back,
  and the accepted tokens are fed again. Exact, one row at a time, two target passes on a partly accepted block.

Shapes: ``B`` rows, ``S`` slots of a block, ``L`` taps, ``D`` hidden size, ``V`` vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from foredraft.target.frozen import FrozenTarget, attends_to_everything


@dataclass(frozen=True)
class Slots:
    """Tokens that the target has just read: taps ``(B, S, L, D)``, positions and whether committed, ``(B, S)``."""

    taps: Tensor
    positions: Tensor
    valid: Tensor


class Session(Protocol):
    """One batch of prompts on one target."""

    passes: int

    def prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Slots]:
        """Read the prompts; returns the logits after each, ``(B, V)``, and their slots."""

    def verify(self, block: Tensor) -> Tensor:
        """Read blocks ``(B, S)`` on top of what is committed; returns logits ``(B, S, V)``."""

    def commit(self, kept: Tensor) -> Slots:
        """Keep the first ``kept`` ``(B)`` tokens of each block just verified; returns the block's slots."""


class SlotSession:
    """Batched session of a target whose every layer attends to everything."""

    def __init__(self, target: FrozenTarget):
        self._target = target
        self.passes = 0

    def prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Slots]:
        input_ids, mask = _pad(prompts)
        device = self._target.device
        self._mask = mask.to(device)  # (B, slots so far)
        self._lengths = self._mask.sum(1)  # (B) committed tokens
        self._cache = DynamicCache(config=self._target.model.config)
        positions = torch.arange(input_ids.shape[1], device=device)[None].expand_as(self._mask)
        # Logits of all positions would be the largest tensor by far: only where some row ends.
        ends, end_of_row = (self._lengths - 1).unique(return_inverse=True)
        taps, logits = self._read(input_ids.to(device), positions, logits_to_keep=ends)
        last = logits[torch.arange(len(prompts), device=device), end_of_row]
        return last, Slots(taps, positions, self._mask.bool())

    def verify(self, block: Tensor) -> Tensor:
        self._positions = self._lengths[:, None] + torch.arange(block.shape[1], device=block.device)  # (B, S)
        self._mask = torch.cat([self._mask, torch.ones_like(block)], dim=1)
        self._taps, logits = self._read(block, self._positions)
        return logits

    def commit(self, kept: Tensor) -> Slots:
        size = self._positions.shape[1]
        valid = torch.arange(size, device=kept.device) < kept[:, None]
        self._mask[:, -size:] = valid.long()
        self._lengths = self._lengths + kept
        return Slots(self._taps, self._positions, valid)

    def _read(self, input_ids: Tensor, positions: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.passes += 1
        return self._target.step(input_ids, self._cache, attention_mask=self._mask, position_ids=positions, **kwargs)


class ReplaySession:
    """One-row session of any target, by copies of what a crop cannot mend."""

    def __init__(self, target: FrozenTarget):
        self._target = target
        self.passes = 0

    def prefill(self, prompts: list[list[int]]) -> tuple[Tensor, Slots]:
        if len(prompts) != 1:
            raise ValueError(
                f"a target with recurrent or windowed layers decodes one prompt at a time, not {len(prompts)}"
            )
        self._length = 0
        self._cache: Any = DynamicCache(config=self._target.model.config)
        taps, logits = self._read(torch.tensor(prompts, device=self._target.device), logits_to_keep=1)
        self._length = len(prompts[0])
        positions = torch.arange(self._length, device=logits.device)[None]
        return logits[:, -1], Slots(taps, positions, torch.ones_like(positions, dtype=torch.bool))

    def verify(self, block: Tensor) -> Tensor:
        self._block = block
        self._saved = {
            index: copy.deepcopy(layer)
            for index, layer in enumerate(self._cache.layers)
            if type(layer) is not DynamicLayer
        }
        self._taps, logits = self._read(block)
        return logits

    def commit(self, kept: Tensor) -> Slots:
        size, count = self._block.shape[1], int(kept[0])
        positions = self._length + torch.arange(size, device=kept.device)[None]
        if count < size:
            self._restore(size)
            if count:
                self._read(self._block[:, :count])
        self._length += count
        return Slots(self._taps, positions, torch.arange(size, device=kept.device)[None] < count)

    def _restore(self, fed: int) -> None:
        for index, layer in enumerate(self._cache.layers):
            if index in self._saved:
                self._cache.layers[index] = self._saved[index]
            else:
                layer.crop(-fed)

    def _read(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.passes += 1
        return self._target.step(input_ids, self._cache, **kwargs)


def open_session(target: FrozenTarget) -> Session:
    """The fastest exact session for this target."""
    return SlotSession(target) if attends_to_everything(target.model) else ReplaySession(target)


def _pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad prompts to ``(B, T)`` ids and mask."""
    lengths = torch.tensor([len(ids) for ids in prompts])
    input_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True)
    return input_ids, (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
