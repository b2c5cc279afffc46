"""Attributes of `MoELayer` under their old names, kept for one release."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pmoe.call.modules import LayerModules
    from pmoe.call.options import LayerOptions

NEW_NAMES = {"parts": "layer_modules", "spec": "options", "known": "cache", "_parts": "_layer_modules"}


class OldAttributes:
    """A layer's attributes under their old names. Reading one warns, and returns the attribute of the new
    name.
    """

    options: LayerOptions

    @property
    def layer_modules(self) -> LayerModules:
        """Declares `MoELayer.layer_modules` for type checkers, because `parts` reads it.

        It is never called, because `MoELayer` defines the property.
        """
        raise NotImplementedError

    @property
    def parts(self) -> LayerModules:
        """The old name of ``layer_modules``."""
        _warn("parts")
        return self.layer_modules

    @property
    def spec(self) -> LayerOptions:
        """The old name of ``options``."""
        _warn("spec")
        return self.options


def with_new_names(state: dict[str, Any]) -> dict[str, Any]:
    """Renames the attributes of a layer that was pickled by an older release to their new names.

    state: the pickled ``__dict__``: values by attribute name. Names that have not changed stay.
    """
    return {NEW_NAMES.get(name, name): value for name, value in state.items()}


def _warn(old: str) -> None:
    message = f"MoELayer.{old} is called MoELayer.{NEW_NAMES[old]} now: the old name goes with pmoe 0.2"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
