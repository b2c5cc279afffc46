"""Batch invariance on one rank: a token's output and gradient are the same bits in every batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.kernels import fixed_tiles
from pmoe.kernels.fixed_tiles import rows_of_tile, with_alignment
from pmoe.layer.batch_invariant import EXPERTS, GATES
from pmoe.ordering.in_turn import InTurnOrder
from pmoe.ordering.sorted import SortedOrder
from tests.allocated import peak_of_step
from tests.kit import gradients
from tests.reference import relative_error

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "swiglu": {"expert": "swiglu", "gate": "sigmoid", "bias": False},
    "deepseek": {"gate": "deepseek", "shared_expert": 9, "activation": "silu"},
    "switch": {"gate": "switch", "top_k": 1, "activation": "relu"},
}
SIZES = ((12, 20), (17, 33))
"""(d_model, d_hidden). With the second, products in float64 depend on a row's place in a tile."""


def build(
    sizes: tuple[int, int] = SIZES[0], dtype: torch.dtype = torch.float64, **options: Any
) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(*sizes, **{"num_experts": 4, "top_k": 2, "dtype": dtype, **options})


def rows(count: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x, dy) of ``count`` tokens."""
    torch.manual_seed(1)
    return torch.randn(count, width).to(dtype), torch.randn(count, width).to(dtype)


def bits(layer: pmoe.MoELayer, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a batch, and the gradient of its tokens that comes from the output."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * dy).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


WAYS: tuple[tuple[int, Any], ...] = ((1, False), (3, False), (2, "S1"), (4, "S4"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_in_every_batch(
    kind: str, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    layer = pmoe.make_batch_invariant(build(sizes, dtype, **KINDS[kind]))
    x, dy = rows(75, sizes[0], dtype)
    y, grad = bits(layer, x, dy)
    batches = ([3], [70], list(range(1, 75, 3)), list(range(60, 0, -1)))
    for batch, (n, pair) in zip(batches, WAYS, strict=True):
        layer.pipeline = n
        layer.memory_reuse = pair
        part, part_grad = bits(layer, x[batch], dy[batch])
        assert torch.equal(part, y[batch]), (batch, n, pair)
        assert torch.equal(part_grad, grad[batch]), (batch, n, pair)
        with torch.no_grad():
            assert torch.equal(layer.eval()(x[batch]), y[batch])
        layer.train()


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_that_of_the_plain_layer(kind: str) -> None:
    plain = build(**KINDS[kind])
    layer = pmoe.make_batch_invariant(build(**KINDS[kind]))
    x, _ = rows(40, 12, torch.float64)
    wanted = gradients(plain, x)
    for name, value in gradients(layer, x).items():
        assert relative_error(value, wanted[name]) <= 1e-12, name


def test_weight_gradients_repeat_with_the_same_batch() -> None:
    layer = pmoe.make_batch_invariant(build(dtype=torch.float32, pipeline=2))
    x, _ = rows(40, 12, torch.float32)
    first, second = (gradients(layer, x) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_parameters_state_and_hooks_stay() -> None:
    layer = build(gate="deepseek", shared_expert=8)
    parameters = dict(layer.named_parameters())
    names = list(layer.state_dict())
    assert pmoe.make_batch_invariant(layer) is layer
    assert list(layer.state_dict()) == names
    assert all(parameter is parameters[name] for name, parameter in layer.named_parameters())
    x, _ = rows(9, 12, torch.float64)
    y = layer(x)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), pmoe.make_batch_invariant(layer)):
        assert torch.equal(again(x), y)
        assert type(again.experts) in EXPERTS.values() and type(again.order) is InTurnOrder


def test_a_model_of_several_layers_under_autocast() -> None:
    model = nn.Sequential(build(dtype=torch.float32), build(dtype=torch.float32, expert="swiglu"))
    pmoe.make_batch_invariant(model)
    x, _ = rows(33, 12, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        assert y.dtype == torch.bfloat16
        for token in (0, 17, 32):
            assert torch.equal(model(x[token : token + 1]), y[token : token + 1])


@pytest.mark.parametrize("options", [{"pipeline": True}, {"pipeline": "solve"}])
def test_a_choice_by_measured_times_changes_no_bits(options: dict[str, Any]) -> None:
    layer = pmoe.make_batch_invariant(build(dtype=torch.float32, **options))
    x, _ = rows(60, 12, torch.float32)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(layer(x[9:11]), y[9:11])


class Wrapper(nn.Module):
    """A wrapper of another library around the experts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_experts_in_a_wrapper() -> None:
    layer = build(dtype=torch.float32)
    layer.experts = Wrapper(layer.experts)  # type: ignore[assignment]
    pmoe.make_batch_invariant(layer)
    layer.pipeline = 2
    x, _ = rows(40, 12, torch.float32)
    assert torch.equal(layer(x[7:8]), layer(x)[7:8])


def test_a_token_that_is_not_finite_changes_no_other() -> None:
    layer = pmoe.make_batch_invariant(build(dtype=torch.float32, check_finite=False))
    x, _ = rows(40, 12, torch.float32)
    y = layer(x)
    x[3] = torch.nan
    x[4] = torch.inf
    others = [token for token in range(40) if token not in (3, 4)]
    assert torch.equal(layer(x)[others], y[others])


def test_a_batch_without_tokens() -> None:
    layer = pmoe.make_batch_invariant(build())
    assert layer(torch.zeros(0, 12, dtype=torch.float64)).shape == (0, 12)


