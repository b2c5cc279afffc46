"""Messages that pmoe prints by itself: warnings, each once in a process, and a log of its choices."""

from __future__ import annotations

import logging
import re
import sys
import warnings

import torch.distributed as dist


class _OnStderr(logging.Handler):
    """Prints pmoe's log lines to stderr, on rank 0, in programs that do not configure logging."""

    def emit(self, record: logging.LogRecord) -> None:
        first = not (dist.is_available() and dist.is_initialized() and dist.get_rank())
        if first and not logging.getLogger().handlers:
            print(f"pmoe: {record.getMessage()}", file=sys.stderr, flush=True)


log: logging.Logger = logging.getLogger("pmoe")
"""The logger of pmoe, which shows its messages on stderr by default.

`logging.getLogger("pmoe").setLevel(logging.WARNING)` turns it off.
"""
log.addHandler(_OnStderr())
if log.level == logging.NOTSET:
    log.setLevel(logging.INFO)

GIVEN: set[str] = set()
"""Beginnings of the warnings of this process, and the reasons of fallbacks of which it has warned.

Clear it to have them issued again.
"""


def warn_once(
    message: str,
    category: type[Warning] = UserWarning,
    *,
    for_each_reason: bool = False,
    key: str | None = None,
) -> None:
    """Issues a warning, unless this process has issued one with the same text up to the first colon.

    for_each_reason: True compares the whole text, so that the same warning with another reason after the
        colon is issued, too.
    key: a text that is compared in place of the message; None for none.
    """
    if key is None:
        key = message if for_each_reason else message.partition(":")[0]
    if key not in GIVEN:
        GIVEN.add(key)
        warnings.warn(f"pmoe: {message}", category, stacklevel=2)


def warn_of_fallback(work: str, reason: str) -> None:
    """Warns that PyTorch operators do work on a GPU for which pmoe has kernels; once for each reason.

    If a reason keeps several kernels from running, the warning names only the work that came first.

    work: the work, as the beginning of a sentence, such as "tokens are routed".
    reason: why no kernel does this work.
    """
    warn_once(f"{work} without pmoe's kernels: {reason}", key=f"fallback: {reason}")


TESTED = {"torch": ((2, 13), (2, 14)), "transformers": ((5, 23), (5, 24))}
"""For each package, the oldest and the newest release (major, minor) with which pmoe's tests ran.

`make test-versions` installs these. A newer release is allowed, and pmoe warns of it once.
"""


def warn_of_untested_release(package: str, version: str) -> None:
    """Issues a warning, once in a process, if the version of a package is newer than the tested ones.

    package: a name in `TESTED`.
    version: the version that is installed, such as "2.15.0+cpu".
    """
    _, newest = TESTED[package]
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is not None and tuple(map(int, release.groups())) > newest:
        known = ".".join(map(str, newest))
        warn_once(
            f"{package} {version} is newer than {known}, the newest release with which pmoe was tested: if "
            f'something fails, pip install "{package}=={known}.*"'
        )


def warn_of_other_release(package: str, version: str, tested: str) -> None:
    """Warns once if the installed release of a package is not the one that was tested.

    package: the package's name on PyPI.
    version: the version that is installed, such as "0.19.8".
    tested: the release that was tested, such as "0.19".
    """
    if not version.startswith(f"{tested}."):
        warn_once(
            f"{package} {version} is not {tested}, with which pmoe was tested: if something fails, "
            f'pip install "{package}=={tested}.*"'
        )


def warn_of_old_name(old: str, new: str) -> None:
    """Warns that a module has a new name. The module with the old name calls this function on import.

    old, new: dotted names of the module.
    """
    message = f"{old} is called {new} now: the old name goes with pmoe 0.2"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
