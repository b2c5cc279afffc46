"""A state dict says which experts it has. On one rank, which has all of them, nothing else changes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.decide.stored_state import KEY
from pmoe.experts.ffn import FFNExperts

M, H, E = 6, 8, 4
WHOLE = {
    **{"first_expert": 0, "num_local_experts": E, "num_experts": E, "shard": 0, "num_shards": 1},
    **{"copy_part": 0, "num_copy_parts": 1, "rank": 0, "num_ranks": 1, "are_equal": False},
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Linear(H, M))


def model(expert: Any = "ffn", **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(M, M), pmoe.MoELayer(M, H, E, 2, expert=expert, **options))


def through_a_file(state: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_says_whose_experts_it_holds(expert: Any, weights_only: bool) -> None:
    found = through_a_file(model(expert).state_dict(), weights_only)
    assert found._metadata["1.experts"][KEY] == WHOLE
    assert copy.deepcopy(found)._metadata["1.experts"][KEY] == WHOLE


def test_shared_experts_say_nothing_and_keys_are_those_of_the_parameters() -> None:
    found = model(shared_expert=4)
    state = found.state_dict()
    assert KEY not in state._metadata["1.shared_expert"]
    assert set(state) == {name for name, _ in found.named_parameters()}


def test_copies_and_replaced_experts_say_it_too() -> None:
    for found in (copy.deepcopy(model()), pickle.loads(pickle.dumps(model()))):
        assert found.state_dict()._metadata["1.experts"][KEY] == WHOLE
        found[1].experts = FFNExperts(M, H, E)
        for parameter in found[1].experts.parameters():
            nn.init.zeros_(parameter)
        found(torch.randn(3, M))
        state = found.state_dict()
        assert state._metadata["1.experts"][KEY] == WHOLE
        assert len(found[1].experts._state_dict_hooks) == 1


def other_place(state: Any, **changes: Any) -> Any:
    state = copy.deepcopy(state)
    state._metadata["1.experts"][KEY].update(changes)
    return state


def test_experts_of_another_place_are_refused_naming_both() -> None:
    found = model()
    before = copy.deepcopy(found.state_dict())
    state = other_place(found.state_dict(), first_expert=4, num_experts=8, rank=1, num_ranks=2)
    with pytest.raises(
        ValueError, match="1.experts: .*experts 4 to 7 of 8, saved by rank 1 of 2.* 0 to 3 of 4"
    ):
        found.load_state_dict(state)
    state = other_place(found.state_dict(), shard=1, num_shards=2, rank=1, num_ranks=2)
    with pytest.raises(ValueError, match="part 1 of 2 of each"):
        found.load_state_dict(state, strict=False)
    assert all(map(torch.equal, before.values(), found.state_dict().values()))


def test_a_file_of_one_of_several_ranks_is_told_by_its_sizes() -> None:
    found, state = model(), model().state_dict()
    for name in [name for name in state if ".experts." in name]:
        state[name] = state[name][:2]
    with pytest.raises(RuntimeError, match="size mismatch for 1.experts.w1"):
        found.load_state_dict(other_place(state, num_local_experts=2, num_ranks=2))


def test_without_experts_in_it_a_state_dict_may_be_anybodys() -> None:
    found = model()
    state = other_place(found.state_dict(), first_expert=2, num_ranks=2)
    for name in [name for name in state if ".experts." in name]:
        del state[name]
    missing, _ = found.load_state_dict(state, strict=False)
    assert len(missing) == 4


def test_one_rank_loads_whatever_fits() -> None:
    source, x = model(), torch.randn(5, M)
    for state in (source.state_dict(), dict(source.state_dict()), through_a_file(source.state_dict(), True)):
        for options in ({}, {"assign": True}, {"strict": False}):
            torch.manual_seed(1)
            target = nn.Sequential(nn.Linear(M, M), pmoe.MoELayer(M, H, E, 2))
            target(x)
            target.load_state_dict(copy.deepcopy(state), **options)
            assert torch.equal(target(x), source(x)) and not target[1].experts.was_loaded
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(M, M), pmoe.MoELayer(M, H, E, 2))
    target.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(target(x), source(x))


# ---- upcycling


def as_tensors(dense: nn.Sequential) -> Mapping[str, Tensor]:
    return {"w1": dense[0].weight, "b1": dense[0].bias, "w2": dense[2].weight, "b2": dense[2].bias}


@pytest.mark.parametrize("given", ["module", "tensors", "modules", "a module's tensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_expert_becomes_the_dense_network(given: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    dense, x = mlp().to(dtype), torch.randn(5, M, dtype=dtype)
    expert: Any = mlp if "module" in given and given != "module" else "ffn"
    layer = pmoe.MoELayer(M, H, E, 2, expert=expert, dtype=dtype)
    value = {"tensors": as_tensors(dense), "a module's tensors": dense.state_dict()}.get(given, dense)
    pmoe.copy_into_experts(layer, value)
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(layer(x), dense(x), **tolerance)


WRONG: dict[str, tuple[Any, str]] = {
    "too few": (nn.Linear(M, H), "must have two torch.nn.Linear"),
    "too many": (nn.Sequential(mlp(), mlp()), "must have two torch.nn.Linear"),
    "one bias": (nn.Sequential(nn.Linear(M, H), nn.Linear(H, M, bias=False)), "biases in all"),
    "no bias": (nn.Sequential(nn.Linear(M, H, bias=False), nn.Linear(H, M, bias=False)), "tensors w1, w2"),
    "another width": (nn.Sequential(nn.Linear(M, 9), nn.Linear(9, M)), r"w1: \(9, 6\).* \(8, 6\)"),
    "another activation": (
        nn.Sequential(nn.Linear(M, H), nn.ReLU(), nn.Linear(H, M)),
        r"dense \(with ReLU\(\)\) must have the activation of the experts, gelu",
    ),
    "another gelu": (
        nn.Sequential(nn.Linear(M, H), nn.GELU(approximate="tanh"), nn.Linear(H, M)),
        r"dense \(with GELU\(approximate='tanh'\)\) must have",
    ),
    "names": ({"weight": torch.ones(2)}, "must have those of one expert: b1, b2, w1, w2"),
    "no tensor": ({"w1": 1, "w2": 2, "b1": 3, "b2": 4}, "w1: int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_dense_network_of_these_sizes_is_refused(name: str) -> None:
    layer, (dense, message) = model()[1], WRONG[name]
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=message):
        pmoe.copy_into_experts(layer, dense)
    assert all(map(torch.equal, before.values(), layer.state_dict().values()))


def test_other_kinds_are_refused_by_name() -> None:
    swiglu = pmoe.MoELayer(M, H, E, 2, expert="swiglu")
    with pytest.raises(ValueError, match="gate_proj, up_proj, down_proj"):
        pmoe.copy_into_experts(swiglu, mlp())
    with pytest.raises(TypeError, match="layer .Linear"):
        pmoe.copy_into_experts(nn.Linear(2, 2), mlp())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="meta device"):
        pmoe.copy_into_experts(pmoe.MoELayer(M, H, E, 2, device="meta"), mlp())
