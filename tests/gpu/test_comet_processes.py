"""The fused kernels of two processes that share one GPU, over CUDA IPC: values only, few rows, and no times.

Kernels of two processes may never run together there: then one that waits on the device for the other's waits
in vain. So a flag is probed first. Where it comes through, layers and steps run as on devices of their own.
Where it does not, and in tests of its own everywhere, nobody waits on the device: every launch is parted from
the next by a barrier of the host's, and comes again until what it would have waited for is there (`Parted`).

Letters: T tokens, W ranks, E experts of a rank, M = d_model.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.heap import close_heaps
from pmoe.comm.heap.providers import process_heap
from pmoe.comm.ranks import Ranks
from pmoe.kernels.comet import backend as comet_backend
from pmoe.kernels.comet.launcher import FusedKernel, Launcher
from pmoe.kernels.heap import WAIT_SECONDS, Heap, HeapError, HeapShape
from pmoe.kernels.registry import PMOE, PRODUCTS
from pmoe.schedule.tasks import PassDirection
from tests.faults import FaultyLauncher, InjectedFaults
from tests.gpu.fused import CPU, DEVICE, Backward, Case, Forward, Player, World, need_kernels
from tests.gpu.support import NEEDS_GPU, make_batch, make_layer, plain_forward
from tests.gpu.test_alone import assert_as_near
from tests.heap_probe import probe_flag
from tests.pool import Pool

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(200)]

PROBE_SECONDS, BOUND_SECONDS, GROUP_SECONDS = 10.0, 30, 60
MAX_ROWS = 256

_pools: list[Pool] = []


def two() -> Pool:
    """Two processes, whose group outlasts a kernel's bound."""
    if not _pools or not _pools[-1].usable:
        _pools.append(Pool(2, timeout_seconds=GROUP_SECONDS))
    return _pools[-1]


@pytest.fixture(scope="module", autouse=True)
def pools() -> Any:
    need_kernels()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_MODULE_LOADING", "EAGER")  # for the processes of the pools, before they start CUDA
        yield
        while _pools:
            _pools.pop().stop()


@functools.cache
def seconds_of_a_flag() -> float | None:
    first, second = two().run(probed)
    assert first == second
    return first


def probed(rank: int, world: int) -> float | None:
    torch.cuda.set_device(DEVICE)
    heap = process_heap(Ranks(), HeapShape(world, 1, 16, 16, 64, torch.bfloat16), DEVICE)
    seconds = probe_flag(heap, Ranks(), seconds=PROBE_SECONDS)
    heap.close()
    return seconds


@pytest.fixture
def together(capsys: pytest.CaptureFixture[str]) -> None:
    """Skips where the kernels of two processes do not run together."""
    seconds = seconds_of_a_flag()
    with capsys.disabled():
        if seconds is None:
            told = (
                f"did not come in {PROBE_SECONDS:g} s: waiting on the device between processes is OPEN here"
            )
        else:
            told = f"came after {seconds:.6f} s"
        print(f"\na flag of another process on {DEVICE} {told}")
    if seconds is None:
        pytest.skip("kernels of two processes do not run together; the test with parted launches stands in")


