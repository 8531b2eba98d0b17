"""Blocks: where they are anchored, what their slots are asked, and which slots count.

A block of ``S`` slots at anchor ``a``: slot 0 holds token ``a``, which is known; slots 1 to S-1 hold the mask token, and
slot ``k`` is asked for token ``a + k``. What it may read of the target are the features strictly before ``a``.

Documents of a step lie back to back in one row; positions count from the begin of a block's own document.

Shapes: ``T`` tokens of the row, ``N`` blocks, ``S`` slots.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of a row of documents, in the order of their documents; at the end there may be empty ones."""

    anchors: Tensor
    """``(N)`` position of slot 0 in its document; 0 where there is no block."""
    starts: Tensor
    """``(N)`` where the block's document begins in the row."""
    counted: Tensor
    """``(N, S)`` True where a slot has a label: never slot 0, and nothing from the first gap on."""

    @property
    def block_size(self) -> int:
        """``S``."""
        return self.counted.shape[-1]

    @property
    def positions(self) -> Tensor:
        """``(N, S)`` position that each slot stands on, in its document."""
        return self.anchors[:, None] + torch.arange(self.block_size, device=self.anchors.device)

    @property
    def exists(self) -> Tensor:
        """``(N)`` bool; a block's first guess always has a label."""
        return self.counted[:, 1]

    def to(self, device: torch.device) -> "Blocks":
        """The same on ``device``."""
        return Blocks(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def draw_anchors(candidates: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` of ``candidates (C)`` without replacement; all of them where there are fewer. Sorted."""
    chosen = torch.randperm(len(candidates), generator=generator)[:count]
    return candidates[chosen].sort().values


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """Positions of a document that can be an anchor: supervised ones with a supervised successor.

    A block whose first guess has no label teaches nothing.

    Args:
        loss_mask: ``(t)`` bool.
    """
    return (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]


def anchor_budgets(supervised: list[int], candidates: list[int], total: int) -> list[int]:
    """Share ``total`` anchors among documents in proportion to their supervised tokens.

    Nobody gets more than it has candidates; what is left over goes round again, so that a row holds ``total`` blocks
    wherever its documents have as many candidates.
    """
    budgets = [0] * len(supervised)
    left = min(total, sum(candidates))
    while left:
        open_documents = [i for i, most in enumerate(candidates) if budgets[i] < most]
        tokens = sum(supervised[i] for i in open_documents)
        shares = {i: min(left * supervised[i] // tokens, candidates[i] - budgets[i]) for i in open_documents}
        if not any(shares.values()):  # fewer anchors than documents: one each, to those with the most tokens
            fewest = sorted(open_documents, key=lambda i: (budgets[i], -supervised[i], i))
            shares = dict.fromkeys(fewest[:left], 1)
        for i, share in shares.items():
            budgets[i] += share
        left -= sum(shares.values())
    return budgets


def build_blocks(anchors: list[Tensor], loss_masks: list[Tensor], block_size: int, count: int | None = None) -> Blocks:
    """Lay out the blocks of a row and clip them.

    A block is cut at the first slot that leaves its document or stands on an unsupervised token: what comes behind a
    gap was not said by the target in one breath.

    Args:
        anchors: for each document, ``(n)`` positions in it.
        loss_masks: for each document, ``(t)`` bool.
        count: fill up with empty blocks to so many.
    """
    starts, counted, start = [], [], 0
    for drawn, loss_mask in zip(anchors, loss_masks, strict=True):
        places = drawn[:, None] + torch.arange(block_size)
        reached = torch.nn.functional.pad(loss_mask, (0, block_size))[places]
        counted.append(reached.long().cumprod(-1).bool())
        starts.append(torch.full_like(drawn, start))
        start += len(loss_mask)
    blocks = Blocks(torch.cat(anchors), torch.cat(starts), torch.cat(counted))
    blocks.counted[:, 0] = False
    empty = 0 if count is None else count - len(blocks.anchors)
    if empty <= 0:
        return blocks
    pad = torch.nn.functional.pad
    return Blocks(
        pad(blocks.anchors, (0, empty)), pad(blocks.starts, (0, empty)), pad(blocks.counted, (0, 0, 0, empty))
    )


def block_inputs(anchors: Tensor, mask: Tensor, block_size: int) -> Tensor:
    """What the slots hold, ``(N, S, D)``: the embedding of the anchor's token, ``anchors (N, D)``, then that of the mask."""
    return torch.cat([anchors[:, None], mask.expand(len(anchors), block_size - 1, -1)], 1)


def leading_run(correct: Tensor, counted: Tensor) -> Tensor:
    """Drafts accepted of each block: the run of correct counted slots from slot 1 on.

    Args:
        correct, counted: ``(..., S)`` bool.

    Returns:
        ``(...)`` long.
    """
    return (correct & counted)[..., 1:].long().cumprod(-1).sum(-1)
