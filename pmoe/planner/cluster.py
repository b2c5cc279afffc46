"""Predicts the profile (rates) of machines that are not at hand, from a few numbers.

The model of a link is Hockney's: a message to one peer takes alpha + beta * bytes seconds. A rank sends its
messages on one link one after another, as in a pairwise exchange (Thakur, Rabenseifner and Gropp, 2005). Each
rank has two links, one to ranks of its machine ("inside") and one to other machines ("outside"). Both links
work at the same time. A collective ends when its busiest rank has finished.

Letters: A machines with L ranks each, W = A L ranks; R bytes of the rows that a rank sends, split evenly over
all W ranks (the sending rank included). If several ranks of a machine share each expert (expert-sharding
parallelism, ESP), the ranks that share an expert count as one rank in L.
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
    """Equal machines with the same number of ranks each, described by the rates of their devices and links.

    machines: number of machines (A).
    ranks_per_machine: number of ranks of each machine (L).
    device_type: "cpu" or "cuda".
    memory_bytes: bytes of memory of a rank's device.
    compute: seconds of a matrix product, by its number of multiply-adds.
    copy: seconds of a copy between device and host, by its bytes; the same in both directions.
    inside: seconds of a message to one peer in the same machine, by its bytes.
    outside: seconds of a message to one peer in another machine, by its bytes.
    interference: speeds of computation, communication and copies while they run at the same time.
    measured: a text that says on which machine the numbers were measured; "" if nothing was measured.

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
        """Number of ranks of all machines together."""
        return self.machines * self.ranks_per_machine

    @property
    def links(self) -> dict[str, LineCost]:
        """The cost of one message to one peer, for each link that messages take.

        The link "inside" connects the ranks of a machine, and "outside" connects machines.
        """
        links = {}
        if self.ranks_per_machine > 1:
            links["inside"] = self.inside
        if self.machines > 1:
            links["outside"] = self.outside
        return links

    def check_part(self, profile: Profile) -> None:
        """Raises ValueError if a profile cannot come from machines of this cluster.

        A profile may be measured on a part of the cluster. So it must have the cluster's device type, and at
        most as many machines and ranks per machine as the cluster.
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
        """Raises ValueError if one rank's experts do not fit into the memory of its device.

        num_bytes: bytes of the parameters of one rank's experts.
        """
        if num_bytes > self.memory_bytes:
            min_ranks = math.ceil(num_bytes * self.num_ranks / self.memory_bytes)
            raise ValueError(
                f"memory_bytes ({self.memory_bytes:g}) must hold a rank's experts ({num_bytes} bytes): "
                f"{self.num_ranks} ranks are too few, {min_ranks} would be enough"
            )

    def profile(self, dispatch: ExchangeName, esp: int, dtype: str) -> Profile:
        """Returns the profile that `pmoe profile` would probably measure on these machines.

        An all-gather or a reduce-scatter among the ``esp`` ranks that share an expert is modelled as one
        message from each of these ranks to each other.

        Args:
            dispatch: the all-to-all that the profile's messages are for.
            esp: number of ranks of a machine that share each expert.
            dtype: torch's name of the rows' dtype, such as "bfloat16".
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
    """Returns the collectives that an all-to-all consists of, in the order in which they run.

    Each collective is a dict. Its keys are the links that the collective uses: "inside" a machine, "outside"
    between machines. A value is two numbers of the busiest rank: how many messages the rank sends or receives
    on the link, and how many bytes these messages have together, as a fraction of R.

    Letters: A machines of L ranks each, W = A L ranks; R bytes of all rows that a rank sends, split evenly
    over the W ranks, so that R / W bytes go to each rank.

        flat               each rank sends R / W to each of the L - 1 other ranks of its machine,
                           and to each of the W - L ranks of other machines
        hierarchical_2d    local rank i is the rank with index i in its machine, 0 to L - 1
                           1. each rank sends R / L to each other rank of its machine. Local rank i
                              receives the rows for the local ranks i of all machines
                           2. local rank i sends L R / W to local rank i of each other machine
        hierarchical_1d    one rank of each machine is its leader
                           1. each rank sends its leader all its rows except the rows for the rank itself
                           2. the leader sends L L R / W to each other leader
                           3. the leader sends each rank of its machine the rows for that rank

    dispatch: name of the all-to-all.
    machines: A.
    local: L.

    Example: flat, 2 machines of 2 ranks -> one dict, {"inside": (1, 1/4), "outside": (2, 2/4)}.
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
    """Returns the seconds of one all-to-all as a line over the bytes that a rank sends to other ranks.

    An all-to-all consists of one or more collectives, which run one after another (`legs`). In a collective,
    the links inside and between machines work at the same time, and the slower link decides. So the
    collective's line gets the larger alpha (fixed seconds) and the larger beta (seconds per byte) of its
    links. The line is exact if the same link has both. Otherwise it gives at most twice the real time.

    dispatch: name of the all-to-all.
    machines: number of machines.
    local: number of ranks of each machine.
    links: seconds of one message by bytes, of the links "inside" a machine and "outside" between machines.
    """
    alpha = beta = 0.0
    for leg in legs(dispatch, machines, local):
        alpha += max(messages * links[link].alpha_seconds for link, (messages, _) in leg.items())
        beta += max(share * links[link].beta_seconds for link, (_, share) in leg.items())
    ranks = machines * local
    return LineCost(alpha, beta * ranks / max(1, ranks - 1))


def links_of(profile: Profile) -> dict[str, LineCost]:
    """Returns the cost of one message to one peer, for each link whose cost a measured profile shows.

    The link "inside" connects the ranks of a machine, and "outside" connects machines.

        ranks of the profile                    link       measured by
        one machine                             inside     the profile's all-to-alls
        several machines, one rank each         outside    the profile's all-to-alls
        several machines, several ranks each    outside    an all-to-all among one rank of each machine
                                                inside     an all-gather among the ranks of a machine

    With several machines of several ranks each, both costs come from ``profile.operations``, which is
    measured for FSMoE's solver. If the profile has no operations, or operations of groups that are not the
    ranks of one machine, the result is empty.

    The measured alpha (fixed seconds) of a collective is for messages to all peers, so it is divided by the
    number of peers.
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
    """Returns the fields of a `Cluster` that are known from a profile of some of its machines.

    Fields that a profile cannot show, such as the number of machines, are missing. The costs of links and
    products (`LineCost`) are converted to dicts by `dataclasses.asdict`.
    """
    costs: dict[str, Any] = {"compute": profile.compute, "copy": profile.slower_copy}
    costs["interference"] = profile.interference
    return {
        "device_type": profile.device_type,
        "measured": f"on a part, {profile.when}",
        **{name: asdict(cost) for name, cost in (costs | links_of(profile)).items()},
    }
