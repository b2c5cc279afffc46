"""Memory reuse and the host: a host pool with a limit, and layers for which it is too small."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import Restore, warn
from pmoe.engine.buffers.host_pool import HostMemoryError, HostPool
from pmoe.schedule.buffer_sizes import ALIGNMENT
from pmoe.schedule.restore import ALL_PAIRS
from tests.kit import (
    D_HIDDEN,
    D_MODEL,
    TOKENS,
    TOP_K,
    assert_same,
    build,
    one_thread,  # noqa: F401 (a fixture)
    step,
    tokens,
)
from tests.own_experts import changing, dropping, mlp
from tests.saved import num_rows, rows_saved, saved_by
from tests.spread import named, spread


@pytest.fixture
def host() -> Iterator[HostPool]:
    """Returns the host pool, whose limit a test may set. No warning has been given yet."""
    pool = pmoe.pool().host
    limit, warned = pool.limit_bytes, set(warn.GIVEN)
    warn.GIVEN.clear()
    gc.collect()
    yield pool
    pool.limit_bytes = limit
    warn.GIVEN.update(warned)


# ---- too little host memory


def row_bytes(columns: int, rows: int = TOKENS * TOP_K) -> int:
    return rows * columns * 8


@pytest.mark.parametrize("pair", [pair for pair in ALL_PAIRS if pair.offloads], ids=str)
def test_a_layer_that_offloads_is_not_built_with_no_host_memory_left(pair: Restore, host: HostPool) -> None:
    host.limit_bytes = 0
    with pytest.raises(
        ValueError, match=rf"memory_reuse \({pair}\) must not offload .*: 0 of 0 bytes are left\. Set pmoe"
    ):
        build(memory_reuse=pair)
    build(memory_reuse="S4")
    build(memory_reuse=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "expert, pair",
    spread(["ffn", mlp, dropping, changing], [pair for pair in ALL_PAIRS if pair.offloads], every=2),
    ids=named,
)
def test_with_little_host_memory_gradients_stay_right_and_one_warning_a_tensor_is_given(
    pair: Restore, expert: Any, host: HostPool
) -> None:
    if pair.hidden == "recompute" and expert is changing:
        return  # refused
    for n, n_backward in [(1, 1), (3, 3), (4, 2)]:
        if pair.hidden == "recompute" and expert is dropping and n != n_backward:
            continue
        options = {"expert": expert, "pipeline": n, "pipeline_backward": n_backward}
        expected = step(build(**options))
        for limit in (ALIGNMENT, 1500, 4000, 10**9):
            warn.GIVEN.clear()
            layer = build(memory_reuse=pair, **options)
            host.limit_bytes = limit
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got = step(layer)
                again = step(layer)
            host.limit_bytes = 10**9
            messages = [str(each.message) for each in caught]
            assert len(messages) <= (pair.dispatched == "offload") + (pair.hidden == "offload")
            assert messages or limit > ALIGNMENT
            assert not messages or limit < 10**9, messages
            assert_same(got, expected, 1e-12)
            assert_same(again, expected, 1e-12)


def test_rows_that_find_no_host_memory_are_sent_again(host: HostPool) -> None:
    layer = build(memory_reuse="S3", pipeline=2)
    host.limit_bytes = row_bytes(D_MODEL) - 1
    with pytest.warns(UserWarning, match="too little host memory is left on some rank to offload T_DI"):
        y, saved = saved_by(layer, x := tokens())
    assert rows_saved(saved, D_MODEL, x) == []
    assert host.bytes_in_use == 0
    del y


def test_hidden_that_finds_no_host_memory_is_recomputed(host: HostPool) -> None:
    layer = build(memory_reuse=Restore("keep", "offload"), pipeline=2)
    host.limit_bytes = row_bytes(D_HIDDEN) // 2 + 2 * ALIGNMENT
    with pytest.warns(UserWarning, match="host memory for offloading: .* is recomputed"):
        y, saved = saved_by(layer, x := tokens())
    assert 0 < num_rows(rows_saved(saved, D_HIDDEN, x)) < TOKENS * TOP_K
    del y


def test_hidden_leaves_the_host_memory_that_rows_will_need(host: HostPool) -> None:
    """Otherwise T_DI of later chunks would stay on the device and need more than the ring slots."""
    layer = build(memory_reuse="S1", pipeline=4, expert="swiglu")
    host.limit_bytes = row_bytes(D_MODEL) + 8 * ALIGNMENT
    with pytest.warns(UserWarning, match="T_M that does not fit is recomputed"):
        y, saved = saved_by(layer, x := tokens())
    assert host.bytes_in_use >= row_bytes(D_MODEL)
    addresses = [(segment.address, segment.num_bytes) for segment in host._segments]
    rows = rows_saved(saved, D_MODEL, x)
    assert num_rows(rows) == TOKENS * TOP_K
    assert all(any(a <= t.data_ptr() < a + size for a, size in addresses) for t in rows)
    del y


def test_what_rows_have_taken_is_kept_free_for_them_no_more(host: HostPool) -> None:
    """T_M of the last chunk fits if slightly more memory is left than it needs."""
    layer, x = build(memory_reuse="S1", pipeline=4), tokens(300)
    y = layer(x)
    used = host.bytes_in_use
    del y
    host.limit_bytes = used + row_bytes(D_MODEL, 300 * TOP_K) // 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = layer(x)
    assert host.bytes_in_use == used
    del y


def test_a_pass_without_gradients_warns_of_no_host_memory(host: HostPool) -> None:
    layer = build(memory_reuse="S1")
    host.limit_bytes = 0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        layer(tokens())


# ---- the host pool


def new_pool(limit_bytes: int) -> HostPool:
    pool = HostPool(torch.device("cpu"))
    pool.limit_bytes = limit_bytes
    return pool


def take(pool: HostPool, size: int) -> Tensor:
    return pool.take((size,), torch.uint8)


def test_host_memory_is_first_fit_and_neighbours_are_joined() -> None:
    pool = new_pool(10 * ALIGNMENT)
    blocks = [take(pool, 2 * ALIGNMENT) for _ in range(5)]
    base = blocks[0].data_ptr()
    assert [block.data_ptr() - base for block in blocks] == [2 * i * ALIGNMENT for i in range(5)]
    assert (pool.bytes_in_use, pool.free_bytes, pool.peak_bytes) == (10 * ALIGNMENT, 0, 10 * ALIGNMENT)
    blocks[1] = blocks[3] = None
    with pytest.raises(
        HostMemoryError, match=f"no free piece has {3 * ALIGNMENT} bytes, .* is {10 * ALIGNMENT}"
    ):
        take(pool, 3 * ALIGNMENT)
    blocks[2] = None  # joins both neighbours
    blocks[1] = take(pool, 5 * ALIGNMENT)
    assert blocks[1].data_ptr() - base == 2 * ALIGNMENT
    assert (pool.bytes_in_use, pool.peak_bytes) == (9 * ALIGNMENT, 10 * ALIGNMENT)
    blocks[2] = take(pool, 1)
    assert blocks[2].data_ptr() - base == 7 * ALIGNMENT


def test_host_memory_has_a_limit_and_says_the_numbers() -> None:
    pool = new_pool(1000)
    with pytest.raises(
        HostMemoryError, match="host memory for offloading: 1001 bytes wanted, 1000 of 1000 left"
    ):
        take(pool, 1001)
    held = take(pool, 700)  # in whole steps of the alignment
    assert pool.bytes_in_use == 3 * ALIGNMENT
    with pytest.raises(HostMemoryError, match=f"300 bytes wanted, {1000 - 3 * ALIGNMENT} of 1000 left"):
        take(pool, 300)
    pool.limit_bytes = 100  # below what is in use
    assert pool.free_bytes == 0
    del held
    assert pool.free_bytes == 100


def test_a_limit_that_is_raised_lets_the_pool_grow() -> None:
    pool = new_pool(2 * ALIGNMENT)
    small = take(pool, 2 * ALIGNMENT)
    pool.limit_bytes = 1 << 20
    large = take(pool, 1 << 19)
    assert pool.bytes_in_use == (1 << 19) + 2 * ALIGNMENT
    assert small.data_ptr() + small.nbytes <= large.data_ptr() or large.data_ptr() < small.data_ptr()
    del large
    assert take(pool, (1 << 20) - 2 * ALIGNMENT).nbytes == (1 << 20) - 2 * ALIGNMENT


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_never_grows_beyond_its_limit(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool(8 * ALIGNMENT)
    if pinned:
        pool._pinned = True
        empty = torch.empty
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kw: empty(*args, **kw))
    blocks = [take(pool, 2 * ALIGNMENT) for _ in range(4)]
    del blocks[::2]
    for size in (1, 2):
        with pytest.raises(HostMemoryError, match="no free piece"):
            take(pool, (2 + size) * ALIGNMENT)
    assert sum(segment.num_bytes for segment in pool._segments) <= 8 * ALIGNMENT
    del blocks
    assert take(pool, 8 * ALIGNMENT).nbytes == 8 * ALIGNMENT
    assert sum(segment.num_bytes for segment in pool._segments) <= 8 * ALIGNMENT


def test_nothing_takes_no_host_memory() -> None:
    pool = new_pool(0)
    assert pool.take((0, 6), torch.float64).shape == (0, 6)
    assert pool.bytes_in_use == 0


def test_host_memory_comes_back_with_the_last_reader_also_out_of_a_cycle() -> None:
    pool = new_pool(4 * ALIGNMENT)
    tensor = pool.take((4, 8), torch.float64)
    assert tensor.dtype == torch.float64
    assert tensor.shape == (4, 8)
    row = tensor[1]
    del tensor
    assert pool.bytes_in_use == ALIGNMENT
    del row
    assert pool.bytes_in_use == 0
    cycle: list[Any] = [take(pool, 1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.bytes_in_use == 0


def test_many_random_takes_never_overlap_and_all_come_back() -> None:
    pool, draw = new_pool(1 << 16), random.Random(5)
    live: list[tuple[int, Tensor]] = []
    refused = 0
    for number in range(3000):
        if live and draw.random() < 0.45:
            value, block = live.pop(draw.randrange(len(live)))
            assert (block == value).all()
            del block
        else:
            try:
                block = take(pool, draw.choice([1, 255, 256, 257, 3000, 9000]))
            except HostMemoryError:
                refused += 1
                continue
            live.append((number % 251, block.fill_(number % 251)))
            del block
        assert pool.bytes_in_use == sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for _, b in live)
        assert pool.bytes_in_use <= pool.peak_bytes <= pool.limit_bytes
    assert refused > 10
    assert all((block == value).all() for value, block in live)
    live.clear()
    assert pool.bytes_in_use == 0
    assert take(pool, 1 << 16).nbytes == 1 << 16  # in one piece again


# ---- who holds offloaded tensors when a graph is gone


def dropped(y: Tensor) -> None:
    """Drops the output without a backward pass."""


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], None]] = {
    "backward": lambda run, x: run(x).sum().backward(),
    "no gradient": lambda run, x: dropped(torch.no_grad()(run)(x)),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True).sum().backward(),
    "plain": lambda run, x: checkpoint(run, x, use_reentrant=False).sum().backward(),
    "contexts": lambda run, x: (
        checkpoint(run, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts).sum().backward()
    ),
    "a checkpoint without backward": lambda run, x: dropped(checkpoint(run, x, use_reentrant=False)),
    "no backward": lambda run, x: dropped(run(x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_tensors_go_with_the_graph_and_with_l_aux_where_no_backward_came(way: str) -> None:
    """The balance loss of a second layer is the only thing that keeps the first one's graph."""
    first, second = (build(memory_reuse=Restore("offload", "offload")) for _ in range(2))
    WAYS[way](lambda x: second(first(x)), tokens(40, 1).requires_grad_())
    gc.collect()
    assert (pmoe.pool().host.bytes_in_use > 0) == (way == "no backward")
    second.l_aux = None
    assert pmoe.pool().host.bytes_in_use == 0
