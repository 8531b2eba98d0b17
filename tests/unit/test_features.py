import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from foredraft.artifacts import ArtifactError
from foredraft.features import storing
from foredraft.features.checks import truth_check
from foredraft.features.layout import FeatureShard, ShardFile, dequantise, open_features, quantise
from foredraft.features.reading import Reader, Reading, largest
from foredraft.features.storing import Store, statistics
from foredraft.features.taps import CONSTANT, NOT_FINITE, inspect
from foredraft.scratch import Scratch
from foredraft.target.frozen import FrozenTarget, check_layer_ids
from tests.builders import EXTRACT, make_features, one_batch_plan, some_documents, tiny_frozen, write_features
from tests.conftest import HIDDEN, TAPS, tiny_hybrid, tiny_llama


def test_a_tap_is_the_residual_stream_after_its_block(tiny_target: FrozenTarget) -> None:
    ids = torch.arange(6, 20)[None]
    with torch.inference_mode():
        stock = tiny_target.model(input_ids=ids, output_hidden_states=True)
        taps, final = tiny_target.read(ids)
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
    taps, final = target.read(torch.arange(6, 20)[None])
    torch.testing.assert_close(target.model.get_decoder().norm(taps[:, :, 0]), final)
    assert not torch.allclose(taps[:, :, 0], final)


@pytest.mark.parametrize("ids", [[], [1, 1], [-1], [4]])
def test_taps_must_be_distinct_and_in_range(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"has 4 \(0 to 3\)"):
        check_layer_ids(ids, 4)


def test_without_top_k_no_block_after_the_last_tap_is_run(tiny_target: FrozenTarget) -> None:
    ran: list[int] = []
    for index, block in enumerate(tiny_target.blocks):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    shard = some_documents(3, seed=0)
    reading = Reader(tiny_target, torch.float32, 0).read([shard.document(i) for i in range(3)])
    assert ran == [0, 1]  # the hook of block 2 ends the pass
    assert reading.topk_ids.shape == (int(shard.loss_mask.sum()), 0)
    whole = Reader(tiny_target, torch.float32, 4).read([shard.document(i) for i in range(3)])
    assert torch.equal(reading.hidden, whole.hidden)


@pytest.mark.parametrize("make", [tiny_llama, tiny_hybrid])
def test_every_stored_state_equals_a_stock_forward_of_its_document_alone(make: Any) -> None:
    tiny_target = FrozenTarget(make(initializer_range=0.2), TAPS)
    shard = some_documents(7, seed=0, low=5, high=60)
    documents = [shard.document(i) for i in range(7)]
    reading = Reader(tiny_target, torch.float32, 4).read(documents)
    start = row = 0
    for ids, mask in documents:
        with torch.inference_mode():
            stock = tiny_target.model(input_ids=ids[None].long(), output_hidden_states=True)
        hidden = reading.hidden[start : start + len(ids)]
        for tap, layer_id in enumerate(TAPS):
            torch.testing.assert_close(hidden[:, tap], stock.hidden_states[layer_id + 1][0], rtol=1e-5, atol=1e-5)
        places = mask.nonzero()[:, 0]
        expected = stock.logits[0, places - 1].log_softmax(-1).topk(4)
        assert torch.equal(reading.topk_ids[row : row + len(places)].long(), expected.indices)
        torch.testing.assert_close(
            reading.topk_logprobs[row : row + len(places)], expected.values, rtol=1e-4, atol=1e-4
        )
        start, row = start + len(ids), row + len(places)
    assert torch.equal(reading.input_ids, shard.input_ids)


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
    assert document.target_hidden.shape == (shard.length(3), len(TAPS), HIDDEN)


@pytest.mark.parametrize("size", [1024, 512 * 40, 500])
def test_the_largest_of_groups_are_the_largest_of_all(size: int) -> None:
    logits = torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    assert torch.equal(largest(logits, 16), logits.topk(16).indices)
    logits[:, 7:23] = 50 - torch.arange(16.0)  # all of them in one group
    assert torch.equal(largest(logits, 16), logits.topk(16).indices)


