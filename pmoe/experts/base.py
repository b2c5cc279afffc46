"""`Experts`, the interface between the engine's two passes and any kind of experts.

Rows come sorted by expert. A chunk goes through these methods:

    forward    compute          rows (T_DI) -> results (T_DO), and what backward needs (T_M)
    backward   recompute        T_M once more, if forward did not keep it
               join             T_M rearranged, if backward has other chunks than forward
               input_gradient   the gradient of the rows, which the rank that owns the tokens waits for
               weight_gradient  the gradients of the parameters, which no other rank waits for

weight_gradient is a task of its own, so that the engine can run it while gradients travel (Lancet, section 4:
weight-gradient scheduling).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pmoe.arguments import check_count, check_int
from pmoe.experts.operands import read_value, value_names
from pmoe.experts.products import GradientSum, RowGroups
from pmoe.schedule.buffer_sizes import HiddenColumns

if TYPE_CHECKING:
    from pmoe.experts.dtensor_layout import Reduce

Allocate = Callable[[str, int, int], Tensor]
"""A function (name, rows, columns) that returns uninitialised memory (rows, columns).

Its dtype is that of the rows. The name says what the memory is for: "T_M", "active", "dT_M", "T_DO", "dT_DI",
"scratch" or "products". The pass that calls the experts decides where it lies: in a ring slot, or in newly
allocated memory.
"""

RestOfCall = Callable[[Any, Tensor], Tensor]
"""A function (experts, rows (T, M)) that runs the rest of a layer's call: it returns (T, M)."""

Runs = Sequence[tuple[slice, slice]]
"""Pairs (slice of a forward chunk, slice of a backward chunk): the same rows in both passes."""


def fresh(like: Tensor) -> Allocate:
    """Returns an `Allocate` that makes new memory at every call, of the dtype and device of ``like``."""
    return lambda name, rows, columns: like.new_empty(rows, columns)


@dataclass(frozen=True)
class ExpertRows:
    """The rows of one chunk, and the parameters and memory that experts compute them with.

    rows_NM: (N, M), T_DI, sorted by expert.
    groups: where each expert's rows begin and end.
    parameters: the tensors that `Experts.operands` returned. Under autocast they are cast copies, and the
        autograd function must name them as its inputs.
    space: gives memory by name, rows and columns; None allocates new memory.
    out: (N, M), memory for the result; None takes it from ``space``.
    """

    rows_NM: Tensor
    groups: RowGroups
    parameters: Sequence[Tensor]
    space: Allocate | None = None
    out: Tensor | None = None

    def new(self, name: str, columns: int, num_rows: int | None = None) -> Tensor:
        """Returns uninitialised memory (num_rows, columns) for the use ``name``; num_rows None is N."""
        space = fresh(self.rows_NM) if self.space is None else self.space
        return space(name, self.rows_NM.shape[0] if num_rows is None else num_rows, columns)


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """T_M in the form that the experts choose: what `Experts.input_gradient` needs beside the rows.

    tensors: the caller keeps them until backward, or copies them to the host. Those that it keeps are saved
        in the autograd context of the whole layer. So activation checkpointing and offloading hooks see them
        there, and backward frees them.
    graph: everything that is not a tensor.
    expendable: True if input_gradient may overwrite the tensors.
    """

    tensors: Sequence[Tensor]
    graph: Any = None
    expendable: bool = False