class Parted(FaultyLauncher):
    """Nobody waits for another rank on the device. Each launch stands between barriers of the host's:

    dispatch   a first one for its grants alone: its rows may go where those of the round before went, or
               beyond; a second one, by which every row is where it belongs; then one that computes, whose
               rows are the same once more
    combine    a first one, by which every sum comes home; a second one, which finds them there
    """

    def __init__(self, heaps: Sequence[Heap], divide: Any) -> None:
        super().__init__(heaps, divide, InjectedFaults(not_waited=("grant", "arrival", "returned")))

    def launch(
        self,
        kernel: FusedKernel,
        direction: PassDirection,
        ranks: Sequence[dict[str, int]],
        **options: Any,
    ) -> None:
        sending = [{**fields, "computes": 0} for fields in ranks]
        turns = [sending, sending, ranks] if kernel == "dispatch" else [ranks, ranks]
        if turns[-1] == sending:
            turns.pop()
        self.part()
        for turn in turns:
            super().launch(kernel, direction, turn, **options)
            self.part()

    def part(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier()


# ---- steps


CASES = {
    "gelu": Case(tokens=(40, 75), experts=2, top_k=2, d_model=264),
    "swiglu, drops": Case(tokens=(64, 9), experts=3, top_k=3, activation="swiglu", dropped=0.2),
    "a rank without tokens": Case(tokens=(0, 120), experts=2, top_k=2, activation="silu", bias=False),
}


def played(rank: int, world: int, case: Case, seed: int, parted: bool) -> list[tuple[Forward, Backward]]:
    """Two rounds of a rank's own launches, on the CPU."""
    os.environ[WAIT_SECONDS] = str(BOUND_SECONDS)
    torch.cuda.set_device(DEVICE)
    found: list[tuple[Forward, Backward]] = []
    given = [World(case, torch.Generator().manual_seed(seed + turn), where=CPU) for turn in range(2)]
    shape = HeapShape(
        case.num_ranks,
        case.experts,
        max(each.max_received for each in given),
        max(each.max_sent for each in given),
        case.d_model,
        case.dtype,
    )
    heap = process_heap(Ranks(), shape, DEVICE)
    for each in given:
        player = Player(each, [heap], make=Parted if parted else Launcher)
        forward = player.forward()
        backward = player.backward(forward.hidden)
        player.check()
        found.append((on_cpu(forward), on_cpu(backward)))
    heap.close()
    return found


def on_cpu(found: Any) -> Any:
    """A Forward or a Backward, to be sent to another process."""
    fields = {}
    for name, value in vars(found).items():
        fields[name] = value.cpu() if isinstance(value, Tensor) else [each.cpu() for each in value]
    return type(found)(**fields)


def joined(world: World, of_ranks: Sequence[Any]) -> Any:
    """What each process has of its own rank and tokens, in one."""
    fields: dict[str, Any] = {}
    for name, value in vars(of_ranks[0]).items():
        if isinstance(value, list):
            fields[name] = [getattr(each, name)[0] for each in of_ranks]
            continue
        own = zip(of_ranks, world.first_token, world.first_token[1:], strict=False)
        fields[name] = torch.cat([getattr(each, name)[begin:end] for each, begin, end in own])
    return type(of_ranks[0])(**fields)


def check_steps(case: Case, *, parted: bool) -> None:
    assert sum(case.tokens) * case.top_k <= MAX_ROWS
    seed = 100 * len(case.tokens) + case.top_k
    by_rank = two().run(played, case, seed, parted, timeout=150)
    for turn in range(2):
        world = World(case, torch.Generator().manual_seed(seed + turn), where=CPU)
        forward, backward = (joined(world, [found[turn][way] for found in by_rank]) for way in (0, 1))
        world.check_forward(forward)
        world.check_backward(backward, forward.hidden)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("together")
def test_every_element_of_both_passes(case: Case) -> None:
    check_steps(case, parted=False)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_element_of_both_passes_by_parted_launches(case: Case) -> None:
    check_steps(case, parted=True)


# ---- layers


OPTIONS: dict[str, dict[str, Any]] = {
    "ffn": {},
    "swiglu, sent again": {"expert": "swiglu", "memory_reuse": "S4"},
    "forward alone": {"fused": "forward", "pipeline": 2},
}
TOKENS = (70, 50)


def stepped(rank: int, world: int, options: dict[str, Any], parted: bool) -> dict[str, Tensor]:
    """A rank's output and gradients, and its choices, on the CPU."""
    os.environ[WAIT_SECONDS] = str(BOUND_SECONDS)
    torch.cuda.set_device(DEVICE)
    xs, grads = make_batch(sum(TOKENS), dtype=torch.bfloat16)
    begin = sum(TOKENS[:rank])
    x, grad = (each[begin : begin + TOKENS[rank]].clone() for each in (xs, grads))
    launches = 0
    launch = Launcher.launch

    def counted(self: Launcher, *args: Any, **given: Any) -> None:
        nonlocal launches
        launches += 1
        launch(self, *args, **given)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), PRODUCTS.forcing(PMOE):
        warnings.filterwarnings("error", message=".*falls back.*")
        patch.setattr(
            "pmoe.choose.open_choice.measure_products_of", lambda *_, **__: None
        )  # nothing is measured
        patch.setattr(Launcher, "launch", counted)
        if parted:
            patch.setattr(comet_backend, "Launcher", Parted)
        layer = make_layer(torch.bfloat16, **options)
        x.requires_grad_()
        y = layer(x)
        (y * grad).sum().backward()
        torch.cuda.synchronize()
        assert bool(launches) == bool(options.get("fused"))
        found = {"y": y.detach(), "x": x.grad, "expert": layer.gate(x).expert}
        found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
        close_heaps(layer.ranks)
    return {name: value.cpu() for name, value in found.items()}


