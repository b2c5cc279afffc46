"""Parameters that FullyShardedDataParallel (FSDP1) manages: over how many ranks each of them is split.

FSDP1 joins the parameters of a module in one flat tensor, and each rank keeps a part of it:

    use_orig_params=True     parameters keep their names; a rank has a piece of each, which may be empty
    use_orig_params=False    the flat tensor is the only parameter

Both are plain tensors with values of this rank only. They do not show how many ranks hold the other values,
which only the wrappers in the model know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from pmoe.experts.base import Experts
from pmoe.layer import MoELayer


def num_parts(model: nn.Module) -> dict[int, int]:
    """Returns over how many ranks each parameter of FSDP1 is split, by the parameter's ``id()``.

        parts = ranks that share the flat tensor  x  ranks over which the parameter's experts are spread

    The second factor is 1 for parameters that belong to no experts. The first is 1 with NO_SHARD. The bias b2
    of experts that are split over the "esp" mesh counts as spread over "ep" alone, because the ranks of "esp"
    hold it whole.

    model: the model, with FullyShardedDataParallel around it or around parts of it.

    Raises ValueError if a flat tensor has parameters of experts on several ranks beside others, because its
    values are then held by different numbers of ranks.
    """
    spread = dict[nn.Module, int]()
    for layer in model.modules():
        if isinstance(layer, MoELayer) and layer.ranks.size > 1:
            spread |= dict.fromkeys(layer.experts.modules(), layer.ranks.size)
    parts = dict[int, int]()
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        handle = wrapper._handle
        if handle is None:  # this wrapper has no parameters of its own
            continue
        shards = handle.world_size if handle.uses_sharded_strategy else 1
        flat = handle.flat_param
        of_parameter = [_ranks_of_values(spread, info) for info in flat._param_infos]
        if flat._params is not None:  # use_orig_params=True
            pairs = zip(flat._params, of_parameter, strict=True)
            parts |= {id(parameter): shards * experts_over for parameter, experts_over in pairs}
        elif len(set(of_parameter)) == 1:
            parts[id(flat)] = shards * of_parameter[0]
        else:
            raise ValueError(
                "use_orig_params (False) of FullyShardedDataParallel must be True, because one flat parameter"
                f" has experts that are spread over {max(of_parameter)} ranks beside other parameters"
            )
    return parts


def _ranks_of_values(spread: Mapping[nn.Module, int], info: Any) -> int:
    """Returns over how many ranks the values of a parameter are spread, before FSDP1 splits them.

    spread: for each module of experts, the number of ranks over which its experts are spread.
    info: FSDP1's record of the parameter: its module, and its name there.
    """
    num_ranks = spread.get(info.module, 1)
    if info.param_name == "b2" and isinstance(info.module, Experts):
        return num_ranks // info.module.shard.count
    return num_ranks
