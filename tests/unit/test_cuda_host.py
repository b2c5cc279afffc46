"""The host code of pmoe's launches, over a CUDA runtime that only records calls (tests/cuda/runtime).

It shows in which context the code calls the driver, what it asks for, and its errors if the driver refuses.

Letters: T tokens, E experts, K choices.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench import kernels_on_cpu
from pmoe.comm.wire import pack_rows, unpack_rows
from pmoe.kernels import extension
from pmoe.kernels.counts import Messages, Sent
from pmoe.kernels.grouped_gemm import launch
from pmoe.kernels.wire import MessageKernels
from pmoe.schedule.wire import WireName, message_bytes
from tests.cuda.compiled import compile_object
from tests.emulated import load_kernels

BF16, INT = torch.bfloat16, torch.int32
T, E, K, STREAM = 5, 2, 2, 77


@pytest.fixture
def cuda(kernels: Path) -> Iterator[ModuleType]:
    """Returns the extension in a state in which it has made no call yet. Launches are recorded, not run."""
    module = load_kernels(kernels)
    module.stub_reset(runs=False)
    yield module
    module.stub_reset()


class Operands:
    """Memory for the operands of one product of T rows."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {
            "a": torch.zeros(64, 64, dtype=BF16),
            "b": torch.zeros(E, 64, 64, dtype=BF16),
            "d": torch.zeros(64, 64, dtype=BF16),
            "ends": torch.tensor([2, T], dtype=INT),
        }

    def fields(self, **changed: Any) -> dict[str, Any]:
        fields = {name: each.data_ptr() for name, each in self.held.items()}
        fields |= {"a_rows": T, "a_stride": 64, "d_stride": 64, "experts": E, "rows": T, "n": 64, "k": 64}
        return fields | {"device": 0, "stream": STREAM, "hopper": True, "element": 0, "form": 0} | changed


def product(cuda: ModuleType, **changed: Any) -> None:
    cuda.grouped_gemm(**Operands().fields(**changed))


def fused(
    cuda: ModuleType,
    *,
    hopper: bool = True,
    blocks: int = 4,
    device: int = 0,
    kernel: int = 1,
    **changed: int,
) -> None:
    """Launches one of COMET's kernels for one rank.

    kernel: 0 is the dispatching kernel, with ReLU; 1 the combining kernel.
    changed: fields of the rank that get other values.
    """
    rows = torch.zeros(64, 64, dtype=BF16)
    rank = {"computes": 1, "a": rows.data_ptr(), "b": rows.data_ptr(), "a_rows": 8, "a_stride": 64}
    rank |= {"d": rows.data_ptr(), "d_stride": 64, "local_experts": 1, "rows": 8, "n": 64, "k": 64}
    rank |= {"ranks": 1, "experts": 1, "n_c": 1, "top_k": 1, "columns": 64, "chunk_columns": 256}
    which = {"kernel": kernel, "element": 0, "form": 0, "epilogue": 1 - kernel, "activation": 1 - kernel}
    cuda.comet(
        device=device, stream=STREAM, hopper=hopper, blocks=blocks, ranks=[rank | changed], **which
    )  # fmt: skip


def routed(cuda: ModuleType, *, device: int = 0, num_experts: int = 8, top_k: int = K) -> None:
    problem = cuda.RouteProblem(device, STREAM, T, num_experts, top_k, 1, True, 0.0)
    words = torch.zeros(cuda.route_workspace_bytes(problem), dtype=torch.uint8)
    data = torch.zeros(4096, dtype=torch.uint8).data_ptr()
    cuda.route(problem, *[data] * 10, words.data_ptr(), words.numel(), 4, 2, [T, 0, 0, 0])
    cuda.route_backward(problem, *[data] * 4, data, 0, 0, 0, data, data)
    cuda.route_halves(device, STREAM, T, num_experts, 64, *[torch.zeros(1 << 18).data_ptr()] * 4)


def moved(cuda: ModuleType, *, device: int = 0) -> None:
    data = torch.zeros(4096, dtype=torch.uint8).data_ptr()
    moving = cuda.Moving(device, STREAM, 0, T, K, T * K, 64, data, data, 0)
    cuda.permute(moving, data, 64, data, 64)
    plain = cuda.Moving(device, STREAM, 0, T, K, T * K, 64, data, 0, 0, 3)
    cuda.permute_several([(plain, data, 64, data, 64)] * 3)
    cuda.unpermute(moving, data, 64, data, 64)
    cuda.permute_backward(moving, data, 64, data, 64, data, 64, data)
    cuda.unpermute_backward(moving, data, 64, data, 64, data, 64, data)


