"""Which documents are read together, and which shard they go to: decided by lengths alone, before any work.

Documents of like length share a batch, so little is padding; batches of all lengths share a shard, so a part of the shards
is a fair sample of the whole. Nothing depends on the machine: the same tokens and params give the same shards everywhere.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foredraft.tokens.shards import TokenShard, read_shard

MULTIPLE = 8
"""Lengths are padded to this: rows of a product then begin where the hardware likes them to."""
SEED = 1
BATCH_COST = 1 / 128
"""What a batch costs by itself, as a share of a full one."""


@dataclass(frozen=True)
class ShardPlan:
    """One feature shard to be: batches of documents of one token shard.

    Attributes:
        name: its file.
        source: the token shard's file.
        batches: document numbers in the token shard, in the order in which they are stored.
        lengths: tokens to read of each document, in that order.
    """

    name: str
    source: str
    batches: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def documents(self) -> list[int]:
        """Document numbers in the order in which they are stored."""
        return [number for batch in self.batches for number in batch]

    @property
    def tokens(self) -> int:
        """Tokens stored."""
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens that forward passes hold, padding included."""
        lengths = iter(self.lengths)
        per_batch = ([next(lengths) for _ in batch] for batch in self.batches)
        return sum(len(batch) * padded_length(max(batch)) for batch in per_batch)

    def read(self, folder: Path) -> list[tuple[Tensor, Tensor]]:
        """Ids and mask of each document in stored order, up to its last supervised token."""
        shard = read_shard(folder / self.source)
        documents = (shard.document(number) for number in self.documents)
        return [(ids[:n], mask[:n]) for (ids, mask), n in zip(documents, self.lengths, strict=True)]


def plan_shards(folder: Path, names: list[str], batch_tokens: int, shard_tokens: int) -> list[ShardPlan]:
    """Plan the feature shards of some token shards; each split is numbered through."""
    plans: list[ShardPlan] = []
    numbers: dict[str, int] = {}
    for source in names:
        split = source.rpartition("-")[0]
        lengths = useful_lengths(read_shard(folder / source)).tolist()
        batches = batches_by_tokens(lengths, batch_tokens)
        generator = torch.Generator().manual_seed(SEED)
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        for group in _groups(shuffled, lengths, shard_tokens):
            number = numbers[split] = numbers.get(split, -1) + 1
            read = tuple(lengths[document] for batch in group for document in batch)
            plans.append(ShardPlan(f"{split}-{number:05d}.safetensors", source, tuple(group), read))
    return plans


def useful_lengths(shard: TokenShard) -> Tensor:
    """Tokens of each document up to its last supervised one, ``(documents)``: no block ever looks at a later state."""
    supervised = shard.loss_mask.long()
    places = torch.arange(1, len(supervised) + 1) * supervised  # one past each supervised token, 0 elsewhere
    last = torch.stack([span.max() for span in places.split(shard.offsets.diff().tolist())])
    if bool((last == 0).any()):
        raise ValueError(f"document {int((last == 0).nonzero()[0])} of a token shard has no supervised token")
    return last - shard.offsets[:-1]


def batches_by_tokens(lengths: list[int], budget: int) -> list[tuple[int, ...]]:
    """Group documents by length, rows times the longest row within ``budget``, with the least padding that is worth it.

    Of all ways to cut the sorted documents, the one whose batches hold the fewest tokens, padding included, where each
    batch counts as a share of :data:`BATCH_COST` of the budget more: few documents of many lengths make smaller batches.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    held = np.array([padded_length(lengths[i]) for i in order], dtype=np.int64)
    least = np.full(len(order) + 1, np.iinfo(np.int64).max)
    least[0], begins = 0, np.zeros(len(order) + 1, dtype=np.int64)
    for start, longest in enumerate(held.tolist()):
        rows = np.arange(1, min(max(1, budget // longest), len(order) - start) + 1)
        costs = least[start] + rows * longest + int(budget * BATCH_COST)
        better = costs < least[start + rows]
        least[start + rows[better]] = costs[better]
        begins[start + rows[better]] = start
    batches: list[tuple[int, ...]] = []
    end = len(order)
    while end:
        batches.append(tuple(order[begins[end] : end]))
        end = int(begins[end])
    return batches[::-1]


def padded_length(length: int) -> int:
    """``length``, rounded up to :data:`MULTIPLE`."""
    return -(-length // MULTIPLE) * MULTIPLE


def pad(documents: list[Tensor]) -> Tensor:
    """Right-pad ``(T)`` documents to ``(B, T)`` ids. Never on the left: recurrent layers would read it."""
    length = padded_length(max(map(len, documents)))
    padded = torch.zeros(len(documents), length, dtype=torch.int64)
    for row, ids in zip(padded, documents, strict=True):
        row[: len(ids)] = ids
    return padded


def _groups(batches: list[tuple[int, ...]], lengths: list[int], budget: int) -> list[list[tuple[int, ...]]]:
    groups: list[list[tuple[int, ...]]] = []
    held = 0
    for batch in batches:
        tokens = sum(lengths[document] for document in batch)
        if not groups or held + tokens > budget:
            groups.append([])
            held = 0
        groups[-1].append(batch)
        held += tokens
    return groups
