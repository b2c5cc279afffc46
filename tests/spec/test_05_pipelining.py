"""Chunks: the batch is cut, the result is not changed, and chunks travel while others are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pmoe
from tests.spec.kit import M, assert_close, assert_is_the_plain_layer, error_of, make, on_ranks, step, tokens


@pytest.mark.parametrize("n", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("counts", [(13,), (9, 4), (5, 0, 11, 2)])
def test_any_number_of_chunks_gives_the_plain_result(counts: tuple[int, ...], n: int) -> None:
    assert_is_the_plain_layer(counts, pipeline=n)


@pytest.mark.parametrize("pipeline", [True, "solve"])
@pytest.mark.parametrize("counts", [(13,), (9, 4)])
def test_a_number_that_the_layer_finds_gives_the_plain_result(
    counts: tuple[int, ...], pipeline: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pipeline == "solve" and len(counts) > 1:
        found = on_ranks(len(counts), solved, str(tmp_path), counts)
        plain = [step(make(), tokens(count, 10 + rank)) for rank, count in enumerate(counts)]
        for got, expected in zip(found, plain, strict=True):
            assert_close({"y": got["y"]}, {"y": expected["y"]})
        return
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    assert_is_the_plain_layer(counts, pipeline=pipeline)


def solved(rank: int, world: int, cache: str, counts: tuple[int, ...]) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PMOE_CACHE", cache)
        return step(make(pipeline="solve"), tokens(counts[rank], 10 + rank))


@pytest.mark.parametrize("forward, backward", [(1, 4), (4, 1), (2, 6), (6, 2)])
@pytest.mark.parametrize("counts", [(13,), (9, 4)])
def test_backward_may_have_a_number_of_its_own(counts: tuple[int, ...], forward: int, backward: int) -> None:
    assert_is_the_plain_layer(counts, pipeline=forward, pipeline_backward=backward)


def test_the_layer_says_how_many_chunks_both_passes_had() -> None:
    layer = make(pipeline=4, pipeline_backward=2)
    step(layer, tokens(16))
    assert (layer.ran.forward, layer.ran.backward) == (4, 2)


def test_the_number_may_be_larger_than_the_number_of_tokens() -> None:
    assert_close(step(make(pipeline=16), tokens(3)), step(make(), tokens(3)))


def test_one_process_cuts_nothing_by_itself() -> None:
    layer = make(pipeline=True)
    layer(tokens(16))
    assert layer.ran.forward == 1


def test_an_expert_without_rows_in_a_chunk_is_fine() -> None:
    assert_is_the_plain_layer([13], pipeline=8, load="one expert", top_k=1, of_plain={"top_k": 1})


@pytest.mark.parametrize("name", ["swiglu", "shared", "capacity"])
def test_chunks_go_with_other_options(name: str) -> None:
    options = {
        "swiglu": {"expert": "swiglu"},
        "shared": {"shared_expert": 8},
        "capacity": {"capacity_factor": 0.6},
    }
    assert_close(step(make(pipeline=4, **options[name]), tokens(13)), step(make(**options[name]), tokens(13)))


# ---- the overlap shows


def recorded(rank: int, world: int, n: int) -> dict[str, list[tuple[str, str, float, float]]]:
    """(task, lane, start, end) by pass, of a step whose rows all travel."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(64, 256, num_experts=world, pipeline=n)
    torch.manual_seed(rank)
    layer(torch.randn(256, 64)).sum().backward()
    with pmoe.recording() as journal:
        layer(torch.randn(256, 64)).sum().backward()
    found: dict[str, list] = {"forward": [], "backward": []}
    for span in journal.spans:
        found[span.direction].append((span.name, span.lane.value, span.start, span.end))
    return found


def starts(spans: list[tuple[str, str, float, float]]) -> dict[str, float]:
    return {name: start for name, _, start, _ in spans}


