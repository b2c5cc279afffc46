"""Training with a bound on the rows of a call. A step that exceeds the bound is repeated.

The host reads no row counts in three kinds of layers, so a CUDA graph can hold their calls. All have a bound:

    pad_to_capacity=True    sends the same number of rows in every call, and drops rows beyond the capacity
    fused="persistent"      sends only rows that exist, into memory for ``slack`` times the rows of balanced
                            routing (`pmoe.call.row_bound`). If they do not fit, it computes nothing
    Switches(program=True, program_heaps=True)
                            the same for passes in chunks, which run as compiled programs. Each chunk has room
                            for ``slack`` times its rows of balanced routing

`BoundedSteps` is for bounds that are exceeded rarely. It repeats each step that exceeded a bound, so the
model is trained as if nothing had ever been dropped. Example, in which a row of batch 3 does not fit:

    the device computes      batch 1   batch 2   batch 3    batch 4    batch 3 exactly   batch 4
    the optimizer            changes   changes   skips      skips      changes           changes
    the host reads about     -         batch 1   batch 2    batch 3    -                 -

The device itself decides whether the optimizer skips a step. The host reads the answer of a step only after
it has launched the next step, so it does not wait for the device. Once a step is skipped, the device skips
all later steps, too, until the host has read that answer. All ranks share one answer, so all ranks skip and
repeat the same steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pmoe.arguments import check_kind, check_module, shown
from pmoe.call.decision import HostRowCounts
from pmoe.call.row_bound import RowBound
from pmoe.checkpointing.contexts import random_states, set_random_states
from pmoe.comm.failures import at_stage, publishing_failures, reduce_to_largest, wait_for_device
from pmoe.comm.ranks import Ranks
from pmoe.layer import MoELayer

Batch = TypeVar("Batch")
Result = TypeVar("Result")

SKIPPING = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers that skip a step if a tensor on the device says so, with ``fused=True``.

SGD does so, too. But if it skips the first step of a parameter, its momentum keeps memory without values.
"""


