"""Statistics of how evenly experts are loaded, over all calls of a training step: `ExpertUsage`.

`pmoe.stats` by itself knows only the last call of each layer. With gradient accumulation a step has several
calls, and `ExpertUsage` adds up the row counts of all of them. `scalars_of` summarizes the loads in a few
numbers, with the names that other systems log. There are as many numbers for 4,000 experts as for 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pmoe.arguments import check_flag, check_kind, check_module
from pmoe.call.decision import LastCall, LastRowCounts
from pmoe.call.shape_run import is_shape_run
from pmoe.checkpointing.replay import is_second_pass
from pmoe.integrations.model_layers import layers_of
from pmoe.layer import MoELayer

MOST_UNREAD = 64
"""Number of a layer's calls after which their row counts are read and added up.

Until then the counts stay on their device, so that most calls do not wait for a GPU.
"""


@dataclass(frozen=True, kw_only=True)
class LayerUsage:
    """The load of one layer's experts in all calls of a step, on this rank or on all ranks together.

    tokens_per_expert: for each of all E experts, the number of rows routed to it and not dropped.
    num_slots: number of rows before any were dropped. None if it is not known for a call (expert choice,
        SoftMoE).
    num_calls: number of calls that had rows. For all ranks together, a call is counted once on each rank.
    max_vio_sum: the sum over these calls of MaxVio = rows of the busiest expert / mean rows of an expert - 1
        (arXiv 2408.15664, Eq. 4).
    rank_imbalance: number of rows that the experts of the busiest rank get / mean of this number over ranks.
        None if this record is for one rank.
    """

    tokens_per_expert: tuple[int, ...]
    num_slots: int | None
    num_calls: int
    max_vio_sum: float
    rank_imbalance: float | None = None


class ExpertUsage:
    """Counts the rows of each expert over all calls of a model's layers, until `pmoe.stats` reads them.

        usage = pmoe.ExpertUsage(model)
        for step in range(steps):
            for x in micro_batches:
                loss_of(model(x)).backward()
            wandb.log(pmoe.stats(model, all_ranks=True, usage=usage).scalars(), step=step)

    Nothing is communicated before `pmoe.stats` is called. The second forward pass of activation checkpointing
    does not count. Calls inside a graph of ``torch.compile(backend="pmoe")`` do not count either; for these,
    `pmoe.stats` shows only the last call.

    Args:
        model: the model, or a single layer.
        training: True counts only calls in training mode, False only calls in eval mode. So an evaluation
            between two steps does not change the counts of a step.

    Raises TypeError for other types.
    """

    def __init__(self, model: nn.Module, *, training: bool = True) -> None:
        check_flag("training", training)
        self.training = training
        self._layers: dict[MoELayer, _Rows] = {}
        self._hooks: list[Any] = []
        self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """Also counts the calls of layers that were added to a model after this object was made.

        model: the model. Layers that are counted already are not counted twice.

        Raises TypeError if the model is no module.
        """
        check_module(model=model)
        for layer in layers_of(model).values():
            if layer not in self._layers:
                self._layers[layer] = _Rows(layer.num_experts)
                self._hooks.append(layer.register_forward_hook(self._count))

    def _count(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """Adds the row counts of a layer's call. This is the forward hook of each layer."""
        last: LastCall = layer.last  # type: ignore[assignment]  # a MoELayer has it
        # Dynamo traces this hook. The statements below would break the graph in which a layer is captured.
        if last.ran is None or last.ran.path == "whole graph":
            return
        if layer.training is not self.training or is_second_pass() or is_shape_run():
            return
        assert last.counts is not None
        assert isinstance(layer, MoELayer)
        self._layers[layer].add(last.counts, last.ran.num_slots)

    def take(self, layer: MoELayer) -> LayerUsage:
        """Returns the load of a layer's experts since the last `take`, on this rank, and resets the counts.

        The host waits for row counts that are still on the device.

        Raises TypeError if ``layer`` is no MoELayer.
        """
        check_kind(MoELayer, "a pmoe.MoELayer", layer=layer)
        rows = self._layers.setdefault(layer, _Rows(layer.num_experts))
        self._layers[layer] = _Rows(layer.num_experts)
        return rows.summed()

    def clear(self) -> None:
        """Resets the counts of all layers."""
        self._layers = {layer: _Rows(layer.num_experts) for layer in self._layers}

    def remove(self) -> None:
        """Stops counting: removes the forward hooks from the layers."""
        for hook in self._hooks:
            hook.remove()


class _Rows:
    """The row counts of one layer, summed over its calls.

    The counts of the newest calls may still be on the device. They are read and added later, so that calls do
    not wait for the device.

    num_experts: number of experts of all ranks.
    """

    def __init__(self, num_experts: int) -> None:
        self._unread: list[LastRowCounts] = []
        self._rows = [0] * num_experts
        self._slots: int | None = 0
        self._calls = 0
        self._max_vio = 0.0

    def add(self, counts: LastRowCounts, num_slots: int | None) -> None:
        """Adds the row counts of a call.

        Row counts that are on a device are read only after `MOST_UNREAD` calls.

        counts: the row counts.
        num_slots: number of rows before any were dropped; None if it is not known.
        """
        self._unread.append(counts)
        self._slots = None if self._slots is None or num_slots is None else self._slots + num_slots
        if len(self._unread) == MOST_UNREAD:
            self._read()

    def _read(self) -> None:
        """Reads the row counts that are not read yet, and adds them to the sums."""
        for counts in self._unread:
            rows = counts.kept_E().tolist()
            self._rows = [sum(pair) for pair in zip(self._rows, rows, strict=True)]
            if sum(rows):
                self._calls += 1
                self._max_vio += max_violation(rows)
        self._unread = []

    def summed(self) -> LayerUsage:
        """Returns the sums over all calls so far."""
        self._read()
        return LayerUsage(
            tokens_per_expert=tuple(self._rows),
            num_slots=self._slots,
            num_calls=self._calls,
            max_vio_sum=self._max_vio,
        )


