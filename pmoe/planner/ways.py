"""The way to run a layer, by a profile or on machines that one does not have: all-to-all, ESP, n and pair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pmoe.comm import NAMES, ExchangeName
from pmoe.planner.candidates import Advice, advise
from pmoe.planner.cluster import Cluster
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore

OFF = 0.2
"""How far each rate may be off where `sensitivity` asks what that changes."""


def candidate_ways(rates: Profile | Cluster, layer: Mapping[str, Any]) -> list[tuple[ExchangeName, int]]:
    """All-to-alls with ESP degrees, divisors of L and H, over whose ranks a layer's experts can be spread.

    A profile knows the flat one without ESP. Raises ValueError where a cluster has none.
    """
    if isinstance(rates, Profile):
        return [(NAMES[0], 1)]
    local, num_experts, found = rates.ranks_per_machine, layer["num_experts"], []
    divisors = math.gcd(local, layer["d_hidden"])
    for esp in range(1, divisors + 1):
        if divisors % esp == 0 and num_experts % (rates.num_ranks // esp) == 0:
            found += [(name, esp) for name in (NAMES if rates.machines > 1 and local > esp else NAMES[:1])]
    if not found:
        raise ValueError(
            f"num_experts ({num_experts}) must be a multiple of the {rates.num_ranks} ranks, or of them "
            f"over a common divisor of ranks_per_machine ({local}) and d_hidden ({layer['d_hidden']})"
        )
    return found


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
    """What `advise` says of each candidate, the fastest first; of those alone that hold the budget.

    layer: arguments of `sizes_from_options`. among: `candidate_ways` by default. pairs: as `advise` takes
    them. Raises ValueError as these do, and where the experts do not fit the memory of a cluster's ranks.
    """
    found: list[Advice] = []
    refused: list[ValueError] = []
    place: dict[str, Any] = {"num_ranks": rates.num_ranks, "device_type": rates.device_type}
    dtype = str(layer["dtype"]).removeprefix("torch.")
    for dispatch, esp in candidate_ways(rates, layer) if among is None else among:
        sizes = sizes_from_options(**layer, **place, inside=esp)
        if isinstance(rates, Profile):
            profile = rates
        else:
            rates.check_holds(sizes.expert_parameters * sizes.element_size)
            profile = rates.profile(dispatch, esp, dtype)
            sizes = replace(sizes, relays=0 if dispatch == "flat" else rates.ranks_per_machine // esp)
        asked: dict[str, Any] = {"budget": budget, "slack": slack, "pairs": pairs, "dispatch": dispatch}
        try:
            found.append(advise(sizes, profile, num_tokens, **asked))
        except ValueError as error:
            refused.append(error)
    if not found:
        raise refused[0]  # the least of all: others relay rows, or gather them
    return sorted(found, key=lambda way: way.decision.seconds)


def sensitivity(cluster: Cluster, ways: Sequence[Advice], **options: Any) -> Iterator[dict[str, Any]]:
    """How each rate moves the answer, where it is OFF lower and higher. options: of `plan_ways`.

    Fields: the rate, how many times as high it is, the way that is the best then, the change of its seconds
    over those of the first way before, and the seconds of the first way then.

    No step is longer with a rate that is x times as high, nor shorter than 1 / x: ways that take more than
    1 / (1 - OFF) of the fastest's seconds stay behind it, and are not asked again.
    """
    first, chosen = ways[0], ways[0].decision
    near = [way for way in ways if (1 - OFF) * way.decision.seconds <= chosen.seconds]
    options["among"] = [(way.dispatch, way.sizes.inside) for way in near]
    if options.get("budget") is None:  # others are not chosen then
        options["pairs"] = tuple(STRATEGIES.values())
    unused = {"inside": cluster.ranks_per_machine, "outside": cluster.machines}
    for name in ("compute", "copy", "inside", "outside"):
        for times in (1 - OFF, 1 + OFF) if unused.get(name) != 1 else ():
            line = getattr(cluster, name)
            moved = replace(line, beta_seconds=line.beta_seconds / times)
            found = plan_ways(replace(cluster, **{name: moved}), **options)
            (same,) = (way for way in found if (way.dispatch, way.sizes) == (first.dispatch, first.sizes))
            kept = [c for c in same.candidates if (c.forward, c.restore) == (chosen.forward, chosen.restore)]
            change = found[0].decision.seconds / chosen.seconds - 1
            yield {
                "rate": name,
                "times": times,
                **found[0].way,
                "change": change,
                "first_seconds": kept[0].seconds,
            }