def test_deepseeks_loads_count_tokens_and_no_padding() -> None:
    layer = pmoe.make_batch_invariant(build(gate="deepseek"))
    layer(rows(5, 12, torch.float64)[0])
    assert layer.gate.load.sum() == 5 * 2  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("reuse", [False, "S4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_predicted(dtype: torch.dtype, reuse: Any) -> None:
    layer = pmoe.make_batch_invariant(build((64, 128), dtype, pipeline=2, memory_reuse=reuse))
    x, dy = rows(512, 64, dtype)
    x.requires_grad_()
    peak = peak_of_step(layer, x, dy)
    assert 0.95 * peak <= layer.predict_memory(512, layer.row_counts).peak <= 1.15 * peak
    assert peak <= layer.predict_memory(512).peak


# ---- refusals


class OwnGate(nn.Module):
    pass


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "capacity": ({"capacity_factor": 1.25}, r"rows are dropped over a capacity \(capacity_factor=1.25\)"),
    "padded": ({"capacity_factor": 1.0, "pad_to_capacity": True}, "rows are dropped over a capacity"),
    "fused": ({"fused": True}, r"kernels are fused \(fused=True\)"),
    "persistent": ({"fused": "persistent"}, "a pass is one persistent kernel"),
    "send once": ({"send_once": True}, r"rows travel once \(send_once=True\)"),
    "budget": ({"memory_budget": "1GiB"}, r"there is a memory_budget \('1GiB'\)"),
    "callbacks": ({"callbacks": [pmoe.Callback()]}, "there are callbacks"),
    "expert choice": ({"gate": "expert_choice"}, r"the gate \(ExpertChoiceGate\) mixes tokens or picks"),
    "soft": ({"gate": "soft"}, r"the gate \(SoftGate\) mixes tokens or picks"),
    "prioritised": ({"gate": "batch_prioritised"}, r"the gate \(BatchPrioritisedGate\) decides itself"),
    "noisy": ({"gate": "noisy_topk"}, r"gate \(NoisyTopKGate\) is none of TopKGate, SwitchGate"),
    "random": ({"gate": "random"}, r"gate \(RandomGate\) is none of TopKGate"),
    "modules": (
        {"expert": lambda: nn.Linear(12, 12, dtype=torch.float64)},
        "experts .* are modules of one's",
    ),
    "order": ({"order": "einsum"}, "the order is a EinsumOrder"),
    "shared module": (
        {"shared_expert": nn.Linear(12, 12, dtype=torch.float64)},
        "shared_expert .* is none of",
    ),
    "shared gate": ({"shared_expert": 8, "shared_gate": True}, r"shared_gate \(True\) scales"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_invariant_is_refused_by_name(case: str) -> None:
    options, message = REFUSED[case]
    layer = build(**options)
    order = layer.order
    with pytest.raises(ValueError, match=f"layer '1' cannot be batch-invariant .* where {message}"):
        pmoe.make_batch_invariant(nn.Sequential(build(), layer))
    assert layer.order is order


def test_nothing_is_changed_if_one_layer_is_refused() -> None:
    model = nn.Sequential(build(), build(gate="soft"))
    with pytest.raises(ValueError, match="layer '1'"):
        pmoe.make_batch_invariant(model)
    first = model[0]
    assert isinstance(first, pmoe.MoELayer) and type(first.order) is SortedOrder


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model \(Linear\) must be or contain a pmoe.MoELayer"):
        pmoe.make_batch_invariant(nn.Linear(2, 2))


def test_an_option_that_breaks_the_promise_is_refused_later_too() -> None:
    layer = pmoe.make_batch_invariant(build())
    with pytest.raises(
        ValueError, match="cannot be batch-invariant .* where rows are dropped over a capacity"
    ):
        layer.capacity_factor = 1.0
    assert layer.capacity_factor is None
    with pytest.raises(ValueError, match=r"where kernels are fused \(fused=True\)"):
        layer.fused = True


def test_a_shared_expert_with_hooks_is_refused_at_the_call() -> None:
    layer = pmoe.make_batch_invariant(build(shared_expert=8))
    assert layer.shared_expert is not None
    layer.shared_expert.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="so the layer cannot be batch-invariant: remove the hooks"):
        layer(rows(3, 12, torch.float64)[0])


# ---- tiles


def by_place(most: int) -> Any:
    """A function whose result for a row depends on its place, from tiles of more than ``most`` rows on."""
    return lambda tile: [tile + torch.arange(tile.shape[0]).unsqueeze(1) * (tile.shape[0] > most)]


def by_neighbour(tile: Tensor) -> Sequence[Tensor]:
    return [tile + tile.roll(1, 0)]


def test_a_tile_is_as_large_as_results_do_not_depend_on_the_place() -> None:
    like = torch.zeros(1)
    assert [rows_of_tile(f"planted {most}", by_place(most), 4, like) for most in (99, 8, 1)] == [32, 8, 1]
    assert rows_of_tile("planted neighbour", by_neighbour, 4, like) == 1


def test_the_check_runs_once_for_a_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compute(tile: Tensor) -> Sequence[Tensor]:
        calls.append(tile.shape[0])
        return [tile]

    for threads in (1, 1, 2):
        monkeypatch.setattr(fixed_tiles.torch, "get_num_threads", lambda threads=threads: threads)
        rows_of_tile("counted", compute, 4, torch.zeros(1))
    assert len(calls) == 2 * 4 * 5


def test_alignment_copies_only_what_is_not() -> None:
    memory = torch.zeros(64)
    assert with_alignment(memory) is memory
    shifted = memory[1:]
    assert with_alignment(shifted).data_ptr() % 64 == 0 and torch.equal(with_alignment(shifted), shifted)


def test_each_class_is_a_subclass_of_what_it_replaces() -> None:
    for before, after in (*EXPERTS.items(), *GATES.items()):
        assert issubclass(after, before)
