"""Rows whose loss or gradient was not finite, and the weights at that moment: kept, and run again.

usage: python -m foredraft.training.replay FOLDER [--target data/target]
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.command import OneLineCommand
from foredraft.drafter.blocks import Blocks
from foredraft.drafter.config import DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.target.interface import read_interface
from foredraft.training.config import TrainConfig
from foredraft.training.data import Row
from foredraft.training.learner import Learner
from foredraft.training.objective import Head
from foredraft.training.ranks import Ranks


def keep_for_replay(folder: Path, learner: Learner, rows: list[Row]) -> None:
    """Write the weights, which the step did not change, and this process's rows of it."""
    folder.mkdir(exist_ok=True)
    save_file(learner.weights(), folder / "drafter.safetensors")
    plain = []
    for number, row in enumerate(rows):
        parts = {**vars(row), **{f"blocks.{key}": value for key, value in vars(row.blocks).items()}}
        tensors = {key: value.contiguous().cpu() for key, value in parts.items() if isinstance(value, Tensor)}
        save_file(tensors, folder / f"row-{number}.safetensors")
        plain.append({"names": row.names, "bounds": row.bounds, "count": row.count, "counts": row.counts})
    described = {
        "config": learner.config.model_dump(mode="json"),
        "shape": learner.drafter.shape.model_dump(mode="json"),
        "rows": plain,
    }
    (folder / "step.json").write_text(json.dumps(described, indent=1), encoding="utf-8")


def read_row(path: Path, plain: dict[str, Any]) -> Row:
    """One row as it was kept."""
    tensors: dict[str, Any] = load_file(path)
    blocks = Blocks(**{field.name: tensors.pop(f"blocks.{field.name}") for field in fields(Blocks)})
    return Row(**plain, **tensors, blocks=blocks)


@click.command(cls=OneLineCommand)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--target", type=click.Path(path_type=Path), default=Path("data/target"), show_default=True)
def main(folder: Path, target: Path) -> None:
    """Run the rows kept in FOLDER again, one by one, with the whole head: losses, and what is not finite."""
    described = json.loads((folder / "step.json").read_text(encoding="utf-8"))
    config = TrainConfig.model_validate_json(json.dumps(described["config"]))
    drafter = Drafter(DrafterShape.model_validate_json(json.dumps(described["shape"])))
    drafter.load_state_dict(load_file(folder / "drafter.safetensors"))
    interface = read_interface(target)
    mask = interface.embed_tokens[config.drafter.mask_token_id]
    learner = Learner(config, drafter, Head.build(interface.lm_head), mask, Ranks(torch.device("cpu")))
    for number, plain in enumerate(described["rows"]):
        row = read_row(folder / f"row-{number}.safetensors", plain)
        drafter.zero_grad(set_to_none=True)
        outcome = learner.run(row, learner.head)
        outcome.loss.backward()
        print(f"row {number}: {', '.join(row.names)}")
        print(f"  states: {_told(row.target_hidden)}; embeddings: {_told(row.embedded)}; mask token's: {_told(mask)}")
        print(f"  loss {float(outcome.loss.detach()):.6g} over weight {float(outcome.weight):.6g}")
        for name, parameter in drafter.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                print(f"  gradient of {name}: {_told(parameter.grad)}")


def _told(tensor: Tensor) -> str:
    wrong = int((~tensor.isfinite()).sum())
    return f"{wrong} of {tensor.numel()} not finite" if wrong else f"finite, largest {float(tensor.abs().max()):.4g}"


if __name__ == "__main__":
    main()
