"""Data-parallel all-reduce of dense gradients during backward: FSMoE's gradient partitioning (Section 5).

Gradients are sent at two kinds of moments in the backward pass, when the link between nodes is idle:

- beside the dense parts of a model (the modules between MoE layers), where no all-to-all runs;
- inside an MoE layer's backward pass, after its last dispatch, while the layer's experts compute.

`pmoe.planner.gradient_partition` chooses how many bytes are sent at each of these moments. The first training
step sends everything after backward. At its end all ranks agree on the partition
(`pmoe.training.gradient_partitioning`), which is used from the second step on.

If the layers are in a graph of ``torch.compile(model, backend="pmoe")``, these moments do not exist. The
graph's plan then says when each gradient is complete (`pmoe.graph.reductions`). Gradients are sent in ranges
of fixed size, each as soon as it is complete.
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
from pmoe.comm.failures import at_stage, publishing_failures, wait_for
from pmoe.comm.group_options import options_like
from pmoe.comm.ranks import Ranks
from pmoe.experts.base import mark_all
from pmoe.experts.marks import is_expert
from pmoe.layer import MoELayer
from pmoe.measure.timing import clock_of
from pmoe.planner.gradient_partition import Partition
from pmoe.training.gradient_partitioning import (
    GradientBuffers,
    GradientRange,
    LayerBackward,
    Timetable,
    find_partition,
    pieces_of,
    timetable_of,
)
from pmoe.warn import warn_once

FINISH = "GradientReducer.finish"
"""Words for what a rank does in that method, for errors of the other ranks."""


class GradientReducer:
    """All-reduces the dense gradients of ``model`` over the ranks of ``group``, during its backward pass.

    A trainer makes one call a step, in place of its own reduction of dense gradients:

        reducer = pmoe.GradientReducer(model)
        ...
        loss.backward()
        reducer.finish()          # gradients are now the mean over ranks, as after plain all-reduces
        optimizer.step()

    Gradients of experts are not reduced: use `pmoe.training.parallel.reduce_gradients` with
    experts_only=True. For gradient accumulation, run all backward passes but the last in ``with
    reducer.no_sync():``; a backward pass that adds to a gradient after it was sent raises RuntimeError. If a
    parameter's ``grad`` is None on this rank, it counts as zeros in the sum; ``grad`` becomes the sum. It
    stays None if the parameter no longer requires a gradient.

    Args:
        model: its parameters may have any shape. Gradients are sent during the backward passes of its
            `MoELayer` modules.
        group: the ranks to reduce over. None is the default group.
        average: True divides the sums by the number of ranks, so that gradients become means; False does not.
        partition: how many bytes are sent during each part of backward: a dense part (the modules between two
            MoE layers), then an MoE layer, and so on. None finds a partition after the first step, from costs
            that are measured then. False sends everything after backward.

    After the first `finish`, the attribute ``partition`` is the partition in use, with predicted seconds. In
    two cases the attribute stays None:

    - Ranks make gradients in different orders, or gradients have several dtypes. Everything is then sent
      after backward.
    - The layers are in a graph of ``torch.compile(model, backend="pmoe")``. The plan of the graph then says
      when gradients are sent, and a ``partition`` of the caller is ignored with a warning.

    Raises ValueError if the model has no dense parameter, or has a dense parameter that is a DTensor. Raises
    TypeError if ``partition`` is not a `Partition`, None or False.
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
        ranks = Ranks(group)
        self.average = average
        # A group of its own: its all-reduces run while other code may use the given group, and collectives of
        # one group must start in the same order on all ranks.
        own = None if ranks.group is None else dist.new_group(ranks.members, **options_like(ranks.group))
        self.ranks = Ranks(own)
        self.layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self.names, self.parameters = _dense_parameters(model)
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
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
        self._carried = [CarriedGradients(current, at, self.ranks) for at in range(len(self.layers))]
        for layer, carried in zip(self.layers, self._carried, strict=True):
            layer.gradients = carried

    def remove(self) -> None:
        """Removes the hooks from the model, which is then as it was before the reducer was made."""
        for handle in self._handles:
            handle.remove()
        for layer in self.layers:
            layer.gradients = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a with-block in which backward passes accumulate gradients and do not all-reduce them."""
        before = self._syncs
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = before

    def finish(self) -> None:
        """Sends the gradients that were not sent during backward, and waits for all all-reduces. Collective.

        Call it after each backward pass; when gradients are accumulated, after the last one. The first call
        also chooses the partition: which bytes are sent at which moment.

        Raises ValueError if the caller's partition belongs to another model, or if a dense parameter requires
        a gradient that required none when the reducer was made: this reducer would never reduce it. If a
        parameter requires one on some ranks only, the other ranks raise RuntimeError with the text of that
        error; on a GPU they do so only after the group's timeout.
        """
        with publishing_failures(self.ranks, FINISH):
            self._check_frozen()
        step = self._step
        buffers = self._finish_first(step) if isinstance(step, FirstStep) else step.finish()
        if self.average:
            for memory in buffers.memories:
                memory.div_(self.ranks.size)
        self._step = self._new_step()

    def _check_frozen(self) -> None:
        """Raises ValueError if a parameter that was frozen when the reducer was made requires a gradient."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad and not is_expert(parameter):
                raise ValueError(
                    f"{name} (requires_grad=True) must require a gradient when the GradientReducer is made: "
                    "call reducer.remove(), and make another reducer, both on all ranks"
                )

    def _finish_first(self, seen: FirstStep) -> GradientBuffers:
        """All-reduces all gradients after the first step, and plans when later steps send gradients.

        Returns the buffers, which then hold the sums over ranks. Collective.

        seen: the record of the first step.
        """
        seen.end(len(self.parameters))
        buffers = GradientBuffers(self.parameters, seen.order)
        timetable = Timetable(end=buffers.memories)
        PartitionedStep(buffers, timetable, self.ranks, self.names).finish()
        if self._may_overlap(seen, buffers):
            timetable = self._timetable(seen, buffers)
        self._new_step = partial(PartitionedStep, buffers, timetable, self.ranks, self.names)
        return buffers

    def _may_overlap(self, seen: FirstStep, buffers: GradientBuffers) -> bool:
        """Returns whether gradients may be sent during backward in later steps. Collective.

        The result is True if all ranks made the gradients in the same order in the first step, and all
        gradients have one dtype and device. It is False if the caller passed ``partition=False``, if there
        is only one rank, or if the model has called no MoE layer. Later steps then send everything after
        backward.

        seen: the record of the first step.
        buffers: the flat memory of all gradients.
        """
        if self._wanted is False or len(buffers.memories) > 1 or self.ranks.size == 1:
            return False
        if not seen.layers and not self._is_in_graph():
            return False
        mine = (seen.order, [(layer.layer, layer.num_made) for layer in seen.layers])
        return all(theirs == mine for theirs in gathered(self.ranks, mine, stage="comparing gradients"))

    def _is_in_graph(self) -> bool:
        """Returns whether the last call of a layer was a part of a graph of torch.compile."""
        return any(layer.ran is not None and layer.ran.path == "whole graph" for layer in self.layers)

    def _timetable(self, seen: FirstStep, buffers: GradientBuffers) -> Timetable:
        """Returns which ranges of gradients later steps send at which moment of backward. Collective.

        The ranges follow from the caller's partition. If the caller gave none, a partition is computed now
        from the times of the first step. If the layers are in a graph, the ranges follow from the order in
        which the graph makes gradients.

        seen: the record of the first step.
        buffers: the flat memory of all gradients.
        """
        if not seen.layers:
            if self._wanted is not None:
                warn_once(
                    "partition is not used, because the model's layers are in a graph of "
                    'torch.compile(model, backend="pmoe"), whose plan says when gradients are sent: leave '
                    "partition out"
                )
            return pieces_of(buffers)
        if isinstance(self._wanted, Partition):
            _check_partition(self._wanted, len(seen.layers))
            self.partition = self._wanted
        else:
            self.partition = find_partition(seen.layers, seen.last_seconds, self.layers, buffers, self.ranks)
        for share, (at, *_) in zip(self.partition.shares[1::2], seen.layers, strict=True):
            self._carried[at].t_gar = share.t_gar
        return timetable_of(self.partition, buffers)


