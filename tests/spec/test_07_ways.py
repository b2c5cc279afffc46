"""The rows' ways: orders, collectives, rows that travel once, and callbacks on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from tests.spec.kit import (
    M,
    Step,
    assert_close,
    assert_is_the_plain_layer,
    make,
    on_ranks,
    step,
    step_on_rank,
    tokens,
)

COUNTS = (5, 0, 11, 2)
COLLECTIVES = ["flat", "hierarchical_1d", "hierarchical_2d"]

# ---- orders


@pytest.mark.parametrize("counts", [(13,), (9, 4)])
def test_an_order_by_matrices_of_zeros_and_ones_gives_the_same(counts: tuple[int, ...]) -> None:
    assert_is_the_plain_layer(counts, order="einsum", pipeline=2)


class LoopOrder(pmoe.Order):
    """Row by row."""

    def order(self, tokens_TM: Tensor, token_N: Tensor, out: Tensor) -> None:
        for row, token in enumerate(token_N.tolist()):
            out[row] = tokens_TM[token]

    def restore(self, rows_NM: Tensor, row_SK: Tensor, out: Tensor, token_S: Tensor | None = None) -> None:
        out.zero_()
        for slot, rows in enumerate(row_SK.tolist()):
            token = slot if token_S is None else int(token_S[slot])
            for row in rows:
                out[token] += rows_NM[row]


@pytest.mark.parametrize("gate", ["topk", "expert_choice"])
@pytest.mark.parametrize("options", [{}, {"pipeline": 3, "memory_reuse": "S4"}])
def test_an_order_of_ones_own_gives_the_same(options: dict, gate: str) -> None:
    layer = make(order=LoopOrder(), gate=gate, **options)
    assert_close(step(layer, tokens(9)), step(make(gate=gate), tokens(9)))


# ---- collectives


@pytest.mark.parametrize("nodes", [2, [0, 1, 0, 1], [0, 0, 0, 0]])
@pytest.mark.parametrize("dispatch", COLLECTIVES)
def test_every_collective_gives_the_plain_result(dispatch: str, nodes: Any) -> None:
    assert_is_the_plain_layer(COUNTS, dispatch=dispatch, nodes=nodes, pipeline=2)


@pytest.mark.parametrize("dispatch, combine", [("flat", "hierarchical_1d"), ("hierarchical_2d", "flat")])
def test_the_way_back_may_be_another(dispatch: str, combine: str) -> None:
    assert_is_the_plain_layer(
        COUNTS, dispatch=dispatch, combine=combine, nodes=2, pipeline=2, memory_reuse="S4"
    )


@pytest.mark.parametrize("dispatch", COLLECTIVES[1:])
def test_whichever_collective_carries_rows_the_result_is_the_same_to_the_bit(dispatch: str) -> None:
    flat, other = (on_ranks(4, step_on_rank, COUNTS, {"dispatch": d, "nodes": 2}) for d in ("flat", dispatch))
    for some, each in zip(flat, other, strict=True):
        assert_close(some, each, limit=0)


def sent(rank: int, world: int, options: dict[str, Any]) -> int:
    layer = make(**options)
    layer(tokens(32, rank))
    return layer.traffic.rows


def test_rows_of_a_ranks_own_experts_are_not_sent() -> None:
    assert sent(0, 1, {}) == 0
    row_bytes = M * 8
    for num_bytes in on_ranks(2, sent, {}):
        assert 0 < num_bytes < 2 * 32 * 2 * row_bytes
        assert num_bytes % row_bytes == 0


class Pairwise:
    """One message for each peer."""

    in_steps = True

    def bind(self, ranks: Any, traffic: Any) -> None:
        super().bind(ranks, traffic)
        self.group = dist.new_group(dist.get_process_group_ranks(ranks.group))

    def exchange(self, rows: Tensor, send_rows: Any, out: Tensor, recv_rows: Any, relayed: Any = ()) -> None:
        own, sent, received = self.ranks.rank, rows.split(list(send_rows)), out.split(list(recv_rows))
        received[own].copy_(sent[own])
        messages = []
        for peer in (peer for peer in range(self.ranks.size) if peer != own):
            messages.append(dist.P2POp(dist.isend, sent[peer], group=self.group, group_peer=peer))
            messages.append(dist.P2POp(dist.irecv, received[peer], group=self.group, group_peer=peer))
        for work in dist.batch_isend_irecv(messages):
            work.wait()


class PairwiseDispatch(Pairwise, pmoe.Dispatch):
    pass


class PairwiseCombine(Pairwise, pmoe.Combine):
    pass


def pairwise_step(rank: int, world: int) -> Step:
    layer = make(dispatch=PairwiseDispatch(), combine=PairwiseCombine(), pipeline=2)
    return step(layer, tokens((9, 4)[rank], 10 + rank), 4 + rank)


def test_a_collective_of_ones_own_carries_rows() -> None:
    expected = on_ranks(2, step_on_rank, (9, 4), {"pipeline": 2})
    for got, each in zip(on_ranks(2, pairwise_step), expected, strict=True):
        assert_close(got, each, limit=0)


# ---- rows that travel once


@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"pipeline": 2, "memory_reuse": "S4"}])
@pytest.mark.parametrize("counts", [(9, 4), COUNTS])
def test_sending_a_token_once_gives_the_plain_result(counts: tuple[int, ...], options: dict) -> None:
    many = {"num_experts": 8, "top_k": 4}
    assert_is_the_plain_layer(counts, {"top_k": 4}, send_once=True, **many, **options)


def test_sending_a_token_once_sends_fewer_bytes() -> None:
    many = {"num_experts": 8, "top_k": 4}
    once, often = on_ranks(2, sent, {**many, "send_once": True}), on_ranks(2, sent, many)
    assert all(few < 0.7 * most for few, most in zip(once, often, strict=True))


# ---- callbacks


class Halves(pmoe.Callback):
    """Rows travel in half the bytes."""

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.float()

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.double()

    before_combine, after_combine = before_dispatch, after_dispatch


def test_a_callback_that_narrows_rows_halves_what_is_sent() -> None:
    for narrow, wide in zip(on_ranks(2, sent, {"callbacks": [Halves()]}), on_ranks(2, sent, {}), strict=True):
        assert 2 * narrow == wide


def test_a_callback_that_narrows_rows_changes_the_result_by_its_rounding_only() -> None:
    expected = on_ranks(2, step_on_rank, (9, 4), {})
    for got, each in zip(on_ranks(2, step_on_rank, (9, 4), {"callbacks": [Halves()]}), expected, strict=True):
        assert_close(got, each, limit=1e-5)


class Noting(pmoe.Callback):
    """Notes the points that it passes."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def before_moe_start(self, x: Tensor) -> Tensor:
        self.seen.append("start")
        return x

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        self.seen.append(f"dispatch {chunk}")
        return rows

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        self.seen.append(f"combined {chunk}")
        return rows

    def before_moe_end(self, y: Tensor) -> Tensor:
        self.seen.append("end")
        return y


