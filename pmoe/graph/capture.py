"""Captures MoELayers in graphs: traces `MoELayer.forward` as operators that the backend "pmoe" can move.

The operators are those of `pmoe.graph.operators` and `pmoe.graph.messages`. If a layer cannot be captured,
torch.compile breaks the graph at the layer. The layer then runs as it does without torch.compile. All this is
for the backend "pmoe": for any other backend, the layer is one operator (`pmoe.graph.one_operator`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.call.decision import LastCall, RunReport
from pmoe.call.module_calls import is_watched
from pmoe.comm.counts import RankCounts
from pmoe.decide.route import autocast_dtype
from pmoe.gates.capacity import expert_capacity
from pmoe.graph import messages, operators
from pmoe.graph.one_operator import outside
from pmoe.kernels.grouped_gemm.reference import activate
from pmoe.layer import MoELayer
from pmoe.warn import warn_once

BACKENDS: list[Any] = []
"""Backend functions for which layers are captured, as `torch.compile` receives them."""


@dataclass(frozen=True)
class CapturedCounts:
    """Row counts of a layer's call that ran inside a compiled graph.

    `LastCall`, the record of a layer's last call, keeps them for statistics. All tensors are on the host. W
    is the number of ranks, E_local the number of experts of one rank.

    send_WE: (W, E_local) int64, rows that this rank sent to each rank's experts; 0 to itself.
    recv_WE: (W, E_local) int64, rows that came from each rank for this rank's experts; 0 from itself.
    own_1E: (1, E_local) int64, rows that stayed on this rank, for each of its experts.
    tokens_W: (W,) int64, tokens of each rank.
    rank: the number of this rank.
    """

    send_WE: Tensor
    recv_WE: Tensor
    own_1E: Tensor
    tokens_W: Tensor
    rank: int

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of any rank."""
        return int(self.tokens_W.max())

    def rows(self) -> RankCounts:
        """Returns the counts as a `RankCounts`, the record of row counts outside of a graph.

        In a `RankCounts`, rows that stay on their rank count as rows that the rank sends to itself.
        """
        send_WE, recv_WE = self.send_WE.clone(), self.recv_WE.clone()
        send_WE[self.rank] = recv_WE[self.rank] = self.own_1E[0]
        recv_1WE = recv_WE.unsqueeze(0)
        return RankCounts(
            send=send_WE.unsqueeze(0), recv=recv_1WE, recv_device=recv_1WE,
            max_tokens=self.max_tokens, needs_grad=torch.is_grad_enabled(),
        )  # fmt: skip

    def kept_E(self) -> Tensor:
        """Returns (E,) int64: for each expert of all ranks, the number of rows from this rank's tokens.

        E is the number of experts of all ranks. Dropped rows are not counted.
        """
        return self.rows().send.flatten()


def install(backend: Any) -> None:
    """Replaces `MoELayer.forward` by a function that torch.compile can trace for ``backend``.

    If torch.compile traces for ``backend``, and the layer can be captured, the graph gets the operators of
    `_captured`. Otherwise the original forward pass runs.

    backend: the backend function, as `torch.compile` receives it.
    """
    BACKENDS.append(backend)
    _forward.__doc__ = _eager.__doc__
    MoELayer.forward = _forward  # type: ignore[assignment, method-assign]


_eager = MoELayer.forward
"""The original `MoELayer.forward`, which runs if a call is not captured in a graph."""


