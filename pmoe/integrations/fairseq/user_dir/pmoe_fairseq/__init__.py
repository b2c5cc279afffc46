"""The module that fairseq imports for ``--user-dir``. Importing it registers pmoe's plugin."""

import pmoe.integrations.fairseq.plugin  # noqa: F401
