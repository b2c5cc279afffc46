"""The MoE layer: gate, order, exchange, experts, combine, in the order a token meets them.

Letters: T tokens of this rank, K choices, E experts of the group, M = d_model, H = d_hidden, W ranks.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pmoe.comm import Combine, Dispatch, Traffic, make_exchanges
from pmoe.comm.counts import CountsExchange, Fault, FaultError, Shared, Slots, num_bins
from pmoe.comm.flat import FlatCombine, FlatDispatch
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.comm.sharing import Sharing
from pmoe.experts import Experts, ModuleExperts, StackedExperts, make_stacked
from pmoe.experts.activations import find_activation
from pmoe.experts.base import Columns, Shard, local_part
from pmoe.experts.initial import initialise, seeded
from pmoe.experts.modules import build_modules
from pmoe.gates import GATES, ExpertChoiceGate, GivenGate, Routing, SoftGate, SwitchGate, TopKGate
from pmoe.gates.base import at_least_float32
from pmoe.gates.logits import router_logits
from pmoe.gates.make import make_gate
from pmoe.kernels.comet import Journey, Steps
from pmoe.kernels.route import Routes
from pmoe.ordering import Order, make_order
from pmoe.ordering.capacity import expert_capacity, within_capacity
from pmoe.ordering.once import carriers
from pmoe.ordering.sorted import LocalExperts, SortedOrder, Tokens, count_rows, sort_rows
from pmoe.pipeline import alone, comet, engine, padded, recompute
from pmoe.pipeline.buffers import ALIGNMENT, pool, warn_once
from pmoe.pipeline.callbacks import Callback, Hooks
from pmoe.pipeline.decide import Choice, Chooser, bound, parse_bytes, profile_of
from pmoe.pipeline.footprint import Memory, Shape, counted_rows, predict
from pmoe.pipeline.passes import Inputs, run_experts
from pmoe.pipeline.plan import Degrees, Gradients, Modules, Ordered, Plan, make_plan
from pmoe.pipeline.ran import Ran
from pmoe.pipeline.recompute import Decisions
from pmoe.pipeline.schedule import Stages, local_pieces
from pmoe.pipeline.search import load_table, search
from pmoe.pipeline.search import table as search_table
from pmoe.pipeline.settle import settle_products
from pmoe.pipeline.solve import Solver
from pmoe.planner.degree import (
    DEGREES,
    LEAST_ROWS,
    SOLVE,
    adaptive_degree,
    check_backward,
    check_pipeline,
    fixed_degree,
)
from pmoe.planner.granularity import Degrees as PassDegrees
from pmoe.planner.granularity import GranularitySearch
from pmoe.planner.profile import Profile
from pmoe.planner.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore, parse_restore


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer, expert-parallel over a process group, in overlapped micro-batches.

    Each token goes to the top_k experts that its gate picks and gets back the sum of their outputs, each
    times its routing weight. The experts are spread evenly over the ranks of ``group``; rank r holds
    experts [r * E / W, (r + 1) * E / W). Rows whose expert is on another rank travel there and back by
    all-to-all, in ``pipeline`` micro-batches whose communication hides behind the experts' computation
    (MPipeMoE, section III.B).

    Args:
        d_model: M, columns of the input and the output.
        d_hidden: H, width of an expert's hidden layer.
        num_experts: E, over all ranks; the group's size must divide it.
        top_k: K, experts a token.
        gate: "topk" (softmax, top-k, renormalised where top_k > 1), "switch" (top-1, the probability),
            another name of `pmoe.gates.GATES`, or a module that maps (T, M) to a `pmoe.Routing`.
        expert: "ffn", "swiglu", or a callable that builds one expert, a module from (N, M) to (N, M): called
            as expert(d_model, d_hidden) if it takes two arguments, else expert(), once a local expert. A
            `torch.nn.ModuleList` of this rank's experts, or a `pmoe.experts.Experts`, is taken as it is.
        activation: of "ffn": "relu", "gelu" (exact) or "silu".
        bias: whether "ffn" and "swiglu" experts have b1 and b2.
        capacity_factor: None keeps every row. A number keeps ceil(factor * T * K / E) rows from each rank
            for each expert, in token order; what is dropped adds nothing to its token, and the weights of
            the rest stay as they are. The number of micro-batches changes nothing about it.
        pad_to_capacity: sends as many rows from each rank to every expert, those that the capacity allows,
            zeros where fewer were routed there. No counts are exchanged then and the host waits for nothing,
            so that a CUDA graph can hold a call, on any number of ranks, if one like it came before. Results
            are those without padding; padding rows cost the computation and communication of others: in all
            there are capacity_factor times the routed rows, but no more than a row a token for each expert,
            and up to n - 1 more for each (15 where n is chosen), for chunks are equal. All ranks must have
            the same number of tokens and ask for gradients alike, or ValueError is raised on every rank; on
            CUDA this is checked the first time that such a call comes, and a later mistake of one rank,
            whatever it is, leaves the others waiting until the group's timeout. Experts that are modules see
            the zeros, too, and must have finite gradients there (x / x.norm() has none). Memory is not
            predicted.
        pipeline: n, the number of micro-batches; False is 1. True finds n of both passes by trials: the first
            time that the ranks' largest number of tokens is outside what is known, real steps for n from 1 to
            16 are timed on that batch (MPipeMoE, Algorithm 1); small batches, inference, single ranks and
            experts that are modules go by a rule instead. See `save_degrees`. "solve" finds n of each pass
            from costs that are measured at the first call and kept (FSMoE, Algorithm 1, refined on the
            simulator); with memory_reuse=False both passes have the same n.
        memory_reuse: False gives each chunk memory of its own. All else rotates buffers through the slots of
            rings (MPipeMoE, section III.D) and says what becomes of T_DI and T_M between the passes: a
            `pmoe.Restore`, "S1" to "S4", or True for the cheapest of these four by Eq. 10, on rates that are
            measured at the first call and kept (`pmoe profile`); under a budget, of all nine pairs.
        pipeline_backward: n of the backward pass, a divisor or a multiple of ``pipeline``; None is the same.
        slack: rows of a ring slot over the balanced share. Where routing is skewed beyond it, all ranks alike
            cut the batch into more chunks.
        memory_budget: bytes, or such as "2GiB", that output, saved tensors, slots, temporaries and the
            input's gradient hold to for any routing, parameters' gradients aside. n (if ``pipeline`` is True)
            and the pair (if ``memory_reuse`` is) are chosen for it, by predicted time; a budget that nothing
            holds is a ValueError at the call, on every rank, that says what the least would be.
        group: the process group; None is the default group, or one rank where none is initialised;
            `pmoe.comm.ranks.Ranks.alone()` is one rank in any case.
        mesh: instead of group, a `torch.distributed.device_mesh` of the dimensions "ep" and "esp": experts
            are spread over "ep", and each expert's hidden columns are split over "esp", the ranks of a node
            (FSMoE's ESP): its tokens are gathered there before it and its partial outputs summed behind it.
            Each rank has tokens of its own. "ffn" and "swiglu" are split; a `pmoe.experts.Experts` must be a
            part already.
        fused: computes a call by COMET's fused kernels, in which tiles of the experts' first product start as
            their rows arrive and columns of the second leave as they are computed. "forward" does so forward,
            and goes backward by the pipeline engine with ``pipeline_backward`` chunks; True does so in both
            passes, and nothing is cut into chunks; "auto" is True where they were measured to be faster.
            ``memory_reuse`` is as ever, but nothing is offloaded: True takes "S4". What they do not compute
            falls back to the layer as it is with False, and so does a batch that brings any rank more rows
            than their memory holds; a warning says why, once a reason, but with "auto".
        order: "sorted", "einsum" (GShard's, the slow reference), or a `pmoe.Order`.
        dispatch: how rows travel to their experts: "flat", "hierarchical_1d" or "hierarchical_2d", or a
            `pmoe.Dispatch`.
        combine: how they return, a name or a `pmoe.Combine`; None is as dispatch.
        nodes: for the hierarchical ones, ranks a node, or the node of each rank; None asks the launcher's
            LOCAL_WORLD_SIZE.
        send_once: with top_k > 1, a token goes once to a rank that holds several of its experts, and comes
            back as one sum.
        shared_expert: a dense expert for every token beside the routed ones (DeepSeek's, Qwen2-MoE's): its
            hidden width, for one of the kind of ``expert``, or a module from (T, M) to (T, M). It is computed
            while the first chunk travels; its parameters are like any dense layer's, not marked as experts'.
        shared_gate: the shared expert's output is scaled by sigmoid(shared_gate(x)), a factor a token.
        callbacks: `pmoe.Callback` objects: their hooks may replace what passes six points of the layer.
        device, dtype: of the parameters.
        normalize_gate: overrides whether "topk" scales a token's weights to sum 1.
        z_loss_weight: adds that much of the router z-loss to l_aux.
        check_finite: raise, on every rank, where any rank's gate logits hold NaN or infinity.
        bypass_local: rows whose expert is on this rank are computed in place. False sends them through
            the collective as well (to test or measure it).
        sequential: every step waits for the one before (the baseline of overlap measurements).
        one_lane: collectives inside a node wait for those between nodes (likewise).

    Attributes:
        l_aux: scalar, the auxiliary loss of the last forward, attached to its graph: the load-balance loss
            of this rank's tokens (1 where even), plus the z-loss.
        tokens_per_expert: (E,) int64 on the CPU, kept rows of this rank for each expert in the last forward.
        row_counts: of the last forward, rows by bin, rank and expert on the host, for `predict_memory`; with
            pad_to_capacity those that travelled, padding among them.
        ran: how the last forward was computed (`pmoe.pipeline.ran.Ran`); `pmoe.stats` tells it with all else.
        traffic: bytes this rank has sent to others since the layer was built; what fused kernels write to
            other ranks is not counted.

    Parameters: ``gate.weight`` (E, M); ``experts.w1`` (E / W, H, M), or (E / W, 2H, M) for "swiglu", gate
    rows first; ``experts.w2`` (E / W, M, H); ``experts.b1``, ``experts.b2``. Experts' parameters carry
    ``allreduce = False``: their gradients are already sums over all ranks' tokens, so data-parallel
    wrappers must leave them out and divide them by W where losses are averaged over ranks. With one seed
    the ranks hold together what one rank alone would hold.

    Raises ValueError or TypeError, naming argument, value and rule, when built.
    """

    l_aux: Tensor | None

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        top_k: int = 1,
        *,
        gate: str | nn.Module = "topk",
        expert: str | nn.Module | Callable[..., nn.Module] = "ffn",
        activation: str = "gelu",
        bias: bool = True,
        capacity_factor: float | None = None,
        pad_to_capacity: bool = False,
        pipeline: bool | int | str = False,
        memory_reuse: bool | str | Restore = False,
        pipeline_backward: int | None = None,
        slack: float = 1.25,
        memory_budget: int | str | None = None,
        group: dist.ProcessGroup | Ranks | None = None,
        mesh: DeviceMesh | None = None,
        fused: bool | str = False,
        order: str | Order = "sorted",
        dispatch: str | Dispatch = "flat",
        combine: str | Combine | None = None,
        nodes: int | Sequence[int] | None = None,
        send_once: bool = False,
        shared_expert: int | nn.Module | None = None,
        shared_gate: bool = False,
        callbacks: Sequence[Callback] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        normalize_gate: bool | None = None,
        z_loss_weight: float = 0.0,
        check_finite: bool = False,
        bypass_local: bool = True,
        sequential: bool = False,
        one_lane: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes(d_model=d_model, d_hidden=d_hidden, num_experts=num_experts, top_k=top_k)
        if top_k > num_experts:
            raise ValueError(f"top_k ({top_k}) must be at most num_experts ({num_experts})")
        _check_number(capacity_factor=1 if capacity_factor is None else capacity_factor)
        if capacity_factor is not None and not 0 < capacity_factor < float("inf"):
            raise ValueError(f"capacity_factor ({capacity_factor}) must be None or a positive number")
        self.restore = parse_restore(memory_reuse)
        self.memory_budget = None if memory_budget is None else parse_bytes("memory_budget", memory_budget)
        _check_number(slack=slack)
        if not 1 <= slack < float("inf"):
            raise ValueError(f"slack ({slack}) must be a number of at least 1")
        _check_number(z_loss_weight=z_loss_weight)
        if not 0 <= z_loss_weight < float("inf"):
            raise ValueError(f"z_loss_weight ({z_loss_weight}) must be a number of at least 0")
        find_activation(activation)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype ({dtype!r}) must be a torch.dtype")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype ({dtype}) must be a floating-point type")
        if not isinstance(fused, bool) and fused not in ("forward", "auto"):
            raise ValueError(f'fused ({fused!r}) must be False, True, "forward" or "auto"')
        self.fused = fused
        check_pipeline(pipeline)
        check_backward(pipeline, pipeline_backward)
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh ({mesh!r}) must be a torch.distributed.device_mesh.DeviceMesh")
        flags = {"send_once": send_once, "shared_gate": shared_gate, "one_lane": one_lane}
        for name, flag in {**flags, "pad_to_capacity": pad_to_capacity}.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name} ({flag!r}) must be True or False")
        if not isinstance(callbacks, Sequence):
            raise TypeError(f"callbacks ({callbacks!r}) must be a list of pmoe.Callback objects")
        if mesh is not None and group is not None:
            raise ValueError("group and mesh must not be given both: a mesh brings its groups")
        self.grid = Grid.of_group(group) if mesh is None else Grid.of_mesh(mesh)
        self.ranks = self.grid.all
        _check_fit(num_experts, d_hidden, self.grid, "group" if mesh is None else 'the mesh\'s "ep"')
        self.d_model, self.d_hidden = d_model, d_hidden
        self.num_experts, self.top_k = num_experts, top_k
        self.send_once = bool(send_once) and top_k > 1
        self.one_lane = one_lane
        self.capacity_factor, self.pipeline, self.slack = capacity_factor, pipeline, slack
        self.pipeline_backward, self.pad_to_capacity = pipeline_backward, pad_to_capacity
        self.check_finite, self.bypass_local, self.sequential = check_finite, bypass_local, sequential
        self.l_aux = None
        self._counted: Shared | _Alone | _Padded | None = None
        self._agreed: frozenset[padded.Call] = frozenset()
        self.ran: Ran | None = None
        self.traffic = Traffic()
        self.gradients: Gradients | None = None  # set by `pmoe.GradientReducer`
        self.max_tokens = 0
        self.order = make_order(order)
        self.dispatch, self.combine = make_exchanges(dispatch, combine, nodes)
        self.scalars = FlatDispatch()
        self._take_place()
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks ({callback!r}) must be pmoe.Callback objects")
        self.callbacks = tuple(callbacks)
        self.callback_modules = nn.ModuleList(each for each in callbacks if isinstance(each, nn.Module))
        if pipeline_backward not in (None, fixed_degree(pipeline)) and (self.hooks or self.send_once):
            name = "callbacks see chunks" if self.hooks else "rows travel once (send_once=True)"
            raise ValueError(
                f"pipeline_backward ({pipeline_backward}) must be pipeline ({pipeline}) or None where {name}"
            )
        self._chooser: tuple[object, Chooser] | None = None
        self._table: tuple[object, GranularitySearch] | None = None
        self._solver: tuple[object, Solver] | None = None
        self.t_gar = 0.0  # seconds of other layers' gradients in backward, for the solver
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.trusts_gate = isinstance(gate, str)  # a gate that the layer made returns what it should
        if isinstance(gate, str):
            given = {"normalize": normalize_gate, "z_loss_weight": z_loss_weight or None}
            sizes = (d_model, num_experts, top_k)
            gate = make_gate(GATES, gate, sizes, capacity_factor, given, options)
            if isinstance(gate, SoftGate) and capacity_factor is not None:
                raise ValueError(f"capacity_factor ({capacity_factor}) must be None: SoftMoE drops nothing")
        elif isinstance(gate, nn.Module):
            if normalize_gate is not None or z_loss_weight:
                raise ValueError(
                    f"normalize_gate ({normalize_gate}) and z_loss_weight ({z_loss_weight}) must be left out "
                    "where gate is a module: it normalises and adds losses itself"
                )
        else:
            raise TypeError(f"gate ({gate!r}) must be a name or a torch.nn.Module")
        self.gate = gate
        if isinstance(gate, SoftGate) and shared_expert is not None:
            raise ValueError(f"shared_expert ({shared_expert}) must be None with SoftMoE, which mixes tokens")
        if not self.trusts_gate and capacity_factor is not None and _decides_capacity(gate):
            raise ValueError(
                f"capacity_factor ({capacity_factor}) must be given to the gate ({type(gate).__name__}): it "
                "decides itself what is kept"
            )
        self.experts = self._make_experts(expert, activation, bias, options)
        self.experts.mark_parameters()
        self.shared_expert = self._make_shared(shared_expert, expert, activation, bias, options)
        self.shared_gate: nn.Linear | None = None
        if shared_gate:
            if self.shared_expert is None:
                raise ValueError(f"shared_gate ({shared_gate}) must be False without a shared_expert")
            self.shared_gate = nn.Linear(d_model, 1, bias=False, **options)
        if isinstance(self.restore, Restore) and self.restore.offloads:
            _check_host_memory(self.restore, _experts_parameter(self), device)
        splits = pipeline_backward is not None and pipeline_backward > (fixed_degree(pipeline) or 1)
        recomputes = self.restore is True or (self.restore and self.restore.hidden == "recompute")
        if self.memory_budget is not None:
            self._check_predictable("memory_budget", memory_budget)
        why = _unfit_to_pad(self) if pad_to_capacity else None
        if why is not None:
            raise ValueError(f"pad_to_capacity (True) must be False where {why}")
        if splits and not recomputes and isinstance(self.experts, ModuleExperts):
            raise ValueError(
                f"pipeline_backward ({pipeline_backward}) must be at most pipeline ({pipeline}) where "
                "experts are modules whose hidden is kept or offloaded: a saved graph cannot be split"
            )

    def _take_place(self) -> None:
        """What follows from the ranks of ``grid``."""
        self.num_local_experts = self.num_experts // self.grid.across.size
        self.first_expert = self.grid.across.rank * self.num_local_experts
        self.shard = Shard(self.grid.inside.rank, self.grid.inside.size)
        self.sharing = Sharing(self.grid.inside, self.traffic)
        for exchange in (self.dispatch, self.combine, self.scalars):
            exchange.bind(self.grid.across, self.traffic)

    def check_spread(self, mesh: DeviceMesh) -> None:
        """Raises ValueError or TypeError, naming what is wrong, where `spread` would. Changes nothing."""
        if self.ranks.size > 1 and not self._is_meta:
            raise ValueError(
                f"a layer built over {self.ranks.size} ranks must not be spread over others: this rank has "
                f"only {self.num_local_experts} of {self.num_experts} experts; build it with mesh={mesh}, or "
                "on one rank (before init_process_group, or with a group of one rank)"
            )
        if self.gradients is not None:
            raise ValueError("a layer must be spread before a GradientReducer is made for it")
        if not isinstance(self.experts, ModuleExperts) and self.experts.hidden_dims() is None:
            raise TypeError(
                f"experts ({type(self.experts).__name__}) must be stacked or modules to be spread over ranks"
            )
        grid = Grid.of_mesh(mesh)
        _check_fit(self.num_experts, self.d_hidden, grid, 'the mesh\'s "ep"')
        if isinstance(self.experts, ModuleExperts) and grid.is_sharded:
            raise ValueError('experts (modules) must not be split over "esp": a module\'s hidden is its own')
        if isinstance(self.experts, ModuleExperts) and self.ranks.size > 1:
            raise ValueError("experts (modules, even on the meta device) must all be there to be spread")
        if self.pad_to_capacity and grid.is_sharded:
            raise ValueError('pad_to_capacity (True) must be False where experts are split over "esp"')

    def spread(self, mesh: DeviceMesh) -> None:
        """Spreads a layer that every rank built alone, with all experts, over ``mesh``: what `MoELayer` takes
        as mesh. This rank keeps its own experts as new Parameters, so optimizers come after. On the meta
        device the layer may be of any ranks: there are no values to lose.

        Every rank must call it. Raises ValueError or TypeError, before anything is changed, where the layer
        cannot be spread so.
        """
        self.check_spread(mesh)
        self.grid = Grid.of_mesh(mesh)
        self.ranks = self.grid.all
        self._take_place()
        self.experts.keep(slice(self.first_expert, self.first_expert + self.num_local_experts), self.shard)
        self._chooser = self._table = self._solver = self._counted = self.l_aux = None
        self._agreed = frozenset()

    @property
    def _is_meta(self) -> bool:
        like = _experts_parameter(self)
        return like is not None and like.is_meta

    @property
    def _is_routed(self) -> bool:
        """Whether the routing comes from outside, ready made."""
        return isinstance(self.gate, GivenGate)

    @property
    def row_counts(self) -> Shared | None:
        """Asked anew each time of counts on the device: a CUDA graph that is replayed changes them."""
        counted = self._counted
        if isinstance(counted, _Alone):
            return counted.on_host()
        return counted.rows if isinstance(counted, _Padded) else counted

    @property
    def tokens_per_expert(self) -> Tensor:
        if isinstance(self._counted, _Padded):
            return self._counted.kept_E.to("cpu", copy=True)
        counts = self.row_counts
        if counts is None:
            return torch.zeros(self.num_experts, dtype=torch.int64, device="cpu")
        return counts.send.sum(0).flatten()

    @property
    def rotates(self) -> bool:
        """Whether buffers rotate through ring slots."""
        apart = self.pipeline_backward not in (None, fixed_degree(self.pipeline))
        return self.restore is not False or apart or self.memory_budget is not None

    @property
    def degree_candidates(self) -> tuple[int, ...]:
        """Every n that the layer may choose, for either pass."""
        n = fixed_degree(self.pipeline)
        forward = DEGREES if n is None else (n,)
        backward = () if self.pipeline_backward is None else (self.pipeline_backward,)
        return tuple(dict.fromkeys((*forward, *backward)))

    @property
    def num_bins(self) -> int:
        """Bins in which row counts travel."""
        if self.rotates:
            return num_bins(self.degree_candidates, self.ranks.size)
        return math.lcm(*self.degree_candidates)

    @property
    def stages(self) -> Stages:
        """What every call of this layer consists of. Whether there is a journey, not how many rows a rank
        sends: all ranks issue the same collectives."""
        local = self.bypass_local and not (self.grid.is_sharded or self.hooks or self.send_once)
        return Stages(
            local=local,
            remote=self.ranks.size > 1 or not local,
            sharded=self.grid.is_sharded,
            hooked=self.grid.is_sharded and bool(self.hooks),
            shared=self.shared_expert is not None,
            gradients=self.gradients is not None,
            one_lane=self.one_lane,
        )

    @property
    def is_flat(self) -> bool:
        """Whether rows travel straight to their ranks, by the library's own all-to-alls."""
        return type(self.dispatch) is FlatDispatch and type(self.combine) is FlatCombine

    @property
    def hooks(self) -> Hooks:
        """The callbacks' hooks inside the layer. Asked anew each time: modules may have new parameters."""
        return Hooks.of(self.callbacks)

    @property
    def modules_of_plan(self) -> Modules:
        return Modules(
            experts=self.experts,
            grid=self.grid,
            stages=self.stages,
            order=self.order,
            dispatch=self.dispatch,
            combine=self.combine,
            scalars=self.scalars,
            sharing=self.sharing,
            hooks=self.hooks,
            shared=self.shared_expert,
            gradients=self.gradients,
            sequential=self.sequential,
            rotates=self.rotates,
        )

    def num_pieces(self, n: int) -> int:
        """Into how many pieces the rows that stay are cut."""
        stages = self.stages
        if self.rotates:
            return n * stages.local
        return local_pieces(n, local=stages.local, remote=stages.remote)

    @property
    def may_offload_rows(self) -> bool:
        return any(pair.dispatched == "offload" for pair in self.chooser.pairs)

    @property
    def chooser(self) -> Chooser:
        """Chooses among the restore pairs that the arguments allow."""
        key = (self.restore, self.memory_budget, self.num_bins, self.pipeline_backward, self.slack)
        if self._chooser is None or self._chooser[0] != key:
            self._chooser = (key, self._make_chooser())
        return self._chooser[1]

    def _make_chooser(self) -> Chooser:
        pairs: Sequence[Restore]
        if isinstance(self.restore, Restore):
            pairs = (self.restore,)
        elif not self.restore:
            pairs = (KEEP,)
        else:
            pairs = tuple(STRATEGIES.values()) if self.memory_budget is None else ALL_PAIRS
            splits = (self.pipeline_backward or 1) > (fixed_degree(self.pipeline) or 1)
            if splits and isinstance(self.experts, ModuleExperts):
                pairs = tuple(pair for pair in pairs if pair.hidden == "recompute")
        return Chooser(pairs=pairs, budget=self.memory_budget, slack=self.slack, bins=self.num_bins)

    @property
    def granularity(self) -> GranularitySearch:
        """What pipeline=True has learnt, shared by all layers like this one on this group."""
        like = _experts_parameter(self)
        settings = (
            self.restore,
            self.rotates,
            self.bypass_local,
            like is not None and (like.dtype, like.device),
        )
        if self._table is None or self._table[0] != settings:
            self._table = (settings, search_table(self.ranks, self._granularity_key))
        return self._table[1]

    def save_degrees(self, path: str | Path) -> None:
        """Writes what pipeline=True has learnt for layers like this one to a JSON file."""
        self.granularity.save(path, self._granularity_key)

    def load_degrees(self, path: str | Path) -> None:
        """Takes what `save_degrees` wrote: rank 0's file is what all ranks of the group take.

        Every rank must call it. Raises ValueError on every rank where rank 0's file is corrupt or of another
        layer, OSError where it cannot be read.
        """
        load_table(self.ranks, self._granularity_key, path, self.degree_candidates)

    @property
    def _granularity_key(self) -> dict[str, Any]:
        like = _experts_parameter(self)
        return {
            "sizes": [self.d_model, self.d_hidden, self.num_experts, self.top_k, self.ranks.size],
            "experts": type(self.experts).__name__,
            "parameters": "none" if like is None else f"{like.dtype} on {like.device.type}",
            "strategy": f"{self.restore}, rotates={self.rotates}, bypass_local={self.bypass_local}",
        }

    def predict_memory(
        self,
        num_tokens: int,
        row_counts: Shared | None = None,
        *,
        pipeline: int | None = None,
        pipeline_backward: int | None = None,
        memory_reuse: str | Restore | None = None,
    ) -> Memory:
        """The bytes that one forward and backward take on this rank (`pmoe.pipeline.footprint.Memory`).

        num_tokens: of this rank; without row_counts the largest of any rank. row_counts: of a batch, as
        ``layer.row_counts`` holds those of the last one; without them the bytes are upper bounds for any
        routing. The other arguments stand for the layer's own; where the layer chooses by itself, they must
        say what is chosen. Rows are taken to be of the parameters' type: autocast is not looked at.

        Raises ValueError where n or the pair is neither the layer's nor given, where the layer's buffers do
        not rotate (memory_reuse=False), and where experts are modules: what they save is theirs to say.
        """
        self._check_predictable("row_counts", row_counts)
        for name, value in (("pipeline", pipeline), ("pipeline_backward", pipeline_backward)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} ({value!r}) must be None or an int of at least 1")
        if not isinstance(num_tokens, int) or num_tokens < 0:
            raise ValueError(f"num_tokens ({num_tokens!r}) must be an int of at least 0")
        if not self.rotates and memory_reuse is None:
            raise ValueError(
                "memory_reuse (None) must be given for a layer built with memory_reuse=False: only buffers "
                "that rotate are predicted"
            )
        n = pipeline or fixed_degree(self.pipeline)
        restore = self.restore if memory_reuse is None else parse_restore(memory_reuse)
        if n is None or restore is True:
            raise ValueError(
                f"pipeline ({pipeline}) and memory_reuse ({memory_reuse}) must be given where the layer "
                f"chooses them (pipeline={self.pipeline}, memory_reuse={self.restore})"
            )
        backward = pipeline_backward or self.pipeline_backward or n
        bins = None if row_counts is None else row_counts.send.shape[0]
        if bins is not None and (bins % n or bins % backward):
            raise ValueError(f"pipeline ({n}, {backward}) must divide the {bins} bins of row_counts")
        shape, restore = self.memory_shape(), restore or KEEP
        if row_counts is None:
            return bound(shape, num_tokens, n, backward, restore, self.slack, self.num_bins)
        n, backward = (each << row_counts.depth.get(each, 0) for each in (n, backward))
        rank, place = self.ranks.rank, self.grid.inside.rank
        rows = {each: counted_rows(shape, row_counts, rank, each, place) for each in (n, backward)}
        return predict(shape, num_tokens, rows[n], rows[backward], restore, rearranged=n != backward)

    def _check_predictable(self, name: str, value: object) -> None:
        """Raises ValueError where not all of the memory is this layer's to know."""
        like = _experts_parameter(self)
        refused = (
            "predict_memory must not be called" if value is None else f"{name} ({value!r}) must be left out"
        )
        if not self.experts.columns("cpu" if like is None else like.device.type).hidden:
            raise ValueError(
                f"{refused} where experts are modules of one's own: what they save cannot be predicted"
            )
        unknown = {
            f"kernels are fused (fused={self.fused!r})": name != "memory_budget" and _is_fusible(self),
            f"the gate is a {type(self.gate).__name__}": type(self.gate)
            not in (TopKGate, SwitchGate, GivenGate),
            "gate is a module": not (self.trusts_gate or self._is_routed) and name == "memory_budget",
            f"the order is a {type(self.order).__name__}": not isinstance(self.order, SortedOrder),
            "rows do not travel by flat all-to-alls": self.dispatch.in_steps or self.combine.in_steps,
            "rows travel once (send_once=True)": self.send_once,
            "there is a shared expert": self.shared_expert is not None,
            "there are callbacks": bool(self.callbacks),
            "rows are padded to capacity (pad_to_capacity=True)": self.pad_to_capacity,
        }
        for why in (why for why, holds in unknown.items() if holds):
            raise ValueError(f"{refused} where {why}: its memory is not predicted")

    def memory_shape(self, rows_TM: Tensor | None = None) -> Shape:
        """What of this layer its memory depends on. rows_TM: as the experts get them, by default of the type
        of their parameters."""
        parameter = _experts_parameter(self)
        like = parameter if rows_TM is None else rows_TM
        device_type = "cpu" if like is None else like.device.type
        size = 4 if like is None else like.element_size()
        wide = size if parameter is None else parameter.element_size()
        columns = self.experts.columns(device_type)
        if not columns.hidden:  # modules do not say; only the cost model asks, to compare pairs
            columns = Columns(hidden=self.d_hidden, scratch=self.d_hidden)
        return Shape(
            d_model=self.d_model,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_ranks=self.ranks.size,
            columns=columns,
            element_size=size,
            weight_size=max(4, size),
            expert_parameters=sum(local_part(each).numel() for each in self.experts.parameters()),
            gate_parameters=sum(parameter.numel() for parameter in self.gate.parameters()),
            bypass_local=self.stages.local,
            inside=self.grid.inside.size,
            has_drops=self.capacity_factor is not None or self._is_routed,
            gate_scores=0 if self._is_routed else 1 + bool(getattr(self.gate, "z_loss_weight", 0)),
            cast_from=wide if wide != size else 0,
        )

    def _make_experts(
        self,
        expert: str | nn.Module | Callable[..., nn.Module],
        activation: str,
        bias: bool,
        options: dict[str, Any],
    ) -> Experts:
        local = self.num_local_experts
        if isinstance(expert, str):
            stacked = make_stacked(
                expert, self.d_model, self.d_hidden, local, activation, bias, shard=self.shard, **options
            )
            initialise(stacked, first_expert=self.first_expert)
            return stacked
        if isinstance(expert, Experts | nn.ModuleList):
            given = expert if isinstance(expert, Experts) else ModuleExperts(expert)
            if given.num_local_experts != local:
                raise ValueError(
                    f"expert (a {type(expert).__name__} of {given.num_local_experts}) must hold this rank's "
                    f"{local} experts"
                )
            if given.shard != self.shard:
                raise ValueError(
                    f"expert (a {type(expert).__name__}, {given.shard}) must hold this rank's part of the "
                    f"hidden columns ({self.shard}), where experts are sharded over the ranks of a node"
                )
            return given
        if self.grid.is_sharded and callable(expert):
            raise ValueError(
                f"expert ({expert!r}) must be ffn or swiglu, or a pmoe.experts.Experts of this rank's "
                "columns, where experts are sharded over the ranks of a node: a module's hidden is its own"
            )
        if isinstance(expert, nn.Module) or not callable(expert):
            raise TypeError(
                f"expert ({expert!r}) must be a name, a callable that builds one expert, or a "
                f"torch.nn.ModuleList of this rank's {local} experts"
            )
        build = build_modules(expert, self.d_model, self.d_hidden)
        modules = seeded(build, first_expert=self.first_expert, count=local)
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"expert ({expert!r}) must build a torch.nn.Module, not {type(module).__name__}"
                )
        return ModuleExperts(module.to(**options) for module in modules)

    def _make_shared(
        self,
        shared: int | nn.Module | None,
        expert: object,
        activation: str,
        bias: bool,
        options: dict[str, Any],
    ) -> Experts | None:
        if shared is None:
            return None
        if isinstance(shared, nn.Module):
            made: Experts = ModuleExperts([shared])
            made.is_parallel = False
            return made
        if not isinstance(shared, int) or isinstance(shared, bool):
            raise TypeError(f"shared_expert ({shared!r}) must be None, an int or a torch.nn.Module")
        _check_sizes(shared_expert=shared)
        kind = expert if isinstance(expert, str) else "ffn"
        stacked = make_stacked(kind, self.d_model, shared, 1, activation, bias, **options)
        stacked.is_parallel = False
        initialise(stacked, first_expert=self.num_experts)  # a seed that no routed expert has
        return stacked

    # torch.compiler.disable, but without importing the compiler before a first call. Here, not further in: or
    # this method would be a frame of its own, with a graph break of its own.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Maps x (..., d_model) to the same shape, in x's dtype (autocast's under autocast).

        token_ids: (...) int64, for gates that route by them (`pmoe.Gate.needs_token_ids`).

        Ranks may hold different numbers of tokens, none included. Raises ValueError on every rank, before
        any row travels, where any rank's input has another last dimension, dtype or device than the layer,
        or its gate failed; RuntimeError naming stage and rank where a peer is missing. While a CUDA graph is
        captured, RuntimeError before anything is launched where the graph could not hold the call: where its
        row counts are read on the host, or something would still have to be measured.

        Under activation checkpointing `pmoe.checkpoint_contexts` keeps the routing. Without it, a second pass
        that routes any rank's tokens otherwise than the first raises ValueError on every rank.
        """
        return _forward(self, x, token_ids)

    def __getstate__(self) -> dict[str, Any]:
        # The last loss is attached to a graph, which neither copies nor pickles; the rest is found again.
        found_again = dict.fromkeys(("l_aux", "_table", "_chooser", "_solver", "gradients"))
        return {**self.__dict__, **found_again, "_agreed": frozenset()}

    def extra_repr(self) -> str:
        reuse = "" if self.restore is False else f"memory_reuse={self.restore}, "
        reuse += f"fused={self.fused!r}, " if self.fused else ""
        reuse += "pad_to_capacity=True, " if self.pad_to_capacity else ""
        return (
            f"d_model={self.d_model}, d_hidden={self.d_hidden}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, pipeline={self.pipeline}, {reuse}{self.ranks}"
        )


OF_LAST_CALL = ("l_aux", "_counted", "ran", "max_tokens")
"""Attributes of a layer that tell of its last call."""


@dataclass(frozen=True)
class _Alone:
    """Rows by expert of a call that brought none of them to the host. Whoever asks for them waits."""

    counts_E: Tensor
    num_tokens: int
    needs_grad: bool

    def on_host(self) -> Shared:
        counts = self.counts_E.to("cpu", torch.int64).view(1, 1, -1)
        return Shared(
            send=counts,
            recv=counts,
            recv_device=counts,
            max_tokens=self.num_tokens,
            needs_grad=self.needs_grad,
        )


@dataclass(frozen=True)
class _Padded:
    """Of a call whose rows were padded: the rows as they travelled, and those of them that are no padding, by
    expert, on the device."""

    rows: Shared
    kept_E: Tensor


@dataclass(frozen=True, kw_only=True)
class _Routed:
    """A rank's tokens with their routing: what its part of the exchange needs.

    x: the layer's input, behind the first hooks. keep_TK: the slots within capacity, None where all are.
    fault: a `Fault`, on the device where it is found there. failure: the error that stands behind a fault
    found on the host. is_again: the gate has routed these tokens before, for a checkpoint."""

    x: Tensor
    x_TM: Tensor
    routing: Routing
    keep_TK: Tensor | None = None
    fault: Tensor | Fault = Fault.NONE
    failure: Exception | None = None
    is_again: bool = False


def _forward(layer: MoELayer, x: Tensor, token_ids: Tensor | None) -> Tensor:
    """Route, exchange counts, plan, run the experts between dispatch and combine."""
    layer.grid.reconnect()
    if _is_capturing(x):
        _check_capturable(layer, x)
    decisions = recompute.decisions_of(layer, OF_LAST_CALL)
    if layer.pad_to_capacity:
        return _forward_padded(layer, x, token_ids, decisions)
    may_fuse = decisions.once("may_fuse", lambda: _may_fuse(layer, x))
    if may_fuse and layer.ranks.size == 1:
        fused = _fused_alone(layer, x, decisions)
        if fused is not None:
            return fused
    elif decisions.once("alone", lambda: _alone_refusal(layer, x) is None):
        return _forward_alone(layer, x, decisions)
    routed = _route(layer, x, token_ids, decisions)
    routing, keep_TK = routed.routing, routed.keep_TK
    expert_TK, x = routing.expert, routed.x
    parameters = layer.experts.local_parameters()
    shared_parameters = list[Tensor](layer.shared_expert.parameters()) if layer.shared_expert else []
    modules, candidates = layer.modules_of_plan, layer.degree_candidates
    rotates = modules.rotates
    tokens = Tokens(expert_TK.shape[0] if routing.token is None else routed.x_TM.shape[0], routing.token)
    rank_TK = carrier_TK = carries_TK = once_FP = None
    if layer.send_once:
        rank_TK = expert_TK // layer.num_local_experts
        carrier_TK, carries_TK = carriers(rank_TK, keep_TK)
        once_FP = count_rows(rank_TK, carries_TK, layer.num_bins, layer.grid.across.size, tokens)

    def sort(n: int, pieces: int) -> Ordered:
        stay = _staying(layer, modules.stages)
        slots = sort_rows(expert_TK, keep_TK, n, layer.num_experts, stay, pieces, tokens)
        if rank_TK is None:
            return Ordered(slots=slots, sent=slots)
        size = layer.grid.across.size
        return Ordered(
            slots=slots,
            sent=sort_rows(rank_TK, carries_TK, n, size, LocalExperts(0, 0), 0, tokens),
            carrier_TK=carrier_TK,
            sent_nP=count_rows(rank_TK, carries_TK, n, size, tokens),
        )

    # Counts travel in bins: the chunks, where their number is fixed and so is their share of rows.
    slots = _slots(layer, routed) if rotates else None
    shared_weight_T = _shared_weight(layer, routed.x_TM)
    operands = (*parameters, *shared_parameters, *modules.hooks.parameters)
    counts_FE = count_rows(expert_TK, keep_TK, layer.num_bins, layer.num_experts, tokens)
    exchange = None
    if not decisions.taken_over:
        with recompute.unseen():
            exchange = CountsExchange(
                layer.grid,
                counts_FE,
                num_tokens=tokens.count,
                fault=routed.fault,
                needs_grad=_needs_grad(routed.x_TM, routing.weight, *operands),
                dtype=_autocast_dtype(routed.x_TM) or routed.x_TM.dtype,
                traffic=layer.traffic,
                slots=slots,
                once_FP=once_FP,
                exchanges=(layer.dispatch, layer.combine),
                bypass_local=modules.stages.local,
                asks_most_rows=may_fuse,
                one_row_a_choice=_gives_top_k(layer, routing),
            )
    orders: dict[tuple[int, int], Ordered] = {}
    # While the counts travel: no count can change these orders.
    sent = comet.sort(expert_TK, keep_TK, layer.num_experts) if may_fuse else None
    if len(candidates) == 1 and not rotates and sent is None:
        n = candidates[0]
        orders[n, layer.num_pieces(n)] = sort(n, layer.num_pieces(n))

    def finish() -> Shared:
        assert exchange is not None
        try:
            return exchange.finish()
        except FaultError as error:
            raise (routed.failure or error) from None

    shared = decisions.once("shared", finish)

    def plan_for(forward: int, backward: int, restore: Restore) -> Plan:
        degrees = _degrees(layer, forward, backward, restore, shared.depth)
        for n in (degrees.forward, degrees.backward):
            if (n, layer.num_pieces(n)) not in orders:
                orders[n, layer.num_pieces(n)] = sort(n, layer.num_pieces(n))
        return make_plan(
            modules,
            order=orders[degrees.forward, degrees.pieces],
            backward_order=orders[degrees.backward, layer.num_pieces(degrees.backward)],
            expert_TK=expert_TK,
            tokens=tokens,
            shared=shared,
            degrees=degrees,
            restore=restore,
            has_drops=keep_TK is not None,
        )

    layer.l_aux = routing.l_aux
    layer._counted, layer.max_tokens = shared.on_host(), shared.max_tokens

    autocast_dtype = _autocast_dtype(x)
    rows_TM = routed.x_TM
    if autocast_dtype is not None:
        rows_TM = rows_TM.to(autocast_dtype)
        parameters = _cast(layer.experts, parameters, autocast_dtype)
        if layer.shared_expert is not None:
            shared_parameters = _cast(layer.shared_expert, shared_parameters, autocast_dtype)
    if routing.mix is not None:
        rows_TM = routing.mix.dispatch.to(rows_TM.dtype).t() @ rows_TM
    inputs = Inputs(
        x_TM=rows_TM,
        weight_TK=routing.weight,
        parameters=parameters,
        shared_weight_T=shared_weight_T,
        shared_parameters=shared_parameters,
        hook_parameters=modules.hooks.parameters,
    )
    inside = autocast_dtype is not None and layer.experts.runs_under_autocast
    call = None
    steps = decisions.once("steps", lambda: _fused_steps(layer, rows_TM, shared)) if may_fuse else None
    if steps is not None and sent is not None:
        journey = comet.make_journey(expert_TK, sent, counts_FE, shared, layer.ranks.rank)
        call = _fused_call(layer, steps, journey)
    with torch.autocast(x.device.type, enabled=inside, dtype=autocast_dtype):
        if call is not None and (layer.fused != "forward" or not shared.needs_grad):
            plan, y_TM = None, comet.run(call, inputs, needs_grad=shared.needs_grad)
        else:
            _settle(layer, x, shared)
            plan, y_TM = _piped(layer, shared, plan_for, inputs, call, decisions)
    layer.ran = _how_it_ran(routed, shared, inputs, call, plan)
    if routing.mix is not None:
        y_TM = routing.mix.combine.to(y_TM.dtype) @ y_TM
    y = y_TM.view(x.shape)
    for callback in layer.callbacks:
        y = callback.before_moe_end(y)
    return y


def _is_capturing(x: object) -> bool:
    """Whether what is launched for x becomes part of a CUDA graph."""
    return isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()


def _check_capturable(layer: MoELayer, x: Tensor) -> None:
    """Raises RuntimeError where a call waits for the device, measures, or makes anything that outlasts the
    graph: before it launches anything."""
    why = _padded_capture_refusal(layer, x) if layer.pad_to_capacity else _alone_refusal(layer, x)
    if why is not None:
        raise RuntimeError(
            f"pmoe: a CUDA graph cannot hold this call of a MoELayer: {why}. It can hold calls that were "
            "made once before the capture (all is measured then): on one rank, of a layer with gate "
            '"topk" or "switch", "ffn" or "swiglu" experts in bfloat16 or float16, whose products are '
            "computed by pmoe's kernels, and none of the options that change what runs; on any number of "
            "ranks, of a layer with pad_to_capacity=True that offloads nothing"
        )


def _padded_capture_refusal(layer: MoELayer, x: Tensor) -> str | None:
    _check_input(layer, x)
    pairs = layer.chooser.pairs
    remakes = isinstance(layer.experts, ModuleExperts) and any(pair.hidden == "recompute" for pair in pairs)
    call = _padded_call(layer, x.reshape(-1, layer.d_model))
    unfit = {
        "other layers' gradients are reduced inside": layer.gradients is not None,
        "its tasks are being timed, and what is captured does not run yet": engine.is_recording(),
        f"memory_reuse ({layer.restore}) may offload, to memory that a replay would find in other hands": any(
            pair.offloads for pair in pairs
        ),
        f"memory_reuse ({layer.restore}) may recompute modules, whose random state is on the host": remakes,
        f"no call like it ({call}) was made before": call not in layer._agreed,
    }
    return next((why for why, holds in unfit.items() if holds), None)


def _unfit_to_pad(layer: MoELayer) -> str | None:
    """Why rows of a layer cannot be padded to capacity, whatever its tokens. None where they can."""
    gate = layer.gate
    whole = isinstance(gate, SoftGate | ExpertChoiceGate) or _decides_capacity(gate)
    unfit = {
        f"capacity_factor is {layer.capacity_factor}, which sets no capacity": layer.capacity_factor is None
        and not whole,
        f"the gate ({type(gate).__name__}) decides itself what is kept, or mixes tokens": whole,
        f"gate ({type(gate).__name__}) is a module of one's own: what it returns is checked when counts are "
        "exchanged": type(gate) not in GATES.values(),
        "logits are checked (check_finite=True): ranks tell each other with the counts": layer.check_finite,
        "rows travel once (send_once=True): how many do is not known before": layer.send_once,
        "experts are sharded over the ranks of a node": layer.grid.is_sharded,
        "rows do not travel by flat all-to-alls": layer.dispatch.in_steps or layer.combine.in_steps,
        "there are callbacks, which would see padding": bool(layer.callbacks),
        "there is a shared_expert, which would compute padding": layer.shared_expert is not None,
        f"kernels are fused (fused={layer.fused!r}): they send no padding": bool(layer.fused),
    }
    return next((why for why, holds in unfit.items() if holds), None)


def _padded_call(layer: MoELayer, x_TM: Tensor) -> padded.Call:
    return padded.Call(
        num_tokens=x_TM.shape[0],
        needs_grad=_needs_grad(x_TM, *layer.parameters()),
        dtype=_autocast_dtype(x_TM) or x_TM.dtype,
    )


def _forward_padded(layer: MoELayer, x: Tensor, token_ids: Tensor | None, decisions: Decisions) -> Tensor:
    """As `_forward`, where the number of tokens says where rows go. Ranks agree on it, and tell each other of
    faults, as `pmoe.pipeline.padded.agrees_always` says, or where a checkpoint routes again."""
    routed = _route(layer, x, token_ids, decisions)
    routing, x_TM, x, device = routed.routing, routed.x_TM, routed.x, routed.x_TM.device
    agrees_always = padded.agrees_always(device)
    if routed.failure is not None and layer._agreed and not agrees_always:
        raise routed.failure  # the others may not ask
    call = _padded_call(layer, x_TM)
    if agrees_always or call not in layer._agreed or routed.is_again:
        if layer.ranks.size > 1 or routed.is_again:
            try:
                with recompute.unseen():
                    padded.check_alike(
                        layer.grid,
                        call,
                        num_experts=layer.num_experts,
                        device=device,
                        fault=routed.fault,
                        traffic=layer.traffic,
                    )
            except FaultError as error:
                raise (routed.failure or error) from None
        layer._agreed |= {call}
    assert layer.capacity_factor is not None
    top_k = routing.expert.shape[1]
    splits = padded.Splits(
        num_experts=layer.num_experts,
        capacity=min(
            expert_capacity(layer.capacity_factor, call.num_tokens, top_k, layer.num_experts),
            call.num_tokens,  # a token's experts are distinct
        ),
        bins=math.lcm(*layer.degree_candidates),
    )
    padding, kept_E = padded.make_padding(routing.expert, splits)
    shared = splits.shared(
        layer.ranks.size, device, max_tokens=-(-splits.num_rows // top_k), needs_grad=call.needs_grad
    )
    modules, tokens, expert_N1 = layer.modules_of_plan, Tokens(splits.num_rows), splits.expert_of_rows(device)
    stay = _staying(layer, modules.stages)

    def sort(n: int) -> Ordered:
        slots = sort_rows(expert_N1, None, n, layer.num_experts, stay, layer.num_pieces(n), tokens)
        return Ordered(slots=slots, sent=slots)

    def plan_for(forward: int, backward: int, restore: Restore) -> Plan:
        degrees = _degrees(layer, forward, backward, restore, {})
        order = sort(degrees.forward)
        plan = make_plan(
            modules,
            order=order,
            backward_order=order if degrees.forward == degrees.backward else sort(degrees.backward),
            expert_TK=expert_N1,
            tokens=tokens,
            shared=shared,
            degrees=degrees,
            restore=restore,
            has_drops=False,
        )
        return replace(plan, padding=padding)

    layer.l_aux, layer.max_tokens = routing.l_aux, call.num_tokens
    layer._counted = _Padded(shared.on_host(), kept_E)
    autocast_dtype = _autocast_dtype(x)
    inputs = Inputs(
        x_TM=x_TM.to(call.dtype),
        weight_TK=routing.weight,
        parameters=_cast(layer.experts, layer.experts.local_parameters(), call.dtype),
    )
    inside = autocast_dtype is not None and layer.experts.runs_under_autocast
    with torch.autocast(x.device.type, enabled=inside, dtype=autocast_dtype):
        _settle(layer, x, shared)
        plan, y_TM = _piped(layer, shared, plan_for, inputs, None, decisions)
    layer.ran = _how_it_ran(routed, shared, inputs, None, plan)
    return y_TM.view(x.shape)


def _piped(
    layer: MoELayer,
    shared: Shared,
    plan_for: Callable[[int, int, Restore], Plan],
    inputs: Inputs,
    call: comet.Call | None,
    decisions: Decisions,
) -> tuple[Plan, Tensor]:
    """T_O by the pipeline engine; with ``call``, forward by the fused kernels, in the chunks of backward."""
    if call is None:
        choice = decisions.once("choice", lambda: _choose(layer, shared, plan_for, inputs))
        with recompute.unseen():  # trials may have made parts of it
            plan = plan_for(choice.forward, choice.backward, choice.restore)
        return plan, run_experts(plan, inputs, needs_grad=shared.needs_grad)
    pair = call.restore
    degrees = decisions.once("degrees", lambda: _choose_degrees(layer, shared, pair, plan_for, inputs))
    backward = degrees.backward
    with recompute.unseen():
        plan = plan_for(backward, backward, call.restore)
    forward = comet.forward_by(call, shared.recv_device)
    return plan, run_experts(plan, inputs, needs_grad=True, forward=forward)


def _staying(layer: MoELayer, stages: Stages) -> LocalExperts:
    """The experts whose rows of this rank's do not travel."""
    return LocalExperts(layer.first_expert, layer.first_expert + layer.num_local_experts * stages.local)


