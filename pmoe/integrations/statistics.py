"""What the MoE layers of a model did in their last step: `stats`.

Everything is read from what the layers hold anyway; nothing is measured and, on CUDA, nothing waited for
before somebody asks. How long communication was waited for is known of steps that were recorded:

    with pmoe.recording() as journal:
        model(x).sum().backward()
    print(pmoe.stats(model, all_ranks=True, journal=journal))

Letters: T tokens, K choices, N rows, E experts, W ranks, M = d_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pmoe.comm.counts import Shared, at_stage
from pmoe.comm.ranks import Ranks
from pmoe.engine.arena import pool
from pmoe.engine.run import Journal
from pmoe.layer import MoELayer
from pmoe.layer.memory import check_predictable
from pmoe.layer.ran import Ran
from pmoe.planner.exposed import Overlap, overlap
from pmoe.planner.memory import PredictedMemory

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class LayerStats:
    """One layer's last forward pass and what was recorded of both passes.

    tokens_per_expert: rows kept for each of all experts, of this rank's tokens, or of all ranks'. num_slots:
    rows before any were dropped, None where the gate names only rows that it keeps (expert choice, SoftMoE).
    drop_rate: the share that was dropped, from 0 to 1. imbalance: rows of the busiest expert over the mean of
    all, 1 where even; rank_imbalance: the same of the ranks that experts are spread over, None unless all
    ranks' rows are counted; both None where there are no rows. Example: 8 rows in all, tokens_per_expert (4,
    2, 2, 0): imbalance 2; on two ranks rank_imbalance 1.5.

    path: who computed it: "pipeline" (in chunks, by the pipeline engine), "alone" (one rank's kernels),
    "fused", "fused forward"; "not run" before the first call. n_forward, n_backward: chunks of both passes
    as they were cut, None where a pass was not cut or there is none. restore: what became of T_DI and T_M
    between the passes, such as "communicate/recompute"; None where buffers do not rotate (the pipeline then
    keeps both), or there is no backward pass.

    tensors: bytes of T_I, T_DI, T_M, T_DO and T_O of this rank as row counts and types make them, each as a
    whole, wherever it is and whether or not it is ever held as a whole; T_M is left out where experts are
    modules. predicted: this rank's bytes of both passes (`MoELayer.predict_memory`) for the rows that
    came; None, and unpredicted says why, where they are not predicted.

    forward, backward: seconds of the last pass that was recorded in each direction, of this rank, or means
    over all ranks; None where none was.
    """

    name: str
    tokens_per_expert: tuple[int, ...]
    num_slots: int | None
    drop_rate: float | None
    imbalance: float | None
    rank_imbalance: float | None
    path: str
    n_forward: int | None
    n_backward: int | None
    restore: str | None
    tensors: dict[str, int]
    predicted: PredictedMemory | None
    unpredicted: str
    forward: Overlap | None
    backward: Overlap | None

    @property
    def exposed_seconds(self) -> float | None:
        """Of the last call's both passes, as far as they were recorded; None where none was."""
        found = [each.exposed for each in (self.forward, self.backward) if each is not None]
        return sum(found) if found else None

    @property
    def communication_seconds(self) -> float | None:
        """Likewise the time in which anything travels."""
        found = [each.communication for each in (self.forward, self.backward) if each is not None]
        return sum(found) if found else None


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Bytes of what all layers of a device share, as `pmoe.pool` counts them: ring slots on the device, and
    host memory of what is offloaded."""

    device: str
    device_bytes: int
    device_peak_bytes: int
    host_bytes: int
    host_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Of all MoE layers of a model, in the model's order. num_ranks: whose tokens are counted: 1 is this rank
    alone. ``str`` is a table."""

    layers: tuple[LayerStats, ...]
    pools: tuple[PoolStats, ...]
    num_ranks: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_told(self))


