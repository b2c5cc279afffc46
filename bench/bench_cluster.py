"""Is a plan right for more machines than were measured?

    python bench/bench_cluster.py          # a quarter of an hour
    python bench/bench_cluster.py --quick  # only shows that it works

1. 2 ranks are measured, as `pmoe profile` does, over one modelled link.
2. `pmoe plan --cluster` plans a layer for 4 machines of 1 rank, and for 2 machines of 2 ranks, from this
   profile and a file with everything that the profile lacks.
3. 4 ranks run every candidate of the plan: each all-to-all and ESP degree, with each n and pair.

It prints the predicted step / the measured step, the step of the planned way / the step of the fastest way,
and the time of planning for 4,096 ranks.

The 2 measured ranks have a core each, but the 4 ranks share 2 cores. The file says so: a product or a copy
takes longer by the number of ranks that share a core. The rates of the link are derived from the products,
which are measured first.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

import pmoe
from bench.links import INFINITE, launch
from bench.passes import Run, Setting, even_batch, measure, products_alone, timed
from bench.quiet import Measured, measure_quietly
from bench.timing import OUT, Timing, machine, table, write_json
from pmoe.cli.cluster import load_cluster
from pmoe.comm.ranks import Ranks
from pmoe.measure.rates import measure as measure_profile
from pmoe.planner.cluster import Cluster
from pmoe.planner.cluster_candidates import plan_combinations, sensitivity
from pmoe.planner.costs import LineCost
from pmoe.planner.priced_choices import Advice
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import KEEP, STRATEGIES, Restore

PAIRS = (KEEP, *STRATEGIES.values())
WORLD, PART, CORES = 4, 2, 2
SCREENING, FINALISTS = 2, 3
"""Rounds in which all candidates are timed, and number of the fastest ones that are timed again.

The planned candidate is timed again, too.
"""
AS_PREDICTED, NEAR_BEST = 0.15, 0.05
"""The acceptable error of a prediction, and the acceptable loss by a plan, as fractions.

The first is that of the predicted time of a step. The second is how much longer a step of the planned
candidate may take than one of the fastest candidate.
"""


@dataclass(frozen=True)
class Case:
    """A cluster of WORLD ranks, with links as fast as these ratios say.

    machines: number of machines.
    link: seconds that a step's four flat all-to-alls take between machines, over the seconds of the step's
        products.
    latency: latency of a message between machines, over the seconds of the products in forward.
    inside: rate of the link inside machines, over the rate between machines. The link inside has no latency.
    """

    name: str
    machines: int
    link: float
    latency: float = 0.0
    inside: float = 4.0

    @property
    def local(self) -> int:
        return WORLD // self.machines


CASES = (
    Case("4 machines of 1", 4, link=1.0),
    Case("4 machines of 1, link slow", 4, link=3.0),
    Case("4 machines of 1, messages late", 4, link=1.0, latency=0.05),
    Case("2 machines of 2", 2, link=1.0),
    Case("2 machines of 2, link slow", 2, link=3.0),
    Case("2 machines of 2, messages late", 2, link=1.0, latency=0.1),
)


@dataclass(frozen=True)
class Links:
    """The links of the modelled cluster.

    inter, intra: rate of a rank in bytes a second, between machines and inside a machine.
    latency: seconds that each message between machines takes in addition to its bytes.
    """

    inter: float
    intra: float
    latency: float

    def set_on(self, link: Any) -> None:
        link.set_rates(inter=self.inter, intra=self.intra, inter_latency_seconds=self.latency)


# ---- on the ranks


def computation(link: Any, setting: Setting, rounds: int) -> dict[str, float]:
    """Returns the median seconds of the experts' products in each pass, on ranks with a core each."""
    timings = measure({"": products_alone(setting)}, rounds)[""]
    return {part: timing.median for part, timing in timings.items()}


def profile_part(link: Any, links: Links, ranks_per_machine: int) -> Profile:
    """Returns the profile of PART ranks, of which ``ranks_per_machine`` are on each machine."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_machine)
    links.set_on(link)
    return measure_profile(Ranks(), "cpu")


def pin_to_core(core: int) -> None:
    """Makes all threads that this process has run on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


Choice = tuple[str, int, int, Restore]
"""A candidate: (name of the all-to-all, ESP degree, n, restore pair)."""