def _how_it_ran(
    routed: _Routed, shared: Shared, inputs: Inputs, call: comet.Call | None, plan: Plan | None
) -> Ran:
    """plan: None where the fused kernels did both passes; with ``call``, of the backward pass alone."""
    routing, rows_TM = routed.routing, inputs.x_TM
    restore, backward = None if call is None else call.restore, None
    if plan is not None:
        restore = plan.restore if plan.rotates or call is not None else None
        backward = len(plan.backward.chunks)
    return Ran(
        path="pipeline" if call is None else "fused" if plan is None else "fused forward",
        num_tokens=routed.x_TM.shape[0],
        num_slots=routing.expert.numel() if routing.token is None and routing.mix is None else None,
        dtype=rows_TM.dtype,
        device=rows_TM.device,
        forward=len(plan.forward.chunks) if plan is not None and call is None else None,
        backward=backward if shared.needs_grad else None,
        restore=restore if shared.needs_grad else None,
    )


def _gives_top_k(layer: MoELayer, routing: Routing) -> bool:
    """Whether every token has top_k rows of its own, dropped ones among them."""
    return routing.token is None and routing.mix is None and routing.expert.shape[1] == layer.top_k


def _unfit_to_fuse(layer: MoELayer) -> str | None:
    """Why no call of a layer that asks for the fused kernels is computed by them, whatever its tokens: the
    same on every rank. None where a call may be."""
    unfit = {
        "nothing travels on one rank": layer.fused == "auto" and layer.ranks.size == 1,
        f"the experts are {type(layer.experts).__name__}": not comet.takes(layer.experts),
        "experts are sharded over the ranks of a node": layer.grid.is_sharded,
        "there are callbacks": bool(layer.callbacks),
        "there is a shared expert": layer.shared_expert is not None,
        "rows travel once (send_once=True)": layer.send_once,
        "rows are sent to their own rank (bypass_local=False)": not layer.bypass_local,
        "rows do not travel by flat all-to-alls": not layer.is_flat,
        f"the order is a {type(layer.order).__name__}": type(layer.order) is not SortedOrder,
        f"the gate is a {type(layer.gate).__name__}": isinstance(layer.gate, SoftGate | ExpertChoiceGate),
        "there is a memory_budget": layer.memory_budget is not None,
        "steps are timed one after the other (sequential=True)": layer.sequential,
        "collectives wait for each other (one_lane=True)": layer.one_lane,
        "other layers' gradients are reduced inside": layer.gradients is not None,
    }
    return next((why for why, holds in unfit.items() if holds), None)


