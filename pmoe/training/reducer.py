"""Data-parallel gradients all-reduced inside backward: FSMoE's adaptive gradient partitioning (Section 5).

Beside the dense parts of a model an all-reduce disturbs nobody. Inside an MoE layer's backward pass it has a
place of its own on the lane between nodes, behind the last dispatch, where the lane would wait for the
experts. How many bytes travel where is `pmoe.planner.gradient_partition`'s choice: the first step is plain,
and at its end all ranks agree on the partition (`pmoe.training.gradient_partitioning`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import check_flag, check_module
from pmoe.comm.agreement import gathered
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import options_like
from pmoe.experts.base import is_expert
from pmoe.layer import MoELayer
from pmoe.measure.rounds import clock_of
from pmoe.planner.gradient_partition import Partition
from pmoe.training.gradient_partitioning import (
    GradientBuffers,
    GradientRange,
    LayerBackward,
    Timetable,
    find_partition,
    timetable_of,
)


class GradientReducer:
    """All-reduces the dense gradients of ``model`` over the ranks of ``group``, inside its backward pass.

    The hook for a trainer is one call a step, in place of its own reduction of all but experts' parameters:

        reducer = pmoe.GradientReducer(model)
        ...
        loss.backward()
        reducer.finish()          # gradients are the ranks' mean, as plain all-reduces leave them
        optimizer.step()

    Experts' gradients are not its (see `pmoe.training.parallel.reduce_gradients` with experts_only). Backward
    passes whose gradients shall only add up go in ``with reducer.no_sync():``. A parameter without a gradient
    counts as zero, and gets one.

    Args:
        model: its `MoELayer` modules carry the gradients.
        group: None is the default group.
        average: divide by its size.
        partition: how many bytes travel where, in the dense parts and the MoE layers in turn; None finds it
            after the first step, from costs that are measured then. False never overlaps.

    After the first `finish`, ``partition`` says what was found, with predicted seconds. Where ranks make
    gradients in different orders, or gradients are of several types, it stays None and all is sent at the
    end.

    Raises ValueError where no parameter is dense, or one is a DTensor; TypeError for another partition.
    """

    average: bool
    ranks: Ranks
    layers: list[MoELayer]
    names: list[str]
    parameters: list[nn.Parameter]

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        average: bool = True,
        partition: Partition | Literal[False] | None = None,
    ) -> None:
        check_module(model=model)
        check_flag("average", average)
        ranks, self.average = Ranks(group), average
        # A group of its own: the lane between nodes sends here while another may use the given one.
        own = None if ranks.group is None else dist.new_group(ranks.members, **options_like(ranks.group))
        self.ranks = Ranks(own)
        self.layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self.names, self.parameters = _dense_parameters(model)
        if partition is not None and partition is not False and not isinstance(partition, Partition):
            raise TypeError(f"partition ({partition!r}) must be None, False or a Partition")
        self.partition: Partition | None = None
        self._wanted = partition
        self._syncs = True
        self._new_step: Callable[[], FirstStep | PartitionedStep]
        self._new_step = partial(FirstStep, self.parameters[0].device)
        self._step: FirstStep | PartitionedStep = self._new_step()
        current = partial(_step_of, weakref.ref(self))
        self._handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, at=at: current().gradient_is_ready(at))
            for at, parameter in enumerate(self.parameters)
        ]
        self._carried = [LayerGradients(current, at) for at in range(len(self.layers))]
        for layer, carried in zip(self.layers, self._carried, strict=True):
            layer.gradients = carried

    def remove(self) -> None:
        """Takes the hooks off the model: what remains is as it was before."""
        for handle in self._handles:
            handle.remove()
        for layer in self.layers:
            layer.gradients = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block add to the gradients and send nothing."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def finish(self) -> None:
        """After backward: sends what is left, and waits for all. Every rank must call it.

        The first time it also finds the partition: ValueError where a given one is of another model.
        """
        step = self._step
        buffers = self._finish_first(step) if isinstance(step, FirstStep) else step.finish()
        if self.average:
            for memory in buffers.memories:
                memory.div_(self.ranks.size)
        self._step = self._new_step()

    def _finish_first(self, seen: FirstStep) -> GradientBuffers:
        seen.end(len(self.parameters))
        buffers = GradientBuffers(self.parameters, seen.order)
        timetable = Timetable(end=buffers.memories)
        PartitionedStep(buffers, timetable, self.ranks, self.names).finish()
        if self._may_overlap(seen, buffers):
            timetable = self._timetable(seen, buffers)
        self._new_step = partial(PartitionedStep, buffers, timetable, self.ranks, self.names)
        return buffers

    def _may_overlap(self, seen: FirstStep, buffers: GradientBuffers) -> bool:
        """Whether every rank saw the same, so that gradients may be sent before the end. Collective."""
        if self._wanted is False or not seen.layers or len(buffers.memories) > 1 or self.ranks.size == 1:
            return False
        mine = (seen.order, [(each.layer, each.num_made) for each in seen.layers])
        return all(each == mine for each in gathered(self.ranks, mine, stage="comparing gradients"))

    def _timetable(self, seen: FirstStep, buffers: GradientBuffers) -> Timetable:
        """Of the given partition, or of the one that is found. Collective."""
        if isinstance(self._wanted, Partition):
            _check_partition(self._wanted, len(seen.layers))
            self.partition = self._wanted
        else:
            self.partition = find_partition(seen.layers, seen.last_seconds, self.layers, buffers, self.ranks)
        for share, (at, *_) in zip(self.partition.shares[1::2], seen.layers, strict=True):
            self._carried[at].t_gar = share.t_gar
        return timetable_of(self.partition, buffers)


def _dense_parameters(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Names and parameters. Raises ValueError where there is none, or one is a DTensor."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and not is_expert(p)}
    for name, parameter in named.items():
        if hasattr(parameter, "to_local"):
            raise ValueError(
                f"model ({name} is a DTensor) must have plain dense parameters: what shards them, "
                "such as fully_shard, reduces their gradients too"
            )
    if not named:
        raise ValueError("model (without dense parameters that require gradients) has nothing to reduce")
    return list(named), list(named.values())


def _check_partition(partition: Partition, num_layers: int) -> None:
    num_parts = 2 * num_layers + 1
    if len(partition.shares) != num_parts:
        raise ValueError(
            f"partition (of {len(partition.shares)} layers) must have {num_parts}: the dense parts and the "
            f"{num_layers} MoE layers in turn"
        )
    first = partition.shares[0]
    if first.dense_bytes or first.moe_bytes:
        raise ValueError(
            f"partition ({first.dense_bytes + first.moe_bytes} bytes in the first dense part) must leave it "
            "empty: no gradient is there before it"
        )


class BackwardStep:
    """What hooks call in the order of backward. This one does nothing."""

    def gradient_is_ready(self, at: int) -> None:
        """The gradient of parameter ``at`` has been added up."""

    def layer_begins(self, layer: int) -> None:
        """The backward pass of an MoE layer begins."""

    def inside_layer(self) -> dist.Work | None:
        """The task of the layer's schedule that carries gradients."""
        return None

    def layer_ends(self) -> None:
        """The backward pass of an MoE layer has ended, and a dense part follows."""


