"""The record of a run: commit, versions, hardware, duration. Kept beside the artefacts, not in them.

It names a moment and a machine, so it would make equal artefacts unequal (see :mod:`foredraft.artifacts`).
"""

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from foredraft.artifacts import write_json
from foredraft.imports import ROOT

PACKAGES = ("torch", "transformers", "datasets", "safetensors", "tokenizers", "flash-linear-attention", "dvc")


def versions() -> dict[str, str]:
    """Installed versions of the packages that decide numbers."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit, with ``+dirty`` when files differ from it; ``unknown`` outside git.

    What the pipeline itself writes (``dvc.lock``, metrics) does not count.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        edits = git("status", "--porcelain", "--", ".", ":!dvc.lock", ":!metrics")
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if edits else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def recorded(stage: str, folder: Path = ROOT / "data" / ".runs") -> Iterator[None]:
    """Write ``<folder>/<stage>.json`` when the body ends well: what ran, where, for how long, in how much memory."""
    start = time.time()
    yield
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record: dict[str, Any] = {
        "stage": stage,
        "command": sys.argv,
        "commit": commit(),
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": len(os.sched_getaffinity(0))},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start)),
        "seconds": round(time.time() - start, 1),
        "peak_memory_gib": round(peak_kib / 2**20, 2),
    }
    write_json(folder / f"{stage}.json", record)
