"""What the pipeline asks of experts: three functions on rows sorted by expert.

`compute` goes forward. `input_gradient` gives what the rank that owns the tokens waits for. Products that
only the parameters wait for are `weight_gradient`, a task of its own that fills the time while gradients
travel (Lancet, section 4: weight-gradient scheduling).
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
from pmoe.schedule.slots import HiddenColumns

Allocate = Callable[[str, int, int], Tensor]
"""(name, rows, columns) -> memory of the rows' type, uninitialised. Experts say what they need it for ("T_M",
"active", "dT_M", "T_DO", "dT_DI", "scratch", "products"); the pass that calls them says where it lies: in a
ring slot, or anew."""

Reduce = Callable[[Sequence[Tensor]], None]
"""Changes this rank's parts of parameters' gradients in place; a collective, called alike on every rank."""

RestOfCall = Callable[[Any, Tensor], Tensor]
"""(experts, rows (T, M)) -> their results (T, M): the rest of a layer's call, with these experts."""

Runs = Sequence[tuple[slice, slice]]
"""Where rows of a chunk of forward stand in a chunk of backward: pairs (there, here) of equal length."""


def fresh(like: Tensor) -> Allocate:
    """Memory that is allocated each time."""
    return lambda name, rows, columns: like.new_empty(rows, columns)


@dataclass(frozen=True)
class ExpertRows:
    """Rows that experts compute, with all that they compute them with.

    rows_NM: (N, M), T_DI, sorted by expert.
    groups: where each expert's rows begin and end.
    parameters: as `Experts.operands` gives them. Under autocast they are cast copies, and the autograd
        function must name them as its inputs.
    space: gives memory by name, rows and columns; None allocates it.
    out: (N, M), memory for the result; None takes it from ``space``.
    """

    rows_NM: Tensor
    groups: RowGroups
    parameters: Sequence[Tensor]
    space: Allocate | None = None
    out: Tensor | None = None

    def new(self, name: str, columns: int, num_rows: int | None = None) -> Tensor:
        """Memory (num_rows, columns) for what ``name`` says, uninitialised. num_rows: by default N."""
        space = fresh(self.rows_NM) if self.space is None else self.space
        return space(name, self.rows_NM.shape[0] if num_rows is None else num_rows, columns)


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """What `Experts.input_gradient` needs beside the rows (T_M).

    tensors: the caller keeps or offloads them between the passes; kept ones are saved in the autograd context
    of the whole layer: there checkpointing and offloading hooks see them, and a backward frees them. graph:
    whatever is no tensor. expendable: input_gradient may overwrite the tensors.
    """

    tensors: Sequence[Tensor]
    graph: Any = None
    expendable: bool = False


