"""Serves the store at which the machines of a job meet, so that any training machine may die.

    python examples/cluster/rendezvous.py --port 29400     # on a machine that does not train

torchrun's c10d rendezvous keeps its state in a store on the machine that --rdzv-endpoint names. If that
machine trains too, the job ends when it dies. This program serves the store on another machine, such as a
login node or a pod of its own. It holds a few kilobytes and needs no GPU. Every torchrun is started with its
address:

    torchrun --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-conf is_host=0 ...
"""

from __future__ import annotations

import argparse
import signal

from torch.distributed import TCPStore


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves torchrun's rendezvous store until it is stopped.")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=29400)
    arguments = parser.parse_args()
    store = TCPStore(
        arguments.host, arguments.port, is_master=True, wait_for_workers=False, multi_tenant=True
    )
    print(f"machines may meet at port {store.port}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    # Blocked before the store starts threads, which inherit the mask: `sigwait` needs it blocked in all
    # threads.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
