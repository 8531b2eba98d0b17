import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from foredraft.artifacts import Manifest, publish
from foredraft.benchmarks.build import build_benchmarks
from foredraft.benchmarks.config import BenchmarksConfig
from foredraft.conversations.config import CurateConfig
from foredraft.conversations.curate import curate, open_conversations, split_of
from foredraft.conversations.files import read_rows
from foredraft.conversations.readers import UnusableRow, normalise, read_auto, read_messages, read_traces
from foredraft.conversations.schema import conversation_id
from foredraft.sources.config import FetchConfig, RowShape, SourceConfig

MESSAGES = RowShape(uri="file:x", licence="MIT", format="messages")
CONFIG = CurateConfig(
    min_prompt_chars=3,
    max_prompt_chars=200,
    drop_matching={"personal_data": r"\w+@\w+\.\w+"},
    contamination_words=5,
    validation_share=0.5,
    max_skip_ratio=0.5,
)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
@pytest.mark.parametrize("array", [False, True])
def test_rows_are_read_whatever_the_name_says(tmp_path: Path, suffix: str, array: bool) -> None:
    rows = [{"a": 1}, {"a": "line\u2028separator\u0085"}]
    text = json.dumps(rows) if array else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    assert list(read_rows(path)) == rows


def test_rows_of_parquet_arrow_csv_and_of_one_object(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"a": "x", "b": "1"}, {"a": "y", "b": "2"}]
    dataset = Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "x.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    (tmp_path / "x.csv").write_text("a,b\nx,1\ny,2\n")
    (tmp_path / "x.json").write_text(json.dumps({"cases": rows}))
    assert list(read_rows(tmp_path / "x.parquet")) == rows
    assert list(read_rows(arrow)) == rows
    assert list(read_rows(tmp_path / "x.csv")) == rows
    assert list(read_rows(tmp_path / "x.json", key="cases")) == rows
    with pytest.raises(ValueError, match="no rows under the key 'rows'"):
        list(read_rows(tmp_path / "x.json", key="rows"))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"x.jsonl: line 2 is not JSON"):
        list(read_rows(path))


def test_tool_turns_keep_their_fields_and_null_content_becomes_empty() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"time": 1690876800}}}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "done", "reasoning_content": "thought"},
    ]
    absent = [dict(message) for message in messages]
    del absent[2]["content"]
    clean = normalise(messages)
    assert clean == normalise(absent)
    assert clean[2] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert clean[3]["tool_call_id"] == "1"
    assert clean[4]["reasoning_content"] == "thought"


def test_arguments_of_different_types_travel_unchanged(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"question {i}"}], "tools": [{"function": {"name": "f", "x": value}}]}
        for i, value in enumerate(["2025-08-01", 1690876800, {"other": None}])
    ]
    raw = make_raw(tmp_path, rows)
    curate("s", source(), CONFIG, raw, make_benchmarks(tmp_path, ["unrelated"]), tmp_path / "out")
    _, kept = open_conversations(tmp_path / "out", "s")
    assert sorted((row.tools for row in kept), key=str) == sorted((row["tools"] for row in rows), key=str)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no_messages"),
        ([], "no_messages"),
        ([{"role": "human", "content": "x"}], "unknown_role"),
        ([{"role": "user", "content": ["x"]}], "content_not_text"),
    ],
)
def test_unusable_rows_have_a_named_reason(messages: Any, reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        normalise(messages)


USER, ANSWER, SYSTEM = (
    {"role": role, "content": text} for role, text in {"user": "Hi", "assistant": "Yes", "system": "Be kind"}.items()
)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]},
            [USER],
        ),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}, [USER, ANSWER]),
        ({"conversations": [{"role": "user", "content": "Hi"}], "system": "Be kind"}, [SYSTEM, USER]),
        ({"instruction": "Hi", "input": "", "output": "Yes"}, [USER, ANSWER]),
        ({"instruction": "Add", "input": "1, 2"}, [{"role": "user", "content": "Add\n\n1, 2"}]),
        ({"prompt": "Hi", "response": "Yes", "system": "Be kind"}, [SYSTEM, USER, ANSWER]),
        ({"prompt": "Hi", "completion": "Yes"}, [USER, ANSWER]),
        ({"question": "Hi", "answer": "Yes"}, [USER, ANSWER]),
        ({"prompt": "Hi"}, [USER]),
    ],
)
def test_a_row_is_recognised_by_its_fields(row: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    (draft,) = read_auto(row, MESSAGES)
    assert draft.messages == messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "Hi"}, "unknown_shape"),
        ({"conversations": "Hi"}, "no_messages"),
        ({"conversations": [{"from": "robot", "value": "Hi"}]}, "unknown_role"),
        ({"instruction": 3}, "no_field_instruction"),
        ({"prompt": ["Hi"]}, "no_question"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content_not_text"),
    ],
)
def test_a_row_of_no_known_shape_has_a_named_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        list(read_auto(row, MESSAGES))


