"""A layer by one persistent kernel for each pass, on one rank. The emulator runs every thread of the kernel.

It is compared with the plain layer and with float64. Other tests: messages if the kernel is not used, and
batches that do not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

import pmoe
from bench.bench_launches import launched
from pmoe import warn
from pmoe.comm.counts import CountsExchange
from pmoe.comm.heap import close_heaps
from pmoe.comm.heap.providers import virtual_heaps
from pmoe.comm.ranks import Ranks
from pmoe.decide import fused_choice, padded_counts
from pmoe.gates.capacity import expert_capacity, within_capacity
from pmoe.kernels import route
from pmoe.kernels.comet.launcher import Division, Launcher
from pmoe.kernels.flashdmoe import TILE_ROWS, RoutingInput, forward_tensors, launch_pass, pass_tensors
from pmoe.kernels.heap import HeapShape
from pmoe.runners import fused_steps
from pmoe.runners.fused_steps import Request, heap_shape
from tests.emulated import emulated, load_kernels
from tests.heaps import FileMemory
from tests.reference import relative_error

BF16, CPU = torch.bfloat16, torch.device("cpu")
M, H, E, T = 72, 40, 4, 23
PAIRS = [pmoe.Restore(d, h) for d in ("keep", "communicate") for h in ("keep", "recompute")]


@pytest.fixture
def _emulated(kernels: Path) -> Iterator[None]:
    with emulated(kernels), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*falls back.*")
        yield
        close_heaps(Ranks.single())


def make(fused: bool | str = "persistent", dtype: torch.dtype = BF16, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(3)
    return pmoe.MoELayer(M, H, E, **{"top_k": 2, **options}, dtype=BF16, fused=fused).to(dtype)


def step(layer: pmoe.MoELayer, count: int, between: Any = None) -> dict[str, Tensor]:
    """Runs forward and backward. Returns T_O, l_aux and every gradient of a loss of both.

    between: function that is called between the passes.
    """
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(count, M, generator=generator, dtype=torch.float64).to(BF16) for _ in range(2))
    x, grad = (each.to(layer.experts.w1.dtype) for each in rows)
    x[:, 0] = 1
    x.requires_grad_()
    layer.zero_grad()
    y = layer(x)
    if between is not None:
        between()
    ((y * grad).sum() + layer.l_aux).backward()
    assert x.grad is not None
    grads = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, **grads}


def check(count: int = T, between: Any = None, skews: bool = False, **options: Any) -> None:
    layers = [make(**options), make(False, **options), make(False, torch.float64, **options)]
    for layer in layers:
        if skews:
            with torch.no_grad():
                layer.gate.weight[1, 0] += 30
    found, plain, exact = (step(each, count, between if each is layers[0] else None) for each in layers)
    assert layers[0].ran is not None and layers[0].ran.path == "persistent"
    assert found.keys() == exact.keys()
    for name, wanted in exact.items():
        error, other = (relative_error(each[name].double(), wanted) for each in (found, plain))
        room = 2e-2 if count == 1 else 4e-3  # few numbers: their rounding does not average out
        assert error <= 2 * other + room, (name, error, other)
    again = step(layers[0], count)
    assert all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_output_and_gradients_are_as_near_as_the_plain_layers(pair: pmoe.Restore) -> None:
    check(memory_reuse=pair, expert="swiglu" if pair == PAIRS[3] else "ffn", bias=pair != PAIRS[3])


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_other_activations_too(activation: str, pair: pmoe.Restore) -> None:
    check(memory_reuse=pair, activation=activation, top_k=3)


@pytest.mark.usefixtures("_emulated")
def test_no_tokens_one_token_and_all_tokens_to_one_expert() -> None:
    for count in (0, 1):
        check(count, memory_reuse="S4")
    check(top_k=1, skews=True, z_loss_weight=0.1)  # the other experts have no rows


@pytest.mark.usefixtures("_emulated")
def test_rows_over_the_capacity_are_dropped_as_everywhere() -> None:
    check(capacity_factor=0.5, skews=True)


@pytest.mark.usefixtures("_emulated")
def test_with_pad_to_capacity_the_launch_drops_them_and_nothing_is_exchanged_or_read_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"capacity_factor": 0.5, "pad_to_capacity": True}
    check(skews=True, **options)
    check(290, skews=True, capacity_factor=1.25, pad_to_capacity=True, memory_reuse="S4")  # cells of a pool
    monkeypatch.setattr(padded_counts, "compares_always", lambda _: False)  # as on a GPU
    layer, x = make(**options), torch.randn(T, M, dtype=BF16)
    layer(x)
    with pytest.MonkeyPatch.context() as patch, NothingRead():
        patch.setattr(CountsExchange, "__init__", lambda *_, **__: pytest.fail("counts are exchanged"))
        layer(x)
    assert layer.ran is not None and layer.ran.path == "persistent"
    capacity = expert_capacity(0.5, T, 2, E)
    routed_E = layer.gate(x).expert.flatten().bincount(minlength=E)
    assert layer.tokens_per_expert.tolist() == routed_E.clamp(max=capacity).tolist()


@pytest.mark.usefixtures("_emulated")
def test_one_rank_makes_no_counts_and_takes_every_batch() -> None:
    layer, x = make(top_k=1, slack=1.0), torch.ones(400, M, dtype=BF16)
    with torch.no_grad():
        layer.gate.weight[1, 0] += 30  # every row is of one expert
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountsExchange, "__init__", lambda *_, **__: pytest.fail("counts are exchanged"))
        layer(x)
        with NothingRead():
            layer(x)
        assert layer.ran is not None and layer.ran.path == "persistent"
    check(300, top_k=1, skews=True, memory_reuse="S4")


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("gate", ["batch_prioritised", "own"])
def test_a_gate_that_drops_rows_itself_may_keep_more_than_the_layers_capacity(gate: str) -> None:
    """Cells have room for the layer's capacity. Rows of such a gate go into a pool instead."""
    layer = make(gate="batch_prioritised", capacity_factor=4.0)
    if gate == "own":
        layer.gate = Keeping(layer.gate)
    layer.capacity_factor = 0.1
    with torch.no_grad():
        layer.gate.weight[1, 0] += 30
    x = torch.ones(150, M, dtype=BF16)
    y = layer(x)
    assert layer.ran is not None and layer.ran.path == "persistent"
    assert layer.tokens_per_expert.tolist()[1] == 150
    layer.fused = False
    assert relative_error(y.double(), layer(x).double()) < 2e-2


