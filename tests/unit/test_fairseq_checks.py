"""Configurations that the fairseq plugin refuses and that cannot be tried on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pmoe.integrations.fairseq.checks import check_training

CRITERION = SimpleNamespace(moe_aux_weight=0.01)
COMMON = {"fp16": False, "bf16": False, "amp": False, "memory_efficient_fp16": False, "tpu": False}
COMMON |= {"fp16_no_flatten_grads": False, "model_parallel_size": 1, "quantization_config_path": None}


def config(**given: Any) -> SimpleNamespace:
    """Returns a configuration of a run on several GPUs that works, with some fields changed.

    given: fields of any part of a FairseqConfig.
    """
    parts: dict[str, dict[str, Any]] = {
        "common": dict(COMMON),
        "distributed_training": {"ddp_backend": "legacy_ddp", "pipeline_model_parallel": False},
        "optimization": {"use_bmuf": False},
        "ema": {"store_ema": False},
        "optimizer": {"_name": "adam"},
        "task": {"eval_bleu": False},
        "model": {"moe_expert_parallel_size": "none"},
    }
    parts["distributed_training"]["zero_sharding"] = "none"
    for name, value in given.items():
        (part,) = (each for each in parts.values() if name in each)
        part[name] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})


def test_a_mixed_precision_that_scales_each_ranks_loss_by_itself_is_refused_on_several_ranks() -> None:
    """If one rank's experts overflow, that rank would skip a step that the other ranks take."""
    with pytest.raises(ValueError, match="--amp must be left out on several ranks.* use --bf16"):
        check_training(config(amp=True), CRITERION, num_ranks=2, device_type="cuda")
    check_training(config(amp=True), CRITERION, num_ranks=1, device_type="cuda")
    check_training(config(bf16=True), CRITERION, num_ranks=2, device_type="cuda")
    check_training(config(fp16=True, fp16_no_flatten_grads=True), CRITERION, num_ranks=2, device_type="cuda")


def test_generating_in_validation_is_refused_where_ranks_share_experts() -> None:
    """If one rank's sentences end first, the other rank would wait for it in an all-to-all."""
    with pytest.raises(ValueError, match="--eval-bleu must be left out if experts are spread"):
        check_training(config(eval_bleu=True), CRITERION, num_ranks=2, device_type="cpu")
    check_training(config(eval_bleu=True), CRITERION, num_ranks=1, device_type="cpu")
    alone = config(eval_bleu=True, moe_expert_parallel_size="1")
    check_training(alone, CRITERION, num_ranks=2, device_type="cpu")
