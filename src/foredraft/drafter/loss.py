"""What a slot's guess costs, and how much each slot matters.

The head is frozen and a slot's loss depends on no other slot, so its gradient is written down where its logits are: there
is no second pass over them, and what stays is as wide as the hidden state, not as the vocabulary.

With ``q = softmax(z)``, label ``y``, the target's stored probabilities ``t`` of ids ``K`` and a bucket for all other ids
(``t_T``, ``q_T``), the terms and their gradients by ``z_j`` are

* cross-entropy ``-log q_y``: ``q_j - [j = y]``;
* KL divergence: ``q_j - t_j`` for ``j`` in ``K``, ``q_j (1 - t_T / q_T)`` elsewhere;
* total variation, half the sum of ``|q - t|``: ``q_j (s_j - sum of s q) / 2``, with ``s`` the signs of ``q - t``.

Shapes: ``M`` slots, ``K`` stored top-k, ``V`` rows of the head in use, ``D`` hidden size, ``N`` blocks, ``S`` slots.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.drafter.float8 import Float8Head

CHUNK = 1024
"""Slots whose logits are held at once."""
LEAST_TAIL = 1e-6


@dataclass(frozen=True)
class Terms:
    """How much each term counts."""

    ce: float
    kl: float
    tv: float


@dataclass(frozen=True)
class Answers:
    """What slots are asked for. Ids are rows of the head in use; -1 for those that it lacks, whose mass goes to the tail."""

    labels: Tensor  # (M)
    topk_ids: Tensor  # (M, K)
    topk_logprobs: Tensor  # (M, K)

    def split(self, size: int) -> list["Answers"]:
        """Chunks of ``size`` slots."""
        parts = (tensor.split(size) for tensor in (self.labels, self.topk_ids, self.topk_logprobs))
        return [Answers(*chunk) for chunk in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Losses:
    """``(M)`` each: the weighted sum of the terms, which has a gradient; cross-entropy and best guess, which have none."""

    loss: Tensor
    ce: Tensor
    guess: Tensor


def slot_losses(hidden: Tensor, head: Tensor | Float8Head, answers: Answers, terms: Terms) -> Losses:
    """Losses of slots ``hidden (M, D)`` under ``head (V, D)``, by chunks."""
    return Losses(*_SlotLosses.apply(hidden, head, answers, terms))


class _SlotLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor | Float8Head, answers: Answers, terms: Terms
    ) -> tuple[Tensor, ...]:
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        chunks = hidden.split(CHUNK)
        places = [None] * len(chunks) if gradient is None else gradient.split(CHUNK)
        asked = zip(chunks, answers.split(CHUNK), places, strict=True)
        found = [_of_chunk(part, head, wanted, terms, place) for part, wanted, place in asked]
        ctx.save_for_backward(gradient)
        results = [torch.cat([getattr(losses, name) for losses in found]) for name in ("loss", "ce", "guess")]
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_loss,) = ctx.saved_tensors
        return of_loss * gradients[0][:, None].to(of_loss.dtype), None, None, None


def _of_chunk(
    hidden: Tensor, head: Tensor | Float8Head, answers: Answers, terms: Terms, place: Tensor | None
) -> Losses:
    """Losses of a chunk, and in ``place`` their gradient by ``hidden``; its logits are gone when the next one's are made."""
    logits = hidden @ head.T if isinstance(head, Tensor) else head.logits(hidden)
    losses = chunk_losses(logits, answers, terms, gradient=place is not None)
    if place is not None:
        torch.mm(logits, head, out=place) if isinstance(head, Tensor) else head.pull_back(logits, out=place)
    return losses


