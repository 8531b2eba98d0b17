"""What a slot's guess costs, and how much each slot matters.

Shapes: ``M`` counted slots, ``K`` stored top-k, ``V`` rows of the head in use, ``N`` blocks, ``S`` slots.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 2048


def slot_losses(
    hidden: Tensor, head: Tensor, labels: Tensor, topk_ids: Tensor, topk_logprobs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, KL and best guess of each slot, by chunks whose logits are computed again in the backward pass.

    Args:
        hidden: ``(M, D)``.
        head: ``(V, D)``.
        labels: ``(M)``, rows of ``head``.
        topk_ids, topk_logprobs: ``(M, K)``, the target's own distribution; ids are rows of ``head``, or -1 for ids that
            it lacks: their mass goes to the tail.

    Returns:
        ``(M)`` each: two losses in fp32, and rows of ``head``.
    """
    tensors = (hidden, labels, topk_ids, topk_logprobs)
    if len(hidden) <= CHUNK:
        return _chunk_losses(hidden, head, *tensors[1:])
    parts = [
        checkpoint(_chunk_losses, h, head, y, i, p, use_reentrant=False)
        for h, y, i, p in zip(*(t.split(CHUNK) for t in tensors), strict=True)
    ]
    ce, kl, guess = zip(*parts, strict=True)
    return torch.cat(ce), torch.cat(kl), torch.cat(guess)


def _chunk_losses(
    hidden: Tensor, head: Tensor, labels: Tensor, topk_ids: Tensor, topk_logprobs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits = (hidden @ head.T).float()  # (M, V)
    normaliser = logits.logsumexp(-1, keepdim=True)
    ce = (normaliser - logits.gather(1, labels[:, None]))[:, 0]
    guessed = logits.gather(1, topk_ids.clamp(min=0)) - normaliser  # (M, K)
    return ce, kl_with_tail(topk_logprobs, guessed, topk_ids >= 0), logits.detach().argmax(-1)


def kl_with_tail(target: Tensor, guess: Tensor, known: Tensor) -> Tensor:
    """KL(target || guess) over the known outcomes and one bucket for all others.

    Args:
        target, guess: ``(M, K)`` log-probabilities of the same ids.
        known: ``(M, K)`` bool, which of them count; the others fall into the bucket.
    """
    terms = torch.where(known, target.exp() * (target - guess), 0.0).sum(-1)
    target_tail, guess_tail = _log_tail(target, known), _log_tail(guess, known)
    return terms + target_tail.exp() * (target_tail - guess_tail)


def _log_tail(logprobs: Tensor, known: Tensor) -> Tensor:
    """Log of the mass that the known outcomes leave over, kept finite."""
    mass = torch.where(known, logprobs.exp(), 0.0).sum(-1)
    return torch.log1p(-mass.clamp(max=1 - 1e-6))


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
