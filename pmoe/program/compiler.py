"""Compiles the schedule of a pass into a pass program: a flat list of records for an interpreter in C++.

A task of the schedule becomes one record or several records, which do what the engine does for this task, in
the same order. All records of a task run on the task's lane. These are the main tasks, for experts without
biases (`_PassCompiler.actions` has all tasks). [x] is a record that only some programs have:

    task  records of forward                 records of backward
    G     place                              place
    S     exchange                           exchange
    L     place, hidden, output              place, hidden_gradient, input_gradient, [scale]
    C     [take], hidden, output, [put]      [take], hidden_gradient, input_gradient, [scale], [put]
    W                                        weight_gradient of w1 and of w2
    R     exchange                           exchange
    O     sum                                sum

The first record of a task waits for the tasks of other lanes (`Schedule.lane_waits`), and its last record
signals that the task has ended. Before the first task, the other lanes wait for the compute lane. After the
last task, the compute lane waits for the other lanes.

Rows that arrive from several ranks must be sorted by expert ([take]), and their results must be put back into
the order of arrival ([put]). On a GPU there is no [put], because the experts' last product stores results in
the order of arrival. Whether a chunk's rows must be sorted is known only when a call has its row counts. So
tasks that compute such rows have their records twice: with the condition SORTED for sorted copies of the
rows, and with the condition STRAIGHT for rows as they arrived. In a call at least one of the two conditions
is 0, and the records with this condition do nothing. [scale] multiplies gradients by the routing weights, if
the kernels have not multiplied the hidden activation by them (`LayerShape.weighs_active`).
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
"""Stands for the index of a task, in records that come before the first task or after the last task."""

BEGIN = 0
"""The event that the compute lane signals when it reaches the pass. Other lanes begin after this event."""

HOST_IS_READ = 1
"""The event after which host memory may be overwritten, because no copy of an earlier pass still reads it."""


class _PassCompiler:
    """Compiles the schedule of one pass into records.

    schedule: the tasks of the pass.
    shape: the sizes and settings of the layer.
    restore: the restore pair; None for a forward pass without a backward pass.
    memory: makes the operands of the records.
    records: the records that were appended so far.
    task, lane: index of the task whose records are being appended (`NO_TASK` for none), and its lane.
    num_weight_gradients: number of tasks W and LW whose records were appended so far.
    copied: names of the buffers for which `place_once` has appended a PLACE record. A task may append the
        PLACE records of later tasks, too (`Schedule.joint_copies`), because PLACE records that directly
        follow one another are a single launch on a GPU. The later tasks then find their buffers in this set,
        and append no PLACE record.
    num_events: number of events so far.
    first_computed, last_computed: chunks of the first and the last task C; -1 if the pass has no task C.
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
        """Appends a record of the current task. `compile` sets its ``waits`` and ``signal`` later.

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
        """Appends a record that copies tokens of chunk i to the rows of ``target``.

        base: the tensor with the tokens.
        target: the buffer. It holds a range of this rank's sorted rows.
        i: index of the chunk.
        first: the `ChunkNumber` with the index of this range's first row among all sorted rows of this rank:
            ROW_BEGIN for rows that are sent, LOCAL_ROW_BEGIN for rows that stay.
        """
        tokens = self.memory.tokens(base, i)
        first_row = chunk_number(first, i)
        self.add(
            Kernel.PLACE, tokens, self.memory.position(i), target, condition=target.rows, first=first_row
        )

    def place_once(self, base: Base, name: str, i: int, first: ChunkNumber) -> None:
        """Appends a record that copies tokens of chunk i to a buffer, unless an earlier task has appended it.

        base: the tensor with the tokens.
        name: name of the buffer, without the chunk.
        i: index of the chunk.
        first: the `ChunkNumber` of the buffer's first row, as for `place`.
        """
        target = self.memory.buffer(name, i)
        if target.name not in self.copied:
            self.copied.add(target.name)
            self.place(base, target, i, first)

    def sort(self, name: str, target: Operand, i: int) -> None:
        """Appends a record that sorts chunk i's received rows by expert, unless they always arrive sorted.

        name: name of the buffer in which the rows arrive, without the chunk.
        target: the buffer for the sorted rows.
        i: index of the chunk.
        """
        if self.memory.may_sort:
            condition = chunk_number(ChunkNumber.SORTED, i)
            self.add(
                Kernel.TAKE, self.memory.buffer(name, i), self.memory.regroup(i), target, condition=condition
            )

    def sort_back(self, name: str, i: int) -> None:
        """Appends a record that puts chunk i's results back into the order in which their rows arrived.

        Appends nothing if the experts' products store results in this order, or if rows always arrive sorted.

        name: name of the buffer for results in the order of arrival, without the chunk.
        i: index of the chunk.
        """
        if self.memory.may_sort and not self.shape.places:
            condition = chunk_number(ChunkNumber.SORTED, i)
            source = self.memory.buffer(f"{name}_sorted", i)
            target = self.memory.buffer(name, i)
            self.add(Kernel.PUT, source, self.memory.regroup(i), target, condition=condition)

    def exchange(self, source: Operand, target: Operand, line: int, *, back: bool, condition: int) -> None:
        """Appends an all-to-all.

        source, target: the rows to send, and the memory for the rows that are received.
        line: index of a line of the table of row counts (`Record.send_line`): how many rows dispatch sends to
            each rank. The next line says how many rows dispatch receives from each rank.
        back: True if the rows return from the experts. This rank then sends as many rows as the second line
            says, and receives as many rows as the first line says.
        condition: the condition of the record. Some exchanges have two records, one for each form of the
            rows. Exactly one of their conditions is 1, so every rank takes part in the same number of
            exchanges.
        """
        self.add(
            Kernel.EXCHANGE,
            source,
            target,
            condition=condition,
            send_line=line + back,
            recv_line=line + 1 - back,
        )

    # ---- the records of each kind of task. Each method appends the records of one task of chunk i

    def gather(self, i: int) -> None:
        """Task G: the record copies tokens to the send buffer of chunk i; in backward, gradients of T_O."""
        source = Base.T_I if self.memory.is_forward else Base.DT_O
        self.place_once(source, "send", i, ChunkNumber.ROW_BEGIN)

    def gather_again(self, i: int) -> None:
        """Task GI: the records copy the tokens of chunk i that backward sends again.

        The method also appends the records with which some later tasks would begin (G or LM,
        `Schedule.joint_copies`), so that one launch makes all these copies.
        """
        self.place_once(Base.T_I, "send_again", i, ChunkNumber.ROW_BEGIN)
        for task in self.schedule.joint_copies[f"{Kind.GATHER_AGAIN.value}{i}"]:
            if task.kind is Kind.GATHER:
                self.gather(task.chunk)
            else:
                self.copy_piece(task.chunk)

    def copy_piece(self, i: int) -> None:
        """Appends two copies for the rows of chunk i that stay: of tokens, and of gradients of T_O.

        Backward's tasks GI, LM and L call this method. Each copy is appended only once. Nothing is appended
        unless the fate of T_DI, the experts' input, is "communicate". Only task L reads the gradients. They
        may be copied before L, because the last reader of their ring slot is an earlier task of the compute
        lane.
        """
        if self.memory.dispatched == "communicate":
            self.place_once(Base.T_I, "T_DI_L", i, ChunkNumber.LOCAL_ROW_BEGIN)
            self.place_once(Base.DT_O, "dT_DO_L", i, ChunkNumber.LOCAL_ROW_BEGIN)

    def dispatch(self, i: int) -> None:
        """Task S: the record sends the rows of chunk i to the ranks of their experts.

        If forward keeps T_DI, there is a record for each form that the rows may have: rows that must be
        sorted arrive in a ring slot, other rows in the memory that backward reads.
        """
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
        """Task SI: the record sends the experts' input (T_DI) of chunk i again, in backward."""
        send = self.memory.buffer("send_again", i)
        self.exchange(send, self.memory.buffer("T_DI", i), 2 * i, back=False, condition=CallNumber.ONE)

    def combine(self, i: int) -> None:
        """Task R: the record sends the results of chunk i back to the tokens' ranks."""
        leaving = self.memory.buffer("T_DO" if self.memory.is_forward else "dT_DI", i)
        self.exchange(
            leaving, self.memory.part_of_home(i, stays=False), 2 * i, back=True, condition=CallNumber.ONE
        )

    def output(self, i: int) -> None:
        """Task O: the record sums the results of each token of chunk i."""
        home = self.memory.buffer("home" if self.memory.is_forward else "dhome", i)
        out = self.memory.tokens(Base.T_O if self.memory.is_forward else Base.DT_I, i)
        first_row = chunk_number(ChunkNumber.ROW_BEGIN, i)
        self.add(Kernel.SUM, home, self.memory.position(i), out, condition=out.rows, first=first_row)

    def weights(self, _: int) -> None:
        """Task P: the record sends the routing weights of all chunks; in backward it returns their gradients.

        If rows may come from several ranks, there is a record for each form, because the received weights are
        in different memory if they must be sorted.
        """
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
        """Appends a record that sorts the received routing weights of all chunks by chunk and expert.

        In backward the record puts the gradients of these weights back into the order in which the weights
        arrived. Appends nothing if rows always arrive sorted.
        """
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
        """Task L: the records compute the rows of chunk i that stay; in backward, the rows' gradients."""
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
        """Task C: the records compute the received rows of chunk i; in backward, the rows' gradients."""
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
        """Appends the two products of the experts in forward, for the rows of one unit.

        unit: the rows.
        out: memory for the results.
        place: for row r of the unit, the index of the row of ``out`` in which its result is stored; an
            operand with address 0 if this index is r for all rows (`PassOperands.result_of`).
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
        """Task M: the records recompute the hidden activation T_M of chunk i's received rows.

        place: "_L" for the rows that stay; the task is then LM.
        """
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
        """Appends the products that compute the gradients of a unit's rows and of their routing weights.

        unit: the rows.
        grad: the gradient of the unit's results. If `LayerShape.weighs_active` is False, a further record
            multiplies it by the routing weights in place.
        out: memory for the gradients of the rows.
        place: for row r of the unit, the index of the row of ``out`` in which its gradient is stored; an
            operand with address 0 if this index is r for all rows (`PassOperands.result_of`).
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
        """Task W: the records add the gradients of parameters that come from chunk i's received rows.

        place: "_L" for the rows that stay; the task is then LW.
        """
        # The sums are uninitialised before the first of these tasks. It overwrites them, so it must run even
        # if it has no rows. So its condition is no row count: for rows that stay it is ONE, and for received
        # rows the flag of the form, which is 1 for exactly one of the two forms.
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
        """Task DI: the records copy T_DI of chunk i's received rows to the host, sorted by expert.

        place: "_L" for the rows that stay; the task is then LDI.
        """
        for unit in self.memory.units(i, place):
            source = self.memory.rows_for_experts(unit)
            target = self.memory.saved("T_DI", unit)
            self.add(Kernel.COPY, source, target, condition=unit.condition)

    def copy_hidden_out(self, i: int, place: str = "") -> None:
        """Task DM: the record copies T_M of chunk i's received rows to the host.

        place: "_L" for the rows that stay; the task is then LDM.
        """
        unit = self.memory.units(i, place)[-1]  # both forms have T_M in the same memory
        self.add(
            Kernel.COPY, self.memory.hidden_of(unit), self.memory.saved("T_M", unit), condition=unit.rows
        )

    def copy_rows_in(self, i: int, place: str = "") -> None:
        """Task HI: the record copies T_DI of chunk i's received rows back to the device.

        place: "_L" for the rows that stay; the task is then LHI.
        """
        unit = self.memory.units(i, place)[-1]  # on the host, rows of both forms are in the same memory
        target = self.memory.buffer(f"T_DI{place}", i)
        self.add(Kernel.COPY, self.memory.saved("T_DI", unit), target, condition=unit.rows)

    def copy_hidden_in(self, i: int, place: str = "") -> None:
        """Task HM: the record copies T_M of chunk i's received rows back to the device.

        place: "_L" for the rows that stay; the task is then LHM.
        """
        unit = self.memory.units(i, place)[-1]
        self.add(
            Kernel.COPY, self.memory.saved("T_M", unit), self.memory.hidden_of(unit), condition=unit.rows
        )

    # ---- the whole pass

    def actions(self) -> dict[Kind, Callable[[int], None]]:
        """Returns, for each kind of task that a program can have, the method that appends its records."""
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
        """Appends the records of all tasks, sets their waits and signals, and returns the program."""
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
            # Several tasks may share an event (`_signal`). A lane waits for the same event only once.
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
        """Returns the event that the last record of a lane signals; gives the record a new event if needed.

        A task appends no record if an earlier task of its lane has already copied its rows (`place_once`).
        The last record of the lane then belongs to the earlier task, so both tasks have the same event.
        """
        last = max(place for place, record in enumerate(self.records) if record.lane is lane)
        if self.records[last].signal < 0:
            self.records[last] = replace(self.records[last], signal=self.num_events)
            self.num_events += 1
        return self.records[last].signal

    def _begin(self) -> None:
        """Appends the records before the first task.

        Event `BEGIN`: the other lanes may begin only when the compute lane has reached the pass, because the
        caller has computed the inputs on the compute lane. Event `HOST_IS_READ`: copies to the host must wait
        until earlier passes have ended their copies from the host, which may still read the same host memory.
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

        waits: the events of the tasks for which the first task waits. If there are any, the lane need not
            wait for `BEGIN`, because those tasks run after `BEGIN`.
        """
        needed = waits or [BEGIN]
        return [HOST_IS_READ, *needed] if lane is Lane.COPY_OUT else needed


