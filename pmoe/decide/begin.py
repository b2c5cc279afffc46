"""The beginning of a call: checks that need no routing, some of them together with all ranks."""

from __future__ import annotations

from torch import Tensor, nn

from pmoe.call.call import Call
from pmoe.call.module_calls import check_callbacks
from pmoe.call.modules import Parts
from pmoe.checkpointing.replay import replay_of
from pmoe.engine.lanes.run import is_captured


def begin_call(
    layer: nn.Module, parts: Parts, x: Tensor, token_ids: Tensor | None, mask: Tensor | None
) -> Call:
    """Begins a call. Collective at the first call of a layer (`check_ranks`).

    Raises RuntimeError for a call that a CUDA graph cannot hold while one is captured.
    """
    call = Call(
        layer=layer,
        parts=parts,
        scheduled=parts if parts.shared_module is None else parts.scheduled,
        x=x,
        token_ids=token_ids,
        mask=mask,
        replay=replay_of(layer),
    )
    if parts.callbacks:
        check_callbacks(parts.callbacks, parts.callback_modules)
    if isinstance(x, Tensor) and is_captured(x.device):
        from pmoe.decide.cuda_graph import check_capturable

        check_capturable(call)
    check_ranks(parts)
    return call


def check_ranks(parts: Parts) -> None:
    """Checks that all ranks of the layer can make this call together. Collective at the first call, after
    options were set, and in a process group that takes the place of a pickled layer's old one.

    Raises ValueError on every rank if options differ, or if a wrapper of another library manages the experts.
    """
    ranks = parts.ranks
    if parts.grid.reconnect():
        parts.known.forget_ranks()
    if ranks.size > 1:
        from pmoe.decide.rank_consistency import check_same_options

        check_same_options(parts)
    else:
        ranks.begin_call()
        if parts.experts.is_parallelized:
            from pmoe.experts.wrapper_checks import check_wrapped

            check_wrapped(parts.experts, set(ranks.members))
    parts.known.compared = parts.given
