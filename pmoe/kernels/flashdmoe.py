"""FlashDMoE's persistent kernels: one launch computes a pass of the layer, from the gate to combine.

The blocks of a launch are actors. One block schedules tasks and receives what arrives. All others are
processors: they score, choose experts, place rows, send, multiply and sum, tile by tile. The kernels are in
cuda/flashdmoe (thesis, chapters 4 and 5; the backward pass is pmoe's own).

The rows that one rank sends to one expert lie in a cell of C rows on the expert's rank (layout L, section
5.3):

    with a capacity   Every cell has C rows of its own. A cell that is not full is padded in place: the
                      missing rows neither travel nor are computed (section 5.4).
    without           All cells of a rank share one pool of C rows. Each cell begins at the offset that
                      the rank has granted to the sender.

Tensors by cell therefore have the shape (P, C, columns): P = A cells, or P = 1 for the pool. Rows that hold
no token's row are undefined.

Letters: T tokens of this rank, K choices, W ranks, E experts of a rank, A = W E cells, P = A, or 1 for a
pool, C rows of a cell or a pool, M = d_model, H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels import extension
from pmoe.kernels.comet.backend import float_weights
from pmoe.kernels.comet.launcher import Launcher
from pmoe.kernels.comet.operators import check_expert_weight, check_tokens
from pmoe.kernels.gemm import ACTIVATIONS
from pmoe.kernels.heap import Heap
from pmoe.kernels.operands import address, check_memory, check_tensor
from pmoe.kernels.route import DeferredRouting
from pmoe.schedule.tasks import PassDirection

TILE_ROWS = 128
"""Rows of a tile; kTileRows of cuda/flashdmoe."""

MOST_EXPERTS, MOST_CHOICES = 256, 32
"""The most experts of all ranks, and choices of a token, if the launch makes the gate's choice.

These are kMostChosen of cuda/flashdmoe and kMostChoices of cuda/route.
"""

RankTensors = dict[str, Any]
"""One rank's part of a launch: tensors, None or numbers, by their names in cuda/flashdmoe/bind.cpp."""

PLACES = ("send_counts", "expert", "row", "slot", "home", "offset")
"""Names of the tensors that say where rows lie. Forward writes them, backward reads them."""

Parameters = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""w1, w2, b1 and b2 of a rank's experts."""


@dataclass(frozen=True, kw_only=True)
class RoutingInput:
    """The experts that a gate chose for a rank's tokens, from which the launch computes where rows go.

    expert_TK: (T, K) int64 or int32, numbers among the experts of all ranks.
    deferred: if given, the launch itself chooses and writes these routes, of which expert_TK is one.
    keep_TK: (T, K) bool, which slots are not dropped; None keeps all.
    capacity: rows kept for each expert, in token order. None is C, which the caller must know to be enough.
    counts_A: (A,) int32, memory for the result "send_counts"; None allocates it.
    """

    expert_TK: Tensor
    deferred: DeferredRouting | None = None
    keep_TK: Tensor | None = None
    capacity: int | None = None
    counts_A: Tensor | None = None


