"""Passes of a layer with a shared expert, which computes every token on the token's own rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pmoe.engine.passes.backward import Backward
from pmoe.engine.passes.base import Inputs, Pass, SavedUnit, Unit
from pmoe.engine.passes.forward import Forward
from pmoe.experts.base import ExpertRows, Experts
from pmoe.experts.products import RowGroups

SHARED: Unit = (-1, "_S")
"""The key of the shared expert's tensors, which stands for all tokens of the rank. Other keys name a chunk.
"""


class _WithSharedExpert(Pass):
    """A pass with a task that computes the shared expert (task X).

    shared_TM: (T, M), the shared expert's results for T tokens with M = d_model columns; in backward, the
        gradients of its inputs. None until the task has run. `Pass.output` adds it to the routed experts'
        results.
    """

    shared_TM: Tensor | None

    @property
    def expert(self) -> Experts:
        """The layer's shared expert."""
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
        """Returns the argument for methods of the shared expert: all tokens, its parameters and new memory.

        The new memory becomes `shared_TM`, to which the expert writes its results.

        inputs: the tensors of the call.
        """
        self.shared_TM = torch.empty_like(self.result_TM)
        return ExpertRows(inputs.x_TM, self.groups(SHARED), inputs.shared_parameters, out=self.shared_TM)


class SharedExpertForward(_WithSharedExpert, Forward):
    """A forward pass of a layer with a shared expert."""

    def shared(self, _chunk: int) -> None:
        """Computes the shared expert's output for all tokens (task X).

        Raises RuntimeError if the expert is a user's module that changes its input in place, because the
        routed experts read the same input.
        """
        inputs = self.inputs
        expert = self.expert
        assert inputs.shared_weight_T is not None
        expert_rows = self.all_tokens(inputs)
        x_TM = inputs.x_TM
        has_version = expert.are_modules and not x_TM.is_inference()
        version = x_TM._version if has_version else 0
        # A module that changes its input is found by the input's version counter. Inference tensors have
        # none, so the module gets a copy, which it may change.
        if expert.are_modules and not has_version:
            expert_rows = expert_rows._replace(rows_NM=x_TM.clone())
        with inputs.autocast_for(expert):
            _, hidden = expert.compute(expert_rows, inputs.shared_weight_T, keep=self.keep)
        if has_version and x_TM._version != version:
            name = type(expert.as_modules()[0]).__name__
            raise RuntimeError(
                f"shared_expert ({name}) changes its input in place, which the routed experts read too: its "
                "first operation must make a new tensor (inplace=False)"
            )
        if self.keep:
            self.saved.kept[SHARED] = SavedUnit(hidden=hidden)


class SharedExpertBackward(_WithSharedExpert, Backward):
    """A backward pass of a layer with a shared expert.

    shared_pending: the result of `Experts.input_gradient` that `Experts.weight_gradient` needs.
    grad_shared_weight: (T,), for each of T tokens the gradient of the factor by which the shared expert's
        output was multiplied.
    """

    shared_pending: Any
    grad_shared_weight: Tensor

    def shared(self, _chunk: int) -> None:
        """Computes the gradients of the shared expert's inputs and of the factors of its outputs (task X).

        Each token has a factor. Forward has multiplied the shared expert's output by it.
        """
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
        """Computes the gradients of the shared expert's parameters (task XW)."""
        self.expert.weight_gradient(self.shared_pending, self.groups(SHARED), self.shared_sums)
        self.shared_pending = None
