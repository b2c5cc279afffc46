"""``balance``: other ranks compute a part of busy experts' rows, with copies of their weights.

Output and every gradient are those of the same layer without copies, to the order of sums.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.call.decision import BalanceReport
from pmoe.comm.ranks import Ranks
from pmoe.experts.operands import local_part
from pmoe.gates import TopKGate
from pmoe.gates.forced import ForcedGate
from pmoe.measure.profile import PROFILES
from pmoe.planner import timeline
from pmoe.planner.costs import LineCost
from tests.gloo.kit import counted_collectives, error_of
from tests.gloo.test_faults_everywhere import LAYERS, what_is_wrong
from tests.kit import AUX, tokens
from tests.pool import ranks
from tests.reference import relative_error
from tests.spread import spread
from tests.switched import switched_layer
from tests.unit.test_profile import MADE

M, H = 6, 10
TOKENS = {2: (40, 65), 4: (37, 0, 64, 20)}


def build(
    num_experts: int,
    top_k: int,
    share: float,
    busy: tuple[int, ...],
    dtype: Any = torch.float64,
    **options: Any,
) -> pmoe.MoELayer:
    """A layer whose gate sends ``share`` of the rows to the busy experts."""
    torch.manual_seed(7)
    gate = ForcedGate(TopKGate(M, num_experts, top_k, dtype=dtype), num_experts, busy=busy, share=share)
    return switched_layer(M, H, num_experts, top_k, gate=gate, dtype=dtype, **options)


def step(layer: pmoe.MoELayer, rank: int, world: int, run: Any = None) -> dict[str, Tensor | None]:
    """y, the rows of each expert, and every gradient."""
    dtype = layer.experts.w1.dtype
    count = TOKENS[world][rank]
    x = tokens(count, 10 + rank, dtype).requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = (run or layer)(x)
    ((y * tokens(count, 20 + rank, dtype)).sum() + AUX * layer.l_aux).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "rows": layer.tokens_per_expert, "x": x.grad, **gradients}


def differences(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], limit: float) -> list[str]:
    """The names of the values that differ."""
    assert set(got) == set(wanted)
    wrong = []
    for name, value in wanted.items():
        other = got[name]
        if value is None or other is None:
            wrong += [name] if (value is None) is not (other is None) else []
        elif not relative_error(other.double(), value.double()) <= limit:
            wrong.append(f"{name}: {relative_error(other.double(), value.double())}")
    return wrong


def compared_job(
    rank: int, world: int, balance: int, case: tuple[Any, ...], options: dict[str, Any]
) -> tuple[list[str], BalanceReport | None]:
    without = step(build(*case, **options), rank, world)
    layer = build(*case, balance=balance, **options)
    wrong = differences(step(layer, rank, world), without, 1e-12)
    assert layer.ran is not None
    return wrong, layer.ran.balance


CASES = [
    (2, 1, (4, 1, 0.8, (0,))),
    (2, 1, (4, 2, 0.5, (3,))),
    (2, 2, (8, 2, 0.9, (4, 5))),
    (4, 1, (4, 1, 0.9, (2,))),
    (4, 2, (8, 2, 0.8, (0, 1))),
    (4, 3, (8, 1, 0.95, (0,))),
    (4, 2, (8, 2, 0.7, (1, 6))),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "one chunk": {},
    "chunks": {"pipeline": 2},
    "more chunks": {"pipeline": 4, "bias": False},
    "S4": {"pipeline": 2, "memory_reuse": "S4"},
    "keep": {"memory_reuse": pmoe.Restore("keep", "keep"), "pipeline": 3},
    "T_M again": {"memory_reuse": pmoe.Restore("keep", "recompute"), "pipeline": 2, "expert": "swiglu"},
    "T_DI again": {"memory_reuse": pmoe.Restore("communicate", "keep"), "expert": "swiglu"},
    "capacity": {"capacity_factor": 1.5, "pipeline": 2},
    "shared expert": {"shared_expert": 4, "pipeline": 2},
    "all rows travel": {"bypass_local": False},
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("world, balance, case, name", spread(CASES, list(OPTIONS), every=3))
def test_output_and_gradients_are_those_without_copies(
    world: int, balance: int, case: tuple[Any, ...], name: str
) -> None:
    found = ranks(world).run(compared_job, balance, case, OPTIONS[name])
    for rank, (wrong, report) in enumerate(found):
        assert not wrong, f"rank {rank}: {wrong}"
        assert report is not None and report.copies > 0
        assert report.after < report.before


def rows_job(rank: int, world: int, balance: int, n: int) -> list[list[int]]:
    layer = build(8, 2, 0.8, (0, 1), balance=balance, pipeline=n)
    layer(tokens(2000, rank))
    counts = layer.row_counts
    assert counts is not None
    return counts.joined(n).recv.sum((1, 2)).tolist()


@pytest.mark.parametrize("world", [2, 4])
def test_every_chunk_of_every_rank_has_equally_many_rows(world: int) -> None:
    n = 4
    for rows in ranks(world).run(rows_job, 3, n):
        for of_chunk in rows:
            assert abs(of_chunk - 2000 * 2 / n) < 0.05 * 2000 * 2 / n


# ---- values and gradients that are not wanted


def frozen_job(rank: int, world: int) -> tuple[list[str], int, int]:
    layers = [build(4, 1, 0.8, (0,), balance=balance) for balance in (0, 1)]
    for layer in layers:
        layer.experts.requires_grad_(False)
    without, found = (step(layer, rank, world) for layer in layers)
    learning = build(4, 1, 0.8, (0,), balance=1)
    step(learning, rank, world)
    return differences(found, without, 1e-12), layers[1].traffic.weights, learning.traffic.weights


def test_no_gradients_of_frozen_experts_go_home() -> None:
    expert_bytes = 8 * (H * M + M * H + H + M)
    (wrong, sent, of_owner), (other_wrong, received, of_host) = ranks(2).run(frozen_job)
    assert not wrong and not other_wrong
    assert (sent, received) == (expert_bytes, 0)
    assert (of_owner, of_host) == (expert_bytes, expert_bytes)


def partly_frozen_job(rank: int, world: int) -> list[str]:
    found = []
    for balance in (0, 1):
        layer = build(4, 1, 0.8, (0,), balance=balance)
        layer.experts.w1.requires_grad_(rank == 1)  # the busy expert is rank 0's
        layer.experts.b2.requires_grad_(False)
        found.append(step(layer, rank, world))
    return differences(found[1], found[0], 1e-12)


def test_frozen_parameters_of_some_ranks_get_no_gradients() -> None:
    assert ranks(2).run(partly_frozen_job) == [[], []]


def nan_job(rank: int, world: int) -> tuple[bool, bool]:
    found = []
    for balance in (0, 2):
        layer = build(8, 2, 0.8, (0, 1), balance=balance)
        with torch.no_grad():
            if rank == 0:
                layer.experts.w1[0, 0, 0] = torch.nan
        found.append(layer(tokens(TOKENS[world][rank], rank)).isnan())
    return torch.equal(*found), bool(found[0].any())


def test_nan_in_a_copied_experts_weights_is_seen_where_it_is_without_copies() -> None:
    found = ranks(4).run(nan_job)
    assert all(is_same for is_same, _ in found) and any(is_there for _, is_there in found)


def narrow_job(rank: int, world: int, n: int) -> dict[str, list[dict[str, Tensor | None]]]:
    """Steps in bfloat16 without and with copies, and in float64 with the same values."""
    found = []
    for dtype, balance in ((torch.bfloat16, 0), (torch.bfloat16, 2), (torch.float64, 0)):
        layer = build(8, 2, 0.8, (0, 1), dtype=torch.bfloat16, balance=balance, pipeline=n).to(dtype)
        found.append(step(layer, rank, world))
    return [{name: value for name, value in each.items() if name != "rows"} for each in found]


@pytest.mark.parametrize("world, n", [(2, 1), (4, 2)])
def test_errors_in_bfloat16_are_those_without_copies(world: int, n: int) -> None:
    for without, found, exact in ranks(world).run(narrow_job, n):
        for name, value in exact.items():
            scale = value.abs().max().item() if value.numel() else 0.0
            errors = [
                (each[name].double() - value.double()).abs().max().item() if scale else 0.0
                for each in (found, without)
            ]
            assert errors[0] <= 2 * errors[1] + 2**-8 * scale, name


# ---- calls


def collectives_job(rank: int, world: int) -> list[list[str]]:
    """The collectives of calls with and without copies, with and without gradients."""
    layer = build(8, 2, 0.8, (0, 1), balance=2, pipeline=2)
    even = build(8, 2, 0.25, (0, 1), balance=2, pipeline=2)
    for each in (layer, even):
        each(tokens(4, rank))
    names = []
    for each in (layer, even):
        with counted_collectives() as calls:
            step(each, rank, world)
            with torch.no_grad():
                each(tokens(TOKENS[world][rank], rank))
        names.append(list(calls))
    return names


def test_collectives_are_the_same_on_every_rank_also_without_tokens() -> None:
    found = ranks(4).run(collectives_job)
    assert all(each == found[0] for each in found)
    with_copies, even = found[0]
    # V, VR, VGR and VG of the step, V and VR of the call without gradients
    assert with_copies.count("all_to_all_single") == even.count("all_to_all_single") + 6


def replayed_job(rank: int, world: int, way: str) -> list[str]:
    layers = [build(8, 2, 0.8, (0, 1), balance=balance, pipeline=2) for balance in (0, 2)]
    options: dict[str, Any] = {"use_reentrant": way == "reentrant"}
    if way == "contexts":
        options["context_fn"] = pmoe.checkpoint_contexts
    without, found = (
        step(layer, rank, world, lambda x, layer=layer: checkpoint(layer, x, **options)) for layer in layers
    )
    return differences(found, without, 1e-12)


@pytest.mark.parametrize("way", ["contexts", "plain", "reentrant"])
def test_activation_checkpoints_repeat_the_plan(way: str) -> None:
    assert ranks(2).run(replayed_job, way) == [[], []]


def orders_job(rank: int, world: int) -> list[str]:
    """Two calls whose backward passes follow in the order of the calls, the first of them twice."""
    found = []
    for balance in (0, 2):
        layer = build(8, 1, 0.8, (0,), balance=balance, pipeline=2)
        x = [tokens(TOKENS[world][rank], seed).requires_grad_() for seed in (rank, 10 + rank)]
        first, second = (layer(each).square().sum() for each in x)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        found.append({"x0": x[0].grad, "x1": x[1].grad, **gradients})
    return differences(found[1], found[0], 1e-12)


def test_several_calls_may_run_backward_in_any_order_and_twice() -> None:
    assert ranks(4).run(orders_job) == [[]] * 4


def autocast_job(rank: int, world: int) -> list[str]:
    found = []
    for balance in (0, 2):
        layer = build(8, 2, 0.8, (0, 1), dtype=torch.float32, balance=balance, pipeline=2)

        def run(x: Tensor, layer: pmoe.MoELayer = layer) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return layer(x)

        found.append(step(layer, rank, world, run))
    return differences(found[1], found[0], 0.03)


def test_copies_compute_in_the_type_of_autocast() -> None:
    assert ranks(2).run(autocast_job) == [[], []]


def parallelized_job(rank: int, world: int) -> list[str]:
    """Two SGD steps of a model whose experts are DTensors and whose dense part is wrapped by FSDP2."""
    found = []
    for balance in (0, 2):
        layer = build(8, 2, 0.8, (0, 1), balance=balance, pipeline=2, group=Ranks.single())
        model = torch.nn.Sequential(torch.nn.Linear(M, M, dtype=torch.float64), layer)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        pmoe.parallelize(model, mesh)
        fully_shard(model, ignored_params=pmoe.expert_parameters(model))
        optimizer = torch.optim.SGD(pmoe.parameter_groups(model), 0.1)
        for seed in range(2):
            optimizer.zero_grad()
            y = model(tokens(TOKENS[world][rank], 10 * rank + seed))
            y.square().sum().backward()
            optimizer.step()
        assert layer.ran is not None and (layer.ran.balance is not None) == bool(balance)
        values = {name: local_part(value) for name, value in model.named_parameters()}
        found.append({"y": y.detach(), **values})
    return differences(found[1], found[0], 1e-12)


def test_wrappers_and_optimizers_see_one_expert() -> None:
    assert ranks(2).run(parallelized_job) == [[], []]


def chosen_job(rank: int, world: int) -> list[int]:
    """Copies with balance=True, where a copy costs next to nothing, and where it costs too much."""
    copies = []
    layer = build(4, 1, 0.8, (0,), balance=True)
    key = (layer.ranks.name, torch.device("cpu"), torch.float64)
    for message in (LineCost(0.0, 1e-15), LineCost(1.0, 0.0)):
        profile = replace(MADE, compute=LineCost(0.0, 1e-9), message=message)
        with mock.patch.dict(PROFILES, {key: profile}):
            step(layer, rank, world)
        assert layer.ran is not None and layer.ran.balance is not None
        copies.append(layer.ran.balance.copies)
    return copies


def test_true_makes_copies_where_they_are_predicted_to_pay() -> None:
    for cheap, dear in ranks(2).run(chosen_job):
        assert cheap == 1 and dear == 0


# ---- faults and refusals


@pytest.mark.parametrize("ending", ["raises", pytest.param("dies", marks=pytest.mark.slow)])
@pytest.mark.parametrize("direction, task", [("forward", "V"), ("backward", "VG")])
def test_a_rank_that_ends_while_weights_travel_is_named_in_time(
    direction: str, task: str, ending: str
) -> None:
    assert what_is_wrong(2, LAYERS["copies"], direction, task, ending) == ""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fused": ({"fused": True}, r"kernels are fused \(fused=True\)"),
    "persistent": ({"fused": "persistent"}, "a pass is one persistent kernel"),
    "padded": ({"pad_to_capacity": True, "capacity_factor": 1.0}, "rows are padded to capacity"),
    "once": ({"send_once": True}, r"rows travel once \(send_once=True\)"),
    "offload": ({"memory_reuse": "S1"}, r"memory_reuse \(offload/offload\) may offload"),
    "solver": ({"pipeline": "solve"}, r'n is chosen by the solver \(pipeline="solve"\)'),
    "other chunks": ({"pipeline": 2, "pipeline_backward": 4}, r"other chunks \(pipeline_backward=4\)"),
    "hierarchical": ({"dispatch": "hierarchical_1d", "nodes": 1}, "rows do not travel by flat all-to-alls"),
    "modules": ({"expert": lambda: torch.nn.Linear(M, M).double()}, "modules of one's own"),
}


def refused_job(rank: int, world: int) -> dict[str, str]:
    found = {
        name: error_of(lambda options=options: pmoe.MoELayer(M, H, 4, 2, balance=1, **options))
        for name, (options, _) in REFUSED.items()
    }
    found["budget"] = error_of(lambda: pmoe.MoELayer(M, H, 4, 2, balance=1, memory_budget="1MiB"))
    found["too many"] = error_of(lambda: pmoe.MoELayer(M, H, 4, 2, balance=3))
    layer = pmoe.MoELayer(M, H, 4, 2, memory_reuse="S1")
    found["set later"] = error_of(lambda: setattr(layer, "balance", 1))
    assert layer.balance is False
    return found


def test_what_copies_do_not_support_is_refused_by_name() -> None:
    for found in ranks(2).run(refused_job):
        for name, (_, sentence) in REFUSED.items():
            assert re.match(rf"ValueError: .*balance \(1\) must be False where .*{sentence}", found[name]), (
                name
            )
        assert re.search(r"memory_budget .*busy experts may have copies \(balance=1\)", found["budget"])
        assert "balance (3) must be at most 2, the number of experts of the other ranks" in found["too many"]
        assert (
            "balance (1) must be False where memory_reuse (offload/offload) may offload" in found["set later"]
        )


# ---- many calls


def soak_job(rank: int, world: int, calls: int) -> tuple[int, int]:
    """Bytes that the process holds after a tenth of the calls, and after all of them."""
    layer = pmoe.MoELayer(64, 128, 8, 2, pipeline=2, balance=2)
    held = []
    for call in range(calls):
        generator = torch.Generator().manual_seed(call)
        with torch.no_grad():
            layer.gate.weight.copy_(torch.randn(8, 64, generator=generator) * (call % 5))
        layer.zero_grad(set_to_none=True)
        layer(tokens(64 + call % 7, rank + call, torch.float32, 64)).sum().backward()
        if call in (calls // 10, calls - 1):
            pmoe.pool("cpu").trim()
            held.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    return held[0], held[1]


@pytest.mark.slow
def test_memory_stays_flat_over_many_calls_with_changing_loads() -> None:
    for early, late in ranks(2).run(soak_job, 2000):
        assert late - early < 8 << 20


# ---- what users are shown


def shown_job(rank: int, world: int) -> tuple[Any, str, set[str]]:
    layer = build(8, 2, 0.8, (0, 1), balance=2, pipeline=2)
    step(layer, rank, world)
    with pmoe.recording() as journal:
        step(layer, rank, world)
    statistics = pmoe.stats(layer, all_ranks=True, journal=journal)
    spans = [
        span for direction in ("forward", "backward") for span in journal.last(layer.experts, direction) or ()
    ]
    timeline.draw(io.BytesIO(), {"step": timeline.bars(spans)}, "a step")
    return statistics.layers[0], str(statistics), {span.name for span in spans}


def test_statistics_and_timelines_show_copies() -> None:
    for of_layer, text, tasks in ranks(4).run(shown_job):
        balance = of_layer.balance
        assert balance.before > 3 and balance.after < 1.05 and balance.copies >= 3
        assert balance.weight_bytes == balance.copies * 8 * (2 * H * M + H + M)
        assert of_layer.predicted is not None and of_layer.predicted.tensors["copies"] > 0
        assert f"{balance.copies} copies of busy experts" in text and f"{balance.before:.2f} without" in text
        assert {"V", "VR", "KW0", "VGR", "VG", "VA"} <= tasks
