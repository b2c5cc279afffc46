"""A layer's modules and its place among the ranks, with what follows from them and from its options."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pmoe.comm import Combine, Dispatch, Traffic
from pmoe.comm.base import FlatCombine, FlatDispatch
from pmoe.comm.counts import num_bins
from pmoe.comm.ranks import Grid, Ranks
from pmoe.engine.plan import Modules
from pmoe.engine.replay import Replay, hidden_from_checkpoints, replay_of
from pmoe.experts.base import Experts, local_part
from pmoe.layer.spec import LayerSpec
from pmoe.ordering import Order
from pmoe.ordering.sorted import SortedOrder
from pmoe.runners.features import Feature, refused
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Stages, local_pieces

if TYPE_CHECKING:
    from pmoe.engine.callbacks import Callback, Hooks
    from pmoe.layer.padded_counts import PaddedKind

PLAIN_GATES = ("pmoe.gates.topk", "pmoe.gates.switch")
PLAIN_EXPERTS = ("pmoe.experts.ffn", "pmoe.experts.swiglu")
"""Modules of what the kernels compute; subclasses elsewhere may compute otherwise."""


@dataclass
class Known:
    """What a layer has agreed on and learnt in its calls; it outlives changes of options.

    is_compared, padded_kinds: whether ranks have compared their options, and which kinds of padded calls.
    choosers: what chooses n and the pair, by what it depends on.
    """

    is_compared: bool = False
    padded_kinds: set[PaddedKind] = field(default_factory=set)
    choosers: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A layer's modules, where it stands among the ranks, and its options.

    trusts_gate: whether the layer made the gate, whose routing is then not checked.
    gradients: other layers' gradients that backward carries, where a `pmoe.GradientReducer` says so.
    """

    spec: LayerSpec
    grid: Grid
    gate: nn.Module
    trusts_gate: bool
    experts: Experts
    shared_expert: Experts | None
    shared_gate: nn.Linear | None
    order: Order
    dispatch: Dispatch
    combine: Combine
    scalars: FlatDispatch
    callbacks: tuple[Callback, ...]
    gradients: Any
    traffic: Traffic
    known: Known

    @property
    def ranks(self) -> Ranks:
        return self.grid.all

    @property
    def like(self) -> Tensor | None:
        """A parameter that says of what type and device rows are; None where there is none. The gate's come
        second: a router is often left in float32."""
        parameters = itertools.chain(self.experts.parameters(), self.gate.parameters())
        found = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
        return None if found is None else local_part(found)

    def asks_for_gradients(self, *tensors: Tensor) -> bool:
        """Whether a call may be differentiated: in these tensors, or in a parameter that runners take."""
        shared: Iterable[Tensor] = () if self.shared_expert is None else self.shared_expert.parameters()
        hooks: Iterable[Tensor] = () if self.hooks is None else self.hooks.parameters
        operands = itertools.chain(tensors, self.experts.parameters(), shared, hooks)
        return torch.is_grad_enabled() and any(each.requires_grad for each in operands)

    @property
    def num_local_experts(self) -> int:
        return self.spec.num_experts // self.grid.across.size

    @functools.cached_property
    def staying(self) -> range:
        """The experts whose rows of this rank do not travel."""
        first = self.grid.across.rank * self.num_local_experts
        return range(first, first + self.num_local_experts * self.stages.local)

    @functools.cached_property
    def hooks(self) -> Hooks | None:
        """The callbacks' hooks inside the layer; None where they have none."""
        if not self.callbacks:
            return None
        from pmoe.engine.callbacks import Hooks

        return Hooks.of(self.callbacks)

    @functools.cached_property
    def stages(self) -> Stages:
        """The stages that every call has: the same on every rank, whatever rows it has."""
        spec, sharded, seen = self.spec, self.grid.is_sharded, self.hooks is not None
        local = spec.switches.bypass_local and not (sharded or seen or spec.send_once)
        return Stages(
            local=local,
            remote=self.ranks.size > 1 or not local,
            sharded=sharded,
            hooked=sharded and seen,
            shared=self.shared_expert is not None,
            gradients=self.gradients is not None,
            one_lane=spec.switches.one_lane,
        )

    @functools.cached_property
    def num_bins(self) -> int:
        """F, the bins in which row counts travel."""
        if not self.spec.rotates:
            return math.lcm(*self.spec.degrees)
        return num_bins(self.spec.degrees, self.ranks.size, self.spec.num_experts)

    def num_pieces(self, n: int) -> int:
        """Into how many pieces the rows that stay are cut, for n chunks."""
        if self.spec.rotates:
            return n * self.stages.local
        return local_pieces(n, local=self.stages.local, remote=self.stages.remote)

    @functools.cached_property
    def pairs(self) -> tuple[Restore, ...]:
        """The restore pairs to choose from: modules cannot split a saved graph."""
        pairs = self.spec.pairs
        if len(pairs) > 1 and self.spec.splits_backward and self.experts.are_modules:
            pairs = tuple(pair for pair in pairs if pair.hidden == "recompute")
        return pairs

    @functools.cached_property
    def modules(self) -> Modules:
        """What the engine needs of the layer."""
        sharing = None
        if self.grid.is_sharded:
            from pmoe.comm.sharing import Sharing

            sharing = Sharing(self.grid.inside, self.traffic)
        return Modules(
            experts=self.experts,
            grid=self.grid,
            stages=self.stages,
            order=self.order,
            dispatch=self.dispatch,
            combine=self.combine,
            scalars=self.scalars,
            sharing=sharing,
            hooks=self.hooks,
            shared=self.shared_expert,
            gradients=self.gradients,
            sequential=self.spec.switches.sequential,
            rotates=self.spec.rotates,
        )

    @functools.cached_property
    def may_run_on_one_rank(self) -> bool:
        """Whether one rank's kernels may take a call, as far as the layer says."""
        takers = ("one rank", "one rank's counts") if self.spec.fused else ("one rank",)
        return self.ranks.size == 1 and any(self.refusal(taker) is None for taker in takers)

    def refusal(self, taker: str) -> str | None:
        """Why a runner, a source of counts or a prediction does not take this layer; None where it does."""
        feature = refused(taker, self.features)
        return None if feature is None else feature.value.format(**self._values())

    def _values(self) -> dict[str, object]:
        """What stands in refusals for the names in braces."""
        kinds = {name: type(getattr(self, name)).__name__ for name in ("gate", "experts", "order")}
        spec = {name: repr(value) for name, value in vars(self.spec).items()}
        return {**spec, **kinds, "memory_reuse": self.spec.restore}

    @functools.cached_property
    def features(self) -> frozenset[Feature]:
        """The features of this layer, for `refusal`."""
        return frozenset(feature for feature, is_asked in self._asked().items() if is_asked)

    def _asked(self) -> dict[Feature, bool]:
        spec, gate, switches = self.spec, self.gate, self.spec.switches
        is_given = bool(getattr(gate, "has_external_routing", False))
        picks = bool(getattr(gate, "picks_tokens", False))
        in_steps = self.dispatch.in_steps or self.combine.in_steps
        is_flat = type(self.dispatch) is FlatDispatch and type(self.combine) is FlatCombine
        return {
            Feature.RANKS: self.ranks.size > 1,
            Feature.SHARDED: self.grid.is_sharded,
            Feature.HIERARCHICAL: in_steps,
            Feature.OWN_EXCHANGE: not (is_flat or in_steps),
            Feature.SEND_ONCE: spec.send_once,
            Feature.TO_OWN_RANK: not switches.bypass_local,
            Feature.CALLBACKS: bool(self.callbacks),
            Feature.SHARED_EXPERT: self.shared_expert is not None,
            Feature.GRADIENTS: self.gradients is not None,
            Feature.ROTATES: spec.rotates,
            Feature.OFFLOADS: any(pair.offloads for pair in self.pairs),
            Feature.CHUNKS: spec.fixed_degree not in (None, 1),
            Feature.BUDGET: spec.memory_budget is not None,
            Feature.CAPACITY: spec.capacity_factor is not None,
            Feature.NO_CAPACITY: spec.capacity_factor is None,
            Feature.PADDED: spec.pad_to_capacity,
            Feature.CHECK_FINITE: bool(spec.check_finite),
            Feature.FUSED: bool(spec.fused),
            Feature.SEQUENTIAL: switches.sequential,
            Feature.ONE_LANE: switches.one_lane,
            Feature.OWN_ORDER: type(self.order) is not SortedOrder,
            Feature.PICKS_TOKENS: picks,
            Feature.KEEPS_ITSELF: bool(getattr(gate, "decides_capacity", False)),
            Feature.OTHER_GATE: type(gate).__module__ not in PLAIN_GATES and not is_given,
            Feature.OWN_GATE: not (is_given or type(gate).__module__.startswith("pmoe.gates.")),
            Feature.GATE_MODULE: not (self.trusts_gate or is_given),
            Feature.EXTERNAL_ROUTING: is_given,
            Feature.MODULE_EXPERTS: self.experts.are_modules,
            Feature.OTHER_EXPERTS: type(self.experts).__module__ not in PLAIN_EXPERTS,
        }


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast gives rows; None where it leaves them as they are, as it does float64."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


