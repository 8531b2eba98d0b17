"""Answers -> documents -> shards: what is supervised, what is left out, and what the files hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from foredraft.artifacts import Manifest, publish
from foredraft.conversations.schema import Conversation, to_record, write_records
from foredraft.responses.schema import Response, write_responses
from foredraft.tokens.config import PrepareConfig
from foredraft.tokens.documents import merged
from foredraft.tokens.prepare import prepare
from foredraft.tokens.shards import TokenShard, open_tokens, pack, read_shard
from foredraft.tokens.writer import ShardWriter, length_bin
from tests.tokenizers import make_tokenizer

CONFIG = PrepareConfig(max_length=60, min_supervised_tokens=4, shard_tokens=100, max_skip_ratio=0.5)


def answered(number: int, turn: int, prompt: list[int], response: list[int], split: str = "train") -> Response:
    return Response(f"{number:024x}", turn, split, prompt, response, "stop")


def make_interface(folder: Path, template: str = "chatml") -> Path:
    tokenizer = make_tokenizer(template)
    facts = {"vocab_rows": 710, "eos_token_ids": [tokenizer.eos_token_id]}
    if not folder.exists():
        with publish(folder, Manifest("target", contract={"thinking": True}, facts=facts)) as building:
            tokenizer.save_pretrained(building)
    return folder


def prepared(
    folder: Path, rows: list[Any], template: str = "chatml", **changes: Any
) -> tuple[Manifest, list[TokenShard]]:
    """Prepare answered rows, or conversations to be kept."""
    answers = "generate" if isinstance(rows[0], Response) else "keep"
    counts = {"rows_in": len(rows), "rows_out": len(rows), "skipped": {}}
    with publish(folder / "responses", Manifest("responses", counts=counts, facts={"answers": answers})) as building:
        if answers == "generate":
            write_responses(rows, building / "responses-00000.parquet")
        else:
            write_records([to_record(row) for row in rows], building / "conversations-00000.parquet")
    interface = make_interface(folder / "target", template)
    prepare("s", PrepareConfig(**CONFIG.model_dump() | changes), folder / "responses", interface, folder / "out")
    manifest = open_tokens(folder / "out", "s")
    return manifest, [read_shard(folder / "out" / name) for name in sorted(manifest.facts["shards"])]


def kept(number: int, messages: list[dict[str, str]], **changes: Any) -> Conversation:
    values = {"tools": [], "kind": "general", "origin": "s", "licence": "MIT", "split": "train", "group": ""}
    return Conversation(**{**values, "id": f"{number:024x}", "messages": messages, **changes})


def exchange(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def documents_of(shards: list[TokenShard]) -> list[tuple[list[int], list[int]]]:
    pairs = [shard.document(i) for shard in shards for i in range(len(shard))]
    return [(ids.tolist(), mask.tolist()) for ids, mask in pairs]


def test_ids_of_answers_are_used_as_generated_and_turns_that_go_on_share_a_document() -> None:
    first = answered(1, 0, [1, 2], [7, 8])
    goes_on = answered(1, 1, [1, 2, 7, 8, 3], [9])
    rewritten = answered(1, 2, [1, 2, 6, 3], [5, 5])
    one, other = merged([first, goes_on, rewritten])
    assert (one.ids, one.spans) == ([1, 2, 7, 8, 3, 9], [(2, 4), (5, 6)])
    assert one.mask() == [0, 0, 1, 1, 0, 1]
    assert (other.ids, other.spans) == ([1, 2, 6, 3, 5, 5], [(4, 6)])


def test_rows_are_cut_counted_and_left_out_by_name(tmp_path: Path) -> None:
    rows = [
        answered(1, 0, [1] * 5, [7] * 10),
        answered(1, 1, [1] * 5 + [7] * 10 + [2], [8] * 4),
        answered(2, 0, [1] * 50, [7] * 20, "validation"),
        answered(3, 0, [1] * 58, [7] * 20),
        answered(4, 0, [1] * 58, [7] * 3),
    ]
    manifest, shards = prepared(tmp_path, rows)
    assert manifest.counts == {
        "rows_in": 5,
        "rows_out": 2,
        "skipped": {"joined_to_the_turn_before": 1, "too_few_supervised": 2},
    }
    facts = manifest.facts
    assert (facts["tokens"], facts["supervised"], facts["cut"]) == (20 + 60, 14 + 10, 1)
    assert facts["lengths"] == {"64": 2}
    assert documents_of(shards) == [
        ([1] * 5 + [7] * 10 + [2] + [8] * 4, [0] * 5 + [1] * 10 + [0] + [1] * 4),
        ([1] * 50 + [7] * 10, [0] * 50 + [1] * 10),
    ]


def test_a_row_whose_answer_begins_behind_the_limit_is_left_out_however_it_came(tmp_path: Path) -> None:
    """As text and as ids: with fewer supervised tokens than a block it would be read for nothing."""
    long = kept(1, exchange("word " * 100, "an answer of some length, but behind the limit"))
    tokenised = kept(2, [], input_ids=[5] * 80, loss_mask=[0] * 70 + [1] * 10)
    fine = kept(3, [], input_ids=[5] * 20, loss_mask=[0] * 10 + [1] * 10)
    manifest, shards = prepared(tmp_path, [long, tokenised, fine])
    assert manifest.counts == {"rows_in": 3, "rows_out": 1, "skipped": {"too_few_supervised": 2}}
    assert documents_of(shards) == [([5] * 20, [0] * 10 + [1] * 10)]


def test_a_tokenised_row_is_held_to_the_same_rules(tmp_path: Path) -> None:
    rows = [
        kept(1, [], input_ids=[5] * 20, loss_mask=[1] * 10 + [0] * 10),
        kept(3, [], input_ids=[5] * 10, loss_mask=[0] * 2 + [1] * 8),
    ]
    begin = make_tokenizer("headers").bos_token_id
    rows.append(kept(2, [], input_ids=[begin, begin, *[5] * 8], loss_mask=[0] * 2 + [1] * 8))
    manifest, shards = prepared(tmp_path, rows, template="headers", max_length=10, max_skip_ratio=1.0)
    assert manifest.counts["skipped"] == {"doubled_bos": 1, "mask_all_ones": 1}
    assert documents_of(shards) == [([5] * 10, [0] * 2 + [1] * 8)]


def test_one_row_that_the_template_refuses_costs_that_row(tmp_path: Path) -> None:
    good = [kept(n, exchange(f"Question {n}?", "A fine answer.")) for n in range(100)]
    bad = [
        kept(200, [{"role": "assistant", "content": "Hi"}, *exchange("a question", "an answer")]),
        kept(201, [*exchange("one"), *exchange("two", "three")]),
    ]
    manifest, _ = prepared(tmp_path, [*good, *bad], template="alternating")
    assert manifest.counts == {"rows_in": 102, "rows_out": 100, "skipped": {"template_refuses": 2}}
    with pytest.raises(
        ValueError, match=rf"prepare.max_skip_ratio = 0.01 unusable of 102: 2 template_refuses .*{bad[0].id}"
    ):
        prepared(tmp_path, [*good, *bad], template="alternating", max_skip_ratio=0.01)


def test_no_mask_is_all_zeros_or_all_ones_and_none_covers_what_the_user_says(tmp_path: Path) -> None:
    rows = [
        kept(n, exchange("Say <|im_start|>assistant now" if n == 3 else f"Question {n}?", "A fine answer."))
        for n in range(8)
    ]
    manifest, shards = prepared(tmp_path, rows)
    assert manifest.counts["skipped"] == {"control_token_in_text": 1}
    tokenizer = make_tokenizer("chatml")
    for ids, mask in documents_of(shards):
        assert len(ids) == len(mask) and 0 < sum(mask) < len(mask)
        said = [token for token, bit in zip(ids, mask, strict=True) if bit]
        assert tokenizer.decode(said) == "A fine answer.<|im_end|>"


def test_a_source_without_a_document_fails_by_reason(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"sources.s: no usable row of 1: 1 too_few_supervised \(first: conversation 0"
    ):
        prepared(tmp_path, [answered(1, 0, [1], [2])])
    with pytest.raises(ValueError, match=r"has id 999, past 710 embeddings"):
        prepared(tmp_path, [answered(1, 0, [999], [2] * 9)])
    assert not (tmp_path / "out").exists()


def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.conversations.schema.GROUP_ROWS", 8)
    rows = [kept(n, exchange(f"Question {n}?", "A fine answer. " * (n % 5 + 1))) for n in range(40)]
    found = []
    for workers in ("1", "2"):
        monkeypatch.setenv("FOREDRAFT_WORKERS", workers)
        found.append(prepared(tmp_path, rows)[0])
    assert found[0] == found[1] and len(found[0].facts["shards"]) > 3


def test_a_streamed_shard_is_the_one_that_the_library_would_write(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    documents = [
        (generator.integers(0, 700, n, dtype=np.int32), generator.integers(0, 2, n, dtype=np.uint8))
        for n in (5, 30, 65, 100, 1, 130, 2)
    ]
    writer = ShardWriter(tmp_path, "train", 100)
    for ids, mask in documents:
        writer.add(ids, mask)
    writer.close()
    assert [facts["documents"] for facts in writer.facts.values()] == [3, 1, 1, 1, 1]
    shards = [read_shard(tmp_path / name) for name in writer.facts]
    assert documents_of(shards) == [(ids.tolist(), mask.tolist()) for ids, mask in documents]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(writer.facts), "nothing else is left"
    packed = pack([(ids.tolist(), mask.tolist()) for ids, mask in documents[:3]])
    with safe_open(tmp_path / "train-00000.safetensors", framework="pt") as file:
        for name, tensor in vars(packed).items():
            assert torch.equal(file.get_tensor(name), tensor) and file.get_tensor(name).dtype == tensor.dtype
    assert writer.lengths == {"64": 4, "128": 2, "256": 1}
    assert (length_bin(64), length_bin(65), length_bin(10**6)) == ("64", "128", "more")
