"""Who takes features, and how each of them is held to `pmoe.runners.features`: the result or the refusal.

A check yields what is wrong of a layer that asks for some features, in words.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import pmoe
from pmoe import warn
from pmoe.call.row_bound import RowBound
from pmoe.decide import begin
from pmoe.graph import run
from pmoe.runners import one_rank
from pmoe.runners.features import Feature, refused
from tests import featured
from tests.featured import Features, build, differences, expected, found, given, sentence, tokens
from tests.plain_steps import plain_steps, using
from tests.programs import CpuBackend, on_cpu


def wrong_refusal(message: str, component: str, asked: set[Feature]) -> Iterator[str]:
    """Where a message is not the sentence of the feature that ``component`` does not take."""
    feature = refused(component, asked)
    if feature is None:
        yield f"{component} takes all of it, and says: {message}"
    elif not re.search(sentence(feature), message):
        yield f"{message} does not name {feature.name}"


LATE = {Feature.BUDGET: "memory budget", Feature.COPIES: "copies", Feature.PADDED: "padded counts"}
"""What building a layer checks, in this order, and who it is that takes the other features or not."""


def built(features: Features) -> pmoe.MoELayer | list[str]:
    """The layer; or what is wrong with its refusal, nothing as a rule."""
    if {Feature.SHARDED, Feature.MODULE_EXPERTS} <= {*features}:
        with pytest.raises(ValueError, match=sentence(Feature.SHARDED)):  # whoever might compute them
            build(features)
        return []
    early = build([feature for feature in features if feature not in LATE]).layer_modules
    # Where every rank has a part of every expert, there is no other rank for a copy.
    idle = {Feature.COPIES} if early.grid.is_sharded and early.grid.ep.size == 1 else set()
    asked = {*early.features, *features} - idle
    if Feature.LATENT in features:
        asked -= {Feature.SHARED_EXPERT}
    if Feature.PADDED in features and Feature.NO_CAPACITY not in features:
        asked -= {Feature.NO_CAPACITY}
    refusing = [
        component for feature, component in LATE.items() if feature in asked and refused(component, asked)
    ]
    try:
        layer = build(features)
    except ValueError as error:
        return list(wrong_refusal(str(error), refusing[0] if refusing else "pipeline", asked))
    missing = {*features} - layer.layer_modules.features - idle
    if Feature.LATENT in features:  # their shared expert is outside of the pass, and no part computes it
        missing -= {Feature.SHARED_EXPERT}
    assert not missing, f"the recipe does not ask for {missing}"
    return [f"built, though {component} does not take it" for component in refusing] or layer


# ---- takers: each yields what is wrong


def by_pipeline(features: Features) -> Iterator[str]:
    layer = built(features)
    yield from layer if isinstance(layer, list) else differences(found(layer), expected(layer))


def by_padded_counts(features: Features) -> Iterator[str]:
    yield from by_pipeline({*features, Feature.PADDED})


def with_copies(features: Features) -> Iterator[str]:
    """Busy experts have copies if there are several ranks."""
    copies = [Feature.COPIES] * (dist.is_initialized() and dist.get_world_size() > 1)
    yield from by_pipeline({*features, *copies})


def within_budget(features: Features) -> Iterator[str]:
    yield from by_pipeline({*features, Feature.BUDGET})


def by_fused_kernels(features: Features, component: str = "fused") -> Iterator[str]:
    """On one rank a call by COMET's kernels takes its counts from the routing kernel, or from the host."""
    feature = Feature.FUSED if component == "fused" else Feature.PERSISTENT
    layer = built({*features} - {Feature.FUSED, Feature.PERSISTENT} | {feature})
    if isinstance(layer, list):
        yield from layer
        return
    warn.GIVEN.clear()
    with using(plain_steps), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = found(layer)
    yield from differences(step, expected(layer))
    assert layer.ran is not None
    not_taken = refused(component, layer.layer_modules.features)
    messages = [str(each.message) for each in told if "program (True)" not in str(each.message)]
    if layer.ran.path.startswith(component):
        yield from [] if not_taken is None else [f"fused, though {not_taken.name} is not taken"]
    elif not messages:
        yield "not fused, and no reason given"
    elif not re.search(r"memory_reuse \(\S+\) offloads", messages[0]):  # the pair, where it is fixed
        yield from wrong_refusal(messages[0], component, {*layer.layer_modules.features})


def by_persistent_kernels(features: Features) -> Iterator[str]:
    yield from by_fused_kernels(features, "persistent")


