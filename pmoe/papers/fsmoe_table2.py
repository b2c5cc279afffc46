"""FSMoE's Table 2, Testbed B: measured seconds of a layer's operations beside those of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pmoe.papers.fsmoe_layers import MS, Configured, all_reduce_of, attention, moe_costs

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
    found = []
    for (model, direction), measured in MEASURED.items():
        modelled = _modelled(MODELS[model], direction == "backward")
        for name, milliseconds in measured.items():
            found.append(
                Table2Row(
                    model=model,
                    direction=direction,
                    name=name,
                    measured=milliseconds * MS,
                    modelled=modelled[name],
                )
            )
    return found


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
