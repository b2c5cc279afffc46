"""Rates of packing and unpacking messages of a wire: ``python -m tests.gpu.first_wire FILE``.

Bytes are those that the work needs: each token is read once, each message and each row is written once. Times
stand beside those of the same rows as they are (a permute and a gather), and of PyTorch's operations. Before
anything is timed, all bytes are compared to those of PyTorch on the CPU, and products of rounded operands
(MoELayer's ``products``) to the definition.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import permutes
from bench.device import show_gpu, time_in_turn
from bench.timing import table, write_json
from pmoe.comm.wire import pack_rows, unpack_rows
from pmoe.kernels.wire import MessageKernels, refusal
from pmoe.schedule.wire import message_bytes
from tests.gpu.ladder.machine import this_machine
from tests.gpu.ladder.moving import find_messages
from tests.gpu.ladder.rounded import find_rounded

TOKENS, CHOICES, COLUMNS, ROUNDS = 16384, 4, 4096, 10


class Problem:
    """T tokens, each with K rows at random places among N = T * K.

    pack, unpack: the kernels. permute, gather: the same rows as they are. torch_pack, torch_unpack: PyTorch's
        operations for messages.
    """

    def __init__(self, device: torch.device, tokens: int, choices: int, columns: int) -> None:
        num_rows = tokens * choices
        self.x_TM = torch.randn(tokens, columns, device=device).bfloat16()
        self.position_TK = torch.randperm(num_rows, device=device).int().view(tokens, choices)
        self.slot_N = self.position_TK.view(-1).long().argsort()
        self.index_N = torch.randperm(num_rows, device=device).int()
        size = message_bytes("e4m3", columns, 2)
        self.message_NC = torch.empty(num_rows, size, dtype=torch.uint8, device=device)
        self.rows_NM = torch.empty(num_rows, columns, dtype=torch.bfloat16, device=device)
        self.out_NM = torch.empty_like(self.rows_NM)
        self.kernels = MessageKernels("e4m3", self.x_TM)
        self.choices = choices

    def bytes(self) -> dict[str, int]:
        """Returns the bytes that each of the kernels reads and writes; positions and indices count too."""
        index = self.index_N.nbytes
        rows = self.out_NM.nbytes
        return {
            "pack": self.x_TM.nbytes + index + self.message_NC.nbytes,
            "unpack": self.message_NC.nbytes + index + rows,
            "permute": self.x_TM.nbytes + index + rows,
            "gather": 2 * rows + index,
        }

    def runs(self) -> dict[str, Callable[[], object]]:
        return {
            "pack": lambda: self.kernels.pack(self.x_TM, self.position_TK, 0, self.message_NC),
            "unpack": lambda: self.kernels.unpack(self.message_NC, self.index_N, self.out_NM),
            "permute": lambda: permutes.launch_permute(self.x_TM, self.position_TK, None, self.rows_NM),
            "gather": lambda: torch.index_select(self.rows_NM, 0, self.index_N, out=self.out_NM),
            "torch_pack": lambda: pack_rows("e4m3", self.x_TM[self.slot_N // self.choices], self.message_NC),
            "torch_unpack": lambda: unpack_rows("e4m3", self.message_NC, self.index_N, self.out_NM),
        }


def measure(
    problem: Problem, time: Callable[[dict[str, Callable[[], object]]], dict[str, float]]
) -> list[dict[str, Any]]:
    """Returns a row for each run: its milliseconds and, for the kernels and the rows as they are, GB/s.

    time: returns the seconds of each run.
    """
    seconds = time(problem.runs())
    num_bytes = problem.bytes()
    return [
        {"run": name, "ms": each * 1e3, "GB/s": num_bytes[name] / each / 1e9 if name in num_bytes else None}
        for name, each in seconds.items()
    ]


def main(file: str) -> int:
    machine = show_gpu()
    device = torch.device("cuda", 0)
    why = refusal("e4m3", torch.empty(1, COLUMNS, dtype=torch.bfloat16, device=device))
    if why is not None:
        raise RuntimeError(f"the kernels pack no rows here: {why}")
    found = find_messages(this_machine("sm_80")) | find_rounded(device)
    wrong = {name: told for name, told in found.items() if told}
    rows: list[dict[str, Any]] = []
    if not wrong:
        problem = Problem(device, TOKENS, CHOICES, COLUMNS)
        rows = measure(
            problem, lambda runs: {name: each.median for name, each in time_in_turn(runs, ROUNDS).items()}
        )
        print(table(rows))
    sizes = {"tokens": TOKENS, "choices": CHOICES, "columns": COLUMNS, "dtype": "bfloat16"}
    write_json(Path(file), **machine, sizes=sizes, rounds=ROUNDS, wrong=wrong, rows=rows)
    print("\n".join(f"{name}: {told}" for name, told in wrong.items()))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
