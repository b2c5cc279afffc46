"""Pass programs in tests: the compiled interpreter, the order of recorded calls, and calls that compute.

The interpreter runs over a backend that writes its calls down (`bench.recorded_program`). The recorded calls
then compute in memory of the test, one after another, in any order that lanes and events allow. So a wait
that is missing changes results, as it would on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.recorded_program import (
    CUDA,
    FLAGS,
    Issue,
    Memory,
    RecordedProgram,
    Signal,
    Wait,
    compile_library,
    load_library,
)
from pmoe.comm.base import all_to_all
from pmoe.comm.failures import wait_for
from pmoe.comm.ranks import Ranks
from pmoe.decide import program_choice
from pmoe.engine.passes.base import Inputs, plan_schedule
from pmoe.engine.plan.plan import Plan
from pmoe.experts.base import row_dot
from pmoe.experts.products import GradientSum, RowGroups, expert_input_gradient, expert_product
from pmoe.experts.stacked import StackedExperts
from pmoe.ordering.sorted import SortedOrder
from pmoe.program.compiler import BEGIN, NO_TASK, compile_pass
from pmoe.program.layer_shape import LayerShape
from pmoe.program.records import Base, Kernel, PassProgram
from pmoe.runners.pipeline import PipelineRunner
from pmoe.schedule.tasks import Lane, Schedule
from tests.kept import digest, kept

Calls = list[Wait | Signal | Issue]


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the interpreter over the recording backend, compiled once for its sources."""
    name = f"program-{digest([*FLAGS, *sorted((CUDA / 'program').iterdir())])}.so"
    return load_library(kept(name, compile_library))


# ---- the order of calls


@dataclass
class Clocks:
    """The partial order of recorded calls, by vector clocks.

    before: for each call (`Issue`), by its place in the list: how many calls of each lane have surely ended
        when it starts. The signal that the pass has begun counts as a call.
    place: the number of each call on its lane, from 1.
    at_end: the calls that have surely ended when the caller's next work on the compute lane starts.
    """

    before: dict[int, dict[Lane, int]]
    place: dict[int, int]
    at_end: dict[Lane, int]

    @staticmethod
    def of(calls: Calls) -> Clocks:
        ended: dict[Lane, dict[Lane, int]] = {lane: {} for lane in Lane}
        at_signal: dict[int, dict[Lane, int]] = {}
        clocks = Clocks({}, {}, ended[Lane.COMPUTE])
        for at, call in enumerate(calls):
            clock = ended[call.lane]
            if isinstance(call, Wait):
                for lane, count in at_signal.get(call.event, {}).items():
                    clock[lane] = max(clock.get(lane, 0), count)
                continue
            if isinstance(call, Issue) or call.event == BEGIN:
                clocks.before[at] = clock.copy()
                clock[call.lane] = clocks.place[at] = clock.get(call.lane, 0) + 1
            if isinstance(call, Signal):
                at_signal[call.event] = clock.copy()
        return clocks


def order_problem(calls: Calls, program: PassProgram, schedule: Schedule) -> str | None:
    """Returns an order that the calls of a pass do not ensure, though they must; None if there is none.

    A call of a task must follow all calls of the tasks for which the schedule lets it wait. All tasks must
    follow the calls before them on the compute lane, and end before the pass ends.
    """
    clocks = Clocks.of(calls)
    names = [task.name for task in schedule.tasks]
    of_task: dict[str, list[int]] = {}
    for at, call in enumerate(calls):
        if isinstance(call, Issue):
            task = program.records[call.record].task
            of_task.setdefault("" if task == NO_TASK else names[task], []).append(at)
    first_of_tasks = min((places[0] for name, places in of_task.items() if name), default=len(calls))
    of_task["begin"] = [at for at in of_task.pop("", []) if at < first_of_tasks]
    of_task["begin"] += [at for at in clocks.place if isinstance(calls[at], Signal)]

    def follows(later: int, earlier: int) -> bool:
        lane = calls[earlier].lane
        return clocks.before[later].get(lane, 0) >= clocks.place[earlier]

    for task in schedule.tasks:
        for waited in (*task.waits, "begin"):
            for later in of_task.get(task.name, ()):
                for earlier in of_task.get(waited, ()):
                    if not follows(later, earlier):
                        return f"{task.name} does not wait for {waited}"
    for at in clocks.place:
        if clocks.at_end.get(calls[at].lane, 0) < clocks.place[at]:
            return f"the pass does not wait for {calls[at]}"
    return None


