"""The simulation of ranks with unlike numbers of rows: against the even one, and by hand for two ranks."""

import importlib
from dataclasses import replace

import pytest
import torch

from pmoe.planner.cluster import Cluster
from pmoe.planner.copies import CopyLimits, CopyPlan, plan_copies
from pmoe.planner.costs import LineCost
from pmoe.planner.layer_seconds import even_task_costs
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.simulator import makespan, simulate, task_seconds
from pmoe.planner.uneven_ranks import UnevenLayer, nodes_of, tasks_of_ranks, uneven_pass_seconds
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, Stages

FREE = LineCost(0.0, 0.0)
CLUSTER = Cluster(
    machines=1,
    ranks_per_machine=2,
    device_type="cuda",
    memory_bytes=1e9,
    compute=LineCost(0.0, 1.0),
    copy=FREE,
    inside=LineCost(0.0, 1.0),
    outside=FREE,
)
"""Two ranks: a row of one multiply-add takes 1 s, and a byte of a message too."""


def layer(loads: list[int], row_bytes: int = 0, expert_bytes: int = 0) -> UnevenLayer:
    return UnevenLayer(loads=loads, row_bytes=row_bytes, multiply_adds=1, expert_bytes=expert_bytes)


def test_compute_tasks_are_of_each_rank_and_collectives_of_all() -> None:
    tasks = tasks_of_ranks(forward_schedule(1, Stages(local=True, remote=True)), 2)
    found = {task.name: (task.lane, task.waits) for task in tasks}
    assert found["S0"] == ("communicate", ("G0@0", "G0@1"))
    assert found["C0@1"] == ("compute@1", ("S0", "P"))
    assert found["R0"] == ("communicate", ("C0@0", "C0@1"))
    assert len([name for name in found if name.startswith("O0")]) == 2


