"""The plan of one call: for each chunk, which rows go where, from the routing and the exchanged counts."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pmoe.comm.base import Combine, Dispatch, FlatAllToAll, Traffic
from pmoe.comm.ranks import Grid
from pmoe.experts.base import Experts
from pmoe.experts.products import RowGroups
from pmoe.ordering import Order
from pmoe.schedule.restore import Restore
from pmoe.schedule.slots import ChunkRows
from pmoe.schedule.tasks import Stages, local_pieces

if TYPE_CHECKING:
    from pmoe.engine.callbacks import Callback, Hooks
    from pmoe.engine.once import MergedRows
    from pmoe.engine.padding import Padding
    from pmoe.engine.rearranged import Joined


def length(at: slice) -> int:
    return int(at.stop - at.start)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One micro-batch: a range of this rank's tokens, and the rows that it sends and receives.

    slots: of those tokens. sent: where the rows that travel stand in sorted order. send_rows, recv_rows: one
    number a rank. relayed: of dispatch and combine (`Exchange.relay_counts`). gathered: what each rank inside
    the node has received, where experts are sharded. received: the rows by expert, as the experts see them.
    regroup: index of each of these, in expert order, among the rows as they arrived by source rank; None
    where the two orders are the same, or where it is not known before the rows' own numbers arrive
    (`pmoe.engine.once`)."""

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
        return sum(self.send_rows)

    @functools.cached_property
    def num_arrived(self) -> int:
        return sum(self.recv_rows)

    @property
    def num_gathered(self) -> int:
        return sum(self.gathered) if self.gathered else self.num_arrived


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows that stay: where they stand in sorted order, and by expert."""

    rows: slice
    groups: RowGroups


@dataclass(frozen=True, kw_only=True)
class WeightJourney:
    """The one message of routing weights, for all chunks. slot: the slots whose weights are sent, by
    destination rank. gathered, regroup: as in `Chunk`, for all received rows by (chunk, expert)."""

    slot: Tensor
    send: tuple[int, ...]
    recv: tuple[int, ...]
    regroup: Tensor | None
    gathered: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """How one pass cuts the batch.

    pieces: the rows that stay. slot: as in `SortedRows`. position: where each slot's row stands among those
    that come home, the number of these or more where none does. row_token: the token of each row that leaves,
    in sorted order. has_drops: whether some slots may have no row that comes home. weights: None where
    nothing travels, on any rank. once: see `pmoe.engine.once`; then rows that travel are fewer than slots,
    and most slots' rows come home as a part of another's.
    """

    chunks: tuple[Chunk, ...]
    pieces: tuple[Piece, ...]
    weights: WeightJourney | None
    slot: Tensor
    row_token: Tensor
    position: Tensor
    has_drops: bool
    once: MergedRows | None = None

    @functools.cached_property
    def sent_tokens(self) -> list[Tensor]:
        """Of each chunk, the token of each row that it sends."""
        return [self.row_token[chunk.sent] for chunk in self.chunks]

    @functools.cached_property
    def rows(self) -> ChunkRows:
        """Rows of the buffers of a pass. Where pieces are not chunks nothing rotates, and what is said of
        rows by chunk of home and of those that stay is not used."""
        chunks, n, inside = self.chunks, len(self.chunks), len(self.chunks[0].gathered)
        by_chunk = len(self.pieces) in (0, n)
        apart = inside > 0 or self.once is not None
        return ChunkRows(
            arrived=[chunk.num_arrived for chunk in chunks] if apart else None,
            gathered=[chunk.num_gathered for chunk in chunks] if apart else None,
            inside=inside,
            send=[chunk.num_sent for chunk in chunks],
            received=[chunk.received.num_rows for chunk in chunks],
            local=[piece.groups.num_rows for piece in self.pieces] or [0] * n,
            home=[at.stop - at.start + self.has_drops for at in self.home] if by_chunk else [0] * n,
            regrouped=[self.once is not None or chunk.regroup is not None for chunk in chunks],
        )

    @property
    def num_received(self) -> int:
        return sum(self.rows.received)

    @functools.cached_property
    def home(self) -> list[slice]:
        """Where all rows of each chunk's tokens stand, travelling or not, if there is a piece a chunk."""
        sent = [chunk.sent for chunk in self.chunks]
        if not self.pieces:
            return sent
        return [slice(at.start, piece.rows.stop) for at, piece in zip(sent, self.pieces, strict=False)]


@dataclass(frozen=True, kw_only=True)
class Modules(abc.ABC):
    """What of a layer its calls have in common (FSMoE, section 3.1): the modules, where they stand among
    ranks, and which stages there are (`pmoe.call.modules.Parts`).

    scalars: carries routing weights. gradients: of other layers, which a backward pass carries (FSMoE,
    section 5), where a `pmoe.GradientReducer` says so: it calls ``begins`` and ``ends``, and ``inside`` as a
    task of its schedule, for the Work between the last S and the first R. For ``t_gar`` seconds they travel
    there."""

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
        """The stages that every call has: the same on every rank, whatever rows it has."""

    @property
    @abc.abstractmethod
    def rotates(self) -> bool:
        """Whether buffers rotate through ring slots."""

    @property
    @abc.abstractmethod
    def sequential(self) -> bool:
        """Whether every task waits for the one before."""

    @functools.cached_property
    def hooks(self) -> Hooks | None:
        """The callbacks' hooks inside the layer; None where they have none."""
        if not self.callbacks:
            return None
        from pmoe.engine.callbacks import Hooks

        return Hooks.of(self.callbacks)

    @functools.cached_property
    def num_experts(self) -> int:
        """Of all ranks."""
        return self.grid.across.size * self.experts.num_local_experts

    @functools.cached_property
    def staying(self) -> range:
        """The experts whose rows of this rank do not travel."""
        count = self.experts.num_local_experts
        first = self.grid.across.rank * count
        return range(first, first + count * self.stages.local)

    def num_pieces(self, n: int) -> int:
        """Into how many pieces the rows that stay are cut, for n chunks."""
        if self.rotates:
            return n * self.stages.local
        return local_pieces(n, local=self.stages.local, remote=self.stages.remote)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that forward and backward of one call need beside tensors. It is decided once: the routing that
    forward used is the one that backward reverses.

    forward, backward: how each pass cuts the batch; they may have different numbers of chunks.
    joined: where the rows of backward's chunks stand in forward's; None where the chunks are the same.
    slot_token: (S,) the token of each slot, where the gate does not give every token K of them.
    padding: where rows are padded to capacity; the cuts are then of padded rows.
    """

    modules: Modules
    forward: PassPlan
    backward: PassPlan
    joined: Joined | None
    top_k: int
    restore: Restore
    slot_token: Tensor | None = None
    padding: Padding | None = None

    @property
    def rearranged(self) -> bool:
        return self.joined is not None
