"""Chooses when a backward graph hands gradients over, so that reductions fit between all-to-alls.

When the graph hands a gradient over to autograd (`pmoe.graph.hand_over`), a data-parallel wrapper starts to
reduce the gradient over ranks. Reductions and all-to-alls use the same link, as in this example:

    compute      | head | experts      | block        | experts      | block
    communicate         | S |  head  | R |         | S |  block   | R |         | block |

In the line "compute", "head" and "block" are the operators that compute the gradients of the model's head and
of a transformer block. In the line "communicate", they are the reductions of these gradients. S is a
dispatch, R a combine.

The wrapper reduces gradients in buckets (`pmoe.graph.buckets`), one message for each. The message of a bucket
begins when the last gradient of the bucket is handed over.

A gap is a time in which the link is idle. The plan is FSMoE's gradient partition (section 5) for a whole
graph. Two kinds of plans are compared, and the one with the fastest predicted pass is taken:

- Each bucket takes the first gap into which its whole reduction fits.
- Buckets may also take gaps that are too short. An all-to-all then waits for the rest of a reduction.

The place of a gradient is a number: how many all-to-alls begin before the gradient is handed over. All ranks
use the same places. Otherwise all-to-alls and reductions that use the same process group could begin in
different orders on two ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pmoe.graph.buckets import Bucket, UnsentBuckets, send_seconds
from pmoe.graph.instructions import COMMUNICATE, COMPUTE, Instruction, timeline, total_seconds

SHARES = (1.0, 0.5, 0.0, -math.inf)
"""Fractions of a reduction that must fit into a gap on the link. All are tried; the fastest pass is taken.

