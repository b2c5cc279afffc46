"""The backward pass in two halves: one call for gradients of inputs, a later one for parameters.

Zero-bubble pipeline schedules need a stage's input gradients at once, for the previous stage, and compute its
parameter gradients later, when the stage would otherwise wait. So they call autograd twice:

    torch.autograd.grad(y, x, dy, retain_graph=True)    runs all tasks but those of parameter gradients
    torch.autograd.grad(y, parameters, dy)              runs the tasks of parameter gradients: W for experts,
                                                        LW for experts' rows that stay on the rank, XW for the
                                                        shared expert

So each matrix product and each all-to-all runs once. The second call must have the same output gradient dy as
the first call. If autograd passes a different tensor object, each rank compares the values of the two
tensors. One reduction then tells all ranks whether the values differ on any rank. If they differ, the whole
pass runs again. If autograd passes the same object, the second half communicates nothing.

Between the halves, the operands of the parameter gradients are kept for all rows: the experts' inputs T_DI,
the gradients of their outputs dT_DO, T_M after the nonlinearity, and the gradient dT_M. If chunks share
buffers (``memory_reuse``), the next chunk overwrites these operands. In that case the first half computes all
gradients, and keeps the gradients of the parameters for the second half. All implementations of a call other
than the pipeline (`pmoe.runners`) do the same.

On some ranks only the gate may be trained, while other ranks train their experts, too. On such a rank the
second call asks only for the gradient of the gate, which the first half has computed. The rank still divides
its backward pass into the same two calls as the other ranks, and its second call communicates no more than
theirs.
"""

from __future__ import annotations

import functools
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
"""Number of a call's tensors that are not parameters: x_TM, weight_TK and shared_weight_T.

They come first in the list of all tensors, `pmoe.engine.passes.base.Inputs.all`.
"""

Halves = tuple[list[Tensor | None], Callable[[], list[Tensor | None]]]
"""Type of the result of a first half: the gradients of `Inputs.all`, and a function for the second half.

The function computes and returns the gradients of the parameters: the tensors of `Inputs.all` after the first
`NUM_INPUTS`.
"""

RunPass = Callable[[Any, Tensor, Callable[..., list[Tensor | None]]], tuple[Tensor | None, ...]]
"""Type of a function (ctx, grad_TM, backward) that runs ``backward`` with all checks around it.

The function returns a gradient for each argument of the autograd Function.
"""


@dataclass
class Later:
    """The record that the first half of a backward pass keeps for the second half.

    grad_TM: (T, M), the output's gradient in the first half, for T tokens with M = d_model columns.
    version: the version counter of grad_TM in the first half, to detect changes in place.
    of_inputs: the gradients of x_TM, weight_TK and shared_weight_T. The entry of x_TM is None, because
        autograd does not ask for this gradient again.
    parameters: the function that computes the gradients of all parameters, or returns copies of them.
    """

    grad_TM: Tensor
    version: int
    of_inputs: list[Tensor | None]
    parameters: Callable[[], list[Tensor | None]]

    def is_for(self, grad_TM: Tensor, ranks: Ranks) -> bool:
        """Returns whether both halves get the same gradient of the output. All ranks return the same.

        The result is True if autograd passes the tensor object of the first half, and the tensor was not
        changed since then. All ranks run the same program, so this is the case on all ranks or on none. In
        the other case each rank compares the values of the two tensors. A collective then makes the result
        False on all ranks if the values differ on any rank.

        grad_TM: (T, M), the output's gradient that autograd passes to the second half, for T tokens with M =
            d_model columns.
        ranks: the ranks of the layer.
        """
        if grad_TM is self.grad_TM and grad_TM._version == self.version:
            return True
        differs = self.grad_TM._version != self.version or not torch.equal(grad_TM, self.grad_TM)
        stage = "comparing the output's gradients of both halves of a backward pass"
        return not any(largest(ranks, grad_TM.device, [differs], stage=stage))


