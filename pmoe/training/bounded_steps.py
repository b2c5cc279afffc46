"""Training with a bound on the rows of each expert. A step that exceeds the bound is repeated.

A layer with ``pad_to_capacity`` sends the same number of rows in every call, so a CUDA graph can hold its
calls. But it drops rows beyond the capacity. `BoundedSteps` takes the capacity as a bound that is exceeded
rarely, and trains as if nothing had ever been dropped. Example, in which a row of batch 3 does not fit:

    the device computes      batch 1   batch 2   batch 3    batch 4    batch 3 exactly   batch 4
    the optimizer            changes   changes   skips      skips      changes           changes
    the host reads about     -         batch 1   batch 2    batch 3    -                 -

The device itself decides whether the optimizer skips a step. So the host may read one step late whether
rows were dropped, and does not wait for the device. Once a step is skipped, all later steps are skipped, too,
until the host has read it. All ranks share one answer, so all skip and repeat the same steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pmoe.arguments import check_kind, check_module, shown
from pmoe.call.decision import HostRowCounts
from pmoe.comm.failures import at_stage
from pmoe.comm.ranks import Ranks
from pmoe.layer import MoELayer

Batch = TypeVar("Batch")
Result = TypeVar("Result")


class BoundedSteps(Generic[Batch, Result]):
    """Runs training steps with bounded rows, and repeats those in which rows were dropped.

    It makes the optimizer's steps in place of the training loop:

        steps = pmoe.BoundedSteps(model, optimizer, run)
        for batch in batches:
            loss = steps.step(batch)
        steps.finish()

    Parameters, buffers and the optimizer's state become those of a training run whose layers have neither
    ``capacity_factor`` nor ``pad_to_capacity``. On layers without ``pad_to_capacity`` it has no influence.

    Args:
        model: a model with at least one `MoELayer` that has ``pad_to_capacity=True``. Its ``capacity_factor``
            is the bound.
        optimizer: the optimizer of the model's parameters. If torch's ``fused=True`` is set, the host reads
            one step late whether rows were dropped. For other optimizers it waits for the answer in each
            step, because they cannot skip a step on the device.
        run: takes a batch, sets all gradients to zero, and computes them: forward, backward, and all that
            follows before the optimizer's step, such as reducing and clipping gradients. It may replay a
            CUDA graph that was captured after this object was made.
        run_exactly: does the same as ``run`` for a repeated step. It must not replay a CUDA graph, because
            the layers' options differ. None uses ``run``.
        group: the ranks that train the model together. None is the default group, or this process.

    Each step makes one all-reduce of one number, so all ranks must make the same calls. A batch is kept until
    the next step has ended, and must not be changed until then.

    The attribute ``repeated`` is the number of steps that were repeated so far.

    Raises TypeError for arguments of other types, and ValueError if no layer has ``pad_to_capacity``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        run: Callable[[Batch], Result],
        run_exactly: Callable[[Batch], Result] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_module(model=model)
        check_kind(Optimizer, "a torch.optim.Optimizer", optimizer=optimizer)
        for name, function in {
            "run": run,
            "run_exactly": run if run_exactly is None else run_exactly,
        }.items():
            if not callable(function):
                raise TypeError(f"{name} ({shown(function)}) must be a function that takes a batch")
        self.model = model
        self.optimizer = optimizer
        self.repeated = 0
        self._run = run
        self._run_exactly = run if run_exactly is None else run_exactly
        self._ranks = Ranks(group)
        self._layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, MoELayer) and module.pad_to_capacity
        }
        if not self._layers:
            raise ValueError(
                "model must have a MoELayer with pad_to_capacity (True) and a capacity_factor, which bounds "
                "the rows of each expert; layers without it drop nothing that a step could repeat"
            )
        device = _device_of(next(iter(self._layers.values())))
        self._device = device
        self._dropped = torch.zeros((), dtype=torch.int64, device=device)
        self._skips = torch.zeros((), dtype=torch.float32, device=device)
        self._is_exact = False
        self._unread: _Step[Batch] | None = None
        for name, layer in self._layers.items():
            layer.register_forward_hook(_Counter(self, name))
        model.register_state_dict_pre_hook(self._refuse_while_skipped)
        optimizer.register_state_dict_pre_hook(self._refuse_while_skipped)

    def step(self, batch: Batch) -> Result:
        """Runs one training step. If it finds that the step before was skipped, it repeats both steps.

        batch: the argument of ``run``, of any type.

        Returns the result of ``run``. If rows were dropped in this very step, the result is that of the
        bounded run: for a loss, the loss without these rows.
        """
        step = _Step(batch, self._settings(), self._buffers(), _random_state(self._device))
        result = self._run_bounded(step)
        if not self._skips_on_device:
            if not step.exceeded_bound():
                self.optimizer.step()
                return result
            self._skips.zero_()
            return self._repeat(step)
        before = self._unread
        self._unread = step
        if before is None or not before.exceeded_bound():
            return result
        self._unread = None
        self._skips.zero_()
        self._repeat(before)
        return self.step(batch)

    def finish(self) -> None:
        """Repeats the last step if rows were dropped in it. All ranks must call it after the last step.

        Call it also before a checkpoint is saved and before the model is evaluated. Without it the model may
        lack its last step.
        """
        last = self._unread
        self._unread = None
        if last is not None and last.exceeded_bound():
            self._skips.zero_()
            self._repeat(last)

    @property
    def _skips_on_device(self) -> bool:
        """Whether the optimizer skips a step itself if a tensor on the device says so, as for GradScaler."""
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def _run_bounded(self, step: _Step[Batch]) -> Result:
        """Runs a step with bounded rows, and makes the optimizer's step if the optimizer can skip it.

        step: gets the answer whether rows were dropped.
        """
        self._dropped.zero_()
        result = self._run(step.batch)
        dropped = self._dropped.sign().float()
        if self._ranks.size > 1:
            with at_stage("agreeing whether rows of a step were dropped", self._ranks):
                dist.all_reduce(dropped, dist.ReduceOp.MAX, group=self._ranks.group)
        torch.maximum(self._skips, dropped, out=self._skips)
        step.note_skipped(self._skips)
        if self._skips_on_device:
            # The attributes by which torch's GradScaler tells a fused optimizer to skip a step.
            optimizer: Any = self.optimizer
            optimizer.grad_scale = None
            optimizer.found_inf = self._skips
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        return result

    def _repeat(self, step: _Step[Batch]) -> Result:
        """Runs a step again from the state before it, without a bound on rows, and returns its result.

        step: the step, in which the optimizer changed nothing. Its settings of the optimizer, such as the
            learning rate, hold during the repetition.
        """
        settings = self._settings()
        for buffer, value in zip(self.model.buffers(), step.buffers, strict=True):
            buffer.data.copy_(value)
        _set_random_state(self._device, step.random_state)
        self._set(step.settings)
        try:
            with self._without_bound():
                result = self._run_exactly(step.batch)
                self.optimizer.step()
        finally:
            self._set(settings)
        self.repeated += 1
        return result

    @contextlib.contextmanager
    def _without_bound(self) -> Iterator[None]:
        """Lets the layers keep every row within the with-block."""
        factors = {name: layer.capacity_factor for name, layer in self._layers.items()}
        self._is_exact = True
        try:
            for layer in self._layers.values():
                layer.pad_to_capacity = False
                layer.capacity_factor = None
            yield
        finally:
            for name, layer in self._layers.items():
                layer.capacity_factor = factors[name]
                layer.pad_to_capacity = True
            self._is_exact = False

    def _settings(self) -> list[dict[str, Any]]:
        """Returns copies of the options of all parameter groups, such as the learning rate."""
        groups = self.optimizer.param_groups
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"} for group in groups
        ]

    def _set(self, settings: list[dict[str, Any]]) -> None:
        """Sets the options of each parameter group of the optimizer.

        settings: what `_settings` returned.
        """
        for group, options in zip(self.optimizer.param_groups, settings, strict=True):
            for name, value in options.items():
                if isinstance(value, Tensor):
                    group[name].copy_(value)  # in place, because a CUDA graph may read the tensor
                else:
                    group[name] = value

    def _buffers(self) -> list[Tensor]:
        """Returns a copy of each buffer of the model, such as the gate's biases."""
        return [buffer.detach().clone() for buffer in self.model.buffers()]

    def _refuse_while_skipped(self, *_: object) -> None:
        """Raises RuntimeError if a state dict is asked for while the last step waits to be repeated."""
        if self._unread is not None and self._unread.exceeded_bound():
            raise RuntimeError(
                "rows were dropped in the last step, which waits to be repeated: call BoundedSteps.finish() "
                "on every rank before state_dict() is called"
            )


