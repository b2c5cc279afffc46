"""Checkpoints: what one number of ranks saves, another loads; and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from pmoe.training.checkpoint import CheckpointError
from tests.spec.kit import M, Step, assert_close, error_of, make, on_ranks, tokens

EXPERTS = 4


def model_of(world: int, options: dict[str, Any], esp: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(M, M), make(num_experts=EXPERTS, **options)).double()
    if world > 1:
        mesh = init_device_mesh("cpu", (world // esp, esp), mesh_dim_names=("ep", "esp"))
        torch.manual_seed(1)
        layer = make(num_experts=EXPERTS, mesh=mesh, **options)
        model = pmoe.parallelize(nn.Sequential(model[0], layer).double(), mesh)
    return model, torch.optim.AdamW(pmoe.parameter_groups(model), lr=0.01)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Parameters and Adam's averages, as one process has them."""
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key, value in {"": parameter.detach(), **state}.items():
            found[f"{name} {key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def save(rank: int, world: int, folder: str, options: dict[str, Any], esp: int = 1) -> Step:
    """Every rank has the same tokens, so that the dense part stays the same without a wrapper."""
    model, optimizer = model_of(world, options, esp)
    model(tokens(6)).square().mean().backward()
    optimizer.step()
    pmoe.save_checkpoint(folder, model, optimizer, step=1, extra={"epoch": 3})
    return contents(model, optimizer)


def load(rank: int, world: int, folder: str, options: dict[str, Any], esp: int = 1) -> tuple[Step, int, Any]:
    """Into other values than were saved."""
    model, optimizer = model_of(world, options, esp)
    model(tokens(6, 50 + rank)).square().mean().backward()
    optimizer.step()
    loaded = pmoe.load_checkpoint(folder, model, optimizer)
    return contents(model, optimizer), loaded.step, loaded.extra


def on(world: int, job: Any, *args: Any) -> list[Any]:
    return [job(0, 1, *args)] if world == 1 else on_ranks(world, job, *args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("saved_by, loaded_by", [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (1, 4), (2, 2)])
def test_another_number_of_ranks_loads_what_was_saved(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    expected = on(saved_by, save, str(tmp_path), {})[0]
    for got, step, extra in on(loaded_by, load, str(tmp_path), {}):
        assert (step, extra) == (1, {"epoch": 3})
        assert_close(got, expected)  # no wrapper keeps the ranks' dense parts the same to the bit
        experts = [name for name in got if "experts." in name]
        assert_close(
            {name: got[name] for name in experts}, {name: expected[name] for name in experts}, limit=0
        )


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_experts_split_over_ranks_are_loaded_by_one_process(expert: str, tmp_path: Path) -> None:
    options = {"expert": expert}
    expected = on(4, save, str(tmp_path), options, 2)[0]
    ((got, *_),) = on(1, load, str(tmp_path), options)
    assert_close(got, expected, limit=0)


def mismatch(rank: int, world: int, folder: str) -> str:
    model, optimizer = model_of(world, {"d_hidden": 16})
    before = contents(model, optimizer)
    message = error_of(lambda: pmoe.load_checkpoint(folder, model, optimizer))
    assert_close(contents(model, optimizer), before, limit=0)
    return message


@pytest.mark.parametrize("world", [1, 2])
def test_other_sizes_are_refused_by_name_on_every_rank_and_change_nothing(world: int, tmp_path: Path) -> None:
    on(1, save, str(tmp_path), {})
    messages = on(world, mismatch, str(tmp_path))
    assert len(set(messages)) == 1
    assert messages[0].startswith("CheckpointError: ") and "experts.w1" in messages[0]


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no .*latest\.json"):
        load(0, 1, str(tmp_path), {})


def test_the_newest_checkpoints_stay_and_each_can_be_asked_for(tmp_path: Path) -> None:
    model, optimizer = model_of(1, {})
    for step in (1, 2, 3):
        with torch.no_grad():
            model[0].bias.fill_(step)
        pmoe.save_checkpoint(tmp_path, model, optimizer, step=step, keep=2)
    assert pmoe.load_checkpoint(tmp_path, model, optimizer).step == 3
    assert pmoe.load_checkpoint(tmp_path, model, optimizer, step=2).step == 2
    assert model[0].bias[0] == 2
    assert "CheckpointError" in error_of(lambda: pmoe.load_checkpoint(tmp_path, model, optimizer, step=1))


def test_a_save_that_fails_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_of(1, {})
    pmoe.save_checkpoint(tmp_path, model, optimizer, step=1)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(CheckpointError):
            pmoe.save_checkpoint(tmp_path, model, optimizer, step=2)
    assert pmoe.load_checkpoint(tmp_path, model, optimizer).step == 1


def test_training_goes_on_as_if_it_had_not_been_interrupted(tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, places: range) -> None:
        for at in places:
            optimizer.zero_grad()
            model(tokens(6, at)).square().mean().backward()
            optimizer.step()

    whole = model_of(1, {})
    steps(*whole, range(4))
    first = model_of(1, {})
    steps(*first, range(2))
    pmoe.save_checkpoint(tmp_path, *first, step=2)
    second = model_of(1, {})
    pmoe.load_checkpoint(tmp_path, *second)
    steps(*second, range(2, 4))
    assert_close(contents(*second), contents(*whole), limit=0)


def state_of_rank(rank: int, world: int) -> Step:
    return dict(make(num_experts=EXPERTS).state_dict())


def test_plain_state_dicts_of_all_ranks_join_along_the_first_dimension() -> None:
    whole = make(num_experts=EXPERTS).state_dict()
    parts = on_ranks(2, state_of_rank)
    for name, value in whole.items():
        joined = torch.cat([part[name] for part in parts]) if name.startswith("experts.") else parts[0][name]
        assert torch.equal(joined, value)


def test_a_model_without_an_optimizer_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model, _ = model_of(1, {})
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    pmoe.save_checkpoint(tmp_path, model, step=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert pmoe.load_checkpoint(tmp_path, model).step == 7
    assert_close(model.state_dict(), expected, limit=0)
