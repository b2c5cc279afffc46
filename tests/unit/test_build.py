"""setup.py builds the kernels, or goes on without them, or refuses, each with one line of text.

pmoe.kernels reports which of these happened.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pmoe.kernels import extension, status

ROOT = Path(__file__).resolve().parents[2]
PACKED = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md")


def _setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pmoe_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SETUP = _setup()
find_nvcc = SETUP.find_nvcc


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copies everything that a build reads into a folder, without results of earlier builds."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in PACKED:
        shutil.copy(ROOT / name, tree)
    for folder in ("pmoe", "cuda"):
        shutil.copytree(
            ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.so.*")
        )
    return tree


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """Returns an environment without any program on its PATH, so without nvcc."""
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PMOE_", "CUDA_"))}
    return {**kept, "PATH": str(nowhere), "CUDA_HOME": str(nowhere)}


def ran(folder: Path, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )


def ran_installed(folder: Path, env: dict[str, str], program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with pmoe from ``folder`` and all other packages from here.

    Python runs without site (-S), so that it reads no .pth file: that of an editable install would find this
    tree's pmoe._cuda.
    """
    return ran(folder, {**env, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}, "-S", "-c", program)


def fake_nvcc(folder: Path, release: str) -> str:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {release}'\n")
    path.chmod(0o755)
    return str(path)


# ---- setup.py -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"PMOE_CUDA": "yes"}, "PMOE_CUDA ('yes') must be 0, 1 or unset"),
        ({"PMOE_NVCC": "/no/nvcc"}, "PMOE_NVCC ('/no/nvcc') must be nvcc: there is no such program"),
    ],
)
def test_what_is_asked_for_and_missing_is_refused_in_one_line(
    given: dict[str, str], told: str, tree: Path, bare: dict[str, str]
) -> None:
    done = ran(tree, {**bare, **given}, "setup.py", "-q", "build_ext", "--inplace")
    assert (done.returncode, done.stderr) == (1, f"pmoe: {told}\n")


@pytest.mark.parametrize("release", ["release 12.4, V12.4.131", "a compiler"])
def test_an_nvcc_that_is_too_old_is_refused_with_the_ways_out(
    release: str, tree: Path, bare: dict[str, str]
) -> None:
    nvcc = fake_nvcc(tree, release)
    for env in ({**bare, "PMOE_NVCC": nvcc}, {**bare, "PATH": str(tree)}):
        done = ran(tree, env, "setup.py", "-q", "build_ext", "--inplace")
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"pmoe: {nvcc} ")
        version = re.search(r"release ([\d.]+)", release)
        assert (f"is of CUDA {version[1]}, and" if version else "names no release, and") in line
        assert "12.5 or newer is needed" in line
        assert "PMOE_NVCC=/path/to/newer/nvcc" in line and "PMOE_CUDA=0" in line