def _is_fusible(layer: MoELayer) -> bool:
    """Whether any step of this layer may be computed by the fused kernels."""
    return bool(layer.fused) and _unfit_to_fuse(layer) is None and _fused_pair(layer) is not None


def _may_fuse(layer: MoELayer, x: Tensor) -> bool:
    """Whether the fused kernels may take a call, whatever its row counts; the same on every rank. Where not,
    the reason is told."""
    if not layer.fused:
        return False
    why = _unfit_to_fuse(layer)
    if why is None and layer.ranks.size == 1:
        _check_input(layer, x)
        assert isinstance(layer.experts, StackedExperts)
        _, d_model, d_hidden = layer.experts.w2.shape
        dtype = _autocast_dtype(x) or x.dtype
        why = comet.refusal(x.device, dtype, d_model=d_model, d_hidden=d_hidden)
    if why is not None:
        _tell_unfused(layer, why)
    return why is None


def _tell_unfused(layer: MoELayer, why: str) -> None:
    """Once a reason: reasons with numbers begin alike, up to a colon."""
    if layer.fused != "auto":
        warn_once(f"fused ({layer.fused!r}) falls back to the unfused layer because {why}")


def _fused_refusal(layer: MoELayer, shared: Shared) -> str | None:
    """Why a call is not computed by the fused kernels, as far as its sizes on a device have no part in it, or
    None. The same on every rank."""
    if shared.most_rows is None:
        return f"the gate ({type(layer.gate).__name__}) does not give every token top_k ({layer.top_k}) rows"
    if shared.needs_grad and _fused_pair(layer) is None:
        return f"memory_reuse ({layer.restore}) offloads"
    return None


