"""The records of a pass program, and their form as words that ``cuda/program/layout.h`` reads.

    Record   kernel 7 (hidden)   lane 0   waits for events 3, 5   then signals event 6
             operands            T_DI.1   w1   b1   T_M.1   active.1   ends
    Operand  T_DI.1: rows numbers[41] of 1024 columns, at bases[ARENA] + numbers[90]

``numbers`` are row counts, their sums, flags (0 or 1), and for each ring slot the byte of the arena at which
the slot begins. The arena is the memory of all ring slots, in which buffers take turns. The C++ side computes
``numbers`` for each call, so a record refers to a number by its index. The same indices are in
``cuda/program/layout.h``; a test compares both lists.

Letters: n chunks, W ranks, E_local experts of a rank, T tokens, K choices of a token, N received rows, M =
d_model, G columns of T_M (the hidden activation before the nonlinearity), H columns of the hidden activation
after the nonlinearity.
"""

from __future__ import annotations

import enum
from dataclasses import astuple, dataclass

from pmoe.schedule.tasks import Lane

VERSION = 3
"""The version of the form in which programs are passed as words. The C++ side refuses any other version."""

MAX_OPERANDS = 8
"""The largest number of operands of a record."""

LANES = tuple(Lane)
"""The lanes, in the order of their indices in records. A call passes a stream for each lane."""


class Kernel(enum.IntEnum):
    """The kernels that records can call.

    The comment of a kernel lists its operands in order: inputs -> outputs; then "ends", which is (E_local,)
    int32 and says where each expert's rows end. A formula may follow. ``first`` and ``flag`` are fields of
    the record (`Record`).

    The kernels from HIDDEN on belong to the experts. Their rows are sorted by expert, except the rows of an
    "out" with a "place". "weight" has the routing weight of each row, and "dots" its gradient.
    """

    NOTHING = 0  # only waits and signals
    COPY = 1  # rows -> rows, between device and host
    EXCHANGE = 2  # rows for other ranks -> rows from other ranks, by an all-to-all
    TAKE = 3  # source, index -> out: out[r] = source[index[r]]
    PUT = 4  # source, index -> out: out[index[r]] = source[r]
    # tokens, position -> out: out[position[t, k] - first] = tokens[t]. Positions whose row is not in out are
    # skipped. PLACE records that directly follow one another are a single launch on a GPU
    PLACE = 5
    SUM = 6  # rows, position -> out: out[t] = the sum over k of rows[position[t, k] - first]
    HIDDEN = 7  # rows, w1, b1 -> T_M, active; ends: T_M = rows w1^T + b1, active = nonlinearity of T_M
    # active, w2, b2, weight, place -> out; ends: out[place[r]] = row r of (active w2^T + b2) * weight. If
    # place has address 0, row r goes to out[r]
    OUTPUT = 8
    RECOMPUTE = 9  # rows, w1, b1 -> T_M; ends: T_M = rows w1^T + b1
    # grad, w2, T_M, weight -> dT_M, active, dots; ends: the gradients of T_M and of the weights; active is
    # computed from T_M once more. flag 1: active is then multiplied by weight
    HIDDEN_GRADIENT = 10
    BIAS_DOTS = 11  # grad, b2 -> dots; ends: dots[r] += <grad[r], b2 of the row's expert>
    INPUT_GRADIENT = 12  # dT_M, w1, place -> out; ends: out[place[r]] = row r of dT_M w1; place as for OUTPUT
    SCALE = 13  # weight -> grad: grad[r] *= weight[r]
    # grad, rows -> sum; ends: grad^T rows of each expert. flag 1: is added to the sum. flag 0: overwrites it
    WEIGHT_GRADIENT = 14
    BIAS_GRADIENT = 15  # grad -> sum; ends: the sum over each expert's rows of grad. flag as above


