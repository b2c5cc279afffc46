"""The engine: runs a schedule on the lanes of a device, between the two passes of one autograd Function."""

from pmoe.engine.run import Journal, Span, recording

__all__ = ["Journal", "Span", "recording"]
