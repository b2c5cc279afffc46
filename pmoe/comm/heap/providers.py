"""Makes symmetric heaps: for virtual ranks of a process, for the processes of a node, or over NVSHMEM.

A symmetric heap is device memory with the same layout on every rank. The other ranks can address this memory,
so fused kernels write rows straight to their destination.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pmoe.comm.agreement import gathered
from pmoe.comm.group_options import backend_options, timeout_of
from pmoe.comm.heap.nvshmem import NvshmemMemory
from pmoe.comm.ranks import Ranks
from pmoe.kernels import heap as heap_module
from pmoe.kernels.comet.launcher import spare_blocks
from pmoe.kernels.heap import WAIT_SECONDS, DeviceMemory, Heap, HeapError, HeapShape, open_heaps
from pmoe.warn import warn_once


def virtual_heaps(
    shape: HeapShape, device: torch.device, *, memory: DeviceMemory | None = None
) -> list[Heap]:
    """Returns symmetric heaps for W virtual ranks: this single process acts as all ranks, on one device.

    A symmetric heap is device memory with the same layout on every rank, which kernels of all ranks read and
    write. These heaps are for tests and measurements. The caller must close all of them, after the last use
    of any of them.

    shape: the sizes of each heap; W is ``shape.num_ranks``.
    device: the device.
    memory: where the memory comes from; None means CUDA.

    Raises RuntimeError, with the rank and the number of bytes, if there is not enough memory. All memory is
    freed then.
    """
    memory = memory or DeviceMemory()
    bound = wait_seconds(Ranks.single())
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
                peer_addresses=tuple(bases),
                bound_seconds=bound,
                release=partial(_free, memory, device, base),
            )
            for rank, base in enumerate(bases)
        ]
    except RuntimeError as error:
        for base in bases:
            quietly(memory.free, device, base)
        who = f"rank {len(bases)}: " if len(bases) < shape.num_ranks else ""
        raise RuntimeError(
            f"pmoe: could not make heaps of {shape.num_ranks} virtual ranks: {who}{error}"
        ) from error
    open_heaps.update(heaps)
    return heaps


def process_heap(
    ranks: Ranks, shape: HeapShape, device: torch.device, *, memory: DeviceMemory | None = None
) -> Heap:
    """Returns this rank's symmetric heap, and opens the heaps of the other ranks by CUDA IPC. Collective.

    A symmetric heap is device memory with the same layout on every rank, which kernels of all ranks read and
    write. If one rank fails, all ranks go through the same collectives, raise the same error and free their
    memory:

    - ValueError, which names the values of all ranks: the ranks ask for heaps of different shapes, dtypes or
      sizes in bytes, have loaded different kernels, or are not all on one node.
    - RuntimeError, which names the rank: there is not enough memory, or the memory of another rank cannot be
      opened.

    ranks: the ranks of the layer, all on one node.
    shape: the sizes of the heap, the same on all ranks.
    device: this rank's device.
    memory: where the memory comes from; None means CUDA.
    """
    builder = _HeapBuilder(ranks, shape, device, memory or DeviceMemory())
    builder.agree(one_node=True)
    return builder.build()


def nvshmem_heap(ranks: Ranks, shape: HeapShape, device: torch.device) -> Heap:
    """Returns this rank's symmetric heap in NVSHMEM's memory, and opens the other ranks' heaps. Collective.

    A symmetric heap is device memory with the same layout on every rank. Kernels read and write the other
    ranks' heaps by loads and stores. So all ranks must be on one node, or on nodes that NVLink connects. A
    process can use NVSHMEM with one group of ranks only. So far this function has been run with a single
    process only.

    FlashDMoE's kernels may also send by NVSHMEM's puts, if `pmoe._nvshmem` was built
    (`pmoe.kernels.heap.has_puts`). Then loads and stores need not reach all ranks. A rank that they do not
    reach has address 0, and all ranks' heaps have room for outgoing rows. If rank a does not reach rank b,
    then rank b does not use loads and stores for rank a, either. NVSHMEM's memory is freed when the heap is
    closed; NVSHMEM itself ends with the process.

    ranks: the ranks of the layer.
    shape: the sizes of the heap, the same on all ranks.
    device: this rank's device.

    Raises on every rank:

    - ValueError, which names the values of all ranks: the ranks ask for heaps of different shapes, dtypes or
      sizes in bytes, or have different kernels or versions of NVSHMEM.
    - RuntimeError, which names the rank: there is not enough memory, NVSHMEM is not built in or was started
      for another group already, or the rank cannot read and write another rank's memory by loads and stores.
    """
    memory = NvshmemMemory(ranks)
    builder = _HeapBuilder(ranks, shape, device, memory)
    builder.agree(one_node=False)
    ids = builder.attempt(memory.give_id)
    builder.attempt(lambda: memory.start(builder.device, ids[0]))
    if shape.d_hidden and heap_module.has_puts():
        builder.stage_for(builder.attempt(lambda: memory.mapped(builder.device)))
        if builder.shape.is_staged:  # the same on all ranks
            builder.attempt(lambda: memory.start_puts(builder.device))
    return builder.build()


class NoHeapError(RuntimeError):
    """The error of all ranks if they have found out together that they cannot have a symmetric heap.

    Every rank of the group raises it, with the same text. A collective that fails, for example after a
    timeout, raises another error, because perhaps it fails on one rank only.
    """


class CollectiveSteps:
    """Runs steps that all ranks of a group take together. If a step fails on one rank, all ranks raise.

    ranks: the ranks of the group.
    device: the device on which NCCL's collectives run.
    """

    ranks: Ranks
    device: torch.device

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.device = device

    def gather(self, value: object) -> list[Any]:
        """Returns the values of all ranks, in order of rank. A collective, which is also a barrier.

        value: this rank's value: anything that can be pickled.
        """
        on_cuda = self.device.type == "cuda"
        with torch.cuda.device(self.device) if on_cuda else contextlib.nullcontext():  # for NCCL
            return gathered(self.ranks, value, stage="the exchange about a symmetric heap")

    def attempt(self, work: Callable[[], object], undo: Callable[[], None] = lambda: None) -> list[Any]:
        """Calls work() on every rank and returns the results of all ranks, in order of rank. Collective.

        If work() raises on any rank, every rank calls undo(). Then every rank raises the same error, with the
        texts of the failed ranks' errors: a ValueError if any rank raised a ValueError, else a NoHeapError.

        If the collective itself fails, its own error is raised, perhaps on one rank only.
        """
        mine: tuple[object, str | None, bool]
        try:
            mine = (work(), None, False)
        except Exception as error:
            mine = (None, str(error), isinstance(error, ValueError))
        values, whys, are_values = zip(*self.gather(mine), strict=True)
        troubles = [f"rank {rank}: {why}" for rank, why in enumerate(whys) if why is not None]
        if troubles:
            undo()
            kind = ValueError if any(are_values) else NoHeapError
            raise kind(f"pmoe: no symmetric heap: {'; '.join(troubles)}")
        return list(values)


class _HeapBuilder(CollectiveSteps):
    """Builds a symmetric heap of several processes, and frees its memory if a step fails.

    base: address of this rank's memory; None before it is allocated.
    opened: for each peer, by rank, the address at which this process can read and write the peer's memory.
    beyond: ranks whose memory is not mapped, because kernels send to them by puts.
    heap: the heap; None before all peers' memory is open.
    bound_seconds: how long a kernel may wait for a peer.
    """

    bound_seconds: float

    def __init__(self, ranks: Ranks, shape: HeapShape, device: torch.device, memory: DeviceMemory) -> None:
        super().__init__(ranks, device)
        self.shape = shape
        self.memory = memory
        self.base: int | None = None
        self.opened: dict[int, int] = {}
        self.beyond: set[int] = set()
        self.heap: Heap | None = None

    def agree(self, *, one_node: bool) -> None:
        """Raises ValueError or RuntimeError, on every rank, if the ranks cannot have a heap together.

        All ranks must ask for a heap of the same sizes, dtype and number of bytes, and must have loaded the
        same kernels.

        one_node: whether all ranks must also be on one node.
        """
        size = self.ranks.size
        facts, hosts = zip(*self.attempt(self.facts), strict=True)
        if differing := [name for name in facts[0] if len({values[name] for values in facts}) > 1]:
            numbers = "; ".join(
                f"rank {rank}: {', '.join(f'{name} {values[name]}' for name in differing)}"
                for rank, values in enumerate(facts)
            )
            raise ValueError(
                "all ranks of a symmetric heap must have the same shape, dtype and loaded kernels, not "
                f"{numbers}"
            )
        if self.shape.num_ranks != size:
            raise ValueError(f"num_ranks ({self.shape.num_ranks}) must be the size of the group ({size})")
        if one_node and len(set(hosts)) > 1:
            nodes = "; ".join(f"rank {rank}: {host}" for rank, host in enumerate(hosts))
            raise ValueError(
                f"all ranks of a symmetric heap must be on one node (nvshmem_heap goes beyond), not {nodes}"
            )
        warn_where_there_is_no_room(spare_blocks(size) if size > 1 else 0)

    def facts(self) -> tuple[dict[str, object], str]:
        """Returns {name: value that must be equal on all ranks}, and the name of this rank's node.

        The values are the heap's sizes, its dtype, its number of bytes, and the code of the loaded kernels.
        Two ranks are on one node if their node names are equal.

        Raises ValueError if an environment variable is wrong.
        """
        kernels, host = self.memory.place(self.device)
        self.bound_seconds = wait_seconds(self.ranks)
        # This call only checks an environment variable. It stands here, because the next exchange sends
        # errors of this method to the other ranks.
        spare_blocks(self.ranks.size)
        sizes = asdict(self.shape) | {"dtype": str(self.shape.dtype).removeprefix("torch.")}
        return sizes | {"bytes": self.shape.bytes, "kernels": kernels, "puts": heap_module.has_puts()}, host

    def stage_for(self, mapped: Sequence[Sequence[bool]]) -> None:
        """Prepares the heap for ranks whose memory cannot be mapped: kernels send to these by NVSHMEM's puts.

        This rank will not open the memory of a rank if one of the two cannot map the other's memory. If there
        are any such ranks in the group, the heaps of all ranks get room for outgoing rows, so that all heaps
        are the same. If all ranks can map each other's memory, nothing changes.

        mapped: mapped[rank][peer] is whether the rank can map the peer's memory.
        """
        own = self.ranks.rank
        self.beyond = {
            peer for peer in range(self.ranks.size) if not (mapped[own][peer] and mapped[peer][own])
        }
        if not all(all(row) for row in mapped):
            self.shape = replace(self.shape, is_staged=True)

    def build(self) -> Heap:
        """Allocates this rank's memory, opens the memory of all peers, and returns the heap. Collective."""
        handles = self.attempt(self.allocate, self.release)
        self.attempt(lambda: self.open_peers(handles), self.release)
        assert self.heap is not None
        open_heaps.add(self.heap)
        return self.heap

    def allocate(self) -> bytes:
        """Allocates this rank's memory.

        Returns a handle with which peers open this memory; b"" if there are no peers.
        """
        self.base = _allocate(self.memory, self.device, self.shape)
        return self.memory.handle(self.device, self.base) if self.ranks.size > 1 else b""

    def open_peers(self, handles: Sequence[bytes]) -> None:
        """Opens the memory of all peers and makes the heap.

        handles: for each rank, the handle of its memory, which `allocate` has returned.
        """
        assert self.base is not None
        addresses = []
        for rank, handle in enumerate(handles):
            if rank == self.ranks.rank:
                addresses.append(self.base)
                continue
            if rank in self.beyond:
                addresses.append(0)
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
            peer_addresses=tuple(addresses),
            bound_seconds=self.bound_seconds,
            release=self.release,
        )

    def release(self) -> None:
        """Closes the peers' memory, then frees this rank's memory. Collective.

        Between the two steps ranks exchange a value, as a barrier: a rank frees its memory only when no peer
        has this memory open. With NVSHMEM, freeing is collective. So if some rank has no memory to free, no
        rank frees its memory.
        """
        quietly(heap_module.synchronize, self.device)
        for peer in self.opened.values():
            quietly(self.memory.close, self.device, peer)
        having = self.gather(self.base is not None)
        if self.base is not None and (all(having) or not self.memory.collective):
            quietly(self.memory.free, self.device, self.base)


