"""Row counts of a call whose rows are padded to capacity: the number of tokens says where rows go.

No counts are exchanged and the host waits for nothing. Ranks compare the number of tokens, and tell each
other of faults, at every call on the CPU, and on CUDA at the first call of a kind or where a checkpoint
routes again.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from pmoe.comm.counts import CountsExchange, Fault, RankCounts
from pmoe.engine.cut import Orders
from pmoe.engine.padding import PaddedKind, Splits, check_same_calls, make_padding
from pmoe.engine.passes import Inputs
from pmoe.gates.base import Routing
from pmoe.gates.capacity import expert_capacity
from pmoe.kernels.flashdmoe import Chosen
from pmoe.kernels.route import Promise
from pmoe.layer.choose import choose
from pmoe.layer.decision import Agreed, CallCounts, Decision, RoutedCall
from pmoe.layer.exact_counts import in_chunks, shared_counts
from pmoe.layer.fused import find_steps, kernels_runner, may_fuse, promised
from pmoe.layer.parts import Call, Parts, cast_dtype
from pmoe.layer.route import Gated, Routed, ask_gate, route_batch
from pmoe.layer.stored_state import LoadedExchange
from pmoe.ordering.sorted import Tokens


def kind_of(parts: Parts, x_TM: Tensor, dtype: torch.dtype) -> PaddedKind:
    """dtype: of the rows as the experts get them."""
    needs_grad = parts.asks_for_gradients(x_TM, *parts.gate.parameters())
    return PaddedKind(num_tokens=x_TM.shape[0], needs_grad=needs_grad, dtype=dtype)


def route_call(call: Call) -> RoutedCall:
    """As `pmoe.layer.decision.route_call`."""
    parts = call.parts
    promises: list[Promise | None] = [None]

    def ask(call: Call, x_TM: Tensor) -> Gated:
        fuses = may_fuse(parts, x_TM.device, cast_dtype(parts, x_TM) or x_TM.dtype)
        if not fuses or (found := promised(call, x_TM)) is None:
            return ask_gate(call, x_TM)
        promises.append(found)
        weight, expert, *_, l_aux = found.routes
        return Gated(routing=Routing(expert=expert, weight=weight, l_aux=l_aux))

    routed = route_batch(call, ask)
    expert_TK, device = routed.routing.expert, routed.x_TM.device
    kind = kind_of(parts, routed.x_TM, routed.dtype)
    splits = splits_of(parts, kind.num_tokens, top_k=expert_TK.shape[1])
    max_tokens, host = -(-splits.num_rows // expert_TK.shape[1]), torch.device("cpu")

    @functools.cache
    def counts_on(where: torch.device) -> RankCounts:
        return splits.counts(parts.ranks.size, where, max_tokens=max_tokens, needs_grad=kind.needs_grad)

    def decide(scheduled: Parts, inputs: Inputs) -> Decision:
        @functools.cache
        def padded() -> tuple[RankCounts, Orders, Tensor]:
            """What the pipeline takes; kept_E."""
            if promises[-1] is not None:
                promises[-1].keep()
            orders = Orders(scheduled, splits.expert_of_rows(device), None, Tokens(splits.num_rows))
            orders.padding, kept_E = make_padding(expert_TK.long(), splits)
            return counts_on(device), orders, kept_E

        def agree() -> Agreed:
            _compare(call, routed, kind)
            if may_fuse(parts, device, routed.dtype):
                cells = replace(counts_on(host), max_tokens=kind.num_tokens, max_rows=0)
                if (steps := find_steps(parts, inputs, cells)) is not None:
                    return Agreed(steps=steps)
            counts, orders, _ = padded()
            return Agreed(choice=choose(parts, counts, inputs, orders))

        agreed = call.replay.once(agree)
        if agreed.choice is None:
            assert agreed.steps is not None
            kept_E = torch.empty(splits.num_experts, dtype=torch.int32, device=device)
            promise, capacity = promises[-1], splits.capacity
            chosen = Chosen(expert_TK=expert_TK, promise=promise, capacity=capacity, counts_A=kept_E)
            runner = kernels_runner(parts, agreed.steps, chosen)
            totals = CallCounts(counts_on(host), kind.num_tokens, kept_E)
            return Decision(
                call=call, routed=routed, inputs=inputs, runner=runner, counts=totals, restore=runner.restore
            )
        counts, orders, kept_E = padded()
        totals = CallCounts(counts.on_host(), kind.num_tokens, kept_E)
        return in_chunks(call, routed, inputs, orders.plan(counts, agreed.choice), totals)

    return RoutedCall(call=call, routed=routed, decide=decide)


def _compare(call: Call, routed: Routed, kind: PaddedKind) -> None:
    parts, known = call.parts, call.parts.known.padded_kinds
    always, is_again = compares_always(routed.x_TM.device), routed.gated.is_again
    if routed.failure is not None and known and not always:
        raise routed.failure  # the others may not ask
    if kind in known and not (always or is_again):
        return
    if parts.ranks.size > 1 or is_again:
        where = routed.x_TM.device

        def begin(fault: Tensor | Fault) -> CountsExchange:
            return kind.exchange(
                parts.grid, parts.spec.num_experts, where, fault, parts.traffic, training=call.layer.training
            )

        check_same_calls(shared_counts(LoadedExchange(parts, routed.gated.fault, begin), routed))
    if len(known) >= 256:  # on every rank at the same call
        known.clear()
    known.add(kind)


def compares_always(device: torch.device) -> bool:
    """Whether ranks compare every call, and not only the first of a kind: where no device is waited for."""
    return device.type != "cuda"


def splits_of(parts: Parts, num_tokens: int, top_k: int) -> Splits:
    """The padded rows of a rank with so many tokens."""
    spec = parts.spec
    assert spec.capacity_factor is not None
    capacity = expert_capacity(spec.capacity_factor, num_tokens, top_k, spec.num_experts)
    return Splits(
        num_experts=spec.num_experts,
        capacity=min(capacity, num_tokens),  # a token's experts are distinct
        bins=math.lcm(*spec.degrees),
    )
