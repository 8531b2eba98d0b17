from pathlib import Path

import pytest
import torch

from foredraft.artifacts import ArtifactError
from foredraft.features.checks import shard_statistics, truth_check
from foredraft.features.engine import batches_by_tokens, read_features
from foredraft.features.layout import FeatureShard, open_features
from foredraft.target.frozen import FrozenTarget, check_layer_ids
from tests.builders import EXTRACT, make_features, some_documents, tiny_frozen
from tests.conftest import TAPS, tiny_hybrid, tiny_llama


def test_a_tap_is_the_residual_stream_after_its_block(tiny_target: FrozenTarget) -> None:
    ids = torch.arange(6, 20)[None]
    with torch.inference_mode():
        stock = tiny_target.model(input_ids=ids, output_hidden_states=True)
        taps, final = tiny_target.read(ids, torch.ones_like(ids))
    for index, layer_id in enumerate(TAPS):
        torch.testing.assert_close(taps[:, :, index], stock.hidden_states[layer_id + 1])
    torch.testing.assert_close(tiny_target.head(final), stock.logits)


def test_the_head_never_gets_a_view_with_a_gap() -> None:
    """A product with one copies the whole head for each row: half the time of a prefill, and gigabytes."""
    target, seen = tiny_frozen(), []
    target.head.register_forward_hook(lambda _head, inputs, _output: seen.append(inputs[0].is_contiguous()))
    with torch.inference_mode():
        target.model(input_ids=torch.arange(12).view(3, 4), logits_to_keep=1)
    assert seen == [True]


def test_the_last_block_is_tapped_before_the_final_norm() -> None:
    target = FrozenTarget(tiny_llama(), [3])
    ids = torch.arange(6, 20)[None]
    taps, final = target.read(ids, torch.ones_like(ids))
    torch.testing.assert_close(target.model.get_decoder().norm(taps[:, :, 0]), final)
    assert not torch.allclose(taps[:, :, 0], final)


@pytest.mark.parametrize("ids", [[], [1, 1], [-1], [4]])
def test_taps_must_be_distinct_and_in_range(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"has 4 \(0 to 3\)"):
        check_layer_ids(ids, 4)


def test_features_do_not_depend_on_the_batch(tiny_target: FrozenTarget) -> None:
    shard = some_documents(6, seed=0)
    one_by_one = read_features(tiny_target, shard, EXTRACT.model_copy(update={"batch_tokens": 1}))
    together = read_features(tiny_target, shard, EXTRACT.model_copy(update={"batch_tokens": 10_000}))
    for name in ("input_ids", "loss_mask", "offsets"):
        assert torch.equal(one_by_one[name], together[name])
    torch.testing.assert_close(one_by_one["target_hidden"], together["target_hidden"], rtol=0.02, atol=0.02)
    torch.testing.assert_close(one_by_one["topk_logprobs"], together["topk_logprobs"], rtol=1e-3, atol=1e-3)


def test_top_k_is_the_targets_own_distribution_of_each_supervised_token(tmp_path: Path) -> None:
    target = tiny_frozen()
    shard = FeatureShard(make_features(tmp_path / "f", target) / "train-00000.safetensors", "x")
    document = shard.document(3)
    with torch.inference_mode():
        logprobs = target.model(input_ids=document.input_ids[None]).logits[0].log_softmax(-1)
    positions = document.loss_mask.nonzero()[:, 0]
    expected = logprobs[positions - 1].topk(EXTRACT.top_k)
    assert torch.equal(document.topk_ids, expected.indices)
    torch.testing.assert_close(document.topk_logprobs, expected.values, rtol=1e-4, atol=1e-4)
    assert shard.supervised(3) == len(positions)
    assert document.target_hidden.shape == (shard.length(3), len(TAPS), 16)


def test_batches_hold_the_budget_and_every_document() -> None:
    shard = some_documents(40, seed=5)
    lengths = shard.offsets.diff()
    batches = batches_by_tokens(shard, 100)
    assert sorted(i for batch in batches for i in batch) == list(range(40))
    assert all(len(batch) * int(lengths[batch].max()) <= 100 for batch in batches)


@pytest.mark.parametrize("make", [tiny_llama, tiny_hybrid])
def test_the_truth_check_passes_on_a_true_target_and_sees_a_false_tap(make: object) -> None:
    target = FrozenTarget(make(), TAPS)  # type: ignore[operator]
    documents = [torch.arange(6, 20), torch.arange(8, 15)]
    with torch.inference_mode():
        assert max(truth_check(target, documents).values()) < 1e-4
    # The hooks now sit one block later than the ids say: the classic off-by-one.
    shifted = FrozenTarget(target.model, (1, 2))
    shifted.taps = lambda: torch.stack([shifted._captured[k] for k in (1, 2)], dim=2)  # type: ignore[method-assign]
    shifted.layer_ids = (0, 1)
    with pytest.raises(ValueError, match="truth check: taps differ"), torch.inference_mode():
        truth_check(shifted, documents)


@pytest.mark.parametrize(
    ("value", "problem"),
    [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "constant"), (1.5, "constant")],
)
def test_bad_states_are_named_by_shard_block_and_token(value: float, problem: str) -> None:
    states = torch.randn(8, 2, 16)
    states[5, 1] = value
    with pytest.raises(ValueError, match=f"code/train-00000: 1 states after block 2 are {problem}, first: token 5"):
        shard_statistics(states, TAPS, "code/train-00000")


def test_a_truncated_and_a_missing_shard_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_features(tmp_path / "code", tiny_frozen())
    shard = folder / "train-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) * 9 // 10])
    with pytest.raises(ArtifactError, match=r"train-00001.safetensors: expected \d+ bytes, found.*extract@code"):
        open_features(folder, "code")
    with pytest.raises(ArtifactError, match="train-00001.safetensors: not a readable feature shard"):
        FeatureShard(shard, "dvc repro extract@code")
    shard.unlink()
    with pytest.raises(ArtifactError, match=r"train-00001.safetensors: file is missing"):
        open_features(folder, "code")
