"""The autograd graph of one expert that is a user's module, kept from forward to backward.

The graph is kept without the tensors that autograd saves for it. Forward (`record`) returns these tensors to
the caller, who keeps them or copies them to the host. Backward (`gradients`) gets them back. While autograd
writes or reads the tensors, they are in the graph's ``saved_slots``, a `SavedTensorSlots`:

    forward    saved_slots.open -> put, put, ... -> seal -> close     close returns the tensors
    backward   saved_slots.tensors = ..., saved_slots.rows = ... -> get, get, ... -> close
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks


@dataclass(frozen=True)
class _InRows:
    """Description of a saved tensor that is a view of the expert's input rows.

    The view itself is not stored. In backward it is made again from the rows, which the caller restores.

    size, stride: size and stride of the view, in elements.
    offset: number of elements from the rows' first element to the view's first element.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Own:
    """Description of a saved tensor that is a parameter or buffer, which is neither copied nor offloaded.

    tensor: the parameter or buffer, or a view of it, of any shape.
    version: its version counter when it was saved.
    """

    tensor: Tensor
    version: int


@dataclass
class SavedTensorSlots:
    """Holds the tensors that autograd saves for one expert's graph, while forward or backward runs.

    Forward stores them and backward reads them. `put` and `get` are the saved-tensor hooks of the graph. All
    tensors may have any shape. In this package, variables for objects of this class are named
    ``saved_slots``.

    own_storages: addresses of the storages of the modules' parameters and buffers.
    own: the parameters and buffers that were saved.
    checks_own: whether `get` raises if a tensor in ``own`` changed after it was saved. It is False if other
        saved-tensor hooks are active, such as the hooks of activation checkpointing, because autograd does
        not check versions under these hooks, either.
    rows: the expert's input rows; None between forward and backward.
    tensors: the other saved tensors; empty between forward and backward, when the caller keeps them.
    rows_changed: whether the expert changed its input rows in place.

    The graph refers to this object through the hooks. This object must not refer to the graph. Otherwise both
    would form a cycle through autograd, which Python's garbage collector does not see, and neither would be
    freed.
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
        """Begins the recording of a graph.

        rows_NM: (N, M), the expert's N input rows with M = d_model columns.
        """
        self.rows = rows_NM
        self._rows_version = rows_NM._version

    def seal(self) -> None:
        """Ends the recording: records which tensors the expert changed in place after they were saved.

        Gradients computed from changed tensors would be wrong, so `get` raises for them.
        """
        assert self.rows is not None
        new_versions = [tensor._version for tensor in self.tensors]
        self._changed = frozenset(
            i for i, (old, new) in enumerate(zip(self._versions, new_versions, strict=True)) if old != new
        )
        self.rows_changed = self.rows._version != self._rows_version

    def close(self) -> list[Tensor]:
        """Removes the saved tensors, of any shape, from this object, and returns them to the caller."""
        tensors = self.tensors
        self.tensors = []
        self.rows = None
        self._known = {}
        return tensors

    def has_saved(self, own: Tensor) -> bool:
        """Returns whether autograd saved this parameter or buffer, or a view of it, for the graph.

        own: the parameter or buffer, of any shape.
        """
        address = own.untyped_storage().data_ptr()
        return any(saved.tensor.untyped_storage().data_ptr() == address for saved in self.own)

    def put(self, tensor: Tensor) -> int | _InRows | _Own:
        """Stores one tensor that autograd saves, of any shape. Returns the key under which `get` finds it.

        The key is one of three:

            `_Own`      for a parameter or buffer, or a view of one, which is in memory anyway
            `_InRows`   for a view of the input rows (T_DI), which the caller keeps or restores
            int         for any other tensor, which is stored: its index in ``tensors``
        """
        rows = self.rows
        assert rows is not None
        storage = tensor.untyped_storage().data_ptr()
        if storage in self.own_storages:
            # detach() shares the version counter of its original, so `get` sees later changes.
            self.own.append(_Own(tensor.detach(), tensor._version))
            return self.own[-1]
        if tensor.numel() and storage == rows.untyped_storage().data_ptr():
            # The caller restores T_DI as it was before the expert ran. If the expert has changed it in place,
            # or reads its memory under another dtype, the saved tensor would be lost, so it is copied.
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
        """Appends a tensor to ``tensors``, notes its version counter, and returns its index."""
        self.tensors.append(tensor)
        self._versions.append(tensor._version)
        return len(self.tensors) - 1

    def get(self, key: int | _InRows | _Own) -> Tensor:
        """Returns the tensor, of any shape, that `put` stored under this key.

        Raises RuntimeError if it was changed in place after it was saved, because gradients would be wrong.
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
    """Returns the error for a parameter or buffer that was changed between forward and backward.

    The text begins like autograd's own error for a saved tensor that was changed.

    tensor: the parameter or buffer, of any shape.
    """
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a parameter or buffer of shape {tuple(tensor.shape)} was changed between a layer's forward pass "
        "and its backward pass, for example by an optimizer's step"
    )


