"""What a slot may read, and how it is read: on a GPU by FlexAttention, elsewhere document by document, and in decoding.

The one rule: query slot ``s`` of block ``n``, at position ``a_n + s`` of its document, reads

* context position ``t`` of that document iff ``t < a_n``, and in a sliding layer ``a_n + s - t < window``;
* slot ``r`` of its own block, and of no other, and in a sliding layer only ``r <= s`` within the window.

A block therefore never depends on the target's features at or after its anchor, whatever other blocks there are. Every
query reads itself, so no row of a mask is empty, and empty blocks stay finite.

Shapes: ``B`` rows, ``H`` heads, ``G`` key-value heads, ``Q`` queries, ``T`` context tokens, ``d`` head size, ``N`` blocks,
``S`` slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.drafter.blocks import Blocks

TILE = 128
"""Queries, and keys, that FlexAttention handles together."""
QUERIES, KEYS = 128, 64
"""On a CPU a document's queries and keys are filled up to multiples of these: a product of a new shape takes many times as
long as one of a shape that was seen."""


@dataclass(frozen=True)
class KeysValues:
    """Keys (normed and rotated) and values of one layer, ``(B, G, T, d)``."""

    keys: Tensor
    values: Tensor


Attention = Callable[[Tensor, KeysValues, KeysValues], Tensor]
"""Of queries ``(B, H, Q, d)``, the context's and the blocks' own keys and values; gives ``(B, H, Q, d)``."""


def training_attention(blocks: Blocks, bounds: list[int], window: int | None) -> Attention:
    """The attention of all blocks of one row of documents, ``B = 1``, ``Q = N * S``.

    Args:
        bounds: where each document of the row begins, and where the last one ends.
        window: of a sliding layer; None for a full layer.
    """
    if blocks.anchors.is_cuda:
        return FlexAttention(blocks, bounds[-1], window)
    return DocumentAttention(blocks, bounds, window)


class DocumentAttention:
    """Attention of one document's blocks after the other's by plain products: the fastest where nothing is fused.

    A query's scores over the context and over its own block lie side by side, and those over other blocks do not exist.
    """

    def __init__(self, blocks: Blocks, bounds: list[int], window: int | None):
        self._size = size = blocks.block_size
        starts = torch.tensor(bounds[:-1], device=blocks.starts.device)
        counts = ((blocks.starts == starts[:, None]) & blocks.exists).sum(1).tolist()
        self._tokens = [end - start for start, end in pairwise(bounds)]
        self._slots = [count * size for count in counts] + [blocks.counted.numel() - sum(counts) * size]
        anchors = blocks.anchors[: sum(counts)].split(counts)
        self._biases = [
            filled_bias(a, size, tokens, window) if len(a) else None
            for a, tokens in zip(anchors, self._tokens, strict=True)
        ]

    def __call__(self, queries: Tensor, context: KeysValues, own: KeysValues) -> Tensor:  # noqa: D102
        groups, scale = own.keys.shape[1], queries.shape[-1] ** -0.5
        queries = queries.unflatten(1, (groups, -1))  # (B, G, H / G, Q, d)
        of_blocks = self._of_blocks(queries) @ own.keys.unflatten(2, (-1, self._size)).mT
        over_own = self._by_slot(of_blocks, queries.shape[2]).split(self._slots, 3)
        before = zip(*(x.split(self._tokens, 2) for x in (context.keys, context.values)), strict=True)
        outputs, weights = [], []
        for bias, part, scores, (keys, values) in zip(
            self._biases, queries.split(self._slots, 3), over_own, before, strict=False
        ):
            if bias is not None:
                count, rows, columns = part.shape[3], bias.shape[0], bias.shape[1] - self._size
                part, scores = (F.pad(x, (0, 0, 0, rows - count)) for x in (part, scores))
                keys, values = (F.pad(x, (0, 0, 0, columns - x.shape[2])) for x in (keys, values))
                of_context = (part.flatten(2, 3) @ keys.mT).unflatten(2, (-1, rows))
                both = torch.add(bias, torch.cat([of_context, scores], -1), alpha=scale)  # (B, G, H / G, rows, ...)
                shares = both.softmax(-1).to(part.dtype)
                read = (shares[..., :columns].flatten(2, 3) @ values).unflatten(2, (-1, rows))
                outputs.append(read[..., :count, :])
                weights.append(shares[..., :count, columns:])
        empty = queries.new_zeros(*queries.shape[:3], self._slots[-1], queries.shape[-1])
        nothing = empty.new_zeros(*empty.shape[:-1], self._size)
        values = own.values.unflatten(2, (-1, self._size))  # (B, G, N, S, d)
        of_own = self._by_slot(self._of_blocks(torch.cat([*weights, nothing], 3)) @ values, queries.shape[2])
        return (torch.cat([*outputs, empty], 3) + of_own).flatten(1, 2)

    def _of_blocks(self, x: Tensor) -> Tensor:
        """``(B, G, H / G, N * S, ...)`` -> ``(B, G, N, H / G * S, ...)``."""
        return x.unflatten(3, (-1, self._size)).transpose(2, 3).flatten(3, 4)

    def _by_slot(self, x: Tensor, shared: int) -> Tensor:
        """And back."""
        return x.unflatten(3, (shared, self._size)).transpose(2, 3).flatten(3, 4)


def filled_bias(anchors: Tensor, size: int, length: int, window: int | None) -> Tensor:
    """What is added to the scores of one document's blocks over its tokens and over themselves: 0, or minus infinity.

    Returns:
        ``(queries, keys + S)`` float32; queries and keys are filled up, and a query that does not exist reads nothing that
        matters.
    """
    mask = context_mask(anchors, size, length, window)
    mask = F.pad(mask, (0, -length % KEYS, 0, -len(mask) % QUERIES))
    both = torch.cat([mask, own_mask(size, window).repeat(len(mask) // size + 1, 1)[: len(mask)]], -1)
    return torch.zeros(both.shape).masked_fill(~both, -torch.inf)


class FlexAttention:
    """Block-sparse attention of the whole row, compiled once for each shape."""

    def __init__(self, blocks: Blocks, length: int, window: int | None):
        self._padding = -length % TILE
        self._mask = block_mask(blocks, length + self._padding, window)

    def __call__(self, queries: Tensor, context: KeysValues, own: KeysValues) -> Tensor:  # noqa: D102
        pad = (0, 0, 0, self._padding)
        keys = torch.cat([F.pad(context.keys, pad), own.keys], 2)
        values = torch.cat([F.pad(context.values, pad), own.values], 2)
        return compiled_flex_attention()(queries, keys, values, block_mask=self._mask, enable_gqa=True)


def block_mask(blocks: Blocks, length: int, window: int | None) -> Any:
    """The rule as FlexAttention wants it: which tiles of queries and keys hold something to read, and which hold all.

    A query reads one interval of the row, and of the blocks' own keys those about its own place, so this is a few small
    tensors; asking the rule of every pair, as ``create_block_mask`` does, is not.

    Args:
        length: tokens of the context, a multiple of :data:`TILE`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    device, size = blocks.anchors.device, blocks.block_size
    ends = (blocks.starts + blocks.anchors).repeat_interleave(size)  # (Q)
    begins = blocks.starts.repeat_interleave(size)
    if window is not None:
        begins = torch.maximum(begins, (blocks.starts[:, None] + blocks.positions).flatten() - window + 1)
    missing = -len(ends) % TILE  # queries of the last tile that do not exist read nothing and hinder nothing
    first = torch.arange(0, length, TILE, device=device)  # (tiles of the context)
    some = F.pad(
        (begins[:, None] < first + TILE) & (ends[:, None] > first) & (begins < ends)[:, None], (0, 0, 0, missing)
    )
    every = F.pad((begins[:, None] <= first) & (ends[:, None] >= first + TILE), (0, 0, 0, missing), value=True)
    some, every = some.unflatten(0, (-1, TILE)).any(1), every.unflatten(0, (-1, TILE)).all(1)
    own = torch.eye(len(some), dtype=torch.bool, device=device)
    straddled = torch.arange(TILE, len(some) * TILE, TILE, device=device) % size != 0  # a block lies across the border
    own |= straddled.diag(-1) if window is not None else straddled.diag(-1) | straddled.diag(1)
    partial, full = torch.cat([some & ~every, own], 1), torch.cat([every, torch.zeros_like(own)], 1)
    return BlockMask.from_kv_blocks(
        *_numbered(partial),
        *_numbered(full),
        BLOCK_SIZE=TILE,
        mask_mod=readable(blocks, length, window),
        seq_lengths=(len(ends), length + len(ends)),
    )


