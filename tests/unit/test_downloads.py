"""Downloads against real servers that break off, stall, change their mind or refuse."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft.imports import ROOT
from foredraft.sources import package, remote, transfer
from foredraft.sources.config import FetchConfig, Origin, SourceConfig
from foredraft.sources.download import download
from foredraft.sources.fetch import fetch
from foredraft.sources.hub import Repository, snapshot
from foredraft.sources.remote import watched
from foredraft.sources.transfer import Broken
from tests.serving import COMMIT, File, Server, serving

ONCE, TWICE = FetchConfig(stall_seconds=1, retries=0), FetchConfig(stall_seconds=1, retries=1)
BODY = os.urandom(300_000)
GONE = 200_000
PATH = "/rows.jsonl"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(transfer, "FIRST_PAUSE_SECONDS", 0.01)
    return tmp_path / "scratch"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as state:
        state.files[PATH] = File(BODY)
        yield state


def bring(server: Server, into: Path, config: FetchConfig = ONCE, sha256: str | None = None) -> bytes:
    (path,) = download(Origin(uri=server.url + PATH, sha256=sha256), config, into)
    return path.read_bytes()


def gathered(scratch: Path) -> list[str]:
    """Names of the files that wait in scratch."""
    return sorted(path.name for path in (scratch / "downloads").rglob("*") if path.is_file() and path.suffix != ".lock")


def test_a_dropped_connection_is_taken_up_where_it_ended(server: Server, tmp_path: Path, scratch: Path) -> None:
    server.files[PATH].faults.append(("drop", GONE))
    assert bring(server, tmp_path / "raw", TWICE) == BODY
    assert server.ranges_of(PATH) == [None, f"bytes={GONE}-"]
    assert server.asked[1][1]["If-Range"] == '"first"'
    assert gathered(scratch) == []


def test_a_failed_download_is_taken_up_by_the_next_run(server: Server, tmp_path: Path, scratch: Path) -> None:
    server.files[PATH].faults.append(("drop", GONE))
    source = SourceConfig(uri=server.url + PATH, kind="general", licence="MIT", format="auto")
    with pytest.raises(ValueError, match=rf"{PATH}: cannot be downloaded .*; {GONE} bytes are kept$"):
        fetch(source, ONCE, tmp_path / "raw")
    assert list(tmp_path.iterdir()) == [scratch]
    assert gathered(scratch) == ["rows.jsonl.part", "rows.jsonl.part.json"]
    fetch(source, ONCE, tmp_path / "raw")
    assert (tmp_path / "raw" / "rows.jsonl").read_bytes() == BODY
    assert server.ranges_of(PATH) == [None, f"bytes={GONE}-"]
    assert gathered(scratch) == []


def test_a_killed_download_is_taken_up_by_the_next_run(server: Server, tmp_path: Path, scratch: Path) -> None:
    server.files[PATH].faults.append(("stall", 196_608))
    code = (
        "from pathlib import Path; from foredraft.sources.config import *; from foredraft.sources.download import *;"
        f"download(Origin(uri={server.url + PATH!r}), FetchConfig(stall_seconds=60, retries=0), Path({str(tmp_path)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "src", stderr=subprocess.DEVNULL)
    held = 0
    for _ in range(1000):
        held = sum(path.stat().st_size for path in scratch.rglob("*.part"))
        if held:
            break
        time.sleep(0.02)
    process.kill()
    process.wait()
    held = sum(path.stat().st_size for path in scratch.rglob("*.part"))
    assert 0 < held < len(BODY)
    assert bring(server, tmp_path / "raw") == BODY
    assert server.ranges_of(PATH) == [None, f"bytes={held}-"]


def test_a_whole_part_is_only_named(server: Server, tmp_path: Path, scratch: Path) -> None:
    """As after a process that was killed between the last byte and the name."""
    server.files[PATH].faults.append(("drop", GONE))
    with pytest.raises(ValueError, match="bytes are kept"):
        bring(server, tmp_path / "raw")
    (part,) = scratch.rglob("*.part")
    part.write_bytes(BODY)
    assert bring(server, tmp_path / "raw") == BODY
    assert len(server.asked) == 1


def test_a_part_longer_than_the_file_is_thrown_away(server: Server, tmp_path: Path, scratch: Path) -> None:
    server.files[PATH].faults.append(("drop", GONE))
    with pytest.raises(ValueError, match="bytes are kept"):
        bring(server, tmp_path / "raw")
    (part,) = scratch.rglob("*.part")
    part.write_bytes(BODY + b"x")
    assert bring(server, tmp_path / "raw") == BODY


def test_a_server_that_ignores_ranges_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    server.files[PATH].ranges = False
    server.files[PATH].faults.append(("drop", GONE))
    assert bring(server, tmp_path / "raw", TWICE) == BODY
    assert len(server.asked) == 2


@pytest.mark.parametrize("etag", ['"second"', None])
def test_a_file_that_changed_meanwhile_is_read_from_the_start(server: Server, tmp_path: Path, etag: str | None) -> None:
    server.files[PATH].faults.append(("drop", GONE))
    with pytest.raises(ValueError, match="bytes are kept"):
        bring(server, tmp_path / "raw")
    changed = os.urandom(250_000)
    server.files[PATH] = File(changed, etag)
    assert bring(server, tmp_path / "raw") == changed


def test_a_server_that_heeds_no_if_range_gives_no_mixture(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files[PATH].faults.append(("drop", GONE))
    with pytest.raises(ValueError, match="bytes are kept"):
        bring(server, tmp_path / "raw")
    changed = os.urandom(len(BODY))
    server.files[PATH] = File(changed, '"second"')
    get = remote._get
    monkeypatch.setattr(
        remote,
        "_get",
        lambda url, stall, headers: get(url, stall, {k: v for k, v in headers.items() if k != "If-Range"}),
    )
    assert bring(server, tmp_path / "raw") == changed
    assert server.ranges_of(PATH) == [None, f"bytes={GONE}-", None]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_what_cannot_be_shown_to_be_the_same_begins_again(server: Server, tmp_path: Path, etag: str | None) -> None:
    server.files[PATH].etag = etag
    server.files[PATH].faults.append(("drop", GONE))
    assert bring(server, tmp_path / "raw", TWICE) == BODY
    assert server.ranges_of(PATH) == [None, None]


def test_a_short_body_is_tried_again_and_then_named(server: Server, tmp_path: Path) -> None:
    server.files[PATH].faults += [("drop", 10), ("drop", 10)]
    with pytest.raises(ValueError, match="cannot be downloaded") as caught:
        bring(server, tmp_path / "raw", TWICE)
    assert "20 bytes are kept" in str(caught.value) and "\n" not in str(caught.value)


def test_a_stall_is_given_up_and_time_alone_is_not(server: Server, tmp_path: Path) -> None:
    server.files[PATH].faults.append(("stall", GONE))
    with pytest.raises(ValueError, match="no byte came for 1 s"):
        bring(server, tmp_path / "raw")
    server.released.set()
    assert bring(server, tmp_path / "raw") == BODY


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "HTTP 404: no such file"), (403, "HTTP 403: access is refused"), (401, "HTTP 401: it needs a login")],
)
def test_a_refusal_is_one_clear_line_at_once(server: Server, tmp_path: Path, status: int, message: str) -> None:
    server.files[PATH].status = status
    with pytest.raises(ValueError, match=rf"{PATH}: cannot be downloaded \({message}\)$"):
        bring(server, tmp_path / "raw", TWICE)
    assert len(server.asked) == 1


def test_a_server_in_trouble_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.files[PATH].status = 503
    with pytest.raises(ValueError, match="HTTP 503"):
        bring(server, tmp_path / "raw", TWICE)
    assert len(server.asked) == 2


def test_no_server_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^http://127.0.0.1:9/x: cannot be downloaded \(.*refused\); check the network"
    ):
        download(Origin(uri="http://127.0.0.1:9/x"), ONCE, tmp_path / "raw")


def test_a_wrong_digest_leaves_nothing_to_go_on_with(server: Server, tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(ValueError, match="expected 000"):
        bring(server, tmp_path / "raw", sha256="000")
    assert gathered(scratch) == []


def test_the_heartbeat_tells_bytes_and_total(server: Server, tmp_path: Path, scratch: Path) -> None:
    bring(server, tmp_path / "raw")
    beat = json.loads((scratch / "heartbeat" / "fetch-rows.jsonl.json").read_text())
    assert (beat["done"], beat["total"], beat["unit"], beat["state"]) == (len(BODY), len(BODY), "B", "done")


@pytest.mark.parametrize("fault", ["the line went dead", r"\d+ of 300000 bytes came"])
def test_other_file_systems_are_taken_up_where_they_ended(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    import fsspec
    from fsspec.implementations.memory import MemoryFile

    url = "memory://bucket/long.bin"
    with fsspec.open(url, "wb") as stream:
        stream.write(BODY)
    read, seek, sought = MemoryFile.read, MemoryFile.seek, []

    def breaking(self: MemoryFile, size: int = -1) -> bytes:
        if self.tell() >= GONE and "came" in fault:
            return b""
        if self.tell() >= GONE:
            raise OSError(fault)
        return read(self, size)

    def seeking(self: MemoryFile, place: int, whence: int = 0) -> int:
        sought.append(place)
        return seek(self, place, whence)

    monkeypatch.setattr(MemoryFile, "read", breaking)
    with pytest.raises(ValueError, match=rf"{url}: cannot be downloaded \({fault}\)"):
        download(Origin(uri=url), ONCE, tmp_path / "raw")
    (part,) = scratch.rglob("*.part")
    held = part.stat().st_size
    monkeypatch.setattr(MemoryFile, "read", read)
    monkeypatch.setattr(MemoryFile, "seek", seeking)
    (path,) = download(Origin(uri=url), ONCE, tmp_path / "raw")
    assert path.read_bytes() == BODY
    assert held >= GONE and held in sought


def test_a_folder_and_an_unknown_scheme_are_refused(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://folder/rows.jsonl", "wb") as stream:
        stream.write(BODY)
    with pytest.raises(ValueError, match="it is a folder; name one file"):
        download(Origin(uri="memory://folder"), TWICE, tmp_path / "raw")
    with pytest.raises(ValueError, match=r"gopher://x/y: cannot be downloaded \(Protocol not known"):
        download(Origin(uri="gopher://x/y"), TWICE, tmp_path / "raw")


def test_a_read_that_hangs_is_given_up(server: Server) -> None:
    def hanging() -> Iterator[bytes]:
        yield b"x"
        server.released.wait(20)
        yield b"y"

    items = watched(hanging, 0.2)
    assert next(items) == b"x"
    with pytest.raises(Broken, match=r"no byte came for 0.2 s"):
        next(items)


@pytest.fixture
def hub(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Server:
    """A stand-in for the hub, to which the hub's client talks."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 10)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 10)
    monkeypatch.setenv("HF_TOKEN", "the-users-own")
    server.hold_repository("datasets", "org/rows", {"data/a.jsonl": b"{}\n", "data/b.parquet": BODY, "README.md": b"#"})
    return server


