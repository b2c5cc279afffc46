"""The 1,458 layers of FSMoE's Table 4, Testbed B, and their costs by Fig. 5 and ASSUMPTIONS (Section 6.3).

The numbers of one cluster that stand here are the paper's, for this one reproduction; no layer uses them.

Letters: B samples, L tokens a sample, M = d_model, H = d_hidden, f capacity factor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pmoe.papers.assumptions import assumptions, printed
from pmoe.planner.costs import LayerCosts, LineCost, all_reduce_seconds

ASSUMPTIONS = assumptions("fsmoe-table5")
"""What Table 5 needs and the paper does not say, or says in several ways."""

MS = 1e-3
GEMM = LineCost(9.24e-2 * MS, 4.42e-11 * MS)  # of floating-point operations, the others of bytes
ALL_TO_ALL = LineCost(1.75e-1 * MS, 3.06e-7 * MS)
ALL_GATHER = LineCost(3.20e-2 * MS, 1.68e-7 * MS)
REDUCE_SCATTER = LineCost(3.91e-2 * MS, 1.67e-7 * MS)
ALL_REDUCE = LineCost(8.37e-2 * MS, 5.99e-7 * MS)

NODES = 8
GPUS = 4  # of a node
TOP_K = 2
ELEMENT_SIZE = 4


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A layer of Table 4: attention and MoE. f None is '*'."""

    B: int
    heads: int
    L: int
    M: int
    H: int
    f: float | None
    ffn: str

    @property
    def tokens(self) -> int:
        """Of an MP group."""
        return self.B * self.L

    @property
    def rows(self) -> float:
        """That a node's experts receive."""
        return TOP_K * (1.0 if self.f is None else self.f) * self.tokens

    @property
    def gradient_bytes(self) -> int:
        return ELEMENT_SIZE * (4 * self.M * self.M // GPUS + NODES * self.M)


class Attention(NamedTuple):
    """Seconds of the dense part in forward: its products, and its two collectives inside the node."""

    compute: float
    all_gather: float
    reduce_scatter: float


def table4() -> list[Configured]:
    """The 1,458 layers, Testbed B."""
    grid = itertools.product(
        (1, 2, 4), (8, 16, 32), (256, 512, 1024), (1024, 2048, 4096), (2, 3, 4), (1.2, 2.4, None),
        ("simple", "Mixtral"),
    )  # fmt: skip
    return [
        Configured(B=B, heads=heads, L=L, M=M, H=scale * M, f=f, ffn=ffn)
        for B, heads, L, M, scale, f, ffn in grid
    ]


def moe_costs(layer: Configured) -> LayerCosts:
    """Of the forward pass of a layer's MoE part."""
    bytes_of_node = layer.rows * layer.M * ELEMENT_SIZE
    products = 3 if layer.ffn == "Mixtral" else 2
    line = LineCost(products * GEMM.alpha_seconds, products * GEMM.beta_seconds)
    return LayerCosts(
        a2a=ALL_TO_ALL.shared(bytes_of_node / GPUS),
        ag=ALL_GATHER.shared(bytes_of_node),
        rs=REDUCE_SCATTER.shared(bytes_of_node),
        exp=line.shared(2 * layer.rows * layer.M * (layer.H // GPUS)),
    )


def attention(layer: Configured) -> Attention:
    """Of the forward pass; backward computes twice as long."""
    share = layer.M // GPUS
    products = (
        2 * layer.tokens * layer.M * 3 * share,  # queries, keys, values
        2 * layer.tokens * layer.L * share,  # scores
        2 * layer.tokens * layer.L * share,  # values
        2 * layer.tokens * share * layer.M,  # output
    )
    sent = layer.tokens * layer.M * ELEMENT_SIZE
    return Attention(sum(map(GEMM, products)), ALL_GATHER(sent), REDUCE_SCATTER(sent))


all_reduce_of = functools.partial(all_reduce_seconds, ALL_REDUCE)
"""Seconds of an all-reduce of so many bytes of a GPU's gradients over the nodes."""


# ---- Table 2: measured operations beside the model


MEASURED: Mapping[str, Mapping[str, float]] = printed("fsmoe table 2")
"""Testbed B, milliseconds. Three of its four attention times are cut off in our text."""

MODELS: Mapping[str, Configured] = {
    "GPT2-XL": Configured(B=4, heads=25, L=1024, M=1600, H=6400, f=1.2, ffn="simple"),
    "Mixtral-7B": Configured(B=4, heads=32, L=1024, M=4096, H=14336, f=1.2, ffn="Mixtral"),
}


def table2() -> list[dict[str, Any]]:
    """Table 2's operations beside what ASSUMPTIONS give for them, the dense part's collectives included:
    seconds of one operation of a pass of a model's layer, measured and modelled."""
    return [
        {
            "model": model,
            "direction": direction,
            "name": name,
            "measured": milliseconds * MS,
            "modelled": _modelled(MODELS[model], direction == "backward")[name],
        }
        for (model, direction), measured in ((each.split(), MEASURED[each]) for each in MEASURED)
        for name, milliseconds in measured.items()
    ]


def _modelled(layer: Configured, backward: bool) -> dict[str, float]:
    costs, dense = moe_costs(layer), attention(layer)
    a2a, ag, rs, exp = (costs.backward() if backward else costs).chunk(1)
    return {
        "AlltoAll": 2 * a2a,
        "AllReduce": all_reduce_of(layer.gradient_bytes) if backward else 0.0,
        "AllGather": ag + dense.all_gather,
        "ReduceScatter": rs + dense.reduce_scatter,
        "Experts": exp,
        "Attention": dense.compute * (2 if backward else 1),
    }
