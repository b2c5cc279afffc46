"""What a layer's backward pass carries for other layers."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist


class Gradients(Protocol):
    """Other layers' gradients, which a layer's backward pass may carry (FSMoE, Section 5)."""

    @property
    def t_gar(self) -> float:
        """Seconds that they take inside of the pass, for the solver of degrees."""

    def begins(self) -> None:
        """The backward pass begins."""

    def inside(self) -> dist.Work | None:
        """The task of its schedule: what travels between the last S and the first R."""

    def ends(self) -> None:
        """It has ended."""
