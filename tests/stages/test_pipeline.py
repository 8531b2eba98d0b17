"""The real pipeline on the real small target: what runs, what does not, and what a colleague's clone can do."""

import json
import shutil
from pathlib import Path

import pytest

from foredraft.artifacts import open_artifact
from tests.conftest import ROOT
from tests.workspace import Workspace, ran

pytestmark = pytest.mark.slow
ALL = {
    "target",
    "benchmarks",
    *(
        f"{stage}@{source}"
        for stage in ("fetch", "curate", "respond", "prepare", "extract")
        for source in ("code", "tools")
    ),
    "train",
    "export",
    "evaluate",
    "card",
}
FIGURES = {"prompts", "tokens", "target_steps", "tokens_per_step", "accepted_per_step", "acceptance_by_slot"}


def test_a_fresh_checkout_runs_every_stage_once(smoke: Workspace) -> None:
    output = (smoke.path.parent / "first-run.txt").read_text()
    assert len(ran(output)) == len(set(ran(output)))
    assert set(ran(output)) == ALL


def test_metrics_hold_what_they_promise(smoke: Workspace) -> None:
    metrics = json.loads((smoke.path / "metrics/evaluate.json").read_text())
    benchmarks = {"pooled", "humaneval", "gsm8k", "mtbench", "tools"}
    for report in (metrics, metrics["baselines"]["prompt_lookup"], metrics["baselines"]["random_drafter"]):
        assert benchmarks <= report.keys()
        for name in benchmarks:
            assert report[name].keys() >= FIGURES
            assert 1.0 <= report[name]["tokens_per_step"] <= 4.0
    pooled = metrics["pooled"]
    parts = [metrics[name] for name in benchmarks - {"pooled"}]
    for key in ("prompts", "tokens", "target_steps"):
        assert pooled[key] == sum(part[key] for part in parts)
    assert pooled["tokens_per_step"] == pooled["tokens"] / pooled["target_steps"]
    assert metrics["baselines"]["greedy"]["pooled"]["tokens_per_step"] == 1.0
    assert metrics["baselines"]["random_drafter"]["pooled"]["tokens_per_step"] < 1.1
    trained = json.loads((smoke.path / "metrics/train.json").read_text())
    assert trained.keys() >= {"loss", "anchors_per_second"}
    assert trained["val"]["tokens_per_step"] >= 1.0


def test_every_artifact_is_whole_and_carries_its_contract(smoke: Workspace) -> None:
    kinds = {"raw": "raw", "conversations": "conversations", "responses": "responses", "tokens": "tokens"}
    kinds |= {"features": "features"}
    for folder, kind in kinds.items():
        for source in ("code", "tools"):
            manifest = open_artifact(smoke.path / "data" / folder / source, kind, "x")
            if "rows_in" in manifest.counts:
                counts = manifest.counts
                assert counts["rows_in"] == counts["rows_out"] + sum(counts["skipped"].values())
    drafter = open_artifact(smoke.path / "data/drafter", "drafter", "x")
    exported = open_artifact(smoke.path / "data/export", "export", "x")
    cards = open_artifact(smoke.path / "data/card", "card", "x")
    assert cards.files.keys() == {"zlab.md", "speculators.md", "transformers.md"}
    for manifest in (drafter, exported, cards):
        assert manifest.contract["target_layer_ids"] == [1, 8, 14, 20, 27]
        assert manifest.contract["layer_id_convention"].startswith("residual stream after 0-based decoder block k")
        assert (manifest.contract["block_size"], manifest.contract["mask_token_id"]) == (4, 16)
    assert {path.parent.name for path in (smoke.path / "data/export").glob("*/model.safetensors")} == {
        "zlab",
        "speculators",
        "transformers",
    }


