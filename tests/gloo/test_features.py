"""Features that a layer can have at the same time, on several ranks.

Exchanges that send rows and sharded experts are each combined with every other feature of the table.
"""

from __future__ import annotations

import pytest

from pmoe.runners.features import Feature
from tests import featured
from tests.pool import ranks
from tests.takers import COMPUTED, TAKERS, wrong_of


def wrong_job(rank: int, world: int, component: str, among: Feature, some: slice) -> dict[str, list[str]]:
    # These round. Tests of their own: test_wire, test_wire_combine, test_narrow_pairs, test_rounded_products.
    rounded = (Feature.WIRE, Feature.WIRE_COMBINE, Feature.MESSAGES, Feature.HIDDEN_E4M3, Feature.PRODUCTS)
    apart = (Feature.RANKS, Feature.SHARDED, *rounded)
    cases = [(among, other) for other in Feature if other not in apart]
    return wrong_of(COMPUTED[component], [(among,), *filter(featured.fit, cases)][some])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("among", [Feature.RANKS, Feature.SHARDED], ids=lambda feature: feature.name)
@pytest.mark.parametrize("component", TAKERS)
def test_each_feature_among_ranks_gives_the_definitions_result_or_is_refused_by_name(
    component: str, among: Feature
) -> None:
    for wrong in ranks(2).run(wrong_job, component, among, slice(None)):
        assert not wrong
