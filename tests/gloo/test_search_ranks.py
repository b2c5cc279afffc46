"""A step that searches, with a rank that has no tokens, and with a rank that ends in a trial."""

from __future__ import annotations

import itertools
import os
import re
import signal
import tempfile
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import pmoe
from pmoe.choose import search, solve, trials
from pmoe.engine.lanes import base as lanes
from pmoe.measure import profile
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
