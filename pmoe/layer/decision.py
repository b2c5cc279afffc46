"""What is decided of a call before any row moves: its routing, its row counts, and who computes it how.

Deciding may communicate and read the host; running (`run`) does neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from pmoe.comm.counts import RankCounts
from pmoe.comm.ranks import telling
from pmoe.engine.autograd import Path, Runner, run_experts
from pmoe.engine.passes import Inputs
from pmoe.engine.plan import Plan
from pmoe.experts.base import Experts
from pmoe.layer.called import described, without_compilation
from pmoe.layer.parts import Call, Parts
from pmoe.layer.route import Routed, make_inputs, shared_output
from pmoe.planner.degree import Choice
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.kernels.comet.steps import Steps


class LeftCounts(Protocol):
    """Row counts that a call leaves for those who ask afterwards, on the host; reading them may synchronize.
    max_tokens: the largest number of any rank. kept_E: (E,) int64, kept rows of this rank by expert."""

    @property
    def max_tokens(self) -> int: ...
    def rows(self) -> RankCounts: ...
    def kept_E(self) -> Tensor: ...


@dataclass(frozen=True)
class CallCounts:
    """`LeftCounts` of a decided call.

    shared: as the rows travelled, on the device where one rank's kernels sorted them (a replayed CUDA graph
    changes them there). kept_device_E: (E,) on the device, the
    rows that are no padding; None where all are that.
    """

    shared: RankCounts
    max_tokens: int
    kept_device_E: Tensor | None = None

    def rows(self) -> RankCounts:
        send, recv = (each.to("cpu").long() for each in (self.shared.send, self.shared.recv))
        return replace(self.shared, send=send, recv=recv, recv_device=recv)

    def kept_E(self) -> Tensor:
        if self.kept_device_E is None:
            return self.rows().send.sum(0).flatten()
        return self.kept_device_E.to("cpu", torch.int64, copy=True)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The numbers of a decision: all that a checkpoint's second pass takes over beside the routing.

    counts: None where the host needs none.
    choice: n of both passes and the restore pair; None where nothing is cut.
    steps: the fused kernels' steps; None where they take no part.
    """

    counts: RankCounts | None = None
    choice: Choice | None = None
    steps: Steps | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A call as it will be run.

    runner: computes T_O of ``inputs``. plan: the chunks, None where nothing is cut.
    restore: the pair of a call whose buffers rotate or whose kernels are fused.
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
        """Whether backward may follow, on any rank."""
        return self.counts.shared.needs_grad


@dataclass(frozen=True, kw_only=True)
class RoutedCall:
    """A call whose tokens are routed, and whose row counts may be under way.

    decide: takes the parts that will compute and the experts' operands, and says how the call will be run.
        It may communicate.
    """

    call: Call
    routed: Routed
    decide: Callable[[Parts, Inputs], Decision]


def route_call(call: Call) -> RoutedCall:
    """Routes a call. Picks where row counts come from: one rank's kernels, padded rows, or an exchange of
    counts."""
    parts = call.parts
    if parts.may_run_on_one_rank:
        from pmoe.layer import one_rank_counts

        routed_call = one_rank_counts.route_call(call)
        if routed_call is not None:
            return routed_call
    if parts.spec.pad_to_capacity:
        from pmoe.layer import padded_counts

        return padded_counts.route_call(call)
    from pmoe.layer import exact_counts

    return exact_counts.route_call(call)


def run(decision: Decision) -> Tensor:
    """The tokens' results, (T, M)."""
    inputs, mix = decision.inputs, decision.routed.routing.mix
    parts = decision.call.parts
    with inputs.autocast_for(parts.experts):
        y_TM = run_experts(decision.runner, inputs, parts.ranks, needs_grad=decision.needs_grad)
    return y_TM if mix is None else mix.combine.to(y_TM.dtype) @ y_TM


