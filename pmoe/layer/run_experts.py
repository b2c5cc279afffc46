"""`run_experts`: runs a caller's experts, with the caller's routing, by pmoe's dispatch and kernels.

It is the entry point for frameworks that have a router and expert weights of their own. pmoe keeps a
`MoELayer` for each module that owns experts, in a table outside of the module. So a model's state_dict,
copies and pickles do not contain the layer. The layer refers to the weights and to the routing only during a
call.

Letters: T tokens of this rank, K experts of a token, E experts of all ranks, E_local of this rank, M =
d_model, H = d_hidden, N rows, G columns of T_M, the hidden activation before the nonlinearity (G = H, or 2H
for gated experts).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import check_flag, check_kind, check_module
from pmoe.comm.ranks import Ranks
from pmoe.experts.borrowed import (
    BorrowedActivation,
    BorrowedExperts,
    BorrowedFFN,
    BorrowedSwiGLU,
    NormedExperts,
    Stacks,
)
from pmoe.experts.few_rows import few_rows_output, has_few_rows
from pmoe.gates.external import ExternalGate
from pmoe.layer.last_few_rows import last_call
from pmoe.layer.moe_layer import MoELayer
from pmoe.text import meant

OPTIONS = (
    "pipeline",
    "pipeline_backward",
    "memory_reuse",
    "memory_budget",
    "slack",
    "order",
    "dispatch",
    "combine",
    "nodes",
    "send_once",
    "wire",
    "wire_backward",
    "wire_combine",
    "balance",
    "allow",
    "products",
)
"""Arguments of `MoELayer` that decide how experts are run.

