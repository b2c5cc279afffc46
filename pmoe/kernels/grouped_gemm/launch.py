"""Launches a grouped product with the kernels of cuda/grouped_gemm, on devices that have them."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from pmoe.kernels import extension
from pmoe.kernels.extension import path
from pmoe.kernels.gemm import ELEMENTS, HIDDEN_GRADIENT, INPUT, PLAIN, SPARE, layout_problem
from pmoe.kernels.grouped_gemm.checks import RowSlots
from pmoe.warn import warn_of_fallback

SHARING = 0
"""Setting for benchmarks: which operand two neighbouring thread blocks on Hopper load only once.

Two blocks form a cluster, which can load one of the operands once for both. 0 lets the kernel's host code
choose (cuda/grouped_gemm/sharing.h), 1 shares no operand, 2 the weights (B), 3 the rows (A): `Sharing` of
cuda/grouped_gemm/launch.h.
"""

SHARES_WEIGHTS = 2
"""The value of `SHARING` with which two thread blocks share rows of B."""

ALONE = 0
FASTEST = 1
IN_TURNS = 2
AS_BOXES = 3

STORING = ALONE
"""Setting for benchmarks: when products on Hopper store their tiles.

ALONE: nothing is multiplied while a tile is stored.
FASTEST: in the way that is predicted to be the fastest, where there is a kernel.
IN_TURNS: one of two warpgroups of a thread block stores its tile while the other multiplies the next tile.
    Where there is no kernel, alone.
AS_BOXES: both warpgroups multiply the same tile. The tensor memory accelerator stores it from shared memory
    while they multiply the next tile. Where there is no kernel, alone.

These are the values of `Storing` of cuda/grouped_gemm/storing.h, which also has a table of the kernels.
Other values raise ValueError at the next product. The default is ALONE because the other kernels have not run
on a GPU; tests run them in an emulator, and docs/numbers.md predicts their times.
"""

GATHERING: bool | None = None
"""Setting for benchmarks: whether an expert's first product gathers its rows from tokens while it loads them.

If False, rows are first copied into their order. None lets `gathers_in_load` choose.
"""

PERMUTED_COLUMNS = 2100
"""If a first product has more columns than this, rows are copied into order and not gathered, on Hopper.

The number is for tokens with very many choices K; `gathers_in_load` multiplies it by (1 + 1 / K). Gathering
rows while they are loaded lengthens each step of each tile by 8 %, so its cost grows with the columns of the
product. Copying (a permute) costs the same for any number of columns: it reads each token once and writes
its K rows. By the stored times of an H200 (bench_grouped_gemm, bench_permute) the two are equal at 2100 (1 +
1 / K) columns. With K = 4 choices that is 2625 columns, or 1312 hidden columns of SwiGLU.
"""


WEIGHT_COLUMNS = 1100
"""A first weight's gradient gathers tokens if H (2H for SwiGLU) <= WEIGHT_COLUMNS * (1 + 1 / K).