def test_float8_keeps_each_state_to_its_precision_whatever_its_size() -> None:
    states = (
        torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 3e4])[:, None]
    )
    states[7, 1, 5] = 900.0  # one value far above the rest
    stored, scale = quantise(states)
    assert stored.dtype == torch.float8_e4m3fn
    assert scale.shape == (50, 3)
    back = dequantise(stored, scale).float()
    step = states.abs().amax(-1, keepdim=True) / 448 * 2**-9
    assert bool(((back - states).abs() <= states.abs() * (2**-4 + 2**-8) + step).all())


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_shard_reads_back_what_was_written_in_one_batch_or_many(tmp_path: Path, storage: torch.dtype) -> None:
    target, tokens = tiny_frozen(), some_documents(9, seed=4)
    one = FeatureShard(write_features(target, tokens, tmp_path / "one.safetensors", storage), "x")
    many = FeatureShard(write_features(target, tokens, tmp_path / "many.safetensors", storage, rows=2), "x")
    with torch.inference_mode():
        for index in range(9):
            a, b = one.document(index), many.document(index)
            ids, mask = tokens.document(index)
            assert torch.equal(a.input_ids, ids.long())
            assert torch.equal(a.loss_mask, mask.bool())
            assert torch.equal(a.topk_ids, b.topk_ids)
            taps, _ = target.read(ids[None].long())
            tolerance = 0.01 if storage == torch.bfloat16 else 0.08
            assert float((a.target_hidden.float() - taps[0]).norm() / taps.norm()) < tolerance
            torch.testing.assert_close(a.target_hidden, b.target_hidden, rtol=tolerance, atol=tolerance)


def test_a_token_in_float8_takes_half_of_one_in_bfloat16(tmp_path: Path) -> None:
    """Five taps of 5120: 25,600 bytes, five scales, and what belongs to the token itself."""
    states = torch.randn(40, 5, 5120)
    stored, scale = quantise(states)
    rest = 4 + 1 + 16 * 8  # its id, its mask, its top 16
    assert (stored.nbytes + scale.nbytes) / 40 + rest <= 25_800


def test_the_digest_on_the_way_is_the_files_own(tmp_path: Path) -> None:
    import hashlib

    with (tmp_path / "x.safetensors").open("wb") as stream:
        file = ShardFile(stream, {"a": (torch.bfloat16, (3, 4)), "b": (torch.int64, (2,))})
        file.write(torch.ones(1, 4, dtype=torch.bfloat16))
        file.write(torch.zeros(2, 4, dtype=torch.bfloat16))
        with pytest.raises(AssertionError, match="16 bytes of a feature shard were not written"):
            file.digest()
        file.write(torch.tensor([5, 6]))
    assert file.digest() == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    with safe_open(tmp_path / "x.safetensors", framework="pt") as read:
        assert read.get_tensor("b").tolist() == [5, 6]
        assert read.get_tensor("a").sum() == 4


def test_a_tensor_off_its_own_size_is_refused(tmp_path: Path) -> None:
    shapes = {"a": (torch.uint8, (3,)), "b": (torch.int64, (2,))}
    with (
        (tmp_path / "x").open("wb") as stream,
        pytest.raises(ValueError, match="b of torch.int64 would begin at byte 3"),
    ):
        ShardFile(stream, shapes)


@pytest.mark.parametrize("make", [tiny_llama, tiny_hybrid])
def test_the_truth_check_passes_on_a_true_target_and_sees_a_false_tap(make: Any, capsys: Any) -> None:
    target = FrozenTarget(make(), TAPS)
    documents = [torch.arange(6, 20), torch.arange(8, 15)]
    checks = truth_check(target, documents)
    assert max(check.worst for check in checks) < 1e-4
    assert "alone equals batched" in capsys.readouterr().err
    # The hooks now sit one block later than the ids say: the classic off-by-one.
    shifted = FrozenTarget(target.model, (1, 2))
    shifted.taps = lambda: torch.stack([shifted._captured[k] for k in (1, 2)], dim=2)  # type: ignore[method-assign]
    shifted.layer_ids = (0, 1)
    with pytest.raises(ValueError, match="truth check: not so: hook equals hidden_states"):
        truth_check(shifted, documents)


def test_the_truth_check_sees_a_final_state_that_is_normed_twice() -> None:
    target = FrozenTarget(tiny_llama(), TAPS)
    with torch.no_grad():
        target.decoder.norm.weight.uniform_(0.5, 2.0)
    read = target.read
    target.read = lambda ids: (read(ids)[0], target.decoder.norm(read(ids)[1]))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not so: rebuilt logits equal the target's"):
        truth_check(target, [torch.arange(6, 20)])


def test_the_truth_check_sees_padding_that_reaches_a_row() -> None:
    """What left padding does to a recurrent layer."""
    target = FrozenTarget(tiny_hybrid(), TAPS)
    read = target.read

    def left_padded(ids: Tensor) -> tuple[Tensor, Tensor]:
        taps, final = read(torch.cat([torch.zeros_like(ids[:, :5]), ids], 1) if len(ids) > 1 else ids)
        return (taps[:, 5:], final[:, 5:]) if len(ids) > 1 else (taps, final)

    target.read = left_padded  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not so: alone equals batched"):
        truth_check(target, [torch.arange(6, 20), torch.arange(8, 15)])


