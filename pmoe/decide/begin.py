"""The beginning of a call: checks that need no routing. Some of them are collectives."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pmoe.call.call import Call
from pmoe.call.description import options_in_words
from pmoe.call.module_calls import check_callbacks
from pmoe.call.modules import Parts
from pmoe.decide.rank_consistency import changed_options, check_alike
from pmoe.decide.route import is_fetched
from pmoe.engine.replay import hidden_from_checkpoints, replay_of
from pmoe.experts.values import check_not_meta
from pmoe.experts.wrapped import check_wrapped


def begin_call(
    layer: nn.Module, parts: Parts, x: Tensor, token_ids: Tensor | None, mask: Tensor | None
) -> Call:
    """Checks what can be checked before routing, and returns the call. Collective as `check_ranks` is.

    layer: the module that was called.
    parts: its modules.
    x: (..., M), the input.
    token_ids: (...) int64, for gates that route by them; else None.
    mask: (...) bool, True where x has a token; None if all rows are tokens.

    Raises RuntimeError if a CUDA graph is being captured that cannot hold the call, and ValueError as
    `check_ranks` does.
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
    if is_captured(x):
        from pmoe.decide.cuda_graph import check_capturable

        check_capturable(call)
    check_ranks(parts)
    return call


def is_captured(x: object) -> bool:
    """Returns whether a CUDA graph is being captured, so that kernels launched for x become part of it."""
    return isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_ranks(parts: Parts) -> None:
    """Checks that all ranks of the layer can make this call together.

    Ranks compare their options and values, which is a collective, at three times:

    - at the layer's first call;
    - at the next call after options were set;
    - at the next call after a new default process group has taken the place of a destroyed one.

    Raises ValueError on every rank if options differ, or if a wrapper of another library manages the experts.
    """
    known = parts.known
    are_several = parts.ranks.size > 1
    if parts.grid.reconnect():
        known.forget_ranks()
    changed = ""
    if are_several and known.differed is not None and known.compared != parts.given:
        changed = changed_options(known.words, parts)
    parts.ranks.begin_call(changed)
    if are_several or parts.experts.is_parallelized:
        check_wrapped(parts.experts, set(parts.ranks.members))
    if are_several and (known.differed is None or changed):
        # A library that hooks or wraps the experts may keep them on the meta device until it fetches them.
        if not is_fetched(parts):
            check_not_meta(parts.like)
        with hidden_from_checkpoints():
            known.differed = check_alike(parts)
        known.words = options_in_words(parts)
    known.compared = parts.given