def _fused_pair(layer: MoELayer) -> Restore | None:
    """The restore pair of a fused call: the layer's, or the one that does not offload where it may choose."""
    return next((pair for pair in layer.chooser.pairs if not pair.offloads), None)


def _fused_steps(layer: MoELayer, rows_TM: Tensor, shared: Shared) -> Steps | None:
    """What computes a call by the fused kernels; None, with a warning, where they do not take it."""
    why = _fused_refusal(layer, shared)
    if why is None:
        assert shared.most_rows is not None
        request = _fused_request(
            layer, rows_TM.device, rows_TM.dtype, shared.max_tokens, shared.most_rows, shared.needs_grad
        )
        if layer.fused == "auto" and not comet.worth(request):
            return None
        found = comet.steps_for(request)
        if not isinstance(found, str):
            return found
        why = found
    _tell_unfused(layer, why)
    return None


def _fused_request(
    layer: MoELayer,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    most_rows: int,
    needs_grad: bool,
) -> comet.Request:
    assert isinstance(layer.experts, StackedExperts)
    return comet.Request(
        ranks=layer.ranks,
        device=device,
        dtype=dtype,
        d_model=layer.d_model,
        d_hidden=layer.experts.w2.shape[2],
        activation=alone.activation_of(layer.experts),
        experts=layer.num_local_experts,
        top_k=layer.top_k,
        max_tokens=max_tokens,
        most_rows=most_rows,
        needs_grad=needs_grad,
        slack=layer.slack,
    )


