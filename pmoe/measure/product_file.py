"""The stored choices of kernels: one file for each device, torch and build of the kernels.

    {"format": 1, "device": "NVIDIA H200", "torch": "2.13.0", "build": "0123456789abcdef",
     "choices": {"forward bfloat16 experts=8 rows=4096 in=1024 out=4096": {
                     "choice": "pmoe", "seconds": {"pmoe": 0.0001, "grouped_mm": 0.0002}, "when": "2026-..."},
                 ...}}

They lie beside the profiles, in $PMOE_CACHE or ~/.cache/pmoe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pmoe.kernels.registry import MeasuredChoice
from pmoe.measure.store import cache_path, load_json, save_json
from pmoe.warn import warn_once

FORMAT = 1
"""Of the file. Rises with every change of what a field means."""


@dataclass(frozen=True, kw_only=True)
class ChoiceFile:
    """folder: finds it, or raises RuntimeError. whose: device, torch and build. names: of the candidates."""

    folder: Callable[[], Path]
    whose: Mapping[str, str]
    names: tuple[str, str]

    def path(self) -> Path:
        return cache_path(["kernels", *self.whose.values(), f"v{FORMAT}"], self.folder())

    def load(self) -> dict[str, MeasuredChoice]:
        """By a request's key; empty, with a warning, where the file cannot be used."""
        try:
            return load_json(self.path(), self._parsed)
        except FileNotFoundError:
            return {}
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no home
            warn_once(f"stored choices of kernels are not used: {error}", for_each_reason=True)
            return {}

    def save(self, added: Mapping[str, MeasuredChoice]) -> None:
        """Beside what is there; a warning where that fails, which must not stop one rank alone.

        Every rank saves, since each node may have a folder of its own. Of two at once one may lose what it
        added: it is measured again later.
        """
        held = self.load()
        if all(key in held and held[key].choice == each.choice for key, each in added.items()):
            return  # another rank of this node was here
        choices = {key: asdict(each) for key, each in sorted((held | dict(added)).items())}
        try:
            save_json(self.path(), {"format": FORMAT, **self.whose, "choices": choices})
        except (OSError, RuntimeError) as error:
            message = f"measured products could not be saved, and will be measured again: {error}"
            warn_once(message, for_each_reason=True)

    def _parsed(self, held: dict[str, Any]) -> dict[str, MeasuredChoice]:
        if held.get("format") != FORMAT:
            raise ValueError(f"format ({held.get('format')!r}) must be {FORMAT}")
        for name, here in self.whose.items():
            if held.get(name) != here:
                raise ValueError(f"{name} ({held.get(name)!r}) must be {here!r}")
        choices = held.get("choices")
        if not isinstance(choices, dict):
            raise ValueError(f"choices ({choices!r}) must be an object")
        return {key: self._choice(key, value) for key, value in choices.items()}

    def _choice(self, key: str, value: Any) -> MeasuredChoice:
        match value:
            case {"choice": str(choice), "seconds": dict(seconds)} if (
                {choice} <= set(self.names) == set(seconds)
            ):
                if all(isinstance(each, float) and 0 <= each < math.inf for each in seconds.values()):
                    return MeasuredChoice(choice=choice, seconds=seconds, when=str(value.get("when")))
        raise ValueError(f"{key} ({value!r}) must have the choice and seconds of {' and '.join(self.names)}")
