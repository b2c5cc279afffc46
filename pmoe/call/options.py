"""A layer's options: each checked once, and what follows from them alone."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, get_args

from pmoe.arguments import check_count, check_flag, check_kind, check_number, check_positive, plain_int
from pmoe.planner.degree import DEGREES, SolveName, check_backward, check_pipeline
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore, StrategyName, parse_restore

FusedName = Literal["forward", "persistent", "auto"]
"""What MoELayer's argument ``fused`` takes, beside True and False."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Which parts of a layer a benchmark or a test turns off.

        layer.switches = Switches(sequential=True)

    bypass_local: rows whose expert is on this rank are computed in place. False sends them through the
    collective as well.
    sequential: every step waits for the one before: the baseline of overlap measurements.
    one_lane: collectives inside a node wait for those between nodes: the baseline of FSMoE's schedule.

    All ranks must set the same. Raises TypeError where a value is not True or False.
    """

    bypass_local: bool = True
    sequential: bool = False
    one_lane: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            check_flag(each.name, getattr(self, each.name))


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The options of a `pmoe.MoELayer` by the names of its arguments, as it was built or as they were set.

    Raises ValueError or TypeError, naming argument, value and rule.
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
    check_finite: bool | None = None
    switches: Switches = field(default_factory=Switches)

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, plain_int(getattr(self, each.name)))
        check_count(d_model=self.d_model, d_hidden=self.d_hidden, num_experts=self.num_experts)
        check_count(top_k=self.top_k)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts})")
        check_positive(capacity_factor=self.capacity_factor)
        restore = parse_restore(self.memory_reuse)
        check_number(slack=self.slack)
        if not 1 <= self.slack < math.inf:
            raise ValueError(f"slack ({self.slack}) must be a number of at least 1")
        ways = (True, False, *get_args(FusedName))
        if not isinstance(self.fused, bool | str) or self.fused not in ways:
            raise ValueError(f'fused ({self.fused!r}) must be False, True, "forward", "persistent" or "auto"')
        check_pipeline(self.pipeline)
        check_backward(self.pipeline, self.pipeline_backward)
        for name in ("send_once", "pad_to_capacity"):
            check_flag(name, getattr(self, name))
        check_flag("check_finite", self.check_finite, or_none=True)
        check_kind(Switches, "a pmoe.call.options.Switches", switches=self.switches)
        self.budget  # noqa: B018 - it raises for what is no number of bytes
        # Frozen: what is given in words is kept as what it means.
        object.__setattr__(self, "memory_reuse", restore)
        object.__setattr__(self, "send_once", self.send_once and self.top_k > 1)

    @property
    def restore(self) -> Restore | bool:
        """``memory_reuse``: False where buffers do not rotate for it, True where the pair is chosen."""
        assert not isinstance(self.memory_reuse, str)
        return self.memory_reuse

    @functools.cached_property
    def budget(self) -> int | None:
        """``memory_budget`` in bytes."""
        if self.memory_budget is None:
            return None
        from pmoe.text import parse_bytes

        return parse_bytes("memory_budget", self.memory_budget)

    @functools.cached_property
    def fixed_degree(self) -> int | None:
        """n of the forward pass where ``pipeline`` alone says it; None where it depends on the batch."""
        if self.pipeline is True or isinstance(self.pipeline, str):
            return None
        return int(self.pipeline) or 1

    @functools.cached_property
    def rotates(self) -> bool:
        """Whether buffers rotate through ring slots."""
        apart = self.pipeline_backward not in (None, self.fixed_degree)
        return self.memory_reuse is not False or apart or self.memory_budget is not None

    @functools.cached_property
    def degrees(self) -> tuple[int, ...]:
        """Every n that may be chosen, for either pass."""
        forward = DEGREES if self.fixed_degree is None else (self.fixed_degree,)
        backward = () if self.pipeline_backward is None else (self.pipeline_backward,)
        return tuple(dict.fromkeys((*forward, *backward)))

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether backward has more chunks than forward."""
        return (self.pipeline_backward or 1) > (self.fixed_degree or 1)

    @functools.cached_property
    def pairs(self) -> tuple[Restore, ...]:
        """The restore pairs to choose from."""
        if isinstance(self.memory_reuse, Restore):
            return (self.memory_reuse,)
        if not self.memory_reuse:
            return (KEEP,)
        return tuple(STRATEGIES.values()) if self.memory_budget is None else ALL_PAIRS


class _HasSpec(Protocol):
    spec: LayerSpec


def option(name: str) -> Any:
    """An option as an attribute of the layer, read from its spec."""

    def read(layer: _HasSpec) -> Any:
        return getattr(layer.spec, name)

    return property(read, doc=f"The argument ``{name}``. It may be set: all ranks must set the same.")