def _with_end(schedule: Schedule) -> Schedule:
    """Returns the schedule with one more task on the compute lane, which waits for all other lanes.

    So everything that the caller enqueues later on the compute lane runs after the whole pass.
    """
    last_of_lane = {task.lane: task.name for task in schedule.tasks}
    chunk = 1 + max(task.chunk for task in schedule.tasks)  # no other task has it, so the task's name is new
    end = replace(make_task(Kind.OUTPUT, chunk, [], []), waits=tuple(last_of_lane.values()))
    return replace(schedule, tasks=(*schedule.tasks, end))


def compile_pass(schedule: Schedule, shape: LayerShape, restore: Restore | None) -> PassProgram:
    """Compiles the schedule of a pass into a program.

    schedule: the tasks of the pass, whose chunks take turns in ring slots
        (`pmoe.schedule.ring_buffers.rotating`).
    shape: the sizes and settings of the layer.
    restore: the restore pair with which the schedule was built; None for a forward pass without a backward
        pass.

    Raises ValueError, with the task's name, for a task that a program cannot have. Layers and calls with such
    tasks are refused earlier, by `pmoe.decide.program_choice`.
    """
    assert schedule.slots, "a program's chunks take turns in ring slots"
    assert restore is None or not restore.is_narrow, "a program keeps tensors as they are"
    return _PassCompiler(schedule, shape, restore).compile()
