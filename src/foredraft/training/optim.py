"""Optimisers, and their schedules: functions of the step, so that a resumed run has the same rate."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from foredraft.training.config import TrainConfig

DECAY_SHARE = 0.2


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW with weight decay on matrices alone; or Muon for the matrices and AdamW for the rest, at the same rate.

    Muon's update is scaled to the size that AdamW's has (arXiv 2502.16982), so one rate serves both.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    if config.optimizer == "muon":
        muon = torch.optim.Muon(
            matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(vectors, lr=config.lr, betas=config.betas, weight_decay=0.0, fused=True)]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)]


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Rate of 0-based ``step`` of ``steps``."""
    warmup = math.ceil(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * min(1.0, (1 - done) / (DECAY_SHARE if config.schedule == "wsd" else 1))


class Average:
    """Exponential moving average of parameters, in float32.

    Early on it forgets faster, by ``(1 + n) / (10 + n)`` after ``n`` updates, so that it does not hold on to the start.
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float):
        self.decay, self.updates = decay, 0
        self.parameters = list(parameters)
        self.values = [p.detach().float().clone() for p in self.parameters]

    def update(self) -> None:
        """Take in what the parameters are now."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.values, [p.detach().float() for p in self.parameters], 1 - decay)
        self.updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """With the average for parameters."""
        held = [parameter.detach().clone() for parameter in self.parameters]
        self._overwrite(self.values)
        try:
            yield
        finally:
            self._overwrite(held)

    @torch.no_grad()
    def _overwrite(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)
