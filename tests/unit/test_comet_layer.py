"""A fused layer of one rank against the plain definition, and its messages if it is not fused.

All-to-alls and plain products take the place of the kernels.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import warn
from pmoe.comm.ranks import Ranks
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.kernels.comet.backend import Steps
from pmoe.planner.block_split import LayerSeconds
from pmoe.runners import fused_steps, one_rank
from pmoe.runners.fused import unit_index
from pmoe.runners.fused_steps import Request
from tests.plain_steps import PlainSteps, plain_steps, using
from tests.reference import Definition, relative_error
from tests.switched import switched_layer

M, H, E, T, AUX = 6, 10, 4, 13, 0.37
PAIRS = [pmoe.Restore(d, h) for d in ("keep", "communicate") for h in ("keep", "recompute")]
EXPERTS = [
    *({"activation": activation} for activation in ("relu", "gelu", "silu")),
    {"expert": "swiglu"},
]


def make(dtype: torch.dtype = torch.float64, **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(7)
    layer = switched_layer(M, H, E, **{"top_k": 2, "fused": True, **options}, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter *= 3
    return layer


def tokens(count: int, seed: int = 1) -> Tensor:
    x = torch.randn(count, M, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() + 1
    return x


def step(layer: pmoe.MoELayer, count: int = T) -> dict[str, Tensor | None]:
    layer.zero_grad(set_to_none=True)
    x = tokens(count).requires_grad_()
    y = layer(x)
    ((y * tokens(count, 2)).sum() + AUX * layer.l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "x": x.grad, **found}


def by_definition(layer: pmoe.MoELayer, count: int = T, **options: Any) -> dict[str, Tensor]:
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    experts = layer.experts
    kind = "swiglu" if isinstance(experts, SwiGLUExperts) else "ffn"
    definition = Definition(parameters, layer.top_k, kind, getattr(experts, "activation", "gelu"), **options)
    (y,), (aux,), (gradients,) = definition.gradients([tokens(count)], [tokens(count, 2)], AUX)
    return {"y": y, "l_aux": aux, **gradients}


STEPS = {each for each in vars(Steps) if not each.startswith("_")}
STEPS -= {"rows", "row_weight", "all_or_give_up", "launcher"}


class Counted(PlainSteps):
    """Plain steps in the place of the kernels, which record their names when they are called."""

    def __init__(self, request: Request, calls: list[str]) -> None:
        super().__init__(request.ranks)
        self.calls = calls

    def __getattribute__(self, name: str) -> Any:
        if name in STEPS:
            self.calls.append(name)
        return super().__getattribute__(name)


@contextmanager
def fused() -> Iterator[list[str]]:
    """Lets layers use plain steps in the place of the kernels. Yields a list to which the steps' names are
    added.
    """
    calls: list[str] = []
    with using(lambda request: Counted(request, calls)):
        yield calls


def check(layer: pmoe.MoELayer, count: int = T, **options: Any) -> list[str]:
    with fused() as calls:
        found = step(layer, count)
    expected = by_definition(layer, count, **options)
    assert calls and set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] is not None, name
        assert relative_error(found[name], value) < 1e-12, name
    return calls


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("options", EXPERTS, ids=str)
@pytest.mark.parametrize("way", [True, "forward"])
def test_output_and_gradients_equal_the_definition(
    way: bool | str, options: dict[str, Any], pair: pmoe.Restore
) -> None:
    for bias, top_k in itertools.product((True, False), (1, 3)):
        check(make(fused=way, memory_reuse=pair, bias=bias, top_k=top_k, **options))


@pytest.mark.parametrize("way", [True, "forward"])
@pytest.mark.parametrize("reuse", [False, True, "S4"])
def test_dropped_rows_add_nothing(way: bool | str, reuse: bool | str) -> None:
    for pipeline in (1, 3, True):
        layer = make(fused=way, memory_reuse=reuse, capacity_factor=0.5, pipeline=pipeline)
        check(layer, capacity_factor=0.5)
        assert layer.tokens_per_expert.sum() < 2 * T


@pytest.mark.parametrize("way", [True, "forward"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_no_tokens_one_token_and_experts_without_rows(way: bool | str, pair: pmoe.Restore) -> None:
    for count in (0, 1):
        check(make(fused=way, memory_reuse=pair, pipeline=2), count)
    layer = make(fused=way, memory_reuse=pair, top_k=1, pipeline=2)
    with torch.no_grad():
        layer.gate.weight[2, 0] += 40
    check(layer)
    assert layer.tokens_per_expert.tolist() == [0, 0, T, 0]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("n, n_backward", [(1, 4), (4, 2), (3, 3)])
def test_forward_alone_fits_any_chunks_of_backward(pair: pmoe.Restore, n: int, n_backward: int) -> None:
    layer = make(fused="forward", memory_reuse=pair, pipeline=n, pipeline_backward=n_backward)
    assert check(layer) == ["dispatch_hidden", "product_combine"]


AGAIN = {
    "keep/keep": ([], []),
    "keep/recompute": ([], []),
    "communicate/keep": ([], ["dispatch"]),
    "communicate/recompute": (["dispatch_hidden"], []),
}
"""Steps that backward runs in addition for a restore pair: before its first kernel, and after it."""


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_each_pair_restores_by_the_steps_it_costs(pair: pmoe.Restore) -> None:
    with fused() as calls:
        step(make(memory_reuse=pair))
    before, behind = AGAIN[str(pair)]
    forward = ["dispatch_hidden", "product_combine"]
    backward = [*before, "dispatch_hidden_gradient", *behind, "gradient_combine"]
    assert calls == [*forward, *backward]


def test_the_place_of_the_units_rows() -> None:
    assert unit_index(torch.ones(2, 2, 1).long(), 0, num_pieces=2, num_rows=4).tolist() == [2, 3, 0, 1]
    # Rank 1 of 2, one expert, rows [[1, 2], [0, 1]] by chunk and source; those of rank 1 come first.
    counts = torch.tensor([[[1], [2]], [[0], [1]]])
    assert unit_index(counts, 1, num_pieces=1, num_rows=4).tolist() == [3, 0, 1, 2]
    assert unit_index(counts, 1, num_pieces=0, num_rows=4).tolist() == [3, 0, 1, 2]


def test_without_gradients_nothing_is_kept() -> None:
    for way in (True, "forward"):
        layer = make(fused=way)
        with fused() as calls:
            expected = layer(tokens(T))
            with torch.no_grad():
                y = layer(tokens(T))
        assert calls.count("product_combine") == 2 and torch.equal(y, expected) and not y.requires_grad


def test_frozen_experts_cost_no_product_but_every_step() -> None:
    layer = make(memory_reuse=pmoe.Restore("communicate", "keep"))
    with fused() as every:
        expected = step(layer)
    layer.experts.requires_grad_(False)
    with fused() as calls:
        found = step(layer)
    assert calls == every
    for name, value in expected.items():
        if name.startswith("experts."):
            assert found[name] is None
        else:
            assert torch.equal(found[name], value), name


def test_backward_twice_checkpointing_copies_and_state() -> None:
    layer, x = make(memory_reuse="S4"), tokens(T).requires_grad_()
    plain = make(fused=False, memory_reuse="S4")
    assert layer.state_dict().keys() == plain.state_dict().keys()
    with fused():
        y = layer(x)
        (once,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.sum(), x)
        (third,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)
        assert torch.equal(once, again) and torch.equal(once, third)
        assert torch.equal(copy.deepcopy(layer)(x), y)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


def test_under_autocast_rows_and_parameters_are_cast() -> None:
    layer, x = make(torch.float32), tokens(T).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with fused() as calls:
            y = layer(x)
        layer.fused = False
        expected = layer(x)
    assert calls and y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("way", [True, "forward"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_narrow_rows_are_as_near_as_unfused(way: bool | str, pair: pmoe.Restore) -> None:
    narrow = torch.bfloat16
    layer = make(narrow, fused=way, memory_reuse=pair, expert="swiglu", top_k=3)
    exact, plain = make(fused=False, expert="swiglu", top_k=3), copy.deepcopy(layer)
    exact.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    plain.fused = False

    def both_passes(of: pmoe.MoELayer, dtype: torch.dtype) -> dict[str, Tensor]:
        x = tokens(40).to(narrow).to(dtype).requires_grad_()
        y = of(x)
        y.backward(tokens(40, 2).to(narrow).to(dtype))
        return {"y": y.detach(), "x": x.grad, **{name: each.grad for name, each in of.named_parameters()}}

    with fused() as calls:
        found = both_passes(layer, narrow)
    wanted, allowed = both_passes(exact, torch.float64), both_passes(plain, narrow)
    assert calls
    for name, value in wanted.items():
        error, limit = ((each[name].double() - value).norm() / value.norm() for each in (found, allowed))
        assert found[name].dtype == narrow and error <= 2 * limit + torch.finfo(narrow).eps / 4, name


# ---- refusals


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "GIVEN", set())


@pytest.mark.parametrize("fused", ["backward", 1, None, "True"])
def test_other_words_are_refused(fused: Any) -> None:
    with pytest.raises(
        ValueError, match=r"fused \(.*\) must be False, True, \"forward\", \"persistent\" or \"auto\""
    ):
        make(fused=fused)


def told(layer: pmoe.MoELayer, count: int = T) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        layer(tokens(count).to(next(layer.experts.parameters()).dtype))
    return [str(each.message) for each in found]


def gate_of_tokens(x: Tensor) -> pmoe.Routing:
    count = x.shape[0]
    return pmoe.Routing(
        expert=torch.zeros(count, 1, dtype=torch.int64),
        weight=torch.ones(count, 1, dtype=x.dtype),
        l_aux=x.new_zeros(()),
        token=torch.arange(count),
    )


class OneEach(torch.nn.Module):
    def forward(self, x: Tensor) -> pmoe.Routing:
        return gate_of_tokens(x)


class SeesRows(pmoe.Callback):
    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return rows


PICKS = "mixes tokens or picks them for each expert"


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"memory_reuse": "S1"}, "memory_reuse (offload/offload) offloads"),
        ({"memory_budget": "1GiB"}, "there is a memory_budget ('1GiB')"),
        ({"callbacks": [SeesRows()]}, "callbacks see rows between the gate and the end of combine"),
        ({"send_once": True}, "rows travel once (send_once=True)"),
        ({"bypass_local": False}, "rows are sent to their own rank (bypass_local=False)"),
        ({"order": "einsum"}, "the order is a EinsumOrder"),
        (
            {"gate": "expert_choice", "top_k": 1},
            "the gate (ExpertChoiceGate) mixes tokens or picks them for each expert",
        ),
        ({"gate": "soft", "top_k": 1}, "the gate (SoftGate) mixes tokens or picks them for each expert"),
        ({"gate": OneEach(), "top_k": 1}, "the gate (OneEach) does not give every token top_k (1) rows"),
        ({"sequential": True}, "steps are timed one after the other (sequential=True)"),
        ({"one_lane": True}, "collectives wait for each other (one_lane=True)"),
        ({"expert": lambda: torch.nn.Linear(M, M)}, "experts (ModuleExperts) are modules of one's own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "_".join(value),
)
def test_what_is_not_fused_is_told_once(options: dict[str, Any], reason: str) -> None:
    layer = make(**options).double()
    with fused() as calls:
        first, again = told(layer), told(layer)
        layer.fused = "auto"
        warn.GIVEN.clear()
        assert not told(layer)
    expected = f"pmoe: fused (True) falls back to the unfused layer because {reason}"
    assert (first, again, calls) == ([expected], [], [])


def test_a_layer_that_carries_other_gradients_is_not_fused() -> None:
    layer = make()
    layer.gradients = object()  # as `pmoe.GradientReducer` sets it
    with fused() as calls, torch.no_grad():
        (message,) = told(layer)
    assert "gradients" in message and not calls


def test_reasons_with_numbers_are_told_once_too() -> None:
    def make_steps(request: Request) -> PlainSteps | str:
        if request.max_rows > 8:
            return f"more rows arrive than memory holds: {request.max_rows} on a rank, of 8"
        return plain_steps(request)

    layer = make(fused="forward")
    with using(make_steps):
        assert told(layer, 4) == []
        (message,) = told(layer, 5)
        assert message.endswith("more rows arrive than memory holds: 10 on a rank, of 8")
        assert told(layer, 6) == []
        for count in (5, 4):
            found, expected = step(layer, count), by_definition(layer, count)
            for name, value in expected.items():
                assert relative_error(found[name], value) < 1e-12, name


def test_without_kernels_for_it_a_layer_says_so_and_goes_through_the_engine() -> None:
    layer = make()
    (message,) = told(layer)
    assert message.startswith("pmoe: fused (True) falls back to the unfused layer because ")
    assert not told(layer)
    found, expected = step(layer), by_definition(layer)
    for name, value in expected.items():
        assert relative_error(found[name], value) < 1e-12, name


def test_of_two_reasons_one_is_told() -> None:
    (message,) = told(make(memory_reuse="S1"))
    assert "offloads" not in message


def test_on_one_rank_it_wins_over_the_kernels_of_one_rank_unless_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone_calls: list[str] = []
    forward = one_rank.OneRankRunner.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        alone_calls.append("alone")
        return forward(*args, **kwargs)

    monkeypatch.setattr(one_rank, "DEVICES", ("cpu",))
    monkeypatch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)
    monkeypatch.setattr(one_rank.OneRankRunner, "forward", counted)
    layer = make()
    with fused() as calls:
        layer(tokens(T))
    assert calls and not alone_calls
    (message,) = told(layer)
    assert "falls back" in message and alone_calls == ["alone"]


def test_worth_is_what_was_measured_of_such_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(
        ranks=Ranks.single(), device=torch.device("cuda"), dtype=torch.bfloat16, d_model=64, d_hidden=128,
        activation="swiglu", experts=4, top_k=2, max_tokens=100, max_rows=400, needs_grad=True,
    )  # fmt: skip
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(fused_steps, "fused_layer_sizes", lambda device, **sizes: asked.append(sizes))
    times = LayerSeconds(fused_forward=2.0, fused_step=3.0, chunked_forward=1.0, chunked_step=4.0, when="")
    for found, in_training, in_inference in ((None, False, False), (times, True, False)):
        monkeypatch.setattr(fused_steps, "agreed_layer", lambda *_, found=found: found)
        assert fused_steps.is_faster(request) is in_training
        assert fused_steps.is_faster(replace(request, needs_grad=False)) is in_inference
    assert asked[0] == {
        "d_model": 64, "d_hidden": 128, "num_experts": 4, "tokens": 100, "top_k": 2, "num_ranks": 1,
        "gated": True, "dtype": torch.bfloat16,
    }  # fmt: skip
    assert not fused_steps.is_faster(replace(request, device=torch.device("cpu")))


def test_auto_takes_what_was_measured_and_never_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_steps, "is_faster", lambda request: True)
    with fused() as calls:
        assert not told(make(fused="auto")) and not calls


def test_memory_of_a_fused_layer_is_not_predicted() -> None:
    with pytest.raises(ValueError, match="predict_memory must not be called where kernels are fused"):
        make(memory_reuse="S4").predict_memory(T)


@pytest.mark.parametrize(
    "options", [{"fused": "auto", "memory_reuse": "S4"}, {"memory_reuse": "S1"}], ids=str
)
def test_memory_of_a_layer_that_is_never_fused_is_predicted(options: dict[str, Any]) -> None:
    assert make(**options).predict_memory(T) == make(**{**options, "fused": False}).predict_memory(T)


def test_bad_input_is_refused_as_ever() -> None:
    with fused() as calls:
        with pytest.raises(ValueError, match=r"d_model \(6\)"):
            make()(torch.zeros(3, M + 1, dtype=torch.float64))
        with pytest.raises(TypeError, match="must be a torch.Tensor"):
            make()([1.0])
    assert not calls
