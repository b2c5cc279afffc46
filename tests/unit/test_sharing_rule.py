"""Both rules of the grouped product pick what the stored times of an H200 say is faster.

The rules: which operand two neighbouring blocks share (cuda/grouped_gemm/sharing.h), and whether a first
product gathers its rows in its load (`gathers_in_load`).

Letters: N rows, M = d_model, H = d_hidden, G = 2H columns of the gated hidden, K choices of a token.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pmoe.kernels import extension
from pmoe.kernels.gemm import FORWARD, INPUT, WEIGHT
from pmoe.kernels.grouped_gemm import RowSlots, launch, products
from pmoe.kernels.grouped_gemm.launch import PERMUTED_COLUMNS, gathers_in_load
from tests.emulated import load_kernels

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
NONE, B, A = 1, 2, 3
COLUMN = {NONE: "alone", B: "share B", A: "share A"}


def stored(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}_nvidia_h200.json").read_text(encoding="utf-8"))
    return document


def sizes_of(model: dict[str, Any], product: str) -> dict[str, Any]:
    """Returns the arguments of the rule for a stored product: its form and the sizes of its result."""
    d_model, d_hidden = model["d_model"], model["d_hidden"]
    num_in, num_out = (d_model, d_hidden) if product.startswith("up") else (d_hidden, d_model)
    if "weight gradient" in product:
        return {"form": WEIGHT, "m": num_out, "n": num_in}
    if "input gradient" in product:
        return {"form": INPUT, "n": num_in}
    if product == "gradient of the gated hidden":
        return {"form": INPUT, "n": d_hidden}
    if product.startswith("gated hidden"):
        return {"form": FORWARD, "n": 2 * d_hidden, "a_gathered": product.endswith("gathered")}
    return {"form": FORWARD, "n": num_out}


def picks(kernels: Path) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """Yields (model, product, operand that the rule shares, stored row)."""
    module = load_kernels(kernels)
    for document in stored("grouped_gemm")["models"]:
        for row in document["rows"]:
            operand = module.grouped_gemm_sharing(**sizes_of(document["model"], row["product"]))
            yield document["model"]["name"], row["product"], operand, row


def old_pick(model: dict[str, Any], row: dict[str, Any]) -> float:
    """Returns the milliseconds of the rule before this one, which the row's column "ms" timed again."""
    sizes = sizes_of(model, row["product"])
    rows = sizes["m"] if sizes["form"] == WEIGHT else 16384 // model["experts"]
    tiles = -(-sizes["n"] // 256)
    if rows >= 1024:
        return float(row["share B"])
    pairs = not sizes.get("a_gathered") and (tiles % 2 == 0 or tiles >= 7)
    return float(row["share A" if pairs else "alone"])


def test_the_rule_is_close_to_the_fastest_of_every_stored_row(kernels: Path) -> None:
    for model, product, operand, row in picks(kernels):
        fastest = min(row[name] for name in COLUMN.values())
        assert row[COLUMN[operand]] <= 1.027 * fastest, (model, product, COLUMN[operand])


def test_the_rule_saves_time_beside_the_rule_before_it(kernels: Path) -> None:
    """2 to 5 % of the products that shared B, and nothing is lost where B stays."""
    models = {each["model"]["name"]: each["model"] for each in stored("grouped_gemm")["models"]}
    ratios = {"other": list[float](), "weight": list[float]()}
    for model, product, operand, row in picks(kernels):
        kind = "weight" if "weight gradient" in product else "other"
        ratios[kind].append(old_pick(models[model], row) / row[COLUMN[operand]])
    assert statistics.geometric_mean(ratios["other"]) > 1.02
    assert 1.0 <= statistics.geometric_mean(ratios["weight"]) < 1.02


@pytest.mark.parametrize(
    ("sizes", "operand"),
    [
        ({"form": WEIGHT, "m": 256, "n": 100}, B),  # two tiles below each other
        ({"form": WEIGHT, "m": 129, "n": 100}, B),
        ({"form": WEIGHT, "m": 128, "n": 512}, A),
        ({"form": WEIGHT, "m": 384, "n": 768}, NONE),
        ({"form": FORWARD, "n": 512}, A),
        ({"form": FORWARD, "n": 25 * 256}, NONE),
        ({"form": FORWARD, "n": 512, "a_gathered": True}, NONE),
        ({"form": INPUT, "n": 257}, A),
        ({"form": INPUT, "n": 256}, NONE),
    ],
)
def test_which_operand_is_shared(sizes: dict[str, Any], operand: int, kernels: Path) -> None:
    assert load_kernels(kernels).grouped_gemm_sharing(**sizes) == operand


# ---- gather or permute


def permute_seconds(rows: int, d_model: int, top_k: int) -> float:
    """Returns the time of a permute: rows / K tokens are read, all rows are written."""
    rate = stored("permute")["scenarios"][0]["rows"][0]["GB/s"] * 1e9
    return 2 * rows * d_model * (1 + 1 / top_k) / rate


def test_the_rule_gathers_until_a_permute_costs_less_by_the_stored_times() -> None:
    """Each model says at how many columns (1 + 1 / K) both cost the same: they agree to 11 %."""
    equal = []
    for document in stored("grouped_gemm")["models"]:
        model = document["model"]
        times = {row["product"]: row["alone"] / 1e3 for row in document["rows"]}
        lost = times["gated hidden, gathered"] - times["gated hidden"]
        moved = permute_seconds(16384, model["d_model"], model["top_k"])
        equal.append(2 * model["d_hidden"] * moved / lost / (1 + 1 / model["top_k"]))
    assert max(equal) < 1.11 * min(equal)
    assert min(equal) < PERMUTED_COLUMNS < max(equal)


@pytest.mark.parametrize(("name", "saved"), [("Mixtral", 0.07), ("Phi-3.5-MoE", 0.07)])
def test_both_rules_together_save_a_tenth_of_a_wide_first_product(name: str, saved: float) -> None:
    """The stored times are those of gathered rows with a shared B, and of a permute before a product."""
    [document] = [each for each in stored("grouped_gemm")["models"] if each["model"]["name"] == name]
    model = document["model"]
    rows = {row["product"]: row for row in document["rows"]}
    assert not gathers_in_load("sm_90a", 2 * model["d_hidden"], model["top_k"])
    permute_ms = 1e3 * permute_seconds(16384, model["d_model"], model["top_k"])
    after = permute_ms + rows["gated hidden"]["share A"]
    assert saved < 1 - after / rows["gated hidden, gathered"]["ms"] < 0.12


def test_both_ways_give_the_same_bits(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run in the emulator: 6 tokens, 2 choices of each, 2 experts, the first of 5 rows."""
    module = load_kernels(kernels)
    module.stub_reset()
    gathered: list[bool] = []

    def launch_product(**fields: Any) -> None:
        gathered.append(fields["a_gathered"])
        module.grouped_gemm(**{**fields, "device": 0})

    monkeypatch.setattr(extension, "load", lambda: SimpleNamespace(grouped_gemm=launch_product))
    monkeypatch.setattr(products, "path_for", lambda device, dtype, **columns: "sm_90a")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    generator = torch.Generator().manual_seed(0)
    x_TM = torch.randn(6, 64, generator=generator).bfloat16()
    w1 = torch.randn(2, 64, 64, generator=generator).bfloat16()
    position_TK = torch.randperm(12, generator=generator).view(6, 2).int()
    slot_N = position_TK.view(-1).argsort().int()
    slots = RowSlots(slot_N, 2, position_TK)
    ends_E = torch.tensor([5, 12], dtype=torch.int32)
    found = []
    for forced in (True, False):
        monkeypatch.setattr(launch, "GATHERING", forced)
        found.append(products.hidden(x_TM, w1, ends_E, activation="swiglu", slots=slots))
    assert gathered == [True, False]
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    rows = x_TM.index_select(0, slot_N.long() // 2).float()
    expected = torch.cat([rows[:5] @ w1[0].float().t(), rows[5:] @ w1[1].float().t()])
    assert found[0][0] is not None
    torch.testing.assert_close(found[0][0].float(), expected, rtol=2**-7, atol=2**-6)


def test_the_code_for_sm_80_gathers_and_a_benchmark_forces_either(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gathers_in_load("sm_80", 1 << 16, 2) and not gathers_in_load("sm_90a", 1 << 16, 2)
    for forced in (True, False):
        monkeypatch.setattr(launch, "GATHERING", forced)
        assert gathers_in_load("sm_90a", 64, 2) is gathers_in_load("sm_80", 1 << 16, 2) is forced
