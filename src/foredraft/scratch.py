"""Resumable work folders, keyed by a fingerprint, outside every DVC output.

DVC deletes a stage's outputs before it runs the stage, so what a killed stage had finished must live elsewhere:
``$FOREDRAFT_SCRATCH/<stage>/<fingerprint>/``. The fingerprint covers params, input digests and code, so work done under
other params can never be taken up by mistake, and is found again when the params come back.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from foredraft.artifacts import Manifest, file_digest, fingerprint, publish, write_atomic
from foredraft.imports import ROOT, import_closure


def scratch_root() -> Path:
    """``$FOREDRAFT_SCRATCH``, by default ``.scratch`` in the repository.

    ``dvc exp run --temp`` works in a copy under ``.dvc/tmp`` that it deletes: the copy shares its repository's scratch.
    """
    owner = next((folder.parent for folder in ROOT.parents if folder.name == ".dvc"), ROOT)
    return Path(os.environ.get("FOREDRAFT_SCRATCH", owner / ".scratch")).resolve()


def work_fingerprint(script: str, params: dict[str, Any], inputs: dict[str, Manifest]) -> str:
    """Fingerprint of a stage's work: its params, its inputs' content and the code it imports."""
    closure = import_closure(ROOT / "stages" / f"{script}.py")
    return fingerprint(
        {
            "params": params,
            "inputs": {name: manifest.fingerprint for name, manifest in inputs.items()},
            "code": {str(path.relative_to(ROOT)): file_digest(path) for path in closure},
        }
    )


@dataclass(frozen=True)
class Scratch:
    """A work folder. What has its final name in it is complete, and has its digest beside it.

    Published files are hard links, so one that was overwritten in place is damaged here as well. A file of the size and time
    that it had when it was finished is taken for good; of any other its digest tells.
    """

    path: Path

    def has(self, name: str) -> bool:
        """Whether ``name`` was finished, by this run or an earlier one, and is as it was then."""
        path, seal = self.path / name, self._read_seal(name)
        if seal is None or not path.is_file():
            return False
        return seal.stamp == _stamp(path) or seal.sha256 == file_digest(path)

    def write(self, name: str, writer: Callable[[Path], object]) -> Path:
        """Let ``writer`` write a temporary file, make it durable, and give it its name."""
        writer(self.partial(name))
        return self.finish(name, file_digest(self.partial(name)))

    def partial(self, name: str) -> Path:
        """Where ``name`` is written until :meth:`finish`."""
        return self.path / f"{name}.tmp"

    def finish(self, name: str, sha256: str) -> Path:
        """Make what was written for ``name`` durable, and give it its name."""
        partial, final = self.partial(name), self.path / name
        with partial.open("rb") as stream:
            os.fsync(stream.fileno())
        # The seal first: what has its name is finished, whenever the process dies.
        write_atomic(self._seal(name), json.dumps({"sha256": sha256, "stamp": _stamp(partial)}))
        partial.replace(final)
        return final

    def publish(self, out: Path, manifest: Manifest, names: list[str]) -> None:
        """Hard-link finished files into ``out`` (a copy only across file systems), sealed with ``manifest``.

        Raises:
            ValueError: a file was changed after it was finished.
        """
        if changed := [name for name in names if not self.has(name)]:
            raise ValueError(
                f"{self.path / changed[0]}: changed after it was finished; run make gc-scratch and try again"
            )
        digests = {name: seal.sha256 for name in names if (seal := self._read_seal(name))}
        with publish(out, manifest, digests) as building:
            for name in names:
                link(self.path / name, building / name)

    def _seal(self, name: str) -> Path:
        return self.path / f"{name}.seal"

    def _read_seal(self, name: str) -> "Seal | None":
        try:
            return Seal(**json.loads(self._seal(name).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None  # absent, or damaged: what it would speak for is made again


@dataclass(frozen=True)
class Seal:
    """SHA-256 of a finished file, and the size and time that it had."""

    sha256: str
    stamp: list[int]


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


@contextmanager
def open_scratch(stage: str, key: str, shared: bool = False) -> Iterator[Scratch]:
    """Take the work folder of ``stage`` (such as ``extract-code``) under fingerprint ``key``, for this process alone.

    Args:
        shared: use it beside the process that has taken it, which is asked to share it.

    Raises:
        ValueError: another live process holds it. A killed process holds nothing: the lock dies with it.
    """
    path = scratch_root() / stage / key[:16]
    path.mkdir(parents=True, exist_ok=True)
    if shared:
        yield Scratch(path)
        return
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"{path} is being written by another process; wait for it, or stop it") from None
    try:
        for partial in path.glob("*.tmp"):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
        yield Scratch(path)
    finally:
        lock.release()


def link(source: Path, target: Path) -> Path:
    """Give a file a second name (a copy only across file systems); returns ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target
