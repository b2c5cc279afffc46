"""pmoe as an experts implementation of transformers, on one rank: models and single experts modules against
the library's own eager implementation, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import io
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.gates.given import GivenGate
from pmoe.integrations.transformers.borrowed import (
    BorrowedActivation,
    BorrowedExperts,
    BorrowedFFN,
    BorrowedSwiGLU,
    NormedExperts,
)
from tests.spread import named
from tests.tiny_transformers import MODELS, batch, gradients, make_model, randomise, relative

pytestmark = pytest.mark.timeout(300)  # the first test imports transformers, which takes its time


class Later:
    """A module that is imported when something of it is used: not while tests are collected."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


integration = Later("pmoe.integrations.transformers")


@pytest.fixture
def registry() -> types.ModuleType:
    return importlib.import_module("pmoe.integrations.transformers.registry")


@pytest.fixture(autouse=True)
def as_by_default() -> Iterator[None]:
    yield
    integration.configure()


def trained(model: Any, ids: Tensor, **given: Any) -> tuple[Any, dict[str, Tensor]]:
    """One forward and backward in training mode: (output, gradients). Phi's router draws random numbers."""
    model.train()
    torch.manual_seed(3)
    output = model(input_ids=ids, labels=ids, **given)
    output.loss.backward()
    return output, dict(gradients(model))


def assert_same_step(name: str, **options: Any) -> None:
    integration.configure(**options)
    ids = batch(3)
    wanted, plain = trained(make_model(name, "eager", output_router_logits=True), ids)
    model = make_model(name, "pmoe", output_router_logits=True)
    found, ours = trained(model, ids)
    assert len(integration.layers(model)) == (1 if name == "DeepSeek-V3" else 2)
    assert relative(found.loss, wanted.loss) < 1e-6
    assert relative(found.logits, wanted.logits) < 1e-5
    assert ours.keys() == plain.keys()
    worst = max((relative(ours[each], plain[each]), each) for each in plain)
    assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_every_gradient_equal_the_eager_implementation(name: str) -> None:
    assert_same_step(name)


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": 4, "memory_reuse": "S1"},
        {"pipeline": 2, "pipeline_backward": 4, "memory_reuse": "S4", "bypass_local": False},
        {"pipeline": True, "memory_reuse": True, "memory_budget": "8MiB"},
    ],
    ids=str,
)
def test_they_are_equal_however_the_pipeline_runs(name: str, options: dict[str, Any]) -> None:
    assert_same_step(name, **options)


# ---- one experts module: every flag of the registry


def make_experts(path: str, config: dict[str, Any]) -> Any:
    """(E, M) = (6, 16) experts of a model's class, in float64, behind the registry's dispatch."""
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
    """Output, and the gradients of the input, the routing weights and the parameters."""
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


# ---- whose the weights are


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_weights_are_used_where_they_lie(name: str) -> None:
    model, seen = make_model(name, "pmoe"), set()
    compute = BorrowedExperts.compute

    def watched(self: Any, rows: Tensor, weight: Tensor, groups: Any, parameters: Any, **given: Any) -> Any:
        seen.update(each.data_ptr() for each in parameters)
        return compute(self, rows, weight, groups, parameters, **given)

    with mock.patch.object(BorrowedExperts, "compute", watched):
        trained(model, batch(2))
    held = {each.data_ptr() for key, each in model.named_parameters() if ".experts." in key}
    assert seen == held


def test_a_model_knows_nothing_of_the_layers_that_run_it(tmp_path: Path) -> None:
    model, plain = make_model("Mixtral", "pmoe"), make_model("Mixtral", "eager")
    ids = batch(2)
    output, _ = trained(model, ids)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert not any(hasattr(each, "allreduce") for each in model.parameters())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert not integration.layers(other)
        assert torch.equal(trained(other, ids)[0].logits, output.logits)
        ours, theirs = integration.layers(model), integration.layers(other)
        assert ours.keys() == theirs.keys() and not set(ours.values()) & set(theirs.values())


def test_layers_go_with_their_model_and_a_backward_outlives_it() -> None:
    model = make_model("gpt-oss", "pmoe")
    ids = batch(2)
    wanted = trained(copy.deepcopy(model), ids)[1]
    loss = model.train()(input_ids=ids, labels=ids).loss
    parameters = dict(model.named_parameters())
    left = [weakref.ref(each) for each in integration.layers(model).values()]
    del model
    loss.backward()
    assert all(torch.equal(parameters[name].grad, wanted[name]) for name in wanted)
    del loss
    gc.collect()
    assert not any(each() for each in left)