def _dense_parameters(model: nn.Module) -> tuple[list[str], list[nn.Parameter]]:
    """Returns the names and the tensors, of any shape, of all parameters to reduce.

    These are the parameters that require gradients and do not belong to an expert.

    Raises ValueError if there is no parameter to reduce, or if one of the parameters is a DTensor.
    """
    mark_all(model)
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
    """Raises ValueError if a partition does not fit a model with this number of MoE layers.

    The partition must have numbers of bytes for a dense part (the modules between two MoE layers), then for
    an MoE layer, and so on, in the order of backward. The first entry, for the dense part that backward runs
    first, must have 0 bytes, because no gradient has been made before it.

    partition: the numbers of bytes.
    num_layers: the number of MoE layers.
    """
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
            "empty: no gradient exists before it"
        )


class BackwardStep:
    """Base class of the objects that follow one backward pass of a model for a `GradientReducer`.

    Hooks on parameters call `gradient_is_ready`. The backward passes of MoE layers call the other methods,
    through `CarriedGradients`. In this class the methods do nothing.
    """

    def gradient_is_ready(self, at: int) -> None:
        """Notes that backward has added a gradient to the ``grad`` of parameter number ``at``."""

    def layer_begins(self, layer: int) -> None:
        """Notes that the backward pass of an MoE layer begins.

        By now backward has passed the dense modules that come after this layer in the model.

        layer: index of the layer among the model's MoE layers.
        """

    def inside_layer(self) -> dist.Work | None:
        """Starts an all-reduce of gradients while an MoE layer's backward pass runs.

        A task of that pass calls this method, after the pass's last dispatch. Returns the running collective;
        None if there is nothing to send.
        """
        return None

    def layer_ends(self) -> None:
        """Notes that the backward pass of an MoE layer has ended. Dense modules follow in backward."""


