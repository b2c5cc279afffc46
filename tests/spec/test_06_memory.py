"""Memory: T_DI and T_M are kept, moved or made again; budgets hold for any routing; bytes are predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pmoe
from tests.spec.kit import (
    Step,
    assert_close,
    assert_is_the_plain_layer,
    error_of,
    make,
    on_ranks,
    step,
    tokens,
)

PAIRS = [f"{d}/{h}" for d in ("keep", "offload", "communicate") for h in ("keep", "offload", "recompute")]
STRATEGIES = {"S1": "offload/offload", "S2": "communicate/offload"}
STRATEGIES |= {"S3": "offload/recompute", "S4": "communicate/recompute"}


def restore(pair: str) -> pmoe.Restore:
    return pmoe.Restore(*pair.split("/"))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("counts", [(13,), (9, 4), (5, 0, 11, 2)])
def test_every_restore_pair_gives_the_plain_result(counts: tuple[int, ...], pair: str) -> None:
    assert_is_the_plain_layer(counts, pipeline=3, memory_reuse=restore(pair))


@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_restored_is_the_same_to_the_bit(pair: str) -> None:
    layer = make(pipeline=3, memory_reuse=restore(pair))
    kept = make(pipeline=3, memory_reuse=pmoe.Restore("keep", "keep"))
    assert_close(step(layer, tokens(13)), step(kept, tokens(13)), limit=0)


@pytest.mark.parametrize("name, pair", STRATEGIES.items())
def test_the_papers_names_are_four_of_the_nine_pairs(name: str, pair: str) -> None:
    layer = make(pipeline=2, memory_reuse=name)
    step(layer, tokens(8))
    assert str(layer.ran.restore) == pair


def test_the_layer_takes_a_pair_by_itself(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    layer = make(pipeline=2, memory_reuse=True)
    assert_close(step(layer, tokens(9)), step(make(), tokens(9)))
    assert str(layer.ran.restore) in STRATEGIES.values()


# ---- skewed routing


def skewed(rank: int, world: int, pair: str, load: str) -> tuple[Step, int, int]:
    """A step, its chunks, and the peak of the slots on this rank."""
    layer = make(pipeline=4, memory_reuse=restore(pair), load=load, top_k=1)
    pool = pmoe.pool("cpu").device
    pool.peak_bytes = 0
    found = step(layer, tokens(24, 10 + rank))
    return found, layer.ran.forward, pool.peak_bytes


@pytest.mark.parametrize("pair", ["communicate/recompute", "offload/offload", "keep/keep"])
def test_skewed_routing_is_cut_finer_and_changes_no_result(pair: str) -> None:
    options = {"pipeline": 4, "memory_reuse": restore(pair), "load": "one expert", "top_k": 1}
    assert_is_the_plain_layer((24, 24, 24, 24), {"top_k": 1}, **options)
    assert all(n > 4 for _, n, _ in on_ranks(4, skewed, pair, "one expert"))


def test_slots_take_no_more_memory_where_one_expert_gets_most_rows() -> None:
    pair = "communicate/recompute"
    even = max(peak for *_, peak in on_ranks(4, skewed, pair, "mixed"))
    assert max(peak for *_, peak in on_ranks(4, skewed, pair, "one expert")) <= even


@pytest.mark.parametrize("counts", [(16, 0), (0, 16), (16, 1, 0, 3)])
def test_ranks_with_very_different_numbers_of_tokens_share_slots_of_one_size(counts: tuple[int, ...]) -> None:
    assert_is_the_plain_layer(counts, pipeline=4, memory_reuse=restore("communicate/recompute"))


# ---- budgets


def min_budget() -> int:
    """What the refusal of a budget that is too small names."""
    layer = make(pipeline=True, memory_reuse=True, memory_budget=1)
    message = error_of(lambda: layer(tokens(64).requires_grad_()))
    assert "memory_budget (1 bytes) must be at least" in message
    return int(message.split("at least ")[1].split()[0])


def test_a_budget_that_nothing_holds_is_refused_with_the_least_that_would_do(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    least = min_budget()
    layer = make(pipeline=True, memory_reuse=True, memory_budget=least)
    assert_close(step(layer, tokens(64)), step(make(), tokens(64)))
    layer.memory_budget = least - 1
    assert "at least" in error_of(lambda: layer(tokens(64).requires_grad_()))


def test_what_a_budget_chose_is_predicted_to_hold_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    budget = 2 * min_budget()
    layer = make(pipeline=True, memory_reuse=True, memory_budget=budget)
    step(layer, tokens(64))
    chosen = {"pipeline": layer.ran.forward, "memory_reuse": layer.ran.restore}
    assert layer.predict_memory(64, **chosen).promised <= budget


@pytest.mark.parametrize("budget", ["1MiB", "1MB", "0.5GiB", 1 << 20])
def test_a_budget_is_bytes_or_a_text_with_a_unit(budget: int | str) -> None:
    layer = make(pipeline=2, memory_reuse="S4", memory_budget=budget)
    assert_close(step(layer, tokens(9)), step(make(), tokens(9)))


def budget_on_rank(rank: int, world: int, load: str) -> str:
    layer = make(pipeline=2, memory_reuse="S4", memory_budget="1kB", load=load)
    return error_of(lambda: layer(tokens(40, rank).requires_grad_()))


@pytest.mark.parametrize("load", ["mixed", "one expert"])
def test_every_rank_refuses_a_budget_alike_whatever_the_routing(load: str) -> None:
    messages = on_ranks(2, budget_on_rank, load)
    assert len(set(messages)) == 1
    assert messages == on_ranks(2, budget_on_rank, "mixed")


# ---- prediction


def predicted(pair: str, n: int, tokens_of_rank: int = 4096) -> Any:
    layer = pmoe.MoELayer(64, 256, num_experts=8, top_k=2, pipeline=n, memory_reuse=restore(pair))
    return layer.predict_memory(tokens_of_rank)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair != "keep/keep"])
def test_every_pair_needs_less_than_keeping_both(pair: str) -> None:
    assert predicted(pair, 8).peak < predicted("keep/keep", 8).peak


@pytest.mark.parametrize("pair", ["communicate/recompute", "offload/offload"])
def test_more_chunks_need_less_memory(pair: str) -> None:
    peaks = [predicted(pair, n).peak for n in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 1.5 * peaks[-1]


@pytest.mark.parametrize("pair", PAIRS)
def test_host_memory_is_counted_apart_and_only_offloading_takes_it(pair: str) -> None:
    assert (predicted(pair, 4).host > 0) == ("offload" in pair)


@pytest.mark.parametrize("load", ["mixed", "one expert", "some get none"])
def test_a_prediction_without_the_routing_is_a_bound_for_any(load: str) -> None:
    layer = make(pipeline=4, memory_reuse="S4", load=load)
    step(layer, tokens(64))
    bound, of_these_rows = layer.predict_memory(64), layer.predict_memory(64, layer.row_counts)
    assert bound.is_bound and not of_these_rows.is_bound
    assert of_these_rows.peak <= bound.peak


def test_a_prediction_needs_no_call() -> None:
    layer = pmoe.MoELayer(64, 256, 8, pipeline=4, memory_reuse="S4", device="meta")
    assert layer.predict_memory(1 << 20).peak > layer.predict_memory(1 << 10).peak


def test_a_prediction_may_be_asked_for_other_options_than_the_layers() -> None:
    layer = make(pipeline=4, memory_reuse="S4")
    other = make(pipeline=2, memory_reuse="S1")
    assert layer.predict_memory(64, pipeline=2, memory_reuse="S1") == other.predict_memory(64)


# ---- the pool


def test_after_a_step_the_pool_holds_nothing_on_the_host() -> None:
    step(make(pipeline=3, memory_reuse="S1"), tokens(13))
    assert pmoe.pool("cpu").host.bytes_in_use == 0


def test_between_the_passes_offloaded_tensors_are_on_the_host() -> None:
    layer = make(pipeline=3, memory_reuse="S1")
    y = layer(tokens(13).requires_grad_())
    assert pmoe.pool("cpu").host.bytes_in_use > 0
    y.sum().backward()
    assert pmoe.pool("cpu").host.bytes_in_use == 0


def test_a_graph_that_is_dropped_gives_its_host_memory_back() -> None:
    y = make(pipeline=3, memory_reuse="S1")(tokens(13).requires_grad_())
    assert pmoe.pool("cpu").host.bytes_in_use > 0
    del y
    assert pmoe.pool("cpu").host.bytes_in_use == 0


def test_slots_are_shared_by_all_layers_of_a_model() -> None:
    def peak(num_layers: int) -> int:
        model = torch.nn.Sequential(*(make(pipeline=4, memory_reuse="S4") for _ in range(num_layers)))
        pool = pmoe.pool("cpu").device
        pool.peak_bytes = 0
        model(tokens(64).requires_grad_()).sum().backward()
        return pool.peak_bytes

    assert peak(3) == peak(1) > 0


def test_too_little_host_memory_is_a_warning_and_no_other_result(monkeypatch: pytest.MonkeyPatch) -> None:
    host = pmoe.pool("cpu").host
    monkeypatch.setattr(host, "limit_bytes", 1000)
    with pytest.warns(UserWarning, match="too little host memory|host memory for offloading"):
        found = step(make(pipeline=3, memory_reuse="S1"), tokens(64))
    assert_close(found, step(make(pipeline=3), tokens(64)))


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_pairs_go_with_any_expert_and_any_number_of_choices(top_k: int, expert: str) -> None:
    of_plain = {"top_k": top_k, "expert": expert}
    assert_is_the_plain_layer((9, 4), of_plain, pipeline=2, memory_reuse="S4", **of_plain)
