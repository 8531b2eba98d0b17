"""``make lock``: ``pyproject.toml`` -> ``requirements.lock``. On the standard library alone: the environment is empty."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HEADER = """\
# What `make venv` installs, resolved from pyproject.toml by `make lock`; do not edit.
# What torch needs on a GPU build alone (nvidia-*, triton) is left to pip, so that one file serves both builds.
"""
OF_ONE_BUILD = ("nvidia-", "triton", "cuda-")
OF_EVERY_BUILD = ("nvidia-ml-py",)  # Python alone; DVCLive wants it


def requirements() -> list[str]:
    """What the project and its developers ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["dev"]]


def freeze() -> str:
    """The environment as a lock file, without local version labels such as ``+cpu``."""
    frozen = subprocess.run([sys.executable, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    lines = [line.split("+")[0] for line in frozen.splitlines() if is_locked(line)]
    return HEADER + "\n".join(lines) + "\n"


def is_locked(line: str) -> bool:
    """Whether a line of ``pip freeze`` belongs into the lock file."""
    return line.startswith(OF_EVERY_BUILD) or not line.startswith(OF_ONE_BUILD)


if __name__ == "__main__":
    if sys.argv[1:] == ["requirements"]:
        print("\n".join(requirements()))
    else:
        (ROOT / "requirements.lock").write_text(freeze(), encoding="utf-8")
