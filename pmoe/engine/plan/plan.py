"""The plan of one call: for each chunk (micro-batch), which rows go to which rank and expert.

`pmoe.engine.plan.make_plan` makes the plan. A slot is one of the T * K (token, choice) pairs of this rank,
for T tokens that choose K experts each. The gate may drop slots, for example beyond an expert's capacity.
Each slot that is not dropped gets a row: a copy of its token, with M = d_model columns.

The slots are sorted so that the rows which a chunk sends are contiguous. Rows whose expert is on this rank
are not sent. They are divided into pieces, and one task computes one piece (`pmoe.schedule.tasks.piece_of`).
If there are as many pieces as chunks, piece i comes after the rows that chunk i sends. If there are fewer
pieces than chunks, all pieces come after the last chunk:

    2 chunks, 2 pieces   | chunk 0 sends | piece 0 | chunk 1 sends | piece 1 | dropped slots |
    3 chunks, 2 pieces   | chunk 0 sends | chunk 1 sends | chunk 2 sends | piece 0 | piece 1 | dropped slots |

A rank may host copies of other ranks' busy experts. If the rows of its own tokens for these copies are not
sent, either (`Stages.local_copies`), each piece is divided in two: first the rows for the rank's own experts,
then the rows for copies. With m pieces, the parts for own experts have the numbers 0 to m - 1, and the parts
for copies m to 2 m - 1.

The rows of a chunk change their order on the way to the experts (T_I is the layer's input, T_DI the experts'
input):

    tensor or task              order of the rows                   field with the numbers
    T_I                         by token
      gather (G)                                                    PassPlan.row_token[Chunk.sent]
    send buffer                 by destination rank, then expert    Chunk.send_rows
      all-to-all (S)
    arrived rows                by source rank, then expert         Chunk.recv_rows
      all-gather (AG), if sharded                                   Chunk.gathered
      sort by expert                                                Chunk.regroup
    T_DI                        by expert, then source rank         Chunk.received

The experts' results go through the same steps in reverse. The last step, the all-to-all R, writes the results
to the home buffer on the tokens' rank. The rows of the home buffer have the order of the sorted slots: the
result of slot s is row `PassPlan.position` [s].
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from pmoe.comm.base import Combine, Dispatch, FlatAllToAll, Traffic
from pmoe.comm.grid import Grid
from pmoe.experts.base import Experts
from pmoe.experts.products import RowGroups
from pmoe.kernels.scaled_products.formats import ProductsName
from pmoe.ordering import Order
from pmoe.schedule.buffer_sizes import ChunkRows
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import Stages
from pmoe.schedule.wire import Wires

if TYPE_CHECKING:
    from pmoe.engine.plan.callbacks import Callback, Hooks
    from pmoe.engine.plan.copies import HostedCopies
    from pmoe.engine.plan.regroup_chunks import ChunkRegrouping
    from pmoe.engine.variants.padding import Padding
    from pmoe.engine.variants.send_once import DeduplicatedRows
    from pmoe.kernels.grouped_gemm.launch import TileCounters


def length(at: slice) -> int:
    """Returns the number of rows that a slice selects: stop - start. Neither bound may be None."""
    return int(at.stop - at.start)


class Chunk(NamedTuple):
    """One micro-batch of this rank: a range of its tokens, and the rows that it sends and receives.

    "Sorted rows" are all rows of this rank's tokens, in the order of the pass (`PassPlan`).

    tokens: slice of this rank's T tokens: the tokens of the chunk.
    slots: slice of this rank's T * K (token, choice) pairs: the pairs of the chunk's tokens.
    sent: slice of this rank's sorted rows: the rows that the chunk's dispatch all-to-all sends.
    send_rows: (P,) numbers of rows to each of the P ranks over which experts are distributed.
    recv_rows: (P,) numbers of rows from each of these P ranks.
    received: number of rows for each of this rank's E_local experts, after the all-gather if experts are
        sharded.
    regroup: (N,) int64, the index that sorts the N arrived rows by expert: T_DI, the experts' input, is
        arrived[regroup]. It is int32 if kernels have computed it. None if arrived rows are sorted by expert
        already. Also None with ``send_once=True``: forward then computes the index from numbers that arrive
        with the routing weights (`pmoe.engine.variants.send_once`).
    relayed: for dispatch and for combine, the numbers of other ranks' rows that this rank passes on in a
        hierarchical all-to-all (`Exchange.relay_counts`).
    gathered: if experts are sharded, (L,): the numbers of rows that arrive at each of the L ranks that share
        an expert, before their all-gather; else ().

    Example: rank 0 sends rows for the experts a, a, b of this rank, and rank 1 sends rows for a, b. A name
    such as a0 is a row for expert a from rank 0.

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

    @property
    def num_sent(self) -> int:
        """The number of rows that the chunk's dispatch all-to-all sends."""
        return sum(self.send_rows)

    @property
    def num_arrived(self) -> int:
        """The number of rows that this rank receives in the chunk's dispatch all-to-all."""
        return sum(self.recv_rows)

    @property
    def num_gathered(self) -> int:
        """The number of rows after the all-gather inside the node; `num_arrived` if there is none."""
        return sum(self.gathered) if self.gathered else self.num_arrived


