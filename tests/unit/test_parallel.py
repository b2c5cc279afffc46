"""Parts of data and expert parallelism that need no second rank: arguments, and the marks of parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pmoe
from pmoe.experts import FFNExperts, initialise, make_stacked
from pmoe.experts.base import Experts, Shard
from pmoe.training.parallel import is_expert, make_meshes


@pytest.mark.parametrize("name", ["mp", "ep", "esp"])
@pytest.mark.parametrize("value", [0, -2, 1.0, True, "2", None])
def test_sizes_that_are_no_counts_are_refused(name: str, value: Any) -> None:
    error, rule = (ValueError, "must be at least 1") if type(value) is int else (TypeError, "must be an int")
    with pytest.raises(error, match=rf"{name} \({value!r}\) {rule}"):
        make_meshes(**{name: value})


def test_meshes_need_ranks() -> None:
    with pytest.raises(RuntimeError, match=r"torch.distributed must be initialised"):
        make_meshes()


def test_only_routed_experts_are_experts() -> None:
    layer = pmoe.MoELayer(4, 6, 2, shared_expert=3)
    found = {name for name, each in layer.named_parameters() if is_expert(each)}
    assert found == {"experts.w1", "experts.w2", "experts.b1", "experts.b2"}


def experts_of(count: int) -> FFNExperts:
    experts = FFNExperts(4, 6, 2, activation="relu", shard=Shard(count - 1, count))
    experts.mark_parameters()
    return experts


def assign(experts: Experts) -> Experts:
    state = {name: value.detach().clone() for name, value in experts.state_dict().items()}
    experts.load_state_dict(state, assign=True)
    return experts


WAYS: dict[str, Callable[[Experts], nn.Module]] = {
    "as it is": lambda experts: experts,
    "copied": copy.deepcopy,
    "unpickled": lambda experts: pickle.loads(pickle.dumps(experts)),
    "converted": lambda experts: experts.to(torch.float64),
    "made empty": lambda experts: experts.to_empty(device="cpu"),
    "assigned": assign,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_all_parts_of_an_expert_hold_stays_marked_as_copies(way: str) -> None:
    marked = WAYS[way](experts_of(3))
    copies = {name: getattr(each, "num_copies", 1) for name, each in marked.named_parameters()}
    assert copies == {"w1": 1, "w2": 1, "b1": 1, "b2": 3}
    assert all(is_expert(each) for each in marked.parameters())


def test_whole_experts_have_no_copies() -> None:
    assert not any(hasattr(each, "num_copies") for each in experts_of(1).parameters())


class WithScale(FFNExperts):
    """A subclass of experts that has one more parameter."""

    def __init__(self) -> None:
        super().__init__(4, 6, 2)
        self.scale = nn.Parameter(torch.ones(4))


def test_experts_with_parameters_of_their_own_cannot_be_cut() -> None:
    assert FFNExperts(4, 6, 2).hidden_dims() == {"w1": 1, "w2": 2, "b1": 1, "b2": None}
    experts = WithScale()
    assert experts.hidden_dims() is None
    with pytest.raises(TypeError, match=r"experts \(WithScale\) must be stacked or modules to be spread"):
        experts.keep(slice(0, 1), Shard())


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_cut_experts_are_those_that_the_rank_would_have_built(expert: str, device: str) -> None:
    whole = make_stacked(expert, 4, 6, 3, "gelu", True, device=device)
    cut = make_stacked(expert, 4, 6, 3, "gelu", True, device=device)
    if device == "cpu":
        for experts in (whole, cut):
            torch.manual_seed(0)
            initialise(experts, first_expert=0)
    shard = Shard(1, 2)
    cut.keep(slice(1, 3), shard)
    built = make_stacked(expert, 4, 6, 2, "gelu", True, shard=shard, device=device)
    if device == "cpu":
        torch.manual_seed(0)
        initialise(built, first_expert=1)
    assert (cut.num_local_experts, cut.shard, cut.shapes()) == (2, shard, built.shapes())
    for (name, mine), theirs in zip(cut.named_parameters(), built.parameters(), strict=True):
        assert mine.shape == theirs.shape and is_expert(mine), name
        assert mine.is_meta == (device == "meta") and (mine.is_meta or torch.equal(mine, theirs)), name
