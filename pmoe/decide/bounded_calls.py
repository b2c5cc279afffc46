"""The parts that bounded calls of all kinds share: routing, row counts, and reasons against a capture.

A call is bounded if the device compares its rows with the room for them, and the host reads no row count. So
a CUDA graph can hold the call. The room is a bound on which the ranks agreed in an earlier call. Two kinds of
layers have bounded calls:

    layer                                     source of the row counts
    fused="persistent"                        `pmoe.decide.bounded_counts.BoundedCounts`
    Switches(program=True,                    `pmoe.decide.bounded_program_counts.BoundedProgramCounts`
        program_heaps=True)

In both, the ranks gather all row counts on the device. If the rows of any rank do not fit, all ranks drop all
rows, and 1 is added to `RowBound.exceeded`. The numbers that ranks gather have a fixed size, so NCCL can
gather them in a CUDA graph.

Ranks may by mistake make calls of different kinds, for example if one rank calls a layer under torch.no_grad.
There are three cases:

    one rank bounds its rows, another          they would wait in different collectives. So a rank waits for
    exchanges row counts                       all ranks in the store before a call that is bounded, if the
                                               layer's last call was not, and the reverse (`meet_at_change`)
    all ranks bound their rows                 the gathered numbers have a header. If the headers differ, all
                                               ranks raise on the CPU. On a GPU they drop all rows
    all ranks exchange row counts              they agree on no bound (`Ranks.grad_modes_differ`)

Letters: T tokens, n chunks, W ranks, E experts of all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice
from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.call.row_bound import AgreedBound, BoundedRows, CallKind, RowBound
from pmoe.comm.counts import (
    TRAINING,
    WANTS_GRADIENTS,
    RankCounts,
    check_headers,
    heading,
)
from pmoe.comm.failures import at_stage, meet, publishing_failures, wait_for
from pmoe.comm.group_options import has_peers
from pmoe.comm.group_record import collectives
from pmoe.decide.route import cast_dtype, check_input, needs_gradients, route_batch
from pmoe.engine.lanes.base import watchers
from pmoe.ordering.sorted import count_rows
from pmoe.warn import warn_once


def warn_unbounded(why: str) -> None:
    """Warns that the calls of a layer are not bounded, once for each reason.

    why: the reason. Two texts count as one reason if they are equal up to the first colon.
    """
    warn_once(f"BoundedSteps does not bound a layer, and the host reads row counts, because {why}")


def kind_of(call: Call) -> CallKind | None:
    """Returns a call's dtype and whether autograd is on, before routing; None if the input is no tensor."""
    x: object = call.x  # a user may pass anything
    return kind_with(call.modules, x) if isinstance(x, Tensor) else None


def kind_with(modules: LayerModules, x: Tensor) -> CallKind:
    """Returns the kind of a call with an input, (..., M) with M = d_model."""
    return CallKind(dtype=cast_dtype(modules, x) or x.dtype, has_grad=torch.is_grad_enabled())


def bound_of_call(call: Call, bound: RowBound) -> AgreedBound | None:
    """Returns the numbers on which the ranks agreed for a call; None if the ranks must exchange row counts.

    If the input is wrong on this rank alone, the other ranks may make a bounded call, and would wait in
    another collective than this rank. So the result is then the bound of other calls, with the same autograd
    mode. `BoundedSource` publishes the error.

    call: the call, before routing.
    bound: the layer's bound.
    """
    if not bound.is_on:
        return None
    kind = kind_of(call)
    agreed = None if kind is None else bound.usable(kind)
    if agreed is None and _has_wrong_input(call):
        has_grad = torch.is_grad_enabled()
        others = (bound.usable(other) for other in bound.agreed if other.has_grad == has_grad)
        agreed = next(others, None)
    return agreed


def _has_wrong_input(call: Call) -> bool:
    """Returns whether the layer refuses the input of a call."""
    try:
        check_input(call.modules, call.x, call.reference)
    except (TypeError, ValueError):
        return True
    return False


