"""z-lab's layout: what vLLM (``method: dflash``), SGLang (``DFLASH``) and z-lab's own package read.

``config.json`` has Qwen3's fields with the drafter's values. Readers differ on where they look, so both forms of a key
are written with one value: ``rope_theta`` and ``rope_parameters``, ``block_size`` at the top and in ``dflash_config``.
Nothing is inherited from the target's own rotary settings: the drafter rotates whole heads, in one dimension.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.artifacts import ArtifactError
from foredraft.drafter.config import DrafterConfig, DrafterShape
from foredraft.drafter.model import Drafter

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
METADATA = {"format": "pt"}
"""Of the weights, at least: some readers crash on none. Only strings are allowed there."""
REMEDY = "it is no drafter in this layout; of our own: dvc repro export"


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
    """Write the layout; ``weights`` are the drafter's own, under its own names, which are z-lab's, and keep their type."""
    folder.mkdir(parents=True)
    write_config(folder, zlab_config(shape) | dtype_of(weights))
    save_weights(weights, folder, metadata)


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write ``config.json``."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_weights(weights: dict[str, Tensor], folder: Path, metadata: dict[str, str]) -> None:
    """Write the tensors; views and tied ones cannot be saved, and are copied."""
    apart = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    save_file(apart, folder / WEIGHTS, metadata=metadata)


def dtype_of(weights: dict[str, Tensor]) -> dict[str, str]:
    """What a config says of the type of ``weights``."""
    return {"dtype": str(weights["fc.weight"].dtype).removeprefix("torch.")}


def as_stored(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """In bfloat16, as drafters are served: in float16 ``fc`` overflows."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def read_zlab(folder: Path, dtype: torch.dtype) -> Drafter:
    """Load a drafter from z-lab's layout, ours or a published one.

    Raises:
        ArtifactError: a key is missing, two forms of a key differ, the config describes another kind of drafter, or the
            tensors are not those of the config.
    """
    drafter = Drafter(read_shape(folder)).to(dtype)
    drafter.load_state_dict(read_weights(folder, drafter.state_dict()))
    return drafter.eval().requires_grad_(False)


def read_shape(folder: Path) -> DrafterShape:
    """The shape of the drafter in a folder."""
    return shape_from_config(read_config(folder), folder / CONFIG)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        ArtifactError: there is none.
    """
    try:
        found: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(folder / CONFIG, "does not exist", "a drafter's folder holds config.json") from None
    except ValueError as error:
        raise ArtifactError(folder / CONFIG, f"is not JSON: {error}", REMEDY) from None
    return found


def read_weights(folder: Path, like: dict[str, Tensor], also: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a folder, in the type in which they lie there.

    Args:
        like: names and sizes that they must have.
        also: names that may be there, and are left out.

    Raises:
        ArtifactError: the file is missing or damaged; a tensor is missing, unknown, of another size, not finite, or in
            float16.
    """
    path = folder / WEIGHTS
    try:
        weights = {name: tensor for name, tensor in load_file(path).items() if name not in also}
    except (FileNotFoundError, SafetensorError) as error:
        raise ArtifactError(path, f"cannot be read: {error}", REMEDY) from None
    if weights.keys() != like.keys():
        missing, unknown = sorted(like.keys() - weights.keys()), sorted(weights.keys() - like.keys())
        raise ArtifactError(path, f"missing tensors {missing}, unknown tensors {unknown}", REMEDY)
    for name, tensor in weights.items():
        if tensor.shape != like[name].shape:
            sizes = f"{tuple(tensor.shape)}, by the config {tuple(like[name].shape)}"
            raise ArtifactError(path, f"{name} is {sizes}", REMEDY)
        if tensor.dtype == torch.float16:
            raise ArtifactError(path, f"{name} is in float16, in which fc overflows", "take bfloat16 or float32")
        if not bool(tensor.isfinite().all()):
            raise ArtifactError(path, f"{name} is not finite", REMEDY)
    return weights


def shape_from_config(config: dict[str, Any], path: Path) -> DrafterShape:
    """The shape that a ``config.json`` describes."""
    dflash = config.get("dflash_config") or {}
    if odd := sorted(key for key in dflash if key.startswith(("conv_", "selector_"))):
        raise ArtifactError(path, f"describes a drafter of another kind ({', '.join(odd)})", "none is known here")
    return shape_from_qwen3(
        config,
        path,
        block_size=one_value("block_size", path, config.get("block_size"), dflash.get("block_size")),
        mask_token_id=one_value("mask_token_id", path, config.get("mask_token_id"), dflash.get("mask_token_id")),
        target_layer_ids=tuple(
            one_value("target_layer_ids", path, config.get("target_layer_ids"), dflash.get("target_layer_ids"))
        ),
        num_target_layers=one_value("num_target_layers", path, config.get("num_target_layers")),
    )


def shape_from_qwen3(
    config: dict[str, Any],
    path: Path,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...],
    num_target_layers: int,
) -> DrafterShape:
    """The shape of the transformer that Qwen3's fields describe.

    Raises:
        ArtifactError: a field is missing, two forms of it differ, or it asks for what no drafter here does.
    """

    def read(key: str) -> Any:
        return one_value(key, path, config.get(key))

    rope = config.get("rope_parameters") or {}
    layers = read("num_hidden_layers")
    layer_types = config.get("layer_types") or ["full_attention"] * layers
    known = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias") or False, False),
        "rope_scaling": (config.get("rope_scaling"), None),
        "rope_type": (rope.get("rope_type", "default"), "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0, 1.0),
        "layer_types": (sorted(set(layer_types) - {"full_attention", "sliding_attention"}), []),
    }
    for key, (found, wanted) in known.items():
        if found != wanted:
            raise ArtifactError(path, f"{key} is {found!r}, and a drafter here has {wanted!r}", "it cannot be read")
    full = tuple(i for i, kind in enumerate(layer_types) if kind == "full_attention")
    sliding = len(full) < len(layer_types)
    choice = DrafterConfig(
        num_layers=layers,
        num_heads=read("num_attention_heads"),
        num_kv_heads=read("num_key_value_heads"),
        head_dim=read("head_dim"),
        ffn_size=read("intermediate_size"),
        block_size=block_size,
        mask_token_id=mask_token_id,
        sliding_window=read("sliding_window") if sliding else None,
        full_attention_layers=full if sliding else None,
    )
    if mask_token_id >= read("vocab_size"):
        raise ArtifactError(path, f"mask_token_id {mask_token_id} is past the {read('vocab_size')} embeddings", REMEDY)
    return DrafterShape(
        choice=choice,
        hidden_size=read("hidden_size"),
        vocab_rows=read("vocab_size"),
        target_layer_ids=target_layer_ids,
        num_target_layers=num_target_layers,
        rms_norm_eps=read("rms_norm_eps"),
        rope_theta=one_value("rope_theta", path, config.get("rope_theta"), rope.get("rope_theta")),
        max_position_embeddings=read("max_position_embeddings"),
    )


def one_value(key: str, path: Path, *places: Any) -> Any:
    """The value that stands in one of these places, or in several alike.

    Raises:
        ArtifactError: there is none, or there are two.
    """
    values = [value for value in places if value is not None]
    if not values:
        raise ArtifactError(path, f"has no {key}", REMEDY)
    if any(value != values[0] for value in values):
        raise ArtifactError(path, f"holds two values of {key}: {values}", REMEDY)
    return values[0]