def _fused_alone(layer: MoELayer, x: Tensor, decisions: Decisions) -> Tensor | None:
    """A call of one rank by the fused kernels, in four launches: the gate's product, the routing, those two.
    None where the gate is none that the routing kernel computes, or where the call falls back."""
    gate = layer.gate
    whole = layer.trusts_gate and layer.capacity_factor is None and not layer.check_finite
    if not whole or alone.refusal(gate, layer.experts) is not None or _fused_pair(layer) is None:
        return None
    x_TM = x.reshape(-1, layer.d_model)
    needs_grad = _needs_grad(x, *layer.parameters())
    if layer.fused == "forward" and needs_grad:
        return None  # the pipeline engine's backward pass wants the counts on the host
    dtype, num_tokens = _autocast_dtype(x) or x.dtype, x_TM.shape[0]
    request = _fused_request(layer, x.device, dtype, num_tokens, num_tokens * layer.top_k, needs_grad)
    steps = decisions.once("steps alone", lambda: comet.steps_for(request))
    if isinstance(steps, str):
        return None  # which is told where the call goes on
    with torch.autocast(x.device.type, enabled=False):
        routes = _route_alone(layer, x_TM, decisions)
        call = _fused_call(layer, steps, comet.journey_alone(routes))
        parameters = _cast(layer.experts, layer.experts.local_parameters(), dtype)
        inputs = Inputs(x_TM=x_TM.to(dtype), weight_TK=routes.weight_TK, parameters=parameters)
        y_TM = comet.run(call, inputs, needs_grad=needs_grad)
    layer.l_aux, layer.max_tokens = routes.l_aux, num_tokens
    layer._counted = _Alone(routes.counts_nE[0], num_tokens, needs_grad)
    layer.ran = Ran(
        path="fused",
        num_tokens=num_tokens,
        num_slots=num_tokens * layer.top_k,
        dtype=dtype,
        device=x.device,
        restore=call.restore if needs_grad else None,
    )
    return y_TM.view(x.shape)