def counted(cuda: ModuleType, *, device: int = 0) -> None:
    data = torch.zeros(4096, dtype=torch.uint8).data_ptr()
    where: dict[str, Any] = {"device": device, "stream": STREAM, "sizes": [K, 4, E]}
    cuda.counts_pack(**where, header=[T, 0, 0, 0], fault=data, counts=data, sent=data)
    limits: dict[str, Any] = {"own_rank": 0, "host_rows": -1, "asks_rows": True, "irregular": False}
    cuda.counts_agree(**where, received=data, agreed=data, **limits, degrees=[(2, 1.5)])
    cuda.counts_order(
        **where, received=data, sent=data, chunks=2, joined=1, own_rank=0, pieces=2, ends=data,
        of_chunks=data, of_all=data, slot=data, number_slot=data,
    )  # fmt: skip


def packed(cuda: ModuleType, *, device: int = 0) -> None:
    data = torch.zeros(4096, dtype=torch.uint8).data_ptr()
    wire = cuda.Wire(device, STREAM, 1, 0, 64)
    cuda.wire_pack(wire, T, K, T * K, data, data, 128, data, 68)
    cuda.wire_unpack(wire, T, T * K, data, True, data, 68, data, 128)


def persistent(
    cuda: ModuleType,
    *,
    device: int = 0,
    hopper: bool = True,
    ranks: int = 1,
    blocks: int = 3,
    is_backward: bool = False,
    **fields: int,
) -> None:
    data = torch.zeros(4096, dtype=torch.uint8).data_ptr()
    sizes = {"ranks": ranks, "experts": 1, "heap_rows": 1, "row_bytes": 128, "d_hidden": 64}
    operands = dict.fromkeys(("failed", "w1", "w2", "active", "gradient"), data)
    rank = sizes | operands | {"epoch": 1, "top_k": 1} | fields
    told = {"device": device, "stream": STREAM, "hopper": hopper, "element": 0, "activation": 1}
    cuda.flashdmoe(**told, is_backward=is_backward, blocks=blocks, ranks=[rank] * ranks)


CALLS: dict[str, Callable[..., None]] = {
    "product": product,
    "product of sm_80": lambda cuda, **given: product(cuda, hopper=False, **given),
    "fused": fused,
    "fused of sm_80": lambda cuda, **given: fused(cuda, hopper=False, **given),
    "persistent": persistent,
    "persistent, backward": lambda cuda, **given: persistent(cuda, is_backward=True, **given),
    "persistent of sm_80": lambda cuda, **given: persistent(cuda, hopper=False, **given),
    "route": routed,
    "permute": moved,
    "row counts": counted,
    "messages": packed,
    "flag": lambda cuda, device=0: cuda.heap_raise_flag(device, STREAM, 4096, 1),
    "heap": lambda cuda, device=0: cuda.heap_free(device, cuda.heap_allocate(device, 100)),
}


def in_new_thread(call: Callable[[], object]) -> None:
    """Calls a function in a new thread, and raises the error that it raises."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if found:
        raise found[0]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_works_in_a_thread_without_a_context(cuda: ModuleType, name: str, device: int) -> None:
    """Autograd's thread for device 0 has no CUDA context until torch launches something in it."""
    seen: list[int] = []

    def call() -> None:
        CALLS[name](cuda, device=device)
        seen.append(cuda.stub_device())

    in_new_thread(call)
    assert cuda.stub_refused() == []
    assert all((each["device"], each["stream"]) == (device, STREAM) for each in cuda.stub_launched())
    assert bool(cuda.stub_launched()) == (name != "heap")
    # Going back to device 0 would make a context there: half a gigabyte, of every rank of a node.
    assert cuda.stub_contexts() == [device] and seen == [device]


def test_the_device_of_the_caller_is_its_device_afterwards(cuda: ModuleType) -> None:
    cuda.heap_free(0, cuda.heap_allocate(0, 1))
    product(cuda, device=1)
    assert cuda.stub_device() == 0 and cuda.stub_contexts() == [0, 1]
    assert [each["device"] for each in cuda.stub_launched()] == [1]


# ---- what is asked


