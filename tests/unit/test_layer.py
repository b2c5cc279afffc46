"""MoELayer on one rank: its arguments, attributes, types, and how it lives with the rest of PyTorch."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer, Routing
from tests.reference import Definition, relative_error

D_MODEL, D_HIDDEN, NUM_EXPERTS, AUX = 6, 10, 4, 0.37


def mlp(d_model: int, d_hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, d_hidden), nn.GELU(), nn.Linear(d_hidden, d_model))


def build(**options: Any) -> MoELayer:
    """A float64 layer of 4 experts and top-2, whose gate is bent to be uneven."""
    torch.manual_seed(7)
    layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, **{"top_k": 2, "dtype": torch.float64, **options})
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter *= 3
    return layer


def tokens(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float64, width: int = D_MODEL) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (11,)), width, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(layer: nn.Module, y: Tensor, dy: Tensor, l_aux: Tensor | None = None) -> Tensor:
    return (y * dy).sum() + AUX * (layer.l_aux if l_aux is None else l_aux)


def gradients(layer: MoELayer, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """y, l_aux and every gradient of one forward and backward from fresh leaves."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = (run or layer)(x)
    dy = tokens(*y.shape[:-1], seed=4, dtype=y.dtype, width=y.shape[-1])
    l_aux = layer.l_aux.detach().clone()
    loss_of(layer, y, dy).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": l_aux, "x": x.grad, **found}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 0.0) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert value is not None, name
        assert relative_error(got[name], value) <= limit, name


# ---- construction ---------------------------------------------------------------------------------


