"""Initializes every expert of a layer as a copy of one trained dense network (upcycling).

Sparse upcycling (arXiv 2212.05055) makes equal copies. Noise can make the copies differ a little.
Drop-Upcycling (arXiv 2502.19261, section 3) replaces some hidden columns of each copy by random values. The
random values have the mean and the standard deviation of the values that they replace.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pmoe.arguments import check_kind, check_not_negative, check_positive
from pmoe.experts import seeded
from pmoe.experts.columns import own_columns
from pmoe.experts.dtensor_layout import check_gathered
from pmoe.experts.lora import check_no_adapters
from pmoe.experts.operands import local_part
from pmoe.experts.stacked import StackedExperts
from pmoe.layer import MoELayer

LINEARS = {1: ("w1", "w2"), 2: ("gate_proj", "up_proj", "down_proj")}
"""Names of the linear layers of a dense module, for plain experts (1) and for gated experts (2).

A key is `StackedExperts.hidden_factor`:

    1   FFN: two layers, which may have any names. The first is w1, the second w2
    2   SwiGLU: three layers, which must have these names. The first two are the halves of w1
"""


@torch.no_grad()
def copy_into_experts(
    layer: MoELayer,
    dense: nn.Module | Mapping[str, Tensor],
    *,
    noise: float = 0.0,
    drop: float = 0.0,
    router_std: float | None = None,
) -> None:
    """Initializes every expert of a layer with the weights of one dense network (upcycling).

    Args:
        layer: a layer on one rank or several, parallelized or not. Every rank must call the function with the
            same values, under the same torch seed.
        dense: the network, or its tensors by name. Its form depends on the class of the layer's experts (M =
            d_model, H = d_hidden):

            - "ffn": a module with two `torch.nn.Linear`, from M to H columns and from H to M; or the tensors
              w1 (H, M), w2 (M, H), b1 (H,), b2 (M,).
            - "swiglu": a module with linear layers gate_proj, up_proj and down_proj; or the tensors w1 (2H,
              M) with the rows of gate_proj first, w2 (M, H), b1 (2H,), b2 (M,).
            - experts that are a user's modules: a module of the same class, or its state dict.
        noise: the standard deviation of normal noise on each weight matrix, as a fraction of the matrix's own
            standard deviation.
        drop: the fraction of hidden columns that are replaced by random values in each expert, from 0 to 1
            (Drop-Upcycling); 0.5 is usual. In one expert, the same columns are replaced in all matrices.
            Different experts have different columns replaced. The random values are normal, with the mean
            and the standard deviation of the values that they replace.
        router_std: the standard deviation of random values for the router's weight; 0.02 is usual. None
            leaves the router unchanged.

    Values are cast to the layer's dtype. If the hidden columns of an expert are split over ranks ("esp"),
    each rank copies its own columns. Random values depend on torch's seed and the expert's number, not on the
    number of ranks.

    Without noise and drop, the layer computes the same as the dense network if each token's routing weights
    sum to 1 (top_k above 1, or normalize_gate=True).

    A layer normally raises ValueError if its experts are equal on all ranks, because this usually means that
    all ranks have loaded the same rank's file by mistake. This function switches that check off for equal
    copies.

    Raises ValueError, before anything is changed, if names, shapes or the activation differ from those of an
    expert, if a number is out of range, if the layer is on the meta device, or if ``router_std`` is set and
    the router has no weight. Raises TypeError for experts of another class, and if ``noise`` or ``drop`` is
    above 0 for experts that are modules.
    """
    check_kind(MoELayer, "a pmoe.MoELayer", layer=layer)
    check_kind((nn.Module, Mapping), "a module, or tensors by name", dense=dense)
    check_not_negative(noise=noise, drop=drop)
    if drop > 1:
        raise ValueError(f"drop ({drop}) must be at most 1")
    check_positive(router_std=router_std)
    experts = layer.experts
    check_no_adapters(layer.layer_modules.experts, "layer")
    check_gathered(layer.layer_modules.experts, "layer", "call copy_into_experts before pmoe.parallelize")
    if any(parameter.is_meta for parameter in experts.parameters()):
        raise ValueError("layer (on the meta device) must have values: call to_empty(device=...) before")
    router = getattr(layer.layer_modules.router, "weight", None)
    if router_std is not None and not isinstance(router, Tensor):
        kind = type(layer.gate).__name__
        raise ValueError(f"router_std ({router_std}) must be None: the gate ({kind}) has no weight to draw")
    is_varied = noise > 0 or drop > 0
    if isinstance(experts, StackedExperts) and experts.hidden_dims() is not None:
        first = layer.first_expert
        variation = (noise, drop) if is_varied else None
        copies = _into_stacked(experts, dense, variation, first)
    elif experts.are_modules and not is_varied:
        copies = [copy for expert in experts.as_modules() for copy in _into_module(expert, dense)]
    else:
        kind = type(experts).__name__
        rule = "plain stacked ones (no parametrizations)" + ("" if is_varied else " or modules")
        raise TypeError(f"experts ({kind}) must be {rule}" + " for noise or drop" * is_varied)
    for target, value in copies:
        target.copy_(value)
    if isinstance(router, Tensor) and router_std is not None:
        (drawn,) = seeded(
            lambda _: torch.randn(router.shape, device="cpu"), first_expert=layer.num_experts, count=1
        )
        local_part(router).copy_(drawn * router_std)
    experts.may_be_equal = not is_varied
    experts.are_equal = not is_varied
    experts.was_loaded = layer.ranks.size > 1  # the next call then compares the ranks


def _into_stacked(
    experts: StackedExperts,
    dense: nn.Module | Mapping[str, Tensor],
    variation: tuple[float, float] | None = None,
    first_expert: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs (target, value): the values to copy into the parameters of stacked experts.

    Stacked experts keep each weight of all experts in one tensor. A target is this rank's part of such a
    tensor, of shape (E_local, ...) for E_local experts. A value has the shape of its target, or the shape
    (...) of one expert, and is then copied to every expert.

    experts: the experts of this rank.
    dense: the dense network, or its tensors by name.
    variation: the arguments (noise, drop) of `copy_into_experts`; None makes equal copies.
    first_expert: the number of this rank's first expert among all experts.

    Raises ValueError if the names or shapes differ from those of an expert.
    """
    values = _named_as_stacked(experts, dense) if isinstance(dense, nn.Module) else dict(dense)
    dims = experts.hidden_dims() or {}
    _check_names(set(values), set(dims))
    targets = {name: local_part(experts.get_parameter(name)) for name in dims}
    for name, dim in dims.items():
        factor = experts.hidden_factor if dim == 1 else 1
        whole_shape = list(targets[name].shape[1:])
        if dim is not None:
            whole_shape[dim - 1] = factor * experts.all_hidden
        _check_shape(name, values[name], tuple(whole_shape))
    if variation is None:
        return [(target, _columns(experts, name, values[name])) for name, target in targets.items()]
    varied = seeded(
        lambda _: _varied(experts, values, *variation),
        first_expert=first_expert,
        count=experts.num_local_experts,
    )
    return [
        (target, torch.stack([_columns(experts, name, expert[name]) for expert in varied]))
        for name, target in targets.items()
    ]


