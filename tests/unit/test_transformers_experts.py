"""Single experts modules of transformers: every flag of the registry, and what is refused."""

from __future__ import annotations

import contextlib
import importlib
import threading
import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pmoe.experts.borrowed import (
    BorrowedActivation,
    BorrowedFFN,
    BorrowedSwiGLU,
    NormedExperts,
)
from pmoe.gates.external import ExternalGate
from tests.tiny_transformers import (
    as_by_default,  # noqa: F401 (a fixture)
    integration,
    randomise,
    relative,
)

pytestmark = pytest.mark.timeout(300)  # the first test imports transformers, which takes its time


# ---- one experts module: every flag of the registry


def make_experts(path: str, config: dict[str, Any]) -> Any:
    """Returns 6 experts of a model's class, in float64, whose calls go through the registry.

    They have 16 columns.
    """
    file, name = path.split(".")
    module = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    made = getattr(module, name)(types.SimpleNamespace(_experts_implementation="eager", **config))
    return randomise(made.double())


COMMON = {"num_local_experts": 6, "hidden_size": 16, "intermediate_size": 10, "hidden_act": "silu"}
EXPERTS: dict[str, tuple[str, dict[str, Any], type]] = {
    "usual": ("mixtral.MixtralExperts", COMMON, BorrowedSwiGLU),
    "another activation": (
        "mixtral.MixtralExperts",
        COMMON | {"hidden_act": "gelu_pytorch_tanh"},
        BorrowedActivation,
    ),
    "own gate": ("deepseek_v4.DeepseekV4Experts", COMMON | {"swiglu_limit": 0.2}, BorrowedActivation),
    "transposed": (
        "aria.AriaExperts",
        {"moe_num_experts": 6, "hidden_size": 16, "intermediate_size": 10},
        BorrowedSwiGLU,
    ),
    "interleaved, with biases": (
        "gpt_oss.GptOssExperts",
        COMMON | {"swiglu_alpha": 1.7, "swiglu_limit": 0.2},
        BorrowedActivation,
    ),
    "without a gate": (
        "nemotron_h.NemotronHExperts",
        {
            "n_routed_experts": 6,
            "hidden_size": 16,
            "moe_intermediate_size": 10,
            "moe_latent_size": None,
            "mlp_hidden_act": "relu2",
        },
        BorrowedActivation,
    ),
    "without a gate, relu": (
        "nemotron_h.NemotronHExperts",
        {
            "n_routed_experts": 6,
            "hidden_size": 16,
            "moe_intermediate_size": 10,
            "moe_latent_size": None,
            "mlp_hidden_act": "relu",
        },
        BorrowedFFN,
    ),
    "with a norm behind": (
        "muse_spark.MuseSparkExperts",
        {
            "num_local_experts": 6,
            "moe_hidden_size": 16,
            "moe_intermediate_size": 10,
            "hidden_act": "silu",
            "post_norm_eps": 1e-5,
        },
        NormedExperts,
    ),
}


def routed(tokens: int = 20, top_k: int = 2, experts: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 16, dtype=torch.float64, generator=generator).requires_grad_()
    index = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    weight = torch.rand(tokens, top_k, dtype=torch.float64, generator=generator).requires_grad_()
    return x, index, weight


def called(module: Any, implementation: str, x: Tensor, index: Tensor, weight: Tensor) -> list[Tensor]:
    """Returns the output, and the gradients of the input, the routing weights and the parameters."""
    module.config._experts_implementation = implementation
    y = module(x, index, weight)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    return [y, *torch.autograd.grad(y, [x, weight, *module.parameters()], dy)]


@pytest.mark.parametrize("kind", EXPERTS)
def test_every_flag_and_activation_of_the_registry_is_honoured(kind: str) -> None:
    path, config, taken_by = EXPERTS[kind]
    module = make_experts(path, config)
    wanted = called(module, "eager", *routed())
    for options in ({}, {"pipeline": 2, "memory_reuse": "S4"}):
        integration.configure(**options)
        found = called(module, "pmoe", *routed())
        for ours, theirs in zip(found, wanted, strict=True):
            # MuseSpark's norm computes in float32 whatever it is given.
            assert relative(ours, theirs) < (1e-6 if taken_by is NormedExperts else 1e-12)
    ((_, layer),) = integration.layers(module).items()
    assert type(layer.experts) is taken_by


def test_the_index_behind_the_last_expert_means_no_expert() -> None:
    module = make_experts(*EXPERTS["usual"][:2])
    x, index, weight = routed()
    index[::3, 0] = 6
    index[5] = 6
    wanted, found = (called(module, each, x, index, weight) for each in ("eager", "pmoe"))
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative(ours, theirs) < 1e-12
    assert not found[0][5].any() and not found[2][index == 6].any()


def test_no_token_at_all_is_a_call_like_others() -> None:
    module = make_experts(*EXPERTS["interleaved, with biases"][:2])
    x, index, weight = routed()
    found = called(module, "pmoe", x[:0], index[:0], weight[:0])
    assert found[0].shape == (0, 16) and all(not each.any() for each in found)


