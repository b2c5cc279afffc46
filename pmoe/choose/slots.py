"""Limits for the rows that a rank receives. Ranks check the limits when they exchange row counts.

In a layer that reuses memory, chunks (micro-batches) share a few buffers, the ring slots. Two kinds of memory
are limited: a ring slot holds a fixed number of rows, and the host has room for a limited number of offloaded
rows.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.comm.counts import RankCounts, Slots
from pmoe.engine.buffers.arena import pool
from pmoe.schedule.buffer_sizes import ALIGNMENT
from pmoe.schedule.restore import Restore
from pmoe.warn import warn_once


def requested_slots(modules: LayerModules, x_TM: Tensor, degrees: tuple[int, ...]) -> Slots:
    """Returns how many rows a rank can receive. Ranks check these limits when they exchange row counts.

    Only layers that reuse memory have limits (`LayerModules.limits_rows`). There are two:

    - The ring slot: a buffer of fixed size that several chunks use one after the other. The rows of a chunk
      must fit into it. If they do not fit on some rank, all ranks cut the batch into more chunks. In layers
      that may copy busy experts, ring slots are smaller (`slack_with_copies`), and three more numbers of rows
      are limited (`Slots.total_slack`).
    - The free host memory. If a restore pair offloads the dispatched rows (T_DI), these rows must fit into
      it. If they do not fit on some rank, no rank offloads them (`without_host_offload`).

    modules: the modules and options of the layer.
    x_TM: (T, M), the input of the layer: T tokens, M = d_model. Only its device and the bytes of an element
        are used.
    degrees: the numbers of chunks that may be chosen for the call.
    """
    slots = modules.slots
    if degrees != modules.options.degrees:
        slots = replace(slots, degrees=modules.checked_degrees(degrees))
    if modules.may_offload_rows:
        # A bin is the smallest possible chunk. In each bin, the rows that are sent begin at an aligned
        # address, and so do the rows that stay on their rank. Each alignment may waste up to ALIGNMENT bytes.
        free = pool(x_TM.device).host.free_bytes - 2 * modules.bins_for(degrees) * ALIGNMENT
        row_bytes = modules.options.row_columns * x_TM.element_size()
        slots = replace(slots, host_rows=max(free, 0) // row_bytes)
    return slots


def without_host_offload(restore: Restore, counts: RankCounts) -> Restore:
    """Returns a restore pair for which the host memory of all ranks is enough.

    If ``restore`` offloads the dispatched rows (T_DI) and any rank lacks host memory for them, a warning is
    issued, and backward sends T_DI again. Backward gets the hidden activation (T_M) as in ``restore``. In all
    other cases ``restore`` is returned unchanged.

    restore: the restore pair that was chosen.
    counts: the row counts after the ranks have exchanged them. They also say whether any rank lacks host
        memory.
    """
    if not counts.host_shortage or restore.dispatched != "offload":
        return restore
    if counts.needs_grad:  # without a backward pass nothing is offloaded
        warn_once(
            "too little host memory is left on some rank to offload T_DI: it is sent again in backward, one "
            'more all-to-all for each chunk. Free host memory, or choose memory_reuse="S2" or "S4"'
        )
    return Restore("communicate", restore.hidden)
