"""FlashDMoE's persistent kernels: a pass of the layer, from the gate to combine, in one launch.

Blocks are actors: one schedules and subscribes to what arrives, all others are processors that score, choose,
place, send, multiply and sum tile by tile. The kernels are in cuda/flashdmoe (thesis, chapters 4 and 5;
backward is pmoe's own).

A rank's rows for an expert lie in a cell of C rows on that expert's rank (layout L, section 5.3). A cell that
is not full is padded in place: what is missing neither travels nor is computed (section 5.4). Without a
capacity all cells of a rank share C rows, a pool, and begin where their rank has granted. Tensors by cell
hold C rows for each cell, or C for the pool; those without a row are undefined.

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
from pmoe.kernels.comet.launcher import Launcher
from pmoe.kernels.comet.launches import check_expert_weight, check_tokens
from pmoe.kernels.comet.steps import float_weights
from pmoe.kernels.gemm import ACTIVATIONS
from pmoe.kernels.heap import Heap
from pmoe.kernels.operands import address, check_memory, check_tensor
from pmoe.kernels.route import Promise
from pmoe.schedule.tasks import PassDirection

TILE_ROWS = 128

MOST_EXPERTS, MOST_CHOICES = 256, 32
"""Of all ranks, and of a token, where a launch makes the gate's choice: kMostChosen of cuda/flashdmoe."""

RankTensors = dict[str, Any]
"""A rank's part of a launch: tensors, None or numbers, by the names of cuda/flashdmoe/bind.cpp."""

PLACES = ("send_counts", "expert", "row", "slot", "home", "offset")
"""Where rows stand: forward makes it, backward reads it."""

