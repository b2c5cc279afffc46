"""The memory model: predicts the bytes of a layer's passes from its schedules and row counts.

At any time, the memory of a pass consists of three parts:

- its buffers. If the layer has ring slots (buffers of fixed size that chunks use in turn), all slots of the
  schedule count, with the sizes that the engine allocates (`pmoe.schedule.buffer_sizes`). Otherwise each
  buffer counts from its allocation until its last use.
- the tensors that forward saves for backward, and the result of the pass.
- small tensors with a few numbers for each row.

Nothing is measured or fitted. tests/unit/test_memory_model.py derives MPipeMoE's Eq. 1-6 from the slots.

Words:

    T_DI     dispatched input: the rows that a rank's experts received
    T_M      hidden activation of the experts, before the nonlinearity
    T_DO     the experts' output
    dX       the gradient of X
    slot     without "ring": one of the K choices of one of the T tokens, a (token, choice) pair
    pack     to convert rows to the narrower number format in which their messages carry them (a wire)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pmoe.comm.wire import are_packed_at_once, packing_bytes, rows_at_once, unpacking_bytes
from pmoe.gates.logits import BLOCK_ROWS
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import CallRows, LayerSizes
from pmoe.planner.rounded_products import bytes_of_rounded
from pmoe.planner.rows_per_pass import PassRows
from pmoe.schedule.buffer_sizes import BufferSizes, HiddenColumns, arena_elements, slot_elements
from pmoe.schedule.restore import GATHERED_AGAIN, KEEP, Restore, fate_of_copies
from pmoe.schedule.ring_buffers import rotating
from pmoe.schedule.separate_buffers import backward_schedule, forward_schedule
from pmoe.schedule.tasks import Kind, local_pieces
from pmoe.schedule.wire import RESULT_MESSAGES, WireName, message_bytes

INDEX = 8
"""Bytes of an index (int64)."""

SMALL = 4096
"""Bytes that stand for all tensors too small to list, such as scalars and counts, and for rounding up."""

GRADIENTS = "parameters' gradients"
"""Name in `PredictedMemory.tensors` of the parameters' gradients that exist during the backward pass."""

# The gradient of a routing weight is an inner product over the hidden columns, which kernels sum in parts.
DOT_COLUMNS = 128
"""Number of hidden columns in a group of columns that kernels sum separately, for each row, in float32.

For each group, the kernels for sm_80 make two partial sums of a row, and the kernels for sm_90a at most one
(cuda/grouped_gemm/parts.h).
"""

