"""Token shards: many documents back to back.

One safetensors file holds ``input_ids (T) int32``, ``loss_mask (T) uint8`` (1 where a token is the target's own answer)
and ``offsets (documents + 1) int64``. Its split is in its name: ``train-00000.safetensors``.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from foredraft.artifacts import ArtifactError, Manifest, open_artifact


@dataclass(frozen=True)
class TokenShard:
    """The documents of one shard, back to back."""

    input_ids: Tensor
    loss_mask: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> tuple[Tensor, Tensor]:
        """Ids and mask of one document, views."""
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.input_ids[span], self.loss_mask[span]

    def part(self, start: int, end: int) -> "TokenShard":
        """The documents from ``start`` up to ``end``, views."""
        offsets = self.offsets[start : end + 1]
        span = slice(int(offsets[0]), int(offsets[-1]))
        return TokenShard(self.input_ids[span], self.loss_mask[span], offsets - offsets[0])


def pack(documents: list[tuple[list[int], list[int]]]) -> TokenShard:
    """Lay ``(ids, mask)`` documents back to back."""
    lengths = torch.tensor([len(ids) for ids, _ in documents])
    return TokenShard(
        input_ids=torch.tensor([token for ids, _ in documents for token in ids], dtype=torch.int32),
        loss_mask=torch.tensor([bit for _, mask in documents for bit in mask], dtype=torch.uint8),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )


def read_shard(path: Path) -> TokenShard:
    """Map one shard into memory: pages are read as they are used.

    Raises:
        ArtifactError: its tensors are others, or do not fit each other.
    """
    tensors = load_file(path)
    if tensors.keys() != {"input_ids", "loss_mask", "offsets"}:
        raise ArtifactError(path, f"holds {sorted(tensors)}, which is no token shard", "rerun prepare")
    shard = TokenShard(**tensors)
    ends = shard.offsets[:1].tolist() + shard.offsets[-1:].tolist()
    if (
        ends != [0, len(shard.input_ids)]
        or len(shard.loss_mask) != len(shard.input_ids)
        or bool((shard.offsets.diff() < 1).any())
    ):
        raise ArtifactError(path, "ids, mask and offsets do not fit each other", "rerun prepare")
    return shard


def open_tokens(folder: Path, name: str) -> Manifest:
    """Verify the token shards of source ``name``."""
    return open_artifact(folder, "tokens", f"dvc repro prepare@{name}")
