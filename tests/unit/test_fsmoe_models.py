"""FSMoE's Figs. 6 to 8 as simulated: testbeds, where gradients are sent, Lina's pieces, pipeline stages."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from pmoe.papers import fsmoe_models
from pmoe.papers.assumptions import assumptions, printed
from pmoe.papers.fsmoe_models import (
    LINA_BYTES,
    MODELS,
    TESTBEDS,
    ModelStep,
    figure6,
    figure7,
    figure8,
    lina_seconds,
    means,
    model_steps,
    on_nodes,
    tables,
)
from pmoe.papers.fsmoe_table5 import (
    MS,
    TESTBED_B,
    LayerConfiguration,
    attention,
    backward_seconds,
    forward_seconds,
    moe_costs,
    plan_seconds,
    plans,
    tutel_degree,
)
from pmoe.planner.costs import LineCost

ROOT = Path(__file__).resolve().parents[2]
A = TESTBEDS["A, Table 2"]
XL = MODELS["GPT2-XL"]
MIXTRAL = MODELS["Mixtral-7B"]._replace(layers=7)


# ---- testbeds


@pytest.mark.parametrize("letter", ["A", "B"])
def test_lines_by_table_2_meet_what_table_2_measured(letter: str) -> None:
    testbed = TESTBEDS[f"{letter}, Table 2"]
    measured = printed(f"fsmoe table 2, Mixtral-7B, testbed {letter}")
    layer = LayerConfiguration(**printed("fsmoe models")["Mixtral-7B"])
    dense = attention(layer, testbed)
    a2a, ag, rs, exp = moe_costs(layer, testbed).chunk(1)
    assert 2 * a2a == pytest.approx(measured["AlltoAll"] * MS)
    assert ag + dense.all_gather == pytest.approx(measured["AllGather"] * MS)
    assert rs + dense.reduce_scatter == pytest.approx(measured["ReduceScatter"] * MS)
    assert exp == pytest.approx(measured["Experts"] * MS)
    assert testbed.all_reduce(layer.gradient_bytes(testbed)) == pytest.approx(measured["AllReduce"] * MS)


def test_fig_5s_lines_of_testbed_a_contradict_table_2() -> None:
    alpha, beta = printed("fsmoe figure 5, testbed A")["AllGather"]
    layer = LayerConfiguration(**printed("fsmoe models")["GPT2-XL"])
    gathered = alpha + beta * layer.rows * layer.M * 4
    assert f"would take {gathered:.0f} ms where Table 2 has 4.6" in assumptions("fsmoe")["Testbed A"]


def test_fewer_nodes_send_a_smaller_share_of_their_bytes() -> None:
    half = on_nodes(A, 3)
    assert half.a2a.beta_seconds == pytest.approx(A.a2a.beta_seconds * (2 / 3) / (5 / 6))
    assert half.ar.alpha_seconds == A.ar.alpha_seconds
    assert (half.ag, half.rs, half.gpus) == (A.ag, A.rs, A.gpus)
    assert on_nodes(A, 6).a2a.beta_seconds == pytest.approx(A.a2a.beta_seconds)


# ---- systems


def test_a_model_of_one_layer_without_gradients_is_table_5s_layer() -> None:
    """The passes are those of Table 5. Only the all-reduce of gradients is new."""
    layer = MIXTRAL.layer(256)
    steps = model_steps(MIXTRAL._replace(layers=1), 256, TESTBED_B, 1.25)
    tutel = plans(layer)["Tutel"]
    all_reduce = TESTBED_B.all_reduce(layer.gradient_bytes(TESTBED_B))
    for name in ("DeepSpeed-MoE", "Tutel"):
        assert steps[name].seconds == pytest.approx(plan_seconds(layer, plans(layer)[name]))
        assert steps[name].gradients == pytest.approx(all_reduce)
    costs, dense = moe_costs(layer), attention(layer)
    passes = forward_seconds(costs, dense, tutel.forward, True)
    passes += backward_seconds(costs, dense, tutel.backward, True, 0.0, 0.0)
    assert steps["PipeMoE+Lina"].passes == pytest.approx(passes)


def test_on_ideal_lanes_each_system_is_at_least_as_fast_as_the_one_it_adds_to() -> None:
    for testbed in TESTBEDS.values():
        steps = model_steps(MIXTRAL, 1024, testbed, 1.0)
        seconds = {name: step.seconds for name, step in steps.items()}
        assert seconds["Tutel"] <= seconds["DeepSpeed-MoE"]
        assert seconds["FSMoE-No-IIO"] <= min(seconds["Tutel"], seconds["PipeMoE+Lina"]) * (1 + 1e-9)
        assert seconds["FSMoE"] <= seconds["FSMoE-No-IIO"]
        assert model_steps(MIXTRAL, 1024, testbed, 1.5)["FSMoE"].seconds > seconds["FSMoE"]


def test_partitioned_gradients_add_least() -> None:
    steps = model_steps(XL, 256, TESTBEDS["B, Table 2"])
    exposed = {name: step.gradients for name, step in steps.items()}
    least = min(each for name, each in exposed.items() if name != "FSMoE")
    assert exposed["FSMoE-No-IIO"] <= least * (1 + 1e-6)  # shares are whole bytes
    assert exposed["Tutel"] == exposed["DeepSpeed-MoE"]


# ---- Lina


def lina(layers: int, all_reduce: LineCost, gradient_bytes: int) -> float:
    layer = MIXTRAL.layer(1024)
    costs, dense = moe_costs(layer), attention(layer)
    testbed = fsmoe_models.replace(TESTBED_B, ar=all_reduce)
    return lina_seconds(layers, costs, dense, tutel_degree(costs), testbed, gradient_bytes)


def test_gradients_smaller_than_a_piece_wait_for_the_end() -> None:
    line = LineCost(1e-3, 1e-10)
    assert lina(1, line, 1_000_000) == pytest.approx(line(1_000_000))
    assert lina(4, line, 1_000_000) == pytest.approx(line(4_000_000))


def test_pieces_of_one_layer_go_at_the_end_one_by_one() -> None:
    """No gradient exists before the only layer's backward ends. Two pieces and the rest follow, each with its
    alpha.
    """
    line = LineCost(1e-3, 1e-10)
    assert lina(1, line, 2 * LINA_BYTES + 5) == pytest.approx(2 * line(LINA_BYTES) + line(5))


def test_pieces_shorter_than_what_hides_them_cost_nothing_but_the_last_layers() -> None:
    line = LineCost(0.0, 1e-14)
    whole = 8 * LINA_BYTES * 1e-14
    assert lina(8, line, LINA_BYTES) == pytest.approx(whole / 8)


def test_pieces_longer_than_what_hides_them_delay_the_pass_and_none_is_lost() -> None:
    """Pieces of a fixed size take a second each. They are sent whole, so that little of them is hidden."""
    line = LineCost(1.0, 0.0)
    added = lina(8, line, LINA_BYTES)
    assert 7.5 < added <= 8


def test_fixed_pieces_hit_or_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT2-XL's layers have 10 MB of gradients on Testbed B: pieces smaller than 30 MB would start sooner."""
    testbed = TESTBEDS["B, Table 2"]
    layer = XL.layer(256)
    costs, dense = moe_costs(layer, testbed), attention(layer, testbed)
    arguments = (XL.layers, costs, dense, tutel_degree(costs), testbed, layer.gradient_bytes(testbed))
    fixed = lina_seconds(*arguments)
    monkeypatch.setattr(fsmoe_models, "LINA_BYTES", 5_000_000)
    assert lina_seconds(*arguments) < 0.9 * fixed


