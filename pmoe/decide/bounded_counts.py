"""Row counts under `pmoe.BoundedSteps`: the device checks that the rows fit, and the host reads no count.

The rows are sent by the persistent kernel through a heap, memory of fixed size that all ranks can write. They
are sent without padding, so a rank may get more rows than its heap has room for. The bound of a call is this
room: the most tokens of a rank, and the most rows that a rank may receive. A call is bounded if the device
compares its rows with the bound. Because the host reads no row count, a CUDA graph can hold a bounded call.

    first call of a kind    the ranks exchange row counts, and agree on the kernels and on the bound
    later calls             the ranks gather all counts on the device. If the rows of any rank do not fit, all
                            ranks drop all rows, and 1 is added to `RowBound.exceeded`

The numbers that ranks gather have a fixed size, so NCCL can gather them in a CUDA graph.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, Decision, HostRowCounts
from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.call.row_bound import AgreedBound, BoundedRows, CallKind, RowBound
from pmoe.comm.counts import RankCounts
from pmoe.comm.failures import at_stage, publishing_failures, wait_for
from pmoe.comm.group_record import collectives
from pmoe.decide.fused_choice import fused_pair, kernels_runner, make_request
from pmoe.decide.fused_counts import FusedCounts
from pmoe.decide.route import cast_dtype, needs_gradients, route_batch
from pmoe.engine.autograd import Runner
from pmoe.engine.lanes.base import watchers
from pmoe.engine.passes.base import Inputs
from pmoe.kernels.flashdmoe import RoutingInput
from pmoe.ordering.sorted import count_rows
from pmoe.runners import fused_steps
from pmoe.runners.fused import NoGradientsRunner, NoTokensRunner
from pmoe.warn import warn_once


def bounded_source(call: Call, bound: RowBound) -> BoundedCounts | FirstBoundedCounts | None:
    """Routes a call of a layer under `pmoe.BoundedSteps`, and returns the source of its row counts.

    call: the call.
    bound: the layer's bound: for how many rows of a rank there is room.

    Returns None if no call of this layer can be bounded: without a warning if the layer has a single rank,
    otherwise with one warning for each reason (`bound_refusal`). All ranks get the same answer if they make
    calls of the same kinds.
    """
    modules = call.modules
    if modules.ranks.size == 1:
        return None  # all rows of a single rank fit
    why = bound_refusal(modules)
    if why is not None:
        warn_once(f"BoundedSteps does not bound a layer, and the host reads row counts, because {why}")
        return None
    if call.replay.is_replay:
        agreed: AgreedChoice | None = call.replay.once(lambda: None)
        is_bounded = agreed is not None and agreed.bounded is not None
    else:
        is_bounded = bound.is_on and kind_of(call) in bound.agreed
    return BoundedCounts(call, bound) if is_bounded else FirstBoundedCounts(call, bound)


def bound_refusal(modules: LayerModules) -> str | None:
    """Returns why no call of a layer can be bounded; None if its calls can. All ranks get the same answer.

    A call is bounded if the device checks that its rows fit into the heap, and the host reads no row count.

    modules: the modules and options of the layer.
    """
    if modules.options.solves:
        return f"pipeline ({modules.options.pipeline!r}) exchanges row counts"
    return modules.refusal("bounded rows")


def kind_of(call: Call) -> CallKind | None:
    """Returns a call's dtype and whether autograd is on, before routing; None if the input is no tensor."""
    x: object = call.x  # a user may pass anything
    if not isinstance(x, Tensor):
        return None
    return CallKind(
        dtype=cast_dtype(call.modules, x) or x.dtype,
        has_grad=torch.is_grad_enabled(),
    )


