"""Low-rank adapters of experts: names, bytes, schedules, what is frozen, and bad input."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import prune

import pmoe
from pmoe.call.sizes import memory_shape
from pmoe.experts import FFNExperts
from pmoe.experts.lora import LoraFFNExperts
from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import FREE, LineCost
from pmoe.planner.degree import Choice
from pmoe.planner.layer_seconds import simulated_step
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.profile import FORMAT, Profile, Versions
from pmoe.runners.features import SUPPORTED, Feature
from pmoe.schedule.restore import ALL_PAIRS, KEEP
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.separate_buffers import backward_schedule
from pmoe.schedule.tasks import Kind, Stages
from tests.adapted import ALPHA, RANK
from tests.kit import build, tokens
from tests.reference import relative_error
from tests.spread import named, spread
from tests.unit.test_footprint import TOKENS, measured

WEIGHT_GRADIENTS = {Kind.WGRAD, Kind.LOCAL_WGRAD}


def filled(layer: nn.Module, name: str = "default", seed: int = 5) -> None:
    """Draws all matrices of an adapter, so that it changes the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in pmoe.lora_adapters(layer, name).parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def test_a_new_adapter_changes_no_bit_and_is_all_that_is_trained() -> None:
    layer = build()
    x = tokens()
    before = layer(x)
    adapters = pmoe.add_lora(layer, rank=RANK)
    assert torch.equal(layer(x), before)
    trained = {name for name, parameter in layer.experts.named_parameters() if parameter.requires_grad}
    assert trained == {f"adapters.default.{weight}_{letter}" for weight in ("w1", "w2") for letter in "AB"}
    assert {id(each) for each in adapters.parameters()} == {
        id(layer.experts.get_parameter(name)) for name in trained
    }
    assert set(adapters.state_dict()) <= set(layer.state_dict())


def test_adapters_have_names_and_one_is_used_at_a_time() -> None:
    layer = build()
    x = tokens()
    outputs = {"none": layer(x)}
    for number, name in enumerate(("first", "second")):
        pmoe.add_lora(layer, rank=1 + number, name=name, shared=bool(number))
        filled(layer, name, seed=number)
        outputs[name] = layer(x)
    pmoe.use_lora(layer, "first")
    assert torch.equal(layer(x), outputs["first"])
    assert not any(parameter.requires_grad for parameter in pmoe.lora_adapters(layer, "second").parameters())
    with pmoe.disable_lora(layer):
        assert torch.equal(layer(x), outputs["none"])
        copied = copy.deepcopy(layer)
    assert torch.equal(layer(x), outputs["first"])
    assert torch.equal(copied(x), outputs["none"])
    pmoe.use_lora(copied, "second")
    assert torch.equal(copied(x), outputs["second"])
    assert relative_error(outputs["first"], outputs["none"]) > 1e-3


def test_a_choice_inside_disable_lora_stays_after_it() -> None:
    """Before, calls used the adapter from before the block, and the chosen one was trained."""
    layer = build()
    for name in ("first", "second"):
        pmoe.add_lora(layer, rank=RANK, name=name)
    with pmoe.disable_lora(layer), pmoe.disable_lora(layer):
        pmoe.use_lora(layer, "first")
    layer(tokens()).sum().backward()
    assert layer.experts.adapters.first.w2_B.grad.any()
    with pmoe.disable_lora(layer):
        for name in ("first", "second"):
            pmoe.remove_lora(layer, name)
    assert type(layer.experts) is FFNExperts


