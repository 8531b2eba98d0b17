"""Fast blocks against Transformers' own, on a CPU: a GPU's code, but for what does the arithmetic between products."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from foredraft.features.checks import distances, truth_check
from foredraft.target.frozen import FrozenTarget
from foredraft.target.kernels import Toolbox, accelerate, choose_tools, describe, merge, stock_blocks
from tests.conftest import DENSE, TAPS, tiny_hybrid, tiny_llama

HEADS: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
MIXTURE: dict[str, Any] = {
    **DENSE,
    **HEADS,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def stock_delta_rule(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
    """The one that a GPU's is compared with."""
    return modeling_qwen3_5.torch_chunk_gated_delta_rule(query, key, value, **rest)[0]


TARGETS = {
    "llama": lambda: tiny_llama(initializer_range=0.2),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**DENSE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**DENSE, head_dim=8)),
    "qwen3_5": lambda: tiny_hybrid(initializer_range=0.2, linear_num_value_heads=4, **HEADS),
    "qwen3_5_moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**MIXTURE)),
}


def make_target(kind: str) -> FrozenTarget:
    torch.manual_seed(1)
    model: Any = TARGETS[kind]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # of ones or zeros a wrong norm would look right
                weight.uniform_(0.5, 1.5)
    return FrozenTarget(model, TAPS)


@pytest.mark.parametrize("kind", TARGETS)
def test_fast_blocks_read_what_stock_blocks_read(kind: str) -> None:
    target = make_target(kind)
    ids = torch.randint(6, 60, (3, 37), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        taps, final = target.read(ids)
        tools, norms = Toolbox(fused=False, delta_rule=stock_delta_rule), []
        rms_norm = tools.rms_norm
        tools.rms_norm = lambda *arguments: norms.append(1) or rms_norm(*arguments)
        assert accelerate(target, tools) == 4
        fast_taps, fast_final = target.read(ids)
        assert len(norms) == 8, "two norms in each of four blocks"
        assert float(distances(fast_taps, taps).max()) < 1e-4
        assert float(distances(fast_final, final).max()) < 1e-4
        with stock_blocks(target):
            again, _ = target.read(ids)
        assert torch.equal(again, taps), "weights that were merged are still the stock blocks' own"
        assert torch.equal(target.read(ids)[0], fast_taps)


def test_the_truth_check_compares_fast_blocks_with_stock_ones() -> None:
    target = make_target("qwen3_5")
    accelerate(target, Toolbox(fused=False, delta_rule=stock_delta_rule))
    documents = [torch.arange(6, 30), torch.arange(8, 15)]
    checks = {check.name: check for check in truth_check(target, documents)}
    assert 0 < checks["fast blocks equal stock"].worst < 1e-4

    def forgetful(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return stock_delta_rule(query, key, value, g=g * 0, beta=beta)

    accelerate(target, Toolbox(fused=False, delta_rule=forgetful))
    with pytest.raises(ValueError, match="not so: fast blocks equal stock: they differ by"):
        truth_check(target, documents)


def test_blocks_of_another_make_stay_as_they_are() -> None:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    target = FrozenTarget(Olmo2ForCausalLM(Olmo2Config(**DENSE)), TAPS)
    assert accelerate(target, Toolbox(fused=False, delta_rule=None)) == 0
    assert not target.in_place


def test_a_delta_rule_of_another_shape_stays_as_it_is() -> None:
    torch.manual_seed(1)
    target = FrozenTarget(tiny_hybrid(initializer_range=0.2, linear_value_head_dim=64), TAPS)
    ids = torch.randint(6, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        stock, _ = target.read(ids)
        assert accelerate(target, Toolbox(fused=False, delta_rule=lambda *_, **__: pytest.fail("called"))) == 4
        assert float(distances(target.read(ids)[0], stock).max()) < 1e-4


def test_merged_weights_are_held_once() -> None:
    layers = [torch.nn.Linear(8, rows, bias=False) for rows in (3, 5)]
    before = [layer.weight.detach().clone() for layer in layers]
    weight = merge(*layers)
    assert torch.equal(weight, torch.cat(before))
    assert layers[1].weight.data_ptr() == weight.data_ptr() + 3 * 8 * 4
    assert torch.equal(layers[1].weight, before[1])


def test_the_contract_says_by_which_path_states_are_read() -> None:
    assert choose_tools().delta_rule is None, "without a GPU the delta rule is Transformers' own"
    assert describe("auto") == {"device": "cpu", "blocks": "merged"}
    assert describe("stock") == {"device": "cpu", "blocks": "stock"}