def test_a_product_fills_the_device_in_whole_clusters(cuda: ModuleType) -> None:
    cuda.stub_reset(runs=False, processors=7)
    product(cuda, sharing=2)
    product(cuda, sharing=1)
    product(cuda, sharing=3)
    product(cuda, hopper=False)
    product(cuda, form=2, m=64, b_rows=T, b_stride=64)
    shapes = [(each["blocks"], each["cluster"], each["threads"]) for each in cuda.stub_launched()]
    assert shapes == [(6, 2, 384), (7, 1, 384), (6, 2, 384), (14, 1, 256), (7, 1, 384)]
    assert not any(each["together"] for each in cuda.stub_launched())
    assert cuda.stub_num_encoded() == 2 + 2 + 2 + 0 + 2


def test_products_that_can_are_computed_in_turns(cuda: ModuleType) -> None:
    """The rule pairs tiles of 128 columns here, so two blocks share A where there are 2 or 4, and not with 1.

    The gradient of the gated hidden has a partial inner product for each tile.
    """
    cuda.stub_reset(runs=False, processors=7)
    fields = {"d_stride": 256, "active": torch.zeros(64).data_ptr(), "active_stride": 256}
    product(cuda, storing=2, n=256, **fields)
    product(cuda, storing=2, n=128, **fields)
    product(cuda, storing=2, n=256, sharing=1, **fields)
    product(cuda, storing=2, n=256, form=1, epilogue=2, activation=4, **fields)
    product(cuda, storing=2, n=256, epilogue=1, activation=4, **fields)
    in_turns = cuda.stub_launched()
    product(cuda, storing=0, n=256, form=1, epilogue=2, activation=4, **fields)
    assert [(each["blocks"], each["cluster"]) for each in in_turns] == [
        (6, 2), (7, 1), (7, 1), (6, 2), (6, 2),
    ]  # fmt: skip
    assert len({each["kernel"] for each in in_turns}) == 3
    assert cuda.stub_launched()[-1]["kernel"] not in {each["kernel"] for each in in_turns}
    assert cuda.row_dot_parts(True, 384, True) == 3
    assert cuda.row_dot_parts(True, 384) == 2
    assert cuda.row_dot_parts(False, 384, True) == cuda.row_dot_parts(False, 384)


def test_products_of_few_steps_are_computed_in_turns_by_the_rule(cuda: ModuleType) -> None:
    """A plain product may have 11 steps of 64, one of SwiGLU's hidden columns 21, their gradient 104.

    Rows that are stored at places gain nothing by boxes, the other way. Their product may have 24 steps.
    """

    def taken(k: int, **fields: int) -> bool:
        found: bool = cuda.grouped_gemm_takes_turns(k=k, storing=1, **fields)
        return found

    assert [taken(k, form=0) for k in (64 * 11, 64 * 11 + 8)] == [True, False]
    hidden = {"form": 0, "epilogue": 1, "activation": 4}
    assert [taken(k, **hidden) for k in (64 * 21, 64 * 21 + 8)] == [True, False]
    gradient = {"form": 1, "epilogue": 2, "activation": 4}
    assert [taken(k, **gradient) for k in (64 * 104, 64 * 104 + 8)] == [True, False]
    assert cuda.grouped_gemm_takes_turns(form=1, k=1 << 20, storing=2)
    assert not cuda.grouped_gemm_takes_turns(form=1, k=64, storing=0)
    assert not cuda.grouped_gemm_takes_turns(form=1, k=64, storing=3)
    assert [taken(k, form=0, placed=True) for k in (64 * 24, 64 * 24 + 8)] == [True, False]


@pytest.mark.parametrize(
    ("given", "num_maps"),
    [
        ({"n": 256, "d_stride": 256}, 1),
        ({"n": 256, "d_stride": 256, "form": 1}, 1),
        ({"n": 64, "epilogue": 1, "activation": 4}, 3),
        ({"n": 64, "epilogue": 1, "activation": 4, "d": 0}, 1),
        ({"n": 64, "form": 2, "m": 64, "b_rows": T, "b_stride": 64}, 1),
        ({"n": 64, "form": 2, "m": 64, "b_rows": T, "b_stride": 64, "sharing": 2}, 1),
        ({"n": 64, "form": 2, "m": 64, "b_rows": T, "b_stride": 64, "wide": True}, 0),
    ],
)
def test_results_that_are_stored_as_boxes_have_maps(
    cuda: ModuleType, given: dict[str, Any], num_maps: int
) -> None:
    """T_M has a map for each half. A gradient in float has none: threads store it."""
    fields = {"active": torch.zeros(64, 64, dtype=BF16).data_ptr(), "active_stride": 64} | given
    product(cuda, storing=0, **fields)
    num_operand_maps = cuda.stub_num_encoded()
    product(cuda, storing=3, **fields)
    assert cuda.stub_num_encoded() == 2 * num_operand_maps + num_maps
    assert cuda.stub_refused() == []
    usual, boxed = cuda.stub_launched()
    assert usual["kernel"] != boxed["kernel"]
    assert (usual["blocks"], usual["cluster"]) == (boxed["blocks"], boxed["cluster"])


