"""One call of a layer, before anything is decided about it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pmoe.call.modules import Parts
from pmoe.checkpointing.replay import Replay


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a call, and the modules that it uses.

    layer       the module that was called
    parts       the layer's modules
    scheduled   the modules that the schedule computes: all of them, or all but a shared expert that is
                called as a module
    x           (..., M), not yet checked: ranks report a wrong input with the row counts
    token_ids   (...) int64, or None
    mask        (...) bool, True where x has a token; None if all rows are tokens. Not yet checked
    replay      decides, or repeats the decisions of a checkpoint's first pass
    """

    layer: nn.Module
    parts: Parts
    scheduled: Parts
    x: Tensor
    token_ids: Tensor | None
    mask: Tensor | None
    replay: Replay
