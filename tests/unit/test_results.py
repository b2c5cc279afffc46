"""The files under bench/results: those that its README lists exist, and old ones are named.

An old file is a warning and no failure, because a measurement needs a quiet machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
OLD = 30
"""Number of commits to the folders on which a result depends after which it is old."""

FOLDERS = ("engine", "schedule", "layer", "runners", "comm", "experts", "ordering", "gates")
RUN = tuple(f"pmoe/{name}" for name in FOLDERS)
KERNELS = ("cuda", "pmoe/kernels", "pmoe/runners")
DEPENDS = {
    "alone": KERNELS,
    "alternate": (*RUN, "pmoe/planner"),
    "balance": (*RUN, "pmoe/planner"),
    "beside": KERNELS,
    "choices": (*RUN, "pmoe/planner", "pmoe/measure"),
    "cluster": (*RUN, "pmoe/planner", "pmoe/measure"),
    "comet": KERNELS,
    "search": ("pmoe/choose", "pmoe/planner"),
    "decode": ("pmoe/experts", "pmoe/integrations/transformers"),
    "ep_implementation": (*RUN, "pmoe/integrations/transformers"),
    "esp": RUN,
    "fairseq": (*RUN, "pmoe/integrations/fairseq"),
    "flashdmoe": KERNELS,
    "gates": ("pmoe/gates", "pmoe/ordering", "pmoe/layer"),
    "gradients": (*RUN, "pmoe/training"),
    "gpu": RUN,
    "grouped_gemm": KERNELS,
    "lancet": (*RUN, "pmoe/graph"),
    "main_job": (*RUN, "pmoe/gates", "pmoe/experts"),
    "memory": (*RUN, "pmoe/planner"),
    "overhead": RUN,
    "overlap": RUN,
    "permute": KERNELS,
    "plain": RUN,
    "ranks": RUN,
    "reuse": (*RUN, "pmoe/planner"),
    "send_once": RUN,
    "wire_training": RUN,
    "wire_times": RUN,
    "train_lm": (*RUN, "pmoe/training", "pmoe/planner"),
}
"""Folders on which the numbers of a file depend, by the first word of its name."""

STORED = sorted(path for path in RESULTS.glob("*.json") if not path.name.endswith(".trace.json"))


def folders_of(path: Path) -> tuple[str, ...]:
    found = [folders for word, folders in DEPENDS.items() if re.match(rf"{word}(_|\.)", path.name)]
    assert len(found) == 1, f"{path.name}: DEPENDS has {len(found)} entries for it, not one"
    return found[0]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def age_of(path: Path) -> str | None:
    """Returns why a stored result is old; None if it is not."""
    code = json.loads(path.read_text(encoding="utf-8")).get("code") or {}
    commit = code.get("commit")
    if commit is None:
        return "measured before results held their commit"
    newer = git("rev-list", "--count", f"{commit}..HEAD", "--", *folders_of(path))
    if not newer:
        return f"its commit {commit[:12]} is not here"
    return f"{newer} commits to {', '.join(folders_of(path))} since" if int(newer) > OLD else None


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no history here")
def test_old_results_are_named() -> None:
    old = {path.name: why for path in STORED if (why := age_of(path)) is not None}
    if old:
        told = "\n".join(f"  {name}: {why}" for name, why in old.items())
        warnings.warn(f"measure again on a quiet machine:\n{told}", UserWarning, stacklevel=1)
    assert all(folders_of(path) for path in STORED)


def test_an_old_result_is_told_from_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plain_1_threads.json"
    for code, count, why in (
        (None, "0", "before results held"),
        ({"commit": None}, "0", "before results held"),
        ({"commit": "a" * 40}, str(OLD), None),
        ({"commit": "a" * 40}, str(OLD + 1), f"{OLD + 1} commits to pmoe/engine"),
        ({"commit": "a" * 40}, "", "is not here"),
    ):
        path.write_text(json.dumps({"code": code}))
        monkeypatch.setitem(globals(), "git", lambda *_, count=count: count)
        found = age_of(path)
        assert found is None if why is None else why in str(found)


def test_every_listed_file_is_there() -> None:
    """Results that need a GPU may be on the list of those that were never run."""
    for line in (RESULTS / "README.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        for name in re.findall(r"`([\w<>]+\.(?:json|png))`", line.split("|")[1]):
            pattern = re.sub(r"<\w+>", "*", name)
            if name[0] == "_":  # the end of the name before it
                pattern = f"*{pattern}"
            assert "<gpu>" in name or list(RESULTS.glob(pattern)), name
