"""The slow links of bench/: they give the results of gloo, and are never faster than their rate allows.

Only lower bounds of time are asserted: a busy machine may take any time longer.
"""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from bench.links import INFINITE, LinkUnavailableError, launch, measure_rate
from tests.pool import forks

RATE = 10e6  # bytes per second
BIG = 400_000  # bytes that a rank sends to the other: 0.04 s
BIG_SECONDS = BIG / RATE


# ---- two ranks on the modelled link: every function below returns what it saw, the tests judge


def exchange(rows: torch.Tensor, send: list[int], receive: list[int], **options: Any) -> Any:
    received = torch.full((sum(receive), *rows.shape[1:]), -1, dtype=rows.dtype)
    work = dist.all_to_all_single(received, rows, receive, send, **options)
    return received, work


def big() -> Callable[[], None]:
    rows, received = torch.zeros(2, 2 * BIG, dtype=torch.uint8)
    return partial(dist.all_to_all_single, received, rows)


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.monotonic()
    run()
    return time.monotonic() - start


def results_with_uneven_and_zero_splits(link: Any) -> list[bool]:
    """Returns whether results equal those of gloo, on a group of its own."""
    rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
    same = []
    for counts in ([[1, 2], [3, 4]], [[0, 5], [0, 0]], [[2, 0], [0, 3]], [[0, 0], [0, 0]]):
        send, receive = counts[rank], [row[rank] for row in counts]
        for dtype in (torch.float64, torch.bfloat16, torch.int32):
            rows = (torch.arange(3 * sum(send)).view(-1, 3) + 100 * rank).to(dtype)
            ours, _ = exchange(rows, send, receive)
            expected, _ = exchange(rows, send, receive, group=gloo)
            same.append(torch.equal(ours, expected))
    return same


def bytes_sent_to_the_other_rank(link: Any) -> tuple[int, int]:
    """Returns the bytes of even splits, then of rows of 8 bytes: rank 0 sends 1 and 2, rank 1 sends 3
    and 4.
    """
    link.reset_bytes_sent()
    dist.all_to_all_single(torch.empty(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64))
    even = link.bytes_sent
    link.reset_bytes_sent()
    counts, rank = [[1, 2], [3, 4]], dist.get_rank()
    exchange(torch.zeros(sum(counts[rank]), 2), counts[rank], [row[rank] for row in counts])
    return even, link.bytes_sent


def small_collectives_are_not_counted(link: Any) -> int:
    link.reset_bytes_sent()
    dist.all_reduce(torch.zeros(1000))
    dist.barrier()
    dist.broadcast(torch.zeros(1000), 0)
    return link.bytes_sent


def a_big_message(link: Any) -> float:
    return seconds_of(big())


def through_functional_collectives(link: Any) -> tuple[float, bool]:
    rows = torch.arange(2 * BIG, dtype=torch.uint8)
    start = time.monotonic()
    received = functional.all_to_all_single(rows, None, None, dist.group.WORLD)
    received = functional.wait_tensor(received)
    taken = time.monotonic() - start
    half = dist.get_rank() * BIG
    return taken, torch.equal(received, rows[half : half + BIG].repeat(2))


def through_a_new_group_the_link_is_the_same(link: Any) -> float:
    """Returns the seconds of two messages at the same time, on two groups: the link carries one after the
    other.
    """
    rows, received, also_received = torch.zeros(3, 2 * BIG, dtype=torch.uint8)
    group = dist.new_group(backend="modelled")
    start = time.monotonic()
    first = dist.all_to_all_single(received, rows, async_op=True)
    second = dist.all_to_all_single(also_received, rows, group=group, async_op=True)
    first.wait()
    second.wait()
    return time.monotonic() - start


def a_receiver_waits_for_what_it_receives(link: Any) -> float:
    """Returns the seconds of an all-to-all in which rank 0 sends, and rank 1 sends nothing."""
    rank = dist.get_rank()
    rows = torch.zeros(BIG if rank == 0 else 0, dtype=torch.uint8)
    splits = ([0, BIG], [0, 0]) if rank == 0 else ([0, 0], [BIG, 0])
    return seconds_of(lambda: exchange(rows, *splits))


