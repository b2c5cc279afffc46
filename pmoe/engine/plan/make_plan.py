"""Makes the plan of a call: sorts its (token, choice) pairs, and cuts them into chunks (micro-batches).

Before this the ranks have exchanged their row counts, and the counts are on the host. So a plan is made
without communication, and without a synchronisation of host and device.

Row counts are exchanged for bins: small ranges of tokens. A chunk consists of neighbouring bins, so forward
and backward may have different numbers of chunks that consist of the same bins. Example: n = 2 chunks in
forward and 4 in backward need lcm(2, 4) = 4 bins:

    bins                 0 | 1 | 2 | 3
    chunks of forward      0   |   1
    chunks of backward   0 | 1 | 2 | 3

Within a chunk the rows of an expert are sorted by bin. So an expert's rows of one bin are contiguous in the
chunks of both passes, and backward can copy them as a block from forward's chunks
(`pmoe.engine.plan.regroup_chunks`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pmoe.comm.counts import RankCounts, by_chunk, cuts, without_own
from pmoe.comm.grid import Grid
from pmoe.engine.lanes.run import is_captured
from pmoe.engine.plan.plan import Chunk, KernelOrder, LocalChunk, PassModules, PassPlan, Plan, WeightMessage
from pmoe.engine.plan.regroup_chunks import join_chunks
from pmoe.experts.products import RowGroups
from pmoe.kernels import permute
from pmoe.kernels.counts import RowOrder, Sent
from pmoe.kernels.grouped_gemm.launch import NUM_COUNTERS, TileCounters
from pmoe.kernels.route import Routes
from pmoe.ordering.sorted import SortedOrder, SortedRows, Tokens, chunk_bounds, count_rows, sort_rows
from pmoe.planner.degree import Choice
from pmoe.schedule.buffer_sizes import ChunkRows
from pmoe.schedule.restore import Restore
from pmoe.schedule.tasks import local_pieces
from pmoe.warn import warn_of_fallback

if TYPE_CHECKING:
    from pmoe.engine.variants.padding import Padding
    from pmoe.engine.variants.send_once import DeduplicatedRows


FEW_RUNS = 64
"""On the CPU at most this many slices of an index are joined by one operation. Each slice is a view."""


class SortedSlots:
    """The routing of a call, with its slots sorted and counted for any number of chunks.

    A slot is one (token, choice) pair. Results are cached by number of chunks, because several trials and the
    call that follows them may ask for the same number.

    modules: the layer's modules and ranks.
    expert_TK: (T, K) int64, the global expert of each slot, for T tokens with K choices each. It is int32 if
        kernels have routed the tokens.
    keep_TK: (T, K) bool, whether each slot is kept; None keeps all.
    tokens: a `Tokens`: the number of tokens and, only if tokens have different numbers of slots, a tensor
        with the token of each slot.
    padding: with ``pad_to_capacity=True``, the map between tokens and padded rows (the same number of rows
        for each expert); else None. If it is set, each padded row counts as a token with one slot.
    weight: (T * K,), the routing weight of each slot, if kernels have sorted the slots; else None.
    """

    expert_TK: Tensor
    keep_TK: Tensor | None
    tokens: Tokens

    padding: Padding | None = None
    weight: Tensor | None = None

    def __init__(
        self, modules: PassModules, expert_TK: Tensor, keep_TK: Tensor | None, tokens: Tokens
    ) -> None:
        self.expert_TK = expert_TK
        self.keep_TK = keep_TK
        self.tokens = tokens
        self.modules = modules
        self._sorted: dict[int, SortedRows] = {}
        self._counted: dict[int, Tensor] = {}

    def take_routes(self, routes: Routes, n: int | None) -> None:
        """Stores the counts and the order that routing kernels have computed; PyTorch then computes neither.

        routes: the result of the kernels: row counts, and the sorted (token, choice) pairs.
        n: the number of chunks for which the kernels have sorted the pairs; None if the kernels' order
            differs from the order of `slots`, so that only the counts can be used.
        """
        self._counted[routes.counts_nE.shape[0]] = routes.counts_nE
        if n is not None and isinstance(self.modules.order, SortedOrder):
            self._sorted[n] = SortedRows(slot=routes.slot_N, position=routes.position_TK.view(-1))
            self.weight = routes.weight_TK.detach().view(-1)

    def slots(self, n: int) -> SortedRows:
        """Returns all (token, choice) pairs, sorted by chunk and expert for n chunks; dropped pairs last."""
        if n not in self._sorted:
            modules = self.modules
            m = self.num_pieces(n)
            self._sorted[n] = sort_rows(
                self.expert_TK, self.keep_TK, n, modules.num_experts, modules.staying, m, self.tokens
            )
        return self._sorted[n]

    def num_pieces(self, n: int) -> int:
        """Returns m, the number of blocks in which rows that stay on this rank are computed.

        Each block is one task. If chunks take turns in shared buffers, m = n. Otherwise m is often smaller
        than n, because fewer and larger matrix products are faster.

        n: number of chunks.
        """
        stages = self.modules.stages
        if self.modules.rotates:
            return n * stages.local
        return local_pieces(n, local=stages.local, remote=stages.remote)

    def sent(self, n: int) -> SortedRows:
        """Returns the (token, choice) pairs in the order in which dispatch sends their rows.

        In this class this is the order of `slots`. In the subclass `DeduplicatedSlots` several pairs share a
        row, so the order differs.

        n: number of chunks.
        """
        return self.slots(n)

    def count(self, bins: int) -> Tensor:
        """Returns the number of kept (token, choice) pairs for each bin and each expert, (bins, E) integers.

        E is the number of experts of all ranks.

        bins: the number of bins: equal ranges of tokens in which pairs are counted.
        """
        if bins not in self._counted:
            num_experts = self.modules.num_experts
            self._counted[bins] = count_rows(self.expert_TK, self.keep_TK, bins, num_experts, self.tokens)
        return self._counted[bins]

    def count_once(self, bins: int) -> Tensor | None:
        """Returns the number of rows for each rank, (bins, ranks), if a token is sent only once to each rank.

        In this class a token is sent once for each of its experts, and the result is None. The subclass
        `DeduplicatedSlots` returns the numbers.

        bins: the number of bins: equal ranges of tokens in which rows are counted.
        """
        return None

    def number_rows(
        self, n: int, weights: WeightMessage, bins: RankCounts, fine: Tensor
    ) -> DeduplicatedRows | None:
        """Returns numbers by which a receiver finds the row of each routing weight; None if it needs none.

        In this class each weight has a row of its own, in the same order, so the result is None. In the
        subclass `DeduplicatedSlots` several weights share a row, and the numbers are needed.

        n: number of chunks.
        weights: the message of routing weights.
        bins: the exchanged row counts of bins (ranges of tokens).
        fine: (ranks, n, E_local, bins of a chunk), numbers of rows that arrive, by source rank, chunk, local
            expert and bin. A bin is a range of tokens; a chunk has several.
        """
        return None

    def plan(self, counts: RankCounts, choice: Choice) -> Plan:
        """Returns the plan of this call, once the numbers of chunks and the restore pair are chosen.

        counts: the exchanged row counts.
        choice: the number of chunks of each pass, and how backward restores the experts' input and hidden
            activation.

        Activation checkpointing runs the forward pass a second time, and expects the same operations in both
        runs. This function may run different operations: sorted pairs are cached, so perhaps only one of the
        runs sorts. So the caller must hide this function from activation checkpointing.
        """
        return make_plan(self, *self._deep_enough(choice, counts), counts, choice.restore)

    def _deep_enough(self, choice: Choice, counts: RankCounts) -> tuple[int, int]:
        """Returns the numbers of chunks of both passes, increased until all chunks fit into their buffers.

        If chunks take turns in a few buffers of fixed size, a chunk with too many rows would overflow its
        buffer. All ranks get the same result, because both arguments are the same on all ranks.

        For hooks, and for experts that are a user's modules, forward saves an autograd graph for each chunk.
        Backward cannot use a part of a graph. So backward gets forward's number of chunks

        - always, if there are hooks;
        - with a user's modules, if a chunk of backward would need a part of a chunk of forward.

        choice: the number of chunks of each pass before chunks are cut finer, and which tensors are kept.
        counts: the exchanged row counts. ``counts.depth`` says for each number of chunks how many more times
            the chunks must be cut (`pmoe.comm.counts.cuts`); it is empty if all chunks fit.
        """
        forward, backward = choice.forward, choice.backward
        if counts.depth:
            num_bins = counts.send.shape[0]
            forward = cuts(forward, num_bins)[counts.depth[forward]]
            backward = cuts(backward, num_bins)[counts.depth[backward]]
        if forward % backward and self.modules.experts.are_modules and choice.restore.hidden != "recompute":
            backward = forward  # backward would need a part of a forward chunk: a saved graph cannot be split
        return forward, backward if self.modules.hooks is None else forward


RowsFor = Callable[[tuple[int, ...]], tuple[RankCounts, SortedSlots]]
"""The type of a function that returns a call's row counts, and the routing from which plans are made.