def stats(
    model: nn.Module,
    *,
    all_ranks: bool = False,
    group: dist.ProcessGroup | None = None,
    journal: Journal | None = None,
) -> Stats:
    """What every `MoELayer` of ``model`` did in its last forward pass, by the name that ``named_modules``
    gives it. Of a layer that is called several times in a step, only the last call is told of.

    all_ranks: sums rows over all ranks of ``group`` (the default group if None), and takes the means of
    recorded seconds: one all-reduce, so every rank of the group must call it, with the same layers. Sizes
    and predicted bytes stay this rank's. journal: of ``with pmoe.recording() as journal``, around the step.

    On CUDA this waits for the rows' counts of layers that one rank computed alone, and for the sum; nothing
    else does. Raises TypeError where an argument is of another type, RuntimeError where a peer is missing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model ({type(model).__name__}) must be a torch.nn.Module")
    if journal is not None and not isinstance(journal, Journal):
        raise TypeError(f"journal ({journal!r}) must be None or what pmoe.recording() gave")
    if group is not None and not all_ranks:
        raise ValueError("group must be None unless all_ranks is True: nothing is reduced")
    layers = layers_of(model)
    found = [_of_layer(name, layer, journal) for name, layer in layers.items()]
    num_ranks = 1
    if all_ranks and dist.is_available() and dist.is_initialized():
        num_ranks = dist.get_world_size(group)
        found = _over_ranks(found, list(layers.values()), group) if layers else []
    devices = dict.fromkeys(str(layer.ran.device) for layer in layers.values() if layer.ran is not None)
    return Stats(layers=tuple(found), pools=tuple(map(_of_pool, devices)), num_ranks=num_ranks)


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
    ran = layer.ran
    rows_E = tuple(layer.tokens_per_expert.tolist())
    recorded = {direction: _recorded(layer, journal, direction) for direction in DIRECTIONS}
    if ran is None:
        return LayerStats(
            name=name,
            tokens_per_expert=rows_E,
            num_slots=0,
            drop_rate=None,
            imbalance=None,
            rank_imbalance=None,
            path="not run",
            n_forward=None,
            n_backward=None,
            restore=None,
            tensors={},
            predicted=None,
            unpredicted="the layer has not run",
            **recorded,
        )
    predicted, why = _predicted(layer, ran)
    return LayerStats(
        name=name,
        tokens_per_expert=rows_E,
        num_slots=ran.num_slots,
        drop_rate=_drop_rate(sum(rows_E), ran.num_slots),
        imbalance=imbalance(rows_E),
        rank_imbalance=None,
        path=ran.path,
        n_forward=ran.forward,
        n_backward=ran.backward,
        restore=None if ran.restore is None else str(ran.restore),
        tensors=_tensors(layer, ran),
        predicted=predicted,
        unpredicted=why,
        **recorded,
    )


def _drop_rate(kept: int, num_slots: int | None) -> float | None:
    if num_slots is None:
        return None
    return 1 - kept / num_slots if num_slots else 0.0


def _recorded(layer: MoELayer, journal: Journal | None, direction: str) -> Overlap | None:
    spans = None if journal is None else journal.last(layer.experts, direction)
    return None if spans is None else overlap(spans)


def _tensors(layer: MoELayer, ran: Ran) -> dict[str, int]:
    """N is of the rows that this rank's experts computed, its own tokens' among them."""
    counts = layer.row_counts
    assert counts is not None
    num_rows = int(counts.recv.sum())
    tokens = ran.num_tokens * layer.d_model * ran.dtype.itemsize
    rows = num_rows * layer.d_model * ran.dtype.itemsize
    hidden = layer.experts.columns(ran.device.type).hidden
    found = {"T_I": tokens, "T_DI": rows, "T_M": num_rows * hidden * ran.dtype.itemsize}
    if not hidden:
        del found["T_M"]
    return {**found, "T_DO": rows, "T_O": tokens}


def _predicted(layer: MoELayer, ran: Ran) -> tuple[PredictedMemory | None, str]:
    if ran.path != "pipeline":
        return None, f"memory of the path {ran.path!r} is not predicted"
    if ran.backward is None:
        return None, "the last forward pass was without a backward pass"
    if ran.restore is None:
        return None, "only buffers that rotate are predicted, and memory_reuse is False"
    counts: Shared | None = layer.row_counts
    assert counts is not None
    try:
        check_predictable(layer, "row_counts", None)  # its message is without the counts
        found = layer.predict_memory(
            ran.num_tokens,
            replace(counts, depth={}),  # the chunks are those that were cut
            pipeline=ran.forward,
            pipeline_backward=ran.backward,
            memory_reuse=ran.restore,
        )
    except ValueError as error:
        return None, str(error)
    return found, ""


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


def _over_ranks(
    found: Sequence[LayerStats], layers: Sequence[MoELayer], group: dist.ProcessGroup | None
) -> list[LayerStats]:
    """One all-reduce of every number of every layer; float64 holds counts up to 2**53."""
    numbers = [_numbers(each) for each in found]
    device = next((parameter.device for layer in layers for parameter in layer.parameters()), "cpu")
    summed = torch.tensor([each for own in numbers for each in own], dtype=torch.float64, device=device)
    with at_stage("the sum of statistics", Ranks(group)):
        dist.all_reduce(summed, group=group)
    parts = summed.cpu().split([len(own) for own in numbers])
    return [
        _with_numbers(each, layer, part.tolist())
        for each, layer, part in zip(found, layers, parts, strict=True)
    ]


def _numbers(each: LayerStats) -> list[float]:
    """num_slots; for each pass whether it was recorded, and its seconds; then rows by expert."""
    told: list[float] = [each.num_slots or 0]
    for seen in (each.forward, each.backward):
        told += [0.0] * 4 if seen is None else [1.0, seen.seconds, seen.communication, seen.exposed]
    return [*told, *each.tokens_per_expert]


def _with_numbers(each: LayerStats, layer: MoELayer, numbers: Sequence[float]) -> LayerStats:
    num_slots = None if each.num_slots is None else round(numbers[0])
    rows_E = tuple(round(rows) for rows in numbers[9:])
    local = layer.num_local_experts
    by_rank = [sum(rows_E[first : first + local]) for first in range(0, len(rows_E), local)]
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


# ---- as text


def _told(found: Stats) -> list[str]:
    whose = "this rank's tokens" if found.num_ranks == 1 else f"the tokens of {found.num_ranks} ranks"
    if not found.layers:
        return ["no MoELayer in this model"]
    rows = [
        ["layer", "path", "n", "pair", "rows", "dropped", "max / mean", "of ranks", "exposed ms", "peak MiB"]
    ]
    for each in found.layers:
        degrees = f"{each.n_forward or '-'}/{each.n_backward or '-'}"
        rows.append(
            [
                each.name or "(the model)",
                each.path,
                "-" if degrees == "-/-" else degrees,
                each.restore or "-",
                f"{sum(each.tokens_per_expert):,}",
                _number(each.drop_rate, "{:.1%}"),
                _number(each.imbalance, "{:.2f}"),
                _number(each.rank_imbalance, "{:.2f}"),
                _number(each.exposed_seconds, "{:.3f}", 1e3),
                _number(None if each.predicted is None else each.predicted.peak, "{:,.1f}", 2**-20),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 4 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    for of in found.pools:
        lines.append(
            f"pool of {of.device}: at most {of.device_peak_bytes / 2**20:,.1f} MiB on the device, "
            f"{of.host_peak_bytes / 2**20:,.1f} MiB on the host"
        )
    return [f"the last forward pass, {whose}", *lines]


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
