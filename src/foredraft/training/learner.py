"""One optimiser step: rows in, weights changed, sums out. Knows nothing of files, epochs or checkpoints."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.drafter.float8 import require_float8
from foredraft.drafter.model import Drafter
from foredraft.training.config import TrainConfig
from foredraft.training.data import Row
from foredraft.training.objective import Head, Outcome, run_row
from foredraft.training.optim import Average, build_optimizers
from foredraft.training.ranks import Ranks, let_go, put, whole


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
    """A drafter, its optimisers, and the target's frozen head, in this process and in those that train it with this one.

    Args:
        drafter: moved to the device and to the type of its weights.
        mask: the target's embedding of the mask token, ``(D)``.
    """

    def __init__(self, config: TrainConfig, drafter: Drafter, head: Head, mask: Tensor, ranks: Ranks):
        self.config, self.ranks = config, ranks
        compute = getattr(torch, config.compute_dtype)
        self.drafter = drafter.to(ranks.device, getattr(torch, config.weights_dtype))
        self.head, self.mask = head.to(ranks.device, compute), mask.to(ranks.device, compute)
        if config.float8 != "none":
            require_float8(ranks.device)
            self.head = self.head.in_float8()
        if config.float8 == "all":
            self.drafter.train_in_float8()
        if ranks.device.type == "cuda":
            self.drafter.compile_layers()
        self.model = ranks.spread(self.drafter, config.parallel, compute)
        self.optimizers = build_optimizers(self.drafter, config)
        self.average = Average(self.drafter.parameters(), config.average) if config.average else None

    def learn(self, rows: list[Row], rate: float) -> Step:
        """Change the weights by the mean gradient over all processes' rows.

        They stay as they are where that or the loss is not finite, or nothing counts.
        """
        outcomes = []
        for number, row in enumerate(rows, 1):
            with self.ranks.accumulating(self.model, last=number == len(rows)):
                outcome = self.run(row, self.head)
                outcome.loss.backward()
            outcomes.append(outcome)
        gradients = [parameter.grad for parameter in self.drafter.parameters() if parameter.grad is not None]
        # Sums of losses were differentiated: the mean over all rows comes with the clipping. One wait for the device.
        sums = self.ranks.sum(torch.stack([outcome.flat().detach() for outcome in outcomes]).sum(0))
        norm_of_mean = whole(torch.nn.utils.get_total_norm(gradients)).double()
        loss, weight, accepted, blocks, *_, norm = torch.cat([sums, norm_of_mean[None]]).tolist()
        step = Step(0.0, 0.0, int(accepted), int(blocks), None)
        if weight != 0:  # a weight that is no number is no reason to count nothing
            scale = self.ranks.world / weight  # processes exchange the mean of their sums
            step = replace(step, loss=loss / weight, norm=norm * scale)
            if math.isfinite(step.loss) and math.isfinite(step.norm):
                torch._foreach_mul_(gradients, min(1.0, self.config.clip / (step.norm + 1e-6)) * scale)
                self._update(rate)
            else:
                step = replace(step, culprit=self.culprit())
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return step

    def _update(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        if self.average:
            self.average.update()

    def culprit(self) -> str:
        """The first parameter whose gradient is not finite, in the order of the forward pass."""
        named = ((name, p.grad) for name, p in self.drafter.named_parameters() if p.grad is not None)
        return next((name for name, gradient in named if not bool(whole(gradient).isfinite().all())), "the loss")

    def run(self, row: Row, head: Head) -> Outcome:
        """One forward pass."""
        return run_row(self.model, self.drafter.shape.choice, row, self.mask, head, self.config.loss)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """With the weights that are validated and published: the average, if there is one."""
        if self.average is None:
            yield
            return
        with self.average.in_place():
            let_go(self.drafter)
            yield
        let_go(self.drafter)

    def weights(self) -> dict[str, Tensor]:
        """The drafter's state dict, whole. Every process must ask."""
        return {name: whole(tensor).contiguous() for name, tensor in self.drafter.state_dict().items()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All that a run goes on from, by file and name. Every process must ask."""
        state = {"drafter": self.weights(), "optimizer": {}}
        for name, parameter in self.drafter.named_parameters():
            of_parameter = self._optimizer_of(parameter).state[parameter]
            state["optimizer"] |= {f"{name}/{key}": whole(value).contiguous() for key, value in of_parameter.items()}
        if self.average:
            names = (name for name, _ in self.drafter.named_parameters())
            state["average"] = {name: whole(v).contiguous() for name, v in zip(names, self.average.values, strict=True)}
            state["average"]["updates"] = torch.tensor(self.average.updates)
        return state

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Go on from a :meth:`state`, exactly."""
        whole_drafter = Drafter(self.drafter.shape)
        whole_drafter.load_state_dict(state["drafter"])
        for mine, theirs in zip(self.drafter.parameters(), whole_drafter.parameters(), strict=True):
            put(mine, theirs)
        parameters = dict(self.drafter.named_parameters())
        for name, value in state["optimizer"].items():
            parameter, key = parameters[name.rpartition("/")[0]], name.rpartition("/")[2]
            held = torch.empty_like(parameter) if value.shape == parameter.shape else value.to(self.ranks.device)
            put(held, value)
            self._optimizer_of(parameter).state[parameter][key] = held
        if self.average:
            for name, held in zip(parameters, self.average.values, strict=True):
                put(held, state["average"][name])
            self.average.updates = int(state["average"]["updates"])

    def _optimizer_of(self, parameter: Tensor) -> torch.optim.Optimizer:
        return next(o for o in self.optimizers if any(parameter is p for g in o.param_groups for p in g["params"]))