class BoundedSteps(Generic[Batch, Result]):
    """Runs training steps with bounded rows, and repeats the steps in which rows were dropped.

    The object, and not the training loop, calls the optimizer's ``step``:

        steps = pmoe.BoundedSteps(model, optimizer, run)
        for batch in batches:
            loss = steps.step(batch)
        steps.finish()

    Parameters, buffers and the optimizer's state become those of a training run whose layers have neither
    ``capacity_factor`` nor ``pad_to_capacity``. Three kinds of layers have a bound, others stay as they are:

        pad_to_capacity=True                      ``capacity_factor`` is the bound
        fused="persistent", without a capacity    ``slack`` is the bound. The first call of each kind (such as
                                                  training) is not bounded: in this call the ranks agree on
                                                  the size of their memory
        Switches(program=True,                    the same. ``pipeline`` must be a number, and
            program_heaps=True),                  ``memory_reuse`` one pair that offloads nothing
            without a capacity

    Args:
        model: a model with at least one `MoELayer` of these three kinds.
        optimizer: the optimizer of the model's parameters. With torch's Adam or AdamW and ``fused=True`` the
            host reads one step late whether rows were dropped. With any other optimizer the host waits
            for the answer in each step.
        run: takes a batch, sets all gradients to zero, and computes them: forward, backward, and all that
            follows before the optimizer's step, such as reducing and clipping gradients. It may replay a
            CUDA graph that was captured after this object was made, within `bounded_calls`.
        run_exactly: does the same as ``run`` for a repeated step. It must not replay a CUDA graph, because a
            graph would drop the same rows again. None uses ``run``.
        after_step: is called after each step of the optimizer, for changes of buffers that belong to the
            step, such as ``gate.update_bias()``. If the step is repeated, these changes are undone, and the
            function is called again. None calls nothing.
        group: the ranks that train the model together. None is the default group, or this process.

    Each step makes one all-reduce of two numbers, so all ranks must make the same calls. They must call a
    layer with autograd on, or off, together. If one rank alone calls it under ``torch.no_grad``, all ranks
    raise an error within about a second on the CPU, as they do without a bound; on a GPU, at the latest after
    the group's timeout. A batch is kept until the next step has ended. It must not be changed until then, and
    ``run`` must be able to read it again.

    If a step is repeated, buffers of the model and random numbers start again from their values before it.
    The same parameters are frozen (requires_grad), and the same modules are in training mode, as in the step.
    If ``run`` reads other values that change between steps, such as the coefficient of a loss, put them into
    the batch. Before parameters are changed otherwise than by the optimizer, or are copied, call `finish`.

    All else that ``run`` changes is changed a second time: metrics, objects such as `BalanceLoss`, the state
    of iterators. GradScaler, several optimizers, and averages of weights that are updated after `step` do not
    know which steps are skipped, so they cannot be used with this class.

    The attribute ``repeated`` is the number of steps that were repeated so far.

    Raises TypeError for arguments of other types, and ValueError if no layer is of one of the three kinds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        run: Callable[[Batch], Result],
        run_exactly: Callable[[Batch], Result] | None = None,
        *,
        after_step: Callable[[], object] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_module(model=model)
        check_kind(Optimizer, "a torch.optim.Optimizer", optimizer=optimizer)
        functions = {"run": run, "run_exactly": run_exactly, "after_step": after_step}
        for name, function in functions.items():
            if not callable(function) and (name == "run" or function is not None):
                raise TypeError(f"{name} ({shown(function)}) must be a function")
        self.model = model
        self.optimizer = optimizer
        self.repeated: int = 0
        self._run = run
        self._run_exactly = run if run_exactly is None else run_exactly
        self._after_step = after_step
        self._ranks = Ranks(group)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
        self._padded = {name: layer for name, layer in layers.items() if layer.pad_to_capacity}
        self._by_heaps = {name: layer for name, layer in layers.items() if _is_bounded_by_heap(layer)}
        bounded = self._padded | self._by_heaps
        if not bounded:
            raise ValueError(
                "model must have a MoELayer with pad_to_capacity (True) and a capacity_factor, which bounds "
                'the rows of each expert; or one with fused ("persistent") or with switches '
                "(Switches(program=True, program_heaps=True)), whose slack bounds the rows of a rank. Other "
                "layers drop nothing that a step could repeat"
            )
        self._device = _device_of(next(iter(bounded.values())))
        self._rows = _DroppedRows(bounded, self._device)
        self._bounds: list[RowBound] = []
        for layer in self._by_heaps.values():
            layer.cache.row_bound = RowBound(self._rows.dropped)
            self._bounds.append(layer.cache.row_bound)
        self._skips = torch.zeros((), dtype=torch.float32, device=self._device)
        self._order = _StepOrder(self._device)
        self._unread: _Step[Batch] | None = None
        self._hooks = [
            *self._rows.hooks,
            model.register_state_dict_pre_hook(self._refuse_while_skipped),
            optimizer.register_state_dict_pre_hook(self._refuse_while_skipped),
            model.register_load_state_dict_pre_hook(self._forget_skipped),
            optimizer.register_load_state_dict_pre_hook(self._forget_skipped),
        ]

    def step(self, batch: Batch) -> Result:
        """Runs one training step. If it finds that the step before was skipped, it repeats both steps.

        batch: the argument of ``run``, of any type that can be read twice.

        Returns the result of ``run``. If the host reads one step late, and rows are dropped in this very
        step, the result is that of the bounded run: for a loss, the loss without these rows.

        Raises RuntimeError on every rank if no bounded layer was called while its hook was registered, or if
        the repeated step drops rows, too. Raises HeapError, with the rank, if a kernel of this step or of the
        step before has waited too long for another rank. Raises RuntimeError if the device has not finished a
        step within the group's timeout; a single rank has no timeout.
        """
        with self._order.one_step():
            return self._step(batch)

    def _step(self, batch: Batch) -> Result:
        """Runs one training step, as `step` does. Its work on the device follows that of the step before."""
        number = self._next_number()
        step = _Step(
            number,
            batch,
            self._settings(),
            _Flags.of(self.model),
            self._buffers(),
            random_states(self._device),
        )
        result = self._run_bounded(step)
        if not self._reads_late:
            if self._exceeded_bound(step):
                return self._repeat(step)
            self._finish_optimizer_step()
            return result
        self._step_unless_skipped()
        before = self._unread
        if before is not None and self._exceeded_bound(before):
            self._repeat(before)
            self._unread = None
            set_random_states(step.random_states, self._device)
            return self._step(batch)
        self._unread = step
        return result

    def finish(self) -> None:
        """Repeats the last step if rows were dropped in it. All ranks must call it after the last step.

        Call it also before a checkpoint is saved and before the model is evaluated. Without it the model may
        lack its last step.
        """
        last = self._unread
        if last is not None and self._exceeded_bound(last):
            states = random_states(self._device)
            with self._order.one_step():
                self._repeat(last)
            set_random_states(states, self._device)
        self._unread = None

    @contextlib.contextmanager
    def bounded_calls(self) -> Iterator[None]:
        """Returns a with-block in which the layers' calls are bounded, for the capture of a CUDA graph.

        `step` bounds calls by itself. Make each call once before the block, because in a first call the ranks
        agree on the size of their memory. Example:

            run(batch)
            with steps.bounded_calls(), torch.cuda.graph(graph):
                run(batch)

        Rows may be dropped in the block, so its results must not be used. All ranks must enter the block
        together, and before the capture begins. When they enter it, they agree on which heaps (memory for
        rows) to use, because some heaps may have been replaced by larger ones since the last call.
        """
        with publishing_failures(self._ranks, "finding the heaps of bounded calls"):
            for bound in self._bounds:
                bound.find_heaps()
        with self._bounded():
            yield

    @contextlib.contextmanager
    def _bounded(self) -> Iterator[None]:
        """Returns a with-block in which the rows of the layers' calls are bounded."""
        for bound in self._bounds:
            bound.turn_on()
        try:
            yield
        finally:
            for bound in self._bounds:
                bound.is_on = False

    def remove(self) -> None:
        """Removes all hooks and bounds of this object from the model and the optimizer.

        Call `finish` first.
        """
        for hook in self._hooks:
            hook.remove()
        for layer in self._by_heaps.values():
            if layer.cache.row_bound in self._bounds:
                layer.cache.row_bound = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedSteps[Batch, Result]:
        """Returns this object itself. A copy of the model has copied hooks, which refer to this object."""
        return self

    @property
    def _reads_late(self) -> bool:
        """Whether the optimizer skips steps on the device, so that the host reads answers one step late."""
        groups = self.optimizer.param_groups
        return type(self.optimizer) in SKIPPING and all(group.get("fused") for group in groups)

    def _next_number(self) -> int:
        """Returns the number of a new step, counted over all steps of the group; 0 for a single rank."""
        if self._ranks.group is None:
            return 0
        self._ranks.record.steps += 1
        return self._ranks.record.steps

    def _run_bounded(self, step: _Step[Batch]) -> Result:
        """Runs a step with bounded rows, and agrees with all ranks whether rows were dropped.

        step: gets the answer.
        """
        self._rows.begin()
        with self._bounded(), publishing_failures(self._ranks, "a training step"):
            result = self._run(step.batch)
        answer = self._agreed()
        torch.maximum(self._skips, answer[0], out=self._skips)
        step.note(self._skips, answer[1])
        return result

    def _agreed(self) -> Tensor:
        """Returns two numbers, maxima over the ranks: 1 if rows were dropped, and 1 if no hook ran."""
        answer = self._rows.answer()
        for bound in self._bounds:
            for heap in bound.open_heaps:  # a kernel that waited too long has left wrong values
                answer[0] += heap.failures.sign()
        answer.clamp_(max=1)  # fused optimizers skip a step only if the number is 1
        if self._ranks.size > 1:
            with at_stage("agreeing whether rows of a step were dropped", self._ranks):
                reduce_to_largest(answer, self._ranks.group)
        return answer

    def _exceeded_bound(self, step: _Step[Batch]) -> bool:
        """Returns whether the optimizer skips a step: the same on all ranks. The host waits for the answer.

        Raises RuntimeError on every rank if no layer was called whose hook counts rows. Raises HeapError or
        RuntimeError if the step did not end in time (`step`).
        """
        answer = step.answer
        assert answer is not None
        with publishing_failures(self._ranks, "waiting for a training step on the device"):
            if step.was_copied is not None:
                has_answer = functools.partial(self._has_answer, step.was_copied)
                wait_for_device(has_answer, self._ranks, step.number)
            self._raise_if_failed()
        skipped, is_unseen = answer.tolist()
        if is_unseen:
            raise RuntimeError(
                "no MoELayer of the model counted its dropped rows in a step: make BoundedSteps before a "
                "CUDA graph is captured and before a compiled model is called first, and let run call this "
                "model"
            )
        return bool(skipped)

    def _has_answer(self, was_copied: torch.cuda.Event) -> bool:
        """Returns whether the device has copied the answer of a step to the host.

        was_copied: the event after the copy.

        Raises HeapError if a kernel has waited too long for a rank. If that rank has ended, the collectives
        after the kernel never end, and so no answer comes.
        """
        self._raise_if_failed()
        return bool(was_copied.query())

    def _raise_if_failed(self) -> None:
        """Raises HeapError, with the awaited rank, if a kernel of a bounded call has waited too long."""
        for bound in self._bounds:
            bound.raise_if_failed()

    def _step_unless_skipped(self) -> None:
        """Makes the optimizer's step, which changes nothing if ``_skips`` is 1 on the device."""
        # The attributes by which torch's GradScaler tells a fused optimizer to skip a step.
        optimizer: Any = self.optimizer
        optimizer.grad_scale = None
        optimizer.found_inf = self._skips
        try:
            self._finish_optimizer_step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _finish_optimizer_step(self) -> None:
        """Makes the optimizer's step, and calls ``after_step``."""
        self.optimizer.step()
        if self._after_step is not None:
            self._after_step()

    def _repeat(self, step: _Step[Batch]) -> Result:
        """Runs a step again from the state before it, without a bound on rows, and returns its result.

        step: the step, in which the optimizer changed nothing. Its settings of the optimizer, such as the
            learning rate, and the model's flags, such as which parameters are frozen, hold during the
            repetition.
        """
        settings = self._settings()
        flags = _Flags.of(self.model)
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        layers = (self._padded | self._by_heaps).values()
        last_calls = [(layer, layer.last) for layer in layers]
        for buffer, value in zip(self.model.buffers(), step.buffers, strict=True):
            buffer.data.copy_(value)
        set_random_states(step.random_states, self._device)
        self._set(step.settings)
        step.flags.restore()
        try:
            self._rows.begin()
            with self._without_bound(), publishing_failures(self._ranks, "a repeated training step"):
                result = self._run_exactly(step.batch)
            dropped = bool(self._agreed()[0].item())
            with publishing_failures(self._ranks, "a repeated training step"):
                # ``dropped`` is also True if a kernel waited too long. Then this raises the cause.
                self._raise_if_failed()
            if dropped:
                raise RuntimeError(
                    "rows were dropped in a repeated step, or a kernel of another rank waited too long: "
                    "run_exactly must call the model itself and not replay a CUDA graph that holds bounded "
                    "calls"
                )
            self._finish_optimizer_step()
        finally:
            self._set(settings)
            flags.restore()
            # A CUDA graph writes into the tensors of its capture. So the parameters and layers refer to these
            # tensors again.
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for layer, last in last_calls:
                layer.last = last
        self._skips.zero_()
        self.repeated += 1
        return result

    @contextlib.contextmanager
    def _without_bound(self) -> Iterator[None]:
        """Returns a with-block in which the layers keep every row."""
        factors = {name: layer.capacity_factor for name, layer in self._padded.items()}
        try:
            for layer in self._padded.values():
                layer.pad_to_capacity = False
                layer.capacity_factor = None
            yield
        finally:
            for name, layer in self._padded.items():
                layer.capacity_factor = factors[name]
                layer.pad_to_capacity = True

    def _settings(self) -> list[dict[str, Any]]:
        """Returns copies of the options of all parameter groups, such as the learning rate."""
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]

    def _set(self, settings: list[dict[str, Any]]) -> None:
        """Sets the options of each parameter group of the optimizer.

        settings: the result of `_settings`.
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
        if self._unread is not None and self._exceeded_bound(self._unread):
            raise RuntimeError(
                "rows were dropped in the last step, which waits to be repeated: call BoundedSteps.finish() "
                "on every rank before state_dict() is called"
            )

    def _forget_skipped(self, *_: object) -> None:
        """Drops the step that waits to be repeated. A hook that runs when other values are loaded."""
        self._unread = None
        self._skips.zero_()


@dataclass(frozen=True)
class _Flags:
    """Flags of a model that a user may set between two steps, by parameter and by module.

    requires_grad: for each parameter, whether it needs a gradient, and so is not frozen.
    training: for each module, whether it is in training mode.
    """

    requires_grad: list[tuple[nn.Parameter, bool]]
    training: list[tuple[nn.Module, bool]]

    @staticmethod
    def of(model: nn.Module) -> _Flags:
        return _Flags(
            [(parameter, parameter.requires_grad) for parameter in model.parameters()],
            [(module, module.training) for module in model.modules()],
        )

    def restore(self) -> None:
        """Sets all flags to their values in this record."""
        for parameter, requires_grad in self.requires_grad:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for module, training in self.training:
            module.training = training


@dataclass
class _Step(Generic[Batch]):
    """A step that may have to be repeated, and the state before it.

    number        the number of the step (`GroupRecord.steps`); 0 for a single rank
    batch         the argument of ``run``
    settings      the options of the optimizer's parameter groups
    flags         which parameters were frozen, and which modules were in training mode
    buffers       values of the model's buffers before the step
    random_states states of the random number generators before the step
    answer        on the host, (2,) float32: 1 if the optimizer skips the step, and 1 if no hook ran
    was_copied    on CUDA, an event after the copy to ``answer``
    """

    number: int
    batch: Batch
    settings: list[dict[str, Any]]
    flags: _Flags
    buffers: list[Tensor]
    random_states: list[Tensor]
    answer: Tensor | None = None
    was_copied: torch.cuda.Event | None = None

    def note(self, skips: Tensor, unseen: Tensor) -> None:
        """Copies the answers to the host. On CUDA the host does not wait for them.

        skips: a float32 scalar on the device, 1 if the optimizer skips the step.
        unseen: a float32 scalar on the device, 1 if no hook of a layer ran in the step.
        """
        answer = torch.stack([skips, unseen])
        if not answer.is_cuda:
            self.answer = answer
            return
        self.answer = torch.empty(2, pin_memory=True).copy_(answer, non_blocking=True)
        self.was_copied = torch.cuda.Event()
        self.was_copied.record(torch.cuda.current_stream(answer.device))


class _StepOrder:
    """Lets the device run one step after the other, also if the host launches them on several streams.

    Two steps may replay two CUDA graphs whose passes use the same heap, memory that all ranks can write. The
    graphs themselves are not ordered. Within a step, ``run`` must wait on its stream for all that it launches
    on other streams.

    device: the device of the model. On the CPU nothing must be ordered.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """Returns a with-block whose work on the current stream runs after that of the block before.

        A block that raises counts, too: it may have replayed a graph before the error.
        """
        if self._device.type != "cuda":
            yield
            return
        if self._ended is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ended)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it would hide the first error
                self._note_end()
            raise
        self._note_end()

    def _note_end(self) -> None:
        """Records an event behind the work of a block on the current stream."""
        ended = torch.cuda.Event()
        ended.record(torch.cuda.current_stream(self._device))
        self._ended = ended


