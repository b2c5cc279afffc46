"""The plan of one call: for each chunk, which rows go where. `pmoe.engine.plan.make_plan` makes it.

A slot is one of the T * K (token, choice) pairs. A row is a slot that was kept. Rows are sorted so that each
chunk sends one block. The rows that stay on this rank are cut into m pieces (`pmoe.schedule.tasks.piece_of`):

    m = n   | chunk 0 sends | piece 0 | chunk 1 sends | piece 1 | dropped slots |
    m < n   | chunk 0 sends | chunk 1 sends | piece 0 | piece 1 | dropped slots |

On the way to the experts the rows of one chunk change their order:

    T_I             by token
      G             copies the tokens PassPlan.row_token[Chunk.sent]
    send buffer     by destination rank, then expert     Chunk.send_rows
      S             all-to-all
    arrived rows    by source rank, then expert          Chunk.recv_rows
      AG            only if experts are sharded          Chunk.gathered
      Chunk.regroup
    T_DI            by expert, then source rank          Chunk.received

Results take the same way back. R brings the result of slot s to the row `PassPlan.position` [s] of the home
buffer, which has the order of the sorted rows.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pmoe.comm.base import Combine, Dispatch, FlatAllToAll, Traffic
from pmoe.comm.grid import Grid
from pmoe.experts.base import Experts
from pmoe.experts.products import RowGroups
from pmoe.ordering import Order
from pmoe.schedule.buffer_sizes import ChunkRows
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Stages

if TYPE_CHECKING:
    from pmoe.engine.plan.callbacks import Callback, Hooks
    from pmoe.engine.plan.regroup_chunks import ChunkRegrouping
    from pmoe.engine.variants.padding import Padding
    from pmoe.engine.variants.send_once import DeduplicatedRows


def length(at: slice) -> int:
    """Returns the number of rows of a slice with a start and a stop."""
    return int(at.stop - at.start)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One micro-batch of this rank: a range of its tokens, and the rows that it sends and receives.

    tokens: slice of this rank's tokens.
    slots: slice of the T * K slots of these tokens.
    sent: slice of the sorted rows, those that leave for other ranks.
    send_rows, recv_rows: (P,) rows to and from each rank across the nodes.
    received: (E_local,) rows of each local expert, as the experts read them.
    regroup: (N,) int64, for each row in expert order its place among the arrived rows. None if both orders
        are the same, and in `pmoe.engine.variants.send_once`, where it is known only after numbers have
        arrived.
    relayed: two sequences, for dispatch and for combine: the numbers of `Exchange.relay_counts`.
    gathered: (L,) rows that each rank inside the node received; () if experts are not sharded.

    Example: rank 0 sends rows for its experts a, a, b, and rank 1 sends rows for a, b.

        arrived   a0 a0 b0 a1 b1        recv_rows (3, 2)
        regroup    0  1  3  2  4
        T_DI      a0 a0 a1 b0 b1        received (3, 2)
    """

    tokens: slice
    slots: slice
    sent: slice
    send_rows: tuple[int, ...]
    recv_rows: tuple[int, ...]
    received: RowGroups
    regroup: Tensor | None
    relayed: Sequence[tuple[int, ...]] = ((), ())
    gathered: tuple[int, ...] = ()

    @functools.cached_property
    def num_sent(self) -> int:
        """Rows that leave this rank."""
        return sum(self.send_rows)

    @functools.cached_property
    def num_arrived(self) -> int:
        """Rows that S brings to this rank."""
        return sum(self.recv_rows)

    @property
    def num_gathered(self) -> int:
        """Rows after AG; those that S brings if experts are not sharded."""
        return sum(self.gathered) if self.gathered else self.num_arrived


@dataclass(frozen=True, kw_only=True)
class LocalChunk:
    """Rows that stay on this rank and are computed as one task.

    rows: slice of the sorted rows.
    groups: (E_local,) rows of each local expert.
    """

    rows: slice
    groups: RowGroups


