"""The autograd graph of one expert that is a user's module, kept from forward to backward.

Forward records the graph (`record`). The tensors that autograd saves for it are taken out and handed to the
caller, who keeps them or copies them to the host. Backward puts them back and differentiates (`gradients`):

    forward    Shelf.open -> put, put, ... -> seal -> close     close returns the tensors
    backward   shelf.tensors = ..., shelf.rows = ... -> get, get, ... -> close
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
    """A saved tensor that is a view of the rows that entered the graph.

    size, stride: of the view, in elements.
    offset: elements from the rows' first element to the view's.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Own:
    """A saved parameter or buffer, which stays where it is. version: its version when it was saved."""

    tensor: Tensor
    version: int


@dataclass
class Shelf:
    """The tensors that autograd saved for one expert's graph; `put` and `get` are its saved-tensor hooks.

    own_storages: addresses of the storages of the modules' parameters and buffers.
    own: the parameters and buffers that were saved.
    checks_own: whether `get` raises if one of these changed after it was saved. It is False if other
        saved-tensor hooks are active, such as a checkpoint's: torch's own layers check nothing under them
        either.
    rows: the rows that entered the graph; None while the shelf is closed.
    tensors: the other saved tensors; empty while the shelf is closed.
    rows_changed: whether the expert changed the rows in place.

    The graph refers to its shelf through the hooks. A reference back to the graph would be a cycle through
    autograd, which Python's garbage collector does not see, and neither would ever be freed.
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
        """Begins a recording with these rows."""
        self.rows = rows_NM
        self._rows_version = rows_NM._version

    def seal(self) -> None:
        """Ends a recording: notes which saved tensors the expert changed after they were saved.

        Their gradients would be wrong, so `get` raises for them.
        """
        assert self.rows is not None
        new_versions = [tensor._version for tensor in self.tensors]
        self._changed = frozenset(
            i for i, (old, new) in enumerate(zip(self._versions, new_versions, strict=True)) if old != new
        )
        self.rows_changed = self.rows._version != self._rows_version

    def close(self) -> list[Tensor]:
        """Returns the saved tensors and forgets them: they belong to the caller from now on."""
        tensors = self.tensors
        self.tensors = []
        self.rows = None
        self._known = {}
        return tensors

    def has_saved(self, own: Tensor) -> bool:
        """Returns whether the graph needs this parameter or buffer, or a view of it."""
        address = own.untyped_storage().data_ptr()
        return any(saved.tensor.untyped_storage().data_ptr() == address for saved in self.own)

    def put(self, tensor: Tensor) -> int | _InRows | _Own:
        """Stores one tensor that autograd saves, and returns the key under which `get` finds it:

        `_Own`      a parameter or buffer, or a view of one: it is not activation memory
        `_InRows`   a view of the rows: the caller restores T_DI by itself
        int         anything else: its index in ``tensors``
        """
        rows = self.rows
        assert rows is not None
        storage = tensor.untyped_storage().data_ptr()
        if storage in self.own_storages:
            # detach() shares the version counter of its original, so `get` sees later changes.
            self.own.append(_Own(tensor.detach(), tensor._version))
            return self.own[-1]
        if tensor.numel() and storage == rows.untyped_storage().data_ptr():
            # The caller restores T_DI as it entered. What the expert changed in place, or reads under another
            # dtype, would be lost, so it is copied.
            if tensor._version != self._rows_version or tensor.dtype != rows.dtype:
                return self._keep(tensor.detach().clone())
            return _InRows(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                int(tensor.storage_offset()) - int(rows.storage_offset()),
            )
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor._version)
        if key not in self._known:  # two operations may save the same tensor
            self._known[key] = self._keep(tensor.detach())
        return self._known[key]

    def _keep(self, tensor: Tensor) -> int:
        """Adds a tensor to ``tensors`` and returns its index."""
        self.tensors.append(tensor)
        self._versions.append(tensor._version)
        return len(self.tensors) - 1

    def get(self, key: int | _InRows | _Own) -> Tensor:
        """Returns the tensor that `put` stored under this key.

        Raises RuntimeError if it was changed in place after it was saved.
        """
        if isinstance(key, _Own):
            if self.checks_own and key.tensor._version != key.version:
                raise changed_in_place(key.tensor)
            return key.tensor
        if self.rows_changed if isinstance(key, _InRows) else key in self._changed:
            # Autograd does not check versions of tensors that went through saved-tensor hooks.
            raise RuntimeError(
                "a tensor that an expert's gradient needs has been modified by an inplace operation of the "
                "expert itself: use an operation that returns a new tensor"
            )
        if isinstance(key, _InRows):
            assert self.rows is not None
            return self.rows.as_strided(key.size, key.stride, self.rows.storage_offset() + key.offset)
        return self.tensors[key]


def changed_in_place(tensor: Tensor) -> RuntimeError:
    """Returns the error that autograd raises if a tensor that torch's own layers saved was changed."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a parameter or buffer of shape {tuple(tensor.shape)} was changed between a layer's forward pass "
        "and its backward pass, for example by an optimizer's step"
    )