@dataclass
class _Step(Generic[Batch]):
    """A step that may have to be repeated, and the state before it.

    batch         the argument of ``run``
    settings      the options of the optimizer's parameter groups
    buffers       values of the model's buffers before the step
    random_state  states of the random number generators before the step
    skipped       on the host: 1.0 if the optimizer skipped the step, else 0.0
    was_copied    on CUDA, an event after the copy to ``skipped``
    """

    batch: Batch
    settings: list[dict[str, Any]]
    buffers: list[Tensor]
    random_state: tuple[Tensor, ...]
    skipped: Tensor = field(default_factory=lambda: torch.zeros(()))
    was_copied: torch.cuda.Event | None = None

    def note_skipped(self, skips: Tensor) -> None:
        """Copies the answer whether the optimizer skips this step. On CUDA the host does not wait for it.

        skips: a float32 scalar on the device, 1.0 if the optimizer skips the step.
        """
        if skips.is_cuda:
            self.skipped = torch.empty((), pin_memory=True)
            self.was_copied = torch.cuda.Event()
        self.skipped.copy_(skips, non_blocking=True)
        if self.was_copied is not None:
            self.was_copied.record()

    def exceeded_bound(self) -> bool:
        """Returns whether the optimizer skipped this step: the same on all ranks. The host waits for it."""
        if self.was_copied is not None:
            self.was_copied.synchronize()
        return bool(self.skipped.item())


