"""The pool's switch to NCCL (tests/backend.py), with gloo and the CPU in the place of NCCL and GPUs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import backend
from tests.backend import GLOO, NCCL, STAND_IN, OnDevice, Place
from tests.gloo.kit import build, one_step
from tests.kit import assert_same, tokens
from tests.pool import Pool, ranks


def step(rank: int, world: int, shift: Tensor) -> dict[str, Any]:
    layer = build(memory_reuse="S4")
    with torch.no_grad():
        layer.gate.weight.add_(shift)
    return one_step(layer, rank, world)


def seen(rank: int, world: int) -> tuple[str, str | None, str, list[Any]]:
    modes = [type(each).__name__ for each in torch.overrides._get_current_function_mode_stack()]
    device = torch.distributed.distributed_c10d._get_default_group().bound_device_id
    return dist.get_backend(), os.environ.get("NCCL_HOSTID"), os.environ.get("NCCL_NET", ""), [device, modes]


def fails(rank: int, world: int) -> None:
    raise ValueError(f"what rank {rank} did")


def test_the_pool_runs_a_layer_by_the_switch_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = torch.full((1,), 0.25, dtype=torch.float64)
    expected = ranks(2).run(step, shift)
    monkeypatch.setenv(backend.VARIABLE, STAND_IN)
    with Pool(2) as pool:
        assert pool.run(seen) == [
            ("gloo", f"pmoe-{rank}", "Socket", [None, ["OnDevice"]]) for rank in range(2)
        ]
        for ours, plain in zip(pool.run(step, shift), expected, strict=True):
            assert_same(ours, plain)
        with pytest.raises(AssertionError, match="(?s)rank 1:\n.*what rank 1 did"):
            pool.run(fails)
    assert ranks(2).run(seen) == [("gloo", None, "", [None, []])] * 2


@pytest.mark.parametrize("name", ["", "nccl-shared", "NCCL"])
def test_only_a_backend_that_there_is_is_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(backend.VARIABLE, name)
    if not name:
        assert backend.chosen() == GLOO
        return
    with pytest.raises(ValueError, match=f"PMOE_TESTS_BACKEND must be .*, and is '{name}'"):
        backend.chosen()


def test_variables_are_those_of_a_shared_gpu_only_where_gpus_are_fewer_than_ranks() -> None:
    assert backend.environment(1, 2, gpus=2, version=(2, 29, 7)) == {"CUDA_MODULE_LOADING": "EAGER"}
    for ranks_, gpus in ((2, 1), (4, 2), (4, 3)):
        shared = backend.environment(1, ranks_, gpus=gpus, version=(2, 29, 7))
        assert shared["NCCL_HOSTID"] == "pmoe-1" and shared["CUDA_MODULE_LOADING"] == "EAGER"
    assert [backend.device_of(rank, 2).index for rank in range(4)] == [0, 1, 0, 1]


def test_a_rank_prepares_its_device_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for torch's questions about GPUs."""
    set_devices = list[torch.device]()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="PMOE_TESTS_BACKEND=nccl needs a GPU"):
        backend.prepare(NCCL, 0, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_devices.append)
    monkeypatch.setattr(backend, "nccl_version", lambda: (2, 30, 7))
    place = backend.prepare(NCCL, 1, 2)
    assert place == Place("nccl", torch.device("cuda", 0)) and place.is_gpu
    assert set_devices == [torch.device("cuda", 0)]
    assert os.environ["NCCL_HOSTID"] == "pmoe-1" and os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert backend.patience(NCCL) > backend.patience(STAND_IN) == backend.patience(GLOO) == 1


def test_new_tensors_are_on_the_device_unless_one_is_named() -> None:
    """ "meta" stands in for a GPU."""
    with OnDevice(torch.device("meta")):
        module = nn.Linear(3, 4)
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1), requires_grad=True)
        made = [
            torch.ones(2), torch.tensor([1.0]), torch.arange(3), torch.empty(0), tokens(3), torch.rand(2),
            torch.randperm(4), torch.full((2,), 1.0), torch.empty_like(torch.zeros(2)), module.weight, drawn,
        ]  # fmt: skip
        assert [each.device.type for each in made] == ["meta"] * len(made)
        assert drawn.requires_grad and drawn.is_leaf
        assert torch.ones(2, device="cpu").device.type == "cpu"
        assert torch.rand(2, device="cpu").device.type == "cpu"


def test_random_numbers_are_those_of_the_cpu() -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(3)
        weight = torch.empty(4, 3)
        nn.init.kaiming_uniform_(weight, a=2)
        nn.init.normal_(tensor=weight[1:])
        generator = torch.Generator().manual_seed(5)
        return [
            weight, nn.Linear(3, 2).weight.detach(), torch.randn(3, 2, generator=generator),
            torch.randn(size=(2, 2)), torch.randint(9, (4,)), torch.normal(0.0, 1.0, (3,)),
            torch.rand_like(weight), torch.bernoulli(torch.full((6,), 0.5)),
            torch.multinomial(torch.ones(7), 3), torch.empty(5).exponential_(2),
        ]  # fmt: skip

    expected = draw()
    with OnDevice(torch.device("cpu")):
        for ours, plain in zip(draw(), expected, strict=True):
            assert torch.equal(ours, plain)


class Elsewhere:
    """A tensor of another device, as far as a draw into it looks."""

    device = torch.device("cuda", 0)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def detach(self) -> Elsewhere:
        return self

    def cpu(self) -> Tensor:
        return self.held.clone()

    def copy_(self, drawn: Tensor) -> None:
        self.held.copy_(drawn)


def test_a_draw_into_a_tensor_of_another_device_is_made_on_the_cpu_and_copied() -> None:
    torch.manual_seed(2)
    expected = torch.empty(5).uniform_(1, 2)
    elsewhere = Elsewhere(torch.zeros(5))
    for args, kwargs in (((elsewhere, 1, 2), {}), ((1, 2), {"self": elsewhere})):
        torch.manual_seed(2)
        elsewhere.held.zero_()
        assert backend.draw_in_place(Tensor.uniform_, args, kwargs) is elsewhere
        assert torch.equal(elsewhere.held, expected)


def test_tensors_go_to_the_device_and_back_in_whatever_holds_them() -> None:
    meta = torch.device("meta")
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    got = backend.moved(
        {"a": [torch.ones(1), (torch.ones(2), "text")], "b": weight, "c": nn.Linear(1, 1)}, meta
    )
    assert got["a"][0].device == got["a"][1][0].device == got["b"].device == got["c"].weight.device == meta
    assert got["a"][1][1] == "text" and type(got["a"][1]) is tuple
    assert isinstance(got["b"], nn.Parameter) and not got["b"].requires_grad
