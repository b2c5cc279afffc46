"""pmoe.stats in one process: its numbers against counts by hand, and its result if there is nothing to
count.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe import warn
from pmoe.engine.lanes import run as lanes_run
from pmoe.engine.lanes.recorder import Span
from pmoe.integrations.model_layers import finders
from pmoe.integrations.statistics import imbalance
from pmoe.planner.timeline import overlap
from pmoe.schedule.separate_buffers import forward_schedule
from pmoe.schedule.tasks import Kind, Lane, Stages


class Fixed(nn.Module):
    """A gate that sends each token to a given expert.

    expert: the expert of each token.
    """

    def __init__(self, expert: list[int]) -> None:
        super().__init__()
        self.expert = torch.tensor(expert).unsqueeze(1)

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        weight_TK = torch.ones(self.expert.shape)
        return pmoe.Routing(expert=self.expert, weight=weight_TK, l_aux=torch.zeros(()))


UNEVEN = [0, 0, 0, 0, 1, 1, 2, 2]
"""The expert of each of 8 tokens: the 4 experts get 4, 2, 2 and 0 rows."""


def layer(**options: Any) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(16, 32, 4, **options)


def only(model: nn.Module, **options: Any) -> Any:
    (found,) = pmoe.stats(model, **options).layers
    return found


def test_rows_drops_and_imbalance_are_those_counted_by_hand() -> None:
    kept, capped = layer(gate=Fixed(UNEVEN)), layer(gate=Fixed(UNEVEN), capacity_factor=1.0)
    x = torch.randn(8, 16)
    kept(x), capped(x)
    found = pmoe.stats(nn.ModuleDict({"kept": kept, "capped": capped}))
    assert [each.name for each in found.layers] == ["kept", "capped"]
    kept_stats, capped_stats = found.layers
    assert kept_stats.tokens_per_expert == (4, 2, 2, 0)
    assert (kept_stats.num_slots, kept_stats.drop_rate, kept_stats.imbalance) == (8, 0.0, 2.0)
    assert capped_stats.tokens_per_expert == (2, 2, 2, 0)  # 2 rows an expert: 8 tokens / 4 experts
    assert (capped_stats.num_slots, capped_stats.drop_rate) == (8, 0.25)
    assert capped_stats.imbalance == pytest.approx(2 / 1.5)
    assert found.num_ranks == 1


def test_a_gate_that_names_only_what_it_keeps_has_no_drop_rate() -> None:
    model = layer(top_k=2, gate="expert_choice")
    model(torch.randn(8, 16))
    found = only(model)
    assert found.num_slots is None and found.drop_rate is None
    assert found.tokens_per_expert == (4, 4, 4, 4)


def test_no_tokens_are_no_drops_and_no_imbalance() -> None:
    model = layer(top_k=2)
    model(torch.randn(0, 16))
    found = only(model)
    assert (found.drop_rate, found.imbalance, found.num_slots) == (0.0, None, 0)
    assert imbalance([0, 0]) is None and imbalance([3, 1, 0, 0]) == 3


def test_what_really_ran_is_told_and_not_what_was_asked_for() -> None:
    model = layer(top_k=2, pipeline=4, pipeline_backward=2, memory_reuse="S4", fused=True)
    warn.GIVEN.clear()  # it comes once a process
    with pytest.warns(UserWarning, match="falls back"):
        model(torch.randn(64, 16)).sum().backward()
    found = only(model)
    assert (found.path, found.n_forward, found.n_backward) == ("pipeline", 4, 2)
    assert found.restore == "communicate/recompute"
    with torch.no_grad():
        model(torch.randn(64, 16))
    found = only(model)
    assert (found.n_forward, found.n_backward, found.restore) == (4, None, None)
    assert found.predicted is None and "without a backward pass" in found.unpredicted


@pytest.mark.parametrize("expert, hidden", [("ffn", 32), ("swiglu", 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_as_large_as_rows_and_types_make_them(
    expert: str, hidden: int, dtype: torch.dtype
) -> None:
    model = layer(top_k=2, expert=expert, memory_reuse="S4", dtype=dtype)
    model(torch.randn(10, 16, dtype=dtype)).sum().backward()
    size = dtype.itemsize
    tokens, rows = 10 * 16 * size, 20 * 16 * size
    assert only(model).tensors == {
        "T_I": tokens,
        "T_DI": rows,
        "T_M": 20 * hidden * size,
        "T_DO": rows,
        "T_O": tokens,
    }


def test_predicted_bytes_are_the_layer_s_own_prediction() -> None:
    model = layer(top_k=2, pipeline=2, memory_reuse="S1")
    model(torch.randn(64, 16)).sum().backward()
    assert only(model).predicted == model.predict_memory(64, model.row_counts)


@pytest.mark.parametrize(
    "options, why",
    [
        ({}, ""),
        ({"memory_reuse": "S4", "gate": "sigmoid"}, ""),
        ({"memory_reuse": "S4", "expert": nn.Identity}, "experts are a user's modules"),
    ],
)
def test_what_a_prediction_does_not_count_is_said(options: dict[str, Any], why: str) -> None:
    model = layer(**options)
    model(torch.randn(8, 16, requires_grad=True)).sum().backward()
    found = only(model)
    assert found.predicted is not None and found.unpredicted.startswith(why)
    assert bool(found.unpredicted) == bool(why)
    assert ("T_M" in found.tensors) == ("expert" not in options)


def test_a_layer_that_has_not_run_says_so() -> None:
    found = only(layer())
    assert (found.path, found.imbalance, found.tensors) == ("not run", None, {})
    assert found.tokens_per_expert == (0, 0, 0, 0)


def test_pools_are_those_of_the_devices_that_layers_ran_on() -> None:
    model = layer(pipeline=2, memory_reuse="S1")
    assert pmoe.stats(model).pools == ()
    model(torch.randn(64, 16)).sum().backward()
    (found,) = pmoe.stats(model).pools
    pool = pmoe.pool("cpu")
    assert (found.device, found.device_peak_bytes) == ("cpu", pool.device.peak_bytes)
    assert found.host_peak_bytes == pool.host.peak_bytes > 0


def test_statistics_print_as_a_table_and_go_to_json() -> None:
    model = nn.Sequential(layer(top_k=2, memory_reuse="S4"), nn.Linear(16, 16), layer(capacity_factor=0.5))
    found = pmoe.stats(model)
    assert "not run" in str(found)
    model(torch.randn(64, 16)).sum().backward()
    found = pmoe.stats(model)
    lines = str(found).splitlines()
    assert lines[1].split()[:4] == ["layer", "path", "n", "pair"]
    assert lines[2].split()[:4] == ["0", "pipeline", "1/1", "communicate/recompute"]
    assert "2" in lines[3][:6] and "%" in lines[3]
    read = json.loads(json.dumps(found.as_dict()))
    assert read["layers"][0]["tokens_per_expert"] == list(found.layers[0].tokens_per_expert)
    assert read["layers"][0]["predicted"]["peak"] == found.layers[0].predicted.peak
    assert str(pmoe.stats(nn.Linear(2, 2))) == "no MoELayer in this model"


def test_layers_that_are_no_submodules_are_found_where_an_integration_names_them() -> None:
    hidden, model = layer(), nn.Linear(2, 2)
    finders.append(lambda asked: {"behind": hidden} if asked is model else {})
    try:
        assert only(model).name == "behind"
        assert pmoe.stats(nn.Linear(2, 2)).layers == ()
    finally:
        finders.pop()


@pytest.mark.parametrize(
    "given, error, told",
    [
        ({"model": 3}, TypeError, r"model \(3\) must be a torch.nn.Module"),
        ({"journal": 3}, TypeError, r"journal \(3\) must be None or what pmoe.recording"),
        ({"group": object()}, ValueError, "group must be None unless all_ranks is True"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        pmoe.stats(**{"model": layer(), **given})


# ---- exposed communication


def span(name: str, lane: Lane, start: float, end: float) -> Span:
    return Span(direction="forward", name=name, kind=Kind.COMPUTE, chunk=0, lane=lane, start=start, end=end)


def test_exposed_is_what_travels_while_nothing_is_computed() -> None:
    spans = [
        span("S0", Lane.COMMUNICATE, 0, 3),
        span("C0", Lane.COMPUTE, 2, 6),
        span("R0", Lane.COMMUNICATE, 5, 8),
    ]
    found = overlap(spans)
    assert (found.seconds, found.communication, found.exposed) == (8, 6, 4)


def test_two_links_at_once_count_once_and_copies_are_no_communication() -> None:
    spans = [
        span("S0", Lane.COMMUNICATE, 0, 4),
        span("AG0", Lane.INTRA_NODE, 1, 5),
        span("C0", Lane.COMPUTE, 2, 3),
        span("DI0", Lane.COPY_OUT, 6, 9),
    ]
    found = overlap(spans)
    assert (found.seconds, found.communication, found.exposed) == (9, 5, 4)


def test_a_pass_without_tasks_takes_no_time() -> None:
    found = overlap([])
    assert (found.seconds, found.communication, found.exposed) == (0, 0, 0)


class Sent:
    """A message that arrives after a given number of seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self.end - time.monotonic()))


