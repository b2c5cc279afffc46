"""Machines that one does not have: from a few numbers, the profile that their ranks would have.

A message to one peer takes alpha + beta * bytes on the link that it passes (Hockney). A rank's messages on a
link follow each other, as in a pairwise exchange (Thakur, Rabenseifner and Gropp, 2005); its links inside and
between machines carry side by side; a collective ends when its busiest rank does.

A machines with L ranks each, W = A L; R bytes of a rank's rows for all ranks, equally many for each. Where
ESP ranks of a machine share each expert, L counts one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pmoe.arguments import check_count, check_positive
from pmoe.comm import ExchangeName
from pmoe.planner.cost_model import Interference
from pmoe.planner.costs import Fit, LineCost
from pmoe.planner.profile import FORMAT, Operations, Profile, Versions


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal machines with equally many ranks.

    memory_bytes: of a rank's device. compute: seconds by multiply-adds. copy: by bytes, between device and
    host, each way. inside, outside: by bytes to one peer, in the same machine and in another.
    measured: on what, in words; "" where nothing was.

    Raises ValueError, naming the field, for counts below 1 and a memory that is not positive.
    """

    machines: int
    ranks_per_machine: int
    device_type: Literal["cpu", "cuda"]
    memory_bytes: float
    compute: LineCost
    copy: LineCost
    inside: LineCost
    outside: LineCost
    interference: Interference = Interference()
    measured: str = ""

    def __post_init__(self) -> None:
        check_count(machines=self.machines, ranks_per_machine=self.ranks_per_machine, ranks=self.num_ranks)
        check_positive(memory_bytes=self.memory_bytes)

    @property
    def num_ranks(self) -> int:
        return self.machines * self.ranks_per_machine

    def check_part(self, profile: Profile) -> None:
        """Raises ValueError for a profile of another kind of device, or of more than these machines."""
        held = (profile.device_type, profile.num_nodes, -(-profile.num_ranks // profile.num_nodes))
        here = (self.device_type, self.machines, self.ranks_per_machine)
        if held[0] != here[0] or held[1] > here[1] or held[2] > here[2]:
            what = "a {} profile of {} machines of {} ranks".format(*held)
            raise ValueError("{} must be of a part of {}, {} machines of {}".format(what, *here))

    def check_holds(self, num_bytes: int) -> None:
        """Raises ValueError where a rank's experts, of so many bytes, are more than its memory."""
        if num_bytes > self.memory_bytes:
            least = math.ceil(num_bytes * self.num_ranks / self.memory_bytes)
            raise ValueError(
                f"memory_bytes ({self.memory_bytes:g}) must hold a rank's experts ({num_bytes} bytes): "
                f"{self.num_ranks} ranks are too few, {least} could"
            )

    def profile(self, dispatch: ExchangeName, esp: int, dtype: str) -> Profile:
        """As `pmoe profile` might measure these ranks. The ``esp`` ranks of an expert gather and sum rows by
        a message to each of the others."""
        message = message_line(dispatch, self.machines, self.ranks_per_machine // esp, vars(self))
        shared = LineCost((esp - 1) * self.inside.alpha_seconds, self.inside.beta_seconds)
        lines = {"gemm": self.compute, "all_to_all": message, "all_reduce": LineCost(0.0, 0.0)}
        lines |= {"all_gather": shared, "reduce_scatter": shared}
        fits: dict[str, Any] = {
            name: Fit(line=line, r_squared=1.0, num_sizes=0) for name, line in lines.items()
        }
        return Profile(
            device=f"{self.device_type}, {self.machines} machines of {self.ranks_per_machine} ranks",
            device_type=self.device_type,
            num_ranks=self.num_ranks,
            backend="modelled links",
            dtype=dtype,
            versions=Versions(torch="", cuda=None, file=FORMAT),
            num_nodes=self.machines,
            compute=self.compute,
            message=message,
            copy_out=self.copy,
            copy_in=self.copy,
            interference=self.interference,
            seconds=0.0,
            when=self.measured or "nowhere",
            operations=Operations(num_across=self.num_ranks // esp, num_inside=esp, seconds=0.0, **fits),
        )


def legs(dispatch: ExchangeName, machines: int, local: int) -> list[dict[str, tuple[int, float]]]:
    """The collectives of an all-to-all, one after the other: what the busiest rank sends, or receives.

    Messages, and their bytes over R, by link. machines: A. local: L.

    flat: each rank sends R / W to each of L - 1 mates and of W - L ranks elsewhere.
    hierarchical_2d: R / L to each mate, the rows for its place of every machine; then L R / W to the rank at
        its own place of each other machine.
    hierarchical_1d: each mate sends the leader all but its own rows; the leader sends L L R / W to each other
        leader, and each mate its rows.
    """
    ranks, mates, away = machines * local, local - 1, machines - 1
    if dispatch == "flat":
        return [{"inside": (mates, mates / ranks), "outside": (ranks - local, (ranks - local) / ranks)}]
    if dispatch == "hierarchical_2d":
        return [{"inside": (mates, mates / local)}, {"outside": (away, away / machines)}]
    trip = {"inside": (mates, mates * (ranks - 1) / ranks)}
    return [trip, {"outside": (away, local * away / machines)}, trip]


def message_line(
    dispatch: ExchangeName, machines: int, local: int, links: Mapping[str, LineCost]
) -> LineCost:
    """Of one all-to-all by ``dispatch``: seconds by the bytes that a rank has for others, R (W - 1) / W.

    machines: A. local: L. links: "inside" and "outside". Of two links side by side the slower counts, for
    alpha and beta apart: exact where one is the slower in both, else at most twice the seconds.
    """
    alpha = beta = 0.0
    for leg in legs(dispatch, machines, local):
        alpha += max(messages * links[link].alpha_seconds for link, (messages, _) in leg.items())
        beta += max(share * links[link].beta_seconds for link, (_, share) in leg.items())
    ranks = machines * local
    return LineCost(alpha, beta * ranks / max(1, ranks - 1))


def links_of(profile: Profile) -> dict[str, LineCost]:
    """By link what a message to one peer costs, as far as the profile of a part tells.

    Messages among ranks of one machine tell the link inside, those among ranks of as many machines the one
    outside; where there are several of both, FSMoE's lines tell them: the all-to-all among one rank of each
    machine, the all-gather inside. A measured alpha is that of messages to all peers.
    """
    ranks, nodes, lines = profile.num_ranks, profile.num_nodes, profile.operations
    found = {}
    if ranks > 1 and nodes in (1, ranks):
        found["inside" if nodes == 1 else "outside"] = (profile.message, ranks)
    elif lines is not None and (lines.num_across, lines.num_inside * nodes) == (nodes, ranks):
        found = {"outside": (lines.all_to_all.line, nodes), "inside": (lines.all_gather.line, ranks // nodes)}
    return {
        name: LineCost(line.alpha_seconds / (size - 1), line.beta_seconds)
        for name, (line, size) in found.items()
    }


def fields_of(profile: Profile) -> dict[str, Any]:
    """The fields of a `Cluster` that a profile of a part of it tells, as `dataclasses.asdict` has them."""
    costs: dict[str, Any] = {"compute": profile.compute, "copy": profile.slower_copy}
    costs["interference"] = profile.interference
    return {
        "device_type": profile.device_type,
        "measured": f"on a part, {profile.when}",
        **{name: asdict(cost) for name, cost in (costs | links_of(profile)).items()},
    }
