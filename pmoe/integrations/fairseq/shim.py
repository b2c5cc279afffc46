"""Makes fairseq 0.12.2 importable in Python 3.11 and later.

fairseq's configurations have instances of dataclasses as default values of fields. Since Python 3.11 a
default is refused as mutable if its class has no hash, and a dataclass that compares by value has none.
Python 3.10 refused only lists, dicts and sets.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any


def allow_fairseq_defaults() -> None:
    """Gives fairseq's dataclasses that are defaults of fields the hash of plain objects.

    Call it before fairseq is imported. A second call does nothing, nor does any before Python 3.11.
    """
    if sys.version_info < (3, 11) or getattr(dataclasses, "_allows_fairseq_defaults", False):
        return
    get_field = dataclasses._get_field  # type: ignore[attr-defined]

    def get_field_of_fairseq(cls: type, name: str, *rest: Any) -> Any:
        """Does what dataclasses._get_field does, after giving the field's default a hash."""
        default = getattr(cls, name, None)
        if isinstance(default, dataclasses.Field):
            default = default.default
        kind: Any = type(default)
        is_fairseq = kind.__module__.partition(".")[0] == "fairseq"
        if is_fairseq and dataclasses.is_dataclass(kind) and vars(kind).get("__hash__", kind) is None:
            # Not a default_factory instead of the default: fairseq reads the default of the field.
            kind.__hash__ = object.__hash__  # type: ignore[method-assign]
        return get_field(cls, name, *rest)

    dataclasses._get_field = get_field_of_fairseq  # type: ignore[attr-defined]
    dataclasses._allows_fairseq_defaults = True  # type: ignore[attr-defined]


if __name__ == "__mp_main__":
    allow_fairseq_defaults()
