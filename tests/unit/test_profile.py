"""Profiles: their files, what is refused, the arithmetic of speeds by hand, and one real measurement.

No time is asserted: a busy machine may take any.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pmoe.comm.ranks import Ranks
from pmoe.measure import line_fits, rates, store
from pmoe.measure import profile as profile_module
from pmoe.measure.bench import Marks, TimedCall, identity
from pmoe.measure.profile import load_or_measure, load_profile, profile_from, profile_path, save_profile
from pmoe.measure.rates import measure, speeds
from pmoe.measure.store import CorruptFileError
from pmoe.planner.cost_model import FACTORS, Interference, lane_seconds
from pmoe.planner.costs import FREE, Fit, LineCost
from pmoe.planner.profile import Identity, Operations, Profile, Versions
from pmoe.schedule.restore import STRATEGIES

MADE = Profile(
    device="Abacus (R) 3000, 2 threads",
    device_type="cpu",
    num_ranks=4,
    backend="gloo",
    dtype="float32",
    versions=Versions(torch="2.13.0+cpu", cuda=None, file=3),
    compute=LineCost(1e-5, 1 / 3e10),
    message=LineCost(1e-4, 2e-9),
    copy_out=LineCost(0.0, 1e-10),
    copy_in=LineCost(1e-6, 5e-10),
    interference=Interference(mu_comp=0.7, sigma_comm=0.9, eta_all=0.1 + 0.2),
    seconds=1.5,
    when="2026-11-21T12:00:00+00:00",
)

OPERATIONS = Operations(
    num_across=2,
    num_inside=2,
    gemm=Fit(line=LineCost(1e-5, 1 / 3e10), r_squared=0.9987, num_sizes=12),
    all_to_all=Fit(line=LineCost(1e-4, 2e-9), r_squared=0.1 + 0.2, num_sizes=24),
    all_gather=Fit(line=LineCost(0.0, 1e-9), r_squared=1.0, num_sizes=3),
    reduce_scatter=Fit(line=LineCost(2e-5, 0.0), r_squared=0.0, num_sizes=24),
    all_reduce=FREE,
    seconds=2.5,
)


def assert_sound(profile: Profile) -> None:
    """Checks that costs do not fall with size and are not negative, and that factors are in (0, 1]."""
    lines = [profile.compute, profile.copy_out, profile.copy_in]
    if profile.num_ranks > 1:
        lines.append(profile.message)
    for line in lines:
        assert line.alpha_seconds >= 0
        assert line.beta_seconds > 0
    for name in FACTORS:
        assert 0 < getattr(profile.interference, name) <= 1, name
    assert profile.seconds > 0


def to_json(profile: Profile) -> str:
    return json.dumps(asdict(profile))


def from_json(text: str) -> Profile:
    return profile_from(json.loads(text))


# ---- the file


class Counted:
    """Stands in for the measurement: counts its calls, and returns an invented profile of this machine."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, ranks: Ranks, device: str, dtype: torch.dtype, *, quick: bool, most_bytes: float = math.inf
    ) -> Profile:
        self.calls += 1
        self.most_bytes = most_bytes
        here: Identity = identity(ranks, device, dtype)
        fields = {name: getattr(here, name) for name in Identity.__dataclass_fields__}
        return replace(MADE, **fields, seconds=float(self.calls))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counted:
    """Replaces the measurement by one that only counts its calls; profiles are stored in an empty folder."""
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    stand_in = Counted()
    monkeypatch.setattr(profile_module, "measure", stand_in)
    return stand_in


@pytest.mark.parametrize("name", ["compute", "message", "copy_in"])
def test_a_file_with_seconds_that_nothing_takes_is_corrupt(name: str) -> None:
    """Before, a beta of 1e308 was read. The simulation of a step then never ended, on all ranks."""
    fields = asdict(MADE)
    fields[name]["beta_seconds"] = 1e308
    with pytest.raises(CorruptFileError, match=rf"{name} .*must be at most 1e\+06 s"):
        profile_from(fields)
    operations = asdict(replace(MADE, operations=OPERATIONS))
    operations["operations"]["gemm"]["line"]["alpha_seconds"] = 1e7
    with pytest.raises(CorruptFileError, match=r"alpha_seconds=1e\+?0?7|10000000"):
        profile_from(operations)