def test_nvcc_is_looked_for_in_the_order_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {}
    for name in ("given", "path", "home/bin"):
        (tmp_path / name).mkdir(parents=True)
        paths[name] = fake_nvcc(tmp_path / name, "release 13.0")
    monkeypatch.setenv("PMOE_NVCC", paths["given"])
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert find_nvcc() == paths["given"]
    monkeypatch.delenv("PMOE_NVCC")
    assert find_nvcc() == paths["path"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_nvcc() == paths["home/bin"]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() is None


def test_architectures_become_flags_and_plain_sm_90_is_refused() -> None:
    assert [SETUP.gencode(name) for name in SETUP.architectures(SETUP.ARCHS)] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert [SETUP.gencode(name) for name in SETUP.architectures(SETUP.BLACKWELL_ARCHS)][2:4] == [
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_120,code=sm_120",
    ]
    assert SETUP.architectures("sm_89;ptx80") == ["sm_89", "ptx80"]
    for wrong in ("sm_90", "ptx90", "ptx90a", "90a", "sm_90a -O0"):
        with pytest.raises(SystemExit, match=r"PMOE_CUDA_ARCHS .* only sm_90a"):
            SETUP.architectures(wrong)


@pytest.mark.parametrize(
    ("version", "blackwell"), [("12.5", False), ("12.6.20", False), ("12.8.61", True), ("13.0.88", True)]
)
def test_blackwell_is_compiled_for_by_an_nvcc_that_knows_it(version: str, blackwell: bool) -> None:
    names = SETUP.architectures(SETUP.default_archs(version))
    assert ("sm_100" in names, "sm_120" in names) == (blackwell, blackwell)
    assert [name for name in names if name not in ("sm_100", "sm_120")] == ["sm_80", "sm_90a", "ptx80"]


def test_the_reader_of_dependencies_knows_continued_lines_and_spaces(tmp_path: Path) -> None:
    file = tmp_path / "a.d"
    file.write_text("a.o : /x/a.cu \\\n    /x/my\\ folder/b.h \\\n    /x/c.h\n")
    assert SETUP._read_dependencies(file) == ["/x/a.cu", "/x/my folder/b.h", "/x/c.h"]
    file.write_text("")
    with pytest.raises(ValueError, match="must list files"):
        SETUP._read_dependencies(file)


def test_pybind11_may_be_the_copy_of_torch_and_brings_no_torch_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pybind11", None)  # import pybind11 raises ImportError
    folder = SETUP.pybind11_folder(tmp_path)
    assert (folder / "pybind11" / "pybind11.h").is_file()
    assert [path.name for path in folder.iterdir()] == ["pybind11"]
    assert SETUP.pybind11_folder(tmp_path) == folder  # again, over what is there
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="has no pybind11: pip install pybind11"):
        SETUP.pybind11_folder(tmp_path)


