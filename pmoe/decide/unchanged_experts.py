"""Finds out whether the weights of experts have changed since an earlier call.

Copies of busy experts may be kept for later calls if no rank's experts have changed: in evaluation, and
between the micro-batches of one step. Most changes are seen by torch's counter of changes in place, and by
the address of the memory. Some are not, such as ``parameter.data.copy_(...)``, which optimizers use. So the
values of experts that have copies are compared too, by sums of their bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.experts.operands import local_part, value_names

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers in which the bits of an element are summed, by the bytes of the element."""

ExpertsState = tuple[object, ...]
"""What says that experts are unchanged: equal states of two calls."""


def state_of(modules: LayerModules) -> ExpertsState | None:
    """Returns the memory and the counters of changes of this rank's experts; None if they say nothing.

    They say nothing if weights are computed from other parameters in each call, or if a wrapper has taken the
    place of the experts.

    modules: the modules of the layer.
    """
    experts = modules.experts
    names = [name for name, _ in experts.named_parameters()]
    if modules.experts_module is not experts or names != value_names(experts):
        return None
    state: list[object] = []
    for parameter in experts.parameters():
        local = local_part(parameter)
        if local.is_inference() or local.element_size() not in BITS:
            return None
        state += [local.data_ptr(), local.dtype, parameter._version, local._version]
    return tuple(state)


@torch.no_grad()
def sums_of_bits(modules: LayerModules, places: Iterable[int]) -> ExpertsState:
    """Returns numbers that change if the values of some of this rank's experts change.

    For each parameter of each expert, the result has two checksums: weighted sums of the elements' bit
    patterns, read as integers. In one of them each column has its own odd weight, in the other each row, so
    that values which change places are noticed, too. The host waits for the device.

    modules: the modules of the layer.
    places: the experts, by their places among those of this rank.
    """
    sums = []
    for place in places:
        for parameter in modules.experts.parameters():
            local: Tensor = local_part(parameter).detach()[place]
            bits = local.contiguous().view(BITS[local.element_size()])
            bits = bits.reshape(bits.shape[0], -1)
            for axis in (0, 1):
                totals = bits.sum(axis, dtype=torch.int64)
                factors = torch.arange(1, 2 * totals.numel(), 2, device=totals.device)
                sums.append(int((totals * factors).sum()))
    return tuple(sums)