class Keeping(torch.nn.Module):
    """A gate of a user's own, which returns the routing of another gate."""

    def __init__(self, gate: torch.nn.Module) -> None:
        super().__init__()
        self.gate, self.weight = gate, gate.weight

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        routing: pmoe.Routing = self.gate(x_TM)
        return routing


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"slack": 8.0, "z_loss_weight": 0.1}, id="one rank's counts"),
        pytest.param({"gate": "switch", "top_k": 1, "slack": 8.0}, id="switch"),
        pytest.param({"capacity_factor": 0.75, "pad_to_capacity": True}, id="padded"),
    ],
)
def test_the_launch_itself_chooses_experts_and_makes_weights_and_l_aux(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_counts, "compares_always", lambda _: False)  # as on a GPU
    layer, x = make(**options), torch.randn(T, M, dtype=BF16)
    layer(x)
    on_host = ["aten::full"] * 2 * layer.pad_to_capacity
    assert launched(lambda: layer(x)) == on_host  # and the kernel, which no profiler sees here
    with torch.no_grad():
        assert launched(lambda: layer.eval()(x)) == on_host


@pytest.mark.usefixtures("_emulated")
def test_a_gate_that_does_not_learn_has_no_gradient() -> None:
    layer, plain = make(gate="switch", top_k=1), make(False, gate="switch", top_k=1)
    for each in (layer, plain):
        each.gate.weight.requires_grad_(False)
    found, wanted = step(layer, T), step(plain, T)
    assert "gate.weight" not in found.keys() == wanted.keys()
    assert all(relative_error(found[name].double(), wanted[name].double()) < 1e-2 for name in wanted)


