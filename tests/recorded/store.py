"""The JSON files beside this one: read, written, and compared with what the layer does now."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent

TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 3e-2}
"""Relative, of norms and inner products that another machine recorded."""

COUNTED = ("forward", "held", "peak")


def machine() -> dict[str, str]:
    """What the bits of a sum or a product may depend on."""
    found = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "model": _model(),
    }
    for library, pattern in {
        "mkl": r"Math Kernel Library Version (\S+)",
        "onednn": r"MKL-DNN v(\S+)",
    }.items():
        version = re.search(pattern, torch.__config__.show())
        found[library] = version.group(1) if version else "none"
    return found


def _model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read(group: str) -> dict[str, Any]:
    """{"machine": ..., "configurations": {name: {"is": ..., "ranks": [...]}}}"""
    path = HERE / f"{group}.json"
    if not path.exists():
        return {"machine": {}, "configurations": {}}
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def write(group: str, content: dict[str, Any]) -> None:
    (HERE / f"{group}.json").write_text(json.dumps(content, indent=1) + "\n")


def differences(
    recorded: dict[str, Any], found: Sequence[dict[str, Any]], same_machine: bool
) -> Iterator[str]:
    """Where the ranks differ from what was recorded, a line for each value: rank, field, both values."""
    for rank, (before, now) in enumerate(zip(recorded["ranks"], found, strict=True)):
        for field, value in before.items():
            for place, old, new in _leaves(field, value, now.get(field)):
                if not _same(field, old, new, same_machine):
                    yield f"rank {rank}, {place}: recorded {old}, now {new}"


def exceeds_memory(recorded: dict[str, Any], found: Sequence[dict[str, Any]]) -> bool:
    """Whether any rank was seen to hold more bytes than recorded."""
    ranks = zip(recorded["ranks"], found, strict=True)
    return any(
        not _same("memory", old["memory"][c], new["memory"][c], True) for old, new in ranks for c in COUNTED
    )


def _leaves(place: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        # An attribute more that a layer tells of a call is no difference; one gradient more is.
        names = old if place == "ran" else {**old, **new}
        for name in names:
            yield from _leaves(f"{place}.{name}", old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _leaves(f"{place}[{i}]", one, other)
    else:
        yield place, old, new


def _same(field: str, old: Any, new: Any, same_machine: bool) -> bool:
    if field == "memory":
        return isinstance(new, int) and new <= old
    if field == "results" and not same_machine and " | " in str(old) and " | " in str(new):
        return _near(old, new)
    return bool(old == new)


def _near(old: str, new: str) -> bool:
    """Of two results as `tests.recorded.step.described` tells of them, on different machines."""
    (kind, shape, _, _, norm, dot), other = old.split(), new.split()
    limit = TOLERANCE[kind] * (float(norm) + 1e-6)
    near = (abs(float(a) - float(b)) <= limit for a, b in zip((norm, dot), other[4:], strict=True))
    return [kind, shape] == other[:2] and all(near)
