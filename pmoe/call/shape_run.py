"""Detects the run in which torch.distributed.pipelining finds out the shapes of its stages.

At its first step a stage runs its module, forward and backward, on tensors that were allocated and never
written (`torch.empty`). Their values may be NaN, which must not raise an error, so a layer does not check
values in this run. Shapes, row counts and collectives are the same as in other calls.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

STAGE = "torch.distributed.pipelining.stage"
INFERENCE = {"_forward_metadata_inference", "_shape_inference"}
"""Methods of torch's pipeline stages that run modules on unwritten tensors.

The first is that of torch 2.13, the second that of earlier releases.
"""


def is_shape_run() -> bool:
    """Returns whether the layer may be running on unwritten tensors, so that values must not be checked.

    True inside the shape inference of torch.distributed.pipelining. The function is cheap if that module is
    not loaded; otherwise it searches the call stack.
    """
    if STAGE not in sys.modules:
        return False
    if torch._C._current_graph_task_id() != -1:
        # The second pass of activation checkpointing. It may run in a thread without the caller's frames, so
        # the search below would miss them. The values were checked in the first pass, or they were unwritten.
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in INFERENCE and frame.f_globals.get("__name__") == STAGE:
            return True
        frame = frame.f_back
    return False
