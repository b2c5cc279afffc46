"""pmoe as an experts implementation of transformers, on one rank.

Models are compared with the library's own eager implementation. Other tests: options, other releases.
"""

from __future__ import annotations

import copy
import gc
import importlib
import io
import sys
import types
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import pmoe
from pmoe.experts.base import ExpertRows
from pmoe.experts.borrowed import BorrowedExperts
from tests.spread import named
from tests.tiny_transformers import (
    MODELS,
    as_by_default,  # noqa: F401 (a fixture)
    batch,
    integration,
    make_model,
    relative,
    trained,
)

pytestmark = pytest.mark.timeout(300)  # the first test imports transformers, which takes its time


@pytest.fixture
def registry() -> types.ModuleType:
    return importlib.import_module("pmoe.integrations.transformers.registry")


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
        {"pipeline": 2, "pipeline_backward": 4, "memory_reuse": "S4"},
        {"pipeline": True, "memory_reuse": True, "memory_budget": "8MiB"},
    ],
    ids=str,
)
def test_they_are_equal_however_the_pipeline_runs(name: str, options: dict[str, Any]) -> None:
    assert_same_step(name, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_compiled_model_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    ids = batch(3)
    wanted, plain = trained(make_model(name, "pmoe"), ids)
    model = make_model(name, "pmoe")
    model.compile(backend="aot_eager", fullgraph=True)
    found, ours = trained(model, ids)
    torch._dynamo.reset()
    assert relative(found.loss, wanted.loss) < 1e-6
    worst = max((relative(ours[each], plain[each]), each) for each in plain)
    assert worst[0] < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["no parameter", "gate.weight"])
def test_a_compiled_model_with_gradient_checkpointing_is_one_graph(frozen: str) -> None:
    """torch raised AssertionError, because it cannot run an operator with an order again in backward."""
    ids = batch(3)
    results = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        model = make_model("Mixtral", "pmoe")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
        if is_compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        results.append(trained(model, ids, use_cache=False))
    torch._dynamo.reset()
    (wanted, plain), (found, ours) = results
    assert relative(found.loss, wanted.loss) < 1e-6 and ours.keys() == plain.keys()
    worst = max((relative(ours[each], plain[each]), each) for each in plain)
    assert worst[0] < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_equal_calls_in_a_compiled_function_stay_two(backend: str) -> None:
    """A compiler joins equal operators without an order. Each call keeps what its own backward pass needs."""
    model = make_model("Mixtral", "pmoe")
    block = model.model.layers[0].mlp

    def both(x: Tensor) -> Tensor:
        return (block(x) * 2 + block(x).square()).sum()

    results = []
    for function in (both, torch.compile(both, backend=backend, fullgraph=True)):
        torch._dynamo.reset()
        torch.manual_seed(5)
        x = torch.randn(2, 8, model.config.hidden_size, requires_grad=True)
        block.zero_grad()
        function(x).backward()
        results.append([x.grad, *(each.grad for each in block.parameters())])
    torch._dynamo.reset()
    assert max(map(relative, results[1], results[0])) < 1e-5


# ---- whose the weights are


def test_in_a_graph_under_autocast_the_output_of_experts_has_the_type_of_their_input() -> None:
    experts = make_model("Mixtral", "pmoe").model.layers[0].mlp.experts
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    index = torch.tensor([[0, 1], [7, 3], [2, 5], [6, 4], [1, 0]])

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: Tensor = experts(x, index, weights)
        return 2 * y if y.dtype == torch.float32 else 3 * y  # decided where the graph is traced

    torch._dynamo.reset()
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_weights_are_used_where_they_lie(name: str) -> None:
    model, seen = make_model(name, "pmoe"), set()
    compute = BorrowedExperts.compute

    def watched(self: Any, given: ExpertRows, weight: Tensor, **options: Any) -> Any:
        seen.update(each.data_ptr() for each in given.parameters)
        return compute(self, given, weight, **options)

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
    with mock.patch("pmoe.integrations.transformers.layers.borrow", run):
        found = trained(model, ids)[1]
    assert run.call_count == 4  # two layers, run forward and again in backward
    assert all(relative(found[each], wanted[each]) < 1e-6 for each in wanted)


