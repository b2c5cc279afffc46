"""The commands of docs/training.md run as they are pasted."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.fairseq.environment import FOLDER, HELD_OUT, MODULES, ROOT, check_environment, tokens_of

pytestmark = pytest.mark.timeout(900)

ON_THIS_MACHINE = {
    " train ": " --cpu --distributed-backend gloo --num-workers 0 --max-update 3 --decoder-layers 2"
    " --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64"
    " --decoder-attention-heads 2",
    " eval-lm ": " --cpu --num-workers 0",
}
"""What is added to a command: what the texts say for the CPU, and sizes that train in seconds."""


def commands() -> list[str]:
    """Of the page's shell block on fairseq, but the installation."""
    section = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition("\n## fairseq\n")[2]
    (block,) = re.findall(r"```sh\n(.*?)```", section.partition("\n#")[0], re.DOTALL)
    joined = block.replace("\\\n", " ").splitlines()
    return [line for line in joined if line and not line.startswith("pip ")]


@pytest.mark.slow
def test_the_commands_train_and_evaluate(tmp_path: Path) -> None:
    check_environment()
    for split, names in (("train", MODULES), ("valid", HELD_OUT)):
        (tmp_path / f"{split}.txt").write_text("\n".join(tokens_of(names)) + "\n", encoding="utf-8")
    environment = {"PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    output = ""
    for line in commands():
        added = "".join(more for name, more in ON_THIS_MACHINE.items() if name in line)
        done = subprocess.run(
            ["bash", "-c", line + added],
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
