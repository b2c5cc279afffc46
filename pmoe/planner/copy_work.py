"""The work that copies of busy experts add to a call, for the simulation of a step's seconds.

If a group of an expert's hosts has C ranks (`pmoe.planner.copy_groups`), the weights are sent to them in C
parts (`pmoe.engine.plan.copies`):

    V      weights: the owner sends all C parts, one part to each host (rank with a copy)
    VR     weights: the hosts send each other their parts, so each host sends C - 1 parts and receives C - 1
    VGR    gradients, the reverse of VR: each host sends C - 1 parts and receives C - 1
    VG     gradients, the reverse of V: each host sends one part, the owner receives all C parts

A collective takes as long as its busiest rank needs. So for each of the four, the work is counted for the
rank that sends or receives most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pmoe.planner.copies import CopyPlan
from pmoe.planner.copy_groups import host_groups
from pmoe.schedule.restore import KEEP, Restore, fate_of_copies
from pmoe.schedule.tasks import Kind, PassDirection, Stages


@dataclass(frozen=True, kw_only=True)
class CopyWork:
    """The work that copies of busy experts add to a call: messages, and products of other ranks' experts.

    The numbers are equal on all ranks. `of` rounds them up, so that calls with similar loads have equal
    numbers.

    scattered: how many experts' weights the busiest rank sends or receives when owners send weights to hosts
        (task V). As many experts' gradients are sent when hosts send gradients to owners (VG). The number may
        be a fraction, because a rank may send or receive a part of an expert. 0 without copies.
    relayed: how many experts' weights the busiest rank sends or receives when the hosts of a group send parts
        to each other (task VR). As many experts' gradients are sent in VGR. The number may be a fraction. 0
        if no group has several hosts.
    computed: the largest fraction of a rank's rows that its copies compute.
    is_sent: whether the weights are sent. False if the ranks have them from an earlier call.
    stays: whether the copies stay for later calls. Backward then sends no weights again.
    learned: the fraction of a copy's weights whose gradients are sent; 0 if experts are frozen.
    """

    scattered: float = 0.0
    relayed: float = 0.0
    computed: float = 0.0
    is_sent: bool = True
    stays: bool = False
    learned: float = 1.0

    @staticmethod
    def of(plan: CopyPlan, nodes: Sequence[int], *, is_sent: bool, stays: bool, learned: float) -> CopyWork:
        """Returns the work of a plan of copies.

        The numbers of experts are rounded up to powers of two, the fraction of rows to halves.

        plan: the copies. Every rank is assumed to compute ``plan.after`` rows: this is the plan's largest
            time of a rank, counted in rows.
        nodes: (W,) the node of each of W ranks.
        is_sent, stays, learned: as in the class.
        """
        sent = Counter[int]()
        received = dict[int, float]()
        relayed = dict[int, float]()
        rows = Counter[int]()
        for expert, groups in host_groups(plan.hosts, nodes).items():
            (owner, _), *hosts = plan.hosts[expert]
            rows.update(dict(hosts))
            sent[owner] += len(groups)
            for group in groups:
                part = 1 / len(group)
                for rank in group:
                    received[rank] = received.get(rank, 0.0) + part
                    relayed[rank] = relayed.get(rank, 0.0) + 1 - part
        if not sent:
            return NO_COPIES
        share = max(rows.values()) / max(plan.after, 1)
        return CopyWork(
            scattered=_power_of_two(max(*sent.values(), *received.values())),
            relayed=_power_of_two(max(relayed.values())),
            computed=min(math.ceil(2 * share) / 2, 1.0),
            is_sent=is_sent,
            stays=stays,
            learned=learned,
        )

    def in_stages(self, stages: Stages, restore: Restore | None) -> Stages:
        """Returns a layer's stages with the stages of copies added. Without copies, nothing is added.

        stages: the stages of the layer without copies.
        restore: the restore pair. If it sends the dispatched rows (T_DI) again in backward, the copies'
            weights are sent again too, unless the copies stay for later calls. None if the layer has no ring
            slots: rows of a rank for its own copies are then not sent, and have tasks of their own.
        """
        if not self.scattered:
            return stages
        return replace(
            stages,
            copies=fate_of_copies(restore or KEEP, stay=self.stays, are_present=not self.is_sent),
            relays_copies=self.relayed > 0,
            frozen_copies=not self.learned,
            local_copies=stages.local and restore is None,
        )

    def experts_sent(self, direction: PassDirection, restore: Restore) -> float:
        """Returns the number of experts' weights plus gradients that the busiest rank sends or receives.

        Numbers may be fractions: a rank may send or receive a part of an expert's weights.

        direction: the pass, "forward" or "backward".
        restore: the restore pair. If it sends the dispatched rows (T_DI) again in backward, the copies'
            weights are sent again too, unless the copies stay for later calls.
        """
        stages = self.in_stages(Stages(local=True, remote=True), restore)
        messages = float(stages.sends_copies(direction)) + (direction == "backward") * self.learned
        return messages * (self.scattered + self.relayed)

    def message_seconds(self, message: Callable[[float], float]) -> dict[Kind, float]:
        """Returns the seconds of each kind of task that sends weights or gradients of copies.

        Without copies the result is empty.

        message: function from a number of experts to the seconds of a message with their weights.
        """
        if not self.scattered:
            return {}
        return {
            Kind.COPY_WEIGHTS: message(self.scattered),
            Kind.RELAY_WEIGHTS: message(self.relayed),
            Kind.COPY_GRADIENTS: message(self.learned * self.scattered),
            Kind.RELAY_GRADIENTS: message(self.learned * self.relayed),
        }

    def shared_wgrad(self, seconds: float) -> dict[Kind, float]:
        """Divides the seconds of a chunk's weight gradients between own experts (W) and copies (KW).

        The fraction of rows that copies compute differs between ranks. The result is for the rank with the
        largest fraction, because VG can send gradients to the owners only after this rank's last task KW.

        seconds: seconds of the weight gradients of all rows that a chunk has received.
        """
        of_copies = self.computed * seconds * bool(self.learned)
        return {Kind.WGRAD: seconds - of_copies, Kind.COPY_WGRAD: of_copies}


NO_COPIES = CopyWork()
"""The work of a call without copies."""


def _power_of_two(number: float) -> float:
    """Returns ``number`` (rounded to 6 decimals) rounded up to a power of two; 0 for 0."""
    return 2.0 ** math.ceil(math.log2(round(number, 6))) if number else 0.0
