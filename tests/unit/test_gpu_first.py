"""`make gpu-first` tried without a GPU: parts on the CPU or in the emulator, limits with stand-ins."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import bench_alone, kernels_on_cpu
from bench.bench_gpu import Scenario
from pmoe.comm.wire import unpack_rows
from pmoe.decide import program_choice
from pmoe.kernels import extension
from tests import captured
from tests.emulated import load_kernels
from tests.gpu import (
    first_bounded,
    first_costs,
    first_minutes,
    first_shapes,
    first_traces,
    first_wire,
    test_bounded,
)
from tests.gpu.first_bounded import Sizes
from tests.gpu.first_minutes import Part
from tests.gpu.ladder.climb import ROOT
from tests.gpu.ladder.machine import Machine
from tests.gpu.ladder.nccl import Job
from tests.programs import CpuBackend

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- the parts


@pytest.mark.usefixtures("group")
def test_costs_are_those_of_each_call() -> None:
    found = first_costs.measure(CPU, None, count=3)
    assert set(found["costs"]) == {
        "torch, an empty launch", "torch, add of 1 element", "event, record", "event, wait",
        "stream, enter and leave", "all_to_all_single by 1 rank",
    }  # fmt: skip
    assert all(0 < each["host_us"] <= each["done_us"] for each in found["costs"].values())
    assert found["clocks_before"]


@pytest.mark.usefixtures("group")
def test_a_product_of_pmoe_is_launched_through_the_recorded_runtime(kernels: Path) -> None:
    module = load_kernels(kernels)
    module.stub_reset(processors=2)
    machine = Machine(module=module, device=CPU, hopper=False)
    assert first_costs.measure(CPU, machine, count=2)["costs"]["pmoe, a product of one tile"]["host_us"] > 0
    module.stub_reset()


@pytest.mark.usefixtures("group")
def test_traces_are_written_for_chunks_and_for_offloading(tmp_path: Path) -> None:
    found = first_traces.run(tmp_path / "out", CPU, Scenario(32, 8, 16, 4, 2, "float32"))
    assert list(found) == ["n1_sent", "n4_sent", "n8_sent", "n8_offload"]
    written = json.loads((tmp_path / "out" / "traces.json").read_text())
    assert set(written["forward"]) == set(found)
    for name, sums in found.items():
        assert sums["operations"] > 0 and sums["host_ms"] <= sums["done_ms"]
        assert (tmp_path / "out" / f"trace_{name}.json.gz").stat().st_size > 100
    assert found["n8_sent"]["operations"] > found["n1_sent"]["operations"]


def test_a_shape_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def measured(scenario: bench_alone.Scenario) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if scenario.experts == 256:
            raise SystemExit("bench_alone: y differs")
        return {"flop": scenario.forward_flop}, [{"layer": "pmoe", "fwd ms": 1.0}]

    file = tmp_path / "shapes.json"
    assert first_shapes.run(file, {"gpu": "none"}, measured) == 1
    written = json.loads(file.read_text())
    assert len(written["shapes"]) == 7 and written["gpu"] == "none"
    assert written["shapes"]["30B, n=256"]["error"] == "SystemExit: bench_alone: y differs"
    assert written["shapes"]["120B, n=1024"]["rows"] == [{"layer": "pmoe", "fwd ms": 1.0}]
    assert "plain" in " ".join(bench_alone.WAYS), "the plain grouped layer is a way of its own"


def test_rates_of_a_wire_are_those_of_the_bytes_that_the_work_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is called once, on the CPU with a stand-in for the kernels, and takes two seconds."""
    monkeypatch.setattr(extension, "load", lambda: kernels_on_cpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    problem = first_wire.Problem(CPU, 6, 2, 256)

    def time(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        for run in runs.values():
            run()
        return dict.fromkeys(runs, 2.0)

    rows = {row.pop("run"): row for row in first_wire.measure(problem, time)}
    tokens, messages, out, index = 6 * 512, 12 * (256 + 8), 12 * 512, 12 * 4
    assert rows["pack"] == {"ms": 2000.0, "GB/s": (tokens + messages + index) / 2e9}
    assert rows["unpack"] == {"ms": 2000.0, "GB/s": (messages + out + index) / 2e9}
    assert rows["permute"]["GB/s"] == (tokens + out + index) / 2e9
    assert rows["gather"]["GB/s"] == (2 * out + index) / 2e9
    assert rows["torch_pack"]["GB/s"] is rows["torch_unpack"]["GB/s"] is None
    expected = torch.empty_like(problem.out_NM)
    unpack_rows("e4m3", problem.message_NC, problem.index_N, expected)
    assert torch.equal(problem.out_NM, expected) and expected.isfinite().all()
    assert torch.equal(problem.rows_NM[problem.position_TK.long()][:, 1], problem.x_TM)


TINY = Sizes(tokens=16, d_model=16, d_hidden=8, experts=8, chunks=2, dtype="float64")
"""So small that no memory comes from pmoe's pool for the CPU, which the stand-in for graphs cannot repeat."""
OVER_GLOO = Job("gloo", 2, gpus=0)


def stand_in() -> captured.Graph:
    """Returns a stand-in for a CUDA graph. In this process programs then compute on the CPU."""
    program_choice.BACKENDS["cpu"] = CpuBackend()
    return captured.Graph()


def test_a_replay_of_a_bounded_layer_is_measured_and_compared_with_exact_passes(tmp_path: Path) -> None:
    file = tmp_path / "bounded.json"
    assert first_bounded.run(file, OVER_GLOO, TINY, stand_in, 3) == 0
    written = json.loads(file.read_text())
    assert written["gpu"] == "none" and written["sizes"]["chunks"] == 2 and not written["is_shared"]
    for found in written["ranks"]:
        assert set(found["costs"]) == {
            "a replay of both passes", "a step that replays", "both passes, launched",
        }  # fmt: skip
        assert all(0 < each["host_us"] <= each["done_us"] for each in found["costs"].values())
        assert len(found["differences"]) == 4 and max(found["differences"]) < 1e-12
        assert found["repeated"] == 0


def test_the_test_of_a_bounded_layer_on_a_gpu_passes_with_stand_ins() -> None:
    work = functools.partial(test_bounded.trained, sizes=TINY)
    found, _ = first_bounded.run_ranks(work, OVER_GLOO, stand_in)
    for of_rank in found:
        assert of_rank["repeated"] == len(test_bounded.SKEWED)
        assert max(of_rank["differences"].values()) < 1e-12


# ---- the machinery, with parts that stand in


def part(name: str, source: str, seconds: float = 20.0, **variables: str) -> Part:
    return Part(name, ("-c", source), seconds, f"what {name} answers", tuple(variables.items()))


@pytest.mark.slow
def test_each_part_ends_at_its_limit_and_leaves_a_file(tmp_path: Path) -> None:
    pids = tmp_path / "pid"
    hangs = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(pids)!r}, 'w').write(str(os.getpid())); print('began', flush=True); time.sleep(600)"
    )
    parts = [
        part("well", "import os; print(os.environ['GIVEN'])", GIVEN="by the part"),
        part("fails", "raise ValueError('what failed')"),
        part("hangs", hangs, seconds=2),
        part("again", "print('after it')"),
    ]
    began = time.monotonic()
    assert first_minutes.run(parts, tmp_path / "out", facts=lambda: {"gpus": []}) == 1
    assert time.monotonic() - began < 60
    found = {
        each.name: json.loads((tmp_path / "out" / f"{number}_{each.name}.json").read_text())
        for number, each in enumerate(parts)
    }
    assert {name: each["state"] for name, each in found.items()} == {
        "well": "passed", "fails": "failed", "hangs": "hung", "again": "passed",
    }  # fmt: skip
    assert found["well"]["printed"] == "by the part\n" and "what failed" in found["fails"]["printed"]
    assert found["fails"]["code"] == 1 and found["hangs"]["code"] is None
    assert "began" in found["hangs"]["printed"] and found["well"]["machine"] == {"gpus": []}
    stat = Path(f"/proc/{pids.read_text()}/stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_behind_the_wall_no_part_is_begun(tmp_path: Path) -> None:
    one = part("well", "open('begun', 'w')")
    assert first_minutes.run([one], tmp_path, wall=1, facts=dict) == 1
    assert json.loads((tmp_path / "0_well.json").read_text())["state"] == "not run"


# ---- the parts that there are


def test_all_parts_fit_in_ten_minutes_and_can_be_run(tmp_path: Path) -> None:
    parts = first_minutes.all_parts(tmp_path)
    assert sum(each.seconds for each in parts) <= first_minutes.WALL_SECONDS == 600
    assert [each.name for each in parts] == [
        "costs", "traces", "nccl", "pool", "bounded", "grouped_gemm", "shapes", "wire", "flashdmoe",
    ]  # fmt: skip
    for each in parts:
        first, *others = each.command
        if first == "-m":
            assert importlib.util.find_spec(others[0]) is not None, each.name
        else:
            assert (ROOT / first).is_file(), each.name
        for word in others:
            assert not word.startswith("tests/") or (ROOT / word).is_file(), (each.name, word)
    (pool,) = [each for each in parts if each.name == "pool"]
    assert dict(pool.variables) == {"PMOE_TESTS_BACKEND": "nccl"}
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [each.name for each in parts if f"| `{each.name}` |" not in page] == []


PARTS = ["ladder", "nccl", "test", "sanitize", "bench", "comet"]
"""Parts of ``make gpu``, and ``make gpu-nccl``."""


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_make_gpu_ends_within_the_8_minutes_that_the_page_promises(part: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    _, _, rest = makefile.partition(f"\ngpu-{part}: ")
    recipe = re.split(r"\n(?=\S)", rest)[0]
    limits = re.findall(r"timeout -k 5 (\d+)|\b[a-z_]+:(\d+)", recipe)
    seconds = [int(alone or listed) for alone, listed in limits]
    assert seconds and sum(seconds) <= 8 * 60, seconds
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "Each part ends by itself within 8 minutes" in page


def test_the_make_targets_run_what_the_page_says() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "PMOE_TESTS_BACKEND=nccl timeout" in text and "-m tests.gpu.first_minutes" in text
    names = text.partition("NCCL_TESTS = $(foreach one,")[2].partition(",tests/gloo/")[0].replace("\\\n", " ")
    assert len(names.split()) == 11 and set(first_minutes.POOL) <= set(names.split())
    for name in names.split():
        assert (ROOT / f"tests/gloo/test_{name}.py").is_file()