class Base(enum.IntEnum):
    """The tensors and other memory in which operands lie. A call passes an address for each.

    The address is 0 if the pass does not use the memory. "By number" in a comment means an order of this
    rank's rows: first all rows that are sent, by destination rank, chunk and expert; then the rows that stay,
    by chunk.
    """

    NOWHERE = 0  # address 0: a bias or places that the product does not have, or a result that nothing reads
    # (units, E_local) int32, where each expert's rows end in each unit: first the units of received rows, by
    # chunk, then the units of rows that stay, by chunk
    ENDS = 1
    ARENA = 2  # the ring slots of the pass
    T_I = 3  # (T, M), the layer's input
    T_O = 4  # (T, M), the layer's output
    DT_O = 5  # (T, M), the gradient of the output
    DT_I = 6  # (T, M), the gradient of the input
    W1 = 7  # (E_local, G, M)
    B1 = 8  # (E_local, G)
    W2 = 9  # (E_local, M, H)
    B2 = 10  # (E_local, M)
    DW1 = 11  # the sum of the gradients of w1, in the shape of w1
    DB1 = 12  # and so on, for b1, w2 and b2
    DW2 = 13
    DB2 = 14
    POSITION = 15  # (T, K) int32, the index of each (token, choice) pair's row among this rank's sorted rows
    PAIR_BY_NUMBER = 16  # (rows,) int32, the index of each row's (token, choice) pair, by number
    REGROUP = 17  # (N,) int32, for each chunk the index that sorts its received rows by expert
    REGROUP_WEIGHTS = 18  # (N,) int32, the index that sorts WEIGHT_ARRIVED into WEIGHT_RECEIVED
    WEIGHT = 19  # (T, K), the routing weights of this rank's tokens
    WEIGHT_BY_NUMBER = 20  # (rows,), the same weights, by number
    WEIGHT_ARRIVED = 21  # (N,), the weights of received rows as they arrive: by source rank
    WEIGHT_RECEIVED = 22  # (N,), the weights of received rows, by chunk and expert; kept for backward
    DWEIGHT = 23  # gradients of WEIGHT
    DWEIGHT_BY_NUMBER = 24  # gradients of WEIGHT_BY_NUMBER
    DWEIGHT_LEAVING = 25  # gradients of WEIGHT_ARRIVED
    DWEIGHT_RECEIVED = 26  # gradients of WEIGHT_RECEIVED
    SAVED_T_DI = 27  # (N, M), T_DI of received rows until backward: on the device, or on the host
    SAVED_T_DI_L = 28  # (rows that stay, M), T_DI of rows that stay
    SAVED_T_M = 29  # (N, G), T_M of received rows
    SAVED_T_M_L = 30  # (rows that stay, G), T_M of rows that stay


class CallNumber(enum.IntEnum):
    """Indices of the numbers that a call has only once, such as the number of all its rows.

    A comment says what the number is.
    """

    ZERO = 0  # always 0
    ONE = 1  # always 1
    ROWS = 2  # number of all rows of this rank's tokens
    SENT_ROWS = 3  # number of rows that all chunks send
    RECEIVED_ROWS = 4  # number of rows that all chunks receive
    MESSAGE_IS_SORTED = 5  # 1 if routing weights come from several ranks, and must be sorted; else 0
    MESSAGE_IS_STRAIGHT = 6  # 1 - MESSAGE_IS_SORTED


class ChunkNumber(enum.IntEnum):
    """The numbers that a call has for each chunk. `chunk_number` returns the index of such a number.

    "Sorted rows" are all rows of this rank's tokens, chunk by chunk: for each chunk the rows that it sends,
    then its rows that stay. Received rows must be sorted by expert if they come from several ranks. Rows from
    one rank arrive sorted.
    """

    TOKENS_BEGIN = 0  # index of the chunk's first token among the tokens
    TOKENS = 1  # number of the chunk's tokens
    ROW_BEGIN = 2  # index of the chunk's first row among the sorted rows
    SENT = 3  # number of rows that the chunk sends
    LOCAL = 4  # number of the chunk's rows that stay on this rank
    HOME = 5  # SENT + LOCAL
    LOCAL_ROW_BEGIN = 6  # index of the chunk's first row that stays among the sorted rows: ROW_BEGIN + SENT
    LOCAL_BEGIN = 7  # index of the same row among the rows of all chunks that stay
    LOCAL_WEIGHT = 8  # index of the same row in the order "by number" (`Base`)
    RECEIVED_BEGIN = 9  # index of the chunk's first received row among the received rows of all chunks
    RECEIVED = 10  # number of rows that the chunk receives
    SORTED = 11  # RECEIVED if the received rows must be sorted, else 0
    STRAIGHT = 12  # RECEIVED - SORTED
    IS_SORTED = 13  # 1 if the received rows must be sorted, else 0
    IS_STRAIGHT = 14  # 1 - IS_SORTED


