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

    @property
    def dtype(self) -> torch.dtype:
        return ROW_TYPES[self.type]

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
            if 0 <= place < moving.num_rows:
                moving.row(out, out_stride, place).copy_(x_TM[token])


def unpermute(moving: Moving, rows: int, rows_stride: int, y: int, y_stride: int) -> None:
    assert not moving.weight
    y_TM = moving.token_rows(y, y_stride)
    for token, places in enumerate(moving.positions().tolist()):
        chosen = [moving.row(rows, rows_stride, place) for place in places if 0 <= place < moving.num_rows]
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
    if d:
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
    magnitude: int = 0,
    not_finite: int = 0,
) -> None:
    num_ranks, num_bins, num_experts = sizes
    sent_WL = _messages(sent, sizes)
    counts_FWE = tensor_at(counts, (num_bins, num_ranks, num_experts), torch.int32)
    for rank in range(num_ranks):
        sent_WL[rank, :HEADER] = torch.tensor(list(header))
        sent_WL[rank, HEADER:] = counts_FWE[:, rank].reshape(-1)
    if fault:
        sent_WL[:, 1] = tensor_at(fault, (1,), torch.int64)
    if magnitude and not math.isfinite(float(tensor_at(magnitude, (1,), torch.float32))):
        sent_WL[:, 1] = not_finite


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


def counts_table(
    *,
    device: int,
    stream: int,
    sizes: Sequence[int],
    received: int,
    chunks: int,
    joined: int,
    own_rank: int,
    of_chunks: int,
    of_all: int,
) -> None:
    num_ranks, num_bins, num_experts = sizes
    counts_WFE = _messages(received, sizes)[:, HEADER:].reshape(num_ranks, num_bins, num_experts).tolist()
    width = num_bins // chunks
    next_in_chunk = [0] * chunks
    rows = []
    for rank, chunk, expert, bin_ in itertools.product(
        range(num_ranks), range(chunks), range(num_experts), range(width)
    ):
        for _ in range(counts_WFE[rank][chunk * width + bin_][expert] if rank != own_rank else 0):
            rows.append(((chunk, expert, bin_ // joined, rank), next_in_chunk[chunk], len(rows)))
            next_in_chunk[chunk] += 1
    rows.sort(key=lambda row: row[0])
    tensor_at(of_chunks, (len(rows),), torch.int32).copy_(torch.tensor([row[1] for row in rows]))
    tensor_at(of_all, (len(rows),), torch.int64).copy_(torch.tensor([row[2] for row in rows]))
