"""Programs as in a fresh Python that has imported torch and nothing else.

Each is a fork of one process that did: importing torch takes two seconds of a processor, which each test of
what pmoe imports would spend again.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_SERVER = """
import json, os, sys, traceback
import torch, torch.distributed
for line in sys.stdin:
    program, printed = json.loads(line)
    child = os.fork()
    if child == 0:
        code, file = 1, os.open(printed, os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, whose end of the pipe is then closed."""
    command = [sys.executable, "-W", "ignore", "-c", _SERVER]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(program: str) -> str:
    """What ``program`` printed, both streams together. AssertionError where it did not end with 0."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as printed:
        server.stdin.write(json.dumps([program, printed.name]) + "\n")
        server.stdin.flush()
        code, output = server.stdout.readline(), printed.read()
    assert code == "0\n", f"ended with {code.strip()}:\n{output}"
    return output
