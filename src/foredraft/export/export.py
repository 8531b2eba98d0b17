"""The ``export`` stage: one trained drafter, in the layouts that engines read."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from foredraft.artifacts import ArtifactError, Manifest, open_artifact, publish, require_same_contract
from foredraft.drafter.config import DrafterShape, require_free_mask
from foredraft.drafter.model import Drafter
from foredraft.export.check import check_layouts
from foredraft.export.config import ExportConfig
from foredraft.layouts.names import served_name
from foredraft.layouts.read import read_drafter
from foredraft.layouts.speculators import write_speculators
from foredraft.layouts.transformers import write_transformers
from foredraft.layouts.zlab import METADATA, as_stored, write_zlab
from foredraft.target.frozen import require_inner_taps
from foredraft.target.interface import read_interface

KEPT = ("target", "target_digest", "target_layer_ids", "layer_id_convention", "block_size", "mask_token_id", "thinking")


def export(config: ExportConfig, drafter: Path, target: Path, out: Path) -> None:
    """Write the layouts of ``config`` (z-lab's always) as the artefact ``out``, and read them back as engines do.

    Raises:
        ArtifactError: an input is missing or damaged, or was made for another target; or what was written is not what was
            trained.
        ValueError: a layout cannot express the drafter, it taps the target's last block, or the mask token is one that the
            target uses.
    """
    source = open_artifact(drafter, "drafter", "dvc repro train")
    interface = read_interface(target)
    require_same_contract(interface.manifest.contract, source.contract, drafter, "dvc repro train")
    shape = DrafterShape.model_validate_json((drafter / "shape.json").read_text(encoding="utf-8"))
    require_inner_taps(shape.target_layer_ids, shape.num_target_layers)
    require_free_mask(shape.choice.mask_token_id, interface.manifest.facts)
    weights = as_stored(load_file(drafter / "drafter.safetensors"))
    sample = load_file(drafter / "sample.safetensors")
    metadata = METADATA | {"foredraft": json.dumps({key: source.contract[key] for key in KEPT})}
    manifest = Manifest("export", contract=source.contract, facts={"best": source.facts["best"]})
    layouts = sorted({"zlab", *config.layouts})
    with publish(out, manifest) as folder:
        write_zlab(folder / "zlab", shape, weights, metadata)
        if "speculators" in layouts:
            ends = (interface.embed_tokens, interface.lm_head)
            verifier = (served_name(interface.manifest.contract["target"]), interface.manifest.facts["architecture"])
            write_speculators(folder / "speculators", shape, weights, ends, verifier, metadata)
        if "transformers" in layouts:
            write_transformers(folder / "transformers", shape, weights, interface.manifest.facts, metadata)
        for layout in sorted({"zlab", "speculators"} & set(layouts)):
            require_equal(folder / layout, shape, weights)
        trained = Drafter(shape)
        trained.load_state_dict(weights)
        check_layouts(folder, layouts, trained.eval(), interface, sample)


def require_equal(folder: Path, shape: DrafterShape, weights: dict[str, torch.Tensor]) -> None:
    """Compare what was written with what was trained, to the bit.

    Raises:
        ArtifactError: names the shape or the tensor that came back different.
    """
    drafter = read_drafter(folder, torch.bfloat16)
    if drafter.shape != shape:
        raise ArtifactError(folder, f"reads back as {drafter.shape}, trained as {shape}", "this is a bug")
    for name, tensor in drafter.state_dict().items():
        if not torch.equal(tensor, weights[name]):
            raise ArtifactError(folder, f"tensor {name} reads back changed", "this is a bug")
