"""The ladder of first steps on a GPU (tests/gpu), tried without one.

Its kernels' steps run in the emulator, its machinery with steps that stand in, its decoder with planted
mistakes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe.kernels.comet.launcher import Division
from pmoe.kernels.grouped_gemm.launch import AS_BOXES, IN_TURNS
from tests.emulated import emulated, load_kernels
from tests.gpu import fused, integers
from tests.gpu.ladder import __main__ as ladder
from tests.gpu.ladder import boxes, climb, epilogues, moving, nccl, persistent, report, tiles, worlds
from tests.gpu.ladder.decode import name_difference, swizzled
from tests.gpu.ladder.machine import Machine
from tests.gpu.ladder.step import NOT_RUN, PASSED, Outcome, Step, check_steps
from tests.gpu.ladder.steps import all_steps

SIDE = 64


@pytest.fixture(params=[True, False], ids=["sm_90a", "sm_80"])
def machine(request: pytest.FixtureRequest, kernels: Path) -> Iterator[Machine]:
    module: ModuleType = load_kernels(kernels)
    module.stub_reset(processors=2)
    yield Machine(module=module, device=torch.device("cpu"), hopper=request.param)
    module.stub_reset()


# ---- the kernels' steps


@pytest.mark.parametrize("form", tiles.FORMS)
def test_a_tile_is_read_right_by_one_block_and_by_two(machine: Machine, form: str) -> None:
    for sharing in (1, 2, 3) if machine.hopper else (1,):
        tiles.demand_nothing(tiles.find_tile(machine, form, sharing, side=tiles.side_of(sharing)))
    if machine.hopper and form != "weight":
        tiles.demand_nothing(tiles.find_tile(machine, form, side=tiles.SIDE + 8, storing=IN_TURNS))
    if machine.hopper:
        tiles.demand_nothing(tiles.find_tile(machine, form, side=tiles.SIDE + 8, storing=AS_BOXES))
    if machine.hopper and form == "weight":
        tiles.demand_nothing(boxes.find_gathered_weights(machine))


ONLY_HOPPER = pytest.mark.parametrize("machine", [True], ids=["sm_90a"], indirect=True)
"""For what only kernels for sm_90a do."""


@ONLY_HOPPER
def test_experts_of_uneven_sizes_are_stored_as_boxes(machine: Machine) -> None:
    """An expert without rows, one with less than a box, one with a box, one with more than a tile."""
    tiles.demand_nothing(boxes.find_uneven_experts(machine, SIDE, (131, 0, 5, 16)))


@ONLY_HOPPER
def test_a_box_that_is_stored_for_the_wrong_rows_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a row fewer of the first expert, the second one begins a row too early."""
    drawn = boxes.Drawn

    def with_a_row_fewer(machine: Machine, side: int, counts: tuple[int, ...]) -> boxes.Drawn:
        found = drawn(machine, side, counts)
        found.ends[0] -= 1
        return found

    monkeypatch.setattr(boxes, "Drawn", with_a_row_fewer)
    wrong = [name for name, told in boxes.find_uneven_experts(machine, SIDE, (20, 5)).items() if told]
    assert len(wrong) == 4, wrong


def test_gathers_epilogues_routing_and_permutes(machine: Machine) -> None:
    tiles.demand_nothing(tiles.find_gathers(machine, side=SIDE))
    tiles.demand_nothing(epilogues.find_epilogues(machine, SIDE))
    tiles.demand_nothing(moving.find_routing(machine, 50, 8))
    tiles.demand_nothing(moving.find_permutes(machine, 20, 2, 72))
    tiles.demand_nothing(moving.find_messages(machine, 20, 2, 136))
    tiles.demand_nothing(moving.find_counts(machine))


def test_wrong_row_counts_are_named(machine: Machine) -> None:
    class Unsorted:
        """The extension, which sorts an expert's rows by other bins."""

        def __getattr__(self, name: str) -> object:
            return getattr(machine.module, name)

        def counts_order(self, **given: Any) -> None:
            machine.module.counts_order(**given | {"joined": 2})

    found = moving.find_counts(dataclasses.replace(machine, module=Unsorted()))
    wrong = {name for name, told in found.items() if told}
    assert wrong == {"of_chunks", "of_all"}


class Spoiled:
    """The extension, with a changed argument in every launch of grouped products."""

    def __init__(self, module: ModuleType, **changed: int) -> None:
        self.module, self.changed = module, changed

    def __getattr__(self, name: str) -> object:
        return getattr(self.module, name)

    def grouped_gemm(self, **given: int) -> None:
        self.module.grouped_gemm(**given | {name: given[name] + by for name, by in self.changed.items()})