def test_the_signature_is_the_promised_one() -> None:
    parameters = list(inspect.signature(MoELayer).parameters.values())
    positional = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    empty = inspect.Parameter.empty
    assert positional == [("d_model", empty), ("d_hidden", empty), ("num_experts", empty), ("top_k", 1)]
    keywords = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    promised = {
        "gate": "topk",
        "expert": "ffn",
        "activation": "gelu",
        "bias": True,
        "capacity_factor": None,
        "pipeline": False,
        "memory_reuse": False,
        "group": None,
        "device": None,
        "dtype": None,
    }
    assert {name: keywords[name] for name in promised} == promised


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"d_model": 0}, ValueError, r"d_model \(0\) must be at least 1"),
        ({"d_model": 6.0}, TypeError, r"d_model \(6.0\) must be an int"),
        ({"d_hidden": -8}, ValueError, r"d_hidden \(-8\) must be at least 1"),
        ({"d_hidden": "8"}, TypeError, r"d_hidden \('8'\) must be an int"),
        ({"num_experts": 0}, ValueError, r"num_experts \(0\) must be at least 1"),
        ({"num_experts": True}, TypeError, r"num_experts \(True\) must be an int"),
        ({"top_k": 0}, ValueError, r"top_k \(0\) must be at least 1"),
        ({"top_k": 5}, ValueError, r"top_k \(5\) must be at most num_experts \(4\)"),
        (
            {"gate": "noisy"},
            ValueError,
            r"gate \('noisy'\) must be a module or one of batch_prioritised, .*, topk",
        ),
        ({"gate": 3}, TypeError, r"gate \(3\) must be a name or a torch.nn.Module"),
        ({"gate": "switch", "top_k": 2}, ValueError, r"top_k \(2\) must be 1 with gate='switch'"),
        ({"gate": "switch", "normalize_gate": True}, ValueError, r"normalize_gate \(True\) must be False"),
        ({"gate": nn.Identity(), "normalize_gate": True}, ValueError, r"normalize_gate \(True\)"),
        (
            {"gate": nn.Identity(), "z_loss_weight": 0.1},
            ValueError,
            r"z_loss_weight \(0.1\) must be left out",
        ),
        ({"z_loss_weight": -0.5}, ValueError, r"z_loss_weight \(-0.5\) must be a number of at least 0"),
        ({"z_loss_weight": "1"}, TypeError, r"z_loss_weight \('1'\) must be a number"),
        ({"expert": "moe"}, ValueError, r"expert \('moe'\) must be ffn, swiglu, or a callable"),
        ({"activation": "tanh"}, ValueError, r"activation \('tanh'\) must be one of gelu, relu, silu"),
        ({"activation": "tanh", "expert": "swiglu"}, ValueError, r"activation \('tanh'\) must be one of"),
        ({"capacity_factor": 0}, ValueError, r"capacity_factor \(0\) must be None or a positive number"),
        ({"capacity_factor": -1.5}, ValueError, r"capacity_factor \(-1.5\) must be None or a positive"),
        ({"capacity_factor": math.inf}, ValueError, r"capacity_factor \(inf\) must be None or a positive"),
        ({"capacity_factor": math.nan}, ValueError, r"capacity_factor \(nan\) must be None or a positive"),
        ({"capacity_factor": "1"}, TypeError, r"capacity_factor \('1'\) must be a number"),
        ({"pipeline": 0}, ValueError, r"pipeline \(0\) must be False, True or an int of at least 1"),
        ({"pipeline": -2}, ValueError, r"pipeline \(-2\) must be False, True or an int of at least 1"),
        ({"pipeline": 2.0}, TypeError, r"pipeline \(2.0\) must be False, True or an int"),
        ({"pipeline": "auto"}, TypeError, r"pipeline \('auto'\) must be False, True or an int"),
        ({"memory_reuse": "S5"}, ValueError, r"memory_reuse \('S5'\) must be False, True, a Restore or one"),
        ({"memory_reuse": 1}, TypeError, r"memory_reuse \(1\) must be False, True, a Restore or one of S1"),
        ({"slack": 0.9}, ValueError, r"slack \(0.9\) must be a number of at least 1"),
        ({"slack": "2"}, TypeError, r"slack \('2'\) must be a number"),
        (
            {"pipeline": 4, "pipeline_backward": 3},
            ValueError,
            r"pipeline_backward \(3\) must divide pipeline",
        ),
        ({"pipeline": 4, "pipeline_backward": 0}, ValueError, r"pipeline_backward \(0\) must divide"),
        ({"pipeline": 4, "pipeline_backward": 2.0}, TypeError, r"pipeline_backward \(2.0\) must be None or"),
        (
            {"pipeline": True, "pipeline_backward": 2},
            ValueError,
            r"pipeline_backward \(2\) must be None where",
        ),
        (
            {"pipeline": 2, "pipeline_backward": 4, "expert": nn.Identity},
            ValueError,
            r"pipeline_backward \(4\) must be at most pipeline \(2\) where experts are modules",
        ),
        ({"dtype": torch.int64}, ValueError, r"dtype \(torch.int64\) must be a floating-point type"),
        ({"dtype": "float32"}, TypeError, r"dtype \('float32'\) must be a torch.dtype"),
    ],
)
def test_bad_arguments_are_refused_by_name_value_and_rule(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments = {"d_model": D_MODEL, "d_hidden": D_HIDDEN, "num_experts": NUM_EXPERTS, **options}
    with pytest.raises(error, match=match):
        MoELayer(**arguments)


def test_one_rank_is_what_no_process_group_means() -> None:
    layer = build()
    assert (layer.ranks.size, layer.ranks.rank, layer.ranks.group) == (1, 0, None)
    layer(tokens())
    assert layer.traffic.total == 0


@pytest.mark.parametrize(
    "options, shapes",
    [
        ({}, {"w1": (4, 10, 6), "w2": (4, 6, 10), "b1": (4, 10), "b2": (4, 6)}),
        ({"bias": False}, {"w1": (4, 10, 6), "w2": (4, 6, 10)}),
        ({"expert": "swiglu"}, {"w1": (4, 20, 6), "w2": (4, 6, 10), "b1": (4, 20), "b2": (4, 6)}),
        ({"expert": "swiglu", "bias": False}, {"w1": (4, 20, 6), "w2": (4, 6, 10)}),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_parameters_have_these_names_and_shapes(
    options: dict[str, Any], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype | None
) -> None:
    layer = build(**options, dtype=dtype)
    expected = {"gate.weight": (4, 6), **{f"experts.{name}": shape for name, shape in shapes.items()}}
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == expected
    assert list(layer.state_dict()) == [name for name, _ in layer.named_parameters()]
    assert {p.dtype for p in layer.parameters()} == {dtype or torch.float32}


def test_the_layer_describes_itself() -> None:
    text = repr(build(pipeline=2))
    assert "d_model=6, d_hidden=10, num_experts=4, top_k=2, pipeline=2, rank 0 of 1" in text
    assert "4 x (6 -> 10 -> 6), bias=True" in text


def on_meta_then_cpu(layer: MoELayer) -> MoELayer:
    del layer
    with torch.device("meta"):
        return MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS).to_empty(device="cpu")


def assigned(layer: MoELayer) -> MoELayer:
    nn.Sequential(layer).load_state_dict(
        {f"0.{k}": v.clone() for k, v in layer.state_dict().items()}, assign=True
    )
    return layer


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer,
        copy.deepcopy,
        lambda layer: copy.deepcopy(nn.Sequential(layer))[0],
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: nn.Sequential(layer).float()[0],
        assigned,
        on_meta_then_cpu,
    ],
    ids=["built", "deepcopied", "copied in a model", "unpickled", "converted", "assigned", "from meta"],
)
@pytest.mark.parametrize("expert", ["ffn", mlp])
def test_expert_parameters_alone_are_marked_for_data_parallel_wrappers(
    change: Callable[[MoELayer], MoELayer], expert: object
) -> None:
    layer = change(build(expert=expert))
    marks = {name: getattr(p, "allreduce", True) for name, p in layer.named_parameters()}
    assert marks == {name: name.startswith("gate.") for name in marks}