def asked_gradients(ctx: Any, grad_TM: Tensor, run: RunPass) -> tuple[Tensor | None, ...]:
    """Computes the gradients that autograd asks for: of inputs, of parameters, or of both.

    The function is for a call whose autograd graph is kept (``retain_graph=True``), so that several backward
    calls may follow. Returns a gradient for each argument of the autograd Function; None for an argument for
    which autograd asks no gradient.

    ctx: the context of the call's autograd Function. If an earlier backward call returned only the gradients
        of inputs, it left a record in ``ctx.later`` (`Later`). The gradients of parameters are now computed
        from this record.
    grad_TM: (T, M), the gradient of the layer's output, for T tokens with M = d_model columns.
    run: function (ctx, grad_TM, backward) that runs the function ``backward``, and the checks that every
        backward pass needs.
    """
    start = len(ctx.needs_input_grad) - len(ctx.inputs.all)
    has_parameters = any(ctx.needs_input_grad[start + NUM_INPUTS :])
    keeps = _get_current_graph_task_keep_graph()
    asks_for_all, asks_for_x, asks_for_parameters = asked(ctx)
    later: Later | None = getattr(ctx, "later", None)
    if later is not None and not (asks_for_all or asks_for_x):
        parameters = later.parameters if asks_for_parameters else no_gradients(ctx)
        if later.is_for(grad_TM, ctx.ranks):
            with without_autocast(grad_TM.device.type):
                of_parameters = parameters()
            if keeps and asks_for_parameters:
                # Autograd may make these tensors the parameters' gradients, so a third call gets copies. It
                # must not run the pass again: a rank that trains only its gate would not take part.
                later.parameters = functools.partial(copies_of, of_parameters)
                of_parameters = copies_of(of_parameters)
            if not keeps:
                ctx.later = None
            return *(None,) * start, *later.of_inputs, *of_parameters
    ctx.later = None
    # `y.backward()` asks for everything, so no second half follows. No rank may take such a call for a first
    # half, not even a rank whose input alone needs a gradient.
    if asks_for_all or not asks_for_x or not keeps:
        return run(ctx, grad_TM, ctx.backward_from)

    def with_record(tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor) -> list[Tensor | None]:
        parameters: Callable[[], list[Tensor | None]]
        inputs_first = getattr(ctx.backward_from, "inputs_first", None)
        if asks_for_parameters:
            found = ctx.backward_from(tensors, wanted, grad_TM)
            # Autograd may change the tensors that it gets, and a later call may ask for other parameters.
            parameters = functools.partial(copies_of, copies_of(found[NUM_INPUTS:]))
        elif inputs_first is None or not has_parameters:
            found, parameters = all_at_once(ctx.backward_from, tensors, wanted, grad_TM)
        else:
            found, parameters = inputs_first(tensors, wanted, grad_TM)
        ctx.later = Later(grad_TM, grad_TM._version, [None, *found[1:NUM_INPUTS]], parameters)
        return found if asks_for_parameters else [*found[:NUM_INPUTS], *no_gradients(ctx)()]

    return run(ctx, grad_TM, with_record)