@dataclass(frozen=True)
class Shard:
    """One of ``count`` equal parts of every expert's hidden columns; ``index`` says which.

    Raises TypeError if index or count is no int, ValueError if count is below 1 or index not in 0 .. count -
    1.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        check_count(count=self.count)
        check_int(index=self.index)
        if not 0 <= self.index < self.count:
            raise ValueError(f"index ({self.index}) must be at least 0 and below count ({self.count})")

    def of(self, columns: int) -> slice:
        """Returns the slice of this part among ``columns`` columns."""
        width = columns // self.count
        return slice(self.index * width, (self.index + 1) * width)


WHOLE = Shard()


class Experts(nn.Module, abc.ABC):
    """The E_local experts of one rank. Subclass it for another kind of experts.

    The methods of a pass compute one chunk of N rows of M = d_model columns (`ExpertRows`). Their argument
    weight_N is (N,): the routing weight of each row.
    """

    num_local_experts: int
    shard = WHOLE
    """The part of every expert's hidden columns that this rank holds."""
    is_parallel = True
    """False for shared experts: every rank holds the same ones, as it does any dense layer."""
    are_modules = False
    """True if each expert is a module of its own, which decides itself which tensors it saves."""
    runs_under_autocast = False
    """True if `compute` runs in the caller's autocast state (user modules). Otherwise the engine casts the
    operands and turns autocast off.
    """
    is_parallelized = False
    """True if `pmoe.parallelize` laid the parameters out on a mesh: stacked ones are DTensors."""
    built = ""
    """Digest of the values at construction. The layer's first call compares it among ranks."""
    place: Any = None
    """A `pmoe.decide.stored_state.ExpertPlace`: which of all experts these are. State dicts record it."""
    was_loaded = False
    """True if values were loaded that may belong to another rank. The next call then compares the ranks."""
    may_be_equal = False
    """Users set it to True if all ranks' experts are equal on purpose. The next comparison resets it."""
    are_equal = False
    """True if all ranks' experts were equal at the last comparison, or were copied from one network."""
    reduce: Reduce | None = None
    """Reduces the parameters' gradients at the end of each backward pass; None if nothing does.
    `pmoe.parallelize` sets it.
    """
    operand_names: tuple[str, ...] = ()
    """The names of the values that `operands` reads, in the order in which methods take them.

    A layer notes them when it is built. Later pruning or parametrizations change neither their number nor
    order.
    """

    def __init__(self) -> None:
        super().__init__()
        # DTensor placements by operand name; empty until `pmoe.parallelize` lays the parameters out.
        self.placements: dict[str, tuple[Any, ...]] = {}
        self.register_load_state_dict_post_hook(_mark_loaded)  # type: ignore[no-untyped-call]

    def mark_parameters(self) -> None:
        """Marks the parameters that data-parallel wrappers must leave alone: ``allreduce = False``.

        A shard's b2 gets ``num_copies`` too: it is whole, with the same gradient, on that many ranks. Shared
        experts get no marks, because every rank has the same.

        Copying, unpickling, to_empty and load_state_dict(assign=True) make new Parameter objects, which have
        no marks. The experts call this after each of them.

        Raises ValueError if a parameter of parallelized experts is not a DTensor any more.
        """
        for name, parameter in self.named_parameters() if self.is_parallel else ():
            parameter.allreduce = False  # type: ignore[attr-defined]
            if name == "b2" and self.shard.count > 1:
                parameter.num_copies = self.shard.count  # type: ignore[attr-defined]
            if name in self.placements and not hasattr(parameter, "to_local"):
                raise ValueError(
                    f"{name} (a plain tensor, assigned) must be a DTensor, because pmoe.parallelize laid the "
                    "experts out: load the state dict of a parallelized model with "
                    "torch.distributed.checkpoint"
                )

    def as_modules(self) -> list[nn.Module]:
        """Returns this rank's experts if they are a user's own modules; otherwise an empty list."""
        return []

    def hidden_dims(self) -> Mapping[str, int | None] | None:
        """Returns by parameter name the dimension that shards split; None for one that they hold whole.

        Dimension 0 of each parameter counts the experts.

        The default returns None in place of a mapping: the parameters are not stacks. `pmoe.parallelize` then
        leaves them as they are, and the experts cannot be split.
        """
        return None

    def keep(self, experts: slice, shard: Shard) -> None:
        """Drops all experts but a range of them, and all hidden columns but those of ``shard``.

        experts: the local experts that stay.
        shard: the part of their hidden columns that stays. These experts must be whole, or on the meta
            device.

        The parameters become new Parameter objects. Raises TypeError if `hidden_dims` does not say what to
        split.
        """
        raise TypeError(
            f"experts ({type(self).__name__}) must be stacked or modules to be spread over ranks, or "
            "implement hidden_dims() and keep()"
        )

    def forward(self, x: Tensor, *, run: RestOfCall | None = None) -> Tensor:
        """Maps rows (T, M) to results (T, M). `MoELayer` calls it so that this module's hooks run.

        run: computes the rows with the experts of all ranks. A layer passes it. Without it these experts must
            be one, such as a layer's shared expert, which then computes every row.

        Forward pre-hooks run before any parameter is read. So the call computes with the parameters that the
        hooks leave behind: pruned ones, for example, or ones that were fetched from another device.

        Raises ValueError without ``run`` if there are several experts.
        """
        if run is not None:
            return run(self, x)
        if self.num_local_experts != 1:
            raise ValueError(
                f"experts ({self.num_local_experts} of {type(self).__name__}) must be called by their "
                "MoELayer, which routes the rows"
            )
        return self.compute_alone(x)

    if TYPE_CHECKING:  # torch's __call__ has no types; this gives type checkers forward's signature

        def __call__(self, x: Tensor, *, run: RestOfCall | None = None) -> Tensor: ...

    def compute_alone(self, x: Tensor) -> Tensor:
        """Computes every row (T, M) with the only expert, in operations that autograd differentiates.

        Raises TypeError unless a subclass implements it.
        """
        raise TypeError(
            f"shared_expert ({type(self).__name__}) has hooks or is in a wrapper, so it is computed by "
            "compute_alone(x): its class must implement that method"
        )

    def note_operands(self) -> None:
        """Sets `operand_names` to the names of the present values. A layer calls it when it is built."""
        self.operand_names = tuple(value_names(self))

    def operands(self) -> list[Tensor]:
        """Returns the plain tensors that a call computes with: this rank's part of each, (E_local, ...).

        Each value is read once, by its name, together with its autograd graph. So gradients travel back
        through ``reduce`` to the parameters that the value was computed from.

        Raises ValueError if a value is missing or has another size.
        """
        names = self.operand_names or tuple(value_names(self))
        values = [self._value_of(name) for name in names]
        if self.is_parallelized:
            from pmoe.experts.dtensor_layout import local_values

            values = local_values(self.placements, self.reduce, names, values)
        self.check_operands(values)
        return values

    def check_operands(self, values: Sequence[Tensor]) -> None:
        """Raises ValueError if a tool has replaced values by tensors of other sizes, types or devices.

        values: those of `operands`, this rank's part of each, (E_local, ...).
        """

    def _value_of(self, name: str) -> Tensor:
        parameter = self._parameters.get(name)
        if (
            type(parameter) is nn.Parameter
            and parameter.layout is torch.strided
            and not parameter.is_quantized
        ):
            return parameter  # the usual case, some microseconds faster than `read_value`
        return read_value(self, name)

    def asks_for_gradients(self) -> bool:
        """Returns whether a parameter, or a tensor that replaced one, requires a gradient."""
        if any(parameter.requires_grad for parameter in self.parameters()):
            return True
        attributes = vars(self)
        values = (attributes.get(name) for name in self.operand_names)
        return any(isinstance(value, Tensor) and value.requires_grad for value in values)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mark_parameters()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.mark_parameters()
        return self

    def columns(self, device_type: str) -> HiddenColumns:
        """Returns the widths of the buffers that these experts request from `Allocate`; 0 for none."""
        return HiddenColumns()

    @abc.abstractmethod
    def compute(
        self, expert_rows: ExpertRows, weight_N: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Hidden | None]:
        """Returns T_DO (N, M), the experts' output times weight_N, and the hidden (T_M) for backward.

        keep: False returns None in place of the hidden.
        """

    def recipe(self, device: torch.device) -> Any:
        """Returns what `recompute` needs to repeat the `compute` that follows: a random state, for example.

        The engine calls it before each compute whose T_M it may have to compute again.
        """
        return None

    def is_repeatable(self, recipe: Any) -> bool:
        """Returns whether `recompute` may take the rows in other chunks than the `compute` before it did.

        recipe: what `recipe` returned before that compute.
        """
        return True

    @abc.abstractmethod
    def recompute(self, expert_rows: ExpertRows, recipe: Any) -> Hidden:
        """Returns T_M computed again from T_DI.

        recipe: what `recipe` returned before forward's compute; None if forward had no rows.
        """

    @abc.abstractmethod
    def join(
        self, parts: Sequence[tuple[Hidden, Runs]], num_rows: int, *, space: Allocate | None = None
    ) -> Hidden:
        """Returns the hidden (T_M) of a backward chunk of ``num_rows`` rows, taken from forward's chunks.

        parts: the hidden of each forward chunk that has rows of it, and which rows these are.
        space: gives memory for the result; None allocates it.
        """

    @abc.abstractmethod
    def input_gradient(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns the gradients of rows (N, M) and of weight (N,), and what `weight_gradient` needs.

        grad_NM: (N, M), the gradient of T_DO. It may be overwritten. Its memory must live until
            `weight_gradient` has run.
        hidden: the result of `compute`, `recompute` or `join`.
        """

    @abc.abstractmethod
    def weight_gradient(self, pending: Any, groups: RowGroups, sums: Sequence[GradientSum | None]) -> None:
        """Adds the gradients of the parameters to ``sums``.

        pending: the third result of `input_gradient`.
        sums: one for each parameter, of the same shape; None for a parameter that needs no gradient.
        """


def _mark_loaded(experts: Experts, _: object) -> None:
    experts.mark_parameters()


def row_dot(a_NX: Tensor, b_NX: Tensor, product_NX: Tensor | None = None) -> Tensor:
    """Returns the inner product of each row of a with the same row of b: (N,), in float32 or wider.

    product_NX: memory for the products of the elements; None allocates it.
    """
    narrow = a_NX.dtype in (torch.bfloat16, torch.float16)
    product_NX = torch.mul(a_NX, b_NX, out=product_NX)
    return product_NX.sum(-1, dtype=torch.float32 if narrow else None)
