"""Runs a compiled graph: measures it in the first training steps, then runs it in the best predicted order.

Graphs of the same layers and direction form one program, for all input shapes. A range is a run of
consecutive operator calls that is cut into parts of the batch.

    step   runs                                       ranks first agree on
    1      the graph in k parts, for each k, then     whether they have the same operators; the largest
           as traced, which gives the step's results  number of parts
    2      the graph with its ranges cut              the ranges (rank 0's)
    3      the graph in its final order               the costs (rank 0's), from which the order follows

Step 2 is left out if no range is cut. Steps 1 and 2 measure what operators cost. Measured costs differ
between ranks, but all ranks must run operators in the same order, so all use the costs of rank 0. In these
steps all ranks run the same step of the program, so they can agree. Later, a rank may compile a graph for
other shapes without the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from pmoe.comm.agreement import digest, from_first, gathered, same
from pmoe.comm.ranks import Ranks
from pmoe.decide.begin import check_ranks
from pmoe.graph import weight_gradients
from pmoe.graph.cost import Cost, Costs, Profiled, costs_of, instructions_of, link_of
from pmoe.graph.instructions import Instruction, peak_bytes, total_seconds
from pmoe.graph.lower import (
    OPS,
    calls_of,
    communicates,
    failed_at,
    label,
    lowered,
    merge_weight_gradients,
    name_all,
)
from pmoe.graph.operators import LAYERS, modules_of
from pmoe.graph.options import Options
from pmoe.graph.plan import GraphSplit, RangePlan, backward_axes
from pmoe.graph.ranges import PartCosts, lags, solve, whole_ranges

CHECKS = (torch.ops.aten._assert_scalar.default, torch.ops.aten.sym_constrain_range_for_size.default)
"""Operators by which tracing checks that row counts are not negative. They are removed from graphs."""

Key = tuple[str, tuple[int, ...]]
"""Type of a program's key: its direction, and the numbers of its layers that communicate, in order."""


@dataclass
class Program:
    """State that all graphs of the same layers and direction share.

    key: the direction, and the numbers of the layers that communicate.
    steps: number of training steps that have begun on this rank. They are no longer counted once `is_agreed`
        is True.
    plan: the runs of consecutive instructions (ranges) that are cut into parts of the batch.
    costs: costs of the graph with these ranges cut, by the `label` of each call.
    is_agreed: whether all ranks have rank 0's plan and costs, from which the order of the calls follows.
    limit: memory limit of a backward graph in bytes; 0 before it is known, and for other directions.
    before: the instructions with the ranges cut, in the order of the trace.
    instructions: the same instructions, in the order in which they run.
    watch: a function that `explain` sets to time passes. If it is set, it is called with the module and its
        arguments, and runs the pass. Otherwise None.
    """

    key: Key
    steps: int = 0
    plan: RangePlan = RangePlan()
    costs: dict[str, Cost] = field(default_factory=dict)
    is_agreed: bool = False
    limit: float = 0.0
    before: list[Instruction] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    watch: Callable[[fx.GraphModule, list[Any]], Sequence[Any]] | None = None


PROGRAMS: dict[Key, Program] = {}
"""All programs of this process, by their keys."""

PARTS = (2, 3, 4, 6, 8)
BACKWARD_PARTS = (2, 4)
"""Numbers of parts that are tried, in forward graphs (`PARTS`) and in backward graphs."""


