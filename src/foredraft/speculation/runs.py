"""What ``evaluate`` decodes: held-out prompts, by the drafter and by its baselines, in one process or in one for each GPU.

What a prompt's answer is depends on no other prompt, so neither on its batch nor on the process that decodes it.
"""

import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafter.model import Drafter, initialise_random
from foredraft.launch import launch, place, process_count
from foredraft.layouts.read import read_drafter
from foredraft.progress import Progress
from foredraft.sources.config import FetchConfig
from foredraft.speculation.acceptance import Trace
from foredraft.speculation.config import EvaluateConfig
from foredraft.speculation.decode import decode
from foredraft.speculation.proposers import DFlashProposer, LookupProposer, Proposer
from foredraft.speculation.session import open_session, reads_trees
from foredraft.speculation.speed import Cost, compare_clocks, measure_cost, measure_tree
from foredraft.speculation.verdicts import Greedy, Sampled
from foredraft.target.config import TargetConfig
from foredraft.target.frozen import FrozenTarget, load_target
from foredraft.target.generate import Sampling, greedy_answers
from foredraft.target.weights import checkpoint_folder

DRAFTER = "drafter"


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: its benchmark, its token ids, and those of what its user asks, without the template's words."""

    benchmark: str
    ids: list[int]
    asked: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One way to decode all prompts: who drafts (by a generator a row, where drawn), and how tokens are taken."""

    make: Callable[..., Proposer]
    sampling: Sampling | None = None


@dataclass
class Decoded:
    """What a run came to.

    Attributes:
        traces: by the prompt's number.
        passes, fed: of the target, and tokens that it read in them.
        margins: of logits where an answer leaves the target's own, greedy one.
    """

    traces: dict[int, Trace] = field(default_factory=dict)
    passes: int = 0
    fed: int = 0
    margins: list[float] = field(default_factory=list)

    def add(self, other: "Decoded") -> None:
        """Take in what another process decoded."""
        self.traces |= other.traces
        self.passes += other.passes
        self.fed += other.fed
        self.margins += other.margins


@dataclass
class Clocked:
    """Seconds, of prompts decoded one by one: by benchmark, see :func:`compare_clocks`; and of single steps."""

    speed: dict[str, dict[str, Any]]
    cost: Cost
    trees: dict[int, float]
    """Seconds of a step that reads the drafter's own tree, by its budget."""


@dataclass
class Share:
    """What a process found: the target's own answers by the prompt's number, all runs, and the seconds if it took them."""

    answers: dict[int, list[int]]
    runs: dict[str, Decoded]
    clocked: Clocked | None


@dataclass(frozen=True)
class Job:
    """What every process that decodes needs to know; plain values, since it travels to other processes."""

    config: EvaluateConfig
    target: TargetConfig
    fetch: FetchConfig
    drafter: Path
    prompts: list[Prompt]
    eos: list[int]
    folder: Path


