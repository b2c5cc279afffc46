"""The records of how a call will be run, and of what the layer keeps of the call afterwards.

A call takes these steps, in this order. Each of the methods returns the record on the right.
`Decision.runner` is no method: it is a field that holds the runner object.

    CountsSource.agree       agrees on numbers with all ranks; the host may wait              AgreedChoice
    CountsSource.decision    decides the rest without communication or waiting                Decision
    Decision.runner          the runner sends the rows and computes the experts; it decides nothing
    LastCall.of              keeps what `layer.ran`, `layer.row_counts` and statistics show   LastCall
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
    from pmoe.call.row_bound import BoundedRows
    from pmoe.engine.plan.copies import HostedCopies
    from pmoe.kernels.comet.backend import Steps
    from pmoe.program.backend import Programs


IN_CHUNKS: tuple[Path, ...] = ("pipeline", "program")
"""The paths whose forward pass runs in chunks."""


class LastRowCounts(Protocol):
    """The interface of the row counts of a layer's last call. Reading them may wait for the device.

    max_tokens   the largest number of tokens of any rank
    rows()       how many rows were sent and received, on the host; rows of padding are included
    kept_E()     (E,) int64 on the host: how many rows of this rank's tokens went to each of the E experts
                 of all ranks. Dropped choices and padding do not count
    """

    @property
    def max_tokens(self) -> int: ...
    def rows(self) -> RankCounts: ...
    def kept_E(self) -> Tensor: ...


@dataclass(frozen=True)
class HostRowCounts:
    """The row counts of one call, kept for users who read them after the call. Implements `LastRowCounts`.

    shared          how many rows are sent and received, padding included. These counts are on the host,
                    except in two cases: the layer runs on a single rank whose kernels sort the rows, or
                    `pmoe.BoundedSteps` bounds the call. They are then on the device, and change with each
                    replay of a CUDA graph
    max_tokens      the largest number of tokens of any rank
    kept_device_E   (E,) on the device: for each of the E experts of all ranks, this rank's rows that are
                    not padding; None if there is no padding
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


class AgreedChoice(NamedTuple):
    """The numbers and operators on which all ranks agreed for a call.

        counts   row counts of the call; None if the host does not need them
        choice   the numbers of chunks of both passes and the restore pair (how backward gets the experts'
                 input and hidden activation); None if neither pass is cut into chunks
        steps    the operators of the fused kernels; None if fused kernels compute neither pass
        copies   the copies of busy experts on all ranks, and which of them this rank hosts and sends; None
                 for no copies
        programs the pass programs that run the chunks; None if the engine runs them
        bounded  the rows of a call whose row counts the host does not read, because `pmoe.BoundedSteps`
                 bounds them; None for other calls

    The second pass of activation checkpointing takes this record and the routing from the first pass. All
    other decisions follow from these two without communication.
    """

    counts: RankCounts | None = None
    choice: Choice | None = None
    steps: Steps | None = None
    copies: HostedCopies | None = None
    programs: Programs | None = None
    bounded: BoundedRows | None = None


class CountsSource(Protocol):
    """The interface of an object that provides the row counts of one call.

    Building the object routes the tokens of the call.

        call     the call
        routed   its tokens with their routing

    Both methods have these arguments:

        modules  the modules that the schedule computes, with the experts that were really called. These
                 experts may differ from those of ``call.modules``: a tool such as PEFT may wrap the layer's
                 experts in a module that holds several `Experts` and calls any of them
        inputs   the rows and parameters of the call
    """

    call: Call
    routed: RoutedBatch

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Returns the numbers on which all ranks must agree: row counts, numbers of chunks, and the restore
        pair.

        The restore pair says how backward gets the experts' input and hidden activation. The method may start
        collectives, and the host may wait for them. The second pass of activation checkpointing does not call
        this method: it uses the numbers of the first pass.

        modules: the modules that the schedule computes.
        inputs: the rows and parameters of the call.
        """

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Returns how the call will be run. This follows from the agreed numbers, without communication.

        No collective is started, and the host does not wait.

        modules: the modules that the schedule computes.
        inputs: the rows and parameters of the call.
        agreed: the result of `agree`, perhaps from the first pass of activation checkpointing.
        """


