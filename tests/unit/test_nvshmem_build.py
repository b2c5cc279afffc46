"""pmoe._nvshmem, compiled and linked with NVSHMEM's own headers and libraries, and loaded without a GPU.

`make test-nightly` puts NVSHMEM into .venv-nvshmem. Nothing here runs on a device: what the kernels do is
proven in the emulator (tests/unit/test_flashdmoe.py), with a stub that has NVSHMEM's interface.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from pmoe.kernels import extension
from tests.cuda.compiled import CUDA, HERE
from tests.cuda.disassembly import run_tool
from tests.unit.test_build import ROOT, SETUP, find_nvcc

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

NVSHMEM = ROOT / ".venv-nvshmem" / "nvidia" / "nvshmem"
SOURCE = HERE / "nvshmem_interface.cu"
ARCHS = ("sm_80", "sm_90a")
DEVICE_CODE = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in ARCHS]


@pytest.fixture(scope="module", autouse=True)
def nvshmem() -> Any:
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    assert NVSHMEM.is_dir(), f"{NVSHMEM} is missing: make .venv-nvshmem"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVSHMEM_HOME", str(NVSHMEM))
        patch.setenv("PMOE_NVSHMEM", "1")
        patch.setenv("PMOE_CUDA_ARCHS", ", ".join(ARCHS))
        yield


@pytest.fixture(scope="module")
def built(nvshmem: None) -> Path:
    build = SETUP.PutsBuild(SETUP.Nvcc.usable(), ROOT / "build" / "nvshmem", SETUP.Nvshmem.complete())
    made: Path = build.extension(SETUP.puts_sources(), f"_nvshmem{sysconfig.get_config_var('EXT_SUFFIX')}")
    return made


def run_python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


# ---- one source, two sets of headers


@pytest.mark.parametrize(
    "headers", [["-I", str(HERE / "nvshmem")], ["-isystem", str(NVSHMEM / "include")]], ids=["stub", "own"]
)
def test_the_stub_and_nvshmem_s_own_headers_declare_the_same_functions(
    headers: list[str], tmp_path: Path
) -> None:
    made = subprocess.run(
        [
            *(find_nvcc(), "-std=c++17", "-rdc=true", *DEVICE_CODE, "-I", str(CUDA), *headers),
            *("-c", str(SOURCE), "-o", str(tmp_path / "made.o")),
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    code = run_tool("cuobjdump", "-sass", str(tmp_path / "made.o"))
    assert len(re.findall("Function : .*use_puts", code)) == len(ARCHS)


# ---- the host side: pmoe._cuda's functions and NVSHMEM's own library


def test_the_host_library_has_every_function_that_pmoe_calls(tmp_path: Path) -> None:
    build = SETUP.Build(SETUP.Nvcc.usable(), ROOT / "build" / "nvshmem_host")
    made = build.extension(["cuda/binding.cpp", SETUP.NVSHMEM_SOURCE], "_cuda.so")
    assert "nvshmem" not in needed(made), "pmoe._cuda must import without NVSHMEM"
    program = f"""
import importlib.util
from pmoe.kernels import extension
spec = importlib.util.spec_from_file_location("_cuda", {str(made)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
path = extension.nvshmem_library()
module.nvshmem_open(path)  # looks up every function
print(module.NVSHMEM, extension.nvshmem_version(path), len(module.nvshmem_unique_id()) > 0)
"""
    headers, library, has_id = run_python(program).split()
    assert headers == library and has_id == "True"


# ---- the extension with puts


def needed(made: Path) -> str:
    dynamic = subprocess.run(["readelf", "-d", str(made)], capture_output=True, text=True, check=True).stdout
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    return " ".join(re.findall(r"NEEDED.*\[(.*)\]", dynamic))


def test_the_module_needs_the_host_library_and_exports_nothing_else(built: Path) -> None:
    assert "libnvshmem_host.so.3" in needed(built)
    symbols = subprocess.run(["nm", "-D", str(built)], capture_output=True, text=True, check=True).stdout
    assert re.findall(r" [TBDR] (\S+)", symbols) == ["PyInit__nvshmem"]
    assert {"nvshmemid_hostlib_init_attr", "nvshmemx_init_status"} <= set(re.findall(r" U (\w+)", symbols))


@pytest.mark.parametrize("arch", ARCHS)
def test_each_architecture_has_all_kernels_linked_with_nvshmem_s_device_library(
    built: Path, arch: str
) -> None:
    text = run_tool("cuobjdump", "-arch", arch, "-symbols", str(built))
    names = [line.split()[-1] for line in text.splitlines() if line.startswith(("FUNC", "OBJECT"))]
    kernels = [name for name in names if re.match(r"_ZN4pmoe9flashdmoe\d+(forward|backward)_sm80", name)]
    assert len(kernels) == len(set(kernels)) == 16  # passes, element types, activations
    assert {"nvshmemi_device_state_d", "nvshmemi_ibgda_device_state_d"} <= set(names)
    assert any("nvshmemi_transfer_rma_nbi" in name for name in names)  # of libnvshmem_device.a
    assert not [name for name in names if "sm90a" in name]


LOADED = """
import json, pmoe
pmoe.__path__.append({folder!r})
from pmoe.kernels import extension
from pmoe.kernels.heap import has_puts
assert has_puts(), extension.why_no_puts()
module = extension.puts_module()
sizes = dict(ranks=4, experts=2, rows=256, home_rows=300, row_bytes=2048, d_hidden=512, is_staged=True)
try:
    module.nvshmem_start(0)
    started = "started"
except RuntimeError as error:
    started = str(error)
print(json.dumps([
    module.NVSHMEM,
    module.flashdmoe_puts,
    module.flashdmoe_layout(**sizes) == extension.module().flashdmoe_layout(**sizes),
    [kernel["name"] for kernel in module.declared()],
    started,
]))
"""


def test_the_module_loads_beside_the_host_library_and_agrees_with_pmoe_cuda(built: Path) -> None:
    version, has_puts, same_layout, kernels, started = json.loads(
        run_python(LOADED.format(folder=str(built.parent)))
    )
    assert (version, has_puts, same_layout) == (extension.nvshmem_version(str(host_library())), True, True)
    assert len(kernels) == 16 and all(".sm_80." in name for name in kernels)
    assert "no CUDA" in started  # or "is not started" where there is a device


def host_library() -> Path:
    (library,) = (NVSHMEM / "lib").glob("libnvshmem_host.so*")
    return library


def test_without_the_host_library_the_module_is_refused_by_name(built: Path, tmp_path: Path) -> None:
    program = f"""
import pmoe
pmoe.__path__.append({str(built.parent)!r})
from pmoe.kernels import extension
print(extension.load_puts(), extension.why_no_puts())
"""
    assert run_python(program, NVSHMEM_HOME=str(tmp_path)) == f"None {extension.NO_NVSHMEM_LIBRARY}"
