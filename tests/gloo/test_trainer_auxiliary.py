"""The auxiliary loss of a transformers model in transformers' Trainer, with pmoe's experts and without pmoe.

The loss of OLMoE is cross-entropy + 0.01 * load_balancing_loss_func(tokens of a micro-batch of one rank). The
Trainer lets the model divide the cross-entropy by the labels of the whole step, and adds up the losses of all
parts, which are the micro-batches of all ranks. So the weight of the auxiliary loss grows with the number of
parts (https://github.com/huggingface/transformers/issues/48690). This is so with pmoe and without it:

    ranks x samples x micro-batches    1 x 4 x 2    2 x 2 x 2    1 x 2 x 4
    parts of a step of 8 samples       2            4            4, with the same samples
    loss of the first step             4.3119       4.3566       4.3566
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo.test_trainer import arguments_of, as_launched, interrupted, losses_of
from tests.pool import ranks
from tests.tiny_transformers import batch, make_model

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

WEIGHT = 0.01
"""router_aux_loss_coef of OLMoE."""


FIRST_STEP = {
    "1 x 8 x 1": (2.0971, 4.2906),
    "1 x 4 x 2": (2.1160, 4.3119),
    "2 x 4 x 1": (2.1160, 4.3119),
    "1 x 2 x 4": (2.1748, 4.3566),
    "2 x 2 x 2": (2.1748, 4.3566),
}
"""Ranks x samples x micro-batches -> the mean auxiliary loss of a part, and the loss (docs/training.md)."""


def job(
    rank: int,
    world: int,
    path: Path,
    out: Path,
    samples: int,
    micro_batches: int,
    by_pmoe: bool,
    resume: bool,
) -> tuple[list[float], list[float]]:
    """Returns the loss of each step, and the auxiliary losses of this rank's micro-batches in the first step.

    samples: of a micro-batch.
    by_pmoe: whether pmoe's experts are spread over the ranks. If not, transformers trains alone, under
        DistributedDataParallel.
    resume: whether to go on from the newest checkpoint.
    """
    as_launched(rank, world)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind: Any = transformers.Trainer
    how: dict[str, Any] = {"experts_implementation": "eager"}
    if by_pmoe:
        from transformers.distributed import DistributedConfig

        import pmoe.integrations.transformers as integration

        class SpreadTrainer(integration.SpreadCheckpoints, transformers.Trainer):
            pass

        integration.configure(pipeline=2, memory_reuse="S4")
        spread = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="pmoe")
        kind = SpreadTrainer
        how = {"distributed_config": spread}
    model = transformers.OlmoeForCausalLM.from_pretrained(path, dtype=torch.float32, **how)
    auxiliary: list[float] = []
    model.register_forward_hook(lambda _, __, output: auxiliary.append(output.aux_loss.item()))
    parts = {"per_device_train_batch_size": samples, "gradient_accumulation_steps": micro_batches}
    arguments = arguments_of(out, world, save_strategy="steps" if by_pmoe else "no", **parts)
    rows = [{"input_ids": row, "labels": row} for row in batch(48)]
    trainer = kind(model=model, args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=True if resume else None)
    return losses_of(trainer), auxiliary[:micro_batches]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with an OLMoE that adds its auxiliary loss to its loss."""
    folder = tmp_path_factory.mktemp("model")
    make_model("OLMoE", "eager", output_router_logits=True).save_pretrained(folder)
    return folder


def run(
    path: Path, out: Path, world: int, samples: int, micro_batches: int, by_pmoe: bool, resume: bool = False
) -> tuple[list[float], list[float]]:
    """Returns the losses of a training, and the auxiliary losses of all parts of its first step."""
    found = ranks(world).run(job, path, out, samples, micro_batches, by_pmoe, resume, timeout=240)
    return found[0][0], list(itertools.chain.from_iterable(auxiliary for _, auxiliary in found))


def same(losses: list[float]) -> Any:
    """Returns what equals these losses, up to the order of sums in float32."""
    return pytest.approx(losses, abs=2e-4)


@pytest.mark.parametrize("by_pmoe", [False, True], ids=["transformers alone", "pmoe"])
def test_the_trainer_adds_the_auxiliary_losses_of_all_parts(
    by_pmoe: bool, path: Path, tmp_path: Path
) -> None:
    found: dict[str, list[float]] = {}
    for division, (mean, loss) in FIRST_STEP.items():
        world, samples, micro_batches = map(int, division.split(" x "))
        losses, auxiliary = run(path, tmp_path / division, world, samples, micro_batches, by_pmoe)
        assert len(auxiliary) == world * micro_batches
        assert sum(auxiliary) / len(auxiliary) == pytest.approx(mean, abs=2e-4), division
        assert losses[0] == pytest.approx(loss, abs=2e-4), division
        assert losses[0] - WEIGHT * sum(auxiliary) == pytest.approx(4.2696, abs=2e-4), division
        found[division] = losses
    assert found["2 x 4 x 1"] == same(found["1 x 4 x 2"])
    assert found["2 x 2 x 2"] == same(found["1 x 2 x 4"])


def test_a_training_resumes_on_one_rank_with_the_same_parts_and_the_same_losses(
    path: Path, tmp_path: Path
) -> None:
    whole, _ = run(path, tmp_path / "out", 2, 2, 2, True)
    same_parts = interrupted(tmp_path / "out", tmp_path / "same")
    resumed, _ = run(path, same_parts, 1, 2, 4, True, resume=True)
    assert resumed == same(whole)
    fewer_parts = interrupted(tmp_path / "out", tmp_path / "fewer")
    lower, _ = run(path, fewer_parts, 1, 4, 2, True, resume=True)
    assert lower[:4] == whole[:4]
    assert all(0.03 < before - now < 0.06 for before, now in zip(whole[4:], lower[4:], strict=True))
    assert [f"{losses[-1]:.2f}" for losses in (whole, resumed, lower)] == ["3.93", "3.93", "3.89"]
