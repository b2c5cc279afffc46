"""Which parts a layer's passes are made of: the plain pass, and what only some layers need."""

from __future__ import annotations

import functools

from pmoe.engine.backward_pass import Backward
from pmoe.engine.forward_pass import Forward
from pmoe.engine.plan import Plan


def forward_of(plan: Plan, keep: bool) -> type[Forward]:
    """The forward pass of ``plan``. keep: whether a backward pass follows."""
    parts = _special_parts(plan, moves=keep and plan.restore.offloads)
    return _together((*(forward for forward, _ in parts), Forward))


def backward_of(plan: Plan) -> type[Backward]:
    """The backward pass of ``plan``."""
    parts = _special_parts(plan, moves=plan.restore.offloads or plan.rearranged)
    return _together((*(backward for _, backward in parts), Backward))


def _special_parts(plan: Plan, *, moves: bool) -> list[tuple[type[Forward], type[Backward]]]:
    """moves: T_DI or T_M is copied away, or fetched from where forward kept it."""
    parts: list[tuple[type[Forward], type[Backward]]] = []
    if plan.modules.hooks is not None:
        from pmoe.engine.hooked import HookedBackward, HookedForward

        parts.append((HookedForward, HookedBackward))
    if plan.modules.shared is not None:
        from pmoe.engine.shared_expert import BackwardWithSharedExpert, ForwardWithSharedExpert

        parts.append((ForwardWithSharedExpert, BackwardWithSharedExpert))
    if plan.modules.stages.sharded:
        from pmoe.engine.sharded import ShardedBackward, ShardedForward

        parts.append((ShardedForward, ShardedBackward))
    if plan.forward.once is not None:
        from pmoe.engine.once import OnceBackward, OnceForward

        parts.append((OnceForward, OnceBackward))
    if moves:
        from pmoe.engine.offloaded import FetchingBackward, OffloadingForward

        parts.append((OffloadingForward, FetchingBackward))
    return parts


@functools.cache
def _together(parts: tuple[type, ...]) -> type:
    """A class of several, each of which does its own and hands on to the next."""
    return parts[0] if len(parts) == 1 else type(parts[-1].__name__, parts[:-1], {})
