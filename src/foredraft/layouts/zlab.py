"""z-lab's layout: what vLLM (``method: dflash``), SGLang (``DFLASH``) and z-lab's own package read.

``config.json`` has Qwen3's fields with the drafter's values. Readers differ on where they look, so both forms of a key
are written with one value: ``rope_theta`` and ``rope_parameters``, ``block_size`` at the top and in ``dflash_config``.
Nothing is inherited from the target's own rotary settings: the drafter rotates whole heads, in one dimension.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.artifacts import ArtifactError
from foredraft.drafter.config import DrafterConfig, DrafterShape
from foredraft.drafter.model import Drafter

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
RERUN = "rerun: dvc repro export"


def zlab_config(shape: DrafterShape) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **qwen3_fields(shape),
        "num_target_layers": shape.num_target_layers,
        "block_size": shape.choice.block_size,
        "dflash_config": {
            "block_size": shape.choice.block_size,
            "mask_token_id": shape.choice.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
        },
    }


def qwen3_fields(shape: DrafterShape) -> dict[str, Any]:
    """The transformer itself, in the words of a Qwen3 config."""
    choice = shape.choice
    return {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": choice.num_layers,
        "num_attention_heads": choice.num_heads,
        "num_key_value_heads": choice.num_kv_heads,
        "head_dim": choice.head_dim,
        "intermediate_size": choice.ffn_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": shape.vocab_rows,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_scaling": None,
        "layer_types": list(choice.layer_types),
        "sliding_window": choice.sliding_window,
        "use_sliding_window": choice.sliding_window is not None,
        "max_window_layers": choice.num_layers if choice.sliding_window is None else 0,
        "tie_word_embeddings": False,
    }


def write_zlab(folder: Path, shape: DrafterShape, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the layout; ``weights`` are the drafter's own, under its own names, which are z-lab's."""
    folder.mkdir(parents=True)
    write_config(folder, zlab_config(shape))
    save_file(as_stored(weights), folder / WEIGHTS, metadata=metadata)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write ``config.json``."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def as_stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """bf16 and contiguous: fp16 overflows in ``fc``, and views cannot be saved."""
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}


def read_zlab(folder: Path, dtype: torch.dtype) -> Drafter:
    """Load a drafter from z-lab's layout, ours or a published one.

    Raises:
        ArtifactError: a key is missing, two forms of a key differ, or the tensors are not those of the config.
    """
    drafter = Drafter(read_shape(folder)).to(dtype)
    weights = load_file(folder / WEIGHTS)
    expected, found = drafter.state_dict().keys(), weights.keys()
    if expected != found:
        raise ArtifactError(
            folder / WEIGHTS,
            f"missing tensors {sorted(expected - found)}, unknown tensors {sorted(found - expected)}",
            RERUN,
        )
    drafter.load_state_dict(weights)
    return drafter.eval().requires_grad_(False)


def read_shape(folder: Path) -> DrafterShape:
    """The shape of the drafter in a folder."""
    return shape_from_config(json.loads((folder / CONFIG).read_text(encoding="utf-8")), folder / CONFIG)


def shape_from_config(config: dict[str, Any], path: Path) -> DrafterShape:
    """The shape that a ``config.json`` describes."""
    dflash = config.get("dflash_config") or {}

    def read(key: str, *places: Any) -> Any:
        values = [value for value in places if value is not None]
        if not values:
            raise ArtifactError(path, f"has no {key}", RERUN)
        if any(value != values[0] for value in values):
            raise ArtifactError(path, f"holds two values of {key}: {values}", RERUN)
        return values[0]

    layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    full = tuple(i for i, kind in enumerate(layer_types) if kind == "full_attention")
    sliding = len(full) < len(layer_types)
    choice = DrafterConfig(
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn_size=config["intermediate_size"],
        block_size=read("block_size", config.get("block_size"), dflash.get("block_size")),
        mask_token_id=read("mask_token_id", config.get("mask_token_id"), dflash.get("mask_token_id")),
        sliding_window=config["sliding_window"] if sliding else None,
        full_attention_layers=full if sliding else None,
    )
    rope = config.get("rope_parameters") or {}
    return DrafterShape(
        choice=choice,
        hidden_size=config["hidden_size"],
        vocab_rows=config["vocab_size"],
        target_layer_ids=tuple(
            read("target_layer_ids", config.get("target_layer_ids"), dflash.get("target_layer_ids"))
        ),
        num_target_layers=config["num_target_layers"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=read("rope_theta", config.get("rope_theta"), rope.get("rope_theta")),
        max_position_embeddings=config["max_position_embeddings"],
    )
