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
of the block become NaN: the value that is not finite, and at most 127 others.

Letters: N rows, M columns of a row, B blocks of a row, C bytes of a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from pmoe.schedule.wire import BLOCK_COLUMNS, WireName, Wires, message_bytes, number_bytes

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""The largest finite number of e4m3, 448."""

E4M3_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of rows that may be rounded to e4m3. float64 is not one: its users want many digits."""

BLOCK_BYTES = 1 << 18
"""Bytes of the rows, in float32, that the CPU packs or unpacks at a time."""

BLOCKS_AT_ONCE = 4
"""A pass on the CPU packs all tokens before its first chunk, if the tokens fill at most this many blocks.

A block has `BLOCK_BYTES`. The messages of all tokens (of 128 columns or more) then take at most 0.3 MiB in
e4m3, and 0.5 MiB in bfloat16.
"""

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""The lower bound of scales. It is used for blocks of zeros, and for scales that would be denormal."""


def check_wires(wires: Wires, dtype: torch.dtype) -> None:
    """Raises ValueError if rows of a dtype must not be sent in the given number formats.

    "e4m3" is for the dtypes in `E4M3_DTYPES`. "bfloat16" is for float32 only; rows in 16 bits would not get
    shorter.

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


def block_rows(columns: int, device_type: str) -> int | None:
    """Returns the number of rows that are packed or unpacked at a time; None if it is not limited.

    On the CPU a block of rows, in float32, fits into the cache. It is large enough that most of the time is
    spent on values and not on calls of operators. On a GPU all rows are one block, because each operator is a
    launch.

    columns: columns of a row.
    device_type: "cpu" or "cuda".
    """
    return max(BLOCK_BYTES // (4 * columns), 1) if device_type == "cpu" else None


def are_packed_at_once(num_tokens: int, columns: int) -> bool:
    """Returns whether the first chunk of a pass on the CPU packs the tokens of all chunks.

    It does so if there are few tokens (`BLOCKS_AT_ONCE`): in a small pass, the time of calling operators
    matters more than memory.

    num_tokens: number of tokens of the pass.
    columns: columns of a token.
    """
    return num_tokens <= BLOCKS_AT_ONCE * rows_at_once(num_tokens, columns, "cpu")


def _blocks(columns: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yields the blocks of rows that are packed or unpacked at a time (`block_rows`).

    columns: columns of a row.
    tensors: tensors that have one entry for each row, along their first dimension. A block is a tuple with
        the entries of the same rows from every tensor.
    """
    size = block_rows(columns, tensors[0].device.type)
    if size is None or tensors[0].shape[0] <= size:
        return (tensors,)
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def pack_rows(wire: WireName, rows_NM: Tensor, message_NC: Tensor, expendable: bool = False) -> None:
    """Writes the message of each row: its values in a narrower number format.

    wire: the format.
    rows_NM: (N, M), the N rows with M columns.
    message_NC: (N, C) uint8, memory for the messages, C bytes each.
    expendable: whether the rows' values may be overwritten, so that float32 rows need not be copied.
    """
    if wire == "bfloat16":
        message_NC.view(torch.bfloat16)[:, : rows_NM.shape[1]].copy_(rows_NM)
        return
    for rows_bM, message_bC in _blocks(rows_NM.shape[1], rows_NM, message_NC):
        _pack_e4m3(rows_bM, message_bC, expendable)


def pack_copies(wire: WireName, tokens_TM: Tensor, token_N: Tensor, message_NC: Tensor) -> None:
    """Copies each row from its token, and writes the row's message.

    A message is the sequence of bytes in which a row is sent. Rows are copied and packed block by block, so
    only one block of copies needs memory.

    wire: the format.
    tokens_TM: (T, M), T tokens with M columns.
    token_N: (N,) int64, the token of each of the N rows.
    message_NC: (N, C) uint8, memory for the messages, C bytes each.
    """
    for token_b, message_bC in _blocks(tokens_TM.shape[1], token_N, message_NC):
        pack_rows(wire, tokens_TM.index_select(0, token_b), message_bC, expendable=True)


def _pack_e4m3(rows_bM: Tensor, message_bC: Tensor, expendable: bool) -> None:
    """Writes the e4m3 messages of a block of b rows.

    rows_bM: (b, M), the rows with M columns.
    message_bC: (b, C) uint8, memory for the messages, C bytes each.
    expendable: whether the rows' values may be overwritten, so that float32 rows need not be copied.
    """
    d_model = rows_bM.shape[1]
    values_bM = rows_bM.float()
    if values_bM is rows_bM and not expendable:
        values_bM = rows_bM.clone(memory_format=torch.contiguous_format)
    numbers, scales = _parts(message_bC, d_model)
    parts = list(_blocks_of_columns(values_bM, scales))
    for values, scale in parts:
        torch.linalg.vector_norm(values, math.inf, dim=-1, out=scale)
    scales.div_(LARGEST).clamp_(min=SMALLEST_SCALE)
    for values, scale in parts:
        values.div_(scale.unsqueeze(-1))
    numbers.copy_(values_bM)


def _blocks_of_columns(values_NM: Tensor, scales_NB: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Yields views of values that share scales, and views of the scales.

    The first pair has all blocks of 128 columns: values (N, blocks, 128) and scales (N, blocks). The second
    has the last block, if it has fewer columns: values (N, columns) and scales (N,).

    values_NM: (N, M), rows with M columns.
    scales_NB: (N, B), a scale for each of the B blocks of a row.
    """
    whole, rest = divmod(values_NM.shape[1], BLOCK_COLUMNS)
    if whole:
        columns = whole * BLOCK_COLUMNS
        yield values_NM[:, :columns].unflatten(1, (whole, BLOCK_COLUMNS)), scales_NB[:, :whole]
    if rest:
        yield values_NM[:, -rest:], scales_NB[:, -1]


def unpack_rows(wire: WireName, message_NC: Tensor, index: Tensor | None, out_NM: Tensor) -> None:
    """Unpacks messages to rows, and reorders them if an index is passed.

    wire: the number format of the messages.
    message_NC: (N or more, C) uint8, the messages, C bytes each.
    index: (N,) int64: row i is unpacked from message index[i]. None if message i is row i.
    out_NM: (N, M), memory for the N rows of M columns.
    """
    columns = out_NM.shape[1]
    for out_bM, source in _blocks(columns, out_NM, message_NC if index is None else index):
        message_bC = source if index is None else message_NC.index_select(0, source)
        if wire == "bfloat16":
            out_bM.copy_(message_bC.view(torch.bfloat16)[:, :columns])
        else:
            _unpack_e4m3(message_bC, out_bM)


def unpack_to_new(
    wire: WireName, message_NC: Tensor, index: Tensor | None, d_model: int, dtype: torch.dtype
) -> Tensor:
    """Unpacks messages to rows in new memory, all at once. Returns the rows, (N, M).

    The function runs one operator fewer than `unpack_rows`, which writes into memory of the caller.

    wire: the number format of the messages.
    message_NC: (N or more, C) uint8, the messages, C bytes each.
    index: (N,) int64: row i is unpacked from message index[i]. None if message i is row i.
    d_model: M, columns of a row.
    dtype: dtype of the rows.
    """
    if index is not None:
        message_NC = message_NC.index_select(0, index)
    if wire == "bfloat16":
        return message_NC.view(torch.bfloat16)[:, :d_model].to(dtype)
    numbers, scales = _parts(message_NC, d_model)
    return _scale(numbers.to(dtype), scales)


def _unpack_e4m3(message_bC: Tensor, out_bM: Tensor) -> None:
    """Unpacks the e4m3 messages of a block of b rows.

    message_bC: (b, C) uint8, the messages, C bytes each.
    out_bM: (b, M), memory for the rows of M columns.
    """
    numbers, scales = _parts(message_bC, out_bM.shape[1])
    _scale(out_bM.copy_(numbers), scales)


def _scale(values_NM: Tensor, scales_NB: Tensor) -> Tensor:
    """Multiplies each block of 128 columns by its scale, and returns the values.

    The products are computed in float32, and rounded once to the dtype of the values. The values are exact in
    any of the rows' dtypes, because every number of e4m3 is also a number of bfloat16 and of float16.

    values_NM: (N, M), numbers of e4m3 in the rows' dtype, which are overwritten.
    scales_NB: (N, B) float32, a scale for each block.
    """
    for values, scale in _blocks_of_columns(values_NM, scales_NB):
        values.mul_(scale.unsqueeze(-1))
    return values_NM


def _parts(message_NC: Tensor, d_model: int) -> tuple[Tensor, Tensor]:
    """Returns views of the two parts of e4m3 messages: the numbers (N, M) and the scales (N, B) float32.

    There are N messages. Each has M numbers and one scale for each of B blocks of 128 numbers.

    message_NC: (N, C) uint8, the messages of C bytes.
    d_model: M, the number of columns of a row.
    """
    first = number_bytes(d_model)
    last = message_bytes("e4m3", d_model, 1)
    numbers = message_NC[:, :d_model].view(torch.float8_e4m3fn)
    return numbers, message_NC[:, first:last].view(torch.float32)


def packing_bytes(
    wire: WireName, num_rows: int, columns: int, element_size: int, device_type: str, expendable: bool = False
) -> int:
    """Returns the bytes of temporary tensors of `pack_rows`.

    The result is 0 unless ``wire`` is "e4m3". `pack_rows` packs one block of rows at a time. The temporary
    tensors have, for each row of the largest block:

    - a float32 copy of the row, if the rows' dtype is narrower than float32, or ``expendable`` is False;
    - two copies of the row's scales.

    wire: the number format of the messages.
    num_rows: N, the number of rows.
    columns: columns of a row.
    element_size: bytes of an element of the rows.
    device_type: "cpu" or "cuda".
    expendable: whether the rows' values may be overwritten.
    """
    if wire != "e4m3":
        return 0
    num_scales = -(-columns // BLOCK_COLUMNS)
    values = columns * (element_size < 4 or not expendable)
    return rows_at_once(num_rows, columns, device_type) * 4 * (values + 2 * num_scales)


def unpacking_bytes(
    wire: WireName, num_rows: int, columns: int, element_size: int, device_type: str, in_order: bool = False
) -> int:
    """Returns the bytes of temporary tensors of `unpack_rows`.

    `unpack_rows` unpacks one block of rows at a time. The temporary tensors have, for each row of the largest
    block:

    - a copy of the row's message, if messages must be reordered;
    - two float32 copies of the row, if ``wire`` is "e4m3" and the rows' dtype is narrower than float32.

    wire: the number format of the messages.
    num_rows: N, the number of rows.
    columns: columns of a row.
    element_size: bytes of an element of the rows.
    device_type: "cpu" or "cuda".
    in_order: whether message i is row i.
    """
    message = 0 if in_order else message_bytes(wire, columns, element_size)
    widened = 8 * columns * (wire == "e4m3" and element_size < 4)
    return rows_at_once(num_rows, columns, device_type) * (message + widened)


def rows_at_once(num_rows: int, columns: int, device_type: str) -> int:
    """Returns the number of rows of the largest block of ``num_rows`` rows that is converted at a time.

    num_rows: the number of rows.
    columns: columns of a row.
    device_type: "cpu" or "cuda".
    """
    size = block_rows(columns, device_type)
    return num_rows if size is None else min(num_rows, size)
