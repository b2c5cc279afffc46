"""A layer calls its gate, experts, shared expert and shared gate as modules, so that their hooks run.

If a library has replaced one of them, the replacement is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe import warn
from pmoe.call.module_calls import SharedGate
from tests.around import Around
from tests.kit import assert_same, build, gradients, tokens
from tests.reference import relative_error

PARTS = ("gate", "experts", "shared_expert", "shared_gate")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"pipeline": 2, "memory_reuse": "S4"},
    "padded": {"pad_to_capacity": True, "capacity_factor": 4.0},
    "modules": {"expert": lambda: nn.Linear(6, 6, dtype=torch.float64)},
}


def shared(**options: Any) -> pmoe.MoELayer:
    """Returns a layer with a gate, experts, a shared expert and its gate.

    With pad_to_capacity the layer has no shared expert, because the two cannot be combined.
    """
    others = {} if options.get("pad_to_capacity") else {"shared_expert": 5, "shared_gate": True}
    return build(**others, **options)


def parts_of(layer: pmoe.MoELayer) -> dict[str, nn.Module]:
    return {name: part for name in PARTS if (part := getattr(layer, name)) is not None}


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_every_part_run_in_torchs_order_and_change_nothing(way: str) -> None:
    layer = shared(**WAYS[way])
    before = gradients(layer)
    journal: list[str] = []
    for name, part in parts_of(layer).items():
        part.register_forward_pre_hook(lambda *_, name=name: journal.append(f"{name} begins"))
        part.register_forward_hook(lambda *_, name=name: journal.append(f"{name} ends"))
        if name != "gate":  # it returns a Routing, in which torch looks for no tensors
            part.register_full_backward_pre_hook(lambda *_, name=name: journal.append(f"{name} back"))
            part.register_full_backward_hook(lambda *_, name=name: journal.append(f"{name} back, done"))
    assert_same(gradients(layer), before, 1e-12)
    for name in parts_of(layer):
        assert journal.index(f"{name} begins") < journal.index(f"{name} ends")
        if name != "gate":
            assert journal.index(f"{name} ends") < journal.index(f"{name} back")
            assert journal.index(f"{name} back") < journal.index(f"{name} back, done")
    assert len(journal) == 4 * len(parts_of(layer)) - 2


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_of_experts_sees_their_rows_and_results_without_the_shared_expert(way: str) -> None:
    layer = shared(**WAYS[way])
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, arguments: Any, output: Tensor) -> None:
        seen.update(rows=arguments[0], output=output)

    def look_back(module: nn.Module, of_rows: Any, of_output: Any) -> None:
        seen.update(of_rows=of_rows[0], of_output=of_output[0])

    layer.experts.register_forward_hook(look)
    layer.experts.register_full_backward_hook(look_back)
    x = tokens().requires_grad_()
    y = layer(x)
    y.backward(tokens(seed=4))
    assert torch.equal(seen["rows"], x)
    routed = y.detach()
    if layer.shared_expert is not None:
        routed = routed - layer.shared_expert(x) * layer.shared_gate(x).sigmoid()
    assert relative_error(seen["output"].detach(), routed.detach()) < 1e-12
    assert torch.equal(seen["of_output"], tokens(seed=4))
    assert seen["of_rows"].shape == x.shape


def test_a_hook_may_replace_rows_and_results() -> None:
    layer = build()
    expected = 3 * build()(tokens() * 2)  # routed by the same gate: the order of its scores does not change
    layer.gate.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 2,))
    layer.experts.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 2,))
    layer.experts.register_forward_hook(lambda *given: given[2] * 3)
    assert relative_error(layer(tokens()).detach(), expected.detach()) < 1e-12


def test_a_hook_that_returns_other_rows_is_named() -> None:
    layer = build()
    layer.experts.register_forward_pre_hook(lambda _, arguments: (arguments[0][:3],))
    with pytest.raises(ValueError, match=r"pre-hook of layer.experts returned a tensor of shape \(3, 6\)"):
        layer(tokens())


def test_hooks_of_a_shared_expert_see_it_alone() -> None:
    layer = shared()
    before = gradients(layer)
    layer.shared_expert.register_forward_hook(lambda *given: given[2] * 0)
    alone = build(shared_expert=5, shared_gate=True)
    with torch.no_grad():
        alone.shared_expert.w2.zero_()
        alone.shared_expert.b2.zero_()
    assert relative_error(layer(tokens()).detach(), alone(tokens()).detach()) < 1e-12
    assert relative_error(layer(tokens()).detach(), before["y"]) > 1e-3


@pytest.mark.parametrize("kind", ["ffn", "swiglu", "module"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_shared_expert_with_hooks_computes_what_it_computes_without(kind: str, autocast: bool) -> None:
    options: dict[str, Any] = {"dtype": torch.float32} if autocast else {}
    if kind == "module":
        own = nn.Linear(6, 6, dtype=options.get("dtype", torch.float64))
        layer = build(shared_expert=own, shared_gate=True, **options)
    else:
        layer = build(expert=kind, shared_expert=5, shared_gate=True, **options)
    x = tokens(dtype=options.get("dtype", torch.float64))

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return layer(x)

    before = gradients(layer, x, run)
    layer.shared_expert.register_forward_hook(lambda *_: None)
    assert_same(gradients(layer, x, run), before, 0.05 if autocast else 1e-12)


def test_a_hook_on_all_modules_sees_every_part() -> None:
    layer = shared()
    seen: list[str] = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        layer(tokens())
    finally:
        handle.remove()
    assert set(seen) >= {"TopKGate", "FFNExperts", "SharedGate", "MoELayer"}
    assert seen.count("FFNExperts") == 2


def test_each_expert_that_is_a_module_is_called_where_it_has_rows() -> None:
    layer = build(expert=lambda: nn.Linear(6, 6, dtype=torch.float64), pipeline=2)
    rows: dict[int, int] = {}
    backward: set[int] = set()
    for number, expert in enumerate(layer.experts.local):
        expert.register_forward_hook(
            lambda _, arguments, __, number=number: rows.__setitem__(
                number, rows.get(number, 0) + len(arguments[0])
            )
        )
        expert.register_full_backward_hook(lambda *_, number=number: backward.add(number))
    layer(tokens().requires_grad_()).sum().backward()
    counts = layer.tokens_per_expert.tolist()
    assert rows == {number: count for number, count in enumerate(counts) if count}
    assert backward == set(rows)


class Doubled(pmoe.Callback, nn.Module):
    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * 2


def test_hooks_of_a_callback_which_is_not_called_are_told_of_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warn, "GIVEN", set())
    callback = Doubled()
    layer = build(callbacks=[callback])
    callback.register_forward_hook(lambda *_: None)
    with pytest.warns(
        UserWarning, match=r"callback_modules.0 \(a Doubled\) has forward_hooks that are not called"
    ):
        layer(tokens())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(tokens())


def test_a_callback_that_was_replaced_is_named() -> None:
    layer = build(callbacks=[Doubled()])
    layer.callback_modules[0] = nn.Sequential(layer.callback_modules[0])
    with pytest.raises(ValueError, match=r"callback_modules.0 \(a Sequential\) must be the Doubled"):
        layer(tokens())


# ---- what libraries put in a module's place


class Adapter(Around):
    """A wrapper that adds the result of a trained linear map to the module's result."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs) * self.scale


