"""The fused kernels over integers whose results are known to the bit.

Letters: T tokens of all ranks, K choices, E experts of a rank, M = d_model, H = d_hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.virtual_ranks import FusedParameters, VirtualRanks
from pmoe.kernels import route
from pmoe.kernels.comet.launcher import Division
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.route import Routes
from tests.faults import InjectedFaults
from tests.gpu.fused import DEVICE, Regions

THREE_BLOCKS = Division(3, 256)


@dataclass(frozen=True)
class Turn:
    """One round's tokens, routing and what must come of them, to the bit, on the device."""

    x_TM: Tensor
    grad_TM: Tensor
    weight_TK: Tensor
    routes: Routes
    fused_routings: list[FusedRouting]
    y: Tensor
    of_x: Tensor
    of_weight: Tensor


class Integers:
    """Virtual ranks over small integers and powers of two: float32 sums them exactly in any order, so that
    nothing is rounded but what the definition rounds. ReLU experts without biases; bfloat16."""

    def __init__(
        self,
        num_ranks: int,
        *,
        experts: int = 2,
        tokens: int = 256,
        top_k: int = 2,
        d_model: int = 520,
        d_hidden: int = 136,
        division: Division = THREE_BLOCKS,
        faults: InjectedFaults | None = None,
        seed: int = 1,
    ) -> None:
        """tokens: of all ranks."""
        self.tokens, self.top_k, self.num_experts = tokens, top_k, num_ranks * experts
        self.experts = experts
        self.random = torch.Generator(DEVICE).manual_seed(seed)
        # Twice what can arrive: where the grant of an earlier round is taken for this one's, nothing is
        # written beyond the heap.
        self.virtual = VirtualRanks(
            num_ranks, experts, rows=2 * tokens * top_k, home_rows=tokens * top_k, d_model=d_model,
            dtype=torch.bfloat16, device=DEVICE, division=division,
            make_launcher=(faults or InjectedFaults()).launcher,
        )  # fmt: skip
        self.regions = [Regions(heap) for heap in self.virtual.heaps]
        self.powers = torch.tensor([0.5, 1.0, 2.0], device=DEVICE)
        self.w1 = self.draw(self.num_experts, d_hidden, d_model)
        self.w2 = self.draw(self.num_experts, d_model, d_hidden)
        nothing: list[Tensor | None] = [None] * num_ranks
        self.given = FusedParameters(
            w1=self.w1.to(torch.bfloat16).chunk(num_ranks),
            w2=self.w2.to(torch.bfloat16).chunk(num_ranks),
            b1=nothing,
            b2=nothing,
            activation="relu",
        )

    def draw(self, *shape: int) -> Tensor:
        """-1, 0 or 1, in float32."""
        return torch.randint(-1, 2, shape, generator=self.random, device=DEVICE, dtype=torch.float32)

    def turn(self, number: int) -> Turn:
        """A third of them skewed to one expert or another."""
        logits = torch.randn(self.tokens, self.num_experts, generator=self.random, device=DEVICE)
        if number % 3 == 0:
            logits[:, number % self.num_experts] += 3
        routes = route.route(logits, self.top_k, normalize=False, num_chunks=self.virtual.shape.num_ranks)
        x, grad = (self.draw(self.tokens, self.w1.shape[2]) for _ in range(2))
        weight_TK = self.powers[
            torch.randint(3, (self.tokens, self.top_k), generator=self.random, device=DEVICE)
        ]
        return Turn(
            x.bfloat16(), grad.bfloat16(), weight_TK, routes, self.virtual.fused_routings(routes),
            *self.defined(x, grad, weight_TK, routes.expert_TK.long()),
        )  # fmt: skip

    def defined(
        self, x: Tensor, grad: Tensor, weight_TK: Tensor, expert_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y, and the gradients of tokens and weights: every token by every expert, then those chosen."""
        width, height = self.w1.shape[2], self.w1.shape[1]
        rank_TK = expert_TK // self.experts

        def chosen(each_TEC: Tensor) -> Tensor:
            at = expert_TK.unsqueeze(2).expand(-1, -1, each_TEC.shape[2])
            return each_TEC.gather(1, at)

        def summed(rows_TKM: Tensor) -> Tensor:
            rows_TKM = rows_TKM.bfloat16().float()
            total = torch.zeros(x.shape[0], width, device=x.device)
            for rank in range(self.virtual.shape.num_ranks):
                own = (rows_TKM * (rank_TK == rank).unsqueeze(2)).sum(1)
                total += own.bfloat16().float()
            return total.bfloat16()

        hidden_TEH = (x @ self.w1.flatten(0, 1).t()).view(-1, self.num_experts, height).bfloat16().float()
        active_ETH = hidden_TEH.relu().transpose(0, 1)
        out_TEM = (active_ETH @ self.w2.transpose(1, 2)).transpose(0, 1)
        y = summed(chosen(out_TEM) * weight_TK.unsqueeze(2))

        of_active_TKH = chosen((grad @ self.w2).transpose(0, 1))
        hidden_TKH = chosen(hidden_TEH)
        of_hidden_TKH = of_active_TKH * weight_TK.unsqueeze(2) * (hidden_TKH > 0)
        at = expert_TK.unsqueeze(2).expand_as(of_hidden_TKH)
        of_hidden_TEH = torch.zeros_like(hidden_TEH).scatter_(1, at, of_hidden_TKH.bfloat16().float())
        of_rows_TEM = (of_hidden_TEH.transpose(0, 1) @ self.w1).transpose(0, 1)
        of_weight = (hidden_TKH.relu() * of_active_TKH).sum(2)
        return y, summed(chosen(of_rows_TEM)), of_weight

    def fill(self) -> None:
        for each in self.regions:
            each.fill()

    def play(self, turn: Turn) -> Tensor:
        """Whether anything of a round came out wrong, (), on the device. The host waits for nothing."""
        self.fill()
        y, hidden = self.virtual.forward(turn.x_TM, turn.weight_TK, turn.fused_routings, self.given)
        assert hidden is not None
        self.fill()
        of_x, of_weight, _, _ = self.virtual.backward(
            turn.grad_TM, turn.weight_TK, turn.fused_routings, self.given, hidden
        )
        wrong = [
            (found != wanted).any()
            for found, wanted in ((y, turn.y), (of_x, turn.of_x), (of_weight, turn.of_weight))
        ]
        return torch.stack(wrong).any()
