import json
import math
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from foredraft.artifacts import ArtifactError
from foredraft.drafter.config import DrafterConfig, LossConfig
from foredraft.drafter.loss import slot_losses
from foredraft.layouts.zlab import as_stored, write_zlab
from foredraft.scratch import Scratch
from foredraft.speculation.decode import decode
from foredraft.speculation.proposers import DFlashProposer
from foredraft.speculation.session import open_session
from foredraft.target.frozen import FrozenTarget
from foredraft.target.generate import greedy_answers
from foredraft.target.interface import Interface
from foredraft.training.checkpoint import Progressed, checkpoints
from foredraft.training.config import TrainConfig
from foredraft.training.data import FeatureData, Row, RowSizes, pack, repeated
from foredraft.training.learner import Learner
from foredraft.training.objective import Head, run_row
from foredraft.training.optim import learning_rate
from foredraft.training.ranks import Ranks
from foredraft.training.replay import main as replay
from foredraft.training.trainer import WEIGHTS, Trainer
from tests.builders import make_features, make_interface, tiny_frozen
from tests.conftest import TAPS, TINY_CHOICE, tiny_drafter, tiny_hybrid, tiny_shape

LOSS = LossConfig(
    labels="target_argmax", ce=0.5, kl=0.5, tv=0.0, weights="decay", gamma=4.0, alpha=0.5, equal_blocks=False
)


GOLDEN = Path(__file__).with_name("golden_losses.json")


def config(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "drafter": DrafterConfig(**TINY_CHOICE | changes.pop("drafter", {})),
        "start": "random",
        "head_rows": "occurring",
        "float8": "none",
        "loss": LOSS,
        "periodic_tails": 1.0,
        "optimizer": "adamw",
        "lr": 5e-3,
        "schedule": "cosine",
        "warmup": 0.1,
        "weight_decay": 0.01,
        "betas": (0.9, 0.95),
        "clip": 1.0,
        "average": 0.0,
        "epochs": 4,
        "tokens_per_row": 100,
        "anchors_per_row": 32,
        "tokens_per_step": 100,
        "compute_dtype": "float32",
        "weights_dtype": "float32",
        "parallel": "ddp",
        "seed": 1,
        "validate_every": 5,
        "validation_anchors": 16,
        "checkpoint_every": 3,
        "tracker": None,
        "max_skipped_steps": 1,
    }
    return TrainConfig(**settings | changes)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[FrozenTarget, Interface, dict[str, Path]]:
    target = tiny_frozen()
    return target, make_interface(target), {"code": make_features(tmp_path_factory.mktemp("f") / "code", target)}


class Stopping(Trainer):
    """Dies before a step, like a killed process: without a word, and without a checkpoint of its own."""

    def __init__(self, *arguments: Any, at: int):
        super().__init__(*arguments)
        self.at = at

    def step(self, progressed: Progressed, rows: list[Row], scratch: Scratch | None = None) -> dict[str, Any]:
        if progressed.step == self.at:
            raise KeyboardInterrupt
        return super().step(progressed, rows, scratch)


def all_blocks(embeddings: torch.Tensor, tokens: int = 0) -> RowSizes:
    """A budget past every document's candidates: all of them are anchors, whatever the row."""
    return RowSizes(tokens, 10_000, 4, embeddings)


