"""Row counts of the persistent kernel's calls under `pmoe.BoundedSteps`: the host reads no count.

The rows are sent by the persistent kernel through a heap, memory of fixed size that all ranks can write. They
are sent without padding, so a rank may get more rows than its heap has room for. The bound of a call is this
room: the most tokens of a rank, and the most rows that a rank may receive. A call is bounded if the device
compares its rows with the bound (`pmoe.decide.bounded_calls`).

    first call of a kind    the ranks exchange row counts, and agree on the kernels and on the bound
    later calls             the ranks gather all counts on the device. If the rows of any rank do not fit, all
                            ranks drop all rows, and 1 is added to `RowBound.exceeded`
"""

from __future__ import annotations

from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, Decision, HostRowCounts
from pmoe.call.modules import LayerModules
from pmoe.call.row_bound import BoundedRows, CallKind, KernelBound, RowBound
from pmoe.comm.counts import RankCounts
from pmoe.decide.bounded_calls import (
    BoundedSource,
    bound_of_call,
    kind_of,
    kind_refusal,
    meet_at_change,
    warn_of_mixed_calls,
    warn_unbounded,
    was_bounded,
)
from pmoe.decide.fused_choice import fused_pair, kernels_runner, make_request
from pmoe.decide.fused_counts import FusedCounts
from pmoe.engine.autograd import Runner
from pmoe.engine.passes.base import Inputs
from pmoe.kernels.flashdmoe import RoutingInput
from pmoe.runners import fused_steps
from pmoe.runners.fused import NoGradientsRunner, NoTokensRunner


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
        warn_unbounded(why)
        return None
    if call.replay.is_replay:
        is_bounded = was_bounded(call)
    else:
        is_bounded = isinstance(bound_of_call(call, bound), KernelBound)
    meet_at_change(call, bound, is_bounded)
    return BoundedCounts(call, bound) if is_bounded else FirstBoundedCounts(call, bound)


def bound_refusal(modules: LayerModules) -> str | None:
    """Returns why no call of a layer can be bounded; None if its calls can. All ranks get the same answer.

    A call is bounded if the device checks that its rows fit into the heap, and the host reads no row count.

    modules: the modules and options of the layer.
    """
    if modules.options.solves:
        return f"pipeline ({modules.options.pipeline!r}) exchanges row counts"
    return modules.refusal("bounded rows")


def graph_refusal(modules: LayerModules, bound: RowBound, x_TM: Tensor, needs_grad: bool) -> str | None:
    """Returns why a CUDA graph cannot hold a call of a layer whose rows are bounded; None if it can.

    modules: the modules and options of the layer.
    bound: the layer's bound.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    needs_grad: whether autograd on this rank needs gradients of the call.
    """
    return bound_refusal(modules) or kind_refusal(modules, bound, x_TM, needs_grad)


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

        Nothing is made or stored if the kernels cannot compute the call, if an earlier heap has enough room,
        or if autograd is on in some ranks' call and off in others': each rank would store another kind. The
        bound of a kind of calls never shrinks: a later call may again have as many tokens as the largest call
        before, or need gradients. The method is collective if a heap is made.

        kind: the kind of the call.
        counts: the row counts, after the ranks have exchanged them.
        inputs: the rows and parameters of the call.
        """
        modules = self.call.modules
        if modules.ranks.grad_modes_differ:
            warn_of_mixed_calls()
            return
        known = self._bound.agreed.get(kind)
        max_tokens = counts.max_tokens
        needs_grad = counts.needs_grad or (known is not None and known.needs_grad)
        if known is not None:
            grows = max_tokens > known.max_tokens or needs_grad > known.needs_grad
            if not grows and known.is_repeatable and isinstance(known, KernelBound):
                return
            max_tokens = max(max_tokens, known.max_tokens)
        if counts.max_rows is None or (needs_grad and fused_pair(modules) is None):
            return  # `find_steps` has warned of the reason
        device = inputs.x_TM.device
        request = make_request(modules, device, inputs.x_TM.dtype, max_tokens, 0, needs_grad)
        steps = fused_steps.steps_for(request)
        if isinstance(steps, str):
            return  # as above
        agreed = KernelBound(
            steps=steps,
            max_tokens=fused_steps.most_tokens(request),
            room=fused_steps.room_for_rows(request),
            needs_grad=needs_grad,
        )
        self._bound.agree(kind, agreed, may_run_again=self.call.may_run_again)


class BoundedCounts(BoundedSource):
    """The row counts of a bounded call, which stay on the device. Implements `CountsSource`.

    The device compares the rows of every rank with the bound (the room of the heap) on which the ranks agreed
    in an earlier call.
    """

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Gathers the row counts of all ranks on the device, and compares them with the room of the heap.

        modules: not used.
        inputs: the rows and parameters of the call.
        """
        agreed = self.agreed_bound()
        assert isinstance(agreed, KernelBound)
        rows = self._compare(agreed)
        self.bound.exceeded.add_(rows.fits.logical_not())
        return AgreedChoice(steps=agreed.steps, bounded=rows)

    def _compare(self, agreed: KernelBound) -> BoundedRows:
        """Gathers the row counts of all ranks, and checks that the rows of each rank fit. Collective.

        agreed: the bound on which the ranks agreed.
        """
        ranks = self.call.modules.ranks
        gathered = self.gather(agreed, chunks=1)
        counts_WPE = gathered.all_WnE.view(ranks.size, ranks.size, -1)
        fits = (counts_WPE.sum((0, 2)).max() <= agreed.room) & gathered.is_allowed
        return BoundedRows(
            fits=fits,
            send_nPE=gathered.own_nE.view(1, ranks.size, -1),
            recv_nPE=counts_WPE[:, ranks.rank].unsqueeze(0),
            bound=agreed,
            lacks_gradients=gathered.lacks_gradients,
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
        assert isinstance(bound, KernelBound)
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
        counts = self.rank_counts(rows)
        return Decision(
            call=self.call,
            routed=self.routed,
            inputs=inputs,
            runner=runner,
            counts=HostRowCounts(counts, counts.max_tokens),
            restore=fused_pair(own_modules),
        )
