"""Each launch passes its kernel the address, size and stride of every operand. The extension is a recorder
here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import permutes
from pmoe.kernels import counts, extension, grouped_gemm, permute
from pmoe.kernels.grouped_gemm import RowSlots, launch, products
from pmoe.kernels.grouped_gemm.launch import NUM_COUNTERS, SPARE, BesideCommunication
from pmoe.kernels.permute import launches as permute_launches
from pmoe.kernels.route import operators as route_operators
from pmoe.kernels.route.launches import launch_route
from pmoe.kernels.route.reference import empty_routes

BF16, FLOAT, INT = torch.bfloat16, torch.float32, torch.int32


class Recorder:
    """An extension whose functions record their arguments. Addresses of tensors are recorded by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.names: dict[int, str] = {}
        self.held: list[Tensor] = []

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = BF16, gap: int = 0) -> Tensor:
        """Returns a tensor whose address is recorded under ``name``.

        gap: number of columns of memory between two rows that do not belong to the tensor.
        """
        made = torch.ones(*shape[:-1], shape[-1] + gap, dtype=dtype)[..., : shape[-1]]
        return self.named(name, made)

    def named(self, name: str, tensor: Tensor) -> Tensor:
        self.names[tensor.data_ptr()] = name
        self.held.append(tensor)
        return tensor

    def _told(self, value: Any) -> Any:
        return self.names.get(value, value) if isinstance(value, int) and value > 1 << 16 else value

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **fields: Any) -> None:
            told = {field: self._told(value) for field, value in fields.items()}
            self.calls.append((name, told or [self._told(value) for value in args]))

        return note

    def row_dot_parts(self, hopper: bool, columns: int, in_turns: bool = False) -> int:
        return 2

    def Moving(self, *args: Any) -> list[Any]:
        return [self._told(value) for value in args]

    RouteProblem = Moving

    def route_workspace_bytes(self, problem: list[Any]) -> int:
        return 36


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(extension, "load", lambda: found)
    monkeypatch.setattr(products, "path_for", lambda device, dtype, **columns: "sm_90a")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return found


# ---- grouped products: M = 64 columns, O = 128, two experts, five tokens in ten slots

COMMON = {
    "device": None,
    "stream": 7,
    "hopper": True,
    "element": 0,
    "ends": "ends",
    "experts": 2,
    "slot": "slot",
    "top_k": 2,
    "sharing": 0,
    "storing": 0,
}
IN_PLACE = {"slot": 0, "top_k": 1}


class Operands:
    def __init__(self, recorder: Recorder) -> None:
        self.x = recorder.tensor("x", 5, 64, gap=8)
        self.rows = recorder.tensor("rows", 10, 64)
        self.grad = recorder.tensor("grad", 10, 128)
        self.weight = recorder.tensor("weight", 2, 128, 64)
        self.bias = recorder.tensor("bias", 2, 128)
        self.scale = recorder.tensor("scale", 10, dtype=FLOAT)
        self.ends = recorder.tensor("ends", 2, dtype=INT)
        self.slots = RowSlots(slot_N=recorder.named("slot", torch.arange(10, dtype=INT)), top_k=2)
        self.out = recorder.tensor("out", 10, 128, gap=16)


@pytest.fixture
def given(recorder: Recorder) -> Operands:
    return Operands(recorder)


def test_a_product_of_gathered_rows(recorder: Recorder, given: Operands) -> None:
    found = grouped_gemm.product(
        given.x, given.weight, given.ends, bias_EO=given.bias, scale=given.scale, slots=given.slots,
        gathered=True, out=given.out,
    )  # fmt: skip
    assert found is given.out
    fields = {
        **{"form": 0, "epilogue": 0, "a": "x", "a_stride": 72, "a_rows": 5, "a_gathered": True},
        **{"b": "weight", "d": "out", "d_stride": 144, "rows": 10, "n": 128, "k": 64},
        **{"bias": "bias", "weight": "scale"},
    }
    assert recorder.calls == [("grouped_gemm", COMMON | fields)]


def test_beside_communication_multiprocessors_are_left_free_and_tiles_are_counted(
    recorder: Recorder, given: Operands, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **how: recorder.named("zero", zeros(*size, **how)))
    with BesideCommunication():
        grouped_gemm.product(given.rows, given.weight, given.ends)
    grouped_gemm.product(given.rows, given.weight, given.ends)
    (_, beside), (_, alone) = recorder.calls
    assert (beside["spare"], beside["next_tile"]) == (SPARE, "zero") and SPARE > 0
    assert "spare" not in alone and "next_tile" not in alone


