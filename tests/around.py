"""A wrapper such as libraries put around a module."""

from __future__ import annotations

from typing import Any

from torch import nn


class Around(nn.Module):
    """Calls the module that it holds, and changes nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.base_layer = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)
