"""`pmoe.stats`: reports what the MoE layers of a model did in their last forward and backward pass.

Every call of a layer stores these numbers anyway, so `stats` does not make steps longer. On CUDA nothing
waits for the device until `stats` is called. How long computation waited for communication is known only for
steps inside a ``with pmoe.recording()`` block.

Letters in this file: T tokens of a rank, K experts that each token chooses, N rows (copies of tokens) that a
rank's experts compute, E experts of all ranks, M = d_model. Tensors have the names of the MPipeMoE paper: T_I
is the layer's input, T_DI the rows that the experts received, T_M their hidden activation, T_DO their output,
T_O the layer's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pmoe.arguments import check_flag, check_kind, check_module
from pmoe.call.decision import IN_CHUNKS, BalanceReport, RunReport
from pmoe.comm.failures import sum_between_calls
from pmoe.comm.ranks import Ranks
from pmoe.decide.dense_values import DENSE, SAME_VALUES, dense_values
from pmoe.engine.buffers.arena import pool
from pmoe.engine.lanes.recorder import Journal
from pmoe.experts.wrapper_checks import COPIED, sampled
from pmoe.integrations.expert_usage import (
    ExpertUsage,
    LayerUsage,
    max_violation,
    reduced_numbers,
    scalars_of,
    with_reduced,
)
from pmoe.integrations.model_layers import layers_of
from pmoe.layer import MoELayer
from pmoe.planner.memory import PredictedMemory
from pmoe.planner.timeline import Overlap, overlap
from pmoe.text import table
from pmoe.warn import warn_once


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """Statistics of one MoE layer's last forward pass, and the recorded times of both passes.

    The defaults are the values before the layer's first call. A row is a copy of a token for one of its
    chosen experts.

    Attributes:
        name: name of the layer in ``named_modules``.
        tokens_per_expert: (E,) for each of all E experts, the number of rows routed to it and not dropped.
            Counts the rows of this rank's tokens, or the rows of all ranks' tokens.
        num_slots: number of rows before any were dropped: tokens * top_k. None for gates in which experts
            choose or mix tokens (expert choice, SoftMoE).
        drop_rate: number of dropped rows / num_slots, from 0 to 1. None if num_slots is None.
        imbalance: rows of the busiest expert / mean rows of an expert. 1 is an even load. None if there are
            no rows.
        rank_imbalance: rows that the experts of the busiest rank get / mean of this number over the ranks.
            None if the statistics cover a single rank. Example: tokens_per_expert (4, 2, 2, 0) has imbalance
            2; on two ranks with two experts each, rank_imbalance is 1.5.
        path: the code that computed the call:

            - "not run": there was no call yet;
            - "pipeline": the pipeline engine, in chunks;
            - "program": compiled pass programs, in chunks;
            - "one rank": the kernels for layers on a single rank;
            - "few rows": one product for each expert, in a small call without gradients;
            - "fused": COMET's fused kernels in both passes; "fused forward": in the forward pass only;
            - "persistent": FlashDMoE's kernels, one for each pass;
            - "whole graph": a compiled graph of the whole model.
        n_forward, n_backward: number of chunks (micro-batches) of each pass. None if the pass was not cut
            into chunks, or did not run.
        restore: how the dispatched rows T_DI and the hidden activation T_M get from the forward to the
            backward pass, such as "communicate/recompute". None if both stayed in memory because chunks do
            not share buffers, or if there is no backward pass.
        tensors: bytes of this rank's tensors by name, from row counts and dtypes: the input T_I, the
            dispatched rows T_DI, the hidden activation T_M, the experts' output T_DO and the layer's output
            T_O. Each is the size of the whole tensor, even if only some chunks of it are in memory at a time.
            T_M is missing if the experts are a user's modules.
        predicted: predicted memory of this rank for both passes, in bytes, with the rows that it really had
            (`MoELayer.predict_memory`). None if no prediction is possible.
        unpredicted: why there is no prediction, or what the prediction leaves out, in words.
        forward, backward: seconds of the last recorded pass in each direction: this rank's, or the mean over
            all ranks. None if no pass was recorded.
        balance: what copies of busy experts did: how uneven the ranks' rows were without and with copies, the
            number of copies, and the bytes of their weights. None if the layer has no ``balance``.
        usage: the rows of all calls that an `ExpertUsage` has counted. None if `stats` got no `ExpertUsage`.
    """

    name: str
    tokens_per_expert: tuple[int, ...]
    num_slots: int | None = 0
    drop_rate: float | None = None
    imbalance: float | None = None
    rank_imbalance: float | None = None
    path: str = "not run"
    n_forward: int | None = None
    n_backward: int | None = None
    restore: str | None = None
    tensors: dict[str, int] = field(default_factory=dict)
    predicted: PredictedMemory | None = None
    unpredicted: str = "the layer has not run"
    forward: Overlap | None = None
    backward: Overlap | None = None
    balance: BalanceReport | None = None
    usage: LayerUsage | None = None

    @property
    def load(self) -> LayerUsage:
        """The load of the experts in all calls that ``usage`` counted, or else in the last call."""
        if self.usage is not None and self.usage.num_calls:
            return self.usage
        num_calls = int(sum(self.tokens_per_expert) > 0)
        return LayerUsage(
            tokens_per_expert=self.tokens_per_expert,
            num_slots=self.num_slots,
            num_calls=num_calls,
            max_vio_sum=max_violation(self.tokens_per_expert),
            rank_imbalance=self.rank_imbalance,
        )

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds of both passes in which the layer communicates but computes nothing.

        None if no pass was recorded.
        """
        seconds = [times.exposed for times in (self.forward, self.backward) if times is not None]
        return sum(seconds) if seconds else None

    @property
    def communication_seconds(self) -> float | None:
        """Seconds of both passes in which the layer communicates; None if no pass was recorded."""
        seconds = [times.communication for times in (self.forward, self.backward) if times is not None]
        return sum(seconds) if seconds else None


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Bytes of the memory pool that all layers on one device share (`pmoe.pool`).

    device: name of the device.
    device_bytes, device_peak_bytes: bytes of buffers that chunks share on the device: in use now, and at most
        so far.
    host_bytes, host_peak_bytes: bytes of host memory for offloaded tensors: in use now, and at most so far.
    """

    device: str
    device_bytes: int
    device_peak_bytes: int
    host_bytes: int
    host_peak_bytes: int


HEADER = ("layer", "path", "n", "pair", "rows", "dropped", "max / mean", "of ranks", "exposed ms", "peak MiB")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of all MoE layers of a model. ``str()`` makes a table of them.

    layers: one entry for each layer, in the model's order.
    pools: one entry for each device on which a layer has run.
    num_ranks: number of ranks whose tokens are counted; 1 for this rank only.
    """

    layers: tuple[LayerStats, ...]
    pools: tuple[PoolStats, ...]
    num_ranks: int

    def as_dict(self) -> dict[str, Any]:
        """Returns all statistics as dicts, tuples, strings and numbers, which can be written as JSON."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """Returns a few numbers about all layers together, for a logger such as ``wandb.log``.

        How many numbers are returned does not depend on the numbers of layers and experts. Each quantity in
        this list gives two: its mean over the layers and its value in the worst layer, such as
        "moe/entropy_mean" and "moe/entropy_min":

        - entropy: entropy of the experts' shares of rows / entropy of equal shares; 1 is an even load.
        - max_share: the largest share of an expert in the rows.
        - active_fraction: the share of experts with any rows.
        - max_vio_micro: rows of the busiest expert / mean rows of an expert - 1, computed for each call on
          each rank and then averaged.
        - max_vio_global: the same ratio, computed once for the rows of all calls and ranks together.
        - drop_rate: the share of rows that were dropped, if it is known.
        - rank_imbalance: rows of the busiest rank / mean, if the statistics are of all ranks.

        With a journal there are also "moe/communication_seconds" and "moe/exposed_communication_seconds",
        which are sums over layers.
        """
        if not self.layers:
            return {}
        scalars = scalars_of([layer.load for layer in self.layers])
        for name in ("communication", "exposed"):
            values = [getattr(layer, f"{name}_seconds") for layer in self.layers]
            known = [value for value in values if value is not None]
            if known:
                key = "communication" if name == "communication" else "exposed_communication"
                scalars[f"moe/{key}_seconds"] = sum(known)
        return scalars

    def __str__(self) -> str:
        if not self.layers:
            return "no MoELayer in this model"
        whose = "this rank's tokens" if self.num_ranks == 1 else f"the tokens of {self.num_ranks} ranks"
        rows: list[Sequence[str]] = [HEADER]
        for layer in self.layers:
            rows.append(
                [
                    layer.name or "(the model)",
                    layer.path,
                    f"{layer.n_forward or '-'}/{layer.n_backward or '-'}".replace("-/-", "-"),
                    layer.restore or "-",
                    f"{sum(layer.tokens_per_expert):,}",
                    _number(layer.drop_rate, "{:.1%}"),
                    _number(layer.imbalance, "{:.2f}"),
                    _number(layer.rank_imbalance, "{:.2f}"),
                    _number(layer.exposed_seconds, "{:.3f}", 1e3),
                    _number(None if layer.predicted is None else layer.predicted.peak, "{:,.1f}", 2**-20),
                ]
            )
        pools = [
            f"pool of {of.device}: at most {of.device_peak_bytes / 2**20:,.1f} MiB on the device, "
            f"{of.host_peak_bytes / 2**20:,.1f} MiB on the host"
            for of in self.pools
        ]
        copies = [_in_words(layer) for layer in self.layers if layer.balance is not None]
        return "\n".join([f"the last forward pass, {whose}", table(rows, left=range(4)), *copies, *pools])


def stats(
    model: nn.Module,
    *,
    all_ranks: bool = False,
    group: dist.ProcessGroup | None = None,
    journal: Journal | None = None,
    usage: ExpertUsage | None = None,
) -> Stats:
    """Returns what every `MoELayer` of ``model`` did in its last forward and backward pass.

    Args:
        model: the model, or a single layer.
        all_ranks: sum row counts over all ranks of ``group``, and average recorded seconds over them. This is
            one all-reduce, so every rank of the group must call this function, with the same layers. Sizes
            and predicted bytes stay this rank's. Rank 0 also warns about two mistakes: all ranks have the
            same experts, although the experts differed in an earlier call (a loop of `dist.broadcast` or an
            optimizer has copied them); or a gate, shared expert or callback has different values on different
            ranks, although all ranks must have the same.
        group: the ranks to sum over, if all_ranks is True; None is the default group.
        journal: the journal of a block ``with pmoe.recording() as journal`` around the step. Without it, no
            seconds are reported.
        usage: an `ExpertUsage`, which counts the rows of all calls. The counts of each layer are returned in
            `LayerStats.usage`, and then reset to 0. If all_ranks is True, pass an object on every rank or on
            none.

    On CUDA this function waits for row counts that are still on the device (after a call by the kernels for a
    single rank). With all_ranks it also waits for the result of the all-reduce, and for the experts' values
    if the layer is spread over several ranks.

    Raises TypeError if an argument has another type, ValueError for a group without all_ranks, RuntimeError
    if another rank does not answer.
    """
    check_module(model=model)
    check_flag("all_ranks", all_ranks)
    check_kind((Journal, type(None)), "None or what pmoe.recording() gave", journal=journal)
    check_kind((ExpertUsage, type(None)), "None or a pmoe.ExpertUsage", usage=usage)
    if group is not None and not all_ranks:
        raise ValueError("group must be None unless all_ranks is True, because nothing is reduced over it")
    layers = layers_of(model)
    statistics = [_of_layer(name, layer, journal) for name, layer in layers.items()]
    if usage is not None:
        statistics = [
            replace(of_layer, usage=usage.take(layer))
            for of_layer, layer in zip(statistics, layers.values(), strict=True)
        ]
    ranks = Ranks(group) if all_ranks else Ranks.single()
    if statistics and ranks.group is not None:
        statistics = _over_ranks(statistics, list(layers.values()), ranks)
    devices = dict.fromkeys(str(layer.ran.device) for layer in layers.values() if layer.ran is not None)
    return Stats(layers=tuple(statistics), pools=tuple(map(_of_pool, devices)), num_ranks=ranks.size)


def imbalance(rows: Sequence[int]) -> float | None:
    """Returns the largest number divided by the mean of all numbers; None if all are 0.

    Example: (3, 1, 0, 0) -> 3.
    """
    total = sum(rows)
    return max(rows) * len(rows) / total if total else None


# ---- one layer, on this rank


def _of_layer(name: str, layer: MoELayer, journal: Journal | None) -> LayerStats:
    """Returns the statistics of one layer on this rank.

    name: name of the layer in the model.
    journal: the recorded times of tasks; None if nothing was recorded.

    On CUDA the function waits for row counts that are still on the device.
    """
    spans = [
        None if journal is None else journal.last(layer.experts, direction)
        for direction in ("forward", "backward")
    ]
    forward, backward = (None if pass_spans is None else overlap(pass_spans) for pass_spans in spans)
    ran = layer.ran
    rows_E = tuple(layer.tokens_per_expert.tolist())
    statistics = LayerStats(name=name, tokens_per_expert=rows_E, forward=forward, backward=backward)
    if ran is None:
        return statistics
    predicted, unpredicted = _predicted(layer, ran)
    return replace(
        statistics,
        num_slots=ran.num_slots,
        drop_rate=_drop_rate(sum(rows_E), ran.num_slots),
        imbalance=imbalance(rows_E),
        path=ran.path,
        n_forward=ran.forward,
        n_backward=ran.backward,
        restore=None if ran.restore is None else str(ran.restore),
        tensors=_tensors(layer, ran),
        predicted=predicted,
        unpredicted=unpredicted,
        balance=ran.balance,
    )


def _predicted(layer: MoELayer, ran: RunReport) -> tuple[PredictedMemory | None, str]:
    """Returns the predicted memory of the last call's two passes, and a text about what it leaves out.

    Returns None and a text with the reason if no prediction is possible.

    layer: the layer.
    ran: the report of how the last call was run.
    """
    if ran.path not in IN_CHUNKS:
        return None, f"memory of the path {ran.path!r} is not predicted"
    if ran.backward is None:
        return None, "the last forward pass was without a backward pass"
    counts = layer.row_counts
    assert counts is not None
    try:
        predicted = layer.predict_memory(
            ran.num_tokens,
            replace(counts, depth={}),  # do not cut chunks any finer than they were cut in the call
            pipeline=ran.forward,
            pipeline_backward=ran.backward,
            memory_reuse=ran.restore,
        )
    except ValueError as error:
        return None, str(error)
    return predicted, "; ".join(predicted.unknown)


def _drop_rate(kept: int, num_slots: int | None) -> float | None:
    """Returns the share of rows that were dropped.

    kept: number of rows that were not dropped.
    num_slots: number of rows before any were dropped; None gives None, because the share is then unknown.
    """
    if num_slots is None:
        return None
    return 1 - kept / num_slots if num_slots else 0.0


def _tensors(layer: MoELayer, ran: RunReport) -> dict[str, int]:
    """Returns the bytes of T_I, T_DI, T_M, T_DO and T_O on this rank, by name.

    These are the layer's input, the rows that the experts received, their hidden activation, their output,
    and the layer's output.

    layer: the layer.
    ran: the report of how the last call was run.
    """
    counts = layer.row_counts
    element_size = ran.dtype.itemsize
    assert counts is not None
    num_rows = int(counts.recv.sum())
    token_bytes = ran.num_tokens * layer.d_model * element_size
    row_bytes = num_rows * layer.options.row_columns * element_size
    columns = layer.layer_modules.experts.columns(ran.device.type).hidden
    hidden = {"T_M": num_rows * columns * element_size} if columns else {}
    return {"T_I": token_bytes, "T_DI": row_bytes, **hidden, "T_DO": row_bytes, "T_O": token_bytes}


def _of_pool(device: str) -> PoolStats:
    """Returns how many bytes the memory pool of a device has in use now, and had at most."""
    memory_pool = pool(device)
    return PoolStats(
        device=device,
        device_bytes=memory_pool.device.bytes_in_use,
        device_peak_bytes=memory_pool.device.peak_bytes,
        host_bytes=memory_pool.host.bytes_in_use,
        host_peak_bytes=memory_pool.host.peak_bytes,
    )


# ---- all ranks


def _over_ranks(
    own_stats: Sequence[LayerStats], layers: Sequence[MoELayer], ranks: Ranks
) -> list[LayerStats]:
    """Returns the statistics of all layers, summed or averaged over the ranks, after one all-reduce.

    own_stats: this rank's statistics of each layer.
    layers: the layers, in the same order.

    The numbers are summed as float64, which is exact for integers up to 2**53. The same all-reduce compares
    digests of parameters. Rank 0 warns if experts that differed between ranks in an earlier call are now the
    same on all ranks, or if parameters differ that must be the same on all ranks.
    """
    numbers = [_numbers(layer_stats) for layer_stats in own_stats]
    marks = [_marks(layer) for layer in layers]
    numbers.append([float(power) for own in marks for mark in own for power in (mark, mark**2)])
    device = next((parameter.device for layer in layers for parameter in layer.parameters()), "cpu")
    summed = torch.tensor([number for own in numbers for number in own], dtype=torch.float64, device=device)
    sum_between_calls(summed, ranks.group, "summing statistics")
    *parts, powers = summed.cpu().split([len(own) for own in numbers])
    # n numbers are all equal if and only if n * sum(x**2) = sum(x)**2. So sums are enough to compare the
    # ranks.
    sums = powers.long().view(len(layers), -1, 2)
    are_same = (ranks.size * sums[..., 1] == sums[..., 0] ** 2).tolist()
    if ranks.rank == 0:
        for layer_stats, layer, (experts_are, *dense_are) in zip(own_stats, layers, are_same, strict=True):
            _warn_of_values(layer_stats.name, layer, ranks, experts_are, dense_are)
    return [
        _with_numbers(layer_stats, layer.num_local_experts, part.tolist())
        for layer_stats, layer, part in zip(own_stats, layers, parts, strict=True)
    ]


def _marks(layer: MoELayer) -> list[int]:
    """Returns short digests of a layer's parameters. Ranks compare them to find mistakes.

        first digest     the experts: a mistake if all ranks have the same values
        other digests    the parts in `DENSE`, such as the gate: a mistake if values differ between ranks

    In two cases neither equal nor different values show a mistake. The digest is then 0, and no values are
    read:

    - for the experts, if the ranks last found them equal, or have not compared them yet;
    - for the parts in `DENSE`, if the layer is on a single rank and was not parallelized, because each rank
      may then have a model of its own.

    A digest has 20 bits. Ranks compare digests by their sums and sums of squares, and a square must be exact
    in float64.
    """
    modules = layer.layer_modules
    texts = [sampled(modules.experts) if modules.cache.differed else ""]
    texts += dense_values(modules).values() if _is_spread(layer) else ["" for _ in DENSE]
    return [int(text[:5] or "0", 16) for text in texts]


def _is_spread(layer: MoELayer) -> bool:
    """Returns whether all ranks together form one layer, so that all must have the same gate.

    False if the layer is on a single rank and was not parallelized, because each rank may then have a model
    of its own.
    """
    return layer.ranks.size > 1 or layer.layer_modules.experts.is_parallelized


def _warn_of_values(
    name: str, layer: MoELayer, ranks: Ranks, experts_are_same: bool, dense_are_same: Sequence[bool]
) -> None:
    """Warns about experts that are the same on all ranks, and about other parts that differ between ranks.

    name: name of the layer, "" if the model is the layer itself.
    ranks: the ranks that were compared.
    experts_are_same: whether all ranks have the same experts.
    dense_are_same: for each part in `DENSE`, whether all ranks have the same values.

    Experts of different ranks should differ. If they were different in an earlier call and are the same now,
    something has overwritten them, and this function warns. It does not warn if the experts were the same in
    earlier calls, too, or if the layer has ranks that were not compared.
    """
    name = name or "model"  # a layer that is itself the model has the name ""
    cache = layer.layer_modules.cache
    if experts_are_same and cache.differed and set(layer.ranks.members) <= set(ranks.members):
        warn_once(f"{name}: {COPIED}")
    differ = [part for part, is_same in zip(DENSE, dense_are_same, strict=True) if not is_same]
    if differ:
        warn_once(
            f"{name}: the values of {', '.join(differ)} must be the same on every rank, and differ. "
            f"{SAME_VALUES}"
        )


def _numbers(layer_stats: LayerStats) -> list[float]:
    """Returns the numbers of one layer that are summed over ranks, in a fixed order.

    The list has, with the number of entries on the left:

        1   num_slots
        4   forward pass: 1 if it was recorded; seconds of the pass, of its communication, and of
            communication without computation at the same time. All four are 0 if it was not recorded
        4   backward pass: the same
        E   rows of each of the E experts
            the numbers of `reduced_numbers`, if the layer has a usage (counts of all calls)

    layer_stats: the statistics of the layer on this rank.
    """
    numbers: list[float] = [layer_stats.num_slots or 0]
    for seen in (layer_stats.forward, layer_stats.backward):
        numbers += [0.0] * 4 if seen is None else [1.0, seen.seconds, seen.communication, seen.exposed]
    usage = [] if layer_stats.usage is None else reduced_numbers(layer_stats.usage)
    return [*numbers, *layer_stats.tokens_per_expert, *usage]


def _with_numbers(layer_stats: LayerStats, num_local: int, numbers: Sequence[float]) -> LayerStats:
    """Returns a layer's statistics with the row counts and times of all ranks.

    layer_stats: the statistics of this rank.
    num_local: number of experts of a rank.
    numbers: sums over all ranks of the lists that `_numbers` returns.
    """
    num_slots = None if layer_stats.num_slots is None else round(numbers[0])
    num_experts = len(layer_stats.tokens_per_expert)
    rows_E = tuple(round(rows) for rows in numbers[9 : 9 + num_experts])
    usage = layer_stats.usage
    if usage is not None:
        usage = with_reduced(usage, num_local, numbers[9 + num_experts :])
    by_rank = [sum(rows_E[first : first + num_local]) for first in range(0, len(rows_E), num_local)]
    ran = layer_stats.path != "not run"
    return replace(
        layer_stats,
        tokens_per_expert=rows_E,
        num_slots=num_slots,
        drop_rate=_drop_rate(sum(rows_E), num_slots) if ran else None,
        imbalance=imbalance(rows_E),
        rank_imbalance=imbalance(by_rank),
        forward=_mean(numbers[1:5]),
        backward=_mean(numbers[5:9]),
        usage=usage,
    )


def _mean(sums: Sequence[float]) -> Overlap | None:
    """Returns a pass's seconds, averaged over the ranks that recorded it; None if no rank did.

    sums: the number of ranks that recorded the pass, and sums over these ranks: seconds of the pass, of its
        communication, and of communication without computation at the same time.
    """
    num, seconds, communication, exposed = sums
    if not num:
        return None
    return Overlap(seconds=seconds / num, communication=communication / num, exposed=exposed / num)


def _in_words(layer: LayerStats) -> str:
    """Returns a line about the copies of busy experts in a layer with ``balance``."""
    balance = layer.balance
    assert balance is not None
    return (
        f"{layer.name or '(the model)'}: {balance.copies} copies of busy experts, "
        f"{balance.weight_bytes / 2**20:,.1f} MiB; rows of the busiest rank / mean: {balance.before:.2f} "
        f"without copies, {balance.after:.2f} with them"
    )


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    """Returns ``value * scale`` as text in the format ``form``, or "-" if the value is None.

    Example: _number(0.25, "{:.1%}") -> "25.0%".
    """
    return "-" if value is None else form.format(value * scale)
