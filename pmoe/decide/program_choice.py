"""Decides which calls of a layer with ``Switches(program=True)`` run as programs.

A program is a forward or backward pass that was compiled into a list of kernel launches and collectives. C++
code issues this list without Python (`pmoe.program`). The engine (`pmoe.engine`) is Python code that can run
every call. If a call cannot run as programs on some rank, the engine runs it on all ranks. pmoe then warns
once for each reason.

Three functions look for reasons against programs, in the order of the table. Each gives the same answer on
all ranks. The table says what they examine:

    takes_layer       options and modules of the layer
    call_refusal      the numbers of chunks, the restore pair and the row counts of a call
    agreed_programs   the devices, kernels and libraries of all ranks
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.parametrize import type_before_parametrizations

from pmoe.call.modules import LayerModules
from pmoe.comm.agreement import all_fail_together, gathered
from pmoe.comm.counts import RankCounts
from pmoe.comm.group_record import is_known
from pmoe.comm.heap.program_heap import num_closings
from pmoe.comm.ranks import Ranks
from pmoe.engine.passes.base import Inputs
from pmoe.experts.stacked import StackedExperts
from pmoe.planner.degree import Choice
from pmoe.program.backend import ProgramBackend, Programs
from pmoe.program.layer_shape import LayerShape
from pmoe.program.on_cuda import CudaBackend
from pmoe.warn import warn_once

T = TypeVar("T")

MOST_ROWS = 2**31 - 1
"""The largest number of rows in a program, because a program's indices of rows are int32."""

BACKENDS: dict[str, ProgramBackend] = {"cuda": CudaBackend()}
"""The backends that run programs, by the type of the rows' device."""


@dataclass(frozen=True)
class ProgramsKey:
    """Everything on which the answer of `_programs_of` depends.

    group: name of the ranks' group (`Ranks.name`). A group that is made again has another name.
    device, dtype: of the rows.
    experts_type, activation: class and nonlinearity of the experts. Parametrizations change neither.
    backend: the backend of the device; None if there is none.
    shape: sizes of the layer.
    heaps: whether rows travel over heaps, if there can be heaps.
    closings: how often heaps of the group were closed. Ranks make new heaps after they have closed some.
    """

    group: str
    device: torch.device
    dtype: torch.dtype
    experts_type: type
    activation: str | None
    backend: ProgramBackend | None
    shape: LayerShape
    heaps: bool
    closings: int

    def suits(self, modules: LayerModules) -> bool:
        """Returns whether the programs still are those of a layer's modules, which a user may have replaced.

        The dtype of the routing weights is not known before a call is routed, so it is not compared.

        modules: the modules and options of the layer. `layer_refusal` returns None for them.
        """
        rows = torch.empty(0, self.shape.d_model, dtype=self.dtype, device=self.device)
        top_k = getattr(modules.router, "top_k", self.shape.top_k)
        present = key_of(modules, rows, rows.new_empty(0, top_k))
        shape = replace(present.shape, weight_bytes=self.shape.weight_bytes)
        return replace(present, shape=shape) == self


FIRST_PAUSE = 100
"""The length of the first pause, in calls: after ranks failed to connect, the engine runs so many calls.

Then the ranks try again. Each later pause is `LONGER` times as long, because a failing attempt may last until
a time limit.
"""

LONGER = 10


@dataclass
class _Pause:
    """A number of calls that the engine runs after ranks failed to connect, before they try again.

    reason: why the ranks failed to connect.
    calls: number of calls in this pause.
    left: how many of these calls are still to come.
    """

    reason: str
    calls: int
    left: int


class ConnectionKey(NamedTuple):
    """The key of a communicator for pass programs, among those of a group.

    The fields are those of `ProgramsKey`. Sizes and dtypes are not among them, so all layers of a group share
    a communicator. Each communicator of NCCL takes memory on the device, and a thread.
    """

    device: torch.device
    backend: ProgramBackend
    heaps: bool
    closings: int


@dataclass
class _GroupPrograms:
    """The programs, communicators and pauses of a group, on which its ranks have agreed.

    agreed: the programs on which the ranks agreed, or the reason why there are none.
    communicators: the communicators with which the programs send rows.
    pauses: the pauses after failed attempts to connect.
    """

    agreed: dict[ProgramsKey, Programs | str] = field(default_factory=dict)
    communicators: dict[ConnectionKey, Any] = field(default_factory=dict)
    pauses: dict[ConnectionKey, _Pause] = field(default_factory=dict)

    def forget_closed(self, key: ProgramsKey) -> None:
        """Forgets what belongs to heaps that were closed before those of ``key``, a key of the group."""
        if not key.heaps:
            return
        self.agreed = _without_closed(self.agreed, key.closings)
        self.communicators = _without_closed(self.communicators, key.closings)
        self.pauses = _without_closed(self.pauses, key.closings)