@dataclass(frozen=True)
class Shard:
    """Which part of every expert's hidden columns these are: the index-th of count equal ones. Raises
    ValueError or TypeError where it is none of them."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        check_count(count=self.count)
        check_int(index=self.index)
        if not 0 <= self.index < self.count:
            raise ValueError(f"index ({self.index}) must be from 0 to count ({self.count}) less 1")

    def of(self, columns: int) -> slice:
        """Where this part lies among so many columns."""
        width = columns // self.count
        return slice(self.index * width, (self.index + 1) * width)


WHOLE = Shard()


class Experts(nn.Module, abc.ABC):
    """The E_local experts of one rank. Subclass it for experts of another kind.

    Its methods compute a chunk of N rows of M = d_model columns (`ExpertRows`). weight_N: (N,), the routing
    weights of these rows.
    """

    num_local_experts: int
    shard = WHOLE
    """Which part of every expert's hidden columns these are."""
    is_parallel = True
    """False for experts that every rank has alike, whose parameters are as any dense layer's."""
    are_modules = False
    """Whether each expert is a module of its own, whose saved tensors are its to choose."""
    runs_under_autocast = False
    """Whether compute expects the caller's autocast state (user modules), or cast operands and none."""
    is_parallelized = False
    """Whether `pmoe.parallelize` has laid the parameters out over ranks: stacked ones are DTensors."""
    built = ""
    """A digest of values that they were built with, to be compared at a layer's first call."""
    place: Any = None
    """Which of all experts these are, for state dicts: a `pmoe.decide.stored_state.ExpertPlace`."""
    was_loaded = False
    """Whether values were loaded that may be another rank's. The next call then compares the ranks."""
    may_be_equal = False
    """Users set it if all ranks' experts are equal on purpose. It holds for the next comparison alone."""
    are_equal = False
    """Whether all ranks' experts were equal at the last comparison, or were copied from one network."""
    reduce: Reduce | None = None
    """What becomes of the parameters' gradients at the end of each backward pass, where parallelize says."""
    operand_names: tuple[str, ...] = ()
    """The names under which `operands` reads values, in the order in which methods take them. A layer notes
    them when it is built. Later pruning or parametrizations change neither their number nor their order."""

    def __init__(self) -> None:
        super().__init__()
        self.placements: dict[str, tuple[Any, ...]] = {}  # of DTensors, by operand; empty until parallelized
        self.register_load_state_dict_post_hook(_mark_loaded)  # type: ignore[no-untyped-call]

    def mark_parameters(self) -> None:
        """Sets ``allreduce = False`` on every parameter of experts that ranks do not have alike, and
        ``num_copies`` on b2 where experts are split: it is whole, with the same gradient, on that many ranks.
        Whatever makes new Parameter objects (copying, unpickling, to_empty, load_state_dict with assign=True)
        loses the marks, and is followed by this. Raises ValueError where they are no DTensors any more."""
        for name, parameter in self.named_parameters() if self.is_parallel else ():
            parameter.allreduce = False  # type: ignore[attr-defined]
            if name == "b2" and self.shard.count > 1:
                parameter.num_copies = self.shard.count  # type: ignore[attr-defined]
            if name in self.placements and not hasattr(parameter, "to_local"):
                raise ValueError(
                    f"{name} (a plain tensor, assigned) must be a DTensor, as in the state dict of a "
                    "parallelized model: see torch.distributed.checkpoint"
                )

    def as_modules(self) -> list[nn.Module]:
        """This rank's experts, one module each, where they are modules of a user's own; else none."""
        return []

    def hidden_dims(self) -> Mapping[str, int | None] | None:
        """By parameter name, the dimension that is split where experts are, None for one that every part
        holds whole; dimension 0 of each is the experts. None as a whole (the default) where parameters are no
        such stacks: `pmoe.parallelize` leaves them as they are, and they cannot be cut."""
        return None

    def keep(self, experts: slice, shard: Shard) -> None:
        """Makes these the given ones of the experts and ``shard`` of their hidden columns: of whole ones, or,
        on the meta device, of any. New Parameters. Raises TypeError where `hidden_dims` does not tell how."""
        raise TypeError(f"experts ({type(self).__name__}) must be stacked or modules to be spread over ranks")

    def forward(self, x: Tensor, *, run: RestOfCall | None = None) -> Tensor:
        """Maps rows (T, M) to (T, M). `MoELayer` calls it, so that hooks of this module run.

        run: computes the rows by the experts of all ranks; a layer passes it. Without it there must be one
        expert, such as a layer's shared one, and it computes every row.

        Forward pre-hooks run before any parameter is read, so the call computes with parameters as the hooks
        leave them (pruned, or fetched from another device).

        Raises ValueError without ``run`` where there are several experts.
        """
        if run is not None:
            return run(self, x)
        if self.num_local_experts != 1:
            raise ValueError(
                f"experts ({self.num_local_experts} of {type(self).__name__}) must be called by their "
                "MoELayer, which routes the rows"
            )
        return self.compute_alone(x)

    if TYPE_CHECKING:  # torch's __call__ has no types for checkers: this repeats forward's signature

        def __call__(self, x: Tensor, *, run: RestOfCall | None = None) -> Tensor: ...

    def compute_alone(self, x: Tensor) -> Tensor:
        """Computes every row (T, M) by the only expert, with operations that autograd differentiates.

        Raises TypeError where these experts cannot do so, which is the default.
        """
        raise TypeError(
            f"shared_expert ({type(self).__name__}) has hooks or lies in a wrapper: it must implement "
            "compute_alone(x), by which such a shared expert is computed"
        )

    def note_operands(self) -> None:
        """Sets `operand_names` to the present names. A layer calls it when it is built. Raises nothing."""
        self.operand_names = tuple(value_names(self))

    def operands(self) -> list[Tensor]:
        """The tensors with which a call computes: plain ones, this rank's part of each, (E_local, ...).

        Each is read once, by its name, with its graph: gradients travel back through ``reduce`` to the
        parameters behind it. Raises ValueError where one is missing or of another size.
        """
        names = self.operand_names or tuple(value_names(self))
        values = [self._value_of(name) for name in names]
        if self.is_parallelized:
            from pmoe.experts.placement import local_values

            values = local_values(self, names, values)
        return values

    def _value_of(self, name: str) -> Tensor:
        parameter = self._parameters.get(name)
        if (
            type(parameter) is nn.Parameter
            and parameter.layout is torch.strided
            and not parameter.is_quantized
        ):
            return parameter  # the usual case: `read_value` would take some microseconds for each
        return read_value(self, name)

    def asks_for_gradients(self) -> bool:
        """Whether a parameter, or a tensor that was put in the place of one, requires a gradient."""
        if any(parameter.requires_grad for parameter in self.parameters()):
            return True
        own = vars(self)
        values = (own.get(name) for name in self.operand_names)
        return any(isinstance(value, Tensor) and value.requires_grad for value in values)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mark_parameters()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.mark_parameters()
        return self

    def columns(self, device_type: str) -> HiddenColumns:
        """How wide the buffers are that these experts ask `Allocate` for; all 0 where they ask for none."""
        return HiddenColumns()

    @abc.abstractmethod
    def compute(
        self, given: ExpertRows, weight_N: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Hidden | None]:
        """Returns T_DO (N, M), the experts' output times the routing weight, and what `input_gradient` needs
        beside the rows (T_M), None unless ``keep``."""

    def recipe(self, device: torch.device) -> Any:
        """Taken before a `compute` that keeps nothing: what `recompute` needs to run alike."""
        return None

    def is_repeatable(self, recipe: Any) -> bool:
        """After that compute: whether recompute may take the rows in other chunks than compute did."""
        return True

    @abc.abstractmethod
    def recompute(self, given: ExpertRows, recipe: Any) -> Hidden:
        """T_M made again from T_DI. recipe: of `recipe`, or None for no rows."""

    @abc.abstractmethod
    def join(
        self, parts: Sequence[tuple[Hidden, Runs]], num_rows: int, *, space: Allocate | None = None
    ) -> Hidden:
        """What forward kept of its chunks, arranged for a backward chunk of ``num_rows`` rows."""

    @abc.abstractmethod
    def input_gradient(
        self, grad_NM: Tensor, given: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns the gradients of rows (N, M) and of weight (N,), and what `weight_gradient` needs.

        grad_NM: (N, M), the gradient of T_DO. It may be overwritten, and stays the caller's until then.
        hidden: as `compute`, `recompute` or `join` returned it.
        """

    @abc.abstractmethod
    def weight_gradient(self, pending: Any, groups: RowGroups, sums: Sequence[GradientSum | None]) -> None:
        """Adds the parameters' gradients to ``sums``, of the same shape; None where none is needed.
        pending: as `input_gradient` returned it."""


def local_part(tensor: Tensor) -> Tensor:
    """This rank's memory of a DTensor, or the tensor itself. Without a graph."""
    to_local = getattr(tensor, "to_local", None)  # DTensor's module is slow to import, and seldom needed
    if to_local is None:
        return tensor
    with torch.no_grad():
        local: Tensor = to_local()
        return local


def is_expert(parameter: Tensor) -> bool:
    """Whether it is a parameter that data-parallel wrappers must leave alone (`Experts.mark_parameters`):
    DistributedDataParallel, by ``_set_params_and_buffers_to_ignore_for_model(model, names)`` with the names
    of these."""
    return not getattr(parameter, "allreduce", True)


def _mark_loaded(experts: Experts, _: object) -> None:
    experts.mark_parameters()


def row_dot(a_NX: Tensor, b_NX: Tensor, product_NX: Tensor | None = None) -> Tensor:
    """The inner product of each row, (N,), in float32 or wider. product_NX: memory to work in."""
    narrow = a_NX.dtype in (torch.bfloat16, torch.float16)
    product_NX = torch.mul(a_NX, b_NX, out=product_NX)
    return product_NX.sum(-1, dtype=torch.float32 if narrow else None)