class Decision(NamedTuple):
    """Everything that is needed to run one call.

    call      the call
    routed    its tokens with their routing
    inputs    the rows and parameters, cast to the dtype in which the experts compute
    runner    the object that computes the experts' output (T_O) from ``inputs``, and the gradients
    counts    row counts, for users who read them after the call
    plan      the chunks of both passes; None if neither pass is cut into chunks
    restore   the restore pair: how backward gets the experts' input and hidden activation. None if every
              buffer has memory of its own (no ring slots) and kernels are not fused
    balance   what copies of busy experts do in the call; None if the layer has no ``balance``
    degree    number of chunks of both passes, if they are cut without a plan: `pmoe.BoundedSteps` bounds the
              call, so the host does not know its row counts. Else None
    """

    call: Call
    routed: RoutedBatch
    inputs: Inputs
    runner: Runner
    counts: HostRowCounts
    plan: Plan | None = None
    restore: Restore | None = None
    balance: BalanceReport | None = None
    degree: int | None = None

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow, on this rank or any other."""
        return self.counts.shared.needs_grad


# ---- what a layer keeps of its last call


@dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """The record of what copies of busy experts did in a call. It is the same on every rank.

    before        rows of the busiest rank divided by the mean over ranks, as it would be without copies
    after         the same ratio with the copies, as planned; equal to ``before`` if there are no copies
    copies        number of copies on all ranks together
    weight_bytes  bytes of the copies' weights that the ranks send before the call, all ranks together; 0 if
                  the ranks kept these weights from an earlier call

    In training the ranks send two more things, which weight_bytes does not count:

    - the gradients of the copies' weights, which have as many bytes as the weights;
    - the weights a second time, in backward, if memory_reuse sends the experts' inputs again and no later
      call uses the copies.
    """

    before: float
    after: float
    copies: int
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The record of how a call was run, after all choices and fallbacks.

        path         the kind of runner that computed the call (`pmoe.engine.autograd.Path`)
        num_tokens   number of this rank's tokens
        num_slots    number of (token, choice) pairs of this rank, dropped ones included; None if the gate
                     returns only pairs that it keeps, or mixes tokens
        dtype        dtype of the rows that reached the experts
        device       device of the rows
        forward      number of chunks of the forward pass, which may be larger than the chosen number under
                     skewed routing; None if the pass was not cut into chunks
        backward     number of chunks of the backward pass; None if it is not cut, or if there is none
        restore      the restore pair: how backward gets the experts' input and hidden activation; None if
                     every buffer has memory of its own (no ring slots), or if there is no backward pass
        balance      what copies of busy experts did; None if the layer has no ``balance``

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
    balance: BalanceReport | None = None


@dataclass(frozen=True, kw_only=True)
class LastCall:
    """The record that a layer keeps of its last call. All fields are None before the first call.

    l_aux    the auxiliary loss, a scalar on the autograd graph of the call
    counts   the call's row counts
    ran      how the call was run
    """

    l_aux: Tensor | None = None
    counts: LastRowCounts | None = None
    ran: RunReport | None = None

    def with_loss(self, l_aux: Tensor | None) -> LastCall:
        """Returns the record with another auxiliary loss."""
        return replace(self, l_aux=l_aux)

    @staticmethod
    def of(decision: Decision) -> LastCall:
        """Returns the record that the layer keeps of a call, after the call was run as ``decision`` says."""
        plan = decision.plan
        needs_grad = decision.counts.shared.needs_grad
        routing = decision.routed.gated.routing
        rows_TM = decision.inputs.x_TM
        path = decision.runner.name
        ran = RunReport(
            path=path,
            num_tokens=decision.routed.x_TM.shape[0],
            num_slots=routing.expert.numel() if routing.token is None and routing.mix is None else None,
            dtype=rows_TM.dtype,
            device=rows_TM.device,
            forward=decision.degree if plan is None or path not in IN_CHUNKS else len(plan.forward.chunks),
            backward=(decision.degree if plan is None else len(plan.backward.chunks)) if needs_grad else None,
            restore=decision.restore if needs_grad else None,
            balance=decision.balance,
        )
        return LastCall(l_aux=routing.l_aux, counts=decision.counts, ran=ran)
