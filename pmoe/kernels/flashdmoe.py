"""FlashDMoE's persistent kernels: one launch computes a whole pass of the layer, from gate to combine.

Each thread block of a launch has a role. One block schedules tasks and checks whether data from other ranks
has arrived. All other blocks are processors. Tile by tile, they compute the gate's scores, choose experts,
assign positions to rows, send rows, multiply rows, and sum results. The kernels are in cuda/flashdmoe
(chapters 4 and 5 of the thesis on FlashDMoE; the backward pass is pmoe's own).

Rows are written into the symmetric heap (`pmoe.kernels.heap`) of their expert's rank. A cell is the part of a
rank's heap for the rows that one rank sends to one expert (section 5.3). With W ranks and E experts of each,
a heap has A = W * E cells. The cells are laid out in one of two ways:

    with a capacity      Every cell has room for C rows. If fewer arrive, the rest of the cell stays unused:
                         missing rows are neither sent nor computed (section 5.4).
    without a capacity   All cells of a rank together have C rows, called a pool. When the receiving rank
                         knows how many rows a sender has, it chooses where in the pool the sender's cell
                         begins.

A tensor that has a row for each row of the cells has the shape (P, C, columns): P = A with a capacity, and P
= 1 without a capacity. The tensor's rows that belong to no token are undefined.

Letters: T tokens of this rank, K choices of a token, W ranks, E experts of one rank, A = W * E cells of a
rank (also the number of experts of all ranks), P = A or 1, C rows of a cell or of the pool, M = d_model, H =
d_hidden, G = columns of the hidden activation before the nonlinearity: H, or 2H for SwiGLU.
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
"""Rows of a tile of a product: kTileRows of cuda/flashdmoe."""

MOST_EXPERTS, MOST_CHOICES = 256, 32
"""Limits if the launch itself chooses experts: the most experts of all ranks, the most choices of a token.

They equal kMostChosen of cuda/flashdmoe and kMostChoices of cuda/route.
"""

RankTensors = dict[str, Any]
"""One rank's arguments of a launch: tensors, None or numbers, by their names in cuda/flashdmoe/bind.cpp."""

PLACES = ("send_counts", "expert", "row", "slot", "home", "offset")
"""Names of the tensors that say at which index of the heaps each row is stored.

The forward launch writes them, and the backward launch reads them.
"""

Parameters = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The parameters w1, w2, b1 and b2 of one rank's experts. b1 and b2 may be None."""


