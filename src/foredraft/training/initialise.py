"""Where a drafter starts from."""

from pathlib import Path

import torch
from torch import Tensor

from foredraft.drafter.model import Drafter, initialise_random
from foredraft.layouts.read import read_drafter
from foredraft.target.interface import Interface


@torch.no_grad()
def initialise(drafter: Drafter, start: str, interface: Interface, generator: torch.Generator) -> None:
    """Fill ``drafter`` at random, from the target, or from a drafter's folder, in z-lab's layout or speculators'.

    From the target: layer i is the target's layer of the same rank from the end, where names and shapes agree; ``fc``
    copies the last tap; ``norm`` is the target's final norm, ``hidden_norm`` the input norm of the last layer, since both
    stand before key and value projections. q/k norms that the target lacks stay 1.

    Raises:
        ValueError: ``start`` is ``target`` and too few layers are kept, or their shapes are others; or it is a folder whose
            drafter has another shape.
        ArtifactError: ``start`` is a folder without a drafter, or with a tensor too few or too many.
    """
    initialise_random(drafter, generator)
    if start == "random":
        return
    if start != "target":
        _warm_start(drafter, Path(start))
        return
    kept = sorted({int(name.split(".")[1]) for name in interface.layers})
    wanted = drafter.shape.choice.num_layers
    if len(kept) < wanted:
        raise ValueError(
            f"train.start = target needs {wanted} kept layers, data/target has {len(kept)}: raise target.kept_layers"
        )
    state = drafter.state_dict()
    for index, source in enumerate(kept[-wanted:]):
        for name, tensor in _layer(interface.layers, source).items():
            _copy(state, f"layers.{index}.{name}", tensor)
        last_input_norm = interface.layers[f"layers.{source}.input_layernorm.weight"]
    taps = len(drafter.shape.target_layer_ids)
    hidden = drafter.shape.hidden_size
    state["fc.weight"].zero_()
    state["fc.weight"][:, (taps - 1) * hidden :].copy_(torch.eye(hidden))
    state["hidden_norm.weight"].copy_(last_input_norm)
    state["norm.weight"].copy_(interface.norm)


def _warm_start(drafter: Drafter, folder: Path) -> None:
    other = read_drafter(folder, torch.float32, drafter.shape.num_target_layers)
    mine, theirs = (d.shape.model_dump() | d.shape.choice.model_dump() for d in (drafter, other))
    for key in sorted(mine.keys() - {"choice"}):
        if mine[key] != theirs[key]:
            raise ValueError(f"train.start = {folder}: its {key} is {theirs[key]}, this run's {mine[key]}")
    drafter.load_state_dict(other.state_dict())


def _layer(layers: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in layers.items() if name.startswith(prefix)}


def _copy(state: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    if name not in state or state[name].shape != tensor.shape:
        found = tuple(state[name].shape) if name in state else "no such tensor"
        raise ValueError(
            f"train.start = target: the target's {name} is {tuple(tensor.shape)}, the drafter's {found}: "
            "give train.drafter the target's head and ffn sizes, or start at random"
        )
    state[name].copy_(tensor)
