"""Parts of `pmoe.parallelize` that need only one process: parameter groups, clipping, arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import pmoe
from tests import fresh


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(4, 4), pmoe.MoELayer(4, 6, 2)


def test_parameter_groups_keep_order_and_options() -> None:
    first, second, third = (nn.Parameter(torch.ones(1)) for _ in range(3))
    model = nn.Module()
    model.first, model.second = first, second
    assert pmoe.parameter_groups(model) == [{"params": [first, second]}]
    assert pmoe.parameter_groups(iter([second, first])) == [{"params": [second, first]}]
    groups = [{"params": [first], "lr": 1.0}, {"params": iter([second, third]), "weight_decay": 0.0}]
    assert pmoe.parameter_groups(groups) == [
        {"params": [first], "lr": 1.0},
        {"params": [second, third], "weight_decay": 0.0},
    ]
    assert pmoe.parameter_groups([{"params": first}]) == [{"params": [first]}]
    named = [("first", first), ("second", second)]
    assert pmoe.parameter_groups(named) == [{"params": named}]
    assert pmoe.parameter_groups([]) == []
    torch.optim.AdamW(pmoe.parameter_groups(named), fused=True)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3, math.inf])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_alone_clipping_is_torchs(norm_type: float, foreach: bool | None) -> None:
    norms, clipped = [], []
    for clip in (torch.nn.utils.clip_grad_norm_, pmoe.clip_grad_norm_):
        torch.manual_seed(0)
        model = Block()
        for parameter in (*model.mix.parameters(), model.moe.experts.w1):
            parameter.grad = torch.randn_like(parameter)
        norms.append(clip(model.parameters(), 0.5, norm_type, False, foreach))
        clipped.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-6, atol=0)
    for mine, theirs in zip(*clipped, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def test_clipping_takes_a_model_a_tensor_or_a_list_of_them() -> None:
    model = Block()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert pmoe.clip_grad_norm_(model, math.inf).item() == pytest.approx(math.sqrt(count))
    assert pmoe.clip_grad_norm_(list(model.parameters()), math.inf).item() == pytest.approx(math.sqrt(count))
    assert pmoe.clip_grad_norm_(model.mix.bias, 1.0).item() == 2.0
    assert model.mix.bias.grad.norm().item() == pytest.approx(1.0)
    assert pmoe.clip_grad_norm_([], 1.0).item() == 0.0


def test_bad_arguments_of_clipping_are_refused() -> None:
    model = Block()
    model.mix.bias.grad = torch.full((4,), math.nan)
    with pytest.raises(ValueError, match=r"max_norm \(-1.0\) must be a number of at least 0"):
        pmoe.clip_grad_norm_(model, -1.0)
    with pytest.raises(ValueError, match=r"norm_type \(0.0\) must be positive, or inf"):
        pmoe.clip_grad_norm_(model, 1.0, 0)
    with pytest.raises(RuntimeError, match=r"the norm of order 2.0 of all gradients \(nan\) must be finite"):
        pmoe.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert pmoe.clip_grad_norm_(model, 1.0).isnan()


@pytest.mark.parametrize("mesh", [None, "ep", 2])
def test_parallelize_needs_a_mesh(mesh: Any) -> None:
    with pytest.raises(TypeError, match=r"mesh \(.*\) must be a torch.distributed.device_mesh.DeviceMesh"):
        pmoe.parallelize(Block(), mesh)


def test_names_that_are_slow_to_import_load_at_their_first_use() -> None:
    program = (
        "import sys, pmoe\n"
        "slow = {'torch.distributed.tensor', 'torch.distributed.checkpoint', 'torch.distributed.fsdp'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
        "assert {'parallelize', 'load_checkpoint'} <= set(dir(pmoe))\n"
        "assert callable(pmoe.parallelize) and 'torch.distributed.tensor' in sys.modules\n"
        "assert all(hasattr(pmoe, name) for name in pmoe.__all__)\n"
        "assert not hasattr(pmoe, 'parallelise')\n"
    )
    fresh.run(program)
