"""Feature shards -> batches of padded documents with their anchors.

Everything is a function of (data, seed, epoch, step), so a resumed run repeats and skips nothing.

Shapes: ``B`` documents, ``T`` tokens, ``L`` taps, ``D`` hidden size, ``N`` anchors, ``K`` top-k.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft.artifacts import ArtifactError, Manifest, require_same_contract
from foredraft.drafter.blocks import Blocks, anchor_budgets, build_blocks, draw_anchors
from foredraft.features.layout import Document, FeatureShard, open_features

BUCKET_STEPS = 16
# Sizes of a batch are rounded up to these, so that few shapes occur: a shape that oneDNN (or a compiler) has not seen
# costs milliseconds in every kernel, which for a small drafter is most of the step.
LENGTH_MULTIPLE = 32
ANCHOR_MULTIPLE = 8


@dataclass(frozen=True)
class Batch:
    """Documents of a step, right-padded; ``topk_*`` are spread to the positions they belong to."""

    names: list[str]
    target_hidden: Tensor  # (B, T, L, D)
    input_ids: Tensor  # (B, T)
    topk_ids: Tensor  # (B, T, K)
    topk_logprobs: Tensor  # (B, T, K)
    blocks: Blocks


class FeatureData:
    """All documents of one split over all sources, mapped.

    Attributes:
        names: ``source/shard#index`` of each document, for messages.
        lengths, supervised: tokens of each document.
    """

    def __init__(self, folders: dict[str, Path], split: str):
        self.shards: list[FeatureShard] = []
        self.names: list[str] = []
        self._where: list[tuple[int, int]] = []
        for source, folder in folders.items():
            for path in sorted(folder.glob(f"{split}-*.safetensors")):
                shard = FeatureShard(path, f"dvc repro extract@{source}")
                self._where += [(len(self.shards), index) for index in range(len(shard))]
                self.names += [f"{source}/{path.name}#{index}" for index in range(len(shard))]
                self.shards.append(shard)
        self.lengths = [self.shards[shard].length(index) for shard, index in self._where]
        self.supervised = [self.shards[shard].supervised(index) for shard, index in self._where]

    def __len__(self) -> int:
        return len(self._where)

    def document(self, index: int) -> Document:
        """Read one document.

        Raises:
            ArtifactError: its states are not finite, or all zero; names the shard and document.
        """
        shard, row = self._where[index]
        document = self.shards[shard].document(row)
        states = document.target_hidden
        if not bool(states.isfinite().all()) or not bool(states.any(dim=-1).all()):
            raise ArtifactError(
                self.shards[shard].path, f"document {row} has zero or non-finite states", "rerun extract"
            )
        return document

    def answer_ids(self) -> Tensor:
        """Sorted vocabulary ids that a slot can be asked for: tokens of the answers, and the target's argmax at each."""
        parts = [
            part for shard in self.shards for part in (shard.topk_ids[:, 0], shard.input_ids[shard.loss_mask.bool()])
        ]
        return torch.cat(parts).long().unique()

    def uses(self, token_id: int) -> bool:
        """Whether a token id stands anywhere in the data."""
        return any(bool((shard.input_ids == token_id).any()) for shard in self.shards)

    def epoch(self, seed: int, epoch: int, tokens_per_step: int) -> list[list[int]]:
        """Documents of each step of one epoch: shuffled, then bucketed by length within a window of steps."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        steps: list[list[int]] = []
        for bucket in self._buckets(order, tokens_per_step * BUCKET_STEPS):
            steps += self._fill(sorted(bucket, key=lambda i: (-self.lengths[i], i)), tokens_per_step)
        return [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]

    def _buckets(self, order: list[int], tokens: int) -> list[list[int]]:
        buckets: list[list[int]] = [[]]
        held = 0
        for index in order:
            if held >= tokens:
                buckets.append([])
                held = 0
            buckets[-1].append(index)
            held += self.lengths[index]
        return buckets

    def _fill(self, indices: list[int], tokens: int) -> list[list[int]]:
        steps: list[list[int]] = []
        for index in indices:
            longest = round_up(self.lengths[steps[-1][0]], LENGTH_MULTIPLE) if steps else tokens
            if not steps or (len(steps[-1]) + 1) * longest > tokens:
                steps.append([])
            steps[-1].append(index)
        return steps

    def batch(self, indices: list[int], anchors: int, block_size: int, generator: torch.Generator) -> Batch:
        """Read documents, draw their anchors, and pad to round sizes; what is padded has no anchor."""
        documents = [self.document(i) for i in indices]
        budgets = anchor_budgets([self.supervised[i] for i in indices], anchors)
        drawn = [draw_anchors(d.loss_mask, n, generator) for d, n in zip(documents, budgets, strict=True)]
        length = round_up(max(self.lengths[i] for i in indices), LENGTH_MULTIPLE)
        loss_mask = _padded([d.loss_mask for d in documents], length)
        return Batch(
            names=[self.names[i] for i in indices],
            target_hidden=_padded([d.target_hidden for d in documents], length),
            input_ids=_padded([d.input_ids for d in documents], length),
            topk_ids=_spread([d.topk_ids for d in documents], loss_mask),
            topk_logprobs=_spread([d.topk_logprobs for d in documents], loss_mask),
            blocks=build_blocks(drawn, loss_mask, block_size, ANCHOR_MULTIPLE),
        )


def open_all_features(folders: dict[str, Path]) -> dict[str, Manifest]:
    """Verify the features of every source and that all were read off the same target in the same way.

    Raises:
        ArtifactError: names the folder or shard, and the contract key that differs.
    """
    manifests = {source: open_features(folder, source) for source, folder in folders.items()}
    first_source, first = next(iter(manifests.items()))
    shared = {key: value for key, value in first.contract.items() if key != "response_origin"}
    for source, manifest in manifests.items():
        require_same_contract(shared, manifest.contract, folders[source], f"extract@{source} (or {first_source})")
    return manifests


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not less."""
    return -(-value // multiple) * multiple


def _padded(rows: list[Tensor], length: int) -> Tensor:
    """``(t, ...)`` of each document -> ``(B, length, ...)``, zero behind its end."""
    padded = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


def _spread(rows: list[Tensor], loss_mask: Tensor) -> Tensor:
    """``(M, K)`` rows of each document -> ``(B, T, K)``, zero where nothing is supervised."""
    spread = torch.zeros(*loss_mask.shape, rows[0].shape[-1], dtype=rows[0].dtype)
    spread[loss_mask] = torch.cat(rows)
    return spread
