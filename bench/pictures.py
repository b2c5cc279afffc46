"""Settings for pictures of benchmarks: 10 inches wide, text readable at the documentation's width."""

from __future__ import annotations

from typing import Any

from pmoe.planner.timeline import TEXT_SIZE

SIZES = ("font.size", "axes.titlesize", "figure.titlesize", "legend.fontsize")


def plotting() -> Any:
    """Returns matplotlib's pyplot, set to draw into files, with all text in size TEXT_SIZE."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(dict.fromkeys(SIZES, TEXT_SIZE))
    return pyplot
