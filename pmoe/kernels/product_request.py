"""One grouped product: what is asked for, and the operands of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pmoe.kernels.extension import device_name

Form = Literal["forward", "input", "weight"]
"""Rows times a matrix an expert, the gradient of those rows, or that of the matrices."""


def bucket(rows: int) -> int:
    """The least power of two that is not below ``rows``.

    Example: 1000 -> 1024, 1024 -> 1024, 0 -> 1.
    """
    return 1 << max(rows - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True)
class ProductRequest:
    """Which product, of what sizes, on what device; devices of one name count as one.

    device_name: "" is the device's own. rows: any number, of which the `bucket` is kept.
    """

    form: Form
    device: torch.device = field(compare=False)
    device_name: str = ""
    dtype: torch.dtype
    experts: int
    rows: int
    in_features: int
    out_features: int
    bias: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_name", self.device_name or device_name(self.device))
        object.__setattr__(self, "rows", bucket(self.rows))

    @property
    def key(self) -> str:
        """All but the device."""
        bias = " bias" if self.bias else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.form} {dtype} experts={self.experts} rows={self.rows} in={self.in_features} "
            f"out={self.out_features}{bias}"
        )

    def __str__(self) -> str:
        return f"{self.key} on {self.device_name}"


class ProductOperands(NamedTuple):
    """The tensors of one product. out: where the result is to lie, None for memory of its own.

    forward: first is rows (N, I), second weight (E, O, I).
    input:   first is grad (N, O), second weight (E, O, I).
    weight:  first is grad (N, O), second rows (N, I).
    """

    form: Form
    first: Tensor
    second: Tensor
    experts: int
    bias: Tensor | None = None
    out: Tensor | None = None

    @property
    def request(self) -> ProductRequest:
        if self.form == "weight":
            num_out, num_in = self.first.shape[1], self.second.shape[1]
        else:
            num_out, num_in = self.second.shape[1], self.second.shape[2]
        return ProductRequest(
            form=self.form,
            device=self.first.device,
            dtype=self.first.dtype,
            experts=self.experts,
            rows=self.first.shape[0],
            in_features=num_in,
            out_features=num_out,
            bias=self.bias is not None,
        )
