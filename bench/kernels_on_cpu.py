"""A stand-in for the extension `pmoe._cuda` that computes on the CPU, from the arguments of real launches.

Launches pass addresses, strides and sizes. The functions here make tensors of the same memory, and compute
with the PyTorch expressions that define the kernels. So a wrong address, stride or size gives a wrong result.
Besides the dtypes that the kernels take, they compute with float64, so that results can be compared closely.

Letters: N rows, E experts, T tokens, K choices of a token.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pmoe.comm.wire import pack_rows, unpack_rows
from pmoe.kernels.counts import HEADER
from pmoe.kernels.gemm import ACTIVATIONS, FORWARD, HIDDEN, HIDDEN_GRADIENT, WEIGHT
from pmoe.kernels.grouped_gemm import RowSlots, reference
from pmoe.kernels.wire import FORMATS
from pmoe.schedule.wire import WireName, message_bytes

FLOAT64 = 9
"""Code of float64, which the kernels themselves do not take."""
FLOAT32 = 8
"""Code of float32 in grouped products, which the kernels themselves do not take."""
ELEMENTS = {0: torch.bfloat16, 1: torch.float16, FLOAT32: torch.float32, FLOAT64: torch.float64}
ROW_TYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16, FLOAT64: torch.float64}
NAMES = {code: name for name, code in ACTIVATIONS.items()}


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, stride: int | None = None) -> Tensor:
    """Returns a tensor of the memory at an address.

    stride: elements from one index of the first dimension to the next; None if there are no gaps.
    """
    inner = torch.Size(shape[1:]).numel()
    stride = inner if stride is None else stride
    if not shape[0] or not inner:
        return torch.empty(shape, dtype=dtype)
    num_bytes = ((shape[0] - 1) * stride + inner) * dtype.itemsize
    memory = (ctypes.c_char * num_bytes).from_address(address)
    flat = torch.frombuffer(memory, dtype=dtype)
    inner_strides = torch.empty(shape[1:], device="meta").stride()
    return flat.as_strided(shape, (stride, *inner_strides))


class Moving(NamedTuple):
    """The arguments that permutes share: `Moving` of cuda/permute/bind.cpp."""

    device: int
    stream: int
    type: int
    tokens: int
    choices: int
    num_rows: int
    row_bytes: int
    position: int
    weight: int
    parts: int
    first_row: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return ROW_TYPES[self.type]

    def keeps(self, position: int) -> bool:
        return self.first_row <= position < self.first_row + self.num_rows

    def columns(self) -> int:
        return self.row_bytes // self.dtype.itemsize

    def positions(self) -> Tensor:
        """Returns the positions, (T, K) int64."""
        return tensor_at(self.position, (self.tokens, self.choices), torch.int32).long()

    def token_rows(self, address: int, stride_bytes: int) -> Tensor:
        """Returns the tensor with a row for each token, (T, columns)."""
        stride = stride_bytes // self.dtype.itemsize
        return tensor_at(address, (self.tokens, self.columns()), self.dtype, stride)

    def row(self, address: int, stride_bytes: int, index: int) -> Tensor:
        """Returns one of the sorted rows. Only rows to which a position points need to be memory."""
        return tensor_at(address + index * stride_bytes, (1, self.columns()), self.dtype)[0]


def permute(moving: Moving, x: int, x_stride: int, out: int, out_stride: int) -> None:
    assert not moving.weight
    x_TM = moving.token_rows(x, x_stride)
    for token, places in enumerate(moving.positions().tolist()):
        for place in places:
            if moving.keeps(place):
                moving.row(out, out_stride, place).copy_(x_TM[token])


def permute_several(copies: Sequence[tuple[Moving, int, int, int, int]]) -> None:
    assert 1 <= len(copies) <= 4
    for moving, *places in copies:
        permute(moving, *places)


def unpermute(moving: Moving, rows: int, rows_stride: int, y: int, y_stride: int) -> None:
    assert not moving.weight
    y_TM = moving.token_rows(y, y_stride)
    for token, places in enumerate(moving.positions().tolist()):
        chosen = [moving.row(rows, rows_stride, place) for place in places if moving.keeps(place)]
        y_TM[token] = torch.stack(chosen).sum(0) if chosen else 0


def grouped_gemm(
    *,
    element: int,
    form: int,
    epilogue: int,
    a: int,
    a_rows: int,
    a_stride: int,
    b: int,
    d: int,
    d_stride: int,
    ends: int,
    experts: int,
    rows: int,
    n: int,
    k: int = 0,
    m: int = 0,
    b_rows: int = 0,
    b_stride: int = 0,
    slot: int = 0,
    top_k: int = 1,
    a_gathered: bool = False,
    bias: int = 0,
    weight: int = 0,
    active: int = 0,
    active_stride: int = 0,
    hidden: int = 0,
    hidden_stride: int = 0,
    activation: int = 0,
    row_dots: int = 0,
    weighs_active: bool = False,
    place: int = 0,
    wide: bool = False,
    accumulates: bool = False,
    **_: Any,
) -> None:
    """Computes a grouped product. The arguments are those of cuda/grouped_gemm/bind.cpp."""
    dtype = ELEMENTS[element]
    scale_dtype = torch.promote_types(dtype, torch.float32)
    ends_E = tensor_at(ends, (experts,), torch.int32)
    assert int(ends_E[-1]) == rows, "ends do not fit the rows"
    if form == WEIGHT:
        assert a_rows == b_rows == rows
        out = tensor_at(d, (experts, m, n), torch.float32 if wide else dtype)
        assert d_stride == n
        first = tensor_at(a, (rows, m), dtype, a_stride)
        reference.weight_gradient(first, tensor_at(b, (rows, n), dtype, b_stride), ends_E, out, accumulates)
        return
    slots = RowSlots(tensor_at(slot, (rows,), torch.int32), top_k) if slot else None
    rows_NI = reference.gather(tensor_at(a, (a_rows, k), dtype, a_stride), slots, a_gathered)
    assert rows_NI.shape[0] == rows
    weight_EOI = tensor_at(b, (experts, n, k) if form == FORWARD else (experts, k, n), dtype)
    bias_EO = tensor_at(bias, (experts, n), dtype) if bias else None
    scale_N = tensor_at(weight, (rows,), scale_dtype) if weight else None
    if epilogue == HIDDEN_GRADIENT:
        columns = 2 * n if NAMES[activation] == "swiglu" else n
        dot_N = reference.hidden_gradient(
            rows_NI, weight_EOI, tensor_at(hidden, (rows, columns), dtype, hidden_stride), scale_N, ends_E,
            activation=NAMES[activation], weighs_active=weighs_active,
            out=tensor_at(d, (rows, columns), dtype, d_stride),
            active=tensor_at(active, (rows, n), dtype, active_stride),
        )  # fmt: skip
        tensor_at(row_dots, (rows,), scale_dtype).copy_(dot_N)
        return
    if form != FORWARD:
        weight_EOI = weight_EOI.transpose(1, 2)
    result = torch.empty(rows, n, dtype=dtype)
    reference.product(rows_NI, weight_EOI, ends_E, bias_EO, scale_N, result)
    if place:
        for row, value in zip(tensor_at(place, (rows,), torch.int32).tolist(), result, strict=True):
            tensor_at(d + row * d_stride * dtype.itemsize, (n,), dtype).copy_(value)
    elif d:
        tensor_at(d, (rows, n), dtype, d_stride).copy_(result)
    if epilogue == HIDDEN:
        width = n // 2 if NAMES[activation] == "swiglu" else n
        value = reference.activate(NAMES[activation], result)
        tensor_at(active, (rows, width), dtype, active_stride).copy_(value)


# ---- messages of a wire


class Wire(NamedTuple):
    """The arguments that packing and unpacking share: `Wire` of cuda/wire/bind.cpp."""

    device: int
    stream: int
    type: int
    format: int
    columns: int

    @property
    def name(self) -> WireName:
        return next(name for name, code in FORMATS.items() if code == self.format)

    def rows(self, address: int, num_rows: int, stride_bytes: int) -> Tensor:
        """Returns the tensor of rows, (num_rows, columns)."""
        dtype = ROW_TYPES[self.type]
        return tensor_at(address, (num_rows, self.columns), dtype, stride_bytes // dtype.itemsize)

    def message_bytes(self) -> int:
        return message_bytes(self.name, self.columns, ROW_TYPES[self.type].itemsize)


def wire_pack(
    wire: Wire,
    tokens: int,
    choices: int,
    num_messages: int,
    position: int,
    x: int,
    x_stride: int,
    messages: int,
    messages_stride: int,
) -> None:
    packed = torch.zeros(tokens, wire.message_bytes(), dtype=torch.uint8)
    pack_rows(wire.name, wire.rows(x, tokens, x_stride).clone(), packed)
    places = [[token] for token in range(tokens)]
    if position:
        places = tensor_at(position, (tokens, choices), torch.int32).tolist()
    for token, of_token in enumerate(places):
        for place in of_token:
            if 0 <= place < num_messages:
                address = messages + place * messages_stride
                tensor_at(address, (wire.message_bytes(),), torch.uint8).copy_(packed[token])


def wire_unpack(
    wire: Wire,
    rows: int,
    num_messages: int,
    index: int,
    wide: bool,
    messages: int,
    messages_stride: int,
    out: int,
    out_stride: int,
) -> None:
    arrived = tensor_at(messages, (num_messages, wire.message_bytes()), torch.uint8, messages_stride)
    chosen = tensor_at(index, (rows,), torch.int64 if wide else torch.int32) if index else None
    unpack_rows(wire.name, arrived, chosen, wire.rows(out, rows, out_stride))


# ---- the gate


def route_halves(
    device: int,
    stream: int,
    num_tokens: int,
    num_experts: int,
    columns: int,
    grad_logits: int,
    halves: int,
    weight: int,
    twice: int,
) -> None:
    grad_TE = tensor_at(grad_logits, (num_tokens, num_experts), torch.float32)
    upper_TE, lower_TE = tensor_at(halves, (num_tokens, 2 * num_experts), torch.bfloat16).chunk(2, 1)
    upper_TE.copy_(grad_TE)
    lower_TE.copy_(grad_TE - upper_TE)
    weight_EM = tensor_at(weight, (num_experts, columns), torch.bfloat16)
    tensor_at(twice, (2, num_experts, columns), torch.bfloat16).copy_(weight_EM)


# ---- row counts


def _messages(address: int, sizes: Sequence[int]) -> Tensor:
    """Returns messages, (W, HEADER + F * E) int32 for ``sizes`` W, F and E."""
    num_ranks, num_bins, num_experts = sizes
    return tensor_at(address, (num_ranks, HEADER + num_bins * num_experts), torch.int32)


def counts_pack(
    *,
    device: int,
    stream: int,
    sizes: Sequence[int],
    header: Sequence[int],
    counts: int,
    sent: int,
    fault: int = 0,
) -> None:
    num_ranks, num_bins, num_experts = sizes
    sent_WL = _messages(sent, sizes)
    counts_FWE = tensor_at(counts, (num_bins, num_ranks, num_experts), torch.int32)
    for rank in range(num_ranks):
        sent_WL[rank, :HEADER] = torch.tensor(list(header))
        sent_WL[rank, HEADER:] = counts_FWE[:, rank].reshape(-1)
    if fault:
        sent_WL[:, 1] = tensor_at(fault, (1,), torch.int64)


def counts_agree(
    *,
    device: int,
    stream: int,
    sizes: Sequence[int],
    received: int,
    agreed: int,
    own_rank: int,
    host_rows: int,
    asks_rows: bool,
    irregular: bool,
    degrees: Sequence[tuple[int, float]],
) -> None:
    num_ranks, num_bins, num_experts = sizes
    received_WL = _messages(received, sizes)
    agreed_A = tensor_at(agreed, (HEADER + 3 + len(degrees),), torch.int64)
    agreed_A[:HEADER] = received_WL[:, :HEADER].amax(0)
    rows_WF = received_WL[:, HEADER:].reshape(num_ranks, num_bins, num_experts).long().sum(2)
    all_rows = int(rows_WF.sum())
    agreed_A[HEADER] = 0 <= host_rows < all_rows
    agreed_A[HEADER + 1] = all_rows if asks_rows else 0
    agreed_A[HEADER + 2] = irregular
    rows_F = [sum(int(rows_WF[w, f]) for w in range(num_ranks) if w != own_rank) for f in range(num_bins)]
    for index, (degree, limit) in enumerate(degrees):
        most_rows = math.ceil(int(agreed_A[0]) * limit)
        depth = 0
        chunks = degree
        while chunks < num_bins:
            width = num_bins // chunks
            largest = max(sum(rows_F[start : start + width]) for start in range(0, num_bins, width))
            depth += largest > most_rows
            chunks *= next(factor for factor in itertools.count(2) if width % factor == 0)
        agreed_A[HEADER + 3 + index] = depth


def counts_order(
    *,
    device: int,
    stream: int,
    sizes: Sequence[int],
    received: int,
    sent: int,
    chunks: int,
    joined: int,
    own_rank: int,
    pieces: int,
    ends: int,
    zeros: int,
    num_zeros: int,
    of_chunks: int = 0,
    of_all: int = 0,
    slot: int = 0,
    number_slot: int = 0,
    weight: int = 0,
    number_weight: int = 0,
) -> None:
    num_ranks, num_bins, num_experts = sizes
    shape = (num_ranks, num_bins, num_experts)
    counts_WFE = _messages(received, sizes)[:, HEADER:].reshape(shape).long()
    if of_chunks:
        arrived_WFE = counts_WFE.clone()
        if own_rank >= 0:
            arrived_WFE[own_rank] = 0
        _order_rows(arrived_WFE.tolist(), chunks, joined, of_chunks, of_all)
    if slot:
        sent_WFE = _messages(sent, sizes)[:, HEADER:].reshape(shape).long()
        rows_nW = sent_WFE.sum(2).t().reshape(chunks, -1, num_ranks).sum(1).tolist()
        order = _order_numbers(rows_nW, own_rank)
        slot_S = tensor_at(slot, (len(order),), torch.int32)[order].long()
        tensor_at(number_slot, (len(order),), torch.int64).copy_(slot_S)
        if weight:
            taken = tensor_at(weight, (int(slot_S.max()) + 1,), torch.float32)[slot_S]
            tensor_at(number_weight, (len(order),), torch.float32).copy_(taken)
    rows_nE = torch.zeros(chunks + pieces, num_experts, dtype=torch.long)
    for rank, bin_ in itertools.product(range(num_ranks), range(num_bins)):
        chunk = bin_ * chunks // num_bins
        piece = max(chunk - (chunks - pieces), 0)
        rows_nE[chunks + piece if rank == own_rank else chunk] += counts_WFE[rank, bin_]
    tensor_at(ends, (chunks + pieces, num_experts), torch.int32).copy_(rows_nE.cumsum(1))
    if num_zeros:
        tensor_at(zeros, (num_zeros,), torch.int32).zero_()


def _order_rows(
    counts_WFE: list[list[list[int]]], chunks: int, joined: int, of_chunks: int, of_all: int
) -> None:
    """Writes the orders of rows that arrive: `of_chunks` and `of_all` of cuda/counts/layout.h.

    counts_WFE: the rows by source rank, bin and expert.
    """
    num_ranks = len(counts_WFE)
    num_bins = len(counts_WFE[0])
    num_experts = len(counts_WFE[0][0])
    width = num_bins // chunks
    next_in_chunk = [0] * chunks
    rows = []
    for rank, chunk, expert, bin_ in itertools.product(
        range(num_ranks), range(chunks), range(num_experts), range(width)
    ):
        for _ in range(counts_WFE[rank][chunk * width + bin_][expert]):
            rows.append(((chunk, expert, bin_ // joined, rank), next_in_chunk[chunk], len(rows)))
            next_in_chunk[chunk] += 1
    rows.sort(key=lambda row: row[0])
    tensor_at(of_chunks, (len(rows),), torch.int32).copy_(torch.tensor([row[1] for row in rows]))
    tensor_at(of_all, (len(rows),), torch.int64).copy_(torch.tensor([row[2] for row in rows]))


def _order_numbers(rows_nW: list[list[int]], own_rank: int) -> list[int]:
    """Returns the sorted row of each number that is sent, in the order of the numbers.

    rows_nW: the rows of this rank by chunk and destination rank.
    own_rank: this rank, whose rows are the last of their chunk, and their numbers the last; -1 if none stay.
    """
    runs = []
    row = 0
    for chunk, rows_W in enumerate(rows_nW):
        for rank in sorted(range(len(rows_W)), key=lambda rank: (rank == own_rank, rank)):
            runs.append(((rank == own_rank, rank, chunk), range(row, row + rows_W[rank])))
            row += rows_W[rank]
    return [row for _, rows in sorted(runs, key=lambda run: run[0]) for row in rows]
