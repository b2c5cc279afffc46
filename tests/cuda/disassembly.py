"""What nvcc made of the kernels: machine code and resources, read from pmoe/_cuda.* without a GPU.

Kernels go by the names that their folders declare (cuda/kernel_info.h). What is found in the file but is not
declared goes by its demangled signature. A test of one kernel:

    code = sass("sm_90a")["grouped_gemm_..."]
    assert count(code, "HGMMA") > 0
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pmoe.kernels.extension import load
from tests.kept import digest, kept


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A kernel as its source declares it."""

    name: str
    threads: int
    dynamic_shared_bytes: int
    hopper: bool
    signature: str  # demangled, as in "void pmoe::permute<uint4>(uint4 const*)"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Registers, stack and local bytes a thread; shared bytes a block, the dynamic ones not counted."""

    registers: int
    stack: int
    shared: int
    local: int


def archs() -> list[str]:
    """What there is machine code for: ["sm_80", "sm_90a"]."""
    module = load()
    assert module is not None
    return [name for name in module.ARCHS.split(", ") if name.startswith("sm_")]


@cache
def declared() -> dict[str, Declared]:
    """By name. A kernel's host function has its name as symbol, at the offset that the module tells."""
    module = load()
    assert module is not None
    symbols = {}
    for line in run_tool("nm", "--defined-only", _file()).splitlines():
        address, kind, symbol = line.split(maxsplit=2)
        if kind in "tT":
            symbols[int(address, 16)] = symbol
    found = {}
    listed = [(each.pop("offset"), each) for each in module.declared()]
    signatures = _demangled([symbols.get(offset, "") for offset, _ in listed])
    for (offset, each), signature in zip(listed, signatures, strict=True):
        assert offset in symbols, f"{_file()} has no symbol for {each['name']}: it must not be stripped"
        assert each["name"] not in found, f"{each['name']} is declared twice"
        found[each["name"]] = Declared(**each, signature=signature)
    return found


@cache
def sass(arch: str) -> dict[str, list[str]]:
    """The instructions of every kernel, as in "@P0 LDG.E.128 R4, desc[UR4][R2.64]". Read once for all
    processes of a test run: it takes a minute."""
    name = f"sass-{arch}-{digest([Path(_file())])}.json"
    file = kept(name, lambda path: path.write_text(json.dumps(_disassembled(arch))))
    found: dict[str, list[str]] = json.loads(file.read_text())
    return found


def _disassembled(arch: str) -> dict[str, list[str]]:
    listed = _listed(run_tool("cuobjdump", "-sass", "-arch", arch, _file()))
    found: dict[str, list[str]] = {}
    for name, (_, code) in zip(_names([symbol for symbol, _ in listed]), listed, strict=True):
        assert name not in found, f"two kernels are {name}: one must have another name or namespace"
        found[name] = code
    return found


def functions_of(cubin: Path) -> dict[str, list[str]]:
    """The instructions of every function of another file, by symbol, without the NOPs behind their end."""
    found = dict(_listed(run_tool("cuobjdump", "-sass", str(cubin))))
    for code in found.values():
        while code and opcode(code[-1]) == "NOP":
            code.pop()
    return found


def _listed(text: str) -> list[tuple[str, list[str]]]:
    """(symbol, instructions), as cuobjdump prints them."""
    _, *parts = re.split(r"^\s*Function : (\S+)", text, flags=re.MULTILINE)
    instruction = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)
    return [(symbol, instruction.findall(code)) for symbol, code in zip(parts[::2], parts[1::2], strict=True)]


@cache
def resources(arch: str) -> dict[str, Resources]:
    text = run_tool("cuobjdump", "-res-usage", "-arch", arch, _file())
    listed = re.findall(r"Function (\S+):\n\s+(REG:.*)", text)
    found = {}
    for name, (_, numbers) in zip(_names([symbol for symbol, _ in listed]), listed, strict=True):
        of = {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", numbers)}
        found[name] = Resources(
            registers=of["REG"], stack=of["STACK"], shared=of["SHARED"], local=of["LOCAL"]
        )
    return found


def opcode(instruction: str) -> str:
    """ "@!P0 LDG.E.128 R4, desc[UR4][R2.64]" -> "LDG.E.128" """
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]


def count(code: Sequence[str], start: str) -> int:
    """How many instructions are ``start``, or that with modifiers: "LDG" counts LDG.E.128, and no LDGSTS."""
    return sum(f"{opcode(each)}.".startswith(f"{start}.") for each in code)


# ---- the tools


def _file() -> str:
    module = load()
    assert module is not None and module.__file__ is not None
    return module.__file__


@cache
def _path() -> str:
    """PATH with cuobjdump and nvdisasm, which the former calls, first of all from their packages."""
    folders = [
        str(folder)
        for place in sys.path
        if place.endswith(("site-packages", "dist-packages"))
        for pattern in ("nvidia/cu*/bin", "nvidia/cuda_*/bin", "triton/backends/nvidia/bin")
        for folder in sorted(Path(place).glob(pattern), reverse=True)
    ]
    folders.append(os.environ.get("PATH", ""))
    folders.append(os.path.join(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "bin"))
    return os.pathsep.join(folders)


def run_tool(tool: str, *arguments: str, stdin: str | None = None) -> str:
    found = shutil.which(tool, path=_path())
    if found is None:
        raise FileNotFoundError(
            f"{tool} must be on PATH or installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    done = subprocess.run(
        [found, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "PATH": _path()},
    )
    assert done.returncode == 0, f"{found} {' '.join(arguments)}: {done.stderr or done.stdout}"
    return done.stdout


def _demangled(symbols: Sequence[str]) -> list[str]:
    return run_tool("c++filt", stdin="\n".join(symbols)).splitlines()


def _names(symbols: Sequence[str]) -> list[str]:
    """Of kernels as their sources declare them, of others their signatures."""
    by_signature = {each.signature: each.name for each in declared().values()}
    return [by_signature.get(signature, signature) for signature in _demangled(symbols)]
