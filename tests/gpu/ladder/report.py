"""The one report of a ladder: report.json, and the same as text in report.txt."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.ladder.step import WRONG, Outcome

LEFT_OUT = 40
"""Lines of what a step printed that the text holds; the JSON holds more."""

FACTS = """
import json, torch
from pmoe.kernels import extension
told = {"torch": torch.__version__, "CUDA of torch": torch.version.cuda, "gpus": [], "path": None}
told["pmoe"] = __import__("pmoe").__version__
if torch.cuda.is_available():
    told["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for each in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(each)
        told["gpus"].append(f"{of.name}, {of.major}.{of.minor}, {of.multi_processor_count} multiprocessors, "
                            f"{of.total_memory >> 20} MiB")
    told["path"], told["why no kernels"] = extension.path(torch.device("cuda", 0))
module = extension.load()
told["nvcc of pmoe"], told["built for"] = getattr(module, "NVCC", None), str(getattr(module, "ARCHS", None))
print("\\n" + json.dumps(told))
"""


def facts(root: Path, seconds: float = 60) -> dict[str, Any]:
    """This machine, asked in a process of its own: a driver that hangs must not hang the ladder."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "system": platform.platform(), "gpus": []}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", FACTS], cwd=root, capture_output=True, text=True, timeout=seconds,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip
        found |= (
            json.loads(ran.stdout.rstrip().splitlines()[-1])
            if ran.returncode == 0
            else {"could not be asked": ran.stderr[-2000:]}
        )
    except subprocess.TimeoutExpired:
        found["could not be asked"] = f"torch and its devices did not answer in {seconds:g} s"
    return found | {"driver": driver(), "variables": variables()}


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return (ran.stdout or ran.stderr).strip().splitlines()[0] if ran.stdout or ran.stderr else "unknown"


def variables() -> dict[str, str]:
    """Those that change what kernels and collectives do."""
    kinds = ("NCCL_", "CUDA_", "PMOE_", "TORCH_NCCL_", "PYTORCH_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(kinds)}


def write(folder: Path, machine: dict[str, Any], outcomes: Sequence[Outcome], seconds: float) -> Path:
    """Both files, written anew after each step: what ends the ladder itself leaves what is known. The text's
    path."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"machine": machine, "seconds": round(seconds, 1), "steps": [each.as_json() for each in outcomes]}
    (folder / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    path = folder / "report.txt"
    path.write_text(text(machine, outcomes, seconds))
    return path


def text(machine: dict[str, Any], outcomes: Sequence[Outcome], seconds: float) -> str:
    lines = [f"{name}: {value}" for name, value in machine.items()]
    lines += ["", *map(line, outcomes), "", summary(outcomes, seconds)]
    for each in outcomes:
        if each.state in WRONG:
            lines += ["", f"==== {each.name}: {each.state}", f"means: {each.means}", f"look at: {each.look}"]
            lines += each.told.strip().splitlines()[-LEFT_OUT:]
    return "\n".join(lines) + "\n"


def line(outcome: Outcome) -> str:
    told = outcome.told.strip().splitlines()
    because = f": {told[-1]}" if told and outcome.state not in WRONG else ""
    return textwrap.shorten(
        f"{outcome.state:8} {outcome.seconds:5.1f} s  {outcome.name}{because}", 160, placeholder=" ..."
    )


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts: dict[str, int] = {}
    for each in outcomes:
        counts[each.state] = counts.get(each.state, 0) + 1
    return ", ".join(f"{count} {state}" for state, count in counts.items()) + f", {seconds:.0f} s"
