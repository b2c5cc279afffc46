"""Which parts a layer's passes are made of: the plain pass, and what only some layers need."""

from __future__ import annotations

import functools

from pmoe.engine.backward_pass import Backward
from pmoe.engine.forward_pass import Forward
from pmoe.engine.plan import Plan


def forward_of(plan: Plan, keep: bool) -> type[Forward]:
    """The forward pass of ``plan``. keep: whether a backward pass follows."""
    parts: list[type[Forward]] = []
    if plan.modules.hooks:
        from pmoe.engine.hooked import HookedForward

        parts.append(HookedForward)
    if plan.modules.shared is not None:
        from pmoe.engine.shared_expert import ForwardWithSharedExpert

        parts.append(ForwardWithSharedExpert)
    if plan.modules.stages.sharded:
        from pmoe.engine.sharded import ShardedForward

        parts.append(ShardedForward)
    if plan.forward.once is not None:
        from pmoe.engine.once import OnceForward

        parts.append(OnceForward)
    if keep and plan.restore.offloads:
        from pmoe.engine.offloaded import OffloadingForward

        parts.append(OffloadingForward)
    return _together((*parts, Forward))


def backward_of(plan: Plan) -> type[Backward]:
    """The backward pass of ``plan``."""
    parts: list[type[Backward]] = []
    if plan.modules.hooks:
        from pmoe.engine.hooked import HookedBackward

        parts.append(HookedBackward)
    if plan.modules.shared is not None:
        from pmoe.engine.shared_expert import BackwardWithSharedExpert

        parts.append(BackwardWithSharedExpert)
    if plan.modules.stages.sharded:
        from pmoe.engine.sharded import ShardedBackward

        parts.append(ShardedBackward)
    if plan.backward.once is not None:
        from pmoe.engine.once import OnceBackward

        parts.append(OnceBackward)
    if plan.restore.offloads or plan.rearranged:
        from pmoe.engine.offloaded import FetchingBackward

        parts.append(FetchingBackward)
    return _together((*parts, Backward))


@functools.cache
def _together(parts: tuple[type, ...]) -> type:
    """A class of several, each of which does its own and hands on to the next."""
    return parts[0] if len(parts) == 1 else type(parts[-1].__name__, parts[:-1], {})
