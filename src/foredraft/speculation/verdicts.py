"""What the target says behind a token, and so which draft is right: its argmax, or a token drawn from its distribution.

Sampling is exact whatever is drafted: the committed tokens follow the target's distribution (temperature, then top-k, then
top-p, as Transformers' ``generate``). Where drafts were chosen, a token is drawn from the target and followed while it is
among the drafts. Where one was drawn from ``q``, it is taken with probability ``min(1, p / q)``, and otherwise one is drawn
from what ``p`` has more than ``q`` (speculative sampling, arXiv 2211.17192).

Shapes: ``B`` rows, ``S`` slots, ``V`` vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from foredraft.speculation.tree import Tree
from foredraft.target.generate import Sampling

FEW = 1024


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """``(..., V)`` logits -> what a token is drawn from, float32. Needs a temperature above 0."""
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, -1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p < 1:
        scaled = scaled.masked_fill(scaled < least_of_nucleus(scaled, sampling.top_p), -torch.inf)
    return scaled.softmax(-1)


def least_of_nucleus(logits: Tensor, share: float) -> Tensor:
    """The least of the largest ``logits (..., V)`` that hold this share of the probability together: ``(..., 1)``.

    A few of the largest mostly do, and finding those is much faster than sorting all.
    """
    whole = logits.logsumexp(-1, keepdim=True)
    for size in (min(FEW, logits.shape[-1]), logits.shape[-1]):
        largest = logits.topk(size, -1).values
        shares = (largest - whole).exp()
        if bool((shares.sum(-1) >= share).all()):
            break
    held = shares.cumsum(-1) - shares < share  # the larger ones do not hold it without this one
    return largest.gather(-1, held.sum(-1, keepdim=True) - 1)


class Verdicts(Protocol):
    """What the target says, row by row."""

    def first(self, logits: Tensor) -> list[int]:
        """The tokens behind the prompts, from logits ``(B, V)``."""

    def read(self, logits: Tensor) -> None:
        """Take in the logits ``(B, S, V)`` of the block that is decided next."""

    def after(self, row: int, slot: int, tree: Tree) -> int:
        """The token behind a slot of a row's tree."""

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the batch alone."""


class Greedy:
    """The target's argmax."""

    def first(self, logits: Tensor) -> list[int]:  # noqa: D102
        return logits.argmax(-1).tolist()

    def read(self, logits: Tensor) -> None:  # noqa: D102
        self._best = logits.argmax(-1).tolist()

    def after(self, row: int, slot: int, _tree: Tree) -> int:  # noqa: D102
        return int(self._best[row][slot])

    def keep(self, rows: list[int]) -> None:
        """What is said of a row depends on its logits alone."""


class Sampled:
    """Tokens drawn from the target's distribution, by a generator for each row: what a row draws depends on no other row."""

    def __init__(self, sampling: Sampling, generators: Sequence[torch.Generator]):
        self._sampling, self._generators = sampling, list(generators)

    def first(self, logits: Tensor) -> list[int]:  # noqa: D102
        return [self._draw(row, probabilities(own, self._sampling)) for row, own in enumerate(logits)]

    def read(self, logits: Tensor) -> None:  # noqa: D102
        self._logits = logits

    def after(self, row: int, slot: int, tree: Tree) -> int:  # noqa: D102
        wanted = probabilities(self._logits[row, slot], self._sampling)
        if tree.odds is None or not tree.children[slot]:
            return self._draw(row, wanted)
        ((token, child),) = tree.children[slot].items()
        odds = tree.odds[child - 1].to(wanted.device)
        if torch.rand((), generator=self._generators[row]) * odds[token].cpu() < wanted[token].cpu():
            return token
        return self._draw(row, (wanted - odds).clamp(min=0))

    def keep(self, rows: list[int]) -> None:  # noqa: D102
        self._generators = [self._generators[row] for row in rows]

    def _draw(self, row: int, weights: Tensor) -> int:
        # On the CPU, whose generators give the same everywhere; by one number, and not by one for each token.
        cumulative = weights.double().cpu().cumsum(-1)
        point = torch.rand((), generator=self._generators[row], dtype=torch.float64) * cumulative[-1]
        return int(torch.searchsorted(cumulative, point, right=True).clamp(max=len(cumulative) - 1))


def walk(tree: Tree, row: int, verdicts: Verdicts) -> tuple[list[int], list[int]]:
    """Follow the target's words down a tree.

    Returns:
        the slots passed, root first, and the tokens said behind each: one more than drafts were right.
    """
    path, said = [0], []
    while True:
        token = verdicts.after(row, path[-1], tree)
        said.append(token)
        child = tree.children[path[-1]].get(token)
        if child is None:
            return path, said
        path.append(child)
