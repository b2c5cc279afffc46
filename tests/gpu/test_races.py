"""Races, provoked by a sleep on one stream: whatever lane lags, values stay; and where a wait is left out
of the schedule on purpose, they do not, so these tests can fail."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.call.options import Switches
from pmoe.engine.lanes import run as lanes_run
from pmoe.engine.lanes.cuda import CudaLanes
from pmoe.engine.lanes.recorder import recording
from pmoe.engine.variants import offload
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Lane, Schedule, Stages
from tests.gpu.support import (
    AUX,
    DEVICE,
    LAYERS,
    LONG,
    NEEDS_GPU,
    SHORT,
    largest_error,
    make_batch,
    make_layer,
    poison_memory,
    poison_slots,
    slow_copies,
    slow_experts,
    slow_link,
    step,
)
from tests.planted import rings_reused_early

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("nccl")]

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 1e-2}
"""A race leaves NaN or another batch's rows behind; rounding is not what is tested here."""


def chained(layer: pmoe.MoELayer) -> pmoe.MoELayer:
    """The same layer with every task waiting for the one before."""
    twin = copy.deepcopy(layer)
    twin.switches = Switches(bypass_local=layer.switches.bypass_local, sequential=True)
    return twin


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("slow", ["link, before", "link, after", "experts", "both"])
def test_values_hold_when_a_lane_lags(
    monkeypatch: pytest.MonkeyPatch, slow: str, n: int, dtype: torch.dtype
) -> None:
    layer = make_layer(dtype, pipeline=n, bypass_local=False, capacity_factor=1.0)
    batches = [make_batch(dtype=dtype, seed=seed) for seed in range(4)]
    reference = chained(layer)
    expected = [step(reference, *batch) for batch in batches]
    torch.cuda.synchronize()
    if slow in ("link, before", "both"):
        slow_link(monkeypatch, before=SHORT)
    if slow == "link, after":
        slow_link(monkeypatch, after=SHORT)
    if slow in ("experts", "both"):
        slow_experts(monkeypatch, layer, SHORT)
    poison_memory()
    # Between and after the passes their buffers are taken and overwritten.
    got = [step(layer, *batch, between=poison_memory) for batch in batches]
    for g, e in zip(got, expected, strict=True):
        assert largest_error(g, e) < TOLERANCE[dtype]


