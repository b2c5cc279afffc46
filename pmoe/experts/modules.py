"""Experts that are a user's own modules, one instance a local expert, run inside the same pipeline.

Each chunk's graph is kept from forward to backward and differentiated there by autograd, parameters and
rows together: such an expert has no weight-gradient task. The tensors that the graph needs, T_DO included,
are not kept in it but handed to the caller to save (`Hidden.tensors`): were checkpointing to see them one
graph at a time, it would run the whole layer again for each, on each rank as often as that has experts.

Letters: N rows, M = d_model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pmoe.experts.base import Experts, Hidden, row_dot
from pmoe.experts.products import GradientSum, RowGroups


@dataclass
class Shelf:
    """Where the graphs of a chunk find the tensors that they saved: filled in forward, handed over, and
    filled again for the time of a backward. It knows no graph, or neither would ever be freed."""

    tensors: list[Tensor] = field(default_factory=list)

    def put(self, tensor: Tensor) -> int:
        self.tensors.append(tensor.detach())
        return len(self.tensors) - 1

    def get(self, index: int) -> Tensor:
        return self.tensors[index]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One expert's part of a chunk. output: None where nothing in it needs a gradient. saved_output: where
    T_DO is on the shelf."""

    rows: GradientEdge
    output: GradientEdge | None
    saved_output: int


class _Enter(torch.autograd.Function):
    """Rows as the start of a graph that does not hold them, as it would hold a leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class ModuleExperts(Experts):
    """Any modules that map (rows, d_model) to (rows, d_model), in any number of rows but 0."""

    runs_under_autocast = True

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.local = nn.ModuleList(modules)
        self.num_local_experts = len(self.local)

    def compute(
        self,
        rows_NM: Tensor,
        weight_N: Tensor,
        groups: RowGroups,
        parameters: Sequence[Tensor],
        *,
        out: Tensor | None = None,
        keep: bool = True,
    ) -> tuple[Tensor, Hidden | None]:
        out = torch.empty_like(rows_NM) if out is None else out
        if not keep:
            for expert, at in groups.slices():
                out[at] = self._run(expert, rows_NM[at]) * weight_N[at].unsqueeze(1)
            return out, None
        shelf, graphs = Shelf(), list[Graph]()
        anchor = torch.empty(0, device=rows_NM.device, requires_grad=True)
        for expert, at in groups.slices():
            with torch.enable_grad(), saved_tensors_hooks(shelf.put, shelf.get):
                rows = _Enter.apply(anchor, rows_NM[at])  # type: ignore[no-untyped-call]
                output = self._run(expert, rows)
            graphs.append(
                Graph(
                    rows=get_gradient_edge(rows),
                    output=get_gradient_edge(output) if output.requires_grad else None,
                    saved_output=shelf.put(output),
                )
            )
            out[at] = output.detach() * weight_N[at].unsqueeze(1)
        tensors, shelf.tensors = shelf.tensors, []
        return out, Hidden(tensors=tensors, graph=(shelf, graphs))

    def _run(self, expert: int, rows_NM: Tensor) -> Tensor:
        output = self.local[expert](rows_NM)
        name = type(self.local[expert]).__name__
        if not isinstance(output, Tensor):
            raise TypeError(f"expert {name} must return a tensor, not {type(output).__name__}")
        if output.shape != rows_NM.shape:
            raise ValueError(
                f"expert {name} returned shape {tuple(output.shape)}; "
                f"it must be that of its rows, {tuple(rows_NM.shape)}"
            )
        return output

    def input_gradient(
        self,
        grad_NM: Tensor,
        rows_NM: Tensor,
        weight_N: Tensor,
        hidden: Hidden,
        groups: RowGroups,
        parameters: Sequence[Tensor],
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        out = torch.empty_like(grad_NM) if out is None else out
        grad_weight_N = torch.empty_like(weight_N)
        wanted = [parameter for parameter in self.parameters() if parameter.requires_grad]
        totals: list[Tensor | None] = [None] * len(wanted)
        shelf, graphs = hidden.graph
        shelf.tensors = list(hidden.tensors)
        for (_, at), graph in zip(groups.slices(), graphs, strict=True):
            output = shelf.get(graph.saved_output)
            grad_weight_N[at] = row_dot(output, grad_NM[at].to(output.dtype)).to(grad_weight_N.dtype)
            if graph.output is None:
                out[at] = 0
                continue
            grad_output = (grad_NM[at] * weight_N[at].unsqueeze(1)).to(output.dtype)
            # The graph is retained because the caller may run backward again; it goes with the context.
            grads = torch.autograd.grad(
                graph.output, [graph.rows, *wanted], grad_output, retain_graph=True, allow_unused=True
            )
            out[at] = 0 if grads[0] is None else grads[0]
            for i, grad in enumerate(grads[1:]):
                total = totals[i]
                if grad is not None:
                    totals[i] = grad if total is None else total + grad
        shelf.tensors = []
        every = iter(totals)
        return out, grad_weight_N, [next(every) if p.requires_grad else None for p in self.parameters()]

    def weight_gradient(
        self, pending: list[Tensor | None], groups: RowGroups, sums: Sequence[GradientSum | None]
    ) -> None:
        for total, grad in zip(sums, pending, strict=True):
            if total is not None and grad is not None:
                total.add(grad)


def build_modules(build: Callable[..., nn.Module], d_model: int, d_hidden: int) -> Callable[[], nn.Module]:
    """How ``build`` makes one expert: build(d_model, d_hidden) if it takes two arguments, else build().

    Raises ValueError where it takes neither.
    """
    signature = inspect.signature(build)
    # A module class without an __init__ of its own shows *args and takes none.
    takes_none = isinstance(build, type) and vars(nn.Module)["__init__"] is getattr(build, "__init__", None)
    for args in ((),) if takes_none else ((d_model, d_hidden), ()):
        try:
            signature.bind(*args)
        except TypeError:
            continue
        return lambda: build(*args)
    raise ValueError(f"expert ({build!r}) must be callable as expert(d_model, d_hidden) or expert()")
