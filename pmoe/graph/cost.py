"""Costs of a graph's operators (Lancet, sections 3 and 6), measured in the first step that runs them.

Operators that compute are timed on the tensors of that step. Their seconds are stored in a file by operator,
shapes and dtypes, so that the next run only reads them.

All-to-alls are not timed in a step, because a part of their time is waiting for other ranks. Their seconds
are computed from their bytes: alpha + beta * bytes. alpha comes from the profile of the process group
(`pmoe profile`), beta from one long message (`link_of`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.parallel.distributed import _find_tensors

from pmoe.comm.agreement import largest
from pmoe.comm.ranks import Ranks
from pmoe.graph.instructions import COMMUNICATE, COMPUTE, Instruction
from pmoe.graph.lower import CALLS, OPS, calls_of, communicates, is_result, label
from pmoe.measure.bench import open_bench, seconds_of
from pmoe.measure.line_fits import messages, within_bytes
from pmoe.measure.profile import WIDER, profile_of
from pmoe.measure.store import cache_path, load_json, read_or_default, save_json, save_or_warn, typed
from pmoe.measure.timing import clock_of
from pmoe.planner.costs import LineCost

REPEATS = 3
"""Number of times that an operator is timed. The smallest time counts."""


@dataclass(frozen=True)
class Cost:
    """Cost of one operator call of a graph, or of one input of the graph.

    seconds: time on the device; for an all-to-all, time on the link. 0 for an input.
    num_bytes: bytes that the call allocates for its result; 0 if the result is a view. For an input, the
        bytes of the input.
    view_of: the name (`label`) of the call or input whose memory the result is a view of; None if the result
        is no view.
    """

    seconds: float
    num_bytes: int
    view_of: str | None = None


class Costs:
    """Measured seconds of operators on one type of device, kept in a file between runs.

    The files are in the cache folder ($PMOE_CACHE). There is one file for each combination of device type,
    version of torch and number of threads. If the file is damaged, the constructor warns and reads nothing.
    The next `save` replaces the file.

    seconds: seconds of each operator call, by its `signature`.
    """

    def __init__(self, device: torch.device) -> None:
        key = ("operators", str(device.type), torch.__version__, str(torch.get_num_threads()))
        self._path = cache_path(key)
        self.seconds: dict[str, float] = self._stored()

    def _stored(self) -> dict[str, float]:
        """Returns the measured seconds in the file of costs. If the file is unusable, warns, returns {}."""
        remedy = "they are measured again, and the file is replaced"

        def read() -> dict[str, float]:
            """Returns the seconds of operator calls in the file of costs, by `signature`.

            Raises OSError or ValueError if the file cannot be used.
            """
            return load_json(
                self._path, lambda fields: typed(dict[str, float], fields.get("seconds"), "seconds"), remedy
            )

        return read_or_default({}, "stored costs of operators are not used", read)

    def save(self) -> None:
        """Writes the measured seconds to the file. If writing fails, warns.

        Seconds that another run has stored in the meantime stay in the file.
        """
        save_or_warn(
            "costs of operators could not be kept, and will be measured again",
            lambda: save_json(self._path, {"seconds": {**self._stored(), **self.seconds}}),
        )


@functools.cache
def costs_of(device: torch.device) -> Costs:
    """Returns the measured costs of a device. Calls for the same device return the same object."""
    return Costs(device)


def signature(node: fx.Node, args: object, kwargs: object) -> str:
    """Returns the key under which an operator's seconds are stored: its name and arguments, as text.

    For a tensor among the arguments, the text has its shape and dtype.

    node: the call of the operator in the graph.
    args, kwargs: the arguments of the call, as values.
    """

    def shown(value: Any) -> Any:
        """Returns a tensor's shape and dtype as text; other values unchanged."""
        return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else value

    arguments: Any = (args, kwargs)
    return f"{node.target} {fx.node.map_aggregate(arguments, shown)}"


