"""Checks a user's gate when the layer is built, and the `Routing` that it returns in each call.

Shapes and dtypes are checked on the host, and a wrong one raises at once. Values are checked on the device,
so that the host need not wait for them. If a value is wrong, the device computes the number of a `Fault`. The
ranks exchange this number together with the row counts, and then all ranks raise.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from pmoe.arguments import check_kind, check_tensors
from pmoe.call.call import Call
from pmoe.call.modules import LayerModules
from pmoe.comm.counts import Fault
from pmoe.gates.base import Mix, Routing

NEEDED = ("expert", "weight", "l_aux", "dispatch", "combine")
"""Names of the fields that a user's gate must set.

The first three are fields of its `Routing`: the chosen experts (an integer tensor), their weights, and the
balance loss. The last two are fields of a `Mix`, which only gates that mix tokens return (SoftMoE): the
weights of the tokens in each mixture, and of the results. All but ``expert`` are floating-point tensors.
"""


def check_gate(
    gate: nn.Module, capacity_factor: float | None, normalize_gate: bool | None, z_loss_weight: float
) -> None:
    """Raises an error if a user's gate is not a module, or if an option of pmoe's own gates was set.

    gate: the user's gate.
    capacity_factor: the layer's capacity factor; it must be None if the gate itself drops rows over capacity.
    normalize_gate, z_loss_weight: options of pmoe's own gates, which must have their defaults here.

    Raises TypeError if the gate is not a module, and ValueError if one of these options is set.
    """
    check_kind(nn.Module, "a name or a torch.nn.Module", gate=gate)
    if normalize_gate is not None or z_loss_weight:
        raise ValueError(
            f"normalize_gate ({normalize_gate}) and z_loss_weight ({z_loss_weight}) must be left out if "
            "gate is a module, which normalises its weights and adds its losses itself"
        )
    if capacity_factor is not None and getattr(gate, "decides_capacity", False):
        raise ValueError(
            f"capacity_factor ({capacity_factor}) must be given to the gate ({type(gate).__name__}), not to "
            "the layer: this gate decides itself which rows are kept"
        )


def clamped_with_fault(call: Call, routing: Routing, x_TM: Tensor) -> tuple[Routing, Tensor]:
    """Returns the gate's routing with all indices clamped to their ranges, and the fault that was found.

    The kernels run before any rank raises, so a wrong index must not make them read outside their memory. The
    weights are cast to float32, or to float64 for float64 tokens.

    call: the call.
    routing: the result of the gate; its shapes and dtypes are checked already (`check_routing`).
    x_TM: (T, M), the T tokens with M = d_model columns.

    The second result is the number of a `Fault`, or 0 if all values are right. It is an int64 scalar on the
    device.
    """
    num_experts = call.modules.options.num_experts
    expert = routing.expert
    weight = routing.weight
    token = routing.token
    num_tokens = x_TM.shape[0]
    faults = {
        Fault.ROUTING: ((expert < 0) | (expert >= num_experts)).any(),
    }
    if call.checks_values:
        faults[Fault.WEIGHT] = ~weight.detach().isfinite().all()
    if token is not None:
        faults[Fault.TOKEN] = ((token < 0) | (token >= num_tokens)).any() | (token.diff() < 0).any()
        token = token.clamp(0, max(num_tokens - 1, 0))
    fault = torch.stack([holds.long() * int(fault_kind) for fault_kind, holds in faults.items()]).amax()
    # Routing weights are sent to other ranks, so they must have the same dtype on all ranks.
    weight = weight.to(torch.float64 if x_TM.dtype == torch.float64 else torch.float32)
    return replace(routing, expert=expert.clamp(0, num_experts - 1), weight=weight, token=token), fault


def check_routing(modules: LayerModules, routing: object, x_TM: Tensor) -> None:
    """Checks the types, shapes, dtypes and devices of the value that a user's gate returned.

    modules: the modules and options of the layer.
    routing: the value that the gate returned; it must be a `Routing` of the T tokens.
    x_TM: (T, M), the T tokens with M = d_model columns.

    Raises TypeError or ValueError with the names of the gate and of the wrong field.
    """
    gate_name = type(modules.gate).__name__
    num_tokens = x_TM.shape[0]
    if not isinstance(routing, Routing):
        raise TypeError(f"gate ({gate_name}) must return a pmoe.Routing, not {type(routing).__name__}")
    fields = dict(vars(routing))
    if (mix := fields.pop("mix")) is not None:
        check_kind(Mix, "a pmoe.gates.Mix", **{f"gate ({gate_name}): mix": mix})
        fields |= vars(mix)
    fields = {field: value for field, value in fields.items() if value is not None or field in NEEDED}
    for field, value in fields.items():
        check_tensors({"l_aux": 0, "expert": 2}.get(field), **{f"gate ({gate_name}): {field}": value})
        if value.is_meta or (field != "l_aux" and value.device != x_TM.device):
            raise ValueError(
                f"gate ({gate_name}) returned {field} on {value.device}; it must be on {x_TM.device}"
            )
        if field in NEEDED[1:] and not value.is_floating_point():
            raise TypeError(
                f"gate ({gate_name}) returned {field} of dtype {value.dtype}; it must be of a floating-point "
                "type"
            )
    rows, top_k = routing.expert.shape
    if routing.token is None and routing.mix is None:
        rows = num_tokens
    shapes = {"token": (rows,), **dict.fromkeys(("dispatch", "combine"), (num_tokens, rows))}
    types = {"expert": torch.int64, "keep": torch.bool, "token": torch.int64}
    for field, value in fields.items():
        shape = shapes.get(field, (rows, top_k))
        dtype = types.get(field, value.dtype)
        if field not in ("l_aux", "logits") and (tuple(value.shape), value.dtype) != (shape, dtype):
            raise ValueError(
                f"gate ({gate_name}) returned {field} of shape {tuple(value.shape)} and dtype {value.dtype}; "
                f"it must have shape {shape} and dtype {dtype}, to fit T = {num_tokens} tokens and its expert"
            )
    if routing.token is not None and (top_k != 1 or routing.keep is not None):
        raise ValueError(
            f"gate ({gate_name}) returned token, and expert with {top_k} columns; expert must then have 1 "
            "column, and keep must be None: token names only rows that are kept"
        )
    if routing.mix is not None and modules.shared_expert is not None:
        raise ValueError(
            f"shared_expert ({modules.shared_expert}) must be None if the gate ({gate_name}) mixes tokens"
        )
