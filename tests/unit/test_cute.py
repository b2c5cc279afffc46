"""pmoe's code for boxes, descriptors, accumulators and fragments, and the emulator's, against CuTe."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tests.cuda.compiled import compile_and_run
from tests.unit.test_build import find_nvcc


def cutlass_headers() -> Path:
    """Returns the folder of CUTLASS's headers in PyPI's nvidia-cutlass. Skips the test if it is not
    installed.
    """
    found = importlib.util.find_spec("cutlass_library")
    if found is None or found.origin is None:
        pytest.skip("CuTe's headers are in the package nvidia-cutlass, which is not installed")
    return Path(found.origin).parent / "source" / "include"


def cuda_headers() -> list[str]:
    """Returns compiler options with the folders of nvcc's headers. Skips the test if there is no nvcc."""
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("CuTe needs the headers of CUDA, and there is no nvcc")
    told = subprocess.run([nvcc, "--dryrun", "-c", "-x", "c++", "/dev/null"], capture_output=True, text=True)
    lines = [line for line in told.stderr.splitlines() if "INCLUDES=" in line]
    found = re.findall(r'"(?:-I)?(/[^"]+)"', " ".join(lines))
    assert found, told.stderr
    return found


@pytest.mark.slow
def test_boxes_descriptors_accumulators_and_fragments_are_those_of_cute() -> None:
    folders = [str(cutlass_headers()), *cuda_headers()]
    compile_and_run("cute_test.cpp", flags=tuple(word for each in folders for word in ("-isystem", each)))
