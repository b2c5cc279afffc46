"""The modelled link of bench/ against numbers by hand, with a clock that the tests set."""

from __future__ import annotations

import pytest

from bench.links import INFINITE, ModelledLink, ModelledLinks

# ---- the model of the link, by hand


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_messages_queue_in_the_order_in_which_they_are_issued(clock: Clock) -> None:
    link = ModelledLink(bytes_per_second=10, clock=clock)
    assert link.carry(20, 20) == 102
    assert link.carry(10, 10) == 103
    clock.now = 110  # the link has been idle since 103
    assert link.carry(10, 10) == 111


def test_the_link_is_full_duplex_so_the_longer_direction_counts(clock: Clock) -> None:
    link = ModelledLink(bytes_per_second=10, clock=clock)
    assert link.carry(20, 50) == 105
    assert link.carry(70, 0) == 112


def test_latency_occupies_the_link_once_a_message_but_not_for_rows_that_stay(clock: Clock) -> None:
    link = ModelledLink(bytes_per_second=10, latency_seconds=0.5, clock=clock)
    assert link.carry(10, 10) == 101.5
    assert link.carry(0, 0) == 101.5
    assert link.carry(10, 10) == 103


def test_a_new_rate_holds_for_messages_still_to_come(clock: Clock) -> None:
    link = ModelledLink(bytes_per_second=10, latency_seconds=3, clock=clock)
    assert link.carry(20, 20) == 105
    link.set_rate(100)
    assert link.carry(200, 200) == 107
    link.set_rate(INFINITE)
    assert link.carry(10**12, 10**12) == 107


def test_only_sent_bytes_are_counted_and_the_count_can_start_again() -> None:
    link = ModelledLink()
    link.carry(30, 500)
    link.carry(12, 0)
    assert link.bytes_sent == 42
    link.reset_bytes_sent()
    assert link.bytes_sent == 0


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match=rf"bytes_per_second \({rate}\) must be positive"):
        ModelledLink(rate)


@pytest.mark.parametrize("latency", [-0.5, INFINITE])
def test_a_latency_must_be_finite_and_not_negative(latency: float) -> None:
    with pytest.raises(ValueError, match=rf"latency_seconds \({latency}\)"):
        ModelledLink().set_rate(1, latency)


# ---- the model of two levels, by hand: nodes of ranks (0, 1), (2, 3), ...


@pytest.fixture
def links(clock: Clock) -> ModelledLinks:
    links = ModelledLinks(ranks_per_node=2, clock=clock)
    links.set_rates(inter=10, intra=100)
    return links


def test_a_group_inside_a_node_passes_the_link_there_beside_what_passes_between_nodes(
    links: ModelledLinks,
) -> None:
    assert links.carry([0, 2], 0, [50, 20], [50, 20]) == 102
    assert links.carry([0, 1], 0, [70, 100], [70, 100]) == 101
    assert links.carry([1, 3], 1, [30, 0], [30, 0]) == 105
    assert links.carry([2, 3], 1, [200, 0], [200, 0]) == 103


def test_bytes_for_a_peer_in_the_same_node_do_not_cross_nodes(links: ModelledLinks) -> None:
    everyone = [0, 1, 2, 3]
    assert links.carry(everyone, 2, [20, 20, 999, 300], [10, 0, 999, 50]) == 104
    assert (links.bytes_sent, links.bytes_sent_inside) == (40, 300)
    assert links.carry([0, 1], 1, [100, 0], [0, 0]) == 104  # the link inside has been free since 103
    links.reset_bytes_sent()
    assert (links.bytes_sent, links.bytes_sent_inside) == (0, 0)


def test_a_message_of_both_sorts_takes_the_longer_of_the_two(links: ModelledLinks) -> None:
    assert links.carry([0, 1, 2, 3], 0, [0, 500, 10, 10], [0, 500, 10, 10]) == 105


def test_a_link_that_a_message_does_not_pass_is_not_waited_for(links: ModelledLinks) -> None:
    links.carry([0, 2], 0, [0, 1000], [0, 1000])
    assert links.carry([0, 1], 0, [0, 10], [0, 10]) == 100.1
    assert links.carry([0], 0, [10], [10]) <= 100  # a rank alone sends nothing


def test_with_one_rank_a_node_all_bytes_cross_nodes(clock: Clock) -> None:
    links = ModelledLinks(clock=clock)
    links.set_rates(inter=10, intra=1)
    assert links.carry([0, 1], 0, [7, 20], [7, 20]) == 102
    assert (links.bytes_sent, links.bytes_sent_inside) == (20, 0)


def test_a_message_to_each_peer_has_a_latency(links: ModelledLinks) -> None:
    links.set_rates(inter=100, intra=100, inter_latency_seconds=2)
    assert links.carry([0, 1, 2, 3], 0, [0, 100, 50, 50], [0, 100, 0, 100]) == 100 + 2 * 2 + 1
    assert links.carry([0, 1, 2, 3], 0, [0, 0, 0, 100], [0, 0, 100, 0]) == 105 + 2 + 1


def test_each_level_has_a_rate_and_a_latency_of_its_own(links: ModelledLinks) -> None:
    links.set_rates(inter=100, intra=10, inter_latency_seconds=1, intra_latency_seconds=3)
    assert links.carry([0, 2], 0, [0, 100], [0, 100]) == 102
    assert links.carry([0, 1], 0, [0, 10], [0, 10]) == 104
    links.set_rate(10)  # between nodes only
    assert links.carry([0, 2], 0, [0, 100], [0, 100]) == 112
    assert links.carry([0, 1], 0, [0, 10], [0, 10]) == 108