def copies_of(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns a copy of each tensor of a list, and None for None."""
    return [None if gradient is None else gradient.clone() for gradient in gradients]


def no_gradients(ctx: Any) -> Callable[[], list[Tensor | None]]:
    """Returns a function that computes no gradients: it returns None for each parameter.

    It takes the place of the second half in a call in which autograd asks for no parameter's gradient.

    ctx: the context of the call's autograd Function.
    """
    return lambda: [None] * (len(ctx.inputs.all) - NUM_INPUTS)


def asked(ctx: Any) -> tuple[bool, bool, bool]:
    """Returns three bools: which gradients autograd asks for in the running backward call.

        1. whether it asks for all gradients
        2. whether it asks for the gradient of the layer's input
        3. whether it asks for the gradient of any parameter

    Autograd asks for all gradients in `y.backward()`, and for some in `torch.autograd.grad(y, inputs)`. The
    anchor (`pmoe.engine.autograd.make_anchor`) shows which of the two it is: it is an input of the call, but
    no user has it, so no user can ask for its gradient alone.

    ctx: the context of the call's autograd Function. Its ``next_functions`` are the nodes that get the
        gradients. Autograd asks for a gradient if it will run the node.
    """
    nodes = [node for node, _ in ctx.next_functions]  # an argument that is None has no entry in this list
    first_parameter = len(nodes) - (len(ctx.inputs.all) - NUM_INPUTS)
    anchor, of_rows = nodes[:2]
    if getattr(of_rows, "passes_rows", False):  # the gate's node, which also runs for the gate's weight
        of_rows = of_rows.next_functions[0][0]
    return runs_now(anchor), runs_now(of_rows), any(runs_now(node) for node in nodes[first_parameter:])


def runs_now(node: Any) -> bool:
    """Returns whether autograd, in the backward call that is now running, will run a node of its graph.

    If so, the gradient that the node receives is needed.

    node: the node; None for a tensor that needs no gradient.
    """
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch raises this for a leaf whose gradient torch.autograd.grad returns
        return True


def all_at_once(
    backward: Callable[..., list[Tensor | None]], tensors: list[Any], wanted: Sequence[bool], grad_TM: Tensor
) -> Halves:
    """Runs a whole backward pass at once, for a runner that cannot divide it into two halves.

    In a divided pass the first half computes the gradients of inputs, and the second half the gradients of
    parameters. Such a pass returns the gradients of inputs and the function that runs the second half. This
    function also returns two values: the gradients of all tensors, and a function that only returns the
    gradients of parameters, which are already computed.

    backward: function that runs the pass, a `pmoe.engine.autograd.BackwardFunction`.
    tensors: the saved tensors.
    wanted: for each tensor of `Inputs.all`, whether its gradient is wanted.
    grad_TM: (T, M), the gradient of the output, for T tokens with M = d_model columns.
    """
    found = backward(tensors, wanted, grad_TM)
    return found, lambda: found[NUM_INPUTS:]


class InputsFirst(Backward):
    """A backward pass in two halves: `run` for gradients of inputs, then `parameter_gradients`.

    wanted: for each tensor of `Inputs.all`, whether its gradient is wanted.
    all_tasks: the schedule of all tasks, of both halves.
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
        # The base class is told that no gradient is wanted, so that it allocates no memory for their sums.
        # `parameter_gradients` allocates it later, because a pipeline runs several other calls between the
        # two halves, and the memory would be idle during these.
        super().__init__(plan, grad_TM, replace(saved, wanted=[False] * len(saved.wanted)))
        self.all_tasks = self.schedule
        self.schedule = self.all_tasks.halves[0]

    @staticmethod
    def fits(modules: PassModules) -> bool:
        """Returns whether the backward pass of a layer can be run in two halves.

        The result is False if

        - chunks share buffers (``memory_reuse``), because the next chunk overwrites the operands of the
          parameter gradients;
        - experts are a user's modules, because autograd computes all gradients of a module together;
        - a call has copies of busy experts (``balance``), because the copies' gradients must be sent to other
          ranks.

        modules: the layer's modules.
        """
        experts = (modules.experts, modules.shared_expert)
        are_modules = any(each is not None and each.are_modules for each in experts)
        return not (modules.rotates or are_modules or modules.stages.copies is not None)

    def run(self) -> list[Tensor | None]:
        """Runs the first half: all tasks but those of parameter gradients.

        Tasks of parameter gradients are W for experts, LW for experts' rows that stay on this rank, and XW
        for the shared expert.

        Returns a list with an entry for each tensor of `Inputs.all`; the entries of parameters are None.
        """
        found = super().run()
        # Frees tensors that the second half does not read, because autograd may keep its graph for long.
        self.result_TM = self.source_TM
        self.results = ()
        self.kept = {}
        return found

    def parameter_gradients(self) -> list[Tensor | None]:
        """Runs the second half: the tasks of parameter gradients.

        The tasks are W for experts, LW for experts' rows that stay on this rank, and XW for the shared
        expert.

        Returns the gradients of all parameters, in the order of `Inputs.all`.
        """
        inputs = self.saved.inputs
        wanted = inputs.like(self.wanted)
        additions = self.all_tasks.num_weight_gradients
        self.sums = gradient_sums(self.parameters, wanted.parameters, additions, self.pool.new)
        self.shared_sums = gradient_sums(inputs.shared_parameters, wanted.shared_parameters, 1, self.pool.new)
        self.schedule = self.all_tasks.halves[1]
        self.run_schedule()
        sums = (*self.sums, *self.shared_sums)
        return [*(None if total is None else total.result() for total in sums), *self.grad_hooks]
