"""One optimiser step: rows in, weights changed, sums out. Knows nothing of files, epochs or checkpoints."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.drafter.model import Drafter
from foredraft.training.config import TrainConfig
from foredraft.training.data import Row
from foredraft.training.objective import Head, Outcome, run_row
from foredraft.training.optim import build_optimizer


@dataclass(frozen=True)
class Step:
    """What a step came to: the mean loss and the gradient's norm over all rows.

    Attributes:
        culprit: the first parameter whose gradient is not finite, or ``the loss``; None where the weights were changed.
    """

    loss: float
    norm: float
    accepted: int
    blocks: int
    culprit: str | None


class Learner:
    """A drafter, its optimiser, and the target's frozen head.

    Args:
        drafter: moved to ``device`` and to the type of its weights.
        mask: the target's embedding of the mask token, ``(D)``.
    """

    def __init__(self, config: TrainConfig, drafter: Drafter, head: Head, mask: Tensor, device: torch.device):
        self.config, self.device = config, device
        self.dtype = getattr(torch, config.compute_dtype)
        self.drafter = drafter.to(device, getattr(torch, config.weights_dtype))
        self.head, self.mask = head.to(device, self.dtype), mask.to(device, self.dtype)
        self.optimizer = build_optimizer(self.drafter, config)
        if device.type == "cuda":
            self.drafter.compile_layers()

    def learn(self, rows: Iterable[Row], rate: float) -> Step:
        """Change the weights by the mean gradient over ``rows``, unless it or the loss is not finite, or nothing counts."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        outcomes = []
        for row in rows:
            outcome = self.run(row, self.head)
            outcome.loss.backward()
            outcomes.append(outcome)
        gradients = [parameter.grad for parameter in self.drafter.parameters() if parameter.grad is not None]
        # Sums of losses were differentiated: the mean over all rows comes with the clipping. One wait for the device.
        sums = [torch.stack([getattr(o, key).detach().double() for o in outcomes]).sum() for key in SUMS]
        norm_of_sum = torch.nn.utils.get_total_norm(gradients).double()
        loss, weight, accepted, blocks, norm = torch.stack([*sums, norm_of_sum]).tolist()
        if weight == 0:
            return Step(0.0, 0.0, 0, 0, None)
        loss, norm = loss / weight, norm / weight
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Step(loss, norm, int(accepted), int(blocks), self.culprit())
        torch._foreach_mul_(gradients, min(1.0, self.config.clip / (norm + 1e-6)) / weight)
        self.optimizer.step()
        return Step(loss, norm, int(accepted), int(blocks), None)

    def culprit(self) -> str:
        """The first parameter whose gradient is not finite, in the order of the forward pass."""
        named = ((name, p.grad) for name, p in self.drafter.named_parameters() if p.grad is not None)
        return next((name for name, gradient in named if not bool(gradient.isfinite().all())), "the loss")

    def run(self, row: Row, head: Head) -> Outcome:
        """One forward pass."""
        return run_row(self.drafter, row, self.mask, head, self.config.loss)


SUMS = ("loss", "weight", "accepted", "blocks")