@dataclass(frozen=True, kw_only=True)
class RoutingInput:
    """The experts of a rank's tokens; or the gate's logits, from which the launch chooses the experts.

    There are T tokens with K choices each. A is the number of experts of all ranks.

    expert_TK: (T, K) int64 or int32, global indices of experts. If ``deferred`` is set, this is the tensor
        deferred.routes.expert_TK, which has no values yet.
    deferred: gate logits, and tensors into which the launch writes the experts that it chooses. None if the
        experts are known.
    keep_TK: (T, K) bool, False for choices that are dropped; None keeps all.
    capacity: the most rows of this rank that each expert keeps: the first rows in token order. None keeps all
        rows; the caller must have checked that the heap has room for them.
    counts_A: (A,) int32, memory into which the launch writes this rank's number of rows for each expert; None
        allocates it.
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
    """Checks the arguments that forward and backward launches have in common, and returns them.

    There are T tokens of M = d_model columns. Each token chooses K experts.

    heap: this rank's symmetric heap.
    expert_TK: (T, K), the experts of the tokens.
    source_TM: (T, M), rows that the launch sends: the layer's input in forward, the output's gradient in
        backward.
    weight_TK: (T, K), the routing weights.
    parameters: the experts' parameters.
    activation: name of the experts' nonlinearity.
    again_TM: (T, M), the layer's input, if a backward launch must send it a second time; else None.

    The result also has two new tensors that the launch fills:

        result   (T, M)      the layer's output in forward, the input's gradient in backward
        active   (P, C, H)   activation after the nonlinearity of the rows that arrived: H = d_hidden columns

    With a capacity there are P groups (cells) of up to C rows, one for each sending rank and local expert.
    Without a capacity P is 1, and C is the most rows that a rank can receive.

    Raises ValueError, naming the tensor, if the kernels could not read an operand correctly.
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
    """Returns the arguments of a forward launch: ``arguments`` and new tensors that the launch fills.

    heap: this rank's symmetric heap.
    arguments: the arguments that both passes have in common, from `pass_tensors`.
    chosen: the experts of each token.
    keeps_input, keeps_hidden: whether the launch stores, for backward, the dispatched input (T_DI) and the
        hidden activation before the nonlinearity (T_M).

    Letters: T tokens of this rank, K choices of a token, W ranks, E experts of one rank, A = W * E, M =
    d_model, G = columns of T_M: d_hidden, or twice as many for SwiGLU. A cell is the rows that one rank sends
    to one expert: this rank sends A cells, one for each expert of all ranks, and receives A cells, one from
    each rank for each of its own E experts. Rows that arrive and rows that are sent are stored in the same
    way, as elements [p, c] of tensors (P, C, ...):

        with a capacity      P = A: p is the row's cell, c its index in the cell. C is the capacity
        without a capacity   P = 1: c is the row's index in a pool of C rows, in which each cell begins at an
                             offset that the launch chooses. Rows that arrive have one pool, rows that are
                             sent have another pool

    A slot is one of the T * K (token, choice) pairs. The new tensors, by name:

        input         (P, C, M)     the rows that arrived, T_DI; None unless it is kept
        hidden        (P, C, G)     T_M of the rows that arrived; None unless it is kept
        send_counts   (A,) int32    number of this rank's rows for each of the A experts of all ranks
        expert        (T, K) int32  global expert index of each slot
        row           (T, K) int32  index c of the row that this rank sends for each slot; -1 if the slot is
                                    dropped
        slot          (P, C) int32  slot of each row that this rank sends; the inverse of "row"
        home          (A,) int32    for each of the A experts of all ranks, the index in the pool of sent
                                    rows at which this rank's cell for the expert begins. The results come
                                    back into this pool. None with a capacity
        offset        (A,) int32    for each of the A cells that arrive, sorted by sending rank and then by
                                    expert, the index in the pool of arriving rows at which the cell begins.
                                    None with a capacity
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
    arguments: RankTensors,
    places: RankTensors,
    *,
    hopper: bool,
    kept: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> RankTensors:
    """Returns the arguments of a backward launch, with new tensors that the launch fills.

    arguments: the arguments that both passes have in common, from `pass_tensors`.
    places: the tensors of the forward launch that say where rows are stored, by their names in `PLACES`.
    hopper: whether the launch runs the kernels' sm_90a code.
    kept: two tensors of forward: the dispatched input (T_DI), and the hidden activation before the
        nonlinearity (T_M). If T_DI is None, the launch sends the layer's input again. If T_M is None, the
        launch computes it again.
    needs: which of w1, w2, b1 and b2 need a gradient, four bools.

    The result contains ``arguments``, the tensors of forward, and new tensors for the results:

        weight_gradient              (T, K) float32   for T tokens with K choices each: gradient of the
                                                      routing weights; 0 for dropped choices
        of_w1, of_w2, of_b1, of_b2                    gradients of the parameters; None if not needed

    The gradients have the same bits in each run.
    """
    _, capacity, width = arguments["active"].shape
    missing = capacity - places["slot"].shape[1]
    if missing:  # after forward, a larger batch made a heap with larger cells: pad forward's tensors
        kept = [None if tensor is None else F.pad(tensor, (0, 0, 0, missing)) for tensor in kept]
        places = places | {"slot": F.pad(places["slot"], (0, missing))}
    input_PCM, hidden_PCG = kept
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
        "dots": _by_cell(arguments, parts, torch.float32),  # same size, but the kernel writes (parts, P * C)
        "weight_gradient": torch.empty_like(arguments["weight"]),
    }


def launch_pass(
    launcher: Launcher, direction: PassDirection, activation: str, ranks: Sequence[RankTensors]
) -> None:
    """Launches the persistent kernel for one forward or backward pass of all ranks of this process.

    launcher: has the symmetric heaps of these ranks.
    direction: "forward" or "backward".
    activation: name of the experts' nonlinearity.
    ranks: for each rank the launch's arguments, from `forward_tensors` or `backward_tensors`.

    One thread block of each rank schedules tasks, and waits for the thread blocks that compute. So if fewer
    than two thread blocks of a rank ran at the same time, the kernel would never end.

    Raises HeapError for a broken heap, and RuntimeError if a CUDA graph cannot repeat the launch
    (`Launcher.launching`).
    """
    module = extension.puts_module() if launcher.heaps[0].shape.is_staged else extension.module()
    with launcher.launching() as launch_fields:
        module.flashdmoe(
            **launch_fields,
            hopper=launcher.hopper,
            is_backward=direction == "backward",
            activation=ACTIVATIONS[activation],
            ranks=[
                launcher.rank_fields(heap) | _pass_fields(heap, tensors)
                for heap, tensors in zip(launcher.heaps, ranks, strict=True)
            ],
        )


def _pass_fields(heap: Heap, tensors: RankTensors) -> dict[str, int | float]:
    """Returns the arguments of one rank for a launch: numbers, and addresses of tensors, by name.

    heap: the rank's symmetric heap.
    tensors: the rank's arguments, from `forward_tensors` or `backward_tensors`.
    """
    tokens, top_k = tensors["expert"].shape
    shape = heap.shape
    sizes = {"tokens": tokens, "top_k": top_k, "d_hidden": shape.d_hidden}
    sizes |= {"sends_again": shape.sends_again, "is_pool": shape.is_pool, "is_staged": shape.is_staged}
    sizes |= {"workspace": heap.base + shape.places["workspace"]}
    numbers = {
        name: value if isinstance(value, int | float) else address(value) for name, value in tensors.items()
    }
    return sizes | numbers


def _by_cell(arguments: RankTensors, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an uninitialised tensor with ``columns`` numbers for each row that this rank can receive.

    The shape is (P, C, columns). P and C are the first two dimensions of ``arguments["active"]``:

        with a capacity      P cells of C rows each, one cell for each sending rank and local expert
        without a capacity   P = 1: one pool of C rows, for all sending ranks and local experts

    arguments: the arguments that both passes have in common, from `pass_tensors`.
    dtype: dtype of the result; None means the dtype of the rows.
    """
    active_PCH: Tensor = arguments["active"]
    return active_PCH.new_empty(*active_PCH.shape[:2], columns, dtype=dtype)