@pytest.mark.parametrize("wrap", [Around, lambda module: torch.compile(module, backend="eager")])
@pytest.mark.parametrize("name", PARTS)
def test_a_wrapper_in_a_modules_place_is_called(name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    layer = shared()
    before = gradients(layer)
    setattr(layer, name, wrap(getattr(layer, name)))
    after = {
        key.replace("base_layer.", "").replace("_orig_mod.", ""): value
        for key, value in gradients(layer).items()
    }
    assert_same(after, before, 1e-12)


@pytest.mark.parametrize("name", ["experts", "shared_expert", "shared_gate"])
def test_an_adapter_in_a_modules_place_counts_and_gets_its_gradient(name: str) -> None:
    layer = shared()
    layer.requires_grad_(False)  # as adapters are trained
    before = layer(tokens())
    adapter = Adapter(getattr(layer, name))
    setattr(layer, name, adapter)
    layer(tokens()).sum().backward()
    assert adapter.scale.grad is not None and adapter.scale.grad.abs() > 0
    with torch.no_grad():
        adapter.scale.fill_(3.0)
    assert relative_error(layer(tokens()), before) > 1e-3


class Copied(nn.Module):
    """A wrapper that trains a copy of a module and keeps the original, as PEFT's modules_to_save does."""

    def __init__(self, module: nn.Module, copy: nn.Module) -> None:
        super().__init__()
        self.original_module, self.trained = module, copy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.trained(*args, **kwargs)


@pytest.mark.parametrize("way", ["plain", "chunks", "modules"])
def test_experts_that_a_wrapper_calls_instead_of_the_first_are_those_that_compute(way: str) -> None:
    layer, other = build(**WAYS[way]), build(**WAYS[way])
    with torch.no_grad():
        for parameter in other.experts.parameters():
            parameter.mul_(1.5)
    expected = other(tokens())
    layer.experts = Copied(layer.experts, other.experts)
    y = layer(tokens())
    assert relative_error(y.detach(), expected.detach()) < 1e-12
    y.sum().backward()
    for name, parameter in layer.experts.named_parameters():
        assert (parameter.grad is None) == name.startswith("original_module"), name


def test_a_gate_inside_a_wrapper_is_asked_what_it_does() -> None:
    layer = build(gate="expert_choice", capacity_factor=1.0)
    before = gradients(layer)
    layer.gate = Around(layer.gate)
    after = {key.replace("base_layer.", ""): value for key, value in gradients(layer).items()}
    assert_same(after, before, 1e-12)


def test_a_wrapper_that_does_not_call_its_experts_is_named() -> None:
    class Silent(Around):
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            return x

    layer = build()
    layer.experts = Silent(layer.experts)
    with pytest.raises(ValueError, match=r"experts \(Silent\) did not call the pmoe.Experts that it wraps"):
        layer(tokens())


@pytest.mark.parametrize("kind", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_a_checkpoint_around_the_experts_alone_is_right_or_refused(kind: CheckpointImpl) -> None:
    layer = shared(pipeline=2)
    before = gradients(layer)
    layer.experts = checkpoint_wrapper(layer.experts, checkpoint_impl=kind)
    if kind is CheckpointImpl.REENTRANT:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            gradients(layer)
        return
    after = {
        name.replace("_checkpoint_wrapped_module.", ""): value for name, value in gradients(layer).items()
    }
    assert_same(after, before, 1e-12)


def test_a_shared_gate_is_a_linear_to_those_who_look_for_one_and_computes_in_float32() -> None:
    layer = build(shared_expert=5, shared_gate=True, dtype=torch.bfloat16)
    assert isinstance(layer.shared_gate, nn.Linear) and isinstance(layer.shared_gate, SharedGate)
    assert layer.shared_gate(tokens(dtype=torch.bfloat16)).dtype == torch.float32


def test_a_shared_gate_that_gives_no_number_a_token_is_named() -> None:
    layer = build(shared_expert=5, shared_gate=True)
    layer.shared_gate = nn.Linear(6, 2, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"shared_gate \(Linear\) returned \(11, 2\); it must return one number"
    ):
        layer(tokens())


# ---- libraries that work by hooks


def test_accelerate_offloads_a_layers_parameters_between_calls() -> None:
    for options in ({}, {"pipeline": 2, "memory_reuse": "S4", "expert": "swiglu"}, WAYS["modules"]):
        layer = shared(**options)
        with torch.no_grad():
            before = layer(tokens())
            accelerate.cpu_offload(layer, execution_device=torch.device("cpu"))
            assert all(parameter.is_meta for parameter in layer.parameters())
            assert relative_error(layer(tokens()), before) < 1e-12
        assert all(parameter.is_meta for parameter in layer.parameters())


def test_a_layer_left_on_the_meta_device_is_named() -> None:
    with torch.device("meta"):
        layer = pmoe.MoELayer(6, 10, 4, 2)
    with pytest.raises(ValueError, match="meta"):
        layer(torch.randn(3, 6))


def test_peft_trains_adapters_of_every_part() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.moe = shared(dtype=torch.float32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.moe(self.inner(x))

    names = ["experts.w1", "experts.w2", "shared_expert.w1", "gate.weight"]
    config = peft.LoraConfig(
        r=2, target_modules="all-linear", target_parameters=[f"moe.{name}" for name in names]
    )
    torch.manual_seed(0)
    model = Model()
    x = tokens(dtype=torch.float32)
    before = model(x).detach()
    adapted = peft.get_peft_model(model, config)
    assert relative_error(adapted(x).detach(), before) < 1e-6
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
    y = adapted(x)
    assert relative_error(y.detach(), before) > 1e-2
    y.square().sum().backward()
    without = [
        name for name, parameter in trained.items() if parameter.grad is None or not parameter.grad.any()
    ]
    assert not without
    assert len(trained) == 2 * (2 + len(names))
    assert relative_error(adapted.merge_and_unload()(x).detach(), y.detach()) < 1e-5
    assert isinstance(model.moe.experts, pmoe.Experts)


def test_ddp_around_the_experts_alone_is_refused(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = build()
        layer.experts = DistributedDataParallel(layer.experts)
        with pytest.raises(ValueError, match="wrap the whole model"):
            layer(tokens())
    finally:
        dist.destroy_process_group()
