"""The steps of a fused layer, for the kernels and for what stands in for them.

Letters: T tokens of this rank, K choices, N rows that arrive, W ranks, E experts of a rank, P parts of the
columns, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pmoe.kernels.comet.journey import Journey


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