def test_a_layer_can_be_built_without_storage() -> None:
    with torch.device("meta"):
        layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS)
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, device="meta").experts.w1.is_meta
    layer.to_empty(device="cpu").load_state_dict(build(dtype=None).state_dict())
    x = tokens(dtype=torch.float32)
    assert torch.equal(layer(x), build(dtype=None, top_k=1)(x))


# ---- inputs and outputs ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"expert": mlp}, {"capacity_factor": 0.7}])
def test_every_leading_shape_gives_the_output_of_its_flat_tokens(n: int, options: dict[str, Any]) -> None:
    layer = build(pipeline=n, **options)
    for shape in [(12,), (3, 4), (2, 1, 6), (2, 3, 2, 1)]:
        x = tokens(12).view(*shape, D_MODEL)
        y = layer(x)
        assert y.shape == x.shape
        assert torch.equal(y.view(12, D_MODEL), layer(tokens(12)))
    one = tokens(1)[0]
    assert torch.equal(layer(one), layer(one[None])[0])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5)])
@pytest.mark.parametrize("options", [{}, {"expert": mlp}, {"capacity_factor": 1.0}, {"check_finite": True}])
def test_no_tokens_give_no_rows_and_zero_gradients(
    n: int, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    layer = build(pipeline=n, **options)
    x = torch.empty(*shape, D_MODEL, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    assert layer.l_aux.item() == 0
    (y.sum() + layer.l_aux).backward()
    assert x.grad.shape == x.shape
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    assert layer.tokens_per_expert.tolist() == [0] * NUM_EXPERTS


@pytest.mark.parametrize(
    "x, match",
    [
        (torch.randn(3, 7, dtype=torch.float64), r"x of shape \(3, 7\) must end in d_model \(6\)"),
        (torch.randn(3, 1, dtype=torch.float64), r"x of shape \(3, 1\) must end in d_model \(6\)"),
        (torch.tensor(1.0, dtype=torch.float64), r"x of shape \(\) must end in d_model \(6\)"),
        (torch.randn(3, 6), r"x of dtype torch.float32 must be of the layer's dtype \(torch.float64\)"),
        (torch.ones(3, 6, dtype=torch.int64), r"x of dtype torch.int64 must be of a floating-point type"),
        (torch.empty(3, 6, device="meta", dtype=torch.float64), r"x on meta must be where .* \(cpu\)"),
    ],
)
def test_bad_input_is_refused_at_the_call_and_the_layer_stays_usable(x: Tensor, match: str) -> None:
    layer = build()
    expected = gradients(layer, tokens())
    with pytest.raises(ValueError, match=match):
        layer(x)
    assert_same(gradients(layer, tokens()), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused_only_where_asked(value: float) -> None:
    x = tokens()
    x[4, 2] = value
    with pytest.raises(ValueError, match=r"rank 0: its gate logits are not finite \(check_finite=True\)"):
        build(check_finite=True)(x)
    y = build()(x)
    assert not y[4].isfinite().any()
    assert torch.equal(y[:4], build()(tokens())[:4])
    assert torch.equal(y[5:], build()(tokens())[5:])


def test_the_input_is_left_alone_and_the_output_is_its_own() -> None:
    layer, x = build(), tokens()
    before = x.clone()
    y = layer(x)
    y += 1  # a residual added in place, as many models do
    assert torch.equal(x, before)
    assert torch.equal(y, layer(x) + 1)


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, -x], dim=-1)[..., 0]


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.parametrize("layout", [strided, transposed, lambda x: x.view(1, 11, 6).expand(1, -1, -1)])
@pytest.mark.parametrize("n", [1, 3])
def test_layouts_of_x_and_dy_change_nothing(layout: Callable[[Tensor], Tensor], n: int) -> None:
    layer = build(pipeline=n)
    results = []
    for arrange in (lambda t: t, layout):
        layer.zero_grad()
        x = tokens().requires_grad_()
        y = layer(arrange(x))
        y.backward(arrange(tokens(seed=4)))
        results.append({"y": y.detach().view(11, 6), "x": x.grad, "w1": layer.experts.w1.grad.clone()})
    assert_same(*results, 1e-14)


def test_an_expanded_input_and_an_expanded_gradient_are_summed() -> None:
    layer = build(pipeline=2)
    row = tokens(1).requires_grad_()
    y = layer(row.expand(5, D_MODEL))
    assert torch.equal(y, y[:1].expand_as(y))
    y.sum().backward()  # its gradient is one number, expanded
    alone = tokens(1).requires_grad_()
    layer(alone).sum().backward()
    torch.testing.assert_close(row.grad, 5 * alone.grad)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_micro_batches_drop_exactly_the_tokens_that_the_whole_batch_drops(n: int) -> None:
    whole, cut = build(top_k=1, capacity_factor=0.6), build(top_k=1, capacity_factor=0.6, pipeline=n)
    x = tokens(23)
    dropped = (whole(x) == 0).all(-1)
    assert 0 < dropped.sum() < 23
    assert torch.equal((cut(x) == 0).all(-1), dropped)
    assert torch.equal(cut.tokens_per_expert, whole.tokens_per_expert)
    assert whole.tokens_per_expert.max() == math.ceil(0.6 * 23 / 4)
    # The first rows of each expert are those kept.
    expert = whole.gate(x).expert[:, 0]
    for e in range(NUM_EXPERTS):
        assert not dropped[expert == e][: math.ceil(0.6 * 23 / 4)].any()


def test_tokens_per_expert_counts_kept_rows_on_the_host() -> None:
    layer = build(pipeline=3)
    layer(tokens())
    expected = torch.bincount(layer.gate(tokens()).expert.flatten(), minlength=NUM_EXPERTS)
    assert torch.equal(layer.tokens_per_expert, expected)
    assert layer.tokens_per_expert.device.type == "cpu"
    assert layer.tokens_per_expert.dtype == torch.int64


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
def test_two_runs_are_bit_identical(n: int, expert: object) -> None:
    runs = [gradients(build(pipeline=n, expert=expert), tokens(37)) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


# ---- modes of PyTorch -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("n", [1, 2])
def test_without_gradients_the_output_is_the_same_and_unattached(
    mode: Callable[[], Any], expert: object, n: int
) -> None:
    layer = build(expert=expert, pipeline=n)
    expected = layer(tokens())
    assert expected.requires_grad
    with mode():
        y = layer(tokens())
    assert not y.requires_grad
    assert not layer.l_aux.requires_grad
    assert torch.equal(y, expected)


def test_eval_changes_nothing_and_keeps_the_graph() -> None:
    expected, got = gradients(build(), tokens()), gradients(build().eval(), tokens())
    assert_same(got, expected)


def test_l_aux_is_attached_to_the_graph_of_its_forward() -> None:
    layer = build()
    layer(tokens())
    first = layer.l_aux
    layer(tokens(5))
    assert first is not layer.l_aux
    first.backward()
    assert layer.gate.weight.grad.any()
    assert layer.experts.w1.grad is None


def test_gradients_accumulate_over_several_batches() -> None:
    layer = build(pipeline=2)
    parts = [gradients(layer, x) for x in (tokens(7), tokens(5, seed=8))]
    layer.zero_grad()
    for x in (tokens(7), tokens(5, seed=8)):
        y = layer(x)
        loss_of(layer, y, tokens(x.shape[0], seed=4)).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, parts[0][name] + parts[1][name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("expert", ["ffn", mlp])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_forwards_may_run_backward_in_any_order(order: tuple[int, ...], expert: object) -> None:
    layer = build(pipeline=2, expert=expert)
    xs = [tokens(7), tokens(0), tokens(5, seed=8)]
    expected = [gradients(layer, x) for x in xs]
    leaves = [x.clone().requires_grad_() for x in xs]
    losses = [loss_of(layer, layer(x), tokens(x.shape[0], seed=4)) for x in leaves]
    for i in order:
        layer.zero_grad(set_to_none=True)
        losses[i].backward()
        assert torch.equal(leaves[i].grad, expected[i]["x"])
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, expected[i][name]), name


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("n", [1, 3])
def test_a_retained_graph_gives_the_same_gradients_twice(expert: object, n: int) -> None:
    layer = build(expert=expert, pipeline=n)
    x = tokens().requires_grad_()
    loss = loss_of(layer, layer(x), tokens(seed=4))
    leaves = [x, *layer.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("nonlinear", [False, True])
def test_a_second_derivative_is_refused(nonlinear: bool) -> None:
    """Also where the incoming gradient is a constant, and the gate's part alone could be differentiated."""
    layer = build()
    x = tokens().requires_grad_()
    y = layer(x)
    with pytest.raises(RuntimeError, match=r"no second derivative: create_graph \(True\) must be False"):
        torch.autograd.grad((y.square() if nonlinear else y).sum(), x, create_graph=True)


def test_parameters_changed_between_forward_and_backward_are_noticed() -> None:
    for expert in ("ffn", mlp):
        layer = build(expert=expert)
        y = layer(tokens())
        with torch.no_grad():
            for parameter in layer.experts.parameters():
                parameter += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
def test_a_layer_used_twice_in_one_graph_sums_its_gradients(expert: object) -> None:
    layer = build(expert=expert, pipeline=2)
    x = tokens().requires_grad_()
    (layer(layer(x)) * tokens(seed=4)).sum().backward()
    got = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}

    first, second = build(expert=expert, pipeline=2), build(expert=expert, pipeline=2)
    x = tokens().requires_grad_()
    (second(first(x)) * tokens(seed=4)).sum().backward()
    expected = {"x": x.grad}
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        expected[name] = a.grad + b.grad
    assert_same(got, expected, 1e-13)


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("frozen", ["x", "gate", "experts", "experts.1"])
def test_what_is_frozen_has_no_gradient_and_the_rest_is_unchanged(
    frozen: str, n: int, expert: object
) -> None:
    expected = gradients(build(expert=expert, pipeline=n), tokens())
    layer = build(expert=expert, pipeline=n)
    names = [name for name, _ in layer.named_parameters()]
    if frozen == "experts.1":
        without = {names[1]}
    else:
        without = {name for name in names if name.startswith(frozen + ".")}
    for name in without:
        layer.get_parameter(name).requires_grad_(False)
    x = tokens().requires_grad_(frozen != "x")
    loss_of(layer, layer(x), tokens(seed=4)).backward()
    for name, parameter in layer.named_parameters():
        if name in without:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, expected[name]), name
    assert x.grad is None if frozen == "x" else torch.equal(x.grad, expected["x"])


def test_with_everything_frozen_there_is_no_graph() -> None:
    layer = build().requires_grad_(False)
    assert not layer(tokens()).requires_grad
    assert not layer.l_aux.requires_grad
    x = tokens().requires_grad_()
    layer(x).sum().backward()
    assert x.grad.any()


# ---- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_computes_the_same_and_shares_nothing(duplicate: Callable[[Any], Any], expert: object) -> None:
    layer = build(expert=expert, pipeline=2)
    expected = gradients(layer, tokens())
    layer(tokens())  # so that l_aux is attached to a graph
    model = duplicate(nn.Sequential(nn.Identity(), layer))
    twin = model[1]
    assert layer.l_aux.requires_grad
    assert twin.l_aux is None
    twin.zero_grad()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert_same(gradients(twin, tokens()), expected)
    assert not any(
        parameter.grad.data_ptr() == p.grad.data_ptr()
        for parameter, p in zip(layer.parameters(), twin.parameters(), strict=True)
    )


def test_a_saved_state_dict_restores_the_layer() -> None:
    file = io.BytesIO()
    layer = build(expert="swiglu")
    torch.save(layer.state_dict(), file)
    file.seek(0)
    torch.manual_seed(99)
    other = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, expert="swiglu", dtype=torch.float64)
    assert not torch.equal(other(tokens()), layer(tokens()))
    assert (
        str(other.load_state_dict(torch.load(file, weights_only=True))) == "<All keys matched successfully>"
    )
    assert torch.equal(other(tokens()), layer(tokens()))


