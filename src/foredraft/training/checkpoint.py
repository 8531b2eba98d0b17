"""Checkpoints: a folder that is complete or absent."""

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.artifacts import file_digest

NAME = "checkpoint"
STATE = "state.json"


@dataclass
class Progressed:
    """How far a run is: steps done, steps skipped, the best validation and the last, and a record of each step."""

    step: int = 0
    skipped: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)


State = dict[str, dict[str, Tensor]]


def save_checkpoint(folder: Path, state: State, progressed: Progressed, identity: dict[str, Any]) -> None:
    """Replace the checkpoint of the work folder; the old one is there until the new one is whole.

    Args:
        state: what each file holds.
        identity: what a run must share with this one to go on from here; plain values.
    """
    building = folder / f"{NAME}-{progressed.step:08d}.tmp"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    for name, tensors in state.items():
        save_file(tensors, building / f"{name}.safetensors")
    digests = {path.name: file_digest(path) for path in building.iterdir()}
    state_of_run = {"identity": identity, "progressed": asdict(progressed), "files": digests}
    (building / STATE).write_text(json.dumps(state_of_run), encoding="utf-8")
    for path in building.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    built = building.with_suffix("")
    if built.exists():
        shutil.rmtree(built)  # a damaged one, that was not gone on from
    building.rename(built)
    for other in checkpoints(folder):
        if other != built:
            shutil.rmtree(other)


def load_checkpoint(folder: Path, identity: dict[str, Any]) -> tuple[Progressed, State]:
    """The newest checkpoint that is as it was written; where there is no checkpoint, the start and nothing.

    Raises:
        ValueError: all are damaged; or it is of another run: names what differs, with both values.
    """
    found = checkpoints(folder)
    for checkpoint in reversed(found):
        told = read_state(checkpoint)
        if told is None:
            print(f"train: {checkpoint} is damaged, and not gone on from", file=sys.stderr)
            continue
        for key, mine in identity.items():
            if (theirs := told["identity"].get(key)) != mine:
                raise ValueError(
                    f"{checkpoint} was made with {key} = {theirs!r}, this run has {mine!r}: it cannot go on from there"
                )
        tensors = {Path(name).stem: load_file(checkpoint / name) for name in told["files"]}
        return Progressed(**told["progressed"]), tensors
    if found:
        raise ValueError(f"{found[-1]} is damaged, and there is no other: delete {folder} to train from the start")
    return Progressed(), {}


def read_state(checkpoint: Path) -> dict[str, Any] | None:
    """The state in a checkpoint; None if a file of it is missing or is not what was written."""
    try:
        told: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        whole = all(file_digest(checkpoint / name) == digest for name, digest in told["files"].items())
    except (FileNotFoundError, ValueError, KeyError):
        return None
    return told if whole else None


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{NAME}-*") if path.suffix != ".tmp")
