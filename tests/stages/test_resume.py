"""A stage that is killed goes on where it was, and ends in the same bytes."""

import json
import os
import signal
import socket
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


def extract_code(out: Path, metrics: Path) -> list[str]:
    """The command of ``extract@code`` with an output of its own."""
    inputs = ["--tokens", "data/tokens/code", "--target", "data/target"]
    return ["stages.extract", "code", *inputs, "--out", str(out), "--metrics", str(metrics)]


def test_a_process_that_dies_is_started_again_and_its_shard_made_anew(
    smoke: Workspace, fresh_scratch: Path, tmp_path: Path
) -> None:
    out = tmp_path / "features"
    environment = {
        **os.environ,
        "PYTHONPATH": str(smoke.path / "src"),
        "FOREDRAFT_SCRATCH": str(fresh_scratch),
        "FOREDRAFT_PROCESSES": "2",
    }
    command = [sys.executable, "-m", *extract_code(out, tmp_path / "extract.json")]
    process = subprocess.Popen(command, cwd=smoke.path, env=environment, stderr=subprocess.PIPE, text=True)
    heartbeat = fresh_scratch / "heartbeat/extract-code-1.json"
    deadline = time.monotonic() + 300
    while not heartbeat.exists():
        assert process.poll() is None, "ended before a process could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed = json.loads(heartbeat.read_text())["pid"]
    os.kill(killed, signal.SIGKILL)
    _, told = process.communicate()
    assert process.returncode == 0, told[-3000:]
    beats = [json.loads(path.read_text()) for path in heartbeat.parent.glob("extract-code-*.json")]
    assert {beat["stage"] for beat in beats} == {"extract-code-0", "extract-code-1"}
    assert all(beat["state"] == "done" and beat["pid"] != killed for beat in beats)
    assert files_of(out) == files_of(smoke.path / "data/features/code")


def test_two_machines_share_the_work_and_one_publishes(smoke: Workspace, fresh_scratch: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(smoke.path / "src"),
        "FOREDRAFT_SCRATCH": str(fresh_scratch),
        "FOREDRAFT_NODES": "2",
        "FOREDRAFT_RENDEZVOUS": f"localhost:{port}",
    }
    commands = [
        [sys.executable, "-m", *extract_code(tmp_path / name, tmp_path / f"{name}.json"), *flags]
        for name, flags in (("first", []), ("second", ["--join"]))
    ]
    machines = [
        subprocess.Popen(command, cwd=smoke.path, env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for machine in machines:
        _, told = machine.communicate(timeout=300)
        assert machine.returncode == 0, told[-3000:]
    assert files_of(tmp_path / "first") == files_of(smoke.path / "data/features/code")
    assert not (tmp_path / "second").exists()
    assert not (tmp_path / "second.json").exists()
    alone = smoke.run("python", "-m", *extract_code(tmp_path / "third", tmp_path / "third.json"), "--join", fails=True)
    assert "--join helps another machine: set FOREDRAFT_NODES and FOREDRAFT_RENDEZVOUS as there" in alone


def test_a_shard_that_another_process_holds_is_not_published_without(
    smoke: Workspace, fresh_scratch: Path, tmp_path: Path
) -> None:
    command = extract_code(tmp_path / "out", tmp_path / "extract.json")
    kill_when(smoke, command, fresh_scratch, "extract-code/*.lock")
    (lock,) = fresh_scratch.glob("extract-code/*.lock")
    with FileLock(lock.with_suffix("") / "train-00000.safetensors.claim"):
        output = smoke.run("python", "-m", *command, FOREDRAFT_SCRATCH=str(fresh_scratch), fails=True)
    assert "train-00000.safetensors is being made by another process: run it again" in output
    assert not (tmp_path / "out").exists()


def test_work_under_other_params_is_never_taken_up(smoke: Workspace, fresh_scratch: Path, tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    params.write_text((smoke.path / "params.yaml").read_text().replace("storage: bfloat16", "storage: float8_e4m3fn"))
    for name, flags in (("bfloat16", []), ("float8", ["--params", str(params)])):
        command = ["python", "-m", *extract_code(tmp_path / name, tmp_path / f"{name}.json"), *flags]
        smoke.run(*command, FOREDRAFT_SCRATCH=str(fresh_scratch))
    assert len(list(fresh_scratch.glob("extract-code/*/train-00000.safetensors"))) == 2
    sizes = [sum(len(content) for content in files_of(tmp_path / name).values()) for name in ("float8", "bfloat16")]
    assert sizes[0] < 0.6 * sizes[1]
    manifest = json.loads((tmp_path / "float8/manifest.json").read_text())
    assert manifest["contract"]["feature_storage"] == "float8_e4m3fn"


def test_training_ends_in_the_same_weights(smoke: Workspace, fresh_scratch: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    places = ["--features", "data/features", "--target", "data/target", "--out", str(out)]
    files = ["--metrics", str(tmp_path / "train.json"), "--live", str(tmp_path / "train")]
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