Parameters = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""w1, w2, b1 and b2 of a rank's experts."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a gate has chosen for a rank's tokens: what a launch makes places of rows from.

    expert_TK: (T, K) int64 or int32, of all ranks' experts. promise: the launch itself chooses, and writes
    these routes, expert_TK among them. keep_TK: (T, K) bool, what the gate keeps; None keeps all. capacity:
    rows of an expert that are kept, in token order; None keeps C, which the caller sees to be enough.
    counts_A: (A,) int32, memory for "send_counts"; None makes it.
    """

    expert_TK: Tensor
    promise: Promise | None = None
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
    """What both passes need but for the places of rows: "result" (T, M) will be T_O, or the gradient of T_I.

    source_TM: T_I, or the gradient of T_O. again_TM: T_I, where a backward pass sends it again. Raises
    ValueError, naming the tensor, for what the kernels would not read right.
    """
    shape, weight_TK, (w1, w2, b1, b2) = heap.shape, float_weights(weight_TK), parameters
    cells = shape.num_ranks * shape.experts
    for each in (source_TM, again_TM):
        if each is not None:
            check_tokens(heap, expert_TK, each, weight_TK)
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
    heap: Heap, given: RankTensors, chosen: Chosen, *, keeps_input: bool, keeps_hidden: bool
) -> RankTensors:
    """`pass_tensors`, and "input" will be T_DI (P, C, M), "hidden" T_M (P, C, G), or None if not kept.

    `PLACES` will be int32: "send_counts" (A,) rows of each expert; "expert" (T, K); "row" (T, K), which of an
    expert's rows is each slot's, -1 where it is dropped; "slot" (P, C), the slots of these rows; in a pool
    "home" (A,), where the rows of each expert begin, which "row" counts in, and "offset" (A,), where those
    that arrive begin, by source and expert; else these two are None.
    """
    _, wide, d_model = given["w1"].shape
    expert_TK, keep_TK, shape = chosen.expert_TK, chosen.keep_TK, heap.shape
    cells = shape.num_ranks * shape.experts
    check_tensor(
        "expert", expert_TK, dtypes=[torch.int64, torch.int32], device=given["source"].device, contiguous=True
    )
    if keep_TK is not None:
        check_tensor("keep", keep_TK, shape=expert_TK.shape, dtypes=[torch.bool], contiguous=True)
    is_wide = expert_TK.dtype == torch.int64
    row_TK = torch.empty_like(expert_TK, dtype=torch.int32)
    if chosen.promise is not None:
        logits_TE, routes, options, product = chosen.promise
        check_tensor("logits", logits_TE, shape=("T", cells), dtypes=[torch.float32], contiguous=True)
        written = {"logits": logits_TE, "weight": routes.weight_TK, "all_counts": routes.counts_nE}
        given = given | written | {"chooses": 1, "l_aux": routes.l_aux, **options}
        if product is not None:
            weight_EM, source_TM = product[1], given["source"]
            kind: dict[str, Any] = {"dtypes": [source_TM.dtype], "device": source_TM.device}
            check_tensor("gate", weight_EM, shape=(cells, d_model), **kind)
            check_memory(dense={"gate": weight_EM})
            given["gate_weight"] = weight_EM
    return given | {
        "routes": 1,
        "chosen": expert_TK if is_wide else None,
        "keep": keep_TK,
        "capacity": shape.rows if chosen.capacity is None else chosen.capacity,
        "send_counts": row_TK.new_empty(cells) if chosen.counts_A is None else chosen.counts_A,
        "expert": torch.empty_like(row_TK) if is_wide else expert_TK,
        "row": row_TK,
        "slot": row_TK.new_empty(given["active"].shape[:2]),
        "home": row_TK.new_empty(cells) if shape.is_pool else None,
        "offset": row_TK.new_empty(cells) if shape.is_pool else None,
        "input": _by_cell(given, d_model) if keeps_input else None,
        "hidden": _by_cell(given, wide) if keeps_hidden else None,
    }


def backward_tensors(
    given: RankTensors, places: RankTensors, *, kept: Sequence[Tensor | None], needs: Sequence[bool]
) -> RankTensors:
    """`pass_tensors`, and "weight_gradient" will be (T, K) float32, 0 for dropped slots, "of_w1", "of_w2",
    "of_b1" and "of_b2" the gradients of these parameters, which repeat to the bit.

    places: `PLACES` of forward. kept: its T_DI and T_M; without T_DI "again" is read, without T_M it is
    computed again.
    needs: which of the four parameters want a gradient; it is None for the others.
    """
    _, capacity, width = given["active"].shape
    missing = capacity - places["slot"].shape[1]
    if missing:  # a heap with other cells has taken the place of forward's
        kept = [None if each is None else F.pad(each, (0, 0, 0, missing)) for each in kept]
        places = places | {"slot": F.pad(places["slot"], (0, missing))}
    input_PCM, hidden_PCG = kept
    hopper = extension.path(given["w1"].device)[0] == "sm_90a"
    wide, parts = given["w1"].shape[1], extension.module().row_dot_parts(hopper, width)
    for name, need in zip(("w1", "w2", "b1", "b2"), needs, strict=True):
        given[f"of_{name}"] = torch.empty_like(given[name]) if need and given[name] is not None else None
    return {
        **given,
        **{name: places[name] for name in PLACES},
        "input": input_PCM,
        "hidden": hidden_PCG,
        "recomputed": _by_cell(given, wide) if hidden_PCG is None else None,
        "gradient": _by_cell(given, wide),
        "dots": _by_cell(given, parts, torch.float32),  # as the kernel has them: (parts, P C)
        "weight_gradient": torch.empty_like(given["weight"]),
    }


def launch_pass(
    launcher: Launcher, direction: PassDirection, activation: str, ranks: Sequence[RankTensors]
) -> None:
    """One launch of a pass, with the tensors of each rank of this process. Any two resident blocks of a rank
    make progress. Raises HeapError for a broken heap."""
    begun, fields = launcher.begin(), []
    for heap, tensors in zip(launcher.heaps, ranks, strict=True):
        (tokens, top_k), shape = tensors["expert"].shape, heap.shape
        sizes = {"tokens": tokens, "top_k": top_k, "d_hidden": shape.d_hidden}
        sizes |= {"sends_again": shape.sends_again, "is_pool": shape.is_pool}
        sizes |= {"workspace": heap.base + shape.places["workspace"]}
        told = {at: each if isinstance(each, int | float) else address(each) for at, each in tensors.items()}
        fields.append(launcher.rank_fields(heap) | sizes | told)
    extension.module().flashdmoe(
        **begun,
        hopper=launcher.hopper,
        is_backward=direction == "backward",
        activation=ACTIVATIONS[activation],
        ranks=fields,
    )


def _by_cell(given: RankTensors, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """(P, C, columns), not initialised."""
    active_PCH: Tensor = given["active"]
    return active_PCH.new_empty(*active_PCH.shape[:2], columns, dtype=dtype)
