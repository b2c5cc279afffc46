"""What a planted mistake is, and a copy of the tree that has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("pmoe", "tests", "cuda", "bench", "examples", "docs")
FILES = ("pyproject.toml", "setup.py", "README.md", "MANIFEST.in", "Makefile")
GROUP_TIMEOUT = "8"
"""Seconds after which ranks that wait for each other give up: some plants make them."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One mistake.

    breaks: what is then wrong, in words.
    file: of the tree. old: text that is in it once; new: what stands there instead.
    tests: what finds it, as pytest takes it: the cheapest file, or tests of it, and maybe ``-k``.
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


def run(plant: Plant, folder: Path) -> Outcome:
    """The plant's tests on a copy of the tree in ``folder``, until the first that fails.

    Raises ValueError where it cannot be planted, and AssertionError where its tests could not be run.
    """
    if problem := plant.problem():
        raise ValueError(problem)
    tree = copy_tree(folder)
    path = tree / plant.file
    path.write_text(path.read_text(encoding="utf-8").replace(plant.old, plant.new), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tree), "PMOE_TESTS_GROUP_SECONDS": GROUP_TIMEOUT}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if plant.file.startswith(("cuda/", "tests/")):
        environment["XDG_CACHE_HOME"] = str(tree / "cache")  # a program with a mistake is not worth keeping
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=240"]
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", "not slow and not gpu", *_words(plant.tests)],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    output = ran.stdout[-3000:] + ran.stderr[-1000:]
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # 2 and more: tests that cannot be collected, or none: then the plant or its tests must change.
    assert ran.returncode in (0, 1), f"plant {plant.name}: pytest ended with {ran.returncode}\n{output}"
    return Outcome(ran.returncode == 1, " ".join(failed)[:200], time.monotonic() - began, output)


def _words(tests: str) -> list[str]:
    """Example: "tests/a.py -k one or two" -> ["tests/a.py", "-k", "one or two"]."""
    files, _, chosen = tests.partition(" -k ")
    return [*files.split(), *(["-k", chosen] if chosen else [])]
