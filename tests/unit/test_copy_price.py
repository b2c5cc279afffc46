"""The price of a copy in rows, by which balance=True decides, and with which the simulator plans."""

from dataclasses import replace

import pytest

from pmoe.planner.cluster import Cluster, links_of
from pmoe.planner.copy_price import copy_prices
from pmoe.planner.costs import LineCost
from pmoe.planner.uneven_ranks import UnevenLayer
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, fate_of_copies
from tests.unit.test_profile import MADE

M, H = 64, 256
ELEMENTS = 2 * M * H
LAYER = {"multiply_adds": ELEMENTS, "row_bytes": 4 * M, "expert_bytes": 4 * ELEMENTS, "num_ranks": 2}
"""Elements have 4 bytes. One of two rows stays on its rank."""


def price(
    *,
    compute: float,
    message: float,
    alpha: float = 0.0,
    trains: bool = True,
    sent_again: bool = False,
    stay: bool = False,
) -> int:
    """The price on every node. Rates are seconds of a multiply-add and of a byte.

    With ``sent_again`` the restore pair is S4, which sends rows again.
    """
    profile = replace(MADE, compute=LineCost(0.0, compute), message=LineCost(alpha, message))
    restore = STRATEGIES["S4"] if sent_again else KEEP
    near, far = copy_prices(profile, {}, **LAYER, trains=trains, restore=restore, stay=stay)
    assert near == far
    return near


def test_behind_a_slow_link_a_copy_costs_as_much_as_the_messages_of_twice_its_columns() -> None:
    """Weights and gradients are 4 H M numbers. A row sends 4 M numbers, and one of two rows stays."""
    assert price(compute=1e-15, message=1e-9) == 2 * H
    assert price(compute=1e-15, message=1e-9, trains=False) == 2 * H


def test_behind_a_fast_link_a_copy_is_priced_by_the_products_of_rows() -> None:
    # 2 * 4 * 2 M H bytes against 3 * 2 M H multiply-adds a row
    assert price(compute=1e-11, message=3e-10) == 80
    assert price(compute=1e-11, message=3e-11) == 8
    assert price(compute=1e-11, message=3e-11, trains=False) == 12


def test_where_backward_sends_rows_and_weights_again_both_count() -> None:
    # 3 * 2 H M numbers of a copy against 5 M of a row
    assert price(compute=1e-15, message=1e-9, sent_again=True) == pytest.approx(2.4 * H, abs=1)
    assert price(compute=1e-11, message=3e-10, sent_again=True) == 120
    assert price(compute=1e-11, message=3e-10, sent_again=True, trains=False) == 120


def test_copies_for_later_calls_are_sent_once_also_if_rows_are_sent_again() -> None:
    """They were priced as if backward sent them again: 1.5 times the price."""
    # 2 * 2 H M numbers of a copy against 5 M of a row
    assert price(compute=1e-15, message=1e-9, sent_again=True, stay=True) == pytest.approx(1.6 * H, abs=1)
    assert price(compute=1e-11, message=3e-10, sent_again=True, stay=True) == 80
    assert price(compute=1e-11, message=3e-10, stay=True) == 80  # without ring slots nothing changes


def test_copies_are_sent_again_where_rows_are_unless_they_stay() -> None:
    for pair in ALL_PAIRS:
        again = "communicate" if pair.dispatched == "communicate" else "keep"
        assert fate_of_copies(pair, stay=False) == again
        assert fate_of_copies(pair, stay=True) == "keep"
        assert fate_of_copies(pair, stay=False, are_present=True) == "present"


def test_a_copy_on_another_node_is_priced_by_the_link_between_nodes() -> None:
    slow, fast = LineCost(0.0, 3e-11), LineCost(0.0, 1e-11)
    profile = replace(MADE, compute=LineCost(0.0, 1e-11), message=LineCost(0.0, 2e-11))

    def prices(**links: LineCost) -> tuple[int, int]:
        return copy_prices(profile, links, **LAYER, trains=True)

    assert prices(inside=fast, outside=slow) == (3, 8)
    assert prices(inside=slow, outside=fast) == (8, 8)  # links of noisy measurements
    assert prices(inside=fast) == (3, 3)
    assert prices(outside=slow) == (8, 8)
    assert prices() == (6, 6)


def test_the_fixed_time_of_a_message_counts() -> None:
    row_seconds = 3 * ELEMENTS * 1e-11
    assert price(compute=1e-11, message=0.0, alpha=100 * row_seconds) == pytest.approx(200, abs=1)


def test_without_rates_nothing_is_asked() -> None:
    assert price(compute=0.0, message=0.0) == 0


def test_gradients_and_their_products_cost_as_much_as_the_weights_that_are_trained() -> None:
    profile = replace(MADE, compute=LineCost(0.0, 1e-11), message=LineCost(0.0, 3e-10))
    # 8 M H bytes and those of the gradients, against 2 M H multiply-adds, once for each kind of product
    prices = [copy_prices(profile, {}, **LAYER, trains=True, learned=of)[0] for of in (1.0, 0.5, 0.0)]
    assert prices == [240 // 3, 180 / 2.5, 120 / 2]


@pytest.mark.parametrize(("machines", "ranks_per_machine"), [(1, 4), (4, 1)])
@pytest.mark.parametrize("trains", [False, True])
def test_the_simulator_prices_a_copy_as_a_layer_on_these_machines_does(
    machines: int, ranks_per_machine: int, trains: bool
) -> None:
    """The simulator had a formula of its own, which left out the fixed time of messages.

    The layer counted the fixed time of a message to all ranks, although few ranks get a copy.
    """
    cluster = Cluster(
        machines=machines,
        ranks_per_machine=ranks_per_machine,
        device_type="cuda",
        memory_bytes=1e9,
        compute=LineCost(0.0, 1e-12),
        copy=LineCost(0.0, 0.0),
        inside=LineCost(2e-6, 1e-10),
        outside=LineCost(9e-6, 4e-10),
    )
    profile = cluster.profile("flat", 1, "float32")
    layer = UnevenLayer(loads=[10] * 4, row_bytes=4 * M, multiply_adds=ELEMENTS, expert_bytes=4 * ELEMENTS)
    link = cluster.inside if machines == 1 else cluster.outside
    crossing = 3 / 4
    rows_seconds = max(
        (3 if trains else 1) * ELEMENTS * 1e-12, (4 if trains else 2) * 4 * M * crossing * link.beta_seconds
    )
    expected = (2 if trains else 1) * link(4 * ELEMENTS) / rows_seconds
    prices = layer.copy_prices(cluster, trains=trains)
    assert prices == copy_prices(profile, links_of(profile), **{**LAYER, "num_ranks": 4}, trains=trains)
    assert prices == pytest.approx((expected, expected), abs=1)
