"""Several virtual ranks of a fused layer in one process and one launch, on one device.

For tests of the kernels and for measurements of what their protocol costs: the kernels see no difference to
real ranks but that the heaps' addresses are all on one device. All ranks' tokens are rows of one tensor, see
`pmoe.measure.fused_timing`; gate and routing are launched once for all.

Letters: T tokens of all ranks, K choices, W ranks, M = d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pmoe.comm.heap import HeapShape, virtual_heaps
from pmoe.kernels import comet
from pmoe.kernels.comet import Divide, HeapView, Journey, Launcher
from pmoe.kernels.route import Routes
from pmoe.measure.fused_timing import FusedParameters, journeys_of
from pmoe.planner.division import Division


class VirtualRanks:
    """W ranks with their heaps. rows: that each can receive.

    Raises ValueError where the kernels do not run here, or for more ranks than one launch takes; RuntimeError
    where memory does not suffice. `close` gives it back.
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
        make_launcher: Callable[[Sequence[HeapView], Divide], Launcher] = Launcher,
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
        """Waits for the device; HeapError where a rank has waited in vain."""
        for heap in self.heaps:
            heap.check()

    def journeys(self, routes: Routes) -> list[Journey]:
        """Of a routing with a chunk a rank; see `journeys_of`."""
        return journeys_of(routes, self.shape, range(self.shape.num_ranks))

    def forward(
        self,
        x_TM: Tensor,
        weight_TK: Tensor,
        journeys: Sequence[Journey],
        given: FusedParameters,
        *,
        keep: bool = True,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """T_O (T, M), and T_M by rank where it is kept: two launches."""
        hidden, active = comet.dispatch_hidden(
            self.launcher,
            journeys,
            x_TM,
            weight_TK,
            given.w1,
            given.b1,
            activation=given.activation,
            keep=keep,
        )
        return comet.product_combine(self.launcher, journeys, active, given.w2, given.b2), hidden

    def backward(
        self,
        grad_TM: Tensor,
        weight_TK: Tensor,
        journeys: Sequence[Journey],
        given: FusedParameters,
        hidden: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """dT_I (T, M), the gradients of the weights (T, K); dT_M and the weighted activated hidden by rank:
        two launches, without the products that only the parameters wait for."""
        of_hidden, active, dots = comet.dispatch_hidden_gradient(
            self.launcher,
            journeys,
            grad_TM,
            weight_TK,
            given.w2,
            given.b2,
            hidden,
            activation=given.activation,
        )
        of_x, of_weight = comet.gradient_combine(self.launcher, journeys, of_hidden, given.w1, dots)
        return of_x, of_weight, of_hidden, active
