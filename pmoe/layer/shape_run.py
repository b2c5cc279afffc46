"""Whether a call stands in the run by which torch.distributed.pipelining learns the shapes of its stages.

At its first step a stage runs its module, forward and backward, on tensors that were allocated and never
written (`torch.empty`). Garbage may hold NaN, which must stop no run: a layer does not check values there.
All else is as in any call: shapes, row counts and collectives.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

STAGE = "torch.distributed.pipelining.stage"
INFERENCE = {"_forward_metadata_inference", "_shape_inference"}
"""Methods of torch's stages, of torch 2.13 and of earlier ones, inside of which modules run on garbage."""


def is_shape_run() -> bool:
    """Whether the values that a layer is called with may be garbage.

    It costs a look into a dictionary, unless torch's pipelining is loaded: then into the frames of the call.
    """
    if STAGE not in sys.modules:
        return False
    if torch._C._current_graph_task_id() != -1:
        # A checkpoint runs again, maybe in a thread that has no frames of the caller's. Its first pass was
        # checked, unless that was garbage.
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in INFERENCE and frame.f_globals.get("__name__") == STAGE:
            return True
        frame = frame.f_back
    return False