def _columns(experts: StackedExperts, name: str, value: Tensor) -> Tensor:
    """Returns this rank's hidden columns of one expert's tensor.

    Without sharding of experts ("esp"), the rank has all columns. The result for b2, which has no hidden
    columns, is the whole tensor.

    experts: the experts of this rank.
    name: the name of the tensor: "w1", "w2", "b1" or "b2".
    value: the tensor of the whole expert.
    """
    dim = (experts.hidden_dims() or {})[name]
    if dim is None:
        return value
    factor = experts.hidden_factor if dim == 1 else 1
    return own_columns(value, dim - 1, factor, experts.shard)


def _varied(
    experts: StackedExperts, values: Mapping[str, Tensor], noise: float, drop: float
) -> dict[str, Tensor]:
    """Returns the weights of one expert: the dense weights with noise and some random hidden columns.

    Random numbers come from the CPU's generator. All values are computed in float32 or a wider dtype.

    experts: the experts of this rank.
    values: the dense network's w1 (fH, M), w2 (M, H), b1 (fH,), b2 (M,), where H = d_hidden, M = d_model, and
        f is 2 for gated experts and 1 for others.
    noise: standard deviation of the noise, as a fraction of a matrix's own standard deviation.
    drop: fraction of the hidden columns that are replaced by random values.
    """
    hidden = experts.all_hidden
    chosen = torch.randperm(hidden, device="cpu")[: round(drop * hidden)]
    changed = {}
    for name, dim in (experts.hidden_dims() or {}).items():
        value = values[name].detach().to("cpu")
        wide = value.to(torch.promote_types(value.dtype, torch.float32)).clone()
        if dim is not None:
            # The two halves of a gated w1 are two matrices, each with its own standard deviation.
            for matrix in wide.unflatten(dim - 1, (-1, hidden)).unbind(dim - 1):
                if noise and name in ("w1", "w2"):
                    matrix += noise * matrix.std() * torch.randn(matrix.shape, dtype=wide.dtype, device="cpu")
                old = matrix.index_select(dim - 1, chosen)
                if old.numel() > 1:
                    draws = torch.randn(old.shape, dtype=wide.dtype, device="cpu")
                    matrix.index_copy_(dim - 1, chosen, old.mean() + old.std() * draws)
        changed[name] = wide.to(value.dtype)
    return changed


