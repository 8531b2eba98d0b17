"""Several processes train the drafter that one would: sharded or not, whatever of a step is left for whom."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foredraft.launch import launch, place
from foredraft.scratch import Scratch
from foredraft.target.interface import read_interface
from foredraft.training.checkpoint import Progressed, checkpoints, load_checkpoint
from foredraft.training.ranks import Ranks
from foredraft.training.stage import Job, train_launched_share, train_share
from foredraft.training.trainer import WEIGHTS, Trainer
from tests.builders import keep_interface, make_features, make_interface, tiny_frozen
from tests.conftest import ROOT, tiny_shape
from tests.unit.test_training import config

ROWS = {"tokens_per_step": 300, "epochs": 4, "checkpoint_every": 2}
"""Three rows a step: two processes have two and one, and a stand-in; validation has an odd number too."""


@pytest.fixture(scope="module")
def job_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, target = tmp_path_factory.mktemp("ranks"), tiny_frozen()
    make_features(folder / "code", target)
    keep_interface(make_interface(target), folder / "target")
    return folder


def job(folder: Path, scratch: Path, **changes: Any) -> Job:
    scratch.mkdir(exist_ok=True)
    return Job(
        config(**ROWS | changes), tiny_shape(), {"code": folder / "code"}, folder / "target", {}, scratch, None, 1
    )


def trained(job: Job, processes: int) -> tuple[Progressed, dict[str, dict[str, torch.Tensor]]]:
    if processes == 1:
        train_share(job, Ranks(torch.device("cpu")))
    else:
        launch(train_launched_share, job, "train", job.scratch, processes)
    return load_checkpoint(job.scratch, {})


@pytest.mark.parametrize(
    "changes",
    [{}, {"average": 0.9, "parallel": "fsdp"}, {"optimizer": "muon", "average": 0.9}],
    ids=["ddp", "fsdp-average", "muon-average"],
)
def test_two_processes_train_the_drafter_of_one(job_folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    (one, alone), (two, together) = (
        trained(job(job_folder, tmp_path / str(processes), **changes), processes) for processes in (1, 2)
    )
    assert len(one.curve) == len(two.curve) > 3
    for mine, theirs in zip(one.curve, two.curve, strict=True):
        assert mine["anchors"] == theirs["anchors"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-4)
    assert one.validation["blocks"] == two.validation["blocks"]
    assert one.validation["loss"] == pytest.approx(two.validation["loss"], rel=1e-4)
    assert alone.keys() == together.keys()
    near = {"rtol": 1e-3, "atol": 1e-3 if changes.get("optimizer") == "muon" else 1e-5}  # Muon rounds to bfloat16
    for file, tensors in alone.items():
        assert tensors.keys() == together[file].keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(together[file][name], tensor, **near, msg=f"{file} {name}")
    best = [load_file(tmp_path / f"{n}/{WEIGHTS}") for n in (1, 2)]
    torch.testing.assert_close(*best, **near)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_two_began_one_ends(job_folder: Path, tmp_path: Path, parallel: str) -> None:
    """A checkpoint knows nothing of how many made it; as many again go on exactly."""
    whole = trained(job(job_folder, tmp_path / "whole", parallel=parallel), 2)
    for processes in (1, 2):
        half = job(job_folder, tmp_path / f"half-{processes}", parallel=parallel)
        launch(stop_after_two_checkpoints, half, "train", half.scratch, 2)
        assert [path.name for path in checkpoints(half.scratch)] == ["checkpoint-00000005"]  # of the best so far
        progressed, state = trained(half, processes)
        assert [record["step"] for record in progressed.curve] == [record["step"] for record in whole[0].curve]
        for name, tensor in state["drafter"].items():
            exact = {"rtol": 0.0, "atol": 0.0} if processes == 2 else {"rtol": 1e-3, "atol": 1e-5}
            torch.testing.assert_close(tensor, whole[1]["drafter"][name], **exact)


class Halting(Trainer):
    """Ends without a word, like a killed process, but in all processes alike."""

    def step(self, progressed: Progressed, *rest: Any) -> dict[str, Any]:
        if progressed.step == 5:
            raise KeyboardInterrupt
        return super().step(progressed, *rest)


def stop_after_two_checkpoints(job: Job) -> None:
    torch.set_num_threads(1)
    rank, world, _ = place()
    torch.distributed.init_process_group("gloo")
    ranks = Ranks(torch.device("cpu"), rank, world)
    trainer = Halting(job.config, job.shape, read_interface(job.target), job.features, job.identity, ranks)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(Scratch(job.scratch))
    torch.distributed.destroy_process_group()


class Declining(Trainer):
    """Whose first validation is its best, so that nothing is kept after the others."""

    validations = 0

    def validate(self) -> dict[str, Any]:
        self.validations += 1
        return super().validate() | {"tokens_per_step": 9.0 - self.validations}


def decline(job: Job) -> None:
    torch.set_num_threads(1)
    rank, world, _ = place()
    torch.distributed.init_process_group("gloo")
    ranks = Ranks(torch.device("cpu"), rank, world)
    Declining(job.config, job.shape, read_interface(job.target), job.features, job.identity, ranks).run(
        Scratch(job.scratch)
    )
    torch.distributed.destroy_process_group()


def test_a_sharded_run_goes_on_with_its_weights_and_not_with_their_average(job_folder: Path, tmp_path: Path) -> None:
    changes = {"average": 0.9, "parallel": "fsdp", "validate_every": 1, "checkpoint_every": 100}
    one, two = (job(job_folder, tmp_path / name, **changes) for name in ("one", "two"))
    Declining(one.config, one.shape, read_interface(one.target), one.features).run(Scratch(one.scratch))
    launch(decline, two, "train", two.scratch, 2)
    losses = [[r["loss"] for r in load_checkpoint(each.scratch, {})[0].curve] for each in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def die_once(victim: int, work: Job) -> None:
    """One of the processes is killed in its third step, and none when they are started again."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and place()[0] == victim:
        step = Trainer.step

        def killed(self: Trainer, progressed: Progressed, *rest: Any) -> dict[str, Any]:
            if progressed.step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, progressed, *rest)

        Trainer.step = killed  # type: ignore[method-assign]
    train_launched_share(work)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_died_is_started_again_with_the_other(job_folder: Path, tmp_path: Path, victim: int) -> None:
    expected, state = trained(job(job_folder, tmp_path / "whole"), 2)
    cut = job(job_folder, tmp_path / "cut")
    launch(partial(die_once, victim), cut, "train", cut.scratch, 2, restarts=1)
    found, again = load_checkpoint(cut.scratch, {})
    assert found.step == expected.step and found.best == expected.best
    for name, tensor in state["drafter"].items():
        assert torch.equal(again["drafter"][name], tensor), name


