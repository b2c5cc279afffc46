"""Sizes of a layer, equal on all its ranks, and row counts of a call: they decide bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from pmoe.comm.wire import check_wires
from pmoe.experts import ExpertName, make_stacked
from pmoe.experts.base import Shard
from pmoe.kernels.scaled_products.formats import ProductsName
from pmoe.planner.copy_work import NO_COPIES, CopyWork
from pmoe.schedule.buffer_sizes import BufferSizes, HiddenColumns
from pmoe.schedule.tasks import Stages
from pmoe.schedule.wire import AS_THEY_ARE, MessageSizes, WireName, Wires, message_bytes


@dataclass(frozen=True, kw_only=True)
class CallRows:
    """Numbers of tokens and rows of one call on one rank, before rows are sent.

    tokens: T, the rows of the layer's input.
    inner: number of input rows that the passes dispatch: the T tokens, or the rows that are made from them
        (see ``spread``).
    slots: number of pairs of an input row and an expert to which it is sent; T * K in a plain layer with
        top_k = K.
    choices: the most experts to which one input row can be sent.
    spread: how input rows are made from tokens: "padded" copies tokens to a fixed number of rows for each
        expert (its capacity), "mixed" computes weighted sums of tokens (SoftMoE); "" if the input rows are
        the tokens.
    """

    tokens: int
    inner: int
    slots: int
    choices: int
    spread: Literal["", "padded", "mixed"] = ""


@dataclass(frozen=True, kw_only=True)
class CopyNumbers:
    """Upper bounds, for any routing, of the copies of busy experts that one rank hosts or sends in a call.

    hosted: copies of other ranks' experts that this rank hosts.
    sent: messages with a whole expert that this rank sends: one for each expert that has copies, and a second
        one for at most one of them (`pmoe.planner.copy_groups`).
    relays: whether an expert may have several copies. The ranks that host these copies then pass the expert's
        weights on to each other.
    limits_rows: whether the layer may have copies. In such a layer with ring slots, the rows of a chunk that
        arrive and those that stay are limited together (`pmoe.comm.counts.Slots.total_slack`). A chunk with
        more rows is cut into smaller chunks, also in calls in which no expert has copies.
    stay: whether the weights of copies may stay until backward even if the restore pair sends rows again
        (`pmoe.schedule.restore.fate_of_copies`).
    """

    hosted: int = 0
    sent: int = 0
    relays: bool = False
    limits_rows: bool = False
    stay: bool = False

    @staticmethod
    def at_most(per_rank: int, num_local: int, num_ranks: int, *, stay: bool = False) -> CopyNumbers:
        """Returns the largest numbers of copies of busy experts that are possible.

        per_rank: the most copies that a rank hosts; 0 without copies.
        num_local: number of experts of a rank.
        num_ranks: number of ranks.
        stay: as in the class.
        """
        per_rank = min(per_rank, num_local * (num_ranks - 1))
        return CopyNumbers(
            hosted=per_rank,
            sent=min(num_local + (num_ranks > 2), per_rank * (num_ranks - 1)),
            relays=num_ranks > 2 and per_rank > 0,
            limits_rows=per_rank > 0,
            stay=stay and per_rank > 0,
        )


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of one layer: numbers of elements and ranks, and bytes of an element.

    d_model: M, columns of a row that is sent to experts: d_latent if the layer has it, else the columns of a
        token.
    num_experts: E, experts of all ranks together.
    top_k: K, experts of a token.
    num_ranks: W, ranks of the layer's process group.
    columns: numbers of columns of the tensors that experts compute between their two products. These tensors
        have one row for each row that the experts receive.
    element_size: bytes of an element of the rows.
    weight_size: bytes of a routing weight.
    expert_parameters: elements of this rank's experts.
    frozen_parameters: how many elements of this rank's experts need no gradient.
    shared_over: number of ranks over which FSDP2 shards the elements of this rank's experts. Each call then
        gathers them before use. 0 if FSDP2 does not shard them.
    keeps_gathered: whether gathered elements stay from forward to backward (reshard_after_forward=False).
    scaled_parameters: number of elements of the second matrices (B) of low-rank adapters. A call makes a copy
        of these matrices, multiplied by the adapter's scale.
    gate_parameters: elements of the gate that need a gradient.
    has_shared_gate: whether the shared expert's output is scaled by a gate; only read with d_latent.
    outer: columns of a token, if the layer has d_latent, so that rows are narrower than tokens; else 0.
    bypass_local: whether rows of this rank's tokens for this rank's experts stay on the rank, without being
        sent.
    has_drops: whether some choices of a token may have no row, because the chosen expert is full.
    gate_scores: number of tensors that the gate saves for backward, each with one score per token and expert.
    cast_from: under autocast, bytes of an element of the tokens and parameters before the cast. 0 without
        autocast.
    esp_size: number of ranks that each expert is split over.
    rotates: whether chunks share a few buffers of fixed size (ring slots), which they use in turn.
    programs: whether compiled programs may run the passes. A program keeps the sorted routing weights. For
        parameters that are narrower than float32, it sums the gradients in float32, even if there is only one
        gradient to add.
    places: whether the experts store the results of sorted rows in the order in which the rows arrived.
    relays: number of ranks for which this rank passes on rows, in a hierarchical all-to-all: the ranks of a
        node. 0 if every row is sent straight to its destination.
    merges: whether a token is sent only once to a rank that holds several of its experts.
    wires: the number formats in which rows and results are sent, such as bfloat16 for float32 rows.
    packs_tokens: whether tokens are packed into messages before they are copied to rows. True on the CPU,
        unless a user's own module copies them. Only matters if ``wires`` names a format.
    device_type: "cpu" or "cuda".
    products: the number format to which the operands of the experts' matrix products are rounded, "e4m3" or
        "mxfp8"; None if they are not rounded.
    copies: numbers of copies of busy experts.
    copy_work: the work that copies add to the tasks of a call; `NO_COPIES` if only bytes are predicted.
    shared_columns: the same as ``columns``, for the shared expert, which computes every token; all numbers
        are 0 without a shared expert.
    shared_parameters: elements of the shared expert; 0 without a shared expert.
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
    frozen_parameters: int = 0
    shared_over: int = 0
    keeps_gathered: bool = False
    scaled_parameters: int = 0
    bypass_local: bool = True
    has_drops: bool = False
    gate_scores: int = 1
    cast_from: int = 0
    esp_size: int = 1
    rotates: bool = True
    shared_columns: HiddenColumns = HiddenColumns()
    shared_parameters: int = 0
    relays: int = 0
    merges: bool = False
    wires: Wires = AS_THEY_ARE
    packs_tokens: bool = True
    device_type: str = "cpu"
    products: ProductsName | None = None
    copies: CopyNumbers = CopyNumbers()
    copy_work: CopyWork = NO_COPIES
    programs: bool = False
    places: bool = False
    outer: int = 0
    has_shared_gate: bool = False

    @property
    def latent_parameters(self) -> int:
        """Number of elements of the two projections that a layer with d_latent has; 0 without d_latent."""
        return 2 * self.outer * self.d_model

    @property
    def trained_parameters(self) -> int:
        """Elements of this rank's experts that need a gradient."""
        return self.expert_parameters - self.frozen_parameters

    @property
    def gathered_bytes(self) -> int:
        """Bytes of this rank's experts that FSDP2 gathers before each use; 0 if they are not sharded."""
        return self.expert_parameters * self.element_size if self.shared_over else 0

    @property
    def is_frozen(self) -> bool:
        """Whether no parameter of this rank's experts needs a gradient."""
        return 0 < self.frozen_parameters == self.expert_parameters

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one row in the experts' products in forward, including those of an adapter."""
        columns = self.columns
        widths = columns.hidden + columns.scratch
        return self.d_model * widths + columns.adapter * (2 * self.d_model + widths)

    @property
    def gradient_multiply_adds(self) -> int:
        """Multiply-adds that the weight gradients take for each row.

        The result is 0 if the experts are frozen. If only a low-rank adapter of the experts is trained, two
        products are counted for each of its matrices.
        """
        columns = self.columns
        widths = columns.hidden + columns.scratch
        if self.is_frozen:
            return 0
        if columns.adapter and 2 * self.frozen_parameters > self.expert_parameters:
            return 2 * columns.adapter * (2 * self.d_model + widths)
        return self.d_model * widths + 2 * columns.adapter * (2 * self.d_model + widths)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's parameters, in the dtype of the rows."""
        num_local = self.num_experts // self.ep_size
        return self.expert_parameters // num_local * self.element_size

    def call(self, num_tokens: int) -> CallRows:
        """Returns the numbers of rows of a call with ``num_tokens`` tokens, each sent to top_k experts."""
        slots = num_tokens * self.top_k
        return CallRows(tokens=num_tokens, inner=num_tokens, slots=slots, choices=self.top_k)

    def sent_bytes(self, wire: WireName | None = None) -> int:
        """Returns the bytes of the message of one row.

        wire: the number format in which the row is sent, such as "bfloat16"; None for the rows' own dtype.
        """
        return message_bytes(wire, self.d_model, self.element_size)

    def buffer_sizes(self, **arguments: Any) -> BufferSizes:
        """Returns the rows and columns of every buffer of a pass, as the engine computes them.

        arguments: the arguments of `BufferSizes` that do not follow from the layer's sizes, such as the
            direction and the numbers of rows by chunk.
        """
        arguments |= {"d_model": self.d_model, "columns": self.columns, "places": self.places}
        if self.wires == AS_THEY_ARE:
            return BufferSizes(**arguments)
        return MessageSizes(**arguments, wires=self.wires, element_size=self.element_size)

    @property
    def ep_size(self) -> int:
        """Number of groups of ranks over which the experts are distributed: num_ranks / esp_size.

        Each group has ``esp_size`` ranks, which split the hidden columns of the group's experts.
        """
        return self.num_ranks // self.esp_size

    @property
    def sends_rows(self) -> bool:
        """Whether rows go through an all-to-all: among several ranks, or from a rank to itself."""
        return self.num_ranks > 1 or not self.bypass_local

    @property
    def stays(self) -> float:
        """Fraction of the rows that stay on their rank under even routing.

        The fraction is 0 if a rank's own rows are sent like all others, or if experts are split over ranks.
        """
        return 1 / self.num_ranks if self.bypass_local and self.esp_size == 1 else 0.0

    @property
    def stages(self) -> Stages:
        """The optional stages of the layer's schedules, such as tasks for rows that stay on their rank."""
        return Stages(local=self.bypass_local, remote=self.sends_rows, sharded=self.esp_size > 1)


