"""One step in this process: ``python -m tests.gpu.ladder.child "module:function a" seconds``."""

from __future__ import annotations

import faulthandler
import importlib
import sys
import traceback

from tests.gpu.ladder.climb import RAISED


def main(run: str, seconds: str) -> int:
    """seconds: after which the Python lines of all threads are written; the ladder ends the process."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(seconds))
    where, *arguments = run.split()
    module, function = where.split(":")
    try:
        getattr(importlib.import_module(module), function)(*arguments)
    except Exception:
        traceback.print_exc()
        return RAISED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
