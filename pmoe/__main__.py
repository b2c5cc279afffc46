"""``python -m pmoe``: the same as the command ``pmoe``."""

import sys

from pmoe.cli import main

sys.exit(main())
