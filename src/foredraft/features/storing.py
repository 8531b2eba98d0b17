"""Readings to files, beside the work of the target: few in memory, digests on the way, nothing bad under its final name."""

import errno
import json
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from torch import Tensor

from foredraft.artifacts import write_atomic
from foredraft.features.batching import ShardPlan
from foredraft.features.layout import ShardFile
from foredraft.features.reading import Reading
from foredraft.features.taps import CONSTANT, NOT_FINITE
from foredraft.scratch import Scratch

LANES = 3
"""Shards that are written at once: one may wait for the disk while the next is copied and digested."""
WAITING = 3
"""Batches between the target and the disk; with more the target waits."""
PROBLEMS = {NOT_FINITE: "not finite", CONSTANT: "constant"}


class Store:
    """Writes shards in the background, each in a lane of its own. At the end of the context all are on disk.

    Args:
        source: for messages.
        layer_ids: the tapped blocks, for messages.
        done: called with the tokens of each batch that was written.
    """

    def __init__(self, scratch: Scratch, source: str, layer_ids: tuple[int, ...], done: Callable[[int], None]):
        self._scratch, self._source, self._layer_ids, self._done = scratch, source, layer_ids, done
        self._lanes = [ThreadPoolExecutor(1) for _ in range(LANES)]
        self._next_lane = cycle(self._lanes)
        self._room = threading.BoundedSemaphore(WAITING)
        self._running: deque[Future[None]] = deque()

    def begin(self, plan: ShardPlan, documents: list[tuple[Tensor, Tensor]]) -> "OpenShard":
        """Start a shard."""
        return OpenShard(self._scratch, self._source, self._layer_ids, plan, documents, next(self._next_lane))

    def put(self, shard: "OpenShard", reading: Reading) -> None:
        """Hand over the reading of the shard's next batch; waits while too many are on their way.

        Raises:
            ValueError: of an earlier reading: it is not sane, or there is no space left.
        """
        self._room.acquire()
        written = shard.lane.submit(shard.write, reading)
        written.add_done_callback(lambda _: self._room.release())
        written.add_done_callback(lambda future: None if future.exception() else self._done(len(reading.input_ids)))
        self._running.append(written)
        self._raise_failures(wait=False)

    def end(self, shard: "OpenShard", then: Callable[[], None]) -> None:
        """Say that the shard has all its readings; ``then`` is called when it is there."""
        finished = shard.lane.submit(shard.finish)
        finished.add_done_callback(lambda _: then())
        self._running.append(finished)

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._raise_failures(wait=True)
        finally:
            for lane in self._lanes:
                lane.shutdown(wait=True, cancel_futures=True)

    def _raise_failures(self, wait: bool) -> None:
        while self._running and (wait or self._running[0].done()):
            try:
                self._running.popleft().result()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise ValueError(
                    f"sources.{self._source}: no space left in {self._scratch.path}: finished shards are kept; make space "
                    "and run it again"
                ) from error