def several_in_flight(link: Any) -> tuple[list[float], list[int]]:
    """Sends three messages of different values, and waits for them in reverse order.

    Returns when each was complete, and what it brought.
    """
    rank, start = dist.get_rank(), time.monotonic()
    sent = [torch.full((2 * BIG,), 10 * i + rank, dtype=torch.uint8) for i in range(3)]
    received = [torch.empty_like(rows) for rows in sent]
    works = [dist.all_to_all_single(*pair, async_op=True) for pair in zip(received, sent, strict=True)]
    ready = [0.0] * 3
    for i in (2, 1, 0):
        works[i].wait()
        ready[i] = time.monotonic() - start
    return ready, [int(rows[(1 - rank) * BIG]) for rows in received]


def each_waited_for_in_order(link: Any) -> list[float]:
    start = time.monotonic()
    works = [big()(async_op=True) for _ in range(3)]
    ready = []
    for work in works:
        work.wait()
        ready.append(time.monotonic() - start)
    return ready


def completion_without_waiting(link: Any) -> float:
    """Returns the seconds after which is_completed() became True."""
    start = time.monotonic()
    work = big()(async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    return time.monotonic() - start


def no_completion_before_the_peer_has_come(link: Any) -> bool:
    """Returns whether a message is complete. There is no limit, and rank 1 comes only after rank 0 has
    looked.
    """
    link.set_rate(INFINITE)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == 1:
        store.wait(["looked"])
    work = big()(async_op=True)
    time.sleep(0.05)
    completed = work.is_completed()
    if rank == 0:
        store.set("looked", "")
    work.wait()
    link.set_rate(RATE)
    return completed


def waited_for_from_several_threads(link: Any) -> list[float]:
    start = time.monotonic()
    work = big()(async_op=True)
    ready: list[float] = []
    threads = [
        threading.Thread(target=lambda: (work.wait(), ready.append(time.monotonic() - start)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ready


def the_future(link: Any) -> tuple[float, int]:
    start = time.monotonic()
    received, work = exchange(torch.ones(2 * BIG, dtype=torch.uint8), [BIG, BIG], [BIG, BIG], async_op=True)
    (result,) = work.get_future().wait()
    return time.monotonic() - start, int((result == received).sum())


def a_rate_changed_at_run_time(link: Any) -> tuple[float, float]:
    link.set_rate(RATE / 2)
    slow = seconds_of(big())
    link.set_rate(RATE, latency_seconds=0.2)
    late = seconds_of(big())
    link.set_rate(RATE)
    return slow, late


def the_measured_rate(link: Any) -> float:
    """Returns the measured rate. The larger of two messages alone bounds it, whatever the load."""
    link.set_rate(INFINITE)
    small, large = 50_000, 500_000
    link.set_rate(RATE)
    cost = measure_rate((small, large), rounds=1)
    return cost.alpha_seconds + large / cost.bytes_per_second


def a_thousand_reductions_of_passing_tensors(link: Any) -> float:
    """Returns the seconds. It once deadlocked, when c10d issued the reductions with the interpreter lock
    held.
    """
    total = 0.0
    for _ in range(1000):
        value = torch.ones(8)
        dist.all_reduce(value)
        total += float(value[0])
    return total


PROBES = (
    results_with_uneven_and_zero_splits,
    bytes_sent_to_the_other_rank,
    small_collectives_are_not_counted,
    a_big_message,
    through_functional_collectives,
    through_a_new_group_the_link_is_the_same,
    a_receiver_waits_for_what_it_receives,
    several_in_flight,
    each_waited_for_in_order,
    completion_without_waiting,
    no_completion_before_the_peer_has_come,
    waited_for_from_several_threads,
    the_future,
    a_rate_changed_at_run_time,
    the_measured_rate,
    a_thousand_reductions_of_passing_tensors,
)


def all_probes(link: Any) -> dict[str, Any]:
    seen = {"threads": torch.get_num_threads(), "cores": len(os.sched_getaffinity(0))}
    for probe in PROBES:
        dist.barrier()
        seen[probe.__name__] = probe(link)
    return seen


@pytest.fixture(scope="module", autouse=True)
def forked_ranks() -> Iterator[None]:
    """Makes the ranks of benchmarks forks of this process, as those of `tests.pool`: fresh ones import
    torch.
    """
    with pytest.MonkeyPatch.context() as patch:
        others = {"get_context": lambda kind: forks(), "connection": multiprocessing.connection}
        module = importlib.import_module("bench.links.launch")
        patch.setattr(module, "multiprocessing", SimpleNamespace(**others))
        yield


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """Returns what the two ranks saw in all jobs.

    All jobs share one launch, because starting processes is slow.
    """
    return launch(2, all_probes, "modelled", RATE, timeout_seconds=240)


Seen = list[dict[str, Any]]


def each(seen: Seen, probe: Callable[..., Any]) -> list[Any]:
    return [rank[probe.__name__] for rank in seen]


@pytest.mark.slow
def test_each_rank_has_one_thread_and_a_core_of_its_own_where_there_are_two(seen: Seen) -> None:
    usable = len(os.sched_getaffinity(0))
    assert [(rank["threads"], rank["cores"]) for rank in seen] == [(1, 1 if usable > 1 else usable)] * 2


def test_results_equal_gloos_with_uneven_and_zero_splits(seen: Seen) -> None:
    assert each(seen, results_with_uneven_and_zero_splits) == [[True] * 12] * 2


def test_bytes_are_those_sent_to_others(seen: Seen) -> None:
    assert each(seen, bytes_sent_to_the_other_rank) == [(24, 16), (24, 24)]


def test_other_collectives_pass_untouched(seen: Seen) -> None:
    assert each(seen, small_collectives_are_not_counted) == [0, 0]


def test_a_message_takes_at_least_what_the_link_needs_for_it(seen: Seen) -> None:
    assert min(each(seen, a_big_message)) >= BIG_SECONDS


def test_functional_collectives_are_held_back_too(seen: Seen) -> None:
    for taken, is_right in each(seen, through_functional_collectives):
        assert taken >= BIG_SECONDS
        assert is_right


def test_all_groups_of_a_process_share_its_link(seen: Seen) -> None:
    assert min(each(seen, through_a_new_group_the_link_is_the_same)) >= 2 * BIG_SECONDS


def test_a_rank_that_only_receives_waits_for_the_bytes(seen: Seen) -> None:
    assert min(each(seen, a_receiver_waits_for_what_it_receives)) >= BIG_SECONDS


def test_messages_in_flight_keep_their_values_when_waited_for_in_reverse(seen: Seen) -> None:
    for rank, (ready, values) in enumerate(each(seen, several_in_flight)):
        assert min(ready) >= 3 * BIG_SECONDS  # the first to be waited for was the last to be sent
        assert values == [1 - rank, 10 + 1 - rank, 20 + 1 - rank]


def test_messages_in_flight_come_one_after_the_other(seen: Seen) -> None:
    for ready in each(seen, each_waited_for_in_order):
        assert all(seconds >= (i + 1) * BIG_SECONDS for i, seconds in enumerate(ready))
        assert ready == sorted(ready)


def test_a_work_is_not_completed_before_the_link_has_carried_it(seen: Seen) -> None:
    assert min(each(seen, completion_without_waiting)) >= BIG_SECONDS


def test_a_work_is_not_completed_before_gloos_own_is(seen: Seen) -> None:
    assert not seen[0][no_completion_before_the_peer_has_come.__name__]


def test_several_threads_may_wait_for_one_work(seen: Seen) -> None:
    for ready in each(seen, waited_for_from_several_threads):
        assert len(ready) == 4
        assert min(ready) >= BIG_SECONDS


def test_the_future_comes_with_the_work(seen: Seen) -> None:
    for seconds, equal_bytes in each(seen, the_future):
        assert seconds >= BIG_SECONDS
        assert equal_bytes == 2 * BIG


def test_rate_and_latency_change_at_run_time(seen: Seen) -> None:
    for slow, late in each(seen, a_rate_changed_at_run_time):
        assert slow >= 2 * BIG_SECONDS
        assert late >= 0.2 + BIG_SECONDS


def test_the_measured_line_passes_through_the_time_of_the_large_message(seen: Seen) -> None:
    assert min(each(seen, the_measured_rate)) >= 0.999 * 500_000 / RATE  # 0.999: rounding of the line


def test_issuing_small_collectives_never_deadlocks(seen: Seen) -> None:
    assert each(seen, a_thousand_reductions_of_passing_tensors) == [2000.0] * 2


# ---- two nodes of two ranks


def on_two_levels(link: Any) -> dict[str, Any]:
    """Runs even all-to-alls with BIG bytes for each member, over the world and both dimensions of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
    link.set_rates(inter=RATE, intra=2 * RATE, intra_latency_seconds=0.1)
    seen: dict[str, Any] = {}
    for name, group in (("world", None), ("ep", mesh.get_group("ep")), ("esp", mesh.get_group("esp"))):
        size = dist.get_world_size(group)
        rows = torch.full((size * BIG,), dist.get_rank(), dtype=torch.uint8)
        received = torch.empty_like(rows)
        link.reset_bytes_sent()
        dist.barrier()
        seconds = seconds_of(partial(dist.all_to_all_single, received, rows, group=group))
        sent = (link.bytes_sent, link.bytes_sent_inside)
        seen[name] = (seconds, *sent, received[::BIG].tolist())
    return seen


def test_groups_of_a_mesh_pass_the_links_that_lie_between_their_ranks() -> None:
    seen = launch(4, on_two_levels, "modelled", INFINITE, ranks_per_node=2, timeout_seconds=240)
    for rank, found in enumerate(seen):
        node, place = divmod(rank, 2)
        seconds, *rest = found["world"]
        assert rest == [2 * BIG, BIG, [0, 1, 2, 3]]
        assert seconds >= 2 * BIG_SECONDS
        seconds, *rest = found["ep"]
        assert rest == [BIG, 0, [place, 2 + place]]
        assert seconds >= BIG_SECONDS
        seconds, *rest = found["esp"]
        assert rest == [0, BIG, [2 * node, 2 * node + 1]]
        assert seconds >= 0.1 + BIG_SECONDS / 2


# ---- failures


def one_rank_dies(link: Any) -> None:
    work = big()(async_op=True)
    work.wait()
    if dist.get_rank() == 1:
        os._exit(7)
    big()()


def test_a_dead_peer_raises_on_the_survivor_and_both_are_told() -> None:
    with pytest.raises(RuntimeError) as caught:
        launch(2, one_rank_dies, "modelled", RATE, timeout_seconds=240)
    message = str(caught.value)
    assert "rank 1: died, exit code 7" in message
    assert "rank 0: Traceback" in message
    assert "in wait" in message  # gloo's error, raised where the work was waited for


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("modeled", 1e6), r"link \('modeled'\) must be"),
        (("modelled", 0), r"bytes_per_second \(0\) must be positive"),
    ],
)
def test_launch_refuses_bad_arguments_before_it_starts_anything(arguments: tuple, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        launch(2, one_rank_dies, *arguments)


@pytest.mark.parametrize("ranks_per_node", [0, 3])
def test_launch_refuses_nodes_that_the_ranks_do_not_fill(ranks_per_node: int) -> None:
    with pytest.raises(ValueError, match=rf"ranks_per_node \({ranks_per_node}\) must .* world \(4\)"):
        launch(4, one_rank_dies, "modelled", 1e6, ranks_per_node=ranks_per_node)


def test_the_real_link_refuses_a_latency() -> None:
    with pytest.raises(ValueError, match=r"latency_seconds \(0.1\) must be 0 on the real link"):
        launch(2, one_rank_dies, "real", 1e6, latency_seconds=0.1)


def test_the_real_link_refuses_in_one_line_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkUnavailableError, match="needs root") as caught:
        launch(2, one_rank_dies, "real", 1e6)
    assert "\n" not in str(caught.value)


def test_the_real_link_refuses_in_one_line_without_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LinkUnavailableError, match="needs `ip`") as caught:
        launch(2, one_rank_dies, "real", 1e6)
    assert "\n" not in str(caught.value)


# ---- the real link


def span_of(run: Callable[[], Any]) -> tuple[float, float]:
    dist.barrier()
    start = time.monotonic()
    run()
    return start, time.monotonic()


def on_the_real_link(link: Any) -> tuple[tuple[float, float], tuple[float, float], int, bool]:
    at_first = span_of(big())
    link.set_rate(RATE / 2)
    link.reset_bytes_sent()
    later = span_of(big())
    dist.barrier()  # what is still in the socket when the message counts as sent goes before the barrier
    sent = link.bytes_sent
    return at_first, later, sent, results_with_uneven_and_zero_splits(link) == [True] * 12


@pytest.mark.slow
def test_the_real_link_carries_all_bytes_at_its_rate_and_leaves_nothing_behind() -> None:
    try:
        results = launch(2, on_the_real_link, "real", RATE, timeout_seconds=240)
    except LinkUnavailableError as reason:
        pytest.skip(str(reason))
    at_first, later, sent, is_right = zip(*results, strict=True)
    # One rank may be served before the other, so the time is that of both; one clock serves all processes.
    for spans, rate in ((at_first, RATE), (later, RATE / 2)):
        starts, ends = zip(*spans, strict=True)
        free_bytes = 128 << 10  # a full bucket passes at once
        assert max(ends) - min(starts) >= (2 * BIG - free_bytes) / (2 * rate)
    assert min(sent) >= BIG
    assert all(is_right)
    assert not [name for name in os.listdir("/run/netns") if name.startswith("pmoe")]


def on_two_real_nodes(link: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "esp"))
    link.set_rates(inter=RATE, intra=2 * RATE)
    seen: dict[str, Any] = {}
    for name in ("ep", "esp"):
        group = mesh.get_group(name)
        rows, received = torch.zeros(2, 2 * BIG, dtype=torch.uint8)
        dist.barrier()
        link.reset_bytes_sent()
        dist.barrier()
        span = span_of(partial(dist.all_to_all_single, received, rows, group=group))
        dist.barrier()
        seen[name] = (span, link.bytes_sent, link.bytes_sent_inside)
    return seen


@pytest.mark.slow
def test_the_real_links_of_two_nodes_each_carry_what_is_theirs() -> None:
    try:
        results = launch(4, on_two_real_nodes, "real", RATE, ranks_per_node=2, timeout_seconds=240)
    except LinkUnavailableError as reason:
        pytest.skip(str(reason))
    free_bytes, small = 128 << 10, BIG // 2  # barriers and connections take some bytes, too
    for name, share, ranks in (("ep", 4 * BIG / (4 * RATE), 4), ("esp", 2 * BIG / (4 * RATE), 2)):
        for first in range(0, 4, ranks):
            starts, ends = zip(*(each[name][0] for each in results[first : first + ranks]), strict=True)
            assert max(ends) - min(starts) >= share - free_bytes / (4 * RATE)
        for _, between, inside in (each[name] for each in results):  # of the two ranks of a node
            assert (between >= 2 * BIG) == (name == "ep")
            assert (inside >= 2 * BIG) == (name == "esp")
            assert min(between, inside) < small
    assert not [name for name in os.listdir("/run/netns") if name.startswith("pmoe")]
