from pmoe.integrations.transformers.registry import register

register()

from pmoe.integrations.transformers.layers import configure, layers  # noqa: E402

__all__ = ["configure", "layers"]