def test_other_products_are_stored_as_boxes_by_the_rule(cuda: ModuleType) -> None:
    product(cuda, storing=1, k=64 * 12, a_stride=64 * 12)
    product(cuda, storing=3)
    product(cuda, storing=1)
    product(cuda, storing=2)
    kernels = [each["kernel"] for each in cuda.stub_launched()]
    assert kernels[0] == kernels[1] != kernels[2] == kernels[3]


@pytest.mark.parametrize(
    "given",
    [
        {"k": 64 * 25, "a_stride": 64 * 25, "place": 4096},
        {"k": 64 * 25, "a_stride": 64 * 25, "form": 1, "place": 4096},
        {"form": 2, "m": 64, "b_rows": T, "b_stride": 64, "wide": True},
        {"form": 2, "m": 64, "b_rows": T, "b_stride": 64, "wide": True, "accumulates": True},
    ],
)
def test_results_that_gain_nothing_by_boxes_are_stored_alone_by_the_rule(
    cuda: ModuleType, given: dict[str, Any]
) -> None:
    """Threads store rows at places, and weight gradients in float, also in the kernels for boxes.

    The rule once gave them to these kernels, which only have more to do.
    """
    product(cuda, storing=0, **given)
    product(cuda, storing=1, **given)
    product(cuda, storing=3, **given)
    alone, by_rule, as_boxes = cuda.stub_launched()
    assert alone == by_rule
    assert alone["kernel"] != as_boxes["kernel"]


def test_rows_at_places_are_stored_in_turns_by_the_rule_if_their_product_has_few_steps(
    cuda: ModuleType,
) -> None:
    fields = {"k": 64 * 12, "a_stride": 64 * 12}
    product(cuda, storing=2, **fields, place=4096)
    product(cuda, storing=1, **fields, place=4096)
    product(cuda, storing=1, **fields)
    in_turns, placed, plain = cuda.stub_launched()
    assert in_turns == placed
    assert plain["kernel"] != placed["kernel"], "12 steps without places are stored as boxes"


@pytest.mark.parametrize("name", ["storing", "sharing"])
@pytest.mark.parametrize("number", [-1, 4, 77])
def test_a_number_that_names_no_way_is_refused_before_any_launch(
    cuda: ModuleType, name: str, number: int
) -> None:
    """Such a number was once taken for a value of the enumeration, and some kernel ran."""
    for hopper in (True, False):
        with pytest.raises(
            ValueError, match=rf"{name} \({number}\) must be 0 \(.+\), 1 \(.+\), 2 .+ or 3 \("
        ):
            product(cuda, hopper=hopper, **{name: number})
    assert cuda.stub_launched() == []


@pytest.mark.parametrize("number", [-1, 4])
def test_a_question_about_no_way_to_store_is_refused(cuda: ModuleType, number: int) -> None:
    with pytest.raises(ValueError, match=rf"storing \({number}\) must be 0 \(alone\), 1 \(the fastest way\)"):
        cuda.grouped_gemm_takes_turns(form=0, k=64, storing=number)


def test_a_setting_that_names_no_way_to_store_raises_at_the_next_product(
    cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "load", lambda: cuda)
    monkeypatch.setattr(launch, "STORING", 9)
    fields = Operands().fields() | {"storing": launch.STORING}
    with pytest.raises(ValueError, match=r"storing \(9\) must be"):
        launch.start(torch.device("cpu"), fields)
    with pytest.raises(ValueError, match=r"storing \(9\) must be"):
        launch.num_row_dots("sm_90a", 64, 64, 4)


GRADIENT = {"form": 2, "m": 64, "b_rows": T, "b_stride": 64}
GATHERED = GRADIENT | {"b_gathered": True, "slot": 8}


