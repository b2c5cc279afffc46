"""Files for values that later runs use again. Each file is one JSON object, written completely or not at all.

Files whose names pmoe chooses are in $PMOE_CACHE, or in ~/.cache/pmoe if that is not set.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pmoe.warn import warn_once

PathLike = str | os.PathLike[str]
T = TypeVar("T")


class CorruptFileError(ValueError):
    """The error for a file whose content cannot be used: no JSON, or a field is missing or of a wrong
    type.
    """


def cache_folder(folder: PathLike | None = None) -> Path:
    """Returns ``folder`` if it is set, or else $PMOE_CACHE, or else ~/.cache/pmoe.

    Raises RuntimeError if there is no home folder.
    """
    if folder is not None:
        return Path(folder)
    return Path(os.environ.get("PMOE_CACHE") or Path.home() / ".cache" / "pmoe")


def cache_path(key: Iterable[str], folder: PathLike | None = None) -> Path:
    """Returns the path of the file whose name is made of the parts of a key.

    folder: None stands for $PMOE_CACHE or ~/.cache/pmoe.

    Example: ("division", "NVIDIA H200", "v1") -> division_nvidia-h200_v1.json
    """
    slugs = (re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in key)
    return cache_folder(folder) / ("_".join(slugs) + ".json")


def load_json(path: PathLike, parse: Callable[[dict[str, Any]], T], remedy: str = "remove it") -> T:
    """Reads a JSON object from a file, and returns the value that ``parse`` makes of the object.

    parse: takes the object and returns the value. Raises ValueError for an unusable object.
    remedy: the end of error messages, which says what to do about an unusable file.

    Raises OSError if the file cannot be read, and CorruptFileError if it holds no JSON object. A ValueError
    of ``parse`` is raised with the path in front of its message.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path}: no JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path}: must be an object, not {type(content).__name__}; {remedy}")
    try:
        return parse(content)
    except ValueError as error:
        raise type(error)(f"{path}: {error}; {remedy}") from None


def read_or_default(otherwise: T, about: str, read: Callable[[], T]) -> T:
    """Returns the value that ``read`` returns, or ``otherwise`` if the file is missing or unusable.

    Warns if the file is unusable, but not if it is missing.

    otherwise: the value to return if the file is missing or unusable.
    about: the beginning of the warning.
    read: reads the file. It raises OSError or ValueError if the file is unusable.
    """
    try:
        return read()
    except FileNotFoundError:
        return otherwise
    except (OSError, ValueError) as error:
        warn_once(f"{about}: {error}", for_each_reason=True)
        return otherwise


def save_or_warn(about: str, save: Callable[[], object]) -> None:
    """Calls ``save``, which writes a file. If the file cannot be written, warns instead of raising OSError.

    Stored values save time in later runs, but no run needs them. Only rank 0 writes files, so an error would
    stop rank 0 while the other ranks wait for it.

    about: the beginning of the warning.
    """
    try:
        save()
    except OSError as error:
        warn_once(f"{about}: {error}", for_each_reason=True)


def save_json(path: PathLike, fields: Mapping[str, Any], **options: Any) -> None:
    """Writes a JSON file completely or not at all, so that no reader sees a part of it.

    The folder is created if it is missing.

    path: the file.
    fields: the content.
    options: arguments of `json.dumps`.

    Raises OSError if the file cannot be written, and TypeError or ValueError for values that JSON cannot
    hold.
    """
    path = Path(path)
    text = json.dumps(fields, indent=1, **{"allow_nan": False, **options}) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    # The draft has a unique name, because several ranks may save at once. It is in the same folder, because
    # only a rename within one disk is atomic.
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def typed(kind: Any, value: Any, name: str) -> Any:
    """Checks a value that was read from JSON, and converts it to the type of a dataclass's field.

    Args:
        kind: the type, such as int or dict[str, float]. It may be a dataclass, which is built from the
            entries of ``value``, a dict.
        value: the value as JSON gives it. A field of a dataclass with a default_factory may be missing.
        name: name of the field, for errors.

    Raises CorruptFileError if the value has another type, a number is negative or not finite, a field is
    missing, or the dataclass refuses its fields.
    """
    if isinstance(kind, types.UnionType):  # X | None
        if value is None:
            return None
        [kind] = [part_kind for part_kind in typing.get_args(kind) if part_kind is not types.NoneType]
    is_dict = typing.get_origin(kind) is dict
    if is_dict or dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise CorruptFileError(f"{name} ({value!r}) must be an object")
        kinds = dict.fromkeys(value, typing.get_args(kind)[1]) if is_dict else typing.get_type_hints(kind)
        missing = [field for field in kinds if field not in value]
        if not is_dict:  # fields that older files lack have a default_factory, which makes their value
            made = (part for part in dataclasses.fields(kind) if part.default_factory is dataclasses.MISSING)
            missing = [field.name for field in made if field.name not in value]
        if missing:
            raise CorruptFileError(f"{name} has no {', '.join(missing)}")
        converted = {
            field: typed(part_kind, value[field], f"{name}.{field}")
            for field, part_kind in kinds.items()
            if field in value
        }
        try:
            return converted if is_dict else kind(**converted)
        except ValueError as error:
            raise CorruptFileError(f"{name}: {error}") from None
    if typing.get_origin(kind) is typing.Literal:
        if value not in typing.get_args(kind):
            raise CorruptFileError(f"{name} ({value!r}) must be one of {', '.join(typing.get_args(kind))}")
    elif kind is not float:
        if type(value) is not kind:
            raise CorruptFileError(f"{name} ({value!r}) is of the wrong type")
    elif type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise CorruptFileError(f"{name} ({value!r}) must be a finite number of at least 0")
    return value if kind is not float else float(value)
