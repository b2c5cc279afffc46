"""Row counts of a call on one rank: GPU kernels compute the counts, which stay on the device.

The kernels also route and sort the rows. The host therefore does not wait for the device. The call is
computed by the kernels of `pmoe.runners.one_rank`, or by fused kernels if the layer asks for them.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, Decision, HostRowCounts
from pmoe.call.module_calls import is_watched
from pmoe.call.modules import LayerModules
from pmoe.call.routed import CheckedRouting, RoutedBatch
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.comm.counts import RankCounts
from pmoe.decide.fused_choice import (
    defer_routing,
    fused_pair,
    kernels_runner,
    make_request,
    may_fuse,
    stacked,
)
from pmoe.decide.route import apply_start_callbacks, autocast_dtype, check_num_experts, needs_gradients
from pmoe.engine.autograd import Runner
from pmoe.engine.passes.base import Inputs
from pmoe.gates.base import Routing, without_autocast
from pmoe.gates.logits import logits_and_rows
from pmoe.gates.topk import TopKGate
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.flashdmoe import RoutingInput
from pmoe.kernels.route import DeferredRouting, Routes, route
from pmoe.runners import fused_steps, one_rank
from pmoe.runners.one_rank import OneRankRunner


class OneRankCounts:
    """Routes a call on one rank by GPU kernels, and keeps the row counts on the device.

    The class implements `CountsSource`, the interface of all sources of row counts.

    call     the call
    routed   the call's tokens with their routing
    """

    call: Call
    routed: RoutedBatch

    def __init__(self, call: Call, x: Tensor, x_TM: Tensor, agreed: AgreedChoice) -> None:
        """Routes the call by GPU kernels, now or as a part of the persistent kernel, which runs later.

        call: the call.
        x: (..., M), the input after the callbacks' ``before_moe_start``; M is d_model.
        x_TM: (T, M), the T rows of x.
        agreed: which kernels compute the call: fused kernels, whose operators are ``agreed.steps``, or the
            kernels of `pmoe.runners.one_rank` if ``agreed.steps`` is None.
        """
        self.call = call
        modules = call.modules
        self._agreed = agreed
        self._routes, self._deferred, rows_TM = call.replay.route(x_TM, lambda: _routes(call, x_TM, agreed))
        routes = self._routes
        check_num_experts(modules, routes.counts_nE.shape[-1])
        routing = Routing(expert=routes.expert_TK, weight=routes.weight_TK, l_aux=routes.l_aux)
        self.routed = RoutedBatch(
            x=x,
            x_TM=x_TM,
            gated=CheckedRouting(routing=routing, rows_TM=rows_TM),
            autocast=autocast_dtype(x),
            needs_grad=needs_gradients(call, x, *modules.gate.parameters()),
        )

    @staticmethod
    def of(call: Call) -> OneRankCounts | None:
        """Routes a call by GPU kernels that need no other rank, and returns the source of its row counts.

        Returns None if neither the kernels of `pmoe.runners.one_rank` nor fused kernels can compute the call.
        The caller must then take another source (`pmoe.decide.sources`).
        """
        modules = call.modules
        replay = call.replay
        reference = call.reference
        on_host = reference is not None and reference.device.type not in one_rank.DEVICES
        if is_watched(modules.gate) or (on_host and not modules.options.fused):
            return None
        x = apply_start_callbacks(call)
        x_TM = x.reshape(-1, modules.options.d_model)
        if replay.is_replay:
            agreed: AgreedChoice | None = replay.once(lambda: None)
            if agreed is None or agreed.counts is not None or agreed.choice is not None:
                return None
        else:
            with hidden_from_checkpoints():
                agreed = _kernels(call, x_TM)
        return None if agreed is None else OneRankCounts(call, x, x_TM, agreed)

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Returns the choice of kernels that the constructor got. There is no other rank to agree with.

        modules, inputs: not used.
        """
        return self._agreed

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Returns the decision to run by `pmoe.runners.one_rank`, or by fused kernels if they were chosen.

        modules: not used, because the kernels take the layer's own experts.
        inputs: the rows and parameters of the call.
        agreed: the choice of kernels.
        """
        own_modules = self.call.modules
        routes = self._routes
        counts_E = routes.counts_nE[0].view(1, 1, -1)
        counts = RankCounts(
            send=counts_E,
            recv=counts_E,
            recv_device=counts_E,
            max_tokens=self.routed.num_tokens,
            needs_grad=self.routed.needs_grad,
        )
        runner: Runner = OneRankRunner(routes, stacked(own_modules).activation)
        if agreed.steps is not None:
            chosen = RoutingInput(expert_TK=routes.expert_TK, deferred=self._deferred)
            runner = kernels_runner(own_modules, agreed.steps, chosen, self._fused_routing)
        return Decision(
            call=self.call,
            routed=self.routed,
            inputs=inputs,
            runner=runner,
            counts=HostRowCounts(counts, counts.max_tokens),
            restore=None if agreed.steps is None else fused_pair(own_modules),
        )

    def _fused_routing(self) -> FusedRouting:
        """Returns the routing and the row counts in the form that COMET's fused kernels need."""
        routes = self._routes
        return FusedRouting(
            rank=0,
            expert_TK=routes.expert_TK,
            position_TK=routes.position_TK,
            slot_S=routes.slot_N,
            send_WE=routes.counts_nE,
            recv_WE=routes.counts_nE,
            num_received=routes.slot_N.numel(),
        )


