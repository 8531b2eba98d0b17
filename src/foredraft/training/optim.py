"""AdamW and its learning-rate schedules; both are functions of the step, so a resumed run has the same rate."""

import math

import torch
from torch import nn

from foredraft.training.config import TrainConfig

DECAY_SHARE = 0.2


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """Rate of 0-based ``step`` of ``steps``."""
    warmup = math.ceil(config.warmup * steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, steps - warmup)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * min(1.0, (1 - done) / DECAY_SHARE)
