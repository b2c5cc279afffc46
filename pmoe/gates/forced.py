"""A gate that forces balance, or a chosen amount of skew: for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import check_count, check_int, check_number, list_of
from pmoe.gates.overriding import OverridingGate

FINEST = 10**6
"""The share is rounded to a fraction whose denominator is at most this."""


class ForcedGate(OverridingGate):
    """Replaces the choices of another gate, so that the experts in ``busy`` get a given share of the rows.

    Without ``busy`` every expert gets equally many rows: forced balance. Otherwise the fraction ``share`` of
    the rows is divided equally among the busy experts, and the rest equally among the other experts. The
    choices of successive tokens alternate, so the numbers of rows are exact up to rounding on each rank, and
    in each part of a batch. A rank begins where the rank before it ends, so the rounding errors of ranks with
    equally many tokens cancel. Ranks are those of the default process group, so the ranks of a layer should
    be consecutive there. The choices do not depend on the tokens' values.

    The routing weights and l_aux are those of the inner gate (`OverridingGate`).

    Args:
        gate: the inner gate.
        num_experts: number of experts of all ranks.
        busy: the busy experts; () forces balance.
        share: fraction of all rows that the busy experts get, from 0 to 1; None only without busy experts.
            A token has distinct experts, so at most len(busy) of its top_k choices can be busy.

    Raises ValueError if ``busy`` or ``share`` are outside their ranges, and at the call if the share is not
    possible with top_k distinct experts.

    Example: 8 experts, busy (0,), share 0.3, top-1 -> expert 0 gets 30 % of the rows, each other one 10 %.
    """

    num_experts: int
    busy: list[int]
    share: Fraction

    def __init__(
        self,
        gate: nn.Module,
        num_experts: int,
        *,
        busy: Iterable[int] = (),
        share: float | None = None,
    ) -> None:
        super().__init__(gate)
        check_count(num_experts=num_experts)
        self.num_experts = int(num_experts)
        experts = list_of("busy", busy)
        for expert in experts:
            check_int(busy=expert)
        if len(set(experts)) < len(experts) or not set(experts) <= set(range(num_experts)):
            raise ValueError(f"busy ({experts}) must hold distinct experts below num_experts ({num_experts})")
        if (share is None) is bool(experts):
            raise ValueError(
                f"share ({share}) must be a number if and only if there are busy experts ({experts})"
            )
        self.busy = [int(expert) for expert in experts]
        self.share = Fraction(0)
        if share is not None:
            check_number(share=share)
            if not 0 <= share <= 1:
                raise ValueError(f"share ({share}) must be between 0 and 1")
            self.share = Fraction(float(share)).limit_denominator(FINEST)

    @classmethod
    def of_ratio(cls, gate: nn.Module, num_experts: int, num_ranks: int, ratio: float) -> ForcedGate:
        """Returns the gate with which rank 0 gets ``ratio`` times as many rows as the mean of all ranks.

        Experts are spread over the ranks in order, so the busy experts are the first num_experts / num_ranks.
        The other ranks get equally many rows. ratio = 1 is forced balance.

        gate, num_experts: the inner gate, and the number of experts of all ranks.
        num_ranks: number of ranks that the experts are on. It divides num_experts.
        ratio: rows of the busiest rank over the mean of the ranks, from 1 to num_ranks.

        Raises ValueError for other values.
        """
        check_count(num_experts=num_experts, num_ranks=num_ranks)
        check_number(ratio=ratio)
        if num_experts % num_ranks:
            raise ValueError(f"num_experts ({num_experts}) must be divisible by num_ranks ({num_ranks})")
        if not 1 <= ratio <= num_ranks:
            raise ValueError(f"ratio ({ratio}) must be between 1 and num_ranks ({num_ranks})")
        return cls(gate, num_experts, busy=range(num_experts // num_ranks), share=ratio / num_ranks)

    def choices(self, expert_TK: Tensor) -> Tensor:
        """Returns the forced choices, (T, K) int64, for T tokens with K choices each.

        A busy choice is a choice that goes to a busy expert. ``share`` is the fraction of busy choices: the
        first t tokens together have floor(t * K * share) busy choices. Busy choices go round the busy experts
        in turn, and the other choices go round the other experts. So the experts of a token are distinct.

        Tokens are numbered from rank * T, as if the ranks' tokens were one batch. If every rank began with
        the first expert, W ranks with few tokens would send W times as many rows there as to the last one.

        expert_TK: (T, K) int64, the inner gate's choices. Only their shape is read.

        Raises ValueError if a token would need the same expert twice.
        """
        num_tokens, top_k = expert_TK.shape
        self._check(top_k)
        device = expert_TK.device
        busy = set(self.busy)
        others = [expert for expert in range(self.num_experts) if expert not in busy]
        busy_E = torch.tensor(self.busy or others, device=device)
        other_E = torch.tensor(others or self.busy, device=device)
        first = num_tokens * (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)
        number_T = first + torch.arange(num_tokens + 1, device=device)
        bounds = number_T * (top_k * self.share.numerator) // self.share.denominator
        before_T1 = bounds[:-1, None]
        num_busy_T1 = bounds[1:, None] - before_T1
        choice_K = torch.arange(top_k, device=device)
        busy_TK = busy_E[(before_T1 + choice_K) % len(busy_E)]
        other_before_T1 = number_T[:-1, None] * top_k - before_T1
        other_TK = other_E[(other_before_T1 + choice_K - num_busy_T1) % len(other_E)]
        return torch.where(choice_K < num_busy_T1, busy_TK, other_TK)

    def _check(self, top_k: int) -> None:
        """Raises ValueError if the share of busy experts is not possible with top_k experts of a token.

        The experts of a token are distinct, so there may be too few busy experts, or too few others.
        """
        most_busy = -(-top_k * self.share.numerator // self.share.denominator)
        most_others = top_k - top_k * self.share.numerator // self.share.denominator
        if most_busy > len(self.busy) or most_others > self.num_experts - len(self.busy):
            raise ValueError(
                f"share ({float(self.share):g}) of {len(self.busy)} busy experts among num_experts "
                f"({self.num_experts}) is not possible with top_k ({top_k}): a token's experts are distinct, "
                f"so it would need {most_busy} busy experts or {most_others} others. Name more busy experts, "
                "or change share"
            )

    def extra_repr(self) -> str:
        """Returns the options, for repr."""
        return f"num_experts={self.num_experts}, busy={self.busy}, share={float(self.share):g}"