# ---- checkpoint and compile -----------------------------------------------------------------------


def checkpointed(layer: MoELayer, use_reentrant: bool) -> dict[str, Tensor]:
    """As `gradients`, with the layer inside a checkpoint that returns its loss beside its output."""
    x = tokens().requires_grad_()
    layer.zero_grad()
    y, l_aux = checkpoint(lambda x: (layer(x), layer.l_aux), x, use_reentrant=use_reentrant)
    loss_of(layer, y, tokens(seed=4), l_aux).backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "l_aux": l_aux.detach(), "x": x.grad, **found}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("n", [1, 2])
def test_checkpointing_changes_no_gradient_and_runs_forward_once_more(
    n: int, expert: object, use_reentrant: bool
) -> None:
    layer = build(expert=expert, pipeline=n)
    expected = gradients(layer, tokens())
    runs: list[int] = []
    layer.gate.register_forward_hook(lambda *_: runs.append(1))
    assert_same(checkpointed(layer, use_reentrant), expected)
    assert len(runs) == 2  # not once an expert: on several ranks that would be out of step


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_repeats_the_dropout_of_modules(use_reentrant: bool) -> None:
    layer = build(expert=lambda m, h: nn.Sequential(nn.Linear(m, h), nn.Dropout(0.5), nn.Linear(h, m)))
    torch.manual_seed(1)
    expected = gradients(layer, tokens())
    torch.manual_seed(1)
    assert_same(checkpointed(layer, use_reentrant), expected)


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
def test_a_checkpointed_layer_keeps_no_rows_between_the_passes(expert: object) -> None:
    layer = build(expert=expert, pipeline=2)
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: list[weakref.ref[Any]] = []
    compute = layer.experts.compute

    def watched(rows: Tensor, *args: Any, **options: Any) -> Any:
        out, hidden = compute(rows, *args, **options)
        storages = [tensor.untyped_storage() for tensor in (rows, *hidden.tensors)]
        kept.extend(weakref.ref(each) for each in storages if each.data_ptr() not in weights)
        return out, hidden

    layer.experts.compute = watched
    y = layer(tokens().requires_grad_())
    assert len(kept) >= 4  # T_DI and T_M of two chunks
    assert all(ref() is not None for ref in kept)
    kept.clear()
    y = checkpoint(layer, tokens().requires_grad_(), use_reentrant=False)
    assert len(kept) >= 4
    assert all(ref() is None for ref in kept)
    y.sum().backward()


