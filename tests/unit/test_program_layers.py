"""Layers whose passes run as programs, on one rank: the engine's results to the bit, and what falls back.

`tests.programs.on_cpu` has the backend: the interpreter issues the calls, and they compute in float64.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import MoELayer, warn
from pmoe.call.options import Switches
from pmoe.call.sizes import memory_shape, rows_of_call
from pmoe.decide import program_choice
from pmoe.planner.memory import predict
from pmoe.planner.rows_per_pass import counted_rows
from pmoe.schedule.restore import ALL_PAIRS, KEEP, STRATEGIES, Restore
from tests.kit import TOP_K, assert_same, build, gradients, one_thread, step, tokens
from tests.programs import CpuBackend, CpuProgram, on_cpu
from tests.spread import named, spread
from tests.unit.test_footprint import measured

__all__ = ["one_thread"]


@pytest.fixture
def cpu() -> Iterator[CpuBackend]:
    """Lets layers run as programs on the CPU."""
    warn.GIVEN.clear()
    with on_cpu() as backend:
        yield backend


def twins(**options: Any) -> tuple[MoELayer, MoELayer]:
    """Returns the same layer twice: its passes run as programs in the first, by the engine in the second."""
    options = {"pipeline": 2, "memory_reuse": "S4", **options}
    return build(**options, program=True), build(**options)


def check(layer: MoELayer, engine: MoELayer, x: Tensor | None = None) -> None:
    """Compares a step of both, to the bit."""
    assert_same(step(layer, x), step(engine, x))
    assert layer.ran is not None and engine.ran is not None
    assert (layer.ran.path, engine.ran.path) == ("program", "pipeline")


# ---- results


@pytest.mark.sampled(4)
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("pair, n", spread(ALL_PAIRS, [1, 2, 4, 8], every=3), ids=named)
def test_a_step_by_programs_is_the_engines_to_the_bit(
    cpu: CpuBackend, pair: Restore, n: int, expert: str
) -> None:
    check(*twins(pipeline=n, memory_reuse=pair, expert=expert))


OTHERS: list[dict[str, Any]] = [
    {"bias": False},
    {"top_k": 1, "gate": "switch", "activation": "relu"},
    {"gate": "sigmoid", "expert": "swiglu"},
    {"bypass_local": False},
    {"sequential": True},
    {"d_latent": 4},
    {"memory_budget": "1MiB", "memory_reuse": True},
    {"pipeline": "solve"},
]


@pytest.mark.parametrize("options", OTHERS, ids=named)
def test_other_layers_run_as_programs_too(cpu: CpuBackend, options: dict[str, Any]) -> None:
    check(*twins(**options))


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_batch_of_few_tokens_runs_as_programs(cpu: CpuBackend, num_tokens: int) -> None:
    """With 0 tokens the gradients of parameters are zeros, as the engine's are."""
    for pair in (STRATEGIES["S1"], STRATEGIES["S4"], KEEP):
        check(*twins(pipeline=4, memory_reuse=pair), tokens(num_tokens))


