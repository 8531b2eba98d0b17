import gzip
import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from foredraft.artifacts import Manifest, publish
from foredraft.benchmarks.build import build_benchmarks
from foredraft.benchmarks.config import BenchmarksConfig
from foredraft.conversations.config import CurateConfig
from foredraft.conversations.curate import _by_bucket, bucket_of, curate, split_of, to_answer
from foredraft.conversations.files import data_files, read_chunks, read_rows
from foredraft.conversations.filters import HeldOut
from foredraft.conversations.messages import UnusableRow, normalise, pieces_of
from foredraft.conversations.readers import Draft, read_auto, read_messages, read_traces
from foredraft.conversations.schema import Conversation, conversation_id, open_conversations, read_conversations
from foredraft.sources.config import FetchConfig, RowShape, SourceConfig

MESSAGES = RowShape(uri="file:x", licence="MIT", format="messages")
CONFIG = CurateConfig(
    min_prompt_chars=3,
    max_prompt_chars=200,
    languages=None,
    drop_matching={"personal_data": r"\w+@\w+\.\w+"},
    near_duplicate=None,
    contamination_words=5,
    weights={},
    validation_share=0.5,
    max_skip_ratio=0.5,
)


PACK = {"gz": gzip.compress, "zst": lambda content: pa.compress(content, codec="zstd", asbytes=True)}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz", "jsonl.zst", "json.zst"])
@pytest.mark.parametrize("array", [False, True])
def test_rows_are_read_whatever_the_name_says(tmp_path: Path, suffix: str, array: bool) -> None:
    rows = [{"a": 1}, {"a": "line\u2028separator\u0085"}]
    text = json.dumps(rows) if array else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(PACK.get(suffix.rpartition(".")[2], bytes)(b"\xef\xbb\xbf" + text.encode()))
    assert list(read_rows(path)) == rows


def test_rows_of_parquet_arrow_csv_and_of_one_object(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = [{"a": "x", "b": "1"}, {"a": "y", "b": "2"}]
    dataset = Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "x.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    feather.write_feather(pa.Table.from_pylist(rows), tmp_path / "file.arrow")
    (tmp_path / "x.csv").write_text("a,b\nx,1\ny,2\n")
    (tmp_path / "x.json").write_text(json.dumps({"cases": rows}))
    for path in (tmp_path / "x.parquet", arrow, tmp_path / "file.arrow", tmp_path / "x.csv"):
        assert list(read_rows(path)) == rows
    assert list(read_rows(tmp_path / "x.json", key="cases")) == rows
    with pytest.raises(ValueError, match="no rows under the key 'rows'"):
        list(read_rows(tmp_path / "x.json", key="rows"))


def test_lines_are_cut_into_chunks_without_losing_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.conversations.files.CHUNK_BYTES", 50)
    path = tmp_path / "x.jsonl"
    rows = [{"a": "x" * n} for n in (0, 60, 3, 200, 1)]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    chunks = list(read_chunks(path))
    assert len(chunks) > 2
    assert [row for chunk in chunks for _, row in chunk.rows()] == rows
    places = [place for chunk in chunks for place, _ in chunk.rows()]
    assert places == ["x.jsonl line 1", "x.jsonl line 3", "x.jsonl line 5", "x.jsonl line 7", "x.jsonl line 9"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": ', "not_json"),
        (b"[1, 2]", "not_an_object"),
        (b'{"a": "\xff"}', "not_utf8"),
        (b'{"a": "\\ud800"}', "half_a_surrogate_pair"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": NaN, "b": 123456789012345678901234567890}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"x.jsonl line 2: {reason}"):
        list(read_rows(path))


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "parquet", "arrow"])
def test_a_file_that_is_cut_off_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    if suffix in {"parquet", "arrow"}:
        write = {"parquet": pq.write_table, "arrow": feather.write_feather}[suffix]
        write(pa.Table.from_pylist([{"a": n} for n in range(500)]), path)
    else:
        path.write_bytes(PACK[suffix.rpartition(".")[2]](b'{"a": 1}\n' * 500))
    assert len(list(read_rows(path))) == 500
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"x.{suffix}: damaged"):
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
    kept = conversations(tmp_path / "out")
    assert sorted((row.tools for row in kept), key=str) == sorted((row["tools"] for row in rows), key=str)


