"""fairseq trains a language model with experts over ranks, on the text of Python's standard library."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fairseq.conftest import Session
from tests.fairseq.environment import ADAM, LANGUAGE_MODEL, QUIET, SGD, FailedError, load, logged, run
from tests.fairseq.measured import steps_of

pytestmark = pytest.mark.timeout(900)

GARBAGE = "embed_positions._float_tensor"
"""Ends the names of buffers that fairseq never fills: each process has its own values."""


def parameters(path: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = load(path)["model"]
    return {name: value for name, value in model.items() if not name.endswith(GARBAGE)}


def tensors_of_optimizer(path: Path) -> list[tuple[int, str, torch.Tensor]]:
    state: dict[int, dict[str, Any]] = load(path)["last_optimizer_state"]["state"]
    return [
        (index, name, value)
        for index, kept in sorted(state.items())
        for name, value in sorted(kept.items())
        if isinstance(value, torch.Tensor)
    ]


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = parameters(one), parameters(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    kept, also = tensors_of_optimizer(one), tensors_of_optimizer(other)
    assert len(kept) == len(also) > 0
    for (index, name, value), (_, _, again) in zip(kept, also, strict=True):
        assert torch.equal(value, again), (index, name)


def assert_close(one: Path, other: Path, tolerance: float) -> None:
    """Every parameter within ``tolerance`` of the largest value that the parameter has."""
    first, second = parameters(one), parameters(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.shape == second[name].shape, name
        worst = (value - second[name]).abs().max() / second[name].abs().max().clamp(min=1e-12)
        assert worst <= tolerance, (name, float(worst))


def test_the_loss_falls_and_the_log_tells_how_evenly_experts_are_loaded(session: Session) -> None:
    output = session.of_two["adam"].output
    losses = logged(output, "loss")
    assert len(losses) == 24
    assert sum(losses[-4:]) / 4 < 0.8 * sum(losses[:4]) / 4, losses
    assert all(1 <= load <= 2 for load in logged(output, "moe_load"))  # top-2 of 4: at most 2 x the mean
    assert all(loss > 0.5 for loss in logged(output, "moe_loss"))
    dropped = logged(output, "moe_dropped")
    assert len(dropped) == 24 and 0 < max(dropped) < 50


def test_the_checkpoint_holds_the_experts_of_both_ranks(session: Session) -> None:
    checkpoint = session.checkpoint("adam")
    w1 = parameters(checkpoint)["decoder.layers.1.fc1.experts.w1"]
    assert w1.shape == (4, 64, 32)
    assert all(not torch.equal(w1[0], w1[i]) for i in (1, 2, 3))
    shapes = {tuple(value.shape) for _, _, value in tensors_of_optimizer(checkpoint)}
    assert {(4, 64, 32), (4, 32, 64), (4, 64), (4, 32)} <= shapes
    assert not any(shape[:1] == (2,) for shape in shapes)


def test_resuming_continues_bit_for_bit(session: Session) -> None:
    assert len(logged(session.of_two["resumed"].output, "loss")) == 8
    assert_same_bits(session.checkpoint("resumed"), session.checkpoint("adam"))


@pytest.mark.slow
def test_resuming_in_a_process_of_its_own_continues_bit_for_bit(session: Session, tmp_path: Path) -> None:
    shutil.copy(session.folder / "adam" / "checkpoint_1_16.pt", tmp_path / "checkpoint_last.pt")
    steps = ("--max-update", 24, "--save-dir", tmp_path)
    output = run("train", session.text, *LANGUAGE_MODEL, *ADAM, *steps, ranks=2)
    assert len(logged(output, "loss")) == 8
    assert_same_bits(tmp_path / "checkpoint_last.pt", session.checkpoint("adam"))


def test_eval_lm_reads_the_checkpoint_in_one_process(session: Session) -> None:
    evaluated = session.of_one["evaluated"].output
    loss = float(evaluated.rpartition("Loss (base 2): ")[2].split(",")[0])
    # What training's own validation found, on two ranks and with each one's capacity: that drops other rows.
    trained = logged(session.of_two["adam"].output, "valid_loss", "valid")[-1]
    assert loss == pytest.approx(trained, rel=0.01)


def test_two_ranks_step_as_one_does_on_their_batches(session: Session) -> None:
    """SGD, clipped: Adam would hide a wrong scale of experts' gradients, and so would a norm without a
    limit."""
    two, one = session.of_two["sgd"].output, session.of_one["sgd"].output
    assert all(clipped == 100 for clipped in logged(two, "clip"))
    for key in ("loss", "gnorm", "moe_loss", "moe_load"):
        assert logged(two, key) == pytest.approx(logged(one, key), rel=2e-3, abs=2e-3), key
    assert_close(session.checkpoint("sgd"), session.checkpoint("sgd of one"), 2e-6)


def test_two_ranks_finetune_a_checkpoint_as_one_does(session: Session) -> None:
    """microsoft/Tutel#248, facebookresearch/fairseq#4469: experts of a checkpoint could not be loaded."""
    two, one = (steps_of(session.folder / f"finetuned on {ranks}") for ranks in (2, 1))
    assert [step.loss for step in two] == pytest.approx([step.loss for step in one], rel=1e-5)
    bits_per_token = two[0].loss / math.log(2) / sum(one[0].tokens)
    assert bits_per_token < 0.985 * logged(session.of_two["sgd"].output, "loss")[0]


