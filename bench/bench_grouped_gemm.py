"""The grouped products on one GPU: TFLOP/s beside F.grouped_mm, a dense product and a copy, in one run.

    python bench/bench_grouped_gemm.py [--out bench/results] [--rounds 20] [--quick]

Both products of an expert of three models, 16384 routed rows whose experts are drawn at random (so the groups
are of unlike sizes; they are in the file): forward and both gradients, beside F.grouped_mm. Then what only
pmoe's kernels do in one launch: the gated hidden with its activation, from rows that lie in order or are
gathered; the product with routing weights; the way back through the nonlinearity; the weight gradient that is
added to a float32 sum, and the one of gathered rows. Where PyTorch operations around F.grouped_mm give the
same, they stand beside.

First every result is checked: a sample of its rows against float64, all of it against F.grouped_mm. Then all
run in turn, round by round, by CUDA events, behind a write that empties the L2 cache, and the dense product
with them: "of dense" is the rate over the dense product's in the same rounds. FLOP are 2 N I O, of rows that
exist; "fill" is the part that these are of what blocks' tiles multiply; "of copy" is the fewest bytes over
the time, beside a large copy's rate (bytes read plus bytes written). "x rival" above 1: pmoe is faster.

On Hopper two blocks may share an operand: "alone" and "pairs" are the milliseconds of either way, "ms" those
of the one that the rule picks (`pmoe.kernels.grouped_gemm.launch.CLUSTER`).

The goals, for plain forward and both gradients: 1.0 x rival. 0.75 of dense for Mixtral and Phi-3.5-MoE; for
Qwen2-MoE, 0.75 of the lower of dense x fill and FLOP x copy rate / fewest bytes ("of bound").

Letters: N rows, E experts, K choices, I in-features, O out-features, M = d_model, H = d_hidden.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.bench_gpu import describe_gpu, relative_error
from bench.timing import Timing, table, write_json
from pmoe.kernels import grouped_gemm
from pmoe.kernels.grouped_gemm import RowSlots, launch

ROOT = Path(__file__).resolve().parent.parent
DEVICE = torch.device("cuda", 0)
ROWS, QUICK_ROWS = 16384, 4096
DENSE = 8192
COPY_BYTES = 2 << 30
"""Of the source: far more than any L2 cache holds, as FLUSH_BYTES."""
FLUSH_BYTES = 1 << 28
WARMUP = 3
LEAD_CYCLES = 600_000
"""The device sleeps so long, 0.3 ms at 2 GHz, while the host enqueues what is timed: device time counts."""

SHARE = 0.75
SAMPLES = 48
LIMIT = 2.0**-8
"""Of the relative error of bfloat16 results: one rounding is 2^-9 at most on average."""


@dataclass(frozen=True)
class Model:
    name: str
    experts: int
    d_model: int
    d_hidden: int
    top_k: int
    by_bound: bool = False
    """Whether the goal is a share of min(dense x fill, bytes' bound), not of dense."""


MODELS = (
    Model("Mixtral", 8, 4096, 14336, 2),
    Model("Qwen2-MoE", 64, 2048, 1408, 4, by_bound=True),
    Model("Phi-3.5-MoE", 16, 4096, 6400, 2),
)


class Routed:
    """Random choices of an expert for each slot, as any router's: rows of an expert are in slot order."""

    def __init__(self, model: Model, num_rows: int) -> None:
        self.num_rows, self.top_k = num_rows, model.top_k
        self.num_tokens = num_rows // model.top_k
        expert_S = torch.randint(model.experts, (num_rows,), device=DEVICE)
        self.counts = torch.bincount(expert_S, minlength=model.experts).tolist()
        self.ends_E = torch.tensor(self.counts).cumsum(0).to(DEVICE, torch.int32)
        slot_N = expert_S.argsort(stable=True)
        self.expert_N, self.slot_N = expert_S[slot_N], slot_N
        self.token_N = slot_N // model.top_k
        self.slots = RowSlots(slot_N=slot_N.int(), top_k=model.top_k)

    def groups(self) -> Iterator[slice]:
        """Each expert's rows."""
        start = 0
        for count in self.counts:
            yield slice(start, start + count)
            start += count


@dataclass(frozen=True)
class Case:
    """One measured product. run's result is what exact and rival are compared with. flop, fill: see above.
    exact: (what of the result is looked at, the same in float64). rival: the same by F.grouped_mm."""

    name: str
    run: Callable[[], Tensor]
    exact: Callable[[Tensor], tuple[Tensor, Tensor]]
    flop: int
    least_bytes: int
    fill: float
    rival: Callable[[], Tensor] | None = None
    plain: bool = False
    """A form that F.grouped_mm has, too: the goals are for these."""


# ---- what is counted


def tile_of(path: str) -> tuple[int, int, int]:
    """Rows, columns and depth of a tile, as the kernel's source has them."""
    source = ROOT / "cuda" / "grouped_gemm" / {"sm_90a": "hopper.cuh", "sm_80": "ampere.cuh"}[path]
    found = re.search(r"kRows = (\d+), kColumns = (\d+), kDepth = (\d+)", source.read_text())
    if found is None:
        raise ValueError(f"{source} must say kRows, kColumns and kDepth in one line")
    rows, columns, depth = map(int, found.groups())
    return rows, columns, depth


def filled(count: int, step: int) -> float:
    """Example: 100 of steps of 64 -> 100 / 128."""
    return count / (-(-count // step) * step) if count else 1.0


def groups_filled(counts: list[int], step: int) -> float:
    return sum(counts) / max(sum(-(-count // step) * step for count in counts), 1)


def size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- the products


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE).mul_(scale)


def sampled(routed: Routed) -> Tensor:
    return torch.randperm(routed.num_rows, device=DEVICE)[:SAMPLES].sort().values


def exact_rows(routed: Routed, rows: Tensor, weight_EOI: Tensor, sample: Tensor) -> Tensor:
    """rows[sample] times their experts' matrices, in float64."""
    expert_S = routed.expert_N[sample]
    found = torch.empty(len(sample), weight_EOI.shape[1], dtype=torch.float64, device=DEVICE)
    for expert in expert_S.unique().tolist():
        at = expert_S == expert
        found[at] = rows[sample[at]].double() @ weight_EOI[expert].double().t()
    return found


def compare_rows(
    routed: Routed, rows: Tensor, weight_EOI: Tensor, after: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """after: what becomes of the products of the sampled rows."""
    sample = sampled(routed)
    return lambda result: (result[sample], after(exact_rows(routed, rows, weight_EOI, sample), sample))


def compare_columns(routed: Routed, grad: Tensor, rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A few rows of each expert's weight gradient."""
    sample = torch.randperm(grad.shape[1], device=DEVICE)[:8]

    def exact(result: Tensor) -> tuple[Tensor, Tensor]:
        wide = rows.double()
        expected = [grad[at][:, sample].double().t() @ wide[at] for at in routed.groups()]
        return result[:, sample], torch.stack(expected)

    return exact


def as_they_are(products: Tensor, sample: Tensor) -> Tensor:
    return products


def plain_cases(
    routed: Routed, name: str, num_in: int, num_out: int, tile: tuple[int, int, int]
) -> Iterator[Case]:
    """Forward and both gradients of one matrix an expert, beside F.grouped_mm."""
    experts, num_rows = len(routed.counts), routed.num_rows
    x, grad = draw(num_rows, num_in), draw(num_rows, num_out)
    weight, ends = draw(experts, num_out, num_in, scale=num_in**-0.5), routed.ends_E
    rows, columns, depth = tile
    flop, least = 2 * num_rows * num_in * num_out, size(x, grad, weight)
    down = groups_filled(routed.counts, rows)
    fill = down * filled(num_out, columns) * filled(num_in, depth)
    yield Case(
        name=f"{name}: forward",
        run=lambda: grouped_gemm.product(x, weight, ends),
        rival=lambda: F.grouped_mm(x, weight.transpose(1, 2), offs=ends),
        exact=compare_rows(routed, x, weight, as_they_are),
        flop=flop, least_bytes=least, fill=fill, plain=True,
    )  # fmt: skip
    fill = down * filled(num_in, columns) * filled(num_out, depth)
    yield Case(
        name=f"{name}: input gradient",
        run=lambda: grouped_gemm.input_gradient(grad, weight, ends),
        rival=lambda: F.grouped_mm(grad, weight, offs=ends),
        exact=compare_rows(routed, grad, weight.transpose(1, 2), as_they_are),
        flop=flop, least_bytes=least, fill=fill, plain=True,
    )  # fmt: skip
    fill = filled(num_out, rows) * filled(num_in, columns) * groups_filled(routed.counts, depth)
    yield Case(
        name=f"{name}: weight gradient",
        run=lambda: grouped_gemm.weight_gradient(grad, x, ends),
        rival=lambda: F.grouped_mm(grad.t(), x, offs=ends),
        exact=compare_columns(routed, grad, x),
        flop=flop, least_bytes=least, fill=fill, plain=True,
    )  # fmt: skip
    total = torch.zeros(experts, num_out, num_in, device=DEVICE)  # and ever more, once it is checked
    yield Case(
        name=f"{name}: weight gradient, accumulating",
        run=lambda: grouped_gemm.weight_gradient(grad, x, ends, out=total, accumulate=True),
        exact=compare_columns(routed, grad, x),
        flop=flop, least_bytes=size(x, grad) + 2 * size(total), fill=fill,
    )  # fmt: skip


def fused_cases(routed: Routed, model: Model, tile: tuple[int, int, int]) -> Iterator[Case]:
    """SwiGLU experts, whose w1 has two halves, as `pmoe.runners.one_rank` computes them."""
    experts, num_rows, num_model, width = model.experts, routed.num_rows, model.d_model, model.d_hidden
    slots, ends, token_N = routed.slots, routed.ends_E, routed.token_N
    tokens = draw(routed.num_tokens, num_model)
    x = tokens.index_select(0, token_N)
    w1 = draw(experts, 2 * width, num_model, scale=num_model**-0.5)
    weight_S = torch.rand(num_rows, device=DEVICE) + 0.1
    weight_N1 = weight_S[routed.slot_N].unsqueeze(1)
    rows, columns, depth = tile
    down = groups_filled(routed.counts, rows)
    forward_fill = down * filled(width, columns // 2) * filled(num_model, depth)

    def gate(products: Tensor, _: Tensor) -> Tensor:
        first, second = products.bfloat16().double().chunk(2, dim=1)  # as T_M is rounded
        return F.silu(first) * second

    def gated(rows_NI: Tensor) -> Tensor:
        first, second = F.grouped_mm(rows_NI, w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return F.silu(first) * second

    def hidden(rows_NI: Tensor, gathered: bool) -> Tensor:
        return grouped_gemm.hidden(
            rows_NI, w1, ends, activation="swiglu", slots=slots if gathered else None, gathered=gathered
        )[1]

    flop = 4 * num_rows * num_model * width
    written = 2 * num_rows * 3 * width
    yield Case(
        name="gated hidden",
        run=lambda: hidden(x, False),
        rival=lambda: gated(x),
        exact=compare_rows(routed, x, w1, gate),
        flop=flop, least_bytes=size(x, w1) + written, fill=forward_fill,
    )  # fmt: skip
    yield Case(
        name="gated hidden, gathered",
        run=lambda: hidden(tokens, True),
        rival=lambda: gated(tokens.index_select(0, token_N)),
        exact=compare_rows(routed, x, w1, gate),
        flop=flop, least_bytes=size(tokens, w1) + written, fill=forward_fill,
    )  # fmt: skip
    hidden_NG = F.grouped_mm(x, w1.transpose(1, 2), offs=ends)
    w2 = draw(experts, num_model, width, scale=width**-0.5)
    active = gated(x)
    back_fill = down * filled(width, columns) * filled(num_model, depth)
    yield Case(
        name="down, weighted by slot",
        run=lambda: grouped_gemm.product(active, w2, ends, scale=weight_S, slots=slots),
        rival=lambda: (F.grouped_mm(active, w2.transpose(1, 2), offs=ends) * weight_N1).bfloat16(),
        exact=compare_rows(routed, active, w2, lambda products, at: products * weight_N1[at].double()),
        flop=flop // 2,
        least_bytes=size(active, w2) + 2 * num_rows * num_model,
        fill=down * filled(num_model, columns) * filled(width, depth),
    )  # fmt: skip
    grad = draw(routed.num_tokens, num_model)

    def slope(products: Tensor, at: Tensor) -> Tensor:
        of_active = products * weight_N1[at].double()
        first, second = hidden_NG[at].double().chunk(2, dim=1)
        of_first = torch.ops.aten.silu_backward(of_active * second, first)
        return torch.cat([of_first, of_active * F.silu(first)], dim=1)

    yield Case(
        name="gradient of the gated hidden, gathered",
        run=lambda: grouped_gemm.hidden_gradient(
            grad, w2, hidden_NG, weight_S, ends, activation="swiglu", slots=slots, gathered=True,
            weighs_active=True,
        )[0],
        exact=compare_rows(routed, grad.index_select(0, token_N), w2.transpose(1, 2), slope),
        flop=flop // 2, least_bytes=size(grad, w2, hidden_NG) + written, fill=back_fill,
    )  # fmt: skip
    of_hidden = draw(num_rows, 2 * width)
    yield Case(
        name="w1's gradient, gathered",
        run=lambda: grouped_gemm.weight_gradient(of_hidden, tokens, ends, slots=slots, gathers_rows=True),
        rival=lambda: F.grouped_mm(of_hidden.t(), tokens.index_select(0, token_N), offs=ends),
        exact=compare_columns(routed, of_hidden, x),
        flop=flop,
        least_bytes=size(of_hidden, tokens, w1),
        fill=filled(2 * width, rows) * filled(num_model, columns) * groups_filled(routed.counts, depth),
    )  # fmt: skip


# ---- correct first


def check(case: Case) -> float:
    """The relative error of the sample. Raises SystemExit over the limit, or twice it from the rival's."""
    result = case.run()
    got, expected = case.exact(result)
    error = relative_error(got, expected)
    if not error <= LIMIT:  # NaN is refused too
        sys.exit(f"bench_grouped_gemm: {case.name}: relative error {error} of a sample, limit {LIMIT}")
    if case.rival is not None:
        other = case.rival()
        apart = difference(result, other)
        if not apart <= 2 * LIMIT:
            sys.exit(f"bench_grouped_gemm: {case.name}: {apart} from F.grouped_mm, limit {2 * LIMIT}")
    return error


def difference(one: Tensor, other: Tensor) -> float:
    """||one - other|| / ||other||, some rows at a time: in float32 all of them may not fit."""
    parts = zip(one.flatten(0, -2).split(4096), other.flatten(0, -2).split(4096), strict=True)
    sums = torch.zeros(2, dtype=torch.float64, device=one.device)
    for a, b in parts:
        sums += torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()])
    return float((sums[0] / sums[1]).sqrt())


# ---- then time


def device_seconds(run: Callable[[], object], flush: Tensor, lead_cycles: int = LEAD_CYCLES) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(lead_cycles)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def time_in_turn(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Every run once a round, each round beginning with another: what drifts hits all alike."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    names = list(runs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(-WARMUP, rounds):
        for turn in range(len(names)):
            name = names[(turn + round_) % len(names)]
            seconds = device_seconds(runs[name], flush)
            if round_ >= 0:
                samples[name].append(seconds)
    return {name: Timing(tuple(seconds)) for name, seconds in samples.items()}


class Ceilings:
    """A dense product's and a copy's rates. The dense product runs again beside every measured product."""

    def __init__(self, path: str, side: int, copy_bytes: int, rounds: int) -> None:
        self.path, self.side = path, side
        self.a, self.b = draw(side, side), draw(side, side)
        source = torch.randint(256, (copy_bytes,), dtype=torch.uint8, device=DEVICE)
        target = torch.empty_like(source)
        self.timings = time_in_turn({"dense": self.dense, "copy": lambda: target.copy_(source)}, rounds)
        self.copy_rate = 2 * copy_bytes / self.timings["copy"].median
        self.dense_rates: list[float] = [self.rate_of(self.timings["dense"])]

    def dense(self) -> Tensor:
        return self.a @ self.b

    def rate_of(self, timing: Timing) -> float:
        return 2 * self.side**3 / timing.median


def in_clusters(blocks: int, run: Callable[[], object]) -> None:
    before, launch.CLUSTER = launch.CLUSTER, blocks
    try:
        run()
    finally:
        launch.CLUSTER = before


def measure(
    case: Case, ceilings: Ceilings, by_bound: bool, rounds: int
) -> tuple[dict[str, Any], dict[str, Timing]]:
    """(row of the table, samples)"""
    error = check(case)
    runs: dict[str, Callable[[], object]] = {"pmoe": case.run, "dense": ceilings.dense}
    if ceilings.path == "sm_90a":
        runs |= {"alone": partial(in_clusters, 1, case.run), "pairs": partial(in_clusters, 2, case.run)}
    if case.rival is not None:
        runs["rival"] = case.rival
    timings = time_in_turn(runs, rounds)
    dense_rate = ceilings.rate_of(timings["dense"])
    ceilings.dense_rates.append(dense_rate)
    timing = timings["pmoe"]
    rate = case.flop / timing.median
    bound = min(dense_rate * case.fill, case.flop * ceilings.copy_rate / case.least_bytes)
    row: dict[str, Any] = {
        "product": case.name,
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "TFLOP/s": rate / 1e12,
        "of dense": rate / dense_rate,
        "fill": case.fill,
        "of bound": rate / bound,
        "of copy": case.least_bytes / timing.median / ceilings.copy_rate,
        "alone": timings["alone"].median * 1e3 if "alone" in timings else None,
        "pairs": timings["pairs"].median * 1e3 if "pairs" in timings else None,
        "rival ms": timings["rival"].median * 1e3 if "rival" in timings else None,
        "x rival": timing.speedup_over(timings["rival"]) if "rival" in timings else None,
        "error": error,
        "plain": case.plain,
        "flop": case.flop,
        "least_bytes": case.least_bytes,
        "goal_of": "bound" if by_bound else "dense",
    }
    return row, timings


def missed(model: Model, row: Mapping[str, Any]) -> list[str]:
    """Goals that a row is under."""
    if not row["plain"]:
        return []
    shares = {"x rival": 1.0, "of bound" if model.by_bound else "of dense": SHARE}
    return [
        f"{model.name}, {row['product']}: {name} {row[name]:.3f}, goal {goal}"
        for name, goal in shares.items()
        if row[name] < goal
    ]


SHOWN = (
    "product",
    "ms",
    "spread",
    "TFLOP/s",
    "of dense",
    "fill",
    "of bound",
    "of copy",
    "alone",
    "pairs",
    "rival ms",
    "x rival",
)


def measure_model(
    model: Model, num_rows: int, ceilings: Ceilings, rounds: int
) -> tuple[dict[str, Any], list[str]]:
    """(what goes into the file, goals that were missed)"""
    torch.manual_seed(0)
    routed, tile = Routed(model, num_rows), tile_of(ceilings.path)
    makers: list[Callable[[], Iterator[Case]]] = [
        lambda: plain_cases(routed, "up", model.d_model, model.d_hidden, tile),
        lambda: plain_cases(routed, "down", model.d_hidden, model.d_model, tile),
        lambda: fused_cases(routed, model, tile),
    ]
    rows: list[dict[str, Any]] = []
    timings: dict[str, dict[str, Timing]] = {}
    for make in makers:
        for case in make():
            row, timings[case.name] = measure(case, ceilings, model.by_bound, rounds)
            rows.append(row)
        torch.cuda.empty_cache()
    print(f"\n{model.name}: E={model.experts}, {model.d_model} x {model.d_hidden}, {num_rows} rows, "
          f"{min(routed.counts)} to {max(routed.counts)} an expert")  # fmt: skip
    print(table([{name: row[name] for name in SHOWN} for row in rows]), flush=True)
    document = {"model": asdict(model), "counts": routed.counts, "rows": rows, "timings": timings}
    return document, [line for row in rows for line in missed(model, row)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="TFLOP/s of the grouped products on one GPU, beside F.grouped_mm and a dense product."
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, 5 rounds, no file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_grouped_gemm: not run, torch sees no CUDA device")
    torch.cuda.set_device(0)
    path, reason = grouped_gemm.path(DEVICE)
    if path is None:
        sys.exit(f"bench_grouped_gemm: not run, {reason}")
    rounds = 5 if arguments.quick else arguments.rounds
    num_rows = QUICK_ROWS if arguments.quick else ROWS
    machine = describe_gpu()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    torch.manual_seed(0)
    ceilings = Ceilings(path, DENSE, COPY_BYTES, rounds)
    torch.cuda.empty_cache()
    print(f"the kernels of {path}; dense {DENSE}^3: {ceilings.dense_rates[0] / 1e12:.4g} TFLOP/s, "
          f"copy: {ceilings.copy_rate / 1e9:.4g} GB/s", flush=True)  # fmt: skip
    measured, under = [], []
    for model in MODELS:
        document, lines = measure_model(model, num_rows, ceilings, rounds)
        measured.append(document)
        under += lines
    dense = {"size": DENSE, "flop_per_second": ceilings.dense_rates[0], "beside_each": ceilings.dense_rates}
    print(f"\ndense beside the products: median {statistics.median(ceilings.dense_rates) / 1e12:.4g} TFLOP/s")
    print("\n".join(["under the goals:", *(under or ["none"])]))
    if arguments.quick:
        return
    slug = re.sub(r"[^a-z0-9]+", "_", machine["gpu"].lower()).strip("_")
    file = arguments.out / f"grouped_gemm_{slug}.json"
    write_json(
        file, **machine, kernels=path, rows=num_rows, rounds=rounds, dense=dense,
        copy={"bytes": 2 * COPY_BYTES, "bytes_per_second": ceilings.copy_rate},
        ceilings=ceilings.timings, goals={"x rival": 1.0, "share": SHARE}, under_the_goals=under,
        models=measured,
    )  # fmt: skip
    print(f"written: {file}")


if __name__ == "__main__":
    main()