H is d_hidden, and K the number of choices of a token. `gathers_for_weights` is the rule. The number is
predicted, not measured: gathering 256 columns of tokens is taken to lengthen a step of a tile by twice what
gathering 128 rows was measured to do, 2 x 0.066 us of 0.68. Copying the tokens (a permute) costs the same for
any number of columns. The two are then equal at 1100 (1 + 1 / K) columns: with K = 8 choices at 1237, or 618
hidden columns of SwiGLU.
"""


def gathers_for_weights(device: torch.device, dtype: torch.dtype, hidden_columns: int, top_k: int) -> bool:
    """Returns whether the gradient of a first weight should gather its rows from tokens.

    If not, the tokens must be copied into sorted rows first (`pmoe.kernels.permute`).

    device, dtype: of the tokens.
    hidden_columns: H, or 2H for SwiGLU. H is d_hidden.
    top_k: K, number of choices of a token.

    Only kernels that store boxes gather, so the result is False unless `STORING` is FASTEST or AS_BOXES. They
    cannot share the rows that they gather, so the result is False if `SHARING` is SHARES_WEIGHTS, too. Else
    they gather if hidden_columns <= `WEIGHT_COLUMNS` * (1 + 1 / K).

    Example: 2 * 256 columns of SwiGLU, K = 8 -> True; 2 * 1024 columns -> False.
    """
    if STORING not in (FASTEST, AS_BOXES) or SHARING == SHARES_WEIGHTS:
        return False
    return path_for(device, dtype) == "sm_90a" and hidden_columns <= WEIGHT_COLUMNS * (1 + 1 / top_k)


def gathers_in_load(kernels: str, columns: int, top_k: int) -> bool:
    """Returns whether a first product should gather its rows from tokens, instead of reading copied rows.

    kernels: name of the kernel code, "sm_90a" or "sm_80". The code for sm_80 always gathers, because it loads
        all rows by the same instructions, gathered or not.
    columns: number of columns of the product's result: H = d_hidden, or 2H for SwiGLU.
    top_k: K, number of choices of a token.

    The code for sm_90a gathers if columns <= `PERMUTED_COLUMNS` * (1 + 1 / K): then gathering costs less time
    than copying the tokens first.

    Example: 2 * 2048 columns of SwiGLU, K = 4 -> False, because 4096 > 2100 * (1 + 1 / 4).
    """
    if GATHERING is not None:
        return GATHERING
    return kernels != "sm_90a" or columns <= PERMUTED_COLUMNS * (1 + 1 / top_k)


class TileCounters:
    """Counters from which thread blocks take the next tile of their product: one counter for each product.

    A counter must be zero before its product. One launch sets `NUM_COUNTERS` counters to zero, so a pass of a
    layer seldom needs a second launch that zeroes counters. All products that take a counter must run on the
    stream that was current when the first counter was taken.

    zeros: (`NUM_COUNTERS`,) int32, counters that are zero already, and are returned first; None if there are
        none.
    addresses: an iterator over the counters that are still free; when it is exhausted, `take` makes new
        counters.
    """

    addresses: Iterator[int]

    def __init__(self, zeros: Tensor | None = None) -> None:
        self._memory: list[Tensor] = []
        self.addresses = iter(())
        if zeros is not None:
            self._memory.append(zeros)
            self.addresses = _addresses(zeros)

    def take(self, device: torch.device) -> int:
        """Returns the address of a counter on ``device`` that is zero, and that was not returned before.

        This object owns the counter's memory, so it must live until the product has been launched.
        """
        address = next(self.addresses, 0)
        if not address:
            self._memory.append(torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device))
            self.addresses = _addresses(self._memory[-1])
            address = next(self.addresses)
        return address


def _addresses(counters: Tensor) -> Iterator[int]:
    """Returns the addresses of the elements of a tensor (`NUM_COUNTERS`,), one after the other."""
    first = counters.data_ptr()
    return iter(range(first, first + counters.nbytes, counters.element_size()))


NUM_COUNTERS = 128
"""The number of counters that `TileCounters` sets to zero at a time."""

spare_of_thread: ContextVar[int] = ContextVar(
    "multiprocessors that products leave free in this thread", default=0
)
counters_of_thread: ContextVar[TileCounters | None] = ContextVar(
    "counters of this thread's products", default=None
)
zeroed_of_thread: ContextVar[TileCounters | None] = ContextVar(
    "counters that `BesideCommunication` gives to this thread's products, if a kernel has zeroed them",
    default=None,
)


class BesideCommunication:
    """A context in which products leave multiprocessors free for communication kernels.

    Inside the with-block, each thread block of a product takes its next tile from a shared counter. If a
    communication kernel occupies a multiprocessor, the product's thread block for that multiprocessor starts
    late. That thread block then takes fewer tiles, and does not delay the product.

    It is a class, because generators take longer to enter.

    spare: number of multiprocessors to leave free.
    """

    def __init__(self, spare: int = SPARE) -> None:
        self._spare = spare

    def __enter__(self) -> None:
        self._spare_before = spare_of_thread.set(self._spare)
        self._counters_before = counters_of_thread.set(zeroed_of_thread.get() or TileCounters())

    def __exit__(self, *error: object) -> None:
        spare_of_thread.reset(self._spare_before)
        counters_of_thread.reset(self._counters_before)


def path_for(device: torch.device, dtype: torch.dtype, **columns: int) -> str | None:
    """Returns the name of the kernel code that a device runs, "sm_90a" or "sm_80"; None if it runs none.

    If the result is None, for example on the CPU, the caller computes the product with PyTorch expressions.
    If a CUDA device cannot run the kernels, this function warns once.

    columns: sizes that must be multiples of 8, by name.

    Raises ValueError if the device can run the kernels, but they do not take this dtype or these sizes.
    """
    if device.type != "cuda":
        return None
    code, why = path(device)
    if code is None:
        assert why is not None
        warn_of_fallback("grouped products are computed", why)
        return None
    why = layout_problem(dtype, **columns)
    if why is not None:
        raise ValueError(f"grouped product: {why}")
    return code


def launch(
    kernels: str,
    form: int,
    like: Tensor,
    ends: Tensor,
    slots: RowSlots | None,
    epilogue: int = PLAIN,
    **fields: Any,
) -> None:
    """Launches a grouped product on the current stream.

    kernels: name of the kernel code to launch, "sm_90a" or "sm_80": the result of `path_for`.
    form: the kind of product: FORWARD, INPUT or WEIGHT of `pmoe.kernels.gemm`.
    like: a tensor with the operands' dtype and device.
    ends: (E,), for each of E experts the index behind its last row.
    slots: for each row, the index of its (token, choice) pair, if rows are gathered from tokens or routing
        weights are indexed by pair; else None.
    epilogue: the operation that follows the product: PLAIN, HIDDEN or HIDDEN_GRADIENT of `pmoe.kernels.gemm`.
    fields: the other arguments, by their names in cuda/grouped_gemm/bind.cpp.
    """
    if slots is not None:
        fields |= {"slot": slots.slot_N.data_ptr(), "top_k": slots.top_k}
    start(
        like.device,
        fields_for_all(kernels, form, like, epilogue)
        | {"ends": ends.data_ptr(), "experts": ends.numel(), **fields},
    )


def fields_for_all(kernels: str, form: int, like: Tensor, epilogue: int = PLAIN) -> dict[str, Any]:
    """Returns the arguments of a launch that do not depend on the rows, for the current stream.

    The result can be used for several launches, if this function would get the same arguments for each.

    kernels: name of the kernel code, "sm_90a" or "sm_80".
    form: the kind of product: FORWARD, INPUT or WEIGHT of `pmoe.kernels.gemm`.
    like: a tensor with the operands' dtype and device.
    epilogue: the operation that follows the product: PLAIN, HIDDEN or HIDDEN_GRADIENT of `pmoe.kernels.gemm`.
    """
    return {
        "device": like.device.index,
        "stream": torch.cuda.current_stream(like.device).cuda_stream,
        "hopper": kernels == "sm_90a",
        "element": ELEMENTS[like.dtype],
        "form": form,
        "epilogue": epilogue,
        "slot": 0,
        "top_k": 1,
        "sharing": SHARING,
        "storing": STORING,
    }


def num_row_dots(kernels: str, width: int, model: int, activation: int) -> int:
    """Returns the number of partial sums in which a kernel stores the inner product of each row.

    The kernel computes the gradient of the hidden activation (T_M). Its inner products are the gradients of
    the routing weights.

    kernels: name of the kernel code, "sm_90a" or "sm_80".
    width: H, number of columns of the activation after the nonlinearity. An inner product sums over them.
    model: M = d_model, number of columns of the gradient that the kernel multiplies.
    activation: number of the nonlinearity (`pmoe.kernels.gemm.ACTIVATIONS`).
    """
    module = extension.module()
    in_turns: bool = STORING != ALONE and module.grouped_gemm_takes_turns(
        form=INPUT, epilogue=HIDDEN_GRADIENT, activation=activation, k=model, storing=STORING
    )
    parts: int = module.row_dot_parts(kernels == "sm_90a", width, in_turns)
    return parts


def start(device: torch.device, fields: dict[str, Any]) -> None:
    """Launches the kernel of a grouped product. The arguments must have been checked.

    Inside ``with BesideCommunication():`` the function adds two arguments: the number of multiprocessors to
    leave free, and a new counter from which the kernel's thread blocks take their tiles.

    device: the device.
    fields: the arguments, by their names in cuda/grouped_gemm/bind.cpp. May be changed.
    """
    if spare := spare_of_thread.get():
        counters = counters_of_thread.get()
        assert counters is not None
        fields["spare"] = spare
        fields["next_tile"] = counters.take(device)
    extension.module().grouped_gemm(**fields)
