"""Memory reuse on several ranks: users' modules, restored tensors, host memory that one rank lacks, skew."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer, Restore, warn
from pmoe.comm.counts import num_bins, slot_rows
from pmoe.engine.passes import base as passes_base
from pmoe.experts.base import ExpertRows
from pmoe.ordering.sorted import chunk_bounds
from pmoe.schedule.buffer_sizes import ALIGNMENT, BufferSizes
from pmoe.schedule.restore import ALL_PAIRS
from tests.gloo.kit import TOKENS, build, counted_collectives
from tests.kit import assert_same, loss_of, step, tokens
from tests.own_experts import EXPERTS, changing, dropping, mlp
from tests.pool import ranks
from tests.seen import Seen
from tests.spread import parts, spread

SOME_PAIRS = [pair for pair in ALL_PAIRS if pair.strategy or pair.dispatched == pair.hidden]


# ---- users' modules -------------------------------------------------------------------------------


def modules_job(rank: int, world: int, name: str, degrees: list[int]) -> None:
    x, (n, n_backward) = tokens(TOKENS[world][rank], 10 + rank), degrees
    options = {"expert": EXPERTS[name], "pipeline": n, "pipeline_backward": n_backward}
    # Rings have other chunks of rows that stay, and another order of experts: so of random numbers.
    plain = Restore("keep", "keep") if name in ("dropout", "buffers") else False
    expected = step(build(memory_reuse=plain, **options), x)
    for pair in ALL_PAIRS:
        if pair.hidden == "recompute" and (name == "in place" or (name == "dropout" and n != n_backward)):
            continue  # refused
        got = step(build(memory_reuse=pair, **options), x)
        assert_same(got, expected, 1e-12, (str(pair), n, n_backward))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name, world, degrees", spread(list(EXPERTS), [2, 4], [[1, 1], [2, 2], [3, 1]], every=4)
)
def test_ones_own_experts_have_the_same_gradients_with_reuse(
    name: str, world: int, degrees: list[int]
) -> None:
    ranks(world).run(modules_job, name, degrees)


def finer_backward_job(rank: int, world: int) -> None:
    x = tokens(TOKENS[world][rank], 10 + rank)
    expected = step(build(expert=mlp), x)
    for n, n_backward in [(1, 3), (2, 4), (3, 2)]:
        for dispatched in ("keep", "offload", "communicate"):
            options = {"pipeline": n, "pipeline_backward": n_backward, "expert": mlp}
            layer = build(memory_reuse=Restore(dispatched, "recompute"), **options)
            assert_same(step(layer, x), expected, 1e-12, (dispatched, n, n_backward))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 4])
def test_recomputed_modules_may_have_more_chunks_in_backward(world: int) -> None:
    ranks(world).run(finer_backward_job)


# ---- orders of calls ------------------------------------------------------------------------------


def orders_job(rank: int, world: int, expert: Any, pairs: list[tuple[Restore]]) -> None:
    for (pair,) in pairs:
        layer = build(memory_reuse=pair, expert=expert)
        xs = [tokens((count + rank) % 7, 30 + 7 * i + rank) for i, count in enumerate((6, 3, 5))]
        expected = [step(layer, x) for x in xs]
        leaves = [x.clone().requires_grad_() for x in xs]
        losses = []
        for x in leaves:
            torch.manual_seed(1)
            y = layer(x)
            losses.append(loss_of(layer, y))
        for i, retain in ((1, True), (2, False), (0, True), (1, False), (0, False)):
            layer.zero_grad(set_to_none=True)
            leaves[i].grad = None
            losses[i].backward(retain_graph=retain)
            assert torch.equal(leaves[i].grad, expected[i]["x"]), pair
            for name, parameter in layer.named_parameters():
                assert torch.equal(parameter.grad, expected[i][name]), (pair, name)
        del losses, y
        layer.l_aux = None
        assert pmoe.pool().host.bytes_in_use == pmoe.pool().device.bytes_in_use == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pairs", parts(ALL_PAIRS, every=7))
@pytest.mark.parametrize("world, expert", spread([2, 4], ["ffn", mlp, dropping], every=2))
def test_several_forwards_may_run_backward_in_any_order_and_twice(
    world: int, expert: Any, pairs: list[tuple[Restore]]
) -> None:
    ranks(world).run(orders_job, expert, pairs)


def checkpoint_job(rank: int, world: int, expert: Any, cases: list[tuple[Restore, bool]]) -> list[int]:
    x, lengths = tokens(TOKENS[world][rank], 10 + rank), []
    for pair, use_reentrant in cases:
        layer = build(memory_reuse=pair, expert=expert)

        def call(x: Tensor, layer: MoELayer = layer) -> tuple[Tensor, Tensor]:
            return layer(x), layer.l_aux

        expected = step(layer, x)
        with counted_collectives() as calls:
            got = step(layer, x, lambda x: checkpoint(call, x, use_reentrant=use_reentrant))  # noqa: B023
        assert_same(got, expected, told=(pair, use_reentrant))
        lengths.append(len(calls))
    return lengths


@pytest.mark.parametrize("cases", parts(ALL_PAIRS, [True, False], every=5))
@pytest.mark.parametrize("world, expert", spread([2, 4], ["ffn", dropping], every=3))
def test_a_checkpoint_around_a_layer_that_reuses_memory_runs_forward_once_more(
    world: int, expert: Any, cases: list[tuple[Restore, bool]]
) -> None:
    n = 2
    forward, backward = 3 + 2 * n, 1 + 2 * n
    wanted = [2 * forward + backward + n * (pair.dispatched == "communicate") for pair, _ in cases]
    for lengths in ranks(world).run(checkpoint_job, expert, cases):
        assert lengths == wanted


def collectives_job(rank: int, world: int, counts: tuple[int, ...], n: int, n_backward: int) -> list[Any]:
    found = []
    for pair in ALL_PAIRS:
        layer = build(memory_reuse=pair, pipeline=n, pipeline_backward=n_backward, slack=100)
        with counted_collectives() as forward:
            y = layer(tokens(counts[rank], 5).requires_grad_())
        with counted_collectives() as back:
            y.sum().backward()
        found.append((forward, back))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("counts", [(0, 0), (0, 1), (7, 3)])
def test_every_rank_issues_the_same_collectives_whatever_its_tokens(counts: tuple[int, ...]) -> None:
    """Backward sends the rows once more if the restore pair sends them again."""
    for n, n_backward in [(1, 1), (3, 3), (4, 2)]:
        for found in ranks(2).run(collectives_job, counts, n, n_backward):
            for pair, (forward, back) in zip(ALL_PAIRS, found, strict=True):
                assert forward == ["all_to_all_single", "all_reduce"] + ["all_to_all_single"] * (1 + 2 * n)
                times = 3 if pair.dispatched == "communicate" else 2
                assert back == ["all_to_all_single"] * (1 + times * n_backward)


# ---- restored tensors -----------------------------------------------------------------------------


RESTORED_DEGREES = [(3, 3), (4, 2), (2, 4)]


def restored_job(rank: int, world: int, expert: str, cases: list[tuple[Any, ...]]) -> int:
    rows = 0
    for pair, bypass, (n, n_backward) in cases:
        dtype = torch.float32 if n == n_backward else torch.float64
        options = {"pipeline": n, "pipeline_backward": n_backward, "dtype": dtype, "expert": expert}
        layer = build(memory_reuse=pair, bypass_local=bypass, slack=4, **options)
        seen = Seen(layer)
        y = layer(tokens(3 * TOKENS[world][rank], 10 + rank, dtype).requires_grad_())
        y.square().sum().backward()
        seen.assert_restored(n == n_backward)
        rows += sum(each[1].shape[0] for each in seen.backward)
    return rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cases", parts(ALL_PAIRS, [True, False], RESTORED_DEGREES, every=7))
@pytest.mark.parametrize("world, expert", spread([1, 2, 4], ["ffn", "swiglu"], every=2))
def test_a_restored_tensor_is_bit_identical_to_the_one_of_forward(
    world: int, expert: str, cases: list[tuple[Any, ...]]
) -> None:
    assert sum(ranks(world).run(restored_job, expert, cases)) == len(cases) * 3 * sum(TOKENS[world]) * 2


# ---- host memory that one rank lacks ---------------------------------------------------------------


def little_memory_job(
    rank: int,
    world: int,
    pair: Restore,
    who: tuple[int, ...],
    limit: int,
    expert: Any,
    degrees: tuple[int, int],
) -> dict[str, Any]:
    """Limits the host memory of some ranks.

    Returns the warnings, the collectives of backward, and the number of chunks whose T_M was recomputed.

    who: the ranks with ``limit`` bytes of host memory.
    """
    options = {"expert": expert, "pipeline": degrees[0], "pipeline_backward": degrees[1]}
    x = tokens(3 * TOKENS[world][rank], 10 + rank)
    expected = step(build(memory_reuse=Restore("keep", "keep"), **options), x)
    layer, host = build(memory_reuse=pair, **options), pmoe.pool().host
    again: list[int] = []
    recompute = layer.experts.recompute

    def watched(given: ExpertRows, recipe: Any) -> Any:
        again.append(given.rows_NM.shape[0])
        return recompute(given, recipe)

    layer.experts.recompute = watched
    before = host.limit_bytes
    warn.GIVEN.clear()
    try:
        host.limit_bytes = limit if rank in who else before
        with warnings.catch_warnings(record=True) as caught, counted_collectives() as calls:
            warnings.simplefilter("always")
            for _ in range(2):
                assert_same(step(layer, x), expected, 1e-12, pair)
    finally:
        host.limit_bytes = before
    assert host.bytes_in_use == 0
    return {"warned": [str(each.message) for each in caught], "calls": len(calls), "again": sum(again)}


AGAIN = (
    "pmoe: too little host memory is left on some rank to offload T_DI: it is sent again in backward, one "
    'more all-to-all for each chunk. Free host memory, or choose memory_reuse="S2" or "S4"'
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world, who, expert, hidden",
    spread(
        [(2, (1,)), (2, (0, 1)), (4, (2,))],
        ["ffn", mlp, changing],
        ["keep", "offload", "recompute"],
        every=3,
    ),
)
def test_rows_that_one_rank_cannot_offload_are_sent_again_by_all(
    hidden: str, expert: Any, world: int, who: tuple[int, ...]
) -> None:
    if expert is changing and hidden == "recompute":
        return  # refused
    n = 2
    found = ranks(world).run(little_memory_job, Restore("offload", hidden), who, ALIGNMENT, expert, (n, n))
    for rank, got in enumerate(found):
        assert got["calls"] == 2 * (3 + 2 * n + 1 + 3 * n), rank
        assert got["warned"].count(AGAIN) == 1
        others = [message for message in got["warned"] if message != AGAIN]
        assert len(others) == (hidden == "offload" and rank in who)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world, who, expert, dispatched, degrees",
    spread(
        [(2, (1,)), (4, (2,))],
        ["ffn", mlp, changing, dropping],
        ["keep", "communicate"],
        [((2, 2),), ((4, 2),)],
        every=4,
    ),
)
def test_hidden_that_one_rank_cannot_offload_is_recomputed_by_it_alone(
    degrees: tuple[int, int], dispatched: str, expert: Any, world: int, who: tuple[int, ...]
) -> None:
    """It stays on the device if experts change their input or might draw other random numbers."""
    pair = Restore(dispatched, "offload")
    stays = expert is changing or (expert != "ffn" and degrees[0] != degrees[1])
    for rank, got in enumerate(ranks(world).run(little_memory_job, pair, who, ALIGNMENT, expert, degrees)):
        assert (got["again"] > 0) == (rank in who and not stays), rank
        assert len(got["warned"]) == (rank in who)
        assert all(message.startswith("pmoe: host memory for offloading: ") for message in got["warned"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("expert", ["ffn", mlp, dropping])
def test_host_memory_for_a_part_is_used_for_that_part(expert: Any) -> None:
    for limit, degrees in zip((4000, 8000, 16000), [(2, 2), (4, 2), (2, 2)], strict=True):
        ranks(2).run(little_memory_job, Restore("offload", "offload"), (1,), limit, expert, degrees)


# ---- skew -----------------------------------------------------------------------------------------


def skew_job(
    rank: int, world: int, counts: tuple[int, ...], slack: float, degrees: tuple[int, int], expert: Any
) -> list[Any]:
    """Sends all tokens to the last expert.

    Returns for each pair the collectives of both passes, and the rows of all buffers in slots, by direction
    and by whether they stay.
    """
    n, n_backward = degrees
    x = tokens(counts[rank], 10 + rank)
    x[:, 0] = x[:, 0].abs() + 1
    options = {"slack": slack, "pipeline": n, "pipeline_backward": n_backward, "top_k": 1, "expert": expert}

    def skewed(**more: Any) -> MoELayer:
        layer = build(**options, **more)
        with torch.no_grad():
            layer.gate.weight[-1, 0] += 99
        return layer

    expected = step(skewed(), x)
    found, arena = [], passes_base.Arena
    for pair in SOME_PAIRS:
        rows: dict[tuple[str, bool], int] = {}

        class Watched(arena):  # type: ignore[misc, valid-type]
            def __init__(self, pool: Any, schedule: Any, sizes: BufferSizes, like: Tensor) -> None:
                super().__init__(pool, schedule, sizes, like)
                for buffer in schedule.slots:
                    name = buffer.partition(".")[0]
                    if not name.startswith(("send", "home", "dhome")):
                        key = (sizes.direction, name.endswith("_L"))
                        rows[key] = max(rows.get(key, 0), sizes.shape(buffer)[0])  # noqa: B023

        passes_base.Arena = Watched
        try:
            with counted_collectives() as calls:
                got = step(skewed(memory_reuse=pair), x)
        finally:
            passes_base.Arena = arena
        assert_same(got, expected, 1e-12, pair)
        found.append((len(calls), rows))
    return found


COUNTS = [(0, 7), (11, 2), (13, 13, 13, 13), (17, 0, 29, 5), (7, 7, 0, 0)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "counts, degrees, expert, slack",
    spread(
        [(counts,) for counts in COUNTS],
        [((1, 1), "ffn"), ((3, 3), "ffn"), ((4, 2), mlp)],
        [1, 1.25],
        every=4,
    ),
)
def test_skew_cuts_chunks_finer_on_all_ranks_alike_until_slots_hold_them(
    counts: tuple[int, ...], degrees: tuple[int, int], slack: float, expert: Any
) -> None:
    world, most = len(counts), max(counts)
    bins = num_bins(degrees, world, world)

    def rows_by_chunk(m: int) -> list[int]:
        bounds = [chunk_bounds(count, m) for count in counts[:-1]]  # the last rank's own stay
        return [sum(each[i + 1] - each[i] for each in bounds) for i in range(m)]

    cut = []
    for n in degrees:
        m = n
        while max(rows_by_chunk(m)) > slot_rows(slack, 1, most, n) and bins % (2 * m) == 0:
            m *= 2
        cut.append(m)
    forward, backward = cut
    for found in ranks(world).run(skew_job, counts, slack, degrees, expert):
        for pair, (calls, rows) in zip(SOME_PAIRS, found, strict=True):
            times = 3 if pair.dispatched == "communicate" else 2
            assert calls == 3 + 2 * forward + 1 + times * backward, (pair, cut)
            for (direction, stays), held in rows.items():
                asked, m = (degrees[0], forward) if direction == "forward" else (degrees[1], backward)
                if stays:
                    assert held <= -(-most // m)
                elif m < bins:
                    assert held <= slot_rows(slack, 1, most, asked), (pair, direction)
                else:
                    assert held <= max(rows_by_chunk(m))