URI = f"hf:org/rows@{COMMIT}"
PARQUET = f"/datasets/org/rows/resolve/{COMMIT}/data/b.parquet"


def test_files_come_from_the_hub_with_the_users_own_login(hub: Server, tmp_path: Path, scratch: Path) -> None:
    paths = download(Origin(uri=f"{URI}/data/*"), ONCE, tmp_path / "raw")
    assert [str(path.relative_to(tmp_path / "raw")) for path in paths] == ["data/a.jsonl", "data/b.parquet"]
    assert paths[1].read_bytes() == BODY
    assert {headers["Authorization"] for path, headers in hub.asked if "org/rows" in path} == {"Bearer the-users-own"}
    assert gathered(scratch) == []
    beat = json.loads((scratch / "heartbeat" / "fetch-org--rows.json").read_text())
    assert beat["done"] == beat["total"] == len(BODY) + 3


def test_a_hub_download_that_broke_off_is_taken_up_by_the_next_run(hub: Server, tmp_path: Path) -> None:
    origin = Origin(uri=f"{URI}/data/*")
    hub.files[PARQUET].faults.append(("drop", GONE))
    with pytest.raises(ValueError, match=rf"{URI}: data/b.parquet: cannot be downloaded .*; {GONE} bytes are kept"):
        download(origin, ONCE, tmp_path / "raw")
    hub.files[PARQUET].etag = '"what a mirror says"'  # the commit vouches for the bytes
    paths = download(origin, ONCE, tmp_path / "raw")
    assert paths[1].read_bytes() == BODY
    assert hub.ranges_of(PARQUET) == [None, f"bytes={GONE}-"]
    assert hub.asked[-1][1]["If-Range"] is None
    assert len(hub.ranges_of(PARQUET.replace("b.parquet", "a.jsonl"))) == 1, "finished files are kept"


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet"])
def test_other_bytes_than_the_hub_lists_are_refused(hub: Server, tmp_path: Path, name: str) -> None:
    file = hub.files[PARQUET.replace("b.parquet", name)]
    file.content = file.content[:-1] + bytes([file.content[-1] ^ 1])
    with pytest.raises(ValueError, match=rf"{URI}: data/{name} has digest .*, expected"):
        download(Origin(uri=f"{URI}/data/*"), ONCE, tmp_path / "raw")