def test_values_hold_where_local_and_travelling_rows_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers in a row, one whose rows travel and one whose rows stay, forward and backward."""
    model = nn.Sequential(
        make_layer(pipeline=3, bypass_local=False),
        make_layer(seed=8, pipeline=2),
        make_layer(seed=9, pipeline=2, bypass_local=False),
    )
    reference = nn.Sequential(*(chained(layer) for layer in model))
    batches = [make_batch(seed=seed) for seed in range(3)]
    expected = [step(reference, *batch) for batch in batches]
    slow_link(monkeypatch, before=SHORT, after=SHORT)
    got = [step(model, *batch, between=poison_memory) for batch in batches]
    for g, e in zip(got, expected, strict=True):
        assert largest_error(g, e) < 1e-12


def without_waits(monkeypatch: pytest.MonkeyPatch, lane: Lane) -> None:
    """The tasks of ``lane`` no longer wait for those of others."""
    run = lanes_run.run_schedule

    def careless(schedule: Schedule, *args: Any) -> None:
        tasks = tuple(replace(t, waits=()) if t.lane is lane else t for t in schedule.tasks)
        run(replace(schedule, tasks=tasks), *args)

    monkeypatch.setattr(lanes_run, "run_schedule", careless)


def nan_until_received(compute: torch.cuda.Stream, out: Tensor) -> None:
    """The receive buffer holds NaN when the compute lane looks at it too early. The link waits for that."""
    with torch.cuda.stream(compute):
        out.fill_(float("nan"))
    torch.cuda.current_stream().wait_stream(compute)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_experts_that_do_not_wait_for_their_rows_are_found_out(
    monkeypatch: pytest.MonkeyPatch, n: int, planted: bool
) -> None:
    layer, (x, grad) = make_layer(pipeline=n, bypass_local=False), make_batch()
    expected = step(chained(layer), x, grad)
    compute = torch.cuda.current_stream()
    slow_link(monkeypatch, before=LONG, prepare=lambda out: nan_until_received(compute, out))
    if planted:
        without_waits(monkeypatch, Lane.COMPUTE)
    y = step(layer, x, grad)["y"]
    torch.cuda.synchronize()
    if planted:
        assert y.isnan().any()
    else:
        assert largest_error({"y": y}, {"y": expected["y"]}) < 1e-12


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_link_that_does_not_wait_for_the_experts_is_found_out(
    monkeypatch: pytest.MonkeyPatch, n: int, planted: bool
) -> None:
    layer, (x, grad) = make_layer(pipeline=n, bypass_local=False), make_batch()
    expected = step(chained(layer), x, grad)
    slow_experts(monkeypatch, layer, LONG, poison=True)
    if planted:
        without_waits(monkeypatch, Lane.COMMUNICATE)
    poison_memory()  # the message may be there before the experts' poison, and find what `expected` left
    got = step(layer, x, grad)
    torch.cuda.synchronize()
    if planted:
        assert got["y"].isnan().any()
    else:
        assert largest_error(got, expected) < 1e-12


@pytest.mark.parametrize("planted", [False, True])
def test_a_pass_that_does_not_wait_for_the_last_message_is_found_out(
    monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """The gradients of the routing weights come last, and no task reads them."""
    layer, (x, grad) = make_layer(pipeline=2, bypass_local=False), make_batch()
    expected = step(chained(layer), x, grad)
    compute = torch.cuda.current_stream()

    def delay_scalars(out: Tensor) -> None:
        if out.dim() == 1:
            nan_until_received(compute, out)
            torch.cuda._sleep(LONG)

    slow_link(monkeypatch, prepare=delay_scalars)
    if planted:
        monkeypatch.setattr(CudaLanes, "finish", lambda self: None)
    got = step(layer, x, grad)
    torch.cuda.synchronize()
    if planted:
        assert got["gate.weight"].isnan().any()
    else:
        assert largest_error(got, expected) < 1e-12


@pytest.mark.parametrize("bypass_local", [True, False])
def test_the_layer_follows_the_stream_of_its_caller(
    monkeypatch: pytest.MonkeyPatch, bypass_local: bool
) -> None:
    """On another stream than the default, where the input is written late."""
    layer, (x, grad) = make_layer(pipeline=3, bypass_local=bypass_local), make_batch()
    expected = step(chained(layer), x, grad)
    slow_link(monkeypatch, before=SHORT)
    late = torch.full_like(x, float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        late.copy_(x)
        got = step(layer, late, grad, between=poison_memory)
    stream.synchronize()
    assert largest_error(got, expected) < 1e-12


def test_two_streams_share_the_communication_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [make_layer(seed=seed, pipeline=3, bypass_local=False) for seed in (7, 8)]
    batches = [make_batch(seed=seed) for seed in (3, 4)]
    expected = [step(chained(layer), *batch) for layer, batch in zip(layers, batches, strict=True)]
    slow_link(monkeypatch, before=SHORT)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers]
    leaves = [x.clone().requires_grad_() for x, _ in batches]
    torch.cuda.synchronize()
    outputs: list[Tensor] = []
    for layer, stream, leaf in zip(layers, streams, leaves, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SHORT)
            outputs.append(layer(leaf))
    for layer, stream, y, (_, grad) in zip(layers, streams, outputs, batches, strict=True):
        with torch.cuda.stream(stream):
            ((y * grad).sum() + AUX * layer.l_aux).backward()
    torch.cuda.synchronize()
    for layer, leaf, y, right in zip(layers, leaves, outputs, expected, strict=True):
        got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        assert largest_error(got, right) < 1e-12


def test_an_error_in_an_expert_leaves_the_lanes_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of the pass that failed are taken again while its messages may still be under way."""
    layer, (x, grad) = make_layer(pipeline=3, bypass_local=False), make_batch()
    expected = step(chained(layer), x, grad)
    compute = layer.experts.compute

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as slowly:
        slow_link(slowly, before=LONG)
        layer.experts.compute = fail
        with pytest.raises(RuntimeError, match="out of luck"):
            layer(x)
    layer.experts.compute = compute
    gc.collect()  # the traceback held the buffers: 64 rows a chunk
    held = [torch.zeros(64, 64, dtype=x.dtype, device=DEVICE) for _ in range(64)]
    got = step(layer, x, grad)
    torch.cuda.synchronize()
    assert not any(tensor.any() for tensor in held), "a message arrived in memory that was given away"
    assert largest_error(got, expected) < 1e-12


