"""The table of features, on one rank: which combinations a runner, a source of counts or a prediction
accepts.

An accepted combination must give the plain definition's result. A refused one must raise the sentence of a
feature that the table names. `tests/gloo/test_features.py` has the features that need more ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

import pmoe
from pmoe import warn
from pmoe.call import features, modules
from pmoe.runners import features as features_module
from pmoe.runners.features import SUPPORTED, Feature, refused
from tests import featured
from tests.allocated import Allocated
from tests.featured import Features, build, differences, expected, found, sentence
from tests.kit import one_thread
from tests.plain_steps import plain_steps, using
from tests.takers import COMPUTED, TAKERS, built, capturing, wrong_of, wrong_refusal

__all__ = ["one_thread"]

WIRES = (Feature.WIRE, Feature.WIRE_COMBINE, Feature.MESSAGES)
SEVERAL_RANKS = (Feature.RANKS, Feature.SHARDED, Feature.COPIES, *WIRES)
# tests/gloo/test_narrow_pairs.py, tests/unit/test_rounded_products.py
ROUNDED = (Feature.HIDDEN_E4M3, Feature.PRODUCTS)
ONE_RANK = [feature for feature in Feature if feature not in (*SEVERAL_RANKS, *ROUNDED)]
SINGLE: list[Features] = [(feature,) for feature in ONE_RANK]
PAIRS: list[Features] = [pair for pair in itertools.combinations(ONE_RANK, 2) if featured.fit(pair)]


@pytest.mark.parametrize("component", TAKERS)
def test_each_feature_gives_the_definitions_result_or_is_refused_by_name(component: str) -> None:
    assert not wrong_of(COMPUTED[component], SINGLE)


SHARE = 4
"""One of this many pairs of features is tried in every test run."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [pytest.param(i, marks=[pytest.mark.slow] * (i > 0)) for i in range(SHARE)])
@pytest.mark.parametrize("component", TAKERS)
def test_each_pair_of_features_gives_the_definitions_result_or_is_refused_by_name(
    component: str, share: int
) -> None:
    assert not wrong_of(COMPUTED[component], PAIRS[share::SHARE])


# ---- memory


def wrong_prediction(features: Features) -> Iterator[str]:
    """Yields what is wrong about the predicted memory of a layer with these features.

    The peak of a step must be within 2 % of the prediction from its row counts, and below the prediction from
    its tokens alone. This is not checked if the prediction names modules of a user's own that are not
    counted. A layer that fused kernels may compute must not be predicted.
    """
    layer = built(features)
    if isinstance(layer, list):
        yield from layer
        return
    asked = {*layer.layer_modules.features}
    components = {"fused": Feature.FUSED, "persistent": Feature.PERSISTENT}
    may_fuse = Feature.OFFLOADS not in asked and any(
        feature in asked and refused(component, asked) is None for component, feature in components.items()
    )
    try:
        predicted = layer.predict_memory(featured.T)
    except ValueError as error:
        if not (may_fuse and re.search(sentence(Feature.FUSED), str(error))):
            yield from wrong_refusal(str(error), "memory", asked)
        return
    yield from ["predicted, though it may be fused"] if may_fuse else []
    not_taken = refused("memory", asked)
    yield from [] if not_taken is None else [f"predicted, though {not_taken.name} is not taken"]
    if predicted.unknown:
        return
    bound = predicted.peak
    found(layer)  # what is made only once is there
    exact = layer.predict_memory(featured.T, layer.row_counts).peak
    for _ in range(3):  # a lane's thread may free early or late
        layer.l_aux = None  # whose graph holds the last step's x
        peak = peak_bytes(layer)
        if abs(exact - peak) <= 0.02 * peak <= 0.02 * bound:
            return
    yield f"{peak} bytes, of {exact} predicted and {bound} at most"


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
    """Makes the layers so large that what is not predicted, such as indices, is less than 2 % of the
    bytes.
    """
    for name, size in {"M": 64, "H": 128, "T": 256}.items():
        monkeypatch.setattr(featured, name, size)
    recipes = {**featured.RECIPES, Feature.BUDGET: featured.sets("memory_budget", "64MiB")}
    monkeypatch.setattr(featured, "RECIPES", recipes)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "cases", [pytest.param(SINGLE, id="each"), pytest.param(PAIRS, id="pairs", marks=pytest.mark.nightly)]
)
def test_memory_is_predicted_or_refused_by_name(cases: list[Features]) -> None:
    assert not wrong_of(wrong_prediction, cases)


# ---- what nobody stated


NEW = "rows are painted blue"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns the table with one more feature, about which it says nothing else. Every layer has the
    feature.
    """
    source = Path(features_module.__file__).read_text(encoding="utf-8")
    module = ModuleType("planted")
    exec(source.replace("\n\n\nF = Feature", f"\n    NEW = {NEW!r}\n\n\nF = Feature"), vars(module))
    asked = features.features_of
    monkeypatch.setattr(modules, "features_of", lambda of: asked(of) | {module.Feature.NEW})
    monkeypatch.setattr(features, "Feature", module.Feature)
    monkeypatch.setattr(features, "refused", module.refused)
    return module


def test_a_new_feature_is_refused_by_all_but_the_pipeline_until_somebody_states_it(
    planted: ModuleType,
) -> None:
    taken_by = {name for name in planted.SUPPORTED if planted.refused(name, {planted.Feature.NEW}) is None}
    assert taken_by == {"pipeline"} and planted.SUPPORTED.keys() == SUPPORTED.keys()
    with pytest.raises(ValueError, match=rf"pad_to_capacity \(True\) must be False where {NEW}"):
        build([Feature.PADDED])
    with pytest.raises(ValueError, match=rf"memory_budget \('1MiB'\) must be left out where {NEW}"):
        build([Feature.BUDGET])
    with pytest.raises(ValueError, match=rf"predict_memory must not be called where {NEW}"):
        build([Feature.ROTATES]).predict_memory(5)
    layer = build([Feature.FUSED])
    warn.GIVEN.clear()
    with using(plain_steps), pytest.warns(UserWarning, match=f"because {NEW}"):
        found(layer)
    assert layer.ran is not None and layer.ran.path == "pipeline"
    with capturing(), pytest.raises(RuntimeError, match=f"cannot hold this call of a MoELayer: {NEW}"):
        found(build([]))
    assert not list(differences(found(layer), expected(layer)))


def test_every_feature_has_a_recipe_and_every_taker_is_tried() -> None:
    assert featured.RECIPES.keys() == {*Feature}
    counts = {"one rank's counts"}  # of fused calls on one rank: `by_fused_kernels`
    rounds = {"rounded products"}  # tests/unit/test_rounded_products.py
    assert {*COMPUTED, "memory", *counts, *rounds} - {"graph of one rank"} == SUPPORTED.keys()
