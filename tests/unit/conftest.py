"""Fixtures that several files share."""

from tests.browser import browser

__all__ = ["browser"]
