"""The price of a copy in rows, by which balance=True decides."""

from dataclasses import replace

import pytest

from pmoe.planner.copy_price import copy_price, prices_of_copy
from pmoe.planner.costs import LineCost
from tests.unit.test_profile import MADE

M, H = 64, 256
ELEMENTS = 2 * M * H


def price(*, compute: float, message: float, alpha: float = 0.0, trains: bool = True) -> int:
    """Rates are seconds of a multiply-add and of a byte. Rows have elements of 4 bytes, on 2 ranks."""
    profile = replace(MADE, compute=LineCost(0.0, compute), message=LineCost(alpha, message))
    return copy_price(
        profile,
        link=profile.message,
        expert_elements=ELEMENTS,
        d_model=M,
        element_size=4,
        num_ranks=2,
        trains=trains,
    )


def test_behind_a_slow_link_a_copy_costs_as_much_as_the_messages_of_twice_its_columns() -> None:
    """Weights and gradients are 4 H M numbers. A row sends 4 M numbers, and one of two rows stays."""
    assert price(compute=1e-15, message=1e-9) == 2 * H
    assert price(compute=1e-15, message=1e-9, trains=False) == 2 * H


def test_behind_a_fast_link_a_copy_is_priced_by_the_products_of_rows() -> None:
    # 2 * 4 * 2 M H bytes against 3 * 2 M H multiply-adds a row
    assert price(compute=1e-11, message=3e-10) == 80
    assert price(compute=1e-11, message=3e-11) == 8
    assert price(compute=1e-11, message=3e-11, trains=False) == 12


def test_a_copy_on_another_node_is_priced_by_the_link_between_nodes() -> None:
    links = {"inside": LineCost(0.0, 1e-11), "outside": LineCost(0.0, 3e-11)}
    layer = {"expert_elements": ELEMENTS, "d_model": M, "element_size": 4, "num_ranks": 2, "trains": True}
    profile = replace(MADE, compute=LineCost(0.0, 1e-11), message=LineCost(0.0, 2e-11))
    near, far = prices_of_copy(profile, links, **layer)
    assert (near, far) == (3, 8)
    assert prices_of_copy(profile, {"outside": LineCost(0.0, 1.0)}, **layer) == (6, 6)


def test_the_fixed_time_of_a_message_counts() -> None:
    row_seconds = 3 * ELEMENTS * 1e-11
    assert price(compute=1e-11, message=0.0, alpha=100 * row_seconds) == pytest.approx(200, abs=1)


def test_without_rates_nothing_is_asked() -> None:
    assert price(compute=0.0, message=0.0) == 0


def test_gradients_cost_as_much_as_the_weights_that_are_trained() -> None:
    profile = replace(MADE, compute=LineCost(0.0, 1e-11), message=LineCost(0.0, 3e-10))
    layer = {"expert_elements": ELEMENTS, "d_model": M, "element_size": 4, "num_ranks": 2, "trains": True}
    prices = [copy_price(profile, link=profile.message, learned=of, **layer) for of in (1.0, 0.5, 0.0)]
    assert prices == [80, 60, 40]