def _fused_call(layer: MoELayer, steps: Steps, journey: Journey) -> comet.Call:
    assert isinstance(layer.experts, StackedExperts)
    activation = alone.activation_of(layer.experts)
    restore = _fused_pair(layer) or KEEP  # of a call without a backward pass
    return comet.Call(steps=steps, journey=journey, activation=activation, restore=restore)


def _alone_refusal(layer: MoELayer, x: Tensor) -> str | None:
    """Why a call is not computed by `pmoe.pipeline.alone`, or None where it is."""
    if layer.ranks.size > 1:
        return f"{layer.ranks.size} ranks: rows travel"
    unfit = {
        "rows are sent to this rank itself": not layer.bypass_local or layer.send_once,
        "there are callbacks": bool(layer.callbacks),
        "there is a shared expert": layer.shared_expert is not None,
        "other layers' gradients are reduced inside": layer.gradients is not None,
        f"memory_reuse ({layer.restore})": layer.rotates,
        f"pipeline ({layer.pipeline})": fixed_degree(layer.pipeline) not in (None, 1),
        "rows are dropped over a capacity": layer.capacity_factor is not None,
        "steps are timed one after the other": layer.sequential,
        "the logits are checked": layer.check_finite,
        f"the order is a {type(layer.order).__name__}": type(layer.order) is not SortedOrder,
        "the gate is a module": not layer.trusts_gate,
    }
    why = next((why for why, holds in unfit.items() if holds), None) or alone.refusal(
        layer.gate, layer.experts
    )
    if why is not None:
        return why
    _check_input(layer, x)
    assert isinstance(layer.gate, TopKGate) and isinstance(layer.experts, StackedExperts)
    return alone.kernel_refusal(
        layer.gate,
        layer.experts,
        x.reshape(-1, layer.d_model),
        _autocast_dtype(x) or x.dtype,
        ranks=layer.ranks,
        needs_grad=_needs_grad(x, *layer.parameters()),
    )


