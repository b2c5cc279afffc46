"""Runs a graph whose batch is cut into parts, only to measure its costs. Such a run is a trial.

A step frees each saved tensor after its last use. Trials run before the step and read the same tensors, so a
trial cannot free them. To take no more memory than the step, it frees other tensors earlier than a step does.
The table shows which. A block is the rows that one call of `experts` computes.

    tensor                              freed in a step             freed in a trial
    results of the graph, such as       by the caller of the        after the last call of the graph that
    gradients                           graph                       reads them
    rows of a block, which the weight   after the weight            after the weight gradient of this block
    gradient of the experts reads       gradients of all blocks
                                        of the layer
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from pmoe.graph.cost import Cost, Costs, Profiled, signature
from pmoe.graph.lower import CALLS, OPS, label

WEIGHT_GRADIENT = OPS.experts_weight_gradient.default


class GraphTrial(Profiled):
    """Runs a graph and measures the cost of each call, but returns no results.

    Results of the graph are freed after their last use in the graph, so that less memory is needed.
    """

    def __init__(self, module: fx.GraphModule, costs: Costs, link: Callable[[float], float]) -> None:
        """Prepares the trial of a graph.

        module: the graph.
        costs: known seconds of operators. Newly measured seconds are added to this object.
        link: function from the bytes of an all-to-all to its seconds.
        """
        super().__init__(module, costs, link)
        self._place_of = {node: place for place, node in enumerate(module.graph.nodes)}
        # A block holds the rows of one call of `experts`. The key is the node that computes the last tensor
        # of a block. The value lists pairs: the call that sums the layer's weight gradients, and the tensors
        # of the block.
        self._blocks: dict[fx.Node, list[tuple[fx.Node, Sequence[fx.Node]]]] = {}
        # The seconds and the latest result of each of these calls.
        self._measured: dict[fx.Node, tuple[float, Any]] = {}
        self._free_results()
        for node in module.graph.find_nodes(op="call_function", target=WEIGHT_GRADIENT):
            self._split(node)

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node of the graph, stores its cost in ``cost_by_label``, and returns its result.

        For the output node, which collects the results of the graph, [] is returned.
        """
        if n.op == "output":
            self.count_inputs(n)
            return []
        if n in self._measured:
            self.count_inputs(n)
            seconds, result = self._measured.pop(n)
            self.bases[n] = [None for _ in result]
            self.cost_by_label[label(n)] = Cost(seconds, 0)
            return result
        self.env[n] = result = super().run_node(n)
        for gradient, block in self._blocks.get(n, ()):
            self._measure(gradient, block)
        return result

    def _free_results(self) -> None:
        """Lets each result of the graph be freed after the last call that reads it.

        A result that no call reads is freed as soon as it is computed.
        """
        output = self.graph.output_node()
        for node in self.user_to_last_uses.pop(output, []):
            self._free_after(node, [node, *(user for user in node.users if user is not output)])

    def _split(self, gradient: fx.Node) -> None:
        """Lets the weight gradient of each block of rows be computed as soon as the block's tensors exist.

        A block is the rows that one call of `experts` computes.

        gradient: the call that sums the weight gradients of all blocks of a layer.
        """
        uses: dict[fx.Node, list[fx.Node]] = {}
        for block in zip(*gradient.args[:5], strict=True):
            last = max(block, key=self._place_of.__getitem__)
            self._blocks.setdefault(last, []).append((gradient, block))
            for tensor in block:
                others = [user for user in tensor.users if user is not gradient]
                uses.setdefault(tensor, others).append(last)
        for node in self.user_to_last_uses.pop(gradient, []):
            self._free_after(node, uses.get(node, [gradient]))

    def _free_after(self, node: fx.Node, uses: Iterable[fx.Node]) -> None:
        """Lets the value of a node be freed after the last node of ``uses``, in the order of the graph."""
        last = max(uses, key=self._place_of.__getitem__)
        self.user_to_last_uses.setdefault(last, []).append(node)

    def _measure(self, gradient: fx.Node, block: Sequence[fx.Node]) -> None:
        """Computes the weight gradient of one block of rows, and adds its seconds to those of the layer.

        A block is the rows that one call of `experts` computes. The sum of the blocks' seconds is a little
        higher than the seconds of a step. Here each block writes a gradient of its own into memory, whereas a
        step writes one gradient for all blocks.

        gradient: the call that sums the weight gradients of all blocks of the layer.
        block: the tensors of the block that the weight gradient reads.
        """
        arguments = (*([tensor] for tensor in block), *gradient.args[5:])
        values: Any = self.map_nodes_to_values(arguments, gradient)
        # No name keeps the last result, so that the next one may take its memory.
        seconds = self._measured.pop(gradient, (0.0, None))[0]
        run = functools.partial(CALLS[gradient.target], *values)
        own_seconds, result = self.timed(gradient, run, signature(gradient, values, {}))
        self._measured[gradient] = (seconds + own_seconds, result)
