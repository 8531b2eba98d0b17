"""The corpus of the data benchmark: the same every time, of the shape it claims, no two rows alike."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from bench.conversations import LONGEST_ROW, LONGEST_TURN, Pool, conversation, sentences, write_corpus


@pytest.fixture(scope="module")
def pool() -> Pool:
    prose = [f"Sentence {number} says that {number * 7} is not {number * 11} of it." for number in range(20_000)]
    code = [f"def function_{number}(value):\n    return value + {number}\n" * 3 for number in range(5_000)]
    return Pool(prose[:10_000], prose, code)


def grams(row: dict[str, Any]) -> set[tuple[str, ...]]:
    words = " ".join(turn["content"] for turn in row["conversations"]).split()
    return {tuple(words[start : start + 5]) for start in range(len(words) - 4)}


def test_a_longer_corpus_begins_with_the_shorter_one_and_a_seed_decides(pool: Pool, tmp_path: Path) -> None:
    for name, rows, seed in (("short", 5, 1), ("long", 9, 1), ("other", 5, 2)):
        write_corpus(tmp_path / name, rows, seed, pool)
    short, long, other = ((tmp_path / name).read_text().splitlines() for name in ("short", "long", "other"))
    assert len(long) == 9 and long[:5] == short
    assert not set(other) & set(short)
    assert json.loads(short[3]) == conversation(3, 1, pool)


def test_rows_have_the_shape_of_chat_and_differ(pool: Pool) -> None:
    rows = [conversation(number, 1, pool) for number in range(300)]
    for row in rows:
        turns = row["conversations"]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        assert 1 <= len(turns) // 2 <= 6
        assert all(turn["content"].strip() for turn in turns)
        assert sum(len(turn["content"]) for turn in turns) <= LONGEST_ROW + 2 * LONGEST_TURN
    assert 2.6 < sum(len(row["conversations"]) for row in rows) / 2 / len(rows) < 3.3
    assert len({row["id"] for row in rows}) == len(rows)
    for one, other in combinations(map(grams, rows[:60]), 2):
        assert len(one & other) < 0.5 * len(one | other)


def test_only_prose_without_control_tokens_is_taken() -> None:
    text = "This is the first of two sentences. 1 2 3 4 5 6 7 8 9 10 11 12. <|im_start|>this is not one of them."
    assert list(sentences(text)) == ["This is the first of two sentences."]
    assert not list(sentences("This is the answer to what was asked for.</think>"))
    assert not list(sentences("Write to somebody@example.org if that is what you are asked for."))
