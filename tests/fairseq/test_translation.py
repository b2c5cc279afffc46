"""fairseq trains a translation model with experts in encoder and decoder, on padded batches.

The batches do not divide evenly among the ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fairseq.conftest import Session
from tests.fairseq.environment import TRANSLATION, TRANSLATION_SGD, logged, run
from tests.fairseq.measured import steps_of
from tests.fairseq.test_language_model import assert_close, parameters

pytestmark = pytest.mark.timeout(900)


def test_ranks_with_ragged_padded_and_no_batches_step_as_one_rank(session: Session) -> None:
    """9 batches in 5 steps: in the last, the second rank has a dummy batch, whose losses must not count.
    Validation has 37 sentences in 5 batches. The one rank is given every option of the layer, at its
    default."""
    ragged, even = session.of_two["translation"].output, session.of_one["translation"].output
    assert len(logged(ragged, "loss")) == 5
    for key in ("loss", "gnorm", "moe_loss", "moe_load"):
        assert logged(ragged, key) == pytest.approx(logged(even, key), rel=2e-3, abs=2e-3), key
    assert logged(ragged, "valid_loss", "valid") == pytest.approx(
        logged(even, "valid_loss", "valid"), rel=1e-3
    )
    assert_close(session.checkpoint("translation"), session.checkpoint("translation of one"), 5e-6)


def test_a_rank_with_a_batch_and_a_dummy_in_one_step_steps_as_one_rank(session: Session) -> None:
    """facebookresearch/fairseq#1744: fairseq leaves out the size of all batches of a rank whose last is a
    dummy. The gradient was too large by half. PrimeIntellect-ai/prime-rl#2953: tokens that are not trained
    on counted in a gate's bias."""
    two, one = (steps_of(session.folder / f"left over on {ranks}") for ranks in (2, 1))
    assert [len(step.tokens) for step in one] == [4, 3, 4, 3]
    assert steps_of(session.folder / "left over on 2", 1)[1].tokens[-1] == 0
    assert [step.loss for step in two] == pytest.approx([step.loss for step in one], rel=1e-5)
    assert [step.norm for step in two] == pytest.approx([step.norm for step in one], rel=1e-5)
    of_two, of_one = (
        session.folder / f"left over on {ranks} saved" / "checkpoint_last.pt" for ranks in (2, 1)
    )
    assert_close(of_two, of_one, 5e-6)
    biases = [value for name, value in parameters(of_two).items() if name.endswith("gate.bias")]
    assert len(biases) == 2 and all(bias.abs().max() >= 0.001 for bias in biases)


def test_generate_reads_the_checkpoint_of_two_ranks(session: Session) -> None:
    output = session.of_one["generated"].output
    assert "Translated 37 sentences" in output
    assert sum(line.startswith("H-") for line in output.splitlines()) == 37


@pytest.mark.slow
def test_a_checkpoint_with_counts_of_generated_words_is_read(session: Session, tmp_path: Path) -> None:
    """--eval-bleu logs numpy arrays, which the checkpoint then holds."""
    bleu = ("--eval-bleu", "--eval-bleu-detok", "space", "--eval-bleu-args", '{"beam": 1, "max_len_b": 5}')
    run("train", session.pairs, *TRANSLATION, *TRANSLATION_SGD, *bleu, "--save-dir", tmp_path)
    checkpoint = ("--path", tmp_path / "checkpoint_last.pt", "--task", "translation")
    output = run("validate", session.pairs, *checkpoint, "--batch-size", 8, "--cpu", "--num-workers", 0)
    assert "bleu" in output.rpartition("valid on 'valid' subset")[2]