def curve_of(trainer: Trainer, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    curve = trainer.run(Scratch(folder)).curve
    return [{key: value for key, value in record.items() if key not in ("seconds", "waited")} for record in curve]


def test_a_run_learns(world: Any, tmp_path: Path) -> None:
    _, interface, folders = world
    curve = curve_of(Trainer(config(epochs=12), tiny_shape(), interface, folders), tmp_path / "a")
    assert sum(record["loss"] for record in curve[-5:]) < 0.8 * sum(record["loss"] for record in curve[:5])
    assert curve[-1]["val_tokens_per_step"] >= 1.0


def test_losses_are_those_of_before(world: Any, tmp_path: Path) -> None:
    """Twenty losses that a change of the arithmetic would move; written anew by ``FOREDRAFT_GOLDEN=write``."""
    _, interface, folders = world
    loss = LossConfig(
        labels="target_argmax", ce=0.4, kl=0.5, tv=0.1, weights="dpace", gamma=4.0, alpha=0.5, equal_blocks=True
    )
    sliding = {"sliding_window": 8, "full_attention_layers": (1,)}
    trainer = Trainer(config(loss=loss, drafter=sliding), tiny_shape(**sliding), interface, folders)
    losses = [record["loss"] for record in curve_of(trainer, tmp_path / "golden")][:20]
    assert len(losses) == 20
    if os.environ.get("FOREDRAFT_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    assert losses == pytest.approx(json.loads(GOLDEN.read_text(encoding="utf-8")), rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "average": 0.9}], ids=["adamw", "muon-average"])
def test_resume_is_exact_from_three_random_steps(world: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Losses and learning rates to the last digit, and the bytes of what is published and of the last checkpoint."""
    _, interface, folders = world
    arguments = (config(**changes), tiny_shape(), interface, folders)
    expected = curve_of(Trainer(*arguments), tmp_path / "whole")
    for at in random.sample(range(1, len(expected)), 3):
        cut = tmp_path / f"cut-{at}"
        with pytest.raises(KeyboardInterrupt):
            curve_of(Stopping(*arguments, at=at), cut)
        assert len(checkpoints(cut)) == (1 if at > 2 else 0)
        assert curve_of(Trainer(*arguments), cut) == expected, at
        for file in (
            WEIGHTS,
            *(f"checkpoint-{len(expected):08d}/{name}.safetensors" for name in ("drafter", "optimizer")),
        ):
            assert (cut / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), (at, file)


def test_a_half_written_checkpoint_is_passed_over(world: Any, tmp_path: Path) -> None:
    _, interface, folders = world
    expected = curve_of(Trainer(config(), tiny_shape(), interface, folders), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        curve_of(Stopping(config(), tiny_shape(), interface, folders, at=7), tmp_path / "cut")
    (tmp_path / "cut" / "checkpoint-00000099.tmp").mkdir()
    (tmp_path / "cut" / "checkpoint-00000099.tmp" / "drafter.safetensors").write_bytes(b"half")
    assert curve_of(Trainer(config(), tiny_shape(), interface, folders), tmp_path / "cut") == expected


@pytest.mark.parametrize("damage", ["cut state", "no state", "cut weights", "changed weights", "no optimizer"])
def test_a_damaged_checkpoint_is_said_and_never_gone_on_from(
    world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """The older one is taken if there is one; else the run says what to delete."""
    _, interface, folders = world
    arguments = (config(validate_every=100), tiny_shape(), interface, folders)
    expected = curve_of(Trainer(*arguments), tmp_path / "whole")
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        curve_of(Stopping(*arguments, at=4), cut)
    shutil.copytree(cut / "checkpoint-00000003", tmp_path / "older")
    with pytest.raises(KeyboardInterrupt):
        curve_of(Stopping(*arguments, at=7), cut)
    (newest,) = checkpoints(cut)
    what, name = damage.split()
    path = newest / {"state": "state.json", "weights": "drafter.safetensors"}.get(name, f"{name}.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if what == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    if what == "no":
        path.unlink()
    with pytest.raises(ValueError, match=f"{newest} is damaged, and there is no other: delete {cut}"):
        Trainer(*arguments).run(Scratch(cut))
    shutil.copytree(tmp_path / "older", cut / "checkpoint-00000003")
    assert curve_of(Trainer(*arguments), cut) == expected
    assert f"{newest} is damaged, and not gone on from" in capsys.readouterr().err


def test_damaged_best_weights_are_found_before_the_run_goes_on(world: Any, tmp_path: Path) -> None:
    _, interface, folders = world
    arguments = (config(), tiny_shape(), interface, folders)
    with pytest.raises(KeyboardInterrupt):
        curve_of(Stopping(*arguments, at=7), tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"half")
    with pytest.raises(ValueError, match=rf"{WEIGHTS} is damaged: delete {tmp_path}"):
        Trainer(*arguments).run(Scratch(tmp_path))


def test_weights_that_are_beyond_repair_are_never_the_best(world: Any, tmp_path: Path) -> None:
    _, interface, folders = world
    trainer = Trainer(config(lr=1e30, max_skipped_steps=1000, warmup=0.0), tiny_shape(), interface, folders)
    with pytest.raises(ValueError, match=r"step 5: the loss on held-out documents is nan.*train.lr = 1e\+30 too high"):
        trainer.run(Scratch(tmp_path))
    assert not (tmp_path / WEIGHTS).exists()


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_sums_pool_whatever_the_batch_and_its_padding(world: Any, weights: str) -> None:
    target, interface, folders = world
    data = FeatureData(folders, "train")
    drafter, head, embeddings = tiny_drafter(), Head.build(interface.lm_head), target.embeddings.weight
    loss = LOSS.model_copy(update={"weights": weights})
    documents = [0, 3, 7]

    def run(indices: list[int], tokens: int = 0) -> Any:
        row = data.row(indices, all_blocks(embeddings, tokens), 0)
        return run_row(drafter, drafter.shape.choice, row, embeddings[5], head, loss)

    together, apart = run(documents, 200), [run([index]) for index in documents]
    torch.testing.assert_close(together.loss, sum(outcome.loss for outcome in apart))
    torch.testing.assert_close(together.weight, sum(outcome.weight for outcome in apart))
    assert together.accepted == sum(outcome.accepted for outcome in apart)
    assert together.blocks == sum(outcome.blocks for outcome in apart)
    assert torch.equal(together.counted, sum(outcome.counted for outcome in apart))


@pytest.mark.parametrize("rows", [[[0], [1], [2, 3]], [[3, 1], [0], [2]]])
def test_a_step_is_the_same_however_its_documents_are_cut_into_rows(world: Any, rows: list[list[int]]) -> None:
    """Logged loss, gradient norm and new weights: one mean over all rows, whatever each weighs."""
    target, interface, folders = world
    data, sizes = FeatureData(folders, "train"), all_blocks(target.embeddings.weight)
    found = []
    for cut in ([[0, 1, 2, 3]], rows):
        drafter = tiny_drafter().requires_grad_()
        learner = Learner(
            config(), drafter, Head.build(interface.lm_head), sizes.embeddings[5], Ranks(torch.device("cpu"))
        )
        step = learner.learn([data.row(documents, sizes, 0) for documents in cut], rate=1e-3)
        found.append((step, drafter.state_dict()))
    (whole, weights), (cut_up, other_weights) = found
    assert (cut_up.blocks, cut_up.accepted) == (whole.blocks, whole.accepted)
    assert cut_up.loss == pytest.approx(whole.loss, rel=1e-5) and cut_up.norm == pytest.approx(whole.norm, rel=1e-4)
    torch.testing.assert_close(other_weights, weights, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("labels", ["target_argmax", "data"])
def test_block_labels_are_those_of_the_whole_sequence(world: Any, labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is scored against what stands, or what the target says, at that place of the full document."""
    target, _, folders = world
    data, indices = FeatureData(folders, "train"), [2, 5]
    embeddings = target.embeddings.weight
    row = data.row(indices, RowSizes(80, 12, 4, embeddings), 0)
    expected = []
    for start, index in zip(row.bounds, indices, strict=False):
        ids = data.document(index).input_ids
        with torch.inference_mode():
            said = target.model(input_ids=ids[None]).logits[0].argmax(-1)
        for n in ((row.blocks.starts == start) & row.blocks.exists).nonzero()[:, 0].tolist():
            anchor = int(row.blocks.anchors[n])
            places = [anchor + k for k in range(4) if row.blocks.counted[n, k]]
            expected += [int(ids[place] if labels == "data" else said[place - 1]) for place in places]
    asked: list[int] = []

    def recording(hidden: Any, head: Any, answers: Any, *rest: Any) -> Any:
        asked.extend(answers.labels.tolist())
        return slot_losses(hidden, head, answers, *rest)

    monkeypatch.setattr("foredraft.training.objective.slot_losses", recording)
    head = Head.build(target.head.weight)
    run_row(tiny_drafter(), tiny_shape().choice, row, embeddings[5], head, LOSS.model_copy(update={"labels": labels}))
    assert asked[: len(expected)] == expected
    assert len(expected) == row.count == int(row.blocks.counted.sum())


def test_the_reduced_head_asks_for_every_label(world: Any) -> None:
    _, interface, folders = world
    data = FeatureData(folders, "train")
    head = Head.build(interface.lm_head, data.answer_ids())
    row = data.row(list(range(len(data))), all_blocks(interface.embed_tokens), 0)
    assert bool((head.row_of[row.topk_ids[:, 0]] >= 0).all()) and bool((head.row_of[row.data_ids] >= 0).all())


def test_rows_are_packed_within_the_budget() -> None:
    lengths = [30, 70, 50, 20, 45, 120, 5]
    rows = pack(lengths, 100)
    assert sorted(i for row in rows for i in row) == list(range(7))
    assert [sum(lengths[i] for i in row) for row in rows] == [120, 100, 100, 20]


def test_an_epoch_holds_every_document_once_and_is_its_seeds(world: Any) -> None:
    data = FeatureData(world[2], "train")
    steps = data.epoch(1, 0, 100)
    assert sorted(i for step in steps for i in step) == list(range(len(data)))
    assert all(sum(data.lengths[i] for i in step) <= 100 for step in steps)
    assert steps == data.epoch(1, 0, 100) != data.epoch(1, 1, 100)


@pytest.mark.parametrize(
    ("mask", "message"), [(64, "has 64 embedding rows"), (1, "end-of-turn or padding"), (7, "occurs in the data")]
)
def test_a_mask_token_that_means_something_is_refused(world: Any, mask: int, message: str) -> None:
    _, interface, folders = world
    with pytest.raises(ValueError, match=f"mask_token_id = {mask}: .*{message}"):
        Trainer(config(drafter={"mask_token_id": mask}), tiny_shape(), interface, folders)


@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_non_finite_steps_are_skipped_then_stop_the_run_by_document(world: Any, tmp_path: Path, weights: str) -> None:
    _, interface, folders = world
    trainer = Trainer(config(loss=LOSS.model_copy(update={"weights": weights})), tiny_shape(), interface, folders)
    trainer.learner.mask = torch.full_like(trainer.learner.mask, float("nan"))
    before = {name: tensor.clone() for name, tensor in trainer.learner.drafter.state_dict().items()}
    with pytest.raises(
        ValueError,
        match=r"step 2: loss nan.*first in fc.weight; 2 steps skipped; documents code/train-00",
    ):
        trainer.run(Scratch(tmp_path))
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.learner.drafter.state_dict().items())


def test_a_row_without_a_block_changes_nothing(world: Any, tmp_path: Path) -> None:
    """Documents that are too short, or whose answer is one token, and a step of nothing but such."""
    target, interface, folders = world
    learner = Trainer(config(), tiny_shape(), interface, folders).learner
    data = FeatureData(folders, "train")
    document = data.document(0)
    barely = torch.zeros_like(document.loss_mask)
    barely[-1] = True
    data.document = lambda _index: replace(document, loss_mask=barely, topk_ids=document.topk_ids[:1])  # type: ignore[method-assign]
    row = data.row([0], all_blocks(target.embeddings.weight), 0)
    assert row.count == 0 and not row.blocks.exists.any()
    before = {name: tensor.clone() for name, tensor in learner.drafter.state_dict().items()}
    step = learner.learn([row], 1e-2)
    assert (step.loss, step.blocks, step.culprit) == (0.0, 0, None)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.drafter.state_dict().items())


def test_a_skipped_step_can_be_run_again(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, interface, folders = world
    trainer = Trainer(config(), tiny_shape(), interface, folders)
    (row,) = trainer.rows_of(0)
    row.stored[3, 1, 2] = float("inf")
    trainer.step(Progressed(), [row], Scratch(tmp_path))
    monkeypatch.setattr("foredraft.training.replay.read_interface", lambda _folder: interface)
    result = CliRunner().invoke(replay, [str(tmp_path / "not-finite-00000001-0")], catch_exceptions=False)
    assert result.output.startswith(f"row 0: {', '.join(row.names)}")
    assert f"states: 1 of {row.target_hidden.numel()} not finite; embeddings: finite" in result.output
    assert "gradient of fc.weight:" in result.output


def test_sigterm_keeps_what_is_done(world: Any, tmp_path: Path) -> None:
    _, interface, folders = world
    expected = curve_of(Trainer(config(), tiny_shape(), interface, folders), tmp_path / "whole")

    class Told(Trainer):
        def step(self, progressed: Progressed, rows: list[Row], scratch: Scratch | None = None) -> dict[str, Any]:
            if progressed.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().step(progressed, rows, scratch)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match=rf"told to stop at step 5 of {len(expected)}, which is kept: run it again"):
        curve_of(Told(config(), tiny_shape(), interface, folders), tmp_path / "cut")
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = Trainer(config(), tiny_shape(), interface, folders)
    assert curve_of(resumed, tmp_path / "cut") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 101}, "mask_token_id = 100, this run has 101"),
        ({"block_size": 8}, "block_size = 4, this run has 8"),
        ({"target_layer_ids": [0, 1]}, r"target_layer_ids = \[0, 2\], this run has \[0, 1\]"),
        ({"data": {"code": "b"}}, "data = {'code': 'a'}, this run has {'code': 'b'}"),
        ({"target": "hf:b/b@2"}, "target = 'hf:a/a@1', this run has 'hf:b/b@2'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    world: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    _, interface, folders = world
    identity = {
        "mask_token_id": 100,
        "block_size": 4,
        "target_layer_ids": [0, 2],
        "target": "hf:a/a@1",
        "data": {"code": "a"},
    }
    with pytest.raises(KeyboardInterrupt):
        curve_of(Stopping(config(), tiny_shape(), interface, folders, identity, at=7), tmp_path / "cut")
    with pytest.raises(ValueError, match=message):
        Trainer(config(), tiny_shape(), interface, folders, identity | change).run(Scratch(tmp_path / "cut"))


def test_a_warm_start_takes_a_published_drafter_of_the_same_shape(world: Any, tmp_path: Path) -> None:
    _, interface, folders = world
    published = tiny_drafter(seed=5)
    write_zlab(tmp_path / "z", published.shape, as_stored(published.state_dict()), {"format": "pt"})
    start = config(start=str(tmp_path / "z"))
    state = Trainer(start, tiny_shape(), interface, folders).learner.drafter.state_dict()
    for name, tensor in published.state_dict().items():
        assert torch.equal(state[name], tensor.bfloat16().float())
    with pytest.raises(ValueError, match=r"train.start = .*z: its ffn_size is 32, this run's 24"):
        Trainer(start, tiny_shape(ffn_size=24), interface, folders)


def test_repeated_tails_are_weighed_or_cut(world: Any) -> None:
    target, _, folders = world
    data = FeatureData(folders, "train")
    document = data.document(0)
    looping = replace(document, input_ids=torch.cat([document.input_ids[:-6], torch.tensor([9, 8, 9, 8, 9, 8])]))
    assert repeated(document).sum() == 0
    assert repeated(looping).nonzero()[:, 0].tolist() == list(
        range(len(document.input_ids) - 4, len(document.input_ids))
    )
    data.document = lambda _index: looping  # type: ignore[method-assign]
    rows = {
        weight: data.row([0], RowSizes(0, 10_000, 4, target.embeddings.weight, weight), 0) for weight in (1.0, 0.5, 0.0)
    }
    assert rows[1.0].worth.unique().tolist() == [1.0] and rows[0.5].worth.unique().tolist() == [0.5, 1.0]
    assert rows[0.5].count == rows[1.0].count and rows[0.0].count < rows[1.0].count
    end = len(document.input_ids) - 4
    places = (rows[0.0].blocks.positions + 0)[rows[0.0].blocks.counted]
    assert int(places.max()) == end - 1
    outcomes = {
        weight: run_row(
            tiny_drafter(), tiny_shape().choice, row, target.embeddings.weight[5], Head.build(target.head.weight), LOSS
        )
        for weight, row in rows.items()
    }
    assert outcomes[0.0].weight < outcomes[0.5].weight < outcomes[1.0].weight


def test_zero_states_are_refused_by_shard_and_document(world: Any, tmp_path: Path) -> None:
    target, _, _ = world
    folder = make_features(tmp_path / "code", target)
    from safetensors.torch import load_file, save_file

    path = folder / "train-00000.safetensors"
    tensors = load_file(path)
    tensors["target_hidden"][: int(tensors["offsets"][1])] = 0
    save_file(tensors, path)
    with pytest.raises(ArtifactError, match="train-00000.safetensors: document 0 has zero or non-finite states"):
        FeatureData({"code": folder}, "train").document(0)


def test_a_start_from_the_target_copies_its_last_layers(world: Any) -> None:
    target, interface, folders = world
    trainer = Trainer(config(start="target"), tiny_shape(), interface, folders)
    state = trainer.learner.drafter.state_dict()
    for index, source in enumerate((2, 3)):
        for name, tensor in target.blocks[source].state_dict().items():
            assert torch.equal(state[f"layers.{index}.{name}"], tensor)
    features = torch.randn(3, 2 * 16)
    assert torch.equal(features @ state["fc.weight"].T, features[:, 16:])
    with pytest.raises(ValueError, match="needs 3 kept layers, data/target has 2"):
        Trainer(config(start="target", drafter={"num_layers": 3}), tiny_shape(num_layers=3), interface, folders)
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight is \(32, 16\), the drafter's \(24, 16\)"):
        Trainer(config(start="target", drafter={"ffn_size": 24}), tiny_shape(ffn_size=24), interface, folders)


def test_a_drafter_trained_on_a_hybrid_is_lossless_on_it(tmp_path: Path) -> None:
    target = FrozenTarget(tiny_hybrid(), TAPS)
    folders = {"code": make_features(tmp_path / "code", target)}
    trainer = Trainer(config(epochs=12), tiny_shape(), make_interface(target), folders)
    curve = curve_of(trainer, tmp_path / "scratch")
    assert curve[-1]["loss"] < curve[0]["loss"]
    drafter = trainer.learner.drafter.eval().requires_grad_(False)
    accepted = 0
    for index in range(4):
        prompt = FeatureData(folders, "validation").document(index).input_ids[:8].tolist()
        (reference,) = greedy_answers(target.model, [prompt], 24, [1])
        (trace,) = decode(open_session(target), DFlashProposer(drafter, target), [prompt], 24, [1])
        assert trace.tokens == reference
        accepted += sum(step[1] for step in trace.steps)
    assert accepted > 0, "a trained drafter must have drafts accepted, or nothing was rolled back and kept"


def test_schedules_warm_up_and_end_low() -> None:
    for schedule in ("cosine", "linear", "wsd"):
        rates = [learning_rate(config(schedule=schedule), step, 100) for step in range(100)]
        assert rates[:10] == sorted(rates[:10])
        assert math.isclose(max(rates), config().lr)
        assert rates[-1] < 0.06 * config().lr
        assert rates[20:] == sorted(rates[20:], reverse=True)


@pytest.mark.parametrize("tracker", [None, "tensorboard"])
def test_curves_of_a_run_that_went_on_are_those_of_one_that_never_stopped(
    world: Any, tmp_path: Path, tracker: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVCLive's files to the byte; TensorBoard's points once each, though steps behind the checkpoint were told twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    _, interface, folders = world
    arguments = (config(tracker=tracker), tiny_shape(), interface, folders)

    class Live(Stopping):
        def __init__(self, name: str, at: int = 10**6):
            super().__init__(*arguments, at=at)
            self.live = tmp_path / name

    curve = Live("whole").run(Scratch(new(tmp_path / "a"))).curve
    with pytest.raises(KeyboardInterrupt):
        Live("cut", at=11).run(Scratch(new(tmp_path / "b")))
    Live("cut").run(Scratch(tmp_path / "b"))
    files = {path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert {Path(f"plots/metrics/{name}.tsv") for name in ("loss", "lr", "val_tokens_per_step")} < files
    for file in files:
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
    losses = pd.read_csv(tmp_path / "cut/plots/metrics/loss.tsv", sep="\t")
    assert losses["loss"].tolist() == [record["loss"] for record in curve]
    if tracker:
        events = EventAccumulator(str(tmp_path / "b/tensorboard"))
        events.Reload()
        told = [(event.step, event.value) for event in events.Scalars("train/loss")]
        assert told == [(record["step"], pytest.approx(record["loss"], rel=1e-6)) for record in curve]


def test_a_tracker_that_is_not_installed_is_refused_before_the_work(world: Any) -> None:
    _, interface, folders = world
    with pytest.raises(ValueError, match="train.tracker = wandb: that package is not here: pip install wandb"):
        Trainer(config(tracker="wandb"), tiny_shape(), interface, folders)


def new(folder: Path) -> Path:
    folder.mkdir()
    return folder