def test_a_profile_survives_json_to_the_last_bit() -> None:
    assert from_json(to_json(MADE)) == MADE
    with_cuda = replace(MADE, versions=Versions(torch="2.13.0", cuda="12.8", file=3))
    assert from_json(to_json(with_cuda)) == with_cuda
    with_operations = replace(MADE, operations=OPERATIONS)
    assert from_json(to_json(with_operations)) == with_operations
    assert with_operations.identity == MADE.identity, "the same file holds them"


def test_a_saved_profile_loads_for_the_identity_that_it_has(tmp_path: Path) -> None:
    path = profile_path(MADE, tmp_path / "not" / "yet")
    save_profile(MADE, path)
    assert load_profile(path) == load_profile(path, expected=MADE.identity) == MADE
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_named_after_device_ranks_backend_dtype_and_versions(tmp_path: Path) -> None:
    expected = "abacus-r-3000-2-threads_4-ranks_gloo_float32_torch-2-13-0-cpu_no-cuda_v3.json"
    assert profile_path(MADE, tmp_path) == profile_path(MADE.identity, tmp_path) == tmp_path / expected
    with_cuda = replace(MADE, versions=Versions(torch="2.13.0", cuda="12.8", file=3))
    assert profile_path(with_cuda, tmp_path).name.endswith("_torch-2-13-0_cuda-12-8_v3.json")