# ---- figures


def test_a_step_in_stages_by_hand() -> None:
    """3 micro-batches on 2 stages take 4 times the passes of a stage, and the gradients once."""
    assert ModelStep(2.0, 0.5).staged(2, 3) == 8.5
    assert ModelStep(2.0, 0.5).staged(1, 1) == ModelStep(2.0, 0.5).seconds


def test_rows_are_speed_ups_over_deepspeed() -> None:
    row = next(row for row in figure6() if (row["testbed"], row["model"]) == ("B, Fig. 5", "Mixtral-7B"))
    steps = model_steps(MIXTRAL, 256, TESTBED_B)
    assert row["FSMoE"] == pytest.approx(steps["DeepSpeed-MoE"].seconds / steps["FSMoE"].seconds)
    assert [name for name in row if name not in ("testbed", "model")] == list(steps)[1:]
    assert {(row["testbed"][0], row["model"]) for row in figure6()} == {
        ("A", "GPT2-XL"), ("A", "Mixtral-7B"), ("A", "Mixtral-22B"), ("B", "GPT2-XL"), ("B", "Mixtral-7B")
    }  # fmt: skip


def test_more_tokens_gain_more() -> None:
    """Fig. 7: with more tokens, the fixed seconds of a chunk and the gradients are a smaller share."""
    for model in ("Mixtral-7B", "Mixtral-22B"):
        gains = {row["L"]: row["FSMoE"] for row in figure7() if row["model"] == model and row["GPUs"] == 48}
        assert gains[512] < gains[1024] < gains[2048]


