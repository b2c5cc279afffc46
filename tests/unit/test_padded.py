"""Rows padded to the capacity, and what a CUDA graph may capture, on one rank and without a GPU.

Letters: T tokens, K choices, E experts, M = d_model, N padded rows.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.decide import begin
from pmoe.engine.lanes.recorder import recording
from pmoe.engine.plan.callbacks import Callback
from pmoe.engine.variants.padding import PaddedRowCounts, make_padding
from pmoe.gates.capacity import within_capacity
from pmoe.runners import one_rank
from pmoe.schedule.restore import ALL_PAIRS
from tests import kit
from tests.kit import D_MODEL as M
from tests.kit import NUM_EXPERTS as E
from tests.kit import assert_same, loss_of
from tests.spread import named
from tests.switched import switched_layer


def make(**options: Any) -> pmoe.MoELayer:
    """Returns a layer with an uneven gate: the capacity drops some rows and leaves room for others."""
    return kit.build(**{"capacity_factor": 0.7, **options})


def padded(**options: Any) -> pmoe.MoELayer:
    return make(**options, pad_to_capacity=True)


def tokens(num_tokens: int = 13, dtype: torch.dtype = torch.float64) -> Tensor:
    return kit.tokens(num_tokens, dtype=dtype)


def step(layer: pmoe.MoELayer, x: Tensor, *args: Tensor) -> dict[str, Tensor]:
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = layer(x, *args)
    loss_of(layer, y).backward()
    parameters = layer.named_parameters()
    found = {name: each.grad for name, each in parameters if each.grad is not None}
    load = layer.tokens_per_expert.double()
    return {"y": y.detach(), "l_aux": layer.l_aux.detach(), "load": load, "x": x.grad, **found}


def check(x: Tensor, *args: Tensor, **options: Any) -> dict[str, Any]:
    """Runs a step with padding and the same step without, and checks that the results are equal."""
    torch.manual_seed(1)
    expected = step(make(**options), x, *args)
    torch.manual_seed(1)
    found = step(padded(**options), x, *args)
    assert_same(found, expected, 1e-12)
    return found


# ---- the layer


@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("capacity_factor", [0.3, 0.7, 2.5])
def test_a_padded_layer_equals_the_same_without_padding(capacity_factor: float, bypass_local: bool) -> None:
    for top_k, n in itertools.product((1, 2, 4), (1, 3)):
        options = {"top_k": top_k, "pipeline": n, "bypass_local": bypass_local}
        check(tokens(), capacity_factor=capacity_factor, **options)


@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_every_restore_pair_equals_the_layer_without_padding(pair: pmoe.Restore) -> None:
    for n, backward in ((2, None), (4, 2), (2, 4)):
        check(tokens(), memory_reuse=pair, pipeline=n, pipeline_backward=backward, bypass_local=n == 4)


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": True},
        {"pipeline": "solve"},
        {"memory_reuse": True, "pipeline": 2},
        {"expert": "swiglu", "bias": False},
        {"expert": lambda: nn.Linear(M, M).double(), "pipeline": 2},
        {"expert": lambda: nn.Linear(M, M).double(), "pipeline": 2, "memory_reuse": "S4"},
        {"order": "einsum", "pipeline": 2},
        {"sequential": True, "pipeline": 3, "bypass_local": False},
        {"gate": "switch", "top_k": 1},
        {"gate": "deepseek"},
        {"gate": "random"},
        {"gate": "noisy_topk", "z_loss_weight": 0.1},
    ],
    ids=named,
)
def test_other_options_equal_the_layer_without_padding(
    options: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    check(tokens(), **options)


def test_a_gate_of_pmoe_that_is_given_as_a_module_and_one_that_wants_token_ids() -> None:
    gate = pmoe.gates.DeepSeekGate(M, E, 2, num_groups=2, top_groups=2).double()
    expected, found = make(gate=copy.deepcopy(gate)), padded(gate=copy.deepcopy(gate))
    assert_same(step(found, tokens()), step(expected, tokens()), 1e-12)
    check(tokens(), torch.arange(13), gate="hash")


@pytest.mark.parametrize("factor", [2.0, 7.0, 1e9])
def test_no_expert_has_more_rows_than_there_are_tokens_however_large_the_factor(factor: float) -> None:
    for top_k in (1, 2, E):
        check(tokens(), capacity_factor=factor, top_k=top_k)
    layer = padded(capacity_factor=factor)
    layer(tokens())
    assert layer.row_counts is not None and layer.row_counts.send.tolist() == [[[13] * E]]


def test_no_tokens() -> None:
    found = check(tokens(0), pipeline=2)
    assert found["y"].shape == (0, M) and not found["experts.w1"].any() and not found["load"].any()


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_output_may_be_changed_in_place(top_k: int) -> None:
    """The output with top-1 routing was once a view that autograd did not know, and refused to let change."""
    layer, x = padded(top_k=top_k), tokens().requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).mul(3).sum(), x)
    (got,) = torch.autograd.grad(layer(x).mul_(3).sum(), x)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("n", [1, 4])
def test_all_tokens_to_one_expert(n: int) -> None:
    x = tokens()
    x[:, 0] = 1
    layers_of = {}
    for name, build in (("plain", make), ("padded", padded)):
        layers_of[name] = build(top_k=1, pipeline=n)
        with torch.no_grad():
            layers_of[name].gate.weight[2, 0] += 100
    found = step(layers_of["padded"], x)
    assert_same(found, step(layers_of["plain"], x), 1e-12)
    assert found["load"].tolist() == [0, 0, 3, 0]  # ceil(0.7 * 13 / 4)
    assert (found["y"] != 0).any(1).sum() == 3


def test_under_autocast_rows_are_cast_before_they_are_padded() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (
            step(build(dtype=torch.float32), tokens(dtype=torch.float32)) for build in (padded, make)
        )
    assert found["y"].dtype == torch.bfloat16 and found["x"].dtype == torch.float32
    assert_same(found, expected, 0.02)


def test_frozen_experts_and_inference() -> None:
    frozen = [build(pipeline=2) for build in (padded, make)]
    for layer in frozen:
        layer.experts.requires_grad_(False)
    found, expected = (step(layer, tokens()) for layer in frozen)
    assert "experts.w1" not in found  # it has no gradient
    assert_same(found, expected, 1e-12)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(frozen[0](tokens()), found["y"])


def test_statistics_count_rows_that_are_no_padding_and_row_counts_those_that_travel() -> None:
    layer = padded(pipeline=2)
    layer(tokens())
    capacity = 5  # ceil(0.7 * 13 * 2 / 4), which is 3 a bin
    keep, _ = within_capacity(layer.gate(tokens()).expert, capacity, torch.zeros(E, dtype=torch.int64))
    load = layer.tokens_per_expert
    assert load.sum() == keep.sum() < 26 and load.dtype == torch.int64 and load.max() == capacity
    assert layer.row_counts is not None and layer.row_counts.send.tolist() == [[[3] * E]] * 2
    assert layer.max_tokens == 13 and layer.ran is not None and layer.ran.num_slots == 26
    assert layer.ran.forward == layer.ran.backward == 2


def test_two_runs_give_the_same_bits_in_deterministic_mode() -> None:
    layer = padded(pipeline=2, memory_reuse="S4")
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(step(layer, tokens()), step(layer, tokens()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_second_backward_equals_the_first() -> None:
    layer, x = padded(pipeline=2, memory_reuse="S4"), tokens().requires_grad_()
    y = layer(x).square().sum()
    leaves = [x, *layer.experts.parameters()]
    first, second = torch.autograd.grad(y, leaves, retain_graph=True), torch.autograd.grad(y, leaves)
    assert all(map(torch.equal, first, second))


def test_checkpointing_with_frozen_routing() -> None:
    layer, x = padded(gate="noisy_topk", pipeline=2), tokens().requires_grad_()
    found = []
    for run in (
        layer,
        lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts),
    ):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()]))
    assert all(map(torch.equal, *found))


def test_what_is_sent_again_is_padded_again_and_held_by_nobody() -> None:
    """A layer with communicate/recompute holds tokens between the passes, not padded rows."""
    num_tokens, factor = 64, 1.5
    held = {}
    for pair in (pmoe.Restore("keep", "recompute"), pmoe.Restore("communicate", "recompute")):
        layer = padded(memory_reuse=pair, capacity_factor=factor, pipeline=2)
        kept: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

        def pack(tensor: Tensor, kept: dict[int, int] = kept, own: set[int] = own) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(tokens(num_tokens).requires_grad_())
        held[pair.dispatched] = sum(kept.values())
    rows = int(num_tokens * 2 * factor)
    assert held["keep"] - held["communicate"] == rows * M * 8  # the gate holds the tokens in any case


def test_nothing_is_read_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has no values to read, so any operation that waits for a number fails."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # knows no meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)

    def run(**options: Any) -> None:
        layer = switched_layer(8, 16, E, **{"top_k": 2, "capacity_factor": 1.0, **options}, device="meta")
        x = torch.empty(24, 8, device="meta", requires_grad=True)
        y = layer._forward_plain(x)  # a call on the meta device computes shapes only
        (y.sum() + layer.l_aux).backward()
        assert x.grad is not None and layer.experts.w1.grad is not None

    on_device = [pair for pair in ALL_PAIRS if not pair.offloads]
    gates = ("noisy_topk", "sigmoid", "deepseek", "xmoe", "random")
    cases: list[dict[str, Any]] = [
        {"pipeline": 3},
        {"capacity_factor": 0.3, "expert": "swiglu", "pipeline": 2},
        *({"memory_reuse": pair, "pipeline": 4, "pipeline_backward": 2} for pair in on_device),
        *({"gate": gate} for gate in gates),
    ]
    for case, bypass_local in itertools.product(cases, (True, False)):
        run(pad_to_capacity=True, bypass_local=bypass_local, **case)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        run()


def test_copies_have_agreed_on_nothing() -> None:
    layer = padded()
    layer(tokens())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert layer.cache.padded_kinds and not other.cache.padded_kinds
        assert torch.equal(other(tokens()), layer(tokens()))
    assert "pad_to_capacity=True" in repr(layer) and "pad_to_capacity" not in repr(make())


def test_so_many_kinds_are_remembered_at_most() -> None:
    layer = padded()
    for num_tokens in range(1, 400):
        layer(tokens()[:1].expand(num_tokens, -1))
    assert 0 < len(layer.cache.padded_kinds) <= 256


# ---- what it cannot be combined with


class SeesRows(Callback):
    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows


@pytest.mark.parametrize(
    "options, match",
    [
        ({"capacity_factor": None}, "capacity_factor is None, which sets no capacity"),
        (
            {"gate": "expert_choice", "capacity_factor": 1.0},
            "ExpertChoiceGate.* mixes tokens or picks them",
        ),
        ({"gate": "batch_prioritised"}, r"the gate \(BatchPrioritisedGate\) decides itself"),
        ({"gate": "soft", "capacity_factor": None}, "capacity_factor is None, which sets no capacity"),
        ({"gate": nn.Linear(M, E)}, r"gate \(Linear\) is a module of one's own"),
        ({"check_finite": True}, r"check_finite=True"),
        ({"send_once": True}, r"send_once=True"),
        ({"dispatch": "hierarchical_1d", "nodes": 1}, "do not travel by flat all-to-alls"),
        ({"callbacks": [SeesRows()]}, "callbacks see rows between the gate and the end of combine"),
        ({"shared_expert": 8}, "there is a shared expert"),
        ({"fused": True}, r"kernels are fused \(fused=True\)"),
        ({"fused": "auto"}, r"kernels are fused \(fused='auto'\)"),
    ],
    ids=named,
)
def test_what_padding_cannot_be_combined_with_is_named(options: dict[str, Any], match: str) -> None:
    make(**options)
    with pytest.raises(ValueError, match=rf"pad_to_capacity \(True\) must be False where .*{match}"):
        padded(**options)


def test_a_budget_is_refused_and_so_is_no_flag() -> None:
    with pytest.raises(ValueError, match=r"memory_budget \('1GiB'\) must be left out where rows are padded"):
        padded(memory_budget="1GiB")
    with pytest.raises(TypeError, match=r"pad_to_capacity \(1\) must be True or False"):
        make(pad_to_capacity=1)


def test_bad_input_is_refused_as_ever() -> None:
    layer = padded()
    with pytest.raises(ValueError, match=r"must end in d_model \(6\)"):
        layer(torch.zeros(3, M + 1))
    with pytest.raises(ValueError, match=r"float32 must be of the layer's dtype"):
        layer(tokens().float())
    with pytest.raises(TypeError, match=r"x \(int\) must be a torch.Tensor"):
        layer(3)


# ---- splits and padding, by hand


def test_rows_stand_by_bin_and_expert() -> None:
    splits = PaddedRowCounts(num_experts=2, capacity=5, bins=2)
    assert splits.rows_a_bin == 3 and splits.num_rows == 12
    found = splits.expert_of_rows(torch.device("cpu"))
    assert found.flatten().tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert splits.counts(2, torch.device("cpu"), max_tokens=6, needs_grad=False).recv.tolist() == [
        [[3], [3]],
        [[3], [3]],
    ]


def test_the_first_rows_of_an_expert_get_a_place() -> None:
    expert_TK = torch.tensor([[1], [1], [0], [1], [1]])
    splits = PaddedRowCounts(num_experts=2, capacity=3, bins=2)  # 2 rows a bin, of 4 places 3 are given
    padding, kept_E = make_padding(expert_TK, splits)
    assert padding.position_TK.flatten().tolist() == [2, 3, 0, 6, 8]  # the last one is dropped
    assert padding.slot_N.tolist() == [2, 5, 0, 1, 5, 5, 3, 5]  # 5 is padding
    assert kept_E.tolist() == [1, 3]


def test_spreading_and_gathering_are_each_others_transpose() -> None:
    generator = torch.Generator().manual_seed(0)
    expert_TK = torch.rand(9, E, generator=generator).argsort(1)[:, :2]
    padding, _ = make_padding(expert_TK, PaddedRowCounts(num_experts=E, capacity=4, bins=3))
    num_rows = padding.slot_N.numel()
    x_TM, rows_NM = torch.randn(9, M), torch.randn(num_rows, M)
    torch.testing.assert_close((padding.spread(x_TM) * rows_NM).sum(), (x_TM * padding.gather(rows_NM)).sum())
    weight_TK, weight_N1 = torch.randn(9, 2), torch.randn(num_rows, 1)
    torch.testing.assert_close(
        (padding.spread_weights(weight_TK) * weight_N1).sum(),
        (weight_TK * padding.gather_weights(weight_N1)).sum(),
    )


def test_padding_is_zero_whatever_the_tokens_hold() -> None:
    padding, _ = make_padding(torch.tensor([[0], [0]]), PaddedRowCounts(num_experts=2, capacity=2, bins=1))
    assert padding.spread(torch.tensor([[1.0], [torch.nan]]))[2:].tolist() == [[0], [0]]


# ---- CUDA graphs: what they cannot hold is refused before anything is launched


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a context in which calls count as captured by a CUDA graph.

    With the argument ``gate``, the test fails if that gate runs.
    """

    @contextlib.contextmanager
    def captured(gate: nn.Module | None = None) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(begin, "is_for_graph", lambda _: True)
            if gate is not None:
                patch.setattr(gate, "forward", lambda *_: pytest.fail("the gate was run"))
            yield

    return captured


