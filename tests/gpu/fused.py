"""What the tests of the fused kernels share: routed tokens and experts of several ranks with what the
definition makes of them, and launches over poisoned heaps.

Letters: T tokens of all ranks, K choices, N rows that arrive at a rank, W ranks, E experts of a rank,
M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.virtual_ranks import FusedParameters, VirtualRanks
from pmoe.kernels import extension
from pmoe.kernels.comet import operators as comet_operators
from pmoe.kernels.comet.launcher import Division, Launcher
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.heap import Heap, tensor_at
from tests.gpu import support
from tests.gpu.grouped import (
    ACTIVATE,
    FUNCTIONS,
    ROUNDING,
    SMALLEST,
    SUMS,
    assert_near,
    operand_size,
    operands,
    pair,
)

NAN = float("nan")
CPU = torch.device("cpu")
DEVICE = support.DEVICE


@dataclass(frozen=True, kw_only=True)
class Case:
    """tokens: by rank. experts: of a rank. dropped: the share of slots that is. favoured: the expert that
    most tokens choose first; idle: those that nobody does. spare: rows of the heaps in which none arrives."""

    tokens: tuple[int, ...] = (40, 70)
    experts: int = 2
    top_k: int = 2
    d_model: int = 72
    d_hidden: int = 136
    activation: str = "gelu"
    bias: bool = True
    dtype: torch.dtype = torch.bfloat16
    dropped: float = 0.0
    favoured: int | None = None
    idle: tuple[int, ...] = ()
    spare: int = 0
    division: Division = Division(4, 256)

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.experts

    @property
    def wide(self) -> int:
        return 2 * self.d_hidden if self.activation == "swiglu" else self.d_hidden

    def choices(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """(expert_TK, which slots are kept), on the CPU."""
        count = sum(self.tokens)
        score = torch.rand(count, self.num_experts, generator=random)
        if self.favoured is not None:
            score[torch.rand(count, generator=random) < 0.9, self.favoured] = 2
        score[:, list(self.idle)] = -1
        keep = torch.rand(count, self.top_k, generator=random) >= self.dropped
        return score.topk(self.top_k).indices, keep


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What two launches left of the ranks played: by rank rows, weights, hidden and active, and y (T, M)."""

    rows: list[Tensor]
    weights: list[Tensor]
    hidden: list[Tensor]
    active: list[Tensor]
    y: Tensor


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Likewise of dT_O: of_hidden is dT_M, weighted the activated hidden times the weights."""

    rows: list[Tensor]
    weights: list[Tensor]
    of_hidden: list[Tensor]
    weighted: list[Tensor]
    of_x: Tensor
    of_weight: Tensor


class World:
    """Tokens, experts and routing of a case, drawn on the CPU, and checks of every element against float64.

    where: the float64 side is computed. routed: (expert, kept, weight) instead of those drawn.
    """

    def __init__(
        self,
        case: Case,
        random: torch.Generator,
        *,
        where: torch.device | None = None,
        routed: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        self.case, self.where = case, DEVICE if where is None else where
        count, every = sum(case.tokens), case.num_experts

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(case.dtype)

        self.x_TM, self.grad_TM = draw(count, case.d_model), draw(count, case.d_model)
        self.w1, self.w2 = draw(every, case.wide, case.d_model), draw(every, case.d_model, case.d_hidden)
        self.b1, self.b2 = (draw(every, each) if case.bias else None for each in (case.wide, case.d_model))
        if routed is None:
            weight = torch.rand(count, case.top_k, generator=random) + 0.1
            routed = (*case.choices(random), weight)
        self.expert_TK, self.keep_TK, self.weight_TK = (each.cpu() for each in routed)
        self.expert_TK = self.expert_TK.long()
        self.first_token = [0, *itertools.accumulate(case.tokens)]
        self._sort()

    def _sort(self) -> None:
        """A rank's rows by expert, then token; what arrives by expert, then source from the rank upwards."""
        case = self.case
        expert, keep = self.expert_TK.reshape(-1), self.keep_TK.reshape(-1)
        self.position_TK = torch.full(self.expert_TK.shape, -1, dtype=torch.int32)
        self.slot_N = torch.zeros(expert.numel(), dtype=torch.int32)
        self.counts = torch.zeros(case.num_ranks, case.num_experts, dtype=torch.int32)
        sent = []
        for rank, (begin, end) in enumerate(itertools.pairwise(self.first_token)):
            slots = torch.arange(begin * case.top_k, end * case.top_k)
            slots = slots[keep[slots]]
            slots = slots[expert[slots].argsort(stable=True)]
            at = begin * case.top_k + torch.arange(slots.numel())
            self.position_TK.view(-1)[slots] = at.int()
            self.slot_N[at] = slots.int()
            self.counts[rank] = torch.bincount(expert[slots], minlength=case.num_experts).int()
            sent.append(slots)
        self.received: list[Tensor] = []  # slots, by rank
        self.groups: list[list[int]] = []  # rows by expert, by rank
        for rank in range(case.num_ranks):
            parts = [
                [own[expert[own] == rank * case.experts + e] for own in sent[rank:] + sent[:rank]]
                for e in range(case.experts)
            ]
            self.received.append(torch.cat([each for part in parts for each in part]))
            self.groups.append([sum(each.numel() for each in part) for part in parts])

    @property
    def max_received(self) -> int:
        return max(each.numel() for each in self.received)

    @property
    def max_sent(self) -> int:
        return max(self.case.tokens) * self.case.top_k

    def fused_routings(self) -> list[FusedRouting]:
        """Of all ranks, on the device."""
        case = self.case
        expert, position, slot, counts = (
            each.to(DEVICE) for each in (self.expert_TK.int(), self.position_TK, self.slot_N, self.counts)
        )
        return [
            FusedRouting(
                rank=rank,
                expert_TK=expert,
                position_TK=position,
                slot_S=slot,
                send_WE=counts[rank].view(case.num_ranks, case.experts),
                recv_WE=counts[:, rank * case.experts : (rank + 1) * case.experts],
                num_received=self.received[rank].numel(),
                first_token=self.first_token[rank],
                num_tokens=case.tokens[rank],
                first_row=self.first_token[rank] * case.top_k,
            )
            for rank in range(case.num_ranks)
        ]

    def parameters(self) -> FusedParameters:
        """Of all ranks, on the device."""

        def by_rank(tensor: Tensor) -> list[Tensor]:
            return [each.contiguous().to(DEVICE) for each in tensor.chunk(self.case.num_ranks)]

        nothing: list[Tensor | None] = [None] * self.case.num_ranks
        return FusedParameters(
            w1=by_rank(self.w1),
            w2=by_rank(self.w2),
            b1=nothing if self.b1 is None else by_rank(self.b1),
            b2=nothing if self.b2 is None else by_rank(self.b2),
            activation=self.case.activation,
        )

    # ---- the definition

    def exact(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.where, torch.float64)

    def of_rows(self, rank: int, by_token: Tensor) -> Tensor:
        """What the tokens of the rows that arrive have, where ``by_token`` is."""
        return by_token[(self.received[rank] // self.case.top_k).to(by_token.device)]

    def of_slots(self, rank: int, by_slot: Tensor) -> Tensor:
        """(N, 1) in float64."""
        return self.exact(by_slot.reshape(-1)[self.received[rank]].unsqueeze(1))

    def times(self, rank: int, rows: Tensor, weight: Tensor) -> Tensor:
        """rows (N, I) by the matrix of each one's expert, of weight (W E, O, I)."""
        own = weight[rank * self.case.experts : (rank + 1) * self.case.experts]
        parts = zip(rows.split(self.groups[rank]), own, strict=True)
        return torch.cat([part @ each.t() for part, each in parts])

    def by_expert(self, rank: int, per_expert: Tensor | None, columns: int) -> Tensor:
        """(N, columns): of each row's expert; zeros for None."""
        count = self.received[rank].numel()
        if per_expert is None:
            return torch.zeros(count, columns, dtype=torch.float64, device=self.where)
        own = self.exact(per_expert[rank * self.case.experts : (rank + 1) * self.case.experts])
        return own.repeat_interleave(torch.tensor(self.groups[rank], device=self.where), dim=0)

    def cut(self, rank: int, found: Tensor) -> Tensor:
        """Without rows behind the last that arrived."""
        return found[: self.received[rank].numel()].to(self.where)

    def check_rows(self, rows: Sequence[Tensor], weights: Sequence[Tensor], tokens_TM: Tensor) -> None:
        """Rows are their tokens', to the bit, and stand where the definition says."""
        for rank in range(self.case.num_ranks):
            assert torch.equal(rows[rank].cpu(), self.of_rows(rank, tokens_TM)), f"rows of rank {rank}"
            wanted = self.weight_TK.reshape(-1)[self.received[rank]]
            assert torch.equal(weights[rank].cpu(), wanted), f"weights of rank {rank}'s rows"

    def check_sums(self, found_TM: Tensor, rows: Sequence[Tensor], sizes: Sequence[Tensor]) -> None:
        """Of each token the sum of its rows: rounded a row, a rank's sum, in all. sizes: of a row's terms."""
        case, unit = self.case, ROUNDING[self.case.dtype]
        shape = (*self.expert_TK.shape, case.d_model)
        value, lost = (torch.zeros(shape, dtype=torch.float64, device=self.where) for _ in range(2))
        for rank, slots in enumerate(self.received):
            at = slots.to(self.where)
            value.view(-1, case.d_model)[at] = rows[rank]
            lost.view(-1, case.d_model)[at] = unit * rows[rank].abs() + SUMS * sizes[rank]
        rank_TK = torch.where(self.keep_TK, self.expert_TK // case.experts, -1).to(self.where)
        total, error = (torch.zeros(found_TM.shape, dtype=torch.float64, device=self.where) for _ in range(2))
        for rank in range(case.num_ranks):
            here = (rank_TK == rank).unsqueeze(2)
            own, own_error = (value * here).sum(1), (lost * here).sum(1)
            total += own
            error += own_error + unit * (own.abs() + own_error)
        tiny = (case.top_k + case.num_ranks) * SMALLEST[case.dtype]
        assert_near(found_TM.to(self.where), total, 1.01 * error + unit * error + tiny)

    def check_forward(self, found: Forward) -> None:
        case = self.case
        self.check_rows(found.rows, found.weights, self.x_TM)
        w1, w2, x_TM = (self.exact(each) for each in (self.w1, self.w2, self.x_TM))
        products, sizes = [], []
        for rank in range(case.num_ranks):
            x = self.of_rows(rank, x_TM)
            b1, b2 = self.by_expert(rank, self.b1, case.wide), self.by_expert(rank, self.b2, case.d_model)
            hidden, active = self.cut(rank, found.hidden[rank]), self.cut(rank, found.active[rank])
            size = self.times(rank, x.abs(), w1.abs()) + b1.abs()
            assert_near(hidden, self.times(rank, x, w1) + b1, SUMS * size)
            rounded = hidden.double()  # all that backward has
            assert_near(
                active,
                ACTIVATE[case.activation](rounded),
                FUNCTIONS * operand_size(case.activation, rounded),
            )
            a, s = active.double(), self.of_slots(rank, self.weight_TK)
            products.append((self.times(rank, a, w2) + b2) * s)
            sizes.append((self.times(rank, a.abs(), w2.abs()) + b2.abs()) * s.abs())
        self.check_sums(found.y, products, sizes)

    def check_backward(self, found: Backward, hidden: Sequence[Tensor]) -> None:
        """hidden: T_M of the forward pass, by rank."""
        case, kind = self.case, self.case.activation
        self.check_rows(found.rows, found.weights, self.grad_TM)
        w1, w2, grad_TM = (self.exact(each) for each in (self.w1, self.w2, self.grad_TM))
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        of_weight, lost_weight = (
            torch.zeros(self.expert_TK.numel(), dtype=torch.float64, device=self.where) for _ in range(2)
        )
        products, sizes = [], []
        for rank, slots in enumerate(self.received):
            g, s = self.of_rows(rank, grad_TM), self.of_slots(rank, self.weight_TK)
            b2 = self.by_expert(rank, self.b2, case.d_model)
            of_active, size = self.times(rank, g, w2), self.times(rank, g.abs(), w2.abs())
            leaf = self.cut(rank, hidden[rank]).double().requires_grad_()
            value = ACTIVATE[kind](leaf)
            (slope,) = torch.autograd.grad(value, leaf, of_active * s)
            h, value = leaf.detach(), value.detach()
            # As in grouped.py: no derivative exceeds 1.2; in float32 it loses some of its operand.
            of_product = (SUMS * size + FUNCTIONS * of_active.abs()) * s.abs()
            lost = pair(kind, h, 1.2 * of_product * (1 + operands(kind, h)))
            of_hidden = self.cut(rank, found.of_hidden[rank])
            assert_near(of_hidden, slope, lost)
            lost_value = FUNCTIONS * operand_size(kind, h)
            assert_near(self.cut(rank, found.weighted[rank]), value * s, lost_value * s.abs())
            at = slots.to(self.where)
            of_weight[at] = (value * of_active).sum(1) + (g * b2).sum(1)
            lost_dots = 2 * (SUMS * (value.abs() * size) + lost_value * size).sum(1)
            lost_weight[at] = lost_dots + SUMS * (g * b2).abs().sum(1)
            rounded = of_hidden.double()
            products.append(self.times(rank, rounded, w1))
            sizes.append(self.times(rank, rounded.abs(), w1.abs()))
        self.check_sums(found.of_x, products, sizes)
        found_weight = found.of_weight.to(self.where)
        assert found_weight.dtype == torch.float32
        assert not found_weight[~self.keep_TK.to(self.where)].any(), "a dropped slot has a gradient"
        assert_near(found_weight, of_weight.view_as(found_weight), lost_weight.view_as(found_weight))


# ---- launches

NO_LINK = (0, -1, 0, 0)
"""Of a row that is not summed: a link of garbage would send a kernel anywhere."""


class Regions:
    """Of one heap, as tensors."""

    def __init__(self, heap: Heap) -> None:
        shape, places, device = heap.shape, heap.shape.places, heap.device

        def at(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return tensor_at(heap.base + places[name], size, dtype, device)

        self.inbox = at("inbox", (shape.rows, shape.d_model), shape.dtype)
        self.home = at("home", (shape.home_rows, shape.d_model), shape.dtype)
        self.weights = at("weights", (shape.rows,), torch.float32)
        self.dots = at("dots", (shape.home_rows,), torch.float32)
        links = at("links", (shape.rows, 4), torch.int32)
        links.copy_(torch.tensor(NO_LINK, dtype=torch.int32).expand(shape.rows, 4).contiguous())

    def poison(self) -> None:
        """By copies alone: test_ptx.py runs this where PyTorch has no kernels."""
        for each in (self.inbox, self.home, self.weights, self.dots):
            each.copy_(torch.full(each.shape, NAN, dtype=each.dtype))

    def fill(self) -> None:
        for each in (self.inbox, self.home, self.weights, self.dots):
            each.fill_(NAN)


class Player:
    """Passes of some ranks of a world: of all, by virtual ranks, or of a process's own."""

    def __init__(
        self,
        world: World,
        heaps: Sequence[Heap],
        *,
        division: Division | None = None,
        make: Callable[..., Launcher] = Launcher,
        fused_routings: Sequence[FusedRouting] | None = None,
    ) -> None:
        taken = division or world.case.division
        self.world, self.heaps = world, heaps
        self.launcher = make(heaps, lambda kernel, direction: taken)
        here = [heap.rank for heap in heaps]
        self.fused_routings = [(fused_routings or world.fused_routings())[rank] for rank in here]
        every = world.parameters()
        self.given = FusedParameters(
            activation=every.activation,
            **{name: [getattr(every, name)[rank] for rank in here] for name in ("w1", "w2", "b1", "b2")},
        )
        self.regions = [Regions(heap) for heap in heaps]
        self.x_TM, self.grad_TM = world.x_TM.to(DEVICE), world.grad_TM.to(DEVICE)
        self.weight_TK = world.weight_TK.to(DEVICE)

    def poison(self) -> None:
        for each in self.regions:
            each.poison()

    def arrived(self) -> tuple[list[Tensor], list[Tensor]]:
        """Copies on the CPU of the rows that are there, and of their weights."""
        counts = [self.world.received[heap.rank].numel() for heap in self.heaps]
        rows = [heap.rows(count).to(CPU, copy=True) for heap, count in zip(self.heaps, counts, strict=True)]
        both = zip(self.heaps, counts, strict=True)
        return rows, [heap.row_weight(count).to(CPU, copy=True) for heap, count in both]

    def forward(self) -> Forward:
        self.poison()
        hidden, active = comet_operators.dispatch_hidden(
            self.launcher, self.fused_routings, self.x_TM, self.weight_TK, self.given.w1, self.given.b1,
            activation=self.given.activation, keep=True,
        )  # fmt: skip
        assert hidden is not None
        rows, weights = self.arrived()
        y = comet_operators.product_combine(
            self.launcher, self.fused_routings, active, self.given.w2, self.given.b2
        )
        return Forward(rows=rows, weights=weights, hidden=hidden, active=active, y=y)

    def backward(self, hidden: Sequence[Tensor], *, again: bool = True) -> Backward:
        """again: tokens' rows are dispatched once more in between, as where T_DI is not kept."""
        self.poison()
        of_hidden, weighted, dots = comet_operators.dispatch_hidden_gradient(
            self.launcher, self.fused_routings, self.grad_TM, self.weight_TK, self.given.w2, self.given.b2,
            hidden, activation=self.given.activation,
        )  # fmt: skip
        rows, weights = self.arrived()
        if again:
            self.poison()
            comet_operators.dispatch(self.launcher, self.fused_routings, self.x_TM, self.weight_TK)
            for heap, found, own in zip(self.heaps, *self.arrived(), strict=True):
                assert torch.equal(found, self.world.of_rows(heap.rank, self.world.x_TM)), "sent again"
                wanted = self.world.weight_TK.reshape(-1)[self.world.received[heap.rank]]
                assert torch.equal(own, wanted), "sent again"
        of_x, of_weight = comet_operators.gradient_combine(
            self.launcher, self.fused_routings, of_hidden, self.given.w1, dots
        )
        return Backward(
            rows=rows, weights=weights, of_hidden=of_hidden, weighted=weighted, of_x=of_x, of_weight=of_weight
        )

    def check(self) -> None:
        for heap in self.heaps:
            heap.check()


@contextmanager
def virtual(case: Case, world: World, **options: Any) -> Iterator[Player]:
    """All ranks of a world, on heaps with room for what arrives and no more."""
    owner = VirtualRanks(
        case.num_ranks,
        case.experts,
        rows=world.max_received + case.spare,
        home_rows=world.max_sent,
        d_model=case.d_model,
        dtype=case.dtype,
        device=DEVICE,
    )
    try:
        yield Player(world, owner.heaps, **options)
    finally:
        owner.close()


def play(case: Case, random: torch.Generator, *, where: torch.device | None = None, **options: Any) -> None:
    """Both passes by virtual ranks, every element checked."""
    world = World(case, random, where=where)
    with virtual(case, world, **options) as player:
        forward = player.forward()
        world.check_forward(forward)
        backward = player.backward(forward.hidden)
        player.check()
        world.check_backward(backward, forward.hidden)


# ---- integers


def need_kernels() -> None:
    """Fails where the fused kernels do not run; skips where nobody built them on purpose."""
    why = extension.path(DEVICE)[1]
    if why is None:
        return
    if os.environ.get("PMOE_CUDA") == "0":
        pytest.skip(f"PMOE_CUDA=0: {why}")
    pytest.fail(why)
