"""Compiles the schedule of a pass into a pass program: a flat list of records for an interpreter in C++.

The schedule stays the one list of tasks. A task becomes one record or several, in the order in which the
engine computes. All records of a task run on the task's lane:

    task  records of forward                                     records of backward
    G     place                                                  place
    S     exchange                                               exchange
    L     place, hidden, output                                  place, hidden_gradient, input_gradient, scale
    C     [take], hidden, output, [put]                          [take], as L, [put]
    W                                                            weight_gradient of w1 and of w2
    R     exchange                                               exchange
    O     sum                                                    sum

The first record of a task waits for the tasks of other lanes (`Schedule.lane_waits`), the last one signals.
Before the first task, and after the last, the compute lane and the other lanes wait for each other.

Rows that arrive from several ranks are sorted by expert ([take], [put]). There is no [put] on a device, where
the experts' last product stores results in the order of arrival. Whether rows are sorted is known only when
row counts are. So such tasks have two forms of their records, of which a call issues one: records that read
sorted copies, with the condition SORTED, and records that read rows as they arrived, with STRAIGHT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pmoe.program.layer_shape import INDEX_BYTES, LayerShape
from pmoe.program.operands import SORTED, PassOperands, RowUnit
from pmoe.program.records import (
    Base,
    CallNumber,
    ChunkNumber,
    Kernel,
    Operand,
    PassProgram,
    Record,
    chunk_number,
)
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Kind, Lane, Schedule, make_task

NO_TASK = -1
"""The task of records before the first and after the last task."""

BEGIN = 0
"""The event after which the other lanes may begin: the compute lane has reached the pass."""

HOST_IS_READ = 1
"""The event after which earlier passes have read the host memory from which they copied."""


class _PassCompiler:
    """Compiles one pass.

    schedule: the tasks of the pass.
    shape: the facts of the layer.
    restore: the restore pair; None for a forward pass without a backward pass.
    memory: the operands of the pass.
    records: the records so far.
    task, lane: the task of which records are being appended (`NO_TASK` for none), and its lane.
    copied: buffers whose rows have been copied. PLACE records that follow one another are one launch on a
        device, so copies of several tasks are made by the first of them (`Schedule.joint_copies`).
    num_events: number of events so far.
    """

    def __init__(self, schedule: Schedule, shape: LayerShape, restore: Restore | None) -> None:
        self.schedule = schedule
        self.shape = shape
        self.memory = PassOperands(schedule, shape, restore)
        self.records: list[Record] = []
        self.task = NO_TASK
        self.lane = Lane.COMPUTE
        self.num_weight_gradients = 0
        self.copied: set[str] = set()
        self.num_events = HOST_IS_READ + 1
        computed = [task.chunk for task in schedule.tasks if task.kind is Kind.COMPUTE]
        self.first_computed = computed[0] if computed else -1
        self.last_computed = computed[-1] if computed else -1

    # ---- records

    def add(
        self,
        kernel: Kernel,
        *operands: Operand,
        condition: int = CallNumber.ONE,
        first: int = CallNumber.ZERO,
        flag: int = 0,
        send_line: int = -1,
        recv_line: int = -1,
    ) -> None:
        """Appends a record of the current task. `compile` sets its waits and its signal afterwards.

        The arguments are the fields of `Record`.
        """
        self.records.append(
            Record(
                kernel=kernel,
                lane=self.lane,
                task=self.task,
                operands=operands,
                condition=condition,
                first=first,
                flag=flag,
                send_line=send_line,
                recv_line=recv_line,
            )
        )

    def place(self, base: Base, target: Operand, i: int, first: ChunkNumber) -> None:
        """Appends the copy of chunk i's tokens to the rows of ``target``.

        base: the tensor with the tokens.
        first: the number of the sorted row that is the first row of the target.
        """
        tokens = self.memory.tokens(base, i)
        first_row = chunk_number(first, i)
        self.add(
            Kernel.PLACE, tokens, self.memory.position(i), target, condition=target.rows, first=first_row
        )

    def place_once(self, base: Base, name: str, i: int, first: ChunkNumber) -> None:
        """Appends the copy of chunk i's tokens to buffer ``name``, unless an earlier task has made it.

        base: the tensor with the tokens.
        first: the number of the sorted row that is the first row of the buffer.
        """
        target = self.memory.buffer(name, i)
        if target.name not in self.copied:
            self.copied.add(target.name)
            self.place(base, target, i, first)

    def sort(self, name: str, target: Operand, i: int) -> None:
        """Appends the copy that sorts chunk i's arrived rows by expert, if they may need it."""
        if self.memory.may_sort:
            condition = chunk_number(ChunkNumber.SORTED, i)
            self.add(
                Kernel.TAKE, self.memory.buffer(name, i), self.memory.regroup(i), target, condition=condition
            )

    def sort_back(self, name: str, i: int) -> None:
        """Appends the copy of chunk i's results to the order of arrival, if products do not store them so."""
        if self.memory.may_sort and not self.shape.places:
            condition = chunk_number(ChunkNumber.SORTED, i)
            source = self.memory.buffer(f"{name}_sorted", i)
            target = self.memory.buffer(name, i)
            self.add(Kernel.PUT, source, self.memory.regroup(i), target, condition=condition)

    def exchange(self, source: Operand, target: Operand, line: int, *, back: bool, condition: int) -> None:
        """Appends an all-to-all.

        source, target: the rows to send, and the memory of the rows to receive.
        line: the line with the rows to each rank towards the experts; the next line has those from each.
        back: whether the rows return from the experts, so that both lines change places.
        condition: index of a number. Two exchanges of which one is issued have conditions that exclude each
            other, so that every rank issues the same number.
        """
        self.add(
            Kernel.EXCHANGE,
            source,
            target,
            condition=condition,
            send_line=line + back,
            recv_line=line + 1 - back,
        )

    # ---- tasks. Each method appends the records of one task; its sentence says what these will do

    def gather(self, i: int) -> None:
        """Copies the tokens that chunk i sends to its send buffer (task G)."""
        source = Base.T_I if self.memory.is_forward else Base.DT_O
        self.place_once(source, "send", i, ChunkNumber.ROW_BEGIN)

    def gather_again(self, i: int) -> None:
        """Copies the tokens of chunk i to be sent again in backward, and rows of later tasks (task GI)."""
        self.place_once(Base.T_I, "send_again", i, ChunkNumber.ROW_BEGIN)
        for task in self.schedule.joint_copies[f"{Kind.GATHER_AGAIN.value}{i}"]:
            if task.kind is Kind.GATHER:
                self.gather(task.chunk)
            else:
                self.copy_piece(task.chunk)

    def copy_piece(self, i: int) -> None:
        """Copies the input of chunk i's rows that stay, and the gradients of their output, in backward.

        The gradients are copied before the task L that reads them. The rows of the chunk before, which lay in
        the same memory, were read by earlier tasks of the lane.
        """
        if self.memory.dispatched == "communicate":
            self.place_once(Base.T_I, "T_DI_L", i, ChunkNumber.LOCAL_ROW_BEGIN)
            self.place_once(Base.DT_O, "dT_DO_L", i, ChunkNumber.LOCAL_ROW_BEGIN)

    def dispatch(self, i: int) -> None:
        """Sends the rows of chunk i to the ranks of their experts (task S)."""
        send = self.memory.buffer("send", i)
        if not self.memory.is_forward:
            self.exchange(send, self.memory.buffer("dT_DO", i), 2 * i, back=False, condition=CallNumber.ONE)
        elif self.memory.dispatched != "keep":
            self.exchange(send, self.memory.buffer("T_DI", i), 2 * i, back=False, condition=CallNumber.ONE)
        else:
            for unit in self.memory.units(i, ""):
                is_sorted = unit.form is SORTED
                target = self.memory.buffer("T_DI", i) if is_sorted else self.memory.saved("T_DI", unit)
                condition = chunk_number(unit.form.flag, i)
                self.exchange(send, target, 2 * i, back=False, condition=condition)

    def dispatch_again(self, i: int) -> None:
        """Sends the experts' input of chunk i again (task SI)."""
        send = self.memory.buffer("send_again", i)
        self.exchange(send, self.memory.buffer("T_DI", i), 2 * i, back=False, condition=CallNumber.ONE)

    def combine(self, i: int) -> None:
        """Sends the results of chunk i back to the tokens' ranks (task R)."""
        leaving = self.memory.buffer("T_DO" if self.memory.is_forward else "dT_DI", i)
        self.exchange(
            leaving, self.memory.part_of_home(i, stays=False), 2 * i, back=True, condition=CallNumber.ONE
        )

    def output(self, i: int) -> None:
        """Sums the results of each token of chunk i (task O)."""
        home = self.memory.buffer("home" if self.memory.is_forward else "dhome", i)
        out = self.memory.tokens(Base.T_O if self.memory.is_forward else Base.DT_I, i)
        first_row = chunk_number(ChunkNumber.ROW_BEGIN, i)
        self.add(Kernel.SUM, home, self.memory.position(i), out, condition=out.rows, first=first_row)

    def weights(self, _: int) -> None:
        """Sends the routing weights of all chunks, or returns their gradients (task P)."""
        line = 2 * self.memory.n
        sorted_base = Base.WEIGHT_ARRIVED if self.memory.is_forward else Base.DWEIGHT_LEAVING
        straight_base = Base.WEIGHT_RECEIVED if self.memory.is_forward else Base.DWEIGHT_RECEIVED
        by_number = Base.WEIGHT_BY_NUMBER if self.memory.is_forward else Base.DWEIGHT_BY_NUMBER
        home = self.memory.numbers_of_rows(by_number, CallNumber.SENT_ROWS)
        forms = [(straight_base, CallNumber.MESSAGE_IS_STRAIGHT)]
        if self.memory.may_sort:
            forms.insert(0, (sorted_base, CallNumber.MESSAGE_IS_SORTED))
        for base, condition in forms:
            away = self.memory.numbers_of_rows(base, CallNumber.RECEIVED_ROWS)
            if self.memory.is_forward:
                self.exchange(home, away, line, back=False, condition=condition)
            else:
                self.exchange(away, home, line, back=True, condition=condition)

    def sort_weights(self) -> None:
        """Appends the copy that sorts all routing weights by chunk and expert; in backward the way back."""
        if not self.memory.may_sort:
            return
        rows = CallNumber.RECEIVED_ROWS
        index = self.memory.operand(Base.REGROUP_WEIGHTS, rows, 1, INDEX_BYTES)
        kernel = Kernel.TAKE if self.memory.is_forward else Kernel.PUT
        source = Base.WEIGHT_ARRIVED if self.memory.is_forward else Base.DWEIGHT_RECEIVED
        target = Base.WEIGHT_RECEIVED if self.memory.is_forward else Base.DWEIGHT_LEAVING
        operands = (
            self.memory.numbers_of_rows(source, rows),
            index,
            self.memory.numbers_of_rows(target, rows),
        )
        self.add(kernel, *operands, condition=CallNumber.MESSAGE_IS_SORTED)

    def local(self, i: int) -> None:
        """Computes the rows of chunk i that stay on this rank (task L)."""
        (unit,) = self.memory.units(i, "_L")
        if self.memory.is_forward:
            self.place(Base.T_I, self.memory.rows_for_experts(unit), i, ChunkNumber.LOCAL_ROW_BEGIN)
            self.experts(unit, self.memory.part_of_home(i, stays=True), self.memory.nowhere)
            return
        self.copy_piece(i)
        self.place_once(Base.DT_O, "dT_DO_L", i, ChunkNumber.LOCAL_ROW_BEGIN)
        home = self.memory.part_of_home(i, stays=True)
        self.gradients(unit, self.memory.buffer("dT_DO_L", i), home, self.memory.nowhere)

    def compute(self, i: int) -> None:
        """Computes the rows that this rank received in chunk i (task C)."""
        if self.memory.is_forward:
            if i == self.first_computed:
                self.sort_weights()
            keeps = self.memory.dispatched == "keep"
            if self.memory.may_sort:
                target = (
                    self.memory.saved("T_DI", RowUnit(chunk=i, place="", form=SORTED))
                    if keeps
                    else self.memory.buffer("T_DI_sorted", i)
                )
                self.sort("T_DI", target, i)
            for unit in self.memory.units(i, ""):
                self.experts(unit, *self.memory.result_of("T_DO", unit))
            self.sort_back("T_DO", i)
            return
        if self.memory.may_sort:
            self.sort("dT_DO", self.memory.buffer("dT_DO_sorted", i), i)
            if self.memory.dispatched == "communicate" and self.memory.hidden != "recompute":
                self.sort("T_DI", self.memory.buffer("T_DI_sorted", i), i)
        for unit in self.memory.units(i, ""):
            grad = self.memory.buffer(f"dT_DO{unit.form.ending}", i)
            self.gradients(unit, grad, *self.memory.result_of("dT_DI", unit))
        self.sort_back("dT_DI", i)
        if i == self.last_computed:
            self.sort_weights()

    # ---- the experts

    def experts(self, unit: RowUnit, out: Operand, place: Operand) -> None:
        """Appends forward's two products of a unit.

        out, place: memory for the results, and the row of it that takes each row's result.
        """
        condition = unit.condition
        ends = self.memory.ends(unit)
        hidden = self.memory.written_hidden_of(unit)
        active = self.memory.active_of(unit)
        w1 = self.memory.parameter(Base.W1)
        b1 = self.memory.parameter(Base.B1)
        w2 = self.memory.parameter(Base.W2)
        b2 = self.memory.parameter(Base.B2)
        rows = self.memory.rows_for_experts(unit)
        self.add(Kernel.HIDDEN, rows, w1, b1, hidden, active, ends, condition=condition)
        weight = self.memory.weights_of(unit)
        self.add(Kernel.OUTPUT, active, w2, b2, weight, place, out, ends, condition=condition)

    def recompute(self, i: int, place: str = "") -> None:
        """Recomputes the hidden activation T_M of one part of chunk i (task M, or LM with place="_L")."""
        if place:
            self.copy_piece(i)
        elif self.memory.dispatched == "communicate" and self.memory.may_sort:
            self.sort("T_DI", self.memory.buffer("T_DI_sorted", i), i)
        w1 = self.memory.parameter(Base.W1)
        b1 = self.memory.parameter(Base.B1)
        for unit in self.memory.units(i, place):
            rows = self.memory.rows_for_experts(unit)
            hidden = self.memory.hidden_of(unit)
            self.add(Kernel.RECOMPUTE, rows, w1, b1, hidden, self.memory.ends(unit), condition=unit.condition)

    def gradients(self, unit: RowUnit, grad: Operand, out: Operand, place: Operand) -> None:
        """Appends the gradients of a unit's rows and of their routing weights.

        grad: the gradient of the unit's results. It is multiplied by the routing weights.
        out, place: memory for the gradient of the rows, and the row of it that takes each row's gradient.
        """
        condition = unit.condition
        ends = self.memory.ends(unit)
        weight = self.memory.weights_of(unit)
        dots = self.memory.weights_of(unit, gradient=True)
        grad_hidden = self.memory.buffer(f"dT_M{unit.place}", unit.chunk)
        w1 = self.memory.parameter(Base.W1)
        w2 = self.memory.parameter(Base.W2)
        weighs_active = int(self.shape.weighs_active)
        hidden = self.memory.hidden_of(unit)
        active = self.memory.active_of(unit)
        self.add(
            Kernel.HIDDEN_GRADIENT, grad, w2, hidden, weight, grad_hidden, active, dots, ends,
            condition=condition, flag=weighs_active,
        )  # fmt: skip
        if self.shape.bias:
            self.add(Kernel.BIAS_DOTS, grad, self.memory.parameter(Base.B2), dots, ends, condition=condition)
        self.add(Kernel.INPUT_GRADIENT, grad_hidden, w1, place, out, ends, condition=condition)
        if not weighs_active:
            self.add(Kernel.SCALE, weight, grad, condition=condition)

    def wgrad(self, i: int, place: str = "") -> None:
        """Adds the gradients of parameters from one part of chunk i (task W, or LW with place="_L")."""
        # The first task overwrites the sums, also if no rows come: so it always runs, in one form.
        adds = int(self.num_weight_gradients > 0)
        self.num_weight_gradients += 1
        for unit in self.memory.units(i, place):
            condition = unit.condition
            if not adds:
                condition = CallNumber.ONE if place else chunk_number(unit.form.flag, i)
            grad = self.memory.buffer(f"dT_DO{place or unit.form.ending}", i)
            grad_hidden = self.memory.buffer(f"dT_M{place}", i)
            rows = self.memory.rows_for_experts(unit)
            active = self.memory.active_of(unit)
            ends = self.memory.ends(unit)
            trained = self.shape.trained
            for name, base, of_rows, factors in (
                ("w1", Base.DW1, grad_hidden, rows),
                ("w2", Base.DW2, grad, active),
            ):
                if name in trained:
                    total = self.memory.parameter(base)
                    self.add(
                        Kernel.WEIGHT_GRADIENT, of_rows, factors, total, ends, condition=condition, flag=adds
                    )
            for name, base, of_rows in (("b1", Base.DB1, grad_hidden), ("b2", Base.DB2, grad)):
                if self.shape.bias and name in trained:
                    total = self.memory.parameter(base)
                    self.add(Kernel.BIAS_GRADIENT, of_rows, total, ends, condition=condition, flag=adds)

    # ---- copies to the host and back

    def copy_rows_out(self, i: int, place: str = "") -> None:
        """Copies T_DI of one part of chunk i to the host (task DI, or LDI with place="_L")."""
        for unit in self.memory.units(i, place):
            source = self.memory.rows_for_experts(unit)
            target = self.memory.saved("T_DI", unit)
            self.add(Kernel.COPY, source, target, condition=unit.condition)

    def copy_hidden_out(self, i: int, place: str = "") -> None:
        """Copies T_M of one part of chunk i to the host (task DM, or LDM with place="_L")."""
        unit = self.memory.units(i, place)[-1]  # both forms have T_M in the same memory
        self.add(
            Kernel.COPY, self.memory.hidden_of(unit), self.memory.saved("T_M", unit), condition=unit.rows
        )

    def copy_rows_in(self, i: int, place: str = "") -> None:
        """Copies T_DI of one part of chunk i to the device (task HI, or LHI with place="_L")."""
        unit = self.memory.units(i, place)[-1]
        target = self.memory.buffer(f"T_DI{place}", i)
        self.add(Kernel.COPY, self.memory.saved("T_DI", unit), target, condition=unit.rows)

    def copy_hidden_in(self, i: int, place: str = "") -> None:
        """Copies T_M of one part of chunk i to the device (task HM, or LHM with place="_L")."""
        unit = self.memory.units(i, place)[-1]
        self.add(
            Kernel.COPY, self.memory.saved("T_M", unit), self.memory.hidden_of(unit), condition=unit.rows
        )

    # ---- the whole pass

    def actions(self) -> dict[Kind, Callable[[int], None]]:
        """Returns the method for each kind of task that a program can have."""
        return {
            Kind.GATHER: self.gather,
            Kind.WEIGHTS: self.weights,
            Kind.DISPATCH: self.dispatch,
            Kind.LOCAL: self.local,
            Kind.COMPUTE: self.compute,
            Kind.COMBINE: self.combine,
            Kind.OUTPUT: self.output,
            Kind.GATHER_AGAIN: self.gather_again,
            Kind.DISPATCH_AGAIN: self.dispatch_again,
            Kind.RECOMPUTE: self.recompute,
            Kind.LOCAL_RECOMPUTE: lambda i: self.recompute(i, "_L"),
            Kind.WGRAD: self.wgrad,
            Kind.LOCAL_WGRAD: lambda i: self.wgrad(i, "_L"),
            Kind.COPY_ROWS_OUT: self.copy_rows_out,
            Kind.LOCAL_COPY_ROWS_OUT: lambda i: self.copy_rows_out(i, "_L"),
            Kind.COPY_HIDDEN_OUT: self.copy_hidden_out,
            Kind.LOCAL_COPY_HIDDEN_OUT: lambda i: self.copy_hidden_out(i, "_L"),
            Kind.COPY_ROWS_IN: self.copy_rows_in,
            Kind.LOCAL_COPY_ROWS_IN: lambda i: self.copy_rows_in(i, "_L"),
            Kind.COPY_HIDDEN_IN: self.copy_hidden_in,
            Kind.LOCAL_COPY_HIDDEN_IN: lambda i: self.copy_hidden_in(i, "_L"),
        }

    def compile(self) -> PassProgram:
        """Compiles the pass."""
        actions = self.actions()
        refused = next((task for task in self.schedule.tasks if task.kind not in actions), None)
        if refused is not None:
            kind = refused.kind.name.lower()
            raise ValueError(
                f"a pass program does not take task {refused.name} ({kind}). The engine (pmoe.engine) runs it"
            )
        schedule = _with_end(self.schedule)
        self._begin()
        event_of: dict[str, int] = {}
        begun = {Lane.COMPUTE}
        awaited: set[tuple[Lane, int]] = set()
        for index, task in enumerate(schedule.tasks):
            is_end = index == len(self.schedule.tasks)
            self.task = NO_TASK if is_end else index
            self.lane = task.lane
            first = len(self.records)
            if not is_end:
                actions[task.kind](task.chunk)
            waits = [event_of[name] for name in schedule.lane_waits[task.name]]
            if task.lane not in begun:
                waits = self._first_waits(task.lane, waits)
                begun.add(task.lane)
            # Tasks that share an event (`_signal`) are waited for once.
            waits = [event for event in dict.fromkeys(waits) if (task.lane, event) not in awaited]
            awaited |= {(task.lane, event) for event in waits}
            if waits:
                if len(self.records) == first:
                    self.add(Kernel.NOTHING)
                self.records[first] = replace(self.records[first], waits=tuple(waits))
            if task.name in schedule.awaited:
                event_of[task.name] = self._signal(task.lane)
        if not self.memory.is_forward:
            weights, index_of_numbers, numbers = self.memory.weights_by_number()
            self.add(Kernel.PUT, numbers, index_of_numbers, weights, condition=CallNumber.ROWS)
        shape = self.shape
        return PassProgram(
            chunks=self.memory.n,
            ranks=shape.ranks,
            local_experts=shape.local_experts,
            keeps_own=shape.keeps_own,
            sends=shape.sends,
            slots=self.memory.slots,
            turns=tuple(self.memory.turns()),
            records=tuple(self.records),
            num_events=self.num_events,
        )

    def _signal(self, lane: Lane) -> int:
        """Returns the event that the last record of a lane signals. The record gets one if it has none.

        A task has no record of its own if an earlier task of its lane has copied its rows (`place_once`). It
        then shares that task's event.
        """
        last = max(place for place, record in enumerate(self.records) if record.lane is lane)
        if self.records[last].signal < 0:
            self.records[last] = replace(self.records[last], signal=self.num_events)
            self.num_events += 1
        return self.records[last].signal

    def _begin(self) -> None:
        """Appends the records before the first task.

        Other lanes begin when the compute lane, on which the caller computed the inputs, has reached the
        pass. Copies to the host also begin after earlier passes' copies from the host, because these may
        still read the same host memory.
        """
        if self.memory.is_forward:
            self.add(Kernel.TAKE, *self.memory.weights_by_number(), condition=CallNumber.ROWS)
        else:
            self.add(Kernel.NOTHING)
        self.records[-1] = replace(self.records[-1], signal=BEGIN)
        if Lane.COPY_OUT in self.schedule.lanes:
            self.lane = Lane.COPY_IN
            self.add(Kernel.NOTHING)
            self.records[-1] = replace(self.records[-1], signal=HOST_IS_READ)

    def _first_waits(self, lane: Lane, waits: list[int]) -> list[int]:
        """Returns the events for which a lane waits before its first task.

        waits: the events of the tasks for which it waits. If there are any, the pass has surely begun.
        """
        needed = waits or [BEGIN]
        return [HOST_IS_READ, *needed] if lane is Lane.COPY_OUT else needed


def _with_end(schedule: Schedule) -> Schedule:
    """Returns the schedule with one more task on the compute lane, which waits for the last of each lane."""
    last_of_lane = {task.lane: task.name for task in schedule.tasks}
    chunk = 1 + max(task.chunk for task in schedule.tasks)  # of no other task, so that its name is new
    end = replace(make_task(Kind.OUTPUT, chunk, [], []), waits=tuple(last_of_lane.values()))
    return replace(schedule, tasks=(*schedule.tasks, end))


def compile_pass(schedule: Schedule, shape: LayerShape, restore: Restore | None) -> PassProgram:
    """Compiles the schedule of a pass into a program.

    schedule: the tasks of the pass, whose chunks take turns in ring slots
        (`pmoe.schedule.ring_buffers.rotating`).
    shape: the facts of the layer.
    restore: the restore pair with which the schedule was built; None for a forward pass without a backward
        pass.

    Raises ValueError, which names the task, if a program cannot have it. `pmoe.decide.program_choice` has
    refused other schedules and pairs.
    """
    assert schedule.slots, "a program's chunks take turns in ring slots"
    assert restore is None or not restore.is_narrow, "a program keeps tensors as they are"
    return _PassCompiler(schedule, shape, restore).compile()
