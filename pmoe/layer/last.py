"""What a layer tells of its last call: its loss, its row counts, how it was computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.engine.autograd import Path
from pmoe.layer.decision import CallCounts, Decision
from pmoe.schedule.restore import Restore


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
    """l_aux: scalar, on the call's graph. counts: the call's row counts. ran: how it was computed.

    All are None before the first call.
    """

    l_aux: Tensor | None = None
    counts: CallCounts | None = None
    ran: Ran | None = None

    @staticmethod
    def of(decision: Decision) -> LastCall:
        return LastCall(
            l_aux=decision.routed.routing.l_aux, counts=decision.counts, ran=_how_it_ran(decision)
        )


def _how_it_ran(decision: Decision) -> Ran:
    routed, plan, needs_grad = decision.routed, decision.plan, decision.needs_grad
    routing, rows_TM = routed.routing, decision.inputs.x_TM
    forward = backward = None
    if plan is not None:
        backward = len(plan.backward.chunks)
        forward = len(plan.forward.chunks) if decision.runner.name == "pipeline" else None
    return Ran(
        path=decision.runner.name,
        num_tokens=routed.num_tokens,
        num_slots=routing.expert.numel() if routing.token is None and routing.mix is None else None,
        dtype=rows_TM.dtype,
        device=rows_TM.device,
        forward=forward,
        backward=backward if needs_grad else None,
        restore=decision.restore if needs_grad else None,
    )
