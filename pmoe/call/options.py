"""The options of a layer: each is checked once, and the values that follow from options are computed."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, get_args

from pmoe.arguments import (
    check_count,
    check_flag,
    check_int,
    check_kind,
    check_number,
    check_positive,
    plain_int,
)
from pmoe.kernels.scaled_products.formats import ProductsName
from pmoe.planner.degree import (
    DEGREES,
    SOLVE,
    SOLVER_DEGREES,
    SolveName,
    check_backward,
    check_pipeline,
)
from pmoe.schedule.restore import (
    KEEP,
    AllowName,
    Restore,
    StrategyName,
    pairs_to_choose,
    parse_restore,
)
from pmoe.schedule.wire import WireName, Wires
from pmoe.text import parse_bytes

FusedName = Literal["forward", "persistent", "auto"]
"""The values of MoELayer's argument ``fused``, apart from True and False."""


MOST_COPIES = 2
"""The most copies of other ranks' busy experts that a rank gets with ``balance=True``."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Switches for benchmarks and tests: they turn parts of a layer off, or replace the engine.

    bypass_local: whether rows whose expert is on this rank stay there. False sends them by the all-to-all,
        like all other rows.
    sequential: whether every task waits for the task before it: the baseline of overlap measurements.
    one_lane: whether collectives inside a node and between nodes wait for each other: the baseline with which
        FSMoE is compared.
    program: whether compiled programs run both passes on CUDA devices, in place of Python's engine
        (`pmoe.program`). Layers and calls that programs do not take run by the engine, with a warning once
        for each reason. Programs have never run on a GPU.
    program_heaps: whether programs (``program``) write rows into symmetric heaps of the other ranks, in place
        of NCCL's sends and receives. All ranks must be on one node. If they cannot have heaps, programs use
        NCCL, with a warning. Without ``program`` nothing changes.

    All ranks must set the same switches. Raises TypeError for a value that is not True or False.

    Example: layer.switches = Switches(sequential=True).
    """

    bypass_local: bool = True
    sequential: bool = False
    one_lane: bool = False
    program: bool = False
    program_heaps: bool = False

    def __post_init__(self) -> None:
        for switch in fields(self):
            check_flag(switch.name, getattr(self, switch.name))


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The checked options of a `pmoe.MoELayer`. Each field has the name of the layer's argument.

    Setting an option on a built layer replaces this record by a new one.

    Raises ValueError or TypeError that names the argument, its value and the rule.
    """

    d_model: int
    d_hidden: int
    num_experts: int
    top_k: int = 1
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    pipeline: bool | int | SolveName = False
    memory_reuse: bool | StrategyName | Restore = False
    pipeline_backward: int | None = None
    slack: float = 1.25
    memory_budget: int | str | None = None
    fused: bool | FusedName = False
    send_once: bool = False
    wire: WireName | None = None
    wire_backward: WireName | None = None
    wire_combine: WireName | None = None
    check_finite: bool | None = None
    balance: bool | int = False
    d_latent: int | None = None
    allow: AllowName | None = None
    products: ProductsName | None = None
    switches: Switches = field(default_factory=Switches)

    def __post_init__(self) -> None:
        for argument in fields(self):
            object.__setattr__(self, argument.name, plain_int(getattr(self, argument.name)))
        check_count(d_model=self.d_model, d_hidden=self.d_hidden, num_experts=self.num_experts)
        check_count(top_k=self.top_k)
        if self.d_latent is not None:
            check_count(d_latent=self.d_latent)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts})")
        check_positive(capacity_factor=self.capacity_factor)
        restore = parse_restore(self.memory_reuse)
        check_number(slack=self.slack)
        if not 1 <= self.slack < math.inf:
            raise ValueError(f"slack ({self.slack}) must be a number of at least 1")
        allowed = (True, False, *get_args(FusedName))
        if not isinstance(self.fused, bool | str) or self.fused not in allowed:
            raise ValueError(f'fused ({self.fused!r}) must be False, True, "forward", "persistent" or "auto"')
        check_pipeline(self.pipeline)
        check_backward(self.pipeline, self.pipeline_backward)
        for name in ("send_once", "pad_to_capacity"):
            check_flag(name, getattr(self, name))
        check_flag("check_finite", self.check_finite, or_none=True)
        if not isinstance(self.balance, bool):
            check_int(0, balance=self.balance)
        for name, wire in self.wires.by_option.items():
            if wire is not None and not (isinstance(wire, str) and wire in get_args(WireName)):
                raise ValueError(f'{name} ({wire!r}) must be None, "e4m3" or "bfloat16"')
        if self.allow is not None and not (isinstance(self.allow, str) and self.allow in get_args(AllowName)):
            raise ValueError(f'allow ({self.allow!r}) must be None or "e4m3"')
        products = self.products
        if products is not None and not (isinstance(products, str) and products in get_args(ProductsName)):
            raise ValueError(f'products ({products!r}) must be None, "e4m3" or "mxfp8"')
        check_kind(Switches, "a pmoe.call.options.Switches", switches=self.switches)
        self.budget  # noqa: B018 - raises an error if it is not a number of bytes
        # The record is frozen, so names are replaced by their meaning here: "S4" by its pair.
        object.__setattr__(self, "memory_reuse", restore)
        object.__setattr__(self, "send_once", self.send_once and self.top_k > 1)

    @property
    def restore(self) -> Restore | bool:
        """``memory_reuse`` as a restore pair; False if memory is not reused, True if pmoe chooses the pair.

        A restore pair says how backward gets the experts' input and hidden activation.
        """
        assert not isinstance(self.memory_reuse, str)
        return self.memory_reuse

    @property
    def row_columns(self) -> int:
        """The columns of the rows that are sent and that the experts compute: d_latent if set, else
        d_model.
        """
        return self.d_model if self.d_latent is None else self.d_latent

    @functools.cached_property
    def budget(self) -> int | None:
        """``memory_budget`` in bytes; None if there is no budget."""
        if self.memory_budget is None:
            return None
        return parse_bytes("memory_budget", self.memory_budget)

    @functools.cached_property
    def wires(self) -> Wires:
        """The number formats of messages: ``wire``, ``wire_backward`` and ``wire_combine`` in one record."""
        return Wires(rows=self.wire, gradients=self.wire_backward, results=self.wire_combine)

    @functools.cached_property
    def fixed_degree(self) -> int | None:
        """The number of chunks of the forward pass; None if pmoe chooses it for each size of batch."""
        if self.pipeline is True or isinstance(self.pipeline, str):
            return None
        return int(self.pipeline) or 1

    @functools.cached_property
    def solves(self) -> bool:
        """Whether FSMoE's solver chooses the numbers of chunks: ``pipeline="solve"``."""
        return self.pipeline == SOLVE

    def most_copies(self, num_ranks: int) -> int:
        """Returns the largest number of copies of other ranks' busy experts that a rank may get.

        num_ranks: number of ranks of the layer. A rank gets no copies of its own experts.
        """
        others = self.num_experts - self.num_experts // num_ranks
        return min(MOST_COPIES if self.balance is True else self.balance, others)

    @functools.cached_property
    def needs_special_source(self) -> bool:
        """Whether ranks may have to communicate more before a call than in one plain exchange of row counts.

        This is so with four options:

            program            (in ``switches``) the ranks also agree on whether programs can run the call
            fused              the ranks also agree on whether fused kernels can compute the call
            balance            counts are exchanged again if busy experts get copies on other ranks
            pipeline="solve"   counts are exchanged again if the solver takes numbers of chunks that the
                               counts of the first exchange do not fit
        """
        return bool(self.fused or self.solves or self.balance or self.switches.program)

    @functools.cached_property
    def rotates(self) -> bool:
        """Whether chunks use a few shared buffers (ring slots) in turn. If not, each has memory of its own.

        This is so with ``memory_reuse``, under a memory budget, and if backward has another number of chunks
        than forward.
        """
        has_two_degrees = self.pipeline_backward not in (None, self.fixed_degree)
        return self.memory_reuse is not False or has_two_degrees or self.memory_budget is not None

    @functools.cached_property
    def degrees(self) -> tuple[int, ...]:
        """All numbers of chunks that may be chosen for forward or backward."""
        if self.solves:
            return SOLVER_DEGREES
        forward = DEGREES if self.fixed_degree is None else (self.fixed_degree,)
        backward = () if self.pipeline_backward is None else (self.pipeline_backward,)
        return tuple(dict.fromkeys((*forward, *backward)))

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether a chunk of forward may be split between chunks of backward.

        This is so if backward's number of chunks does not divide forward's.
        """
        n = self.fixed_degree or 1
        return n % (self.pipeline_backward or n) > 0

    @functools.cached_property
    def pairs(self) -> tuple[Restore, ...]:
        """The restore pairs to choose from: how backward may get the experts' input and hidden activation.

        If the experts are a user's own modules, some of these may not be possible (`LayerModules.pairs`).
        """
        if isinstance(self.memory_reuse, Restore):
            return (self.memory_reuse,)
        if not self.memory_reuse:
            return (KEEP,)
        return pairs_to_choose(
            self.allow, has_budget=self.memory_budget is not None, has_messages=self.wire is not None
        )


class _HasSpec(Protocol):
    """Any object that has ``options``: for type checkers, in place of `pmoe.MoELayer`."""

    options: LayerOptions


def option(name: str) -> Any:
    """Returns a property for `MoELayer` that reads the option of this name from ``layer.options``.

    The property has no setter. If a user assigns a value to the option, Python calls
    ``MoELayer.__setattr__``, which stores the value in ``layer.options``.
    """

    def read(layer: _HasSpec) -> Any:
        return getattr(layer.options, name)

    return property(read, doc=f"The argument ``{name}``. It may be set: all ranks must set the same.")