def test_weight_gradients_of_gathered_rows_need_one_map_of_operands(cuda: ModuleType) -> None:
    """Rows of B are not loaded by a tensor map, so their address and strides may be such as no map has.

    Two blocks share A if the number of tiles side by side is even. They cannot share B.
    """
    cuda.stub_reset(runs=False, processors=7)
    product(cuda, storing=3, **GATHERED | {"b": 8, "n": 512, "m": 256, "a_stride": 256})
    assert cuda.stub_num_encoded() == 2 and cuda.stub_refused() == []  # A and the result
    product(cuda, storing=1, **GATHERED)
    product(cuda, storing=3, **GRADIENT)
    wide, gathered, in_place = cuda.stub_launched()
    assert wide["kernel"] == gathered["kernel"] != in_place["kernel"]
    assert [each["cluster"] for each in (wide, gathered)] == [2, 1]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"storing": 0}, r"\(true\) must be false for storing 0, sharing 0 and wide 0"),
        ({"storing": 2}, r"\(true\) must be false for storing 2, sharing 0 and wide 0"),
        ({"storing": 3, "sharing": 2}, r"\(true\) must be false for storing 3, sharing 2 and wide 0"),
        ({"storing": 3, "wide": True}, r"\(true\) must be false for storing 3, sharing 0 and wide 1"),
        ({"storing": 3, "slot": 0}, r"needs .* a slot and hopper; got form 2, slot 0 and hopper 1"),
        ({"storing": 3, "form": 0}, r"needs form 2 .*; got form 0, slot 8 and hopper 1"),
        ({"storing": 3, "hopper": False}, r"needs .* hopper; got form 2, slot 8 and hopper 0"),
    ],
)
def test_rows_of_b_are_gathered_by_kernels_for_boxes_only(
    cuda: ModuleType, given: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValueError, match=rf"b_gathered {rule}"):
        product(cuda, **GATHERED | given)
    assert cuda.stub_launched() == []


@pytest.mark.parametrize(
    "given", [{"sharing": 2}, {"form": 1, "sharing": 2}, {"form": 1, "epilogue": 2, "activation": 4}]
)
def test_products_without_boxes_are_stored_by_threads(cuda: ModuleType, given: dict[str, Any]) -> None:
    product(cuda, storing=0, **given)
    product(cuda, storing=3, **given)
    one, other = cuda.stub_launched()
    assert one == other


@pytest.mark.parametrize(
    "given",
    [
        {"a_gathered": True, "slot": 8},
        {"form": 2, "m": 64, "b_rows": T, "b_stride": 64},
        {"epilogue": 1, "activation": 2},
        {"epilogue": 1, "activation": 4, "a_gathered": True, "slot": 8},
        {"form": 1, "epilogue": 2, "activation": 2},
        {"hopper": False},
    ],
)
def test_products_without_such_a_kernel_are_computed_as_before(
    cuda: ModuleType, given: dict[str, Any]
) -> None:
    cuda.stub_reset(runs=False)
    product(cuda, **given)
    product(cuda, storing=2, **given)
    one, other = cuda.stub_launched()
    assert one == other


def test_a_product_in_turns_does_not_share_b(cuda: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"sharing \(2\) must be 0, 1 or 3 for a product in turns"):
        product(cuda, storing=2, sharing=2)
    assert cuda.stub_launched() == []


def test_gathered_rows_need_no_map(cuda: ModuleType) -> None:
    product(cuda, a_gathered=True, slot=torch.zeros(64, dtype=INT).data_ptr(), a=8)  # as no map could have it
    assert cuda.stub_num_encoded() == 1 and cuda.stub_refused() == []


@pytest.mark.parametrize("given", [{"form": 1, "a_gathered": True}, {"form": 2, "m": 64, "slot": 8}])
def test_slots_of_a_gradient_are_refused_before_any_launch(cuda: ModuleType, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"slot and a_gathered must be left out in form {given['form']}"):
        product(cuda, **given)
    assert cuda.stub_launched() == []


@pytest.mark.parametrize("form", [0, 1, 2])
def test_operands_without_rows_have_maps_that_can_be(cuda: ModuleType, form: int) -> None:
    product(cuda, a=0, a_rows=0, rows=0, form=form, m=64, b_rows=0, b_stride=64)
    assert cuda.stub_refused() == [] and len(cuda.stub_launched()) == 1


def test_all_blocks_of_a_fused_launch_are_resident_or_there_is_none(cuda: ModuleType) -> None:
    fused(cuda, blocks=16)
    assert [(each["blocks"], each["together"]) for each in cuda.stub_launched()] == [(16, True)]
    with pytest.raises(
        RuntimeError, match=r"launch of comet.*17 blocks .*all at once: cudaErrorCoop.*\(720\)"
    ):
        fused(cuda, blocks=17)


