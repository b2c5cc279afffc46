"""The symmetric heap: memory of one shape on every rank, which its peers write into while kernels run.

What lies where in it says cuda/comet/layout.h, to the kernels and through the extension to this file. Who
gives the memory:

    virtual_heaps   one process plays all ranks, on one device: for tests and measurements
    process_heap    a process a rank, all on one node, by CUDA IPC; several may share a device
    nvshmem_heap    NVSHMEM, where it is built in; ranks of other nodes too, as far as loads and stores reach

A rank that waits in vain reports it into memory that the host reads, and its kernel ends (`Heap.check`).
That heap is broken then: a new one must be made, on every rank. The process goes on.

A heap stays until it is closed, or its process ends. Nothing closes it by itself: peers may still write.

Letters: W ranks, E experts of a rank, M = d_model.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.agree import gathered
from pmoe.comm.heap_memory import DeviceMemory, Memory, NvshmemMemory, needed, tensor_at
from pmoe.comm.ranks import Ranks
from pmoe.comm.topology import timeout_of
from pmoe.kernels.comet import WAITS, spare_blocks

WAIT_SECONDS = "PMOE_WAIT_SECONDS"
"""The environment variable: for how long a kernel waits for a peer."""

DEFAULT_WAIT_SECONDS, MOST_WAIT_SECONDS = 30.0, 86400.0

FLAG_BYTES = 1024
"""Behind the layout: the flag of `probe_flag`."""

MOST_ROWS = 2**31 - 1
MOST_EPOCHS = 2**31 - 1
"""Later than that a flag that was never raised would count as raised (cuda/comet/protocol.h)."""
REPORT_WORDS = 8
ROW_ALIGNMENT_BYTES = 16


# ---- what a heap holds


@dataclass(frozen=True)
class HeapShape:
    """What all ranks agree on.

    num_ranks: W. experts: of a rank. rows: that may arrive at a rank. home_rows: that a rank may send, which
    come home. d_model, dtype: of a row. Raises ValueError, naming the number, where that cannot be.
    """

    num_ranks: int
    experts: int
    rows: int
    home_rows: int
    d_model: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, least in (("num_ranks", 1), ("experts", 1), ("rows", 0), ("home_rows", 0), ("d_model", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_ROWS:
                raise ValueError(f"{name} ({value!r}) must be a whole number from {least} to {MOST_ROWS}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype ({self.dtype!r}) must be a floating-point type of torch")
        if self.row_bytes % ROW_ALIGNMENT_BYTES:
            raise ValueError(
                f"d_model ({self.d_model}): a row's bytes ({self.d_model} x {self.dtype.itemsize} = "
                f"{self.row_bytes}) must be a multiple of {ROW_ALIGNMENT_BYTES}"
            )

    @property
    def row_bytes(self) -> int:
        return self.d_model * self.dtype.itemsize

    @property
    def places(self) -> Mapping[str, int]:
        """Of each region, by its name in layout.h, how many bytes it begins behind the heap's base; "bytes":
        all of them. ValueError for more ranks or experts than the kernels know; RuntimeError without the
        extension."""
        return _places(self.num_ranks, self.experts, self.rows, self.home_rows, self.row_bytes)

    @property
    def bytes(self) -> int:
        """Of one rank's heap."""
        return self.places["bytes"]

    def holds(self, other: HeapShape) -> bool:
        """Whether a heap of this shape serves one of the other: the same, with as many rows or more."""
        alike = replace(other, rows=self.rows, home_rows=self.home_rows) == self
        return alike and other.rows <= self.rows and other.home_rows <= self.home_rows


@cache
def _places(ranks: int, experts: int, rows: int, home_rows: int, row_bytes: int) -> Mapping[str, int]:
    module = needed()
    limits = module.comet_limits
    if ranks > limits["ranks"]:
        raise ValueError(f"num_ranks ({ranks}) must be {limits['ranks']} at most")
    if ranks * experts > limits["experts"]:
        raise ValueError(
            f"experts ({experts}): those of all {ranks} ranks ({ranks * experts}) must be "
            f"{limits['experts']} at most"
        )
    found: dict[str, int] = module.comet_layout(ranks, experts, rows, home_rows, row_bytes)
    return found


# ---- what was awaited


