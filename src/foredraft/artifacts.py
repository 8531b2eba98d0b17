"""Artefacts on disk: folders that are complete or absent, each with a manifest written last.

DVC takes a partly pulled folder for a good one, so the manifest is the guard: every reader opens an artefact
through :func:`open_artifact`, which compares names, sizes and (where it is cheap) digests before a byte is used.

A manifest holds nothing of *when* and *where* (see :mod:`foredraft.provenance`): equal content gives an equal manifest,
so a stage that was rerun for a comment leaves the stages after it alone.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


class ArtifactError(Exception):
    """An artefact is missing, damaged, or belongs to another run; says what to rerun."""

    def __init__(self, path: Path, problem: str, rerun: str):
        super().__init__(f"{path}: {problem}; {rerun}")


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass
class Manifest:
    """What a complete artefact holds.

    ``counts`` obeys ``rows_in == rows_out + sum(skipped)`` where a stage works on rows; ``facts`` is what its own
    reader needs (document offsets, architecture, ...); ``contract`` is compared on every hand-over.
    """

    kind: str
    contract: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    version: int = MANIFEST_VERSION

    @property
    def fingerprint(self) -> str:
        """Digest of the content: equal data under an equal contract have an equal fingerprint."""
        return fingerprint(self._body())

    def _body(self) -> dict[str, Any]:
        files = {name: {"size": f.size, "sha256": f.sha256} for name, f in sorted(self.files.items())}
        return {
            "kind": self.kind,
            "version": self.version,
            "contract": self.contract,
            "counts": self.counts,
            "facts": self.facts,
            "files": files,
        }

    def to_json(self) -> str:
        """Serialise, with the fingerprint for people and for the monitor."""
        return json.dumps({"fingerprint": self.fingerprint, **self._body()}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse :meth:`to_json`.

        Raises:
            ValueError: not a manifest, or its fingerprint does not match its content.
        """
        body = json.loads(text)
        try:
            claimed = body.pop("fingerprint")
            manifest = cls(**{**body, "files": {name: FileRecord(**f) for name, f in body["files"].items()}})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a manifest ({error!r})") from error
        if manifest.fingerprint != claimed:
            raise ValueError(
                f"fingerprint {str(claimed)[:12]} does not match the content ({manifest.fingerprint[:12]})"
            )
        return manifest


def fingerprint(content: Any) -> str:
    """SHA-256 of the canonical JSON of ``content``."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a small file so that a reader sees the old bytes or the new ones, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with partial.open("wb") as stream:
        stream.write(content.encode("utf-8") if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as indented JSON, atomically."""
    write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def publish(out: Path, manifest: Manifest, digests: dict[str, str] | None = None) -> Iterator[Path]:
    """Yield an empty folder; on a clean exit seal it with ``manifest`` and rename it to ``out``.

    ``manifest.files`` is filled here; files whose SHA-256 stands in ``digests`` are not read for it. After an exception
    nothing of the folder remains, and ``out`` is as it was.

    Raises:
        ArtifactError: ``out`` is not ours to replace.
    """
    require_replaceable(out)
    building = out.with_name(f".{out.name}.new")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        known = {building / name: digest for name, digest in (digests or {}).items()}
        paths = sorted(path for path in building.rglob("*") if path.is_file())
        manifest.files = {
            str(path.relative_to(building)): FileRecord(path.stat().st_size, known.get(path) or file_digest(path))
            for path in paths
        }
        write_atomic(building / MANIFEST, manifest.to_json())
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)
    building.rename(out)


def require_replaceable(out: Path) -> None:
    """Refuse to write over what no stage wrote.

    Raises:
        ArtifactError: ``out`` is a file or a link, or a folder that holds files and no manifest.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ArtifactError(out, "expected a folder, found a file or a link", "name another")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).exists():
        raise ArtifactError(
            out, f"holds files, and no {MANIFEST}: it was not written by a stage", "move it away, or name another"
        )


def open_artifact(path: Path, kind: str, rerun: str, digests: bool = True) -> Manifest:
    """Verify the artefact at ``path`` and return its manifest.

    Args:
        kind: what the caller expects it to be, such as ``features``.
        rerun: what brings it back, for the message, such as ``dvc repro extract@code``.
        digests: compare SHA-256 as well as names and sizes; turn off for terabytes.

    Raises:
        ArtifactError: absent, of another kind, a file missing, of another size or content.
    """
    remedy = f"rerun or pull it: {rerun}"
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = "it does not exist" if not path.exists() else f"it has no {MANIFEST}, so it is not complete"
        raise ArtifactError(path, f"expected {kind}, but {found}", remedy) from None
    except (ValueError, OSError) as error:
        raise ArtifactError(path / MANIFEST, str(error), remedy) from error
    if (manifest.kind, manifest.version) != (kind, MANIFEST_VERSION):
        found = f"{manifest.kind} version {manifest.version}"
        raise ArtifactError(path, f"expected {kind} version {MANIFEST_VERSION}, found {found}", remedy)
    for name, record in manifest.files.items():
        _verify(path / name, record, remedy, digests)
    return manifest


def _verify(path: Path, record: FileRecord, remedy: str, digests: bool) -> None:
    if not path.is_file():
        raise ArtifactError(path, "file is missing (a partly pulled folder?)", remedy)
    size = path.stat().st_size
    if size != record.size:
        raise ArtifactError(path, f"expected {record.size} bytes, found {size} (cut off?)", remedy)
    if digests and (found := file_digest(path)) != record.sha256:
        raise ArtifactError(path, f"expected sha256 {record.sha256[:12]}, found {found[:12]}", remedy)


def require_same_contract(mine: dict[str, Any], theirs: dict[str, Any], path: Path, rerun: str) -> None:
    """Compare the keys that both contracts hold.

    Raises:
        ArtifactError: names the first key that differs, with both values.
    """
    for key in sorted(mine.keys() & theirs.keys()):
        if mine[key] != theirs[key]:
            raise ArtifactError(
                path, f"contract: expected {key} = {mine[key]!r}, found {theirs[key]!r}", f"rerun: {rerun}"
            )