def test_each_product_of_a_pass_has_a_counter_of_its_own_and_few_launches_zero_them(
    recorder: Recorder, given: Operands, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory: list[Tensor] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **how: memory.append(zeros(*size, **how)) or memory[-1])
    with BesideCommunication():
        for _ in range(NUM_COUNTERS + 1):
            grouped_gemm.product(given.rows, given.weight, given.ends)
    addresses = [fields["next_tile"] for _, fields in recorder.calls]
    assert addresses == [one.data_ptr() for counter in memory for one in counter][: len(addresses)]
    assert len(memory) == 2 and all(not each.any() for each in memory)


def test_counters_that_a_kernel_has_zeroed_are_taken_first(recorder: Recorder, given: Operands) -> None:
    zeros = torch.zeros(NUM_COUNTERS, dtype=torch.int32)
    zeroed = launch.zeroed_of_thread.set(launch.TileCounters(zeros))
    try:
        for _ in range(2):  # two passes of one plan: no counter serves twice
            with BesideCommunication():
                grouped_gemm.product(given.rows, given.weight, given.ends)
    finally:
        launch.zeroed_of_thread.reset(zeroed)
    addresses = [fields["next_tile"] for _, fields in recorder.calls]
    assert addresses == [zeros[0].data_ptr(), zeros[1].data_ptr()]


@pytest.mark.parametrize("keep", [True, False])
def test_the_hidden_with_its_activation(recorder: Recorder, given: Operands, keep: bool) -> None:
    active = recorder.tensor("active", 10, 64)
    hidden, _ = grouped_gemm.hidden(
        given.rows, given.weight, given.ends, activation="swiglu", out=given.out, active=active, keep=keep
    )
    assert hidden is (given.out if keep else None)
    fields = {
        **{"form": 0, "epilogue": 1, "activation": 4, "a": "rows", "a_stride": 64, "a_rows": 10},
        **{"a_gathered": False, "b": "weight", "d": "out" if keep else 0, "d_stride": 144 if keep else 0},
        **{"active": "active", "active_stride": 64, "rows": 10, "n": 128, "k": 64, "bias": 0},
    }
    assert recorder.calls == [("grouped_gemm", COMMON | IN_PLACE | fields)]


