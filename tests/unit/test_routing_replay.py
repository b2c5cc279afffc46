"""Router replay on one rank: recorded routes, live weights, checkpoints, traces of engines, wrong traces."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.gates import DeepSeekGate, TopKGate, XMoEGate
from tests.kit import one_thread  # noqa: F401

M, H, E, K = 6, 8, 8, 2

Trace = dict[str, list[Tensor]]


def layer(gate: Any = "topk", **options: Any) -> pmoe.MoELayer:
    torch.manual_seed(3)
    given = {"gate": gate, "pipeline": 2, "dtype": torch.float64}
    return pmoe.MoELayer(M, H, E, K, **{**given, **options})


def model() -> nn.Sequential:
    """Two layers of the same sizes, so that their routes could be confused."""
    return nn.Sequential(layer(), nn.Linear(M, M).double(), layer(gate="sigmoid"))


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, M, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def recorded(moe: nn.Module, inputs: list[Tensor]) -> Trace:
    with torch.no_grad(), pmoe.record_routing(moe) as trace:
        for x in inputs:
            moe(x)
    return trace


def drift(moe: nn.Module, seed: int = 9) -> None:
    """Changes the routers so much that many tokens would go to other experts."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for part in moe.modules():
            if isinstance(part, pmoe.MoELayer):
                for parameter in part.gate.parameters():
                    parameter += torch.randn_like(parameter)


def gradients(moe: nn.Module, run: Callable[[], None]) -> dict[str, Tensor]:
    moe.zero_grad(set_to_none=True)
    run()
    return {
        name: parameter.grad.clone()
        for name, parameter in moe.named_parameters()
        if parameter.grad is not None
    }


def backward(moe: nn.Module, inputs: list[Tensor]) -> None:
    for x in inputs:
        moe(x).square().sum().backward()


