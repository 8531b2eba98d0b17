"""Every kind of target that is read: saved as a checkpoint, loaded the stock way, and checked against itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from foredraft.features.checks import truth_check
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import load_target
from tests.conftest import DENSE

COMMON: dict[str, Any] = {
    **DENSE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
HYBRID = ["linear_attention"] * 3 + ["full_attention"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 8}),
    "gemma3_text": ("Gemma3", COMMON | {"head_dim": 8, "sliding_window": 8}),
    "qwen3_moe": ("Qwen3Moe", COMMON | EXPERTS | {"head_dim": 8, "decoder_sparse_step": 1}),
    "qwen3_5_text": ("Qwen3_5", COMMON | LINEAR | {"head_dim": 8}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", COMMON | LINEAR | EXPERTS | {"head_dim": 8}),
    "qwen3_next": ("Qwen3Next", COMMON | LINEAR | EXPERTS | {"head_dim": 8}),
    "olmo_hybrid": ("OlmoHybrid", COMMON | LINEAR | {"layer_types": HYBRID}),
}


def save(model: Any, folder: Path) -> TargetConfig:
    model.save_pretrained(folder)
    return TargetConfig(uri=f"file:{folder}", dtype="float32", thinking=False, kept_layers=0)


def check(folder: Path, config: TargetConfig) -> None:
    target = load_target(folder, config, layer_ids=(0, 2, 3), device="cpu")
    checks = truth_check(target, [torch.arange(6, 30), torch.arange(8, 15), torch.arange(6, 51)])
    assert len(checks) == 3
    assert max(found.worst for found in checks) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_of_each_kind_is_read_as_it_reads_itself(kind: str, tmp_path: Path) -> None:
    name, settings = KINDS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    check(tmp_path, save(model, tmp_path))


def test_the_text_part_of_a_vision_wrapper_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = COMMON | LINEAR | {"head_dim": 8}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    check(tmp_path, save(transformers.Qwen3_5ForConditionalGeneration(config), tmp_path))


def test_weights_that_a_checkpoint_lacks_are_not_drawn_at_random(tmp_path: Path) -> None:
    config = save(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, tie_word_embeddings=False)), tmp_path
    )
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_head.weight")
    for left in ({}, {"language_head.weight": head}, {"lm_head.weight": head[:-1]}):
        save_file(weights | left, tmp_path / "model.safetensors", {"format": "pt"})
        names = [name for name in left if name != "lm_head.weight"] or ["none"]
        with pytest.raises(ValueError, match=rf"right shape for lm_head.weight \(1 in all\).*know: {names[0]}"):
            load_target(tmp_path, config, layer_ids=(0,), device="cpu")


def test_a_checkpoint_keeps_the_types_that_a_stock_load_gives(tmp_path: Path) -> None:
    """No blanket cast: what Transformers keeps in float32 stays so, in whatever type the rest is asked for."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_5_text", **COMMON | LINEAR | {"head_dim": 8})
    target = save(transformers.Qwen3_5ForCausalLM(config), tmp_path).model_copy(update={"dtype": "bfloat16"})
    ours = load_target(tmp_path, target, layer_ids=(0,), device="cpu").model
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    types = {name: weight.dtype for name, weight in stock.named_parameters()}
    assert {name: weight.dtype for name, weight in ours.named_parameters()} == types
