"""FSMoE's adaptive gradient partitioning at work (Section 5): which gradients travel when.

A partition says how many bytes travel beside each dense part and each MoE layer; `timetable_of` makes ranges
of memory of it. It is found from what a first step showed: the order of gradients, seconds of the dense
parts, and what an all-reduce costs. `pmoe.planner.gradient_partition` solves, with numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmoe.call.sizes import memory_shape
from pmoe.choose.solve import layer_costs, operations_of
from pmoe.comm.agreement import from_first
from pmoe.comm.ranks import Grid, Ranks
from pmoe.layer import MoELayer
from pmoe.planner.costs import DegreeSeconds, GeneralizedLayer, LineCost
from pmoe.planner.degree import DEGREES
from pmoe.planner.degree_search import ScheduleOptions, simulated_degrees
from pmoe.planner.gradient_partition import Partition, partition
from pmoe.schedule.restore import Restore

# ---- the gradients' memory


@dataclass(frozen=True)
class GradientRange:
    """What one all-reduce sends.

    memory: (bytes / element size,), a view of a buffer. parameters: indices of those with gradients in it.
    """

    memory: Tensor
    parameters: tuple[int, ...]


class GradientBuffers:
    """The flat memory of the gradients of ``parameters``.

    order: indices of all parameters, in the order of backward. ends: bytes of the first 0, 1, ... gradients;
    in the order of backward where all are of one type.
    """

    ends: list[int]

    def __init__(self, parameters: Sequence[nn.Parameter], order: Sequence[int]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at in order:
            kinds.setdefault((parameters[at].dtype, parameters[at].device), []).append(at)
        self._parameters = parameters
        self._order = [at for places in kinds.values() for at in places]
        self.ends = list(accumulate((parameters[at].nbytes for at in self._order), initial=0))
        self._flat: dict[int, Tensor] = {}
        self.memories: list[Tensor] = []
        for (dtype, device), places in kinds.items():
            sizes = [parameters[at].numel() for at in places]
            memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self._flat |= zip(places, memory.split(sizes), strict=True)
            self.memories.append(memory)

    def take(self, at: int) -> None:
        """Moves a parameter's gradient into its place, and makes it a view of it. None counts as zeros."""
        parameter = self._parameters[at]
        view = self._flat[at].view_as(parameter)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view

    def part(self, begin: int, end: int) -> GradientRange:
        """The bytes from ``begin`` to ``end``. All gradients are of one type."""
        (memory,) = self.memories
        item, places = memory.element_size(), zip(self._order, pairwise(self.ends), strict=True)
        inside = tuple(at for at, (first, last) in places if first < end and last > begin)
        return GradientRange(memory[begin // item : end // item], inside)


class LayerBackward(NamedTuple):
    """When an MoE layer's backward pass began.

    layer: its index. num_made: how many gradients were there. dense_seconds: of the dense part before it,
    since the end of the MoE layer's before; 0 for the first.
    """

    layer: int
    num_made: int
    dense_seconds: float


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """What is sent when in a backward pass. MoE layers' passes have the numbers 0, 1, ... in their order.

    inside: i -> beside the experts of pass i. beside: i -> beside the dense part behind pass i - 1.
    end: memory of gradients that are sent after backward.
    """

    inside: dict[int, GradientRange] = field(default_factory=dict)
    beside: dict[int, GradientRange] = field(default_factory=dict)
    end: Sequence[Tensor]


def timetable_of(found: Partition, buffers: GradientBuffers) -> Timetable:
    """The partition's bytes as ranges of memory, in whole elements. All gradients are of one type."""
    item = buffers.memories[0].element_size()
    inside: dict[int, GradientRange] = {}
    beside: dict[int, GradientRange] = {}
    begin = 0
    for at, share in enumerate(found.shares):
        wanted = begin + share.dense_bytes + share.moe_bytes
        end = min(wanted // item * item, buffers.ends[-1])
        if end > begin:
            (inside if at % 2 else beside)[at // 2] = buffers.part(begin, end)
        begin = end
    left = [buffers.part(begin, buffers.ends[-1]).memory] if begin < buffers.ends[-1] else []
    return Timetable(inside=inside, beside=beside, end=left)


def find_partition(
    seen: Sequence[LayerBackward],
    last_seconds: float,
    layers: Sequence[MoELayer],
    buffers: GradientBuffers,
    ranks: Ranks,
) -> Partition:
    """Dense parts and MoE layers in turn, as generalized layers of their own (Section 5.2).

    What a dense part makes may travel in the MoE layer that follows. last_seconds: of the last dense part.
    Collective: costs may be measured, and all ranks take the first rank's partition.
    """
    line = all_reduce_line(ranks, buffers.memories[0])
    made = [buffers.ends[each.num_made] for each in seen]
    sizes = [end - begin for begin, end in pairwise([0, *made, buffers.ends[-1]])]
    parts = []
    for each, size in zip(seen, sizes, strict=False):
        degrees = backward_degrees(layers[each.layer])
        parts.append(_dense_part(each.dense_seconds, size))
        parts.append(GeneralizedLayer(degrees=degrees, dense_seconds=0.0, gradient_bytes=0))
    parts.append(_dense_part(last_seconds, sizes[-1]))
    return from_first(ranks, partition(parts, line), stage="sharing a partition of gradients")


def _dense_part(seconds: float, gradient_bytes: int) -> GeneralizedLayer:
    nothing = (DegreeSeconds(1, 0.0, 0.0),)
    return GeneralizedLayer(degrees=nothing, dense_seconds=seconds, gradient_bytes=gradient_bytes)


def backward_degrees(layer: MoELayer) -> tuple[DegreeSeconds, ...]:
    """Seconds of a layer's backward pass by degree, with and without gradients in it.

    For as many tokens as its last batch had. Collective the first time.
    """
    rows = next(layer.experts.parameters())
    operations = operations_of(layer.grid, rows.device, rows.dtype)
    shape = memory_shape(layer.parts)
    costs = layer_costs(shape, operations, layer.max_tokens, rows.device.type).backward()
    restore = layer.restore if isinstance(layer.restore, Restore) else None
    way = ScheduleOptions(
        direction="backward", one_lane=layer.switches.one_lane, restore=restore, stays=shape.stays
    )
    fixed = layer.pipeline_backward or layer.spec.fixed_degree
    return simulated_degrees(costs, way, DEGREES if fixed is None else (fixed,))


def all_reduce_line(ranks: Ranks, like: Tensor) -> LineCost:
    """Seconds of an all-reduce by bytes, of the slowest rank: stored, or measured once with FSMoE's other
    lines. like: any tensor of that type. Collective."""
    return operations_of(Grid.of_group(ranks), like.device, like.dtype).all_reduce.line
