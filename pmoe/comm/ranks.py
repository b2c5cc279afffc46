"""The ranks that share the experts: a process group, or one rank without any."""

from __future__ import annotations

import torch.distributed as dist


class Ranks:
    """One rank's place in its expert-parallel group. group=None and size 1 mean no communication.

    Copies share the group; pickling leaves it out, and `reconnect` finds the default group again.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.size = 1
        self.rank = 0
        if group is not None:
            rank = dist.get_rank(group)
            if rank < 0:
                raise ValueError(
                    f"group ({_describe(group)}) must contain this rank (global rank {dist.get_rank()})"
                )
            self.rank, self.size = rank, dist.get_world_size(group)

    @staticmethod
    def single() -> Ranks:
        """One rank, whatever torch.distributed knows of others."""
        ranks = Ranks.__new__(Ranks)
        ranks.group, ranks.size, ranks.rank = None, 1, 0
        return ranks

    @property
    def members(self) -> list[int]:
        """Global ranks; none without a group."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def name(self) -> str:
        """Tells groups of this process apart; the same on all their ranks."""
        return "" if self.group is None else f"{self.group.group_name} {self.members}"

    def reconnect(self) -> None:
        """Takes the default group after unpickling; ValueError where it is not of the size it was."""
        if self.group is not None or self.size == 1:
            return  # one rank alone needs no group
        found = Ranks()
        if (found.rank, found.size) != (self.rank, self.size):
            raise ValueError(
                f"group (rank {found.rank} of {found.size} by default) must be rank {self.rank} of "
                f"{self.size}, as when the layer was pickled; initialise torch.distributed so, or build anew"
            )
        self.group = found.group

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        return self

    def __getstate__(self) -> dict[str, object]:
        return {"group": None, "size": self.size, "rank": self.rank}

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"


def _describe(group: object) -> str:
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return "GroupMember.NON_GROUP_MEMBER"
    return f"ranks {dist.get_process_group_ranks(group)}"  # type: ignore[arg-type]
