"""The trainings that tests look at: all of two ranks in one launch, all of one rank in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fairseq.cases import (
    ACCEPTED,
    EVERY_OPTION,
    ON_ONE_RANK,
    ON_TWO_RANKS,
    others_of,
    refused,
    some_of,
)
from tests.fairseq.environment import (
    ADAM,
    AUTOMATIC,
    BY_TOKENS,
    LANGUAGE_MODEL,
    PLAIN_STEPS,
    QUIET,
    SGD,
    TRANSLATION,
    TRANSLATION_SGD,
    Ended,
    run_together,
    write_pairs,
    write_text,
)
from tests.fairseq.measured import COUNTED, HALF, MEASURED, PLAIN


@dataclass(frozen=True)
class Session:
    """Commands by name. Data lie in text/data and pairs/data, checkpoints in a folder named after each."""

    folder: Path
    of_two: dict[str, Ended]
    of_one: dict[str, Ended]

    @property
    def text(self) -> Path:
        return self.folder / "text" / "data"

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs" / "data"

    def checkpoint(self, name: str) -> Path:
        return self.folder / name / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("fairseq")
    of_two = run_together(_commands_of_two(folder), folder, ranks=2)
    of_one = run_together(_commands_of_one(folder), folder, ranks=1)
    return Session(folder, of_two, of_one)


Commands = dict[str, Sequence[object]]
PATIENCE = ("--patience", 1, "--validate-interval-updates", 2)


def _commands_of_two(folder: Path) -> Commands:
    text, pairs = folder / "text", folder / "pairs"
    model = ("train", text / "data", *LANGUAGE_MODEL)
    adam = (*model, *ADAM, "--max-update", 24)
    resumed = ("--restore-file", folder / "adam" / "checkpoint_1_16.pt", "--save-dir", folder / "resumed")
    sgd = (*model, *SGD, "--update-freq", 2, "--max-update", 3, *QUIET)
    translation = ("train", pairs / "data", *TRANSLATION, *TRANSLATION_SGD)
    places = ("--moe-freq", 2, "--moe-decoder-freq", 1)
    made: Commands = {
        "text": write_text(text),
        "pairs": write_pairs(pairs),
        "adam": (*adam, "--save-interval-updates", 16, "--save-dir", folder / "adam"),
        "resumed": (*adam, *resumed),
        "sgd": (*sgd, "--save-dir", folder / "sgd"),
        "translation": (*translation, *places, "--save-dir", folder / "translation"),
        "left over": left_over(folder, pairs / "data", 2, ranks=2),
        "finetuned": finetuned(folder, text / "data", 1, ranks=2),
        "patience": (*model, "--optimizer", "sgd", "--lr", 2, "--max-update", 20, *PATIENCE, "--no-save"),
    }
    made |= _searching(folder)
    float16 = ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale")
    steps = (*model, *SGD, "--max-update", 4, *QUIET, "--no-save")
    made["float32"] = measuring(folder / "float32", PLAIN, *steps)
    made["float16"] = measuring(folder / "float16", HALF, *steps, *float16, 128)
    made["overflows"] = measuring(folder / "overflows", HALF, *steps, *float16, 2**12)
    for case in some_of(ON_TWO_RANKS):
        made[case] = refused(case, text / "data", folder / "refused")
    made["accepted 0"] = accepted(0, text / "data", folder / "refused")
    return made


def left_over(folder: Path, data: Path, update_freq: int, ranks: int) -> tuple[object, ...]:
    """A training of two epochs of 7 batches, in steps of 4 batches of all ranks together.

    In the second step of an epoch, the second of two ranks has a batch and a dummy. The gate's biases depend
    on the tokens that it counts.
    """
    model = ("train", data, *TRANSLATION, *TRANSLATION_SGD, "--batch-size", 64, "--max-epoch", 2, *QUIET)
    gate = ("--moe-gate", "deepseek", "--update-freq", update_freq)
    name = f"left over on {ranks}"
    return measuring(folder / name, PLAIN, *model, *gate, "--save-dir", folder / f"{name} saved")


def finetuned(folder: Path, data: Path, update_freq: int, ranks: int) -> tuple[object, ...]:
    """A training that begins with the weights of two ranks' checkpoint and takes nothing else from it."""
    model = ("train", data, *LANGUAGE_MODEL, *ADAM[:4], "--moe-aux-weight", 0.1, "--max-update", 2, *QUIET)
    given = ("--finetune-from-model", folder / "sgd" / "checkpoint_last.pt", "--update-freq", update_freq)
    name = f"finetuned on {ranks}"
    return measuring(
        folder / name, PLAIN, *model, *given, "--no-save", "--save-dir", folder / f"{name} saved"
    )


