"""Copies between device and host at a chosen rate.

Copies of a CPU are copies in memory, so nothing is gained by avoiding them. A limit holds each copy back
until its bytes would have passed, as the modelled link does with messages.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from bench.links.link import INFINITE, check_rate
from pmoe.engine.variants import offload as offloaded
from pmoe.measure import rates
from pmoe.schedule.tasks import Kind

ROWS_IN = {Kind.COPY_ROWS_IN: "", Kind.LOCAL_COPY_ROWS_IN: "_L"}
HIDDEN_IN = {Kind.COPY_HIDDEN_IN: "", Kind.LOCAL_COPY_HIDDEN_IN: "_L"}
OUT = {
    **{Kind.COPY_ROWS_OUT.at(place): ("T_DI", place) for place in ("", "_L")},
    **{Kind.COPY_HIDDEN_OUT.at(place): ("T_M", place) for place in ("", "_L")},
}


class CopyLimit:
    """Limit for copies.

    bytes_per_second: rate of each direction.
    """

    def __init__(self) -> None:
        self.bytes_per_second = INFINITE

    def set_rate(self, bytes_per_second: float) -> None:
        check_rate(bytes_per_second)
        self.bytes_per_second = bytes_per_second

    def held(self, copy: Callable[[], object], num_bytes: Callable[[], int]) -> None:
        """Copies, and returns when that many bytes would have been copied.

        num_bytes: called after the copy.
        """
        end = time.monotonic()
        copy()
        end += num_bytes() / self.bytes_per_second
        if (left := end - time.monotonic()) > 0:
            time.sleep(left)


@functools.cache
def limited_copies() -> CopyLimit:
    """Returns the limit of all copies of pmoe in this process, those of a profile included."""
    limit = CopyLimit()
    out, back, kinds = (
        offloaded.OffloadingForward.actions,
        offloaded.OffloadingBackward.actions,
        rates._kinds,
    )

    def actions_out(forward: Any) -> Any:
        def act(kind: Kind, copy: Callable[[int], None], i: int) -> None:
            name, at = OUT[kind]
            leaving = sum(target.nbytes for target, _ in forward.leaving_device.get((name, (i, at)), ()))
            limit.held(lambda: copy(i), lambda: leaving)

        actions = out(forward)
        return {
            **actions,
            **{kind: functools.partial(act, kind, actions[kind]) for kind in OUT.keys() & actions.keys()},
        }

    def actions_in(backward: Any) -> Any:
        def arrived(kind: Kind, i: int) -> int:
            if kind in ROWS_IN:
                return int(backward.rows[i, ROWS_IN[kind]].nbytes)
            hidden = backward.hidden.get((i, HIDDEN_IN[kind]))
            return 0 if hidden is None else sum(tensor.nbytes for tensor in hidden.tensors)

        def act(kind: Kind, copy: Callable[[int], None], i: int) -> None:
            limit.held(lambda: copy(i), lambda: arrived(kind, i))

        actions = back(backward)
        kinds = (ROWS_IN | HIDDEN_IN).keys() & actions.keys()
        return {**actions, **{kind: functools.partial(act, kind, actions[kind]) for kind in kinds}}

    def measured(*args: Any) -> Any:
        def slow(kind: Any) -> Any:
            def make(units: int) -> Callable[[], None]:
                copy, num_bytes = kind.make(units), int(units * kind.size)
                return lambda: limit.held(copy, lambda: num_bytes)

            return dataclasses.replace(kind, make=make)

        found = kinds(*args)
        return {name: slow(kind) if name.startswith("copy") else kind for name, kind in found.items()}

    offloaded.OffloadingForward.actions = actions_out  # type: ignore[method-assign]
    offloaded.OffloadingBackward.actions = actions_in  # type: ignore[method-assign]
    rates._kinds = measured
    return limit
