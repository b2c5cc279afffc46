"""COMET's two fused kernels: dispatch + grouped product, and grouped product + top-k reduction + combine.

Rows are written straight into the heap of the rank that computes them (`pmoe.comm.heap`), and tiles of the
product start as their rows arrive; on the way back the columns of the result leave as they are computed. The
kernels are in cuda/comet. (COMET, sections 3.1 and 3.2; arXiv 2502.19811.)

Rows that have arrived are sorted by expert, inside an expert by source rank, this rank's own first and then
upwards around the ranks, inside a source in the order in which it sends: by token.

Several ranks may be one process's (virtual ranks on one device, for tests and measurements): then they are
launched together, and what belongs to each is in lists, one rank after the other.

Letters: T tokens of this rank, K choices, N rows that arrive, W ranks, E experts of a rank, M = d_model,
H = d_hidden, G = H or 2H rows of w1.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.grouped_gemm import ACTIVATIONS, misfit

MOST_RANKS, MOST_EXPERTS, MOST_CHUNKS, MOST_VIRTUAL = 64, 1024, 64, 4
"""As in cuda/comet/layout.h and fused.h."""

SPARE_BLOCKS, DEFAULT_SPARE_BLOCKS = "PMOE_SPARE_BLOCKS", 4

_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}
_DISPATCH, _COMBINE = 0, 1
_FORWARD, _INPUT = 0, 1
_PLAIN, _HIDDEN, _HIDDEN_GRADIENT = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Journey:
    """Where the rows of a rank's tokens go, and what comes to it.

    expert_TK: int32, of all ranks' experts. position_TK: int32, where each slot's row stands among the rows
    that this rank sends, which are sorted by expert, then by token; -1 where it is dropped. slot_S: int32,
    the slot of each of these S rows. send_WE: int32, rows for each rank's experts; recv_WE: int32, rows from
    each rank for this one's experts; both where the rows are. num_received: N, or more.

    The tensors by token may be those of several ranks, of which this rank's are the num_tokens from
    first_token on; positions then begin at first_row, as `pmoe.kernels.route` numbers them with a chunk a
    rank.
    """

    rank: int
    expert_TK: Tensor
    position_TK: Tensor
    slot_S: Tensor
    send_WE: Tensor
    recv_WE: Tensor
    num_received: int
    first_token: int = 0
    num_tokens: int | None = None
    first_row: int = 0

    @property
    def num_ranks(self) -> int:
        return self.send_WE.shape[0]

    @property
    def top_k(self) -> int:
        return self.expert_TK.shape[1]

    @property
    def ends_E(self) -> Tensor:
        """int32, the running sum of the rows that arrive, by expert."""
        return self.recv_WE.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)


class Steps(Protocol):
    """What a fused layer consists of. Each is collective: all ranks call the same steps in the same order."""

    def dispatch(self, journey: Journey, x_TM: Tensor, weight_TK: Tensor) -> None:
        """Rows and their routing weights to the ranks that compute them: `rows` and `row_weight` there."""
        ...

    def give_up(self, why: str) -> None:
        """A round was left in the middle by an error of this rank alone, and cannot be gone on with."""
        ...

    def rows(self, journey: Journey) -> Tensor:
        """(N, M) what the last dispatch brought to this rank; until the next step that combines."""
        ...

    def row_weight(self, journey: Journey) -> Tensor:
        """(N,) float32 (float64 for float64 rows), the routing weights of these rows; likewise."""
        ...

    def dispatch_hidden(
        self,
        journey: Journey,
        x_TM: Tensor,
        weight_TK: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        *,
        activation: str,
        keep: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """`dispatch`, and T_M = rows w1[e]^T + b1[e], (N, G), None unless ``keep``, and the activated hidden
        (N, H)."""
        ...

    def product_combine(self, journey: Journey, active_NH: Tensor, w2: Tensor, b2: Tensor | None) -> Tensor:
        """(T, M): of each token the sum of its rows' (active w2[e]^T + b2[e]) times their weights. Each rank
        sums its own rows of a token before they travel; the owner sums the ranks' sums in fixed order."""
        ...

    def dispatch_hidden_gradient(
        self,
        journey: Journey,
        grad_TM: Tensor,
        weight_TK: Tensor,
        w2: Tensor,
        b2: Tensor | None,
        hidden_NG: Tensor,
        *,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`dispatch` of dT_O, and from it dT_M times the rows' weights (N, G), the activated hidden times the
        weights (N, H), and the gradients of the weights by parts of the columns (P, N), to be summed over P
        in that order: <activated hidden, grad w2[e]>, plus <grad, b2[e]> where there is a bias."""
        ...

    def gradient_combine(
        self, journey: Journey, grad_hidden_NG: Tensor, w1: Tensor, dots_PN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dT_I (T, M): of each token the sum of its rows' grad_hidden w1[e], as in `product_combine`; and the
        gradients of its weights (T, K), 0 for dropped slots."""
        ...


# ---- what a device can run


def path(device: torch.device) -> tuple[str | None, str | None]:
    """("sm_90a" or "sm_80", None): whose fused kernels a CUDA device runs; or (None, why there are none)."""
    if device.type != "cuda":
        return None, f"device {device.type}: the fused kernels are CUDA's"
    return _path(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _path(index: int) -> tuple[str | None, str | None]:
    if extension.load() is None:
        return None, extension.status().reason
    device = extension.on_device(index)
    kernels = [each for each in device.kernels if each.name.startswith("comet.")]
    for name in ("sm_90a", "sm_80"):
        found = [each for each in kernels if f".{name}." in each.name]
        if found and all(each.refusal is None for each in found):
            return name, None
    reason = device.reason or "; ".join(sorted({each.refusal for each in kernels if each.refusal}))
    return None, f"device {index}: {reason or 'there are no fused kernels in the extension'}"


def refusal(device: torch.device, dtype: torch.dtype, *, d_model: int, d_hidden: int) -> str | None:
    """Why the fused kernels do not take such rows on this device; None where they do."""
    return path(device)[1] or misfit(dtype, d_model=d_model, d_hidden=d_hidden)


def ranks_refusal(device: torch.device, num_ranks: int, experts: int) -> str | None:
    """Why the fused kernels do not take so many ranks of so many experts each; None where they do."""
    if num_ranks > MOST_RANKS:
        return f"{num_ranks} ranks are more than {MOST_RANKS}"
    if num_ranks * experts > MOST_EXPERTS:
        return f"{num_ranks * experts} experts of all ranks are more than {MOST_EXPERTS}"
    found, why = path(device)
    if found is None:
        return why
    words = int(_path_told(found == "sm_90a")["board_words"])
    if (num_ranks + 1) * experts > words:
        return (
            f"({num_ranks} ranks + 1) x {experts} experts are more than the {words} that a block has room for"
        )
    return None


@functools.cache
def _path_told(hopper: bool) -> dict[str, int]:
    module = extension.load()
    assert module is not None
    told: dict[str, int] = module.comet_path(hopper)
    return told


# ---- launches


class Memory(Protocol):
    """What the kernels ask of a rank's symmetric heap; `pmoe.comm.heap.Heap` is one."""

    rank: int
    epoch: int
    device: torch.device
    base: int
    peers: Tensor
    report: Tensor

    @property
    def shape(self) -> Any: ...
    @property
    def counters(self) -> int: ...
    @property
    def bound_nanoseconds(self) -> int: ...

    def next_epoch(self) -> int: ...
    def give_up(self, why: str) -> None: ...
    def raise_if_failed(self) -> None: ...
    def rows(self, count: int) -> Tensor: ...
    def row_weight(self, count: int) -> Tensor: ...


class DivisionPoint(Protocol):
    """n_c: blocks of each rank that communicate. chunk_columns: T_N, the columns that are sent at a time."""

    @property
    def n_c(self) -> int: ...
    @property
    def chunk_columns(self) -> int: ...


Kind = Literal["dispatch", "combine"]
Direction = Literal["forward", "backward"]
Divide = Callable[[Kind, Direction], DivisionPoint]
"""The division point of a launch; the same on every rank."""


WAITS = ("nothing", "grant", "arrival", "tiles", "returned")
"""`Wait` of cuda/comet/watch.h, in words."""


@dataclass(frozen=True, kw_only=True)
class Mischief:
    """For tests on a device. nap_seed: everybody sleeps now and then. not_waited: names of waits that are
    left out, of "grant", "arrival", "tiles", "returned"."""

    nap_seed: int = 0
    not_waited: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, int]:
        return {
            "nap_seed": self.nap_seed,
            "not_waited": sum(1 << WAITS.index(name) for name in self.not_waited),
        }


def _words(**tensors: Tensor | None) -> None:
    """Raises ValueError, naming the tensor, for operands that the kernels would not read right."""
    for name, tensor in tensors.items():
        if tensor is None or not tensor.numel():
            continue
        if not tensor.is_contiguous():
            raise ValueError(f"{name} of strides {tensor.stride()} must be contiguous")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} at address {tensor.data_ptr():#x} must be aligned to 16 bytes")


def _like(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} of dtype {tensor.dtype} must be {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} on {tensor.device} must be where the heap is ({device})")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_last_stream: weakref.WeakKeyDictionary[Memory, torch.cuda.Stream] = weakref.WeakKeyDictionary()


def _stream_behind(heaps: Sequence[Memory], device: torch.device) -> int:
    """The current stream, behind whatever was launched with these heaps: their rounds follow each other."""
    stream = torch.cuda.current_stream(device)
    for heap in heaps:
        before = _last_stream.get(heap)
        if before is not None and before != stream:
            stream.wait_stream(before)
        _last_stream[heap] = stream
    return int(stream.cuda_stream)


def spare_blocks(num_ranks: int = 1) -> int:
    """Multiprocessors that are left to other kernels: $PMOE_SPARE_BLOCKS, else 4 where other processes are
    waited for, 0 on one rank alone. ValueError for a variable that is no such number.

    A fused kernel takes a whole multiprocessor for each block, and waits for its peers'. A collective that
    runs beside it on another stream, as data-parallel wrappers issue them in backward, may then hold one
    rank's fused kernel up, and be held up by another's, until the wait's bound: unless both have room.
    """
    text = os.environ.get(SPARE_BLOCKS, "0" if num_ranks == 1 else str(DEFAULT_SPARE_BLOCKS))
    if not text.isdecimal():
        raise ValueError(f"{SPARE_BLOCKS} ({text!r}) must be a whole number of blocks, at least 0")
    return int(text)


def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Ranks:
    """The ranks that this process runs, with their heaps, and how their launches are divided."""

    def __init__(self, heaps: Sequence[Memory], divide: Divide, mischief: Mischief | None = None) -> None:
        """Raises ValueError where there are more ranks than a launch takes, or none."""
        if not 1 <= len(heaps) <= MOST_VIRTUAL:
            raise ValueError(f"heaps ({len(heaps)}) must be 1 to {MOST_VIRTUAL}: the ranks of one launch")
        found, why = path(heaps[0].device)
        if found is None:
            raise ValueError(f"the fused kernels cannot run: {why}")
        shape = heaps[0].shape
        why = ranks_refusal(heaps[0].device, shape.num_ranks, shape.experts)
        if why is not None:
            raise ValueError(f"the fused kernels cannot run: {why}")
        self.heaps, self.divide, self.mischief = tuple(heaps), divide, mischief or Mischief()
        self.device = heaps[0].device
        self.hopper = found == "sm_90a"
        self.module = extension.load()
        # Virtual ranks wait for nobody outside their launch.
        spare = spare_blocks(shape.num_ranks // len(heaps))
        self.blocks = (_processors(self.device) - spare) // len(heaps)
        if self.blocks < 2:
            raise ValueError(
                f"the fused kernels cannot run: {self.blocks} blocks of {self.device} for each of "
                f"{len(heaps)} ranks are less than 2, one that communicates and one that computes "
                f"({SPARE_BLOCKS} is {spare})"
            )
        self.tile_columns = _path_told(self.hopper)["tile_columns"]

    def row_dot_parts(self, columns: int) -> int:
        parts: int = self.module.row_dot_parts(self.hopper, columns)  # type: ignore[union-attr]
        return parts

    def launch(
        self,
        kernel: int,
        form: int,
        division: DivisionPoint,
        ranks: Sequence[dict[str, int]],
        *,
        epilogue: int = _PLAIN,
        activation: int = 0,
    ) -> None:
        """ranks: what cuda/comet/bind.cpp takes of each, but for what all launches have."""
        stream = _stream_behind(self.heaps, self.device)
        for heap in self.heaps:
            heap.raise_if_failed()
            if kernel == _DISPATCH:
                heap.next_epoch()
        shape = self.heaps[0].shape
        communicating = max(1, min(division.n_c, self.blocks - 1))
        common = [
            {
                "n_c": communicating if fields["computes"] else self.blocks,
                "ranks": shape.num_ranks,
                "experts": shape.experts,
                "local_experts": shape.experts,
                "heap_rows": shape.rows,
                "heap_home_rows": shape.home_rows,
                "row_bytes": shape.row_bytes,
                "heaps": heap.peers.data_ptr(),
                "rank": heap.rank,
                "failed": heap.counters,
                "report": heap.report.data_ptr(),
                "epoch": heap.epoch,
                "bound_nanoseconds": heap.bound_nanoseconds,
                **self.mischief.fields,
                **fields,
            }
            for heap, fields in zip(self.heaps, ranks, strict=True)
        ]
        self.module.comet(  # type: ignore[union-attr]
            device=self.device.index or 0,
            stream=stream,
            hopper=self.hopper,
            kernel=kernel,
            element=_ELEMENTS[shape.dtype],
            form=form,
            epilogue=epilogue,
            activation=activation,
            blocks=self.blocks,
            ranks=common,
        )

    # ---- what every launch is told of a journey, and each kind of launch of its product

    def travelling(self, heap: Memory, journey: Journey) -> dict[str, int]:
        shape, device = heap.shape, heap.device
        if (journey.num_ranks, journey.send_WE.shape[1]) != (shape.num_ranks, shape.experts):
            raise ValueError(
                f"send of shape {tuple(journey.send_WE.shape)} must be {(shape.num_ranks, shape.experts)}: "
                "the heap's ranks and experts"
            )
        if journey.num_received > shape.rows:
            raise ValueError(
                f"num_received ({journey.num_received}) must be at most the heap's {shape.rows} rows"
            )
        sent = journey.slot_S.shape[0]
        if journey.num_tokens is not None:
            sent = min(sent, journey.num_tokens * journey.top_k)
        if sent > shape.home_rows:
            raise ValueError(
                f"rows that may be sent ({sent}) must be at most the heap's home_rows ({shape.home_rows})"
            )
        recv_WE = journey.recv_WE
        if recv_WE.stride(1) != 1:
            raise ValueError(f"recv of strides {recv_WE.stride()} must have a rank's counts side by side")
        for name in ("expert_TK", "position_TK", "slot_S", "send_WE", "recv_WE"):
            _like(name, getattr(journey, name), torch.int32, device)
        for name in ("expert_TK", "position_TK", "slot_S", "send_WE"):
            if not getattr(journey, name).is_contiguous():
                raise ValueError(f"{name} of strides {getattr(journey, name).stride()} must be contiguous")
        return {
            "send_counts": journey.send_WE.data_ptr(),
            "recv_counts": recv_WE.data_ptr(),
            "recv_stride": recv_WE.stride(0),
            "expert": journey.expert_TK.data_ptr(),
            "position": journey.position_TK.data_ptr(),
            "slot": journey.slot_S.data_ptr(),
            "first_row": journey.first_row,
            "top_k": journey.top_k,
            "computes": 1,
        }

    def sending(self, heap: Memory, journey: Journey, source_TM: Tensor, weight_TK: Tensor) -> dict[str, int]:
        """Rows of tokens leave, and arrive as A of the product."""
        shape = heap.shape
        _words(rows=source_TM)
        _like("rows", source_TM, shape.dtype, heap.device)
        _like("weight", weight_TK, torch.float32, heap.device)
        if not weight_TK.is_contiguous():
            raise ValueError(f"weight of strides {weight_TK.stride()} must be contiguous")
        wanted = (journey.expert_TK.shape[0], shape.d_model)
        if tuple(source_TM.shape) != wanted or weight_TK.shape != journey.expert_TK.shape:
            raise ValueError(
                f"rows of shape {tuple(source_TM.shape)} and weight of shape {tuple(weight_TK.shape)} must "
                f"be {wanted} and {tuple(journey.expert_TK.shape)}"
            )
        places = shape.places
        return {
            **self.travelling(heap, journey),
            "source": source_TM.data_ptr(),
            "source_stride": shape.row_bytes,
            "weight": weight_TK.data_ptr(),
            "a": heap.base + places["inbox"],
            "a_rows": max(shape.rows, 1),  # a heap without rows has an address, what is not kept has none
            "a_stride": shape.d_model,
            "row_weight": heap.base + places["weights"],
            "k": shape.d_model,
        }

    def returning(
        self,
        heap: Memory,
        journey: Journey,
        division: DivisionPoint,
        a: Tensor,
        result_TM: Tensor,
    ) -> dict[str, int]:
        """Products of A's rows are written where dispatched rows lay, summed, and sent to their tokens."""
        shape = heap.shape
        _words(rows=a, result=result_TM)
        _like("rows", a, shape.dtype, heap.device)
        whole = -(-shape.d_model // self.tile_columns) * self.tile_columns
        most = max(division.chunk_columns, -(-whole // MOST_CHUNKS))
        chunk = min(-(-most // self.tile_columns) * self.tile_columns, whole)
        return {
            **self.travelling(heap, journey),
            "a": a.data_ptr(),
            "a_rows": a.shape[0],
            "a_stride": a.shape[1],
            "rows": a.shape[0],
            "d": heap.base + shape.places["inbox"],
            "d_stride": shape.d_model,
            "n": shape.d_model,
            "k": a.shape[1],
            "columns": shape.d_model,
            "chunk_columns": chunk,
            "result": result_TM.data_ptr(),
            "result_stride": shape.row_bytes,
            "first_token": journey.first_token,
            "tokens": journey.expert_TK.shape[0] if journey.num_tokens is None else journey.num_tokens,
        }


def dispatch(ranks: Ranks, journeys: Sequence[Journey], x_TM: Tensor, weight_TK: Tensor) -> None:
    """See `Steps.dispatch`; x_TM and weight_TK: of all ranks here."""
    fields = []
    for heap, journey in zip(ranks.heaps, journeys, strict=True):
        fields.append({**ranks.sending(heap, journey, x_TM, weight_TK), "computes": 0})
    division = ranks.divide("dispatch", "forward")
    ranks.launch(_DISPATCH, _FORWARD, division, fields, epilogue=_HIDDEN, activation=ACTIVATIONS["relu"])


def dispatch_hidden(
    ranks: Ranks,
    journeys: Sequence[Journey],
    x_TM: Tensor,
    weight_TK: Tensor,
    w1: Sequence[Tensor],
    b1: Sequence[Tensor | None],
    *,
    activation: str,
    keep: bool,
) -> tuple[list[Tensor] | None, list[Tensor]]:
    """See `Steps.dispatch_hidden`; w1, b1 and the results: by rank here, x_TM and weight_TK of all."""
    fields, hidden, active = [], [], []
    for heap, journey, weight_EGM, bias in zip(ranks.heaps, journeys, w1, b1, strict=True):
        _, num_hidden, _ = _weight_like("w1", weight_EGM, bias, heap, columns=2)
        width = num_hidden // 2 if activation == "swiglu" else num_hidden
        active.append(x_TM.new_empty(journey.num_received, width))
        if keep:
            hidden.append(x_TM.new_empty(journey.num_received, num_hidden))
        fields.append(
            {
                **ranks.sending(heap, journey, x_TM, weight_TK),
                "b": weight_EGM.data_ptr(),
                "n": num_hidden,
                "rows": journey.num_received,
                "bias": _address(bias),
                "d": hidden[-1].data_ptr() if keep else 0,
                "d_stride": num_hidden,
                "active": active[-1].data_ptr(),
                "active_stride": width,
            }
        )
    division = ranks.divide("dispatch", "forward")
    ranks.launch(_DISPATCH, _FORWARD, division, fields, epilogue=_HIDDEN, activation=ACTIVATIONS[activation])
    return (hidden if keep else None), active


def product_combine(
    ranks: Ranks,
    journeys: Sequence[Journey],
    active: Sequence[Tensor],
    w2: Sequence[Tensor],
    b2: Sequence[Tensor | None],
) -> Tensor:
    """See `Steps.product_combine`; (T, M) of all ranks here."""
    fields = []
    result_TM = active[0].new_empty(journeys[0].expert_TK.shape[0], ranks.heaps[0].shape.d_model)
    division = ranks.divide("combine", "forward")
    for heap, journey, active_NH, weight_EMH, bias in zip(ranks.heaps, journeys, active, w2, b2, strict=True):
        _, _, width = _weight_like("w2", weight_EMH, bias, heap, columns=1)
        _check_width("active", active_NH, width, "w2")
        fields.append(
            {
                **ranks.returning(heap, journey, division, active_NH, result_TM),
                "b": weight_EMH.data_ptr(),
                "bias": _address(bias),
                "row_weight": heap.base + heap.shape.places["weights"],
            }
        )
    ranks.launch(_COMBINE, _FORWARD, division, fields)
    return result_TM


def dispatch_hidden_gradient(
    ranks: Ranks,
    journeys: Sequence[Journey],
    grad_TM: Tensor,
    weight_TK: Tensor,
    w2: Sequence[Tensor],
    b2: Sequence[Tensor | None],
    hidden: Sequence[Tensor],
    *,
    activation: str,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """See `Steps.dispatch_hidden_gradient`; by rank here but grad_TM and weight_TK."""
    fields, of_hidden, active, dots = [], [], [], []
    for heap, journey, weight_EMH, hidden_NG, bias in zip(ranks.heaps, journeys, w2, hidden, b2, strict=True):
        _, _, width = _weight_like("w2", weight_EMH, None, heap, columns=1)
        _words(hidden=hidden_NG)
        count, parts = hidden_NG.shape[0], ranks.row_dot_parts(width)
        of_hidden.append(torch.empty_like(hidden_NG))
        active.append(hidden_NG.new_empty(count, width))
        dots.append(hidden_NG.new_empty(parts + (bias is not None), count, dtype=torch.float32))
        fields.append(
            {
                **ranks.sending(heap, journey, grad_TM, weight_TK),
                "b": weight_EMH.data_ptr(),
                "n": width,
                "rows": count,
                "d": of_hidden[-1].data_ptr(),
                "d_stride": hidden_NG.shape[1],
                "hidden": hidden_NG.data_ptr(),
                "hidden_stride": hidden_NG.shape[1],
                "active": active[-1].data_ptr(),
                "active_stride": width,
                "made_dots": dots[-1].data_ptr(),
                "weighs_active": 1,
            }
        )
    division = ranks.divide("dispatch", "backward")
    kind = ACTIVATIONS[activation]
    ranks.launch(_DISPATCH, _INPUT, division, fields, epilogue=_HIDDEN_GRADIENT, activation=kind)
    for heap, journey, bias, dots_PN in zip(ranks.heaps, journeys, b2, dots, strict=True):
        if bias is not None:
            dots_PN[-1] = _dots_with_bias(heap.rows(dots_PN.shape[1]), bias, journey.ends_E)
    return of_hidden, active, dots


def _dots_with_bias(rows_NM: Tensor, bias_EM: Tensor, ends_E: Tensor) -> Tensor:
    """<row, bias of its expert>, (N,) float32. Rows beyond the last expert's get that one's."""
    by_expert_NE = rows_NM.float() @ bias_EM.float().t()
    row_N = torch.arange(rows_NM.shape[0], dtype=torch.int32, device=rows_NM.device)
    expert_N = torch.searchsorted(ends_E, row_N, right=True).clamp_(max=bias_EM.shape[0] - 1)
    return by_expert_NE.gather(1, expert_N.unsqueeze(1)).squeeze(1)


def gradient_combine(
    ranks: Ranks,
    journeys: Sequence[Journey],
    of_hidden: Sequence[Tensor],
    w1: Sequence[Tensor],
    dots: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """See `Steps.gradient_combine`; (T, M) and (T, K) of all ranks here."""
    fields = []
    num_tokens, top_k = journeys[0].expert_TK.shape
    result_TM = of_hidden[0].new_empty(num_tokens, ranks.heaps[0].shape.d_model)
    of_weight_TK = of_hidden[0].new_empty(num_tokens, top_k, dtype=torch.float32)
    division = ranks.divide("combine", "backward")
    for heap, journey, grad_NG, weight_EGM, dots_PN in zip(
        ranks.heaps, journeys, of_hidden, w1, dots, strict=True
    ):
        _, width, _ = _weight_like("w1", weight_EGM, None, heap, columns=2)
        _check_width("gradient of the hidden", grad_NG, width, "w1")
        fields.append(
            {
                **ranks.returning(heap, journey, division, grad_NG, result_TM),
                "b": weight_EGM.data_ptr(),
                "row_dots": dots_PN.data_ptr(),
                "dot_parts": dots_PN.shape[0],
                "dot_rows": dots_PN.shape[1],
                "weight_gradient": of_weight_TK.data_ptr(),
            }
        )
    ranks.launch(_COMBINE, _INPUT, division, fields)
    return result_TM, of_weight_TK


def _check_width(name: str, rows: Tensor, width: int, of: str) -> None:
    if rows.shape[1] != width:
        raise ValueError(f"{name} of {rows.shape[1]} columns must have {width}, as {of} has")


def _weight_like(
    name: str, weight: Tensor, bias: Tensor | None, heap: Memory, *, columns: int
) -> tuple[int, int, int]:
    """Its shape. columns: which of its dimensions is d_model."""
    shape = heap.shape
    _words(**{name: weight, "bias": bias})
    for each, tensor in ((name, weight), ("bias", bias)):
        if tensor is not None:
            _like(each, tensor, shape.dtype, heap.device)
    if weight.dim() != 3 or weight.shape[0] != shape.experts or weight.shape[columns] != shape.d_model:
        raise ValueError(
            f"{name} of shape {tuple(weight.shape)} must be of {shape.experts} experts and d_model "
            f"{shape.d_model}, as the heap is"
        )
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:2]):
        raise ValueError(f"bias of shape {tuple(bias.shape)} must be {tuple(weight.shape[:2])}")
    first, second, third = weight.shape
    return first, second, third


class KernelSteps:
    """`Steps` of one rank of this process, by the kernels.

    find_heap: the heap that serves this call now. Between forward and backward it may have been made anew,
    for larger batches; the rounds of the two need no memory in common.
    """

    def __init__(self, find_heap: Callable[[], Memory], divide: Divide) -> None:
        self._find_heap, self._divide = find_heap, divide
        self._made = Ranks([find_heap()], divide)

    @property
    def _heap(self) -> Memory:
        return self._ranks.heaps[0]

    @property
    def _ranks(self) -> Ranks:
        heap = self._find_heap()
        if heap is not self._made.heaps[0]:
            self._made = Ranks([heap], self._divide)
        return self._made

    def dispatch(self, journey: Journey, x_TM: Tensor, weight_TK: Tensor) -> None:
        dispatch(self._ranks, [journey], x_TM, _weights(weight_TK))

    def give_up(self, why: str) -> None:
        self._made.heaps[0].give_up(why)

    def rows(self, journey: Journey) -> Tensor:
        return self._heap.rows(journey.num_received)

    def row_weight(self, journey: Journey) -> Tensor:
        return self._heap.row_weight(journey.num_received)

    def dispatch_hidden(
        self,
        journey: Journey,
        x_TM: Tensor,
        weight_TK: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        *,
        activation: str,
        keep: bool,
    ) -> tuple[Tensor | None, Tensor]:
        hidden, active = dispatch_hidden(
            self._ranks, [journey], x_TM, _weights(weight_TK), [w1], [b1], activation=activation, keep=keep
        )
        return (None if hidden is None else hidden[0]), active[0]

    def product_combine(self, journey: Journey, active_NH: Tensor, w2: Tensor, b2: Tensor | None) -> Tensor:
        return product_combine(self._ranks, [journey], [active_NH], [w2], [b2])

    def dispatch_hidden_gradient(
        self,
        journey: Journey,
        grad_TM: Tensor,
        weight_TK: Tensor,
        w2: Tensor,
        b2: Tensor | None,
        hidden_NG: Tensor,
        *,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_hidden, active, dots = dispatch_hidden_gradient(
            self._ranks, [journey], grad_TM, _weights(weight_TK), [w2], [b2], [hidden_NG],
            activation=activation,
        )  # fmt: skip
        return of_hidden[0], active[0], dots[0]

    def gradient_combine(
        self, journey: Journey, grad_hidden_NG: Tensor, w1: Tensor, dots_PN: Tensor
    ) -> tuple[Tensor, Tensor]:
        return gradient_combine(self._ranks, [journey], [grad_hidden_NG], [w1], [dots_PN])


def _weights(weight_TK: Tensor) -> Tensor:
    return weight_TK.detach().to(torch.float32).contiguous()
