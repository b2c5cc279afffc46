"""The command pmoe: its output, its errors, and that its results are those of the library."""

from __future__ import annotations

import html
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pmoe
from pmoe import MoELayer, Restore, cli
from pmoe.call.sizes import memory_shape
from pmoe.cli import plan
from pmoe.integrations.run_folder import SCALARS, Row, append
from pmoe.kernels import extension, status
from pmoe.measure.profile import load_profile, profile_path, save_profile
from pmoe.papers.mpipemoe_memory import theory
from pmoe.planner.cluster_candidates import plan_combinations
from pmoe.planner.degree import DEGREES, Choice, all_choices
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.priced_choices import bound
from pmoe.planner.profile import Profile
from pmoe.planner.trial_memory import searching_peak
from pmoe.schedule.restore import ALL_PAIRS, NARROW_PAIRS, STRATEGIES
from tests.unit.test_profile import MADE

ROOT = Path(__file__).resolve().parents[2]

LAYER = ["--d-model", "16", "--d-hidden", "64", "--num-experts", "8", "--tokens", "512"]


def run(*argv: str) -> None:
    assert cli.main(argv) == 0


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """Runs a command with --json, and returns the one JSON object that it prints."""
    run(*argv, "--json")
    out = capsys.readouterr().out
    assert out.endswith("}\n")
    assert out.count("\n") == 1
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with one profile, of 4 ranks in float32, and a file that is not pmoe's."""
    folder = tmp_path / "cache"
    save_profile(MADE, profile_path(MADE, folder))
    (folder / "trials.json").write_text('{"something": "else"}')
    return folder


# ---- memory ---------------------------------------------------------------------------------------


def test_the_paper_example_prints_eq_1_to_6(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--d-model", "2048", "--d-hidden", "8192", "--num-experts", "64", "--tokens", "16384"]
    sizes += ["--n", "8"]
    numbers = printed(capsys, "memory", "--theory", *sizes)
    code = numbers.pop("python")
    assert numbers == theory(B=16384, M=2048, H=8192, E=64, n=8)
    assert list(numbers) == [
        "model_states",
        "activations",
        "buffers",
        "activations_pipelined",
        "buffers_pipelined",
        "saved",
        "saving_ratio",
    ]
    assert numbers["saved"] == 335_544_320
    run("memory", "--theory", *sizes)
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"Eq\. 5 +saved .* 335,544,320$", "\n".join(lines), re.MULTILINE)
    equations = ["Eq. 1", "Eq. 2", "Eq. 3", "Eq. 4", "Eq. 4", "Eq. 5", "Eq. 6"]
    assert [line[:5] for line in lines[2:-2]] == equations
    assert lines[-1].strip() == code and code.endswith("pipeline=8, memory_reuse=True)")


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shape_from_sizes_is_that_of_the_layer(expert: str, bias: bool, dtype: torch.dtype) -> None:
    layer = MoELayer(16, 64, 8, 2, expert=expert, bias=bias, dtype=dtype, memory_reuse=True)
    assert sizes_from_options(16, 64, 8, top_k=2, expert=expert, bias=bias, dtype=dtype) == memory_shape(
        layer.layer_modules
    )


def test_memory_prints_what_the_layer_predicts_for_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "memory", *LAYER, "--n", "4", "--n-backward", "2", "--top-k", "2")
    assert [row["restore"] for row in found["pairs"]] == [str(pair) for pair in ALL_PAIRS]
    layer = MoELayer(16, 64, 8, 2, pipeline=4, pipeline_backward=2, memory_reuse="S4")
    for row in found["pairs"]:
        memory = layer.predict_memory(512, memory_reuse=Restore(*row["restore"].split("/")))
        for name in ("saved", "temporary", "gradients", "host", "peak", "promised", "tensors"):
            assert row[name] == getattr(memory, name), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("pair", ["S4", "keep/recompute"])
