"""The fused steps for one rank in one process, as a layer calls them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels.comet import operators as launches
from pmoe.kernels.comet.launcher import Divide, Launcher
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.heap import Heap


class Steps:
    """The steps of a fused layer; see `launches` for what each computes. Every step is a collective.

    All ranks must call the same steps in the same order.

    find_heap: returns the heap that serves this call now. Between forward and backward a larger batch may
        replace it by a larger heap. The two passes need no memory in common.
    """

    def __init__(self, find_heap: Callable[[], Heap], divide: Divide) -> None:
        self._find_heap = find_heap
        self._divide = divide
        self._made = Launcher([find_heap()], divide)

    @property
    def launcher(self) -> Launcher:
        """The launcher of the heap that is current now."""
        heap = self._find_heap()
        if heap is not self._made.heaps[0]:
            self._made = Launcher([heap], self._divide)
        return self._made

    @contextlib.contextmanager
    def all_or_give_up(self) -> Iterator[None]:
        """Runs all steps of a pass in the block, or gives the heap up if one fails.

        This rank alone may run out of memory between two steps. A round that was left in the middle cannot be
        continued.
        """
        try:
            yield
        except BaseException as error:
            self._made.heaps[0].give_up(f"{type(error).__name__}: {error}")
            raise

    def dispatch(self, fused_routing: FusedRouting, x_TM: Tensor, weight_TK: Tensor) -> None:
        """Sends rows and routing weights to the ranks that compute them.

        There `rows` and `row_weight` return them.
        """
        launches.dispatch(self.launcher, [fused_routing], x_TM, float_weights(weight_TK))

    def rows(self, fused_routing: FusedRouting) -> Tensor:
        """Returns the rows that the last dispatch brought here, (N, M). Valid until the next combine."""
        return self.launcher.heaps[0].rows(fused_routing.num_received)

    def row_weight(self, fused_routing: FusedRouting) -> Tensor:
        """Returns the routing weights of these rows, (N,) float32. Valid until the next combine."""
        return self.launcher.heaps[0].row_weight(fused_routing.num_received)

    def dispatch_hidden(
        self,
        fused_routing: FusedRouting,
        x_TM: Tensor,
        weight_TK: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor | None, Tensor]:
        """Returns T_M (N, G), or None unless ``keep`` is set in options, and the activated hidden (N, H)."""
        hidden, active = launches.dispatch_hidden(
            self.launcher, [fused_routing], x_TM, float_weights(weight_TK), [w1], [b1], **options
        )
        return (None if hidden is None else hidden[0]), active[0]

    def product_combine(
        self, fused_routing: FusedRouting, active_NH: Tensor, w2: Tensor, b2: Tensor | None
    ) -> Tensor:
        """Returns T_O (T, M) from the activated hidden (N, H)."""
        return launches.product_combine(self.launcher, [fused_routing], [active_NH], [w2], [b2])

    def dispatch_hidden_gradient(
        self, fused_routing: FusedRouting, grad_TM: Tensor, weight_TK: Tensor, *of_rank: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dT_M (N, G), the activated hidden (N, H) and parts of the weights' gradients (P, N).

        of_rank: w2, b2 and T_M.
        """
        grad_hidden, active, dots = launches.dispatch_hidden_gradient(
            self.launcher,
            [fused_routing],
            grad_TM,
            float_weights(weight_TK),
            *([tensor] for tensor in of_rank),
            **options,
        )
        return grad_hidden[0], active[0], dots[0]

    def gradient_combine(
        self, fused_routing: FusedRouting, grad_hidden_NG: Tensor, w1: Tensor, dots_PN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns dT_I (T, M) and the gradients of the routing weights (T, K)."""
        return launches.gradient_combine(self.launcher, [fused_routing], [grad_hidden_NG], [w1], [dots_PN])


def float_weights(weight_TK: Tensor) -> Tensor:
    """Returns routing weights as the kernels read them: contiguous float32, without a graph."""
    return weight_TK.detach().to(torch.float32).contiguous()
