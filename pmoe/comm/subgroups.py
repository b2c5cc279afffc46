"""New process groups that are as an existing one."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Of a group's collectives; a new group would have torch's default. None where it cannot be read."""
    timeout: timedelta | None = getattr(backend_options(group), "_timeout", None)
    return timeout


def share_timeout(group: dist.ProcessGroup, others: Iterable[dist.ProcessGroup]) -> None:
    """Gives other groups the timeout of ``group``, where it can be read."""
    timeout = timeout_of(group)
    if timeout is not None:
        for each in others:
            dist.distributed_c10d._set_pg_timeout(timeout, each)


def backend_options(group: dist.ProcessGroup) -> Any:
    """What a group's backend was made with; None where it cannot be read."""
    try:
        backend: Any = group._get_backend(group._device_types[0])
        return backend.options
    except (AttributeError, IndexError, RuntimeError):
        return None


def options_like(group: dist.ProcessGroup) -> dict[str, Any]:
    """Arguments of torch.distributed.new_group, for ranks of ``group`` with its backend and timeout.

    Where the group has some of all processes, the others cannot be asked to take part.
    """
    options: dict[str, Any] = {"backend": dist.get_backend(group), "timeout": timeout_of(group)}
    some = dist.get_world_size(group) < dist.get_world_size()
    return options | ({"use_local_synchronization": True} if some else {})
