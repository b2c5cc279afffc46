"""How a call will be run, and what is left of it for those who ask afterwards.

Deciding may communicate and read the host. Running a decision does neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.modules import Parts
from pmoe.call.routed import Routed
from pmoe.comm.counts import RankCounts
from pmoe.engine.autograd import Path, Runner
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.plan import Plan
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.kernels.comet.backend import Steps


class LeftCounts(Protocol):
    """Row counts of the last call, on the host. Reading them may synchronize.

    max_tokens   the largest number of tokens of any rank
    rows()       the counts as the rows travelled
    kept_E()     (E,) int64, kept rows of this rank for each expert
    """

    @property
    def max_tokens(self) -> int: ...
    def rows(self) -> RankCounts: ...
    def kept_E(self) -> Tensor: ...


@dataclass(frozen=True)
class CallCounts:
    """Row counts of a decided call, as `LeftCounts`.

    shared          counts as the rows travelled. If the kernels of one rank sorted the rows, they are on
                    the device, where a replayed CUDA graph changes them
    max_tokens      the largest number of tokens of any rank
    kept_device_E   (E,) on the device, rows that are not padding; None if there is no padding
    """

    shared: RankCounts
    max_tokens: int
    kept_device_E: Tensor | None = None

    def rows(self) -> RankCounts:
        send, recv = (counts.to("cpu").long() for counts in (self.shared.send, self.shared.recv))
        return replace(self.shared, send=send, recv=recv, recv_device=recv)

    def kept_E(self) -> Tensor:
        if self.kept_device_E is None:
            return self.rows().send.sum(0).flatten()
        return self.kept_device_E.to("cpu", torch.int64, copy=True)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The numbers of a decision. A checkpoint's second pass takes over these and the routing, and no more.

    counts   row counts of the call; None if the host needs none
    choice   n of both passes and the restore pair; None if the batch is not cut
    steps    the operators of the fused kernels; None if they take no part
    """

    counts: RankCounts | None = None
    choice: Choice | None = None
    steps: Steps | None = None


class CountsSource(Protocol):
    """Where the row counts of one call come from. Making a source routes the tokens of the call.

    parts: the modules that the schedule computes. They may hold other experts than ``call.parts``, because a
    wrapper may call another module than the one that it stands for.
    """

    call: Call
    routed: Routed

    def agree(self, parts: Parts, inputs: Inputs) -> Agreed:
        """Finds the numbers of the decision, with all ranks. A checkpoint's second pass does not call it."""

    def decision(self, parts: Parts, inputs: Inputs, agreed: Agreed) -> Decision:
        """Builds the decision from the numbers. No collective, and the host does not wait."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A call as it will be run.

    runner    computes T_O of ``inputs``
    counts    row counts for those who ask afterwards
    plan      the chunks of both passes; None if the batch is not cut
    restore   the restore pair, if buffers rotate or kernels are fused; else None
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
        """Whether a backward pass may follow, on any rank."""
        return self.counts.shared.needs_grad


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