def test_files_whose_rows_have_other_keys_load_together(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    first = [{"messages": [{"role": "user", "content": "question one"}]}]
    second = [{"messages": [{"role": "user", "content": "question two", "loss": True}], "extra": 3}]
    with publish(raw, Manifest("raw")) as building:
        pq.write_table(pa.Table.from_pylist(first), building / "0.parquet")
        pq.write_table(pa.Table.from_pylist(second), building / "1.parquet")
        (building / "2.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": None}], "tools": None}))
    curate("s", source(), CONFIG, raw, make_benchmarks(tmp_path, ["unrelated"]), tmp_path / "out")
    assert sorted(row.messages[0]["content"] for row in conversations(tmp_path / "out")) == [
        "question one",
        "question two",
    ]


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
        ({"system": "Be kind", "messages": [USER]}, [SYSTEM, USER]),
        ({"system": "Be kind", "prompt": [USER], "response": "Yes"}, [SYSTEM, USER, ANSWER]),
        ({"question": [USER], "answer": [ANSWER]}, [USER, ANSWER]),
        ({"problem": "Hi", "answer": "42", "solution": "Yes"}, [USER, ANSWER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
        ({"messages": None, "prompt": "Hi"}, [USER]),
        ({"input": [USER]}, [USER]),
        (
            {"instruction": "Add", "context": "1, 2", "response": "Yes"},
            [{"role": "user", "content": "Add\n\n1, 2"}, ANSWER],
        ),
        ({"messages": [{**USER, "uuid": "7", "when": 3}]}, [USER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": "Yes"}, [USER, ANSWER]),
        ({"messages": [{"role": "developer", "content": "Be kind"}, USER]}, [SYSTEM, USER]),
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
        ({"instruction": "Add", "input": 5}, "field_not_text"),
        ({"prompt": ["Hi"]}, "no_question"),
        ({"messages": [{**ANSWER, "tool_calls": "look()"}]}, "not_a_tool_call"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": "f"}]}]}, "not_a_tool_call"),
        ({"input_ids": [1, 2**31], "loss_mask": [0, 1]}, "no_token_ids"),
        ({"messages": [USER], "tools": "[{"}, "tools_not_json"),
        ({"conversations": [{"from": "function_call", "value": "look()"}]}, "tool_call_not_json"),
        ({"input_ids": [], "loss_mask": []}, "no_token_ids"),
        ({"input_ids": [1, 2]}, "no_loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, 7]}, "no_loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1, 1]}, "ids_and_mask_of_different_length"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "mask_all_zeros"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "mask_all_ones"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content_not_text"),
    ],
)
def test_a_row_of_no_known_shape_has_a_named_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        list(read_auto(row, MESSAGES))


def test_tool_calls_and_tools_of_sharegpt_rows_come_out_as_openais() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Look"},
            {"from": "function_call", "value": '{"name": "look", "arguments": {"at": 3}}'},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "Seven."},
        ],
        "tools": '[{"name": "look", "parameters": {}}]',
    }
    (draft,) = read_auto(row, MESSAGES)
    assert [message["role"] for message in draft.messages] == ["user", "assistant", "tool", "assistant"]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 3}}}
    assert draft.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert draft.tools == [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def test_openais_older_function_calls_are_tool_calls() -> None:
    call = {"name": "look", "arguments": "{}"}
    (draft,) = read_messages(
        {"messages": [USER, {"role": "assistant", "content": None, "function_call": call}]}, MESSAGES
    )
    assert draft.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }


def test_patterns_see_what_is_thought_and_called(tmp_path: Path) -> None:
    call = {"function": {"name": "mail", "arguments": {"to": "me@example.org"}}}
    rows = [
        {"messages": [USER, {**ANSWER, "tool_calls": [call]}, {"role": "tool", "content": "sent"}]},
        {"messages": [USER, {**ANSWER, "reasoning_content": "me@example.org"}]},
        {"messages": [USER, {**ANSWER, "content": "Write to me@example.org"}]},
        {"messages": [{"role": "user", "content": "a fine question"}, ANSWER]},
    ]
    assert curated(tmp_path, rows, source(answers="keep"), min_prompt_chars=1).counts["skipped"] == {"personal_data": 3}


