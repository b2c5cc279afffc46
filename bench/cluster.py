"""The way to run a layer on machines that one does not have: all-to-all, ESP degree, n and pair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pmoe.comm import NAMES
from pmoe.planner.candidates import Advice, advise, bound, step_bars
from pmoe.planner.cluster import Cluster
from pmoe.planner.layer_sizes import LayerSizes, sizes_from_options
from pmoe.planner.profile import Profile
from pmoe.planner.timeline import overlap
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES, Restore

OFF = 0.2
"""How far each rate may be off where `sensitivity` asks what that changes."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """An all-to-all and an ESP degree, with what `advise` says of a layer that uses them for ``tokens``."""

    dispatch: str = "flat"
    esp: int = 1
    sizes: LayerSizes
    profile: Profile
    advice: Advice
    tokens: int
    slack: float

    @property
    def name(self) -> dict[str, Any]:
        """What was chosen, by the names of its options."""
        took = self.advice.decision
        return {"dispatch": self.dispatch, "esp": self.esp, "n": took.forward, "restore": str(took.restore)}

    @property
    def seconds(self) -> float:
        return self.advice.decision.seconds

    @property
    def exposed_seconds(self) -> float:
        """Of a step: something travels, and nothing is computed."""
        return overlap(step_bars(self.sizes, self.profile, self.tokens, self.advice.decision)).exposed

    @property
    def even_bytes(self) -> int:
        """As `promised`, where a rank receives as many rows as it sends."""
        took, is_alone = self.advice.decision, self.sizes.num_ranks == 1
        even = replace(self.sizes, num_ranks=self.esp, bypass_local=is_alone)
        degrees = (took.forward, took.backward)
        return bound(even, even.call(self.tokens), *degrees, took.restore, self.slack).promised


def candidate_ways(cluster: Cluster, layer: Mapping[str, Any]) -> list[tuple[str, int]]:
    """All-to-alls with ESP degrees, divisors of L and H, over whose ranks a layer's experts can be spread.

    Raises ValueError where there are none.
    """
    local, num_experts, found = cluster.ranks_per_machine, layer["num_experts"], []
    divisors = math.gcd(local, layer["d_hidden"])
    for esp in range(1, divisors + 1):
        if divisors % esp == 0 and num_experts % (cluster.num_ranks // esp) == 0:
            found += [(name, esp) for name in (NAMES if cluster.machines > 1 and local > esp else NAMES[:1])]
    if not found:
        raise ValueError(
            f"num_experts ({num_experts}) must be a multiple of the {cluster.num_ranks} ranks, or of them "
            f"over a common divisor of ranks_per_machine ({local}) and d_hidden ({layer['d_hidden']})"
        )
    return found


def plan_ways(
    cluster: Cluster,
    layer: Mapping[str, Any],
    num_tokens: int,
    *,
    among: Sequence[tuple[str, int]] | None = None,
    budget: int | None = None,
    slack: float = 1.25,
    pairs: Sequence[Restore] = ALL_PAIRS,
) -> list[Way]:
    """What `advise` says of each candidate, the fastest first; of those alone that hold the budget.

    layer: arguments of `sizes_from_options`. among: `candidate_ways` by default. pairs: as `advise` takes
    them. Raises ValueError as these do, and where the experts do not fit the ranks' memory.
    """
    found: list[Way] = []
    refused: list[ValueError] = []
    place: dict[str, Any] = {"num_ranks": cluster.num_ranks, "device_type": cluster.device_type}
    for dispatch, esp in candidate_ways(cluster, layer) if among is None else among:
        relays = 0 if dispatch == "flat" else cluster.ranks_per_machine // esp
        sizes = replace(sizes_from_options(**layer, **place, inside=esp), relays=relays)
        profile = cluster.profile(dispatch, esp, str(layer["dtype"]).removeprefix("torch."))
        held = sizes.expert_parameters * sizes.element_size
        if held > cluster.memory_bytes:
            least = math.ceil(held * cluster.num_ranks / cluster.memory_bytes)
            raise ValueError(
                f"memory_bytes ({cluster.memory_bytes:g}) must hold a rank's experts ({held} bytes): "
                f"{cluster.num_ranks} ranks are too few, {least} could"
            )
        try:
            advice = advise(sizes, profile, num_tokens, budget=budget, slack=slack, pairs=pairs)
        except ValueError as error:
            refused.append(error)
        else:
            told: dict[str, Any] = {"advice": advice, "tokens": num_tokens, "slack": slack}
            found.append(Way(dispatch=dispatch, esp=esp, sizes=sizes, profile=profile, **told))
    if not found:
        raise refused[0]  # the least of all: others relay rows, or gather them
    return sorted(found, key=lambda way: way.seconds)


def sensitivity(cluster: Cluster, ways: Sequence[Way], **options: Any) -> Iterator[dict[str, Any]]:
    """How each rate moves the answer, where it is OFF lower and higher. options: of `plan_ways`.

    Fields: the rate, how many times as high it is, the way that is the best then, the change of its seconds
    over those of the first way before, and the seconds of the first way then.

    No step is longer with a rate that is x times as high, nor shorter than 1 / x: ways that take more than
    1 / (1 - OFF) of the fastest's seconds stay behind it, and are not asked again.
    """
    first, chosen = ways[0], ways[0].advice.decision
    near = [(way.dispatch, way.esp) for way in ways if (1 - OFF) * way.seconds <= first.seconds]
    options["among"] = near
    if options.get("budget") is None:  # others are not chosen then
        options["pairs"] = tuple(STRATEGIES.values())
    unused = {"inside": cluster.ranks_per_machine, "outside": cluster.machines}
    for name in ("compute", "copy", "inside", "outside"):
        for times in (1 - OFF, 1 + OFF) if unused.get(name) != 1 else ():
            line = getattr(cluster, name)
            moved = replace(line, beta_seconds=line.beta_seconds / times)
            found = plan_ways(replace(cluster, **{name: moved}), **options)
            same = next(way for way in found if (way.dispatch, way.esp) == near[0]).advice.candidates
            kept = [c for c in same if (c.forward, c.restore) == (chosen.forward, chosen.restore)]
            numbers = {"change": found[0].seconds / first.seconds - 1, "first_seconds": kept[0].seconds}
            yield {"rate": name, "times": times, **found[0].name, "seconds": found[0].seconds, **numbers}