def test_both_ranks_skip_a_step_whose_scaled_gradients_overflow(session: Session) -> None:
    """facebookresearch/fairseq#1529, #4555: with experts on several ranks, a rank alone may overflow."""
    exact, half = (steps_of(session.folder / name) for name in ("float32", "float16"))
    assert [step.loss for step in half] == pytest.approx([step.loss for step in exact], rel=1e-3)
    assert [step.norm for step in half] == pytest.approx([step.norm for step in exact], rel=3e-3)
    first, second = (steps_of(session.folder / "overflows", rank) for rank in (0, 1))
    assert first[0].loss == 0 and sum(step.loss > 0 for step in first) == 4
    assert [(step.loss, step.norm) for step in first] == [(step.loss, step.norm) for step in second]


def test_both_ranks_end_a_training_that_does_not_improve(session: Session) -> None:
    """allenai/allennlp#4794: the first rank to end left the others waiting."""
    output = session.of_two["patience"].output
    assert "early stop since valid performance hasn't improved for last 1 runs" in output
    assert 2 <= len(logged(output, "valid_loss", "valid")) < 10


@pytest.mark.slow
def test_checkpointed_activations_keep_the_auxiliary_loss(session: Session, tmp_path: Path) -> None:
    checkpoint = session.checkpoint("sgd")
    steps = (
        "--update-freq",
        2,
        "--max-update",
        3,
        "--save-dir",
        tmp_path,
        *QUIET,
        "--checkpoint-activations",
    )
    run("train", session.text, *LANGUAGE_MODEL, *SGD, *steps, ranks=2)
    assert_same_bits(checkpoint, tmp_path / "checkpoint_last.pt")


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_loads_on_one_and_on_four(session: Session, tmp_path: Path) -> None:
    """With its momentum: a step behind it is the same on 1 rank with 4 batches, on 4 ranks, and on 4 ranks
    of which each 2 hold a copy of all experts."""
    checkpoint = session.checkpoint("sgd")
    for name, ranks, experts in (
        ("1", 1, ()),
        ("4", 4, ()),
        ("2x2", 4, ("--moe-expert-parallel-size", 2)),
    ):
        (tmp_path / name).mkdir()
        shutil.copy(checkpoint, tmp_path / name / "checkpoint_last.pt")
        steps = (
            "--update-freq",
            4 // ranks,
            "--max-update",
            4,
            "--reset-dataloader",
            "--reset-meters",
            *QUIET,
        )
        given = (*SGD, *steps, *experts, "--save-dir", tmp_path / name)
        output = run("train", session.text, *LANGUAGE_MODEL, *given, ranks=ranks)
        assert "Loaded checkpoint" in output
    one, four, copied = (tmp_path / name / "checkpoint_last.pt" for name in ("1", "4", "2x2"))
    assert_close(one, four, 2e-6)
    assert_close(one, copied, 2e-6)
    for (_, _, value), (_, _, other) in zip(
        tensors_of_optimizer(one), tensors_of_optimizer(copied), strict=True
    ):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-6)
    moved = (
        parameters(one)["decoder.layers.1.fc1.experts.w1"]
        - parameters(checkpoint)["decoder.layers.1.fc1.experts.w1"]
    )
    assert moved.abs().max() > 1e-4


@pytest.mark.slow
def test_a_step_that_fails_ends_with_its_own_error_on_both_ranks(session: Session, tmp_path: Path) -> None:
    steps = ("--optimizer", "sgd", "--lr", 1e20, "--max-update", 4, "--save-dir", tmp_path, *QUIET)
    with pytest.raises(FailedError, match="FaultError: rank 0: its gate logits are not finite") as failed:
        run("train", session.text, *LANGUAGE_MODEL, *steps, ranks=2)
    assert "[rank1]" in failed.value.output
    assert not (tmp_path / "crash.pt").exists()


def test_the_auxiliary_loss_changes_the_router(session: Session) -> None:
    name = "decoder.layers.1.fc1.gate.weight"
    without, with_loss = (parameters(session.checkpoint(each))[name] for each in ("no aux", "sgd of one"))
    assert (without - with_loss).abs().max() > 1e-4 * with_loss.abs().max()
