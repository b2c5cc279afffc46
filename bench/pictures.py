"""Pictures of benchmarks: 10 inches wide, with text that can be read at the width of the documentation."""

from __future__ import annotations

from typing import Any

from pmoe.planner.timeline import TEXT_SIZE

SIZES = ("font.size", "axes.titlesize", "figure.titlesize", "legend.fontsize")


def plotting() -> Any:
    """matplotlib's pyplot, which draws into files, all text in TEXT_SIZE."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(dict.fromkeys(SIZES, TEXT_SIZE))
    return pyplot
