"""`MoELayer`, the MoE layer that users build: its arguments, attributes and methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack as in_transform
from torch.distributed.device_mesh import DeviceMesh

from pmoe.call.call import Call, CalledLayer
from pmoe.call.decision import LastCall, RunReport
from pmoe.call.module_calls import SharedGate, experts_inside, gate_inside, traced_as
from pmoe.call.modules import LayerCache, LayerModules
from pmoe.call.options import FusedName, LayerOptions, Switches, option
from pmoe.comm import Combine, Dispatch, ExchangeName, Traffic, make_exchanges
from pmoe.comm.base import FlatAllToAll
from pmoe.comm.counts import RankCounts
from pmoe.comm.grid import Grid
from pmoe.comm.ranks import Ranks
from pmoe.decide import stored_state
from pmoe.decide.begin import begin_call
from pmoe.decide.experts_call import ExpertsCall, shaped_output
from pmoe.decide.sources import counts_source
from pmoe.experts import ActivationName, ExpertName
from pmoe.experts.base import Experts, Shard
from pmoe.gates import GateName
from pmoe.kernels.scaled_products.formats import ProductsName
from pmoe.layer import construct
from pmoe.layer.old_attributes import OldAttributes, with_new_names
from pmoe.ordering import Order, OrderName, make_order
from pmoe.planner.degree import SolveName
from pmoe.schedule.restore import AllowName, Restore, StrategyName
from pmoe.schedule.wire import WireName

if TYPE_CHECKING:
    from pmoe.call.latent import LatentProjections
    from pmoe.engine.plan.callbacks import Callback
    from pmoe.planner.memory import PredictedMemory


def _traced(*args: Any, **kwargs: Any) -> Tensor:
    """The stand-in for `MoELayer.forward` under torch.compile: a single operator in the traced graph."""
    from pmoe.graph.one_operator import forward_in_graph

    return forward_in_graph(*args, **kwargs)


class MoELayer(OldAttributes, CalledLayer):
    """A Mixture-of-Experts layer: experts are spread over ranks, tokens are sent to them in micro-batches.

    The gate sends each token to top_k experts. The token's output is the sum of these experts' outputs, each
    times its routing weight. With W ranks, rank r holds the experts r * E / W to (r + 1) * E / W - 1. While
    the rows (copies of tokens) of one micro-batch are sent, experts compute the rows of another.

    Args:
        d_model: M, the columns of input and output.
        d_hidden: H, the width of an expert.
        d_latent: columns to which tokens are projected before they are sent; None sends all d_model columns.
        num_experts: E, the number of experts of all ranks together; a multiple of the number of ranks.
        top_k: K, the number of experts of each token.
        device, dtype: those of the parameters.
        expert: "ffn", "swiglu", a callable that builds one expert, a ModuleList of this rank's experts, or a
            `pmoe.experts.Experts`. An expert that is a user's module maps N rows, (N, M), to (N, M).
        activation: the nonlinearity of "ffn": "relu", "gelu" (exact) or "silu".
        bias: whether "ffn" and "swiglu" experts have b1 and b2.
        shared_expert: an expert for all T tokens: its width, or a module that maps (T, M) to (T, M).
        shared_gate: whether sigmoid(shared_gate(x)) scales the output of the shared expert.

        gate: a name in `pmoe.gates.GATES`, or a module that maps (T, M) to a `pmoe.Routing`.
        normalize_gate: whether a token's weights are divided by their sum; None is the gate's default.
        z_loss_weight: the factor of the router z-loss in l_aux.
        capacity_factor: a rank keeps its first ceil(factor * T * K / E) rows for an expert; None keeps all.
        pad_to_capacity: pads each expert's rows to that number, so the host need not wait for row counts.
        check_finite: whether logits that are not finite raise on all ranks; None is `not pad_to_capacity`.

        pipeline: n, the number of micro-batches, at most 1024; False is 1. True finds n by trials (MPipeMoE,
            Algorithm 1); "solve" computes it from measured costs (FSMoE, Algorithm 1).
        pipeline_backward: n of backward; None is forward's n. The least common multiple of both is <= 256.
        fused: True computes both passes by COMET's fused kernels, "forward" only forward, "auto" both if that
            was measured to be faster. "persistent" computes each pass by one kernel of FlashDMoE.
        balance: the most copies of other ranks' busy experts on a rank; True makes copies only if they pay.
        memory_reuse: False keeps received rows (T_DI) and hidden activations (T_M) for backward. "S1" to "S4"
            or a `pmoe.Restore` free and restore them; True takes the cheapest of S1 to S4 (MPipeMoE, Eq. 10).
        allow: "e4m3" lets memory_reuse=True also keep the messages that T_DI came in, or T_M rounded to e4m3.
        memory_budget: a limit in bytes, or a text such as "2GiB"; options that are True stay within it.
        slack: micro-batches share buffers of ceil(slack * T * K / n) rows; n grows under skewed routing.
        group: the process group; None is the default group, and `Ranks.single()` one rank.
        mesh: in place of group, a device mesh: "ep" spreads experts, "esp" splits each one's hidden columns.
        dispatch: the all-to-all to experts: "flat", "hierarchical_1d", "hierarchical_2d", "auto" (which takes
            the fastest of them), or a `pmoe.Dispatch`.
        combine: the all-to-all of the results: one of these names or a `pmoe.Combine`; None is as dispatch.
        nodes: the number of ranks on a node, or a list with each rank's node; None reads $LOCAL_WORLD_SIZE.
        send_once: sends a token only once to a rank that holds several of its top_k experts.
        wire, wire_backward, wire_combine: "e4m3" or "bfloat16", the format of sent rows, gradients, results.
        products: "e4m3" or "mxfp8", to which operands of products are rounded, except for weight gradients.
        order: how tokens become rows: "sorted", "einsum" (GShard's, a slow reference), or a `pmoe.Order`.
        callbacks: `pmoe.Callback` objects, which may replace rows at six points of a call.

    Options such as ``layer.pipeline`` may be set on a built layer, the same on all ranks; the sizes d_model
    to top_k may not. `switches` (`pmoe.call.options.Switches`) turns steps off, or runs programs. `l_aux`,
    `ran`, `tokens_per_expert` and `row_counts` describe the last call, `traffic` counts bytes of all calls.

    ``gate.weight`` is (E, M); ``experts.w1`` (E / W, H, M), or for "swiglu" (E / W, 2H, M): gate, then up;
    ``experts.w2`` (E / W, M, H). Expert parameters have ``allreduce = False``: their gradients are sums over
    all ranks' tokens already. Under one seed, an expert has the same initial values on any number of ranks.

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
    latent: LatentProjections | None
    grid: Grid
    cache: LayerCache
    nodes: int | Sequence[int] | None = None  # the default is for layers that an older pmoe has pickled

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
    wire: WireName | None = option("wire")
    wire_backward: WireName | None = option("wire_backward")
    wire_combine: WireName | None = option("wire_combine")
    check_finite: bool | None = option("check_finite")
    balance: bool | int = option("balance")
    d_latent: int | None = option("d_latent")
    allow: AllowName | None = option("allow")
    products: ProductsName | None = option("products")
    switches: Switches = option("switches")

    options: LayerOptions
    last: LastCall
    """The record of the last call: the auxiliary loss, the row counts, and the `RunReport`."""
    _layer_modules: LayerModules | None

    @construct.publishing
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
        wire: WireName | None = None,
        wire_backward: WireName | None = None,
        wire_combine: WireName | None = None,
        shared_expert: int | nn.Module | None = None,
        shared_gate: bool = False,
        callbacks: Sequence[Callback] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        normalize_gate: bool | None = None,
        z_loss_weight: float = 0.0,
        check_finite: bool | None = None,
        balance: bool | int = False,
        d_latent: int | None = None,
        allow: AllowName | None = None,
        products: ProductsName | None = None,
    ) -> None:
        super().__init__()
        self.options = LayerOptions(
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
            wire=wire,
            wire_backward=wire_backward,
            wire_combine=wire_combine,
            check_finite=check_finite,
            balance=balance,
            d_latent=d_latent,
            allow=allow,
            products=products,
        )
        construct.check_arguments(callbacks, device, dtype, activation, shared_gate, z_loss_weight)
        self.grid = construct.make_grid(group, mesh, device)
        construct.check_fit(num_experts, d_hidden, self.grid, "group" if mesh is None else 'the mesh\'s "ep"')
        self.last = LastCall()
        self.cache = LayerCache()
        self.traffic = Traffic()
        self.gradients: Any = None  # set by `pmoe.GradientReducer`
        self.order = make_order(order)
        if isinstance(dispatch, str) and dispatch == "auto":
            from pmoe.choose.dispatch import fastest_dispatch

            dispatch = fastest_dispatch(self.options, self.grid, nodes, device, dtype)
        self.nodes = nodes
        self.dispatch, self.combine = make_exchanges(dispatch, combine, nodes)
        self.scalars = FlatAllToAll()
        self._bind_to_ranks()
        self.callbacks = tuple(callbacks)
        self.callback_modules = nn.ModuleList(
            callback for callback in callbacks if isinstance(callback, nn.Module)
        )
        factory_options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = construct.make_layer_gate(
            self.options, gate, normalize_gate, z_loss_weight, factory_options
        )
        # A gate that the layer made itself is trusted: its routing is not checked. The tuple hides it from
        # nn.Module, which would register the gate as a second submodule.
        self._trusted_gates = (self.gate,) if isinstance(gate, str) else ()
        self.experts = construct.make_experts(self, expert, activation, bias, factory_options)
        self.experts.mark_parameters()
        self.experts.note_operands()
        self.shared_expert: Experts | None = None
        if shared_expert is not None:
            from pmoe.experts.modules import shared_experts

            kind = expert if isinstance(expert, str) else "ffn"
            self.shared_expert = shared_experts(
                shared_expert, kind, self.d_model, activation, bias, self.num_experts, factory_options
            )
        if self.shared_expert is not None:
            self.shared_expert.note_operands()
        self.shared_gate = SharedGate(d_model, 1, bias=False, **factory_options) if shared_gate else None
        self.latent = None
        if d_latent is not None:
            from pmoe.call.latent import LatentProjections

            self.latent = LatentProjections(d_model, d_latent, **factory_options)
        construct.check_together(self.layer_modules, shared_expert)
        if self.ranks.size > 1:
            from pmoe.experts.wrapper_checks import sampled

            self.experts.built = sampled(self.experts)

    @property
    def layer_modules(self) -> LayerModules:
        """The layer's modules and options in one record, which the code that runs a call reads.

        The record is cached until a module or an option changes.
        """
        modules = self._layer_modules
        children = self._modules
        # Some tools write modules directly into _modules. __setattr__, which clears the cache, misses that.
        if (
            modules is None
            or modules.experts_module is not children.get("experts")
            or modules.gate is not children.get("gate")
            or modules.shared_module is not children.get("shared_expert")
            or modules.shared_gate is not children.get("shared_gate")
        ):
            modules = self._layer_modules = self._make_layer_modules()
        return modules

    def _make_layer_modules(self) -> LayerModules:
        """Makes the record of the layer's present modules and options, for `layer_modules`.

        If a library, such as FSDP, has put a wrapper around the experts or the gate, the record has both the
        wrapper and the module inside.
        """
        shared_expert = None
        if self.shared_expert is not None:
            shared_expert = experts_inside("shared_expert", self.shared_expert)
        experts = experts_inside("experts", self.experts)
        stored_state.watch(experts, self.grid, self.num_experts)
        self.cache.timed_products.clear()  # other experts may have products of other sizes
        return LayerModules(
            grid=self.grid,
            nodes=self.nodes,
            experts=experts,
            shared_expert=shared_expert,
            order=self.order,
            dispatch=self.dispatch,
            combine=self.combine,
            scalars=self.scalars,
            callbacks=self.callbacks,
            gradients=self.gradients,
            traffic=self.traffic,
            options=self.options,
            gate=self.gate,
            router=gate_inside(self.gate),
            trusts_gate=any(self.gate is gate for gate in self._trusted_gates),
            experts_module=self.experts,
            shared_module=self.shared_expert,
            shared_gate=self.shared_gate,
            latent=self._modules.get("latent"),  # type: ignore[arg-type]  # pickles of older pmoe have none
            callback_modules=self.callback_modules,
            cache=self.cache,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. If it is an option such as ``pipeline``, checks the value first.

        `options` is a frozen record, so setting an option replaces the record by a new one. Setting a module
        or an option also discards the cached `layer_modules`.

        Raises what `pmoe.layer.construct.set_option` and `check_replacement` raise.
        """
        if name in LayerOptions.__dataclass_fields__ or name in Switches.__dataclass_fields__:
            construct.set_option(self, name, value)
            return
        if name in LayerModules.__dataclass_fields__:
            construct.check_replacement(self, name, value)
            self.__dict__["_layer_modules"] = None
        super().__setattr__(name, value)
        if name in LayerModules.__dataclass_fields__ and "cache" in self.__dict__:
            self.cache.compared = ()

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the layer's experts."""
        return self.grid.all

    @property
    def num_local_experts(self) -> int:
        """The number of experts that this rank holds."""
        return self.num_experts // self.grid.ep.size

    @property
    def first_expert(self) -> int:
        """The global index of this rank's first expert, from 0 to num_experts - 1."""
        return self.grid.ep.rank * self.num_local_experts

    @property
    def shard(self) -> Shard:
        """The part of each local expert's hidden columns that this rank holds.

        It is all columns, unless the layer was built on a mesh with a dimension "esp" (expert sharding).
        """
        return Shard(self.grid.esp.rank, self.grid.esp.size)

    def _bind_to_ranks(self) -> None:
        """Gives each all-to-all its process group, and the counter ``traffic``, which adds up sent bytes."""
        for exchange in (self.dispatch, self.combine, self.scalars):
            exchange.bind(self.grid.ep, self.traffic)

    @traced_as(_traced)
    def forward(self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Maps x (..., d_model) to the same shape, in x's dtype, or in autocast's dtype under autocast.

        x: (..., d_model), the tokens. Ranks may have different numbers of tokens, or none.
        token_ids: (...) int64, each token's id in the vocabulary, for gates that route by it
            (`pmoe.Gate.needs_token_ids`).
        mask: (...) bool or integer, True or not 0 where x has a token. Elsewhere x is padding, which is not
            routed, takes no capacity, counts in no loss or statistic, and gets an output of zero. Tokens get
            the output of ``layer(x[mask])``. Callbacks see only tokens, as (N, d_model) for N tokens.

        Raises ValueError on every rank, before any row is sent, if any rank's input has another last
        dimension, dtype or device than the layer, or if any rank's gate fails. Raises RuntimeError if another
        rank does not take part in the call; the message names that rank and the stage. While a CUDA
        graph is captured, raises RuntimeError before any kernel starts, if a graph cannot hold the call.

        Activation checkpointing runs forward a second time, during backward. `pmoe.checkpoint_contexts` keeps
        the routing of the first time. Without these contexts, the routing is computed twice, and ValueError
        is raised on every rank if any token is routed differently the second time.
        """
        if type(x) is not Tensor or x.is_meta or torch._C._len_torch_dispatch_stack() or in_transform():
            from pmoe.layer.calls_with_any import call_with_any

            return call_with_any(self, x, token_ids, mask)
        return self._forward_plain(x, token_ids, mask)

    def _forward_plain(
        self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Computes `forward` for an input that is a plain `torch.Tensor` with values.

        `forward` converts tensor subclasses before it calls this method. For inputs without values (meta or
        fake tensors) it computes only shapes, and does not call this method.

        x: (..., d_model), the tokens.
        token_ids, mask: (...), one value for each token, or None.

        Raises ValueError on every rank if any rank passes an input of a type that the layer does not take.
        """
        call = begin_call(self, self.layer_modules, x, token_ids, mask)
        if call.modules.latent is not None:
            return self._forward_latent(call)
        decision, y_TM = ExpertsCall(counts_source(call))()
        vars(self)["last"] = LastCall.of(decision)  # torch would look for modules and parameters in it
        return shaped_output(decision, y_TM)

    def _forward_latent(self, call: Call) -> Tensor:
        """Computes `forward` of a layer with ``d_latent``.

        call: the call. Its input is not checked yet.
        """
        from pmoe.decide.latent_call import latent_call

        decision, y_TM = latent_call(call)
        # As in `_forward_plain`, past nn.Module.__setattr__.
        vars(self)["last"] = LastCall.of(decision)
        return shaped_output(decision, y_TM)

    if TYPE_CHECKING:  # type checkers cannot see the arguments of nn.Module.__call__: these are forward's

        def __call__(
            self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None
        ) -> Tensor: ...

    @property
    def l_aux(self) -> Tensor:
        """The auxiliary loss of the last call, a scalar that is connected to the autograd graph of the call.

        The layer keeps this graph alive until its next call, with all tensors that this and earlier layers
        saved for backward. To free them without a backward pass, set ``layer.l_aux = None``. After that, and
        before the first call, the loss is a zero without a graph, on the device of the parameters.

        The loss has no graph either if it is read after a checkpoint with use_reentrant=True around the call.
        A warning says so: return the loss from the checkpointed function, or pass use_reentrant=False.
        """
        l_aux = self.last.l_aux
        if l_aux is None:
            return self.layer_modules.no_loss()
        if self.training and not l_aux.requires_grad and torch.is_grad_enabled():
            from pmoe.checkpointing.routing_check import warn_of_lost_loss

            warn_of_lost_loss(self, self.gate)
        return l_aux

    @l_aux.setter
    def l_aux(self, value: Tensor | None) -> None:
        self.last = self.last.with_loss(value)

    @property
    def ran(self) -> RunReport | None:
        """The `RunReport` of the last call: its runner, its number of chunks, its restore pair and so on.

        None before the first call.
        """
        return self.last.ran

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of any rank in the last call; 0 before the first call."""
        return 0 if self.last.counts is None else self.last.counts.max_tokens

    @property
    def row_counts(self) -> RankCounts | None:
        """Numbers of rows that the ranks sent each other in the last call, for `predict_memory`.

        None before the first call. Reading this property may make the host wait for the device.
        """
        return None if self.last.counts is None else self.last.counts.rows()

    @property
    def tokens_per_expert(self) -> Tensor:
        """(E,) int64 on the CPU: this rank's rows for each of all E experts in the last call.

        Dropped rows are not counted. Zeros before the first call. Reading it may make the host wait for the
        device.
        """
        if self.last.counts is None:
            return torch.zeros(self.num_experts, dtype=torch.int64, device="cpu")
        return self.last.counts.kept_E()

    @property
    def restore(self) -> Restore | bool:
        """The option ``memory_reuse`` as a `Restore`: how backward gets back two large tensors.

        The tensors are T_DI (received rows, the experts' inputs) and T_M (hidden activations). A Restore says
        for each of them whether it is kept, offloaded, or sent or computed again. The value is False if
        ``memory_reuse`` is False, which keeps both, and True if the layer chooses.
        """
        return self.options.restore

    def check_spread(self, mesh: DeviceMesh) -> None:
        """Raises ValueError or TypeError if `spread` cannot spread the layer's experts over ``mesh``.

        The message has the reason. The layer is not changed.
        """
        from pmoe.layer import reshard

        reshard.check_spread(self.layer_modules, mesh)

    def spread(self, mesh: DeviceMesh) -> None:
        """Spreads the experts over the ranks of ``mesh``. Before the call, every rank must hold all experts.

        Each rank keeps its part of the experts and drops the others. The kept parameters are new Parameters,
        so make optimizers afterwards. On the meta device a rank need not hold all experts, as no values are
        lost.

        mesh: a device mesh with a dimension "ep" and perhaps "esp", as for `MoELayer`.

        Every rank must call this method. Raises what `check_spread` raises, before anything is changed.
        """
        from pmoe.layer import reshard

        self.check_spread(mesh)
        self.grid = construct.make_grid(None, mesh)
        self._bind_to_ranks()
        self.layer_modules.experts.keep(
            slice(self.first_expert, self.first_expert + self.num_local_experts), self.shard
        )
        reshard.share_ranks(self.layer_modules.experts, self.grid)
        self.last = LastCall()
        self.cache = LayerCache()
        # What was loaded before had all experts, so the ranks need not compare which experts they loaded.
        self.experts.was_loaded = False
        stored_state.watch(self.experts, self.grid, self.num_experts)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new random values for all parameters, as if the layer were built under torch's current seed.

        Call this method for a layer from the meta device, after ``to_empty``. Every rank must call it, with
        the same seed on all ranks.

        If the gate or the experts are a user's own modules, ``reset_parameters`` of each of their submodules
        is called; submodules without this method keep their values. Each expert has a seed of its own, which
        follows from torch's seed and the expert's global index.
        """
        from pmoe.layer import reshard

        reshard.reset_parameters(self.layer_modules)

    def save_degrees(self, path: str | Path) -> None:
        """Writes the numbers of chunks that pipeline=True has found in this process to a JSON file.

        The file has only the numbers for layers with the sizes and settings of this one. `load_degrees`
        reads it, so that a later run needs no trials.

        Raises OSError if the file cannot be written.
        """
        from pmoe.choose import search

        key = search.key_of_degrees(self.layer_modules)
        search.save_degrees(search.learned_in_this_process(self.layer_modules.ranks, key).tables, path, key)

    def load_degrees(self, path: str | Path) -> None:
        """Loads the numbers of chunks that `save_degrees` wrote. All ranks get the content of rank 0's file.

        Every rank must call this method. If rank 0's file is corrupt or belongs to a layer of other sizes or
        settings, every rank raises ValueError; if the file cannot be read, OSError.
        """
        from pmoe.choose import search

        search.learned_degrees(self.layer_modules, "" if path is None else path)

    def predict_memory(
        self,
        num_tokens: int,
        row_counts: RankCounts | None = None,
        *,
        pipeline: int | None = None,
        pipeline_backward: int | None = None,
        memory_reuse: StrategyName | Restore | None = None,
    ) -> PredictedMemory:
        """Predicts the bytes that one forward and one backward pass take on this rank.

        num_tokens: the number of this rank's tokens; without row_counts, the largest number of any rank.
        row_counts: the row counts of a batch. After a call, ``layer.row_counts`` are those of that call.
            Without them, the result is an upper bound for any routing.
        pipeline, pipeline_backward, memory_reuse: used in place of the layer's own options of these names;
            None uses the layer's own.

        Returns a `pmoe.planner.memory.PredictedMemory`. If the layer itself chooses the number of chunks n or
        the tensors that are kept for backward, the result is the prediction for the choice with the largest
        peak. Its ``candidates`` are the predictions for all choices, or under a memory budget for those that
        stay within the budget. ``unknown`` in the result names a user's own modules whose memory is not fully
        counted. Rows are assumed to have the dtype of the parameters, also under autocast.

        Raises TypeError or ValueError for arguments of wrong types or values. Raises ValueError also in three
        other cases:

        - row_counts were counted in equal parts of the batch, and n does not divide the number of parts;
        - no choice stays within the memory budget; the message has the smallest budget that is possible;
        - the layer has options whose memory is not predicted, such as fused kernels.
        """
        from pmoe.layer import predict_memory

        return predict_memory.predict_memory(
            self.layer_modules, num_tokens, row_counts, pipeline, pipeline_backward, memory_reuse
        )

    def __getstate__(self) -> dict[str, Any]:
        # The loss is attached to a graph, which can be neither copied nor pickled. The cache, which has what
        # the ranks have agreed on, is left out too, because a copy may be used with other ranks.
        last = self.last.with_loss(None)
        return {
            **self.__dict__,
            "last": last,
            "gradients": None,
            "cache": self.cache.for_copy(),
            "_layer_modules": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(with_new_names(state))  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        reuse = "" if self.restore is False else f"memory_reuse={self.restore}, "
        reuse += f"fused={self.fused!r}, " if self.fused else ""
        reuse += "pad_to_capacity=True, " if self.pad_to_capacity else ""
        return (
            f"d_model={self.d_model}, d_hidden={self.d_hidden}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, pipeline={self.pipeline}, {reuse}{self.ranks}"
        )
