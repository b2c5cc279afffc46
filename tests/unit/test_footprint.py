"""The predicted bytes of a layer equal those that the allocator counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import pmoe
from pmoe.gates import GATES
from pmoe.planner.degree import DEGREES, SOLVER_DEGREES, Choice
from pmoe.planner.layer_sizes import CallRows, CopyNumbers, LayerSizes, sizes_from_options
from pmoe.planner.memory import predict
from pmoe.planner.priced_choices import bound
from pmoe.planner.rows_per_pass import PassRows, worst_rows
from pmoe.schedule.buffer_sizes import ChunkRows, HiddenColumns
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES
from tests.allocated import Allocated
from tests.spread import named, spread

TOKENS, D_MODEL, D_HIDDEN = 2048, 128, 512


def build(**options: Any) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(**{"d_model": D_MODEL, "d_hidden": D_HIDDEN, "num_experts": 4, **options})


def measured(
    layer: pmoe.MoELayer, tokens: int = TOKENS, arguments: tuple[torch.Tensor, ...] = (), loss: bool = False
) -> Allocated:
    """Returns the bytes of a step. x and dy exist before it, and y exists until its end.

    loss: whether l_aux is differentiated too.
    """
    dtype = layer.experts.w1.dtype
    x = torch.randn(tokens, layer.d_model, dtype=dtype, requires_grad=True)
    dy = torch.randn(tokens, layer.d_model, dtype=dtype)

    def step(mark: Callable[[], None]) -> torch.Tensor:
        y = layer(x, *arguments)
        mark()
        if loss and layer.l_aux.requires_grad:
            torch.autograd.backward([y, layer.l_aux], [dy, torch.ones(())])
        else:
            y.backward(dy)
        return y

    step(lambda: None)  # what is made only once is there
    x.grad = None
    layer.zero_grad(set_to_none=True)
    return Allocated(step)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pair, n", spread(ALL_PAIRS, [1, 2, 4, 8], every=3), ids=named)
def test_the_peak_of_a_step_is_within_two_percent_of_the_prediction(pair: pmoe.Restore, n: int) -> None:
    layer = build(pipeline=n, memory_reuse=pair)
    found = measured(layer)
    predicted = layer.predict_memory(TOKENS, layer.row_counts)
    assert not predicted.is_bound
    assert predicted.peak == pytest.approx(found.peak, rel=0.02)
    assert predicted.saved == pytest.approx(found.held, rel=0.02)
    bound = layer.predict_memory(TOKENS)
    assert bound.is_bound
    assert bound.peak >= found.peak


def test_a_block_of_an_earlier_measurement_that_dies_during_this_one_is_not_counted() -> None:
    kept: list[torch.Tensor] = []
    Allocated(lambda mark: kept.append(torch.empty(1000)))

    def step(mark: Callable[[], None]) -> torch.Tensor:
        kept.clear()
        y = torch.empty(10)
        mark()
        return y

    counted = Allocated(step)
    assert (counted.peak, counted.held, counted.left) == (40, 40, 40)


OTHERS: list[dict[str, Any]] = [
    {"expert": "swiglu"},
    {"top_k": 2, "bias": False},
    {"capacity_factor": 0.75},
    {"pipeline": 2, "pipeline_backward": 4},
    {"pipeline": 4, "pipeline_backward": 1},
    {"dtype": torch.float64},
    {"activation": "relu", "num_experts": 1},
]
CHEAPEST = [KEEP, *STRATEGIES.values()]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("pair, options", spread(CHEAPEST, OTHERS, every=3), ids=named)
def test_other_layers_are_predicted_as_well(pair: pmoe.Restore, options: dict[str, Any]) -> None:
    layer = build(**{"pipeline": 4, "memory_reuse": pair, **options})
    found = measured(layer)
    assert layer.predict_memory(TOKENS, layer.row_counts).peak == pytest.approx(found.peak, rel=0.02)
    assert layer.predict_memory(TOKENS).peak >= found.peak


NARROW: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16, "expert": "swiglu", "top_k": 2},
    {"dtype": torch.bfloat16, "d_hidden": 64, "top_k": 2, "pipeline": 2},
    {"dtype": torch.bfloat16, "num_experts": 1, "shared_expert": 96, "pipeline": 1},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair, options", spread(CHEAPEST, NARROW, every=3), ids=named)
def test_layers_of_narrow_types_are_predicted_as_well(pair: pmoe.Restore, options: dict[str, Any]) -> None:
    layer = build(**{"pipeline": 4, "memory_reuse": pair, **options})
    found = measured(layer)
    predicted = layer.predict_memory(TOKENS, layer.row_counts)
    assert found.peak <= predicted.peak <= 1.02 * found.peak


SHARED: list[dict[str, Any]] = [
    {"shared_expert": 1024, "d_hidden": 64, "pipeline": 4},
    {"shared_expert": 2048, "d_hidden": 16, "num_experts": 1},
    {"shared_expert": 512, "d_hidden": 128, "d_model": 256},
    {"shared_expert": 300, "d_hidden": 52, "d_model": 100},
    {"shared_expert": 16, "d_hidden": 16, "d_model": 256, "num_experts": 1},
    {"shared_expert": 1024, "d_hidden": 64, "expert": "swiglu", "dtype": torch.float16},
    {"shared_expert": 1024, "d_hidden": 1024, "d_model": 256, "expert": "swiglu"},
    {"shared_expert": 16, "d_hidden": 1024, "d_model": 256},
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [256, TOKENS])
@pytest.mark.parametrize("options", SHARED, ids=named)
def test_a_shared_expert_of_a_narrow_type_is_predicted_where_it_needs_the_most(
    options: dict[str, Any], tokens: int
) -> None:
    layer = build(**{"pipeline": 1, "dtype": torch.bfloat16, **options})
    found = measured(layer, tokens)
    predicted = layer.predict_memory(tokens, layer.row_counts)
    assert 0.98 * found.peak <= predicted.peak <= 1.02 * found.peak


def test_offloaded_bytes_are_the_hosts() -> None:
    for name, columns in (("S1", D_MODEL + D_HIDDEN), ("S2", D_HIDDEN), ("S3", D_MODEL), ("S4", 0)):
        layer = build(pipeline=4, memory_reuse=name)
        host = pmoe.pool().host
        before = host.bytes_in_use
        y = layer(torch.randn(TOKENS, D_MODEL, requires_grad=True))
        assert host.bytes_in_use - before == TOKENS * columns * 4
        assert layer.predict_memory(TOKENS, layer.row_counts).host == TOKENS * columns * 4
        del y


def test_communicate_keep_saves_no_more_than_the_input_and_the_hidden_of_swiglu() -> None:
    """SonicMoE's lower bound on one rank: the input, which the caller holds anyway, and T_M.

    In addition there are the output, indices, routing weights and gate probabilities.
    """
    top_k, num_experts, hidden = 2, 8, 256
    layer = build(
        d_hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        expert="swiglu",
        bias=False,
        pipeline=4,
        memory_reuse=pmoe.Restore("communicate", "keep"),
        dtype=torch.bfloat16,
    )
    found = measured(layer)
    slots = TOKENS * top_k
    output, floor = TOKENS * D_MODEL * 2, 4 * slots * hidden
    indices, weights, gate = 4 * slots * 8, 4 * slots * 4, 3 * TOKENS * num_experts * 4
    assert floor < found.held - output <= floor + indices + weights + gate


def test_a_module_of_the_paper_needs_less_than_half_of_keep_at_n_1() -> None:
    """Only activations and temporaries count, at H = 4M, as for MoE-GPT3-XL in bench/memory_pairs.py."""
    sizes = {"d_model": 128, "d_hidden": 512, "num_experts": 1, "bias": False}
    peaks = []
    for pair, n in ((KEEP, 1), (STRATEGIES["S4"], 8)):
        layer = build(**sizes, pipeline=n, memory_reuse=pair)
        gradients = sum(parameter.nbytes for parameter in layer.parameters())
        peaks.append(measured(layer, 8192).peak - gradients)
    assert peaks[1] < 0.45 * peaks[0]


@pytest.mark.parametrize(
    "options, ways",
    [
        ({"pipeline": True}, {(n, n, KEEP) for n in DEGREES}),
        ({"pipeline": 2, "memory_reuse": True}, {(2, 2, pair) for pair in STRATEGIES.values()}),
        (
            {"pipeline": True, "memory_reuse": True},
            {(n, n, pair) for n in DEGREES for pair in STRATEGIES.values()},
        ),
        ({"pipeline": "solve"}, {(n, n, KEEP) for n in SOLVER_DEGREES}),
        (
            {"pipeline": "solve", "memory_reuse": "S4"},
            {(n, m, STRATEGIES["S4"]) for n in SOLVER_DEGREES for m in SOLVER_DEGREES},
        ),
        (
            {"pipeline": 2, "memory_budget": "1GiB", "memory_reuse": True},
            {(2, 2, pair) for pair in ALL_PAIRS},
        ),
    ],
    ids=named,
)
def test_what_the_layer_chooses_later_is_predicted_for_every_choice(
    options: dict[str, Any], ways: set[tuple[int, int, pmoe.Restore]]
) -> None:
    layer = build(**options)
    found = layer.predict_memory(TOKENS)
    assert {(way.forward, way.backward, way.restore) for way in found.candidates} == ways
    assert found.peak == max(each.peak for each in found.candidates.values())
    for way, each in found.candidates.items():
        if way.forward == way.backward:
            reuse = way.restore if layer.options.rotates else False
            alone = build(pipeline=way.forward, memory_reuse=reuse).predict_memory(TOKENS)
            assert each.peak == alone.peak and not alone.candidates


def test_arguments_stand_for_what_the_layer_would_choose() -> None:
    given = build(pipeline=True, memory_reuse=True).predict_memory(TOKENS, pipeline=4, memory_reuse="S4")
    assert given.peak == build(pipeline=4, memory_reuse="S4").predict_memory(TOKENS).peak
    assert not given.candidates


# ---- layers of every kind


KINDS: list[dict[str, Any]] = [
    {"pipeline": 1},
    {"pipeline": 4},
    {"pipeline": 4, "top_k": 2},
    {"pipeline": 2, "expert": "swiglu", "capacity_factor": 0.5},
    {"pipeline": 4, "shared_expert": 512},
    {"pipeline": 4, "shared_expert": 512, "memory_reuse": "S4"},
    {"pipeline": 4, "capacity_factor": 1.0, "pad_to_capacity": True},
    {"pipeline": 4, "capacity_factor": 1.0, "pad_to_capacity": True, "top_k": 2, "memory_reuse": "S4"},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", KINDS, ids=named)
def test_layers_without_rings_with_a_shared_expert_or_padding_are_predicted_too(
    options: dict[str, Any],
) -> None:
    layer = build(**options)
    found = measured(layer)
    predicted = layer.predict_memory(TOKENS, layer.row_counts)
    assert predicted.peak == pytest.approx(found.peak, rel=0.02)
    assert layer.predict_memory(TOKENS).peak >= found.peak
    assert not predicted.unknown


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "gate, top_k", [(gate, k) for gate in GATES for k in (1, 2) if (gate, k) != ("switch", 2)]
)
def test_every_gate_is_predicted(gate: str, top_k: int) -> None:
    """There are so many experts that the gate's scores need as many bytes as the rows."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(64, 128, 64, top_k=top_k, gate=gate, pipeline=4, memory_reuse="S4")
    ids = (torch.arange(TOKENS),) if gate == "hash" else ()
    found = measured(layer, arguments=ids, loss=True)
    predicted = layer.predict_memory(TOKENS, layer.row_counts)
    # XMoE's two softmaxes are differentiated at once, which shows where little else is held.
    least, most = (0.93, 1.0) if (gate, top_k) == ("xmoe", 1) else (0.98, 1.025)
    assert least <= predicted.peak / found.peak <= most
    assert predicted.saved == pytest.approx(found.held, abs=0.02 * found.peak)