class _DroppedRows:
    """Counts calls of bounded layers, and rows that layers with ``pad_to_capacity`` drop, by forward hooks.

    A hook only launches operators, so a CUDA graph that holds the call of a layer holds the count, too.

    dropped: int64 scalar on the device: the number of dropped rows since `begin`. Layers that are bounded by
        their heaps add 1 for each call that computed nothing (`pmoe.call.row_bound.RowBound`).
    hooks: handles that remove the hooks.
    """

    def __init__(self, layers: dict[str, MoELayer], device: torch.device) -> None:
        self._names = {layer: name for name, layer in layers.items()}
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self._calls = torch.zeros((), dtype=torch.int64, device=device)
        self.hooks = [layer.register_forward_hook(self) for layer in layers.values()]

    def begin(self) -> None:
        """Sets both counts to zero, before a step."""
        self.dropped.zero_()
        self._calls.zero_()

    def answer(self) -> Tensor:
        """Returns (2,) float32 on the device: 1 if rows were dropped, and 1 if no hook ran, since `begin`."""
        return torch.stack([self.dropped.sign(), 1 - self._calls.sign()]).float()

    def __call__(self, layer: nn.Module, *_: object) -> None:
        if not isinstance(layer, MoELayer) or layer not in self._names:
            return  # a copy of a layer of the model, which has copies of its hooks
        self._calls.add_(1)
        if not layer.pad_to_capacity:
            return
        ran = layer.last.ran
        counts = layer.last.counts
        kept_E = counts.kept_device_E if isinstance(counts, HostRowCounts) else None
        if ran is None or ran.num_slots is None or kept_E is None:
            raise ValueError(
                f"the gate of layer {self._names[layer]!r} ({type(layer.gate).__name__}) does not choose "
                "experts for each token, so BoundedSteps cannot count dropped rows: use a gate that does"
            )
        self.dropped.add_(ran.num_slots - kept_E.sum())

    def __deepcopy__(self, memo: dict[int, Any]) -> _DroppedRows:
        return self


def _is_bounded_by_heap(layer: MoELayer) -> bool:
    """Returns whether ``slack`` bounds the rows of a layer, which travel through heaps between ranks."""
    switches = layer.options.switches
    by_programs = switches.program and switches.program_heaps and not (layer.fused or layer.pad_to_capacity)
    return (layer.fused == "persistent" or by_programs) and layer.capacity_factor is None


def _device_of(layer: MoELayer) -> torch.device:
    """Returns the device of a layer's parameters."""
    parameter = next(layer.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _copied(value: Any) -> Any:
    """Returns a copy of a tensor, and any other value as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value