Its argument lists the numbers of chunks that may be chosen, the same on all ranks. Rows are counted in bins
(ranges of tokens), small enough that chunks of each of these numbers consist of whole bins. The function is a
collective, unless it has counted the rows for the same numbers before.
"""


def make_plan(orders: SortedSlots, n: int, n_backward: int, shared: RankCounts, restore: Restore) -> Plan:
    """Cuts the sorted rows into n chunks for forward and n_backward for backward, and returns the plan.

    The host does not wait for the device.

    orders: the sorted (token, choice) pairs.
    n, n_backward: the number of chunks of forward and of backward.
    shared: the exchanged row counts of bins (ranges of tokens). The number of bins is a multiple of n and of
        n_backward.
    restore: whether the experts' input and hidden activation are kept, offloaded or made again between the
        passes.
    """
    modules = orders.modules
    # The fewest bins of which the chunks of both passes can be made: see the module's docstring.
    num_bins = math.lcm(n, n_backward)
    forward = backward = _cut(orders, n, num_bins, shared)
    joined = None
    if n != n_backward:
        bins = shared.joined(num_bins)
        rank = modules.grid.all.rank
        received, received_device = bins.recv, bins.recv_device
        if bins.messages is not None:
            received_device = by_chunk(received_device, num_bins)
        if modules.stages.local:
            num_staying = len(modules.staying)
            received, received_device = (
                without_own(counts, rank, num_staying) for counts in (received, received_device)
            )
        joined = join_chunks(received, received_device, bins.recv[:, rank], n, n_backward)
        backward = _cut(orders, n_backward, num_bins, shared)
    return Plan(
        modules=modules,
        forward=forward,
        backward=backward,
        joined=joined,
        top_k=orders.expert_TK.shape[1],
        restore=restore,
        slot_token=orders.tokens.of_slot,
        padding=orders.padding,
    )


def _cut(orders: SortedSlots, n: int, num_bins: int, shared: RankCounts) -> PassPlan:
    """Returns the plan of one pass, with the sorted rows cut into n chunks.

    orders: the sorted (token, choice) pairs.
    n: the number of chunks.
    num_bins: the number of bins (ranges of tokens) of which the chunks of both passes consist.
    shared: the exchanged row counts of these bins, or of finer ones.
    """
    modules = orders.modules
    tokens = orders.tokens
    top_k = orders.expert_TK.shape[1]
    num_pieces = orders.num_pieces(n)
    slots = orders.slots(n)
    token_bounds = chunk_bounds(tokens.count, n)
    bypass_local = modules.stages.local
    rank = modules.grid.all.rank
    is_sharded = modules.grid.is_sharded
    num_staying = len(modules.staying)
    # Only the indices that sort rows are computed from counts on the device, by bin. All other numbers are
    # sums, and are computed from the counts on the host, because each sum on a GPU would be a kernel launch.
    # Most chunks are single bins: these two lines then save the calls of `by_chunk`.
    send_nPE = shared.send if shared.send.shape[0] == n else by_chunk(shared.send, n)
    recv_nWE = shared.recv if shared.recv.shape[0] == n else by_chunk(shared.recv, n)
    local_counts = []
    if bypass_local:
        own_nE = send_nPE[:, rank, :num_staying]
        local_counts = (own_nE if num_pieces == n else _by_piece(own_nE, num_pieces)).tolist()
    order = None if shared.messages is None else _order_by_kernel(orders, n, num_bins, shared, slots.slot)
    received_ends, local_ends = _ends(shared, n, num_pieces, rank, num_staying, order)
    num_tokens = [end - begin for begin, end in itertools.pairwise(token_bounds)]
    num_lines = num_tokens  # lines of `expert_TK`, by chunk
    line_bounds = token_bounds
    if tokens.of_slot is not None:  # no slot is dropped in this case, so each chunk has as many slots as rows
        num_lines = [number // top_k for number in send_nPE.sum((1, 2)).tolist()]
        line_bounds = [0, *itertools.accumulate(num_lines)]
    # The values for a single rank, which sends nothing.
    sent_by_chunk = come_by_chunk = [[0]] * n
    by_expert = [[0] * send_nPE.shape[2]] * n
    regroups: Sequence[Tensor | None] = [None] * n
    weights = once = None
    if modules.stages.remote:
        if bypass_local:
            send_nPE = without_own(send_nPE, rank, num_staying)
            recv_nWE = without_own(recv_nWE, rank, num_staying)
        # numpy sums small arrays in a third of the time of torch.
        recv = recv_nWE.numpy()
        numbers_nP = send_nPE.numpy().sum(2)
        numbers_by_chunk = numbers_nP.tolist()
        sent_by_chunk = (
            numbers_by_chunk if shared.sent_once is None else by_chunk(shared.sent_once, n).tolist()
        )
        come_nW = recv.sum(2) if shared.received_once is None else by_chunk(shared.received_once, n)
        come_by_chunk = come_nW.tolist()
        by_expert = recv.sum(1).tolist()
        # `_are_several` without a call for each chunk.
        are_several = [len(come_W) - come_W.count(0) > 1 for come_W in come_by_chunk]
        come_by_source = recv.sum((0, 2)).tolist()
        comes_from_several = _are_several(come_by_source)
        message_regroup: Tensor | None = None
        fine: Tensor | None = None
        if shared.messages is None and (comes_from_several or shared.sent_once is not None):
            bins_device = by_chunk(shared.recv_device, num_bins)
            if bypass_local and comes_from_several:
                bins_device = without_own(bins_device, rank, num_staying)
            # Row counts by (source rank, chunk, expert, bin of the chunk). Rows of one source arrive in this
            # order.
            fine = bins_device.unflatten(0, (n, -1)).permute(2, 0, 3, 1)
            if shared.sent_once is None and any(are_several):
                regroups = _regroup_chunks(fine, come_by_chunk, are_several)
            if comes_from_several:  # if there is a single chunk, its index also sorts the message of weights
                message_regroup = regroups[0] if n == 1 else None
                if message_regroup is None:
                    message_regroup = _regroup(fine.flatten(1), come_by_source)
        elif order is not None and order.of_chunks is not None:
            message_regroup = order.of_all
            of_chunk = order.of_chunks.split_with_sizes([sum(come_W) for come_W in come_by_chunk])
            regroups = [of if several else None for of, several in zip(of_chunk, are_several, strict=True)]
        staying_rows = [*map(sum, local_counts)] if num_pieces == n else [0] * n
        sizes = [
            [*numbers_P, staying] for numbers_P, staying in zip(numbers_by_chunk, staying_rows, strict=True)
        ]
        send_numbers = numbers_nP.sum(0).tolist()
        numbers = None if order is None else order.number_slot
        message_slot = _by_destination(slots.slot, sizes) if numbers is None else numbers[: sum(send_numbers)]
        recv_numbers: tuple[int, ...] = tuple(come_by_source)
        gathered_numbers: tuple[int, ...] = ()
        if is_sharded:
            recv_numbers, gathered_numbers = _by_place(come_by_source, modules.grid)
        weights = WeightMessage(
            slot=message_slot,
            send=tuple(send_numbers),
            recv=recv_numbers,
            regroup=message_regroup,
            gathered=gathered_numbers,
        )
        once = None if fine is None else orders.number_rows(n, weights, shared, fine)
    relayed = [((), ())] * n if shared.relayed is None else _relayed(shared.relayed, n)
    travelling = orders.sent(n)
    num_sent = tuple(map(sum, sent_by_chunk))
    chunks = []
    pieces: list[LocalChunk] = []
    first_row = 0
    for i, come_W in enumerate(come_by_chunk):
        recv_rows, gathered = _by_place(come_W, modules.grid) if is_sharded else (tuple(come_W), ())
        chunks.append(
            Chunk(
                tokens=slice(token_bounds[i], token_bounds[i + 1]),
                slots=slice(line_bounds[i] * top_k, line_bounds[i + 1] * top_k),
                sent=slice(first_row, first_row + num_sent[i]),
                send_rows=tuple(sent_by_chunk[i]),
                recv_rows=recv_rows,
                received=RowGroups(counts=tuple(by_expert[i]), ends=received_ends[i]),
                regroup=regroups[i],
                relayed=relayed[i],
                gathered=gathered,
            )
        )
        first_row += num_sent[i]
        # The order of `sort_rows`: if there is a piece for each chunk, piece i follows the rows that chunk i
        # sends. If there are fewer pieces than chunks, all pieces follow the rows of the last chunk.
        following_pieces = range(i, i + 1) if num_pieces == n else range(num_pieces if i == n - 1 else 0)
        for j in following_pieces:
            groups = RowGroups(counts=tuple(local_counts[j]), ends=local_ends[j])
            end = first_row + groups.num_rows
            pieces.append(LocalChunk(rows=slice(first_row, end), groups=groups))
            first_row = end
    row_slot = travelling.slot[:first_row]
    # If kernels have sorted the slots (int32), passes copy rows by ``position``, and need no token numbers.
    is_sorted_by_kernel = row_slot.dtype == torch.int32
    token = row_slot[:0] if is_sorted_by_kernel else row_slot if top_k == 1 else row_slot // top_k
    row_token = token if tokens.of_slot is None else tokens.of_slot[token]
    position = travelling.position
    if position.is_cuda and _takes_positions(orders):
        position = position.int()
    if modules.stages.local_copies:
        pieces = [*_own_experts_first(pieces, modules)]
    has_drops = orders.keep_TK is not None or once is not None
    gathers_by_token = modules.stages.remote and not is_sorted_by_kernel
    return PassPlan(
        chunks=tuple(chunks),
        pieces=tuple(pieces),
        weights=weights,
        slot=slots.slot[:first_row],
        row_token=row_token,
        sent_tokens=[row_token[chunk.sent] for chunk in chunks] if gathers_by_token else (),
        position=position,
        rows=_buffer_rows(chunks, pieces, num_sent, has_drops=has_drops, sends_once=once is not None),
        num_tokens=num_tokens,
        positions=position.view(-1, top_k).split_with_sizes(num_lines),
        has_drops=has_drops,
        once=once,
        by_kernel=None if order is None else _kernel_order(order, orders.weight),
        counters=None if order is None else TileCounters(order.zeros),
    )


def _buffer_rows(
    chunks: Sequence[Chunk],
    pieces: Sequence[LocalChunk],
    num_sent: Sequence[int],
    *,
    has_drops: bool,
    sends_once: bool,
) -> ChunkRows:
    """Returns the number of rows of each buffer of a pass, for each chunk (`PassPlan.rows`).

    chunks, pieces: the chunks, and the blocks of rows that stay on this rank.
    num_sent: for each chunk the number of rows that this rank sends.
    has_drops: whether some (token, choice) pairs may have no row. The home buffer then has one more row.
    sends_once: whether a token is sent only once to each rank. Arrived rows are then always sorted by expert.
    """
    esp_size = len(chunks[0].gathered)
    arrive_apart = esp_size > 0 or sends_once
    local = tuple([piece.groups.num_rows for piece in pieces]) or (0,) * len(chunks)
    return ChunkRows(
        send=num_sent,
        received=tuple([chunk.received.num_rows for chunk in chunks]),
        local=local,
        home=tuple([sent + stay + has_drops for sent, stay in zip(num_sent, local, strict=False)]),
        regrouped=tuple([sends_once or chunk.regroup is not None for chunk in chunks]),
        arrived=tuple([chunk.num_arrived for chunk in chunks]) if arrive_apart else None,
        gathered=tuple([chunk.num_gathered for chunk in chunks]) if arrive_apart else None,
        esp_size=esp_size,
    )


def _own_experts_first(pieces: Sequence[LocalChunk], modules: PassModules) -> tuple[LocalChunk, ...]:
    """Divides each piece of rows that stay into two: rows for the rank's own experts, and rows for copies.

    Returns the pieces of own experts, then those of copies. Copies of busy experts are never on a GPU, so
    offsets on a device (`RowGroups.ends`) are not needed.

    pieces: the pieces, whose rows are sorted by own experts and then copies.
    modules: the layer's modules.
    """
    num_local = modules.experts.num_local_experts
    own = []
    of_copies = []
    for piece in pieces:
        assert piece.groups.ends is None
        counts = piece.groups.counts
        middle = piece.rows.start + sum(counts[:num_local])
        groups = RowGroups(counts=counts[:num_local], ends=None)
        own.append(LocalChunk(rows=slice(piece.rows.start, middle), groups=groups))
        groups = RowGroups(counts=(0,) * num_local + tuple(counts[num_local:]), ends=None)
        rows = slice(middle, piece.rows.stop)
        of_copies.append(LocalChunk(rows=rows, groups=groups, of_copies=True))
    return (*own, *of_copies)


def _relayed(bins: tuple[Tensor, Tensor], n: int) -> list[tuple[tuple[int, ...], ...]]:
    """Returns `Chunk.relayed` of each of n chunks.

    bins: for dispatch and for combine, numbers of rows by bin (range of tokens): `RankCounts.relayed`.
    """
    of_both = (by_chunk(counts_FX, n).tolist() for counts_FX in bins)
    return [*zip(*(map(tuple, rows_nX) for rows_nX in of_both), strict=True)]


def _kernel_order(order: RowOrder, weight: Tensor | None) -> KernelOrder | None:
    """Returns the order in which messages carry one number a row; None if no kernel has computed it.

    weight: (T * K,), the routing weights that the kernel got.
    """
    if order.number_slot is None:
        return None
    return KernelOrder(slot=order.number_slot, weight=weight, taken=order.number_weight)


def _order_by_kernel(orders: SortedSlots, n: int, num_bins: int, bins: RankCounts, slot: Tensor) -> RowOrder:
    """Launches the kernel that computes the order of received rows in n chunks, and of routing weights.

    orders: the sorted (token, choice) pairs. The order of the routing weights is computed only if kernels
        sorted these pairs.
    num_bins: the number of bins (ranges of tokens) by which an expert's rows of a chunk are sorted.
    bins: the row counts of these bins, or of finer ones, which kernels exchanged.
    slot: (T * K,), the sorted pairs for n chunks.
    """
    modules = orders.modules
    messages = bins.messages
    assert messages is not None
    rank = modules.grid.all.rank
    bypass_local = modules.stages.local
    come_W = bins.recv.sum((0, 2)).tolist()
    if bypass_local:
        come_W[rank] = 0
    are_several = len(come_W) - come_W.count(0) > 1  # `_are_several` without a call
    num_pieces = orders.num_pieces(n)
    is_sorted_by_kernel = slot.dtype == torch.int32 and num_pieces in (0, n)
    return messages.order(
        n,
        num_bins,
        rank if bypass_local else None,
        num_pieces,
        sum(come_W) if are_several else None,
        Sent(slot, orders.weight) if is_sorted_by_kernel else None,
        NUM_COUNTERS,
    )


def _takes_positions(orders: SortedSlots) -> bool:
    """Returns whether the passes may copy and sum rows by the kernels of `pmoe.kernels.permute`.

    If the result is True, positions of rows are stored as int32, which these kernels read. The kernels copy
    one row for each of a token's K choices. So they cannot run if several choices share a row
    (`DeduplicatedSlots`), or if tokens have different numbers of choices. If they cannot run on this GPU, or
    not with so many choices, a warning says why, once for each reason.

    orders: the sorted (token, choice) pairs of the call.
    """
    expert_TK = orders.expert_TK
    is_plain = type(orders) is SortedSlots and orders.tokens.of_slot is None
    if not (is_plain and isinstance(orders.modules.order, SortedOrder)):
        return False
    why = permute.refusal(expert_TK.device, torch.bfloat16, expert_TK.shape[1])
    if why is not None:
        warn_of_fallback("rows are copied and summed", why)
    return why is None


def _by_destination(slot: Tensor, sizes: list[list[int]]) -> Tensor:
    """Returns the slots whose routing weights are sent, (S,), by destination rank, then chunk, then expert.

    A slot is a (token, choice) pair; S slots are sent. In ``slot`` the slots that a chunk sends to a rank are
    contiguous, and ``sizes`` has their number. So the slots are reordered by copying slices, without a sort
    and without waiting for the GPU.

    slot: (T * K,), the slots of T tokens with K choices each, sorted by chunk, then destination rank, then
        expert.
    sizes: for each chunk P + 1 numbers: how many rows it sends to each of P ranks, and how many rows stay on
        this rank.
    """
    flat = [*itertools.chain.from_iterable(sizes)]
    if len(sizes) == 1 and not slot.is_cuda:
        return slot[: sum(flat[:-1])]
    if len(flat) <= FEW_RUNS or slot.is_cuda:  # on a GPU each operation is a launch
        runs = slot[: sum(flat)].split_with_sizes(flat)
        by_rank = zip(*zip(*[iter(runs)] * len(sizes[0]), strict=True), strict=True)
        return torch.cat([*itertools.chain.from_iterable(by_rank)][: -len(sizes)])
    sizes_nP = torch.tensor(sizes)
    sent_nP = sizes_nP[:, :-1]
    first_nP = (sizes_nP.flatten().cumsum(0).view_as(sizes_nP) - sizes_nP)[:, :-1]
    lengths = sent_nP.t().flatten()
    shift = first_nP.t().flatten() - (lengths.cumsum(0) - lengths)
    return slot[torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)]


def _by_place(come: Sequence[int], grid: Grid) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits row counts by source rank into counts for the all-to-all and counts for the all-gather.

    Experts are sharded: they are distributed over P ranks, and each expert is split over L ranks of a node.

    come: (P * L,), the number of rows from each source rank, as L blocks of P numbers. Each of the L ranks of
        this node has a block: the numbers of rows that it receives from each of P ranks in the all-to-all.
    grid: the layer's ranks.

    Returns (P,), the numbers of this rank's own block, for the all-to-all; and (L,), the sum of each block,
    for the all-gather inside the node.
    """
    width = grid.ep.size
    own_start = grid.esp.rank * width
    gathered = (sum(come[start : start + width]) for start in range(0, len(come), width))
    return tuple(come[own_start : own_start + width]), tuple(gathered)


