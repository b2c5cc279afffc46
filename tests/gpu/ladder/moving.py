"""Routing, permutes, messages and row counts, by the extension itself, on values whose results are known.

Letters: T tokens, E experts, K choices, N = T*K rows, n chunks, W ranks, F bins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench import kernels_on_cpu
from pmoe.comm.wire import pack_rows, unpack_rows
from pmoe.kernels.counts import HEADER
from pmoe.schedule.wire import message_bytes
from tests.gpu.ladder.machine import Machine, this_machine
from tests.gpu.ladder.tiles import demand_nothing

BF16, INT, LONG, F32 = torch.bfloat16, torch.int32, torch.int64, torch.float32
TYPE_BF16 = 1


def check_routing(path: str) -> None:
    demand_nothing(find_routing(this_machine(path)))


def find_routing(machine: Machine, num_tokens: int = 1000, num_experts: int = 24) -> dict[str, str | None]:
    """Logits of a token are distinct integers over 8, shuffled: no two choices are near each other."""
    random = torch.Generator().manual_seed(2)
    order = torch.rand(num_tokens, num_experts, generator=random).argsort(1)
    logits, top_k = order.float() / 8, 2
    found = route(machine, logits, top_k)
    expert, weight = logits.topk(top_k)[1], logits.topk(top_k)[0].softmax(1)
    slot = expert.flatten().argsort(stable=True)
    position = torch.empty_like(slot)
    position[slot] = torch.arange(slot.numel())
    counts = torch.bincount(expert.flatten(), minlength=num_experts)
    wanted = {
        "experts": expert, "positions": position.view_as(expert), "slots": slot, "counts": counts,
        "ends": counts.cumsum(0),
    }  # fmt: skip
    told = {name: unlike(found[name].long().view_as(each), each) for name, each in wanted.items()}
    far = (found["weights"] - weight).abs().max().item()
    told["weights"] = None if far < 1e-5 else f"the largest error is {far:g}"
    return told | find_gate_operands(machine, num_tokens, num_experts)


def find_gate_operands(
    machine: Machine, num_tokens: int, num_experts: int, columns: int = 72
) -> dict[str, str | None]:
    """The gradient as two bfloat16 numbers, and the weight twice, against PyTorch on the CPU."""
    random = torch.Generator().manual_seed(5)
    grad = torch.randn(num_tokens, num_experts, generator=random)
    weight = torch.randn(num_experts, columns, generator=random).to(BF16)
    put_grad = machine.put(grad)
    put_weight = machine.put(weight)
    halves = machine.poisoned(num_tokens, 2 * num_experts)
    twice = machine.poisoned(2 * num_experts, columns)
    machine.module.route_halves(
        machine.device.index or 0, machine.stream, num_tokens, num_experts, columns,
        put_grad.data_ptr(), halves.data_ptr(), put_weight.data_ptr(), twice.data_ptr(),
    )  # fmt: skip
    upper = grad.to(BF16)
    wanted = torch.cat([upper, (grad - upper.float()).to(BF16)], 1).float()
    return {
        "gradient in two numbers": unlike(machine.fetch(halves).float(), wanted),
        "the gate's weight, twice": unlike(machine.fetch(twice).float(), weight.float().repeat(2, 1)),
    }


def route(machine: Machine, logits: Tensor, top_k: int) -> dict[str, Tensor]:
    (num_tokens, num_experts), module = logits.shape, machine.module
    problem = module.RouteProblem(
        machine.device.index or 0, machine.stream, num_tokens, num_experts, top_k, 1, True, 0.0
    )
    given, rows = machine.put(logits), num_tokens * top_k
    module.route_prepare(machine.device.index or 0, num_experts, top_k)
    of = {"weights": (rows, F32), "experts": (rows, INT), "positions": (rows, INT), "slots": (rows, INT)}
    of |= {"counts": (num_experts, INT), "ends": (num_experts, INT), "fault": (1, torch.int64)}
    of |= {"messages": (4 + num_experts, INT), "l_aux": (1, F32)}
    out = {name: machine.put(torch.full((size,), -7, dtype=dtype)) for name, (size, dtype) in of.items()}
    workspace = machine.put(torch.full((module.route_workspace_bytes(problem),), 255, dtype=torch.uint8))
    at = [each.data_ptr() for each in (given, *out.values(), workspace)]
    module.route(problem, *at, workspace.numel(), 4, 1, (num_tokens, 0, 0, 0))
    fetched = {name: machine.fetch(each) for name, each in out.items()}
    fetched["weights"] = fetched["weights"].view(num_tokens, top_k)
    return fetched


def unlike(got: Tensor, wanted: Tensor) -> str | None:
    wrong = got != wanted
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} wrong, first {list(at)}: {got[at]}, not {wanted[at]}"


# ---- permutes


def find_permutes(
    machine: Machine, num_tokens: int = 300, top_k: int = 2, columns: int = 520
) -> dict[str, str | None]:
    """All launches; integers and weights that are powers of two, some slots dropped."""
    random = torch.Generator().manual_seed(3)
    slots = num_tokens * top_k
    kept = torch.rand(slots, generator=random) < 0.9
    count = int(kept.sum())
    position = torch.full((slots,), -1)
    position[kept] = torch.randperm(count, generator=random)
    weight = torch.tensor([0.5, 1.0, 2.0])[torch.randint(3, (slots,), generator=random)] * kept
    x, rows = (
        torch.randint(-3, 4, (each, columns), generator=random).float() for each in (num_tokens, count)
    )
    put_x, put_rows = machine.put(x, BF16), machine.put(rows, BF16)
    at, by = machine.put(position, INT), machine.put(weight)
    moving = machine.module.Moving(
        machine.device.index or 0, machine.stream, TYPE_BF16, num_tokens, top_k, count, columns * 2,
        at.data_ptr(), by.data_ptr(), 0,
    )  # fmt: skip
    moved, of_rows = machine.poisoned(count, columns), machine.poisoned(count, columns)
    summed, of_x = machine.poisoned(num_tokens, columns), machine.poisoned(num_tokens, columns)
    dots = [machine.poisoned(slots, dtype=F32) for _ in range(2)]

    def data(*tensors: Tensor) -> list[int]:
        return [word for each in tensors for word in (each.data_ptr(), columns * 2)]

    machine.module.permute(moving, *data(put_x, moved))
    # Two tensors at once, without weights, and only the rows from first_row on.
    first_row = count // 3
    of_two = machine.module.Moving(
        machine.device.index or 0, machine.stream, TYPE_BF16, num_tokens, top_k, count - first_row,
        columns * 2, at.data_ptr(), 0, 0, first_row,
    )  # fmt: skip
    two = [machine.put(torch.full((count, columns), 9.0), BF16) for _ in range(2)]
    put_negative = machine.put(-x, BF16)
    pairs = ((put_x, two[0]), (put_negative, two[1]))
    machine.module.permute_several([(of_two, *data(*pair)) for pair in pairs])
    machine.module.unpermute(moving, *data(put_rows, summed))
    machine.module.permute_backward(moving, *data(put_x, put_rows, of_x), dots[0].data_ptr())
    machine.module.unpermute_backward(moving, *data(put_x, put_rows, of_rows), dots[1].data_ptr())

    token = torch.arange(slots) // top_k
    wanted_rows = torch.zeros(count, columns)
    wanted_rows[position[kept]] = x[token[kept]] * weight[kept, None]
    terms, products = torch.zeros(slots, columns), torch.zeros(slots)
    terms[kept] = rows[position[kept]] * weight[kept, None]
    products[kept] = (rows[position[kept]] * x[token[kept]]).sum(1)
    wanted_sums = terms.view(num_tokens, top_k, columns).sum(1)
    plain_rows = torch.zeros(count, columns)
    plain_rows[position[kept]] = x[token[kept]]
    before = torch.full((first_row, columns), 9.0)
    wanted_two = [torch.cat([before, rows[first_row:]]) for rows in (plain_rows, -plain_rows)]
    checks = {
        "the first of two permutes": (two[0], wanted_two[0]),
        "the second of two permutes": (two[1], wanted_two[1]),
        "permute": (moved, wanted_rows), "unpermute": (summed, wanted_sums),
        "permute's gradient": (of_x, wanted_sums), "unpermute's gradient": (of_rows, wanted_rows),
        "permute's gradient of weights": (dots[0], products),
        "unpermute's gradient of weights": (dots[1], products),
    }  # fmt: skip
    return {name: unlike(machine.fetch(got), wanted) for name, (got, wanted) in checks.items()}


# ---- messages of a wire


def find_messages(
    machine: Machine, num_tokens: int = 300, top_k: int = 2, columns: int = 1160
) -> dict[str, str | None]:
    """Both launches, for every dtype: bytes and values are those of PyTorch on the CPU.

    Some slots are dropped. The sizes of rows go from the smallest to the largest that the dtype has.
    """
    found: dict[str, str | None] = {}
    random = torch.Generator().manual_seed(4)
    slots = num_tokens * top_k
    kept = torch.rand(slots, generator=random) < 0.9
    count = int(kept.sum())
    position = torch.full((slots,), -1, dtype=INT)
    position[kept] = torch.randperm(count, generator=random, dtype=INT)
    token = torch.empty(count, dtype=torch.int64)
    token[position[kept].long()] = torch.arange(slots)[kept] // top_k
    at = machine.put(position)
    for code, dtype in enumerate((F32, BF16, torch.float16)):
        sizes = (
            torch.logspace(-44, 38, num_tokens)
            if dtype != torch.float16
            else torch.logspace(-7, 4, num_tokens)
        )
        x = ((torch.rand(num_tokens, columns, generator=random) * 2 - 1) * sizes[:, None]).to(dtype)
        size = message_bytes("e4m3", columns, dtype.itemsize)
        expected = torch.zeros(num_tokens, size, dtype=torch.uint8)
        pack_rows("e4m3", x.clone(), expected)
        put_x, wire = (
            machine.put(x),
            machine.module.Wire(machine.device.index or 0, machine.stream, code, 0, columns),
        )
        messages, rows = machine.put(torch.full((count, size), 0xAA, dtype=torch.uint8)), machine.put(x)
        row_bytes = columns * dtype.itemsize
        machine.module.wire_pack(
            wire,
            num_tokens,
            top_k,
            count,
            at.data_ptr(),
            put_x.data_ptr(),
            row_bytes,
            messages.data_ptr(),
            size,
        )
        index = machine.put(torch.randint(count, (num_tokens,), generator=random))
        machine.module.wire_unpack(
            wire,
            num_tokens,
            count,
            index.data_ptr(),
            True,
            messages.data_ptr(),
            size,
            rows.data_ptr(),
            row_bytes,
        )
        found[f"messages of {dtype}"] = unlike(machine.fetch(messages), expected[token].float())
        wanted = torch.empty_like(x)
        unpack_rows("e4m3", expected, token[index.cpu()], wanted)
        found[f"rows of {dtype}"] = unlike(machine.fetch(rows), wanted.float())
    return found


# ---- row counts


def find_counts(
    machine: Machine, num_ranks: int = 5, num_bins: int = 8, num_experts: int = 3
) -> dict[str, str | None]:
    """The three launches, against the plain definition (`bench.kernels_on_cpu`)."""
    sizes = (num_ranks, num_bins, num_experts)
    random = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, 9, shape, dtype=INT, generator=random)

    counts = draw(num_bins, num_ranks * num_experts)
    received = draw(num_ranks, HEADER + num_bins * num_experts)
    own_rank, chunks = 1, 4
    arrived = received[:, HEADER:].view(sizes)
    num_rows = int(arrived.sum() - arrived[own_rank].sum())
    num_sent = int(counts.sum())
    slot = torch.randperm(num_sent, generator=random).int()
    weight = torch.rand(num_sent, generator=random)
    of = {
        "sent": (received.numel(), INT),
        "agreed": (HEADER + 3 + 2, LONG),
        "of_chunks": (num_rows, INT),
        "of_all": (num_rows, LONG),
        "number_slot": (num_sent, LONG),
        "number_weight": (num_sent, F32),
        "ends": (2 * chunks * num_experts, INT),
        "zeros": (300, INT),
    }

    def run(module: Any, put: Any) -> dict[str, Tensor]:
        given = [put(each) for each in (counts, received, slot, weight)]
        out = {name: put(torch.full((size,), -7, dtype=dtype)) for name, (size, dtype) in of.items()}
        at_counts, at_received, at_slot, at_weight = (each.data_ptr() for each in given)
        at = {name: each.data_ptr() for name, each in out.items()}
        where = {"device": machine.device.index or 0, "stream": machine.stream, "sizes": list(sizes)}
        module.counts_pack(**where, header=[7, 0, 1, 2], counts=at_counts, sent=at["sent"])
        module.counts_agree(
            **where, received=at_received, agreed=at.pop("agreed"), own_rank=own_rank, host_rows=10,
            asks_rows=True, irregular=True, degrees=[(2, 2.0), (4, 0.5)],
        )  # fmt: skip
        module.counts_order(
            **where, **at, received=at_received, chunks=chunks, joined=1, own_rank=own_rank, pieces=chunks,
            slot=at_slot, weight=at_weight, num_zeros=300,
        )  # fmt: skip
        return {name: machine.fetch(each) for name, each in out.items()}

    found = run(machine.module, machine.put)
    wanted = run(kernels_on_cpu, lambda values: values.clone())
    return {name: unlike(found[name], wanted[name]) for name in of}