class Block(nn.Module):
    """A residual block, as a transformer has it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D_MODEL)
        self.moe = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(**options), Block(**options)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, sum(block.moe.l_aux for block in self.blocks)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Flat(nn.Module):
    """Two layers in one forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = Block(**options), Block(**options)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first.moe(self.first.norm(x)))
        return self.second.moe(self.second.norm(x)) + self.first.moe.l_aux + self.second.moe.l_aux


@pytest.mark.parametrize("options", [{}, {"expert": mlp, "pipeline": 2}, {"capacity_factor": 1.0}])
@pytest.mark.parametrize("model_type", [Model, Flat])
def test_a_compiled_model_has_one_graph_break_a_layer(
    model_type: type[nn.Module], options: dict[str, Any], fresh_compiler: None
) -> None:
    torch.manual_seed(0)
    model = model_type(**options)
    x = tokens(2, 5, dtype=torch.float32)
    explained = torch._dynamo.explain(model)(x)
    assert len(explained.break_reasons) == 2, explained
    if model_type is Flat:
        assert explained.graph_break_count == 2, explained  # it counts frames too, were they nested
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    for seed in range(3):
        compiled(tokens(2, 5, seed=seed, dtype=torch.float32))
    assert sum(counters["graph_break"].values()) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_as_an_uncompiled_one(backend: str, fresh_compiler: None) -> None:
    torch.manual_seed(0)
    plain = Model(pipeline=2)
    model = copy.deepcopy(plain)
    compiled = torch.compile(model, backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for step in range(3):
        x = tokens(2, 5, seed=step, dtype=torch.float32)
        for run, optimizer in zip((plain, compiled), optimizers, strict=True):
            y, l_aux = run(x)
            optimizer.zero_grad()
            (y.square().mean() + AUX * l_aux).backward()
            optimizer.step()
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b, a, msg=name)


