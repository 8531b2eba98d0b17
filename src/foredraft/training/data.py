"""Feature shards -> rows of whole documents with their blocks.

Everything is a function of (data, seed, epoch, step), so a resumed run repeats and skips nothing. Documents are packed back
to back up to a budget of tokens, and every row of a run has the same sizes: a shape that a compiler, or oneDNN, has not seen
costs far more than the padding.

Shapes: ``T`` tokens of a row, ``L`` taps, ``D`` hidden size, ``N`` blocks, ``S`` slots, ``M`` counted slots, ``K`` top-k.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.artifacts import ArtifactError, Manifest, require_same_contract
from foredraft.drafter.blocks import Blocks, anchor_budgets, anchor_candidates, build_blocks, draw_anchors
from foredraft.features.layout import Document, FeatureShard, dequantise, open_features
from foredraft.loops import periodic_tail

AHEAD = 1
"""Rows that lie ready on the GPU, beside the one in use; another has been made, or is being."""
WINDOW_ROWS = 16
"""So many rows are packed together."""
TOKEN_MULTIPLE = 128
"""Of tokens of a row that is longer than the budget, because one document is."""
SLOT_MULTIPLE = 128
"""Of counted slots, so that few shapes occur; those behind ``count`` are copies of nothing and weigh nothing."""


@dataclass(frozen=True)
class Row:
    """Documents of a step, back to back, and their blocks. Behind the last document there may be padding."""

    names: list[str]
    bounds: list[int]
    """Where each document begins, and where the last one ends; then, if there is padding, where that ends."""
    stored: Tensor  # (T, L, D) states as the features hold them
    positions: Tensor  # (T), in each token's document
    embedded: Tensor  # (N, D) the target's embedding of the token at each block's anchor
    blocks: Blocks
    count: int
    """Counted slots."""
    slots: Tensor  # (M) number n * S + k of each counted slot, in order
    data_ids: Tensor  # (M) the token that stands there
    topk_ids: Tensor  # (M, K) what the target said there
    topk_logprobs: Tensor  # (M, K)
    worth: Tensor  # (M) what each counts, beside its weight in the block
    scale: Tensor | None = None  # (T, L) by which float8 is to be multiplied
    counts: bool = True
    """False for a stand-in: run so that all processes do alike, and worth nothing."""

    @property
    def target_hidden(self) -> Tensor:
        """``(T, L, D)`` bfloat16, made where the row lies: float8 travels as float8."""
        return self.stored if self.scale is None else dequantise(self.stored, self.scale)

    def to(self, device: torch.device) -> "Row":
        """The same on ``device``, copied beside the work that goes on there."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            field.name: value.pin_memory().to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved, blocks=self.blocks.to(device))

    def used_on(self, stream: "torch.cuda.Stream") -> None:
        """Keep the memory, which was taken on another stream, until what is queued on this one is done."""
        for value in (*vars(self).values(), *vars(self.blocks).values()):
            if isinstance(value, Tensor):
                value.record_stream(stream)


