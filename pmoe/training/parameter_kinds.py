"""Kinds of parameters (matrices, embeddings, gates, biases) that optimizers treat differently.

The number of dimensions alone does not tell the kind: an expert's bias has two. See `pmoe.parameter_groups`.

    kind          parameters                                          weight decay
    matrices      products' weights, of two or more dimensions        the given one
                  stacked: experts' w1, w2, one matrix a slice
    embeddings    of torch.nn.Embedding and EmbeddingBag              the given one
    gates         of gates and shared gates                           the given one; vectors and scalars 0
    biases        biases, norms, other vectors; experts' b1, b2       0
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from pmoe.experts.marks import is_stacked, num_dims
from pmoe.gates import Gate
from pmoe.layer import MoELayer

KindName = Literal["matrices", "embeddings", "gates", "biases"]

KINDS: tuple[KindName, ...] = ("matrices", "embeddings", "gates", "biases")
"""All kinds, in the order of the groups."""


class ParameterKind(NamedTuple):
    """Kind of a parameter, as far as its group depends on it.

    kind: name of the kind.
    stacked: True if dimension 0 counts experts.
    decays: True if weight decay applies to it.
    """

    kind: KindName
    stacked: bool
    decays: bool


def grouped_by_kind(
    model: nn.Module, lr: float | Tensor | None, weight_decay: float | None
) -> list[dict[str, Any]]:
    """Returns one parameter group for each `ParameterKind` of the model, with its options.

    Every parameter (any shape) is in one group. lr, weight_decay: None leaves the option to the optimizer.
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
    """Returns the kind of every parameter (any shape), in the model's order.

    If modules share a parameter and one of them is a gate or an embedding, that one decides.
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
    """Returns whether the name is that of a bias.

    A bias may have several dimensions, such as one for each head.
    """
    own = name.rpartition(".")[2]
    return own == "bias" or own.endswith("_bias")
