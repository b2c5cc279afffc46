"""Before any kernel of pmoe's products: a context, copies, and what the driver has loaded."""

from __future__ import annotations

import threading

import torch

from pmoe.kernels import extension
from tests.gpu.ladder.machine import this_machine
from tests.gpu.ladder.tiles import demand_nothing, find_tile


def check_copies() -> None:
    """Through pinned memory and without; PyTorch runs a kernel of its own."""
    torch.cuda.init()
    values = torch.arange(100_000, dtype=torch.int32)
    for given in (values, values.pin_memory()):
        assert torch.equal(given.to("cuda", non_blocking=True).cpu(), values), "a copy out and back differs"
    assert int(values.to("cuda").sum(dtype=torch.int64)) == int(values.sum(dtype=torch.int64))
    free, total = torch.cuda.mem_get_info()
    print(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free")


def check_extension() -> None:
    """One kernel is asked what all are compiled for."""
    path, reason = extension.path(torch.device("cuda", 0))
    assert path is not None, reason
    probe = extension.on_device(0).kernels[0]
    print(f"kernels for {path}, {probe.name} runs {probe.runs}")


def check_thread(path: str) -> None:
    """A first launch from a thread in which nothing has made a context, as autograd's is."""
    machine = this_machine(path)
    found: list[dict[str, str | None] | Exception] = []

    def run() -> None:
        try:
            found.append(find_tile(machine, "forward"))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    demand_nothing(found[0])
