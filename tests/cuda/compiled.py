"""C++ tests: compiled with the host's compiler, run, and shown where they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]


def compile_and_run(source: str, folder: Path, *arguments: str, timeout: float = 100) -> str:
    """What the program prints. Raises AssertionError with the compiler's or the program's output."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "the kernels' own tests need a C++17 compiler: g++ on PATH, or CXX"
    program = folder / Path(source).stem
    include = [f"-I{HERE.parents[1] / 'cuda'}", f"-I{HERE}"]
    made = subprocess.run(
        [compiler, *FLAGS, *include, str(HERE / source), "-o", str(program)], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    ran = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=timeout)
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran.stdout
