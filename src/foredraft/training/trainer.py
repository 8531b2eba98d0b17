"""A training run, exactly resumable: its plan, its steps, its validations, and what it keeps."""

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.devices import default_device
from foredraft.drafter.config import FLOAT8_MULTIPLE, DrafterShape, require_free_mask
from foredraft.drafter.model import Drafter
from foredraft.progress import Progress
from foredraft.scratch import Scratch
from foredraft.target.interface import Interface
from foredraft.training.checkpoint import Progressed, load_checkpoint, save_checkpoint
from foredraft.training.config import TrainConfig
from foredraft.training.data import FeatureData, Row, RowSizes, ahead
from foredraft.training.initialise import initialise
from foredraft.training.learner import Learner, Step
from foredraft.training.objective import Head, Outcome
from foredraft.training.optim import learning_rate
from foredraft.training.ranks import Ranks
from foredraft.training.replay import keep_for_replay
from foredraft.training.tracking import check_tracker, tracking

WEIGHTS = "drafter.safetensors"


class Trainer:
    """One run: data, model, optimiser, and how far it is."""

    def __init__(
        self,
        config: TrainConfig,
        shape: DrafterShape,
        interface: Interface,
        folders: dict[str, Path],
        identity: dict[str, Any] | None = None,
        ranks: Ranks | None = None,
        live: Path | None = None,
    ):
        check_tracker(config.tracker)
        self.config, self.identity, self.live = config, identity or {}, live
        self.ranks = ranks or Ranks(torch.device(default_device()))
        self.train_data = FeatureData(folders, "train")
        self.validation_data = FeatureData(folders, "validation")
        for split, data in {"train": self.train_data, "validation": self.validation_data}.items():
            if len(data) == 0:
                raise ValueError(f"no {split} document in {', '.join(map(str, folders.values()))}")
            if max(data.supervised) < 2:
                raise ValueError(f"no {split} document has two supervised tokens: there is nothing to guess")
        check_mask_token(config.drafter.mask_token_id, self.train_data, interface.manifest.facts)
        dtype = getattr(torch, config.compute_dtype)
        rows = self.train_data.answer_ids() if config.head_rows == "occurring" else None
        if rows is not None and config.float8 != "none":
            rows = filled_up(rows, len(interface.lm_head), FLOAT8_MULTIPLE)
        drafter = Drafter(shape)
        initialise(drafter, config.start, interface, torch.Generator().manual_seed(config.seed))
        embeddings = interface.embed_tokens.to(dtype)
        mask = embeddings[config.drafter.mask_token_id]
        self.learner = Learner(config, drafter, Head.build(interface.lm_head, rows), mask, self.ranks)
        self.full_head = Head.build(interface.lm_head)
        block = config.drafter.block_size
        self.sizes = RowSizes(config.tokens_per_row, config.anchors_per_row, block, embeddings, config.periodic_tails)
        self.plan = plan_steps(self.train_data, config)

    def run(self, scratch: Scratch) -> Progressed:
        """Train to the end, from the last complete checkpoint in ``scratch``.

        Raises:
            ValueError: told to stop (SIGTERM, Ctrl-C), after what is done was kept; or see :meth:`step`.
        """
        config, ranks = self.config, self.ranks
        progressed, state = load_checkpoint(scratch.path, self.identity)
        if state:
            self.learner.restore(state)
        if progressed.best and not scratch.has(WEIGHTS):
            raise ValueError(f"{scratch.path / WEIGHTS} is damaged: delete {scratch.path} to train from the start")
        shares = [ranks.share(step) for step in self.plan[progressed.step :]]
        made = (partial(self.make_row, planned, counts) for share in shares for planned, counts in share)
        rows = ahead(made, ranks.device)
        title = "train" if ranks.rank == 0 else f"train-{ranks.rank}"
        tracker = config.tracker if ranks.rank == 0 else None
        with (
            told_to_stop() as stop,
            tracking(self.live, tracker, scratch.path, progressed.curve) as track,
            Progress(title, len(self.plan), "steps", done=progressed.step) as progress,
        ):
            for share in shares:
                started = time.perf_counter()
                mine = list(islice(rows, len(share)))
                waited = time.perf_counter() - started
                record = self.step(progressed, mine, scratch)
                record |= {"seconds": time.perf_counter() - started, "waited": waited}
                progressed.step += 1
                last = progressed.step == len(self.plan)
                if last or progressed.step % config.validate_every == 0:
                    record |= self._validate_and_keep_best(progressed, scratch)
                progressed.curve.append(record)
                track(record)
                stopping, new_best = ranks.any(stop.is_set()), progressed.best.get("step") == progressed.step
                if last or stopping or new_best or progressed.step % config.checkpoint_every == 0:
                    self._save(progressed, scratch)
                progress.advance(1, note=f"loss {record['loss']:.3f}")
                if stopping and not last:
                    raise ValueError(
                        f"told to stop at step {progressed.step} of {len(self.plan)}, which is kept: run it again"
                    )
        return progressed

    def rows_of(self, step: int) -> list[Row]:
        """This process's rows of a step of the plan."""
        return [self.make_row(planned, counts) for planned, counts in self.ranks.share(self.plan[step])]

    def make_row(self, planned: tuple[int, list[int]], counts: bool) -> Row:
        """A row of the plan: the seed of its anchors, and its documents."""
        seed, documents = planned
        return replace(self.train_data.row(documents, self.sizes, seed), counts=counts)

    def step(self, progressed: Progressed, rows: list[Row], scratch: Scratch | None = None) -> dict[str, Any]:
        """One optimiser step; its record for the curve.

        Args:
            scratch: where rows are kept whose loss or gradient is not finite.

        Raises:
            ValueError: too many steps had a non-finite loss or gradient; names the documents of the last.
        """
        rate = learning_rate(self.config, progressed.step, len(self.plan))
        step = self.learner.learn(rows, rate)
        if step.culprit is not None:
            progressed.skipped += 1
            self._tell_of_a_skipped_step(step, progressed, rows, scratch)
        return {
            "step": progressed.step + 1,
            "loss": step.loss,
            "lr": rate,
            "gradient_norm": step.norm,
            "tokens_per_step": 1 + step.accepted / max(1, step.blocks),
            "anchors": step.blocks,
        }

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss and acceptance on held-out documents: the same code, all rows of the head, fixed anchors."""
        rows = list(enumerate(self.validation_data.epoch(self.config.seed, 0, self.config.tokens_per_row)))
        sizes = replace(self.sizes, anchors=max(1, self.config.validation_anchors // len(rows)))
        shared = self.ranks.share(rows)
        made = (partial(self.validation_data.row, documents, sizes, number) for (number, documents), _ in shared)
        full_head = self.full_head.to(self.ranks.device, self.learner.mask.dtype)
        run = (self.learner.run(row, full_head) for row in ahead(made, self.ranks.device))
        outcomes = [o if counts else o.nothing() for o, (_, counts) in zip(run, shared, strict=True)]
        return pooled(outcomes, self.ranks)

    def _validate_and_keep_best(self, progressed: Progressed, scratch: Scratch) -> dict[str, Any]:
        with self.learner.averaged():
            found = self.validate()
            if not math.isfinite(found["loss"]):
                raise ValueError(
                    f"step {progressed.step}: the loss on held-out documents is {found['loss']}: "
                    f"the weights are beyond repair; is train.lr = {self.config.lr} too high?"
                )
            # Of equal ones the later: it has learned more that the validation is too small to show.
            if not progressed.best or found["tokens_per_step"] >= progressed.best["tokens_per_step"]:
                weights = self.learner.weights()
                if self.ranks.rank == 0:
                    scratch.write(WEIGHTS, lambda path: save_file(weights, path))
                progressed.best = {"step": progressed.step, "tokens_per_step": found["tokens_per_step"]}
        progressed.validation = found
        after_warm_up = progressed.step > self.config.warmup * len(self.plan)
        if after_warm_up and found["accepted_per_step"] == 0 and self.ranks.rank == 0:
            self._say_that_nothing_is_learned(progressed)
        return {f"val_{key}": value for key, value in found.items() if key != "accuracy_by_slot"}

    def _save(self, progressed: Progressed, scratch: Scratch) -> None:
        state = self.learner.state()
        if self.ranks.rank == 0:
            save_checkpoint(scratch.path, state, progressed, self.identity)

    def _tell_of_a_skipped_step(
        self, step: Step, progressed: Progressed, rows: list[Row], scratch: Scratch | None
    ) -> None:
        names = ", ".join(self.ranks.gather([name for row in rows if row.counts for name in row.names]))
        told = (
            f"step {progressed.step + 1}: loss {step.loss}, gradient norm {step.norm}, first in {step.culprit}; "
            f"{progressed.skipped} steps skipped; documents {names}"
        )
        if scratch is not None:
            folder = scratch.path / f"not-finite-{progressed.step + 1:08d}-{self.ranks.rank}"
            keep_for_replay(folder, self.learner, rows)
            told += f"; to look into it: python -m foredraft.training.replay {folder}"
        if self.ranks.rank == 0:
            print(f"train: {told}", file=sys.stderr)
        if progressed.skipped > self.config.max_skipped_steps:
            raise ValueError(told)

    def _say_that_nothing_is_learned(self, progressed: Progressed) -> None:
        blocks = progressed.validation["blocks"]
        rows, all_rows = (len(head.rows) for head in (self.learner.head, self.full_head))
        print(
            f"train: step {progressed.step}: not one draft of {blocks} held-out blocks is right. If that stays so: are "
            "the answers the target's own, the taps those of the features, the rate too high, or is there too little "
            f"data for train.head_rows = {self.config.head_rows} ({rows} of {all_rows} rows)?",
            file=sys.stderr,
        )


@contextmanager
def told_to_stop() -> Iterator[Event]:
    """An event that SIGTERM or Ctrl-C sets: what is under way can be kept first. A second one ends the process.

    In another thread than the first it is never set.
    """
    event = Event()
    if current_thread() is not main_thread():
        yield event
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(*_: object) -> None:
        event.set()
        restore()

    for number in before:
        signal.signal(number, stop)
    try:
        yield event
    finally:
        restore()


def plan_steps(data: FeatureData, config: TrainConfig) -> list[list[tuple[int, list[int]]]]:
    """For every step of the run its rows: the seed of a row's anchors, and its documents. The last step may be short."""
    rows: list[tuple[int, list[int]]] = []
    for epoch in range(config.epochs):
        packed = data.epoch(config.seed, epoch, config.tokens_per_row)
        rows += [((config.seed * 1_000_003 + epoch) * 1_000_003 + number, row) for number, row in enumerate(packed)]
    return [rows[i : i + config.rows_per_step] for i in range(0, len(rows), config.rows_per_step)]


