"""Moves of rows, and torch's products in float8, as layers with ``products`` launch them."""

from __future__ import annotations

from typing import get_args

import torch

from pmoe.kernels.scaled_products import products as scaled
from pmoe.kernels.scaled_products.formats import ProductsName
from pmoe.kernels.scaled_products.rounding import Rounded, round_operand
from tests.gpu.ladder.machine import this_machine
from tests.gpu.ladder.moving import find_counts, find_messages, find_permutes, unlike
from tests.gpu.ladder.tiles import demand_nothing

COUNTS = (130, 0, 3, 128, 1)
COLUMNS, OUT_COLUMNS = 512, 272


def check_moves(path: str) -> None:
    machine = this_machine(path)
    moves = find_permutes(machine) | find_messages(machine) | find_counts(machine)
    demand_nothing(moves | find_rounded(machine.device))


def find_rounded(device: torch.device) -> dict[str, str | None]:
    """Launches each format that torch has a product for here, and compares it with the definition on the CPU.

    The values are integers times powers of two. The largest of each block is 28 times a power of two, which
    becomes 448, so no value is rounded, and sums are exact. Neighbouring blocks have other scales.
    """
    random = torch.Generator().manual_seed(4)
    found: dict[str, str | None] = {}
    for products in get_args(ProductsName):
        asked = request_on(device, products)
        if scaled.refusals(asked):
            continue
        num_rows = sum(COUNTS)
        rows = torch.randint(-3, 4, (num_rows, COLUMNS), generator=random).float()
        matrices = torch.randint(-2, 3, (len(COUNTS), OUT_COLUMNS, COLUMNS), generator=random).float()
        rows[:, ::32] = 28.0
        matrices[:, :, ::32] = 28.0
        by_block = torch.exp2((torch.arange(COLUMNS) // 32 % 3).float())
        rows *= by_block
        matrices *= by_block.flip(0)
        rows *= torch.exp2(torch.randint(-4, 5, (num_rows, 1), generator=random).float())
        operands = [round_operand(products, each) for each in (rows, matrices)]
        ends = torch.tensor(COUNTS).cumsum(0).int()
        out = torch.empty(num_rows, OUT_COLUMNS, dtype=torch.bfloat16)
        expected = scaled.scaled_product(products, operands[0], operands[1], COUNTS, ends, None, None, out)
        moved = [Rounded(each.numbers.to(device), each.scales.to(device)) for each in operands]
        got = scaled.launch_scaled(products, moved[0], moved[1], COUNTS, ends.to(device))
        found[f"product in {products}"] = unlike(got.cpu().float(), expected.float())
    return found


def request_on(device: torch.device, products: ProductsName) -> scaled.ScaledRequest:
    """The product of `find_rounded`, as a request."""
    is_cuda = device.type == "cuda"
    return scaled.ScaledRequest(
        products=products,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if is_cuda else (0, 0),
        device_name=str(device),
        dtype=torch.bfloat16,
        experts=len(COUNTS),
        rows=sum(COUNTS),
        columns=COLUMNS,
        out_columns=OUT_COLUMNS,
    )