@dataclass(frozen=True)
class RowSizes:
    """What every row of a run has alike, and the target's embeddings ``(vocabulary, D)``."""

    tokens: int
    anchors: int
    block_size: int
    embeddings: Tensor
    periodic_tails: float = 1.0


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
        # Of each token and tap, in one pass; a scale is that value but for a factor.
        largest = (
            torch.linalg.vector_norm(document.stored, torch.inf, dim=-1) if document.scale is None else document.scale
        )
        if not bool((largest > 0).all() & largest.isfinite().all()):
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

    def epoch(self, seed: int, epoch: int, tokens_per_row: int) -> list[list[int]]:
        """Documents of each row of one epoch: shuffled, then packed so that little room is left in a few rows' worth."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        rows: list[list[int]] = []
        for window in self._windows(order, tokens_per_row * WINDOW_ROWS):
            rows += [[window[i] for i in group] for group in pack([self.lengths[i] for i in window], tokens_per_row)]
        return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]

    def _windows(self, order: list[int], tokens: int) -> list[list[int]]:
        """Cut ``order`` where ``tokens`` are reached: packed all at once, rows would be the same in every epoch."""
        windows: list[list[int]] = [[]]
        held = 0
        for index in order:
            if held >= tokens:
                windows.append([])
                held = 0
            windows[-1].append(index)
            held += self.lengths[index]
        return windows

    def row(self, indices: list[int], sizes: RowSizes, seed: int) -> Row:
        """Read documents, draw their anchors by ``seed``, and pad."""
        generator = torch.Generator().manual_seed(seed)
        documents = [self.document(i) for i in indices]
        tails = [repeated(d) if sizes.periodic_tails < 1 else torch.zeros_like(d.loss_mask) for d in documents]
        masks = [
            d.loss_mask if sizes.periodic_tails else d.loss_mask & ~t for d, t in zip(documents, tails, strict=True)
        ]
        candidates = [anchor_candidates(mask) for mask in masks]
        budgets = anchor_budgets([self.supervised[i] for i in indices], [len(c) for c in candidates], sizes.anchors)
        drawn = [draw_anchors(c, n, generator) for c, n in zip(candidates, budgets, strict=True)]
        blocks = build_blocks(drawn, masks, sizes.block_size, sizes.anchors)
        bounds = list(accumulate((self.lengths[i] for i in indices), initial=0))
        padding = sizes.tokens - bounds[-1] if bounds[-1] <= sizes.tokens else -bounds[-1] % TOKEN_MULTIPLE
        ids = torch.cat([document.input_ids for document in documents])
        slots = blocks.counted.flatten().nonzero()[:, 0]
        count = len(slots)
        slots = F.pad(slots, (0, -count % SLOT_MULTIPLE))
        places = (blocks.starts[:, None] + blocks.positions).flatten()[slots]  # (M), in the row
        supervised = torch.cat([document.loss_mask for document in documents])
        said = (supervised.long().cumsum(0) - 1)[places]  # (M), among the supervised tokens
        worth = torch.where(torch.cat(tails)[places], sizes.periodic_tails, 1.0)
        return Row(
            names=[self.names[i] for i in indices],
            bounds=bounds + [bounds[-1] + padding] * (padding > 0),
            stored=_joined([document.stored for document in documents], padding),
            scale=None if documents[0].scale is None else _joined([cast(Tensor, d.scale) for d in documents], padding),
            embedded=sizes.embeddings[ids[blocks.starts + blocks.anchors]],
            positions=torch.cat([torch.arange(self.lengths[i]) for i in indices] + [torch.arange(padding)]),
            blocks=blocks,
            count=count,
            slots=slots,
            data_ids=ids[places],
            topk_ids=torch.cat([document.topk_ids for document in documents])[said],
            topk_logprobs=torch.cat([document.topk_logprobs for document in documents])[said],
            worth=worth,
        )


def repeated(document: Document) -> Tensor:
    """Which tokens ``(T)`` of a document are in the tail of an answer that repeats itself, after the piece's first time."""
    tail = torch.zeros_like(document.loss_mask)
    edges = F.pad(document.loss_mask.int(), (1, 1)).diff()
    for start, end in zip(edges.eq(1).nonzero()[:, 0].tolist(), edges.eq(-1).nonzero()[:, 0].tolist(), strict=True):
        length, period = periodic_tail(document.input_ids[start:end].tolist())
        tail[end - max(0, length - period) : end] = length > 0
    return tail


def ahead(makers: Iterable[Callable[[], Row]], device: torch.device) -> Iterator[Row]:
    """Rows on ``device``; on a GPU they are made by a thread, and copied on a stream of their own, while others are used."""
    if device.type == "cpu":
        yield from (make() for make in makers)
        return
    stream, made = torch.cuda.Stream(device), Queue[Any](maxsize=AHEAD)
    stopped = Event()

    def put(item: Any) -> None:
        while not stopped.is_set():
            with suppress(Full):
                return made.put(item, timeout=1)

    def work() -> None:
        try:
            with torch.cuda.stream(stream):
                for make in makers:
                    row = make().to(device)
                    put((row, stream.record_event()))
                    if stopped.is_set():
                        return
            put(None)
        except Exception as error:  # told where the rows are used
            put(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        while (item := made.get()) is not None:
            if isinstance(item, Exception):
                raise item
            row, arrived = item
            torch.cuda.current_stream(device).wait_event(arrived)
            row.used_on(torch.cuda.current_stream(device))
            yield row
    finally:
        stopped.set()
        thread.join()


def pack(lengths: list[int], budget: int) -> list[list[int]]:
    """Group numbers of ``lengths`` so that each group's sum is within ``budget``: best fit, longest first.

    What is longer than the budget is a group by itself.
    """
    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, group), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(room, (lengths[index], -1))
        if place == len(room):
            groups.append([])
            left, group = budget, len(groups) - 1
        else:
            left, group = room.pop(place)
        groups[group].append(index)
        if left > lengths[index]:
            insort(room, (left - lengths[index], group))
    return groups


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


def _joined(parts: list[Tensor], padding: int) -> Tensor:
    """``(t, ...)`` of each document -> ``(T, ...)``, zero in the padding."""
    joined = parts[0].new_zeros(sum(map(len, parts)) + padding, *parts[0].shape[1:])
    torch.cat(parts, out=joined[: len(joined) - padding])
    return joined
