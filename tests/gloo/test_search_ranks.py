"""A step that searches, with a rank that has no tokens, and with a rank that ends in a trial."""

from __future__ import annotations

import itertools
import os
import re
import signal
import tempfile
import time
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import pmoe
from pmoe.choose import part_of_batch, search, solve, trials
from pmoe.engine.lanes import base as lanes
from pmoe.measure import profile
from pmoe.warn import GIVEN, warn_once
from tests.gloo.kit import error_of
from tests.pool import Pool, ranks

TIMEOUT_SECONDS = 8.0
"""Timeout of the groups in which a rank ends."""

TOKENS = 4096


def forget() -> None:
    """Forgets what this process has measured and tried."""
    search._LEARNED.clear()
    profile.PROFILES.clear()
    profile._limits.clear()
    solve._operations.clear()


def step(layer: pmoe.MoELayer, num_tokens: int) -> list[torch.Tensor]:
    """Returns the output and all gradients of a step."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 32, generator=generator).requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]  # type: ignore[union-attr]


def empty_job(rank: int, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Runs a step that searches, in which the last rank has no tokens."""
    forget()
    runs = []
    run = trials.Trial.run

    def counted(trial: trials.Trial) -> tuple[float, float]:
        runs.append((trial.choice.forward, trial.choice.backward))
        return run(trial)

    num_tokens = TOKENS if rank < world - 1 else 0
    torch.manual_seed(0)
    layer = pmoe.MoELayer(32, 64, 4, top_k=2, **options)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, PMOE_CACHE=folder),
        mock.patch.object(trials.Trial, "run", counted),
    ):
        got = step(layer, num_tokens)
        searched = list(runs)
        step(layer, num_tokens)
    ran = layer.ran
    assert ran is not None
    fixed = pmoe.MoELayer(32, 64, 4, top_k=2, pipeline=1)
    fixed.load_state_dict(layer.state_dict())
    wanted = step(fixed, num_tokens)
    forget()
    return {
        "ran": (ran.forward, ran.backward),
        "searched": searched,
        "again": len(runs) - len(searched),
        "same": all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, wanted, strict=True)),
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pipeline", [True, "solve"])
@pytest.mark.parametrize("reuse", ["S4", True, "S1", False])
def test_a_rank_without_tokens_takes_part_in_the_search_and_its_gradients_are_right(
    pipeline: Any, reuse: Any
) -> None:
    first, second = ranks(2).run(empty_job, {"pipeline": pipeline, "memory_reuse": reuse})
    assert first["ran"] == second["ran"]
    assert first["searched"] == second["searched"] != []
    assert first["again"] == second["again"] == 0
    assert first["same"] and second["same"]


SIZES: dict[str, list[tuple[int, int]]] = {
    "no rank has tokens in the first step": [(0, 0), (TOKENS, TOKENS), (TOKENS, TOKENS)],
    "no rank has tokens after a search": [(TOKENS, TOKENS), (0, 0), (0, TOKENS), (TOKENS, 0)],
    "the size changes after a search": [(TOKENS, TOKENS), (TOKENS // 2, 3), (TOKENS + 1, 1), (1, TOKENS)],
}
"""Numbers of tokens of the two ranks in successive steps."""


def sizes_job(rank: int, world: int, options: dict[str, Any], sizes: list[tuple[int, int]]) -> list[bool]:
    """Returns for each step whether output and gradients are those of a layer that searches nothing."""
    forget()
    torch.manual_seed(0)
    layer = pmoe.MoELayer(32, 64, 4, top_k=2, **options)
    fixed = pmoe.MoELayer(32, 64, 4, top_k=2, pipeline=1)
    fixed.load_state_dict(layer.state_dict())
    is_right = []
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, PMOE_CACHE=folder):
        for of_ranks in sizes:
            got = step(layer, of_ranks[rank])
            wanted = step(fixed, of_ranks[rank])
            is_right.append(all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, wanted, strict=True)))
    forget()
    return is_right


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "options",
    [{"pipeline": True, "memory_reuse": "S4"}, {"pipeline": "solve", "memory_reuse": True}],
    ids=str,
)
def test_steps_of_any_sizes_around_a_search_have_the_right_gradients(
    name: str, options: dict[str, Any]
) -> None:
    sizes = SIZES[name]
    assert ranks(2).run(sizes_job, options, sizes) == [[True] * len(sizes)] * 2


