"""What was accepted, in sums and counts, so that prompts, batches and ranks pool exactly.

``tokens_per_step`` counts every token that a target step commits, the bonus token included; ``accepted_per_step`` counts
accepted drafts alone. A step that reaches the end of the answer commits nothing behind it, so it may have no bonus token.
``acceptance_by_slot`` is free of that: of slot k it counts the steps behind which k tokens more are said, whether or not
the step got so far.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foredraft.loops import periodic_tail

DRAWS = 2000
"""Samples of prompts for an interval."""
NGRAM = 4


@dataclass
class Trace:
    """One prompt's decoding.

    ``steps`` holds for each target step the drafts offered, the drafts accepted and the tokens committed. The first
    token, which the prefill gives, belongs to no step.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def committed(self) -> int:
        """Tokens that steps committed."""
        return sum(committed for *_, committed in self.steps)


@dataclass
class Acceptance:
    """Pooled counts of any number of traces."""

    prompts: int = 0
    tokens: int = 0
    depth: int = 0
    """Drafts on the longest path that was offered."""
    accepts: Counter[int] = field(default_factory=Counter)
    """Steps by the drafts that they accepted."""
    rooms: Counter[int] = field(default_factory=Counter)
    """Steps by the tokens that the answer still had behind them."""

    def add(self, trace: Trace) -> None:
        """Count one trace."""
        self.prompts += 1
        said = 1
        for offered, accepted, committed in trace.steps:
            self.tokens += committed
            self.depth = max(self.depth, offered)
            self.accepts[accepted] += 1
            self.rooms[len(trace.tokens) - said] += 1
            said += committed

    def report(self) -> dict[str, Any]:
        """Named figures; ``acceptance_by_slot[k - 1]`` is the share of steps whose first k drafts were all accepted."""
        steps = self.accepts.total()
        slots = range(1, self.depth + 1)
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "target_steps": steps,
            "tokens_per_step": self.tokens / max(1, steps),
            "accepted_per_step": sum(accepted * count for accepted, count in self.accepts.items()) / max(1, steps),
            "acceptance_by_slot": [_from(self.accepts, slot) / max(1, _from(self.rooms, slot)) for slot in slots],
        }


def _from(counts: Counter[int], least: int) -> int:
    """How many were so large, or larger."""
    return sum(count for size, count in counts.items() if size >= least)


def pool(traces: Sequence[Trace]) -> Acceptance:
    """Count many traces."""
    acceptance = Acceptance()
    for trace in traces:
        acceptance.add(trace)
    return acceptance


def report(traces: Sequence[Trace]) -> dict[str, Any]:
    """All figures of some traces.

    Beside those of :meth:`Acceptance.report`: ``interval``, which holds 95 % of the pooled tokens per step when prompts are
    drawn anew; ``by_prompt``, their mean and standard deviation over prompts; ``repeated``, the share of the answers'
    4-grams that stood in the same answer before; and ``periodic``, the answers that end in circles, which are easy to
    draft: how many, and the tokens per step of the others.
    """
    found = pool(traces).report()
    rows = [[trace.committed, len(trace.steps)] for trace in traces if trace.steps]
    sums = torch.tensor(rows, dtype=torch.float64).view(-1, 2)
    each = sums[:, 0] / sums[:, 1]
    circling = [periodic_tail(trace.tokens)[0] > 0 for trace in traces]
    others = pool([trace for trace, circles in zip(traces, circling, strict=True) if not circles])
    grams = [tuple(t.tokens[i : i + NGRAM]) for t in traces for i in range(len(t.tokens) - NGRAM + 1)]
    unlike = sum(len({tuple(t.tokens[i : i + NGRAM]) for i in range(len(t.tokens) - NGRAM + 1)}) for t in traces)
    return found | {
        "interval": interval(sums),
        "by_prompt": {"mean": float(each.mean()), "spread": float(each.std(correction=0))} if len(each) else None,
        "repeated": 1 - unlike / max(1, len(grams)),
        "periodic": {"prompts": sum(circling), "tokens_per_step_of_others": others.report()["tokens_per_step"]},
    }


def interval(sums: torch.Tensor) -> dict[str, float] | None:
    """What holds 95 % of the pooled tokens per step when prompts are drawn anew; None of fewer than two.

    Args:
        sums: tokens committed by steps, and steps, of each prompt: ``(P, 2)``.
    """
    if len(sums) < 2:
        return None
    drawn = torch.randint(len(sums), (DRAWS, len(sums)), generator=torch.Generator().manual_seed(0))
    tokens, steps = sums[drawn].sum(1).unbind(-1)
    low, high = (tokens / steps).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {"low": low, "high": high}