WIDE = 4
"""Bytes of a float32 element. Elements of narrower dtypes are summed in float32."""


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Predicted bytes of one forward and one backward pass of a layer.

    The layer's input, its parameters and the incoming gradient belong to the caller and are not counted.
    Parameters that FSDP2 gathers before use (``shard_experts`` of `pmoe.parallelize`) are counted.

    - saved: bytes of the tensors that exist between the passes, including the layer's output.
    - temporary: the most bytes that a pass needs in addition to ``saved``, without the gradients of the input
      and of the parameters.
    - gradients: bytes of the parameters' gradients after the pass. If experts are sharded, only this rank's
      part counts.
    - host: bytes that are offloaded to host memory.
    - peak: the most bytes in use on the device at once, over both passes.
    - searching_peak: the most bytes in use in a step that finds n (number of chunks) or the restore pair by
      trials, if it takes this choice. Equal to ``peak`` if the layer runs no trials, if they need no more,
      or if the arguments of the prediction fix both n and the pair.
    - forward_peak, backward_peak: the peak of each pass.
    - promised: the peak without the parameters' gradients. A memory budget limits this number.
    - is_bound: True if row counts were not known. All numbers are then upper bounds for any routing.
    - tensors: maps the name of a tensor to its bytes.
    - unknown: descriptions of tensors that are not counted, because the user's own modules allocate them.
    - candidates: the bytes of each choice, if n (number of chunks) or the restore pair is chosen at each
      call. All other fields are then those of the choice with the largest peak. {} if both are fixed.
    """

    saved: int
    temporary: int
    gradients: int
    host: int
    peak: int
    searching_peak: int
    forward_peak: int
    backward_peak: int
    promised: int
    is_bound: bool
    tensors: dict[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    candidates: Mapping[Choice, PredictedMemory] = field(default_factory=dict)


def peak_of_passes(memory: PredictedMemory) -> int:
    """Returns the predicted peak of both passes in bytes, without that of the gate."""
    return max(memory.forward_peak, memory.backward_peak)


def predict(
    sizes: LayerSizes,
    call: CallRows,
    forward: PassRows,
    backward: PassRows,
    restore: Restore,
    *,
    rearranged: bool = False,
) -> PredictedMemory:
    """Predicts the bytes of a forward and a backward pass of a layer.

    Args:
        sizes: sizes of the layer.
        call: numbers of rows of the call, before they are sent.
        forward, backward: numbers of rows of each pass, which were counted or are upper bounds.
        restore: whether T_DI (rows that experts received) and T_M (their hidden activations) are kept,
            offloaded, or made again between the passes.
        rearranged: whether the backward pass has another number of chunks than the forward pass.
    """
    around = _around_latent(sizes, call, restore)
    if sizes.outer:  # the pass does not compute the shared expert
        sizes = replace(sizes, shared_columns=HiddenColumns(), shared_parameters=0)
    if not sizes.rotates:
        forward, backward = (in_pieces(sizes, rows) for rows in (forward, backward))
    width = sizes.d_model * sizes.element_size
    rows_T = call.tokens * width
    inner_bytes = call.inner * width * bool(call.spread)
    kept, host = _kept_and_offloaded(sizes, forward, restore)
    shared = call.tokens * sizes.element_size * sizes.shared_columns.hidden
    small = _saved_by_row(sizes, call, forward)
    small += rearranged * _plan_bytes(sizes, call, backward)
    # Autocast also makes a float32 gradient of tokens.
    cast = _cast_bytes(sizes, call)
    wide_dx = call.tokens * (sizes.outer or sizes.d_model) * sizes.cast_from
    copies = copy_bytes(sizes, backward, restore)
    # SoftMoE saves the experts' results; if backward copies rows from T_I again, also the mixed rows.
    mixtures = inner_bytes * (1 + (restore.dispatched in GATHERED_AGAIN)) * (call.spread == "mixed")
    scaled = sizes.scaled_parameters * sizes.element_size
    saved = (
        rows_T + sum(kept.values()) + shared + small + cast + scaled + mixtures + copies.saved + around.saved
    )

    forward_held = _held(sizes, rows=forward, direction="forward", restore=restore, rearranged=rearranged)
    backward_held = _held(sizes, rows=backward, direction="backward", restore=restore, rearranged=rearranged)
    rounded_forward = bytes_of_rounded(sizes, forward, "forward", restore)
    rounded_backward = bytes_of_rounded(sizes, backward, "backward", restore)
    padded = call.spread == "padded"  # before backward copies padded rows again, it makes them again
    forward_work = _forward_work(sizes, call, forward, backward, forward_held, restore)
    forward_work += inner_bytes * (1 + padded) + copies.forward
    held_weights = _held_weights(sizes, call, backward, rearranged)
    backward_work = _backward_work(sizes, call, backward, backward_held, restore, held_weights)
    backward_work += copies.backward
    backward_work += inner_bytes * (1 + (padded and restore.dispatched in GATHERED_AGAIN))
    # FSDP2 gathers sharded experts into one message, and copies them from the message into the parameters.
    weights = sizes.gathered_bytes
    message = weights * (sizes.shared_over > 1)
    saved += weights * sizes.keeps_gathered
    forward_work += message + weights * (not sizes.keeps_gathered)
    backward_work += weights * (not sizes.keeps_gathered)
    expert_gradients = _expert_gradients(sizes, backward)
    rounding = _rounded_gradient(sizes, expert_gradients)
    expert_gradients += sizes.shared_parameters * sizes.element_size

    # With padded or mixed rows, the layer's output is made after the pass, from the pass's result.
    in_forward = saved + forward_work - rows_T * bool(inner_bytes) - around.not_in_forward
    forward_peak = max(in_forward, saved + inner_bytes + rows_T * sizes.top_k * (call.spread == "padded"))
    beside_work = saved + (inner_bytes or rows_T) + wide_dx + around.of_shared - around.not_in_backward
    in_backward = beside_work + backward_work
    # The sums of gradients are rounded after the last task, when only the buffers still exist. Compiled pass
    # programs (``sizes.programs``) have freed the buffers, too.
    at_the_end = beside_work + backward_held.summing * (not sizes.programs) + rounding
    at_the_end += held_weights + rounded_backward.held
    backward_peak = max(in_backward, at_the_end) + expert_gradients + around.gradients
    # The peak while the gate routes and rows are sorted, before any row is sent: at most 5 tensors with a
    # score for each token and expert, and 12 tensors with an index for each (token, choice) slot.
    routing_peak = _scores(sizes, call) * 5 + call.slots * INDEX * 12 + _widened(sizes, call)
    # The gate's backward holds 3 tensors as large as the input; SoftMoE's 4, because it normalizes tokens.
    gate_backward = (
        (4 if call.spread == "mixed" else 3) * max(rows_T, around.tokens)
        + _widened(sizes, call)
        + wide_dx
        + small
        + _gate_gradients(sizes, call)
    )
    # If FSDP2 shards experts, a rank keeps only its part of their gradient. FSDP2 sends the whole gradient in
    # one message, and frees the message later.
    experts = sizes.trained_parameters // max(sizes.shared_over, 1)
    trained = experts + sizes.shared_parameters + around.parameters
    reduction = sizes.trained_parameters * (sizes.shared_over > 1)
    gate_peak = gate_backward + (trained + reduction) * sizes.element_size
    gradients = trained + sizes.gate_parameters
    gather_peak = saved + (message + weights) * (not sizes.keeps_gathered)
    peak = max(forward_peak, backward_peak, routing_peak, gate_peak, saved + around.first_peak, gather_peak)
    return PredictedMemory(
        saved=saved,
        temporary=max(forward_work, backward_work),
        gradients=gradients * (sizes.cast_from or sizes.element_size),
        host=host,
        peak=peak,
        searching_peak=peak,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        promised=max(
            forward_peak, in_backward, routing_peak, gate_backward, saved + around.first, gather_peak
        ),
        is_bound=not (forward.exact and backward.exact),
        tensors={
            "T_O": around.tokens or rows_T,
            "dT_I": around.tokens or rows_T,
            **kept,
            "routing": small,
            "forward buffers": max(forward_held),
            "backward buffers": max(backward_held),
            GRADIENTS: expert_gradients + around.gradients,
        }
        | ({"shared T_M": shared} if shared else {})
        | ({"gathered experts": message + weights} if weights else {})
        | ({"rounded operands": max(map(sum, (rounded_forward, rounded_backward)))} if sizes.products else {})
        | ({"copies": copies.saved + max(copies.forward, copies.backward)} if copies.backward else {}),
    )


class AroundLatent(NamedTuple):
    """Bytes that a layer with d_latent holds outside the pass: for its projections and its shared expert.

    The pass sends and computes rows of d_latent columns. The projections and the shared expert work on
    d_model columns. All numbers are bytes, except ``parameters``. All are 0 without d_latent.

    tokens: the layer's output. The layer's input and the input's gradient have the same size.
    saved: tensors that exist between forward and backward, in addition to those of the pass.
    not_in_forward: the part of ``saved`` that does not exist yet while the forward pass runs.
    not_in_backward: the part of ``saved`` that no longer exists while the backward pass runs.
    gradients: the parameters' gradients that exist already while the backward pass runs: those of the
        up-projection and of the shared expert.
    first: temporary tensors, in addition to ``saved``, at one of two moments, whichever needs more: at the
        end of forward, when the shared expert's output is added, or at the start of backward, when the shared
        expert is differentiated.
    first_peak: ``first`` with the gradient of the shared expert's second weight.
    of_shared: the part of the input's gradient that comes from the shared expert. It exists until the end of
        backward.
    parameters: number of elements of the projections' and the shared expert's parameters.
    """

    tokens: int = 0
    saved: int = 0
    not_in_forward: int = 0
    not_in_backward: int = 0
    gradients: int = 0
    of_shared: int = 0
    first: int = 0
    first_peak: int = 0
    parameters: int = 0


def _around_latent(sizes: LayerSizes, call: CallRows, restore: Restore) -> AroundLatent:
    """Returns the bytes that a layer with d_latent holds outside the pass.

    The layer projects tokens down to d_latent columns before the pass, and the pass's output up again.
    Autograd saves these tensors outside the pass:

    - the pass's output, for the up-projection;
    - the tokens after the down-projection, if backward copies them to rows again;
    - the shared expert's hidden activation before the nonlinearity (in float32 or wider) and after it. If the
      expert is gated, also the half that the nonlinearity was applied to, before it is multiplied by the
      other half;
    - the shared expert's output, if a shared gate scales it.

    A shared expert is computed after the forward pass, and differentiated before the backward pass.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    restore: the restore pair. Its first part says how backward gets the experts' input.
    """
    if not sizes.outer:
        return AroundLatent()
    size = sizes.element_size
    tokens = call.tokens * sizes.outer * size
    projected = call.tokens * sizes.d_model * size
    again = projected * (restore.dispatched in GATHERED_AGAIN)
    has_shared = bool(sizes.shared_parameters)
    columns = sizes.shared_columns
    wide = max(size, WIDE)
    is_gated = columns.hidden > columns.scratch
    row_bytes = columns.hidden * wide + columns.scratch * (size + wide * is_gated)
    shared = has_shared * call.tokens * row_bytes + sizes.has_shared_gate * tokens
    # The bytes when the shared expert's output is scaled and added, and when the scaling is differentiated.
    factors = 4 * call.tokens * sizes.weight_size
    scaled = 2 * tokens + (projected - again) + factors
    logits = sizes.has_shared_gate * (tokens + _widened(sizes, call) + factors)
    # The bytes when the shared expert's second product is differentiated. Then the activation is freed, and
    # the nonlinearity is differentiated.
    product = tokens + call.tokens * columns.scratch * size
    nonlinearity = call.tokens * columns.scratch * (wide * (2 + is_gated) - size)
    of_weight = sizes.shared_parameters * size * columns.scratch // max(columns.hidden + columns.scratch, 1)
    first = max(scaled, logits, product, nonlinearity) + 2 * SMALL
    first_peak = max(scaled, logits, product + of_weight, nonlinearity + of_weight) + 2 * SMALL
    return AroundLatent(
        tokens=tokens,
        saved=tokens + again + shared,
        not_in_forward=tokens + again + shared - projected,
        not_in_backward=shared,
        gradients=(sizes.latent_parameters // 2 + sizes.shared_parameters) * size,
        of_shared=has_shared * tokens,
        first=has_shared * first,
        first_peak=has_shared * first_peak,
        parameters=sizes.latent_parameters + sizes.shared_parameters,
    )


class CopyBytes(NamedTuple):
    """Bytes that copies of busy experts take on a rank.

    A busy expert is one that many tokens choose. With the option ``balance``, other ranks get copies of it.

    saved: weights of the copies that this rank hosts, if the weights stay between the passes.
    forward, backward: weights, gradients and messages of copies in each pass, in addition to ``saved``.
    """

    saved: int
    forward: int
    backward: int


def copy_bytes(sizes: LayerSizes, backward: PassRows, restore: Restore) -> CopyBytes:
    """Returns an upper bound of the bytes that copies of busy experts take on a rank.

    If an expert has copies, its rank sends the expert's weights once. The rank sends the weights of at most
    one of its experts twice (`pmoe.planner.copy_groups`). If an expert has several copies, the ranks that
    host them pass parts of the weights on to each other. For one copy that it hosts, a rank sends and
    receives in this way at most the bytes of two experts.

    sizes: sizes of the layer, with the numbers of copies.
    backward: numbers of rows of the backward pass.
    restore: the restore pair. If backward sends the experts' input (T_DI) again, it also sends the weights of
        copies again, unless they stay. Otherwise the weights are kept.
    """
    copies = sizes.copies
    if not copies.hosted and not copies.sent:
        return CopyBytes(0, 0, 0)
    expert = sizes.expert_bytes
    hosted = copies.hosted * expert
    # Messages of weights are freed before messages of gradients are allocated.
    messages = copies.sent * expert + 2 * hosted * copies.relays
    is_kept = fate_of_copies(restore, stay=copies.stay) == "keep"
    weights = hosted * (not is_kept)
    is_narrow = sizes.element_size < WIDE
    gradients = hosted + expert * (is_narrow or copies.relays)
    if is_narrow and backward.num_chunks > 1:  # sums in float32, as for the experts' own gradients
        gradients += hosted // sizes.element_size * WIDE
    return CopyBytes(hosted * is_kept, messages + weights, gradients + messages + weights)


def _kept_and_offloaded(sizes: LayerSizes, forward: PassRows, restore: Restore) -> tuple[dict[str, int], int]:
    """Returns (bytes of each tensor on the device between the passes, bytes offloaded to the host).

    The first result is a dict with the keys "T_DI" (the experts' inputs) and "T_M" (their hidden
    activations). A tensor that is offloaded or made again has 0 bytes on the device. A tensor that is kept in
    messages or in e4m3 has the bytes of that format. The second result is the bytes of the offloaded tensors
    together.

    sizes: sizes of the layer.
    forward: numbers of rows of the forward pass.
    restore: whether each tensor is kept, offloaded, or made again.
    """
    rows_bytes = (forward.received + forward.local) * sizes.element_size
    t_di, t_m = rows_bytes * sizes.d_model, rows_bytes * sizes.columns.hidden
    kept = {"T_DI": t_di * (restore.dispatched == "keep"), "T_M": t_m * (restore.hidden == "keep")}
    if restore.dispatched == "message":
        # With send_once or sharded experts, other numbers of rows arrive than the experts compute.
        gathered = forward.extent.gathered
        arrived = forward.received if gathered is None or not forward.exact else sum(gathered)
        kept["T_DI"] = arrived * sizes.sent_bytes(sizes.wires.rows)
    if restore.hidden == "e4m3":
        row_bytes = message_bytes("e4m3", sizes.columns.hidden, sizes.element_size)
        kept["T_M"] = (forward.received + forward.local) * row_bytes
    return kept, t_di * (restore.dispatched == "offload") + t_m * (restore.hidden == "offload")


def _held(
    sizes: LayerSizes, *, rows: PassRows, direction: str, restore: Restore, rearranged: bool
) -> PassBytes:
    """Returns the bytes that the buffers of a pass take at the moments that `PassBytes` lists.

    If the layer has ring slots (reused buffers of fixed size), all slots count at each of these moments.
    Otherwise a buffer counts only while it is needed.

    sizes: sizes of the layer.
    rows: numbers of rows of the pass.
    direction: "forward" or "backward".
    restore: whether experts' inputs (T_DI) and hidden activations (T_M) are kept, offloaded or made again
        between the passes.
    rearranged: whether the backward pass has another number of chunks than the forward pass.
    """
    size = sizes.element_size
    buffers = sizes.buffer_sizes(
        direction=direction,
        extent=rows.extent,
        restore=restore if sizes.rotates else KEEP,
        rearranged=rearranged,
    )
    if not sizes.rotates:
        return without_rings(sizes, rows, buffers)
    schedule = rotating(direction, rows.num_chunks, sizes.stages, restore=restore, rearranged=rearranged)
    num_bytes = arena_elements(slot_elements(schedule, buffers), size)[1] * size
    # The messages with a chunk's results exist from the moment when the chunk's experts are done until the
    # rows of its tokens are summed. These rows are summed after the experts of the next chunk are done, so
    # messages of two chunks can exist together. In the last chunk, the rows that stay on their rank are
    # computed last.
    messages = sorted(_result_messages(sizes, buffers, i) for i in range(rows.num_chunks))
    one, two = (sum(messages[-count:]) for count in (1, 2))
    before = one * (rows.num_chunks > 1)
    staying = num_bytes + one * sizes.bypass_local
    return PassBytes(num_bytes, num_bytes + before, num_bytes + two, num_bytes + two, staying)


def _result_messages(sizes: LayerSizes, buffers: BufferSizes, chunk: int) -> int:
    """Returns the bytes of one chunk's messages with experts' outputs, both sent and received.

    A rank sends the outputs to the ranks of the tokens, and receives the outputs for its own tokens. Only
    outputs that are converted to another number format before they are sent need messages of their own. If
    outputs are sent in the rows' own dtype, the function returns 0.

    sizes: sizes of the layer.
    buffers: rows and columns of each buffer of the pass.
    chunk: the number of the chunk.
    """
    if sizes.wires.results is None:
        return 0
    shapes = (buffers.shape(f"{name}.{chunk}") for name in RESULT_MESSAGES)
    return sum(rows * columns for rows, columns in shapes) * sizes.element_size


# ---- memory that a pass needs in addition to its buffers


def _forward_work(
    sizes: LayerSizes,
    call: CallRows,
    forward: PassRows,
    backward: PassRows,
    buffers: PassBytes,
    restore: Restore,
) -> int:
    """Returns the most bytes that forward needs at once, without the tensors that it saves for backward.

    The result is the largest of the bytes needed

    - while the shared expert computes, at the start of the pass;
    - while the experts compute;
    - while T_M is packed to e4m3, if it is kept in this type;
    - when the experts' results are ready, before combine sends them;
    - while the rows of each token are summed.

    Some bytes are needed at all these times, and are added: routing weights, small tensors (`_unit_bytes`),
    and rows that are not cut into chunks (`_whole_rows`).

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    forward, backward: numbers of rows of each pass.
    buffers: bytes of forward's buffers at several moments (`PassBytes`).
    restore: the restore pair.
    """
    rounded = bytes_of_rounded(sizes, forward, "forward", restore)
    # The pass also holds the routing weights of rows that stay, in sorted order.
    in_messages = (3 if _has_more_messages(sizes) else 1) * (forward.received + forward.sent)
    weights = (in_messages + call.slots) * sizes.weight_size
    if sizes.programs:  # the kernels of compiled pass programs compute in the buffers
        return buffers.summing + weights + SMALL
    shared = call.tokens * sizes.element_size * sizes.shared_columns.scratch
    largest = max(
        buffers.summing + _summed_rows(sizes, call, forward),
        buffers.computing + max(_graph(sizes, backward), _widened_rows(sizes, forward), rounded.computing),
        buffers.staying,
        buffers.first + shared,
        buffers.leaving,
    )
    wires = _packed_in("forward", sizes, restore)
    largest = max(
        largest + _unit_bytes(sizes, forward) + _token_messages(sizes, call, forward, wires),
        _packing(sizes, call, forward, buffers, wires),
        buffers.leaving + _unpacking(sizes, forward),
        buffers.leaving + _result_packing(sizes, forward),
        buffers.computing + _hidden_packing(sizes, forward, restore),
    )
    return largest + rounded.held + weights + _whole_rows(sizes, call, forward)


def _backward_work(
    sizes: LayerSizes,
    call: CallRows,
    backward: PassRows,
    buffers: PassBytes,
    restore: Restore,
    held_weights: int,
) -> int:
    """Returns the most bytes that backward needs at once, without two parts that the caller adds.

    These two parts are the tensors that forward saved, and the sums of the parameters' gradients. The result
    is the largest of the bytes needed

    - while the shared expert's backward runs, at the start of the pass;
    - while the experts' backward runs;
    - when the gradients of the experts' inputs are ready, before they are sent back;
    - while the gradient rows of each token are summed.

    The gradient of a routing weight is an inner product over the hidden columns. Experts compute it in
    float32 or wider, one block of rows at a time.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    backward: numbers of rows of the pass.
    buffers: bytes of backward's buffers at several moments (`PassBytes`).
    restore: the restore pair.
    held_weights: bytes of routing weights and their gradients (`_held_weights`).
    """
    # Compiled pass programs compute in the buffers. They sum the gradients of routing weights in parts.
    if sizes.programs:
        units = backward.num_chunks * (sizes.bypass_local + sizes.sends_rows)
        summed_rows = min(units, 2) * backward.largest_unit  # two products' sums are added up in one launch
        parts = 2 * math.ceil(sizes.columns.scratch / DOT_COLUMNS) * summed_rows * WIDE
        return buffers.summing + parts + held_weights + SMALL
    rounded = bytes_of_rounded(sizes, backward, "backward", restore)
    wide = _product_size(sizes)
    products = _block_rows(sizes, backward) * sizes.columns.scratch * wide
    staying_rows = min(sizes.columns.scratch_rows, max(backward.extent.local))
    products_that_stay = staying_rows * sizes.columns.scratch * wide
    unit = _unit_bytes(sizes, backward)
    widened = 0
    if sizes.columns.staged:
        # A weight's gradient, too, is computed in temporary memory and then copied.
        unit = max(unit, _largest_weight(sizes) * sizes.element_size)
    elif sizes.element_size < WIDE:
        # Rows are multiplied by their routing weights after the products of a chunk. An expert's gradient
        # exists in the narrow dtype and as a float32 copy before the copy is added to the float32 sum.
        trained = min(_largest_weight(sizes), sizes.trained_parameters)
        one_expert = trained // (sizes.num_experts // sizes.ep_size)
        of_sums = (sizes.element_size + WIDE) * _sums_are_widened(sizes, backward)
        widened = max(_widened_rows(sizes, backward), one_expert * of_sums)
        if sizes.columns.graph:  # an expert's gradient is computed block by block, beside the rows of a block
            unit += one_expert * WIDE
    largest = max(
        buffers.computing + max(products, _graph(sizes, backward), widened, rounded.computing),
        buffers.staying + products_that_stay,
        buffers.summing + _summed_rows(sizes, call, backward),
        buffers.first + _shared_gradients(sizes, call),
        buffers.leaving,
    )
    wires = _packed_in("backward", sizes, restore)
    largest = max(
        largest + unit + _token_messages(sizes, call, backward, wires),
        _packing(sizes, call, backward, buffers, wires),
        buffers.leaving + _unpacking(sizes, backward),
        buffers.leaving + _result_packing(sizes, backward),
        buffers.computing + _hidden_packing(sizes, backward, restore),
    )
    return largest + rounded.held + held_weights + _whole_rows(sizes, call, backward)


def _held_weights(sizes: LayerSizes, call: CallRows, backward: PassRows, rearranged: bool) -> int:
    """Returns the bytes of routing weights and of their gradients in backward, without the saved weights.

    For each received row these are the weight's gradient in the order by expert and, if rows come from
    several ranks, the gradient in the order of arrival. If backward has other chunks than forward, the
    weights are copied, too. For each slot of this rank's tokens, four numbers are counted.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    backward: numbers of rows of the pass.
    rearranged: whether the backward pass has another number of chunks than the forward pass.
    """
    of_received = 1 + any(backward.extent.regrouped) + rearranged
    if _has_more_messages(sizes):
        of_received = 3
    return (of_received * backward.received + 4 * call.slots) * sizes.weight_size


def _has_more_messages(sizes: LayerSizes) -> bool:
    """Returns whether a pass holds more tensors of routing weights than the one with the received weights.

    There are three cases. If experts are split over ranks, the weights are also gathered inside the node.
    With ``send_once`` a second message says, for each weight, which row carries the weight's token. Compiled
    pass programs hold all weights until they end.

    sizes: sizes of the layer.
    """
    return sizes.esp_size > 1 or sizes.merges or sizes.programs


def _packed_in(direction: str, sizes: LayerSizes, restore: Restore) -> list[WireName]:
    """Returns the number formats into which a pass packs tokens or their gradients for messages.

    direction: "forward" or "backward".
    sizes: sizes of the layer.
    restore: the restore pair. Backward packs tokens only if it sends the experts' input (T_DI) again.
    """
    packs_rows = direction == "forward" or restore.dispatched == "communicate"
    wires = (
        sizes.wires.rows if packs_rows else None,
        sizes.wires.gradients if direction == "backward" else None,
    )
    return [wire for wire in wires if wire is not None]


def _token_messages(sizes: LayerSizes, call: CallRows, rows: PassRows, wires: Sequence[WireName]) -> int:
    """Returns the bytes of packed tokens that a pass still holds while its experts compute.

    A message is a token, or its gradient, packed for sending. In a small pass on the CPU, the first chunk
    packs the tokens of all chunks into messages (`are_packed_at_once`), and the last chunk frees them. With
    ring slots, the third and later chunks copy their rows from these messages only after the experts have
    begun, so the messages still exist then. The result is 0 in all other cases: without ring slots, with at
    most two chunks, or if each chunk packs its own tokens.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    rows: numbers of rows of the pass.
    wires: the formats of the messages.
    """
    are_held = sizes.packs_tokens and sizes.rotates and rows.num_chunks > 2
    if not are_held or not are_packed_at_once(call.inner, sizes.d_model):
        return 0
    return call.inner * sum(sizes.sent_bytes(wire) for wire in wires)


def _packing(
    sizes: LayerSizes, call: CallRows, rows: PassRows, buffers: PassBytes, wires: Sequence[WireName]
) -> int:
    """Returns the most bytes that a pass holds while it packs rows into messages; 0 if it packs none.

    Without ring slots, all chunks are packed before the experts compute the first chunk. So only the buffers
    of the start of the pass exist at the same time (``buffers.first``). With ring slots this is so only if
    the tokens of all chunks are packed at once, for the first chunk.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    rows: numbers of rows of the pass.
    buffers: bytes of the pass's buffers at several moments.
    wires: the number formats of the messages that the pass packs.
    """
    if not wires:
        return 0
    at_once = sizes.packs_tokens and are_packed_at_once(call.inner, sizes.d_model)
    packing = max(_packing_tokens(sizes, call, rows, wire) for wire in wires)
    if len(wires) > 1 and at_once:  # messages of T_DI, which is sent again, exist while gradients are packed
        packing += call.inner * sizes.sent_bytes(wires[0])
    return packing + SMALL + (buffers.first if at_once or not sizes.rotates else buffers.leaving)


def _unpacking(sizes: LayerSizes, rows: PassRows) -> int:
    """Returns the bytes of temporary tensors in which one chunk's messages are unpacked to rows.

    Messages are unpacked before the products of the chunk. So these bytes and the temporary tensors of the
    products do not exist at the same time. The result is 0 if rows are sent in their own dtype.

    sizes: sizes of the layer.
    rows: numbers of rows of the pass.
    """
    received = max(rows.extent.received)
    of_rows = (received, sizes.d_model, sizes.element_size, sizes.device_type)
    wires = [wire for wire in (sizes.wires.rows, sizes.wires.gradients) if wire is not None]
    return max((unpacking_bytes(wire, *of_rows) + SMALL for wire in wires), default=0)


def _packing_tokens(sizes: LayerSizes, call: CallRows, rows: PassRows, wire: WireName) -> int:
    """Returns the bytes of the tensors that packing one chunk's rows takes, apart from the send buffer.

    These tensors are the messages of tokens, or copies of the rows that are packed, and in both cases the
    temporary tensors of `pack_rows` (`pmoe.engine.variants.wire`).

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    rows: numbers of rows of the pass.
    wire: the number format of the messages.
    """
    width = sizes.d_model
    size = sizes.element_size
    device_type = sizes.device_type
    row_bytes = width * size
    sent = max(rows.extent.send)
    if not sizes.packs_tokens:
        return sent * row_bytes + packing_bytes(wire, sent, width, size, device_type, expendable=True)
    if are_packed_at_once(call.inner, width):
        return call.inner * sizes.sent_bytes(wire) + packing_bytes(wire, call.inner, width, size, device_type)
    tokens = -(-call.inner // rows.num_chunks)
    copied = min(sent, tokens)  # a chunk that sends fewer rows than it has tokens packs copies of them
    copies = rows_at_once(copied, width, device_type) * row_bytes
    copies += packing_bytes(wire, copied, width, size, device_type, expendable=True)
    if sent < tokens:
        return copies
    packing = packing_bytes(wire, tokens, width, size, device_type)
    return max(copies, tokens * sizes.sent_bytes(wire) + max(packing, sent * INDEX))


def _result_packing(sizes: LayerSizes, rows: PassRows) -> int:
    """Returns the bytes needed to pack or unpack the experts' outputs of one chunk.

    Packing converts outputs to the number format of their messages. If they are sent in the rows' own dtype,
    nothing is packed, and the function returns 0.

    sizes: sizes of the layer.
    rows: numbers of rows of the pass.
    """
    wire = sizes.wires.results
    if wire is None:
        return 0
    extent = rows.extent
    most = max(*(extent.arrived or extent.received), *extent.send)
    of_rows = (wire, most, sizes.d_model, sizes.element_size, sizes.device_type)
    return max(packing_bytes(*of_rows, expendable=True), unpacking_bytes(*of_rows, in_order=True)) + SMALL


def _hidden_packing(sizes: LayerSizes, rows: PassRows, restore: Restore) -> int:
    """Returns the bytes of temporary tensors needed to pack T_M to e4m3, or to unpack it.

    T_M is packed and unpacked one block at a time, so only one block counts.

    sizes: sizes of the layer.
    rows: numbers of rows of the pass.
    restore: the restore pair. The result is 0 unless it keeps T_M in e4m3.
    """
    if restore.hidden != "e4m3":
        return 0
    of_rows = (_block_rows(sizes, rows), sizes.columns.hidden, sizes.element_size, sizes.device_type)
    packing = packing_bytes("e4m3", *of_rows, expendable=True)
    return max(packing, unpacking_bytes("e4m3", *of_rows, in_order=True))


def _whole_rows(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """Returns the bytes of rows that are in memory for the whole batch at once, not chunk by chunk.

    These are the shared expert's results for all tokens, and two copies of each relayed row. Rows are relayed
    in a hierarchical all-to-all: this rank passes them on from one rank to another.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    rows: numbers of rows of the pass.
    """
    num_rows = call.tokens * bool(sizes.shared_parameters) + 2 * rows.relayed
    return num_rows * sizes.d_model * sizes.element_size


def _shared_gradients(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes that the shared expert's backward needs; 0 without a shared expert.

    These are the incoming gradient, the gradient of the hidden activation, the hidden activation after the
    nonlinearity, and the products of one block of rows. Rows in bfloat16 or float16 are copied to float32 to
    be multiplied by float32 routing weights: each block of the hidden activation's gradient, and at the end
    the incoming gradient.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    """
    if not sizes.shared_parameters:
        return 0
    columns = sizes.shared_columns
    size = sizes.element_size
    elements = call.tokens * (sizes.d_model + columns.hidden + columns.scratch)
    products = min(columns.scratch_rows, call.tokens) * columns.scratch * _product_size(sizes)
    in_copies = size < WIDE and not sizes.columns.staged
    widened = call.tokens * sizes.d_model * 2 * WIDE * in_copies
    return elements * size + max(products, widened)