Arguments that decide what is computed, such as the activation, are arguments of `run_experts` itself.
"""

KINDS: dict[str, type[BorrowedExperts]] = {
    "swiglu": BorrowedSwiGLU,
    "silu": BorrowedFFN,
    "relu": BorrowedFFN,
    "gelu": BorrowedFFN,
}
"""The class of experts for each activation that pmoe's kernels compute, by the activation's name."""


def run_experts(
    owner: nn.Module,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str | Callable[[Tensor], Tensor] = "swiglu",
    transposed: bool = False,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Tensor:
    """Runs experts on routed tokens. Returns for each token the weighted sum of its experts' outputs, (T, M).

    The caller provides the routing and the experts' weights. pmoe sends each token's rows to the ranks of its
    experts, computes the experts there, and sends the results back. The call may use the options of a
    MoELayer that `OPTIONS` lists, such as chunks that hide communication. Gradients reach x, ``weights``, w1,
    w2, b1 and b2. An expert's gradient is a sum over the tokens of all ranks.

    Args:
        owner: the module to which the experts belong. pmoe keeps a `MoELayer` for this module between calls.
            `pmoe.stats` shows that layer under the module's name.
        x: (T, M), this rank's T tokens of M columns. T may be 0 and may differ between ranks.
        index: (T, K) integers, the K experts of each token, from 0 to E - 1 over all ranks. E, the number of
            experts of all ranks, means no expert.
        weights: (T, K), the routing weights.
        w1: (E_local, G, M), the first weights of this rank's E_local experts. G is H, the columns of a hidden
            activation. For "swiglu" G is 2H: the H rows whose products go through SiLU come first. Each rank
            of ``group`` has equally many experts, in the order of the ranks.
        w2: (E_local, M, H), the second weights of these experts.
        b1, b2: (E_local, G) and (E_local, M); None for no biases.
        activation: "swiglu", "silu", "relu", "gelu" (exact), or a function without parameters that maps N
            rows (N, G) to (N, H), each row by itself.
        transposed: whether w1 is (E_local, M, G) and w2 (E_local, H, M).
        group: the ranks over which the experts are spread; None if this rank holds all of them.
        options: arguments of `pmoe.MoELayer` that decide how experts are run, any of `OPTIONS`. They must be
            the same on all ranks.

    With several ranks the call is a collective, and so is its backward pass.

    Raises TypeError or ValueError with the argument's name, its value and the rule. If the values of the
    routing are wrong on one rank, every rank raises the error. Raises RuntimeError if the activation or a
    hook calls the experts of the same owner again.
    """
    check_module(owner=owner)
    check_kind(Tensor, "a tensor", x=x, index=index, weights=weights, w1=w1, w2=w2)
    check_kind((Tensor, type(None)), "a tensor or None", b1=b1, b2=b2)
    check_flag("transposed", transposed)
    check_kind((dist.ProcessGroup, type(None)), "None or a process group", group=group)
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"index ({index.dtype}) must hold integers, the numbers of experts")
    check_option_names(options)
    stacks = Stacks(w1=w1, w2=w2, b1=b1, b2=b2, transposed=transposed, activation=activation)
    kind = _kind_of(stacks)
    check_routing_shapes(index, weights, "index", "weights")
    return run_borrowed(owner, kind(stacks), x, index, weights, group, options)


def check_option_names(options: Mapping[str, Any]) -> None:
    """Raises ValueError for the first option that is not in `OPTIONS`, and suggests the most similar one."""
    for name, value in options.items():
        if name not in OPTIONS:
            raise ValueError(
                f"{name} ({value!r}) must be left out: the options are {', '.join(OPTIONS)}"
                f"{meant(name, OPTIONS)}"
            )


def _kind_of(stacks: Stacks) -> type[BorrowedExperts]:
    """Checks the caller's weights and activation, and returns the class of experts that can run them.

    Raises ValueError if the activation is unknown, or the shapes of the weights do not fit together.
    """
    activation = stacks.activation
    if not (callable(activation) or (isinstance(activation, str) and activation in KINDS)):
        raise ValueError(
            f"activation ({activation!r}) must be one of {', '.join(map(repr, KINDS))}, or a function"
        )
    for name, tensor in stacks.named.items():
        if hasattr(tensor, "to_local"):
            raise ValueError(f"{name} (a DTensor) must be this rank's part: pass {name}.to_local()")
        if tensor.dtype != stacks.w1.dtype or tensor.device != stacks.w1.device:
            raise ValueError(
                f"{name} ({tensor.dtype} on {tensor.device}) must have the dtype and device of w1 "
                f"({stacks.w1.dtype} on {stacks.w1.device})"
            )
    if (stacks.b1 is None) != (stacks.b2 is None):
        raise ValueError("b1 and b2 must both be tensors, or both be None")
    if stacks.w1.dim() != 3 or stacks.w2.dim() != 3:
        raise ValueError(
            f"w1 of shape {tuple(stacks.w1.shape)} and w2 of shape {tuple(stacks.w2.shape)} must have three "
            "dimensions, the first of which counts this rank's experts"
        )
    w1, w2 = stacks.out_features_first(stacks.w1), stacks.out_features_first(stacks.w2)
    experts, d_model, hidden = w2.shape
    factors = {"swiglu": (2,)}.get(activation, (1,)) if isinstance(activation, str) else (1, 2)
    if tuple(w1.shape) not in [(experts, factor * hidden, d_model) for factor in factors]:
        columns = "2 H" if factors == (2,) else "H" if factors == (1,) else "H or 2 H"
        raise ValueError(
            f"w1 of shape {tuple(stacks.w1.shape)} must fit w2 of shape {tuple(stacks.w2.shape)}: with "
            f"{experts} experts of d_model M = {d_model} and H = {hidden}, w1 has {columns} hidden columns "
            f"(transposed={stacks.transposed} says which dimension they are)"
        )
    shapes = {"b1": tuple(w1.shape[:2]), "b2": (experts, d_model)}
    for name, bias in (("b1", stacks.b1), ("b2", stacks.b2)):
        if bias is not None and tuple(bias.shape) != shapes[name]:
            raise ValueError(f"{name} of shape {tuple(bias.shape)} must have shape {shapes[name]}")
    if isinstance(activation, str):
        return KINDS[activation]
    _check_function(activation, w1, hidden)
    return BorrowedActivation


def _check_function(activation: Callable[[Tensor], Tensor], w1: Tensor, hidden: int) -> None:
    """Raises ValueError unless a user's activation function maps a row of G columns to a row of H columns.

    activation: the function. It is called with a row of zeros, (1, G).
    w1: (E_local, G, M), the first weights of E_local experts. The row has their dtype and device, and G
        columns.
    hidden: H, the number of columns that the function must return.
    """
    name = getattr(activation, "__name__", type(activation).__name__)
    if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
        raise ValueError(f"activation ({name}) must have no parameters: they would get no gradient")
    try:
        with torch.no_grad():
            active = activation(w1.new_zeros(1, w1.shape[1]))
    except Exception as error:
        raise ValueError(f"activation ({name}) failed on a row of {w1.shape[1]} columns: {error}") from error
    if not isinstance(active, Tensor) or tuple(active.shape) != (1, hidden):
        found = tuple(active.shape) if isinstance(active, Tensor) else type(active).__name__
        raise ValueError(
            f"activation ({name}) returned {found} for a row of {w1.shape[1]} columns; it must return "
            f"(1, {hidden})"
        )


def check_routing_shapes(index: Tensor, weights: Tensor, index_name: str, weights_name: str) -> None:
    """Raises ValueError unless both tensors of a routing have the same shape (T, K).

    index: the experts of each token.
    weights: the routing weights.
    index_name, weights_name: the names of the caller's arguments, for the message.
    """
    if index.dim() != 2 or weights.shape != index.shape:
        raise ValueError(
            f"{weights_name} (shape {tuple(weights.shape)}) must be of the shape of {index_name} "
            f"({tuple(index.shape)}), one row a token"
        )


# ---- layers by their modules


MOST_LAYERS = 4
"""The most layers that are kept for one module. Its calls may alternate between so many sets of options."""


@dataclass(eq=False)
class _Built:
    """The MoE layers that run the experts of one module, and the arguments with which they were built.

    A model may train with other options than it is evaluated with. A call takes the layer with its own
    options, which remembers what it has measured and compared between the ranks.

    made_for: the sizes, group and options with which ``layer`` was built.
    layer: the layer of the last call.
    earlier: other layers, each with its ``made_for``. The one that was used last is at the end.
    turn: a lock, so that only one thread at a time uses a layer. Threads of a server may share a model, but a
        layer can hold the routing and parameters of only one call.
    thread: the number of the thread that uses the layer now; None between calls.
    """

    made_for: tuple[Any, ...]
    layer: MoELayer
    earlier: list[tuple[tuple[Any, ...], MoELayer]] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)
    thread: int | None = None

    def take(self, made_for: tuple[Any, ...], build: Callable[[], MoELayer]) -> None:
        """Sets ``layer`` to the layer for other arguments. Builds it if no earlier layer was built with them.

        made_for: the arguments.
        build: builds a layer with these arguments.
        """
        if made_for == self.made_for:
            return
        taken = next((place for place, (known, _) in enumerate(self.earlier) if known == made_for), None)
        layer = build() if taken is None else self.earlier.pop(taken)[1]
        self.earlier = [*self.earlier, (self.made_for, self.layer)][1 - MOST_LAYERS :]
        self.made_for = made_for
        self.layer = layer


_layers: weakref.WeakKeyDictionary[nn.Module, _Built] = weakref.WeakKeyDictionary()
"""The layers of each module whose experts have been run.

