"""`pmoe.integrations.megatron` in a GPTModel of megatron-core, beside Megatron's own MoE layer.

It wants a GPU, Transformer Engine and grouped_gemm, for which `of_megatron` says what stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import experts, grouped_gemm_util, moe_utils
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from pmoe.engine.passes.backward import Backward
from pmoe.integrations.megatron import PmoeExperts, PmoeMoELayer, moe_spec
from tests.convert.compare import E, H, K, M, T, group, randomise
from tests.convert.of_megatron import LoopOverExperts


def config_of(ranks: int, **options: Any) -> TransformerConfig:
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": M,
            "num_attention_heads": 2,
            "ffn_hidden_size": H,
            "moe_ffn_hidden_size": H,
            "num_moe_experts": E,
            "moe_router_topk": K,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": ranks,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "bias_activation_fusion": False,
            "use_cpu_initialization": True,
            "moe_grouped_gemm": True,
            "moe_use_legacy_grouped_gemm": True,
            **options,
        }
    )


def megatrons_spec() -> Any:
    return get_moe_module_spec(
        use_te=False, num_experts=E, moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=True
    )


def pair(ranks: int, options: dict[str, Any], **fields: Any) -> tuple[nn.Module, nn.Module]:
    """Megatron's own layer and pmoe's with the same weights, loaded by a state dict of Megatron's."""
    config = config_of(ranks, **fields)
    theirs = build_module(megatrons_spec(), config=config)
    theirs.get_submodule("experts").config.bf16 = True  # which it asserts; its product here takes any type
    randomise(theirs, 1)
    ours = build_module(moe_spec(megatrons_spec(), **options), config=config)
    ours.load_state_dict({n: each for n, each in theirs.state_dict().items() if isinstance(each, Tensor)})
    return theirs, ours


def step(layer: nn.Module, x: Tensor, after: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y, bias = layer(x)
    assert bias is None
    y.square().sum().backward()
    after()
    found = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    return {"y": y.detach(), "x": x.grad, **found}  # type: ignore[dict-item]


def same(got: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert got.keys() == wanted.keys(), (what, got.keys() ^ wanted.keys())
    for name, value in wanted.items():
        error = float((got[name] - value).abs().max() / value.abs().max())
        assert error < 2e-5, (what, name, error)
    print(f"{what}: {len(got)} tensors, equal to Megatron's", flush=True)


def main(rank: int, ranks: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    moe_utils.te_general_gemm = None
    grouped_gemm_util.ops, grouped_gemm_util.grouped_gemm_is_available = LoopOverExperts, lambda: True
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    x = torch.randn(T, 1, M, generator=torch.Generator().manual_seed(rank))
    shared = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "default": ({}, {}),
        "chunks in ring slots": ({"pipeline": 2, "memory_reuse": "S4"}, {}),
        "gelu": ({}, {"gated_linear_unit": False, "activation_func": F.gelu}),
        "gated gelu": ({}, {"activation_func": F.gelu}),
        "shared experts": ({}, shared),
        "capacity": ({}, {"moe_expert_capacity_factor": 0.8, "moe_router_load_balancing_type": "none"}),
    }
    for what, (options, fields) in cases.items():
        theirs, ours = pair(ranks, options, **fields)
        same(step(ours, x), step(theirs, x), what)
    # Weights of backward passes that leave them, in the order of the passes.
    theirs, ours = pair(ranks, {})
    ours.get_submodule("experts").config.delay_wgrad_compute = True
    kinds: list[str] = []
    plain = Backward.run_schedule

    def run_schedule(self: Backward) -> None:
        kinds.extend(task.kind.value for task in self.schedule.tasks)
        plain(self)

    Backward.run_schedule = run_schedule  # type: ignore[method-assign]
    wanted = step(theirs, x)
    got = step(ours, x, ours.backward_dw)  # type: ignore[arg-type]
    Backward.run_schedule = plain  # type: ignore[method-assign]
    same(got, wanted, "backward_dw")
    assert kinds.count("LW") == 1 and kinds.count("S") == (ranks > 1), kinds
    early = step(ours, x)
    assert "experts.weight1" not in early
    # Megatron's data parallelism takes the gradients into main_grad.
    theirs, ours = pair(ranks, {})
    wanted = step(theirs, x)
    ours.zero_grad()
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(config_of(ranks), options, ours)
    for _ in range(2):
        wrapped(x)[0].square().sum().backward()
    named = dict(ours.named_parameters())
    assert all(each.grad is None for each in named.values())
    twice = {name: 2 * wanted[name] for name in named}
    same({name: each.main_grad for name, each in named.items()}, twice, "main_grad of two passes")
    # What a distributed checkpoint of Megatron's own layer holds.
    a, b = theirs.sharded_state_dict(), ours.sharded_state_dict()  # type: ignore[operator]
    kept = {key for key in a if not key.endswith("_extra_state")}
    assert kept == {key for key in b if not key.endswith("_extra_state")}
    places = [
        (each.key, each.replica_id, getattr(each, "global_shape", None), getattr(each, "global_offset", None))
        for state in (a, b)
        for each in (state[key] for key in sorted(kept))
    ]
    assert places[: len(kept)] == places[len(kept) :]
    print("sharded_state_dict: equal to Megatron's", flush=True)
    # An expert has the same weights on any number of ranks.
    config = config_of(ranks)
    torch.manual_seed(5)
    fresh = PmoeExperts(E // ranks, config, get_default_pg_collection(), {})
    torch.manual_seed(5)
    for expert in range(E):
        drawn = (torch.empty(M, 2 * H), torch.empty(H, M))
        config.init_method(drawn[0])
        config.output_layer_init_method(drawn[1])
        own, local = divmod(expert, E // ranks)
        if own == rank:
            assert all(torch.equal(a[local], b) for a, b in zip(fresh.views(), drawn, strict=True))
    print("initial values: those of any number of ranks", flush=True)
    stats = pmoe.stats(ours)
    assert [each.name for each in stats.layers] == ["experts"], stats
    refuse(ranks)


def refuse(ranks: int) -> None:
    for call, text in (
        (
            lambda: PmoeMoELayer(config_of(ranks, add_bias_linear=True)),
            "add_bias_linear (True) must be False",
        ),
        (
            lambda: PmoeMoELayer(config_of(ranks, glu_linear_offset=1.0, bias_activation_fusion=False)),
            "glu_linear_offset (1.0) must be 0.0",
        ),
        (lambda: moe_spec(capacity=1), "capacity (1) must be left out"),
        (lambda: moe_spec(experts.GroupedMLP), "like"),
    ):
        try:
            call()
        except (ValueError, AttributeError) as error:
            assert text in str(error) or text == "like", error
        else:
            raise AssertionError(text)
    print("refusals: named", flush=True)


if __name__ == "__main__":
    with group() as (rank, ranks):
        main(rank, ranks)
