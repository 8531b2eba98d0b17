"""From a batch to numbers: one forward pass, used alike in training and validation.

Shapes: ``B`` documents, ``T`` tokens, ``N`` blocks, ``S`` slots, ``M`` counted slots, ``V`` rows of the head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.drafter.blocks import block_inputs, leading_run
from foredraft.drafter.config import LossConfig
from foredraft.drafter.loss import decay_weights, dpace_weights, slot_losses
from foredraft.drafter.masks import training_mask
from foredraft.drafter.model import Drafter
from foredraft.training.batches import Batch

# Counted slots are padded up to a multiple of this for the head, so that few shapes occur.
SLOT_MULTIPLE = 128


@dataclass(frozen=True)
class Head:
    """The LM head in use: rows ``(V, D)``, and for each vocabulary id its row (-1 if it has none)."""

    rows: Tensor
    row_of: Tensor

    @classmethod
    def build(cls, lm_head: Tensor, ids: Tensor | None, dtype: torch.dtype) -> "Head":
        """The rows ``ids`` of the LM head, or all of them."""
        row_of = torch.full((lm_head.shape[0],), -1)
        chosen = torch.arange(lm_head.shape[0]) if ids is None else ids
        row_of[chosen] = torch.arange(len(chosen))
        return cls(lm_head[chosen].to(dtype), row_of)


@dataclass(frozen=True)
class Outcome:
    """Sums over a batch, so that batches and ranks pool exactly.

    ``loss`` and ``weight`` are sums; ``correct`` and ``counted`` are by slot ``(S)``; ``accepted`` sums the leading runs.
    """

    loss: Tensor
    weight: Tensor
    correct: Tensor
    counted: Tensor
    accepted: int
    blocks: int


def run_batch(drafter: Drafter, batch: Batch, embeddings: Tensor, head: Head, config: LossConfig) -> Outcome:
    """Fill all blocks of a batch and weigh their losses.

    Args:
        embeddings: the target's ``(vocabulary, D)``.
    """
    blocks = batch.blocks
    size, length = blocks.block_size, batch.input_ids.shape[1]
    choice = drafter.shape.choice
    slots = block_inputs(blocks, batch.input_ids, choice.mask_token_id)  # (B, N, S)
    positions = torch.arange(length)[None].expand_as(batch.input_ids)
    context = drafter.read_context(batch.target_hidden.to(embeddings.dtype), positions)
    masks = {
        kind: training_mask(blocks, length, None if kind == "full_attention" else choice.sliding_window)
        for kind in set(choice.layer_types)
    }
    hidden = drafter(embeddings[slots.flatten(1)], blocks.positions.flatten(1), context, masks)
    hidden = hidden.unflatten(1, (-1, size))[blocks.counted]  # (M, D)

    where = blocks.positions.clamp(max=length - 1)
    topk_ids = _at(batch.topk_ids, where)[blocks.counted]  # (M, K)
    topk_logprobs = _at(batch.topk_logprobs, where)[blocks.counted]
    data = batch.input_ids.gather(1, where.flatten(1)).view_as(where)[blocks.counted]
    labels = topk_ids[:, 0] if config.labels == "target_argmax" else data
    count = len(hidden)
    rows = (hidden, head.row_of[labels], head.row_of[topk_ids], topk_logprobs)
    padded = [F.pad(tensor, (0,) * (2 * tensor.dim() - 1) + (-count % SLOT_MULTIPLE,)) for tensor in rows]
    ce, kl, guesses = (values[:count] for values in slot_losses(padded[0], head.rows, *padded[1:]))

    confidence = _scatter(torch.exp(-ce.detach()), blocks.counted)
    if config.weights == "dpace":
        weights = dpace_weights(confidence, blocks.counted, config.alpha)
    else:
        weights = decay_weights(blocks.counted, config.gamma)
    weights = weights[blocks.counted]
    losses = (1 - config.soft) * ce + config.soft * kl

    correct = _scatter(guesses == head.row_of[labels], blocks.counted)
    real = blocks.counted[..., 1]
    return Outcome(
        loss=(weights * losses).sum(),
        weight=weights.sum(),
        correct=correct.sum((0, 1)),
        counted=blocks.counted.sum((0, 1)),
        accepted=int(leading_run(correct, blocks.counted)[real].sum()),
        blocks=int(real.sum()),
    )


def _at(values: Tensor, where: Tensor) -> Tensor:
    """``(B, T, K)`` at ``(B, N, S)`` -> ``(B, N, S, K)``."""
    flat = where.flatten(1)[..., None].expand(-1, -1, values.shape[-1])
    return values.gather(1, flat).unflatten(1, where.shape[1:])


def _scatter(values: Tensor, counted: Tensor) -> Tensor:
    spread = torch.zeros(counted.shape, dtype=values.dtype)
    spread[counted] = values
    return spread