@pytest.mark.parametrize(
    "changed, told",
    [({"form": 1}, "transposed"), ({"n": -8}, "elements were not written: 512, or NaN was summed; 512 of")],
)
def test_a_planted_mistake_is_named_through_launches(
    machine: Machine, changed: dict[str, int], told: str
) -> None:
    """Form 1 of the product reads the weights transposed."""
    spoiled = dataclasses.replace(machine, module=Spoiled(machine.module, **changed))
    found = tiles.find_tile(spoiled, "forward", side=SIDE)["forward, operand b as it is read"]
    assert found is not None and found.startswith(told)


def test_wrong_epilogues_are_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogues, "RELU", 3)  # SiLU
    wrong = {name for name, told in epilogues.find_epilogues(machine, SIDE).items() if told}
    assert wrong == {
        "hidden: ReLU of it", "hidden gradient: dT_M", "hidden gradient: ReLU, weighted",
        "hidden gradient: row dots",
    }  # fmt: skip


def small_world(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> integers.Integers:
    for module in (integers, fused):
        monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    return integers.Integers(num_ranks, tokens=16, d_model=72, d_hidden=24, division=Division(1, 256))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_virtual_ranks_of_the_fused_kernels(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    with emulated(kernels, hopper=num_ranks == 1, virtual_ranks=num_ranks, division=Division(1, 256)):
        assert worlds.play(small_world(monkeypatch, num_ranks), turns=2) == []
        world = small_world(monkeypatch, num_ranks)
        world.given.w2[0].add_(1)
        wrong = worlds.play(world, turns=2)
    assert len(wrong) == 2 and "not before" not in wrong[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_pool", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_virtual_ranks_of_the_persistent_kernels(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, is_pool: bool
) -> None:
    find = functools.partial(persistent.find_wrong, num_ranks, 20, 72, 24, torch.device("cpu"), is_pool)
    with emulated(kernels, virtual_ranks=num_ranks):
        assert find() == []
        monkeypatch.setattr(persistent, "TOP_K", 1)
        plain = persistent.plain
        monkeypatch.setattr(persistent, "plain", lambda x, *others: plain([2 * each for each in x], *others))
        assert any("y is apart" in each for each in find())


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", list(nccl.CHECKS))
def test_what_is_asked_of_nccl_holds_over_gloo(name: str, num_ranks: int) -> None:
    """The steps for NCCL pass over gloo. In the place of streams, work is done when its call returns."""
    nccl.run(name, nccl.Job("gloo", num_ranks, gpus=0))


def test_a_check_that_rows_come_wrongly_fails_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    job = nccl.Job("gloo", 1, gpus=0)
    monkeypatch.setattr(nccl, "SLEEP", 0)
    monkeypatch.setattr(nccl.dist, "all_to_all_single", lambda out, rows, *_, **__: NoWork())
    for name in ("zero_rows", "streams", "rotating_slots"):
        try:
            with pytest.raises(AssertionError):
                nccl.run(name, job)
        finally:
            nccl.dist.destroy_process_group()


class NoWork:
    """A collective that moved nothing."""

    def wait(self) -> None:
        pass


@pytest.mark.parametrize(
    "asked, gpus, ranks, shared, devices",
    [
        ("1", 1, 1, False, [0]),
        ("2", 1, 2, True, [0, 0]),
        ("2", 2, 2, False, [0, 1]),
        ("4", 1, 4, True, [0, 0, 0, 0]),
        ("4", 2, 4, True, [0, 1, 0, 1]),
        ("4", 8, 8, False, list(range(8))),
    ],
)
def test_ranks_share_gpus_only_where_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch, asked: str, gpus: int, ranks: int, shared: bool, devices: list[int]
) -> None:
    jobs = list[nccl.Job]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch._C, "_nccl_version", lambda: (2 << 32) | (30 << 16) | 7, raising=False)
    monkeypatch.setattr(torch._C, "_nccl_version_suffix", lambda: b"", raising=False)
    monkeypatch.setattr(nccl, "run", lambda name, job: jobs.append(job))
    nccl.check("zero_rows", asked)
    (job,) = jobs
    assert (job.backend, job.num_ranks, job.is_shared, job.version) == ("nccl", ranks, shared, (2, 30, 7))
    assert [job.device(rank).index for rank in range(ranks)] == devices
    hosts = {job.environment(rank).get("NCCL_HOSTID") for rank in range(ranks)}
    assert len(hosts) == (ranks if shared else 1) and (None in hosts) != shared
    assert job.patience == (nccl.PATIENCE if shared else 1)


# ---- the decoder