def _kernels(call: Call, x_TM: Tensor) -> AgreedChoice | None:
    """Returns which kernels compute a call on one rank; None if no kernels can compute it.

    If the result has ``steps``, fused kernels compute the call, and ``steps`` are the operators that launch
    them. Otherwise the kernels of `pmoe.runners.one_rank` compute the call.

    call: the call.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    """
    modules = call.modules
    dtype = autocast_dtype(x_TM) or x_TM.dtype
    needs_grad = needs_gradients(call, x_TM, *modules.gate.parameters())
    if not may_fuse(modules, x_TM.device, dtype):
        return AgreedChoice() if kernels_refusal(modules, x_TM, needs_grad) is None else None
    if modules.refusal("one rank's counts") is not None or fused_pair(modules) is None:
        return None
    if modules.options.fused == "forward" and needs_grad:
        return None  # the pipeline engine computes the backward pass, and needs the counts on the host
    count = x_TM.shape[0]
    request = make_request(modules, x_TM.device, dtype, count, count * modules.options.top_k, needs_grad)
    steps = fused_steps.steps_for(request)
    return None if isinstance(steps, str) else AgreedChoice(steps=steps)


def kernels_refusal(modules: LayerModules, x_TM: Tensor, needs_grad: bool) -> str | None:
    """Returns why the kernels of `pmoe.runners.one_rank` cannot compute a call; None if they can.

    modules: the modules and options of the layer.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    needs_grad: whether autograd needs gradients of the call.
    """
    return modules.refusal("one rank") or one_rank.kernel_refusal(
        cast(TopKGate, modules.gate),
        stacked(modules),
        x_TM,
        autocast_dtype(x_TM) or x_TM.dtype,
        ranks=modules.ranks,
        needs_grad=needs_grad,
    )


def _routes(
    call: Call, x_TM: Tensor, agreed: AgreedChoice
) -> tuple[Routes, DeferredRouting | None, Tensor | None]:
    """Returns three values: the routing of a call, a `DeferredRouting`, and rows for the experts.

    The second value is None if this function computes the routing. Otherwise the persistent kernel will
    compute it, and the tensors of the routing have no values until that kernel is launched.

    The third value is the rows that the experts take, (T, M), or None if they take ``x_TM``. The rows have
    the same values as ``x_TM``, but for autograd they are an output of the gate. So backward passes the
    experts' gradient of the rows to the gate. The gate adds its own gradient of the tokens, and rounds once
    (`pmoe.gates.logits.LogitsAndRows`).

    call: the call.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    agreed: which kernels compute the call.
    """
    if agreed.steps is not None and (deferred := defer_routing(call, x_TM)) is not None:
        return deferred.routes, deferred, None
    gate = cast(TopKGate, call.modules.gate)
    # The gate's backward adds to the experts' gradient in place. It may do so only with `OneRankRunner`:
    # nothing else reads the memory that this runner returns. A checkpoint that records the routing would keep
    # the tokens in memory, too.
    adds = agreed.steps is None and autocast_dtype(x_TM) in (None, x_TM.dtype)
    adds = adds and not call.replay.is_record
    with without_autocast(x_TM.device.type):
        logits_TE, rows_TM = logits_and_rows(x_TM, gate.weight, adds=adds)
        routes = one_rank.route_tokens(gate, logits_TE, route)
    if call.may_run_again:
        from pmoe.checkpointing.routing_check import refuse_changed_routing

        refuse_changed_routing(call.layer, x_TM.shape[0], routes.expert_TK)
    return routes, None, rows_TM
