"""The runners that use fused kernels, in which communication is a part of the products.

COMET (arXiv 2502.19811, sections 3.1 and 3.2) has two kernels for each pass: dispatch + first product, and
second product + combine. Backward has the same two for gradients. FlashDMoE has one persistent kernel for
each pass.

The kernels do not cut the batch into chunks (micro-batches). Instead, tiles of a product start as soon as
their rows have arrived, and columns of a result are sent as soon as they are computed. One runner,
`FusedForwardRunner`, uses the kernels only in forward: its backward pass runs on the engine, in chunks.

The experts' output T_DO is not saved, and backward uses forward's routing, as in the engine. The restore pair
says how backward gets the dispatched input T_DI and the hidden activation T_M:

    T_DI  keep         forward copies the rows that arrived, because they lie in memory that all layers share
          communicate  backward dispatches them again
    T_M   keep         forward keeps it as the first kernel wrote it
          recompute    backward repeats the first product, from the kept T_DI or while T_DI is sent again

The kernels are in cuda/comet and cuda/flashdmoe. Tests may replace them (`pmoe.runners.fused_steps`).

Letters: T tokens, K choices of a token, N rows that arrive, W ranks, E experts of a rank, M = d_model, H =
d_hidden, G = H or 2H columns of the hidden activation (2H for SwiGLU), n chunks of the engine's backward
pass, m blocks of rows that stay on their rank, S rows that are sent, P terms of the gradient of a routing
weight.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmoe.comm.grid import Grid
from pmoe.engine.autograd import Path, Runner, Saved
from pmoe.engine.passes.base import ForwardState, Inputs, SavedUnit, Unit
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import WHOLE, Hidden, Shard
from pmoe.experts.stacked import split_parameters
from pmoe.kernels import flashdmoe, grouped_gemm
from pmoe.kernels.comet.backend import Steps
from pmoe.kernels.comet.operators import FusedRouting
from pmoe.kernels.flashdmoe import PLACES, RoutingInput
from pmoe.kernels.operands import is_dense
from pmoe.ordering.sorted import SortedRows, sort_rows
from pmoe.runners.pipeline import keep_for_backward
from pmoe.schedule.restore import Restore


def sort(expert_TK: Tensor, keep_TK: Tensor | None, num_experts: int) -> SortedRows:
    """Returns the slots of a rank in the order in which fused kernels send their rows.

    A slot is one choice of one token. Slots are sorted by expert, then by token. The result also has the
    position of each slot in this order, and -1 for a dropped slot. All numbers are int32.

    expert_TK: (T, K) int64 for T tokens and K choices, the expert of each slot among those of all ranks.
    keep_TK: (T, K) bool, whether the slot is kept; None keeps all.
    num_experts: number of experts of all ranks.
    """
    rows = sort_rows(expert_TK, keep_TK, 1, num_experts, range(0, 0), 0)
    position = rows.position.int()
    if keep_TK is not None:
        position = position.masked_fill(~keep_TK.reshape(-1), -1)
    return SortedRows(slot=rows.slot.int(), position=position)


def dense(rows: Tensor) -> Tensor:
    """Returns rows in the form that the kernels read: contiguous and aligned to 16 bytes.

    The result is a copy only if the rows are not in this form.

    rows: (T, M), T rows of M = d_model columns.
    """
    return rows if is_dense(rows) else rows.clone(memory_format=torch.contiguous_format)


KernelsOutput = tuple[Tensor, list[Tensor | None]]
"""Type of a forward pass's result: T_O, and the tensors that autograd saves after the parameters."""

KernelsGradients = tuple[Tensor | None, ...]
"""Type of the gradients of x, weight, w1, w2, b1 and b2."""


