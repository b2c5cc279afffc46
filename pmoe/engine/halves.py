"""The backward pass in two halves: gradients of inputs in one run of autograd, of parameters in a later one.

Zero-bubble pipeline schedules send the gradients of a stage's inputs on at once, and compute those of its
parameters when the stage would wait. They ask autograd for the two apart:

    torch.autograd.grad(y, x, dy, retain_graph=True)    G S C R O P and L: the tasks W, LW and XW are left
    torch.autograd.grad(y, parameters, dy)              W, LW and XW, from what the first half left

So each product and each all-to-all runs once. The second half communicates nothing, unless autograd brings
another tensor as the output's gradient: the ranks then agree in one reduction on whether its values are those
of the first half. If they are not, the whole pass runs again.

The first half leaves W's operands: T_DI, dT_DO, the activated T_M and its gradient dT_M, for all rows. Where
chunks share ring slots (memory_reuse), the next chunk overwrites these operands. The first half then computes
everything, and leaves the gradients of the parameters. Other runners than the pipeline do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from pmoe.comm.agreement import largest
from pmoe.comm.ranks import Ranks
from pmoe.engine.passes.backward import Backward, gradient_sums
from pmoe.engine.passes.base import ForwardState, SavedUnit, Unit
from pmoe.engine.plan.plan import PassModules, Plan
from pmoe.experts.products import GradientSum
from pmoe.gates.base import without_autocast
from pmoe.schedule.tasks import Schedule

NUM_INPUTS = 3
"""The first entries of `pmoe.engine.passes.base.Inputs.all`: x_TM, weight_TK and shared_weight_T."""

Halves = tuple[list[Tensor | None], Callable[[], list[Tensor | None]]]
"""The gradients of `Inputs.all`, and a function that computes those after the first `NUM_INPUTS`."""

RunPass = Callable[[Any, Tensor, Callable[..., list[Tensor | None]]], tuple[Tensor | None, ...]]
"""A function (ctx, grad_TM, backward) that runs ``backward``, and returns a gradient for each argument of the
autograd Function."""


@dataclass
class Later:
    """The record that the first half of a backward pass leaves for the second.

    grad_TM: (T, M), the output's gradient in the first half; version: its version counter then.
    of_inputs: the gradients of x_TM (as None: it is not asked for again), weight_TK and shared_weight_T.
    parameters: the function that computes the gradients of all parameters.
    """

    grad_TM: Tensor
    version: int
    of_inputs: list[Tensor | None]
    parameters: Callable[[], list[Tensor | None]]

    def is_for(self, grad_TM: Tensor, ranks: Ranks) -> bool:
        """Returns whether the first half ran for this gradient of the output; the same on all ranks.

        grad_TM: (T, M), the output's gradient that autograd brings now.
        ranks: the ranks of the layer.

        All ranks run the same program, so autograd brings the first half's own tensor to all or to none. If
        it brings another one, values are compared, and the ranks agree by a collective.
        """
        if grad_TM is self.grad_TM and grad_TM._version == self.version:
            return True
        differs = self.grad_TM._version != self.version or not torch.equal(grad_TM, self.grad_TM)
        stage = "comparing the output's gradients of both halves of a backward pass"
        return not any(largest(ranks, grad_TM.device, [differs], stage=stage))


def asked_gradients(ctx: Any, grad_TM: Tensor, run: RunPass) -> tuple[Tensor | None, ...]:
    """Computes what autograd asks for of a call whose graph is kept: one half of the gradients, or all.

    Returns a gradient for each argument of the autograd Function.

    ctx: the context of the call's autograd Function. Its attribute ``later`` holds what the first half left.
    grad_TM: (T, M), the gradient of the layer's output.
    run: runs a backward pass, with all checks around it.
    """
    start = len(ctx.needs_input_grad) - len(ctx.inputs.all)
    asks_for_x, asks_for_parameters = asked(ctx)
    keeps = _get_current_graph_task_keep_graph()
    later: Later | None = getattr(ctx, "later", None)
    if later is not None and not asks_for_x and later.is_for(grad_TM, ctx.ranks):
        num_parameters = len(ctx.inputs.all) - NUM_INPUTS
        of_parameters: list[Tensor | None] = [None] * num_parameters
        if asks_for_parameters:
            with without_autocast(grad_TM.device.type):
                of_parameters = later.parameters()
            # Autograd may make these tensors the parameters' gradients, so they are not kept for a third run.
            ctx.later = None
        return *(None,) * start, *later.of_inputs, *of_parameters
    ctx.later = None
    if asks_for_parameters or not keeps:
        return run(ctx, grad_TM, ctx.backward_from)

    def first_half(tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
        inputs_first = getattr(ctx.backward_from, "inputs_first", None)
        if inputs_first is None:
            found, parameters = all_at_once(ctx.backward_from, tensors, wanted, grad_TM)
        else:
            found, parameters = inputs_first(tensors, wanted, grad_TM)
        of_inputs = found[:NUM_INPUTS]
        ctx.later = Later(grad_TM, grad_TM._version, [None, *of_inputs[1:]], parameters)
        return [*of_inputs, *(None for _ in found[NUM_INPUTS:])]

    return run(ctx, grad_TM, first_half)


def asked(ctx: Any) -> tuple[bool, bool]:
    """Returns whether autograd asks for the gradient of the layer's input now, and for one of a parameter.

    ctx: the context of the call's autograd Function, whose next nodes get these gradients.
    """
    nodes = [node for node, _ in ctx.next_functions]  # of tensors only: an argument that is None has no entry
    first_parameter = len(nodes) - (len(ctx.inputs.all) - NUM_INPUTS)
    return runs_now(nodes[1]), any(runs_now(node) for node in nodes[first_parameter:])


def runs_now(node: Any) -> bool:
    """Returns whether the present run of autograd needs the gradient that this node of its graph gets.

    node: the node, or None if nothing needs a gradient.
    """
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch answers so for a leaf whose gradient torch.autograd.grad returns
        return True


def all_at_once(
    backward: Callable[..., list[Tensor | None]], tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor
) -> Halves:
    """Runs a backward pass that has no halves. Its second half returns the gradients of the parameters.

    backward: a `pmoe.engine.autograd.BackwardFunction`; the other arguments are its own.
    """
    found = backward(tensors, wanted, grad_TM)
    return found, lambda: found[NUM_INPUTS:]


class InputsFirst(Backward):
    """A backward pass in the engine that leaves the gradients of parameters to `parameter_gradients`.

    wanted: for each tensor of ``Inputs.all``, whether its gradient is wanted.
    all_tasks: the schedule of both halves.
    """

    wanted: Sequence[bool]
    all_tasks: Schedule
    schedule: Schedule
    result_TM: Tensor
    results: tuple[Tensor, ...]
    kept: dict[Unit, SavedUnit]
    sums: list[GradientSum | None]
    shared_sums: list[GradientSum | None]

    def __init__(self, plan: Plan, grad_TM: Tensor, saved: ForwardState) -> None:
        self.wanted = saved.wanted
        # The sums are allocated in the second half: a pipeline has several calls between the two halves.
        super().__init__(plan, grad_TM, replace(saved, wanted=[False] * len(saved.wanted)))
        self.all_tasks = self.schedule
        self.schedule = self.all_tasks.halves[0]

    @staticmethod
    def fits(modules: PassModules) -> bool:
        """Returns whether the backward pass of a layer can be run in two halves.

        modules: the layer's modules. Chunks that share ring slots overwrite what W reads. Experts that are a
            user's modules compute all gradients together. Gradients of copies of experts travel.
        """
        experts = (modules.experts, modules.shared_expert)
        are_modules = any(each is not None and each.are_modules for each in experts)
        return not (modules.rotates or are_modules or modules.stages.copies is not None)

    def run(self) -> list[Tensor | None]:
        """Runs all tasks but W, LW and XW. Returns the gradients of ``inputs.all``, without parameters."""
        found = super().run()
        # Frees what the second half does not read. Graphs of autograd may live long.
        self.result_TM = self.source_TM
        self.results = ()
        self.kept = {}
        return found

    def parameter_gradients(self) -> list[Tensor | None]:
        """Runs W, LW and XW. Returns the gradients of all parameters, in the order of ``inputs.all``."""
        inputs = self.saved.inputs
        wanted = inputs.like(self.wanted)
        additions = self.all_tasks.num_weight_gradients
        self.sums = gradient_sums(self.parameters, wanted.parameters, additions, self.pool.new)
        self.shared_sums = gradient_sums(inputs.shared_parameters, wanted.shared_parameters, 1, self.pool.new)
        self.schedule = self.all_tasks.halves[1]
        self.run_schedule()
        sums = (*self.sums, *self.shared_sums)
        return [*(None if total is None else total.result() for total in sums), *self.grad_hooks]
