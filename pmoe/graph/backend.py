"""The backend of ``torch.compile(model, backend="pmoe")``: applies Lancet's passes to a whole graph.

PyTorch finds the backend by its name, through the entry point "torch_dynamo_backends" in setup.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition

from pmoe.graph import capture
from pmoe.graph.hand_over import GraphInputs
from pmoe.graph.options import Options
from pmoe.graph.plan import GraphSplit
from pmoe.graph.run import GraphRunner


def backend(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles one graph for `torch.compile`, and returns the function that runs it.

    module: the graph, as torch.compile traced it.
    example_inputs: the inputs with which the graph was traced.
    options: the options of `torch.compile`, by name (`pmoe.graph.options.Options`).
    mode: must be None, because this backend has no modes.

    Raises ValueError if a mode is passed, or if the value of an option is not allowed. Raises TypeError if an
    option has a wrong type.
    """
    if mode is not None:
        raise ValueError(f'mode ({mode!r}) must be left out: the backend "pmoe" has options, but no modes')
    checked_options = Options.of(options)
    batch = batch_inputs(example_inputs)
    sequences = example_inputs[batch[0]].shape[0] if batch else 2
    # PyTorch specialises sizes 0 and 1: their graphs have other operators than those of larger batches.
    is_tiny = isinstance(sequences, int) and sequences < 2

    cuttings: dict[str, GraphSplit] = {}
    graph_inputs = GraphInputs.of(module, example_inputs)

    def compiler(direction: str) -> Any:
        """Returns the function that compiles the graphs of one direction.

        AOTAutograd, the part of torch.compile that makes forward and backward graphs, calls this function.

        direction: "forward", "backward" or "inference".
        """

        def compile_graph(graph: fx.GraphModule, _inputs: object) -> GraphRunner:
            if direction == "forward":
                graph_inputs.may_stop = not changes_inputs()
            return GraphRunner(graph, direction, checked_options, batch, is_tiny, cuttings, graph_inputs)

        return compile_graph

    compiled: Callable[..., Any] = aot_module_simplified(
        module,
        example_inputs,
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=default_partition,
    )
    return lambda *inputs: compiled(*graph_inputs.wrapped(inputs))


def changes_inputs() -> bool:
    """Returns whether the graph in compilation writes to one of its inputs that need gradients.

    The result is also True if PyTorch has no record of the graph's inputs.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return True  # not known
    return any(info.mutates_data and info.requires_grad for info in context.fw_metadata.input_info)


def batch_inputs(inputs: Sequence[Any]) -> list[int]:
    """Returns the positions of those inputs of a graph whose first dimension is the batch.

    Parameters, buffers and tensors without dimensions are left out. The first remaining tensor gives the
    length of the batch: its first size. The result has the positions of all remaining tensors with the same
    first size.
    """
    tensor_positions = [
        position
        for position, tensor in enumerate(inputs)
        if isinstance(tensor, Tensor) and tensor.dim() and not hasattr(tensor, "_dynamo_static_input_type")
    ]
    return [
        position
        for position in tensor_positions
        if inputs[position].shape[0] == inputs[tensor_positions[0]].shape[0]
    ]


@functools.cache
def prepare() -> None:
    """Sets options of torch._dynamo, and makes MoELayers traceable. Runs once, when this module is imported.

    capture_dynamic_output_shape_ops   on: a size that is known only when the graph runs does not break the
                                       graph
    optimize_ddp                       off: DDP must not cut graphs between layers that communicate
    recompile_limit                    raised to accumulated_recompile_limit, because every block of a model
                                       may be compiled by itself
    fail_on_recompile_limit_hit        on: a rank that has compiled too often raises an error. Without a graph
                                       it would send other messages than the other ranks
    """
    config: Any = torch._dynamo.config
    config.capture_dynamic_output_shape_ops = True
    config.fail_on_recompile_limit_hit = True
    config.recompile_limit = config.accumulated_recompile_limit
    config.optimize_ddp = False
    capture.install(backend)


prepare()
