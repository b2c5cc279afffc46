"""FSMoE's adaptive gradient partitioning (Section 5): which bytes of gradients are all-reduced when.

Dense gradients are all-reduced during the backward pass, at times when dense modules and experts compute and
leave the link between nodes free. A "dense part" is all modules between two MoE layers. The steps are:

1. The first training step shows the order in which gradients are made, and the seconds of each dense part.
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

from pmoe.choose.solve import operations_of, step_costs
from pmoe.choose.trials import MEASURING_SHARE
from pmoe.comm.agreement import from_first, smallest
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.layer import MoELayer
from pmoe.layer.predict_memory import predict_memory
from pmoe.planner.costs import DegreeSeconds, GeneralizedLayer, LineCost
from pmoe.planner.degree import DEGREES
from pmoe.planner.degree_search import simulated_degrees
from pmoe.planner.gradient_partition import Partition, partition
from pmoe.schedule.restore import KEEP

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
    """The memory of all gradients, laid out so that any range of it can be all-reduced.

    There is one flat buffer for each (dtype, device). In a buffer, gradients lie in the order in which
    backward makes them.

    parameters: parameters of any shape.
    order: indices of all parameters in the order in which backward makes their gradients.
    ends: ends[i] is the number of bytes of the first i gradients, so ends[0] is 0. The gradients of the first
        buffer are counted first, then those of the second buffer, and so on.
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

    def is_frozen(self, at: int) -> bool:
        """Returns whether parameter number ``at`` requires no gradient, so that backward makes none."""
        return not self._parameters[at].requires_grad

    def take(self, at: int) -> None:
        """Copies the gradient of parameter number ``at`` into the buffer, and makes ``grad`` a view of it.

        A gradient that is None counts as zeros. If the parameter requires no gradient, ``grad`` stays None:
        an optimizer would take zeros for a gradient, and go on with momentum and weight decay.
        """
        parameter = self._parameters[at]
        view = self._flat[at].view_as(parameter)
        if parameter.grad is None:
            view.zero_()
            if not parameter.requires_grad:
                return
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view

    def part(self, begin: int, end: int) -> GradientRange:
        """Returns the range of gradients from byte ``begin`` to byte ``end`` of the buffer.

        ``begin`` and ``end`` must be multiples of an element's bytes. All gradients must have one dtype and
        device, because there must be only one buffer.
        """
        (memory,) = self.memories
        item = memory.element_size()
        places = zip(self._order, pairwise(self.ends), strict=True)
        inside = tuple(at for at, (first, last) in places if first < end and last > begin)
        return GradientRange(memory[begin // item : end // item], inside)


class LayerBackward(NamedTuple):
    """A record of the moment at which the backward pass of one MoE layer began, in the first training step.

    layer: index of the layer among the model's MoE layers.
    num_made: number of dense gradients that backward had made before this moment.
    dense_seconds: seconds that backward had spent in dense modules since the backward pass of the previous
        MoE layer ended. It is 0 for the MoE layer that comes first in backward.
    """

    layer: int
    num_made: int
    dense_seconds: float


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """The ranges of gradients to all-reduce during one backward pass of the model, and when to send them.

    A dense part is all modules between two MoE layers. The backward passes of the MoE layers are numbered i =
    0, 1, 2, ... in their order.

    inside: i -> range that is sent during MoE pass i, while its experts compute.
    beside: i -> range that is sent during dense part i, the dense modules before MoE pass i. The last dense
        part comes after the last MoE pass.
    pieces: ranges that are sent in this order, each as soon as its gradients exist.
    end: tensors, (number of elements,), that are sent after the whole backward pass.

    Backward in the order of time, from left to right:

        dense part 0 | MoE pass 0 | dense part 1 | MoE pass 1 | dense part 2 | after backward
                     | inside[0]  | beside[1]    | inside[1]  | beside[2]    | end

    Nothing is sent beside dense part 0, because no gradient is made before it.
    """

    inside: dict[int, GradientRange] = field(default_factory=dict)
    beside: dict[int, GradientRange] = field(default_factory=dict)
    pieces: Sequence[GradientRange] = ()
    end: Sequence[Tensor]


def timetable_of(partition: Partition, buffers: GradientBuffers) -> Timetable:
    """Turns numbers of bytes into ranges of the gradients' memory, and says when each range is sent.

    All gradients must have one dtype and device. The ends of ranges are rounded down to whole elements.

    partition: how many bytes to send while the backward pass of each part of the model runs: of a dense
        part, then of an MoE layer, and so on. A dense part is all modules between two MoE layers.
    buffers: the flat memory of all gradients.
    """
    item = buffers.memories[0].element_size()
    inside: dict[int, GradientRange] = {}
    beside: dict[int, GradientRange] = {}
    begin = 0
    for at, share in enumerate(partition.shares):
        wanted = begin + share.dense_bytes + share.moe_bytes
        end = min(wanted // item * item, buffers.ends[-1])
        if end > begin:
            (inside if at % 2 else beside)[at // 2] = buffers.part(begin, end)
        begin = end
    rest = [buffers.part(begin, buffers.ends[-1]).memory] if begin < buffers.ends[-1] else []
    return Timetable(inside=inside, beside=beside, end=rest)


PIECE_BYTES = 4 << 20
"""Bytes of gradients that share one all-reduce in `pieces_of`."""


def pieces_of(buffers: GradientBuffers) -> Timetable:
    """Returns a `Timetable` that sends gradients in the order of the buffers, `PIECE_BYTES` at a time.

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
    """Returns how many bytes of gradients to all-reduce during each dense part and each MoE layer.

    A dense part is all modules between two MoE layers. The result is FSMoE's partition (Section 5.2), with
    one difference. FSMoE's generalized layer is a dense part and an MoE layer together. Here each dense
    part and each MoE layer is a generalized layer of its own, so that gradients of a dense part can be sent
    during the MoE layer after it.

    seen: a record of each backward pass of an MoE layer in the first training step.
    last_seconds: seconds of the dense part that backward runs after the last MoE layer.
    layers: the model's MoE layers; ``seen`` has indices into this list.
    buffers: the flat memory of all gradients.
    ranks: the ranks over which gradients are reduced.

    Collective: costs may be measured, and all ranks take the first rank's partition. A measurement needs less
    memory than the step that ends now (`measuring_bytes`).
    """
    like = buffers.memories[0]
    used = [layers[index] for index in sorted({record.layer for record in seen})]
    most_bytes = measuring_bytes(used, ranks, like.device)
    line = all_reduce_line(ranks, like, most_bytes)
    made_bytes = [buffers.ends[record.num_made] for record in seen]
    sizes = [end - begin for begin, end in pairwise([0, *made_bytes, buffers.ends[-1]])]
    parts = []
    for record, size in zip(seen, sizes, strict=False):
        degrees = backward_degrees(layers[record.layer], most_bytes)
        parts.append(_dense_part(record.dense_seconds, size))
        parts.append(GeneralizedLayer(degrees=degrees, dense_seconds=0.0, gradient_bytes=0))
    parts.append(_dense_part(last_seconds, sizes[-1]))
    return from_first(ranks, partition(parts, line), stage="sharing a partition of gradients")


def _dense_part(seconds: float, gradient_bytes: int) -> GeneralizedLayer:
    """Returns a generalized layer of FSMoE that consists of dense modules only, without an MoE layer.

    In FSMoE, a generalized layer is a dense part and an MoE layer together.

    seconds: seconds of the backward pass of these modules.
    gradient_bytes: bytes of the gradients that this backward pass makes.
    """
    nothing = (DegreeSeconds(1, 0.0, 0.0),)
    return GeneralizedLayer(degrees=nothing, dense_seconds=seconds, gradient_bytes=gradient_bytes)


def measuring_bytes(layers: Sequence[MoELayer], ranks: Ranks, device: torch.device) -> float | None:
    """Returns how many bytes may be allocated while costs are measured, the same on every rank.

    Every layer has a peak of memory in its last step. This peak is predicted from the row counts of the step.
    The result is `MEASURING_SHARE` times the smallest peak of any layer on any rank. None means that there is
    no limit: there is no layer, or the memory of a layer cannot be predicted.

    layers: MoE layers that have been called.
    ranks: the ranks over which gradients are reduced.
    device: the device of the gradients.

    Collective.
    """
    if not layers or any(layer.layer_modules.refusal("memory") is not None for layer in layers):
        return None
    own = min(_last_peak(layer) for layer in layers)
    return MEASURING_SHARE * smallest(ranks, device, own, stage="comparing the predicted memory of layers")


def _last_peak(layer: MoELayer) -> float:
    """Returns the predicted peak of memory of a layer's last step on this rank, in bytes."""
    modules = layer.layer_modules
    ran = layer.ran
    assert ran is not None
    restore = None if modules.options.memory_reuse is False else ran.restore
    memory = predict_memory(modules, ran.num_tokens, layer.row_counts, ran.forward, ran.backward, restore)
    return memory.peak


def backward_degrees(layer: MoELayer, most_bytes: float | None = None) -> tuple[DegreeSeconds, ...]:
    """Returns the predicted seconds of a layer's backward pass for each pipeline degree (number of chunks).

    Each entry has the seconds with and without an all-reduce of gradients that runs at the same time. The
    seconds are computed from the costs that ``pipeline="solve"`` uses (`pmoe.choose.solve.step_costs`), even
    if experts are a user's modules.

    The prediction is for the dtype and the restore pair (how backward gets the rows and the hidden
    activation) of the layer's last call, and for the number of tokens of the rank that had most tokens. The
    first call of this function is collective, because it may measure costs.

    layer: an MoE layer that has been called.
    most_bytes: how many bytes a measurement may allocate, the same on every rank; None if there is no limit.
    """
    modules = layer.layer_modules
    options = modules.options
    ran = layer.ran
    assert ran is not None
    parameter = next(layer.experts.parameters())
    rows_TM = parameter.new_empty((0, options.row_columns), dtype=ran.dtype)
    restore = ran.restore or KEEP
    # An expert that is a user's module computes rows of another dtype than its own only under autocast.
    with torch.autocast(rows_TM.device.type, dtype=ran.dtype, enabled=ran.dtype != parameter.dtype):
        costs = step_costs(modules, rows_TM, layer.max_tokens, restore, most_bytes)
    n = options.fixed_degree
    if n is not None:
        pairs = [(n, options.pipeline_backward or n)]
    elif options.solves:
        # Forward keeps the number of chunks that the solver took, unless both passes have the same chunks.
        allowed = modules.degree_pairs(restore)
        forward = modules.cache.counted[0]
        of_forward = [(n, m) for n, m in allowed if n == forward]
        pairs = of_forward if len(of_forward) > 1 else list(allowed)
    else:
        pairs = [(n, n) for n in DEGREES]
    return tuple(simulated_degrees(*costs.backward_pass(n, m), (m,))[0] for n, m in pairs)


def all_reduce_line(ranks: Ranks, like: Tensor, most_bytes: float | None = None) -> LineCost:
    """Returns the coefficients alpha and beta of the time of an all-reduce on the slowest rank.

        seconds = alpha + beta * bytes

    The coefficients are read from the file of earlier measurements, or measured if the file lacks them.
    Collective.

    ranks: the ranks that take part in the all-reduce.
    like: a tensor, of any shape, with the device and dtype of the gradients.
    most_bytes: how many bytes a measurement may allocate, the same on every rank; None if there is no limit.
    """
    grid = Grid.of_group(ranks)
    return operations_of(grid, like.device, like.dtype, most_bytes=most_bytes).all_reduce.line