def _settle(layer: MoELayer, x: Tensor, shared: Shared) -> None:
    """Has the ways to compute the experts' products measured where that has not been done."""
    dtype, most = _autocast_dtype(x) or x.dtype, shared.max_tokens
    even_rows = most * layer.top_k * layer.grid.inside.size
    needs_grad = shared.needs_grad
    with recompute.unseen():
        settle_products(layer.experts, layer.ranks, dtype, x.device, even_rows, needs_grad=needs_grad)
        if layer.shared_expert is not None:
            settle_products(layer.shared_expert, layer.ranks, dtype, x.device, most, needs_grad=needs_grad)


def _route_alone(layer: MoELayer, x_TM: Tensor, decisions: Decisions) -> Routes:
    """As `_route`, of one rank whose routing kernel does it all. Autocast must be off."""
    gate = layer.gate
    assert isinstance(gate, TopKGate)

    def decide() -> Routes:
        routes = alone.route_tokens(gate, x_TM)
        recompute.refuse_changed_routing(layer, x_TM.shape[0], routes.expert_TK)
        return routes

    return decisions.route(x_TM, decide)


def _forward_alone(layer: MoELayer, x: Tensor, decisions: Decisions) -> Tensor:
    assert isinstance(layer.experts, StackedExperts)
    dtype = _autocast_dtype(x) or x.dtype
    x_TM = x.reshape(-1, layer.d_model)
    parameters = _cast(layer.experts, layer.experts.local_parameters(), dtype)
    found = alone.run(lambda: _route_alone(layer, x_TM, decisions), layer.experts, x_TM, parameters, dtype)
    layer.l_aux, layer.max_tokens = found.l_aux, x_TM.shape[0]
    layer._counted = _Alone(found.counts_E, x_TM.shape[0], _needs_grad(found.y_TM))
    layer.ran = Ran(
        path="alone",
        num_tokens=x_TM.shape[0],
        num_slots=x_TM.shape[0] * layer.top_k,
        dtype=dtype,
        device=x.device,
    )
    return found.y_TM.view(x.shape)


