"""The checks at the beginning of a layer's call, before tokens are routed. Some checks are collectives."""

from __future__ import annotations

from torch import Tensor

from pmoe.call.call import Call, CalledLayer
from pmoe.call.module_calls import check_callbacks
from pmoe.call.modules import LayerModules
from pmoe.call.shape_run import is_shape_run
from pmoe.checkpointing.replay import may_run_again, replay_of
from pmoe.comm.failures import enter_call
from pmoe.engine.lanes.run import is_captured


def begin_call(
    layer: CalledLayer, modules: LayerModules, x: Tensor, token_ids: Tensor | None, mask: Tensor | None
) -> Call:
    """Runs the checks that are possible before routing, and returns the record of the call.

    layer: the module that was called.
    modules: the modules and options of the layer.
    x: (..., M), the input; M is d_model.
    token_ids: (...) int64, for gates that route by token id; None for other gates.
    mask: (...) bool, True where x has a token and False where x has padding; None if all rows are tokens.

    With several ranks, comparing their options may be a collective (`check_ranks`).

    Raises RuntimeError if a CUDA graph is being captured and cannot hold this call. Raises ValueError if
    options differ between ranks, or if a wrapper such as DDP or FSDP manages the experts.
    """
    if modules.callbacks:
        check_callbacks(modules.callbacks, modules.callback_modules)
    if is_for_graph(x):
        from pmoe.decide.cuda_graph import check_capturable

        check_capturable(modules, x, mask)
    check_ranks(modules)
    return Call(
        layer=layer,
        modules=modules,
        scheduled=modules if modules.shared_module is None else modules.scheduled,
        x=x,
        token_ids=token_ids,
        mask=mask,
        reference=modules.reference_parameter,
        parameters_need_grad=modules.asks_for_gradients(),
        checks_values=not is_shape_run(),
        may_run_again=may_run_again(layer),
        replay=replay_of(layer),
    )


def is_for_graph(x: object) -> bool:
    """Returns whether a CUDA graph is being captured on x's GPU. The graph then records the call.

    x: the input of a layer. If it is not a tensor on a GPU, the result is False.
    """
    return isinstance(x, Tensor) and x.is_cuda and is_captured(x.device)


def check_ranks(modules: LayerModules) -> None:
    """Checks that all ranks of the layer can make this call together.

    Ranks compare the options of the layer in the layer's first call, and again after an option or the process
    group was replaced (`pmoe.decide.rank_consistency.check_same_options`). The function is a collective in
    these calls only.

    modules: the modules and options of the layer.

    Raises ValueError on every rank if options differ, or if a wrapper such as DDP or FSDP manages the
    experts. Each rank holds different experts, so a wrapper must not average or shard them.
    """
    ranks = modules.ranks
    if ranks.size > 1:
        from pmoe.decide.rank_consistency import check_same_options

        if modules.grid.reconnect():
            modules.cache.forget_ranks()
        check_same_options(modules)
    else:
        enter_call(ranks)
        if modules.experts.is_parallelized:
            from pmoe.experts.wrapper_checks import check_wrapped, may_be_wrapped

            if may_be_wrapped(modules.experts):
                check_wrapped(modules.experts, set(ranks.members))
    modules.cache.compared = modules.compared_options
