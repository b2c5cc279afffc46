"""Copies between device and host at a limited rate.

On a CPU both are memory, so that copies cost little. The limit delays the end of each copy until its bytes
would have been copied at the chosen rate, as the modelled link does with messages.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from bench.links.link import INFINITE, check_rate
from pmoe.engine.variants import offload
from pmoe.measure import rates
from pmoe.schedule.tasks import Kind

ROWS_IN = {Kind.COPY_ROWS_IN: "", Kind.LOCAL_COPY_ROWS_IN: "_L"}
HIDDEN_IN = {Kind.COPY_HIDDEN_IN: "", Kind.LOCAL_COPY_HIDDEN_IN: "_L"}
OUT = {
    **{Kind.COPY_ROWS_OUT.at(place): ("T_DI", place) for place in ("", "_L")},
    **{Kind.COPY_HIDDEN_OUT.at(place): ("T_M", place) for place in ("", "_L")},
}


class CopyLimit:
    """A limit of the rate of copies.

    bytes_per_second: rate of copies to the host, and of copies from the host.
    """

    def __init__(self) -> None:
        self.bytes_per_second = INFINITE

    def set_rate(self, bytes_per_second: float) -> None:
        check_rate(bytes_per_second)
        self.bytes_per_second = bytes_per_second

    def limited(self, copy: Callable[[], object], num_bytes: Callable[[], int]) -> None:
        """Runs a copy, and returns when its bytes would have been copied at the limited rate.

        num_bytes: returns the bytes of the copy; called after it.
        """
        end = time.monotonic()
        copy()
        end += num_bytes() / self.bytes_per_second
        if (remaining := end - time.monotonic()) > 0:
            time.sleep(remaining)


@functools.cache
def limited_copies() -> CopyLimit:
    """Limits all copies of pmoe in this process, also those that measure a profile. Returns the limit."""
    limit = CopyLimit()
    out, back, kinds = (
        offload.OffloadingForward.actions,
        offload.OffloadingBackward.actions,
        rates._kinds,
    )

    def actions_out(forward: Any) -> Any:
        def act(kind: Kind, copy: Callable[[int], None], i: int) -> None:
            name, at = OUT[kind]
            leaving = sum(target.nbytes for target, _ in forward.leaving_device.get((name, (i, at)), ()))
            limit.limited(lambda: copy(i), lambda: leaving)

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
            limit.limited(lambda: copy(i), lambda: arrived(kind, i))

        actions = back(backward)
        kinds = (ROWS_IN | HIDDEN_IN).keys() & actions.keys()
        return {**actions, **{kind: functools.partial(act, kind, actions[kind]) for kind in kinds}}

    def measured(*args: Any) -> Any:
        def slow(kind: Any) -> Any:
            def make(units: int) -> Callable[[], None]:
                copy, num_bytes = kind.make(units), int(units * kind.size)
                return lambda: limit.limited(copy, lambda: num_bytes)

            return dataclasses.replace(kind, make=make)

        by_name = kinds(*args)
        return {name: slow(kind) if name.startswith("copy") else kind for name, kind in by_name.items()}

    offload.OffloadingForward.actions = actions_out  # type: ignore[method-assign]
    offload.OffloadingBackward.actions = actions_in  # type: ignore[method-assign]
    rates._kinds = measured
    return limit