class Gate(torch.nn.Module):
    def forward(self, x_TM: torch.Tensor) -> pmoe.Routing:
        expert = torch.zeros(x_TM.shape[0], 1, dtype=torch.int64)
        return pmoe.Routing(expert=expert, weight=x_TM[:, :1].sigmoid(), l_aux=x_TM.new_zeros(()))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gate": Gate()}, "the gate is a user's module"),
        ({"expert": lambda: torch.nn.Identity()}, "experts are a user's modules"),
        ({"callbacks": [pmoe.Callback()]}, "callbacks"),
        ({"shared_expert": torch.nn.Identity()}, "the shared expert is a user's module"),
    ],
    ids=["gate", "experts", "callbacks", "shared expert"],
)
def test_what_is_a_users_own_is_named_in_the_answer(options: dict[str, Any], words: str) -> None:
    (told,) = build(**options).predict_memory(TOKENS).unknown
    assert told.startswith(words)


def test_reuse_only_rises_with_tokens_and_falls_with_n() -> None:
    layer = build(pipeline=4, memory_reuse="S4")
    by_tokens = [layer.predict_memory(tokens).peak for tokens in (0, 1, 100, 1000, 5000)]
    assert by_tokens == sorted(by_tokens)
    by_n = [layer.predict_memory(4096, pipeline=n).promised for n in (1, 2, 4, 8)]
    assert by_n == sorted(by_n, reverse=True)


