"""Layers of megatron-core. It wants a GPU, Transformer Engine and grouped_gemm: what stands for them here
does not change how weights lie."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import experts, grouped_gemm_util, moe_utils
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from tests.convert.compare import BiasedGate, E, H, K, M, T, check, group, randomise


class LoopOverExperts:
    """Stands for grouped_gemm's CUDA kernel."""

    @staticmethod
    def gmm(rows: Tensor, weights: Tensor, counts: Tensor, trans_b: bool) -> Tensor:
        assert not trans_b
        parts = zip(rows.split(counts.tolist()), weights, strict=True)
        return torch.cat([part @ weight for part, weight in parts])


def made(is_gated: bool, has_bias: bool, ranks: int, is_grouped: bool = False, **options: Any) -> nn.Module:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=M,
        num_attention_heads=2,
        ffn_hidden_size=H,
        moe_ffn_hidden_size=H,
        num_moe_experts=E,
        moe_router_topk=K,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=ranks,
        add_bias_linear=has_bias,
        gated_linear_unit=is_gated,
        activation_func=F.silu if is_gated else F.gelu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        moe_grouped_gemm=is_grouped,
        moe_use_legacy_grouped_gemm=is_grouped,
        **options,
    )
    grouped = {"moe_grouped_gemm": is_grouped, "moe_use_legacy_grouped_gemm": is_grouped}
    layer: nn.Module = build_module(
        get_moe_module_spec(use_te=False, num_experts=E, **grouped), config=config
    )
    randomise(layer, 1)
    return layer.eval()


def main(rank: int, ranks: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    moe_utils.te_general_gemm = None  # 0.16.1 forgets this name where there is no Transformer Engine
    grouped_gemm_util.ops, grouped_gemm_util.grouped_gemm_is_available = LoopOverExperts, lambda: True
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    x = torch.randn(T, 1, M, generator=torch.Generator().manual_seed(rank))

    def compare(layer: nn.Module, layout: str, **options: Any) -> None:
        with torch.no_grad():
            y, _ = layer(x)
        check(layer, y, x, layout, **options)

    swiglu = {"expert": "swiglu", "bias": False}
    gate = BiasedGate(M, E, K)
    compare(made(False, True, ranks), "megatron-sequential", activation="gelu", bias=True, gate=gate)
    compare(made(False, False, ranks), "megatron-sequential", activation="gelu", bias=False)
    shared = made(True, False, ranks, moe_shared_expert_intermediate_size=32, moe_shared_expert_gate=True)
    compare(shared, "megatron-sequential", shared_expert=32, shared_gate=True, **swiglu)
    scores = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    biased = made(True, False, ranks, **scores)
    compare(biased, "megatron-sequential", gate=pmoe.gates.DeepSeekGate(M, E, K), **swiglu)
    for is_gated in (True, False):
        options = swiglu if is_gated else {"activation": "gelu", "bias": False}
        layer = made(is_gated, False, ranks, is_grouped=True)
        assert isinstance(layer.get_submodule("experts"), experts.GroupedMLP)
        layer.get_submodule("experts").config.bf16 = True  # which it asserts; its product here takes any type
        compare(layer, "megatron-grouped", **options)


if __name__ == "__main__":
    with group() as (rank, ranks):
        main(rank, ranks)
