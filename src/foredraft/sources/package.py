"""A wheel out of a package index, by pip with the user's own configuration."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from foredraft.progress import Progress
from foredraft.sources.config import FetchConfig
from foredraft.sources.transfer import Broken, with_retries

RAW_PROGRESS = (24, 1)  # the first pip that tells its progress to programs
RESUMES = (25, 1)  # the first that goes on with a wheel that broke off


def pip_download(requirement: str, config: FetchConfig, folder: Path) -> None:
    """Download the wheel of ``requirement`` (``name==version``) into ``folder``.

    Raises:
        ValueError: pip is not there, or cannot have the wheel; says why in one line.
    """
    try:
        pip = tuple(int(part) for part in version("pip").split(".")[:2])
    except PackageNotFoundError:
        raise ValueError(
            f"cannot download {requirement}: this environment has no pip; try {sys.executable} -m ensurepip"
        ) from None
    name = requirement.partition("==")[0]
    shown = f"fetch-{name}" if pip >= RAW_PROGRESS else None
    if not shown:
        print(f"downloading {requirement} (pip {version('pip')} shows no progress, 24.1 does)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [f"--timeout={config.stall_seconds}", f"--retries={config.retries}"]
    command += [f"--resume-retries={config.retries}"] if pip >= RESUMES else []
    command += [f"--progress-bar={'raw' if shown else 'off'}", "--dest", str(folder), requirement]
    try:
        with_retries(lambda: _run(command, shown), config)
    except Broken as error:
        raise _failure(requirement, str(error)) from error


def _failure(requirement: str, reason: str) -> ValueError:
    return ValueError(
        f"cannot download {requirement} from the package index that pip is configured with ({reason}); "
        "check the network and `pip config list`"
    )


def _run(command: list[str], shown: str | None) -> None:
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, errors="replace") as process,
    ):
        try:
            if shown and process.stdout:
                _show(process.stdout, shown)
            process.communicate()
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            complaints.seek(0)
            _complain(command[-1], complaints.read().splitlines())


def _show(lines: Iterable[str], name: str) -> None:
    with Progress(name, None, "B") as progress:
        for line in lines:
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                progress.reach(int(found[1]), int(found[2]) or None)


def _complain(requirement: str, lines: list[str]) -> None:
    reason = _reason([line.strip() for line in lines if line.strip() and not line.startswith("[notice]")])
    if reason.startswith("No matching distribution"):  # the index is not there, or has no such wheel
        raise _failure(requirement, reason)
    raise Broken(reason)


def _reason(lines: list[str]) -> str:
    """The line that says why: newer errors of pip have it behind a cross, and a traceback at its end."""
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") and line[-1] != ":"]
    cross = "\N{MULTIPLICATION SIGN} "
    crosses = [line.removeprefix(cross) for line in lines if line.startswith(cross)]
    return (errors or crosses or lines or ["pip gave no reason"])[-1]
