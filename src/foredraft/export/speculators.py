"""The layout of vLLM's ``speculators``, which vLLM recognises by itself.

Taps are numbered one higher (``aux_hidden_state_layer_ids`` 0 are the embeddings), drafts are counted without the anchor,
and embeddings and LM head travel with the drafter.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from foredraft.drafter.config import DrafterShape
from foredraft.layouts.zlab import WEIGHTS, as_stored, qwen3_fields, write_config
from foredraft.target.interface import Interface

FORMAT_VERSION = "0.9.0"


def speculators_config(shape: DrafterShape, target_uri: str, target_architecture: str) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
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
    folder: Path, shape: DrafterShape, weights: dict[str, Tensor], interface: Interface, metadata: dict[str, str]
) -> None:
    """Write the layout."""
    folder.mkdir(parents=True)
    facts = interface.manifest.facts
    write_config(folder, speculators_config(shape, interface.manifest.contract["target"], facts["architecture"]))
    whole = {**weights, "embed_tokens.weight": interface.embed_tokens, "lm_head.weight": interface.lm_head.clone()}
    save_file(as_stored(whole), folder / WEIGHTS, metadata=metadata)
