"""Compares a layer between its ranks: options and replicated values must be the same on all ranks.

Replicated values are the values of the gate, the shared expert and callbacks. If options or values differed,
ranks would wait for each other until the group's timeout, misread each other's messages, or train different
models.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pmoe.call.description import options_in_words
from pmoe.call.modules import LayerModules
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.comm.agreement import digest, gathered, same
from pmoe.comm.failures import enter_call, meet_before_call
from pmoe.decide.dense_values import SAME_VALUES, dense_tensors, dense_values, fingerprint
from pmoe.decide.route import is_fetched
from pmoe.decide.stored_state import check_loaded
from pmoe.experts.values import check_not_meta
from pmoe.experts.wrapper_checks import COPIED, check_peft, check_wrapped, may_be_wrapped, sampled
from pmoe.settings import note_comparison
from pmoe.warn import warn_once


def check_same_options(modules: LayerModules) -> None:
    """Begins a call of several ranks, and compares the layer's options between ranks if they may differ.

    The function is a collective only in the following calls of a layer:

    - the first call, also if it is the first one on some ranks only;
    - the next call after any rank has set an option, or a setting of the gate or the experts;
    - the next call after a new default process group has replaced a destroyed one.

    modules: the modules and options of the layer.

    Raises ValueError on every rank if options differ, or if a wrapper such as DDP or FSDP manages the
    experts.
    """
    cache = modules.cache
    enter_call(modules.ranks)
    why = ""
    if cache.differed is None:
        # One rank may evaluate a copy of a layer alone, while the other ranks call the layer itself.
        may_be_alone = cache.is_of_copy or modules.ranks.record.has_repeated
        why = NEW_LAYER if may_be_alone else ""
    elif cache.compared != modules.compared_options:
        why = changed_options(cache.words, modules)
        note_settings(modules)
    must_compare = meet_before_call(modules.ranks, why)
    if may_be_wrapped(modules.experts):
        check_wrapped(modules.experts, set(modules.ranks.members))
    if modules.experts_module is not modules.experts:
        check_peft(modules.experts_module)
    if cache.differed is None or must_compare:
        # A library that hooks or wraps the experts may keep them on the meta device until it fetches them.
        if not is_fetched(modules):
            check_not_meta(modules.reference_parameter)
        with hidden_from_checkpoints():
            cache.differed = compare_options(modules)
        cache.words = options_in_words(modules)
        for exchange in (modules.dispatch, modules.combine):
            exchange.connect()
        note_settings(modules)


def note_settings(modules: LayerModules) -> None:
    """Notes that options were compared. After a change of a setting, the next call compares them again."""
    for module in (modules.gate, modules.experts, modules.shared_expert):
        if module is not None:
            note_comparison(module, modules.cache)


def compare_options(modules: LayerModules) -> bool:
    """Compares the options and values of a layer between its ranks. Collective.

    Returns False if all ranks hold equal experts, else True.

    Replicated parts are the parts of a layer that every rank holds: the gate, the shared expert and
    callbacks. One reduction compares digests (hashes) of the following between all ranks:

        options                       must be the same; else ValueError with the option, values and ranks
        kind of GPU                   must be the same; else ValueError with the kind of each rank's GPU
        values of replicated parts    must be the same; else a warning
        experts                       may differ or be equal; ValueError if the experts of one rank have
                                      overwritten the experts of the other ranks

    The function concludes that experts were overwritten if three conditions hold: the ranks' experts differed
    when they were built, they are equal now, and they have changed on some ranks but not on all.

    If any rank's experts were loaded from a state dict, `check_loaded` compares the experts instead. It is
    stricter: no two ranks may hold equal experts.

    All ranks raise the same errors and issue the same warnings.
    """
    options = options_in_words(modules)
    dense = dense_values(modules)
    like = modules.reference_parameter
    experts = modules.experts
    device = torch.device("cpu") if like is None else like.device
    built = experts.built
    current = sampled(experts)
    # A rank on the CPU has an entry, too, because all ranks must compare equally many values.
    options[GPU] = kind = kind_of_gpu(device)
    digests = [float(digest([value])) for value in (*options.values(), *dense.values(), built, current)]
    flags = [float(built == current), float(experts.was_loaded)]
    *are_equal, were_same, are_same, all_changed_or_none, all_loaded_or_none = same(
        modules.ranks, device, [*digests, *flags], stage="comparing the layer's options"
    )
    if experts.was_loaded or not all_loaded_or_none:
        check_loaded(modules)
    # The experts differed at construction, and are the same on all ranks now. On some rank the experts have
    # not changed since, and on other ranks they have: so a copy of that rank's experts has overwritten the
    # experts of the other ranks.
    elif are_same and not (were_same or all_changed_or_none):
        raise ValueError(COPIED)
    unequal_options = [
        name for name, is_same in zip(options, are_equal[: len(options)], strict=True) if not is_same
    ]
    if GPU in unequal_options:
        raise ValueError(_gpus_that_differ(modules, kind))
    if unequal_options:
        raise ValueError(_options_that_differ(modules, unequal_options, options[unequal_options[0]]))
    unequal_parts = [
        name for name, is_same in zip(dense, are_equal[len(options) :], strict=True) if not is_same
    ]
    # A warning only: some programs call a layer once before they load or broadcast its values.
    if unequal_parts:
        warn_once(_values_that_differ(modules, unequal_parts[0]))
    experts.are_equal = are_same
    return not are_same


GPU = "the kind of GPU"
"""The name under which ranks compare their kinds of GPUs, together with the layer's options."""


