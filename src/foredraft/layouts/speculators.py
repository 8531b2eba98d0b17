"""The layout of vLLM's ``speculators``, which vLLM recognises by itself.

Taps are numbered one higher (``aux_hidden_state_layer_ids`` 0 are the embeddings), drafts are counted without the anchor,
and embeddings and LM head travel with the drafter. How many layers the target has stands nowhere; ours say it in the
metadata of the weights.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.artifacts import ArtifactError
from foredraft.drafter.config import DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.layouts.keys import OTHER, QWEN3, REMEDY, distinct, require_equal_key, require_known, section, whole
from foredraft.layouts.zlab import (
    CONFIG,
    SIZES,
    WEIGHTS,
    dtype_of,
    qwen3_fields,
    read_config,
    read_metadata,
    read_weights,
    require_architecture,
    require_causal_windows,
    require_same_sizes,
    save_weights,
    shape_from_qwen3,
    write_config,
)

FORMAT_VERSION = "0.9.0"
MARK = "speculators_model_type"
"""The key by which the layout is known."""
ENDS = ("embed_tokens.weight", "lm_head.weight")
"""What the target lends."""
DEPTH = "num_target_layers"
"""In the metadata of the weights."""
CONTENT = frozenset(
    {
        *("transformer_layer_config", "speculators_config", "aux_hidden_state_layer_ids", "sliding_window_non_causal"),
        *("block_size", "mask_token_id"),
        *SIZES,
    }
)
"""Keys at the top that are read."""


def speculators_config(shape: DrafterShape, target_uri: str, target_architecture: str) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "architectures": ["DFlashDraftModel"],
        MARK: "dflash",
        "speculators_version": FORMAT_VERSION,
        "transformer_layer_config": qwen3_fields(shape),
        "draft_vocab_size": shape.vocab_rows,
        "target_hidden_size": shape.hidden_size,
        "block_size": shape.choice.block_size,
        "mask_token_id": shape.choice.mask_token_id,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in shape.target_layer_ids],
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": shape.choice.block_size - 1},
            ],
            "verifier": {"name_or_path": target_uri, "architectures": [target_architecture]},
        },
    }


def write_speculators(
    folder: Path,
    shape: DrafterShape,
    weights: dict[str, Tensor],
    ends: tuple[Tensor, Tensor],
    target: tuple[str, str],
    metadata: dict[str, str],
) -> None:
    """Write the layout.

    Args:
        ends: the target's embeddings and LM head, ``(V, D)`` each.
        target: its URI and architecture.
    """
    folder.mkdir(parents=True)
    write_config(folder, speculators_config(shape, *target) | dtype_of(weights))
    whole = weights | {name: tensor.to(weights["fc.weight"].dtype) for name, tensor in zip(ENDS, ends, strict=True)}
    save_weights(whole, folder, metadata | {DEPTH: str(shape.num_target_layers)})


def read_speculators(folder: Path, dtype: torch.dtype, num_target_layers: int | None = None) -> Drafter:
    """Load a drafter from this layout, ours or a published one.

    Raises:
        ArtifactError: as :func:`foredraft.layouts.zlab.read_zlab`; or what the drafter does is not what ours do.
    """
    drafter = Drafter(read_speculators_shape(folder, num_target_layers)).to(dtype)
    weights, _ = read_speculators_weights(folder, drafter)
    drafter.load_state_dict(weights)
    return drafter.eval().requires_grad_(False)


def read_speculators_weights(folder: Path, drafter: Drafter) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a folder: the drafter's own, and the embeddings and LM head ``(V, D)`` beside them, where they are.

    Raises:
        ArtifactError: as :func:`foredraft.layouts.zlab.read_weights`.
    """
    ends = torch.empty(drafter.shape.vocab_rows, drafter.shape.hidden_size, device="meta")
    stored = read_weights(folder, drafter.state_dict() | dict.fromkeys(ENDS, ends), also=ENDS)
    lent = {name: stored.pop(name) for name in ENDS if name in stored}
    return stored, lent


def read_speculators_shape(folder: Path, num_target_layers: int | None = None) -> DrafterShape:
    """The shape of the drafter in a folder.

    Raises:
        ArtifactError: as :func:`shape_from_speculators`; or the folder says how deep the target is, and
            ``num_target_layers`` is another depth.
    """
    told = read_metadata(folder).get(DEPTH)
    if told is None:
        return shape_from_speculators(read_config(folder), folder, num_target_layers)
    if not told.isdecimal() or num_target_layers not in (None, int(told)):
        given = "" if num_target_layers is None else f", and the target has {num_target_layers} (--target-layers)"
        raise ArtifactError(
            folder / WEIGHTS, f"{DEPTH} is {told} in its metadata{given}", "leave it out, or mend the folder"
        )
    return shape_from_speculators(read_config(folder), folder, int(told))


def shape_from_speculators(config: dict[str, Any], folder: Path, num_target_layers: int | None) -> DrafterShape:
    """The shape that a ``config.json`` describes.

    Raises:
        ArtifactError: as :func:`foredraft.layouts.zlab.shape_from_qwen3`; or ``num_target_layers`` is None.
    """
    path = folder / CONFIG
    require_known(config, path, CONTENT)
    require_architecture(config, path)
    layers = section(config, "transformer_layer_config", path)
    require_known(layers, path, QWEN3, "transformer_layer_config.")
    block_size = whole("block_size", path, config.get("block_size"))
    require_proposals(section(config, "speculators_config", path), path, block_size)
    if num_target_layers is None:
        raise ArtifactError(path, "does not say how many layers the target has", "give it: --target-layers N")
    key, numbers = "aux_hidden_state_layer_ids", range(1, num_target_layers + 1)
    shape = shape_from_qwen3(
        layers,
        path,
        block_size=block_size,
        mask_token_id=whole("mask_token_id", path, config.get("mask_token_id"), least=0),
        target_layer_ids=tuple(number - 1 for number in distinct(key, path, config.get(key), numbers=numbers)),
        num_target_layers=num_target_layers,
    )
    require_same_sizes(config, path, shape)
    require_causal_windows(config, path, shape)
    require_causal_windows(layers, path, shape)
    if shape.choice.sliding_window is not None:
        require_equal_key(config, path, "sliding_window_non_causal", False, "a drafter here has")
    return shape


def require_proposals(config: dict[str, Any], path: Path, block_size: int) -> None:
    """Refuse ``speculators_config`` of another algorithm, or of another number of drafts than a block has.

    Raises:
        ArtifactError: names the key.
    """
    where = "speculators_config."
    require_known(config, path, {"proposal_methods", "verifier"}, where)
    require_known(section(config, "verifier", path), path, {"name_or_path"}, f"{where}verifier.")
    proposals = config.get("proposal_methods") or []
    if not isinstance(proposals, list) or not all(isinstance(proposal, dict) for proposal in proposals):
        raise ArtifactError(path, f"{where}proposal_methods is {proposals!r}, expected a list of mappings", REMEDY)
    for proposal in proposals:
        require_known(proposal, path, {"speculative_tokens"}, f"{where}proposal_methods.")
        drafts = proposal.get("speculative_tokens")
        if drafts not in (None, block_size - 1):
            told = f"speculative_tokens is {drafts!r}, and a block of {block_size} (block_size) has {block_size - 1} drafts"
            raise ArtifactError(path, told, OTHER)