def refuse(server: Server, path: str, status: int, code: str, said: str = "") -> None:
    headers = {"X-Error-Message": said or code} | ({"X-Error-Code": code} if code else {})
    server.files[path] = File(status=status, headers=headers)


REVISION = f"/api/datasets/org/rows/revision/{COMMIT}"
REFUSALS = [
    (PARQUET, 403, "GatedRepo", r"is gated: ask for access at http\S+/datasets/org/rows, then `hf auth login`"),
    (REVISION, 401, "GatedRepo", r"is gated: ask for access at"),
    (REVISION, 401, "", "the hub wants a login, or does not accept yours: .*`hf auth login`"),
    (REVISION, 404, "RepoNotFound", "there is no such dataset repository: check the name; a private one needs"),
    (REVISION, 404, "RevisionNotFound", r"there is no such revision: take a commit from http\S+/org/rows/commits/main"),
    (REVISION, 403, "", "your login may not read it: check the token's permissions"),
]


@pytest.mark.parametrize(("path", "status", "code", "message"), REFUSALS)
def test_a_refusal_of_the_hub_says_which_and_what_to_do(
    hub: Server, tmp_path: Path, path: str, status: int, code: str, message: str
) -> None:
    refuse(hub, path, status, code, "Because.")
    with pytest.raises(ValueError, match=f"^{URI}: {message}") as caught:
        download(Origin(uri=URI), TWICE, tmp_path / "raw")
    assert "\n" not in str(caught.value)
    assert len([name for name, _ in hub.asked if name == path]) == 1


