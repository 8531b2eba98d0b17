import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from foredraft.artifacts import ArtifactError, Manifest, open_artifact, publish, require_same_contract
from foredraft.scratch import Scratch, open_scratch


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    out = tmp_path / "features"
    with publish(out, Manifest("features", contract={"taps": [1]}, counts={"rows_in": 2, "rows_out": 2})) as folder:
        (folder / "a.bin").write_bytes(b"a" * 100)
        (folder / "b.bin").write_bytes(b"b" * 100)
    return out


def test_a_published_folder_opens(artifact: Path) -> None:
    manifest = open_artifact(artifact, "features", "rerun")
    assert sorted(manifest.files) == ["a.bin", "b.bin"]
    assert manifest.counts["rows_out"] == 2


def test_a_failed_writer_leaves_what_was_there(artifact: Path) -> None:
    with pytest.raises(RuntimeError), publish(artifact, Manifest("features")) as folder:
        (folder / "c.bin").write_bytes(b"c")
        raise RuntimeError
    assert sorted(open_artifact(artifact, "features", "rerun").files) == ["a.bin", "b.bin"]
    assert [path.name for path in artifact.parent.iterdir()] == ["features"]


def test_equal_content_gives_an_equal_manifest(artifact: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    with publish(again, Manifest("features", contract={"taps": [1]}, counts={"rows_in": 2, "rows_out": 2})) as folder:
        (folder / "b.bin").write_bytes(b"b" * 100)
        (folder / "a.bin").write_bytes(b"a" * 100)
    assert (again / "manifest.json").read_bytes() == (artifact / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "a.bin").write_bytes(b"a" * 90), r"a.bin: expected 100 bytes, found 90.*dvc repro x"),
        (lambda folder: (folder / "a.bin").write_bytes(b"a" * 116), r"a.bin: expected 100 bytes, found 116"),
        (lambda folder: (folder / "b.bin").unlink(), r"b.bin: file is missing.*partly pulled"),
        (lambda folder: (folder / "a.bin").write_bytes(b"x" * 100), r"a.bin: expected sha256 \w+, found"),
        (lambda folder: (folder / "manifest.json").unlink(), r"has no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), r"not a manifest"),
        (lambda folder: edit_manifest(folder), r"fingerprint \w+ does not match"),
    ],
)
def test_a_damaged_artifact_is_refused_by_name(artifact: Path, harm: object, message: str) -> None:
    harm(artifact)  # type: ignore[operator]
    with pytest.raises(ArtifactError, match=message):
        open_artifact(artifact, "features", "dvc repro x")


def edit_manifest(folder: Path) -> None:
    body = json.loads((folder / "manifest.json").read_text())
    body["counts"]["rows_out"] = 3
    (folder / "manifest.json").write_text(json.dumps(body))


def test_another_kind_and_an_absent_folder_are_refused(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected tokens version 1, found features version 1"):
        open_artifact(artifact, "tokens", "rerun")
    with pytest.raises(ArtifactError, match="does not exist"):
        open_artifact(tmp_path / "none", "tokens", "rerun")


def test_contracts_are_compared_on_shared_keys() -> None:
    require_same_contract({"taps": [1], "mine": 1}, {"taps": [1], "theirs": 2}, Path("f"), "x")
    with pytest.raises(ArtifactError, match=r"expected taps = \[1\], found \[2\]"):
        require_same_contract({"taps": [1]}, {"taps": [2]}, Path("f"), "x")


def hold(entered: object, leave: object) -> None:
    with open_scratch("extract-code", "k" * 64):
        entered.set()  # type: ignore[attr-defined]
        leave.wait(60)  # type: ignore[attr-defined]


def test_a_second_writer_is_refused_and_a_killed_one_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    other = context.Process(target=hold, args=(entered, leave))
    other.start()
    assert entered.wait(60)
    with pytest.raises(ValueError, match="being written by another process"), open_scratch("extract-code", "k" * 64):
        pass
    other.kill()
    other.join()
    with open_scratch("extract-code", "k" * 64) as scratch:
        assert not scratch.has("shard")


def test_scratch_keeps_finished_work_and_drops_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path / "scratch"))

    def half_written(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_scratch("train", "a" * 64) as scratch:
        scratch.write("one", lambda path: path.write_bytes(b"1"))  # type: ignore[arg-type,return-value]
        scratch.write("two", half_written)
    with open_scratch("train", "a" * 64) as scratch:
        assert (scratch.has("one"), scratch.has("two")) == (True, False)
        assert {path.name for path in scratch.path.iterdir()} == {"one", "one.seal"}
        publish_twice(scratch, tmp_path / "out")
    with open_scratch("train", "b" * 64) as scratch:
        assert not scratch.has("one")


def publish_twice(scratch: Scratch, out: Path) -> None:
    for _ in range(2):
        scratch.publish(out, Manifest("drafter"), ["one"])
        assert (out / "one").read_bytes() == b"1"
        assert scratch.has("one")


@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b"2"), lambda path: path.write_bytes(b"")])
def test_finished_work_that_was_changed_in_place_is_neither_taken_up_nor_published(tmp_path: Path, harm: Any) -> None:
    """What is published is a hard link: damage to the one is damage to the other."""
    scratch = Scratch(tmp_path)
    scratch.write("shard", lambda path: path.write_bytes(b"1"))
    scratch.publish(tmp_path / "out", Manifest("features"), ["shard"])
    harm(tmp_path / "out" / "shard")
    assert not scratch.has("shard")
    with pytest.raises(ValueError, match="shard: changed after it was finished; run make gc-scratch"):
        scratch.publish(tmp_path / "again", Manifest("features"), ["shard"])
    assert not (tmp_path / "again").exists()
    scratch.write("shard", lambda path: path.write_bytes(b"1"))
    scratch.publish(tmp_path / "again", Manifest("features"), ["shard"])
    assert (tmp_path / "again" / "shard").read_bytes() == b"1"
