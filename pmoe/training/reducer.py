"""Data-parallel gradients, all-reduced inside the backward pass (FSMoE, Section 5).

Beside the dense parts of a model an all-reduce disturbs nobody. Inside an MoE layer's backward pass it has a
place of its own on the lane between nodes, behind the last dispatch, where the lane would wait for the
experts. How many bytes travel where is `pmoe.planner.gradient_partition`'s choice; here they are gathered in
one flat buffer, in the order in which backward makes them, and sent.

The first backward pass is plain and shows that order, and how long the dense parts take; its end is where all
ranks agree on the partition.
"""

from __future__ import annotations

import bisect
import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import timeout_of
from pmoe.experts.base import is_expert
from pmoe.layer import MoELayer
from pmoe.planner.costs import LineCost, fit
from pmoe.planner.degree import DEGREES, fixed_degree
from pmoe.planner.degree_search import ScheduleOptions, simulated_degrees
from pmoe.planner.generalized_layer import GeneralizedLayer
from pmoe.planner.gradient_partition import Partition, partition
from pmoe.planner.stage_costs import DegreeSeconds
from pmoe.runners.solved import layer_costs, operations_of
from pmoe.schedule.restore import Restore

MESSAGE_BYTES = (1 << 16, 1 << 18, 1 << 20)
"""Of the all-reduces that are measured."""

REPEATS = 3


@dataclass
class _Flat:
    """All gradients of one type, in the order in which backward makes them. starts: of each parameter."""

    parameters: list[nn.Parameter]
    memory: Tensor
    starts: list[int]

    @staticmethod
    def of(parameters: list[nn.Parameter]) -> _Flat:
        starts = [0]
        for parameter in parameters:
            starts.append(starts[-1] + parameter.numel())
        like = parameters[0]
        return _Flat(parameters, torch.zeros(starts[-1], dtype=like.dtype, device=like.device), starts)

    def view(self, at: int) -> Tensor:
        parameter = self.parameters[at]
        return self.memory[self.starts[at] : self.starts[at + 1]].view_as(parameter)


@dataclass
class _Learnt:
    """What the first backward pass showed. order: indices of parameters as their gradients came. events: one
    an MoE layer's backward: the layer, how many gradients were there when it began, and how long before it
    and behind the one before the dense part took."""

    order: list[int] = field(default_factory=list)
    events: list[tuple[int, int, float]] = field(default_factory=list)


