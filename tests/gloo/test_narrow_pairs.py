"""Restore pairs that keep T_DI in the messages in which it came, or the hidden activation T_M in e4m3.

Messages lose nothing: output and gradients equal, to the bit, those of a layer that keeps the unpacked rows.
T_M in e4m3 is rounded: they equal, to the bit, those of experts that round the T_M which they keep, by a
definition of its own (`tests.gloo.test_wire.rounded`). Forward's output is the same in any case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer, Restore
from pmoe.comm.ranks import Ranks
from pmoe.schedule.restore import NARROW_PAIRS
from pmoe.schedule.wire import message_bytes
from tests.gloo.kit import TOKENS, build, take_all_experts
from tests.gloo.test_footprint import step_bytes
from tests.gloo.test_wire import DTYPES, WIDTHS, decibels, rounded, step
from tests.kit import assert_same, tokens
from tests.own_experts import mlp
from tests.pool import ranks
from tests.spread import named, parts, spread

MESSAGES = [pair for pair in NARROW_PAIRS if pair.dispatched == "message"]
ROUNDED = [pair for pair in NARROW_PAIRS if pair.rounds]


def round_kept(layer: MoELayer) -> None:
    """Lets a layer's experts round the hidden activation which they keep for backward, and nothing else."""
    original = layer.experts.compute

    def compute(*args: Any, **options: Any) -> Any:
        out, hidden = original(*args, **options)
        if hidden is not None:
            hidden.tensors[0].copy_(rounded(hidden.tensors[0].clone(), "e4m3"))
        return out, hidden

    layer.experts.compute = compute  # type: ignore[method-assign]


def reference(pair: Restore, **options: Any) -> MoELayer:
    """The layer that keeps T_DI as the experts read it and, if the pair rounds T_M, the rounded T_M.

    It keeps, offloads or recomputes T_M otherwise as the pair does, so that its chunks are computed alike.
    """
    layer = build(**options, memory_reuse=Restore("keep", "keep" if pair.rounds else pair.hidden))
    if pair.rounds:
        round_kept(layer)
    return layer


def same_job(rank: int, world: int, cases: list[tuple[Any, ...]]) -> None:
    for dtype, width, n, pair in cases:
        x = tokens(TOKENS[world][rank], 10 + rank, dtype, WIDTHS[width])
        options = {"d_model": WIDTHS[width], "d_hidden": 150, "dtype": dtype, "pipeline": n, "wire": "e4m3"}
        layer = build(memory_reuse=pair, **options)
        found = step(layer, x)
        assert layer.ran is not None and layer.ran.restore == pair
        assert_same(found, step(reference(pair, **options), x), told=(dtype, width, n, pair))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("cases", parts(DTYPES, list(WIDTHS), [1, 2, 3], NARROW_PAIRS, every=11))
@pytest.mark.slow
def test_gradients_are_the_bits_of_kept_rows_and_of_a_kept_rounded_hidden_activation(
    world: int, cases: list[tuple[Any, ...]]
) -> None:
    ranks(world).run(same_job, cases)


OTHERS: dict[str, dict[str, Any]] = {
    "rows to their own rank": {"bypass_local": False},
    "rows sent once": {"send_once": True, "top_k": 3},
    "gradients in e4m3": {"wire_backward": "e4m3"},
    "messages in bfloat16": {"wire": "bfloat16"},
    "padded": {"pad_to_capacity": True, "capacity_factor": 1.0},
    "dropped rows": {"capacity_factor": 0.7},
    "a shared expert": {"shared_expert": 8},
    "gated experts": {"expert": "swiglu"},
    "a slow order": {"order": "einsum"},
    "a budget": {"memory_budget": "1GiB"},
    "expert choice": {"gate": "expert_choice"},
    "mixed tokens": {"gate": "soft"},
    "latent experts": {"d_latent": 130, "d_model": 140},
    "one task after the other": {"sequential": True},
}
PAIRS = [Restore("message", "recompute"), Restore("message", "e4m3"), Restore("offload", "e4m3")]