def pass_tensors(
    heap: Heap,
    expert_TK: Tensor,
    source_TM: Tensor,
    weight_TK: Tensor,
    parameters: Parameters,
    activation: str,
    again_TM: Tensor | None = None,
) -> RankTensors:
    """Returns the tensors that both passes need, except those that say where rows lie.

    expert_TK: (T, K), the experts of the tokens.
    source_TM: (T, M), T_I in forward, the gradient of T_O in backward.
    weight_TK: (T, K), the routing weights.
    again_TM: (T, M), T_I if backward sends it again; else None.

    The launch writes two of them:

        result   (T, M)      T_O, or the gradient of T_I
        active   (P, C, H)   the activated hidden

    Raises ValueError, naming the tensor, for operands that the kernels would read wrongly.
    """
    shape = heap.shape
    weight_TK = float_weights(weight_TK)
    w1, w2, b1, b2 = parameters
    cells = shape.num_ranks * shape.experts
    for rows_TM in (source_TM, again_TM):
        if rows_TM is not None:
            check_tokens(heap, expert_TK, rows_TM, weight_TK)
    check_expert_weight("w1", w1, b1, heap, columns=2)
    check_tensor("w1", w1, shape=("E", shape.d_hidden * (2 if activation == "swiglu" else 1), "M"))
    check_expert_weight("w2", w2, b2, heap, columns=1)
    check_tensor("w2", w2, shape=("E", "M", shape.d_hidden))
    return {
        "weight": weight_TK,
        "source": source_TM,
        "again": again_TM,
        "result": torch.empty_like(source_TM),
        **{"w1": w1, "w2": w2, "b1": b1, "b2": b2},
        "active": source_TM.new_empty(1 if shape.is_pool else cells, shape.rows, shape.d_hidden),
    }


def forward_tensors(
    heap: Heap, arguments: RankTensors, chosen: RoutingInput, *, keeps_input: bool, keeps_hidden: bool
) -> RankTensors:
    """Returns the tensors of a forward pass: those of `pass_tensors`, and those that the launch writes.

    arguments: the result of `pass_tensors`.
    chosen: the experts of each token.
    keeps_input, keeps_hidden: whether backward needs T_DI and T_M.

        input         (P, C, M)     T_DI; None unless kept
        hidden        (P, C, G)     T_M; None unless kept
        send_counts   (A,) int32    this rank's rows for each expert of all ranks
        expert        (T, K) int32  the expert of each slot
        row           (T, K) int32  which of its expert's rows a slot is; -1 if it was dropped
        slot          (P, C) int32  the slot of each of these rows
        home          (A,) int32    pool: where this rank's rows for each expert begin; "row" includes it
        offset        (A,) int32    pool: where the rows that arrive begin, by source rank and expert

    "home" and "offset" are None unless the heap is a pool.
    """
    _, wide, d_model = arguments["w1"].shape
    expert_TK = chosen.expert_TK
    keep_TK = chosen.keep_TK
    shape = heap.shape
    cells = shape.num_ranks * shape.experts
    check_tensor(
        "expert",
        expert_TK,
        dtypes=[torch.int64, torch.int32],
        device=arguments["source"].device,
        contiguous=True,
    )
    if keep_TK is not None:
        check_tensor("keep", keep_TK, shape=expert_TK.shape, dtypes=[torch.bool], contiguous=True)
    is_wide = expert_TK.dtype == torch.int64
    row_TK = torch.empty_like(expert_TK, dtype=torch.int32)
    if chosen.deferred is not None:
        logits_TE, routes, options, product = chosen.deferred
        check_tensor("logits", logits_TE, shape=("T", cells), dtypes=[torch.float32], contiguous=True)
        routing_tensors = {"logits": logits_TE, "weight": routes.weight_TK, "all_counts": routes.counts_nE}
        arguments = arguments | routing_tensors | {"chooses": 1, "l_aux": routes.l_aux, **options}
        if product is not None:
            weight_EM = product[1]
            source_TM = arguments["source"]
            kind: dict[str, Any] = {"dtypes": [source_TM.dtype], "device": source_TM.device}
            check_tensor("gate", weight_EM, shape=(cells, d_model), **kind)
            check_memory(dense={"gate": weight_EM})
            arguments["gate_weight"] = weight_EM
    return arguments | {
        "routes": 1,
        "chosen": expert_TK if is_wide else None,
        "keep": keep_TK,
        "capacity": shape.rows if chosen.capacity is None else chosen.capacity,
        "send_counts": row_TK.new_empty(cells) if chosen.counts_A is None else chosen.counts_A,
        "expert": torch.empty_like(row_TK) if is_wide else expert_TK,
        "row": row_TK,
        "slot": row_TK.new_empty(arguments["active"].shape[:2]),
        "home": row_TK.new_empty(cells) if shape.is_pool else None,
        "offset": row_TK.new_empty(cells) if shape.is_pool else None,
        "input": _by_cell(arguments, d_model) if keeps_input else None,
        "hidden": _by_cell(arguments, wide) if keeps_hidden else None,
    }