class GradientReducer:
    """All-reduces the dense gradients of ``model`` over the ranks of ``group``, inside its backward pass.

    The hook for a trainer is one call a step, in place of its own reduction of all but experts' parameters:

        reducer = pmoe.GradientReducer(model)
        ...
        loss.backward()
        reducer.finish()          # gradients are the ranks' mean, as plain all-reduces leave them
        optimizer.step()

    Experts' gradients are not its (see `pmoe.training.parallel.reduce_gradients` with experts_only).
    Backward passes whose gradients shall only add up go in ``with reducer.no_sync():``. A parameter without
    a gradient counts as zero, and gets one.

    model: its `MoELayer`s carry the gradients. group: None is the default group. average: divide by its size.
    partition: how many bytes travel where; None finds it after the first backward pass, from costs that are
    measured then (`pmoe.runners.solved.operations_of`). False never overlaps.

    After the first `finish`, ``partition`` says what was found; predicted seconds with it. Its layers are the
    dense parts and the MoE layers in turn. Where ranks make gradients in different orders, or gradients are
    of several types, it stays None and all is sent at the end.

    Raises ValueError where no parameter is dense.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        average: bool = True,
        partition: Partition | Literal[False] | None = None,
    ) -> None:
        # A group of its own: the lane between nodes sends here while another may use the given one.
        self.ranks, self.average = Ranks(_own(Ranks(group))), average
        self.layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and not is_expert(p)]
        for name, parameter in named:
            if hasattr(parameter, "to_local"):
                raise ValueError(
                    f"model ({name} is a DTensor) must have plain dense parameters: what shards them, "
                    "such as fully_shard, reduces their gradients too"
                )
        if not named:
            raise ValueError("model (without dense parameters that require gradients) has nothing to reduce")
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.partition: Partition | None = None
        if partition is not None and partition is not False and not isinstance(partition, Partition):
            raise TypeError(f"partition ({partition!r}) must be None, False or a Partition")
        self._given = partition
        self._syncs = True
        self._learnt: _Learnt | None = _Learnt()
        self._place = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        self._flats: list[_Flat] = []
        self._pieces: dict[int, list[tuple[int, int]]] = {}
        self._beside: dict[int, list[tuple[int, int]]] = {}
        self._left: list[tuple[int, int]] = []
        self._start_pass()
        held = weakref.ref(self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_Ready(held, at))
            for at, parameter in enumerate(self.parameters)
        ]
        for at, layer in enumerate(self.layers):
            layer.gradients = _LayerGradients(held, at)

    def remove(self) -> None:
        """Takes the hooks off the model: what remains is as it was before."""
        for handle in self._handles:
            handle.remove()
        for layer in self.layers:
            layer.gradients = None
            layer.t_gar = 0.0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block add to the gradients and send nothing."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def finish(self) -> None:
        """After backward: sends what is left, and waits for all. Every rank must call it."""
        if self._learnt is not None:
            self._finish_first()
        else:
            self._check_all_ready()
            self._send(self._left)
            for work in self._works:
                work.wait()
        if self.average:
            for flat in self._flats:
                flat.memory.div_(self.ranks.size)
        self._start_pass()

    # ---- one backward pass

    def _start_pass(self) -> None:
        self._works: list[dist.Work] = []
        self._ready = [False] * len(self.parameters)
        self._num_ready = 0
        self._event = 0
        self._dense_since: float | None = None

    def _became_ready(self, at: int) -> None:
        if not self._syncs:
            return
        if self._learnt is not None:
            if at not in self._learnt.order:
                self._learnt.order.append(at)
            return
        self._take(at)
        self._ready[at] = True

    def _take(self, at: int) -> None:
        """The gradient, into its place in the flat buffer."""
        parameter, (flat, index) = self.parameters[at], self._home[at]
        view = flat.view(index)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view

    def layer_begins(self, at: int) -> None:
        """An MoE layer's backward pass begins."""
        if not self._syncs:
            return
        if self._learnt is not None:
            waited = 0.0 if self._dense_since is None else self._now() - self._dense_since
            self._learnt.events.append((at, len(self._learnt.order), waited))
            return
        self._check_ready(self._pieces.get(self._event, ()))

    def inside_layer(self) -> dist.Work | None:
        """The task of the layer's schedule: pieces that hide beside its experts."""
        if not self._syncs or self._learnt is not None:
            return None
        works = [self._all_reduce(begin, end) for begin, end in self._pieces.get(self._event, ())]
        for work in works[:-1]:
            work.wait()
        return works[-1] if works else None

    def layer_ends(self) -> None:
        """Its backward pass has ended: pieces that hide beside the dense part that follows."""
        if not self._syncs:
            return
        if self._learnt is not None:
            self._dense_since = self._now()
            return
        self._event += 1
        pieces = self._beside.get(self._event, ())
        self._check_ready(pieces)
        self._send(pieces)

    def _send(self, pieces: Sequence[tuple[int, int]]) -> None:
        if self.ranks.group is None:
            return  # one rank alone
        self._works += [self._all_reduce(begin, end) for begin, end in pieces]

    def _all_reduce(self, begin: int, end: int) -> dist.Work:
        """Starts it for bytes of the flat buffers, all of one buffer."""
        flat, start, stop = self._range(begin, end)
        work: dist.Work = dist.all_reduce(flat.memory[start:stop], group=self.ranks.group, async_op=True)
        return work

    def _range(self, begin: int, end: int) -> tuple[_Flat, int, int]:
        first = 0
        for flat in self._flats:
            size = flat.memory.nbytes
            if begin < first + size:
                item = flat.memory.element_size()
                return flat, (begin - first) // item, (end - first) // item
            first += size
        raise AssertionError((begin, end))

    def _check_ready(self, pieces: Sequence[tuple[int, int]]) -> None:
        missing = self._unready(pieces)
        if missing is not None:
            raise RuntimeError(
                f"pmoe: the gradient of {self.names[missing]} is not there when it should travel: a model "
                "whose backward pass changes from step to step needs GradientReducer(partition=False)"
            )

    def _unready(self, pieces: Sequence[tuple[int, int]]) -> int | None:
        """A parameter that pieces need and that has no gradient yet."""
        for begin, end in pieces:
            first = bisect.bisect_right(self._ends, begin)
            for at in range(first, len(self._order)):
                if (self._ends[at - 1] if at else 0) >= end:
                    break
                if not self._ready[self._order[at]]:
                    return self._order[at]
        return None

    def _check_all_ready(self) -> None:
        for at, ready in enumerate(self._ready):
            if not ready:
                self._take(at)

    # ---- the first pass

    def _now(self) -> float:
        device = self.parameters[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _finish_first(self) -> None:
        learnt = self._learnt
        assert learnt is not None
        tail = 0.0 if self._dense_since is None else self._now() - self._dense_since
        seen = set(learnt.order)
        order = learnt.order + [at for at in range(len(self.parameters)) if at not in seen]
        self._lay_out(order)
        for at in range(len(self.parameters)):
            self._take(at)
        self._left = self._in_buffers(0, self._ends[-1])
        self._send(self._left)
        for work in self._works:
            work.wait()
        self._works = []
        if self._agrees(learnt, order):
            self._plan(learnt, tail)
        self._learnt = None

    def _lay_out(self, order: list[int]) -> None:
        """One buffer a type, the parameters of each in the order of backward."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at in order:
            parameter = self.parameters[at]
            kinds.setdefault((parameter.dtype, parameter.device), []).append(at)
        self._order = [at for places in kinds.values() for at in places]
        self._flats, self._home, self._ends, end = [], {}, [], 0
        for places in kinds.values():
            flat = _Flat.of([self.parameters[at] for at in places])
            self._flats.append(flat)
            for index, at in enumerate(places):
                self._home[at] = (flat, index)
                end += self.parameters[at].numel() * self.parameters[at].element_size()
                self._ends.append(end)

    def _agrees(self, learnt: _Learnt, order: list[int]) -> bool:
        """Whether every rank saw the same, so that pieces may be sent before the end. Collective."""
        if self._given is False or not learnt.events or len(self._flats) > 1 or self.ranks.size == 1:
            return False
        told: list[Any] = [None] * self.ranks.size
        mine = (order, [(layer, ready) for layer, ready, _ in learnt.events])
        dist.all_gather_object(told, mine, group=self.ranks.group)
        return all(each == mine for each in told)

    def _plan(self, learnt: _Learnt, tail: float) -> None:
        """The partition, and what it means in bytes of the buffer."""
        given = self._given
        places = 2 * len(learnt.events) + 1
        if isinstance(given, Partition) and len(given.shares) != places:
            raise ValueError(
                f"partition (of {len(given.shares)} layers) must have {places}: the dense parts and the "
                f"{len(learnt.events)} MoE layers in turn"
            )
        self.partition = given if isinstance(given, Partition) else self._found(learnt, tail)
        for share, (layer, _, _) in zip(self.partition.shares[1::2], learnt.events, strict=True):
            self.layers[layer].t_gar = share.t_gar
        position = 0
        for at, share in enumerate(self.partition.shares):
            end = min(self._whole(position + share.dense_bytes + share.moe_bytes), self._ends[-1])
            if end > position:
                rooms = self._pieces if at % 2 else self._beside
                rooms[at // 2] = self._in_buffers(position, end)
            position = end
        self._left = self._in_buffers(position, self._ends[-1])

    def _whole(self, num_bytes: int) -> int:
        item = self._flats[0].memory.element_size()
        return num_bytes // item * item

    def _in_buffers(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The range, cut where one buffer ends and the next begins."""
        pieces, first = [], 0
        for flat in self._flats:
            last = first + flat.memory.nbytes
            if max(begin, first) < min(end, last):
                pieces.append((max(begin, first), min(end, last)))
            first = last
        return pieces

    def _found(self, learnt: _Learnt, tail: float) -> Partition:
        """Dense parts and MoE layers in turn, as generalized layers of their own: what a dense part makes may
        travel in the MoE layer that follows. Collective: costs are measured, and the first rank's partition
        is what all take."""
        line = measure_all_reduce(self.ranks, self._flats[0].memory)
        made = [0, *(self._ends[count - 1] if count else 0 for _, count, _ in learnt.events), self._ends[-1]]
        layers = []
        for at, (layer, _, seconds) in enumerate(learnt.events):
            layers.append(_dense_part(seconds, made[at + 1] - made[at]))
            degrees = backward_degrees(self.layers[layer])
            layers.append(GeneralizedLayer(degrees=degrees, dense_seconds=0.0, gradient_bytes=0))
        layers.append(_dense_part(tail, made[-1] - made[-2]))
        told: list[Any] = [partition(layers, line)]
        if self.ranks.size > 1:
            source = 0 if self.ranks.group is None else dist.get_global_rank(self.ranks.group, 0)
            dist.broadcast_object_list(told, src=source, group=self.ranks.group)
        found: Partition = told[0]
        return found


def _dense_part(seconds: float, gradient_bytes: int) -> GeneralizedLayer:
    nothing = (DegreeSeconds(1, 0.0, 0.0),)
    return GeneralizedLayer(degrees=nothing, dense_seconds=seconds, gradient_bytes=gradient_bytes)


@dataclass(frozen=True)
class _Ready:
    """Called by autograd when a parameter's gradient has been added up."""

    reducer: weakref.ref[GradientReducer]
    at: int

    def __call__(self, parameter: Tensor) -> None:
        reducer = self.reducer()
        if reducer is not None:
            reducer._became_ready(self.at)


@dataclass(frozen=True)
class _LayerGradients:
    """What a layer's passes call (`pmoe.engine.plan.Gradients`)."""

    reducer: weakref.ref[GradientReducer]
    at: int

    def begins(self) -> None:
        reducer = self.reducer()
        if reducer is not None:
            reducer.layer_begins(self.at)

    def inside(self) -> dist.Work | None:
        reducer = self.reducer()
        return None if reducer is None else reducer.inside_layer()

    def ends(self) -> None:
        reducer = self.reducer()
        if reducer is not None:
            reducer.layer_ends()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the model is nobody's to reduce."""


def _own(ranks: Ranks) -> dist.ProcessGroup | None:
    """Another group of the same ranks, backend and timeout. Collective among them."""
    if ranks.group is None:
        return None
    options: dict[str, Any] = {"backend": dist.get_backend(ranks.group), "timeout": timeout_of(ranks.group)}
    if ranks.size < dist.get_world_size():
        options["use_local_synchronization"] = True
    made = dist.new_group(dist.get_process_group_ranks(ranks.group), **options)
    assert isinstance(made, dist.ProcessGroup)
    return made


def backward_degrees(layer: MoELayer) -> tuple[DegreeSeconds, ...]:
    """Seconds of a layer's backward pass by degree, with and without gradients in it, for as many tokens as
    its last batch had. Collective the first time."""
    rows = next(layer.experts.parameters())
    operations = operations_of(layer.grid, rows.device, rows.dtype)
    costs = layer_costs(layer.memory_shape(), operations, layer.max_tokens).backward()
    restore = layer.restore if isinstance(layer.restore, Restore) and layer.rotates else None
    way = ScheduleOptions(direction="backward", one_lane=layer.one_lane, restore=restore)
    fixed = layer.pipeline_backward or fixed_degree(layer.pipeline)
    return simulated_degrees(costs, way, DEGREES if fixed is None else (fixed,))


def measure_all_reduce(ranks: Ranks, like: Tensor) -> LineCost:
    """Seconds of an all-reduce by bytes: the slowest rank's. Collective."""
    if ranks.size == 1:
        return LineCost(0.0, 0.0)
    seconds: list[float] = []
    for num_bytes in MESSAGE_BYTES:
        message = like.new_zeros(max(num_bytes // like.element_size(), 1))
        taken = []
        for _ in range(REPEATS + 1):
            dist.barrier(group=ranks.group)
            start = time.perf_counter()
            dist.all_reduce(message, group=ranks.group)
            if like.is_cuda:
                torch.cuda.synchronize(like.device)
            taken.append(time.perf_counter() - start)
        seconds.append(sorted(taken[1:])[REPEATS // 2])
    slowest = torch.tensor(seconds, dtype=torch.float64, device=like.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=ranks.group)
    return fit(zip(MESSAGE_BYTES, slowest.tolist(), strict=True)).line
