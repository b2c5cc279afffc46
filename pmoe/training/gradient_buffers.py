"""Dense gradients in flat memory, so that any range of them can travel in one all-reduce.

There is one buffer for each type and device. Gradients lie in it in the order in which backward makes them.
Ranges are in bytes, counted through all buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class GradientRange:
    """What one all-reduce sends.

    memory: (bytes / element size,), a view of a buffer. parameters: indices of those with gradients in it.
    """

    memory: Tensor
    parameters: tuple[int, ...]


class GradientBuffers:
    """The flat memory of the gradients of ``parameters``.

    order: indices of all parameters, in the order of backward.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], order: Sequence[int]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for at in order:
            kinds.setdefault((parameters[at].dtype, parameters[at].device), []).append(at)
        self._parameters = parameters
        self._order = [at for places in kinds.values() for at in places]
        self._ends = list(accumulate(parameters[at].nbytes for at in self._order))
        self._flat: dict[int, Tensor] = {}
        self.memories: list[Tensor] = []
        for (dtype, device), places in kinds.items():
            sizes = [parameters[at].numel() for at in places]
            memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self._flat |= zip(places, memory.split(sizes), strict=True)
            self.memories.append(memory)

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return self._ends[-1]

    def bytes_of_first(self, count: int) -> int:
        """Of the gradients that backward makes first, where all are of one type."""
        return self._ends[count - 1] if count else 0

    def take(self, at: int) -> None:
        """Moves a parameter's gradient into its place, and makes it a view of it. None counts as zeros."""
        parameter = self._parameters[at]
        view = self._flat[at].view_as(parameter)
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
        parameter.grad = view

    def ranges(self, begin: int, end: int) -> list[GradientRange]:
        """The bytes from ``begin`` to ``end``, cut where one buffer ends and the next begins."""
        found, first = [], 0
        for memory in self.memories:
            item = memory.element_size()
            low, high = max(begin, first), min(end, first + memory.nbytes)
            if low < high:
                part = memory[(low - first) // item : (high - first) // item]
                found.append(GradientRange(part, self._parameters_between(low, high)))
            first += memory.nbytes
        return found

    def _parameters_between(self, begin: int, end: int) -> tuple[int, ...]:
        starts = [0, *self._ends]
        places = zip(self._order, starts, self._ends, strict=False)
        return tuple(at for at, first, last in places if first < end and last > begin)