def _forward(
    layer: MoELayer, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    # `install` copies the docstring of MoELayer.forward to this function.
    if torch.compiler.is_dynamo_compiling() and _is_traced_for_us():  # torch.export may trace without Dynamo
        number = -1 if mask is not None else _number(layer)
        if number < 0:
            return outside(layer, x, token_ids, mask)
        return _captured(layer, number, x, token_ids)
    return _eager(layer, x, token_ids, mask)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _number(layer: MoELayer) -> int:
    """Returns the number that stands for the layer in the graph; -1 if the graph must break at the layer.

    Dynamo, the tracer of torch.compile, runs this function while it traces, and puts its result into the
    graph as a constant. Warns once for each reason why a layer cannot be captured.
    """
    reason = _refusal(layer)
    if reason is not None:
        warn_once(f"torch.compile runs a MoELayer outside of the graph: {reason}", for_each_reason=True)
        return -1
    return operators.number_of(layer)


def _refusal(layer: MoELayer) -> str | None:
    """Returns the reason why a layer cannot be captured in a graph; None if it can be."""
    copies = getattr(layer.layer_modules.experts.reduce, "copies", None)
    if copies is not None and copies.size > 1:
        return "its experts have copies on other ranks, with which pmoe.parallelize sums gradients"
    modules = layer.layer_modules
    if modules.shared_expert is not None and modules.shared_expert.are_modules:
        return "its shared_expert is your own module; a graph takes those that MoELayer builds"
    for name, experts, module in (
        ("experts", modules.experts, modules.experts_module),
        ("shared_expert", modules.shared_expert, modules.shared_module),
    ):
        if experts is None or module is None:
            continue
        if module is not experts or is_watched(module):
            return f"{name} ({type(module).__name__}) must have no hooks and no wrapper in a graph"
    # The table of features is asked before the parameters are checked. Experts that are modules have no
    # parameters with the names of operands; the table refuses them with the right reason.
    if (reason := modules.refusal("whole graph")) is not None:
        return reason
    for name, experts in (("experts", modules.experts), ("shared_expert", modules.shared_expert)):
        if experts is None:
            continue
        if not all(operand in experts._parameters for operand in experts.operand_names):
            return (
                f"{name} ({type(experts).__name__}) must have plain parameters in a graph, none of them "
                "parametrized, pruned or replaced"
            )
    return None


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _is_traced_for_us() -> bool:
    """Returns whether torch.compile makes the present trace for one of the `BACKENDS`.

    torch.compile wraps a backend in several functions or objects. So the backend of the trace is unwrapped
    before it is compared with the `BACKENDS`.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return any(getattr(compiler, "compiler_fn", compiler) is backend for backend in BACKENDS)


def _captured(layer: MoELayer, number: int, x: Tensor, token_ids: Tensor | None) -> Tensor:
    """Computes a layer by the operators of this package, which the backend can cut and move in the graph.

    The stages are those of a layer outside a graph: gate, order, exchange of row counts, dispatch, experts,
    combine. The operator `experts` is called twice: for the rows that stay on this rank, which need not wait
    for the dispatch, and for the rows that arrive from other ranks.

    layer: the layer.
    number: the number that stands for the layer in the graph (`pmoe.graph.operators.number_of`).
    x: (..., d_model), the layer's input.
    token_ids: the ids of the tokens, for gates that route by them; else None.

    Returns the layer's output, in the shape of x.
    """
    autocast = autocast_dtype(x)
    own_parameters: list[Any] = [layer.experts._parameters[name] for name in layer.experts.operand_names]
    if layer.layer_modules.experts.is_parallelized:
        own_parameters = [parameter.to_local() for parameter in own_parameters]
    if x.shape[-1] != layer.d_model or (autocast is None and x.dtype != own_parameters[0].dtype):
        return outside(layer, x, token_ids)  # raises the same error as a call outside a graph
    x_TM = x.reshape(-1, layer.d_model)
    tokens = x_TM.shape[0]
    ranks = layer.ranks.size
    gate_inputs = (x_TM,) if token_ids is None else (x_TM, token_ids.reshape(-1))
    routing = layer.gate(*(gate_inputs if getattr(layer.gate, "needs_token_ids", False) else (x_TM,)))
    capacity = -1
    if layer.capacity_factor is not None:
        capacity = expert_capacity(layer.capacity_factor, tokens, layer.top_k, layer.num_experts)
    slot, position, counts, _ = operators.order(
        routing.expert,
        routing.keep,
        None if layer.check_finite is False else routing.logits,
        torch.zeros(layer.num_experts, dtype=torch.int64, device=x.device),
        capacity,
        number,
    )
    rows = x_TM if autocast is None else x_TM.to(autocast)
    parameters = (
        own_parameters if autocast is None else [parameter.to(autocast) for parameter in own_parameters]
    )
    send_WE, recv_WE, own_1E, tokens_W = messages.exchange_counts(counts, slot, rows.dtype, number)
    order = (slot, position, send_WE, own_1E)
    travel, stay = operators.pack(rows, *order, layer.top_k)
    travel_weight, stay_weight = operators.pack(routing.weight.reshape(-1), *order, 1)
    home_rows = travel
    received_rows = []
    if ranks > 1:
        received_rows = messages.exchange_rows([travel, travel_weight], send_WE, recv_WE, None, False, number)
    own_out = operators.experts(stay, stay_weight, own_1E, parameters, number)[0]
    if ranks > 1:
        received_out = operators.experts(*received_rows, recv_WE, parameters, number)[0]
        (home_rows,) = messages.exchange_rows([received_out], recv_WE, send_WE, travel.shape[0], True, number)
    y_TM = operators.join(home_rows, own_out, *order, layer.top_k, tokens)
    if layer.shared_expert is not None:
        y_TM = y_TM + _shared(layer, x_TM, rows)
    row_counts = CapturedCounts(send_WE, recv_WE, own_1E, tokens_W, layer.ranks.rank)
    ran = RunReport(
        path="whole graph", num_tokens=tokens, num_slots=slot.numel(), dtype=rows.dtype, device=x.device
    )
    object.__setattr__(layer, "last", LastCall(l_aux=routing.l_aux, counts=row_counts, ran=ran))
    y: Tensor = y_TM.view(x.shape)
    return y


def _shared(layer: MoELayer, x_TM: Tensor, rows: Tensor) -> Tensor:
    """Returns the output of the shared expert for every token: (T, M), T tokens, M = d_model.

    The output is computed by operators of PyTorch, for which the backend needs no special rules. If the
    shared expert has a gate, the output is multiplied by the gate's weight.

    layer: the layer.
    x_TM: (T, M), the tokens as the gate reads them.
    rows: (T, M), the same tokens, cast to the dtype in which experts compute.
    """
    expert: Any = layer.shared_expert
    dtype = rows.dtype
    w1, w2, *biases = [getattr(expert, name)[0].to(dtype) for name in expert.operand_names]
    b1, b2 = biases or (None, None)
    with torch.autocast(rows.device.type, enabled=False):
        hidden = F.linear(rows, w1, b1)
        out = F.linear(activate(expert.activation, hidden), w2, b2)
        if layer.shared_gate is None:
            return out
        scale: Tensor = layer.shared_gate(x_TM).sigmoid()
        return out * scale.to(out.dtype)
