"""What the engine asks of NCCL, by one rank or several; over gloo and the CPU in rehearsals.

Each check ends by itself on a healthy machine; the ladder ends it on another.
"""

from __future__ import annotations

import datetime
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from pmoe.comm.shared_gpu import shared_gpu_environment

SECONDS = 15
PATIENCE = 3
"""How many times longer ranks may take that share a GPU: their processes take turns."""
ROWS, COLUMNS = 840, 256
"""By any number of ranks up to 8, rows can be split evenly."""
SLEEP = 50_000_000
"""Cycles: 25 ms at 2 GHz."""


@dataclass(frozen=True)
class Job:
    """The ranks of a check. gpus: of this machine; 0 for ranks on the CPU.

    Where there are fewer GPUs than ranks, ranks share them: each has the variables of
    `pmoe.comm.shared_gpu`.
    """

    backend: str
    num_ranks: int
    gpus: int
    version: tuple[int, ...] = (0,)

    @property
    def is_shared(self) -> bool:
        return 0 < self.gpus < self.num_ranks

    @property
    def patience(self) -> int:
        return PATIENCE if self.is_shared else 1

    def environment(self, rank: int) -> dict[str, str]:
        return shared_gpu_environment(rank, self.version) if self.is_shared else {}

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.gpus) if self.gpus else torch.device("cpu")


def check(name: str, ranks: str = "1") -> None:
    """Runs a check over NCCL. Raises what a rank raised.

    ranks: how many, at least; with 4, one for each GPU, up to 8.
    """
    gpus = torch.cuda.device_count()
    num_ranks = max(4, min(gpus, 8)) if ranks == "4" else int(ranks)
    run(name, Job("nccl", num_ranks, gpus, tuple(torch.cuda.nccl.version()[:3])))


