"""The table of features on one rank: what a runner, a source of counts or a prediction takes gives the plain
definition's result; what it does not take is refused with the sentence of a feature.

`tests/gloo/test_features.py` has the features that need more ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

import pmoe
from pmoe import warn
from pmoe.layer import call as layer_call
from pmoe.layer import parts
from pmoe.layer.parts import Parts
from pmoe.runners import features as table
from pmoe.runners import fused_steps, one_rank
from pmoe.runners.features import TAKES, Feature, refused
from tests import featured
from tests.allocated import Allocated
from tests.featured import Features, build, differences, expected, found, sentence
from tests.kit import one_thread
from tests.plain_steps import plain_steps

__all__ = ["one_thread"]

ONE_RANK = [feature for feature in Feature if feature not in (Feature.RANKS, Feature.SHARDED)]
SINGLE: list[Features] = [(feature,) for feature in ONE_RANK]
PAIRS: list[Features] = [pair for pair in itertools.combinations(ONE_RANK, 2) if featured.fit(pair)]


def wrong_refusal(message: str, taker: str, asked: set[Feature]) -> Iterator[str]:
    """Where a message is not the sentence of the feature that ``taker`` does not take."""
    feature = refused(taker, asked)
    if feature is None:
        yield f"{taker} takes all of it, and says: {message}"
    elif not re.search(sentence(feature), message):
        yield f"{message} does not name {feature.name}"


LATE = {Feature.BUDGET: "memory budget", Feature.PADDED: "padded counts"}
"""What building a layer checks, in this order, and who it is that takes the other features or not."""


def built(features: Features) -> pmoe.MoELayer | list[str]:
    """The layer; or what is wrong with its refusal, nothing as a rule."""
    asked = {*build([feature for feature in features if feature not in LATE]).parts.features, *features}
    if Feature.PADDED in features and Feature.NO_CAPACITY not in features:
        asked -= {Feature.NO_CAPACITY}
    refusing = [taker for feature, taker in LATE.items() if feature in asked and refused(taker, asked)]
    try:
        layer = build(features)
    except ValueError as error:
        return list(wrong_refusal(str(error), refusing[0] if refusing else "pipeline", asked))
    missing = {*features} - layer.parts.features
    assert not missing, f"the recipe does not ask for {missing}"
    return [f"built, though {taker} does not take it" for taker in refusing] or layer


# ---- takers: each yields what is wrong


def by_pipeline(features: Features) -> Iterator[str]:
    layer = built(features)
    yield from layer if isinstance(layer, list) else differences(found(layer), expected(layer))


def by_padded_counts(features: Features) -> Iterator[str]:
    yield from by_pipeline({*features, Feature.PADDED})


def within_budget(features: Features) -> Iterator[str]:
    yield from by_pipeline({*features, Feature.BUDGET})


def by_fused_kernels(features: Features) -> Iterator[str]:
    """On one rank a fused call takes its counts from the routing kernel, or from the host."""
    layer = built({*features, Feature.FUSED})
    if isinstance(layer, list):
        yield from layer
        return
    warn.GIVEN.clear()
    with fused_steps.using(plain_steps), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = found(layer)
    yield from differences(step, expected(layer))
    assert layer.ran is not None
    not_taken = refused("fused", layer.parts.features)
    messages = [str(each.message) for each in told]
    if layer.ran.path.startswith("fused"):
        yield from [] if not_taken is None else [f"fused, though {not_taken.name} is not taken"]
    elif not messages:
        yield "not fused, and no reason given"
    elif not re.search(r"memory_reuse \(\S+\) offloads", messages[0]):  # the pair, where it is fixed
        yield from wrong_refusal(messages[0], "fused", {*layer.parts.features})


def by_one_ranks_kernels(features: Features) -> Iterator[str]:
    layer = built(features)
    if isinstance(layer, list):
        yield from layer
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
        yield from differences(found(layer), expected(layer))
    assert layer.ran is not None
    not_taken = refused("one rank", layer.parts.features)
    if (layer.ran.path == "one rank") != (not_taken is None):
        yield f"by {layer.ran.path}, though what is not taken is {not_taken}"


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Calls are taken to be captured in a CUDA graph, and one rank's kernels to be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_call, "is_capturing", lambda _: True)
        patch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
        yield


def in_a_graph(features: Features) -> Iterator[str]:
    """Padded layers, and those whose counts one rank's kernels never bring to the host."""
    layer = built(features)
    if isinstance(layer, list):
        yield from layer
        return
    taker = "graph capture" if Feature.PADDED in features else "one rank"
    found(layer)  # no call is captured before one like it was made
    with capturing():
        try:
            step = found(layer)
        except RuntimeError as error:
            if "may recompute modules, whose random state is on the host" not in str(error):
                yield from wrong_refusal(str(error), taker, {*layer.parts.features})
            return
    yield from differences(step, expected(layer))
    not_taken = refused(taker, layer.parts.features)
    yield from [] if not_taken is None else [f"captured, though {not_taken.name} is not taken"]


def in_a_padded_graph(features: Features) -> Iterator[str]:
    yield from in_a_graph({*features, Feature.PADDED})


COMPUTED: dict[str, Callable[[Features], Iterator[str]]] = {
    "pipeline": by_pipeline,
    "padded counts": by_padded_counts,
    "memory budget": within_budget,
    "fused": by_fused_kernels,
    "one rank": by_one_ranks_kernels,
    "graph of one rank": in_a_graph,
    "graph capture": in_a_padded_graph,
}


