"""The ``evaluate`` stage: the exported files, in a real generation loop, on held-out prompts."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.artifacts import open_artifact, require_same_contract, write_atomic, write_json
from foredraft.benchmarks.build import read_benchmarks
from foredraft.chat.render import Renderer, UnrenderablePrompt
from foredraft.conversations.schema import Conversation
from foredraft.layouts.read import read_drafter_shape
from foredraft.provenance import commit
from foredraft.scratch import scratch_root
from foredraft.sources.config import FetchConfig
from foredraft.speculation.acceptance import Trace, report
from foredraft.speculation.config import EvaluateConfig
from foredraft.speculation.overlap import overlap
from foredraft.speculation.runs import DRAFTER, Clocked, Job, Prompt, decode_all
from foredraft.speculation.speed import Branching, recommend
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.tokenizer import read_tokenizer
from foredraft.tokens.shards import open_tokens, read_shard


def evaluate(
    config: EvaluateConfig,
    target: TargetConfig,
    fetch: FetchConfig,
    exported: Path,
    interface: Path,
    benchmarks: Path,
    tokens: dict[str, Path],
    metrics: Path,
    plot: Path,
) -> None:
    """Measure the exported drafter and its baselines; write ``metrics`` (JSON) and ``plot`` (CSV).

    Args:
        tokens: the artefacts that the drafter was trained on, by source.

    Raises:
        ArtifactError: an input is missing, damaged, or of another contract.
        ValueError: no usable prompt; an output differs from the target's own greedy answer by more than a near-tie; or far
            fewer drafts are accepted than the training's held-out documents promised.
    """
    manifest = open_artifact(exported, "export", "dvc repro export")
    interface_manifest = open_interface(interface, target)
    require_same_contract(interface_manifest.contract, manifest.contract, exported, "dvc repro train export")
    shape = read_drafter_shape(exported / config.layout)
    written = shape.choice.model_dump(include={"block_size", "mask_token_id"})
    written["target_layer_ids"] = list(shape.target_layer_ids)
    require_same_contract(written, manifest.contract, exported, "dvc repro export")
    _, rows = read_benchmarks(benchmarks)
    prompts, left_out = take_prompts(rows, Renderer(read_tokenizer(interface), target.thinking), config)
    seen = overlap(prompts, training_documents(tokens))

    job = Job(
        config, target, fetch, exported / config.layout, prompts, interface_manifest.facts["eos_token_ids"], Path()
    )
    share = decode_all(job)
    reports = {}
    for name, run in share.runs.items():
        reports[name] = by_benchmark(prompts, run.traces)
        reports[name]["pooled"] |= {"target_passes": run.passes, "tokens_fed": run.fed}
        if not name.startswith("temperature"):
            largest = max(run.margins, default=0.0)
            reports[name]["pooled"]["differences_from_greedy"] = {
                "near_ties": len(run.margins),
                "largest_margin": largest,
            }
    plain = by_benchmark(prompts, {number: _plain(answer) for number, answer in share.answers.items()})
    found = assemble(reports, plain, config, target.thinking)
    found["overlap"] = seen
    found["left_out"] = left_out
    if share.clocked:
        found |= advice(share.clocked, reports, config)
    promised = manifest.facts["best"]["tokens_per_step"] - 1
    try:
        found["gap"] = gap(sum(found["pooled"]["acceptance_by_slot"]), promised, config)
    except ValueError as error:
        write_json(kept := scratch_root() / "evaluate-failed.json", found)
        raise ValueError(f"{error}. All figures: {kept}") from None
    write_json(metrics, found)
    write_atomic(plot, acceptance_csv(reports))


def training_documents(tokens: dict[str, Path]) -> Iterator[NDArray[np.int32]]:
    """Ids of all documents that were trained on, shard by shard."""
    for source, folder in tokens.items():
        manifest = open_tokens(folder, source)
        for name in manifest.files:
            if name.startswith("train-"):
                shard = read_shard(folder / name)
                yield from (shard.document(number)[0].numpy() for number in range(len(shard)))


def by_benchmark(prompts: list[Prompt], traces: dict[int, Trace]) -> dict[str, Any]:
    """Reports of all prompts together and of each benchmark."""
    found = {"pooled": report([traces[number] for number in range(len(prompts))])}
    for name in sorted({prompt.benchmark for prompt in prompts}):
        own = [traces[number] for number, prompt in enumerate(prompts) if prompt.benchmark == name]
        found[name] = report(own)
    return found


def gap(generated: float, promised: float, config: EvaluateConfig) -> dict[str, float]:
    """Accepted drafts per step in generation, where an answer goes on, beside those on the training's held-out documents.

    Raises:
        ValueError: too few; names the usual causes.
    """
    if generated < (1 - config.largest_gap) * promised:
        raise ValueError(
            f"{generated:.2f} accepted drafts per step, where training's held-out documents gave {promised:.2f}: "
            "what is served is not what was trained. Usually: another chat template or thinking mode, benchmarks unlike the "
            "training data, taps or RoPE written otherwise than trained (dvc repro export), or answers that are not the "
            "target's own. Where it is expected raise evaluate.largest_gap"
        )
    return {"generated": generated, "held_out_documents": promised}


def advice(clocked: Clocked, reports: dict[str, dict[str, Any]], config: EvaluateConfig) -> dict[str, Any]:
    """Seconds, and what follows from them for the length of drafts."""
    cost, speed = clocked.cost, clocked.speed
    plain = len(speed) / sum(found["plain_tokens_per_s"] for found in speed.values())
    slots = {name: found["pooled"]["acceptance_by_slot"] for name, found in reports.items()}
    trees = {
        budget: Branching(1 + sum(slots[f"tree_{budget}"]), clocked.trees[budget]) for budget in config.tree_budgets
    }
    costs = {
        "verify_seconds": cost.verify,
        "draft_seconds": cost.draft,
        "tree_seconds": clocked.trees,
        "plain_seconds_per_token": plain,
    }
    return {"speed": speed, "costs": costs, "recommendation": recommend(slots[DRAFTER], trees, cost, plain)}


def take_prompts(
    rows: dict[str, list[Conversation]], renderer: Renderer, config: EvaluateConfig
) -> tuple[list[Prompt], dict[str, dict[str, int]]]:
    """The first usable prompts of each benchmark, longest first so that a batch holds little padding.

    Returns:
        the prompts, and by benchmark how many were passed over on the way to them, by reason.

    Raises:
        ValueError: a benchmark has none.
    """
    prompts, left_out = [], {}
    for benchmark, conversations in rows.items():
        taken: list[Prompt] = []
        passed = left_out[benchmark] = {"too_long": 0, "unrenderable": 0}
        for conversation in conversations:
            if len(taken) == config.prompts:
                break
            try:
                ids = renderer.prompt_ids(conversation.messages, conversation.tools)
            except UnrenderablePrompt:
                passed["unrenderable"] += 1
                continue
            if len(ids) > config.max_prompt_tokens:
                passed["too_long"] += 1
                continue
            said = (message["content"] for message in conversation.messages if message["role"] == "user")
            taken.append(Prompt(benchmark, ids, renderer.tokens.ids("\n".join(said))))
        if not taken:
            raise ValueError(f"benchmark {benchmark}: no prompt within evaluate.max_prompt_tokens")
        prompts += taken
    return sorted(prompts, key=lambda prompt: -len(prompt.ids)), left_out


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
