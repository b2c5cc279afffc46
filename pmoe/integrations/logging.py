"""`StatsWriter`: logs a training run to a folder, as CSV files and optionally TensorBoard event files.

It logs numbers of the training script, such as losses, and `pmoe.stats` of the model's MoE layers:

    with StatsWriter("runs/1", model, every=50, settings=vars(arguments)) as writer:
        for step in range(1, steps + 1):
            loss = train_step()
            writer.step(step, loss=loss)

``pmoe report runs/1`` then makes an HTML page of the files.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe import __version__
from pmoe.arguments import check_count, check_flag, check_int, check_kind, check_module, check_path
from pmoe.comm.agreement import all_fail_together
from pmoe.comm.ranks import Ranks
from pmoe.engine.lanes.recorder import Journal, recording
from pmoe.integrations import run_folder as files
from pmoe.integrations.expert_usage import ExpertUsage
from pmoe.integrations.model_layers import layers_of
from pmoe.integrations.routing_trace import record_routing, write_routing
from pmoe.integrations.statistics import LayerStats, Stats, stats

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


RATIOS = ("drop_rate", "imbalance", "rank_imbalance")
DEGREES = ("n_forward", "n_backward")
SECONDS = ("communication_seconds", "exposed_seconds")
"""Names of the `LayerStats` fields that TensorBoard shows as a curve for each layer.

RATIOS has shares and imbalances, DEGREES has numbers of chunks, SECONDS has times.
"""


class Board:
    """Writes scalars and statistics of layers as TensorBoard event files to ``folder``.

    The first `show` makes the folder. Raises ImportError if tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "tensorboard (True) must be False, or installed "
                f"(pip install '.[tensorboard]' in pmoe's folder): {error}"
            ) from None
        self._made = functools.partial(SummaryWriter, str(folder))
        self._writer: SummaryWriter | None = None

    def show(self, scalars: Sequence[files.Row], step: int, statistics: Stats | None) -> None:
        """Writes the scalars of one or more steps, and the layers' statistics of the newest step.

        Does nothing without scalars. A continued run writes some steps a second time. So the first call also
        makes TensorBoard hide the values that an earlier run wrote for the first of these steps and for all
        later steps.

        scalars: rows with the attributes step, name and value.
        step: the step of the statistics.
        statistics: the statistics; None if there are none for this step.
        """
        if not scalars:
            return
        if self._writer is None:
            self._writer = self._made(purge_step=scalars[0].step)
        for scalar in scalars:
            self._writer.add_scalar(scalar.name, scalar.value, scalar.step)
        for layer in () if statistics is None else statistics.layers:
            _show_layer(self._writer, step, layer)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file, if one was opened."""
        if self._writer is not None:
            self._writer.close()


def _show_layer(writer: SummaryWriter, step: int, layer: LayerStats) -> None:
    """Writes one layer's statistics as scalars, and its numbers of rows by expert as a histogram."""
    numbers = {name: getattr(layer, name) for name in (*RATIOS, *DEGREES, *SECONDS)}
    numbers["predicted_peak_bytes"] = None if layer.predicted is None else layer.predicted.peak
    for name, value in numbers.items():
        if value is not None:
            writer.add_scalar(f"pmoe/{name}/{layer.name}", value, step)
    rows_E = torch.tensor(layer.tokens_per_expert)
    writer.add_histogram(f"pmoe/tokens_per_expert/{layer.name}", rows_E, step)


