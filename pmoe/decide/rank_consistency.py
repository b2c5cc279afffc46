"""What a layer was given, in words: every rank must have given the same, compared at its first call.

Ranks that differ in options would wait for each other until the group's timeout, take each other's bytes for
something else, or hold another model each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pmoe.call.description import options_in_words
from pmoe.call.module_calls import is_watched
from pmoe.call.modules import Parts
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.comm.agreement import digest, gathered, same
from pmoe.decide.dense_values import SAME_VALUES, dense_tensors, dense_values, fingerprint
from pmoe.decide.stored_state import check_loaded
from pmoe.experts.values import check_not_meta
from pmoe.experts.wrapper_checks import COPIED, check_wrapped, sampled
from pmoe.warn import warn_once


def check_same_options(parts: Parts) -> None:
    """Begins a call of several ranks, and compares their options where that is due.

    Collective at the first call of a layer, and at the next call after options were set.
    """
    known = parts.known
    changed = ""
    if known.differed is not None and known.compared != parts.given:
        changed = changed_options(known.words, parts)
    parts.ranks.begin_call(changed)
    check_wrapped(parts.experts, set(parts.ranks.members))
    if known.differed is None or changed:
        # If hooks or wrappers stand around the experts, a library may fetch their values later.
        if not any(map(is_watched, parts.experts_module.modules())):
            check_not_meta(parts.like)
        with hidden_from_checkpoints():
            known.differed = check_alike(parts)
        known.words = options_in_words(parts)


def check_alike(parts: Parts) -> bool:
    """Whether ranks hold different experts. Collective over the layer's ranks. Raises ValueError on each of
    them, naming option, values and ranks, where any two options differ, and where experts, which must differ,
    were copied since they were built, or loaded from one file. Warns on each where values of the dense parts
    differ, which must be alike."""
    given = options_in_words(parts)
    dense = dense_values(parts)
    like, experts = parts.like, parts.experts
    device = torch.device("cpu") if like is None else like.device
    built, now = experts.built, sampled(experts)
    digests = [float(digest([value])) for value in (*given.values(), *dense.values(), built, now)]
    flags = [float(built == now), float(experts.was_loaded)]
    *agree, were_same, are_same, all_changed_or_none, all_loaded_or_none = same(
        parts.ranks, device, [*digests, *flags], stage="comparing the layer's options"
    )
    if experts.was_loaded or not all_loaded_or_none:
        check_loaded(parts)
    elif are_same and not (were_same or all_changed_or_none):  # all have what one was built with
        raise ValueError(COPIED)
    options = [name for name, is_same in zip(given, agree[: len(given)], strict=True) if not is_same]
    if options:
        raise ValueError(_options_that_differ(parts, options, given[options[0]]))
    values = [name for name, is_same in zip(dense, agree[len(given) :], strict=True) if not is_same]
    if values:  # no error: some programs call a layer once before they load or broadcast its values
        warn_once(_values_that_differ(parts, values[0]))
    experts.are_equal = are_same
    return not are_same


def _options_that_differ(parts: Parts, names: list[str], mine: str) -> str:
    """Collective. mine: the value of the first."""
    of_ranks = gathered(parts.ranks, mine, stage="showing the layer's options")
    values = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(of_ranks))
    also = f" (and so do {', '.join(names[1:])})" if names[1:] else ""
    return f"{names[0]} must be the same on every rank of a MoELayer, and differs{also}: {values}"


def _values_that_differ(parts: Parts, part: str) -> str:
    """Names the first tensor of a dense part whose values differ, and who has which. Collective."""
    mine = {name: fingerprint({name: tensor}) for name, tensor in dense_tensors(parts, part).items()}
    of_ranks = gathered(parts.ranks, mine, stage="showing values that differ")
    names = dict.fromkeys(name for each in of_ranks for name in each)
    name = next(name for name in names if len({each.get(name) for each in of_ranks}) > 1)
    holders = dict[str | None, list[str]]()
    for rank, each in enumerate(of_ranks):
        holders.setdefault(each.get(name), []).append(str(rank))
    who = "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" for ranks in holders.values())
    return (
        f"{parts.ranks.layer or 'a MoELayer'}, whose values of {name} must be the same on every rank: they "
        f"differ (alike are: {who}), and unless something makes them alike each rank trains a model of its "
        f"own. {SAME_VALUES}"
    )


# ---- options that were set between calls
#
# They may change the sizes of messages, which aborts a peer's process. So ranks compare them again at the
# next call, and meet before that: one rank alone may have set some (`pmoe.comm.meeting`).


def changed_options(words_before: Mapping[str, str], now: Parts) -> str:
    """What is set otherwise on a layer than at its last call, in words for the other ranks; "" if nothing is.

    words_before: `options_in_words` of when ranks last agreed.

    Example: "has set pipeline (4) of MoELayer 1 since its last call, and other ranks have not: ..."
    """
    words = options_in_words(now)
    changed = [f"{name} ({value})" for name, value in words.items() if words_before.get(name) != value]
    if not changed:
        return ""
    return (
        f"has set {', '.join(changed)} of {now.ranks.layer} since its last call, and other ranks have not: "
        "set a layer's options on all ranks, between the same calls"
    )
