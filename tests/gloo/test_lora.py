"""Low-rank adapters of experts on 1, 2 and 4 ranks: the definition's results, for every n and restore pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pmoe
from pmoe.schedule.restore import ALL_PAIRS
from tests import adapted
from tests.adapted import ALPHA, RANK
from tests.gloo.kit import build, inputs, one_step
from tests.kit import AUX
from tests.pool import ranks
from tests.reference import relative_error

EXACT = 1e-12


def part(value: torch.Tensor, rank: int, world: int, shared: bool) -> torch.Tensor:
    """A rank's part of a gradient of all experts."""
    local = adapted.EXPERTS // world
    return value if shared else value[rank * local : (rank + 1) * local]


def step_job(rank: int, world: int, cases: list[dict[str, Any]]) -> list[tuple[str, float]]:
    errors = []
    everybody = [inputs(each, world) for each in range(world)]
    for case in cases:
        options = dict(case)
        settings = {"shared": options.pop("shared"), "targets": options.pop("targets")}
        whole = adapted.whole_layer(**{**options, "pipeline": 1, "memory_reuse": False})
        pmoe.add_lora(whole, rank=RANK, alpha=ALPHA, **settings)
        adapted.fill(whole.experts.adapter("default"))
        outs, of_ranks, of_adapter = adapted.expected(
            whole, [x for x, _ in everybody], [dy for _, dy in everybody], AUX
        )
        layer = build(**options)
        pmoe.add_lora(layer, rank=RANK, alpha=ALPHA, **settings)
        adapted.fill(layer.experts.adapter("default"), layer.first_expert)
        found = one_step(layer, rank, world)
        wanted = {
            "y": outs[rank],
            **of_ranks[rank],
            **{
                f"experts.adapters.default.{name}": part(value, rank, world, settings["shared"])
                for name, value in of_adapter.items()
            },
        }
        assert {name for name, value in found.items() if value is not None} == set(wanted)
        errors += [
            (f"{case}: {name}", relative_error(found[name], value))
            for name, value in wanted.items()
            if value.numel()
        ]
    return [(name, error) for name, error in errors if not error < EXACT]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_results_and_gradients_are_the_definitions_for_every_n_and_pair(
    world: int, shared: bool, expert: str
) -> None:
    cases = [
        {"pipeline": n, "memory_reuse": pair, "shared": shared, "targets": targets, "expert": expert}
        for at, pair in enumerate((False, *ALL_PAIRS))
        for n in ((1, 2, 3, 4) if at < 2 else (1 + at % 4,))
        for targets in ([("w1", "w2")] if n != 3 else [("w1",), ("w2",)])
    ]
    for wrong in ranks(world).run(step_job, cases):
        assert not wrong
