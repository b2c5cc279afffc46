"""fairseq trains with both automatic options of pmoe, in batches of many sizes.

The options are exactly ``--moe-pipeline true --moe-memory-reuse true``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pmoe.planner.granularity import GranularityTable, PassDegrees
from tests.fairseq.conftest import Commands, Session, measuring
from tests.fairseq.environment import (
    AUTOMATIC,
    BY_TOKENS,
    COMMON,
    PLAIN_STEPS,
    QUIET,
    SGD,
    TRANSLATION,
    TRANSLATION_SGD,
    load,
    run_apart,
    run_together,
)
from tests.fairseq.measured import CUT, DYING, FAILING, PLAIN, Step, steps_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]  # their training takes more than a minute

NOISE = 5e-5
"""Relative difference of two losses that rounding can make. Norms of gradients may differ ten times as much.

float32 rounds to 6e-8. Chunks change the order of some sums, so 24 steps of SGD differed by 1e-7. Rounding
may also send a token whose two experts are equally good to the other one: with 8,000 tokens in a step, this
changed the loss by 2e-5 in the benchmark. (Adam divides by the size of a gradient, so there a gradient that
is only noise moves a parameter as far as others do.)
"""


def of_both(session: Session, name: str) -> tuple[list[Step], list[Step]]:
    path = session.folder / name
    return steps_of(path, 0), steps_of(path, 1)


def assert_same_losses(one: Sequence[Step], other: Sequence[Step], tolerance: float = NOISE) -> None:
    assert len(one) == len(other) > 0
    assert [step.tokens for step in one] == [step.tokens for step in other]
    assert [step.loss for step in one] == pytest.approx([step.loss for step in other], rel=tolerance)
    assert [step.norm for step in one] == pytest.approx([step.norm for step in other], rel=10 * tolerance)


def table_of(checkpoint: Path) -> GranularityTable:
    """What trials had found before a checkpoint."""
    [entry] = load(checkpoint)["extra_state"]["moe_trials"]
    return GranularityTable.from_fields(entry["tables"]["torch.float32"])


def test_searches_happen_in_batches_whose_sizes_change(session: Session) -> None:
    first, second = of_both(session, "searched")
    sizes = [max(a.tokens[0], b.tokens[0]) for a, b in zip(first, second, strict=True)]
    assert len({step.tokens[0] for step in first}) >= 12 and max(sizes) > 4000
    assert first[0].sizes == [sizes[0]]
    assert 1 <= sum(len(step.sizes) for step in first) < 10
    output = session.of_two["searched"].output
    assert "pipeline=True takes n=" in output and "memory_reuse=True takes" in output


def test_both_ranks_search_alike_and_take_the_same_numbers_of_chunks(session: Session) -> None:
    for name in ("searched", "searched, resumed", "peaks"):
        first, second = of_both(session, name)
        assert [step.sizes for step in first] == [step.sizes for step in second]
        assert [step.degrees for step in first] == [step.degrees for step in second]
    ends_epoch = of_both(session, "searched")[1][12]
    assert ends_epoch.tokens == [0]  # a dummy batch


def test_the_log_shows_the_choices_of_all_ranks_once(session: Session) -> None:
    assert "pmoe | pipeline=True takes" in session.of_two["searched"].output
    [of_second] = session.folder.glob("commands2.json.rank1")
    assert "pipeline=True takes" not in of_second.read_text(encoding="utf-8")


def test_the_losses_are_those_of_one_chunk_without_reuse(session: Session) -> None:
    searched, plain = (of_both(session, name)[0] for name in ("searched", "one chunk"))
    assert all(step.sizes == [] and step.degrees == [[1, 1]] for step in plain)
    assert_same_losses(searched, plain)


def test_a_resumed_training_has_the_losses_of_one_that_went_on(session: Session) -> None:
    searched, resumed = (of_both(session, name)[0] for name in ("searched", "searched, resumed"))
    assert_same_losses(searched[7:], resumed)


def test_what_trials_found_comes_along_with_the_checkpoint(session: Session) -> None:
    """Sizes that the checkpoint knows are not tried again, and take the same number of chunks."""
    table = table_of(session.folder / "searched" / "checkpoint_1_7.pt")
    assert table.ranges
    first, second = of_both(session, "searched, resumed")
    num_known = 0
    for a, b in zip(first, second, strict=True):
        known = table.lookup(max(a.tokens[0], b.tokens[0]))
        if a.sizes:
            assert known is None
            break  # from here on the table has more than the checkpoint
        if known is not None:
            assert a.degrees == [[known.forward, known.backward]] and isinstance(known, PassDegrees)
            num_known += 1
    assert num_known >= 1


def test_the_first_step_takes_no_more_memory_than_later_ones(session: Session) -> None:
    """The first step measures rates of the machine and searches for n. Each rank's allocator is watched."""
    for steps in of_both(session, "peaks"):
        first, *later = (step.peak for step in steps)
        assert steps[0].sizes
        assert 0 < first <= 1.10 * max(later)