def _searching(folder: Path) -> Commands:
    """Trainings that choose the number of chunks and the restore pair themselves, in the same 14 steps.

    The second continues the first one's checkpoint of step 7. Batch sizes change from step to step. In step
    13, which ends the epoch, the second rank has a dummy batch.
    """
    data = folder / "text" / "data"
    steps = ("--max-update", 14, *QUIET)
    middle = folder / "searched" / "checkpoint_1_7.pt"
    # One layer with experts, which takes most of the memory of a step.
    large = ("--decoder-layers", 1, "--moe-freq", 1, "--decoder-ffn-embed-dim", 256, "--max-update", 4)
    trainings: Commands = {
        "searched": (*AUTOMATIC, *steps, "--save-interval-updates", 7, "--save-dir", folder / "searched"),
        "searched, resumed": (*AUTOMATIC, *steps, "--restore-file", middle, "--save-dir", folder / "later"),
        "one chunk": (*PLAIN_STEPS, *steps, "--no-save"),
        "peaks": (*AUTOMATIC, *large, *QUIET, "--no-save"),
    }
    return {
        name: measuring(
            folder / name, COUNTED if name == "peaks" else PLAIN, "train", data, *BY_TOKENS, *SGD, *rest
        )
        for name, rest in trainings.items()
    }


def measuring(path: Path, way: str, *command: object) -> tuple[object, ...]:
    """The command, of which the steps are written to ``path`` (measured.py)."""
    return (MEASURED, path, way, *command)


def _commands_of_one(folder: Path) -> Commands:
    text, pairs = folder / "text" / "data", folder / "pairs" / "data"
    sgd = ("train", text, *LANGUAGE_MODEL, *SGD, "--update-freq", 4, "--max-update", 3, *QUIET)
    evaluated = ("--path", folder / "adam" / "checkpoint_last.pt", "--gen-subset", "valid")
    sizes = ("--tokens-per-sample", 32, "--batch-size", 8, "--cpu", "--num-workers", 0)
    translation = ("train", pairs, *TRANSLATION, *TRANSLATION_SGD, "--update-freq", 2)
    places = ("--moe-freq", 2, "--moe-decoder-freq", 1)
    experts = ("--moe-num-experts", 4, "--moe-top-k", 2)
    generated = ("--path", folder / "translation" / "checkpoint_last.pt", "--gen-subset", "valid")
    beam = ("--batch-size", 8, "--beam", 2, "--max-len-b", 10, "--cpu", "--num-workers", 0)
    made: Commands = {
        "evaluated": ("eval-lm", text, *evaluated, *sizes),
        "sgd": (*sgd, "--checkpoint-activations", "--save-dir", folder / "sgd of one"),
        "no aux": (*sgd, "--moe-aux-weight", 0, "--save-dir", folder / "no aux"),
        "translation": (
            *translation,
            *EVERY_OPTION,
            *experts,
            *places,
            *("--save-dir", folder / "translation of one"),
        ),
        "generated": ("generate", pairs, *generated, *beam),
        "left over": left_over(folder, pairs, 4, ranks=1),
        "finetuned": finetuned(folder, text, 2, ranks=1),
    }
    for case in some_of(ON_ONE_RANK):
        made[case] = refused(case, text, folder / "refused")
    return made


def accepted(i: int, data: Path, folder: Path) -> tuple[str, ...]:
    return (*refused("", data, folder), "--no-save", *ACCEPTED[i])


@pytest.fixture
def others(session: Session, tmp_path: Path) -> Session:
    """The cases that `session` leaves out."""
    folder = tmp_path / "refused"
    of_two: Commands = {case: refused(case, session.text, folder) for case in others_of(ON_TWO_RANKS)}
    of_two |= {f"accepted {i}": accepted(i, session.text, folder) for i in range(1, len(ACCEPTED))}
    of_one: Commands = {case: refused(case, session.text, folder) for case in others_of(ON_ONE_RANK)}
    return Session(tmp_path, run_together(of_two, tmp_path, ranks=2), run_together(of_one, tmp_path, ranks=1))
