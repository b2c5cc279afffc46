"""The records of a decided call: how it will be run, and what the layer keeps of it afterwards.

CountsSource.agree        the ranks communicate, and the host may wait      -> AgreedChoice
CountsSource.decision     no communication, no waiting                      -> Decision
the runner                moves rows and multiplies; decides nothing
LastCall.of               what `layer.ran`, `layer.row_counts` and statistics show afterwards
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.comm.counts import RankCounts
from pmoe.engine.autograd import Path, Runner
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.plan import Plan
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.kernels.comet.backend import Steps


class LastRowCounts(Protocol):
    """An interface to the row counts of a layer's last call. Reading them may wait for the device.

    max_tokens   the largest number of tokens of any rank
    rows()       the counts of the rows that travelled, padding included, on the host
    kept_E()     (E,) int64 on the host: this rank's rows for each expert that were not dropped
    """

    @property
    def max_tokens(self) -> int: ...
    def rows(self) -> RankCounts: ...
    def kept_E(self) -> Tensor: ...


@dataclass(frozen=True)
class HostRowCounts:
    """The row counts of a decided call. Implements `LastRowCounts`.

    shared          counts of the rows that travel, padding included. If the kernels of one rank sort the
                    rows, they are on the device, and each replay of a CUDA graph changes them
    max_tokens      the largest number of tokens of any rank
    kept_device_E   (E,) on the device: rows that are not padding; None if there is no padding
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
class AgreedChoice:
    """The numbers and operators on which all ranks agreed for a call.

    counts   row counts of the call; None if the host does not need them
    choice   n of both passes and the restore pair; None if no pass is cut into chunks
    steps    the operators of the fused kernels; None if these compute neither pass

    The second pass of a checkpoint takes over only this record and the routing. It decides nothing else.
    """

    counts: RankCounts | None = None
    choice: Choice | None = None
    steps: Steps | None = None


class CountsSource(Protocol):
    """An interface to what provides the row counts of one call. Constructing it routes the call's tokens.

    call     the call
    routed   its tokens with their routing

    Arguments of the methods:

    modules  the modules that the schedule computes. Their experts may not be those of ``call.modules``: a
             wrapper of the experts may call another module than the first that it holds
    inputs   the rows and parameters of the call
    """

    call: Call
    routed: RoutedBatch

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Finds the numbers of the decision, together with all ranks.

        The second pass of a checkpoint does not call it.
        """

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Builds the decision from these numbers. Starts no collective, and the host does not wait."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A decided call: everything that running it needs.

    call      the call
    routed    its tokens with their routing
    inputs    the rows and parameters, cast as the experts take them
    runner    computes T_O of ``inputs``, and their gradients
    counts    row counts, for questions after the call
    plan      the chunks of both passes; None if no pass is cut into chunks
    restore   the restore pair, if buffers rotate or kernels are fused; else None
    """

    call: Call
    routed: RoutedBatch
    inputs: Inputs
    runner: Runner
    counts: HostRowCounts
    plan: Plan | None = None
    restore: Restore | None = None

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow, on any rank."""
        return self.counts.shared.needs_grad


# ---- what a layer keeps of its last call


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The record of how a call was run, after all choices and fallbacks.

    path         the runner that computed it
    num_tokens   number of this rank's tokens
    num_slots    number of (token, choice) slots of this rank, dropped ones included; None if the gate gives
                 only rows that it keeps, or mixes tokens
    dtype        of the rows that reached the experts
    device       of the rows
    forward      n of the forward pass, which may be larger than the chosen n under skewed routing; None if
                 the pass was not cut into chunks
    backward     n of the backward pass; None if it is not cut into chunks, or if there is none
    restore      the restore pair; None if buffers do not rotate, or if there is no backward pass

    All fields but num_tokens and num_slots are the same on every rank.
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
    """The record that a layer keeps of its last call. All fields are None before the first call.

    l_aux    scalar, the auxiliary loss, on the graph of the call
    counts   its row counts
    ran      how it was run
    """

    l_aux: Tensor | None = None
    counts: LastRowCounts | None = None
    ran: RunReport | None = None

    @staticmethod
    def of(decision: Decision) -> LastCall:
        """Returns the record of a call that was run by ``decision``."""
        routed = decision.routed
        plan = decision.plan
        needs_grad = decision.needs_grad
        routing = routed.routing
        rows_TM = decision.inputs.x_TM
        path = decision.runner.name
        ran = RunReport(
            path=path,
            num_tokens=routed.num_tokens,
            num_slots=routing.expert.numel() if routing.token is None and routing.mix is None else None,
            dtype=rows_TM.dtype,
            device=rows_TM.device,
            forward=len(plan.forward.chunks) if plan is not None and path == "pipeline" else None,
            backward=len(plan.backward.chunks) if plan is not None and needs_grad else None,
            restore=decision.restore if needs_grad else None,
        )
        return LastCall(l_aux=routing.l_aux, counts=decision.counts, ran=ran)
