"""Runs a compiled graph: measures it in the first steps, then runs it in the best predicted order.

All graphs of the same layers and direction, for any input shapes, form one program. A range is a run of
consecutive operator calls that is cut into parts of the batch. In the first steps of a program, ranks first
agree on something, then each rank runs its graph:

    step   ranks agree on                             then each rank runs
    1      whether they have the same operators;      the graph in k parts, for each k; then the graph as
           the largest number of parts                traced, which gives the results of the step
    2      the ranges, which rank 0 has chosen        the graph with these ranges cut
    3      the costs that rank 0 has measured         the graph in the order that follows from these costs

Step 2 is left out if no range is cut. Steps 1 and 2 measure the costs of operators. Measured costs differ
between ranks, but all ranks must run operators in the same order. So all ranks use the costs of rank 0.

All ranks run these steps together. Later steps need no agreement, because one rank may then compile a graph
for other shapes while the other ranks do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from pmoe.comm.agreement import digest, from_first, gathered, same
from pmoe.comm.failures import leave
from pmoe.comm.ranks import Ranks
from pmoe.decide.begin import check_ranks
from pmoe.graph import weight_gradients
from pmoe.graph.buckets import Bucket, divide_into_buckets
from pmoe.graph.cost import Cost, Costs, Profiled, costs_of, instructions_of, link_of, packed_bytes
from pmoe.graph.graph_trial import GraphTrial
from pmoe.graph.hand_over import GradientSteps, GraphInputs, pending
from pmoe.graph.instructions import Instruction, peak_bytes, total_seconds
from pmoe.graph.lower import (
    OPS,
    calls_of,
    communicates,
    failed_at,
    handed_over,
    is_result,
    label,
    lowered,
    merge_weight_gradients,
    name_all,
    run_whole,
)
from pmoe.graph.operators import LAYERS, modules_of
from pmoe.graph.options import Options
from pmoe.graph.plan import GraphSplit, RangePlan, backward_axes
from pmoe.graph.ranges import PartCosts, lags, solve, whole_ranges
from pmoe.graph.reductions import Gradient, by_source, places_in, plan_hand_overs, returned

CHECKS = (torch.ops.aten._assert_scalar.default, torch.ops.aten.sym_constrain_range_for_size.default)
"""Operators in a trace that check that row counts are not negative. They are removed from graphs."""

Key = tuple[str, tuple[int, ...]]
"""Type of a program's key: its direction, and the numbers of its layers that communicate, in order."""


@dataclass
class Program:
    """State that all graphs of the same layers and the same direction share, for any input shapes.

    key: the direction, and the numbers of the layers that communicate.
    steps: number of training steps that this rank has begun. It is counted only until ``is_agreed``.
    plan: the runs of consecutive instructions (ranges) that are cut into parts of the batch.
    costs: costs of the graph with these ranges cut, by the `label` of each call.
    is_agreed: whether all ranks have the plan, costs and places of rank 0, from which the order of the calls
        follows.
    limit: memory limit of a backward graph in bytes; 0 before it is known, and for other directions.
    places: {name of a gradient of a backward graph: number of all-to-alls that begin before the gradient is
        handed over}.
    reductions: which gradients are reduced over ranks together, and for how many predicted seconds, in the
        order in which these buckets are sent; [] if no gradient is reduced.
    before: the instructions of the graph with these ranges cut, in the order of the trace; [] before they are
        known.
    instructions: the same instructions, in the order in which the graph runs them.
    watch: a function of a module and its arguments that runs and times a pass. `explain` sets it. None if
        passes are not timed.
    """

    key: Key
    steps: int = 0
    plan: RangePlan = RangePlan()
    costs: dict[str, Cost] = field(default_factory=dict)
    is_agreed: bool = False
    limit: float = 0.0
    places: dict[str, int] = field(default_factory=dict)
    reductions: list[Bucket] = field(default_factory=list)
    before: list[Instruction] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    watch: Callable[[fx.GraphModule, list[Any]], Sequence[Any]] | None = None


PROGRAMS: dict[Key, Program] = {}
"""All programs of this process, by their keys."""

PARTS = (2, 3, 4, 6, 8)
BACKWARD_PARTS = (2, 4)
"""Numbers of parts of the batch that are tried: `PARTS` in forward graphs, `BACKWARD_PARTS` in backward
graphs.
"""