def run(name: str, job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (job, name, os.path.join(folder, "rendezvous"))
        if job.num_ranks == 1:
            one_rank(0, *arguments)
        else:
            multiprocessing.spawn(one_rank, arguments, nprocs=job.num_ranks)


def one_rank(rank: int, job: Job, name: str, rendezvous: str) -> None:
    os.environ.update(job.environment(rank))  # before CUDA and NCCL are used
    device = job.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        job.backend, init_method=f"file://{rendezvous}", rank=rank, world_size=job.num_ranks,
        timeout=datetime.timedelta(seconds=SECONDS * job.patience),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    if name == "missing_peer":
        missing_peer(device, seconds=4 * job.patience)
    else:
        CHECKS[name](device)
    if name not in LEFT_BROKEN:
        dist.destroy_process_group()


class OfCPU:
    """What the checks take of torch.cuda, for a device on which work is done when the call returns."""

    Stream = torch.cpu.Stream
    stream = staticmethod(torch.cpu.stream)
    current_stream = staticmethod(torch.cpu.current_stream)
    synchronize = staticmethod(torch.cpu.synchronize)

    class Event:
        """It is over as soon as it is recorded."""

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return True

    @staticmethod
    def _sleep(cycles: int) -> None:
        """Nothing runs beside the host that could sleep."""


def streams_of(device: torch.device) -> Any:
    return torch.cuda if device.type == "cuda" else OfCPU


def splits(rank: int, num_ranks: int, empty: str) -> list[int]:
    """Rows that ``rank`` sends to each. empty: "all", "none", "to me", or "but one"."""
    sizes = {
        "none": lambda peer: ROWS, "all": lambda peer: 0,
        "to me": lambda peer: ROWS if peer != 0 else 0,  # nobody sends to rank 0
        "but one": lambda peer: ROWS if (rank, peer) == (num_ranks - 1, 0) else 0,
    }  # fmt: skip
    return [sizes[empty](peer) for peer in range(num_ranks)]


def exchange(device: torch.device, empty: str, group: dist.ProcessGroup | None = None) -> None:
    """Raises AssertionError where a row is not its sender's."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent = splits(rank, num_ranks, empty)
    received = [splits(peer, num_ranks, empty)[rank] for peer in range(num_ranks)]
    rows = torch.full((sum(sent), COLUMNS), float(rank + 1), device=device)
    out = torch.full((sum(received), COLUMNS), float("nan"), device=device)
    dist.all_to_all_single(out, rows, received, sent, group=group)
    wanted = torch.repeat_interleave(torch.arange(1.0, num_ranks + 1), torch.tensor(received))
    assert torch.equal(out.cpu(), wanted.unsqueeze(1).expand(-1, COLUMNS)), f"wrong rows, splits {empty!r}"


def zero_rows(device: torch.device) -> None:
    """Messages without rows, of some ranks and of all, between others that have some."""
    for empty in ("none", "to me", "all", "but one", "none"):
        exchange(device, empty)


def first_use(device: torch.device) -> None:
    """Uses a communicator for the first time in the middle of a step.

    The device is busy on another stream, and another communicator is in use. Making the new one must not
    wait for work that waits for it.
    """
    group = dist.new_group(list(range(dist.get_world_size())))
    cuda = streams_of(device)
    with cuda.stream(cuda.Stream()):
        cuda._sleep(SLEEP)
    exchange(device, "none")
    exchange(device, "none", group)
    exchange(device, "but one", group)


def streams(device: torch.device) -> None:
    """Checks that a collective waits for the stream on which it was called, and wait() for the collective.

    An event behind it on a side stream reports its end, and the host does not wait.
    """
    for warm in (False, True):  # at first use kernels are loaded and ranks are connected: that may wait
        held = one_behind_a_sleep(device)
        assert not (warm and held and device.type == "cuda"), "the host was held until a collective was over"


def one_behind_a_sleep(device: torch.device) -> bool:
    """Whether the host was held. Raises AssertionError where the collective did not wait."""
    cuda = streams_of(device)
    side, done = cuda.Stream(), cuda.Event()
    rows = torch.zeros(ROWS, COLUMNS, device=device)
    out = torch.empty_like(rows)
    cuda.synchronize()
    with cuda.stream(side):
        cuda._sleep(SLEEP)
        rows.fill_(3.0)  # read before the sleep is over, it is 0
        dist.all_to_all_single(out, rows, async_op=True).wait()
        doubled = out * 2
        done.record()
    held = done.query()
    cuda.current_stream().wait_event(done)
    assert torch.equal(doubled.cpu(), torch.full((ROWS, COLUMNS), 6.0)), "a collective began too early"
    return held


def rotating_slots(device: torch.device) -> None:
    """Checks two slots that collectives write in turn on one stream, and another stream reads.

    Events order writes and reads. Tensors are freed while another stream reads them, by record_stream.
    """
    cuda = streams_of(device)
    lane, compute = cuda.Stream(), cuda.Stream()
    slots = [torch.full((ROWS, COLUMNS), float("nan"), device=device) for _ in range(2)]
    free = [cuda.Event() for _ in range(2)]
    sums = torch.zeros(12, device=device)
    cuda.synchronize()
    for turn in range(12):
        slot, filled = slots[turn % 2], cuda.Event()
        with cuda.stream(lane):
            lane.wait_event(free[turn % 2])
            rows = torch.full((ROWS, COLUMNS), float(turn), device=device)
            dist.all_to_all_single(slot, rows, async_op=True).wait()
            copied = slot + 1
            filled.record()
        with cuda.stream(compute):
            compute.wait_event(filled)
            cuda._sleep(SLEEP // 20)
            sums[turn] = slot.mean() + copied.mean()
            free[turn % 2].record()
        if device.type == "cuda":
            copied.record_stream(compute)
        del copied, rows
    cuda.synchronize()
    wanted = 2 * torch.arange(12.0) + 1
    assert torch.equal(sums.cpu(), wanted), f"slots were written too early: {sums.tolist()}"


def missing_peer(device: torch.device, seconds: float = 4) -> None:
    """The last rank stays away: the others' work must fail by the group's own timeout, told as an error of
    the work, and an abort must end the collective on the device. Nothing is asked of this process then."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # read where a group is made
    group = dist.new_group(list(range(dist.get_world_size())), timeout=datetime.timedelta(seconds=seconds))
    ones = torch.ones(4, device=device)
    dist.all_reduce(ones, group=group)  # the communicator is there
    if device.type == "cuda":
        torch.cuda.synchronize()
    store = dist.distributed_c10d._get_default_store()
    away = dist.get_world_size() - 1
    if dist.get_rank() == away:
        store.wait([f"failed {rank}" for rank in range(away)], datetime.timedelta(seconds=30))
        os._exit(0)
    try:
        dist.all_reduce(ones, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {str(error)[:300]}")
    else:
        raise AssertionError("a collective ended without one of its ranks")
    finally:
        store.set(f"failed {dist.get_rank()}", "1")
    abort(group, device)
    sys.stdout.flush()
    os._exit(0)  # no destructor of a broken group may wait


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    if device.type != "cuda":
        return
    backend = group._get_backend(device)
    backend.abort()
    torch.cuda.synchronize()
    assert torch.ones(3, device=device).sum().item() == 3, "the device does not work after an abort"


def aborted(device: torch.device) -> None:
    """A group that is aborted with nothing left to do, and the device and another group after it."""
    group = dist.new_group(list(range(dist.get_world_size())))
    exchange(device, "none", group)
    dist.barrier()
    abort(group, device)
    exchange(device, "none")


CHECKS: dict[str, Callable[[torch.device], None]] = {
    "zero_rows": zero_rows,
    "first_use": first_use,
    "streams": streams,
    "rotating_slots": rotating_slots,
    "aborted": aborted,
    "missing_peer": missing_peer,
}
LEFT_BROKEN = ("aborted", "missing_peer")
