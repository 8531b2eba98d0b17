"""Drafts as trees: a chain is a tree of width one.

The root of every tree is the token that is already committed and that the target has not read yet. A node is a guess at
what follows its parent; the target reads all nodes at once, each seeing its own ancestors alone, and what it says behind a
node decides which of that node's children, if any, is right.

Shapes: ``B`` rows, ``S`` slots of a block, the root in slot 0; ``V`` vocabulary.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Drafts of one row.

    Attributes:
        tokens: of each node.
        parents: the number of each node's parent, smaller than its own; -1 is the root.
        odds: what each node was drawn from, ``(nodes, V)`` probabilities; None where nodes were chosen and not drawn.
    """

    tokens: list[int]
    parents: list[int]
    odds: Tensor | None = None

    def __post_init__(self) -> None:
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents must come before their children: {self.parents}")
        branches = list(zip(self.parents, self.tokens, strict=True))
        if len(set(branches)) < len(branches):
            raise ValueError("two children of one node are the same token")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """Slots of the children by their tokens, for the root and each node: ``children[slot][token]``."""
        found: list[dict[int, int]] = [{} for _ in range(len(self) + 1)]
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            found[parent + 1][token] = node + 1
        return found

    @cached_property
    def depth(self) -> int:
        """Drafts on the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return max(depths, default=0)


def chain(tokens: Sequence[int], odds: Tensor | None = None) -> Tree:
    """One draft behind the other."""
    return Tree(list(tokens), list(range(-1, len(tokens) - 1)), odds)


def best_first(logprobs: Tensor, ids: Tensor, budget: int) -> Tree:
    """The tree of the ``budget`` likeliest nodes, where slots are independent: DDTree (arXiv 2604.12989).

    A node is as likely as the product of its path, so one is never worth more than its parent or than the likelier tokens
    beside it: taking the best that is open, and opening its first child and its next sibling, finds them in order.

    Args:
        logprobs, ids: of each slot its likeliest tokens, best first, ``(slots, width)``.
    """
    slots, width = logprobs.shape
    values, names = logprobs.tolist(), ids.tolist()
    tokens: list[int] = []
    parents: list[int] = []
    # (minus the path's log-probability, a number that breaks ties by age, parent, its log-probability, depth, rank)
    waiting = [(-values[0][0], 0, -1, 0.0, 0, 0)] if slots and width else []
    pushed = 1
    while waiting and len(tokens) < budget:
        worth, _, parent, above, depth, rank = heapq.heappop(waiting)
        node = len(tokens)
        tokens.append(names[depth][rank])
        parents.append(parent)
        if rank + 1 < width:
            heapq.heappush(waiting, (-above - values[depth][rank + 1], pushed, parent, above, depth, rank + 1))
        if depth + 1 < slots:
            heapq.heappush(waiting, (worth - values[depth + 1][0], pushed + 1, node, -worth, depth + 1, 0))
        pushed += 2
    return Tree(tokens, parents)


@dataclass(frozen=True)
class Block:
    """Trees of a batch as the target reads them, as wide as the largest.

    What a smaller one lacks is filled up by its root's token again, as further children of the root: read like the others,
    and in no tree.

    Attributes:
        tokens: ``(B, S)``.
        depths: ancestors of each slot, ``(B, S)``.
        above: of each slot the slot of its path at each depth, ``(B, S, depths)``, its own from its own depth on.
        sees: which slots each slot reads: its ancestors and itself, ``(B, S, S)`` bool.
    """

    tokens: Tensor
    depths: Tensor
    above: Tensor
    sees: Tensor

    @classmethod
    def build(cls, roots: Sequence[int], trees: Sequence[Tree], device: torch.device, least: int = 1) -> "Block":
        """Lay trees out, in ``least`` slots or more."""
        width = max(least, 1 + max(map(len, trees)))
        tokens, paths = [], []
        for root, tree in zip(roots, trees, strict=True):
            tokens.append([root, *tree.tokens] + [root] * (width - 1 - len(tree)))
            path = [[0]]
            for slot, parent in enumerate([*tree.parents] + [-1] * (width - 1 - len(tree)), start=1):
                path.append([*path[parent + 1], slot])
            paths.append(path)
        deepest = max(len(path) for row in paths for path in row)
        above = torch.tensor([[path + path[-1:] * (deepest - len(path)) for path in row] for row in paths])
        depths = torch.tensor([[len(path) - 1 for path in row] for row in paths])
        sees = torch.zeros(len(paths), width, width, dtype=torch.bool).scatter_(2, above, True)
        return cls(torch.tensor(tokens, device=device), depths.to(device), above.to(device), sees.to(device))


def paths_tensor(paths: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Slots of each row's path, ``(B, K)``, and which of them there are; the rest is 0."""
    longest = max(map(len, paths), default=0)
    padded = [[*path] + [0] * (longest - len(path)) for path in paths]
    lengths = torch.tensor([len(path) for path in paths], device=device)
    there = torch.arange(longest, device=device) < lengths[:, None]
    return torch.tensor(padded, device=device, dtype=torch.long).view(len(paths), longest), there