# ---- what other trainers of experts were reported to fail at, and what fairseq can change


LINES = ("--max-update", 10, *QUIET)

REPORTS: dict[str, tuple[object, ...]] = {
    # microsoft/Tutel#182, facebookresearch/fairseq#3730: training stops for ever if ranks have batches of
    # different sizes, or if one has none. The last batch of an epoch is left over, here in a translation.
    "a left over batch": ("pairs", "--max-epoch", 2, "--max-tokens", 2400, *QUIET),
    # The same from the first step on, which searches: an epoch has one batch, and the second rank has none.
    "no batch": ("pairs", "--max-update", 3, "--max-tokens", 20000, *QUIET),
    # facebookresearch/fairseq#3730: the same with batches of up to 500 tokens. They are too small for trials.
    "small batches": ("text", *LINES, "--max-tokens", 500),
    # deepspeedai/DeepSpeed#6809: so if each rank has a capacity of its own.
    "capacity": ("text", *LINES, "--moe-capacity-factor", 1.0),
    # Tutel's example for fairseq does not take --checkpoint-activations, nor DeepSpeed#6634 other steps
    # between those of training on one rank only. A step has two batches here.
    "recomputed": (
        *("text", "--max-update", 6, "--checkpoint-activations", "--update-freq", 2),
        *("--validate-interval-updates", 2, "--max-tokens-valid", 8000),
    ),
    # Trials must not draw random numbers, which the model would then lack.
    "random numbers": ("text", *LINES, "--dropout", 0.1, "--moe-gate", "noisy_topk"),
    # facebookresearch/fairseq#708 and #1821: a rank runs out of memory, and the others wait for ever.
    FAILING: ("text", *LINES),
}
"""Options by name of the case, behind the data that they train on."""


def command_of(case: str, session: Session, folder: Path, is_plain: bool) -> tuple[object, ...]:
    data, *options = REPORTS[case]
    model = (*BY_TOKENS, *SGD)
    if data == "pairs":
        model = (*TRANSLATION[: TRANSLATION.index("--batch-size")], *COMMON, *TRANSLATION_SGD)
    flags = PLAIN_STEPS if is_plain else AUTOMATIC
    if is_plain:
        options = [option for option in options if option != "--checkpoint-activations"]
    way = FAILING if case == FAILING and not is_plain else PLAIN
    path = folder / f"{case}, plain" if is_plain else folder / case
    data_path = session.pairs if data == "pairs" else session.text
    return measuring(path, way, "train", data_path, *model, *flags, *options, "--no-save")