def chunk_number(number: ChunkNumber, chunk: int) -> int:
    """Returns the index of one of a chunk's numbers, among all numbers of a call.

    number: the number, such as `ChunkNumber.SENT`.
    chunk: the index of the chunk, from 0 to n - 1.
    """
    return len(CallNumber) + chunk * len(ChunkNumber) + number


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand of a record: a matrix that begins at some row of a memory of the call.

        address = bases[base] + constant + numbers[begin] + numbers[row] * row_bytes

    A call provides ``bases``, the addresses of its memories, and ``numbers`` (see the module's docstring).

    base: the memory.
    name: the buffer, such as "T_DI.1", or the name of the base. Only for readers and tests:
        `PassProgram.words` leaves it out.
    rows: index, in ``numbers``, of the number of rows.
    columns: number of elements of a row.
    row_bytes: bytes from one row to the next.
    row: index, in ``numbers``, of the number that says with which row of the memory the operand begins.
    begin: index, in ``numbers``, of the byte of the arena at which the operand's ring slot begins; ZERO if
        the operand is in no ring slot.
    constant: bytes that are added to the address.
    """

    base: Base
    name: str
    rows: int
    columns: int
    row_bytes: int
    row: int = CallNumber.ZERO
    begin: int = CallNumber.ZERO
    constant: int = 0


@dataclass(frozen=True, kw_only=True)
class Record:
    """One call of a kernel, a copy or an all-to-all in a pass.

    kernel: what is called.
    lane: the lane on which it runs.
    task: index, in the schedule, of the task to which the record belongs; -1 for records before the first
        and after the last task.
    operands: the operands, in the order that `Kernel` lists.
    condition: index of a number of the call. If that number is 0, nothing is called, but the record still
        waits and signals.
    waits: indices of events of other lanes, for which the lane waits before the call.
    signal: index of the event that is recorded on the lane after the call; -1 for no event.
    first: index of a number of the call. PLACE and SUM get this number as an argument (`Kernel`).
    flag: another argument of the kernel, 0 or 1 (`Kernel`).
    send_line, recv_line: for an EXCHANGE, indices of two lines of the table of row counts; -1 for other
        records. A line has a row count for each rank: ``send_line`` says how many rows to send to the rank,
        ``recv_line`` how many rows to receive from it. In the table, line 2 i has the rows that dispatch
        sends in chunk i, and line 2 i + 1 the rows that it receives. Lines 2 n and 2 n + 1 are the sums over
        all chunks.
    """

    kernel: Kernel
    lane: Lane
    task: int
    operands: tuple[Operand, ...] = ()
    condition: int = CallNumber.ONE
    waits: tuple[int, ...] = ()
    signal: int = -1
    first: int = CallNumber.ZERO
    flag: int = 0
    send_line: int = -1
    recv_line: int = -1


@dataclass(frozen=True)
class Turn:
    """A buffer that shares a ring slot with other buffers: they use its memory in turn.

    The slot must be as large as the largest of its buffers, so each call computes the size of all buffers.

    slot: index of the slot in `PassProgram.slots`.
    rows: index, in the ``numbers`` of a call, of the entry that says how many rows the buffer has.
    most_rows: an upper limit of the number of rows; -1 for no limit.
    row_bytes: bytes of a row.
    """

    slot: int
    rows: int
    most_rows: int
    row_bytes: int


@dataclass(frozen=True, kw_only=True)
class PassProgram:
    """A compiled pass.

    chunks: n, number of chunks.
    ranks: W, number of ranks.
    local_experts: E_local, number of experts of each rank.
    keeps_own: whether rows for this rank's own experts stay on the rank.
    sends: whether rows may be sent by all-to-alls.
    slots: names of the ring slots, in the order in which they lie in memory.
    turns: the buffers in these slots.
    records: the records, in the order in which they are issued.
    num_events: number of events. Records have indices of events below this number.
    """

    chunks: int
    ranks: int
    local_experts: int
    keeps_own: bool
    sends: bool
    slots: tuple[str, ...]
    turns: tuple[Turn, ...]
    records: tuple[Record, ...]
    num_events: int

    def words(self) -> list[int]:
        """Returns the program as a list of integers (int64), which ``cuda/program/layout.h`` describes."""
        operands: list[int] = []
        waits: list[int] = []
        records: list[int] = []
        num_operands = 0
        for record in self.records:
            records += [record.kernel, LANES.index(record.lane), record.task, record.condition]
            records += [num_operands, len(record.operands), len(waits), len(record.waits), record.signal]
            records += [record.first, record.flag, record.send_line, record.recv_line]
            for operand in record.operands:
                operands += [operand.base, operand.constant, operand.begin, operand.row, operand.rows]
                operands += [operand.columns, operand.row_bytes]
            num_operands += len(record.operands)
            waits += record.waits
        header = [VERSION, self.chunks, self.ranks, self.local_experts, int(self.keeps_own), int(self.sends)]
        header += [len(self.slots), len(self.turns), num_operands, len(self.records), len(waits)]
        header += [self.num_events, len(Base)]
        turns = [word for turn in self.turns for word in astuple(turn)]
        return [*header, *turns, *operands, *records, *waits]