def test_memory_says_for_which_device_and_ends_with_a_layer_to_copy(
    device: str, pair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("memory", *LAYER, "--device", device, "--memory-reuse", pair, "--n", "2")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert f"tokens a rank, on {device}, n = 2" in first
    layer = eval(last, {"pmoe": pmoe, "torch": torch})
    assert (layer.d_model, layer.pipeline) == (16, 2)
    assert layer.memory_reuse in (Restore("keep", "recompute"), Restore("communicate", "recompute"))


def test_the_layer_to_copy_is_the_one_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--n", "4", "--n-backward", "2", "--slack", "2", "--memory-reuse", "S4"]
    found = printed(capsys, "memory", *LAYER, *options, "--measure")
    assert found["device"] == "cpu"
    layer = eval(found["python"], {"pmoe": pmoe, "torch": torch})
    assert (layer.pipeline, layer.pipeline_backward, layer.slack) == (4, 2, 2)
    (row,) = found["pairs"]
    assert layer.predict_memory(512).promised == row["promised"]
    run("memory", *LAYER, *options, "--measure")
    assert capsys.readouterr().out.splitlines()[-1].strip() == found["python"]


def test_the_forms_of_rows_are_those_of_the_layer(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    wires = ["--ranks", "4", "--wire", "e4m3", "--wire-backward", "bfloat16"]
    found = printed(capsys, "memory", *LAYER, *wires, "--n", "8", "--memory-reuse", "S4")
    (row,) = found["pairs"]
    shape = sizes_from_options(16, 64, 8, num_ranks=4, wire="e4m3", wire_backward="bfloat16")
    memory = bound(shape, shape.call(512), Choice(forward=8, backward=8, restore=STRATEGIES["S4"]), 1.25)
    assert row["promised"] == memory.promised
    layer = eval(found["python"], {"pmoe": pmoe, "torch": torch})
    assert (layer.wire, layer.wire_backward) == ("e4m3", "bfloat16")
    planned = printed(capsys, "plan", *LAYER, *wires, "--folder", str(folder))
    plain = printed(capsys, "plan", *LAYER, *wires[:2], "--folder", str(folder))
    assert planned["decision"]["seconds"] < plain["decision"]["seconds"]
    assert "wire='e4m3', wire_backward='bfloat16'" in planned["python"] and "wire" not in plain["python"]
    narrow = printed(capsys, "plan", *LAYER, "--ranks", "4", "--d-latent", "4", "--folder", str(folder))
    wide = printed(capsys, "plan", *LAYER, "--ranks", "4", "--folder", str(folder))
    assert narrow["decision"]["seconds"] < wide["decision"]["seconds"]
    assert "d_latent=4" in narrow["python"] and "d_latent" not in wide["python"]
    message = refused(capsys, "memory", *LAYER, "--ranks", "4", "--wire", "e4m3", "--dtype", "float64")
    assert "wire ('e4m3') must be None for rows of torch.float64" in message


def test_a_plan_takes_pairs_of_fewer_bytes_only_if_they_are_allowed(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    layer = [*LAYER, "--ranks", "4", "--wire", "e4m3", "--folder", str(folder)]
    plain = printed(capsys, "plan", *layer)
    allowed = printed(capsys, "plan", *layer, "--allow", "e4m3")
    assert {row["restore"] for row in plain["candidates"]} == {str(pair) for pair in ALL_PAIRS}
    narrow = {row["restore"] for row in allowed["candidates"]} - {str(pair) for pair in ALL_PAIRS}
    assert narrow == {str(pair) for pair in NARROW_PAIRS}
    assert (plain["allow"], allowed["allow"]) == (None, "e4m3")
    found = eval(allowed["python"], {"pmoe": pmoe, "torch": torch})
    assert str(found.restore) == allowed["decision"]["restore"] and found.allow is None


def test_memory_says_the_peak_of_a_step_that_searches(capsys: pytest.CaptureFixture[str]) -> None:
    """Before, it said only the peak of later steps, although trials may need a little more."""
    layer = ["--d-model", "64", "--d-hidden", "4096", "--num-experts", "8", "--tokens", "4096"]
    options = [*layer, "--n", "16", "--memory-reuse", "S4"]
    (row,) = printed(capsys, "memory", *options, "--ranks", "4")["pairs"]
    shape = sizes_from_options(64, 4096, 8, num_ranks=4)
    call = shape.call(4096)
    tried = [
        bound(shape, call, choice, 1.25)
        for choice in all_choices([(n, n) for n in DEGREES], [STRATEGIES["S4"]])
    ]
    assert row["searching_peak"] == searching_peak(tried[-1], shape, call, tried)
    assert row["peak"] < row["searching_peak"] <= 1.1 * row["peak"]
    run("memory", *options, "--ranks", "4")
    out = capsys.readouterr().out
    assert "searching peak" in out and "of a step that finds n or the pair by trials" in out
    assert f"{row['searching_peak'] / 2**20:,.2f}" in out
    for few in (
        ["--ranks", "1"],  # such layers run no trials
        ["--ranks", "4", "--tokens", "2047"],
        ["--ranks", "4", "--n", "3"],  # no trial has this n
        ["--ranks", "4", "--n-backward", "5"],
    ):
        (row,) = printed(capsys, "memory", *options, *few)["pairs"]
        assert row["searching_peak"] == row["peak"]
        run("memory", *options, *few)
        assert "searching" not in capsys.readouterr().out


def test_memory_of_one_pair_on_several_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "memory", *LAYER, "--ranks", "4", "--n", "8", "--memory-reuse", "S3")
    (row,) = found["pairs"]
    shape = sizes_from_options(16, 64, 8, num_ranks=4)
    memory = bound(shape, shape.call(512), Choice(forward=8, backward=8, restore=STRATEGIES["S3"]), 1.25)
    assert (row["restore"], row["strategy"]) == ("offload/recompute", "S3")
    assert (row["peak"], row["promised"], row["host"]) == (memory.peak, memory.promised, memory.host)
    run("memory", *LAYER, "--memory-reuse", "keep/recompute")
    out = capsys.readouterr().out
    assert "keep/recompute" in out
    assert "offload" not in out
    assert "forward buffers" in out


def test_memory_counts_experts_that_are_gathered_from_their_copies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ("memory", *LAYER, "--n", "2", "--memory-reuse", "S4")
    whole = printed(capsys, *common)["pairs"][0]
    found = printed(capsys, *common, "--shard-experts", "4")
    sharded = found["pairs"][0]
    experts = found["kept"] * 4
    assert sharded["tensors"]["gathered experts"] == 2 * experts
    assert sharded["forward_peak"] - whole["forward_peak"] == 2 * experts
    assert sharded["backward_peak"] - whole["backward_peak"] == experts
    assert whole["gradients"] - sharded["gradients"] == experts - experts // 4
    run(*common, "--shard-experts", "4")
    assert "that each of 4 ranks keeps of these experts: parameters" in capsys.readouterr().out
    message = refused(capsys, *common, "--shard-experts", "4", "--measure")
    assert "--shard-experts (4) must be 0 with --measure" in message


def test_memory_measures_beside_what_it_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--d-model", "64", "--d-hidden", "256", "--num-experts", "4", "--tokens", "512", "--n", "2"]
    found = printed(capsys, "memory", *sizes, "--measure", "--memory-reuse", "S1")
    (row,) = found["pairs"]
    assert row["measured"]["peak"] <= row["peak"]
    assert row["measured"]["peak"] == pytest.approx(row["predicted"]["peak"], rel=0.02)
    assert row["measured"]["host"] == pytest.approx(row["predicted"]["host"], abs=16 * 256)
    run("memory", *sizes, "--measure", "--memory-reuse", "S4")
    assert "measured peak" in capsys.readouterr().out


# ---- plan -----------------------------------------------------------------------------------------


def test_plan_without_a_budget_takes_a_strategy_by_eq_10(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, "plan", *LAYER, "--ranks", "4", "--folder", str(folder))
    assert len(found["candidates"]) == 5 * 9
    named = [each for each in found["candidates"] if each["strategy"]]
    decision = found["decision"]
    assert decision["eq10_seconds"] == min(each["eq10_seconds"] for each in named)
    same = [each["seconds"] for each in named if each["strategy"] == decision["strategy"]]
    assert decision["seconds"] == min(same)
    assert found["fastest"]["seconds"] == min(each["seconds"] for each in found["candidates"])
    assert found["profile"]["path"] == str(profile_path(MADE, folder))
    run("plan", *LAYER, "--ranks", "4", "--folder", str(folder))
    out = capsys.readouterr().out
    assert out.count("<-") == 1
    assert f"decision: n={decision['n']} {decision['restore']}: " in out
    assert out.endswith(f"pipeline={decision['n']}, memory_reuse={decision['strategy']!r})\n")
    assert out.splitlines()[-1].strip() == found["python"] and found["device"] == "cpu"


def test_plan_counts_copies_of_busy_experts_and_says_when_they_pay(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["plan", *LAYER, "--ranks", "4", "--folder", str(folder)]
    plain = printed(capsys, *common)
    found = printed(capsys, *common, "--balance", "2")
    assert (plain["balance"], plain["copy_price_rows"]) == (0, None)
    # With copies, buffers hold fewer rows and the copies' weights, so the bytes are others.
    for with_copies, without in zip(found["candidates"], plain["candidates"], strict=True):
        assert with_copies["promised_bytes"] != without["promised_bytes"]
    near, far = found["copy_price_rows"]
    assert near == far > 0
    assert "balance=2" in found["python"] and "balance" not in plain["python"]
    run(*common, "--balance", "2")
    lines = capsys.readouterr().out
    assert f"a copy of a busy expert pays if it saves the busiest rank more than {near} rows;" in lines
    message = refused(capsys, *common, "--balance", "7")
    assert "--balance (7) must be at most 6, the number of experts of the other ranks" in message
    assert "--balance (-1) must be" in refused(capsys, *common, "--balance", "-1")


def test_plan_prices_copies_that_later_calls_use() -> None:
    """S4 sends weights again, but not those of copies that later calls use: 2 messages in place of 3."""
    layer = {"d_model": 16, "d_hidden": 64, "num_experts": 8, "dtype": torch.float32}
    (advice,) = plan_combinations(MADE, layer, 512, copies=2)
    of_s4 = [choice for choice in advice.candidates if choice.restore == STRATEGIES["S4"]]
    advice = replace(advice, decision=of_s4[0])
    once, kept = (plan._copy_prices(advice, MADE, stay=stay) for stay in (False, True))
    assert kept == pytest.approx([price * 2 / 3 for price in once], abs=1)
    fields = {"balance": 2, "copy_price_rows": once, "kept_copy_price_rows": kept}
    _, of_later = plan._about_copies(fields)
    assert f"saves the busiest rank more than {kept[0]} rows; the later calls pay nothing for it" in of_later


def test_plan_within_a_budget_keeps_no_copies_in_its_price_and_its_python_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its line had no budget: that layer keeps copies for later calls, whose bytes the plan did not count."""
    common = ["plan", *LAYER, "--ranks", "4", "--folder", str(folder), "--balance", "2"]
    found = printed(capsys, *common, "--budget", "1GiB")
    assert found["kept_copy_price_rows"] is None
    assert "balance=2" in found["python"] and f"memory_budget={2**30}" in found["python"]
    run(*common, "--budget", "1GiB")
    lines = capsys.readouterr().out
    assert "pays if it saves the busiest rank more than" in lines and "later calls" not in lines
    assert "memory_budget" not in printed(capsys, *common)["python"]


def test_plan_within_a_budget_takes_the_fastest_that_holds_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["plan", *LAYER, "--ranks", "4", "--profile", str(profile_path(MADE, folder))]
    everything = printed(capsys, *common)["candidates"]
    sizes = sorted(each["promised_bytes"] for each in everything)
    for budget in (sizes[0], sizes[len(sizes) // 2], sizes[-1]):
        found = printed(capsys, *common, "--budget", str(budget))
        fitting = [each for each in everything if each["promised_bytes"] <= budget]
        assert found["decision"]["promised_bytes"] <= budget
        assert found["decision"]["seconds"] == min(each["seconds"] for each in fitting)
        assert sum(each["fits"] for each in found["candidates"]) == len(fitting)
    message = refused(capsys, *common, "--budget", str(sizes[0] - 1), "--json")
    assert f"--budget ({sizes[0] - 1} bytes) must be at least {sizes[0]}" in message


def test_plan_without_a_fitting_profile_says_what_there_is_and_how_to_measure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, "plan", *LAYER, "--ranks", "2", "--folder", str(folder))
    assert "no profile fits 2 ranks and float32" in message
    assert f"{MADE.device}, 4 ranks over gloo, float32" in message
    assert "trials" not in message
    assert "torchrun --nproc-per-node 2 -m pmoe profile --dtype float32" in message
    other = replace(MADE, device="Abacus 4000")
    save_profile(other, profile_path(other, folder))
    message = refused(capsys, "plan", *LAYER, "--ranks", "4", "--folder", str(folder))
    assert "2 profiles fit" in message
    assert "--profile FILE" in message
    assert "python -m pmoe profile" in refused(capsys, "plan", *LAYER, "--folder", str(folder / "none"))


def test_the_page_is_one_file_with_pictures_and_every_candidate(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    run("plan", *LAYER, "--ranks", "4", "--folder", str(folder), "--budget", "1GiB", "--html", str(page))
    assert f"wrote {page}" in capsys.readouterr().out
    text = page.read_text()
    assert text.count("<svg ") == 2 and "numbers: n; ringed: the decision; dashed: the budget</text>" in text
    assert all(each.startswith("#") for each in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert not re.search(r"https?:|<script|@import|<link", text)
    assert text.count("<tr") == 1 + 5 * 9
    assert text.count('<tr class="marked">') == 1
    code = re.findall(r"<pre[^>]*>(.*)</pre>\s*</body>", text)[0]  # the last thing on it
    layer = eval(html.unescape(code), {"pmoe": pmoe, "torch": torch})
    assert layer.pipeline in (1, 2, 4, 8, 16) and "on cpu" in text


# ---- profile --------------------------------------------------------------------------------------


def test_profile_stores_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measured(ranks: Any, device: torch.device, dtype: torch.dtype, *, quick: bool) -> Profile:
        asked.append((ranks.size, device.type, dtype, quick))
        return replace(MADE, num_ranks=ranks.size, backend="none", dtype="bfloat16")

    monkeypatch.setattr(cli.profile, "measure", measured)
    file = tmp_path / "new" / "profile.json"
    options = ["--quick", "--dtype", "bfloat16", "--device", "cpu"]
    found = printed(capsys, "profile", *options, "--out", str(file))
    assert asked == [(1, "cpu", torch.bfloat16, True)]
    assert found["path"] == str(file)
    assert found["interference"]["eta_all"] == load_profile(file).interference.eta_all == 0.1 + 0.2
    run("profile", *options, "--folder", str(tmp_path / "cache"))
    out = capsys.readouterr().out
    assert re.search(r"compute +G multiply-adds / s +30", out)
    assert re.search(r"speed of .*beside compute", out)
    (stored,) = (tmp_path / "cache").iterdir()
    assert f"wrote {stored}" in out
    sizes = ["--d-model", "16", "--d-hidden", "64", "--num-experts", "8", "--tokens", "512"]
    run("plan", *sizes, "--dtype", "bfloat16", "--folder", str(tmp_path / "cache"))


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv, told",
    [
        (["memory", *LAYER, "--n", "0"], "argument --n: '0' must be a whole number of at least 1"),
        (["memory", *LAYER[:-1], "many"], "argument --tokens: 'many' must be a whole number"),
        (["memory", *LAYER, "--slack", "0.5"], "argument --slack: '0.5' must be a number of at least 1"),
        (["memory", *LAYER, "--top-k", "9"], "top_k (9) must be at most num_experts (8)"),
        (["memory", *LAYER, "--ranks", "3"], "num_experts (8) must be divisible by num_ranks (3)"),
        (["memory", *LAYER, "--n", "2000"], "--n (2000) must be at least 1, and at most 1024"),
        (["memory", *LAYER, "--n", "32", "--n-backward", "9"], "--n-backward (9) must divide --n (32)"),
        (["memory", *LAYER, "--memory-reuse", "S5"], "argument --memory-reuse: 'S5' must be one of S1,"),
        (["memory", *LAYER, "--ranks", "2", "--measure"], "--ranks (2) must be 1 with --measure"),
        (["memory", *LAYER, "--device", "meta"], "--device ('meta') must be cpu or cuda"),
        (["memory", *LAYER, "--device", "abacus"], "--device ('abacus') must be cpu or cuda"),
        (["memory", *LAYER, "--device", "gpu"], "--device ('gpu') must be cpu or cuda: did you mean cuda?"),
        (["profile", "--device", "cudaa"], "--device ('cudaa') must be cpu or cuda: did you mean cuda?"),
        (["memory", *LAYER, "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["memory", "--d-model", "4"], "the following arguments are required: --d-hidden"),
        (["plan", *LAYER, "--budget", "much"], "argument --budget: value ('much') must be a number of bytes"),
        (["plan", *LAYER, "--profile", "/no/such"], "--profile (/no/such) must be a file to read"),
        (["plan", *LAYER, "--profile", __file__], "must hold a profile"),
        (["profile", "--device", "cuda:99"], "--device ('cuda:99') must exist: torch sees"),
        (["plans"], "unknown command 'plans': did you mean plan?"),
        (["memroy", *LAYER], "unknown command 'memroy': did you mean memory?"),
        (["train"], "unknown command 'train': must be memory or plan or profile or"),
        (["--verison"], "unknown option --verison: did you mean --version?"),
        (
            ["memory", "--d-modle", "4"],
            "pmoe memory: error: unknown option --d-modle: did you mean --d-model?",
        ),
        (["memory", *LAYER, "--no-bais"], "unknown option --no-bais: did you mean --no-bias?"),
        (["memory", *LAYER, "--colour=red"], "unknown option --colour (see pmoe memory --help)"),
        (
            ["memory", *LAYER, "--dtype", "bfloat61"],
            "'bfloat16', 'float16', 'float64'): did you mean bfloat16?",
        ),
        (["simulate", "lancte"], "did you mean lancet?"),
        ([], "required: memory | plan | profile"),
    ],
)
def test_bad_arguments_are_named_with_value_and_rule(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, *argv)
    assert told in error
    assert len(error.splitlines()) == 1  # no usage


@pytest.mark.parametrize(
    "text, name",
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("fp16", "float16"),
        ("torch.bfloat16", "bfloat16"),
        ("fp32", "float32"),
    ],
)
@pytest.mark.parametrize("command", ["memory", "plan", "profile"])
def test_a_dtype_has_its_short_name_too(command: str, text: str, name: str) -> None:
    layer = [] if command == "profile" else LAYER
    assert cli.build_parser().parse_args([command, *layer, "--dtype", text]).dtype == name
    assert cli.build_parser().parse_args([command, *layer, f"--dtype={name}"]).dtype == name


def test_an_option_may_be_cut_short_and_a_value_may_start_with_a_dash() -> None:
    args = cli.build_parser().parse_args(["memory", *LAYER, "--mem", "S4", "--device", "-- no such"])
    assert (str(args.memory_reuse), args.device) == ("communicate/recompute", "-- no such")


def test_plan_refuses_a_given_profile_of_other_ranks_or_dtype(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--profile", str(profile_path(MADE, folder))]
    assert f"--ranks (2) must be the number of ranks in {given[1]} (4)" in refused(
        capsys, "plan", *LAYER, "--ranks", "2", *given
    )
    wrong = ["--ranks", "4", "--dtype", "float64", *given]
    assert "--dtype (float64) must be the dtype of --profile" in refused(capsys, "plan", *LAYER, *wrong)
    page = ["--ranks", "4", *given, "--html", str(folder / "no" / "page.html")]
    assert "must be a file to write" in refused(capsys, "plan", *LAYER, *page)


# ---- simulate -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulate_prints_table_5_as_a_table_with_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "simulate", "fsmoe")
    run("simulate", "fsmoe")
    out = capsys.readouterr().out
    (mean, _) = (row["mean"] for row in found["systems"] if row["system"] == "FSMoE")
    assert re.search(rf"FSMoE +1\.00 +{mean:.2f} .* 1\.22$", out, re.MULTILINE)
    assert re.search(r"FSMoE +1\.25 ", out)
    assert re.search(rf"^1458 +{found['degrees'][0]['differing']} +780 +912$", out, re.MULTILINE)
    assert re.search(r"Mixtral-7B +backward +Experts +119\.7 ", out)


def test_simulate_tells_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    assumed = printed(capsys, "simulate", "fsmoe", "--assumptions")
    assert "contention" in assumed
    run("simulate", "fsmoe", "--assumptions")
    out = capsys.readouterr().out
    words = " ".join(out.split())
    for name, told in assumed.items():
        assert f"{name} {told}" in words
    assert max(map(len, out.splitlines())) <= 110


def test_an_experiments_old_name_works_and_says_the_new_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pmoe.warn.GIVEN", set())
    with pytest.warns(FutureWarning, match="the experiment fsmoe-table5 is called fsmoe now"):
        old = printed(capsys, "simulate", "fsmoe-table5", "--assumptions")
    assert old == printed(capsys, "simulate", "fsmoe", "--assumptions")


def test_simulate_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert "fsmoe-table6" in refused(capsys, "simulate", "fsmoe-table6")
    for bad in ("0.9", "nan", "inf", "much"):
        assert "must be a number of at least 1" in refused(capsys, "simulate", "fsmoe", "--contention", bad)


# ---- kernels --------------------------------------------------------------------------------------


def test_kernels_prints_what_status_says(capsys: pytest.CaptureFixture[str]) -> None:
    run("kernels")
    assert capsys.readouterr().out == f"{status()}\n"
    found = printed(capsys, "kernels")
    assert len(found.pop("expected")) == len(found["devices"])
    assert found == json.loads(json.dumps(asdict(status())))
    assert (found["reason"] is None) == found["built"]
    assert (found["no_devices"] is None) == bool(found["devices"])


def test_kernels_without_the_extension_is_a_report_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extension, "_load", lambda: (None, "pmoe._cuda is not built; do this"))
    run("kernels")
    assert capsys.readouterr().out.startswith("CUDA kernels: none, pmoe._cuda is not built; do this\n")
    found = printed(capsys, "kernels")
    assert (found["built"], found["kernels"], found["archs"]) == (False, [], None)


def test_kernels_says_what_a_device_that_is_not_there_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    archs = ["--archs", "sm_80,sm_90a,sm_100,sm_120,ptx80"]
    run("kernels", "--capability", "10.3", *archs)
    out = capsys.readouterr().out
    assert "compute capability 10.3:\n  code: sm_100, its binary fits\n" in out
    assert "kernels for Hopper: refused, binary version 100 of PTX version 100 was loaded" in out
    [found] = printed(capsys, "kernels", "--capability", "12.0", *archs)["expected"]
    assert (found["runs"], found["rival"]) == ("sm_120", "loop")
    assert "--archs ('sm_80') needs --capability" in refused(capsys, "kernels", "--archs", "sm_80")
    assert "'ten' must be a compute capability" in refused(capsys, "kernels", "--capability", "ten")
    message = refused(capsys, "kernels", "--capability", "9.0", "--archs", "hopper")
    assert "archs ('hopper') must be names such as" in message


# ---- the command ----------------------------------------------------------------------------------


def test_python_m_pmoe_is_the_command_and_needs_no_optional_package() -> None:
    program = (
        "import sys, runpy\n"
        "sys.argv = ['pmoe', 'memory', '--theory', '--d-model', '3', '--d-hidden', '5', '--num-experts', '7',"
        " '--tokens', '2', '--n', '2', '--json']\n"
        "try:\n    runpy.run_module('pmoe', run_name='__main__')\n"
        "except SystemExit as stopped:\n    assert stopped.code == 0\n"
        "assert 'matplotlib' not in sys.modules"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(found.stdout)["saved"] == 10


CLOSED_PIPE = """
import gc, json, os, runpy, sys, pmoe.cli
import matplotlib.figure, scipy.optimize  # once, not in each command's process
gc.freeze()  # nor is it taken apart at the end of each
for argv in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
        sys.argv = ["pmoe", *argv]
        runpy.run_module("pmoe", run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A program that runs each command with a stdout that nobody reads, and prints the exit codes."""


@pytest.mark.slow
@pytest.mark.timeout(400)  # a dozen processes, which take ten seconds of a processor that is free
def test_a_reader_that_closes_the_pipe_ends_every_command_quietly(folder: Path, tmp_path: Path) -> None:
    append(tmp_path / SCALARS, [Row(step=1, name="loss", value=2.0)])
    commands = {
        "memory": LAYER,
        "plan": [*LAYER, "--ranks", "4", "--folder", str(folder)],
        "profile": ["--kernels", "--show", "--folder", str(folder)],
        "simulate": ["comet", "--assumptions"],
        "kernels": [],
        "report": [str(tmp_path)],
    }
    assert list(commands) == list(cli.COMMANDS)
    lines = [[name, *options] for name, options in commands.items()]
    lines += [["memory", *LAYER, "--json"], ["--help"], ["--version"]]
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLOSED_PIPE, json.dumps(lines)],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": ""},  # some of what is printed is then written at the very end
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stderr == ""
    assert found.stdout.split() == ["0"] * len(lines)
    assert (tmp_path / "report.html").exists()


def test_setup_installs_the_command() -> None:
    assert '"pmoe = pmoe.cli:main"' in (ROOT / "setup.py").read_text()


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["--help"],
        ["memory", "--help"],
        ["plan", "--help"],
        ["profile", "--help"],
        ["simulate", "--help"],
        ["kernels", "--help"],
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 0
        assert "--json" in capsys.readouterr().out or argv == ["--help"]


def test_copies_are_drawn_on_lanes_of_their_own() -> None:
    from pmoe.planner.priced_choices import advise, step_bars
    from pmoe.planner.timeline import LEGEND, SHARED, draw

    shape = sizes_from_options(16, 64, 8, num_ranks=4)
    kinds = set()
    for pair in ALL_PAIRS:
        candidates = advise(shape, MADE, 512).candidates
        chosen = next(each for each in candidates if each.restore == pair and each.forward == 2)
        bars = step_bars(shape, MADE, 512, chosen)
        assert max(bar.end for bar in bars) == pytest.approx(chosen.seconds)
        copied = any(bar.lane.startswith("copy") for bar in bars)
        assert copied == pair.offloads
        kinds |= {bar.kind for bar in bars}
    assert {SHARED.get(kind, kind) for kind in kinds} <= set(LEGEND)
    to = io.BytesIO()
    draw(to, {"S1": step_bars(shape, MADE, 512, advise(shape, MADE, 512).candidates[4])}, "a step")
    assert to.getvalue().startswith(b"\x89PNG")
