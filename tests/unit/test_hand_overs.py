"""What a stage looks at before it works: names, places, contracts, and the tensors it was given."""

import os
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from foredraft.artifacts import ArtifactError, Manifest, publish
from foredraft.command import folder_option, stage_command
from foredraft.features.engine import check_target, check_tokens
from foredraft.launch import launch
from foredraft.scratch import Scratch
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.tokens.shards import pack, read_shard
from tests.builders import tiny_frozen
from tests.conftest import HIDDEN, VOCABULARY

TARGET = TargetConfig(uri="file:target", dtype="bfloat16", thinking=False, kept_layers=1)


@stage_command("probe")
@click.argument("source")
@folder_option("--out", "Artefact to write.")
@folder_option("--metrics", "File to write.")
def probe(params: Path, source: str, out: Path, metrics: Path) -> None:
    """Publish nothing, or meet what the system refuses."""
    if source == "full":
        raise OSError(28, "No space left on device", str(out))
    with publish(out, Manifest("probe")) as folder:
        (folder / "file").write_text("x")


def run(tmp_path: Path, source: str = "code", out: str = "out", metrics: str = "m.json") -> str:
    result = CliRunner().invoke(probe, [source, "--out", str(tmp_path / out), "--metrics", str(tmp_path / metrics)])
    assert "Traceback" not in result.output and (result.exit_code == 0) == (result.output == "")
    return result.output.strip()


def test_what_no_stage_wrote_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/me.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    assert "it was not written by a stage" in run(tmp_path, out="precious")
    assert "found a file or a link" in run(tmp_path, out="file")
    assert "found a file or a link" in run(tmp_path, out="link")
    assert (tmp_path / "precious/me.txt").read_text() == (tmp_path / "file").read_text() == "keep"
    assert run(tmp_path) == "" == run(tmp_path), "an artefact of ours is replaced"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "out", "precious"]


def test_names_and_places_are_looked_at_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    assert "'../x' is no name of a source" in run(tmp_path, source="../x")
    assert "is a folder, and a file is to be written there" in run(tmp_path, metrics="folder")
    os.mkfifo(tmp_path / "pipe")
    assert "is no file, and one is to be written there" in run(tmp_path, metrics="pipe")
    assert "file is a file" in run(tmp_path, metrics="file/m.json")
    assert not (tmp_path / "out").exists()


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    line = run(tmp_path, source="full")
    assert line.startswith("Error: probe-full: [Errno 28] No space left on device") and len(line.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uri": "file:other"}, "expected target = 'file:other', found 'file:target'"),
        ({"dtype": "float32"}, "expected target_dtype = 'float32', found 'bfloat16'"),
        ({"thinking": True}, "expected thinking = True, found False"),
    ],
)
def test_an_interface_of_another_target_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    contract = {"target": "file:target", "target_dtype": "bfloat16", "thinking": False}
    with publish(tmp_path / "target", Manifest("target", contract=contract)):
        pass
    assert open_interface(tmp_path / "target", TARGET).contract == contract
    with pytest.raises(ArtifactError, match=message):
        open_interface(tmp_path / "target", TARGET.model_copy(update=change))


def test_a_checkpoint_of_another_shape_is_refused() -> None:
    facts = {"architecture": "LlamaForCausalLM", "num_layers": 4, "hidden_size": HIDDEN, "vocab_rows": VOCABULARY}
    check_target(tiny_frozen(), facts)
    with pytest.raises(ValueError, match=f"hidden_size = {HIDDEN}, data/target was made of one with 64"):
        check_target(tiny_frozen(), facts | {"hidden_size": 64})


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([([1, 2], [0, 1]), ([3, 99], [0, 1])], "document 1 has id 99, the target 64 embeddings"),
        ([([1, -5], [0, 1])], "document 0 has id -5"),
        ([([1, 2], [0, 1]), ([3], [1])], "the first token of document 1 is supervised"),
    ],
)
def test_tokens_that_the_target_cannot_be_given_are_refused(tmp_path: Path, documents: Any, message: str) -> None:
    save_file(vars(pack(documents)), tmp_path / "train-00000.safetensors")
    with pytest.raises(ValueError, match=message):
        check_tokens(tmp_path, ["train-00000.safetensors"], VOCABULARY)
    with pytest.raises(ValueError, match="holds no token shard"):
        check_tokens(tmp_path, [], VOCABULARY)


@pytest.mark.parametrize(
    "harm", [{"offsets": torch.tensor([0, 2, 9])}, {"loss_mask": torch.zeros(3)}, {"more": torch.zeros(1)}]
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, harm: dict[str, torch.Tensor]) -> None:
    shard = pack([([1, 2], [0, 1]), ([3, 4], [0, 1])])
    save_file(vars(shard) | harm, tmp_path / "train-00000.safetensors")
    with pytest.raises(ArtifactError, match="train-00000.safetensors: .*token shard|do not fit each other"):
        read_shard(tmp_path / "train-00000.safetensors")


def test_a_damaged_seal_speaks_for_nothing(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    scratch.write("a", lambda path: path.write_bytes(b"x"))
    assert scratch.has("a")
    (tmp_path / "a.seal").write_text("")
    assert not scratch.has("a")


@pytest.mark.parametrize("endpoint", ["", "localhost", "localhost:port"])
def test_machines_need_a_place_to_meet(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("FOREDRAFT_RENDEZVOUS", endpoint)
    with pytest.raises(ValueError, match="several machines need host:port of the first one there"):
        launch(print, None, "probe", Path("x"), processes=1, nodes=2)