def kind_of_gpu(device: torch.device) -> str:
    """Returns the name and the compute capability of a GPU; "" for a device that is not a GPU.

    Example: "NVIDIA H200 (compute capability 9.0)"
    """
    if device.type != "cuda":
        return ""
    of_device = torch.cuda.get_device_properties(device)
    return f"{of_device.name} (compute capability {of_device.major}.{of_device.minor})"


def _gpus_that_differ(modules: LayerModules, mine: str) -> str:
    """Returns the error message for ranks on different kinds of GPUs, with the kind of every rank's GPU.

    The function is a collective: it collects the kinds. It is called only if the kinds are known to differ.

    modules: the modules and options of the layer.
    mine: the kind of this rank's GPU.
    """
    kinds = gathered(modules.ranks, mine, stage="showing the kinds of GPUs")
    kinds_of_ranks = "; ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
    return (
        f"the GPUs of a MoELayer's ranks must be of one kind, and differ: {kinds_of_ranks}. Kernels, the "
        "number of chunks and the memory of buffers are chosen for one kind: give the job GPUs of one kind, "
        "or build the layer over a group of ranks that have it, by MoELayer(..., group=...)"
    )


def _options_that_differ(modules: LayerModules, names: list[str], mine: str) -> str:
    """Returns the error message for options that differ between ranks.

    The function is a collective: it collects the options' values from all ranks.

    modules: the modules and options of the layer.
    names: the names of the options that differ.
    mine: this rank's value of the first option.
    """
    values_of_ranks = gathered(modules.ranks, mine, stage="showing the layer's options")
    values = "; ".join(f"rank {rank}: {value}" for rank, value in enumerate(values_of_ranks))
    also = f" (and so do {', '.join(names[1:])})" if names[1:] else ""
    return f"{names[0]} must be the same on every rank of a MoELayer, and differs{also}: {values}"


def _values_that_differ(modules: LayerModules, part: str) -> str:
    """Returns the warning for a replicated part of the layer that has different values on some ranks.

    The warning names the first tensor that differs. It also lists which ranks have equal values of that
    tensor. The function is a collective.

    modules: the modules and options of the layer.
    part: the name of the part, such as "gate".
    """
    own_digests = {name: fingerprint({name: tensor}) for name, tensor in dense_tensors(modules, part).items()}
    digests_of_ranks = gathered(modules.ranks, own_digests, stage="showing values that differ")
    names = dict.fromkeys(name for digests in digests_of_ranks for name in digests)
    name = next(name for name in names if len({digests.get(name) for digests in digests_of_ranks}) > 1)
    holders = dict[str | None, list[str]]()
    for rank, digests in enumerate(digests_of_ranks):
        holders.setdefault(digests.get(name), []).append(str(rank))
    equal_ranks = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" for ranks in holders.values()
    )
    return (
        f"{modules.ranks.layer or 'a MoELayer'}, whose values of {name} must be the same on every rank: they "
        f"differ (ranks with equal values: {equal_ranks}). If they stay different, each rank trains a model "
        f"of its own. {SAME_VALUES}"
    )


# ---- ranks that compare their options while others may not
#
# Options may change between calls, and a layer may be new on one rank only. If this rank began a comparison
# while its peers exchange row counts, collectives with unequal sizes could abort processes. So the rank first
# waits until all ranks begin the same call (`pmoe.comm.meeting`). Then all ranks compare their options.


NEW_LAYER = (
    "calls a layer for the first time, and other ranks call a layer that they have called before: every rank "
    "must call the layers of a group in the same order and equally often, and call a copy of a layer, or a "
    "layer that was loaded, on all ranks or on none"
)
"""Why a rank waits for the other ranks in a layer's first call. Errors begin with the rank, as "rank 3"."""


def changed_options(words_before: Mapping[str, str], now: LayerModules) -> str:
    """Returns a text that lists the options of a layer that were set since its last call; "" for none.

    If the options were not set on other ranks, those ranks raise an error with this text.

    words_before: {name of an option: the option as text when the ranks last compared options}.
    now: the layer's modules and options now.

    Example: "has set pipeline (4) of MoELayer 1 since its last call, and other ranks have not: ..."
    """
    words = options_in_words(now)
    changed = [f"{name} ({value})" for name, value in words.items() if words_before.get(name) != value]
    if not changed:
        return ""
    return (
        f"has set {', '.join(changed)} of {now.ranks.layer} since its last call, and other ranks have not: "
        "set the options of a layer on all ranks, before the same call"
    )
