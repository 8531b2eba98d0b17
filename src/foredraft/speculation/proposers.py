"""Who guesses: the drafter, or the text itself (prompt lookup).

Shapes: ``B`` rows, ``S`` slots, ``L`` taps, ``D`` hidden size, ``V`` vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foredraft.drafter.attention import KeysValues
from foredraft.drafter.drafting import fill_blocks
from foredraft.drafter.model import Drafter
from foredraft.speculation.session import Slots
from foredraft.speculation.tree import Tree, best_first, chain
from foredraft.speculation.verdicts import probabilities
from foredraft.target.frozen import FrozenTarget
from foredraft.target.generate import Sampling


class Proposer(Protocol):
    """Proposes drafts for every row of a batch."""

    def observe(self, slots: Slots) -> None:
        """Take in what the target has just read."""

    def propose(self, sequences: list[list[int]]) -> list[Tree]:
        """Drafts that continue each row's committed tokens (prompt included); a row may get fewer, or none."""

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the batch alone."""


class DFlashProposer:
    """A drafter beside its target. Context features are projected once and kept, masked like the target's cache.

    Args:
        drafts: on a path; by default as many as the drafter was trained for.
        budget: nodes of a tree of the likeliest drafts; None: a chain of each slot's likeliest.
        drawn: draw a chain from this distribution of the drafter's, by these ``generators``, one a row. They may be those
            that the verdicts draw by, never others of the same seeds: drafts and verdicts must not draw the same numbers.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: FrozenTarget,
        drafts: int | None = None,
        budget: int | None = None,
        drawn: Sampling | None = None,
        generators: Sequence[torch.Generator] = (),
    ):
        self._drafter, self._target = drafter, target
        self._size = 1 + (drafts or drafter.shape.choice.block_size - 1)
        self._budget, self._drawn = budget, drawn
        self._generators = list(generators)
        self._context: list[KeysValues] = []
        self._positions = torch.zeros(0)
        self._valid = torch.zeros(0)

    def observe(self, slots: Slots) -> None:
        new = self._drafter.read_context(slots.taps.to(self._drafter.fc.weight.dtype), slots.positions)
        if not self._context:
            self._context, self._positions, self._valid = new, slots.positions, slots.valid
            return
        self._context = [
            KeysValues(torch.cat([old.keys, more.keys], dim=2), torch.cat([old.values, more.values], dim=2))
            for old, more in zip(self._context, new, strict=True)
        ]
        self._positions = torch.cat([self._positions, slots.positions], dim=1)
        self._valid = torch.cat([self._valid, slots.valid], dim=1)

    def propose(self, sequences: list[list[int]]) -> list[Tree]:
        return self.trees(self.logits(sequences))

    def keep(self, rows: list[int]) -> None:
        self._context = [KeysValues(kept.keys[rows], kept.values[rows]) for kept in self._context]
        self._positions, self._valid = self._positions[rows], self._valid[rows]
        self._generators = [self._generators[row] for row in rows] if self._generators else []

    def logits(self, sequences: list[list[int]]) -> Tensor:
        """The drafter's logits of each row's drafts, ``(B, S - 1, V)``."""
        choice, size, device = self._drafter.shape.choice, self._size, self._positions.device
        anchors = torch.tensor([len(sequence) - 1 for sequence in sequences], device=device)  # (B)
        block = torch.full((len(sequences), size), choice.mask_token_id, device=device)  # (B, S)
        block[:, 0] = torch.tensor([sequence[-1] for sequence in sequences], device=device)
        embedded = self._target.embeddings(block)
        hidden = fill_blocks(self._drafter, embedded, anchors, self._context, self._positions, self._valid)
        drafts = hidden[:, 1:].flatten(0, 1)  # of a part of a batch the product would copy the whole head first
        found: Tensor = self._target.head(drafts).unflatten(0, (len(sequences), -1))
        return found

    def trees(self, logits: Tensor) -> list[Tree]:
        """Drafts from logits ``(B, S - 1, V)``."""
        if self._budget is not None:
            logprobs, ids = logits.float().log_softmax(-1).topk(min(self._budget, logits.shape[-1]))
            return [best_first(*row, self._budget) for row in zip(logprobs.cpu(), ids.cpu(), strict=True)]
        if self._drawn is None:
            return [chain(tokens) for tokens in logits.argmax(-1).tolist()]
        odds = probabilities(logits, self._drawn).cpu()
        drawn = (own.multinomial(1, generator=g) for own, g in zip(odds, self._generators, strict=True))
        return [chain(tokens.flatten().tolist(), own) for tokens, own in zip(drawn, odds, strict=True)]


class LookupProposer:
    """Prompt lookup: what followed the last time that the text ended like this.

    The last ``ngram`` tokens are searched in all that came before, latest match first; then one token fewer, down to
    ``least``.
    """

    def __init__(self, drafts: int, ngram: int, least: int = 1):
        self._drafts, self._ngram, self._least = drafts, ngram, least

    def observe(self, slots: Slots) -> None:
        """Features are of no use here."""

    def propose(self, sequences: list[list[int]]) -> list[Tree]:
        return [chain(self.continuation(sequence)) for sequence in sequences]

    def keep(self, rows: list[int]) -> None:
        """Rows are looked up one by one."""

    def continuation(self, sequence: list[int]) -> list[int]:
        """Drafts for one sequence."""
        for size in range(min(self._ngram, len(sequence) - 1), self._least - 1, -1):
            ending = sequence[-size:]
            for start in range(len(sequence) - size - 1, -1, -1):
                if sequence[start : start + size] == ending:
                    return sequence[start + size : start + size + self._drafts]
        return []