# ---- narrow types ---------------------------------------------------------------------------------


def plain_pytorch(layer: MoELayer, x: Tensor) -> Tensor:
    """The layer as a few lines of PyTorch in x's type: gate, one linear pair an expert, weighted sum."""
    routing = layer.gate(x)
    y = 0
    for e in range(layer.num_experts):
        token, choice = (routing.expert == e).nonzero(as_tuple=True)
        if isinstance(layer.experts, pmoe.experts.ModuleExperts):
            out = layer.experts.local[e](x[token])
        else:
            p = layer.experts
            hidden = F.linear(x[token], p.w1[e], p.b1[e])
            if isinstance(p, pmoe.experts.SwiGLUExperts):
                gate, up = hidden.chunk(2, dim=-1)
                active = F.silu(gate) * up
            else:
                active = F.gelu(hidden)
            out = F.linear(active, p.w2[e], p.b2[e])
        out = out * routing.weight[token, choice].to(out.dtype)[:, None]
        y = y + torch.zeros(x.shape, dtype=out.dtype).index_add(0, token, out)
    layer.l_aux = routing.l_aux
    return y


def in_float64(layer: MoELayer, x: Tensor) -> dict[str, Tensor]:
    wide = copy.deepcopy(layer).double()
    assert torch.equal(wide.gate(x.double()).expert, layer.gate(x).expert)
    return gradients(wide, x.double())


def error(got: Tensor, expected: Tensor) -> float:
    """The root mean square of the differences."""
    return (got.double() - expected).square().mean().sqrt().item()