# ---- rings and copies --------------------------------------------------------------------------------


@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("name", ["S1", "S4", "S1, other chunks in backward", "S1, user's experts"])
@pytest.mark.parametrize("slow", ["copies out", "copies in", "link", "experts", "all"])
def test_values_hold_when_a_lane_of_rings_lags(
    monkeypatch: pytest.MonkeyPatch, slow: str, name: str, bypass_local: bool
) -> None:
    options = LAYERS[name]()
    layer = make_layer(bypass_local=bypass_local, **options)
    # Everything kept, in one chunk.
    plain = make_layer(bypass_local=bypass_local, **{k: v for k, v in options.items() if k == "expert"})
    batches = [make_batch(seed=seed) for seed in range(4)]
    expected = [step(plain, *batch) for batch in batches]
    torch.cuda.synchronize()
    if slow in ("copies out", "all"):
        slow_copies(monkeypatch, SHORT, Lane.COPY_OUT)
    if slow in ("copies in", "all"):
        slow_copies(monkeypatch, SHORT, Lane.COPY_IN)
    if slow in ("link", "all"):
        slow_link(monkeypatch, before=SHORT, after=SHORT)
    if slow in ("experts", "all"):
        slow_experts(monkeypatch, layer, SHORT)
    poison_slots(monkeypatch)
    poison_memory()
    got = [step(layer, *batch, between=poison_memory) for batch in batches]
    for g, e in zip(got, expected, strict=True):
        assert largest_error(g, e) < 1e-12


def check_planted(layer: pmoe.MoELayer, planted: bool, **options: Any) -> None:
    """The gradients are right exactly where no mistake was planted. NaN is not right."""
    (x, grad), plain = make_batch(), make_layer(**options)
    expected = step(plain, x, grad)
    got = step(layer, x, grad, between=poison_memory)
    torch.cuda.synchronize()
    assert (largest_error(got, expected) < 1e-12) == (not planted)