class StatsWriter:
    """Logs a training run to ``run_dir``: scalars of each step, and MoE layers' statistics at some steps.

    Every rank must construct a writer and call `step` after each training step. Rank 0 of ``group`` writes
    the files.

    - Statistics cover the tokens of all ranks of the group. They take one all-reduce every ``every`` steps.
    - Scalars are the values of rank 0. Reduce them yourself if the values of other ranks matter.
    - A scalar that is a tensor is read only at steps with statistics, so that other steps do not wait for the
      device.
    - If a training step calls a layer several times, the layer's statistics describe the last of these calls.
      The scalars "moe/..." (`Stats.scalars`) count all calls in training mode since the last `step`.

    If the folder already has data, the run is continued. If it continues from an earlier step, the new lines
    replace the old ones of the same and later steps. A folder can have one writer at a time. A second writer
    raises an error until the first one is closed or its process has ended.

    During training, a file that cannot be written (a full disk, for example) does not stop the run: rank 0
    warns, and writes the lines at the next step with statistics. If the process crashes, the lines since the
    last step with statistics are lost.

    Args:
        run_dir: the folder. It is made if it does not exist.
        model: the model with the MoE layers.
        every: write statistics at each step that this number divides, and at the first step.
        tensorboard: also write event files to ``run_dir``/tensorboard.
        exposed: also measure how long computation waited for communication. For this, the times of tasks
            are recorded during the steps that have statistics, except the first one. Recording makes these
            steps a little slower.
        routing: also write which experts each token went to, at the steps with statistics, except the first
            one. Every rank writes a file to ``run_dir``/routing/step_N, which `pmoe.read_routing` reads.
        settings: settings of the run, which the report shows: plain data, such as ``vars(arguments)``.
        group: the ranks that train the model; None is the default group.

    Errors are raised on every rank: OSError or ValueError if the folder cannot be written, holds other files
    with the names of the writer's files, or has another writer; TypeError if an argument has another type or
    the settings are not plain data; ImportError if tensorboard is True and the package is not installed.
    """

    writes: bool
    every: int
    exposed: bool
    routing: bool
    folder: Path

    def __init__(
        self,
        run_dir: str | Path,
        model: nn.Module,
        *,
        every: int = 50,
        tensorboard: bool = False,
        exposed: bool = True,
        routing: bool = False,
        settings: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        ranks = Ranks(group)
        self.writes = ranks.rank == 0
        self.every = every
        self.exposed = exposed
        self.routing = routing
        self._model = model
        self._group = group
        self._last: int | None = None
        self._claim = contextlib.ExitStack()
        self._described: dict[str, Any] | None = None
        self._rows: list[files.Row] = []
        self._scalars: list[tuple[int, str, float | Tensor]] = []
        self._recording = contextlib.ExitStack()
        self._journal: Journal | None = None
        self._trace: dict[str, list[Tensor]] | None = None
        self._board: Board | None = None
        with all_fail_together(ranks, stage="opening a run's folder"), self._claim:
            check_path(run_dir=run_dir)
            check_module(model=model)
            check_count(every=every)
            check_flag("tensorboard", tensorboard)
            check_flag("exposed", exposed)
            check_flag("routing", routing)
            check_kind((Mapping, type(None)), "a dict, such as vars(arguments)", settings=settings)
            self.folder = Path(run_dir)
            self._session = _session(model, settings or {}, ranks.size)
            if self.writes:
                self._open(tensorboard)
            self._usage = ExpertUsage(model)
            self._claim = self._claim.pop_all()

    def _open(self, tensorboard: bool) -> None:
        """Makes the folder, locks it for this writer, and prepares its files. Called on rank 0 only.

        A line that an earlier run left incomplete is cut off, and this start of the run is added to run.json.

        tensorboard: whether to write event files, too.
        """
        if tensorboard:
            self._board = Board(self.folder / "tensorboard")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim.enter_context(files.claim(self.folder))
        files.mend(self.folder / files.SCALARS)
        files.mend(self.folder / files.LAYERS)
        files.add_session(self.folder / files.RUN, self._session)

    def step(self, step: int, **scalars: float | Tensor) -> Stats | None:
        """Stores the scalars of a training step. At steps with statistics, also writes all stored lines.

        Call it on every rank after each training step, with ascending step numbers. Steps with statistics are
        the first step and those that ``every`` divides. At these steps the method is a collective: every rank
        must take part.

        step: number of the step, at least 0.
        scalars: numbers by name; a tensor must have one element and may have any shape.

        Returns the statistics, which cover all ranks, on every rank; None at other steps.

        Raises TypeError or ValueError if the step number does not ascend, a scalar is not a number, or a name
        is not printable.
        """
        check_int(0, step=step)
        if self._last is not None and step <= self._last:
            raise ValueError(f"step ({step}) must be greater than the last one ({self._last})")
        self._add(step, scalars)
        is_first = self._last is None
        is_due = is_first or step % self.every == 0
        stride = 1 if self._last is None else step - self._last
        self._last = step
        statistics = None
        if is_due:
            self._recording.close()
            self._usage.watch(self._model)  # a model's first call may make layers
            statistics = stats(
                self._model, all_ranks=True, group=self._group, journal=self._journal, usage=self._usage
            )
            self._journal = None
            if self._trace is not None:
                self._write_routing(step, self._trace)
                self._trace = None
            if self.writes:
                if is_first:  # not in __init__, because a model's first call may make layers
                    self._described = {**self._session, "layers": _describe(self._model)}
                self._add_statistics(step, statistics)
                self._write("are written the next time", statistics)
        else:
            self._usage.clear()
        if (step + stride) % self.every == 0:
            if self.exposed and self._journal is None:
                self._journal = self._recording.enter_context(recording())
            if self.routing and self._trace is None:
                self._trace = self._recording.enter_context(record_routing(self._model))
        return statistics

    def _write_routing(self, step: int, trace: Mapping[str, list[Tensor]]) -> None:
        """Writes the choices of a step to this rank's file. If that fails, it only warns.

        step: the number of the step.
        trace: for each layer name, one tensor (T, K) for each call: the K experts of each of T tokens.
        """
        num_experts = {name: layer.num_experts for name, layer in layers_of(self._model).items()}
        with self._stops_nothing("are lost"):
            write_routing(self.folder / "routing" / f"step_{step:08d}", trace, num_experts)

    def note(self, **scalars: float | Tensor) -> None:
        """Adds scalars to the step of the last call of `step`, for example the results of a validation.

        scalars: as in `step`: numbers by name; a tensor must have one element and may have any shape.

        Not a collective: a single rank may call it. Raises ValueError before the first step, and TypeError or
        ValueError if a scalar is not a number or a name is not printable.
        """
        if self._last is None:
            raise ValueError("note must be called after a step")
        self._add(self._last, scalars)

    def _add(self, step: int, scalars: Mapping[str, float | Tensor]) -> None:
        """Checks the scalars of a step on every rank, and stores them on the rank that writes files."""
        checked = [(step, name, _number(name, value)) for name, value in scalars.items()]
        if self.writes:
            self._scalars += checked

    def _add_statistics(self, step: int, statistics: Stats) -> None:
        """Stores the lines that rank 0 will write for a step with statistics.

        statistics: the statistics. Each layer makes a row of layers.csv. The numbers about all layers, the
            time and the peaks of the memory pools (`pmoe.pool`) are stored as scalars.
        """
        self._rows += [files.layer_row(step, layer) for layer in statistics.layers]
        self._scalars += [(step, name, value) for name, value in statistics.scalars().items()]
        self._scalars.append((step, files.TIME, time.time()))
        if statistics.pools:
            device = sum(pool.device_peak_bytes for pool in statistics.pools)
            host = sum(pool.host_peak_bytes for pool in statistics.pools)
            self._scalars += [(step, files.POOL_PEAK, device), (step, files.HOST_POOL_PEAK, host)]

    def _write(self, otherwise: str, statistics: Stats | None = None) -> None:
        """Writes all stored lines to the CSV files, and to TensorBoard's event files if the writer has any.

        otherwise: what happens to the lines if they cannot be written, in words, for the warning.
        statistics: the statistics of the last step, for TensorBoard; None if there are none.
        """
        with self._stops_nothing(otherwise):
            if self._described is not None:
                files.add_session(self.folder / files.RUN, self._described, instead=True)
                self._described = None
            files.append(self.folder / files.LAYERS, self._rows)
            self._rows.clear()
            lines = [files.Row(step=step, name=name, value=float(of)) for step, name, of in self._scalars]
            files.append(self.folder / files.SCALARS, lines)
            self._scalars.clear()
            if self._board is not None and self._last is not None:
                self._board.show(lines, self._last, statistics)

    @contextlib.contextmanager
    def _stops_nothing(self, otherwise: str) -> Iterator[None]:
        """A context that turns an OSError into a warning, so that training goes on.

        Only rank 0 writes files. If an error stopped rank 0 alone, the other ranks would wait for it in a
        collective.

        otherwise: what happens to the lines that cannot be written, in words, for the warning.
        """
        try:
            yield
        except OSError as error:
            message = f"pmoe: StatsWriter cannot write to {self.folder}; its lines {otherwise}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=5)

    def close(self) -> None:
        """Writes all stored lines and unlocks the folder, so that another writer can use it.

        Not a collective: a single rank may call it.
        """
        self._recording.close()
        self._usage.remove()
        self._journal = None
        self._trace = None
        if self.writes:
            self._write("are lost")
        if self._board is not None:
            with self._stops_nothing("are lost"):
                self._board.close()
        self._claim.close()

    def __enter__(self) -> StatsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _number(name: str, value: object) -> float | Tensor:
    """Returns a checked scalar: numbers as floats, tensors as detached copies.

    A tensor's value is not read, because that would wait for its device.

    name: name of the scalar, for the errors.
    value: a number, or a tensor with one element and any shape.

    Raises ValueError if the name is not printable, and TypeError if the value is not one real number.
    """
    if not name.isprintable():  # so that it stays on one line of the file, and can be encoded
        raise ValueError(f"a scalar's name ({name!r}) must be printable")
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool or value.is_meta:
            shape = tuple(value.shape)
            raise TypeError(f"{name} (a tensor of shape {shape} and {value.dtype}) must be one real number")
        return value.detach().clone()
    try:
        if isinstance(value, bool | str | bytes) or str(getattr(value, "dtype", "")) == "bool":
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError):
        raise TypeError(f"{name} ({value!r}) must be a number, not a bool") from None


def _session(model: nn.Module, settings: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Returns the entry of run.json for this start of the run: time, ranks, device, versions and settings.

    The entry also has the number of the model's parameters that this rank holds.

    model: the model.
    settings: the settings that the user gave for the report.
    num_ranks: the number of ranks that train the model.
    """
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
    """Returns the sizes and options of each MoE layer of a model, as they were given to its constructor."""
    sizes = ("d_model", "d_latent", "d_hidden", "num_experts", "top_k")
    options = ("capacity_factor", "pipeline", "pipeline_backward", "memory_budget", "fused")
    return [
        {
            "layer": name,
            **{size: getattr(layer, size) for size in sizes},
            "gate": type(layer.gate).__name__,
            "experts": type(layer.experts).__name__,
            "ranks": layer.ranks.size,
            **{option: getattr(layer, option) for option in options},
            "memory_reuse": layer.restore if isinstance(layer.restore, bool) else str(layer.restore),
        }
        for name, layer in layers_of(model).items()
    ]
