"""From one layout to the other: the same tensors to the byte, under the other's config.

usage: python -m foredraft.layouts.convert FROM TO [--target data/target] [--target-layers N]

A folder in z-lab's layout becomes one in that of speculators, with the embeddings and the head of the target's artefact; and
the other way round.
"""

import tempfile
from pathlib import Path

import click

from foredraft.artifacts import ArtifactError
from foredraft.command import OneLineCommand
from foredraft.drafter.model import Drafter
from foredraft.layouts.names import served_name
from foredraft.layouts.read import read_drafter_shape
from foredraft.layouts.speculators import ENDS, MARK, described, write_speculators
from foredraft.layouts.zlab import read_config, read_weights, write_zlab
from foredraft.target.interface import Interface, read_interface


def to_speculators(source: Path, out: Path, interface: Interface) -> None:
    """Write z-lab's folder ``source`` as ``out`` in the layout of speculators, for this target.

    Raises:
        ArtifactError: the folder is not z-lab's, or its drafter is not for such a target.
    """
    shape = read_drafter_shape(source)
    facts = interface.manifest.facts
    for key, mine, theirs in (
        ("hidden_size", shape.hidden_size, facts["hidden_size"]),
        ("vocab_size", shape.vocab_rows, facts["vocab_rows"]),
        ("num_target_layers", shape.num_target_layers, facts["num_layers"]),
    ):
        if mine != theirs:
            raise ArtifactError(source, f"{key} is {mine}, the target's {theirs}", "give the drafter's own target")
    weights = read_weights(source, Drafter(shape).state_dict())
    target = (served_name(interface.manifest.contract["target"]), facts["architecture"])
    write_speculators(out, shape, weights, (interface.embed_tokens, interface.lm_head), target, described(source))


def to_zlab(source: Path, out: Path, num_target_layers: int | None = None) -> None:
    """Write the folder ``source`` of speculators as ``out`` in z-lab's layout.

    Raises:
        ArtifactError: the folder is not of that layout, or does not say how many layers the target has.
    """
    shape = read_drafter_shape(source, num_target_layers)
    weights = read_weights(source, Drafter(shape).state_dict(), also=ENDS)
    write_zlab(out, shape, weights, described(source))


@click.command(cls=OneLineCommand)
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--target", type=click.Path(path_type=Path), default=Path("data/target"), show_default=True)
@click.option("--target-layers", type=int, help="Of a foreign folder of speculators, which does not say.")
def main(source: Path, out: Path, target: Path, target_layers: int | None) -> None:
    """Convert the drafter in SOURCE to the other layout, in the new folder OUT."""
    if out.exists():
        raise ValueError(f"{out} exists")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent) as name:
        built = Path(name) / "drafter"
        if MARK in read_config(source):
            to_zlab(source, built, target_layers)
        else:
            to_speculators(source, built, read_interface(target))
        built.rename(out)
    click.echo(f"{out}: the layout of {'speculators' if MARK in read_config(out) else 'z-lab'}")


if __name__ == "__main__":
    main()
