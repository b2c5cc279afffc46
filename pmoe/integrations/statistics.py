"""`stats`: what the MoE layers of a model did in their last step.

It only reads what layers keep anyway; nothing is measured for it, and on CUDA nothing waits for the device
until `stats` is called. The time that computation waited for communication is known only for steps within
`pmoe.recording`.

Letters: T tokens, K choices, N rows, E experts, W ranks, M = d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pmoe.arguments import check_flag, check_kind, check_module
from pmoe.call.decision import RunReport
from pmoe.comm.failures import at_stage
from pmoe.comm.ranks import Ranks
from pmoe.decide.dense_values import DENSE, SAME_VALUES, dense_values
from pmoe.engine.buffers.arena import pool
from pmoe.engine.lanes.recorder import Journal
from pmoe.experts.wrapper_checks import COPIED, sampled
from pmoe.layer import MoELayer
from pmoe.planner.memory import PredictedMemory
from pmoe.planner.timeline import Overlap, overlap
from pmoe.text import table
from pmoe.warn import warn_once


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """Statistics of one layer's last forward pass, and the recorded times of both passes.

    The defaults are the values before the first call.

    Attributes:
        name: name of the layer in ``named_modules``.
        tokens_per_expert: (E,) number of rows that each of all experts keeps, of this rank's tokens or of all
            ranks'.
        num_slots: number of rows before any were dropped. None if the gate names only rows that it keeps
            (expert choice, SoftMoE).
        drop_rate: dropped rows / num_slots, from 0 to 1.
        imbalance: rows of the busiest expert / mean rows of all experts. 1 is even. None without rows.
        rank_imbalance: rows of the busiest rank / mean rows of the ranks that experts are spread over. None
            unless statistics are those of all ranks. Example: tokens_per_expert (4, 2, 2, 0) has imbalance 2,
            and on two ranks rank_imbalance 1.5.
        path: the code that computed the call:

            - "not run": there was no call yet;
            - "pipeline": the pipeline engine, in chunks;
            - "one rank": the kernels of one rank;
            - "fused": COMET's kernels in both passes; "fused forward": in the forward pass only;
            - "persistent": FlashDMoE's kernels, one a pass;
            - "whole graph": a compiled graph of the whole model.
        n_forward, n_backward: number of chunks of each pass. None if the pass was not cut into chunks, or if
            there was none.
        restore: fates of T_DI and T_M between the passes, such as "communicate/recompute". None if buffers do
            not rotate (the pipeline then keeps both), or without a backward pass.
        tensors: bytes of T_I, T_DI, T_M, T_DO and T_O of this rank, from row counts and dtypes. Each is the
            size of the whole tensor, also if only parts of it exist at a time. T_M is missing if experts are
            modules.
        predicted: bytes of this rank in both passes for the rows that it had (`MoELayer.predict_memory`).
            None if they cannot be predicted.
        unpredicted: why not, or what the prediction does not count.
        forward, backward: seconds of the last recorded pass in each direction, of this rank, or means over
            all ranks. None if none was recorded.
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

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds of both passes in which something travels and nothing is computed.

        None if no pass was recorded.
        """
        seconds = [times.exposed for times in (self.forward, self.backward) if times is not None]
        return sum(seconds) if seconds else None

    @property
    def communication_seconds(self) -> float | None:
        """Seconds of both passes in which something travels. None if no pass was recorded."""
        seconds = [times.communication for times in (self.forward, self.backward) if times is not None]
        return sum(seconds) if seconds else None


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Bytes of the memory that all layers on a device share, as `pmoe.pool` counts them.

    device: name of the device.
    device_bytes, device_peak_bytes: ring slots on the device, now and at most.
    host_bytes, host_peak_bytes: memory on the host for what is offloaded, now and at most.
    """

    device: str
    device_bytes: int
    device_peak_bytes: int
    host_bytes: int
    host_peak_bytes: int


HEADER = ("layer", "path", "n", "pair", "rows", "dropped", "max / mean", "of ranks", "exposed ms", "peak MiB")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of all MoE layers of a model, in the model's order. ``str`` makes a table of them.

    num_ranks: number of ranks whose tokens are counted. 1 is this rank alone.
    """

    layers: tuple[LayerStats, ...]
    pools: tuple[PoolStats, ...]
    num_ranks: int

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data, for JSON."""
        return asdict(self)

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
        return "\n".join([f"the last forward pass, {whose}", table(rows, left=range(4)), *pools])


