"""Messages of a wire on a GPU: bytes and values of the kernels are those of PyTorch on the CPU, to the bit.

Letters: T tokens, K choices, N messages, M columns.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from pmoe.comm.wire import pack_rows, unpack_rows
from pmoe.kernels.wire import MessageKernels, refusal
from pmoe.schedule.wire import WireName, message_bytes
from tests.gpu.support import DEVICE, NEEDS_GPU

pytestmark = NEEDS_GPU

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = 0xAA


@pytest.fixture(autouse=True)
def kernels_run() -> None:
    """Every test sees the kernels."""
    assert refusal("e4m3", torch.empty(1, 8, device=DEVICE)) is None


def messages_of(wire: WireName, x: Tensor) -> Tensor:
    """Returns the messages of tokens by PyTorch's operations on the CPU."""
    found = torch.zeros(x.shape[0], message_bytes(wire, x.shape[1], x.element_size()), dtype=torch.uint8)
    pack_rows(wire, x.cpu().clone(), found)
    return found


def rows_of(wire: WireName, messages: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    """Returns the rows of messages by PyTorch's operations on the CPU."""
    count = messages.shape[0] if index is None else index.numel()
    found = torch.empty(count, like.shape[1], dtype=like.dtype)
    unpack_rows(wire, messages, index, found)
    return found


def draw(num_tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns tokens whose sizes go from the smallest to the largest of the dtype; one of zeros, too."""
    low, high = (-7, 4) if dtype == torch.float16 else (-44, 38)
    sizes = torch.logspace(low, high, num_tokens)[:, None]
    x = ((torch.rand(num_tokens, columns) * 2 - 1) * sizes).to(dtype)
    x[num_tokens // 2] = 0
    return x


@pytest.mark.sanitize
@pytest.mark.parametrize("columns", [8, 128, 264, 1024, 2880, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 3])
def test_messages_are_those_of_the_cpu(dtype: torch.dtype, columns: int, top_k: int) -> None:
    num_tokens, first = 70, 11
    x = draw(num_tokens, columns + 8, dtype)[:, :columns]
    position = torch.randperm(num_tokens * top_k, dtype=torch.int32).view(num_tokens, top_k) + first
    num = num_tokens * top_k - 5  # the last five positions have no message
    expected = messages_of("e4m3", x)
    found = torch.full((num, expected.shape[1]), POISON, dtype=torch.uint8, device=DEVICE)
    whole = x.new_empty(num_tokens, columns + 8).copy_(torch.nn.functional.pad(x, (0, 8)))
    MessageKernels("e4m3", x.to(DEVICE)).pack(
        whole.to(DEVICE)[:, :columns], position.to(DEVICE), first, found
    )
    token = (position.flatten() - first).argsort()[:num] // top_k
    assert torch.equal(found.cpu(), expected[token])


@pytest.mark.sanitize
@pytest.mark.parametrize("columns", [8, 128, 264, 1024, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [None, torch.int32, torch.int64], ids=str)
def test_rows_are_those_of_the_cpu(dtype: torch.dtype, columns: int, index: torch.dtype | None) -> None:
    messages = messages_of("e4m3", draw(70, columns, dtype))
    index_N = None if index is None else torch.randint(70, (90,)).to(index)
    expected = rows_of("e4m3", messages, index_N, torch.empty(0, columns, dtype=dtype))
    found = torch.full_like(expected, float("nan"), device=DEVICE)
    device_index = None if index_N is None else index_N.to(DEVICE)
    MessageKernels("e4m3", found).unpack(messages.to(DEVICE), device_index, found)
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_every_number_and_every_middle_between_two_is_rounded_as_on_the_cpu() -> None:
    """Rows whose scale is 1: the quotients are the values themselves, and those beside every middle."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [middles, torch.nextafter(middles, torch.zeros(())), torch.nextafter(middles, torch.tensor(1e9))]
    values = torch.cat([numbers, *beside])
    values = torch.cat([values, -values])
    rows = torch.nn.functional.pad(values, (0, -values.numel() % 127)).view(-1, 127)
    x = torch.cat([torch.full((rows.shape[0], 1), 448.0), rows], 1)
    expected = messages_of("e4m3", x)
    found = torch.zeros_like(expected, device=DEVICE)
    MessageKernels("e4m3", x.to(DEVICE)).pack(x.to(DEVICE), None, 0, found)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_with_a_value_that_is_not_finite_becomes_nan(bad: float) -> None:
    x = torch.ones(3, 264, device=DEVICE)
    x[1, 130] = bad
    messages = torch.zeros(3, message_bytes("e4m3", 264, 4), dtype=torch.uint8, device=DEVICE)
    kernels = MessageKernels("e4m3", x)
    kernels.pack(x, None, 0, messages)
    out = torch.empty_like(x)
    kernels.unpack(messages, None, out)
    wrong = torch.zeros_like(x, dtype=torch.bool)
    wrong[1, 128:256] = True
    assert torch.equal(out.isnan(), wrong) and not out.isinf().any()


def test_float32_rows_as_bfloat16() -> None:
    x = draw(50, 264, torch.float32)
    expected = messages_of("bfloat16", x)
    found = torch.zeros_like(expected, device=DEVICE)
    kernels = MessageKernels("bfloat16", x.to(DEVICE))
    kernels.pack(x.to(DEVICE), None, 0, found)
    assert torch.equal(found.cpu(), expected)
    out = torch.empty_like(x, device=DEVICE)
    kernels.unpack(found, None, out)
    assert torch.equal(out.cpu(), x.bfloat16().float())


def test_pytorchs_operations_on_this_device_differ_by_one_unit_of_a_scale_at_most() -> None:
    """They divide by 448 through a product with 1 / 448."""
    x = draw(70, 264, torch.float32)
    expected = messages_of("e4m3", x)[:, 264:].contiguous().view(torch.int32)
    found = torch.zeros(70, message_bytes("e4m3", 264, 4), dtype=torch.uint8, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack_rows("e4m3", x.to(DEVICE), found)
    scales = found.cpu()[:, 264:].contiguous().view(torch.int32)
    assert (scales - expected).abs().max() <= 1
