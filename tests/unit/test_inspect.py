"""What ``make inspect`` shows of a source."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from foredraft.artifacts import ArtifactError, Manifest, publish
from foredraft.plan.inspect import inspect
from tests.unit.test_prepare import exchange, kept, prepared

ROWS = [kept(n, exchange(f"Question {n}?", "A fine answer.")) for n in range(5)] + [kept(9, exchange("never answered"))]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one source, curated and prepared."""
    prepared(tmp_path / "made", ROWS)
    (tmp_path / "data" / "tokens").mkdir(parents=True)
    (tmp_path / "made" / "out").rename(tmp_path / "data" / "tokens" / "birds")
    (tmp_path / "made" / "target").rename(tmp_path / "data" / "target")
    counts = {"rows_in": 9, "rows_out": 6, "skipped": {"duplicate": 2, "contaminated": 1}}
    with publish(tmp_path / "data" / "conversations" / "birds", Manifest("conversations", counts=counts)):
        pass
    (tmp_path / "params.yaml").write_text("sources: {birds: {}, fish: {}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(source: str, **settings: object) -> str:
    stream = io.StringIO()
    inspect(source, Path("data"), 2, Console(file=stream, width=120, **settings))  # type: ignore[arg-type]
    return stream.getvalue()


def test_rows_reasons_lengths_and_marked_samples_are_shown(project: Path) -> None:
    text = shown("birds")
    assert "2 duplicate, 1 contaminated" in text and "1 no_answer_to_keep" in text
    assert "up to 64" in text and "█" in text
    assert "⟦A fine answer.<|im_end|>⟧" in text
    assert text.count("supervised") == 3 and "<|im_start|>user" in text


def test_in_a_terminal_colour_tells_what_is_supervised(project: Path) -> None:
    text = shown("birds", force_terminal=True, color_system="standard")
    assert "\x1b[1;32mA fine answer.<|im_end|>\x1b[0m" in text and "⟦" not in text


def test_an_unknown_source_and_one_that_has_not_run_are_named(project: Path) -> None:
    with pytest.raises(ValueError, match="no source 'bird' in params.yaml; there are: birds, fish"):
        shown("bird")
    with pytest.raises(
        ArtifactError, match="data/conversations/fish: nothing is there yet; run: dvc repro curate@fish"
    ):
        shown("fish")