def test_what_no_json_can_hold_costs_its_row(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    when = [
        {"prompt": "A fine question", "tools": [{"name": "f", "since": datetime(2026, 1, 1)}]},
        {"prompt": "Another one"},
    ]
    with publish(raw, Manifest("raw")) as building:
        pq.write_table(pa.Table.from_pylist(when), building / "0.parquet")
        (building / "1.json").write_text('[{"prompt": "half a pair \\ud800"}, {"prompt": "A third question"}]')
    curate("s", source(), CONFIG, raw, make_benchmarks(tmp_path, ["unrelated"]), tmp_path / "out")
    assert open_conversations(tmp_path / "out", "s")[0].counts["skipped"] == {"not_json": 2}


@pytest.mark.parametrize("content", ["a,b\n1,2\n1,2,3\n", 'a\n"open', ""])
def test_a_broken_csv_names_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(ValueError, match=r"x.csv: cannot be read as CSV") as caught:
        list(read_rows(tmp_path / "x.csv"))
    assert "\n" not in str(caught.value)


def test_an_arrow_stream_without_its_end_and_an_empty_archive_are_refused(tmp_path: Path) -> None:
    with (
        pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, pa.schema([("a", pa.int64())])) as out,
    ):
        for n in range(3):
            out.write_batch(pa.record_batch({"a": [n]}))
    assert len(list(read_rows(tmp_path / "x.arrow"))) == 3
    (tmp_path / "x.arrow").write_bytes((tmp_path / "x.arrow").read_bytes()[:-8])
    (tmp_path / "x.jsonl.gz").write_bytes(b"")
    for name, problem in {"x.arrow": "it has no end", "x.jsonl.gz": "it is empty"}.items():
        with pytest.raises(ValueError, match=rf"{name}: damaged.*{problem}"):
            list(read_rows(tmp_path / name))


def test_a_folder_that_datasets_saved_and_capital_suffixes_are_data(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"prompt": "one"}]).save_to_disk(tmp_path / "saved")
    (tmp_path / "B.JSONL").write_text("{}")
    names = [path.name for path in data_files(tmp_path)]
    assert names[0] == "B.JSONL" and len(names) == 2 and names[1].endswith(".arrow")


def test_a_group_that_a_row_does_not_have_is_no_group() -> None:
    shape = RowShape(uri="file:x", licence="MIT", format="messages", group="session")
    with pytest.raises(UnusableRow, match="no_field_session"):
        list(read_messages({"messages": [USER]}, shape))


@pytest.mark.parametrize("row", [{"loss_mask": [0, 0, 1]}, {"labels": [-100, -100, 7]}])
def test_a_row_that_came_tokenised_keeps_its_ids_and_mask(row: dict[str, Any]) -> None:
    (draft,) = read_auto({"input_ids": [5, 6, 7], **row}, MESSAGES)
    assert (draft.ids, draft.mask, draft.messages) == ([5, 6, 7], [0, 0, 1], [])


def test_what_the_target_will_say_anew_is_not_part_of_the_conversation() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result, again = {"role": "tool", "content": "7"}, {"role": "user", "content": "And?"}
    assert to_answer(Draft([SYSTEM, USER, ANSWER, again, ANSWER])) == [SYSTEM, USER, again]
    assert to_answer(Draft([USER, call, result, ANSWER])) == [USER, call, result]
    assert to_answer(Draft([USER, ANSWER, again], recorded=True)) == [USER, ANSWER, again]


def test_runs_of_words_shared_with_a_benchmark_are_found() -> None:
    held_out = HeldOut(["How many apples are left, after lunch?", "Why?"], 4)
    assert held_out.shares_a_run(pieces_of("say how MANY apples are left over"))
    assert not held_out.shares_a_run(pieces_of("say how many pears are left"))
    assert not held_out.shares_a_run(pieces_of("how many apples how many apples"))
    assert (
        held_out.shares_a_run(pieces_of("why"))
        and not held_out.shares_a_run(pieces_of("why not"))
        and not held_out.shares_a_run(pieces_of(""))
    )


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
    found = list(read_traces({"messages": messages}, shape))
    windows = [[m["content"] for m in draft.messages] for draft in found if isinstance(draft, Draft)]
    assert windows == [["1234"], ["1234", "56", "789"]]
    assert [str(reason) for reason in found if isinstance(reason, UnusableRow)] == ["longer_than_window"]


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
    manifest, _ = open_conversations(tmp_path / "out", "s")
    kept = conversations(tmp_path / "out")
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
    assert "good question" in kept[0].messages[0]["content"]
    assert kept[0].licence == "MIT"


def test_a_source_without_a_usable_row_fails_by_reason_and_row(tmp_path: Path) -> None:
    raw = make_raw(tmp_path, [{"messages": [{"role": "robot", "content": "x"}]}] * 3)
    benchmarks = make_benchmarks(tmp_path, ["unrelated"])
    with pytest.raises(ValueError, match=r"sources.s: no usable row of 3: 3 unknown_role \(first: rows.jsonl line 1\)"):
        curate("s", source(), CONFIG, raw, benchmarks, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="no row in"):
        curate("s", source(), CONFIG, make_raw(tmp_path / "empty", []), benchmarks, tmp_path / "out")