def _are_several(come_W: list[int]) -> bool:
    """Returns whether rows come from more than one rank, so that they must be sorted.

    Rows from a single rank arrive in expert order already.

    come_W: (W,), numbers of rows by source rank.
    """
    return len(come_W) - come_W.count(0) > 1


def _regroup(counts_WG: Tensor, rows_by_source: Sequence[int]) -> Tensor:
    """Returns the (N,) int64 index that sorts N rows from (source rank, group) to (group, source rank).

    A group consists of the rows of one local expert, in one chunk or in all chunks.

    counts_WG: (W, G), the number of rows from each of W ranks in each of G groups, on the device of the rows.
    rows_by_source: (W,), the number of rows from each rank, on the host. Their sum is N. Because the host
        knows N, it need not wait for the device.
    """
    size, num_groups = counts_WG.shape
    group = torch.arange(num_groups, device=counts_WG.device).repeat(size)
    rows = group.repeat_interleave(counts_WG.reshape(-1), output_size=sum(rows_by_source))
    return rows.argsort(stable=True)


def _regroup_chunks(
    fine: Tensor, come_by_chunk: Sequence[Sequence[int]], are_several: Sequence[bool]
) -> list[Tensor | None]:
    """Returns for each of n chunks the index that sorts its rows by expert (`Chunk.regroup`), or None.

    On CUDA a single sort computes the indices of all chunks, because every further operator would be a kernel
    launch.

    fine: (W, n, E_local, bins of a chunk), numbers of rows that arrive, by source rank, chunk, expert and
        bin, on the device of the rows. A bin is a range of tokens; a chunk has several.
    come_by_chunk: (n, W), numbers of the same rows by chunk and source rank, on the host.
    are_several: for each chunk, whether its rows come from several ranks. If they do not, the index of the
        chunk is None, because its rows arrive sorted.
    """
    if not fine.is_cuda:
        return [
            _regroup(fine[:, i].flatten(1), come_W) if are_several[i] else None
            for i, come_W in enumerate(come_by_chunk)
        ]
    counts_nWG = fine.transpose(0, 1).flatten(2)
    n, size, num_groups = counts_nWG.shape
    group = torch.arange(n * num_groups, device=fine.device).view(n, 1, -1).expand(n, size, num_groups)
    chunk_rows = [sum(come_W) for come_W in come_by_chunk]
    rows = group.reshape(-1).repeat_interleave(counts_nWG.reshape(-1), output_size=sum(chunk_rows))
    of_chunk = rows.argsort(stable=True).split(chunk_rows)
    # The sort numbered the rows of all chunks together. The index of a chunk must number its rows from 0.
    first_row = 0
    for index, num_rows, is_needed in zip(of_chunk, chunk_rows, are_several, strict=True):
        if first_row and is_needed:
            index.sub_(first_row)
        first_row += num_rows
    return [index if is_needed else None for index, is_needed in zip(of_chunk, are_several, strict=True)]