class GraphRunner:
    """The function that AOTAutograd calls to run one graph.

    module: the graph. Each layer's calls that compute weight gradients are merged into one call
        (`merge_weight_gradients`), and every call has a label.
    options: the options of the backend.
    program: the state that this graph shares with other graphs of the same layers and direction.
    cutting: the graph with the dimension along which each tensor is cut into parts of the batch.
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
    ) -> None:
        """Prepares a graph: removes checks, merges weight gradients, labels calls, finds where it can be cut.

        module: the graph.
        direction: "forward", "backward" or "inference".
        options: the options of the backend.
        batch: positions of the inputs of a forward graph that hold the batch, along their first dimension.
        is_tiny: whether the batch has 0 or 1 sequence. Graphs of so small batches are traced with other
            operators.
        cuttings: where the graphs that were compiled together can be cut, by direction. A backward graph
            reads the forward graph's entry, and each graph adds its own.
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
        self._is_tiny = is_tiny
        self._run: Any = None
        self._costs: Costs | None = None

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of the first layer that communicates; None if no layer does."""
        layer = next(iter(self.program.key[1]), None)
        return None if layer is None else LAYERS[layer].ranks  # type: ignore[return-value]

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        """Runs the graph and returns its results.

        boxed: the arguments, in a list that the run empties, so that each can be freed after its last use.

        Raises ValueError on every rank if ranks run different graphs. An error in the graph is raised again,
        with rank, operator call and layer in the message.
        """
        ranks = self.ranks
        program = self.program
        if ranks is not None and not program.steps:
            check_same_graphs(ranks, self.module, self._is_tiny, program.key)
        # MoELayer.forward compares options among ranks and refuses wrappers, but does not run in a graph.
        if program.key[0] != "backward":
            for layer in program.key[1]:
                check_ranks(modules_of(layer))
        if self._run is None:
            if ranks is not None and not program.is_agreed:
                program.steps += 1
                step = self._first_step if program.steps == 1 else self._next_step
                results = step(ranks, boxed)
                if results is not None:
                    if self._costs is not None and ranks.rank == 0:
                        self._costs.save()
                    return results
            module = self.cutting.cut(program.plan)
            self._run = lowered(module, self._ordered(module))
        watch = program.watch
        try:
            return self._run.forward(boxed) if watch is None else watch(self._run, boxed)
        except RuntimeError as error:
            rank = 0 if ranks is None else ranks.rank
            where = f"{failed_at(self._run, error)} of the {program.key[0]} graph"
            raise type(error)(f"pmoe: rank {rank} failed in {where}: {error}") from error

    def _first_step(self, ranks: Ranks, boxed: list[Any]) -> Sequence[Any]:
        """Runs the first training step: measures the graph cut in several ways, then runs it as traced.

        Returns the results of the graph as traced. Rank 0 chooses what will be cut, and stores the choice in
        the program. In a forward graph, `solve` chooses from the measured costs of parts. In a backward
        graph, either everything that can be cut is cut, or nothing: of all numbers of parts and orders that
        were measured, the fastest that stays within the memory limit is chosen.
        """
        program = self.program
        stage = "agreeing on the parts of a graph"
        proposal = (self.cutting.names, min(self.cutting.sequences, self.options.parts))
        names, max_parts = from_first(ranks, proposal, stage=stage)
        graph = self.cutting.cuttable(instructions_of(self.module, {}))
        is_backward = program.key[0] == "backward"
        by_k = dict[int, PartCosts]()
        costs_of_plan = dict[RangePlan, dict[str, Cost]]()
        for k in (each for each in (BACKWARD_PARTS if is_backward else PARTS) if each <= max_parts):
            ranges_of_k = whole_ranges(graph, k)
            plan = RangePlan(names, tuple(ranges_of_k))
            plan = from_first(ranks, plan, stage="agreeing on parts to be measured")
            module = self.cutting.cut(plan)
            with torch.random.fork_rng(devices=[]):  # a trial must not change the random numbers of the run
                costs = self._profiled(ranks, module, list(boxed))[0]
            by_k[k] = _by_origin(module, costs)
            for lag in lags(k):
                costs_of_plan[RangePlan(names, tuple(replace(each, lag=lag) for each in ranges_of_k))] = costs
        program.costs, results = self._profiled(ranks, self.module, boxed)
        if is_backward and ranks.rank == 0:
            _, order, _, limit = self._fastest(self.module, program.costs)
            program.plan = RangePlan(seconds=total_seconds(order))
            program.limit = limit
            for plan, costs in costs_of_plan.items():
                _, order, num_bytes, _ = self._fastest(self.cutting.cut(plan), costs)
                if num_bytes <= limit and total_seconds(order) < program.plan.seconds:
                    program.plan = replace(plan, seconds=total_seconds(order))
        elif by_k and ranks.rank == 0:
            by_k[1] = PartCosts({name: cost.seconds for name, cost in program.costs.items()}, {})
            graph = replace(graph, instructions=instructions_of(self.module, program.costs))
            seconds, ranges = solve(graph, by_k)
            program.plan = RangePlan(names, tuple(ranges), seconds)
        return results

    def _next_step(self, ranks: Ranks, boxed: list[Any]) -> Sequence[Any] | None:
        """Runs a training step after the first: all ranks take rank 0's choice of cuts, then its costs.

        In step 2, if the choice has ranges (runs of instructions) to cut, the graph is measured with these
        cut, and the results are returned. In the next step, or in step 2 if nothing is cut, the method takes
        rank 0's costs and returns None: the ranks now agree on everything, and the caller can run the graph
        in its final order.
        """
        program = self.program
        if program.steps == 2:
            program.plan = from_first(ranks, program.plan, stage="agreeing on the ranges of a graph")
            if program.plan.ranges:
                module = self.cutting.cut(program.plan)
                program.costs, results = self._profiled(ranks, module, boxed)
                return results
        proposal = (program.costs, program.limit)
        program.costs, program.limit = from_first(ranks, proposal, stage="agreeing on the costs of a graph")
        program.is_agreed = True
        return None

    def _profiled(
        self, ranks: Ranks, module: fx.GraphModule, boxed: list[Any]
    ) -> tuple[dict[str, Cost], Sequence[Any]]:
        """Runs a module call by call. Returns the cost of each call by its label, and the results.

        module: the graph, possibly in parts.
        boxed: its arguments, in a list that the run empties.
        """
        tensor = next(each for each in boxed if isinstance(each, Tensor) and each.is_floating_point())
        self._costs = costs_of(tensor.device)
        profiled = Profiled(module, self._costs, link_of(ranks, tensor.device, tensor.dtype))
        with torch.no_grad():
            results: Sequence[Any] = profiled.boxed_run(boxed)
        return profiled.found, results

    def _ordered(self, module: fx.GraphModule) -> list[fx.Node]:
        """Returns the calls of a module in the order of least predicted time within the memory limit."""
        program = self.program
        program.before, program.instructions, *_ = self._fastest(module, program.costs)
        by_name = {label(node): node for node in calls_of(module)}
        return [by_name[each.name] for each in program.instructions]

    def _fastest(
        self, module: fx.GraphModule, costs: dict[str, Cost]
    ) -> tuple[list[Instruction], list[Instruction], int, float]:
        """Finds the fastest predicted order of a module's calls with a peak memory within the limit.

        Orders that move weight gradients beside all-to-alls are compared with the module's own order.

        costs: the cost of each call and input, by label.

        Returns

            the instructions in the module's own order
            the instructions in the fastest order; in the module's own order if none is within the limit
            the peak bytes of the fastest order
            the limit in bytes
        """
        before = instructions_of(module, costs)
        inputs = [label(node) for node in module.graph.find_nodes(op="placeholder")]
        input_bytes = {name: costs[name].num_bytes for name in inputs if name in costs}
        results = [label(each) for each in module.graph.output_node().all_input_nodes]
        kept = [costs[name].view_of or name for name in results if name in costs]
        limit = self.program.limit or self.options.limit(peak_bytes(before, kept, input_bytes))
        orders = [before]
        if self.options.weight_gradients and self.ranks is not None:
            assigned = weight_gradients.assign(before)
            orders.append(weight_gradients.placed(before, assigned))
            orders.append(weight_gradients.listed(before, limit=limit, kept=kept, input_bytes=input_bytes))
        fitting = [order for order in orders if peak_bytes(order, kept, input_bytes) <= limit]
        fastest = min(fitting or orders[:1], key=total_seconds)
        return before, fastest, peak_bytes(fastest, kept, input_bytes), limit


def _by_origin(module: fx.GraphModule, costs: dict[str, Cost]) -> PartCosts:
    """Returns the measured costs of parts, by the label of the call that was cut.

    module: a graph in parts. The node of each part holds the label of the call in meta["origin"].
    costs: the measured cost of each node, by its own label.
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
    """Raises ValueError on every rank if ranks run different operators; names the first that differs.

    module: this rank's graph.
    is_tiny: whether this rank's batch has 0 or 1 sequence. Its graph then has other operators than graphs of
        larger batches, so only the all-to-alls are compared.
    key: the direction of the graph and its layers.

    Collective: one reduction of a digest, and one gathering of the operators if the digests differ.
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
            [name for name, sends in all_calls[each][0] if sends or is_whole] for each in (rank, first)
        )
        for index, (actual, expected) in enumerate(itertools.zip_longest(theirs, names, fillvalue="none")):
            if actual != expected:
                raise ValueError(
                    f"the {key[0]} graph of rank {rank} must be that of rank {first}: operator {index} is "
                    f"{actual} in place of {expected}. Build the same model with the same options on all "
                    "ranks"
                )