@pytest.mark.parametrize(
    ("value", "fault"), [(float("nan"), NOT_FINITE), (float("inf"), NOT_FINITE), (0.0, CONSTANT), (1.5, CONSTANT)]
)
def test_a_bad_state_is_seen_before_any_cast(value: float, fault: int) -> None:
    states = torch.randn(8, 16)
    states[5] = value
    assert inspect(states)[0].tolist() == [0, 0, 0, 0, 0, fault, 0, 0]
    overflow = torch.randn(2, 16).half()
    overflow[1, 3] = 7e4  # more than float16 holds
    assert inspect(overflow)[0].tolist() == [0, NOT_FINITE]
    good = torch.tensor([[1.0, 0.0, -3.0]])
    assert inspect(good)[1].tolist() == [-2.0, 10.0, 1.0]


class BadReader(Reader):
    """Spoils one token of one tap of each batch."""

    def read(self, documents: list[tuple[Tensor, Tensor]]) -> Reading:
        """As it comes, but for one fault."""
        reading = super().read(documents)
        if len(documents) == 2:
            with torch.inference_mode():
                reading.faults[len(documents[0][0]) + 3, 1] = NOT_FINITE
        return reading


def test_a_bad_row_is_named_and_nothing_of_its_shard_is_left(tmp_path: Path) -> None:
    target, tokens = tiny_frozen(), some_documents(8, seed=3)
    documents = [tokens.document(i) for i in range(8)]
    plan = one_batch_plan(documents, "train-00000.safetensors", rows=2)
    message = "code/train-00000.safetensors: 1 states after block 2 are not finite, the first at token 3 of document 1"
    with pytest.raises(ValueError, match=message), Store(Scratch(tmp_path), "code", TAPS, lambda _: None) as store:
        from foredraft.features.engine import read_shard

        read_shard(BadReader(target, torch.bfloat16, 4), store, plan, documents)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_line_and_leaves_finished_shards(tmp_path: Path, monkeypatch: Any) -> None:
    target, tokens = tiny_frozen(), some_documents(6, seed=3)
    documents = [tokens.document(i) for i in range(6)]

    class FullDisk(ShardFile):
        def write(self, tensor: Tensor) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    from foredraft.features.engine import read_shard

    reader = Reader(target, torch.bfloat16, 4)
    with Store(Scratch(tmp_path), "code", TAPS, lambda _: None) as store:
        read_shard(reader, store, one_batch_plan(documents, "train-00000.safetensors"), documents)
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(storing, "ShardFile", FullDisk)
    message = "sources.code: no space left in .*: finished shards are kept; make space and run it again"
    with pytest.raises(ValueError, match=message), Store(Scratch(tmp_path), "code", TAPS, lambda _: None) as store:
        read_shard(reader, store, one_batch_plan(documents, "train-00001.safetensors"), documents)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    monkeypatch.undo()
    with Store(Scratch(tmp_path), "code", TAPS, lambda _: None) as store:
        read_shard(reader, store, one_batch_plan(documents, "train-00001.safetensors"), documents)
    assert Scratch(tmp_path).has("train-00001.safetensors")


def test_statistics_of_taps_are_those_of_all_their_values(tmp_path: Path) -> None:
    target, tokens = tiny_frozen(), some_documents(9, seed=4)
    documents = [tokens.document(i) for i in range(9)]
    from foredraft.features.engine import read_shard

    names = ["a.safetensors", "b.safetensors"]
    with Store(Scratch(tmp_path), "code", TAPS, lambda _: None) as store:
        for name, part in zip(names, (documents[:4], documents[4:]), strict=True):
            read_shard(Reader(target, torch.bfloat16, 4), store, one_batch_plan(part, name, rows=2), part)
    found = statistics(tmp_path, names, TAPS, HIDDEN)
    with torch.inference_mode():
        taps = torch.cat([target.read(ids[None].long())[0][0] for ids, _ in documents])
    for index, layer_id in enumerate(TAPS):
        values = taps[:, index]
        assert found[str(layer_id)]["mean"] == pytest.approx(float(values.mean()), rel=1e-2, abs=1e-4)
        assert found[str(layer_id)]["std"] == pytest.approx(float(values.std(correction=0)), rel=1e-3)
        assert found[str(layer_id)]["zeros"] == 0.0


def test_a_truncated_and_a_missing_shard_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_features(tmp_path / "code", tiny_frozen())
    shard = folder / "train-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) * 9 // 10])
    with pytest.raises(ArtifactError, match=r"train-00001.safetensors: expected \d+ bytes, found.*extract@code"):
        open_features(folder, "code")
    with pytest.raises(ArtifactError, match="train-00001.safetensors: not a readable feature shard"):
        FeatureShard(shard, "dvc repro extract@code")
    shard.write_bytes(whole + bytes(16))
    with pytest.raises(ArtifactError, match=r"train-00001.safetensors: expected \d+ bytes, found"):
        open_features(folder, "code")
    shard.unlink()
    with pytest.raises(ArtifactError, match=r"train-00001.safetensors: file is missing"):
        open_features(folder, "code")
