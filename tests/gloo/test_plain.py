"""The plain layers that benchmarks compare with compute what the layer computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import pmoe
from bench import bench_plain
from bench.plain import SPELLINGS, PlainMoE, PlainOverRanks, fastest, name_of
from bench.timing import Timing
from tests.kit import build, tokens
from tests.pool import ranks
from tests.reference import relative_error


def errors_of(layer: pmoe.MoELayer, plain: PlainMoE, x: torch.Tensor) -> dict[str, float]:
    """Returns the relative errors of y, of the gradient of x, and of those of all parameters, by name."""
    found = []
    for each in (layer, plain):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        (y * tokens(len(x), 5)).sum().backward()
        found.append({"y": y.detach(), "x": leaf.grad})
    found[0] |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    found[1] |= plain.gradients()
    assert found[0].keys() == found[1].keys()
    return {name: relative_error(found[1][name], wanted) for name, wanted in found[0].items()}


def all_spellings_job(rank: int, world: int) -> dict[str, dict[str, float]]:
    found = {}
    for spelling in SPELLINGS:
        layer = build(num_experts=2 * world, top_k=1, pipeline=1)
        found[spelling] = errors_of(layer, PlainOverRanks(layer, spelling), tokens(11 - 4 * rank, 8 + rank))
    return found


def test_all_spellings_over_ranks_give_the_layer_s_output_and_gradients() -> None:
    for found in ranks(2).run(all_spellings_job):
        for spelling, errors in found.items():
            assert max(errors.values()) < 1e-12, (spelling, errors)


def test_all_spellings_on_one_rank_give_the_layer_s_output_and_gradients() -> None:
    for top_k in (1, 2):
        for bias in (True, False):
            for spelling in SPELLINGS:
                layer = build(num_experts=4, top_k=top_k, bias=bias)
                with torch.no_grad():
                    layer.gate.weight[3] = -100 * layer.gate.weight[:3].sum(
                        0
                    )  # it gets nothing, or nearly all
                errors = errors_of(layer, PlainMoE(layer, spelling), tokens(13))
                assert max(errors.values()) < 1e-12, (top_k, bias, spelling, errors)


def test_the_fastest_plain_layer_is_the_baseline() -> None:
    times = dict(
        zip(map(name_of, SPELLINGS), map(Timing, [(3.0, 9.0, 4.0), (3.5,) * 3, (5.0,) * 3]), strict=True)
    )
    assert fastest({"pmoe n=1": Timing((1.0,) * 3), **times}) == name_of(SPELLINGS[1])


def test_the_benchmark_of_one_rank_prints_every_spelling_over_the_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tokens", "64", "--d-model", "16", "--d-hidden", "32", "--rounds", "2"]
    out = ["--threads", str(torch.get_num_threads()), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_plain.py", *sizes, *out])
    bench_plain.main()
    [path] = tmp_path.iterdir()
    found = json.loads(path.read_text("utf-8"))
    ratios = {row["layer"]: row["/ plain"] for row in found["rows"]}
    chunked = {"pmoe n=1", "pmoe n=2", "pmoe n=4", "pmoe n=8"}
    assert ratios.keys() == {*map(name_of, SPELLINGS), *chunked, bench_plain.PRODUCTS}
    of_products = {row["layer"]: row["/ products"] for row in found["rows"]}
    assert of_products[bench_plain.PRODUCTS] == 1 < of_products["pmoe n=1"]
    medians = {name: found["times"][name]["median_s"] for name in map(name_of, SPELLINGS)}
    assert found["baseline"] == min(medians, key=medians.__getitem__)
    assert ratios[found["baseline"]] == 1
    printed = capsys.readouterr().out
    assert all(name in printed for name in ratios)