def chunk_losses(logits: Tensor, answers: Answers, terms: Terms, gradient: bool) -> Losses:
    """Losses of slots by their logits ``(M, V)``; with ``gradient`` the logits are overwritten by the loss's own."""
    rows = row_functions(logits.device)
    normaliser, guess = rows.normaliser_and_best(logits)
    labels, known, ids = answers.labels[:, None], answers.topk_ids >= 0, answers.topk_ids.clamp(min=0)
    ce = normaliser - logits.gather(1, labels)[:, 0].float()
    log_q, log_t = logits.gather(1, ids).float() - normaliser[:, None], answers.topk_logprobs  # (M, K)
    q, t = (torch.where(known, x.exp(), 0.0) for x in (log_q, log_t))
    rest = 1 - q.sum(-1, keepdim=True)
    tail_q, tail_t = (x.clamp(min=LEAST_TAIL) for x in (rest, 1 - t.sum(-1, keepdim=True)))
    kl = (torch.where(known, t * (log_t - log_q), 0.0).sum(-1, keepdim=True) + tail_t * (tail_t / tail_q).log())[:, 0]
    tv = 0.5 * ((q - t).abs().sum(-1, keepdim=True) + (tail_q - tail_t).abs())[:, 0]
    if gradient:
        held = (rest > LEAST_TAIL).float()  # a tail that is clamped does not move
        ratio = held * tail_t / tail_q
        sign, tail_sign = (q - t).sign(), held * (tail_q - tail_t).sign()
        mass, lean = t.sum(-1, keepdim=True) + held * tail_t, (sign * q).sum(-1, keepdim=True) + tail_sign * tail_q
        share = terms.ce + terms.kl * (mass - ratio) + 0.5 * terms.tv * (tail_sign - lean)
        of_known = q * (terms.kl * ratio + 0.5 * terms.tv * (sign - tail_sign)) - terms.kl * t
        rows.scale_softmax(logits, normaliser, share[:, 0])
        add_to(logits, ids, torch.where(known, of_known, 0.0))
        add_to(logits, labels, torch.full_like(ce, -terms.ce)[:, None])
    return Losses(terms.ce * ce + terms.kl * kl + terms.tv * tv, ce, guess)


def add_to(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add ``values (M, K)`` to each row of ``logits (M, V)`` at ``ids (M, K)``.

    Not by ``scatter_add_``, which on a CPU makes a float copy of all logits and back.
    """
    places = ids + logits.shape[1] * torch.arange(len(logits), device=logits.device)[:, None]
    logits.view(-1).index_add_(0, places.flatten(), values.flatten().to(logits.dtype))


def row_functions(device: torch.device) -> Any:
    """Where what passes over whole rows of logits is: Triton's kernels on a GPU, this module elsewhere."""
    if device.type == "cuda":
        from foredraft.drafter import fused_loss

        return fused_loss
    return sys.modules[__name__]


def normaliser_and_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials of each row of ``(M, V)``, in float32, and the place of its largest."""
    wide = logits.to(torch.float32, copy=True)
    top, best = wide.max(-1)  # four times as fast as argmax
    return wide.sub_(top[:, None]).exp_().sum(-1).log() + top, best


def scale_softmax(logits: Tensor, normaliser: Tensor, share: Tensor) -> None:
    """Overwrite each row of ``(M, V)`` by its softmax times ``share (M)``."""
    logits.copy_(logits.to(torch.float32, copy=True).sub_(normaliser[:, None]).exp_().mul_(share[:, None]))


def decay_weights(counted: Tensor, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) on counted slots, ``(..., S)``."""
    slots = torch.arange(counted.shape[-1], device=counted.device)
    return torch.exp(-(slots - 1) / gamma) * counted


def dpace_weights(confidence: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """D-PACE: slot k weighs the sum over j >= k of the product over i <= j of s_i.

    s_i = (1 - alpha) q_i + alpha where slot i is counted, and 1 elsewhere; q is the probability that the drafter gives to
    the label. So a slot matters as far as the block is likely to be accepted up to it and beyond. No gradient.

    Args:
        confidence, counted: ``(..., S)``; slot 0 is never counted.
    """
    s = torch.where(counted, (1 - alpha) * confidence.detach() + alpha, 1.0)
    reach = s[..., 1:].cumprod(-1) * counted[..., 1:]
    tail = reach.flip(-1).cumsum(-1).flip(-1) * counted[..., 1:]
    return torch.cat([torch.zeros_like(tail[..., :1]), tail], dim=-1)


def equal_blocks(weights: Tensor) -> Tensor:
    """Weights ``(N, S)`` scaled so that those of each block that has any add up to one."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)
