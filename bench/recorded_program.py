"""Runs pass programs over a backend that only writes its calls down, for benchmarks and tests.

The backend is ``cuda/program/recorder.cpp``. It is compiled here with the host's C++ compiler, and called by
ctypes. Nothing is computed, and no GPU is used.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pmoe.program.records import LANES, Base, Kernel
from pmoe.schedule.tasks import Lane

CUDA = Path(__file__).resolve().parent.parent / "cuda"
SOURCE = CUDA / "program" / "recorder.cpp"
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{CUDA}")
FIRST_STREAM = 100
"""The stream that is passed for lane 0; lane 1 has the next number, and so on."""


def compile_library(library: Path) -> None:
    """Compiles the interpreter and the recording backend to a shared library at the given path."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise FileNotFoundError("the interpreter of pass programs needs a C++ compiler: g++ on PATH, or CXX")
    subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(library)], check=True)


def load_library(library: Path) -> ctypes.CDLL:
    """Returns the loaded library, with the types of its functions."""
    loaded = ctypes.CDLL(str(library))
    numbers = ctypes.POINTER(ctypes.c_int64)
    number = ctypes.c_int64
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("program_error", ctypes.c_char_p, []),
        ("program_make", pointer, [pointer, number]),
        ("program_free", None, [pointer]),
        ("program_cut", number, [pointer, number, number, pointer, pointer]),
        ("program_numbers", numbers, [pointer, numbers]),
        ("program_run", number, [pointer, pointer, pointer, number]),
        ("program_calls", numbers, [pointer]),
        ("program_repeat", number, [pointer, number, number, *[pointer] * 4, number]),
    ):
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


@dataclass(frozen=True)
class Memory:
    """An operand of a call: rows of numbers at an address, row_bytes apart."""

    address: int
    rows: int
    columns: int
    row_bytes: int


@dataclass(frozen=True)
class Wait:
    """A lane waits for an event."""

    lane: Lane
    event: int


@dataclass(frozen=True)
class Signal:
    """An event is recorded on a lane."""

    lane: Lane
    event: int


@dataclass(frozen=True)
class Issue:
    """A call of a kernel, a copy or an all-to-all.

    record: index of the record.
    send, recv: for an all-to-all, the numbers of rows to each rank, and from each; else ().
    """

    lane: Lane
    record: int
    kernel: Kernel
    first: int
    flag: int
    send: tuple[int, ...]
    recv: tuple[int, ...]
    operands: tuple[Memory, ...]


class RecordedProgram:
    """A pass program in the interpreter, over the backend that writes its calls down.

    library: the loaded library (`load_library`).
    words: the words of a program (`PassProgram.words`).

    Raises ValueError with the interpreter's message for words that are no program.
    """

    def __init__(self, library: ctypes.CDLL, words: Sequence[int]) -> None:
        self._library = library
        memory = array("q", words)
        self._program = library.program_make(memory.buffer_info()[0], len(memory))
        self._check(bool(self._program))

    def __del__(self) -> None:
        if self._program:
            self._library.program_free(self._program)

    def _check(self, holds: bool) -> None:
        if not holds:
            raise ValueError(self._library.program_error().decode())

    def cut(self, tokens: int, rank: int, send: Sequence[int], recv: Sequence[int]) -> int:
        """Computes the numbers of a call. Returns the bytes of all ring slots.

        tokens: T, tokens of this rank.
        rank: this rank.
        send, recv: (n * W * E_local) row counts, by chunk, rank and expert (`RankCounts`).
        """
        sent, received = array("q", send), array("q", recv)
        addresses = sent.buffer_info()[0], received.buffer_info()[0]
        arena_bytes: int = self._library.program_cut(self._program, tokens, rank, *addresses)
        self._check(arena_bytes >= 0)
        return arena_bytes

    def numbers(self) -> list[int]:
        """Returns the numbers of the last cut."""
        size = ctypes.c_int64()
        found = self._library.program_numbers(self._program, ctypes.byref(size))
        return list(found[: size.value])

    def run(self, bases: Mapping[Base, int], fails_at: int = -1) -> list[Wait | Signal | Issue]:
        """Runs the program. Returns its calls, in the order in which they were issued.

        bases: the address of each memory.
        fails_at: the record whose call returns an error; -1 for none.

        Raises ValueError if a call returned an error.
        """
        addresses, streams = _places(bases)
        size = self._library.program_run(
            self._program, addresses.buffer_info()[0], streams.buffer_info()[0], fails_at
        )
        self._check(size >= 0)
        return _read_calls(self._library.program_calls(self._program)[:size])

    def repeat(
        self,
        tokens: int,
        rank: int,
        send: Sequence[int],
        recv: Sequence[int],
        bases: Mapping[Base, int],
        times: int,
    ) -> int:
        """Cuts and runs the program so many times, over a backend that counts. Returns the calls of a time.

        The other arguments are those of `cut` and `run`.
        """
        arrays = (array("q", send), array("q", recv), *_places(bases))
        calls: int = self._library.program_repeat(
            self._program, tokens, rank, *(memory.buffer_info()[0] for memory in arrays), times
        )
        self._check(calls >= 0)
        return calls


def _places(bases: Mapping[Base, int]) -> tuple[array[int], array[int]]:
    """Returns the address of each base, 0 for a base that is not in ``bases``; and the streams."""
    addresses = array("q", [bases.get(base, 0) for base in Base])
    return addresses, array("q", range(FIRST_STREAM, FIRST_STREAM + len(LANES)))


def _read_calls(words: Sequence[int]) -> list[Wait | Signal | Issue]:
    """Reads the words that ``cuda/program/recorder.cpp`` wrote."""
    calls: list[Wait | Signal | Issue] = []
    at = 0

    def take(count: int) -> tuple[int, ...]:
        nonlocal at
        at += count
        return tuple(words[at - count : at])

    while at < len(words):
        what, lane, stream = take(3)
        assert stream == FIRST_STREAM + lane
        if what < 2:
            (event,) = take(1)
            calls.append((Wait, Signal)[what](LANES[lane], event))
            continue
        record, kernel, first, flag, ranks = take(5)
        send, recv = take(ranks), take(ranks)
        (count,) = take(1)
        operands = tuple(Memory(*take(4)) for _ in range(count))
        calls.append(Issue(LANES[lane], record, Kernel(kernel), first, flag, send, recv, operands))
    return calls