@pytest.mark.parametrize(
    "given, cluster",
    [
        ({"n_c": 2, "chunk_columns": 512}, 2),
        ({"n_c": 1, "chunk_columns": 512}, 1),  # a pair of which one block communicates
        ({"n_c": 2, "chunk_columns": 512, "blocks": 5}, 1),
        ({"n_c": 2, "chunk_columns": 256}, 1),  # the second block has no columns in a chunk
        ({"n_c": 2, "chunk_columns": 512, "hopper": False}, 1),
        ({"n_c": 2, "kernel": 0, "n": 512}, 2),
        ({"n_c": 2, "kernel": 0, "n": 768}, 1),  # a quarter would be computed in vain
        ({"n_c": 2, "kernel": 0, "n": 7 * 256}, 2),
    ],
)
def test_fused_blocks_go_in_pairs_where_both_compute_and_both_have_columns(
    cuda: ModuleType, given: dict[str, int], cluster: int
) -> None:
    fused(cuda, **given)
    assert [(each["cluster"], each["together"]) for each in cuda.stub_launched()] == [(cluster, True)]


def test_a_persistent_pass_is_one_launch_whose_blocks_come_as_there_is_room(cuda: ModuleType) -> None:
    cuda.stub_reset(runs=False, processors=4)
    persistent(cuda, ranks=2, blocks=40)
    persistent(cuda, ranks=2, blocks=40, hopper=False)
    shapes = [(each["blocks"], each["threads"], each["together"]) for each in cuda.stub_launched()]
    assert shapes == [(80, 384, False), (80, 256, False)]
    assert cuda.stub_num_encoded() == 2 * 6 and cuda.stub_refused() == []
    with pytest.raises(ValueError, match=r"blocks \(1\) must be from 2 \(one of them schedules\) to 1024"):
        persistent(cuda, blocks=1)
    with pytest.raises(ValueError, match=r"ranks of one launch \(5\) must be from 1 to 4"):
        persistent(cuda, ranks=5)
    with pytest.raises(ValueError, match=r"experts \(257\) and top_k \(1\) must be at most 256 and 32"):
        persistent(cuda, chooses=1, experts=257)
    with pytest.raises(
        ValueError, match=r"experts \(3\) must be even if the launch computes the gate's scores"
    ):
        persistent(cuda, chooses=1, gate_weight=1, experts=3)


def test_a_heap_of_l_is_as_large_as_table_6_2_says(cuda: ModuleType) -> None:
    """4K tokens of 4 KB, 16 experts on 8 ranks: 64 MiB. With 64 experts, tiles of 128 rows double it."""
    told = {"ranks": 8, "home_rows": 4096, "d_hidden": 2048, "is_staged": True}
    for experts, rows, mebibytes in ((2, 256, 64), (8, 64, 128)):
        sizes = cuda.flashdmoe_layout(experts=experts, rows=rows, row_bytes=4096, **told)
        assert sizes["L"] == mebibytes << 20 and sizes["workspace"] < sizes["L"] + (1 << 20)
        assert sizes["bytes"] < sizes["workspace"] + (1 << 20)
        half = cuda.flashdmoe_layout(experts=experts, rows=rows, row_bytes=2048, **told)
        assert 2 * half["L"] == sizes["L"]


def test_routing_asks_for_no_block_beside_another(cuda: ModuleType) -> None:
    """Routing takes two launches, whose blocks need not run at the same time: a collective may leave few
    multiprocessors free.
    """
    cuda.stub_reset(runs=False, processors=4)
    routed(cuda, num_experts=64)
    first, second, *_ = cuda.stub_launched()
    assert second["blocks"] == first["blocks"] + 1 and first["kernel"] != second["kernel"]
    assert not any(each["together"] for each in cuda.stub_launched())


def test_more_choices_among_128_experts_than_are_merged_have_a_first_kernel_of_their_own(
    cuda: ModuleType,
) -> None:
    """Up to 16 choices come from merging sorted lists (cuda/route/merge.cuh)."""
    first = {}
    for num_experts, top_k in ((64, 16), (64, 17), (128, 16), (128, 17), (256, 16), (256, 17)):
        cuda.stub_reset(runs=False)
        routed(cuda, num_experts=num_experts, top_k=top_k)
        first[num_experts, top_k] = cuda.stub_launched()[0]["kernel"]
    assert first[128, 16] != first[128, 17]
    assert first[64, 16] == first[64, 17] and first[256, 16] == first[256, 17]
    assert len(set(first.values())) == 4