@pytest.mark.parametrize("n", [1, 2])
def test_even_loads_take_as_long_as_the_simulation_of_even_ranks_says(n: int) -> None:
    compute = LineCost(1e-5, 1e-9)
    cluster = replace(CLUSTER, ranks_per_machine=4, compute=compute, inside=LineCost(3e-6, 2e-9))
    sizes = sizes_from_options(16, 64, 8, top_k=2, num_ranks=4, dtype=torch.float32, device_type="cuda")
    tokens = 240
    even = layer([tokens * 2 * 4 // 8] * 8, row_bytes=64)
    even = replace(even, multiply_adds=2 * 16 * 64)
    profile = cluster.profile("flat", 1, "float32")
    costs = {**even_task_costs(sizes, profile, tokens, n), Kind.WEIGHTS: 0.0}
    for direction, schedule in (("forward", forward_schedule), ("backward", backward_schedule)):
        expected = makespan(simulate(schedule(n, sizes.stages).tasks, task_seconds(costs)))
        assert uneven_pass_seconds(even, cluster, n, direction) == pytest.approx(expected)


def test_all_ranks_wait_for_the_busiest() -> None:
    # Rank 0 computes 30 rows, 15 of its own tokens (L), then 15 received ones (C).
    assert uneven_pass_seconds(layer([30, 10]), CLUSTER, 1, "forward") == 30
    assert uneven_pass_seconds(layer([20, 20]), CLUSTER, 1, "forward") == 20
    # Backward computes as many for the gradients of rows, and as many for those of parameters.
    assert uneven_pass_seconds(layer([30, 10]), CLUSTER, 1, "backward") == 60


def test_an_exchange_takes_as_long_as_its_busiest_link() -> None:
    # S brings rank 0 15 rows of 2 bytes. Its L takes 15 s of these 30. C then takes 15, and R 30.
    assert uneven_pass_seconds(layer([30, 10], row_bytes=2), CLUSTER, 1, "forward") == 30 + 15 + 30


def test_copies_divide_the_rows_and_their_weights_travel_first() -> None:
    plan = CopyPlan(hosts={0: ((0, 20), (1, 10))}, before=30, after=20)
    # Rank 0: 10 rows stay (L), 10 received (C). Rank 1: 5 stay for its expert and 5 for its copy, and each
    # receives 5.
    assert uneven_pass_seconds(layer([30, 10]), CLUSTER, 1, "forward", plan) == 20
    # V takes 7 s, which L hides on rank 0 and not all of it on rank 1: its copy computes 5 rows, then C 10.
    assert uneven_pass_seconds(layer([30, 10], expert_bytes=7), CLUSTER, 1, "forward", plan) == 7 + 15
    assert uneven_pass_seconds(layer([30, 10], expert_bytes=5), CLUSTER, 1, "forward", plan) == 20
    # Backward: rank 1 computes L 5, LW 5, L 5, LKW 5, C 10, KW 5, W 5. VG of 9 s begins at 35 and hides W.
    assert uneven_pass_seconds(layer([30, 10], expert_bytes=9), CLUSTER, 1, "backward", plan) == 35 + 9


def test_a_hosts_own_rows_for_its_copy_are_computed_while_rows_of_other_ranks_travel() -> None:
    plan = CopyPlan(hosts={0: ((0, 20), (1, 20))}, before=40, after=40)
    # Both ranks compute their own 20 rows for expert 0, so no row for it travels.
    assert uneven_pass_seconds(layer([40, 0], row_bytes=1), CLUSTER, 1, "forward", plan) == 20
    # S brings 10 rows of 1 byte for expert 1 to rank 1, in 10 s. In this time rank 1 computes the rows that
    # stay: 10 for its expert and 20 for its copy. Then C takes 10 s, and R 10.
    assert uneven_pass_seconds(layer([40, 20], row_bytes=1), CLUSTER, 1, "forward", plan) == 30 + 10 + 10


def test_rows_beyond_a_hosts_share_travel() -> None:
    plan = CopyPlan(hosts={0: ((0, 30), (1, 10))}, before=40, after=30)
    # Rank 1 computes 10 of its 20 rows, and sends 10 to rank 0. L of rank 0 takes 20 s, C 10, and R 10.
    assert uneven_pass_seconds(layer([40, 0], row_bytes=1), CLUSTER, 1, "forward", plan) == 20 + 10 + 10


def test_modules_compute_all_gradients_in_the_tasks_of_the_gradients_of_rows() -> None:
    modules = replace(layer([20, 20], row_bytes=1), are_modules=True)
    assert uneven_pass_seconds(modules, CLUSTER, 1, "forward") == 10 + 10 + 10
    # L of 20 s hides S of 10 s. C takes 20 s, and R of 10 s has no task W beside it.
    assert uneven_pass_seconds(modules, CLUSTER, 1, "backward") == 20 + 20 + 10
    assert uneven_pass_seconds(replace(modules, are_modules=False), CLUSTER, 1, "backward") == 40


def test_an_owner_sends_each_expert_once_and_hosts_pass_their_parts_on() -> None:
    cluster = replace(CLUSTER, ranks_per_machine=4)
    copied = layer([100, 0, 0, 0], expert_bytes=1000)
    three = CopyPlan(hosts={0: ((0, 25), (1, 25), (2, 25), (3, 25))}, before=100, after=25)
    # V sends a third of the expert to each host. In VR each host sends its third to two other hosts.
    expected = pytest.approx(1000 + 2 / 3 * 1000 + 25)
    assert uneven_pass_seconds(copied, cluster, 1, "forward", three) == expected
    two_experts = layer([50, 50, 0, 0, 0, 0, 0, 0], expert_bytes=1000)
    plan = CopyPlan(hosts={0: ((0, 0), (1, 50)), 1: ((0, 0), (2, 50))}, before=100, after=50)
    assert uneven_pass_seconds(two_experts, cluster, 1, "forward", plan) == 2000 + 50


def test_prices_are_rows_of_products_or_of_messages() -> None:
    even = layer([10, 10], row_bytes=1, expert_bytes=30)
    assert even.copy_prices(CLUSTER, trains=False) == (30, 30)
    assert even.copy_prices(CLUSTER, trains=True) == (20, 20)  # weights and gradients; a row three times
    slow_rows = replace(even, row_bytes=10)  # half of the rows travel, there and back: 10 s a row
    assert slow_rows.copy_prices(CLUSTER, trains=False) == (3, 3)
    two_machines = replace(CLUSTER, machines=2, outside=LineCost(0.0, 4.0))
    assert layer([10] * 4, expert_bytes=30).copy_prices(two_machines, trains=False) == (30, 120)


@pytest.mark.parametrize("trains", [False, True])
def test_copies_bring_skewed_loads_near_balance(trains: bool) -> None:
    bench = importlib.import_module("bench.bench_balance")
    case = bench.CASES[0]
    for share in (0.3, 0.95):
        found = bench.compare(case, bench.hot_loads(case, share, 4), trains)
        assert found["after"] <= 1.05
        assert found["with_over_balanced"] <= 1.10
        assert found["speedup"] > 2.5


def test_the_loads_of_the_benchmark_have_the_stated_skew() -> None:
    bench = importlib.import_module("bench.bench_balance")
    case = bench.CASES[-1]
    for wanted in (1.3, 4.01):
        loads = bench.lognormal_loads(case, wanted, 0)
        assert bench.imbalance(bench.rank_rows(case, loads)) == pytest.approx(wanted, abs=0.01)
    hot = bench.hot_loads(bench.CASES[0], 0.8, 4)
    assert sum(hot[:4]) == pytest.approx(0.8 * bench.CASES[0].rows, rel=1e-6)


def test_a_plan_by_these_prices_costs_at_most_what_it_predicts_and_the_messages_between_hosts() -> None:
    cluster = replace(CLUSTER, ranks_per_machine=4)
    copied = layer([100, 20, 10, 10], row_bytes=0, expert_bytes=12)
    near, far = copied.copy_prices(cluster, trains=False)
    plan = plan_copies(
        copied.loads, copied.owners(4), nodes_of(cluster), CopyLimits(per_rank=1, near=near, far=far)
    )
    assert plan.hosts
    assert uneven_pass_seconds(copied, cluster, 1, "forward", plan) <= plan.after + 2 / 3 * 12