def test_too_many_unusable_rows_fail(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a good question"}]}, *[{"messages": []}] * 2]
    with pytest.raises(
        ValueError, match=r"max_skip_ratio = 0.5 unusable of 3: 2 no_messages \(first: rows.jsonl line 2\)"
    ):
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


WORDS = ["the", "a", "river", "stone", "house", "walks", "under", "seven", "lamps", "while", "birds", "carry", "boats"]


def sentence(seed: int, length: int = 30) -> str:
    generator = random.Random(seed)
    return " ".join(f"{generator.choice(WORDS)}{generator.randrange(50)}" for _ in range(length))


def curated(folder: Path, rows: list[dict[str, Any]], shape: SourceConfig | None = None, **changes: Any) -> Manifest:
    """Curate rows; returns the manifest, and leaves the artefact at ``folder/out``."""
    raw, benchmarks = make_raw(folder, rows), make_benchmarks(folder, ["unrelated words of a benchmark"])
    config = CurateConfig(**CONFIG.model_dump() | {"max_prompt_chars": 5000} | changes)
    curate("s", shape or source(), config, raw, benchmarks, folder / "out")
    return open_conversations(folder / "out", "s")[0]


def test_of_near_duplicates_one_stays_whatever_their_order(tmp_path: Path) -> None:
    base = sentence(1, 60)
    texts = [base, f"{base} indeed", f"well {base}", sentence(2, 60), base.upper()]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    manifest = curated(tmp_path / "a", rows, near_duplicate=0.8)
    assert manifest.counts["skipped"] == {"near_duplicate": 3}
    assert manifest.files == curated(tmp_path / "b", rows[::-1], near_duplicate=0.8).files
    assert curated(tmp_path / "c", rows).counts["skipped"] == {}


def test_the_same_question_to_other_tools_is_another_question(tmp_path: Path) -> None:
    rows = [{"messages": [USER], "tools": [{"type": "function", "function": {"name": name}}]} for name in "fg"]
    assert curated(tmp_path, rows, near_duplicate=0.8, min_prompt_chars=1).counts["rows_out"] == 2


def test_questions_that_differ_in_a_mark_are_different_questions(tmp_path: Path) -> None:
    texts = [f"What is the value of 12 {mark} 7 in decimal? {sentence(1, 8)}" for mark in "+-*/"]
    texts += ["法国的首都是什么?那里住着多少人?", "德国的首都是什么?那里住着多少人呢?今天呢?"]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    assert curated(tmp_path, rows, near_duplicate=0.8).counts["rows_out"] == 6


def test_the_steps_of_a_trace_are_not_near_duplicates_of_each_other_and_stay_on_one_side(tmp_path: Path) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": sentence(n, 12)} for n in range(30)]
    shape = SourceConfig(uri="file:x", licence="MIT", format="traces", kind="agentic", window_chars=100_000)
    manifest = curated(tmp_path, [{"messages": messages}], shape, near_duplicate=0.8, max_prompt_chars=10**6)
    assert manifest.counts["rows_out"] == 15
    assert len({row.split for row in conversations(tmp_path / "out")}) == 1


@pytest.mark.parametrize("backwards", [False, True])
def test_of_equal_rows_the_same_one_stays_in_any_order(tmp_path: Path, backwards: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"messages": [{"role": "user", "content": "question"}], "tools": [{"function": {"name": "f", "x": 1}}]},
        {"messages": [{"role": "user", "content": "question"}], "tools": [{"function": {"x": 1, "name": "f"}}]},
    ]
    manifest = curated(tmp_path, rows[::-1] if backwards else rows)
    assert manifest.counts["skipped"] == {"duplicate": 1}, "another mask is another row"
    (tools,) = [row.tools for row in conversations(tmp_path / "out") if row.messages]
    assert list(tools[0]["function"]) == ["name", "x"]


def test_answers_that_are_kept_count_among_what_a_conversation_says(tmp_path: Path) -> None:
    rows = [{"messages": [USER, {"role": "assistant", "content": sentence(n)}]} for n in (1, 2)]
    keep = source(answers="keep")
    assert curated(tmp_path / "kept", rows, keep, near_duplicate=0.8, min_prompt_chars=1).counts["rows_out"] == 2
    anew = curated(tmp_path / "anew", rows, near_duplicate=0.8, min_prompt_chars=1)
    assert anew.counts["skipped"] == {"duplicate": 1}


