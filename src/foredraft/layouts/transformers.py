"""Transformers' native assistant layout (``speculation_type="dflash"``), where the architectures agree.

The class that Transformers ships for it, ``MuseGlimmerAssistantModel``, is our drafter under other names, but for
sliding layers, which it reads both ways and we causally.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft.drafter.config import DrafterShape
from foredraft.layouts.zlab import dtype_of, save_weights, write_config

RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def transformers_config(shape: DrafterShape, facts: dict[str, Any]) -> dict[str, Any]:
    """The content of ``config.json``."""
    choice = shape.choice
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "intermediate_size": choice.ffn_size,
        "num_hidden_layers": choice.num_layers,
        "num_attention_heads": choice.num_heads,
        "num_key_value_heads": choice.num_kv_heads,
        "head_dim": choice.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_types": list(choice.layer_types),
        "bos_token_id": None,
        "eos_token_id": facts["eos_token_ids"][0],
        "pad_token_id": facts["pad_token_id"],
        "block_size": choice.block_size,
        "mask_token_id": choice.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
    }


def write_transformers(
    folder: Path, shape: DrafterShape, weights: dict[str, Tensor], facts: dict[str, Any], metadata: dict[str, str]
) -> None:
    """Write the layout.

    Raises:
        ValueError: the drafter has sliding layers.
    """
    if shape.choice.sliding_window is not None:
        raise ValueError(
            "export.layouts: transformers reads sliding layers in both directions and this drafter's are causal; "
            "leave that layout out"
        )
    folder.mkdir(parents=True)
    write_config(folder, transformers_config(shape, facts) | dtype_of(weights))
    save_weights({RENAMED.get(name, name): tensor for name, tensor in weights.items()}, folder, metadata)