def test_threads_that_share_a_model_do_not_share_a_call() -> None:
    module = make_experts(*EXPERTS["usual"][:2])
    x, index, weight = routed()
    batches = [(x.detach(), (index + i) % 6, weight.detach() + i) for i in range(2)]
    wanted = [module(*each) for each in batches]
    module.config._experts_implementation = "pmoe"
    module(*batches[0])  # there is a layer now, which both threads find
    both_inside, forward, found = threading.Barrier(2), ExternalGate.forward, dict[int, Tensor]()

    def awaited(self: Any, x_TM: Tensor) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_inside.wait(0.3)
        return forward(self, x_TM)

    def call(i: int) -> None:
        found[i] = module(*batches[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    with mock.patch.object(ExternalGate, "forward", awaited):
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert all(relative(found[i], wanted[i]) < 1e-12 for i in range(2))


# ---- what is refused


def assert_refused(module: Any, error: str) -> None:
    x, index, weight = routed()
    module.config._experts_implementation = "pmoe"
    before = {name: each.clone() for name, each in module.named_parameters()}
    with pytest.raises(ValueError, match=error):
        module(x, index, weight)
    assert not integration.layers(module)
    assert all(torch.equal(each, before[name]) for name, each in module.named_parameters())


def test_layouts_that_pmoe_does_not_know_are_refused_with_what_to_change() -> None:
    def usual() -> Any:
        return make_experts(*EXPERTS["usual"][:2])

    module = usual()
    module.down_proj = nn.Parameter(torch.zeros(6, 16, 10, dtype=torch.uint8), requires_grad=False)
    assert_refused(
        module, r"down_proj of experts module \(MixtralExperts\) is torch.uint8 .* load the model dequ"
    )
    module = usual()
    module.down_proj_scale = nn.Parameter(torch.ones(6, 1, 1))
    assert_refused(
        module, r"must hold down_proj, gate_up_proj and nothing else; it holds .*down_proj_scale.*quantis"
    )
    module = usual()
    del module.down_proj
    assert_refused(module, r"must hold down_proj, gate_up_proj and nothing else; it holds gate_up_proj\.")
    module = usual()
    module.down_proj = nn.Parameter(torch.zeros(6, 16, 9, dtype=torch.float64))
    assert_refused(module, r"gate_up_proj .* is of shape \(6, 20, 16\); .* it must be \(6, 18, 16\)")
    module = usual()
    module.act_fn = nn.PReLU()
    assert_refused(module, r"activation of experts module \(MixtralExperts\) must have no parameters")
    module = usual()
    module.has_bias = True
    assert_refused(module, r"must hold down_proj, down_proj_bias, gate_up_proj, gate_up_proj_bias")
    module = usual()
    del module.has_bias
    assert_refused(module, r"must be of a class decorated with @use_experts")


def test_weights_of_two_types_without_values_or_elsewhere_are_refused_with_what_to_change() -> None:
    def changed(key: str, **to: Any) -> Any:
        module = make_experts(*EXPERTS["interleaved, with biases"][:2])
        setattr(module, key, nn.Parameter(getattr(module, key).detach().to(**to)))
        return module

    for key in ("down_proj", "down_proj_bias", "gate_up_proj_bias"):
        half, meta = changed(key, dtype=torch.bfloat16), changed(key, device="meta")
        assert_refused(
            half,
            rf"{key} of experts module \(GptOssExperts\) is torch.bfloat16; it must be of the type of "
            r"gate_up_proj: model.to\(torch.float64\), or call the model under autocast",
        )
        module = meta
        module.config._experts_implementation = "pmoe"
        with pytest.raises(ValueError, match=rf"{key} of experts .* is on the meta device; .* load weights"):
            module(*routed())
    module = make_experts(*EXPERTS["usual"][:2]).float()
    assert_refused(
        module,
        r"hidden_states of experts module \(MixtralExperts\) is torch.float64; it must be of the type of "
        r"gate_up_proj: model.to\(torch.float32\)",
    )
    x, index, weight = routed()
    with pytest.raises(
        ValueError, match=r"hidden_states of .* on meta; it must be where gate_up_proj is: model.to\(\"cpu"
    ):
        module(x.to("meta"), index, weight)


def test_weights_of_two_types_are_cast_under_autocast() -> None:
    module = make_experts(*EXPERTS["usual"][:2]).float()
    module.down_proj = nn.Parameter(module.down_proj.detach().bfloat16())
    x, index, weight = routed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, found = (called(module, each, x.float(), index, weight) for each in ("eager", "pmoe"))
    assert all(relative(ours, theirs) < 0.02 for ours, theirs in zip(found, wanted, strict=True))


def test_a_flag_that_a_later_release_may_add_is_refused_where_it_is_set() -> None:
    module = make_experts(*EXPERTS["usual"][:2])

    def later(
        experts_class: Any = None, *, has_bias: bool = False, has_expert_dropout: bool = False
    ) -> None: ...

    with mock.patch("transformers.integrations.moe.use_experts_implementation", later):
        module.has_expert_dropout = False
        module.config._experts_implementation = "pmoe"
        assert module(*routed()).shape == (20, 16)
        module.has_expert_dropout = True
        with pytest.raises(
            ValueError, match=r"MixtralExperts, has_expert_dropout=True\) must only have flags"
        ):
            module(*routed())


def test_routing_of_another_shape_is_refused() -> None:
    module = make_experts(*EXPERTS["usual"][:2])
    module.config._experts_implementation = "pmoe"
    x, index, weight = routed()
    with pytest.raises(
        ValueError, match=r"top_k_weights \(shape \(20, 6\)\) must be of the shape .* \(\(20, 2\)\)"
    ):
        module(x, index, torch.ones(20, 6))
    with pytest.raises(
        ValueError, match="rank 0: its gate returned expert indices outside 0..num_experts - 1"
    ):
        module(x, index + 6, weight)


def test_fp8_experts_find_pmoe_in_their_registry_and_are_refused() -> None:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    assert (
        ALL_FP8_EXPERTS_FUNCTIONS["pmoe"]
        is importlib.import_module("pmoe.integrations.transformers.in_graph").run_experts_module
    )
