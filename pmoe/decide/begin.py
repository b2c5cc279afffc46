"""The beginning of a call: checks that need no routing. Some of them are collectives."""

from __future__ import annotations

from torch import Tensor, nn

from pmoe.call.call import Call
from pmoe.call.module_calls import check_callbacks
from pmoe.call.modules import LayerModules
from pmoe.checkpointing.replay import replay_of
from pmoe.comm.failures import enter_call
from pmoe.engine.lanes.run import is_captured


def begin_call(
    layer: nn.Module, modules: LayerModules, x: Tensor, token_ids: Tensor | None, mask: Tensor | None
) -> Call:
    """Checks what can be checked before routing, and returns the call. Collective as `check_ranks` is.

    layer: the module that was called.
    modules: its modules.
    x: (..., M), the input.
    token_ids: (...) int64, for gates that route by them; else None.
    mask: (...) bool, True where x has a token; None if all rows are tokens.

    Raises RuntimeError if a CUDA graph is being captured that cannot hold the call, and ValueError as
    `check_ranks` does.
    """
    call = Call(
        layer=layer,
        modules=modules,
        scheduled=modules if modules.shared_module is None else modules.scheduled,
        x=x,
        token_ids=token_ids,
        mask=mask,
        replay=replay_of(layer),
    )
    if modules.callbacks:
        check_callbacks(modules.callbacks, modules.callback_modules)
    if isinstance(x, Tensor) and is_captured(x.device):
        from pmoe.decide.cuda_graph import check_capturable

        check_capturable(call)
    check_ranks(modules)
    return call


def check_ranks(modules: LayerModules) -> None:
    """Checks that all ranks of the layer can make this call together.

    In most calls that needs no message. `pmoe.decide.rank_consistency.check_same_options` says when several
    ranks compare the layer, which is a collective.

    Raises ValueError on every rank if options differ, or if a wrapper of another library manages the experts.
    """
    ranks = modules.ranks
    if modules.grid.reconnect():
        modules.cache.forget_ranks()
    if ranks.size > 1:
        from pmoe.decide.rank_consistency import check_same_options

        check_same_options(modules)
    else:
        enter_call(ranks)
        if modules.experts.is_parallelized:
            from pmoe.experts.wrapper_checks import check_wrapped

            check_wrapped(modules.experts, set(ranks.members))
    modules.cache.compared = modules.compared_options
