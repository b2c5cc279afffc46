"""What of a layer its predicted bytes and seconds depend on, as numbers that all its ranks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from pmoe.experts import ExpertName, make_stacked
from pmoe.experts.base import Shard
from pmoe.schedule.slots import HiddenColumns
from pmoe.schedule.tasks import Stages


@dataclass(frozen=True, kw_only=True)
class CallRows:
    """How many rows a call of one rank has.

    tokens: T, of the layer's input. inner: those that its passes take for tokens: T, but where rows are
    padded to capacity or mixed of tokens. slots: pairs of such a token and a choice. choices: the most slots
    of one token. spread: "padded" or "mixed", how the passes' rows are made of tokens; "" where they are the
    tokens themselves.
    """

    tokens: int
    inner: int
    slots: int
    choices: int
    spread: Literal["", "padded", "mixed"] = ""


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of one layer: elements, ranks, and bytes of an element.

    d_model: M. num_experts: E, on all ranks together. top_k: K. num_ranks: W.
    columns: of what the experts hold for a row between their products.
    element_size: bytes of an element of the rows. weight_size: bytes of a routing weight.
    expert_parameters: elements of this rank's experts. gate_parameters: elements of the gate.
    bypass_local: rows for this rank's own experts are not sent.
    has_drops: some choices of a token may have no row.
    gate_scores: tensors of a score for each token and expert that the gate saves.
    cast_from: under autocast the bytes of an element of the tokens and parameters, else 0.
    inside: ranks that each expert is split over.
    rotates: whether buffers rotate through ring slots.
    relays: by way of how many ranks of a node rows travel; 0 where they travel straight.
    merges: whether a token travels once to a rank that holds several of its experts.
    shared_columns, shared_parameters: of the shared expert, which all tokens of a rank go to; 0 without one.
    """

    d_model: int
    num_experts: int
    top_k: int
    num_ranks: int
    columns: HiddenColumns
    element_size: int
    weight_size: int
    expert_parameters: int
    gate_parameters: int
    bypass_local: bool = True
    has_drops: bool = False
    gate_scores: int = 1
    cast_from: int = 0
    inside: int = 1
    rotates: bool = True
    shared_columns: HiddenColumns = HiddenColumns()
    shared_parameters: int = 0
    relays: int = 0
    merges: bool = False

    def call(self, num_tokens: int) -> CallRows:
        """Where each token of a rank has top_k choices."""
        slots = num_tokens * self.top_k
        return CallRows(tokens=num_tokens, inner=num_tokens, slots=slots, choices=self.top_k)

    @property
    def num_across(self) -> int:
        """Ranks that experts are spread over; each expert's hidden columns are split over those inside."""
        return self.num_ranks // self.inside

    @property
    def travels(self) -> bool:
        """Whether any rows are sent."""
        return self.num_ranks > 1 or not self.bypass_local

    @property
    def stays(self) -> float:
        """The share of evenly routed rows that are not sent, where experts are not split."""
        return 1 / self.num_ranks if self.bypass_local and self.inside == 1 else 0.0

    @property
    def stages(self) -> Stages:
        return Stages(local=self.bypass_local, remote=self.travels, sharded=self.inside > 1)


# ---- the sizes of a layer that nobody has built, for `pmoe plan` and `pmoe memory`


def check_fits(num_experts: int, top_k: int, num_ranks: int) -> None:
    if top_k > num_experts:
        raise ValueError(f"top_k ({top_k}) must be at most num_experts ({num_experts})")
    if num_experts % num_ranks:
        raise ValueError(f"num_experts ({num_experts}) must be divisible by num_ranks ({num_ranks})")


def sizes_from_options(
    d_model: int,
    d_hidden: int,
    num_experts: int,
    *,
    top_k: int = 1,
    num_ranks: int = 1,
    inside: int = 1,
    expert: ExpertName = "ffn",
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device_type: str = "cpu",
) -> LayerSizes:
    """What MoELayer(d_model, d_hidden, num_experts, ...) would have; the arguments are the layer's.

    num_ranks: that share the experts. inside: ranks that each expert is split over.
    device_type: "cpu" or "cuda"; experts hold more for a row on one.

    Raises ValueError for top_k above num_experts, and num_experts that num_ranks / inside does not divide.
    """
    across = num_ranks // inside
    check_fits(num_experts, top_k, across)
    made: dict[str, Any] = {"shard": Shard(0, inside), "device": "meta", "dtype": dtype}
    experts = make_stacked(expert, d_model, d_hidden, num_experts // across, "gelu", bias, **made)
    return LayerSizes(
        d_model=d_model,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        columns=experts.columns(device_type),
        element_size=dtype.itemsize,
        weight_size=max(4, dtype.itemsize),
        expert_parameters=sum(parameter.numel() for parameter in experts.parameters()),
        gate_parameters=num_experts * d_model,
        bypass_local=inside == 1,
        inside=inside,
    )
