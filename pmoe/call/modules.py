"""A layer's modules and its place among the ranks, with what follows from them and from its options."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pmoe.call.features import features_of, refusal_of
from pmoe.call.module_calls import is_watched
from pmoe.call.options import LayerSpec
from pmoe.comm.counts import num_bins
from pmoe.comm.ranks import Ranks
from pmoe.engine.plan.plan import Modules
from pmoe.experts.base import local_part
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Stages

if TYPE_CHECKING:
    from pmoe.engine.variants.padding import PaddedKind
    from pmoe.runners.features import Feature


@dataclass
class Known:
    """What a layer has agreed on and learnt in its calls; it outlives changes of options.

    differed: whether ranks had other experts at the first call; None before.
    compared: what the options followed from when ranks last agreed on them (`Parts.given`). No parts: those
        hold the experts, which may be another library's, and would keep them alive.
    words: those options in words.
    padded_kinds: those compared.
    choosers: what chooses n and the pair, by what it depends on.
    """

    differed: bool | None = None
    compared: tuple[object, ...] = ()
    words: dict[str, str] = field(default_factory=dict)
    padded_kinds: set[PaddedKind] = field(default_factory=set)
    choosers: dict[Any, Any] = field(default_factory=dict)

    def forget_ranks(self) -> None:
        """Makes ranks compare again, for a process group that takes the old one's place."""
        self.differed = None
        self.padded_kinds.clear()


@dataclass(frozen=True, kw_only=True)
class Parts(Modules):
    """A layer's modules, where it stands among the ranks, and its options.

    gate, experts_module, shared_module, shared_gate: the modules that the layer calls, each perhaps a
    library's wrapper. experts, shared_expert, router: the experts and the gate inside of those, which have
    the options and methods.
    trusts_gate: whether the layer made the gate, whose routing is then not checked.
    """

    spec: LayerSpec
    gate: nn.Module
    router: nn.Module
    trusts_gate: bool
    experts_module: nn.Module
    shared_module: nn.Module | None
    shared_gate: nn.Module | None
    callback_modules: Iterable[nn.Module]
    known: Known

    @functools.cached_property
    def without_shared_expert(self) -> Parts:
        """These parts for a schedule that leaves the shared expert out, because it is called as a module."""
        return replace(self, shared_expert=None)

    @property
    def scheduled(self) -> Parts:
        """These parts, or those without the shared expert if a call must call it as a module."""
        return self.without_shared_expert if self.calls_shared_expert else self

    @property
    def calls_shared_expert(self) -> bool:
        """Whether the shared expert is called as a module, and not computed by a task of the schedule.

        True where it or the experts have hooks or a wrapper: its hooks must run, and hooks of the experts
        must not see its part of the sum. Evaluated at each call. Ranks may differ: no message depends on it.
        """
        watched = (self.experts_module, self.shared_module)
        is_wrapped = self.shared_module is not self.shared_expert or self.experts_module is not self.experts
        return self.shared_module is not None and (is_wrapped or any(map(is_watched, filter(None, watched))))

    @functools.cached_property
    def given(self) -> tuple[object, ...]:
        """What ranks compare of a layer, without the modules themselves: its options and their types."""
        modules = (self.experts, self.gate, self.shared_expert, self.order, self.dispatch, self.combine)
        kinds = tuple(type(module) for module in modules)
        return (self.spec, *kinds, self.hooks is None, self.gradients is None)

    @functools.cached_property
    def ranks(self) -> Ranks:
        """All ranks that share the layer's experts."""
        return self.grid.all

    @property
    def like(self) -> Tensor | None:
        """A parameter that says of what type and device rows are; None where there is none. The gate's come
        second: a router is often left in float32."""
        parameters = itertools.chain(self.experts.parameters(), self.gate.parameters())
        found = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
        return None if found is None else local_part(found)

    def no_loss(self) -> Tensor:
        """The value of l_aux before any call: a zero scalar in float32 or wider, as a gate's loss is."""
        like = self.like
        if like is None:
            return torch.zeros(())
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.zeros((), dtype=dtype, device=like.device)

    def asks_for_gradients(self, *tensors: Tensor) -> bool:
        """Whether a call may be differentiated: in these tensors, or in a parameter that runners take."""
        if not torch.is_grad_enabled():
            return False
        modules = (self.experts_module, self.shared_module, self.shared_gate)
        hooks: Iterable[Tensor] = () if self.hooks is None else self.hooks.parameters
        parameters = (module.parameters() for module in modules if module is not None)
        operands = itertools.chain(tensors, hooks, *parameters)
        return any(operand.requires_grad for operand in operands) or self.experts.asks_for_gradients()

    @functools.cached_property
    def stages(self) -> Stages:
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
    def rotates(self) -> bool:
        return self.spec.rotates

    @functools.cached_property
    def sequential(self) -> bool:
        return self.spec.switches.sequential

    @functools.cached_property
    def num_bins(self) -> int:
        """F, the bins in which row counts travel."""
        if not self.spec.rotates:
            return math.lcm(*self.spec.degrees)
        return num_bins(self.spec.degrees, self.ranks.size, self.spec.num_experts)

    @functools.cached_property
    def pairs(self) -> tuple[Restore, ...]:
        """The restore pairs to choose from: modules cannot split a saved graph."""
        pairs = self.spec.pairs
        if len(pairs) > 1 and self.spec.splits_backward and self.experts.are_modules:
            pairs = tuple(pair for pair in pairs if pair.hidden == "recompute")
        return pairs

    @functools.cached_property
    def may_run_on_one_rank(self) -> bool:
        """Whether one rank's kernels may take a call, as far as the layer says."""
        if self.ranks.size > 1 or (self.spec.rotates and not self.spec.fused):
            return False  # as the table would say: most layers need not load it
        takers = ("one rank", "one rank's counts") if self.spec.fused else ("one rank",)
        return any(self.refusal(taker) is None for taker in takers)

    @functools.cached_property
    def features(self) -> frozenset[Feature]:
        """What the layer asks for beyond a default one."""
        return features_of(self)

    def refusal(self, taker: str) -> str | None:
        """Why a runner, a source of counts or a prediction does not take this layer; None where it does."""
        return refusal_of(self, taker)
