"""Lets fairseq 0.12.2 be imported by Python 3.11 and later.

Its configurations have instances of dataclasses as defaults. Python 3.11 takes every instance whose class has
no hash for mutable, and a dataclass that compares by value has none; Python 3.10 looked for lists, dicts and
sets only.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any


def allow_fairseq_defaults() -> None:
    """Gives fairseq's own dataclasses, where they are defaults of fields, the hash that all objects have.
    Must run before fairseq is imported; does nothing before Python 3.11, and a second time."""
    if sys.version_info < (3, 11) or getattr(dataclasses, "_allows_fairseq_defaults", False):
        return
    get_field = dataclasses._get_field  # type: ignore[attr-defined]

    def get_field_of_fairseq(cls: type, name: str, *rest: Any) -> Any:
        default = getattr(cls, name, None)
        if isinstance(default, dataclasses.Field):
            default = default.default
        kind: Any = type(default)
        is_fairseq = kind.__module__.partition(".")[0] == "fairseq"
        if is_fairseq and dataclasses.is_dataclass(kind) and vars(kind).get("__hash__", kind) is None:
            # Not a default_factory in the default's place: fairseq reads the field's default.
            kind.__hash__ = object.__hash__  # type: ignore[method-assign]
        return get_field(cls, name, *rest)

    dataclasses._get_field = get_field_of_fairseq  # type: ignore[attr-defined]
    dataclasses._allows_fairseq_defaults = True  # type: ignore[attr-defined]


if __name__ == "__mp_main__":
    allow_fairseq_defaults()
