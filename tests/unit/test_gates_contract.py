"""Rules that every gate of GATES obeys: shapes, types, gradients, copies, parts of a batch, and errors."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pmoe.gates import GATES, Gate, Routing

NAMES = sorted(GATES)
D_MODEL, NUM_EXPERTS = 6, 4
LEARNED = [name for name in NAMES if name not in ("hash", "random")]
# Options that make a gate do all that it can.
FULL: dict[str, dict[str, object]] = {
    "topk": {"z_loss_weight": 0.5},
    "switch": {"z_loss_weight": 0.5},
    "noisy_topk": {"z_loss_weight": 0.5},
    "sigmoid": {"normalize": True, "z_loss_weight": 0.5},
    "deepseek": {"num_groups": 2, "routed_scaling": 2.5, "z_loss_weight": 0.5, "sequence_length": 3},
    "xmoe": {"z_loss_weight": 0.5},
    "expert_choice": {"capacity_factor": 1.25},
    "soft": {"slots_per_expert": 3},
    "batch_prioritised": {"capacity_factor": 0.75, "z_loss_weight": 0.5},
    "hash": {"seed": 5},
    "random": {},
}


def choices(name: str) -> int:
    return 1 if name == "switch" else 2


def build(name: str, dtype: torch.dtype = torch.float32, **options: object) -> Gate:
    torch.manual_seed(0)
    return GATES[name](D_MODEL, NUM_EXPERTS, choices(name), dtype=dtype, **FULL[name] | options)


def route(gate: Gate, x: Tensor, first_id: int = 0) -> Routing:
    if gate.needs_token_ids:
        return gate(x, torch.arange(first_id, first_id + x.shape[0]))
    return gate(x)


def tensors(routing: Routing) -> dict[str, Tensor]:
    named = {name: value for name, value in vars(routing).items() if isinstance(value, Tensor)}
    if routing.mix is not None:
        named |= {"dispatch": routing.mix.dispatch, "combine": routing.mix.combine}
    return named


def assert_same(actual: Routing, expected: Routing) -> None:
    assert tensors(actual).keys() == tensors(expected).keys()
    for name, value in tensors(expected).items():
        assert torch.equal(tensors(actual)[name], value), name


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_a_routing_has_the_shapes_of_its_contract(name: str, num_tokens: int) -> None:
    gate = build(name)
    routing = route(gate, torch.randn(num_tokens, D_MODEL))
    rows = {
        "expert_choice": NUM_EXPERTS * min(num_tokens, math.ceil(1.25 * num_tokens * 2 / NUM_EXPERTS)),
        "soft": NUM_EXPERTS * 3,
    }
    shape = (rows[name], 1) if name in rows else (num_tokens, choices(name))
    assert routing.expert.shape == routing.weight.shape == shape
    assert routing.expert.dtype == torch.int64
    assert ((routing.expert >= 0) & (routing.expert < NUM_EXPERTS)).all()
    assert all(len(set(row)) == shape[1] for row in routing.expert.tolist())
    assert routing.l_aux.shape == ()
    assert all(value.isfinite().all() for value in tensors(routing).values())
    assert (routing.token is not None) == (name == "expert_choice")
    assert (routing.mix is not None) == (name == "soft")
    assert (routing.keep is not None) == (name == "batch_prioritised")
    if routing.keep is not None:
        assert routing.keep.shape == shape
        assert routing.keep.dtype == torch.bool


@pytest.mark.parametrize("name", LEARNED)
def test_no_tokens_give_gradients_of_zero(name: str) -> None:
    gate = build(name)
    x = torch.empty(0, D_MODEL, requires_grad=True)
    routing = route(gate, x)
    assert routing.l_aux.item() == 0
    total = routing.weight.sum() + routing.l_aux
    if routing.mix is not None:
        total = total + routing.mix.dispatch.sum() + routing.mix.combine.sum()
    total.backward()
    assert x.grad.shape == (0, D_MODEL)
    for parameter_name, parameter in gate.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), parameter_name


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_needs_no_value_of_a_tensor_on_the_host(name: str) -> None:
    """Fake tensors have shapes and no values: item, nonzero and boolean indices raise an error on them."""
    with FakeTensorMode():
        gate = build(name)
        routing = route(gate, torch.randn(9, D_MODEL, requires_grad=True))
        if name in LEARNED:
            (routing.weight.sum() + routing.l_aux).backward()
        if name == "deepseek":
            gate.update_bias()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rows", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_every_gate_computes_in_float32_or_wider(name: str, rows: torch.dtype, autocast: bool) -> None:
    wide = torch.float64 if rows == torch.float64 else torch.float32
    gate = build(name, rows).eval()
    same = build(name, wide).eval()
    same.load_state_dict(gate.state_dict())
    x = torch.randn(8, D_MODEL, dtype=rows, requires_grad=name in LEARNED)
    random_state = torch.get_rng_state()
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        routing = route(gate, x)
    torch.set_rng_state(random_state)
    expected = route(same, x.detach().to(wide))
    assert routing.weight.dtype == routing.l_aux.dtype == wide
    for key, value in tensors(expected).items():
        torch.testing.assert_close(tensors(routing)[key], value, rtol=2e-6, atol=2e-6)
    if name in LEARNED:
        (sum(value.sum() for value in tensors(routing).values() if value.requires_grad)).backward()
        assert x.grad.dtype == rows
        without = {key for key, parameter in gate.named_parameters() if parameter.grad is None}
        assert without == ({"noise_weight"} if name == "noisy_topk" else set())  # there is no noise in eval
        assert {p.grad.dtype for p in gate.parameters() if p.grad is not None} == {rows}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random"])
def test_a_state_dict_makes_another_gate_route_alike(name: str) -> None:
    gate = build(name)
    if name == "deepseek":
        gate.bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    torch.manual_seed(1)
    other = GATES[name](D_MODEL, NUM_EXPERTS, choices(name), **FULL[name])
    x = torch.randn(8, D_MODEL)
    stored = io.BytesIO()
    torch.save(gate.state_dict(), stored)
    stored.seek(0)
    other.load_state_dict(torch.load(stored))
    assert_same(route(other.eval(), x), route(gate.eval(), x))


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_route_alike(name: str) -> None:
    gate = build(name)
    x = torch.randn(8, D_MODEL)
    for twin in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        torch.manual_seed(3)
        expected = route(gate, x)
        torch.manual_seed(3)
        assert_same(route(twin, x), expected)


@pytest.mark.parametrize("name", [name for name in NAMES if GATES[name].partition == "tokens"])
def test_a_part_is_routed_as_within_the_whole(name: str) -> None:
    gate = build(name, torch.float64).eval()
    x = torch.randn(11, D_MODEL, dtype=torch.float64)
    whole = route(gate, x)
    for start, end in ((0, 4), (4, 5), (5, 11)):
        part = route(gate, x[start:end], first_id=start)
        assert torch.equal(part.expert, whole.expert[start:end])
        torch.testing.assert_close(part.weight, whole.weight[start:end], rtol=1e-13, atol=0)


def contributions(routing: Routing, num_tokens: int) -> Tensor:
    """Returns the weight with which each token uses each expert, (T, E), for any kind of routing."""
    taken = torch.zeros(num_tokens, NUM_EXPERTS, dtype=torch.float64)
    if routing.mix is not None:
        return taken.index_add(1, routing.expert[:, 0], routing.mix.combine * routing.mix.dispatch)
    token = torch.arange(num_tokens) if routing.token is None else routing.token
    weight = routing.weight if routing.keep is None else routing.weight * routing.keep
    for row, t in enumerate(token.tolist()):
        taken[t, routing.expert[row]] += weight[row].double()
    return taken


@pytest.mark.parametrize("name", [name for name in NAMES if GATES[name].partition == "none"])
def test_a_part_of_such_a_batch_is_routed_differently(name: str) -> None:
    gate = build(name, torch.float64).eval()
    x = torch.randn(12, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        whole = contributions(route(gate, x), 12)
        parts = [contributions(route(gate, x[at : at + 6]), 6) for at in (0, 6)]
    assert not torch.allclose(torch.cat(parts), whole)


def test_partitions_needs_and_capacities_are_as_documented() -> None:
    none = {"expert_choice", "soft", "batch_prioritised", "random"}
    assert {name for name in NAMES if GATES[name].partition == "none"} == none
    assert {name for name in NAMES if GATES[name].needs_token_ids} == {"hash"}
    decides = {name for name in NAMES if GATES[name].decides_capacity}
    assert decides == {"expert_choice", "batch_prioritised"}
    for name in decides:
        assert build(name, capacity_factor=2.0).capacity_factor == 2.0


@pytest.mark.parametrize("name", LEARNED)
def test_a_gate_is_built_where_and_of_what_it_is_told(name: str) -> None:
    gate = GATES[name](D_MODEL, NUM_EXPERTS, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in gate.parameters()} == {("meta", torch.bfloat16)}
    assert {buffer.device.type for buffer in gate.buffers()} <= {"meta"}


def test_weights_have_out_features_first() -> None:
    shapes = {name: {key: tuple(p.shape) for key, p in build(name).named_parameters()} for name in NAMES}
    matrix = (NUM_EXPERTS, D_MODEL)
    assert shapes == {
        "topk": {"weight": matrix},
        "switch": {"weight": matrix},
        "noisy_topk": {"weight": matrix, "noise_weight": matrix},
        "sigmoid": {"weight": matrix},
        "deepseek": {"weight": matrix},
        "xmoe": {"projection": (2, D_MODEL), "weight": (NUM_EXPERTS, 2), "log_temperature": ()},
        "expert_choice": {"weight": matrix},
        "soft": {"weight": (NUM_EXPERTS, 3, D_MODEL), "scale": ()},
        "batch_prioritised": {"weight": matrix},
        "hash": {},
        "random": {},
    }


TOP_K = [name for name in NAMES if name != "switch"]
HAS = {
    "normalize": ["topk", "noisy_topk", "sigmoid", "deepseek", "xmoe", "batch_prioritised"],
    "z_loss_weight": ["topk", "switch", "noisy_topk", "sigmoid", "deepseek", "xmoe", "batch_prioritised"],
    "capacity_factor": ["expert_choice", "batch_prioritised"],
}
BAD: list[tuple[list[str], dict[str, object], type[Exception], str]] = [
    (TOP_K, {"top_k": 5}, ValueError, r"top_k \(5\) must be between 1 and num_experts \(4\)"),
    (TOP_K, {"top_k": 0}, ValueError, r"top_k \(0\) must be between 1"),
    (TOP_K, {"top_k": 1.0}, TypeError, r"top_k \(1\.0\) must be an int"),
    (TOP_K, {"top_k": True}, TypeError, r"top_k \(True\) must be an int"),
    (NAMES, {"d_model": 0}, ValueError, r"d_model \(0\) must be at least 1"),
    (NAMES, {"num_experts": 0}, ValueError, r"num_experts \(0\) must be at least 1"),
    (NAMES, {"num_experts": 4.0}, TypeError, r"num_experts \(4\.0\) must be an int"),
    (HAS["normalize"], {"normalize": 1}, TypeError, r"normalize \(1\) must be None, True or False"),
    (
        HAS["z_loss_weight"],
        {"z_loss_weight": -1.0},
        ValueError,
        r"z_loss_weight \(-1\.0\) must be a finite number",
    ),
    (HAS["z_loss_weight"], {"z_loss_weight": math.nan}, ValueError, r"z_loss_weight \(nan\) must be"),
    (HAS["z_loss_weight"], {"z_loss_weight": "1"}, TypeError, r"z_loss_weight \('1'\) must be a number"),
    (
        HAS["capacity_factor"],
        {"capacity_factor": 0},
        ValueError,
        r"capacity_factor \(0\) must be None or a po",
    ),
    (HAS["capacity_factor"], {"capacity_factor": math.inf}, ValueError, r"capacity_factor \(inf\) must be"),
    (
        HAS["capacity_factor"],
        {"capacity_factor": "1"},
        TypeError,
        r"capacity_factor \('1'\) must be a number",
    ),
    (["deepseek"], {"num_groups": 3}, ValueError, r"num_groups \(3\) must divide num_experts \(4\)"),
    (
        ["deepseek"],
        {"num_groups": 2, "top_groups": 3},
        ValueError,
        r"top_groups \(3\) must be at most num_gr",
    ),
    (["deepseek"], {"top_k": 3, "num_groups": 2}, ValueError, r"top_k \(3\) must be at most .* groups \(2\)"),
    (["deepseek"], {"top_groups": 0}, ValueError, r"top_groups \(0\) must be at least 1"),
    (["deepseek"], {"routed_scaling": 0.0}, ValueError, r"routed_scaling \(0\.0\) must be"),
    (["deepseek"], {"routed_scaling": None}, TypeError, r"routed_scaling \(None\) must be a number"),
    (["deepseek"], {"update_speed": -0.1}, ValueError, r"update_speed \(-0\.1\) must be"),
    (["deepseek"], {"sequence_length": 0}, ValueError, r"sequence_length \(0\) must be at least 1"),
    (["xmoe"], {"d_proj": 0}, ValueError, r"d_proj \(0\) must be at least 1"),
    (["xmoe"], {"score": "relu"}, ValueError, r"score \('relu'\) must be one of softmax, sigmoid"),
    (["xmoe"], {"temperature": 0.0}, ValueError, r"temperature \(0\.0\) must be None or a positive number"),
    (
        ["expert_choice"],
        {"normalize_over": "rows"},
        ValueError,
        r"normalize_over \('rows'\) must be one of ex",
    ),
    (["soft"], {"slots_per_expert": 0}, ValueError, r"slots_per_expert \(0\) must be at least 1"),
    (["hash"], {"seed": 0.5}, TypeError, r"seed \(0\.5\) must be an int"),
]


@pytest.mark.parametrize(
    "name, arguments, error, message",
    [(name, arguments, error, message) for names, arguments, error, message in BAD for name in names],
)
def test_bad_arguments_are_refused(
    name: str, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GATES[name](**{"d_model": D_MODEL, "num_experts": NUM_EXPERTS} | arguments)


@pytest.mark.parametrize("name", NAMES)
def test_options_that_mean_nothing_to_a_gate_are_refused(name: str) -> None:
    for option, value in (("normalize", False), ("z_loss_weight", 0.5), ("capacity_factor", 1.0)):
        if name not in HAS[option] and (name, option) != ("switch", "normalize"):
            with pytest.raises(TypeError, match=option):
                GATES[name](D_MODEL, NUM_EXPERTS, **{option: value})
