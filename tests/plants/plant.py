"""What a planted mistake is, and a copy of the tree that has it."""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fresh import Server
from tests.kept import kept_folder
from tests.levels import MARKERS

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / "tests" / "libraries.py"
COPIED = ("pmoe", "tests", "cuda", "bench", "examples", "docs")
FILES = ("pyproject.toml", "setup.py", "README.md", "MANIFEST.in", "Makefile")
LEFT_OUT = shutil.ignore_patterns("*.lock", "tmp*")
GROUP_TIMEOUT = "8"
"""Seconds after which ranks that wait for each other give up: some plants make them."""

PROGRAM = """
import os, sys
os.chdir({tree!r})
os.environ.update({environment!r})
sys.path[0] = {tree!r}
from tests.plants.child import main
sys.exit(main({markers!r}, {words!r}))
"""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One mistake.

    breaks: what is then wrong, in words.
    file: of the tree. old: text that is in it once; new: what stands there instead.
    tests: what finds it, as pytest takes it: the cheapest file, or tests of it, and maybe ``-k a or b``.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: str

    def problem(self) -> str:
        """Why it cannot be planted, or ""."""
        path = ROOT / self.file
        if not path.is_file():
            return f"plant {self.name}: there is no {self.file}"
        times = path.read_text(encoding="utf-8").count(self.old)
        if times != 1:
            return f"plant {self.name}: {self.file} has its text {times} times, not once:\n{self.old}"
        test_file = self.tests.split("::")[0].split()[0]
        return "" if (ROOT / test_file).is_file() else f"plant {self.name}: there is no {test_file}"


@dataclass(frozen=True)
class Outcome:
    """What became of a plant. found: whether a test failed. by: its name. output: of pytest."""

    found: bool
    by: str
    seconds: float
    output: str


def copy_tree(folder: Path) -> Path:
    """The tree without what git ignores, but with compiled Python, which copies stay true to."""
    ignored = shutil.ignore_patterns("*.so", "results", "_build")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, folder)
    for built in (ROOT / "pmoe").glob("_cuda*.so"):
        (folder / "pmoe" / built.name).symlink_to(built)
    return folder


def copy_kept(folder: Path) -> Path:
    """What is kept of programs without a mistake is used; a program with one is not worth keeping."""
    if kept_folder().is_dir():
        shutil.copytree(kept_folder(), folder / kept_folder().name, copy_function=os.symlink, ignore=LEFT_OUT)
    return folder


def run(plant: Plant, level: str, folder: Path) -> Outcome:
    """The plant's tests of this level on a copy of the tree in ``folder``, until the first that fails.

    Raises ValueError where it cannot be planted, and AssertionError where its tests could not be run.
    """
    if problem := plant.problem():
        raise ValueError(problem)
    tree = copy_tree(folder)
    path = tree / plant.file
    path.write_text(path.read_text(encoding="utf-8").replace(plant.old, plant.new), encoding="utf-8")
    environment = {"PYTHONPATH": str(tree), "PMOE_TESTS_GROUP_SECONDS": GROUP_TIMEOUT}
    if plant.file.startswith(("cuda/", "tests/")):
        environment["XDG_CACHE_HOME"] = str(copy_kept(tree / "cache"))
    began = time.monotonic()
    program = PROGRAM.format(
        tree=str(tree), environment=environment, markers=MARKERS[level], words=words_of(plant.tests)
    )
    code, output = _server(threading.get_ident()).run(program)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # 2 and more: tests that cannot be collected, or none: then the plant or its tests must change.
    assert code in (0, 1), f"plant {plant.name}: pytest ended with {code}\n{output[-4000:]}"
    return Outcome(code == 1, " ".join(failed)[:200], time.monotonic() - began, output[-4000:])


@functools.cache
def _server(thread: int) -> Server:
    """One for each thread: a server runs one program at a time."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return Server(f"import runpy\nrunpy.run_path({str(LIBRARIES)!r})\n")  # leaves no module of tests


def words_of(tests: str) -> list[str]:
    """Example: "tests/a.py -k one or two" -> ["tests/a.py", "-k", "one or two"]."""
    files, _, chosen = tests.partition(" -k ")
    return [*files.split(), *(["-k", chosen] if chosen else [])]