@dataclass(frozen=True, kw_only=True)
class KernelsRunner(abc.ABC):
    """A runner that computes both passes by fused kernels.

    steps: the kernels of this call. They exchange rows through memory that all ranks share.
    activation: name of the experts' nonlinearity in `pmoe.kernels.grouped_gemm`.
    restore: the restore pair: whether the dispatched rows (T_DI) and the hidden activation (T_M) are kept or
        made again for backward. "offload" is not supported.
    name: the name of the runner in reports.
    """

    steps: Steps
    activation: str
    restore: Restore
    name: ClassVar[Path]

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        sends_again = self.restore.dispatched == "communicate"
        keeps_hidden = keep and self.restore.hidden == "keep"
        with self.steps.all_or_give_up():
            y_TM, kept = self._output(inputs, keeps_hidden, keeps_rows=keep and not sends_again)
        if not keep:
            return y_TM, None
        x_TM = inputs.x_TM if sends_again else None
        tensors = [x_TM, inputs.weight_TK, *split_parameters(inputs.parameters), *kept]
        return y_TM, Saved(tensors, self.for_backward()._backward)

    def for_backward(self) -> KernelsRunner:
        """Returns the runner that is kept until backward. It drops values that only forward reads."""
        return self

    def _backward(self, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
        """Runs the backward pass. Returns the gradient of each tensor of ``Inputs.all``; None if not wanted.

        tensors: the tensors that forward saved. This function empties the list, to free each tensor early.
        wanted: for each tensor of ``Inputs.all``, whether its gradient is wanted.
        grad_TM: (T, M), the gradient of the layer's output T_O for T tokens; M = d_model.
        """
        with self.steps.all_or_give_up():
            of_x, of_weight, *of_parameters = self._gradients(tensors, wanted[3:], grad_TM)
        return [of_x, of_weight, None, *of_parameters[: len(wanted) - 3]]

    @abc.abstractmethod
    def _output(self, inputs: Inputs, keeps_hidden: bool, keeps_rows: bool) -> KernelsOutput:
        """Computes the forward pass. Returns T_O and the tensors to save for backward.

        T_O, the layer's output, is (T, M) for T tokens with M = d_model columns. The first two saved tensors
        are T_M and T_DI; None in place of a tensor that is not kept.

        inputs: the tensors of the call.
        keeps_hidden: whether T_M, the hidden activation, is kept.
        keeps_rows: whether T_DI, the dispatched rows, is kept.
        """

    @abc.abstractmethod
    def _gradients(self, tensors: list[Any], needs: Sequence[bool], grad_TM: Tensor) -> KernelsGradients:
        """Computes the backward pass. Returns the gradients of x, weight, w1, w2, b1 and b2.

        tensors: the saved tensors. This function empties the list, to free each tensor after its last use.
        needs: for each parameter, whether its gradient is wanted.
        grad_TM: (T, M), the gradient of the layer's output T_O for T tokens; M = d_model.

        If a parameter's gradient is not wanted, the product that computes it does not run. Steps that
        communicate always run, because another rank may need the gradient, and all ranks must take the same
        steps.
        """


@dataclass(frozen=True, kw_only=True)
class FusedRunner(KernelsRunner):
    """A runner that computes both passes by COMET's kernels.

    fused_routing: the destinations of this rank's rows, and the sources of the rows that arrive.
    shard: which part of each expert's hidden columns this rank holds (ESP). A row is sent to each shard of
        its expert, as if each shard were an expert with the same routing weight.
    """

    fused_routing: FusedRouting
    shard: Shard = WHOLE
    name: ClassVar[Path] = "fused"

    def shard_weights(self, weight_TK: Tensor) -> Tensor:
        """Returns the routing weights, each repeated for every shard of its expert, (T, K * L).

        weight_TK: (T, K), the routing weights of T tokens with K choices. L is the number of shards.
        """
        return weight_TK if self.shard.count == 1 else weight_TK.repeat_interleave(self.shard.count, 1)

    def added_bias(self, b2: Tensor | None) -> Tensor | None:
        """Returns the bias that this rank adds to its results: only the first shard of an expert adds b2.

        b2: (E, M), the second bias of this rank's E experts; None without bias.
        """
        return None if self.shard.index else b2

    def _output(self, inputs: Inputs, keeps_hidden: bool, keeps_rows: bool) -> KernelsOutput:
        steps = self.steps
        fused_routing = self.fused_routing
        activation = self.activation
        w1, w2, b1, b2 = split_parameters(inputs.parameters)
        hidden_NG, active_NH = steps.dispatch_hidden(
            fused_routing,
            dense(inputs.x_TM),
            self.shard_weights(inputs.weight_TK),
            w1,
            b1,
            activation=activation,
            keep=keeps_hidden,
        )
        rows_NM = steps.rows(fused_routing).clone() if keeps_rows else None
        y_TM = steps.product_combine(fused_routing, active_NH, w2, self.added_bias(b2))
        return y_TM, [hidden_NG, rows_NM]

    def _gradients(self, tensors: list[Any], needs: Sequence[bool], grad_TM: Tensor) -> KernelsGradients:
        x_TM, whole_weight_TK, w1, w2, b1, b2, hidden_NG, rows_NM = tensors
        tensors.clear()
        weight_TK = self.shard_weights(whole_weight_TK)
        steps = self.steps
        fused_routing = self.fused_routing
        ends_E = self.fused_routing.ends_E
        activation = self.activation
        needs_w1, needs_w2, needs_b1, needs_b2 = (*needs, False, False)[:4]
        if hidden_NG is None and rows_NM is not None:
            hidden_NG = grouped_gemm.product(rows_NM, w1, ends_E, bias_EO=b1)
        elif hidden_NG is None:
            hidden_NG, _ = steps.dispatch_hidden(
                fused_routing, dense(x_TM), weight_TK, w1, b1, activation=activation, keep=True
            )
            rows_NM = steps.rows(
                fused_routing
            ).clone()  # a copy, because gradients will arrive in the same memory
        # Each product for a parameter's gradient runs as early as possible, so that its operands can be
        # freed. It need not wait to hide communication, which the fused kernels hide themselves.
        of_w1 = of_w2 = of_b1 = of_b2 = None
        grad_hidden_NG, active_NH, dots_PN = steps.dispatch_hidden_gradient(
            fused_routing,
            dense(grad_TM),
            weight_TK,
            w2,
            self.added_bias(b2),
            hidden_NG,
            activation=activation,
        )
        del hidden_NG
        if needs_w2:
            of_w2 = grouped_gemm.weight_gradient(steps.rows(fused_routing), active_NH, ends_E)
        del active_NH
        if needs_b2:
            of_b2 = grouped_gemm.sum_by_expert(
                steps.rows(fused_routing), ends_E, steps.row_weight(fused_routing)
            )
        if rows_NM is None:
            steps.dispatch(fused_routing, dense(x_TM), weight_TK)
            rows_NM = steps.rows(fused_routing)
        if needs_w1:
            of_w1 = grouped_gemm.weight_gradient(grad_hidden_NG, rows_NM, ends_E)
        del rows_NM
        if needs_b1:
            of_b1 = grouped_gemm.sum_by_expert(grad_hidden_NG, ends_E)
        of_x, of_weight = steps.gradient_combine(fused_routing, grad_hidden_NG, w1, dots_PN)
        if self.shard.count > 1:  # a weight's gradient is the sum over the shards of its expert
            of_weight = of_weight.unflatten(1, (-1, self.shard.count)).sum(2)
        return of_x, of_weight.to(weight_TK.dtype), of_w1, of_w2, of_b1, of_b2


@dataclass(frozen=True, kw_only=True)
class PersistentRunner(KernelsRunner):
    """A runner that computes each pass by one launch of a persistent kernel (`pmoe.kernels.flashdmoe`).

    chosen: the experts that the gate chose; or empty tensors, if the kernel itself routes the tokens and
        writes its choice into them. None in backward, which reads the choice that forward saved.

    While it runs, the kernel computes where rows go, counts them and sends them through memory that ranks
    share (the heap). The ranks find out before the launch whether the rows fit into the heap: from the
    largest number of tokens of any rank and the largest number of rows that any rank receives. Both numbers
    come with the exchange of row counts. T_DI (dispatched rows) and T_M (hidden activation) are kept in the
    layout of the heap: a range of rows (a cell) for each pair of source rank and expert.
    """

    chosen: RoutingInput | None
    name: ClassVar[Path] = "persistent"

    def for_backward(self) -> KernelsRunner:
        return replace(self, chosen=None)

    def _output(self, inputs: Inputs, keeps_hidden: bool, keeps_rows: bool) -> KernelsOutput:
        launcher = self.steps.launcher
        chosen = self.chosen
        x_TM = dense(inputs.x_TM)
        assert chosen is not None
        heap = launcher.heaps[0]
        parameters = split_parameters(inputs.parameters)
        weight_TK = inputs.weight_TK
        common = flashdmoe.pass_tensors(heap, chosen.expert_TK, x_TM, weight_TK, parameters, self.activation)
        rank_tensors = flashdmoe.forward_tensors(
            heap, common, chosen, keeps_input=keeps_rows, keeps_hidden=keeps_hidden
        )
        flashdmoe.launch_pass(launcher, "forward", self.activation, [rank_tensors])
        return rank_tensors["result"], [rank_tensors[name] for name in ("hidden", "input", *PLACES)]

    def _gradients(self, tensors: list[Any], needs: Sequence[bool], grad_TM: Tensor) -> KernelsGradients:
        x_TM, weight_TK, w1, w2, b1, b2, hidden, rows = tensors[:8]
        places = dict(zip(PLACES, tensors[8:], strict=True))
        tensors.clear()
        launcher = self.steps.launcher
        parameters = (w1, w2, b1, b2)
        x_TM = None if x_TM is None else dense(x_TM)
        heap = launcher.heaps[0]
        expert_TK = places["expert"]
        common = flashdmoe.pass_tensors(
            heap, expert_TK, dense(grad_TM), weight_TK, parameters, self.activation, x_TM
        )
        needs = (*needs, False, False)[:4]
        rank_tensors = flashdmoe.backward_tensors(
            common, places, hopper=launcher.hopper, kept=[rows, hidden], needs=needs
        )
        flashdmoe.launch_pass(launcher, "backward", self.activation, [rank_tensors])
        of_weight = rank_tensors["weight_gradient"].to(weight_TK.dtype)
        return (
            rank_tensors["result"],
            of_weight,
            rank_tensors["of_w1"],
            rank_tensors["of_w2"],
            rank_tensors["of_b1"],
            rank_tensors["of_b2"],
        )


@dataclass(frozen=True)
class NoTokensRunner:
    """A runner that passes no tokens to its kernels, because the heap has no room for this rank's tokens.

    The output and the gradients of the tokens are zeros. The kernels are launched without tokens, because the
    kernels of the other ranks wait for them.

    runner: the runner with the kernels, for no tokens.
    """

    runner: Runner
    name: ClassVar[Path] = "persistent"

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        x_TM = inputs.x_TM
        weight_TK = inputs.weight_TK
        no_tokens = inputs._replace(x_TM=x_TM[:0], weight_TK=weight_TK[:0])
        _, saved = self.runner.forward(no_tokens, keep=keep)
        y_TM = torch.zeros_like(x_TM)
        if saved is None:
            return y_TM, None
        run_backward = saved.backward
        # Only shape and dtype are kept: the tensor would keep its memory and its autograd graph alive until
        # backward.
        weight_shape = weight_TK.shape
        weight_dtype = weight_TK.dtype

        def backward(tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
            _, _, *of_others = run_backward(tensors, wanted, grad_TM[:0])
            of_x = torch.zeros_like(grad_TM)
            of_weight = torch.zeros(weight_shape, dtype=weight_dtype, device=grad_TM.device)
            return [of_x, of_weight, *of_others]

        return y_TM, Saved(saved.tensors, backward)


@dataclass(frozen=True)
class NoGradientsRunner:
    """A runner whose backward pass launches no kernels and returns zeros for all gradients.

    It is for a bounded call (`pmoe.BoundedSteps`) in which this rank needs gradients, although no rank needed
    any when the ranks agreed on the bound. The other ranks then run no backward pass, so this rank has no
    peers for its own. The rows of the call are dropped on all ranks, and the step must be repeated.

    runner: the runner that computes the forward pass, without keeping anything for backward.
    """

    runner: Runner
    name: ClassVar[Path] = "persistent"

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        y_TM, _ = self.runner.forward(inputs, keep=False)
        if not keep:
            return y_TM, None

        def backward(tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
            return [
                torch.zeros_like(tensor) if tensor is not None and is_wanted else None
                for tensor, is_wanted in zip(tensors, wanted, strict=True)
            ]

        return y_TM, Saved(inputs.all, backward, needs_peers=False)


# ---- Forward by the fused kernels, backward by the engine


@dataclass(frozen=True)
class FusedForwardRunner:
    """A runner that computes forward by COMET's kernels, and backward by the engine, in chunks.

    fused: the runner whose kernels compute forward.
    plan: how the engine cuts the batch into chunks in backward. After the kernels have run, tensors are
        stored for backward as if the engine had run forward in these chunks.
    recv_FWE: (F, W, E) on the device: rows that arrive in each of F bins, from each of W ranks, for each of
        this rank's E experts. A bin is a range of tokens; each chunk joins several neighbouring bins. Ranks
        are in the order of `Grid.by_arrival`.
    grid: the ranks of the layer.
    """

    fused: FusedRunner
    plan: Plan
    recv_FWE: Tensor
    grid: Grid
    name: ClassVar[Path] = "fused forward"

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        with self.fused.steps.all_or_give_up():
            y_TM, state = self._take_steps(inputs)
        return y_TM, keep_for_backward(self.plan, state) if keep else None

    def _take_steps(self, inputs: Inputs) -> tuple[Tensor, ForwardState]:
        """Computes forward by the kernels. Returns the layer's output T_O, and the state that backward needs.

        T_O is (T, M) for T tokens with M = d_model columns. The engine computes backward.

        inputs: the tensors of the call.
        """
        plan = self.plan
        pass_plan = self.plan.forward
        steps = self.fused.steps
        fused_routing = self.fused.fused_routing
        activation = self.fused.activation
        w1, w2, b1, b2 = split_parameters(inputs.parameters)
        weight_TK = self.fused.shard_weights(inputs.weight_TK)
        keeps_hidden = plan.restore.hidden == "keep"
        hidden_NG, active_NH = steps.dispatch_hidden(
            fused_routing, dense(inputs.x_TM), weight_TK, w1, b1, activation=activation, keep=keeps_hidden
        )
        n = len(pass_plan.chunks)
        m = len(pass_plan.pieces)
        num_rows = fused_routing.num_received
        index_N = unit_index(
            self.grid.by_rank(self.recv_FWE.unflatten(0, (n, -1)).sum(1)),
            fused_routing.rank,
            num_pieces=m,
            num_rows=num_rows,
            places_W=self.grid.places(self.recv_FWE.device),
        )
        received = [chunk.received.num_rows for chunk in pass_plan.chunks]
        units: dict[Unit, int] = {(i, ""): rows for i, rows in enumerate(received)}
        units |= {(j, "_L"): piece.groups.num_rows for j, piece in enumerate(pass_plan.pieces)}
        rows_NM = steps.rows(fused_routing) if plan.restore.dispatched == "keep" else None
        state = ForwardState(inputs=inputs)
        for unit, unit_rows in zip(units, index_N.split(list(units.values())), strict=True):
            hidden = None
            if hidden_NG is not None:
                hidden = Hidden(tensors=[hidden_NG.index_select(0, unit_rows)])
            rows_of_unit = None if rows_NM is None else rows_NM.index_select(0, unit_rows)
            state.kept[unit] = SavedUnit(rows_of_unit, hidden)
        if pass_plan.weights is not None:
            weight_N = steps.row_weight(fused_routing).to(weight_TK.dtype)
            state.weight_received = weight_N.index_select(0, index_N[: sum(received)])
        y_TM = steps.product_combine(fused_routing, active_NH, w2, self.fused.added_bias(b2))
        return y_TM, state


def unit_index(
    recv_nWE: Tensor, rank: int, *, num_pieces: int, num_rows: int, places_W: Tensor | None = None
) -> Tensor:
    """Returns the index (N,) that sorts the rows of a fused dispatch into the order that the engine needs.

    N is the number of rows that reach the experts, including rows from this rank itself. The engine computes
    rows from this rank separately, in ``num_pieces`` blocks. If ``num_pieces`` is 0, it computes them
    together with the rows from other ranks. The two orders are

        fused dispatch   by expert, then source rank, then token. Source ranks begin with this rank and go up;
                         rank 0 follows the last rank
        engine           rows from other ranks, by chunk, expert and place of the source rank; then rows
                         from this rank, by block, expert and token

    recv_nWE: (n, W, E) on the device: rows that arrive in each of n chunks, from each of W ranks, for each of
        E experts of this rank.
    rank: the index of this rank.
    num_pieces: number of blocks for rows from this rank; at most n.
    num_rows: N.
    places_W: (W,), the place of each source rank in the engine's order (`Grid.places`). None if ranks are in
        order of their indices.

    Example: rank 0 of two ranks, one expert, two chunks, two blocks. Each rank sends this rank one row in
    each chunk. Rows a0 and a1 come from rank 0 itself, b0 and b1 from rank 1. The digit is the index of the
    chunk:

        fused dispatch   a0 a1 b0 b1
        engine           b0 b1 a0 a1
        index             2  3  0  1
    """
    n, num_ranks, num_experts = recv_nWE.shape

    def along(numbers: Tensor, dim: int) -> Tensor:
        return numbers.view([-1 if axis == dim else 1 for axis in range(3)])

    ascending = torch.arange(max(n, num_ranks, num_experts), device=recv_nWE.device)
    expert = along(ascending[:num_experts], 0)
    chunk = along(ascending[:n], 2)
    source_W = (ascending[:num_ranks] + rank) % num_ranks
    source = along(source_W, 1)
    place = source if places_W is None else along(places_W[source_W], 1)
    # The rows from one source for one expert in one chunk are a block in both orders. Sorting the blocks by
    # the following numbers gives the engine's order.
    place_EWn = (chunk * num_experts + expert) * num_ranks + place
    if num_pieces:
        piece = (chunk - (n - num_pieces)).clamp(min=0)  # `pmoe.schedule.tasks.piece_of`
        stays = n * num_experts * num_ranks + (piece * num_experts + expert) * n + chunk
        place_EWn = torch.where(source == rank, stays, place_EWn)
    counts_EWn = recv_nWE.roll(-rank, 1).permute(2, 1, 0)
    place_N = place_EWn.reshape(-1).repeat_interleave(counts_EWn.reshape(-1), output_size=num_rows)
    return place_N.argsort(stable=True)