@pytest.fixture(scope="session")
def reports(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("reports")
    commands: Commands = {}
    for case in REPORTS:
        commands[case] = command_of(case, session, folder, is_plain=False)
        commands[f"{case}, plain"] = command_of(case, session, folder, is_plain=True)
    return Session(folder, run_together(commands, folder, ranks=2), {})


@pytest.mark.slow
@pytest.mark.parametrize("case", REPORTS)
def test_what_was_reported_of_other_trainers_does_not_happen(reports: Session, case: str) -> None:
    first, second = of_both(reports, case)
    plain, _ = of_both(reports, f"{case}, plain")
    assert_same_losses(first, plain)
    assert [step.degrees for step in first] == [step.degrees for step in second]
    searches = sum(len(step.sizes) for step in first)
    assert searches == 0 if case == "small batches" else searches >= 1
    has_dummy = any(step.tokens[-1] == 0 for step in second)
    assert has_dummy or case != "a left over batch"
    assert case != "no batch" or (first[0].sizes and all(step.tokens == [0] for step in second))
    if case == FAILING:
        assert "a trial ran out of memory on some rank" in reports.of_two[case].output


def test_a_rank_that_dies_in_a_trial_is_named_by_the_other_in_time(session: Session, tmp_path: Path) -> None:
    """Both ranks are started apart: torchrun would end the other rank before it says anything."""
    training = ("train", session.text, *BY_TOKENS, *SGD, *AUTOMATIC, *LINES, "--no-save")
    outputs, seconds = run_apart(measuring(tmp_path / "dying", DYING, *training), tmp_path, ranks=2)
    assert re.search("pmoe: rank 0 of 2 failed in .*(a peer has died|global rank 1)", outputs[0]), outputs[0]
    assert seconds < 30


def test_damaged_results_of_trials_do_not_end_a_resumed_training(session: Session, tmp_path: Path) -> None:
    """A checkpoint's results may be of another layer, of a later version of pmoe, or no results at all."""
    checkpoint = load(session.folder / "searched" / "checkpoint_1_7.pt")
    [entry] = checkpoint["extra_state"]["moe_trials"]
    damaged = [{**entry, "key": {**entry["key"], "d_model": 7}}, {**entry, "format": 99}, "text", None]
    checkpoint["extra_state"]["moe_trials"] = damaged
    torch.save(checkpoint, tmp_path / "damaged.pt")
    training = ("train", session.text, *BY_TOKENS, *SGD, *AUTOMATIC, *QUIET, "--max-update", 9, "--no-save")
    command = measuring(tmp_path / "resumed", PLAIN, *training, "--restore-file", tmp_path / "damaged.pt")
    output = run_together({"resumed": command}, tmp_path, ranks=2)["resumed"].output
    assert "searches again, because what the checkpoint's trials found" in output
    resumed = steps_of(tmp_path / "resumed")
    assert resumed[0].sizes
    assert_same_losses(of_both(session, "searched")[0][7:9], resumed)


@pytest.mark.slow
def test_a_resumed_training_with_adam_has_the_bits_of_one_that_went_on(
    session: Session, tmp_path: Path
) -> None:
    """NVIDIA/Megatron-LM#761: with experts on several ranks, the loss was another after a resume."""
    adam = ("--optimizer", "adam", "--lr", 0.01, "--max-update", 13, *QUIET)
    model = ("train", session.text, *BY_TOKENS, *adam, *AUTOMATIC)
    middle = ("--restore-file", tmp_path / "one" / "checkpoint_1_10.pt", "--save-dir", tmp_path / "two")
    first = (*model, "--save-interval-updates", 10, "--save-dir", tmp_path / "one")
    commands = {
        "first": measuring(tmp_path / "first", PLAIN, *first),
        "resumed": measuring(tmp_path / "resumed", PLAIN, *model, *middle),
    }
    run_together(commands, tmp_path, ranks=2)
    went_on, resumed = steps_of(tmp_path / "first")[10:], steps_of(tmp_path / "resumed")
    assert len(resumed) == 3
    if [step.degrees for step in went_on] == [step.degrees for step in resumed]:
        assert [(step.loss, step.norm) for step in went_on] == [(step.loss, step.norm) for step in resumed]
    else:  # a size that the checkpoint does not know: trials of both runs may find different n
        assert resumed[0].sizes or resumed[1].sizes or resumed[2].sizes
        assert_same_losses(went_on, resumed, 1e-3)


@pytest.mark.nightly
def test_a_checkpoint_continues_on_other_numbers_of_ranks(session: Session, tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#1517, KempnerInstitute/KempnerForge#202: this failed, or experts were lost.

    A step has 4 batches each time. Two groups of two ranks search apart, and both take what the two ranks
    had found. One rank needs no trials.
    """
    checkpoint = session.folder / "searched" / "checkpoint_1_7.pt"
    options = ("--restore-file", checkpoint, "--reset-dataloader", "--max-update", 10, "--no-save", *QUIET)
    trained = ("train", session.text, *BY_TOKENS, *SGD, *AUTOMATIC, *options)
    of_one: list[Step] = []
    for ranks, size in ((1, 1), (2, 2), (4, 4), (4, 2)):
        path = tmp_path / f"{ranks} by {size}"
        more = ("--update-freq", 4 // ranks, "--moe-expert-parallel-size", size)
        run_together({"later": measuring(path, PLAIN, *trained, *more)}, tmp_path, ranks=ranks)
        of_ranks = [steps_of(path, rank) for rank in range(ranks)]
        of_one = of_one or of_ranks[0]
        assert len(of_one) == len(of_ranks[0]) == 3
        assert [step.loss for step in of_one] == pytest.approx([s.loss for s in of_ranks[0]], rel=NOISE)
        for group in [range(first, first + size) for first in range(0, ranks, size)]:
            [searched] = {tuple(of_ranks[rank][0].sizes) for rank in group}
            tokens = max(of_ranks[rank][0].tokens[0] for rank in group)
            if size == 2 and table_of(checkpoint).lookup(tokens) is not None:
                assert tokens not in searched
            if size == 4:  # what two ranks found does not hold for four
                assert tokens in searched


@pytest.mark.nightly
def test_2000_batches_of_changing_sizes_keep_memory_flat_and_the_table_small(
    session: Session, tmp_path: Path
) -> None:
    """Sizes change in every step on every rank, and many batches are too small for trials."""
    long = ("--max-update", 2000, "--decoder-layers", 1, "--moe-freq", 1, *QUIET, "--no-save")
    training = ("train", session.text, *BY_TOKENS, *SGD, *AUTOMATIC, *long)
    run_together({"cut": measuring(tmp_path / "cut", CUT, *training)}, tmp_path, ranks=2)
    for rank in (0, 1):
        steps = steps_of(tmp_path / "cut", rank)
        assert len(steps) == 2000 and len({step.tokens[0] for step in steps}) > 500
        assert max(step.resident for step in steps[1000:]) < 1.03 * max(
            step.resident for step in steps[:1000]
        )
        assert steps[-1].ranges <= 40
        assert sum(len(step.sizes) for step in steps[1000:]) <= 3
