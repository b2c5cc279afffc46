"""Passes with a shared expert, which computes all tokens of its rank; no row of it travels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Inputs, Kept, Pass, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.experts.base import ExpertRows, Experts
from pmoe.experts.products import RowGroups

SHARED: Unit = (-1, "_S")
"""The unit of the shared expert: all tokens of the rank."""


class _WithSharedExpert(Pass):
    """A pass with a task of the shared expert (X).

    shared_TM: (T, M), the shared expert's result or dT_I; None before the task. `Pass.output` adds it.
    """

    shared_TM: Tensor | None

    @property
    def expert(self) -> Experts:
        """The shared expert."""
        expert = self.plan.modules.shared_expert
        assert expert is not None
        return expert

    def groups(self, unit: Unit) -> RowGroups:
        if unit != SHARED:
            return super().groups(unit)
        tokens = self.source_TM.shape[0]
        ends = None
        if self.source_TM.is_cuda:
            ends = torch.full((1,), tokens, dtype=torch.int32, device=self.source_TM.device)
        return RowGroups(counts=(tokens,), ends=ends)

    def all_tokens(self, inputs: Inputs) -> ExpertRows:
        """Returns all tokens as the shared expert's rows, with new memory for its result."""
        self.shared_TM = torch.empty_like(self.result_TM)
        return ExpertRows(inputs.x_TM, self.groups(SHARED), inputs.shared_parameters, out=self.shared_TM)


class SharedExpertForward(_WithSharedExpert, Forward):
    """A forward pass with a shared expert."""

    def shared(self, _chunk: int) -> None:
        """Runs X: computes the shared expert's output for all tokens.

        Raises RuntimeError if a module changes its input in place, because the routed experts read it too.
        """
        inputs = self.inputs
        expert = self.expert
        assert inputs.shared_weight_T is not None
        expert_rows = self.all_tokens(inputs)
        x_TM = inputs.x_TM
        has_version = expert.are_modules and not x_TM.is_inference()
        version = x_TM._version if has_version else 0
        if expert.are_modules and not has_version:  # inference tensors have no version: gives it a copy
            expert_rows = replace(expert_rows, rows_NM=x_TM.clone())
        with inputs.autocast_for(expert):
            _, hidden = expert.compute(expert_rows, inputs.shared_weight_T, keep=self.keep)
        if has_version and x_TM._version != version:
            name = type(expert.as_modules()[0]).__name__
            raise RuntimeError(
                f"shared_expert ({name}) changes its input in place, which the routed experts read too: its "
                "first operation must make a new tensor (inplace=False)"
            )
        if self.keep:
            self.left.kept[SHARED] = Kept(hidden=hidden)


class SharedExpertBackward(_WithSharedExpert, Backward):
    """A backward pass with a shared expert.

    shared_pending: the state that the task XW needs from X.
    grad_shared_weight: (T,) the gradient of the factor of the shared expert's output.
    """

    shared_pending: Any
    grad_shared_weight: Tensor

    def shared(self, _chunk: int) -> None:
        """Runs X: computes the gradients of the shared expert's inputs."""
        inputs = self.saved.inputs
        hidden = self.kept[SHARED].hidden
        assert inputs.shared_weight_T is not None and hidden is not None
        _, self.grad_shared_weight, self.shared_pending = self.expert.input_gradient(
            self.source_TM.clone(),  # a copy: experts overwrite it, and every chunk still reads dT_O
            self.all_tokens(inputs),
            inputs.shared_weight_T,
            hidden,
        )

    def shared_wgrad(self, _: int) -> None:
        """Runs XW: computes the gradients of the shared expert's parameters."""
        self.expert.weight_gradient(self.shared_pending, self.groups(SHARED), self.shared_sums)
        self.shared_pending = None
