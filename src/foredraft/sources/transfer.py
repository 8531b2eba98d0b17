"""Bytes from afar into a file, so that what came is never fetched twice, however often it breaks off.

A file that is not complete is ``NAME.part``, with what it is a part of in ``NAME.part.json``. It is carried on only where
the far side can show that it still serves the same bytes; otherwise it begins again.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from foredraft.artifacts import fingerprint, write_json
from foredraft.scratch import scratch_root
from foredraft.sources.config import FetchConfig

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

T = TypeVar("T")


class Broken(Exception):
    """A transfer ended before its end; trying again may help."""


class Refused(Exception):
    """The far side will not give the file; trying again is of no use."""

    def __init__(self, reason: str, status: int = 0, code: str = ""):
        super().__init__(reason)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Mark:
    """What tells one state of a remote file from another; without ``version`` nothing can be carried on."""

    version: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Remote:
    """An open remote file: its bytes from ``offset`` on, which is 0 where it had to begin again."""

    offset: int
    mark: Mark
    pieces: Iterator[bytes]


OpenAt = Callable[[int, Mark], AbstractContextManager[Remote]]
"""Opens at an offset a file that was last seen under a mark; raises :class:`Broken` or :class:`Refused`."""
Report = Callable[[int, int | None], None]
"""Is told the bytes that there are, and the size where it is known."""


def transfer(what: str, open_at: OpenAt, target: Path, config: FetchConfig, report: Report) -> None:
    """Bring a remote file to ``target``, from where an earlier attempt ended; nothing to do if it is there.

    Raises:
        ValueError: it broke off once more than ``config.retries`` times, or cannot be written; names ``what``.
        Refused: the far side will not give it.
    """
    if target.exists():
        return
    partial = Partial(target)
    try:
        with_retries(lambda: _carry_on(open_at, partial, report), config)
    except Broken as error:
        kept = f"; {partial.held()} bytes are kept" if partial.held() else ""
        raise ValueError(f"{what}: cannot be downloaded ({error}); check the network and run it again{kept}") from error
    except OSError as error:
        raise ValueError(f"{what}: cannot be written to {target.parent} ({error})") from error


def with_retries(action: Callable[[], T], config: FetchConfig) -> T:
    """Do ``action``, and up to ``config.retries`` times more where it breaks off, with growing pauses.

    Raises:
        Broken: of the last attempt.
    """
    for attempt in range(config.retries):
        try:
            return action()
        except Broken:
            time.sleep(min(FIRST_PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE_SECONDS))
    return action()


class Partial:
    """What has come of the file ``target``, here or in an earlier process."""

    def __init__(self, target: Path):
        self.target = target
        self.path = target.with_name(f"{target.name}.part")
        self._record = target.with_name(f"{target.name}.part.json")

    def mark(self) -> Mark:
        """What it is a part of."""
        try:
            return Mark(**json.loads(self._record.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return Mark()

    def held(self) -> int:
        """How many bytes can be built on."""
        mark = self.mark()
        if mark.version is None or not self.path.is_file():
            return 0
        held = self.path.stat().st_size
        return 0 if mark.size is not None and held > mark.size else held

    def begin(self, remote: Remote) -> None:
        """Make ready for the bytes of ``remote``."""
        if remote.offset == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")
        write_json(self._record, asdict(remote.mark))

    def finish(self) -> None:
        """It is complete: give it its name."""
        self.path.replace(self.target)
        self._record.unlink()

    def discard(self) -> None:
        """Begin from nothing next time."""
        self.path.unlink(missing_ok=True)
        self._record.unlink(missing_ok=True)


def _carry_on(open_at: OpenAt, partial: Partial, report: Report) -> None:
    held, mark = partial.held(), partial.mark()
    if not held or held != mark.size:  # else a process died between the last byte and the name
        with open_at(held, mark) as remote:
            partial.begin(remote)
            held, mark = remote.offset, remote.mark
            report(held, mark.size)
            with partial.path.open("ab") as stream:
                for piece in remote.pieces:
                    stream.write(piece)
                    held += len(piece)
                    report(held, mark.size)
    if mark.size is not None and held != mark.size:
        if held > mark.size:
            partial.discard()
        raise Broken(f"{held} of {mark.size} bytes came")
    partial.finish()


def root_cause(error: BaseException) -> str:
    """The first line of the error that all others were raised from: libraries wrap one in another."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def open_store(uri: str) -> Iterator[Path]:
    """Take the scratch folder in which what ``uri`` names is gathered; other processes wait for it."""
    store = _store_of(uri)
    store.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(store.with_suffix(".lock")):
        yield store


def forget(uri: str) -> None:
    """Remove what was gathered for ``uri``: it is where it belongs, or is of no use."""
    if _store_of(uri).exists():
        with open_store(uri) as store:
            shutil.rmtree(store, ignore_errors=True)


def _store_of(uri: str) -> Path:
    return scratch_root() / "downloads" / fingerprint(uri)[:16]
