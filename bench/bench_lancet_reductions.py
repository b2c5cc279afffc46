"""Data-parallel gradients beside Lancet's passes: how much of their reduction is left to wait for?

    python bench/bench_lancet_reductions.py --ratio 3 5

The model is that of bench_lancet.py, in DistributedDataParallel. The ranks are behind a modelled link, which
all-to-alls and the all-reduces of dense gradients share. It is so slow that both all-to-alls of a layer's
pass take --ratio times as long as the forward of its experts. Three ways to run the model take turns:

    eager        the layer's own pipeline
    at the end   torch.compile(model, backend="pmoe"); gradients are handed over when the graph has ended
    planned      the same; gradients are handed over where the plan of the graph says

For each way, a step is also timed in which gradients are not reduced (no_sync):

    exposed reduction    = step - step without reduction, the median over the rounds
    exposed all-to-all   = seconds for which a step without reduction waits for the link
    exposed together     = their sum

A backward pass takes at least the seconds in which the link carries its messages. If they are more than the
pass takes without reduction, that much of the reduction is exposed whatever the order is:

    bound of the exposed reduction = seconds of the link in backward - backward without reduction; at least 0

What another order of messages could save is at most the time in which the link is idle:

    idle link = backward - seconds of the link in backward
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.bench_lancet import WARM_UP, Setting, Waits, keep, slowed
from bench.links import INFINITE, launch
from bench.timing import OUT, Timing, interleaved, table
from examples.lm_model import VOCABULARY, ByteGPT
from pmoe.experts.marks import is_expert
from pmoe.graph import hand_over, run
from pmoe.graph.instructions import COMMUNICATE, Instruction, exposed_seconds, total_seconds

EAGER, AT_THE_END, PLANNED = "eager", "at the end", "planned"
WAYS = (EAGER, AT_THE_END, PLANNED)
NOT_REDUCED = ", not reduced"


@dataclass
class Steps:
    """Measurements of one kind of step on this rank, one entry a step. Times are seconds.

    backward: of the backward pass.
    waits: for which the step waited for the link to carry all-to-alls.
    sent_bytes: bytes that the rank sent in the backward pass.
    """

    backward: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)


@dataclass
class Way:
    """One way to run the model.

    begun: when each bucket began in the last backward pass, in seconds from the begin of the pass.
    """

    model: ByteGPT
    wrapper: DistributedDataParallel
    begun: list[float] = field(default_factory=list)


class Rank:
    """The ways of one rank, and a step of each."""

    def __init__(self, link: Any, setting: Setting, bucket_mb: float, n: int) -> None:
        self.link, self.waits = link, Waits()
        self.ways = dict[str, Way]()
        self.steps = dict[str, Steps]()
        generator = torch.Generator().manual_seed(dist.get_rank())
        sizes = (setting.sequences, setting.context)
        self.x, self.target = (torch.randint(0, VOCABULARY, sizes, generator=generator) for _ in range(2))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        names_of = hand_over.GraphInputs.names_of
        for name in WAYS:
            model = pmoe.parallelize(setting.model(n if name == EAGER else False), mesh)
            call: Any = model
            if name != EAGER:
                torch._dynamo.reset()
                call = pmoe.parallelize(torch.compile(model, backend="pmoe"), mesh)
            wrapper = DistributedDataParallel(call, bucket_cap_mb=bucket_mb, broadcast_buffers=False)
            way = Way(model, wrapper)
            wrapper.register_comm_hook(way.begun, noted)
            self.ways[name] = way
            self.steps |= {name: Steps(), name + NOT_REDUCED: Steps()}
            known = names_of if name != AT_THE_END else lambda *_: {}
            with mock.patch.object(hand_over.GraphInputs, "names_of", known):
                for _ in range(WARM_UP + 1):
                    self.step(name)

    def step(self, name: str) -> None:
        """Runs a step of a way. With the suffix `NOT_REDUCED`, gradients are not reduced."""
        way = self.ways[name.removesuffix(NOT_REDUCED)]
        steps = self.steps[name]
        way.model.zero_grad(set_to_none=True)
        waited = self.waits.link
        way.wrapper.require_backward_grad_sync = not name.endswith(NOT_REDUCED)  # as in no_sync
        loss = self.loss(way)
        way.begun.clear()
        self.link.reset_bytes_sent()
        begin = time.perf_counter()
        loss.backward()
        steps.backward.append(time.perf_counter() - begin)
        way.begun[:] = [moment - begin for moment in way.begun]
        steps.waits.append(self.waits.link - waited)
        steps.sent_bytes.append(self.link.bytes_sent)

    def loss(self, way: Way) -> Tensor:
        y = way.wrapper(self.x)
        loss: Tensor = F.cross_entropy(y.flatten(0, 1), self.target.flatten())
        return loss + 0.01 * way.model.auxiliary_loss()

    def forget(self) -> None:
        """Drops the measurements of the steps so far."""
        self.steps = {name: Steps() for name in self.steps}


def noted(begun, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    begun.append(time.perf_counter())
    return allreduce_hook(None, bucket)


def row_of(
    name: str, times: Mapping[str, Timing], steps: Mapping[str, Steps], begun: Sequence[float], rate: float
) -> dict[str, Any]:
    """Returns the results of a way (see the top of the file), in milliseconds.

    times: seconds of each kind of step.
    steps: this rank's measurements of each kind of step.
    begun: when each bucket began in the last backward pass, in seconds.
    rate: of the link, in bytes a second.
    """
    reduced, plain = steps[name], steps[name + NOT_REDUCED]
    pairs = zip(times[name].samples, times[name + NOT_REDUCED].samples, strict=True)
    reduction = statistics.median(a - b for a, b in pairs)
    waits = statistics.median(plain.waits)
    backward, plain_backward = statistics.median(reduced.backward), statistics.median(plain.backward)
    link = statistics.median(reduced.sent_bytes) / rate
    return {
        "way": name,
        "step ms": 1e3 * times[name].median,
        "exposed reduction ms": 1e3 * reduction,
        "its bound ms": 1e3 * max(0.0, link - plain_backward),
        "exposed all-to-all ms": 1e3 * waits,
        "together ms": 1e3 * (reduction + waits),
        "backward ms": 1e3 * backward,
        "not reduced ms": 1e3 * plain_backward,
        "link in it ms": 1e3 * link,
        "idle link ms": 1e3 * (backward - link),
        "first bucket %": 100 * begun[0] / reduced.backward[-1],
        "half of them %": 100 * begun[len(begun) // 2] / reduced.backward[-1],
    }


def predicted(instructions: Sequence[Instruction]) -> dict[str, float]:
    """Returns what the plan predicts for a backward pass, in milliseconds."""
    on_link = [instruction for instruction in instructions if instruction.lane == COMMUNICATE]
    return {
        "backward ms": 1e3 * total_seconds(instructions),
        "exposed ms": 1e3 * exposed_seconds(instructions),
        "all-to-alls ms": 1e3
        * sum(instruction.seconds for instruction in on_link if instruction.communicates),
        "reductions ms": 1e3 * sum(instruction.seconds for instruction in on_link if instruction.reduces),
    }


def work(link: Any, setting: Setting, folder: str, rounds: int, bucket_mb: float, n: int) -> dict[str, Any]:
    """Returns the measurements of a rank."""
    os.environ["PMOE_CACHE"] = folder
    link.holds_all_reduces = True
    _, rate = slowed(link, setting)
    rank = Rank(link, setting, bucket_mb, n)
    rank.forget()
    times = interleaved({name: lambda name=name: rank.step(name) for name in rank.steps}, rounds)
    for name in WAYS:
        rank.step(name)
    gradients = [
        [parameter.grad for parameter in way.model.parameters() if not is_expert(parameter)]
        for way in rank.ways.values()
    ]
    (program,) = (
        program for key, program in run.PROGRAMS.items() if key[0] == "backward" and program.reductions
    )
    return {
        "setting": asdict(setting),
        "bytes_per_second": rate,
        "dense_bytes": sum(gradient.nbytes for gradient in gradients[0]),
        "bucket_mb": bucket_mb,
        "ways": {
            name: row_of(name, times, rank.steps, way.begun, rate) | {"seconds": times[name]}
            for name, way in rank.ways.items()
        },
        "not reduced": {name: times[name + NOT_REDUCED] for name in WAYS},
        "predicted": predicted(program.instructions),
        "ranges": [asdict(range_) for range_ in program.plan.ranges],
        "gradients differ": max(
            float((a - b).abs().max() / a.abs().max())
            for other in gradients[1:]
            for a, b in zip(gradients[0], other, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", type=float, nargs="+", default=[3.0], help="X of the link")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--bucket-mb", type=float, default=1.0, help="bucket_cap_mb of the wrapper")
    parser.add_argument("--n", type=int, default=4, help="chunks of the layer's own pipeline")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for ratio in args.ratio:
        setting = Setting(ratio=ratio, d_model=args.d_model, d_hidden=4 * args.d_model, context=args.context)
        with tempfile.TemporaryDirectory() as folder:
            values = (setting, folder, args.rounds, args.bucket_mb, args.n)
            results = launch(2, work, "modelled", INFINITE, values, timeout_seconds=1700)[0]
        print(f"\n{ratio:g} X")
        ways = results["ways"].values()
        print(table([{key: value for key, value in row.items() if key != "seconds"} for row in ways]))
        print(
            {key: value for key, value in results.items() if key not in ("ways", "not reduced")}, flush=True
        )
        keep(args.out / "lancet_reductions.json", f"{ratio:g}x", results)


if __name__ == "__main__":
    main()