def assert_no_worse_than_plain_pytorch(
    layer: MoELayer, x: Tensor, context: Callable[[], Any] = nullcontext
) -> None:
    def under(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def wrapped(x: Tensor) -> Tensor:
            with context():
                return run(x)

        return wrapped

    expected = in_float64(layer, x)
    plain = gradients(layer, x, under(lambda x: plain_pytorch(layer, x)))
    got = gradients(layer, x, under(layer))
    for name, value in expected.items():
        assert got[name].dtype == plain[name].dtype, name
        ours, theirs = error(got[name], value), error(plain[name], value)
        assert ours <= 2 * theirs + 1e-12, f"{name}: {ours} where plain PyTorch has {theirs}"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_bfloat16_layer_errs_at_most_twice_as_much_as_plain_pytorch(
    n: int, expert: object, top_k: int
) -> None:
    torch.manual_seed(0)
    layer = MoELayer(64, 128, 4, top_k, expert=expert, pipeline=n, dtype=torch.bfloat16)
    assert_no_worse_than_plain_pytorch(layer, torch.randn(96, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("top_k", [1, 2])
def test_autocast_errs_at_most_twice_as_much_as_plain_pytorch_under_it(
    n: int, expert: object, top_k: int
) -> None:
    torch.manual_seed(0)
    layer = MoELayer(64, 128, 4, top_k, expert=expert, pipeline=n)
    assert_no_worse_than_plain_pytorch(
        layer, torch.randn(96, 64), lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_rows_in_bfloat16_and_gives_gradients_of_the_parameters_type(
    dtype: torch.dtype, expert: object
) -> None:
    layer = build(dtype=torch.float32, expert=expert)
    x = tokens(dtype=dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert layer.l_aux.dtype == torch.float32
    loss_of(layer, y, tokens(seed=4)).backward()
    assert x.grad.dtype == dtype
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp])
def test_the_experts_backward_inside_autocast_equals_one_outside(expert: object) -> None:
    """The gate's is autograd's own, which autocast reaches as it reaches any linear's."""
    layer = build(dtype=torch.float32, expert=expert)
    found = []
    for inside in (False, True):
        x = tokens(dtype=torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        with torch.autocast("cpu", enabled=inside, dtype=torch.bfloat16):
            grads = torch.autograd.grad((y.float() * tokens(seed=4)).sum(), list(layer.experts.parameters()))
        found.append(grads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_a_backward_inside_an_autocast_that_forward_never_saw_stays_wide(n: int) -> None:
    layer = build(dtype=torch.float32, pipeline=n, gate=ByPosition().float())  # a gate without a product
    expected = gradients(layer, tokens(dtype=torch.float32))
    layer.zero_grad()
    x = tokens(dtype=torch.float32).requires_grad_()
    loss = loss_of(layer, layer(x), tokens(seed=4, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert torch.equal(x.grad, expected["x"])
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_autocast_leaves_float64_alone() -> None:
    layer = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(tokens())
    assert torch.equal(y, build()(tokens()))


def test_autocast_under_no_grad_then_with_gradients_still_trains_modules() -> None:
    """Autocast caches cast weights; one cast under no_grad must not be found by a forward that trains."""
    layer = build(dtype=torch.float32, expert=mlp)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            layer(tokens(dtype=torch.float32))
        y = layer(tokens(dtype=torch.float32))
    y.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.experts.parameters())


def test_a_float32_gate_may_route_bfloat16_rows() -> None:
    layer = build(dtype=torch.bfloat16)
    layer.gate.float()
    x = tokens(dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    layer(x).sum().backward()
    assert layer.gate.weight.grad.dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"dtype torch.float32 must be of the layer's dtype \(torch.bfloat16\)"
    ):
        layer(x.float())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
def test_a_float32_layer_equals_the_definition_to_its_precision(expert: str, n: int) -> None:
    layer = build(dtype=torch.float32, expert=expert, pipeline=n)
    parameters = {name: p.detach().double() for name, p in layer.named_parameters()}
    x = tokens(dtype=torch.float32)
    ys, aux, grads = Definition(parameters, 2, expert).gradients(
        [x.double()], [tokens(seed=4).float().double()], AUX
    )
    expected = {"y": ys[0], "l_aux": aux[0], **grads[0]}
    got = {name: value.double() for name, value in gradients(layer, x).items()}
    assert_same(got, expected, 2e-6)


# ---- gates of users -------------------------------------------------------------------------------


class ByPosition(nn.Module):
    """Token t goes to experts t, t + 1, ... with weights of its own; no subclass of pmoe.Gate."""

    def __init__(self, top_k: int = 2, num_experts: int = NUM_EXPERTS, **changes: Any) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, top_k, dtype=torch.float64))
        self.num_experts, self.changes = num_experts, changes

    def forward(self, x: Tensor) -> Routing:
        count, top_k = x.shape[0], self.factor.shape[0]
        expert = (torch.arange(count)[:, None] + torch.arange(top_k)) % self.num_experts
        routing = {
            "expert": expert,
            "weight": self.factor.expand(count, top_k),
            "l_aux": self.factor.square().sum(),
        }
        return Routing(**{**routing, **self.changes})


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_a_gate_of_ones_own_is_followed(capacity_factor: float | None, top_k: int, n: int) -> None:
    """Even where it chooses another number of experts a token than the layer's top_k."""
    layer = build(gate=ByPosition(top_k), pipeline=n, capacity_factor=capacity_factor)
    got = gradients(layer, tokens())
    parameters = dict(layer.named_parameters())
    x = tokens().requires_grad_()
    definition = Definition(parameters, top_k)
    capacity = math.inf if capacity_factor is None else math.ceil(capacity_factor * 11 * top_k / 4)
    used, rows = [0] * NUM_EXPERTS, []
    for t in range(11):
        row = torch.zeros(D_MODEL, dtype=torch.float64)
        for k in range(top_k):
            e = (t + k) % NUM_EXPERTS
            used[e] += 1
            if used[e] <= capacity:
                row = row + layer.gate.factor[k] * definition.run_expert(e, x[t])
        rows.append(row)
    y = torch.stack(rows)
    loss = (y * tokens(seed=4)).sum() + AUX * layer.gate.factor.square().sum()
    grads = torch.autograd.grad(loss, [x, *parameters.values()])
    expected = dict(zip(["x", *parameters], grads, strict=True))
    assert_same(got, {"y": y.detach(), "l_aux": got["l_aux"], **expected}, 1e-12)
    assert got["l_aux"] == layer.gate.factor.square().sum()


def test_a_subclass_of_gate_without_parameters_works_with_experts_without_parameters() -> None:
    class First(pmoe.Gate):
        def forward(self, x: Tensor) -> Routing:
            expert = torch.zeros(x.shape[0], 1, dtype=torch.int64)
            return Routing(expert=expert, weight=torch.full((x.shape[0], 1), 2.0), l_aux=torch.zeros(()))

    layer = MoELayer(D_MODEL, D_HIDDEN, 2, gate=First(), expert=nn.Identity)
    x = tokens().requires_grad_()
    y = layer(x)
    assert torch.equal(y, 2 * x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


@pytest.mark.parametrize(
    "gate, error_type, match",
    [
        (nn.Identity(), TypeError, r"gate \(Identity\) must return a pmoe.Routing, not Tensor"),
        (ByPosition(expert=torch.zeros(11, dtype=torch.int64)), ValueError, r"expert of shape \(11,\)"),
        (
            ByPosition(expert=torch.zeros(5, 2, dtype=torch.int64)),
            ValueError,
            r"must be \(T, K\) with T = 11",
        ),
        (
            ByPosition(weight=torch.ones(11, 1)),
            ValueError,
            r"weight of shape \(11, 1\); both must be \(T, K\)",
        ),
        (
            ByPosition(expert=torch.zeros(11, 2, dtype=torch.int32)),
            TypeError,
            "dtype torch.int32; it must be",
        ),
        (ByPosition(num_experts=9), ValueError, "rank 0: its gate returned expert indices outside"),
        (ByPosition(expert=torch.full((11, 2), -1)), ValueError, "its gate returned expert indices outside"),
    ],
)
def test_what_is_no_routing_is_refused(gate: nn.Module, error_type: type[Exception], match: str) -> None:
    layer = build(gate=gate)
    with pytest.raises(error_type, match=match):
        layer(tokens())


def test_the_logits_of_a_gate_of_ones_own_are_checked_where_asked() -> None:
    bad = torch.full((11, NUM_EXPERTS), math.nan)
    with pytest.raises(ValueError, match=r"not finite \(check_finite=True\)"):
        build(gate=ByPosition(logits=bad), check_finite=True)(tokens())
    build(gate=ByPosition(logits=bad))(tokens())
    build(gate=ByPosition(), check_finite=True)(tokens())  # it has none to show


def test_an_error_of_the_gate_comes_through_as_it_is() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Routing:
            raise KeyError("number 17")

    with pytest.raises(KeyError, match="number 17"):
        build(gate=Broken())(tokens())


def test_a_module_class_without_an_init_of_its_own_is_built_without_arguments() -> None:
    layer = pmoe.MoELayer(4, 8, 2, expert=nn.Tanh)
    x = torch.randn(5, 4)
    assert torch.allclose(layer(x), layer.gate(x).weight * x.tanh())


def test_an_input_that_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"x \(list\) must be a torch.Tensor of shape \(\.\.\., 4\)"):
        pmoe.MoELayer(4, 8, 2)([1.0])
