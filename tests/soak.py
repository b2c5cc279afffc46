"""Runs for long and looks at what is left behind: python -m tests.soak --steps 10000

Five layers take turns on two ranks, with token counts, skew and options that change from step to step. Each
first learns its choices. After the first steps resident memory may grow by less than 3 %, file descriptors,
threads and Python's objects not at all.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import random
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing

import pmoe

D_MODEL, D_HIDDEN, NUM_EXPERTS = 64, 128, 8

COUNTS = (0, 1, 2, 7, 31, 64, 100, 333, 500, 517, 1023, 1024, 1200)
"""Tokens of a rank: few, for what is learnt and agreed of each number is kept."""

KINDS: dict[str, dict[str, Any]] = {
    "searched": {"pipeline": True, "memory_reuse": True},
    "rotating": {"pipeline": 4, "memory_reuse": "S4", "shared_expert": 128, "top_k": 2},
    "solved": {"pipeline": "solve", "top_k": 2, "gate": "noisy_topk"},
    "padded": {"pipeline": 2, "memory_reuse": "S2", "pad_to_capacity": True, "capacity_factor": 1.5},
    "sent once": {"pipeline": 2, "top_k": 2, "send_once": True, "expert": "swiglu"},
}

CHANGES: dict[str, tuple[Any, ...]] = {
    "pipeline": (True, 1, 2, 3, 8),
    "memory_reuse": (False, True, "S1", "S2", "S3", "S4"),
}
CHANGED = ("searched", "sent once")
"""What these layers are set to in turn."""


def bounded_caches() -> list[Any]:
    """The caches of pmoe's functions that hold so many results at most. Others' must not grow."""
    caches = (each for each in gc.get_objects() if isinstance(each, functools._lru_cache_wrapper))
    ours = (each for each in caches if str(each.__module__).startswith("pmoe."))
    return [each for each in ours if each.cache_parameters()["maxsize"] is not None]


@dataclass(frozen=True)
class Held:
    """Of a process: resident bytes, open files, threads, and objects that Python's collector knows."""

    resident: int
    files: int
    threads: int
    objects: int

    @staticmethod
    def now() -> Held:
        """Without what is only not collected yet: schedules in caches that have a bound and are not full, and
        blocks of the pools that nobody holds any more."""
        for cache in bounded_caches():
            cache.cache_clear()
        pool = pmoe.pool()
        _ = pool.device.kept_bytes, pool.host.bytes_in_use  # who asks makes them collect
        gc.collect()
        return Held(
            resident=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            objects=sum(type(each) is not Held for each in gc.get_objects()),  # without the readings
        )

    def grown(self, first: Held) -> list[str]:
        """What must not have grown since ``first``, and has."""
        found = [
            f"{name} from {getattr(first, name)} to {getattr(self, name)}"
            for name in ("files", "threads", "objects")
            if getattr(self, name) > getattr(first, name)
        ]
        if self.resident > 1.03 * first.resident:
            found.insert(0, f"resident bytes from {first.resident} to {self.resident}")
        return found


def tokens(dice: random.Random, rank: int, world: int, is_even: bool) -> torch.Tensor:
    """This rank's: none now and then, and in some steps nearly all alike, so that few experts get them.

    is_even: as many on every rank.
    """
    counts = [dice.choice(COUNTS) for _ in range(world)]
    counts = counts[:1] * world if is_even else counts
    spread = dice.choice((0.01, 0.3, 1.0))
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30) + rank)
    alike = torch.randn(1, D_MODEL, generator=generator)
    x = alike + spread * torch.randn(counts[rank], D_MODEL, generator=generator)
    return x.requires_grad_()


def step(dice: random.Random, layers: dict[str, pmoe.MoELayer], rank: int, world: int) -> None:
    """One layer's call, alike on all ranks but for the tokens."""
    name = dice.choice(list(layers))
    layer = layers[name]
    if name in CHANGED:
        option = dice.choice(list(CHANGES))
        setattr(layer, option, dice.choice(CHANGES[option]))
    x = tokens(dice, rank, world, name == "padded")
    if dice.random() < 0.1:
        with torch.no_grad():
            layer(x)
        return
    loss = layer(x).square().sum() + layer.l_aux
    if dice.random() < 0.05:
        return  # a forward pass whose backward never comes
    loss.backward()
    if dice.random() < 0.3:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 1e-6 * parameter.grad.clamp(-1, 1)
        layer.zero_grad(set_to_none=True)


def learn(layers: dict[str, pmoe.MoELayer], rank: int) -> None:
    """Every choice that the steps will ask for, once: what is learnt is kept, and is no leak."""
    for (name, layer), count in itertools.product(layers.items(), COUNTS):
        x = torch.randn(count, D_MODEL, generator=torch.Generator().manual_seed(rank))
        for values in itertools.product(*CHANGES.values()) if name in CHANGED else [None]:
            for option, value in zip(CHANGES, values or (), strict=False):
                setattr(layer, option, value)
            layer(x).sum().backward()
            with torch.no_grad():
                layer(x)
        layer.zero_grad(set_to_none=True)


def settle(layers: dict[str, pmoe.MoELayer]) -> None:
    """The same last call of every layer, with the options that it was made with: what it holds is alike."""
    for name, layer in layers.items():
        for option in CHANGES if name in CHANGED else ():
            setattr(layer, option, KINDS[name].get(option, False))
        layer(torch.ones(64, D_MODEL)).sum().backward()
        layer.zero_grad(set_to_none=True)


def work(rank: int, world: int, init: str, steps: int, first: int, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init}", rank=rank, world_size=world)
    torch.manual_seed(seed)
    layers = {name: pmoe.MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, **given) for name, given in KINDS.items()}
    dice, began, start = random.Random(seed), time.monotonic(), None
    learn(layers, rank)
    for at in range(1, steps + 1):
        step(dice, layers, rank, world)
        if at % first == 0:
            settle(layers)
            held = Held.now()
            start = start or held
            if rank == 0:
                print(f"{at:8d} steps {time.monotonic() - began:6.0f} s  {astuple(held)}", flush=True)
    assert start is not None
    settle(layers)
    grown = Held.now().grown(start)
    dist.destroy_process_group()
    if grown:
        sys.exit(f"rank {rank}, between steps {first} and {steps}: " + "; ".join(grown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="python -m tests.soak")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=500, help="after these it must not grow")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("held: resident bytes, files, threads, objects", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PMOE_CACHE"] = folder
        torch.multiprocessing.start_processes(
            work,
            (given.ranks, f"{folder}/init", given.steps, given.first, given.seed),
            nprocs=given.ranks,
            start_method="spawn",
        )


if __name__ == "__main__":
    main()
