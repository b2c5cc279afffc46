"""The numbers of a run for TensorBoard, whose package is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pmoe.integrations.run_folder import ScalarRow
from pmoe.integrations.statistics import LayerStats, Stats

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RATIOS = ("drop_rate", "imbalance", "rank_imbalance")
DEGREES = ("n_forward", "n_backward")
SECONDS = ("communication_seconds", "exposed_seconds")


class Board:
    """Writes event files to ``folder``, which the first `show` makes.

    Raises ImportError where the package tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        summary_writer()
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def show(self, scalars: Sequence[ScalarRow], step: int, found: Stats | None) -> None:
        """Adds scalars, and a step's statistics; hides what an earlier run wrote of the first step on."""
        if not scalars:
            return
        if self._writer is None:
            self._writer = summary_writer()(str(self._folder), purge_step=scalars[0].step)
        for each in scalars:
            self._writer.add_scalar(each.name, each.value, each.step)
        for layer in () if found is None else found.layers:
            _show_layer(self._writer, step, layer)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _show_layer(writer: SummaryWriter, step: int, layer: LayerStats) -> None:
    numbers = {name: getattr(layer, name) for name in (*RATIOS, *DEGREES, *SECONDS)}
    numbers["predicted_peak_bytes"] = None if layer.predicted is None else layer.predicted.peak
    for name, value in numbers.items():
        if value is not None:
            writer.add_scalar(f"pmoe/{name}/{layer.name}", value, step)
    rows_E = torch.tensor(layer.tokens_per_expert)
    writer.add_histogram(f"pmoe/tokens_per_expert/{layer.name}", rows_E, step)


def summary_writer() -> type[SummaryWriter]:
    """TensorBoard's class. Raises ImportError, with the way out, where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"tensorboard (True) must be False, or installed (pip install 'pmoe[tensorboard]'): {error}"
        ) from None
    return SummaryWriter
