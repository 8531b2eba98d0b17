"""What was accepted, in sums and counts, so that prompts, batches and ranks pool exactly.

``tokens_per_step`` counts every token that a target step commits, the bonus token included; ``accepted_per_step`` counts
accepted drafts alone. A step that reaches the end of the answer commits nothing behind it.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Trace:
    """One prompt's decoding.

    ``steps`` holds for each target step the drafts offered, the drafts accepted and the tokens committed. The first
    token, which the prefill gives, belongs to no step.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)


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


def pool(traces: list[Trace]) -> Acceptance:
    """Count many traces."""
    acceptance = Acceptance()
    for trace in traces:
        acceptance.add(trace)
    return acceptance