def test_threads_that_share_a_model_do_not_share_a_call() -> None:
    module = make_experts(*EXPERTS["usual"][:2])
    x, index, weight = routed()
    batches = [(x.detach(), (index + i) % 6, weight.detach() + i) for i in range(2)]
    wanted = [module(*each) for each in batches]
    module.config._experts_implementation = "pmoe"
    module(*batches[0])  # there is a layer now, which both threads find
    both_inside, forward, found = threading.Barrier(2), GivenGate.forward, dict[int, Tensor]()

    def awaited(self: Any, x_TM: Tensor) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_inside.wait(0.3)
        return forward(self, x_TM)

    def call(i: int) -> None:
        found[i] = module(*batches[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    with mock.patch.object(GivenGate, "forward", awaited):
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert all(relative(found[i], wanted[i]) < 1e-12 for i in range(2))


def test_a_model_may_be_moved_replaced_and_switched_between_calls() -> None:
    model, ids = make_model("Mixtral", "pmoe"), batch(2)
    first = trained(model, ids)[0].logits
    assert relative(trained(model.double(), ids)[0].logits, first) < 1e-5
    other = make_model("Mixtral", "eager", seed=1)
    model.float().load_state_dict(other.state_dict(), assign=True)
    wanted = trained(other, ids)[0].logits
    assert relative(trained(model, ids)[0].logits, wanted) < 1e-5
    model.set_experts_implementation("eager")
    assert torch.equal(trained(model, ids)[0].logits, wanted)
    model.set_experts_implementation("pmoe")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative(trained(model, ids)[0].logits, wanted) < 0.05


def test_generate_gives_the_tokens_of_the_eager_implementation_and_save_pretrained_its_logits(
    tmp_path: Path,
) -> None:
    import transformers

    model, plain, ids = make_model("Mixtral", "pmoe"), make_model("Mixtral", "eager"), batch(2)
    texts = [
        each.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        for each in (model, plain)
    ]
    assert torch.equal(*texts) and texts[0].shape == (2, 20)
    model.save_pretrained(tmp_path)
    assert "pmoe" not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, plain(ids).logits)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="pmoe")
    with torch.no_grad():
        assert relative(again(ids).logits, plain(ids).logits) < 1e-5
    assert len(integration.layers(again)) == 2


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "Phi-3.5-MoE"])
def test_gradients_are_the_same_under_gradient_checkpointing(name: str) -> None:
    ids = batch(2)
    wanted = trained(make_model(name, "pmoe"), ids)[1]
    model = make_model(name, "pmoe")
    model.activation_checkpointing_enable()
    run = mock.Mock(wraps=importlib.import_module("pmoe.integrations.transformers.layout").borrow)
    with mock.patch("pmoe.integrations.transformers.run.borrow", run):
        found = trained(model, ids)[1]
    assert run.call_count == 4  # two layers, run forward and again in backward
    assert all(relative(found[each], wanted[each]) < 1e-6 for each in wanted)


