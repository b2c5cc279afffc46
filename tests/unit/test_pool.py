"""Memory that the CPU's pool keeps between passes: it is used again, freed on request, and given to one user
only.
"""

from __future__ import annotations

import concurrent.futures
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.cli import launch
from pmoe.engine.buffers.arena import DevicePool
from pmoe.engine.buffers.host_pool import HostPool
from tests import fresh

TOKENS, D_MODEL, D_HIDDEN = 512, 64, 256
"""Sizes with which a chunk's rows are so large that they come from the pool, not from malloc."""
MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[DevicePool]:
    gc.collect()
    pmoe.pool().trim()
    yield pmoe.pool().device
    pmoe.pool().trim()


def build(**options: object) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(D_MODEL, D_HIDDEN, 4, **options)


def tokens(seed: int, count: int = TOKENS) -> Tensor:
    drawn = torch.randn(count, D_MODEL, generator=torch.Generator().manual_seed(seed))
    return drawn.requires_grad_()


def gradients(layer: pmoe.MoELayer, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), [x, *layer.experts.parameters()]))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("reuse", [False, "S4"])
def test_the_next_step_takes_what_the_last_one_gave_back(reuse: object, device: DevicePool) -> None:
    layer, x = build(pipeline=2, memory_reuse=reuse), tokens(0)
    kept = []
    for _ in range(8):
        gradients(layer, x, layer(x))
        kept.append(device.kept_bytes)
    assert kept[0] > TOKENS * D_HIDDEN
    assert kept[2:] == [kept[2]] * 6
    pmoe.pool().trim()
    assert device.kept_bytes == 0


@pytest.mark.parametrize("reuse", [False, "S1", "S4"])
def test_what_a_graph_still_holds_no_other_pass_gets(reuse: object, device: DevicePool) -> None:
    """Several calls come before their backward passes, which run in both orders, with calls in between."""
    layer = build(pipeline=2, memory_reuse=reuse)
    xs = [tokens(seed, TOKENS - 40 * seed) for seed in range(3)]
    expected = [gradients(layer, x, layer(x)) for x in xs]
    for order in ((0, 1, 2), (2, 1, 0)):
        outputs = [layer(x) for x in xs]
        before = [y.detach().clone() for y in outputs]
        for i in order:
            layer(xs[0])
            for got, want in zip(gradients(layer, xs[i], outputs[i]), expected[i], strict=True):
                assert torch.equal(got, want)
        assert all(torch.equal(y, was) for y, was in zip(outputs, before, strict=True))


def test_the_output_and_the_gradients_lie_in_the_pool_as_long_as_they_are_used(device: DevicePool) -> None:
    """From malloc, each step would get new pages, which the system fills with zeros first."""
    layer, x = build(), tokens(0)
    y = layer(x)
    y.square().sum().backward()
    w1, w2 = layer.experts.w1.grad, layer.experts.w2.grad
    assert w1 is not None and w2 is not None
    used = [y, w1, w2]
    del x
    assert device._own.bytes_in_use == sum(tensor.nbytes for tensor in used)
    was = [tensor.detach().clone() for tensor in used]
    other = tokens(1)
    gradients(layer, other, layer(other))
    assert all(torch.equal(tensor, before) for tensor, before in zip(used, was, strict=True))
    del y, w1, w2, used, other
    layer.zero_grad(set_to_none=True)
    assert device._own.bytes_in_use == 0


def test_threads_share_the_pool(device: DevicePool) -> None:
    layers = [build(pipeline=2, memory_reuse="S4") for _ in range(3)]

    def steps(seed: int) -> list[list[Tensor]]:
        layer, x = layers[seed], tokens(seed, TOKENS + seed)
        return [gradients(layer, x, layer(x)) for _ in range(10)]

    alone = [steps(seed)[0] for seed in range(3)]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for want, found in zip(alone, threads.map(steps, range(3)), strict=True):
            for got in found:
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Trimming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        pmoe.pool().trim()
        return self.linear(x)


def test_trim_while_a_pass_runs_is_an_error_and_after_it_none(device: DevicePool) -> None:
    layer = pmoe.MoELayer(D_MODEL, D_HIDDEN, 2, expert=Trimming)
    with pytest.raises(
        RuntimeError, match="the pool of cpu must not be trimmed while a pass of a layer runs"
    ):
        layer(tokens(0))
    pmoe.pool().trim()