class LocalChunk(NamedTuple):
    """Rows that are computed in one task and not sent, because their experts are on this rank.

    rows: slice of this rank's sorted rows (all rows of its tokens, in the order of `PassPlan`).
    groups: number of these rows for each of this rank's E_local experts. For copies of other ranks' experts:
        0 for each own expert, then the number for each copy.
    of_copies: whether copies of other ranks' experts compute the rows.
    """

    rows: slice
    groups: RowGroups
    of_copies: bool = False


class WeightMessage(NamedTuple):
    """The all-to-all of routing weights: a single message for all chunks of a pass.

    slot: (S,) int64, the S (token, choice) pairs whose weights are sent, sorted by destination rank, then
        chunk, then expert.
    send, recv: (P,) numbers of weights to and from each of the P ranks over which experts are distributed.
    regroup: (N,) int64, the index that sorts the N arrived weights: from (source rank, chunk, expert) to
        (chunk, expert, source rank), the order in which experts read rows. None if both orders are the same.
    gathered: if experts are sharded, (L,): the numbers of weights that arrive at each of the L ranks that
        share an expert; else ().
    """

    slot: Tensor
    send: tuple[int, ...]
    recv: tuple[int, ...]
    regroup: Tensor | None
    gathered: tuple[int, ...] = ()


