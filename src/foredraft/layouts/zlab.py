"""z-lab's layout: what vLLM (``method: dflash``), SGLang (``DFLASH``) and z-lab's own package read.

``config.json`` has Qwen3's fields with the drafter's values. Readers differ on where they look, so both forms of a key
are written with one value: ``rope_theta`` and ``rope_parameters``, ``block_size`` at the top and in ``dflash_config``.
Nothing is inherited from the target's own rotary settings: the drafter rotates whole heads, in one dimension.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.artifacts import ArtifactError
from foredraft.drafter.config import DrafterConfig, DrafterShape
from foredraft.drafter.model import Drafter
from foredraft.layouts.keys import (
    OTHER,
    QWEN3,
    REMEDY,
    distinct,
    flag,
    positive,
    reading,
    require_equal_key,
    require_known,
    section,
    whole,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
METADATA = {"format": "pt"}
"""Of the weights, at least: some readers crash on none. Only strings are allowed there."""
DTYPES = (torch.bfloat16, torch.float32)
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
"""What drafters of this kind are called; the second is the default of speculators' config class."""
TOP = frozenset({"block_size", "mask_token_id", "target_layer_ids"})
"""Keys that stand at the top, in ``dflash_config``, or in both."""
KINDS = ("full_attention", "sliding_attention")
DEFAULT_MAX_WINDOW_LAYERS, DEFAULT_WINDOW = 28, 4096
"""Of Qwen3's config class."""
LENGTH = 8
"""Bytes before the header of a safetensors file, which hold its length."""


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
    """Write the tensors, equal content to equal bytes; views and tied ones cannot be saved, and are copied."""
    apart = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in weights.items()}
    path = folder / WEIGHTS
    path.touch()
    mode = path.stat().st_mode  # as the user's umask has it; safetensors lets nobody else read
    save_file(apart, path, metadata=metadata)
    path.chmod(mode)
    _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Put the metadata of a safetensors file, which come in random order, in theirs: the same bytes, in the same place."""
    with path.open("r+b") as stream:
        length = int.from_bytes(stream.read(LENGTH), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        if len(text) != length:
            raise ValueError(f"{path}: its header cannot be written anew in {length} bytes")
        stream.seek(LENGTH)
        stream.write(text)


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
        ArtifactError: there is none, or something else than a mapping.
    """
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ArtifactError(path, "does not exist", "a drafter's folder holds config.json") from None
    except OSError as error:
        raise ArtifactError(path, f"cannot be read: {error.strerror}", REMEDY) from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(path, f"is not JSON: {error}", REMEDY) from None
    if not isinstance(found, dict):
        raise ArtifactError(path, f"expected a mapping, found {found!r:.40}", REMEDY)
    return found


@contextmanager
def _weights_of(folder: Path) -> Iterator[Path]:
    """The file with the weights; what is wrong with it becomes one line."""
    path = folder / WEIGHTS
    if (folder / f"{WEIGHTS}.index.json").exists():
        raise ArtifactError(
            folder, f"is sharded ({WEIGHTS}.index.json)", f"put it into one {WEIGHTS}, without an index"
        )
    try:
        yield path
    except (OSError, SafetensorError) as error:
        raise ArtifactError(path, f"cannot be read: {error}", REMEDY) from None


def read_metadata(folder: Path) -> dict[str, str]:
    """The metadata of a folder's weights.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    with _weights_of(folder) as path, safe_open(path, "pt") as stored:
        return dict(stored.metadata() or {})


def read_weights(folder: Path, like: dict[str, Tensor], also: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a folder, in the type in which they lie there.

    Args:
        like: names and sizes that they must have.
        also: which of these may be missing.

    Raises:
        ArtifactError: the file is missing, damaged or one of several; a tensor is missing, unknown, of another size, not
            finite, or neither in bfloat16 nor in float32.
    """
    with _weights_of(folder) as path:
        weights = load_file(path)
    found = weights.keys() - set(also)
    if found != like.keys() - set(also):
        missing, unknown = sorted(like.keys() - set(also) - found), sorted(found - like.keys())
        raise ArtifactError(path, f"missing tensors {missing}, unknown tensors {unknown}", REMEDY)
    for name, tensor in weights.items():
        _require_usable(path, name, tensor, like[name].shape)
    return weights


def _require_usable(path: Path, name: str, tensor: Tensor, size: torch.Size) -> None:
    if tensor.shape != size:
        raise ArtifactError(path, f"{name} is {tuple(tensor.shape)}, by the config {tuple(size)}", REMEDY)
    if tensor.dtype not in DTYPES:
        told = str(tensor.dtype).removeprefix("torch.") + (
            ", in which drafters overflow" if tensor.dtype == torch.half else ""
        )
        raise ArtifactError(path, f"{name} is in {told}", "take bfloat16 or float32")
    if not bool(tensor.isfinite().all()):
        raise ArtifactError(path, f"{name} is not finite", REMEDY)