def _named_as_stacked(experts: StackedExperts, dense: nn.Module) -> dict[str, Tensor]:
    """Returns a dense module's weights and biases under the names of one expert: w1, w2, b1 and b2.

    experts: the layer's experts, whose class says which linear layers ``dense`` must have.
    dense: the module.

    Raises ValueError if the module does not have exactly the linear layers that the experts' class needs, if
    only some of its linear layers have a bias, or if it has another activation.
    """
    linears = {name: linear for name, linear in dense.named_modules() if isinstance(linear, nn.Linear)}
    wanted = LINEARS.get(experts.hidden_factor, ())
    if experts.hidden_factor == 1:
        chosen = list(linears.values())
        text = "two torch.nn.Linear, of which the first widens"
    else:
        by_name = {name.rpartition(".")[2]: linear for name, linear in linears.items()}
        chosen = [by_name[name] for name in wanted if name in by_name]
        text = f"linear layers named {', '.join(wanted)}"
    if len(chosen) != len(wanted) or len(linears) != len(wanted):
        raise ValueError(
            f"dense ({type(dense).__name__} with linear layers {', '.join(linears) or 'none'}) must have "
            f"{text}, or be given as tensors by the names w1, w2, b1, b2"
        )
    _check_activation(experts, dense)
    *first, last = chosen
    values = {"w1": torch.cat(tuple(linear.weight for linear in first)), "w2": last.weight}
    biases = [linear.bias for linear in chosen if linear.bias is not None]
    if len(biases) == len(chosen):
        values |= {"b1": torch.cat(tuple(biases[:-1])), "b2": biases[-1]}
    elif biases:
        raise ValueError(
            f"dense ({type(dense).__name__}) must have biases in all of its linear layers or in none"
        )
    return values


def _check_activation(experts: StackedExperts, dense: nn.Module) -> None:
    """Raises ValueError if a dense module has another nonlinearity of torch than the experts.

    Experts with a nonlinearity of a user's own are not checked. Modules of other libraries are not known, and
    neither are functions that ``forward`` calls.

    experts: the layer's experts.
    dense: the module.
    """
    own = {"swiglu": "silu"}.get(experts.fused_activation or "", experts.fused_activation)
    for module in dense.modules():
        if own is None or type(module).__module__ != nn.GELU.__module__:
            continue
        if type(module).__name__.lower() != own or getattr(module, "approximate", "none") != "none":
            raise ValueError(
                f"dense (with {module}) must have the activation of the experts, {own}: give the layer the "
                "same one, or pass tensors by the names w1, w2, b1, b2 to copy them in spite of it"
            )


def _into_module(expert: nn.Module, dense: nn.Module | Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs (target, value): the values to copy into one expert that is a user's module.

    A target is a parameter or buffer of the expert. The value has the shape of its target.

    expert: the user's module.
    dense: a module of the same class, or its state dict.

    Raises ValueError if the names or shapes differ from those of the expert.
    """
    targets = expert.state_dict()  # the module's own memory
    values = dense.state_dict() if isinstance(dense, nn.Module) else dict(dense)
    _check_names(set(values), set(targets))
    for name, target in targets.items():
        _check_shape(name, values[name], tuple(target.shape))
    return [(local_part(target), values[name]) for name, target in targets.items()]


def _check_names(names: set[str], wanted: set[str]) -> None:
    """Raises ValueError unless the dense network's tensors have the same names as one expert's tensors.

    names: the names of the dense network's tensors.
    wanted: the names of one expert's tensors.
    """
    if names != wanted:
        given_names = ", ".join(sorted(names)) or "none"
        raise ValueError(
            f"dense (tensors {given_names}) must have those of one expert: {', '.join(sorted(wanted))}"
        )


def _check_shape(name: str, value: object, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a value of the dense network has the shape that one expert needs.

    name: the tensor's name, for the error.
    value: the dense network's value.
    shape: the shape of this tensor in one whole expert.
    """
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        given_shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"dense ({name}: {given_shape}) must be of the shape of one whole expert, {shape}")