@pytest.mark.usefixtures("_emulated")
def test_rows_narrowed_by_autocast_are_routed_by_wide_ones() -> None:
    found = {}
    for fused in ("persistent", False):
        layer, x = make(fused, torch.float32, slack=8.0), torch.randn(T, M)
        with torch.autocast("cpu", BF16):
            y = layer(x)
        (y.float().square().sum() + layer.l_aux).backward()
        assert layer.gate.weight.grad is not None
        found[fused] = (layer.l_aux.detach(), layer.gate.weight.grad, y.detach())
        torch.manual_seed(3)
    for own, plain in zip(found["persistent"], found[False], strict=True):
        assert relative_error(own.double(), plain.double()) < 2e-2


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("contexts", [pmoe.checkpoint_contexts, noop_context_fn])
def test_a_call_that_may_be_run_again_chooses_before_the_launch(contexts: Any) -> None:
    layer, x = make(slack=8.0), torch.randn(T, M, dtype=BF16, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "deferred_routing", lambda *_, **__: pytest.fail("nothing is chosen"))
        y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        y.sum().backward()
    again = x.grad
    x.grad = None
    layer(x).sum().backward()
    assert again is not None and x.grad is not None
    assert relative_error(again.double(), x.grad.double()) < 1e-3  # a softmax is added up in another order


@pytest.mark.usefixtures("_emulated")
def test_what_was_promised_is_kept_where_no_launch_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"capacity_factor": 0.75, "pad_to_capacity": True}
    wanted = step(make(False, **options), T)
    monkeypatch.setattr(fused_steps, "steps_for", lambda _: "there is no heap")
    warn.GIVEN.clear()
    with warnings.catch_warnings(), pytest.warns(UserWarning, match="because there is no heap"):
        warnings.simplefilter("always")
        found = step(layer := make(**options), T)
    assert layer.ran is not None and layer.ran.path == "pipeline"
    for name, each in wanted.items():
        assert relative_error(found[name].double(), each.double()) < 1e-2, name
    with torch.autocast("cpu", torch.bfloat16):
        layer(x := torch.randn(T, M, dtype=BF16))
    l_aux = layer.gate(x).l_aux
    assert relative_error(layer.l_aux.double(), l_aux.double()) < 1e-6


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 4.0, "pad_to_capacity": True}])
def test_hooks_of_the_gate_change_its_routing_before_the_launch(options: dict[str, Any]) -> None:
    options["top_k"] = 1
    layer, plain, x = make(**options), make(False, **options), torch.randn(T, M, dtype=BF16)
    for each in (layer, plain):
        each.gate.register_forward_hook(lambda *given: replace(given[-1], expert=0 * given[-1].expert))
    assert relative_error(layer(x).double(), plain(x).double()) < 1e-2
    assert layer.ran is not None and layer.ran.path == "persistent"


@pytest.mark.usefixtures("_emulated")
def test_a_schedule_may_set_numpys_numbers() -> None:
    layer, x = make(), torch.randn(T, M, dtype=BF16)
    layer.gate.z_loss_weight, layer.gate.normalize = np.float32(0.25), np.bool_(False)
    layer(x)
    assert layer.ran is not None and layer.ran.path == "persistent"
    assert relative_error(layer.l_aux.double(), layer.gate(x).l_aux.double()) < 1e-2


@pytest.mark.usefixtures("_emulated")
def test_more_experts_than_a_launch_chooses_among_are_chosen_before() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_choice, "MOST_EXPERTS", E - 1)
        patch.setattr(route, "deferred_routing", lambda *_, **__: pytest.fail("nothing is chosen"))
        check(slack=8.0)


