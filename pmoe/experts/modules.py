"""Experts that are a user's own modules, one instance a local expert, run inside the same pipeline.

Each chunk's graph is kept from forward to backward (it is this expert's hidden, T_DO included) and
differentiated there by autograd, parameters and rows together: such an expert has no weight-gradient task.

Letters: N rows, M = d_model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmoe.experts.base import Experts, row_dot
from pmoe.experts.products import GradientSum, RowGroups


class Graph(NamedTuple):
    """One expert's part of a chunk: its leaf rows and its output, still attached."""

    rows: Tensor
    output: Tensor


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
    ) -> tuple[Tensor, list[Graph] | None]:
        out = torch.empty_like(rows_NM) if out is None else out
        graphs = []
        for expert, at in groups.slices():
            with torch.set_grad_enabled(keep):
                rows = rows_NM[at].detach().requires_grad_(keep)
                output = self.local[expert](rows)
            if output.shape != rows.shape:
                raise ValueError(
                    f"expert {type(self.local[expert]).__name__} returned shape {tuple(output.shape)}; "
                    f"it must be that of its rows, {tuple(rows.shape)}"
                )
            graphs.append(Graph(rows, output))
            out[at] = output.detach() * weight_N[at].unsqueeze(1)
        return out, graphs if keep else None

    def input_gradient(
        self,
        grad_NM: Tensor,
        rows_NM: Tensor,
        weight_N: Tensor,
        hidden: list[Graph],
        groups: RowGroups,
        parameters: Sequence[Tensor],
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        out = torch.empty_like(grad_NM) if out is None else out
        grad_weight_N = torch.empty_like(weight_N)
        wanted = [parameter for parameter in self.parameters() if parameter.requires_grad]
        totals: list[Tensor | None] = [None] * len(wanted)
        for (_, at), graph in zip(groups.slices(), hidden, strict=True):
            grad_weight_N[at] = row_dot(graph.output.detach(), grad_NM[at].to(graph.output.dtype)).to(
                grad_weight_N.dtype
            )
            grad_output = (grad_NM[at] * weight_N[at].unsqueeze(1)).to(graph.output.dtype)
            if not graph.output.requires_grad:
                out[at] = 0
                continue
            # The graph is retained because the caller may run backward again; it goes with the context.
            grads = torch.autograd.grad(
                graph.output, [graph.rows, *wanted], grad_output, retain_graph=True, allow_unused=True
            )
            out[at] = 0 if grads[0] is None else grads[0]
            for i, grad in enumerate(grads[1:]):
                total = totals[i]
                if grad is not None:
                    totals[i] = grad if total is None else total + grad
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
    for args in ((d_model, d_hidden), ()):
        try:
            signature.bind(*args)
        except TypeError:
            continue
        return lambda: build(*args)
    raise ValueError(f"expert ({build!r}) must be callable as expert(d_model, d_hidden) or expert()")