class Subject:
    """Layers to measure: one for each all-to-all and ESP degree (number of ranks that share each expert)."""

    def __init__(self, setting: Setting, local: int, ways: Sequence[tuple[str, int]]) -> None:
        self.layers, self.inputs = {}, {}
        for dispatch, esp in ways:
            sizes = (setting.d_model, setting.d_hidden, setting.num_experts)
            options: dict[str, Any] = {"dispatch": dispatch, "nodes": local}
            if esp > 1:
                shape = (dist.get_world_size() // esp, esp)
                options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "esp"))
            torch.manual_seed(0)
            layer = pmoe.MoELayer(*sizes, **options)
            self.layers[dispatch, esp], self.inputs[dispatch, esp] = layer, even_batch(layer, setting.rows)

    def step(self, choice: Choice) -> dict[str, float]:
        """Returns the times of a step with one candidate: of the second of two steps, as in training.

        Before the first step, another layer's step has used the memory pool, so that the first step
        allocates.
        """
        dispatch, esp, n, pair = choice
        layer, (x, dy) = self.layers[dispatch, esp], self.inputs[dispatch, esp]
        layer.pipeline, layer.memory_reuse = n, pair
        for _ in range(2):
            x.grad = None
            layer.zero_grad(set_to_none=True)
            seconds = timed(lambda: layer(x), dy)
        return seconds


@dataclass(frozen=True)
class Result:
    """Times of a case.

    screened: times of a step with every candidate, from a few rounds.
    measured: times of the fastest candidates and of the planned one, on an otherwise idle machine.
    """

    screened: dict[Choice, Timing]
    measured: Measured


