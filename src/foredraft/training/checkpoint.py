"""Checkpoints: a folder that is complete or absent."""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from foredraft.drafter.model import Drafter

NAME = "checkpoint"


@dataclass
class Progressed:
    """How far a run is: steps done, steps skipped, the best validation and the last, and a record of each step."""

    step: int = 0
    skipped: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)


def save_checkpoint(
    folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, progressed: Progressed, identity: dict[str, Any]
) -> None:
    """Replace the checkpoint of the work folder; the old one is there until the new one is whole.

    Args:
        identity: what a run must share with this one to go on from here; plain values.
    """
    building = folder / f"{NAME}-{progressed.step:08d}.tmp"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    save_file(drafter.state_dict(), building / "drafter.safetensors")
    state = optimizer.state_dict()["state"]
    moments = {f"{index}.{key}": value for index, entry in state.items() for key, value in entry.items()}
    save_file(moments, building / "optimizer.safetensors")
    state_of_run = {"identity": identity, "progressed": asdict(progressed)}
    (building / "state.json").write_text(json.dumps(state_of_run), encoding="utf-8")
    for path in building.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    building.rename(building.with_suffix(""))
    for old in checkpoints(folder)[:-1]:
        shutil.rmtree(old)


def load_checkpoint(
    folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> Progressed:
    """Restore the newest complete checkpoint, exactly; without one, the start.

    Raises:
        ValueError: it is of another run; names what differs, with both values.
    """
    found = checkpoints(folder)
    if not found:
        return Progressed()
    told = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))
    for key, mine in identity.items():
        if (theirs := told["identity"].get(key)) != mine:
            raise ValueError(
                f"{found[-1]} was made with {key} = {theirs!r}, this run has {mine!r}: it cannot go on from there"
            )
    drafter.load_state_dict(load_file(found[-1] / "drafter.safetensors"))
    state: dict[int, dict[str, Any]] = {}
    for name, value in load_file(found[-1] / "optimizer.safetensors").items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return Progressed(**told["progressed"])


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{NAME}-*") if path.suffix != ".tmp")