def graph_refusal(modules: LayerModules, bound: RowBound, x_TM: Tensor, needs_grad: bool) -> str | None:
    """Returns why a CUDA graph cannot hold a call of a layer whose rows are bounded; None if it can.

    modules: the modules and options of the layer.
    bound: the layer's bound.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    needs_grad: whether autograd on this rank needs gradients of the call.
    """
    why = bound_refusal(modules)
    if why is not None:
        return why
    if watchers:
        return "its tasks are being timed, and captured kernels do not run during the capture"
    if not bound.is_on:
        return "its rows are not bounded here: capture it within BoundedSteps.bounded_calls()"
    kind = CallKind(dtype=cast_dtype(modules, x_TM) or x_TM.dtype, has_grad=torch.is_grad_enabled())
    agreed = bound.agreed.get(kind)
    if agreed is None:
        return (
            f"no call with {kind.dtype} and has_grad={kind.has_grad} was made before: make one, outside of "
            "the capture"
        )
    if needs_grad and not agreed.needs_grad:
        return "no rank needed gradients in the calls before: make one that does, outside of the capture"
    if not agreed.steps.is_repeatable:
        return "its heap was closed after the last call of its kind: make one more call before the capture"
    if x_TM.shape[0] > agreed.max_tokens:
        return (
            f"x has {x_TM.shape[0]} tokens, and the heap has room for {agreed.max_tokens}: call the layer "
            "once with as many tokens before the capture"
        )
    return None


class FirstBoundedCounts(FusedCounts):
    """Gets a call's row counts by an exchange, after which the ranks agree on a bound for later calls.

    The bound says how many rows of a rank the heap has room for. The class is for the first call of each kind
    (`CallKind`), for calls that `pmoe.BoundedSteps` repeats because their rows did not fit, and for calls
    outside of its steps.
    """

    def __init__(self, call: Call, bound: RowBound) -> None:
        self._bound = bound
        self._kind = kind_of(call)
        super().__init__(call)

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        agreed = super().agree(modules, inputs)
        if agreed.counts is not None and self._kind is not None:
            self._agree_on_bound(self._kind, agreed.counts, inputs)
        return agreed

    def _agree_on_bound(self, kind: CallKind, counts: RankCounts, inputs: Inputs) -> None:
        """Makes a heap with enough room for calls like this one, and stores its room as the bound.

        Nothing is made or stored if the kernels cannot compute the call, or if an earlier heap has enough
        room. The bound of a kind of calls never shrinks: a later call may again have as many tokens as the
        largest call before, or need gradients. The method is collective if a heap is made.

        kind: the kind of the call.
        counts: the row counts, after the ranks have exchanged them.
        inputs: the rows and parameters of the call.
        """
        modules = self.call.modules
        known = self._bound.agreed.get(kind)
        max_tokens = counts.max_tokens
        needs_grad = counts.needs_grad or (known is not None and known.needs_grad)
        if known is not None:
            grows = max_tokens > known.max_tokens or needs_grad > known.needs_grad
            if not grows and known.steps.is_repeatable:
                return
            max_tokens = max(max_tokens, known.max_tokens)
        if counts.max_rows is None or (needs_grad and fused_pair(modules) is None):
            return  # `find_steps` has warned of the reason
        device = inputs.x_TM.device
        request = make_request(modules, device, inputs.x_TM.dtype, max_tokens, 0, needs_grad)
        steps = fused_steps.steps_for(request)
        if isinstance(steps, str):
            return  # as above
        agreed = AgreedBound(
            steps=steps,
            max_tokens=fused_steps.most_tokens(request),
            room=fused_steps.room_for_rows(request),
            needs_grad=needs_grad,
        )
        self._bound.agree(kind, agreed, steps.repeatable())


