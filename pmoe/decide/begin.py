"""The beginning of a call: checks that need no routing, some of them together with all ranks."""

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
    if is_captured(x):
        from pmoe.decide.cuda_graph import check_capturable

        check_capturable(call)
    check_ranks(parts)
    return call


def is_captured(x: object) -> bool:
    """Whether kernels that are launched now for x become part of a CUDA graph."""
    return isinstance(x, Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_ranks(parts: Parts) -> None:
    """Checks that all ranks of the layer can make this call together. Collective at the first call, after
    options were set, and in a process group that takes the place of a pickled layer's old one.

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
        # If hooks or wrappers stand around the experts, a library may fetch their values later.
        if not is_fetched(parts):
            check_not_meta(parts.like)
        with hidden_from_checkpoints():
            known.differed = check_alike(parts)
        known.words = options_in_words(parts)
    known.compared = parts.given
