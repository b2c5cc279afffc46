"""Packs rows into messages of a narrower number format (e4m3 with scales, bfloat16), and unpacks them.

A message is the sequence of bytes in which a row is sent. With ``wire="bfloat16"`` a message has the row's
values, rounded to bfloat16. With ``wire="e4m3"``, a float8 format, the M columns of a row are divided into B
= ceil(M / 128) blocks, each with a scale. The message is:

    | number 0 | number 1 | ... | number M - 1 | up to 3 unused bytes | scale 0 | ... | scale B - 1 |
      float8, 1 byte each                                               float32, 4 bytes each

    scale = max(largest absolute value of the block / 448, 2**-126)
    number = value / scale, computed in float32 and rounded once to e4m3
    unpacked value = number * scale, computed in float32 and rounded once to the rows' type

A block of zeros is unpacked to zeros. If a block has an Inf or a NaN, the scale is Inf or NaN, and all values
of the block become NaN. So a value that is not finite is never hidden, and makes at most 127 other values of
its row NaN.

Letters: N rows, M columns of a row, B blocks of a row, C bytes of a message.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from pmoe.schedule.wire import BLOCK_COLUMNS, WireName, Wires, message_bytes, number_bytes

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""The largest finite number of e4m3, 448."""

E4M3_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of rows that may be rounded to e4m3. Users of float64 want more digits than e4m3 keeps."""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Lower bound of scales, for blocks of zeros and blocks whose scale would be a denormal number."""


def check_wires(wires: Wires, dtype: torch.dtype) -> None:
    """Raises ValueError if rows of a dtype must not be sent in the given number formats.

    "e4m3" is for the dtypes in `E4M3_DTYPES`. "bfloat16" is for float32 only, because it would not shorten
    rows whose numbers have 2 bytes.

    wires: the formats for forward and backward.
    dtype: dtype of the rows.
    """
    for name, wire in wires.by_option.items():
        if wire == "e4m3" and dtype not in E4M3_DTYPES:
            raise ValueError(
                f"{name} ('e4m3') must be None for rows of {dtype}: rows are float32, bfloat16 or float16"
            )
        if wire == "bfloat16" and dtype != torch.float32:
            raise ValueError(
                f"{name} ('bfloat16') must be None for rows of {dtype}: it makes float32 rows shorter only"
            )


def pack_rows(wire: WireName, rows_NM: Tensor, message_NC: Tensor) -> None:
    """Writes the message of each row: its values in a narrower number format.

    wire: the format.
    rows_NM: (N, M), the N rows with M columns. With "e4m3" and float32 rows, their values may be overwritten.
    message_NC: (N, C) uint8, memory for the messages, C bytes each.
    """
    d_model = rows_NM.shape[1]
    if wire == "bfloat16":
        message_NC.view(torch.bfloat16)[:, :d_model].copy_(rows_NM)
        return
    values_NM = rows_NM.float()
    if d_model % BLOCK_COLUMNS:
        values_NM = pad(values_NM, (0, -d_model % BLOCK_COLUMNS))
    blocks = values_NM.unflatten(1, (-1, BLOCK_COLUMNS))
    numbers, scales = _parts(message_NC, d_model)
    torch.linalg.vector_norm(blocks, math.inf, dim=2, out=scales)
    blocks.div_(scales.div_(LARGEST).clamp_(min=SMALLEST_SCALE).unsqueeze(2))
    numbers.copy_(values_NM[:, :d_model])


def unpack_rows(wire: WireName, message_NC: Tensor, index: Tensor | None, out_NM: Tensor) -> None:
    """Unpacks messages to rows, and reorders them if an index is passed.

    wire: the number format of the messages.
    message_NC: (N or more, C) uint8, the messages, C bytes each.
    index: (N,) int64: row i is unpacked from message index[i]. None if message i is row i.
    out_NM: (N, M), memory for the N rows of M columns.
    """
    d_model = out_NM.shape[1]
    if index is not None:
        message_NC = message_NC.index_select(0, index)
    if wire == "bfloat16":
        out_NM.copy_(message_NC.view(torch.bfloat16)[:, :d_model])
        return
    numbers, scales = _parts(message_NC, d_model)
    values_NM = out_NM.copy_(numbers) if out_NM.dtype == torch.float32 else numbers.float()
    if d_model % BLOCK_COLUMNS:
        values_NM.mul_(scales.repeat_interleave(BLOCK_COLUMNS, dim=1)[:, :d_model])
    else:
        values_NM.unflatten(1, (-1, BLOCK_COLUMNS)).mul_(scales.unsqueeze(2))
    if values_NM is not out_NM:
        out_NM.copy_(values_NM)


def _parts(message_NC: Tensor, d_model: int) -> tuple[Tensor, Tensor]:
    """Returns views of the two parts of e4m3 messages: the numbers (N, M) and the scales (N, B) float32.

    There are N messages. Each has M numbers and one scale for each of B blocks of 128 numbers.

    message_NC: (N, C) uint8, the messages of C bytes.
    d_model: M.
    """
    first = number_bytes(d_model)
    last = message_bytes("e4m3", d_model, 1)
    numbers = message_NC[:, :d_model].view(torch.float8_e4m3fn)
    return numbers, message_NC[:, first:last].view(torch.float32)


def packing_bytes(wire: WireName, d_model: int, element_size: int) -> int:
    """Returns how many bytes of temporary tensors `pack_rows` and its caller need for each row.

    The tensors are a copy of the row, gathered from the tokens. With "e4m3", if the rows are narrower than
    float32, there is also a float32 copy of the row.

    wire: the number format of the message.
    d_model: M, the columns of a row.
    element_size: bytes of an element of the row.
    """
    return d_model * element_size + _widened(wire, d_model, element_size)


def unpacking_bytes(wire: WireName, d_model: int, element_size: int) -> int:
    """Returns how many bytes of temporary tensors `unpack_rows` needs for each row.

    The tensors are a copy of the messages, in the order of the rows. With "e4m3", if the rows are narrower
    than float32, there is also a float32 copy of the values.

    wire: the number format of the message.
    d_model: M, the columns of a row.
    element_size: bytes of an element of the row.
    """
    return message_bytes(wire, d_model, element_size) + _widened(wire, d_model, element_size)


def hidden_block_bytes(columns: int, element_size: int) -> int:
    """Returns how many bytes of temporary tensors packing a block of T_M needs for each of its rows.

    The block is packed to e4m3, or unpacked. The tensors are, for each row: a float32 copy of the row, if it
    is narrower than float32 or if its columns must be filled up to whole blocks of 128; and two copies of its
    scales.

    columns: columns of T_M.
    element_size: bytes of an element of the row.
    """
    num_scales = -(-columns // BLOCK_COLUMNS)
    filled = columns % BLOCK_COLUMNS > 0
    values = columns * (element_size < 4) + num_scales * BLOCK_COLUMNS * filled
    return 4 * (values + 2 * num_scales)


def _widened(wire: WireName, d_model: int, element_size: int) -> int:
    """Returns the bytes of a row's temporary float32 values; 0 for float32 rows and for wire="bfloat16".

    wire: the number format of the message.
    d_model: columns of the row.
    element_size: bytes of an element of the row.
    """
    return 4 * d_model * (wire == "e4m3" and element_size < 4)