@pytest.mark.parametrize("computes, exposed, hidden", [(0.0, 0.12, 0.0), (0.12, 0.06, 0.03)])
def test_the_engine_s_waiting_is_seen_in_what_it_records(
    computes: float, exposed: float, hidden: float
) -> None:
    """Two messages of 0.1 s are sent one after the other. If nothing computes, both are waited for.

    0.12 s of computation of other rows hides most of the first one. The bounds allow for a busy machine.
    """
    schedule = forward_schedule(1, Stages(local=True, remote=True))
    actions: dict[Kind, Any] = dict.fromkeys(Kind, lambda chunk: None)
    actions |= dict.fromkeys((Kind.DISPATCH, Kind.COMBINE), lambda chunk: Sent(0.1))
    actions[Kind.LOCAL] = lambda chunk: time.sleep(computes)
    owner = object()
    with pmoe.recording() as journal:
        lanes_run.run_schedule(schedule, actions, torch.empty(0), pmoe.MoELayer(2, 2, 2).ranks, of=owner)
    assert journal.last(object(), "forward") is None
    spans = journal.last(owner, "forward")
    assert spans is not None and sorted(s.name for s in spans) == sorted(t.name for t in schedule.tasks)
    found = overlap(spans)
    assert found.communication >= 0.2 * 0.99
    assert found.exposed >= exposed
    assert found.communication - found.exposed >= hidden
    assert found.exposed <= found.communication <= found.seconds


def test_blocks_that_record_may_end_in_any_order() -> None:
    model, x = layer(pipeline=2), torch.randn(8, 16)
    first, second = pmoe.recording(), pmoe.recording()
    outer, inner = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    model(x)
    second.__exit__(None, None, None)
    model(x)
    assert (len(outer.passes), len(inner.passes), bool(lanes_run.watchers)) == (0, 1, False)


def test_recorded_passes_are_told_by_layer_and_the_last_counts() -> None:
    model = nn.Sequential(layer(top_k=2, pipeline=2), layer(top_k=2))
    x = torch.randn(16, 16)
    with pmoe.recording() as journal:
        model(x)
        model(x).sum().backward()
    assert len(journal.passes) == 6
    last = journal.last(model[0].experts, "forward")
    assert last is journal.passes[2].spans
    found = pmoe.stats(model, journal=journal)
    for each in found.layers:
        assert each.forward.seconds > 0 and each.backward.seconds > 0
        assert each.communication_seconds == each.exposed_seconds == 0  # one rank: nothing travels
    assert pmoe.stats(model).layers[0].forward is None