def test_nodes_and_links_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one rank and one node of two ranks once had the same file.

    Their links differ a thousandfold.
    """

    class Pair(Ranks):
        size, rank, members = 2, 0, [0, 1]  # type: ignore[assignment]

        def __init__(self) -> None:
            self.group = None

    monkeypatch.setattr("pmoe.measure.bench._backend", lambda ranks, device: "gloo")
    names = []
    for variables in ({"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "1"}, {"GLOO_SOCKET_IFNAME": "eth1"}):
        for name in ("LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        names.append(profile_path(identity(Pair(), "cpu"), tmp_path).name)
    assert len(set(names)) == 3
    assert "_2-ranks_gloo_f" in names[0] and "_2-ranks_2-nodes_gloo_f" in names[1]
    assert "_2-ranks_gloo_gloo-socket-ifname-eth1_f" in names[2]


def test_files_lie_in_pmoe_cache_or_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    assert profile_path(MADE).parent == tmp_path
    monkeypatch.setenv("PMOE_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_path(MADE).parent == tmp_path / ".cache" / "pmoe"


def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile_path(MADE, tmp_path)
    save_profile(MADE, path)

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        save_profile(replace(MADE, seconds=9.0), path)
    assert list(tmp_path.iterdir()) == [path]
    assert load_profile(path) == MADE


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "Loom 2"}, "device 'Abacus (R) 3000, 2 threads', here 'Loom 2'"),
        ({"num_ranks": 8}, "num_ranks 4, here 8"),
        ({"backend": "nccl"}, "backend 'gloo', here 'nccl'"),
        ({"dtype": "float64"}, "dtype 'float32', here 'float64'"),
        (
            {"versions": Versions(torch="2.14.0", cuda="13.0", file=3)},
            "torch '2.13.0+cpu', here '2.14.0'; cuda None, here '13.0'",
        ),
    ],
)
def test_a_profile_of_something_else_is_refused_naming_file_content_and_place(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    save_profile(MADE, path)
    with pytest.raises(ValueError) as caught:
        load_profile(path, expected=replace(MADE.identity, **change))
    assert str(caught.value) == f"{path}: does not fit this machine and group: {told}"
    assert not isinstance(caught.value, CorruptFileError)


def test_another_format_version_is_refused_but_not_called_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"versions": {"file": 7}, "all": "else is different"}', encoding="utf-8")
    told = r"profile.json: format version \(7\) must be 3; `pmoe profile` writes it"
    with pytest.raises(ValueError, match=told) as caught:
        load_profile(path)
    assert not isinstance(caught.value, CorruptFileError)


def test_a_file_of_the_format_before_is_refused_by_name_and_measured_again_without_a_word(
    tmp_path: Path, counted: Counted
) -> None:
    fields = asdict(MADE)
    del fields["operations"]
    fields["versions"]["file"] = 2
    here = identity(Ranks(), "cpu")
    old = profile_path(replace(here, versions=replace(here.versions, file=2)), tmp_path)
    old.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ValueError, match=r"format version \(2\) must be 3"):
        load_profile(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_or_measure(Ranks(), "cpu")
    assert counted.calls == 1
    assert len(list(tmp_path.iterdir())) == 2, "the old file is left alone"
    profile_path(here, tmp_path).write_bytes(old.read_bytes())  # and under the new name it costs a warning
    with pytest.warns(
        UserWarning, match=r"format version \(2\) must be 3; `pmoe profile` writes it; it is measured again"
    ):
        load_or_measure(Ranks(), "cpu")
    assert counted.calls == 2


def broken(**changes: Any) -> str:
    """Returns the JSON of the profile MADE with other fields; None removes a field."""
    fields = asdict(MADE) | changes
    gone = [name for name, value in changes.items() if value is None]
    return json.dumps({name: value for name, value in fields.items() if name not in gone})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no JSON"),
        (to_json(MADE)[:200].encode(), "no JSON"),
        (b"\xff\xfe\xfd", "no JSON"),
        (b"[1, 2]", "must be an object"),
        (broken(compute=None, when=None), "profile has no compute, when"),
        (broken(message={"alpha_seconds": 1.0}), "profile.message has no beta_seconds"),
        (broken(copy_in=3), r"profile.copy_in \(3\) must be an object"),
        (broken(operations={}), "profile.operations has no num_across, num_inside, gemm"),
        (broken(operations=3), r"profile.operations \(3\) must be an object"),
        (broken(seconds="1.5"), r"profile.seconds \('1.5'\) must be a finite number"),
        (broken(seconds=float("nan")), r"profile.seconds \(nan\) must be a finite number"),
        (broken(num_ranks=2.5), r"profile.num_ranks \(2.5\) is of the wrong type"),
        (broken(interference=dict.fromkeys(FACTORS, 1.5)), r"mu_comp \(1.5\)"),
    ],
)
def test_what_is_no_profile_is_called_corrupt_with_the_file_and_the_field(
    content: bytes | str, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CorruptFileError, match=f"{path}.*{told}"):
        load_profile(path)


# ---- the numbers


def test_equation_10_takes_what_one_more_unit_costs() -> None:
    alone = lane_seconds(STRATEGIES["S1"], "forward", MADE, b=3, M=5, H=20, element_size=2)
    seconds = 2 * 300 / 3e10, 2 * 15 * 4e-9, 5 * 15 * 1e-9  # copies: of the slower direction
    assert alone == pytest.approx(seconds)


def test_on_one_rank_messages_take_no_time() -> None:
    here = replace(MADE, num_ranks=1, message=LineCost(0.0, 0.0))
    assert lane_seconds(STRATEGIES["S1"], "forward", here, b=3, M=5, H=20, element_size=4)[1] == 0


def test_speeds_are_those_of_the_time_in_which_all_lanes_are_busy() -> None:
    assert speeds({"a": [0, 2, 4, 6], "b": [1, 5]}) == {"a": 0.5, "b": 0.25}
    assert speeds({"a": [0, 1, 2]}) == {"a": 1.0}


def test_lanes_that_never_ran_together_share_the_whole_time() -> None:
    assert speeds({"a": [0, 1], "b": [3, 4]}) == {"a": 0.25, "b": 0.25}


class Slowed:
    """Stands in for lanes: a piece of work takes a second alone, and longer beside others, as a table
    says.
    """

    largest = staticmethod(list)

    def __init__(self, relative: dict[tuple[str, ...], float]) -> None:
        self.relative = relative

    def run(self, work: Mapping[str, tuple[TimedCall, int]]) -> dict[str, Marks]:
        return {
            lane: [i / self.relative.get((lane, *sorted({*work} - {lane})), 1.0) for i in range(count + 1)]
            for lane, (_, count) in work.items()
        }


def nothing() -> None:
    pass


class Priced:
    """Stands in for lanes: a piece of work takes the seconds that it returns, and a lane's first piece a
    minute more.
    """

    largest = staticmethod(list)

    def made(self, make: Callable[[], TimedCall]) -> TimedCall:
        return make()

    def run(self, work: Mapping[str, tuple[TimedCall, int]]) -> dict[str, Marks]:
        return {
            lane: [0.0, *(60 + (i + 1) * piece() for i in range(count))]
            for lane, (piece, count) in work.items()
        }


def priced(seconds: Callable[[int], float]) -> line_fits.LaneWork:
    """Returns work in units of 10 bytes, of which a number of units takes seconds(units)."""
    return line_fits.LaneWork(
        lane="copy",
        size=10,
        unit_bytes=10,
        first_units=16,
        max_units=4096,
        make=lambda units: lambda: seconds(units),
    )


def test_a_line_goes_through_three_sizes_and_forgets_the_first_piece() -> None:
    line = line_fits.measured_line(Priced(), priced(lambda units: 1e-3 + 1e-5 * units), (10, 40, 160), 9).line
    assert (line.alpha_seconds, line.beta_seconds) == pytest.approx((1e-3, 1e-6))


def test_sizes_that_are_on_no_line_are_measured_once_more() -> None:
    """The second measurement is used, even if it fits no better, and the profile says how well it fits."""
    for late in (1, 2):
        tries: list[int] = []

        def seconds(units: int, late: int = late, tries: list[int] = tries) -> float:
            tries.append(units)
            disturbed = tries.count(160) < late * (9 + 1)
            return (3e-3 if units < 160 else 1e-3) if disturbed else 1e-5 * units

        found = line_fits.measured_line(Priced(), priced(seconds), (10, 40, 160), 9)
        assert len(tries) == 2 * 3 * (9 + 1)
        assert (found.r_squared > 0.99) == (late == 1)


@pytest.mark.parametrize("of", ["the profile", "an operation"])
def test_each_run_that_takes_a_bad_fit_warns_of_it(
    of: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It warns when the profile is measured, and when it is read from its file."""
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    bad = replace(MADE, **vars(identity(Ranks(), "cpu")), r_squared=0.7)
    if of != "the profile":
        gemm = replace(OPERATIONS.gemm, r_squared=0.7)
        good = replace(OPERATIONS.gemm, r_squared=1.0)
        lines = dict.fromkeys(("all_to_all", "all_gather", "reduce_scatter", "all_reduce"), good)
        bad = replace(bad, r_squared=1.0, operations=replace(OPERATIONS, gemm=gemm, **lines))
    monkeypatch.setattr(profile_module, "measure", lambda *args, **options: bad)
    for _ in range(2):
        monkeypatch.setattr("pmoe.warn.GIVEN", set())
        with pytest.warns(UserWarning, match=r"describes this machine badly \(r squared 0.70\)"):
            load_or_measure(Ranks(), "cpu")


