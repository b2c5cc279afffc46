"""COMET's fused forward and backward steps for one rank in one process, as a layer calls them."""

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
    """Launches COMET's fused kernels on this rank: a method for each step of a layer's forward and backward.

    Every method that launches is a collective: all ranks must call the same methods in the same order.

    find_heap: function that returns the symmetric heap to use now. Between a forward and its backward pass,
        another call with a larger batch may replace the heap by a larger heap. This is allowed, because
        backward reads nothing that forward wrote into the heap.
    divide: function that returns how many thread blocks of a launch communicate, and how many columns are
        sent together.
    """

    def __init__(self, find_heap: Callable[[], Heap], divide: Divide) -> None:
        self._find_heap = find_heap
        self._divide = divide
        self._made = Launcher([find_heap()], divide)

    @property
    def launcher(self) -> Launcher:
        """The launcher for the current heap. If the heap was replaced, a new launcher is made."""
        heap = self._find_heap()
        if heap is not self._made.heaps[0]:
            self._made = Launcher([heap], self._divide)
        return self._made

    def repeatable(self) -> tuple[Heap, ...]:
        """Lets CUDA graphs repeat launches of these kernels from now on. Returns the heaps of the launches.

        While a CUDA graph is being captured, the method may only be called if `is_repeatable` is True. It
        then changes nothing.
        """
        heaps = self.launcher.heaps
        for heap in heaps:
            heap.count_on_device()
        return heaps

    @property
    def is_repeatable(self) -> bool:
        """Whether `repeatable` was called, and its heaps are still open."""
        return all(heap.round is not None and heap.release is not None for heap in self._made.heaps)

    @contextlib.contextmanager
    def all_or_give_up(self) -> Iterator[None]:
        """Returns a with-block for all launches of one pass. If it raises, this rank's heap becomes unusable.

        Ranks set flags in each other's heaps when they have written rows. If this rank fails between two
        launches, for example because it runs out of memory, the other ranks wait for the flags of this pass.
        If this rank then began a new pass, the other ranks would mistake its new flags for flags of the
        unfinished pass, and read rows that were never written.
        """
        try:
            yield
        except BaseException as error:
            self._made.heaps[0].give_up(f"{type(error).__name__}: {error}")
            raise

    def dispatch(self, fused_routing: FusedRouting, x_TM: Tensor, weight_TK: Tensor) -> None:
        """Sends tokens as rows, with their routing weights, to the ranks of their experts.

        On the receiving ranks, the methods `rows` and `row_weight` return the rows and the weights.

        fused_routing: where the rows of this rank's tokens go, and which rows arrive.
        x_TM: (T, M), T tokens of d_model columns.
        weight_TK: (T, K), routing weights of the K choices of each token.
        """
        launches.dispatch(self.launcher, [fused_routing], x_TM, float_weights(weight_TK))

    def rows(self, fused_routing: FusedRouting) -> Tensor:
        """Returns the N rows that the last dispatch brought to this rank, (N, M), without a copy.

        The result is a view of the heap. The next `product_combine` or `gradient_combine` overwrites it.
        M = d_model.
        """
        return self.launcher.heaps[0].rows(fused_routing.num_received)

    def row_weight(self, fused_routing: FusedRouting) -> Tensor:
        """Returns the routing weights, (N,) float32, of the N rows of the last dispatch to this rank.

        The result is a view of the heap. The next `product_combine` or `gradient_combine` overwrites it.
        """
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
        """Dispatches tokens to their experts' ranks, and computes w1's product and the nonlinearity there.

        fused_routing: where the rows of this rank's tokens go, and which N rows arrive.
        x_TM: (T, M), this rank's T tokens of M = d_model columns.
        weight_TK: (T, K), the routing weights of the K choices of each token.
        w1, b1: first weight (E, G, M) and bias (E, G) of this rank's E experts. G is H = d_hidden, or 2H for
            SwiGLU.
        options: ``activation``, the nonlinearity's name, and ``keep``, whether to return the first result.

        Returns the hidden activation before the nonlinearity (T_M), (N, G), or None if ``keep`` is False; and
        the activation after the nonlinearity, (N, H).
        """
        hidden, active = launches.dispatch_hidden(
            self.launcher, [fused_routing], x_TM, float_weights(weight_TK), [w1], [b1], **options
        )
        return (None if hidden is None else hidden[0]), active[0]

    def product_combine(
        self, fused_routing: FusedRouting, active_NH: Tensor, w2: Tensor, b2: Tensor | None
    ) -> Tensor:
        """Multiplies rows by w2, sends the results to their tokens' ranks, and sums each token's results.

        fused_routing: the `FusedRouting` with which the rows were dispatched.
        active_NH: (N, H), activation after the nonlinearity, of the N rows that arrived. H = d_hidden.
        w2, b2: second weight (E, M, H) and bias (E, M) of this rank's E experts. M = d_model.

        Returns the layer's output (T_O) for this rank's T tokens, (T, M).
        """
        return launches.product_combine(self.launcher, [fused_routing], [active_NH], [w2], [b2])

    def dispatch_hidden_gradient(
        self, fused_routing: FusedRouting, grad_TM: Tensor, weight_TK: Tensor, *of_rank: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Dispatches the output's gradient to the experts' ranks, and computes the hidden gradient there.

        fused_routing: where the rows of this rank's tokens go, and which N rows arrive.
        grad_TM: (T, M), gradient of the layer's output for this rank's T tokens; M = d_model.
        weight_TK: (T, K), the routing weights of the K choices of each token.
        of_rank: w2, b2 and the hidden activation before the nonlinearity (T_M), (N, G), of this rank. G is H
            = d_hidden, or 2H for SwiGLU.
        options: ``activation``, the nonlinearity's name.

        Returns three tensors: the gradient of T_M, (N, G); the activation after the nonlinearity times the
        routing weights, (N, H); and P partial sums for each row, (P, N), which add up to the gradient of the
        row's routing weight.
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
        """Computes the rows' gradients, sends them to their tokens' ranks, and sums each token's gradients.

        A row's gradient is its hidden gradient times w1.

        fused_routing: the `FusedRouting` with which the rows were dispatched.
        grad_hidden_NG: (N, G), gradient of the hidden activation before the nonlinearity, of the N rows that
            arrived. G is H = d_hidden, or 2H for SwiGLU.
        w1: (E, G, M), first weight of this rank's E experts. M = d_model.
        dots_PN: (P, N), the third result of `dispatch_hidden_gradient`: P partial sums for each row, which
            add up to the gradient of the row's routing weight.

        Returns the gradient of the layer's input for this rank's T tokens, (T, M), and the gradient of the
        routing weights, (T, K) for K choices of each token.
        """
        return launches.gradient_combine(self.launcher, [fused_routing], [grad_hidden_NG], [w1], [dots_PN])


def float_weights(weight_TK: Tensor) -> Tensor:
    """Returns routing weights (T, K) in the form that kernels read: contiguous and in float32.

    There is a weight for each of the K choices of T tokens. The result is detached from the autograd graph.
    """
    return weight_TK.detach().to(torch.float32).contiguous()
