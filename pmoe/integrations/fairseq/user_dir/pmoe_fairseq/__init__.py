"""The module that fairseq imports for ``--user-dir``; importing it registers the plugin."""

import pmoe.integrations.fairseq.plugin  # noqa: F401
