"""What evaluation says of traces, of seconds, and of drafters that do not keep what they promised."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from foredraft.chat.render import UnrenderablePrompt
from foredraft.drafter.model import Drafter, initialise_random
from foredraft.layouts.zlab import write_zlab
from foredraft.params import load_section
from foredraft.plan.table import main as print_table
from foredraft.sources.config import FetchConfig
from foredraft.speculation.acceptance import Trace, interval, report
from foredraft.speculation.config import EvaluateConfig, SamplingConfig
from foredraft.speculation.evaluate import gap, take_prompts
from foredraft.speculation.overlap import RUN, overlap
from foredraft.speculation.proposers import DFlashProposer, LookupProposer
from foredraft.speculation.runs import Ground, Job, Prompt, decode_all
from foredraft.speculation.speed import Branching, Cost, Timed, compare_clocks, measure_cost, measure_tree, recommend
from foredraft.speculation.tree import chain
from foredraft.speculation.verdicts import probabilities
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget
from foredraft.target.generate import Sampling
from tests.conftest import DENSE, HYBRIDS, ROOT, TAPS, VOCABULARY, tiny_drafter, tiny_llama, tiny_shape

WORDLESS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def config(**changes: object) -> EvaluateConfig:
    stored = load_section(ROOT / "profiles/smoke.yaml", "evaluate", EvaluateConfig)
    return stored.model_copy(update=changes)


def test_sums_pool_whatever_the_grouping() -> None:
    traces = [Trace([1] * (accepted + 2), [(3, accepted, accepted + 1)]) for accepted in (3, 2, 1, 0)]
    assert report(traces)["accepted_per_step"] == 1.5
    one = Trace(list(range(9)), [(3, 2, 3), (3, 0, 1), (3, 3, 4)])
    assert report([one])["accepted_per_step"] == 5 / 3
    assert report([one])["tokens_per_step"] == 8 / 3


def test_intervals_hold_the_value_and_know_when_there_is_none() -> None:
    sums = torch.tensor([[30.0, 10.0], [20.0, 10.0], [25.0, 10.0], [28.0, 10.0]], dtype=torch.float64)
    found = interval(sums)
    assert found is not None and 2.0 <= found["low"] < 2.575 < found["high"] <= 3.0
    assert interval(sums[:1]) is None
    assert interval(sums[:1].repeat(5, 1)) == {"low": 3.0, "high": 3.0}


def test_circles_are_counted_apart() -> None:
    straight = Trace([1, 2, 3, 4, 5, 6], [(3, 0, 1)] * 5)
    circling = Trace([1, 2, 1, 2, 1, 2, 1, 2, 1], [(3, 3, 4)] * 2)
    found = report([straight, circling])
    assert found["periodic"] == {"prompts": 1, "tokens_per_step_of_others": 1.0}
    assert found["repeated"] == pytest.approx(1 - (3 + 2) / (3 + 6))
    assert found["by_prompt"] == {"mean": 2.5, "spread": 1.5}


def test_an_answer_that_ends_at_once_has_no_steps_to_report() -> None:
    found = report([Trace([7])])
    assert (found["prompts"], found["target_steps"], found["tokens_per_step"]) == (1, 0, 0.0)
    assert found["interval"] is None and found["by_prompt"] is None and found["acceptance_by_slot"] == []


def test_every_way_of_sampling_has_a_name_of_its_own() -> None:
    asked = [SamplingConfig(temperature=1.0, top_p=p, top_k=k) for p, k in ((1.0, 0), (0.95, 0), (1.0, 20))]
    assert [one.name for one in asked] == ["temperature_1", "temperature_1_top_p_0.95", "temperature_1_top_k_20"]


def test_prompts_that_are_passed_over_are_counted() -> None:
    class Words:
        tokens = None

        def prompt_ids(self, messages: list[dict[str, str]], _tools: object) -> list[int]:
            if messages[0]["content"] == "odd":
                raise UnrenderablePrompt("odd")
            return [1] * len(messages[0]["content"].split())

    renderer: Any = Words()
    renderer.tokens = SimpleNamespace(ids=lambda text: [2] * len(text.split()))
    rows: Any = [
        SimpleNamespace(messages=[{"role": "user", "content": content}], tools=None)
        for content in ("a b", "odd", "a b c d e", "a", "a b c", "odd")
    ]
    prompts, left_out = take_prompts({"bench": rows}, renderer, config(prompts=3, max_prompt_tokens=4))
    assert [(len(prompt.ids), len(prompt.asked)) for prompt in prompts] == [(3, 3), (2, 2), (1, 1)]
    assert left_out == {"bench": {"too_long": 1, "unrenderable": 1}}


def test_figures_of_no_whole_run_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"pooled": ')
    (tmp_path / "empty.json").write_text("{}")
    for name in ("cut.json", "empty.json", "none.json"):
        with pytest.raises(SystemExit, match="are not the figures of a whole run"):
            print_table(tmp_path / name, tmp_path / "empty.json")


def test_what_is_advised_follows_from_seconds() -> None:
    cost = Cost({1: 1.0, 2: 1.1, 5: 1.4, 9: 3.0}, draft=0.1)
    assert cost.of(3) == pytest.approx(1.2) and cost.of(20) == 3.0
    trees = {4: Branching(2.8, 1.4), 8: Branching(3.0, 3.0)}
    found = recommend([0.8, 0.5, 0.1, 0.0], trees, cost, plain_seconds=1.0)
    assert found["speed_up_by_drafts"][2] == pytest.approx(2.3 / 1.3)
    assert found["best_drafts"] == 2 and found["best_tree_budget"] == 4
    assert found["break_even_tokens_per_step"] == pytest.approx(1.5)


def test_a_drafter_that_does_not_keep_its_promise_fails() -> None:
    assert gap(0.4, 0.5, config(largest_gap=0.5)) == {"generated": 0.4, "held_out_documents": 0.5}
    with pytest.raises(ValueError, match=r"0\.20 accepted drafts per step.*0\.50.*chat template"):
        gap(0.2, 0.5, config(largest_gap=0.5))


def test_lookup_may_insist_on_all_tokens() -> None:
    assert LookupProposer(2, 3, 3).continuation([1, 2, 3, 9, 8, 1, 2, 3]) == [9, 8]
    assert LookupProposer(2, 3, 3).continuation([7, 2, 3, 9, 8, 1, 2, 3]) == []
    assert LookupProposer(2, 3).propose([[7, 2, 3, 9, 8, 1, 2, 3]]) == [chain([9, 8])]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_every_run_gives_the_same_whatever_the_batch(kind: str) -> None:
    target = FrozenTarget(tiny_llama() if kind == "llama" else HYBRIDS[kind](), TAPS)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        Prompt("abc"[number % 3], torch.randint(VOCABULARY, (2 + number,), generator=generator).tolist())
        for number in range(5)
    ]
    found = []
    for size in (1, 2, 5):
        choice = config(batch_size=size, max_new_tokens=12, tree_budgets=(5,), dtype="float32")
        ground = Ground(choice, target, tiny_drafter(1), prompts, [9])
        ground.answer(Silent())  # type: ignore[arg-type]
        runs = ground.runs()
        assert [*runs] == [
            "drafter",
            "tree_5",
            "temperature_1",
            "prompt_lookup",
            "prompt_lookup_strict",
            "random_drafter",
        ]
        found.append({name: ground.decode(name, run, Silent()).traces for name, run in runs.items()})  # type: ignore[arg-type]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_what_a_run_draws_follows_the_target(temperature: float) -> None:
    """Chi-square over the first two tokens of 8,000 answers, of eight words; drafts are drawn, and half of them taken."""
    words, answers = 8, 8000
    target = FrozenTarget(tiny_llama(vocab_size=words, initializer_range=0.3, **WORDLESS), TAPS)
    drafter = Drafter(tiny_shape().model_copy(update={"vocab_rows": words}))
    initialise_random(drafter, torch.Generator().manual_seed(0), 0.3)
    sampled = (SamplingConfig(temperature=temperature, top_p=1.0, top_k=0),)
    choice = config(batch_size=1000, max_new_tokens=3, tree_budgets=(), dtype="float32", sampled=sampled)
    ground = Ground(choice, target, drafter.eval().requires_grad_(False), [Prompt("a", [1, 2, 3])] * answers, [99])
    name = f"temperature_{temperature:g}"
    traces = ground.decode(name, ground.runs()[name], Silent()).traces  # type: ignore[arg-type]
    counts = torch.zeros(words, words)
    for trace in traces.values():
        counts[trace.tokens[0], trace.tokens[1]] += 1
    with torch.inference_mode():
        first = probabilities(target.model(torch.tensor([[1, 2, 3]])).logits[0, -1], Sampling(temperature))
        read = torch.tensor([[1, 2, 3, word] for word in range(words)])
        expected = answers * first[:, None] * probabilities(target.model(read).logits[:, -1], Sampling(temperature))
    common = expected > 5
    statistic = float(((counts - expected).square() / expected)[common].sum())
    freedom = int(common.sum()) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5
    assert sum(trace.steps[0][1] for trace in traces.values()) > 0.3 * answers


@pytest.mark.slow
def test_two_processes_decode_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = tiny_llama(), tiny_drafter(1)
    model.save_pretrained(tmp_path / "target")
    write_zlab(tmp_path / "drafter", drafter.shape, drafter.state_dict(), {"format": "pt"})
    prompts = [Prompt("ab"[number % 2], list(range(1, 3 + number))) for number in range(5)]
    target = load_section(ROOT / "profiles/smoke.yaml", "target", TargetConfig)
    job = Job(
        config(batch_size=2, max_new_tokens=8, dtype="float32", speed_prompts=1),
        target.model_copy(update={"uri": f"file:{tmp_path / 'target'}"}),
        load_section(ROOT / "profiles/smoke.yaml", "fetch", FetchConfig),
        tmp_path / "drafter",
        prompts,
        [9],
        tmp_path,
    )
    monkeypatch.setenv("FOREDRAFT_SCRATCH", str(tmp_path / "scratch"))
    found = []
    for processes in ("1", "2"):
        monkeypatch.setenv("FOREDRAFT_PROCESSES", processes)
        found.append(decode_all(job))
    one, two = found
    assert one.answers == two.answers and one.answers.keys() == set(range(5))
    assert one.runs == two.runs
    assert two.clocked is not None and two.clocked.speed.keys() == {"a", "b"}


def test_prompts_that_were_trained_on_are_counted() -> None:
    generator = np.random.default_rng(0)
    seen, other = (generator.integers(0, 1000, 40).tolist() for _ in range(2))
    prompts = [
        Prompt("b", [], other),
        Prompt("a", [], seen[5 : 5 + RUN]),
        Prompt("a", [], other[:20] + seen[10 : 10 + RUN + 1]),
        Prompt("a", [], seen[: RUN - 1]),
    ]
    found = overlap(prompts, [np.array([7, *seen], dtype=np.int32), np.array(seen[:5], dtype=np.int32)])
    runs = 20 + 1 + 1
    assert found["a"] == {"prompts": 2, "prompts_seen": 2, "runs": 1 + runs, "runs_seen": 1 + 2}
    assert found["b"] == {"prompts": 1, "prompts_seen": 0, "runs": 40 - RUN + 1, "runs_seen": 0}
    assert overlap(prompts[:1], [])["b"]["prompts_seen"] == 0


class Silent:
    def advance(self, *_: object, **__: object) -> None:
        pass


def test_clocks_see_both_sides() -> None:
    target = FrozenTarget(tiny_llama(), TAPS)
    found = compare_clocks(target, lambda: LookupProposer(3, 3), [[1, 2, 3], [4, 5]], 12, [VOCABULARY + 1])
    assert found["speed_up"] == pytest.approx(found["tokens_per_s"] / found["plain_tokens_per_s"])
    assert 0 < found["drafter_share"] < 1 and found["seconds_to_first_token"] > 0
    cost = measure_cost(target, LookupProposer(3, 3), [1, 2, 3], (1, 4))
    assert cost.verify.keys() == {1, 4} and min(cost.verify.values()) > 0
    windows = FrozenTarget(MistralForCausalLM(MistralConfig(**DENSE | {"sliding_window": 4})), TAPS)
    assert measure_tree(windows, DFlashProposer(tiny_drafter(1), windows, budget=6), [1, 2, 3]) > 0  # replayed
    timed = Timed([3, 1, 2], torch.device("cpu"))
    assert timed.index(1) == 1 and timed.seconds > 0