@pytest.mark.parametrize("seconds", [lambda units: 1e-6 * units**2, lambda units: 1e-2 / units])
def test_where_no_line_from_zero_fits_it_goes_through_the_largest_size(seconds: Callable) -> None:
    found = line_fits.measured_line(Priced(), priced(seconds), (10, 40, 160), 9)
    assert found.line.alpha_seconds == 0
    assert found(1600) == pytest.approx(seconds(160))
    assert (found.r_squared > 0.9) == (seconds(160) > seconds(10))  # of this line: the large sizes count


@pytest.mark.parametrize(
    ("seconds", "units"),
    [
        (lambda units: 2e-5 * units, 100),  # as long as wanted
        (lambda units: 1e-9 * units, 4096),  # never: the largest
        (lambda units: 0.1 * units, 64),  # far longer: the least that shows what size costs
        (lambda units: 0.02 + 1e-4 * units, 1024),  # 256 costs 0.046 s, only twice what 16 does
    ],
)
def test_pieces_grow_until_they_are_long_and_size_shows(seconds: Callable, units: int) -> None:
    assert line_fits.longest_units(Priced(), priced(seconds), 2e-3) == pytest.approx(units, abs=1)


def test_each_factor_is_the_speed_of_its_own_lane_beside_the_lanes_it_names() -> None:
    bench = Slowed(
        {
            ("communicate", "compute"): 0.1,
            ("communicate", "copy"): 0.2,
            ("communicate", "compute", "copy"): 0.3,
            ("compute", "communicate"): 0.4,
            ("compute", "copy"): 0.5,
            ("compute", "communicate", "copy"): 0.6,
            ("copy", "communicate"): 0.7,
            ("copy", "compute"): 0.8,
            ("copy", "communicate", "compute"): 1.9,  # noise
        }
    )
    found = rates._interference(
        bench, dict.fromkeys(("compute", "communicate", "copy"), nothing), rates.QUICK
    )
    expected = Interference(
        mu_comp=0.1,
        mu_mem=0.2,
        mu_all=0.3,
        sigma_comm=0.4,
        sigma_mem=0.5,
        sigma_all=0.6,
        eta_comm=0.7,
        eta_comp=0.8,
        eta_all=1.0,
    )
    for name in FACTORS:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_without_messages_all_lanes_are_computation_and_copies() -> None:
    bench = Slowed({("compute", "copy"): 0.5, ("copy", "compute"): 0.8})
    found = rates._interference(bench, dict.fromkeys(("compute", "copy"), nothing), rates.QUICK)
    assert (found.sigma_mem, found.sigma_all) == pytest.approx((0.5, 0.5))
    assert (found.eta_comp, found.eta_all) == pytest.approx((0.8, 0.8))
    assert (found.mu_comp, found.mu_mem, found.mu_all, found.sigma_comm, found.eta_comm) == (1, 1, 1, 1, 1)