@dataclass(frozen=True, kw_only=True)
class WeightMessage:
    """The one message of routing weights, which carries those of all chunks.

    slot: (S,) the slots whose weights leave, sorted by destination rank, then chunk and expert.
    send, recv: (P,) weights to and from each rank across the nodes.
    regroup: (N,) as `Chunk.regroup`, over all chunks: turns the order (source rank, chunk, expert) into
        (chunk, expert, source rank). None if both are the same.
    gathered: (L,) as `Chunk.gathered`, over all chunks.
    """

    slot: Tensor
    send: tuple[int, ...]
    recv: tuple[int, ...]
    regroup: Tensor | None
    gathered: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """The cut of one pass, forward or backward: its chunks, its pieces, and the order of their rows.

    chunks: n micro-batches.
    pieces: the rows that stay on this rank, in m pieces; () if all rows travel.
    weights: the message of routing weights; None if no row travels on any rank.
    slot: (T * K,) the slots in sorted order, dropped ones last (`SortedRows.slot`).
    row_token: (rows,) the token of each sorted row, of rows that leave and of rows that stay.
    position: (T * K,) the sorted row of each slot, which is where its result comes home. A slot without a row
        has the number of sorted rows, or more.
    has_drops: whether some slots may have no row.
    once: the numbers of merged rows, if a token travels once to each rank (`pmoe.engine.variants.send_once`).
        Fewer rows than slots travel then, and one result comes home for several slots.
    """

    chunks: tuple[Chunk, ...]
    pieces: tuple[LocalChunk, ...]
    weights: WeightMessage | None
    slot: Tensor
    row_token: Tensor
    position: Tensor
    has_drops: bool
    once: DeduplicatedRows | None = None

    @functools.cached_property
    def sent_tokens(self) -> list[Tensor]:
        """The token of each row that leaves, (num_sent,) int64 for each chunk."""
        return [self.row_token[chunk.sent] for chunk in self.chunks]

    @functools.cached_property
    def rows(self) -> ChunkRows:
        """Number of rows of each buffer of the pass, for each chunk.

        If there are fewer pieces than chunks, no buffer rotates, and ``local`` and ``home`` are not used.
        """
        chunks = self.chunks
        n = len(self.chunks)
        esp_size = len(self.chunks[0].gathered)
        by_chunk = len(self.pieces) in (0, n)
        apart = esp_size > 0 or self.once is not None
        return ChunkRows(
            arrived=[chunk.num_arrived for chunk in chunks] if apart else None,
            gathered=[chunk.num_gathered for chunk in chunks] if apart else None,
            esp_size=esp_size,
            send=[chunk.num_sent for chunk in chunks],
            received=[chunk.received.num_rows for chunk in chunks],
            local=[piece.groups.num_rows for piece in self.pieces] or [0] * n,
            home=[rows.stop - rows.start + self.has_drops for rows in self.home] if by_chunk else [0] * n,
            regrouped=[self.once is not None or chunk.regroup is not None for chunk in chunks],
        )

    @property
    def num_received(self) -> int:
        """N, the rows that this rank's experts receive in all chunks."""
        return sum(self.rows.received)

    @functools.cached_property
    def home(self) -> list[slice]:
        """The sorted rows of each chunk's tokens: the slice of those that it sends and of its piece.

        With fewer pieces than chunks the slices mean nothing, and nothing reads them.
        """
        sent = [chunk.sent for chunk in self.chunks]
        if not self.pieces:
            return sent
        return [slice(rows.start, piece.rows.stop) for rows, piece in zip(sent, self.pieces, strict=False)]


@dataclass(frozen=True, kw_only=True)
class PassModules(abc.ABC):
    """The modules of a layer (FSMoE, section 3.1), its place among the ranks, and its stages.

    The same for all calls of a layer. `pmoe.call.modules.LayerModules` implements it.

    grid: this rank's place among the ranks across the nodes and inside one.
    scalars: the all-to-all of routing weights.
    callbacks: the user's `Callback` objects.
    gradients: data-parallel gradients of other layers, which a backward pass carries (FSMoE, section 5); None
        without a `pmoe.GradientReducer`. Backward calls ``begins`` and ``ends``, and ``inside`` as a task of
        its schedule. The Work that ``inside`` returns runs between the last S and the first R, for ``t_gar``
        seconds.
    traffic: counts the bytes that this rank sends.
    """

    grid: Grid
    experts: Experts
    shared_expert: Experts | None
    order: Order
    dispatch: Dispatch
    combine: Combine
    scalars: FlatAllToAll
    callbacks: tuple[Callback, ...]
    gradients: Any
    traffic: Traffic

    @property
    @abc.abstractmethod
    def stages(self) -> Stages:
        """The stages of every call. They do not depend on rows, so they are the same on every rank."""

    @property
    @abc.abstractmethod
    def rotates(self) -> bool:
        """Whether buffers rotate through ring slots."""

    @property
    @abc.abstractmethod
    def sequential(self) -> bool:
        """Whether every task waits for the task before it, so that nothing overlaps."""

    @functools.cached_property
    def hooks(self) -> Hooks | None:
        """The callbacks' hooks at the four points inside the layer; None if there are none."""
        if not self.callbacks:
            return None
        from pmoe.engine.plan.callbacks import Hooks

        return Hooks.of(self.callbacks)

    @functools.cached_property
    def num_experts(self) -> int:
        """E, the number of experts of all ranks."""
        return self.grid.ep.size * self.experts.num_local_experts

    @functools.cached_property
    def staying(self) -> range:
        """The global numbers of this rank's experts if its rows for them do not travel; else empty."""
        count = self.experts.num_local_experts
        first_expert = self.grid.ep.rank * count
        return range(first_expert, first_expert + count * self.stages.local)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that forward and backward of one call need beside tensors.

    It is decided once per call, so backward reverses exactly the routing that forward used.

    modules: the layer's modules and its place among the ranks.
    forward, backward: how each pass cuts the batch. Their numbers of chunks may differ.
    joined: where the rows of backward's chunks are in forward's chunks; None if the chunks are the same.
    top_k: K, slots of a token.
    restore: what becomes of T_DI and T_M between the passes.
    slot_token: (S,) the token of each slot, if the gate does not give every token K slots; else None.
    padding: how rows are padded to the capacity, or None. With it, forward and backward cut padded rows.
    """

    modules: PassModules
    forward: PassPlan
    backward: PassPlan
    joined: ChunkRegrouping | None
    top_k: int
    restore: Restore
    slot_token: Tensor | None = None
    padding: Padding | None = None

    @property
    def rearranged(self) -> bool:
        """Whether backward has other chunks than forward."""
        return self.joined is not None
