"""Kinds of parameters: an expert's bias has two dimensions, but counts as a bias and not as a matrix."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import pmoe
from pmoe.experts.ffn import FFNExperts

M, H, E = 6, 8, 4


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(M)
        self.linear = nn.Linear(M, M)
        self.head_bias = nn.Parameter(torch.zeros(2, M // 2))
        self.moe = pmoe.MoELayer(M, H, E, 2, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.linear(self.norm(x)))


def model(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, M), Block(**options))


def named(found: nn.Module, groups: list[dict[str, Any]]) -> dict[tuple[str, bool], set[str]]:
    """Returns the names of the parameters by (kind, stacked). Each must be in exactly one group."""
    names = {parameter: name for name, parameter in found.named_parameters()}
    inside = [parameter for group in groups for parameter in group["params"]]
    assert len(inside) == len(set(inside)) == len(names)
    by_kind: dict[tuple[str, bool], set[str]] = {}
    for group in groups:
        own = by_kind.setdefault((group["kind"], group["stacked"]), set())
        own.update(names[parameter] for parameter in group["params"])
    return by_kind


def test_groups_are_made_by_what_parameters_are() -> None:
    found = model(shared_expert=4, shared_gate=True, gate="xmoe")
    groups = pmoe.parameter_groups(found, lr=0.1, weight_decay=0.01)
    stacks = [f"1.moe.{part}" for part in ("experts", "shared_expert")]
    assert named(found, groups) == {
        ("matrices", False): {"1.linear.weight"},
        ("matrices", True): {f"{part}.{name}" for part in stacks for name in ("w1", "w2")},
        ("embeddings", False): {"0.weight"},
        ("gates", False): {
            *("1.moe.gate.projection", "1.moe.gate.weight", "1.moe.gate.log_temperature"),
            "1.moe.shared_gate.weight",
        },
        ("biases", False): {"1.norm.weight", "1.norm.bias", "1.linear.bias", "1.head_bias"},
        ("biases", True): {f"{part}.{name}" for part in stacks for name in ("b1", "b2")},
    }
    scalar = found[1].moe.gate.log_temperature
    for group in groups:
        assert group["lr"] == 0.1
        is_zero = group["kind"] == "biases" or any(each is scalar for each in group["params"])
        assert group["weight_decay"] == (0.0 if is_zero else 0.01)
    torch.optim.AdamW(groups, fused=True)


def test_experts_that_are_modules_and_gates_that_are_modules_are_told_apart() -> None:
    class OwnGate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = pmoe.gates.TopKGate(M, E, 2)
            self.extra = nn.Linear(M, M)

        def forward(self, x: torch.Tensor) -> pmoe.Routing:
            return self.router(self.extra(x))

    found = model(expert=lambda: nn.Sequential(nn.Linear(M, M), nn.LayerNorm(M)), gate=OwnGate())
    by_kind = named(found, pmoe.parameter_groups(found, weight_decay=0.1))
    experts = [f"1.moe.experts.local.{at}" for at in range(E)]
    assert by_kind["matrices", False] == {"1.linear.weight", *(f"{each}.0.weight" for each in experts)}
    assert {f"{each}.1.weight" for each in experts} <= by_kind["biases", False]
    assert by_kind["gates", False] == {
        f"1.moe.gate.{name}" for name in ("router.weight", "extra.weight", "extra.bias")
    }


def test_a_tied_weight_is_an_embedding_and_is_named_once() -> None:
    found = nn.Sequential(nn.Linear(M, 5, bias=False), nn.Embedding(5, M))
    found[1].weight = found[0].weight
    (group,) = pmoe.parameter_groups(found, lr=1.0)
    assert (group["kind"], group["lr"], len(group["params"])) == ("embeddings", 1.0, 1)
    assert "weight_decay" not in group


def test_without_options_groups_are_what_they_were() -> None:
    found = model()
    assert pmoe.parameter_groups(found) == [{"params": list(found.parameters())}]


def test_options_need_a_model_and_are_checked() -> None:
    found = model()
    with pytest.raises(
        TypeError, match="parameters .list. must be a model where lr or weight_decay is given"
    ):
        pmoe.parameter_groups(list(found.parameters()), lr=0.1)
    with pytest.raises(ValueError, match="weight_decay .-1. must be"):
        pmoe.parameter_groups(found, weight_decay=-1)
    with pytest.raises(TypeError, match="lr .'0.1'. must be a number"):
        pmoe.parameter_groups(found, lr="0.1")  # type: ignore[arg-type]
    groups = pmoe.parameter_groups(found, lr=torch.tensor(0.1))
    assert all(torch.is_tensor(group["lr"]) for group in groups)


def assigned(found: nn.Module) -> nn.Module:
    found.load_state_dict(copy.deepcopy(found.state_dict()), assign=True)
    return found


def from_meta(found: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return model(shared_expert=4).to_empty(device="cpu")


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "built": lambda found: found,
    "to": lambda found: found.to(torch.bfloat16),
    "deepcopy": copy.deepcopy,
    "pickle": lambda found: pickle.loads(pickle.dumps(found)),
    "assigned": assigned,
    "from meta": from_meta,
}


@pytest.mark.parametrize("change", CHANGES)
def test_marks_of_stacked_parameters_survive(change: str) -> None:
    found = CHANGES[change](model(shared_expert=4))
    marked = {name for name, each in found.named_parameters() if getattr(each, "stacked", False)}
    parts = ("experts", "shared_expert")
    assert marked == {f"1.moe.{part}.{name}" for part in parts for name in ("w1", "w2", "b1", "b2")}


def test_parameters_behind_pruning_and_parametrizations_are_still_stacked() -> None:
    experts = FFNExperts(M, H, E)
    prune.l1_unstructured(experts, "b1", 0.5)
    parametrize.register_parametrization(experts, "w1", nn.Tanh())
    experts.mark_parameters()
    found = nn.Sequential(experts)
    by_kind = named(found, pmoe.parameter_groups(found, weight_decay=0.1))
    assert by_kind == {
        ("matrices", True): {"0.parametrizations.w1.original", "0.w2"},
        ("biases", True): {"0.b1_orig", "0.b2"},
    }


# ---- tools that go by the number of dimensions, and what docs/training.md writes in their place


def test_muon_takes_the_matrices_of_two_dimensions_and_no_stacked_bias() -> None:
    found = model()
    groups = pmoe.parameter_groups(found, lr=0.1, weight_decay=0.01)
    matrices = [group for group in groups if group["kind"] == "matrices" and not group["stacked"]]
    others = [group for group in groups if not any(group is each for each in matrices)]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
    found(torch.tensor([0, 1, 2, 3])).square().sum().backward()
    trained = [each for each in found.parameters() if each.grad is not None]
    before = [each.detach().clone() for each in trained]
    for optimizer in optimizers:
        optimizer.step()
    assert len(trained) > 8 and not any(map(torch.equal, before, trained))
    by_rule = [each for each in found.parameters() if each.ndim == 2]
    assert any(each is found[1].moe.experts.b1 for each in by_rule)  # Muon would take it without a word


def test_the_rule_of_transformers_decays_experts_biases_and_groups_do_not() -> None:
    pytest.importorskip("transformers")
    from transformers.trainer_pt_utils import get_parameter_names

    found = model()
    decays = get_parameter_names(found, [nn.LayerNorm], ["bias", "layernorm", "rmsnorm"])
    assert {"1.moe.experts.b1", "1.moe.experts.b2"} <= set(decays)
    by_kind = named(found, pmoe.parameter_groups(found, weight_decay=0.1))
    assert by_kind["biases", True] == {"1.moe.experts.b1", "1.moe.experts.b2"}