def test_shared_memory_that_one_size_was_allowed_stays_allowed_to_larger_ones(cuda: ModuleType) -> None:
    for num_experts in (700, 1024, 700):
        cuda.route_prepare(0, num_experts, 8)
    routed(cuda, num_experts=1024)
    routed(cuda, num_experts=700)
    assert cuda.stub_refused() == []


def test_one_kernel_is_asked_what_all_of_them_are(cuda: ModuleType) -> None:
    """A device that needs PTX compiles the kernel that is asked for its facts, so only one is asked."""
    assert [each["name"] for each in cuda.kernels(0, "heap.raise_flag")] == ["heap.raise_flag"]
    assert cuda.stub_num_asked() == 1
    assert len(cuda.kernels(0)) == cuda.stub_num_asked() == len(cuda.declared())


# ---- what is said


def test_an_error_of_the_encoder_has_its_code_and_the_arguments(cuda: ModuleType) -> None:
    a = torch.zeros(64, 64, dtype=BF16)
    with pytest.raises(
        RuntimeError,
        match=rf"cuTensorMapEncodeTiled\(bf16, base {a.data_ptr() + 8:#x}, sizes 64 5, strides 128 bytes, "
        r"box 64 128\): CUDA_ERROR_INVALID_VALUE \(1\)",
    ):
        product(cuda, a=a.data_ptr() + 8)


def test_an_error_of_a_launch_has_its_code_and_its_shape(cuda: ModuleType) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"launch of comet\S+, 1000 blocks of \d+ threads .*"
        r": cudaErrorCooperativeLaunchTooLarge \(720\)",
    ):
        fused(cuda, blocks=1000)


def test_a_device_that_there_is_not_is_named(cuda: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"cudaSetDevice\(2\): cudaErrorInvalidDevice \(101\)"):
        product(cuda, device=2)


# ---- what runs: by the maps that the launch has made


def test_a_product_of_numbered_columns_is_right(cuda: ModuleType) -> None:
    """The rows of one operand are unit vectors, and the other's columns are numbered.

    So each element of the result names the element of B that it came from.
    """
    cuda.stub_reset(processors=2)
    a, d = torch.zeros(T, 64, dtype=BF16), torch.zeros(T, 64, dtype=BF16)
    picks = torch.tensor([3, 0, 63, 17, 8])
    a[torch.arange(T), picks] = 1
    b = torch.arange(64 * 64).view(1, 64, 64).remainder(251).to(BF16)  # (E, n, k)
    ends = torch.tensor([T], dtype=INT)
    given = Operands().fields(a=a.data_ptr(), b=b.data_ptr(), d=d.data_ptr(), ends=ends.data_ptr(), experts=1)
    cuda.grouped_gemm(**given)
    assert torch.equal(d, b[0].t()[picks])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"sizes": [0, 4, 2]}, r"ranks \(0\) must be from 1"),
        ({"sizes": [2, 5000, 2]}, r"bins \(5000\) must be from 1 to 4096"),
        ({"degrees": [(3, 1.0)]}, r"a degree \(3\) must divide the bins \(4\)"),
        ({"degrees": [(1, 1.0)] * 17}, r"degrees \(17\) must be at most 16"),
    ],
)
def test_sizes_that_kernels_of_row_counts_do_not_take_are_refused(
    cuda: ModuleType, given: dict[str, Any], why: str
) -> None:
    data = torch.zeros(4096, dtype=torch.uint8).data_ptr()
    fields = {"sizes": [2, 4, 2], "degrees": [(2, 1.5)], "received": data, "agreed": data, "own_rank": 0}
    with pytest.raises(ValueError, match=why):
        cuda.counts_agree(
            device=0, stream=STREAM, host_rows=-1, asks_rows=True, irregular=False, **fields | given
        )
    assert cuda.stub_launched() == []


@pytest.mark.parametrize("fault", [torch.tensor(5), torch.tensor(0), None])
def test_row_counts_are_those_of_the_plain_definition(cuda: ModuleType, fault: Tensor | None) -> None:
    """The kernels in the emulator, by their real launches, against `bench.kernels_on_cpu`."""
    cuda.stub_reset()
    random = torch.Generator().manual_seed(0)
    counts_FE = torch.randint(0, 4, (6, 6), dtype=INT, generator=random)
    slot = torch.randperm(int(counts_FE.sum()), generator=random).int()
    weight = torch.rand(slot.numel(), generator=random)
    computed = []
    for module in (cuda, kernels_on_cpu):
        with mock.patch.object(extension, "load", lambda module=module: module), on_stream():
            messages = Messages.new(counts_FE, 3, 2)
            sent_WL, received_WL = messages.both
            messages.pack([9, 0, 1, 2], fault, counts_FE)
            received_WL.copy_(sent_WL)
            limits = [(2, 0.6), (3, 0.2)]
            messages.agree(
                received_WL, own_rank=1, host_rows=3, asks_rows=True, irregular=True, limits=limits
            )
            num_rows = int(messages.counts(received_WL)[:, [0, 2]].sum())
            order = messages.order(2, 6, 1, 2, num_rows, Sent(slot, weight), 5)
            computed.append([messages.memory, *vars(order).values()])
    assert all(torch.equal(one, other) for one, other in zip(*computed, strict=True))