# ---- sizes from options, without building a layer: for `pmoe plan` and `pmoe memory`


def check_fits(num_experts: int, top_k: int, num_ranks: int) -> None:
    """Raises ValueError if top_k is above num_experts, or if num_experts is no multiple of num_ranks."""
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
    esp_size: int = 1,
    expert: ExpertName = "ffn",
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    device_type: str = "cpu",
    wire: WireName | None = None,
    wire_backward: WireName | None = None,
    wire_combine: WireName | None = None,
    d_latent: int | None = None,
) -> LayerSizes:
    """Returns the sizes of ``MoELayer(d_model, d_hidden, num_experts, ...)`` without building the layer.

    Args:
        d_model, d_hidden, num_experts, top_k, expert, bias, dtype, wire, wire_backward, wire_combine,
            d_latent: the layer's arguments of these names.
        num_ranks: number of ranks that the layer's experts are on.
        esp_size: number of ranks that each expert is split over. It divides num_ranks.
        device_type: "cpu" or "cuda". On "cuda", experts need more temporary columns for each row.

    Raises ValueError if top_k is above num_experts, if num_experts is no multiple of num_ranks / esp_size, or
    if rows of this dtype cannot be sent in the number formats of the three wires.
    """
    wires = Wires(rows=wire, gradients=wire_backward, results=wire_combine)
    check_wires(wires, dtype)
    ep_size = num_ranks // esp_size
    check_fits(num_experts, top_k, ep_size)
    row_columns = d_model if d_latent is None else d_latent
    placement: dict[str, Any] = {"shard": Shard(0, esp_size), "device": "meta", "dtype": dtype}
    experts = make_stacked(expert, row_columns, d_hidden, num_experts // ep_size, "gelu", bias, **placement)
    return LayerSizes(
        d_model=row_columns,
        outer=0 if d_latent is None else d_model,
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        columns=experts.columns(device_type),
        element_size=dtype.itemsize,
        weight_size=max(4, dtype.itemsize),
        expert_parameters=sum(parameter.numel() for parameter in experts.parameters()),
        gate_parameters=num_experts * d_model,
        bypass_local=esp_size == 1,
        esp_size=esp_size,
        wires=wires if num_ranks > 1 else AS_THEY_ARE,
        packs_tokens=device_type == "cpu",
        device_type=device_type,
    )
