"""Data-parallel gradients all-reduced inside backward: FSMoE's adaptive gradient partitioning (Section 5).

Beside the dense parts of a model an all-reduce disturbs nobody. Inside an MoE layer's backward pass it has a
place of its own on the lane between nodes, behind the last dispatch, where the lane would wait for the
experts. How many bytes travel where is `pmoe.planner.gradient_partition`'s choice: the first step is plain,
and at its end all ranks agree on the partition (`pmoe.training.gradient_partitioning`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch.distributed as dist
from torch import nn

from pmoe.arguments import check_flag, check_module
from pmoe.comm.agreement import gathered
from pmoe.comm.ranks import Ranks
from pmoe.comm.subgroups import options_like
from pmoe.experts.base import is_expert
from pmoe.layer import MoELayer
from pmoe.planner.gradient_partition import Partition
from pmoe.training.gradient_partitioning import GradientBuffers, Timetable, find_partition, timetable_of
from pmoe.training.reducer_steps import FirstStep, LayerGradients, PartitionedStep, gradient_hook


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
            parameter.register_post_accumulate_grad_hook(gradient_hook(current, at))
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
        timetable = Timetable(end=buffers.ranges(0, buffers.ends[-1]))
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


def _step_of(reducer: weakref.ref[GradientReducer]) -> FirstStep | PartitionedStep | None:
    """The step under way; None where gradients are not reduced now, or the reducer is gone."""
    found = reducer()
    return None if found is None or not found._syncs else found._step


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