GATES: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(str, name) for name in ("topk", "noisy_topk", "sigmoid", "xmoe", "random")},
    "normalized sigmoid": lambda: pmoe.gates.SigmoidGate(M, E, K, normalize=True, dtype=torch.float64),
    "plain topk": lambda: TopKGate(M, E, K, normalize=False, dtype=torch.float64),
    "sigmoid xmoe": lambda: XMoEGate(M, E, K, score="sigmoid", dtype=torch.float64),
    "deepseek": lambda: DeepSeekGate(
        M, E, K, num_groups=2, top_groups=1, routed_scaling=2.5, dtype=torch.float64
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_a_replay_of_its_own_routes_changes_no_bit(name: str) -> None:
    moe = layer(GATES[name]())
    inputs = [tokens(5), tokens(0), tokens(7, 1)]

    def step() -> list[Tensor]:
        torch.manual_seed(5)
        return [moe(x) for x in inputs]

    with pmoe.record_routing(moe) as trace:
        expected = step()
    assert [len(call) for call in trace[""]] == [5, 0, 7]
    with pmoe.replay_routing(moe, trace):
        replayed = step()
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


@pytest.mark.parametrize("name", GATES)
def test_a_gate_weighs_other_experts_as_its_formula_says(name: str) -> None:
    """For each expert that the gate did not choose: the weight it has where it is chosen by force."""
    torch.manual_seed(0)
    gate = layer(GATES[name]()).gate.eval()
    routing = gate(tokens(40))
    other_TK = (routing.expert + 3) % E
    weight_TK = gate.weights_of(routing, other_TK)
    if routing.logits is None:
        assert torch.equal(weight_TK, torch.full((40, K), 1 / K, dtype=torch.float64))
        return
    score_TE = routing.logits.softmax(-1) if "topk" in name or name == "xmoe" else routing.logits.sigmoid()
    wanted_TK = score_TE.gather(1, other_TK)
    if name not in ("sigmoid", "plain topk", "sigmoid xmoe"):
        wanted_TK = wanted_TK / wanted_TK.sum(1, keepdim=True)
    if name == "deepseek":
        wanted_TK = wanted_TK * 2.5
    torch.testing.assert_close(weight_TK, wanted_TK, rtol=1e-12, atol=0)


def test_drifted_routers_get_gradients_for_replayed_experts() -> None:
    """Others took weights from what top-k had left: zeros, without a gradient, where routes had drifted."""
    moe = layer(pipeline=1)
    x = tokens(30)
    trace = recorded(moe, [x])
    with torch.no_grad():
        moe.gate.weight.neg_()  # the best experts become the worst
    live = moe.gate(x).expert
    replayed = trace[""][0]
    assert not (live.unsqueeze(1) == replayed.unsqueeze(2)).any()
    with pmoe.replay_routing(moe, trace):
        moe(x).square().sum().backward()
    assert moe.tokens_per_expert.tolist() == torch.bincount(replayed.flatten(), minlength=E).tolist()
    probability = (x @ moe.gate.weight.detach().t()).softmax(-1).requires_grad_()
    weight = probability.gather(1, replayed)
    weight = weight / weight.sum(1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(E):
        w1, b1 = moe.experts.w1[e].detach(), moe.experts.b1[e].detach()
        w2, b2 = moe.experts.w2[e].detach(), moe.experts.b2[e].detach()
        y = torch.nn.functional.gelu(x @ w1.t() + b1) @ w2.t() + b2
        out = out + (weight * (replayed == e)).sum(1, keepdim=True) * y
    out.square().sum().backward()
    score = probability.grad * probability.detach()
    logits = score - probability.detach() * score.sum(1, keepdim=True)
    wanted = logits.t() @ x
    assert (moe.gate.weight.grad - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    assert (wanted.abs().amax(1) > 0).all()


def test_layers_take_routes_by_name() -> None:
    moe = model()
    inputs = [tokens(9), tokens(4, 1)]
    trace = recorded(moe, inputs)
    assert list(trace) == ["0", "2"]
    expected = [moe(x) for x in inputs]
    turned = dict(reversed(trace.items()))  # the order of a dict does not matter
    with pmoe.replay_routing(moe, turned):
        assert all(torch.equal(moe(x), y) for x, y in zip(inputs, expected, strict=True))
    assert not torch.equal(trace["0"][0], trace["2"][0])


def test_tokens_outside_of_the_mask_are_routed_live() -> None:
    moe = layer()
    x = tokens(12)
    trace = recorded(moe, [x])
    drift(moe)
    live = moe.gate(x).expert
    mask = torch.arange(12) % 3 > 0
    wanted = torch.where(mask.unsqueeze(1), trace[""][0], live)
    assert not torch.equal(wanted, trace[""][0])
    with pmoe.replay_routing(moe, trace, mask=[mask]), pmoe.record_routing(moe) as seen:
        by_mask = moe(x)
    assert torch.equal(seen[""][0], wanted)
    lines = trace[""][0].masked_fill(~mask.unsqueeze(1), -1).to(torch.int16)
    with pmoe.replay_routing(moe, {"": [lines]}):
        assert torch.equal(moe(x), by_mask)


def test_padding_has_no_line() -> None:
    moe = layer()
    x = tokens(10).view(2, 5, M)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    with pmoe.record_routing(moe) as trace:
        y = moe(x, mask=mask)
    assert trace[""][0].shape == (7, K)
    with pmoe.replay_routing(moe, trace):
        assert torch.equal(moe(x, mask=mask), y)


CONTEXTS: dict[str, dict[str, Any]] = {
    "plain": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "contexts": {"use_reentrant": False, "context_fn": pmoe.checkpoint_contexts},
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_checkpoints_repeat_the_routes_of_their_micro_batch(name: str) -> None:
    """All forward passes come first; the order of backward passes is neither theirs nor the reverse."""
    moe = model()
    inputs = [tokens(9, seed).requires_grad_() for seed in range(3)]  # as many tokens in each
    trace = recorded(moe, inputs)
    drift(moe)

    def plain() -> None:
        with pmoe.replay_routing(moe, trace):
            backward(moe, inputs)

    def checkpointed() -> None:
        with pmoe.record_routing(moe) as seen, pmoe.replay_routing(moe, trace):
            losses = [checkpoint(moe, x, **CONTEXTS[name]).square().sum() for x in inputs]
            for at in (1, 0, 2):
                losses[at].backward()
        assert [len(calls) for calls in seen.values()] == [3, 3]  # second passes are not recorded

    expected = gradients(moe, plain)
    found = gradients(moe, checkpointed)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-12 * value.abs().max(), key


def test_a_checkpoint_whose_micro_batch_is_unknown_is_refused() -> None:
    """Equal tokens with different routes: the scores cannot show which call is repeated."""
    moe = layer()
    x = tokens(9)
    trace = {"": [recorded(moe, [x])[""][0], (recorded(moe, [x])[""][0] + 1) % E]}
    with pmoe.replay_routing(moe, trace):
        losses = [checkpoint(moe, x, use_reentrant=False).sum() for _ in range(2)]
        with pytest.raises(ValueError, match=r"several calls with different routes.*checkpoint_contexts"):
            losses[0].backward()
    trace = {"": [trace[""][0]] * 2}
    with pmoe.replay_routing(moe, trace):
        for _ in range(2):
            checkpoint(moe, x, use_reentrant=False).sum().backward()


def test_routes_of_inference_mode_can_be_trained_with() -> None:
    moe = layer()
    x = tokens(5)
    with torch.inference_mode(), pmoe.record_routing(moe) as trace:
        moe(x)
    with pmoe.replay_routing(moe, trace):
        moe(x).sum().backward()
    assert moe.gate.weight.grad is not None


def test_a_trace_in_files_is_replayed(tmp_path: Path) -> None:
    moe = model()
    inputs = [tokens(3), tokens(4, 1)]
    with pmoe.record_routing(moe, tmp_path) as nothing:
        expected = [moe(x) for x in inputs]
    assert nothing == {}
    with pmoe.replay_routing(moe, pmoe.read_routing(tmp_path)):
        assert all(torch.equal(moe(x), y) for x, y in zip(inputs, expected, strict=True))


def test_after_an_error_the_model_routes_as_before() -> None:
    moe = layer()
    x = tokens(5)
    trace = recorded(moe, [x])
    drift(moe)
    expected = moe(x)
    with contextlib.suppress(KeyError), pmoe.replay_routing(moe, trace):
        moe(x)
        raise KeyError
    with contextlib.suppress(KeyError), pmoe.record_routing(moe):
        raise KeyError
    assert torch.equal(moe(x), expected)
    assert not moe.gate._forward_hooks


def test_a_copy_of_the_model_is_neither_recorded_nor_replayed() -> None:
    moe = layer()
    x = tokens(5)
    with pmoe.record_routing(moe) as trace:
        copy.deepcopy(moe)(tokens(3))
        moe(x)
    assert [expert.shape[0] for expert in trace[""]] == [5]
    drift(moe)
    expected = moe(x)
    with pmoe.replay_routing(moe, trace):
        twin = copy.deepcopy(moe)
        assert torch.equal(twin(x), expected) and not torch.equal(moe(x), expected)
    assert torch.equal(twin(x), expected)


def test_experts_over_capacity_drop_replayed_rows() -> None:
    moe = layer(capacity_factor=1.0)
    x = tokens(16)
    trace = {"": [torch.tensor([[0, 1]] * 16)]}
    with pmoe.replay_routing(moe, trace):
        moe(x)
    assert moe.tokens_per_expert.tolist() == [4, 4, 0, 0, 0, 0, 0, 0]


# ---- traces of engines


def test_routes_of_an_engine_get_names() -> None:
    """One column a layer: a dense layer, two with experts, one that another stage has."""
    routes = torch.stack(
        [torch.full((5, K), 99), torch.arange(10).view(5, K) % E, torch.arange(10).view(5, K) % 4 + 4]
    )
    routes = torch.cat([routes, routes[1:2]]).transpose(0, 1).to(torch.uint8)
    trace = pmoe.engine_routing([routes, routes[:3]], [None, "0", "2", None], num_tokens=[6, 3])
    assert list(trace) == ["0", "2"]
    assert trace["0"][0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [-1, -1]]
    assert trace["2"][1].tolist() == [[4, 5], [6, 7], [4, 5]]
    moe = model()
    with pmoe.replay_routing(moe, trace), pmoe.record_routing(moe) as seen:
        moe(tokens(6))
        moe(tokens(3))
    assert torch.equal(seen["0"][0][:5], trace["0"][0][:5])


def test_sequences_of_a_call_follow_each_other() -> None:
    one, two = torch.zeros(2, 1, K).long(), torch.ones(3, 1, K).long()
    (call,) = pmoe.engine_routing([[one, two]], ["a"], num_tokens=[[3, 3]])["a"]
    assert call.tolist() == [[0, 0]] * 2 + [[-1, -1]] + [[1, 1]] * 3
    (call,) = pmoe.engine_routing([[one, two]], ["a"])["a"]
    assert call.tolist() == [[0, 0]] * 2 + [[1, 1]] * 3


@pytest.mark.parametrize(
    ("calls", "layers", "num_tokens", "message"),
    [
        ([(4, 3, K)], ["a", "b"], None, r"calls\[0\] of shape \(4, 3, 2\) has 3 layers, but layers has 2"),
        ([(4, 2, K)], ["a", "a"], None, r"layers \(\['a', 'a'\]\) must have .* each name once"),
        ([(4, 1, K)], [None], None, "must have at least one name"),
        ([(4, 1, K)], ["a"], [3], r"num_tokens\[0\] \(3\) must be at least the 4 tokens of calls\[0\]"),
        (
            [(4, 1, K)],
            ["a"],
            [4, 4],
            r"num_tokens \(of 2 calls\) must have one entry for each of the 1 calls",
        ),
        ([[(4, 1, K), (3, 1, K)]], ["a"], [[4]], r"num_tokens\[0\] \(of 1 sequences\) must have"),
        ([[(4, 1, K), (3, 1, 3)]], ["a"], None, "as many experts of a token in every sequence"),
        ([(4, K)], ["a"], None, r"calls\[0\] of shape \(4, 2\) must have 3 dimensions"),
    ],
)
def test_routes_that_do_not_add_up_are_named(calls: Any, layers: Any, num_tokens: Any, message: str) -> None:
    def made(shape: Any) -> Any:
        return [made(one) for one in shape] if isinstance(shape, list) else torch.zeros(shape).long()

    with pytest.raises(ValueError, match=message):
        pmoe.engine_routing(made(calls), layers, num_tokens=num_tokens)


def test_routes_must_be_integers() -> None:
    with pytest.raises(TypeError, match=r"calls\[0\] of dtype torch.float32 must hold experts, as integers"):
        pmoe.engine_routing([torch.zeros(1, 1, 1)], ["a"])


# ---- wrong traces


def enter(moe: nn.Module, trace: Any, **options: Any) -> None:
    with pmoe.replay_routing(moe, trace, **options):
        pass


def test_traces_of_other_models_are_named() -> None:
    moe = model()
    trace = recorded(moe, [tokens(4)])
    with pytest.raises(ValueError, match=r"trace has no layer '2'; it has '0', the model '0', '2'"):
        enter(moe, {"0": trace["0"]})
    with pytest.raises(
        ValueError, match=r"trace has a layer '3', but the model has '0', '2'.*pipeline stage"
    ):
        enter(moe, {**trace, "3": trace["0"]})
    with pytest.raises(ValueError, match=r"trace\['0'\]\[0\] of shape \(4, 1\) must have top_k \(2\)"):
        enter(moe, {**trace, "0": [trace["0"][0][:, :1]]})
    with pytest.raises(ValueError, match=r"trace\['0'\]\[0\] must have experts from 0 to 7.*from 1 to 8"):
        enter(moe, {**trace, "0": [torch.tensor([[8, 1]])]})
    with pytest.raises(ValueError, match=r"or only -1 for a token.*numbers from -1 to 1"):
        enter(moe, {**trace, "0": [torch.tensor([[-1, 1]])]})
    with pytest.raises(
        ValueError, match=r"token 1 has \[0, 0\]: padding, and layers without experts, must be -1"
    ):
        enter(moe, {**trace, "0": [torch.tensor([[2, 1], [0, 0]])]})
    with pytest.raises(TypeError, match=r"trace \(list\) must be a dict|trace \(\[\]\) must be a dict"):
        enter(moe, [])


def test_calls_that_were_not_recorded_are_named() -> None:
    moe = layer()
    trace = recorded(moe, [tokens(4), tokens(5)])
    with (
        pytest.raises(ValueError, match=r"trace\[''\] has 2 calls, but the layer was called 1 times"),
        pmoe.replay_routing(moe, trace),
    ):
        moe(tokens(4))
    with (
        pytest.raises(ValueError, match=r"trace\[''\] has 2 calls, but the layer is called once more"),
        pmoe.replay_routing(moe, trace),
    ):
        for count in (4, 5, 4):
            moe(tokens(count))
    with (
        pytest.raises(ValueError, match=r"trace\[''\]\[0\] has experts of 4 tokens, but the call has 5"),
        pmoe.replay_routing(moe, trace),
    ):
        moe(tokens(5))


def test_masks_that_do_not_fit_are_named() -> None:
    moe = layer()
    trace = recorded(moe, [tokens(4)])
    with pytest.raises(
        ValueError, match=r"mask \(of \[3\] tokens\) must have a value for each token of trace\[''\] \(\[4\]"
    ):
        enter(moe, trace, mask=[torch.ones(3, dtype=torch.bool)])
    with pytest.raises(TypeError, match=r"mask\[0\] of dtype torch.float32 must be bool"):
        enter(moe, trace, mask=[torch.ones(4)])


class Unweighable(TopKGate):
    """A gate that hides its scores: what a user's gate without ``weights_of`` has to offer."""

    weights_of = pmoe.Gate.weights_of


@pytest.mark.parametrize("gate", [Unweighable(M, E, K), pmoe.gates.BatchPrioritisedGate(M, E, K)])
def test_gates_that_cannot_be_replayed_are_refused(gate: nn.Module) -> None:
    moe = pmoe.MoELayer(M, H, E, K, gate=gate)
    with pytest.raises(
        ValueError, match=rf"a layer '' whose gate \({type(gate).__name__}\) cannot give weights"
    ):
        enter(moe, {"": []})


def test_a_gate_of_a_user_can_be_replayed() -> None:
    class Scaled(pmoe.Gate):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TopKGate(M, E, K, dtype=torch.float64)

        def forward(self, x_TM: Tensor) -> pmoe.Routing:
            routing = self.inner(x_TM)
            return replace(routing, weight=3 * routing.weight)

        def weights_of(self, routing: pmoe.Routing, expert_TK: Tensor) -> Tensor:
            return 3 * self.inner.weights_of(routing, expert_TK)

    moe = layer(Scaled())
    x = tokens(6)
    trace = recorded(moe, [x])
    expected = moe(x)
    with pmoe.replay_routing(moe, trace):
        assert torch.equal(moe(x), expected)


class Outside(nn.Module):
    """A model with a router of its own, which passes its choices to a layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(M, E, bias=False).double()
        self.layer = layer(pmoe.gates.ExternalGate(), **options)
        self.passes_function = True

    def forward(self, x: Tensor) -> Tensor:
        score_TE = self.router(x).softmax(-1)

        def weights_of(expert_TK: Tensor) -> Tensor:
            chosen_TK = score_TE.gather(1, expert_TK)
            return chosen_TK / chosen_TK.sum(1, keepdim=True)

        expert_TK = score_TE.topk(K).indices
        gate = self.layer.gate
        function = weights_of if self.passes_function else None
        with gate.routing(expert_TK, weights_of(expert_TK), weights_of=function):
            return self.layer(x)


def test_a_router_outside_of_the_layer_is_replayed_with_its_live_scores() -> None:
    """The same steps as a layer with a gate of pmoe, whose weight is the router's."""
    moe = Outside()
    inside = layer("topk")
    with torch.no_grad():
        inside.gate.weight.copy_(moe.router.weight)
        inside.experts.load_state_dict(moe.layer.experts.state_dict())
    inputs = [tokens(9), tokens(4, 1)]
    trace = recorded(moe, inputs)
    assert all(map(torch.equal, trace["layer"], recorded(inside, inputs)[""]))
    with torch.no_grad():
        moe.router.weight.neg_()  # the best experts become the worst
        inside.gate.weight.neg_()

    def replayed(one: nn.Module, name: str) -> dict[str, Tensor]:
        with pmoe.replay_routing(one, {name: trace["layer"]}):
            return gradients(one, lambda: backward(one, inputs))

    found = replayed(moe, "layer")
    wanted = replayed(inside, "")
    torch.testing.assert_close(found["router.weight"], wanted["gate.weight"], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found["layer.experts.w1"], wanted["experts.w1"], rtol=1e-12, atol=1e-15)
    assert found["router.weight"].abs().amax(1).all()


def test_a_router_outside_that_gives_no_weights_is_named_with_the_line_that_mends_it() -> None:
    moe = Outside()
    trace = recorded(moe, [tokens(4)])
    moe.passes_function = False
    with (
        pytest.raises(ValueError, match=r"weights_of \(None\) of ExternalGate.routing must be a function"),
        pmoe.replay_routing(moe, trace),
    ):
        moe(tokens(4))
    gate = moe.layer.gate
    expert, weight = trace["layer"][0], torch.full((4, K), 0.5, dtype=torch.float64)
    keep = torch.ones(4, K, dtype=torch.bool)
    with (
        pytest.raises(ValueError, match=r"keep_TK of ExternalGate.routing must be None"),
        pmoe.replay_routing(moe.layer, {"": [expert]}),
        gate.routing(expert, weight, keep, weights_of=lambda _: weight),
    ):
        moe.layer(tokens(4))
    with (
        pytest.raises(TypeError, match=r"weights_of \(3\) must be None or a function"),
        gate.routing(expert, weight, weights_of=3),
    ):
        pass
