"""`StatsWriter`: what `pmoe.stats` and a script's own numbers say over a training run, as CSV files and for
TensorBoard. `pmoe report RUN_DIR` makes a page of them.

    with StatsWriter("runs/1", model, every=50, settings=vars(arguments)) as writer:
        for step in range(1, steps + 1):
            loss = train_step()
            writer.step(step, loss=loss)
"""

from __future__ import annotations

import contextlib
import datetime
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe import __version__
from pmoe.engine.run import Journal, recording
from pmoe.integrations.run_folder import (
    HOST_POOL_PEAK,
    LAYER_HEADER,
    LAYERS,
    POOL_PEAK,
    RUN,
    SCALAR_HEADER,
    SCALARS,
    TIME,
    add_session,
    append,
    claim,
    layer_line,
    mend,
)
from pmoe.integrations.statistics import Stats, layers_of, stats

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class StatsWriter:
    """Writes the numbers of a run to ``run_dir``: scalars of every step, and each MoE layer's statistics
    every so many steps.

    Every rank makes one and calls `step` alike; rank 0 of ``group`` writes. Statistics are of all ranks of
    the group (the default group if None): one all-reduce each ``every`` steps. Scalars are rank 0's: reduce
    them before, if the others' matter. A tensor among them is read when the statistics are, so no step waits
    for the device because of it; a crash loses what came since.

    A folder that has data is continued. Where the run goes on from an earlier step, the later lines hold.
    One writer a folder at a time: another one is refused until the first is closed or its process ends.

    A layer that a step calls several times, as where gradients are accumulated, is told of by its last call.

    every: steps between statistics; the first call has some, too. tensorboard: also write event files to
    ``run_dir``/tensorboard. exposed: record the passes of each step that is told of, but for the first, for
    exposed communication times; recording slows these steps a little. settings: of the run, plain data, for
    the report.

    Once training runs, a file that cannot be written, as on a full disk, stops nothing: rank 0 warns, and
    what it has to write waits for the next time.

    Raises, on every rank, OSError or ValueError where the folder cannot be written, holds something else or
    has another writer, TypeError where settings are no plain data, ImportError where tensorboard is asked for
    and not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        model: nn.Module,
        *,
        every: int = 50,
        tensorboard: bool = False,
        exposed: bool = True,
        settings: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model ({type(model).__name__}) must be a torch.nn.Module")
        if not isinstance(every, int) or isinstance(every, bool):
            raise TypeError(f"every ({every!r}) must be an int")
        if every < 1:
            raise ValueError(f"every ({every}) must be at least 1")
        if not isinstance(settings, Mapping | None):
            raise TypeError(f"settings ({type(settings).__name__}) must be a dict, such as vars(arguments)")
        self.folder, self.every, self.exposed = Path(run_dir), every, exposed
        self._model, self._group = model, group
        several = dist.is_available() and dist.is_initialized()
        self.writes = not several or dist.get_rank(group) == 0
        self._last: int | None = None
        self._claim: BinaryIO | None = None
        self._described: dict[str, Any] | None = None
        self._rows: list[list[object]] = []
        self._scalars: list[tuple[int, str, float | Tensor]] = []
        self._recording = contextlib.ExitStack()
        self._journal: Journal | None = None
        self._wants_board = tensorboard
        self._board: SummaryWriter | None = None
        self._session = _session(model, settings or {}, dist.get_world_size(group) if several else 1)
        told: list[Exception | None] = [None]
        if self.writes:
            try:
                self._open()
            except (OSError, TypeError, ValueError, ImportError) as error:
                told = [error]
                self._leave()
        if several:
            dist.broadcast_object_list(told, group_src=0, group=group)
        if told[0] is not None:
            raise told[0]

    def _open(self) -> None:
        if self._wants_board:
            _summary_writer()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim = claim(self.folder)
        mend(self.folder / SCALARS, SCALAR_HEADER)
        mend(self.folder / LAYERS, LAYER_HEADER)
        add_session(self.folder / RUN, self._session)

    def step(self, step: int, **scalars: float | Tensor) -> Stats | None:
        """After a training step: notes the scalars, and where it is time writes all that is new. Steps
        ascend. Returns the statistics of all ranks where some were due, on every rank.

        Raises TypeError or ValueError for a step that does not ascend, a scalar that is no number, or a name
        that cannot be printed.
        """
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"step ({step!r}) must be an int")
        if self._last is not None and step <= self._last:
            raise ValueError(f"step ({step}) must be greater than the last one ({self._last})")
        self._add(step, scalars)
        is_first = self._last is None
        is_due = is_first or step % self.every == 0
        stride = 1 if self._last is None else step - self._last
        self._last = step
        found = None
        if is_due:
            self._recording.close()
            found = stats(self._model, all_ranks=True, group=self._group, journal=self._journal)
            self._journal = None
            if self.writes:
                if is_first:  # some layers are made by a model's first call
                    self._described = {**self._session, "layers": _describe(self._model)}
                self._add_statistics(step, found)
                self._write("waits for the next time", (step, found))
        if self.exposed and (step + stride) % self.every == 0 and self._journal is None:
            self._journal = self._recording.enter_context(recording())
        return found

    def note(self, **scalars: float | Tensor) -> None:
        """More scalars of the last step, such as a validation's: on any rank, no collective is behind it."""
        if self._last is None:
            raise ValueError("note must be called after a step")
        self._add(self._last, scalars)

    def _add(self, step: int, scalars: Mapping[str, float | Tensor]) -> None:
        found = [(step, name, _number(name, value)) for name, value in scalars.items()]
        if self.writes:
            self._scalars += found

    def _add_statistics(self, step: int, found: Stats) -> None:
        self._rows += [layer_line(step, each) for each in found.layers]
        self._scalars.append((step, TIME, time.time()))
        if found.pools:
            device = sum(each.device_peak_bytes for each in found.pools)
            host = sum(each.host_peak_bytes for each in found.pools)
            self._scalars += [(step, POOL_PEAK, device), (step, HOST_POOL_PEAK, host)]

    def _write(self, otherwise: str, shown: tuple[int, Stats] | None = None) -> None:
        """All that waits."""
        with self._stops_nothing(otherwise):
            if self._described is not None:
                add_session(self.folder / RUN, self._described, instead=True)
                self._described = None
            append(self.folder / LAYERS, LAYER_HEADER, self._rows)
            self._rows.clear()
            lines = [(step, name, float(value)) for step, name, value in self._scalars]
            append(self.folder / SCALARS, SCALAR_HEADER, lines)
            self._scalars.clear()
            if self._wants_board:
                self._show(lines, shown)

    @contextlib.contextmanager
    def _stops_nothing(self, otherwise: str) -> Iterator[None]:
        """Warns where a file cannot be written; ``otherwise`` says what becomes of what was for it. An error
        on this rank alone would leave the others waiting in their next collective."""
        try:
            yield
        except OSError as error:
            told = f"pmoe: StatsWriter cannot write to {self.folder}; what it has {otherwise}: {error}"
            warnings.warn(told, RuntimeWarning, stacklevel=5)

    def _open_board(self, step: int) -> SummaryWriter:
        """What an earlier run wrote of this step and those behind it is not shown."""
        if self._board is None:
            self._board = _summary_writer()(str(self.folder / "tensorboard"), purge_step=step)
        return self._board

    def _show(self, lines: Sequence[tuple[int, str, float]], shown: tuple[int, Stats] | None) -> None:
        if not lines:
            return
        board = self._open_board(lines[0][0])
        for step, name, value in lines:
            board.add_scalar(name, value, step)
        if shown is not None:
            self._show_layers(board, *shown)
        board.flush()

    def _show_layers(self, board: SummaryWriter, step: int, found: Stats) -> None:
        for each in found.layers:
            numbers = {
                "drop_rate": each.drop_rate,
                "imbalance": each.imbalance,
                "rank_imbalance": each.rank_imbalance,
                "n_forward": each.n_forward,
                "n_backward": each.n_backward,
                "communication_seconds": each.communication_seconds,
                "exposed_seconds": each.exposed_seconds,
                "predicted_peak_bytes": None if each.predicted is None else each.predicted.peak,
            }
            for name, value in numbers.items():
                if value is not None:
                    board.add_scalar(f"pmoe/{name}/{each.name}", value, step)
            board.add_histogram(
                f"pmoe/tokens_per_expert/{each.name}", torch.tensor(each.tokens_per_expert), step
            )

    def close(self) -> None:
        """Writes what is still waiting, and leaves the folder to others. No collective: ranks may close at
        different times."""
        self._recording.close()
        self._journal = None
        if self.writes:
            self._write("is lost")
        if self._board is not None:
            with self._stops_nothing("is lost"):
                self._board.close()
            self._board = None
        self._leave()

    def _leave(self) -> None:
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def __enter__(self) -> StatsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _summary_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"tensorboard (True) must be False, or the package installed (pip install tensorboard): {error}"
        ) from None
    return SummaryWriter