def meet_at_change(call: Call, bound: RowBound, is_bounded: bool) -> None:
    """Waits for all ranks, if this call is bounded and the layer's last call was not, or the reverse.

    Steps of a training run only make bounded calls, so they do not wait. The ranks wait in the store, and
    communicate nothing else.

    call: the call.
    bound: the layer's bound.
    is_bounded: whether this rank bounds the call. Otherwise the rank exchanges row counts.

    Raises RuntimeError on the CPU, on all ranks, if they do not make the same call. On a GPU the rank that
    waits here raises it after the group's timeout, or as soon as a peer has found out.
    """
    if call.replay.is_replay or is_bounded == bound.was_bounded:
        return  # a replay repeats the decisions of the first pass, and exchanges nothing
    ranks = call.modules.ranks
    if ranks.group is not None and has_peers(ranks.group):
        place = "within" if bound.is_on else "outside of"
        autograd = "on" if torch.is_grad_enabled() else "off (torch.no_grad)"
        does = "bounds its rows" if is_bounded else "exchanges its row counts"
        why = (
            f"calls {ranks.layer} {place} the steps of BoundedSteps, with autograd {autograd}, and {does}, "
            f"and other ranks do not: {SAME_CALLS}"
        )
        meet(ranks, why, compares=False)
    bound.was_bounded = is_bounded


SAME_CALLS = (
    "every rank must call a layer with autograd on, or every rank with it off, and every rank within "
    "BoundedSteps.step, or every rank outside of it"
)
"""The end of messages about ranks that make calls of different kinds. It says what all ranks must do."""


def warn_of_mixed_calls() -> None:
    """Warns that ranks agreed on no bound, because autograd was on in some ranks' call and off in others'."""
    warn_unbounded(f"ranks have called it with autograd on and off: {SAME_CALLS}")


def was_bounded(call: Call) -> bool:
    """Returns whether the first run of a call was bounded, in the second run of activation checkpointing."""
    agreed: AgreedChoice | None = call.replay.once(lambda: None)
    return agreed is not None and agreed.bounded is not None


def kind_refusal(modules: LayerModules, bound: RowBound, x_TM: Tensor, needs_grad: bool) -> str | None:
    """Returns why a CUDA graph cannot hold a call of a layer whose calls can be bounded; None if it can.

    modules: the modules and options of the layer.
    bound: the layer's bound.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    needs_grad: whether autograd on this rank needs gradients of the call.
    """
    if watchers:
        return "its tasks are being timed, and captured kernels do not run during the capture"
    if not bound.is_on:
        return "its rows are not bounded here: capture it within BoundedSteps.bounded_calls()"
    kind = kind_with(modules, x_TM)
    agreed = bound.usable(kind)
    if agreed is None:
        return (
            f"no call with {kind.dtype} and has_grad={kind.has_grad} was made before: make one, outside of "
            "the capture"
        )
    if needs_grad and not agreed.needs_grad:
        return "no rank needed gradients in the calls before: make one that does, outside of the capture"
    if not agreed.is_repeatable:
        return "its heap was closed after the last call of its kind: make one more call before the capture"
    if x_TM.shape[0] > agreed.max_tokens:
        return (
            f"x has {x_TM.shape[0]} tokens, and the heap has room for {agreed.max_tokens}: call the layer "
            "once with as many tokens before the capture"
        )
    return None


class GatheredCounts(NamedTuple):
    """The row counts of all ranks, on the device.

    own_nE           (n, E) int64, the rows of this rank's tokens for each expert, by chunk
    all_WnE          (W, n, E) int64, the same numbers of all ranks
    is_allowed       bool scalar: whether no rank knows a reason why all ranks must drop their rows
    lacks_gradients  whether this rank needs gradients, and no rank needed any when the ranks agreed
    """

    own_nE: Tensor
    all_WnE: Tensor
    is_allowed: Tensor
    lacks_gradients: bool