def filled_up(ids: Tensor, count: int, multiple: int) -> Tensor:
    """Sorted ``ids`` of ``count``, and the first others, so that there are a ``multiple`` of them."""
    others = torch.ones(count, dtype=torch.bool)
    others[ids] = False
    return torch.cat([ids, others.nonzero()[: -len(ids) % multiple, 0]]).sort().values


def pooled(outcomes: list[Outcome], ranks: Ranks) -> dict[str, Any]:
    """Numbers of a whole set, from sums and counts."""
    sums = ranks.sum(torch.stack([outcome.flat() for outcome in outcomes]).sum(0)).tolist()
    loss, weight, accepted, blocks, *by_slot = sums
    correct, counted = by_slot[: len(by_slot) // 2], by_slot[len(by_slot) // 2 :]
    return {
        "loss": loss / max(weight, 1e-12),
        "tokens_per_step": 1 + accepted / max(1, blocks),
        "accepted_per_step": accepted / max(1, blocks),
        "blocks": int(blocks),
        "accuracy_by_slot": [right / max(1, all_) for right, all_ in zip(correct[1:], counted[1:], strict=True)],
    }


def check_mask_token(mask_token_id: int, data: FeatureData, facts: dict[str, Any]) -> None:
    """Refuse a mask token that means something.

    Raises:
        ValueError: it is past the embedding, an end or padding token, or occurs in the data.
    """
    require_free_mask(mask_token_id, facts)
    if data.uses(mask_token_id):
        raise ValueError(
            f"train.drafter.mask_token_id = {mask_token_id}: that id occurs in the data; choose a row that they never use"
        )
