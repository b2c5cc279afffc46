"""What products do with their sums, on small integers and powers of two: every result is known to the bit.

Letters: N rows, n and k the sizes of the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.grouped_gemm.launch import ALONE, AS_BOXES, IN_TURNS
from tests.gpu.ladder.machine import Machine, this_machine
from tests.gpu.ladder.tiles import BF16, demand_nothing, launch

HIDDEN, HIDDEN_GRADIENT = 1, 2
RELU, SWIGLU = 1, 4


def check_epilogues(path: str) -> None:
    demand_nothing(find_epilogues(this_machine(path)))


def find_epilogues(machine: Machine, side: int = 128) -> dict[str, str | None]:
    drawn = Drawn(machine, side)
    found: dict[str, str | None] = {}
    for each in (biased_and_weighted, hidden, hidden_gradient, accumulated):
        found |= each(machine, drawn)
    for storing, way in ((IN_TURNS, "in turns"), (AS_BOXES, "as boxes")) if machine.hopper else ():
        told = biased_and_weighted(machine, drawn, storing)
        found |= {f"{name}, {way}": each for name, each in told.items()}
    return found


class Drawn:
    """The operands of products of several experts. The last rows in memory belong to no expert."""

    def __init__(self, machine: Machine, side: int, counts: tuple[int, ...] | None = None) -> None:
        """side: n and k. counts: each expert's rows; None: two experts that leave a part of ``side`` rows."""
        self.random = torch.Generator().manual_seed(1)
        self.side, self.counts = side, counts or (side // 2 + 3, side // 4)
        self.rows_in_memory = side if counts is None else sum(counts) + 9
        experts = len(self.counts)
        self.a = self.integers(self.rows_in_memory, side)
        self.b = self.integers(experts, side, side)
        self.bias = self.integers(experts, side)
        factors = torch.tensor([0.5, 1.0, 2.0])
        self.weight = factors[torch.randint(3, (self.rows_in_memory,), generator=self.random)]
        self.expert = torch.repeat_interleave(torch.tensor(self.counts))
        self.ends = machine.put(torch.tensor(self.counts).cumsum(0), torch.int32)
        self.rows = self.expert.numel()

    def integers(self, *shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=self.random).float()

    def product(self, weight: Tensor) -> Tensor:
        """(rows, n) of weight (experts, n, k)"""
        return (weight[self.expert] @ self.a[: self.rows].unsqueeze(2)).squeeze(2)


def differs(machine: Machine, got: Tensor, wanted: Tensor) -> str | None:
    """wanted: of the rows that belong to an expert; later ones must still be poison."""
    found = machine.fetch(got)
    rounded = wanted.to(got.dtype).float()
    wrong = found[: wanted.shape[0]] != rounded
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        return (
            f"{int(wrong.sum())} of {wrong.numel()} wrong, first {list(at)}: {found[at]}, not {rounded[at]}"
        )
    if not found[wanted.shape[0] :].isnan().all():
        return "rows behind the last expert's were written"
    return None


def is_apart(machine: Machine, got: Tensor, wanted: Tensor) -> str | None:
    """As `differs`, of results that are not known to the bit: two roundings of bfloat16 are allowed."""
    found = machine.fetch(got)
    apart = (found[: wanted.shape[0]] - wanted).abs()
    wrong = ~(apart <= 2.0**-7 * wanted.abs() + 1e-6)  # NaN is wrong, too
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        return f"{int(wrong.sum())} of {wrong.numel()} wrong, first {list(at)}: {found[at]}, not {wanted[at]}"
    if not found[wanted.shape[0] :].isnan().all():
        return "rows behind the last expert's were written"
    return None


def biased_and_weighted(machine: Machine, p: Drawn, storing: int = ALONE) -> dict[str, str | None]:
    a, b = machine.put(p.a, BF16), machine.put(p.b, BF16)
    bias, weight = machine.put(p.bias, BF16), machine.put(p.weight)
    d = machine.poisoned(p.rows_in_memory, p.side)
    options = {"bias": bias.data_ptr(), "weight": weight.data_ptr(), "storing": storing}
    launch(machine, "forward", a, b, d, p.ends, **options)
    wanted = (p.product(p.b) + p.bias[p.expert]) * p.weight[: p.rows, None]
    return {"product + bias, times weight": differs(machine, d, wanted)}


def hidden(machine: Machine, p: Drawn) -> dict[str, str | None]:
    a, b, bias = machine.put(p.a, BF16), machine.put(p.b, BF16), machine.put(p.bias, BF16)
    d, active = machine.poisoned(p.side, p.side), machine.poisoned(p.side, p.side)
    launch(
        machine, "forward", a, b, d, p.ends, epilogue=HIDDEN, activation=RELU, bias=bias.data_ptr(),
        active=active.data_ptr(), active_stride=p.side,
    )  # fmt: skip
    wanted = p.product(p.b) + p.bias[p.expert]
    return {
        "hidden: T_M": differs(machine, d, wanted),
        "hidden: ReLU of it": differs(machine, active, wanted.relu()),
    }


def gated_hidden(machine: Machine, p: Drawn, storing: int) -> dict[str, str | None]:
    """SwiGLU: half of the n columns are gate, the others up."""
    a, b, bias = machine.put(p.a, BF16), machine.put(p.b, BF16), machine.put(p.bias, BF16)
    d = machine.poisoned(p.rows_in_memory, p.side)
    active = machine.poisoned(p.rows_in_memory, p.side // 2)
    launch(
        machine, "forward", a, b, d, p.ends, epilogue=HIDDEN, activation=SWIGLU, bias=bias.data_ptr(),
        active=active.data_ptr(), active_stride=p.side // 2, storing=storing,
    )  # fmt: skip
    wanted = p.product(p.b) + p.bias[p.expert]
    gate, up = wanted.chunk(2, dim=1)
    return {
        "hidden of SwiGLU: T_M": differs(machine, d, wanted),
        "hidden of SwiGLU: silu(gate) * up": is_apart(machine, active, gate * gate.sigmoid() * up),
    }


def weight_gradient(machine: Machine, p: Drawn, storing: int) -> dict[str, str | None]:
    """In bfloat16, which holds the sums of up to 256 rows. It is 0 for an expert without rows."""
    a, rows = machine.put(p.a, BF16), p.integers(p.rows_in_memory, p.side)
    b, d = machine.put(rows, BF16), machine.poisoned(len(p.counts), p.side, p.side)
    launch(machine, "weight", a, b, d, p.ends, storing=storing)
    return {"weight gradient": differs(machine, d, sums_of_experts(p, rows))}


def sums_of_experts(p: Drawn, rows: Tensor) -> Tensor:
    """(experts, k, n): A^T rows, over the rows of each expert."""
    own, others = p.a[: p.rows], rows[: p.rows]
    return torch.stack([own[p.expert == e].t() @ others[p.expert == e] for e in range(len(p.counts))])


def hidden_gradient(machine: Machine, p: Drawn) -> dict[str, str | None]:
    """Of the row dots, parts lie behind each other; their sum is asked for."""
    kept = p.integers(p.side, p.side)
    a, b, t_m, weight = (
        machine.put(p.a, BF16), machine.put(p.b, BF16), machine.put(kept, BF16), machine.put(p.weight),
    )  # fmt: skip
    d, active = machine.poisoned(p.side, p.side), machine.poisoned(p.side, p.side)
    parts = machine.module.row_dot_parts(machine.hopper, p.side)
    dots = machine.poisoned(parts, p.side, dtype=torch.float32)
    launch(
        machine, "input", a, b, d, p.ends, epilogue=HIDDEN_GRADIENT, activation=RELU, weighs_active=True,
        weight=weight.data_ptr(), hidden=t_m.data_ptr(), hidden_stride=p.side,
        active=active.data_ptr(), active_stride=p.side, row_dots=dots.data_ptr(),
    )  # fmt: skip
    of_active, kept, w = p.product(p.b.transpose(1, 2)), kept[: p.rows], p.weight[: p.rows, None]
    return {
        "hidden gradient: dT_M": differs(machine, d, of_active * (kept > 0) * w),
        "hidden gradient: ReLU, weighted": differs(machine, active, kept.relu() * w),
        "hidden gradient: row dots": differs(machine, dots.cpu().sum(0), (kept.relu() * of_active).sum(1)),
    }


def accumulated(machine: Machine, p: Drawn) -> dict[str, str | None]:
    """In float32, onto what is there."""
    a, rows = machine.put(p.a, BF16), p.integers(p.side, p.side)
    b, d = machine.put(rows, BF16), machine.put(torch.full((2, p.side, p.side), 3.0))
    options: dict[str, Any] = {"wide": True, "accumulates": True}
    launch(machine, "weight", a, b, d, p.ends, **options)
    wanted = 3 + sums_of_experts(p, rows)
    return {"weight gradient in float32, accumulated": differs(machine, d, wanted)}
