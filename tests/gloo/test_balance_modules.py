"""``balance`` with experts that are modules of one's own: copied with their parameters and buffers.

Output and every gradient are those of the same layer without copies, to the order of sums.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import warn
from pmoe.experts.architecture import architecture_of, why_not_copied
from pmoe.gates import TopKGate
from pmoe.gates.forced import ForcedGate
from pmoe.schedule.restore import ALL_PAIRS
from tests.gloo.kit import error_of
from tests.gloo.test_balance import TOKENS, differences, gradients_of_two_calls
from tests.kit import AUX, tokens
from tests.pool import ranks
from tests.spread import spread

M, H = 6, 10
F64 = torch.float64


class Own(nn.Module):
    """An expert with a buffer, one of integers that no state dict has, an unused and a tied parameter."""

    def __init__(self, dtype: torch.dtype = F64) -> None:
        super().__init__()
        self.up = nn.Linear(M, H, dtype=dtype)
        self.down = nn.Linear(H, M, bias=False, dtype=dtype)
        self.tied = self.up
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("scale", torch.rand(M, dtype=dtype))
        self.register_buffer("places", torch.randperm(M)[:3], persistent=False)
        self.register_buffer("flags", torch.rand(3) > 0.5)
        self.config = SimpleNamespace(power=2, act=torch.nn.functional.gelu, names=["a", "b"])

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.config.act(self.tied(x)) ** self.config.power) * self.scale
        return y + (x[:, self.places] * self.flags).sum(1, keepdim=True)


def build(
    balance: int, case: tuple[int, int, float, tuple[int, ...]], expert: Any = Own, **options: Any
) -> pmoe.MoELayer:
    num_experts, top_k, share, busy = case
    torch.manual_seed(7)
    gate = ForcedGate(TopKGate(M, num_experts, top_k, dtype=F64), num_experts, busy=busy, share=share)
    return pmoe.MoELayer(M, H, num_experts, top_k, gate=gate, expert=expert, balance=balance, **options)


def step(
    layer: pmoe.MoELayer, rank: int, world: int, run: Any = None, seed: int = 0
) -> dict[str, Tensor | None]:
    x = tokens(TOKENS[world][rank], 10 + rank + seed).requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = (run or layer)(x)
    ((y * tokens(len(x), 20 + rank)).sum() + AUX * layer.l_aux).backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "rows": layer.tokens_per_expert, "x": x.grad, **gradients}


def compared(rank: int, world: int, case: tuple[Any, ...], balance: int, **options: Any) -> list[str]:
    without = step(build(0, case, **options), rank, world)
    layer = build(balance, case, **options)
    found = step(layer, rank, world)
    assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies
    return differences(found, without, 1e-12)


CASES: list[tuple[int, int, tuple[Any, ...]]] = [
    (2, 1, (4, 1, 0.8, (0,))),
    (2, 2, (8, 2, 0.9, (4, 5))),
    (4, 1, (4, 1, 0.9, (2,))),
    (4, 2, (8, 2, 0.8, (0, 1))),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world, balance, case, n, pair",
    spread(CASES, [1, 2, 4], [False, *ALL_PAIRS], every=5),
)
def test_output_and_gradients_are_those_without_copies(
    world: int, balance: int, case: tuple[Any, ...], n: int, pair: Any
) -> None:
    options = {"pipeline": n, "memory_reuse": pair}
    found = ranks(world).run(partial(compared, balance=balance, **options), case)
    assert found == [[]] * world


def compared_job(rank: int, world: int, case: tuple[Any, ...], balance: int, options: Any) -> list[str]:
    return compared(rank, world, case, balance, **options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pipeline": 4, "pipeline_backward": 2}, id="fewer chunks in backward"),
        pytest.param({"pipeline": 2, "pipeline_backward": 3, "memory_reuse": "S4"}, id="unlike chunks"),
        pytest.param({"capacity_factor": 1.5, "pipeline": 2}, id="capacity", marks=pytest.mark.slow),
        pytest.param({"shared_expert": Own(), "send_once": True}, id="sent once", marks=pytest.mark.slow),
        pytest.param({"pipeline": True}, id="n by rule", marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "memory_reuse": True}, id="pair by rates", marks=pytest.mark.slow),
    ],
)
def test_modules_are_copied_beside_other_options(options: dict[str, Any]) -> None:
    assert ranks(2).run(compared_job, (8, 2, 0.9, (4, 5)), 2, options) == [[], []]


def parametrized() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(M, H, dtype=F64)), nn.Linear(H, M, dtype=F64))


def test_parametrized_modules_are_copied() -> None:
    options = {"expert": parametrized, "memory_reuse": "S4", "pipeline": 2}
    assert ranks(2).run(compared_job, (4, 1, 0.8, (0,)), 1, options) == [[], []]


def checkpointed_job(rank: int, world: int, way: str) -> list[str]:
    options: dict[str, Any] = {"use_reentrant": way == "reentrant"}
    if way == "contexts":
        options["context_fn"] = pmoe.checkpoint_contexts
    found = []
    for balance in (0, 1):
        layer = build(balance, (4, 1, 0.8, (0,)), pipeline=2)
        found.append(step(layer, rank, world, lambda x, of=layer: checkpoint(of, x, **options)))
    return differences(found[1], found[0], 1e-12)


@pytest.mark.parametrize("way", ["contexts", "plain", pytest.param("reentrant", marks=pytest.mark.slow)])
def test_checkpoints_repeat_copies_of_modules(way: str) -> None:
    assert ranks(2).run(checkpointed_job, way) == [[], []]


def twice_job(rank: int, world: int) -> list[str]:
    without, balanced = (
        gradients_of_two_calls(build(balance, (8, 1, 0.8, (0,)), pipeline=2), rank, world)
        for balance in (0, 2)
    )
    return differences(balanced, without, 1e-12)


def test_backward_of_copied_modules_may_run_in_any_order_and_twice() -> None:
    assert ranks(4).run(twice_job) == [[]] * 4


def frozen_job(rank: int, world: int) -> list[str]:
    found = []
    for balance in (0, 1):
        layer = build(balance, (4, 1, 0.8, (0,)))
        for place, expert in enumerate(layer.experts.local):
            expert.up.requires_grad_(rank == 1)  # the busy expert is rank 0's
            expert.down.requires_grad_(place == 0)
        found.append(step(layer, rank, world))
    return differences(found[1], found[0], 1e-12)


def test_frozen_parameters_of_some_modules_get_no_gradients() -> None:
    assert ranks(2).run(frozen_job) == [[], []]


def evaluated_job(rank: int, world: int) -> tuple[list[bool], list[bool]]:
    """Calls in evaluation, between which rank 0 changes its busy expert: are copies sent, results right?"""
    case = (4, 1, 0.8, (0,))
    layer = build(1, case).eval()
    plain = build(0, case).eval()
    sent = []
    right = []

    def change(what: str) -> None:
        if rank:
            return
        for each in (layer, plain):
            expert = each.experts.local[0]
            if what == "buffer":
                expert.scale.mul_(2)
            elif what == "buffer by data":
                expert.flags.data.logical_not_()
            elif what == "buffer replaced":
                expert.scale = expert.scale * 3
            elif what == "parameter":
                expert.up.weight.data.mul_(2)
            elif what == "state dict":
                state = {name: 2 * value for name, value in expert.state_dict().items() if name != "flags"}
                expert.load_state_dict(state, strict=False)
            elif what == "module":
                torch.manual_seed(9)
                each.experts.local[0] = Own().eval()

    changes = ("", "", "buffer", "", "buffer by data", "buffer replaced", "parameter", "state dict", "module")
    for what in changes:
        with torch.no_grad():
            change(what)
            x = tokens(TOKENS[world][rank], rank)
            before = layer.traffic.weights
            right.append(torch.allclose(layer(x), plain(x), rtol=1e-12, atol=1e-12))
            sent.append(layer.traffic.weights > before)
    return sent, right


def test_copies_of_modules_stay_until_a_value_changes() -> None:
    (sent, right), (_, also_right) = ranks(2).run(evaluated_job)
    assert all(right) and all(also_right)
    assert sent == [True, False, True, False, True, True, True, True, True]


def inference_job(rank: int, world: int, kind: type[nn.Module]) -> tuple[str, bool]:
    """The error of a call in inference mode, and whether its results are those without copies."""
    outputs = []

    def call() -> None:
        for balance in (0, 1):
            layer = build(balance, (4, 1, 0.8, (0,)), kind, group=dist.new_group()).eval()
            with torch.inference_mode():
                outputs.append(layer(tokens(TOKENS[world][rank], rank)))
        assert layer.ran is not None and layer.ran.balance is not None and layer.ran.balance.copies

    return error_of(call), len(outputs) == 2 and torch.allclose(*outputs, rtol=1e-12, atol=1e-12)


def test_copies_of_modules_compute_in_inference_mode() -> None:
    assert ranks(2).run(inference_job, Own) == [("", True)] * 2
    for message, _ in ranks(2).run(inference_job, Counting):
        assert "a copy (balance), changes its calls in forward" in message


# ---- refusals


class Setting(nn.Module):
    """An expert with an attribute."""

    def __init__(self, value: Any = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(M, M, dtype=F64)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(M, M, dtype=F64))
    module[0].register_forward_hook(lambda *_: None)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(M, M), nn.Dropout(0.25)),
        r"expert Sequential draws random numbers: 1 \(Dropout\) must have p=0",
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(M, M), nn.BatchNorm1d(M)),
        r"normalizes over the rows of a batch: 1 \(BatchNorm1d\) must be a norm of each row, .*LayerNorm",
    ),
    "hooks": (hooked, r"expert Sequential has hooks, .*: remove those of 0 \(Linear\)"),
    "dtypes": (
        lambda: nn.Sequential(nn.Linear(M, M), nn.LayerNorm(M).double()),
        r"parameters of several dtypes \(torch.float32, torch.float64\): give them one",
    ),
    "no parameters": (nn.Identity, "expert Identity has no parameters"),
    "tensor": (
        lambda: Setting(torch.ones(2)),
        r"attribute value \(a Tensor\).*: make it a parameter or buffer",
    ),
    "hidden module": (lambda: Setting([nn.Linear(2, 2)]), r"value.0 \(a Linear\).*: register it as a module"),
    "generator": (lambda: Setting(torch.Generator()), r"attribute value \(a Generator\), which cannot be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_a_module_from_being_copied_is_named_with_its_cure(name: str) -> None:
    build_expert, sentence = REFUSED[name]
    assert re.search(sentence, why_not_copied([build_expert()]))


def unlike(first: nn.Module, second: nn.Module) -> str:
    return why_not_copied([first, second])


def test_experts_that_differ_are_named() -> None:
    assert "number 0 of this rank has value = 1.0" not in unlike(Setting(1.0), Setting(1.0))
    assert "has the expert.value = 1.0, number 1 has the expert.value = 2.0" in unlike(
        Setting(), Setting(2.0)
    )
    assert "torch.nn.modules.activation.ReLU" in unlike(nn.Sequential(Own(), nn.ReLU()), nn.Sequential(Own()))
    assert unlike(Own(), Own()) == ""
    assert "training=False" in unlike(Own(), Own().eval())


def test_functions_are_compared_by_what_they_do() -> None:
    def times(factor: float) -> nn.Module:
        return Setting(lambda x: x * factor)

    def shifted(number: float) -> nn.Module:
        return Setting(partial(torch.add, alpha=number))

    assert unlike(times(2), times(2)) == unlike(shifted(1), shifted(1)) == ""
    assert unlike(times(2), times(3)) and unlike(shifted(1), shifted(2))
    assert unlike(Setting(lambda x: x + 1), Setting(lambda x: x + 2))
    assert unlike(Setting(lambda x: x.sin()), Setting(lambda x: x.cos()))


def test_an_architecture_has_no_addresses() -> None:
    lines = "\n".join(architecture_of(Own()))
    assert "0x" not in lines and lines == "\n".join(architecture_of(copy.deepcopy(Own())))


def refused_job(rank: int, world: int) -> dict[str, str]:
    case = (4, 1, 0.8, (0,))
    experts = {
        "built": partial(build, 1, case, REFUSED["dropout"][0]),
        "unlike": partial(build, 1, case, nn.ModuleList([Setting(1.0), Setting(2.0)])),
    }
    found = {name: error_of(make) for name, make in experts.items()}
    layer = build(0, case, REFUSED["dropout"][0])
    found["set later"] = error_of(lambda: setattr(layer, "balance", 1))
    # A group of its own: an error on all ranks leaves it unused.
    layer = build(1, case, partial(Setting, float(rank)), group=dist.new_group())
    found["ranks"] = error_of(lambda: layer(tokens(20, rank)))
    return found


def test_modules_that_cannot_be_copied_are_refused_by_name() -> None:
    for found in ranks(2).run(refused_job):
        for name in ("built", "set later"):
            assert re.match(
                r"ValueError: balance \(1\) must be False where expert Sequential dr", found[name]
            )
        assert "number 1 has the expert.value = 2.0. Build all experts alike" in found["unlike"]
        assert re.match(
            r"ValueError: balance \(1\) must be False where experts are modules that differ between ranks "
            r".*: rank 0 has the expert.value = 0.0, rank 1 has the expert.value = 1.0",
            found["ranks"],
        )


def later_job(rank: int, world: int) -> tuple[list[int], list[str], list[str]]:
    """Copies while a rank's expert has a hook, the warnings, and the wrong values."""
    warn.GIVEN.clear()
    copies = []
    wrong = []
    layer, plain = (build(balance, (4, 1, 0.8, (0,))) for balance in (1, 0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for is_hooked in (False, True, True, False):
            handle = None
            if is_hooked and rank == 0:
                handle = layer.experts.local[1].register_forward_hook(lambda *_: None)
            wrong += differences(step(layer, rank, world), step(plain, rank, world), 1e-12)
            assert layer.ran is not None and layer.ran.balance is not None
            copies.append(layer.ran.balance.copies)
            if handle is not None:
                handle.remove()
    return copies, [str(each.message) for each in caught if "makes no copies" in str(each.message)], wrong


def test_a_hook_that_comes_later_ends_copies_and_is_named_once() -> None:
    (copies, messages, wrong), (of_other, other_messages, also_wrong) = ranks(2).run(later_job)
    assert copies == of_other == [1, 0, 0, 1] and not wrong and not also_wrong
    assert len(messages) == len(other_messages) == 1
    assert "balance (1) makes no copies of busy experts: expert Own has hooks" in messages[0]
    assert "another rank's experts cannot be copied" in other_messages[0]


class Random(Setting):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + torch.rand(())


class Counting(Setting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)


class Replacing(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.inner(x)


def unsteady_job(rank: int, world: int, kind: type[nn.Module]) -> str:
    layer = build(1, (4, 1, 0.8, (0,)), kind, group=dist.new_group())
    return error_of(lambda: layer(tokens(TOKENS[world][rank], rank)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind, sentence",
    [
        (Random, "draws random numbers"),
        (Counting, "changes its calls"),
        pytest.param(Replacing, "changes its calls", marks=pytest.mark.slow),
    ],
)
def test_an_expert_that_computes_unlike_on_each_rank_is_named(kind: type[nn.Module], sentence: str) -> None:
    found = ranks(2).run(unsteady_job, kind)
    for message in found:
        assert (
            f"expert {kind.__name__}, of which another rank computes a copy (balance), {sentence}" in message
        )
    assert "global rank 1 raised RuntimeError" in found[0]