def flipping(model: Any) -> None:
    """Makes the first layer's router choose the next expert instead, in every second call."""
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


def test_options_of_fewer_bytes_reach_the_layers() -> None:
    model, ids = make_model("Mixtral", "pmoe"), batch(2)
    model.eval()
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        options = {"wire": "e4m3", "wire_backward": "bfloat16", "wire_combine": "bfloat16"}
        options |= {"allow": "e4m3", "products": "e4m3"}
        integration.configure(memory_reuse=True, **options)
        rounded = [model(input_ids=ids).logits for _ in range(2)]  # the second call could be a short one
    for layer in integration.layers(model).values():
        assert {name: getattr(layer, name) for name in options} == options
        assert any(pair.rounds for pair in layer.layer_modules.pairs)
    assert torch.equal(*rounded) and not torch.equal(rounded[0], exact)


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
        ({"pipelines": 2}, r"pipelines \(2\) must be left out: the options are pipeline, .*send_once"),
        ({"memory_reus": "S4"}, r"memory_reus \('S4'\) must be left out: .*: did you mean memory_reuse\?"),
        ({"top_k": 2}, r"top_k \(2\) must be left out"),
        ({"pipeline": 0}, r"pipeline \(0\)"),
        ({"pipeline": 10**9}, r"pipeline \(1000000000\) must be .* at most 1024"),
        ({"pipeline": "fast"}, r"pipeline \('fast'\)"),
        ({"memory_reuse": "S5"}, r"memory_reuse \('S5'\)"),
        ({"memory_budget": "2 apples"}, r"memory_budget \('2 apples'\) must be a number of bytes"),
        ({"slack": 0.5}, r"slack \(0.5\) must be a number of at least 1"),
        ({"order": "random"}, r"order \('random'\) must be"),
        ({"dispatch": object()}, r"dispatch \(<object.*\) must be a name"),
        ({"send_once": 1}, r"send_once \(1\) must be True or False"),
        ({"bypass_local": False}, r"bypass_local \(False\) must be left out"),
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
    assert importlib.import_module("pmoe.integrations.transformers.layers")._options == {"pipeline": 2}


# ---- other releases


def without(registry: Any, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    found = registry._find
    monkeypatch.setattr(
        registry, "_find", lambda module, name: None if module in modules else found(module, name)
    )


def test_registering_again_changes_nothing(registry: Any) -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.integrations.moe import ExpertsInterface

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.register()
    run = importlib.import_module("pmoe.integrations.transformers.in_graph").run_experts_module
    parallel = importlib.import_module("pmoe.integrations.transformers.expert_parallel").PipelinedEP
    assert ExpertsInterface()["pmoe"] is run and EPImplementationInterface()["pmoe"] is parallel


def test_without_the_expert_parallel_registry_only_the_experts_implementation_is_offered(
    registry: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(registry, monkeypatch, registry.EXPERT_PARALLEL)
    with pytest.warns(UserWarning, match=r"as an experts implementation only.*transformers>=5.23"):
        registry.register()


def test_a_newer_release_than_was_tested_is_registered_with_one_warning(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pmoe.warn.GIVEN", set())
    monkeypatch.setattr("transformers.__version__", "6.0")
    with pytest.warns(UserWarning, match=r"transformers 6\.0 is newer than") as told:
        registry.register()
        registry.register()
    assert len(told) == 1


def test_without_the_registry_of_experts_the_release_is_refused(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(registry, monkeypatch, registry.EXPERTS)
    with pytest.raises(
        ImportError, match=r"transformers \(5.*\) must be at least 5.7: older releases have no registry"
    ):
        registry.register()


def test_releases_whose_registry_takes_no_others_are_refused(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.3.0.dev0")
    with pytest.raises(ImportError, match=r"transformers \(5.3.0.dev0\) must be at least 5.7"):
        registry.register()


def test_without_transformers_the_import_says_what_to_install(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"transformers must be installed: pip install"):
        registry.register()
