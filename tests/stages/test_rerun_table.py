"""What an edit reruns: the repository's own dvc.yaml and params, with stand-ins for what the stages compute."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.workspace import Workspace, copy_repository

PER_SOURCE = ("fetch", "curate", "respond", "prepare", "extract")
LAST = {"train", "export", "evaluate", "card"}


def of(source: str, *stages: str) -> set[str]:
    return {f"{stage}@{source}" for stage in stages or PER_SOURCE}


EVERYTHING = {"target", "benchmarks", *of("code"), *of("tools"), *LAST}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace in which every stage has run, as a stand-in."""
    folder = tmp_path_factory.mktemp("table")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests/stages/stand_in.py"} "$@"\n')
    python.chmod(0o755)
    path = f"{python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    workspace = copy_repository(folder, "smoke", PATH=path)
    assert set(workspace.repro()) == EVERYTHING
    workspace.commit("run")
    return workspace


@pytest.mark.parametrize(
    ("file", "old", "new", "runs"),
    [
        ("params.yaml", "lr: 1.0e-3", "lr: 2.0e-3", LAST),
        ("params.yaml", "_layer_ids: [1,", "_layer_ids: [2,", of("code", "extract") | of("tools", "extract") | LAST),
        ("params.yaml", "prompts: 1 ", "prompts: 2 ", {"evaluate", "card"}),
        # A note in the code runs what imports it; as their outputs are equal, nothing behind them.
        ("src/foredraft/features/engine.py", '"""The ``', '"""The  ``', of("code", "extract") | of("tools", "extract")),
        ("src/foredraft/drafter/loss.py", '"""What a slot', '"""What  a slot', {"train"}),
    ],
)
def test_an_edit_reruns_what_it_touches_and_no_more(
    pipeline: Workspace, file: str, old: str, new: str, runs: set[str]
) -> None:
    """The edits add up: each is measured against the one before."""
    pipeline.edit(file, old, new)
    assert set(pipeline.repro()) == runs


def test_a_new_source_runs_its_own_stages_and_training(pipeline: Workspace) -> None:
    (pipeline.path / "more.jsonl").write_text("{}\n")
    source = "  birds: {uri: 'file:more.jsonl', kind: general, licence: MIT, format: messages}\n"
    pipeline.edit("params.yaml", "\nbenchmarks:", f"{source}\nbenchmarks:")
    assert "run make sources" in pipeline.run(sys.executable, "-m", "foredraft.plan.pipeline", "--check", fails=True)
    pipeline.run(sys.executable, "-m", "foredraft.plan.pipeline")
    assert set(pipeline.repro()) == of("birds") | LAST


def test_a_removed_source_leaves_training_without_it(pipeline: Workspace) -> None:
    text = (pipeline.path / "params.yaml").read_text()
    start, end = text.index("  tools:\n    uri:"), text.index("\nbenchmarks:")
    (pipeline.path / "params.yaml").write_text(text[:start] + text[end:])
    pipeline.run(sys.executable, "-m", "foredraft.plan.pipeline")
    assert set(pipeline.repro()) == LAST


def test_back_again_restores_what_ran_before_and_runs_nothing(pipeline: Workspace) -> None:
    pipeline.run("git", "checkout", "-q", ".")
    assert pipeline.repro() == []
    outputs = {path: (pipeline.path / path).read_bytes() for path in ("data/drafter/content", "metrics/evaluate.json")}
    pipeline.edit("params.yaml", "lr: 1.0e-3", "lr: 3.0e-3")
    assert set(pipeline.repro()) == LAST
    assert all((pipeline.path / path).read_bytes() != before for path, before in outputs.items())
    pipeline.run("git", "checkout", "-q", "params.yaml")
    assert pipeline.repro() == []
    assert all((pipeline.path / path).read_bytes() == before for path, before in outputs.items())
    assert pipeline.run("git", "status", "--porcelain", "--untracked-files=no") == ""
