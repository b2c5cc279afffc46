"""torchrun that ends with exit code 0 after Ctrl-C, if the ranks have written a checkpoint.

    python examples/lm_launch.py --standalone --nproc-per-node 2 examples/train_lm.py

torchrun passes SIGINT and SIGTERM on to the ranks and waits for them, at most 30 seconds. Then it fails with
a traceback of the signal, which hides the last lines of rank 0. This program prints no traceback.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException:
        sys.exit(0)
