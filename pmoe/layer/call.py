"""One call of a layer, before anything is decided of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pmoe.engine.replay import Replay, hidden_from_selective_checkpoint, replay_of
from pmoe.layer.parts import Parts


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a call is given. replay: decides, or takes what a checkpoint's first pass decided.

    x: (..., d_model), not yet checked: what is wrong on one rank alone is told to all with the row counts.
    """

    layer: nn.Module
    parts: Parts
    x: Tensor
    token_ids: Tensor | None
    replay: Replay

    @staticmethod
    def begin(layer: nn.Module, parts: Parts, x: Tensor, token_ids: Tensor | None) -> Call:
        """Finds the group again after unpickling, refuses what a CUDA graph cannot hold, and compares the
        ranks' options at the first call. Collective then."""
        parts.grid.reconnect()
        call = Call(layer=layer, parts=parts, x=x, token_ids=token_ids, replay=replay_of(layer))
        if is_captured(x):
            from pmoe.layer.capture import check_capturable

            check_capturable(call)
        if parts.ranks.size > 1 and not parts.known.is_compared:
            from pmoe.layer.alike import check_alike

            with hidden_from_selective_checkpoint():
                check_alike(parts)
            parts.known.is_compared = True
        return call


def is_captured(x: object) -> bool:
    """Whether what is launched for x becomes part of a CUDA graph."""
    return isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()
