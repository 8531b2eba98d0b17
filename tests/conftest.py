"""Tiny targets built from config, tiny drafters, and the real small target."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from foredraft.drafter.config import DrafterConfig, DrafterShape
from foredraft.drafter.model import Drafter, initialise_random
from foredraft.params import load_section
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, load_target
from foredraft.target.weights import checkpoint_folder

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
VOCABULARY, HIDDEN, TAPS = 64, 16, (0, 2)

DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}
"""Sizes of a tiny decoder of any family."""


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = DENSE | {"tie_word_embeddings": True, "initializer_range": 0.5}
    return LlamaForCausalLM(LlamaConfig(**settings | changes))


LINEAR = DENSE | {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""And of one with gated delta rules."""


def tiny_hybrid(**changes: object) -> Qwen3_5ForCausalLM:
    """Three parts Gated DeltaNet and one part attention, as Qwen3.5 has them."""
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**LINEAR | changes))


def tiny_qwen3_next() -> Qwen3NextForCausalLM:
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(**LINEAR | experts, shared_expert_intermediate_size=16, partial_rotary_factor=0.5)
    )


def tiny_olmo_hybrid() -> OlmoHybridForCausalLM:
    torch.manual_seed(0)
    return OlmoHybridForCausalLM(OlmoHybridConfig(**LINEAR))


HYBRIDS = {"qwen3_5": tiny_hybrid, "qwen3_next": tiny_qwen3_next, "olmo_hybrid": tiny_olmo_hybrid}
"""Small targets with gated delta rules, at random, by their names in Transformers."""


@pytest.fixture(params=["llama", "hybrid"])
def tiny_target(request: pytest.FixtureRequest) -> FrozenTarget:
    return FrozenTarget(tiny_llama() if request.param == "llama" else tiny_hybrid(), TAPS)


TINY_CHOICE: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "ffn_size": 32,
    "block_size": 4,
    "mask_token_id": 5,
}


def tiny_shape(**changes: Any) -> DrafterShape:
    return DrafterShape(
        choice=DrafterConfig(**TINY_CHOICE | changes),
        hidden_size=HIDDEN,
        vocab_rows=VOCABULARY,
        target_layer_ids=TAPS,
        num_target_layers=4,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=512,
    )


def tiny_drafter(seed: int = 0, **changes: object) -> Drafter:
    drafter = Drafter(tiny_shape(**changes))
    initialise_random(drafter, torch.Generator().manual_seed(seed), std=0.3)
    return drafter.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def quickstart_target() -> TargetConfig:
    return load_section(ROOT / "profiles" / "quickstart.yaml", "target", TargetConfig)


@pytest.fixture(scope="session")
def smollm_folder(quickstart_target: TargetConfig) -> Path:
    """SmolLM2-135M-Instruct out of its package, converted once a machine."""
    fetch = load_section(ROOT / "profiles" / "quickstart.yaml", "fetch", FetchConfig)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoint_folder(quickstart_target, fetch)


@pytest.fixture(scope="session")
def smollm(smollm_folder: Path, quickstart_target: TargetConfig) -> FrozenTarget:
    exact = quickstart_target.model_copy(update={"dtype": "float32"})
    return load_target(smollm_folder, exact, layer_ids=(1, 8, 14, 20, 27))


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory, smollm_folder: Path) -> Any:
    """A :class:`tests.workspace.Workspace` in which the smoke pipeline has run once and been pushed.

    Parallel workers share it: the first to ask runs it, the others wait.
    """
    from tests.workspace import Workspace, copy_repository

    parallel = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp().parent / "smoke" if parallel else tmp_path_factory.mktemp("smoke")
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        log = folder / "first-run.txt"
        if not log.exists():
            workspace = copy_repository(folder, "smoke")
            output = workspace.run("dvc", "repro")
            workspace.commit("first run")
            workspace.run("dvc", "push", "-q", "--run-cache")
            log.write_text(output)
    return Workspace(folder / "project", folder / "scratch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that need the smoke pipeline come last, but for the one that begins with it: workers then seldom wait."""
    waiting = {item.path for item in items if "smoke" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: 0 if item.path.name == "test_pipeline.py" else 1 + (item.path in waiting))
