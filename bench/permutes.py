"""Launches the permute kernels into given memory, as `pmoe.kernels.permute.launches.move` does."""

from __future__ import annotations

from torch import Tensor

from pmoe.kernels.permute.launches import move


def launch_permute(x: Tensor, position: Tensor, weight: Tensor | None, rows: Tensor) -> None:
    move("permute", position, weight, rows.shape[0], x=x, rows=rows)


def launch_unpermute(rows: Tensor, position: Tensor, weight: Tensor | None, y: Tensor) -> None:
    move("unpermute", position, weight, rows.shape[0], rows=rows, y=y)


def launch_permute_backward(
    d_rows: Tensor, x: Tensor, position: Tensor, weight: Tensor, d_x: Tensor, d_weight: Tensor
) -> None:
    move("permute_backward", position, weight, d_rows.shape[0], d_weight, x=x, d_rows=d_rows, d_x=d_x)


def launch_unpermute_backward(
    d_y: Tensor, rows: Tensor, position: Tensor, weight: Tensor, d_rows: Tensor, d_weight: Tensor
) -> None:
    move("unpermute_backward", position, weight, rows.shape[0], d_weight, d_y=d_y, rows=rows, d_rows=d_rows)