def test_what_is_refused_is_told_once(job_folder: Path, tmp_path: Path) -> None:
    refused = job(job_folder, tmp_path / "refused", drafter={"mask_token_id": 1})
    with pytest.raises(ValueError, match="mask_token_id = 1: that is the target's end-of-turn") as caught:
        launch(train_launched_share, refused, "train", refused.scratch, 2, restarts=3)
    assert "\n" not in str(caught.value)


def test_two_processes_that_are_told_to_stop_keep_what_is_done(job_folder: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "stopped"
    code = (
        "import sys; from pathlib import Path; from foredraft.launch import launch\n"
        "from tests.unit.test_ranks import job; from foredraft.training.stage import train_launched_share\n"
        "if __name__ == '__main__':\n"
        "    work = job(Path(sys.argv[1]), Path(sys.argv[2]), epochs=2000, checkpoint_every=10**6, validate_every=10**6)\n"
        "    try: launch(train_launched_share, work, 'train', work.scratch, 2)\n"
        "    except ValueError as error: print(error); raise SystemExit(1)\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "FOREDRAFT_SCRATCH": str(tmp_path / "s")}
    command = [sys.executable, str(script), str(job_folder), str(scratch)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    beat = tmp_path / "s/heartbeat/train-1.json"
    deadline = time.monotonic() + 120
    while not (beat.is_file() and '"done": 0' not in beat.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "told to stop at step" in told
    progressed, state = load_checkpoint(scratch, {})
    assert progressed.step == len(progressed.curve) > 0
    assert state["drafter"].keys() == load_file(checkpoints(scratch)[0] / "drafter.safetensors").keys()
