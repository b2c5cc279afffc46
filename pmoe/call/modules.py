"""The modules of a layer, its place among the ranks, and values that follow from these and its options."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pmoe.call.features import features_of, refusal_of
from pmoe.call.module_calls import is_watched
from pmoe.call.narrow_pairs import possible_pairs
from pmoe.call.options import LayerOptions
from pmoe.comm.counts import Slots, max_bins, num_bins, slack_with_copies, with_two
from pmoe.comm.ranks import Ranks
from pmoe.engine.plan.plan import PassModules
from pmoe.experts.operands import local_part
from pmoe.kernels.scaled_products.formats import ProductsName
from pmoe.planner.degree import MAX_DEGREE, TRIED, solver_pairs
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Stages
from pmoe.schedule.wire import AS_THEY_ARE, Wires

if TYPE_CHECKING:
    from pmoe.call.latent import LatentProjections
    from pmoe.call.row_bound import RowBound
    from pmoe.engine.plan.copies import KeptCopies
    from pmoe.engine.variants.padding import PaddedCallKey
    from pmoe.runners.features import Feature


@dataclass
class LayerCache:
    """Facts that a layer has found out in its calls. They stay valid when its options change.

    differed       whether the experts of different ranks had different values, as they should, when the ranks
                   last compared them; None before the first comparison
    compared       `LayerModules.compared_options` at the last call. It has classes and not modules, because
                   a reference would keep replaced modules alive. Empty if a setting of the gate or the
                   experts has been set since (`pmoe.settings`): the next call then compares options again
    words          the layer's options as texts, as they were when ranks last compared them
    padded_kinds   keys of the calls with padded rows that the ranks have already compared
    choosers       objects that choose the number of chunks and the restore pair, and results of choices and
                   measurements. Each key holds everything on which its value depends
    timed_products keys of the calls for which it is known which kernels compute products fastest
                   (`pmoe.choose.choose`). Empty if the layer's modules were replaced since
    counted        with ``pipeline="solve"``: the numbers of chunks of the last call. The next call counts its
                   rows so that the batch can be cut into these numbers of chunks. Empty before the first call
    had_copies     whether busy experts had copies on other ranks in the last call
    kept_copies    weights of copies of busy experts that this rank keeps for the next calls; None for none
    experts_state  a record of this rank's experts in the last call. The next call compares its own record
                   with it: if the two differ, the experts have changed. None (no record) counts as a change
    calls_alike    two numbers of calls: since the experts last changed, and between their last two changes
    node_of_ranks  the index of each rank's node, for copies of busy experts; empty before it is needed
    is_of_copy     whether the layer is a copy (copy.deepcopy) of a layer that was called before
    row_bound      the bound on rows that `pmoe.BoundedSteps` has set; None if it has set none
    """

    differed: bool | None = None
    compared: tuple[object, ...] = ()
    words: dict[str, str] = field(default_factory=dict)
    padded_kinds: set[PaddedCallKey] = field(default_factory=set)
    choosers: dict[Any, Any] = field(default_factory=dict)
    timed_products: set[tuple[object, ...]] = field(default_factory=set)
    counted: tuple[int, ...] = ()
    had_copies: bool = False
    node_of_ranks: tuple[int, ...] = ()
    kept_copies: KeptCopies | None = None
    experts_state: object = None
    calls_alike: tuple[int, int] = (0, 0)
    is_of_copy: bool = False
    row_bound: RowBound | None = None

    def for_copy(self) -> LayerCache:
        """Returns an empty cache for a copy of the layer. It only knows whether the layer was called."""
        return LayerCache(is_of_copy=self.is_of_copy or self.differed is not None)

    def __deepcopy__(self, memo: dict[int, object]) -> LayerCache:
        return LayerCache(is_of_copy=self.is_of_copy)

    def __reduce__(self) -> tuple[type[LayerCache], tuple[()]]:
        # A pickled layer may be loaded by one rank, while the other ranks build theirs.
        return LayerCache, ()

    def __setstate__(self, state: dict[str, object]) -> None:
        # Older versions pickled what their layers knew. It is forgotten, as in `__reduce__`.
        vars(self).update(vars(LayerCache()))

    def forget_ranks(self) -> None:
        """Forgets the facts that depend on the layer's process group, because the layer got another one.

        These facts are:

        - that ranks have different experts, and which calls with padded rows they have compared;
        - the numbers of chunks of the last call;
        - the nodes of the ranks;
        - the copies of busy experts that this rank has kept;
        - the bounds on rows on which the ranks agreed;
        - results of choices and measurements. A rank of the new group may be a new process without them. It
          would measure, and wait for ranks that do not.
        """
        self.differed = None
        self.choosers.clear()
        self.timed_products.clear()
        self.padded_kinds.clear()
        self.counted = ()
        self.node_of_ranks = ()
        self.kept_copies = None
        self.calls_alike = (0, 0)
        if self.row_bound is not None:
            self.row_bound.agreed.clear()


@dataclass(frozen=True, kw_only=True)
class LayerModules(PassModules):
    """The modules of a layer, its place among the ranks, and its options.

    A library may have replaced a module by a wrapper. The layer calls the wrapper, and uses options and
    methods of the module inside:

        called            inside
        gate              router          chooses the experts of each token
        experts_module    experts         the experts of this rank
        shared_module     shared_expert   the shared expert; None if there is none
        shared_gate       -               scales the shared expert's output; None if nothing does
        latent            -               the projections of a layer with ``d_latent``; None without them

    The other fields:

        options            the options of the layer
        trusts_gate        whether the layer itself made the gate. Only a user's gate is checked in each call
        callback_modules   the callbacks that are modules
        cache              what the layer has found out in its calls
        nodes              which ranks share a node (`pmoe.comm.topology.Nodes`), for copies of busy experts
    """

    options: LayerOptions
    gate: nn.Module
    router: nn.Module
    trusts_gate: bool
    experts_module: nn.Module
    shared_module: nn.Module | None
    shared_gate: nn.Module | None
    latent: LatentProjections | None
    callback_modules: Iterable[nn.Module]
    cache: LayerCache
    nodes: int | Sequence[Any] | None = None

    @functools.cached_property
    def without_shared_expert(self) -> LayerModules:
        """A copy of this record without the shared expert, for a schedule that does not compute it.

        It is used if the layer calls the shared expert as a module, beside the schedule.
        """
        return replace(self, shared_expert=None)

    @property
    def scheduled(self) -> LayerModules:
        """The modules that tasks of the schedule compute: all, or all but the shared expert.

        The shared expert is left out if the layer calls it as a module (`calls_shared_expert`).
        """
        return self.without_shared_expert if self.calls_shared_expert else self

    @property
    def calls_shared_expert(self) -> bool:
        """Whether the layer calls the shared expert as a module; otherwise a task of the schedule computes
        it.

        The layer calls the shared expert in three cases:

        - The shared expert has hooks or a wrapper, which must run.
        - The routed experts have hooks or a wrapper. These must see only the routed experts' output, but a
          task of the schedule would add the shared expert's output to it.
        - The options ask for fused kernels, which compute the routed experts and have no tasks. With
          fused="auto" the shared expert stays a task, because many calls then run in chunks.

        The property is not cached, because hooks may be added between calls. Ranks may differ in hooks,
        so no decision that all ranks share may depend on the first two cases. The third is the same on every
        rank.
        """
        if self.shared_module is None:
            return False
        is_wrapped = self.shared_module is not self.shared_expert or self.experts_module is not self.experts
        if is_wrapped or is_watched(self.experts_module) or is_watched(self.shared_module):
            return True
        return self.may_use_kernels

    @functools.cached_property
    def compared_options(self) -> tuple[object, ...]:
        """The layer's options and the classes of its modules, compared between calls to notice changes.

        After a change the ranks compare their options again.
        """
        modules = (self.experts, self.gate, self.shared_expert, self.order, self.dispatch, self.combine)
        kinds = tuple(type(module) for module in modules)
        return (self.options, *kinds, self.experts.setting, self.hooks is None, self.gradients is None)

    @functools.cached_property
    def ranks(self) -> Ranks:
        """All ranks that share the layer's experts."""
        return self.grid.all

    @property
    def reference_parameter(self) -> Tensor | None:
        """A floating-point parameter whose dtype and device the input must have; None if there is none.

        Parameters of the experts come before those of the gate, because routers are often kept in float32.
        """
        # As `parameters_own_first`, without a call. Walks through submodules begin only if they are needed.
        walks = map(_parameters_of, (self.experts, self.gate))
        for parameter in chain(self.experts._parameters.values(), chain.from_iterable(walks)):
            if parameter is not None and parameter.is_floating_point():
                return _as_computed(parameter) if hasattr(parameter, "to_local") else parameter
        return None

    def no_loss(self) -> Tensor:
        """Returns the value of the auxiliary loss (l_aux) before any call: zero, a scalar.

        Its dtype is the one in which gates return l_aux: float64 if the parameters are float64, else float32.
        """
        like = self.reference_parameter
        if like is None:
            return torch.zeros(())
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.zeros((), dtype=dtype, device=like.device)

    def asks_for_gradients(self, *tensors: Tensor) -> bool:
        """Returns whether autograd needs gradients of ``tensors``, or of any parameter of experts or
        callbacks.

        tensors: further tensors of a call: the rows, and the routing weights or the parameters of the gate.
        """
        if not torch.is_grad_enabled():
            return False
        hooks: Iterable[Tensor] = () if self.hooks is None else self.hooks.parameters
        # As `parameters_own_first`, without a call.
        modules = (self.experts_module, self.shared_module, self.shared_gate, self.latent)
        walks = map(_parameters_of, [module for module in modules if module is not None])
        own = self.experts._parameters.values()
        for operand in chain(tensors, own, hooks, chain.from_iterable(walks)):
            if operand is not None and operand.requires_grad:
                return True
        return self.experts.asks_for_gradients()

    @functools.cached_property
    def stages(self) -> Stages:
        """The optional stages of the layer, from which its schedules are built (`Stages`).

        They follow from the options, so they are the same on every rank.
        """
        # Rows for experts on this rank are computed without being sent. But all rows must be sent if an
        # expert is split over ranks, if callbacks see the rows that arrive, or if a token is sent only once
        # to a rank.
        options = self.options
        copies = self.copies
        is_sharded = self.grid.is_sharded
        has_hooks = self.hooks is not None
        local = options.switches.bypass_local and not (is_sharded or has_hooks or options.send_once)
        stages = Stages(
            local=local,
            remote=self.ranks.size > 1 or not local,
            sharded=is_sharded,
            hooked=is_sharded and has_hooks,
            shared=self.shared_expert is not None,
            gradients=self.gradients is not None,
            one_lane=options.switches.one_lane,
        )
        return stages if copies is None else copies.in_stages(stages, rotates=self.rotates)

    @functools.cached_property
    def rotates(self) -> bool:
        """Whether chunks use a few shared buffers (ring slots) in turn; if not, each has its own memory."""
        return self.options.rotates

    @functools.cached_property
    def wires(self) -> Wires | None:
        """The number formats in which rows and results are sent; None if all are sent in their own dtype.

        On one rank nothing is sent, so the result is None.
        """
        wires = self.options.wires
        return wires if self.ranks.size > 1 and wires != AS_THEY_ARE else None

    @functools.cached_property
    def products(self) -> ProductsName | None:
        """The format to which operands of the experts' products are rounded; None if they are not."""
        return self.options.products

    @functools.cached_property
    def limits_rows(self) -> bool:
        """Whether a rank has room for only a limited number of received rows: in ring slots, or on the host.

        Ring slots are buffers of fixed size that chunks use in turn. Rows that stay on their rank take no
        room in a ring slot. On a single rank all rows stay. So a single rank has a limit only if it offloads
        rows to the host, or if its own rows go through the exchange as well.
        """
        return self.rotates and (self.stages.remote or self.may_offload_rows)

    @functools.cached_property
    def may_offload_rows(self) -> bool:
        """Whether a call may offload received rows (T_DI) to the host."""
        return any(pair.dispatched == "offload" for pair in self.pairs)

    @functools.cached_property
    def slots(self) -> Slots:
        """The rows that a ring slot holds, for all numbers of chunks that the options allow.

        The limit of host memory is not in it, because it differs from call to call
        (`pmoe.choose.slots.requested_slots`).
        """
        options = self.options
        return Slots(
            slack=self.slack,
            top_k=options.top_k * self.grid.esp.size,
            degrees=self.checked_degrees(options.degrees),
            own_rank=self.ranks.rank if self.stages.local else None,
            num_staying=self.experts.num_local_experts,
            total_slack=options.slack if self.has_copies else None,
        )

    @functools.cached_property
    def sequential(self) -> bool:
        """Whether every task waits for the task before it, so that nothing overlaps.

        This is a baseline for measurements.
        """
        return self.options.switches.sequential

    @functools.cached_property
    def has_copies(self) -> bool:
        """Whether busy experts may have copies on other ranks (``balance``)."""
        return bool(self.options.balance) and self.grid.ep.size > 1

    @functools.cached_property
    def slack(self) -> float:
        """The rows of a ring slot, as a multiple of a chunk's rows under even routing.

        It is the option ``slack``, or less if busy experts may have copies (`slack_with_copies`).
        """
        slack = self.options.slack
        if not self.has_copies:
            return slack
        return slack_with_copies(slack, self.grid.ep.size, bypass_local=self.stages.local)

    def bins_for(self, degrees: Sequence[int]) -> int:
        """Returns F, the number of bins in which row counts are exchanged: equal ranges of a rank's tokens.

        A chunk consists of neighbouring bins. If chunks take turns in ring slots (buffers of fixed size),
        bins are finer than chunks: under skewed routing, the batch may have to be cut into more chunks than
        were chosen.

        degrees: the numbers of chunks that may be chosen for the call. Each divides F.
        """
        if not self.options.rotates:
            return math.lcm(*degrees)
        checked = self.checked_degrees(degrees)
        return num_bins(checked, self.ranks.size, self.options.num_experts, self.slack)

    def checked_degrees(self, degrees: Sequence[int]) -> tuple[int, ...]:
        """Returns the numbers of chunks whose rows are compared with the size of a ring slot.

        In a layer that may copy busy experts, the rows of two chunks are always compared, too. If a batch of
        one chunk does not fit into a ring slot, it is cut as a batch of two chunks (`Slots.agreed`).

        degrees: the numbers of chunks that may be chosen for the call.
        """
        return with_two(degrees) if self.has_copies else tuple(degrees)

    @functools.cached_property
    def leaves_choice_open(self) -> bool:
        """Whether the options leave the number of chunks or the restore pair open, so that calls may choose.

        A call without gradients has no use for a restore pair, and may have nothing to choose.
        """
        options = self.options
        return options.fixed_degree is None or len(self.pairs) > 1 or options.budget is not None

    @functools.cached_property
    def num_bins(self) -> int:
        """F, the number of bins in which rows are counted, for all numbers of chunks that may be chosen.

        Bins are equal ranges of a rank's tokens (`bins_for`). The property must not be used with
        ``pipeline="solve"``, because the number would be too large.
        """
        return self.bins_for(self.options.degrees)

    @property
    def counted_degrees(self) -> tuple[int, ...]:
        """The numbers of chunks for which the next call counts its rows, the same on all ranks.

        Usually these are all numbers that may be chosen. Rows are counted in equal parts of the batch. The
        number of parts is a common multiple of these numbers, so that every chunk consists of whole parts.
        With ``pipeline="solve"`` the common multiple of all numbers would be too large. So rows are counted
        only for the numbers of the last call. If the solver then takes other numbers, rows are counted again.
        """
        if not self.options.solves:
            return self.options.degrees
        return self.cache.counted or (TRIED if self.ranks.size > 1 else (1,))

    def degree_pairs(self, restore: Restore) -> tuple[tuple[int, int], ...]:
        """Returns the numbers of chunks that ``pipeline="solve"`` may take, as pairs (forward, backward).

        Some layers restrict the pairs:

        - Both passes have the same chunks in three cases: each chunk has memory of its own (no ring slots), a
          token is sent only once to a rank, or callbacks are inside the layer.
        - If experts are modules whose saved tensors are kept, each chunk of backward consists of whole chunks
          of forward, because a saved autograd graph cannot be split.
        - The least common multiple of the two numbers is limited, because rows are counted in that many parts
          of the batch. With ``pad_to_capacity`` the limit is lower: each part may add rows of padding.

        restore: the restore pair, which says what is kept for backward.
        """
        options = self.options
        return solver_pairs(
            MAX_DEGREE if options.pad_to_capacity else max(MAX_DEGREE, max_bins(options.num_experts)),
            same_chunks=not options.rotates or options.send_once or self.hooks is not None,
            whole_chunks=self.experts.are_modules and restore.hidden != "recompute",
        )

    @functools.cached_property
    def pairs(self) -> tuple[Restore, ...]:
        """The restore pairs to choose from: how backward may get the experts' input and hidden activation.

        If backward splits chunks of forward and the experts are a user's own modules, only pairs that
        recompute the hidden activation can be chosen: the autograd graph that a module saves belongs to a
        whole chunk of forward, and cannot be split.
        """
        pairs = self.options.pairs
        if pairs[-1].is_narrow:  # these come last
            pairs = possible_pairs(self, pairs)
        if len(pairs) > 1 and self.options.splits_backward and self.experts.are_modules:
            pairs = tuple(pair for pair in pairs if pair.hidden == "recompute")
        return pairs

    @functools.cached_property
    def may_run_on_one_rank(self) -> bool:
        """Whether the layer's options allow the kernels that run all stages on a single rank.

        The dtype, shape and device of a call's tensors are checked later.
        """
        if self.ranks.size > 1 or (self.options.rotates and not self.options.fused):
            return False  # `refusal` says the same, but would first compute the features of the layer
        components = ("one rank", "one rank's counts") if self.options.fused else ("one rank",)
        return any(self.refusal(component) is None for component in components)

    @functools.cached_property
    def may_run_few_rows(self) -> bool:
        """Whether the layer's options allow the runner for calls of few rows; the same on every rank."""
        return self.refusal("few rows") is None

    @functools.cached_property
    def features(self) -> frozenset[Feature]:
        """The layer's features: properties that a default layer lacks, such as a shared expert."""
        return features_of(self)

    def refusal(self, component: str) -> str | None:
        """Returns why a part of pmoe cannot take this layer: a text about a feature that the part lacks.

        Returns None if the part supports all features of the layer.

        component: the part's name in `pmoe.runners.features.SUPPORTED`. A part is a runner, which computes
            calls; a source of row counts; or a prediction of times or memory.
        """
        return refusal_of(self, component)

    @functools.cached_property
    def may_use_kernels(self) -> bool:
        """Whether the options ask for fused kernels that may compute some calls; the same on every rank."""
        return bool(self.options.fused) and self.fused_refusal is None

    @functools.cached_property
    def fused_refusal(self) -> str | None:
        """The reason why fused kernels can compute no call of this layer; None if they may compute some.

        All ranks get the same answer. It depends on options and modules alone.
        """
        fused = self.options.fused
        if fused == "auto" and self.ranks.size == 1:
            return "nothing travels on one rank"
        if fused == "auto" and self.shared_module is not None:
            return "a task of the schedule computes the shared expert"
        return self.refusal("persistent" if fused == "persistent" else "fused")


_parameters_of: Callable[[nn.Module], Iterable[nn.Parameter]] = operator.methodcaller("parameters")
"""Begins a walk through the parameters of a module and its submodules.

A function in Python would be one more call for each module.
"""


def _as_computed(parameter: Any) -> Tensor:
    """Returns a tensor with the dtype and device that a DTensor's values have while the layer runs.

    Usually the result is this rank's part of the DTensor, of any shape. FSDP2 with a CPUOffloadPolicy keeps
    this part on the host, and gathers the values on the mesh's device for a call. The result is then an empty
    tensor on the mesh's device.

    parameter: the DTensor.
    """
    local = local_part(parameter)
    device_type = parameter.device_mesh.device_type
    return local if local.device.type in (device_type, "meta") else local.new_empty(0, device=device_type)
