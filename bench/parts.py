"""A benchmark on a GPU in parts, each in a process of its own: what one leaves on the device is no other's."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Part = Callable[[], dict[str, Any]]


def run(
    script: str,
    parts: dict[str, Part],
    chosen: list[str],
    about: dict[str, Any],
    paths: dict[str, str],
    compared: Callable[[dict[str, Any]], dict[str, Any]] = lambda found: {},
) -> None:
    """The script's main: ``OUT.json [part ...]`` runs parts, ``--part NAME OUT.json`` one of them in this process.

    A part that fails leaves its findings out; the report is written after each.

    Args:
        chosen: parts to run where none is named.
        about: what the report says beside commit, hardware and versions.
        paths: for each part that may see it, the environment variable that names a folder of packages.
        compared: what follows from all that was found so far.
    """
    if sys.argv[1] == "--part":
        Path(sys.argv[3]).write_text(json.dumps(parts[sys.argv[2]]()), encoding="utf-8")
        return
    from foredraft.provenance import commit, versions

    out, failed = Path(sys.argv[1]), []
    report: dict[str, Any] = {
        "commit": os.environ.get("COMMIT") or commit(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {**versions(), "triton": __import__("triton").__version__},
        **about,
    }
    for name in sys.argv[2:] or chosen:
        start = time.perf_counter()
        result = out.with_suffix(f".{name}.json")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["PYTHONPATH"] = os.environ.get(paths.get(name, ""), "")
        if subprocess.run([sys.executable, script, "--part", name, str(result)], env=environment).returncode:
            failed.append(name)
        else:
            report |= json.loads(result.read_text(encoding="utf-8"))
            report |= compared(report)
        print(name, f"{time.perf_counter() - start:.0f} s", flush=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