@pytest.mark.parametrize("forced", [None, True, False])
def test_the_hidden_of_a_wide_product_permutes_first(
    recorder: Recorder, given: Operands, forced: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of 128 columns is narrow, so the rule gathers: only the forced way permutes."""
    monkeypatch.setattr(launch, "GATHERING", forced)
    permuted = []

    def permute(x: Tensor, position: Tensor, num_rows: int) -> Tensor:
        permuted.append((x, position, num_rows))
        return given.rows

    monkeypatch.setattr(products, "permute", permute)
    position = torch.arange(10, dtype=INT).view(5, 2)
    slots = given.slots._replace(position_TK=position)
    grouped_gemm.hidden(given.x, given.weight, given.ends, activation="swiglu", slots=slots)
    [(_, told)] = recorder.calls
    fields = ("a", "a_rows", "a_gathered", "slot", "top_k")
    if forced is False:
        assert permuted == [(given.x, position, 10)]
        assert [told[name] for name in fields] == ["rows", 10, False, 0, 1]
    else:
        assert permuted == []
        assert [told[name] for name in fields] == ["x", 5, True, "slot", 2]


@pytest.mark.parametrize(("num_hidden", "gathers"), [(3136, True), (3168, False)])
def test_the_rule_of_the_hidden_counts_its_columns(
    num_hidden: int, gathers: bool, recorder: Recorder, given: Operands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "permute", lambda x, position, num_rows: given.rows)
    slots = given.slots._replace(position_TK=torch.arange(10, dtype=INT).view(5, 2))
    weight = torch.zeros(2, num_hidden, 64, dtype=BF16)
    grouped_gemm.hidden(given.x, weight, given.ends, activation="swiglu", slots=slots)
    assert recorder.calls[0][1]["a_gathered"] is gathers


def test_a_weight_gradient_of_gathered_rows(recorder: Recorder, given: Operands) -> None:
    out = recorder.tensor("of weight", 2, 128, 64)
    grouped_gemm.weight_gradient(given.grad, given.x, given.ends, slots=given.slots, out=out)
    fields = {
        **{"form": 2, "epilogue": 0, "a": "grad", "a_stride": 128, "a_rows": 10},
        **{"b": "x", "b_stride": 72, "b_rows": 5, "b_gathered": True, "rows": 10, "m": 128, "n": 64},
        **{"d": "of weight", "d_stride": 64, "wide": False, "accumulates": False},
    }
    assert recorder.calls == [("grouped_gemm", COMMON | fields)]


@pytest.mark.parametrize(
    ("storing", "columns", "top_k", "gathers"),
    [
        (launch.ALONE, 8, 8, False),
        (launch.IN_TURNS, 8, 8, False),
        (launch.FASTEST, 1232, 8, True),
        (launch.FASTEST, 1240, 8, False),
        (launch.AS_BOXES, 2200, 1, True),
        (launch.AS_BOXES, 2208, 1, False),
    ],
)
def test_the_rule_of_a_first_weights_gradient_counts_its_columns(
    monkeypatch: pytest.MonkeyPatch, storing: int, columns: int, top_k: int, gathers: bool
) -> None:
    monkeypatch.setattr(launch, "STORING", storing)
    monkeypatch.setattr(launch, "path_for", lambda device, dtype: "sm_90a")
    assert launch.gathers_for_weights(torch.device("cuda"), BF16, columns, top_k) is gathers
    monkeypatch.setattr(launch, "path_for", lambda device, dtype: "sm_80")
    assert not launch.gathers_for_weights(torch.device("cuda"), BF16, columns, top_k)


def test_kernels_whose_blocks_share_rows_of_b_do_not_gather_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would refuse the launch."""
    monkeypatch.setattr(launch, "STORING", launch.FASTEST)
    monkeypatch.setattr(launch, "path_for", lambda device, dtype: "sm_90a")
    for sharing in (0, 1, 2, 3):
        monkeypatch.setattr(launch, "SHARING", sharing)
        gathers = launch.gathers_for_weights(torch.device("cuda"), BF16, 64, 8)
        assert gathers is (sharing != launch.SHARES_WEIGHTS)


def test_the_gradient_of_rows(recorder: Recorder, given: Operands) -> None:
    out = recorder.tensor("of rows", 10, 64)
    grouped_gemm.input_gradient(given.grad, given.weight, given.ends, out=out)
    fields = {
        **{"form": 1, "epilogue": 0, "a": "grad", "a_stride": 128, "a_rows": 10, "a_gathered": False},
        **{"b": "weight", "d": "of rows", "d_stride": 64, "rows": 10, "n": 64, "k": 128, "bias": 0},
        "weight": 0,
    }
    assert recorder.calls == [("grouped_gemm", COMMON | IN_PLACE | fields)]


def test_the_gradient_of_the_hidden(recorder: Recorder, given: Operands) -> None:
    hidden, active = recorder.tensor("hidden", 10, 64), recorder.tensor("active", 10, 64, gap=64)
    out, _, dots = grouped_gemm.hidden_gradient(
        given.grad, given.weight, hidden, given.scale, given.ends, activation="gelu",
        weighs_active=True, out=hidden, active=active,
    )  # fmt: skip
    assert out is hidden and dots.shape == (10,)
    [(name, told)] = recorder.calls
    assert isinstance(told.pop("row_dots"), int)
    fields = {
        **{"form": 1, "epilogue": 2, "activation": 2, "a": "grad", "a_stride": 128, "a_rows": 10},
        **{"b": "weight", "d": "hidden", "d_stride": 64, "active": "active"},
        **{"active_stride": 128, "hidden": "hidden", "hidden_stride": 64, "rows": 10, "n": 64, "k": 128},
        **{"weight": "scale", "weighs_active": True},
    }
    assert (name, told) == ("grouped_gemm", COMMON | IN_PLACE | fields)


@pytest.mark.parametrize("accumulate", [True, False])
def test_the_gradient_of_weights(recorder: Recorder, given: Operands, accumulate: bool) -> None:
    out = recorder.tensor("sum", 2, 128, 64, dtype=FLOAT if accumulate else BF16)
    grouped_gemm.weight_gradient(given.grad, given.rows, given.ends, out=out, accumulate=accumulate)
    fields = {
        **{"form": 2, "epilogue": 0, "a": "grad", "a_stride": 128, "a_rows": 10},
        **{"b": "rows", "b_stride": 64, "b_rows": 10, "d": "sum", "d_stride": 64},
        **{"rows": 10, "m": 128, "n": 64, "wide": accumulate, "accumulates": accumulate},
    }
    assert recorder.calls == [("grouped_gemm", COMMON | IN_PLACE | fields)]


def test_without_rows_only_the_gradient_of_weights_is_launched(recorder: Recorder, given: Operands) -> None:
    none, none_out = given.rows[:0], given.grad[:0]
    grouped_gemm.product(none, given.weight, given.ends)
    grouped_gemm.hidden(none, given.weight, given.ends, activation="relu")
    grouped_gemm.input_gradient(none_out, given.weight, given.ends)
    assert recorder.calls == []
    grouped_gemm.weight_gradient(none_out, none, given.ends)
    assert [name for name, _ in recorder.calls] == ["grouped_gemm"]


# ---- permutes: T = 3, K = 2, M = 16 float32 columns


def test_permutes(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows = recorder.tensor("x", 3, 16, dtype=FLOAT, gap=4), recorder.tensor("rows", 5, 16, dtype=FLOAT)
    d_x, d_rows = recorder.tensor("d_x", 3, 16, dtype=FLOAT), recorder.tensor("d_rows", 5, 16, dtype=FLOAT)
    position = recorder.tensor("position", 3, 2, dtype=INT)
    weight, d_weight = (recorder.tensor(name, 3, 2, dtype=FLOAT) for name in ("weight", "d_weight"))
    permutes.launch_permute(x, position, None, rows)
    permutes.launch_unpermute(rows, position, weight, x)
    monkeypatch.setattr(permute_launches, "PARTS", 2)
    permutes.launch_permute_backward(d_rows, x, position, weight, d_x, d_weight)
    permutes.launch_unpermute_backward(x, rows, position, weight, d_rows, d_weight)
    moving = [None, 7, 0, 3, 2, 5, 64, "position"]
    assert recorder.calls == [
        ("permute", [[*moving, 0, 0], "x", 80, "rows", 64]),
        ("unpermute", [[*moving, "weight", 0], "rows", 64, "x", 80]),
        ("permute_backward", [[*moving, "weight", 2], "x", 80, "d_rows", 64, "d_x", 64, "d_weight"]),
        ("unpermute_backward", [[*moving, "weight", 2], "x", 80, "rows", 64, "d_rows", 64, "d_weight"]),
    ]


def test_rows_that_are_a_part_of_the_sorted_rows_are_addressed_from_before_their_memory(
    recorder: Recorder,
) -> None:
    """A kernel adds position * stride to the address. The first position of these rows is 7."""
    x, rows = recorder.tensor("x", 3, 16, dtype=FLOAT), recorder.tensor("rows", 5, 16, dtype=FLOAT)
    position = recorder.tensor("position", 3, 2, dtype=INT)
    moves = permute.RowMoves(x)
    moves.place(x, position, 7, rows)
    moves.sum(rows, position, 7, x)
    second_x, second = (
        recorder.tensor("second x", 3, 16, dtype=FLOAT),
        recorder.tensor("s", 5, 16, dtype=FLOAT),
    )
    moves.place_several(
        [permute.RowCopy(x, position, 7, rows), permute.RowCopy(second_x, position, 7, second)]
    )
    moves.place_several([permute.RowCopy(x, position, 7, rows), permute.RowCopy(x[:0], position, 7, second)])
    before = rows.data_ptr() - 7 * 64
    moving = [None, 7, 0, 3, 2, 5, 64, "position", 0, 0, 7]
    several = [
        (moving, x.data_ptr(), 64, before, 64),
        (moving, second_x.data_ptr(), 64, second.data_ptr() - 7 * 64, 64),
    ]
    assert recorder.calls == [
        ("permute", [moving, "x", 64, before, 64]),
        ("unpermute", [moving, before, 64, "x", 64]),
        ("permute_several", [several]),
        ("permute", [moving, "x", 64, before, 64]),  # the other copy has no tokens
    ]


def test_where_nothing_moves_sums_are_zero_without_a_launch(recorder: Recorder) -> None:
    position, y = torch.zeros(3, 0, dtype=INT), torch.ones(3, 16)
    permutes.launch_unpermute(torch.ones(0, 16), position, None, y)
    assert recorder.calls == [] and not y.any()


# ---- routes: T = 5, E = 4, K = 2, n = 3


def test_routes(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_operators, "_runs_kernel", lambda *sizes: True)
    logits = recorder.tensor("logits", 5, 4, dtype=FLOAT)
    head = counts.Heading(num_ranks=2, num_degrees=1, header=(5, 0, 8, 9))
    routes = empty_routes(logits, 2, 3, head)
    sent_WL, _ = counts.Messages.new(routes.counts_nE, 2, 1, routes.messages).both
    for name, each in routes._replace(messages=sent_WL)._asdict().items():
        recorder.named(name, each)
    launch_route(logits, routes, normalize=True, z_loss_weight=0.5, not_finite=4, heading=head)
    saved = (logits, routes.expert_TK, routes.weight_TK, routes.counts_nE)
    route_backward = route_operators.route_backward
    of_aux = route_backward(*saved, normalize=False, grad_l_aux=routes.l_aux)
    of_weights = route_backward(
        *saved, normalize=False, grad_weight_TK=recorder.tensor("d w", 5, 2, dtype=FLOAT)
    )
    places = ["weight_TK", "expert_TK", "position_TK", "slot_N", "counts_nE", "ends_nE", "fault", "messages"]
    call, (problem, *given) = recorder.calls[0]
    assert call == "route" and problem == [0, 7, 5, 4, 2, 3, True, 0.5, 1, 0, 0]
    assert given[:10] == ["logits", *places, "l_aux"]  # given[10]: the workspace's address
    assert given[11:] == [36, 4, 2, (5, 0, 8, 9)]
    backward = [[0, 7, 5, 4, 2, 3, False, 0.0], "logits", "expert_TK", "weight_TK", "counts_nE"]
    assert recorder.calls[1:] == [
        ("route_backward", [*backward, 0, 0, 0, 0, "l_aux", of_aux.data_ptr()]),
        ("route_backward", [*backward, "d w", 0, 0, 0, 0, of_weights.data_ptr()]),
    ]


# ---- row counts: W = 2 ranks, F = 3 bins, E = 2 experts of a rank


def test_row_counts(recorder: Recorder) -> None:
    counts_FE = recorder.tensor("counts", 3, 4, dtype=INT)
    messages = counts.Messages.new(counts_FE, num_ranks=2, num_degrees=1)
    fault = recorder.named("fault", torch.tensor(2))
    sent_WL, received_WL = messages.both
    assert sent_WL.shape == received_WL.shape == (2, 4 + 3 * 2) and messages.agreed.shape == (4 + 3 + 1,)
    for name, tensor in (("agreed", messages.agreed), ("sent", sent_WL), ("received", received_WL)):
        recorder.named(name, tensor)
    header = [1, 0, 3, 4]
    for told in (fault, None):
        messages.pack(header, told, counts_FE)
    messages.agree(
        received_WL, own_rank=1, host_rows=None, asks_rows=True, irregular=False, limits=[(3, 0.5)]
    )
    slot = recorder.tensor("slot", 4, dtype=INT)
    weight = recorder.tensor("weight", 6, dtype=FLOAT)
    order = messages.order(1, 3, 1, 1, 5, counts.Sent(slot, weight), 7)
    of_wide = messages.order(3, 3, None, 0, None, counts.Sent(slot, weight.double()))
    without = messages.order(3, 3, None, 0, None, None)
    where = {"device": None, "stream": 7, "sizes": [2, 3, 2]}
    asked = {"own_rank": 1, "host_rows": -1, "asks_rows": True, "irregular": False, "degrees": [(3, 0.5)]}
    packed = where | {"header": header, "counts": "counts", "sent": "sent"}
    assert recorder.calls[:3] == [
        ("counts_pack", packed | {"fault": "fault"}),
        ("counts_pack", packed),
        ("counts_agree", where | {"received": "received", "agreed": "agreed", **asked}),
    ]
    written = {
        "of_chunks": (order.of_chunks, (5,), INT),
        "of_all": (order.of_all, (5,), torch.int64),
        "number_slot": (order.number_slot, (4,), torch.int64),
        "number_weight": (order.number_weight, (4,), FLOAT),
        "ends": (order.ends, (2, 2), INT),
        "zeros": (order.zeros, (7,), INT),
    }
    addresses = {}
    for name, (tensor, shape, dtype) in written.items():
        assert tensor is not None and (tensor.shape, tensor.dtype) == (shape, dtype)
        addresses[name] = tensor.data_ptr()
    messages_of = where | {"received": "received", "sent": "sent", "joined": 1}
    ordered = messages_of | {"chunks": 1, "own_rank": 1, "pieces": 1, "num_zeros": 7}
    assert recorder.calls[3] == ("counts_order", ordered | {"slot": "slot", "weight": "weight"} | addresses)
    of_slots = recorder.calls[4][1]
    of_nothing = recorder.calls[5][1]
    assert of_wide.number_slot is not None and of_wide.number_weight is None and "weight" not in of_slots
    assert without.number_slot is None and "slot" not in of_nothing and "of_chunks" not in of_nothing


def test_a_single_rank_reads_the_messages_that_it_would_send(recorder: Recorder) -> None:
    messages = counts.Messages.new(torch.zeros(3, 4, dtype=INT), num_ranks=1, num_degrees=0)
    messages.order(3, 3, 0, 3, None, None)
    ((_, fields),) = recorder.calls
    assert fields["received"] == fields["sent"] == messages.both[0].data_ptr()
