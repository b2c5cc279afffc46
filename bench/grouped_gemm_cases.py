"""Grouped products that bench_grouped_gemm measures: what runs, what counts as work, and the right result.

Letters: N rows, E experts, K choices, I in-features, O out-features, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.device import gathering
from pmoe.kernels import grouped_gemm
from pmoe.kernels.grouped_gemm import RowSlots

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda", 0)
ROWS, QUICK_ROWS = 16384, 4096
SAMPLES = 48


@dataclass(frozen=True)
class Model:
    name: str
    experts: int
    d_model: int
    d_hidden: int
    top_k: int
    by_bound: bool = False
    """Whether the goal is a share of the lower of two bounds: dense rate * fill, and the rate that bytes
    allow.

    Otherwise the goal is a share of the dense rate.
    """


MODELS = (
    Model("Mixtral", 8, 4096, 14336, 2),
    Model("Qwen2-MoE", 64, 2048, 1408, 4, by_bound=True),
    Model("Phi-3.5-MoE", 16, 4096, 6400, 2),
)


class Routed:
    """Rows of experts that are drawn at random for each slot, as by a router.

    A slot is a (token, choice) pair. The rows of an expert are in the order of their slots.
    """

    def __init__(self, model: Model, num_rows: int) -> None:
        self.num_rows, self.top_k = num_rows, model.top_k
        self.num_tokens = num_rows // model.top_k
        expert_S = torch.randint(model.experts, (num_rows,), device=DEVICE)
        self.counts = torch.bincount(expert_S, minlength=model.experts).tolist()
        self.ends_E = torch.tensor(self.counts).cumsum(0).to(DEVICE, torch.int32)
        slot_N = expert_S.argsort(stable=True)
        self.expert_N, self.slot_N = expert_S[slot_N], slot_N
        self.token_N = slot_N // model.top_k
        self.slots = RowSlots(slot_N=slot_N.int(), top_k=model.top_k)

    def groups(self) -> Iterator[slice]:
        """Yields, for each expert, the slice of its rows."""
        start = 0
        for count in self.counts:
            yield slice(start, start + count)
            start += count


BOTH = ("in turns", "boxes")


@dataclass(frozen=True)
class Case:
    """One product that is measured.

    name: its name in the table.
    run: computes the product and returns its result.
    exact: returns (the part of a result that is compared, the same part computed in float64).
    flop: floating-point operations of the rows that exist.
    min_bytes: fewest bytes that must be read and written.
    fill: flop, over the floating-point operations of whole tiles, which are rarely full.
    rival: computes the same by F.grouped_mm; None if it cannot.
    """

    name: str
    run: Callable[[], Tensor]
    exact: Callable[[Tensor], tuple[Tensor, Tensor]]
    flop: int
    min_bytes: int
    fill: float
    rival: Callable[[], Tensor] | None = None
    plain: bool = False
    """True if F.grouped_mm computes this product too. The goals are for these products only."""
    beside: tuple[str, ...] = ()
    """The ways to store tiles beside other products for which there are kernels: "in turns", "boxes"."""


# ---- what is counted


def tile_of(path: str) -> tuple[int, int, int]:
    """Returns (rows, columns, depth) of a tile of the kernel for these GPUs, as its source says.

    path: which code of the kernel runs, such as "sm_90a".
    """
    source = ROOT / "cuda" / "grouped_gemm" / {"sm_90a": "hopper_block.cuh", "sm_80": "ampere.cuh"}[path]
    match = re.search(r"kRows = (\d+), kColumns = (\d+), kDepth = (\d+)", source.read_text())
    if match is None:
        raise ValueError(f"{source} must say kRows, kColumns and kDepth in one line")
    rows, columns, depth = map(int, match.groups())
    return rows, columns, depth


def filled(count: int, step: int) -> float:
    """Returns the fraction of ``count`` elements in steps of ``step`` that is filled.

    Example: 100 in steps of 64 -> 100 / 128.
    """
    return count / (-(-count // step) * step) if count else 1.0


def groups_filled(counts: list[int], step: int) -> float:
    return sum(counts) / max(sum(-(-count // step) * step for count in counts), 1)


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- the products


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE).mul_(scale)


def sampled(routed: Routed) -> Tensor:
    return torch.randperm(routed.num_rows, device=DEVICE)[:SAMPLES].sort().values


def exact_rows(routed: Routed, rows: Tensor, weight_EOI: Tensor, sample: Tensor) -> Tensor:
    """Returns the products of a sample of rows with the matrices of their experts, in float64.

    sample: indices of the rows.
    """
    expert_S = routed.expert_N[sample]
    result_SO = torch.empty(len(sample), weight_EOI.shape[1], dtype=torch.float64, device=DEVICE)
    for expert in expert_S.unique().tolist():
        at = expert_S == expert
        result_SO[at] = rows[sample[at]].double() @ weight_EOI[expert].double().t()
    return result_SO


def compare_rows(
    routed: Routed, rows: Tensor, weight_EOI: Tensor, after: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Returns the function ``exact`` of a `Case` whose result has a row for each input row.

    It compares a sample of rows.

    after: what is applied to the products of the sampled rows.
    """
    sample = sampled(routed)
    return lambda result: (result[sample], after(exact_rows(routed, rows, weight_EOI, sample), sample))