# ---- numbers about load


def max_violation(rows: Sequence[int]) -> float:
    """Returns MaxVio = rows of the busiest expert / mean rows of an expert - 1; 0 if there are no rows.

    rows: the number of rows of each expert.

    Example: (3, 1, 0, 0) -> 2.
    """
    total = sum(rows)
    return max(rows) * len(rows) / total - 1 if total else 0.0


def entropy(rows: Sequence[int]) -> float:
    """Returns how evenly rows are spread over experts: entropy of their shares / entropy of equal shares.

    The result is 1 for equal shares, and 0 if one expert has all rows. It is also 1 if there are no rows, or
    only one expert.

    rows: the number of rows of each expert.
    """
    total = sum(rows)
    if not total or len(rows) == 1:
        return 1.0
    shares = [count / total for count in rows if count]
    return -sum(share * math.log(share) for share in shares) / math.log(len(rows))


WORST: Mapping[str, Callable[[Sequence[float]], float]] = {
    "entropy": min,
    "max_share": max,
    "active_fraction": min,
    "max_vio_micro": max,
    "max_vio_global": max,
    "drop_rate": max,
    "rank_imbalance": max,
}
"""Names of the numbers about a layer's load, each with a function that picks the worst of several layers."""


def load_numbers(usage: LayerUsage) -> dict[str, float]:
    """Returns a dict of numbers about the load of a layer's experts. Numbers that are not known are left out.

        entropy            how evenly rows are spread over experts, from 0 to 1 (`entropy`)
        max_share          fraction of all rows that the busiest expert has
        active_fraction    fraction of the experts that have any rows
        max_vio_micro      MaxVio (`max_violation`), a mean over calls and ranks
        max_vio_global     MaxVio of the rows of all calls and ranks together
        drop_rate          fraction of rows that were dropped
        rank_imbalance     rows of the busiest rank / mean rows of a rank

    usage: the row counts of the layer.
    """
    rows = usage.tokens_per_expert
    total = sum(rows)
    numbers = {
        "entropy": entropy(rows),
        "max_share": max(rows) / total if total else 0.0,
        "active_fraction": sum(count > 0 for count in rows) / len(rows) if total else 1.0,
        "max_vio_micro": usage.max_vio_sum / max(usage.num_calls, 1),
        "max_vio_global": max_violation(rows),
    }
    if usage.num_slots is not None:
        numbers["drop_rate"] = 1 - total / usage.num_slots if usage.num_slots else 0.0
    if usage.rank_imbalance is not None:
        numbers["rank_imbalance"] = usage.rank_imbalance
    return numbers


def scalars_of(usages: Sequence[LayerUsage]) -> dict[str, float]:
    """Returns a dict of numbers about the load of all layers: the mean over layers, and the worst layer.

    Names are "moe/entropy_mean", "moe/entropy_min", "moe/max_vio_global_max" and so on: at most two for each
    name in `WORST`, for any number of layers and experts (`load_numbers` explains the names).

    usages: the row counts of each layer.
    """
    by_layer = [load_numbers(usage) for usage in usages]
    scalars: dict[str, float] = {}
    for name, worst in WORST.items():
        values = [numbers[name] for numbers in by_layer if name in numbers]
        if values:
            scalars[f"moe/{name}_mean"] = sum(values) / len(values)
            scalars[f"moe/{name}_{'min' if worst is min else 'max'}"] = worst(values)
    return scalars


# ---- all ranks


def reduced_numbers(usage: LayerUsage) -> list[float]:
    """Returns a layer's numbers as a flat list, to be summed over ranks.

    They are, in order: the number of rows of each of E experts; the number of rows before any were dropped;
    the number of calls; and the sum over the calls of MaxVio, which is rows of the busiest expert / mean rows
    of an expert - 1.

    usage: the layer's load on this rank.
    """
    return [*usage.tokens_per_expert, usage.num_slots or 0, usage.num_calls, usage.max_vio_sum]


def with_reduced(usage: LayerUsage, num_local: int, numbers: Sequence[float]) -> LayerUsage:
    """Returns a layer's load on all ranks together.

    usage: the layer's load on this rank.
    num_local: number of experts of a rank.
    numbers: the results of `reduced_numbers`, summed over all ranks.
    """
    *rows, slots, calls, max_vio = numbers
    counts = tuple(round(count) for count in rows)
    by_rank = [sum(counts[first : first + num_local]) for first in range(0, len(counts), num_local)]
    return replace(
        usage,
        tokens_per_expert=counts,
        num_slots=None if usage.num_slots is None else round(slots),
        num_calls=round(calls),
        max_vio_sum=max_vio,
        rank_imbalance=max_violation(by_rank) + 1,
    )