def _allocate(memory: DeviceMemory, device: torch.device, shape: HeapShape) -> int:
    """Returns the address of new memory for a heap of this shape.

    Raises RuntimeError with the number of bytes if there is not enough memory.
    """
    try:
        return memory.allocate(device, shape.bytes)
    except RuntimeError as error:
        raise RuntimeError(f"could not allocate {shape.bytes} bytes on {device}: {error}") from error


def _free(memory: DeviceMemory, device: torch.device, base: int) -> None:
    quietly(heap_module.synchronize, device)
    quietly(memory.free, device, base)


def quietly(work: Callable[..., object], *args: object) -> None:
    """Calls work(*args), which frees memory. If it raises an error, only a warning is issued.

    So this error does not replace an error that was raised before.
    """
    try:
        work(*args)
    except Exception as error:
        warnings.warn(f"pmoe: could not close a heap: {error}", stacklevel=2)


def call_all(functions: Sequence[Callable[[], None]]) -> None:
    """Calls all functions, in their order. If some raise errors, the first error is raised at the end."""
    errors: list[Exception] = []
    for function in functions:
        try:
            function()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


# ---- for how long kernels wait for their peers


DEFAULT_WAIT_SECONDS = 600.0
"""Largest number of seconds for which a kernel waits for a peer, if the group has no timeout."""

