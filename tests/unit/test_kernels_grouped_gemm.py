"""Grouped products: their plain definition, their operators, and the kernels' source in the emulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.kernels import extension, grouped_gemm
from pmoe.kernels.gemm import INPUT
from pmoe.kernels.grouped_gemm import RowSlots, grouped_hidden, grouped_product
from tests.cuda.compiled import compile_and_run, product_of
from tests.cuda.disassembly import count, declared, opcode, resources, sass

GROUPS = ((3, 0, 4), (0,), (1,), (0, 0, 5), (7, 2))


def ends_of(groups: tuple[int, ...]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(groups)), dtype=torch.int32)


def rows(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def slots_of(num_rows: int, top_k: int, seed: int = 0) -> RowSlots:
    """Returns the slots of N rows in random order, for as few tokens as have N slots."""
    count = -(-num_rows // top_k) * top_k
    slot = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:num_rows]
    return RowSlots(slot_N=slot.int(), top_k=top_k)


def expert_of(groups: tuple[int, ...]) -> list[int]:
    return [expert for expert, count in enumerate(groups) for _ in range(count)]


def loop_product(
    x: Tensor, weight: Tensor, groups: tuple[int, ...], bias: Tensor | None, scale: Tensor | None
) -> Tensor:
    """Computes the product one row at a time."""
    found = []
    for row, expert in enumerate(expert_of(groups)):
        y = weight[expert] @ x[row]
        if bias is not None:
            y = y + bias[expert]
        found.append(y if scale is None else y * scale[row])
    return torch.stack(found) if found else x.new_zeros(0, weight.shape[1])


ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "swiglu": lambda h: F.silu(h[:, : h.shape[1] // 2]) * h[:, h.shape[1] // 2 :],
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("top_k", [0, 1, 2])
def test_the_product_and_its_gradients_equal_a_loop(
    groups: tuple[int, ...], with_bias: bool, top_k: int
) -> None:
    num_rows = sum(groups)
    slots = slots_of(num_rows, top_k) if top_k else None
    num_sources = num_rows if slots is None else -(-num_rows // top_k)
    x = rows(num_sources, 5, seed=1).requires_grad_()
    weight = rows(len(groups), 4, 5, seed=2).requires_grad_()
    bias = rows(len(groups), 4, seed=3).requires_grad_() if with_bias else None
    scale = rows(num_rows if slots is None else num_sources * top_k, seed=4).requires_grad_()
    y = grouped_product(
        x, weight, ends_of(groups), bias_EO=bias, scale=scale, slots=slots, gathered=slots is not None
    )
    x_N = x if slots is None else x[slots.slot_N.long() // top_k]
    scale_N = scale if slots is None else scale[slots.slot_N.long()]
    expected = loop_product(x_N, weight, groups, bias, scale_N)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    operands = [each for each in (x, weight, bias, scale) if each is not None]
    grad = rows(*y.shape, seed=5)
    found = torch.autograd.grad(y, operands, grad)
    wanted = (
        torch.autograd.grad(expected, operands, grad, allow_unused=True, materialize_grads=True)
        if num_rows
        else [torch.zeros_like(each) for each in operands]
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("activation", list(ACTIVATE))
@pytest.mark.parametrize("top_k", [0, 2])
def test_hidden_and_its_gradients_equal_a_loop(groups: tuple[int, ...], activation: str, top_k: int) -> None:
    num_rows = sum(groups)
    slots = slots_of(num_rows, top_k) if top_k else None
    x = rows(num_rows if slots is None else -(-num_rows // top_k), 5, seed=1).requires_grad_()
    weight = rows(len(groups), 6, 5, seed=2).requires_grad_()
    bias = rows(len(groups), 6, seed=3).requires_grad_()
    hidden, active = grouped_hidden(
        x, weight, ends_of(groups), activation=activation, bias_EG=bias, slots=slots
    )
    x_N = x if slots is None else x[slots.slot_N.long() // top_k]
    expected = loop_product(x_N, weight, groups, bias, None)
    torch.testing.assert_close(hidden, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(active, ACTIVATE[activation](expected), rtol=1e-12, atol=1e-12)
    if not num_rows:
        return
    grads = rows(*hidden.shape, seed=5), rows(*active.shape, seed=6)
    operands = (x, weight, bias)
    found = torch.autograd.grad((hidden, active), operands, grads)
    wanted = torch.autograd.grad((expected, ACTIVATE[activation](expected)), operands, grads)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("weighs", [False, True])
def test_the_way_back_through_the_hidden_equals_autograd(activation: str, weighs: bool) -> None:
    groups, width = (3, 0, 4), 6
    num_rows = sum(groups)
    grad = rows(num_rows, 5, seed=1)
    weight = rows(len(groups), 5, width, seed=2)
    hidden = rows(num_rows, width * (2 if activation == "swiglu" else 1), seed=3).requires_grad_()
    scale = rows(num_rows, seed=4).requires_grad_()
    active = ACTIVATE[activation](hidden)
    loss = (loop_product(active, weight, groups, None, scale) * grad).sum()
    of_hidden, of_scale = torch.autograd.grad(loss, (hidden, scale))
    out, found_active, dots = grouped_gemm.hidden_gradient(
        grad, weight, hidden.detach(), scale.detach(), ends_of(groups), activation=activation,
        weighs_active=weighs,
    )  # fmt: skip
    torch.testing.assert_close(out, of_hidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dots, of_scale)
    expected = active * scale.unsqueeze(1) if weighs else active
    torch.testing.assert_close(found_active, expected.detach(), rtol=1e-12, atol=1e-12)


def test_weight_gradients_add_up_and_are_zero_for_an_expert_without_rows() -> None:
    grad, x = rows(7, 4, seed=1), rows(7, 5, seed=2)
    total = torch.full((3, 4, 5), 2.0, dtype=torch.float64)
    ends = ends_of((3, 0, 4))
    once = grouped_gemm.weight_gradient(grad, x, ends)
    assert torch.equal(once[1], torch.zeros(4, 5, dtype=torch.float64))
    torch.testing.assert_close(once[2], grad[3:].t() @ x[3:])
    grouped_gemm.weight_gradient(grad, x, ends, out=total, accumulate=True)
    torch.testing.assert_close(total, once + 2)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_weight_gradient_reads_rows_from_tokens_by_their_slots(top_k: int) -> None:
    groups = (3, 0, 4)
    slots = slots_of(7, top_k)
    grad, x = rows(7, 4, seed=1), rows(-(-7 // top_k), 5, seed=2)
    found = grouped_gemm.weight_gradient(grad, x, ends_of(groups), slots=slots)
    rows_NI = x[slots.slot_N.long() // top_k]
    assert torch.equal(found, grouped_gemm.weight_gradient(grad, rows_NI, ends_of(groups)))


def test_slots_that_do_not_fit_a_weight_gradient_are_named() -> None:
    grad, x, ends = rows(7, 4), rows(4, 5), ends_of((3, 4))
    gradient = grouped_gemm.weight_gradient
    with pytest.raises(ValueError, match=r"slot of shape \(6,\) must have the shape \(7,\)"):
        gradient(grad, x, ends, slots=slots_of(6, 2))
    with pytest.raises(ValueError, match=r"top_k \(0\) must be at least 1"):
        gradient(grad, x, ends, slots=slots_of(7, 2)._replace(top_k=0))
    with pytest.raises(ValueError, match=r"grad of 7 rows must have as many as rows \(4\)"):
        gradient(grad, x, ends)


def test_narrow_results_are_rounded_once() -> None:
    x, weight = rows(9, 64, dtype=torch.bfloat16), rows(2, 32, 64, dtype=torch.bfloat16, seed=1)
    bias, scale = rows(2, 32, dtype=torch.bfloat16, seed=2), rows(9, dtype=torch.float32, seed=3)
    y = grouped_gemm.product(x, weight, ends_of((4, 5)), bias_EO=bias, scale=scale)
    exact = loop_product(x.double(), weight.double(), (4, 5), bias.double(), scale.double())
    assert ((y.double() - exact).abs() <= 2.0**-8 * 1.01 * exact.abs()).all()


def test_a_hidden_that_is_not_kept_is_not_returned() -> None:
    x, weight = rows(3, 8), rows(1, 16, 8, seed=1)
    none, active = grouped_gemm.hidden(x, weight, ends_of((3,)), activation="swiglu", keep=False)
    kept, again = grouped_gemm.hidden(x, weight, ends_of((3,)), activation="swiglu")
    assert none is None and kept is not None and torch.equal(active, again)


def test_the_operators_pass_opcheck() -> None:
    x, ends = rows(6, 4).requires_grad_(), ends_of((3, 0, 3))
    weight, bias = rows(3, 8, 4, seed=1).requires_grad_(), rows(3, 8, seed=2).requires_grad_()
    ops, grad = torch.ops.pmoe, rows(6, 8)
    torch.library.opcheck(ops.grouped_product, (x, weight, ends, bias))
    torch.library.opcheck(ops.grouped_input_gradient, (grad, weight.detach(), ends))
    torch.library.opcheck(ops.grouped_weight_gradient, (grad, x.detach(), ends))


def test_the_operators_compile_in_one_graph() -> None:
    def both(x: Tensor, w1: Tensor, w2: Tensor, ends: Tensor, scale: Tensor) -> Tensor:
        _, active = grouped_hidden(x, w1, ends, activation="swiglu")
        return grouped_product(active, w2, ends, scale=scale).sum()

    given = [rows(5, 4), rows(2, 12, 4, seed=1), rows(2, 4, 6, seed=2)]
    leaves = [each.requires_grad_() for each in given]
    ends, scale = ends_of((2, 3)), rows(5, seed=3)
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves, ends, scale), leaves)
    wanted = torch.autograd.grad(both(*leaves, ends, scale), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_bad_operands_are_named_with_their_numbers() -> None:
    x, weight, ends = rows(5, 4), rows(2, 3, 4), ends_of((2, 3))
    product = grouped_gemm.product
    with pytest.raises(ValueError, match=r"rows of shape \(5, 5\) must have the shape \(rows, 4\)"):
        product(rows(5, 5), weight, ends)
    with pytest.raises(ValueError, match="rows of dtype torch.float32 must be torch.float64"):
        product(x.float(), weight, ends)
    with pytest.raises(ValueError, match="ends of dtype torch.int64 must be torch.int32"):
        product(x, weight, ends.long())
    with pytest.raises(ValueError, match=r"ends of shape \(3,\) must have the shape \(2,\)"):
        product(x, weight, ends_of((1, 1, 3)))
    with pytest.raises(ValueError, match=r"bias of shape \(2, 4\) must have the shape \(2, 3\)"):
        product(x, weight, ends, bias_EO=rows(2, 4))
    with pytest.raises(ValueError, match=r"scale of shape \(4,\) must have the shape \(5,\)"):
        product(x, weight, ends, scale=rows(4))
    with pytest.raises(ValueError, match=r"gathered \(True\) must be False without slots"):
        product(x, weight, ends, gathered=True)
    with pytest.raises(ValueError, match=r"activation \('tanh'\) must be one of"):
        grouped_gemm.hidden(x, weight, ends, activation="tanh")
    with pytest.raises(ValueError, match=r"weight has 3 rows for each expert: swiglu needs an even number"):
        grouped_gemm.hidden(x, weight, ends, activation="swiglu")
    with pytest.raises(ValueError, match=r"grad of 5 rows must have as many as rows \(4\)"):
        grouped_gemm.weight_gradient(x, rows(4, 4), ends)


def test_operands_that_a_kernel_would_misread_are_named() -> None:
    x, weight, ends = rows(5, 4), rows(2, 3, 4), ends_of((2, 3))
    product, slots = grouped_gemm.product, slots_of(5, 2)
    with pytest.raises(ValueError, match="bias of dtype torch.float32 must be torch.float64"):
        product(x, weight, ends, bias_EO=rows(2, 3).float())
    with pytest.raises(ValueError, match="bias on meta must be on cpu"):
        product(x, weight, ends, bias_EO=rows(2, 3).to("meta"))
    with pytest.raises(ValueError, match=r"scale of shape \(1,\) must have the shape \(5,\)"):
        product(x, weight, ends, scale=rows(1), slots=slots)
    with pytest.raises(ValueError, match=r"scale of shape \(5,\) must have the shape \(6,\)"):
        product(rows(3, 4), weight, ends, scale=rows(5), slots=slots, gathered=True)
    with pytest.raises(ValueError, match=r"weight of shape \(3, 4\) must have the shape \(E, O, I\)"):
        product(x, rows(3, 4), ends)
    with pytest.raises(ValueError, match=r"rows of shape \(\) must have the shape \(rows, columns\)"):
        product(torch.tensor(1.0), weight, ends)
    with pytest.raises(ValueError, match=r"ends \(\[3, 2\]\) must not decrease"):
        product(x, weight, torch.tensor([3, 2], dtype=torch.int32))
    none = RowSlots(slot_N=slots.slot_N, top_k=0)
    with pytest.raises(ValueError, match=r"top_k \(0\) must be at least 1"):
        product(rows(3, 4), weight, ends, slots=none, gathered=True)
    with pytest.raises(ValueError, match=r"slots must be None for form 1: gradients take rows in place"):
        product(rows(3, 3), weight, ends, slots=slots, gathered=True, form=INPUT)
    with pytest.raises(ValueError, match=r"accumulate \(True\) must be False without out"):
        grouped_gemm.weight_gradient(rows(5, 3), x, ends, accumulate=True)
    narrow = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out of dtype torch.bfloat16 must be float32 to accumulate"):
        grouped_gemm.weight_gradient(rows(5, 3).bfloat16(), x.bfloat16(), ends, out=narrow, accumulate=True)


@pytest.mark.parametrize("which", ["rows", "weight", "ends", "bias", "scale"])
def test_an_operand_on_another_device_is_refused_by_the_operator_too(which: str) -> None:
    given = {
        "rows": rows(5, 4),
        "weight": rows(2, 3, 4),
        "ends": ends_of((2, 3)),
        "bias": rows(2, 3),
        "scale": rows(5),
    }
    given[which] = given[which].to("meta")
    with pytest.raises(ValueError, match="meta"):
        grouped_product(
            given["rows"], given["weight"], given["ends"], bias_EO=given["bias"], scale=given["scale"]
        )


def test_what_does_not_fit_the_kernels_is_said_with_its_numbers() -> None:
    assert grouped_gemm.layout_problem(torch.bfloat16, in_features=64) is None
    assert "in_features (60) must be a multiple of 8" in str(
        grouped_gemm.layout_problem(torch.float16, in_features=60)
    )
    assert "torch.float32" in str(grouped_gemm.layout_problem(torch.float32, in_features=64))
    assert "device cpu" in str(grouped_gemm.refusal(torch.device("cpu"), torch.bfloat16, in_features=64))


@pytest.mark.parametrize(
    ("binary", "ptx", "capability", "expected"),
    [
        (90, 90, (9, 0), "sm_90a"),
        (90, 80, (9, 0), "sm_80"),  # CUDA_FORCE_PTX_JIT=1
        (80, 80, (8, 0), "sm_80"),
        (100, 80, (10, 0), "sm_80"),  # Blackwell: the PTX serves
        (120, 120, (12, 0), "sm_80"),  # Blackwell's own code is of the same sources
    ],
)
def test_the_path_follows_from_the_kernels_as_they_were_loaded(
    binary: int, ptx: int, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = extension.LoadedKernel(
        name=extension.PROBE,
        runs=extension.binary_of(binary, ptx),
        refusal=None,
        binary_version=binary,
        ptx_version=ptx,
        threads=1,
        registers=8,
        shared_bytes=0,
        dynamic_shared_bytes=0,
        local_bytes=0,
    )
    device = extension.Device(index=0, name="a GPU", capability=capability, kernels=(probe,), reason=None)
    none = replace(device, kernels=(), reason="no kernel image is available for execution on the device")
    monkeypatch.setattr(extension, "load", lambda: object())
    for there, found in ((device, (expected, None)), (none, (None, f"device 0: {none.reason}"))):
        monkeypatch.setattr(extension, "on_device", lambda index, there=there: there)
        assert extension.path(torch.device("cuda", 0)) == found


@pytest.mark.slow
def test_the_kernels_in_the_emulator_equal_a_plain_loop() -> None:
    compile_and_run("grouped_gemm_test.cpp", product=product_of("grouped_gemm"))


@pytest.mark.slow
def test_products_in_turns_in_the_emulator_equal_a_plain_loop() -> None:
    compile_and_run("grouped_gemm_test.cpp", "turns", product=product_of("grouped_gemm"))


@pytest.mark.slow
def test_products_stored_as_boxes_in_the_emulator_equal_those_stored_by_threads() -> None:
    compile_and_run("grouped_gemm_test.cpp", "boxes", product=product_of("grouped_gemm"))


@pytest.mark.slow
def test_blocks_that_start_late_cost_no_second_wave() -> None:
    compile_and_run("late_blocks_test.cpp", product=product_of("grouped_gemm"))


@pytest.mark.slow
def test_tiles_ring_boxes_and_epilogue_cover_all_there_is_once() -> None:
    compile_and_run("layout_test.cpp")


@pytest.mark.slow
def test_the_emulator_finds_planted_mistakes() -> None:
    compile_and_run("emulator_test.cpp")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_kernels_in_the_emulator_with_many_random_sizes() -> None:
    compile_and_run("grouped_gemm_test.cpp", "thorough", product=product_of("grouped_gemm"), timeout=500)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_products_in_turns_in_the_emulator_with_many_random_sizes() -> None:
    compile_and_run(
        "grouped_gemm_test.cpp", "turns", "thorough", product=product_of("grouped_gemm"), timeout=500
    )


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_products_stored_as_boxes_in_the_emulator_with_many_random_sizes() -> None:
    compile_and_run(
        "grouped_gemm_test.cpp", "boxes", "thorough", product=product_of("grouped_gemm"), timeout=500
    )


# ---- machine code, where there is nvcc


HOPPER_SHARED = 227 * 1024
"""Bytes of shared memory that a block can have on 9.0. On 8.6 and 8.9, with the least of 8.x and later, 99
KiB.
"""
SMALLEST_SHARED = 99 * 1024


def grouped(path: str, arch: str) -> dict[str, list[str]]:
    found = {name: code for name, code in sass(arch).items() if name.startswith(f"grouped_gemm.{path}.")}
    assert len(found) == (44 + 8 + 12 if path == "sm_90a" else 22)
    return found


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_hopper_code_multiplies_by_warpgroups_and_loads_by_tma() -> None:
    for name, code in grouped("sm_90a", "sm_90a").items():
        assert count(code, "HGMMA") >= 4, name
        in_turns = name.endswith(".turns")
        shape = "64x128x16" if in_turns else "64x256x16"
        assert all(shape in each for each in code if "HGMMA" in each), name
        assert count(code, "HMMA") == 0, name
        assert count(code, "UTMALDG") >= 2, name
        copies = count(code, "LDGSTS")
        gathers = (".forward" in name and not in_turns) or name.endswith(".gathered")
        assert copies >= 8 if gathers else copies == 0, (
            f"{name}: {copies} copies of 16 bytes of gathered rows"
        )
        assert all(".128" in each for each in code if "LDGSTS" in each), name
        multicasts = [each for each in code if "UTMALDG" in each and "MULTICAST" in each]
        assert multicasts, f"{name}: blocks of a cluster share what they load"
        assert count(code, "USETMAXREG") == 2, f"{name}: loading and multiplying warps divide the registers"
    for name, code in grouped("sm_90a", "sm_80").items():
        assert len([each for each in code if "NOP" not in each]) < 16, f"{name} must be empty elsewhere"


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_sm_80_path_multiplies_by_warps_from_shared_memory(arch: str) -> None:
    for name, code in grouped("sm_80", arch).items():
        assert count(code, "HMMA.16816") >= 64, name
        assert count(code, "LDSM.16") >= 16, name
        assert all(".128" in each for each in code if "LDGSTS" in each), name


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_results_are_stored_16_bytes_at_a_time() -> None:
    for path, arch in (("sm_90a", "sm_90a"), ("sm_80", "sm_80")):
        for name, code in grouped(path, arch).items():
            assert count(code, "STG.E.128") >= 2, name
            narrow = [each for each in code if opcode(each).startswith("STG.E") and ".128" not in each]
            # float results two at a time, and a row's inner product
            assert not narrow or ".weight" in name or "gradient" in name, (name, narrow[:3])


@pytest.mark.usefixtures("extension_built")
def test_blocks_fit_the_registers_and_the_shared_memory_that_they_declare() -> None:
    for name, kernel in declared().items():
        if not name.startswith("grouped_gemm."):
            continue
        most, threads = (HOPPER_SHARED, 384) if kernel.hopper else (SMALLEST_SHARED, 256)
        assert kernel.threads == threads, name
        assert kernel.dynamic_shared_bytes <= most, f"{name}: {kernel.dynamic_shared_bytes} bytes"
        arch = "sm_90a" if kernel.hopper else "sm_80"
        found = resources(arch)[name]
        # __launch_bounds__(384, 1) and setmaxnreg: 168 at entry, then 40 and 232.
        assert found.registers == 168 if kernel.hopper else found.registers <= 255, f"{name}: {found}"
        assert found.shared <= 1024, f"{name}: {found}"
