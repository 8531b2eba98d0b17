"""The ``evaluate`` stage: the exported files, in a real generation loop, on held-out prompts."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
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
from foredraft.speculation.acceptance import Trace, pool
from foredraft.speculation.config import EvaluateConfig
from foredraft.speculation.decode import decode
from foredraft.speculation.proposers import DFlashProposer, LookupProposer, Proposer
from foredraft.speculation.session import open_session, reads_trees
from foredraft.target.artifact import open_interface
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, load_target
from foredraft.target.generate import greedy_answers
from foredraft.target.tokenizer import read_tokenizer
from foredraft.target.weights import checkpoint_folder


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: its benchmark and its token ids."""

    benchmark: str
    ids: list[int]


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
        ValueError: no usable prompt; or an output differs from the target's own greedy answer by more than a near-tie.
    """
    manifest = open_artifact(exported, "export", "dvc repro export")
    interface_manifest = open_interface(interface, target)
    require_same_contract(interface_manifest.contract, manifest.contract, exported, "dvc repro train export")
    _, rows = read_benchmarks(benchmarks)
    prompts = take_prompts(rows, Renderer(read_tokenizer(interface), target.thinking), config)
    eos = interface_manifest.facts["eos_token_ids"]

    chosen = target.model_copy(update={"dtype": config.dtype})
    dtype = getattr(torch, config.dtype)
    drafter = read_zlab(exported / "zlab", dtype)
    frozen = load_target(checkpoint_folder(target, fetch), chosen, drafter.shape.target_layer_ids)
    drafter.to(frozen.device)
    control = Drafter(drafter.shape).to(dtype)
    initialise_random(control, torch.Generator().manual_seed(config.seed))
    control.eval().requires_grad_(False).to(frozen.device)
    drafts = drafter.shape.choice.block_size - 1
    proposers: dict[str, Callable[[], Proposer]] = {
        "drafter": lambda: DFlashProposer(drafter, frozen),
        "prompt_lookup": lambda: LookupProposer(drafts, config.lookup_ngram),
        "random_drafter": lambda: DFlashProposer(control, frozen),
    }

    with Progress("evaluate", len(prompts) * (1 + len(proposers)), "answers") as progress:
        references = _greedy(frozen, prompts, config, eos, progress)
        reports: dict[str, dict[str, Any]] = {}
        for name, make in proposers.items():
            traces = _decode_all(frozen, make, prompts, config, eos, progress)
            reports[name] = by_benchmark(prompts, traces)
            differences = compare(frozen, prompts, traces, references, config)
            reports[name]["pooled"]["differences_from_greedy"] = differences
    write_json(metrics, assemble(reports, by_benchmark(prompts, [_plain(answer) for answer in references]), config))
    write_atomic(plot, acceptance_csv(reports))


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


def by_benchmark(prompts: list[Prompt], traces: list[Trace]) -> dict[str, Any]:
    """Reports of all prompts together and of each benchmark."""
    report = {"pooled": pool(traces).report()}
    for name in sorted({prompt.benchmark for prompt in prompts}):
        own = [trace for prompt, trace in zip(prompts, traces, strict=True) if prompt.benchmark == name]
        report[name] = pool(own).report()
    return report


def assemble(reports: dict[str, dict[str, Any]], greedy: dict[str, Any], config: EvaluateConfig) -> dict[str, Any]:
    """The content of ``metrics/evaluate.json``: the drafter at the top, baselines under ``baselines``."""
    baselines = {name: report for name, report in reports.items() if name != "drafter"}
    return {
        **reports["drafter"],
        "baselines": {"greedy": greedy, **baselines},
        "settings": {"max_new_tokens": config.max_new_tokens, "dtype": config.dtype, "temperature": 0.0},
        "commit": commit(),
    }


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


def _greedy(
    frozen: FrozenTarget, prompts: list[Prompt], config: EvaluateConfig, eos: list[int], progress: Progress
) -> list[list[int]]:
    answers: list[list[int]] = []
    for batch in _batches(frozen, prompts, config):
        answers += greedy_answers(frozen.model, [prompt.ids for prompt in batch], config.max_new_tokens, eos)
        progress.advance(len(batch), note="greedy")
    return answers


def _decode_all(
    frozen: FrozenTarget,
    make: Callable[[], Proposer],
    prompts: list[Prompt],
    config: EvaluateConfig,
    eos: list[int],
    progress: Progress,
) -> list[Trace]:
    traces: list[Trace] = []
    for batch in _batches(frozen, prompts, config):
        ids = [prompt.ids for prompt in batch]
        traces += decode(open_session(frozen), make(), ids, config.max_new_tokens, eos)
        progress.advance(len(batch))
    return traces


def _batches(frozen: FrozenTarget, prompts: list[Prompt], config: EvaluateConfig) -> list[list[Prompt]]:
    size = config.batch_size if reads_trees(frozen) else 1
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def _plain(answer: list[int]) -> Trace:
    """Greedy decoding as a trace: one token a step."""
    return Trace(tokens=answer, steps=[(0, 0, 1)] * (len(answer) - 1))
