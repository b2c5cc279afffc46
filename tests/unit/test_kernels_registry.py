"""The registry of kernels: which candidate computes a request, why, and what the registry remembers.

Candidates, clocks and devices are fakes. "pmoe" competes with "grouped_mm", or with "loop" where
that refuses; "loop" refuses nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from pmoe.comm.agreement import Agree
from pmoe.kernels import extension
from pmoe.kernels.extension import Architecture
from pmoe.kernels.registry import ProductCandidate, ProductRequest, Registry, bucket
from pmoe.measure import product_choices
from pmoe.measure.kernel_check import KernelCase
from pmoe.measure.product_choices import measure_choices
from pmoe.warn import GIVEN

HOPPER = Architecture(binary_version=90, ptx_version=90, capability=90)
CUDA = torch.device("cuda", 0)


class FakeBench:
    """Stands in for the functions that measure on a device.

    times: seconds of each candidate; by the request's form, if forms differ.
    """

    def __init__(self, times: Mapping[str, Any], architecture: Architecture = HOPPER) -> None:
        self.times, self.is_hopper = times, architecture
        self.measured: list[str] = []
        self.free = 1 << 40
        self.released = 0
        self.checked: list[KernelCase] = []
        self.wrong: str | Exception | None = None

    def patched(self) -> Any:
        return mock.patch.multiple(
            product_choices,
            candidate_seconds=self.seconds,
            mismatch=self.mismatch,
            free_bytes=self.free_bytes,
            release_memory=self.release,
            loaded_architecture=self.architecture,
        )

    def seconds(self, request: ProductRequest, names: Sequence[str]) -> list[float]:
        self.measured += [f"{request.form} by {name}" for name in names]
        found = [self.times[name] for name in names]
        return [each[request.form] if isinstance(each, dict) else each for each in found]

    def mismatch(self, case: KernelCase) -> str | None:
        self.checked.append(case)
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong

    def free_bytes(self, device: torch.device) -> int:
        return self.free

    def release(self, device: torch.device) -> None:
        self.released += 1

    def architecture(self, device: torch.device) -> Architecture:
        return self.is_hopper


class MeasuredRegistry(Registry):
    """A registry that is asked to measure its products on a fake device."""

    bench: FakeBench

    def measure(
        self, requests: Sequence[ProductRequest], agree: Agree, activation: str = "gelu", bias: bool = False
    ) -> None:
        case = KernelCase(CUDA, torch.bfloat16, activation, bias)
        with self.bench.patched():
            measure_choices(self, requests, agree, case)


def make_registry(
    bench: FakeBench,
    refusals: Mapping[str, list[str]] | None = None,
    misfits: Mapping[str, str] | None = None,
) -> MeasuredRegistry:
    """Returns a registry with the three candidates.

    refusals: for each candidate, its reasons to refuse every request.
    misfits: for each candidate, its reason to refuse every operand.
    """

    def candidate(name: str) -> ProductCandidate:
        return ProductCandidate(
            name=name,
            reasons=lambda request: (refusals or {}).get(name, []),
            layout_problem=lambda operands: (misfits or {}).get(name),
        )

    found = MeasuredRegistry([candidate(name) for name in ("pmoe", "grouped_mm", "loop")])
    found.bench = bench
    return found


def make_request(form: str = "forward", rows: int = 1024, **changes: Any) -> ProductRequest:
    fields: dict[str, Any] = {
        "form": form,
        "device": CUDA,
        "device_name": "NVIDIA H200",
        "dtype": torch.bfloat16,
        "experts": 8,
        "rows": rows,
        "in_features": 64,
        "out_features": 128,
    }
    return ProductRequest(**fields | changes)


FORWARD, INPUT, WEIGHT = (make_request(form) for form in ("forward", "input", "weight"))


class Alone:
    """The agreement of a single rank: returns the values as they are, and counts the calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, values: Sequence[float]) -> list[float]:
        self.calls.append(len(values))
        return list(values)


@pytest.fixture(autouse=True)
def no_warning_was_given() -> None:
    GIVEN.clear()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


SLOWER = {"pmoe": 2e-3, "grouped_mm": 1e-3}
FASTER = {"pmoe": 1e-3, "grouped_mm": 2e-3}


def test_a_bucket_is_the_least_power_of_two_that_holds_the_rows() -> None:
    assert [bucket(rows) for rows in (0, 1, 2, 3, 64, 65, 1000)] == [1, 1, 2, 4, 64, 128, 1024]


