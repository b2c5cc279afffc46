"""fairseq trains a translation model with experts in encoder and decoder, on padded batches.

The batches do not divide evenly among the ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fairseq.conftest import Session
from tests.fairseq.environment import TRANSLATION, TRANSLATION_SGD, logged, run
from tests.fairseq.test_language_model import assert_close

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
