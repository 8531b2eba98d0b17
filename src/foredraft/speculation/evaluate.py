"""The ``evaluate`` stage: the exported files, in a real generation loop, on held-out prompts."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foredraft.artifacts import open_artifact, require_same_contract, write_atomic, write_json
from foredraft.benchmarks.build import read_benchmarks
from foredraft.chat.render import Renderer, UnrenderablePrompt
from foredraft.conversations.schema import Conversation
from foredraft.drafter.model import Drafter, initialise_random
from foredraft.layouts.zlab import read_zlab
from foredraft.progress import Progress
from foredraft.provenance import commit
from foredraft.sources.config import FetchConfig
from foredraft.speculation.acceptance import Trace, report
from foredraft.speculation.config import EvaluateConfig
from foredraft.speculation.decode import decode
from foredraft.speculation.proposers import DFlashProposer, LookupProposer, Proposer
from foredraft.speculation.session import open_session, reads_trees
from foredraft.speculation.speed import compare_clocks, measure_cost, recommend
from foredraft.speculation.verdicts import Greedy, Sampled
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, load_target
from foredraft.target.generate import Sampling, greedy_answers
from foredraft.target.tokenizer import read_tokenizer
from foredraft.target.weights import checkpoint_folder

DRAFTER = "drafter"


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: its benchmark and its token ids."""

    benchmark: str
    ids: list[int]


@dataclass(frozen=True)
class Run:
    """One way to decode all prompts: who drafts (by the seeds of a batch's rows, where drawn), and how tokens are taken."""

    make: Callable[..., Proposer]
    sampling: Sampling | None = None


@dataclass
class Decoded:
    """What a run came to: a trace a prompt, passes of the target and tokens that it read."""

    traces: list[Trace]
    passes: int = 0
    fed: int = 0


class Ground:
    """Target, drafter and prompts, on which runs are decoded."""

    def __init__(self, config: EvaluateConfig, frozen: FrozenTarget, prompts: list[Prompt], eos: list[int]):
        self.config, self.frozen, self.prompts, self.eos = config, frozen, prompts, eos

    def decode(self, run: Run, progress: Progress) -> Decoded:
        """Decode all prompts; what a prompt's answer is does not depend on those beside it."""
        found = Decoded([])
        for first, batch in self.batches():
            session = open_session(self.frozen)
            seeds = [self.config.seed * 1_000_003 + first + row for row in range(len(batch))]
            proposer, verdicts = (
                (run.make(), Greedy())
                if run.sampling is None
                else (run.make(seeds=seeds), Sampled(run.sampling, seeds))
            )
            ids = [prompt.ids for prompt in batch]
            found.traces += decode(session, proposer, ids, self.config.max_new_tokens, self.eos, verdicts)
            found.passes, found.fed = found.passes + session.passes, found.fed + session.fed
            progress.advance(len(batch))
        return found

    def greedy(self, progress: Progress) -> list[list[int]]:
        """The target's own answers, by Transformers' ``generate``."""
        answers: list[list[int]] = []
        for _, batch in self.batches():
            ids = [prompt.ids for prompt in batch]
            answers += greedy_answers(self.frozen.model, ids, self.config.max_new_tokens, self.eos)
            progress.advance(len(batch), note="greedy")
        return answers

    def batches(self) -> list[tuple[int, list[Prompt]]]:
        """Prompts that decode together, and the number of the first."""
        size = self.config.batch_size if reads_trees(self.frozen) else 1
        return [(i, self.prompts[i : i + size]) for i in range(0, len(self.prompts), size)]

    def by_benchmark(self, traces: list[Trace]) -> dict[str, Any]:
        """Reports of all prompts together and of each benchmark."""
        found = {"pooled": report(traces)}
        for name in sorted({prompt.benchmark for prompt in self.prompts}):
            own = [trace for prompt, trace in zip(self.prompts, traces, strict=True) if prompt.benchmark == name]
            found[name] = report(own)
        return found


