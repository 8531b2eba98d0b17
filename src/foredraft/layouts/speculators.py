"""The layout of vLLM's ``speculators``, which vLLM recognises by itself.

Taps are numbered one higher (``aux_hidden_state_layer_ids`` 0 are the embeddings), drafts are counted without the anchor,
and embeddings and LM head travel with the drafter. How many layers the target has stands nowhere; ours say it in the
metadata of the weights.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from foredraft.artifacts import ArtifactError
from foredraft.drafter.config import DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.layouts.zlab import (
    METADATA,
    WEIGHTS,
    dtype_of,
    one_value,
    qwen3_fields,
    read_config,
    read_weights,
    save_weights,
    shape_from_qwen3,
    write_config,
)

FORMAT_VERSION = "0.9.0"
MARK = "speculators_model_type"
"""The key by which the layout is known."""
ENDS = ("embed_tokens.weight", "lm_head.weight")
"""What the target lends."""


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
    save_weights(whole, folder, metadata | {"num_target_layers": str(shape.num_target_layers)})


def read_speculators(folder: Path, dtype: torch.dtype, num_target_layers: int | None = None) -> Drafter:
    """Load a drafter from this layout, ours or a published one.

    Raises:
        ArtifactError: as :func:`foredraft.layouts.zlab.read_zlab`; or what the drafter does is not what ours do.
    """
    drafter = Drafter(read_speculators_shape(folder, num_target_layers)).to(dtype)
    drafter.load_state_dict(read_weights(folder, drafter.state_dict(), also=ENDS))
    return drafter.eval().requires_grad_(False)


def read_speculators_shape(folder: Path, num_target_layers: int | None = None) -> DrafterShape:
    """The shape of the drafter in a folder."""
    if num_target_layers is None:
        with safe_open(folder / WEIGHTS, "pt") as stored:
            told = (stored.metadata() or {}).get("num_target_layers")
        num_target_layers = int(told) if told else None
    return shape_from_speculators(read_config(folder), folder, num_target_layers)


def shape_from_speculators(config: dict[str, Any], folder: Path, num_target_layers: int | None) -> DrafterShape:
    """The shape that a ``config.json`` describes."""
    path = folder / "config.json"
    layers = config.get("transformer_layer_config") or {}
    if config.get("sample_from_anchor"):
        raise ArtifactError(path, "sample_from_anchor: drafts from the anchor itself", "no such drafter is known here")
    if config.get("draft_vocab_size") not in (None, layers.get("vocab_size")):
        raise ArtifactError(
            path, f"drafts over {config['draft_vocab_size']} of {layers.get('vocab_size')} tokens", "not supported"
        )
    if num_target_layers is None:
        raise ArtifactError(path, "does not say how many layers the target has", "give it: --target-layers N")
    aux = one_value("aux_hidden_state_layer_ids", path, config.get("aux_hidden_state_layer_ids"))
    return shape_from_qwen3(
        layers,
        path,
        block_size=one_value("block_size", path, config.get("block_size")),
        mask_token_id=one_value("mask_token_id", path, config.get("mask_token_id")),
        # The target's last state, which some trainers put behind the taps for their own use, is none.
        target_layer_ids=tuple(number - 1 for number in aux if number < num_target_layers),
        num_target_layers=num_target_layers,
    )


def described(folder: Path) -> dict[str, str]:
    """The metadata of a folder's weights, all strings."""
    with safe_open(folder / WEIGHTS, "pt") as stored:
        return dict(stored.metadata() or {}) or dict(METADATA)