@pytest.mark.parametrize("trained", [("w1",), ("b2", "w2"), ()], ids=str)
def test_frozen_parameters_get_no_gradient(cpu: CpuBackend, trained: tuple[str, ...]) -> None:
    results = []
    for layer in twins():
        for name, parameter in layer.experts.named_parameters():
            parameter.requires_grad_(name in trained)
        x = tokens().requires_grad_()
        layer(x).sum().backward()
        parameters = {name: parameter.grad for name, parameter in layer.named_parameters()}
        results.append({"x": x.grad, **parameters})
    program, engine = results
    for name, gradient in engine.items():
        other = program[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or (other is not None and torch.equal(other, gradient)), name


def test_a_call_without_gradients_keeps_nothing(cpu: CpuBackend) -> None:
    layer, engine = twins()
    with torch.no_grad():
        assert torch.equal(layer(tokens()), engine(tokens()))
    assert layer.ran is not None and layer.ran.path == "program"
    assert pmoe.pool().device.bytes_in_use == 0


def test_inputs_and_gradients_that_are_no_plain_rows_are_copied(cpu: CpuBackend) -> None:
    """x has other strides, and the gradient of a sum is one number that stands for all."""
    layer, engine = twins()
    results = []
    for each in (layer, engine):
        wide = torch.cat([tokens(), tokens()], 1).requires_grad_()
        y = each(wide[:, 1:7])
        y.sum().backward()
        results.append({"y": y.detach(), "x": wide.grad})
    assert_same(*results)


# ---- autograd


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_change_no_bit(cpu: CpuBackend, reentrant: bool) -> None:
    layer, engine = twins(memory_reuse=KEEP)
    contexts = {} if reentrant else {"context_fn": pmoe.checkpoint_contexts}

    def again(each: MoELayer) -> dict[str, Tensor]:
        return gradients(each, run=lambda x: checkpoint(each, x, use_reentrant=reentrant, **contexts))

    assert_same(again(layer), again(engine))
    assert layer.ran is not None and layer.ran.path == "program"


def test_saved_tensors_may_move_to_the_host(cpu: CpuBackend) -> None:
    layer, engine = twins(memory_reuse=KEEP)
    with save_on_cpu():
        found = gradients(layer)
    assert_same(found, gradients(engine))


def test_a_backward_pass_may_come_twice_or_in_two_halves(cpu: CpuBackend) -> None:
    results = []
    for layer in twins():
        x = tokens().requires_grad_()
        y = layer(x)
        dy = tokens(seed=4)
        parameters = list(layer.experts.parameters())
        (of_x,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        halves = torch.autograd.grad(y, parameters, dy, retain_graph=True)
        again = torch.autograd.grad(y, [x, *parameters], dy)
        results.append({str(i): each for i, each in enumerate((of_x, *halves, *again))})
    assert_same(*results)


def test_a_parameter_that_changes_before_backward_is_noticed(cpu: CpuBackend) -> None:
    layer, _ = twins()
    y = layer(tokens().requires_grad_())
    with torch.no_grad():
        layer.experts.w1.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_failed_backward_pass_gives_its_memory_back(
    cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = twins()
    y = layer(tokens().requires_grad_())

    def fail(*_: object) -> None:
        raise KeyError("record 3")

    gradients(build(pipeline=2, memory_reuse="S4", program=True))  # compiles the backward pass
    for loaded in cpu.loaded:
        monkeypatch.setattr(loaded.computing, "run", fail)
    with pytest.raises(KeyError, match="record 3"):
        y.sum().backward()
    assert pmoe.pool().device.bytes_in_use == 0


# ---- the layer


def test_programs_are_compiled_once_for_layers_with_the_same_facts(cpu: CpuBackend) -> None:
    for layer in (*twins(), *twins()):
        gradients(layer)
        gradients(layer, tokens(5))
    assert len(cpu.loaded) == 2  # forward and backward


def test_the_report_of_a_call_says_that_it_ran_as_programs(cpu: CpuBackend) -> None:
    layer, engine = twins()
    for each in (layer, engine):
        gradients(each)
    report = layer.ran
    assert report is not None and engine.ran is not None
    assert (report.path, report.forward, report.backward) == ("program", 2, 2)
    assert report.restore == engine.ran.restore
    (statistics,) = pmoe.stats(layer).layers
    assert statistics.path == "program" and statistics.predicted is not None


def test_the_switch_is_set_on_a_built_layer_and_survives_pickling(cpu: CpuBackend) -> None:
    layer = build(pipeline=2, memory_reuse="S4")
    gradients(layer)
    layer.switches = Switches(program=True)
    for each in (layer, pickle.loads(pickle.dumps(layer))):
        gradients(each)
        assert each.ran is not None and each.ran.path == "program"
    layer.switches = Switches()
    gradients(layer)
    assert layer.ran is not None and layer.ran.path == "pipeline"


def test_trials_find_the_number_of_chunks_by_the_engine(cpu: CpuBackend) -> None:
    layer, _ = twins(pipeline=True)
    gradients(layer)
    assert layer.ran is not None and layer.ran.path == "program"


# ---- memory


class Allocating(CpuBackend):
    """A backend that computes nothing, with the memory of a CUDA device: only allocations are counted."""

    device_type = "cuda"

    def refusal(self, *_: object) -> None:
        return None

    def load(self, *args: Any, **options: Any) -> CpuProgram:
        loaded = super().load(*args, **options)
        loaded.run = lambda *_: None  # type: ignore[method-assign]
        return loaded


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("pair", ALL_PAIRS, ids=str)
def test_the_memory_of_programs_on_a_device_is_predicted(pair: Restore, n: int) -> None:
    """Counts the bytes that the runner allocates in a step in bfloat16, without kernels' partial sums."""
    num_tokens, width = 2048, 256
    torch.manual_seed(0)
    layer = MoELayer(width, width, 4, 2, pipeline=n, memory_reuse=pair, bias=False, dtype=torch.bfloat16)
    layer.switches = Switches(program=True)
    with on_cpu(Allocating()):
        found = measured(layer, num_tokens)
        assert layer.ran is not None and layer.ran.path == "program"
    modules, counts = layer.layer_modules, layer.row_counts
    assert counts is not None
    columns = modules.experts.columns("cuda")
    sizes = replace(memory_shape(modules), device_type="cuda", columns=columns, programs=True, places=True)
    rows = counted_rows(sizes, counts, 0, n, 0)
    predicted = predict(sizes, rows_of_call(modules, num_tokens, (n,)), rows, rows, pair)
    parts = 4 * min(n, 2) * rows.largest_unit * 4
    assert predicted.saved == pytest.approx(found.held, rel=0.04)
    assert found.peak <= predicted.peak <= 1.03 * found.peak + parts, (found.peak, predicted.peak, parts)


# ---- what falls back


def fallbacks(run: Callable[[], object]) -> list[str]:
    """Runs a function twice. Returns the reasons for which the engine ran in place of programs."""
    warn.GIVEN.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
        run()
    texts = [str(each.message) for each in told]
    return [text.partition(" because ")[2] for text in texts if "program (True) falls back" in text]


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"memory_reuse": False}, "chunks have buffers of their own (memory_reuse=False)"),
        ({"expert": lambda: torch.nn.Linear(6, 6).double()}, "experts (ModuleExperts) are modules"),
        ({"shared_expert": 8}, "there is a shared expert"),
        ({"order": "einsum"}, "the order is a EinsumOrder"),
        ({"capacity_factor": 1.0}, "rows are dropped over a capacity (capacity_factor=1.0)"),
        ({"capacity_factor": 1.0, "pad_to_capacity": True}, "rows are dropped over a capacity"),
        ({"pipeline_backward": 1}, "both passes must have the same chunks: forward 2, backward 1"),
        ({"fused": True}, "kernels are fused (fused=True)"),
        ({"gate": "expert_choice"}, "the gate (ExpertChoiceGate) mixes tokens or picks them"),
    ],
    ids=named,
)
def test_layers_that_programs_do_not_take_run_by_the_engine_and_the_reason_is_told_once(
    cpu: CpuBackend, options: dict[str, Any], reason: str
) -> None:
    layer, engine = twins(**options)
    found: list[dict[str, Tensor]] = []
    reasons = fallbacks(lambda: found.append(gradients(layer)))
    assert layer.ran is not None and layer.ran.path == "pipeline"
    assert len(reasons) == 1 and reasons[0].startswith(reason), reasons
    assert_same(found[0], gradients(engine))