class GraphRunner:
    """A callable that runs one compiled graph. AOTAutograd, a part of torch.compile, calls it in each pass.

    module: the graph. Each layer's calls that compute weight gradients are merged into one call
        (`merge_weight_gradients`), and every call has a label.
    options: the options of the backend.
    program: the state that this graph shares with other graphs of the same layers and direction.
    cutting: the graph, and for each tensor the dimension along which it can be cut into parts of the batch.
    """

    module: fx.GraphModule
    options: Options
    program: Program
    cutting: GraphSplit

    _boxed_call = True

    def __init__(
        self,
        module: fx.GraphModule,
        direction: str,
        options: Options,
        batch: Sequence[int],
        is_tiny: bool,
        cuttings: dict[str, GraphSplit],
        graph_inputs: GraphInputs,
    ) -> None:
        """Prepares a graph: removes checks, merges weight gradients, labels calls, finds where it can be cut.

        module: the graph.
        direction: "forward", "backward" or "inference".
        options: the options of the backend.
        batch: positions of the inputs of a forward graph that hold the batch, along their first dimension.
        is_tiny: whether the batch has 0 or 1 sequence. torch.compile traces such small batches with other
            operators.
        cuttings: {direction: `GraphSplit`, which says how the graph of the direction can be cut}. This graph
            adds its own entry. A backward graph reads the entry of the forward graph.
        graph_inputs: the inputs of the forward graph, whose gradients a backward graph hands over.
        """
        for node in reversed(list(module.graph.nodes)):
            if node.target in CHECKS:
                module.graph.erase_node(node)
        module.graph.eliminate_dead_code()
        merge_weight_gradients(module.graph)
        name_all(module.graph)
        self.module = module
        self.options = options
        exchanges = (
            node.args[-1] for node in module.graph.find_nodes(op="call_function", target=OPS.exchange.default)
        )
        key = (direction, tuple(dict.fromkeys(exchanges)))
        self.program = PROGRAMS.setdefault(key, Program(key))
        inputs = module.graph.find_nodes(op="placeholder")
        if direction == "backward":
            forward = cuttings["forward"]
            self.cutting = GraphSplit(module, backward_axes(forward, module.graph), forward.size)
        else:
            sequences = inputs[batch[0]].meta["val"].shape[0] if batch else 0
            self.cutting = GraphSplit(module, {inputs[position]: 0 for position in batch}, sequences)
        cuttings[direction] = self.cutting
        self._inputs = graph_inputs
        # The name of each gradient that is handed over in the graph, by its number among the results.
        self._names: dict[int, str] = {}
        if direction == "backward":
            self._names = graph_inputs.names_of(module, self.program.key[1], self._hand_over_order)
        self._is_tiny = is_tiny
        self._run: Any = None
        self._costs: Costs | None = None
        self._link: Callable[[float], float] | None = None

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of the first layer that communicates; None if no layer does."""
        layer = next(iter(self.program.key[1]), None)
        return None if layer is None else LAYERS[layer].ranks  # type: ignore[return-value]

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        """Runs the graph and returns its results.

        boxed: the arguments, in a list that the run empties, so that each argument can be freed after its
            last use.

        In the first steps, in which operators are measured and ranks agree, the graph runs to its end. Later,
        a backward graph may return before it has run. Its results are then placeholders for gradients
        (`PendingGradient`). Each time autograd needs one of the gradients, the graph runs until it exists.

        Raises ValueError on every rank if ranks run different graphs. Raises RuntimeError with rank, operator
        call and layer in its message if the graph raises one.
        """
        ranks = self.ranks
        program = self.program
        if ranks is not None and not program.steps:
            check_same_graphs(ranks, self.module, self._is_tiny, program.key)
        # MoELayer.forward compares options among ranks and refuses wrappers, but does not run in a graph.
        if program.key[0] != "backward":
            for layer in program.key[1]:
                check_ranks(modules_of(layer))
        may_stop = program.watch is None
        if self._run is None:
            if ranks is not None and not program.is_agreed:
                program.steps += 1
                step = self._first_step if program.steps == 1 else self._next_step
                results = step(ranks, boxed)
                if results is not None:
                    if self._costs is not None and ranks.rank == 0:
                        self._costs.save()
                    return results
                may_stop = False  # the forward pass of this step did not know the order of the gradients yet
            self._lower()
        if self._names and may_stop:
            pending_results = pending(self.module, boxed, self._steps(boxed))
            if pending_results is not None:
                return pending_results
        try:
            return run_whole(self._run, boxed) if program.watch is None else program.watch(self._run, boxed)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _steps(self, boxed: list[Any]) -> GradientSteps:
        """Runs the graph. Yields (number of a gradient, list with the gradient) for each that is handed over.

        The number is the position of the gradient among the results of the graph.

        boxed: the arguments, in a list that the run empties.
        """
        arguments = list(boxed)
        boxed.clear()
        try:
            yield from self._run.forward(arguments)
        except GeneratorExit:
            # Another node of the backward pass has failed, such as a hook. This rank sends no more rows.
            if self.ranks is not None:
                error = RuntimeError("autograd left the backward graph before its end, because of an error")
                leave(error, self.ranks, "")
            raise
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> RuntimeError:
        """Returns a copy of ``error`` whose message names this rank, the operator call and its layer."""
        rank = 0 if self.ranks is None else self.ranks.rank
        where = f"{failed_at(self._run, error)} of the {self.program.key[0]} graph"
        return type(error)(f"pmoe: rank {rank} failed in {where}: {error}")

    def _lower(self) -> None:
        """Makes the module that later passes run: cuts the plan's ranges, then orders the calls.

        The plan, and the costs from which the order follows, are in ``program``.
        """
        module = self.cutting.apply(self.program.plan)
        self._run = lowered(module, self._ordered(module))

    def _hand_over_order(self) -> list[int]:
        """Returns the order in which gradients are handed over, as their positions among the graph's results.

        The result is [] if the order is not known yet.
        """
        if self._run is None and (self.ranks is None or self.program.is_agreed):
            self._lower()
        return [] if self._run is None else handed_over(self._run)

    def _first_step(self, ranks: Ranks, boxed: list[Any]) -> Sequence[Any]:
        """Runs the first training step. Measures the graph in k parts for each k, then runs it uncut.

        ranks: the ranks of the graph's all-to-alls.
        boxed: the arguments of the graph, in a list that the run empties.

        Returns the results of the uncut graph. Rank 0 also chooses the ranges that later steps cut, and
        stores the choice in the program:

        - In a forward graph, `solve` chooses ranges and numbers of parts by the measured costs.
        - In a backward graph, either everything that can be cut is cut, or nothing. For each k, the parts may
          run in several orders (`lags`). The k and the order are taken whose predicted pass is fastest and
          fits into the memory limit.
        """
        program = self.program
        stage = "agreeing on the parts of a graph"
        proposal = (self.cutting.names, min(self.cutting.sequences, self.options.parts))
        names, max_parts = from_first(ranks, proposal, stage=stage)
        graph = self.cutting.cuttable(instructions_of(self.module, {}))
        is_backward = program.key[0] == "backward"
        by_k = dict[int, PartCosts]()
        costs_of_plan = dict[RangePlan, dict[str, Cost]]()
        for k in (
            num_parts for num_parts in (BACKWARD_PARTS if is_backward else PARTS) if num_parts <= max_parts
        ):
            ranges_of_k = whole_ranges(graph, k)
            plan = RangePlan(names, tuple(ranges_of_k))
            plan = from_first(ranks, plan, stage="agreeing on parts to be measured")
            module = self.cutting.apply(plan)
            with torch.random.fork_rng(devices=[]):  # a trial must not change the random numbers of the run
                costs = self._profiled(ranks, module, list(boxed), GraphTrial)[0]
            by_k[k] = _by_origin(module, costs)
            for lag in lags(k):
                costs_of_plan[RangePlan(names, tuple(replace(range_, lag=lag) for range_ in ranges_of_k))] = (
                    costs
                )
        program.costs, results = self._profiled(ranks, self.module, boxed)
        program.reductions = self._buckets()
        if is_backward and ranks.rank == 0:
            _, order, _, limit = self._fastest(self.module, program.costs)
            program.plan = RangePlan(seconds=total_seconds(order))
            program.limit = limit
            for plan, costs in costs_of_plan.items():
                _, order, num_bytes, _ = self._fastest(self.cutting.apply(plan), costs)
                if num_bytes <= limit and total_seconds(order) < program.plan.seconds:
                    program.plan = replace(plan, seconds=total_seconds(order))
        elif by_k and ranks.rank == 0:
            by_k[1] = PartCosts({name: cost.seconds for name, cost in program.costs.items()}, {})
            graph = replace(graph, instructions=instructions_of(self.module, program.costs))
            seconds, ranges = solve(graph, by_k)
            program.plan = RangePlan(names, tuple(ranges), seconds)
        return results

    def _next_step(self, ranks: Ranks, boxed: list[Any]) -> Sequence[Any] | None:
        """Runs a training step after the first. All ranks take the ranges of rank 0, then its costs.

        - Step 2: all ranks take the ranges that rank 0 has chosen. If there are any, the graph is run and
          measured with these ranges cut, and its results are returned.
        - Step 3, or step 2 if there are no ranges: all ranks take the costs of rank 0. None is returned. The
          caller then runs the graph in its final order.

        ranks: the ranks of the graph's all-to-alls.
        boxed: the arguments of the graph, in a list that a run empties.
        """
        program = self.program
        if program.steps == 2:
            program.plan = from_first(ranks, program.plan, stage="agreeing on the ranges of a graph")
            if program.plan.ranges:
                module = self.cutting.apply(program.plan)
                program.costs, results = self._profiled(ranks, module, boxed)
                return results
        if self._names and ranks.rank == 0:
            module = self.cutting.apply(program.plan)
            _, order, *_ = self._fastest(module, program.costs)
            program.places = places_in(order, gradients_of(module, self._names))
        proposal = (program.costs, program.limit, program.reductions, program.places)
        proposal = from_first(ranks, proposal, stage="agreeing on the costs of a graph")
        program.costs, program.limit, program.reductions, program.places = proposal
        program.is_agreed = True
        return None

    def _buckets(self) -> list[Bucket]:
        """Returns which gradients are reduced over ranks together, and for how many predicted seconds.

        In a ring of W ranks, each rank sends 2 (W - 1) / W times the bytes of a gradient. Each gradient of a
        bucket takes an equal part of the fixed time of the bucket's message. [] is returned if gradients are
        not reduced.
        """
        link = self._link
        num_ranks = self._inputs.group.size
        if not self._names or link is None or num_ranks == 1:
            return []
        sent = 2 * (num_ranks - 1) / num_ranks
        handed_over = set(self._names.values())
        num_bytes = {name: size for name, size in self._inputs.reduced_bytes.items() if name in handed_over}
        buckets = list[Bucket]()
        for names in divide_into_buckets(num_bytes, self._inputs.bucket_limits):
            fixed_seconds = link(0) / len(names)
            buckets.append({name: link(sent * num_bytes[name]) - link(0) + fixed_seconds for name in names})
        return buckets

    def _profiled(
        self,
        ranks: Ranks,
        module: fx.GraphModule,
        boxed: list[Any],
        interpreter: type[Profiled] = Profiled,
    ) -> tuple[dict[str, Cost], Sequence[Any]]:
        """Runs a module call by call. Returns the cost of each call by its label, and the results.

        ranks: the ranks of the all-to-alls.
        module: the graph, possibly cut into parts.
        boxed: the graph's arguments, in a list that the run empties.
        interpreter: the class that runs the module. `GraphTrial` returns no results, and takes less memory.
        """
        tensor = next(
            argument for argument in boxed if isinstance(argument, Tensor) and argument.is_floating_point()
        )
        self._costs = costs_of(tensor.device)
        self._link = link_of(ranks, tensor.device, tensor.dtype, packed_bytes(self.module))
        profiled = interpreter(module, self._costs, self._link)
        with torch.no_grad():
            results: Sequence[Any] = profiled.boxed_run(boxed)
        return profiled.cost_by_label, results

    def _ordered(self, module: fx.GraphModule) -> list[fx.Node | Gradient]:
        """Returns the calls of a module in the order that is predicted fastest within the memory limit.

        The list also has gradients. A `Gradient` in the list is handed over to autograd at its position.
        """
        program = self.program
        program.before, program.instructions, *_ = self._fastest(module, program.costs)
        by_name: dict[str, fx.Node | Gradient] = {label(node): node for node in calls_of(module)}
        by_name |= {gradient.instruction: gradient for gradient in gradients_of(module, self._names)}
        return [by_name[instruction.name] for instruction in program.instructions]

    def _fastest(
        self, module: fx.GraphModule, costs: dict[str, Cost]
    ) -> tuple[list[Instruction], list[Instruction], int, float]:
        """Finds the order of a module's calls that is predicted to be fastest within the memory limit.

        Orders in which weight gradients run during all-to-alls are compared with the module's own order. In
        each order, gradients are handed over to autograd at the places on which the ranks have agreed. Before
        the agreement these are the places that make the pass fastest.

        module: the graph, possibly in parts.
        costs: the cost of each call and input, by label.

        Returns

            the instructions in the module's own order
            the instructions in the fastest order within the limit, or in the module's own order if there is
            none
            the peak bytes of that order
            the memory limit in bytes
        """
        program = self.program
        gradients = gradients_of(module, self._names)
        buckets = returned(program.reductions, gradients)
        before = instructions_of(module, costs)
        inputs = [label(node) for node in module.graph.find_nodes(op="placeholder")]
        input_bytes = {name: costs[name].num_bytes for name in inputs if name in costs}
        results = [label(node) for node in module.graph.output_node().all_input_nodes]
        kept = [costs[name].view_of or name for name in results if name in costs]
        limit = program.limit or self.options.limit(peak_bytes(before, kept, input_bytes))
        orders = [before]
        if self.options.weight_gradients and self.ranks is not None:
            listed = partial(weight_gradients.listed, before, limit=limit, kept=kept, input_bytes=input_bytes)
            orders += [weight_gradients.placed(before, weight_gradients.assign(before)), listed()]
            if buckets:
                sources = by_source(gradients, buckets)
                orders += [listed(reductions=sources, one_by_one=True), listed(reductions=sources)]
        fitting = [order for order in orders if peak_bytes(order, kept, input_bytes) <= limit]
        agreed_places = program.places if program.is_agreed else None
        fastest = plan_hand_overs(fitting or orders[:1], gradients, buckets, agreed_places)
        before = plan_hand_overs([before], gradients, buckets, agreed_places)
        return before, fastest, peak_bytes(fastest, kept, input_bytes), limit


def gradients_of(module: fx.GraphModule, names: Mapping[int, str]) -> list[Gradient]:
    """Returns the gradients that a backward graph hands over, each with the call that computes it.

    module: the graph, possibly in parts.
    names: the name of each of these gradients, by its number among the results.
    """
    results: Any = module.graph.output_node().args[0]
    return [Gradient(name, number, _source(results[number])) for number, name in names.items()]


def _source(node: fx.Node) -> str:
    """Returns the label of the call that computes a result of a graph; "" if no call computes it.

    No call computes a result that is an input of the graph.

    node: the node of the result.
    """
    if is_result(node):
        node = node.args[0]  # type: ignore[assignment]
    return label(node) if node.op == "call_function" else ""


def _by_origin(module: fx.GraphModule, costs: dict[str, Cost]) -> PartCosts:
    """Returns the costs of a graph in parts, by the label of the call that was cut.

    module: the graph in parts. The node of a part has, in meta["origin"], the label of the call that was cut.
        A node that joins parts has this label in meta["joins"].
    costs: the measured cost of each node, by the label of the node itself.
    """
    part: dict[str, list[float]] = {}
    join: dict[str, float] = {}
    for node in module.graph.nodes:
        seconds = costs[label(node)].seconds if label(node) in costs else 0.0
        if "origin" in node.meta:
            part.setdefault(node.meta["origin"], []).append(seconds)
        elif "joins" in node.meta:
            join[node.meta["joins"]] = seconds
    return PartCosts(
        {name: sum(seconds_of_parts) / len(seconds_of_parts) for name, seconds_of_parts in part.items()}, join
    )


def check_same_graphs(ranks: Ranks, module: fx.GraphModule, is_tiny: bool, key: Key) -> None:
    """Raises ValueError on every rank if ranks run different operators.

    The error names the first operator that differs.

    ranks: the ranks of the graph's all-to-alls.
    module: this rank's graph.
    is_tiny: whether this rank's batch has 0 or 1 sequence. The graph of so small a batch has other operators
        than graphs of larger batches, so only its all-to-alls are compared.
    key: the direction of the graph, and the numbers of its layers that communicate.

    Collective: one reduction of a digest. If the digests differ, the ranks also gather their operators.
    """
    calls = [(f"{node.target}", communicates(node)) for node in calls_of(module)]
    own_calls = (calls, not is_tiny)
    stage = f"comparing the {key[0]} graphs"
    (is_same,) = same(ranks, torch.device("cpu"), [digest(name for name, _ in calls)], stage=stage)
    if is_same:
        return
    all_calls = gathered(ranks, own_calls, stage=stage)
    first = next((rank for rank, (_, is_whole) in enumerate(all_calls) if is_whole), 0)
    for rank, (_, is_whole) in enumerate(all_calls):
        theirs, names = (
            [name for name, sends in all_calls[compared_rank][0] if sends or is_whole]
            for compared_rank in (rank, first)
        )
        for index, (actual, expected) in enumerate(itertools.zip_longest(theirs, names, fillvalue="none")):
            if actual != expected:
                raise ValueError(
                    f"the {key[0]} graph of rank {rank} must be that of rank {first}: operator {index} is "
                    f"{actual} in place of {expected}. Build the same model with the same options on all "
                    "ranks"
                )
