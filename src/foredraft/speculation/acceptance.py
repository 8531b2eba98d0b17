"""What was accepted, in sums and counts, so that prompts, batches and ranks pool exactly.

``tokens_per_step`` counts every token that a target step commits, the bonus token included; ``accepted_per_step`` counts
accepted drafts alone. A step that reaches the end of the answer commits nothing behind it.
"""

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
    target_steps: int = 0
    accepted: int = 0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, trace: Trace) -> None:
        """Count one trace."""
        self.prompts += 1
        for offered, accepted, committed in trace.steps:
            self.target_steps += 1
            self.tokens += committed
            self.accepted += accepted
            for slot in range(offered):
                if slot >= len(self.offered_at):
                    self.offered_at.append(0)
                    self.accepted_at.append(0)
                self.offered_at[slot] += 1
                self.accepted_at[slot] += slot < accepted

    def report(self) -> dict[str, Any]:
        """Named figures; ``acceptance_by_slot[k - 1]`` is the share of steps whose first k drafts were all accepted."""
        steps = max(1, self.target_steps)
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "target_steps": self.target_steps,
            "tokens_per_step": self.tokens / steps,
            "accepted_per_step": self.accepted / steps,
            "acceptance_by_slot": [a / o for a, o in zip(self.accepted_at, self.offered_at, strict=True)],
        }


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
    sums = torch.tensor([[trace.committed, len(trace.steps)] for trace in traces if trace.steps], dtype=torch.float64)
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