def test_callbacks_see_every_chunk_between_start_and_end() -> None:
    noting = Noting()
    make(callbacks=[noting], pipeline=2)(tokens(8))
    assert (noting.seen[0], noting.seen[-1]) == ("start", "end")
    assert {"dispatch 0", "dispatch 1", "combined 0", "combined 1"} == set(noting.seen[1:-1])


class Scale(pmoe.Callback, nn.Module):
    """Multiplies rows by a learned number on their way."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.factor


@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"pipeline": 2, "memory_reuse": "S4"}])
def test_a_callback_that_is_a_module_is_trained(options: dict) -> None:
    layer = make(callbacks=[Scale()], **options)
    found = step(layer, tokens(9))
    names = [name for name in found if name.endswith("factor")]
    assert names and all(found[name].abs() > 0 for name in names)
    assert torch.autograd.gradcheck(layer, tokens(4).requires_grad_())


def test_a_callback_may_replace_the_input_and_the_output() -> None:
    class Doubling(pmoe.Callback):
        def before_moe_start(self, x: Tensor) -> Tensor:
            return 2 * x

        def before_moe_end(self, y: Tensor) -> Tensor:
            return 3 * y

    x = tokens(5)
    assert_close({"y": make(callbacks=[Doubling()])(x)}, {"y": 3 * make()(2 * x)})
