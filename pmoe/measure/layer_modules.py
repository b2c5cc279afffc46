"""Measures the costs of two modules of a layer, its order and its gate (FSMoE, Section 3.2).

The order copies tokens to rows and sums rows to tokens. Each cost is a line, seconds = alpha + beta * size,
through the medians of a few sizes. The results are those of this rank; the caller lets the ranks agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pmoe.measure.module_cost import RUNS, profile_module
from pmoe.measure.timing import clock_of, median_seconds
from pmoe.ordering.base import Order
from pmoe.ordering.sorted import sort_rows
from pmoe.planner.costs import LineCost, fit

ROWS = (64, 256, 1024)
"""Numbers of rows with which a layer's modules are timed: rows of the order, or tokens of the gate."""

CHUNKS = 4
"""Number of chunks into which rows are sorted for a measurement. The seconds hardly depend on it."""


MIN_SIZE = 8
"""The largest number of rows that is timed is at least twice this, so that two timed numbers differ."""


def rows_within(most_bytes: float, row_bytes: int) -> tuple[int, ...]:
    """Returns the numbers of rows to time if their tensors may take only ``most_bytes`` bytes.

    These are the numbers of `ROWS` if they fit. Otherwise the largest number is as many rows as fit, and the
    others are a quarter and a sixteenth of it.

    most_bytes: the most bytes.
    row_bytes: the bytes that one row takes.

    Example: 1e6 bytes, 4000 bytes a row -> 15, 62, 250.
    """
    most = int(min(ROWS[-1], max(2 * MIN_SIZE, most_bytes / row_bytes)))
    return tuple(max(1, most * rows // ROWS[-1]) for rows in ROWS)


def order_lines(
    order: Order, rows_TM: Tensor, top_k: int, num_experts: int, rows: Sequence[int] = ROWS
) -> tuple[LineCost, ...]:
    """Measures three operations, and returns the seconds of each as a line over N, the number of rows.

    1. copying tokens to N rows, by the layer's order;
    2. summing N rows to tokens, by the order;
    3. sorting N (token, choice) pairs by chunk and expert.

    order: the layer's order.
    rows_TM: (T, M), T rows of the layer with M = d_model columns. Only their width, dtype and device are
        used.
    top_k: K, the number of rows of each token.
    num_experts: E, the number of experts of all ranks.
    rows: the numbers of rows to time, in rising order. Each is rounded down to whole tokens with K rows each.
        The i-th size has at least i tokens, so that sizes differ also for a large K.
    """
    device = rows_TM.device
    now = clock_of(device)
    generator = torch.Generator(device).manual_seed(0)  # leaves the caller's random numbers as they are
    samples = []
    with torch.inference_mode(False), torch.no_grad():
        for number, size in enumerate(rows, 1):
            num_tokens = max(number, size // top_k)
            num_rows = num_tokens * top_k
            tokens_TM = torch.ones(num_tokens, rows_TM.shape[1], dtype=rows_TM.dtype, device=device)
            rows_NM = torch.ones(num_rows, rows_TM.shape[1], dtype=rows_TM.dtype, device=device)
            row_TK = torch.randperm(num_rows, device=device, generator=generator).view(num_tokens, top_k)
            token_N = row_TK.view(-1) // top_k
            expert_TK = row_TK % num_experts

            def run(
                tokens_TM: Tensor = tokens_TM,
                rows_NM: Tensor = rows_NM,
                row_TK: Tensor = row_TK,
                token_N: Tensor = token_N,
                expert_TK: Tensor = expert_TK,
            ) -> tuple[float, float, float]:
                begin = now()
                order.order(tokens_TM, token_N, rows_NM)
                ordered = now()
                order.restore(rows_NM, row_TK, tokens_TM)
                restored = now()
                sort_rows(expert_TK, None, CHUNKS, num_experts, range(0, 0), 0)
                return ordered - begin, restored - ordered, now() - restored

            [seconds] = median_seconds([run], RUNS)
            samples.append((float(num_rows), seconds))
    return tuple(fit((size, seconds[at]) for size, seconds in samples).line for at in range(3))


def gate_lines(gate: nn.Module, rows_TM: Tensor, rows: Sequence[int] = ROWS) -> tuple[LineCost, LineCost]:
    """Times a gate. Returns a line for its forward and one for its backward pass.

    Each line is seconds = alpha + beta * number of tokens. The tokens are random.

    gate: the gate. It takes tokens (T, M). If its ``needs_token_ids`` is True, it also takes their ids,
        (T,) int64.
    rows_TM: (T, M), tokens of the layer, of which only the number of columns M = d_model, the dtype and the
        device are read.
    rows: the numbers of tokens with which the gate is timed.
    """
    parameters = (parameter for parameter in gate.parameters() if parameter.is_floating_point())
    like = next(parameters, rows_TM)

    def make(num_tokens: int) -> Any:
        tokens_TM = torch.randn(num_tokens, rows_TM.shape[1], dtype=like.dtype, device=like.device)
        if not getattr(gate, "needs_token_ids", False):
            return tokens_TM
        return tokens_TM, torch.zeros(num_tokens, dtype=torch.int64, device=like.device)

    forward, backward = profile_module(gate, rows, make)
    return forward.line, backward.line
