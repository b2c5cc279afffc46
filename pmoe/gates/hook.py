"""The base class of forward hooks of a gate, for objects that watch or change the routing of one model."""

from __future__ import annotations

from typing import Any

from torch import nn


class GateHook:
    """Base class of a forward hook that can tell the calls of its own gate from those of the gate's copies.

    ``copy.deepcopy`` of a model also copies the hooks of its gates. An object of this class is not copied: if
    the gate is copied while the hook is registered, the copy of the gate calls the same object. `is_own` then
    returns False, because a call of the copy is no call of the model.

    gate: the gate.
    """

    def __init__(self, gate: nn.Module) -> None:
        self._gate = gate

    def is_own(self, gate: nn.Module) -> bool:
        """Returns whether a gate that was called is the gate of this hook: False for a copy of the gate."""
        return gate is self._gate

    def __deepcopy__(self, memo: dict[int, Any]) -> GateHook:
        return self