UNUSUAL = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "pipeline": 1},
    {"dtype": torch.bfloat16, "expert": "swiglu", "top_k": 2},
    {"dtype": torch.float16, "num_experts": 8},
    {"d_hidden": 32, "pipeline": 16},
    {"num_experts": 256, "d_hidden": 64, "pipeline": 8},
    {"num_experts": 128, "z_loss_weight": 0.1},
    {"top_k": 4, "pipeline": 8},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair, options", spread(CHEAPEST, UNUSUAL, every=3), ids=named)
def test_no_layer_takes_more_than_its_bound_or_its_budget(
    pair: pmoe.Restore, options: dict[str, Any]
) -> None:
    layer = build(**{"pipeline": 4, "memory_reuse": pair, "bias": False, **options})
    found = measured(layer)
    bound = layer.predict_memory(TOKENS)
    assert found.peak <= bound.peak
    wide = 4 if layer.gate.weight.element_size() < 4 else layer.gate.weight.element_size()
    gradients = sum(parameter.numel() for parameter in layer.parameters()) * wide
    assert found.peak - gradients <= bound.promised


def test_the_bound_has_room_for_rows_that_no_cutting_avoids() -> None:
    """Chunks cannot be smaller than bins, and one bin may bring more rows than a ring slot was made for."""
    sizes = LayerSizes(
        d_model=8,
        num_experts=4,
        top_k=2,
        num_ranks=4,
        columns=HiddenColumns(hidden=32, active=32),
        element_size=4,
        weight_size=4,
        expert_parameters=0,
        gate_parameters=0,
    )
    coarse = worst_rows(sizes, sizes.call(1024), n=2, bins=2, slot_rows=100)
    assert set(coarse.extent.received) == {3 * 512 * 2}  # ranks, half of their tokens, choices
    fine = worst_rows(sizes, sizes.call(1024), n=2, bins=16, slot_rows=100)
    assert set(fine.extent.received) == {3 * 64 * 2}
    assert set(worst_rows(sizes, sizes.call(1024), n=2, bins=16, slot_rows=1000).extent.received) == {1000}


