"""The first stage: a checked input, what the gate makes of it, and faults that the other ranks are told of.

Letters: T tokens of this rank, K choices, M = d_model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pmoe.comm.counts import Fault, FaultError
from pmoe.engine import recompute
from pmoe.engine.recompute import Decisions
from pmoe.gates import Routing
from pmoe.layer.rows import autocast_dtype, experts_parameter
from pmoe.ordering.capacity import expert_capacity, within_capacity

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What the gate said, checked, and what became of it: all that a checkpoint keeps of it.

    keep_TK: the slots within capacity, None where all are. fault: a `Fault`, on the device where it is found
    there. is_again: the gate has routed these tokens before, for a checkpoint."""

    routing: Routing
    keep_TK: Tensor | None = None
    fault: Tensor | Fault = Fault.NONE
    is_again: bool = False


@dataclass(frozen=True, kw_only=True)
class Routed:
    """A rank's tokens with their routing: what its part of the exchange needs.

    x: the layer's input, behind the first hooks. failure: the error that stands behind a fault found on the
    host."""

    x: Tensor
    x_TM: Tensor
    decided: Decided
    failure: Exception | None = None

    @property
    def routing(self) -> Routing:
        return self.decided.routing

    @property
    def num_tokens(self) -> int:
        return self.x_TM.shape[0]


def route(layer: MoELayer, x: Tensor, token_ids: Tensor | None, decisions: Decisions) -> Routed:
    """Checks the input and lets the gate decide. One rank alone raises at once; among several a rank that
    failed takes part with no tokens in the exchange that tells the others."""
    try:
        x = _started(layer, x)
        check_input(layer, x)
        x_TM = x.reshape(-1, layer.d_model)
        decided = decisions.route(x_TM, lambda: _decide(layer, x_TM, token_ids))
    except Exception as error:
        if layer.ranks.size == 1 or decisions.taken_over:  # which has no such exchange
            raise
        return _nothing_routed(layer, error)
    return Routed(x=x, x_TM=x_TM, decided=decided)


def _decide(layer: MoELayer, x_TM: Tensor, token_ids: Tensor | None) -> Decided:
    routing = _gated(layer, x_TM, token_ids)
    _check_routing(layer, routing, x_TM.shape[0])
    fault: Tensor | Fault = Fault.NONE
    if not layer.trusts_gate:
        routing, fault = _harmless(routing, x_TM, layer.num_experts)
    if layer.check_finite and routing.logits is not None:
        # Arithmetic and no torch.where: scalars that become tensors would be copies that synchronise.
        finite = routing.logits.isfinite().all().long()
        fault = finite * fault + (1 - finite) * int(Fault.NOT_FINITE)
    changed = recompute.changed_routing(layer, x_TM.shape[0], routing.expert, routing.keep, routing.token)
    if changed is not None:
        with recompute.unseen():
            fault = changed * int(Fault.RECOMPUTED) + (1 - changed) * fault
    keep_TK = routing.keep
    decided = keep_TK is not None or routing.token is not None or decides_capacity(layer.gate)
    if layer.capacity_factor is not None and not (decided or layer.pad_to_capacity):
        capacity = expert_capacity(
            layer.capacity_factor, x_TM.shape[0], routing.expert.shape[1], layer.num_experts
        )
        used_E = torch.zeros(layer.num_experts, dtype=torch.int64, device=x_TM.device)
        keep_TK, _ = within_capacity(routing.expert, capacity, used_E)
    routing = replace(routing, logits=None)
    return Decided(routing=routing, keep_TK=keep_TK, fault=fault, is_again=changed is not None)


def _started(layer: MoELayer, x: Tensor) -> Tensor:
    """The input behind the callbacks' first hooks."""
    for callback in layer.callbacks:
        try:
            x = callback.before_moe_start(x)
        except Exception as error:
            if layer.ranks.size == 1:
                raise
            name = type(callback).__name__
            raise FaultError(Fault.CALLBACK, f"callback {name}.before_moe_start: {error}") from error
    return x


def _gated(layer: MoELayer, x_TM: Tensor, token_ids: Tensor | None) -> Routing:
    if not getattr(layer.gate, "needs_token_ids", False):
        routing: Routing = layer.gate(x_TM)
        return routing
    if not isinstance(token_ids, Tensor) or token_ids.numel() != x_TM.shape[0]:
        given = tuple(token_ids.shape) if isinstance(token_ids, Tensor) else token_ids
        raise ValueError(
            f"token_ids ({given}) must be given, one for each of the {x_TM.shape[0]} tokens: the gate "
            f"({type(layer.gate).__name__}) routes by them"
        )
    by_ids: Routing = layer.gate(x_TM, token_ids.reshape(-1))
    return by_ids


def decides_capacity(gate: nn.Module) -> bool:
    return bool(getattr(gate, "decides_capacity", False))