@pytest.mark.parametrize(
    ("wire", "choices", "position", "why"),
    [
        ((3, 0, 64), 1, 8, r"type \(3\) must be 0, 1 or 2"),
        ((1, 1, 64), 1, 8, r"format \(1\) must be 0 \(e4m3\), or 1 \(bf16\) for float32 rows"),
        ((1, 2, 64), 1, 8, r"format \(2\) must be 0"),
        ((1, 0, 66), 1, 8, r"columns \(66\) must be a multiple of 4"),
        ((1, 0, 64), 0, 8, r"choices \(0\) must be from 1 to 65536"),
        ((1, 0, 64), 2, 0, r"choices \(2\) .* 1 without positions"),
    ],
)
def test_messages_that_kernels_do_not_write_are_refused(
    cuda: ModuleType, wire: tuple[int, ...], choices: int, position: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        cuda.wire_pack(cuda.Wire(0, STREAM, *wire), T, choices, T, position, 8, 128, 8, 68)
    assert cuda.stub_launched() == []


@pytest.mark.parametrize("wire", ["e4m3", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [8, 264, 1024])
def test_messages_are_those_of_pytorch_on_the_cpu_to_the_bit(
    cuda: ModuleType, wire: WireName, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels in the emulator, by their real launches, against `pmoe.comm.wire`."""
    if wire == "bfloat16" and dtype != torch.float32:
        return  # no wire
    cuda.stub_reset()
    on_device = SimpleNamespace(
        Wire=lambda device, *others: cuda.Wire(0, *others),  # a tensor of the CPU has no index
        wire_pack=cuda.wire_pack,
        wire_unpack=cuda.wire_unpack,
    )
    monkeypatch.setattr(extension, "load", lambda: on_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    random = torch.Generator().manual_seed(width)
    sizes = torch.logspace(-41, 37, 9)[:, None]
    x = (torch.randn(9, width + 8, generator=random) * (sizes if dtype == torch.float32 else 1)).to(dtype)
    x[3] = 0
    x[4, 1] = -0.0
    x = x[:, :width]
    assert x.stride(0) == width + 8
    position = torch.randperm(18, generator=random, dtype=INT).view(9, 2) + 5  # of messages 5 to 22
    num_bytes = message_bytes(wire, width, dtype.itemsize)
    expected_TC = torch.zeros(9, num_bytes, dtype=torch.uint8)
    pack_rows(wire, x.clone(), expected_TC)
    message_NC = torch.full((16, num_bytes), 170, dtype=torch.uint8)
    launches = MessageKernels(wire, x)
    launches.pack(x, position, 5, message_NC)
    for token, places in enumerate((position - 5).tolist()):
        for place in places:
            assert place >= 16 or torch.equal(message_NC[place], expected_TC[token]), (token, place)
    in_order_TC = torch.zeros_like(expected_TC)
    launches.pack(x, None, 0, in_order_TC)
    assert torch.equal(in_order_TC, expected_TC)
    for index in (torch.tensor([3, 0, 8, 8, 1]), torch.tensor([7, 2], dtype=INT), None):
        num_rows = 9 if index is None else index.numel()
        out, wanted = torch.ones(num_rows, width, dtype=dtype), torch.zeros(num_rows, width, dtype=dtype)
        launches.unpack(expected_TC, index, out)
        unpack_rows(wire, expected_TC, index, wanted)
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8)), index


def test_what_takes_the_place_of_hopper_s_kernels_has_the_headers_signatures() -> None:
    """Else pmoe._nvshmem could be linked, but not loaded."""
    compile_object("nvshmem/no_hopper.cpp")


@contextlib.contextmanager
def on_stream() -> Iterator[None]:
    where = {"device": 0, "stream": STREAM}
    with mock.patch.object(Messages, "_where", lambda self: where | {"sizes": list(self.sizes)}):
        yield
