"""Feature shards: what the target thought of every token.

One shard holds some documents of a token shard, each up to its last supervised token, and is one safetensors file:

=================  ===================  =========================================================================
``target_hidden``  ``(T, L, D)``        tap k of every token: the residual stream after block ``target_layer_ids[k]``,
                                        in bfloat16 or float8_e4m3fn
``scale``          ``(T, L)`` float32   with float8 only: what a token's tap is to be multiplied by
``input_ids``      ``(T)`` int32        equal to the token shard's
``loss_mask``      ``(T)`` uint8        1 on supervised tokens
``offsets``        ``(documents+1)``    where documents start
``topk_ids``       ``(M, K)`` int32     for each supervised token, in order: the target's ``K`` likeliest ids *for that
``topk_logprobs``  ``(M, K)`` float32   position*, so from its logits one position earlier, and their log-probabilities
=================  ===================  =========================================================================

Readers map the file and copy only what they use.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.artifacts import ArtifactError, Manifest, open_artifact

CODES = {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
LARGEST_FLOAT8 = 448.0


@dataclass(frozen=True)
class Document:
    """One document's part of a shard; ``supervised`` are the positions that ``topk_*`` rows belong to, in order."""

    stored: Tensor  # (T, L, D) as it lies in the file
    scale: Tensor | None  # (T, L) by which float8 is to be multiplied
    input_ids: Tensor  # (T)
    loss_mask: Tensor  # (T)
    topk_ids: Tensor  # (M, K)
    topk_logprobs: Tensor  # (M, K)

    @property
    def target_hidden(self) -> Tensor:
        """``(T, L, D)`` bfloat16."""
        return self.stored if self.scale is None else dequantise(self.stored, self.scale)


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
        self._scale = self._file.get_tensor("scale") if "scale" in self._file.keys() else None  # noqa: SIM118
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
            stored=self._file.get_slice("target_hidden")[tokens],
            scale=None if self._scale is None else self._scale[tokens],
            input_ids=self._input_ids[tokens].long(),
            loss_mask=self._loss_mask[tokens].bool(),
            topk_ids=self._topk_ids[rows].long(),
            topk_logprobs=self._topk_logprobs[rows],
        )


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 of ``(..., D)`` states and the scale ``(...)`` of each, by which its largest value becomes float8's largest."""
    scale = states.abs().amax(-1).float() / LARGEST_FLOAT8
    return (states.float() / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
    """The bfloat16 that :func:`quantise` came from, to float8's precision."""
    return (stored.float() * scale.unsqueeze(-1)).to(torch.bfloat16)


class ShardFile:
    """Writes a safetensors file from its first byte to its last, with its SHA-256: states as they come, the rest at the end.

    Args:
        shapes: name, type and shape of every tensor, in the order in which they will be written.
    """

    def __init__(self, stream: IO[bytes], shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]]):
        self._stream, self._hash = stream, hashlib.sha256()
        self._left = 0
        header: dict[str, Any] = {}
        for name, (dtype, shape) in shapes.items():
            if self._left % dtype.itemsize:
                raise ValueError(f"{name} of {dtype} would begin at byte {self._left}, off its own size")
            size = torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [self._left, self._left + size]}
            self._left += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._put(struct.pack("<Q", len(text)) + text)

    def write(self, tensor: Tensor) -> None:
        """Append a contiguous tensor, or the next rows of one."""
        self._left -= tensor.nbytes
        flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self._put(memoryview(flat))

    def digest(self) -> str:
        """SHA-256 of all that was written, which must be all that was announced."""
        assert self._left == 0, f"{self._left} bytes of a feature shard were not written"
        return self._hash.hexdigest()

    def _put(self, content: bytes | memoryview) -> None:
        self._stream.write(content)
        self._hash.update(content)


def open_features(folder: Path, name: str) -> Manifest:
    """Verify the features of source ``name``: presence and size of every shard."""
    return open_artifact(
        folder, "features", f"dvc repro extract@{name}, or dvc pull --force extract@{name}", digests=False
    )