def with_bounded_rows(features: Features) -> Iterator[str]:
    """On several ranks, `pmoe.BoundedSteps` bounds the second call. On one rank there is nothing to bound."""
    layer = built({*features} - {Feature.FUSED, Feature.PERSISTENT} | {Feature.PERSISTENT})
    if isinstance(layer, list):
        yield from layer
        return
    warn.GIVEN.clear()
    exceeded = torch.zeros((), dtype=torch.int64)
    bound = layer.cache.row_bound = RowBound(exceeded)
    bound.is_on = True
    with using(plain_steps), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found(layer)
        step = found(layer)
    yield from differences(step, expected(layer))
    yield from ["rows were dropped"] if exceeded else []
    not_taken = refused("bounded rows", layer.layer_modules.features)
    messages = [str(each.message) for each in told if "does not bound" in str(each.message)]
    if layer.ranks.size == 1:
        yield from ["bounded on one rank"] if bound.agreed or messages else []
    elif bound.agreed:
        yield from [] if not_taken is None else [f"bounded, though {not_taken.name} is not taken"]
    elif messages:
        yield from wrong_refusal(messages[0], "bounded rows", {*layer.layer_modules.features})
    elif Feature.PADDED in layer.layer_modules.features:
        return  # the capacity bounds its rows (`by_padded_counts`)
    elif not any(re.search(r"memory_reuse \(\S+\) offloads", str(each.message)) for each in told):
        yield "not bounded, and no reason given"
    if layer.ranks.size == 1:
        return
    with using(plain_steps), capturing():
        try:
            step = found(layer)
        except RuntimeError as error:
            if bound.agreed:
                yield f"bounded, but no graph holds it: {error}"
            elif not_taken is not None:
                yield from wrong_refusal(str(error), "bounded rows", {*layer.layer_modules.features})
            return
    yield from differences(step, expected(layer))
    yield from [] if bound.agreed else ["captured without a bound"]


def by_programs(features: Features) -> Iterator[str]:
    """Programs take no layer without ring slots, so layers get them unless a feature decides on them."""
    slots = {Feature.ROTATES} if featured.fit({*features, Feature.PROGRAM, Feature.ROTATES}) else set()
    layer = built({*features, Feature.PROGRAM, *slots})
    if isinstance(layer, list):
        yield from layer
        return
    warn.GIVEN.clear()
    with on_cpu(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = found(layer)
    yield from differences(step, expected(layer))
    assert layer.ran is not None
    asked = {*layer.layer_modules.features}
    not_taken = refused("program", asked)
    messages = [str(each.message) for each in told if "program (True)" in str(each.message)]
    if layer.ran.path == "program":
        yield from [] if not_taken is None else [f"by programs, though {not_taken.name} is not taken"]
    elif not messages:
        yield "by the engine, and no reason given"
    elif "memory_reuse=False" not in messages[0] and "the same chunks" not in messages[0]:
        yield from wrong_refusal(messages[0], "program", asked)


def with_bounded_programs(features: Features) -> Iterator[str]:
    """As `with_bounded_rows`, for layers whose passes run by programs over heaps, with room for all rows."""
    slots = {Feature.ROTATES} if featured.fit({*features, Feature.PROGRAM, Feature.ROTATES}) else set()
    layer = built({*features, Feature.PROGRAM, *slots})
    if isinstance(layer, list):
        yield from layer
        return
    layer.switches = replace(layer.options.switches, program_heaps=True)
    if layer.ranks.size > 1:
        layer.slack = 8.0
    warn.GIVEN.clear()
    exceeded = torch.zeros((), dtype=torch.int64)
    bound = layer.cache.row_bound = RowBound(exceeded)
    bound.is_on = True
    backend = CpuBackend()  # programs of another backend would have to be agreed on again
    with on_cpu(backend), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found(layer)
        step = found(layer)
    yield from differences(step, expected(layer))
    yield from ["rows were dropped"] if exceeded else []
    asked = {*layer.layer_modules.features}
    not_taken = refused("bounded programs", asked)
    messages = [
        str(each.message) for each in told if re.search(r"does not bound|program \(True\)", str(each.message))
    ]
    of_options = "memory_reuse=False|the same chunks|leave a choice to the host"
    if layer.ranks.size == 1:
        yield from ["bounded on one rank"] if bound.agreed else []
        return
    if bound.agreed:
        yield from [] if not_taken is None else [f"bounded, though {not_taken.name} is not taken"]
    elif not messages:
        yield "not bounded, and no reason given"
    elif not re.search(of_options, messages[0]):
        component = "program" if "program (True)" in messages[0] else "bounded programs"
        yield from wrong_refusal(messages[0], component, asked)
    with on_cpu(backend), capturing():
        try:
            step = found(layer)
        except RuntimeError as error:
            if bound.agreed:
                yield f"bounded, but no graph holds it: {error}"
            elif not re.search(of_options, str(error)):
                # A layer that also asks for fused kernels is refused as one that they compute.
                component = "bounded rows" if layer.fused else "bounded programs"
                yield from wrong_refusal(str(error), component, asked)
            return
    yield from differences(step, expected(layer))
    yield from [] if bound.agreed else ["captured without a bound"]


def by_one_ranks_kernels(features: Features) -> Iterator[str]:
    layer = built(features)
    if isinstance(layer, list):
        yield from layer
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_rank, "DEVICES", ("cpu",))
        patch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
        yield from differences(found(layer), expected(layer))
    assert layer.ran is not None
    not_taken = refused("one rank", layer.layer_modules.features)
    if (layer.ran.path == "one rank") != (not_taken is None):
        yield f"by {layer.ran.path}, though what is not taken is {not_taken}"


