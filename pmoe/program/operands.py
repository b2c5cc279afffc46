"""The operands of a pass program: where each buffer lies, and how many rows it has in a call.

Ring slots are memory in which buffers of several chunks take turns. All ring slots of a pass lie in one
allocation, the arena. The number of rows of a buffer depends on the call, so an operand does not have this
number, but the number's index (`pmoe.program.records.ChunkNumber`). Operands of chunk 1:

    operand     memory                                 number of rows
    send.1      its ring slot                          SENT
    home.1      its ring slot                          HOME: results of sent rows, then of rows that stay
    T_DI.1      its ring slot                          RECEIVED; SORTED in forward if T_DI is kept
    SAVED_T_DI  the chunk's rows of the kept T_DI      RECEIVED
    T_O         the chunk's tokens of the output       TOKENS

The rows that a chunk receives have one of two forms. Rows from several ranks must be sorted by expert, into a
buffer whose name ends in "_sorted" (form SORTED). Rows from one rank arrive sorted (form STRAIGHT). The row
counts of a call decide which form a chunk has. If T_DI is kept, rows of the form STRAIGHT arrive in
SAVED_T_DI. The ring slot of T_DI then holds only rows that must still be sorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pmoe.program.layer_shape import INDEX_BYTES, LayerShape
from pmoe.program.records import Base, CallNumber, ChunkNumber, Operand, Turn, chunk_number
from pmoe.schedule.buffer_sizes import SORTED_RESULTS, BufferSizes, ChunkRows
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Schedule


@dataclass(frozen=True)
class RowForm:
    """One of the two forms of the rows that a chunk receives: sorted copies, or rows as they arrived.

    ending: the ending of the names of the buffers in which the experts read rows of this form.
    flag: the `ChunkNumber` that is 1 if the chunk's rows have this form, and 0 if they have the other form.
    rows: the `ChunkNumber` that counts the chunk's received rows if they have this form, and is 0 if not.
    """

    ending: str
    flag: ChunkNumber
    rows: ChunkNumber


SORTED = RowForm("_sorted", ChunkNumber.IS_SORTED, ChunkNumber.SORTED)
STRAIGHT = RowForm("", ChunkNumber.IS_STRAIGHT, ChunkNumber.STRAIGHT)


@dataclass(frozen=True, kw_only=True)
class RowUnit:
    """A unit: the rows of a chunk that experts compute in one task, either rows that stay or received rows.

    Received rows may have two forms (`RowForm`). A program has one unit for each form, with records of its
    own. In a call, the unit of one form has all received rows of the chunk, and the unit of the other form
    has no rows.

    chunk: the index of the chunk.
    place: "_L" for rows that stay on this rank, "" for received rows.
    form: the form of received rows; STRAIGHT for rows that stay.
    """

    chunk: int
    place: str
    form: RowForm = STRAIGHT

    @property
    def condition(self) -> int:
        """The condition of the unit's records: the index of the number of rows that the unit has in a call.

        If the unit has 0 rows, its records do nothing. So for received rows, only the records of one form
        compute.
        """
        return chunk_number(ChunkNumber.LOCAL if self.place else self.form.rows, self.chunk)

    @property
    def rows(self) -> int:
        """The index of the number of rows of T_M, and of other buffers that the units of both forms share.

        For received rows this is the number of all received rows of the chunk (RECEIVED), which does not
        depend on the form. For rows that stay it is the number of the chunk's rows that stay (LOCAL).
        """
        return chunk_number(ChunkNumber.LOCAL if self.place else ChunkNumber.RECEIVED, self.chunk)


class PassOperands:
    """Makes the operands of the records of one pass.

    schedule: the tasks of the pass, with the ring slot of each buffer.
    shape: the sizes and settings of the layer.
    restore: the restore pair, which says whether T_DI (the experts' input) and T_M (their hidden activation)
        are kept, offloaded or made again until backward; None for a forward pass without a backward pass.
    is_forward: whether the pass is a forward pass.
    dispatched, hidden: the fates of T_DI and T_M in the restore pair; None without a backward pass.
    n: number of chunks.
    slots: names of the ring slots, in the order in which they lie in memory.
    may_sort: whether rows may arrive from several ranks. Such rows must be sorted by expert.
    forms: the forms that received rows may have.
    """

    def __init__(self, schedule: Schedule, shape: LayerShape, restore: Restore | None) -> None:
        self.schedule = schedule
        self.shape = shape
        self.is_forward: bool = schedule.direction == "forward"
        self.dispatched: str | None = None if restore is None else restore.dispatched
        self.hidden: str | None = None if restore is None else restore.hidden
        self.n: int = 1 + max(task.chunk for task in schedule.tasks)
        slots = (slot for turns in schedule.turns.values() for _, _, slot in turns)
        self.slots: tuple[str, ...] = tuple(dict.fromkeys(slots))
        # If rows can come from only one rank, they arrive sorted by expert.
        self.may_sort: bool = shape.sends and shape.ranks - shape.keeps_own > 1
        self.forms: tuple[RowForm, ...] = (SORTED, STRAIGHT) if self.may_sort else (STRAIGHT,)
        none = (0,) * self.n
        # Only its numbers of columns are read. Its numbers of rows are 0, because they depend on the call.
        self._sizes = BufferSizes(
            direction=schedule.direction,
            extent=ChunkRows(send=none, received=none, local=none, home=none, regrouped=[False] * self.n),
            d_model=shape.d_model,
            columns=shape.columns,
            restore=restore,
            places=shape.places,
        )
        self._first_slot = chunk_number(ChunkNumber(0), self.n)

    def operand(
        self, base: Base, rows: int, columns: int, item_bytes: int, row: int = CallNumber.ZERO
    ) -> Operand:
        """Returns an operand in memory that is no ring slot.

        base: the memory.
        rows: index, among the numbers of a call, of the number of rows.
        columns: number of elements of a row.
        item_bytes: bytes of an element.
        row: index, among the numbers of a call, of the number that says with which row of ``base`` the
            operand begins.
        """
        row_bytes = columns * item_bytes
        return Operand(base=base, name=base.name, rows=rows, columns=columns, row_bytes=row_bytes, row=row)

    def buffer(self, name: str, i: int) -> Operand:
        """Returns the operand for the buffer ``name`` of chunk i, which lies in a ring slot."""
        key = f"{name}.{i}"
        columns = self._sizes.of(name)[1]
        return Operand(
            base=Base.ARENA,
            name=key,
            rows=chunk_number(self.rows_of(name), i),
            columns=columns,
            row_bytes=columns * self.shape.element_bytes,
            begin=self._first_slot + self.slots.index(self.schedule.slots[key]),
        )

    def rows_of(self, name: str) -> ChunkNumber:
        """Returns the `ChunkNumber` that counts the rows of a buffer, such as RECEIVED for "T_DO".

        The rules are those of `BufferSizes`, which computes the row counts of a call when they are known.

        name: a name without a chunk, such as "T_DI".
        """
        match name.removesuffix("_again"):
            case "send":
                return ChunkNumber.SENT
            case "home" | "dhome":
                return ChunkNumber.HOME
            case "T_DI" if self.is_forward and self.dispatched == "keep":
                return ChunkNumber.SORTED  # rows that arrive sorted stay in memory of their own
        if name.endswith("_sorted"):
            return ChunkNumber.SORTED
        return ChunkNumber.LOCAL if name.endswith("_L") else ChunkNumber.RECEIVED

    def turns(self) -> Iterator[Turn]:
        """Yields a `Turn` for each buffer that is in a ring slot."""
        for name, turns in self.schedule.turns.items():
            columns = self._sizes.of(name)[1]
            # Two kinds of buffers need no memory: "home_L" is a part of "home" (`part_of_home`), and sorted
            # results do not exist if the products store results in the order of arrival.
            if name in ("home_L", "dhome_L") or (self.shape.places and name in SORTED_RESULTS):
                columns = 0
            is_block = name.removesuffix("_L") == "scratch"
            most_rows = self._scratch_rows if is_block else -1
            for _, i, slot in turns:
                rows = chunk_number(self.rows_of(name), i)
                row_bytes = columns * self.shape.element_bytes
                yield Turn(self.slots.index(slot), rows, most_rows, row_bytes)

    @property
    def _scratch_rows(self) -> int:
        """The largest number of rows of the buffer "scratch", which holds a block of activated hidden rows.

        The activated hidden is the hidden activation after the nonlinearity. The number is 0 if the restore
        pair keeps T_M: the buffer "active" then holds the activated hidden of all rows of the chunk.
        """
        return self.shape.columns.scratch_rows if self.hidden != "keep" else 0

    def part_of_home(self, i: int, *, stays: bool) -> Operand:
        """Returns a part of chunk i's buffer "home": the results of sent rows, or of rows that stay.

        The results of sent rows come first in the buffer, then the results of rows that stay. In backward the
        buffer is "dhome".

        i: index of the chunk.
        stays: True for the results of rows that stay.
        """
        whole = self.buffer("home" if self.is_forward else "dhome", i)
        if not stays:
            return replace(whole, rows=chunk_number(ChunkNumber.SENT, i))
        return replace(whole, rows=chunk_number(ChunkNumber.LOCAL, i), row=chunk_number(ChunkNumber.SENT, i))

    def tokens(self, base: Base, i: int) -> Operand:
        """Returns the rows of chunk i's tokens in an input or output of the pass, a (T, M) tensor.

        base: the input or output, such as `Base.T_I`.
        i: index of the chunk.
        """
        rows = chunk_number(ChunkNumber.TOKENS, i)
        row = chunk_number(ChunkNumber.TOKENS_BEGIN, i)
        return self.operand(base, rows, self.shape.d_model, self.shape.element_bytes, row)

    def position(self, i: int) -> Operand:
        """Returns the positions of the K rows of each of chunk i's tokens, (tokens of the chunk, K) int32.

        A position is a row's index among all sorted rows of this rank's tokens.
        """
        rows = chunk_number(ChunkNumber.TOKENS, i)
        row = chunk_number(ChunkNumber.TOKENS_BEGIN, i)
        return self.operand(Base.POSITION, rows, self.shape.top_k, INDEX_BYTES, row)

    def regroup(self, i: int) -> Operand:
        """Returns the index that sorts the received rows of chunk i by expert, (received rows,) int32."""
        begin = chunk_number(ChunkNumber.RECEIVED_BEGIN, i)
        return self.operand(Base.REGROUP, chunk_number(ChunkNumber.RECEIVED, i), 1, INDEX_BYTES, begin)

    @property
    def nowhere(self) -> Operand:
        """An operand with address 0, for a bias or an index of rows that a record does not have."""
        return self.operand(Base.NOWHERE, CallNumber.ZERO, 0, self.shape.element_bytes)

    def result_of(self, name: str, unit: RowUnit) -> tuple[Operand, Operand]:
        """Returns two operands: where a unit's results are stored, and an index of rows in that memory.

        If received rows were sorted, and products store results in the order of arrival, the result of row r
        is stored in row index[r] of the buffer that is sent back. In all other cases it is stored in row r,
        and the second operand is `nowhere`.

        name: name of the buffer that is sent back, "T_DO" or "dT_DI".
        unit: the rows.
        """
        if unit.form is SORTED and self.shape.places:
            return self.buffer(name, unit.chunk), self.regroup(unit.chunk)
        return self.buffer(f"{name}{unit.form.ending}", unit.chunk), self.nowhere

    def ends(self, unit: RowUnit) -> Operand:
        """Returns the ends of the experts' rows among the rows of a unit: (E_local,) int32 indices."""
        line = unit.chunk + (self.n * self.shape.sends if unit.place else 0)
        whole = self.operand(Base.ENDS, CallNumber.ONE, self.shape.local_experts, INDEX_BYTES)
        return replace(whole, constant=line * whole.row_bytes)

    def parameter(self, base: Base) -> Operand:
        """Returns a parameter of all experts of this rank, or the sum of its gradients, as a single row.

        base: the parameter or the sum, such as `Base.W1` or `Base.DW1`.
        """
        shape = self.shape
        columns = shape.columns
        numbers = {
            Base.W1: columns.hidden * shape.d_model,
            Base.B1: columns.hidden,
            Base.W2: columns.scratch * shape.d_model,
            Base.B2: shape.d_model,
        }
        of_gradient = {Base.DW1: Base.W1, Base.DB1: Base.B1, Base.DW2: Base.W2, Base.DB2: Base.B2}
        item_bytes = shape.sum_bytes if base in of_gradient else shape.element_bytes
        if base in (Base.B1, Base.B2) and not shape.bias:
            return self.nowhere
        count = shape.local_experts * numbers[of_gradient.get(base, base)]
        return self.operand(base, CallNumber.ONE, count, item_bytes)

    def numbers_of_rows(self, base: Base, rows: int, row: int = CallNumber.ZERO) -> Operand:
        """Returns routing weights, or gradients of routing weights: a vector with an element for each row.

        base: the memory of the vector.
        rows: index, among the numbers of a call, of the number of rows.
        row: index, among the numbers of a call, of the number that says with which element of ``base`` the
            vector begins.
        """
        return self.operand(base, rows, 1, self.shape.weight_bytes, row)

    def weights_of(self, unit: RowUnit, *, gradient: bool = False) -> Operand:
        """Returns the routing weights of a unit's rows, or the memory for the gradients of these weights.

        unit: the rows.
        gradient: True for the memory of the gradients.
        """
        if unit.place:
            base = Base.DWEIGHT_BY_NUMBER if gradient else Base.WEIGHT_BY_NUMBER
            return self.numbers_of_rows(base, unit.rows, chunk_number(ChunkNumber.LOCAL_WEIGHT, unit.chunk))
        base = Base.DWEIGHT_RECEIVED if gradient else Base.WEIGHT_RECEIVED
        return self.numbers_of_rows(base, unit.rows, chunk_number(ChunkNumber.RECEIVED_BEGIN, unit.chunk))

    def saved(self, tensor: str, unit: RowUnit) -> Operand:
        """Returns the memory in which a unit's rows of T_DI or T_M stay between the passes.

        tensor: "T_DI" or "T_M".
        unit: the rows.
        """
        bases = {
            "T_DI": Base.SAVED_T_DI,
            "T_DI_L": Base.SAVED_T_DI_L,
            "T_M": Base.SAVED_T_M,
            "T_M_L": Base.SAVED_T_M_L,
        }
        begin = ChunkNumber.LOCAL_BEGIN if unit.place else ChunkNumber.RECEIVED_BEGIN
        return self.operand(
            bases[tensor + unit.place],
            unit.rows,
            self.shape.columns.hidden if tensor == "T_M" else self.shape.d_model,
            self.shape.element_bytes,
            chunk_number(begin, unit.chunk),
        )

    def rows_for_experts(self, unit: RowUnit) -> Operand:
        """Returns the memory in which the experts read T_DI of a unit, sorted by expert."""
        if self.dispatched == "keep":
            return self.saved("T_DI", unit)
        # On the host T_DI is sorted by expert. So if backward copies T_DI in, both forms have one buffer.
        is_copied_in = not self.is_forward and self.dispatched == "offload"
        ending = unit.place or ("" if is_copied_in else unit.form.ending)
        return self.buffer(f"T_DI{ending}", unit.chunk)

    def hidden_of(self, unit: RowUnit) -> Operand:
        """Returns the memory of T_M of a unit, the hidden activation before the nonlinearity."""
        return (
            self.saved("T_M", unit) if self.hidden == "keep" else self.buffer(f"T_M{unit.place}", unit.chunk)
        )

    def written_hidden_of(self, unit: RowUnit) -> Operand:
        """Returns the memory to which forward writes T_M of a unit; address 0 if T_M need not be stored.

        T_M is the hidden activation before the nonlinearity. It must be stored if backward reads T_M, or if
        the result of the nonlinearity is stored in a part of T_M's memory.
        """
        hidden = self.hidden_of(unit)
        is_read = self.hidden in ("keep", "offload") or self._sizes.of(f"active{unit.place}")[1] == 0
        return (
            hidden if is_read else replace(hidden, base=Base.NOWHERE, name=Base.NOWHERE.name, begin=0, row=0)
        )

    def active_of(self, unit: RowUnit) -> Operand:
        """Returns the memory of the hidden activation after the nonlinearity, which may be a part of T_M."""
        name = f"active{unit.place}"
        if self._sizes.of(name)[1] == 0:
            return replace(self.hidden_of(unit), columns=self.shape.columns.scratch)
        return self.buffer(name, unit.chunk)

    def units(self, i: int, place: str) -> list[RowUnit]:
        """Returns the units of one part of a chunk: one unit of rows that stay, or one of each form.

        i: index of the chunk.
        place: "_L" for the rows that stay on this rank, "" for received rows.
        """
        if place:
            return [RowUnit(chunk=i, place=place)]
        return [RowUnit(chunk=i, place="", form=form) for form in self.forms]

    def weights_by_number(self) -> tuple[Operand, Operand, Operand]:
        """Returns three operands: routing weights by pair, the pair of each row, and routing weights by row.

        The first has the weight of each (token, choice) pair, (T, K). The second has the index of the pair
        to which each row of this rank's tokens belongs, in the order that `Base` calls "by number". The third
        has the weight of each row, in the same order. In backward the first and the third have gradients of
        weights.
        """
        bases = (
            (Base.WEIGHT, Base.WEIGHT_BY_NUMBER)
            if self.is_forward
            else (Base.DWEIGHT, Base.DWEIGHT_BY_NUMBER)
        )
        weights, by_number = (self.numbers_of_rows(base, CallNumber.ROWS) for base in bases)
        return weights, self.operand(Base.PAIR_BY_NUMBER, CallNumber.ROWS, 1, INDEX_BYTES), by_number
