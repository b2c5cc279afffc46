"""The order of kernel launches that use the same symmetric heap: on several streams, and in CUDA graphs.

Such launches must not overlap. Layers of the same sizes share a heap, so the user of a layer cannot know
which launches these are. Therefore each launch waits for the launches before it:

    a launch          waits for                                         by
    outside graphs    the last launch outside graphs                    its stream, or an event behind it
    outside graphs    the last replay of a graph that uses the heap     an event that the graph records
    in a capture      the last launch of the same capture               its stream
    in a replay       the last launch outside graphs                    an event for which the graph waits

The host does not see a replay, because a graph launches its kernels without pmoe's code. So the graph itself
records an event and waits for one.

Replays of two graphs are not ordered. If the graphs use the same heap, they must be replayed on one stream,
or on streams of which the later one waits for the earlier one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_events_of_graphs: list[torch.cuda.Event] = []
"""All events that graphs record or wait for. Kept until the process ends, because a graph may outlive the
heap, and its nodes refer to the events without owning them."""


def records_graph(device: torch.device) -> bool:
    """Returns whether a CUDA graph is being captured on the current stream of a device."""
    return device.type == "cuda" and _is_captured(torch.cuda.current_stream(device))


class LaunchOrder:
    """Lets each launch that uses one heap wait for the launches before it.

    Graphs may hold launches only after `let_graphs_wait`. Until then no event is recorded. On the CPU, where
    an emulator runs kernels one after another, nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._captured_stream: torch.cuda.Stream | None = None
        self._launched: torch.cuda.Event | None = None
        self._replayed: torch.cuda.Event | None = None

    def let_graphs_wait(self) -> None:
        """Makes the events by which launches in graphs and launches outside graphs wait for each other.

        Must be called outside of a capture: a capture leaves out a wait for an event that was never recorded.
        """
        if self._device.type != "cuda":
            return
        self._launched = torch.cuda.Event(external=True)
        self._launched.record(self._stream or torch.cuda.current_stream(self._device))
        self._replayed = torch.cuda.Event(external=True)
        _events_of_graphs.extend((self._launched, self._replayed))

    @contextlib.contextmanager
    def launch(self) -> Iterator[int]:
        """Returns a with-block for one launch on the current stream.

        The value of the with-block is the address of the stream; 0 on the CPU.
        """
        if self._device.type != "cuda":
            yield 0
            return
        stream = torch.cuda.current_stream(self._device)
        if _is_captured(stream):
            self._wait_in_capture(stream)
            recorded = self._replayed
        else:
            self._wait(stream)
            recorded = self._launched
        try:
            yield int(stream.cuda_stream)
        except BaseException:
            # The launch may have begun before the error, so later launches wait for it, too. An error of
            # this record would hide the first error.
            if recorded is not None:
                with contextlib.suppress(RuntimeError):
                    recorded.record(stream)
            raise
        if recorded is not None:
            recorded.record(stream)

    def _wait(self, stream: torch.cuda.Stream) -> None:
        """Makes a stream wait for the last launch outside graphs, and for the last replay.

        If there is an event behind the last launch, ``stream`` waits for the event. Without events, it waits
        for the stream of the last launch. It does not wait for that stream if a graph is being captured on it
        now, because the wait would make ``stream`` a part of the capture.

        stream: a stream that is not captured.
        """
        other = self._stream
        if other is not None and other != stream:
            if self._launched is not None:
                self._launched.wait(stream)
            elif not _is_captured(other):
                stream.wait_stream(other)
        if self._replayed is not None:
            self._replayed.wait(stream)
        self._stream = stream
        self._captured_stream = None

    def _wait_in_capture(self, stream: torch.cuda.Stream) -> None:
        """Makes replays wait for the last launch outside graphs, and for earlier launches of the capture.

        ``_stream``, the stream of the last launch outside graphs, does not change: a stream that is captured
        runs nothing, so the next launch outside graphs must wait for the last launch before the capture.

        stream: the stream that is captured.
        """
        if self._launched is not None:
            self._launched.wait(stream)
        other = self._captured_stream
        if other is not None and other != stream and _is_captured(other):
            stream.wait_stream(other)
        self._captured_stream = stream


def _is_captured(stream: torch.cuda.Stream) -> bool:
    """Returns whether a CUDA graph is being captured on a stream."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