def by_few_rows(features: Features) -> Iterator[str]:
    """Only a call without gradients goes this way. Calls with them have been compared by `by_pipeline`."""
    layer = built(features)
    if isinstance(layer, list):
        yield from layer
        return
    layer.eval()
    x, _ = tokens(layer.ranks.rank)
    _, routing = given(layer.gate, layer.ranks.rank)
    with torch.no_grad(), routing:
        y = layer(x)
    wanted = expected(layer)
    got = {"y": y, "l_aux": layer.l_aux}
    yield from differences(got, {name: wanted[name] for name in got})
    assert layer.ran is not None
    not_taken = refused("few rows", layer.layer_modules.features)
    if (layer.ran.path == "few rows") != (not_taken is None):
        yield f"by {layer.ran.path}, though what is not taken is {not_taken}"


def batch_invariant(features: Features) -> Iterator[str]:
    """Layers that `pmoe.make_batch_invariant` changes, or refuses."""
    layer = built(features)
    if isinstance(layer, list):
        yield from layer
        return
    not_taken = refused("batch invariance", layer.layer_modules.features)
    try:
        pmoe.make_batch_invariant(layer)
    except ValueError as error:
        is_of_module = re.search("is none of|the order is a|shared_gate", str(error))
        if not is_of_module:
            yield from wrong_refusal(str(error), "batch invariance", {*layer.layer_modules.features})
        return
    yield from [] if not_taken is None else [f"changed, though {not_taken.name} is not taken"]
    yield from differences(found(layer), expected(layer))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Calls are taken to be captured in a CUDA graph, and one rank's kernels to be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(begin, "is_for_graph", lambda _: True)
        patch.setattr(one_rank, "DEVICES", ("cpu",))
        patch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
        yield


def in_a_graph(features: Features) -> Iterator[str]:
    """Padded layers, and those whose counts one rank's kernels never bring to the host."""
    layer = built(features)
    if isinstance(layer, list):
        yield from layer
        return
    component = "graph capture" if Feature.PADDED in features else "one rank"
    found(layer)  # no call is captured before one like it was made
    with capturing():
        try:
            step = found(layer)
        except RuntimeError as error:
            if "may recompute modules, whose random state is on the host" not in str(error):
                yield from wrong_refusal(str(error), component, {*layer.layer_modules.features})
            return
    yield from differences(step, expected(layer))
    not_taken = refused(component, layer.layer_modules.features)
    yield from [] if not_taken is None else [f"captured, though {not_taken.name} is not taken"]


def in_a_padded_graph(features: Features) -> Iterator[str]:
    yield from in_a_graph({*features, Feature.PADDED})


def in_a_whole_graph(features: Features) -> Iterator[str]:
    """A layer that is not captured runs as it would without the backend, and a warning says why."""
    layer = built(features)
    if isinstance(layer, list):
        yield from layer
        return
    torch._dynamo.reset()
    run.PROGRAMS.clear()
    warn.GIVEN.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = found(layer, torch.compile(layer, backend="pmoe"))
    yield from differences(step, expected(layer))
    assert layer.ran is not None
    not_taken = refused("whole graph", layer.layer_modules.features)
    if layer.ran.path == "whole graph":
        yield from [] if not_taken is None else [f"captured, though {not_taken.name} is not taken"]
    else:
        messages = [str(each.message) for each in told if "outside of the graph" in str(each.message)]
        yield from (
            wrong_refusal(messages[0], "whole graph", {*layer.layer_modules.features})
            if messages
            else ["not captured, and no reason given"]
        )


COMPUTED: dict[str, Callable[[Features], Iterator[str]]] = {
    "pipeline": by_pipeline,
    "padded counts": by_padded_counts,
    "memory budget": within_budget,
    "copies": with_copies,
    "batch invariance": batch_invariant,
    "fused": by_fused_kernels,
    "persistent": by_persistent_kernels,
    "bounded rows": with_bounded_rows,
    "program": by_programs,
    "bounded programs": with_bounded_programs,
    "one rank": by_one_ranks_kernels,
    "few rows": by_few_rows,
    "graph of one rank": in_a_graph,
    "graph capture": in_a_padded_graph,
    "whole graph": in_a_whole_graph,
}


TAKERS = [name if name != "whole graph" else pytest.param(name, marks=pytest.mark.slow) for name in COMPUTED]
"""For every test run, but for what is compiled in each case."""


def wrong_of(check: Callable[[Features], Iterator[str]], cases: list[Features]) -> dict[str, list[str]]:
    """By features, what is wrong."""
    wrong = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for features in cases:
            if why := list(check(features)):
                wrong[" and ".join(feature.name for feature in features)] = why
    return wrong
