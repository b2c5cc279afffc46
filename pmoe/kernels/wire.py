"""Launches of the kernels that pack rows into messages, and unpack messages to rows (cuda/wire).

    pack      reads each token once, rounds it, and writes a message for each of its choices. It takes the
              place of a permute, which would copy the token unrounded
    unpack    reads the message of each row and writes the row. It takes the place of a gather, which would
              copy the row

`pmoe.comm.wire` defines messages, and packs and unpacks them by PyTorch operations. The kernels give the same
bits as these operations on a CPU, except that the bits of a NaN may differ. On a GPU, PyTorch multiplies by 1
/ 448 in place of dividing by 448. So scales that PyTorch computes on a GPU may differ from the kernels'
scales by one unit in the last place.

Letters: T tokens, K choices of a token, N messages or rows, M columns of a row, C bytes of a message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.extension import path
from pmoe.kernels.operands import VECTOR_BYTES, address
from pmoe.kernels.permute.launches import TYPES
from pmoe.schedule.wire import WireName, message_bytes

FORMATS: dict[WireName, int] = {"e4m3": 0, "bfloat16": 1}
"""Codes of the formats of messages: `Format` of cuda/wire/layout.h."""


def refusal(wire: WireName, rows: Tensor) -> str | None:
    """Returns why the kernels cannot pack rows into messages, or unpack them; None if they can.

    wire: the format of the messages.
    rows: a tensor (..., M) with the rows' columns, dtype and device.
    """
    if rows.dtype not in TYPES:
        return f"dtype {rows.dtype}: the kernels pack {', '.join(map(str, TYPES))}"
    columns = rows.shape[-1]
    size = rows.element_size()
    if columns * size % VECTOR_BYTES:
        return f"a row's bytes ({columns} x {size} = {columns * size}) must be a multiple of {VECTOR_BYTES}"
    return path(rows.device)[1]


class MessageKernels:
    """Launches kernels that pack rows into messages, and kernels that unpack messages.

    The kernels run on the stream that is current when the object is made. The object checks no tensors,
    because the engine allocates them to suit the kernels: rows and messages begin at multiples of 16 bytes.
    Do not make an object if `refusal` refuses the rows.

    wire: the format of the messages.
    rows: a tensor (..., M) with the rows' columns, dtype and device.
    """

    def __init__(self, wire: WireName, rows: Tensor) -> None:
        columns = rows.shape[-1]
        self._module = extension.module()
        self._wire = self._module.Wire(
            rows.device.index,
            torch.cuda.current_stream(rows.device).cuda_stream,
            TYPES[rows.dtype],
            FORMATS[wire],
            columns,
        )
        self._row_bytes = columns * rows.element_size()
        self._message_bytes = message_bytes(wire, columns, rows.element_size())

    def pack(
        self, tokens_TM: Tensor, position_TK: Tensor | None, first_message: int, message_NC: Tensor
    ) -> None:
        """Writes each token into its messages: message[position[t, k] - first_message] holds tokens[t].

        Positions from first_message + N on are skipped. No position may be below first_message.

        tokens_TM: (T, M), T tokens of M columns. Its address and row stride are multiples of 16 bytes.
        position_TK: (T, K) int32, contiguous; None if N = T and message t holds token t.
        first_message: the position of the first of the N messages.
        message_NC: (N, C) uint8, contiguous memory for N messages of C bytes.
        """
        num_tokens = tokens_TM.shape[0]
        if not num_tokens or not message_NC.shape[0]:
            return
        self._module.wire_pack(
            self._wire,
            num_tokens,
            1 if position_TK is None else position_TK.shape[1],
            first_message + message_NC.shape[0],
            address(position_TK),
            tokens_TM.data_ptr(),
            tokens_TM.stride(0) * tokens_TM.element_size() if num_tokens > 1 else self._row_bytes,
            message_NC.data_ptr() - first_message * self._message_bytes,
            self._message_bytes,
        )

    def unpack(self, message_NC: Tensor, index: Tensor | None, out_NM: Tensor) -> None:
        """Unpacks messages to rows: row i comes from message index[i].

        message_NC: (at least N, C) uint8, contiguous: messages of C bytes.
        index: int32 or int64, contiguous, an element for each row; None for N messages in the order of rows.
        out_NM: (N, M), contiguous memory for N rows of M columns.
        """
        if not out_NM.shape[0]:
            return
        self._module.wire_unpack(
            self._wire,
            out_NM.shape[0],
            message_NC.shape[0],
            address(index),
            index is not None and index.dtype == torch.int64,
            message_NC.data_ptr(),
            self._message_bytes,
            out_NM.data_ptr(),
            self._row_bytes,
        )