def evaluate(
    config: EvaluateConfig,
    target: TargetConfig,
    fetch: FetchConfig,
    exported: Path,
    interface: Path,
    benchmarks: Path,
    metrics: Path,
    plot: Path,
) -> None:
    """Measure the exported drafter and its baselines; write ``metrics`` (JSON) and ``plot`` (CSV).

    Raises:
        ArtifactError: an input is missing, damaged, or of another contract.
        ValueError: no usable prompt; an output differs from the target's own greedy answer by more than a near-tie; or far
            fewer drafts are accepted than the training's held-out documents promised.
    """
    manifest = open_artifact(exported, "export", "dvc repro export")
    interface_manifest = open_interface(interface, target)
    require_same_contract(interface_manifest.contract, manifest.contract, exported, "dvc repro train export")
    _, rows = read_benchmarks(benchmarks)
    prompts = take_prompts(rows, Renderer(read_tokenizer(interface), target.thinking), config)

    chosen = target.model_copy(update={"dtype": config.dtype})
    dtype = getattr(torch, config.dtype)
    drafter = read_zlab(exported / "zlab", dtype)
    frozen = load_target(checkpoint_folder(target, fetch), chosen, drafter.shape.target_layer_ids)
    drafter.to(frozen.device)
    ground = Ground(config, frozen, prompts, interface_manifest.facts["eos_token_ids"])
    runs = runs_of(config, frozen, drafter)
    with Progress("evaluate", len(prompts) * (1 + len(runs)), "answers") as progress:
        references = ground.greedy(progress)
        reports: dict[str, dict[str, Any]] = {}
        for name, run in runs.items():
            decoded = ground.decode(run, progress)
            reports[name] = ground.by_benchmark(decoded.traces)
            pooled = reports[name]["pooled"]
            pooled |= {"target_passes": decoded.passes, "tokens_fed": decoded.fed}
            if run.sampling is None:
                pooled["differences_from_greedy"] = compare(frozen, prompts, decoded.traces, references, config)
    plain = ground.by_benchmark([_plain(answer) for answer in references])
    found = assemble(reports, plain, config, target.thinking)
    found["gap"] = gap(found["pooled"]["accepted_per_step"], manifest.facts["best"]["tokens_per_step"] - 1, config)
    if config.speed_prompts:
        found |= against_the_clock(ground, drafter, reports)
    write_json(metrics, found)
    write_atomic(plot, acceptance_csv(reports))


def runs_of(config: EvaluateConfig, frozen: FrozenTarget, drafter: Drafter) -> dict[str, Run]:
    """Everything that is measured, the drafter's chain first; baselines draft as many tokens as it."""
    control = Drafter(drafter.shape).to(next(drafter.parameters()).dtype)
    initialise_random(control, torch.Generator().manual_seed(config.seed))
    control.eval().requires_grad_(False).to(frozen.device)
    drafts = drafter.shape.choice.block_size - 1
    runs = {DRAFTER: Run(partial(DFlashProposer, drafter, frozen))}
    for budget in config.tree_budgets:
        runs[f"tree_{budget}"] = Run(partial(DFlashProposer, drafter, frozen, budget=budget))
    for asked in config.sampled:
        sampling = Sampling(**asked.model_dump())
        name = f"temperature_{sampling.temperature:g}"
        runs[name] = Run(partial(DFlashProposer, drafter, frozen, drawn=sampling), sampling)
    return runs | {
        "prompt_lookup": Run(partial(LookupProposer, drafts, config.lookup_ngram)),
        "prompt_lookup_strict": Run(partial(LookupProposer, drafts, config.lookup_ngram, config.lookup_ngram)),
        "random_drafter": Run(partial(DFlashProposer, control, frozen)),
    }


def gap(generated: float, promised: float, config: EvaluateConfig) -> dict[str, float]:
    """Accepted drafts per step in generation beside those on the training's held-out documents.

    Raises:
        ValueError: too few; names the usual causes.
    """
    if generated < (1 - config.largest_gap) * promised:
        raise ValueError(
            f"evaluate: {generated:.2f} accepted drafts per step, where training's held-out documents gave {promised:.2f}: "
            "what is served is not what was trained. Usually: another chat template or thinking mode, benchmarks unlike the "
            "training data, taps or RoPE written otherwise than trained (dvc repro export), or answers that are not the "
            "target's own. Where it is expected raise evaluate.largest_gap"
        )
    return {"generated": generated, "held_out_documents": promised}


