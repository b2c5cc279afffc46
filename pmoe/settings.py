"""Settings of modules, such as a gate's ``top_k``: attributes whose changes must be the same on all ranks.

The ranks compare the settings of a layer's modules at the layer's first call. A user may set one later, as in
``layer.gate.top_k = 3``, and may do so on one rank only. So the assignment itself tells the layer to compare
again at its next call, and a call without a change has nothing to look up.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

PLAIN = (bool, int, float, str, torch.dtype)
"""The types of attributes that are settings. Attributes of other types are not compared."""

NO_SETTINGS = (
    "training",
    "is_parallelized",
    "built",
    "was_loaded",
    "may_be_equal",
    "are_equal",
    "keeps_gathered",
    "next_call",
)
"""Attributes of these types that are no settings, because they change neither results nor times."""


class Comparison(Protocol):
    """The record of a layer's last comparison between its ranks (`pmoe.call.modules.LayerCache`).

    compared: a tuple that the layer's next call compares with the present options; () if it must compare.
    """

    compared: tuple[object, ...]


_comparisons: weakref.WeakKeyDictionary[nn.Module, weakref.WeakValueDictionary[int, Comparison]]
_comparisons = weakref.WeakKeyDictionary()
"""For each module, the records of the layers that have compared its settings, by `id`."""


class ModuleWithSettings(nn.Module):
    """Base class of modules whose plain attributes are settings, which the ranks of a layer compare."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. If it may be a setting, layers compare their options again."""
        super().__setattr__(name, value)
        is_plain = value is None or isinstance(value, PLAIN)
        if is_plain and not name.startswith("_") and name not in NO_SETTINGS:
            for comparison in list(_comparisons.get(self, {}).values()):
                comparison.compared = ()


def note_comparison(module: nn.Module, comparison: Comparison) -> None:
    """Notes that a layer has compared the settings of a module between its ranks.

    module: the module.
    comparison: the layer's record, which must compare again after a setting of the module was set.
    """
    _comparisons.setdefault(module, weakref.WeakValueDictionary())[id(comparison)] = comparison
