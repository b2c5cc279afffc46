"""Checks whether a CUDA graph can hold a call, while the graph is being captured.

A graph holds a call if a replay of the graph repeats the whole call. If the graph cannot hold the call, an
error is raised before any kernel is launched.
"""

from __future__ import annotations

from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.decide.one_rank_counts import kernels_refusal
from pmoe.decide.route import autocast_dtype, check_input
from pmoe.engine.lanes.base import watchers
from pmoe.engine.variants.padding import PaddedCallKey


def check_capturable(modules: LayerModules, x: Tensor, mask: Tensor | None) -> None:
    """Raises RuntimeError if a CUDA graph cannot hold a call. No kernel has been launched by then.

    A graph cannot hold a call that

    - makes the host wait for the device,
    - measures times, or
    - allocates memory for tensors that are used after a replay of the graph.

    modules: the modules and options of the layer.
    x: (..., M), the input of the call; M is d_model.
    mask: (...), True where x has a token; None if all rows are tokens.
    """
    check_input(modules, x, modules.reference_parameter)
    x_TM = x.reshape(-1, modules.options.d_model)
    needs_grad = modules.asks_for_gradients(x_TM, *modules.gate.parameters())
    why: str | None
    if mask is not None:
        why = "the number of tokens under a mask is known on the device only"
    elif modules.cache.row_bound is not None and modules.options.fused and modules.ranks.size > 1:
        from pmoe.decide.bounded_counts import graph_refusal

        why = graph_refusal(modules, modules.cache.row_bound, x_TM, needs_grad)
    elif modules.cache.row_bound is not None and modules.options.switches.program and modules.ranks.size > 1:
        from pmoe.decide.bounded_program_counts import program_graph_refusal

        why = program_graph_refusal(modules, modules.cache.row_bound, x_TM, needs_grad)
    elif modules.options.pad_to_capacity:
        why = _padded_refusal(modules, x_TM, needs_grad)
    else:
        why = kernels_refusal(modules, x_TM, needs_grad)
    if why is not None:
        raise RuntimeError(
            f"pmoe: a CUDA graph cannot hold this call of a MoELayer: {why}. It can hold four kinds of "
            "calls, if the same call was made once before the capture. (1) Calls on one rank with gate "
            '"topk" or "switch", "ffn" or "swiglu" experts in bfloat16 or float16, products that are '
            "computed by pmoe's kernels, and no option that changes what runs. (2) Calls on any number of "
            "ranks with pad_to_capacity=True that offload nothing. (3) Calls on several ranks with "
            'fused="persistent" whose rows pmoe.BoundedSteps bounds. (4) The same with '
            "Switches(program=True, program_heaps=True) in place of fused"
        )


def _padded_refusal(modules: LayerModules, x_TM: Tensor, needs_grad: bool) -> str | None:
    """Returns why a graph cannot hold a call of a layer with ``pad_to_capacity``; None if it can.

    With ``pad_to_capacity`` each rank sends a fixed number of rows to each expert, so the host need not wait
    for row counts. A graph still cannot hold the call in these cases:

    - tasks of the call are being timed;
    - backward may recompute a user's own modules, whose random state is on the host;
    - the layer has never been called with this number of tokens, this dtype and this value of ``needs_grad``.

    modules: the modules and options of the layer.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    needs_grad: whether autograd needs gradients of the call.
    """
    dtype = autocast_dtype(x_TM) or x_TM.dtype
    kind = PaddedCallKey(num_tokens=x_TM.shape[0], needs_grad=needs_grad, dtype=dtype)
    remakes = modules.experts.are_modules and any(pair.hidden == "recompute" for pair in modules.pairs)
    reuse = f"memory_reuse ({modules.options.restore})"
    unfit = {
        "its tasks are being timed, and captured kernels do not run during the capture": bool(watchers),
        f"{reuse} may recompute modules, whose random state is on the host": remakes,
        f"no call of its kind ({kind}) was made before": kind not in modules.cache.padded_kinds,
    }
    why = modules.refusal("graph capture")
    return why or next((why for why, holds in unfit.items() if holds), None)
