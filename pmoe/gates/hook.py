"""The base class of forward hooks of a gate, for objects that watch or change the routing of one model."""

from __future__ import annotations

from typing import Any

from torch import nn


class GateHook:
    """A forward hook of one gate that can tell calls of the gate from calls of its copies.

    ``copy.deepcopy`` of a model copies the hooks of its gates, too, but not an object of this class. So a
    copy of the gate, which was made while the hook was registered, calls the same object. The calls of the
    copy are not those of the model.

    gate: the gate.
    """

    def __init__(self, gate: nn.Module) -> None:
        self._gate = gate

    def is_own(self, gate: nn.Module) -> bool:
        """Returns whether a gate that was called is the gate of this hook: False for a copy of the gate."""
        return gate is self._gate

    def __deepcopy__(self, memo: dict[int, Any]) -> GateHook:
        return self
