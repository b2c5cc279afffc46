"""float16's loss scale, agreed by the ranks that hold a model together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pmoe.training.clipping import device_type_of, memory_of


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with its arguments and methods, of a model that the ranks hold together: a
    gradient that overflows on one rank, say of its own experts, skips the step on all, and all go on with the
    same scale. One optimizer may have plain tensors and DTensors of any meshes.

    group: the ranks that hold the model together; None is the default group, or this process alone where
        there is none.

    Every rank must call `unscale_` (or `step`, which does it) for the same optimizers, once gradients are
    reduced: one all-reduce of a scalar each. A rank may have no gradients.
    """

    def __init__(
        self, device: str = "cuda", *args: Any, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(device, *args, **options)
        self.group = group

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        local: Any = SimpleNamespace(param_groups=[{"params": _local_gradients(optimizer)}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        total = torch.stack([found_inf, *(each.to(found_inf.device) for each in found.values())]).amax()
        if dist.is_available() and dist.is_initialized():
            shared = total.to(device_type_of(self.group))
            dist.all_reduce(shared, dist.ReduceOp.MAX, group=self.group)
            total = shared.to(total.device)
        return {device: total.to(device) for device in (*found, total.device)}


def _local_gradients(optimizer: Optimizer) -> list[Tensor]:
    """This rank's part of each gradient, as the ``grad`` of a tensor in the parameter's stead."""
    stead = []
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter.grad is not None:
            gradient = memory_of(parameter.grad)
            stead.append(gradient.detach())
            stead[-1].grad = gradient
    return stead
