"""What is decided of a call before any row moves: its routing, its row counts, and who computes it how.

Deciding may communicate and read the host; running (`run`) does neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pmoe.comm.counts import RankCounts
from pmoe.comm.ranks import telling
from pmoe.engine.autograd import Path, Runner, run_experts
from pmoe.engine.passes import Inputs
from pmoe.engine.plan import Plan
from pmoe.layer.parts import Call
from pmoe.layer.route import Routed
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.kernels.comet.steps import Steps


class LeftCounts(Protocol):
    """Row counts that a call leaves for those who ask afterwards, on the host; reading them may synchronize.
    max_tokens: the largest number of any rank. kept_E: (E,) int64, kept rows of this rank by expert."""

    @property
    def max_tokens(self) -> int: ...
    def rows(self) -> RankCounts: ...
    def kept_E(self) -> Tensor: ...


@dataclass(frozen=True)
class CallCounts:
    """`LeftCounts` of a decided call.

    shared: as the rows travelled, on the device where one rank's kernels sorted them (a replayed CUDA graph
    changes them there). kept_device_E: (E,) on the device, the
    rows that are no padding; None where all are that.
    """

    shared: RankCounts
    max_tokens: int
    kept_device_E: Tensor | None = None

    def rows(self) -> RankCounts:
        send, recv = (each.to("cpu").long() for each in (self.shared.send, self.shared.recv))
        return replace(self.shared, send=send, recv=recv, recv_device=recv)

    def kept_E(self) -> Tensor:
        if self.kept_device_E is None:
            return self.rows().send.sum(0).flatten()
        return self.kept_device_E.to("cpu", torch.int64, copy=True)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The numbers of a decision: all that a checkpoint's second pass takes over beside the routing.

    counts: None where the host needs none.
    choice: n of both passes and the restore pair; None where nothing is cut.
    steps: the fused kernels' steps; None where they take no part.
    """

    counts: RankCounts | None = None
    choice: Choice | None = None
    steps: Steps | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A call as it will be run.

    runner: computes T_O of ``inputs``. plan: the chunks, None where nothing is cut.
    restore: the pair of a call whose buffers rotate or whose kernels are fused.
    """

    call: Call
    routed: Routed
    inputs: Inputs
    runner: Runner
    counts: CallCounts
    plan: Plan | None = None
    restore: Restore | None = None

    @property
    def needs_grad(self) -> bool:
        """Whether backward may follow, on any rank."""
        return self.counts.shared.needs_grad


def decide(call: Call) -> Decision:
    """By the source of row counts that fits: one rank's kernels, padded rows, or an exchange of counts."""
    parts = call.parts
    if parts.may_run_on_one_rank:
        from pmoe.layer import one_rank_counts

        decision = one_rank_counts.decide(call)
        if decision is not None:
            return decision
    if parts.spec.pad_to_capacity:
        from pmoe.layer import padded_counts

        return padded_counts.decide(call)
    from pmoe.layer import exact_counts

    return exact_counts.decide(call)


def run(decision: Decision) -> Tensor:
    """The tokens' results, (T, M)."""
    inputs, mix = decision.inputs, decision.routed.routing.mix
    parts = decision.call.parts
    with inputs.autocast_for(parts.experts):
        y_TM = run_experts(decision.runner, inputs, parts.ranks, needs_grad=decision.needs_grad)
    return y_TM if mix is None else mix.combine.to(y_TM.dtype) @ y_TM


def shaped_output(decision: Decision, y_TM: Tensor) -> Tensor:
    """The layer's output in its input's shape, behind the callbacks' last hooks. y_TM itself where it has
    that: FSDP2 warns of a module that returns a view, for an operation in place would drop its hook."""
    x = decision.routed.x
    y = y_TM if y_TM.shape == x.shape else y_TM.view(x.shape)
    with telling(decision.call.parts.ranks, "before_moe_end of a callback"):
        for callback in decision.call.parts.callbacks:
            y = callback.before_moe_end(y)
    return y


# ---- what a layer tells of its last call


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What was really done, after the choices and fallbacks of a call; all but num_tokens and num_slots is
    the same on every rank.

    num_tokens: of this rank. num_slots: choices of its tokens, dropped ones among them; None where the gate
    names only rows that it keeps. dtype, device: of the rows. forward, backward: n of the passes as they were
    cut, skewed routing among the reasons, None where a pass is not cut or there is none. restore: None where
    buffers do not rotate, or nothing is differentiated.
    """

    path: Path
    num_tokens: int
    num_slots: int | None
    dtype: torch.dtype
    device: torch.device
    forward: int | None = None
    backward: int | None = None
    restore: Restore | None = None


@dataclass(frozen=True, kw_only=True)
class LastCall:
    """l_aux: scalar, on the call's graph. ran: how it was computed. All are None before the first call."""

    l_aux: Tensor | None = None
    counts: LeftCounts | None = None
    ran: Ran | None = None

    @staticmethod
    def of(decision: Decision) -> LastCall:
        routed, plan, needs_grad = decision.routed, decision.plan, decision.needs_grad
        routing, rows_TM, name = routed.routing, decision.inputs.x_TM, decision.runner.name
        ran = Ran(
            path=name,
            num_tokens=routed.num_tokens,
            num_slots=routing.expert.numel() if routing.token is None and routing.mix is None else None,
            dtype=rows_TM.dtype,
            device=rows_TM.device,
            forward=len(plan.forward.chunks) if plan is not None and name == "pipeline" else None,
            backward=len(plan.backward.chunks) if plan is not None and needs_grad else None,
            restore=decision.restore if needs_grad else None,
        )
        return LastCall(l_aux=routing.l_aux, counts=decision.counts, ran=ran)
