"""A described cluster: predicts, from a few numbers, the profile of machines that one does not have.

The model of a link (Hockney): a message to one peer takes alpha + beta * bytes. A rank's messages on one
link follow each other, as in a pairwise exchange (Thakur, Rabenseifner and Gropp, 2005). Its link inside
the machine and its link to other machines work at the same time. A collective ends when its busiest rank
has finished.

Letters: A machines with L ranks each, W = A L; R bytes of rows that a rank has for all ranks, the same
number for each. If the ESP ranks of a machine share each expert, L counts one rank for each of these
groups.
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
    """Equal machines with the same number of ranks.

    machines: A.
    ranks_per_machine: L.
    device_type: "cpu" or "cuda".
    memory_bytes: memory of a rank's device.
    compute: seconds of a product by multiply-adds.
    copy: seconds of a copy between device and host by bytes, in either direction.
    inside: seconds of a message by bytes, to one peer in the same machine.
    outside: seconds of a message by bytes, to one peer in another machine.
    interference: how much the lanes of a rank slow each other.
    measured: what the numbers were measured on, in words; "" if nothing was measured.

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
        """Number of ranks of all machines, W = A L."""
        return self.machines * self.ranks_per_machine

    def check_part(self, profile: Profile) -> None:
        """Raises ValueError if a profile was not measured on a part of such a cluster.

        Its kind of device must be the same, and it must have no more machines and no more ranks per
        machine.
        """
        measured = (profile.device_type, profile.num_nodes, -(-profile.num_ranks // profile.num_nodes))
        described = (self.device_type, self.machines, self.ranks_per_machine)
        if measured[0] != described[0] or measured[1] > described[1] or measured[2] > described[2]:
            profile_text = "a {} profile of {} machines of {} ranks".format(*measured)
            raise ValueError(
                "{} must be of a part of the cluster: {}, {} machines of {} ranks".format(
                    profile_text, *described
                )
            )

    def check_holds(self, num_bytes: int) -> None:
        """Raises ValueError if a rank's experts exceed the memory of its device.

        num_bytes: bytes of a rank's experts.
        """
        if num_bytes > self.memory_bytes:
            min_ranks = math.ceil(num_bytes * self.num_ranks / self.memory_bytes)
            raise ValueError(
                f"memory_bytes ({self.memory_bytes:g}) must hold a rank's experts ({num_bytes} bytes): "
                f"{self.num_ranks} ranks are too few, {min_ranks} would be enough"
            )

    def profile(self, dispatch: ExchangeName, esp: int, dtype: str) -> Profile:
        """Returns the profile that `pmoe profile` might measure on these ranks.

        The ``esp`` ranks that share an expert gather and sum rows by one message to each of the others.

        Args:
            dispatch: the all-to-all of the profile's messages.
            esp: number of ranks of a machine that share each expert.
            dtype: as torch names it, such as "bfloat16".
        """
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
    """Returns the collectives that an all-to-all consists of, one after another.

    Each is a dict: link -> (messages, their bytes / R), of the rank that sends or receives most.

        flat               each rank sends R / W to each of the L - 1 other ranks of its machine,
                           and to each of the W - L ranks of other machines
        hierarchical_2d    1. each rank sends R / L to each other rank of its machine: the rows for that
                              rank's place in all machines
                           2. it sends L R / W to the rank at its own place in each other machine
        hierarchical_1d    1. each rank of a machine sends its leader all rows but those for itself
                           2. the leader sends L L R / W to each other leader
                           3. the leader sends each rank of its machine that rank's rows

    machines: A.
    local: L.
    """
    ranks = machines * local
    mates = local - 1  # other ranks of the machine
    away = machines - 1  # other machines
    if dispatch == "flat":
        return [{"inside": (mates, mates / ranks), "outside": (ranks - local, (ranks - local) / ranks)}]
    if dispatch == "hierarchical_2d":
        return [{"inside": (mates, mates / local)}, {"outside": (away, away / machines)}]
    trip = {"inside": (mates, mates * (ranks - 1) / ranks)}
    return [trip, {"outside": (away, local * away / machines)}, trip]


def message_line(
    dispatch: ExchangeName, machines: int, local: int, links: Mapping[str, LineCost]
) -> LineCost:
    """Returns the seconds of one all-to-all, by the bytes that a rank has for other ranks, R (W - 1) / W.

    The slower of the two links counts, for alpha and for beta separately, because both work at the same
    time. This is exact if the same link is slower in both; otherwise it is at most twice the real time.

    machines: A.
    local: L.
    links: the costs of the links "inside" and "outside".
    """
    alpha = beta = 0.0
    for leg in legs(dispatch, machines, local):
        alpha += max(messages * links[link].alpha_seconds for link, (messages, _) in leg.items())
        beta += max(share * links[link].beta_seconds for link, (_, share) in leg.items())
    ranks = machines * local
    return LineCost(alpha, beta * ranks / max(1, ranks - 1))


def links_of(profile: Profile) -> dict[str, LineCost]:
    """Returns the cost of a message to one peer, on each link that a profile of a part shows.

        ranks of the profile              link       measured by
        all in one machine                inside     its messages
        each in a machine of its own      outside    its messages
        several in several machines       outside    FSMoE's all-to-all, among one rank of each machine
                                          inside     FSMoE's all-gather, inside a machine

    A measured alpha is that of messages to all peers, so it is divided by their number.
    """
    ranks = profile.num_ranks
    nodes = profile.num_nodes
    lines = profile.operations
    lines_and_sizes = {}
    if ranks > 1 and nodes in (1, ranks):
        lines_and_sizes["inside" if nodes == 1 else "outside"] = (profile.message, ranks)
    elif lines is not None and (lines.num_across, lines.num_inside * nodes) == (nodes, ranks):
        lines_and_sizes = {
            "outside": (lines.all_to_all.line, nodes),
            "inside": (lines.all_gather.line, ranks // nodes),
        }
    return {
        name: LineCost(line.alpha_seconds / (size - 1), line.beta_seconds)
        for name, (line, size) in lines_and_sizes.items()
    }


def fields_of(profile: Profile) -> dict[str, Any]:
    """Returns the fields of a `Cluster` that a profile of a part of it shows.

    They have the form that `dataclasses.asdict` gives them.
    """
    costs: dict[str, Any] = {"compute": profile.compute, "copy": profile.slower_copy}
    costs["interference"] = profile.interference
    return {
        "device_type": profile.device_type,
        "measured": f"on a part, {profile.when}",
        **{name: asdict(cost) for name, cost in (costs | links_of(profile)).items()},
    }