def test_pairs_that_keep_tensors_in_fewer_bytes_are_refused_by_name() -> None:
    for options in (
        {"memory_reuse": Restore("communicate", "e4m3")},
        {"memory_reuse": True, "allow": "e4m3"},
    ):
        layer, _ = twins(dtype=torch.float32, **options)
        reason = program_choice.layer_refusal(layer.layer_modules)
        assert reason is not None and reason.startswith("T_M may stay in e4m3"), options


def test_on_a_device_without_a_backend_the_engine_runs() -> None:
    layer, engine = twins()
    (reason,) = fallbacks(lambda: gradients(layer))
    assert reason == "its tensors are on cpu, and pass programs run on CUDA devices"
    assert_same(gradients(layer), gradients(engine))


def test_a_dtype_that_the_backend_does_not_take_is_named(cpu: CpuBackend) -> None:
    layer, _ = twins(dtype=torch.float32)
    (reason,) = fallbacks(lambda: layer(tokens(dtype=torch.float32)).sum().backward())
    assert reason == "tests compute programs in float64: torch.float32"


def test_rows_that_an_index_cannot_count_run_by_the_engine(
    cpu: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index is int32. All ranks decide by the largest number of tokens of any rank."""
    monkeypatch.setattr(program_choice, "MOST_ROWS", 11 * TOP_K)
    layer, _ = twins()
    gradients(layer, tokens(11))
    assert layer.ran is not None and layer.ran.path == "program"
    (reason,) = fallbacks(lambda: gradients(layer, tokens(12)))
    assert reason == "indices of rows are int32: up to 24 rows, at most 22"
    assert layer.ran is not None and layer.ran.path == "pipeline"