def failing_job(rank: int, world: int, is_warning: bool) -> tuple[list[str], float]:
    """Returns the errors of two steps, and the seconds of the first one, which one rank leaves in its search.

    is_warning: True for a warning of rank 0 that the user turns into an error; False for an allocation of
        rank 1 that fails between two trials.
    """
    forget()
    GIVEN.clear()
    torch.manual_seed(0)
    layer = pmoe.MoELayer(32, 64, 4, top_k=2, pipeline=True, memory_reuse="S4")
    step(layer, 8)  # connections are made; so few tokens need no search
    find = part_of_batch.first_tokens

    def failing(*given: Any) -> Any:
        if is_warning and rank == 0:
            warn_once("it was planted")
        if not is_warning and rank == 1:
            raise torch.OutOfMemoryError("it was planted")
        return find(*given)

    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, PMOE_CACHE=folder),
        mock.patch.object(part_of_batch, "first_tokens", failing),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        told = [error_of(lambda: step(layer, TOKENS))]
    seconds = time.monotonic() - begin
    return [*told, error_of(lambda: step(layer, TOKENS))], seconds


@pytest.mark.parametrize("is_warning", [False, True], ids=["memory", "a warning that is an error"])
def test_an_error_of_one_rank_between_two_trials_is_told_to_the_other(is_warning: bool) -> None:
    """The other rank waited in the next trial, until the group's timeout."""
    with Pool(2, timeout_seconds=30.0) as pool:
        found = pool.run(failing_job, is_warning, timeout=100)
    own, other = found if is_warning else found[::-1]
    kind = "UserWarning" if is_warning else "MemoryError"
    assert own[0][0].startswith(f"{kind}: ") and "it was planted" in own[0][0], found
    assert f"global rank {1 - is_warning} raised {kind}: " in other[0][0], found
    assert own[1] < 20 and other[1] < 20
    for (_, after), _ in found:
        assert "left its process group in the middle of a pass" in after


BETWEEN = "after the first trial"
"""The moment before a barrier, whose error was gloo's own and named nothing."""


def ending_job(rank: int, world: int, task: str, ending: str) -> tuple[str, float]:
    """Returns the error of a step that searches, in which rank 1 ends, and the seconds that the step took."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(32, 64, 4, top_k=2, pipeline=True, memory_reuse="S4")
    step(layer, 8)  # connections are made; so few tokens need no search
    run = trials.Trial.run
    in_trial = []

    def marked(trial: trials.Trial) -> tuple[float, float]:
        in_trial.append(trial)
        seconds = run(trial)
        if rank == 1 and task == BETWEEN:
            os.kill(os.getpid(), signal.SIGKILL)
        return seconds

    def watch(schedule: Any, act: Any, device: Any, of: object) -> Any:
        def action(each: Any) -> Any:
            if rank == 1 and in_trial and f"{schedule.direction} {each.name}" == task:
                if ending == "raises":
                    raise ZeroDivisionError("it was planted")
                os.kill(os.getpid(), signal.SIGKILL)
            return act(each)

        return action

    lanes.watchers.append(SimpleNamespace(watch=watch))
    begin = time.monotonic()
    told = ""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, PMOE_CACHE=folder),
        mock.patch.object(trials.Trial, "run", marked),
    ):
        try:
            step(layer, TOKENS)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    return told, time.monotonic() - begin


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "task, ending",
    [*itertools.product(["forward C0", "backward S0"], ["dies", "raises"]), (BETWEEN, "dies")],
)
def test_a_rank_that_ends_in_a_trial_is_named_on_the_other_in_time(task: str, ending: str) -> None:
    pool = Pool(2, TIMEOUT_SECONDS)
    try:
        pool.start(ending_job, task, ending)
        told, seconds = pool.answer(0, timeout=60)
    finally:
        pool.stop()
    by_whom = (
        "global rank 1 raised .*it was planted" if ending == "raises" else "(a peer has died|global rank 1)"
    )
    assert re.match(rf"RuntimeError: pmoe: rank 0 of 2 failed in .+; {by_whom}", told, re.DOTALL), told
    assert seconds < TIMEOUT_SECONDS + 20
