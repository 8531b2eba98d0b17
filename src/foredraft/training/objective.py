"""From a row to numbers: one forward pass, used alike in training and validation.

Shapes: ``T`` tokens, ``N`` blocks, ``S`` slots, ``M`` counted slots, ``V`` rows of the head.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from foredraft.drafter.attention import training_attention
from foredraft.drafter.blocks import block_inputs, leading_run
from foredraft.drafter.config import DrafterConfig, LossConfig
from foredraft.drafter.float8 import Float8Head
from foredraft.drafter.loss import Answers, Terms, decay_weights, dpace_weights, equal_blocks, slot_losses
from foredraft.training.data import Row


@dataclass(frozen=True)
class Head:
    """The LM head in use: rows ``(V, D)``, and for each vocabulary id its row (-1 if it has none)."""

    rows: Tensor | Float8Head
    row_of: Tensor

    @classmethod
    def build(cls, lm_head: Tensor, ids: Tensor | None = None) -> "Head":
        """The rows ``ids`` of the LM head, or all of them."""
        row_of = torch.full((lm_head.shape[0],), -1)
        chosen = torch.arange(lm_head.shape[0]) if ids is None else ids
        row_of[chosen] = torch.arange(len(chosen))
        return cls(lm_head if ids is None else lm_head[chosen], row_of)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Head":
        """The same on ``device``."""
        assert isinstance(self.rows, Tensor)
        return Head(self.rows.to(device, dtype), self.row_of.to(device))

    def in_float8(self) -> "Head":
        """The same, rounded."""
        assert isinstance(self.rows, Tensor)
        return Head(Float8Head(self.rows), self.row_of)


@dataclass(frozen=True)
class Outcome:
    """Sums over a row, so that rows and ranks pool exactly.

    ``loss`` and ``weight`` are sums; ``correct`` and ``counted`` are by slot ``(S)``; ``accepted`` sums the leading runs.
    """

    loss: Tensor
    weight: Tensor
    correct: Tensor
    counted: Tensor
    accepted: Tensor
    blocks: Tensor

    def nothing(self) -> "Outcome":
        """The same sums, all zero, and so their gradients."""
        return Outcome(*(0 * getattr(self, field.name) for field in fields(self)))

    def flat(self) -> Tensor:
        """All in one, float64, for adding up: loss, weight, accepted, blocks, then correct and counted by slot."""
        singles = torch.stack([x.double() for x in (self.loss, self.weight, self.accepted, self.blocks)])
        return torch.cat([singles, self.correct.double(), self.counted.double()])


def run_row(
    drafter: nn.Module, choice: DrafterConfig, row: Row, mask: Tensor, head: Head, config: LossConfig
) -> Outcome:
    """Fill all blocks of a row and weigh their losses.

    Args:
        drafter: a :class:`~foredraft.drafter.model.Drafter`, or what stands for it where several processes train one.
        mask: the target's embedding of the mask token, ``(D)``.
    """
    blocks = row.blocks
    inputs = block_inputs(row.embedded.to(mask.dtype), mask, choice.block_size)
    attention = {
        kind: training_attention(blocks, row.bounds, None if kind == "full_attention" else choice.sliding_window)
        for kind in set(choice.layer_types)
    }
    states, places = row.target_hidden[None].to(mask.dtype), blocks.positions.flatten()[None]
    # Compiled layers want sizes that are always the same, so on a GPU the others go all the way.
    early = row.slots.device.type == "cpu"
    wanted = row.slots if early else None
    hidden = drafter(states, row.positions[None], inputs.flatten(0, 1)[None], places, attention, wanted)[0]
    asked = hidden if early else hidden.index_select(0, row.slots)

    labels = row.topk_ids[:, 0] if config.labels == "target_argmax" else row.data_ids
    answers = Answers(head.row_of[labels], head.row_of[row.topk_ids], row.topk_logprobs)
    losses = slot_losses(asked, head.rows, answers, Terms(config.ce, config.kl, config.tv))

    confidence = _spread(torch.exp(-losses.ce), row)
    if config.weights == "dpace":
        weights = dpace_weights(confidence, blocks.counted, config.alpha)
    else:
        weights = decay_weights(blocks.counted, config.gamma)
    if config.equal_blocks:
        weights = equal_blocks(weights)
    weights = weights * _spread(row.worth, row)
    correct = _spread(losses.guess == answers.labels, row)
    outcome = Outcome(
        loss=(weights.flatten()[row.slots[: row.count]] * losses.loss[: row.count]).sum(),
        weight=weights.sum(),
        correct=correct.sum(0),
        counted=blocks.counted.sum(0),
        accepted=leading_run(correct, blocks.counted).sum(),
        blocks=blocks.exists.sum(),
    )
    return outcome if row.counts else outcome.nothing()


def _spread(values: Tensor, row: Row) -> Tensor:
    """``(M)`` of the counted slots -> ``(N, S)``, zero elsewhere."""
    spread = values.new_zeros(row.blocks.counted.numel())
    spread[row.slots[: row.count]] = values[: row.count]
    return spread.view(row.blocks.counted.shape)
