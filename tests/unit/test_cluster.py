"""`pmoe plan --cluster`, for machines that nobody here has: costs of all-to-alls, the cluster's file, the
plan.

The costs are compared with a count of every message.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import pmoe
from pmoe import cli
from pmoe.cli.cluster import load_cluster
from pmoe.comm import NAMES
from pmoe.comm.topology import Topology
from pmoe.measure.profile import save_profile
from pmoe.measure.store import typed
from pmoe.planner.cluster import Cluster, fields_of, legs
from pmoe.planner.cluster_candidates import OFF, plan_combinations, sensitivity
from pmoe.planner.costs import LineCost
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.priced_choices import advise
from pmoe.planner.profile import Profile
from tests.snippets import ROOT, blocks
from tests.unit.test_profile import MADE, OPERATIONS

FILE = """
machines = {machines}
ranks_per_machine = {ranks}
device_type = "cuda"
memory_bytes = 80e9
compute = {{ alpha_seconds = 5e-6, beta_seconds = 3.3e-15 }}
copy = {{ alpha_seconds = 1e-5, beta_seconds = 4e-11 }}

[inside]
alpha_seconds = 3e-6
beta_seconds = 2.5e-12

[outside]
alpha_seconds = 1e-5
beta_seconds = 2e-11
"""
GOOD = FILE.format(machines=2, ranks=4)
LAYER = ["--d-model=1024", "--d-hidden=4096", "--num-experts=8", "--tokens=8192", "--top-k=2"]


def file_of(folder: Path, text: str = GOOD) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def cluster_of(folder: Path, machines: int, ranks: int) -> Cluster:
    return load_cluster(file_of(folder, FILE.format(machines=machines, ranks=ranks)), None)


# ---- the all-to-all, message by message


def route(dispatch: str, nodes: Topology, source: int, to: int) -> Iterator[int]:
    """Yields the ranks on which a row is after each step of an all-to-all."""
    if dispatch == "hierarchical_2d":
        yield nodes.inside(source)[nodes.place(to)]
    if dispatch == "hierarchical_1d" and source != to:
        yield nodes.inside(source)[0]
        yield nodes.inside(to)[0]
    elif dispatch == "hierarchical_1d":
        yield from (source, source)  # its own row stays
    yield to


@pytest.mark.parametrize(("machines", "local"), [(1, 4), (3, 1), (2, 2), (2, 4), (3, 4), (5, 3)])
@pytest.mark.parametrize("dispatch", NAMES)
def test_the_busiest_rank_has_as_many_messages_and_rows_as_are_counted_one_by_one(
    dispatch: str, machines: int, local: int
) -> None:
    ranks = machines * local
    nodes = Topology.of_nodes([rank // local for rank in range(ranks)], range(ranks))
    sent: defaultdict[int, Counter[tuple[int, int]]] = defaultdict(Counter)  # by leg, rows of each message
    for source, to in product(range(ranks), repeat=2):
        here = source
        for leg, there in enumerate(route(dispatch, nodes, source, to)):
            sent[leg][here, there] += here != there
            here = there
        assert here == to
    for leg, said in enumerate(legs(dispatch, machines, local)):
        messages = [(pair, rows) for pair, rows in sent[leg].items() if rows]
        for link, is_inside in (("inside", True), ("outside", False)):
            busiest = (0, 0)
            for rank, end in product(range(ranks), (0, 1)):  # sends, and receives
                own = [
                    rows
                    for pair, rows in messages
                    if pair[end] == rank and (nodes.node(pair[0]) == nodes.node(pair[1])) == is_inside
                ]
                busiest = max(busiest, (len(own), sum(own)))
            found = said.get(link)
            assert busiest == ((0, 0) if found is None else (found[0], round(found[1] * ranks)))
            assert found is None or found[1] * ranks == pytest.approx(busiest[1])


def test_the_slower_link_counts_in_each_leg_and_legs_add_up(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, 2, 4)
    flat, steps = line_of(cluster, "flat"), line_of(cluster, "hierarchical_2d")
    assert flat.alpha_seconds == pytest.approx(4 * 1e-5)  # to four ranks elsewhere, beside three mates
    assert flat(7e6) == pytest.approx(4e-5 + 4e6 * 2e-11)  # of 7 MB to 7 ranks
    assert steps.alpha_seconds == pytest.approx(3 * 3e-6 + 1e-5)
    assert steps(7e6) == pytest.approx(3 * 3e-6 + 6e6 * 2.5e-12 + 1e-5 + 4e6 * 2e-11)
    assert line_of(cluster, "flat", 4) == line_of(cluster, "hierarchical_2d", 4) == LineCost(1e-5, 2e-11)
    assert line_of(cluster_of(tmp_path, 1, 1), "flat") == LineCost(0.0, 0.0)


def line_of(cluster: Cluster, dispatch: str, esp: int = 1) -> LineCost:
    profile = cluster.profile(dispatch, esp, "float32")
    assert profile.operations is not None and profile.operations.all_to_all.line == profile.message
    return profile.message


# ---- from a profile of a part


@pytest.mark.parametrize(("nodes", "link"), [(1, "inside"), (4, "outside")])
def test_as_many_ranks_as_were_measured_have_the_measured_line(nodes: int, link: str) -> None:
    measured = replace(MADE, num_nodes=nodes)
    found = fields_of(measured)
    assert {"inside", "outside"} & set(found) == {link}
    cluster = part_of(measured, machines=nodes, ranks_per_machine=4 // nodes)
    line = line_of(cluster, "flat")
    assert line.alpha_seconds == pytest.approx(MADE.message.alpha_seconds)
    assert line.beta_seconds == pytest.approx(MADE.message.beta_seconds)
    assert cluster.interference == MADE.interference and MADE.when in cluster.measured


def part_of(profile: Profile, **more: Any) -> Cluster:
    any_link = {"alpha_seconds": 0.0, "beta_seconds": 0.0}
    fields = {"memory_bytes": 1e12, "inside": any_link, "outside": any_link} | fields_of(profile) | more
    cluster: Cluster = typed(Cluster, fields, "cluster")
    return cluster


def test_a_profile_of_several_machines_with_several_ranks_tells_both_links() -> None:
    found = fields_of(replace(MADE, num_nodes=2, operations=OPERATIONS))
    assert found["outside"] == {"alpha_seconds": 1e-4, "beta_seconds": 2e-9}
    assert found["inside"] == {"alpha_seconds": 0.0, "beta_seconds": 1e-9}
    assert "inside" not in fields_of(replace(MADE, num_nodes=2))  # FSMoE's lines were not measured
    assert not {"inside", "outside"} & set(fields_of(replace(MADE, num_ranks=1)))


def test_the_part_itself_is_planned_as_its_profile_says(tmp_path: Path) -> None:
    profile = replace(MADE, copy_out=MADE.copy_in)
    layer = layer_of(64, 256, 8)
    cluster = part_of(profile, machines=1, ranks_per_machine=4)
    (way,) = plan_combinations(cluster, layer, 4096, among=[("flat", 1)])
    said = advise(sizes_from_options(**layer, num_ranks=4), profile, 4096)
    assert [each.restore for each in way.candidates] == [each.restore for each in said.candidates]
    assert [each.seconds for each in way.candidates] == pytest.approx(
        [each.seconds for each in said.candidates]
    )


def test_gathering_inside_a_machine_costs_what_its_own_link_does(tmp_path: Path) -> None:
    """Two ranks share each expert: 1 message with all rows inside a machine, none on the link between
    machines.
    """
    cluster = cluster_of(tmp_path, 2, 2)
    slow = replace(cluster, inside=LineCost(0.0, 1.0))
    layer = layer_of(64, 256, 8)
    ways = {each: plan_combinations(each, layer, 1024, among=[("flat", 2)])[0] for each in (cluster, slow)}
    sizes = ways[slow].sizes
    assert (sizes.ep_size, sizes.columns.hidden, sizes.bypass_local) == (2, 128, False)
    assert (
        ways[slow].decision.seconds - ways[cluster].decision.seconds > 4 * 1024 * 64 * 4
    )  # AG and RS of both passes


# ---- the way that is chosen


def layer_of(d_model: int, d_hidden: int, num_experts: int, top_k: int = 1) -> dict[str, Any]:
    sizes = {"d_model": d_model, "d_hidden": d_hidden, "num_experts": num_experts, "top_k": top_k}
    return {**sizes, "dtype": torch.float32}


SMALL: dict[str, Any] = {"layer": layer_of(1024, 4096, 64, 2), "num_tokens": 512}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("budget", [None, 2**50])
def test_rates_that_are_off_move_the_answer_as_planning_everything_again_says(
    budget: int | None, tmp_path: Path
) -> None:
    """`sensitivity` asks only some candidates again. Its answer must be that of planning with all
    candidates.
    """
    cluster, options = cluster_of(tmp_path, 8, 2), {**SMALL, "budget": budget}
    ways = plan_combinations(cluster, **options)
    assert len(ways) == 3 + 1
    assert [way.decision.seconds for way in ways] == sorted(way.decision.seconds for way in ways)
    moves = list(sensitivity(cluster, ways, **options))
    assert [(each["rate"], each["times"]) for each in moves] == [
        (rate, factor) for rate in ("compute", "copy", "inside", "outside") for factor in (1 - OFF, 1 + OFF)
    ]
    for each in moves:
        line = getattr(cluster, each["rate"])
        moved = LineCost(line.alpha_seconds, line.beta_seconds / each["times"])
        best = plan_combinations(replace(cluster, **{each["rate"]: moved}), **options)[0]
        assert {name: each[name] for name in best.choice_fields} == best.choice_fields
        assert each["change"] == best.decision.seconds / ways[0].decision.seconds - 1
        if budget:  # without one Eq. 10 takes the pair, which is not always the fastest
            assert each["seconds"] <= each["first_seconds"]
            assert (each["times"] < 1) == (each["change"] > 0) or each["change"] == 0


def test_a_budget_holds_in_each_way_and_the_least_of_all_is_named(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, 4, 4)
    free = plan_combinations(cluster, **SMALL)
    promised = sorted(each.memory.promised for way in free for each in way.candidates)
    budget = promised[len(promised) // 2]
    held = plan_combinations(cluster, **SMALL, budget=budget)
    assert held and all(way.decision.memory.promised <= budget for way in held)
    with pytest.raises(ValueError, match=rf"memory_budget \(1 bytes\) must be at least {promised[0]} "):
        plan_combinations(cluster, **SMALL, budget=1)


# ---- the command


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert cli.main(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", *argv])
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


def test_4096_ranks_are_planned_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file_of(tmp_path, FILE.format(machines=512, ranks=8))
    sizes = ["--d-model=4096", "--d-hidden=14336", "--num-experts=8192", "--tokens=8192", "--dtype=bfloat16"]
    found = printed(capsys, *sizes, "--cluster", str(path))
    assert found["ranks"] == 4096 and found["device"] == "cuda"
    assert {(way["dispatch"], way["esp"]) for way in found["ways"]} == {
        (name, esp) for name, esp in product(NAMES, (1, 2, 4, 8)) if name == "flat" or esp < 8
    }
    best = found["ways"][0]
    assert best["dispatch"] == "hierarchical_2d"  # 7 and 511 messages in place of 4,095
    assert len(found["candidates"]) == 5 * 9
    names = ("n", "restore", "seconds", "promised_bytes")
    assert [best[name] for name in names] in [[each[name] for name in names] for each in found["candidates"]]
    assert 0 < best["exposed_seconds"] < best["seconds"]
    assert 0 < best["even_bytes"] < best["promised_bytes"]
    assert len(found["sensitivity"]) == 8
    layer = {"d_model": 4096, "pipeline": best["n"], "dispatch": "hierarchical_2d", "nodes": 8}
    assert all(f"{name}={value!r}" in found["python"] for name, value in layer.items())


def test_text_holds_the_ways_the_rates_and_a_layer_to_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*LAYER, "--cluster", str(file_of(tmp_path))]
    found = printed(capsys, *given)
    cli.main(["plan", *given])
    out = capsys.readouterr().out
    for text in ("rates: ", "measured nowhere", "hierarchical_2d", "first ms", "+0.0%"):
        assert text in out
    assert out.count("<-") == 2 and all(line in out for line in found["python"].splitlines())
    layer = eval(found["python"].splitlines()[-1], {"pmoe": pmoe, "torch": torch, "make_meshes": no_mesh})
    assert (layer.d_model, layer.pipeline) == (1024, found["ways"][0]["n"])


def no_mesh(**sizes: int) -> Any:
    return type("Meshes", (), {"experts": None})


def test_what_the_file_leaves_out_is_that_of_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of one machine were measured. A plan for one machine of four ranks needs no link to
    others.
    """
    profile = tmp_path / "profile.json"
    save_profile(replace(MADE, num_ranks=2), profile)
    path = file_of(tmp_path, "machines = 1\nranks_per_machine = 4\nmemory_bytes = 1e10\n")
    found = printed(capsys, *LAYER, "--cluster", str(path), "--profile", str(profile))
    assert {(way["dispatch"], way["esp"]) for way in found["ways"]} == {("flat", 1), ("flat", 2), ("flat", 4)}
    assert [each["rate"] for each in found["sensitivity"][::2]] == ["compute", "copy", "inside"]
    assert found["profile"]["when"] == f"on a part, {MADE.when}"
    said = refused(
        capsys,
        *LAYER,
        "--cluster",
        str(file_of(tmp_path, path.read_text().replace("1\n", "2\n", 1))),
        "--profile",
        str(profile),
    )
    assert "must describe a cluster: cluster has no outside" in said