class _Counter:
    """A forward hook that adds the number of dropped rows of each call to a tensor on the device.

    The hook only launches operators, so a CUDA graph that holds the call holds the count, too.
    """

    def __init__(self, steps: BoundedSteps[Any, Any], name: str) -> None:
        self.steps = steps
        self.name = name

    def __call__(self, layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, MoELayer)
        if self.steps._is_exact or not layer.pad_to_capacity:
            return
        ran = layer.last.ran
        counts = layer.last.counts
        kept_E = counts.kept_device_E if isinstance(counts, HostRowCounts) else None
        if ran is None or ran.num_slots is None or kept_E is None:
            raise ValueError(
                f"the gate of layer {self.name!r} ({type(layer.gate).__name__}) does not choose experts for "
                "each token, so BoundedSteps cannot count rows that were dropped: use a gate that does"
            )
        self.steps._dropped.add_(ran.num_slots - kept_E.sum())


def _device_of(layer: MoELayer) -> torch.device:
    """Returns the device of a layer's parameters."""
    parameter = next(layer.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _copied(value: Any) -> Any:
    """Returns a copy of a tensor, and any other value as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Returns the states of the random number generators of the CPU and, if it is another one, the device."""
    on_cpu = torch.get_rng_state()
    return (on_cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (on_cpu,)


def _set_random_state(device: torch.device, states: tuple[Tensor, ...]) -> None:
    """Sets the random number generators to the states that `_random_state` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
