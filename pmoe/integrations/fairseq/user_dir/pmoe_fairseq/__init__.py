"""What fairseq imports for ``--user-dir``: the plugin, registered."""

import pmoe.integrations.fairseq.plugin  # noqa: F401