def test_a_question_asked_by_the_system_is_the_users() -> None:
    (draft,) = read_messages(
        {"input": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]}, MESSAGES
    )
    assert draft.messages == [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    (draft,) = read_messages({"input": "plain"}, MESSAGES)
    assert draft.messages == [{"role": "user", "content": "plain"}]


def test_traces_give_a_window_before_each_assistant_turn() -> None:
    shape = RowShape(uri="file:x", licence="MIT", format="traces", window_chars=10)
    roles = ["user", "assistant"] * 3
    messages = [
        {"role": role, "content": text}
        for role, text in zip(roles, ["1234", "56", "789", "x", "y" * 11, "z"], strict=True)
    ]
    windows = [[m["content"] for m in draft.messages] for draft in read_traces({"messages": messages}, shape)]
    assert windows == [["1234"], ["1234", "56", "789"]]


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    texts = [
        "a good question about birds",
        "a good question about birds",
        "write to me@example.org please",
        "hi",
        "x" * 300,
        "tell me how many apples are left over",
        "another good question about fish",
    ]
    rows: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    rows += [
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "monologue"}]},
    ]
    benchmarks = make_benchmarks(tmp_path, ["Question: how many apples are left over after lunch?"])
    curate("s", source(limit=1), CONFIG, make_raw(tmp_path, rows), benchmarks, tmp_path / "out")
    manifest, kept = open_conversations(tmp_path / "out", "s")
    assert manifest.counts == {
        "rows_in": 9,
        "rows_out": 1,
        "skipped": {
            "contaminated": 1,
            "duplicate": 1,
            "no_user_turn": 1,
            "over_limit": 1,
            "personal_data": 1,
            "too_long": 1,
            "too_short": 1,
            "unknown_role": 1,
        },
    }
    assert kept[0].row in {0, 6}
    assert kept[0].licence == "MIT"


def test_a_source_without_a_usable_row_fails_by_reason_and_row(tmp_path: Path) -> None:
    raw = make_raw(tmp_path, [{"messages": [{"role": "robot", "content": "x"}]}] * 3)
    benchmarks = make_benchmarks(tmp_path, ["unrelated"])
    with pytest.raises(ValueError, match=r"sources.s: no usable row of 3: 3 unknown_role \(first: row 0\)"):
        curate("s", source(), CONFIG, raw, benchmarks, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="no row in"):
        curate("s", source(), CONFIG, make_raw(tmp_path / "empty", []), benchmarks, tmp_path / "out")


def test_too_many_unusable_rows_fail(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a good question"}]}, *[{"messages": []}] * 2]
    with pytest.raises(ValueError, match=r"max_skip_ratio = 0.5 unusable of 3: 2 no_messages \(first: row 1\)"):
        curate("s", source(), CONFIG, make_raw(tmp_path, rows), make_benchmarks(tmp_path, ["x y"]), tmp_path / "out")


def test_the_split_is_by_hash_of_the_group() -> None:
    groups = [f"group-{i}" for i in range(2000)]
    held_out = [group for group in groups if split_of(group, 0.1) == "validation"]
    assert 150 < len(held_out) < 250
    assert all(split_of(group, 0.2) == "validation" for group in held_out)
    assert split_of("group-7", 0.1) == "train"


def test_ids_depend_on_content_alone() -> None:
    message = {"role": "user", "content": "x"}
    assert conversation_id([message], []) == conversation_id([dict(reversed(message.items()))], [])
    assert conversation_id([message], []) != conversation_id([message], [{"function": {"name": "f"}}])


def source(limit: int | None = None) -> SourceConfig:
    return SourceConfig(uri="file:x", licence="MIT", format="messages", kind="general", limit=limit)


def make_raw(folder: Path, rows: list[dict[str, Any]]) -> Path:
    out = folder / "raw"
    with publish(out, Manifest("raw")) as building:
        (building / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def make_benchmarks(folder: Path, prompts: list[str]) -> Path:
    path = folder / "benchmark.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"turns": [prompt, "second"]}) + "\n" for prompt in prompts))
    shape = RowShape(uri=f"file:{path}", licence="MIT", format="turns")
    config = BenchmarksConfig(sets={"bench": shape}, max_prompt_chars=1000)
    build_benchmarks(config, FetchConfig(stall_seconds=1, retries=0), folder / "benchmarks")
    return folder / "benchmarks"