class BoundedCounts:
    """The row counts of a bounded call, which stay on the device. Implements `CountsSource`.

    The device compares the rows of every rank with the bound (the room of the heap) on which the ranks agreed
    in an earlier call.

    call     the call
    routed   the call's tokens with their routing
    """

    call: Call
    routed: RoutedBatch

    def __init__(self, call: Call, bound: RowBound) -> None:
        """Routes the call.

        Raises an error on this rank if its input or its routing is wrong. The error is also published. The
        ranks exchange no row counts through the host, so the other ranks find the error only in this report,
        or run into a timeout.
        """
        self.call = call
        self._bound = bound
        with publishing_failures(call.modules.ranks, "the routing of a bounded call"):
            self.routed = route_batch(call)
            if self.routed.failure is not None:
                raise self.routed.failure

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Gathers the row counts of all ranks on the device, and compares them with the room of the heap.

        modules: not used.
        inputs: the rows and parameters of the call.
        """
        kind = kind_of(self.call)
        assert kind is not None
        agreed = self._bound.agreed[kind]
        self._bound.agree(kind, agreed, agreed.steps.repeatable())
        rows = self._gather(agreed)
        self._bound.exceeded.add_(rows.fits.logical_not())
        return AgreedChoice(steps=agreed.steps, bounded=rows)

    def _gather(self, agreed: AgreedBound) -> BoundedRows:
        """Gathers the number of rows of each rank for each expert, and checks that all fit. Collective.

        Each rank sends its row counts and one more number. This number is 0 unless the rank already knows
        that all ranks must drop their rows, for one of three reasons:

        - the rank has more tokens than the bound allows;
        - the rank needs gradients, and no rank needed any in the call in which the bound was agreed;
        - a check of the rank's routing failed. The dropped step is repeated with an exchange of row counts,
          and then raises the check's error.

        agreed: the bound on which the ranks agreed.
        """
        modules = self.call.modules
        ranks = modules.ranks
        experts = modules.options.num_experts
        routed = self.routed
        needs_grad = needs_gradients(self.call, routed.x_TM, *modules.gate.parameters())
        lacks_gradients = needs_grad and not agreed.needs_grad
        counts_1E = count_rows(routed.routing.expert, None, 1, experts)
        own = F.pad(counts_1E[0], (0, 1), value=int(routed.num_tokens > agreed.max_tokens)).int()
        own[-1] += lacks_gradients
        own[-1] += routed.gated.fault
        gathered = own.new_empty(ranks.size * own.numel())
        ranks.count_exchange()
        collectives.begun += 1
        modules.traffic.counts += (ranks.size - 1) * own.numel() * own.element_size()
        with at_stage("the exchange of bounded row counts", ranks):
            work = dist.all_gather_into_tensor(gathered, own, group=ranks.group, async_op=True)
            wait_for(work, ranks.group, own.is_cuda)
        everyone = gathered.view(ranks.size, -1)
        counts_WPE = everyone[:, :experts].long().view(ranks.size, ranks.size, -1)
        fits = (counts_WPE.sum((0, 2)).max() <= agreed.room) & (everyone[:, experts] == 0).all()
        return BoundedRows(
            fits=fits,
            send_1PE=counts_1E.view(1, ranks.size, -1),
            recv_1PE=counts_WPE[:, ranks.rank].unsqueeze(0),
            bound=agreed,
            lacks_gradients=lacks_gradients,
        )

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Returns the decision to run by the persistent kernel, which drops all rows if they do not fit.

        modules: not used, because the kernel takes the layer's own experts.
        inputs: the rows and parameters of the call.
        agreed: the result of `agree`.
        """
        rows = agreed.bounded
        assert rows is not None
        own_modules = self.call.modules
        bound = rows.bound
        expert_TK = self.routed.routing.expert
        is_large = expert_TK.shape[0] > bound.max_tokens
        if is_large:
            expert_TK = expert_TK[:0]
        keep_TK = rows.fits.expand(expert_TK.shape).contiguous()
        runner: Runner = kernels_runner(
            own_modules, bound.steps, RoutingInput(expert_TK=expert_TK.contiguous(), keep_TK=keep_TK)
        )
        if is_large:
            runner = NoTokensRunner(runner)
        if rows.lacks_gradients:
            runner = NoGradientsRunner(runner)
        counts = RankCounts(
            send=rows.send_1PE,
            recv=rows.recv_1PE,
            recv_device=rows.recv_1PE,
            max_tokens=bound.max_tokens,
            needs_grad=bound.needs_grad or rows.lacks_gradients,
        )
        return Decision(
            call=self.call,
            routed=self.routed,
            inputs=inputs,
            runner=runner,
            counts=HostRowCounts(counts, counts.max_tokens),
            restore=fused_pair(own_modules),
        )
