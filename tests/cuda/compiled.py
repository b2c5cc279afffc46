"""C++ tests: compiled with the host's compiler, kept by content, run, and shown where they fail."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kept import digest, kept

HERE = Path(__file__).resolve().parent
CUDA = HERE.parents[1] / "cuda"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"]
# Plain threads in place of a device's (threads.h), and such threads under ThreadSanitizer.
THREADS = ["-std=c++20", "-pthread", "-DPMOE_THREADS"]
SANITIZED = [*THREADS, "-O1", "-g", "-fsanitize=thread"]

RACE_FOUND = 66  # the exit code of a program in which ThreadSanitizer has found a race


# Of the product's own files, which programs may be linked with: for programs and for Python modules.
OBJECT = ["-x", "c++", "-fPIC", "-fvisibility=hidden", "-c"]


def product_of(*folders: str) -> list[str]:
    """Files of cuda/ that launch, with what these need."""
    return [
        path.relative_to(CUDA).as_posix() for name in folders for path in sorted((CUDA / name).glob("*.cu"))
    ]


def compile_program(
    source: str, *flags: str, product: Iterable[str] = (), without_flags: Iterable[str] = ()
) -> Path:
    """The program, kept by what it is made from. Raises AssertionError with the compiler's output.

    product: the files of cuda/ that it is linked with, over runtime/ in place of CUDA. Later flags win over
    FLAGS.
    without_flags: more such files, compiled without ``flags``: other programs share them.
    """
    compiled = [(each, [*OBJECT, *flags]) for each in product] + [(each, OBJECT) for each in without_flags]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda each: _made(CUDA / each[0], *each[1]), compiled))
    return _made(HERE / source, *flags, objects=objects)


def compile_object(file: str) -> Path:
    """Compiles one file of cuda/, over runtime/ in place of CUDA, and links it with nothing."""
    return _made(CUDA / file, *OBJECT)


def link_module(*flags: str) -> Path:
    """``pmoe._cuda`` of the product's own files, over runtime/ in place of CUDA: kernels run in the emulator.

    flags: where Python's and pybind11's headers are.
    """
    launching = [
        CUDA / each
        for each in product_of(
            "grouped_gemm", "comet", "flashdmoe", "route", "permute", "counts", "wire", "heap", "program"
        )
    ]
    binding = [CUDA / "binding.cpp", *sorted(CUDA.glob("*/bind.cpp")), HERE / "runtime" / "bind.cpp"]
    flags_of = dict.fromkeys(launching, OBJECT) | {each: [*OBJECT, *flags] for each in binding}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda each: _made(each, *flags_of[each]), flags_of))
    told = digest([_compiler_version(), *FLAGS, *objects])
    return kept(f"_cuda-{told}", lambda made: _compile([*map(str, objects), "-shared", "-o", str(made)]))


def _made(source: Path, *flags: str, objects: Sequence[Path] = ()) -> Path:
    told = digest([_compiler_version(), *FLAGS, *flags, *objects, *_included(source), source])
    name = f"{source.parent.name}-{source.stem}-{told}"
    words = [*map(str, objects), *flags, str(source)]
    return kept(name, lambda made: _compile([*words, "-o", str(made)], *flags))


def _included(source: Path) -> list[Path]:
    """Our files that it includes, and those that they do, under whatever condition."""
    found, left = set[Path](), [source]
    while left:
        file = left.pop()
        for name in re.findall(r'^\s*#\s*include\s*[<"](.+?)[>"]', file.read_text(), re.MULTILINE):
            paths = {(folder / name).resolve() for folder in (file.parent, CUDA, HERE, HERE / "runtime")}
            new = {path for path in paths if path.is_file()} - found
            found |= new
            left += new
    return sorted(found)


def _compile(words: list[str], *flags: str) -> None:
    include = [f"-I{CUDA}", f"-I{HERE}"]
    if "-isystem" not in words:  # CUDA's own headers
        include.append(f"-I{HERE / 'runtime'}")
    made = subprocess.run([_compiler(), *FLAGS, *include, *words], capture_output=True, text=True)
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


def compile_and_run(
    source: str,
    *arguments: str,
    flags: tuple[str, ...] = (),
    product: Iterable[str] = (),
    timeout: float = 250,
) -> str:
    program = compile_program(source, *flags, product=product)
    return run_program(program, *arguments, timeout=timeout)


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
