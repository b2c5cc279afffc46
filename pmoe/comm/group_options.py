"""Reads a process group's backend, options and timeout, so that new groups can be made with them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout of a group's collectives; None if it cannot be read.

    New groups are made with this timeout. Otherwise torch would give them its default, not the user's.
    """
    timeout: timedelta | None = getattr(backend_options(group), "_timeout", None)
    return timeout


def has_peers(group: dist.ProcessGroup) -> bool:
    """Returns whether a group has other ranks. False for the "fake" group of torch, which has none."""
    return dist.get_backend(group) != "fake"


def share_timeout(group: dist.ProcessGroup, others: Iterable[dist.ProcessGroup]) -> None:
    """Gives ``others`` the timeout of ``group``. Does nothing if that timeout cannot be read."""
    timeout = timeout_of(group)
    if timeout is not None:
        for other in others:
            dist.distributed_c10d._set_pg_timeout(timeout, other)


def backend_options(group: dist.ProcessGroup) -> Any:
    """Returns the options with which a group's backend was made; None if they cannot be read."""
    try:
        backend: Any = group._get_backend(group._device_types[0])
        return backend.options
    except (AttributeError, IndexError, RuntimeError):
        return None


def options_like(group: dist.ProcessGroup) -> dict[str, Any]:
    """Returns arguments of torch.distributed.new_group for a group like ``group``: its backend and timeout.

    If ``group`` does not have all processes, use_local_synchronization is set, so that only members call
    new_group.
    """
    options: dict[str, Any] = {"backend": dist.get_backend(group), "timeout": timeout_of(group)}
    some = dist.get_world_size(group) < dist.get_world_size()
    return options | ({"use_local_synchronization": True} if some else {})
