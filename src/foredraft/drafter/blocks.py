"""Blocks: where they are anchored, what their slots are asked, and which slots count.

A block of ``S`` slots at anchor ``a``: slot 0 holds token ``a``, which is known; slots 1 to S-1 hold the mask token, and
slot ``k`` is asked for token ``a + k``. What it may read of the target are the features strictly before ``a``.

Shapes: ``B`` documents, ``T`` tokens, ``N`` anchors, ``S`` slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of a batch of documents."""

    anchors: Tensor
    """``(B, N)`` position of slot 0; 0 where there is no block."""
    positions: Tensor
    """``(B, N, S)`` position that each slot stands on."""
    counted: Tensor
    """``(B, N, S)`` True where a slot has a label: never slot 0, and nothing from the first gap on."""

    @property
    def block_size(self) -> int:
        """``S``."""
        return self.positions.shape[-1]


def draw_anchors(loss_mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw anchors of one document, without replacement; fewer where the document has fewer.

    A position can be an anchor if it and its successor are supervised: a block whose first guess has no label teaches
    nothing.

    Args:
        loss_mask: ``(T)`` bool.

    Returns:
        sorted positions, ``(<= count)``.
    """
    candidates = (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]
    chosen = torch.randperm(len(candidates), generator=generator)[:count]
    return candidates[chosen].sort().values


def anchor_budgets(supervised: list[int], total: int) -> list[int]:
    """Share ``total`` anchors among documents in proportion to their supervised tokens, at least one each."""
    everything = max(1, sum(supervised))
    return [max(1, total * tokens // everything) for tokens in supervised]


def build_blocks(anchors: list[Tensor], loss_mask: Tensor, block_size: int, multiple: int = 1) -> Blocks:
    """Lay out the blocks of a batch and clip them.

    A block is cut at the first slot that leaves its document or stands on an unsupervised token: what comes behind a
    gap was not said by the target in one breath.

    Args:
        anchors: for each document, ``(n)`` positions.
        loss_mask: ``(B, T)`` bool, False on padding.
        multiple: of which ``N`` is made one, by empty blocks.
    """
    batch, length = loss_mask.shape
    most = -(-max(1, *(len(row) for row in anchors)) // multiple) * multiple
    padded = torch.zeros(batch, most, dtype=torch.long)  # (B, N)
    exists = torch.zeros(batch, most, dtype=torch.bool)
    for row, found in enumerate(anchors):
        padded[row, : len(found)] = found
        exists[row, : len(found)] = True
    positions = padded[..., None] + torch.arange(block_size)  # (B, N, S)
    inside = positions < length
    reached = torch.gather(loss_mask[:, None].expand(-1, most, -1), 2, positions.clamp(max=length - 1))  # (B, N, S)
    unbroken = (reached & inside & exists[..., None]).long().cumprod(-1).bool()
    counted = unbroken.clone()
    counted[..., 0] = False
    return Blocks(padded, positions, counted)


def block_inputs(blocks: Blocks, input_ids: Tensor, mask_token_id: int) -> Tensor:
    """Ids that the slots hold, ``(B, N, S)``: the anchor's token, then the mask token."""
    slots = torch.full_like(blocks.positions, mask_token_id)
    slots[..., 0] = input_ids.gather(1, blocks.anchors)
    return slots


def leading_run(correct: Tensor, counted: Tensor) -> Tensor:
    """Drafts accepted of each block: the run of correct counted slots from slot 1 on.

    Args:
        correct, counted: ``(..., S)`` bool.

    Returns:
        ``(...)`` long.
    """
    return (correct & counted)[..., 1:].long().cumprod(-1).sum(-1)
