"""fairseq trains a translation model with experts in encoder and decoder, on padded batches that do not come
out even."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmoe.integrations.fairseq.options import PLACES, layer_options
from tests.fairseq.environment import TRANSLATION, logged, preprocess_pairs, run
from tests.fairseq.test_language_model import assert_close

pytestmark = pytest.mark.timeout(900)

EVERY_OPTION = [text for option in (*PLACES, *layer_options()) for text in (option.flag, option.default)]
SGD = ("--optimizer", "sgd", "--lr", 0.1, "--clip-norm", 0.5, "--moe-aux-weight", 0.1, "--max-epoch", 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preprocess_pairs(tmp_path_factory.mktemp("pairs"))


def test_ranks_with_ragged_padded_and_no_batches_step_as_one_rank_that_generate_then_reads(
    data: Path, tmp_path: Path
) -> None:
    """9 batches in 5 steps: in the last, the second rank has a dummy batch, whose losses must not count.
    Validation has 37 sentences in 5 batches. Every option of the layer is given, at its default, to the one
    or the other."""
    two, one = tmp_path / "two", tmp_path / "one"
    valid = ("--batch-size-valid", 8, "--required-batch-size-multiple", 1)
    experts = ("--moe-num-experts", 4, "--moe-top-k", 2, "--moe-freq", 2, "--moe-decoder-freq", 1)
    ragged = run("train", data, *TRANSLATION, *SGD, *valid, *experts, "--save-dir", two, ranks=2)
    alone = ("--update-freq", 2, "--save-dir", one)
    even = run("train", data, *TRANSLATION, *SGD, *valid, *EVERY_OPTION, *experts, *alone)
    assert len(logged(ragged, "loss")) == 5
    for key in ("loss", "gnorm", "moe_loss", "moe_load"):
        assert logged(ragged, key) == pytest.approx(logged(even, key), rel=2e-3, abs=2e-3), key
    assert logged(ragged, "valid_loss", "valid") == pytest.approx(
        logged(even, "valid_loss", "valid"), rel=1e-3
    )
    assert_close(two / "checkpoint_last.pt", one / "checkpoint_last.pt", 5e-6)

    sizes = ("--batch-size", 8, "--beam", 2, "--max-len-b", 10, "--cpu", "--num-workers", 0)
    output = run("generate", data, "--path", two / "checkpoint_last.pt", "--gen-subset", "valid", *sizes)
    assert "Translated 37 sentences" in output
    assert sum(line.startswith("H-") for line in output.splitlines()) == 37


@pytest.mark.slow
def test_a_checkpoint_with_counts_of_generated_words_is_read(data: Path, tmp_path: Path) -> None:
    """--eval-bleu logs numpy arrays, which the checkpoint then holds."""
    bleu = ("--eval-bleu", "--eval-bleu-detok", "space", "--eval-bleu-args", '{"beam": 1, "max_len_b": 5}')
    sizes = ("--batch-size-valid", 8, "--save-dir", tmp_path)
    run("train", data, *TRANSLATION, *SGD, *sizes, *bleu)
    checkpoint = ("--path", tmp_path / "checkpoint_last.pt", "--task", "translation")
    output = run("validate", data, *checkpoint, "--batch-size", 8, "--cpu", "--num-workers", 0)
    assert "bleu" in output.rpartition("valid on 'valid' subset")[2]
