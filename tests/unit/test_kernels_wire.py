"""The kernels of wires: what they take, how they are launched, and their source on the CPU.

tests/unit/test_cuda_host.py compares them, in the emulator, to PyTorch's operations. tests/gloo/
test_kernel_branches.py has layers that launch a stand-in for them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from pmoe.kernels import extension
from pmoe.kernels import wire as wire_kernels
from pmoe.kernels.wire import FORMATS, MessageKernels, refusal
from tests.cuda import disassembly
from tests.cuda.compiled import CUDA, compile_and_run


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (torch.zeros(2, 64, dtype=torch.float64), "dtype torch.float64: the kernels pack torch.float32, "),
        (torch.zeros(2, 130, dtype=torch.bfloat16), r"(130 x 2 = 260) must be a multiple of 16"),
        (torch.zeros(2, 64), "not built"),
    ],
)
def test_rows_that_the_kernels_do_not_take_are_refused(rows: torch.Tensor, why: str) -> None:
    with mock.patch.object(wire_kernels, "path", lambda device: (None, "not built")):
        assert why in str(refusal("e4m3", rows))


def test_rows_that_the_kernels_take_are_not_refused() -> None:
    with mock.patch.object(wire_kernels, "path", lambda device: ("sm_80", None)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert refusal("e4m3", torch.zeros(2, 8, dtype=dtype)) is None


def test_the_formats_are_those_of_the_source() -> None:
    layout = (CUDA / "wire" / "layout.h").read_text(encoding="utf-8")
    assert "enum class Format : int { kE4m3 = 0, kBf16 = 1 };" in layout
    assert FORMATS == {"e4m3": 0, "bfloat16": 1}


class Recorder:
    """The extension, which notes the arguments of launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def Wire(self, *args: Any) -> tuple[Any, ...]:
        return args

    def wire_pack(self, *args: Any) -> None:
        self.calls.append(args)

    wire_unpack = wire_pack


def test_a_launch_gets_addresses_strides_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(extension, "load", lambda: recorder)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    x = torch.zeros(3, 264, dtype=torch.bfloat16)[:, :256]
    messages = torch.zeros(5, 264, dtype=torch.uint8)
    position = torch.zeros(3, 2, dtype=torch.int32)
    out = torch.zeros(4, 256, dtype=torch.bfloat16)
    index = torch.zeros(4, dtype=torch.int64)
    kernels = MessageKernels("e4m3", x)
    at = [each.data_ptr() for each in (x, messages, position, out, index)]
    wire = (None, 7, 1, 0, 256)
    kernels.pack(x, position, 10, messages)
    kernels.pack(out[:1], None, 0, messages[:1])
    kernels.unpack(messages, index, out)
    kernels.unpack(messages, index.int(), out[:2])
    kernels.unpack(messages[:4], None, out)
    first, second, third, fourth, fifth = recorder.calls
    # Position 10 is the first message, so the address is that of ten messages before it.
    assert first == (wire, 3, 2, 15, at[2], at[0], 528, at[1] - 10 * 264, 264)
    assert second == (wire, 1, 1, 1, 0, at[3], 512, at[1], 264)
    assert third == (wire, 4, 5, at[4], True, at[1], 264, at[3], 512)
    assert fourth[:3] == (wire, 2, 5) and fourth[4] is False
    assert fifth == (wire, 4, 4, 0, False, at[1], 264, at[3], 512)


def test_without_rows_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(extension, "load", lambda: recorder)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    x, messages = torch.zeros(3, 64), torch.zeros(0, 68, dtype=torch.uint8)
    kernels = MessageKernels("e4m3", x)
    kernels.pack(x, torch.zeros(3, 2, dtype=torch.int32), 4, messages)
    kernels.pack(x[:0], None, 0, messages)
    kernels.unpack(messages, None, x[:0])
    assert recorder.calls == []


@pytest.mark.slow
def test_the_kernels_source_on_the_cpu() -> None:
    compile_and_run("wire_test.cpp")


USES = ("REDUX", "CREDUX", "F2FP", "STG")
"""Beginnings of the first instructions that use what was loaded, or store what became of it."""


@pytest.mark.nightly
@pytest.mark.usefixtures("extension_built")
def test_a_slice_is_loaded_at_once_and_converted_by_instructions_where_there_are_some() -> None:
    """A lane has 4 columns of each of 4 blocks: 16 bytes of float32 rows, 8 bytes of other rows."""
    names = [name for name in disassembly.declared() if name.startswith("wire_")]
    assert len(names) == 8
    for arch in disassembly.archs():
        for name in names:
            opcodes = [disassembly.opcode(each) for each in disassembly.sass(arch)[name]]
            loads = [each for each in opcodes if each.startswith("LDG")]
            stores = [each for each in opcodes if each.startswith("STG")]
            quad = "E.128" if ".fp32" in name else "E.64"
            is_e4m3 = not name.endswith("as_bf16")
            if name.startswith("wire_pack"):
                assert loads.count(f"LDG.{quad}") == 4, (arch, name, loads)
                assert set(stores) == {"STG.E" if is_e4m3 else "STG.E.64"}, (arch, name, stores)
            else:
                assert stores == [f"STG.{quad}"] * 4, (arch, name, stores)
                messages = "LDG.E" if is_e4m3 else "LDG.E.64"
                assert loads.count(messages) >= (8 if is_e4m3 else 4), (arch, name, loads)
            behind = opcodes[next(i for i, each in enumerate(opcodes) if each.startswith(USES)) :]
            assert not [each for each in behind if each.startswith("LDG.E.")], (arch, name)
            converts = sum("E4M3" in each for each in opcodes)
            assert converts == (8 if is_e4m3 and arch != "sm_80" else 0), (arch, name, converts)
            maxima = sum(each.endswith("REDUX.MAX") for each in opcodes)
            assert maxima == (4 if is_e4m3 and name.startswith("wire_pack") else 0), (arch, name)
