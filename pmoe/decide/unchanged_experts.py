"""Finds out whether the weights of experts have changed since an earlier call.

Copies of busy experts can be used again in later calls while no rank's experts change: in evaluation, and
between the micro-batches of one step. Two numbers show most changes: torch's count of the in-place changes of
a tensor, and the tensor's address in memory. They do not show a change such as
``parameter.data.copy_(...)``, which optimizers use. So checksums of the values are also compared, for experts
that have copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.comm.agreement import digest
from pmoe.experts.architecture import architecture_of
from pmoe.experts.base import Experts
from pmoe.experts.copied_modules import values_of
from pmoe.experts.operands import local_part, value_names
from pmoe.planner.copy_rows import GOLDEN

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""{bytes of an element: the integer type in which its bits are read for a checksum}.

An element of 8 bytes is read as two integers of 4 bytes. If it were read as one integer, the changes of two
signs could cancel each other: each changes the sum by 2**63, and the sum is an int64 that wraps around.
"""

ExpertsState = tuple[object, ...]
"""A record of the experts of a rank. If two calls have equal records, the experts are unchanged."""


def state_of(modules: LayerModules) -> ExpertsState | None:
    """Returns a record of this rank's experts. Later calls compare it to find out about changes.

    The record has the address of each parameter, torch's count of the parameter's in-place changes, and the
    setting of the experts, such as the adapter in use. If experts are a user's modules, it also has their
    architecture, and addresses and counts of their buffers.

    The result is None if changes cannot be noticed: weights are computed from other parameters in each call,
    or a wrapper computes other experts.

    modules: the modules of the layer.
    """
    experts = modules.experts
    names = [name for name, _ in experts.named_parameters()]
    if modules.experts_module is not experts or names != value_names(experts):
        return None
    state: list[object] = [experts.setting, experts.factor]
    values: Iterable[Tensor] = experts.parameters()
    if experts.are_modules:
        state.append(digest(architecture_of(experts.as_modules()[0])))
        values = itertools.chain(values, experts.buffers())
    for parameter in values:
        local = local_part(parameter)
        if local.is_inference() or local.element_size() not in BITS:
            return None
        state += [local.data_ptr(), local.dtype, parameter._version, local._version]
    return tuple(state)


@torch.no_grad()
def sums_of_bits(modules: LayerModules, places: Iterable[int]) -> ExpertsState:
    """Returns checksums of the values of some of this rank's experts. The host waits for the device.

    Each parameter of each expert has two checksums. Both are weighted sums of its elements, whose bits are
    read as integers. In one checksum the weight depends on the element's column, in the other on its row. So
    the checksums also change if two elements change places. Parameters that all experts share have no
    checksums, because they are not copied.

    modules: the modules of the layer.
    places: the experts, by their index among those of this rank.
    """
    sums = []
    for place in places:
        for value in _values_of(modules.experts, place):
            rows = value.reshape(value.shape[0] if value.ndim else 1, -1)
            bits = rows.contiguous().view(BITS[value.element_size()])
            for axis in (0, 1):
                totals = bits.sum(axis, dtype=torch.int64)
                spread = torch.arange(1, totals.numel() + 1, device=totals.device) * GOLDEN % 2**32
                factors = (spread ^ spread >> 15) * GOLDEN % 2**32 | 1
                sums.append(int((totals * factors).sum()))
    return tuple(sums)


def _values_of(experts: Experts, place: int) -> list[Tensor]:
    """Returns those tensors of one expert that are copied if the expert gets a copy on another rank.

    The tensors may have any shape. Parameters that all experts share are left out, because they are not
    copied.

    experts: the experts of this rank.
    place: the expert's index among them.
    """
    if experts.are_modules:
        return [value.detach() for value in values_of(experts.as_modules()[place])]
    own = (parameter for name, parameter in experts.named_parameters() if name not in experts.replicated_dims)
    return [local_part(parameter).detach()[place] for parameter in own]
