"""Launches of the grouped products on a GPU: streams, graphs, torch.library, and operands that are refused.

Every test runs with the kernels of each path, as in test_grouped_gemm.py.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pmoe.kernels import grouped_gemm, status
from pmoe.kernels.grouped_gemm import RowSlots, grouped_hidden, grouped_product, launch, products
from tests.gpu.grouped import (
    CPU,
    NAN,
    ROUNDING,
    SUMS,
    Case,
    Guarded,
    assert_near,
    everything,
    path,  # noqa: F401 (a fixture)
    sums_without_pytorch_kernels,  # noqa: F401 (a fixture)
)
from tests.gpu.support import DEVICE, LONG, NEEDS_GPU, relative_norm

pytestmark = NEEDS_GPU


# ---- streams, graphs, torch.library


def test_the_launch_is_on_the_current_stream(random: torch.Generator) -> None:
    case = Case(random, (130, 40))
    given, weight = case.draw(170, 64).to(DEVICE), case.draw(2, 128, 64).to(DEVICE)
    expected = grouped_gemm.product(given, weight, case.ends)
    late = torch.full_like(given, NAN)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        late.copy_(given)
        found = grouped_gemm.product(late, weight, case.ends)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("gathered", [False, True])
def test_tiles_taken_as_blocks_start_give_the_same_bits(random: torch.Generator, gathered: bool) -> None:
    case = Case(random, (700, 0, 40, 3000), top_k=2)
    source = case.draw(case.num_tokens if gathered else 3740, 256).to(DEVICE)
    weight = case.draw(4, 520, 256).to(DEVICE)

    def product() -> Tensor:
        return grouped_gemm.product(source, weight, case.ends, slots=case.slots, gathered=gathered)

    alone = product()
    with launch.BesideCommunication():
        assert torch.equal(product(), alone)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """What runs again what ``run`` launches now."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def test_a_cuda_graph_holds_the_launches_and_reads_the_groups_anew(random: torch.Generator) -> None:
    case = Case(random, (130, 0, 40), top_k=2)
    out = Guarded.poisoned(170, 136, torch.bfloat16)
    of_weight = torch.full((3, 136, 72), NAN, device=DEVICE)
    source = case.draw(case.num_tokens, 72).to(DEVICE)
    in_place = torch.full((170, 72), NAN, dtype=torch.bfloat16, device=DEVICE)
    weight, w = case.weight(136, 72)

    def run() -> None:
        grouped_gemm.product(source, weight, case.ends, slots=case.slots, gathered=True, out=out.matrix)
        grouped_gemm.weight_gradient(out.matrix, in_place, case.ends, out=of_weight)

    run()  # what is loaded at the first launch is loaded outside the graph
    torch.cuda.synchronize()
    replay = captured(run)
    for counts in ((130, 0, 40), (0, 1, 169), (57, 57, 56)):
        case.counts = counts
        case.ends.copy_(torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32))
        values = case.draw(case.num_tokens, 72)
        source.copy_(values)
        in_place.copy_(values[case.slot // 2])
        out.matrix.fill_(NAN)
        replay()
        rows = values[case.slot // 2].double()
        y = out.read()
        case.compare(y, case.times(rows, w), SUMS * case.times(rows.abs(), w.abs()))
        expected, size = (case.gradient(f(y.double()), f(rows)) for f in (torch.clone, torch.abs))
        assert_near(of_weight.cpu(), expected, SUMS * size)


def test_no_call_waits_for_the_device(random: torch.Generator) -> None:
    run = everything(Case(random, (130, 0, 40), top_k=2), 64, 128)
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("top_k", [0, 2])
def test_operators_and_their_gradients(random: torch.Generator, top_k: int) -> None:
    """An expert of two products, by autograd; in float64 the plain definition is, on the CPU."""
    case = Case(random, (130, 0, 40), top_k=top_k)
    source = case.draw(case.num_tokens if top_k else 170, 64)
    given = [source, case.draw(3, 256, 64), case.draw(3, 256), case.draw(3, 64, 128), case.draw(3, 64)]
    scale, grad = case.draw(170, dtype=torch.float32), case.draw(170, 64)

    def step(device: torch.device, dtype: torch.dtype | None) -> list[Tensor]:
        leaves = [each.to(device, dtype).requires_grad_() for each in given]
        leaves.append(scale.to(device, dtype).requires_grad_())
        x, w1, b1, w2, b2, weight = leaves
        slots = None if case.slots is None else RowSlots(slot_N=case.slot.int().to(device), top_k=top_k)
        ends = case.ends.to(device)
        _, active = grouped_hidden(x, w1, ends, activation="swiglu", bias_EG=b1, slots=slots)
        y = grouped_product(active, w2, ends, bias_EO=b2, scale=weight, slots=slots)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(device, dtype))]

    found, expected = step(DEVICE, None), step(CPU, torch.float64)
    for got, right in zip(found, expected, strict=True):
        assert relative_norm(got, right) <= 4 * ROUNDING[torch.bfloat16]


def test_operators_are_well_formed(random: torch.Generator) -> None:
    case = Case(random, (5, 0, 3), torch.float16)
    x, w = case.draw(8, 16).to(DEVICE).requires_grad_(), case.draw(3, 24, 16).to(DEVICE).requires_grad_()
    torch.library.opcheck(torch.ops.pmoe.grouped_product, (x, w, case.ends, None))


def test_the_kernels_of_both_paths_are_loaded() -> None:
    (device, *_) = status().devices
    found = {each.name: each for each in device.kernels if each.name.startswith("grouped_gemm.")}
    hopper = {name for name in found if name.startswith("grouped_gemm.sm_90a.")}
    alone = {name for name in hopper if not name.endswith(".pairs")}
    assert alone and {f"{name}.pairs" for name in alone} == hopper - alone
    assert {name.replace("sm_90a", "sm_80") for name in alone} == found.keys() - hopper
    for name, kernel in found.items():
        refused = name in hopper and device.capability != (9, 0)
        assert (kernel.refusal is not None) == refused, f"{name}: {kernel.refusal}"
        assert kernel.local_bytes == 0, f"{name}: {kernel.local_bytes} bytes of local memory"


def test_the_rule_for_pairs_changes_no_bit(monkeypatch: pytest.MonkeyPatch, random: torch.Generator) -> None:
    """Whatever it picks: a tile is the same sum in the same order."""
    run = everything(Case(random, (130, 0, 700, 3), top_k=2), 264, 128)
    expected = run()
    monkeypatch.setattr(launch, "SHARING", 0)
    for found, other in zip(run(), expected, strict=True):
        assert torch.equal(found, other)


# ---- before any launch


class Fine:
    """Operands that fit, for the tests to spoil one of."""

    def __init__(self) -> None:
        self.x = torch.ones(10, 64, dtype=torch.bfloat16).to(DEVICE)
        self.grad = torch.ones(10, 128, dtype=torch.bfloat16).to(DEVICE)
        self.w = torch.ones(2, 128, 64, dtype=torch.bfloat16).to(DEVICE)
        self.long = torch.ones(4096, dtype=torch.bfloat16).to(DEVICE)
        self.ends = torch.tensor([4, 10], dtype=torch.int32).to(DEVICE)
        self.slots = RowSlots(slot_N=torch.arange(10, dtype=torch.int32).to(DEVICE), top_k=2)
        self.scale = torch.ones(10).to(DEVICE)
        self.many = torch.ones(2, 128, 64, dtype=torch.float32).to(DEVICE)

    def product(self, **other: Any) -> Tensor:
        given = {"rows": self.x, "weight_EOI": self.w, "ends_E": self.ends, **other}
        return grouped_gemm.product(**given)

    def back(self, **other: Any) -> Tensor:
        return grouped_gemm.weight_gradient(
            **{"grad_NO": self.grad, "rows_NI": self.x, "ends_E": self.ends, **other}
        )

    def way_back(self, **other: Any) -> Any:
        given = {
            "grad_NM": self.grad, "weight_EMH": self.w, "hidden_NG": self.x, "scale_N": self.scale,
            "ends_E": self.ends, "activation": "relu", **other,
        }  # fmt: skip
        return grouped_gemm.hidden_gradient(**given)


BAD: dict[str, tuple[Callable[[Fine], object], str]] = {
    "rows' address": (
        lambda f: f.product(rows=f.long[1:641].view(10, 64)),
        r"rows at address 0x[0-9a-f]+ must be aligned to 16",
    ),
    "rows' stride": (
        lambda f: f.product(rows=f.long[:680].view(10, 68)[:, :64]),
        r"rows of shape \(10, 64\) and strides \(68, 1\) of 2 bytes each must have",
    ),
    "rows' columns": (
        lambda f: f.product(rows=f.long[:640].view(64, 10).t()),
        r"strides \(1, 10\) of 2 bytes each must have adjacent columns",
    ),
    "rows' width": (
        lambda f: f.product(rows=f.grad),
        r"rows of shape \(10, 128\) must have the shape \(rows, 64\)",
    ),
    "rows' dtype": (
        lambda f: f.product(rows=f.x.to("cpu", torch.float16).to(DEVICE)),
        "float16 must be torch.bfloat16",
    ),
    "rows' device": (lambda f: f.product(rows=f.x.cpu()), "rows on cpu must be on cuda"),
    "dtype": (
        lambda f: f.product(rows=f.many[0], weight_EOI=f.many),
        r"dtype torch.float32: the kernels take bfloat16",
    ),
    "weight's address": (
        lambda f: f.product(rows=f.long[:80].view(10, 8), weight_EOI=f.long[1:129].view(2, 8, 8)),
        r"weight at address 0x[0-9a-f]+ must be aligned to 16",
    ),
    "weight's strides": (
        lambda f: f.product(rows=f.grad, weight_EOI=f.w.transpose(1, 2)),
        r"weight of shape .* and strides \(8192, 1, 64\) must be contiguous",
    ),
    "out-features": (
        lambda f: f.product(rows=f.x[:1], weight_EOI=f.long[: 2 * 12 * 64].view(2, 12, 64)),
        r"out_features \(12\) must be a multiple of 8",
    ),
    "out's shape": (lambda f: f.product(out=f.x), r"out of shape \(10, 64\) must have the shape \(10, 128\)"),
    "out's dtype": (
        lambda f: f.product(out=f.many[0, :20].view(10, 128)),
        "out of dtype torch.float32 must be",
    ),
    "out's stride": (
        lambda f: f.product(out=f.long[:1320].view(10, 132)[:, :128]),
        r"out of shape \(10, 128\) and strides \(132, 1\) of 2 bytes must have",
    ),
    "out's address": (
        lambda f: f.product(out=f.long[4:1284].view(10, 128)),
        r"out at address 0x[0-9a-f]+ must be aligned to 16",
    ),
    "active's shape": (
        lambda f: f.way_back(active=f.grad),
        r"active of shape \(10, 128\) must have the shape \(10, 64\)",
    ),
    "ends' device": (lambda f: f.product(ends_E=f.ends.cpu()), "ends on cpu must be on cuda"),
    "ends' dtype": (lambda f: f.product(ends_E=f.ends.cpu().long().to(DEVICE)), "ends of dtype torch.int64"),
    "ends' number": (
        lambda f: f.product(ends_E=f.ends[:1]),
        r"ends of shape \(1,\) must have the shape \(2,\)",
    ),
    "slots' device": (
        lambda f: f.product(slots=RowSlots(slot_N=f.slots.slot_N.cpu(), top_k=2)),
        "slot on cpu must be on cuda",
    ),
    "slots' number": (
        lambda f: f.product(slots=RowSlots(slot_N=f.slots.slot_N[:9], top_k=2)),
        r"slot of shape \(9,\) must have the shape \(10,\)",
    ),
    "scale's dtype": (
        lambda f: f.product(scale=torch.ones(10, dtype=torch.float64).to(DEVICE)),
        "scale of dtype torch.float64 must be torch.float32",
    ),
    "scale's number": (lambda f: f.product(scale=f.scale[:9]), r"shape \(9,\) must have the shape \(10,\)"),
    "scale's device": (lambda f: f.product(scale=f.scale.cpu()), "scale on cpu must be on cuda"),
    "bias": (
        lambda f: f.product(bias_EO=f.w[:, 0]),
        r"bias of shape \(2, 64\) must have the shape \(2, 128\)",
    ),
    "gradient's rows": (
        lambda f: f.back(grad_NO=f.grad[:9]),
        r"grad of 9 rows must have as many as rows \(10\)",
    ),
    "accumulating": (
        lambda f: f.back(out=f.w, accumulate=True),
        "out of dtype torch.bfloat16 must be float32 to accumulate",
    ),
    "gradient's place": (
        lambda f: f.back(out=f.w[:1]),
        r"out of shape \(1, 128, 64\) must have the shape \(2, 128, 64\)",
    ),
    "hidden": (
        lambda f: f.way_back(hidden_NG=f.grad),
        r"hidden of shape \(10, 128\) must have the shape \(10, 64\)",
    ),
    "hidden's address": (
        lambda f: f.way_back(hidden_NG=f.long[1:641].view(10, 64)),
        r"hidden at address 0x[0-9a-f]+ must be aligned to 16",
    ),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD.keys())
def test_bad_operands_are_a_value_error_before_any_launch(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Fine], object], message: str
) -> None:
    fine = Fine()
    monkeypatch.setattr(products, "launch", lambda *_, **__: pytest.fail("a launch"))
    with pytest.raises(ValueError, match=message):
        call(fine)


THREADS = """
import threading, torch
from pmoe.kernels.grouped_gemm import grouped_product, product
x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
w = torch.ones(1, 64, 64, dtype=torch.bfloat16, device="cuda")
ends = torch.tensor([64], dtype=torch.int32, device="cuda")
found = []
thread = threading.Thread(target=lambda: found.append(product(x.detach(), w, ends)))
thread.start(), thread.join()
assert (found[0] == 64).all()
torch.autograd.backward(grouped_product(x, w, ends), found[0])
assert (x.grad == 64 * 64).all()
"""


def test_threads_without_a_context_launch_too() -> None:
    """A thread of one's own, and autograd's, whose first work is a kernel of pmoe's."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
