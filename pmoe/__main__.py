"""The command ``python -m pmoe``, which does the same as ``pmoe``."""

import sys

from pmoe.cli import main

sys.exit(main())