With 1 no all-to-all is delayed. With 0 any gap is long enough. With -inf the gradients of a bucket are handed
over as soon as all of them exist.
"""


TIE = 1.01
"""The predicted seconds of two passes count as equal if their ratio is at most this number."""


@dataclass(frozen=True)
class Gradient:
    """A gradient that a backward graph returns.

    name: the name of the parameter or input to which the gradient belongs, equal on all ranks.
    number: the position of the gradient among the results of the graph.
    source: the name of the instruction that computes the gradient; "" if no instruction of the graph does,
        because the gradient is an input of the graph.
    """

    name: str
    number: int
    source: str

    @property
    def instruction(self) -> str:
        """The name of the instruction that hands the gradient over to autograd."""
        return f"gradient of {self.name}"


def plan_hand_overs(
    orders: Sequence[Sequence[Instruction]],
    gradients: Sequence[Gradient],
    buckets: Sequence[Bucket],
    agreed: Mapping[str, int] | None = None,
) -> list[Instruction]:
    """Chooses the order of a backward pass, and where in it each gradient is handed over to autograd.

    Returns the instructions of the pass that is predicted to be fastest, in order. For each gradient, one
    instruction that hands it over is added.

    The place of a gradient is the number of all-to-alls that begin before the gradient is handed over. The
    choice has two steps:

    1. For each order of the instructions, several ways to place the gradients are compared. Of the fastest
       ways, the one that delays all-to-alls least is taken.
    2. The resulting passes, one for each order, are compared. Of the fastest passes, the one in which
       reductions begin earliest on average is taken.

    Predictions are not exact. So if gradients are reduced, all passes that take at most `TIE` times the
    seconds of the fastest one count as fastest, too.

    orders: instructions of the pass in different orders.
    gradients: the gradients that the pass returns.
    buckets: which gradients are reduced together, and for how long, in the order in which buckets are sent.
    agreed: {name of a gradient: the place on which the ranks have agreed}; None if there is no agreement yet.
    """
    passes = [_in_order(order, gradients, buckets, agreed) for order in orders]
    tie = TIE if buckets else 1.0
    return min(_fastest(passes, tie), key=_seconds_to_reductions)


def _in_order(
    order: Sequence[Instruction],
    gradients: Sequence[Gradient],
    buckets: Sequence[Bucket],
    agreed: Mapping[str, int] | None,
) -> list[Instruction]:
    """Adds to a pass the instructions that hand gradients over to autograd. Returns the new pass.

    The place of a gradient is the number of all-to-alls that begin before the gradient is handed over. If
    ranks have agreed on places, these are used. Otherwise several ways to place the gradients are compared.
    Of the ways that take at most `TIE` times the seconds of the fastest one, the one that delays all-to-alls
    least is taken.

    order: the instructions of the pass, in the order to keep.
    gradients: the gradients that the pass returns.
    buckets: which gradients are reduced together, and for how long, in the order in which buckets are sent.
    agreed: {name of a gradient: the place on which the ranks have agreed}; None if there is no agreement yet.
    """
    if agreed is not None:
        return with_hand_overs(order, gradients, agreed, buckets)
    shares = SHARES if buckets else SHARES[-1:]
    tried = [hand_over_places(order, gradients, buckets, share) for share in shares]
    return _fastest([with_hand_overs(order, gradients, places, buckets) for places in tried], TIE)[0]


def _fastest(passes: Sequence[list[Instruction]], tie: float) -> list[list[Instruction]]:
    """Returns those of ``passes`` that take at most ``tie`` times the predicted seconds of the fastest."""
    took = [total_seconds(order) for order in passes]
    return [order for order, total in zip(passes, took, strict=True) if total <= tie * min(took)]


def _seconds_to_reductions(order: Iterable[Instruction]) -> float:
    """Returns the sum of the times at which reductions are predicted to start.

    Each time is in seconds from the start of the pass.

    order: the instructions of the pass, in order.
    """
    return sum(ran.start for ran in timeline(order) if ran.task.reduces)


def hand_over_places(
    order: Sequence[Instruction], gradients: Sequence[Gradient], buckets: Sequence[Bucket], share: float
) -> dict[str, int]:
    """Decides between which two all-to-alls each gradient is handed over, to be reduced over ranks.

    Returns {name of a gradient: number of all-to-alls that begin before it is handed over}.

    Reductions and all-to-alls use the same link. Between some all-to-alls the link is predicted to be idle.
    Reductions should fill these gaps. The buckets choose one after the other, in the order in which they are
    sent. Each takes the first gap into which the fraction ``share`` of its reduction fits. The gap must come
    after the computation of the bucket's gradients, and not before the gap of the bucket before. If there is
    no such gap, the bucket comes after the last all-to-all. All gradients of a bucket are handed over in its
    gap.

    order: the instructions of the pass, in order.
    gradients: the gradients that the pass returns.
    buckets: which gradients are reduced together, and for how long, in the order in which buckets are sent.
        Gradients in no bucket are not reduced, and are handed over as soon as they are computed.
    share: the fraction of a reduction that must fit into the gap; 1 for the whole reduction.
    """
    begun = 0
    earliest = {"": 0}
    end = {"": 0.0}
    messages = []
    for ran in timeline(order):
        begun += ran.task.communicates
        earliest[ran.task.name] = begun
        end[ran.task.name] = ran.end
        if ran.task.communicates:
            messages.append(ran)
    source_of = {gradient.name: gradient.source for gradient in gradients}
    result = {name: earliest[source] for name, source in source_of.items()}
    link_free = 0.0
    place = 0
    for bucket in buckets:
        sources = [source_of[name] for name in bucket]
        first_place = max(earliest[source] for source in sources)
        computed = max(end[source] for source in sources)
        seconds = send_seconds([bucket])
        needed = share * seconds if seconds else 0.0
        while place < len(messages):
            message = messages[place]
            gap = message.start - max(link_free, computed)
            if place >= first_place and gap >= needed:
                break
            link_free = max(link_free, message.start) + message.task.seconds
            place += 1
        link_free = max(link_free, computed) + seconds
        result.update(dict.fromkeys(bucket, place))
    return result


def with_hand_overs(
    order: Iterable[Instruction],
    gradients: Sequence[Gradient],
    place_of: Mapping[str, int],
    buckets: Sequence[Bucket],
) -> list[Instruction]:
    """Adds instructions to a pass that hand each gradient over to autograd. Returns the new pass.

    The place of a gradient is a number p: p all-to-alls begin before the gradient is handed over, and the
    others begin after it. Within these limits, the gradient is handed over as soon as it is computed. If
    ``order`` would compute it too late for its place, the instructions that compute it run earlier.

    order: the instructions of the pass, in order.
    gradients: the gradients that the pass returns.
    place_of: {name of a gradient: its place}. Gradients without an entry are handed over after the last
        all-to-all.
    buckets: which gradients are reduced together, and for how long, in the order in which buckets are sent.
        The instruction that hands the last gradient of a bucket over takes the seconds of the bucket's
        message.

    Raises ValueError if a gradient needs the result of an all-to-all that comes after its place. This happens
    only if the graphs of two ranks differ.
    """
    by_name = {instruction.name: instruction for instruction in order}
    # Gradients that are not handed over yet, the one with the lowest place first.
    pending = [(place_of.get(gradient.name, math.inf), at, gradient) for at, gradient in enumerate(gradients)]
    heapq.heapify(pending)
    # Gradients whose place has come, but which are not computed yet, by the instruction that computes them.
    open_gradients = dict[str, list[Gradient]]()
    source_of = {gradient.name: gradient.source for gradient in gradients}
    unsent = UnsentBuckets(buckets)
    result: dict[str, Instruction] = {}
    begun = 0

    def hand_over(gradient: Gradient) -> None:
        """Adds the instruction that hands a gradient over to autograd."""
        sent = unsent.add(gradient.name)
        # A message needs all gradients of its bucket.
        sources = [gradient.source, *(source_of[name] for bucket in sent for name in bucket)]
        result[gradient.instruction] = Instruction(
            name=gradient.instruction,
            waits=tuple(dict.fromkeys(filter(None, sources))),
            holds=(gradient.source,) if gradient.source else (),
            seconds=send_seconds(sent),
            lane=COMMUNICATE if sent else COMPUTE,
            hands_over=True,
        )

    def take(instruction: Instruction, gradient: Gradient | None) -> None:
        """Adds an instruction to the pass, after all instructions whose results it needs.

        If the place of a gradient has come, and one of the added instructions computes this gradient, the
        gradient is handed over directly after that instruction.

        instruction: the instruction. If it was added before, nothing is done.
        gradient: the gradient for which the instruction is added earlier than in ``order``; None if it is
            added in its usual order.

        Raises ValueError if an all-to-all would be added early.
        """
        if instruction.name in result:
            return
        if gradient is not None and instruction.communicates:
            raise ValueError(
                f"the gradient of {gradient.name} must not wait for {instruction.name}, the all-to-all "
                f"number {begun + 1} of the backward graph, because it does not on rank 0. Build the same "
                "model with the same options on all ranks"
            )
        for name in instruction.waits:
            take(by_name[name], gradient)
        result[instruction.name] = instruction
        for waiting in open_gradients.pop(instruction.name, ()):
            hand_over(waiting)

    def open_place() -> None:
        """Hands over the gradients whose place is the number of all-to-alls that have begun.

        A gradient that is not computed yet is noted, and handed over as soon as it is computed.
        """
        while pending and pending[0][0] <= begun:
            gradient = heapq.heappop(pending)[-1]
            if gradient.source and gradient.source not in result:
                open_gradients.setdefault(gradient.source, []).append(gradient)
            else:
                hand_over(gradient)

    open_place()
    for instruction in by_name.values():
        if instruction.communicates:
            for gradient in [gradient for waiting in open_gradients.values() for gradient in waiting]:
                take(by_name[gradient.source], gradient)
            begun += 1
        take(instruction, None)
        if instruction.communicates:
            open_place()
    for *_, gradient in sorted(pending, key=lambda entry: entry[1]):
        hand_over(gradient)
    return list(result.values())


def returned(buckets: Iterable[Bucket], gradients: Iterable[Gradient]) -> list[Bucket]:
    """Returns the buckets without the gradients that a pass does not return.

    All graphs of a program have the same buckets, but a parameter of one graph may be frozen in another.

    buckets: which gradients are reduced together, and for how long, in the order in which buckets are sent.
    gradients: the gradients that the pass returns.
    """
    names = {gradient.name for gradient in gradients}
    parts = ({name: bucket[name] for name in bucket if name in names} for bucket in buckets)
    return [part for part in parts if part]


def by_source(gradients: Iterable[Gradient], buckets: Sequence[Bucket]) -> list[Bucket]:
    """Returns the buckets, in which the instruction that computes a gradient stands for the gradient.

    Gradients that no instruction computes are left out.

    gradients: the gradients that the pass returns.
    buckets: which gradients are reduced together, and for how long, in the order in which buckets are sent.
    """
    source_of = {gradient.name: gradient.source for gradient in gradients}
    result = list[Bucket]()
    for bucket in buckets:
        seconds: dict[str, float] = {}
        for name, share in bucket.items():
            source = source_of[name]
            if source:
                seconds[source] = seconds.get(source, 0.0) + share
        result.append(seconds)
    return result


def places_in(order: Iterable[Instruction], gradients: Sequence[Gradient]) -> dict[str, int]:
    """Returns {name of a gradient: number of all-to-alls that begin before the gradient is handed over}.

    order: the instructions of the pass. For each gradient there is one instruction that hands it over.
    gradients: the gradients.
    """
    by_instruction = {gradient.instruction: gradient.name for gradient in gradients}
    begun = 0
    result = {}
    for instruction in order:
        begun += instruction.communicates
        if instruction.name in by_instruction:
            result[by_instruction[instruction.name]] = begun
    return result