def test_the_file_on_the_page_describes_a_cluster(tmp_path: Path) -> None:
    (text,) = (block.text for block in blocks(ROOT / "docs" / "cluster.md") if block.language == "toml")
    assert load_cluster(file_of(tmp_path, text), None).num_ranks == 4096


BAD: list[tuple[Callable[[str], str], str]] = [
    (lambda text: text.replace("machines = 2\n", ""), "cluster has no machines"),
    (lambda text: text.partition("[outside]")[0], "cluster has no outside"),
    (lambda text: text.replace("alpha_seconds = 1e-5\nbeta", "beta"), "cluster.outside has no alpha_seconds"),
    (lambda text: text.replace("machines = 2", "machines = 0"), "machines (0) must be at least 1"),
    (lambda text: text.replace("machines = 2", "machines = 2.0"), "cluster.machines (2.0) is of the wrong"),
    (lambda text: text.replace("machines = 2", "machines = 2147483647"), "ranks (8589934588) must be"),
    (lambda text: text.replace("3e-6", "-3e-6"), "cluster.inside.alpha_seconds (-3e-06) must be a finite"),
    (lambda text: text.replace("80e9", "0"), "memory_bytes (0.0) must be None or a positive number"),
    (lambda text: text.replace("80e9", "nan"), "cluster.memory_bytes (nan) must be a finite number"),
    (lambda text: text.replace('"cuda"', '"tpu"'), "cluster.device_type ('tpu') must be one of cpu, cuda"),
    (lambda text: text.replace("80e9", "1e5"), "8 ranks are too few, "),
    (lambda text: "machine = 3\n" + text, "machine must be left out: a cluster has no such"),
    (lambda text: text.replace("beta_s", "beta_sec"), "cluster.compute has no beta_seconds"),
    (lambda text: text + "rate = 1", "outside.rate must be left out: a cluster has no such key"),
    (lambda text: text + "[link]", "link must be left out: a cluster has no such key"),
    (lambda text: text.replace("[inside]", "[inside"), "must describe a cluster: "),
    (lambda text: "x = " + 5000 * "[", "must describe a cluster: "),
    (lambda text: text.replace("ranks_per_machine = 4", "ranks_per_machine = 3"), "num_experts (8) must be"),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "told"), BAD, ids=[told for _, told in BAD])
