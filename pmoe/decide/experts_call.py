"""The layer calls its experts as a module. Inside this call pmoe decides how to run, and runs.

So the hooks of the experts run, and so does a wrapper that another library has put around the experts:

    ExpertsCall.__call__
      layer.experts(x_TM, run=...)       forward pre-hooks: may replace the rows
        ExpertsCall._run                 reads the parameters of the experts that the wrapper calls
          ExpertsCall.decide             row counts, number of chunks n, restore pair, runner
          run                            computes the results of the tokens
                                         forward hooks: may replace the results
      + the shared expert's output       if the shared expert is called as a module, too

The restore pair says how backward gets two activations back: the rows that the experts received, and their
hidden activation. The runner is the object that computes both passes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import CountsSource, Decision
from pmoe.call.module_calls import described, without_compilation
from pmoe.call.modules import LayerModules
from pmoe.call.routed import RoutedBatch
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.comm.failures import leave, publishing_failures
from pmoe.engine.autograd import run_as_one_node
from pmoe.engine.passes.base import AutocastState, Inputs
from pmoe.experts.base import Experts
from pmoe.gates.base import at_least_float32

HOOKS = "a hook or a parameter of the experts or the shared expert"
"""The cause that is named to other ranks if this rank fails before `decide` or after `run`."""


def run(decision: Decision) -> Tensor:
    """Runs a call as decided: sends the rows, computes the experts and combines the results.

    Returns (T, M), one result for each of T tokens, with M = d_model columns. If the gate routed mixtures of
    tokens instead of tokens (SoftMoE), the results of mixtures are mixed back to tokens.
    """
    inputs = decision.inputs
    mix = decision.routed.gated.routing.mix
    modules = decision.call.modules
    with inputs.autocast_for(modules.experts):
        y_TM = run_as_one_node(decision.runner, inputs, modules.ranks, needs_grad=decision.needs_grad)
    return y_TM if mix is None else mix.combine.to(y_TM.dtype) @ y_TM


class ExpertsCall:
    """Calls the layer's experts as a module, so that the experts' hooks run.

    Dispatch, products and combine all run inside the module's forward. So forward pre-hooks of the experts
    run before the dispatch, and forward hooks run after the combine.

    call       the call
    routed     the call's tokens with their routing
    decision   the decision by which the call was run; None until it has run
    """

    def __init__(self, source: CountsSource) -> None:
        self.call: Call = source.call
        self.routed: RoutedBatch = source.routed
        self.decision: Decision | None = None
        # Set to None after planning: this frees tensors that only planning needs.
        self._source: CountsSource | None = source
        # Words for what this rank is doing while an error may occur on this rank only: `__call__` then
        # publishes the error. "" while all ranks raise errors together, or while a called function publishes.
        self._stage = HOOKS
        self._had_grad = False  # whether gradients were enabled in the first run

    def __call__(self) -> tuple[Decision, Tensor]:
        """Decides how the call runs, and runs it. Returns the decision, and (T, M): the results of T tokens.

        M is d_model. If this rank fails, in a hook or while it plans the call, it publishes the error to the
        other ranks. Otherwise they would wait for it.

        Raises ValueError if a forward hook returns anything but a tensor of T rows, or if a wrapper of the
        experts did not call the experts.
        """
        call = self.call
        x_TM = self.routed.x_TM
        call_experts = without_compilation(call.modules.experts_module)
        try:
            y_TM: Tensor = call_experts(x_TM, run=self._run)
            if call.scheduled is not call.modules:
                y_TM = y_TM + shared_output(call.modules, x_TM).to(y_TM.dtype)
        except BaseException as error:
            if self._stage and call.modules.ranks.size > 1:
                leave(error, call.modules.ranks, self._stage)
            raise
        if not isinstance(y_TM, Tensor) or y_TM.shape[:1] != x_TM.shape[:1]:
            raise ValueError(
                f"a forward hook of layer.experts returned {described(y_TM)}; it must return a tensor with "
                f"{x_TM.shape[0]} rows, one for each token"
            )
        if self.decision is None:
            name = type(call.modules.experts_module).__name__
            raise ValueError(
                f"layer.experts ({name}) did not call the pmoe.Experts that it wraps: its forward must do so"
            )
        return self.decision, y_TM

    def _check_second_run(self) -> None:
        """Raises RuntimeError if reentrant activation checkpointing of the experts runs them a second time.

        ``torch.utils.checkpoint`` with ``use_reentrant=True`` returns gradients only for the arguments of the
        module. The routing weights are not an argument of the experts module, so their gradient would be
        lost.
        """
        if torch.is_grad_enabled() and not self._had_grad:
            raise RuntimeError(
                "layer.experts must not be checkpointed alone with use_reentrant=True, which loses the "
                "gradient of the routing weights: pass use_reentrant=False, or checkpoint the whole layer"
            )

    def _run(self, experts: Experts, x_TM: Tensor) -> Tensor:
        """Decides how the call runs and computes it. The experts module calls this method in its forward.

        experts: the experts that compute the call: those whose forward has called this method. If a tool such
            as PEFT has wrapped the layer's experts, they may be other experts than the layer's own.
        x_TM: (T, M), the rows of T tokens after the forward pre-hooks of the experts; M is d_model.

        Returns (T, M), the results of the tokens. If activation checkpointing runs the experts a second time,
        nothing is decided again: the call runs as the first run has decided.
        """
        call = self.call
        routed = self.routed
        if x_TM is not routed.x_TM:
            routed = routed.with_rows(_checked_rows(x_TM, routed.x_TM, routed.autocast))
        inputs = make_inputs(call, routed, experts)
        self._stage = ""
        if self.decision is None:
            decision = self.decision = self.decide(experts, inputs)
        else:  # activation checkpointing of only the experts runs them again
            self._check_second_run()
            decision = self.decision._replace(routed=routed, inputs=inputs)
        y_TM = run(decision)
        self._stage = HOOKS
        return y_TM

    def decide(self, experts: Experts, inputs: Inputs) -> Decision:
        """Decides how the routed call runs: row counts, number of chunks, restore pair, and runner.

        The restore pair says how backward gets the experts' input and hidden activation. The runner is the
        object that computes both passes. All ranks agree on everything that changes the order of collectives.
        If activation checkpointing runs the call a second time, the agreement of the first run is used.

        experts: the experts to compute. A tool such as PEFT may have replaced the layer's own experts by
            these.
        inputs: the rows and parameters of the call.
        """
        modules = self.call.scheduled
        if experts is not modules.experts:
            modules = replace(modules, experts=experts)
        source = self._source
        assert source is not None
        self._had_grad = torch.is_grad_enabled()
        # Only the first run measures times and compares ranks, which may save tensors. Checkpointing would
        # raise, because it expects both runs to save the same tensors: so its hooks are off here.
        with hidden_from_checkpoints():
            agreed = self.call.replay.once(lambda: source.agree(modules, inputs))
            self._stage = "the plan of a pass"
            decision = source.decision(modules, inputs, agreed)
        self._stage = ""
        self._source = None
        return decision


def _checked_rows(x_TM: Tensor, before_TM: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Checks and returns the rows by which a forward pre-hook of the experts replaced the layer's rows.

    The tokens are routed already, so the hook may change only the values.

    x_TM: the value that the hook returned.
    before_TM: (T, M), the rows that the layer passed to its experts, for T tokens with M = d_model columns.
    autocast: a second dtype that the rows may have, because pmoe then casts the rows to it. FSDP2's hook for
        mixed precision makes use of this. None if there is no second dtype.

    Raises ValueError if the value is not a tensor, or has another shape, device or dtype.
    """
    wanted = (before_TM.shape, before_TM.dtype, before_TM.device)
    cast = (before_TM.shape, autocast, before_TM.device)
    if not isinstance(x_TM, Tensor) or (x_TM.shape, x_TM.dtype, x_TM.device) not in (wanted, cast):
        raise ValueError(
            f"a forward pre-hook of layer.experts returned {described(x_TM)}; it must return "
            f"{described(before_TM)}: the tokens are routed already, so a hook may change values only"
        )
    return x_TM


