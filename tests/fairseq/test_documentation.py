"""The commands of docs/training.md run as they are pasted."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.fairseq.documented import commands
from tests.fairseq.environment import FOLDER, HELD_OUT, MODULES, ROOT, check_environment, tokens_of

pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
def test_the_commands_train_and_evaluate(tmp_path: Path) -> None:
    check_environment()
    for split, names in (("train", MODULES), ("valid", HELD_OUT)):
        (tmp_path / f"{split}.txt").write_text("\n".join(tokens_of(names)) + "\n", encoding="utf-8")
    environment = {"PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    output = ""
    for line in commands():
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-6000:]}"
        output += done.stdout
    assert "num_updates: 3 >= max_update: 3" in output
    (tokens,) = re.findall(r"Evaluated ([\d,]+) tokens", output)
    assert int(tokens.replace(",", "")) > 1000
    assert "--moe-num-experts (none)" in output