def test_near_duplicates_are_found_as_the_slow_way_finds_them(tmp_path: Path) -> None:
    """Against all pairs, by the true Jaccard index: none far below the threshold goes, none far above it stays."""
    generator = random.Random(0)
    texts = [sentence(n, 40) for n in range(40)]
    for text in texts[:20]:
        words = text.split()
        for _ in range(generator.randrange(1, 4)):
            words[generator.randrange(40)] = "changed"
        texts.append(" ".join(words))
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    curated(tmp_path, rows, near_duplicate=0.7)
    kept = {row.messages[0]["content"] for row in conversations(tmp_path / "out")}
    assert 40 <= len(kept) < 60

    def jaccard(a: str, b: str) -> float:
        first, second = ({tuple(text.split()[i : i + 5]) for i in range(len(text.split()) - 4)} for text in (a, b))
        return len(first & second) / len(first | second)

    nearest = {a: max(jaccard(a, b) for b in texts if b != a) for a in texts}
    assert all(nearest[text] > 0.5 for text in set(texts) - kept)
    assert not [1 for a in kept for b in kept if a < b and jaccard(a, b) > 0.9]


def test_the_language_of_what_the_user_says_decides(tmp_path: Path) -> None:
    texts = [
        "What is the capital of France, and how many people live there today?",
        "Was ist die Hauptstadt von Frankreich, und wie viele Menschen leben dort heute?",
        "¿Cuál es la capital de Francia y cuántas personas viven allí hoy en día?",
    ]
    rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    manifest = curated(tmp_path, rows, languages=["en", "de"])
    assert manifest.counts["skipped"] == {"other_language": 1}
    assert {row.messages[0]["content"] for row in conversations(tmp_path / "out")} == set(texts[:2])


def test_a_weight_keeps_a_share_by_hash_and_a_higher_one_only_adds(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": sentence(n, 5)}]} for n in range(400)]
    kept = {}
    for weight in (0.3, 0.6):
        manifest = curated(tmp_path / str(weight), rows, weights={"general": weight, "code": 0.1})
        kept[weight] = {row.id for row in conversations(tmp_path / str(weight) / "out")}
        assert manifest.counts["skipped"]["over_weight"] == 400 - len(kept[weight])
        assert abs(len(kept[weight]) / 400 - weight) < 0.08
    assert kept[0.3] < kept[0.6]


def test_the_bytes_do_not_depend_on_workers_files_or_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.conversations.curate.BUCKET_BYTES", 20_000)
    monkeypatch.setattr("foredraft.conversations.files.CHUNK_BYTES", 5_000)
    texts = [sentence(n % 290, 30) for n in range(300)]
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts]
    benchmarks = make_benchmarks(tmp_path, ["unrelated words"])
    config = CurateConfig(**CONFIG.model_dump() | {"max_prompt_chars": 5000, "near_duplicate": 0.8})
    files = []
    for number, (workers, parts) in enumerate({1: [lines], 3: [lines[200:], lines[:200]]}.items()):
        raw, out = tmp_path / f"raw-{number}", tmp_path / f"out-{number}"
        with publish(raw, Manifest("raw")) as building:
            for name, part in zip("ba", parts, strict=False):
                (building / f"{name}.jsonl").write_text("".join(part))
        monkeypatch.setenv("FOREDRAFT_WORKERS", str(workers))
        curate("s", source(), config, raw, benchmarks, out)
        manifest, paths = open_conversations(out, "s")
        assert manifest.counts == {"rows_in": 300, "rows_out": 290, "skipped": {"duplicate": 10}}
        assert len(paths) > 1
        assert list(tmp_path.glob(".*")) == [], "what was spilled is gone"
        files.append(manifest.files)
    assert files[0] == files[1]


def test_ids_fall_into_buckets_in_their_order() -> None:
    ids = sorted(conversation_id([{"n": n}], []) for n in range(200))
    buckets = [bucket_of(identity, 7) for identity in ids]
    assert buckets == sorted(buckets) and set(buckets) == set(range(7))
    parts = _by_bucket(np.array(ids, dtype="S24"), 7)
    assert [[identity.decode() for identity in part] for part in parts] == [
        [identity for identity, bucket in zip(ids, buckets, strict=True) if bucket == number] for number in range(7)
    ]
    assert [len(part) for part in _by_bucket(np.array(ids, dtype="S24"), 1)] == [200]


def source(limit: int | None = None, answers: str = "generate") -> SourceConfig:
    return SourceConfig(uri="file:x", licence="MIT", format="auto", kind="general", limit=limit, answers=answers)


def conversations(folder: Path) -> list[Conversation]:
    return [row for path in open_conversations(folder, "s")[1] for row in read_conversations(path)]


def make_raw(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
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
