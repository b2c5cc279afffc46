"""Launches on one heap never overlap, whichever streams and graphs they are on.

A model takes the place of CUDA's streams, events and graphs. It knows of each launch which earlier launches
have surely ended by then. CUDA's rules for captures are errors of the model: a captured stream and one that
is not captured must not wait for each other.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch

from pmoe.kernels import launch_order
from pmoe.kernels.launch_order import LaunchOrder

CUDA = torch.device("cuda", 0)
Ended = set[int]
"""Numbers of launches that have ended when the next operator of a stream begins."""
Operator = Callable[[dict["Stream", Ended]], None]


@dataclass(eq=False)
class Stream:
    """A stream, and the operators that it adds to a graph while it is captured."""

    cuda_stream: int
    ended: Ended = field(default_factory=set)
    graph: list[Operator] | None = None

    def do(self, operator: Operator) -> None:
        if self.graph is None:
            operator({self: self.ended})
        else:
            self.graph.append(operator)

    def wait_stream(self, other: Stream) -> None:
        assert self.graph is other.graph, "CUDA refuses a wait between a capture and another stream"
        if self.graph is None:
            self.ended |= other.ended
        else:
            self.graph.append(lambda ended: ended[self].update(ended[other]))


class Event:
    """An event that graphs record and wait for (``external``). Not recorded, it is not waited for."""

    recorded = 0

    def __init__(self, *, external: bool) -> None:
        assert external
        self.ended: Ended | None = None
        self.exists = False

    def record(self, stream: Stream) -> None:
        Event.recorded += 1
        self.exists = True
        stream.do(lambda ended: setattr(self, "ended", ended[stream].copy()))

    def wait(self, stream: Stream) -> None:
        if self.exists:
            stream.do(lambda ended: ended[stream].update(self.ended or set()))


class Device:
    """Launches on one heap. ``overlaps`` has those that did not wait for the launch before them."""

    def __init__(self) -> None:
        self.order = LaunchOrder(CUDA)
        self.current = Stream(1)
        self.overlaps: list[int] = []
        self._numbers = count(1)
        self._last = 0

    def launch(self, stream: Stream, *, raises: bool = False) -> None:
        self.current = stream
        with self.order.launch() as address:
            assert address == stream.cuda_stream
            stream.do(lambda ended: self._run(ended[stream]))
            if raises:
                raise ValueError("an error after the launch")

    def _run(self, ended: Ended) -> None:
        number = next(self._numbers)
        if self._last and self._last not in ended:
            self.overlaps.append(number)
        ended.add(number)
        self._last = number

    @contextlib.contextmanager
    def capture(self, *streams: Stream) -> Iterator[list[Operator]]:
        graph: list[Operator] = []
        for stream in streams:
            stream.graph = graph
        yield graph
        for stream in streams:
            stream.graph = None

    def replay(self, graph: list[Operator], on: Stream) -> None:
        within: dict[Stream, Ended] = defaultdict(on.ended.copy)
        for operator in graph:
            operator(within)
        on.ended.update(*within.values())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    @contextlib.contextmanager
    def made_current(stream: Stream) -> Iterator[None]:
        before = device.current
        device.current = stream
        yield
        device.current = before

    for name, value in {
        "current_stream": lambda _: device.current,
        "stream": made_current,
        "is_current_stream_capturing": lambda: device.current.graph is not None,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(launch_order, "_events_of_graphs", [])
    return device


def test_launches_on_other_streams_wait_for_each_other_without_events(device: Device) -> None:
    first, second = Stream(1), Stream(2)
    for stream in (first, second, second, first):
        device.launch(stream)
    assert device.overlaps == []
    assert Event.recorded == 0


def test_a_launch_after_a_replay_waits_for_it_on_every_stream(device: Device) -> None:
    captured, replaying, other = Stream(1), Stream(2), Stream(3)
    device.order.let_graphs_wait()
    with device.capture(captured) as graph:
        device.launch(captured)
        device.launch(captured)
    for stream in (other, replaying, captured):
        device.replay(graph, replaying)
        device.launch(stream)
    assert device.overlaps == []


def test_a_replay_waits_for_launches_before_it_on_every_stream(device: Device) -> None:
    captured, replaying, other = Stream(1), Stream(2), Stream(3)
    device.launch(other)
    device.current = captured
    device.order.let_graphs_wait()  # on another stream than the last launch
    with device.capture(captured) as graph:
        device.launch(captured)
    for stream in (other, captured, replaying):
        device.replay(graph, replaying)
        device.launch(stream)
        device.launch(other)
    device.replay(graph, replaying)
    assert device.overlaps == []


def test_a_capture_does_not_hide_the_launch_before_it(device: Device) -> None:
    """A capture runs nothing, so the launch after it still waits for the launch before it."""
    captured = Stream(2)
    device.order.let_graphs_wait()
    for after in (Stream(3), captured):
        device.launch(Stream(1))
        with device.capture(captured):
            device.launch(captured)
        device.launch(after)
    assert device.overlaps == []


def test_streams_of_one_capture_wait_for_each_other_and_not_for_other_streams(device: Device) -> None:
    outside, first, second = Stream(1), Stream(2), Stream(3)
    device.order.let_graphs_wait()
    device.launch(outside)
    for _ in range(2):
        with device.capture(first, second) as graph:
            for stream in (first, second, first):
                device.launch(stream)
        device.replay(graph, outside)
        with device.capture(second) as graph:  # another graph: the last captured stream is not in it
            device.launch(second)
        device.replay(graph, outside)
    assert device.overlaps == []


def test_a_launch_beside_a_capture_of_the_last_stream_waits_and_does_not_join_the_capture(
    device: Device,
) -> None:
    first, other = Stream(1), Stream(2)
    device.order.let_graphs_wait()
    device.launch(first)
    with device.capture(first):
        device.launch(other)
    assert device.overlaps == []


def test_a_launch_or_replay_after_a_launch_that_raised_waits_for_it(device: Device) -> None:
    """An error may come after the kernel was launched: outside of graphs, and in a capture."""
    first, second, third = Stream(1), Stream(2), Stream(3)
    device.order.let_graphs_wait()
    with device.capture(first) as graph:
        device.launch(first)
    device.launch(first)
    for stream in (second, first):
        with pytest.raises(ValueError, match="after the launch"):
            device.launch(stream, raises=True)
        device.launch(third)
        with pytest.raises(ValueError, match="after the launch"):
            device.launch(stream, raises=True)
        device.replay(graph, third)
    with device.capture(first) as graph, pytest.raises(ValueError, match="after the launch"):
        device.launch(first, raises=True)
    device.replay(graph, third)  # the stream of the last replay: two graphs are not ordered
    device.launch(second)
    assert device.overlaps == []


def test_an_error_of_the_record_does_not_hide_the_first_error(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an error has ended a capture, no event can be recorded in it."""

    def refuse(*_: object) -> None:
        raise RuntimeError("the capture has failed")

    device.order.let_graphs_wait()
    monkeypatch.setattr(Event, "record", refuse)
    with pytest.raises(ValueError, match="after the launch"):
        device.launch(Stream(1), raises=True)
    with pytest.raises(RuntimeError, match="the capture has failed"):
        device.launch(Stream(1))


def test_nothing_waits_on_the_cpu() -> None:
    order = LaunchOrder(torch.device("cpu"))
    order.let_graphs_wait()
    with order.launch() as address:
        assert address == 0


def test_the_model_finds_launches_that_overlap(device: Device) -> None:
    """Without `LaunchOrder.let_graphs_wait` a replay and a launch on another stream overlap."""
    captured, replaying, other = Stream(1), Stream(2), Stream(3)
    with device.capture(captured) as graph:
        device.launch(captured)
    device.replay(graph, replaying)
    device.launch(other)
    device.replay(graph, replaying)
    assert device.overlaps == [2, 3]
