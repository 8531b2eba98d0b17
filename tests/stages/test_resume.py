"""A stage that is killed goes on where it was, and ends in the same bytes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from tests.workspace import Workspace

pytestmark = pytest.mark.slow


def kill_when(workspace: Workspace, arguments: list[str], scratch: Path, pattern: str) -> None:
    """Start a stage with an empty scratch and SIGKILL it as soon as a file like ``pattern`` is in it."""
    environment = {**os.environ, "PYTHONPATH": str(workspace.path / "src"), "FOREDRAFT_SCRATCH": str(scratch)}
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=workspace.path, env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not list(scratch.glob(pattern)):
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def fresh_scratch(smoke: Workspace, tmp_path: Path) -> Path:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for shared in ("wheels", "targets"):
        (scratch / shared).symlink_to(smoke.scratch / shared)
    return scratch


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_extraction_loses_at_most_the_shard_in_flight(smoke: Workspace, fresh_scratch: Path, tmp_path: Path) -> None:
    out = tmp_path / "features"
    arguments = ["stages.extract", "code", "--tokens", "data/tokens/code", "--target", "data/target", "--out", str(out)]
    arguments += ["--metrics", str(tmp_path / "extract.json")]
    kill_when(smoke, arguments, fresh_scratch, "extract-code/*/train-*.safetensors")
    assert not out.exists()
    (finished,) = fresh_scratch.glob("extract-code/*/train-00000.safetensors")
    written = finished.stat().st_mtime_ns
    smoke.run("python", "-m", *arguments, FOREDRAFT_SCRATCH=str(fresh_scratch))
    assert finished.stat().st_mtime_ns == written
    assert files_of(out) == files_of(smoke.path / "data/features/code")


def test_training_ends_in_the_same_weights(smoke: Workspace, fresh_scratch: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    places = ["--features", "data/features", "--target", "data/target", "--out", str(out)]
    files = ["--metrics", str(tmp_path / "train.json"), "--curve", str(tmp_path / "train.csv")]
    arguments = ["stages.train", *places, *files]
    kill_when(smoke, arguments, fresh_scratch, "train/*/checkpoint-*[0-9]")
    assert not out.exists()
    step = max(int(path.name.split("-")[1]) for path in fresh_scratch.glob("train/*/checkpoint-*[0-9]"))
    output = smoke.run("python", "-m", *arguments, FOREDRAFT_SCRATCH=str(fresh_scratch))
    assert f"| {step}/" in output, "the bar starts where the checkpoint was"
    assert files_of(out) == files_of(smoke.path / "data/drafter")


def test_a_second_writer_is_refused(smoke: Workspace, fresh_scratch: Path, tmp_path: Path) -> None:
    metrics = ["--metrics", str(tmp_path / "extract.json")]
    extract = ["stages.extract", "code", "--tokens", "data/tokens/code", "--target", "data/target", *metrics, "--out"]
    kill_when(smoke, [*extract, str(tmp_path / "b")], fresh_scratch, "extract-code/*.lock")
    (lock,) = fresh_scratch.glob("extract-code/*.lock")
    with FileLock(lock):
        output = smoke.run(
            "python", "-m", *extract, str(tmp_path / "c"), FOREDRAFT_SCRATCH=str(fresh_scratch), fails=True
        )
    assert "is being written by another process" in output
    assert not (tmp_path / "c").exists()
