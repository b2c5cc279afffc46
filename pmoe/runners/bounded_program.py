"""The runner of bounded pass programs: both passes run although the host knows no row count.

`pmoe.program.bounded` describes bounded programs. The runner allocates memory for the most rows of each chunk
(`RowBounds`), and passes tensors that say which rows exist (`DeviceRows`). So a CUDA graph can hold the call.
If the rows of any rank do not fit, no row exists on any rank: the output and all gradients are 0.

Letters: T tokens, K choices of a token, n chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pmoe.engine.autograd import Path
from pmoe.engine.passes.base import Inputs
from pmoe.program.backend import CompiledPass
from pmoe.program.bounded import DeviceRows, RowBounds
from pmoe.runners.fused import NoGradientsRunner
from pmoe.runners.program import PassRunner, ProgramRows


@dataclass(frozen=True, kw_only=True)
class BoundedProgramRunner(PassRunner):
    """A runner that computes both passes by programs, if the host does not know the row counts.

    bounds: the most rows of each chunk.
    device_rows: which rows exist.
    """

    bounds: RowBounds
    device_rows: DeviceRows

    def rows(self) -> ProgramRows:
        bounds = self.bounds
        rows = self.device_rows
        send_nWE, recv_nWE = bounds.counts(self.modules.grid.all.rank)
        return ProgramRows(
            num_received=bounds.chunks * bounds.received,
            num_local=bounds.chunks * bounds.stays,
            ends=rows.ends,
            position=rows.position_TK,
            pair_by_number=rows.pair_by_number,
            regroup=rows.regroup,
            regroup_weights=rows.regroup_weights,
            sends_weights=True,
            send_nWE=send_nWE,
            recv_nWE=recv_nWE,
            rows_by_rank=rows.rows_by_rank,
        )

    def compiled(self, direction: str, *, keep: bool, trained: frozenset[str]) -> CompiledPass:
        restore = self.restore if keep else None
        return self.programs.bounded(
            self.modules, self.bounds.chunks, direction, restore=restore, trained=trained
        )

    def weights(self, weight_TK: Tensor) -> Tensor:
        # Rows that do not exist have the (token, choice) pair T * K, so the program reads one number more.
        weights = weight_TK.new_zeros(weight_TK.numel() + 1)
        weights[:-1] = weight_TK.flatten()
        return weights

    def weight_gradients(self, weight_TK: Tensor) -> tuple[Tensor, Tensor]:
        # The program writes only the gradients of pairs that have rows, and one number more, as above.
        gradients = weight_TK.new_zeros(weight_TK.numel() + 1)
        return gradients, gradients[:-1].view(weight_TK.shape)

    def count_traffic(self, direction: str, inputs: Inputs, like: Tensor) -> None:
        """Counts nothing: the host does not know how many rows have travelled."""


class NoGradientsProgramRunner(NoGradientsRunner):
    """`NoGradientsRunner` for a call whose forward pass is a bounded program."""

    name: ClassVar[Path] = "program"
