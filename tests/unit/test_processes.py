"""A layer in one of several processes without a process group warns once, and says what to do."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

import pmoe
from pmoe import warn
from pmoe.comm.ranks import Ranks


def warned(build: Any) -> list[str]:
    warn.GIVEN.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    return [str(each.message) for each in caught if "WORLD_SIZE" in str(each.message)]


def test_a_layer_in_one_of_several_processes_names_init_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = warned(lambda: [pmoe.MoELayer(4, 8, 2) for _ in range(3)])
    assert len(found) == 1
    for part in (
        "one of 8 processes (WORLD_SIZE)",
        "torch.distributed.init_process_group",
        "this rank holds all of its experts",
        "pmoe.parallelize(model, mesh)",
        "before the optimizer and wrappers",
        "group=pmoe.comm.ranks.Ranks.single()",
    ):
        assert part in found[0]


@pytest.mark.parametrize("size", [None, "1", "0", "", "many"])
def test_one_process_is_no_reason_to_warn(size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert warned(lambda: pmoe.MoELayer(4, 8, 2)) == []


def test_who_chose_one_rank_or_has_no_values_yet_is_not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    built = pmoe.MoELayer(4, 8, 2)
    monkeypatch.setenv("WORLD_SIZE", "8")

    def on_meta_by_default() -> None:
        with torch.device("meta"):
            pmoe.MoELayer(4, 8, 2)

    assert warned(lambda: pmoe.MoELayer(4, 8, 2, group=Ranks.single())) == []
    assert warned(lambda: pmoe.MoELayer(4, 8, 2, device="meta")) == []
    assert warned(on_meta_by_default) == []
    assert warned(lambda: copy.deepcopy(built)(torch.randn(3, 4))) == []
    assert warned(lambda: pickle.loads(pickle.dumps(built))(torch.randn(3, 4))) == []
