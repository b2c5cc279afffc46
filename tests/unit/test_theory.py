"""MPipeMoE's Eq. 1-6 against numbers computed by hand."""

from __future__ import annotations

import pytest

from pmoe.papers.mpipemoe_memory import activations, buffers, model_states, saved_each, saving_ratio, theory


def test_gpt3_xl_with_16384_tokens_in_8_chunks_worked_by_hand() -> None:
    numbers = theory(B=16384, M=2048, H=8192, E=64, n=8)
    assert numbers == {
        "model_states": 134_742_016,  # 4 (64 * 2048 + 2 * 8192 * 2048) = 4 (131072 + 33554432)
        "activations": 268_435_456,  # 4 * 16384 * 2048 + 16384 * 8192 = 2^27 + 2^27
        "buffers": 167_772_160,  # 2^25 + 2^27
        "activations_pipelined": 268_435_456,
        "buffers_pipelined": 268_435_456,
        "saved": 335_544_320,  # 2 * 16384 (4096 * 6/8 + 8192 * 7/8) = 2 * 16384 * 10240
        "saving_ratio": pytest.approx(335_544_320 / 671_612_928, rel=1e-15),
    }
    assert numbers["saving_ratio"] == pytest.approx(0.49961, abs=5e-6)


def test_small_numbers_worked_by_hand() -> None:
    assert model_states(M=3, H=5, E=7) == 4 * (21 + 30)
    assert activations(B=2, M=3, H=5) == 24 + 10
    assert buffers(B=2, M=3, H=5) == 6 + 10
    assert saved_each(B=2, M=3, H=5, n=2) == 5  # T_M halves: 10 -> 5; T_DI and T_DO need both slots
    assert saving_ratio(B=2, M=3, H=5, E=7, n=2) == 10 / (204 + 68)


def test_a_degree_that_does_not_divide_gives_fractions() -> None:
    assert saved_each(B=1, M=1, H=1, n=3) == pytest.approx(4 / 3, rel=1e-15)  # 2 * 1/3 + 2/3
    assert saved_each(B=2, M=5, H=7, n=4) == 20.5  # 2 (10 * 2/4 + 7 * 3/4)


def test_whole_results_are_ints_even_where_a_float_could_not_hold_them() -> None:
    assert isinstance(saved_each(B=2, M=3, H=5, n=2), int)
    whole = saved_each(B=2**32 + 2, M=2**20 + 1, H=2**32 + 1, n=2)
    assert isinstance(whole, int)
    assert whole == (2**31 + 1) * (2**32 + 1)
    assert int(float(whole)) != whole


@pytest.mark.parametrize("n, limit", [(2, 0.25), (4, 0.5), (8, 0.625)])
def test_the_saving_nears_its_limit_as_the_batch_grows(n: int, limit: float) -> None:
    ratios = [saving_ratio(B=2**power, M=1024, H=4096, E=64, n=n) for power in (8, 14, 20, 30)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.2 * limit
    assert ratios[-1] < limit
    assert ratios[-1] == pytest.approx(limit, rel=1e-4)


def test_one_chunk_saves_nothing_and_never_less_than_nothing() -> None:
    assert saved_each(B=16, M=8, H=4, n=1) == 0
    assert theory(B=16, M=8, H=4, E=2, n=1)["saved"] == 0
    assert theory(B=16, M=8, H=4, E=2, n=1)["saving_ratio"] == 0


def test_two_slots_hold_two_chunks_so_only_the_hidden_saves_at_two() -> None:
    assert saved_each(B=16, M=8, H=4, n=2) == saved_each(B=16, M=800, H=4, n=2) == 32