@pytest.mark.parametrize("planted", [False, True])
def test_copies_out_that_do_not_wait_for_the_experts_are_found_out(
    monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    layer = make_layer(**LAYERS["S1"]())
    slow_experts(monkeypatch, layer, LONG)
    poison_slots(monkeypatch)
    if planted:
        without_waits(monkeypatch, Lane.COPY_OUT)
    check_planted(layer, planted)


@pytest.mark.parametrize("planted", [False, True])
def test_experts_that_do_not_wait_for_copies_in_are_found_out(
    monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Rows stay, so copies in are all that the compute lane waits for."""
    layer = make_layer(**LAYERS["S1"]())
    slow_copies(monkeypatch, LONG, Lane.COPY_IN)
    poison_slots(monkeypatch)
    if planted:
        without_waits(monkeypatch, Lane.COMPUTE)
    check_planted(layer, planted)


@pytest.mark.parametrize("planted", [False, True])
def test_slots_that_are_written_again_before_they_are_copied_are_found_out(
    monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    layer = make_layer(**LAYERS["S1"]())
    slow_copies(monkeypatch, LONG, Lane.COPY_OUT)
    with rings_reused_early() if planted else nullcontext():
        check_planted(layer, planted)


@pytest.mark.parametrize("planted", [False, True])
def test_a_pass_that_does_not_wait_for_its_last_copy_is_found_out(
    monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Nothing of forward reads what was copied out; backward would read it before it is there."""
    layer = make_layer(**LAYERS["S1"]())
    for _ in range(2):
        step(layer, *make_batch(seed=9))  # another batch's rows are on the host
    slow_copies(monkeypatch, LONG, Lane.COPY_OUT)
    if planted:
        monkeypatch.setattr(CudaLanes, "finish", lambda self: None)
    check_planted(layer, planted)


@pytest.mark.parametrize("planted", [False, True])
def test_what_modules_save_is_held_until_it_is_copied(monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    """When a copy out is issued nobody holds the module's tensors, and all free memory turns to NaN."""
    options = LAYERS["S1, user's experts"]()
    layer = make_layer(**options)
    slow_copies(monkeypatch, LONG, Lane.COPY_OUT, behind=poison_memory)
    if planted:
        monkeypatch.setattr(offload, "hold_for", lambda stream, tensor: None)
    check_planted(layer, planted, expert=options["expert"])


@pytest.mark.parametrize("planted", [False, True])
def test_host_memory_is_not_handed_out_while_another_stream_reads_it(
    monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """The second layer's forward gets the blocks that the first one's backward still copies in."""
    first, second = (make_layer(seed=seed, **LAYERS["S1"]()) for seed in (7, 8))
    (x, grad), (other, _) = make_batch(seed=3), make_batch(seed=4)
    expected = step(make_layer(seed=7), x, grad)
    for layer in (first, second):
        step(layer, x, grad)
    slow_copies(monkeypatch, LONG, Lane.COPY_IN)
    if planted:
        monkeypatch.setattr(CudaLanes, "_await_readers_of_the_host", lambda self, device: None)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    leaf, other_leaf = x.clone(), other.clone().requires_grad_()
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        got = step(first, leaf, grad)
    with torch.cuda.stream(streams[1]):
        held = second(other_leaf)
    torch.cuda.synchronize()
    assert held.isfinite().all()
    assert (largest_error(got, expected) < 1e-12) == (not planted)


RESOLUTION = 5e-6
"""Seconds by which events may tell spans apart."""


def seconds_together(layer: pmoe.MoELayer, x: Tensor) -> float:
    """In which rows travel while experts compute, in a forward pass."""
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        with recording() as journal:
            layer(x)
    compute, travel = (
        [span for span in journal.spans if span.lane is lane] for lane in (Lane.COMPUTE, Lane.COMMUNICATE)
    )
    shared = [min(c.end, t.end) - max(c.start, t.start) for c in compute for t in travel]
    return sum(each for each in shared if each > RESOLUTION)


def test_the_lanes_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same tasks: those that wait for each other alone, and those that all wait for the one before."""
    layer, (x, _) = make_layer(pipeline=4, bypass_local=False), make_batch()
    reference = chained(layer)
    slow_link(monkeypatch, before=4 * SHORT)
    slow_experts(monkeypatch, layer, 8 * SHORT)
    slow_experts(monkeypatch, reference, 8 * SHORT)
    assert seconds_together(layer, x) > 0 == seconds_together(reference, x)


@pytest.mark.parametrize("bypass_local", [True, False])
def test_the_recorded_spans_obey_the_schedule(monkeypatch: pytest.MonkeyPatch, bypass_local: bool) -> None:
    layer, (x, grad) = make_layer(pipeline=3, bypass_local=bypass_local), make_batch()
    step(layer, x, grad)
    slow_link(monkeypatch, before=SHORT)
    slow_experts(monkeypatch, layer, SHORT)
    with recording() as journal:
        step(layer, x, grad)
    for build in (forward_schedule, backward_schedule):
        schedule = build(3, Stages(local=bypass_local, remote=not bypass_local))
        spans = {s.name: s for s in journal.spans if s.direction == schedule.direction}
        assert list(spans) == [task.name for task in schedule.tasks]
        last: dict[Lane, float] = {}
        for task in schedule.tasks:
            span = spans[task.name]
            assert span.lane is task.lane and span.start <= span.end
            for other in task.waits:
                assert span.start >= spans[other].end - RESOLUTION, f"{task.name} ran before {other} ended"
            assert span.start >= last.get(task.lane, -1.0) - RESOLUTION, f"{task.name} overtook its lane"
            last[task.lane] = span.end