def saves_plainly() -> bool:
    """Returns whether autograd saves tensors without hooks. Only then does it check version counters."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The autograd graph of one expert's rows of a chunk (micro-batch), without the tensors that it saved.

    chunk_rows: the slice of the chunk's rows that the expert computed.
    saved_slots: the `SavedTensorSlots` that holds the saved tensors while autograd writes or reads them.
    num_tensors: number of tensors that saved_slots had after the recording.
    rows: the autograd edge of the input rows, at which their gradient is read.
    output: the autograd edge of the output, where differentiation starts; None if nothing in the graph needs
        a gradient.
    saved_output: the key of the output (T_DO) in saved_slots; -1 if the output was not saved.
    """

    chunk_rows: slice
    saved_slots: SavedTensorSlots
    num_tensors: int
    rows: GradientEdge
    output: GradientEdge | None
    saved_output: int | _InRows | _Own


class _Enter(torch.autograd.Function):
    """Makes the input rows the beginning of an autograd graph, without keeping the rows in memory.

    If a leaf tensor were the beginning, the graph would keep the rows until backward.

    anchor: an empty tensor that requires a gradient, so that everything computed from the rows requires one.
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
    run: Callable[[Tensor], Tensor],
    rows: Tensor,
    chunk_rows: slice,
    saved_slots: SavedTensorSlots,
    own_rows: bool = False,
) -> tuple[Graph, Tensor]:
    """Runs one expert on its rows and records the autograd graph.

    Returns the graph and the detached output. ``saved_slots`` then holds the tensors that autograd saved.

    run: the expert, or another function of rows, such as a user's callback.
    rows: (rows, columns), the rows of the chunk (micro-batch) that ``run`` gets.
    chunk_rows: where ``rows`` are among the chunk's rows, a slice.
    saved_slots: an empty `SavedTensorSlots`.
    own_rows: whether the graph must keep its input rows.

        False, for experts: the engine keeps or restores the rows (T_DI). So if autograd saves the rows, or a
        view of them, only a description is stored (`_InRows`), and the caller must set ``saved_slots.rows``
        before backward. The output is stored for backward.

        True, for callbacks: only the graph can keep the rows. So if autograd saves a view of the rows, the
        view is stored like any other tensor. The output is not stored.
    """
    anchor = torch.empty(0, device=rows.device, requires_grad=True)
    saved_slots.checks_own = saves_plainly()
    with torch.enable_grad(), saved_tensors_hooks(saved_slots.put, saved_slots.get):
        entered_rows = _Enter.apply(anchor, rows)  # type: ignore[no-untyped-call]
        rows_edge = get_gradient_edge(entered_rows)  # before run: an in-place operation changes it
        saved_slots.open(torch.empty(0) if own_rows else entered_rows.detach())
        output = run(entered_rows)
    saved_output = -1 if own_rows else saved_slots.put(output)
    saved_slots.seal()
    graph = Graph(
        chunk_rows=chunk_rows,
        saved_slots=saved_slots,
        num_tensors=len(saved_slots.tensors),
        rows=rows_edge,
        output=get_gradient_edge(output) if output.requires_grad else None,
        saved_output=saved_output,
    )
    return graph, output.detach()


def gradients(
    graph: Graph, wanted: Sequence[Tensor | GradientEdge | None], grad_output: Tensor
) -> Sequence[Tensor | None]:
    """Returns the gradients of a graph's input rows and of each of ``wanted``.

    The gradient is None for a tensor that requires none, or that the graph does not use.

    graph: the graph. Its ``saved_slots`` must hold the tensors that autograd saved; they stay in it.
    wanted: the parameters, of any shape, or their autograd edges; None for a parameter without a gradient.
    grad_output: the gradient of the graph's output, of the same shape.
    """
    assert graph.output is not None
    needed = [value.requires_grad if isinstance(value, Tensor) else value is not None for value in wanted]
    # The graph is retained because a user may run backward again. It is freed with the autograd context.
    into: list[Any] = [graph.rows, *itertools.compress(wanted, needed)]
    grads = iter(torch.autograd.grad(graph.output, into, grad_output, retain_graph=True, allow_unused=True))
    return [next(grads), *(next(grads) if is_needed else None for is_needed in needed)]
