"""Output of train_lm.py: the progress bar, the curves, and the numbers of a run."""

from __future__ import annotations

import itertools
import json
import math
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

LINE_EVERY_SECONDS = 10.0


@dataclass
class History:
    """Curves of a run. Checkpoints hold it, so a resumed run draws the whole run.

    train_bytes, valid_bytes: training bytes seen so far, at each step and at each evaluation.
    train_loss, valid_loss: in nats a byte.
    gradient_norm: norm of the gradient, before clipping.
    """

    train_bytes: list[int] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    valid_bytes: list[int] = field(default_factory=list)
    valid_loss: list[float] = field(default_factory=list)


def bits(nats: float) -> float:
    """Converts nats to bits."""
    return nats / math.log(2)


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory that this process has held: of the GPU if it uses one, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Progress:
    """A tqdm bar if stderr is a terminal, else a line every 10 seconds. Only rank 0 prints."""

    def __init__(
        self, *, done: int, steps: int, bytes_per_step: int, device: torch.device, show: bool
    ) -> None:
        self.steps = steps
        self.bytes_per_step = bytes_per_step
        self.device = device
        self.show = show
        self.bar = open_bar(done, steps) if show and sys.stderr.isatty() else None
        self.last_line = time.monotonic()
        self.seconds_per_step = 0.0

    def update(self, step: int, loss: float, seconds: float) -> None:
        """Shows that step ``step`` is done and took ``seconds``, without evaluations and checkpoints."""
        weight = 0.1 if self.seconds_per_step else 1.0
        self.seconds_per_step += weight * (seconds - self.seconds_per_step)
        if not self.show:
            return
        text = (
            f"loss {loss:.3f}  {bits(loss):.3f} bits/byte  "
            f"{self.bytes_per_step / self.seconds_per_step / 1e3:.1f}k tokens/s  "
            f"peak {peak_memory_bytes(self.device) / 2**20:.0f} MiB"
        )
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif time.monotonic() - self.last_line >= LINE_EVERY_SECONDS or step == self.steps:
            self.last_line = time.monotonic()
            print(f"step {step}/{self.steps}  {text}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Prints a line that stays on the screen."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        elif self.show:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self.bar is not None:
            self.bar.close()


def open_bar(done: int, steps: int) -> Any:
    """Returns a tqdm bar, or None if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(initial=done, total=steps, unit="step", dynamic_ncols=True, smoothing=0.1)


def write_metrics(path: Path, settings: dict[str, Any], summary: dict[str, Any], history: History) -> None:
    """Writes settings, results and curves of a run as JSON."""
    path.write_text(json.dumps({"settings": settings, "summary": summary, "history": asdict(history)}) + "\n")


def draw_curves(path: Path, history: History, title: str, final_loss: float | None) -> None:
    """Draws losses over training bytes into a file.

    final_loss: validation loss of the last, longer evaluation; None if there was none.

    Raises ImportError if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    figure.suptitle(title)
    draw_losses(figure.subplots(), history, final_loss)
    figure.savefig(path, dpi=120)


def draw_losses(panel: Any, history: History, final_loss: float | None) -> None:
    """Draws the losses on one pair of matplotlib axes."""
    megabytes = [count / 1e6 for count in history.train_bytes]
    panel.plot(megabytes, history.train_loss, color="tab:blue", alpha=0.25, linewidth=0.8)
    panel.plot(megabytes, smooth(history.train_loss), color="tab:blue", label="training (smoothed)")
    panel.plot(
        [count / 1e6 for count in history.valid_bytes],
        history.valid_loss,
        color="tab:orange",
        marker="o",
        markersize=4,
        label="validation",
    )
    if final_loss is not None:
        label = f"validation, final: {final_loss:.3f}"
        panel.plot(
            megabytes[-1:],
            [final_loss],
            color="tab:red",
            marker="*",
            markersize=10,
            linestyle="",
            label=label,
        )
    panel.set(xlabel="training bytes (MB)", ylabel="loss (nats a byte)")
    every = sorted(history.train_loss + history.valid_loss)
    if every:
        panel.set_ylim(
            every[0] - 0.1, min(every[-1], 3 * every[0]) + 0.1
        )  # the first steps fall too fast to show
    panel.secondary_yaxis(
        "right", functions=(lambda x: x / math.log(2), lambda x: x * math.log(2))
    ).set_ylabel("bits a byte")
    panel.grid(alpha=0.3)
    panel.legend()


def smooth(values: list[float]) -> list[float]:
    """Returns the moving average over a fiftieth of the run around each value; fewer values at the ends."""
    reach = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    out = []
    for index in range(len(values)):
        first = max(0, index - reach)
        end = min(len(values), index + reach + 1)
        out.append((sums[end] - sums[first]) / (end - first))
    return out