def _number(name: str, value: object) -> float | Tensor:
    """A tensor stays one, detached: reading it would wait for its device."""
    if not name.isprintable():  # one line, and text that can be encoded
        raise ValueError(f"a scalar's name ({name!r}) must be printable")
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            told = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            raise TypeError(f"{name} ({told}) must be one real number")
        return value.detach().clone()
    try:
        return float(value)  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError):
        raise TypeError(f"{name} ({value!r}) must be a number") from None


def _session(model: nn.Module, settings: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    on_cuda = device.type == "cuda"
    return {
        "when": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "ranks": num_ranks,
        "backend": dist.get_backend() if dist.is_available() and dist.is_initialized() else None,
        "device": torch.cuda.get_device_name(device) if on_cuda else platform.processor() or device.type,
        "versions": {
            "pmoe": __version__,
            "torch": torch.__version__,
            "CUDA": torch.version.cuda if on_cuda else None,
            "Python": platform.python_version(),
        },
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "settings": dict(settings),
    }


def _describe(model: nn.Module) -> list[dict[str, Any]]:
    """How each layer was built."""
    return [
        {
            "layer": name,
            "d_model": each.d_model,
            "d_hidden": each.d_hidden,
            "num_experts": each.num_experts,
            "top_k": each.top_k,
            "gate": type(each.gate).__name__,
            "experts": type(each.experts).__name__,
            "ranks": each.ranks.size,
            "capacity_factor": each.capacity_factor,
            "pipeline": each.pipeline,
            "pipeline_backward": each.pipeline_backward,
            "memory_reuse": each.restore if isinstance(each.restore, bool) else str(each.restore),
            "memory_budget": each.memory_budget,
            "fused": each.fused,
        }
        for name, each in layers_of(model).items()
    ]
