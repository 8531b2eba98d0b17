"""Files of a repository on the Hugging Face hub, and what to do when they cannot be had.

The hub's own client keeps the files that it finished, but may throw away the one that broke off; so the files of a
dataset go through :func:`foredraft.sources.transfer.transfer`, under the client's addresses and the user's own login.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeVar

from foredraft.artifacts import file_digest
from foredraft.progress import Progress
from foredraft.sources.config import FetchConfig
from foredraft.sources.remote import PASSING, open_http, watched
from foredraft.sources.transfer import (
    Broken,
    Mark,
    Partial,
    Refused,
    Remote,
    Report,
    root_cause,
    transfer,
    with_retries,
)

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

T = TypeVar("T")


@dataclass(frozen=True)
class Repository:
    """A repository at a revision."""

    kind: Literal["dataset", "model"]
    name: str
    revision: str

    def __str__(self) -> str:
        return f"hf:{self.name}@{self.revision}"

    @property
    def page(self) -> str:
        """Its address for people."""
        return f"{_endpoint()}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"


def gather(repository: Repository, pattern: str, config: FetchConfig, store: Path) -> list[str]:
    """Bring the files that match ``pattern`` (all, if empty) into ``store``, going on where an earlier run ended.

    Returns their paths in the repository.

    Raises:
        ValueError: the hub cannot be reached, will not give them, or gave other bytes; says which and what to do.
    """
    commit, files = _retried(repository, config, lambda: _listing(repository, pattern, config))
    held = {file.path: _held(store / file.path) for file in files}
    total = sum(file.size for file in files)
    with Progress(f"fetch-{repository.name.replace('/', '--')}", total, "B", sum(held.values())) as progress:
        for file in files:
            others = sum(held.values()) - held[file.path]
            _bring(repository, commit, file, store, config, _report_into(progress, others))
            held[file.path] = file.size
    return list(held)


def snapshot(repository: Repository, ignored: list[str], config: FetchConfig) -> Path:
    """The whole repository in the user's own hub cache, by the hub's client, which fetches no finished file again.

    Raises:
        ValueError: the cache does not hold it, and the hub cannot be reached or will not give it; says what to do.
    """
    from huggingface_hub import constants, snapshot_download

    # The client has no argument for either; both are times without a byte.
    constants.HF_HUB_DOWNLOAD_TIMEOUT = constants.HF_HUB_ETAG_TIMEOUT = config.stall_seconds

    def attempt() -> str:
        with _explained(repository):
            return snapshot_download(
                repository.name,
                repo_type=repository.kind,
                revision=repository.revision,
                ignore_patterns=ignored,
            )

    return Path(_retried(repository, config, attempt))


def _listing(repository: Repository, pattern: str, config: FetchConfig) -> tuple[str, list["RepoFile"]]:
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.utils import filter_repo_objects

    api, name, kind = HfApi(), repository.name, repository.kind
    with _explained(repository):
        info = api.repo_info(name, repo_type=kind, revision=repository.revision, timeout=config.stall_seconds)
        commit = info.sha or repository.revision
        # The client sets this call no limit of time.
        tree = watched(
            lambda: iter(api.list_repo_tree(name, repo_type=kind, revision=commit, recursive=True)),
            config.stall_seconds,
        )
        files = [file for file in tree if isinstance(file, RepoFile)]
    wanted = list(filter_repo_objects(files, allow_patterns=pattern or None, key=lambda file: file.path))
    if not wanted:
        raise ValueError(
            f"{repository}: nothing matches {pattern!r} among {len(files)} files; "
            f"they are listed at {repository.page}/tree/{commit}"
        )
    return commit, wanted


def _held(target: Path) -> int:
    return target.stat().st_size if target.is_file() else Partial(target).held()


def _report_into(progress: Progress, others: int) -> Report:
    return lambda held, _size: progress.reach(others + held)


def _bring(
    repository: Repository, commit: str, file: "RepoFile", store: Path, config: FetchConfig, report: Report
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if PurePosixPath(file.path).is_absolute() or ".." in PurePosixPath(file.path).parts:
        raise ValueError(f"{repository}: {file.path!r} leaves the folder")
    url = hf_hub_url(repository.name, file.path, repo_type=repository.kind, revision=commit)
    headers = build_hf_headers()

    def open_at(offset: int, known: Mark) -> AbstractContextManager[Remote]:
        return open_http(url, config.stall_seconds, offset, known, headers, pinned=file.blob_id)

    try:
        transfer(f"{repository}: {file.path}", open_at, store / file.path, config, report)
    except Refused as error:
        raise ValueError(_refusal(repository, error.status, error.code, str(error))) from error
    _verify(repository, file, store / file.path)


def _verify(repository: Repository, file: "RepoFile", path: Path) -> None:
    expected = file.lfs.sha256 if file.lfs else file.blob_id
    found = file_digest(path) if file.lfs else _git_digest(path)
    if found != expected:
        path.unlink()
        raise ValueError(f"{repository}: {file.path} has digest {found}, expected {expected}; run it again")


def _git_digest(path: Path) -> str:
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    digest.update(path.read_bytes())  # small, or it would be in large file storage
    return digest.hexdigest()


def _retried(repository: Repository, config: FetchConfig, action: Callable[[], T]) -> T:
    try:
        return with_retries(action, config)
    except Broken as error:
        raise ValueError(
            f"{repository}: cannot be downloaded from {_endpoint()} ({error}); "
            "check the network, and HF_ENDPOINT if it is set"
        ) from error


@contextmanager
def _explained(repository: Repository) -> Iterator[None]:
    """Turn the errors of the hub's client into ``Broken`` where trying again may help, else into one clear line."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    try:
        yield
    except (HTTPError, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            raise ValueError(
                f"{repository}: cannot be downloaded in offline mode; unset HF_HUB_OFFLINE (and TRANSFORMERS_OFFLINE)"
            ) from error
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        if not isinstance(cause, HfHubHTTPError):
            raise Broken(root_cause(error)) from error
        status = cause.response.status_code
        if status in PASSING or status >= 500:
            raise Broken(f"HTTP {status}") from error
        code = cause.response.headers.get("X-Error-Code", "")
        raise ValueError(_refusal(repository, status, code, cause.server_message or f"HTTP {status}")) from error


def _refusal(repository: Repository, status: int, code: str, reason: str) -> str:
    login = "`hf auth login` (or HF_TOKEN)"
    if code == "GatedRepo":
        said = f"is gated: ask for access at {repository.page}, then {login}"
    elif code == "RevisionNotFound":
        said = f"there is no such revision: take a commit from {repository.page}/commits/main"
    elif code == "RepoNotFound":
        said = f"there is no such {repository.kind} repository: check the name; a private one needs {login}"
    elif status == 401:
        said = f"the hub wants a login, or does not accept yours: check the name, then {login}"
    elif status == 403:
        said = f"your login may not read it: check the token's permissions, and {repository.page}"
    else:
        said = f"cannot be downloaded: see {repository.page}"
    return f"{repository}: {said} ({' '.join(reason.split())})"


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT
