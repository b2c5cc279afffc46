"""The permute kernels on one GPU: bytes a second, beside a copy and the same as PyTorch operations.

    python bench/bench_permute.py [--out build/bench] [--rounds 20] [--parts 0]

Bytes are those that the work needs. Each row that is read counts once, even if a cache serves it again. Each
write counts in full; positions and weights count too. "of copy" is the rate / the rate of a large copy on the
same card (bytes read plus bytes written). The goal is 0.85.

Every kernel's result is checked against float64 first. Then all take turns, round by round, timed by CUDA
events after a write that empties the L2 cache. "torch" is what one would write without the kernels:
index_select in expert order, index_add_ back (which adds in any order), and for gradients the same and a sum
of products.

--parts 0 1 2 4 8 tries numbers of warps that share a token; 0 is the choice of cuda/permute/layout.h.

Letters: T tokens, K choices, N = T * K rows, M columns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench import permutes
from bench.device import COPY_BYTES, file_name, need_gpu, relative_error, show_gpu, time_in_turn
from bench.timing import OUT, Timing, table, write_json
from pmoe.kernels.permute import launches

GOAL = 0.85
EXPERTS = 64

ROUNDED = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Scenario:
    tokens: int
    columns: int
    top_k: int
    dtype: str

    @property
    def name(self) -> str:
        return f"T={self.tokens} M={self.columns} top-{self.top_k} {self.dtype}"


SCENARIOS = (
    Scenario(32768, 4096, 4, "bfloat16"),
    Scenario(32768, 2048, 8, "bfloat16"),
    Scenario(32768, 1024, 2, "bfloat16"),
    Scenario(32768, 4096, 4, "float16"),
    Scenario(32768, 4096, 4, "float32"),
)


class Problem:
    """Random rows with random experts. The rows of each expert are neighbours, in token order."""

    def __init__(self, scenario: Scenario) -> None:
        tokens, top_k = scenario.tokens, scenario.top_k
        self.num_rows = tokens * top_k
        dtype = DTYPES[scenario.dtype]
        expert_TK = torch.rand(tokens, EXPERTS, device="cuda").topk(top_k).indices
        slot_N = expert_TK.reshape(-1).argsort(stable=True)
        position = torch.empty(self.num_rows, dtype=torch.int32, device="cuda")
        position[slot_N] = torch.arange(self.num_rows, dtype=torch.int32, device="cuda")
        self.position_TK = position.view(tokens, top_k)
        self.token_N = slot_N // top_k
        self.slot_N = slot_N
        self.weight_TK = torch.rand(tokens, top_k, device="cuda")
        self.weight_N1 = self.weight_TK.reshape(-1)[slot_N].unsqueeze(1)
        self.x_TM = torch.randn(tokens, scenario.columns, device="cuda").to(dtype)
        self.rows_NM = torch.randn(self.num_rows, scenario.columns, device="cuda").to(dtype)
        self.out_NM, self.out_TM = torch.empty_like(self.rows_NM), torch.empty_like(self.x_TM)
        self.d_weight_TK = torch.empty_like(self.weight_TK)

    # The kernels, into fixed memory. In the gradients, x also serves as d_y, and rows as d_rows.

    def permute(self) -> None:
        permutes.launch_permute(self.x_TM, self.position_TK, None, self.out_NM)

    def permute_weighted(self) -> None:
        permutes.launch_permute(self.x_TM, self.position_TK, self.weight_TK, self.out_NM)

    def unpermute(self) -> None:
        permutes.launch_unpermute(self.rows_NM, self.position_TK, self.weight_TK, self.out_TM)

    def permute_backward(self) -> None:
        permutes.launch_permute_backward(
            self.rows_NM,
            self.x_TM,
            self.position_TK,
            self.weight_TK,
            self.out_TM,
            self.d_weight_TK,
        )

    def unpermute_backward(self) -> None:
        permutes.launch_unpermute_backward(
            self.x_TM,
            self.rows_NM,
            self.position_TK,
            self.weight_TK,
            self.out_NM,
            self.d_weight_TK,
        )

    # The same as PyTorch operations. They return the tensors that the kernels write.

    def torch_permute(self) -> list[Tensor]:
        return [torch.index_select(self.x_TM, 0, self.token_N)]

    def torch_permute_weighted(self) -> list[Tensor]:
        return [(self.x_TM.index_select(0, self.token_N) * self.weight_N1).to(self.x_TM.dtype)]

    def torch_unpermute(self) -> list[Tensor]:
        weighted_NM = (self.rows_NM * self.weight_N1).to(self.x_TM.dtype)
        return [torch.zeros_like(self.x_TM).index_add_(0, self.token_N, weighted_NM)]

    def torch_dots(self) -> Tensor:
        chosen_NM = self.x_TM.index_select(0, self.token_N)
        dots_N = (chosen_NM * self.rows_NM).sum(1, dtype=torch.float32)
        return torch.empty_like(dots_N).index_copy_(0, self.slot_N, dots_N).view_as(self.weight_TK)

    def torch_permute_backward(self) -> list[Tensor]:
        return [*self.torch_unpermute(), self.torch_dots()]

    def torch_unpermute_backward(self) -> list[Tensor]:
        return [*self.torch_permute_weighted(), self.torch_dots()]


@dataclass(frozen=True)
class Kernel:
    name: str
    run: Callable[[Problem], None]
    plain: Callable[[Problem], list[Tensor]]
    written: Callable[[Problem], list[Tensor]]
    tensors: Callable[[Problem], list[Tensor]]  # each is read or written once


KERNELS = (
    Kernel(
        "permute",
        Problem.permute,
        Problem.torch_permute,
        lambda p: [p.out_NM],
        lambda p: [p.x_TM, p.out_NM, p.position_TK],
    ),
    Kernel(
        "permute, weighted",
        Problem.permute_weighted,
        Problem.torch_permute_weighted,
        lambda p: [p.out_NM],
        lambda p: [p.x_TM, p.out_NM, p.position_TK, p.weight_TK],
    ),
    Kernel(
        "unpermute",
        Problem.unpermute,
        Problem.torch_unpermute,
        lambda p: [p.out_TM],
        lambda p: [p.rows_NM, p.out_TM, p.position_TK, p.weight_TK],
    ),
    Kernel(
        "permute_backward",
        Problem.permute_backward,
        Problem.torch_permute_backward,
        lambda p: [p.out_TM, p.d_weight_TK],
        lambda p: [p.rows_NM, p.x_TM, p.out_TM, p.position_TK, p.weight_TK, p.d_weight_TK],
    ),
    Kernel(
        "unpermute_backward",
        Problem.unpermute_backward,
        Problem.torch_unpermute_backward,
        lambda p: [p.out_NM, p.d_weight_TK],
        lambda p: [p.x_TM, p.rows_NM, p.out_NM, p.position_TK, p.weight_TK, p.d_weight_TK],
    ),
)


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- correct first


def exact(problem: Problem, kernel: Kernel) -> list[Tensor]:
    """Returns what a kernel should write, computed in float64 for one (token, choice) pair at a time."""
    p = problem
    weight_TK = torch.ones_like(p.weight_TK) if kernel.name == "permute" else p.weight_TK
    rows = torch.empty(p.rows_NM.shape, dtype=torch.float64, device="cuda")
    y = torch.zeros(p.x_TM.shape, dtype=torch.float64, device="cuda")
    dots = torch.empty(p.weight_TK.shape, dtype=torch.float64, device="cuda")
    x = p.x_TM.double()
    for k, at in enumerate(p.position_TK.long().unbind(1)):
        chosen, weight = p.rows_NM[at].double(), weight_TK[:, k, None].double()
        rows[at] = x * weight
        y += chosen * weight
        dots[:, k] = (x * chosen).sum(1)
    scattered = kernel.name in ("permute", "permute, weighted", "unpermute_backward")
    return [rows if scattered else y, *([dots] if "backward" in kernel.name else [])]


def run(problem: Problem, kernel: Kernel, parts: int) -> None:
    launches.PARTS = parts
    kernel.run(problem)


def check(problem: Problem, kernel: Kernel, parts: int) -> float:
    """Returns the largest relative error of what a kernel writes.

    The kernel's result memory contains NaN before, so that elements that are not written are found.

    Raises SystemExit over the limit: two roundings of the rows' dtype, or 1e-5 for sums in float32.

    parts: number of warps that share a token; 0 lets the layout choose.
    """
    for tensor in kernel.written(problem):
        tensor.fill_(float("nan"))
    run(problem, kernel, parts)
    worst = 0.0
    for got, expected in zip(kernel.written(problem), exact(problem, kernel), strict=True):
        error = relative_error(got, expected)
        limit = 1e-5 if got.dtype == torch.float32 else 2 * ROUNDED[got.dtype]
        if not error <= limit:  # also true for NaN
            sys.exit(f"bench_permute: {kernel.name}: relative error {error}, limit {limit}")
        worst = max(worst, error)
    return worst


# ---- then time


def measure_copy(rounds: int) -> Timing:
    """Returns the seconds of a copy of COPY_BYTES bytes, which reads as many bytes and writes as many."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return time_in_turn({"copy": partial(target.copy_, source)}, rounds)["copy"]


def takes(problem: Problem, kernel: Kernel, parts: int) -> bool:
    """Returns whether a kernel can run with this number of warps for each token.

    Kernels for gradients refuse more warps than a row has slices; other kernels then use one warp for each
    slice.
    """
    try:
        run(problem, kernel, parts)
    except ValueError as error:
        print(f"  {kernel.name}, parts {parts}: not run, {error}")
        return False
    return True


def measure(
    scenario: Scenario, parts: list[int], copy_rate: float, rounds: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measures one scenario. Returns (content of the result file, rows of the table).

    parts: numbers of warps that share a token, to be tried.
    copy_rate: rate of a large copy, in bytes a second.
    """
    torch.manual_seed(0)
    problem = Problem(scenario)
    rows: list[dict[str, Any]] = []
    timings: dict[str, dict[str, Timing]] = {}
    for kernel in KERNELS:
        errors = {n: check(problem, kernel, n) for n in parts if takes(problem, kernel, n)}
        runs: dict[str, Callable[[], Any]] = {"torch": partial(kernel.plain, problem)}
        for n in errors:
            runs[f"parts {n}" if n else "kernel"] = partial(run, problem, kernel, n)
        timed = timings[kernel.name] = time_in_turn(runs, rounds)
        count = bytes_of(kernel.tensors(problem))
        for (name, timing), error in zip(list(timed.items())[1:], errors.values(), strict=True):
            rate = count / timing.median
            rows.append(
                {
                    "kernel": kernel.name if name == "kernel" else f"{kernel.name}, {name}",
                    "ms": timing.median * 1e3,
                    "spread": timing.spread,
                    "GB/s": rate / 1e9,
                    "of copy": rate / copy_rate,
                    "torch ms": timed["torch"].median * 1e3,
                    "x torch": timing.speedup_over(timed["torch"]),
                    "error": error,
                    "bytes": count,
                }
            )
        torch.cuda.empty_cache()
    return {"scenario": asdict(scenario), "rows": rows, "timings": timings}, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bytes a second of the permute kernels on one GPU, beside a copy and PyTorch operations."
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each time")
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[0], help="warps that share a token, to sweep"
    )
    arguments = parser.parse_args()
    need_gpu("bench_permute")
    reason = launches.refusal(torch.device("cuda", 0), torch.bfloat16, 2)
    if reason is not None:
        sys.exit(f"bench_permute: not run, {reason}")
    machine = show_gpu()
    copy = measure_copy(arguments.rounds)
    copy_rate = 2 * COPY_BYTES / copy.median
    print(f"copy: {copy_rate / 1e9:.4g} GB/s, spread {copy.spread:.3g}; goal: {GOAL} of it", flush=True)
    torch.cuda.empty_cache()
    measured, under = [], []
    for scenario in SCENARIOS:
        print(f"\n{scenario.name}")
        document, rows = measure(scenario, arguments.parts, copy_rate, arguments.rounds)
        measured.append(document)
        print(table(rows), flush=True)
        slow = [row for row in rows if row["of copy"] < GOAL and "parts" not in row["kernel"]]
        under += [f"{scenario.name}: {row['kernel']} {row['of copy']:.3f}" for row in slow]
        torch.cuda.empty_cache()
    path = arguments.out / file_name("permute", machine)
    copied = {"bytes": 2 * COPY_BYTES, "bytes_per_second": copy_rate, "timing": copy}
    write_json(path, **machine, rounds=arguments.rounds, goal=GOAL, copy=copied, scenarios=measured)
    print("\n".join(["", "under the goal:", *(under or ["none"]), f"written: {path}"]))


if __name__ == "__main__":
    main()
