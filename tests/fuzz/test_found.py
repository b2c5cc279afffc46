"""What the fuzzer found, made small. Each case names what was wrong, and where."""

from __future__ import annotations

import pytest

from tests.fuzz.cases import Call, Case
from tests.fuzz.play import job
from tests.fuzz.run import outcome
from tests.pool import ranks

FOUND = {
    # Lanes that are threads had no inference mode: what they wrote to was made in one. (engine/lanes.py)
    "an exchange in a thread, in inference mode": Case(
        world=1,
        options={"bypass_local": False, "combine": "hierarchical_1d"},
        calls=(Call(between="inference"),),
    ),
    # A mesh without "esp" had two groups, of which unpickling found one: an assertion failed.
    # (comm/topology.py)
    "a pickled layer of a mesh": Case(
        options={"mesh": "ep", "dispatch": "hierarchical_1d", "nodes": 1}, calls=(Call(between="pickle"),)
    ),
    # In eval mode the older checkpoint leaves no trace of its first pass; the newer one inside of it was
    # told that its routing had changed, where another call had as many tokens. (engine/rerouting.py)
    "two kinds of checkpoints in eval mode": Case(
        training=False,
        calls=(Call(checkpoint="plain"), Call(tokens=(5, 9, 5, 5), checkpoint="nested")),
        order=(1, 0),
    ),
}


SLOW = ("an exchange in a thread, in inference mode",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FOUND]
)
def test_what_was_found_is_right_now(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    case = FOUND[name]
    told = ranks(case.world).run(job, case, str(tmp_path_factory.getbasetemp()))
    assert not any(told), told


def test_only_a_rank_in_a_group_of_its_own_refuses_alone() -> None:
    case = Case(options={"group": "single", "memory_budget": "4KiB"}, calls=(Call(tokens=(0, 1, 5, 5)),))
    told = outcome(case, ranks)
    assert len(told) == 1 and told[0].startswith("refused: ValueError: memory_budget (4096 bytes)"), told
