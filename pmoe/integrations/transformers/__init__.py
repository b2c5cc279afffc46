from pmoe.integrations.transformers.layers import configure, layers
from pmoe.integrations.transformers.registry import register

__all__ = ["configure", "layers"]

register()
