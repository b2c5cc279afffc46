"""What experts see: T_DI and T_M in forward, and as restored in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe import MoELayer
from pmoe.experts.base import ExpertRows


class Seen:
    """T_DI and T_M as the experts of a layer see them in both passes, by their groups of rows."""

    def __init__(self, layer: MoELayer) -> None:
        experts = layer.experts
        compute, activate, gradient = experts.compute, experts.activate, experts.input_gradient
        self.forward: list[tuple[Any, Tensor, Tensor]] = []
        self.backward: list[tuple[Any, Tensor, Tensor]] = []
        activated: list[Tensor] = []

        def watched_activate(hidden: Tensor, active: Tensor) -> None:
            activated.append(hidden.clone())
            activate(hidden, active)

        def watched_compute(given: ExpertRows, *args: Any, **options: Any) -> Any:
            before = given.rows_NM.clone()
            experts.activate = watched_activate
            found = compute(given, *args, **options)
            experts.activate = activate
            self.forward.append((given.groups, before, activated.pop()))
            return found

        def watched_gradient(grad: Tensor, given: ExpertRows, weight: Tensor, hidden: Any) -> Any:
            self.backward.append((given.groups, given.rows_NM.clone(), hidden.tensors[0].clone()))
            return gradient(grad, given, weight, hidden)

        experts.compute, experts.input_gradient = watched_compute, watched_gradient

    def assert_restored(self, same_chunks: bool) -> None:
        if same_chunks:
            assert len(self.forward) == len(self.backward)
            restored = {id(groups): (rows, hidden) for groups, rows, hidden in self.backward}
            for groups, rows, hidden in self.forward:
                assert torch.equal(restored[id(groups)][0], rows)
                assert torch.equal(restored[id(groups)][1], hidden)
            return
        before, after = by_row(self.forward), by_row(self.backward)
        assert [each[:2] for each in before] == [each[:2] for each in after]
        for a, b in zip(before, after, strict=True):
            torch.testing.assert_close(torch.tensor(a[2]), torch.tensor(b[2]), rtol=1e-12, atol=1e-12)


def by_row(seen: list[tuple[Any, Tensor, Tensor]]) -> list[tuple[int, bytes, list[float]]]:
    """(expert, its row's bytes, the row of T_M), sorted."""
    found = []
    for groups, rows, hidden in seen:
        for expert, at in groups.slices():
            for row, h in zip(rows[at], hidden[at], strict=True):
                found.append((expert, row.numpy().tobytes(), h.tolist()))
    return sorted(found)
