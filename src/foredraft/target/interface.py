"""The ``target`` stage: what of the target the later stages need when its full weights are elsewhere.

Tokenizer, chat template and config; embeddings, LM head and final norm; the last decoder layers, for a drafter to start
from; and facts about the architecture.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foredraft.artifacts import Manifest, publish
from foredraft.chat.render import Renderer
from foredraft.sources.config import FetchConfig
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, load_target
from foredraft.target.weights import checkpoint_digest, checkpoint_folder

WEIGHTS = "interface.safetensors"
LAYERS = "layers.safetensors"


@dataclass(frozen=True)
class Interface:
    """Embeddings ``(V, D)``, LM head ``(V, D)``, final norm ``(D)``, and the kept decoder layers by name."""

    embed_tokens: Tensor
    lm_head: Tensor
    norm: Tensor
    layers: dict[str, Tensor]
    manifest: Manifest


def write_interface(target: TargetConfig, fetch: FetchConfig, out: Path) -> None:
    """Publish the ``target`` artefact.

    Raises:
        ValueError: the target cannot be had or loaded, or has neither an LM head nor tied embeddings.
    """
    folder = checkpoint_folder(target, fetch)
    frozen = load_target(folder, target, layer_ids=[0], device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=target.trust_remote_code)
    facts = describe(frozen, tokenizer)
    contract = {
        "target": target.uri,
        "target_digest": checkpoint_digest(target, folder),
        "target_dtype": target.dtype,
        "tokenizer_digest": _digest(tokenizer.backend_tokenizer.to_str()),
        "template_digest": _digest(tokenizer.chat_template or ""),
        "thinking": target.thinking,
        "tools_as": Renderer(tokenizer, target.thinking).tools_as,
    }
    with publish(out, Manifest("target", contract=contract, facts=facts)) as building:
        frozen.model.config.save_pretrained(building)
        frozen.model.generation_config.save_pretrained(building)
        tokenizer.save_pretrained(building)
        weights = {
            "embed_tokens.weight": frozen.embeddings.weight,
            "norm.weight": frozen.model.get_decoder().norm.weight,
        }
        if not facts["tied"]:
            weights["lm_head.weight"] = frozen.head.weight
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, building / WEIGHTS)
        save_file(_last_layers(frozen, target.kept_layers), building / LAYERS)


def describe(frozen: FrozenTarget, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Facts about the architecture that later stages decide by."""
    config = frozen.model.config.get_text_config()
    if frozen.head is None:
        raise ValueError("the target has neither an LM head nor tied embeddings")
    return {
        "architecture": type(frozen.model).__name__,
        "num_layers": len(frozen.blocks),
        "layer_types": list(getattr(config, "layer_types", None) or ["full_attention"] * len(frozen.blocks)),
        "hidden_size": config.hidden_size,
        "vocab_rows": frozen.embeddings.weight.shape[0],
        "tokenizer_size": len(tokenizer),
        "tied": frozen.head.weight.data_ptr() == frozen.embeddings.weight.data_ptr(),
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": float((config.rope_parameters or {}).get("rope_theta", 1e4)),
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_ids": eos_token_ids(frozen, tokenizer),
        "special_token_ids": sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special),
        "pad_token_id": tokenizer.pad_token_id,
    }


def eos_token_ids(frozen: FrozenTarget, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every id that ends the target's turn, as its generation config has it."""
    ids = frozen.model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return sorted(ids if isinstance(ids, list) else [ids])


def read_interface(folder: Path) -> Interface:
    """Verify and load the ``target`` artefact; a tied head is the embedding itself."""
    manifest = open_interface(folder)
    weights = load_file(folder / WEIGHTS)
    embed_tokens = weights["embed_tokens.weight"]
    lm_head = embed_tokens if manifest.facts["tied"] else weights["lm_head.weight"]
    return Interface(embed_tokens, lm_head, weights["norm.weight"], load_file(folder / LAYERS), manifest)


def _last_layers(frozen: FrozenTarget, count: int) -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    total = len(frozen.blocks)
    for index in range(max(0, total - count), total):
        for name, tensor in frozen.blocks[index].state_dict().items():
            kept[f"layers.{index}.{name}"] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return kept


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
