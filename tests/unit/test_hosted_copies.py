"""Copies of busy experts in one call: new numbers, parts of messages, and products of experts and copies."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.decide.balanced_counts import indices_of_rows
from pmoe.decide.unchanged_experts import sums_of_bits
from pmoe.engine.plan.copies import ExpertPart, HostedCopies
from pmoe.experts import FFNExperts, make_stacked
from pmoe.experts.base import ExpertRows
from pmoe.experts.products import GradientSum, RowGroups
from pmoe.experts.with_copies import ExpertsWithCopies
from pmoe.planner.copies import CopyLimits, CopyPlan, plan_copies
from pmoe.planner.copy_groups import host_groups

F64 = torch.float64


def of_ranks(
    plan: CopyPlan, num_ranks: int, num_local: int, nodes: tuple[int, ...] = ()
) -> list[HostedCopies]:
    return [
        HostedCopies(plan=plan, rank=rank, num_ranks=num_ranks, num_local=num_local, nodes=nodes)
        for rank in range(num_ranks)
    ]


# 4 ranks with 2 experts each: expert 1 has copies on ranks 1 and 3, expert 2 has one on rank 3.
PLAN = CopyPlan(hosts={1: ((0, 10), (1, 5), (3, 5)), 2: ((1, 6), (3, 6))}, before=0, after=0)


def test_experts_and_copies_are_numbered_rank_by_rank() -> None:
    hosted = of_ranks(PLAN, 4, 2)
    assert [of.hosted for of in hosted] == [[], [1], [], [1, 2]]
    assert [of.sent_experts for of in hosted] == [[1], [2], [], []]
    assert {(of.per_rank, of.relays) for of in hosted} == {(2, True)}
    bounds, numbers = hosted[0].numbered_hosts(8)
    experts = [bound >> 32 for bound in bounds]
    assert list(zip(experts, numbers, strict=True)) == [
        *((0, 0), (1, 1), (1, 6), (1, 14), (2, 4), (2, 15), (3, 5)),
        *((4, 8), (5, 9), (6, 12), (7, 13)),
    ]
    assert bounds == sorted(bounds)


def test_a_layer_that_was_pickled_without_nodes_finds_them_by_the_launcher() -> None:
    state = pmoe.MoELayer(4, 4, 2, nodes=2).__getstate__()
    assert state.pop("nodes") == 2
    layer = pmoe.MoELayer.__new__(pmoe.MoELayer)
    layer.__setstate__(state)
    assert layer.layer_modules.nodes is None


def test_a_copy_that_stays_without_rows_gets_none() -> None:
    unused = CopyPlan(
        hosts={1: ((0, 0), (1, 0)), 2: ((1, 6), (3, 0)), 3: ((1, 4), (0, 4))}, before=0, after=0
    )
    [copies, *_] = of_ranks(unused, 4, 2)
    loads = torch.tensor([0, 3, 50, 50, 0, 0, 0, 0])  # some rows of expert 1, though none were planned
    expert_TK = torch.arange(8).repeat_interleave(loads).view(-1, 1)
    numbers = indices_of_rows(copies, expert_TK, None, loads).view(-1)
    width = 2 + copies.per_rank
    ranks_of_rows = [Counter((numbers[expert_TK[:, 0] == expert] // width).tolist()) for expert in (1, 2, 3)]
    assert ranks_of_rows[0] == {0: 3} and ranks_of_rows[1] == {1: 50}
    assert abs(ranks_of_rows[2][0] - 25) <= 1 and ranks_of_rows[2].total() == 50


def test_what_a_rank_sends_is_what_another_receives_and_every_copy_gets_the_whole_expert() -> None:
    draw = random.Random(0)
    for _ in range(40):
        num_ranks, num_local = draw.choice([(2, 3), (4, 2), (8, 1)])
        loads = [int(draw.lognormvariate(5, 1.5)) for _ in range(num_ranks * num_local)]
        owners = [expert // num_local for expert in range(len(loads))]
        ranks_per_node = draw.choice((2, 8))
        nodes = tuple(rank // ranks_per_node for rank in range(num_ranks))
        plan = plan_copies(loads, owners, nodes, CopyLimits(per_rank=draw.randint(1, 3)))
        if not plan.hosts:
            continue
        hosted = of_ranks(plan, num_ranks, num_local, nodes)
        assert all(of.num_sent <= num_local + 1 for of in hosted)
        for sent, received in (("scattered", "gathered"), ("relayed", "completed")):
            there = Counter(
                (of.rank, part.peer, part.expert, part.number) for of in hosted for part in getattr(of, sent)
            )
            back = Counter(
                (part.peer, of.rank, part.expert, part.number)
                for of in hosted
                for part in getattr(of, received)
            )
            assert there == back
            assert all(getattr(of, sent) == sorted(getattr(of, sent)) for of in hosted)
        for of in hosted:
            for expert in of.hosted:
                parts = [part for part in (*of.gathered, *of.completed) if part.expert == expert]
                covered = sorted(i for part in parts for i in range(11)[part.of(11)])
                assert covered == list(range(11))


def test_only_the_owner_sends_an_expert_to_one_other_node() -> None:
    nodes = (0, 0, 1, 1)
    hosts = {0: ((0, 4), (1, 4), (2, 4), (3, 4))}
    owner, near, far, _ = of_ranks(CopyPlan(hosts=hosts, before=0, after=0), 4, 1, nodes)
    assert owner.groups == {0: [[1], [2, 3]]}
    assert owner.scattered == [ExpertPart(1, 0, 0, 1), ExpertPart(2, 0, 0, 2), ExpertPart(3, 0, 1, 2)]
    assert (near.relayed, far.relayed) == ([], [ExpertPart(3, 0, 0, 2)])
    assert owner.num_sent == 2 and owner.relays
    # Hosts on several nodes pass parts on to each other, and so do those of a rank's second expert.
    apart = {0: ((0, 1), (1, 1), (2, 1), (3, 1))}
    assert host_groups(apart, (0, 1, 2, 3)) == {0: [[1, 2, 3]]}
    two = {0: hosts[0], 1: hosts[0]}
    assert host_groups(two, nodes) == {0: [[1], [2, 3]], 1: [[1, 2, 3]]}


def test_a_part_is_a_range_of_an_experts_elements() -> None:
    assert [ExpertPart(0, 0, index, 3).of(7) for index in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 7)]


@pytest.mark.parametrize("drops", [False, True])
def test_rows_of_an_expert_are_divided_by_its_shares(drops: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    expert_TK = torch.randint(8, (900, 2), generator=generator)
    keep_TK = torch.rand(900, 2, generator=generator) < 0.7 if drops else None
    kept = torch.ones_like(expert_TK, dtype=torch.bool) if keep_TK is None else keep_TK
    counts_E = torch.bincount(expert_TK[kept], minlength=8)
    total: Counter[int] = Counter()
    for of in of_ranks(PLAN, 4, 2):
        number_TK = indices_of_rows(of, expert_TK, keep_TK, counts_E)
        rows = Counter(zip(expert_TK[kept].tolist(), number_TK[kept].tolist(), strict=True))
        for (expert, number), count in rows.items():
            of_expert = int(counts_E[expert])
            shares = {1: {1: 2, 6: 1, 14: 1}, 2: {4: 1, 15: 1}}.get(expert, {number: 1})
            assert abs(count - of_expert * shares[number] / sum(shares.values())) < 3
        assert sum(rows.values()) == int(kept.sum())
        # Every part of the batch is divided in the same way.
        quarter = number_TK[:225][kept[:225] & (expert_TK[:225] == 2)]
        assert abs(int((quarter == 4).sum()) - quarter.numel() / 2) < 3
        total.update(number_TK[kept].tolist())
    assert len(total) == 11


# ---- products of experts and copies


def rows_for(experts: FFNExperts, groups: RowGroups, out: Tensor, seed: int) -> ExpertRows:
    generator = torch.Generator().manual_seed(seed)
    rows_NM = torch.randn(groups.num_rows, 4, generator=generator, dtype=F64)
    return ExpertRows(
        rows_NM, groups, experts.operands(), out=out, grad_weight_N=torch.empty(len(out), dtype=F64)
    )


@torch.no_grad()
@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("counts", [(2, 3, 1, 4), (0, 0, 2, 1), (2, 1, 0, 0), (0, 0, 0, 0), (1, 0, 0, 5)])
def test_experts_and_copies_compute_as_one_list_of_experts(
    counts: tuple[int, ...], again: bool, expert: str
) -> None:
    """Two experts and two copies, beside the same four experts of one rank."""
    torch.manual_seed(0)
    whole = make_stacked(expert, 4, 6, 4, "gelu", True, dtype=F64)
    for parameter in whole.parameters():
        parameter.normal_()
    own = make_stacked(expert, 4, 6, 2, "gelu", True, dtype=F64)
    for mine, all_of in zip(own.parameters(), whole.parameters(), strict=True):
        mine.copy_(all_of[:2])
    both = ExpertsWithCopies(own, [each[2:] for each in whole.operands()])
    groups = RowGroups(counts=counts)
    num_rows = sum(counts)
    weight_N = torch.rand(num_rows, dtype=F64)
    results = []
    for computing, parameters in ((whole, whole), (both, own)):
        out, grads = torch.empty(2, num_rows, 4, dtype=F64)
        rows = rows_for(parameters, groups, out, 1)
        _, hidden = computing.compute(rows, weight_N, keep=not again)
        hidden = computing.recompute(rows, None) if hidden is None else hidden
        grad_NM = torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(2), dtype=F64)
        rows = rows_for(parameters, groups, grads, 1)
        _, grad_weight_N, pending = computing.input_gradient(grad_NM, rows, weight_N, hidden)
        sums = [GradientSum(each, 1) for each in parameters.operands()]
        computing.weight_gradient(pending, groups, sums)
        gradients = [each.result() for each in sums]
        if isinstance(computing, ExpertsWithCopies):
            copied = [GradientSum(each, 1) for each in computing.copies]
            computing.copy_gradient(pending, groups, copied)
            gradients = [
                torch.cat([first, each.result()]) for first, each in zip(gradients, copied, strict=True)
            ]
        results.append([out, grads, grad_weight_N, *gradients])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_checksums_show_changed_signs(dtype: torch.dtype) -> None:
    """A sign is the highest bit of a number: its change must not leave the 64 bits of a sum."""
    layer = pmoe.MoELayer(6, 8, 2, dtype=dtype, group=Ranks.single())
    with torch.no_grad():
        layer.experts.w1[0, 0, :4] = torch.tensor([1.0, -2.0, -2.0, 1.0])

    def sums() -> tuple[object, ...]:
        return sums_of_bits(layer.layer_modules, [0])

    before = sums()
    layer.experts.w1.data[0, 0, :4].neg_()  # in a plain sum, these four changes cancel each other
    after = sums()
    assert before[:2] != after[:2]
    assert before[2:] == after[2:]
    layer.experts.w1.data[0].neg_()
    assert sums()[:2] != after[:2]