class Ground:
    """Target, drafter and prompts, on which runs are decoded.

    Args:
        rank, world: the share of this process.
    """

    def __init__(
        self,
        config: EvaluateConfig,
        frozen: FrozenTarget,
        drafter: Drafter,
        prompts: list[Prompt],
        eos: list[int],
        rank: int = 0,
        world: int = 1,
    ):
        self.config, self.frozen, self.drafter, self.prompts, self.eos = config, frozen, drafter, prompts, eos
        size = min(config.batch_size, -(-len(prompts) // world)) if reads_trees(frozen) else 1
        batches = [range(first, min(first + size, len(prompts))) for first in range(0, len(prompts), size)]
        self.batches = batches[rank::world]
        self.answers: dict[int, list[int]] = {}
        self._logits_behind = cache(self._read_behind)

    def ids(self, batch: range) -> list[list[int]]:
        """Of a batch's prompts."""
        return [self.prompts[number].ids for number in batch]

    def answer(self, progress: Progress) -> None:
        """Let the target answer by itself, by Transformers' ``generate``."""
        for batch in self.batches:
            said = greedy_answers(self.frozen.model, self.ids(batch), self.config.max_new_tokens, self.eos)
            self.answers |= dict(zip(batch, said, strict=True))
            progress.advance(len(batch), note="greedy")

    def decode(self, name: str, run: Run, progress: Progress) -> Decoded:
        """Decode all prompts of the share.

        Raises:
            ValueError: greedy, an answer differs from the target's own by more than a near-tie.
        """
        found = Decoded()
        for batch in self.batches:
            session = open_session(self.frozen)
            # A generator a prompt, which drafts and verdicts draw from in turn.
            own = [torch.Generator().manual_seed(self.config.seed * 1_000_003 + number) for number in batch]
            proposer, verdicts = (
                (run.make(), Greedy())
                if run.sampling is None
                else (run.make(generators=own), Sampled(run.sampling, own))
            )
            traces = decode(session, proposer, self.ids(batch), self.config.max_new_tokens, self.eos, verdicts)
            said = dict(zip(batch, traces, strict=True))
            found.add(Decoded(said, session.passes, session.fed, [] if run.sampling else self.margins(said)))
            progress.advance(len(batch), note=name)
        return found

    def margins(self, traces: dict[int, Trace]) -> list[float]:
        """Of the target's logits where answers leave its own.

        Raises:
            ValueError: a difference is no near-tie; speculation would then not be lossless.
        """
        margins = []
        for number, trace in traces.items():
            answer, benchmark = self.answers[number], self.prompts[number].benchmark
            first = next((i for i, (a, b) in enumerate(zip(trace.tokens, answer, strict=False)) if a != b), None)
            if first is None:
                if len(trace.tokens) != len(answer):
                    raise ValueError(f"an output has {len(trace.tokens)} tokens, greedy decoding {len(answer)}")
                continue
            logits = self._logits_behind(number, first)
            margin = float((logits[trace.tokens[first]] - logits[answer[first]]).abs())
            if margin > self.config.near_tie or self.config.dtype == "float32":
                raise ValueError(
                    f"an output differs from greedy decoding at token {first} of a {benchmark} prompt, "
                    f"logit margin {margin:.3g}: not lossless"
                )
            margins.append(margin)
        return margins

    @torch.inference_mode()
    def _read_behind(self, number: int, tokens: int) -> Tensor:
        """The target's logits behind a prompt and so many tokens of its own answer, by one plain pass."""
        ids = torch.tensor([self.prompts[number].ids + self.answers[number][:tokens]], device=self.frozen.device)
        logits: Tensor = self.frozen.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        return logits.float()

    def clock(self) -> Clocked:
        """Decode the first prompts of each benchmark one by one, and time single steps."""
        make, config = partial(DFlashProposer, self.drafter, self.frozen), self.config
        speed = {}
        for name in sorted({prompt.benchmark for prompt in self.prompts}):
            own = [prompt.ids for prompt in self.prompts if prompt.benchmark == name][: config.speed_prompts]
            speed[name] = compare_clocks(self.frozen, make, own, config.max_new_tokens, self.eos)
        longest = max((prompt.ids for prompt in self.prompts), key=len)
        block = self.drafter.shape.choice.block_size
        cost = measure_cost(self.frozen, make(), longest, sorted({1, 2, (2 + block) // 2, block}))
        budgets = config.tree_budgets
        return Clocked(speed, cost, {size: measure_tree(self.frozen, make(budget=size), longest) for size in budgets})

    def runs(self) -> dict[str, Run]:
        """Everything that is measured, the drafter's chain first; baselines draft as many tokens as it."""
        drafter, frozen, config = self.drafter, self.frozen, self.config
        control = Drafter(drafter.shape).to(next(drafter.parameters()).dtype)
        initialise_random(control, torch.Generator().manual_seed(config.seed))
        control.eval().requires_grad_(False).to(frozen.device)
        drafts = drafter.shape.choice.block_size - 1
        runs = {DRAFTER: Run(partial(DFlashProposer, drafter, frozen))}
        for budget in config.tree_budgets:
            runs[f"tree_{budget}"] = Run(partial(DFlashProposer, drafter, frozen, budget=budget))
        for asked in config.sampled:
            sampling = Sampling(**asked.model_dump())
            runs[asked.name] = Run(partial(DFlashProposer, drafter, frozen, drawn=sampling), sampling)
        return runs | {
            "prompt_lookup": Run(partial(LookupProposer, drafts, config.lookup_ngram)),
            "prompt_lookup_strict": Run(partial(LookupProposer, drafts, config.lookup_ngram, config.lookup_ngram)),
            "random_drafter": Run(partial(DFlashProposer, control, frozen)),
        }


def decode_all(job: Job) -> Share:
    """Decode everything: in this process, or in one for each GPU, through PyTorch's own launcher."""
    processes = process_count()
    if processes == 1:
        return decode_share(job)
    with tempfile.TemporaryDirectory() as name:
        job = replace(job, folder=Path(name))
        launch(decode_launched_share, job, "evaluate", job.folder, processes, again="run it again")
        shares = [pickle.loads((job.folder / str(rank)).read_bytes()) for rank in range(processes)]
    whole: Share = shares[0]
    for share in shares[1:]:
        whole.answers |= share.answers
        for run, decoded in share.runs.items():
            whole.runs[run].add(decoded)
    return whole


def decode_launched_share(job: Job) -> None:
    """Decode the share of a process that PyTorch's launcher started."""
    rank, world, device = place()
    (job.folder / str(rank)).write_bytes(pickle.dumps(decode_share(job, rank, world, device)))


def decode_share(job: Job, rank: int = 0, world: int = 1, device: str | None = None) -> Share:
    """Decode the ``rank``-th of ``world`` shares; the first process also takes the time."""
    config = job.config
    target = job.target.model_copy(update={"dtype": config.dtype})
    drafter = read_drafter(job.drafter, getattr(torch, config.dtype))
    frozen = load_target(checkpoint_folder(target, job.fetch), target, drafter.shape.target_layer_ids, device)
    ground = Ground(config, frozen, drafter.to(frozen.device), job.prompts, job.eos, rank, world)
    runs = ground.runs()
    prompts = sum(map(len, ground.batches))
    with Progress("evaluate" + (f"-{rank}" if world > 1 else ""), prompts * (1 + len(runs)), "answers") as progress:
        ground.answer(progress)
        decoded = {name: ground.decode(name, run, progress) for name, run in runs.items()}
    return Share(ground.answers, decoded, ground.clock() if config.speed_prompts and rank == 0 else None)