def _product_size(sizes: LayerSizes) -> int:
    """Returns the bytes of temporary tensors for each element of a block of the hidden activation.

    An element is multiplied by the float32 routing weight of its row, and the product counts. If the element
    is bfloat16 or float16, it is first copied to float32. Then the copy and the float32 product both count.
    """
    return sizes.element_size if sizes.element_size >= WIDE else 2 * WIDE


def _block_rows(sizes: LayerSizes, backward: PassRows) -> int:
    """Returns the largest number of rows that the experts' backward processes at a time.

    Backward splits the rows of a product into blocks, to keep temporary tensors small.

    sizes: sizes of the layer.
    backward: numbers of rows of the backward pass.
    """
    return min(sizes.columns.scratch_rows, backward.largest_unit)


def _graph(sizes: LayerSizes, backward: PassRows) -> int:
    """Returns the bytes that autograd holds while it differentiates the experts for one block of rows.

    sizes: sizes of the layer.
    backward: numbers of rows of the backward pass.
    """
    return _block_rows(sizes, backward) * sizes.columns.graph * max(sizes.element_size, WIDE)


def _summed_rows(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """Returns the bytes of the temporary copy of rows that is made to sum the rows of each token.

    The copy has the rows of one chunk, sorted by token. Chunks are summed one after another, so only the
    largest chunk counts. On the CPU, if elements have four bytes or more, the copy has only one row for each
    token of a chunk: the rows of all tokens' first choices are added, then the rows of their second choices,
    and so on. With top_k = 1 there is nothing to sum, and the result is 0.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    rows: numbers of rows of the pass.
    """
    if sizes.top_k == 1:
        return 0
    num_rows = max(rows.extent.home, default=0)
    picked = call.choices > sizes.top_k
    if sizes.element_size >= WIDE and not sizes.columns.staged and not picked:
        num_rows = min(num_rows, -(-call.tokens // rows.num_chunks))
    return num_rows * sizes.d_model * sizes.element_size


def _unit_bytes(sizes: LayerSizes, rows: PassRows) -> int:
    """Returns the bytes of temporary tensors that belong to the largest matrix product of a pass.

    The tensors are

    - the routing weights of the product's rows, the gradients of these weights, and the rows' indices;
    - the product's results, if they are computed in temporary memory and then copied to their buffer;
    - the product of the rows with the first matrix of an adapter;
    - `SMALL` bytes for tensors of a few numbers, such as scalars and counts.

    sizes: sizes of the layer.
    rows: numbers of rows of the pass.
    """
    columns = sizes.columns.staged + sizes.columns.adapter
    return rows.largest_unit * (4 * sizes.weight_size + INDEX + columns * sizes.element_size) + SMALL


def _widened_rows(sizes: LayerSizes, rows: PassRows) -> int:
    """Returns the bytes of two float32 copies of a product's rows, for the largest product of a pass.

    The copies exist while bfloat16 or float16 rows are multiplied by float32 routing weights outside of a
    kernel. In all other cases the result is 0.

    sizes: sizes of the layer.
    rows: numbers of rows of the pass.
    """
    widened = not sizes.columns.staged and sizes.element_size < WIDE
    return rows.largest_unit * sizes.d_model * 2 * WIDE * widened


def _expert_gradients(sizes: LayerSizes, backward: PassRows) -> int:
    """Returns the bytes of the experts' parameter gradients, which are summed over all chunks.

    Parameters that need no gradient do not count. If gradients are bfloat16 or float16, and there are several
    to add, the sums are float32, because narrower sums would lose bits.

    sizes: sizes of the layer.
    backward: numbers of rows of the backward pass.
    """
    return sizes.trained_parameters * (WIDE if _sums_are_widened(sizes, backward) else sizes.element_size)


def _sums_are_widened(sizes: LayerSizes, backward: PassRows) -> bool:
    """Returns whether the experts' gradients are summed in float32 although their dtype is narrower.

    This is so if there are several gradients to add for the same parameter, or if a compiled program runs the
    pass (``LayerSizes.programs``).

    sizes: sizes of the layer.
    backward: numbers of rows of the backward pass.
    """
    additions = backward.num_chunks * (sizes.bypass_local + sizes.sends_rows)
    additions += bool(sizes.copies.sent)
    return sizes.element_size < WIDE and (additions > 1 or sizes.programs)


def _rounded_gradient(sizes: LayerSizes, sums: int) -> int:
    """Returns the bytes of one weight's rounded gradient, which exists at the same time as its float32 sum.

    After the last task of backward, the sums are rounded to the dtype of their weights, one after another. So
    at most one rounded gradient exists together with its sum, and the largest gradient counts. The result is
    0 if sums have the dtype of the parameters already.

    sizes: sizes of the layer.
    sums: bytes of all sums (`_expert_gradients`).
    """
    if sums == sizes.trained_parameters * sizes.element_size:
        return 0
    return min(_largest_weight(sizes), sizes.trained_parameters) * sizes.element_size


def _largest_weight(sizes: LayerSizes) -> int:
    """Returns the number of elements of w1, the experts' largest weight on this rank.

    The w1 of gated experts (SwiGLU) holds two matrices. If experts are the user's own modules, the sizes of
    their weights are unknown, so all parameters count as one weight.
    """
    wide = sizes.columns.hidden
    width = sizes.columns.scratch
    return (
        math.ceil(sizes.expert_parameters * wide / (wide + width))
        if wide and width
        else sizes.expert_parameters
    )


# ---- small tensors: a few numbers for each row


def _saved_by_row(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """Returns the bytes of small tensors, a few numbers for each row, that forward saves for backward.

    These are the gate's scores, choices and weights, the indices of rows (`_plan_bytes`), and the routing
    weights that arrived from other ranks.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    rows: numbers of rows of the forward pass.
    """
    received = (rows.received + call.slots * sizes.programs) * sizes.weight_size
    shared = call.tokens * sizes.weight_size * bool(sizes.shared_parameters)
    return _routing_bytes(sizes, call) + received + shared + _plan_bytes(sizes, call, rows)


def _routing_bytes(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of a call's routing: the gate's scores, the choices of tokens, and their weights.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    """
    gate = _scores(sizes, call) * sizes.gate_scores
    # If a token has several experts, its weights are scaled to sum to 1. Autograd saves both versions.
    choices = call.slots * (INDEX + sizes.weight_size * (1 + (sizes.top_k > 1)))
    if call.spread == "padded":
        choices += (call.inner + call.tokens * sizes.top_k) * INDEX
    return gate + choices


def bytes_before_rows(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes that a call holds when it has routed its tokens, before it sends rows.

    These are the routing, what autocast has cast (tokens and parameters), and with d_latent the projected
    tokens.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    """
    rows_T = call.tokens * sizes.d_model * sizes.element_size
    return _routing_bytes(sizes, call) + _cast_bytes(sizes, call) + rows_T * bool(sizes.outer)


def _cast_bytes(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of the copies that autocast makes of the tokens and parameters, in bfloat16, say.

    With d_latent, the pass does not compute the shared expert, so its parameters do not count.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    """
    rows_T = call.tokens * sizes.d_model * sizes.element_size
    parameters = sizes.expert_parameters + sizes.shared_parameters * (not sizes.outer)
    return (parameters * sizes.element_size + rows_T) * bool(sizes.cast_from)


def _plan_bytes(sizes: LayerSizes, call: CallRows, rows: PassRows) -> int:
    """Returns the bytes of the indices with which rows are gathered, sorted and summed.

    These are the position and the token of each row, and the order that sorts received rows by expert.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    rows: numbers of rows of the pass.
    """
    # If experts choose tokens, two more indices are stored for each (token, expert) pair: token and position.
    picked = call.choices > sizes.top_k
    order = call.slots * INDEX * (2 + (sizes.top_k > 1) + 2 * picked)
    order += call.slots * (INDEX + INDEX // 2) * rows.merged  # index of the sent row that carries each slot
    # One index sorts the rows of each chunk, and another the weights of all chunks. On the CPU, both are the
    # same tensor if there is one chunk, unless several weights share a row.
    is_shared = rows.num_chunks == 1 and not sizes.merges and sizes.device_type == "cpu"
    indices = any(rows.extent.regrouped) * (1 if is_shared else 2)
    return order + rows.sent * INDEX + rows.received * INDEX * indices


def _gate_gradients(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of the gradients that the gate's backward computes on the way to its logits.

    These are the gradients of the routing weights, and of two intermediate results.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    """
    return _scores(sizes, call) * 2 * bool(sizes.gate_scores) + call.slots * sizes.weight_size * 2


def _scores(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of a tensor with one score for each token and expert.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    """
    return call.tokens * sizes.num_experts * sizes.weight_size


def _widened(sizes: LayerSizes, call: CallRows) -> int:
    """Returns the bytes of the float32 copies of tokens that the gate makes; 0 if tokens are float32.

    The gate copies a block of tokens at a time, so only one block counts.

    sizes: sizes of the layer.
    call: numbers of rows of the call.
    """
    columns = sizes.outer or sizes.d_model
    return min(call.tokens, BLOCK_ROWS) * columns * WIDE * (sizes.element_size < WIDE)


# ---- memory of a pass without ring slots
#
# A buffer that a collective reads or writes stays until the pass ends. A buffer that the experts make for a
# chunk stays until the last task that uses it:
#
#     tasks of a chunk in backward     ... S1      C1                W1
#     stay     (dT_DI)                             |================================> end of the pass
#     pending  (dT_M, dT_DO_sorted)                |================|
#     result   (dT_DI_sorted)                      |====|


@dataclass(frozen=True, kw_only=True)
class BufferLifetimes:
    """Names of the buffers that a kind of task allocates, grouped by how long they are needed.

    The record is used for passes without ring slots (reused buffers): each buffer has memory of its own.

    stay: needed until the pass ends, because a collective reads or writes them. The first name is the
        experts' result in the order in which rows arrived. It is allocated when the experts start, or after
        the experts if they do not store the results in this order (`BufferSizes.places`) and received rows
        had to be sorted by expert. The other names exist only if experts are sharded over ranks, and are
        allocated after the experts.
    pending: needed until the weight gradient of the same chunk is computed.
    brief: needed until the experts' products are done.
    result: the experts' result, sorted by expert. It is needed until the end of the task: the task copies it
        to the first buffer of ``stay``.
    """

    stay: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    brief: tuple[str, ...] = ()
    result: tuple[str, ...] = ()


MAKES: Mapping[str, Mapping[Kind, BufferLifetimes]] = {
    "forward": {
        Kind.COMPUTE: BufferLifetimes(
            stay=("T_DO", "leaving", "parts"), brief=("active",), result=("T_DO_sorted",)
        ),
        Kind.LOCAL: BufferLifetimes(brief=("active_L",)),
    },
    "backward": {
        Kind.COMPUTE: BufferLifetimes(
            stay=("dT_DI", "leaving", "parts"),
            pending=("dT_M", "active", "dT_DO_sorted"),
            result=("dT_DI_sorted",),
        ),
        Kind.LOCAL: BufferLifetimes(pending=("dT_M_L", "active_L", "dT_DO_L")),
    },
}
"""The buffers that tasks allocate, by direction and kind of task. A kind that is missing allocates none."""
ENDS = {
    Kind.WGRAD: Kind.COMPUTE,
    Kind.LOCAL_WGRAD: Kind.LOCAL,
    Kind.LOCAL_COPY_WGRAD: Kind.LOCAL,
}
"""Maps a kind of task that frees ``pending`` buffers, as their last user, to the kind that allocated them."""


class PassBytes(NamedTuple):
    """Bytes that the buffers of a pass take at several moments of the pass.

    first: bytes at the start of the pass.
    computing: the most bytes while experts compute.
    leaving: the most bytes when experts are done and results are prepared for combine.
    summing: bytes at the end, while the rows of each token are summed.
    staying: only with ring slots: bytes while the experts compute the rows of the last chunk that stay on
        their rank. Messages with the results of the chunk's other rows exist at the same time. Without ring
        slots this number is 0, and ``computing`` includes the moment.
    """

    first: int
    computing: int
    leaving: int
    summing: int
    staying: int = 0


def in_pieces(sizes: LayerSizes, rows: PassRows) -> PassRows:
    """Returns a pass's numbers of rows, with the rows that stay on their rank counted by task.

    A row stays if its expert is on its own rank. Small products are slow, so a pass without ring slots
    (reused buffers) computes rows that stay in fewer tasks than it has chunks: the first task has the rows of
    several chunks (`pmoe.schedule.tasks.local_pieces`). Rows that stay for copies have tasks of their own,
    after the tasks for the rank's own experts.

    sizes: sizes of the layer.
    rows: numbers of rows of a pass, with the rows that stay counted chunk by chunk (``extent.local``).

    Example: (4, 4, 4) rows of 3 chunks stay. If 2 tasks compute them, ``extent.local`` of the result is
    (8, 4). If (2, 2, 2) more rows stay for copies of busy experts, it is (8, 4, 4, 2).
    """
    n = rows.num_chunks
    m = local_pieces(n, local=sizes.bypass_local, remote=sizes.sends_rows)
    if not m:
        return rows
    joined = n - m + 1

    def in_tasks(by_chunk: Sequence[int]) -> tuple[int, ...]:
        return (sum(by_chunk[:joined]), *by_chunk[joined:]) if by_chunk else ()

    return replace(
        rows,
        extent=rows.extent._replace(local=in_tasks(rows.extent.local) + in_tasks(rows.local_copies)),
        busiest_local=in_tasks(rows.busiest_local) + in_tasks(rows.busiest_copies),
    )


def without_rings(sizes: LayerSizes, rows: PassRows, buffers: BufferSizes) -> PassBytes:
    """Returns the bytes that buffers take at four moments of a pass without ring slots.

    The moments are the start of the pass, the experts' computation, the time before combine, and the end.
    Without ring slots (buffers that chunks use in turn), every buffer has memory of its own. The function
    goes through the tasks in order. It adds the buffers that a task allocates, and removes those that the
    task is the last to use.

    sizes: sizes of the layer.
    rows: numbers of rows of the pass, with the rows that stay joined into fewer tasks (`in_pieces`).
    buffers: rows and columns of each buffer of the pass.
    """
    direction = buffers.direction
    n = rows.num_chunks
    build = forward_schedule if direction == "forward" else backward_schedule

    def num_bytes(names: Iterable[str], chunk: int) -> int:
        shapes = (buffers.shape(f"{name}.{chunk}") for name in names)
        return sum(rows * columns for rows, columns in shapes) * sizes.element_size

    sharded = sizes.esp_size > 1
    start = ["send", "T_DI" if direction == "forward" else "dT_DO"] + ["arrived", "copies"] * sharded
    # Before the first task, the engine allocates the buffers of collectives and of results that come back.
    home = sum(rows.extent.send) + sum(rows.extent.local) + sizes.has_drops
    live = home * sizes.d_model * sizes.element_size + sum(num_bytes(start, i) for i in range(n))
    first = computing = leaving = live
    makes = MAKES[direction]
    stages = sizes.stages
    if rows.local_copies:  # the copies' weights and messages are counted by `copy_bytes`
        stages = replace(stages, copies="present", frozen_copies=sizes.is_frozen, local_copies=True)
    schedule = build(n, stages)
    for task in (schedule.frozen if sizes.is_frozen else schedule).tasks:
        i = task.chunk
        if task.kind in ENDS:
            live -= num_bytes(makes[ENDS[task.kind]].pending, i)
        task_buffers = makes.get(task.kind)
        if task_buffers is None:
            continue
        live += num_bytes(task_buffers.pending, i)
        early, late = task_buffers.stay[:1], task_buffers.stay[1:] if sharded else ()
        if task_buffers.stay and rows.extent.regrouped[i] and not buffers.places:
            early, late = (), (*early, *late)
        live += num_bytes(early, i)
        # While the experts run, all buffers allocated so far exist, and the brief buffers, and the result.
        computing = max(
            computing, live + num_bytes(task_buffers.brief, i) + num_bytes(task_buffers.result, i)
        )
        if sizes.is_frozen:  # no task of weight gradients will free them
            live -= num_bytes(task_buffers.pending, i)
        live += num_bytes(late, i)
        if task.kind is Kind.COMPUTE:
            live += _result_messages(sizes, buffers, i)
        leaving = max(leaving, live + num_bytes(task_buffers.result, i))
    return PassBytes(first, computing, leaving, live)