def test_a_wrong_file_is_refused_by_key_value_and_rule(
    harm: Callable[[str], str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, harm(GOOD))
    assert told in refused(capsys, *LAYER, "--cluster", str(path))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_too_few_ranks_are_told_how_many_could_hold_the_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *LAYER, "--cluster", str(file_of(tmp_path, GOOD.replace("80e9", "1e7"))))
    held = sizes_from_options(1024, 4096, 8, num_ranks=8).expert_parameters * 4
    assert f"must hold a rank's experts ({held} bytes): 8 ranks are too few" in said
    assert f", {math.ceil(8 * held / 1e7)} would be enough" in said


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {},
            "a cpu profile of 1 machines of 4 ranks must be of a part of the cluster: cuda, 2 machines of 4",
        ),
        (
            {"device_type": "cuda", "num_nodes": 4},
            "of 4 machines of 1 ranks must be of a part of the cluster: cuda",
        ),
        (
            {"device_type": "cuda", "num_ranks": 8},
            "of 1 machines of 8 ranks must be of a part of the cluster: cuda",
        ),
        ({"dtype": "float64"}, "--dtype (float32) must be the dtype of --profile"),
    ],
)
def test_a_profile_of_other_machines_is_refused(
    other: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(replace(MADE, **other), tmp_path / "profile.json")
    given = ["--cluster", str(file_of(tmp_path)), "--profile", str(tmp_path / "profile.json")]
    assert told in refused(capsys, *LAYER, *given)


def test_the_page_has_a_table_of_ways_one_of_rates_and_one_of_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*LAYER, "--cluster", str(file_of(tmp_path)), "--html", str(tmp_path / "plan.html")]
    found, text = printed(capsys, *given), (tmp_path / "plan.html").read_text()
    sizes = [len(found[name]) + 1 for name in ("ways", "sensitivity", "candidates")]
    assert [table.count("<tr") for table in text.split("<table>")[1:]] == sizes
    assert text.count('<tr class="marked">') == 2 and text.count("<svg ") == 2


def test_the_clock_of_the_machines_that_were_measured_changes_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of the profile may have a time that is ahead of this machine's clock, or years old."""
    path = file_of(tmp_path, "machines = 1\nranks_per_machine = 8\nmemory_bytes = 1e10\n")
    found = []
    for when in ("2170-01-01T00:00:00+00:00", "1970-01-01T00:00:00+00:00"):
        save_profile(replace(MADE, when=when), tmp_path / "profile.json")
        given = [*LAYER, "--cluster", str(path), "--profile", str(tmp_path / "profile.json")]
        found.append(printed(capsys, *given))
        assert when in found[-1].pop("profile")["when"]
    assert found[0] == found[1]


def test_ranks_are_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*LAYER, "--cluster", str(file_of(tmp_path))]
    assert f"--ranks (4) must be the number of ranks in {tmp_path}" in refused(capsys, *given, "--ranks", "4")
    assert printed(capsys, *given, "--ranks", "8")["ranks"] == 8