def test_devices_of_one_name_share_their_requests() -> None:
    assert replace(FORWARD, device=torch.device("cuda", 1)) == FORWARD
    assert replace(FORWARD, device_name="NVIDIA A100") != FORWARD
    assert FORWARD.key == "forward bfloat16 experts=8 rows=1024 in=64 out=128"
    assert replace(FORWARD, bias=True).key == FORWARD.key + " bias"


# ---- the rule


@pytest.mark.parametrize(
    "refusing, taken",
    [
        ([], "grouped_mm"),
        (["grouped_mm"], "loop"),
        (["pmoe"], "grouped_mm"),
        (["pmoe", "grouped_mm"], "loop"),
    ],
)
@pytest.mark.filterwarnings("ignore:pmoe. products")
def test_what_was_not_measured_is_computed_in_the_first_plain_way(refusing: list[str], taken: str) -> None:
    refusals = {name: ["no"] for name in refusing}
    assert make_registry(FakeBench(FASTER), refusals).choose(FORWARD) == taken


def test_a_willing_but_slower_kernel_is_never_chosen() -> None:
    found = make_registry(FakeBench(SLOWER))
    found.measure([FORWARD, INPUT], Alone())
    assert [found.choose(each) for each in (FORWARD, INPUT, WEIGHT)] == ["grouped_mm"] * 3


def test_the_faster_kernel_is_chosen_for_what_was_measured_and_nothing_else() -> None:
    times = {"pmoe": {"forward": 1.0, "input": 3.0}, "grouped_mm": {"forward": 2.0, "input": 2.0}}
    bench = FakeBench(times)
    found = make_registry(bench)
    found.measure([FORWARD, INPUT], Alone())
    others = [make_request(rows=2048), make_request(rows=512), WEIGHT]
    assert [found.choose(each) for each in (FORWARD, INPUT, *others)] == [
        "pmoe", "grouped_mm", "grouped_mm", "grouped_mm", "grouped_mm",
    ]  # fmt: skip
    assert bench.measured == [
        "forward by pmoe", "forward by grouped_mm", "input by pmoe", "input by grouped_mm",
    ]  # fmt: skip
    assert bench.released == 1


@pytest.mark.parametrize(("seconds", "taken"), [(0.995, "grouped_mm"), (0.985, "pmoe"), (1.0, "grouped_mm")])
def test_ties_within_one_percent_go_to_grouped_mm(seconds: float, taken: str) -> None:
    found = make_registry(FakeBench({"pmoe": seconds, "grouped_mm": 1.0}))
    found.measure([FORWARD], Alone())
    assert found.choose(FORWARD) == taken


@pytest.mark.parametrize("seconds, taken", [(1.0, "pmoe"), (3.0, "loop")])
def test_what_grouped_mm_refuses_is_measured_beside_the_loop(seconds: float, taken: str) -> None:
    """grouped_mm refuses a bias, float16, and a device before compute capability 9.0."""
    bench = FakeBench({"pmoe": seconds, "loop": 2.0})
    found = make_registry(bench, {"grouped_mm": ["bias"]})
    found.measure([FORWARD], Alone())
    assert bench.measured == ["forward by pmoe", "forward by loop"]
    assert found.choose(FORWARD) == taken


def test_a_request_that_pmoe_refuses_is_neither_checked_nor_measured() -> None:
    bench = FakeBench(FASTER)
    found, agree = make_registry(bench, {"pmoe": ["not built"]}), Alone()
    found.measure([FORWARD], agree)
    assert bench.measured == bench.checked == []
    assert len(agree.calls) == 1


# ---- deterministic mode, operands, names


def test_deterministic_mode_takes_the_plain_way_whatever_was_measured(deterministic: None) -> None:
    bench, agree = FakeBench(FASTER), Alone()
    found = make_registry(bench)
    found.measure([FORWARD], agree)
    assert (bench.measured, agree.calls) == ([], [])
    assert found.choose(FORWARD) == "grouped_mm"
    torch.use_deterministic_algorithms(False)
    found.measure([FORWARD], agree)
    assert found.choose(FORWARD) == "pmoe"
    torch.use_deterministic_algorithms(True)
    assert found.choose(FORWARD) == "grouped_mm"
    assert make_registry(bench, {"grouped_mm": ["no"]}).choose(FORWARD) == "loop"
    with found.forcing("pmoe"):
        assert found.choose(FORWARD) == "pmoe"