def stats(
    model: nn.Module,
    *,
    all_ranks: bool = False,
    group: dist.ProcessGroup | None = None,
    journal: Journal | None = None,
) -> Stats:
    """Returns what every `MoELayer` of ``model`` did in its last forward pass.

    Args:
        model: the model, or one layer.
        all_ranks: sum rows over all ranks of ``group``, and take the means of recorded seconds. This is one
            all-reduce, so every rank of the group must call it, with the same layers. Sizes and predicted
            bytes stay this rank's. It also warns about two mistakes: the ranks' experts have become equal
            since the first call (by a loop of `dist.broadcast`, or by an optimizer); or the ranks have
            different values of a gate, a shared expert, its gate or a callback, which must be the same on all
            ranks.
        group: the ranks to sum over, if all_ranks is True. None is the default group.
        journal: the journal of ``with pmoe.recording() as journal``, around the step. It gives the seconds.

    On CUDA it waits for row counts that are still on the device (after the kernels of one rank). With
    all_ranks it also waits for the values of layers that are spread over ranks, and for the sum.

    Raises TypeError if an argument has another type, ValueError for a group without all_ranks, RuntimeError
    if a peer is missing.
    """
    check_module(model=model)
    check_flag("all_ranks", all_ranks)
    check_kind((Journal, type(None)), "None or what pmoe.recording() gave", journal=journal)
    if group is not None and not all_ranks:
        raise ValueError("group must be None unless all_ranks is True, because nothing is reduced over it")
    layers = layers_of(model)
    statistics = [_of_layer(name, layer, journal) for name, layer in layers.items()]
    ranks = Ranks(group) if all_ranks else Ranks.single()
    if statistics and ranks.group is not None:
        statistics = _over_ranks(statistics, list(layers.values()), ranks)
    devices = dict.fromkeys(str(layer.ran.device) for layer in layers.values() if layer.ran is not None)
    return Stats(layers=tuple(statistics), pools=tuple(map(_of_pool, devices)), num_ranks=ranks.size)


finders: list[Callable[[nn.Module], Mapping[str, MoELayer]]] = []
"""Functions that name the layers of a model that are not its submodules. Integrations add theirs."""


def layers_of(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layers of a model by name, its submodules first."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    for finder in finders:
        layers |= finder(model)
    return layers


def imbalance(rows: Sequence[int]) -> float | None:
    """Returns the largest number over the mean of all; None if all are 0. Example: (3, 1, 0, 0) -> 3."""
    total = sum(rows)
    return max(rows) * len(rows) / total if total else None


# ---- one layer, on this rank


def _of_layer(name: str, layer: MoELayer, journal: Journal | None) -> LayerStats:
    """Returns the statistics of one layer on this rank.

    On CUDA it waits for row counts that are still on the device.
    """
    spans = [None if journal is None else journal.last(layer.experts, way) for way in ("forward", "backward")]
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
    )


def _predicted(layer: MoELayer, ran: RunReport) -> tuple[PredictedMemory | None, str]:
    """Returns (predicted bytes, what they do not count), or (None, why they are not predicted)."""
    if ran.path != "pipeline":
        return None, f"memory of the path {ran.path!r} is not predicted"
    if ran.backward is None:
        return None, "the last forward pass was without a backward pass"
    counts = layer.row_counts
    assert counts is not None
    try:
        predicted = layer.predict_memory(
            ran.num_tokens,
            replace(counts, depth={}),  # the chunks are those that were cut
            pipeline=ran.forward,
            pipeline_backward=ran.backward,
            memory_reuse=ran.restore,
        )
    except ValueError as error:
        return None, str(error)
    return predicted, "; ".join(predicted.unknown)


def _drop_rate(kept: int, num_slots: int | None) -> float | None:
    """Returns the share of slots that were dropped; None if the number of slots is not known."""
    if num_slots is None:
        return None
    return 1 - kept / num_slots if num_slots else 0.0


def _tensors(layer: MoELayer, ran: RunReport) -> dict[str, int]:
    """Returns the bytes of this rank's tensors.

    N is the number of rows that its experts computed, own tokens included.
    """
    counts = layer.row_counts
    element_size = ran.dtype.itemsize
    assert counts is not None
    num_rows = int(counts.recv.sum())
    token_bytes = ran.num_tokens * layer.d_model * element_size
    row_bytes = num_rows * layer.d_model * element_size
    columns = layer.layer_modules.experts.columns(ran.device.type).hidden
    hidden = {"T_M": num_rows * columns * element_size} if columns else {}
    return {"T_I": token_bytes, "T_DI": row_bytes, **hidden, "T_DO": row_bytes, "T_O": token_bytes}


def _of_pool(device: str) -> PoolStats:
    """Returns the bytes of a device's pool."""
    memory_pool = pool(device)
    return PoolStats(
        device=device,
        device_bytes=memory_pool.device.bytes_in_use,
        device_peak_bytes=memory_pool.device.peak_bytes,
        host_bytes=memory_pool.host.bytes_in_use,
        host_peak_bytes=memory_pool.host.peak_bytes,
    )


# ---- all ranks