def test_backward_after_the_adapter_was_changed_differentiates_what_forward_computed() -> None:
    gradients = []
    for switch in (False, True):
        layer = build(pipeline=2, memory_reuse="S4")
        pmoe.add_lora(layer, rank=1, name="other")
        pmoe.add_lora(layer, rank=RANK, alpha=ALPHA)
        filled(layer)
        x = tokens().requires_grad_()
        y = layer(x)
        if switch:
            with pmoe.disable_lora(layer):
                y.sum().backward()
        else:
            y.sum().backward()
        gradients.append([x.grad, *(p.grad for p in pmoe.lora_adapters(layer, "default").parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def test_merged_adapters_give_a_plain_layer_and_come_out_again() -> None:
    for shared in (False, True):
        layer = build(expert="swiglu")
        x = tokens()
        weight = layer.experts.w1.detach().clone()
        pmoe.add_lora(layer, rank=RANK, alpha=ALPHA, shared=shared)
        filled(layer)
        adapted = layer(x)
        merged = pmoe.merge_lora(layer)
        assert type(layer.experts).__name__ == "SwiGLUExperts" and not hasattr(layer.experts, "adapters")
        assert set(layer.state_dict()) == set(build(expert="swiglu").state_dict())
        assert relative_error(layer(x), adapted) < 1e-12
        pmoe.unmerge_lora(layer, merged)
        assert relative_error(layer.experts.w1, weight) < 1e-12
        assert relative_error(layer(x), adapted) < 1e-12
        pmoe.remove_lora(layer)
        assert type(layer.experts).__name__ == "SwiGLUExperts"


@pytest.mark.parametrize("d_model, d_hidden", [(12, 3), (12, 6), (8, 8)])
def test_narrow_and_square_experts_are_merged_along_the_right_axes(d_model: int, d_hidden: int) -> None:
    """A merge that guesses axes from shapes drops or turns the change of narrow experts (unsloth-zoo 779)."""
    layer = build(expert="swiglu", d_model=d_model, d_hidden=d_hidden)
    x = tokens(width=d_model)
    pmoe.add_lora(layer, rank=RANK, alpha=ALPHA)
    filled(layer)
    adapted = layer(x)
    pmoe.merge_lora(layer)
    assert relative_error(layer(x), adapted) < 1e-12


def test_an_optimizer_of_before_a_merge_does_not_change_the_merged_adapter() -> None:
    layer = build()
    adapters = pmoe.add_lora(layer, rank=RANK)
    filled(layer)
    optimizer = torch.optim.AdamW(adapters.parameters(), lr=0.1)
    layer(tokens()).square().sum().backward()
    optimizer.step()
    wanted = layer(tokens())
    merged = pmoe.merge_lora(layer)
    optimizer.step()  # with the gradients of the last step, if they were still there
    pmoe.unmerge_lora(layer, merged)
    assert relative_error(layer(tokens()), wanted) < 1e-12
    layer(tokens()).square().sum().backward()
    before = layer(tokens())
    optimizer.step()  # the parameters are the same as before
    assert relative_error(layer(tokens()), before) > 1e-3
    merged = pmoe.merge_lora(layer)
    with torch.no_grad():
        next(adapters.parameters()).add_(1)
    with pytest.raises(ValueError, match=r"adapter of model that was changed since merge_lora.*optimizer"):
        pmoe.unmerge_lora(layer, merged)


def test_state_dicts_bring_alpha_and_refuse_another_rank() -> None:
    layer = build()
    pmoe.add_lora(layer, rank=RANK, alpha=ALPHA)
    filled(layer)
    state = pmoe.lora_adapters(layer).state_dict()
    other = build()
    pmoe.lora_adapters(other_with(other, rank=RANK)).load_state_dict(state)
    assert torch.equal(other(tokens()), layer(tokens()))
    wrong = other_with(build(), rank=1)
    with pytest.raises(
        (ValueError, RuntimeError), match=r"rank \(1\) of the adapter must be that of the state dict, 2"
    ):
        pmoe.lora_adapters(wrong).load_state_dict(state)


def other_with(layer: pmoe.MoELayer, **options: Any) -> pmoe.MoELayer:
    pmoe.add_lora(layer, **options)
    return layer


def test_float32_adapters_of_narrower_weights_are_cast_and_get_float32_gradients() -> None:
    layer = build(dtype=torch.bfloat16)
    pmoe.add_lora(layer, rank=RANK, alpha=ALPHA)
    layer.experts.adapters.float()
    filled(layer)
    layer(tokens(dtype=torch.bfloat16)).sum().backward()
    for parameter in pmoe.lora_adapters(layer).parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_train_adapters_as_others_do(reentrant: bool) -> None:
    """Everything but the adapter is frozen. A reentrant checkpoint asks for an input with a gradient."""
    gradients = []
    for checkpoint in (False, True):
        layer = build(pipeline=2)
        layer.requires_grad_(False)
        pmoe.add_lora(layer, rank=RANK, alpha=ALPHA)
        filled(layer)
        x = tokens().requires_grad_(reentrant)
        if checkpoint:
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        else:
            y = layer(x)
        y.square().sum().backward()
        gradients.append([parameter.grad for parameter in pmoe.lora_adapters(layer).parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None and ours.any() and torch.equal(ours, theirs)


@pytest.mark.parametrize("way", ["plain", "reentrant", "contexts"])
def test_an_adapter_that_is_switched_before_a_checkpoint_runs_again_is_named(way: str) -> None:
    """The gradients of the first adapter were computed with the values of the second."""
    options: dict[str, Any] = {"use_reentrant": way == "reentrant"}
    if way == "contexts":
        options["context_fn"] = pmoe.checkpoint_contexts
    layer = build(pipeline=2)
    for name in ("first", "second"):
        pmoe.add_lora(layer, rank=RANK, name=name)
        filled(layer, name)

    def forward(name: str) -> Tensor:
        pmoe.use_lora(layer, name)
        y: Tensor = torch.utils.checkpoint.checkpoint(layer, tokens().requires_grad_(), **options)
        return y

    switches: dict[str, Callable[[], object]] = {
        "'second'": lambda: pmoe.use_lora(layer, "second"),
        "none": lambda: pmoe.remove_lora(layer, "first"),
    }
    for now, switch in switches.items():
        y = forward("first")
        switch()
        with pytest.raises(RuntimeError, match=f"adapter {now}, and its forward pass used 'first'"):
            y.sum().backward()
    forward("second").sum().backward()


@pytest.mark.parametrize("training", [True, False])
def test_an_adapter_is_named_although_another_call_used_the_one_of_the_second_pass(training: bool) -> None:
    """Both calls have the same routing, and a layer in eval mode remembers none."""
    layer = build(pipeline=2).train(training)
    for name in ("first", "second"):
        pmoe.add_lora(layer, rank=RANK, name=name)
        filled(layer, name)

    def forward(name: str) -> Tensor:
        pmoe.use_lora(layer, name)
        x = tokens().requires_grad_()
        y: Tensor = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return y.sum()

    first = forward("first")
    with pytest.raises(RuntimeError, match="adapter 'second', and its forward pass used 'first'"):
        (first + forward("second")).backward()
    (forward("second") + forward("second")).backward()


def test_autocast_trains_float32_adapters() -> None:
    layer = build(dtype=torch.float32)
    pmoe.add_lora(layer, rank=RANK, alpha=ALPHA)
    filled(layer)
    x = tokens(dtype=torch.float32)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16 and relative_error(y.detach().float(), expected.detach()) < 0.05
    y.float().square().sum().backward()
    for parameter in pmoe.lora_adapters(layer).parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32 and parameter.grad.any()


def test_reset_parameters_gives_the_values_of_a_new_layer() -> None:
    def made(device: str) -> pmoe.MoELayer:
        torch.manual_seed(3)
        layer = pmoe.MoELayer(6, 10, 4, 2, device=device)
        pmoe.add_lora(layer, rank=2, name="each")
        pmoe.add_lora(layer, rank=2, shared=True, name="shared")
        return layer

    layer = made("meta").to_empty(device="cpu")
    layer.reset_parameters()
    layer(torch.randn(3, 6)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.isfinite().all(), name
        assert bool(parameter.any()) != name.endswith("_B"), name


# ---- PEFT


@pytest.mark.parametrize("expert, bias", [("ffn", True), ("swiglu", False)])
def test_peft_on_stacked_weights_gives_the_same_as_an_adapter_of_pmoe(expert: str, bias: bool) -> None:
    for n, pair in ((1, False), (2, "S1"), (3, "S2"), (4, "S4")):
        options = {"expert": expert, "bias": bias, "pipeline": n, "memory_reuse": pair}
        layer = build(**options)
        pmoe.add_lora(layer, rank=RANK, alpha=ALPHA)
        filled(layer)
        model = nn.Sequential(build(**options))
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_parameters=["0.experts.w1", "0.experts.w2"])
        adapted = peft.get_peft_model(model, config)
        theirs = {name: value for name, value in adapted.named_parameters() if "lora_" in name}
        of_weight = {}
        for path, module in adapted.named_modules():
            if type(module).__name__ == "ParamWrapper":
                of_weight[module.parameter_name] = [theirs[f"{path}.lora_{x}.default.weight"] for x in "AB"]
        ours = layer.experts.adapter("default")
        with torch.no_grad():
            for weight, (down, up) in of_weight.items():
                # PEFT has A as (E R, I), and B as (O, R E), with the experts last.
                down.copy_(ours.of(weight)[0].reshape(down.shape))
                up.copy_(ours.of(weight)[1].permute(1, 2, 0).reshape(up.shape))
        xs = [tokens().requires_grad_() for _ in range(2)]
        outputs = [layer(xs[0]), adapted(xs[1])]
        assert relative_error(outputs[1].detach(), outputs[0].detach()) < 1e-12
        for output in outputs:
            (output * tokens(seed=4)).sum().backward()
        assert relative_error(xs[1].grad, xs[0].grad) < 1e-12
        for weight, (down, up) in of_weight.items():
            of_a, of_b = (parameter.grad for parameter in ours.of(weight))
            assert relative_error(down.grad, of_a.reshape(down.shape)) < 1e-12
            assert relative_error(up.grad, of_b.permute(1, 2, 0).reshape(up.shape)) < 1e-12


def test_peft_that_froze_adapters_is_undone_by_use_lora() -> None:
    model = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), build())
    pmoe.add_lora(model, rank=RANK)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["0"]))
    assert not any(parameter.requires_grad for parameter in pmoe.lora_adapters(adapted).parameters())
    pmoe.use_lora(adapted)
    assert all(parameter.requires_grad for parameter in pmoe.lora_adapters(adapted).parameters())
    assert sum(parameter.requires_grad for parameter in adapted.parameters()) == 6


# ---- what is frozen


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_frozen_experts_have_no_tasks_of_weight_gradients(rotates: bool, n: int) -> None:
    layer = build(pipeline=n, memory_reuse=KEEP if rotates else False)
    layer.experts.requires_grad_(False)
    x = tokens().requires_grad_()
    with pmoe.recording() as journal:
        layer(x).sum().backward()
    kinds = {span.kind for span in journal.passes[1].spans}
    assert Kind.LOCAL in kinds and not kinds & WEIGHT_GRADIENTS
    found = x.grad.clone()
    layer.experts.requires_grad_()
    x.grad = None
    with pmoe.recording() as journal:
        layer(x).sum().backward()
    assert {span.kind for span in journal.passes[1].spans} & WEIGHT_GRADIENTS
    assert torch.equal(x.grad, found)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_frozen_experts_keep_their_bits_and_the_others_train_as_without_freezing(
    adapted: bool, make: Any
) -> None:
    options = {"lr": 0.1, "weight_decay": 0.1} | ({"momentum": 0.9} if make is torch.optim.SGD else {})
    layers = [build() for _ in range(2)]
    for layer in layers:
        if adapted:
            pmoe.add_lora(layer, rank=RANK)
            filled(layer)
            layer.experts.requires_grad_()
    frozen = pmoe.freeze_experts(layers[0], [1, 3])
    before = {name: value.detach().clone() for name, value in layers[0].experts.named_parameters()}
    optimizers = [make(layer.parameters(), **options) for layer in layers]
    gradients = []
    for layer, optimizer in zip(layers, optimizers, strict=True):
        layer(tokens()).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.experts.parameters()])
        optimizer.step()
    for (name, value), ours, theirs, other in zip(
        layers[0].experts.named_parameters(), *gradients, layers[1].experts.parameters(), strict=True
    ):
        assert not ours[[1, 3]].any() and torch.equal(ours[[0, 2]], theirs[[0, 2]]), name
        assert torch.equal(value[[1, 3]], before[name][[1, 3]]), name
        assert torch.equal(value[[0, 2]], other[[0, 2]]) and not torch.equal(
            value[[0, 2]], before[name][[0, 2]]
        )
    frozen.remove()
    layers[0](tokens()).square().sum().backward()
    optimizers[0].step()
    assert not torch.equal(layers[0].experts.w1[1], before["w1"][1])