def test_no_source_of_the_kernels_includes_torch_and_none_of_nvccs_includes_pybind11() -> None:
    files = [path for path in (ROOT / "cuda").rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        included = re.findall(
            r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(encoding="utf-8"), re.MULTILINE
        )
        assert not [name for name in included if name.split("/")[0] in ("torch", "ATen", "c10")], path
        if path.suffix in (".cu", ".cuh"):
            assert not [name for name in included if name.startswith("pybind11")], path


def test_every_folder_with_a_bind_cpp_is_compiled() -> None:
    sources = SETUP.cuda_sources()
    assert sources[0] == "cuda/binding.cpp"
    for bind in (ROOT / "cuda").glob("*/bind.cpp"):
        assert bind.relative_to(ROOT).as_posix() in sources
        for source in bind.parent.glob("*.cu"):
            assert source.relative_to(ROOT).as_posix() in sources
    assert all((ROOT / source).is_file() for source in sources)


# ---- NVSHMEM, which is optional -------------------------------------------------------------------


@pytest.fixture
def nvshmem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder with NVSHMEM's headers and its library. No environment variable points to it."""
    for name in ("PMOE_NVSHMEM", "NVSHMEM_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    place = tmp_path / "nvshmem"
    for name in ("include/host/nvshmem_api.h", "lib/libnvshmem_host.so.3"):
        (place / name).parent.mkdir(parents=True)
        (place / name).touch()
    return place


def test_nvshmem_is_compiled_where_its_headers_are_and_not_elsewhere(
    nvshmem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "cuda/heap/nvshmem.cpp"
    assert SETUP.find_nvshmem() is None and source not in SETUP.cuda_sources()
    packages = SimpleNamespace(submodule_search_locations=["/nowhere", str(nvshmem.parent)])
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: packages if name == "nvidia" else None)
        assert SETUP.find_nvshmem() == nvshmem / "include"
        assert extension.nvshmem_library() == str(nvshmem / "lib" / "libnvshmem_host.so.3")
    assert extension.nvshmem_library() is None
    monkeypatch.setenv("NVSHMEM_HOME", str(nvshmem))
    assert extension.nvshmem_library() == str(nvshmem / "lib" / "libnvshmem_host.so.3")
    assert SETUP.find_nvshmem() == nvshmem / "include" and SETUP.cuda_sources()[-1] == source
    assert SETUP._flags_of(source) == ["-isystem", str(nvshmem / "include")]
    assert SETUP._flags_of("cuda/heap/bind.cpp") == []
    monkeypatch.setenv("PMOE_NVSHMEM", "0")
    assert SETUP.find_nvshmem() is None and source not in SETUP.cuda_sources()
    monkeypatch.setenv("PMOE_NVSHMEM", "1")
    monkeypatch.setenv("NVSHMEM_HOME", "/nowhere")
    with pytest.raises(
        SystemExit,
        match=r"PMOE_NVSHMEM=1 needs host/nvshmem_api\.h, and it is not in .*: pip install nvidia-nvshmem",
    ):
        SETUP.find_nvshmem()
    monkeypatch.setenv("PMOE_NVSHMEM", "yes")
    with pytest.raises(SystemExit, match=r"PMOE_NVSHMEM \('yes'\) must be 0, 1 or unset"):
        SETUP.find_nvshmem()


def test_kernels_with_puts_are_built_only_if_asked_for_and_name_what_is_missing(
    nvshmem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SETUP, "find_nvcc", lambda: "nvcc")
    monkeypatch.setenv("NVSHMEM_HOME", str(nvshmem))
    assert [built.name for built in SETUP.extensions()] == ["pmoe._cuda"]
    monkeypatch.setenv("PMOE_NVSHMEM", "1")
    assert [built.name for built in SETUP.extensions()] == ["pmoe._cuda", "pmoe._nvshmem"]
    for name in ("include/nvshmem.h", "lib/libnvshmem_device.a"):
        with pytest.raises(SystemExit, match=rf"PMOE_NVSHMEM=1 needs .*{name}.* in {nvshmem}.*: pip install"):
            SETUP.Nvshmem.complete()
        (nvshmem / name).touch()
    header = nvshmem / "include" / "non_abi" / "nvshmem_version.h"
    header.parent.mkdir()
    for minor, version in ((None, "unknown"), (2, "3.2")):
        if minor is not None:
            lines = ("MAJOR_VERSION 3", f"MINOR_VERSION {minor}", "PATCH_VERSION 5")
            header.write_text("".join(f"#define NVSHMEM_VENDOR_{line}\n" for line in lines))
        with pytest.raises(SystemExit, match=rf"has version {version}, and 3\.3 or newer is needed for puts"):
            SETUP.Nvshmem.complete()
    header.write_text(header.read_text().replace("MINOR_VERSION 2", "MINOR_VERSION 8"))
    (nvshmem.parent / "nvidia").symlink_to(nvshmem.parent)
    with monkeypatch.context() as patch:  # as in pip's own environment, whose packages are others
        patch.delenv("NVSHMEM_HOME")
        patch.setattr(SETUP.sysconfig, "get_paths", lambda: {"purelib": str(nvshmem.parent)})
        assert SETUP.Nvshmem.complete().include == nvshmem.parent / "nvidia" / "nvshmem" / "include"
    found = SETUP.Nvshmem.complete()
    assert found == SETUP.Nvshmem(
        nvshmem / "include", nvshmem / "lib" / "libnvshmem_device.a", nvshmem / "lib" / "libnvshmem_host.so.3"
    )
    monkeypatch.setenv("PMOE_CUDA_ARCHS", "ptx80")
    with pytest.raises(
        SystemExit, match=r"PMOE_CUDA_ARCHS \('ptx80'\) must name an architecture such as sm_80"
    ):
        SETUP.PutsBuild(SETUP.Nvcc("nvcc", "13.0"), nvshmem, found)
    monkeypatch.setenv("PMOE_CUDA_ARCHS", "sm_80, ptx80")
    build = SETUP.PutsBuild(SETUP.Nvcc("nvcc", "13.0"), nvshmem, found)
    assert build.code_flags() == ["-rdc=true", "-gencode=arch=compute_80,code=sm_80"]
    assert build.link_flags()[-3:] == [str(found.device_library), "-Xlinker", str(found.host_library)]


@pytest.mark.parametrize(
    ("cuda", "reason"), [("", "no nvcc on PATH, in CUDA_HOME or PMOE_NVCC"), ("0", "PMOE_CUDA=0")]
)
def test_kernels_with_puts_that_cannot_be_built_end_the_build(
    nvshmem: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, reason: str
) -> None:
    monkeypatch.setattr(SETUP, "find_nvcc", lambda: None)
    monkeypatch.setenv("PMOE_CUDA", cuda)
    assert SETUP.extensions() == []
    monkeypatch.setenv("PMOE_NVSHMEM", "1")
    with pytest.raises(
        SystemExit, match=f"PMOE_NVSHMEM=1 asks for kernels with puts, and no kernels are built: {reason}"
    ):
        SETUP.extensions()


def test_the_sources_with_puts_are_flashdmoe_s_and_none_for_hopper() -> None:
    sources = SETUP.puts_sources()
    assert all((ROOT / source).is_file() for source in sources)
    kernels = {source for source in SETUP.cuda_sources() if source.startswith("cuda/flashdmoe/")}
    others = {"cuda/binding.cpp", "cuda/nvshmem/start.cpp", "cuda/nvshmem/no_hopper.cpp"}
    assert set(sources) == {name for name in kernels if "/hopper" not in name} | others
    assert not set(SETUP.cuda_sources()) & others - {"cuda/binding.cpp"}


@pytest.mark.parametrize(
    ("built", "library", "fits"),
    [
        ("3.8.0", "3.8.0", True),
        ("3.4.5", "3.8.0", True),
        ("3.8.1", "3.8.0", True),
        ("3.8.0", "3.4.5", False),
        ("3.8.0", "4.0.0", False),
        ("3.10.0", "3.9.0", False),
    ],
)
def test_an_older_library_of_nvshmem_is_refused_with_both_versions(
    built: str, library: str, fits: bool
) -> None:
    why = extension.version_refusal(built, library)
    if fits:
        assert why is None
    else:
        assert why is not None and f"built with NVSHMEM {built}, and the library has version {library}" in why


def test_without_kernels_with_puts_the_reason_says_what_to_install(
    nvshmem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = extension._load_puts.__wrapped__
    assert load() == (
        None,
        "pmoe._nvshmem is not built: pip install nvidia-nvshmem-cu13, then PMOE_NVSHMEM=1 pip install .",
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "pmoe._nvshmem" else None)
    assert load() == (None, extension.NO_NVSHMEM_LIBRARY)
    monkeypatch.setenv("NVSHMEM_HOME", str(nvshmem))  # its library is an empty file
    loaded, why = load()
    assert loaded is None
    assert why.startswith("pmoe._nvshmem cannot be imported: NVSHMEM's library cannot be opened: ")
    assert str(nvshmem) in why


def test_status_tells_whether_nvshmem_is_built_in(nvshmem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(ARCHS="sm_80", NVCC="13.0.88", declared=lambda: [], kernels=lambda index: [])
    monkeypatch.setattr(extension, "_load", lambda: (module, None))
    assert status().nvshmem is None
    assert "NVSHMEM: not built in, its headers were not found" in str(status()).splitlines()
    module.NVSHMEM = "3.4.5"
    assert "NVSHMEM: built for 3.4.5, untested; its library is not found" in str(status()).splitlines()
    monkeypatch.setenv("NVSHMEM_HOME", str(nvshmem))
    library = nvshmem / "lib" / "libnvshmem_host.so.3"
    lines = str(status()).splitlines()
    assert f"NVSHMEM: built for 3.4.5, untested; library {library}" in lines
    assert f"NVSHMEM's puts: {extension.why_no_puts() or 'built, untested'}" in lines


# ---- wheels ---------------------------------------------------------------------------------------


def wheel(tree: Path, env: dict[str, str]) -> Path:
    done = ran(
        tree,
        env,
        *("-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--no-index", "-w", "made"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (tree / "made").glob("*.whl")
    return made


@pytest.mark.slow
def test_a_wheel_made_without_nvcc_is_pure_and_works(
    tree: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    (tree / "pmoe" / "_cuda.cpython-39-x86_64-linux-gnu.so").touch()  # left there by a build in place
    made = wheel(tree, bare)
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as file:
        assert not [name for name in file.namelist() if name.startswith(("pmoe/_cuda", "cuda/"))]
        data = [path for path in (ROOT / "pmoe").rglob("*") if path.suffix in (".html", ".json", ".md")]
        wanted = {"pmoe/py.typed", *(str(path.relative_to(ROOT)) for path in data)}
        assert len(wanted) > 5 and wanted <= set(file.namelist())
        file.extractall(tmp_path / "installed")
    program = (
        "import pmoe, pmoe.kernels as kernels; print(pmoe.__file__); found = kernels.status(); "
        "assert not found.built; print(found.reason)"
    )
    done = ran_installed(tmp_path / "installed", bare, program)
    assert done.returncode == 0, done.stderr
    file_name, reason = done.stdout.splitlines()
    assert Path(file_name).is_relative_to(tmp_path)
    assert reason == f"pmoe._cuda is not built; {extension.HOW_TO_BUILD}"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_wheel_of_the_source_archive_brings_kernels_to_a_machine_without_nvcc(
    tree: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    archive = ran(tree, bare, "setup.py", "-q", "sdist", "--formats=gztar")
    assert archive.returncode == 0, archive.stderr
    (packed,) = (tree / "dist").glob("*.tar.gz")
    target = tmp_path / "installed"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", str(packed), "--no-build-isolation", "--no-deps"),
            *("--no-index", "--target", str(target)),
        ],
        env={**os.environ, "PMOE_CUDA": "1", "PMOE_CUDA_ARCHS": "sm_80"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    program = (
        "from pmoe.kernels import status; from pmoe import _cuda; print(_cuda.__file__); found = status(); "
        "assert found.built and found.archs == 'sm_80', found"
    )
    done = ran_installed(target, bare, program)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(target)


# ---- building, with an nvcc that only notes what it is asked ----------------------------------------


@pytest.fixture
def noted(tree: Path, bare: dict[str, str]) -> Callable[[], tuple[int, list[str], str]]:
    """Returns a function that runs build_ext --inplace.

    It returns (exit code, what was compiled or linked, text on stderr).
    """
    (tree / "fake").mkdir()
    nvcc = tree / "fake" / "nvcc"
    # -MF FILE names the source and kernel_info.h; broken.cu does not compile.
    nvcc.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "words = sys.argv[1:]\n"
        "if words == ['--version']:\n"
        "    print('Cuda compilation tools, release 13.0, V13.0.88')\n"
        "    raise SystemExit\n"
        "if any(word.endswith('broken.cu') for word in words):\n"
        "    print('broken.cu(1): error: expected a declaration')\n"
        "    raise SystemExit(2)\n"
        "if any(word.endswith('serial.cu') for word in words):\n"
        "    print('ptxas info    : (C7511) wgmma.mma_async instructions are serialized')\n"
        "open(words[words.index('-o') + 1], 'w').write('made')\n"
        "if '-MF' in words:\n"
        f"    listed = words[words.index('-c') + 1] + ' {tree}/cuda/kernel_info.h'\n"
        "    open(words[words.index('-MF') + 1], 'w').write('a.o : ' + listed)\n"
    )
    nvcc.chmod(0o755)
    for folder in (tree / "cuda").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    kernel = tree / "cuda" / "permute"
    kernel.mkdir()
    (kernel / "bind.cpp").touch()
    (kernel / "permute.cu").touch()

    def build() -> tuple[int, list[str], str]:
        env = {**bare, "PMOE_NVCC": str(nvcc)}
        done = ran(tree, env, "setup.py", "-q", "build_ext", "--inplace")
        return (
            done.returncode,
            re.findall(r"^pmoe: nvcc 13.0.88: (.*)$", done.stdout, re.MULTILINE),
            done.stderr,
        )

    return build


def test_only_what_changed_is_compiled_again(tree: Path, noted: Callable[[], Any]) -> None:
    file = f"_cuda{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    everything = {"cuda/binding.cpp", "cuda/permute/bind.cpp", "cuda/permute/permute.cu", file}
    code, made, _ = noted()
    assert (code, set(made)) == (0, everything)
    assert (tree / "pmoe" / file).read_text() == "made"
    assert noted() == (0, [], "")
    source = tree / "cuda" / "permute" / "permute.cu"
    source.write_text("// other")
    assert noted()[1] == ["cuda/permute/permute.cu", file]
    later = time.time_ns() + 10**12
    os.utime(tree / "cuda" / "kernel_info.h", ns=(later, later))
    assert set(noted()[1]) == everything
    shutil.rmtree(tree / "cuda" / "permute")  # a kernel that is gone leaves the extension
    assert file in noted()[1]


def test_a_compilers_message_reaches_the_user(tree: Path, noted: Callable[[], Any]) -> None:
    (tree / "cuda" / "permute" / "broken.cu").touch()
    code, _, err = noted()
    assert code == 1
    assert "failed on cuda/permute/broken.cu\nbroken.cu(1): error: expected a declaration" in err
    assert "Traceback" not in err
    assert not list((tree / "pmoe").glob("_cuda*"))


def test_products_that_the_compiler_puts_in_a_row_are_an_error(
    tree: Path, noted: Callable[[], tuple[int, list[str], str]]
) -> None:
    (tree / "cuda" / "permute" / "serial.cu").touch()
    code, _, err = noted()
    assert code == 1
    assert "failed on cuda/permute/serial.cu\nptxas info    : (C7511) wgmma.mma_async" in err


def test_every_extra_is_in_the_guide_and_no_page_or_message_installs_pmoe_from_an_index() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    listed = setup[setup.index("extras_require={") :]
    extras = re.findall(r'^            "(\w+)": ?\[?', listed, re.MULTILINE)
    guide = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    assert len(extras) > 5
    assert [name for name in extras if f"\n| `{name}` |" not in guide] == []
    for path in (*(ROOT / "docs").glob("*.md"), *(ROOT / "pmoe").rglob("*.py"), ROOT / "README.md"):
        text = path.read_text(encoding="utf-8")
        assert "pmoe[" not in text, path
        for name in re.findall(r"pip install [\"']\.\[(\w+)\]", text):
            assert name in extras, (path, name)


# ---- the extension --------------------------------------------------------------------------------


@pytest.mark.usefixtures("extension_built")
def test_the_built_extension_imports_without_a_gpu_and_counts_devices() -> None:
    module = extension.load()
    assert module is not None, status().reason
    assert module.device_count() == torch.cuda.device_count() or not torch.backends.cuda.is_built()
    names = [each["name"] for each in module.declared()]
    assert names == sorted(set(names))
    if module.device_count() == 0:
        with pytest.raises(RuntimeError, match=r"pmoe\._cuda: .*(no CUDA driver|no CUDA device)"):
            module.kernels(0)
    for index in range(module.device_count()):
        assert [each["name"] for each in module.kernels(index)] == names


@pytest.mark.usefixtures("extension_built")
def test_the_extension_depends_on_no_library_of_cuda_or_torch() -> None:
    module = extension.load()
    assert module is not None and module.__file__ is not None
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    told = subprocess.run([readelf, "-d", module.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", told)
    assert "libc.so.6" in needed
    assert not [name for name in needed if re.match(r"lib(cuda|nv|torch|c10|python)", name)], needed


# ---- pmoe.kernels.status() --------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Any:
    """Makes pmoe look for the extension again, in the test and after it."""
    before = sys.modules.pop(extension.NAME, None)
    extension._load.cache_clear()
    yield
    extension._load.cache_clear()
    if before is not None:
        sys.modules[extension.NAME] = before


def test_status_without_the_extension_says_how_to_build(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    assert extension.load() is None
    found = status()
    assert not found.built
    assert found.reason == f"pmoe._cuda is not built; {extension.HOW_TO_BUILD}"
    assert "nvcc 12.5 or newer" in str(found) and "pip install ." in str(found)
    assert SETUP.OLDEST_NVCC == (12, 5)


def test_status_names_the_extension_of_another_python(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "_cuda.cpython-39-x86_64.so"]))
    reason = status().reason
    assert reason is not None
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"not built for Python {here}, only as _cuda.cpython-39-x86_64.so" in reason


def test_a_broken_extension_is_told_and_never_raised(tree: Path, bare: dict[str, str]) -> None:
    broken = tree / "pmoe" / f"_cuda{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    broken.write_bytes(b"\x7fELF and no more")
    program = "import pmoe, pmoe.kernels; print(pmoe.kernels.status().reason)"
    done = ran(tree, bare, "-c", program)
    assert done.returncode == 0, done.stderr
    assert re.match(rf"pmoe\._cuda cannot be imported: .*{re.escape(broken.name)}", done.stdout)


LOADED = [
    # binary, PTX, capability; what it is, and a part of the reason against sm_90a code
    (80, 80, (8, 0), "sm_80", "and this device has 8.0"),
    (80, 80, (8, 6), "sm_80", "and this device has 8.6"),
    (90, 90, (9, 0), "sm_90a", None),
    (90, 80, (9, 0), "PTX of compute_80, compiled by the driver", "CUDA_FORCE_PTX_JIT"),
    (100, 80, (10, 0), "PTX of compute_80, compiled by the driver", "and this device has 10.0"),
    (120, 80, (12, 0), "PTX of compute_80, compiled by the driver", "and this device has 12.0"),
    (100, 100, (10, 3), "sm_100", "and this device has 10.3"),
    (120, 120, (12, 0), "sm_120", "and this device has 12.0"),
]


@pytest.mark.parametrize(("binary", "ptx", "capability", "runs", "refusal"), LOADED)
def test_what_runs_is_told_by_what_was_loaded(
    binary: int, ptx: int, capability: tuple[int, int], runs: str, refusal: str | None
) -> None:
    assert extension.binary_of(binary, ptx) == runs
    told = extension.hopper_refusal(binary, ptx, capability)
    if refusal is None:
        assert told is None
    else:
        assert told is not None
        assert told.startswith(f"binary version {binary} of PTX version {ptx} was loaded, not 90 of 90")
        assert refusal in told


def test_the_capability_alone_neither_admits_nor_refuses() -> None:
    assert extension.hopper_refusal(90, 90, (10, 0)) is None
    assert extension.hopper_refusal(90, 80, (9, 0)) is not None


def test_status_lists_every_kernel_of_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"threads": 384, "registers": 168, "shared_bytes": 64, "local_bytes": 0}
    capabilities = [(9, 0), (10, 0), (8, 0)]
    names = ["permute", "products_hopper"]

    def kernels(index: int, only: str) -> list[dict[str, Any]]:
        if index == 2:
            raise RuntimeError("pmoe._cuda: cudaSetDevice: cudaErrorDevicesUnavailable: busy")
        binary, ptx = [(90, 90), (100, 80)][index]
        loaded = {"binary_version": binary, "ptx_version": ptx, **sizes}
        return [
            {"name": name, "hopper": "hopper" in name, "dynamic_shared_bytes": 1000, **loaded}
            for name in names
        ]

    module = SimpleNamespace(
        ARCHS="sm_80, sm_90a, ptx80",
        NVCC="13.0.88",
        declared=lambda: [{"name": name} for name in names],
        kernels=kernels,
    )
    monkeypatch.setattr(extension, "_load", lambda: (module, None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    found = status()
    assert (found.built, found.kernels, found.no_devices) == (True, ("permute", "products_hopper"), None)
    hopper, blackwell, ampere = found.devices
    assert [(each.runs, each.refusal) for each in hopper.kernels] == [("sm_90a", None)] * 2
    assert [each.runs for each in blackwell.kernels] == ["PTX of compute_80, compiled by the driver"] * 2
    assert blackwell.kernels[0].refusal is None
    assert "10.0" in (blackwell.kernels[1].refusal or "")
    assert ampere.kernels == () and "cudaErrorDevicesUnavailable" in (ampere.reason or "")
    lines = str(found).splitlines()
    assert lines[:2] == [
        "CUDA kernels: 2, built for sm_80, sm_90a, ptx80 by nvcc 13.0.88",
        "  permute, products_hopper",
    ]
    assert "device 1: GPU 1, compute capability 10.0" in lines
    assert re.search(r"permute +384 +168 +1064 +0  sm_90a$", str(found), re.MULTILINE)
    assert re.search(r"products_hopper .*  refused: binary version 100 of", str(found))
    assert "no kernel runs: pmoe._cuda: cudaSetDevice" in str(found)


def test_the_page_names_operations_and_counts_their_variants() -> None:
    names = ("permute.bf16", "permute.fp32", "permute.weighted.fp16", "route.8", "gemm.sm_90a.bf16", "await")
    page = str(
        extension.Status(
            built=True, reason=None, archs="sm_80", nvcc="13", kernels=names, devices=(), no_devices="why"
        )
    )
    assert page.splitlines()[:2] == [
        "CUDA kernels: 6, built for sm_80 by nvcc 13",
        "  await, gemm, permute (2), permute.weighted, route",
    ]


def test_status_without_a_device_names_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = status()
    assert found.devices == ()
    assert found.no_devices == f"torch {torch.__version__} sees no CUDA device"
    assert str(found).splitlines()[-1] == f"devices: none, {found.no_devices}"