def _numbered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row are set, and the numbers of these, first: ``(1, 1, rows)`` and ``(1, 1, rows, columns)``."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


class MaskedAttention:
    """Dense attention by a mask ``(B, 1, Q, T + Q)``, as in decoding."""

    def __init__(self, mask: Tensor):
        self._mask = mask

    def __call__(self, queries: Tensor, context: KeysValues, own: KeysValues) -> Tensor:  # noqa: D102
        keys = torch.cat([context.keys, own.keys], 2)
        values = torch.cat([context.values, own.values], 2)
        return attend(queries, keys, values, self._mask)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention."""
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)


def readable(blocks: Blocks, length: int, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule as FlexAttention asks it: of a query's and a key's number in the row, context first.

    Args:
        length: tokens of the context, padding included.
    """
    size, starts, anchors = blocks.block_size, blocks.starts, blocks.anchors

    def rule(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // size, query % size
        anchor = anchors[block]
        token, other = key - starts[block], key - length
        context = (key < length) & (token >= 0) & (token < anchor)
        own = (key >= length) & (other // size == block)
        if window is not None:
            context = context & (anchor + slot - token < window)
            back = slot - other % size
            own = own & (back >= 0) & (back < window)
        return context | own

    return rule


def context_mask(anchors: Tensor, size: int, length: int, window: int | None) -> Tensor:
    """The rule for the blocks of one document over its first ``length`` tokens.

    Args:
        anchors: ``(N)`` positions in the document.

    Returns:
        ``(N * S, length)`` bool, True where the query reads the key.
    """
    keys = torch.arange(length)
    mask = keys < anchors.repeat_interleave(size)[:, None]
    if window is not None:
        queries = (anchors[:, None] + torch.arange(size)).flatten()
        mask = mask & (queries[:, None] - keys < window)
    return mask


def own_mask(size: int, window: int | None) -> Tensor:
    """The rule for a block's slots over themselves: ``(S, S)`` bool, True where the query reads the key."""
    slots = torch.arange(size)
    distance = slots[:, None] - slots
    return torch.ones(size, size, dtype=torch.bool) if window is None else (distance >= 0) & (distance < window)


def dense_mask(anchors: Tensor, size: int, length: int, window: int | None) -> Tensor:
    """The rule for all blocks of one document over its first ``length`` tokens and over each other.

    Returns:
        ``(1, 1, N * S, length + N * S)`` bool, True where the query reads the key.
    """
    own = torch.block_diag(*[own_mask(size, window)] * len(anchors))
    return torch.cat([context_mask(anchors, size, length, window), own], -1)[None, None]


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


@lru_cache(maxsize=1)
def compiled_flex_attention() -> Any:
    """FlexAttention is nothing without being compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
