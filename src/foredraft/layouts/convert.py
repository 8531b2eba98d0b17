"""From one layout to the other: the same tensors to the byte, under the other's config.

usage: python -m foredraft.layouts.convert FROM TO [--target data/target] [--target-layers N]

A folder in z-lab's layout becomes one in that of speculators, with the embeddings and the head of the target's artefact; and
the other way round, where those that travel with the drafter are the target's.
"""

import json
import tempfile
from pathlib import Path

import click
import torch
from torch import Tensor

from foredraft.artifacts import ArtifactError
from foredraft.command import OneLineCommand
from foredraft.drafter.config import DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.layouts.names import served_name
from foredraft.layouts.speculators import (
    DEPTH,
    ENDS,
    MARK,
    read_speculators_shape,
    read_speculators_weights,
    write_speculators,
)
from foredraft.layouts.zlab import METADATA, WEIGHTS, read_config, read_metadata, read_shape, read_weights, write_zlab
from foredraft.target.interface import Interface, read_interface

TARGET = Path("data/target")
OWN_TARGET = "give the drafter's own target (--target)"


def to_speculators(source: Path, out: Path, interface: Interface) -> None:
    """Write z-lab's folder ``source`` as ``out`` in the layout of speculators, for this target.

    Raises:
        ArtifactError: the folder is not z-lab's; its drafter is not for such a target, or by its metadata for another; or it
            taps the last block.
    """
    shape = read_shape(source)
    _require_inner_taps(source, shape)
    metadata = METADATA | read_metadata(source)
    _require_own_target(source, shape, metadata, interface)
    weights = read_weights(source, Drafter(shape).state_dict())
    target = (served_name(interface.manifest.contract["target"]), interface.manifest.facts["architecture"])
    write_speculators(out, shape, weights, (interface.embed_tokens, interface.lm_head), target, metadata)


def to_zlab(source: Path, out: Path, num_target_layers: int | None = None, interface: Interface | None = None) -> None:
    """Write the folder ``source`` of speculators as ``out`` in z-lab's layout.

    Args:
        num_target_layers: where the folder does not say.
        interface: the target, which then must be the drafter's own, with the embeddings and the head that lie in the folder.

    Raises:
        ArtifactError: the folder is not of that layout, does not say how many layers the target has, has embeddings or a
            head of its own, or taps the last block.
    """
    shape = read_speculators_shape(source, num_target_layers)
    _require_inner_taps(source, shape)
    metadata = {key: value for key, value in (METADATA | read_metadata(source)).items() if key != DEPTH}
    weights, lent = read_speculators_weights(source, Drafter(shape))
    if interface is not None:
        _require_own_target(source, shape, metadata, interface)
        _require_lent(source, lent, interface)
    write_zlab(out, shape, weights, metadata)


def _require_inner_taps(source: Path, shape: DrafterShape) -> None:
    if max(shape.target_layer_ids) == shape.num_target_layers - 1:
        told = f"taps the target's last block, {shape.num_target_layers - 1}, which the two layouts read differently"
        raise ArtifactError(source, told, "such a drafter cannot be converted")


def _require_own_target(source: Path, shape: DrafterShape, metadata: dict[str, str], interface: Interface) -> None:
    facts, digest = interface.manifest.facts, interface.manifest.contract.get("target_digest")
    for key, mine, theirs in (
        ("hidden_size", shape.hidden_size, facts["hidden_size"]),
        ("vocab_size", shape.vocab_rows, facts["vocab_rows"]),
        ("num_target_layers", shape.num_target_layers, facts["num_layers"]),
        ("target_digest", _target_digest(source, metadata) or digest, digest),
    ):
        if mine != theirs:
            raise ArtifactError(source, f"{key} is {mine}, the target's {theirs}", OWN_TARGET)


def _target_digest(source: Path, metadata: dict[str, str]) -> str | None:
    """Of the target for which ``export`` wrote the folder; None for drafters of others."""
    try:
        told = json.loads(metadata.get("foredraft", "{}"))
    except ValueError as error:
        raise ArtifactError(source / WEIGHTS, f"foredraft in its metadata is not JSON: {error}", "mend it") from None
    return told.get("target_digest") if isinstance(told, dict) else None


def _require_lent(source: Path, lent: dict[str, Tensor], interface: Interface) -> None:
    theirs = dict(zip(ENDS, (interface.embed_tokens, interface.lm_head), strict=True))
    for name, tensor in lent.items():
        if not torch.equal(tensor, theirs[name].to(tensor.dtype)):
            told = f"has embeddings or a head of its own, which would be lost: {name} is not the target's"
            raise ArtifactError(source / WEIGHTS, told, OWN_TARGET)


def _likely_target(source: Path) -> Interface | None:
    """This project's target, where it may be the drafter's by its sizes; a drafter from elsewhere has another."""
    if not TARGET.exists():
        return None
    interface, layers = read_interface(TARGET), read_config(source).get("transformer_layer_config") or {}
    sizes = {
        "hidden_size": interface.manifest.facts["hidden_size"],
        "vocab_size": interface.manifest.facts["vocab_rows"],
    }
    return interface if all(layers.get(key) == size for key, size in sizes.items()) else None


@click.command(cls=OneLineCommand)
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    help=f"Artefact of the drafter's target: its embeddings and head go in, or must be those in SOURCE. [default: {TARGET}; "
    "towards z-lab's layout only where that has the drafter's sizes]",
)
@click.option("--target-layers", type=int, help="Of a foreign folder of speculators, which does not say.")
def main(source: Path, out: Path, target: Path | None, target_layers: int | None) -> None:
    """Convert the drafter in SOURCE to the other layout, in the new folder OUT."""
    if out.exists():
        raise ValueError(f"{out} exists")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(dir=above) as name:
        built = Path(name) / "drafter"
        _convert(source, built, target, target_layers)
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        built.rename(out)
    click.echo(f"{out}: the layout of {'speculators' if MARK in read_config(out) else 'z-lab'}")


def _convert(source: Path, out: Path, target: Path | None, target_layers: int | None) -> None:
    if MARK in read_config(source):
        return to_zlab(source, out, target_layers, read_interface(target) if target else _likely_target(source))
    if target_layers is not None:
        told = f"num_target_layers is {read_shape(source).num_target_layers} there"
        raise ArtifactError(source, f"is in z-lab's layout, and {told}", f"leave --target-layers {target_layers} out")
    return to_speculators(source, out, read_interface(target or TARGET))


if __name__ == "__main__":
    main()
