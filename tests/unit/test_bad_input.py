"""Each argument of each public function is given wrong values: it must raise, or have a documented meaning.

The error must be a ValueError or a TypeError that names the argument. A table says which of the values are
right for an argument. An argument that the table lacks fails the test.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from pmoe.call.options import LayerOptions
from pmoe.training.checkpoint import CheckpointError
from tests.bad_input.calls import CALLS
from tests.bad_input.public import arguments, public
from tests.bad_input.table import ALSO, TAKEN, USERS_OWN
from tests.bad_input.values import VALUES

NAMED = {
    "MoELayer's options": [*LayerOptions.__dataclass_fields__],
    "StatsWriter.step's scalars": ["loss"],
    "StatsWriter.note's scalars": ["loss"],
    "configure": [*TAKEN["configure"]],
    "layers": ["model"],
    "skip_padding": ["model"],
    "explain": ["model", "options"],
}
"""Arguments of calls that are not calls of one function with a signature, by name of the call."""


def test_every_argument_of_every_public_function_is_in_the_table() -> None:
    known = {
        name: set(NAMED[name] if name in NAMED else arguments(function))
        for name, (function, _) in CALLS.items()
    }
    assert known == {name: set(found) for name, found in TAKEN.items()}
    found = public()
    assert len(found) > 40
    assert found == {name: set(TAKEN.get(name, ())) for name in found}


@pytest.mark.slow
def test_every_option_of_configure_is_in_the_table() -> None:
    from pmoe.integrations.transformers.layers import OPTIONS, layers  # imports transformers

    assert {*OPTIONS} == set(TAKEN["configure"]) and arguments(layers) == set(TAKEN["layers"])


def wrong(name: str, argument: str, shown: str) -> str:
    """Calls a function with a value. Returns what is wrong about the outcome; "" if nothing is.

    name: name of the call in `CALLS`.
    shown: name of the value in `VALUES`.
    """
    is_taken = shown in TAKEN[name][argument].split()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CALLS[name][1](**{argument: VALUES[shown]()})
        return "" if is_taken else f"{argument}={shown} was taken"
    except Exception as error:
        if shown in USERS_OWN.get((name, argument), "").split():
            return ""
        named = argument in str(error) or ALSO.get(name, argument) in str(error)
        named = named or isinstance(error, OSError)  # which names the file
        is_clear = named and isinstance(error, (ValueError, TypeError, OSError, CheckpointError))
        return "" if is_clear and not is_taken else f"{argument}={shown}: {type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_value_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names are paths, too
    found = [wrong(name, argument, shown) for argument in TAKEN[name] for shown in VALUES]
    assert not any(found), "\n".join(each[:300] for each in found if each)
