from pmoe.integrations.transformers.registry import register

register()

from pmoe.integrations.transformers.layers import configure, layers  # noqa: E402
from pmoe.integrations.transformers.padding import skip_padding  # noqa: E402

__all__ = ["configure", "layers", "skip_padding"]
