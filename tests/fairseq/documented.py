"""The commands of docs/training.md, and what is added to them for the CPU."""

from __future__ import annotations

import re

from tests.fairseq.environment import ROOT

ON_THIS_MACHINE = {
    " train ": " --cpu --distributed-backend gloo --num-workers 0 --max-update 3 --decoder-layers 2"
    " --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64"
    " --decoder-attention-heads 2",
    " eval-lm ": " --cpu --num-workers 0",
}
"""What is added to a command: what the texts say for the CPU, and sizes that train in seconds."""


def commands() -> list[str]:
    """Lines of the page's shell block on fairseq, but the installation, with what is added to each."""
    section = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").partition("\n## fairseq\n")[2]
    (block,) = re.findall(r"```sh\n(.*?)```", section.partition("\n#")[0], re.DOTALL)
    lines = [line for line in block.replace("\\\n", " ").splitlines() if line and "pip install" not in line]
    return [line + "".join(more for name, more in ON_THIS_MACHINE.items() if name in line) for line in lines]
