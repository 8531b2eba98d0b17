"""The ``curate`` stage: raw rows -> canonical conversations, filtered, capped and split.

Rows are read and filtered by any number of processes, which spill what they keep into buckets by id; duplicates and
limits are decided on ids and signatures alone; then each bucket is sorted and written. So memory hardly grows with the
number of rows, and the output depends on the set of rows: not on files' order, and not on the number of processes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from foredraft.accounts import Account
from foredraft.artifacts import Manifest, open_artifact, publish
from foredraft.conversations.config import CurateConfig
from foredraft.conversations.duplicates import Signatures, SignatureStore, runs_of, signatures_of
from foredraft.conversations.files import DATA_SUFFIXES, BrokenRow, Chunk, data_files, read_chunks
from foredraft.conversations.filters import Filters
from foredraft.conversations.messages import UnusableRow
from foredraft.conversations.readers import READERS, TOO_LONG_FOR_WINDOW, Draft
from foredraft.conversations.schema import (
    Conversation,
    conversation_id,
    read_conversations,
    to_record,
    write_records,
)
from foredraft.sources.config import SourceConfig
from foredraft.workers import map_in_order

Ids = NDArray[np.bytes_]
BUCKET_BYTES = 32 << 20
"""Raw bytes for each bucket, and so for each file of the artefact: what one process holds at a time."""
UNPACKED = 5
"""How many bytes a packed one becomes, about."""


def curate(
    name: str, source: SourceConfig, config: CurateConfig, raw: Path, benchmarks: Path, out: Path
) -> dict[str, Any]:
    """Write the conversations of source ``name`` as the artefact ``out``; returns its row account.

    Every conversation read is kept or counted under a reason: ``rows_in = rows_out + sum(skipped)``. A raw row that
    yields several conversations (a trace) counts as that many.

    Raises:
        ValueError: no conversation is left, or more than ``max_skip_ratio`` of the rows cannot be used; names the
            reasons and the first row of each.
    """
    open_artifact(raw, "raw", f"dvc repro fetch@{name}")
    open_artifact(benchmarks, "benchmarks", "dvc repro benchmarks")
    files = data_files(raw)
    size = sum(path.stat().st_size * (1 if path.suffix in {".json", ".jsonl", ".csv"} else UNPACKED) for path in files)
    buckets = max(1, -(-size // BUCKET_BYTES))
    account = Account(f"sources.{name}")
    with _spilling(out) as spill:
        index = Index(spill / "index", with_signatures=config.near_duplicate is not None)
        make = partial(RowReader, name, source, config, benchmarks, spill, buckets)
        for found in map_in_order(make, (chunk for path in files for chunk in read_chunks(path, source.rows))):
            account.add(found.account)
            index.add(found)
        index.close()
        if account.rows_in == 0:
            known = f"; files that end in {', '.join(DATA_SUFFIXES)} are read" if not files else ""
            raise ValueError(f"sources.{name}: no row in {raw} (data files: {len(files)}{known})")
        account.refuse_unusable(config.max_skip_ratio, "curate.max_skip_ratio")
        account.refuse_nothing()
        chosen = index.choose(source, config, account)
        account.check(len(chosen))
        facts = {"source": name, "kind": source.kind, "licence": source.licence, "answers": source.answers}
        manifest = Manifest("conversations", counts=account.counts(), facts=facts)
        with publish(out, manifest) as folder:
            parts = enumerate(_by_bucket(chosen, buckets))
            tasks = ((bucket, spill, folder, ids) for bucket, ids in parts if len(ids))
            written = sum(map_in_order(bucket_writer, tasks))
            assert written == len(chosen), f"{written} rows written, {len(chosen)} chosen"
    return account.counts()


def split_of(group: str, validation_share: float) -> str:
    """``train`` or ``validation``, by hash alone: the same on every machine, and stable when rows are added."""
    position = int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64
    return "validation" if position < validation_share else "train"


def to_answer(draft: Draft) -> list[dict[str, Any]]:
    """What is asked, where the target will answer: nothing of an answer that is to be replaced.

    Recorded turns (tool calls and what came of them, a trace) stay, up to the last that is not the assistant's.
    """
    messages = draft.messages
    if draft.recorded or any(turn["role"] == "tool" or turn.get("tool_calls") for turn in messages):
        last = max((i for i, turn in enumerate(messages) if turn["role"] != "assistant"), default=-1)
        return messages[: last + 1]
    return [turn for turn in messages if turn["role"] != "assistant"]


@dataclass
class Found:
    """What a chunk of raw rows came to: its account, and ids and signatures of the rows spilled."""

    account: Account
    ids: list[str] = field(default_factory=list)
    signatures: Signatures | None = None


class RowReader:
    """Turns a chunk of raw rows into spilled records; one in each process."""

    def __init__(
        self, name: str, source: SourceConfig, config: CurateConfig, benchmarks: Path, spill: Path, buckets: int
    ):
        self._name, self._source, self._config = name, source, config
        self._spill, self._buckets = spill, buckets
        held_out = [
            message["content"]
            for path in sorted(benchmarks.glob("*.parquet"))
            for row in read_conversations(path)
            for message in row.messages
        ]
        self._filters = Filters(config, held_out)

    def __call__(self, chunk: Chunk) -> Found:
        """Read, filter and spill the rows of ``chunk``."""
        found = Found(Account(f"sources.{self._name}"))
        places: set[str] = set()
        lines: dict[int, list[bytes]] = {}
        runs: list[NDArray[np.uint64]] = []
        for place, draft in self._drafts(chunk):
            places.add(place)
            if isinstance(draft, UnusableRow | BrokenRow):
                found.account.skip(str(draft), place, unusable=str(draft) != TOO_LONG_FOR_WINDOW)
                continue
            try:
                if reason := self._filters.reason_to_drop(draft):
                    found.account.skip(reason, place)
                    continue
                row = self._conversation(draft)
                line = orjson.dumps(to_record(row))
            except (TypeError, UnicodeEncodeError):  # a date out of Parquet, half a surrogate pair
                found.account.skip("not_json", place, unusable=True)
                continue
            found.account.keep()
            found.ids.append(row.id)
            lines.setdefault(bucket_of(row.id, self._buckets), []).append(line)
            if self._config.near_duplicate is not None:
                runs.append(self._runs(draft))
        found.account.seen = len(places)
        for bucket, part in lines.items():
            with (self._spill / f"{bucket:05d}.{os.getpid()}").open("ab") as stream:
                stream.writelines(line + b"\n" for line in part)
        found.signatures = signatures_of(runs) if runs else None
        return found

    def _drafts(self, chunk: Chunk) -> Iterator[tuple[str, Draft | UnusableRow | BrokenRow]]:
        for place, row in chunk.rows():
            if isinstance(row, BrokenRow):
                yield place, row
                continue
            try:
                for draft in READERS[self._source.format](row, self._source):
                    if isinstance(draft, Draft) and draft.ids is None and self._source.answers == "generate":
                        draft = replace(draft, messages=to_answer(draft))
                    yield place, draft
            except UnusableRow as reason:
                yield place, reason

    def _conversation(self, draft: Draft) -> Conversation:
        tokens = None if draft.ids is None else [draft.ids, draft.mask]
        identity = conversation_id(draft.messages, draft.tools, tokens)
        group = draft.group or identity
        return Conversation(
            id=identity,
            messages=draft.messages,
            tools=draft.tools,
            kind=self._source.kind,
            origin=self._name,
            licence=self._source.licence,
            split=split_of(group, self._config.validation_share),
            group=group,
            input_ids=draft.ids,
            loss_mask=draft.mask,
        )

    def _runs(self, draft: Draft) -> NDArray[np.uint64]:
        """Of what is said, the system apart: its words may be many and the same for all.

        Of a recorded history that is to be answered only the last message counts, since each step repeats those before it.
        """
        if draft.ids is not None:
            return runs_of([str(token) for token in draft.ids])
        said = [words for turn, words in zip(draft.messages, draft.pieces, strict=True) if turn["role"] != "system"]
        if draft.recorded and self._source.answers == "generate":
            said = said[-1:]
        tools = json.dumps(draft.tools, sort_keys=True) if draft.tools else ""
        return runs_of([word for words in said for word in words], apart=tools)


class Index:
    """Ids (in memory, 24 letters each) and signatures (on disk) of all rows that passed the filters."""

    def __init__(self, folder: Path, with_signatures: bool):
        self._ids: list[Any] = []
        self._store = SignatureStore(folder) if with_signatures else None

    def add(self, found: Found) -> None:
        """Take in the rows of a chunk."""
        if found.ids:
            self._ids.append(np.array(found.ids, dtype="S24"))
            if self._store and found.signatures is not None:
                self._store.add(found.signatures)

    def close(self) -> None:
        """Finish writing."""
        if self._store:
            self._store.close()

    def choose(self, source: SourceConfig, config: CurateConfig, account: Account) -> Ids:
        """Ids of the rows to keep, ascending; the others are moved to their reasons in ``account``."""
        ids = np.concatenate(self._ids)
        order = np.argsort(ids, kind="stable")
        repeated = np.zeros(len(ids), dtype=np.bool_)
        repeated[order[1:]] = ids[order[1:]] == ids[order[:-1]]
        account.drop("duplicate", int(repeated.sum()))
        alike = np.zeros_like(repeated)
        if self._store and config.near_duplicate is not None:
            alike = self._store.near_duplicates(order, config.near_duplicate) & ~repeated
            account.drop("near_duplicate", int(alike.sum()))
        kept = ids[order[~(repeated | alike)[order]]]
        chosen = kept
        if (weight := config.weights.get(source.kind, 1.0)) < 1:
            chosen = kept[np.fromiter((share_position(identity) < weight for identity in kept), np.bool_, len(kept))]
        account.drop("over_weight", len(kept) - len(chosen))
        limited = chosen[: source.limit]
        account.drop("over_limit", len(chosen) - len(limited))
        return limited


def bucket_of(identity: str, buckets: int) -> int:
    """Which of ``buckets`` an id falls into; buckets are in the order of their ids."""
    return int(identity[:8], 16) * buckets >> 32


def share_position(identity: bytes) -> float:
    """Where an id lies between 0 and 1, by other bits than those that order ids."""
    return int(identity[12:], 16) / 16 ** len(identity[12:])


def bucket_writer() -> Callable[[tuple[int, Path, Path, Ids]], int]:
    """What a process needs to write buckets: nothing that would have to be built."""
    return write_bucket


def write_bucket(task: tuple[int, Path, Path, Ids]) -> int:
    """Write the chosen rows of a bucket by id; of equal conversations the first by group and by its own text stays."""
    bucket, spill, folder, chosen_ids = task
    ids = [identity.decode() for identity in chosen_ids]
    chosen = set(ids)
    rows: dict[str, tuple[str, bytes]] = {}
    for path in spill.glob(f"{bucket:05d}.*"):
        with path.open("rb") as stream:
            for line in stream:
                record = orjson.loads(line)
                if record["id"] in chosen:
                    mine = (record["group"], line)
                    rows[record["id"]] = min(mine, rows.get(record["id"], mine))
    # Only a group's rows are ever held as more than their lines.
    write_records((orjson.loads(rows[identity][1]) for identity in ids), folder / f"conversations-{bucket:05d}.parquet")
    return len(ids)


def _by_bucket(ids: Ids, buckets: int) -> list[Ids]:
    """Ascending ids, cut where :func:`bucket_of` begins another bucket."""
    first = [b"%08x" % -(-(bucket << 32) // buckets) for bucket in range(1, buckets)]
    return np.split(ids, np.searchsorted(ids, np.array(first, dtype="S24")))


@contextmanager
def _spilling(out: Path) -> Iterator[Path]:
    """A folder beside ``out``, so on the same disk, for what is between reading and writing."""
    spill = out.with_name(f".{out.name}.spill")
    shutil.rmtree(spill, ignore_errors=True)
    spill.mkdir(parents=True)
    try:
        yield spill
    finally:
        shutil.rmtree(spill, ignore_errors=True)