@dataclass(frozen=True)
class Awaited:
    """What a rank waited for in vain: `Report` and `Wait` of cuda/comet/watch.h.

    rank: who waited. peer: for whom. expert, part: of this rank's experts, and the piece of the peer's rows
    for it; or the chunk of columns. epoch: the heap's round.
    """

    wait: str
    rank: int
    peer: int
    expert: int
    part: int
    epoch: int

    @staticmethod
    def of_report(words: Sequence[int]) -> Awaited | None:
        """None where nothing is reported."""
        code, peer, expert, part, epoch, rank = words[:6]
        if code == 0:
            return None
        name = WAITS[code] if 0 < code < len(WAITS) else f"wait {code}"
        return Awaited(name, rank, peer, expert, part, epoch % 2**32)

    def __str__(self) -> str:
        """Example: "rank 1: the arrival of piece 2 of its rows for expert 3 of rank 0, in round 7"."""
        told = {
            "grant": f"rank {self.peer}: the grant of room for rank {self.rank}'s rows for its experts",
            "arrival": f"rank {self.peer}: the arrival of piece {self.part} of its rows for expert "
            f"{self.expert} of rank {self.rank}",
            "tiles": f"rank {self.peer} itself: the tiles of column chunk {self.part}",
            "returned": f"rank {self.peer}: the return of column chunk {self.part} of the rows of rank "
            f"{self.rank}'s tokens",
        }
        what = told.get(self.wait, f"rank {self.peer}: {self.wait}, expert {self.expert}, part {self.part}")
        return f"{what}, in round {self.epoch}"


class HeapError(RuntimeError):
    """A wait that lasted too long, or use of a heap that is broken or closed. awaited: what was waited for,
    where that is known."""

    def __init__(self, message: str, awaited: Awaited | None = None) -> None:
        super().__init__(message)
        self.awaited = awaited


def wait_seconds(ranks: Ranks) -> float:
    """For how long kernels of this rank wait: $PMOE_WAIT_SECONDS, else 30 s; never longer than the group's
    timeout. ValueError for a variable that is no such number."""
    text = os.environ.get(WAIT_SECONDS)
    seconds = DEFAULT_WAIT_SECONDS
    if text is not None:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MOST_WAIT_SECONDS:
            raise ValueError(
                f"{WAIT_SECONDS} ({text!r}) must be a number of seconds, more than 0 and at most "
                f"{MOST_WAIT_SECONDS:g}"
            )
    timeout = None if ranks.group is None else timeout_of(ranks.group)
    return seconds if timeout is None else min(seconds, timeout.total_seconds())


# ---- one rank's view

MAKE_ANEW = "a new heap must be made, on every rank (pmoe.comm.heap.close_heaps drops the old ones)"


