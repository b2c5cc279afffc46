"""MoELayer on one rank: its arguments, attributes, inputs and outputs."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe import MoELayer
from pmoe.call.options import Switches
from tests.kit import D_HIDDEN, D_MODEL, NUM_EXPERTS, TOKENS, assert_same, build, gradients, tokens
from tests.own_experts import mlp

# ---- construction


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"d_model": 0}, ValueError, r"d_model \(0\) must be at least 1"),
        ({"d_model": 6.0}, TypeError, r"d_model \(6.0\) must be an int"),
        ({"d_hidden": -8}, ValueError, r"d_hidden \(-8\) must be at least 1"),
        ({"d_hidden": "8"}, TypeError, r"d_hidden \('8'\) must be an int"),
        (
            {"pipeline": 1 << 62},
            ValueError,
            r"pipeline \(4611686018427387904\) must be False, True or an int",
        ),
        ({"top_k": np.float64(2.0)}, TypeError, r"top_k \(.*2.0.*\) must be an int"),
        ({"num_experts": np.bool_(True)}, TypeError, r"num_experts \(.*True.*\) must be an int"),
        ({"bias": 1}, TypeError, r"bias \(1\) must be True or False"),
        ({"bias": torch.ones(2)}, TypeError, r"bias \(tensor.*\) must be True or False"),
        ({"activation": ["gelu"]}, ValueError, r"activation \(\['gelu'\]\) must be one of gelu, relu, silu"),
        ({"pipeline": np.ones(2)}, TypeError, r"pipeline \(array.*\) must be False, True or an int"),
        ({"fused": np.ones(2)}, ValueError, r"fused \(array.*\) must be False, True"),
        ({"group": "world"}, ValueError, r"group \(str\) must contain this rank"),
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
        (
            {"z_loss_weight": -0.5},
            ValueError,
            r"z_loss_weight \(-0.5\) must be a finite number of at least 0",
        ),
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
        ({"pipeline": 10**9}, ValueError, r"pipeline \(1000000000\) must be .* at most 1024: .* pass True"),
        (
            {"pipeline": 1000, "pipeline_backward": 2000},
            ValueError,
            r"pipeline_backward \(2000\) must be an int of at least 1, at most 1024: .* pass None",
        ),
        ({"pipeline": 2.0}, TypeError, r"pipeline \(2.0\) must be False, True or an int"),
        ({"pipeline": "auto"}, TypeError, r"pipeline \('auto'\) must be False, True or an int"),
        ({"memory_reuse": "S5"}, ValueError, r"memory_reuse \('S5'\) must be False, True, a Restore or one"),
        ({"memory_reuse": 1}, TypeError, r"memory_reuse \(1\) must be False, True, a Restore or one of S1"),
        ({"slack": 0.9}, ValueError, r"slack \(0.9\) must be a number of at least 1"),
        ({"slack": "2"}, TypeError, r"slack \('2'\) must be a number"),
        (
            {"pipeline": 32, "pipeline_backward": 9},
            ValueError,
            r"pipeline_backward \(9\) must divide pipeline \(32\), .* at most 256, not 288",
        ),
        (
            {"pipeline": 4, "pipeline_backward": 0},
            ValueError,
            r"pipeline_backward \(0\) must be an int of at",
        ),
        ({"pipeline": 4, "pipeline_backward": 2.0}, TypeError, r"pipeline_backward \(2.0\) must be None or"),
        (
            {"pipeline": True, "pipeline_backward": 2},
            ValueError,
            r"pipeline_backward \(2\) must be None if",
        ),
        (
            {"pipeline": 2, "pipeline_backward": 4, "expert": nn.Identity},
            ValueError,
            r"pipeline_backward \(4\) must divide pipeline \(2\) if experts are modules",
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


def test_a_module_class_without_an_init_of_its_own_is_built_without_arguments() -> None:
    layer = pmoe.MoELayer(4, 8, 2, expert=nn.Tanh)
    x = torch.randn(5, 4)
    assert torch.allclose(layer(x), layer.gate(x).weight * x.tanh())


def test_a_layer_can_be_built_without_storage() -> None:
    with torch.device("meta"):
        layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS)
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, device="meta").experts.w1.is_meta
    layer.to_empty(device="cpu").load_state_dict(build(dtype=None).state_dict())
    x = tokens(dtype=torch.float32)
    assert torch.equal(layer(x), build(dtype=None, top_k=1)(x))


# ---- inputs and outputs


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


def test_an_input_that_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"x \(list\) must be a torch.Tensor of shape \(\.\.\., 4\)"):
        pmoe.MoELayer(4, 8, 2)([1.0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused_unless_they_may_pass(value: float) -> None:
    x = tokens()
    x[4, 2] = value
    for options in ({}, {"check_finite": True}, {"pipeline": 2, "memory_reuse": "S4"}):
        with pytest.raises(ValueError, match=r"rank 0: its gate logits are not finite \(check_finite=False"):
            build(**options)(x)
    y = build(check_finite=False)(x)
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


def test_switches_and_the_pair_are_set_on_a_built_layer() -> None:
    """The benchmarks set them this way, and would measure something else if that had no effect."""
    layer, x = build(pipeline=2, bypass_local=False), tokens().requires_grad_()

    def lanes_waited_for() -> int:
        with pmoe.recording() as journal:
            layer(x).sum().backward()
        return len({span.lane for span in journal.spans})

    assert lanes_waited_for() == 2  # computing, and what travels to this rank itself
    layer.switches = Switches()
    assert layer.switches.bypass_local and lanes_waited_for() == 1
    assert not layer.layer_modules.sequential
    layer.switches = Switches(sequential=True, one_lane=True)
    assert layer.layer_modules.sequential and layer.layer_modules.stages.one_lane
    layer.memory_reuse = "S4"
    layer(x)
    assert layer.ran is not None and layer.ran.restore == layer.restore == pmoe.Restore(
        "communicate", "recompute"
    )


def test_switches_set_after_a_call_are_those_of_a_layer_that_had_them_before() -> None:
    """Nothing that follows from the old switches is kept: stages, rings, what ranks asked for, the
    prediction.
    """
    switches = Switches(bypass_local=False, sequential=True)
    first, late = (build(pipeline=2, memory_reuse="S4") for _ in range(2))
    first.switches = switches
    gradients(late)
    late.switches = switches
    assert_same(gradients(late), gradients(first))
    assert late.predict_memory(TOKENS) == first.predict_memory(TOKENS)
    assert late.predict_memory(TOKENS) != build(pipeline=2, memory_reuse="S4").predict_memory(TOKENS)
    assert late.ran == first.ran and late.row_counts.depth == first.row_counts.depth
    assert late.layer_modules.stages == first.layer_modules.stages


def test_switches_have_one_place() -> None:
    layer = build()
    with pytest.raises(TypeError, match=r"sequential \(1\) must be True or False"):
        layer.switches = Switches(sequential=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"switches \(None\) must be a pmoe.call.options.Switches"):
        layer.switches = None  # type: ignore[assignment]
    for name in ("bypass_local", "sequential", "one_lane", "program", "program_heaps"):
        with pytest.raises(AttributeError, match=rf"{name} \(True\) must be set in layer.switches"):
            setattr(layer, name, True)
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, **{name: False})


def test_integers_of_numpy_are_integers() -> None:
    sizes = (np.int64(6), np.int32(8), np.uint8(4), np.int64(2))
    assert type(MoELayer(*sizes, memory_budget=np.int64(1 << 20)).memory_budget) is int
    layer = MoELayer(*sizes, pipeline=np.int64(2), shared_expert=np.int64(5))
    assert all(type(getattr(layer, name)) is int for name in ("d_model", "top_k", "pipeline"))
    layer(torch.randn(3, 6)).sum().backward()
    layer.pipeline = np.int16(4)
    assert layer.pipeline == 4 and type(layer.pipeline) is int
    plain = MoELayer(6, 8, 4, 2)
    assert plain.predict_memory(np.int64(16)) == plain.predict_memory(16)
    with pytest.raises(TypeError, match=r"row_counts \(\[1\]\) must be None or what layer.row_counts holds"):
        plain.predict_memory(16, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"num_tokens \(True\) must be an int"):
        plain.predict_memory(True)
