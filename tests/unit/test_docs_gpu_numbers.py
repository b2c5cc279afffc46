"""The tables of docs/numbers.md that were measured on a GPU have the numbers of the stored results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.test_docs_numbers import NUMBERS, README, RESULTS, table_below, told

GPU = "nvidia_h200"
Rows = Iterator[list[str]]


def stored(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}_{GPU}.json").read_text(encoding="utf-8"))
    return document


def cells(row: dict[str, Any], **digits: int) -> list[str]:
    """Returns cells of a table row from a stored result.

    digits: for each column the number of digits. Names have "_" in place of a space, and "per" in place of
        "/".
    """
    return [told(row[name.replace("_per_", "/").replace("_", " ")], count) for name, count in digits.items()]


def kernels_ms(way: str, passed: str) -> float:
    """Returns the sum of the kernels' times of one pass."""
    work = stored("alone")["ways"][way][f"{passed}_kernels"]
    return sum(float(each["us"]) for each in work) / 1e3


def alone() -> Rows:
    for row in stored("alone")["rows"]:
        sums = {f"{passed} kernels": kernels_ms(row["layer"], passed) for passed in ("forward", "backward")}
        forward = {"fwd_ms": 1, "forward_kernels": 2, "fwd_TFLOP_per_s": 0}
        backward = {"bwd_ms": 1, "backward_kernels": 2, "bwd_TFLOP_per_s": 0}
        columns = forward | backward | {"kernels": 0, "saved_MB": 0, "peak_MB": 0}
        yield [row["layer"], *cells(row | sums, **columns)]


def grouped_gemm() -> Rows:
    for model in stored("grouped_gemm")["models"]:
        for row in model["rows"]:
            shares = cells(row, ms=3, TFLOP_per_s=0, of_dense=2)
            rival = "" if row["x rival"] is None else told(row["x rival"], 2)
            yield [model["model"]["name"], row["product"], *shares, rival]


def permute() -> Rows:
    for row in stored("permute")["scenarios"][0]["rows"]:
        yield [row["kernel"], *cells(row, ms=3, GB_per_s=0, of_copy=2, x_torch=1)]


def beside() -> Rows:
    for row in stored("beside")["rows"]:
        yield [row["way"], *cells(row, alone=2, held=2, times=2)]


def comet() -> Rows:
    for row in stored("comet")["rows"]:
        times = cells(row, dispatch_ms=2, combine_ms=2, pair_ms=2, x_in_place=2, x_torch=2)
        yield [row["model"], str(row["W"]), *times]


def persistent_layers() -> Rows:
    for row in stored("flashdmoe")["layers"]:
        by_one_rank = row["layer"] == "pipeline" and row["fwd launches"] == 6
        name = "one rank's kernels" if by_one_rank else row["layer"]
        yield [row["model"], name, *cells(row, fwd_ms=1, step_ms=1)]


def persistent_ranks() -> Rows:
    for row in stored("flashdmoe")["ranks"]:
        yield [row["model"], str(row["W"]), *cells(row, persistent_ms=2, pair_ms=2, in_place_ms=2)]


def micro_batches() -> Rows:
    for row in stored("gpu_layer")["scenarios"][-1]["rows"]:
        yield [row["layer"], *(told(row[name], 2) for name in ("fwd ms", "fwd / plain", "fwd+bwd / plain"))]


def pairs() -> Rows:
    for row in stored("gpu_memory")["rows"]:
        names = ("forward / larger", "backward / larger", "peak MiB")
        yield [row["pair"], *(told(row[name], digits) for name, digits in zip(names, (2, 2, 0), strict=True))]


TABLES: dict[str, Callable[[], Rows]] = {
    "`python bench/bench_alone.py`": alone,
    "`python bench/bench_grouped_gemm.py`": grouped_gemm,
    "`python bench/bench_permute.py`": permute,
    "`python bench/bench_beside.py`": beside,
    "`python bench/bench_comet.py`": comet,
    "`python bench/bench_flashdmoe.py`": persistent_layers,
    "of several virtual ranks in one launch": persistent_ranks,
    "`python bench/bench_gpu.py`": micro_batches,
    "`python bench/bench_gpu_memory.py`": pairs,
}


@pytest.mark.parametrize("command", TABLES)
def test_a_table_is_the_stored_one(command: str) -> None:
    assert table_below(NUMBERS, command) == list(TABLES[command]())


def test_the_readme_says_what_the_table_of_a_layer_does() -> None:
    ours = stored("alone")["rows"][0]
    assert f"{ours['fwd TFLOP/s']:.0f} TFLOP/s forward and {ours['bwd TFLOP/s']:.0f} backward" in README
    faster = (f"{stored('alone')[f'{way}_speedup']:.1f}" for way in ("forward", "backward"))
    assert " and ".join(faster) + " times as fast" in " ".join(README.split())


def test_the_forward_times_of_the_float32_layer_are_a_line_in_its_operations() -> None:
    """The page says that a chunk costs what the host needs to launch it."""
    [layer] = [each for each in stored("gpu_layer")["scenarios"] if each["scenario"]["dtype"] == "float32"]
    times = [row["fwd ms"] for row in layer["rows"] if row["layer"].endswith("stays")]
    operations = [93, 122, 160, 244]
    slope, begin = statistics.linear_regression(operations, times)
    assert (round(begin, 2), round(slope, 4)) == (0.04, 0.0537)
    assert round(statistics.correlation(operations, times) ** 2, 3) == 0.998
    page = " ".join(NUMBERS.split())
    assert "0.04 ms and 0.0537 ms for each of 93, 122, 160 and 244 operations" in page
    assert "with r squared 0.998" in page


def test_the_page_names_the_slowest_products_of_each_model() -> None:
    page = " ".join(NUMBERS.split())
    sums = {"accumulating": list[str](), "gradient of the gated hidden": list[str]()}
    for model in stored("grouped_gemm")["models"]:
        for kind, shares in sums.items():
            found = [row["of dense"] for row in model["rows"] if row["product"].endswith(kind)]
            shares.append(f"{min(found):.2f}")
    first, second, third = sums["accumulating"]
    assert f"reaches {first}, {second} and {third} of dense" in page
    first, second, third = sums["gradient of the gated hidden"]
    assert f"gated hidden reaches {first}, {second} and {third}" in page
