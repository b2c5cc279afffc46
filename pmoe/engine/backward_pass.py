"""The backward pass of the experts' part of a layer: what each task of its schedule does.

Letters: as in `pmoe.engine.passes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.engine import callbacks, lanes
from pmoe.engine.arena import copy
from pmoe.engine.callbacks import Passed
from pmoe.engine.passes import SHARED, Inputs, Kept, Pass, Unit, split_by_chunk
from pmoe.engine.plan import Joined, Plan
from pmoe.experts.base import Hidden, Runs
from pmoe.experts.products import GradientSum
from pmoe.schedule.tasks import Kind


@dataclass(kw_only=True)
class SavedForBackward:
    """What a backward pass starts from, beside the gradient. wanted: of which of ``inputs.all`` gradients
    are. regroup: as forward had it, where it is not the plan's."""

    inputs: Inputs
    weight_received: Tensor | None
    kept: dict[Unit, Kept]
    wanted: Sequence[bool]
    regroup: Sequence[Tensor | None] | None = None
    passed: dict[tuple[str, int], Passed] = field(default_factory=dict)


class Backward(Pass):
    direction, received, sent_back, home_name = "backward", "dT_DO", "dT_DI", "dhome"

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: SavedForBackward) -> None:
        if plan.padding is not None:
            saved = replace(saved, inputs=saved.inputs.padded(plan.padding))
            grad_TM = plan.padding.spread(grad_TM)
        super().__init__(plan, plan.backward, grad_TM, keep=True)
        self.saved, self.kept, self.parameters = saved, saved.kept, saved.inputs.parameters
        if saved.regroup is not None:
            self.regroup = saved.regroup
        additions = sum(task.kind in (Kind.WGRAD, Kind.LOCAL_WGRAD) for task in self.schedule.tasks)
        wanted = saved.inputs.like(saved.wanted)

        def sums(parameters: Sequence[Tensor], wants: Sequence[Any], times: int) -> list[GradientSum | None]:
            pairs = zip(parameters, wants, strict=True)
            return [GradientSum(parameter, times) if want else None for parameter, want in pairs]

        self.sums = sums(saved.inputs.parameters, wanted.parameters, additions)
        self.shared_sums = sums(saved.inputs.shared_parameters, wanted.shared_parameters, 1)
        self.shared_pending: Any = None
        self.grad_shared_weight: Tensor | None = None
        self.grad_hooks: list[Tensor | None] = [None] * len(saved.inputs.hook_parameters)
        self.compute_stream = lanes.current_stream(grad_TM)
        self.rows: dict[Unit, Tensor] = {}
        self.hidden: dict[Unit, Hidden] = {}
        self.pending: dict[Unit, Any] = {}
        weight = saved.inputs.weight_TK
        self.weight = weight.reshape(-1)
        # Dropped slots have no row; nothing is ever added to their weight's gradient.
        self.grad_weight = weight.new_zeros(plan.num_slots)
        self.grad_weight_rows = weight.new_empty(self.cut.num_received)
        journey = self.cut.weights
        if journey is not None:
            received = saved.weight_received
            assert received is not None
            if plan.weight_map is not None:
                received = received.index_select(0, plan.weight_map)
            self.weight_of_chunk = split_by_chunk(received, self.cut)
            self.grad_weight_gathered = torch.empty_like(self.grad_weight_rows)
            self.grad_weight_leaving = self.grad_weight_gathered
            if plan.modules.stages.sharded:
                own = sum(journey.recv)
                self.grad_weight_leaving = weight.new_empty(own)
                self.grad_weight_parts = weight.new_empty(own * plan.modules.grid.inside.size)
            self.grad_weight_home = weight.new_empty(journey.slot.shape[0])
        self.grad_weight_of_chunk = split_by_chunk(self.grad_weight_rows, self.cut)
        self.chunks_done = 0

    def run(self) -> list[Tensor | None]:
        """The gradients of ``inputs.all``."""
        sharded, hooked, gradients = self.stages.sharded, self.stages.hooked, self.plan.modules.gradients
        if gradients is not None:
            gradients.begins()
        self.run_schedule(
            {
                Kind.GATHER_AGAIN: self.gather_again,
                Kind.DISPATCH_AGAIN: lambda i: self.send_rows(
                    "send_again", "arrived_again" if sharded else "T_DI", i
                ),
                Kind.OPEN_AGAIN: self.open_again,
                Kind.ALL_GATHER_AGAIN: lambda i: self.gather_inside(
                    "opened_again" if hooked else "arrived_again",
                    "T_DI",
                    "copies_again",
                    i,
                ),
                Kind.SHARE_WEIGHTS: self.sum_weights,
                Kind.SHARED: self.shared_gradient,
                Kind.SHARED_WGRAD: self.shared_weight_gradient,
                Kind.GRADIENTS: lambda _: None if gradients is None else gradients.inside(),
                Kind.COPY_ROWS_IN: lambda i: self.fetch_rows((i, "")),
                Kind.COPY_HIDDEN_IN: lambda i: self.fetch_hidden((i, "")),
                Kind.LOCAL_COPY_ROWS_IN: lambda i: self.fetch_rows((i, "_L")),
                Kind.LOCAL_COPY_HIDDEN_IN: lambda i: self.fetch_hidden((i, "_L")),
                Kind.RECOMPUTE: lambda i: self.recompute((i, "")),
                Kind.LOCAL_RECOMPUTE: lambda i: self.recompute((i, "_L")),
                Kind.LOCAL: self.input_gradient_local,
                Kind.LOCAL_WGRAD: lambda i: self.weight_gradient((i, "_L")),
                Kind.COMPUTE: self.input_gradient,
                Kind.WGRAD: lambda i: self.weight_gradient((i, "")),
                Kind.WEIGHTS: self.return_weights,
            }
        )
        if gradients is not None:
            gradients.ends()
        journey = self.cut.weights
        if journey is not None:
            self.grad_weight[journey.slot] = self.grad_weight_home
        grad_TM, grad_weight_TK = self.result_TM, self.grad_weight.view_as(self.saved.inputs.weight_TK)
        padding = self.plan.padding
        if padding is not None:
            grad_TM, grad_weight_TK = padding.gather(grad_TM), padding.gather_weights(grad_weight_TK)
        grads: list[Tensor | None] = [grad_TM, grad_weight_TK, self.grad_shared_weight]
        for sums in (self.sums, self.shared_sums):
            while sums:  # each sum goes as soon as it is rounded
                total = sums.pop(0)
                grads.append(None if total is None else total.result())
        return [*grads, *self.grad_hooks]

    # ---- hooks, backwards

    def changes_leaving(self) -> bool:
        return self.hooks.on_combine

    def on_leaving(self, i: int, rows_NM: Tensor, name: str) -> Tensor:
        return self._back_through("after_combine", i, rows_NM)

    def on_arrival(self, i: int, rows: Tensor) -> Tensor:
        return self._back_through("before_combine", i, rows)

    def changes_returning(self) -> bool:
        return self.hooks.on_dispatch

    def on_returning(self, i: int, rows_NM: Tensor) -> Tensor:
        return self._back_through("after_dispatch", i, rows_NM)

    def on_return(self, i: int, rows: Tensor) -> Tensor:
        return self._back_through("before_dispatch", i, rows)

    def _back_through(self, point: str, i: int, grad: Tensor) -> Tensor:
        if not self.hooks.has(point):
            return grad
        found_grad, *of_parameters = callbacks.backward(
            self.saved.passed[point, i], grad, self.saved.inputs.hook_parameters
        )
        for j, found in enumerate(of_parameters):
            if found is not None:
                total = self.grad_hooks[j]
                self.grad_hooks[j] = found if total is None else total + found
        assert found_grad is not None
        return found_grad

    # ---- the shared expert

    def shared_gradient(self, _chunk: int) -> None:
        experts, inputs = self.plan.modules.shared, self.saved.inputs
        hidden = self.kept[SHARED].hidden
        assert experts is not None and inputs.shared_weight_T is not None and hidden is not None
        _, self.grad_shared_weight, self.shared_pending = experts.input_gradient(
            self.source_TM.clone(),  # it is written over, and every chunk still reads it
            inputs.x_TM,
            inputs.shared_weight_T,
            hidden,
            self.shared_groups(),
            inputs.shared_parameters,
            out=self.place_shared(),
        )

    def shared_weight_gradient(self, _: int) -> None:
        assert self.plan.modules.shared is not None
        self.plan.modules.shared.weight_gradient(self.shared_pending, self.shared_groups(), self.shared_sums)
        self.shared_pending = None

    # ---- T_DI and T_M, restored

    def gather_again(self, i: int) -> None:
        x_TM, chunk = self.saved.inputs.x_TM, self.cut.chunks[i]
        hooks = self.hooks
        if not hooks.on_dispatch:
            self.gather_rows(x_TM, self.buffer("send_again", i), i)
            return
        rows = x_TM.new_empty(chunk.num_sent, x_TM.shape[1])
        self.gather_rows(x_TM, rows, i)
        if hooks.has("before_dispatch"):
            like = None if hooks.has("after_dispatch") else x_TM
            rows, _ = callbacks.forward(hooks, "before_dispatch", rows, i, like, keep=False)
        self.own[f"send_again.{i}"] = rows
        arrived = "arrived_again" if self.plan.modules.stages.sharded else "T_DI"
        self.own[f"{arrived}.{i}"] = rows.new_empty(chunk.num_arrived, rows.shape[1])

    def opened_again(self, i: int, rows: Tensor) -> Tensor:
        if self.hooks.has("after_dispatch"):
            x_TM = self.saved.inputs.x_TM
            rows, _ = callbacks.forward(self.hooks, "after_dispatch", rows, i, x_TM, keep=False)
        return rows

    def open_again(self, i: int) -> None:
        self.own[f"opened_again.{i}"] = self.opened_again(i, self.buffer("arrived_again", i))

    def arrived_again(self, i: int) -> Tensor:
        rows = self.buffer("T_DI", i)
        return rows if self.plan.modules.stages.hooked else self.opened_again(i, rows)

    def parts(self, unit: Unit) -> list[tuple[Kept, Runs]]:
        """What forward kept, by chunk of forward, with where its rows stand here."""
        i, at = unit
        joined: Joined | None = self.plan.joined_local if at else self.plan.joined_received
        if joined is None:
            whole = slice(0, self.groups(unit).num_rows)
            return [(self.kept[unit], ((whole, whole),))]
        return [(self.kept[there, at], runs) for there, runs in joined[i]]

    def fetch_rows(self, unit: Unit) -> None:
        """Into the slot of T_DI, from the host or from what other chunks of forward kept."""
        i, at = unit
        rows_NM = self.temporary(f"T_DI{at}", i)
        for kept, runs in self.parts(unit):
            assert kept.rows_NM is not None
            for there, here in runs:
                copy(rows_NM[here], kept.rows_NM[there])
        self.rows[unit] = rows_NM

    def fetch_hidden(self, unit: Unit) -> None:
        """Into the slot of T_M, or into memory of its own where modules saved what they liked."""
        parts = self.parts(unit)
        if any(kept.hidden is None for kept, _ in parts):
            return  # it did not fit on the host, and is made again when its turn comes
        experts, num_rows = self.plan.modules.experts, self.groups(unit).num_rows
        saved = [(kept.hidden, runs) for kept, runs in parts if kept.hidden is not None]
        if not saved:
            return
        hidden = experts.join(saved, num_rows, space=self.space(unit))
        if experts.columns(self.source_TM.device.type).hidden == 0 and self.plan.restore.hidden == "offload":
            hidden = replace(hidden, tensors=[self._fetched(tensor) for tensor in hidden.tensors])
        self.hidden[unit] = hidden

    def _fetched(self, tensor: Tensor) -> Tensor:
        here = torch.empty_like(tensor, device=self.source_TM.device)
        copy(here, tensor)
        lanes.hold_for(
            self.compute_stream, here
        )  # the copy lane made it, the compute lane reads and frees it
        return here

    def rows_of(self, unit: Unit) -> Tensor:
        """T_DI of a unit in expert order, arranged by whichever task needs it first."""
        if unit in self.rows:
            return self.rows[unit]
        (i, at), dispatched = unit, self.plan.restore.dispatched
        if dispatched == "communicate":
            if at:
                self.rows[unit] = self.gather_local(self.saved.inputs.x_TM, self.temporary("T_DI_L", i), i)
            else:
                self.rows[unit] = self.in_expert_order("T_DI", i, self.arrived_again(i))
        elif self.plan.rearranged:
            self.fetch_rows(unit)
        else:
            rows_NM = self.kept[unit].rows_NM
            assert rows_NM is not None
            self.rows[unit] = rows_NM
        return self.rows[unit]

    def recompute(self, unit: Unit) -> None:
        recipe = next((kept.recipe for kept, _ in self.parts(unit)), None)
        self.hidden[unit] = self.plan.modules.experts.recompute(
            self.rows_of(unit), self.groups(unit), self.parameters, recipe, space=self.space(unit)
        )

    def hidden_of(self, unit: Unit) -> Hidden:
        if unit not in self.hidden:
            kept = self.kept.get(unit)
            if self.plan.restore.hidden == "keep" and not self.plan.rearranged:
                assert kept is not None and kept.hidden is not None
                return kept.hidden
            if self.plan.restore.hidden == "keep":
                self.fetch_hidden(unit)
            if unit not in self.hidden:
                self.recompute(unit)
        return self.hidden.pop(unit)

    # ---- gradients

    def input_gradient_local(self, j: int) -> None:
        piece, unit = self.cut.pieces[j], (j, "_L")
        slot = self.cut.slot[piece.rows]
        grad_NM = self.gather_local(self.source_TM, self.temporary("dT_DO_L", j), j)
        weight_N = self.weight.index_select(0, slot)
        grad_weight_N = self._input_gradient(unit, grad_NM, weight_N, self.home_rows(j, piece.rows))
        self.grad_weight[slot] = grad_weight_N.to(self.grad_weight.dtype)

    def input_gradient(self, i: int) -> None:
        out_NM = self.result_of(i)
        grad_NM = self.in_expert_order("dT_DO", i, self.arrived(i))
        grad_weight_N = self._input_gradient((i, ""), grad_NM, self.weight_of_chunk[i], out_NM)
        self.in_source_order(i, out_NM)
        self.grad_weight_of_chunk[i].copy_(grad_weight_N)
        self.chunks_done += 1
        if self.chunks_done == len(self.cut.chunks):
            self._weights_in_source_order()

    def _input_gradient(self, unit: Unit, grad_NM: Tensor, weight_N: Tensor, out_NM: Tensor) -> Tensor:
        rows_NM = self.rows_of(unit)
        _, grad_weight_N, self.pending[unit] = self.plan.modules.experts.input_gradient(
            grad_NM,
            rows_NM,
            weight_N,
            self.hidden_of(unit),
            self.groups(unit),
            self.parameters,
            space=self.space(unit),
            out=out_NM,
        )
        return grad_weight_N

    def _weights_in_source_order(self) -> None:
        """After the last chunk, still on the compute lane: the message of weights' gradients."""
        assert self.cut.weights is not None
        regroup = self.cut.weights.regroup
        if regroup is None:
            self.grad_weight_gathered.copy_(self.grad_weight_rows)
        else:
            self.grad_weight_gathered.index_copy_(0, regroup, self.grad_weight_rows)

    def sum_weights(self, _: int) -> None:
        """Each shard made a part of the inner products that are the routing weights' gradients."""
        journey = self.cut.weights
        assert journey is not None
        self.plan.modules.sharing.reduce_scatter(
            self.grad_weight_gathered, self.grad_weight_leaving, journey.gathered, self.grad_weight_parts
        )

    def return_weights(self, _: int) -> dist.Work | None:
        journey = self.cut.weights
        assert journey is not None
        return self.plan.modules.scalars.exchange(
            self.grad_weight_leaving, journey.recv, self.grad_weight_home, journey.send
        )

    def weight_gradient(self, unit: Unit) -> None:
        self.plan.modules.experts.weight_gradient(self.pending.pop(unit), self.groups(unit), self.sums)
        self.rows.pop(unit, None)
