"""The first stage of a call: checks the input and calls the gate.

If the input or the routing of a rank is wrong, the rank cannot send its rows, for which the other ranks would
wait. So it sends the number of a `Fault` together with its row counts, and all ranks raise an error.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _get_tracing_state as tracing_state
from torch._C._functorch import peek_interpreter_stack as innermost_transform

from pmoe.call.call import Call
from pmoe.call.module_calls import described, is_watched
from pmoe.call.modules import LayerModules
from pmoe.call.routed import CheckedRouting, RoutedBatch
from pmoe.call.tensor_kinds import refused_kind
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.comm.counts import EarlyMessages, Fault, FaultError, heading
from pmoe.gates.base import Routing, without_autocast
from pmoe.gates.capacity import expert_capacity, within_capacity
from pmoe.gates.logits import logits_and_rows
from pmoe.gates.switch import SwitchGate
from pmoe.gates.topk import TopKGate
from pmoe.kernels.route.launches import refusal
from pmoe.warn import warn_of_fallback


def route_batch(
    call: Call, ask: Callable[[Call, Tensor, torch.dtype], CheckedRouting] | None = None
) -> RoutedBatch:
    """Checks the input of a call and routes its tokens to experts.

    call: the call.
    ask: a function with the arguments of `run_gate` that returns the checked routing. None for `run_gate`,
        which calls the gate.

    With several ranks, a rank whose routing fails returns an empty batch with the error. The rank then takes
    part in the exchange of row counts, which reports the fault, and all ranks raise. The error is raised at
    once on a single rank, and in the second pass of activation checkpointing, which has no exchange.
    """
    modules = call.modules
    try:
        x = apply_start_callbacks(call)
        x_TM = x.reshape(-1, modules.options.d_model)
        autocast = cast_dtype(modules, x_TM)
        gated = call.replay.route(x_TM, lambda: (ask or run_gate)(call, x_TM, autocast or x_TM.dtype))
    except Exception as error:
        if modules.ranks.size == 1 or call.replay.is_replay:
            raise
        return _nothing_routed(call, error)
    needs_grad = needs_gradients(call, x_TM, gated.routing.weight)
    return RoutedBatch(x=x, x_TM=x_TM, gated=gated, autocast=autocast, needs_grad=needs_grad)


def needs_gradients(call: Call, *tensors: Tensor) -> bool:
    """Returns whether autograd on this rank needs gradients of ``tensors``, experts or callbacks.

    call: the call.
    tensors: the rows, and the routing weights or the parameters of the gate, of any shape.
    """
    if call.parameters_need_grad:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def apply_start_callbacks(call: Call) -> Tensor:
    """Returns the checked input after the callbacks' ``before_moe_start``.

    The shape is (..., M) with M = d_model. If the call has a mask, the shape is (N, M): the result has only
    the N tokens for which the mask is True. So callbacks and the gate never get rows of padding.

    Raises TypeError or FaultError for a wrong input. If a callback fails, raises FaultError with several
    ranks, and the callback's own error with a single rank.
    """
    x = call.x if call.mask is None else _tokens_of(call)
    for callback in call.modules.callbacks:
        try:
            x = callback.before_moe_start(x)
        except Exception as error:
            if call.modules.ranks.size == 1:
                raise
            name = type(callback).__name__
            raise FaultError(Fault.CALLBACK, f"callback {name}.before_moe_start: {error}") from error
    check_input(call.modules, x, call.reference)
    return x


def _tokens_of(call: Call) -> Tensor:
    """Returns (N, M), the rows of the input for which the call's mask is True.

    These rows are the N tokens; the other rows are padding. M is d_model. Raises FaultError if the shape,
    device or dtype of the mask does not suit the input.
    """
    x = call.x
    mask = call.mask
    check_input(call.modules, x, call.reference)
    if not isinstance(mask, Tensor) or mask.shape != x.shape[:-1] or mask.device != x.device:
        raise FaultError(
            Fault.SHAPE,
            f"mask ({described(mask)}) must be a tensor of shape {tuple(x.shape[:-1])} on {x.device}: one "
            "value for each row of x",
        )
    if mask.is_floating_point() or mask.is_complex():
        raise FaultError(
            Fault.SHAPE,
            f"mask of dtype {mask.dtype} must be bool: True where x has a token, False in padding",
        )
    return x[mask.bool()]


def run_gate(call: Call, x_TM: Tensor, rows_dtype: torch.dtype) -> CheckedRouting:
    """Calls the gate, checks its routing, and drops rows over the layer's capacity.

    call: the call.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    rows_dtype: the dtype of the rows that reach the experts.

    Three faults are found on the device, so that the host does not wait:

    - values that a user's gate returned are outside their range (`clamped_with_fault`);
    - logits are not finite (not checked if ``check_finite`` is False);
    - activation checkpointing routes these tokens a second time, and the routing has changed.

    The result has the number of the `Fault`, which the ranks exchange later. If there are several faults, it
    has the last one of this list.
    """
    modules = call.modules
    options = call.modules.options
    # The check's result travels with the row counts. Padded calls may exchange no row counts, so by default
    # their logits are not checked.
    checks = not options.pad_to_capacity if options.check_finite is None else options.check_finite
    checks = checks and call.checks_values
    by_kernels = _route_by_kernels(call, x_TM, rows_dtype, checks) if x_TM.is_cuda else None
    routing = _routing(call, x_TM) if by_kernels is None else by_kernels.routing
    fault: Tensor | Fault = Fault.NONE if by_kernels is None else by_kernels.fault
    if not modules.trusts_gate:
        from pmoe.decide.custom_gate import check_routing, clamped_with_fault

        check_routing(modules, routing, x_TM)
        routing, fault = clamped_with_fault(call, routing, x_TM)
    keep = _kept(modules, routing, x_TM)
    if checks and by_kernels is None and routing.logits is not None:
        # Arithmetic instead of torch.where: torch.where would make a tensor of the number Fault.NOT_FINITE
        # and copy it to the device, and the host would wait for this copy.
        is_bad = (0 * routing.logits.detach()).sum() != 0  # 0 * x is 0 if x is finite, else NaN
        bad = is_bad * int(Fault.NOT_FINITE)
        fault = bad if fault is Fault.NONE else bad + is_bad.logical_not() * fault
    has_changed = None
    if call.may_run_again:
        from pmoe.checkpointing.routing_check import changed_routing

        has_changed = changed_routing(
            call.layer, x_TM.shape[0], routing.expert.long(), routing.keep, routing.token
        )
    if has_changed is not None:
        with hidden_from_checkpoints():
            fault = has_changed * int(Fault.RECOMPUTED) + (1 - has_changed) * fault
    is_again = has_changed is not None
    # The counts and the order from the kernels include slots over the capacity. If slots are dropped, they
    # cannot be used.
    if by_kernels is not None and keep is None:
        is_changed = is_again or routing is not by_kernels.routing or fault is not by_kernels.fault
        if not is_changed:
            return by_kernels
        return by_kernels._replace(routing=routing, fault=fault, is_again=is_again)
    checked_routing = Routing(
        expert=routing.expert,
        weight=routing.weight,
        l_aux=routing.l_aux,
        keep=keep,
        token=routing.token,
        mix=routing.mix,
    )
    return CheckedRouting(routing=checked_routing, fault=fault, is_again=is_again)


def _kept(modules: LayerModules, routing: Routing, x_TM: Tensor) -> Tensor | None:
    """Returns which (token, choice) slots are within the capacity, (T, K) bool; None if all are.

    Some gates decide themselves which slots are kept; their answer is returned. With ``pad_to_capacity``
    slots are dropped later, when rows are padded.

    modules: the modules and options of the layer.
    routing: the result of the gate.
    x_TM: (T, M), the T tokens, each with K choices and M = d_model columns.
    """
    options = modules.options
    decides = bool(getattr(modules.router, "decides_capacity", False))
    if routing.keep is not None or routing.token is not None or decides:
        return routing.keep
    if options.capacity_factor is None or options.pad_to_capacity:
        return None
    top_k = routing.expert.shape[1]
    capacity = expert_capacity(options.capacity_factor, x_TM.shape[0], top_k, options.num_experts)
    used_E = torch.zeros(options.num_experts, dtype=torch.int64, device=x_TM.device)
    return within_capacity(routing.expert.long(), capacity, used_E)[0]


def _route_by_kernels(
    call: Call, x_TM: Tensor, rows_dtype: torch.dtype, checks: bool
) -> CheckedRouting | None:
    """Returns the routing from the kernels of `pmoe.kernels.route`; None if they cannot compute it.

    If they cannot because of sizes, dtype or device, a warning says why, once for each reason.

    The kernels replace the gate's forward. They do three more things:

    - They count the rows for each expert in each bin. Bins are equal ranges of tokens.
    - They sort the (token, choice) slots for the expected number of chunks (`_expected_degree`).
    - They write this rank's messages of row counts, if row counts are exchanged.

    If there are too many bins for the kernels, they count all tokens as one bin. Then they write no messages,
    and the order of the slots is not used.

    call: the call.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    rows_dtype: the dtype of the rows that reach the experts.
    checks: whether the kernels check that all logits are finite. If some are not, the result has a fault.
    """
    modules = call.modules
    gate = modules.gate
    if type(gate) not in (TopKGate, SwitchGate) or is_watched(gate):
        return None
    assert isinstance(gate, TopKGate)
    options = modules.options
    check_num_experts(modules, gate.weight.shape[0])
    dtype = torch.promote_types(x_TM.dtype, torch.float32)
    like = x_TM.new_empty(0, options.num_experts, dtype=dtype)
    why = refusal(like, gate.top_k)
    if why is not None:
        warn_of_fallback("tokens are routed", why)
        return None
    from pmoe.kernels.route.operators import route

    num_bins = 1 if options.solves or options.pad_to_capacity else modules.num_bins
    n = _expected_degree(call)
    writes_messages = not (options.solves or options.pad_to_capacity or modules.grid.is_sharded)
    why = refusal(like, gate.top_k, num_bins)
    if why is not None:
        warn_of_fallback("the rows of each chunk are counted", why)
        num_bins = 1
        n = None
        writes_messages = False
    stages = modules.stages
    if n is None or num_bins % n or (stages.local and not modules.rotates and n > 2):
        n = None  # the kernels would put the rows that are not sent after the rows of all chunks
    head = None
    # A checkpoint that records the routing would keep these rows in memory, too.
    adds_gradients = rows_dtype == x_TM.dtype and not call.replay.is_record
    with without_autocast(x_TM.device.type):
        logits_TE, rows_TM = logits_and_rows(x_TM, gate.weight, adds=adds_gradients)
        if writes_messages:
            head = heading(
                modules.ranks,
                x_TM.shape[0],
                rows_dtype,
                len(options.degrees) if modules.limits_rows else 0,
                needs_grad=needs_gradients(call, x_TM, logits_TE),
                training=call.layer.training,
                sorts_results=sorts_results(modules, x_TM),
            )
        routes = route(
            logits_TE,
            gate.top_k,
            normalize=gate.normalize,
            num_chunks=num_bins,
            z_loss_weight=gate.z_loss_weight,
            sorted_chunks=1 if n is None else num_bins // n,
            last=modules.staying,
            not_finite=int(Fault.NOT_FINITE) if checks else 0,
            heading=head,
        )
    fault = routes.fault if checks else Fault.NONE
    early = None if head is None else EarlyMessages(head, fault, routes.counts_nE, routes.messages)
    routing = Routing(expert=routes.expert_TK, weight=routes.weight_TK, l_aux=routes.l_aux)
    return CheckedRouting(
        routing=routing, fault=fault, kernel_routes=routes, sorted_for=n, early=early, rows_TM=rows_TM
    )


def _expected_degree(call: Call) -> int | None:
    """Returns the number of chunks for which the routing kernels sort the slots; None if none is expected.

    It is the number that the options fix, or else that of the layer's last call. If the call takes another
    number, the order of the kernels is not used, and PyTorch operators sort the slots.

    Both passes of an activation checkpoint must save the same tensors, and other calls may lie between them.
    So such a call expects only the number that the options fix.

    call: the call.
    """
    fixed = call.modules.options.fixed_degree
    if fixed is not None or call.may_run_again:
        return fixed
    last_run = call.layer.last.ran
    return None if last_run is None else last_run.forward


def sorts_results(modules: LayerModules, x_TM: Tensor) -> bool:
    """Returns whether this rank needs memory for experts' results that are sorted by expert.

    Ranks exchange the answer with their row counts, because kernels may be missing on some ranks only. Only
    the choice of n and of the restore pair needs it. So it is True for layers whose options fix both.

    modules: the modules and options of the layer.
    x_TM: (T, M), the rows of T tokens with M = d_model columns, on a GPU. Only dtype and device are read.
    """
    if not modules.leaves_choice_open:
        return True
    from pmoe.call.sizes import places_results

    return not places_results(modules, x_TM.device, cast_dtype(modules, x_TM) or x_TM.dtype)


def _routing(call: Call, x_TM: Tensor) -> Routing:
    """Calls the gate with the rows, and also with the token ids if the gate routes by them.

    call: the call.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.

    Raises ValueError if the gate needs token ids that the call does not have. Also raises ValueError if one
    of pmoe's own gates returns scores for a wrong number of experts.
    """
    gate = call.modules.gate
    ids = call.token_ids
    arguments = [x_TM]
    if getattr(call.modules.router, "needs_token_ids", False):
        if call.mask is not None and isinstance(ids, Tensor) and ids.shape == call.mask.shape:
            ids = ids[call.mask.bool()]
        if not isinstance(ids, Tensor) or ids.numel() != x_TM.shape[0]:
            shape = tuple(ids.shape) if isinstance(ids, Tensor) else ids
            raise ValueError(
                f"token_ids ({shape}) must be given, one for each of the {x_TM.shape[0]} tokens: the gate "
                f"({type(gate).__name__}) routes by them"
            )
        arguments.append(ids.reshape(-1))
    routing: Routing = gate(*arguments)
    if call.modules.trusts_gate:
        check_num_experts(call.modules, None if routing.logits is None else routing.logits.shape[-1])
    return routing


def check_num_experts(modules: LayerModules, num_scores: int | None) -> None:
    """Raises ValueError if the gate's number of experts is not that of the layer.

    The two numbers differ, for example, if a tool has replaced the parameters of the gate.

    modules: the modules and options of the layer.
    num_scores: the number of scores that the gate gives each token; None if the gate returns no scores.
    """
    num_experts = modules.options.num_experts
    if num_scores not in (None, num_experts):
        raise ValueError(
            f"gate ({type(modules.gate).__name__}) scores {num_scores} experts, but the layer has "
            f"num_experts ({num_experts}). For more or fewer experts, build another MoELayer with that "
            "num_experts and copy the weights into it (docs/weights.md)"
        )


def _nothing_routed(call: Call, error: Exception) -> RoutedBatch:
    """Returns an empty batch with an error and its `Fault`, for a rank that could not route its tokens.

    With the empty batch the rank can take part in the exchange of row counts. The exchange reports the fault,
    a number, to all ranks.

    call: the call.
    error: the error that this rank raises after the exchange.
    """
    modules = call.modules
    like = torch.empty(0) if call.reference is None or call.reference.is_meta else call.reference
    routing = Routing(
        expert=torch.empty(0, modules.options.top_k, dtype=torch.int64, device=like.device),
        weight=like.new_empty(0, modules.options.top_k),
        l_aux=like.new_zeros(()),
    )
    fault = error.fault if isinstance(error, FaultError) else Fault.OTHER
    x_TM = like.new_empty(0, modules.options.d_model)
    gated = CheckedRouting(routing=routing, fault=fault)
    return RoutedBatch(
        x=x_TM,
        x_TM=x_TM,
        gated=gated,
        autocast=cast_dtype(modules, x_TM),
        needs_grad=call.parameters_need_grad,
        failure=error,
    )


def is_fetched(modules: LayerModules) -> bool:
    """Returns whether the experts' parameters may be on the meta device until the experts are called.

    With offloading, a library such as accelerate loads the parameters in a hook, or in a forward method that
    replaces the original one. So the result is True if the experts have any hook or a replaced forward
    method. The device of the parameters before the call is then not the device of the computation.
    """
    return any(map(is_watched, modules.experts_module.modules()))


def check_input(modules: LayerModules, x: Tensor, like: Tensor | None) -> None:
    """Checks that the input is a plain tensor of the right shape, device and dtype.

    modules: the modules and options of the layer.
    x: (..., M) with M = d_model, on the parameters' device. Its dtype must be that of the parameters, unless
        autocast or FSDP's mixed precision casts x.
    like: a parameter of the layer (`LayerModules.reference_parameter`); None if there is none.

    Raises TypeError if x is not a tensor, and FaultError (a ValueError) for all other mistakes.
    """
    d_model = modules.options.d_model
    if not isinstance(x, Tensor):
        raise TypeError(f"x ({type(x).__name__}) must be a torch.Tensor of shape (..., {d_model})")
    is_plain = type(x) is Tensor and x.layout is torch.strided and not x.is_nested
    if not (is_plain and innermost_transform() is None and tracing_state() is None):
        why = refused_kind(x, d_model)
        if why is not None:
            raise FaultError(Fault.SHAPE, why)
    if x.dim() == 0 or x.shape[-1] != d_model:
        raise FaultError(
            Fault.SHAPE, f"x of shape {tuple(x.shape)} must end in d_model ({d_model}): (..., d_model)"
        )
    if like is not None and x.device != like.device and not (like.is_meta and is_fetched(modules)):
        cure = ": call layer.to_empty(device=...) and layer.reset_parameters() first" if like.is_meta else ""
        raise FaultError(
            Fault.DEVICE, f"x on {x.device} must be where the layer's parameters are ({like.device}){cure}"
        )
    if not x.is_floating_point():
        cure = ": pass x.dequantize()" if x.is_quantized else ": pass x.real" if x.is_complex() else ""
        raise FaultError(Fault.DTYPE, f"x of dtype {x.dtype} must be of a floating-point type{cure}")
    if like is not None and x.dtype != like.dtype and cast_dtype(modules, x) is None:
        raise FaultError(
            Fault.DTYPE,
            f"x of dtype {x.dtype} must be of the layer's dtype ({like.dtype}): cast x, or call the layer "
            "under torch.autocast",
        )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast casts the rows; None if the rows keep their dtype.

    The rows keep their dtype if autocast is off, if they are float64, or if they are on the meta device.
    """
    if x.is_meta or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


def cast_dtype(modules: LayerModules, x: Tensor) -> torch.dtype | None:
    """Returns the dtype to which rows and parameters are cast for the experts; None if nothing is cast.

    The first case that applies decides:

        case                                                      result
        autocast is on                                            autocast's dtype
        FSDP2 shards the experts with mixed precision             the dtype to which FSDP2 casts them
        x and the gate have the same 16-bit dtype, and the        the dtype of x
        experts are in float32: FSDP's mixed precision has cast
        x and the gate, but not the experts
        none of these                                             None

    modules: the modules and options of the layer.
    x: (..., M), the input; M is d_model.
    """
    autocast = autocast_dtype(x) or modules.experts.gathered_dtype
    if autocast is not None or x.dtype not in (torch.bfloat16, torch.float16):
        return autocast
    like = modules.reference_parameter
    if like is None or like.dtype != torch.float32:
        return None
    gate_parameter = next(modules.gate.parameters(), None)
    is_cast = gate_parameter is not None and gate_parameter.dtype == x.dtype
    return x.dtype if is_cast else None