def test_a_pattern_that_matches_nothing_on_the_hub(hub: Server, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{URI}: nothing matches '\*.csv' among 3 files; they are listed at http"):
        download(Origin(uri=f"{URI}/*.csv"), ONCE, tmp_path / "raw")


def test_a_hub_that_is_not_there_and_one_that_says_nothing(
    hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.files[REVISION].faults.append(("stall", 0))
    with pytest.raises(
        ValueError, match=rf"{URI}: cannot be downloaded from {hub.url} \(.*timed out\); check the network"
    ):
        download(Origin(uri=URI), ONCE, tmp_path / "raw")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ValueError, match=r"cannot be downloaded from http://127.0.0.1:9 \(.*refused\); check the network"
    ):
        download(Origin(uri=URI), ONCE, tmp_path / "raw")


def test_offline_mode_is_named(hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for attempt in (
        lambda: download(Origin(uri=URI), TWICE, tmp_path / "raw"),
        lambda: snapshot(Repository("model", "org/target", COMMIT), [], TWICE),
    ):
        with pytest.raises(ValueError, match="cannot be downloaded in offline mode; unset HF_HUB_OFFLINE"):
            attempt()
    assert hub.asked == []


def test_a_target_comes_into_the_hubs_cache_and_is_found_there_again(
    hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    target = Repository("model", "org/target", COMMIT)
    hub.hold_repository("models", "org/target", {"config.json": b"{}", "weights.bin": BODY})
    folder = snapshot(target, ["*.bin"], ONCE)
    assert folder.is_relative_to(tmp_path / "hub")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert ONCE.stall_seconds == constants.HF_HUB_DOWNLOAD_TIMEOUT
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert snapshot(target, ["*.bin"], ONCE) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    refuse(hub, f"/api/models/org/other/tree/{COMMIT}", 403, "GatedRepo")
    with pytest.raises(ValueError, match=rf"^hf:org/other@{COMMIT}: is gated: ask for access at {hub.url}/org/other,"):
        snapshot(Repository("model", "org/other", COMMIT), [], ONCE)


PIP = """
import pathlib, sys
sys.stdout.write("Collecting x\\nProgress 0 of 400\\nProgress 400 of 400\\n")
tries = pathlib.Path(__file__).parent / "tries"
tries.write_text((tries.read_text() if tries.exists() else "") + " ".join(sys.argv[1:]) + "\\n")
if len(tries.read_text().splitlines()) == 1:
    sys.exit("ERROR: the line went dead")
(pathlib.Path(sys.argv[sys.argv.index("--dest") + 1]) / "x-1-py3-none-any.whl").write_bytes(b"")
"""


def pip_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "stand-in" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__main__.py").write_text(PIP)
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    return folder


def test_pip_tells_its_progress_and_is_tried_again(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = pip_stand_in(tmp_path, monkeypatch)
    monkeypatch.setattr(package, "version", lambda _: "25.2")
    package.pip_download("x==1", TWICE, tmp_path)
    assert (tmp_path / "x-1-py3-none-any.whl").exists()
    first, second = (stand_in / "tries").read_text().splitlines()
    assert first == second and "--progress-bar=raw" in first and "--resume-retries=1" in first
    beat = json.loads((scratch / "heartbeat" / "fetch-x.json").read_text())
    assert (beat["done"], beat["total"], beat["state"]) == (400, 400, "done")
    (stand_in / "tries").unlink()
    with pytest.raises(ValueError, match=r"cannot download x==1 from the package index .*\(the line went dead\)"):
        package.pip_download("x==1", ONCE, tmp_path)


def test_an_old_pip_is_announced_in_a_line_and_none_at_all_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = pip_stand_in(tmp_path, monkeypatch)
    monkeypatch.setattr(package, "version", lambda _: "23.2.1")
    package.pip_download("x==1", TWICE, tmp_path)
    assert "downloading x==1 (pip 23.2.1 shows no progress" in capsys.readouterr().err
    tried = (stand_in / "tries").read_text()
    assert "--progress-bar=off" in tried and "resume" not in tried

    def missing(name: str) -> str:
        raise package.PackageNotFoundError(name)

    monkeypatch.setattr(package, "version", missing)
    with pytest.raises(ValueError, match="cannot download x==1: this environment has no pip"):
        package.pip_download("x==1", TWICE, tmp_path)
