"""Memory reuse on one rank: users' modules, what lives between the passes, restored tensors, host memory,
and the schedules as literal tables."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer, Restore, warn
from pmoe.comm.counts import Slots, slot_rows
from pmoe.engine.host_pool import HostMemoryError, HostPool
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES
from pmoe.schedule.rings import rotating_backward, rotating_forward
from pmoe.schedule.slots import ALIGNMENT
from pmoe.schedule.tasks import Schedule, Stages, link
from tests.own_experts import EXPERTS, Counting, changing, dropping, mlp
from tests.reference import relative_error
from tests.seen import Seen
from tests.spread import named, spread
from tests.unit.test_layer import Flat

D_MODEL, D_HIDDEN, NUM_EXPERTS, TOKENS, TOP_K, AUX = 6, 10, 4, 11, 2, 0.37
KEEPING = [pair for pair in ALL_PAIRS if pair.hidden != "recompute"]
REPEATING = [pair for pair in ALL_PAIRS if pair.hidden == "recompute"]


def build(**options: Any) -> MoELayer:
    torch.manual_seed(7)
    options = {"top_k": TOP_K, "dtype": torch.float64, **options}
    layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, **options)
    with torch.no_grad():
        layer.gate.weight *= 3
    return layer


def tokens(count: int = TOKENS, seed: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, D_MODEL, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(layer: MoELayer, x: Tensor, seed: int = 4) -> Tensor:
    y = layer(x)
    return (y * tokens(x.shape[0], seed).to(y.dtype)).sum() + AUX * layer.l_aux


def gradients(layer: MoELayer, x: Tensor | None = None, context: Any = None) -> dict[str, Tensor]:
    """y, every gradient, every buffer, and the next random number, after one forward and backward."""
    layer.zero_grad(set_to_none=True)
    x = (tokens() if x is None else x).detach().clone().requires_grad_()
    torch.manual_seed(1)
    with nullcontext() if context is None else context:
        y = layer(x)
    l_aux = layer.l_aux
    between = torch.get_rng_state()
    ((y * tokens(x.shape[0], 4).to(y.dtype)).sum() + AUX * l_aux).backward()
    assert torch.equal(torch.get_rng_state(), between)  # a backward draws nothing
    found = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    random_number = torch.rand(1, dtype=torch.float64)
    return {"y": y.detach(), "x": x.grad, **found, **dict(layer.named_buffers()), "random": random_number}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-12) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert relative_error(got[name].double(), value.double()) <= limit, name


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are slower on several, by far where a machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def host() -> Iterator[HostPool]:
    """The host pool, whose limit a test may set, and no warning given yet."""
    pool = pmoe.pool().host
    limit, warned = pool.limit_bytes, set(warn.GIVEN)
    warn.GIVEN.clear()
    gc.collect()
    yield pool
    pool.limit_bytes = limit
    warn.GIVEN.update(warned)


# ---- users' modules -------------------------------------------------------------------------------

DEGREES = [(1, 1), (2, 2), (2, 1), (3, 3), (3, 1)]


@pytest.mark.parametrize("name, pair", spread(list(EXPERTS), ALL_PAIRS, every=2), ids=named)
def test_ones_own_experts_have_the_same_gradients_with_reuse(pair: Restore, name: str) -> None:
    """And buffers, and random numbers: what is recomputed leaves no trace."""
    for n, n_backward in DEGREES:
        random_recompute = name == "dropout" and n != n_backward
        if pair.hidden == "recompute" and (name == "in place" or random_recompute):
            continue  # refused
        options = {"expert": EXPERTS[name], "pipeline": n, "pipeline_backward": n_backward}
        expected = gradients(build(**options))
        assert_same(gradients(build(**options, memory_reuse=pair)), expected)


@pytest.mark.parametrize("pair", REPEATING, ids=str)
@pytest.mark.parametrize("name", ["mlp", "norm at the end", "identity"])
def test_recomputed_modules_may_have_more_chunks_in_backward(name: str, pair: Restore) -> None:
    expected = gradients(build(expert=EXPERTS[name]))
    for n, n_backward in [(1, 2), (1, 3), (2, 4)]:
        options = {"pipeline": n, "pipeline_backward": n_backward, "memory_reuse": pair}
        assert_same(gradients(build(expert=EXPERTS[name], **options)), expected)


@pytest.mark.parametrize("n, n_backward, pair", spread(DEGREES, ALL_PAIRS, every=2), ids=named)
def test_modules_under_autocast_are_recomputed_under_it(n: int, n_backward: int, pair: Restore) -> None:
    options = {"expert": mlp, "dtype": torch.float32, "pipeline": n, "pipeline_backward": n_backward}
    found = [
        gradients(
            build(memory_reuse=reuse, **options),
            tokens(dtype=torch.float32),
            torch.autocast("cpu", dtype=torch.bfloat16),
        )
        for reuse in (False, pair)
    ]
    assert found[1]["y"].dtype == torch.bfloat16
    # n_backward chunks of bfloat16 rows are summed in other orders.
    assert_same(found[1], found[0], 0.0 if n == n_backward or pair.hidden != "recompute" else 0.02)


@pytest.mark.parametrize("pair", REPEATING, ids=str)
def test_random_experts_are_recomputed_only_in_forwards_chunks(pair: Restore) -> None:
    layer = build(expert=dropping, memory_reuse=pair, pipeline=4, pipeline_backward=2)
    with pytest.raises(RuntimeError, match=r"draws random numbers: .* forward's chunks \(4\), not 2"):
        layer(tokens())
    layer.eval()(tokens())  # nothing is drawn
    with torch.no_grad():
        layer.train()(tokens())  # nothing will be recomputed


@pytest.mark.parametrize("pair", REPEATING, ids=str)
def test_experts_that_change_their_input_are_not_recomputed(pair: Restore) -> None:
    layer = build(expert=changing, memory_reuse=pair, pipeline=2)
    with pytest.raises(RuntimeError, match="changes its input in place: its hidden cannot be recomputed"):
        layer(tokens())
    with torch.no_grad():
        layer(tokens())


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_a_saved_graph_cannot_be_split_but_a_recomputed_one_can(pair: Restore) -> None:
    options = {"expert": mlp, "memory_reuse": pair, "pipeline": 2, "pipeline_backward": 4}
    if pair.hidden == "recompute":
        assert_same(gradients(build(**options)), gradients(build(expert=mlp)))
        return
    with pytest.raises(ValueError, match=r"pipeline_backward \(4\) must be at most pipeline \(2\) where"):
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


# ---- what lives between the passes ----------------------------------------------------------------


def saved_by(layer: MoELayer, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and what the layer's experts and gate save for backward, parameters apart."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # an output would hold its own graph
        if not isinstance(tensor, nn.Parameter):
            saved.append(kept)
        return kept

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    return y, saved


def rows_saved(saved: list[Tensor], width: int, x: Tensor) -> list[Tensor]:
    """All saved tensors of that width, x apart."""
    found = [tensor for tensor in saved if tensor.dim() == 2 and tensor.shape[1] == width]
    return [tensor for tensor in found if tensor.data_ptr() != x.data_ptr()]


def num_rows(tensors: list[Tensor]) -> int:
    return sum(tensor.shape[0] for tensor in tensors)


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
        loss = loss_of(layer, x)
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
    expected = [gradients(layer, x) for x in xs]
    for order in itertools.permutations(range(3)):
        leaves = [x.clone().requires_grad_() for x in xs]
        losses = [loss_of(layer, x) for x in leaves]
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
            (loss_of(layer, layer(x)) + AUX * layer.l_aux).backward()
        found.append({name: p.grad for name, p in layer.named_parameters()})
    assert_same(found[1], found[0])


@pytest.mark.parametrize(
    "use_reentrant, expert, pair",
    spread([True, False], ["ffn", mlp, dropping], ALL_PAIRS, every=3),
    ids=named,
)
def test_checkpointing_a_layer_that_reuses_memory_changes_no_gradient(
    pair: Restore, expert: Any, use_reentrant: bool
) -> None:
    layer = build(expert=expert, memory_reuse=pair, pipeline=2)
    expected = gradients(layer)
    layer.zero_grad(set_to_none=True)
    x = tokens().requires_grad_()
    torch.manual_seed(1)
    y, l_aux = checkpoint(lambda x: (layer(x), layer.l_aux), x, use_reentrant=use_reentrant)
    ((y * tokens(seed=4)).sum() + AUX * l_aux).backward()
    assert torch.equal(x.grad, expected["x"])
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
@pytest.mark.parametrize("expert", ["ffn", mlp])
def test_copies_reuse_memory_as_their_original(expert: Any, pair: Restore) -> None:
    layer = build(expert=expert, memory_reuse=pair, pipeline=2)
    expected = gradients(layer)
    layer(tokens())  # l_aux is attached to a graph
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.restore == pair
        assert_same(gradients(twin), expected, 0.0)


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


@pytest.mark.parametrize("reuse", ["S1", "S4", Restore("keep", "recompute")], ids=str)
def test_a_compiled_model_still_has_one_graph_break_a_layer(reuse: Any) -> None:
    torch._dynamo.reset()
    model = Flat(memory_reuse=reuse, pipeline=2)  # of two layers
    x = tokens(dtype=torch.float32)
    explained = torch._dynamo.explain(model)(x)
    assert len(explained.break_reasons) == explained.graph_break_count == 2, explained
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
    expected = gradients(layer)
    layer.zero_grad(set_to_none=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen + "."))
    x = tokens().requires_grad_(frozen != "x")
    loss_of(layer, x).backward()
    for name, value in [("x", x), *layer.named_parameters()]:
        if name.startswith(frozen):
            assert value.grad is None, name
        else:
            assert torch.equal(value.grad, expected[name]), name


# ---- restored tensors -----------------------------------------------------------------------------


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_a_restored_tensor_is_bit_identical_to_the_one_of_forward(pair: Restore, expert: str) -> None:
    for n, n_backward in [(1, 1), (2, 2), (5, 5), (4, 2), (2, 4), (1, 3)]:
        dtype = torch.float32 if n == n_backward else torch.float64
        options = {"pipeline": n, "pipeline_backward": n_backward, "dtype": dtype, "bias": True}
        layer = build(expert=expert, memory_reuse=pair, **options)
        seen = Seen(layer)
        loss_of(layer, tokens(23, dtype=dtype)).backward()
        assert len(seen.forward) == n
        seen.assert_restored(n == n_backward)


# ---- too little host memory -----------------------------------------------------------------------


def row_bytes(columns: int, rows: int = TOKENS * TOP_K) -> int:
    return rows * columns * 8


@pytest.mark.parametrize("pair", [pair for pair in ALL_PAIRS if pair.offloads], ids=str)
def test_a_layer_that_offloads_is_not_built_with_no_host_memory_left(pair: Restore, host: HostPool) -> None:
    host.limit_bytes = 0
    with pytest.raises(
        ValueError, match=rf"memory_reuse \({pair}\) must not offload .*: 0 of 0 bytes are left"
    ):
        build(memory_reuse=pair)
    build(memory_reuse="S4")
    build(memory_reuse=True)


@pytest.mark.parametrize(
    "expert, pair",
    spread(["ffn", mlp, dropping, changing], [pair for pair in ALL_PAIRS if pair.offloads], every=2),
    ids=named,
)
def test_with_little_host_memory_gradients_stay_right_and_one_warning_a_tensor_is_given(
    pair: Restore, expert: Any, host: HostPool
) -> None:
    if pair.hidden == "recompute" and expert is changing:
        return  # refused
    for n, n_backward in [(1, 1), (3, 3), (4, 2)]:
        if pair.hidden == "recompute" and expert is dropping and n != n_backward:
            continue
        options = {"expert": expert, "pipeline": n, "pipeline_backward": n_backward}
        expected = gradients(build(**options))
        for limit in (ALIGNMENT, 1500, 3000, 5000, 10**9):
            warn.GIVEN.clear()
            layer = build(memory_reuse=pair, **options)
            host.limit_bytes = limit
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got = gradients(layer)
                again = gradients(layer)
            host.limit_bytes = 10**9
            messages = [str(each.message) for each in caught]
            assert len(messages) <= (pair.dispatched == "offload") + (pair.hidden == "offload")
            assert messages or limit > ALIGNMENT
            assert not messages or limit < 10**9, messages
            assert_same(got, expected)
            assert_same(again, expected)


def test_rows_that_find_no_host_memory_are_sent_again(host: HostPool) -> None:
    layer = build(memory_reuse="S3", pipeline=2)
    host.limit_bytes = row_bytes(D_MODEL) - 1
    with pytest.warns(UserWarning, match="too little host memory is left on some rank to offload T_DI"):
        y, saved = saved_by(layer, x := tokens())
    assert rows_saved(saved, D_MODEL, x) == []
    assert host.bytes_in_use == 0
    del y


def test_hidden_that_finds_no_host_memory_is_recomputed(host: HostPool) -> None:
    layer = build(memory_reuse=Restore("keep", "offload"), pipeline=2)
    host.limit_bytes = row_bytes(D_HIDDEN) // 2 + 2 * ALIGNMENT
    with pytest.warns(UserWarning, match="host memory for offloading: .* T_M is recomputed"):
        y, saved = saved_by(layer, x := tokens())
    assert 0 < num_rows(rows_saved(saved, D_HIDDEN, x)) < TOKENS * TOP_K
    del y


def test_hidden_leaves_the_host_memory_that_rows_will_need(host: HostPool) -> None:
    """T_DI of later chunks would stay on the device otherwise, beyond what a slot holds."""
    layer = build(memory_reuse="S1", pipeline=4, expert="swiglu")
    host.limit_bytes = row_bytes(D_MODEL) + 8 * ALIGNMENT
    with pytest.warns(UserWarning, match="T_M is recomputed"):
        y, saved = saved_by(layer, x := tokens())
    assert host.bytes_in_use >= row_bytes(D_MODEL)
    addresses = [(segment.__array_interface__["data"][0], segment.nbytes) for segment in host._segments]
    rows = rows_saved(saved, D_MODEL, x)
    assert num_rows(rows) == TOKENS * TOP_K
    assert all(any(a <= t.data_ptr() < a + size for a, size in addresses) for t in rows)
    del y


def test_a_pass_without_gradients_warns_of_no_host_memory(host: HostPool) -> None:
    layer = build(memory_reuse="S1")
    host.limit_bytes = 0
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        layer(tokens())


# ---- the host pool --------------------------------------------------------------------------------


def new_pool(limit_bytes: int) -> HostPool:
    pool = HostPool(torch.device("cpu"))
    pool.limit_bytes = limit_bytes
    return pool


def take(pool: HostPool, size: int) -> Tensor:
    return pool.take((size,), torch.uint8)


def test_host_memory_is_first_fit_and_neighbours_are_joined() -> None:
    pool = new_pool(10 * ALIGNMENT)
    blocks = [take(pool, 2 * ALIGNMENT) for _ in range(5)]
    base = blocks[0].data_ptr()
    assert [block.data_ptr() - base for block in blocks] == [2 * i * ALIGNMENT for i in range(5)]
    assert (pool.bytes_in_use, pool.free_bytes, pool.peak_bytes) == (10 * ALIGNMENT, 0, 10 * ALIGNMENT)
    blocks[1] = blocks[3] = None
    with pytest.raises(
        HostMemoryError, match=f"no piece of {3 * ALIGNMENT} bytes is left of {10 * ALIGNMENT}"
    ):
        take(pool, 3 * ALIGNMENT)
    blocks[2] = None  # joins both neighbours
    blocks[1] = take(pool, 5 * ALIGNMENT)
    assert blocks[1].data_ptr() - base == 2 * ALIGNMENT
    assert (pool.bytes_in_use, pool.peak_bytes) == (9 * ALIGNMENT, 10 * ALIGNMENT)
    blocks[2] = take(pool, 1)
    assert blocks[2].data_ptr() - base == 7 * ALIGNMENT


def test_host_memory_has_a_limit_and_says_the_numbers() -> None:
    pool = new_pool(1000)
    with pytest.raises(
        HostMemoryError, match="host memory for offloading: 1001 bytes wanted, 1000 of 1000 left"
    ):
        take(pool, 1001)
    held = take(pool, 700)  # in whole steps of the alignment
    assert pool.bytes_in_use == 3 * ALIGNMENT
    with pytest.raises(HostMemoryError, match=f"300 bytes wanted, {1000 - 3 * ALIGNMENT} of 1000 left"):
        take(pool, 300)
    pool.limit_bytes = 100  # below what is in use
    assert pool.free_bytes == 0
    del held
    assert pool.free_bytes == 100


def test_a_limit_that_is_raised_lets_the_pool_grow() -> None:
    pool = new_pool(2 * ALIGNMENT)
    small = take(pool, 2 * ALIGNMENT)
    pool.limit_bytes = 1 << 20
    large = take(pool, 1 << 19)
    assert pool.bytes_in_use == (1 << 19) + 2 * ALIGNMENT
    assert small.data_ptr() + small.nbytes <= large.data_ptr() or large.data_ptr() < small.data_ptr()
    del large
    assert take(pool, (1 << 20) - 2 * ALIGNMENT).nbytes == (1 << 20) - 2 * ALIGNMENT


@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_never_grows_beyond_its_limit(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = new_pool(8 * ALIGNMENT)
    if pinned:
        pool._pinned = True
        empty = torch.empty
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **kw: empty(*args, **kw))
    blocks = [take(pool, 2 * ALIGNMENT) for _ in range(4)]
    del blocks[::2]
    for size in (1, 2):
        with pytest.raises(HostMemoryError, match="no piece of"):
            take(pool, (2 + size) * ALIGNMENT)
    assert sum(segment.nbytes for segment in pool._segments) <= 8 * ALIGNMENT
    del blocks
    assert take(pool, 8 * ALIGNMENT).nbytes == 8 * ALIGNMENT
    assert sum(segment.nbytes for segment in pool._segments) <= 8 * ALIGNMENT


def test_nothing_takes_no_host_memory() -> None:
    pool = new_pool(0)
    assert pool.take((0, 6), torch.float64).shape == (0, 6)
    assert pool.bytes_in_use == 0


def test_host_memory_comes_back_with_the_last_reader_also_out_of_a_cycle() -> None:
    pool = new_pool(4 * ALIGNMENT)
    tensor = pool.take((4, 8), torch.float64)
    assert tensor.dtype == torch.float64
    assert tensor.shape == (4, 8)
    row = tensor[1]
    del tensor
    assert pool.bytes_in_use == ALIGNMENT
    del row
    assert pool.bytes_in_use == 0
    cycle: list[Any] = [take(pool, 1)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.bytes_in_use == 0


def test_many_random_takes_never_overlap_and_all_come_back() -> None:
    pool, draw = new_pool(1 << 16), random.Random(5)
    live: list[tuple[int, Tensor]] = []
    refused = 0
    for number in range(3000):
        if live and draw.random() < 0.45:
            value, block = live.pop(draw.randrange(len(live)))
            assert (block == value).all()
            del block
        else:
            try:
                block = take(pool, draw.choice([1, 255, 256, 257, 3000, 9000]))
            except HostMemoryError:
                refused += 1
                continue
            live.append((number % 251, block.fill_(number % 251)))
            del block
        assert pool.bytes_in_use == sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for _, b in live)
        assert pool.bytes_in_use <= pool.peak_bytes <= pool.limit_bytes
    assert refused > 10
    assert all((block == value).all() for value, block in live)
    live.clear()
    assert pool.bytes_in_use == 0
    assert take(pool, 1 << 16).nbytes == 1 << 16  # in one piece again


# ---- slots and chunks -----------------------------------------------------------------------------


def test_the_depth_that_a_rank_asks_for_is_the_least_that_its_slots_allow() -> None:
    generator = torch.Generator().manual_seed(0)
    for slack, top_k, n, world in itertools.product((1, 1.1, 1.25, 2.0), (1, 3), (1, 2, 3), (1, 4)):
        bins = n * 16
        counts = torch.randint(0, 40, (bins, world, 2), generator=generator)
        counts *= torch.rand(bins, world, 1, generator=generator) < 0.4
        max_tokens = int(counts.sum((0, 2)).max()) // top_k
        for own in (None, 0):
            by_bin = counts.sum(2)
            received = by_bin.sum(1) - (0 if own is None else by_bin[:, own])
            depth, m, limit = 0, n, slot_rows(slack, top_k, max_tokens, n)
            while m < bins and received.view(m, -1).sum(1).max() > limit:
                depth, m = depth + 1, m * 2
            slots = Slots(slack=slack, top_k=top_k, degrees=(n,), own_rank=own)
            (found,) = slots.depths(counts, torch.tensor(max_tokens))
            assert int(found) == depth, (slack, top_k, n, world, own)


def test_the_limit_of_a_slot_is_the_same_number_on_the_device_as_on_the_host() -> None:
    """One row more than the limit is one too many, whatever float the product rounds in."""
    for slack, top_k, max_tokens, n in itertools.product(
        (1.1, 1.15, 1.3, 1.7), (1, 2, 3), (1000, 4097, 30_000_001), (1, 2, 4, 5)
    ):
        limit = slot_rows(slack, top_k, max_tokens, n)
        slots = Slots(slack=slack, top_k=top_k, degrees=(n,), own_rank=None)
        for rows, deeper in ((limit, 0), (limit + 1, 1)):
            counts = torch.zeros(2 * n, 1, 1, dtype=torch.int64)
            counts[0] = rows
            (depth,) = slots.depths(counts, torch.tensor(max_tokens))
            assert int(depth) == deeper, (slack, top_k, max_tokens, n, rows)


ROWS = {
    "local": {"local": True, "remote": False},
    "remote": {"local": False, "remote": True},
    "both": {"local": True, "remote": True},
    "sharded": {"local": False, "remote": True, "sharded": True, "shared": True, "gradients": True},
    "hooked": {"local": False, "remote": True, "sharded": True, "hooked": True},
}


def every_schedule() -> Iterator[tuple[str, Schedule, Restore | None]]:
    for n, rows in itertools.product(range(1, 6), ROWS.values()):
        for pair in (None, *ALL_PAIRS):
            yield f"forward {n} {rows} {pair}", rotating_forward(n, Stages(**rows), restore=pair), pair
        for pair, other in itertools.product(ALL_PAIRS, (False, True)):
            name = f"backward {n} {rows} {pair} {other}"
            yield name, rotating_backward(n, Stages(**rows), restore=pair, rearranged=other), pair


def test_every_read_of_a_slot_sees_its_own_write_and_awaits_it() -> None:
    """And every write awaits the readers of what it writes over: directly, or through others."""
    for name, schedule, _ in every_schedule():
        assert link(schedule.tasks, schedule.slots) == schedule.tasks
        before: dict[str, set[str]] = {}
        holds: dict[str, tuple[str, str]] = {}  # slot -> buffer, writer
        readers: dict[str, list[str]] = {}
        for task in schedule.tasks:
            behind = before[task.name] = set(task.waits).union(*(before[each] for each in task.waits))
            for buffer in task.reads:
                slot = schedule.slots.get(buffer)
                if slot is not None:
                    assert holds[slot][0] == buffer, (name, task.name, buffer)
                    assert holds[slot][1] in behind, (name, task.name, buffer)
                    readers[slot].append(task.name)
            for buffer in task.writes:
                slot = schedule.slots.get(buffer)
                if slot is not None:
                    assert set(readers.get(slot, ())) - {task.name} <= behind, (name, task.name, buffer)
                    assert slot not in holds or holds[slot][1] in behind
                    holds[slot], readers[slot] = (buffer, task.name), []


def test_every_read_that_no_task_wrote_is_an_input_or_was_left_by_forward() -> None:
    """What backward reads beside its slots: gradients, T_I, weights, and what the pair keeps."""
    for name, schedule, pair in every_schedule():
        written: set[str] = set()
        found: set[str] = set()
        for task in schedule.tasks:
            found |= {buffer.rpartition(".")[0] or buffer for buffer in task.reads if buffer not in written}
            written |= set(task.writes)
        allowed = {"T_I", "T_I_L", "weight"} if name.startswith("forward") else {"dT_O", "dT_O_L", "dw"}
        if not name.startswith("forward"):
            assert pair is not None
            if pair.dispatched == "communicate":
                allowed |= {"T_I"}
            for tensor, fate in (("T_DI", pair.dispatched), ("T_M", pair.hidden)):
                if fate == "keep":
                    allowed |= {tensor, f"{tensor}_L", f"{tensor}_sorted"}
                if fate == "offload":
                    allowed |= {f"host_{tensor}", f"host_{tensor}_L"}
        assert found <= allowed, (name, found - allowed)


def slots_of(schedule: Schedule, ring: str) -> list[str]:
    """The slots of a ring, in the order of the tasks that write its buffers."""
    order = [buffer for task in schedule.tasks for buffer in task.writes if buffer in schedule.slots]
    slots = [schedule.slots[buffer] for buffer in dict.fromkeys(order)]
    return [slot for slot in slots if slot.partition("[")[0] == ring]


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_received_rows_and_results_rotate_through_two_slots_and_hidden_through_one_or_two(
    pair: Restore,
) -> None:
    for n, rows in itertools.product(range(2, 7), ("remote", "both")):
        forward = rotating_forward(n, Stages(**ROWS[rows]), restore=pair)
        backward = rotating_backward(n, Stages(**ROWS[rows]), restore=pair)
        alternating = [i % 2 for i in range(n)]
        for schedule, ring in ((forward, "T_DI"), (forward, "T_DO"), (forward, "send"), (backward, "dT_DO")):
            assert slots_of(schedule, ring) == [f"{ring}[{i}]" for i in alternating]
        assert slots_of(backward, "dT_DI") == [f"dT_DI[{i}]" for i in alternating]
        if pair.dispatched != "keep":
            assert slots_of(backward, "T_DI") == [f"T_DI[{i}]" for i in alternating]
        units = n * (2 if rows == "both" else 1)
        used = {"keep": [], "recompute": [0] * units, "offload": alternating}[pair.hidden]
        stay = n if rows == "both" and pair.hidden == "offload" else 0
        for schedule in (forward, backward):
            assert slots_of(schedule, "T_M") == [f"T_M[{i}]" for i in used]
            assert slots_of(schedule, "T_M_L") == ["T_M_L[0]"] * stay
        for ring, count in Counter(slot.partition("[")[0] for slot in set(backward.slots.values())).items():
            assert count <= 2, ring


TABLES = {
    ("S1", "forward", "both"): """
        G0   | compute     |
        S0   | communicate | G0
        P    | communicate |
        G1   | compute     |
        S1   | communicate | G1
        L0   | compute     |
        LDI0 | copy out    | L0
        LDM0 | copy out    | L0
        C0   | compute     | S0 P L0
        DI0  | copy out    | S0 C0
        DM0  | copy out    | C0
        R0   | communicate | C0
        G2   | compute     | G0 S0
        S2   | communicate | G2 S0 C0 DI0
        L1   | compute     | L0 C0 LDM0
        LDI1 | copy out    | L1
        LDM1 | copy out    | L1
        C1   | compute     | S1 P L1 C0
        DI1  | copy out    | S1 C1
        DM1  | copy out    | C1
        R1   | communicate | C1
        O0   | compute     | L0 R0
        C2   | compute     | S2 P C0 C1 DI0 DM0 R0
        DI2  | copy out    | S2 C2
        DM2  | copy out    | C2
        R2   | communicate | C2 R0 O0
        O1   | compute     | L1 R1
        L2   | compute     | L0 L1 C2 LDI0 LDM1 O0
        LDI2 | copy out    | L2
        LDM2 | copy out    | L2
        O2   | compute     | L2 R2
    """,
    ("S1", "forward", "local"): """
        L0   | compute  |
        LDI0 | copy out | L0
        LDM0 | copy out | L0
        O0   | compute  | L0
        L1   | compute  | L0 O0
        LDI1 | copy out | L1
        LDM1 | copy out | L1
        O1   | compute  | L1
        L2   | compute  | L0 L1 LDI0 LDM0 O1
        LDI2 | copy out | L2
        LDM2 | copy out | L2
        O2   | compute  | L2
    """,
    ("S1", "backward", "both"): """
        G2   | compute     |
        S2   | communicate | G2
        G1   | compute     |
        S1   | communicate | G1
        LHI2 | copy in     |
        LHM2 | copy in     |
        HI2  | copy in     |
        HM2  | copy in     |
        L2   | compute     | LHI2 LHM2
        LW2  | compute     | LHI2 L2
        LHI1 | copy in     |
        LHM1 | copy in     | L2 LW2
        C2   | compute     | S2 HI2 HM2 L2 LW2
        R2   | communicate | C2
        W2   | compute     | HI2 C2 S2 LW2
        G0   | compute     | G2 S2
        S0   | communicate | G0 S2 C2 W2
        HI1  | copy in     |
        HM1  | copy in     |
        L1   | compute     | LHI1 LHM1 C2 L2 W2 LW2
        LW1  | compute     | LHI1 L1 W2
        HI0  | copy in     | HI2 C2 W2
        HM0  | copy in     | C2 W2
        C1   | compute     | S1 HI1 HM1 L1 C2 LW1 W2
        R1   | communicate | C1
        W1   | compute     | HI1 C1 S1 LW1
        O2   | compute     | L2 R2
        LHI0 | copy in     | LHI2 L2 LW2
        LHM0 | copy in     | L1 LW1
        C0   | compute     | S0 HI0 HM0 C1 C2 W1 R2
        R0   | communicate | C0 R2 O2
        W0   | compute     | HI0 C0 S0 W1
        O1   | compute     | L1 R1
        P    | communicate | C2 C1 C0
        L0   | compute     | LHI0 LHM0 C0 L1 L2 W0 LW1 O2
        LW0  | compute     | LHI0 L0 W0
        O0   | compute     | L0 R0
    """,
    ("S1", "backward", "local"): """
        LHI2 | copy in |
        LHM2 | copy in |
        LHI1 | copy in |
        LHM1 | copy in |
        L2   | compute | LHI2 LHM2
        LW2  | compute | LHI2 L2
        O2   | compute | L2
        LHI0 | copy in | LHI2 L2 LW2
        LHM0 | copy in | L2 LW2
        L1   | compute | LHI1 LHM1 L2 LW2 O2
        LW1  | compute | LHI1 L1 LW2
        O1   | compute | L1
        L0   | compute | LHI0 LHM0 L1 LW1 O1
        LW0  | compute | LHI0 L0 LW1
        O0   | compute | L0
    """,
    ("S4", "forward", "both"): """
        G0 | compute     |
        S0 | communicate | G0
        P  | communicate |
        G1 | compute     |
        S1 | communicate | G1
        L0 | compute     |
        C0 | compute     | S0 P L0
        R0 | communicate | C0
        G2 | compute     | G0 S0
        S2 | communicate | G2 S0 C0
        L1 | compute     | L0 C0
        C1 | compute     | S1 P C0 L1
        R1 | communicate | C1
        O0 | compute     | L0 R0
        C2 | compute     | S2 P C1 C0 R0
        R2 | communicate | C2 R0 O0
        O1 | compute     | L1 R1
        L2 | compute     | L1 C2 L0 O0
        O2 | compute     | L2 R2
    """,
    ("S4", "forward", "local"): """
        L0 | compute |
        O0 | compute | L0
        L1 | compute | L0 O0
        O1 | compute | L1
        L2 | compute | L1 O1
        O2 | compute | L2
    """,
    ("S4", "backward", "both"): """
        GI2 | compute     |
        SI2 | communicate | GI2
        G2  | compute     |
        S2  | communicate | G2
        GI1 | compute     |
        SI1 | communicate | GI1
        G1  | compute     |
        S1  | communicate | G1
        LM2 | compute     |
        L2  | compute     | LM2
        LW2 | compute     | LM2 L2
        M2  | compute     | SI2 L2 LW2
        C2  | compute     | S2 SI2 M2 L2 LW2
        R2  | communicate | C2
        W2  | compute     | SI2 M2 C2 S2 LW2
        GI0 | compute     | GI2 SI2
        SI0 | communicate | GI0 SI2 M2 C2 W2
        G0  | compute     | G2 S2
        S0  | communicate | G0 S2 C2 W2
        LM1 | compute     | LM2 C2 L2 LW2 W2
        L1  | compute     | LM1 C2 L2 W2 LW2
        LW1 | compute     | LM1 L1 W2
        M1  | compute     | SI1 M2 L1 C2 W2 LW1
        C1  | compute     | S1 SI1 M1 L1 C2 LW1 W2
        R1  | communicate | C1
        W1  | compute     | SI1 M1 C1 S1 LW1
        O2  | compute     | L2 R2
        M0  | compute     | SI0 M1 C1 W1
        C0  | compute     | S0 SI0 M0 C1 C2 W1 R2
        R0  | communicate | C0 R2 O2
        W0  | compute     | SI0 M0 C0 S0 W1
        O1  | compute     | L1 R1
        P   | communicate | C2 C1 C0
        LM0 | compute     | LM1 C0 L1 LW1 W0
        L0  | compute     | LM0 C0 L1 L2 W0 LW1 O2
        LW0 | compute     | LM0 L0 W0
        O0  | compute     | L0 R0
    """,
    ("S4", "backward", "local"): """
        LM2 | compute |
        L2  | compute | LM2
        LW2 | compute | LM2 L2
        O2  | compute | L2
        LM1 | compute | LM2 L2 LW2
        L1  | compute | LM1 L2 LW2 O2
        LW1 | compute | LM1 L1 LW2
        O1  | compute | L1
        LM0 | compute | LM1 L1 LW1
        L0  | compute | LM0 L1 LW1 O1
        LW0 | compute | LM0 L0 LW1
        O0  | compute | L0
    """,
}


def table(text: str) -> list[tuple[str, str, tuple[str, ...]]]:
    found = []
    for line in text.strip().splitlines():
        name, lane, waits = (part.strip() for part in line.split("|"))
        found.append((name, lane, tuple(waits.split())))
    return found


@pytest.mark.parametrize("strategy, direction, rows", TABLES)
def test_the_schedule_of_three_chunks_is_this_table(strategy: str, direction: str, rows: str) -> None:
    rotating = rotating_forward if direction == "forward" else rotating_backward
    schedule = rotating(3, Stages(**ROWS[rows]), restore=STRATEGIES[strategy])
    assert [(t.name, t.lane.value, t.waits) for t in schedule.tasks] == table(
        TABLES[strategy, direction, rows]
    )
