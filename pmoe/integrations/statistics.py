"""What the MoE layers of a model did in their last step: `stats`.

Everything is read from what the layers hold anyway; nothing is measured and, on CUDA, nothing waited for
before somebody asks. How long communication was waited for is known of steps within `pmoe.recording`.

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
from pmoe.call.decision import Ran
from pmoe.comm.ranks import Ranks, at_stage
from pmoe.decide.dense_values import DENSE, SAME_VALUES, dense_values
from pmoe.engine.arena import pool
from pmoe.engine.recording import Journal
from pmoe.experts.wrapped import COPIED, sampled
from pmoe.layer import MoELayer
from pmoe.planner.memory import PredictedMemory
from pmoe.planner.timeline import Overlap, overlap
from pmoe.text import table
from pmoe.warn import warn_once


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """One layer's last forward pass, and what was recorded of both passes. Defaults are those of no call.

    Attributes:
        name: as ``named_modules`` gives it.
        tokens_per_expert: (E,) rows kept for each of all experts, of this rank's tokens or of all ranks'.
        num_slots: rows before any were dropped; None where the gate names only rows that it keeps (expert
            choice, SoftMoE).
        drop_rate: dropped rows over num_slots, from 0 to 1.
        imbalance: rows of the busiest expert over the mean of all, 1 where even; None without rows.
        rank_imbalance: the same of the ranks that experts are spread over; None unless all ranks are counted.
            Example: tokens_per_expert (4, 2, 2, 0): imbalance 2; on two ranks rank_imbalance 1.5.
        path: who computed it: "pipeline" (in chunks, by the pipeline engine), "alone" (one rank's kernels),
            "fused", "fused forward"; "not run" before the first call.
        n_forward, n_backward: chunks of both passes; None where a pass was not cut or there is none.
        restore: the fates of T_DI and T_M between the passes ("communicate/recompute"); None where buffers do
            not rotate (the pipeline then keeps both), or without a backward pass.
        tensors: bytes of T_I, T_DI, T_M, T_DO and T_O of this rank by row counts and types, each as a whole,
            whether or not it is ever held as one; without T_M where experts are modules.
        predicted: this rank's bytes of both passes (`MoELayer.predict_memory`) for the rows that came; None
            where they are not predicted. unpredicted says why, or what they do not count.
        forward, backward: seconds of the last recorded pass in each direction, of this rank, or means over
            all ranks; None where none was recorded.
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
        """Of both passes of the last call, as far as they were recorded; None where none was."""
        found = [each.exposed for each in (self.forward, self.backward) if each is not None]
        return sum(found) if found else None

    @property
    def communication_seconds(self) -> float | None:
        """The time of both passes in which anything travels; None where none was recorded."""
        found = [each.communication for each in (self.forward, self.backward) if each is not None]
        return sum(found) if found else None


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Bytes that all layers of a device share, as `pmoe.pool` counts them.

    On the device they are ring slots, on the host memory of what is offloaded.
    """

    device: str
    device_bytes: int
    device_peak_bytes: int
    host_bytes: int
    host_peak_bytes: int


HEADER = ("layer", "path", "n", "pair", "rows", "dropped", "max / mean", "of ranks", "exposed ms", "peak MiB")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Of all MoE layers of a model, in the model's order. ``str`` is a table.

    num_ranks: whose tokens are counted; 1 is this rank alone.
    """

    layers: tuple[LayerStats, ...]
    pools: tuple[PoolStats, ...]
    num_ranks: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.layers:
            return "no MoELayer in this model"
        whose = "this rank's tokens" if self.num_ranks == 1 else f"the tokens of {self.num_ranks} ranks"
        rows: list[Sequence[str]] = [HEADER]
        for each in self.layers:
            rows.append(
                [
                    each.name or "(the model)",
                    each.path,
                    f"{each.n_forward or '-'}/{each.n_backward or '-'}".replace("-/-", "-"),
                    each.restore or "-",
                    f"{sum(each.tokens_per_expert):,}",
                    _number(each.drop_rate, "{:.1%}"),
                    _number(each.imbalance, "{:.2f}"),
                    _number(each.rank_imbalance, "{:.2f}"),
                    _number(each.exposed_seconds, "{:.3f}", 1e3),
                    _number(None if each.predicted is None else each.predicted.peak, "{:,.1f}", 2**-20),
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
    """What every `MoELayer` of ``model`` did in its last forward pass.

    Args:
        all_ranks: sums rows over all ranks of ``group`` (the default group if None), and takes the means of
            recorded seconds: one all-reduce, so every rank of the group must call it, with the same layers.
            Sizes and predicted bytes stay this rank's. Warns where a loop of `dist.broadcast` or an optimizer
            has made the ranks' experts equal since the first call, and where ranks have other values of a
            gate, a shared expert, its gate or a callback, which must be alike.
        journal: of ``with pmoe.recording() as journal``, around the step.

    On CUDA this waits for the row counts of layers that one rank computed alone, for the sum, and before it
    for values of layers that are spread over ranks; nothing else does. Raises TypeError where an
    argument is of another type, ValueError for a group that is not used, RuntimeError where a peer is
    missing.
    """
    check_module(model=model)
    check_flag("all_ranks", all_ranks)
    check_kind((Journal, type(None)), "None or what pmoe.recording() gave", journal=journal)
    if group is not None and not all_ranks:
        raise ValueError("group must be None unless all_ranks is True: nothing is reduced")
    layers = layers_of(model)
    found = [_of_layer(name, layer, journal) for name, layer in layers.items()]
    ranks = Ranks(group) if all_ranks else Ranks.single()
    if found and ranks.group is not None:
        found = _over_ranks(found, list(layers.values()), ranks)
    devices = dict.fromkeys(str(layer.ran.device) for layer in layers.values() if layer.ran is not None)
    return Stats(layers=tuple(found), pools=tuple(map(_of_pool, devices)), num_ranks=ranks.size)


finders: list[Callable[[nn.Module], Mapping[str, MoELayer]]] = []
"""Of integrations whose layers are no submodules of a model: each names those that it made for one."""


def layers_of(model: nn.Module) -> dict[str, MoELayer]:
    """The MoE layers of a model by name, its submodules first."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, MoELayer)}
    for finder in finders:
        found |= finder(model)
    return found


def imbalance(rows: Sequence[int]) -> float | None:
    """The largest over the mean; None where all are 0. Example: (3, 1, 0, 0) -> 3."""
    total = sum(rows)
    return max(rows) * len(rows) / total if total else None


# ---- one layer, on this rank


def _of_layer(name: str, layer: MoELayer, journal: Journal | None) -> LayerStats:
    """On CUDA it waits for row counts that are still on the device."""
    spans = [None if journal is None else journal.last(layer.experts, way) for way in ("forward", "backward")]
    forward, backward = (None if each is None else overlap(each) for each in spans)
    ran, rows_E = layer.ran, tuple(layer.tokens_per_expert.tolist())
    found = LayerStats(name=name, tokens_per_expert=rows_E, forward=forward, backward=backward)
    if ran is None:
        return found
    predicted, unpredicted = _predicted(layer, ran)
    return replace(
        found,
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


def _predicted(layer: MoELayer, ran: Ran) -> tuple[PredictedMemory | None, str]:
    """The bytes, or None and why not."""
    if ran.path != "pipeline":
        return None, f"memory of the path {ran.path!r} is not predicted"
    if ran.backward is None:
        return None, "the last forward pass was without a backward pass"
    counts = layer.row_counts
    assert counts is not None
    try:
        found = layer.predict_memory(
            ran.num_tokens,
            replace(counts, depth={}),  # the chunks are those that were cut
            pipeline=ran.forward,
            pipeline_backward=ran.backward,
            memory_reuse=ran.restore,
        )
    except ValueError as error:
        return None, str(error)
    return found, "; ".join(found.unknown)


def _drop_rate(kept: int, num_slots: int | None) -> float | None:
    if num_slots is None:
        return None
    return 1 - kept / num_slots if num_slots else 0.0


def _tensors(layer: MoELayer, ran: Ran) -> dict[str, int]:
    """N counts the rows that this rank's experts computed, its own tokens' among them."""
    counts, item = layer.row_counts, ran.dtype.itemsize
    assert counts is not None
    num_rows = int(counts.recv.sum())
    tokens, rows = ran.num_tokens * layer.d_model * item, num_rows * layer.d_model * item
    columns = layer.parts.experts.columns(ran.device.type).hidden
    hidden = {"T_M": num_rows * columns * item} if columns else {}
    return {"T_I": tokens, "T_DI": rows, **hidden, "T_DO": rows, "T_O": tokens}


def _of_pool(device: str) -> PoolStats:
    found = pool(device)
    return PoolStats(
        device=device,
        device_bytes=found.device.bytes_in_use,
        device_peak_bytes=found.device.peak_bytes,
        host_bytes=found.host.bytes_in_use,
        host_peak_bytes=found.host.peak_bytes,
    )


# ---- all ranks


def _over_ranks(found: Sequence[LayerStats], layers: Sequence[MoELayer], ranks: Ranks) -> list[LayerStats]:
    """One all-reduce of every number of every layer; float64 holds counts up to 2**53. Rank 0 warns where
    experts that differed at a layer's first call are the same on all of its ranks, or dense parts are not."""
    numbers = [_numbers(each) for each in found]
    marks = [_marks(each) for each in layers]
    numbers.append([float(power) for own in marks for mark in own for power in (mark, mark**2)])
    device = next((parameter.device for layer in layers for parameter in layer.parameters()), "cpu")
    summed = torch.tensor([each for own in numbers for each in own], dtype=torch.float64, device=device)
    with at_stage("the sum of statistics", ranks):
        dist.all_reduce(summed, group=ranks.group)
    *parts, powers = summed.cpu().split([len(own) for own in numbers])
    # n numbers are all equal exactly where n * sum(x**2) = sum(x)**2.
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
    """20 bits of digests: of the experts' values, then of each of `DENSE`; 0 where they could tell nothing,
    and are not read. Their squares are exact in float64."""
    parts = layer.parts
    texts = [sampled(parts.experts) if parts.known.differed else ""]
    texts += dense_values(parts).values() if _is_spread(layer) else ["" for _ in DENSE]
    return [int(text[:5] or "0", 16) for text in texts]


def _is_spread(layer: MoELayer) -> bool:
    """Whether the layer is one among ranks. Others may be models of their own."""
    return layer.ranks.size > 1 or layer.parts.experts.is_parallelized


def _warn_of_values(
    name: str, layer: MoELayer, ranks: Ranks, experts_are_same: bool, dense_are_same: Sequence[bool]
) -> None:
    name = name or "model"  # a layer that is looked at by itself
    known = layer.parts.known
    if experts_are_same and known.differed and set(layer.ranks.members) <= set(ranks.members):
        warn_once(f"{name}: {COPIED}")
    differ = [part for part, is_same in zip(DENSE, dense_are_same, strict=True) if not is_same]
    if differ:
        warn_once(
            f"{name}: the values of {', '.join(differ)} must be the same on every rank, and differ. "
            f"{SAME_VALUES}"
        )


def _numbers(each: LayerStats) -> list[float]:
    """num_slots; for each pass whether it was recorded, and its seconds; then rows by expert."""
    numbers: list[float] = [each.num_slots or 0]
    for seen in (each.forward, each.backward):
        numbers += [0.0] * 4 if seen is None else [1.0, seen.seconds, seen.communication, seen.exposed]
    return [*numbers, *each.tokens_per_expert]


def _with_numbers(each: LayerStats, num_local: int, numbers: Sequence[float]) -> LayerStats:
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
    num, seconds, communication, exposed = sums
    if not num:
        return None
    return Overlap(seconds=seconds / num, communication=communication / num, exposed=exposed / num)


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
