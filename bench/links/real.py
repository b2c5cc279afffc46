"""The real link: network namespaces whose only connection is one token bucket. Needs root, `ip` and `tc`."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator

import torch.distributed as dist

from bench.links.link import INFINITE, LinkUnavailableError, check_rate, refuse_latency

_LIBC = ctypes.CDLL(None, use_errno=True)

SWITCH = "pmoesw"  # the namespace that holds the medium
LOCK_PATH = "/run/pmoe_link.lock"
# A frame of 1514 bytes carries 1448 of payload: 14 are Ethernet's, 20 IP's, 20 TCP's, 12 TCP's timestamps.
WIRE_BYTES_PER_PAYLOAD_BYTE = 1514 / 1448
# Two of the kernel's largest segments: with less, the bucket cuts segments and falls 3 % behind its rate.
BURST_BYTES = 128 << 10
# More than the TCP windows of all ranks together, so that no packet is dropped and sent again.
LIMIT_BYTES = 64 << 20
UNLIMITED_WIRE_RATE = 100e9  # tbf has no infinity


class SharedMedium:
    """The real link, as one rank uses it.

    All bytes between nodes pass one token bucket, in both directions and for all ranks. Bytes between ranks
    of a node pass another token bucket, on the node's loopback.
    """

    def __init__(self, rank: int, world: int, ranks_per_node: int = 1) -> None:
        self._rank, self._world, self._ranks_per_node = rank, world, ranks_per_node
        self._node = rank // ranks_per_node
        self.reset_bytes_sent()

    def set_rate(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        check_rate(bytes_per_second)
        refuse_latency(latency_seconds)
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
            check_rate(rate)
            refuse_latency(latency)
        self._change(inter, intra)

    def _change(self, inter: float, intra: float | None) -> None:
        dist.barrier()  # all ranks have finished their messages at the old rates
        if self._rank == 0:
            _set_medium_rate("change", inter * self._world)
        if intra is not None and self._ranks_per_node > 1 and self._rank % self._ranks_per_node == 0:
            _set_loopback_rate("change", self._node, intra * self._ranks_per_node)
        dist.barrier()  # no rank sends before the new rates are set

    @property
    def bytes_sent(self) -> int:
        return self._interface_bytes(interface(self._node)) - self._sent_before

    @property
    def bytes_sent_inside(self) -> int:
        return self._interface_bytes("lo") - self._sent_inside_before

    def reset_bytes_sent(self) -> None:
        self._sent_before = self._interface_bytes(interface(self._node))
        self._sent_inside_before = self._interface_bytes("lo")

    def _interface_bytes(self, interface: str) -> int:
        with open("/proc/thread-self/net/dev") as counters:
            for line in counters:
                name, _, numbers = line.partition(":")
                if name.strip() == interface:
                    return int(numbers.split()[8])
        raise RuntimeError(f"rank {self._rank} is not in its namespace: no interface {interface}")


def namespace(node: int) -> str:
    return f"pmoe{node}"


def interface(node: int) -> str:
    return f"p{node}"


@contextlib.contextmanager
def shared_medium(
    world: int, bytes_per_second: float, ranks_per_node: int = 1, inside_bytes_per_second: float = INFINITE
) -> Iterator[None]:
    """Makes network namespaces pmoe0, pmoe1, ..., one for each node, that one token bucket connects.

    They are removed at the end in any case. Namespaces that an earlier run left behind are removed first.
    Raises LinkUnavailableError if the machine cannot make them.
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
        space, port, plug = namespace(node), f"m{node}", interface(node)
        _command(f"ip netns add {space}")
        _command(f"ip -n {SWITCH} link add {port} type veth peer name {plug} netns {space}")
        _command(f"ip -n {SWITCH} link set {port} master br0")
        _command(f"ip -n {SWITCH} link set {port} up")
        _command(f"ip -n {space} addr add 10.78.0.{node + 1}/24 dev {plug}")
        _command(f"ip -n {space} link set {plug} up")
        _command(f"ip -n {space} link set lo up")
        # All traffic from any rank is redirected to ifb0, so that it passes one bucket.
        _command(f"tc -n {SWITCH} qdisc add dev {port} ingress")
        _command(
            f"tc -n {SWITCH} filter add dev {port} parent ffff: protocol all prio 1 u32 match u32 0 0"
            " action mirred egress redirect dev ifb0"
        )


def _set_medium_rate(verb: str, payload_bytes_per_second: float) -> None:
    _set_bucket(verb, SWITCH, "ifb0", payload_bytes_per_second * WIRE_BYTES_PER_PAYLOAD_BYTE)


def _set_loopback_rate(verb: str, node: int, payload_bytes_per_second: float) -> None:
    """Limits the rate of a node's loopback, over which the ranks of the node communicate.

    A segment on the loopback is one frame of up to 64 KiB, so headers (a thousandth) are not counted.

    verb: "add" or "change", for the command tc.
    """
    _set_bucket(verb, namespace(node), "lo", payload_bytes_per_second)


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


def enter_namespace(name: str) -> None:
    """Moves this thread, and threads that it starts later, into a network namespace.

    `ip netns exec` would start a new process. This function works in a running process, so that ranks are
    started in the same way on both kinds of links.
    """
    clone_newnet = 0x40000000  # <sched.h>
    with open(f"/run/netns/{name}") as space:
        if _LIBC.setns(space.fileno(), clone_newnet):  # os.setns only comes with Python 3.12
            raise OSError(ctypes.get_errno(), f"setns({name})")