def test_dvc_shows_metrics_and_plots(smoke: Workspace) -> None:
    metrics = json.loads(smoke.run("dvc", "metrics", "show", "--json"))
    files = metrics[""]["data"]
    assert files["metrics/evaluate.json"]["data"]["pooled"]["tokens_per_step"] > 0
    before = {"curate": None, "respond": "curate", "prepare": "respond", "extract": "prepare"}
    for source in ("code", "tools"):
        for stage, earlier in before.items():
            counts = files[f"metrics/{stage}/{source}.json"]["data"]
            skipped = counts.get("skipped", {})  # DVC shows no empty mapping
            assert counts["rows_in"] == counts["rows_out"] + sum(skipped.values())
            if earlier:
                assert counts["rows_in"] == files[f"metrics/{earlier}/{source}.json"]["data"]["rows_out"]
    smoke.run("dvc", "plots", "show", "--out", "plots-out")
    page = (smoke.path / "plots-out" / "index.html").read_text()
    assert "random_drafter" in page and "tokens_per_step" in page
    shutil.rmtree(smoke.path / "plots-out")


def test_the_table_is_printed(smoke: Workspace) -> None:
    shown = smoke.run("python", "-m", "foredraft.plan.table", "metrics/evaluate.json", "metrics/train.json")
    for word in ("pooled", "humaneval", "prompt lookup", "random drafter", "next:", "acceptance by slot"):
        assert word in shown


def test_nothing_changed_runs_nothing(smoke: Workspace) -> None:
    assert smoke.repro() == []


def test_an_experiment_reruns_training_and_what_follows_and_is_a_row_with_tokens_per_step(smoke: Workspace) -> None:
    before = (smoke.path / "params.yaml").read_bytes()
    output = smoke.run("dvc", "exp", "run", "--temp", "--name", "slower", "-S", "train.lr=0.0007")
    assert ran(output) == ["train", "export", "evaluate", "card"]
    rows = json.loads(smoke.run("dvc", "exp", "show", "--json"))
    experiments = [row for head in rows for row in head.get("experiments") or []]
    (found,) = [row for group in experiments for row in group["revs"] if row["name"] == "slower"]
    metrics = found["data"]["metrics"]["metrics/evaluate.json"]["data"]
    assert metrics["pooled"]["tokens_per_step"] >= 1.0
    assert found["data"]["params"]["params.yaml"]["data"]["train"]["lr"] == 0.0007
    assert (smoke.path / "params.yaml").read_bytes() == before


@pytest.fixture(scope="module")
def clone(smoke: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A colleague's clone: an empty cache, and nothing but the remote to fill it."""
    folder = tmp_path_factory.mktemp("clone")
    smoke.run("git", "clone", "-q", str(smoke.path), str(folder / "project"))
    scratch = folder / "scratch"
    scratch.mkdir()
    for shared in ("wheels", "targets"):
        (scratch / shared).symlink_to(smoke.scratch / shared)
    there = Workspace(folder / "project", scratch)
    there.run("dvc", "remote", "modify", "--local", "store", "url", str(smoke.path / ".foredraft-store"))
    for key, value in {"user.name": "Test", "user.email": "test@example.org"}.items():
        there.run("git", "config", key, value)
    return there


def test_a_clone_trains_on_pulled_features_and_runs_no_stage_before(clone: Workspace) -> None:
    assert not (clone.path / "data/features").exists()
    clone.edit("params.yaml", "lr: 1.0e-3", "lr: 1.5e-3")
    assert clone.repro("--pull", "--allow-missing") == ["train", "export", "evaluate", "card"]
    assert (clone.path / "data/features/code/manifest.json").exists()
    assert not (clone.path / "data/raw").exists()
    assert not (clone.path / "data/responses").exists()


def test_a_partly_pulled_features_folder_is_refused_by_name(clone: Workspace) -> None:
    shard = next((clone.path / "data/features/tools").glob("train-*.safetensors"))
    shard.unlink()
    clone.edit("params.yaml", "lr: 1.5e-3", "lr: 1.6e-3")
    output = clone.run("dvc", "repro", "--allow-missing", "--single-item", "train", fails=True)
    assert f"data/features/tools/{shard.name}: file is missing (a partly pulled folder?)" in output
    assert "dvc pull --force extract@tools" in output
    assert not (clone.path / "data/drafter").exists(), "DVC removed the old one, and nothing half-made took its place"
    clone.run("dvc", "pull", "-q", "extract@tools")
    assert shard.exists()


def test_the_documented_tree_is_there() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md", "LICENSE", ".ci/run", "bench"):
        assert Path(ROOT / name).exists(), name