def _cast(experts: Experts, parameters: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Parameters as autocast hands them to operators; modules meet autocast by themselves."""
    return parameters if experts.runs_under_autocast else [each.to(dtype) for each in parameters]


def _shared_weight(layer: MoELayer, x_TM: Tensor) -> Tensor | None:
    """(T,) the factor of the shared expert's output."""
    if layer.shared_expert is None:
        return None
    if layer.shared_gate is None:
        return torch.ones(x_TM.shape[0], dtype=at_least_float32(x_TM[:0]).dtype, device=x_TM.device)
    with torch.autocast(x_TM.device.type, enabled=False):
        return router_logits(x_TM, layer.shared_gate.weight).sigmoid().squeeze(1)


def _slots(layer: MoELayer, routed: _Routed) -> Slots:
    """What to ask about chunks: how deep each n must be cut, and whether the host has room for T_DI."""
    x_TM, host_rows = routed.x_TM, None
    if layer.may_offload_rows:
        # Every unit of a chunk, travelling or not, starts on a boundary of its own.
        free = pool(x_TM.device).host.free_bytes - 2 * layer.num_bins * ALIGNMENT
        host_rows = max(free, 0) // (layer.d_model * x_TM.element_size())
    return Slots(
        slack=layer.slack,
        top_k=layer.top_k * layer.grid.inside.size,
        degrees=layer.degree_candidates,
        own_rank=layer.ranks.rank if layer.stages.local else None,
        host_rows=host_rows,
    )


def _choose(
    layer: MoELayer,
    shared: Shared,
    plan_for: Callable[[int, int, Restore], Plan],
    inputs: Inputs,
) -> Choice:
    """n of both passes and the restore pair, from numbers that all ranks share."""
    chooser, most, rows_TM = layer.chooser, shared.max_tokens, inputs.x_TM

    def profile() -> Profile:
        return profile_of(layer.ranks, rows_TM.device, rows_TM.dtype)

    forward = fixed_degree(layer.pipeline)
    if chooser.budget is not None:
        shape = layer.memory_shape(rows_TM)
        degrees = [(n, layer.pipeline_backward or n) for n in (DEGREES if forward is None else (forward,))]
        choice = chooser.fitting(shape, most, degrees, profile)
        if shared.host_shortage and choice.restore.dispatched == "offload":
            choice = chooser.fitting(shape, most, degrees, profile, host_is_full=True)
        return choice
    restore = chooser.pairs[0]
    if len(chooser.pairs) > 1 and shared.needs_grad:
        restore = chooser.pair(layer.memory_shape(rows_TM), most, profile)
    if shared.host_shortage and restore.dispatched == "offload":
        restore = Restore("communicate", restore.hidden)
        if shared.needs_grad:  # else nothing is offloaded at all
            warn_once("too little host memory is left on some rank to offload T_DI: it is sent again instead")
    found = _choose_degrees(layer, shared, restore, plan_for, inputs)
    return Choice(forward=found.forward, backward=found.backward, restore=restore)


def _choose_degrees(
    layer: MoELayer,
    shared: Shared,
    restore: Restore,
    plan_for: Callable[[int, int, Restore], Plan],
    inputs: Inputs,
) -> PassDegrees:
    forward = fixed_degree(layer.pipeline)
    if layer.pipeline == SOLVE:
        return _solved(layer, restore, inputs.x_TM, shared.max_tokens)
    if forward is None:
        return _searched(layer, shared, restore, plan_for, inputs)
    return PassDegrees(forward, layer.pipeline_backward or forward)


def _solved(layer: MoELayer, restore: Restore, rows_TM: Tensor, most: int) -> PassDegrees:
    """What pipeline="solve" takes for ``most`` tokens of a rank."""
    if layer.ranks.size == 1:
        return PassDegrees(1, 1)
    key = (layer.rotates, restore, layer.one_lane)
    if layer._solver is None or layer._solver[0] != key:
        layer._solver = (key, Solver(layer.grid, restore if layer.rotates else None, layer.one_lane))
    modules = layer.experts.local if isinstance(layer.experts, ModuleExperts) else ()
    return layer._solver[1].degrees(layer.memory_shape(rows_TM), rows_TM, most, layer.t_gar, list(modules))


def _searched(
    layer: MoELayer,
    shared: Shared,
    restore: Restore,
    plan_for: Callable[[int, int, Restore], Plan],
    inputs: Inputs,
) -> PassDegrees:
    """What pipeline=True takes: n known for this many tokens, or found by trials where they are worth it.

    Where nothing is differentiated, chunks would be small, nothing travels, or experts are modules, which a
    trial might change, a rule decides instead.
    """
    most = shared.max_tokens
    rows = most * layer.top_k
    ruled = adaptive_degree(rows, 2 if layer.rotates else layer.ranks.size)
    known = layer.granularity
    found = known.lookup(most)
    if found is not None:
        return found
    worth = shared.needs_grad and layer.ranks.size > 1 and rows >= 2 * LEAST_ROWS
    modules = isinstance(layer.experts, ModuleExperts) or isinstance(layer.shared_expert, ModuleExperts)
    if not worth or modules or layer.hooks or layer.sequential:
        return PassDegrees(ruled, ruled)

    def plan_of(degrees: PassDegrees) -> Plan | None:
        if degrees.forward != degrees.backward and (not layer.rotates or layer.send_once):
            return None
        return plan_for(degrees.forward, degrees.backward, restore)

    traffic = replace(layer.traffic)
    found = search(known, most, layer.degree_candidates, plan_of, inputs, layer.ranks)
    vars(layer.traffic).update(vars(traffic))  # trials are no traffic of the model
    return found


def _degrees(
    layer: MoELayer, forward: int, backward: int, restore: Restore, depth: dict[int, int]
) -> Degrees:
    """Numbers of chunks, as deep as every rank's slots need them."""
    if depth:
        forward, backward = forward << depth[forward], backward << depth[backward]
    if forward % backward and isinstance(layer.experts, ModuleExperts) and restore.hidden != "recompute":
        backward = forward  # a saved graph cannot be split
    if layer.hooks or layer.send_once:
        backward = forward
    return Degrees(forward=forward, backward=backward, pieces=layer.num_pieces(forward))


def _route(layer: MoELayer, x: Tensor, token_ids: Tensor | None, decisions: Decisions) -> _Routed:
    """Checks the input and lets the gate decide. One rank alone raises at once; among several a rank that
    failed takes part with no tokens in the exchange that tells the others."""
    try:
        x = _started(layer, x)
        _check_input(layer, x)
        x_TM = x.reshape(-1, layer.d_model)
        decided = decisions.route(x_TM, lambda: _decide(layer, x_TM, token_ids))
    except Exception as error:
        if layer.ranks.size == 1 or decisions.taken_over:  # which has no such exchange
            raise
        return _nothing_routed(layer, error)
    routing, keep_TK, fault, is_again = decided
    return _Routed(x=x, x_TM=x_TM, routing=routing, keep_TK=keep_TK, fault=fault, is_again=is_again)


def _decide(
    layer: MoELayer, x_TM: Tensor, token_ids: Tensor | None
) -> tuple[Routing, Tensor | None, Tensor | Fault, bool]:
    """The routing of tokens and the rest of `_Routed`."""
    routing = _gated(layer, x_TM, token_ids)
    _check_routing(layer, routing, x_TM.shape[0])
    fault: Tensor | Fault = Fault.NONE
    if not layer.trusts_gate:
        routing, fault = _harmless(routing, x_TM, layer.num_experts)
    if layer.check_finite and routing.logits is not None:
        # Arithmetic and no torch.where: scalars that become tensors would be copies that synchronise.
        finite = routing.logits.isfinite().all().long()
        fault = finite * fault + (1 - finite) * int(Fault.NOT_FINITE)
    changed = recompute.changed_routing(layer, x_TM.shape[0], routing.expert, routing.keep, routing.token)
    if changed is not None:
        with recompute.unseen():
            fault = changed * int(Fault.RECOMPUTED) + (1 - changed) * fault
    keep_TK = routing.keep
    decided = keep_TK is not None or routing.token is not None or _decides_capacity(layer.gate)
    if layer.capacity_factor is not None and not (decided or layer.pad_to_capacity):
        capacity = expert_capacity(
            layer.capacity_factor, x_TM.shape[0], routing.expert.shape[1], layer.num_experts
        )
        used_E = torch.zeros(layer.num_experts, dtype=torch.int64, device=x_TM.device)
        keep_TK, _ = within_capacity(routing.expert, capacity, used_E)
    return replace(routing, logits=None), keep_TK, fault, changed is not None


def _started(layer: MoELayer, x: Tensor) -> Tensor:
    """The input behind the callbacks' first hooks."""
    for callback in layer.callbacks:
        try:
            x = callback.before_moe_start(x)
        except Exception as error:
            if layer.ranks.size == 1:
                raise
            name = type(callback).__name__
            raise FaultError(Fault.CALLBACK, f"callback {name}.before_moe_start: {error}") from error
    return x


def _gated(layer: MoELayer, x_TM: Tensor, token_ids: Tensor | None) -> Routing:
    if not getattr(layer.gate, "needs_token_ids", False):
        routing: Routing = layer.gate(x_TM)
        return routing
    if not isinstance(token_ids, Tensor) or token_ids.numel() != x_TM.shape[0]:
        given = tuple(token_ids.shape) if isinstance(token_ids, Tensor) else token_ids
        raise ValueError(
            f"token_ids ({given}) must be given, one for each of the {x_TM.shape[0]} tokens: the gate "
            f"({type(layer.gate).__name__}) routes by them"
        )
    by_ids: Routing = layer.gate(x_TM, token_ids.reshape(-1))
    return by_ids


def _decides_capacity(gate: nn.Module) -> bool:
    return bool(getattr(gate, "decides_capacity", False))


def _harmless(routing: Routing, x_TM: Tensor, num_experts: int) -> tuple[Routing, Tensor]:
    """A routing that nothing breaks on, and the `Fault` of the one that was given, on the device."""
    expert, weight, token, num_tokens = routing.expert, routing.weight, routing.token, x_TM.shape[0]
    found = {
        Fault.ROUTING: ((expert < 0) | (expert >= num_experts)).any(),
        Fault.WEIGHT: ~weight.isfinite().all(),
    }
    if token is not None:
        found[Fault.TOKEN] = ((token < 0) | (token >= num_tokens)).any() | (token.diff() < 0).any()
        token = token.clamp(0, max(num_tokens - 1, 0))
    fault = torch.stack([holds.long() * int(kind) for kind, holds in found.items()]).amax()
    # Routing weights of all ranks travel together: in one type.
    weight = weight.to(torch.float64 if x_TM.dtype == torch.float64 else torch.float32)
    return replace(routing, expert=expert.clamp(0, num_experts - 1), weight=weight, token=token), fault


def _nothing_routed(layer: MoELayer, error: Exception) -> _Routed:
    like = _experts_parameter(layer)
    if like is None:
        like = torch.empty(0)
    routing = Routing(
        expert=torch.empty(0, layer.top_k, dtype=torch.int64, device=like.device),
        weight=like.new_empty(0, layer.top_k),
        l_aux=like.new_zeros(()),
    )
    fault = error.fault if isinstance(error, FaultError) else Fault.OTHER
    x_TM = like.new_empty(0, layer.d_model)
    return _Routed(x=x_TM, x_TM=x_TM, routing=routing, fault=fault, failure=error)


def _check_input(layer: MoELayer, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x ({type(x).__name__}) must be a torch.Tensor of shape (..., {layer.d_model})")
    if x.dim() == 0 or x.shape[-1] != layer.d_model:
        raise FaultError(
            Fault.SHAPE, f"x of shape {tuple(x.shape)} must end in d_model ({layer.d_model}): (..., d_model)"
        )
    like = _experts_parameter(layer)
    if like is not None and x.device != like.device:
        raise FaultError(
            Fault.DEVICE, f"x on {x.device} must be where the layer's parameters are ({like.device})"
        )
    if not x.is_floating_point():
        raise FaultError(Fault.DTYPE, f"x of dtype {x.dtype} must be of a floating-point type")
    if like is not None and _autocast_dtype(x) is None and x.dtype != like.dtype:
        raise FaultError(
            Fault.DTYPE,
            f"x of dtype {x.dtype} must be of the layer's dtype ({like.dtype}), or under autocast",
        )


def _experts_parameter(layer: MoELayer) -> Tensor | None:
    """Says what type and device rows are of. The gate's come second: a router is often left in float32."""
    parameters = itertools.chain(layer.experts.parameters(), layer.gate.parameters())
    found = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
    return None if found is None else local_part(found)


def _check_routing(layer: MoELayer, routing: object, num_tokens: int) -> None:
    if layer.trusts_gate:
        return
    name = type(layer.gate).__name__
    if not isinstance(routing, Routing):
        raise TypeError(f"gate ({name}) must return a pmoe.Routing, not {type(routing).__name__}")
    for field in ("expert", "weight", "l_aux"):
        value = getattr(routing, field)
        if not isinstance(value, Tensor):
            raise TypeError(f"gate ({name}) returned {field} ({value!r}); it must be a tensor")
    shape = tuple(routing.expert.shape)
    rows = num_tokens if routing.token is None and routing.mix is None else shape[:1] and shape[0]
    if len(shape) != 2 or shape[0] != rows or tuple(routing.weight.shape) != shape:
        raise ValueError(
            f"gate ({name}) returned expert of shape {shape} and weight of shape "
            f"{tuple(routing.weight.shape)}; both must be (T, K) with T = {num_tokens}"
        )
    if not routing.weight.is_floating_point():
        raise TypeError(f"gate ({name}) returned weight of dtype {routing.weight.dtype}; it must be floating")
    wanted = {"keep": (shape, torch.bool), "token": (shape[:1], torch.int64)}
    for field, (of_shape, dtype) in wanted.items():
        value = getattr(routing, field)
        if value is not None and (tuple(value.shape) != of_shape or value.dtype != dtype):
            raise ValueError(
                f"gate ({name}) returned {field} of shape {tuple(value.shape)} and dtype {value.dtype}; it "
                f"must be {of_shape} of {dtype}"
            )
    if routing.token is not None and (shape[1] != 1 or routing.keep is not None):
        raise ValueError(
            f"gate ({name}) returned token with {shape[1]} choices a row; there must be 1, and no keep: it "
            "names only rows that it keeps"
        )
    if routing.mix is not None:
        mixed = tuple(tuple(each.shape) for each in (routing.mix.dispatch, routing.mix.combine))
        if mixed != ((num_tokens, shape[0]),) * 2:
            raise ValueError(
                f"gate ({name}) returned mix of shapes {mixed}; both must be (T, S), that is "
                f"({num_tokens}, {shape[0]})"
            )
        if layer.shared_expert is not None:
            raise ValueError(
                f"shared_expert ({layer.shared_expert}) must be None where the gate ({name}) mixes tokens"
            )
    if routing.expert.dtype != torch.int64:
        raise TypeError(
            f"gate ({name}) returned expert of dtype {routing.expert.dtype}; it must be torch.int64"
        )


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of the rows, None where it leaves them alone (as it does float64)."""
    if not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


def _check_host_memory(restore: Restore, like: Tensor | None, device: torch.device | str | None) -> None:
    where = torch.empty(0, device=device).device if like is None else like.device
    if where.type == "meta":
        return  # it is not known yet where the layer will run
    host = pool(where).host
    if not host.free_bytes:
        raise ValueError(
            f"memory_reuse ({restore}) must not offload with no host memory left: {host.free_bytes} of "
            f"{host.limit_bytes} bytes are left"
        )


def _check_fit(num_experts: int, d_hidden: int, grid: Grid, across: str) -> None:
    if num_experts % grid.across.size:
        size = grid.across.size
        advice = "" if num_experts > size else '; split fewer by a mesh with "esp"'
        raise ValueError(
            f"num_experts ({num_experts}) must be divisible by the size of {across} ({size}){advice}"
        )
    if d_hidden % grid.inside.size:
        raise ValueError(
            f'd_hidden ({d_hidden}) must be divisible by the size of the mesh\'s "esp" ({grid.inside.size})'
        )


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"{name} ({size!r}) must be an int")
        if size < 1:
            raise ValueError(f"{name} ({size}) must be at least 1")


def _check_number(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} ({value!r}) must be a number")
