"""The MoE layer as users build it: arguments, checks, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pmoe.arguments import check_count, check_number
from pmoe.comm import Combine, Dispatch, Traffic, make_exchanges
from pmoe.comm.counts import Shared, num_bins
from pmoe.comm.flat import FlatCombine, FlatDispatch
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.comm.sharing import Sharing
from pmoe.engine import padded
from pmoe.engine.callbacks import Callback, Hooks
from pmoe.engine.plan import Gradients, Modules
from pmoe.experts import ModuleExperts, StackedExperts
from pmoe.experts.activations import find_activation
from pmoe.experts.base import Shard
from pmoe.experts.initial import initialise, initialise_modules, reset_modules
from pmoe.gates import Gate, GivenGate, SoftGate
from pmoe.layer.build import (
    check_fit,
    check_host_memory,
    make_experts,
    make_layer_gate,
    make_shared,
)
from pmoe.layer.byte_sizes import parse_bytes
from pmoe.layer.forward import forward
from pmoe.layer.last_call import Counted, CountedAlone, CountedPadded
from pmoe.layer.memory import check_predictable, memory_shape, predict_memory
from pmoe.layer.padded import unfit_to_pad
from pmoe.layer.ran import Ran
from pmoe.layer.rows import experts_parameter
from pmoe.measure.degrees_file import save_degrees
from pmoe.ordering import Order, make_order
from pmoe.planner.chooser import Chooser
from pmoe.planner.degree import DEGREES, check_backward, check_pipeline, fixed_degree
from pmoe.planner.granularity import GranularityTable
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.memory import PredictedMemory
from pmoe.runners.searched import load_table
from pmoe.runners.searched import table as search_table
from pmoe.runners.solved import Solver
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore, parse_restore
from pmoe.schedule.tasks import Stages, local_pieces


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
        ran: how the last forward was computed (`pmoe.layer.ran.Ran`); `pmoe.stats` tells it with all else.
        traffic: bytes this rank has sent to others since the layer was built; what fused kernels write to
            other ranks is not counted, nor what is compared or agreed once.

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
        check_count(d_model=d_model, d_hidden=d_hidden, num_experts=num_experts, top_k=top_k)
        if top_k > num_experts:
            raise ValueError(f"top_k ({top_k}) must be at most num_experts ({num_experts})")
        check_number(capacity_factor=1 if capacity_factor is None else capacity_factor)
        if capacity_factor is not None and not 0 < capacity_factor < float("inf"):
            raise ValueError(f"capacity_factor ({capacity_factor}) must be None or a positive number")
        self.restore = parse_restore(memory_reuse)
        self.memory_budget = None if memory_budget is None else parse_bytes("memory_budget", memory_budget)
        check_number(slack=slack)
        if not 1 <= slack < float("inf"):
            raise ValueError(f"slack ({slack}) must be a number of at least 1")
        check_number(z_loss_weight=z_loss_weight)
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
        flags |= {"bypass_local": bypass_local, "sequential": sequential}
        for name, flag in {**flags, "pad_to_capacity": pad_to_capacity}.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name} ({flag!r}) must be True or False")
        if not isinstance(callbacks, Sequence):
            raise TypeError(f"callbacks ({callbacks!r}) must be a list of pmoe.Callback objects")
        if mesh is not None and group is not None:
            raise ValueError("group and mesh must not be given both: a mesh brings its groups")
        self.grid = Grid.of_group(group) if mesh is None else Grid.of_mesh(mesh)
        self.ranks = self.grid.all
        check_fit(num_experts, d_hidden, self.grid, "group" if mesh is None else 'the mesh\'s "ep"')
        self.d_model, self.d_hidden = d_model, d_hidden
        self.num_experts, self.top_k = num_experts, top_k
        self.send_once = bool(send_once) and top_k > 1
        self.one_lane = one_lane
        self.capacity_factor, self.pipeline, self.slack = capacity_factor, pipeline, slack
        self.pipeline_backward, self.pad_to_capacity = pipeline_backward, pad_to_capacity
        self.check_finite, self.bypass_local, self.sequential = check_finite, bypass_local, sequential
        self.l_aux = None
        self._counted: Counted | None = None
        self._agreed: frozenset[padded.Call] = frozenset()
        self._is_compared = False
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
        self._table: tuple[object, GranularityTable] | None = None
        self._solver: tuple[object, Solver] | None = None
        self.t_gar = 0.0  # seconds of other layers' gradients in backward, for the solver
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.trusts_gate = isinstance(gate, str)  # a gate that the layer made returns what it should
        self.gate = make_layer_gate(self, gate, normalize_gate, z_loss_weight, options)
        if isinstance(self.gate, SoftGate) and shared_expert is not None:
            raise ValueError(f"shared_expert ({shared_expert}) must be None with SoftMoE, which mixes tokens")
        self.experts = make_experts(self, expert, activation, bias, options)
        self.experts.mark_parameters()
        self.shared_expert = make_shared(self, shared_expert, expert, activation, bias, options)
        self.shared_gate: nn.Linear | None = None
        if shared_gate:
            if self.shared_expert is None:
                raise ValueError(f"shared_gate ({shared_gate}) must be False without a shared_expert")
            self.shared_gate = nn.Linear(d_model, 1, bias=False, **options)
        if isinstance(self.restore, Restore) and self.restore.offloads:
            check_host_memory(self.restore, experts_parameter(self), device)
        splits = pipeline_backward is not None and pipeline_backward > (fixed_degree(pipeline) or 1)
        recomputes = self.restore is True or (self.restore and self.restore.hidden == "recompute")
        if self.memory_budget is not None:
            check_predictable(self, "memory_budget", memory_budget)
        why = unfit_to_pad(self) if pad_to_capacity else None
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
        check_fit(self.num_experts, self.d_hidden, grid, 'the mesh\'s "ep"')
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
        self._chooser = self._table = self._solver = self._counted = self.l_aux = self.ran = None
        self._agreed, self._is_compared = frozenset(), False

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the layer's parameters anew, as building it under the same seed does: what a layer from the
        meta device needs after ``to_empty``. Every rank must call it, under one seed.

        Of modules (a gate, experts) every part that has a ``reset_parameters`` is asked for it, each expert's
        under a seed of its own; parameters of other parts stay as they are.
        """
        if isinstance(self.gate, Gate):
            self.gate.reset_parameters()
        else:
            reset_modules(self.gate)
        for experts, first in ((self.experts, self.first_expert), (self.shared_expert, self.num_experts)):
            if isinstance(experts, StackedExperts):
                initialise(experts, first_expert=first)
            elif isinstance(experts, ModuleExperts):
                initialise_modules(experts.local, first_expert=first)
        if self.shared_gate is not None:
            self.shared_gate.reset_parameters()

    @property
    def _is_meta(self) -> bool:
        like = experts_parameter(self)
        return like is not None and like.is_meta

    @property
    def _is_routed(self) -> bool:
        """Whether the routing comes from outside, ready made."""
        return isinstance(self.gate, GivenGate)

    @property
    def row_counts(self) -> Shared | None:
        """Asked anew each time of counts on the device: a CUDA graph that is replayed changes them."""
        counted = self._counted
        if isinstance(counted, CountedAlone):
            return counted.on_host()
        return counted.rows if isinstance(counted, CountedPadded) else counted

    @property
    def tokens_per_expert(self) -> Tensor:
        if isinstance(self._counted, CountedPadded):
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
    def granularity(self) -> GranularityTable:
        """What pipeline=True has learnt, shared by all layers like this one on this group."""
        like = experts_parameter(self)
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
        save_degrees(self.granularity, path, self._granularity_key)

    def load_degrees(self, path: str | Path) -> None:
        """Takes what `save_degrees` wrote: rank 0's file is what all ranks of the group take.

        Every rank must call it. Raises ValueError on every rank where rank 0's file is corrupt or of another
        layer, OSError where it cannot be read.
        """
        load_table(self.ranks, self._granularity_key, path, self.degree_candidates)

    @property
    def _granularity_key(self) -> dict[str, Any]:
        like = experts_parameter(self)
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
    ) -> PredictedMemory:
        """The bytes that one forward and backward take on this rank (`pmoe.planner.memory.PredictedMemory`).

        num_tokens: of this rank; without row_counts the largest of any rank. row_counts: of a batch, as
        ``layer.row_counts`` holds those of the last one; without them the bytes are upper bounds for any
        routing. The other arguments stand for the layer's own; where the layer chooses by itself, they must
        say what is chosen. Rows are taken to be of the parameters' type: autocast is not looked at.

        Raises ValueError where n or the pair is neither the layer's nor given, where the layer's buffers do
        not rotate (memory_reuse=False), and where experts are modules: what they save is theirs to say.
        """
        return predict_memory(
            self,
            num_tokens,
            row_counts,
            pipeline=pipeline,
            pipeline_backward=pipeline_backward,
            memory_reuse=memory_reuse,
        )

    def memory_shape(self, rows_TM: Tensor | None = None) -> LayerSizes:
        """What of this layer its memory depends on. rows_TM: as the experts get them, by default of the type
        of their parameters."""
        return memory_shape(self, rows_TM)

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
        return forward(self, x, token_ids)

    def __getstate__(self) -> dict[str, Any]:
        # The last loss is attached to a graph, which neither copies nor pickles; the rest is found again.
        found_again = dict.fromkeys(("l_aux", "_table", "_chooser", "_solver", "gradients"))
        return {**self.__dict__, **found_again, "_agreed": frozenset(), "_is_compared": False}

    def extra_repr(self) -> str:
        reuse = "" if self.restore is False else f"memory_reuse={self.restore}, "
        reuse += f"fused={self.fused!r}, " if self.fused else ""
        reuse += "pad_to_capacity=True, " if self.pad_to_capacity else ""
        return (
            f"d_model={self.d_model}, d_hidden={self.d_hidden}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, pipeline={self.pipeline}, {reuse}{self.ranks}"
        )
