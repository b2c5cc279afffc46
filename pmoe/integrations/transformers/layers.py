"""The layer of pmoe behind an experts module. It is found by the module and is no part of it: state_dict,
copies and pickles of a model know nothing of it, and two models share nothing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from pmoe.comm.ranks import Ranks
from pmoe.experts.base import Experts
from pmoe.integrations.statistics import finders
from pmoe.integrations.transformers.borrowed import BorrowedExperts, NormedExperts
from pmoe.integrations.transformers.options import are_same, make_layer, options
from pmoe.layer import MoELayer


@dataclass(frozen=True)
class _Built:
    """A layer and what it was built for. turn: of threads that share a model (a server's), for a layer holds
    the routing and the parameters of one call."""

    sizes: Mapping[str, Any]
    group: dist.ProcessGroup | None
    options: Mapping[str, Any]
    layer: MoELayer
    turn: threading.Lock = field(default_factory=threading.Lock)


_layers: weakref.WeakKeyDictionary[nn.Module, _Built] = weakref.WeakKeyDictionary()


def layers(model: nn.Module) -> dict[str, MoELayer]:
    """The layers that run a model's experts, by the names of their modules; those that have been called.

    To look at: ``row_counts``, ``tokens_per_expert``, ``predict_memory``, ``traffic`` of the last forward.
    """
    return {name: _layers[each].layer for name, each in model.named_modules() if each in _layers}


if layers not in finders:
    finders.append(layers)  # `pmoe.stats` names them as well


@contextmanager
def layer_of(
    module: nn.Module, experts: Experts, top_k: int, num_experts: int, group: dist.ProcessGroup | None
) -> Iterator[MoELayer]:
    """Built at the first call, and again where sizes, ranks or `configure`'s options are others since. One
    thread has it at a time."""
    inner = experts.inner if isinstance(experts, NormedExperts) else experts
    assert isinstance(inner, BorrowedExperts)
    sizes = {
        "d_model": inner.w2.shape[1],
        "d_hidden": inner.num_hidden,
        "num_experts": num_experts,
        "top_k": top_k,
    }
    built, chosen = _layers.get(module), options()
    is_same = built is not None and (built.sizes, built.group) == (sizes, group)
    if built is None or not is_same or not are_same(built.options, chosen):
        layer = make_layer(experts, Ranks.alone() if group is None else group, sizes, chosen)
        built = _layers[module] = _Built(sizes, group, chosen, layer)
    with built.turn:
        yield built.layer
