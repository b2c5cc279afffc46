"""The plain definition of the layer: loops over ranks, tokens and experts, in float64, under autograd.

It shares no code with pmoe. Letters: T tokens, K choices, E experts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


_known: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]] = {}


@dataclass
class Definition:
    """One layer over several ranks. parameters: names as in a state_dict, experts of all ranks stacked."""

    parameters: Mapping[str, Tensor]
    top_k: int
    expert: str = "ffn"
    activation: str = "gelu"
    normalize: bool | None = None
    capacity_factor: float | None = None

    def run_expert(self, e: int, token: Tensor) -> Tensor:
        p = self.parameters
        hidden = p["experts.w1"][e] @ token
        if "experts.b1" in p:
            hidden = hidden + p["experts.b1"][e]
        if self.expert == "swiglu":
            half = hidden.shape[0] // 2
            active = F.silu(hidden[:half]) * hidden[half:]
        else:
            active = ACTIVATIONS[self.activation](hidden)
        out = p["experts.w2"][e] @ active
        return out + p["experts.b2"][e] if "experts.b2" in p else out

    def rank(self, x: Tensor, gate_weight: Tensor) -> tuple[Tensor, Tensor]:
        """(output, auxiliary loss) of one rank's tokens x (T, M)."""
        num_tokens, num_experts = x.shape[0], gate_weight.shape[0]
        probability = torch.softmax(x @ gate_weight.t(), dim=-1)
        used, chosen_count = [0] * num_experts, [0] * num_experts
        capacity = math.inf
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * num_tokens * self.top_k / num_experts)
        rows = []
        for t in range(num_tokens):
            ranked = sorted(range(num_experts), key=lambda e: (-probability[t, e].item(), e))[: self.top_k]
            weights = [probability[t, e] for e in ranked]
            normalize = self.top_k > 1 if self.normalize is None else self.normalize
            if normalize:
                weights = [w / sum(weights) for w in weights]
            row = torch.zeros_like(x[t])
            for e, w in zip(ranked, weights, strict=True):
                chosen_count[e] += 1
                if used[e] < capacity:
                    used[e] += 1
                    row = row + w * self.run_expert(e, x[t])
            rows.append(row)
        y = torch.stack(rows) if rows else x * 1.0
        mean_probability = probability.sum(0) / max(num_tokens, 1)
        share = torch.tensor(chosen_count, dtype=x.dtype) / max(num_tokens * self.top_k, 1)
        return y, num_experts * (share * mean_probability).sum()

    def gradients(
        self, xs: Sequence[Tensor], grads: Sequence[Tensor], aux_weight: float
    ) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
        """Outputs, auxiliary losses, and per rank the gradients of x, gate.weight and all experts.

        The loss is the sum over ranks of <y, grad> + aux_weight * l_aux. Each rank has a gate of its own.
        They are computed once for the same values: many ways of computing a layer are compared with them.
        """
        options = (self.top_k, self.expert, self.activation, self.normalize, self.capacity_factor)
        key = (
            *options,
            aux_weight,
            *self.parameters,
            *map(_content, (*self.parameters.values(), *xs, *grads)),
        )
        if key not in _known:
            _known[key] = self._gradients(xs, grads, aux_weight)
        return copy.deepcopy(_known[key])

    def _gradients(
        self, xs: Sequence[Tensor], grads: Sequence[Tensor], aux_weight: float
    ) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
        xs = [x.clone().requires_grad_() for x in xs]
        gates = [self.parameters["gate.weight"].clone().requires_grad_() for _ in xs]
        experts = {
            name: value.clone().requires_grad_()
            for name, value in self.parameters.items()
            if name.startswith("experts.")
        }
        whole = Definition(
            experts, self.top_k, self.expert, self.activation, self.normalize, self.capacity_factor
        )
        outs = [whole.rank(x, gate) for x, gate in zip(xs, gates, strict=True)]
        loss = sum((y * g).sum() + aux_weight * aux for (y, aux), g in zip(outs, grads, strict=True))
        leaves = [*xs, *gates, *experts.values()]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        found = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True)]
        world = len(xs)
        by_expert = dict(zip(experts, found[2 * world :], strict=True))
        per_rank = [{"x": found[r], "gate.weight": found[world + r], **by_expert} for r in range(world)]
        return [y.detach() for y, _ in outs], [aux.detach() for _, aux in outs], per_rank


def _content(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.detach().cpu().double().numpy().tobytes()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if actual.numel() == 0:
        return 0.0
    scale = max(expected.abs().max().item(), 1e-30)
    return (actual - expected).abs().max().item() / scale


def differing(result: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of values whose relative error is above 1e-12, each with its error."""
    return [
        f"{name}: {relative_error(result[name], value)}"
        for name, value in expected.items()
        if not relative_error(result[name], value) <= 1e-12
    ]
