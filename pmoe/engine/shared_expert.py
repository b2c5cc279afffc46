"""The shared expert's tasks: it computes all tokens of its rank, none of which travels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pmoe.engine.backward_pass import Backward
from pmoe.engine.forward_pass import Forward
from pmoe.engine.passes import Inputs, Kept, Pass, Unit
from pmoe.experts.base import ExpertRows, Experts
from pmoe.experts.products import RowGroups

SHARED: Unit = (-1, "_S")
"""All tokens, by the shared expert."""


class _WithSharedExpert(Pass):
    shared_TM: Tensor | None

    @property
    def expert(self) -> Experts:
        found = self.plan.modules.shared_expert
        assert found is not None
        return found

    def groups(self, unit: Unit) -> RowGroups:
        if unit != SHARED:
            return super().groups(unit)
        tokens = self.source_TM.shape[0]
        ends = None
        if self.source_TM.is_cuda:
            ends = torch.full((1,), tokens, dtype=torch.int32, device=self.source_TM.device)
        return RowGroups(counts=(tokens,), ends=ends)

    def all_tokens(self, inputs: Inputs) -> ExpertRows:
        """`Pass.output` adds its result."""
        self.shared_TM = torch.empty_like(self.result_TM)
        return ExpertRows(inputs.x_TM, self.groups(SHARED), inputs.shared_parameters, out=self.shared_TM)


class SharedExpertForward(_WithSharedExpert, Forward):
    def shared(self, _chunk: int) -> None:
        inputs, expert = self.inputs, self.expert
        assert inputs.shared_weight_T is not None
        given, x_TM = self.all_tokens(inputs), inputs.x_TM
        counts = expert.are_modules and not x_TM.is_inference()
        version = x_TM._version if counts else 0
        if expert.are_modules and not counts:  # inference counts no versions
            given = replace(given, rows_NM=x_TM.clone())
        with inputs.autocast_for(expert):
            _, hidden = expert.compute(given, inputs.shared_weight_T, keep=self.keep)
        if counts and x_TM._version != version:
            name = type(expert.as_modules()[0]).__name__
            raise RuntimeError(
                f"shared_expert ({name}) changes its input in place, which the routed experts read too: its "
                "first operation must make a new tensor (inplace=False)"
            )
        if self.keep:
            self.left.kept[SHARED] = Kept(hidden=hidden)


class SharedExpertBackward(_WithSharedExpert, Backward):
    shared_pending: Any
    grad_shared_weight: Tensor

    def shared(self, _chunk: int) -> None:
        inputs, hidden = self.saved.inputs, self.kept[SHARED].hidden
        assert inputs.shared_weight_T is not None and hidden is not None
        _, self.grad_shared_weight, self.shared_pending = self.expert.input_gradient(
            self.source_TM.clone(),  # it is written over, and every chunk still reads it
            self.all_tokens(inputs),
            inputs.shared_weight_T,
            hidden,
        )

    def shared_wgrad(self, _: int) -> None:
        self.expert.weight_gradient(self.shared_pending, self.groups(SHARED), self.shared_sums)
        self.shared_pending = None
