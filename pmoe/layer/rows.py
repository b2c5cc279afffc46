"""Of what type and device the rows of a layer are, and whether they need gradients."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmoe.experts import Experts
from pmoe.experts.base import local_part

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def experts_parameter(layer: MoELayer) -> Tensor | None:
    """Says what type and device rows are of. The gate's come second: a router is often left in float32."""
    parameters = itertools.chain(layer.experts.parameters(), layer.gate.parameters())
    found = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
    return None if found is None else local_part(found)


def any_requires_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of the rows, None where it leaves them alone (as it does float64)."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


def cast_parameters(experts: Experts, parameters: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Parameters as autocast hands them to operators; modules meet autocast by themselves."""
    return parameters if experts.runs_under_autocast else [each.to(dtype) for each in parameters]


def of_shape(y_TM: Tensor, x: Tensor) -> Tensor:
    """The layer's output in x's shape: y_TM itself where it has it. FSDP2 warns of a module that returns a
    view, for an operation in place would drop its backward hook."""
    return y_TM if y_TM.shape == x.shape else y_TM.view(x.shape)