@pytest.mark.parametrize("n", [1, 4])
def test_the_bound_with_copies_holds_whatever_part_of_a_ranks_own_rows_stays(n: int) -> None:
    """A rank's own rows stay, for its experts or for its copies. Other tasks compute those for copies."""
    num_ranks = 4
    plain = replace(sizes_from_options(64, 256, 8, top_k=2, num_ranks=num_ranks), rotates=False)
    sizes = replace(plain, copies=CopyNumbers.at_most(1, 2, num_ranks))
    call = sizes.call(512)
    at_most = bound(sizes, call, Choice(forward=n, backward=n, restore=KEEP), slack=1.25)
    whole = worst_rows(sizes, call, n=n, bins=n, slot_rows=0)
    assert whole.received == (num_ranks - 1) * call.slots and whole.local == call.slots
    own = call.slots // n  # of a chunk
    for for_experts in (0, own // 3, own // 2, own):
        for_copies = own - for_experts
        rows = replace(
            whole,
            extent=whole.extent._replace(local=(for_experts,) * n),
            busiest_local=(for_experts,) * n,
            local_copies=(for_copies,) * n,
            busiest_copies=(for_copies,) * n,
        )
        of_rows = predict(sizes, call, rows, rows, KEEP)
        assert of_rows.peak <= at_most.peak
        assert of_rows.saved <= at_most.saved
        assert of_rows.forward_peak <= at_most.forward_peak


def even_rows(sizes: LayerSizes, call: CallRows, n: int) -> PassRows:
    """Returns the rows of a rank under even routing: every rank sends equally many rows to every expert."""
    own = call.slots // n
    staying = own // sizes.num_ranks
    travelling = own - staying
    extent = ChunkRows(
        send=(travelling,) * n,
        received=(travelling,) * n,
        local=(staying,) * n,
        home=(own,) * n,
        regrouped=(sizes.num_ranks > 2,) * n,
    )
    num_local = sizes.num_experts // sizes.ep_size
    return PassRows(
        extent=extent,
        received=n * travelling,
        local=n * staying,
        sent=n * travelling,
        exact=True,
        busiest_received=travelling // num_local,
        busiest_local=(staying // num_local,) * n,
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_copies_that_may_stay_count_among_what_is_saved(name: str) -> None:
    """With S2 and S4 the prediction said that copies are sent again, also where later calls use them."""
    pair = STRATEGIES[name]
    plain = sizes_from_options(64, 256, 8, num_ranks=4)
    sent, staying = (
        bound(
            replace(plain, copies=CopyNumbers.at_most(1, 2, 4, stay=stay)),
            plain.call(512),
            Choice(forward=2, backward=2, restore=pair),
            slack=1.25,
        )
        for stay in (False, True)
    )
    sends_again = pair.dispatched == "communicate"
    assert staying.saved - sent.saved == plain.expert_bytes * sends_again
    assert (staying.peak, staying.promised) == (sent.peak, sent.promised)
    assert staying.tensors["copies"] == sent.tensors["copies"]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_with_copies_the_bound_is_at_most_35_percent_above_the_even_peak(num_ranks: int, name: str) -> None:
    pair = STRATEGIES[name]
    for n, k, top_k in ((1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1), (4, 2, 2)):
        plain = sizes_from_options(64, 256, 2 * num_ranks, top_k=top_k, num_ranks=num_ranks)
        call = plain.call(2048)
        rows = even_rows(plain, call, n)
        even = predict(plain, call, rows, rows, pair)
        sizes = replace(plain, copies=CopyNumbers.at_most(k, 2, num_ranks))
        at_most = bound(sizes, call, Choice(forward=n, backward=n, restore=pair), slack=1.25)
        assert at_most.peak <= 1.35 * even.peak + at_most.tensors["copies"], (n, k, top_k)


@pytest.mark.parametrize(
    "d_model, dtype, most",
    [
        (256, torch.float32, 1.35),
        (1024, torch.float32, 1.18),
        (4096, torch.float32, 1.11),
        (256, torch.bfloat16, 1.40),
        (1024, torch.bfloat16, 1.14),
        (4096, torch.bfloat16, 1.05),
    ],
)
def test_the_bound_with_copies_on_64_ranks_falls_with_the_width_of_rows(
    d_model: int, dtype: torch.dtype, most: float
) -> None:
    """Indices and routing weights of the rows that a rank may get matter less, the more bytes a row has."""
    for pair in STRATEGIES.values():
        for n, k, top_k in ((1, 2, 2), (2, 1, 2), (4, 1, 1)):
            plain = sizes_from_options(d_model, 4 * d_model, 128, top_k=top_k, num_ranks=64, dtype=dtype)
            call = plain.call(2048)
            rows = even_rows(plain, call, n)
            even = predict(plain, call, rows, rows, pair)
            sizes = replace(plain, copies=CopyNumbers.at_most(k, 2, 64))
            at_most = bound(sizes, call, Choice(forward=n, backward=n, restore=pair), slack=1.25)
            assert at_most.peak <= most * even.peak + at_most.tensors["copies"], (n, k, top_k)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_rows_that_fit_into_slots_with_copies_need_no_more_than_the_bound(name: str, n: int) -> None:
    """The fewer rows of a chunk stay, the more may arrive. Many rows that stay need no more memory."""
    num_ranks = 4
    pair = STRATEGIES[name]
    sizes = replace(
        sizes_from_options(64, 256, 8, top_k=2, num_ranks=num_ranks),
        copies=CopyNumbers.at_most(1, 2, num_ranks),
    )
    call = sizes.call(512)
    at_most = bound(sizes, call, Choice(forward=n, backward=n, restore=pair), slack=1.25)
    for checked, chunks in {(n, n), (max(n, 2), max(n, 2)), (max(n, 2), 8)}:
        own = call.slots // chunks
        slot, both = (math.ceil(slack * call.slots / checked) for slack in (1.25 * 3 / 4, 1.25))
        for staying in (0, both - slot, own // 2, min(own, slot)):
            arriving = min(slot, both - staying, num_ranks * own - staying)
            extent = ChunkRows(
                send=(min(own, slot),) * chunks,
                received=(arriving,) * chunks,
                local=(staying,) * chunks,
                home=(own,) * chunks,
                regrouped=(True,) * chunks,
            )
            local = min(chunks * staying, call.slots)
            rows = PassRows(
                extent=extent,
                received=num_ranks * call.slots - local,
                local=local,
                sent=call.slots,
                exact=True,
                busiest_received=arriving,
                busiest_local=(staying,) * chunks,
            )
            of_rows = predict(sizes, call, rows, rows, pair)
            assert of_rows.peak <= at_most.peak
            assert of_rows.saved <= at_most.saved
            assert of_rows.host <= at_most.host


def test_a_prediction_under_a_budget_is_of_what_holds_it_and_says_where_nothing_does() -> None:
    free = build(pipeline=True, memory_reuse=True, memory_budget=1 << 40).predict_memory(512).candidates
    bytes_of = {way: each.promised for way, each in free.items()}
    budget = sorted(bytes_of.values())[len(free) // 2]
    layer = build(pipeline=True, memory_reuse=True, memory_budget=budget)
    held = layer.predict_memory(512)
    assert set(held.candidates) == {way for way, size in bytes_of.items() if size <= budget}
    assert 1 < len(held.candidates) < len(free) and held.promised <= budget
    # What is asked for by name is answered, whether it holds the budget or not.
    wide = layer.predict_memory(512, pipeline=1, memory_reuse=KEEP)
    assert wide.promised > budget
    layer.memory_budget = min(bytes_of.values()) - 1
    told = f"must be at least {min(bytes_of.values())} for these tokens"
    with pytest.raises(ValueError, match=told):
        layer.predict_memory(512)
    with pytest.raises(ValueError, match=told):
        layer(torch.zeros(512, D_MODEL))


def test_a_budget_counts_what_autocast_copies_and_is_decided_anew_for_another_type() -> None:
    x, dy = torch.randn(2, 512, D_MODEL)
    x.requires_grad_()

    def step(layer: pmoe.MoELayer) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        y.backward(dy.to(y.dtype))
        return y

    def least(layer: pmoe.MoELayer, autocast: bool) -> int:
        layer.memory_budget = 1
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
            pytest.raises(ValueError) as error,
        ):
            layer(x)
        return int(str(error.value).split("at least ")[1].split()[0])

    layer = build(pipeline=4, memory_reuse="S4", memory_budget=1)
    wide, narrow = least(layer, False), least(layer, True)
    layer.memory_budget = narrow
    step(layer)
    x.grad = None
    layer.zero_grad(set_to_none=True)
    found = Allocated(lambda mark: step(layer))
    # Gradients come in the narrow type and are then widened.
    gradients = sum(parameter.numel() for parameter in layer.parameters()) * (4 + 2 + 4)
    assert found.peak - gradients <= narrow
    layer.memory_budget = min(wide, narrow)
    for autocast in (True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            if (narrow if autocast else wide) <= layer.memory_budget:
                layer(x)
            else:
                with pytest.raises(ValueError, match="must be at least"):
                    layer(x)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda layer: layer.predict_memory(-1), r"num_tokens \(-1\) must be an int of at least 0"),
        (lambda layer: layer.predict_memory(8, pipeline=0), r"pipeline \(0\) must be at least 1"),
        (lambda layer: layer.predict_memory(8, pipeline=10**9), r"pipeline \(1000000000\) .* at most 1024"),
        (
            lambda layer: layer.predict_memory(8, memory_reuse="S9"),
            r"memory_reuse \('S9'\) must be False, True",
        ),
        (
            lambda layer: layer.predict_memory(8, layer.row_counts, pipeline=3),
            r"pipeline \(3, 3\) must divide the 4 bins",
        ),
    ],
)
def test_a_prediction_of_what_cannot_be_is_refused(
    call: Callable[[pmoe.MoELayer], object], match: str
) -> None:
    layer = build(pipeline=4, memory_reuse="S4")
    layer(torch.randn(8, D_MODEL))
    with pytest.raises(ValueError, match=match):
        call(layer)
