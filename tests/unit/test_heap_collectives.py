"""Multiprocessors for NCCL beside fused kernels: one warning if there may be too few, with what to set."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from pmoe import warn
from pmoe.comm.heap import providers
from pmoe.comm.heap.providers import warn_where_there_is_no_room
from pmoe.kernels import extension
from pmoe.kernels.comet.launcher import loading_refusal

NOT_SET = -(2**31)
"""NCCL_CONFIG_UNDEF_INT: NCCL's value for an option that is not set."""


def group(max_ctas: int = NOT_SET, cluster: int = NOT_SET) -> SimpleNamespace:
    return SimpleNamespace(config=SimpleNamespace(max_ctas=max_ctas, cga_cluster_size=cluster))


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    warn.GIVEN.clear()
    for name in ("NCCL_MAX_CTAS", "NCCL_CGA_CLUSTER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(providers, "backend_options", lambda group: group)


def told(monkeypatch: pytest.MonkeyPatch, *groups: SimpleNamespace, spare: int = 16) -> str:
    monkeypatch.setattr(providers, "_groups", lambda: list(groups))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_where_there_is_no_room(spare)
        warn_where_there_is_no_room(spare)
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


@pytest.mark.parametrize(
    "groups",
    [
        [group()],
        [group(max_ctas=16)],  # Hopper's default is clusters of 4
        [group(cluster=0)],
        [group(17, 0)],
        [group(16, 2)],
        [group(16, 0), group(32, 0)],
    ],
)
def test_collectives_that_may_not_fit_are_told_of(
    groups: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = told(monkeypatch, *groups)
    assert "leave 16 multiprocessors" in message
    for what in ("NCCL_MAX_CTAS=16", "NCCL_CGA_CLUSTER_SIZE=0", "config.max_ctas", "PMOE_SPARE_BLOCKS"):
        assert what in message


@pytest.mark.parametrize("groups", [[], [group(16, 0)], [group(4, 1), group(16, 0)]])
def test_collectives_that_fit_are_not(groups: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, *groups) == ""


def test_none_beside_a_layer_need_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, group(), spare=0) == ""


def test_nccls_variables_win_over_a_groups_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    monkeypatch.setenv("NCCL_CGA_CLUSTER_SIZE", "0")
    assert told(monkeypatch, group(64, 4)) == ""
    monkeypatch.setenv("NCCL_MAX_CTAS", "64")
    assert told(monkeypatch, group(8, 0)) != ""


# ---- loading


@pytest.mark.parametrize(
    ("device", "num_ranks", "eager", "refused"),
    [("cuda", 2, False, True), ("cuda", 2, True, False), ("cuda", 1, False, False), ("cpu", 2, False, False)],
)
def test_ranks_wait_for_each_other_only_where_every_kernel_is_loaded(
    device: str, num_ranks: int, eager: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "load", lambda: SimpleNamespace(loads_eagerly=lambda: eager))
    why = loading_refusal(torch.device(device), num_ranks)
    assert (why is not None) == refused
    assert why is None or why.startswith("CUDA_MODULE_LOADING=EAGER must be set before Python starts")