@dataclass
class OpenShard:
    """A shard that is being written; its methods run in its lane, one after the other."""

    scratch: Scratch
    source: str
    layer_ids: tuple[int, ...]
    plan: ShardPlan
    documents: list[tuple[Tensor, Tensor]]
    lane: ThreadPoolExecutor
    _parts: list[Reading] = field(default_factory=list)
    _stream: IO[bytes] | None = None
    _file: ShardFile | None = None

    def write(self, reading: Reading) -> None:
        """Check a batch and append its states.

        Raises:
            ValueError: a state is not finite or constant, or the tokens are not those of the token shard.
        """
        reading.wait()
        try:
            self._check(reading)
            if self._file is None:
                self._stream = self.scratch.partial(self.plan.name).open("wb")
                self._file = ShardFile(self._stream, shapes_of(reading, self.plan, self.documents))
            self._file.write(reading.hidden)
        except BaseException:
            self._abandon()
            raise
        reading.hidden = reading.hidden[:0].clone()  # the memory goes back; the rest of it is small
        self._parts.append(reading)

    def finish(self) -> None:
        """Append the other tensors, and give the shard its name."""
        try:
            assert self._file is not None
            assert self._stream is not None
            for tensor in rest_of(self._parts, self.documents):
                self._file.write(tensor)
            self._stream.close()
            sums = torch.stack([part.sums for part in self._parts]).sum(0)
            record = {"tokens": self.plan.tokens, "sums": sums.tolist()}
            write_atomic(statistics_path(self.scratch.path, self.plan.name), json.dumps(record))
            self.scratch.finish(self.plan.name, self._file.digest())
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self.scratch.partial(self.plan.name).unlink(missing_ok=True)

    def _check(self, reading: Reading) -> None:
        start = sum(map(len, self.plan.batches[: len(self._parts)]))
        count = len(self.plan.batches[len(self._parts)])
        lengths = self.plan.lengths[start : start + count]
        expected = torch.cat([ids for ids, _ in self.documents[start : start + count]])
        name = f"{self.source}/{self.plan.name}"
        if not torch.equal(reading.input_ids, expected):
            raise ValueError(f"{name}: the target was given other tokens than {self.plan.source} holds")
        if not bool(reading.faults.any()):
            return
        token, tap = map(int, reading.faults.nonzero()[0])
        fault = int(reading.faults[token, tap])
        affected = int((reading.faults[:, tap] == fault).sum())
        row = 0
        while token >= lengths[row]:
            token -= lengths[row]
            row += 1
        raise ValueError(
            f"{name}: {affected} states after block {self.layer_ids[tap]} are {PROBLEMS[fault]}, the first at "
            f"token {token} of document {self.plan.documents[start + row]} of {self.plan.source}"
        )


def shapes_of(
    reading: Reading, plan: ShardPlan, documents: list[tuple[Tensor, Tensor]]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Every tensor of a shard, in the order in which it is written."""
    taps, size, k = *reading.hidden.shape[1:], reading.topk_ids.shape[-1]
    supervised = int(sum(mask.sum() for _, mask in documents))
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "target_hidden": (reading.hidden.dtype, (plan.tokens, taps, size)),
        "offsets": (torch.int64, (len(documents) + 1,)),
        "topk_ids": (torch.int32, (supervised, k)),
        "topk_logprobs": (torch.float32, (supervised, k)),
    }
    if reading.scale is not None:
        shapes["scale"] = (torch.float32, (plan.tokens, taps))
    return {**shapes, "input_ids": (torch.int32, (plan.tokens,)), "loss_mask": (torch.uint8, (plan.tokens,))}


def rest_of(parts: list[Reading], documents: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """The tensors behind ``target_hidden``, in the order of :func:`shapes_of`."""
    lengths = torch.tensor([0, *(len(ids) for ids, _ in documents)])
    scales = [part.scale for part in parts if part.scale is not None]
    return [
        lengths.cumsum(0),
        torch.cat([part.topk_ids for part in parts]),
        torch.cat([part.topk_logprobs for part in parts]),
        *([torch.cat(scales)] if scales else []),
        torch.cat([part.input_ids for part in parts]),
        torch.cat([mask for _, mask in documents]).to(torch.uint8),
    ]


def statistics_path(folder: Path, name: str) -> Path:
    """Where the sums of a finished shard are kept."""
    return folder / f"{name}.sums.json"


def read_sums(folder: Path, name: str) -> dict[str, Any] | None:
    """The sums of a finished shard; ``None`` where they are absent or damaged."""
    try:
        record = json.loads(statistics_path(folder, name).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) and record.keys() == {"tokens", "sums"} else None


def statistics(folder: Path, names: list[str], layer_ids: tuple[int, ...], size: int) -> dict[str, Any]:
    """Mean, standard deviation and share of zeros of each tap over finished shards of hidden size ``size``."""
    records = [read_sums(folder, name) for name in names]
    count = sum(record["tokens"] for record in records if record) * size
    sums = torch.tensor([record["sums"] for record in records if record], dtype=torch.float64).sum(0)  # (L, 3)
    found = {}
    for layer_id, (total, squares, zeros) in zip(layer_ids, sums.tolist(), strict=True):
        mean = total / count
        deviation = max(0.0, squares / count - mean * mean) ** 0.5
        values = {"mean": mean, "std": deviation, "zeros": zeros / count}
        found[str(layer_id)] = {name: float(f"{value:.4g}") for name, value in values.items()}
    return found