def planted(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> str | None:
    """Returns what the decoder says of a (64, 64) operand of which each element is read at another place.

    change: change(row, column) is the place that is read.
    """
    places = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    row, column = change(*places)
    return name_difference(places, (row.float(), column.float()), (64, 64))


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda r, c: (c, r), "transposed"),
        (lambda r, c: (r, (c + 16) % 64), "shifted by 0 rows, 16 columns"),
        (lambda r, c: ((r + 8) % 64, c), "shifted by 8 rows, 0 columns"),
        (lambda r, c: (r, swizzled(r, c, "128 bytes")), "swizzle: none on one side, 128 bytes"),
        (lambda r, c: (r, swizzled(r, c, "32 bytes")), "swizzle: none on one side, 32 bytes"),
        (
            lambda r, c: (r, swizzled(r, swizzled(r, c, "64 bytes"), "128 bytes")),
            "swizzle: 64 bytes on one side, 128 bytes",
        ),
        (lambda r, c: ((r // 8 ^ 1) * 8 + r % 8, c), "groups of 8 rows"),
        (lambda r, c: ((r // 16 ^ 1) * 16 + r % 16, c), "groups of 16 rows"),
        (lambda r, c: (r, (c // 16 ^ 1) * 16 + c % 16), "groups of 16 columns"),
        (lambda r, c: (r, c ^ 2), "columns changed places within 16 bytes"),
        (lambda r, c: (r ^ 1, c), "rows changed places within groups of 8"),
        (lambda r, c: (r, torch.where(c == 5, float("nan"), c)), "elements were not written: 64"),
        (lambda r, c: (torch.where(r == 5, -1, r), c), "elements were not summed: 64"),
        (
            lambda r, c: (torch.where(r < 32, r + r // 8 * 8, float("nan")), c ^ 8),
            "elements were not written: 2048, or NaN was summed; groups of 8 rows and of 8 columns",
        ),
        (lambda r, c: (r, c + 0.5), "sums of several elements"),
        (lambda r, c: (r, c * 37 % 64), "no permutation that has a name"),
    ],
)
def test_the_decoder_names_what_was_planted(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], told: str
) -> None:
    assert planted(lambda row, column: (row, column)) is None
    found = planted(change)
    assert found is not None and found.startswith(told), found
    assert re.search(r"\d+ of 4096 elements: D\[\d+, \d+\] is of \(\S+, \S+\), wanted \(\d+, \d+\)", found)


# ---- the machinery, with steps that stand in


def stand_in(name: str, *needs: str, run: str | None = None, seconds: float = 10, **more: int) -> Step:
    return Step(
        name=name, run=run or f"{__name__}:{name}", needs=needs, usual=0.1, seconds=seconds,
        means=f"{name} means", look=f"{name} looks", **more,
    )  # fmt: skip


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replaces the ladder's steps by those of a module that imports nothing. Returns the folder of the
    module.
    """
    source = """
import os, subprocess, sys, time
def well(): print("said by well")
def fails(): raise ValueError("what failed")
def crashes(): os.abort()
def leaves(): sys.stdout.flush(); os._exit(7)
def hangs(pids):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(pids, "w").write(f"{os.getpid()} {child.pid}")
    waits_in_vain()
def waits_in_vain(): time.sleep(600)
"""
    (tmp_path / "stand_ins.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_what_hangs_is_ended_and_what_depends_on_nothing_wrong_goes_on(light: Path) -> None:
    pids = light / "pids"
    steps = [
        stand_in("well", run="stand_ins:well"),
        stand_in("hangs", "well", run=f"stand_ins:hangs {pids}", seconds=4),
        stand_in("behind", "hangs", run="stand_ins:well"),
        stand_in("farther", "behind", run="stand_ins:well"),
        stand_in("fails", "well", run="stand_ins:fails"),
        stand_in("crashes", "well", run="stand_ins:crashes"),
        stand_in("leaves", run="stand_ins:leaves"),
        stand_in("many", run="stand_ins:well", gpus=2),
        stand_in("newer", run="stand_ins:well", hopper=True),
        stand_in("again", "well", run="stand_ins:well"),
    ]
    check_steps(steps)
    told: list[Outcome] = []
    began = time.monotonic()
    found = {each.name: each for each in climb.climb(steps, gpus=1, hopper=False, tell=told.append)}
    assert told == list(found.values()) and time.monotonic() - began < 60
    assert {name: each.state for name, each in found.items()} == {
        "well": "passed", "hangs": "hung", "behind": "skipped", "farther": "skipped", "fails": "failed",
        "crashes": "crashed", "leaves": "crashed", "many": "skipped", "newer": "skipped", "again": "passed",
    }  # fmt: skip
    assert "said by well" in found["well"].told and not found["well"].means
    assert "in waits_in_vain" in found["hangs"].told and "ended after 4 s" in found["hangs"].told
    assert not any(alive(int(each)) for each in pids.read_text().split()), "a step's process is left"
    assert found["behind"].told == "needs hangs (hung)" and found["farther"].told == "needs behind (skipped)"
    assert "what failed" in found["fails"].told and found["fails"].look == "fails looks"
    assert signal.SIGABRT.name in found["crashes"].told and "in crashes" in found["crashes"].told
    assert "exit code 7" in found["leaves"].told and found["leaves"].means == "leaves means"
    assert found["many"].told == "needs 2 GPUs, there are 1" and "sm_90a" in found["newer"].told
    whole = report.text({"gpus": ["one"]}, told, 9.0)
    assert (
        "==== hangs: hung\nmeans: hangs means\nlook at: hangs looks\n" in whole and "gpus: ['one']" in whole
    )
    assert "==== well" not in whole and "2 passed, 1 hung, 4 skipped, 1 failed, 2 crashed, 9 s" in whole


def test_behind_the_wall_nothing_is_begun() -> None:
    steps = [stand_in("one"), stand_in("two", "one")]
    first, second = climb.climb(steps, gpus=1, hopper=True, wall=0)
    assert first.state == NOT_RUN and "0 s of the ladder are over" in first.told
    assert second.told == "needs one (not run)"


def test_one_report_has_the_machine_and_every_step(
    light: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"gpus": ["a GPU"], "path": "sm_80", "driver": "580"}
    monkeypatch.setattr(report, "facts", lambda root: asked)
    steps = [stand_in("well", run="stand_ins:well"), stand_in("fails", run="stand_ins:fails")]
    assert ladder.run(steps, light / "out") == 1
    written = json.loads((light / "out" / "report.json").read_text())
    assert written["machine"] == asked
    assert [(each["name"], each["state"]) for each in written["steps"]] == [
        ("well", "passed"), ("fails", "failed"),
    ]  # fmt: skip
    assert "ValueError: what failed" in (light / "out" / "report.txt").read_text()
    assert "1 passed, 1 failed" in capsys.readouterr().out
    assert ladder.run(steps[:1], light / "out") == 0
    assert ladder.run([stand_in("many", gpus=2)], light / "out") == 1, "nothing was tried"


# ---- the steps that there are


def test_a_healthy_ladder_fits_in_eight_minutes_and_each_step_can_be_run() -> None:
    steps = all_steps()
    check_steps(steps)
    assert sum(each.usual for each in steps) <= climb.WALL_SECONDS < 8 * 60
    assert all(each.seconds <= 60 for each in steps)
    for each in steps:
        module, function = each.run.split()[0].split(":")
        assert callable(getattr(__import__(module, fromlist=["_"]), function)), each.run
        for path in re.findall(r"(?:cuda|pmoe|docs)/[\w/]+\.\w+", each.look):
            assert (climb.ROOT / path).is_file(), (each.name, path)
    checks = {each.run.split()[1] for each in steps if each.run.startswith("tests.gpu.ladder.nccl")}
    assert checks == set(nccl.CHECKS)
    page = (climb.ROOT / "docs" / "gpu.md").read_text()
    assert [name for name in checks if f"| `{name}` |" not in page] == []


def test_the_pages_do_not_say_of_todays_steps_what_ran_of_earlier_ones() -> None:
    """32 steps ran on an H200. A new step changes the number of steps on the page of results."""
    results = (climb.ROOT / "bench" / "results" / "README.md").read_text(encoding="utf-8")
    assert f"The ladder has {len(all_steps())} steps; it had 32 for one GPU when it\n  ran." in results
    page = (climb.ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "All 32 steps that [the ladder](#the-ladder) then had for one GPU passed" in page


def test_steps_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"step 'two' needs \['one'\], not before it"):
        check_steps([stand_in("two", "one"), stand_in("one")])
    with pytest.raises(ValueError, match="step 'one' is there twice"):
        check_steps([stand_in("one"), stand_in("one")])


@pytest.mark.parametrize(
    "words, told",
    [
        (["--only", "routin g"], "--only ('routin g') must be a part of a step's name: copy, extension, "),
        (["--patience", "0.5"], "--patience (0.5) must be at least 1"),
        (["--patience", "nan"], "--patience (nan) must be at least 1"),
    ],
)
def test_words_with_which_no_step_could_pass_are_refused_before_the_first(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ladder.main(words)
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_one_step_is_taken_with_what_it_needs() -> None:
    names = [each.name for each in ladder.chosen(all_steps(), "COMET, one rank")]
    assert names == ["copy", "extension", "routing", "COMET, one rank"]
    assert PASSED not in names
