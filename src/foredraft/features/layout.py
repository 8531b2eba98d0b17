"""Feature shards: what the target thought of every token.

One shard holds some documents of a token shard and is one safetensors file:

=================  ===================  =========================================================================
``target_hidden``  ``(T, L, D)`` bf16   tap k of every token: the residual stream after block ``target_layer_ids[k]``
``input_ids``      ``(T)`` int32        equal to the token shard's
``loss_mask``      ``(T)`` uint8        1 on supervised tokens
``offsets``        ``(documents+1)``    where documents start
``topk_ids``       ``(M, K)`` int32     for each supervised token, in order: the target's ``K`` likeliest ids *for that
``topk_logprobs``  ``(M, K)`` float32   position*, so from its logits one position earlier, and their log-probabilities
=================  ===================  =========================================================================

Readers map the file and copy only what they use.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.artifacts import ArtifactError, Manifest, open_artifact


@dataclass(frozen=True)
class Document:
    """One document's part of a shard; ``supervised`` are the positions that ``topk_*`` rows belong to, in order."""

    target_hidden: Tensor  # (T, L, D)
    input_ids: Tensor  # (T)
    loss_mask: Tensor  # (T)
    topk_ids: Tensor  # (M, K)
    topk_logprobs: Tensor  # (M, K)


class FeatureShard:
    """A mapped feature shard. Small tensors are read at once, ``target_hidden`` by document.

    Raises:
        ArtifactError: the file is cut off or is no safetensors file.
    """

    def __init__(self, path: Path, rerun: str):
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ArtifactError(
                path, f"not a readable feature shard ({error})", f"rerun or pull it: {rerun}"
            ) from error
        self._input_ids = self._file.get_tensor("input_ids")
        self._loss_mask = self._file.get_tensor("loss_mask")
        self.offsets: Tensor = self._file.get_tensor("offsets")
        self._topk_ids = self._file.get_tensor("topk_ids")
        self._topk_logprobs = self._file.get_tensor("topk_logprobs")
        ranks = torch.cat([torch.zeros(1, dtype=torch.int64), self._loss_mask.long().cumsum(0)])
        self._rows_before = ranks[self.offsets]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def length(self, index: int) -> int:
        """Tokens of document ``index``."""
        return int(self.offsets[index + 1] - self.offsets[index])

    def supervised(self, index: int) -> int:
        """Supervised tokens of document ``index``."""
        return int(self._rows_before[index + 1] - self._rows_before[index])

    @property
    def topk_ids(self) -> Tensor:
        """All ``(M, K)`` of the shard."""
        return self._topk_ids

    @property
    def input_ids(self) -> Tensor:
        """All ``(T)`` of the shard."""
        return self._input_ids

    @property
    def loss_mask(self) -> Tensor:
        """All ``(T)`` of the shard."""
        return self._loss_mask

    def document(self, index: int) -> Document:
        """Copy document ``index`` out of the map."""
        tokens = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        rows = slice(int(self._rows_before[index]), int(self._rows_before[index + 1]))
        return Document(
            target_hidden=self._file.get_slice("target_hidden")[tokens],
            input_ids=self._input_ids[tokens].long(),
            loss_mask=self._loss_mask[tokens].bool(),
            topk_ids=self._topk_ids[rows].long(),
            topk_logprobs=self._topk_logprobs[rows],
        )


def write_features(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one shard; see the table above."""
    save_file(tensors, path)


def open_features(folder: Path, name: str) -> Manifest:
    """Verify the features of source ``name``: presence and size of every shard."""
    return open_artifact(
        folder, "features", f"dvc repro extract@{name}, or dvc pull --force extract@{name}", digests=False
    )