def _step_of(reducer: weakref.ref[GradientReducer]) -> BackwardStep:
    """Returns the object of the reducer's current training step. The model's hooks call its methods.

    Within ``no_sync``, and after the reducer was garbage-collected, returns an object with methods that do
    nothing.

    reducer: a weak reference, so that hooks do not keep the reducer alive.
    """
    target = reducer()
    return BackwardStep() if target is None or not target._syncs else target._step


@dataclass(eq=False)
class CarriedGradients:
    """Lets a `GradientReducer` send gradients of other layers during one MoE layer's backward pass.

    `GradientReducer` stores an object of this class in ``layer.gradients`` of each MoE layer. The layer's
    backward pass calls its methods, which call the methods of the reducer's current training step.

    step: a function without arguments that returns the object of the reducer's current training step: a
        `FirstStep`, a `PartitionedStep`, or a `BackwardStep` that does nothing.
    at: index of the layer among the model's MoE layers.
    ranks: the ranks over which gradients are reduced.
    t_gar: predicted seconds of the all-reduce that runs during this layer's backward pass. The layer counts
        them when it chooses its number of chunks.
    """

    step: Callable[[], BackwardStep]
    at: int
    ranks: Ranks
    t_gar: float = 0.0

    def begins(self) -> None:
        """Records that this layer's backward pass begins. Called before the first task of the pass."""
        self.step().layer_begins(self.at)

    def inside(self) -> dist.Work | None:
        """Starts an all-reduce of other layers' gradients, if the reducer sends any during this layer.

        A task of the layer's backward pass calls this method, in the queue of collectives between nodes.
        Returns the running collective; None if nothing is sent.
        """
        return self.step().inside_layer()

    def ends(self) -> None:
        """Records that this layer's backward pass has ended, and starts the next all-reduce if one is due.

        Called after the last task of the pass.
        """
        self.step().layer_ends()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Returns None: a copy of the model has no reducer, because the hooks are on the original."""


class FirstStep(BackwardStep):
    """The first training step with a `GradientReducer`: sends nothing during backward, and records times.

    From the record the reducer computes its partition: how many bytes of gradients later steps send during
    each dense part (the modules between two MoE layers) and each MoE layer of backward.

    device: the device of the model.
    order: indices of parameters in the order in which backward made their gradients. Parameters without a
        gradient come last.
    layers: one record for each backward pass of an MoE layer.
    last_seconds: seconds that backward spent in dense modules after the last of these passes.
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
        """Ends the record after backward: sets ``order`` and ``last_seconds``.

        num_parameters: number of dense parameters.
        """
        self.last_seconds = self._dense_seconds()
        self.order = list(dict.fromkeys([*self._came, *range(num_parameters)]))

    def _dense_seconds(self) -> float:
        """Returns the seconds since the last MoE layer's backward pass ended; 0 before the first one."""
        return 0.0 if self._dense_since is None else self._now() - self._dense_since


