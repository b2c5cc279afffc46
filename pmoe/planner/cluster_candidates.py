"""The options of a layer on given machines: all-to-all, ESP degree, n and restore pair, with their times.

The ESP degree (expert-sharding parallelism) is the number of ranks of a machine that share each expert; n is
the number of chunks. The restore pair says how backward gets the experts' inputs and hidden activations. The
machines are those of a measured profile, or of a described cluster, which need not exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pmoe.comm import NAMES, ExchangeName
from pmoe.planner.cluster import Cluster
from pmoe.planner.layer_sizes import CopyNumbers, sizes_from_options
from pmoe.planner.priced_choices import Advice, advise, planned_pairs
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import AllowName, Restore

OFF = 0.2
"""Fraction by which `sensitivity` lowers and raises each of a cluster's rates."""


def candidate_combinations(
    rates: Profile | Cluster, layer: Mapping[str, Any]
) -> list[tuple[ExchangeName, int]]:
    """Returns the combinations of an all-to-all and an ESP degree that the layer can use on these machines.

    The ESP degree (expert-sharding parallelism) is the number of ranks of a machine that share each expert.
    The degree must divide d_hidden and the number of ranks of a machine, and num_experts must be a multiple
    of (number of ranks / ESP degree). Hierarchical all-to-alls need several machines, and on each machine
    more ranks than the ESP degree.

    rates: a measured profile, or a described cluster. A profile has only the cost of the flat all-to-all
        without ESP. So for a profile the result is [("flat", 1)].
    layer: sizes of the layer, such as d_model and num_experts: keyword arguments of `sizes_from_options`.

    Raises ValueError if no ESP degree suits these experts on a cluster.
    """
    if isinstance(rates, Profile):
        return [(NAMES[0], 1)]
    local = rates.ranks_per_machine
    num_experts = layer["num_experts"]
    combinations = []
    divisors = math.gcd(local, layer["d_hidden"])
    for esp in range(1, divisors + 1):
        if divisors % esp == 0 and num_experts % (rates.num_ranks // esp) == 0:
            combinations += [
                (name, esp) for name in (NAMES if rates.machines > 1 and local > esp else NAMES[:1])
            ]
    if not combinations:
        raise ValueError(
            f"num_experts ({num_experts}) must be a multiple of ranks / ESP, for {rates.num_ranks} ranks and "
            f"some ESP degree that divides ranks_per_machine ({local}) and d_hidden ({layer['d_hidden']})"
        )
    return combinations


def plan_combinations(
    rates: Profile | Cluster,
    layer: Mapping[str, Any],
    num_tokens: int,
    *,
    among: Sequence[tuple[ExchangeName, int]] | None = None,
    budget: int | None = None,
    slack: float = 1.25,
    pairs: Sequence[Restore] | None = None,
    copies: int = 0,
    allow: AllowName | None = None,
) -> list[Advice]:
    """Returns the best n and restore pair for each all-to-all and ESP degree, the fastest first.

    n is the number of chunks. The ESP degree is the number of ranks of a machine that share each expert.
    Combinations of an all-to-all and an ESP degree are left out if no choice for them stays within the
    budget.

    Args:
        rates: a measured profile, or a described cluster.
        layer: sizes of the layer, such as d_model and num_experts: keyword arguments of `sizes_from_options`.
        num_tokens: tokens of each rank.
        among: combinations (all-to-all, ESP degree) to compare; by default all that
            `candidate_combinations` returns.
        budget: bytes that must be enough for any routing, or None.
        slack: rows that a ring slot (a reused buffer) holds, as a multiple of a chunk's rows under even
            routing.
        pairs: restore pairs to choose from; None for all that ``allow`` permits. A pair says what is kept,
            offloaded or made again between the passes.
        copies: the most copies of busy experts that a rank hosts (``balance``). Above 0, only the flat
            all-to-all with ESP degree 1 is considered, and the copies count in the bytes.
        allow: "e4m3" also permits pairs that keep fewer bytes: T_DI in the number format in which it arrived,
            or T_M rounded to e4m3.

    Raises ValueError if there is no combination, if no choice of any combination stays within the budget, or
    if a rank's experts exceed the memory of the cluster's ranks.
    """
    advice: list[Advice] = []
    refused: list[ValueError] = []
    place: dict[str, Any] = {"num_ranks": rates.num_ranks, "device_type": rates.device_type}
    dtype = str(layer["dtype"]).removeprefix("torch.")
    combinations = candidate_combinations(rates, layer) if among is None else among
    if copies:
        combinations = [("flat", 1)]
    for dispatch, esp in combinations:
        sizes = sizes_from_options(**layer, **place, esp_size=esp)
        num_local = sizes.num_experts // sizes.ep_size
        # With a budget, a layer keeps no copies for later calls.
        numbers = CopyNumbers.at_most(copies, num_local, sizes.num_ranks, stay=budget is None)
        sizes = replace(sizes, copies=numbers)
        if isinstance(rates, Profile):
            profile = rates
        else:
            rates.check_holds(sizes.expert_parameters * sizes.element_size)
            profile = rates.profile(dispatch, esp, dtype)
            sizes = replace(sizes, relays=0 if dispatch == "flat" else rates.ranks_per_machine // esp)
        options: dict[str, Any] = {"budget": budget, "slack": slack, "pairs": pairs, "dispatch": dispatch}
        options["allow"] = allow
        try:
            advice.append(advise(sizes, profile, num_tokens, **options))
        except ValueError as error:
            refused.append(error)
    if not advice:
        # The first combination needs the least memory, because all other combinations relay or gather rows.
        raise refused[0]
    return sorted(advice, key=lambda combination: combination.decision.seconds)


def sensitivity(cluster: Cluster, plans: Sequence[Advice], **options: Any) -> Iterator[dict[str, Any]]:
    """Yields how the best choice changes if one rate of the cluster is 20 % (`OFF`) lower or higher.

    Each result is a dict for one changed rate:

        rate            "compute", "copy", "inside" (the link inside a machine) or "outside"
        times           the factor by which the rate is changed
        dispatch        all-to-all of the choice that is best with the changed rate
        esp             ESP degree of this best choice: number of ranks that share each expert
        n, restore      number of chunks, and restore pair, of this best choice
        seconds         seconds of a step with this best choice and the changed rate
        change          change of the best choice's seconds, as a fraction: 0.1 if it takes 10 % longer
        first_seconds   seconds, with the changed rate, of the choice that is best with the true rates

    A combination of all-to-all and ESP degree is not examined if it takes more than 1 / (1 - OFF) times the
    seconds of the fastest combination. A change of one rate by the fraction OFF changes the seconds of a step
    at most by this factor, so the combination would stay slower than the fastest.

    cluster: the described machines.
    plans: the best choice for each all-to-all and ESP degree on the cluster, from `plan_combinations`.
    options: the arguments with which `plan_combinations` made the plans, such as layer, num_tokens and
        budget.
    """
    first = plans[0]
    chosen = plans[0].decision
    near = [plan for plan in plans if (1 - OFF) * plan.decision.seconds <= chosen.seconds]
    options["among"] = [(plan.dispatch, plan.sizes.esp_size) for plan in near]
    if options.get("budget") is None:  # without a budget fewer pairs are chosen from
        options["pairs"] = planned_pairs(first.sizes, options.get("allow"), has_budget=False)
    # A link is not used if a machine has only 1 rank, or the cluster only 1 machine.
    unused = {"inside": cluster.ranks_per_machine, "outside": cluster.machines}
    for name in ("compute", "copy", "inside", "outside"):
        for times in (1 - OFF, 1 + OFF) if unused.get(name) != 1 else ():
            line = getattr(cluster, name)
            moved_line = replace(line, beta_seconds=line.beta_seconds / times)
            moved_plans = plan_combinations(replace(cluster, **{name: moved_line}), **options)
            (first_again,) = (
                plan for plan in moved_plans if (plan.dispatch, plan.sizes) == (first.dispatch, first.sizes)
            )
            same_choice = [
                c
                for c in first_again.candidates
                if (c.forward, c.restore) == (chosen.forward, chosen.restore)
            ]
            change = moved_plans[0].decision.seconds / chosen.seconds - 1
            yield {
                "rate": name,
                "times": times,
                **moved_plans[0].choice_fields,
                "change": change,
                "first_seconds": same_choice[0].seconds,
            }
