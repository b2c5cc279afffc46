"""New process groups that are as an existing one, and the grid of ranks of a device mesh."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pmoe.arguments import check_kind
from pmoe.comm.ranks import Grid, Ranks


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


# ---- a layer's grid of ranks from a device mesh: "ep" across nodes, "esp" inside them (FSMoE's EP and ESP)


ACROSS, INSIDE = "ep", "esp"
"""Names of a mesh's dimensions."""


def dimensions_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Their names. Raises TypeError for what is no mesh."""
    check_kind(DeviceMesh, "a torch.distributed.device_mesh.DeviceMesh", mesh=mesh)
    return mesh.mesh_dim_names or ()


def grid_of_mesh(mesh: DeviceMesh) -> Grid:
    """Of a mesh with the dimensions "ep" and "esp", in either order, or one of them.

    Raises ValueError for other dimensions, TypeError for what is no mesh.
    """
    names = dimensions_of(mesh)
    if not names or not set(names) <= {ACROSS, INSIDE}:
        raise ValueError(
            f"mesh (dimensions {names or 'without names'}) must have the dimensions "
            f'"{ACROSS}" and "{INSIDE}", such as mesh["{ACROSS}", "{INSIDE}"]'
        )
    across = Ranks(mesh.get_group(ACROSS)) if ACROSS in names else Ranks.single()
    inside = Ranks(mesh.get_group(INSIDE)) if INSIDE in names else Ranks.single()
    if inside.size == 1 and across.group is not None:
        return Grid.of_group(across)
    ranks = Ranks((mesh._flatten() if mesh.ndim > 1 else mesh).get_group())
    if mesh.ndim > 1 and ranks.group is not None and ranks.group is not dist.group.WORLD:
        share_timeout(mesh.get_group(names[0]), [ranks.group])
    place = {rank: at for at, rank in enumerate(ranks.members)}
    by_inside = mesh.mesh.permute([names.index(name) for name in (INSIDE, ACROSS) if name in names])
    return Grid(ranks, across, inside, tuple(place[int(rank)] for rank in by_inside.flatten()))
