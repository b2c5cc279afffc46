"""The layers that are recorded: at least one for each path that a call may take.

Letters: W ranks, n chunks, E experts, M = d_model, H = d_hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

import pmoe
from pmoe.gates import DeepSeekGate, ExternalGate
from tests import own_experts
from tests.recorded import internals

M, H, E = 32, 48, 8
TOKENS = {1: (96,), 2: (96, 64), 4: (64, 0, 96, 40)}
PAIRS = [
    pmoe.Restore(d, h) for d in ("keep", "offload", "communicate") for h in ("keep", "offload", "recompute")
]
FLOAT32, FLOAT64 = torch.float32, torch.float64

Making = Callable[[int, torch.dtype], Any]
"""Makes an option's value for each layer that is built: (experts of this rank, dtype) -> value."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One layer and how it is called.

    options: of MoELayer; making: those of them that each layer needs an object of its own for.
    switches: those that exist to measure. mesh: sizes of "ep" and "esp"; mesh_names: their order in the mesh.
    load: where the gate sends tokens. way: how the step calls the layer.
    stand_in: the runner whose kernels, which need a GPU, are replaced by their definitions.
    frozen: by rank, the beginning of the names of parameters that need no gradient.
    carries_gradients: other layers' gradients are reduced inside its backward pass.
    """

    world: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    making: Mapping[str, Making] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    top_k: int = 2
    tokens: tuple[int, ...] = ()
    dtype: torch.dtype = FLOAT32
    mesh: tuple[int, int] | None = None
    mesh_names: tuple[str, str] = ("ep", "esp")
    load: str = "mixed"
    way: str = "call"
    stand_in: str = ""
    autocast: bool = False
    frozen: tuple[str, ...] = ()
    input_needs_grad: bool = True
    carries_gradients: bool = False

    def __str__(self) -> str:
        """What is not as by default: a recording holds it, so that another configuration is not compared."""
        chosen = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value not in ((), {}, each.default):
                chosen.append(f"{each.name}={_shown(value)}")
        return ", ".join(chosen)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(each)}" for name, each in value.items()) + "}"
    return str(getattr(value, "__name__", value))


# ---- what users give a layer


class EveryPoint(pmoe.Callback):
    """Each hook changes values in a way of its own; what is sent has two columns more."""

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x.sin()

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return torch.cat([rows * 2, rows[:, :2].exp()], dim=1)

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows[:, :-2] + rows[:, -1:].tanh()

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.square()

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.cos()

    def before_moe_end(self, y: Tensor) -> Tensor:
        return y * 3


class Scaling(pmoe.Callback, nn.Module):
    """Has a parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, M, dtype=dtype))

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.factor


