"""Copies of other ranks' experts that are a user's modules, computed by one of this rank's own modules.

The parameters and buffers of an expert are sent to another rank as one row of numbers:

    row   parameter | parameter | ... | buffer | buffer | ...

All parameters have one dtype. The bits of a buffer with another dtype are sent as numbers of this dtype. All
experts have the same architecture (`pmoe.experts.architecture`). So one module of this rank can compute every
copy: it is called with the copy's values in place of its own values (`torch.func.functional_call`).

Letters: C copies that this rank hosts, P numbers of a row, Q parameters of an expert.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from pmoe.experts.base import Experts
from pmoe.experts.expert_autograd import Graph, gradients
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.products import RowGroups


def values_of(module: nn.Module) -> list[Tensor]:
    """Returns the values that a copy of an expert needs, of any shape: its parameters, then its buffers."""
    return [*module.parameters(), *module.buffers()]


def row_values(module: nn.Module) -> list[Tensor]:
    """Returns the values of an expert to send: its parameters, then its buffers as numbers of one dtype.

    module: the expert. Its parameters have one dtype.
    """
    dtype = next(module.parameters()).dtype
    parameters = [parameter.detach() for parameter in module.parameters()]
    return [*parameters, *(_as_numbers(buffer.detach(), dtype) for buffer in module.buffers())]


def elements_in_row(module: nn.Module) -> list[int]:
    """Returns how many elements of a message each parameter, then each buffer of an expert takes.

    The elements have the dtype of the parameters. A buffer of another dtype is sent as its bytes, which fill
    whole elements.

    module: the expert. Its parameters have one dtype.
    """
    size = next(module.parameters()).element_size()
    of_buffers = [-(-buffer.nbytes // size) for buffer in module.buffers()]
    return [*(parameter.numel() for parameter in module.parameters()), *of_buffers]


def _as_numbers(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bits of a buffer, of any shape, as a vector of numbers with another dtype.

    `_from_numbers` is the inverse. If the buffer's bytes do not fill the last number, zero bytes follow.
    """
    if buffer.dtype == dtype:
        return buffer
    given = buffer.contiguous().view(-1).view(torch.uint8)
    padded = given.new_zeros(-(-given.numel() // dtype.itemsize) * dtype.itemsize)
    padded[: given.numel()] = given
    return padded.view(dtype)


def _from_numbers(numbers: Tensor, like: Tensor) -> Tensor:
    """Returns the buffer from which `_as_numbers` made numbers.

    numbers: (numbers,), a part of a copy's numbers.
    like: a tensor with the buffer's shape and dtype.
    """
    if like.dtype == numbers.dtype:
        return numbers.view(like.shape)
    # A new tensor, because a part of a row may begin at an address that the dtype does not allow.
    return numbers.clone().view(torch.uint8)[: like.nbytes].view(like.dtype).view(like.shape)


@dataclass(frozen=True, kw_only=True)
class _CopyGraph(Graph):
    """The autograd graph of one copy's rows of a chunk.

    first: the number of the copy's first parameter among the parameters of all C copies, Q parameters each.
    parameters: the autograd edges of the copy's parameters; None for a parameter without a gradient.
    """

    first: int
    parameters: Sequence[GradientEdge | None]


class CopiedModules(ModuleExperts):
    """Copies of other ranks' experts that are modules, behind the interface of `Experts`.

    The gradients of a chunk begin with those of copy 0's parameters, then come those of copy 1, and so on.

    template: a module of this rank, which computes the copies.
    copied: (C, P), for each of C copies the P numbers of its parameters and buffers. The values may be
        written after this object was built.
    trained: for each parameter of an expert, whether any rank needs its gradient.
    """

    local: nn.ModuleList
    num_local_experts: int

    def __init__(self, template: nn.Module, copied: Tensor, trained: Sequence[bool]) -> None:
        Experts.__init__(self)
        self.local = nn.ModuleList()
        self.num_local_experts = copied.shape[0]
        self._template = [template]  # in a list, so that it does not become a module of this one
        self._copied = copied
        self._trained = trained

    @functools.cached_property
    def _values(self) -> list[list[Tensor]]:
        """The values of each copy: a list of its parameters, followed by its buffers.

        The property must not be read before these values have arrived.
        """
        template = self._template[0]
        sizes = elements_in_row(template)
        parameters = list(template.parameters())
        values = []
        for row in self._copied:
            parts = row.split_with_sizes(sizes)
            of_copy = [
                part.view(parameter.shape).detach().requires_grad_(is_trained)
                for parameter, part, is_trained in zip(parameters, parts, self._trained, strict=False)
            ]
            buffers = zip(template.buffers(), parts[len(parameters) :], strict=True)
            of_copy += [_from_numbers(part, buffer) for buffer, part in buffers]
            values.append(of_copy)
        return values

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        """Maps the name of each parameter and buffer to its index among the values of a copy.

        If two modules share a parameter, the parameter has two names, and both are in the dict. But if one
        module is reached by two names, only the first of them is used: with both, `functional_call` would
        leave a copy's values in the module (pytorch issue 164759).
        """
        template = self._template[0]
        place_of = {id(value): place for place, value in enumerate(values_of(template))}
        return {
            f"{path}.{name}".lstrip("."): place_of[id(value)]
            for path, module in template.named_modules()
            for name, value in (*module._parameters.items(), *module._buffers.items())
            if value is not None
        }

    def _own_tensors(self) -> Iterable[Tensor]:
        return itertools.chain(*self._values)

    def _module(self, expert: int) -> nn.Module:
        return self._template[0]

    def _call(self, expert: int, rows_NM: Tensor) -> Any:
        """Computes a copy's rows.

        Raises RuntimeError if the module draws random numbers or changes a buffer, because its results would
        then depend on the rank that computes them.
        """
        template = self._template[0]
        before = {name: self._values[expert][place] for name, place in self._places.items()}
        versions = [
            _version(before[name], is_buffer=place >= len(self._trained))
            for name, place in self._places.items()
        ]
        values = dict(before)
        random = torch.get_rng_state()
        output = functional_call(template, values, (rows_NM,), tie_weights=False)
        if not torch.equal(random, torch.get_rng_state()):
            raise _not_copied(template, "draws random numbers")
        for (name, place), version in zip(self._places.items(), versions, strict=True):
            value = before[name]
            new_version = _version(value, is_buffer=place >= len(self._trained))
            if values[name] is not value or not torch.equal(new_version, version):
                raise _not_copied(template, f"changes its {name}")
        return output

    def _graphs(self, rows_NM: Tensor, groups: RowGroups) -> Iterator[tuple[Graph, Tensor]]:
        numbers = [expert for expert, _ in groups.slices()]
        for expert, (graph, output) in zip(numbers, super()._graphs(rows_NM, groups), strict=True):
            parameters = self._values[expert][: len(self._trained)]
            edges = [get_gradient_edge(value) if value.requires_grad else None for value in parameters]
            first = expert * len(self._trained)
            yield _CopyGraph(**vars(graph), first=first, parameters=edges), output

    def _gradients(self, graph: Graph, grad_output: Tensor) -> Sequence[Tensor | None]:
        assert isinstance(graph, _CopyGraph)
        of_rows, *of_copy = gradients(graph, graph.parameters, grad_output)
        of_all: list[Tensor | None] = [None] * (self.num_local_experts * len(self._trained))
        of_all[graph.first : graph.first + len(of_copy)] = of_copy
        return [of_rows, *of_all]


def _version(value: Tensor, *, is_buffer: bool) -> Tensor:
    """Returns a tensor that has another value after ``value`` was changed in place.

    Torch counts the changes, but not those of a tensor that was made in inference mode. For a buffer the
    result is then a copy of its bytes. Changes of a parameter are not noticed in inference mode: a module
    seldom makes any, and a copy would need the memory of an expert. On a GPU the host waits for the
    comparison of a buffer's bytes.

    value: a parameter or a buffer of a copy, of any shape.
    is_buffer: whether it is a buffer.
    """
    if not value.is_inference():
        return torch.tensor(value._version)
    if not is_buffer:
        return torch.tensor(0)
    return value.contiguous().view(-1).view(torch.uint8).clone()


def _not_copied(template: nn.Module, what: str) -> RuntimeError:
    """Returns the error for a module whose results depend on the rank that computes them.

    what: the words that follow the module's name in the message, "draws random numbers" for example.
    """
    return RuntimeError(
        f"expert {type(template).__name__}, of which another rank computes a copy (balance), {what} in "
        "forward: its results would depend on the rank that computes them. Use an expert whose output "
        "follows from its rows, parameters and buffers alone, or set balance=False"
    )
