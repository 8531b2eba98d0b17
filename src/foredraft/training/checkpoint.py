"""Checkpoints: a folder that is complete or absent."""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

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
    state_of_run = {"identity": identity, "progressed": asdict(progressed)}
    (building / STATE).write_text(json.dumps(state_of_run), encoding="utf-8")
    for path in building.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    building.rename(building.with_suffix(""))
    for old in checkpoints(folder)[:-1]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, identity: dict[str, Any]) -> tuple[Progressed, State]:
    """The newest complete checkpoint; without one, the start and nothing.

    Raises:
        ValueError: it is of another run; names what differs, with both values.
    """
    found = checkpoints(folder)
    if not found:
        return Progressed(), {}
    told = json.loads((found[-1] / STATE).read_text(encoding="utf-8"))
    for key, mine in identity.items():
        if (theirs := told["identity"].get(key)) != mine:
            raise ValueError(
                f"{found[-1]} was made with {key} = {theirs!r}, this run has {mine!r}: it cannot go on from there"
            )
    return Progressed(**told["progressed"]), {
        path.stem: load_file(path) for path in sorted(found[-1].glob("*.safetensors"))
    }


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{NAME}-*") if path.suffix != ".tmp")