MAX_WAIT_SECONDS = 86400.0
"""Largest number of seconds for which a kernel waits for a peer, if the group's timeout is longer."""


def wait_seconds(ranks: Ranks) -> float:
    """Returns how many seconds a kernel of this rank waits for a peer before it gives up.

    A kernel should wait for a late peer (for example a peer that writes a checkpoint) as long as a collective
    would wait. So the result is the group's timeout, but at most a day; 600 s if the group has no timeout. If
    the environment variable PMOE_WAIT_SECONDS is set, the result is the variable's value, but at most the
    group's timeout.

    Raises ValueError if the variable is not a number of seconds, more than 0 and at most a day.
    """
    text = os.environ.get(WAIT_SECONDS)
    timeout = None if ranks.group is None else timeout_of(ranks.group)
    longest = DEFAULT_WAIT_SECONDS if timeout is None else timeout.total_seconds()
    if text is not None:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_WAIT_SECONDS:
            raise ValueError(
                f"{WAIT_SECONDS} ({text!r}) must be a number of seconds, more than 0 and at most "
                f"{MAX_WAIT_SECONDS:g}"
            )
        return seconds if timeout is None else min(seconds, longest)
    return min(longest, MAX_WAIT_SECONDS)


# ---- heaps that layers share: one for each group, device and shape, where numbers of rows may differ


