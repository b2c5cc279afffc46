"""Callbacks that send rows in fewer bytes: as bfloat16 or float8, restored after they arrive.

    torchrun --standalone --nproc-per-node 2 examples/compress_rows.py

It prints, for each callback, the bytes of rows that are sent in a step, the relative error of the output and
of every gradient (compared with the layer without callbacks), and the losses of a few training steps.

It shows what callbacks can do. For fewer bytes towards the experts, set the layer's option ``wire="e4m3"``
or "bfloat16" instead: it has a scale for each 128 columns, and leaves rows that stay on their rank as they
are. These callbacks also compress the results that return, which no option does.

A callback changes the rows before they are sent and after they arrive. In backward, the gradients of these
rows travel with the same shape and dtype, so gradients are compressed as well.

    BFloat16Rows    half of the bytes. autograd knows the gradient of a cast.
    Float8Rows      a quarter of the bytes, and 4 bytes a row for a scale. Only one tensor can travel, so the
                    scale is packed into it as 4 more columns. The gradient of a packed tensor is a packed
                    tensor too, which needs autograd functions of its own.

Routing weights and row counts are not compressed. Rows that stay on their rank pass the callbacks too, so
that every row has the same error, wherever its expert is.
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
    """Sends the rows (N, M) of a float32 layer as bfloat16.

    Values are rounded by at most 2**-8 of themselves.
    """

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.bfloat16()

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.float()

    before_combine, after_combine = before_dispatch, after_dispatch


class Float8Rows(pmoe.Callback):
    """Sends the rows (N, M) of a float32 layer as float8, each with a float32 scale.

    A row divided by its scale has float8's largest value as its largest value.

    rows, gradients: float8 dtypes of the rows that travel forward, and of the gradients that travel backward.

    float8_e4m3fn rounds by at most 2**-4 of a value, float8_e5m2 by at most 2**-3 but has a wider range. As
    every row has a scale, the wider range helps only if values of one row differ by more than four orders of
    magnitude.
    """

    def __init__(
        self, rows: torch.dtype = torch.float8_e4m3fn, gradients: torch.dtype = torch.float8_e4m3fn
    ) -> None:
        self.rows = rows
        self.gradients = gradients

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        packed: Tensor = _Pack.apply(rows, self.rows, self.gradients)  # type: ignore[no-untyped-call]
        return packed

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        unpacked: Tensor = _Unpack.apply(rows, self.rows, self.gradients)  # type: ignore[no-untyped-call]
        return unpacked

    # torch's `apply` has no types. The names `packed` and `unpacked` give a type checker what it returns.
    before_combine, after_combine = before_dispatch, after_dispatch


def pack(rows_NM: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns (N, M + 4): each row in float8, then the 4 bytes of its scale.

        row i    value 0 | value 1 | ... | value M - 1 | scale (float32, 4 bytes)

    dtype: the float8 type of the values. The result always has dtype float8_e4m3fn: it is a container of
    bytes, and autograd only needs a dtype that may have a gradient.
    """
    largest = torch.finfo(dtype).max
    scale_N1 = (rows_NM.abs().amax(1, keepdim=True) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    packed = torch.empty(
        rows_NM.shape[0], rows_NM.shape[1] + SCALE_BYTES, dtype=torch.uint8, device=rows_NM.device
    )
    # The division rounds, so a value may exceed the largest one, and float8_e4m3fn would make NaN of it.
    scaled = (rows_NM / scale_N1).clamp(-largest, largest)
    packed[:, :-SCALE_BYTES] = scaled.to(dtype).view(torch.uint8)
    packed[:, -SCALE_BYTES:] = scale_N1.view(torch.uint8)
    return packed.view(torch.float8_e4m3fn)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows (N, M) in float32 that `pack` packed."""
    scale_N1 = packed[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return packed[:, :-SCALE_BYTES].view(dtype).float() * scale_N1


# torch declares backward(ctx, *grad_outputs). Here each function has one output, so its gradient has a name.


class _Pack(torch.autograd.Function):
    """Autograd function of `pack`. The gradient that arrives is packed too."""

    @staticmethod
    def forward(ctx: Any, rows_NM: Tensor, dtype: torch.dtype, gradients: torch.dtype) -> Tensor:
        ctx.gradients = gradients
        return pack(rows_NM, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return unpack(grad, ctx.gradients), None, None


class _Unpack(torch.autograd.Function):
    """Autograd function of `unpack`. The gradient that is sent back is packed too."""

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
"""Callbacks that are compared. The first entry is the reference."""


def make_layer(callbacks: tuple[pmoe.Callback, ...], arguments: argparse.Namespace) -> pmoe.MoELayer:
    """Returns a layer with the same parameters for all variants."""
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
    """Returns the bytes of rows that this rank sends in a step, and the step's results by name.

    x, dy: (T, M) input, and gradient of the output.
    The results are the output, and the gradients of x and of all parameters.
    """
    x = x.detach().requires_grad_()
    before = layer.traffic.rows
    y = layer(x)
    y.backward(dy)
    results: dict[str, Tensor | None] = {"output": y.detach(), "x": x.grad}
    results |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return layer.traffic.rows - before, {name: value for name, value in results.items() if value is not None}


def error(actual: Tensor, exact: Tensor, ranks: Ranks) -> float:
    """Returns norm(actual - exact) / norm(exact) of a tensor, over all ranks. Tensors have any shape."""
    squares = torch.stack([(actual - exact).double().square().sum(), exact.double().square().sum()])
    difference, whole = ranks.sum(squares).sqrt()
    return float(difference / whole)


def train(layer: pmoe.MoELayer, arguments: argparse.Namespace, ranks: Ranks) -> list[float]:
    """Returns the loss of each training step, the mean of all ranks.

    The layer learns the function of a dense network with fixed weights.
    """
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
        ((loss + 0.01 * layer.l_aux) / ranks.world).backward()
        share_gradients(layer, ranks)
        optimizer.step()
        losses.append(ranks.sum(loss.detach().clone()).item() / ranks.world)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each rank")
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
    sent = {}
    results = {}
    losses = {}
    for name, callbacks in VARIANTS.items():
        layer = make_layer(callbacks, arguments)
        bytes_sent, tensors = step_results(layer, x, dy)
        sent[name] = int(ranks.sum(torch.tensor(bytes_sent, device=ranks.device)))
        results[name] = copy.deepcopy(tensors)
        losses[name] = train(layer, arguments, ranks)
    exact = next(iter(VARIANTS))
    errors = {
        name: {what: error(tensor, results[exact][what], ranks) for what, tensor in tensors.items()}
        for name, tensors in results.items()
    }
    if ranks.rank == 0:
        report(sent, errors, losses)
    ranks.wait()
    stop_ranks()
    leave()


def report(sent: dict[str, int], errors: dict[str, dict[str, float]], losses: dict[str, list[float]]) -> None:
    """Prints the three tables: bytes, errors and losses."""
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