def test_operands_that_do_not_fit_go_to_the_next() -> None:
    found = make_registry(FakeBench(FASTER), misfits={"pmoe": "rows: not aligned"})
    found.measure([FORWARD], Alone())
    with pytest.warns(UserWarning, match="without pmoe's kernels: rows: not aligned") as caught:
        assert found.choose(FORWARD, ()) == found.choose(FORWARD, ()) == "grouped_mm"
    assert len(caught) == 1
    found = make_registry(FakeBench(FASTER), misfits={"grouped_mm": "not contiguous"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of pmoe's is passed over
        assert found.choose(INPUT, ()) == "loop"


def test_a_choice_may_be_forced_for_a_while() -> None:
    found = make_registry(FakeBench(SLOWER), misfits={"grouped_mm": "bias"})
    with found.forcing("pmoe"):
        assert found.choose(FORWARD, ()) == "pmoe"
        with found.forcing("grouped_mm"):
            assert found.choose(FORWARD, ()) == "loop"
    assert found.choose(FORWARD) == "grouped_mm"
    with (
        pytest.raises(ValueError, match=r"name \('cutlass'\) must be one of pmoe, grouped_mm, loop"),
        found.forcing("cutlass"),
    ):
        pass


# ---- it explains itself


def test_explain_gives_the_request_each_candidates_seconds_and_the_choice() -> None:
    found = make_registry(FakeBench(FASTER))
    found.measure([FORWARD], Alone())
    when = found.measured[FORWARD].when
    assert found.explain(FORWARD) == (
        "forward bfloat16 experts=8 rows=1024 in=64 out=128 on NVIDIA H200\n"
        "  pmoe        1 ms\n"
        "  grouped_mm  2 ms\n"
        "  loop        willing\n"
        f"  takes pmoe: faster, measured {when}"
    )


def test_explain_gives_each_candidates_reasons() -> None:
    refusals = {"pmoe": ["not built", "dtype"], "grouped_mm": ["bias"]}
    found = make_registry(FakeBench(FASTER), refusals)
    assert found.explain(replace(FORWARD, bias=True)).splitlines()[1:] == [
        "  pmoe        refuses: not built; dtype",
        "  grouped_mm  refuses: bias",
        "  loop        willing",
        "  takes loop: pmoe refuses",
    ]


def test_explain_says_why_nothing_was_measured(deterministic: None) -> None:
    found = make_registry(FakeBench(FASTER))
    assert found.explain(FORWARD).endswith("takes grouped_mm: deterministic mode: measurements are ignored")
    torch.use_deterministic_algorithms(False)
    reason = "not measured, and only a measured kernel replaces it"
    assert found.explain(FORWARD).endswith(f"takes grouped_mm: {reason}")


@pytest.mark.parametrize("flag", [None, "0", "1"])
def test_each_choice_is_logged_once_for_each_request_where_asked_for(
    flag: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PMOE_LOG_KERNELS", raising=False)
    if flag is not None:
        monkeypatch.setenv("PMOE_LOG_KERNELS", flag)
    found = make_registry(FakeBench(FASTER))
    with caplog.at_level(logging.DEBUG, "pmoe"):
        for request in (FORWARD, FORWARD, INPUT, FORWARD):
            found.choose(request)
    asked = [FORWARD, INPUT] if flag == "1" else []
    assert [record.message for record in caplog.records] == [found.explain(each) for each in asked]


def test_a_fallback_is_told_once_for_each_reason_and_only_on_cuda() -> None:
    found = make_registry(FakeBench(FASTER), {"pmoe": ["pmoe._cuda is not built"]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found.choose(replace(FORWARD, device=torch.device("cpu"), device_name="cpu"))
        assert caught == []
        for request in (FORWARD, INPUT, WEIGHT, make_request(rows=8)):
            found.choose(request)
    assert [str(each.message) for each in caught] == [
        "pmoe: products are computed without pmoe's kernels: pmoe._cuda is not built"
    ]


# ---- it remembers


def test_what_was_measured_is_known_and_the_rest_is_measured() -> None:
    bench, agree = FakeBench(FASTER), Alone()
    found = make_registry(bench)
    found.measure([FORWARD, INPUT], agree)
    assert (len(bench.measured), len(agree.calls)) == (4, 2)
    bench.times = SLOWER
    found.measure([FORWARD, INPUT], agree)
    assert (len(bench.measured), len(agree.calls)) == (4, 3)
    found.measure([FORWARD, WEIGHT], agree)
    assert bench.measured[4:] == ["weight by pmoe", "weight by grouped_mm"]
    assert [found.choose(each) for each in (FORWARD, INPUT, WEIGHT)] == ["pmoe", "pmoe", "grouped_mm"]


# ---- what cannot be measured


def test_without_memory_nothing_is_measured_and_grouped_mm_computes() -> None:
    bench = FakeBench(FASTER)
    bench.free = 4 * (1024 * 192 + 8 * 64 * 128 + 1024 * 128) - 1  # of 2 bytes each, and half may be used
    found = make_registry(bench)
    with pytest.warns(
        UserWarning, match=r"could not be measured.*: \d+ bytes are needed, but only half of the \d+ free"
    ):
        found.measure([FORWARD], Alone())
    assert bench.measured == []
    assert found.choose(FORWARD) == "grouped_mm"
    assert "not measured: " in found.explain(FORWARD)
    bench.free += 1
    found.measure([FORWARD], Alone())
    assert found.choose(FORWARD) == "pmoe"


def test_a_kernel_that_fails_while_measured_is_not_chosen() -> None:
    bench = FakeBench({})
    bench.seconds = lambda *_: (_ for _ in ()).throw(RuntimeError("launch failed"))  # type: ignore
    found = make_registry(bench)
    with pytest.warns(UserWarning, match="launch failed"):
        found.measure([FORWARD], Alone())
    assert found.choose(FORWARD) == "grouped_mm"


def test_what_another_rank_neither_knows_nor_can_measure_is_settled_no_longer() -> None:
    found = make_registry(FakeBench(FASTER))
    found.measure([FORWARD], Alone())
    assert found.choose(FORWARD) == "pmoe"

    def agree(values: Sequence[float]) -> list[float]:
        if len(values) == 12:  # the other's codes are others
            return [*values[:4], values[4] + 1, *values[5:]]
        if values == [1, -1]:
            return [1, 0]
        assert values == [*FASTER.values()]
        return [float("inf")] * 2

    found.measure([FORWARD], agree)
    assert found.choose(FORWARD) == "grouped_mm"


# ---- what is there


@pytest.mark.parametrize(
    ("capability", "loaded", "expected"),
    [
        ((9, 0), [(True, 90, 90), (False, 90, 80)], (90, 90, 90)),
        ((9, 0), [(True, 90, 80), (False, 90, 80)], (90, 80, 90)),  # CUDA_FORCE_PTX_JIT=1
        ((8, 0), [(True, 80, 80), (False, 80, 80)], (80, 80, 80)),
        ((10, 0), [(True, 100, 80), (False, 100, 80)], (100, 80, 100)),
        ((9, 0), None, (0, 0, 90)),
    ],
)
def test_the_architecture_is_that_of_the_code_that_was_loaded(
    capability: tuple[int, int],
    loaded: list[tuple[bool, int, int]] | None,
    expected: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = ("threads", "registers", "shared_bytes", "dynamic_shared_bytes", "local_bytes")
    names, others = ("hopper", "binary_version", "ptx_version"), {"name": "k", **dict.fromkeys(sizes, 0)}
    kernels = [dict(zip(names, each, strict=True)) | others for each in loaded or ()]
    module = None if loaded is None else SimpleNamespace(kernels=lambda index, name: kernels)
    monkeypatch.setattr(extension, "_load", lambda: (module, "not built"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    found = extension.loaded_architecture(CUDA)
    assert (found.binary_version, found.ptx_version, found.capability) == expected


def test_the_device_that_is_asked_is_the_current_one_if_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Device 0 was asked. Rank 1 of a job then compared the wrong GPU, if its GPUs were of two kinds."""
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        extension,
        "ask_device",
        lambda index, only: asked.append(index) or SimpleNamespace(kernels=(), capability=(9, 0)),
    )
    for device in (torch.device("cuda"), torch.device("cuda", 0), torch.device("cuda", 2)):
        extension.loaded_architecture(device)
    assert asked == [1, 0, 2]


# ---- kernels that are slower


@pytest.mark.parametrize(("seconds", "warns"), [(3.0, True), (1.005, False), (0.5, False)])
def test_kernels_that_are_slower_are_told_once(seconds: float, warns: bool) -> None:
    """A tie is taken by grouped_mm without a word: nothing is lost."""
    found = make_registry(FakeBench({"pmoe": seconds, "grouped_mm": 1.0}))
    found.measure([FORWARD, INPUT], Alone())
    GIVEN.clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for request in (FORWARD, INPUT, FORWARD):
            found.choose(request)
    texts = [str(each.message) for each in given]
    assert len(texts) == warns
    if warns:
        assert "products are computed without pmoe's kernels where these are slower" in texts[0]
        assert "grouped_mm takes 1e+03 ms and pmoe 3e+03 ms for forward bfloat16" in texts[0]