MakeHeap = Callable[[Ranks, HeapShape, torch.device], Heap]
HeapsByKey = dict[tuple[torch.device, HeapShape], Heap]

_heaps: weakref.WeakKeyDictionary[dist.ProcessGroup, HeapsByKey] = weakref.WeakKeyDictionary()
_without_group: HeapsByKey = {}
"""The heaps of a single rank, which has no process group."""


def heaps_of(ranks: Ranks) -> HeapsByKey:
    """Returns the symmetric heaps that layers of this group share, oldest first.

    The key of a heap is its device and its shape without numbers of rows. A smaller heap that CUDA graphs
    still use has its whole shape in its key.
    """
    return _without_group if ranks.group is None else _heaps.setdefault(ranks.group, {})


def heap_for(ranks: Ranks, device: torch.device, shape: HeapShape, *, make: MakeHeap = process_heap) -> Heap:
    """Returns a symmetric heap for a layer. Several layers may share one heap.

    A symmetric heap is device memory with the same layout on every rank, which kernels of all ranks read and
    write.

    Layers share a heap if their group, their device and their shape are the same. Only the numbers of rows in
    the shape (``rows``, ``home_rows``) may differ between these layers: the heap has at least as many rows as
    each of them asks for.

    If the present heap has enough rows for ``shape``, nothing is communicated. Otherwise the call is a
    collective: it closes the present heap on every rank and makes a larger one. So all ranks must pass the
    same ``shape`` in each call. Tensors in a closed heap must not be used any more. If a CUDA graph of any
    rank has captured a launch that uses the heap, it stays open until `close_heaps`.

    make: makes the heap: `process_heap` or `nvshmem_heap`.

    Raises the errors of ``make``, and HeapError if the present heap is broken. If the present heap is too
    small, and a kernel of any rank has waited too long on it, every rank raises HeapError with the reports of
    these ranks. A report is raised once, so the next call makes the larger heap.
    """
    kept = heaps_of(ranks)
    key = (device, replace(shape, rows=0, home_rows=0))
    heap = kept.get(key)
    if heap is not None:
        if heap.shape.holds(shape):
            heap.raise_if_failed()
            return heap
        old = heap.shape
        shape = replace(shape, rows=max(shape.rows, old.rows), home_rows=max(shape.home_rows, old.home_rows))
        may_close = _may_close(heap, ranks)
        kept.pop(key)
        if may_close:
            heap.close()
        else:
            kept[device, old] = heap
    replaced = heap
    heap = kept[key] = make(ranks, shape, device)
    if replaced is not None and replaced.round is not None:
        heap.count_on_device()
    return heap