class GatedShared(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Linear(M, M, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a(x).sigmoid()


class OwnGate(nn.Module):
    """A user's gate that drops some choices itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, M, dtype=dtype))

    def forward(self, x: Tensor) -> pmoe.Routing:
        probability = (x @ self.weight.t()).sigmoid()
        weight, expert = probability.topk(2)
        return pmoe.Routing(expert=expert, weight=weight, l_aux=probability.mean(), keep=weight > 0.6)


def every_point(local: int, dtype: torch.dtype) -> list[pmoe.Callback]:
    return [EveryPoint()]


def scaling(local: int, dtype: torch.dtype) -> list[pmoe.Callback]:
    return [Scaling(dtype)]


def gated_shared(local: int, dtype: torch.dtype) -> nn.Module:
    return GatedShared(dtype)


def own_gate(local: int, dtype: torch.dtype) -> nn.Module:
    return OwnGate(dtype)


def given_gate(local: int, dtype: torch.dtype) -> nn.Module:
    return ExternalGate()


def grouped_deepseek(local: int, dtype: torch.dtype) -> nn.Module:
    return DeepSeekGate(M, E, 2, num_groups=2, routed_scaling=2.5, sequence_length=8, dtype=dtype)


def transposed_swiglu(local: int, dtype: torch.dtype) -> pmoe.Experts:
    return internals.borrowed_swiglu(local, M, H, dtype)


def square_of_relu(local: int, dtype: torch.dtype) -> pmoe.Experts:
    return internals.borrowed_square(local, M, H, dtype)


def module_list(local: int, dtype: torch.dtype) -> nn.ModuleList:
    return nn.ModuleList(own_experts.mlp(M, H).to(dtype) for _ in range(local))


# ---- the groups, each a file


def _runners() -> dict[str, Configuration]:
    c = Configuration
    apart = {"bypass_local": False}
    return {
        "one rank, n=1": c(world=1),
        "one rank, n=4": c(world=1, options={"pipeline": 4}),
        "one rank, n=4, S4, all travel": c(
            world=1, top_k=1, options={"pipeline": 4, "memory_reuse": "S4"}, switches=apart
        ),
        "one rank, n=1, all travel": c(world=1, top_k=1, switches=apart),
        "n=1": c(),
        "n=4": c(options={"pipeline": 4}),
        "n=3, 4 ranks": c(world=4, options={"pipeline": 3}, dtype=FLOAT64),
        "n by a rule": c(world=4, options={"pipeline": True}),
        "n by a rule, S2": c(options={"pipeline": True, "memory_reuse": "S2"}),
        "n=2, backward 4, no pair": c(options={"pipeline": 2, "pipeline_backward": 4}),
        "n=4, backward 1, 4 ranks": c(world=4, options={"pipeline": 4, "pipeline_backward": 1}),
        "all travel": c(options={"pipeline": 2}, switches=apart),
        "all travel, S4": c(options={"pipeline": 2, "memory_reuse": "S4"}, switches=apart),
        "sequential": c(options={"pipeline": 2}, switches={"sequential": True}),
        "sequential, S1": c(options={"pipeline": 2, "memory_reuse": "S1"}, switches={"sequential": True}),
        "einsum order": c(options={"pipeline": 2, "order": "einsum"}),
        "capacity": c(options={"pipeline": 2, "capacity_factor": 0.7}),
        "capacity, S4, 4 ranks": c(
            world=4, options={"pipeline": 2, "capacity_factor": 0.7, "memory_reuse": "S4"}
        ),
        "budget": c(
            options={"pipeline": 4, "memory_reuse": "S4", "memory_budget": "1MiB"},
        ),
        "inference": c(options={"pipeline": 2, "memory_reuse": "S4"}, way="inference"),
        "two calls": c(options={"pipeline": 3, "memory_reuse": "S2"}, way="two calls"),
        "frozen experts of rank 0": c(
            options={"pipeline": 2, "memory_reuse": "S4"},
            frozen=("experts.", "nothing"),
            input_needs_grad=False,
        ),
        "padded": c(
            options={"pipeline": 2, "capacity_factor": 0.7, "pad_to_capacity": True}, tokens=(96, 96)
        ),
        "padded, S4, 4 ranks": c(
            world=4,
            options={"pipeline": 2, "capacity_factor": 1.2, "pad_to_capacity": True, "memory_reuse": "S4"},
            tokens=(40, 40, 40, 40),
        ),
        "padded, n=4, backward 2, one expert": c(
            options={
                "pipeline": 4,
                "pipeline_backward": 2,
                "capacity_factor": 1.0,
                "pad_to_capacity": True,
                "memory_reuse": "S3",
            },
            tokens=(64, 64),
            load="one expert",
        ),
        "padded, one rank": c(world=1, options={"capacity_factor": 0.7, "pad_to_capacity": True}),
    }


def _kernels() -> dict[str, Configuration]:
    """Runners whose kernels need a GPU, by their plain definitions."""
    c = Configuration

    def fused(
        way: bool | str = True, world: int = 2, dtype: torch.dtype = FLOAT32, **options: Any
    ) -> Configuration:
        return c(world=world, options={"fused": way, **options}, stand_in="fused", dtype=dtype)

    def alone(top_k: int = 2, autocast: bool = False, way: str = "call", **options: Any) -> Configuration:
        return c(world=1, options=options, top_k=top_k, stand_in="one rank", autocast=autocast, way=way)

    return {
        "fused": fused(),
        "fused, one rank": fused(world=1),
        "fused, one rank, S4": fused(world=1, memory_reuse="S4"),
        "fused, S4": fused(memory_reuse="S4"),
        "fused, keep/recompute, swiglu, 4 ranks": fused(
            world=4, memory_reuse=PAIRS[2], expert="swiglu", dtype=FLOAT64
        ),
        "fused, capacity, communicate/keep": fused(world=4, memory_reuse=PAIRS[6], capacity_factor=0.7),
        "fused, but a pair offloads": fused(memory_reuse="S1", pipeline=2),
        "fused, but auto": fused("auto", pipeline=2),
        "fused forward": fused("forward", pipeline=2),
        "fused forward, backward 4": fused("forward", pipeline=2, pipeline_backward=4),
        "fused forward, S4, 4 ranks": fused("forward", world=4, pipeline=4, memory_reuse="S4"),
        "fused forward, one rank": fused("forward", world=1, pipeline=2, memory_reuse="S4"),
        "one rank": alone(),
        "one rank, swiglu": alone(top_k=4, expert="swiglu", bias=False, z_loss_weight=0.1),
        "one rank, switch": alone(top_k=1, gate="switch", activation="relu"),
        "one rank, autocast": alone(autocast=True),
        "one rank, frozen checkpoint": alone(way="frozen checkpoint"),
        "one rank, inference": alone(way="inference"),
    }


def _pairs() -> dict[str, Configuration]:
    """Every restore pair, with numbers of chunks, ranks and kinds of experts."""
    found = {}
    for pair in PAIRS:
        options = {"memory_reuse": pair}
        found[f"{pair}, n=4"] = Configuration(options={**options, "pipeline": 4})
        found[f"{pair}, n=2, backward 4, 4 ranks"] = Configuration(
            world=4,
            options={**options, "pipeline": 2, "pipeline_backward": 4, "expert": "swiglu"},
            dtype=FLOAT64,
        )
        if pair.strategy is not None:
            found[f"{pair}, one rank"] = Configuration(
                world=1, options={**options, "pipeline": 4, "pipeline_backward": 2}
            )
            found[f"{pair}, one expert"] = Configuration(
                options={**options, "pipeline": 2}, load="one expert", top_k=1
            )
    found["S4, some experts get none, 4 ranks"] = Configuration(
        world=4, options={"memory_reuse": "S4", "pipeline": 2, "slack": 1.0}, load="some experts get none"
    )
    found["S1, no tokens at all"] = Configuration(
        options={"memory_reuse": "S1", "pipeline": 2}, tokens=(0, 0)
    )
    found["S4, one token of four ranks"] = Configuration(
        world=4, options={"memory_reuse": "S4", "pipeline": 4}, tokens=(0, 0, 1, 0)
    )
    found["no rings, some ranks have no tokens"] = Configuration(
        world=4, options={"pipeline": 4}, tokens=(0, 5, 0, 3), load="one expert"
    )
    return found


def _experts() -> dict[str, Configuration]:
    c = Configuration
    own = own_experts.EXPERTS
    return {
        "relu": c(options={"activation": "relu", "pipeline": 2}, dtype=FLOAT64),
        "silu, no bias, S4": c(
            options={"activation": "silu", "bias": False, "pipeline": 2, "memory_reuse": "S4"}
        ),
        "swiglu": c(options={"expert": "swiglu", "pipeline": 2}),
        "swiglu, no bias, S2": c(
            options={"expert": "swiglu", "bias": False, "pipeline": 2, "memory_reuse": "S2"}, dtype=FLOAT64
        ),
        "modules": c(options={"expert": own["mlp"], "pipeline": 2}),
        "modules, S4": c(options={"expert": own["mlp"], "pipeline": 2, "memory_reuse": "S4"}),
        "modules, S1, 4 ranks": c(
            world=4, options={"expert": own["mlp"], "pipeline": 4, "memory_reuse": "S1"}
        ),
        "modules of a list, keep/recompute": c(
            options={"pipeline": 4, "pipeline_backward": 2, "memory_reuse": PAIRS[2]},
            making={"expert": module_list},
        ),
        "modules with dropout, S4": c(
            options={"expert": own["dropout"], "pipeline": 2, "memory_reuse": "S4"}
        ),
        "modules with buffers, S2": c(
            options={"expert": own["buffers"], "pipeline": 2, "memory_reuse": "S2"}
        ),
        "modules that write over their input": c(
            options={"expert": own["in place"], "pipeline": 2, "memory_reuse": "S1"}
        ),
        "modules, one rank": c(world=1, options={"expert": own["norm at the end"]}),
        "borrowed swiglu": c(making={"expert": transposed_swiglu}, options={"pipeline": 2}),
        "borrowed swiglu, S4": c(
            making={"expert": transposed_swiglu}, options={"pipeline": 2, "memory_reuse": "S4"}
        ),
        "borrowed activation, S3": c(
            making={"expert": square_of_relu}, options={"pipeline": 2, "memory_reuse": "S3"}, dtype=FLOAT64
        ),
        "shared expert": c(options={"shared_expert": 24, "pipeline": 2}),
        "shared expert with gate, S4": c(
            options={"shared_expert": 24, "shared_gate": True, "pipeline": 2, "memory_reuse": "S4"}
        ),
        "shared module with gate, 4 ranks": c(
            world=4, making={"shared_expert": gated_shared}, options={"shared_gate": True, "pipeline": 2}
        ),
        "autocast": c(options={"pipeline": 2}, autocast=True),
        "autocast, S4, shared expert": c(
            options={"pipeline": 2, "memory_reuse": "S4", "shared_expert": 24}, autocast=True
        ),
        "autocast, modules, S1": c(
            options={"expert": own["mlp"], "pipeline": 2, "memory_reuse": "S1"}, autocast=True
        ),
    }


def _gates() -> dict[str, Configuration]:
    c = Configuration

    def named(gate: str, top_k: int = 2, world: int = 2, **options: Any) -> Configuration:
        return c(world=world, top_k=top_k, options={"gate": gate, "pipeline": 2, **options})

    return {
        "topk, z-loss, not normalised": named("topk", top_k=3, z_loss_weight=0.5, normalize_gate=False),
        "topk, float64": c(options={"pipeline": 2, "check_finite": True}, dtype=FLOAT64),
        "switch, S4": named("switch", top_k=1, memory_reuse="S4"),
        "noisy_topk": named("noisy_topk"),
        "noisy_topk, S3, 4 ranks": named("noisy_topk", world=4, memory_reuse="S3"),
        "sigmoid": named("sigmoid"),
        "deepseek, S4": named("deepseek", memory_reuse="S4"),
        "deepseek by groups": c(making={"gate": grouped_deepseek}, options={"pipeline": 2}),
        "xmoe": named("xmoe"),
        "expert_choice": named("expert_choice", capacity_factor=1.25),
        "expert_choice, S4, 4 ranks": named("expert_choice", world=4, memory_reuse="S4"),
        "soft": named("soft"),
        "soft, S2": named("soft", memory_reuse="S2"),
        "batch_prioritised": named("batch_prioritised", capacity_factor=0.75),
        "hash": named("hash"),
        "hash, S1, 4 ranks": named("hash", world=4, memory_reuse="S1"),
        "random": named("random"),
        "given": c(making={"gate": given_gate}, options={"pipeline": 2}),
        "given, S4, 4 ranks": c(
            world=4, making={"gate": given_gate}, options={"pipeline": 2, "memory_reuse": "S4"}
        ),
        "a module": c(making={"gate": own_gate}, options={"pipeline": 2, "memory_reuse": "S4"}),
    }


def _ranks() -> dict[str, Configuration]:
    """What travels otherwise: sharded experts, hierarchies, rows that travel once, hooks on their way."""
    c = Configuration
    two, s4 = {"pipeline": 2}, {"pipeline": 2, "memory_reuse": "S4"}
    by_node = {"dispatch": "hierarchical_2d", "nodes": 2}
    return {
        "ep 1, esp 2": c(mesh=(1, 2), options=two),
        "ep 1, esp 2, S1": c(mesh=(1, 2), options={"pipeline": 2, "memory_reuse": "S1"}),
        "ep 2, esp 2": c(world=4, mesh=(2, 2), options=two, dtype=FLOAT64),
        "ep 2, esp 2, S4": c(world=4, mesh=(2, 2), options={**s4, "pipeline": 4, "expert": "swiglu"}),
        "ep 2, esp 2, one lane": c(world=4, mesh=(2, 2), options=two, switches={"one_lane": True}),
        "esp 2, ep 2, S2": c(
            world=4, mesh=(2, 2), mesh_names=("esp", "ep"), options={"pipeline": 2, "memory_reuse": "S2"}
        ),
        "ep 1, esp 4, shared expert": c(
            world=4, mesh=(1, 4), options={**s4, "shared_expert": 24, "shared_gate": True}
        ),
        "ep 2, esp 2, S4, carries gradients": c(world=4, mesh=(2, 2), options=s4, carries_gradients=True),
        "carries gradients": c(options={"pipeline": 4}, carries_gradients=True),
        "carries gradients, S1": c(options={"pipeline": 2, "memory_reuse": "S1"}, carries_gradients=True),
        "ep 2, esp 2, callbacks": c(world=4, mesh=(2, 2), making={"callbacks": every_point}, options=s4),
        "ep 2, esp 2, once": c(world=4, mesh=(2, 2), top_k=3, options={**two, "send_once": True}),
        "hierarchical_1d": c(world=4, options={**two, "dispatch": "hierarchical_1d", "nodes": 2}),
        "hierarchical_1d, S4, uneven nodes": c(
            world=4, options={**s4, "dispatch": "hierarchical_1d", "nodes": [0, 0, 0, 1]}
        ),
        "hierarchical_2d": c(world=4, options={**two, **by_node}, dtype=FLOAT64),
        "hierarchical_2d, S4, once": c(world=4, top_k=3, options={**s4, **by_node, "send_once": True}),
        "hierarchical_2d there, flat home": c(world=4, options={**two, **by_node, "combine": "flat"}),
        "once": c(top_k=3, options={**two, "send_once": True}),
        "once, S4, 4 ranks": c(world=4, top_k=3, options={**s4, "send_once": True}),
        "callbacks": c(making={"callbacks": every_point}, options=two),
        "callbacks, S4": c(making={"callbacks": every_point}, options=s4),
        "callbacks with a parameter, S3": c(
            making={"callbacks": scaling}, options={"pipeline": 2, "memory_reuse": "S3"}
        ),
    }


def _checkpoints() -> dict[str, Configuration]:
    c = Configuration
    two, s4 = {"pipeline": 2}, {"pipeline": 2, "memory_reuse": "S4"}
    frozen = "frozen checkpoint"
    return {
        "checkpoint": c(options=two, way="checkpoint"),
        "checkpoint, S4, 4 ranks": c(world=4, options=s4, way="checkpoint", dtype=FLOAT64),
        "reentrant checkpoint, S4": c(options=s4, way="reentrant checkpoint"),
        "frozen, noisy": c(options={**two, "gate": "noisy_topk"}, way=frozen),
        "frozen, noisy, S4, 4 ranks": c(world=4, options={**s4, "gate": "noisy_topk"}, way=frozen),
        "frozen, S1, modules with dropout": c(
            options={"pipeline": 2, "memory_reuse": "S1", "expert": own_experts.dropping}, way=frozen
        ),
        "frozen, once": c(top_k=3, options={**two, "send_once": True}, way=frozen),
        "frozen, callbacks": c(making={"callbacks": every_point}, options=two, way=frozen),
        "frozen, shared expert": c(options={**s4, "shared_expert": 24, "shared_gate": True}, way=frozen),
        "frozen, sharded": c(mesh=(1, 2), options=s4, way=frozen),
        "frozen, padded": c(
            options={**s4, "capacity_factor": 0.7, "pad_to_capacity": True}, tokens=(64, 64), way=frozen
        ),
        "frozen, fused": c(options={"fused": True}, stand_in="fused", way=frozen),
        "frozen, fused forward": c(options={**s4, "fused": "forward"}, stand_in="fused", way=frozen),
        "frozen, two calls": c(options={**s4, "gate": "noisy_topk"}, way="frozen checkpoint of two calls"),
        "frozen, autocast": c(options=s4, way=frozen, autocast=True),
        "frozen, one expert": c(options=s4, way=frozen, load="one expert", top_k=1),
    }


GROUPS: dict[str, dict[str, Configuration]] = {
    "runners": _runners(),
    "kernels": _kernels(),
    "pairs": _pairs(),
    "experts": _experts(),
    "gates": _gates(),
    "ranks": _ranks(),
    "checkpoints": _checkpoints(),
}

FAST = {
    ("runners", "n=4"),
    ("runners", "padded"),
    ("kernels", "fused, S4"),
    ("kernels", "one rank"),
    ("pairs", "communicate/recompute, n=4"),
    ("pairs", "offload/offload, n=4"),
    ("checkpoints", "frozen, two calls"),
}
"""Those of every test run; `make test-all` goes through all."""
