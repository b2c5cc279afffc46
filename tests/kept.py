"""Files that tests make once and store in ~/.cache/pmoe-tests.

Each is named after everything that it is made from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

KEPT_SECONDS = 30 * 86400
"""A file that no test has asked for in so long goes when another is made."""


def digest(parts: Iterable[str | Path]) -> str:
    """16 digits for texts and for the contents of files, each beside its name."""
    told = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode()
        name = part.name if isinstance(part, Path) else ""
        told.update(f"{name}\0{len(content)}\0".encode() + content)
    return told.hexdigest()[:16]


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """The file ``name``. ``make`` writes it to the path that it is given, in one process of all that ask."""
    folder = kept_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with once(folder / name) as file:
        if file.exists():
            os.utime(file)
        else:
            _remove_old(folder)
            with tempfile.TemporaryDirectory(dir=folder) as unfinished:
                make(Path(unfinished, name))
                os.replace(Path(unfinished, name), file)
    return file


def kept_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pmoe-tests"


def _remove_old(folder: Path) -> None:
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # another process has removed it, or it is a folder
            if file.stat().st_mtime < time.time() - KEPT_SECONDS:
                file.unlink()


@contextlib.contextmanager
def once(path: Path) -> Iterator[Path]:
    """In the block no other process is in it for the same path."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
