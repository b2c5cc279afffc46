"""The MoE layer as users build it: arguments, modules, and a call in five lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pmoe.call.decision import LastCall, Ran
from pmoe.call.module_calls import SharedGate, experts_inside, gate_inside
from pmoe.call.modules import Known, Parts
from pmoe.call.options import FusedName, LayerSpec, Switches, option
from pmoe.comm import Combine, Dispatch, ExchangeName, Traffic, make_exchanges
from pmoe.comm.base import FlatAllToAll
from pmoe.comm.counts import RankCounts
from pmoe.comm.ranks import Grid, Ranks
from pmoe.decide import stored_state
from pmoe.decide.begin import begin_call
from pmoe.decide.experts_call import ExpertsCall, shaped_output
from pmoe.decide.sources import counts_source
from pmoe.experts import ActivationName, ExpertName
from pmoe.experts.base import Experts, Shard
from pmoe.gates import GateName
from pmoe.layer import construct
from pmoe.ordering import Order, OrderName, make_order
from pmoe.planner.degree import SolveName
from pmoe.schedule.restore import Restore, StrategyName

if TYPE_CHECKING:
    from pmoe.engine.plan.callbacks import Callback
    from pmoe.planner.memory import PredictedMemory


F = TypeVar("F", bound=Callable[..., Any])

NO_GRAPH = (
    "a MoELayer decides a call on the host, so torch.compile breaks the graph around it: leave "
    'fullgraph=True out, or take backend="pmoe", which holds the layer in its graph'
)


def _breaks_graphs(forward: F) -> F:
    """As torch.compiler.disable with a reason, but without importing the compiler before a first call."""
    found: Any = torch._disable_dynamo(forward)  # type: ignore[attr-defined]
    found._torchdynamo_disable, found._torchdynamo_disable_msg = True, NO_GRAPH
    return cast(F, found)


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer: its experts are spread over ranks, its tokens travel in micro-batches.

    Each token goes to the top_k experts that its gate picks and gets the sum of their outputs, each times its
    routing weight. Rank r of W holds experts [r * E / W, (r + 1) * E / W); rows travel by all-to-all, hidden
    behind the experts' computation (MPipeMoE, section III.B). docs/choosing.md says when to use which.

    Args:
        d_model: M, columns of input and output.
        d_hidden: H, width of an expert.
        num_experts: E, over all ranks; a multiple of their number.
        top_k: K, experts a token.
        device, dtype: of the parameters.

        expert: "ffn", "swiglu", a callable that builds one module from (N, M) to (N, M), a ModuleList of this
            rank's experts, or a `pmoe.experts.Experts`.
        activation: of "ffn": "relu", "gelu" (exact) or "silu".
        bias: whether "ffn" and "swiglu" have b1 and b2.
        shared_expert: a dense expert for every token: its width, or a module from (T, M) to (T, M).
        shared_gate: scales the shared expert's output by sigmoid(shared_gate(x)).

        gate: a name of `pmoe.gates.GATES`, or a module that maps (T, M) to a `pmoe.Routing`.
        normalize_gate: whether "topk" scales a token's weights to sum 1; None is its default.
        z_loss_weight: adds this much of the router z-loss to l_aux.
        capacity_factor: each rank keeps its first ceil(factor * T * K / E) rows for each expert; None all.
        pad_to_capacity: sends every expert as many rows as its capacity: the host then waits for nothing.
        check_finite: raises on every rank where any rank's gate logits hold NaN or infinity; False lets them
            pass, None checks where row counts come to the host anyway, so that nothing waits for it.

        pipeline: n, the number of micro-batches; False is 1. True finds n by trials (MPipeMoE, Algorithm 1),
            "solve" from measured costs (FSMoE, Algorithm 1).
        pipeline_backward: n of the backward pass, a divisor or a multiple of pipeline; None is the same.
        fused: COMET's fused kernels: True in both passes, "forward", or "auto" where measured to be faster;
            "persistent": FlashDMoE's, one a pass.

        memory_reuse: what becomes of T_DI and T_M between the passes: False gives each chunk memory of its
            own, "S1" to "S4" or a `pmoe.Restore` reuse it in rings, True takes the cheapest pair by Eq. 10.
        memory_budget: bytes, or a string such as "2GiB", that hold for any routing; n and the pair, where
            True, are chosen for it.
        slack: slot_rows = ceil(slack * T * K / n); routing that is more skewed is cut into more chunks.

        group: the process group; None is the default group, `Ranks.single()` one rank.
        mesh: instead of group, a device mesh of "ep" and "esp"; experts' hidden columns are split over "esp".
        dispatch: "flat", "hierarchical_1d", "hierarchical_2d", "auto" by the profile, or a `pmoe.Dispatch`.
        combine: the same of the way back, or a `pmoe.Combine`; None is as dispatch.
        nodes: for hierarchical ones, ranks a node or the node of each rank; None asks LOCAL_WORLD_SIZE.
        send_once: with top_k > 1 a token goes once to a rank that holds several of its experts.
        order: "sorted", "einsum" (GShard's, a slow reference), or a `pmoe.Order`.
        callbacks: `pmoe.Callback` objects, which may replace rows at six points.

    Options (all but objects, device and dtype) may be set on a built layer; all ranks must set the same.
    `switches` (`pmoe.call.options.Switches`) turns off parts of a layer, to measure what they are worth.
    `l_aux`, `tokens_per_expert`, `row_counts`, `ran` and `traffic` (bytes sent) tell of the last call.

    Parameters: ``gate.weight`` (E, M); ``experts.w1`` (E / W, H, M), or (E / W, 2H, M) for "swiglu", gate
    rows first; ``experts.w2`` (E / W, M, H); ``experts.b1``, ``experts.b2``. Experts' carry ``allreduce =
    False``: their gradients are sums over all ranks' tokens. With one seed the ranks hold together the values
    that one rank alone would hold.

    Raises ValueError or TypeError, naming argument, value and rule, when built or when an option is set.
    """

    traffic: Traffic
    order: Order
    dispatch: Dispatch
    combine: Combine
    scalars: FlatAllToAll
    callbacks: tuple[Callback, ...]
    callback_modules: nn.ModuleList
    trusts_gate: bool
    gate: nn.Module
    experts: Experts
    shared_gate: nn.Linear | None
    grid: Grid
    known: Known

    d_model: int = option("d_model")
    d_hidden: int = option("d_hidden")
    num_experts: int = option("num_experts")
    top_k: int = option("top_k")
    capacity_factor: float | None = option("capacity_factor")
    pad_to_capacity: bool = option("pad_to_capacity")
    pipeline: bool | int | SolveName = option("pipeline")
    memory_reuse: bool | StrategyName | Restore = option("memory_reuse")
    pipeline_backward: int | None = option("pipeline_backward")
    slack: float = option("slack")
    memory_budget: int | str | None = option("memory_budget")
    fused: bool | FusedName = option("fused")
    send_once: bool = option("send_once")
    check_finite: bool | None = option("check_finite")
    switches: Switches = option("switches")

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
        gate: GateName | nn.Module = "topk",
        expert: ExpertName | nn.Module | Callable[..., nn.Module] = "ffn",
        activation: ActivationName = "gelu",
        bias: bool = True,
        capacity_factor: float | None = None,
        pad_to_capacity: bool = False,
        pipeline: bool | int | SolveName = False,
        memory_reuse: bool | StrategyName | Restore = False,
        pipeline_backward: int | None = None,
        slack: float = 1.25,
        memory_budget: int | str | None = None,
        group: dist.ProcessGroup | Ranks | None = None,
        mesh: DeviceMesh | None = None,
        fused: bool | FusedName = False,
        order: OrderName | Order = "sorted",
        dispatch: ExchangeName | Literal["auto"] | Dispatch = "flat",
        combine: ExchangeName | Combine | None = None,
        nodes: int | Sequence[int] | None = None,
        send_once: bool = False,
        shared_expert: int | nn.Module | None = None,
        shared_gate: bool = False,
        callbacks: Sequence[Callback] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        normalize_gate: bool | None = None,
        z_loss_weight: float = 0.0,
        check_finite: bool | None = None,
    ) -> None:
        given, names = dict(locals()), LayerSpec.__dataclass_fields__
        super().__init__()
        self.spec = LayerSpec(**{name: given[name] for name in names if name in given})
        construct.check_arguments(callbacks, device, dtype, activation, shared_gate, z_loss_weight)
        self.grid = construct.make_grid(group, mesh, device)
        construct.check_fit(num_experts, d_hidden, self.grid, "group" if mesh is None else 'the mesh\'s "ep"')
        self.last, self.known, self.traffic = LastCall(), Known(), Traffic()
        self.gradients: Any = None  # set by `pmoe.GradientReducer`
        self.order = make_order(order)
        if isinstance(dispatch, str) and dispatch == "auto":
            from pmoe.choose.dispatch import fastest_dispatch

            dispatch = fastest_dispatch(self.spec, self.grid, nodes, device, dtype)
        self.dispatch, self.combine = make_exchanges(dispatch, combine, nodes)
        self.scalars = FlatAllToAll()
        self._bind_to_ranks()
        self.callbacks = tuple(callbacks)
        self.callback_modules = nn.ModuleList(each for each in callbacks if isinstance(each, nn.Module))
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = construct.make_layer_gate(self.spec, gate, normalize_gate, z_loss_weight, options)
        # A gate that the layer made returns what it should. In a tuple, or it would be a second module.
        self._trusted_gates = (self.gate,) if isinstance(gate, str) else ()
        self.experts = construct.make_experts(self, expert, activation, bias, options)
        self.experts.mark_parameters()
        self.experts.note_operands()
        self.shared_expert: Experts | None = None
        if shared_expert is not None:
            from pmoe.experts.modules import shared_experts

            kind = expert if isinstance(expert, str) else "ffn"
            self.shared_expert = shared_experts(
                shared_expert, kind, self.d_model, activation, bias, self.num_experts, options
            )
        if self.shared_expert is not None:
            self.shared_expert.note_operands()
        self.shared_gate = SharedGate(d_model, 1, bias=False, **options) if shared_gate else None
        construct.check_together(self.parts, shared_expert)
        if self.ranks.size > 1:
            from pmoe.experts.wrapper_checks import sampled

            self.experts.built = sampled(self.experts)

    @property
    def parts(self) -> Parts:
        """The layer's modules with what follows from them and its options, kept until one changes."""
        parts, modules = self._parts, self._modules
        # Tools put modules into _modules behind __setattr__'s back.
        if (
            parts is None
            or parts.experts_module is not modules.get("experts")
            or parts.gate is not modules.get("gate")
            or parts.shared_module is not modules.get("shared_expert")
            or parts.shared_gate is not modules.get("shared_gate")
        ):
            parts = self._parts = self._make_parts()
        return parts

    def _make_parts(self) -> Parts:
        shared_expert = None
        if self.shared_expert is not None:
            shared_expert = experts_inside("shared_expert", self.shared_expert)
        experts = experts_inside("experts", self.experts)
        stored_state.watch(experts, self.grid, self.num_experts)
        return Parts(
            grid=self.grid,
            experts=experts,
            shared_expert=shared_expert,
            order=self.order,
            dispatch=self.dispatch,
            combine=self.combine,
            scalars=self.scalars,
            callbacks=self.callbacks,
            gradients=self.gradients,
            traffic=self.traffic,
            spec=self.spec,
            gate=self.gate,
            router=gate_inside(self.gate),
            trusts_gate=any(self.gate is gate for gate in self._trusted_gates),
            experts_module=self.experts,
            shared_module=self.shared_expert,
            shared_gate=self.shared_gate,
            callback_modules=self.callback_modules,
            known=self.known,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LayerSpec.__dataclass_fields__ or name in Switches.__dataclass_fields__:
            construct.set_option(self, name, value)
            return
        super().__setattr__(name, value)
        if name in Parts.__dataclass_fields__:
            self.__dict__["_parts"] = None

    @property
    def ranks(self) -> Ranks:
        """Who share the experts."""
        return self.grid.all

    @property
    def num_local_experts(self) -> int:
        """Experts on this rank."""
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
        for exchange in (self.dispatch, self.combine, self.scalars):
            exchange.bind(self.grid.across, self.traffic)

    # Here, not further in: or this method would be a frame of its own, with a graph break of its own.
    @_breaks_graphs
    def forward(self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Maps x (..., d_model) to the same shape, in x's dtype (autocast's under autocast).

        token_ids: (...) int64, for gates that route by them (`pmoe.Gate.needs_token_ids`).
        mask: (...) bool, True where x has a token and False in padding (integers: not 0). Padding is not
            routed: it takes no capacity, counts in no loss or statistic, and its output is zero. The rest is
            ``layer(x[mask])``, in its places; callbacks see those N rows, (N, d_model).

        Ranks may hold different numbers of tokens, none included. Raises ValueError on every rank, before
        any row travels, where any rank's input has another last dimension, dtype or device than the layer,
        or its gate failed; RuntimeError naming stage and rank where a peer is missing. While a CUDA graph is
        captured, RuntimeError before anything is launched where the graph could not hold the call.

        Under activation checkpointing `pmoe.checkpoint_contexts` keeps the routing. Without it, a second pass
        that routes any rank's tokens otherwise than the first raises ValueError on every rank.
        """
        if type(x) is not Tensor or x.is_meta or torch._C._len_torch_dispatch_stack():
            from pmoe.layer.calls_with_any import call_with_any

            return call_with_any(self, x, token_ids, mask)
        return self._forward_plain(x, token_ids, mask)

    def _forward_plain(
        self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """`forward` of a plain tensor with values; other kinds are refused."""
        call = begin_call(self, self.parts, x, token_ids, mask)
        decision, y_TM = ExpertsCall(counts_source(call))()
        self.last = LastCall.of(decision)
        return shaped_output(decision, y_TM)

    if TYPE_CHECKING:  # of torch's __call__ type checkers know nothing: this is forward's signature again

        def __call__(
            self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
        ) -> Tensor: ...

    @property
    def l_aux(self) -> Tensor:
        """Scalar, the auxiliary loss of the last call, on its graph. None may be set to let it go.

        Until then, or the next call, that graph lives on, and with it what layers before this one keep for a
        backward pass that never came. Before the first call, and where it was let go, it is a zero of no
        graph, on the parameters' device.
        """
        return self.parts.no_loss() if self.last.l_aux is None else self.last.l_aux

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
        """Raises ValueError or TypeError where the layer cannot be spread so. Changes nothing."""
        from pmoe.layer import reshard

        reshard.check_spread(self.parts, mesh)

    def spread(self, mesh: DeviceMesh) -> None:
        """Spreads a layer that every rank built alone, with all experts, over ``mesh``: what `MoELayer` takes
        as mesh. This rank keeps its own experts as new Parameters, so optimizers come after. On the meta
        device the layer may be of any ranks: there are no values to lose.

        Every rank must call it. Raises, before anything is changed, what `check_spread` raises.
        """
        self.check_spread(mesh)
        self.grid = construct.make_grid(None, mesh)
        self._bind_to_ranks()
        self.parts.experts.keep(
            slice(self.first_expert, self.first_expert + self.num_local_experts), self.shard
        )
        self.last, self.known = LastCall(), Known()
        self.experts.was_loaded = False  # by one rank, which had all
        stored_state.watch(self.experts, self.grid, self.num_experts)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the layer's parameters as building it under the same seed does.

        A layer from the meta device needs it after ``to_empty``. Every rank must call it, under one seed. Of
        modules (a gate, experts) every part that has a ``reset_parameters`` is asked for it, each expert's
        under a seed of its own; parameters of other parts stay as they are.
        """
        from pmoe.layer import reshard

        reshard.reset_parameters(self.parts)

    def save_degrees(self, path: str | Path) -> None:
        """Writes what pipeline=True has learnt for layers like this one to a JSON file."""
        from pmoe.choose import search as searched

        key = searched.key_of(self.parts)
        searched.save_degrees(searched.held(self.parts.ranks, key).tables, path, key)

    def load_degrees(self, path: str | Path) -> None:
        """Takes what `save_degrees` wrote: rank 0's file is what all ranks of the group take.

        Every rank must call it. Raises ValueError on every rank where rank 0's file is corrupt or of another
        layer, OSError where it cannot be read.
        """
        from pmoe.choose import search as searched

        searched.learnt_of(self.parts, "" if path is None else path)

    def predict_memory(
        self,
        num_tokens: int,
        row_counts: RankCounts | None = None,
        *,
        pipeline: int | None = None,
        pipeline_backward: int | None = None,
        memory_reuse: StrategyName | Restore | None = None,
    ) -> PredictedMemory:
        """The bytes that one forward and backward take on this rank (`pmoe.planner.memory.PredictedMemory`).

        num_tokens: of this rank; without row_counts the largest of any rank. row_counts: of a batch, as
        ``layer.row_counts`` holds those of the last one; without them the bytes are upper bounds for any
        routing. The other arguments stand for the layer's own. Where the layer chooses n or the pair at a
        call, and they are not given, the answer is of the choice with the largest peak, and its
        ``candidates`` are those of all choices; under a memory budget, of those that hold it for any routing.
        Its ``unknown`` says what is a user's own and not counted.
        Rows are taken to be of the parameters' type: autocast is not looked at.

        Raises ValueError for a number of tokens or n that is none, row_counts whose bins n does not divide,
        where no choice holds the budget, with the least that would do, and where kernels are fused.
        """
        from pmoe.layer import predict_memory

        return predict_memory.predict_memory(
            self.parts, num_tokens, row_counts, pipeline, pipeline_backward, memory_reuse
        )

    def __getstate__(self) -> dict[str, Any]:
        # The last loss is attached to a graph, which neither copies nor pickles; what was agreed is not kept.
        last = replace(self.last, l_aux=None)
        return {**self.__dict__, "last": last, "gradients": None, "known": Known(), "_parts": None}

    def extra_repr(self) -> str:
        reuse = "" if self.restore is False else f"memory_reuse={self.restore}, "
        reuse += f"fused={self.fused!r}, " if self.fused else ""
        reuse += "pad_to_capacity=True, " if self.pad_to_capacity else ""
        return (
            f"d_model={self.d_model}, d_hidden={self.d_hidden}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, pipeline={self.pipeline}, {reuse}{self.ranks}"
        )