KeyOfHeaps = TypeVar("KeyOfHeaps", ProgramsKey, ConnectionKey)


def _without_closed(answers: dict[KeyOfHeaps, T], closings: int) -> dict[KeyOfHeaps, T]:
    """Returns a cache without its entries of heaps that were closed.

    closings: how often heaps of the group were closed so far (`ProgramsKey.closings`).
    """
    return {key: value for key, value in answers.items() if not key.heaps or key.closings == closings}


_of_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupPrograms] = weakref.WeakKeyDictionary()
"""The programs of each group, as long as the group exists (`_programs_of_group`)."""

_of_one_rank = _GroupPrograms()
"""The programs of layers without a group, on one rank."""


def _programs_of_group(ranks: Ranks) -> _GroupPrograms:
    """Returns the programs on which these ranks have agreed so far.

    If there are none yet, the function forgets groups that were destroyed, with their communicators.
    """
    if ranks.group is None:
        return _of_one_rank
    if ranks.group not in _of_groups:
        for group in [group for group in _of_groups if not is_known(group)]:
            del _of_groups[group]
        _of_groups[ranks.group] = _GroupPrograms()
    return _of_groups[ranks.group]


def layer_refusal(modules: LayerModules) -> str | None:
    """Returns why no call of a layer can run as programs; None if some calls may.

    A program is a pass that was compiled into a list of kernel launches and collectives. All ranks get the
    same answer.
    """
    if not modules.rotates:
        return f"chunks have buffers of their own (memory_reuse={modules.options.restore})"
    return modules.refusal("program")


def takes_layer(modules: LayerModules) -> bool:
    """Returns whether calls of a layer may run as programs. If not, warns of the reason.

    A program is a pass that was compiled into a list of kernel launches and collectives. All ranks get the
    same answer.
    """
    why = layer_refusal(modules)
    if why is not None:
        _warn(why)
    return why is None


def _warn(why: str) -> None:
    """Warns that calls of a layer run on the engine, not as programs. Warns once for each reason.

    why: the reason. It ends a sentence that begins with "program (True) falls back to the engine because".
        Two texts count as one reason if they are equal up to the first colon. So numbers that differ from
        call to call must come after a colon.
    """
    warn_once(f"program (True) falls back to the engine because {why}")