The keys are weak references, so the table does not keep a module alive.
"""


def layers(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layers that run a model's experts, by the names of the modules that own the experts.

    Modules whose experts were never run have no layer yet. Each layer gives numbers about its last forward
    pass (``row_counts``, ``tokens_per_expert``, ``traffic``) and can predict memory (``predict_memory``).

    model: a model whose experts are run by `run_experts`, or a model of transformers.
    """
    check_module(model=model)
    return {name: _layers[module].layer for name, module in model.named_modules() if module in _layers}


def _with_types(options: Mapping[str, Any]) -> dict[str, tuple[type, Any]]:
    """Returns the options of a layer with the types of their values, to compare them with other options.

    pipeline=True and pipeline=1 are different options, although True == 1.
    """
    return {name: (type(value), value) for name, value in options.items()}


@contextmanager
def _layer_of(
    owner: nn.Module,
    experts: BorrowedExperts | NormedExperts,
    top_k: int,
    num_experts: int,
    group: dist.ProcessGroup | None,
    options: Mapping[str, Any],
) -> Iterator[MoELayer]:
    """Yields the MoE layer that runs a module's experts, to one thread at a time.

    A layer is built at the module's first call with these sizes, this group and these options.

    owner: the module to which the experts belong.
    experts: the module's parameters, as experts that a MoELayer can run.
    top_k: number of experts of each token.
    num_experts: number of experts of all ranks.
    group: the ranks over which the experts are spread; None if this rank holds all experts.
    options: the other arguments of the layer.

    Raises RuntimeError if this thread is already inside a call for the same module.
    """
    _, d_hidden, d_model = experts.stacks.w2.shape
    if not experts.stacks.transposed:
        d_hidden, d_model = d_model, d_hidden
    sizes = (d_model, d_hidden, num_experts, top_k)
    entry = _layers.get(owner)
    if entry is not None and entry.thread == threading.get_ident():
        # The lock would wait for itself.
        raise RuntimeError(
            f"owner ({type(owner).__name__}) must not be the module whose experts are running: the "
            "activation or a hook has called them again. Pass another module as owner of the inner call"
        )
    made_for = (sizes, group, _with_types(options))

    def build() -> MoELayer:
        ranks = Ranks.single() if group is None else group
        return MoELayer(*sizes, gate=ExternalGate(), expert=experts, group=ranks, **options)

    if entry is None:
        entry = _layers[owner] = _Built(made_for, build())
    with entry.turn:
        entry.take(made_for, build)
        entry.thread = threading.get_ident()
        try:
            yield entry.layer
        finally:
            entry.thread = None