def shaped_output(decision: Decision, y_TM: Tensor) -> Tensor:
    """Returns the layer's output: the results in the shape of the input, after the last callback.

    The last callback is ``before_moe_end``. If the call has a mask, the output has rows of zeros where the
    input has padding.

    decision: the decision by which the call was run.
    y_TM: (T, M), the results of T tokens with M = d_model columns.
    """
    x = decision.routed.x
    call = decision.call
    # A view is made only if the shapes differ: FSDP2 warns of a module that returns a view, because an
    # in-place operation on the view would drop FSDP2's hook.
    y = y_TM if y_TM.shape == x.shape else y_TM.view(x.shape)
    if not call.modules.callbacks and call.mask is None:
        return y
    with publishing_failures(call.modules.ranks, "before_moe_end of a callback"):
        for callback in call.modules.callbacks:
            y = callback.before_moe_end(y)
        return y if call.mask is None else _among_padding(y, call.mask)


def _among_padding(y_NM: Tensor, mask: Tensor) -> Tensor:
    """Returns (..., M), the results of the tokens in the shape of the mask, with zeros for padding.

    y_NM: (N, M), the results of the N tokens, in their order, with M = d_model columns.
    mask: (...), True where the input has a token; N values are True.
    """
    y = y_NM.new_zeros(*mask.shape, *y_NM.shape[1:])
    return y.index_put((mask.bool(),), y_NM)


