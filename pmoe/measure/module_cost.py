"""The cost of a user's own module: measures forward and backward for several numbers of rows.

The module is a black box (FSMoE, Section 3.2): it is only called. A module that communicates with other ranks
inside cannot be measured on one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel.distributed import _find_tensors

from pmoe.arguments import check_count, check_kind, check_module, is_int, list_of
from pmoe.measure.timing import clock_of, median_seconds
from pmoe.planner.costs import Fit, fit

ModuleInputs = Tensor | tuple[Any, ...]
"""The arguments of a module: one tensor, or a tuple of all arguments."""

TABLES = "_parameters", "_buffers", "_modules"
"""Attributes of a module in which parameters, buffers and child modules are stored."""

RUNS = 5
"""Number of timed runs for each number of rows. One run that is not timed comes first, to warm up."""


def profile_module(
    module: nn.Module,
    rows: Sequence[int],
    make_input: int | Callable[[int], ModuleInputs],
) -> tuple[Fit, Fit]:
    """Returns the seconds of a module's forward and backward pass, as lines over the number of rows.

    Each line, seconds = alpha + beta * rows, is fitted by least squares through the median of five runs for
    each number of ``rows``.

    Args:
        module: any module. It runs in its present mode, training or eval.
        rows: two or more distinct numbers of rows.
        make_input: the number of columns of a random tensor (rows, columns), which gets the dtype and device
            of the module's first floating-point parameter; or a function that makes the module's arguments
            for a number of rows.

    Backward starts from all tensors in the module's result, and computes gradients of the module's parameters
    and of its floating-point arguments. If no tensor of the result requires a gradient, backward counts as 0
    seconds.

    Afterwards the attributes and buffers of the module and its children, their gradients, and the state of
    torch's random generators are as before. No gradient is accumulated into a parameter, so hooks on gradient
    accumulation do not run. A change inside an attribute's value, such as in a list, is not undone.

    Raises ValueError if rows has fewer than two distinct numbers or a number below 1, or if make_input is
    below 1.

    Example: a module of 1 ms and 2 us a row, rows 100, 200, 400 -> forward alpha 1e-3, beta 2e-6.
    """
    check_module(module=module)
    rows = list_of("rows", rows)
    if not all(is_int(count) and count > 0 for count in rows) or len(set(rows)) < 2:
        raise ValueError(f"rows ({rows}) must be two or more distinct numbers of at least 1")
    if not callable(make_input):
        make_input = _random_input(module, make_input)
    samples = []
    with _left_as_it_was(module), torch.inference_mode(False), torch.enable_grad():
        for count in rows:
            arguments = _arguments(make_input(count))
            tensors = (
                argument for argument in (*arguments, *module.parameters()) if isinstance(argument, Tensor)
            )
            clock = clock_of(*(tensor.device for tensor in tensors))
            run = functools.partial(_timed_run, module, arguments, clock)
            ((forward, backward),) = median_seconds([run], RUNS)
            samples.append((float(count), forward, backward))
    return fit((n, forward) for n, forward, _ in samples), fit((n, backward) for n, _, backward in samples)


def _timed_run(
    module: nn.Module, arguments: tuple[Any, ...], now: Callable[[], float]
) -> tuple[float, float]:
    """Returns the seconds of one forward and of one backward pass of a module.

    The module gets copies of its arguments, because it may change them in place, and autograd forbids writing
    to a leaf that requires a gradient. If the module changes a copy, backward still computes the gradient of
    the value that the copy had before.

    module: the module.
    arguments: the module's arguments.
    now: a clock in seconds, which waits for the device before it reads the time.
    """
    copies = [_copied(argument) for argument in arguments]
    starts: list[Any] = [get_gradient_edge(argument) for argument in copies if _wants_gradient(argument)]
    begin = now()
    output = module(*copies)
    forward = now() - begin
    ends = [tensor for tensor in _find_tensors(output) if tensor.requires_grad]
    starts += [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not ends or not starts:
        return forward, 0.0
    gradients = [torch.ones_like(end) for end in ends]
    begin = now()
    torch.autograd.grad(ends, starts, gradients, allow_unused=True)
    return forward, now() - begin


def _wants_gradient(argument: object) -> bool:
    """True if an argument is a tensor that requires a gradient."""
    return isinstance(argument, Tensor) and argument.requires_grad


def _copied(argument: Any) -> Any:
    """Returns a clone of a tensor; returns any other argument unchanged.

    The clone of a tensor that requires a gradient is part of the autograd graph, so it is no leaf and a
    module may change it in place.
    """
    return argument.clone() if isinstance(argument, Tensor) else argument


def _arguments(made: ModuleInputs) -> tuple[Any, ...]:
    """Returns the arguments of a module as a tuple, prepared for a backward pass.

    Floating-point tensors are detached and require gradients, so they are leaves of the graph.

    made: one tensor, or a tuple of all arguments.
    """
    check_kind((Tensor, tuple), "a tensor or a tuple", **{"what make_input made": made})
    return tuple(
        argument.detach().requires_grad_()
        if isinstance(argument, Tensor) and argument.is_floating_point()
        else argument
        for argument in (made if isinstance(made, tuple) else (made,))
    )


def _random_input(module: nn.Module, columns: int) -> Callable[[int], Tensor]:
    """Returns a function that makes a random tensor (rows, columns) for a number of rows.

    The tensor has the dtype and device of the module's first floating-point parameter.
    """
    check_count(make_input=columns)
    like = next(
        (parameter for parameter in module.parameters() if parameter.is_floating_point()), torch.empty(0)
    )
    return lambda count: torch.randn(count, columns, dtype=like.dtype, device=like.device)


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Returns a context whose end undoes all changes of a module that were made inside the context.

    At the end of the context these have the values that they had at its beginning:

    - the attributes of the module and of its children, with their lists of parameters, buffers and hooks;
    - the values of the buffers, but not those of the parameters;
    - the state of torch's random generators.
    """
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (table, dict(table))
        for part in module.modules()
        for table in (vars(part), *(vars(part)[name] for name in TABLES))
    ]
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    on_gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(on_gpus):
            yield
    finally:
        for table, entries in attributes:
            table.clear()
            table.update(entries)
        with torch.inference_mode(False), torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
