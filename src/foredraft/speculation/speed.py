"""What speculation is worth on this machine: seconds, not steps.

A step that verifies n tokens costs more than one that reads a single token, and drafting costs too. How much decides how
many drafts are worth making, and how many tokens a step must commit before anything is won.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from foredraft.devices import growing_text
from foredraft.speculation.decode import decode
from foredraft.speculation.proposers import Proposer
from foredraft.speculation.session import Session, open_session
from foredraft.speculation.tree import Tree, chain
from foredraft.target.frozen import FrozenTarget
from foredraft.target.generate import greedy_answers

REPEATS = 5


class Timed:
    """An object whose methods' time is added up.

    Attributes:
        seconds: in all of them, the device's work included.
    """

    def __init__(self, inner: Any, device: torch.device):
        self._inner, self._device = inner, device
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            result, seconds = seconds_of(lambda: found(*args, **kwargs), self._device)
            self.seconds += seconds
            return result

        return timed


@dataclass(frozen=True)
class Cost:
    """Seconds, of one row: of a target step by the tokens that it reads, and of drafting a block."""

    verify: dict[int, float]
    draft: float

    def of(self, tokens: int) -> float:
        """Of a step that reads so many tokens; between two sizes measured, on the line through them."""
        sizes = sorted(self.verify)
        right = next((size for size in sizes if size >= tokens), sizes[-1])
        left = max((size for size in sizes if size <= tokens), default=sizes[0])
        share = 0.0 if left == right else (tokens - left) / (right - left)
        return self.verify[left] + share * (self.verify[right] - self.verify[left])


def seconds_of(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What ``work`` gives, and how long it took."""
    synchronise(device)
    start = time.perf_counter()
    result = work()
    synchronise(device)
    return result, time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@growing_text()
@torch.inference_mode()
def measure_cost(
    target: FrozenTarget,
    proposer: Proposer,
    prompt: list[int],
    sizes: Sequence[int],
    shaped: Callable[[list[int]], Tree] = chain,
) -> Cost:
    """Time steps of ``sizes`` tokens behind a prompt, ``shaped`` as they are read, and the drafting of a block; medians."""
    session, device = open_session(target), target.device
    _, slots = session.prefill([prompt])
    proposer.observe(slots)
    root = prompt[-1]
    drafts = [seconds_of(lambda: proposer.propose([[*prompt, root]]), device)[1] for _ in range(REPEATS)]
    verify = {size: _step_seconds(session, root, shaped(list(range(size - 1))), device) for size in sizes}
    return Cost(verify, statistics.median(drafts))


@growing_text()
@torch.inference_mode()
def measure_tree(target: FrozenTarget, proposer: Proposer, prompt: list[int]) -> float:
    """Seconds of a step that reads what is drafted behind a prompt: a target that is replayed reads a tree path by path."""
    session = open_session(target)
    _, slots = session.prefill([prompt])
    proposer.observe(slots)
    (tree,) = proposer.propose([[*prompt, prompt[-1]]])
    return _step_seconds(session, prompt[-1], tree, target.device)


def _step_seconds(session: Session, root: int, tree: Tree, device: torch.device) -> float:
    """The median of a few."""

    def step() -> None:
        session.verify([root], [tree])
        session.commit([[0]])

    return statistics.median(seconds_of(step, device)[1] for _ in range(REPEATS))


def compare_clocks(
    target: FrozenTarget, make: Callable[[], Proposer], prompts: list[list[int]], max_new_tokens: int, eos: list[int]
) -> dict[str, Any]:
    """Decode prompts one by one, by Transformers' own greedy loop and by speculation, in turns.

    Returns:
        seconds, tokens and what follows from them: tokens a second of both, seconds to the first token, the drafter's share
        of the time, and the speed-up.
    """
    plain = first = ours = drafting = 0.0
    plain_tokens = tokens = steps = 0
    greedy_answers(target.model, prompts[:1], 2, eos)  # what is made on first use is not counted
    device = target.device
    for prompt in prompts:
        answers, seconds = seconds_of(partial(greedy_answers, target.model, [prompt], max_new_tokens, eos), device)
        plain, plain_tokens = plain + seconds, plain_tokens + len(answers[0])
        first += seconds_of(partial(open_session(target).prefill, [prompt]), device)[1]
        proposer, session = Timed(make(), device), open_session(target)
        traces, seconds = seconds_of(partial(decode, session, proposer, [prompt], max_new_tokens, eos), device)
        ours, drafting, tokens = ours + seconds, drafting + proposer.seconds, tokens + len(traces[0].tokens)
        steps += len(traces[0].steps)
    rates = {"plain_tokens_per_s": plain_tokens / plain, "tokens_per_s": tokens / ours}
    return rates | {
        "tokens_per_step": (tokens - len(prompts)) / max(1, steps),
        "seconds_to_first_token": first / len(prompts),
        "drafter_share": drafting / ours,
        "speed_up": rates["tokens_per_s"] / rates["plain_tokens_per_s"],
    }


@dataclass(frozen=True)
class Branching:
    """A tree of some budget: tokens that a step commits where the answer goes on, and seconds of reading it."""

    tokens_per_step: float
    seconds: float


def recommend(
    acceptance_by_slot: list[float], trees: dict[int, Branching], cost: Cost, plain_seconds: float
) -> dict[str, Any]:
    """Which draft length, or tree, is expected to be fastest.

    Args:
        acceptance_by_slot: share of steps whose first k drafts were all accepted, of the trained block.
        trees: by node budget.
        plain_seconds: of a token in the best plain loop.

    Returns:
        the expected speed-ups, the best of each kind, and the tokens per step at which the trained block breaks even.
    """
    expected = {
        drafts: (1 + sum(acceptance_by_slot[:drafts])) * plain_seconds / (cost.of(1 + drafts) + cost.draft)
        for drafts in range(1, len(acceptance_by_slot) + 1)
    }
    by_budget = {
        budget: tree.tokens_per_step * plain_seconds / (tree.seconds + cost.draft) for budget, tree in trees.items()
    }
    return {
        "speed_up_by_drafts": expected,
        "speed_up_by_tree_budget": by_budget,
        "best_drafts": max(expected, key=lambda drafts: expected[drafts]),
        "best_tree_budget": max(by_budget, key=lambda budget: by_budget[budget]) if by_budget else None,
        "break_even_tokens_per_step": (cost.of(1 + len(acceptance_by_slot)) + cost.draft) / plain_seconds,
        "trained_drafts": len(acceptance_by_slot),
    }