class ExpertsCall:
    """One call of the layer's experts as a module, so that their hooks enclose all of their work.

    decision: how the call was run; None before.
    """

    def __init__(self, routed_call: RoutedCall) -> None:
        self.call: Call = routed_call.call
        self.routed: Routed = routed_call.routed
        self.decision: Decision | None = None
        # Dropped after its use, with everything that only planning needs.
        self._decide: Callable[[Parts, Inputs], Decision] | None = routed_call.decide
        self._has_told = False  # whether `_run` raised: deciding and running tell peers themselves
        self._had_grad = False

    def __call__(self) -> tuple[Decision, Tensor]:
        """How the call was run, and the tokens' results, (T, M). Tells peers of an error that a hook raises
        on this rank alone."""
        call, x_TM = self.call, self.routed.x_TM
        call_experts = without_compilation(call.parts.experts_module)
        try:
            y_TM: Tensor = call_experts(x_TM, run=self._run)
            if call.scheduled is not call.parts:
                y_TM = y_TM + shared_output(call.parts, x_TM).to(y_TM.dtype)
        except BaseException as error:
            if not self._has_told and call.parts.ranks.size > 1:
                from pmoe.comm.told import leave

                leave(error, call.parts.ranks, "a hook or a parameter of the experts or the shared expert")
            raise
        if not isinstance(y_TM, Tensor) or y_TM.shape[:1] != x_TM.shape[:1]:
            raise ValueError(
                f"a forward hook of experts returned {described(y_TM)}; it must return {x_TM.shape[0]} rows"
            )
        if self.decision is None:
            name = type(call.parts.experts_module).__name__
            raise ValueError(f"experts ({name}) must call the pmoe.Experts that they stand for, and did not")
        return self.decision, y_TM

    def _check_second_run(self) -> None:
        if torch.is_grad_enabled() and not self._had_grad:
            raise RuntimeError(
                "experts must not stand alone in a reentrant checkpoint, which loses the gradient of the "
                "routing weights: give it use_reentrant=False, or checkpoint the whole layer"
            )

    def _run(self, experts: Experts, x_TM: Tensor) -> Tensor:
        """Inside the call: decides and computes. x_TM: the rows as hooks have left them."""
        call, routed = self.call, self.routed
        if x_TM is not routed.x_TM:
            routed = replace(routed, x_TM=_checked_rows(x_TM, routed.x_TM))
        inputs = make_inputs(call, routed, experts)
        try:
            if self.decision is not None:  # a checkpoint around the experts alone runs them again
                self._check_second_run()
                return run(replace(self.decision, routed=routed, inputs=inputs))
            # A wrapper may call other experts than the first that it holds: PEFT trains copies of modules.
            parts = call.scheduled
            parts = parts if experts is parts.experts else replace(parts, experts=experts)
            self._had_grad = torch.is_grad_enabled()
            assert self._decide is not None
            self.decision = self._decide(parts, inputs)
            self._decide = None
            return run(self.decision)
        except BaseException:
            self._has_told = True  # the error is not kept: its frames hold tensors until garbage collection
            raise


def _checked_rows(x_TM: Tensor, before_TM: Tensor) -> Tensor:
    """Rows that a hook has replaced. Raises ValueError where they are of another shape or type."""
    wanted = (before_TM.shape, before_TM.dtype, before_TM.device)
    if not isinstance(x_TM, Tensor) or (x_TM.shape, x_TM.dtype, x_TM.device) != wanted:
        raise ValueError(
            f"a forward pre-hook of experts returned {described(x_TM)}; it must return "
            f"{described(before_TM)}: routing is decided already"
        )
    return x_TM


def shaped_output(decision: Decision, y_TM: Tensor) -> Tensor:
    """The layer's output in its input's shape, behind the callbacks' last hooks. y_TM itself where it has
    that: FSDP2 warns of a module that returns a view, for an operation in place would drop its hook."""
    x, call = decision.routed.x, decision.call
    y = y_TM if y_TM.shape == x.shape else y_TM.view(x.shape)
    with telling(call.parts.ranks, "before_moe_end of a callback"):
        for callback in call.parts.callbacks:
            y = callback.before_moe_end(y)
        return y if call.mask is None else _among_padding(y, call.mask)


def _among_padding(y_NM: Tensor, mask: Tensor) -> Tensor:
    """(..., M): the results of the N tokens in their places, zeros where the mask is False."""
    y = y_NM.new_zeros(*mask.shape, *y_NM.shape[1:])
    return y.index_put((mask.bool(),), y_NM)


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
