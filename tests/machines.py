"""Machines of one job, on this one: network namespaces with an address, a hostname and a torchrun each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.links.link import INFINITE
from bench.links.real import interface, namespace, shared_medium

ROOT = Path(__file__).parents[1]
PORT = 29400
QUICK = "last_call_timeout=1,read_timeout=30,keep_alive_interval=1,keep_alive_max_attempt=3"
"""torchrun's answer to a death within seconds, where its defaults take half a minute."""


class Machine:
    """One namespace: what runs in it sees only its own address, and dies with it."""

    def __init__(self, node: int, folder: Path) -> None:
        self.node, self.address = node, f"10.78.0.{node + 1}"
        self.log = folder / f"machine{node}.log"

    def start(self, command: Sequence[object], **variables: object) -> subprocess.Popen[bytes]:
        """Runs a command there; what it prints is appended to ``log``."""
        inside = f'hostname machine{self.node} && exec "$@"'
        variables |= {"GLOO_SOCKET_IFNAME": interface(self.node), "TP_SOCKET_IFNAME": interface(self.node)}
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", namespace(self.node), "unshare", "--uts"]
                + ["sh", "-c", inside, "sh", *map(str, command)],
                env={**os.environ, **{name: str(value) for name, value in variables.items()}},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def join(
        self, head: Machine, nodes: str, *command: object, ranks: int = 1, **variables: object
    ) -> subprocess.Popen[bytes]:
        """Its part of a job whose machines meet at ``head``. nodes: as torchrun's --nnodes. command: a script
        and its arguments. variables: others of machine.sh."""
        return self.start(
            ["sh", ROOT / "examples/cluster/machine.sh", *command],
            RENDEZVOUS=f"{head.address}:{PORT}",
            JOB=variables.pop("JOB", "job"),
            NODES=nodes,
            RANKS=ranks,
            RDZV=QUICK,
            FLAGS=f"--local-addr={self.address} --monitor-interval=0.2",
            TORCHRUN=f"{sys.executable} -m torch.distributed.run",
            **variables,
        )

    def die(self) -> None:
        """Kills every process there, at once and without a word."""
        listed = subprocess.run(["ip", "netns", "pids", namespace(self.node)], capture_output=True, text=True)
        for process in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@contextlib.contextmanager
def machines(
    number: int, folder: Path, *, between: float = INFINITE, inside: float = INFINITE, ranks: int = 1
) -> Iterator[tuple[Machine, list[Machine]]]:
    """A machine where the others meet, and ``number`` others with ``ranks`` each. between, inside: bytes a
    second of a rank's part of the link between machines, and inside of one. All of them die at the end."""
    with shared_medium((number + 1) * ranks, between, ranks, inside):
        every = [Machine(node, folder) for node in range(number + 1)]
        try:
            head = every.pop()
            head.start([sys.executable, ROOT / "examples/cluster/rendezvous.py", "--port", PORT])
            yield head, every
        finally:
            for each in [head, *every]:
                each.die()
