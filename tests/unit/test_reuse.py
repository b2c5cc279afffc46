"""Memory reuse on one rank: users' modules, what is kept between the passes, restored tensors."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import Restore
from pmoe.engine.buffers.host_pool import HostPool
from pmoe.graph import capture
from pmoe.schedule.buffer_sizes import ALIGNMENT
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES
from pmoe.schedule.ring_buffers import rotating_backward, rotating_forward
from tests.kit import (
    AUX,
    D_HIDDEN,
    D_MODEL,
    TOKENS,
    TOP_K,
    assert_same,
    build,
    loss_of,
    one_thread,  # noqa: F401 (a fixture)
    step,
    tokens,
)
from tests.own_experts import EXPERTS, Counting, changing, dropping, mlp
from tests.saved import num_rows, rows_saved, saved_by
from tests.seen import Seen
from tests.spread import named, spread
from tests.unit.test_layer_checkpoint import Flat

KEEPING = [pair for pair in ALL_PAIRS if pair.hidden != "recompute"]
REPEATING = [pair for pair in ALL_PAIRS if pair.hidden == "recompute"]


# ---- users' modules

DEGREES = [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1)]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name, pair", spread(list(EXPERTS), ALL_PAIRS, every=2), ids=named)
def test_ones_own_experts_have_the_same_gradients_with_reuse(pair: Restore, name: str) -> None:
    """Buffers and random numbers are the same, too, because recomputation leaves no trace."""
    for n, n_backward in DEGREES:
        random_recompute = name == "dropout" and n != n_backward
        if pair.hidden == "recompute" and (name == "in place" or random_recompute):
            continue  # refused
        options = {"expert": EXPERTS[name], "pipeline": n, "pipeline_backward": n_backward}
        expected = step(build(**options))
        assert_same(step(build(**options, memory_reuse=pair)), expected, 1e-12)


@pytest.mark.parametrize("pair", REPEATING, ids=str)
@pytest.mark.parametrize("name", ["mlp", "norm at the end", "identity"])
def test_recomputed_modules_may_have_more_chunks_in_backward(name: str, pair: Restore) -> None:
    expected = step(build(expert=EXPERTS[name]))
    for n, n_backward in [(1, 2), (1, 3), (2, 4)]:
        options = {"pipeline": n, "pipeline_backward": n_backward, "memory_reuse": pair}
        assert_same(step(build(expert=EXPERTS[name], **options)), expected, 1e-12)


@pytest.mark.parametrize("n, n_backward, pair", spread(DEGREES, ALL_PAIRS, every=2), ids=named)
def test_modules_under_autocast_are_recomputed_under_it(n: int, n_backward: int, pair: Restore) -> None:
    options = {"expert": mlp, "dtype": torch.float32, "pipeline": n, "pipeline_backward": n_backward}
    found = []
    for reuse in (False, pair):
        layer = build(memory_reuse=reuse, **options)
        narrow = torch.autocast("cpu", dtype=torch.bfloat16)(layer.__call__)
        found.append(step(layer, tokens(dtype=torch.float32), narrow))
    assert found[1]["y"].dtype == torch.bfloat16
    # n_backward chunks of bfloat16 rows are summed in other orders.
    assert_same(found[1], found[0], 0.0 if n == n_backward or pair.hidden != "recompute" else 0.02)


@pytest.mark.parametrize("pair", REPEATING, ids=str)
def test_random_experts_are_recomputed_only_in_forwards_chunks(pair: Restore) -> None:
    layer = build(expert=dropping, memory_reuse=pair, pipeline=4, pipeline_backward=2)
    with pytest.raises(RuntimeError, match="draws random numbers, .* forward: 4, of backward: 2"):
        layer(tokens())
    layer.eval()(tokens())  # nothing is drawn
    with torch.no_grad():
        layer.train()(tokens())  # nothing will be recomputed


@pytest.mark.parametrize("pair", REPEATING, ids=str)
def test_experts_that_change_their_input_are_not_recomputed(pair: Restore) -> None:
    layer = build(expert=changing, memory_reuse=pair, pipeline=2)
    with pytest.raises(RuntimeError, match=r"changes its input in place, .* \(T_M\) cannot be recomputed"):
        layer(tokens())
    with torch.no_grad():
        layer(tokens())


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_a_saved_graph_cannot_be_split_but_a_recomputed_one_can(pair: Restore) -> None:
    options = {"expert": mlp, "memory_reuse": pair, "pipeline": 2, "pipeline_backward": 4}
    if pair.hidden == "recompute":
        assert_same(step(build(**options)), step(build(expert=mlp)), 1e-12)
        return
    with pytest.raises(ValueError, match=r"pipeline_backward \(4\) must divide pipeline \(2\) if"):
        build(**options)


@pytest.mark.parametrize("reuse", [False, *ALL_PAIRS], ids=str)
def test_a_saved_tensor_that_an_expert_then_changes_is_refused_as_autograd_refuses_it(reuse: Any) -> None:
    def expert(d_model: int, d_hidden: int) -> nn.Module:
        over = nn.Threshold(0.5, 0.0, inplace=True)  # over what the sigmoid keeps for its gradient
        return nn.Sequential(nn.Linear(d_model, d_hidden), nn.Sigmoid(), over, nn.Linear(d_hidden, d_model))

    y = build(expert=expert, memory_reuse=reuse)(tokens())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("reuse", [False, *KEEPING], ids=str)
def test_rows_that_an_expert_saves_and_then_changes_are_refused(reuse: Any) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(D_MODEL))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.scale
            x.relu_()
            return y

    y = build(expert=Late, memory_reuse=reuse)(tokens())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- what lives between the passes


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
@pytest.mark.parametrize("expert, hidden", [("ffn", 10), ("swiglu", 20)])
def test_between_the_passes_lives_what_the_pair_says(expert: str, hidden: int, pair: Restore) -> None:
    n, rows = 3, TOKENS * TOP_K
    x = tokens().requires_grad_()
    before = pmoe.pool().host.bytes_in_use
    y, saved = saved_by(build(expert=expert, memory_reuse=pair, pipeline=n), x)
    kept = {"communicate": 0, "recompute": 0, "keep": rows, "offload": rows}
    assert num_rows(rows_saved(saved, D_MODEL, x)) == kept[pair.dispatched]
    assert num_rows(rows_saved(saved, hidden, x)) == kept[pair.hidden]
    by_chunk = [4 * TOP_K, 4 * TOP_K, 3 * TOP_K]

    def host_bytes(fate: str, columns: int) -> int:
        aligned = [-(-count * columns * 8 // ALIGNMENT) * ALIGNMENT for count in by_chunk]
        return sum(aligned) if fate == "offload" else 0

    wanted = host_bytes(pair.dispatched, D_MODEL) + host_bytes(pair.hidden, hidden)
    assert pmoe.pool().host.bytes_in_use - before == wanted
    assert pmoe.pool().device.bytes_in_use == 0
    y.sum().backward()
    assert pmoe.pool().device.bytes_in_use == 0
    del saved
    assert pmoe.pool().host.bytes_in_use == before


@pytest.mark.parametrize("name", EXPERTS)
def test_s4_keeps_nothing_of_modules(name: str) -> None:
    if name == "in place":
        return
    layer, x = build(expert=EXPERTS[name], memory_reuse="S4", pipeline=2), tokens().requires_grad_()
    _, saved = saved_by(layer, x)
    assert rows_saved(saved, D_MODEL, x) == rows_saved(saved, D_HIDDEN, x) == []


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
@pytest.mark.parametrize("expert", ["ffn", mlp, dropping, Counting])
def test_parameters_and_buffers_are_never_offloaded(
    expert: Any, pair: Restore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, ...]] = []
    take = HostPool.take

    def watched(pool: HostPool, shape: Any, dtype: torch.dtype) -> Tensor:
        if pool is pmoe.pool().host:
            taken.append(tuple(shape))
        return take(pool, shape, dtype)

    monkeypatch.setattr(HostPool, "take", watched)
    layer = build(expert=expert, memory_reuse=pair)
    layer(tokens(100)).sum().backward()
    assert layer.tokens_per_expert.min() > D_HIDDEN  # or rows could have a parameter's shape by chance
    assert bool(taken) == pair.offloads
    own = {tuple(each.shape) for each in itertools.chain(layer.experts.parameters(), layer.buffers())}
    own |= {shape[::-1] for shape in own}
    assert not own & set(taken)


@pytest.mark.parametrize("pair", [pair for pair in ALL_PAIRS if pair.offloads], ids=str)
@pytest.mark.parametrize("expert", ["ffn", mlp])
def test_an_output_dropped_without_a_backward_gives_host_memory_back(expert: Any, pair: Restore) -> None:
    pool = pmoe.pool().host
    before = pool.bytes_in_use
    layer = build(expert=expert, memory_reuse=pair, pipeline=2)
    y = layer(tokens().requires_grad_())
    assert pool.bytes_in_use > before
    layer.l_aux = None
    del y
    assert pool.bytes_in_use == before  # no cycle: nothing waits for a garbage collection


@pytest.mark.parametrize(
    "expert, pair", spread(["ffn", "swiglu", mlp, dropping], ALL_PAIRS, every=2), ids=named
)
def test_a_retained_graph_gives_the_same_gradients_twice(expert: Any, pair: Restore) -> None:
    for n, n_backward in [(1, 1), (3, 3), (4, 2)]:
        if expert is dropping and n != n_backward:
            continue
        layer = build(expert=expert, memory_reuse=pair, pipeline=n, pipeline_backward=n_backward)
        x = tokens().requires_grad_()
        loss = loss_of(layer, layer(x))
        leaves = [x, *layer.parameters()]
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss, leaves)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("expert, pair", spread(["ffn", mlp], ALL_PAIRS, every=2), ids=named)
def test_several_forwards_may_run_backward_in_any_order(expert: Any, pair: Restore) -> None:
    layer = build(expert=expert, memory_reuse=pair, pipeline=2)
    xs = [tokens(7), tokens(0), tokens(5, seed=8)]
    expected = [step(layer, x) for x in xs]
    for order in itertools.permutations(range(3)):
        leaves = [x.clone().requires_grad_() for x in xs]
        losses = [loss_of(layer, layer(x)) for x in leaves]
        for i in order:
            layer.zero_grad(set_to_none=True)
            losses[i].backward()
            assert torch.equal(leaves[i].grad, expected[i]["x"])
            for name, parameter in layer.named_parameters():
                assert torch.equal(parameter.grad, expected[i][name]), name


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
@pytest.mark.parametrize("expert", ["ffn", mlp])
def test_a_layer_used_twice_in_a_graph_and_over_several_batches_sums_its_gradients(
    expert: Any, pair: Restore
) -> None:
    found = []
    for reuse in (False, pair):
        layer = build(expert=expert, memory_reuse=reuse, pipeline=2)
        for seed in (3, 5):
            x = tokens(seed=seed)
            (loss_of(layer, layer(layer(x))) + AUX * layer.l_aux).backward()
        found.append({name: p.grad for name, p in layer.named_parameters()})
    assert_same(found[1], found[0], 1e-12)


@pytest.mark.parametrize(
    "use_reentrant, expert, pair",
    spread([True, False], ["ffn", mlp, dropping], ALL_PAIRS, every=3),
    ids=named,
)
def test_checkpointing_a_layer_that_reuses_memory_changes_no_gradient(
    pair: Restore, expert: Any, use_reentrant: bool
) -> None:
    layer = build(expert=expert, memory_reuse=pair, pipeline=2)
    expected = step(layer)
    layer.zero_grad(set_to_none=True)
    x = tokens().requires_grad_()
    torch.manual_seed(1)
    y, l_aux = checkpoint(lambda x: (layer(x), layer.l_aux), x, use_reentrant=use_reentrant)
    loss_of(layer, y, l_aux).backward()
    assert torch.equal(x.grad, expected["x"])
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
@pytest.mark.parametrize("expert", ["ffn", mlp])
def test_copies_reuse_memory_as_their_original(expert: Any, pair: Restore) -> None:
    layer = build(expert=expert, memory_reuse=pair, pipeline=2)
    expected = step(layer)
    layer(tokens())  # l_aux is attached to a graph
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.restore == pair
        assert_same(step(twin), expected)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("expert", ["ffn", "swiglu", mlp, changing])
@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_without_gradients_the_output_is_the_same_and_nothing_is_offloaded(
    pair: Restore, expert: Any, mode: Callable[[], Any]
) -> None:
    plain, layer = build(expert=expert), build(expert=expert, memory_reuse=pair, pipeline=3).eval()
    host = pmoe.pool().host
    before = host.bytes_in_use
    with mode():
        y = layer(tokens())
        assert host.bytes_in_use == before
        torch.testing.assert_close(y, plain(tokens()), rtol=1e-12, atol=1e-14)
    assert not y.requires_grad


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reuse", ["S1", "S4", Restore("keep", "recompute")], ids=str)
def test_a_compiled_model_has_no_graph_break(reuse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmoe.MoELayer, "forward", capture._eager)  # a pmoe backend would look into it first
    torch._dynamo.reset()
    model = Flat(memory_reuse=reuse, pipeline=2)  # of two layers
    x = tokens(dtype=torch.float32)
    explained = torch._dynamo.explain(model)(x)
    assert len(explained.break_reasons) == explained.graph_break_count == 0, explained
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    found = []
    for run in (model, compiled):
        model.zero_grad()
        run(x).sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("expert", ["ffn", mlp])
@pytest.mark.parametrize("frozen", ["x", "gate", "experts"])
@pytest.mark.parametrize("reuse", ["S1", "S2", "S3", "S4"])
def test_what_is_frozen_has_no_gradient_and_the_rest_is_unchanged(
    reuse: str, frozen: str, expert: Any
) -> None:
    layer = build(memory_reuse=reuse, pipeline=2, expert=expert)
    expected = step(layer)
    layer.zero_grad(set_to_none=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen + "."))
    x = tokens().requires_grad_(frozen != "x")
    loss_of(layer, layer(x)).backward()
    for name, value in [("x", x), *layer.named_parameters()]:
        if name.startswith(frozen):
            assert value.grad is None, name
        else:
            assert torch.equal(value.grad, expected[name]), name


# ---- restored tensors


@pytest.mark.sampled(8)
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_a_restored_tensor_is_bit_identical_to_the_one_of_forward(pair: Restore, expert: str) -> None:
    for n, n_backward in [(1, 1), (2, 2), (5, 5), (4, 2), (2, 4), (1, 3)]:
        dtype = torch.float32 if n == n_backward else torch.float64
        options = {"pipeline": n, "pipeline_backward": n_backward, "dtype": dtype, "bias": True}
        layer = build(expert=expert, memory_reuse=pair, **options)
        seen = Seen(layer)
        loss_of(layer, layer(tokens(23, dtype=dtype))).backward()
        assert len(seen.forward) == n
        seen.assert_restored(n == n_backward)


# ---- limits of received rows


@pytest.mark.parametrize(
    "options, is_limited",
    [
        ({}, False),
        ({"memory_reuse": "S4"}, False),
        ({"memory_reuse": "S4", "bypass_local": False}, True),
        ({"memory_reuse": "S1"}, True),
    ],
    ids=str,
)
def test_one_rank_limits_rows_only_if_it_sends_or_offloads_them(
    options: dict[str, Any], is_limited: bool
) -> None:
    layer = build(pipeline=2, **options)
    layer(tokens())
    assert layer.row_counts is not None
    assert layer.row_counts.depth == ({2: 0} if is_limited else {})
    assert layer.ran is not None and layer.ran.forward == 2


@pytest.mark.parametrize("pair", [STRATEGIES["S1"], STRATEGIES["S4"], Restore("keep", "keep")], ids=str)
def test_calls_that_alternate_have_the_bits_of_calls_in_which_no_layout_is_kept(pair: Restore) -> None:
    """A schedule keeps where its slots lie. Batches, dtypes and gradient modes use it in turn."""

    def steps(*, keeps_layouts: bool) -> list[Tensor]:
        results: list[Tensor] = []
        layers = [
            build(pipeline=3, memory_reuse=pair, dtype=dtype) for dtype in (torch.float32, torch.float64)
        ]
        for count, layer in itertools.product((9, 4, 0, 9), layers):
            if not keeps_layouts:
                rotating_forward.cache_clear()
                rotating_backward.cache_clear()
            dtype = layer.gate.weight.dtype
            x = tokens(count).to(dtype).requires_grad_()
            with torch.no_grad():
                results.append(layer(x))
            y = layer(x)
            y.sum().backward()
            results += [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
            layer.zero_grad(set_to_none=True)
        return results

    kept = steps(keeps_layouts=True)
    for got, expected in zip(kept, steps(keeps_layouts=False), strict=True):
        assert torch.equal(got, expected)