class Profiled(fx.Interpreter):
    """Runs a graph once, call by call, and measures the cost of each call.

    cost_by_label: the cost of each call and of each input, by its `label`.
    bases: for each node, a list with one entry for each tensor in the node's result: for a view, the label of
        the node that owns the memory; otherwise None.
    """

    def __init__(self, module: fx.GraphModule, costs: Costs, link: Callable[[float], float]) -> None:
        """Prepares the measurement of a graph.

        module: the graph.
        costs: known seconds of operators. Newly measured seconds are added to this object.
        link: function from the bytes of an all-to-all to its seconds. Its argument is the larger of two
            numbers: the bytes that this rank sends, and the bytes that it receives.
        """
        super().__init__(module)
        self.cost_by_label: dict[str, Cost] = {}
        self._costs = costs
        self._link = link
        self.bases: dict[fx.Node, list[str | None]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node of the graph, stores its cost in ``cost_by_label``, and returns its result."""
        self.count_inputs(n)
        bases = {
            _memory(tensor): base or (label(source) if isinstance(self.env[source], Tensor) else None)
            for source in n.all_input_nodes
            for tensor, base in zip(_find_tensors(self.env[source]), self.bases[source], strict=True)
        }
        seconds = 0.0
        if n.op != "call_function":
            result = super().run_node(n)
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            run = functools.partial(CALLS.get(n.target, n.target), *args, **kwargs)  # type: ignore[arg-type]
            if communicates(n):
                result = run()
                seconds = self._link(max(_bytes(args[0]), _bytes(result)))
            else:
                seconds, result = self.timed(n, run, signature(n, args, kwargs))
        view_of = [bases.get(_memory(tensor)) for tensor in _find_tensors(result)]
        self.bases[n] = view_of
        # If a node has several results, the node that takes one of them (getitem) counts its bytes. The
        # results of an all-to-all arrive together, so the all-to-all counts all of them.
        has_own_bytes = isinstance(result, Tensor) and view_of[0] is None
        num_bytes = _bytes(result) if has_own_bytes or communicates(n) else 0
        self.cost_by_label[label(n)] = Cost(
            seconds, num_bytes, view_of[0] if isinstance(result, Tensor) else None
        )
        return result

    def count_inputs(self, node: fx.Node) -> None:
        """Stores in ``cost_by_label`` the bytes of those inputs of the graph that a node reads."""
        for source in node.all_input_nodes:
            if source not in self.bases:  # an input of the graph
                value = self.env[source]
                self.bases[source] = [None for _ in _find_tensors(value)]
                self.cost_by_label[label(source)] = Cost(0.0, _bytes(value))

    def timed(self, node: fx.Node, run: functools.partial[Any], name: str) -> tuple[float, Any]:
        """Runs an operator, and returns its seconds and its result.

        If the operator's seconds are already known, the operator runs once, and the known seconds are
        returned. Otherwise it runs `REPEATS` times, and the smallest time is returned. An operator that must
        not run several times, such as one that draws random numbers, always runs once.

        node: the call of the operator.
        run: function that runs the operator on its arguments.
        name: the operator's `signature`, under which its seconds are stored.
        """
        known_seconds = self._costs.seconds
        times = 1 if name in known_seconds or not _may_repeat(node) else REPEATS
        clock = clock_of(*(tensor.device for tensor in _find_tensors(list(run.args))))
        seconds = math.inf
        result = None
        for _ in range(times):
            del result  # so that the next run may take its memory
            begin = clock()
            result = run()
            seconds = min(seconds, clock() - begin)
        if name not in known_seconds and _may_repeat(node):
            known_seconds[name] = seconds
        return known_seconds.get(name, seconds), result


def _may_repeat(node: fx.Node) -> bool:
    """Returns whether an operator may run several times, so that it can be timed.

    An operator must run only once if it writes to its arguments or draws random numbers.

    node: the call of the operator.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _bytes(value: object) -> int:
    """Returns the bytes of all tensors in a value, which may be a tensor or a nested list, tuple or dict."""
    return sum(tensor.nbytes for tensor in _find_tensors(value))


def _memory(tensor: Tensor) -> int:
    """Returns a number that is equal for tensors that share memory: the address of the memory.

    For a tensor without memory, the number is the tensor's own id.
    """
    return tensor.untyped_storage().data_ptr() or id(tensor)


def link_of(
    ranks: Ranks, device: torch.device, dtype: torch.dtype, most_bytes: float
) -> Callable[[float], float]:
    """Returns a function from the bytes of an all-to-all to its predicted seconds, alpha + beta * bytes.

    With one rank, the predicted seconds are 0. With several ranks:

        alpha   the fixed time of a message, from the profile of the process group
        beta    the time for each byte, measured by one message that takes about `LONG_SECONDS`

    The profile has a beta, too. It is not used, because it comes from short messages, in which a single
    interruption makes a large error.

    ranks: the ranks of the all-to-alls.
    device, dtype: device and dtype of the measured message.
    most_bytes: how many bytes a measurement may allocate. All ranks use the largest number of any rank. If
        an earlier measurement had a much lower limit, beta is measured again.

    Collective: all ranks must call it together.
    """
    if ranks.size == 1:
        return lambda num_bytes: 0.0
    [most_bytes] = largest(ranks, device, [most_bytes], stage="agreeing on the bytes of a measured message")
    key = (ranks.name, device, dtype)
    link, limit = LINKS.get(key, (None, 0.0))
    if link is None or most_bytes > WIDER * limit:
        line = profile_of(ranks, device, dtype, most_bytes).message
        work = within_bytes(messages(ranks, device, dtype), most_bytes)
        units = min(work.max_units, 1 + int(LONG_SECONDS / (work.size * max(line.beta_seconds, 1e-12))))
        with open_bench(ranks, device) as bench:
            seconds = seconds_of(
                bench, COMMUNICATE, bench.made(functools.partial(work.make, units)), REPEATS, min
            )
        beta = max(0.0, seconds - line.alpha_seconds) / (units * work.size)
        link = replace(line, beta_seconds=beta)
        # A message of `LONG_SECONDS` is long enough, whatever a later limit allows.
        LINKS[key] = (link, most_bytes if units == work.max_units else math.inf)
    return link


LONG_SECONDS = 0.1
"""Seconds that the message of `link_of` should take, which measures the time per byte."""

LINKS: dict[tuple[str, torch.device, torch.dtype], tuple[LineCost, float]] = {}
"""Measured costs of all-to-alls, each with the limit on the bytes of the measured message (`link_of`).

The keys are the name of the group, the device and the dtype. The limit is infinite if the message was not
shortened by a limit.
"""


def packed_bytes(module: fx.GraphModule) -> float:
    """Returns the bytes of the routed rows of one MoE layer of a graph: the layer with the most bytes.

    A routed row is a copy of a token for one of its experts; in a backward graph it is the gradient of one. A
    forward pass of the layer allocates at least twice these bytes: the rows and the experts' outputs.

    module: the graph as it was traced.

    Returns infinity if the trace does not know the sizes, or if there is no layer.
    """
    num_bytes = [0.0]
    for node in module.graph.find_nodes(op="call_function", target=OPS.pack.default):
        values, *_, top_k = node.args
        traced = values.meta["val"]
        numel = traced.numel()
        num_bytes.append(numel * traced.element_size() * top_k if type(numel) is int else math.inf)
    return max(num_bytes) or math.inf


def instructions_of(module: fx.GraphModule, costs: Mapping[str, Cost]) -> list[Instruction]:
    """Returns the operator calls of a graph as a list of instructions with costs, in the graph's order.

    module: the graph.
    costs: the measured cost of each call and input, by its `label`. Calls that are not in it cost nothing.
    """
    nothing = Cost(0.0, 0)

    def owner(name: str) -> str:
        """Returns the label of the call or input that owns the memory of a result."""
        return costs.get(name, nothing).view_of or name

    instructions = []
    for node in calls_of(module):
        # A node that takes one result out of those of an all-to-all (`is_result`) is no instruction of its
        # own: its users wait for the all-to-all.
        needs: list[Any] = [
            source.args[0] if is_result(source) else source for source in node.all_input_nodes
        ]
        cost = costs.get(label(node), nothing)
        instructions.append(
            Instruction(
                name=label(node),
                waits=tuple(label(needed) for needed in needs if needed.op == "call_function"),
                holds=tuple(owner(label(needed)) for needed in needs),
                seconds=cost.seconds,
                lane=COMMUNICATE if communicates(node) else COMPUTE,
                num_bytes=cost.num_bytes,
                is_counts=node.target is OPS.exchange_counts.default,
                selects=node.target is operator.getitem and needs[0].op == "call_function",
            )
        )
    return instructions
