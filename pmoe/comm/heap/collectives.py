"""Room for NCCL's collectives beside fused kernels, which keep multiprocessors until their peers come."""

from __future__ import annotations

import os

import torch.distributed as dist

from pmoe.comm.subgroups import backend_options
from pmoe.warn import warn_once


def warn_where_there_is_no_room(spare: int) -> None:
    """Warns once where a group of NCCL may take more than the ``spare`` multiprocessors, or clusters of them.

    With 0 the user says that no collective runs beside a layer.
    """
    if spare and not all(_fits(group, spare) for group in _groups()):
        warn_once(
            f"fused layers leave {spare} multiprocessors to collectives that run beside them, and NCCL may "
            "take more, or clusters, for which they must lie together: ranks may then wait for each other in "
            f"a circle, until a timeout. On all ranks set NCCL_MAX_CTAS={spare} and NCCL_CGA_CLUSTER_SIZE=0 "
            "(for one group config.max_ctas and config.cga_cluster_size of ProcessGroupNCCL.Options), or "
            "PMOE_SPARE_BLOCKS to another number: to 0 if there are no such collectives"
        )


def _groups() -> list[dist.ProcessGroup]:
    """Groups of NCCL with several ranks."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    return [each for each in groups if "nccl" in dist.get_backend(each) and dist.get_world_size(each) > 1]


def _fits(group: dist.ProcessGroup, spare: int) -> bool:
    blocks = _asked(group, "NCCL_MAX_CTAS", "max_ctas")
    return 0 <= blocks <= spare and 0 <= _asked(group, "NCCL_CGA_CLUSTER_SIZE", "cga_cluster_size") <= 1


def _asked(group: dist.ProcessGroup, variable: str, field: str) -> int:
    """Negative where NCCL chooses. The variable wins over the group's, in NCCL, too."""
    text = os.environ.get(variable, "")
    if text.isdecimal():
        return int(text)
    return int(getattr(getattr(backend_options(group), "config", None), field, -1))
