"""`pmoe.integrations.torchtitan` in an MoE block of torchtitan, beside torchtitan's own routed experts.

torchtitan's products want bfloat16 and a GPU; here they are loops in the type of their operands. Its module
of Triton kernels, which are not called, is a stub. It rounds each expert's output to float32, so float64 is
compared to 1e-6.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

sys.modules["torchtitan.distributed.minimal_async_ep"] = mock.MagicMock()

from torchtitan.config.override import derive  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import (  # noqa: E402
    GroupedExperts,
    MoE,
    RoutedExperts,
    TokenChoiceTopKRouter,
)
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher  # noqa: E402

from pmoe.integrations.torchtitan import PmoeRoutedExperts, pmoe_experts  # noqa: E402
from tests.convert.compare import E, H, K, M, group  # noqa: E402

B, L = 3, 8
"""Sequences of each rank, and tokens of a sequence."""


class LoopOverExperts(GroupedExperts):
    """torchtitan's experts, whose grouped product is a loop."""

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        ends = offs.tolist()
        return torch.cat([A[s:e] @ w for s, e, w in zip([0, *ends], ends, B_t, strict=False)])


class OtherExperts(GroupedExperts):
    """Experts of another kind, as torchtitan's gpt-oss has them."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass


class Dims:
    """The part of torchtitan's ParallelDims that routed experts read."""

    def __init__(self, ranks: int) -> None:
        self.ep = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)) if ranks > 1 else None

    def get_optional_mesh(self, name: str) -> Any:
        assert name == "ep"
        return self.ep


def routed_config() -> Any:
    inner = GroupedExperts.Config(dim=M, hidden_dim=H, num_experts=E)
    return RoutedExperts.Config(
        inner_experts=inner, token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K)
    )


def block_config(routed: Any) -> Any:
    gate = Linear.Config(in_features=M, out_features=E, bias=False)
    router = TokenChoiceTopKRouter.Config(num_experts=E, top_k=K, gate=gate, route_norm=True)
    return MoE.Config(num_experts=E, routed_experts=routed, router=router)


def block(routed: Any, dtype: torch.dtype) -> Any:
    moe = block_config(routed).build().to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return moe


def step(moe: nn.Module, x: Tensor, y_of: Any = None) -> dict[str, Tensor]:
    moe.zero_grad()
    x = x.clone().requires_grad_()
    y = (moe if y_of is None else y_of)(x)
    y.square().sum().backward()
    gradients = {name: each.grad for name, each in moe.named_parameters()}
    found = {"y": y.detach(), "x": x.grad, **gradients}
    return {n: each.full_tensor() if isinstance(each, DTensor) else each for n, each in found.items()}


def same(got: dict[str, Tensor], wanted: dict[str, Tensor], what: str, limit: float) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((got[name].double() - value.double()).norm() / value.double().norm())
        assert error < limit, (what, name, error)
    print(f"{what}: {len(got)} tensors, equal to torchtitan's", flush=True)


def refused(function: Any, *texts: str) -> None:
    try:
        function()
    except ValueError as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(texts)


def main(rank: int, ranks: int) -> None:
    dims = Dims(ranks)
    cases: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
        "default": ({}, torch.float64, 1e-6),
        "chunks in ring slots": ({"pipeline": 2, "memory_reuse": "S4"}, torch.float64, 1e-6),
        "bfloat16": ({"pipeline": 2}, torch.bfloat16, 2e-2),
        "compiled": ({"pipeline": 2}, torch.float64, 1e-6),
    }
    for what, (options, dtype, limit) in cases.items():
        x = torch.randn(ranks * B, L, M, generator=torch.Generator().manual_seed(2), dtype=dtype)
        with mock.patch.object(Tensor, "bfloat16", lambda self: self):
            theirs = block(routed_config(), dtype)
            theirs.routed_experts.inner_experts.__class__ = LoopOverExperts
            wanted = step(theirs, x)
        ours = block(pmoe_experts(routed_config(), **options), dtype)
        assert isinstance(ours.routed_experts, PmoeRoutedExperts)
        assert (
            ours.load_state_dict(theirs.state_dict())
            and ours.state_dict().keys() == theirs.state_dict().keys()
        )
        ours.routed_experts.parallelize(dims)
        if dims.ep is not None:
            inner = ours.routed_experts.inner_experts
            for name, weight in list(inner.named_parameters()):
                spread = distribute_tensor(weight.detach(), dims.ep, [Shard(0)])
                inner.register_parameter(name, nn.Parameter(spread))
        y_of = torch.compile(ours, backend="aot_eager", fullgraph=True) if what == "compiled" else None
        got = step(ours, x[rank * B : (rank + 1) * B], y_of)
        for name in ("y", "x"):
            wanted[name] = wanted[name][rank * B : (rank + 1) * B]
        if ranks > 1:  # each rank has the router's gradient of its own tokens
            dist.all_reduce(got["router.gate.weight"])
        same(got, wanted, what, limit)
    refused(lambda: pmoe_experts(routed_config(), top_k=3), "top_k (3) must be left out")
    sizes = {"dim": M, "hidden_dim": H, "num_experts": E}
    other = derive(routed_config(), RoutedExperts.Config, inner_experts=OtherExperts.Config(**sizes))
    refused(lambda: pmoe_experts(other), "inner_experts (OtherExperts.Config) must be GroupedExperts.Config")
    print("refusals: named", flush=True)


if __name__ == "__main__":
    with group() as (rank, ranks):
        main(rank, ranks)