# ---- a call


def run_borrowed(
    owner: nn.Module,
    experts: BorrowedExperts | NormedExperts,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    group: dist.ProcessGroup | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Runs experts that belong to another module. Returns each token's weighted sum of outputs, (T, M).

    Unlike `run_experts`, this function does not check its arguments.

    owner: the module to which the experts belong.
    experts: an object that gives the module's parameters the interface of a MoELayer's experts.
    x: (T, M), the T tokens with M = d_model columns.
    index, weights: (T, K), the K experts of each token, and their routing weights. Experts of all ranks are
        numbered from 0 to E - 1; the number E means no expert.
    group: the ranks over which the experts are spread; None if this rank holds all experts.
    options: arguments of `MoELayer`, any of `OPTIONS`.
    """
    # Compared with uint8 numbers, E = 256 would become 0. torch cannot sort the wide unsigned integers.
    index = index.to(torch.int64)
    is_exact = options.get("products") is None  # `run_few_rows` cannot round the operands of products
    if group is None and is_exact and has_few_rows(x, index, weights, experts.stacks):
        built = _layers.get(owner)
        # Other options than before must be checked, so the layer is built again.
        has_same_options = built is not None and built.made_for[2] == _with_types(options)
        y = run_few_rows(owner, x, index, weights, experts.stacks) if has_same_options else None
        if y is not None:
            return y
    num_experts = experts.num_local_experts * (1 if group is None else dist.get_world_size(group))
    keep_TK = index != num_experts
    expert_TK = index.where(keep_TK, 0)
    with _layer_of(owner, experts, index.shape[1], num_experts, group, options) as layer:
        if layer.training != owner.training:
            layer.train(owner.training)
        gate = layer.gate
        assert isinstance(gate, ExternalGate)
        layer.experts = experts
        try:
            with gate.routing(expert_TK, weights, keep_TK):
                y = layer(x)
        finally:  # between calls the layer must not keep the module's parameters alive
            layer.experts = type(experts)(experts.stacks.stand_ins())
    return y.to(x.dtype)


def run_few_rows(
    owner: nn.Module, x: Tensor, index: Tensor, weights: Tensor, stacks: Stacks
) -> Tensor | None:
    """Runs a call with few rows on one rank without the layer, which is faster.

    Returns each token's weighted sum of outputs, (T, M). Returns None if the module is in training mode or
    has no layer yet, or if an expert's number is not in 0 ... E - 1. The caller must then use the layer,
    which runs the call or raises the error. The layer's statistics show the call as its last one.

    owner: the module to which the E experts belong.
    x: (T, M), the T tokens with M = d_model columns.
    index, weights: (T, K), the K experts of each token, and their weights.
    stacks: the experts' weights, for which `has_few_rows` has returned True.
    """
    entry = _layers.get(owner)
    # In training, reentrant activation checkpointing runs forward first without gradients. Both forward
    # passes need the layer, which compares their routing.
    if entry is None or entry.made_for[1] is not None or owner.training:
        return None
    y = few_rows_output(x, index, weights, stacks)
    if y is not None:
        entry.layer.last = last_call(index, stacks.w1.shape[0], x)
    return y
