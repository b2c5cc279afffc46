"""Calls inside a CUDA graph: refused before anything is launched where a graph could not hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmoe.engine import run as engine
from pmoe.experts import ModuleExperts
from pmoe.layer.alone import alone_refusal
from pmoe.layer.padded import padded_call
from pmoe.layer.route import check_input

if TYPE_CHECKING:
    from pmoe.layer.module import MoELayer


def is_capturing(x: object) -> bool:
    """Whether what is launched for x becomes part of a CUDA graph."""
    return isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_capturable(layer: MoELayer, x: Tensor) -> None:
    """Raises RuntimeError where a call waits for the device, measures, or makes anything that outlasts the
    graph: before it launches anything."""
    why = _padded_capture_refusal(layer, x) if layer.pad_to_capacity else alone_refusal(layer, x)
    if why is not None:
        raise RuntimeError(
            f"pmoe: a CUDA graph cannot hold this call of a MoELayer: {why}. It can hold calls that were "
            "made once before the capture (all is measured then): on one rank, of a layer with gate "
            '"topk" or "switch", "ffn" or "swiglu" experts in bfloat16 or float16, whose products are '
            "computed by pmoe's kernels, and none of the options that change what runs; on any number of "
            "ranks, of a layer with pad_to_capacity=True that offloads nothing"
        )


def _padded_capture_refusal(layer: MoELayer, x: Tensor) -> str | None:
    check_input(layer, x)
    pairs = layer.chooser.pairs
    remakes = isinstance(layer.experts, ModuleExperts) and any(pair.hidden == "recompute" for pair in pairs)
    call = padded_call(layer, x.reshape(-1, layer.d_model))
    unfit = {
        "other layers' gradients are reduced inside": layer.gradients is not None,
        "its tasks are being timed, and what is captured does not run yet": engine.is_recording(),
        f"memory_reuse ({layer.restore}) may offload, to memory that a replay would find in other hands": any(
            pair.offloads for pair in pairs
        ),
        f"memory_reuse ({layer.restore}) may recompute modules, whose random state is on the host": remakes,
        f"no call like it ({call}) was made before": call not in layer._agreed,
    }
    return next((why for why, holds in unfit.items() if holds), None)
