"""Stands in for `python` in a pipeline: a stage's outputs are digests of its inputs and params, made in no time.

DVC decides what runs by deps, params and outs; what a stage computes does not matter to it, only whether it changed.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

OUTPUTS = {"--out", "--metrics", "--plot", "--live"}


def main(arguments: list[str]) -> None:
    """``-m stages.<word> [source] --flag path ...`` as dvc.yaml has it."""
    word = arguments[1].removeprefix("stages.")
    given = arguments[2:]
    source = given.pop(0) if not given[0].startswith("--") else ""
    paths = dict(zip(given[::2], map(Path, given[1::2]), strict=True))
    seen = hashlib.sha256(f"{word} {source} {params_of(word, source)}".encode())
    for flag, path in paths.items():
        if flag not in OUTPUTS:
            for file in sorted(path.rglob("*") if path.is_dir() else [path]):
                seen.update(file.read_bytes() if file.is_file() else b"")
    for flag, path in paths.items():
        if flag in OUTPUTS:
            if flag in ("--out", "--live"):
                path.mkdir(parents=True, exist_ok=True)
                path /= "content"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"digest\n{seen.hexdigest()}\n" if path.suffix == ".csv" else json.dumps(seen.hexdigest()))


def params_of(word: str, source: str) -> list[Any]:
    """Values of the params that dvc.yaml lists for a stage."""
    yaml = YAML(typ="safe")
    params = yaml.load(Path("params.yaml"))
    stage = yaml.load(Path("dvc.yaml"))["stages"][word]
    found = []
    for key in stage["params"]:
        value = params
        for part in re.sub(r"\$\{item\.source\}", source, key).split("."):
            value = value[part]
        found.append(value)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
