"""What a layer was given, in words: every rank must have given the same, compared at its first call.

Ranks that differ in options would wait for each other until the group's timeout, take each other's bytes for
something else, or hold another model each.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from pmoe.comm.agreement import digest, gathered, same
from pmoe.experts.wrapped import COPIED, sampled
from pmoe.layer.parts import Parts
from pmoe.layer.stored_state import check_loaded
from pmoe.layer.values import SAME_VALUES, dense_tensors, dense_values, fingerprint
from pmoe.warn import warn_once

NOT_COMPARED = {
    "gate",
    "router",
    "experts_module",
    "shared_module",
    "callback_modules",
    "spec",
    "grid",
    "trusts_gate",
    "scalars",
    "callbacks",
    "gradients",
    "traffic",
    "known",
}
"""Of `Parts`: what is compared first or in other words, or may differ."""

PLAIN = (bool, int, float, str, torch.dtype)


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


NO_SETTINGS = ("training", "is_parallelized", "built", "was_loaded", "may_be_equal", "are_equal")
"""Attributes of modules that change neither results nor times."""


def options_in_words(parts: Parts, *, of_users: bool = False) -> dict[str, str]:
    """Every option of the spec by its name, and of every module its class and settings. of_users: also those
    of classes that are not pmoe's, where ranks may differ."""
    spec = {field.name: getattr(parts.spec, field.name) for field in fields(parts.spec)}
    names = ["gate", *(field.name for field in fields(parts) if field.name not in NOT_COMPARED)]
    others = {
        "callbacks": f"{'without' if parts.hooks is None else 'with'} hooks inside the layer",
        "a GradientReducer": parts.gradients is not None,
    }
    modules = {name: _described(getattr(parts, name), of_users) for name in names}
    return {name: str(value) for name, value in (spec | modules | others).items()}


def _described(module: object, of_users: bool) -> str:
    """Its class; its plain attributes, and the types of its own parameters: no address, nothing random.

    Example: "TopKGate(normalize=True, top_k=2, weight=torch.float32, z_loss_weight=0.0)"
    """
    kind = type(module)
    if module is None:
        return "None"
    if not (of_users or kind.__module__.startswith("pmoe.")):
        return kind.__name__
    parameters = vars(module).get("_parameters", {}).items()
    own = vars(module) | {name: each.dtype for name, each in parameters if each is not None}
    plain = [name for name in sorted(own) if isinstance(own[name], PLAIN) and name[0] != "_"]
    settings = ", ".join(f"{name}={own[name]!r}" for name in plain if name not in NO_SETTINGS)
    return f"{kind.__name__}({settings})"
