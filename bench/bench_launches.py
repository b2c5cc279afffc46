"""How many operations does a forward pass launch, for each of pmoe's ways to run a layer?

    python bench/bench_launches.py

It is FlashDMoE's Table 1.1. The column "how" says where a number comes from:

- profiler: torch's profiler on the CPU, for one rank, float32, top-2 of 8 experts. It counts operations that
  compute or copy, each together with what it calls. Views, allocations and questions about sizes launch
  nothing on a GPU and do not count, but operations that they call do.
- construction: the launches that `pmoe/runners/one_rank.py` and the fused kernels make on one rank of a GPU,
  with the gate's. They are not counted by a profiler here; `bench/bench_alone.py` and
  `bench/bench_flashdmoe.py` count them on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from pmoe.papers.assumptions import printed
from pmoe.text import table

_NAMES = """empty empty_like empty_strided new_empty new_empty_strided resize_ set_ as_strided view
_unsafe_view reshape expand permute transpose t slice select narrow split
split_with_sizes unbind unsqueeze squeeze
detach alias lift_fresh unflatten view_as expand_as item _local_scalar_dense is_nonzero result_type to
contiguous resolve_conj resolve_neg _reshape_alias numpy_T mT chunk flatten unfold diagonal detach_"""
NO_KERNEL = frozenset(f"aten::{name}" for name in _NAMES.split())
CONSTRUCTED = {"one rank's kernels": 6, "fused=True": 5, 'fused="persistent"': 1}
"""Launches on one rank of a GPU: docs/kernels.md, docs/comet.md and docs/flashdmoe.md list them.

One rank's kernels make a seventh launch, a permute, before a wide first product on Hopper.
"""


def operations(n: int) -> list[str]:
    """Returns the names of the operations of a forward pass in n chunks that compute or copy."""
    print(f"n = {n}", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    layer = pmoe.MoELayer(16, 32, num_experts=8, top_k=2, pipeline=n)
    x = torch.randn(64, 16)
    layer(x)
    return launched(lambda: layer(x))


def launched(call: Callable[[], object]) -> list[str]:
    """Returns the names of the operations of a call that compute or copy.

    Operations that are called by another operation of the list are not counted.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    operators: list[str] = []

    def count(event: Any) -> None:
        if event.name.startswith("aten::") and event.name not in NO_KERNEL:
            operators.append(event.name)
            return
        for child in event.cpu_children:
            count(child)

    for event in profiler.events():
        if event.cpu_parent is None:
            count(event)
    return operators


def rows() -> list[tuple[str, str, str]]:
    counted = [(f"pmoe, engine, n = {n}", f"{len(operations(n))}", "profiler") for n in (1, 4, 8)]
    built = [(f"pmoe, {name}", f"{number}", "construction") for name, number in CONSTRUCTED.items()]
    papers = printed("flashdmoe table 1.1").items()
    return [*counted, *built, *((name, f"{number}", "the thesis") for name, number in papers)]


if __name__ == "__main__":
    summary, _, rest = (__doc__ or "").partition("\n\n")
    argparse.ArgumentParser(description=summary, epilog=rest).parse_args()
    print(table([("forward pass", "launches", "how"), *rows()], left=(0, 2)))