def others_job(rank: int, world: int, options: dict[str, Any], pair: Restore) -> None:
    options = {"d_model": 130, "d_hidden": 150, "dtype": torch.float32, "wire": "e4m3", **options}
    count = 9 if "pad_to_capacity" in options else TOKENS[world][rank]
    x = tokens(count, 10 + rank, torch.float32, options["d_model"])
    assert_same(step(build(memory_reuse=pair, **options), x), step(reference(pair, **options), x))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "world, pair, options", spread([2, 4], PAIRS, list(OTHERS.values()), every=5), ids=named
)
def test_narrow_pairs_go_with_each_other_feature(world: int, pair: Restore, options: dict[str, Any]) -> None:
    ranks(world).run(others_job, options, pair)


def rearranged_job(rank: int, world: int, pair: Restore, degrees: tuple[int, int]) -> None:
    """Backward cuts the batch into other chunks: it unpacks its rows from several of forward's messages."""
    x = tokens(TOKENS[world][rank], 10 + rank, torch.float32, 130)
    options = {"d_model": 130, "d_hidden": 150, "dtype": torch.float32, "wire": "e4m3"}
    options |= dict(zip(("pipeline", "pipeline_backward"), degrees, strict=True))
    assert_same(step(build(memory_reuse=pair, **options), x), step(reference(pair, **options), x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "world, pair, degrees", spread([2, 4], NARROW_PAIRS, [[2, 4], [4, 2], [3, 1], [2, 3]], every=5), ids=named
)
def test_backward_may_have_other_chunks(world: int, pair: Restore, degrees: list[int]) -> None:
    ranks(world).run(rearranged_job, pair, degrees)


def exchanges_job(rank: int, world: int, pair: Restore) -> None:
    """Hierarchical exchanges, and sharded experts, whose gathered messages are kept."""
    x = tokens(TOKENS[world][rank], 10 + rank, torch.bfloat16, 256)
    options = {"d_model": 256, "d_hidden": 300, "dtype": torch.bfloat16, "wire": "e4m3"}
    for name in ("hierarchical_1d", "hierarchical_2d"):
        others = {**options, "dispatch": name, "nodes": 2}
        assert_same(
            step(build(memory_reuse=pair, **others), x), step(reference(pair, **others), x), told=name
        )
    for ep, esp in ((2, 2), (1, 4)):
        mesh = init_device_mesh("cpu", (ep, esp), mesh_dim_names=("ep", "esp"))
        others = {**options, "mesh": mesh}
        assert_same(step(build(memory_reuse=pair, **others), x), step(reference(pair, **others), x), told=esp)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_hierarchical_exchanges_and_sharded_experts_keep_messages_and_e4m3(pair: Restore) -> None:
    ranks(4).run(exchanges_job, pair)


def modules_job(rank: int, world: int) -> None:
    """Messages go with experts that are modules, too: their gradients need T_DI as well."""
    x = tokens(TOKENS[world][rank], 10 + rank, torch.float32, 130)
    options = {"d_model": 130, "dtype": torch.float32, "wire": "e4m3", "expert": mlp}
    for hidden in ("keep", "offload", "recompute"):
        pair = Restore("message", hidden)
        assert_same(
            step(build(memory_reuse=pair, **options), x), step(reference(pair, **options), x), told=pair
        )


def test_messages_go_with_experts_that_are_modules() -> None:
    ranks(2).run(modules_job)


def adapted_job(rank: int, world: int, pair: Restore) -> None:
    x = tokens(TOKENS[world][rank], 10 + rank, torch.float32, 130)
    options = {"d_model": 130, "d_hidden": 150, "dtype": torch.float32, "wire": "e4m3"}
    layers = [build(memory_reuse=pair, **options), build(**options, memory_reuse=Restore("keep", "keep"))]
    for layer in layers:
        torch.manual_seed(1)
        pmoe.add_lora(layer, rank=2)
        for name, parameter in layer.experts.named_parameters():
            if name.endswith("_B"):
                torch.nn.init.normal_(parameter)
    round_kept(layers[1])
    found, expected = (
        {name: each for name, each in step(layer, x).items() if each is not None} for layer in layers
    )
    assert any(name.endswith("w1_A") for name in found)
    assert_same(found, expected)


def test_a_hidden_activation_in_e4m3_goes_with_adapters() -> None:
    ranks(2).run(adapted_job, Restore("communicate", "e4m3"))


def again_job(rank: int, world: int, pair: Restore) -> None:
    """Backward runs twice on one graph, and activation checkpointing surrounds the layer."""
    layer = build(d_model=130, d_hidden=150, dtype=torch.float32, wire="e4m3", memory_reuse=pair)
    leaf = tokens(TOKENS[world][rank], 10 + rank, torch.float32, 130).requires_grad_()

    def gradients(y: Tensor, **options: Any) -> dict[str, Tensor]:
        layer.zero_grad(set_to_none=True)
        leaf.grad = None
        y.square().sum().backward(**options)
        return {"x": leaf.grad, **{name: each.grad for name, each in layer.named_parameters()}}

    y = layer(leaf)
    first = gradients(y, retain_graph=True)
    assert_same(gradients(y), first)
    assert_same(gradients(checkpoint(layer, leaf, use_reentrant=False)), first)


@pytest.mark.parametrize("pair", [Restore("message", "e4m3"), Restore("message", "recompute")], ids=str)
def test_backward_may_run_twice_and_checkpointing_keeps_the_bits(pair: Restore) -> None:
    ranks(2).run(again_job, pair)


def nothing_sent_job(rank: int, world: int) -> tuple[int, int, int]:
    """Bytes of rows that backward sends: with kept rows, with kept messages, and if T_DI is sent again."""
    x = tokens(TOKENS[world][rank], 10 + rank, torch.float32, 256)
    found = []
    for pair in (Restore("keep", "recompute"), Restore("message", "recompute"), "S4"):
        layer = build(memory_reuse=pair, d_model=256, dtype=torch.float32, wire="e4m3")
        layer(x).sum()
        forward = layer.traffic.rows
        step(layer, x)
        found.append(layer.traffic.rows - 2 * forward)
    return found[0], found[1], found[2]


def test_backward_sends_nothing_more_for_messages_that_were_kept() -> None:
    for kept, messages, again in ranks(2).run(nothing_sent_job):
        assert messages == kept < again


# ---- the plain definition


def definition_job(rank: int, world: int, pair: Restore) -> None:
    """Output and gradients by a loop over tokens and experts in float64, with T_M rounded for backward.

    Rows and w1 are small multiples of 1/8, so T_M is the same number in float32 and in float64, whatever the
    order of its sum, and is rounded alike.
    """
    options = {"d_model": 130, "d_hidden": 150, "dtype": torch.float32, "pipeline": 2}
    layer = build(memory_reuse=pair, **options)
    x = (tokens(TOKENS[world][rank], 10 + rank, torch.float32, 130) * 2).round() / 2
    with torch.no_grad():
        for name, parameter in layer.experts.named_parameters():
            parameter.copy_((parameter * 64).round() / 8 if name in ("w1", "b1") else parameter)
    found = step(layer, x)
    wide = build(d_model=130, d_hidden=150, group=Ranks.single(), pipeline=1)
    take_all_experts(wide, layer, world)
    leaf = x.double().requires_grad_()
    routing = wide.gate(leaf)
    rows = []
    for token, (experts, weights) in enumerate(zip(routing.expert.tolist(), routing.weight, strict=True)):
        total = torch.zeros(130, dtype=torch.float64)
        for expert, weight in zip(experts, weights, strict=True):
            w = {name: each[expert] for name, each in wide.experts.named_parameters()}
            hidden = leaf[token] @ w["w1"].t() + w["b1"]
            # Straight through: the value of the rounded T_M, the gradient of T_M.
            kept = hidden + (rounded(hidden.detach().float()[None], "e4m3")[0].double() - hidden).detach()
            from_kept = weight * (torch.nn.functional.gelu(kept) @ w["w2"].t() + w["b2"])
            exact = weight * (torch.nn.functional.gelu(hidden) @ w["w2"].t() + w["b2"])
            total = total + from_kept + (exact - from_kept).detach()
        rows.append(total)
    y = torch.stack(rows) if rows else leaf * 0
    flat = y.reshape(-1, 130)
    dy = tokens(flat.shape[0], 4, torch.float32, 130).double()
    ((flat * dy).sum() + 0.37 * routing.l_aux).backward()
    for name, value in (("y", y.detach()), ("x", leaf.grad)):
        assert relative(found[name], value) < 2e-5, (name, rank)
    for name, parameter in wide.experts.named_parameters():
        whole_grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        dist.all_reduce(whole_grad)
        count = 8 // world
        own_grad = whole_grad[rank * count : (rank + 1) * count]
        assert relative(found[f"experts.{name}"], own_grad) < 2e-5, (name, rank)


def relative(found: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@pytest.mark.parametrize("world", [2, 4])
def test_a_hidden_activation_in_e4m3_is_the_plain_definition_on_the_rounded_one(world: int) -> None:
    ranks(world).run(definition_job, Restore("communicate", "e4m3"))


# ---- accuracy


def ratio_job(rank: int, world: int) -> dict[str, float]:
    """Signal to noise in dB of the gradients with T_M in e4m3, against those with a kept T_M, in bfloat16."""
    options = {"d_model": 512, "d_hidden": 256, "dtype": torch.bfloat16, "pipeline": 2}
    x = tokens(256, 10 + rank, torch.bfloat16, 512)
    exact = step(build(memory_reuse=Restore("keep", "keep"), **options), x)
    found = step(build(memory_reuse=Restore("keep", "e4m3"), **options), x)
    assert torch.equal(found["y"], exact["y"])
    return {name: decibels(found[name], exact[name]) for name in ("x", "experts.w1", "experts.w2")}


def test_signal_to_noise_of_gradients_is_what_the_page_says() -> None:
    for ratios in ranks(2).run(ratio_job):
        assert min(ratios.values()) >= 28, ratios


# ---- bytes


def held_job(rank: int, world: int, dtype: torch.dtype) -> dict[str, float]:
    """Bytes that autograd saves: of T_DI over those of kept rows, and of T_M over those of a kept T_M."""
    options = {"d_model": 1024, "d_hidden": 2048, "dtype": dtype, "wire": "e4m3", "bypass_local": False}
    x = tokens(40, 10 + rank, dtype, 1024).requires_grad_()

    def saved(pair: Restore) -> int:
        layer = build(memory_reuse=pair, **options)
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            seen[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        return sum(seen.values())

    s4 = saved(Restore("communicate", "recompute"))
    kept = {name: saved(Restore(*name)) - s4 for name in (("keep", "recompute"), ("communicate", "keep"))}
    return {
        "T_DI": (saved(Restore("message", "recompute")) - s4) / kept["keep", "recompute"],
        "T_M": (saved(Restore("communicate", "e4m3")) - s4) / kept["communicate", "keep"],
    }


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype, share", [(torch.bfloat16, 0.516), (torch.float32, 0.258)])
def test_s4_with_t_di_in_e4m3_holds_this_share_of_the_bytes_of_rows(dtype: torch.dtype, share: float) -> None:
    for held in ranks(2).run(held_job, dtype):
        # Experts also save the 40 rows' tokens if T_DI is not kept.
        assert held["T_DI"] == pytest.approx(share, rel=0.002)
        assert held["T_M"] == pytest.approx(share, rel=0.002)
    assert message_bytes("e4m3", 1024, dtype.itemsize) / (1024 * dtype.itemsize) == pytest.approx(
        share, abs=1e-3
    )


def peak_job(rank: int, world: int, pair: Restore, n: int) -> tuple[float, float]:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(64, 256, 4, pipeline=n, memory_reuse=pair, wire="e4m3")
    with torch.no_grad():
        layer.gate.weight[:] = 0.02 * torch.randn(4, 64)
    count = 1024 - 37 * rank
    found = step_bytes(layer, torch.randn(count, 64, generator=torch.Generator().manual_seed(rank)))
    exact = layer.predict_memory(count, layer.row_counts)
    assert exact.tensors["T_DI"] > 0 or pair.dispatched not in ("keep", "message")
    return exact.peak / found.peak, layer.predict_memory(1024).peak / found.peak


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pair, world, n", spread(NARROW_PAIRS, [2, 4], [1, 4], every=4), ids=named)
def test_the_peak_on_every_rank_is_within_two_percent_of_the_prediction(
    pair: Restore, world: int, n: int
) -> None:
    for exact, bound in ranks(world).run(peak_job, pair, n):
        assert exact == pytest.approx(1, rel=0.02)
        assert bound >= 1


# ---- refusals, and what is allowed


def refused_job(rank: int, world: int) -> list[str]:
    from tests.gloo.kit import error_of

    plain = {"d_model": 128, "dtype": torch.float32}
    cases: list[dict[str, Any]] = [
        {**plain, "memory_reuse": Restore("message", "recompute")},
        {**plain, "memory_reuse": Restore("keep", "e4m3"), "expert": mlp},
        {**plain, "memory_reuse": Restore("keep", "e4m3"), "dtype": torch.float64},
        {**plain, "memory_reuse": Restore("keep", "e4m3"), "balance": 1},
    ]
    return [error_of(lambda case=case: build(**case)) for case in cases]


REFUSALS = (
    r"memory_reuse (message/recompute) must not keep T_DI in messages with wire (None)",
    "memory_reuse (keep/e4m3) must not keep T_M in e4m3 where experts (ModuleExperts) are no",
    "memory_reuse (keep/e4m3) must not keep T_M in e4m3 for rows of torch.float64",
    "balance (1) must be False where T_M may stay in e4m3 (memory_reuse=keep/e4m3, allow=None)",
)


def test_what_cannot_be_is_refused_by_name() -> None:
    for found in ranks(2).run(refused_job):
        for message, expected in zip(found, REFUSALS, strict=True):
            assert expected in message


def wide_job(rank: int, world: int) -> str:
    """A layer that becomes float64 after it was built."""
    layer = build(d_model=128, dtype=torch.float32, memory_reuse=Restore("keep", "e4m3")).double()
    x = tokens(5, 10 + rank, torch.float64, 128)
    try:
        layer(x)
    except ValueError as error:
        return str(error)
    return ""


def test_a_layer_that_was_made_wide_is_refused_at_its_call() -> None:
    for message in ranks(2).run(wide_job):
        assert "memory_reuse (keep/e4m3) must not keep T_M in e4m3 for rows of torch.float64" in message


def chosen_job(rank: int, world: int, allow: Any, budget: Any) -> tuple[str, set[str]]:
    layer = build(
        d_model=128, dtype=torch.float32, wire="e4m3", memory_reuse=True, memory_budget=budget, allow=allow
    )
    step(layer, tokens(20, 10 + rank, torch.float32, 128))
    assert layer.ran is not None
    return str(layer.ran.restore), {str(pair) for pair in layer.layer_modules.pairs}


@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), "1GiB"])
def test_pmoe_itself_takes_narrow_pairs_only_if_they_are_allowed(budget: Any) -> None:
    narrow = {str(pair) for pair in NARROW_PAIRS}
    for taken, pairs in ranks(2).run(chosen_job, None, budget):
        assert not pairs & narrow and taken in pairs
    found = ranks(2).run(chosen_job, "e4m3", budget)
    assert len({taken for taken, _ in found}) == 1
    for taken, pairs in found:
        assert "message/e4m3" in pairs and taken in pairs
        assert ("keep/e4m3" in pairs) == (budget is not None)


# ---- values


def bad_values_job(rank: int, world: int, bad: float) -> None:
    """A T_M that is not finite gives the gradients of its own row NaN, and no others; zero rows stay zero."""
    options = {"d_model": 128, "d_hidden": 256, "dtype": torch.float32, "check_finite": False, "bias": False}
    x = tokens(6, 10 + rank, torch.float32, 128)
    x[1] = 0
    plain = step(build(memory_reuse=Restore("communicate", "e4m3"), **options), x)
    assert all(each.isfinite().all() for each in plain.values())
    with_bad = x.clone()
    with_bad[2, 5] = bad
    layer = build(memory_reuse=Restore("communicate", "e4m3"), **options)
    leaf = with_bad.requires_grad_()
    y = layer(leaf)
    y[[0, 1, 3, 4, 5]].square().sum().backward()
    assert leaf.grad is not None and not y[2].isfinite().any()
    assert leaf.grad[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_stay_in_their_row(bad: float) -> None:
    ranks(2).run(bad_values_job, bad)
