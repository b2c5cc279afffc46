"""A graph as a list of instructions (operator calls with costs), to predict time and memory of a pass.

Each instruction runs on one of two lanes (queues). All-to-alls run on the lane "communicate", as do
reductions of gradients over ranks, because they use the same link. All other instructions run on the lane
"compute":

    compute      | attention, gate |        other work        | needs the rows |
    communicate                    | all-to-all of rows       |

The instructions of the compute lane run in the order of the list. While an all-to-all runs, the compute lane
goes on, until an instruction needs the result of the all-to-all (Lancet, section 5.3). A message starts only
after all computation before it in the list. The function `timeline` predicts when each instruction runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pmoe.planner.simulator import Simulated

COMPUTE, COMMUNICATE = "compute", "communicate"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One operator call of a graph, with its cost.

    name: the call's name. Graphs with the same operators have the same names (`pmoe.graph.lower.label`).
    waits: names of the instructions whose results this one reads.
    holds: names of the instructions and graph inputs whose memory this instruction reads. For a view, this is
        the instruction or input that owns the memory.
    seconds: predicted time of the call, if nothing else runs on its lane.
    lane: the queue on which the call runs, `COMPUTE` or `COMMUNICATE`.
    num_bytes: bytes that the call allocates for its result.
    is_counts: whether the call is an exchange of row counts.
    selects: whether the call only selects one of the results of another call. It allocates no memory, and
        comes directly after the other call in every order of instructions.
    hands_over: True if the instruction hands a gradient over to autograd, and calls no operator
        (`pmoe.graph.hand_over`). If the gradient is reduced over ranks, the instruction's lane is
        `COMMUNICATE`, and its seconds are those of the reduction.
    """

    name: str
    waits: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    seconds: float = 0.0
    lane: str = COMPUTE
    num_bytes: int = 0
    is_counts: bool = False
    selects: bool = False
    hands_over: bool = False

    @property
    def communicates(self) -> bool:
        """Whether the instruction is an all-to-all, of rows or of row counts."""
        return self.lane == COMMUNICATE and not self.hands_over

    @property
    def reduces(self) -> bool:
        """Whether the instruction hands over a gradient that is then reduced over ranks."""
        return self.lane == COMMUNICATE and self.hands_over

    @property
    def ends_stage(self) -> bool:
        """Whether the instruction is an all-to-all of rows, which ends a stage of a pipeline over parts.

        An exchange of row counts ends no stage (`pmoe.graph.ranges.stages` has the reason).
        """
        return self.communicates and not self.is_counts


def timeline(instructions: Iterable[Instruction]) -> list[Simulated[Instruction]]:
    """Returns each instruction with its predicted start and end, in seconds from the start of the pass.

    An instruction starts when all of these have ended:

    - the instruction before it on its lane
    - the instructions whose results it reads
    - for a message: all computation before it in the list. On a GPU, the stream that sends waits for all
      computation that the host issued before the message. On the CPU, the host itself computes it first.

    Example: dX (1 s), dW (2 s), then an all-to-all (3 s) that reads dX -> the all-to-all runs from 3 to 6. It
    would run from 1 to 4 if dW came after it in the list.
    """
    end_of: dict[str, float] = {}
    computed = 0.0
    sent = 0.0
    done = []
    for instruction in instructions:
        is_message = instruction.lane == COMMUNICATE
        start = max(computed, sent) if is_message else computed
        for name in instruction.waits:
            start = max(start, end_of[name])
        end = start + instruction.seconds
        end_of[instruction.name] = end
        if is_message:
            sent = end
        else:
            computed = end
        done.append(Simulated(task=instruction, start=start, end=end))
    return done


def total_seconds(instructions: Iterable[Instruction]) -> float:
    """Returns the predicted seconds until the last instruction ends; 0 if there are no instructions."""
    return max((simulated.end for simulated in timeline(instructions)), default=0.0)


def exposed_seconds(instructions: Sequence[Instruction]) -> float:
    """Returns the predicted seconds in which nothing is computed, because all work waits for messages.

    Messages are all-to-alls, and reductions of gradients over ranks.
    """
    busy = sum(instruction.seconds for instruction in instructions if instruction.lane == COMPUTE)
    return total_seconds(instructions) - busy


def users_of(instructions: Iterable[Instruction]) -> dict[str, list[str]]:
    """Returns {name of an instruction: names of the instructions that read its result}."""
    users: dict[str, list[str]] = {}
    for instruction in instructions:
        users.setdefault(instruction.name, [])
        for name in instruction.waits:
            users[name].append(instruction.name)
    return users


def peak_bytes(
    instructions: Sequence[Instruction], kept: Iterable[str], input_bytes: Mapping[str, int]
) -> int:
    """Returns the largest number of bytes that a pass holds at one time, if it runs in this order.

    The memory of a result is held until the last instruction that reads it has ended.

    instructions: the instructions of the pass, in the order in which they run.
    kept: names of results and inputs that are held to the end, because the graph returns them.
    input_bytes: {name of an input of the graph: its bytes}.
    """
    last_use = {
        name: index
        for index, instruction in enumerate(instructions)
        for name in (instruction.name, *instruction.holds)
    }
    last_use.update(dict.fromkeys(kept, len(instructions)))
    live_bytes = dict(input_bytes)
    num_bytes = peak = sum(live_bytes.values())
    for index, instruction in enumerate(instructions):
        live_bytes[instruction.name] = instruction.num_bytes
        num_bytes += instruction.num_bytes
        peak = max(peak, num_bytes)
        num_bytes -= sum(
            live_bytes.pop(name, 0)
            for name in {instruction.name, *instruction.holds}
            if last_use[name] <= index
        )
    return peak
