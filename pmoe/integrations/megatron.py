"""An MoE layer for Megatron-Core: Megatron's router and weights, pmoe's dispatch, experts and combine.

    spec = get_gpt_layer_local_spec(num_experts=8)           # or Transformer Engine's
    spec.submodules.mlp = moe_spec(spec.submodules.mlp, pipeline=True)
    model = GPTModel(config, spec, ...)

The experts' weights have the names (weight1 and weight2) and the layout of Megatron's GroupedMLP. So pmoe's
experts and GroupedMLP can load each other's checkpoints, by state_dict and by sharded_state_dict. Megatron's
optimizer, its DistributedDataParallel with main_grad, and its gradient clipping work unchanged.

With Megatron's option ``delay_wgrad_compute``, the backward pass computes only the gradients of inputs.
``backward_dw`` computes the gradients of the experts' weights later (`pmoe.engine.halves`).

Tested with megatron-core 0.16.1 on the CPU, on one rank and on two (`tests/convert/on_megatron.py`).

Letters: T tokens, K choices, E experts, E_local of this rank, M = hidden_size, H = moe_ffn_hidden_size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoECudaGraphTensorStore, get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.nn import functional as F

from pmoe.layer.run_experts import check_option_names, run_experts

__all__ = ["PmoeMoELayer", "moe_spec"]

REFUSED: dict[str, tuple[object, ...]] = {
    "add_bias_linear": (False,),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_shared_expert_overlap": (False,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
    "fp8": (None, False),
    "fp4": (None, False),
}
"""Fields of Megatron's configuration, and the only values for which pmoe computes the same as Megatron."""


def moe_spec(like: ModuleSpec | None = None, **options: Any) -> ModuleSpec:
    """Returns a Megatron specification of an MoE layer whose experts pmoe runs.

    Assign it to ``submodules.mlp`` of a transformer layer's specification.

    Args:
        like: Megatron's own specification of an MoE layer, from which the router and the shared experts are
            taken. If it is None, the layer has Megatron's TopKRouter and no shared experts.
        options: arguments of `pmoe.MoELayer` that decide how experts are run, any of
            `pmoe.layer.run_experts.OPTIONS`; the same on all ranks.

    Raises ValueError for an unknown option, or if ``like`` does not specify an MoE layer.
    """
    check_option_names(options)
    if like is not None and not isinstance(like.submodules, MoESubmodules):
        raise ValueError(
            f"like (a specification of {like.module}) must be that of an MoE layer: pass "
            "spec.submodules.mlp of a layer with num_experts"
        )
    submodules = MoESubmodules() if like is None else like.submodules
    return ModuleSpec(
        module=PmoeMoELayer,
        params={"options": options},
        submodules=submodules,
        metainfo={"fuse_pre_mlp_layernorm": False},
    )


class PmoeMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoE layer with Megatron's router and shared experts; pmoe runs the routed experts.

    router: Megatron's router.
    experts: the routed experts of this rank, with weights in the layout of Megatron's GroupedMLP.
    shared_experts: Megatron's shared experts; None without them.

    Raises ValueError if the configuration has an option that pmoe does not support (`REFUSED`), or splits
    experts over tensor-parallel ranks.
    """

    def __init__(
        self,
        config: Any,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        for name, allowed in REFUSED.items():
            value = getattr(config, name, allowed[0])
            if value not in allowed:
                raise ValueError(
                    f"{name} ({value!r}) must be {allowed[0]!r} for pmoe's MoE layer in Megatron: set it "
                    "so, or keep Megatron's own specification"
                )
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        if groups.expt_tp.size() > 1:
            raise ValueError(
                f"expert_tensor_parallel_size ({groups.expt_tp.size()}) must be 1 for pmoe's MoE layer in "
                "Megatron: it spreads whole experts (expert_model_parallel_size)"
            )
        BaseMoELayer.__init__(self, config, layer_number, groups)
        self.submodules = submodules
        self.tp_group = groups.tp
        selective = config.recompute_granularity == "selective"
        self.moe_layer_recompute = selective and "moe" in config.recompute_modules
        self.shared_experts_recompute = selective and "shared_experts" in config.recompute_modules
        router = TopKRouter if submodules is None else submodules.router
        self.router = router(config=config, pg_collection=groups)
        self.experts = PmoeExperts(self.num_local_experts, config, groups, options or {})
        if self.use_shared_expert:
            assert submodules is not None
            self.shared_experts = build_module(
                submodules.shared_experts,
                config=config,
                pg_collection=groups,
                gate=config.moe_shared_expert_gate,
            )
        # Megatron's methods `route` and `shared_experts_compute` read these two attributes.
        self.cudagraph_tensor_store = MoECudaGraphTensorStore()
        self.fwd_execution_map = ["route", "expert_compute", "postprocess"]

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: object = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Returns the layer's output (S, B, M), and None in place of Megatron's bias.

        hidden_states: (S, B, M), S positions of B sequences, M = hidden_size.
        intermediate_tensors: must be None. Megatron passes tensors here if its CUDA graphs cut the layer into
            parts, which pmoe does not support.
        padding_mask: (B, S), passed to Megatron's router.

        Raises ValueError for ``intermediate_tensors``, and in training for tensor parallelism without
        sequence parallelism, as Megatron's own layer does.
        """
        if intermediate_tensors is not None:
            raise ValueError("pmoe's MoE layer must not be cut by Megatron's CUDA graphs: leave them out")
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError("sequence_parallel (False) must be True for tensor parallelism with MoE layers")
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute and torch.is_grad_enabled():
            output: Tensor = tensor_parallel.checkpoint(self._output, False, hidden_states, mask)
        else:
            output = self._output(hidden_states, mask)
        return output, None

    def _output(self, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
        """Routes the tokens, and runs routed and shared experts. Returns the layer's output (S, B, M).

        hidden_states: (S, B, M), S positions of B sequences, M = hidden_size.
        mask: (S, B) bool, the padding mask for Megatron's router; None without padding.
        """
        shared = self.shared_experts_compute(hidden_states)
        probs_TE, map_TE = self.route(hidden_states, mask)
        # A router with a capacity drops choices. The routing map is False for them, and they get expert E,
        # which stands for "no expert".
        index_TK = probs_TE.detach().masked_fill(~map_TE, -1.0).topk(self.router.topk, dim=-1).indices
        keep_TK = map_TE.gather(1, index_TK)
        weight_TK = probs_TE.gather(1, index_TK)
        index_TK = index_TK.where(keep_TK, probs_TE.shape[1])
        rows_TM = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: Tensor = self.experts(rows_TM, index_TK, weight_TK).view_as(hidden_states)
        return output if shared is None else output + shared


class PmoeExperts(MegatronModule):  # type: ignore[misc]
    """The routed experts of one rank: run by pmoe, with weights in the layout of Megatron's GroupedMLP.

    GroupedMLP stores the weights of all experts as matrices. In memory they are the weights of one expert
    after the other:

        weight1   (M, E_local * G), memory of (E_local, M, G), G = H columns, or 2 H for gated experts
        weight2   (E_local * H, M), memory of (E_local, H, M)

    Letters: E_local experts of this rank, M = hidden_size, H = moe_ffn_hidden_size.
    """

    def __init__(self, num_local_experts: int, config: Any, groups: Any, options: dict[str, Any]) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        # GroupedMLP.sharded_state_dict reads these attributes.
        self.ep_group = groups.ep
        self.tp_group = groups.expt_tp
        self.dp_group = groups.expt_dp
        self.options = options
        self.activation = _activation(config)
        self._later: deque[Callable[[], None]] = deque()
        width = config.moe_ffn_hidden_size * (2 if config.gated_linear_unit else 1)
        hidden = config.moe_ffn_hidden_size * num_local_experts
        place = {"dtype": config.params_dtype}
        place["device"] = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight1 = nn.Parameter(torch.empty(config.hidden_size, width * num_local_experts, **place))
        self.weight2 = nn.Parameter(torch.empty(hidden, config.hidden_size, **place))
        if config.perform_initialization:
            with _expert_generator(config), torch.no_grad():
                self._initialise()
        for weight in (self.weight1, self.weight2):
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]

    sharded_state_dict = GroupedMLP.sharded_state_dict

    def views(self) -> tuple[Tensor, Tensor]:
        """Returns views of the parameters in pmoe's shapes: w1 (E_local, M, G) and w2 (E_local, H, M).

        There are E_local experts on this rank, M = hidden_size, H = moe_ffn_hidden_size, and G is H, or 2 H
        for gated experts.
        """
        size = self.config.hidden_size
        return self.weight1.view(self.num_local_experts, size, -1), self.weight2.view(
            self.num_local_experts, -1, size
        )

    def _initialise(self) -> None:
        """Initializes the weights by the methods of Megatron's configuration.

        On the CPU, the random numbers of the experts of lower ranks are drawn too, and thrown away. So with
        one seed an expert has the same weights on any number of ranks.
        """
        methods = (self.config.init_method, self.config.output_layer_init_method)
        own = self.ep_group.rank() if self.weight1.device.type == "cpu" else 0
        for expert in range((own + 1) * self.num_local_experts):
            rank, local = divmod(expert, self.num_local_experts)
            for view, method in zip(self.views(), methods, strict=True):
                method(view[local] if rank == own else torch.empty_like(view[local]))

    def forward(self, x_TM: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Returns each token's weighted sum of its experts' outputs, (T, M).

        With Megatron's option ``delay_wgrad_compute``, backward computes only the gradients of x_TM and
        weight_TK. `backward_dw` then computes the gradients of the experts' weights.

        x_TM: (T, M), the T tokens with M = hidden_size columns.
        index_TK: (T, K), the K experts of each token, from 0 to E - 1 over all ranks; E means no expert.
        weight_TK: (T, K), the routing weights.
        """
        if getattr(self.config, "delay_wgrad_compute", False) and torch.is_grad_enabled():
            anchor = torch.empty(0, device=x_TM.device, requires_grad=True)
            delayed: Tensor = _WeightsLater.apply(self, anchor, x_TM, index_TK, weight_TK)  # type: ignore[no-untyped-call]
            return delayed
        return self.run(x_TM, index_TK, weight_TK)

    def run(self, x_TM: Tensor, index_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Runs the experts, ignoring ``delay_wgrad_compute``: backward computes all gradients at once.

        Returns each token's weighted sum of its experts' outputs, (T, M). The gradients are those of x_TM,
        weight_TK and the experts' weights.

        x_TM: (T, M), the T tokens with M = hidden_size columns.
        index_TK: (T, K), the K experts of each token, from 0 to E - 1 over all ranks; E means no expert.
        weight_TK: (T, K), the routing weights.
        """
        w1, w2 = self.views()
        return run_experts(
            self,
            x_TM,
            index_TK,
            weight_TK,
            w1,
            w2,
            activation=self.activation,
            transposed=True,
            group=self.ep_group if self.ep_group.size() > 1 else None,
            **self.options,
        )

    def backward_dw(self) -> None:
        """Computes the gradients of the experts' weights, which a backward pass has left out.

        Backward leaves them out with Megatron's option ``delay_wgrad_compute``. If several backward passes
        have left out gradients, each call of this method computes the gradients for the oldest of these
        passes. Autograd adds them to the parameters' gradients, so Megatron's hooks run. Does nothing if no
        gradients are missing.
        """
        if self._later:
            self._later.popleft()()


class _WeightsLater(torch.autograd.Function):
    """Runs experts. Backward leaves the gradients of their weights to `PmoeExperts.backward_dw`."""

    @staticmethod
    def forward(
        ctx: Any, experts: PmoeExperts, anchor: Tensor, x_TM: Tensor, index_TK: Tensor, weight_TK: Tensor
    ) -> Tensor:
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in (x_TM, weight_TK)]
        with torch.enable_grad():
            y_TM = experts.run(inputs[0], index_TK, inputs[1])
        ctx.experts = experts
        ctx.inputs = inputs
        ctx.y_TM = y_TM
        return y_TM.detach()

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        y_TM = ctx.y_TM
        experts = ctx.experts
        asked = [each for each in ctx.inputs if each.requires_grad]
        found = iter(torch.autograd.grad(y_TM, asked, grad_TM, retain_graph=True) if asked else ())
        of_x, of_weight = (next(found) if each.requires_grad else None for each in ctx.inputs)
        weights = [each for each in (experts.weight1, experts.weight2) if each.requires_grad]

        def gradients_of_weights() -> None:
            torch.autograd.backward(y_TM, grad_TM, inputs=weights)

        if weights:
            experts._later.append(gradients_of_weights)
        ctx.y_TM = None
        return None, None, of_x, None, of_weight


def _activation(config: Any) -> Any:
    """Returns the activation of Megatron's configuration, as a name or a function for `run_experts`."""
    function = config.activation_func
    names = {F.silu: "silu", F.relu: "relu", F.gelu: "gelu"}
    if not config.gated_linear_unit:
        return names.get(function, function)
    if function is F.silu:
        return "swiglu"

    def gated(hidden_NG: Tensor) -> Tensor:
        gate_NH, up_NH = hidden_NG.chunk(2, dim=-1)
        active: Tensor = function(gate_NH) * up_NH
        return active

    return gated


@contextmanager
def _expert_generator(config: Any) -> Iterator[None]:
    """Returns a context in which random numbers on a GPU come from Megatron's generator for experts.

    With initialization on the CPU, the generator is not changed.
    """
    if config.use_cpu_initialization:
        yield
        return
    with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
        yield
