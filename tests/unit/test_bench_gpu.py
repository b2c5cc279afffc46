"""The benchmarks of a GPU, on the CPU: what is inside a timed region, and that all ways give one result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pmoe
from bench import (
    bench_alone,
    bench_flashdmoe,
    bench_gpu_memory,
    bench_grouped_gemm,
    device,
    grouped_gemm_cases,
)
from bench.plain import GROUPED, PlainMoE
from pmoe.kernels.grouped_gemm import launch
from tests.reference import relative_error


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stands in for CUDA's events and its sleep. Returns the list in which they note what happened."""
    noted: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            noted.append("record")

        def synchronize(self) -> None:
            noted.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: noted.append(f"sleep {cycles}"))
    yield noted


def test_options_are_set_before_the_sleep_and_outside_of_the_timed_region(journal: list[str]) -> None:
    parts = [lambda: journal.append("forward"), lambda: journal.append("backward")]
    seconds = device.part_seconds(parts, lead_cycles=7, prepare=lambda: journal.append("configure"))
    assert seconds == [2e-3, 2e-3]
    assert journal == ["configure", "sleep 7", "record", "forward", "record", "backward", "record", "wait"]


def test_each_run_is_prepared_by_its_own_name(journal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "flush_buffer", lambda: torch.zeros(1))
    names = ("n=1", "n=2")
    runs = {name: lambda name=name: journal.append(f"run {name}") for name in names}
    prepare = {name: lambda name=name: journal.append(f"set {name}") for name in names}
    found = device.time_in_turn(runs, 2, prepare=prepare)
    assert set(found) == set(names)
    steps = [each for each in journal if each.startswith(("run", "set"))]
    assert steps[0::2] == [each.replace("run", "set") for each in steps[1::2]]
    assert not any(each.startswith("sleep") for each in journal)


def test_the_lead_covers_the_longest_pass_that_the_stored_host_enqueued() -> None:
    """12 ms for n = 8 at 2 GHz; the benchmarks of layers share the number."""
    assert device.LEAD_CYCLES >= 2e9 * 12e-3
    assert bench_alone.LEAD_CYCLES is device.LEAD_CYCLES


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_the_grouped_plain_layer_gives_the_result_of_the_layer(expert: str, top_k: int) -> None:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(16, 32, num_experts=4, top_k=top_k, expert=expert, bias=False)
    plain = PlainMoE(layer, GROUPED)
    x = torch.randn(24, 16)
    y, expected = plain(x), layer(x)
    assert relative_error(y.detach(), expected.detach()) < 1e-5
    y.sum().backward()
    expected.sum().backward()
    for name, gradient in plain.gradients().items():
        wanted = layer.get_parameter(name).grad
        assert wanted is not None and relative_error(gradient, wanted) < 1e-5, name


def test_all_ways_of_bench_alone_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*sizes: int, **options: Any) -> pmoe.MoELayer:
        return pmoe.MoELayer(*sizes, **options)

    monkeypatch.setattr(bench_alone, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench_alone, "drawn_layer", drawn)
    step = bench_alone.Step(bench_alone.Scenario(32, 64, 32, 4, 2))
    found = bench_alone.check(step)
    assert list(bench_alone.WAYS) == ["pmoe", "beside", "without", "plain"]
    assert {name: set(each) for name, each in found.items()} == dict.fromkeys(
        ("beside", "without", "plain"), {"y", "x", "gate.weight", "experts.w1", "experts.w2"}
    )
    with torch.no_grad():
        step.plain.experts.w2.mul_(1.1)
    with pytest.raises(SystemExit, match="y of plain differs by 0.09"):
        bench_alone.check(step)


def test_every_product_of_bench_grouped_gemm_is_right_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The permuted first product is among them: the stored files do not have it yet."""
    monkeypatch.setattr(grouped_gemm_cases, "DEVICE", torch.device("cpu"))
    torch.manual_seed(0)
    model = grouped_gemm_cases.Model("tiny", 4, 64, 32, 2)
    routed = grouped_gemm_cases.Routed(model, 64)
    tile = (128, 256, 64)
    cases = [
        *grouped_gemm_cases.plain_cases(routed, "up", 64, 32, tile),
        *grouped_gemm_cases.fused_cases(routed, model, tile),
    ]
    assert "gated hidden, permuted first" in [case.name for case in cases]
    for case in cases:
        assert bench_grouped_gemm.check(case) <= bench_grouped_gemm.LIMIT


def test_kernels_are_summed_in_milliseconds() -> None:
    assert bench_alone.kernels_ms([{"name": "a", "us": 1500.0}, {"name": "Memset", "us": 500.0}]) == 2.0


def test_an_unfused_layer_is_called_by_what_ran() -> None:
    assert bench_flashdmoe.SHOWN["one rank"] == "one rank's kernels"
    paths = {path for each in bench_flashdmoe.PATHS.values() for path in each}
    assert paths == set(bench_flashdmoe.SHOWN)


@pytest.mark.parametrize(("kernel_seconds", "told"), [(5e-3, "launches"), (6e-3, 1.2), (0.0, 1.2)])
def test_a_ratio_over_a_pass_that_waits_for_launches_is_none(
    kernel_seconds: float, told: float | str
) -> None:
    assert bench_gpu_memory.judged(1.2, kernel_seconds, 7.5e-3) == told


def test_a_benchmark_forces_gathering_for_one_run() -> None:
    seen: list[bool | None] = []

    def run() -> torch.Tensor:
        seen.append(launch.GATHERING)
        return torch.zeros(1)

    for in_load in (True, False):
        device.gathering(in_load, run)()
    assert seen == [True, False] and launch.GATHERING is None