def compare_columns(routed: Routed, grad: Tensor, rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Returns the function ``exact`` of a `Case` whose result is a weight gradient.

    It compares a few rows of each expert's gradient.
    """
    sample = torch.randperm(grad.shape[1], device=DEVICE)[:8]

    def exact(result: Tensor) -> tuple[Tensor, Tensor]:
        wide = rows.double()
        expected = [grad[at][:, sample].double().t() @ wide[at] for at in routed.groups()]
        return result[:, sample], torch.stack(expected)

    return exact


def as_they_are(products: Tensor, sample: Tensor) -> Tensor:
    return products


def plain_cases(
    routed: Routed, name: str, num_in: int, num_out: int, tile: tuple[int, int, int]
) -> Iterator[Case]:
    """Yields the cases of one matrix for each expert: forward and both gradients, beside F.grouped_mm."""
    experts, num_rows = len(routed.counts), routed.num_rows
    x, grad = draw(num_rows, num_in), draw(num_rows, num_out)
    weight, ends = draw(experts, num_out, num_in, scale=num_in**-0.5), routed.ends_E
    rows, columns, depth = tile
    flop, min_bytes = 2 * num_rows * num_in * num_out, size(x, grad, weight)
    down = groups_filled(routed.counts, rows)
    fill = down * filled(num_out, columns) * filled(num_in, depth)
    yield Case(
        name=f"{name}: forward",
        run=lambda: grouped_gemm.product(x, weight, ends),
        rival=lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=ends),
        exact=compare_rows(routed, x, weight, as_they_are),
        flop=flop, min_bytes=min_bytes, fill=fill, plain=True, beside=BOTH,
    )  # fmt: skip
    fill = down * filled(num_in, columns) * filled(num_out, depth)
    yield Case(
        name=f"{name}: input gradient",
        run=lambda: grouped_gemm.input_gradient(grad, weight, ends),
        rival=lambda: F.grouped_mm(grad, weight, offs=ends),
        exact=compare_rows(routed, grad, weight.transpose(1, 2), as_they_are),
        flop=flop, min_bytes=min_bytes, fill=fill, plain=True, beside=BOTH,
    )  # fmt: skip
    fill = filled(num_out, rows) * filled(num_in, columns) * groups_filled(routed.counts, depth)
    yield Case(
        name=f"{name}: weight gradient",
        run=lambda: grouped_gemm.weight_gradient(grad, x, ends),
        rival=lambda: F.grouped_mm(grad.t(), x, offs=ends),
        exact=compare_columns(routed, grad, x),
        flop=flop, min_bytes=min_bytes, fill=fill, plain=True, beside=("boxes",),
    )  # fmt: skip
    total = torch.zeros(experts, num_out, num_in, device=DEVICE)  # grows with each timed run, after the check
    yield Case(
        name=f"{name}: weight gradient, accumulating",
        run=lambda: grouped_gemm.weight_gradient(grad, x, ends, out=total, accumulate=True),
        exact=compare_columns(routed, grad, x),
        flop=flop, min_bytes=size(x, grad) + 2 * size(total), fill=fill,
    )  # fmt: skip


def fused_cases(routed: Routed, model: Model, tile: tuple[int, int, int]) -> Iterator[Case]:
    """Yields the cases of SwiGLU experts as `pmoe.runners.one_rank` computes them.

    Their w1 has two halves.
    """
    experts, num_rows, num_model, width = model.experts, routed.num_rows, model.d_model, model.d_hidden
    slots, ends, token_N = routed.slots, routed.ends_E, routed.token_N
    tokens = draw(routed.num_tokens, num_model)
    x = tokens.index_select(0, token_N)
    w1 = draw(experts, 2 * width, num_model, scale=num_model**-0.5)
    weight_S = torch.rand(num_rows, device=DEVICE) + 0.1
    weight_N1 = weight_S[routed.slot_N].unsqueeze(1)
    rows, columns, depth = tile
    down = groups_filled(routed.counts, rows)
    forward_fill = down * filled(width, columns // 2) * filled(num_model, depth)

    def gate(products: Tensor, _: Tensor) -> Tensor:
        first, second = products.bfloat16().double().chunk(2, dim=1)  # rounded like T_M
        return F.silu(first) * second

    def gated(rows_NI: Tensor) -> Tensor:
        first, second = F.grouped_mm(rows_NI, w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return F.silu(first) * second

    def hidden(rows_NI: Tensor, gathered: bool) -> Tensor:
        return grouped_gemm.hidden(rows_NI, w1, ends, activation="swiglu", slots=slots if gathered else None)[
            1
        ]

    flop = 4 * num_rows * num_model * width
    written = 2 * num_rows * 3 * width
    yield Case(
        name="gated hidden",
        run=lambda: hidden(x, False),
        rival=lambda: gated(x),
        exact=compare_rows(routed, x, w1, gate),
        flop=flop, min_bytes=size(x, w1) + written, fill=forward_fill, beside=BOTH,
    )  # fmt: skip
    yield Case(
        name="gated hidden, gathered",
        run=lambda: hidden(tokens, True),
        rival=lambda: gated(tokens.index_select(0, token_N)),
        exact=compare_rows(routed, x, w1, gate),
        flop=flop, min_bytes=size(tokens, w1) + written, fill=forward_fill, beside=("boxes",),
    )  # fmt: skip
    position_TK = routed.slot_N.argsort()  # the row of each slot: the inverse of a permutation
    permuted = slots._replace(position_TK=position_TK.view(-1, model.top_k).int())
    yield Case(
        name="gated hidden, permuted first",
        run=gathering(
            False, lambda: grouped_gemm.hidden(tokens, w1, ends, activation="swiglu", slots=permuted)[1]
        ),
        rival=lambda: gated(tokens.index_select(0, token_N)),
        exact=compare_rows(routed, x, w1, gate),
        flop=flop, min_bytes=size(tokens, w1) + written, fill=forward_fill,
    )  # fmt: skip
    hidden_NG = F.grouped_mm(x, w1.transpose(1, 2), offs=ends)
    w2 = draw(experts, num_model, width, scale=width**-0.5)
    active = gated(x)
    back_fill = down * filled(width, columns) * filled(num_model, depth)
    yield Case(
        name="down, weighted by slot",
        run=lambda: grouped_gemm.product(active, w2, ends, scale=weight_S, slots=slots),
        rival=lambda: (F.grouped_mm(active, w2.transpose(1, 2), offs=ends) * weight_N1).bfloat16(),
        exact=compare_rows(routed, active, w2, lambda products, at: products * weight_N1[at].double()),
        flop=flop // 2,
        min_bytes=size(active, w2) + 2 * num_rows * num_model,
        fill=down * filled(num_model, columns) * filled(width, depth),
        beside=BOTH,
    )  # fmt: skip
    grad, weight_N = draw(num_rows, num_model), weight_N1.flatten()

    def slope(products: Tensor, at: Tensor) -> Tensor:
        of_active = products * weight_N1[at].double()
        first, second = hidden_NG[at].double().chunk(2, dim=1)
        of_first = torch.ops.aten.silu_backward(of_active * second, first)
        return torch.cat([of_first, of_active * F.silu(first)], dim=1)

    yield Case(
        name="gradient of the gated hidden",
        run=lambda: grouped_gemm.hidden_gradient(
            grad, w2, hidden_NG, weight_N, ends, activation="swiglu", weighs_active=True
        )[0],
        exact=compare_rows(routed, grad, w2.transpose(1, 2), slope),
        flop=flop // 2, min_bytes=size(grad, w2, hidden_NG) + written, fill=back_fill,
        beside=("in turns",),
    )  # fmt: skip