def test_a_mask_freezes_the_experts_of_the_same_numbers() -> None:
    layers = [build() for _ in range(2)]
    pmoe.freeze_experts(layers[0], torch.tensor([False, True, False, True]))
    pmoe.freeze_experts(layers[1], [1, 3])
    for layer in layers:
        layer(tokens()).square().sum().backward()
    for first, second in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(first.grad, second.grad)
    assert not layers[0].experts.w1.grad[[1, 3]].any()
    with pytest.raises(ValueError, match=r"experts \(a mask of shape \(3,\)\) must have shape \(4,\)"):
        pmoe.freeze_experts(build(), torch.tensor([False, True, False]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_is_frozen_when_it_is_asked_for(copied: Callable[[Any], Any]) -> None:
    layer = build()
    pmoe.freeze_experts(layer, [1, 3])
    layer = copied(layer)
    layer(tokens()).square().sum().backward()
    assert layer.experts.w1.grad[1].any()
    pmoe.freeze_experts(layer, [0, 1])
    layer(tokens()).square().sum().backward()
    assert not layer.experts.w1.grad[[0, 1]].any() and layer.experts.w1.grad[3].any()


def assigned(layer: pmoe.MoELayer) -> pmoe.MoELayer:
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    return layer


def exchanged(layer: pmoe.MoELayer) -> pmoe.MoELayer:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return layer.float().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def materialised(layer: pmoe.MoELayer) -> pmoe.MoELayer:
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    return layer


@pytest.mark.parametrize("replaced", [assigned, exchanged, materialised])
def test_experts_stay_frozen_whatever_replaces_their_parameters(
    replaced: Callable[[pmoe.MoELayer], pmoe.MoELayer],
) -> None:
    layer = build().double()
    layer = layer.to("meta") if replaced is materialised else layer
    frozen = pmoe.freeze_experts(layer, [1, 3])
    layer = replaced(layer)
    for is_frozen in (True, False):
        loss = layer(tokens().double()).square().sum()
        (returned,) = torch.autograd.grad(loss, [layer.experts.w1], retain_graph=True)
        loss.backward()
        for gradient in (layer.experts.w1.grad, returned):
            assert gradient[[1, 3]].any() != is_frozen and gradient[0].any()
        frozen.remove()


def test_returned_gradients_of_frozen_experts_count_in_no_norm() -> None:
    """Zero-bubble schedules ask autograd for gradients, first of inputs, and add those of parameters.

    The gradients of frozen experts were in the norm by which the others are clipped.
    """
    layers = [build() for _ in range(2)]
    for layer in layers:
        pmoe.freeze_experts(layer, [1, 3])
    layers[0](tokens()).square().sum().backward()
    x = tokens().requires_grad_()
    loss = layers[1](x).square().sum()
    torch.autograd.grad(loss, [x], retain_graph=True)
    parameters = list(layers[1].parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    assert not layers[1].experts.w1.grad[[1, 3]].any()
    wanted, found = (pmoe.clip_grad_norm_(layer, 1.0) for layer in layers)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_experts_stay_frozen_when_their_parameters_get_other_names() -> None:
    layer = build()
    pmoe.freeze_experts(layer, [1, 3])
    prune.custom_from_mask(layer.experts, "w1", torch.ones_like(layer.experts.w1))
    parameter = layer.experts.w1_orig
    loss = layer(tokens()).square().sum()
    (returned,) = torch.autograd.grad(loss, [parameter], retain_graph=True)
    loss.backward()
    for gradient in (parameter.grad, returned):
        assert not gradient[[1, 3]].any() and gradient[[0, 2]].any()


def test_experts_that_are_not_trained_yet_may_be_frozen() -> None:
    layer = build()
    pmoe.add_lora(layer, rank=RANK)
    filled(layer)
    pmoe.freeze_experts(layer, [1, 3])
    layer(tokens()).square().sum().backward()
    adapter = pmoe.lora_adapters(layer)
    for parameter in adapter.parameters():
        assert not parameter.grad[[1, 3]].any() and parameter.grad[[0, 2]].any()
    assert layer.experts.w1.grad is None
    layer.experts.requires_grad_(True)
    layer(tokens()).square().sum().backward()
    assert not layer.experts.w1.grad[[1, 3]].any() and layer.experts.w1.grad[[0, 2]].any()


def test_layers_with_frozen_experts_get_no_adapter_and_take_none_back() -> None:
    layer = build()
    pmoe.add_lora(layer, rank=RANK)
    merged = pmoe.merge_lora(layer)
    frozen = pmoe.freeze_experts(layer, [1])
    words = (
        r"experts' w1 \(of which some experts are frozen\) must have no frozen experts to get an adapter: "
        r"call pmoe.freeze_experts after pmoe.add_lora and pmoe.unmerge_lora, or call remove\(\)"
    )
    for act in (lambda: pmoe.unmerge_lora(layer, merged), lambda: pmoe.add_lora(layer, rank=RANK)):
        with pytest.raises(ValueError, match=words):
            act()
    frozen.remove()
    pmoe.unmerge_lora(layer, merged)


def test_numbers_of_no_expert_and_frozen_layers_are_named() -> None:
    layer = build()
    for experts, kind, words in (
        ([4], ValueError, r"experts \(4 among them\) must be numbers from 0 to 3"),
        ([0.5], TypeError, r"experts \(0.5 among them\) must be ints"),
        (2, TypeError, r"experts \(2\) must be an iterable"),
    ):
        with pytest.raises(kind, match=words):
            pmoe.freeze_experts(layer, experts)
    pmoe.freeze_experts(layer, [0])
    with pytest.raises(ValueError, match=r"call remove\(\) on what pmoe.freeze_experts returned first"):
        pmoe.freeze_experts(layer, [1])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_frozen_schedule_keeps_the_order_of_all_other_tasks(n: int) -> None:
    stages = Stages(local=True, remote=True)
    for whole in (
        backward_schedule(n, stages),
        *(rotating("backward", n, stages, restore=p) for p in ALL_PAIRS),
    ):
        frozen = whole.frozen
        assert [task.name for task in frozen.tasks] == [
            task.name for task in whole.tasks if task.kind not in WEIGHT_GRADIENTS
        ]

        def before(schedule: Any, name: str) -> set[str]:
            waits = {task.name: task.waits for task in schedule.tasks}
            found: set[str] = set()
            left = [name]
            while left:
                for each in waits[left.pop()]:
                    if each not in found:
                        found.add(each)
                        left.append(each)
            return found

        names = {task.name for task in frozen.tasks}
        for name in names:
            assert before(frozen, name) == before(whole, name) & names


def test_the_planner_prices_the_weight_gradients_of_what_is_trained() -> None:
    profile = Profile(
        device="stored",
        device_type="cpu",
        num_ranks=1,
        backend="",
        dtype="float64",
        versions=Versions(torch="", cuda=None, file=FORMAT),
        compute=LineCost(0.0, 1.0),
        message=FREE.line,
        copy_out=FREE.line,
        copy_in=FREE.line,
        interference=Interference(),
        seconds=0.0,
        when="",
    )
    choice = Choice(forward=2, backward=2, restore=KEEP)
    layer = build()

    def seconds() -> dict[str, float]:
        sizes = replace(memory_shape(layer.layer_modules), num_ranks=1)
        tasks = simulated_step(sizes, profile, 10, choice)["backward"]
        found: dict[str, float] = {}
        for task in tasks:
            found[task.task.kind.value] = found.get(task.task.kind.value, 0.0) + task.end - task.start
        return found

    full = seconds()
    assert full["LW"] == pytest.approx(full["L"])
    pmoe.add_lora(layer, rank=1)
    adapted = seconds()
    # A row: w1 and w2 have 6 x 10 multiply-adds each, their adapters of rank 1 have 6 + 10 each, and
    # each matrix of an adapter needs two products for its gradient.
    assert adapted["L"] / full["L"] == pytest.approx((120 + 32) / 120)
    assert adapted["LW"] / full["LW"] == pytest.approx(2 * 32 / 120)
    layer.experts.requires_grad_(False)
    assert "LW" not in seconds()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pair, n", spread((False, *ALL_PAIRS), [1, 2, 4], every=3), ids=named)
def test_the_peak_of_a_step_is_within_two_percent_of_the_prediction(pair: Any, n: int) -> None:
    full = wide(pair, n).predict_memory(TOKENS)
    for shared, alpha in ((False, 8.0), (True, 12.0)):
        layer = wide(pair, n)
        pmoe.add_lora(layer, rank=8, alpha=alpha, shared=shared)
        found = measured(layer)
        predicted = layer.predict_memory(TOKENS, layer.row_counts)
        assert predicted.peak == pytest.approx(found.peak, rel=0.02)
        assert predicted.saved == pytest.approx(found.held, rel=0.02)
        bound = layer.predict_memory(TOKENS)
        assert found.peak <= bound.peak
        trained = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
        assert bound.gradients == 4 * trained
        assert full.gradients - bound.gradients > 0.8 * full.gradients


@pytest.mark.parametrize(
    "pair, n", [(False, 1), (False, 4), (ALL_PAIRS[0], 4), (ALL_PAIRS[-1], 4)], ids=named
)
def test_the_peak_with_frozen_experts_is_within_two_percent_of_the_prediction(pair: Any, n: int) -> None:
    layer = wide(pair, n)
    layer.experts.requires_grad_(False)
    found = measured(layer)
    predicted = layer.predict_memory(TOKENS, layer.row_counts)
    assert predicted.peak == pytest.approx(found.peak, rel=0.02)


def wide(pair: Any, n: int) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(64, 256, 4, pipeline=n, memory_reuse=pair)


# ---- bad input


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rank": 0}, ValueError, r"rank \(0\) must be at least 1"),
    ({"rank": 1.5}, TypeError, r"rank \(1.5\) must be an int"),
    ({"rank": 7}, ValueError, r"rank \(7\) must be at most 6, the smaller side of w1"),
    ({"rank": 2, "alpha": 0}, ValueError, r"alpha \(0\) must be None or a positive number"),
    ({"rank": 2, "targets": "w3"}, ValueError, r"targets \('w3'\) must be some of w1, w2"),
    ({"rank": 2, "targets": ()}, ValueError, r"targets \(\(\)\) must be some of w1, w2"),
    ({"rank": 2, "targets": 3}, TypeError, r"targets \(3\) must be an iterable"),
    ({"rank": 2, "shared": 1}, TypeError, r"shared \(1\) must be True or False"),
    ({"rank": 2, "name": "a.b"}, ValueError, r"name \('a.b'\) must be a Python identifier"),
    ({"rank": 2, "name": "keys"}, ValueError, r"name \('keys'\) must be a Python identifier"),
    ({"rank": 2, "name": 3}, TypeError, r"name \(3\) must be a string"),
]


@pytest.mark.parametrize("arguments, kind, words", BAD, ids=str)
def test_bad_arguments_are_named_and_change_nothing(
    arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    layer = build()
    with pytest.raises(kind, match=words):
        pmoe.add_lora(layer, **arguments)
    assert type(layer.experts) is FFNExperts and layer.experts.w1.requires_grad


def test_adapters_that_are_not_there_are_named_with_the_line_that_makes_them() -> None:
    layer = build()
    for act in (pmoe.use_lora, pmoe.merge_lora, pmoe.remove_lora, pmoe.lora_adapters):
        with pytest.raises(
            ValueError, match=r"name \('x'\) must be an adapter of model, which has none: call"
        ):
            act(layer, "x")
    with pytest.raises(ValueError, match="name .None. must be given where no adapter is in use"):
        pmoe.lora_adapters(layer)
    with pytest.raises(ValueError, match="must have a pmoe.MoELayer"):
        pmoe.add_lora(nn.Linear(2, 2), rank=1)
    pmoe.add_lora(layer, rank=1)
    with pytest.raises(ValueError, match=r"name \('default'\) must not be that of an adapter of model"):
        pmoe.add_lora(layer, rank=1)


def test_experts_that_cannot_have_adapters_are_named() -> None:
    layer = build(expert=lambda: nn.Linear(6, 6, dtype=torch.float64))
    with pytest.raises(TypeError, match="experts ModuleExperts. must have plain ffn or swiglu experts"):
        pmoe.add_lora(layer, rank=1)
    layer = build()
    nn.utils.parametrize.register_parametrization(layer.experts, "w1", nn.Identity())
    with pytest.raises(TypeError, match="must have plain ffn or swiglu experts"):
        pmoe.add_lora(layer, rank=1)


def test_what_reads_the_weights_alone_refuses_adapters_by_name() -> None:
    layer = build()
    pmoe.add_lora(layer, rank=1)
    assert isinstance(layer.experts, LoraFFNExperts)
    modules = layer.layer_modules
    for part in (
        "fused",
        "persistent",
        "one rank",
        "one rank's counts",
        "whole graph",
    ):
        assert "experts have adapters" in (replace(modules).refusal(part) or ""), part
    assert Feature.ADAPTERS not in SUPPORTED["graph capture"]
    for part in ("pipeline", "few rows", "padded counts", "memory", "memory budget", "copies"):
        assert "adapters" not in (modules.refusal(part) or ""), part
    for act in (
        lambda: next(pmoe.export_weights(layer, "mixtral")),
        lambda: pmoe.copy_into_experts(layer, nn.Linear(6, 6)),
        lambda: pmoe.prune_experts(layer.state_dict(), [0, 1]),
    ):
        with pytest.raises((ValueError, TypeError), match="pmoe.merge_lora"):
            act()


def test_calls_of_few_rows_compute_adapters() -> None:
    layer = build().eval()
    pmoe.add_lora(layer, rank=RANK)
    filled(layer)
    x = tokens(3)
    expected = layer(x).detach()
    with torch.no_grad():
        assert relative_error(layer(x), expected) < 1e-12
    assert layer.ran.path == "few rows"


def test_a_plan_of_options_counts_all_parameters_as_trained() -> None:
    sizes = sizes_from_options(6, 10, 4)
    assert sizes.trained_parameters == sizes.expert_parameters and not sizes.is_frozen
    assert sizes.gradient_multiply_adds == sizes.multiply_adds


def test_an_adapter_of_frozen_experts_trains_all_of_them_after_it_was_merged_and_they_were_freed() -> None:
    layer = pmoe.MoELayer(8, 12, 4, 2)
    pmoe.add_lora(layer, rank=2)
    frozen = pmoe.freeze_experts(layer, [1])
    merged = pmoe.merge_lora(layer)
    assert not any("adapters" in name for name in layer.experts.frozen_experts)
    frozen.remove()
    pmoe.unmerge_lora(layer, merged)
    layer(torch.randn(64, 8)).sum().backward()
    gradient = layer.experts.get_parameter("adapters.default.w1_B").grad
    assert gradient is not None and gradient.flatten(1).any(1).all()
