"""Slow links on one machine, so that overlap has something to hide: a modelled one, and a real one (root).

Loopback is as fast as memory, and a transfer there is CPU copying: nothing can be hidden behind computation.
`launch` runs a function on some ranks over a link of a chosen rate (Linux):

    modelled   gloo on loopback carries the bytes; a c10d backend then holds every all-to-all back until a
               serial full-duplex link would have carried it. Other collectives are not held back.
    real       gloo over network namespaces whose only connection is one token bucket, a shared medium: the
               bytes of all ranks and of every collective queue in it. No added latency (that needs netem).

**Nodes.** `ranks_per_node` puts ranks 0, 1, ... on nodes in that order, one a node by default. Each node
has a link inside it, with a rate of its own: what a rank sends to another node passes the link between
nodes, what it sends to another rank of its node the one inside, and an all-to-all that does both takes the
longer of the two. The two sorts of links run side by side:

    modelled   each rank has one serial full-duplex link of each sort.
    real       a namespace a node; its ranks meet on its loopback, through a token bucket of its own.

**The rate** means the same on both: payload bytes per second that *each* rank sends to others in an all-to-
all in which all ranks send as much; with several ranks a node, those bytes that leave the node, or inside
it those that do not. The real medium carries all ranks' bytes one after the other, so it runs at world
times that rate, plus headers, and a loopback at ranks_per_node times. Where the ranks send unequal amounts
the two differ: the modelled link takes the longer of what a rank sends and what it receives, the real one
the sum over all ranks.

    def work(link, rounds):              # module level; runs on each rank, in its own process
        link.set_rate(float("inf"))      # the computation alone
        ...
        link.set_rate(35e6)              # on all ranks, with nothing in flight
        return measure_rate()
    launch(2, work, link="modelled", rate=35e6, args=(9,))

    def on_nodes(link):                  # two nodes of two ranks
        link.set_rates(inter=10e6, intra=40e6)
        ...
    launch(4, on_nodes, link="modelled", rate=INFINITE, ranks_per_node=2)

All times are seconds of time.monotonic, all rates bytes per second.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import fcntl
import functools
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.futures import Future

from bench.timing import interleaved

INFINITE = float("inf")

KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40)}
"""For glibc: what a process frees it keeps, as the caching allocator of a GPU does. Otherwise the pages of
large tensors go back to the system and are faulted in again in each step, whatever variant is measured."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class Link(Protocol):
    """What a rank's function gets as its first argument."""

    def set_rate(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        """Changes the link between nodes for messages still to come: call it on all ranks, with no message in
        flight. The links inside nodes stay as they are.

        bytes_per_second: see the top of this file; float("inf") takes the limit away.
        latency_seconds: what each message costs besides its bytes, occupying the link (alpha); 0 on the real
            link, which cannot add any.
        """

    def set_rates(
        self,
        *,
        inter: float,
        intra: float,
        inter_latency_seconds: float = 0.0,
        intra_latency_seconds: float = 0.0,
    ) -> None:
        """`set_rate` of the links between nodes (inter) and inside them (intra)."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent to other nodes since the last reset.

        Modelled: payload of all-to-alls. Real: what the network interface counts, every other collective,
        acknowledgements and headers included, one header for a segment of up to 64 KiB: 0.3 % more in all.
        It trails a little; a barrier before reading it brings the rest. The ranks of a node share one
        interface: each counts the bytes of all of them.
        """

    @property
    def bytes_sent_inside(self) -> int:
        """The same of bytes to other ranks of its node."""

    def reset_bytes_sent(self) -> None: ...


class LinkCost(NamedTuple):
    """Seconds of an all-to-all = alpha_seconds + bytes this rank sends / bytes_per_second."""

    alpha_seconds: float
    bytes_per_second: float


class LinkUnavailableError(RuntimeError):
    """This machine cannot make the link; the message is one line saying why."""


def measure_rate(sizes_bytes: tuple[int, int] = (1 << 20, 1 << 23), rounds: int = 3) -> LinkCost:
    """What all-to-alls really achieve on the default group, from two sizes. Call it on all ranks.

    sizes_bytes: what each rank sends to others, rounded down to equal parts; the defaults take 1.2 s at
        30 MB/s.
    On the real link alpha may come out as a fraction of a millisecond below 0: after a pause the bucket holds
    BURST_BYTES that pass at once. Raises ValueError on a single rank, RuntimeError where the larger size was
    not slower (no limit, and noise).
    """
    world = dist.get_world_size()
    if world < 2:
        raise ValueError(f"measure_rate needs at least 2 ranks to send anything, not {world}")
    small, large = (size // (world - 1) for size in sizes_bytes)
    if not 0 < small < large:
        raise ValueError(f"sizes_bytes {sizes_bytes} must grow and give every peer at least one byte")

    def exchange(part: int) -> Callable[[], None]:
        rows, received = torch.zeros(2, world * part, dtype=torch.uint8)
        return lambda: dist.all_to_all_single(received, rows)

    timings = interleaved({"small": exchange(small), "large": exchange(large)}, rounds=rounds)
    small_seconds, large_seconds = timings["small"].median, timings["large"].median
    if large_seconds <= small_seconds:
        raise RuntimeError(f"{sizes_bytes} bytes took {small_seconds} and {large_seconds} s: no rate in that")
    seconds_per_byte = (large_seconds - small_seconds) / ((large - small) * (world - 1))
    return LinkCost(small_seconds - small * (world - 1) * seconds_per_byte, 1 / seconds_per_byte)


# ---- the modelled link


class ModelledLink:
    """A full-duplex serial link of one rank. Its messages queue in the order in which they are issued.

    Shared by all groups of a process, as a network card would be. A message of s bytes out and r bytes
    in occupies it for latency + max(s, r) / rate: a rank that sends little and receives much waits in truth
    too. The model does not know when a peer issues its part, so a late peer delays this rank by its lateness
    alone and not by the transfer after it. That flatters a sequential layer more than a pipelined one.
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
        _check_rate(bytes_per_second)
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

    def carry(self, sent_bytes: int, received_bytes: int) -> float:
        """Queues a message issued now; returns the time at which the link has carried it."""
        with self._lock:
            self._bytes_sent += sent_bytes
            self._free_at = max(self._free_at, self._clock())
            slower_bytes = max(sent_bytes, received_bytes)
            if slower_bytes:  # what stays on its rank costs nothing
                self._free_at += self._latency_seconds + slower_bytes / self._bytes_per_second
            return self._free_at


class ModelledLinks:
    """The two links of one rank: between nodes, and inside its node."""

    def __init__(self, ranks_per_node: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks_per_node = ranks_per_node
        self.holds_all_reduces = False
        """Whether all-reduces pass the links too: as rings, each rank sending 2 (W - 1) / W of the bytes."""
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
        """Queues a message of the group of these ranks, ranks[own] being this one, with so many bytes to and
        from each of them; returns the time at which all is carried.

        Each link is occupied by what passes it, and one that nothing passes is not waited for.
        """
        nodes = [rank // self.ranks_per_node for rank in ranks]
        inside = [i for i, node in enumerate(nodes) if node == nodes[own] and i != own]
        outside = [i for i, node in enumerate(nodes) if node != nodes[own]]

        def carried(link: ModelledLink, members: list[int]) -> float:
            return link.carry(sum(sent_bytes[i] for i in members), sum(received_bytes[i] for i in members))

        ready_at = carried(self.inter, outside) if outside else 0.0
        return max(ready_at, carried(self.intra, inside)) if inside else ready_at


class _LinkWork(Work):
    """A gloo work that is not done before the link has carried it. It never changes: any thread may wait."""

    def __init__(self, inner: Work, ready_at: float, output: torch.Tensor) -> None:
        super().__init__()
        self._inner, self._ready_at, self._output = inner, ready_at, output

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        # timedelta(0) is c10d's "no timeout of its own". The link's seconds count towards none.
        self._inner.wait(timeout) if timeout else self._inner.wait()
        remaining_seconds = self._ready_at - time.monotonic()
        if remaining_seconds > 0:  # even sleep(0) would give the core away
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
    """gloo, with all-to-alls held back by this process's links.

    Only the (rank, size) constructor can be subclassed, and an inner backend must be registered, or
    functional collectives fail with "ProcessGroup name not set".
    """

    def __init__(self, links: ModelledLinks, options: Any, backend_options: Any = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._links = links
        # The default group is made without a list.
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
        each = [2 * sum(tensor.nbytes for tensor in tensors) // self.size()] * self.size()
        return _LinkWork(work, self._links.carry(self._ranks, self.rank(), each, each), tensors[0])

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
    """Makes "modelled" a backend for init_process_group and new_group; returns this process's links.

    They have no limit until their rates are set, and one rank a node until `ranks_per_node` says otherwise.
    Further calls return the same links.
    """
    links = ModelledLinks()
    dist.Backend.register_backend(
        "modelled", functools.partial(_ModelledGroup, links), extended_api=True, devices=["cpu"]
    )
    return links


def _bytes_by_rank(tensor: torch.Tensor, splits: Sequence[int], world: int) -> list[int]:
    """Bytes of the rows of each rank of a group; no splits means equal parts."""
    total_bytes = tensor.numel() * tensor.element_size()
    if not splits:
        return [total_bytes // world] * world
    rows = sum(splits)
    return [total_bytes // rows * split if rows else 0 for split in splits]


def _check_rate(bytes_per_second: float) -> None:
    if not bytes_per_second > 0:
        raise ValueError(f"bytes_per_second ({bytes_per_second}) must be positive; infinity means no limit")


# ---- the real link

SWITCH = "pmoesw"  # the namespace that holds the medium
LOCK_PATH = "/run/pmoe_link.lock"
# A frame of 1514 bytes carries 1448 of payload: 14 are Ethernet's, 20 IP's, 20 TCP's, 12 TCP's timestamps.
WIRE_BYTES_PER_PAYLOAD_BYTE = 1514 / 1448
# Two of the kernel's largest segments: with less the bucket has to cut them and falls 3 % behind its rate.
BURST_BYTES = 128 << 10
# More than the TCP windows of all ranks hold together, so nothing is ever dropped and sent again.
LIMIT_BYTES = 64 << 20
UNLIMITED_WIRE_RATE = 100e9  # tbf has no infinity


class SharedMedium:
    """The real link, as one rank sees it: every rank's bytes, in both directions, pass one token bucket, and
    those between ranks of a node another, on its loopback."""

    def __init__(self, rank: int, world: int, ranks_per_node: int = 1) -> None:
        self._rank, self._world, self._ranks_per_node = rank, world, ranks_per_node
        self._node = rank // ranks_per_node
        self.reset_bytes_sent()

    def set_rate(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        _check_rate(bytes_per_second)
        _refuse_latency(latency_seconds)
        self._change(bytes_per_second, None)

    def set_rates(
        self,
        *,
        inter: float,
        intra: float,
        inter_latency_seconds: float = 0.0,
        intra_latency_seconds: float = 0.0,
    ) -> None:
        for rate, latency in ((inter, inter_latency_seconds), (intra, intra_latency_seconds)):
            _check_rate(rate)
            _refuse_latency(latency)
        self._change(inter, intra)

    def _change(self, inter: float, intra: float | None) -> None:
        dist.barrier()  # all have finished with the old rates
        if self._rank == 0:
            _set_medium_rate("change", inter * self._world)
        if intra is not None and self._ranks_per_node > 1 and self._rank % self._ranks_per_node == 0:
            _set_loopback_rate("change", self._node, intra * self._ranks_per_node)
        dist.barrier()  # none starts before the new ones

    @property
    def bytes_sent(self) -> int:
        return self._interface_bytes(_interface(self._node)) - self._sent_before

    @property
    def bytes_sent_inside(self) -> int:
        return self._interface_bytes("lo") - self._sent_inside_before

    def reset_bytes_sent(self) -> None:
        self._sent_before = self._interface_bytes(_interface(self._node))
        self._sent_inside_before = self._interface_bytes("lo")

    def _interface_bytes(self, interface: str) -> int:
        with open("/proc/thread-self/net/dev") as counters:
            for line in counters:
                name, _, numbers = line.partition(":")
                if name.strip() == interface:
                    return int(numbers.split()[8])
        raise RuntimeError(f"rank {self._rank} is not in its namespace: no interface {interface}")


def _refuse_latency(latency_seconds: float) -> None:
    if latency_seconds:
        raise ValueError(f"latency_seconds ({latency_seconds}) must be 0 on the real link: it cannot add any")


def _namespace(node: int) -> str:
    return f"pmoe{node}"


def _interface(node: int) -> str:
    return f"p{node}"


@contextlib.contextmanager
def shared_medium(
    world: int, bytes_per_second: float, ranks_per_node: int = 1, inside_bytes_per_second: float = INFINITE
) -> Iterator[None]:
    """Network namespaces pmoe0, pmoe1, ..., one a node, on one medium, taken away at the end, whatever
    happens.

    What an earlier run that died left behind is removed first. Raises LinkUnavailableError.
    """
    if os.geteuid() != 0:
        raise LinkUnavailableError("the real link needs root (network namespaces); use the modelled link")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkUnavailableError(
                f"the real link needs `{tool}` (Debian: iproute2); use the modelled link"
            )
    with open(LOCK_PATH, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LinkUnavailableError("another run holds the real link; try again later") from None
        _remove_namespaces()
        try:
            _add_namespaces(world // ranks_per_node)
            _set_medium_rate("add", bytes_per_second * world)
            for node in range(world // ranks_per_node if ranks_per_node > 1 else 0):
                _set_loopback_rate("add", node, inside_bytes_per_second * ranks_per_node)
            yield
        finally:
            _remove_namespaces()


def _add_namespaces(nodes: int) -> None:
    _command(f"ip netns add {SWITCH}")
    _command(f"ip -n {SWITCH} link add br0 type bridge")
    _command(f"ip -n {SWITCH} link set br0 up")
    _command(f"ip -n {SWITCH} link add ifb0 type ifb")
    _command(f"ip -n {SWITCH} link set ifb0 up")
    for node in range(nodes):
        space, port, plug = _namespace(node), f"m{node}", _interface(node)
        _command(f"ip netns add {space}")
        _command(f"ip -n {SWITCH} link add {port} type veth peer name {plug} netns {space}")
        _command(f"ip -n {SWITCH} link set {port} master br0")
        _command(f"ip -n {SWITCH} link set {port} up")
        _command(f"ip -n {space} addr add 10.78.0.{node + 1}/24 dev {plug}")
        _command(f"ip -n {space} link set {plug} up")
        _command(f"ip -n {space} link set lo up")
        # All that comes in from any rank is led through ifb0, hence through one bucket.
        _command(f"tc -n {SWITCH} qdisc add dev {port} ingress")
        _command(
            f"tc -n {SWITCH} filter add dev {port} parent ffff: protocol all prio 1 u32 match u32 0 0"
            " action mirred egress redirect dev ifb0"
        )


def _set_medium_rate(verb: str, payload_bytes_per_second: float) -> None:
    _set_bucket(verb, SWITCH, "ifb0", payload_bytes_per_second * WIRE_BYTES_PER_PAYLOAD_BYTE)


def _set_loopback_rate(verb: str, node: int, payload_bytes_per_second: float) -> None:
    """A segment there is one frame of up to 64 KiB: headers are a thousandth."""
    _set_bucket(verb, _namespace(node), "lo", payload_bytes_per_second)


def _set_bucket(verb: str, space: str, interface: str, wire_rate: float) -> None:
    _command(
        f"tc -n {space} qdisc {verb} dev {interface} root tbf"
        f" rate {round(8 * min(wire_rate, UNLIMITED_WIRE_RATE))}bit burst {BURST_BYTES} limit {LIMIT_BYTES}"
    )


def _remove_namespaces() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        if name == SWITCH or (name.startswith("pmoe") and name[4:].isdigit()):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _command(text: str) -> None:
    done = subprocess.run(text.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise LinkUnavailableError(f"the real link cannot be made: `{text}`: {reason}")


def _enter_namespace(name: str) -> None:
    """Moves this thread, and those that it will start, into a network namespace.

    As `ip netns exec` does, but for a running process: so ranks start, and answer, alike on both links.
    """
    clone_newnet = 0x40000000  # <sched.h>
    with open(f"/run/netns/{name}") as space:
        if _LIBC.setns(space.fileno(), clone_newnet):  # os.setns only comes with Python 3.12
            raise OSError(ctypes.get_errno(), f"setns({name})")


# ---- running ranks


@dataclass(frozen=True)
class _Setup:
    """What a rank needs to join; the same for all ranks."""

    world: int
    link: str
    bytes_per_second: float
    latency_seconds: float
    rendezvous: str
    timeout_seconds: float
    cores: tuple[int, ...]  # core of each rank; empty: not pinned
    ranks_per_node: int
    inside_bytes_per_second: float


def launch(
    world: int,
    function: Callable[..., Any],
    link: str,
    rate: float,
    args: Sequence[Any] = (),
    *,
    latency_seconds: float = 0.0,
    ranks_per_node: int = 1,
    intra_rate: float = INFINITE,
    pin: bool = True,
    timeout_seconds: float = 600.0,
) -> list[Any]:
    """Runs function(link, *args) on `world` ranks over a slow link; returns the results in rank order.

    function: at module level (a script's own will do, behind its `if __name__ == "__main__"`). It finds the
        default process group ready. Arguments and result are pickled.
    link: "modelled" or "real". rate: bytes per second, as `Link.set_rate` takes it.
    ranks_per_node: how many ranks a node has. intra_rate: of the links inside nodes, as `Link.set_rates`
        takes it.
    pin: gives each rank a core of its own, its gloo threads with it, where there are as many cores as ranks.
        On two cores with other work on them a pipelined loop took a quarter less time then, and varied less,
        while collectives of a few bytes, which must wait for that one core, took 1 to 10 times as long
        (up to 3 ms).
    timeout_seconds: for the whole run; a single collective gets half of it. Near the end, ranks that still
        run print where they are.

    Each rank is a fresh process with one thread for computation. Raises RuntimeError telling what went wrong
    on each rank, LinkUnavailableError where the machine cannot make the link.
    """
    _check_rate(rate)
    _check_rate(intra_rate)
    if link not in ("modelled", "real"):
        raise ValueError(f"link ({link!r}) must be 'modelled' or 'real'")
    if ranks_per_node < 1 or world % ranks_per_node:
        raise ValueError(f"ranks_per_node ({ranks_per_node}) must be at least 1 and divide world ({world})")
    if link == "real":
        _refuse_latency(latency_seconds)
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        if link == "real":
            stack.enter_context(shared_medium(world, rate, ranks_per_node, intra_rate))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pmoe_link_"))
        setup = _Setup(
            world=world,
            link=link,
            bytes_per_second=rate,
            latency_seconds=latency_seconds,
            rendezvous=f"file://{folder}/rendezvous",  # not on the link, so the same for both
            timeout_seconds=timeout_seconds,
            cores=tuple(cores[:world]) if pin and len(cores) >= world else (),
            ranks_per_node=ranks_per_node,
            inside_bytes_per_second=intra_rate,
        )
        processes, pipes = [], []
        stack.callback(_stop, processes)
        # Read when a rank starts, and when it imports torch.
        with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", **KEEP_FREED_MEMORY):
            for rank in range(world):
                process, pipe = _start(rank, setup, function, args)
                processes.append(process)
                pipes.append(stack.enter_context(pipe))
        return _collect(processes, pipes, time.monotonic() + timeout_seconds)


def _start(rank: int, setup: _Setup, function: Callable[..., Any], args: Sequence[Any]):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    start_args = (rank, setup, theirs, function, tuple(args))
    process = context.Process(target=_rank_main, args=start_args, daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _rank_main(rank: int, setup: _Setup, pipe, function: Callable[..., Any], args: tuple) -> None:
    pr_set_pdeathsig = 1  # <sys/prctl.h>
    _LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)  # a benchmark that is killed leaves no ranks behind
    faulthandler.dump_traceback_later(0.9 * setup.timeout_seconds)
    try:
        pipe.send(("ok", function(_join(rank, setup), *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    else:
        with contextlib.suppress(EOFError):
            pipe.recv()  # others may still need this rank's connections; the parent closes the pipe when done
    sys.stdout.flush()
    os._exit(0)  # whatever gloo's threads are doing; peers see the connections close


def _join(rank: int, setup: _Setup) -> Link:
    if setup.cores:
        os.sched_setaffinity(0, {setup.cores[rank]})
    torch.set_num_threads(1)
    if setup.link == "real":
        node = rank // setup.ranks_per_node
        _enter_namespace(_namespace(node))
        os.environ["GLOO_SOCKET_IFNAME"] = _interface(node)
        link: Link = SharedMedium(rank, setup.world, setup.ranks_per_node)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        link = links = register_modelled()
        links.ranks_per_node = setup.ranks_per_node
        link.set_rates(
            inter=setup.bytes_per_second,
            intra=setup.inside_bytes_per_second,
            inter_latency_seconds=setup.latency_seconds,
        )
    dist.init_process_group(
        "gloo" if setup.link == "real" else "modelled",
        init_method=setup.rendezvous,
        rank=rank,
        world_size=setup.world,
        timeout=datetime.timedelta(seconds=setup.timeout_seconds / 2),
    )
    return link


def _collect(processes: list, pipes: list, end: float) -> list[Any]:
    """The results of all ranks. After a first failure the others get a few seconds to tell what they saw."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while missing := [r for r in range(len(pipes)) if r not in results and r not in failures]:
        left_seconds = max(0.0, end - time.monotonic())
        ready = multiprocessing.connection.wait([pipes[rank] for rank in missing], left_seconds)
        if not ready:
            failures.update(dict.fromkeys(missing, "no answer in time"))
        for rank in (r for r in missing if pipes[r] in ready):
            try:
                kind, value = pipes[rank].recv()
            except EOFError:
                processes[rank].join(timeout=5)
                kind, value = "error", f"died, exit code {processes[rank].exitcode}"
            (results if kind == "ok" else failures)[rank] = value
            if kind == "error":
                end = min(end, time.monotonic() + 5)
    if failures:
        raise RuntimeError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(pipes))]


def _stop(processes: list) -> None:
    for process in processes:
        process.kill()
        process.join()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