def backward_tensors(
    arguments: RankTensors, places: RankTensors, *, kept: Sequence[Tensor | None], needs: Sequence[bool]
) -> RankTensors:
    """Returns the tensors of a backward pass: those of `pass_tensors`, and those that the launch writes.

    arguments: the result of `pass_tensors`.
    places: `PLACES` of forward.
    kept: forward's T_DI and T_M. Without T_DI the kernel sends "again"; without T_M it recomputes it.
    needs: which of w1, w2, b1 and b2 need a gradient.

        weight_gradient    (T, K) float32   gradient of the routing weights; 0 for dropped slots
        of_w1, of_w2, of_b1, of_b2          gradients of the parameters; None for those that need none

    All gradients repeat to the bit.
    """
    _, capacity, width = arguments["active"].shape
    missing = capacity - places["slot"].shape[1]
    if missing:  # since forward a larger batch has replaced the heap by one with larger cells
        kept = [None if tensor is None else F.pad(tensor, (0, 0, 0, missing)) for tensor in kept]
        places = places | {"slot": F.pad(places["slot"], (0, missing))}
    input_PCM, hidden_PCG = kept
    hopper = extension.path(arguments["w1"].device)[0] == "sm_90a"
    wide = arguments["w1"].shape[1]
    parts = extension.module().row_dot_parts(hopper, width)
    for name, need in zip(("w1", "w2", "b1", "b2"), needs, strict=True):
        arguments[f"of_{name}"] = (
            torch.empty_like(arguments[name]) if need and arguments[name] is not None else None
        )
    return {
        **arguments,
        **{name: places[name] for name in PLACES},
        "input": input_PCM,
        "hidden": hidden_PCG,
        "recomputed": _by_cell(arguments, wide) if hidden_PCG is None else None,
        "gradient": _by_cell(arguments, wide),
        "dots": _by_cell(arguments, parts, torch.float32),  # as many numbers; the kernel writes (parts, P C)
        "weight_gradient": torch.empty_like(arguments["weight"]),
    }


def launch_pass(
    launcher: Launcher, direction: PassDirection, activation: str, ranks: Sequence[RankTensors]
) -> None:
    """Launches one pass for all ranks of this process.

    ranks: the tensors of each rank, from `forward_tensors` or `backward_tensors`.

    The launch makes progress if at least two blocks of each rank run at a time.

    Raises HeapError for a broken heap.
    """
    launch_fields = launcher.begin()
    fields = []
    for heap, tensors in zip(launcher.heaps, ranks, strict=True):
        tokens, top_k = tensors["expert"].shape
        shape = heap.shape
        sizes = {"tokens": tokens, "top_k": top_k, "d_hidden": shape.d_hidden}
        sizes |= {"sends_again": shape.sends_again, "is_pool": shape.is_pool}
        sizes |= {"workspace": heap.base + shape.places["workspace"]}
        numbers = {
            name: value if isinstance(value, int | float) else address(value)
            for name, value in tensors.items()
        }
        fields.append(launcher.rank_fields(heap) | sizes | numbers)
    extension.module().flashdmoe(
        **launch_fields,
        hopper=launcher.hopper,
        is_backward=direction == "backward",
        activation=ACTIVATIONS[activation],
        ranks=fields,
    )


def _by_cell(arguments: RankTensors, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns uninitialised memory (P, C, columns)."""
    active_PCH: Tensor = arguments["active"]
    return active_PCH.new_empty(*active_PCH.shape[:2], columns, dtype=dtype)