# ---- the tensors of a call that have gradients, as the runners take them


def make_inputs(call: Call, routed: RoutedBatch, experts: Experts) -> Inputs:
    """Returns the rows and parameters with which a call is computed.

    If autocast is on, rows and parameters are cast to autocast's dtype. The parameters are read in every
    call, because a user may replace them between calls.

    call: the call.
    routed: the call's tokens with their routing.
    experts: the experts to compute.

    Raises ValueError if parameters differ from the rows in dtype or device.
    """
    modules = call.scheduled
    rows_TM = routed.x_TM if routed.gated.rows_TM is None else routed.gated.rows_TM
    mix = routed.gated.routing.mix
    dtype = routed.autocast
    if dtype is not None:
        rows_TM = rows_TM.to(dtype)
    if mix is not None:
        rows_TM = mix.dispatch.to(rows_TM.dtype).t() @ rows_TM
    has_shared = modules.shared_expert is not None
    return Inputs(
        x_TM=rows_TM,
        weight_TK=routed.gated.routing.weight,
        parameters=_operands(experts, dtype, rows_TM),
        shared_weight_T=shared_weight(modules, routed.x_TM) if has_shared else None,
        shared_parameters=()
        if modules.shared_expert is None
        else _operands(modules.shared_expert, dtype, rows_TM),
        hook_parameters=() if modules.hooks is None else modules.hooks.parameters,
        autocast=dtype,
        hooks_autocast=None if modules.hooks is None else AutocastState.now(rows_TM.device.type),
        compare=getattr(experts.reduce, "compare", None),
    )


def _operands(experts: Experts, dtype: torch.dtype | None, rows_TM: Tensor) -> list[Tensor]:
    """Returns the experts' parameters in the form that matrix products take, cast to autocast's dtype.

    If the experts are a user's own modules, their parameters are not cast, because autocast is on when the
    modules run.

    experts: the experts.
    dtype: autocast's dtype; None casts nothing.
    rows_TM: (T, M), the rows of T tokens, with M = d_model columns.

    Raises ValueError if the parameters have another dtype or device than the rows.
    """
    values = experts.operands()
    if experts.runs_under_autocast:
        return values
    if dtype is not None:
        values = [value.to(dtype) for value in values]
    if values and (values[0].dtype != rows_TM.dtype or values[0].device != rows_TM.device):
        raise ValueError(
            f"experts' parameters ({values[0].dtype} on {values[0].device}) must have the dtype and device "
            f"of the rows ({rows_TM.dtype} on {rows_TM.device}): convert the whole layer with layer.to(...)"
        )
    return values


def shared_weight(modules: LayerModules, x_TM: Tensor) -> Tensor:
    """Returns (T,), the factor of the shared expert for each of T tokens: sigmoid(shared_gate(x)).

    The dtype is float32, or float64 for float64 rows. Without a ``shared_gate`` all factors are 1.

    modules: the modules of the layer.
    x_TM: (T, M), the rows, with M = d_model columns.

    Raises ValueError if the gate returns another shape than (T, 1).
    """
    gate = modules.shared_gate
    if gate is None:
        return torch.ones(x_TM.shape[0], dtype=at_least_float32(x_TM[:0]).dtype, device=x_TM.device)
    logits_T1 = gate(x_TM)
    if not isinstance(logits_T1, Tensor) or logits_T1.shape != (x_TM.shape[0], 1):
        shape = tuple(logits_T1.shape) if isinstance(logits_T1, Tensor) else type(logits_T1).__name__
        raise ValueError(
            f"shared_gate ({type(gate).__name__}) returned {shape}; it must return one number for each "
            f"token, ({x_TM.shape[0]}, 1)"
        )
    return at_least_float32(logits_T1).sigmoid().squeeze(1)


def shared_output(modules: LayerModules, x_TM: Tensor) -> Tensor:
    """Returns (T, M), the shared expert's output for T tokens, multiplied by a factor for each token.

    The shared expert is called as a module here, so that its hooks run. The factor of a token is the sigmoid
    of the shared expert's gate, or 1 without a gate.

    modules: the modules of the layer.
    x_TM: (T, M), the rows, with M = d_model columns.

    Raises ValueError if the module returns another shape than (T, M).
    """
    module = modules.shared_module
    assert module is not None
    output_TM: Tensor = module(x_TM)
    if not isinstance(output_TM, Tensor) or output_TM.shape != x_TM.shape:
        shape = tuple(output_TM.shape) if isinstance(output_TM, Tensor) else type(output_TM).__name__
        raise ValueError(
            f"shared_expert ({type(module).__name__}) returned {shape}; it must return {tuple(x_TM.shape)}"
        )
    return output_TM * shared_weight(modules, x_TM).unsqueeze(1).to(output_TM.dtype)