class KernelOrder(NamedTuple):
    """The order in which this rank sends one number for each of its rows, computed by a kernel on a GPU.

    The number of a row is, for example, its routing weight. The numbers of the S rows that are sent come
    first, sorted by destination rank, then chunk, then expert. The numbers of the rows that stay on this rank
    follow, sorted by chunk.

    slot: (rows,) int64, the (token, choice) pair of each number.
    weight: (T * K,), the routing weights of all pairs, from which the kernel took ``taken``; None if the
        kernel took no weights.
    taken: (rows,), the routing weights in this order; None if the kernel took none.
    """

    slot: Tensor
    weight: Tensor | None
    taken: Tensor | None

    def sort(self, weight: Tensor) -> Tensor:
        """Returns the routing weights in this order, (rows,).

        weight: (T * K,), the routing weights of all pairs. If the kernel has sorted this tensor already, its
            result is returned.
        """
        if self.taken is not None and self.weight is not None and _is_same(weight, self.weight):
            return self.taken
        return weight.index_select(0, self.slot)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one dimension have the same address, shape, stride and dtype."""
    is_alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return is_alike and one.data_ptr() == other.data_ptr()


class PassPlan(NamedTuple):
    """The plan of one pass, forward or backward: its chunks, and the order of its rows.

    A slot is one of the T * K (token, choice) pairs of this rank. "Sorted rows" are all rows of this rank's
    tokens, in the order of the pass: the rows that are sent, chunk by chunk, and the rows that are not sent
    (the module's docstring has a picture).

    chunks: the n micro-batches.
    pieces: the rows that are not sent, because their experts are on this rank, in m blocks that are computed
        one by one; () if all rows are sent. If rows for copies of experts stay, too, m blocks of them follow.
    weights: the message of routing weights; None if all rows of all ranks stay on their rank.
    slot: (rows,) int64, the slot of each sorted row. It is int32 if kernels have sorted the slots. With
        ``send_once=True`` the tensor must not be read, because several slots share one row.
    row_token: (rows,) int64, the token of each sorted row. It is empty if kernels have sorted the slots.
    sent_tokens: for each chunk the part of ``row_token`` for the rows that the chunk sends; () if no rows are
        sent, or if kernels have sorted the slots.
    position: (T * K,) int64, the number of each slot's row among the sorted rows. The slot's result returns
        to the row with this number in the home buffer, which collects results on the tokens' rank. A slot
        without a row has a number beyond the last row. It is int32 if the kernels of `pmoe.kernels.permute`
        may read it.
    has_drops: whether some slots may have no row.
    rows: the number of rows of each buffer of the pass, for each chunk. Rows that stay on this rank are
        computed in blocks (``pieces``), and ``rows.local`` has a number for each block. ``rows.home`` has a
        meaning only if all rows are sent, or if each chunk has one block. It is not read if rows of several
        chunks share a block (fewer blocks than chunks), or if rows for copies of experts stay, too.
    num_tokens: the number of tokens of each chunk.
    positions: ``position`` by chunk: for each chunk a tensor (tokens of the chunk, K).
    once: numbers by which the receiver finds the row of each routing weight. Set only if a token is sent only
        once to each rank (`pmoe.engine.variants.send_once`), else None. Several slots then share one row, and
        one result returns for all of them.
    by_kernel: the order in which a message carries one number for each row, such as its routing weight; None
        if no kernel has computed it. Passes on a GPU use this order, and no row is dropped.
    counters: counters of tiles for products on a GPU, if a kernel has set them to zero; else None.
    """

    chunks: tuple[Chunk, ...]
    pieces: tuple[LocalChunk, ...]
    weights: WeightMessage | None
    slot: Tensor
    row_token: Tensor
    sent_tokens: Sequence[Tensor]
    position: Tensor
    rows: ChunkRows
    num_tokens: Sequence[int]
    positions: tuple[Tensor, ...]
    has_drops: bool
    once: DeduplicatedRows | None = None
    by_kernel: KernelOrder | None = None
    counters: TileCounters | None = None

    @property
    def num_received(self) -> int:
        """N, the number of rows that this rank's experts receive in all chunks together."""
        return sum(self.rows.received)


@dataclass(frozen=True, kw_only=True)
class PassModules(abc.ABC):
    """The parts of a layer that its passes use: ranks, experts, and the steps before and after experts.

    The steps are three of FSMoE's modules (section 3.1): order, dispatch, combine. All fields are the same
    for all calls of a layer, except for ``copies``. `pmoe.call.modules.LayerModules` implements the class.

    grid: the layer's ranks: the ranks over which experts are distributed, and the ranks that share an expert.
    experts: this rank's experts.
    shared_expert: the expert that computes every token; None if there is none.
    order: copies tokens to rows, and sums the rows of each token.
    dispatch, combine: the all-to-alls of rows, to the experts' ranks and back.
    scalars: the all-to-all of routing weights.
    callbacks: the user's `Callback` objects.
    gradients: a `pmoe.GradientReducer`, or None. It all-reduces the data-parallel gradients of other layers
        during this layer's backward pass (FSMoE, section 5). Backward calls its ``begins`` and ``ends``, and
        runs its ``inside`` as a task after the last dispatch. Its ``t_gar`` is the predicted time of the
        all-reduce in seconds.
    traffic: counts the bytes that this rank sends.
    copies: the copies of busy experts in the call, and the ranks that host them (``balance``); None without
        copies. In a call with copies, one numbering covers experts and copies (`HostedCopies`).
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
    copies: HostedCopies | None = None

    @property
    @abc.abstractmethod
    def stages(self) -> Stages:
        """The optional steps that every call of the layer has, such as a shared expert or sharded experts.

        The steps do not depend on row counts, so all ranks have the same steps, and the collectives match.
        """

    @property
    @abc.abstractmethod
    def rotates(self) -> bool:
        """Whether chunks take turns in a few fixed-size buffers (ring slots).

        If False, each chunk has buffers of its own.
        """

    @property
    @abc.abstractmethod
    def wires(self) -> Wires | None:
        """The formats to which rows and results are converted before sending, so that fewer bytes are sent.

        Example: "e4m3", an 8-bit float. None if the layer sends all rows in their own dtype.
        """

    @property
    @abc.abstractmethod
    def products(self) -> ProductsName | None:
        """The format to which operands of the experts' products are rounded; None if they are not."""

    @property
    @abc.abstractmethod
    def sequential(self) -> bool:
        """Whether every task waits for the task before it, so that nothing runs at the same time."""

    @functools.cached_property
    def hooks(self) -> Hooks | None:
        """The callbacks' hooks before and after dispatch and combine; None if callbacks have no hooks."""
        if not self.callbacks:
            return None
        from pmoe.engine.plan.callbacks import Hooks

        return Hooks.of(self.callbacks)

    @functools.cached_property
    def num_experts(self) -> int:
        """E, the number of experts of all ranks together. Copies of busy experts count as experts, too."""
        return self.grid.ep.size * self.num_indices

    @property
    def num_indices(self) -> int:
        """The number of indices that each rank has for its experts and for copies of other ranks' experts.

        Without copies the number is E_local, the number of the rank's experts. In a call with copies of busy
        experts, a rank numbers its experts and the copies that it hosts together. Each rank then has E_local
        + c indices, where c is the largest number of copies that any rank hosts. A rank that hosts fewer
        copies does not use its last indices.
        """
        return self.experts.num_local_experts + (0 if self.copies is None else self.copies.per_rank)

    @functools.cached_property
    def staying(self) -> range:
        """The indices of this rank's experts for which rows of this rank's own tokens are not sent.

        The range is empty if rows are also sent from a rank to itself. It has the indices of this rank's
        copies of busy experts, too, if rows for them stay (`Stages.local_copies`).
        """
        first_expert = self.grid.ep.rank * self.num_indices
        count = self.num_indices if self.stages.local_copies else self.experts.num_local_experts
        return range(first_expert, first_expert + count * self.stages.local)


class Plan(NamedTuple):
    """Everything that the forward and the backward pass of one call need, apart from tensors of values.

    A call is planned once, so backward uses exactly the routing that forward used.

    modules: the layer's modules and ranks.
    forward, backward: the plan of each pass. The two may have different numbers of chunks.
    joined: the rows of forward chunks from which each backward chunk is put together; None if both passes
        have the same chunks.
    top_k: K, the number of experts that each token chooses.
    restore: for the experts' input T_DI and the hidden activation T_M: whether they are kept for backward,
        offloaded to the host, or made again.
    slot_token: (S,) int64, the token of each of the S (token, choice) pairs, if the gate gives tokens
        different numbers of experts; None if each token has K.
    padding: with ``pad_to_capacity=True``, the map between tokens and padded rows; else None. With padding
        every expert gets the same number of rows, and both passes treat each of these rows as a token.
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
        """Whether the passes have different numbers of chunks, so that saved rows must be copied."""
        return self.joined is not None