def _may_close(heap: Heap, ranks: Ranks) -> bool:
    """Returns whether no CUDA graph of any rank uses a heap. A collective: all ranks get the same answer.

    A rank alone cannot tell, because another rank may have captured a graph that it has not.

    Raises HeapError on every rank if a kernel of any rank has waited too long, and no call has raised it yet.
    It must be raised now, because nothing reads the heap's reports once a larger heap has taken its place.
    """
    answers = CollectiveSteps(ranks, heap.device).gather((heap.is_in_graph, heap.new_failure()))
    failures = [failure for _, failure in answers if failure]  # each names its rank
    if failures:
        raise HeapError("; ".join(failures))
    return not any(is_in_graph for is_in_graph, _ in answers)


def close_layer_heaps(ranks: Ranks) -> None:
    """Closes all heaps of fused kernels that the layers of this group share. Collective."""
    kept = heaps_of(ranks)
    heaps = list(kept.values())
    kept.clear()
    call_all([heap.close for heap in heaps])


# ---- room for NCCL's collectives beside fused kernels, which occupy multiprocessors until their peers come


def warn_where_there_is_no_room(spare: int) -> None:
    """Warns once if NCCL may need more multiprocessors than fused kernels leave free.

    A fused kernel occupies its multiprocessors until its peers have sent their rows. If NCCL's collectives
    get too few multiprocessors during this time, ranks may wait for each other in a circle.

    spare: number of multiprocessors that fused kernels leave free. With 0 nothing is checked: by this value
        the user says that no collective runs beside a fused layer.
    """
    if spare and not all(_fits(group, spare) for group in _groups()):
        warn_once(
            f"fused layers leave {spare} multiprocessors free for collectives that run beside them, but NCCL "
            "may need more, or clusters of neighbouring ones: ranks may then wait for each other in a "
            f"circle, until a timeout. On all ranks set NCCL_MAX_CTAS={spare} and NCCL_CGA_CLUSTER_SIZE=0 "
            "(for one group: config.max_ctas and config.cga_cluster_size of ProcessGroupNCCL.Options). Or "
            "set PMOE_SPARE_BLOCKS to another number: to 0 if no collectives run beside fused layers"
        )


def _groups() -> list[dist.ProcessGroup]:
    """Returns all process groups of this process that use NCCL and have several ranks."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    return [group for group in groups if "nccl" in dist.get_backend(group) and dist.get_world_size(group) > 1]


def _fits(group: dist.ProcessGroup, spare: int) -> bool:
    """Returns whether NCCL can run a group's collectives on ``spare`` free multiprocessors of the GPU.

    The answer is yes if NCCL needs at most ``spare`` multiprocessors and uses no thread block clusters. A
    cluster needs neighbouring multiprocessors, and perhaps the free multiprocessors are not neighbours.
    """
    blocks = _asked(group, "NCCL_MAX_CTAS", "max_ctas")
    return 0 <= blocks <= spare and 0 <= _asked(group, "NCCL_CGA_CLUSTER_SIZE", "cga_cluster_size") <= 1


def _asked(group: dist.ProcessGroup, variable: str, field: str) -> int:
    """Returns the value that a user has set for an NCCL option of a group; negative if none is set.

    If none is set, NCCL itself chooses the value.

    group: the process group.
    variable: the environment variable of the option. It overrides the group's own option, as it does in NCCL.
    field: the name of the option in the group's ProcessGroupNCCL.Options.config.
    """
    text = os.environ.get(variable, "")
    if text.isdecimal():
        return int(text)
    return int(getattr(getattr(backend_options(group), "config", None), field, -1))
