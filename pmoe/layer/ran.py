"""How a layer's last call was computed, for whoever asks afterwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pmoe.engine.autograd import Path
from pmoe.schedule.restore import Restore


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What was really done, after the choices and fallbacks of a call; all but num_tokens and num_slots is
    the same on every rank.

    num_tokens: of this rank. num_slots: choices of its tokens, dropped ones among them; None where the gate
    names only rows that it keeps. dtype, device: of the rows. forward, backward: n of the passes as they were
    cut, skewed routing among the reasons, None where a pass is not cut or there is none. restore: None where
    buffers do not rotate, or nothing is differentiated.
    """

    path: Path
    num_tokens: int
    num_slots: int | None
    dtype: torch.dtype
    device: torch.device
    forward: int | None = None
    backward: int | None = None
    restore: Restore | None = None