def _step_of(reducer: weakref.ref[GradientReducer]) -> BackwardStep:
    """The step under way; one that does nothing where gradients are not reduced now, or nobody does it."""
    found = reducer()
    return BackwardStep() if found is None or not found._syncs else found._step


@dataclass(eq=False)
class LayerGradients:
    """Called by a layer's backward pass, see `pmoe.engine.plan.Modules`. at: the layer's index."""

    step: Callable[[], BackwardStep]
    at: int
    t_gar: float = 0.0

    def begins(self) -> None:
        self.step().layer_begins(self.at)

    def inside(self) -> dist.Work | None:
        return self.step().inside_layer()

    def ends(self) -> None:
        self.step().layer_ends()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the model is nobody's to reduce."""


class FirstStep(BackwardStep):
    """Sends nothing inside backward: shows the order of gradients, and how long the dense parts take.

    order: indices of parameters as their gradients came; those without any come last. layers: every backward
    pass of an MoE layer. last_seconds: of the dense part after the last one.
    """

    last_seconds: float
    order: list[int]

    def __init__(self, device: torch.device) -> None:
        self._now = clock_of(device)
        self._came: dict[int, None] = {}
        self._dense_since: float | None = None
        self.layers: list[LayerBackward] = []

    def gradient_is_ready(self, at: int) -> None:
        self._came.setdefault(at)

    def layer_begins(self, layer: int) -> None:
        self.layers.append(LayerBackward(layer, len(self._came), self._dense_seconds()))

    def layer_ends(self) -> None:
        self._dense_since = self._now()

    def end(self, num_parameters: int) -> None:
        """After backward."""
        self.last_seconds = self._dense_seconds()
        self.order = list(dict.fromkeys([*self._came, *range(num_parameters)]))

    def _dense_seconds(self) -> float:
        return 0.0 if self._dense_since is None else self._now() - self._dense_since


class PartitionedStep(BackwardStep):
    """Sends gradients inside backward, as a timetable says. names: of the parameters, for errors.

    Raises RuntimeError where a gradient is not there when it should travel.
    """

    def __init__(
        self, buffers: GradientBuffers, timetable: Timetable, ranks: Ranks, names: Sequence[str]
    ) -> None:
        self._buffers, self._timetable, self._ranks, self._names = buffers, timetable, ranks, names
        self._works: list[dist.Work] = []
        self._ready: set[int] = set()
        self._num_layers = 0

    def gradient_is_ready(self, at: int) -> None:
        self._buffers.take(at)
        self._ready.add(at)

    def layer_begins(self, layer: int) -> None:
        self._check_ready(self._timetable.inside.get(self._num_layers))

    def inside_layer(self) -> dist.Work | None:
        part = self._timetable.inside.get(self._num_layers)
        return None if part is None else self._all_reduce(part.memory)

    def layer_ends(self) -> None:
        self._num_layers += 1
        part = self._timetable.beside.get(self._num_layers)
        self._check_ready(part)
        if part is not None:
            self._works.append(self._all_reduce(part.memory))

    def finish(self) -> GradientBuffers:
        """After backward: sends what is left, waits for all, and returns where the sums are."""
        for at in range(len(self._names)):
            if at not in self._ready:
                self._buffers.take(at)
        if self._ranks.group is not None:
            self._works += [self._all_reduce(each) for each in self._timetable.end]
        for work in self._works:
            work.wait()
        return self._buffers

    def _all_reduce(self, memory: Tensor) -> dist.Work:
        work: dist.Work = dist.all_reduce(memory, group=self._ranks.group, async_op=True)
        return work

    def _check_ready(self, part: GradientRange | None) -> None:
        for at in () if part is None else part.parameters:
            if at not in self._ready:
                raise RuntimeError(
                    f"pmoe: the gradient of {self._names[at]} is not there when it should travel: a model "
                    "whose backward pass changes from step to step needs GradientReducer(partition=False)"
                )
