"""The modelled link: a c10d backend that ends all-to-alls only when a slow link would have carried them."""

import datetime
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from bench.links.link import INFINITE, check_rate


class ModelledLink:
    """A serial full-duplex link of one rank. Messages queue in the order in which they are issued.

    All groups of a process share the link, as they share a network card. A collective occupies it for

        seconds = latency * messages + max(bytes out, bytes in) / rate

    ``messages`` is the number of peers to which rows go, or from which rows come, whichever is larger. The
    maximum is right because a rank that sends little and receives much must wait in reality too.

    The model does not know when a peer issues its part of a collective. So a late peer delays this rank only
    until the peer has come, and not by the transfer that would follow. That favours a sequential layer more
    than a pipelined one.
    """

    def __init__(
        self,
        bytes_per_second: float = INFINITE,
        latency_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._free_at = 0.0
        self._bytes_sent = 0
        self.set_rate(bytes_per_second, latency_seconds)

    def set_rate(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        check_rate(bytes_per_second)
        if not 0 <= latency_seconds < INFINITE:
            raise ValueError(f"latency_seconds ({latency_seconds}) must be finite and not negative")
        with self._lock:
            self._bytes_per_second, self._latency_seconds = bytes_per_second, latency_seconds

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    def reset_bytes_sent(self) -> None:
        with self._lock:
            self._bytes_sent = 0

    def carry(self, sent_bytes: int, received_bytes: int, messages: int = 1) -> float:
        """Queues a collective that is issued now. Returns the time at which the link will have carried it."""
        with self._lock:
            self._bytes_sent += sent_bytes
            self._free_at = max(self._free_at, self._clock())
            slower_bytes = max(sent_bytes, received_bytes)
            if slower_bytes:  # a collective in which all bytes stay on their rank costs nothing
                self._free_at += messages * self._latency_seconds + slower_bytes / self._bytes_per_second
            return self._free_at


class ModelledLinks:
    """The two links of one rank: between nodes, and inside its node."""

    def __init__(self, ranks_per_node: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks_per_node = ranks_per_node
        self.holds_all_reduces = False
        """Whether all-reduces take time on the links, too: each rank sends 2 (W - 1) / W of the bytes, as in
        a ring.
        """
        self.inter, self.intra = ModelledLink(clock=clock), ModelledLink(clock=clock)

    def set_rate(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        self.inter.set_rate(bytes_per_second, latency_seconds)

    def set_rates(
        self,
        *,
        inter: float,
        intra: float,
        inter_latency_seconds: float = 0.0,
        intra_latency_seconds: float = 0.0,
    ) -> None:
        self.inter.set_rate(inter, inter_latency_seconds)
        self.intra.set_rate(intra, intra_latency_seconds)

    @property
    def bytes_sent(self) -> int:
        return self.inter.bytes_sent

    @property
    def bytes_sent_inside(self) -> int:
        return self.intra.bytes_sent

    def reset_bytes_sent(self) -> None:
        self.inter.reset_bytes_sent()
        self.intra.reset_bytes_sent()

    def carry(
        self, ranks: Sequence[int], own: int, sent_bytes: Sequence[int], received_bytes: Sequence[int]
    ) -> float:
        """Queues a collective of a group. Returns the time at which both links will have carried it.

        ranks: the group's ranks; ranks[own] is this one.
        own: index of this rank in ``ranks``.
        sent_bytes, received_bytes: bytes to and from each of these ranks.

        A link that carries none of these bytes is not occupied, and is not waited for.
        """
        nodes = [rank // self.ranks_per_node for rank in ranks]
        inside = [i for i, node in enumerate(nodes) if node == nodes[own] and i != own]
        outside = [i for i, node in enumerate(nodes) if node != nodes[own]]

        def carried(link: ModelledLink, members: list[int]) -> float:
            sent, received = ([sizes[i] for i in members] for sizes in (sent_bytes, received_bytes))
            messages = max(sum(size > 0 for size in sizes) for sizes in (sent, received))
            return link.carry(sum(sent), sum(received), messages)

        ready_at = carried(self.inter, outside) if outside else 0.0
        return max(ready_at, carried(self.intra, inside)) if inside else ready_at


class _LinkWork(Work):
    """A Work of gloo that counts as complete only when the link has carried its bytes.

    The object never changes, so any thread may wait for it.
    """

    def __init__(self, inner: Work, ready_at: float, output: torch.Tensor) -> None:
        super().__init__()
        self._inner, self._ready_at, self._output = inner, ready_at, output

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        # timedelta(0) means "no timeout of its own" in c10d. Seconds of the link do not count for a timeout.
        self._inner.wait(timeout) if timeout else self._inner.wait()
        remaining_seconds = self._ready_at - time.monotonic()
        if remaining_seconds > 0:  # even sleep(0) would give the core to another process
            time.sleep(remaining_seconds)
        return True

    def is_completed(self) -> bool:
        return self._inner.is_completed() and time.monotonic() >= self._ready_at

    def result(self) -> list[torch.Tensor]:
        return [self._output]

    def get_future(self) -> Future:
        future: Future = Future()
        threading.Thread(target=self._fulfil, args=(future,), daemon=True).start()
        return future

    def _fulfil(self, future: Future) -> None:
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(self.result())


class _ModelledGroup(dist.ProcessGroup):
    """A gloo process group in which the links of this process delay the end of all-to-alls.

    Only the constructor with (rank, size) can be subclassed. An inner backend must be registered, because
    functional collectives otherwise fail with "ProcessGroup name not set".
    """

    def __init__(self, links: ModelledLinks, options: Any, backend_options: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._links = links
        # The default group has no list of ranks.
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self._gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        return "modelled"

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *options: Any,
    ) -> Work:
        work = self._gloo.alltoall_base(output, input, output_splits, input_splits, *options)
        sent_bytes = _bytes_by_rank(input, input_splits, self.size())
        received_bytes = _bytes_by_rank(output, output_splits, self.size())
        return _LinkWork(
            work, self._links.carry(self._ranks, self.rank(), sent_bytes, received_bytes), output
        )

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> Work:
        work = self._gloo.allreduce(tensors, *options)
        if not self._links.holds_all_reduces:
            return work
        bytes_by_rank = [2 * sum(tensor.nbytes for tensor in tensors) // self.size()] * self.size()
        return _LinkWork(
            work, self._links.carry(self._ranks, self.rank(), bytes_by_rank, bytes_by_rank), tensors[0]
        )

    # torch 2.13 asks for this name first; through the other one the caller would get c10d's holder of a
    # Python work, and that never says is_completed().
    all_to_all_single = alltoall_base


def _forwarded_to_gloo(name: str) -> Callable[..., Work]:
    def method(self: _ModelledGroup, *args: Any, **kwargs: Any) -> Work:
        return getattr(self._gloo, name)(*args, **kwargs)

    return method


# What a Python group leaves undefined, c10d's trampoline (PyProcessGroup.hpp) runs with the interpreter lock
# held. Issuing a gloo work then waits for gloo's queue, while the gloo thread that holds the queue may wait
# for the interpreter lock to free the tensors of the last work: a deadlock, seen in torch 2.13 within a
# thousand all_reduces. These are the collectives that the trampoline covers and gloo has.
for _name in (
    "allgather",
    "allreduce_coalesced",
    "barrier",
    "broadcast",
    "recv",
    "reduce_scatter",
    "send",
):
    setattr(_ModelledGroup, _name, _forwarded_to_gloo(_name))


@functools.cache
def register_modelled() -> ModelledLinks:
    """Makes "modelled" a backend of init_process_group and new_group. Returns this process's links.

    They have no limit until their rates are set, and one rank a node until `ranks_per_node` is set. Further
    calls return the same links.
    """
    links = ModelledLinks()
    dist.Backend.register_backend(
        "modelled", functools.partial(_ModelledGroup, links), extended_api=True, devices=["cpu"]
    )
    return links


def _bytes_by_rank(tensor: torch.Tensor, splits: Sequence[int], world: int) -> list[int]:
    """Returns the bytes of the rows for each rank of a group. Without splits, the parts are equal."""
    total_bytes = tensor.numel() * tensor.element_size()
    if not splits:
        return [total_bytes // world] * world
    rows = sum(splits)
    return [total_bytes // rows * split if rows else 0 for split in splits]
