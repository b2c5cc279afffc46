"""A gate's tensors with a dtype of their own keep dtype and value when it is moved or loaded."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.gates import DeepSeekGate
from pmoe.gates.base import KeptType, Routing

M, E = 8, 4
FINE = torch.tensor([1.001, -1.001, 0.3, 0.0])
"""Numbers of which bfloat16 can represent only the last."""
COUNTS = torch.tensor([257, 3, 100_001, 0])


def model() -> nn.Module:
    torch.manual_seed(0)
    found = nn.Sequential(pmoe.MoELayer(M, 6, E, 2, gate="deepseek"))
    gate_of(found).bias.copy_(FINE)
    gate_of(found).load.copy_(COUNTS)
    return found


def gate_of(found: nn.Module) -> DeepSeekGate:
    gate = found[0].gate
    assert isinstance(gate, DeepSeekGate)
    return gate


def through_memory(found: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def swapped(found: nn.Module, name: str) -> nn.Module:
    get, put = (getattr(torch.__future__, f"{verb}_{name}") for verb in ("get", "set"))
    before = get()
    put(True)
    try:
        return found.bfloat16()
    finally:
        put(before)


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda found: found.to(torch.bfloat16),
    "to, twice": lambda found: found.to(torch.bfloat16).to(torch.float32),
    "to a device and a type": lambda found: found.to("cpu", torch.float16),
    "half": lambda found: found.half(),
    "bfloat16": lambda found: found.bfloat16(),
    "double": lambda found: found.double(),
    "type": lambda found: found.type(torch.bfloat16),
    "_apply": lambda found: found._apply(lambda tensor: tensor.to(torch.bfloat16)),
    "swap_module_params": lambda found: swapped(found, "swap_module_params_on_conversion"),
    "overwrite_module_params": lambda found: swapped(found, "overwrite_module_params_on_conversion"),
    "deepcopy": lambda found: copy.deepcopy(found).bfloat16(),
    "deepcopy after": lambda found: copy.deepcopy(found.bfloat16()),
    "pickle": lambda found: pickle.loads(pickle.dumps(found.bfloat16())),
    "torch.save": lambda found: through_memory(found.bfloat16()),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_moved_gate_keeps_types_and_values(move: str) -> None:
    gate = gate_of(MOVES[move](model()))
    for name, value in (("bias", FINE), ("load", COUNTS)):
        found = gate._buffers[name]  # also for those who do not ask by name
        assert found.dtype == value.dtype and torch.equal(found, value), (move, name, found)
    assert gate.state_dict()["bias"].dtype == torch.float32


@contextmanager
def by_default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_a_gate_built_in_bfloat16_has_its_types() -> None:
    with by_default(torch.bfloat16):
        gates = [gate_of(model()), DeepSeekGate(M, E)]
    gates += [DeepSeekGate(M, E, dtype=torch.bfloat16)]
    for gate in gates:
        assert gate.weight.dtype == torch.bfloat16
        assert (gate.bias.dtype, gate.load.dtype) == (torch.float32, torch.int64)


def test_a_gate_from_the_meta_device_has_its_types() -> None:
    with torch.device("meta"):
        found = model().to(torch.bfloat16)
    gate = gate_of(found.to_empty(device="cpu"))
    gate.reset_parameters()
    assert gate.bias.dtype == torch.float32 and torch.equal(gate.bias, torch.zeros(E))
    assert gate.load.dtype == torch.int64 and torch.equal(gate.load, torch.zeros(E, dtype=torch.int64))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float32])
def test_a_loaded_gate_has_its_types(assign: bool, file_dtype: torch.dtype) -> None:
    state = {name: value.to(file_dtype) for name, value in model().state_dict().items()}
    target = model()
    gate_of(target).bias.zero_()
    target.load_state_dict(state, assign=assign)
    gate = gate_of(target)
    assert gate._buffers["bias"].dtype == torch.float32
    assert torch.equal(gate.bias, FINE.to(file_dtype).float())
    assert gate.load.dtype == torch.int64


def test_a_buffer_that_accelerate_replaced_has_its_type_when_it_is_read() -> None:
    utils = pytest.importorskip("accelerate.utils")
    found = model()
    utils.set_module_tensor_to_device(found, "0.gate.bias", "cpu", value=FINE, dtype=torch.bfloat16)
    utils.set_module_tensor_to_device(
        found, "0.gate.weight", "cpu", value=torch.ones(E, M), dtype=torch.float32
    )
    gate = gate_of(found)
    assert gate.bias.dtype == torch.float32 and torch.equal(gate.bias, FINE.bfloat16().float())
    utils.set_module_tensor_to_device(found, "0.gate.bias", "cpu", value=FINE, dtype=torch.bfloat16)
    found(torch.randn(5, M))
    gate.update_bias()
    assert gate._buffers["bias"].dtype == torch.float32


def test_small_steps_are_not_lost_in_a_narrow_model() -> None:
    found = model().bfloat16()
    gate = gate_of(found)
    gate.bias.fill_(1.0)
    for _ in range(8):
        gate.load.copy_(torch.tensor([0, 0, 0, 4]))
        gate.update_bias()
    torch.testing.assert_close(gate.bias, torch.tensor([1.008, 1.008, 1.008, 0.992]))


class OwnGate(pmoe.Gate):
    """A gate of a user's own, with a running mean that is kept in float64."""

    mean = KeptType(torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(E, M))
        assert not hasattr(self, "mean")
        self.register_buffer("mean", torch.zeros(E, dtype=torch.float64))

    def forward(self, x_TM: Tensor) -> Routing:
        raise NotImplementedError


def test_gates_of_ones_own_may_keep_types() -> None:
    gate = OwnGate()
    gate.mean.fill_(1 / 3)
    gate.bfloat16()
    assert torch.equal(gate.mean, torch.full((E,), 1 / 3, dtype=torch.float64))
    gate.mean = torch.ones(E)
    assert gate.mean.dtype == torch.float64 and "mean" in gate.state_dict()
    with pytest.raises(AttributeError, match="other"):
        gate.other  # noqa: B018
