"""Is what is read off the target true?

Before the work, a few documents are read in every way there is, and all ways must agree: the hooks with the target's own
hidden states, logits rebuilt from the final states with the target's own, a document alone with the same one in a batch,
fast blocks with Transformers' own. A false tap or a wrong kernel trains without an error and serves at no acceptance.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foredraft.features.batching import pad
from foredraft.target.frozen import FrozenTarget
from foredraft.target.kernels import stock_blocks

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far two ways may be apart, as a share of a state's length, in the mean over tokens. Rounding alone gives about 1e-6 in
float32 and 1e-2 in 16 bits; another norm, gate, position or block is of the order of 1."""
LONGEST = 1024
"""Tokens of a document that are compared."""


@dataclass(frozen=True)
class Check:
    """One comparison of the truth check.

    Attributes:
        difference: mean over tokens of the distance between both ways, as a share of the state's length.
        worst: the largest over tokens.
        tolerance: what ``difference`` may be.
    """

    name: str
    difference: float
    worst: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether both ways agree; false for what is not a number."""
        return self.difference <= self.tolerance


@torch.inference_mode()
def truth_check(target: FrozenTarget, documents: list[Tensor]) -> list[Check]:
    """Compare hooks, rebuilt logits, batching and kernels on a few documents of token ids ``(T)``.

    Raises:
        ValueError: two ways disagree; names the check, after the table was printed.
    """
    documents = [ids[:LONGEST] for ids in documents]
    documents.append(documents[0][: len(documents[0]) // 2 + 1])  # so that one is padded, whatever the others' lengths
    found: dict[str, list[Tensor]] = {}
    agree = True

    def compare(name: str, a: Tensor, b: Tensor) -> None:
        found.setdefault(name, []).append(distances(a, b))

    together, together_final = target.read(pad(documents).to(target.device))
    for row, ids in enumerate(documents):
        one = ids[None].long().to(target.device)
        with stock_blocks(target) if target.in_place else nullcontext():
            stock = target.model(input_ids=one, output_hidden_states=True, use_cache=False)
            stock_taps, stock_final = target.read(one)
        for index, layer_id in enumerate(target.layer_ids):
            seen = stock_taps[:, :, index]
            if layer_id + 1 == len(target.blocks):
                seen = target.decoder.norm(seen)  # the last entry of hidden_states is after the final norm
            compare("hook equals hidden_states", seen, stock.hidden_states[layer_id + 1])
        logits = target.head(stock_final)
        compare("rebuilt logits equal the target's", logits, stock.logits)
        agree &= bool((logits.argmax(-1) == stock.logits.argmax(-1)).all())
        taps, final = target.read(one)
        compare("alone equals batched", together[row : row + 1, : len(ids)], taps)
        compare("alone equals batched", together_final[row : row + 1, : len(ids)], final)
        if target.in_place:
            compare("fast blocks equal stock", taps, stock_taps)
            compare("fast blocks equal stock", final, stock_final)
    tolerance = TOLERANCE[target.head.weight.dtype]
    checks = []
    for name, parts in found.items():
        all_parts = torch.cat(parts)
        checks.append(Check(name, float(all_parts.mean()), float(all_parts.max()), tolerance))
    report(checks, len(documents))
    for check in checks:
        if not check.holds:
            raise ValueError(
                f"truth check: not so: {check.name}: they differ by {check.difference:.3g} of their size, "
                f"tolerance {check.tolerance}"
            )
    if not agree:
        raise ValueError("truth check: the LM head on the final hidden states does not give the target's own argmax")
    return checks


def distances(a: Tensor, b: Tensor) -> Tensor:
    """How far each of ``(..., D)`` states is from its counterpart, as a share of the latter's length."""
    return ((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1).clamp(min=1e-12)).flatten().cpu()


def report(checks: list[Check], documents: int) -> None:
    """Print what the truth check found."""
    table = Table(title=f"truth check on {documents} documents")
    for column in ("check", "mean difference", "largest", "tolerance", ""):
        table.add_column(column, justify="left" if column == "check" else "right")
    for check in checks:
        values = (f"{value:.2g}" for value in (check.difference, check.worst, check.tolerance))
        table.add_row(check.name, *values, "holds" if check.holds else "FAILS")
    Console(stderr=True, width=100).print(table)


def as_record(checks: list[Check]) -> dict[str, Any]:
    """What is kept of a truth check."""
    return {
        check.name: {"mean": check.difference, "largest": check.worst, "tolerance": check.tolerance} for check in checks
    }
