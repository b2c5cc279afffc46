"""Selective activation checkpointing of layers on several ranks: all run their collectives again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import Restore
from pmoe.schedule.restore import ALL_PAIRS
from tests import kit
from tests.gloo.kit import NUM_EXPERTS, TOKENS
from tests.kit import assert_same, tokens
from tests.own_experts import mlp
from tests.pool import ranks
from tests.selective import CONTEXTS, Block, by_name, step
from tests.spread import spread

LAYERS: dict[str, dict[str, Any]] = {
    "two chunks": {"pipeline": 2},
    "noisy": {"gate": "noisy_topk"},
    "deepseek": {"gate": "deepseek", "pipeline": 2},
    "modules": {"expert": mlp},
    "shared expert": {"shared_expert": 5, "shared_gate": True, "pipeline": 2},
    "padded": {"capacity_factor": 1.0, "pad_to_capacity": True},
}


def contexts_job(rank: int, world: int, name: str, pair: Restore | bool) -> None:
    block = Block(kit.build(NUM_EXPERTS, memory_reuse=pair, **LAYERS[name]))
    x = tokens(9 if name == "padded" else TOKENS[world][rank], 10 + rank)
    expected = step(block, block, x)
    for context in CONTEXTS.values():
        run = functools.partial(checkpoint, block, use_reentrant=False, context_fn=context)
        assert_same(step(block, run, x), expected)
    for use_reentrant in (True, False):
        run = functools.partial(checkpoint, block, use_reentrant=use_reentrant)
        assert_same(step(block, run, x), expected)
    kept = functools.partial(pmoe.checkpoint_contexts, by_name)
    run = functools.partial(checkpoint, block, use_reentrant=False, context_fn=kept)
    assert_same(step(block, run, x), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, pair", spread([*LAYERS], [False, True, *ALL_PAIRS], every=5))
def test_a_step_is_as_without_a_checkpoint(name: str, pair: Restore | bool) -> None:
    ranks(2).run(contexts_job, name, pair)


def one_saves_job(rank: int, world: int) -> None:
    """Gives ranks different policies: collectives run again on each of them."""
    block = Block(kit.build(NUM_EXPERTS, pipeline=2))
    x = tokens(TOKENS[world][rank], 10 + rank)
    expected = step(block, block, x)
    context = CONTEXTS["MUST_SAVE" if rank == 0 else "MUST_RECOMPUTE"]
    run = functools.partial(checkpoint, block, use_reentrant=False, context_fn=context)
    assert_same(step(block, run, x), expected)
    assert torch.is_grad_enabled()


def test_ranks_may_differ_in_what_they_save() -> None:
    ranks(2).run(one_saves_job)
