"""Makes ``import fairseq`` (0.12.2) work in Python 3.11 and later.

fairseq's configurations are dataclasses with fields whose defaults are instances of other dataclasses. Since
Python 3.11, a dataclass refuses a default that has no hash, and a dataclass that compares by value has no
hash. Python 3.10 refused only lists, dicts and sets as defaults.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any


def allow_fairseq_defaults() -> None:
    """Makes Python accept fairseq's dataclasses as defaults of dataclass fields, by giving them a hash.

    The hash is that of plain objects. Call this function before fairseq is imported. A second call does
    nothing, and neither does a call in Python 3.10, which needs no change.
    """
    if sys.version_info < (3, 11) or getattr(dataclasses, "_allows_fairseq_defaults", False):
        return
    get_field = dataclasses._get_field  # type: ignore[attr-defined]

    def get_field_of_fairseq(cls: type, name: str, *rest: Any) -> Any:
        """Reads a field of a dataclass, and makes sure that Python accepts the field's default.

        Python refuses defaults that cannot be hashed. So if the default is an object of a class of fairseq,
        the class gets a hash first. This function takes the place of dataclasses._get_field, and calls the
        original with the same arguments.

        cls: the dataclass.
        name: the name of the field.
        """
        default = getattr(cls, name, None)
        if isinstance(default, dataclasses.Field):
            default = default.default
        kind: Any = type(default)
        is_fairseq = kind.__module__.partition(".")[0] == "fairseq"
        if is_fairseq and dataclasses.is_dataclass(kind) and vars(kind).get("__hash__", kind) is None:
            # A default_factory would also be allowed, but fairseq reads the field's default.
            kind.__hash__ = object.__hash__  # type: ignore[method-assign]
        return get_field(cls, name, *rest)

    dataclasses._get_field = get_field_of_fairseq  # type: ignore[attr-defined]
    dataclasses._allows_fairseq_defaults = True  # type: ignore[attr-defined]


if __name__ == "__mp_main__":
    allow_fairseq_defaults()
