"""Processes that train one drafter together: what each does, and what they agree on.

A step's rows are dealt out in turn, gradients of sums are added up, and the mean is taken over all: the same step whatever
their number. Every process makes the same calls of PyTorch's collectives, so one that has no row left runs a stand-in.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from foredraft.drafter.model import Drafter

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train one drafter; by default it is alone."""

    device: torch.device
    rank: int = 0
    world: int = 1

    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """The items of this process, as many as any other has; False marks stand-ins at the end."""
        rounds = -(-len(items) // self.world)
        places = (number * self.world + self.rank for number in range(rounds))
        return [(items[place], True) if place < len(items) else (items[0], False) for place in places]

    def sum(self, values: Tensor) -> Tensor:
        """Added up over all processes."""
        if self.world > 1:
            distributed.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return flag if self.world == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes."""
        if self.world == 1:
            return items
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, items)
        return [item for of_rank in found for item in of_rank]

    def spread(self, drafter: Drafter, parallel: str, compute: torch.dtype) -> nn.Module:
        """What to call for ``drafter`` so that gradients are those of all processes: their mean.

        Args:
            parallel: ``ddp``: every process holds all weights; ``fsdp``: weights, gradients and the optimiser's state are
                sharded, and gathered in ``compute`` layer by layer.
        """
        if self.world == 1:
            return drafter
        if parallel == "ddp":
            # Document by document a row without blocks leaves parameters out.
            alone = self.device.type == "cpu"
            return DistributedDataParallel(drafter, gradient_as_bucket_view=True, find_unused_parameters=alone)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in drafter.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(drafter, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        return drafter

    def accumulating(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around a row's forward and backward pass: gradients are exchanged with the last row of a step alone."""
        from torch.distributed.fsdp import FSDPModule

        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def let_go(drafter: nn.Module) -> None:
    """Drop weights that FSDP has gathered: shards that were overwritten are to be gathered anew."""
    from torch.distributed.fsdp import FSDPModule

    for module in drafter.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Every process must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def put(tensor: Tensor, value: Tensor) -> None:
    """Overwrite a tensor, which may be sharded, by ``value``, which every process has."""
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = tensor
        value = value.to(sharded.device)
        tensor.copy_(distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None))
    else:
        tensor.copy_(value)
