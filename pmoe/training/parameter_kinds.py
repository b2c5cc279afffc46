"""Kinds of parameters (matrices, embeddings, gates, biases), which optimizers treat differently.

The number of dimensions alone does not show the kind: the biases of all experts are one tensor of two
dimensions, (experts, columns). Such a tensor, whose dimension 0 indexes experts, is called stacked.

    kind          parameters                                          weight decay
    matrices      weights of products, of two or more dimensions      as the caller says
                  stacked: experts' w1, w2, a matrix for each expert
    embeddings    weights of torch.nn.Embedding and EmbeddingBag      as the caller says
    gates         parameters of gates and of shared experts' gates    as the caller says; 0 for vectors and
                                                                      scalars
    biases        biases, norms, other vectors                        0
                  stacked: experts' b1, b2, a bias for each expert

`pmoe.parameter_groups` is the function for users.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from pmoe.experts.marks import is_flattened, is_stacked, num_dims
from pmoe.gates import Gate
from pmoe.layer import MoELayer

KindName = Literal["matrices", "embeddings", "gates", "biases"]

KINDS: tuple[KindName, ...] = ("matrices", "embeddings", "gates", "biases")
"""All kinds, in the order of the parameter groups."""


class ParameterKind(NamedTuple):
    """Kind of a parameter, with the two further properties that its parameter group depends on.

    kind: "matrices", "embeddings", "gates" or "biases".
    stacked: True if dimension 0 of the parameter indexes experts.
    decays: True if weight decay applies to it.
    """

    kind: KindName
    stacked: bool
    decays: bool


def grouped_by_kind(
    model: nn.Module, lr: float | Tensor | None, weight_decay: float | None
) -> list[dict[str, Any]]:
    """Returns parameter groups of a model for an optimizer, one for each `ParameterKind`.

    Every parameter, of any shape, is in one group.

    model: the model.
    lr: learning rate of all groups; None leaves it to the optimizer.
    weight_decay: weight decay of the groups to which it applies (`ParameterKind.decays`); None leaves it to
        the optimizer. The other groups get 0.
    """
    of_kind = dict[ParameterKind, list[Tensor]]()
    for parameter, kind in kinds_of(model).items():
        of_kind.setdefault(kind, []).append(parameter)
    groups = list[dict[str, Any]]()
    for kind in sorted(of_kind, key=lambda key: (KINDS.index(key.kind), key.stacked, not key.decays)):
        group: dict[str, Any] = {"params": of_kind[kind], "kind": kind.kind, "stacked": kind.stacked}
        if lr is not None:
            group["lr"] = lr
        if not kind.decays:
            group["weight_decay"] = 0.0
        elif weight_decay is not None:
            group["weight_decay"] = weight_decay
        groups.append(group)
    return groups


def kinds_of(model: nn.Module) -> dict[Tensor, ParameterKind]:
    """Returns the kind of every parameter of a model: matrices, embeddings, gates or biases.

    The parameters, of any shape, are in the order of the model. If a gate or an embedding shares its
    parameter with other modules, the parameter is of the gate's or the embedding's kind.

    Raises ValueError if FullyShardedDataParallel has wrapped the model.
    """
    gates, embeddings = set[Tensor](), set[Tensor]()
    for module in model.modules():
        if isinstance(module, Gate):
            gates.update(module.parameters())
        elif isinstance(module, MoELayer):
            gates.update(module.gate.parameters())
            gates.update(() if module.shared_gate is None else module.shared_gate.parameters())
        elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embeddings.update(module.parameters())
    kinds = dict[Tensor, ParameterKind]()
    for name, parameter in model.named_parameters():
        if is_flattened(parameter):
            raise ValueError(
                f"model (with {name} in FullyShardedDataParallel) must not be wrapped yet, because pieces of "
                "flat parameters do not show what they are: call parameter_groups, or make the optimizer, "
                "before the model is wrapped, and wrap it with use_orig_params=True"
            )
        is_matrix = num_dims(parameter) >= 2 and not _is_bias(name)
        stacked = is_stacked(parameter)
        if parameter in gates:
            kinds[parameter] = ParameterKind("gates", stacked, is_matrix)
        elif parameter in embeddings:
            kinds[parameter] = ParameterKind("embeddings", stacked, True)
        else:
            kinds[parameter] = ParameterKind("matrices" if is_matrix else "biases", stacked, is_matrix)
    return kinds


def _is_bias(name: str) -> bool:
    """Returns whether a parameter is a bias by its name: "bias", or a name that ends in "_bias".

    The name decides, not the number of dimensions: a bias may have two or more, for example (heads, columns).
    """
    own = name.rpartition(".")[2]
    return own == "bias" or own.endswith("_bias")