def whole(of_ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As one rank would have it: tokens and experts follow each other, the gate's gradients add up."""
    found = {}
    for name in of_ranks[0]:
        parts = [each[name] for each in of_ranks]
        found[name] = sum(parts[1:], parts[0]) if name.startswith("gate.") else torch.cat(parts)
    return found


def check_layer(options: dict[str, Any], *, parted: bool) -> None:
    options = {"fused": True, **options}
    assert sum(TOKENS) * 2 <= MAX_ROWS
    fused = whole(two().run(stepped, options, parted, timeout=150))
    plain = whole(two().run(stepped, {**options, "fused": False}, False, timeout=150))
    expert_TK = fused.pop("expert")
    assert torch.equal(expert_TK, plain.pop("expert"))
    kind = options.get("expert", "ffn")
    alone = make_layer(torch.bfloat16, **({"expert": kind}))
    x, grad = (each.cpu().double() for each in make_batch(sum(TOKENS), dtype=torch.bfloat16))
    exact = {name: value.detach().cpu().double() for name, value in alone.named_parameters()}
    leaves = {name: value.requires_grad_() for name, value in exact.items()}
    x.requires_grad_()
    y, _ = plain_forward(leaves, x, expert_TK, dtype=torch.float64, kind=kind)
    (y * grad).sum().backward()
    expected = {"y": y.detach(), "x": x.grad, **{name: leaf.grad for name, leaf in leaves.items()}}
    assert_as_near(fused, plain, expected, torch.bfloat16)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.usefixtures("together")
def test_a_layer_is_as_near_to_float64_as_unfused(options: dict[str, Any]) -> None:
    check_layer(options, parted=False)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_layer_is_as_near_to_float64_by_parted_launches(options: dict[str, Any]) -> None:
    check_layer(options, parted=True)


# ---- a rank that never comes


def absent(rank: int, world: int, case: Case, seed: int) -> str:
    """Rank 1 takes part in all but the launches; afterwards both run on a new heap."""
    os.environ[WAIT_SECONDS] = "2"
    torch.cuda.set_device(DEVICE)
    given, told = World(case, torch.Generator().manual_seed(seed), where=CPU), ""
    shape = HeapShape(2, case.experts, given.max_received, given.max_sent, case.d_model, case.dtype)
    heap = process_heap(Ranks(), shape, DEVICE)
    if rank == 0:
        player = Player(given, [heap])
        try:
            player.forward()
            player.check()
        except HeapError as error:
            told = str(error)
    dist.barrier()
    heap.close()
    usable = torch.ones(3, device=DEVICE).sum().item() == 3
    return told if usable else "the device is lost"


def test_a_process_that_never_launches_is_named_and_the_other_goes_on() -> None:
    """Needs no kernels that run together."""
    case = CASES["gelu"]
    told, other = two().run(absent, case, 5)
    assert "rank 0 waited 2 s in vain for rank 1" in told and other == ""
    check_steps(case, parted=True)
