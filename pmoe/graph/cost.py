"""What a graph's operators cost (Lancet, sections 3 and 6): measured once, in the first step that runs them.

Computation is timed on the tensors of that step, and kept by operator, shapes and types in a file, so that
the next run only reads it. All-to-alls are not timed there, where ranks wait for each other: their seconds
come from the group's profile (`pmoe profile`) and one long message, by bytes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.parallel.distributed import _find_tensors

from pmoe.comm.ranks import Ranks
from pmoe.graph.instructions import COMMUNICATE, COMPUTE, Instruction
from pmoe.graph.lower import CALLS, OPS, calls_of, communicates, is_result, label
from pmoe.measure.bench import open_bench, seconds_of
from pmoe.measure.lines import messages
from pmoe.measure.profile import profile_of
from pmoe.measure.rounds import clock_of
from pmoe.measure.store import cache_path, found_or, load_json, save_json, typed
from pmoe.planner.costs import LineCost

REPEATS = 3
"""How often an operator is timed; the least counts."""


@dataclass(frozen=True)
class Cost:
    """Of one node: its seconds (of an all-to-all the link's), the bytes of its result, and the node or input
    whose memory the result is a view of."""

    seconds: float
    num_bytes: int
    view_of: str | None = None


class Costs:
    """Measured seconds by operator, shapes and types; those of earlier runs are read from the cache
    folder."""

    def __init__(self, device: torch.device) -> None:
        key = ("operators", str(device.type), torch.__version__, str(torch.get_num_threads()))
        self._path = cache_path(key)
        self.seconds: dict[str, float] = found_or({}, "operators' seconds are not used", self._kept)

    def _kept(self) -> dict[str, float]:
        remedy = "measured again, and written over"
        return load_json(
            self._path, lambda fields: typed(dict[str, float], fields.get("seconds"), "seconds"), remedy
        )

    def save(self) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written: measured again in the next run
            save_json(self._path, {"seconds": self.seconds})


@functools.cache
def costs_of(device: torch.device) -> Costs:
    """One of each device."""
    return Costs(device)


def signature(node: fx.Node, args: object, kwargs: object) -> str:
    """An operator with the shapes and types of its arguments."""

    def shown(value: Any) -> Any:
        return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else value

    given: Any = (args, kwargs)
    return f"{node.target} {fx.node.map_aggregate(given, shown)}"


class Profiled(fx.Interpreter):
    """Runs a graph once, as it stands, and finds what each node costs."""

    def __init__(self, module: fx.GraphModule, costs: Costs, link: Callable[[float], float]) -> None:
        """link: seconds of an all-to-all by the bytes that a rank sends to others, or gets, if those are
        more."""
        super().__init__(module)
        self.found: dict[str, Cost] = {}
        self._costs, self._link = costs, link
        self._bases: dict[fx.Node, list[str | None]] = {}  # of each tensor of a result, None where it is new

    def run_node(self, n: fx.Node) -> Any:
        for each in n.all_input_nodes:
            if each not in self._bases:  # an input of the graph
                value = self.env[each]
                self._bases[each] = [None for _ in _find_tensors(value)]
                self.found[label(each)] = Cost(0.0, _bytes(value))
        bases = {
            _memory(tensor): base or (label(each) if isinstance(self.env[each], Tensor) else None)
            for each in n.all_input_nodes
            for tensor, base in zip(_find_tensors(self.env[each]), self._bases[each], strict=True)
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
                seconds, result = self._timed(n, run, signature(n, args, kwargs))
        found = [bases.get(_memory(tensor)) for tensor in _find_tensors(result)]
        self._bases[n] = found
        # Of several results each has its own bytes, where it is taken; those of a message come together.
        counts = isinstance(result, Tensor) and found[0] is None
        whole = _bytes(result) if counts or communicates(n) else 0
        self.found[label(n)] = Cost(seconds, whole, found[0] if isinstance(result, Tensor) else None)
        return result

    def _timed(self, node: fx.Node, run: functools.partial[Any], name: str) -> tuple[float, Any]:
        known = self._costs.seconds
        times = 1 if name in known or not _may_repeat(node) else REPEATS
        clock = clock_of(*(each.device for each in _find_tensors(list(run.args))))
        seconds = math.inf
        for _ in range(times):
            begin = clock()
            result = run()
            seconds = min(seconds, clock() - begin)
        if name not in known and _may_repeat(node):
            known[name] = seconds
        return known.get(name, seconds), result


def _may_repeat(node: fx.Node) -> bool:
    """Whether running it again changes nothing, neither its arguments nor the next random number."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _bytes(value: object) -> int:
    return sum(each.nbytes for each in _find_tensors(value))


def _memory(tensor: Tensor) -> int:
    """What tells its memory from others' while it lives."""
    return tensor.untyped_storage().data_ptr() or id(tensor)


def link_of(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Callable[[float], float]:
    """Seconds of an all-to-all by bytes. What a byte costs is told by a long message: those of a profile take
    milliseconds, and an interruption of one would grow with the bytes. Collective the first time."""
    if ranks.size == 1:
        return lambda num_bytes: 0.0
    key = (ranks.name, device, dtype)
    if key not in LINKS:
        line, work = profile_of(ranks, device, dtype).message, messages(ranks, device, dtype)
        units = min(work.max_units, 1 + int(LONG_SECONDS / (work.size * max(line.beta_seconds, 1e-12))))
        with open_bench(ranks, device) as bench:
            seconds = seconds_of(bench, COMMUNICATE, work.make(units), REPEATS, min)
        beta = max(0.0, seconds - line.alpha_seconds) / (units * work.size)
        LINKS[key] = replace(line, beta_seconds=beta)
    return LINKS[key]


LONG_SECONDS = 0.1
LINKS: dict[tuple[str, torch.device, torch.dtype], LineCost] = {}


def instructions_of(module: fx.GraphModule, costs: Mapping[str, Cost]) -> list[Instruction]:
    """The graph's calls, in its order; what no cost is known of costs nothing."""
    nothing = Cost(0.0, 0)

    def owner(name: str) -> str:
        return costs.get(name, nothing).view_of or name

    found = []
    for node in calls_of(module):
        # Of a result of an all-to-all, the all-to-all.
        needs: list[Any] = [each.args[0] if is_result(each) else each for each in node.all_input_nodes]
        cost = costs.get(label(node), nothing)
        found.append(
            Instruction(
                name=label(node),
                waits=tuple(label(each) for each in needs if each.op == "call_function"),
                holds=tuple(owner(label(each)) for each in needs),
                seconds=cost.seconds,
                lane=COMMUNICATE if communicates(node) else COMPUTE,
                num_bytes=cost.num_bytes,
                is_counts=node.target is OPS.exchange_counts.default,
            )
        )
    return found
