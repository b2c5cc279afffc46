"""The MoE layer as users build it: arguments, modules, and a call in five lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pmoe.comm import Combine, Dispatch, Traffic, make_exchanges
from pmoe.comm.counts import RankCounts
from pmoe.comm.flat import FlatDispatch
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.comm.sharing import Sharing
from pmoe.engine.callbacks import Callback
from pmoe.engine.plan import Gradients
from pmoe.experts.base import Shard
from pmoe.layer import build
from pmoe.layer.call import Call
from pmoe.layer.decision import Decision, decide, run
from pmoe.layer.last import LastCall
from pmoe.layer.parts import Known, Parts
from pmoe.layer.ran import Ran
from pmoe.layer.spec import LayerSpec, Option
from pmoe.layer.switches import Switches
from pmoe.ordering import Order, make_order
from pmoe.schedule.restore import Restore

if TYPE_CHECKING:
    from pmoe.planner.footprint import Memory, Shape


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

    d_model = Option[int]()
    d_hidden = Option[int]()
    num_experts = Option[int]()
    top_k = Option[int]()
    capacity_factor = Option["float | None"]()
    pad_to_capacity = Option[bool]()
    pipeline = Option["bool | int | str"]()
    memory_reuse = Option["bool | str | Restore"]()
    pipeline_backward = Option["int | None"]()
    slack = Option[float]()
    memory_budget = Option["int | str | None"]()
    fused = Option["bool | str"]()
    send_once = Option[bool]()
    check_finite = Option[bool]()
    switches = Option[Switches]()

    spec: LayerSpec
    last: LastCall
    """What the last call left."""
    _parts: Parts | None

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
        self.spec = LayerSpec(
            d_model=d_model,
            d_hidden=d_hidden,
            num_experts=num_experts,
            top_k=top_k,
            capacity_factor=capacity_factor,
            pad_to_capacity=pad_to_capacity,
            pipeline=pipeline,
            memory_reuse=memory_reuse,
            pipeline_backward=pipeline_backward,
            slack=slack,
            memory_budget=memory_budget,
            fused=fused,
            send_once=send_once,
            check_finite=check_finite,
            switches=Switches(bypass_local=bypass_local, sequential=sequential, one_lane=one_lane),
        )
        build.check_arguments(
            mesh=mesh, group=group, callbacks=callbacks, dtype=dtype, activation=activation,
            shared_gate=shared_gate, z_loss_weight=z_loss_weight,
        )  # fmt: skip
        self.grid = Grid.of_group(group) if mesh is None else Grid.of_mesh(mesh)
        build.check_fit(num_experts, d_hidden, self.grid, "group" if mesh is None else 'the mesh\'s "ep"')
        self.last, self.known, self.traffic = LastCall(), Known(), Traffic()
        self.gradients: Gradients | None = None  # set by `pmoe.GradientReducer`
        self.order = make_order(order)
        self.dispatch, self.combine = make_exchanges(dispatch, combine, nodes)
        self.scalars = FlatDispatch()
        self._bind_to_ranks()
        self.callbacks = tuple(callbacks)
        self.callback_modules = nn.ModuleList(each for each in callbacks if isinstance(each, nn.Module))
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.trusts_gate = isinstance(gate, str)  # a gate that the layer made returns what it should
        self.gate = build.make_layer_gate(self.spec, gate, normalize_gate, z_loss_weight, options)
        place = build.Place(self.first_expert, self.num_local_experts, self.shard)
        self.experts = build.make_experts(self.spec, place, expert, activation, bias, options)
        self.experts.mark_parameters()
        self.shared_expert = build.make_shared(self.spec, shared_expert, expert, activation, bias, options)
        self.shared_gate = nn.Linear(d_model, 1, bias=False, **options) if shared_gate else None
        build.check_together(self.parts, device)

    @property
    def parts(self) -> Parts:
        """The layer's modules with what follows from them and its options, kept until one changes."""
        if self._parts is None:
            self._parts = Parts(**{name: getattr(self, name) for name in PARTS})
        return self._parts

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in PARTS:
            self.__dict__["_parts"] = None

    @property
    def ranks(self) -> Ranks:
        """Who share the experts."""
        return self.grid.all

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.grid.across.size

    @property
    def first_expert(self) -> int:
        """The first of this rank's experts among all."""
        return self.grid.across.rank * self.num_local_experts

    @property
    def shard(self) -> Shard:
        """This rank's part of every expert's hidden columns."""
        return Shard(self.grid.inside.rank, self.grid.inside.size)

    def _bind_to_ranks(self) -> None:
        self.sharing = Sharing(self.grid.inside, self.traffic)
        for exchange in (self.dispatch, self.combine, self.scalars):
            exchange.bind(self.grid.across, self.traffic)

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
        call = Call.begin(self, self.parts, x, token_ids)
        decision = decide(call)
        y_TM = run(decision)
        self.last = LastCall.of(decision)
        return finished(decision, y_TM)

    @property
    def l_aux(self) -> Tensor | None:
        """Scalar, the auxiliary loss of the last call, on its graph; None may be set to let it go."""
        return self.last.l_aux

    @l_aux.setter
    def l_aux(self, value: Tensor | None) -> None:
        self.last = replace(self.last, l_aux=value)

    @property
    def ran(self) -> Ran | None:
        """How the last call was computed."""
        return self.last.ran

    @property
    def max_tokens(self) -> int:
        """The largest number of any rank's tokens in the last call."""
        return 0 if self.last.counts is None else self.last.counts.max_tokens

    @property
    def row_counts(self) -> RankCounts | None:
        """Row counts of the last call, on the host, for `predict_memory`. Reading them may synchronize."""
        return None if self.last.counts is None else self.last.counts.rows()

    @property
    def tokens_per_expert(self) -> Tensor:
        """(E,) int64 on the CPU: kept rows of this rank for each expert in the last call."""
        if self.last.counts is None:
            return torch.zeros(self.num_experts, dtype=torch.int64, device="cpu")
        return self.last.counts.kept_E()

    @property
    def restore(self) -> Restore | bool:
        """The restore pair; False where buffers do not rotate for one, True where the layer chooses it."""
        return self.spec.restore

    def check_spread(self, mesh: DeviceMesh) -> None:
        """Raises ValueError or TypeError, naming what is wrong, where `spread` would. Changes nothing."""
        build.check_spread(self.parts, mesh)

    def spread(self, mesh: DeviceMesh) -> None:
        """Spreads a layer that every rank built alone, with all experts, over ``mesh``: what `MoELayer` takes
        as mesh. This rank keeps its own experts as new Parameters, so optimizers come after. On the meta
        device the layer may be of any ranks: there are no values to lose.

        Every rank must call it. Raises ValueError or TypeError, before anything is changed, where the layer
        cannot be spread so.
        """
        self.check_spread(mesh)
        self.grid = Grid.of_mesh(mesh)
        self._bind_to_ranks()
        self.experts.keep(slice(self.first_expert, self.first_expert + self.num_local_experts), self.shard)
        self.last, self.known = LastCall(), Known()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the layer's parameters as building it under the same seed does.

        A layer from the meta device needs it after ``to_empty``. Every rank must call it, under one seed. Of
        modules (a gate, experts) every part that has a ``reset_parameters`` is asked for it, each expert's
        under a seed of its own; parameters of other parts stay as they are.
        """
        build.reset_parameters(self.parts)

    def save_degrees(self, path: str | Path) -> None:
        """Writes what pipeline=True has learnt for layers like this one to a JSON file."""
        from pmoe.layer import searched

        searched.save(self.parts, path)

    def load_degrees(self, path: str | Path) -> None:
        """Takes what `save_degrees` wrote: rank 0's file is what all ranks of the group take.

        Every rank must call it. Raises ValueError on every rank where rank 0's file is corrupt or of another
        layer, OSError where it cannot be read.
        """
        from pmoe.layer import searched

        searched.load(self.parts, path)

    def predict_memory(
        self,
        num_tokens: int,
        row_counts: RankCounts | None = None,
        *,
        pipeline: int | None = None,
        pipeline_backward: int | None = None,
        memory_reuse: str | Restore | None = None,
    ) -> Memory:
        """The bytes that one forward and backward take on this rank (`pmoe.planner.footprint.Memory`).

        num_tokens: of this rank; without row_counts the largest of any rank. row_counts: of a batch, as
        ``layer.row_counts`` holds those of the last one; without them the bytes are upper bounds for any
        routing. The other arguments stand for the layer's own; where the layer chooses by itself, they must
        say what is chosen. Rows are taken to be of the parameters' type: autocast is not looked at.

        Raises ValueError where n or the pair is neither the layer's nor given, where the layer's buffers do
        not rotate (memory_reuse=False), and where experts are modules: what they save is theirs to say.
        """
        from pmoe.layer import memory

        return memory.predict_memory(
            self.parts,
            num_tokens,
            row_counts,
            pipeline=pipeline,
            pipeline_backward=pipeline_backward,
            memory_reuse=memory_reuse,
        )

    def memory_shape(self, rows_TM: Tensor | None = None) -> Shape:
        """What of this layer its memory depends on. rows_TM: as the experts get them, by default of the type
        of their parameters."""
        from pmoe.layer import memory

        return memory.memory_shape(self.parts, rows_TM)

    def __getstate__(self) -> dict[str, Any]:
        # The last loss is attached to a graph, which neither copies nor pickles; what was agreed is not kept.
        return {
            **self.__dict__,
            "last": replace(self.last, l_aux=None),
            "gradients": None,
            "known": Known(),
            "_parts": None,
        }

    def extra_repr(self) -> str:
        reuse = "" if self.restore is False else f"memory_reuse={self.restore}, "
        reuse += f"fused={self.fused!r}, " if self.fused else ""
        reuse += "pad_to_capacity=True, " if self.pad_to_capacity else ""
        return (
            f"d_model={self.d_model}, d_hidden={self.d_hidden}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, pipeline={self.pipeline}, {reuse}{self.ranks}"
        )


PARTS = (
    "spec",
    "grid",
    "gate",
    "trusts_gate",
    "experts",
    "shared_expert",
    "shared_gate",
    "order",
    "dispatch",
) + ("combine", "scalars", "sharing", "callbacks", "gradients", "traffic", "known")
"""What `Parts` has of the layer."""


def finished(decision: Decision, y_TM: Tensor) -> Tensor:
    """The layer's output in its input's shape, behind the callbacks' last hooks.

    y_TM itself where it has that shape: FSDP2 warns of a module that returns a view, for an operation in
    place would drop its backward hook.
    """
    x = decision.routed.x
    y = y_TM if y_TM.shape == x.shape else y_TM.view(x.shape)
    for callback in decision.call.parts.callbacks:
        y = callback.before_moe_end(y)
    return y
