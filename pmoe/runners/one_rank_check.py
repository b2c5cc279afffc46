"""A small case by one rank's kernels beside the plain computation: routing, gathers, products and sums.

The plain computation is what the same functions do on the CPU, in the same type and, exactly, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pmoe.engine.passes import Inputs
from pmoe.kernels import route
from pmoe.measure.kernel_check import NUM_HIDDEN, NUM_MODEL, KernelCase, first_wrong
from pmoe.runners.one_rank import OneRankRunner

NUM_TOKENS, NUM_EXPERTS = 75, 5
NAMES = ("routing weights", "l_aux", "T_O", "d logits", "dT_I", "d weight", "d w1", "d w2", "d b1", "d b2")


def one_rank_mismatch(case: KernelCase, top_k: int, normalize: bool) -> str | None:
    """What the kernels compute wrongly, with the numbers; None where every result is right."""
    generator = torch.Generator().manual_seed(0)
    experts = max(NUM_EXPERTS, top_k)
    width = NUM_HIDDEN * (2 if case.activation == "swiglu" else 1)
    tokens, weights = (NUM_TOKENS, NUM_MODEL), ((experts, width, NUM_MODEL), (experts, NUM_MODEL, NUM_HIDDEN))
    biases = ((experts, width), (experts, NUM_MODEL)) if case.bias else ()
    shapes = (tokens, tokens, *weights, *biases)
    operands = [torch.randn(*each, generator=generator).mul_(0.25).to(case.dtype) for each in shapes]
    logits_TE = torch.randn(NUM_TOKENS, experts, generator=generator)
    both = functools.partial(_both_passes, top_k, normalize, case.activation)
    with torch.inference_mode(False), torch.autocast(case.device.type, enabled=False):
        plain = both(logits_TE, operands)
        exact = both(logits_TE.double(), [each.double() for each in operands])
        try:
            found = both(logits_TE.to(case.device), [each.to(case.device) for each in operands])
            return first_wrong(NAMES[: len(exact)], found, plain, exact, case.dtype)
        except Exception as error:
            return f"a small case failed: {error}"


def _both_passes(
    top_k: int, normalize: bool, activation: str, logits_TE: Tensor, operands: Sequence[Tensor]
) -> list[Tensor]:
    """By NAMES."""
    x_TM, grad_TM, *parameters = operands
    with torch.enable_grad():
        logits_TE = logits_TE.requires_grad_()
        routes = route.route(logits_TE, top_k, normalize=normalize, z_loss_weight=0.1)
        factor = torch.arange(1.0, top_k + 1, device=logits_TE.device, dtype=logits_TE.dtype)
        total = (routes.weight_TK * factor).sum() + routes.l_aux
        (grad_logits_TE,) = torch.autograd.grad(total, logits_TE)
    with torch.no_grad():
        weight_TK = routes.weight_TK.detach()
        runner = OneRankRunner(routes, activation)
        y_TM, saved = runner.forward(Inputs(x_TM=x_TM, weight_TK=weight_TK, parameters=parameters), keep=True)
        assert saved is not None
        wanted = [True, True, False, *(True for _ in parameters)]
        of_x, of_weight, _, *of_parameters = saved.backward(saved.tensors, wanted, grad_TM)
    found = (weight_TK, routes.l_aux.detach(), y_TM, grad_logits_TE, of_x, of_weight, *of_parameters)
    return [each for each in found if each is not None]
