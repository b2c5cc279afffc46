"""Grouped products on one GPU beside a kernel that holds 16 multiprocessors, as NCCL's collectives do.

    python bench/bench_beside.py [--out build/bench] [--rounds 10]

It runs the first product of Mixtral's experts, for 16384 rows routed at random, in three ways: pmoe's on all
multiprocessors; pmoe's with 16 multiprocessors left free and tiles taken from a counter, as in a pipelined
layer; F.grouped_mm. The holder is another product of pmoe on another stream, with one block on each of 16
multiprocessors.

    alone    milliseconds of the product without the holder.
    held     milliseconds of the product if it begins while the holder runs.
             times: held / alone. If 116 of 132 multiprocessors are left, 1.14 is ideal.
             outlasted: rounds in which the holder ended after the product. In the others it did not hold all
                 the time.
    late     a short kernel of 16 blocks starts while the product runs, as the next chunk's collective does:
             milliseconds from the begin of the product to the end of the short kernel.
             short: milliseconds of the short kernel without the product.
             If late is much less than alone, the kernel found room; if it is alone + short, it waited for the
             product.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.device import file_name, flush_buffer, need_gpu, show_gpu, time_in_turn
from bench.grouped_gemm_cases import DEVICE, MODELS, ROWS, Routed, plain_cases, tile_of
from bench.timing import OUT, Timing, table, write_json
from pmoe.kernels import extension
from pmoe.kernels.gemm import SPARE
from pmoe.kernels.grouped_gemm.launch import BesideCommunication
from pmoe.measure.timing import in_rounds

LEAD_CYCLES = 600_000
"""Cycles for which the device sleeps before timed work: 0.3 ms at 2 GHz.

Meanwhile the holder starts and the host enqueues the timed work.
"""
SHORT_ROWS = 1024

Run = Callable[[], object]


def on_few(run: Run, multiprocessors: int) -> Run:
    """Returns a function that runs the same product on `SPARE` multiprocessors only, as the holder.

    run: the product, on all multiprocessors.
    multiprocessors: number of multiprocessors of the device.
    """

    def beside_spare() -> object:
        with BesideCommunication(multiprocessors - SPARE):
            return run()

    return beside_spare


def leaving_room(run: Run) -> Run:
    def beside() -> object:
        with BesideCommunication():
            return run()

    return beside


class Beside:
    """Runs a timed kernel on the current stream, and another kernel on a second stream at the same time."""

    def __init__(self) -> None:
        self.side, self.flush = torch.cuda.Stream(), flush_buffer()

    def _events(self) -> list[torch.cuda.Event]:
        return [torch.cuda.Event(enable_timing=True) for _ in range(3)]

    def during_holder(self, run: Run, holder: Run) -> list[float]:
        """Times a product that starts while the holder runs on the other stream.

        Returns [seconds of ``run``, 1.0 if the holder ended after ``run``, else 0.0]. With 0.0 the holder did
        not occupy its multiprocessors all the time.
        """
        begin, end, over = self._events()
        self.flush.zero_()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            kept = holder()
            over.record()
        torch.cuda._sleep(LEAD_CYCLES)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        del kept
        return [begin.elapsed_time(end) / 1e3, float(end.elapsed_time(over) > 0)]

    def late(self, run: Run, short: Run) -> list[float]:
        """Times a short kernel that starts on the other stream while a product runs.

        Returns [seconds from the start of the product ``run`` to the end of ``short``].
        """
        begin, _, over = self._events()
        self.flush.zero_()
        torch.cuda._sleep(LEAD_CYCLES)
        begin.record()
        run()
        self.side.wait_event(begin)
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(LEAD_CYCLES // 4)  # time in which the product's blocks start
            kept = short()
            over.record()
        torch.cuda.synchronize()
        del kept
        return [begin.elapsed_time(over) / 1e3]


def measure(rounds: int) -> dict[str, Any]:
    """Returns the measured times of each of the three ways, and those of the short kernel alone."""
    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    path, _ = extension.path(DEVICE)
    assert path is not None
    model = MODELS[0]
    torch.manual_seed(0)
    cases = [
        next(iter(plain_cases(Routed(model, rows), "up", model.d_model, model.d_hidden, tile_of(path))))
        for rows in (ROWS, SHORT_ROWS)
    ]
    run, rival, short = cases[0].run, cases[0].rival, on_few(cases[1].run, multiprocessors)
    ways: dict[str, Run] = {"all multiprocessors": run, f"{SPARE} left free": leaving_room(run)}
    if rival is not None:
        ways["F.grouped_mm"] = rival
    alone = time_in_turn(ways | {"short": short}, rounds, LEAD_CYCLES)
    beside, holder = Beside(), on_few(run, multiprocessors)
    beside_holder = in_rounds(
        [functools.partial(beside.during_holder, run_way, holder) for run_way in ways.values()],
        rounds,
        warm_up=1,
    )
    late = in_rounds(
        [functools.partial(beside.late, run_way, short) for run_way in ways.values()], rounds, warm_up=1
    )
    rows = []
    for name, of_held, of_late in zip(ways, beside_holder, late, strict=True):
        seconds = Timing(tuple(duration for duration, _ in of_held))
        rows.append({
            "way": name,
            "alone": alone[name].median * 1e3,
            "held": seconds.median * 1e3,
            "times": seconds.median / alone[name].median,
            "outlasted": int(sum(stayed for _, stayed in of_held)),
            "late": Timing(tuple(duration for (duration,) in of_late)).median * 1e3,
            "short": alone["short"].median * 1e3,
        })  # fmt: skip
    print(table(rows), flush=True)
    return {"rows": rows, "kernels": path, "rounds": rounds, "held": SPARE, "samples": alone}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Grouped products on one GPU beside a kernel that holds 16 multiprocessors."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=10, help="samples of each time")
    arguments = parser.parse_args()
    need_gpu("bench_beside")
    path, reason = extension.path(DEVICE)
    if path is None:
        sys.exit(f"bench_beside: not run, {reason}")
    machine = show_gpu()
    file = arguments.out / file_name("beside", machine)
    write_json(file, **machine, **measure(arguments.rounds))
    print(f"written: {file}")


if __name__ == "__main__":
    main()