# ---- measuring


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_measured_costs_are_positive_and_factors_at_most_one(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    with torch.inference_mode():
        profile = measure(Ranks(), "cpu", dtype, quick=True)
    assert_sound(profile)
    assert profile.identity == identity(Ranks(), "cpu", dtype)
    assert (profile.num_ranks, profile.backend, profile.message) == (1, "none", LineCost(0.0, 0.0))
    assert profile.compute.beta_seconds > 0
    assert from_json(to_json(profile)) == profile
    assert torch.equal(torch.get_rng_state(), before), "measuring drew from the caller's random numbers"


def test_devices_and_dtypes_that_nobody_can_measure_are_refused() -> None:
    with pytest.raises(ValueError, match=r"device \(meta\) must be one of the types cpu, cuda"):
        measure(Ranks(), "meta")
    with pytest.raises(ValueError, match=r"dtype \(torch.int64\) must be floating point"):
        load_or_measure(Ranks(), "cpu", torch.int64)


def test_the_second_time_nothing_is_measured(tmp_path: Path, counted: Counted) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = load_or_measure(Ranks(), "cpu")
        assert load_or_measure(Ranks(), "cpu") == first
        assert counted.calls == 1
        load_or_measure(Ranks(), "cpu", torch.float64)
    assert counted.calls == 2, "another dtype has a profile of its own"


def test_a_corrupt_file_is_measured_again_with_one_warning(tmp_path: Path, counted: Counted) -> None:
    path = profile_path(identity(Ranks(), "cpu"), tmp_path)
    path.write_text("{", encoding="utf-8")
    with pytest.warns(UserWarning) as caught:
        profile = load_or_measure(Ranks(), "cpu")
    assert len(caught) == 1
    assert str(caught[0].message).startswith(f"{path}: no JSON")
    assert str(caught[0].message).endswith("; it is measured again")
    assert counted.calls == 1
    assert load_profile(path) == profile


def test_a_file_of_another_device_under_our_name_is_measured_again_with_a_warning(
    tmp_path: Path, counted: Counted
) -> None:
    here = identity(Ranks(), "cpu")
    save_profile(MADE, profile_path(here, tmp_path))
    with pytest.warns(UserWarning, match=r"does not fit this machine and group: .*num_ranks 4, here 1"):
        profile = load_or_measure(Ranks(), "cpu")
    assert profile.identity == here


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_profile(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(profile: Profile, path: Path) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(profile_module, "save_profile", refuse)
    with pytest.warns(UserWarning, match="could not be saved.*read-only"):
        profile = load_or_measure(Ranks(), "cpu")
    assert profile.seconds == 1.0