def saves_plainly() -> bool:
    """Returns whether no saved-tensor hooks are active: only then does autograd check versions."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph of one expert's part of a chunk, without the tensors that it saved.

    at: which rows of the chunk.
    shelf: where the graph finds its saved tensors.
    num_tensors: number of tensors that the shelf held.
    rows: the rows' edge in the graph, from which their gradient is read.
    output: the output's edge; None if nothing in the graph needs a gradient.
    saved_output: the shelf's key of the output (T_DO); -1 if it was not saved.
    """

    at: slice
    shelf: Shelf
    num_tensors: int
    rows: GradientEdge
    output: GradientEdge | None
    saved_output: int | _InRows | _Own


class _Enter(torch.autograd.Function):
    """Starts a graph with rows that the graph does not hold. A leaf tensor would be held until backward.

    anchor: an empty tensor that requires a gradient, so that everything computed from the rows does.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor) -> Tensor:
        # rows.data and no view of rows: an expert may change its input in place, and autograd forbids that
        # for a view that a function returned.
        return rows.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def record(
    run: Callable[[Tensor], Tensor], rows: Tensor, at: slice, shelf: Shelf, own_rows: bool = False
) -> tuple[Graph, Tensor]:
    """Returns the graph of run(rows), its shelf still filled, and the output, detached.

    run: one expert.
    rows: its rows of the chunk. at: which rows these are.
    shelf: an empty shelf, which the recording fills.
    own_rows: True also keeps views of ``rows`` on the shelf, and leaves the output off it. With False the
        caller must set ``shelf.rows`` again before backward.
    """
    anchor = torch.empty(0, device=rows.device, requires_grad=True)
    shelf.checks_own = saves_plainly()
    with torch.enable_grad(), saved_tensors_hooks(shelf.put, shelf.get):
        entered_rows = _Enter.apply(anchor, rows)  # type: ignore[no-untyped-call]
        rows_edge = get_gradient_edge(entered_rows)  # before run: an in-place operation changes it
        shelf.open(torch.empty(0) if own_rows else entered_rows.detach())
        output = run(entered_rows)
    saved_output = -1 if own_rows else shelf.put(output)
    shelf.seal()
    graph = Graph(
        at=at,
        shelf=shelf,
        num_tensors=len(shelf.tensors),
        rows=rows_edge,
        output=get_gradient_edge(output) if output.requires_grad else None,
        saved_output=saved_output,
    )
    return graph, output.detach()


def gradients(graph: Graph, wanted: Sequence[Tensor], grad_output: Tensor) -> Sequence[Tensor | None]:
    """Returns the gradients of the rows and of each of ``wanted``; None for frozen or unused ones.

    graph: its shelf must be filled, and stays filled.
    wanted: the parameters.
    grad_output: the gradient of the output, of the same shape.
    """
    assert graph.output is not None
    # The graph is retained because a user may run backward again. It is freed with the autograd context.
    into: list[Any] = [graph.rows, *(tensor for tensor in wanted if tensor.requires_grad)]
    grads = iter(torch.autograd.grad(graph.output, into, grad_output, retain_graph=True, allow_unused=True))
    return [next(grads), *(next(grads) if tensor.requires_grad else None for tensor in wanted)]
