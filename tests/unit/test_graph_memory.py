"""Costs of a compiled graph's calls: bytes, the memory of a trial, and the file that keeps seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from pmoe.graph.cost import Costs, Profiled, instructions_of
from pmoe.graph.graph_trial import GraphTrial
from pmoe.graph.lower import label, name_all
from tests.allocated import Allocated

NUM_BYTES = 2**20


def costs() -> Costs:
    """Returns an object without stored costs."""
    empty = Costs(torch.device("cpu"))
    empty.seconds = {}
    return empty


def rows() -> Tensor:
    return torch.ones(NUM_BYTES // 8, dtype=torch.float64)


def negatives(count: int) -> fx.GraphModule:
    """Returns a graph that returns the negative of its input several times."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(torch.ops.aten.neg.default, (x,)) for _ in range(count)])
    name_all(graph)
    return fx.GraphModule(nn.Module(), graph)


def test_an_input_that_is_named_like_a_call_keeps_its_own_bytes() -> None:
    """Torch names a tensor that forward saved after the call of the forward graph that computed it."""
    graph = fx.Graph()
    saved = graph.placeholder("neg_0")
    small = graph.placeholder("x")
    call = graph.call_function(torch.ops.aten.neg.default, (small,))
    graph.output([call, graph.call_function(torch.ops.aten.view.default, (saved, [-1]))])
    name_all(graph)
    assert label(call) == "neg_0"
    measured = Profiled(fx.GraphModule(nn.Module(), graph), costs(), lambda num_bytes: 0.0)
    measured.run(rows(), torch.ones(1, dtype=torch.float64))
    assert measured.cost_by_label[label(saved)].num_bytes == NUM_BYTES
    assert measured.cost_by_label[label(call)].num_bytes == 8
    assert measured.cost_by_label["view_0"].view_of == label(saved)


def test_a_trial_holds_no_results_and_measures_the_same_calls() -> None:
    module = negatives(8)
    trial, step = (kind(module, costs(), lambda num_bytes: 0.0) for kind in (GraphTrial, Profiled))
    x = rows()
    assert Allocated(lambda mark: trial.run(x)).peak == NUM_BYTES
    assert Allocated(lambda mark: step.run(x)).peak == 8 * NUM_BYTES
    calls = {instruction.name for instruction in instructions_of(module, step.cost_by_label)}
    assert calls <= trial.cost_by_label.keys()
    assert [each.num_bytes for each in instructions_of(module, trial.cost_by_label)] == [NUM_BYTES] * 8


def test_a_result_that_calls_read_is_held_until_the_last_of_them() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.neg.default, (x,))
    total = graph.call_function(torch.ops.aten.add.Tensor, (first, first))
    graph.output([first, total])
    name_all(graph)
    trial = GraphTrial(fx.GraphModule(nn.Module(), graph), costs(), lambda num_bytes: 0.0)
    assert trial.run(rows()) == []
    assert trial.cost_by_label["add_0"].num_bytes == NUM_BYTES


def test_an_operator_that_is_timed_several_times_has_one_result_at_a_time() -> None:
    step = Profiled(negatives(1), costs(), lambda num_bytes: 0.0)
    x = rows()
    assert Allocated(lambda mark: step.run(x)).peak == NUM_BYTES


def test_two_runs_that_share_a_folder_keep_the_costs_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    first, second = (Costs(torch.device("cpu")) for _ in range(2))
    first.seconds["neg"] = 1.0
    second.seconds["add"] = 2.0
    first.save()
    second.save()
    assert Costs(torch.device("cpu")).seconds == {"neg": 1.0, "add": 2.0}
