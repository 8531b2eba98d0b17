from pathlib import Path

import pytest
import torch

from foredraft.features.batching import batches_by_tokens, pad, padded_length, plan_shards, useful_lengths
from foredraft.tokens.shards import pack, read_shard
from foredraft.tokens.writer import ShardWriter


def write_tokens(folder: Path, sizes: dict[str, list[int]], per_shard: int) -> list[str]:
    """Token shards of documents of the given lengths, the second half of each supervised but for its last token."""
    folder.mkdir()
    for split, lengths in sizes.items():
        writer = ShardWriter(folder, split, per_shard)
        for number, size in enumerate(lengths):
            ids = torch.arange(number, number + size, dtype=torch.int32)
            mask = torch.zeros(size, dtype=torch.uint8)
            mask[size // 2 : -1] = 1
            writer.add(ids.numpy(), mask.numpy())
        writer.close()
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_every_document_is_planned_once_up_to_its_last_supervised_token(tmp_path: Path) -> None:
    sizes = {"train": [5, 30, 65, 40, 20, 100, 7] * 5, "validation": [9, 12]}
    names = write_tokens(tmp_path / "tokens", sizes, per_shard=600)
    plans = plan_shards(tmp_path / "tokens", names, batch_tokens=120, shard_tokens=300)
    assert len({plan.name for plan in plans}) == len(plans)
    assert {plan.source for plan in plans} == set(names)
    assert all(plan.tokens <= 300 for plan in plans)
    found: dict[str, list[list[int]]] = {"train": [], "validation": []}
    for plan in plans:
        split = plan.name.split("-")[0]
        assert plan.source.startswith(split)
        for (ids, mask), length in zip(plan.read(tmp_path / "tokens"), plan.lengths, strict=True):
            assert len(ids) == length
            assert bool(mask[-1]), "nothing after the last supervised token is read"
            found[split].append(ids.tolist())
    for split, lengths in sizes.items():
        expected = [list(range(number, number + size - 1)) for number, size in enumerate(lengths)]
        assert sorted(found[split]) == sorted(expected)
    numbers = [int(plan.name[6:11]) for plan in plans if plan.name.startswith("train")]
    assert numbers == list(range(len(numbers)))


def test_plans_are_the_same_each_time_and_batches_of_all_lengths_share_a_shard(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 400, (600,), generator=generator).tolist()
    names = write_tokens(tmp_path / "tokens", {"train": lengths}, per_shard=10**6)
    plans = plan_shards(tmp_path / "tokens", names, 2048, 20_000)
    assert plans == plan_shards(tmp_path / "tokens", names, 2048, 20_000)
    means = [plan.tokens / len(plan.lengths) for plan in plans[:-1]]
    assert min(means) > 0.4 * max(means), "long and short documents are spread over the shards"


def test_little_is_padding_on_lengths_like_those_of_real_answers() -> None:
    """Log-normal, mean about 1,500, up to 8,192: the padding of a batch is what its shortest row lacks to its longest."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4000, generator=generator) * 0.8 + 7.0
    lengths = drawn.exp().clamp(16, 8192).int().tolist()
    batches = batches_by_tokens(lengths, 16_384)
    assert sorted(i for batch in batches for i in batch) == list(range(4000))
    held = [len(batch) * padded_length(max(lengths[i] for i in batch)) for batch in batches]
    assert max(held) <= 16_384
    assert 1 - sum(lengths) / sum(held) < 0.03


def test_a_document_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    assert batches_by_tokens([50, 300, 20], 100) == [(1,), (0,), (2,)]


def test_padding_is_on_the_right_and_to_a_round_length() -> None:
    padded = pad([torch.tensor([5, 6, 7]), torch.tensor([8])])
    assert padded.tolist() == [[5, 6, 7, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0, 0, 0]]


def test_a_document_without_supervision_is_named() -> None:
    shard = pack([([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 0]), ([6, 7], [1, 0])])
    with pytest.raises(ValueError, match="document 1 of a token shard has no supervised token"):
        useful_lengths(shard)
    assert useful_lengths(pack([([1, 2, 3], [0, 1, 1]), ([6, 7], [1, 0])])).tolist() == [3, 1]


def test_reading_a_plan_gives_what_the_shard_holds(tmp_path: Path) -> None:
    names = write_tokens(tmp_path / "tokens", {"train": [20, 8, 31]}, per_shard=1000)
    (plan,) = plan_shards(tmp_path / "tokens", names, 1000, 1000)
    shard = read_shard(tmp_path / "tokens" / names[0])
    for number, (ids, mask) in zip(plan.documents, plan.read(tmp_path / "tokens"), strict=True):
        whole_ids, whole_mask = shard.document(number)
        assert torch.equal(ids, whole_ids[: len(ids)])
        assert torch.equal(mask, whole_mask[: len(ids)])
        assert not bool(whole_mask[len(ids) :].any())


def test_few_documents_of_many_lengths_make_smaller_batches_instead_of_padding() -> None:
    lengths = [500, 499, 498, 200, 199, 60, 58, 50, 16]
    batches = batches_by_tokens(lengths, 2048)
    assert batches == [(0, 1, 2), (3, 4), (5, 6, 7), (8,)]
    alike = [100] * 40
    assert [len(batch) for batch in batches_by_tokens(alike, 2080)] == [20, 20], "no smaller than they need be"
