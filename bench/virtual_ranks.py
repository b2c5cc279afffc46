"""Several virtual ranks of a fused layer in one process and one launch, on one device.

They are for tests of the kernels, and for measuring the cost of their protocol. To the kernels they are like
real ranks, except that the addresses of all heaps are on one device. The tokens of all ranks are rows of one
tensor (see `pmoe.measure.fused_kernels`). Gate and routing are launched once for all ranks.

Letters: T tokens of all ranks, K choices, W ranks, E experts of a rank, M = d_model, H = d_hidden, G = H or
2H rows of w1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pmoe.comm.heap.providers import virtual_heaps
from pmoe.kernels import flashdmoe
from pmoe.kernels.comet import operators as comet_operators
from pmoe.kernels.comet.launcher import Divide, Division, Launcher
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.heap import Heap, HeapShape
from pmoe.kernels.route import Routes
from pmoe.measure.fused_kernels import fused_routings_of
from pmoe.ordering.sorted import chunk_bounds, sort_rows


@dataclass(frozen=True, kw_only=True)
class FusedParameters:
    """Parameters of the experts of all ranks, as one tensor for each rank.

    w1: (E, G, M). E experts of a rank, M = d_model, G = d_hidden, or twice as many for SwiGLU.
    w2: (E, M, H), H = d_hidden.
    b1, b2: (E, G) and (E, M), or None.
    activation: name of the nonlinearity.
    """

    w1: Sequence[Tensor]
    w2: Sequence[Tensor]
    b1: Sequence[Tensor | None]
    b2: Sequence[Tensor | None]
    activation: str

    @classmethod
    def random(
        cls,
        num_ranks: int,
        experts: int,
        d_model: int,
        d_hidden: int,
        activation: str,
        *,
        bias: bool,
        like: Tensor,
    ) -> FusedParameters:
        """Returns random parameters, scaled so that hidden rows and outputs are about as large as the input.

        like: a tensor with the dtype and device of the parameters.
        """
        width = 2 * d_hidden if activation == "swiglu" else d_hidden

        def made(*shape: int) -> list[Tensor]:
            scale = shape[-1] ** -0.5
            return [
                torch.randn(shape, dtype=torch.float32, device=like.device).mul_(scale).to(like.dtype)
                for _ in range(num_ranks)
            ]

        nothing: list[Tensor | None] = [None] * num_ranks
        return cls(
            w1=made(experts, width, d_model),
            w2=made(experts, d_model, d_hidden),
            b1=made(experts, width) if bias else nothing,
            b2=made(experts, d_model) if bias else nothing,
            activation=activation,
        )


class VirtualRanks:
    """W virtual ranks with their symmetric heaps, for COMET's kernels.

    rows: number of rows that each rank can receive.

    Raises ValueError if the kernels do not run on this machine, or for more ranks than one launch takes.
    Raises RuntimeError if memory does not suffice. `close` frees the memory.
    """

    def __init__(
        self,
        num_ranks: int,
        experts: int,
        *,
        rows: int,
        home_rows: int,
        d_model: int,
        dtype: torch.dtype,
        device: torch.device,
        division: Division | None = None,
        make_launcher: Callable[[Sequence[Heap], Divide], Launcher] = Launcher,
    ) -> None:
        shape = HeapShape(num_ranks, experts, rows, home_rows, d_model, dtype)
        self.shape, self.division = shape, Division(1) if division is None else division
        self.heaps = virtual_heaps(shape, device)
        try:
            self.launcher = make_launcher(self.heaps, lambda kernel, direction: self.division)
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        for heap in self.heaps:
            heap.close()

    def check(self) -> None:
        """Waits for the device. Raises HeapError if a kernel has given up waiting for another rank."""
        for heap in self.heaps:
            heap.check()

    def fused_routings(self, routes: Routes) -> list[FusedRouting]:
        """Returns, for each virtual rank, where the kernels put its rows (`FusedRouting`).

        routes: the routing of all ranks' tokens, with one chunk for each rank.
        """
        return fused_routings_of(routes, self.shape, range(self.shape.num_ranks))

    def forward(
        self,
        x_TM: Tensor,
        weight_TK: Tensor,
        fused_routings: Sequence[FusedRouting],
        operands: FusedParameters,
        *,
        keep: bool = True,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Runs forward in two launches. Returns T_O, (T, M), and T_M of each rank; None if it is not kept.

        T is the number of tokens of all ranks, M = d_model. T_O is the layer's output, T_M the hidden
        activation.

        weight_TK: (T, K), routing weights of K choices of each token.
        """
        hidden, active = comet_operators.dispatch_hidden(
            self.launcher,
            fused_routings,
            x_TM,
            weight_TK,
            operands.w1,
            operands.b1,
            activation=operands.activation,
            keep=keep,
        )
        return comet_operators.product_combine(
            self.launcher, fused_routings, active, operands.w2, operands.b2
        ), hidden

    def backward(
        self,
        grad_TM: Tensor,
        weight_TK: Tensor,
        fused_routings: Sequence[FusedRouting],
        operands: FusedParameters,
        hidden: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Runs backward in two launches, without the products that give the gradients of parameters.

        Returns the gradient of the tokens (T, M) and of the routing weights (T, K); and for each rank the
        gradient of T_M, and the activated hidden rows times their weights.

        hidden: T_M of each rank, as `forward` returned it.
        """
        of_hidden, active, dots = comet_operators.dispatch_hidden_gradient(
            self.launcher,
            fused_routings,
            grad_TM,
            weight_TK,
            operands.w2,
            operands.b2,
            hidden,
            activation=operands.activation,
        )
        of_x, of_weight = comet_operators.gradient_combine(
            self.launcher, fused_routings, of_hidden, operands.w1, dots
        )
        return of_x, of_weight, of_hidden, active


class PersistentRanks:
    """W virtual ranks for FlashDMoE's kernels: one launch of all ranks for each pass.

    Arguments and results of the methods that are lists have an element for each rank.

    cell_rows: number of rows C, in whole tiles, of a cell (the rows that one rank sends to one expert) or of
        the pool of all rows that a rank receives.
    tokens: largest number of tokens of a rank.

    Raises the errors of `VirtualRanks`.
    """

    def __init__(
        self,
        num_ranks: int,
        experts: int,
        *,
        cell_rows: int,
        tokens: int,
        d_model: int,
        d_hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        is_pool: bool = False,
    ) -> None:
        sizes = (num_ranks, experts, cell_rows, tokens, d_model, dtype, d_hidden)
        shape = HeapShape(*sizes, is_pool=is_pool)
        self.heaps = virtual_heaps(shape, device)
        self.launcher = Launcher(self.heaps, lambda kernel, direction: Division(1))

    close = VirtualRanks.close
    check = VirtualRanks.check

    def forward(
        self,
        x: Sequence[Tensor],
        weight: Sequence[Tensor],
        expert: Sequence[Tensor],
        operands: FusedParameters,
        *,
        keep: bool = True,
    ) -> list[flashdmoe.RankTensors]:
        """Runs forward. Returns the tensors of each rank's launch; "result" is T_O, (T, M), the layer's
        output.

        `pmoe.kernels.flashdmoe` describes the tensors.

        x: (T, M), the tokens of each rank.
        weight: (T, K), their routing weights.
        expert: (T, K), their experts, numbered over all ranks. No row is dropped.
        """
        passes = zip(self.heaps, self._passes(x, weight, expert, operands), expert, strict=True)
        made = [
            flashdmoe.forward_tensors(
                heap, tensors, flashdmoe.RoutingInput(expert_TK=chosen), keeps_input=keep, keeps_hidden=keep
            )
            for heap, tensors, chosen in passes
        ]
        flashdmoe.launch_pass(self.launcher, "forward", operands.activation, made)
        return made

    def backward(
        self,
        grad: Sequence[Tensor],
        weight: Sequence[Tensor],
        operands: FusedParameters,
        forward: Sequence[flashdmoe.RankTensors],
    ) -> list[flashdmoe.RankTensors]:
        """Runs backward. Returns the tensors of each rank's launch; "result" is the gradient of the tokens,
        (T, M).

        grad: (T, M), the gradients of the outputs.
        forward: the tensors that `forward` returned with ``keep=True``.
        """
        expert = [of["expert"] for of in forward]
        passes = zip(self._passes(grad, weight, expert, operands), forward, strict=True)
        made = [
            flashdmoe.backward_tensors(
                tensors,
                of,
                hopper=self.launcher.hopper,
                kept=(of["input"], of["hidden"]),
                needs=(True,) * 4,
            )
            for tensors, of in passes
        ]
        flashdmoe.launch_pass(self.launcher, "backward", operands.activation, made)
        return made

    def _passes(
        self,
        source: Sequence[Tensor],
        weight: Sequence[Tensor],
        expert: Sequence[Tensor],
        operands: FusedParameters,
    ) -> list[flashdmoe.RankTensors]:
        parameters = zip(operands.w1, operands.w2, operands.b1, operands.b2, strict=True)
        every = zip(self.heaps, expert, source, weight, parameters, strict=True)
        return [flashdmoe.pass_tensors(*inputs, operands.activation) for inputs in every]


def routes_of(expert_TK: Tensor, keep_TK: Tensor | None, num_ranks: int, num_experts: int) -> Routes:
    """Returns the routing of given choices, as `pmoe.kernels.route` would return it, with weights of 1.

    expert_TK: (T, K) int, the experts that the T tokens of all ranks choose, K each.
    keep_TK: (T, K) bool, False for choices that are dropped; None keeps all. Dropped choices get position -1.
        The rows of a rank begin where they would begin if no choice were dropped.
    """
    num_tokens, top_k = expert_TK.shape
    position_TK = torch.full_like(expert_TK, -1, dtype=torch.int32)
    slot_N = torch.zeros(num_tokens * top_k, dtype=torch.int32, device=expert_TK.device)
    counts = torch.zeros(num_ranks, num_experts, dtype=torch.int32, device=expert_TK.device)
    bounds = chunk_bounds(num_tokens, num_ranks)
    if keep_TK is None:
        keep_TK = torch.ones_like(expert_TK, dtype=torch.bool)
    for rank, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        kept = keep_TK[begin:end]
        rows = sort_rows(expert_TK[begin:end].long(), kept, 1, num_experts, range(0, 0), 0)
        first, count = begin * top_k, int(kept.sum())
        slot_N[first : first + count] = rows.slot[:count].int() + first
        own = rows.position.view(end - begin, top_k).int() + first
        position_TK[begin:end] = own.masked_fill(~kept, -1)
        counts[rank] = expert_TK[begin:end][kept].bincount(minlength=num_experts).int()
    return Routes(
        weight_TK=torch.ones(num_tokens, top_k, device=expert_TK.device),
        expert_TK=expert_TK.int(),
        position_TK=position_TK,
        slot_N=slot_N,
        counts_nE=counts,
        ends_nE=counts.flatten().cumsum(0, dtype=torch.int32).view_as(counts),
        fault=torch.zeros((), dtype=torch.int64, device=expert_TK.device),
        messages=torch.empty(0, dtype=torch.int64, device=expert_TK.device),
        l_aux=torch.zeros((), device=expert_TK.device),
    )