def test_micro_batches_make_gradients_weigh_less() -> None:
    """Fig. 8: with stages, systems that only move gradients gain less over Tutel than without."""
    gained = statistics.fmean(row["Tutel-Improved"] / row["Tutel"] for row in figure8())
    of_a = [row for row in figure6() if row["testbed"][0] == "A"]
    assert 1 <= gained < statistics.fmean(row["Tutel-Improved"] / row["Tutel"] for row in of_a)


def test_means_are_those_of_the_rows_beside_the_papers() -> None:
    rows = [{"FSMoE": 2.0, "Tutel": 1.0}, {"FSMoE": 3.0, "Tutel": 2.0}]
    (over_deepspeed, over_tutel) = means({"7, L = 512, P = 48": rows})
    assert (over_deepspeed["here"], over_deepspeed["paper"]) == (2.5, 2.17)
    assert (over_tutel["here"], over_tutel["paper"]) == (1.75, 1.17)


def test_the_pages_table_is_what_is_simulated() -> None:
    lines = (ROOT / "docs" / "fsmoe_table5.md").read_text(encoding="utf-8").splitlines()
    words = {"6, A and B": "6, both testbeds", "8": "8, two stages"}
    by_figure: dict[str, dict[str, str]] = {}
    for row in tables()["means"]:
        figure = words.get(row["figure"], row["figure"].replace("P = ", "") + " GPUs")
        by_figure.setdefault(figure, {})[row["over"]] = f"{row['here']:.2f} ({row['paper']:.2f})"
    over = ("DeepSpeed-MoE", "Tutel", "Tutel-Improved", "PipeMoE+Lina", "FSMoE-No-IIO")
    assert len(by_figure) == 7
    for figure, cells in by_figure.items():
        shown = "".join(f" {cells[name]} |" if name in cells else " |" for name in over)
        assert f"| {figure} |{shown}" in lines


def test_what_the_output_says_of_the_figures_follows() -> None:
    why = assumptions("fsmoe, why")
    found = tables()
    assert list(found) == ["figure6", "figure7", "figure8", "means"]
    here = {row["over"]: row for row in found["means"] if row["figure"] == "6, A and B"}
    iio = here["FSMoE-No-IIO"]
    assert f"FSMoE is {iio['here']:.2f} times as fast" in why["Fig. 6 to 8"]
    of_six = [row for row in found["figure6"] if row["testbed"] != "B, Fig. 5"]
    one_lane = statistics.fmean(row["FSMoE-No-IIO"] / row["Tutel"] for row in of_six)
    assert f"is {one_lane:.2f} times as fast as Tutel" in why["Fig. 6 to 8"]
    assert f"about {here['Tutel']['paper'] / iio['paper']:.2f} times" in why["Fig. 6 to 8"]
    gains = [row["FSMoE"] for name in ("figure6", "figure7", "figure8") for row in found[name]]
    assert f"the model {min(gains):.1f} to {max(gains):.1f}" in why["DeepSpeed-MoE"]
    rows = {(row["testbed"], row["model"]): row for row in found["figure6"]}
    xl, mixtral = (rows["B, Table 2", name] for name in ("GPT2-XL", "Mixtral-7B"))
    assert xl["PipeMoE+Lina"] == pytest.approx(xl["Tutel"], rel=0.01)
    assert f"gains {100 * (xl['Tutel-Improved'] / xl['Tutel'] - 1):.0f} %" in why["Lina"]
    assert mixtral["PipeMoE+Lina"] > mixtral["Tutel-Improved"]
    assert rows["A, Table 2", "GPT2-XL"]["PipeMoE+Lina"] == pytest.approx(1.0, abs=0.01)
