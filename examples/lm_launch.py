"""torchrun, except that a Ctrl-C which the ranks have answered with a checkpoint is not an error.

    python examples/lm_launch.py --standalone --nproc-per-node 2 examples/train_lm.py

torchrun passes SIGINT and SIGTERM on to the ranks, waits until they have ended (30 seconds at most), and
then dies of the signal with a traceback that buries what rank 0 said. This adds nothing and exits with 0.
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
