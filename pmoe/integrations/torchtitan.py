"""Routed experts for torchtitan: its router and its weights, pmoe's dispatch, experts and combine.

    --override.imports 'pmoe.integrations.torchtitan.pmoe_experts={"pipeline": 2, "memory_reuse": "S4"}'

The override replaces the routed experts of each MoE block. Names and shapes of the weights stay torchtitan's,
so its checkpoints load. torchtitan's ``parallelize`` spreads the weights, and its FSDP2 shards them. Where
torchtitan compiles blocks, the routed experts are one operator of the graph.

torchtitan has three weights for each expert. pmoe needs two of them, w1 and w3, as one stack. So each call
copies these two, 2/3 of all weights, into a stack, and keeps it until backward. `pmoe_experts` describes the
effect on memory.

Tested with torchtitan 0.3.0 on the CPU, on one rank and on two (`tests/convert/on_torchtitan.py`).

Letters: T tokens, K choices, E experts of all ranks, E_local of this rank, D model width, F hidden width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pmoe.call.module_calls import traced_as
from pmoe.call.operator_kinds import KINDS, OperatorKind
from pmoe.layer.run_experts import check_option_names, run_experts

try:
    from torchtitan.config import override
    from torchtitan.config.override import derive
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
except ImportError as error:
    raise ImportError(
        "torchtitan 0.3 or newer must be installed, which has RoutedExperts: pip install torchtitan==0.3.0 "
        f"({error})"
    ) from error

__all__ = ["PmoeRoutedExperts", "pmoe_experts"]


class PmoeRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """torchtitan's RoutedExperts, with pmoe's dispatch, experts and combine.

    ep_mesh: the ranks over which the experts are spread; None if this rank holds all.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """The settings of `RoutedExperts`, and arguments of pmoe.

        options: arguments of `pmoe.MoELayer`, any of `pmoe.layer.run_experts.OPTIONS`.
        """

        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.options = dict(config.options)
        self.ep_mesh: DeviceMesh | None = None

    # torchtitan reads the names of the arguments, which differ between its releases.
    @functools.wraps(RoutedExperts.forward)
    def forward(self, x: Tensor, scores: Tensor, expert_ids: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Returns each token's weighted sum of its experts' outputs, (..., D) as x.

        x: (..., D), this rank's tokens of width D.
        scores: (..., K), the routing weights of the K choices of each token.
        expert_ids: (..., K), the experts of each token, numbered over all ranks.
        num_tokens_per_expert: not used, because pmoe counts rows itself.

        With several ranks the call is a collective, and so is its backward pass.
        """
        last = (
            x.reshape(-1, x.shape[-1]),
            *(each.reshape(-1, each.shape[-1]) for each in (scores, expert_ids)),
        )
        return run_routed(self, *last).view(x.shape)

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelizes the experts as torchtitan does, but makes no buffers for torchtitan's dispatcher.

        pmoe does not use that dispatcher.

        parallel_dims: torchtitan's meshes. The mesh "ep" has the ranks over which the experts are spread.
        """
        super(RoutedExperts, self).parallelize(parallel_dims)
        self.ep_mesh = parallel_dims.get_optional_mesh("ep")


@override(target=RoutedExperts.Config, description="pmoe runs the routed experts.")  # type: ignore[untyped-decorator]
def pmoe_experts(config: Any, **options: Any) -> Any:
    """Returns the settings of routed experts that pmoe runs. torchtitan calls it for each MoE block.

    config: torchtitan's settings, a ``RoutedExperts.Config``.
    options: arguments of `pmoe.MoELayer` that decide how experts are run, any of
        `pmoe.layer.run_experts.OPTIONS`.

    With ``reshard_after_forward``, FSDP2 frees the weights of a block after its forward pass, but not the
    stack of two weights that pmoe keeps. Full activation checkpointing frees the stack, too. Backward then
    makes it again.

    Raises ValueError if an option is unknown, or if the experts are not torchtitan's ``GroupedExperts``.
    Experts with biases or with quantised products have other classes.
    """
    check_option_names(options)
    if type(config.inner_experts) is not GroupedExperts.Config:
        raise ValueError(
            f"inner_experts ({type(config.inner_experts).__qualname__}) must be GroupedExperts.Config, "
            "torchtitan's plain experts: leave the override pmoe_experts out for this model"
        )
    return derive(config, PmoeRoutedExperts.Config, options=options)


# ---- a call


def _traced(*args: Any, **kwargs: Any) -> Tensor:
    """The function that torch.compile traces in place of `run_routed`: makes the experts one operator."""
    return _run_in_graph(*args, **kwargs)


@traced_as(_traced)
def run_routed(module: PmoeRoutedExperts, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Returns the output (T, D) of a module's experts, computed by `pmoe.run_experts`. Collective.

    module: the experts, whose weights may be DTensors.
    x_TD: (T, D), T tokens of width D.
    scores_TK, ids_TK: (T, K), the routing weights and the experts of the K choices of each token.
    """
    experts: Any = module.inner_experts
    w1_EFD, w2_EDF, w3_EFD = (
        (weight.to_local() if hasattr(weight, "to_local") else weight).to(x_TD.dtype)
        for weight in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
    )
    gate_first = torch.cat([w1_EFD, w3_EFD], dim=1)
    mesh = module.ep_mesh
    group = None if mesh is None else mesh.get_group()
    return run_experts(module, x_TD, ids_TK, scores_TK, gate_first, w2_EDF, group=group, **module.options)


def _run_in_graph(module: PmoeRoutedExperts, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Does the same as `run_routed`, by one operator. torch.compile traces this function."""
    from pmoe.graph.one_operator import run_in_graph

    [y_TD] = run_in_graph("torchtitan", module, [x_TD, scores_TK, ids_TK])
    return y_TD


def _run(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Runs the routed experts. Returns a list with their output."""
    x_TD, scores_TK, ids_TK = inputs
    assert isinstance(module, PmoeRoutedExperts)
    assert x_TD is not None and scores_TK is not None and ids_TK is not None
    return [run_routed(module, x_TD, scores_TK, ids_TK)]


def _shapes(module: nn.Module, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns a list with an empty tensor like the output of the routed experts."""
    assert inputs[0] is not None
    return [torch.empty_like(inputs[0], memory_format=torch.contiguous_format)]


KINDS["torchtitan"] = OperatorKind(_run, _shapes)
