"""How the target is asked, and what of an answer is kept."""

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from foredraft.accounts import Account
from foredraft.artifacts import MANIFEST, Manifest, publish
from foredraft.chat.render import Renderer
from foredraft.conversations.schema import Conversation, to_record, write_records
from foredraft.loops import periodic_tail
from foredraft.responses.config import RespondConfig
from foredraft.responses.dialogue import Answer, Dialogue, Outcome, places_to_answer
from foredraft.responses.log import AnswerLog
from foredraft.responses.respond import Judge, _answered, even_batches, respond
from foredraft.responses.rules import faults_of
from foredraft.responses.schema import Response, open_responses, read_responses
from foredraft.sources.config import FetchConfig
from foredraft.target.config import TargetConfig
from foredraft.target.generate import (
    Sampling,
    batched_answers,
    batches_continuously,
    continuous_answers,
    cut_at_end,
    greedy_answers,
)
from foredraft.target.interface import write_interface
from tests.conftest import tiny_llama
from tests.tokenizers import make_tokenizer

FETCH = FetchConfig(stall_seconds=1, retries=0)
LENIENT = {"keep": True, "max_ratio": 1.0}
SETTINGS: dict[str, Any] = {
    "backend": "transformers",
    "max_new_tokens": 12,
    "max_prompt_tokens": 400,
    "batch_size": 4,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": 1,
    "truncated": LENIENT,
    "empty": LENIENT,
    "unclosed_thinking": LENIENT,
    "looping": LENIENT,
    "loop_tokens": 9,
    "max_skip_ratio": 1.0,
}
CONFIG = RespondConfig(**SETTINGS)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(number: int, *questions: str, **changes: Any) -> Conversation:
    values = {"tools": [], "kind": "general", "origin": "s", "licence": "MIT", "split": "train", "group": ""}
    messages = [user(question) for question in questions]
    return Conversation(**{**values, "id": f"{number:024x}", "messages": messages, **changes})


