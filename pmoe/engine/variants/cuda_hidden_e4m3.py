"""Passes on a GPU that keep the hidden activation T_M in e4m3, packed and unpacked by CUDA kernels.

e4m3 is a float8 type; a layer keeps T_M in it if its restore pair has the fate "e4m3" for T_M
(`pmoe.schedule.restore`). One launch packs T_M of all rows of a task. In backward one launch unpacks each
range of rows. The kernels need no temporary memory. If the kernels cannot read T_M, PyTorch operations pack
and unpack it block by block (`pmoe.engine.variants.hidden_e4m3`), and a warning gives the reason once.
"""

from __future__ import annotations

from torch import Tensor

from pmoe.engine.passes.base import Pass
from pmoe.engine.variants.cuda_kernels import is_readable
from pmoe.engine.variants.hidden_e4m3 import PackingBackward, PackingForward
from pmoe.kernels import wire as wire_kernels
from pmoe.kernels.wire import MessageKernels
from pmoe.warn import warn_once


class _KernelsOfHidden(Pass):
    """A pass that packs or unpacks T_M by the kernels that also pack and unpack messages of rows.

    hidden_kernels: launches the kernels; None before the first launch.
    """

    hidden_kernels: MessageKernels | None = None

    def kernels_for(self, hidden_NG: Tensor) -> MessageKernels | None:
        """Returns the object that launches the kernels on T_M; None if they cannot read these rows.

        Warns once for each reason why they cannot.

        hidden_NG: (N, G), rows of T_M.
        """
        if self.hidden_kernels is not None:
            return self.hidden_kernels
        reason = wire_kernels.refusal("e4m3", hidden_NG)
        if reason is None and not is_readable(hidden_NG):
            reason = "rows of T_M must begin at multiples of 16 bytes"
        if reason is not None:
            message = f"PyTorch operations pack T_M to e4m3, without pmoe's kernels: {reason}"
            warn_once(message, for_each_reason=True)
            return None
        # Made in a task of the experts, so that the kernels run on the stream of these tasks.
        self.hidden_kernels = MessageKernels("e4m3", hidden_NG)
        return self.hidden_kernels


class PackingForwardOnCuda(_KernelsOfHidden, PackingForward):
    """A forward pass on a GPU that keeps the hidden activation T_M in e4m3."""

    def pack_hidden(self, hidden_NG: Tensor, packed_NC: Tensor) -> None:
        kernels = self.kernels_for(hidden_NG)
        if kernels is None:
            super().pack_hidden(hidden_NG, packed_NC)
        else:
            kernels.pack(hidden_NG, None, 0, packed_NC)


class PackingBackwardOnCuda(_KernelsOfHidden, PackingBackward):
    """A backward pass on a GPU that unpacks the hidden activation T_M from e4m3."""

    def unpack_hidden(self, packed_NC: Tensor, hidden_NG: Tensor) -> None:
        kernels = self.kernels_for(hidden_NG)
        if kernels is None:
            super().unpack_hidden(packed_NC, hidden_NG)
        else:
            kernels.unpack(packed_NC, None, hidden_NG)
