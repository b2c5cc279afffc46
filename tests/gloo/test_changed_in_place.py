"""Parameters that change in place between a layer's passes, in all their forms on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe import MoELayer, Restore
from pmoe.experts.operands import local_part
from pmoe.schedule.restore import ALL_PAIRS
from tests import kit
from tests.gloo.kit import NUM_EXPERTS, TOKENS
from tests.kit import D_MODEL, loss_of, tokens
from tests.own_experts import mlp
from tests.pool import ranks
from tests.spread import spread

CHANGED = "modified by an inplace operation"
LAYERS: dict[str, dict[str, Any]] = {
    "ffn": {"pipeline": 2},
    "swiglu, shared": {"expert": "swiglu", "shared_expert": 5, "shared_gate": True},
    "modules": {"expert": mlp, "pipeline": 2},
}
WAYS: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda parameter: parameter.mul_(1.5),
    "copy_": lambda parameter: parameter.copy_(parameter * 0.5),
    "its part": lambda parameter: local_part(parameter).mul_(1.5),
}
FORMS = ["plain", "parallelized", "wrapped in DDP", "with a gate sharded by FSDP2"]


def formed(form: str, world: int, **options: Any) -> tuple[MoELayer, nn.Module]:
    """Returns the layer, and the module that is called in its place."""
    layer = kit.build(NUM_EXPERTS, **options)
    if form == "plain":
        return layer, layer
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    pmoe.parallelize(layer, mesh)
    if form == "wrapped in DDP":
        return layer, DistributedDataParallel(layer)
    if form == "with a gate sharded by FSDP2":
        fully_shard(layer, mesh=mesh, ignored_params=pmoe.expert_parameters(layer))
    return layer, layer


def error_of(layer: MoELayer, module: nn.Module, x: Tensor, change: Any) -> str:
    layer.zero_grad(set_to_none=True)
    loss = loss_of(layer, module(x.clone().requires_grad_()))
    with torch.no_grad():
        change()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def linear_raises(form: str, world: int) -> bool:
    """Returns whether torch's linear layer in this form reports that its weight was changed."""
    linear: nn.Module = nn.Linear(D_MODEL, D_MODEL).double()
    if form == "with a gate sharded by FSDP2":
        fully_shard(linear, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
    y = linear(tokens().requires_grad_())
    with torch.no_grad():
        linear.weight.mul_(1.5)
    try:
        y.sum().backward()
    except RuntimeError:
        return True
    return False


def changes_job(rank: int, world: int, form: str, name: str, pair: Restore | bool) -> None:
    layer, module = formed(form, world, memory_reuse=pair, **LAYERS[name])
    x = tokens(TOKENS[world][rank], 10 + rank)
    assert not error_of(layer, module, x, lambda: None)
    gate_raises = linear_raises(form, world)
    # The biases of modules are nothing that a gradient needs.
    for which in [name for name, each in layer.named_parameters() if each.dim() > 1]:
        for way, change in WAYS.items():
            if form == "wrapped in DDP":  # which takes no further call after an error in backward
                layer, module = formed(form, world, memory_reuse=pair, **LAYERS[name])
            # FSDP2 has other parameters behind a forward pass than before.
            error = error_of(layer, module, x, lambda: change(layer.get_parameter(which)))  # noqa: B023
            assert (CHANGED in error) == (which.startswith("experts") or gate_raises), (which, way, error)
    for which in [name for name, _ in layer.named_parameters()] if form != "wrapped in DDP" else ():
        assert not error_of(layer, module, x, lambda: layer.get_parameter(which).data.mul_(1.5))  # noqa: B023


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form, name, pair", spread(FORMS, [*LAYERS], [False, *ALL_PAIRS], every=5))
def test_every_form_raises_as_torchs_own_layers_do(form: str, name: str, pair: Restore | bool) -> None:
    ranks(2).run(changes_job, form, name, pair)


def steps_job(rank: int, world: int, form: str, name: str, options: dict[str, Any]) -> None:
    layer, module = formed(form, world, memory_reuse="S4", **LAYERS[name])
    x = tokens(TOKENS[world][rank], 10 + rank)
    groups = pmoe.parameter_groups(module) if form != "plain" else layer.parameters()
    optimizer = torch.optim.AdamW(groups, lr=0.1, **options)

    def step() -> None:
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    are_laid_out = any(hasattr(each, "to_local") for each in layer.experts.parameters())
    # Torch's own layers do not notice a fused step either.
    assert (CHANGED in error_of(layer, module, x, step)) == (are_laid_out or "fused" not in options)
    if form != "wrapped in DDP":
        optimizer.zero_grad()
        assert not error_of(layer, module, x, lambda: None)  # all go on together
        optimizer.step()


@pytest.mark.parametrize(
    "form, name, options", spread(FORMS, [*LAYERS], [{}, {"foreach": True}, {"fused": True}], every=3)
)
def test_an_optimizers_step_between_the_passes_raises_on_every_rank(
    form: str, name: str, options: dict[str, Any]
) -> None:
    """It raises also in steps of many tensors at once, for which torch does not count versions of
    DTensors.
    """
    ranks(2).run(steps_job, form, name, options)


def autocast_job(rank: int, world: int, name: str) -> None:
    layer, _ = formed("parallelized", world, **LAYERS[name])
    layer.float()
    x = tokens(TOKENS[world][rank], 10 + rank, dtype=torch.float32)

    class Under(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return layer(x)

    for _, parameter in layer.experts.named_parameters():
        assert not error_of(layer, Under(), x, lambda parameter=parameter: parameter.mul_(1.5))


@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast_copies_are_what_counts(name: str) -> None:
    ranks(2).run(autocast_job, name)