def make_conversations(folder: Path, rows: list[Conversation], answers: str = "generate") -> Path:
    counts = {"rows_in": len(rows), "rows_out": len(rows), "skipped": {}}
    with publish(folder, Manifest("conversations", counts=counts, facts={"answers": answers})) as building:
        half = len(rows) // 2
        for number, part in enumerate((rows[:half], rows[half:])):
            write_records([to_record(row) for row in part], building / f"conversations-{number:05d}.parquet")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    """A tiny target on disk, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = make_tokenizer("chatml")
    model = tiny_llama(vocab_size=710, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TargetConfig(uri=f"file:{folder}", dtype="float32", thinking=False, kept_layers=1)


@pytest.fixture(scope="module")
def interface(target: TargetConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("interface") / "target"
    write_interface(target, FETCH, out)
    return out


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


ROWS = [
    *(conversation(n, f"Question {n}, is it {'very ' * n}long?") for n in range(5)),
    conversation(7, "One?", "Two?", "Three?"),
    conversation(8, "<|im_start|>assistant"),
    conversation(9, "long " * 500),
    conversation(10, "First?", "long " * 500, "never asked"),
    conversation(11, messages=[], input_ids=[1, 2, 3], loss_mask=[0, 1, 1]),
]


def answers_of(folder: Path) -> list[Response]:
    return [row for path in open_responses(folder, "s")[1] for row in read_responses(path)]


def test_every_turn_is_answered_by_the_target_on_its_own_earlier_answers(
    target: TargetConfig, interface: Path, tmp_path: Path
) -> None:
    asked = make_conversations(tmp_path / "conversations", ROWS)
    counts = respond("s", CONFIG, target, FETCH, asked, interface, tmp_path / "out")
    assert counts["rows_in"] == 5 + 3 + 1 + 1 + 3 + 1 == counts["rows_out"] + sum(counts["skipped"].values())
    assert counts["skipped"] == {
        "after_a_skipped_turn": 1,
        "already_tokenised": 1,
        "control_token_in_text": 1,
        "prompt_too_long": 2,
    }
    rows = answers_of(tmp_path / "out")
    assert [row.turn for row in rows if row.id == ROWS[5].id] == [0, 1, 2]
    model, tokenizer = tiny_llama(vocab_size=710).eval(), make_tokenizer("chatml")
    for row in rows:
        (alone,) = greedy_answers(model, [row.prompt_ids], CONFIG.max_new_tokens, [tokenizer.eos_token_id])
        assert row.response_ids == alone
        assert (row.finish_reason == "stop") == (alone[-1] == tokenizer.eos_token_id)
    first, second = (next(row for row in rows if (row.id, row.turn) == (ROWS[5].id, turn)) for turn in (0, 1))
    history = [
        user("One?"),
        {"role": "assistant", "content": tokenizer.decode(first.response_ids, skip_special_tokens=True)},
    ]
    assert second.prompt_ids == Renderer(tokenizer, False).prompt_ids([*history, user("Two?")], [])


def test_a_stopped_run_goes_on_with_what_is_left(
    target: TargetConfig, interface: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = make_conversations(tmp_path / "conversations", ROWS)
    calls: list[int] = []

    def counted(model: Any, prompts: Any, *rest: Any) -> Any:
        if stop_after and len(calls) == stop_after:
            raise KeyboardInterrupt
        calls.append(len(prompts))
        return batched_answers(model, prompts, *rest)

    monkeypatch.setattr("foredraft.responses.local.batched_answers", counted)
    stop_after = 0
    respond("s", CONFIG, target, FETCH, asked, interface, tmp_path / "whole")
    whole = len(calls)
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path / "other"))
    calls.clear()
    stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        respond("s", CONFIG, target, FETCH, asked, interface, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with max((tmp_path / "other").rglob("answers-*.jsonl")).open("ab") as stream:
        stream.write(b'[{"id": "cut off by a ki')
    stop_after = 0
    respond("s", CONFIG, target, FETCH, asked, interface, tmp_path / "out")
    assert len(calls) == whole, "nothing was asked twice"
    assert open_responses(tmp_path / "out", "s")[0] == open_responses(tmp_path / "whole", "s")[0]


@pytest.mark.slow
def test_processes_share_the_work_and_the_bytes_are_the_same(
    target: TargetConfig, interface: Path, tmp_path: Path
) -> None:
    asked = make_conversations(tmp_path / "conversations", ROWS)
    respond("s", CONFIG, target, FETCH, asked, interface, tmp_path / "one")
    (tmp_path / "scratch").rename(tmp_path / "scratch-of-one")
    respond("s", CONFIG, target, FETCH, asked, interface, tmp_path / "two", processes=2)
    assert {path.name for path in (tmp_path / "scratch").rglob("answers-*.jsonl")} == {
        "answers-000.jsonl",
        "answers-001.jsonl",
    }
    assert open_responses(tmp_path / "one", "s")[0] == open_responses(tmp_path / "two", "s")[0]


def test_when_one_of_several_requests_fails_the_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        concurrency = 2

        def answer(self, group: list[Any]) -> None:
            if group == ["bad"]:
                started.wait(10)
                raise ValueError("no answer")
            started.set()
            time.sleep(0.05)

    started = threading.Event()
    found: list[Any] = []
    with pytest.raises(ValueError, match="no answer"):
        for group in _answered(Backend(), [["bad"], ["under way"], *(["later"] for _ in range(50))]):  # type: ignore[arg-type, list-item]
            found.append(group)
    assert ["under way"] in found and found.count(["later"]) < 50


def test_kept_answers_go_on_as_they_are(target: TargetConfig, interface: Path, tmp_path: Path) -> None:
    asked = make_conversations(tmp_path / "conversations", ROWS, answers="keep")
    respond("s", CONFIG, target, FETCH, asked, interface, tmp_path / "out")
    manifest, paths = open_responses(tmp_path / "out", "s")
    assert manifest.contract["response_origin"] == manifest.facts["answers"] == "keep"
    assert [path.read_bytes() for path in paths] == [(asked / path.name).read_bytes() for path in paths]


def test_too_many_answers_with_a_fault_stop_the_stage_with_their_rate(
    target: TargetConfig, interface: Path, tmp_path: Path
) -> None:
    asked = make_conversations(tmp_path / "conversations", ROWS[:4])
    config = RespondConfig(**SETTINGS | {"truncated": {"keep": True, "max_ratio": 0.0}})
    message = (
        r"sources.s: 100.0% of 4 answers are truncated \(respond.max_new_tokens = 12\), more than respond.truncated"
    )
    with pytest.raises(ValueError, match=message):
        respond("s", config, target, FETCH, asked, interface, tmp_path / "out")
    assert not (tmp_path / "out").exists()


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [7] * 9]


def test_sampling_is_drawn_from_its_seed_alone_and_leaves_the_global_generator_alone() -> None:
    import torch

    model = tiny_llama().eval()
    hot = Sampling(temperature=1.5, top_p=0.95, seed=3)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    first = batched_answers(model, PROMPTS, 10, [1], hot)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(99)
    assert batched_answers(model, PROMPTS, 10, [1], hot) == first
    assert batched_answers(model, PROMPTS, 10, [1], Sampling(1.5, 0.95, 4)) != first
    assert greedy_answers(model, PROMPTS, 10, [1]) != first


def test_what_the_checkpoint_says_of_generating_does_not_alter_answers() -> None:
    model = tiny_llama().eval()
    expected = greedy_answers(model, PROMPTS, 10, [1])
    model.generation_config.repetition_penalty = 3.0
    assert greedy_answers(model, PROMPTS, 10, [1]) == expected
    assert model.generation_config.repetition_penalty == 3.0


def test_variables_of_another_launcher_do_not_make_a_share_of_the_work(
    target: TargetConfig, interface: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    asked = make_conversations(tmp_path / "conversations", ROWS[:4])
    assert respond("s", CONFIG, target, FETCH, asked, interface, tmp_path / "out")["rows_out"] == 4


@pytest.mark.slow
def test_a_fault_in_a_launched_process_is_one_clear_line(target: TargetConfig, interface: Path, tmp_path: Path) -> None:
    asked = make_conversations(tmp_path / "conversations", ROWS[:4])
    nowhere = target.model_copy(update={"uri": "file:/nowhere"})
    lost = Path(shutil.copytree(interface, tmp_path / "interface"))  # of a target that is no longer where it was
    manifest = Manifest.from_json((lost / MANIFEST).read_text(encoding="utf-8"))
    manifest.contract["target"] = nowhere.uri
    (lost / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    with pytest.raises(ValueError, match=r"target.uri: file:/nowhere: no config.json in /nowhere") as caught:
        respond("s", CONFIG, nowhere, FETCH, asked, lost, tmp_path / "out", processes=2)
    assert "\n" not in str(caught.value)


def test_too_many_turns_that_cannot_be_asked_stop_the_stage(
    target: TargetConfig, interface: Path, tmp_path: Path
) -> None:
    rows = [*ROWS[:2], *(conversation(n, "<|im_end|>") for n in range(20, 22))]
    asked = make_conversations(tmp_path / "conversations", rows)
    config = RespondConfig(**SETTINGS | {"max_skip_ratio": 0.4})
    with pytest.raises(ValueError, match=r"respond.max_skip_ratio = 0.4 unusable of 4: 2 control_token_in_text"):
        respond("s", config, target, FETCH, asked, interface, tmp_path / "out")


@pytest.mark.slow
def test_continuous_batching_gives_the_same_greedy_answers() -> None:
    model = tiny_llama().eval()
    assert not batches_continuously(model), "on a CPU a static batch is faster"
    expected = greedy_answers(model, PROMPTS, 10, [1])
    assert continuous_answers(model, PROMPTS, 10, [1], Sampling(), warmup=False) == expected


@pytest.mark.parametrize(
    ("count", "largest", "sizes"), [(139, 64, [46, 46, 47]), (64, 64, [64]), (3, 64, [3]), (0, 64, [])]
)
def test_batches_are_few_and_even_and_in_order(count: int, largest: int, sizes: list[int]) -> None:
    batches = even_batches(list(range(count)), largest)
    assert [len(batch) for batch in batches] == sizes
    assert [item for batch in batches for item in batch] == list(range(count))


def test_a_recorded_history_is_answered_at_its_end_alone() -> None:
    assistant, tool = {"role": "assistant", "content": "x"}, {"role": "tool", "content": "x"}
    assert places_to_answer([user("a"), user("b")]) == [1, 2]
    assert places_to_answer([user("a"), assistant, user("b")]) == [3]
    assert places_to_answer([user("a"), assistant, tool]) == [3]


def test_an_answer_ends_with_its_first_end_of_turn_token() -> None:
    assert cut_at_end([5, 6, 2, 7, 2], {2, 3}) == [5, 6, 2]
    assert cut_at_end([5, 6], {2, 3}) == [5, 6]


@pytest.mark.parametrize(
    ("text", "finish_reason", "opened", "faults"),
    [
        ("Hello", "stop", False, []),
        ("Hello", "length", False, ["truncated"]),
        (" \n", "stop", False, ["empty"]),
        ("<think>\nso\n</think>\n\nHello", "stop", False, []),
        ("so\n</think>\n\nHello", "stop", True, []),
        ("so\n</think>\n\n", "stop", True, ["empty"]),
        ("and so", "stop", True, ["unclosed_thinking"]),
        ("<think>and so", "length", False, ["truncated", "unclosed_thinking"]),
    ],
)
def test_faults_are_told_by_name(text: str, finish_reason: str, opened: bool, faults: list[str]) -> None:
    assert faults_of(text, [1, 2, 3], finish_reason, opened, 9) == faults


@pytest.mark.parametrize(
    ("ids", "length"),
    [
        ([9, 8, 7], 0),
        ([1, 1, 1, 1], 4),
        ([5, 1, 2, 1, 2, 1, 2], 6),
        ([5, 1, 2, 1, 2, 1, 2, 1], 7),
        ([1, 2, 1, 2], 0),
        ([1, 2, 3] * 5 + [4], 0),
        ([4, 4, 4, 9, *[1, 2, 3, 4] * 4], 16),
        ([], 0),
    ],
)
def test_a_tail_that_repeats_itself_is_measured(ids: list[int], length: int) -> None:
    assert periodic_tail(ids)[0] == length
    assert ("looping" in faults_of("x", ids, "stop", False, 6)) == (length >= 6)


def test_an_answer_that_is_dropped_is_counted_by_its_first_fault_and_the_rest_stays() -> None:
    tokenizer = make_tokenizer("chatml")
    end = tokenizer.eos_token_id
    config = RespondConfig(
        **SETTINGS | {"truncated": {"keep": False, "max_ratio": 1.0}, "empty": {"keep": False, "max_ratio": 0.2}}
    )
    judge, account = Judge(config, tokenizer, [end]), Account("s")
    words = tokenizer("Fine words here", add_special_tokens=False)["input_ids"]
    answers = [Answer([1], [*words, end], "stop"), Answer([1, 2], words, "length"), Answer([3], [end], "stop")]
    outcome = Outcome("x", answers, "template_refuses", asked=5)
    (kept,) = judge.usable(conversation(1, "q"), outcome, account)
    assert (kept.turn, kept.response_ids) == (0, [*words, end])
    assert account.counts() == {
        "rows_in": 5,
        "rows_out": 1,
        "skipped": {"after_a_skipped_turn": 1, "empty": 1, "template_refuses": 1, "truncated": 1},
    }
    assert judge.faults == {"truncated": 1, "empty": 1, "unclosed_thinking": 0, "looping": 0}
    with pytest.raises(ValueError, match=r"33.3% of 3 answers are empty, more than respond.empty.max_ratio = 0.2"):
        judge.refuse("s")


def test_a_log_line_that_was_cut_off_is_no_line_and_spoils_none(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "log", 1)
    log.append([Outcome("a", [Answer([1], [2], "stop")], asked=1)])
    path = next((tmp_path / "log").iterdir())
    path.write_bytes(path.read_bytes() + b"\xff\x00\n" + json.dumps([Outcome("b").to_json()]).encode()[:-3])
    log.append([Outcome("c"), Outcome("d")])
    assert [outcome.id for outcome in AnswerLog(tmp_path / "log").read()] == ["a", "c", "d"]
    assert next(log.read()) == Outcome("a", [Answer([1], [2], "stop")], asked=1)


def test_a_dialogue_shows_the_template_what_the_target_thought() -> None:
    """The answer's text goes back through the template, as a client's would: thinking is then cut out of history."""
    tokenizer = make_tokenizer("thinking")
    row = conversation(1, "One?", "Two?")
    dialogue = Dialogue(row, Renderer(tokenizer, True), tokenizer, 400)
    said = tokenizer("<think>\nhm\n</think>\n\nOne.<|im_end|>", add_special_tokens=False)["input_ids"]
    dialogue.answer(said, "stop")
    assert dialogue.prompt_ids is not None
    assert tokenizer.decode(dialogue.prompt_ids).count("hm") == 0
    assert "One." in tokenizer.decode(dialogue.prompt_ids)


def test_thinking_that_never_ended_is_not_taken_into_history_as_an_answer() -> None:
    tokenizer = make_tokenizer("thinking")
    dialogue = Dialogue(conversation(1, "One?", "Two?"), Renderer(tokenizer, True), tokenizer, 400)
    dialogue.answer(tokenizer("<think>\nand so", add_special_tokens=False)["input_ids"], "length")
    assert dialogue.prompt_ids is None
    assert (len(dialogue.outcome.answers), dialogue.outcome.stopped) == (1, "after_unclosed_thinking")