def _over_ranks(found: Sequence[LayerStats], layers: Sequence[MoELayer], ranks: Ranks) -> list[LayerStats]:
    """Sums all numbers of all layers over the ranks, in one all-reduce.

    The numbers are float64, which is exact for integers up to 2**53. On rank 0 it warns about layers whose
    experts differed at the first call and are now equal on all ranks, and about dense parts whose values
    differ.
    """
    numbers = [_numbers(each) for each in found]
    marks = [_marks(each) for each in layers]
    numbers.append([float(power) for own in marks for mark in own for power in (mark, mark**2)])
    device = next((parameter.device for layer in layers for parameter in layer.parameters()), "cpu")
    summed = torch.tensor([each for own in numbers for each in own], dtype=torch.float64, device=device)
    with at_stage("summing statistics", ranks):
        dist.all_reduce(summed, group=ranks.group)
    *parts, powers = summed.cpu().split([len(own) for own in numbers])
    # n numbers are all equal if and only if n * sum(x**2) = sum(x)**2. So sums are enough to compare the
    # ranks.
    sums = powers.long().view(len(layers), -1, 2)
    are_same = (ranks.size * sums[..., 1] == sums[..., 0] ** 2).tolist()
    if ranks.rank == 0:
        for each, layer, (experts_are, *dense_are) in zip(found, layers, are_same, strict=True):
            _warn_of_values(each.name, layer, ranks, experts_are, dense_are)
    return [
        _with_numbers(each, layer.num_local_experts, part.tolist())
        for each, layer, part in zip(found, layers, parts, strict=True)
    ]


def _marks(layer: MoELayer) -> list[int]:
    """Returns 20 bits of a digest of the experts' values, and of each part of `DENSE`.

    Ranks compare them by their sums and sums of squares, so they are short: squares must be exact in float64.
    A mark is 0, and the values are not read, if a comparison could show nothing.
    """
    modules = layer.layer_modules
    texts = [sampled(modules.experts) if modules.cache.differed else ""]
    texts += dense_values(modules).values() if _is_spread(layer) else ["" for _ in DENSE]
    return [int(text[:5] or "0", 16) for text in texts]


def _is_spread(layer: MoELayer) -> bool:
    """Returns whether the layer is one layer on several ranks. Else each rank may have a model of its own."""
    return layer.ranks.size > 1 or layer.layer_modules.experts.is_parallelized


def _warn_of_values(
    name: str, layer: MoELayer, ranks: Ranks, experts_are_same: bool, dense_are_same: Sequence[bool]
) -> None:
    """Warns if experts are equal that must differ, or dense parts differ that must be equal."""
    name = name or "model"  # a layer that is looked at by itself
    cache = layer.layer_modules.cache
    if experts_are_same and cache.differed and set(layer.ranks.members) <= set(ranks.members):
        warn_once(f"{name}: {COPIED}")
    differ = [part for part, is_same in zip(DENSE, dense_are_same, strict=True) if not is_same]
    if differ:
        warn_once(
            f"{name}: the values of {', '.join(differ)} must be the same on every rank, and differ. "
            f"{SAME_VALUES}"
        )


def _numbers(each: LayerStats) -> list[float]:
    """Returns the numbers of a layer that are summed over ranks.

    They are num_slots, then for each pass (1 if it was recorded, 3 kinds of seconds), then rows by expert.
    """
    numbers: list[float] = [each.num_slots or 0]
    for seen in (each.forward, each.backward):
        numbers += [0.0] * 4 if seen is None else [1.0, seen.seconds, seen.communication, seen.exposed]
    return [*numbers, *each.tokens_per_expert]


def _with_numbers(each: LayerStats, num_local: int, numbers: Sequence[float]) -> LayerStats:
    """Returns a layer's statistics with the sums over all ranks. They are in the order of `_numbers`."""
    num_slots = None if each.num_slots is None else round(numbers[0])
    rows_E = tuple(round(rows) for rows in numbers[9:])
    by_rank = [sum(rows_E[first : first + num_local]) for first in range(0, len(rows_E), num_local)]
    ran = each.path != "not run"
    return replace(
        each,
        tokens_per_expert=rows_E,
        num_slots=num_slots,
        drop_rate=_drop_rate(sum(rows_E), num_slots) if ran else None,
        imbalance=imbalance(rows_E),
        rank_imbalance=imbalance(by_rank),
        forward=_mean(numbers[1:5]),
        backward=_mean(numbers[5:9]),
    )


def _mean(sums: Sequence[float]) -> Overlap | None:
    """Returns the mean seconds of the ranks that recorded the pass; None if no rank did."""
    num, seconds, communication, exposed = sums
    if not num:
        return None
    return Overlap(seconds=seconds / num, communication=communication / num, exposed=exposed / num)


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    """Returns a number as text, or "-" for None."""
    return "-" if value is None else form.format(value * scale)