def shape_from_config(config: dict[str, Any], path: Path) -> DrafterShape:
    """The shape that a ``config.json`` describes.

    Raises:
        ArtifactError: as :func:`shape_from_qwen3`.
    """
    dflash = section(config, "dflash_config", path)
    require_known(config, path, {*QWEN3, *TOP, *SIZES, "num_target_layers", "dflash_config"})
    require_known(dflash, path, {*TOP, *SIZES}, "dflash_config.")
    require_architecture(config, path)
    both = {key: (config.get(key), dflash.get(key)) for key in TOP}
    depth = whole("num_target_layers", path, config.get("num_target_layers"))
    shape = shape_from_qwen3(
        config,
        path,
        block_size=whole("block_size", path, *both["block_size"]),
        mask_token_id=whole("mask_token_id", path, *both["mask_token_id"], least=0),
        target_layer_ids=distinct("target_layer_ids", path, *both["target_layer_ids"], numbers=range(depth)),
        num_target_layers=depth,
    )
    for where in (config, dflash):
        require_same_sizes(where, path, shape)
        require_causal_windows(where, path, shape)
    return shape


def require_architecture(config: dict[str, Any], path: Path) -> None:
    """Refuse a drafter of another class.

    Raises:
        ArtifactError: names ``architectures``.
    """
    found = config.get("architectures") or []
    if found and (not isinstance(found, list) or any(name not in ARCHITECTURES for name in found)):
        raise ArtifactError(path, f"architectures is {found!r}, and drafters here are {ARCHITECTURES[0]}", OTHER)


SIZES = {"draft_vocab_size": "vocab_size", "target_hidden_size": "hidden_size"}
"""Sizes that some drafters have apart from the target's."""


def require_same_sizes(config: dict[str, Any], path: Path, shape: DrafterShape) -> None:
    """Refuse a drafter over a part of the vocabulary, or for a target of another width."""
    wanted = {"vocab_size": shape.vocab_rows, "hidden_size": shape.hidden_size}
    for key, other in SIZES.items():
        require_equal_key(config, path, key, wanted[other], f"{other} is")


def require_causal_windows(config: dict[str, Any], path: Path, shape: DrafterShape) -> None:
    """Refuse a drafter whose sliding layers see a block both ways, which in engines ``is_causal`` or ``causal`` decide."""
    for key in ("is_causal", "causal"):
        if shape.choice.sliding_window is not None and config.get(key) is not None:
            raise ArtifactError(path, f"{key} is {config[key]!r}, and sliding layers here are causal in a block", OTHER)


def shape_from_qwen3(
    config: dict[str, Any],
    path: Path,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...],
    num_target_layers: int,
) -> DrafterShape:
    """The shape of the transformer that Qwen3's fields describe; which others there are is the caller's to check.

    Raises:
        ArtifactError: a field is missing, two forms of it differ, it is no such number, or it asks for what no drafter here
            does.
    """

    def read(key: str) -> int:
        return whole(key, path, config.get(key))

    if mask_token_id >= read("vocab_size"):
        raise ArtifactError(path, f"mask_token_id {mask_token_id} is past the {read('vocab_size')} embeddings", REMEDY)
    kinds = layer_types(config, path)
    sliding = "sliding_attention" in kinds
    with reading(path):
        choice = DrafterConfig(
            num_layers=len(kinds),
            num_heads=read("num_attention_heads"),
            num_kv_heads=read("num_key_value_heads"),
            head_dim=read("head_dim"),
            ffn_size=read("intermediate_size"),
            block_size=block_size,
            mask_token_id=mask_token_id,
            sliding_window=read("sliding_window") if sliding else None,
            full_attention_layers=tuple(i for i, k in enumerate(kinds) if k == "full_attention") if sliding else None,
        )
        return DrafterShape(
            choice=choice,
            hidden_size=read("hidden_size"),
            vocab_rows=read("vocab_size"),
            target_layer_ids=target_layer_ids,
            num_target_layers=num_target_layers,
            rms_norm_eps=positive("rms_norm_eps", path, config.get("rms_norm_eps")),
            rope_theta=rope_theta(config, path),
            max_position_embeddings=read("max_position_embeddings"),
        )


def layer_types(config: dict[str, Any], path: Path) -> list[str]:
    """Attention of each layer, as Transformers' ``Qwen3Config`` has it.

    Raises:
        ArtifactError: not one kind a layer, or of another kind; or the windows that it speaks of are switched off.
    """
    count, used = (
        whole("num_hidden_layers", path, config.get("num_hidden_layers")),
        flag("use_sliding_window", path, config),
    )
    kinds = config.get("layer_types")
    if kinds is None:
        first = whole("max_window_layers", path, config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS), least=0)
        slides = used and config.get("sliding_window", DEFAULT_WINDOW) is not None
        return ["sliding_attention" if slides and layer >= first else "full_attention" for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in KINDS for kind in kinds):
        told = f"layer_types is {kinds!r}, expected one of {' and '.join(KINDS)} for each of the"
        raise ArtifactError(path, f"{told} {count} num_hidden_layers", REMEDY)
    if "sliding_attention" in kinds and not used:
        told = "layer_types has sliding layers, and use_sliding_window switches them off"
        raise ArtifactError(path, told, "readers would disagree: make both say the same")
    return kinds


def rope_theta(config: dict[str, Any], path: Path) -> float:
    """The base of the rotation, wherever it stands.

    Raises:
        ArtifactError: there is none or there are two; or the rotation is scaled, partial, or of more than one kind.
    """
    places = {key: section(config, key, path) for key in ("rope_parameters", "rope_scaling")}
    for key, rope in places.items():
        require_known(rope, path, {"rope_theta"}, f"{key}.")
    return positive("rope_theta", path, config.get("rope_theta"), *(rope.get("rope_theta") for rope in places.values()))
