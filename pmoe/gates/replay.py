"""A gate that repeats recorded choices, to run a benchmark with the routing of a real training run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pmoe.arguments import check_tensors, list_of
from pmoe.gates.overriding import OverridingGate


class ReplayGate(OverridingGate):
    """Replaces the choices of another gate by recorded ones, call by call.

    The choices usually come from `pmoe.read_routing`. After the last recorded call, the gate begins with the
    first one again. The routing weights and l_aux are those of the inner gate (`OverridingGate`).

    Args:
        gate: the inner gate.
        calls: for each call, the experts of its tokens: (T, K) int64 on any device, K for each of T tokens.

    Attributes:
        next_call: the index in ``calls`` of the call whose choices come next. It may be set, for example to 0
            before each measurement.

    Raises ValueError if ``calls`` is empty. A call raises it if the recorded call has another number of
    tokens, or another number of experts for each token.
    """

    calls: list[Tensor]
    next_call: int

    def __init__(self, gate: nn.Module, calls: Sequence[Tensor]) -> None:
        super().__init__(gate)
        self.calls = list_of("calls", calls)
        if not self.calls:
            raise ValueError("calls (0 of them) must hold the choices of at least one call")
        for at, call in enumerate(self.calls):
            check_tensors(2, **{f"calls[{at}]": call})
            if call.dtype != torch.int64:
                raise TypeError(f"calls[{at}] of dtype {call.dtype} must hold experts, as torch.int64")
        self.next_call = 0

    def choices(self, expert_TK: Tensor) -> Tensor:
        """Returns the recorded choices of the next call, (T, K) int64 for T tokens with K choices each.

        Raises ValueError if they have another shape than expert_TK, the inner gate's choices.
        """
        at = self.next_call % len(self.calls)
        recorded_TK = self.calls[at]
        if recorded_TK.shape != expert_TK.shape:
            raise ValueError(
                f"calls[{at}] has choices of shape {tuple(recorded_TK.shape)}, but the gate routes "
                f"{tuple(expert_TK.shape)}: pass as many tokens as were recorded, or set next_call"
            )
        self.next_call = at + 1
        return recorded_TK.to(expert_TK)

    def extra_repr(self) -> str:
        """Returns the number of recorded calls and the next one, for repr."""
        return f"calls={len(self.calls)}, next_call={self.next_call}"
