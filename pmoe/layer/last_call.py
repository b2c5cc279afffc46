"""What a layer tells of its last call: its loss, its rows by expert, how it was computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmoe.comm.counts import Shared
from pmoe.engine.passes import Inputs
from pmoe.engine.plan import Plan
from pmoe.layer.ran import Path, Ran
from pmoe.layer.route import Routed
from pmoe.runners import fused as comet
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


OF_LAST_CALL = ("l_aux", "_counted", "ran", "max_tokens")
"""Attributes of a layer that tell of its last call."""


@dataclass(frozen=True)
class CountedAlone:
    """Rows by expert of a call that brought none of them to the host. Whoever asks for them waits."""

    counts_E: Tensor
    num_tokens: int
    needs_grad: bool

    def on_host(self) -> Shared:
        counts = self.counts_E.to("cpu", torch.int64).view(1, 1, -1)
        return Shared(
            send=counts,
            recv=counts,
            recv_device=counts,
            max_tokens=self.num_tokens,
            needs_grad=self.needs_grad,
        )


@dataclass(frozen=True)
class CountedPadded:
    """Of a call whose rows were padded: the rows as they travelled, and those of them that are no padding, by
    expert, on the device."""

    rows: Shared
    kept_E: Tensor


Counted = Shared | CountedAlone | CountedPadded


def tell_alone(
    layer: MoELayer,
    path: Path,
    x_TM: Tensor,
    dtype: torch.dtype,
    *,
    l_aux: Tensor,
    counts_E: Tensor,
    needs_grad: bool,
    restore: Restore | None = None,
) -> None:
    """Of one rank's call, whose numbers stay on the device. dtype: of the rows."""
    layer.l_aux, layer.max_tokens = l_aux, x_TM.shape[0]
    layer._counted = CountedAlone(counts_E, x_TM.shape[0], needs_grad)
    layer.ran = Ran(
        path=path,
        num_tokens=x_TM.shape[0],
        num_slots=x_TM.shape[0] * layer.top_k,
        dtype=dtype,
        device=x_TM.device,
        restore=restore if needs_grad else None,
    )


def how_it_ran(
    routed: Routed, shared: Shared, inputs: Inputs, call: comet.Call | None, plan: Plan | None
) -> Ran:
    """Of any other call. plan: None where the fused kernels did both passes; with ``call``, of the backward
    pass alone."""
    routing, rows_TM = routed.routing, inputs.x_TM
    restore, backward = None if call is None else call.restore, None
    if plan is not None:
        restore = plan.restore if plan.rotates or call is not None else None
        backward = len(plan.backward.chunks)
    return Ran(
        path="pipeline" if call is None else "fused" if plan is None else "fused forward",
        num_tokens=routed.x_TM.shape[0],
        num_slots=routing.expert.numel() if routing.token is None and routing.mix is None else None,
        dtype=rows_TM.dtype,
        device=rows_TM.device,
        forward=len(plan.forward.chunks) if plan is not None and call is None else None,
        backward=backward if shared.needs_grad else None,
        restore=restore if shared.needs_grad else None,
    )
