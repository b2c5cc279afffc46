"""Changes a built layer: checks that its experts can be spread, and draws new random values."""

from __future__ import annotations

import functools

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pmoe.call.modules import LayerModules
from pmoe.comm.gradient_sum import sum_over_ranks
from pmoe.comm.grid import Grid
from pmoe.comm.topology import dimensions_of, grid_of_mesh
from pmoe.experts import initialise, seeded
from pmoe.experts.base import Experts
from pmoe.experts.operands import check_can_be_spread
from pmoe.experts.stacked import StackedExperts
from pmoe.experts.wrapper_checks import sampled
from pmoe.gates.base import Gate
from pmoe.layer.construct import check_fit


def check_spread(modules: LayerModules, mesh: DeviceMesh) -> None:
    """Raises ValueError or TypeError if a layer's experts cannot be spread over the ranks of a mesh.

    modules: the layer's modules and options. This rank must hold all experts, unless the layer is on the meta
        device and its experts are not modules.
    mesh: a device mesh with a dimension "ep", over which experts are spread, and perhaps a dimension "esp",
        over which each expert's hidden columns are split.
    """
    dimensions_of(mesh)
    options = modules.options
    like = modules.reference_parameter
    num_held = modules.experts.num_local_experts
    is_meta = like is not None and like.is_meta
    if modules.ranks.size > 1 and not is_meta:
        raise ValueError(
            f"a layer built over {modules.ranks.size} ranks must not be spread over other ranks: this rank "
            f"has only {num_held} of {options.num_experts} experts. Build it with mesh={mesh}, or "
            "for one rank (before init_process_group, or with a group of one rank)"
        )
    if modules.gradients is not None:
        raise ValueError("a layer must be spread before a GradientReducer is built for it")
    if modules.cache.row_bound is not None:
        raise ValueError("a layer must be spread before BoundedSteps is made: call remove() on it first")
    check_can_be_spread(modules.experts, modules.experts.hidden_dims() or ())
    if not modules.experts.are_modules and modules.experts.hidden_dims() is None:
        raise TypeError(
            f"experts ({type(modules.experts).__name__}) must be stacked or modules to be spread over ranks"
        )
    grid = grid_of_mesh(mesh)
    check_fit(options.num_experts, options.d_hidden, grid, 'the mesh\'s "ep"')
    if modules.experts.are_modules and grid.is_sharded:
        raise ValueError(
            'experts (modules) must not be split over "esp": pmoe cannot split the hidden columns of a module'
        )
    if modules.experts.are_modules and modules.ranks.size > 1:
        raise ValueError(
            "experts (modules) can be spread only if this rank has all of them, even on the meta device"
        )
    if options.pad_to_capacity and grid.is_sharded:
        raise ValueError('pad_to_capacity (True) must be False if experts are split over "esp"')


def share_ranks(experts: Experts, grid: Grid) -> None:
    """Stores a layer's ranks in the experts that are spread and split over them.

    If several ranks hold a copy of a parameter, each computes a part of its gradient. The experts then need
    the ranks to sum it.

    experts: the experts of this rank.
    grid: the ranks of the layer.
    """
    sum_shared = functools.partial(sum_over_ranks, grid.ep, "summing the gradients of what all experts share")
    stage = "summing the gradients of what the parts of an expert share"
    sum_whole = functools.partial(sum_over_ranks, grid.esp, stage)
    experts.use_ranks(sum_shared, sum_whole, grid.ep.size, grid.ep.rank * experts.num_local_experts)


def reset_parameters(modules: LayerModules) -> None:
    """Draws new random values for all parameters of a layer.

    A layer that is built under torch's current seed would get the same values. Every rank must call this
    function, with the same seed on all ranks.

    modules: the layer's modules and options.
    """
    first_expert = modules.grid.ep.rank * modules.experts.num_local_experts
    if isinstance(modules.gate, Gate):
        modules.gate.reset_parameters()
    else:
        reset_modules(modules.gate)
    for experts, first_number in (
        (modules.experts, first_expert),
        (modules.shared_expert, modules.options.num_experts),
    ):
        if isinstance(experts, StackedExperts):
            initialise(experts, first_expert=first_number)
        elif experts is not None and experts.are_modules:
            resets = [functools.partial(reset_modules, module) for module in experts.as_modules()]
            seeded(lambda i: resets[i](), first_expert=first_number, count=len(resets))  # noqa: B023
    modules.experts.reset_replicated()
    if modules.shared_gate is not None:
        reset_modules(modules.shared_gate)
    if modules.latent is not None:
        reset_modules(modules.latent)
    modules.experts.built = sampled(modules.experts) if modules.ranks.size > 1 else ""


def reset_modules(module: nn.Module) -> None:
    """Calls ``reset_parameters`` of a module and of each submodule, if they have such a method."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