def call_refusal(modules: LayerModules, counts: RankCounts, choice: Choice) -> str | None:
    """Returns why a call of a layer cannot run as programs; None if it can.

    A program is a pass that was compiled into a list of kernel launches and collectives. All ranks get the
    same answer.

    modules: the modules and options of the layer.
    counts: the row counts of the call.
    choice: the numbers of chunks and the restore pair.
    """
    most_rows = counts.max_tokens * modules.options.top_k * modules.ranks.size
    reasons = {
        f"both passes must have the same chunks: forward {choice.forward}, backward {choice.backward}": (
            choice.forward != choice.backward
        ),
        f"indices of rows are int32: up to {most_rows} rows, at most {MOST_ROWS}": most_rows > MOST_ROWS,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def agreed_programs(
    modules: LayerModules, inputs: Inputs, counts: RankCounts, choice: Choice
) -> Programs | None:
    """Returns the programs that run a call, on which all ranks agree; None if the engine must run it.

    A program is a pass that was compiled into a list of kernel launches and collectives. If the result is
    None, the function warns of the reason. Kernels or libraries may be missing on some ranks only. So the
    ranks compare their answers, and the function is a collective, in the first call for each dtype and each
    combination of sizes. Later calls take the answer from a cache.

    modules: the modules of the layer, with the experts that were really called.
    inputs: the rows and parameters of the call.
    counts: the row counts of the call.
    choice: the numbers of chunks and the restore pair.
    """
    why = layer_refusal(modules) or call_refusal(modules, counts, choice)
    if why is None:
        programs = _programs_of(modules, inputs.x_TM, inputs.weight_TK)
        if isinstance(programs, Programs):
            return programs
        why = programs
    _warn(why)
    return None


def key_of(modules: LayerModules, x_TM: Tensor, weight_TK: Tensor) -> ProgramsKey:
    """Returns the key of the programs for a layer's shapes and dtype.

    modules: the modules of the layer.
    x_TM: (T, M), the rows of a call. Only their dtype, device and width matter.
    weight_TK: (T, K), its routing weights. Only their dtype and K matter.
    """
    device = x_TM.device
    backend = BACKENDS.get(device.type)
    experts = modules.experts
    assert isinstance(experts, StackedExperts)
    device_type = device.type if backend is None else backend.device_type
    heaps = modules.options.switches.program_heaps
    return ProgramsKey(
        group=modules.ranks.name,
        device=device,
        dtype=x_TM.dtype,
        # A parametrized module has a class of its own, on the ranks where it is parametrized. Its values are
        # still those of an operand, so the class of the key must be the same on all ranks.
        experts_type=type_before_parametrizations(experts),
        activation=experts.fused_activation,
        backend=backend,
        shape=LayerShape.of(modules, x_TM, weight_TK, device_type=device_type),
        heaps=heaps,
        closings=num_closings(modules.ranks) if heaps else 0,
    )


def _programs_of(modules: LayerModules, x_TM: Tensor, weight_TK: Tensor) -> Programs | str:
    """Returns the programs for a layer's shapes and dtype, or the reason why a rank cannot run them.

    The function is a collective, unless the answer is in a cache (`_GroupPrograms.agreed`), or ranks failed
    to connect a short while ago (`_GroupPrograms.pauses`).

    modules: the modules of the layer.
    x_TM: (T, M), the rows of a call.
    weight_TK: (T, K), its routing weights.
    """
    ranks = modules.ranks
    key = key_of(modules, x_TM, weight_TK)
    known = _programs_of_group(ranks)
    if key in known.agreed:
        return known.agreed[key]
    # One agreement for each key: a key is new on all ranks at the same time.
    backend = key.backend
    shape = key.shape
    connection = None if backend is None else ConnectionKey(key.device, backend, key.heaps, key.closings)
    pause = known.pauses.get(connection) if connection is not None and shape.sends else None
    if pause is not None and pause.left:
        pause.left -= 1
        return pause.reason
    known.forget_closed(key)
    own = f"its tensors are on {key.device}, and pass programs run on CUDA devices"
    why = own if backend is None else backend.refusal(shape, x_TM)
    reasons = gathered(ranks, why, stage="agreeing on pass programs")
    others = (f"rank {rank} refuses: {reason}" for rank, reason in enumerate(reasons) if reason)
    why = why or next(others, None)
    if why is not None or backend is None or connection is None:
        known.agreed[key] = why or own
        return known.agreed[key]
    if shape.sends and ranks.size > 1 and connection not in known.communicators:
        communicator, failure = _connected_on_all(backend, modules, x_TM.device)
        if failure:  # on all ranks, which begin the same pause
            calls = FIRST_PAUSE if pause is None else LONGER * pause.calls
            known.pauses[connection] = _Pause(failure, calls, left=calls)
            return failure
        known.communicators[connection] = communicator
    known.agreed[key] = Programs(
        backend=backend,
        shape=shape,
        dtype=x_TM.dtype,
        device=x_TM.device,
        communicator=known.communicators.get(connection) if shape.sends else None,
    )
    return known.agreed[key]


def _connected_on_all(
    backend: ProgramBackend, modules: LayerModules, device: torch.device
) -> tuple[Any, str]:
    """Returns a communicator and "" if every rank has one, or None and why some rank has none.

    If a rank failed alone, for example because it cannot start a thread, the other ranks have a communicator
    with which that rank would never send. So the ranks compare their errors. Collective.

    backend: the backend of the programs.
    modules: the modules of the layer, which has several ranks.
    device: this rank's device.

    Raises other errors than RuntimeErrors on every rank.
    """
    stage = "connecting the ranks for pass programs"
    ranks = modules.ranks
    communicator = None
    failure = ""
    unexpected: Exception | None = None
    try:
        communicator = backend.connect(ranks, device, heaps=modules.options.switches.program_heaps)
    except Exception as error:
        if ranks.record.reason_left:
            raise  # a collective of the group failed: no other may follow
        failure = str(error) or type(error).__name__
        # A RuntimeError is not kept: its traceback would keep the rows of the call in memory.
        unexpected = None if isinstance(error, RuntimeError) else error
    with all_fail_together(ranks, stage=stage):
        if unexpected is not None:
            raise unexpected
    failures = gathered(ranks, failure, stage=stage)
    of_others = (f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
    failure = failure or next(of_others, "")
    return (None, f"there is no communicator: {failure}") if failure else (communicator, "")