def in_some_order(calls: Calls, generator: random.Random) -> Iterator[Issue]:
    """Yields the calls in a random order that lanes and events allow.

    Half of the time the lane that ran last goes on while it can, so that lanes get far ahead of each other.
    """
    queues: dict[Lane, list[Wait | Signal | Issue]] = {}
    for call in calls:
        queues.setdefault(call.lane, []).append(call)
    left = {lane: iter(queue) for lane, queue in queues.items()}
    heads: dict[Lane, Any] = {lane: next(queue) for lane, queue in left.items()}
    signalled = set[int]()
    last: Lane | None = None
    while heads:
        able = [
            lane
            for lane, call in heads.items()
            if not (isinstance(call, Wait) and call.event not in signalled)
        ]
        assert able, "lanes wait for each other"
        lane = last if last in able and generator.random() < 0.8 else generator.choice(able)
        last = lane
        call = heads[lane]
        if isinstance(call, Signal):
            signalled.add(call.event)
        elif isinstance(call, Issue):
            yield call
        following = next(left[lane], None)
        if following is None:
            del heads[lane]
        else:
            heads[lane] = following


# ---- calls that compute


def tensor_at(memory: Memory, dtype: torch.dtype) -> Tensor:
    """Returns the memory of an operand as a tensor (rows, columns)."""
    item_bytes = dtype.itemsize
    if not memory.rows * memory.columns:
        return torch.empty(memory.rows, memory.columns, dtype=dtype)
    num_bytes = (memory.rows - 1) * memory.row_bytes + memory.columns * item_bytes
    held = (ctypes.c_char * num_bytes).from_address(memory.address)
    flat = torch.frombuffer(held, dtype=dtype)
    return flat.as_strided((memory.rows, memory.columns), (memory.row_bytes // item_bytes, 1))


Exchange = Callable[[Tensor, Sequence[int], Tensor, Sequence[int]], None]
"""exchange(rows, rows to each rank, out, rows from each rank): an all-to-all that has ended at its return."""


@dataclass
class Computing:
    """Computes recorded calls on the CPU, with the operations of the engine and of `pmoe.experts`.

    experts: the layer's experts, for their nonlinearity and sizes.
    exchange: the all-to-all.
    """

    experts: StackedExperts
    exchange: Exchange
    dtype: torch.dtype = torch.float64

    def run(self, call: Issue) -> None:
        getattr(self, f"_{call.kernel.name.lower()}")(call, *call.operands)

    def rows(self, *memories: Memory) -> list[Tensor]:
        return [tensor_at(memory, self.dtype) for memory in memories]

    def numbers(self, memory: Memory) -> Tensor:
        return tensor_at(memory, self.dtype)[:, 0]

    def index(self, memory: Memory) -> Tensor:
        return tensor_at(memory, torch.int32).long()

    def groups(self, ends: Memory) -> RowGroups:
        ends_E = self.index(ends)[0]
        return RowGroups(counts=tuple((ends_E - torch.cat([ends_E.new_zeros(1), ends_E[:-1]])).tolist()))

    def weight(self, memory: Memory, name: str) -> Tensor:
        return tensor_at(memory, self.dtype).view(self.experts.shapes()[name])

    def bias(self, memory: Memory) -> Tensor | None:
        if not memory.address:
            return None
        return tensor_at(memory, self.dtype).view(self.experts.num_local_experts, -1)

    def _copy(self, _: Issue, source: Memory, target: Memory) -> None:
        rows, out = self.rows(source, target)
        out.copy_(rows)

    def _exchange(self, call: Issue, source: Memory, target: Memory) -> None:
        rows, out = self.rows(source, target)
        self.exchange(rows, call.send, out, call.recv)

    def _take(self, _: Issue, source: Memory, index: Memory, target: Memory) -> None:
        rows, out = self.rows(source, target)
        out.copy_(rows[self.index(index)[:, 0]])

    def _put(self, _: Issue, source: Memory, index: Memory, target: Memory) -> None:
        rows, out = self.rows(source, target)
        out[self.index(index)[:, 0]] = rows

    def _place(self, call: Issue, tokens: Memory, position: Memory, target: Memory) -> None:
        x_TM, out = self.rows(tokens, target)
        row_TK = self.index(position) - call.first
        token_N, choice_N = torch.where((row_TK >= 0) & (row_TK < out.shape[0]))
        assert token_N.numel() == out.shape[0]
        out[row_TK[token_N, choice_N]] = x_TM[token_N]

    def _sum(self, call: Issue, source: Memory, position: Memory, target: Memory) -> None:
        rows, out = self.rows(source, target)
        SortedOrder().restore(rows, self.index(position) - call.first, out)

    def _hidden(
        self, _: Issue, source: Memory, w1: Memory, b1: Memory, hidden: Memory, active: Memory, ends: Memory
    ) -> None:
        rows, active_NH = self.rows(source, active)
        hidden_NG = torch.empty(hidden.rows, hidden.columns, dtype=self.dtype)  # where nothing reads it
        if hidden.address:
            (hidden_NG,) = self.rows(hidden)
        expert_product(rows, self.weight(w1, "w1"), self.groups(ends), self.bias(b1), out=hidden_NG)
        self.experts.activate(hidden_NG, active_NH)

    def _output(
        self, _: Issue, active: Memory, w2: Memory, b2: Memory, weight: Memory, place: Memory, target: Memory,
        ends: Memory,
    ) -> None:  # fmt: skip
        active_NH, out = self.rows(active, target)
        w2_EMH, b2_EM = self.weight(w2, "w2"), self.bias(b2)
        result = torch.empty_like(out)
        expert_product(active_NH, w2_EMH, self.groups(ends), b2_EM, out=result, scale_N=self.numbers(weight))
        self._store(result, place, out)

    def _store(self, result: Tensor, place: Memory, out: Tensor) -> None:
        """Stores row r of a result as row place[r] of ``out``; as row r without places."""
        out[self.index(place)[:, 0] if place.address else slice(None)] = result

    def _recompute(
        self, _: Issue, source: Memory, w1: Memory, b1: Memory, hidden: Memory, ends: Memory
    ) -> None:
        rows, hidden_NG = self.rows(source, hidden)
        expert_product(rows, self.weight(w1, "w1"), self.groups(ends), self.bias(b1), out=hidden_NG)

    def _hidden_gradient(
        self, call: Issue, grad: Memory, w2: Memory, hidden: Memory, weight: Memory, grad_hidden: Memory,
        active: Memory, dots: Memory, ends: Memory,
    ) -> None:  # fmt: skip
        grad_NM, hidden_NG, grad_NG, active_NH = self.rows(grad, hidden, grad_hidden, active)
        grad_active_NH = grad_NG[:, : active_NH.shape[1]]
        expert_input_gradient(grad_NM, self.weight(w2, "w2"), self.groups(ends), out=grad_active_NH)
        block_NH = torch.empty(active_NH.shape, dtype=self.dtype)
        self.experts.activate(hidden_NG, block_NH)
        self.numbers(dots).copy_(row_dot(block_NH, grad_active_NH))
        weight_N1 = self.numbers(weight).unsqueeze(1)
        grad_active_NH.mul_(weight_N1)
        self.experts.activation_gradient(grad_NG, hidden_NG)
        active_NH.copy_(block_NH * weight_N1 if call.flag else block_NH)

    def _bias_dots(self, _: Issue, grad: Memory, b2: Memory, dots: Memory, ends: Memory) -> None:
        b2_EM = self.bias(b2)
        assert b2_EM is not None
        (grad_NM,) = self.rows(grad)
        groups = self.groups(ends)
        for expert, grad_nM, dot_n in groups.rows_by_expert(grad_NM, self.numbers(dots)):
            dot_n.addmv_(grad_nM, b2_EM[expert])

    def _input_gradient(
        self, _: Issue, grad: Memory, w1: Memory, place: Memory, target: Memory, ends: Memory
    ) -> None:
        grad_NG, out = self.rows(grad, target)
        result = torch.empty_like(out)
        expert_input_gradient(grad_NG, self.weight(w1, "w1"), self.groups(ends), out=result)
        self._store(result, place, out)

    def _scale(self, _: Issue, weight: Memory, grad: Memory) -> None:
        self.rows(grad)[0].mul_(self.numbers(weight).unsqueeze(1))

    def _weight_gradient(self, call: Issue, grad: Memory, rows: Memory, total: Memory, ends: Memory) -> None:
        grad_NO, rows_NI = self.rows(grad, rows)
        shape = (self.experts.num_local_experts, grad_NO.shape[1], rows_NI.shape[1])
        self._sum_at(call, total, shape).add_weight(grad_NO, rows_NI, self.groups(ends))

    def _bias_gradient(self, call: Issue, grad: Memory, total: Memory, ends: Memory) -> None:
        (grad_NO,) = self.rows(grad)
        shape = (self.experts.num_local_experts, grad_NO.shape[1])
        self._sum_at(call, total, shape).add_bias(grad_NO, self.groups(ends))

    def _sum_at(self, call: Issue, memory: Memory, shape: tuple[int, ...]) -> GradientSum:
        total = GradientSum(tensor_at(memory, self.dtype).view(shape), 1)
        total.total = tensor_at(memory, self.dtype).view(shape)
        total.is_empty = not call.flag
        return total


WITH_ENDS = frozenset(
    {Kernel.HIDDEN, Kernel.OUTPUT, Kernel.RECOMPUTE, Kernel.HIDDEN_GRADIENT, Kernel.BIAS_DOTS}
    | {Kernel.INPUT_GRADIENT, Kernel.WEIGHT_GRADIENT, Kernel.BIAS_GRADIENT}
)
"""Kernels whose last operand says where each expert's rows end."""


@dataclass
class BoundedComputing(Computing):
    """Computes the recorded calls of bounded programs (`pmoe.program.bounded`): only rows that exist.

    program: returns the program of the calls.
    table: `pmoe.program.bounded.DeviceRows.rows_by_rank`.
    """

    program: Callable[[], PassProgram] | None = None
    table: Tensor | None = None

    def run(self, call: Issue) -> None:
        if call.kernel in WITH_ENDS:
            num_rows = call.operands[0].rows
            total = int(self.index(call.operands[-1])[0, -1])
            assert total <= num_rows
            call = replace(
                call,
                operands=tuple(
                    replace(each, rows=total) if each.rows == num_rows else each for each in call.operands
                ),
            )
        super().run(call)

    def _exchange(self, call: Issue, source: Memory, target: Memory) -> None:
        assert self.program is not None and self.table is not None
        record = self.program().records[call.record]
        send, recv = self.table[record.send_line].tolist(), self.table[record.recv_line].tolist()
        rows, out = self.rows(source, target)
        self.exchange(rows[: sum(send)], send, out[: sum(recv)], recv)

    def indexed(self, memory: Memory, index: Memory) -> Memory:
        """Returns a memory that an index reads or writes. Rows that do not exist have one line more there."""
        index_N = self.index(index)
        return replace(memory, rows=int(index_N.max()) + 1) if index_N.numel() else memory

    def _take(self, call: Issue, source: Memory, index: Memory, target: Memory) -> None:
        super()._take(call, self.indexed(source, index), index, target)

    def _put(self, call: Issue, source: Memory, index: Memory, target: Memory) -> None:
        super()._put(call, source, index, self.indexed(target, index))

    def _place(self, call: Issue, x: Memory, position: Memory, target: Memory) -> None:
        x_TM, out = self.rows(x, target)
        row_TK = self.index(position) - call.first
        token_N, choice_N = torch.where((row_TK >= 0) & (row_TK < out.shape[0]))
        out[row_TK[token_N, choice_N]] = x_TM[token_N]

    def _sum(self, call: Issue, source: Memory, position: Memory, target: Memory) -> None:
        _, out = self.rows(source, target)
        exists_TK = self.index(position) >= 0
        if exists_TK.all():
            super()._sum(call, source, position, target)
        else:
            assert not exists_TK.any(), "either all rows fit, or none exists"
            out.zero_()


# ---- layers whose passes are programs


@dataclass
class CpuCut:
    """The numbers of a call, which `CpuProgram` keeps until its next call."""

    arena_bytes: int


class CpuProgram:
    """A program in the interpreter, whose recorded calls compute on the CPU (`pmoe.program.backend`).

    computing: computes the calls.
    seed: seed of the orders in which calls are computed. Each order is one that lanes and events allow.
    lender: has memory for ring slots (``take_arena``, ``give_back_arena``); None: the caller allocates it.
    """

    def __init__(
        self, program: PassProgram, schedule: Schedule, computing: Computing, seed: int, lender: Any = None
    ) -> None:
        self.lender = lender
        self.program = program
        self.schedule = schedule
        self.computing = computing
        self.recorded = RecordedProgram(library(), program.words())
        self.generator = random.Random(seed)

    def cut(self, tokens: int, rank: int, send_nWE: Tensor, recv_nWE: Tensor) -> CpuCut:
        counts = (each.flatten().tolist() for each in (send_nWE, recv_nWE))
        return CpuCut(self.recorded.cut(tokens, rank, *counts))

    def workspace_bytes(self, cut: CpuCut) -> int:
        return 0

    def take_arena(self, cut: CpuCut) -> int:
        return 0 if self.lender is None else int(self.lender.take_arena(cut.arena_bytes))

    def give_back_arena(self) -> None:
        self.lender.give_back_arena()

    def run(
        self,
        cut: CpuCut,
        bases: Mapping[Base, int],
        streams: Mapping[Lane, int],
        workspace: int,
        device_rows: int = 0,
    ) -> None:
        calls = self.recorded.run(bases)
        assert order_problem(calls, self.program, self.schedule) is None
        issue(self, calls, device_rows)


def issue(loaded: CpuProgram, calls: Calls, device_rows: int) -> None:
    """Computes the recorded calls of a pass. A CUDA graph's stand-in (`tests.captured`) repeats this.

    device_rows: the address of the rows that travel, if the host does not know them; else 0.
    """
    computing = loaded.computing
    if device_rows:
        program = loaded.program
        lines = Memory(device_rows, 2 * program.chunks + 2, program.ranks, 8 * program.ranks)
        computing = BoundedComputing(
            computing.experts, computing.exchange, computing.dtype, lambda: program,
            tensor_at(lines, torch.int64),
        )  # fmt: skip
    for call in in_some_order(calls, loaded.generator):
        computing.run(call)


class CpuBackend:
    """Runs programs of layers in float64 on the CPU, over gloo.

    seed: seed of the orders in which calls are computed.
    loaded: the programs that were loaded.
    lender: has memory for ring slots (`CpuProgram`).
    """

    device_type = "cpu"
    lender: Any = None

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.loaded: list[CpuProgram] = []

    def refusal(self, shape: LayerShape, rows: Tensor) -> str | None:
        return None if rows.dtype == torch.float64 else f"tests compute programs in float64: {rows.dtype}"

    def connect(self, ranks: Ranks, device: torch.device, *, heaps: bool) -> Exchange:
        def exchange(rows: Tensor, send: Sequence[int], out: Tensor, recv: Sequence[int]) -> None:
            assert ranks.group is not None
            wait_for(all_to_all(rows.contiguous(), send, out, recv, ranks.group), ranks.group)

        return exchange

    def bounded_refusal(self, communicator: Exchange) -> str | None:
        return None

    def streams(self, device: torch.device, schedule: Schedule) -> Mapping[Lane, int]:
        return {}

    def load(
        self,
        program: PassProgram,
        schedule: Schedule,
        *,
        experts: StackedExperts,
        dtype: torch.dtype,
        device: torch.device,
        communicator: Exchange | None,
    ) -> CpuProgram:
        computing = Computing(experts, communicator or copy_own_rows, dtype)
        loaded = CpuProgram(program, schedule, computing, self.seed, self.lender)
        self.loaded.append(loaded)
        return loaded


def copy_own_rows(rows: Tensor, send: Sequence[int], out: Tensor, recv: Sequence[int]) -> None:
    """The all-to-all of a single rank that sends rows to itself."""
    out.copy_(rows)


@contextlib.contextmanager
def on_cpu(backend: CpuBackend | None = None) -> Iterator[CpuBackend]:
    """Lets layers with ``Switches(program=True)`` run as programs on the CPU in the block."""
    backend = backend or CpuBackend()
    with mock.patch.dict(program_choice.BACKENDS, {"cpu": backend}):
        yield backend


# ---- a call of a layer by programs


@dataclass
class EngineCall:
    """What the engine computed in one call of a layer.

    plan, inputs: the plan and the tensors of the call.
    y_TM: the layer's output.
    grad_TM: its gradient.
    gradients: the gradients of ``inputs.all``.
    """

    plan: Plan
    inputs: Inputs
    y_TM: Tensor
    grad_TM: Tensor | None = None
    gradients: list[Tensor | None] = field(default_factory=list)


def engine_call(run: Callable[[], object]) -> EngineCall:
    """Runs a forward and a backward pass of a layer by the engine. Returns what it computed."""
    seen: list[EngineCall] = []
    original = PipelineRunner.forward

    def forward(self: PipelineRunner, inputs: Inputs, *, keep: bool) -> Any:
        y_TM, saved = original(self, inputs, keep=keep)
        assert saved is not None
        call = EngineCall(self.plan, inputs.like([detached(each) for each in inputs.all]), y_TM.clone())
        seen.append(call)

        def backward(tensors: Any, wanted: Any, grad_TM: Tensor) -> Any:
            call.grad_TM = grad_TM.clone()
            found = saved.backward(tensors, wanted, grad_TM)
            call.gradients = [detached(each) for each in found]
            return found

        return y_TM, type(saved)(saved.tensors, backward)

    with mock.patch.object(PipelineRunner, "forward", forward):
        run()
    (call,) = seen
    return call


def detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


@dataclass
class ProgramCall:
    """Both passes of one call of a layer by programs.

    call: the same call by the engine, whose plan and tensors are used.
    rank: this rank.
    send, recv: the row counts, (n, W, E_local).
    exchange: the all-to-all.
    seed: seed of the order in which calls are computed.
    """

    call: EngineCall
    rank: int
    send: Tensor
    recv: Tensor
    exchange: Exchange
    seed: int = 0

    def __post_init__(self) -> None:
        plan, inputs = self.call.plan, self.call.inputs
        self.shape = self.layer_shape()
        row = inputs.x_TM.dtype
        scalar = inputs.weight_TK.dtype
        total = torch.float32 if row.itemsize == 2 else row
        self.generator = random.Random(self.seed)
        self.held: dict[Base, Tensor] = {}
        self.computing = Computing(plan.modules.experts, self.exchange)  # type: ignore[arg-type]
        pass_plan = plan.forward
        pairs = [] if pass_plan.weights is None else [pass_plan.weights.slot]
        pairs += [pass_plan.slot[piece.rows] for piece in pass_plan.pieces]
        regroups = [
            torch.arange(chunk.received.num_rows) if chunk.regroup is None else chunk.regroup
            for chunk in pass_plan.chunks
        ]
        num_received = sum(index.shape[0] for index in regroups)
        message = None if pass_plan.weights is None else pass_plan.weights.regroup
        num_local = sum(piece.groups.num_rows for piece in pass_plan.pieces)
        columns = self.shape.columns.hidden
        width = self.shape.d_model
        names = plan.modules.experts.operand_names  # type: ignore[attr-defined]
        parameters = dict(zip(names, inputs.parameters, strict=True))
        self.put(T_I=inputs.x_TM, WEIGHT=inputs.weight_TK)
        self.put(**{name.upper(): value for name, value in parameters.items()})
        self.put(
            **{f"D{name.upper()}": unset(*value.shape, dtype=total) for name, value in parameters.items()}
        )
        self.put(POSITION=pass_plan.position.int(), PAIR_BY_NUMBER=torch.cat(pairs).int())
        self.put(REGROUP=torch.cat(regroups).int())
        if message is not None:
            self.put(REGROUP_WEIGHTS=message.int())
        rows = self.held[Base.PAIR_BY_NUMBER].shape[0]
        for kind in ("WEIGHT", "DWEIGHT"):
            by_number = unset(rows, dtype=scalar)
            received = unset(num_received, dtype=scalar)
            self.put(**{f"{kind}_BY_NUMBER": by_number, f"{kind}_RECEIVED": received})
        self.put(WEIGHT_ARRIVED=unset(num_received, dtype=scalar))
        self.put(DWEIGHT_LEAVING=unset(num_received, dtype=scalar))
        self.put(SAVED_T_DI=unset(num_received, width, dtype=row))
        self.put(SAVED_T_DI_L=unset(num_local, width, dtype=row))
        self.put(SAVED_T_M=unset(num_received, columns, dtype=row))
        self.put(SAVED_T_M_L=unset(num_local, columns, dtype=row))
        units = [chunk.received for chunk in pass_plan.chunks if self.shape.sends]
        units += [piece.groups for piece in pass_plan.pieces]
        self.put(ENDS=torch.stack([groups.ends_E for groups in units]))

    def layer_shape(self) -> LayerShape:
        inputs = self.call.inputs
        return LayerShape.of(self.call.plan.modules, inputs.x_TM, inputs.weight_TK)

    def put(self, **tensors: Tensor) -> None:
        """Places tensors at the bases of these names."""
        self.held |= {Base[name]: tensor.contiguous() for name, tensor in tensors.items()}

    def compiled(self, schedule: Schedule) -> PassProgram:
        return compile_pass(schedule, self.shape, self.call.plan.restore)

    def addresses(self) -> dict[Base, int]:
        # A tensor without numbers has no address, and its operands have no rows.
        return {base: tensor.data_ptr() for base, tensor in self.held.items()}

    def run(self, direction: str) -> None:
        """Runs one pass: compiles its schedule, lets the interpreter issue its calls, and computes these."""
        schedule = plan_schedule(self.call.plan, direction)
        self.program = self.compiled(schedule)
        recorded = RecordedProgram(library(), self.program.words())
        counts = [each.flatten().tolist() for each in (self.send, self.recv)]
        arena_bytes = recorded.cut(self.call.inputs.x_TM.shape[0], self.rank, *counts)
        self.put(ARENA=unset(arena_bytes // 8))
        self.calls = recorded.run(self.addresses())
        assert order_problem(self.calls, self.program, schedule) is None
        for call in in_some_order(self.calls, self.generator):
            self.computing.run(call)

    def forward(self) -> Tensor:
        self.put(T_O=unset(*self.call.y_TM.shape, dtype=self.call.y_TM.dtype))
        self.run("forward")
        return self.held[Base.T_O]

    def backward(self) -> list[Tensor]:
        """Returns the gradients of x, of the routing weights, and of the experts' parameters."""
        assert self.call.grad_TM is not None
        weight_TK = self.call.inputs.weight_TK
        self.put(DT_O=self.call.grad_TM, DT_I=unset(*self.call.y_TM.shape, dtype=self.call.y_TM.dtype))
        self.put(DWEIGHT=unset(*weight_TK.shape, dtype=weight_TK.dtype))
        self.run("backward")
        bases = [Base.DT_I, Base.DWEIGHT, Base.DW1, Base.DW2, Base.DB1, Base.DB2]
        return [self.held[base] for base in bases if base in self.held]


def unset(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns memory of NaN: a number that is read before it is written spoils the result."""
    return torch.full(shape, float("nan"), dtype=dtype)


def check_against_engine(program: ProgramCall, told: object) -> None:
    """Compares both passes with the engine's, to the bit."""
    call = program.call
    assert torch.equal(program.forward(), call.y_TM), (told, "output")
    of_parameters = call.gradients[3 : 3 + len(call.inputs.parameters)]
    expected = [call.gradients[0], call.gradients[1], *of_parameters]
    for number, (got, wanted) in enumerate(zip(program.backward(), expected, strict=True)):
        assert wanted is not None and torch.equal(got, wanted), (told, "gradient", number)


def own_counts(call: EngineCall, expert_TK: Tensor, num_experts: int, ranks: int) -> Tensor:
    """Returns this rank's row counts, (n, W, E_local), from the experts that its tokens chose."""
    n = len(call.plan.forward.chunks)
    counts = torch.zeros(n, num_experts, dtype=torch.int64)
    for i, chunk in enumerate(call.plan.forward.chunks):
        counts[i] = torch.bincount(expert_TK[chunk.tokens].reshape(-1), minlength=num_experts)
    return counts.view(n, ranks, -1)
