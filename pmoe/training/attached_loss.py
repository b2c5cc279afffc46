"""Losses that are attached to a tensor, and a warning if a program drops that tensor.

A backward pass through the tensor also computes the gradients of the attached losses.

`AttachedLosses.attach` returns such a tensor. If a program does not use it in the loss that the program
differentiates, the attached loss has no gradients, and torch raises no error. So each attached loss has a
record in the autograd graph:

    backward reaches the record                      the loss was differentiated
    the graph is freed, backward never reached it    the record adds an entry to a list
    next `attach`, or next optimizer step            a warning, if the list has entries
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from pmoe.warn import warn_once


class _Record:
    """The record of one loss in the autograd graph. The record is freed together with the graph.

    unused: the list that gets an entry if the loss was never differentiated.
    """

    def __init__(self, unused: list[int]) -> None:
        self.unused = unused
        self.was_differentiated = False

    def __del__(self) -> None:
        if not self.was_differentiated:
            self.unused.append(1)


class _Attached(torch.autograd.Function):
    """Returns a copy of a tensor of any shape. Its backward pass also differentiates a scalar loss.

    In backward the tensor gets the gradient of the copy, and the loss gets the gradient 1.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, record: _Record) -> Tensor:
        ctx.like = loss.new_ones(())
        ctx.record = record
        return y.clone()  # torch's schedules detach outputs in place, which a view of y does not allow

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.record.was_differentiated = True
        return grad, ctx.like, None


class AttachedLosses:
    """Attaches losses to tensors, and warns if a loss was never differentiated.

    Only the rank that did not differentiate its loss warns. That rank raises no error, because the other
    ranks may be waiting for it in a collective.
    """

    def __init__(self) -> None:
        self._unused: list[int] = []
        self._handle: RemovableHandle | None = None

    def attach(self, y: Tensor, loss: Tensor) -> Tensor:
        """Returns a tensor with the values of ``y``. Its backward pass also differentiates ``loss``.

        y: of any shape.
        loss: a scalar.
        """
        self.warn_of_unused()
        if self._handle is None:
            # The hook must not keep this object and its model alive, so it refers to the list only.
            hook = functools.partial(_warn_before_step, self._unused)
            self._handle = register_optimizer_step_pre_hook(hook)
        attached: Tensor = _Attached.apply(y, loss, _Record(self._unused))  # type: ignore[no-untyped-call]
        return attached

    def warn_of_unused(self) -> None:
        """Warns, once in a process, if a loss was not differentiated before its graph was freed."""
        _warn(self._unused)

    def remove(self) -> None:
        """Removes the hook that warns before steps of optimizers."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _warn_before_step(unused: list[int], *_: Any) -> None:
    """Warns of losses that were not differentiated. A hook that runs before each optimizer step."""
    _warn(unused)


def _warn(unused: list[int]) -> None:
    """Warns if the list has an entry, and empties it."""
    if unused:
        unused.clear()
        warn_once(
            "the result of BalanceLoss.attach was dropped or not differentiated, so a balance loss has no "
            "gradients: use the result (y = balance.attach(y, ...)) in place of y, and evaluate under "
            "torch.no_grad()"
        )
