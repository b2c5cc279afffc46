"""C++ tests: compiled with the host's compiler, kept by content, run, and shown where they fail."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from tests.kept import digest, kept

HERE = Path(__file__).resolve().parent
CUDA = HERE.parents[1] / "cuda"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
# Plain threads in place of a device's (threads.h), and such threads under ThreadSanitizer.
THREADS = ["-std=c++20", "-pthread", "-DPMOE_THREADS"]
SANITIZED = [*THREADS, "-O1", "-g", "-fsanitize=thread"]

RACE_FOUND = 66  # the exit code of a program in which ThreadSanitizer has found a race


def compile_program(source: str, *flags: str) -> Path:
    """The program, kept by what it is made from. Raises AssertionError with the compiler's output.

    Later flags win over FLAGS. A change of any header makes every program again.
    """
    headers = [*CUDA.rglob("*.*h"), *HERE.glob("*.h")]
    told = digest([_compiler_version(), *FLAGS, *flags, *sorted(headers), HERE / source])
    return kept(f"{Path(source).stem}-{told}", lambda program: _compile(source, program, *flags))


def _compile(source: str, program: Path, *flags: str) -> None:
    include = [f"-I{CUDA}", f"-I{HERE}"]
    made = subprocess.run(
        [_compiler(), *FLAGS, *flags, *include, str(HERE / source), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    hint = ""
    if "-fsanitize=thread" in flags:
        hint = f"\n(this test needs a C++20 compiler with ThreadSanitizer: does {_compiler()} have libtsan?)"
    assert made.returncode == 0, made.stderr + hint


def _compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "the kernels' own tests need a C++ compiler: g++ on PATH, or CXX"
    return compiler


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([_compiler(), "-v"], capture_output=True, text=True).stderr


def run_program(program: Path, *arguments: str, timeout: float = 250) -> str:
    """What it prints. Raises AssertionError with that where it ends with anything but 0."""
    ran = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=timeout)
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def compile_and_run(source: str, *arguments: str, flags: tuple[str, ...] = (), timeout: float = 250) -> str:
    return run_program(compile_program(source, *flags), *arguments, timeout=timeout)


@functools.cache
def _at_fixed_addresses() -> list[str]:
    """What to put before a command. ThreadSanitizer stops where the kernel places memory at random in a wider
    range than it knows."""
    setarch = shutil.which("setarch")
    command = [setarch, "-R"] if setarch else []
    # It may be there and not be allowed, in a container.
    works = bool(command) and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if works else []


def run_sanitized(
    program: Path, *arguments: str, reports: bool = True, timeout: float = 250
) -> subprocess.CompletedProcess[str]:
    """How the program ended. The first race ends it with RACE_FOUND, or none is reported at all."""
    options = f"halt_on_error=1 exitcode={RACE_FOUND} report_bugs={int(reports)}"
    ran = subprocess.run(
        [*_at_fixed_addresses(), str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "TSAN_OPTIONS": options},
    )
    assert "unexpected memory mapping" not in ran.stderr, (
        "ThreadSanitizer does not run here: memory is placed too much at random, and setarch -R cannot "
        f"change that (sysctl vm.mmap_rnd_bits=28 does)\n{ran.stderr}"
    )
    return ran