class NothingRead(TorchDispatchMode):
    """A mode in which the test fails if a value of a tensor is read on the host."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert op is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"
        return op(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_emulated")
def test_a_larger_batch_between_the_passes_makes_a_new_heap_that_serves_backward() -> None:
    def larger() -> None:
        with torch.no_grad():
            make()(torch.ones(150, M, dtype=BF16))

    check(memory_reuse=PAIRS[0], between=larger)


def test_without_kernels_the_plain_layer_computes_and_a_warning_says_why() -> None:
    layer, plain = make(), make(False)
    warn.GIVEN.clear()
    with pytest.warns(UserWarning, match=r"fused \('persistent'\) falls back .* because device cpu"):
        found = step(layer, T)
    assert all(torch.equal(found[name], wanted) for name, wanted in step(plain, T).items())


def test_offloaded_pairs_are_refused(kernels: Path) -> None:
    layer = make(memory_reuse=pmoe.Restore("offload", "keep"))
    warn.GIVEN.clear()
    with emulated(kernels), pytest.warns(UserWarning, match=r"because memory_reuse \(\S+\) offloads"):
        step(layer, T)
    assert layer.ran is not None and layer.ran.path == "pipeline"


def test_a_cell_holds_its_capacity_and_a_pool_all_rows_times_the_slack_in_whole_tiles() -> None:
    def shape(tokens: int, ranks: int = 1, **options: Any) -> HeapShape:
        group = Ranks.single()
        group.size = ranks
        request = Request(
            ranks=group, device=torch.device("cpu"), dtype=BF16, d_model=M, d_hidden=H,
            activation="relu", experts=E, top_k=2, max_tokens=tokens, max_rows=0, needs_grad=True,
            is_persistent=True, **options,
        )  # fmt: skip
        return heap_shape(request)

    for factor, rows in {0.1: 128, 1.0: 512, 1.1: 640, 8.0: 4096}.items():
        cells = shape(8192, 8, capacity_factor=factor)
        assert cells.rows == rows and not cells.is_pool
    assert shape(0, capacity_factor=1.0).rows == TILE_ROWS
    waste = TILE_ROWS - 1  # of a cell whose last tile holds one row
    for ranks, options, least in (
        (8, {"slack": 1.25}, 1024 * 2 * 1.25),
        (8, {"slack": 100.0}, 1024 * 2 * 8),  # all that there are
        (1, {"slack": 1.25}, 1024 * 2),
        (8, {"capacity_factor": 16.0}, 1024 * 2 * 8),  # nothing is dropped: 32 cells of 1024 rows are more
        (1, {"capacity_factor": 1.1}, 1024 * 2),
    ):
        pool = shape(1024, ranks, **options)
        assert pool.is_pool and 0 <= pool.rows - (least + ranks * E * waste) < TILE_ROWS


def test_rows_stand_in_their_cells_in_token_order_without_dropped_ones(kernels: Path) -> None:
    """The launch itself finds the row of each choice, and drops choices above the capacity.

    The experts may be int32 or int64.
    """
    torch.manual_seed(2)
    expert_TK = torch.rand(70, E).topk(2).indices
    keep_TK = torch.rand(70, 2) > 0.3
    # What the gate itself drops counts as an expert's that there is not.
    asked_TK = expert_TK.where(keep_TK, torch.full_like(expert_TK, E))
    within = within_capacity(asked_TK, 20, torch.zeros(E + 1, dtype=torch.int64))[0] & keep_TK
    with emulated(kernels):
        for given_TK in (expert_TK, expert_TK.int()):
            (heap,) = virtual_heaps(HeapShape(1, E, TILE_ROWS, 70, M, BF16, H), CPU, memory=FileMemory())
            given = pass_tensors(heap, given_TK, zeros(70, M), torch.rand(70, 2), parameters(E), "relu")
            chosen = RoutingInput(expert_TK=given_TK, keep_TK=keep_TK, capacity=20)
            made = forward_tensors(heap, given, chosen, keeps_input=False, keeps_hidden=False)
            launch_pass(Launcher([heap], lambda *_: Division(1)), "forward", "relu", [made])
            heap.close()
            assert torch.equal(made["row"] >= 0, within) and torch.equal(made["expert"], expert_TK.int())
            for e in range(E):
                slots = ((expert_TK == e) & within).flatten().nonzero()[:, 0].int()
                assert made["send_counts"][e] == len(slots) > 0
                assert torch.equal(made["slot"][e, : len(slots)], slots)
                assert torch.equal(made["row"].view(-1)[slots.long()], torch.arange(len(slots)).int())


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


def parameters(experts: int) -> Any:
    return zeros(experts, H, M), zeros(experts, M, H), None, None


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"source_TM": torch.zeros(3, M)}, r"rows of dtype torch.float32 must be torch.bfloat16"),
        ({"source_TM": zeros(2, M)}, r"rows of shape \(2, 72\) must have the shape \(3, 72\)"),
        ({"source_TM": zeros(3 * M + 1)[1:].view(3, M)}, r"rows at address .* must be aligned to 16"),
        ({"again_TM": zeros(3, M + 8)[:, :M]}, r"rows of .* must be contiguous"),
        ({"weight_TK": torch.zeros(3, 1)}, r"weight of shape \(3, 1\) must have the shape \(3, 2\)"),
        ({"activation": "swiglu"}, r"w1 of shape \(3, 40, 72\) must have the shape \(E, 80, M\)"),
        ({"w2": zeros(3, M, 48)}, r"w2 of shape \(3, 72, 48\) must have the shape \(E, M, 40\)"),
        ({"b1": zeros(3, 8)}, r"bias of shape \(3, 8\) must have the shape \(3, 40\)"),
        ({"keep_TK": torch.ones(3, 1) > 0}, r"keep of shape \(3, 1\) must have the shape \(3, 2\)"),
        ({"expert_TK": torch.zeros(3, 2)}, r"expert of dtype torch.float32 must be torch.int64 or"),
    ],
)  # fmt: skip
def test_what_the_kernel_would_read_wrong_is_named_before_a_launch(
    kernels: Path, changed: dict[str, Any], message: str
) -> None:
    given = {
        "expert_TK": torch.zeros(3, 2, dtype=torch.int64),
        "source_TM": zeros(3, M),
        "weight_TK": torch.zeros(3, 2),
        "activation": "relu",
        "again_TM": None,
        "w1": zeros(3, H, M),
        "w2": zeros(3, M, H),
        "b1": None,
    } | changed
    chosen = RoutingInput(expert_TK=given["expert_TK"], keep_TK=given.pop("keep_TK", None))
    parameters = (given.pop("w1"), given.pop("w2"), given.pop("b1"), None)
    with emulated(kernels):
        (heap,) = virtual_heaps(HeapShape(1, 3, TILE_ROWS, 16, M, BF16, H), CPU, memory=FileMemory())
        with pytest.raises(ValueError, match=message):
            made = pass_tensors(heap, parameters=parameters, **given)
            forward_tensors(heap, made, chosen, keeps_input=False, keeps_hidden=False)
        heap.close()


def test_each_pass_is_one_launch(kernels: Path) -> None:
    """The runtime under the emulator records launches. COMET's kernels take two in forward."""
    launched = load_kernels(kernels).stub_launched
    for fused, forward in (("persistent", 1), (True, 2)):
        with emulated(kernels):
            layer, x = make(fused), torch.ones(T, M, dtype=BF16, requires_grad=True)
            begun = len(launched())
            y = layer(x)
            between = len(launched())
            y.sum().backward()
            close_heaps(Ranks.single())
        assert between - begun == forward
        assert (len(launched()) - between == 1) == (fused == "persistent")
