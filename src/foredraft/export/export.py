"""The ``export`` stage: one trained drafter, in the layouts that engines read."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from foredraft.artifacts import ArtifactError, Manifest, open_artifact, publish, require_same_contract
from foredraft.drafter.config import DrafterShape
from foredraft.export.config import ExportConfig
from foredraft.export.speculators import write_speculators
from foredraft.export.transformers import write_transformers
from foredraft.layouts.zlab import read_zlab, write_zlab
from foredraft.target.interface import read_interface

KEPT = ("target", "target_digest", "target_layer_ids", "layer_id_convention", "block_size", "mask_token_id", "thinking")


def export(config: ExportConfig, drafter: Path, target: Path, out: Path) -> None:
    """Write the layouts of ``config`` (z-lab's always) as the artefact ``out``, and read z-lab's back.

    Raises:
        ArtifactError: an input is missing or damaged, or was made for another target.
        ValueError: a layout cannot express the drafter.
    """
    source = open_artifact(drafter, "drafter", "dvc repro train")
    interface = read_interface(target)
    require_same_contract(interface.manifest.contract, source.contract, drafter, "dvc repro train")
    shape = DrafterShape.model_validate_json((drafter / "shape.json").read_text(encoding="utf-8"))
    weights = load_file(drafter / "drafter.safetensors")
    # Only strings are allowed there, and an empty object crashes some readers.
    metadata = {"format": "pt", "foredraft": json.dumps({key: source.contract[key] for key in KEPT})}
    manifest = Manifest("export", contract=source.contract, facts={"best": source.facts["best"]})
    with publish(out, manifest) as folder:
        write_zlab(folder / "zlab", shape, weights, metadata)
        if "speculators" in config.layouts:
            write_speculators(folder / "speculators", shape, weights, interface, metadata)
        if "transformers" in config.layouts:
            write_transformers(folder / "transformers", shape, weights, interface.manifest.facts, metadata)
        check_read_back(folder / "zlab", shape, weights)


def check_read_back(folder: Path, shape: DrafterShape, weights: dict[str, torch.Tensor]) -> None:
    """Compare what was written with what was trained.

    Raises:
        ArtifactError: names the shape or the tensor that came back different.
    """
    drafter = read_zlab(folder, torch.bfloat16)
    if drafter.shape != shape:
        raise ArtifactError(folder, f"reads back as {drafter.shape}, trained as {shape}", "this is a bug")
    for name, tensor in drafter.state_dict().items():
        if not torch.equal(tensor, weights[name].to(torch.bfloat16)):
            raise ArtifactError(folder, f"tensor {name} reads back changed", "this is a bug")
