"""Forms in which rows are sent: bytes of messages, buffers, rounded values, predicted bytes and seconds.

tests/gloo/test_wire.py has the layers that send rows so.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pmoe.choose.solve import layer_costs
from pmoe.comm.wire import pack_rows, unpack_rows
from pmoe.planner.cost_model import lane_seconds, workload
from pmoe.planner.costs import LineCost
from pmoe.planner.degree import Choice
from pmoe.planner.layer_seconds import even_task_costs, simulated_step, step_seconds
from pmoe.planner.layer_sizes import sizes_from_options
from pmoe.planner.priced_choices import bound
from pmoe.planner.profile import Profile
from pmoe.planner.simulator import makespan
from pmoe.schedule.buffer_sizes import ChunkRows, HiddenColumns
from pmoe.schedule.restore import KEEP, STRATEGIES
from pmoe.schedule.tasks import Kind
from pmoe.schedule.wire import MessageSizes, Wires, message_bytes
from tests.gloo.flexible import lines
from tests.unit.test_cost_model import ALONE, Rates

S4 = STRATEGIES["S4"]
PROFILE = Rates(compute=1e12, communicate=1e9, copy=1e10).profile(ALONE, 4)


# ---- messages


@pytest.mark.parametrize(
    "wire, d_model, element_size, num_bytes",
    [
        (None, 130, 2, 260),
        ("e4m3", 128, 2, 132),
        ("e4m3", 1024, 2, 1056),
        ("e4m3", 130, 4, 132 + 8),
        ("e4m3", 1, 2, 4 + 4),
        ("bfloat16", 128, 4, 256),
        ("bfloat16", 3, 4, 8),
    ],
)
def test_a_message_has_these_bytes(wire: str | None, d_model: int, element_size: int, num_bytes: int) -> None:
    assert message_bytes(wire, d_model, element_size) == num_bytes


def sent(rows: Tensor, wire: str = "e4m3", index: Tensor | None = None) -> Tensor:
    """What arrives of rows."""
    message = torch.full(
        (rows.shape[0], message_bytes(wire, rows.shape[1], rows.element_size())), 255, dtype=torch.uint8
    )
    pack_rows(wire, rows.clone(), message)
    out = torch.empty(rows.shape[0] if index is None else index.shape[0], rows.shape[1], dtype=rows.dtype)
    unpack_rows(wire, message, index, out)
    return out


def test_a_message_of_two_blocks_written_out() -> None:
    """The largest value of a block becomes 448 of e4m3, 0x7e; halves of it lie one exponent lower, 0x76."""
    row = torch.zeros(1, 130)
    row[0, :3] = torch.tensor([7.0, -3.5, 1.75])
    row[0, 128:] = torch.tensor([896.0, -448.0])
    message = torch.zeros(1, message_bytes("e4m3", 130, 4), dtype=torch.uint8)
    pack_rows("e4m3", row.clone(), message)
    assert message[0, :4].tolist() == [0x7E, 0xF6, 0x6E, 0]
    assert message[0, 128:130].tolist() == [0x7E, 0xF6]
    assert message[0, 132:].view(torch.float32).tolist() == [7 / 448, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 4, 130, 256])
def test_a_value_is_off_by_at_most_a_sixteenth_of_itself_or_of_the_least_step(
    dtype: torch.dtype, width: int
) -> None:
    rows = torch.randn(50, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact, found = rows.double(), sent(rows).double()
    largest = torch.cat(
        [block.abs().amax(1, keepdim=True).expand_as(block) for block in exact.split(128, 1)], 1
    )
    step = largest / 448 * 2.0**-9  # of e4m3's denormal numbers
    narrow = 1 + 2 * torch.finfo(dtype).eps
    assert ((found - exact).abs() <= torch.maximum(exact.abs() / 16, step / 2) * narrow * 1.001).all()
    order = torch.tensor([3, 3, 0])
    assert torch.equal(sent(rows, "e4m3", order), sent(rows)[order])


def test_rows_of_any_size_stay_finite_and_zeros_stay_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(2000, 128, generator=generator) * torch.logspace(-44, 38, 2000)[:, None]
    rows[5] = 0
    rows[6] = torch.finfo(torch.float32).max
    found = sent(rows)
    assert found.isfinite().all() and not found[5].any() and torch.equal(found[6], rows[6])
    assert sent(rows[:0]).shape == (0, 128)


def test_a_value_that_is_not_finite_makes_its_block_nan_and_no_other() -> None:
    rows = torch.ones(3, 300)
    rows[0, 5] = math.inf
    rows[1, 299] = math.nan
    found = sent(rows)
    bad = torch.zeros(3, 300, dtype=torch.bool)
    bad[0, :128] = True
    bad[1, 256:] = True
    assert torch.equal(found.isnan(), bad) and not found.isinf().any()


# ---- buffers


def message_sizes(direction: str, wires: Wires, restore: object = KEEP) -> MessageSizes:
    rows = ChunkRows(send=(5, 4), received=(3, 6), local=(2, 2), home=(7, 6), regrouped=(False, True))
    columns = HiddenColumns(hidden=8, scratch=8)
    return MessageSizes(
        direction=direction,
        extent=rows,
        d_model=256,
        columns=columns,
        restore=restore,
        wires=wires,
        element_size=2,
    )


def test_buffers_of_messages_are_narrow_and_rows_are_unpacked_into_others() -> None:
    forward = message_sizes("forward", Wires(rows="e4m3"))
    assert forward.of("send") == ((5, 4), 132) and forward.of("T_DI") == ((3, 6), 132)
    assert forward.of("T_DI_sorted") == ((3, 6), 256) and forward.of("T_DI_L") == ((2, 2), 256)
    assert forward.of("T_DO_sorted") == ([0, 6], 256) and forward.of("home") == ((7, 6), 256)
    assert not any(map(forward.stays_as_it_arrives, range(2)))
    gradients = message_sizes("backward", Wires(gradients="e4m3"), S4)
    assert gradients.of("send") == ((5, 4), 132) and gradients.of("dT_DO_sorted") == ((3, 6), 256)
    assert gradients.of("send_again") == ((5, 4), 256) and gradients.of("T_DI") == ((3, 6), 256)
    again = message_sizes("backward", Wires(rows="e4m3"), S4)
    assert again.of("send") == ((5, 4), 256) and again.of("dT_DO") == ((3, 6), 256)
    assert again.of("send_again") == ((5, 4), 132) and again.of("T_DI") == ((3, 6), 132)
    offloaded = message_sizes("backward", Wires(rows="e4m3"), STRATEGIES["S1"])
    assert offloaded.of("T_DI") == ((3, 6), 256)  # copied from the host as rows


# ---- predictions


LAYER = {
    "d_model": 1024,
    "d_hidden": 2048,
    "num_experts": 8,
    "top_k": 2,
    "num_ranks": 4,
    "dtype": torch.bfloat16,
}
SHARE = 1056 / 2048
ALL_E4M3 = {"wire": "e4m3", "wire_backward": "e4m3", "wire_combine": "e4m3"}


def test_predicted_bytes_fall_with_the_buffers_of_messages() -> None:
    call = (4096, Choice(forward=4, backward=4, restore=S4), 1.25)
    plain, rows, both = (
        bound(sizes, sizes.call(call[0]), *call[1:])
        for sizes in (
            sizes_from_options(**LAYER),
            sizes_from_options(**LAYER, wire="e4m3"),
            sizes_from_options(**LAYER, wire="e4m3", wire_backward="e4m3"),
        )
    )
    assert both.tensors["backward buffers"] < rows.tensors["backward buffers"]
    assert rows.tensors["backward buffers"] < plain.tensors["backward buffers"]


def test_predicted_seconds_of_messages_follow_their_bytes() -> None:
    profile = PROFILE
    costs = {
        (direction, gradient): even_task_costs(
            sizes_from_options(**LAYER, wire="e4m3", wire_backward=gradient), profile, 4096, 4, direction
        )
        for direction in ("forward", "backward")
        for gradient in (None, "e4m3")
    }
    plain = even_task_costs(sizes_from_options(**LAYER), profile, 4096, 4)[Kind.DISPATCH]
    alpha = profile.message(0)

    def share(seconds: float) -> float:
        return (seconds - alpha) / (plain - alpha)

    for of_pass in costs.values():
        assert share(of_pass[Kind.COMBINE]) == pytest.approx(1)
        assert share(of_pass[Kind.DISPATCH_AGAIN]) == pytest.approx(SHARE)
    assert share(costs["forward", None][Kind.DISPATCH]) == pytest.approx(SHARE)
    assert share(costs["backward", None][Kind.DISPATCH]) == pytest.approx(1)
    assert share(costs["backward", "e4m3"][Kind.DISPATCH]) == pytest.approx(SHARE)
    choice = Choice(forward=4, backward=4, restore=S4)
    seconds = [
        step_seconds(sizes_from_options(**LAYER, **wires), slow_link(), 4096, choice)
        for wires in ({}, {"wire": "e4m3"}, {"wire": "e4m3", "wire_backward": "e4m3"})
    ]
    assert seconds[2] < seconds[1] < seconds[0]


def test_units_of_eq_10_count_the_bytes_of_messages() -> None:
    assert workload(S4, "backward") == (5, 3, 0)
    assert workload(S4, "backward", dispatched=0.5, again=0.25) == (5, 1.75, 0)
    assert workload(S4, "backward", dispatched=0.5, again=0.25, returned=0.5) == (5, 1.25, 0)
    sizes = {"b": 100.0, "M": 1024, "H": 2048, "element_size": 2}
    plain = lane_seconds(S4, "backward", PROFILE, **sizes)
    found = lane_seconds(S4, "backward", PROFILE, **sizes, wires=Wires(rows="e4m3"))
    assert found[1] == pytest.approx(plain[1] * (2 + SHARE) / 3)
    assert (found[0], found[2]) == (plain[0], plain[2])


def test_the_solver_knows_the_bytes_of_messages() -> None:
    operations = lines(0.0, 1e-9, 1e-12)
    plain = layer_costs(sizes_from_options(**LAYER), operations, 4096, "cpu")
    sizes = sizes_from_options(**LAYER, wire="e4m3")
    found = layer_costs(sizes, operations, 4096, "cpu")
    assert found.a2a.beta_seconds == pytest.approx(plain.a2a.beta_seconds * SHARE)
    assert found.combine == plain.combine
    returned = sizes_from_options(**LAYER, wire_combine="e4m3")
    combine = layer_costs(returned, operations, 4096, "cpu").combine
    assert plain.combine and combine
    assert combine.beta_seconds == pytest.approx(plain.combine.beta_seconds * SHARE)
    assert layer_costs(sizes, operations, 4096, "cpu", direction="backward").a2a == plain.a2a
    assert isinstance(found.a2a, LineCost)


def slow_link(share: float = 4.0) -> Profile:
    """Rates at which the all-to-alls of a pass of `LAYER` take ``share`` times the products of forward.

    Backward has twice the products, so by default its all-to-alls take twice its products.
    """
    row_products = LAYER["d_model"] * 2 * LAYER["d_hidden"]
    row_bytes = 2 * (1 - 1 / LAYER["num_ranks"]) * 2 * LAYER["d_model"]
    communicate = row_bytes / (share * row_products)
    return Rates(compute=1.0, communicate=communicate, copy=1.0).profile(ALONE, 4)


@pytest.mark.parametrize(
    "wires, dtype, forward, step, bound",
    [
        ({"wire": "e4m3"}, torch.bfloat16, 0.80, 0.91, (1 + SHARE) / 2),
        ({"wire": "e4m3", "wire_backward": "e4m3"}, torch.bfloat16, 0.80, 0.80, (1 + SHARE) / 2),
        (ALL_E4M3, torch.bfloat16, 0.58, 0.58, SHARE),
        ({**ALL_E4M3, "wire_combine": "bfloat16"}, torch.float32, 0.55, 0.55, (SHARE / 2 + 0.5) / 2),
    ],
    ids=["forward", "both passes", "results too", "float32 with bfloat16 home"],
)
def test_simulated_times_follow_the_bytes_where_the_link_is_the_bound(
    wires: dict[str, str], dtype: torch.dtype, forward: float, step: float, bound: float
) -> None:
    """In 8 chunks, with all-to-alls that take at least twice the products; without the time of packing."""
    choice = Choice(forward=8, backward=8, restore=KEEP)
    plain, found = (
        {
            direction: makespan(tasks)
            for direction, tasks in simulated_step(
                sizes_from_options(**{**LAYER, "dtype": dtype}, **options), slow_link(), 4096, choice
            ).items()
        }
        for options in ({}, wires)
    )
    assert found["forward"] / plain["forward"] <= forward
    assert sum(found.values()) / sum(plain.values()) <= step
    assert found["forward"] / plain["forward"] >= bound  # the bytes of the link