def against_the_clock(ground: Ground, drafter: Drafter, reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Seconds: of the first prompts of each benchmark decoded one by one, and what follows for the length of drafts."""
    config, frozen = ground.config, ground.frozen
    names = sorted({prompt.benchmark for prompt in ground.prompts})
    speed, longest = {}, max(ground.prompts, key=lambda prompt: len(prompt.ids)).ids
    for name in names:
        own = [prompt.ids for prompt in ground.prompts if prompt.benchmark == name][: config.speed_prompts]
        speed[name] = compare_clocks(
            frozen, partial(DFlashProposer, drafter, frozen), own, config.max_new_tokens, ground.eos
        )
    drafts = drafter.shape.choice.block_size - 1
    sizes = sorted({1, 2, 1 + drafts, *(1 + budget for budget in config.tree_budgets)})
    cost = measure_cost(frozen, DFlashProposer(drafter, frozen), longest, sizes)
    plain = len(names) / sum(found["plain_tokens_per_s"] for found in speed.values())
    trees = {budget: reports[f"tree_{budget}"]["pooled"]["tokens_per_step"] for budget in config.tree_budgets}
    slots = reports[DRAFTER]["pooled"]["acceptance_by_slot"]
    costs = {"verify_seconds": cost.verify, "draft_seconds": cost.draft, "plain_seconds_per_token": plain}
    return {"speed": speed, "costs": costs, "recommendation": recommend(slots, trees, cost, plain)}


def take_prompts(rows: dict[str, list[Conversation]], renderer: Renderer, config: EvaluateConfig) -> list[Prompt]:
    """The first usable prompts of each benchmark, longest first so that a batch holds little padding.

    Raises:
        ValueError: a benchmark has none.
    """
    prompts = []
    for benchmark, conversations in rows.items():
        taken: list[Prompt] = []
        for conversation in conversations:
            try:
                ids = renderer.prompt_ids(conversation.messages, conversation.tools)
            except UnrenderablePrompt:
                continue
            if len(ids) <= config.max_prompt_tokens and len(taken) < config.prompts:
                taken.append(Prompt(benchmark, ids))
        if not taken:
            raise ValueError(f"benchmark {benchmark}: no prompt within evaluate.max_prompt_tokens")
        prompts += taken
    return sorted(prompts, key=lambda prompt: -len(prompt.ids))


def assemble(
    reports: dict[str, dict[str, Any]], greedy: dict[str, Any], config: EvaluateConfig, thinking: bool
) -> dict[str, Any]:
    """The content of ``metrics/evaluate.json``: the drafter's chain at the top, all else by its name."""
    groups: dict[str, dict[str, Any]] = {"baselines": {"greedy": greedy}, "trees": {}, "sampled": {}}
    for name, found in reports.items():
        kind = {"tree": "trees", "temperature": "sampled"}.get(name.split("_")[0], "baselines")
        if name != DRAFTER:
            groups[kind][name.removeprefix("tree_") if kind == "trees" else name] = found
    settings = {
        "max_new_tokens": config.max_new_tokens,
        "dtype": config.dtype,
        "temperature": 0.0,
        "thinking": thinking,
    }
    return {**reports[DRAFTER], **groups, "settings": settings, "commit": commit()}


def compare(
    frozen: FrozenTarget,
    prompts: list[Prompt],
    traces: list[Trace],
    references: list[list[int]],
    config: EvaluateConfig,
) -> dict[str, Any]:
    """How many outputs leave the target's own greedy answer, and by what margin at the first difference.

    Raises:
        ValueError: a difference is no near-tie; speculation would then not be lossless.
    """
    margins = []
    for prompt, trace, reference in zip(prompts, traces, references, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(trace.tokens, reference, strict=False)) if a != b), None)
        if first is None:
            if len(trace.tokens) != len(reference):
                raise ValueError(
                    f"evaluate: an output has {len(trace.tokens)} tokens, greedy decoding {len(reference)}"
                )
            continue
        ids = torch.tensor([prompt.ids + reference[:first]], device=frozen.device)
        with torch.inference_mode():
            logits = frozen.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        margin = float((logits[trace.tokens[first]] - logits[reference[first]]).abs())
        if margin > config.near_tie or config.dtype == "float32":
            raise ValueError(
                f"evaluate: output differs from greedy decoding at token {first} of a {prompt.benchmark} prompt, "
                f"logit margin {margin:.3g}: not lossless"
            )
        margins.append(margin)
    return {"near_ties": len(margins), "largest_margin": max(margins, default=0.0)}


def acceptance_csv(reports: dict[str, dict[str, Any]]) -> str:
    """Acceptance by slot, a column a proposer, pooled."""
    slots = max(len(report["pooled"]["acceptance_by_slot"]) for report in reports.values())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["slot", *reports])
    for slot in range(slots):
        columns = [report["pooled"]["acceptance_by_slot"] for report in reports.values()]
        writer.writerow([slot + 1, *(column[slot] if slot < len(column) else "" for column in columns)])
    return text.getvalue()


def _plain(answer: list[int]) -> Trace:
    """Greedy decoding as a trace: one token a step."""
    return Trace(tokens=answer, steps=[(0, 0, 1)] * (len(answer) - 1))
