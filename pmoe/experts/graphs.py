"""A user's own module run inside a pass: its graph is kept from forward to backward and differentiated there
by autograd, and the tensors that the graph needs are handed to the caller to keep or offload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks


@dataclass(frozen=True)
class _InRows:
    """A saved tensor that is a view of the rows that entered the graph."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Own:
    """A saved parameter or buffer, which stays where it is. version: of the tensor when it was saved."""

    tensor: Tensor
    version: int


@dataclass
class Shelf:
    """Where the graph of one expert finds the tensors that it saved: filled in forward, handed over, and
    filled again for the time of a backward. It knows no graph, or neither would ever be freed.

    own_storages: the storages of parameters and buffers. own: the parameters and buffers that were saved.
    checks_own: whether these must stay as they were until backward. torch's own layers do not check tensors
    that go through saved-tensor hooks, such as a checkpoint's, and neither does a shelf.
    """

    own_storages: frozenset[int]
    own: list[_Own] = field(default_factory=list)
    checks_own: bool = True
    rows: Tensor | None = None
    tensors: list[Tensor] = field(default_factory=list)
    rows_changed: bool = False
    _known: dict[Any, int] = field(default_factory=dict)
    _versions: list[int] = field(default_factory=list)
    _rows_version: int = 0
    _changed: frozenset[int] = frozenset()

    def open(self, rows_NM: Tensor) -> None:
        self.rows, self._rows_version = rows_NM, rows_NM._version

    def seal(self) -> None:
        """After forward: what the expert wrote over after it was saved is not what a gradient needs."""
        assert self.rows is not None
        now = [tensor._version for tensor in self.tensors]
        self._changed = frozenset(
            i for i, (old, new) in enumerate(zip(self._versions, now, strict=True)) if old != new
        )
        self.rows_changed = self.rows._version != self._rows_version

    def close(self) -> list[Tensor]:
        """The shelf without its tensors, which are the caller's from now on."""
        tensors, self.tensors, self.rows, self._known = self.tensors, [], None, {}
        return tensors

    def has_saved(self, own: Tensor) -> bool:
        """Whether the graph needs this parameter or buffer, or a view of it."""
        place = own.untyped_storage().data_ptr()
        return any(each.tensor.untyped_storage().data_ptr() == place for each in self.own)

    def put(self, tensor: Tensor) -> int | _InRows | _Own:
        rows = self.rows
        assert rows is not None
        storage = tensor.untyped_storage().data_ptr()
        if storage in self.own_storages:
            # Not activation memory. A detached tensor shares the version of its original.
            self.own.append(_Own(tensor.detach(), tensor._version))
            return self.own[-1]
        if tensor.numel() and storage == rows.untyped_storage().data_ptr():
            # T_DI is overwritten between the passes: what was changed in place is a tensor of its own.
            if tensor._version != self._rows_version or tensor.dtype != rows.dtype:
                return self._keep(tensor.detach().clone())
            return _InRows(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                int(tensor.storage_offset()) - int(rows.storage_offset()),
            )
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor._version)
        if key not in self._known:  # what two operations save is one tensor
            self._known[key] = self._keep(tensor.detach())
        return self._known[key]

    def _keep(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        self._versions.append(tensor._version)
        return len(self.tensors) - 1

    def get(self, key: int | _InRows | _Own) -> Tensor:
        if isinstance(key, _Own):
            if self.checks_own and key.tensor._version != key.version:
                raise changed_in_place(key.tensor)
            return key.tensor
        if self.rows_changed if isinstance(key, _InRows) else key in self._changed:
            # Autograd's own check does not see through saved-tensor hooks.
            raise RuntimeError(
                "a tensor that an expert's gradient needs has been modified by an inplace operation"
            )
        if isinstance(key, _InRows):
            assert self.rows is not None
            return self.rows.as_strided(key.size, key.stride, self.rows.storage_offset() + key.offset)
        return self.tensors[key]


def changed_in_place(tensor: Tensor) -> RuntimeError:
    """The error that autograd raises for a changed tensor of torch's own layers."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a parameter or buffer of shape {tuple(tensor.shape)} was changed between a layer's forward pass "
        "and its backward pass, by an optimizer's step say"
    )


def saves_plainly() -> bool:
    """Whether no saved-tensor hooks are active now. Only then does autograd check that what it saves is not
    changed."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One expert's part of a chunk, the rows ``at``. output: None where nothing in it needs a gradient.
    saved_output: where T_DO is on the shelf."""

    at: slice
    shelf: Shelf
    num_tensors: int
    rows: GradientEdge
    output: GradientEdge | None
    saved_output: int | _InRows | _Own


class _Enter(torch.autograd.Function):
    """Rows as the start of a graph that does not hold them, as it would hold a leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor) -> Tensor:
        # No view for autograd, which lets nothing be changed in place that a function returned as a view.
        return rows.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def record(
    run: Callable[[Tensor], Tensor], rows: Tensor, at: slice, shelf: Shelf, own_rows: bool = False
) -> tuple[Graph, Tensor]:
    """run(rows) with its graph, the shelf still filled, and its output, detached. Views of ``rows`` that it
    saves are not on the shelf, and whoever runs backward puts the rows back; with own_rows they are, and the
    output is not."""
    anchor = torch.empty(0, device=rows.device, requires_grad=True)
    shelf.checks_own = saves_plainly()
    with torch.enable_grad(), saved_tensors_hooks(shelf.put, shelf.get):
        entered_rows = _Enter.apply(anchor, rows)  # type: ignore[no-untyped-call]
        entered = get_gradient_edge(entered_rows)  # an operation in place gives rows another
        shelf.open(torch.empty(0) if own_rows else entered_rows.detach())
        output = run(entered_rows)
    saved_output = -1 if own_rows else shelf.put(output)
    shelf.seal()
    graph = Graph(
        at=at,
        shelf=shelf,
        num_tensors=len(shelf.tensors),
        rows=entered,
        output=get_gradient_edge(output) if output.requires_grad else None,
        saved_output=saved_output,
    )
    return graph, output.detach()


def gradients(graph: Graph, wanted: Sequence[Tensor], grad_output: Tensor) -> Sequence[Tensor | None]:
    """Of the rows, then of each of ``wanted``, None of those that are frozen; the shelf is filled and stays
    so."""
    assert graph.output is not None
    # The graph is retained because the caller may run backward again; it goes with the context.
    into: list[Any] = [graph.rows, *(each for each in wanted if each.requires_grad)]
    found = iter(torch.autograd.grad(graph.output, into, grad_output, retain_graph=True, allow_unused=True))
    return [next(found), *(next(found) if each.requires_grad else None for each in wanted)]