def wrong_of(check: Callable[[Features], Iterator[str]], cases: list[Features]) -> dict[str, list[str]]:
    """By features, what is wrong."""
    wrong = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for features in cases:
            if why := list(check(features)):
                wrong[" and ".join(feature.name for feature in features)] = why
    return wrong


@pytest.mark.parametrize("taker", COMPUTED)
def test_each_feature_gives_the_definitions_result_or_is_refused_by_name(taker: str) -> None:
    assert not wrong_of(COMPUTED[taker], SINGLE)


SHARE = 3
"""One pair in so many is in every test run."""


@pytest.mark.parametrize("share", [pytest.param(i, marks=[pytest.mark.slow] * (i > 0)) for i in range(SHARE)])
@pytest.mark.parametrize("taker", COMPUTED)
def test_each_pair_of_features_gives_the_definitions_result_or_is_refused_by_name(
    taker: str, share: int
) -> None:
    assert not wrong_of(COMPUTED[taker], PAIRS[share::SHARE])


# ---- memory


def wrong_prediction(features: Features) -> Iterator[str]:
    """The peak of a step is within 2 % of what is predicted from its row counts, and below what is predicted
    from its tokens alone. A layer needs rings for a prediction, and may not be one that kernels may fuse."""
    reuses = {Feature.ROTATES, Feature.OFFLOADS, Feature.BUDGET} & {*features}
    layer = built(features if reuses else {*features, Feature.ROTATES})
    if isinstance(layer, list):
        yield from layer
        return
    asked = {*layer.parts.features}
    may_fuse = Feature.FUSED in asked and refused("fused", asked) is None and Feature.OFFLOADS not in asked
    try:
        bound = layer.predict_memory(featured.T).peak
    except ValueError as error:
        if not (may_fuse and re.search(sentence(Feature.FUSED), str(error))):
            yield from wrong_refusal(str(error), "memory", asked)
        return
    yield from ["predicted, though it may be fused"] if may_fuse else []
    not_taken = refused("memory", asked)
    yield from [] if not_taken is None else [f"predicted, though {not_taken.name} is not taken"]
    found(layer)  # what is made only once is there
    layer.l_aux = None  # whose graph holds that step's x
    peak = peak_bytes(layer)
    predicted = layer.predict_memory(featured.T, layer.row_counts).peak
    if not abs(predicted - peak) <= 0.02 * peak <= 0.02 * bound:
        yield f"{peak} bytes, of {predicted} predicted and {bound} at most"


def peak_bytes(layer: pmoe.MoELayer) -> int:
    x, dy = featured.tokens(0)
    x.requires_grad_()
    _, routing = featured.given(layer.gate, 0)
    layer.zero_grad(set_to_none=True)

    def step(mark: Callable[[], None]) -> Tensor:
        with routing:
            y = layer(x)
        y.backward(dy)
        return y

    return Allocated(step).peak


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """So large that what is not predicted, such as indices, is less than 2 %."""
    for name, size in {"M": 32, "H": 64, "T": 256}.items():
        monkeypatch.setattr(featured, name, size)
    recipes = {**featured.RECIPES, Feature.BUDGET: featured.sets("memory_budget", "16MiB")}
    monkeypatch.setattr(featured, "RECIPES", recipes)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "cases", [pytest.param(SINGLE, id="each"), pytest.param(PAIRS, id="pairs", marks=pytest.mark.slow)]
)
def test_memory_is_predicted_or_refused_by_name(cases: list[Features]) -> None:
    assert not wrong_of(wrong_prediction, cases)


# ---- what nobody stated


NEW = "rows are painted blue"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The table with one more feature, of which it says nothing else; every layer asks for it."""
    source = Path(table.__file__).read_text(encoding="utf-8")
    module = ModuleType("planted")
    exec(source.replace("\n\n\nF = Feature", f"\n    NEW = {NEW!r}\n\n\nF = Feature"), vars(module))
    asked = Parts._asked
    monkeypatch.setattr(Parts, "_asked", lambda of: {**asked(of), module.Feature.NEW: True})
    monkeypatch.setattr(parts, "Feature", module.Feature)
    monkeypatch.setattr(parts, "refused", module.refused)
    return module


def test_a_new_feature_is_refused_by_all_but_the_pipeline_until_somebody_states_it(
    planted: ModuleType,
) -> None:
    taken_by = {name for name in planted.TAKES if planted.refused(name, {planted.Feature.NEW}) is None}
    assert taken_by == {"pipeline"} and planted.TAKES.keys() == TAKES.keys()
    with pytest.raises(ValueError, match=rf"pad_to_capacity \(True\) must be False where {NEW}"):
        build([Feature.PADDED])
    with pytest.raises(ValueError, match=rf"memory_budget \('1MiB'\) must be left out where {NEW}"):
        build([Feature.BUDGET])
    with pytest.raises(ValueError, match=rf"predict_memory must not be called where {NEW}"):
        build([Feature.ROTATES]).predict_memory(5)
    layer = build([Feature.FUSED])
    warn.GIVEN.clear()
    with fused_steps.using(plain_steps), pytest.warns(UserWarning, match=f"because {NEW}"):
        found(layer)
    assert layer.ran is not None and layer.ran.path == "pipeline"
    with capturing(), pytest.raises(RuntimeError, match=f"cannot hold this call of a MoELayer: {NEW}"):
        found(build([]))
    assert not list(differences(found(layer), expected(layer)))


def test_every_feature_has_a_recipe_and_every_taker_is_tried() -> None:
    assert featured.RECIPES.keys() == {*Feature}
    counts = {"one rank's counts"}  # of fused calls on one rank: `by_fused_kernels`
    assert {*COMPUTED, "memory", *counts} - {"graph of one rank"} == TAKES.keys()