def alone_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Lets the runner for one rank (`pmoe.runners.one_rank`) take any layer on the CPU."""
    patch.setattr(one_rank, "DEVICES", ("cpu",))
    patch.setattr(one_rank, "kernel_refusal", lambda *_, **__: None)


@pytest.mark.parametrize(
    "options, match",
    [
        ({}, "13 tokens on cpu"),
        ({"pipeline": 2}, r"pipeline \(2\)"),
        ({"memory_reuse": "S4"}, r"ring slots \(memory_reuse=communicate/recompute\)"),
        ({"capacity_factor": 1.0}, "rows are dropped over a capacity"),
        ({"gate": "sigmoid"}, "the gate is a SigmoidGate"),
        ({"bypass_local": False}, "rows are sent to their own rank"),
    ],
    ids=named,
)
def test_a_call_that_reads_row_counts_cannot_be_captured(
    capturing: Any, options: dict[str, Any], match: str
) -> None:
    layer = make(**{"capacity_factor": None, **options})
    with (
        capturing(layer.gate),
        pytest.raises(RuntimeError, match=f"CUDA graph cannot hold .*{match}.*capacity"),
    ):
        layer(tokens())
    assert layer(tokens()).shape == (13, M)


def test_one_rank_by_the_kernels_can_be_captured(capturing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(capacity_factor=None)
    alone_on_cpu(monkeypatch)
    with capturing():
        found = layer(tokens())
    assert torch.equal(found, layer(tokens()))


def test_counts_on_the_device_are_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph that is replayed writes new counts into the same memory."""
    alone_on_cpu(monkeypatch)
    unpadded, layer = make(capacity_factor=None), padded()
    for each in (unpadded, layer):
        each(tokens())
        before = each.tokens_per_expert
        counts = each.last.counts.kept_device_E if each is layer else each.last.counts.shared.send
        counts += 1
        assert torch.equal(each.tokens_per_expert, before + 1)


