"""The journey of a rank's rows, and the steps of a fused layer, of the kernels and of stand-ins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Journey:
    """Where the rows of a rank's tokens go, and what comes to it. All tensors are int32.

    expert_TK: (T, K), of all ranks' experts.
    position_TK: (T, K), where each slot's row stands among the rows that this rank sends, which are sorted by
        expert, then by token; -1 where it is dropped.
    slot_S: (S,), the slot of each of these rows.
    send_WE: (W, E), rows for each rank's experts, where the rows are.
    recv_WE: (W, E), rows from each rank for this one's experts, where the rows are.
    num_received: N, or more.

    The tensors by token may be those of several ranks, of which this rank's are the num_tokens from
    first_token on; positions then begin at first_row, as `pmoe.kernels.route` numbers them with a chunk a
    rank.
    """

    rank: int
    expert_TK: Tensor
    position_TK: Tensor
    slot_S: Tensor
    send_WE: Tensor
    recv_WE: Tensor
    num_received: int
    first_token: int = 0
    num_tokens: int | None = None
    first_row: int = 0

    @property
    def num_ranks(self) -> int:
        return self.send_WE.shape[0]

    @property
    def top_k(self) -> int:
        return self.expert_TK.shape[1]

    @property
    def ends_E(self) -> Tensor:
        """int32, the running sum of the rows that arrive, by expert."""
        return self.recv_WE.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)


class Steps(Protocol):
    """What a fused layer consists of. Each is collective: all ranks call the same steps in the same order."""

    def dispatch(self, journey: Journey, x_TM: Tensor, weight_TK: Tensor) -> None:
        """Rows and their routing weights to the ranks that compute them: `rows` and `row_weight` there."""
        ...

    def give_up(self, why: str) -> None:
        """A round was left in the middle by an error of this rank alone, and cannot be gone on with."""
        ...

    def rows(self, journey: Journey) -> Tensor:
        """(N, M) what the last dispatch brought to this rank; until the next step that combines."""
        ...

    def row_weight(self, journey: Journey) -> Tensor:
        """(N,) float32 (float64 for float64 rows), the routing weights of these rows; until then."""
        ...

    def dispatch_hidden(
        self,
        journey: Journey,
        x_TM: Tensor,
        weight_TK: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        *,
        activation: str,
        keep: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """`dispatch`, and T_M = rows w1[e]^T + b1[e] and the activated hidden.

        T_M: (N, G), None unless ``keep``. activated hidden: (N, H).
        """
        ...

    def product_combine(self, journey: Journey, active_NH: Tensor, w2: Tensor, b2: Tensor | None) -> Tensor:
        """(T, M): of each token the sum of its rows' (active w2[e]^T + b2[e]) times their weights.

        Each rank sums its own rows of a token before they travel; the owner sums the ranks' sums in fixed
        order.
        """
        ...

    def dispatch_hidden_gradient(
        self,
        journey: Journey,
        grad_TM: Tensor,
        weight_TK: Tensor,
        w2: Tensor,
        b2: Tensor | None,
        hidden_NG: Tensor,
        *,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`dispatch` of dT_O, and three tensors from it.

        dT_M times the rows' weights (N, G)
        the activated hidden times the weights (N, H)
        the gradients of the weights by parts of the columns (P, N), to be summed over P in that order:
            <activated hidden, grad w2[e]>, plus <grad, b2[e]> where there is a bias
        """
        ...

    def gradient_combine(
        self, journey: Journey, grad_hidden_NG: Tensor, w1: Tensor, dots_PN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dT_I, and the gradients of the weights.

        dT_I: (T, M), of each token the sum of its rows' grad_hidden w1[e], as in `product_combine`.
        gradients of the weights: (T, K), 0 for dropped slots.
        """
        ...