def _harmless(routing: Routing, x_TM: Tensor, num_experts: int) -> tuple[Routing, Tensor]:
    """A routing that nothing breaks on, and the `Fault` of the one that was given, on the device."""
    expert, weight, token, num_tokens = routing.expert, routing.weight, routing.token, x_TM.shape[0]
    found = {
        Fault.ROUTING: ((expert < 0) | (expert >= num_experts)).any(),
        Fault.WEIGHT: ~weight.isfinite().all(),
    }
    if token is not None:
        found[Fault.TOKEN] = ((token < 0) | (token >= num_tokens)).any() | (token.diff() < 0).any()
        token = token.clamp(0, max(num_tokens - 1, 0))
    fault = torch.stack([holds.long() * int(kind) for kind, holds in found.items()]).amax()
    # Routing weights of all ranks travel together: in one type.
    weight = weight.to(torch.float64 if x_TM.dtype == torch.float64 else torch.float32)
    return replace(routing, expert=expert.clamp(0, num_experts - 1), weight=weight, token=token), fault


def _nothing_routed(layer: MoELayer, error: Exception) -> Routed:
    like = experts_parameter(layer)
    if like is None:
        like = torch.empty(0)
    routing = Routing(
        expert=torch.empty(0, layer.top_k, dtype=torch.int64, device=like.device),
        weight=like.new_empty(0, layer.top_k),
        l_aux=like.new_zeros(()),
    )
    fault = error.fault if isinstance(error, FaultError) else Fault.OTHER
    x_TM = like.new_empty(0, layer.d_model)
    return Routed(x=x_TM, x_TM=x_TM, decided=Decided(routing=routing, fault=fault), failure=error)


def check_input(layer: MoELayer, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x ({type(x).__name__}) must be a torch.Tensor of shape (..., {layer.d_model})")
    if x.dim() == 0 or x.shape[-1] != layer.d_model:
        raise FaultError(
            Fault.SHAPE, f"x of shape {tuple(x.shape)} must end in d_model ({layer.d_model}): (..., d_model)"
        )
    like = experts_parameter(layer)
    if like is not None and x.device != like.device:
        raise FaultError(
            Fault.DEVICE, f"x on {x.device} must be where the layer's parameters are ({like.device})"
        )
    if not x.is_floating_point():
        raise FaultError(Fault.DTYPE, f"x of dtype {x.dtype} must be of a floating-point type")
    if like is not None and autocast_dtype(x) is None and x.dtype != like.dtype:
        raise FaultError(
            Fault.DTYPE,
            f"x of dtype {x.dtype} must be of the layer's dtype ({like.dtype}), or under autocast",
        )


def _check_routing(layer: MoELayer, routing: object, num_tokens: int) -> None:
    if layer.trusts_gate:
        return
    name = type(layer.gate).__name__
    if not isinstance(routing, Routing):
        raise TypeError(f"gate ({name}) must return a pmoe.Routing, not {type(routing).__name__}")
    for field in ("expert", "weight", "l_aux"):
        value = getattr(routing, field)
        if not isinstance(value, Tensor):
            raise TypeError(f"gate ({name}) returned {field} ({value!r}); it must be a tensor")
    shape = tuple(routing.expert.shape)
    rows = num_tokens if routing.token is None and routing.mix is None else shape[:1] and shape[0]
    if len(shape) != 2 or shape[0] != rows or tuple(routing.weight.shape) != shape:
        raise ValueError(
            f"gate ({name}) returned expert of shape {shape} and weight of shape "
            f"{tuple(routing.weight.shape)}; both must be (T, K) with T = {num_tokens}"
        )
    if not routing.weight.is_floating_point():
        raise TypeError(f"gate ({name}) returned weight of dtype {routing.weight.dtype}; it must be floating")
    wanted = {"keep": (shape, torch.bool), "token": (shape[:1], torch.int64)}
    for field, (of_shape, dtype) in wanted.items():
        value = getattr(routing, field)
        if value is not None and (tuple(value.shape) != of_shape or value.dtype != dtype):
            raise ValueError(
                f"gate ({name}) returned {field} of shape {tuple(value.shape)} and dtype {value.dtype}; it "
                f"must be {of_shape} of {dtype}"
            )
    if routing.token is not None and (shape[1] != 1 or routing.keep is not None):
        raise ValueError(
            f"gate ({name}) returned token with {shape[1]} choices a row; there must be 1, and no keep: it "
            "names only rows that it keeps"
        )
    if routing.mix is not None:
        mixed = tuple(tuple(each.shape) for each in (routing.mix.dispatch, routing.mix.combine))
        if mixed != ((num_tokens, shape[0]),) * 2:
            raise ValueError(
                f"gate ({name}) returned mix of shapes {mixed}; both must be (T, S), that is "
                f"({num_tokens}, {shape[0]})"
            )
        if layer.shared_expert is not None:
            raise ValueError(
                f"shared_expert ({layer.shared_expert}) must be None where the gate ({name}) mixes tokens"
            )
    if routing.expert.dtype != torch.int64:
        raise TypeError(
            f"gate ({name}) returned expert of dtype {routing.expert.dtype}; it must be torch.int64"
        )
