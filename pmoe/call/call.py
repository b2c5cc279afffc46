"""The record of one call of a layer, before anything is decided about it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pmoe.call.modules import LayerModules
from pmoe.checkpointing.replay import Replay


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of one call, and the modules that it uses.

    layer       the module that was called
    modules     its modules
    scheduled   the modules that the schedule computes. The shared expert is among them, unless it is called
                as a module (`LayerModules.calls_shared_expert`)
    x           (..., M), the input. It is not checked yet: a rank reports a wrong input with its row counts
    token_ids   (...) int64, or None
    mask        (...) bool, True where x has a token; None if all rows are tokens. It is not checked yet
    replay      decides, or repeats what the first pass of a checkpoint has decided
    """

    layer: nn.Module
    modules: LayerModules
    scheduled: LayerModules
    x: Tensor
    token_ids: Tensor | None
    mask: Tensor | None
    replay: Replay
