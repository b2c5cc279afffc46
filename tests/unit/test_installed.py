"""README and the first guide, followed as a new user does.

pmoe is installed from this tree into an environment of its own, and each snippet is a file in an empty
folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.snippets import Block, blocks
from tests.unit.test_build import PACKED

ROOT = Path(__file__).resolve().parents[2]
FIRST = (ROOT / "README.md", ROOT / "docs" / "start.md")
SNIPPETS = [block for page in FIRST for block in blocks(page) if block.language == "python"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the interpreter of an environment into which `PMOE_CUDA=0 pip install .` has put pmoe.

    torch and the tools that build come from this machine's environment, because a machine may be offline. The
    editable pmoe of that environment is not seen: .pth files of a folder that a .pth file names are not read.
    """
    folder = tmp_path_factory.mktemp("user")
    tree, venv = folder / "pmoe", folder / "venv"
    tree.mkdir()
    for name in PACKED:
        shutil.copy(ROOT / name, tree)
    for name in ("pmoe", "cuda"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    found = venv / "bin" / "python"
    words = [found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", found, "install", "-q", "--no-index", "--no-deps"]
        + ["--no-build-isolation", "."],
        cwd=tree,
        env=clean() | {"PMOE_CUDA": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def clean() -> dict[str, str]:
    """Returns this environment without the variables that point to this tree."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PMOE_", "PYTHON"))}


def ran(words: list[str | Path], folder: Path) -> str:
    env = clean() | {"PMOE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("block", SNIPPETS, ids=str)
def test_a_snippet_runs_as_pasted_where_pmoe_was_installed(
    block: Block, python: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(block.text, encoding="utf-8")
    launch: list[str | Path] = []
    if block.num_ranks > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(block.num_ranks)]
    printed = ran([python, *launch, "train.py"], tmp_path)
    if block.output is not None:
        assert printed == block.output


def test_there_are_snippets_and_they_find_the_installed_package(python: Path, tmp_path: Path) -> None:
    assert {block.page.name for block in SNIPPETS} == {"README.md", "start.md"}
    where = ran([python, "-c", "import pmoe; print(pmoe.__file__)"], tmp_path).strip()
    assert Path(where).is_relative_to(python.parents[1])


def test_the_command_is_there_and_runs_the_line_of_readme(python: Path, tmp_path: Path) -> None:
    (line,) = (
        line
        for block in blocks(FIRST[0])
        for line in block.text.splitlines()
        if block.language == "sh" and line.startswith("pmoe ")
    )
    told = ran([python.parent / "pmoe", *line.split()[1:]], tmp_path)
    assert told.splitlines()[-1].strip().startswith("pmoe.MoELayer(")
    assert "not built" in ran([python.parent / "pmoe", "kernels"], tmp_path)
