"""Token shards, written as a stream and without torch; :mod:`foredraft.tokens.shards` says what they hold."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "validation")
LENGTH_BINS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Upper ends of the length histogram's bins; what is longer is in a last one."""


class ShardWriter:
    """Writes the documents of one split into shards of about ``budget`` tokens, as a stream.

    Memory holds a document's end, not its tokens: safetensors wants whole tensors, so ids and masks go to files of their
    own, and are put behind a header when a shard is full.

    Attributes:
        facts: for each shard its documents, tokens and supervised tokens.
        lengths: documents by the upper end of their length's bin.
    """

    def __init__(self, folder: Path, split: str, budget: int):
        self._folder, self._split, self._budget = folder, split, budget
        self._ends: list[int] = [0]
        self._supervised = 0
        self._streams: dict[str, IO[bytes]] = {}
        self.facts: dict[str, dict[str, int]] = {}
        self.lengths: Counter[str] = Counter()

    def add(self, ids: NDArray[np.int32], mask: NDArray[np.uint8]) -> None:
        """Append one document."""
        if self._ends[-1] and self._ends[-1] + len(ids) > self._budget:
            self.close()
        if not self._streams:
            self._streams = {name: self._part(name).open("wb") for name in ("input_ids", "loss_mask")}
        self._streams["input_ids"].write(ids.astype("<i4").tobytes())
        self._streams["loss_mask"].write(mask.astype("u1").tobytes())
        self._ends.append(self._ends[-1] + len(ids))
        self._supervised += int(mask.sum())
        self.lengths[length_bin(len(ids))] += 1

    def close(self) -> None:
        """Finish the shard in hand, if there is one."""
        if not self._streams:
            return
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        name = f"{self._split}-{len(self.facts):05d}.safetensors"
        offsets = np.array(self._ends, dtype="<i8").tobytes()
        tokens = self._ends[-1]
        with (self._folder / name).open("wb") as shard:
            # Widest first, so that each tensor is aligned.
            shard.write(
                _header(
                    {
                        "offsets": ("I64", 8, len(self._ends)),
                        "input_ids": ("I32", 4, tokens),
                        "loss_mask": ("U8", 1, tokens),
                    }
                )
            )
            shard.write(offsets)
            for part in ("input_ids", "loss_mask"):
                with self._part(part).open("rb") as stream:
                    shutil.copyfileobj(stream, shard, 1 << 20)
                self._part(part).unlink()
        self.facts[name] = {"documents": len(self._ends) - 1, "tokens": tokens, "supervised": self._supervised}
        self._ends, self._supervised = [0], 0

    def _part(self, name: str) -> Path:
        return self._folder / f".{self._split}.{name}"


def length_bin(length: int) -> str:
    """The bin of a length: the first upper end that it does not pass, or ``more``."""
    return next((str(end) for end in LENGTH_BINS if length <= end), "more")


def _header(tensors: dict[str, tuple[str, int, int]]) -> bytes:
    """A safetensors header for one-dimensional tensors that follow each other: name -> (dtype, width, length)."""
    entries: dict[str, Any] = {}
    position = 0
    for name, (dtype, width, length) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": [length], "data_offsets": [position, position + width * length]}
        position += width * length
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
