"""pmoe in transformers: importing this package registers "pmoe" as an implementation of experts."""

from pmoe.integrations.transformers.registry import register

# Before the other imports, which need a new release of transformers. If the release is too old, register()
# raises an error that says what to install.
register()

from pmoe.integrations.transformers.layers import configure, layers  # noqa: E402
from pmoe.integrations.transformers.padding import skip_padding  # noqa: E402
from pmoe.integrations.transformers.trainer import SpreadCheckpoints  # noqa: E402

__all__ = ["SpreadCheckpoints", "configure", "layers", "skip_padding"]
