"""A layer by FlashDMoE's persistent kernels: each pass of it, dispatch and combine with it, is one launch.

The gate and the sorting of its slots come before (thesis, Algorithm 1, has them inside). Row counts, grants
and rows travel through the symmetric heap while the kernel runs.

Whether a batch fits is decided before the launch, by numbers that all ranks share: the largest number of
tokens of a rank, and of rows of a rank for an expert. They come with the exchange of counts that every layer
makes, for which the host waits once. A batch that does not fit goes to the pipeline on all ranks.

As everywhere T_DO is not saved, the routing is never decided twice, and the restore pair says what becomes of
T_DI and T_M; both are kept by cell, of C rows each:

    T_DI  keep         copied as its tiles are multiplied
          communicate  sent again beside the gradients
    T_M   keep         as the first product wrote it
          recompute    by the first product again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pmoe.engine.autograd import Path, Saved
from pmoe.engine.passes import Inputs
from pmoe.experts.stacked import split_parameters
from pmoe.kernels.comet.steps import HeapSteps
from pmoe.kernels.flashdmoe import CellRows, PersistentLauncher, RankPass
from pmoe.runners.fused import dense
from pmoe.schedule.restore import Restore


@dataclass(frozen=True)
class PersistentRunner:
    """Both passes of a call, a launch each. restore: a pair that offloads nothing."""

    steps: HeapSteps[PersistentLauncher]
    rows: CellRows
    activation: str
    restore: Restore
    name: ClassVar[Path] = "persistent"

    def forward(self, inputs: Inputs, *, keep: bool) -> tuple[Tensor, Saved | None]:
        sends_again, weight_TK = self.restore.dispatched == "communicate", inputs.weight_TK
        parameters = split_parameters(inputs.parameters)
        with self.steps.all_or_give_up():
            made = self._begin(inputs.x_TM, weight_TK, parameters)
            made.forward(
                keeps_input=keep and not sends_again, keeps_hidden=keep and self.restore.hidden == "keep"
            )
            found = self._launch(made)
        x_TM = inputs.x_TM if sends_again else None
        kept = [weight_TK, *parameters, x_TM, found["input"], found["hidden"]]
        return found["result"], Saved(kept, self._backward) if keep else None

    def _backward(self, tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
        weight_TK, w1, w2, b1, b2, x_TM, *kept = tensors
        tensors.clear()
        x_TM, needs = None if x_TM is None else dense(x_TM), (*wanted[3:], False, False)[:4]
        with self.steps.all_or_give_up():
            made = self._begin(grad_TM, weight_TK, (w1, w2, b1, b2))
            made.backward(x_TM=x_TM, kept=kept, needs=needs)
            found = self._launch(made)
        of_parameters = [found[name] for name in ("of_w1", "of_w2", "of_b1", "of_b2")]
        of_weight = found["weight_gradient"].to(weight_TK.dtype)
        return [found["result"], of_weight, None, *of_parameters[: len(wanted) - 3]]

    def _begin(self, source_TM: Tensor, weight_TK: Tensor, parameters: Sequence[Tensor | None]) -> RankPass:
        heap = self.steps.launcher.heaps[0]
        return RankPass(heap, self.rows, dense(source_TM), weight_TK, parameters, self.activation)

    def _launch(self, made: RankPass) -> dict[str, Any]:
        self.steps.launcher.launch([made])
        return made.tensors
