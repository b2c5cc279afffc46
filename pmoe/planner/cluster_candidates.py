"""Ways to run a layer on given machines: the all-to-all, the ESP degree, n and the restore pair.

The machines are those of a measured profile, or a described cluster that one does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pmoe.comm import NAMES, ExchangeName
from pmoe.planner.cluster import Cluster
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.priced_choices import Advice, advise
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore

OFF = 0.2
"""Relative error of each rate in `sensitivity`."""


def candidate_ways(rates: Profile | Cluster, layer: Mapping[str, Any]) -> list[tuple[ExchangeName, int]]:
    """Returns the pairs of an all-to-all and an ESP degree that the layer can use on these machines.

    An ESP degree is the number of ranks of a machine that share each expert. It divides the ranks of a
    machine and H, and num_experts is a multiple of ranks / ESP. A profile measured only the flat all-to-all
    without ESP.

    Raises ValueError if a cluster has no such degree for these experts.
    """
    if isinstance(rates, Profile):
        return [(NAMES[0], 1)]
    local = rates.ranks_per_machine
    num_experts = layer["num_experts"]
    ways = []
    divisors = math.gcd(local, layer["d_hidden"])
    for esp in range(1, divisors + 1):
        if divisors % esp == 0 and num_experts % (rates.num_ranks // esp) == 0:
            ways += [(name, esp) for name in (NAMES if rates.machines > 1 and local > esp else NAMES[:1])]
    if not ways:
        raise ValueError(
            f"num_experts ({num_experts}) must be a multiple of ranks / ESP, for {rates.num_ranks} ranks and "
            f"some ESP degree that divides ranks_per_machine ({local}) and d_hidden ({layer['d_hidden']})"
        )
    return ways


def plan_ways(
    rates: Profile | Cluster,
    layer: Mapping[str, Any],
    num_tokens: int,
    *,
    among: Sequence[tuple[ExchangeName, int]] | None = None,
    budget: int | None = None,
    slack: float = 1.25,
    pairs: Sequence[Restore] = ALL_PAIRS,
) -> list[Advice]:
    """Returns the advice for each all-to-all and ESP degree, the fastest first. Only those within the budget.

    Args:
        rates: a measured profile, or a described cluster.
        layer: arguments of `sizes_from_options`.
        num_tokens: tokens of each rank.
        among: (all-to-all, ESP degree) pairs to look at; `candidate_ways` by default.
        budget, slack, pairs: as in `advise`.

    Raises ValueError as `candidate_ways` and `advise` do, and if a rank's experts exceed the memory of the
    cluster's ranks.
    """
    advice: list[Advice] = []
    refused: list[ValueError] = []
    place: dict[str, Any] = {"num_ranks": rates.num_ranks, "device_type": rates.device_type}
    dtype = str(layer["dtype"]).removeprefix("torch.")
    for dispatch, esp in candidate_ways(rates, layer) if among is None else among:
        sizes = sizes_from_options(**layer, **place, esp_size=esp)
        if isinstance(rates, Profile):
            profile = rates
        else:
            rates.check_holds(sizes.expert_parameters * sizes.element_size)
            profile = rates.profile(dispatch, esp, dtype)
            sizes = replace(sizes, relays=0 if dispatch == "flat" else rates.ranks_per_machine // esp)
        options: dict[str, Any] = {"budget": budget, "slack": slack, "pairs": pairs, "dispatch": dispatch}
        try:
            advice.append(advise(sizes, profile, num_tokens, **options))
        except ValueError as error:
            refused.append(error)
    if not advice:
        raise refused[0]  # the first way needs least memory: the others relay rows, or gather them
    return sorted(advice, key=lambda way: way.decision.seconds)


def sensitivity(cluster: Cluster, ways: Sequence[Advice], **options: Any) -> Iterator[dict[str, Any]]:
    """Yields how the answer changes if one rate of the cluster is lower or higher by `OFF`.

    Fields of each answer:

        rate            "compute", "copy", "inside" or "outside"
        times           factor on that rate
        dispatch, esp, n, restore, seconds   the best way then
        change          relative change of the best way's seconds
        first_seconds   seconds then of the way that is best now

    With a rate that is x times as high no step takes longer, and none takes less than 1 / x of its seconds.
    So a way that takes more than 1 / (1 - OFF) times the fastest way's seconds stays slower, and is left
    out.

    ways: what `plan_ways` returned for the cluster.
    options: the other arguments of `plan_ways`.
    """
    first = ways[0]
    chosen = ways[0].decision
    near = [way for way in ways if (1 - OFF) * way.decision.seconds <= chosen.seconds]
    options["among"] = [(way.dispatch, way.sizes.esp_size) for way in near]
    if options.get("budget") is None:  # without a budget only S1 to S4 are chosen
        options["pairs"] = tuple(STRATEGIES.values())
    unused = {"inside": cluster.ranks_per_machine, "outside": cluster.machines}  # a link among 1 is not used
    for name in ("compute", "copy", "inside", "outside"):
        for times in (1 - OFF, 1 + OFF) if unused.get(name) != 1 else ():
            line = getattr(cluster, name)
            moved_line = replace(line, beta_seconds=line.beta_seconds / times)
            moved_ways = plan_ways(replace(cluster, **{name: moved_line}), **options)
            (first_again,) = (
                way for way in moved_ways if (way.dispatch, way.sizes) == (first.dispatch, first.sizes)
            )
            same_choice = [
                c
                for c in first_again.candidates
                if (c.forward, c.restore) == (chosen.forward, chosen.restore)
            ]
            change = moved_ways[0].decision.seconds / chosen.seconds - 1
            yield {
                "rate": name,
                "times": times,
                **moved_ways[0].way,
                "change": change,
                "first_seconds": same_choice[0].seconds,
            }
