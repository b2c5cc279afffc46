"""What the ranks of tests/gloo/test_machines.py do beside training: a layer over all machines, a checkpoint.

    torchrun ... tests/machine_job.py FOLDER

Each rank writes what it found to FOLDER/rank{rank}.json.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pmoe

TOKENS, SIZES = 24, {"d_model": 8, "d_hidden": 16, "num_experts": 8, "top_k": 2}


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, socket.gethostname())
    results = {"flat": passes("flat"), "hierarchical": passes("hierarchical_2d")}
    worst = max(
        (one - other).abs().max().item() / max(one.abs().max().item(), 1)
        for one, other in zip(*results.values(), strict=True)
    )
    layer = build("hierarchical_2d")
    found = {
        "hosts": hosts,
        "ranks a machine": int(os.environ["LOCAL_WORLD_SIZE"]),
        "nodes": str(layer.dispatch),
        "difference": worst,
        "loaded": loads_what_it_saved(folder / "checkpoints"),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def build(collective: str) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(**SIZES, dtype=torch.float64, dispatch=collective, combine=collective)


def passes(collective: str) -> list[torch.Tensor]:
    """Output and gradients of a rank's own tokens, none of them on rank 1. No argument tells where machines
    end: LOCAL_WORLD_SIZE does."""
    layer, rank = build(collective), dist.get_rank()
    tokens = 0 if rank == 1 else TOKENS
    x = torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    x.requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    tensors = [y.detach(), x.grad, *(each.grad for each in layer.parameters())]
    return [each for each in tensors if each is not None and each.numel()]


def loads_what_it_saved(folder: Path) -> bool:
    """By a folder that all machines see."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    saved, other = (pmoe.parallelize(build("flat"), mesh) for _ in range(2))
    pmoe.save_checkpoint(folder, saved, step=1)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    pmoe.load_checkpoint(folder, other)
    return all(map(torch.equal, saved.parameters(), other.parameters()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