@pytest.mark.parametrize("text", ["0", "-2", "", "two"])
def test_a_wrong_number_of_ranks_from_a_launcher_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a layer that offloads raised "integer division or modulo by zero", or named no variable."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ValueError, match=rf"LOCAL_WORLD_SIZE \('{text}'\) must be a number of ranks"):
        HostPool(torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(ValueError, match=rf"WORLD_SIZE \('{text}'\) must be a number of ranks"):
        launch.world_size()
    monkeypatch.delenv("WORLD_SIZE")
    assert launch.world_size() == 1


def test_trim_gives_pages_back_to_the_system_and_leaves_what_is_held() -> None:
    pool = HostPool(torch.device("cpu"))
    held = [pool.take((32 * MIB,), torch.uint8).fill_(value) for value in range(3)]
    del held[1]
    before = resident()
    assert pool.kept_bytes == 32 * MIB
    pool.trim()
    assert before - resident() > 31 * MIB
    assert [int(each.max()) + int(each.min()) for each in held] == [0, 4]
    del held
    pool.trim()
    assert before - resident() > 95 * MIB
    assert pool.kept_bytes == 0
    assert pool.take((MIB,), torch.uint8).fill_(1).all()


def test_what_is_trimmed_in_part_is_handed_out_last() -> None:
    pool = HostPool(torch.device("cpu"))
    held = [pool.take((32 * MIB,), torch.uint8).fill_(value) for value in range(3)]
    first, last = held[0].data_ptr(), held[2].data_ptr()
    del held[0], held[1]
    before = resident()
    pool.trim(40 * MIB)  # all of the last, and 8 MiB at the first one's end
    assert 39 * MIB < before - resident() < 41 * MIB
    assert int(held[0].max()) + int(held[0].min()) == 2
    again = [pool.take((24 * MIB,), torch.uint8), pool.take((32 * MIB,), torch.uint8)]
    assert [each.data_ptr() for each in again] == [first, last]
    assert before - resident() > 39 * MIB  # nothing was touched
    again[0].fill_(1)
    assert before - resident() > 39 * MIB  # its pages had stayed


def test_a_layer_that_keeps_more_than_its_budget_between_steps_gives_back_the_excess_alone() -> None:
    device = DevicePool(torch.device("cpu"))
    like = torch.empty(0, dtype=torch.uint8)
    device.new(like, 96 * MIB).fill_(1)
    before = resident()
    device.keep_at_most(80 * MIB)
    assert 15 * MIB < before - resident() < 17 * MIB
    assert device.kept_bytes == 80 * MIB
    device.keep_at_most(96 * MIB)
    assert device.kept_bytes == 80 * MIB


def test_a_layer_with_a_budget_gives_back_what_others_left(device: DevicePool) -> None:
    large = build(pipeline=1)
    x = tokens(0, 16 * TOKENS)
    gradients(large, x, large(x))
    with torch.no_grad():
        least = build(pipeline=4, memory_reuse="S4").predict_memory(TOKENS).promised
    assert device.kept_bytes > 2 * least
    small = build(pipeline=4, memory_reuse="S4", memory_budget=2 * least)
    x = tokens(1)
    gradients(small, x, small(x))
    assert device.kept_bytes <= 2 * least


def test_torchs_profiler_sees_what_a_pass_takes(device: DevicePool) -> None:
    layer, x = build(pipeline=2, memory_reuse="S4"), tokens(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
        layer(x)
    assert device.kept_bytes == 0


# ---- memory that malloc hands out

STEPS = """
import ctypes, torch, pmoe

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

ask = ctypes.CDLL(None).mallinfo2
ask.restype = Info
torch.manual_seed(0)
torch.set_num_threads(1)
layer = pmoe.MoELayer(64, 128, 4, pipeline=2)
resident = []
for step in range({steps}):
    x = torch.randn(500 + 7 * step % {counts}, 64, requires_grad=True)
    layer(x).square().mean().backward()
    layer.zero_grad(set_to_none=True)
    if step in ({first}, {steps} - 1):
        pages = int(open("/proc/self/statm").read().split()[1])
        print(ask().uordblks, 4096 * pages)
"""


def measured(**numbers: int) -> tuple[list[int], list[int]]:
    lines = fresh.run(STEPS.format(**numbers)).splitlines()[-2:]
    used, pages = zip(*(map(int, line.split()) for line in lines), strict=True)
    return list(used), list(pages)


def test_rows_in_other_numbers_leave_nothing_in_memory() -> None:
    """oneDNN once kept a compiled kernel of gelu for each number of rows."""
    (first, last), _ = measured(steps=130, counts=300, first=30)
    assert last - first < MIB // 4


@pytest.mark.slow
def test_resident_memory_is_flat() -> None:
    _, (first, last) = measured(steps=1200, counts=1000, first=200)
    assert last < 1.03 * first
