"""What a slot may read.

The one rule, spelled out: query slot ``s`` of block ``n``, at position ``a_n + s``, reads

* context position ``t`` iff ``t < a_n``, and in a sliding layer ``a_n + s - t < window``;
* slot ``r`` of its own block, and of no other, and in a sliding layer only ``r <= s`` within the window.

A block therefore never depends on the target's features at or after its anchor, whatever other blocks there are.
"""

import torch
from torch import Tensor

from foredraft.drafter.blocks import Blocks


def training_mask(blocks: Blocks, context_length: int, window: int | None) -> Tensor:
    """Dense mask of all blocks of a batch over the context and over each other.

    Args:
        window: of a sliding layer; None for a full layer.

    Returns:
        ``(B, 1, N * S, T + N * S)`` bool, True where the query reads the key. Every query reads itself, so no row is
        empty, and padding blocks stay finite.
    """
    batch, count, size = blocks.positions.shape
    queries = blocks.positions.flatten(1)  # (B, N*S)
    anchors = blocks.anchors.repeat_interleave(size, dim=1)  # (B, N*S)
    keys = torch.arange(context_length)
    context = keys < anchors[..., None]  # (B, N*S, T)
    block_of = torch.arange(count).repeat_interleave(size)
    own = (block_of[:, None] == block_of[None, :]).expand(batch, -1, -1)  # (B, N*S, N*S)
    if window is not None:
        context = context & (queries[..., None] - keys < window)
        distance = queries[..., :, None] - queries[..., None, :]
        own = own & (distance >= 0) & (distance < window)
    return torch.cat([context, own], dim=-1)[:, None]


def decoding_mask(anchors: Tensor, size: int, positions: Tensor, valid: Tensor, window: int | None) -> Tensor:
    """Mask of one block a row over cached context slots and over itself.

    Args:
        anchors: ``(B)`` position of each row's slot 0.
        positions, valid: ``(B, T)`` position of each cached context slot, and whether it holds a committed token.
        window: of a sliding layer; None for a full layer.

    Returns:
        ``(B, 1, S, T + S)`` bool.
    """
    queries = anchors[:, None] + torch.arange(size, device=anchors.device)  # (B, S)
    context = (valid & (positions < anchors[:, None]))[:, None].expand(-1, size, -1)  # (B, S, T)
    own = torch.ones(len(anchors), size, size, dtype=torch.bool, device=anchors.device)
    if window is not None:
        context = context & (queries[..., None] - positions[:, None] < window)
        distance = queries[..., :, None] - queries[..., None, :]
        own = own & (distance >= 0) & (distance < window)
    return torch.cat([context, own], dim=-1)[:, None]
