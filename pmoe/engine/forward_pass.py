"""The forward pass of the experts' part of a layer: what each task of its schedule does.

Letters: as in `pmoe.engine.passes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pmoe.engine import callbacks, lanes
from pmoe.engine.arena import copy, pool
from pmoe.engine.callbacks import Passed
from pmoe.engine.host_pool import HostMemoryError
from pmoe.engine.passes import SHARED, Forwarded, Inputs, Kept, Pass, Unit, both, split_by_chunk
from pmoe.engine.plan import Plan
from pmoe.schedule.slots import aligned
from pmoe.schedule.tasks import Kind
from pmoe.warn import warn_once

_COPIES_OUT = {
    "T_DI": Kind.COPY_ROWS_OUT,
    "T_M": Kind.COPY_HIDDEN_OUT,
    "T_DI_L": Kind.LOCAL_COPY_ROWS_OUT,
    "T_M_L": Kind.LOCAL_COPY_HIDDEN_OUT,
}


class Forward(Pass):
    direction, received, sent_back, home_name = "forward", "T_DI", "T_DO", "home"

    def __init__(self, plan: Plan, inputs: Inputs, keep: bool) -> None:
        inputs = inputs.padded(plan.padding)
        x_TM = inputs.x_TM
        super().__init__(plan, plan.forward, x_TM, keep)
        self.inputs, self.parameters = inputs, inputs.parameters
        self.weight = inputs.weight_TK.reshape(-1)
        self.kept: dict[Unit, Kept] = {}
        self.passed: dict[tuple[str, int], Passed] = {}
        self.leaving_device: dict[tuple[Kind, int], list[tuple[Tensor, Tensor]]] = {}
        self.weight_received: Tensor | None = None
        self.host_bytes_due = 0
        if keep and plan.restore.dispatched == "offload":
            units = (*(piece.groups for piece in self.cut.pieces), *(c.received for c in self.cut.chunks))
            row_bytes = x_TM.shape[1] * x_TM.element_size()
            self.host_bytes_due = sum(aligned(groups.num_rows * row_bytes) for groups in units)
        journey = self.cut.weights
        if journey is not None:
            self.weight_sent = self.weight.index_select(0, journey.slot)
            self.weight_arrived = self.weight.new_empty(self.cut.num_received)
            self.weight_own = self.weight_arrived  # before it is shared inside the node
            self.weight_copies = self.weight_arrived
            if plan.modules.stages.sharded:
                own = sum(journey.recv)
                self.weight_own = self.weight.new_empty(own)
                self.weight_copies = self.weight.new_empty(plan.modules.sharing.copies(own))
        once = self.cut.once
        if once is not None:
            self.number_arrived = once.number.new_empty(self.cut.num_received)
            self.number_own = once.number.new_empty(self.weight_own.shape)
            self.number_copies = once.number.new_empty(self.weight_copies.shape)

    def keeps_received(self) -> bool:
        return self.keep and self.plan.restore.dispatched == "keep"

    def run(self) -> Tensor:
        self.run_schedule(
            {
                Kind.WEIGHTS: self.send_weights,
                Kind.SHARE_WEIGHTS: self.share_weights,
                Kind.SHARED: self.compute_shared,
                Kind.LOCAL: self.compute_local,
                Kind.COMPUTE: self.compute,
                **{kind: self._copy_out(kind) for kind in _COPIES_OUT.values()},
            }
        )
        padding = self.plan.padding
        return self.result_TM if padding is None else padding.gather(self.result_TM)

    def send_weights(self, _: int) -> dist.Work | None:
        journey, once = self.cut.weights, self.cut.once
        assert journey is not None
        scalars = self.plan.modules.scalars
        work = scalars.exchange(self.weight_sent, journey.send, self.weight_own, journey.recv)
        if once is None:
            return work
        numbers = scalars.exchange(once.number, journey.send, self._number_target(), journey.recv)
        return both(work, numbers)

    def _number_target(self) -> Tensor:
        return self.number_own if self.plan.modules.stages.sharded else self.number_arrived

    def share_weights(self, _: int) -> None:
        journey = self.cut.weights
        assert journey is not None
        share = self.plan.modules.sharing.all_gather
        share(self.weight_own, self.weight_arrived, journey.gathered, self.weight_copies)
        if self.cut.once is not None:
            share(self.number_own, self.number_arrived, journey.gathered, self.number_copies)

    # ---- hooks

    def changes_leaving(self) -> bool:
        return self.hooks.on_dispatch

    def on_leaving(self, i: int, rows_NM: Tensor, name: str) -> Tensor:
        return self._through("before_dispatch", i, rows_NM, last="after_dispatch")

    def on_arrival(self, i: int, rows: Tensor) -> Tensor:
        return self._through("after_dispatch", i, rows)

    def changes_returning(self) -> bool:
        return self.hooks.on_combine

    def on_returning(self, i: int, rows_NM: Tensor) -> Tensor:
        return self._through("before_combine", i, rows_NM, last="after_combine")

    def on_return(self, i: int, rows: Tensor) -> Tensor:
        return self._through("after_combine", i, rows)

    def _through(self, point: str, i: int, rows: Tensor, last: str | None = None) -> Tensor:
        """rows behind the hooks of a point; ``last``: the point that may still follow before they are
        used."""
        if not self.hooks.has(point):
            return rows
        like = None if last is not None and self.hooks.has(last) else self.source_TM
        parameters = self.inputs.hook_parameters if self.keep else None
        rows, passed = callbacks.forward(self.hooks, point, rows, i, like, parameters)
        if passed is not None:
            self.passed[point, i] = passed
        return rows

    # ---- experts

    def compute_shared(self, _chunk: int) -> None:
        experts, weight_T = self.plan.modules.shared, self.inputs.shared_weight_T
        assert experts is not None and weight_T is not None
        _, hidden = experts.compute(
            self.source_TM,
            weight_T,
            self.shared_groups(),
            self.inputs.shared_parameters,
            out=self.place_shared(),
            keep=self.keep,
        )
        if self.keep:
            self.kept[SHARED] = Kept(hidden=hidden)

    def compute_local(self, j: int) -> None:
        piece = self.cut.pieces[j]
        weight_N = self.weight.index_select(0, self.cut.slot[piece.rows])
        rows_NM = self.gather_local(self.source_TM, self.temporary("T_DI_L", j), j)
        self._compute((j, "_L"), rows_NM, weight_N, self.home_rows(j, piece.rows))

    def compute(self, i: int) -> None:
        if self.weight_received is None:
            self.weight_received = self._sorted_weights()
            self.weight_of_chunk = split_by_chunk(self.weight_received, self.cut)
        arrived = self.arrived(i)
        out_NM = self.result_of(i)
        rows_NM = self.in_expert_order("T_DI", i, arrived)
        self._compute((i, ""), rows_NM, self.weight_of_chunk[i], out_NM)
        self.in_source_order(i, out_NM)

    def _sorted_weights(self) -> Tensor:
        """The routing weights of the received rows, by chunk and in expert order. With them came which rows
        they belong to, where rows travel once."""
        assert self.cut.weights is not None
        regroup, once = self.cut.weights.regroup, self.cut.once
        if once is not None:
            row = once.base + self.number_arrived
            self.regroup = split_by_chunk(row if regroup is None else row.index_select(0, regroup), self.cut)
        return self.weight_arrived if regroup is None else self.weight_arrived.index_select(0, regroup)

    def _compute(self, unit: Unit, rows_NM: Tensor, weight_N: Tensor, out_NM: Tensor) -> None:
        experts, restore = self.plan.modules.experts, self.plan.restore
        remakes = self.keep and restore.hidden != "keep"
        recipe = experts.recipe(rows_NM.device) if remakes else None
        version = rows_NM._version if recipe is not None else 0
        keeps_hidden = self.keep and restore.hidden != "recompute"
        _, hidden = experts.compute(
            rows_NM,
            weight_N,
            self.groups(unit),
            self.parameters,
            space=self.space(unit),
            out=out_NM,
            keep=keeps_hidden,
        )
        if not self.keep:
            return
        if recipe is not None and restore.hidden == "recompute":
            self._check_recipe(recipe, rows_NM, version)
        kept = self.kept[unit] = Kept(hidden=hidden, recipe=recipe)
        if restore.dispatched == "keep":
            kept.rows_NM = rows_NM
        elif restore.dispatched == "offload":
            self.host_bytes_due -= aligned(rows_NM.nbytes)
            try:
                kept.rows_NM = self._to_host(unit, "T_DI", [rows_NM])[0]
            except HostMemoryError:  # there is enough in all, but in pieces
                kept.rows_NM = rows_NM.clone()
        if hidden is not None and restore.hidden == "offload":
            try:
                # T_DI of the chunks to come has been promised its place.
                tensors = self._to_host(unit, "T_M", hidden.tensors, leave=self.host_bytes_due)
                kept.hidden = replace(hidden, tensors=tensors)
            except HostMemoryError as error:
                # Modules may draw random numbers, which other chunks would not repeat, or spoil their input.
                if recipe is None or not (self.plan.rearranged or rows_NM._version != version):
                    warn_once(f"{error}; T_M is recomputed where it does not fit")
                    kept.hidden = None
                else:
                    warn_once(f"{error}; T_M stays on the device where it does not fit")

    def _check_recipe(self, recipe: Any, rows_NM: Tensor, version: int) -> None:
        if rows_NM._version != version:
            raise RuntimeError(
                "an expert changes its input in place: its hidden cannot be recomputed from that input, so "
                'memory_reuse must keep or offload it (hidden="keep" or "offload")'
            )
        if self.plan.rearranged and not self.plan.modules.experts.is_repeatable(recipe):
            raise RuntimeError(
                "an expert draws random numbers: it can be recomputed only where backward has forward's "
                f"chunks ({len(self.plan.forward.chunks)}), not {len(self.plan.backward.chunks)}"
            )

    def _to_host(self, unit: Unit, tensor: str, tensors: Sequence[Tensor], leave: int = 0) -> list[Tensor]:
        """Host memory for tensors; the copy itself is a task that follows. leave: bytes for others."""
        host = pool(self.source_TM.device).host
        wanted = sum(aligned(each.nbytes) for each in tensors)
        if leave and wanted + leave > host.free_bytes:
            raise HostMemoryError(
                f"host memory for offloading: {wanted} bytes wanted, {host.free_bytes} of {host.limit_bytes} "
                f"left, {leave} of them for T_DI"
            )
        targets = [host.take(each.shape, each.dtype) for each in tensors]
        pairs = list(zip(targets, tensors, strict=True))
        self.leaving_device[_COPIES_OUT[tensor + unit[1]], unit[0]] = pairs
        return targets

    def _copy_out(self, kind: Kind) -> Callable[[int], None]:
        def act(i: int) -> None:
            for target, tensor in self.leaving_device.pop((kind, i), ()):
                if not self.arena.owns(tensor):
                    # A module's own, or a part of it: made on the compute lane, and freed once this returns.
                    lanes.hold_for(lanes.current_stream(tensor), tensor)
                copy(target, tensor)

        return act


def forward_pass(plan: Plan, inputs: Inputs) -> Forwarded:
    """Forward by ``plan``'s schedule, with all that a backward pass needs."""
    done = Forward(plan, inputs, keep=True)
    return Forwarded(
        y_TM=done.run(),
        kept=done.kept,
        weight_received=done.weight_received,
        passed=done.passed,
        regroup=done.regroup if plan.forward.once is not None else (),
    )
