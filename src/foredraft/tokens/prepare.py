"""The ``prepare`` stage: answers -> token ids and loss mask, in shards."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.accounts import Account
from foredraft.artifacts import Manifest, publish, require_same_contract
from foredraft.chat.render import Renderer, UnrenderablePrompt
from foredraft.chat.supervise import Document, Supervisor
from foredraft.conversations.schema import Conversation, read_conversations, row_groups
from foredraft.responses.schema import Response, open_responses
from foredraft.target.artifact import open_interface
from foredraft.target.tokenizer import read_tokenizer
from foredraft.tokens.config import PrepareConfig
from foredraft.tokens.documents import conversations_of, merged
from foredraft.tokens.writer import LENGTH_BINS, SPLITS, ShardWriter
from foredraft.workers import map_in_order

Task = tuple[Path, int | None]
"""A file, and the group of its rows (None: all of them)."""


def prepare(name: str, config: PrepareConfig, responses: Path, interface: Path, out: Path) -> dict[str, Any]:
    """Write the token shards of source ``name`` as the artefact ``out``; returns its row account.

    Of a generated answer the mask is known from how the row was made. Of a text answer it comes from the target's own
    template, and is proven: see :mod:`foredraft.chat.supervise`. Documents are counted; a conversation that gives none
    counts as one under its reason.

    Raises:
        ValueError: no document is left; too many conversations that no mask can be proven for; an id past the target's
            embedding.
    """
    source, parts = open_responses(responses, name)
    manifest = open_interface(interface)
    require_same_contract(manifest.contract, source.contract, responses, f"dvc repro respond@{name}")
    account, totals = Account(f"sources.{name}"), {"cut": 0, "turns_left_out": 0}
    make = partial(
        Preparer, name, config, source.facts["answers"], manifest.facts, manifest.contract["thinking"], interface
    )
    tokens = Manifest("tokens", contract=source.contract)
    with publish(out, tokens) as folder:
        writers = {split: ShardWriter(folder, split, config.shard_tokens) for split in SPLITS}
        for prepared in map_in_order(make, _tasks(parts, source.facts["answers"])):
            account.add(prepared.account)
            totals["cut"] += prepared.cut
            totals["turns_left_out"] += prepared.turns_left_out
            for split, ids, mask in prepared.documents:
                writers[split].add(ids, mask)
        facts = {**closed(writers.values()), **totals}
        account.refuse_unusable(config.max_skip_ratio, "prepare.max_skip_ratio")
        account.check(sum(shard["documents"] for shard in facts["shards"].values()))
        tokens.counts, tokens.facts = account.counts(), facts
    return {**tokens.counts, **{key: value for key, value in facts.items() if key != "shards"}}


def closed(writers: Iterable[ShardWriter]) -> dict[str, Any]:
    """Close the writers; what the shards of all splits hold: each, in all, and by length."""
    shards: dict[str, dict[str, int]] = {}
    lengths: Counter[str] = Counter()
    for writer in writers:
        writer.close()
        shards |= writer.facts
        lengths += writer.lengths
    sizes = {key: sum(shard[key] for shard in shards.values()) for key in ("tokens", "supervised")}
    in_order = {name: lengths[name] for name in (*map(str, LENGTH_BINS), "more") if lengths[name]}
    return {"shards": shards, **sizes, "lengths": in_order}


@dataclass
class Prepared:
    """What a part of a file came to; each document with its split."""

    account: Account
    documents: list[tuple[str, NDArray[np.int32], NDArray[np.uint8]]] = field(default_factory=list)
    cut: int = 0
    turns_left_out: int = 0


class Preparer:
    """Turns files of answers into documents; one in each process."""

    def __init__(
        self, name: str, config: PrepareConfig, answers: str, facts: dict[str, Any], thinking: bool, interface: Path
    ):
        self._name, self._config, self._answers = name, config, answers
        self._vocab_rows = facts["vocab_rows"]
        self._supervisor: Supervisor | None = None
        self._bos_id: int | None = None
        if answers == "keep":
            tokenizer = read_tokenizer(interface)
            renderer = Renderer(tokenizer, thinking)
            self._bos_id = tokenizer.bos_token_id
            self._supervisor = Supervisor(renderer, facts["eos_token_ids"], self._bos_id)

    def __call__(self, task: Task) -> Prepared:
        """Prepare the rows of one file, or of one group of its rows."""
        path, group = task
        prepared = Prepared(Account(f"sources.{self._name}"))
        account = prepared.account
        if self._answers == "generate":
            for turns in conversations_of(path):
                account.seen += 1
                self._take_answered(turns, prepared)
        else:
            for row in read_conversations(path, group):
                account.seen += 1
                self._take_kept(row, prepared)
        return prepared

    def _take_answered(self, turns: list[Response], prepared: Prepared) -> None:
        documents = merged(turns)
        for _ in range(len(turns) - len(documents)):
            prepared.account.skip("joined_to_the_turn_before")
        for document in documents:
            self._take(document, turns[0].split, f"conversation {turns[0].id}", prepared)

    def _take_kept(self, row: Conversation, prepared: Prepared) -> None:
        assert self._supervisor is not None
        place = f"conversation {row.id}"
        if row.input_ids is not None and row.loss_mask is not None:
            if self._bos_id is not None and row.input_ids[:2] == [self._bos_id] * 2:
                prepared.account.skip("doubled_bos", place, unusable=True)
                return
            self._take_tokenised(row.input_ids, row.loss_mask, row.split, place, prepared)
            return
        before = self._supervisor.turns_left_out
        try:
            documents = self._supervisor.documents(row.messages, row.tools)
        except UnrenderablePrompt as reason:
            prepared.account.skip(str(reason), place, unusable=True)
            return
        prepared.turns_left_out += self._supervisor.turns_left_out - before
        for document in documents:
            self._take(document, row.split, place, prepared)

    def _take(self, document: Document, split: str, place: str, prepared: Prepared) -> None:
        self._take_tokenised(document.ids, document.mask(), split, place, prepared)

    def _take_tokenised(self, ids: list[int], mask: list[int], split: str, place: str, prepared: Prepared) -> None:
        limit = self._config.max_length
        cut_ids, cut_mask = np.array(ids[:limit], dtype=np.int32), np.array(mask[:limit], dtype=np.uint8)
        all_ones = bool(cut_mask.all())
        cut_mask[:1] = 0  # nothing stands before a document's first token that could say it
        if cut_mask.sum() < self._config.min_supervised_tokens:
            prepared.account.skip("too_few_supervised", place)
            return
        if all_ones:
            prepared.account.skip("mask_all_ones", place, unusable=True)
            return
        if cut_ids.max() >= self._vocab_rows:
            raise ValueError(
                f"sources.{self._name}: {place} has id {cut_ids.max()}, past {self._vocab_rows} embeddings of the target"
            )
        prepared.account.keep()
        prepared.cut += len(ids) > limit
        prepared.documents.append((split, cut_ids, cut_mask))


def _tasks(parts: list[Path], answers: str) -> Iterator[Task]:
    """Pieces of work: conversations in groups of rows, answers in files, since a conversation's turns stay together."""
    for path in parts:
        groups = range(row_groups(path)) if answers == "keep" else [None]
        yield from ((path, group) for group in groups)