class BoundedSource:
    """The routed tokens of a bounded call. The base of the sources of row counts of bounded calls.

    call     the call
    routed   the call's tokens with their routing
    bound    the layer's bound
    """

    call: Call
    routed: RoutedBatch
    bound: RowBound

    def __init__(self, call: Call, bound: RowBound) -> None:
        """Routes the call.

        Raises an error on this rank if its input or its routing is wrong. The error is also published. The
        ranks exchange no row counts through the host, so the other ranks find the error only in this report,
        or run into a timeout.
        """
        self.call = call
        self.bound = bound
        with publishing_failures(call.modules.ranks, "the routing of a bounded call"):
            self.routed = route_batch(call)
            if self.routed.failure is not None:
                raise self.routed.failure

    def agreed_bound(self) -> AgreedBound:
        """Returns the bound on which the ranks agreed for calls of this kind. May be a collective."""
        kind = kind_of(self.call)
        assert kind is not None
        agreed = self.bound.agreed[kind]
        self.bound.find_heaps_of(agreed)
        return agreed

    def rank_counts(self, rows: BoundedRows) -> RankCounts:
        """Returns the row counts of the call for users who read them after it. They stay on the device."""
        return RankCounts(
            send=rows.send_nPE,
            recv=rows.recv_nPE,
            recv_device=rows.recv_nPE,
            max_tokens=rows.bound.max_tokens,
            needs_grad=rows.bound.needs_grad or rows.lacks_gradients,
        )

    def gather(self, agreed: AgreedBound, chunks: int) -> GatheredCounts:
        """Gathers the number of rows of each rank for each expert. Collective. The host does not wait.

        Each rank sends its row counts and three more numbers. Two of them say what kind of call the rank
        makes, as the header of an exchange of row counts does (`pmoe.comm.counts.heading`). The third one is
        0 unless the rank already knows that all ranks must drop their rows, for one of three reasons:

        - the rank has more tokens than the bound allows;
        - the rank needs gradients, and no rank needed any in the call in which the bound was agreed;
        - a check of the rank's routing failed. The dropped step is repeated with an exchange of row counts,
          and then raises the check's error.

        If the ranks make calls of different kinds, all ranks drop their rows, too.

        agreed: the bound on which the ranks agreed.
        chunks: n, the number of chunks in which rows are counted.

        Raises FaultError on the CPU, on all ranks, if ranks make calls of different kinds, and a rank needs
        gradients: the ranks cannot run the backward pass together.
        """
        modules = self.call.modules
        ranks = modules.ranks
        experts = modules.options.num_experts
        routed = self.routed
        needs_grad = needs_gradients(self.call, routed.x_TM, *modules.gate.parameters())
        lacks_gradients = needs_grad and not agreed.needs_grad
        counts_nE = count_rows(routed.routing.expert, None, chunks, experts)
        *_, mode, kind = heading(
            ranks,
            routed.num_tokens,
            routed.dtype,
            0,
            needs_grad=needs_grad,
            training=self.call.layer.training,
            sorts_results=False,
        ).header
        # Each number is an argument of a kernel that fills memory, so a CUDA graph can hold the launches.
        own = counts_nE.new_empty(counts_nE.numel() + 3, dtype=torch.int32)
        own[:-3] = counts_nE.flatten()
        own[-3] = int(routed.num_tokens > agreed.max_tokens) + int(lacks_gradients)
        own[-3] += routed.gated.fault
        own[-2] = mode
        own[-1] = kind
        gathered = own.new_empty(ranks.size * own.numel())
        ranks.count_exchange()
        collectives.begun += 1
        modules.traffic.counts += (ranks.size - 1) * own.numel() * own.element_size()
        with at_stage("the exchange of bounded row counts", ranks):
            work = dist.all_gather_into_tensor(gathered, own, group=ranks.group, async_op=True)
            wait_for(work, ranks.group, own.is_cuda)
        everyone = gathered.view(ranks.size, -1)
        modes_W, kinds_W = everyone[:, -2], everyone[:, -1]
        if not own.is_cuda:
            check_headers(modes_W.tolist(), kinds_W.tolist(), ranks)
        # A rank may be in training mode alone, and parameters may be frozen on some ranks only.
        modes_W = modes_W & ~(TRAINING | WANTS_GRADIENTS)
        are_same = ((modes_W == modes_W[0]) & (kinds_W == kinds_W[0])).all()
        return GatheredCounts(
            own_nE=counts_nE,
            all_WnE=everyone[:, :-3].long().view(ranks.size, chunks, experts),
            is_allowed=(everyone[:, -3] == 0).all() & are_same,
            lacks_gradients=lacks_gradients,
        )