def _ends(
    bins: RankCounts, n: int, num_pieces: int, rank: int, num_staying: int, order: RowOrder | None
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Returns where each expert's rows end, for the received rows of n chunks and for the rows that stay.

    The result is two lists: an entry for each of n chunks, and one for each block of rows that stay. An entry
    is (E_local,) int32, the offsets of ``grouped_mm``. It is None on the CPU, where a loop over the experts
    needs no offsets. The sums are computed on the host, and one copy brings all of them to the device.

    bins: the row counts of the bins (ranges of tokens) of which the chunks consist.
    n: the number of chunks.
    num_pieces: the number of blocks of rows that stay.
    rank: this rank.
    num_staying: the number of this rank's experts whose rows are not sent if they come from this rank; 0 if
        all rows are sent. The indices after these experts are copies of other ranks' busy experts, and rows
        for these copies are sent.
    """
    on_device = bins.recv_device
    if not on_device.is_cuda:
        return [None] * n, [None] * num_pieces
    if order is not None:
        lines = order.ends.unbind(0)
        return lines[:n], lines[n:]
    # A CUDA graph would copy from the same host memory at each replay, when the memory may have other
    # content. So in a capture the offsets are computed on the device.
    computes = is_captured(on_device.device)
    counts_nWE = by_chunk(on_device if computes else bins.recv, n)
    if num_staying:
        own_nE = counts_nWE[:, rank].clone()
        own_nE[:, num_staying:] = 0
        counts_nE = torch.cat([counts_nWE.sum(1) - own_nE, _by_piece(own_nE, num_pieces)])
    else:
        counts_nE = counts_nWE.sum(1)
    ends = counts_nE.cumsum(1).int()
    if not computes:  # copies from pinned memory, because the host would wait for a copy from pageable memory
        ends = ends.pin_memory().to(on_device.device, non_blocking=True)
    rows = ends.unbind(0)
    return rows[:n], rows[n:]


def _by_piece(counts_nE: Tensor, m: int) -> Tensor:
    """Sums row counts of n chunks to row counts of m blocks, (m, E), for E experts.

    A block consists of rows that stay on this rank, and one task computes it. If m < n, the rows of the first
    n - m + 1 chunks are in the first block, and each other chunk has a block of its own
    (`pmoe.schedule.tasks.piece_of`).

    counts_nE: (n, E), numbers of rows by chunk and expert.
    m: the number of blocks, at most n.
    """
    if m == counts_nE.shape[0]:
        return counts_nE
    joined = counts_nE.shape[0] - m + 1
    return torch.cat([counts_nE[:joined].sum(0, keepdim=True), counts_nE[joined:]])
