"""The 1,458 layers of FSMoE's Table 4, Testbed B, and their costs by Fig. 5 and ASSUMPTIONS (Section 6.3).

The numbers of one cluster that stand here are the paper's, for this one reproduction; no layer uses them.

Letters: B samples, L tokens a sample, M = d_model, H = d_hidden, f capacity factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pmoe.planner.costs import LayerCosts, LineCost, StageWork, all_reduce_seconds

ASSUMPTIONS: Mapping[str, str] = {
    "lines": "Fig. 5 (c, d), Testbed B, in ms and ms per byte or per floating-point operation; a product of"
    " m x k by k x n is 2 m k n operations. Experts are their products and nothing else.",
    "layers": "Table 4's f, garbled in our text, is 1.2, 2.4 and * (no token dropped); L is 256, 512 or "
    "1024. 3 B x 3 heads x 3 L x 3 M x 3 H/M x 3 f x 2 ffn = 1,458. Heads change no cost here.",
    "f = *": "routing is even, so that no token dropped is the volume of f = 1.",
    "groups": "top_k = 2; E = 8 experts, one a node; N_MP = N_ESP = 4, the GPUs of a node; N_EP = N_DP = 8.",
    "tokens": "B samples are those of an MP group, and its 4 GPUs share them: a GPU sends k f B L / 4 rows."
    " Table 2's all-to-alls agree with this, and not with B samples for every GPU.",
    "bytes": "float32, 4 bytes an element. An all-gather's and a reduce-scatter's size is the whole "
    "gathered tensor, an all-to-all's what one GPU sends, an all-reduce's the gradients of one GPU.",
    "experts": "a GPU computes H / 4 columns for the k f B L rows of its node: 2 products for 'simple', 3 "
    "of the same size for 'Mixtral'. Backward takes twice as long.",
    "attention": "of one MP rank: queries, keys and values as one product, scores, values, output, M / 4 "
    "columns each, all heads in one product, nothing for softmax; then a reduce-scatter and, at the "
    "layer's end, an all-gather of B L rows over the MP group (Fig. 2). Backward computes twice as long"
    " and sends the same.",
    "the rest": "routing, ordering, norms, the optimizer and launch gaps take no time.",
    "gradients": "attention (4 M^2 / 4) and gate (8 M) are all-reduced over the 8 nodes; an expert is on "
    "one node only. The layer stands in a deep stack of its like: the gradients that travel during its "
    "backward pass are those of the layer above, as many as its own, ready when it begins.",
    "degrees": "whole, 1 to 16, each system's best by ideal simulation of its own schedule; under "
    "contention the degrees and partitions stay, for planners know lanes that were measured alone.",
    "DeepSpeed-MoE": "one chunk, every task after the one before, one all-reduce at the end.",
    "Tutel": "with PipeMoE: all-to-alls beside experts; one lane for all communication, so ESP collectives "
    "wait for all-to-alls; dispatches first, then combines; one degree for both passes; one all-reduce "
    "at the end.",
    "Tutel-Improved": "Tutel, with the all-reduce beside attention's backward computing (one lane: not "
    "beside its collectives); what is longer than that is exposed.",
    "FSMoE-No-IIO": "degrees of both passes apart, gradients partitioned over experts' part and attention "
    "(Section 5), all communication on one lane, as in Tutel.",
    "FSMoE": "the same with a lane for collectives inside the node, also beside attention.",
    "experts' backward": "one task in all five systems, as in the paper.",
    "contention": "while a collective between nodes and one inside the node run, each takes C times as "
    "long; computing slows nothing. C = 1.25 unless --contention says otherwise: by Fig. 5 a node's "
    "GPUs send 13 GB/s in all-to-alls and 4 x 6 GB/s inside the node, all through host memory over PCIe"
    " 3.0, for there is neither NVLink nor peer access; C = 1 is two independent networks, C = 2 one "
    "network and nothing gained. A quarter of that way is an assumption, not a measurement.",
    "average": "the mean over layers of Tutel's seconds over the system's, forward and backward together.",
}
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
        a2a=StageWork(line=ALL_TO_ALL, size=bytes_of_node / GPUS),
        ag=StageWork(line=ALL_GATHER, size=bytes_of_node),
        rs=StageWork(line=REDUCE_SCATTER, size=bytes_of_node),
        exp=StageWork(line=line, size=2 * layer.rows * layer.M * (layer.H // GPUS)),
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


def all_reduce_of(num_bytes: int) -> float:
    """Seconds of an all-reduce of so many bytes of a GPU's gradients over the nodes."""
    return all_reduce_seconds(ALL_REDUCE, num_bytes)


# ---- Table 2: measured operations beside the model


MEASURED: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("GPT2-XL", "forward"): {
        "AlltoAll": 11.2, "AllReduce": 0.0, "AllGather": 15.5, "ReduceScatter": 15.7, "Experts": 6.7,
    },
    ("GPT2-XL", "backward"): {
        "AlltoAll": 11.2, "AllReduce": 7.3, "AllGather": 15.5, "ReduceScatter": 15.2, "Experts": 13.0,
    },
    ("Mixtral-7B", "forward"): {
        "AlltoAll": 28.3, "AllReduce": 0.0, "AllGather": 39.6, "ReduceScatter": 40.8, "Experts": 58.5,
    },
    ("Mixtral-7B", "backward"): {
        "AlltoAll": 30.8, "AllReduce": 32.1, "AllGather": 40.1, "ReduceScatter": 41.8, "Experts": 119.7,
        "Attention": 18.1,
    },
}  # fmt: skip
"""Table 2, Testbed B, milliseconds. Three of its four attention times are cut off in our text."""

MODELS: Mapping[str, Configured] = {
    "GPT2-XL": Configured(B=4, heads=25, L=1024, M=1600, H=6400, f=1.2, ffn="simple"),
    "Mixtral-7B": Configured(B=4, heads=32, L=1024, M=4096, H=14336, f=1.2, ffn="Mixtral"),
}


@dataclass(frozen=True, kw_only=True)
class Table2Row:
    """Seconds of one operation of a pass of a model's layer, measured (Table 2) and modelled."""

    model: str
    direction: str
    name: str
    measured: float
    modelled: float


def table2() -> list[Table2Row]:
    """Table 2's operations beside what ASSUMPTIONS give for them, the dense part's collectives included."""
    return [
        Table2Row(
            model=model,
            direction=direction,
            name=name,
            measured=milliseconds * MS,
            modelled=_modelled(MODELS[model], direction == "backward")[name],
        )
        for (model, direction), measured in MEASURED.items()
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
