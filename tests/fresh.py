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
for line in sys.stdin:
    program, printed = json.loads(line)
    child = os.fork()
    if child == 0:
        code, file = 1, os.open(printed, os.O_WRONLY)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
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


class Server:
    """A process that runs ``imports``, and whose forks run programs. It ends with this process."""

    def __init__(self, imports: str) -> None:
        self._command = [sys.executable, "-W", "ignore", "-c", imports + _SERVER]
        self._process: subprocess.Popen[str] | None = None

    def run(self, program: str) -> tuple[int, str]:
        """The code that ``program`` ended with, and what it printed, both streams together."""
        self._process = process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            with tempfile.NamedTemporaryFile("r", encoding="utf-8") as printed:
                process.stdin.write(json.dumps([program, printed.name]) + "\n")
                process.stdin.flush()
                return int(process.stdout.readline()), printed.read()
        except BaseException:  # a time limit: the answer to this program must not be taken for the next one's
            process.kill()
            self._process = None
            raise

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self._command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


@functools.cache
def _server() -> Server:
    return Server("import torch, torch.distributed\n")


def run(program: str) -> str:
    """What ``program`` printed, both streams together. AssertionError where it did not end with 0."""
    code, output = _server().run(program)
    assert code == 0, f"ended with {code}:\n{output}"
    return output
