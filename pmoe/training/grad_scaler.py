"""float16's loss scale, agreed by the ranks that hold a model together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pmoe.training.clipping import device_type_of, local_gradient, stand_ins


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with its arguments and methods, of a model that the ranks hold together.

    A gradient that overflows on one rank, say of its own experts, skips the step on all ranks, and all go on
    with the same scale. One optimizer may have plain tensors and DTensors of any meshes.

    group: the ranks that hold the model together. None is the default group, or this process alone without
        one.

    Every rank must call ``unscale_`` (or `step`, which does it) for the same optimizers, once gradients are
    reduced: one all-reduce of one number each. A rank may have no gradients.
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
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        gradients = (local_gradient(each.grad) for each in parameters if each.grad is not None)
        local: Any = SimpleNamespace(param_groups=[{"params": stand_ins(gradients)}])
        found = super()._unscale_grads_(local, inv_scale, found_inf, allow_fp16)
        total = torch.stack([found_inf, *(each.to(found_inf.device) for each in found.values())]).amax()
        if dist.is_available() and dist.is_initialized():
            agreed = total.to(device_type_of(self.group))
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.group)
            total = agreed.to(total.device)
        return {device: total.to(device) for device in (*found, total.device)}