# ---- one call of a layer, before anything is decided of it


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a call is given. replay: decides, or takes what a checkpoint's first pass decided. x: (..., M),
    not yet checked: what is wrong on one rank alone is told to all with the row counts."""

    layer: nn.Module
    parts: Parts
    x: Tensor
    token_ids: Tensor | None
    replay: Replay

    @staticmethod
    def begin(layer: nn.Module, parts: Parts, x: Tensor, token_ids: Tensor | None) -> Call:
        """Refuses what a CUDA graph cannot hold; collective at the first call, as `check_ranks` is."""
        call = Call(layer=layer, parts=parts, x=x, token_ids=token_ids, replay=replay_of(layer))
        if is_captured(x):
            from pmoe.layer.capture import check_capturable

            check_capturable(call)
        check_ranks(parts)
        return call


def check_ranks(parts: Parts) -> None:
    """Finds the group again after unpickling, refuses wrappers that have experts, and compares the ranks'
    options at the first call. Collective then."""
    parts.grid.reconnect()
    parts.grid.all.begin_call()
    if parts.ranks.size > 1 or parts.experts.is_parallelized:
        from pmoe.layer.wrapped import check_wrapped

        check_wrapped(parts)
    if parts.ranks.size > 1 and not parts.known.is_compared:
        from pmoe.layer.alike import check_alike

        with hidden_from_checkpoints():
            check_alike(parts)
        parts.known.is_compared = True


def is_captured(x: object) -> bool:
    """Whether what is launched for x becomes part of a CUDA graph."""
    return isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()
