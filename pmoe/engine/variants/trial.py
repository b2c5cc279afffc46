"""Passes of a trial, which take part in every collective even if this rank runs out of memory.

A trial measures the time of a choice: a number of chunks n, and a restore pair, which says how backward gets
the experts' input and hidden activation (`pmoe.choose.trials`). If the choice needs too much memory on one
rank, the other ranks wait for that rank in an all-to-all. So after the failed allocation the rank goes on
with the tasks of the pass:

    task of computation or of a copy     does nothing
    task of communication                sends and receives rows with any values, in memory that the pass has

When the pass has ended, the ranks exchange whether any of them failed. If so, all ranks drop the choice.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from pmoe.comm.failures import lacks_memory
from pmoe.engine.buffers.host_pool import HostMemoryError
from pmoe.engine.lanes.base import Actions
from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Pass
from pmoe.engine.passes.forward import Forward
from pmoe.schedule.tasks import Lane


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that the device, the host or pmoe's host pool has too little memory."""
    return isinstance(error, HostMemoryError) or lacks_memory(error)


class _OnTrial(Pass):
    """A pass that still takes part in all collectives after an allocation of memory has failed.

    failure: the error of the failed allocation; None as long as none has failed.
    """

    failure: Exception | None = None

    def actions(self) -> Actions:
        kinds_of_messages = {
            task.kind for task in self.schedule.tasks if task.lane in (Lane.COMMUNICATE, Lane.INTRA_NODE)
        }
        return {
            kind: functools.partial(self._attempt, action, kind in kinds_of_messages)
            for kind, action in super().actions().items()
        }

    def _attempt(
        self, action: Callable[[int], dist.Work | None], sends: bool, chunk: int
    ) -> dist.Work | None:
        """Runs a task. After a failed allocation, runs only tasks that send, with rows of any values.

        Returns the Work of the task's collective; None if it started none.

        action: the method that runs the task.
        sends: whether the task is a collective, for which the other ranks wait.
        chunk: the number of the task's chunk.
        """
        if self.failure is None:
            try:
                return action(chunk)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.failure = error.with_traceback(None)  # the traceback's frames would keep tensors alive
        return action(chunk) if sends else None

    def buffer(self, name: str, i: int) -> Tensor:
        return super().buffer(name, i) if self.failure is None else self._any_memory(f"{name}.{i}")

    def temporary(self, name: str, i: int) -> Tensor:
        return super().temporary(name, i) if self.failure is None else self._any_memory(f"{name}.{i}")

    def _any_memory(self, key: str) -> Tensor:
        """Returns memory with the shape of a buffer, for a collective after memory ran out on this rank.

        The other ranks wait for this rank in the collective, so it must take part. The content of the memory
        does not matter, because the trial's results are thrown away. The memory is the first of these:

        - the buffer itself, if its memory was allocated before memory ran out;
        - the beginning of another buffer that is large enough;
        - new memory.

        key: the buffer's name and chunk, "T_DI.0" for example.
        """
        slots = self.arena.buffers
        if key in self.own or key in slots:
            return self.own[key] if key in self.own else slots[key]
        shape = self.sizes.shape(key)
        size = math.prod(shape)
        for memory in itertools.chain(self.own.values(), slots.values()):
            if memory.numel() >= size and memory.is_contiguous():
                return memory.view(-1)[:size].view(shape)
        return self.new(*shape)


class TrialForward(_OnTrial, Forward):
    """A forward pass that takes part in every collective even if this rank runs out of memory."""

    @property
    def taken_bytes(self) -> int:
        """The bytes of the buffers that the pass has taken so far.

        These buffers are the ring slots (memory in which chunks take turns), and the buffers of single
        chunks.
        """
        tensors = [*self.own.values(), self.result_TM]
        if self.home is not None:
            tensors.append(self.home)
        return self.pool.bytes_in_use + sum(tensor.nbytes for tensor in tensors)


class TrialBackward(_OnTrial, Backward):
    """A backward pass that takes part in every collective even if this rank runs out of memory."""