def test_the_second_chunk_is_sent_before_the_first_is_computed() -> None:
    for passes in on_ranks(2, recorded, 4):
        started = starts(passes["forward"])
        assert started["S0"] < started["S1"] < started["C0"]


def test_a_chunk_is_sent_then_computed_then_returned() -> None:
    for passes in on_ranks(2, recorded, 4):
        started = starts(passes["forward"])
        assert all(started[f"S{i}"] < started[f"C{i}"] < started[f"R{i}"] for i in range(4))


def test_results_of_the_first_chunk_return_before_the_last_chunk_is_computed() -> None:
    for passes in on_ranks(2, recorded, 4):
        started = starts(passes["forward"])
        assert started["R0"] < started["C3"]


def test_rows_that_stay_on_their_rank_are_computed_while_the_first_chunk_travels() -> None:
    for passes in on_ranks(2, recorded, 4):
        started = starts(passes["forward"])
        assert started["S0"] < started["L0"] < started["C0"]


def test_in_backward_weight_gradients_come_while_gradients_travel() -> None:
    for passes in on_ranks(2, recorded, 4):
        names = [name for name, *_ in passes["backward"]]
        assert sum(name.startswith("W") for name in names) == 4
        started = starts(passes["backward"])
        assert all(started[f"C{i}"] < started[f"W{i}"] for i in range(4))
        assert started["W0"] < max(end for name, lane, _, end in passes["backward"] if lane == "communicate")


def test_one_chunk_is_one_message_there_one_product_and_one_message_back() -> None:
    for passes in on_ranks(2, recorded, 1):
        names = [name for name, *_ in passes["forward"]]
        assert [names.count(name) for name in ("S0", "C0", "R0")] == [1, 1, 1]
        assert "S1" not in names


def exposed(rank: int, world: int) -> tuple[float | None, float | None]:
    torch.manual_seed(0)  # the gate must be the same on all ranks
    layer = pmoe.MoELayer(64, 256, num_experts=4, pipeline=4)
    with pmoe.recording() as journal:
        layer(torch.randn(256, 64)).sum().backward()
    (stats,) = pmoe.stats(layer, journal=journal).layers
    return stats.exposed_seconds, stats.communication_seconds


def test_statistics_say_how_long_computing_waited_for_communication() -> None:
    for waited, travelled in on_ranks(2, exposed):
        assert 0 <= waited <= travelled


def test_on_one_rank_nothing_travels_and_nothing_is_waited_for() -> None:
    assert exposed(0, 1) == (0, 0)


# ---- found numbers are kept


def learnt(rank: int, world: int, path: str) -> tuple[int, int]:
    """n of a layer that tried, and of one that read what the first wrote."""
    trying, reading = (pmoe.MoELayer(16, 32, 4, pipeline=True) for _ in range(2))
    x = torch.randn(2048, 16, requires_grad=True)
    trying(x).sum().backward()
    if rank == 0:
        trying.save_degrees(path)
    torch.distributed.barrier()
    reading.load_degrees(path)
    reading(x)
    return trying.ran.forward, reading.ran.forward


def test_a_number_that_trials_found_can_be_saved_and_loaded(tmp_path: Path) -> None:
    found = on_ranks(2, learnt, str(tmp_path / "degrees.json"))
    assert len(set(found)) == 1 and found[0][0] == found[0][1]


def test_saved_numbers_of_another_layer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "degrees.json"
    make(pipeline=True).save_degrees(path)
    assert error_of(lambda: make(pipeline=True, d_hidden=14).load_degrees(path)).startswith("ValueError: ")


def test_a_layer_in_a_larger_model_takes_part_in_its_graph() -> None:
    torch.manual_seed(0)
    moe = make(pipeline=3)
    model = nn.Sequential(nn.Linear(M, M), moe, nn.Linear(M, 1)).double()
    assert torch.autograd.gradcheck(model, tokens(5).requires_grad_())