class PartitionedStep(BackwardStep):
    """A training step after the first: all-reduces ranges of gradients during backward, by a `Timetable`.

    buffers: the flat memory of all gradients.
    timetable: which ranges are sent at which moment of backward.
    ranks: the ranks to reduce over.
    names: names of the parameters, for errors.

    Raises RuntimeError if a gradient does not exist yet when it should be sent, or if backward adds to it
    after it was sent.
    """

    def __init__(
        self, buffers: GradientBuffers, timetable: Timetable, ranks: Ranks, names: Sequence[str]
    ) -> None:
        self._buffers = buffers
        self._timetable = timetable
        self._ranks = ranks
        self._names = names
        self._works: list[dist.Work] = []
        self._ready: set[int] = set()
        self._sent: set[int] = set()
        self._num_layers = 0
        self._num_pieces = 0

    def gradient_is_ready(self, at: int) -> None:
        if at in self._sent:
            raise RuntimeError(
                f"pmoe: backward added to the gradient of {self._names[at]} after it was sent: run all "
                "backward passes of a step but the last in `with reducer.no_sync():`; if one backward pass "
                "makes the gradient in parts (checkpoint with use_reentrant=True), use "
                "GradientReducer(partition=False)"
            )
        self._buffers.take(at)
        self._ready.add(at)
        # Pieces are sent in their own order, the same on all ranks, not in the order in which gradients come.
        for piece in self._timetable.pieces[self._num_pieces :]:
            if not all(self._is_ready(at) for at in piece.parameters):
                break
            self._num_pieces += 1
            self._works.append(self._send(piece))

    def layer_begins(self, layer: int) -> None:
        self._check_ready(self._timetable.inside.get(self._num_layers))

    def inside_layer(self) -> dist.Work | None:
        part = self._timetable.inside.get(self._num_layers)
        return None if part is None else self._send(part)

    def layer_ends(self) -> None:
        self._num_layers += 1
        part = self._timetable.beside.get(self._num_layers)
        self._check_ready(part)
        if part is not None:
            self._works.append(self._send(part))

    def finish(self) -> GradientBuffers:
        """Starts the all-reduces of the remaining gradients after backward, and waits for all all-reduces.

        Returns the buffers, which then hold the sums over ranks.
        """
        for at in range(len(self._names)):
            if at not in self._ready:
                self._buffers.take(at)
        if self._ranks.group is not None:
            pieces = self._timetable.pieces[self._num_pieces :]
            self._works += [self._all_reduce(piece.memory) for piece in pieces]
            self._works += [self._all_reduce(memory) for memory in self._timetable.end]
        with at_stage(FINISH, self._ranks):
            for work in self._works:
                wait_for(work, self._ranks.group, on_gpu=self._buffers.memories[0].is_cuda)
        return self._buffers

    def _send(self, part: GradientRange) -> dist.Work:
        self._sent.update(part.parameters)
        return self._all_reduce(part.memory)

    def _all_reduce(self, memory: Tensor) -> dist.Work:
        work: dist.Work = dist.all_reduce(memory, group=self._ranks.group, async_op=True)
        return work

    def _is_ready(self, at: int) -> bool:
        """Returns whether the buffer has the gradient of a parameter.

        For a frozen parameter backward makes no gradient, so this method first fills it in, mostly with zeros
        (`GradientBuffers.take`).

        at: the parameter's number.
        """
        if at not in self._ready and self._buffers.is_frozen(at):
            self._buffers.take(at)
            self._ready.add(at)
        return at in self._ready

    def _check_ready(self, part: GradientRange | None) -> None:
        for at in () if part is None else part.parameters:
            if not self._is_ready(at):
                raise RuntimeError(
                    f"pmoe: the gradient of {self._names[at]} does not exist when it should be sent: a model "
                    "whose backward pass changes from step to step needs GradientReducer(partition=False)"
                )
