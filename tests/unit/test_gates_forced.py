"""Forced balance, forced skew and recorded routing: `ForcedGate`, `ReplayGate`, `record_routing`."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.gates import ExpertChoiceGate, ForcedGate, HashGate, ReplayGate, SwitchGate, TopKGate
from pmoe.integrations.routing_trace import _dtype

M, H, E = 8, 16, 8


def choices(gate: pmoe.Gate, num_tokens: int) -> Tensor:
    torch.manual_seed(0)
    return gate(torch.randn(num_tokens, M)).expert


def rows(expert_TK: Tensor, num_experts: int = E) -> list[int]:
    return torch.bincount(expert_TK.flatten(), minlength=num_experts).tolist()


def are_distinct(expert_TK: Tensor) -> bool:
    return all(len(set(token)) == len(token) for token in expert_TK.tolist())


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_forced_balance_gives_every_expert_equally_many_rows(top_k: int) -> None:
    expert_TK = choices(ForcedGate(TopKGate(M, E, top_k), E), 64)
    assert rows(expert_TK) == [64 * top_k // E] * E
    assert are_distinct(expert_TK)


@pytest.mark.parametrize(
    ("busy", "top_k", "share"),
    [
        ((3,), 1, 0.3),
        ((3,), 1, 0.95),
        ((3,), 1, 1.0),
        ((1, 6), 2, 0.5),
        ((1, 6), 2, 0.8),
        ((0, 1, 2, 5), 4, 0.95),
    ],
)
def test_busy_experts_get_their_share_in_every_part_of_the_batch(
    busy: tuple[int, ...], top_k: int, share: float
) -> None:
    expert_TK = choices(ForcedGate(TopKGate(M, E, top_k), E, busy=busy, share=share), 4000)
    assert are_distinct(expert_TK)
    for part in (expert_TK, *expert_TK.split(250)):
        found = rows(part)
        total = part.numel()
        for expert, of_expert in enumerate(found):
            wanted = share * total / len(busy) if expert in busy else (1 - share) * total / (E - len(busy))
            assert abs(of_expert - wanted) <= 2, (expert, found)


@pytest.mark.parametrize(("busy", "share"), [((), None), ((2,), 0.3), ((1, 6), 0.4)])
def test_few_tokens_of_many_ranks_are_balanced_together(busy: tuple[int, ...], share: float | None) -> None:
    """Every rank began with the first expert, so 16 ranks with one token sent all rows to two experts."""
    gate = ForcedGate(TopKGate(M, E, 2), E, busy=busy, share=share)
    by_rank = []
    for rank in range(16):
        with mock.patch.multiple(dist, is_initialized=lambda: True, get_rank=lambda rank=rank: rank):
            by_rank.append(choices(gate, 1))
    expert_TK = torch.cat(by_rank)
    assert are_distinct(expert_TK)
    assert torch.equal(expert_TK, choices(gate, 16))
    found = rows(expert_TK)
    for expert, of_expert in enumerate(found):
        of_busy = 0.0 if share is None else share
        wanted = of_busy * 32 / len(busy) if expert in busy else (1 - of_busy) * 32 / (E - len(busy))
        assert abs(of_expert - wanted) <= 1, (expert, found)


@pytest.mark.parametrize("ratio", [1, 1.3, 2.5, 4])
def test_a_ratio_is_the_rows_of_the_busiest_rank_over_the_mean(ratio: float) -> None:
    gate = ForcedGate.of_ratio(TopKGate(M, E, 2), E, 4, ratio)
    found = rows(choices(gate, 2000))
    of_ranks = [sum(found[first : first + 2]) for first in range(0, E, 2)]
    assert max(of_ranks) == of_ranks[0] == pytest.approx(ratio * 1000, abs=2)
    assert of_ranks[1:] == pytest.approx([(4000 - of_ranks[0]) / 3] * 3, abs=2)


def test_the_inner_gate_gives_the_weights_and_is_trained() -> None:
    inner = TopKGate(M, E, 2)
    gate = ForcedGate(inner, E, busy=(0, 1), share=0.75)
    x = torch.randn(10, M)
    assert torch.equal(gate(x).weight, inner(x).weight)
    assert torch.equal(gate(x).l_aux, inner(x).l_aux)
    layer = pmoe.MoELayer(M, H, E, 2, gate=gate, pipeline=2)
    layer(x).sum().backward()
    assert inner.weight.grad is not None
    assert inner.weight.grad.abs().sum() > 0
    assert layer.tokens_per_expert.tolist()[:2] == [8, 7]


def test_the_capacity_of_the_layer_drops_rows_of_the_forced_choices() -> None:
    gate = ForcedGate(SwitchGate(M, E), E, busy=(0,), share=0.5)
    layer = pmoe.MoELayer(M, H, E, 1, gate=gate, capacity_factor=1.0)
    layer(torch.randn(64, M))
    assert layer.tokens_per_expert.tolist()[0] == 8


def test_token_ids_reach_the_inner_gate() -> None:
    layer = pmoe.MoELayer(M, H, E, 2, gate=ForcedGate(HashGate(M, E, 2), E))
    layer(torch.randn(16, M), torch.arange(16))
    assert layer.tokens_per_expert.tolist() == [4] * E


def test_what_no_gate_can_force_is_refused() -> None:
    gate = TopKGate(M, E, 2)
    with pytest.raises(
        ValueError, match=r"share \(0\.8\) of 1 busy experts among num_experts \(8\).*top_k \(2\)"
    ):
        ForcedGate(gate, E, busy=(0,), share=0.8)(torch.randn(4, M))
    with pytest.raises(
        ValueError, match=r"busy \(\[0, 8\]\) must hold distinct experts below num_experts \(8\)"
    ):
        ForcedGate(gate, E, busy=(0, 8), share=0.8)
    with pytest.raises(ValueError, match=r"share \(None\) must be a number"):
        ForcedGate(gate, E, busy=(0,))
    with pytest.raises(ValueError, match=r"share \(1\.5\) must be between 0 and 1"):
        ForcedGate(gate, E, busy=(0,), share=1.5)
    with pytest.raises(ValueError, match=r"ratio \(5\) must be between 1 and num_ranks \(4\)"):
        ForcedGate.of_ratio(gate, E, 4, 5)
    with pytest.raises(ValueError, match=r"num_experts \(8\) must be divisible by num_ranks \(3\)"):
        ForcedGate.of_ratio(gate, E, 3, 1)
    with pytest.raises(ValueError, match=r"gate \(ExpertChoiceGate\).*picks_tokens is True"):
        ForcedGate(ExpertChoiceGate(M, E, 2), E)
    with pytest.raises(TypeError, match="gate .* must be a module that returns a pmoe.Routing"):
        ForcedGate(nn.Linear(M, E), E)(torch.randn(4, M))


def test_a_recorded_run_is_replayed(tmp_path: Path) -> None:
    model = nn.Sequential(pmoe.MoELayer(M, H, E, 2), pmoe.MoELayer(M, H, 2 * E, 1, gate="switch"))
    inputs = [torch.randn(count, M) for count in (5, 0, 9)]
    chosen: dict[str, list[Tensor]] = {"0": [], "1": []}
    hooks = [
        layer.gate.register_forward_hook(
            lambda _, __, routing, name=name: chosen[name].append(routing.expert)
        )
        for name, layer in model.named_children()
    ]
    with pmoe.record_routing(model, tmp_path / "trace"):
        outputs = [model(x) for x in inputs]
    for hook in hooks:
        hook.remove()
    model(inputs[0])  # after the block nothing is recorded
    calls = pmoe.read_routing(tmp_path / "trace")
    assert list(calls) == ["0", "1"]
    for name, of_layer in calls.items():
        assert len(of_layer) == 3
        assert all(torch.equal(a, b) for a, b in zip(of_layer, chosen[name], strict=True))
    replayed = nn.Sequential(
        pmoe.MoELayer(M, H, E, 2, gate=ReplayGate(model[0].gate, calls["0"])),
        pmoe.MoELayer(M, H, 2 * E, 1, gate=ReplayGate(model[1].gate, calls["1"])),
    )
    for layer, recorded in zip(replayed, model, strict=True):
        layer.experts.load_state_dict(recorded.experts.state_dict())
    for _ in range(2):  # after the last call the first one follows
        for x, y in zip(inputs, outputs, strict=True):
            torch.testing.assert_close(replayed(x), y, rtol=1e-5, atol=1e-6)


def test_replay_checks_the_shape_and_may_begin_anywhere() -> None:
    calls = [torch.zeros(3, 1, dtype=torch.int64), torch.ones(4, 1, dtype=torch.int64)]
    gate = ReplayGate(SwitchGate(M, E), calls)
    with pytest.raises(
        ValueError, match=r"calls\[0\] has choices of shape \(3, 1\), but the gate routes \(4, 1\)"
    ):
        gate(torch.randn(4, M))
    gate.next_call = 1
    assert gate(torch.randn(4, M)).expert.tolist() == [[1]] * 4
    assert gate.next_call == 2
    assert gate(torch.randn(3, M)).expert.tolist() == [[0]] * 3
    with pytest.raises(ValueError, match=r"calls \(0 of them\)"):
        ReplayGate(SwitchGate(M, E), [])
    with pytest.raises(TypeError, match=r"calls\[0\] of dtype torch\.float32 must hold experts"):
        ReplayGate(SwitchGate(M, E), [torch.zeros(3, 1)])


def test_a_trace_that_ends_in_a_record_is_read_up_to_there(tmp_path: Path) -> None:
    layer = pmoe.MoELayer(M, H, E, 2)
    with pmoe.record_routing(layer, tmp_path):
        layer(torch.randn(5, M))
        layer(torch.randn(6, M))
    file = tmp_path / "rank_00000.routing"
    whole = file.read_bytes()
    for cut in (1, 6 * 2 * 2, 6 * 2 * 2 + 23):
        file.write_bytes(whole[:-cut])
        assert [call.shape for call in pmoe.read_routing(tmp_path)[""]] == [(5, 2)]
    file.write_bytes(b"no trace\n")
    with pytest.raises(ValueError, match="must hold a file of record_routing of format 1"):
        pmoe.read_routing(tmp_path)
    with pytest.raises(ValueError, match=r"must hold the trace of rank \(1\)"):
        pmoe.read_routing(tmp_path, rank=1)


def test_experts_that_16_bits_cannot_number_are_stored_in_32() -> None:
    assert _dtype([8, 1 << 16]) == "<u2"
    assert _dtype([8, (1 << 16) + 1]) == "<i4"


def test_models_whose_routing_cannot_be_recorded_are_refused(tmp_path: Path) -> None:
    def record(model: nn.Module) -> None:
        with pmoe.record_routing(model, tmp_path):
            pass

    with pytest.raises(ValueError, match=r"model \(Linear\) must hold a MoELayer"):
        record(nn.Linear(2, 2))
    layer = pmoe.MoELayer(M, H, E, 2, gate="expert_choice")
    with pytest.raises(ValueError, match=r"model has a layer '' whose gate \(ExpertChoiceGate\)"):
        record(layer)