def test_padded_calls_can_be_captured_if_one_like_them_came_before(capturing: Any) -> None:
    layer = padded(pipeline=2, memory_reuse="S4")
    expected = layer(tokens())
    with capturing():
        assert torch.equal(layer(tokens()), expected)
    with capturing(layer.gate):
        for refused in (lambda: layer(tokens(12)), lambda: torch.no_grad()(layer)(tokens())):
            with pytest.raises(RuntimeError, match=r"no call of its kind \(.*num_tokens=1.*made before"):
                refused()
        with pytest.raises(ValueError, match="must end in d_model"):
            layer(torch.zeros(3, M + 1))


def test_padded_calls_that_would_reach_the_host_cannot_be_captured(capturing: Any) -> None:
    modules = {"expert": lambda: nn.Linear(M, M).double()}
    for options, match in (
        ({"memory_reuse": "S1"}, r"memory_reuse \(.*offload.*\) may offload"),
        ({"memory_reuse": True}, r"memory_reuse \(True\) may offload"),
        ({"memory_reuse": "S4", **modules}, r"memory_reuse \(.*\) may recompute modules"),
    ):
        layer = padded(**options)
        if options["memory_reuse"] is not True:  # whose rates would be measured
            layer(tokens())
        with capturing(layer.gate), pytest.raises(RuntimeError, match=match):
            layer(tokens())


def test_padded_calls_that_are_timed_cannot_be_captured(capturing: Any) -> None:
    layer = padded()
    layer(tokens())
    with recording(), capturing(layer.gate), pytest.raises(RuntimeError, match="its tasks are being timed"):
        layer(tokens())


def test_calls_on_the_cpu_never_ask_about_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked"))
    for layer in (make(), padded()):
        assert layer(tokens()).shape == (13, M)
