"""What the pipeline asks of experts: three functions on rows sorted by expert.

`compute` goes forward. `input_gradient` gives what the rank that owns the tokens waits for. Products that
only the parameters wait for are `weight_gradient`, a task of its own that fills the time while gradients
travel (Lancet, section 3: weight-gradient scheduling).

Letters: N rows, M = d_model.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pmoe.experts.products import GradientSum, RowGroups

Space = Callable[[str, int, int], Tensor]
"""(name, rows, columns) -> memory of the rows' type, uninitialised. Experts say what they need it for ("T_M",
"active", "dT_M", "T_DO", "dT_DI", "scratch"); the pass that calls them says where it lies: in a ring slot, or
anew."""

Runs = Sequence[tuple[slice, slice]]
"""Where rows of a chunk of forward stand in a chunk of backward: pairs (there, here) of equal length."""


def fresh(like: Tensor) -> Space:
    """Space that is allocated anew each time."""
    return lambda name, rows, columns: like.new_empty(rows, columns)


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
    """Which part of every expert's hidden columns these are: the index-th of count equal ones."""

    index: int = 0
    count: int = 1

    def of(self, columns: int) -> slice:
        width = columns // self.count
        return slice(self.index * width, (self.index + 1) * width)


WHOLE = Shard()


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of T_M (and its gradient), of the activated hidden where it has memory of its own in forward,
    and of what is worked on a block of rows at a time. scratch_rows: the rows of a block. staged: of the
    widest product that is made elsewhere and then copied to its place."""

    hidden: int = 0
    active: int = 0
    scratch: int = 0
    scratch_rows: int = 0
    staged: int = 0


class Experts(nn.Module, abc.ABC):
    """The E_local experts of one rank.

    The parameters come as an argument, in the order of ``parameters()``: under autocast they are cast
    copies, and the autograd function must name them as its inputs.
    """

    num_local_experts: int
    shard = WHOLE
    """Which part of every expert's hidden columns these are."""
    is_parallel = True
    """False for experts that every rank has alike, whose parameters are as any dense layer's."""
    runs_under_autocast = False
    """Whether compute expects the caller's autocast state (user modules), or cast operands and none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_mark_loaded)  # type: ignore[no-untyped-call]

    def mark_parameters(self) -> None:
        """Sets ``allreduce = False`` on every parameter of experts that ranks do not have alike, and
        ``num_copies`` on b2 where experts are split: it is whole, with the same gradient, on that many ranks.
        Whatever makes new Parameter objects (copying, unpickling, to_empty, load_state_dict with assign=True)
        loses the marks, and is followed by this."""
        shard: Shard = getattr(self, "shard", WHOLE)
        for name, parameter in self.named_parameters() if self.is_parallel else ():
            parameter.allreduce = False  # type: ignore[attr-defined]
            if name == "b2" and shard.count > 1:
                parameter.num_copies = shard.count  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mark_parameters()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.mark_parameters()
        return self

    def columns(self, device_type: str) -> Columns:
        """How wide the buffers are that these experts ask `Space` for; all 0 where they ask for none."""
        return Columns()

    @abc.abstractmethod
    def compute(
        self,
        rows_NM: Tensor,
        weight_N: Tensor,
        groups: RowGroups,
        parameters: Sequence[Tensor],
        *,
        space: Space | None = None,
        out: Tensor | None = None,
        keep: bool = True,
    ) -> tuple[Tensor, Hidden | None]:
        """Returns (T_DO, hidden): the experts' output times the routing weight, (N, M), into ``out`` where
        given, and what `input_gradient` needs beside the rows (T_M); None unless ``keep``."""

    def recipe(self, device: torch.device) -> Any:
        """Taken before a `compute` that keeps nothing: what `recompute` needs to run alike."""
        return None

    def is_repeatable(self, recipe: Any) -> bool:
        """After that compute: whether recompute may take the rows in other chunks than compute did."""
        return True

    @abc.abstractmethod
    def recompute(
        self,
        rows_NM: Tensor,
        groups: RowGroups,
        parameters: Sequence[Tensor],
        recipe: Any,
        *,
        space: Space | None = None,
    ) -> Hidden:
        """T_M made again from T_DI. recipe: of `recipe`, or None for no rows."""

    @abc.abstractmethod
    def join(
        self, parts: Sequence[tuple[Hidden, Runs]], num_rows: int, *, space: Space | None = None
    ) -> Hidden:
        """What forward kept of its chunks, arranged for a backward chunk of ``num_rows`` rows."""

    @abc.abstractmethod
    def input_gradient(
        self,
        grad_NM: Tensor,
        rows_NM: Tensor,
        weight_N: Tensor,
        hidden: Hidden,
        groups: RowGroups,
        parameters: Sequence[Tensor],
        *,
        space: Space | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Any]:
        """Returns the gradients of rows (N, M), into ``out`` where given, and of weight (N,), and what
        `weight_gradient` needs. May overwrite grad_NM, which stays the caller's to keep until then."""

    @abc.abstractmethod
    def weight_gradient(self, pending: Any, groups: RowGroups, sums: Sequence[GradientSum | None]) -> None:
        """Adds the parameters' gradients to ``sums``; None stands for a parameter that needs none."""


def is_expert(parameter: Tensor) -> bool:
    """Whether data-parallel wrappers must leave this parameter alone (`Experts.mark_parameters`):
    DistributedDataParallel, by ``_set_params_and_buffers_to_ignore_for_model(model, names)`` with the names
    of these."""
    return not getattr(parameter, "allreduce", True)


def _mark_loaded(experts: Experts, _: object) -> None:
    experts.mark_parameters()


def row_dot(a_NX: Tensor, b_NX: Tensor) -> Tensor:
    """The inner product of each row, (N,), in float32 or wider."""
    if a_NX.dtype in (torch.bfloat16, torch.float16):
        return (a_NX * b_NX).sum(-1, dtype=torch.float32)
    product: Tensor = torch.linalg.vecdot(a_NX, b_NX)
    return product
