"""Rules for cutting a graph's operators: an operator on parts of its inputs gives the parts of its result."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from pmoe.graph.axes import RULES, SUM, Axis, _is_pointwise, _pointwise, infer, tensors
from pmoe.graph.instructions import Instruction
from pmoe.graph.lower import calls_of, label, name_all
from pmoe.graph.plan import GraphSplit, RangePlan
from pmoe.graph.ranges import Range
from pmoe.graph.split_batch import COUNTED, MADE, SIZED, joined_rows, rows_of_part

aten = torch.ops.aten

A, B, X = torch.randn(4, 6), torch.randn(6, 8), torch.randn(4, 6, 2)
IDS = torch.randint(0, 6, (4, 2))

IMAGES = torch.randn(4, 2, 5, 5)

QKV = tuple(torch.randn(4, 2, 6, 8) for _ in range(3))

CASES: dict[str, Callable[[], Any]] = {
    "mm": lambda: (torch.mm, A, B),
    "addmm": lambda: (torch.addmm, torch.randn(8), A, B),
    "addmm, a matrix": lambda: (torch.addmm, torch.randn(4, 8), A, B),
    "bmm": lambda: (torch.bmm, X, torch.randn(4, 2, 6)),
    "layer norm": lambda: (lambda x, w: F.layer_norm(x, (2,), w), X, torch.randn(2)),
    "embedding": lambda: (lambda i, w: F.embedding(i, w), IDS, torch.randn(6, 4)),
    "attention": lambda: (
        lambda *each: F.scaled_dot_product_attention(*each, is_causal=True),
        *(torch.randn(4, 2, 6, 8) for _ in range(3)),
    ),
    "softmax": lambda: (lambda x: x.softmax(-1), X),
    "log softmax": lambda: (lambda x: x.log_softmax(1), X),
    "cumsum": lambda: (lambda x: x.cumsum(1), X),
    "argmax": lambda: (lambda x: x.argmax(1), X),
    "topk": lambda: (lambda x: x.topk(2, 1), X),
    "sort": lambda: (lambda x: x.sort(1), X),
    "gather": lambda: (lambda x, i: x.gather(1, i), A, IDS),
    "scatter": lambda: (lambda x, i: x.scatter(1, i, 2.0), A, IDS),
    "sum": lambda: (lambda x: x.sum(1), X),
    "sum, kept": lambda: (lambda x: x.sum((1, 2), keepdim=True), X),
    "mean": lambda: (lambda x: x.mean(-1), X),
    "logsumexp": lambda: (lambda x: x.logsumexp(1), X),
    "view": lambda: (lambda x: x.view(24, 2), X),
    "view back": lambda: (lambda x: x.view(2, 2, 6), A),
    "expand": lambda: (lambda x: x.unsqueeze(1).expand(4, 3, 6), A),
    "permute": lambda: (lambda x: x.permute(2, 0, 1).clone(), X),
    "transpose": lambda: (lambda x: x.transpose(0, -1), X),
    "t": lambda: (lambda x: x.t(), A),
    "select": lambda: (lambda x: x.select(1, 3), X),
    "unsqueeze": lambda: (lambda x: x.unsqueeze(1), A),
    "slice": lambda: (lambda x: x[:, 1:5], X),
    "split": lambda: (lambda x: x.split(3, 1), X),
    "chunk": lambda: (lambda x: x.chunk(2, -1), A),
    "cat": lambda: (lambda x, y: torch.cat([x, y], 1), A, torch.randn(4, 3)),
    "stack": lambda: (lambda x, y: torch.stack([x, y], 1), A, torch.randn(4, 6)),
    "add": lambda: (torch.add, X, torch.randn(6, 2)),
    "mul by a column": lambda: (torch.mul, X, torch.randn(4, 1, 1)),
    "gelu": lambda: (F.gelu, X),
    "where": lambda: (torch.where, X > 0, X, torch.zeros(2)),
    "to": lambda: (lambda x: x.double(), X),
    "layer norm, backward": lambda: (
        lambda g, x, m, r, w, b: aten.native_layer_norm_backward(g, x, [2], m, r, w, b, [True] * 3),
        *(X, torch.randn(4, 6, 2), torch.randn(4, 6, 1), torch.rand(4, 6, 1), torch.randn(2), torch.randn(2)),
    ),
    "attention, backward": lambda: (
        lambda *each: aten._scaled_dot_product_flash_attention_for_cpu_backward(*each, 0.0, True),
        *(torch.randn(4, 2, 6, 8), *QKV, *aten._scaled_dot_product_flash_attention_for_cpu(*QKV, 0.0, True)),
    ),
    "softmax, backward": lambda: (lambda g, y: aten._softmax_backward_data(g, y, -1, y.dtype), A, A + 1),
    "select, backward": lambda: (lambda g: aten.select_backward(g, [4, 3, 6], 1, 2), A),
    "slice, backward": lambda: (lambda g: aten.slice_backward(g, [4, 9], 1, 1, 7, 1), A),
    "gelu, backward": lambda: (lambda g, x: aten.gelu_backward(g, x), A, A + 1),
    "convolution": lambda: (
        lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2),
        *(IMAGES, torch.randn(6, 2, 3, 3), torch.randn(6)),
    ),
    "convolution of one dimension": lambda: (F.conv1d, torch.randn(4, 2, 8), torch.randn(6, 2, 3)),
    "convolution in groups": lambda: (
        lambda x, w: F.conv2d(x, w, groups=2),
        *(torch.randn(4, 4, 5, 5), torch.randn(6, 2, 3, 3)),
    ),
    "convolution, transposed": lambda: (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        *(IMAGES, torch.randn(2, 6, 3, 3), torch.randn(6)),
    ),
    "convolution, backward": lambda: (
        lambda g, x, w: aten.convolution_backward(
            g, x, w, [6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3
        ),
        *(torch.randn(4, 6, 5, 5), IMAGES, torch.randn(6, 2, 3, 3)),
    ),
    "max of a dimension": lambda: (lambda x: x.max(1), X),
    "max of a dimension, kept": lambda: (lambda x: x.max(-1, keepdim=True), X),
    "min of a dimension": lambda: (lambda x: x.min(1), X),
    "index select": lambda: (lambda x, i: x.index_select(1, i), X, torch.tensor([5, 0, 0, 3])),
    "index add": lambda: (
        lambda x, i, y: x.index_add(1, i, y),
        *(X, torch.tensor([5, 0, 3, 1]), torch.randn(4, 4, 2)),
    ),
    "repeat": lambda: (lambda x: x.repeat(3, 1, 2, 1), X),
    "flip": lambda: (lambda x: x.flip(1, -1), X),
    "group norm": lambda: (
        lambda x, w, b: aten.native_group_norm(x, w, b, x.shape[0], 4, 10, 2, 1e-5),
        *(torch.randn(4, 4, 10), torch.randn(4), torch.randn(4)),
    ),
    "group norm without a weight": lambda: (lambda x: F.group_norm(x, 2), torch.randn(4, 4, 5, 2)),
    "group norm, backward": lambda: (
        lambda g, x, m, r, w: aten.native_group_norm_backward(g, x, m, r, w, 4, 4, 10, 2, [True] * 3),
        *(torch.randn(4, 4, 10), torch.randn(4, 4, 10), torch.randn(4, 2), torch.rand(4, 2), torch.randn(4)),
    ),
    "std": lambda: (lambda x: x.std(1), X),
    "std of all but the batch": lambda: (lambda x: x.std((1, 2), correction=0, keepdim=True), X),
    "variance and mean": lambda: (lambda x: torch.var_mean(x, 1), X),
    "convolution, dilated, of every channel": lambda: (
        lambda x, w, b: F.conv2d(x, w, b, groups=4, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        *(torch.randn(4, 4, 6, 5), torch.randn(8, 1, 3, 3), torch.randn(8)),
    ),
    "convolution, transposed, in groups": lambda: (
        lambda x, w, b: F.conv_transpose1d(x, w, b, stride=3, output_padding=1, dilation=2, groups=2),
        *(torch.randn(4, 4, 5), torch.randn(4, 3, 3), torch.randn(6)),
    ),
    "convolution, transposed, in groups, backward": lambda: (
        lambda g, x, w: aten.convolution_backward(g, x, w, [6], [2], [1], [1], True, [1], 2, [True] * 3),
        *(torch.randn(4, 6, 14), torch.randn(4, 4, 7), torch.randn(4, 3, 3)),
    ),
    "max of a dimension from the end": lambda: (lambda x: x.max(-2), X),
    "index select in the last dimension": lambda: (
        lambda x, i: x.index_select(-1, i),
        *(X, torch.tensor([1, 0, 1, 1])),
    ),
    "index select in the batch": lambda: (
        lambda x, i: x.index_select(0, i),
        *(X, torch.tensor([3, 1, 1, 0])),
    ),
    "index add from the end": lambda: (
        lambda x, i, y: x.index_add(-2, i, y, alpha=2),
        *(X, torch.tensor([5, 0, 3, 3]), torch.randn(4, 4, 2)),
    ),
    "repeat of the batch and of two new dimensions": lambda: (lambda x: x.repeat(2, 3, 2, 1, 2), X),
    "flip of nothing": lambda: (lambda x: x.flip([]), X),
    "flip of the batch": lambda: (lambda x: x.flip(0, 2), X),
    "group norm, each channel a group": lambda: (
        lambda x, w: F.group_norm(x, 4, w),
        *(torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last), torch.randn(4)),
    ),
    "std of a list from the end": lambda: (lambda x: torch.std(x, (0, -1), correction=2), X),
    "std and mean": lambda: (lambda x: torch.std_mean(x, (-1, -2), keepdim=False), X),
    "variance and mean, kept": lambda: (lambda x: torch.var_mean(x, (1,), correction=0, keepdim=True), X),
    "squeeze": lambda: (lambda x: x.squeeze(-2), torch.randn(4, 1, 6)),
    "squeeze of a size above 1": lambda: (lambda x: x.squeeze(1), X),
    "new zeros": lambda: (lambda x: x.new_zeros((4, 3)), A),
}


def halves(value: Any, axis: Axis) -> list[Any]:
    if axis == SUM:
        return [value / 4, value * 3 / 4]
    return [value, value] if axis is None else list(value.chunk(2, axis))


@pytest.mark.parametrize("name", CASES)
def test_parts_of_inputs_give_parts_of_results(name: str) -> None:
    """Tries every way to cut that the rule allows, for every operator of the case."""
    function, *given = CASES[name]()
    graph = make_fx(function)(*given).graph
    values: dict[Any, Any] = dict(
        zip((each for each in graph.nodes if each.op == "placeholder"), given, strict=True)
    )
    tried = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = values[node]
        if node.op != "call_function":
            continue

        def run(half: int | None, axes: dict[Any, Axis], node: Any = node) -> Any:
            def value(one: Any) -> Any:
                whole = values[one]
                return whole if half is None else halves(whole, axes[one])[half]

            args = torch.fx.node.map_arg(node.args, value)
            if half is not None and node.target in SIZED:
                at = axes["result"]
                args = (args[0], [-1 if dim == at else size for dim, size in enumerate(args[1])])
            if half is not None and node.target in MADE:
                sizes = [size // 2 if dim == axes["result"] else size for dim, size in enumerate(args[1])]
                args = (args[0], sizes, *args[2:])
            if half is not None and node.target in COUNTED:
                place = COUNTED[node.target]
                args = (*args[:place], args[0].shape[0], *args[place + 1 :])
            return node.target(*args, **torch.fx.node.map_arg(node.kwargs, value))

        node.meta["val"] = values[node] = run(None, {})
        if node.target is operator.getitem:
            continue
        rule = RULES.get(node.target) or (_pointwise if _is_pointwise(node.target) else None)
        assert rule is not None, node.target
        for combination in rule(node):
            axes: dict[Any, Axis] = dict(zip(tensors(node), combination.inputs, strict=True))
            if any(isinstance(axis, int) and values[each].shape[axis] % 2 for each, axis in axes.items()):
                continue
            results = combination.result
            first = results[0] if isinstance(results, tuple) else results
            whole = values[node]
            wholes = whole if isinstance(whole, (tuple, list)) else [whole]
            found = [run(half, {**axes, "result": first}) for half in (0, 1)]
            for at, expected in enumerate(wholes):
                axis = results[at] if isinstance(results, tuple) else results
                if axis is None:
                    continue
                got = [each[at] if isinstance(each, (tuple, list)) else each for each in found]
                joined = sum(got) if axis == SUM else torch.cat(got, axis)
                assert joined.shape == expected.shape, (node, combination)
                torch.testing.assert_close(joined, expected)
            tried += 1
    assert tried


def results(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def cut_graph(
    function: Callable[..., Any], given: Sequence[Tensor], batch: int, k: int
) -> tuple[GraphSplit, torch.fx.GraphModule]:
    """The graph of a function whose first ``batch`` arguments hold the batch, and the same in k parts."""
    module = make_fx(function, tracing_mode="fake")(*given)
    name_all(module.graph)
    inputs = module.graph.find_nodes(op="placeholder")
    split = GraphSplit(module, dict.fromkeys(inputs[:batch], 0), given[0].shape[0])
    whole = Range(split.names[0], split.names[-1], k, k)
    return split, split.apply(RangePlan(split.names, (whole,)))


MODELS: dict[str, Callable[[], Any]] = {
    "images": lambda: (
        lambda x, w, b, g: F.group_norm(F.conv2d(x, w, b, padding=1), 2, g, g).relu().amax((2, 3)),
        *(IMAGES, torch.randn(6, 2, 3, 3), torch.randn(6), torch.randn(6)),
    ),
    "images, transposed": lambda: (
        lambda x, w: F.conv_transpose2d(x, w, stride=2).flip(-1).max(2),
        *(IMAGES, torch.randn(2, 6, 3, 3)),
    ),
    "standardized": lambda: (lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), X),
    "chosen": lambda: (
        lambda x, i: x.index_select(1, i).repeat(1, 2, 1).max(2).values,
        *(X, torch.tensor([5, 0, 0, 3])),
    ),
    "heads": lambda: (lambda x: x.view(4, 3, 2, 2).transpose(1, 2).reshape(4, -1).softmax(-1), X),
}


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_graph_gives_what_the_whole_one_gives(name: str, k: int) -> None:
    function, *given = MODELS[name]()
    split, module = cut_graph(function, given, 1, k)
    assert not split._refused
    assert len(split.names) < len([node for node in module.graph.nodes if node.op == "call_function"])
    for got, expected in zip(results(module(*given)), results(function(*given)), strict=True):
        torch.testing.assert_close(got, expected)


def test_attention_whose_heads_are_the_batch_is_not_cut() -> None:
    """Two sequences in four parts. The bug: attention with no heads ended the process (SIGFPE)."""

    def attended(x: Tensor) -> Tensor:
        heads = x.exp().unsqueeze(0)
        return F.scaled_dot_product_attention(heads, heads, heads).squeeze(0).cos()

    x = torch.randn(2, 6, 8)
    module = make_fx(attended, tracing_mode="fake")(x)
    name_all(module.graph)
    split = GraphSplit(module, dict.fromkeys(module.graph.find_nodes(op="placeholder"), 0), 2)
    (refused,) = split._refused
    assert "attention" in str(refused.target)
    for range_ in every_range(split):  # also in 3 and 4 parts, of which some are empty
        cut = split.apply(RangePlan(split.names, (range_,)))
        torch.testing.assert_close(cut(x), attended(x))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_gradient_of_images_is_the_sum_of_those_of_the_parts(k: int) -> None:
    def backward(grad: Tensor, *given: Tensor) -> list[Tensor]:
        def loss(x: Tensor, w: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return F.group_norm(F.conv2d(x, w, b, padding=1), 2, scale, shift).max(1).values

        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in given]
            return list(torch.autograd.grad(loss(*leaves), leaves, grad))

    vectors = [torch.randn(6) for _ in range(3)]
    given = (torch.randn(4, 5, 5), IMAGES, torch.randn(6, 2, 3, 3), *vectors)
    split, module = cut_graph(backward, given, 2, k)
    assert not split._refused
    for got, expected in zip(module(*given), backward(*given), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("k", [2, 4])
def test_a_view_with_fewer_elements_than_the_batch_has_sequences_is_not_cut(k: int) -> None:
    """(4, 6) as (2, 2, 6) has two elements in dimension 0, which cannot be those of 4 sequences."""
    function = lambda x: x.exp().view(2, 2, 6).cos().view(4, 6).sin()  # noqa: E731
    module = make_fx(function, tracing_mode="fake")(A)
    (x,) = module.graph.find_nodes(op="placeholder")
    axes, refused, _ = infer(module.graph, {x: 0}, sequences=4)
    assert [str(node.target) for node in refused] == ["aten.view.default"]
    exp, view, _, back, sin = (node for node in module.graph.nodes if node.op == "call_function")
    assert axes[exp] == 0 and axes[view] is None and axes[back] in (0, None)
    name_all(module.graph)
    split = GraphSplit(module, {x: 0}, 4)
    names = split.names
    cut = split.apply(RangePlan(names, (Range(names[0], names[0], k, k),)))
    torch.testing.assert_close(cut(A), function(A))


def test_a_view_is_cut_if_both_dimensions_have_whole_parts() -> None:
    def function(x: Tensor) -> Tensor:
        return x.view(24, 2).exp().view(4, 6, 2).cos()

    split, module = cut_graph(function, [X], 1, 4)
    assert not split._refused
    torch.testing.assert_close(module(X), function(X))
    _, refused, _ = infer(split._module.graph, {next(iter(split._module.graph.nodes)): 0}, sequences=8)
    assert refused


def efficient_attention(dropout: float, bias: bool) -> torch.fx.Node:
    """A call of the operator, which has no kernel on the CPU."""
    graph = torch.fx.Graph()
    values = [torch.empty(4, 2, 8, 8, device="meta") for _ in range(4)]
    inputs = [graph.placeholder(name) for name in ("query", "key", "value", "mask")]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    target = aten._scaled_dot_product_efficient_attention.default
    attn_bias = inputs[3] if bias else None
    node = graph.call_function(target, (*inputs[:3], attn_bias, True, dropout))
    node.meta["val"] = target(*values[:3], values[3] if bias else None, True, dropout)
    return node


def test_efficient_attention_is_cut_unless_it_has_dropout_or_a_mask() -> None:
    """Its argument 3 is the mask, its argument 5 the dropout."""
    node = efficient_attention(0.0, False)
    (rule,) = {RULES[node.target]}
    assert [each.inputs for each in rule(node)] == [(0, 0, 0)]
    for combination in rule(node):
        axis = combination.inputs[0]
        halves_of_inputs = [each.meta["val"].chunk(2, axis) for each in tensors(node)]
        parts = [node.target(*half, None, True, 0.0) for half in zip(*halves_of_inputs, strict=True)]
        for at in (0, 1):  # the output, and the logsumexp of each query
            joined = torch.cat([each[at] for each in parts], combination.result[at])
            assert joined.shape == node.meta["val"][at].shape
    for dropout, bias in ((0.1, False), (0.0, True)):
        assert not list(rule(efficient_attention(dropout, bias)))


def traced(function: Callable[..., Any], *given: Tensor) -> torch.fx.Graph:
    return make_fx(function, tracing_mode="fake")(*given).graph


SMALLER: dict[str, Callable[[], Any]] = {
    "gather": lambda: (lambda x, i: x.gather(1, i), torch.randn(8, 6), IDS),
    "scatter": lambda: (lambda x, i: x.scatter(1, i, 2.0), torch.randn(8, 6), IDS),
    "scatter add": lambda: (
        lambda x, i, y: x.scatter_add(1, i, y),
        torch.randn(8, 6),
        IDS,
        torch.randn(4, 2),
    ),
}


@pytest.mark.parametrize("name", SMALLER)
def test_fewer_indices_than_rows_are_not_cut_with_the_rows(name: str) -> None:
    """The bug: 8 rows and the indices of the first 4 were halved together, so rows 4 and 5 got indices 2
    and 3.
    """
    function, *given = SMALLER[name]()
    graph = traced(function, *given)
    _, refused, _ = infer(graph, dict.fromkeys(graph.find_nodes(op="placeholder"), 0), sequences=4)
    assert len(refused) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum((0, 1)).sum(0),
        lambda x: x.sum((0, 1)).t(),
        lambda x: x.sum((0, 1)).unsqueeze(0).squeeze(0).squeeze(-1),
        lambda x: x.sum((0, 1)).flip([]),
        lambda x: x.sum((0, 1)).index_select(0, torch.tensor([0])),
    ],
    ids=["sum", "t", "squeeze", "flip", "index select"],
)
def test_a_sum_without_dimensions_is_read_without_an_error(function: Callable[[Tensor], Tensor]) -> None:
    """The bug: negative dimensions were counted modulo 0."""
    graph = traced(function, A)
    (x, *_) = graph.find_nodes(op="placeholder")
    axes, *_ = infer(graph, {x: 0}, sequences=4)
    assert SUM in axes.values()


def every_range(split: GraphSplit) -> Iterator[Range]:
    """Yields each range of a graph that may be cut, in 2, 3 and 4 parts."""
    cuttable = split.cuttable([Instruction(name=name) for name in split.names])
    for first, last in itertools.combinations(range(len(split.names) + 1), 2):
        if cuttable.ends[first] and cuttable.ends[last] and all(cuttable.can[first:last]):
            for k in (2, 3, 4):
                yield Range(split.names[first], split.names[last - 1], k, k)


def weighted_by_position(x: Tensor) -> Tensor:
    """Reads a table that does not depend on the batch: first as a whole, then with each part of the batch."""
    weight = torch.arange(48.0).view(4, 6, 2)
    reversed_weight = weight.flip(0)
    return x.exp() * weight + reversed_weight


def divided_by_length(x: Tensor) -> Tensor:
    rows = x.exp().view(-1, 2)
    return rows / rows.shape[0]


IN_RANGES: dict[str, Callable[[], Any]] = {
    "turned": lambda: (lambda x: x.transpose(1, 2).exp().transpose(1, 2).view(24, 2).cos(), X),
    "turned with the batch": lambda: (
        lambda x: x.transpose(0, 1).exp().max(0, keepdim=True).values.transpose(0, 1).view(4, 2).cos(),
        X,
    ),
    "channels last": lambda: (
        lambda x, w: F.group_norm(F.conv2d(x, w), 2).permute(0, 2, 3, 1).view(4, -1, 6).cos(),
        *(IMAGES.to(memory_format=torch.channels_last), torch.randn(6, 2, 3, 3)),
    ),
    "tokens reversed": lambda: (lambda x: x.flip(-2).reshape(-1, 2).flip(1).view(4, 6, 2).std(-2), X),
    "a batch reversed": lambda: (lambda x: x.exp().view(-1, 2).flip(0).cos(), X),
    "a squeeze that does nothing": lambda: (lambda x: x.transpose(0, 2).squeeze(1).exp(), X),
    "chosen by the batch": lambda: (
        lambda i, table: table.index_select(1, i).max(0).values.repeat(2, 1, 1).transpose(0, 1),
        *(torch.tensor([3, 3, 0, 1]), torch.randn(5, 6, 2)),
    ),
    "chosen from the batch": lambda: (
        lambda x, i: x.exp().index_select(0, i).std((1, -1), correction=0),
        *(X, torch.tensor([3, 3, 0, 1])),
    ),
    "tokens chosen from a table": lambda: (
        lambda i, table: table.index_select(0, i.view(-1)).view(4, 2, 4),
        *(IDS, torch.randn(6, 4)),
    ),
    "weights of the batch": lambda: (
        lambda w, x: F.conv2d(x, w).flip(-1).cos(),
        *(torch.randn(4, 2, 3, 3), torch.randn(3, 2, 5, 5)),
    ),
    "weights of the batch, in groups": lambda: (
        lambda w, x: F.conv2d(x, w, groups=2).cos(),
        *(torch.randn(4, 1, 3, 3), torch.randn(3, 2, 5, 5)),
    ),
    "an image without a batch": lambda: (
        lambda x, w: F.conv2d(x.exp(), w),
        *(torch.randn(4, 6, 6), torch.randn(2, 4, 3, 3)),
    ),
    "norms of the batch": lambda: (
        lambda x: F.batch_norm(F.instance_norm(x.exp()), None, None, training=True).cos(),
        torch.randn(4, 3, 6),
    ),
    "more repeats than dimensions": lambda: (lambda x: x.repeat(3, 1, 1, 2).flatten(0, 1).cos(), X),
    "a sum as integers": lambda: (lambda x: (3 * x).sum(0).long(), X),
    "a sum as a truth value": lambda: (lambda x: (x - x.mean(0)).round().sum(0).bool(), X),
    "a sum that is overwritten": lambda: (lambda x: aten.copy(x.exp().sum(0), torch.ones(6, 2)), X),
    "two results": lambda: (lambda x: torch.frexp(x.exp()), X),
    "a deviation of all": lambda: (lambda x: (x / x.std()).cos() + x.argmax(), X),
    "weights of positions": lambda: (weighted_by_position, X),
    "divided by its length": lambda: (divided_by_length, X),
    "a view that keeps its length": lambda: (lambda x: x.exp().view(x.shape[0], -1).cos(), X),
    "gradients of choices": lambda: (
        lambda x: [aten.select_backward(x.exp(), [*x.shape, 3], 3, at) for at in range(2)],
        X,
    ),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", IN_RANGES)
def test_each_range_in_parts_gives_what_the_whole_graph_gives(name: str, symbolic: bool) -> None:
    """Cuts every range that may be cut.

    The bug of "turned" and "channels last": parts were joined in another order of dimensions in memory than
    the whole tensor has, and a ``view`` behind the range raised. With symbols for sizes, it raised still.

    The bug of "a sum as integers": each part rounded its summand. So the sum was too small, without an error.

    The bug of "weights of positions": the product decided that the weights are cut, and ``flip``, which had
    read them before, then reversed each part by itself.

    The bugs of symbols for sizes: rows were divided by the length of their part. A view with one size left
    out raised a NameError. Two calls had the same name.
    """
    function, *given = IN_RANGES[name]()
    module = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*given)
    name_all(module.graph)
    (batch, *_) = module.graph.find_nodes(op="placeholder")
    split = GraphSplit(module, {batch: 0}, batch.meta["val"].shape[0])
    expected = function(*given)
    for range_ in every_range(split):
        cut = split.apply(RangePlan(split.names, (range_,)))
        names = [label(node) for node in calls_of(cut)]
        assert len(set(names)) == len(names)
        for got, whole in zip(results(cut(*given)), results(expected), strict=True):
            torch.testing.assert_close(got, whole)
            assert got.stride() == whole.stride(), range_


def test_calls_of_two_ranges_that_cut_the_same_tensor_have_different_names() -> None:
    """The bug: both ranges called the first part of x "x, input, cut for part 0", and one call was lost."""
    function = lambda x: x.exp() + x.cumsum(0) + x.cos()  # noqa: E731
    module = make_fx(function, tracing_mode="fake")(A)
    name_all(module.graph)
    split = GraphSplit(module, dict.fromkeys(module.graph.find_nodes(op="placeholder"), 0), 4)
    ranges = tuple(Range(name, name, 2, 2) for name in ("exp_0", "cos_0"))
    cut = split.apply(RangePlan(split.names, ranges))
    names = [label(node) for node in calls_of(cut)]
    assert sum("cut for part 0" in name for name in names) == 2
    assert len(set(names)) == len(names)
    torch.testing.assert_close(cut(A), function(A))


def test_a_graph_is_followed_to_its_end() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        y = F.layer_norm(x, (2,))
        return (y.view(24, 2) @ w).view(4, 6, 8).softmax(-1) + 1

    graph = traced(block, X, torch.randn(2, 8))
    first, weight = (node for node in graph.nodes if node.op == "placeholder")
    axes, refused, _ = infer(graph, {first: 0})
    assert not refused
    assert axes[weight] is None
    output = next(iter(reversed(graph.nodes))).args[0]
    assert axes[output] == 0


def test_what_mixes_the_batch_ends_a_range_and_another_begins() -> None:
    def mixing(x: Tensor) -> Tensor:
        return (x.exp() - x.exp().sum(0)).cumsum(0).exp()

    graph = traced(mixing, A)
    axes, refused, _ = infer(graph, {next(iter(graph.nodes)): 0})
    names = [str(node.target) for node in refused]
    assert names == ["aten.sub.Tensor", "aten.cumsum.default"], refused
    last = [node for node in graph.nodes if str(node.target) == "aten.exp.default"][-1]
    assert axes[last] == 0


def test_random_numbers_are_not_drawn_in_parts() -> None:
    graph = traced(lambda x: F.dropout(x, 0.5), A)
    _, refused, _ = infer(graph, {next(iter(graph.nodes)): 0})
    assert refused


def test_rows_of_parts_are_those_that_are_joined() -> None:
    """Cuts the rows of 2 senders for 4 experts into 3 parts, of which some are empty."""
    draw = torch.Generator().manual_seed(1)
    counts = [torch.randint(0, 3, (2, 4), generator=draw) for _ in range(3)]
    parts = [torch.randn(int(each.sum()), 2, generator=draw) for each in counts]
    whole = joined_rows(parts, counts, True)
    for at, part in enumerate(parts):
        assert torch.equal(rows_of_part(whole, counts, at), part)


def test_a_backward_pass_is_cut_as_its_first_input_is() -> None:
    """A tensor that forward left is cut where backward uses it.

    The gradient of a weight is the sum of the parts' gradients.
    """

    def backward(grad: Tensor, y: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        through = aten._softmax_backward_data(grad, y, -1, y.dtype)
        return through @ w.t(), (x.t() @ through).t()

    graph = traced(backward, A, A + 1, torch.randn(4, 2), torch.randn(2, 6))
    inputs = graph.find_nodes(op="placeholder")
    axes, refused, _ = infer(graph, {inputs[0]: 0}, inputs)
    assert not refused
    (through,) = graph.find_nodes(op="call_function", target=aten._softmax_backward_data.default)
    assert [axes[each] for each in tensors(through)] == [0, 0]
    assert [axes[each] for each in next(iter(reversed(graph.nodes))).args[0]] == [0, SUM]


# ---- propagation beside search


def random_graph(seed: int) -> torch.fx.Graph:
    """Returns a graph of six operators on a batch and a weight. Each operator's inputs are results
    before it.
    """
    choose = random.Random(seed)

    def several(x: Tensor, w: Tensor) -> Tensor:
        found = [x]
        for _ in range(6):
            one, other = choose.choice(found), choose.choice(found)
            dim = choose.randrange(3)
            made: list[Callable[[], Tensor]] = [
                lambda one=one: one.exp(),
                lambda one=one, other=other: one + other if one.shape == other.shape else one.neg(),
                lambda one=one, dim=dim: one.transpose(dim, (dim + 1) % 3),
                lambda one=one, dim=dim: one.softmax(dim),
                lambda one=one, dim=dim: one - one.sum(dim, keepdim=True),
                lambda one=one: (one.reshape(-1, 4) @ w).view(one.shape),
                lambda one=one, dim=dim: torch.cat([one, one], dim).narrow(dim, 0, 4),
                lambda one=one, dim=dim: one.cumsum(dim),
            ]
            found.append(choose.choice(made)())
        return found[-1]

    return traced(several, torch.randn(4, 4, 4), torch.randn(4, 4))


def all_axes(nodes: Sequence[Any], cut: Mapping[Any, Axis]) -> Iterator[dict[Any, Axis]]:
    """Yields every way to give each node an axis, by trying all that the rules allow. No axis changes on the
    way.

    cut: the axes of the graph's inputs.
    """
    if not nodes:
        yield {**cut}
        return
    *before, node = nodes
    for axes in all_axes(before, cut):
        given = [axes[each] for each in tensors(node)]
        if all(axis is None for axis in given):
            yield {**axes, node: None}
            continue
        rule = RULES.get(node.target) or (_pointwise if _is_pointwise(node.target) else None)
        fitting = [each.result for each in rule(node) if list(each.inputs) == given] if rule else []
        for result in dict.fromkeys(fitting):
            yield {**axes, node: result}  # type: ignore[dict-item]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_propagated_is_what_search_finds(seed: int) -> None:
    """The axes that are propagated are the only ones that a search finds.

    This is so up to the first operator that cannot be cut; from there on the search finds none either.
    """
    graph = random_graph(seed)
    x, w = graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    axes, refused, _ = infer(graph, {x: 0})
    first = next((at for at, node in enumerate(calls) if node in refused), len(calls))
    found = list(all_axes(calls[:first], {x: 0, w: None}))
    assert {**{each: axes[each] for each in calls[:first]}, x: 0, w: None} in found
    assert first == len(calls) or not list(all_axes(calls[: first + 1], {x: 0, w: None}))
