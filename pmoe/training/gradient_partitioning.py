"""FSMoE's adaptive gradient partitioning (Section 5): which bytes of gradients are all-reduced when.

Dense gradients are sent during the backward pass, while dense parts and MoE layers leave the link free:

1. The first step shows the order in which gradients are made, and the seconds of each dense part.
2. `find_partition` says how many bytes are sent beside each dense part and each MoE layer. The numbers come
   from `pmoe.planner.gradient_partition`, which needs these seconds and the cost of an all-reduce.
3. `timetable_of` turns the numbers of bytes into ranges of `GradientBuffers`, the flat memory of all
   gradients.
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
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.layer import MoELayer
from pmoe.planner.costs import DegreeSeconds, GeneralizedLayer, LineCost
from pmoe.planner.degree import DEGREES
from pmoe.planner.degree_search import ScheduleOptions, simulated_degrees
from pmoe.planner.gradient_partition import Partition, partition
from pmoe.schedule.restore import Restore

# ---- the gradients' memory


@dataclass(frozen=True)
class GradientRange:
    """A range of the flat gradient memory, sent by one all-reduce.

    memory: (number of elements,), a view of a flat buffer.
    parameters: indices of the parameters that have gradients in the range.
    """

    memory: Tensor
    parameters: tuple[int, ...]


class GradientBuffers:
    """Flat memory of all gradients in the order in which backward makes them, for all-reduces of any range.

    There is one buffer for each (dtype, device).

    parameters: parameters of any shape.
    order: indices of all parameters in the order in which backward makes their gradients.
    ends: bytes of the first 0, 1, 2, ... gradients together, in the order in which they lie in the buffers.
        This is the order of backward if all gradients have one dtype and device.
    memories: the buffers, each (number of elements,).
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
        """Copies the gradient of parameter number ``at`` into the buffer, and makes ``grad`` a view of it.

        A gradient that is None counts as zeros.
        """
        parameter = self._parameters[at]
        view = self._flat[at].view_as(parameter)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view

    def part(self, begin: int, end: int) -> GradientRange:
        """Returns the range of gradients from byte ``begin`` to byte ``end`` of the buffer.

        All gradients must have one dtype and device.
        """
        (memory,) = self.memories
        item = memory.element_size()
        places = zip(self._order, pairwise(self.ends), strict=True)
        inside = tuple(at for at, (first, last) in places if first < end and last > begin)
        return GradientRange(memory[begin // item : end // item], inside)


class LayerBackward(NamedTuple):
    """Record of the moment in the first step at which the backward pass of an MoE layer began.

    layer: index of the layer.
    num_made: number of gradients that backward had made by then.
    dense_seconds: seconds of the dense part before it, since the previous MoE layer's backward pass ended; 0
        for the first layer.
    """

    layer: int
    num_made: int
    dense_seconds: float


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """The ranges of gradients to all-reduce during one backward pass of the model, and when to send them.

    The backward passes of the MoE layers are numbered i = 0, 1, 2, ... in their order.

    inside: i -> range that is sent during the backward pass of MoE layer i, beside its experts.
    beside: i -> range that is sent beside the dense part that precedes this pass.
    pieces: ranges that are sent in this order, each as soon as its gradients exist.
    end: buffers, (number of elements,), that are sent after the backward pass.

    Backward, from left to right:

        dense part 0 | MoE pass 0 | dense part 1 | MoE pass 1 | dense part 2 | after backward
                     | inside[0]  | beside[1]    | inside[1]  | beside[2]    | end

    Nothing is sent beside dense part 0, because no gradient is made before it.
    """

    inside: dict[int, GradientRange] = field(default_factory=dict)
    beside: dict[int, GradientRange] = field(default_factory=dict)
    pieces: Sequence[GradientRange] = ()
    end: Sequence[Tensor]


def timetable_of(found: Partition, buffers: GradientBuffers) -> Timetable:
    """Returns the ranges of gradients to send, from the numbers of bytes of a partition.

    All gradients must have one dtype and device. Numbers of bytes are rounded down to whole elements.

    found: number of bytes to send beside each dense part and each MoE layer, alternately.
    buffers: the flat memory of all gradients.
    """
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


PIECE_BYTES = 4 << 20
"""Bytes of gradients that share one all-reduce in `pieces_of`."""


def pieces_of(buffers: GradientBuffers) -> Timetable:
    """Returns a timetable that sends gradients in the order of the buffers, `PIECE_BYTES` at a time.

    All gradients must have one dtype and device.

    buffers: the flat memory of all gradients.
    """
    ends = [*range(PIECE_BYTES, buffers.ends[-1], PIECE_BYTES), buffers.ends[-1]]
    return Timetable(pieces=[buffers.part(begin, end) for begin, end in pairwise([0, *ends])], end=())


def find_partition(
    seen: Sequence[LayerBackward],
    last_seconds: float,
    layers: Sequence[MoELayer],
    buffers: GradientBuffers,
    ranks: Ranks,
) -> Partition:
    """Returns how many bytes of gradients to send beside each dense part and each MoE layer.

    This is FSMoE's partition (Section 5.2). FSMoE's generalized layer is a dense part and an MoE layer
    together. Here each of them is a generalized layer of its own, so that gradients of a dense part can be
    sent during the MoE layer after it.

    seen: the backward passes of MoE layers in the first step.
    last_seconds: seconds of the dense part after the last of them.
    layers: the model's MoE layers, by index.
    buffers: the flat memory of all gradients.
    ranks: the ranks over which gradients are reduced.

    Collective: costs may be measured, and all ranks take the first rank's partition.
    """
    line = all_reduce_line(ranks, buffers.memories[0])
    made_bytes = [buffers.ends[record.num_made] for record in seen]
    sizes = [end - begin for begin, end in pairwise([0, *made_bytes, buffers.ends[-1]])]
    parts = []
    for record, size in zip(seen, sizes, strict=False):
        degrees = backward_degrees(layers[record.layer])
        parts.append(_dense_part(record.dense_seconds, size))
        parts.append(GeneralizedLayer(degrees=degrees, dense_seconds=0.0, gradient_bytes=0))
    parts.append(_dense_part(last_seconds, sizes[-1]))
    return from_first(ranks, partition(parts, line), stage="sharing a partition of gradients")


def _dense_part(seconds: float, gradient_bytes: int) -> GeneralizedLayer:
    """Returns a generalized layer of FSMoE that consists of a dense part only, without an MoE layer.

    seconds: of the dense part's backward pass.
    gradient_bytes: bytes of the gradients that it makes.
    """
    nothing = (DegreeSeconds(1, 0.0, 0.0),)
    return GeneralizedLayer(degrees=nothing, dense_seconds=seconds, gradient_bytes=gradient_bytes)


def backward_degrees(layer: MoELayer) -> tuple[DegreeSeconds, ...]:
    """Returns the seconds of a layer's backward pass by pipeline degree (number of chunks).

    Each entry has the seconds with and without an all-reduce of gradients inside the pass.

    The seconds hold for the number of tokens of the layer's last call, on the rank that had most. The first
    call is collective, because costs may be measured.
    """
    rows = next(layer.experts.parameters())
    operations = operations_of(layer.grid, rows.device, rows.dtype)
    shape = memory_shape(layer.layer_modules)
    costs = layer_costs(shape, operations, layer.max_tokens, rows.device.type).backward()
    restore = layer.restore if isinstance(layer.restore, Restore) else None
    way = ScheduleOptions(
        direction="backward", one_lane=layer.switches.one_lane, restore=restore, stays=shape.stays
    )
    fixed = layer.pipeline_backward or layer.options.fixed_degree
    return simulated_degrees(costs, way, DEGREES if fixed is None else (fixed,))


def all_reduce_line(ranks: Ranks, like: Tensor) -> LineCost:
    """Returns the cost of an all-reduce, seconds = alpha + beta * bytes, of the slowest rank.

    The cost is read from the store of measurements, or measured once. Collective.

    ranks: the ranks that reduce.
    like: a tensor, of any shape, with the device and dtype of the gradients.
    """
    return operations_of(Grid.of_group(ranks), like.device, like.dtype).all_reduce.line