def flipping(model: Any) -> None:
    """Has the first layer's router choose one expert further to the right in every second call."""
    router, calls = model.model.layers[0].mlp.gate, [0]

    def flip(_: Any, __: Any, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        calls[0] += 1
        logits, weights, index = found
        return found if calls[0] % 2 else (logits, weights, (index + 1) % 8)

    router.register_forward_hook(flip)


def test_routing_that_changes_in_recomputation_is_an_error_that_names_the_remedy() -> None:
    model = make_model("Mixtral", "pmoe")
    model.activation_checkpointing_enable()
    flipping(model)
    with pytest.raises(ValueError, match=r"(?s)routing changed in recomputation.*checkpoint_contexts"):
        trained(model, batch(2))


def test_with_checkpoint_contexts_tokens_go_where_they_went_whatever_the_router_says_then() -> None:
    ids = batch(2)
    wanted = trained(make_model("Mixtral", "pmoe"), ids)[1]
    model = make_model("Mixtral", "pmoe")
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": pmoe.checkpoint_contexts})
    flipping(model)
    found = trained(model, ids)[1]
    assert all(relative(found[each], wanted[each]) < 1e-6 for each in wanted)


# ---- options


def test_options_hold_from_the_next_call_on_and_configure_alone_sets_them_back() -> None:
    model, ids = make_model("Mixtral", "pmoe"), batch(2)
    trained(model, ids)
    first = integration.layers(model)
    assert {layer.pipeline for layer in first.values()} == {False}
    integration.configure(pipeline=3, memory_reuse="S2")
    trained(model, ids)
    second = integration.layers(model)
    assert {(layer.pipeline, str(layer.restore)) for layer in second.values()} == {(3, "communicate/offload")}
    trained(model, ids)
    assert integration.layers(model) == second
    integration.configure()
    trained(model, ids)
    assert {layer.pipeline for layer in integration.layers(model).values()} == {False}


def test_the_same_options_again_leave_layers_as_they_are() -> None:
    model, other, ids = make_model("Mixtral", "pmoe"), make_model("Mixtral", "pmoe"), batch(2)
    integration.configure(pipeline=1, memory_reuse="S2")
    trained(model, ids)
    first = integration.layers(model)
    integration.configure(memory_reuse="S2", pipeline=1)
    trained(model, ids)
    assert integration.layers(model) == first
    integration.configure(pipeline=2)
    trained(other, ids)
    integration.configure(pipeline=1, memory_reuse="S2")
    trained(model, ids)
    assert integration.layers(model) == first
    integration.configure(pipeline=True, memory_reuse="S2")  # True == 1, and is another option
    trained(model, ids)
    assert {layer.pipeline for layer in integration.layers(model).values()} == {True}
    assert not set(integration.layers(model).values()) & set(first.values())


def test_stats_name_the_layers_of_a_model_by_its_experts_modules() -> None:
    model = make_model("Mixtral", "pmoe")
    integration.configure(pipeline=2, memory_reuse="S4")
    trained(model, batch(2))
    found = pmoe.stats(model).layers
    assert [each.name for each in found] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    for each in found:
        assert sum(each.tokens_per_expert) == 2 * 12 * 2 and each.drop_rate == 0
        assert (each.n_forward, each.restore) == (2, "communicate/recompute")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pipelines": 2}, r"pipelines \(2\) must be left out: the options are pipeline, .*one_lane"),
        ({"top_k": 2}, r"top_k \(2\) must be left out"),
        ({"pipeline": 0}, r"pipeline \(0\)"),
        ({"pipeline": "fast"}, r"pipeline \('fast'\)"),
        ({"memory_reuse": "S5"}, r"memory_reuse \('S5'\)"),
        ({"memory_budget": "2 apples"}, r"memory_budget \('2 apples'\) must be a number of bytes"),
        ({"slack": 0.5}, r"slack \(0.5\) must be a number of at least 1"),
        ({"order": "random"}, r"order \('random'\) must be"),
        ({"dispatch": object()}, r"dispatch \(<object.*\) must be a name"),
        ({"send_once": 1}, r"send_once \(1\) must be True or False"),
        ({"bypass_local": "no"}, r"bypass_local \('no'\) must be True or False"),
        ({"sequential": 0}, r"sequential \(0\) must be True or False"),
        (
            {"send_once": True, "memory_budget": "1GiB"},
            r"memory_budget \('1GiB'\) must be left out where rows travel once",
        ),
    ],
    ids=named,
)
def test_options_are_checked_when_they_are_given(options: dict[str, Any], error: str) -> None:
    integration.configure(pipeline=2)
    with pytest.raises((ValueError, TypeError), match=error):
        integration.configure(**options)
    assert dict(importlib.import_module("pmoe.integrations.transformers.options").options()) == {
        "pipeline": 2
    }


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
    assert_refused(module, r"must be of a class under @use_experts_implementation")


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
        r"hidden_states \(torch.float64\) of experts module \(MixtralExperts\) must be of the type of its "
        r"weights: model.to\(torch.float32\)",
    )
    x, index, weight = routed()
    with pytest.raises(ValueError, match=r"hidden_states \(meta\) .* where its weights are: model.to\(\"cpu"):
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
            ValueError, match=r"MixtralExperts, has_expert_dropout=True\) must have only flags"
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
    with pytest.raises(ValueError, match=r"gate \(GivenGate\)|outside|expert"):
        module(x, index + 6, weight)


def test_fp8_experts_find_pmoe_in_their_registry_and_are_refused() -> None:
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    assert (
        ALL_FP8_EXPERTS_FUNCTIONS["pmoe"]
        is importlib.import_module("pmoe.integrations.transformers.run").experts_forward
    )


# ---- other releases


def without(registry: Any, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    found = registry._find
    monkeypatch.setattr(registry, "_find", lambda name: None if name in modules else found(name))


def test_registering_again_changes_nothing_and_says_what_is_registered(registry: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.register() == integration.status
    assert integration.status.endswith(
        '"pmoe" is registered as experts_implementation and as ep_implementation'
    )


def test_without_the_expert_parallel_registry_only_the_experts_implementation_is_offered(
    registry: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(registry, monkeypatch, registry.EXPERT_PARALLEL)
    with pytest.warns(UserWarning, match=r"as an experts implementation only.*transformers>=5.23"):
        assert "experts implementation only" in registry.register()


def test_without_the_registry_of_experts_the_release_is_refused(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(registry, monkeypatch, registry.EXPERTS)
    with pytest.raises(ImportError, match=r"transformers \(5.*\) must be at least 5.7, whose registry"):
        registry.register()


def test_releases_whose_registry_takes_no_others_are_refused(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_version", lambda: "5.3.0.dev0")
    with pytest.raises(ImportError, match=r"transformers \(5.3.0.dev0\) must be at least 5.7"):
        registry.register()
    monkeypatch.setattr(registry, "_version", lambda: "6.0")
    registry.register()


def test_without_transformers_the_import_says_what_to_install(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers must be installed: pip install"):
        registry.register()