class Heap:
    """One rank's heap, and where it sees those of all.

    base: the address. peers: (W,) int64 on the device, the addresses of all ranks' heaps as this rank sees
    them; peer_addresses: the same on the host. epoch: the last round that was begun; the first is 1. report:
    (8,) int32 in memory that host and device reach, a `Report` of cuda/comet/watch.h. bound_seconds: for how
    long a kernel may wait.

    Use of a broken or closed heap raises HeapError.
    """

    def __init__(
        self,
        *,
        shape: HeapShape,
        rank: int,
        device: torch.device,
        base: int,
        peers: Sequence[int],
        bound_seconds: float,
        release: Callable[[], None],
    ) -> None:
        """release: gives the memory back, once."""
        places = shape.places
        self.shape, self.rank, self.device, self.base = shape, rank, device, base
        self.bound_seconds = bound_seconds
        self.epoch = 0
        self.peer_addresses = tuple(peers)
        self.peers = torch.tensor(self.peer_addresses, dtype=torch.int64, device=device)
        self.report = torch.zeros(REPORT_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._words = (ctypes.c_int32 * REPORT_WORDS).from_address(self.report.data_ptr())
        self._inbox = tensor_at(base + places["inbox"], (shape.rows, shape.d_model), shape.dtype, device)
        self._weights = tensor_at(base + places["weights"], (shape.rows,), torch.float32, device)
        self._flags_raised = 0
        self._unusable: str | None = None
        self._process_stays = True
        self._release: Callable[[], None] | None = release

    def __repr__(self) -> str:
        state = "" if self._unusable is None else f", {self._unusable}"
        return f"Heap(rank {self.rank} of {self.shape.num_ranks}, {self.shape}, round {self.epoch}{state})"

    @property
    def bound_nanoseconds(self) -> int:
        return round(self.bound_seconds * 1e9)

    @property
    def counters(self) -> int:
        """The address of `Counters`, whose first word says that this rank has failed."""
        return self.base + self.shape.places["counters"]

    def next_epoch(self) -> int:
        """The number of the round that begins, for one launch on every rank. Raises as `raise_if_failed`."""
        self.raise_if_failed()
        if self.epoch + 1 >= MOST_EPOCHS:
            self._unusable = f"this heap of rank {self.rank} has had {self.epoch} rounds, the most there are"
            self._check_usable()
        self.epoch += 1
        return self.epoch

    def give_up(self, why: str) -> None:
        """A round of this rank was left in the middle: flags that are raised now would be taken for its."""
        if self._unusable is None:
            self._unusable = f"this heap of rank {self.rank} was given up in round {self.epoch}: {why}"

    def rows(self, count: int) -> Tensor:
        """(count, M) the first rows of the inbox: the memory itself, which later rounds overwrite."""
        return self._first(self._inbox, count)

    def row_weight(self, count: int) -> Tensor:
        """(count,) float32, their routing weights; likewise."""
        return self._first(self._weights, count)

    def _first(self, of_rows: Tensor, count: int) -> Tensor:
        self._check_usable()
        if not 0 <= count <= self.shape.rows:
            raise ValueError(f"count ({count}) must be from 0 to the heap's {self.shape.rows} rows")
        return of_rows[:count]

    def _check_usable(self) -> None:
        if self._unusable is not None:
            remedy = MAKE_ANEW if self._process_stays else "this process must end"
            raise HeapError(f"pmoe: {self._unusable}; {remedy}")

    def raise_if_failed(self) -> None:
        """Raises HeapError where a wait of an earlier launch is known to have lasted too long. Waits for
        nothing: called before each launch."""
        self._check_usable()
        if self._words[0] == 0:
            return
        awaited = Awaited.of_report(list(self._words))
        self._unusable = f"this heap of rank {self.rank} is broken since round {self.epoch}"
        raise HeapError(
            f"pmoe: rank {self.rank} waited {self.bound_seconds:g} s in vain for {awaited}. That rank has "
            f"ended, failed before, or was slower ({WAIT_SECONDS} sets the bound). What this round computed "
            "is worthless, and the heap is broken, also on ranks that wait for this one. This process stays "
            f"usable; {MAKE_ANEW}",
            awaited,
        )

    def check(self) -> None:
        """Waits for the device and raises HeapError where any wait lasted too long, or the device is lost."""
        self._check_usable()
        try:
            _synchronize(self.device)
        except RuntimeError as error:
            self._unusable = f"this heap of rank {self.rank} is on a device that is lost"
            self._process_stays = False
            raise HeapError(
                f"pmoe: rank {self.rank}: {self.device} failed in round {self.epoch} or before, and this "
                f"process cannot use it any more: it must end ({error})"
            ) from error
        self.raise_if_failed()

    def close(self) -> None:
        """Gives the memory back, once its device has come to an end; tensors on it must not be used any more.
        Once only; later calls do nothing. Collective for heaps of several processes, broken ones too.

        RuntimeError where a peer does not come: this rank's memory then stays, as the peer may use it.
        """
        release, self._release = self._release, None
        if release is None:
            return
        self._unusable = f"this heap of rank {self.rank} is closed"
        release()
        _open.discard(self)


_open: set[Heap] = set()
"""Kernels may still write into their reports, whoever has forgotten them."""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _quietly(work: Callable[..., object], *args: object) -> None:
    """For memory on its way out: what fails is told, and hinders nothing else."""
    try:
        work(*args)
    except Exception as error:
        warnings.warn(f"pmoe: closing a heap: {error}", stacklevel=2)


# ---- providers


def virtual_heaps(
    shape: HeapShape, device: torch.device | str | int, *, memory: Memory | None = None
) -> list[Heap]:
    """The heaps of all W ranks, in this process and on one device. Each is closed by itself, and the last use
    of any of them comes before.

    RuntimeError naming rank and bytes where memory does not suffice; nothing is kept then.
    """
    memory, device = DeviceMemory() if memory is None else memory, _indexed(device)
    bound = wait_seconds(Ranks.alone())
    bases: list[int] = []
    try:
        for _ in range(shape.num_ranks):
            bases.append(_allocate(memory, device, shape))
        heaps = [
            Heap(
                shape=shape,
                rank=rank,
                device=device,
                base=base,
                peers=bases,
                bound_seconds=bound,
                release=_freeing(memory, device, base),
            )
            for rank, base in enumerate(bases)
        ]
    except RuntimeError as error:
        for base in bases:
            _quietly(memory.free, device, base)
        who = f"rank {len(bases)}: " if len(bases) < shape.num_ranks else ""
        raise RuntimeError(f"pmoe: no heaps of {shape.num_ranks} virtual ranks: {who}{error}") from error
    _open.update(heaps)
    return heaps


def process_heap(
    ranks: Ranks, shape: HeapShape, device: torch.device | str | int, *, memory: Memory | None = None
) -> Heap:
    """This rank's heap, with those of its group opened by CUDA IPC. Collective, with the same collectives on
    every rank whatever fails on one.

    Raises on every rank alike: ValueError with the numbers, rank by rank, where shapes, types, loaded
    kernels, bytes or nodes differ; RuntimeError naming rank and bytes where memory does not suffice, or a
    peer's cannot be opened. Nothing is kept then.
    """
    memory = DeviceMemory() if memory is None else memory
    together = _Together(ranks, _indexed(device))
    bound_seconds = _agree(together, shape, memory, one_node=True)
    return _make(together, shape, memory, bound_seconds)


def nvshmem_heap(
    ranks: Ranks, shape: HeapShape, device: torch.device | str | int, *, memory: NvshmemMemory | None = None
) -> Heap:
    """This rank's heap in NVSHMEM's memory, and its peers' where loads and stores reach them: on one node, or
    over NVLink between nodes. Collective, and for one group of ranks a process. Never run by its authors.

    Raises on every rank alike, as `process_heap` does; also RuntimeError where NVSHMEM is not built in, where
    it serves another group already, or where a rank is beyond another's loads and stores.
    """
    memory = NvshmemMemory(ranks) if memory is None else memory
    together = _Together(ranks, _indexed(device))
    bound_seconds = _agree(together, shape, memory, one_node=False)
    ids, troubles = together.tried(memory.give_id)
    if not troubles:
        _, troubles = together.tried(lambda: memory.start(together.device, ids[0]))
    if troubles:
        raise RuntimeError(f"pmoe: no symmetric heap: {'; '.join(troubles)}")
    return _make(together, shape, memory, bound_seconds)


def _indexed(device: torch.device | str | int) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def _allocate(memory: Memory, device: torch.device, shape: HeapShape) -> int:
    num_bytes = shape.bytes + FLAG_BYTES
    try:
        return memory.allocate(device, num_bytes)
    except RuntimeError as error:
        raise RuntimeError(f"could not allocate {num_bytes} bytes on {device}: {error}") from error


class _Making:
    """A heap of several processes on its way, and what must be given back."""

    def __init__(self, together: _Together, shape: HeapShape, memory: Memory, bound_seconds: float) -> None:
        self.together, self.shape, self.memory, self.bound_seconds = together, shape, memory, bound_seconds
        self.ranks, self.device = together.ranks, together.device
        self.base: int | None = None
        self.opened: dict[int, int] = {}
        self.heap: Heap | None = None

    def allocate(self) -> bytes:
        self.base = _allocate(self.memory, self.device, self.shape)
        return self.memory.handle(self.device, self.base) if self.ranks.size > 1 else b""

    def open_peers(self, handles: Sequence[bytes]) -> None:
        assert self.base is not None
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self.ranks.rank:
                addresses.append(self.base)
                continue
            try:
                self.opened[rank] = self.memory.open(self.device, handle)
            except RuntimeError as error:
                raise RuntimeError(f"could not open the heap of rank {rank}: {error}") from error
            addresses.append(self.opened[rank])
        self.heap = Heap(
            shape=self.shape,
            rank=self.ranks.rank,
            device=self.device,
            base=self.base,
            peers=addresses,
            bound_seconds=self.bound_seconds,
            release=self.release,
        )

    def release(self) -> None:
        """Collective: memory goes when nobody has it open any more."""
        _quietly(_synchronize, self.device)
        for peer in self.opened.values():
            _quietly(self.memory.close, self.device, peer)
        having = self.together.gather(self.base is not None)
        if self.base is not None and (all(having) or not self.memory.collective):
            _quietly(self.memory.free, self.device, self.base)


def _make(together: _Together, shape: HeapShape, memory: Memory, bound_seconds: float) -> Heap:
    making = _Making(together, shape, memory, bound_seconds)
    handles, troubles = together.tried(making.allocate)
    if not troubles:
        _, troubles = together.tried(lambda: making.open_peers(handles))
    if troubles:
        making.release()
        raise RuntimeError(f"pmoe: no symmetric heap: {'; '.join(troubles)}")
    assert making.heap is not None
    _open.add(making.heap)
    return making.heap


def _freeing(memory: Memory, device: torch.device, base: int) -> Callable[[], None]:
    def free() -> None:
        _quietly(_synchronize, device)
        _quietly(memory.free, device, base)

    return free


class _Together:
    """Steps that every rank takes, whether or not the one before failed on some."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def gather(self, value: object) -> list[Any]:
        """What every rank has. A collective, also a barrier."""
        on_cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_cuda else contextlib.nullcontext():  # NCCL gathers there
            return gathered(self.ranks, value, stage="the exchange about a symmetric heap")

    def tried(self, work: Callable[[], object]) -> tuple[list[Any], list[str]]:
        """What work() gave on every rank, and a sentence for each rank where it raised."""
        mine: tuple[object, str | None]
        try:
            mine = (work(), None)
        except Exception as error:
            mine = (None, str(error))
        everyone = self.gather(mine)
        troubles = [f"rank {rank}: {told}" for rank, (_, told) in enumerate(everyone) if told is not None]
        return [value for value, _ in everyone], troubles


def _agree(together: _Together, shape: HeapShape, memory: Memory, *, one_node: bool) -> float:
    """For how long this rank waits. Raises on every rank alike where the ranks do not fit together."""
    ranks = together.ranks
    facts: dict[str, object] = asdict(shape) | {"dtype": str(shape.dtype).removeprefix("torch.")}
    host, bound, trouble = "", 0.0, None
    try:
        place, bound = memory.place(together.device), wait_seconds(ranks)
        spare_blocks()  # raises for a bad number, while the other ranks can still be told
        host = place.host
        facts |= {"bytes": shape.bytes, "kernels": place.kernels}
    except Exception as error:
        trouble = (isinstance(error, ValueError), str(error))
    everyone = together.gather((facts, host, trouble))
    failed = [(rank, *told) for rank, (_, _, told) in enumerate(everyone) if told is not None]
    if failed:
        sentences = "; ".join(f"rank {rank}: {told}" for rank, _, told in failed)
        kind = ValueError if any(is_value for _, is_value, _ in failed) else RuntimeError
        raise kind(f"pmoe: no symmetric heap: {sentences}")
    by_rank = [each for each, _, _ in everyone]
    differing = [name for name in facts if len({each[name] for each in by_rank}) > 1]
    if differing:
        numbers = "; ".join(
            f"rank {rank}: {', '.join(f'{name} {each[name]}' for name in differing)}"
            for rank, each in enumerate(by_rank)
        )
        raise ValueError(
            f"all ranks of a symmetric heap must have the same shape, type and loaded kernels, not {numbers}"
        )
    if shape.num_ranks != ranks.size:
        raise ValueError(f"num_ranks ({shape.num_ranks}) must be the size of the group ({ranks.size})")
    hosts = [each for _, each, _ in everyone]
    if one_node and len(set(hosts)) > 1:
        nodes = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(hosts))
        raise ValueError(
            f"all ranks of a symmetric heap must be on one node (nvshmem_heap goes further), not {nodes}"
        )
    return bound


# ---- heaps that layers share

Make = Callable[[Ranks, HeapShape, torch.device], Heap]
Kept = dict[tuple[object, ...], Heap]

_heaps: weakref.WeakKeyDictionary[dist.ProcessGroup, Kept] = weakref.WeakKeyDictionary()
_alone: Kept = {}
"""Of ranks without a group."""


def _kept(ranks: Ranks) -> Kept:
    return _alone if ranks.group is None else _heaps.setdefault(ranks.group, {})


def heap_for(
    ranks: Ranks, device: torch.device | str | int, shape: HeapShape, *, make: Make = process_heap
) -> Heap:
    """The heap that all layers of this group, device, d_model, dtype and number of experts share: one of at
    least ``shape``'s rows. A collective where there is none yet, or one with fewer rows; nothing otherwise.

    Rows must follow from numbers that all ranks share: so do the collectives. A heap that is too small is
    closed before a larger one is made, on every rank alike; tensors on it must not be used any more.
    Raises as ``make`` does, and HeapError where the heap that is there is broken.
    """
    kept, device = _kept(ranks), _indexed(device)
    key = (device, shape.num_ranks, shape.experts, shape.d_model, shape.dtype)
    heap = kept.get(key)
    if heap is not None:
        if heap.shape.holds(shape):
            heap.raise_if_failed()
            return heap
        old = heap.shape
        shape = replace(shape, rows=max(shape.rows, old.rows), home_rows=max(shape.home_rows, old.home_rows))
        kept.pop(key).close()
    heap = kept[key] = make(ranks, shape, device)
    return heap


def close_heaps(ranks: Ranks) -> None:
    """Closes what `heap_for` has made for this group, in the order in which it was made. Collective: before
    the group is destroyed, or after a HeapError, on every rank."""
    kept = _kept(ranks)
    while kept:
        kept.pop(next(iter(kept))).close()


# ---- whether a peer's kernel reaches this one's while both run


def raise_flag(heap: Heap, peer: int, value: int, stream: torch.cuda.Stream) -> None:
    """One launch, of a kernel that writes ``value`` into the flag of a peer, or of this rank."""
    heap._check_usable()
    flag = heap.peer_addresses[peer] + heap.shape.bytes
    needed().heap_raise_flag(heap.device.index, stream.cuda_stream, flag, value)


def await_flag(heap: Heap, value: int, seconds: float, stream: torch.cuda.Stream) -> Tensor:
    """One launch, of a kernel that waits until this rank's flag has reached ``value``. Gives (1,) int64 that
    the host reads behind the stream, and holds until then: the nanoseconds, or -1 where it had not within
    ``seconds``."""
    heap._check_usable()
    waited = torch.full((1,), -1, dtype=torch.int64, pin_memory=heap.device.type == "cuda")
    needed().heap_await_flag(
        heap.device.index,
        stream.cuda_stream,
        heap.base + heap.shape.bytes,
        value,
        round(seconds * 1e9),
        waited.data_ptr(),
    )
    return waited


def probe_flag(heap: Heap, ranks: Ranks, *, seconds: float = 10.0) -> float | None:
    """Whether a kernel that waits sees what a kernel of another rank writes meanwhile. Every rank waits for
    its flag; when all do, each raises that of the next rank.

    Gives the seconds of the slowest rank, None where some rank's flag did not come within ``seconds``: then
    the kernels of these processes do not run together, and fused ones would wait in vain. Collective; the
    same on every rank. RuntimeError, on every rank, where a launch fails on one.
    """
    together = _Together(ranks, heap.device)
    heap._flags_raised += 1
    value, waited = heap._flags_raised, torch.empty(0)
    waiting, raising = (torch.cuda.Stream(heap.device) for _ in range(2))

    def wait() -> None:
        nonlocal waited
        # Both kernels are loaded before one of them waits: CUDA may load only while none runs.
        raise_flag(heap, ranks.rank, value - 1, raising)
        there = await_flag(heap, value - 1, seconds, raising)
        raising.synchronize()
        del there
        waited = await_flag(heap, value, seconds, waiting)

    def answer() -> int:
        raise_flag(heap, (ranks.rank + 1) % ranks.size, value, raising)
        raising.synchronize()
        waiting.synchronize()
        return int(waited.item())

    nanoseconds: list[int] = []
    try:
        _, troubles = together.tried(wait)
        if not troubles:
            nanoseconds, troubles = together.tried(answer)
    finally:
        waiting.synchronize()  # a kernel that still waits writes into `waited`
    if troubles:
        raise RuntimeError(f"pmoe: the probe of a symmetric heap: {'; '.join(troubles)}")
    return None if min(nanoseconds) < 0 else max(nanoseconds) / 1e9