def run_whole(
    link: Any, setting: Setting, links: Links, local: int, choices: list[Choice], chosen: Choice, rounds: int
) -> Result:
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    pin_to_core(cores[dist.get_rank() * len(cores) // WORLD])
    links.set_on(link)
    subject = Subject(setting, local, list(dict.fromkeys(choice[:2] for choice in choices)))
    runs: dict[Choice, Run] = {choice: functools.partial(subject.step, choice) for choice in choices}
    named = {str(choice): run for choice, run in runs.items()}
    screened = {
        choice: times["step"]
        for choice, times in zip(choices, measure(named, SCREENING).values(), strict=True)
    }
    fastest = sorted(choices, key=lambda choice: screened[choice].median)[:FINALISTS]
    finals = {str(choice): runs[choice] for choice in dict.fromkeys([chosen, *fastest])}
    return Result(screened, measure_quietly(finals, rounds, 60.0))


# ---- the plan


def file_for(case: Case, profile: Profile, links: Links, shared: int) -> str:
    """Returns the text of the cluster's file: what `pmoe plan --cluster` needs and the profile lacks.

    The profile was measured on ranks with a core each. The file has the times of ranks that share a core.

    shared: number of ranks that share a core.
    """
    lines = [f"machines = {case.machines}", f"ranks_per_machine = {case.local}", "memory_bytes = 4e9"]
    tables = {"compute": times(profile.compute, shared), "copy": times(profile.slower_copy, shared)}
    if (
        case.local > 1
    ):  # the measured ranks were on one machine, so the link between machines is not in the profile
        tables["outside"] = LineCost(links.latency + profile.message.alpha_seconds, 1 / links.inter)
    for name, line in tables.items():
        lines += [f"[{name}]", *(f"{key} = {value!r}" for key, value in asdict(line).items())]
    return "\n".join(lines) + "\n"


def times(line: LineCost, factor: float) -> LineCost:
    return LineCost(factor * line.alpha_seconds, factor * line.beta_seconds)


def loaded(text: str, profile: Profile | None) -> Cluster:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return load_cluster(Path(file.name), profile)


def planned(cluster: Cluster, setting: Setting) -> list[Advice]:
    """Returns all candidates with the predicted seconds of a step, the fastest first.

    A candidate must fit into the memory of a rank.
    """
    return plan_combinations(
        cluster,
        layer_of(setting.d_model, setting.d_hidden, setting.num_experts),
        setting.rows,
        budget=int(cluster.memory_bytes),
        pairs=PAIRS,
    )


def layer_of(d_model: int, d_hidden: int, num_experts: int, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": d_model, "d_hidden": d_hidden, "num_experts": num_experts}
    return {**sizes, "dtype": torch.float32, **more}


def predictions(ways: Sequence[Advice]) -> dict[Choice, float]:
    return {
        (way.dispatch, way.sizes.esp_size, candidate.forward, candidate.restore): candidate.seconds
        for way in ways
        for candidate in way.candidates
    }


def run_case(case: Case, setting: Setting, alone: Mapping[str, float], rounds: int) -> dict[str, Any]:
    shared = WORLD // CORES
    bytes_of_step = 4 * setting.rows * setting.row_bytes * (WORLD - case.local) / WORLD
    rate = bytes_of_step / (case.link * shared * alone["step"])
    links = Links(rate, case.inside * rate, case.latency * shared * alone["forward"])
    in_part = min(case.local, PART)
    profile = on_ranks(PART, profile_part, (links, in_part), in_part)[0]
    text = file_for(case, profile, links, shared)
    ways = planned(loaded(text, profile), setting)
    predicted, took = predictions(ways), ways[0].decision
    chosen = (ways[0].dispatch, ways[0].sizes.esp_size, took.forward, took.restore)
    values = (setting, links, case.local, list(predicted), chosen, rounds)
    result: Result = on_ranks(WORLD, run_whole, values, case.local)[0]
    final = {name: timings["step"] for name, timings in result.measured.times.items()}
    best = min(final, key=lambda name: final[name].median)
    ratios = [predicted[choice] / timing.median for choice, timing in result.screened.items()]
    shares = [result.measured.neighbours[at] for at in result.measured.rounds]
    row = {
        "case": case.name,
        "chosen": name_of(chosen),
        "predicted ms": predicted[chosen] * 1e3,
        "measured ms": final[str(chosen)].median * 1e3,
        "predicted/measured": predicted[chosen] / final[str(chosen)].median,
        "best": next(name_of(choice) for choice in predicted if str(choice) == best),
        "chosen/best": final[best].speedup_over(final[str(chosen)]),
        "of": len(predicted),
        "predicted/measured of all, median": statistics.median(ratios),
        "others' share": max(shares),
    }
    steps = {name_of(c): {"predicted_s": predicted[c], **t.as_dict()} for c, t in result.screened.items()}
    return {"row": row, "links": asdict(links), "profile": asdict(profile), "file": text, "steps": steps}


def name_of(choice: Choice) -> str:
    dispatch, esp, n, pair = choice
    return f"{dispatch}, ESP {esp}, n={n}, {pair}"


def on_ranks(world: int, function: Any, values: tuple[Any, ...], ranks_per_node: int) -> list[Any]:
    return launch(
        world,
        function,
        "modelled",
        INFINITE,
        values,
        ranks_per_node=ranks_per_node,
        pin=world <= CORES,
        timeout_seconds=1800,
    )


# ---- many ranks


MANY = """
machines = 512
ranks_per_machine = 8
device_type = "cuda"
memory_bytes = 80e9
compute = { alpha_seconds = 5e-6, beta_seconds = 3.3e-15 }
copy = { alpha_seconds = 1e-5, beta_seconds = 4e-11 }
inside = { alpha_seconds = 3e-6, beta_seconds = 2.5e-12 }
outside = { alpha_seconds = 1e-5, beta_seconds = 2e-11 }
"""


def plan_many() -> tuple[float, list[Advice]]:
    """Plans a layer for 4,096 ranks, and measures how long that takes.

    Returns (seconds, the planned candidates). The seconds are those of reading the cluster's file, of
    planning, and of computing how much the answer changes with each rate.
    """
    start = time.perf_counter()
    cluster = loaded(MANY, None)

    layer = layer_of(4096, 14336, 8192, top_k=2, dtype=torch.bfloat16)
    ways = plan_combinations(cluster, layer, 8192)
    list(sensitivity(cluster, ways, layer=layer, num_tokens=8192))
    return time.perf_counter() - start, ways


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and the first and fifth case")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=2048, help="tokens a rank")
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--d-hidden", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON")
    args = parser.parse_args()
    setting = Setting(args.rows, args.d_model, args.d_hidden, num_experts=8, world=WORLD)
    cases, rounds = [case for case in CASES if case.name in (args.cases or [case.name])], args.rounds
    if args.quick:
        setting, cases, rounds = Setting(512, 64, 128, world=WORLD), [CASES[0], CASES[4]], 2
    seconds, ways = plan_many()
    print(
        f"4,096 ranks planned in {seconds:.2f} s, how far rates move the answer among it: "
        f"{ways[0].dispatch}, ESP {ways[0].sizes.esp_size}, {ways[0].decision}"
    )
    alone = on_ranks(PART, computation, (replace(setting, world=WORLD), rounds), 1)[0]
    results = {}
    for case in cases:
        results[case.name] = run_case(case, setting, alone, rounds)
        print(table([result["row"] for result in results.values()]), flush=True)
    rows = [result["row"] for result in results.values()]
    for row in rows:
        off, above = abs(row["predicted/measured"] - 1), row["chosen/best"] - 1
        met = off <= AS_PREDICTED and above <= NEAR_BEST
        print(f"{row['case']}: {off:.1%} off, {above:.1%} above the best: {'met' if met else 'MISSED'}")
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / "cluster_modelled"
    write_json(
        f"{stem}.json",
        setting=asdict(setting),
        rounds=rounds,
        machine=machine(),
        rows=rows,
        cases=[asdict(case) for case in cases],
        found=results,
        planning_4096_ranks_s=seconds,
    )
    print(f"wrote {stem}.json")


if __name__ == "__main__":
    main()
