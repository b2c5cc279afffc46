"""Experts that are a user's own modules, one instance for each local expert.

Forward keeps the autograd graph of each expert's rows of a chunk (micro-batch). Backward differentiates the
graph for parameters and rows together, so weight gradients are no separate computation here.

Other experts save T_M, the hidden activation, for backward. Here the tensors that autograd saved take the
place of T_M; the experts' output (T_DO) is among them. Two kinds of tensors are not among them: parameters,
and views of the received rows (T_DI), because the engine restores the rows itself.

The saved tensors are not kept in the graphs. They are handed to the engine, which keeps or offloads them
(`Hidden.tensors`). If they stayed in the graphs, activation checkpointing would find them graph by graph, and
would run the whole layer again for each graph. Ranks have different numbers of graphs, so their collectives
would not match.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version

from pmoe.arguments import check_count, check_module, is_int, list_of
from pmoe.experts import ActivationName, ExpertName, initialise, make_stacked, seeded
from pmoe.experts.base import Allocate, ExpertRows, Experts, Hidden, Runs, Shard, row_dot
from pmoe.experts.expert_autograd import (
    Graph,
    SavedTensorSlots,
    changed_in_place,
    gradients,
    record,
    saves_plainly,
)
from pmoe.experts.products import GradientSum, RowGroups


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The random state and autocast settings under which a chunk was computed, to compute it again.

    device: the device of the chunk's rows.
    random: state of the CPU's default generator.
    device_random: state of the CUDA device's generator; None on the CPU.
    autocast, autocast_dtype: whether autocast was on for the device type, and its dtype.
    buffers: the experts' buffers with their version counters before the chunk was computed; empty if versions
        are not checked.
    """

    device: torch.device
    random: Tensor
    device_random: Tensor | None
    autocast: bool
    autocast_dtype: torch.dtype
    buffers: tuple[tuple[Tensor, int], ...] = ()

    @staticmethod
    def current(device: torch.device) -> Recipe:
        """Returns the random state and autocast settings of this moment, for rows on ``device``.

        The record has no buffers.
        """
        return Recipe(
            device=device,
            random=torch.get_rng_state(),
            device_random=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            autocast=torch.is_autocast_enabled(device.type),
            autocast_dtype=torch.get_autocast_dtype(device.type),
        )

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which code runs with the recorded random state and autocast settings.

        When it ends, the state and settings from before are restored.
        """
        devices = [] if self.device_random is None else [self.device]
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(self.random)
            if self.device_random is not None:
                torch.cuda.set_rng_state(self.device_random, self.device)
            with torch.autocast(self.device.type, enabled=self.autocast, dtype=self.autocast_dtype):
                yield


class ModuleExperts(Experts):
    """Experts that are a user's modules. Each maps rows (rows, d_model) to an output of the same shape.

    The number of rows varies from call to call and is at least 1: an expert without rows is not called.
    """

    local: nn.ModuleList
    num_local_experts: int

    are_modules = True
    runs_under_autocast = True

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        module_list = list_of("modules", modules)
        check_module(**{f"modules, number {number}": module for number, module in enumerate(module_list)})
        check_count(**{"the number of modules": len(module_list)})
        self.local = nn.ModuleList(module_list)
        self.num_local_experts = len(self.local)

    def as_modules(self) -> list[nn.Module]:
        return list(self.local)

    def keep(self, experts: slice, shard: Shard) -> None:
        self.local = self.local[experts]
        self.num_local_experts = len(self.local)

    def mark_parameters(self) -> None:
        super().mark_parameters()
        for name in self.copy_parts:
            # The parameter is a DTensor over the ranks with the same experts only.
            self.get_parameter(name).over_copies_only = True  # type: ignore[attr-defined]

    def operands(self) -> list[Tensor]:
        """Returns the modules' parameters, each of any shape.

        The modules themselves do not compute with these tensors: each reads its own parameters when it is
        called.

        Raises ValueError if the number of modules has changed since the layer was built.
        """
        if len(self.local) != self.num_local_experts:
            raise ValueError(
                f"experts.local (of {len(self.local)} modules) must hold this rank's "
                f"{self.num_local_experts} experts. For more or fewer experts build another MoELayer with "
                "that num_experts (docs/weights.md)"
            )
        parameters = list[Tensor](self.parameters())
        if not self.is_parallelized:
            return parameters
        from pmoe.experts.dtensor_layout import local_values

        names = [name for name, _ in self.named_parameters()]
        return local_values(self.placements, self.reduce, names, parameters)

    def copied_parameters(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the parameters of the first expert, of any shape. All experts must have equal shapes."""
        return list(self.local[0].parameters())

    def compute_alone(self, x: Tensor) -> Tensor:
        return self._run(0, x)

    def compute(
        self, expert_rows: ExpertRows, weight_N: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Hidden | None]:
        rows_NM = expert_rows.rows_NM
        groups = expert_rows.groups
        out = torch.empty_like(rows_NM) if expert_rows.out is None else expert_rows.out
        if not keep:
            for expert, at in groups.slices():
                out[at] = self._run(expert, rows_NM[at]) * weight_N[at].unsqueeze(1)
            return out, None
        graphs = list[Graph]()
        tensors = list[Tensor]()
        for graph, output in self._graphs(rows_NM, groups):
            out[graph.chunk_rows] = output * weight_N[graph.chunk_rows].unsqueeze(1)
            tensors += graph.saved_slots.close()
            graphs.append(graph)
        return out, Hidden(tensors=tensors, graph=graphs)

    def _graphs(self, rows_NM: Tensor, groups: RowGroups) -> Iterator[tuple[Graph, Tensor]]:
        """Runs each expert that has rows, and yields its autograd graph and its output.

        Before the caller asks for the next pair, it must take the tensors that autograd saved
        (``graph.saved_slots.close()``).

        rows_NM: (N, M), the N rows of a chunk, sorted by expert, with M = d_model columns.
        groups: where each expert's rows begin and end.
        """
        own_storages = frozenset(tensor.untyped_storage().data_ptr() for tensor in self._own_tensors())
        for expert, at in groups.slices():
            saved_slots = SavedTensorSlots(own_storages)
            graph, output = record(functools.partial(self._run, expert), rows_NM[at], at, saved_slots)
            if saved_slots.rows_changed:
                # The expert has changed its rows in place. The rows in the graph have a version counter of
                # their own (`_Enter`), but the engine reads the counter of rows_NM.
                increment_version(rows_NM)
            yield graph, output

    def _own_tensors(self) -> Iterable[Tensor]:
        """Returns the parameters and buffers, of any shape, with which the modules compute."""
        return itertools.chain(self.parameters(), self.buffers())

    def recipe(self, device: torch.device) -> Recipe:
        buffers = self.buffers() if saves_plainly() else ()
        return replace(Recipe.current(device), buffers=tuple((buffer, buffer._version) for buffer in buffers))

    def is_repeatable(self, recipe: Recipe) -> bool:
        present = Recipe.current(recipe.device)
        old_device_random = recipe.device_random
        new_device_random = present.device_random
        same_on_device = (
            old_device_random is None
            or new_device_random is None
            or torch.equal(old_device_random, new_device_random)
        )
        return same_on_device and torch.equal(recipe.random, present.random)

    def recompute(self, expert_rows: ExpertRows, recipe: Recipe | None) -> Hidden:
        """Runs each module again on its rows, and returns the tensors that autograd saves.

        These tensors take the place of the hidden activation (T_M) of other experts.

        expert_rows: the chunk's N rows, (N, M) with M = d_model columns, and the memory to compute with.
        recipe: the random state and autocast settings of forward; None if the rank had no rows in forward.

        Raises RuntimeError if a gradient needs a buffer that was changed in place since forward, unless the
        experts change it themselves.
        """
        graphs = list[Graph]()
        tensors = list[Tensor]()
        # Buffers that changed since forward began. If a module updates its own buffers (running statistics),
        # it does so again below, and their version rises once more: that is allowed.
        buffers = () if recipe is None else recipe.buffers
        changed = [(buffer, buffer._version) for buffer, version in buffers if buffer._version != version]
        with contextlib.nullcontext() if recipe is None else recipe.followed(), self._same_buffers():
            for graph, _ in self._graphs(expert_rows.rows_NM, expert_rows.groups):
                for buffer, version in changed:
                    if buffer._version == version and graph.saved_slots.has_saved(buffer):
                        raise changed_in_place(buffer)
                tensors += graph.saved_slots.close()
                graphs.append(graph)
        return Hidden(tensors=tensors, graph=graphs, expendable=True)

    @contextlib.contextmanager
    def _same_buffers(self) -> Iterator[None]:
        """A context in which experts may change their buffers, which are restored when it ends.

        Forward has already counted the rows in running statistics, such as those of BatchNorm. Computing the
        rows again must not count them twice.
        """
        saved_buffers = [
            (module._buffers, name, buffer, buffer._version, buffer.clone())
            for module in self.local.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        try:
            yield
        finally:
            for buffers, name, buffer, version, value in saved_buffers:
                if buffer._version != version:
                    # The version stays the same. A graph recorded in the block may have saved the buffer, and
                    # would raise an error for a new version, although the value is restored.
                    with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
                        buffer.copy_(value)
                buffers[name] = buffer

    def join(
        self, parts: Sequence[tuple[Hidden, Runs]], num_rows: int, *, space: Allocate | None = None
    ) -> Hidden:
        """Combines graphs and saved tensors of several forward chunks, for one backward chunk.

        A graph cannot be split, so every backward chunk (micro-batch) consists of whole forward chunks.

        parts: for each forward chunk: its graphs and tensors, and the pairs (slice of its rows, slice of the
            backward chunk's rows).
        num_rows: number of rows of the backward chunk.
        space: not used, because nothing is copied.
        """
        graphs = list[Graph]()
        tensors = list[Tensor]()
        for part, runs in parts:
            for graph in part.graph:
                forward_rows, backward_rows = next(
                    run for run in runs if run[0].start <= graph.chunk_rows.start < run[0].stop
                )
                start = backward_rows.start + graph.chunk_rows.start - forward_rows.start
                at = slice(start, start + graph.chunk_rows.stop - graph.chunk_rows.start)
                graphs.append(replace(graph, chunk_rows=at))
            tensors += part.tensors
        return Hidden(tensors=tensors, graph=graphs)

    def _run(self, expert: int, rows_NM: Tensor) -> Tensor:
        """Runs one expert on its rows, and returns its output.

        expert: the expert's number on this rank.
        rows_NM: (N, M), its N rows, with M = d_model columns. The output has the same shape.

        Raises TypeError or ValueError if the output is no tensor of the rows' shape.
        """
        output = self._call(expert, rows_NM)
        name = type(self._module(expert)).__name__
        if not isinstance(output, Tensor):
            raise TypeError(f"expert {name} must return a tensor, not {type(output).__name__}")
        if output.shape != rows_NM.shape:
            raise ValueError(
                f"expert {name} returned shape {tuple(output.shape)}; "
                f"it must be that of its rows, {tuple(rows_NM.shape)}"
            )
        return output

    def _module(self, expert: int) -> nn.Module:
        """Returns the module that computes an expert, by the expert's number on this rank."""
        return self.local[expert]

    def _call(self, expert: int, rows_NM: Tensor) -> Any:
        """Calls an expert's module with its rows, and returns its unchecked output.

        expert: the expert's number on this rank.
        rows_NM: (N, M), its N rows, with M = d_model columns.
        """
        return self._module(expert)(rows_NM)

    def _gradients(self, graph: Graph, grad_output: Tensor) -> Sequence[Tensor | None]:
        """Returns the gradients of a graph's rows, and then of each parameter of the modules, or None.

        graph: the graph.
        grad_output: the gradient of the graph's output, of the same shape.
        """
        return gradients(graph, list(self.parameters()), grad_output)

    def input_gradient(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        out = torch.empty_like(grad_NM) if expert_rows.out is None else expert_rows.out
        grad_weight_N = torch.empty_like(weight_N)
        totals: list[Tensor | None] = []
        saved_tensors = iter(hidden.tensors)
        for graph in hidden.graph:
            at = graph.chunk_rows
            saved_slots = graph.saved_slots
            saved_slots.tensors = list(itertools.islice(saved_tensors, graph.num_tensors))
            saved_slots.rows = expert_rows.rows_NM[at]
            output = saved_slots.get(graph.saved_output)
            grad_weight_N[at] = row_dot(output, grad_NM[at].to(output.dtype)).to(grad_weight_N.dtype)
            if graph.output is None:
                out[at] = 0
                saved_slots.close()
                continue
            grad_output = (grad_NM[at] * weight_N[at].unsqueeze(1)).to(output.dtype)
            grads = self._gradients(graph, grad_output)
            saved_slots.close()
            out[at] = 0 if grads[0] is None else grads[0]
            totals = totals or [None] * (len(grads) - 1)
            for i, grad in enumerate(grads[1:]):
                total = totals[i]
                if grad is not None:
                    totals[i] = grad if total is None else total + grad
        return out, grad_weight_N, totals

    def weight_gradient(
        self, pending: list[Tensor | None], groups: RowGroups, sums: Sequence[GradientSum | None]
    ) -> None:
        for total, grad in zip(sums, pending, strict=bool(pending)):  # empty if nothing needs a gradient
            if total is not None and grad is not None:
                total.add(grad)


def build_modules(build: Callable[..., nn.Module], d_model: int, d_hidden: int) -> Callable[[], nn.Module]:
    """Returns a function without arguments that builds one expert by calling the user's ``build``.

    It calls build(d_model, d_hidden) if ``build`` accepts two arguments, else build().

    Raises ValueError if ``build`` can be called in neither way.
    """
    try:
        signature = inspect.signature(build)
    except ValueError as error:  # some built-in callables have no signature
        raise ValueError(
            f"expert ({build!r}) must be a callable whose arguments inspect.signature can read: wrap it in a "
            "function, such as lambda: build()"
        ) from error
    # A module class without its own __init__ inherits nn.Module's, which declares *args but accepts none.
    takes_none = isinstance(build, type) and vars(nn.Module)["__init__"] is getattr(build, "__init__", None)
    for args in ((),) if takes_none else ((d_model, d_hidden), ()):
        try:
            signature.bind(*args)
        except TypeError:
            continue
        return lambda: build(*args)
    raise ValueError(f"expert ({build!r}) must be callable as expert(d_model, d_hidden) or expert()")


# ---- experts from MoELayer's arguments ``expert`` and ``shared_expert``, if these are no names


def given_experts(
    expert: nn.Module | Callable[..., nn.Module],
    sizes: tuple[int, int, int],
    shard: Shard,
    first_expert: int,
    options: dict[str, Any],
) -> Experts:
    """Returns the experts for MoELayer's argument ``expert``, if it is not "ffn" or "swiglu".

    expert: a `pmoe.experts.Experts`, a ModuleList of this rank's experts, or a callable that builds one
        expert.
    sizes: d_model, d_hidden, and the number of this rank's experts.
    shard: the part of the hidden columns that this rank must hold.
    first_expert: global index of local expert 0, from which random seeds follow.
    options: device and dtype of the built modules; with None the modules stay as they were built.

    Raises ValueError if ``expert`` holds more or fewer than this rank's experts, or other hidden columns.
    Raises TypeError if ``expert`` is anything else.
    """
    d_model, d_hidden, local = sizes
    if isinstance(expert, Experts | nn.ModuleList):
        experts = expert if isinstance(expert, Experts) else ModuleExperts(expert)
        if experts.num_local_experts != local:
            raise ValueError(
                f"expert (a {type(expert).__name__} of {experts.num_local_experts}) must hold this rank's "
                f"{local} experts"
            )
        if experts.shard != shard:
            raise ValueError(
                f"expert (a {type(expert).__name__}, {experts.shard}) must hold this rank's part of the "
                f"hidden columns ({shard}): build it with that shard, an argument of stacked experts"
            )
        return experts
    if shard.count > 1 and callable(expert):
        raise ValueError(
            f"expert ({expert!r}) must be ffn or swiglu, or a pmoe.experts.Experts of this rank's "
            "columns, if experts are sharded over the ranks of a node: pmoe cannot split the hidden columns "
            "of a module"
        )
    if isinstance(expert, nn.Module) or not callable(expert):
        raise TypeError(
            f"expert ({expert!r}) must be a name, a callable that builds one expert, or a "
            f"torch.nn.ModuleList of this rank's {local} experts"
        )
    build = build_modules(expert, d_model, d_hidden)
    modules = seeded(lambda _: build(), first_expert=first_expert, count=local)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expert ({expert!r}) must build a torch.nn.Module, not {type(module).__name__}")
    if all(option is None for option in options.values()):  # without .to(), which fails on fake tensors
        return ModuleExperts(modules)
    return ModuleExperts(module.to(**options) for module in modules)


def shared_experts(
    shared: int | nn.Module,
    kind: ExpertName,
    d_model: int,
    activation: ActivationName,
    bias: bool,
    first_expert: int,
    options: dict[str, Any],
) -> Experts:
    """Returns the shared expert, which is the same on every rank and computes every token.

    shared: number of its hidden columns, or a module.
    kind, activation, bias: "ffn" or "swiglu", the nonlinearity, and whether it has biases. Used only if
        ``shared`` is a number.
    d_model: the number of columns of a token.
    first_expert: a number that no routed expert has, so that the shared expert's random seed is its own.
    options: device and dtype of the built expert. If ``shared`` is a module, it is not changed.

    Raises ValueError for fewer than one column, TypeError if ``shared`` is neither an int nor a module.
    """
    experts: Experts
    if isinstance(shared, nn.Module):
        experts = ModuleExperts([shared])
    elif is_int(shared):
        check_count(shared_expert=shared)
        experts = make_stacked(kind, d_model, int(shared), 1, activation, bias, **options)
        initialise(experts, first_expert=first_expert)
    else:
        raise TypeError(f"shared_expert ({shared!r}) must be None, an int or a torch.nn.Module")
    experts.is_parallel = False
    return experts
