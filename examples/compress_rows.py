"""Rows that travel in fewer bytes: callbacks that send bfloat16 or float8 and restore what arrives.

    torchrun --standalone --nproc-per-node 2 examples/compress_rows.py

Prints for each of them the bytes of rows sent in a step, the error of the output and of every gradient
against the layer without callbacks, and the losses of a few training steps beside its own.

A callback changes the rows before they leave and behind their arrival. What travels in backward is the
gradient of what travelled forward, of the same shape and type: so gradients are compressed as well.

    BFloat16Rows    half the bytes; autograd knows the gradient of a cast.
    Float8Rows      a quarter, and 4 bytes a row for its scale. One tensor travels, so these bytes become
                    4 more columns; its gradient is a packed tensor again, which autograd must be told.

Routing weights and row counts travel as they are. Local rows pass the callbacks, too: every row has the
same error, wherever its expert is.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from lm_ranks import Ranks, leave, share_gradients, start_ranks, stop_ranks
from torch import Tensor
from torch.nn import functional as F

import pmoe

SCALE_BYTES = 4


class BFloat16Rows(pmoe.Callback):
    """Rows of a float32 layer travel as bfloat16. Each is rounded by at most 2**-8 of itself."""

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.bfloat16()

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.float()

    before_combine, after_combine = before_dispatch, after_dispatch


class Float8Rows(pmoe.Callback):
    """Rows of a float32 layer travel as float8, each with a float32 scale of its own that makes its largest
    value float8's largest.

    rows, gradients: float8 types of what travels forward and backward. float8_e4m3fn rounds by at most 2**-4
    of a value, float8_e5m2 by 2**-3; with a scale a row the second one's range is of use only where values of
    one row lie more than four orders of magnitude apart.
    """

    def __init__(
        self, rows: torch.dtype = torch.float8_e4m3fn, gradients: torch.dtype = torch.float8_e4m3fn
    ) -> None:
        self.rows, self.gradients = rows, gradients

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        packed: Tensor = _Pack.apply(rows, self.rows, self.gradients)  # type: ignore[no-untyped-call]
        return packed

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        unpacked: Tensor = _Unpack.apply(rows, self.rows, self.gradients)  # type: ignore[no-untyped-call]
        return unpacked

    # torch's apply has no types, so a type checker is told what it returns, and that this is known.
    before_combine, after_combine = before_dispatch, after_dispatch


def pack(rows_NM: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, M + 4): each row in float8, then its scale. The type says float8_e4m3fn whatever ``dtype`` is: to
    autograd these are bytes that may have a gradient."""
    largest = torch.finfo(dtype).max
    scale_N1 = (rows_NM.abs().amax(1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    packed = torch.empty(
        rows_NM.shape[0], rows_NM.shape[1] + SCALE_BYTES, dtype=torch.uint8, device=rows_NM.device
    )
    # Division rounds, and what is over the largest would be NaN.
    scaled = (rows_NM / scale_N1).clamp(-largest, largest)
    packed[:, :-SCALE_BYTES] = scaled.to(dtype).view(torch.uint8)
    packed[:, -SCALE_BYTES:] = scale_N1.view(torch.uint8)
    return packed.view(torch.float8_e4m3fn)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, M) float32 of what `pack` made."""
    scale_N1 = packed[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return packed[:, :-SCALE_BYTES].view(dtype).float() * scale_N1


# torch declares backward(ctx, *grad_outputs); with a fixed number of outputs a name says more.


class _Pack(torch.autograd.Function):
    """`pack`; the gradient that comes back is packed, too."""

    @staticmethod
    def forward(ctx: Any, rows_NM: Tensor, dtype: torch.dtype, gradients: torch.dtype) -> Tensor:
        ctx.gradients = gradients
        return pack(rows_NM, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return unpack(grad, ctx.gradients), None, None


class _Unpack(torch.autograd.Function):
    """`unpack`; the gradient that is sent back is packed, too."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, dtype: torch.dtype, gradients: torch.dtype) -> Tensor:
        ctx.gradients = gradients
        return unpack(packed, dtype)

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return pack(grad_NM, ctx.gradients), None, None


VARIANTS: dict[str, tuple[pmoe.Callback, ...]] = {
    "float32": (),
    "bfloat16": (BFloat16Rows(),),
    "float8": (Float8Rows(),),
    "float8, e5m2 back": (Float8Rows(gradients=torch.float8_e5m2),),
}
"""What is compared; the first is what the others are compared with."""


def make_layer(callbacks: tuple[pmoe.Callback, ...], arguments: argparse.Namespace) -> pmoe.MoELayer:
    torch.manual_seed(0)
    return pmoe.MoELayer(
        arguments.d_model,
        2 * arguments.d_model,
        arguments.num_experts,
        top_k=2,
        pipeline=arguments.pipeline,
        callbacks=callbacks,
        device=arguments.device,
    )


def step_results(layer: pmoe.MoELayer, x: Tensor, dy: Tensor) -> tuple[int, dict[str, Tensor]]:
    """The bytes of rows that this rank sends in a forward and backward, and what comes out of them."""
    x = x.detach().requires_grad_()
    before = layer.traffic.rows
    y = layer(x)
    y.backward(dy)
    found: dict[str, Tensor | None] = {"output": y.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return layer.traffic.rows - before, {name: each for name, each in found.items() if each is not None}


def error(found: Tensor, exact: Tensor, ranks: Ranks) -> float:
    """The norm of the difference over that of what is exact, of all ranks together."""
    squares = torch.stack([(found - exact).double().square().sum(), exact.double().square().sum()])
    difference, whole = ranks.sum(squares).sqrt()
    return float(difference / whole)


def train(layer: pmoe.MoELayer, arguments: argparse.Namespace, ranks: Ranks) -> list[float]:
    """The loss of each step, of all ranks: the layer learns what a dense network of fixed weights does."""
    generator = torch.Generator().manual_seed(1 + ranks.rank)
    shared = torch.Generator().manual_seed(0)
    d_model = arguments.d_model
    mix = torch.randn(d_model, d_model, generator=shared) / d_model**0.5
    optimizer = torch.optim.Adam(layer.parameters(), lr=3e-3)
    losses = []
    for _ in range(arguments.steps):
        x = torch.randn(arguments.tokens, d_model, generator=generator)
        target = torch.tanh(x @ mix)
        x, target = x.to(arguments.device), target.to(arguments.device)
        loss = F.mse_loss(layer(x), target)
        optimizer.zero_grad()
        (loss + 0.01 * layer.l_aux).backward()
        share_gradients(layer, ranks)
        optimizer.step()
        losses.append(ranks.sum(loss.detach().clone()).item() / ranks.world)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--pipeline", type=int, default=2, help="n, the number of micro-batches")
    parser.add_argument("--steps", type=int, default=50, help="training steps")
    arguments = parser.parse_args()
    ranks = start_ranks()
    arguments.device = ranks.device
    if ranks.world < 2 and ranks.rank == 0:
        print("one rank sends nothing; try: torchrun --standalone --nproc-per-node 2 ...")

    generator = torch.Generator().manual_seed(1 + ranks.rank)
    x, dy = torch.randn(2, arguments.tokens, arguments.d_model, generator=generator).to(ranks.device)
    sent, results, losses = {}, {}, {}
    for name, callbacks in VARIANTS.items():
        layer = make_layer(callbacks, arguments)
        bytes_sent, found = step_results(layer, x, dy)
        sent[name] = int(ranks.sum(torch.tensor(bytes_sent, device=ranks.device)))
        results[name] = copy.deepcopy(found)
        losses[name] = train(layer, arguments, ranks)
    exact = next(iter(VARIANTS))
    errors = {
        name: {what: error(each, results[exact][what], ranks) for what, each in found.items()}
        for name, found in results.items()
    }
    if ranks.rank == 0:
        report(sent, errors, losses)
    ranks.wait()
    stop_ranks()
    leave()


def report(sent: dict[str, int], errors: dict[str, dict[str, float]], losses: dict[str, list[float]]) -> None:
    exact = next(iter(sent))
    print(f"\n{'rows travel as':20}{'bytes a step':>14}{'ratio':>8}")
    for name, count in sent.items():
        ratio = f"{count / sent[exact]:.4f}" if sent[exact] else ""
        print(f"{name:20}{count:14,}{ratio:>8}")
    others = [name for name in errors if name != exact]
    print(f"\n{'relative error of':20}" + "".join(f"{name:>20}" for name in others))
    for what in errors[exact]:
        label = what if what == "output" else f"d {what}"
        print(f"{label:20}" + "".join(f"{errors[name][what]:20.2e}" for name in others))
    print(f"\n{'loss at step':20}" + "".join(f"{name:>20}" for name in losses))
    steps = len(losses[exact])
    for step in sorted({*range(0, steps, max(1, steps // 5)), steps - 1} - {-1}):
        print(f"{step:<20}" + "".join(f"{values[step]:20.5f}" for values in losses.values()))


if __name__ == "__main__":
    main()
