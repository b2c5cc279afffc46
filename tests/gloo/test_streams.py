"""The lanes of a GPU wait for everything that they must: shown on the CPU, with streams that only have
clocks.

`tests.gloo.streams` watches them. This file has the layers that it watches, and mistakes planted for it to
find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import pmoe
from pmoe import MoELayer, Restore
from pmoe.engine.buffers.arena import pool
from pmoe.engine.lanes.cuda import CudaLanes
from pmoe.engine.passes import base as passes_base
from pmoe.engine.variants import offload
from pmoe.schedule.restore import ALL_PAIRS
from pmoe.schedule.tasks import Lane, Schedule
from tests.gloo.streams import COPY_LANES, FREE, OUTSIDE, Finding, Message, Report, Stream, watching
from tests.planted import rings_reused_early
from tests.pool import ranks
from tests.spread import named, spread
from tests.switched import switched_layer

D_MODEL, D_HIDDEN, NUM_EXPERTS, TOP_K = 8, 12, 4, 2
TOKENS = 1024  # enough rows for pipeline=True to choose two chunks on two ranks
STEPS = 2  # the second finds memory and streams that the first has used


# ---- mistakes planted on purpose


@contextlib.contextmanager
def without_waits(lane: Lane, *others: Lane) -> Iterator[None]:
    """Makes schedules in which no task of ``lane`` waits for one of ``others``; by default for any."""
    plan_schedule = passes_base.plan_schedule

    def careless(*args: Any) -> Schedule:
        schedule = plan_schedule(*args)
        unseen = {task.name for task in schedule.tasks if not others or task.lane in others}
        tasks = [
            replace(task, waits=tuple(name for name in task.waits if name not in unseen))
            if task.lane is lane
            else task
            for task in schedule.tasks
        ]
        return replace(schedule, tasks=tuple(tasks))

    with mock.patch.object(passes_base, "plan_schedule", careless):
        yield


def finish_without(*unseen: Lane) -> contextlib.AbstractContextManager[Any]:
    """Makes the compute lane wait at the end of a pass for all other lanes but ``unseen``."""

    def finish(self: CudaLanes) -> None:
        for lane, stream in self._stream.items():
            if lane is not Lane.COMPUTE and lane not in unseen:
                self._stream[Lane.COMPUTE].wait_stream(stream)

    return mock.patch.object(CudaLanes, "finish", finish)


def hold_whole_tensors() -> contextlib.AbstractContextManager[Any]:
    """Holds saved tensors until they are copied only if they are whole tensors, not parts of one."""

    hold_for = offload.hold_for

    def hold(stream: Any, tensor: Tensor) -> None:
        if tensor.nbytes == tensor.untyped_storage().nbytes():
            hold_for(stream, tensor)

    return mock.patch.object(offload, "hold_for", hold)


def nothing(*args: Any) -> None:
    pass


MISTAKES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "compute waits for no message": lambda: without_waits(Lane.COMPUTE),
    "messages wait for no compute": lambda: without_waits(Lane.COMMUNICATE),
    "finish does nothing": lambda: mock.patch.object(CudaLanes, "finish", nothing),
    "abandon does nothing": lambda: mock.patch.object(CudaLanes, "abandon", nothing),
    "copies out wait for nothing": lambda: without_waits(Lane.COPY_OUT),
    "compute waits for no copy in": lambda: without_waits(Lane.COMPUTE, Lane.COPY_IN),
    "rings are reused too early": rings_reused_early,
    "gathering waits for nothing": lambda: without_waits(Lane.INTRA_NODE),
    "messages wait for no gathering": lambda: without_waits(Lane.COMMUNICATE, Lane.INTRA_NODE),
    "finish waits for no copy": lambda: finish_without(*COPY_LANES),
    "host memory is handed out too early": lambda: mock.patch.object(
        CudaLanes, "_await_readers_of_the_host", nothing
    ),
    "modules' tensors are not held": lambda: mock.patch.object(offload, "hold_for", nothing),
    "parts of modules' tensors are not held": hold_whole_tensors,
    "messages end unseen": lambda: mock.patch.object(Message, "wait", lambda self: self.work.wait()),
}


# ---- jobs


def linear() -> nn.Module:
    return nn.Linear(D_MODEL, D_MODEL)


class Gated(nn.Module):
    """An expert whose graph saves the halves of a tensor, and a whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D_MODEL, 2 * D_HIDDEN), nn.Linear(D_HIDDEN, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Callbacks(pmoe.Callback):
    """A callback that sends other numbers of columns, and saves its inputs and results for backward."""

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return torch.cat([rows.sin(), rows[:, :1]], dim=1)

    def after_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows[:, 1:].cos()

    def before_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.sin()

    def after_combine(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.cos()


_meshes: dict[tuple[int, int], DeviceMesh] = {}


def build(options: dict[str, Any]) -> MoELayer:
    torch.manual_seed(7)
    options = dict(options)
    esp = options.pop("esp", None)
    if esp is not None:
        shape = (dist.get_world_size() // esp, esp)
        if shape not in _meshes:
            _meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "esp"))
        options["mesh"] = _meshes[shape]
    if options.get("callbacks"):
        options["callbacks"] = (Callbacks(),)
    return switched_layer(D_MODEL, D_HIDDEN, NUM_EXPERTS, TOP_K, **options)


def step(layer: MoELayer, rank: int) -> None:
    x = torch.randn(TOKENS - 5 * rank, D_MODEL).requires_grad_()
    (layer(x).sum() + layer.l_aux).backward()


def steps_job(
    rank: int, world: int, options: dict[str, Any], mistake: str = "none", host_bytes: int | None = None
) -> Report:
    """Runs steps, and returns the watch's report.

    host_bytes: the limit of the host pool.
    """
    host = pool().host
    limit = host.limit_bytes if host_bytes is None else host_bytes
    with watching() as watch, MISTAKES[mistake](), mock.patch.object(host, "limit_bytes", limit):
        layer = build(options)
        for _ in range(STEPS):
            step(layer, rank)
        return Report.of(watch)


def two_streams_job(rank: int, world: int, options: dict[str, Any], mistake: str = "none") -> Report:
    """Runs two layers, each on a stream of the caller's own, which share the lanes and the host memory."""
    with watching() as watch, MISTAKES[mistake]():
        layers = [(build(options), Stream(watch.look_for_frees)) for _ in range(2)]
        for _, stream in layers:
            stream.wait_stream(watch.current)
        for _ in range(STEPS):
            for layer, stream in layers:
                with watch.on(stream):
                    step(layer, rank)
        return Report.of(watch)


def failing_job(
    rank: int, world: int, method: str, mistake: str = "none", pair: str | bool = False, call: int = 1
) -> Report:
    """Lets a method of the experts fail on every rank in a certain call. A step without a failure follows."""
    with watching() as watch, MISTAKES[mistake]():
        layer = build({"pipeline": 3, "bypass_local": False, "memory_reuse": pair})
        works = [getattr(layer.experts, method)] * (call - 1)

        def fail(*args: Any, **options: Any) -> Any:
            if works:
                return works.pop()(*args, **options)
            raise RuntimeError("this expert fails")

        with mock.patch.object(layer.experts, method, fail), pytest.raises(RuntimeError, match="this expert"):
            step(layer, rank)
        watch.look_for_frees()
        step(layer, rank)
        return Report.of(watch)


# ---- tests


PLAIN: list[dict[str, Any]] = [
    {"pipeline": 1},
    {"pipeline": 3},
    {"pipeline": 4},
    {"pipeline": 3, "capacity_factor": 0.6},
    {"pipeline": 3, "expert": "swiglu", "bias": False},
    {"pipeline": 3, "expert": linear},
    {"pipeline": 3, "sequential": True},
]


@pytest.mark.parametrize(
    "world, options, bypass_local", spread([1, 2], PLAIN, [True, False], every=3), ids=named
)
def test_streams_never_race_and_no_buffer_is_freed_early(
    world: int, options: dict[str, Any], bypass_local: bool
) -> None:
    n = options["pipeline"]
    messages_a_pass = 0 if world == 1 and bypass_local else 2 * n + 1  # S and R of each chunk, and P
    for report in ranks(world).run(steps_job, {**options, "bypass_local": bypass_local}):
        assert report.findings == set()
        assert report.num_messages == STEPS * 2 * messages_a_pass


@pytest.mark.slow
@pytest.mark.parametrize("bypass_local", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_trials_of_n_never_race_either(world: int, bypass_local: bool) -> None:
    for report in ranks(world).run(steps_job, {"pipeline": True, "bypass_local": bypass_local}):
        assert report.findings == set()
        assert world == 1 or report.num_messages > STEPS * 2 * 3  # those of the trials are more


# Each two of these together at least once: chunks, the kind of expert, whether rows stay.
ROTATING = [
    (1, None, "ffn", True),
    (1, 1, Gated, False),
    (3, None, "ffn", False),
    (3, None, Gated, True),
    (3, 1, "ffn", True),
    (3, 1, Gated, False),
    (3, 1, "swiglu", False),
]

FLEXIBLE: list[dict[str, Any]] = [
    {"esp": 2},
    {"esp": 2, "one_lane": True},
    {"esp": 2, "expert": "swiglu", "send_once": True},
    {"esp": 2, "shared_expert": 5, "shared_gate": True},
    {"send_once": True},
    {"shared_expert": 5, "shared_gate": True},
    {"callbacks": True},
    {"callbacks": True, "esp": 2},
    {"callbacks": True, "send_once": True, "shared_expert": 5},
    {"dispatch": "hierarchical_1d", "nodes": 2},
    {"dispatch": "hierarchical_2d", "nodes": 2},
    {"dispatch": "hierarchical_2d", "nodes": 1, "send_once": True},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "world, options, reuse, n", spread([2, 4], FLEXIBLE, [False, "S1", "S3", "S4"], [1, 3], every=12)
)
def test_flexible_layers_never_race_and_no_buffer_is_freed_early(
    world: int, options: dict[str, Any], reuse: Any, n: int
) -> None:
    for report in ranks(world).run(steps_job, {**options, "pipeline": n, "memory_reuse": reuse}):
        assert not report.findings
        assert report.num_messages >= STEPS * 2 * (2 * n + 1)


@pytest.mark.parametrize("mistake", ["gathering waits for nothing", "messages wait for no gathering"])
def test_a_planted_race_of_the_lane_inside_the_node_is_found(mistake: str) -> None:
    options = {"esp": 2, "pipeline": 3}
    for report in ranks(2).run(steps_job, options, mistake):
        assert report.findings


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "pair, world, n, pipeline_backward, expert, bypass_local",
    spread(ALL_PAIRS, [1, 2], ROTATING, every=10),
    ids=named,
)
def test_rings_and_copies_never_race_and_no_buffer_is_freed_early(
    pair: Restore, world: int, n: int, pipeline_backward: int | None, expert: Any, bypass_local: bool
) -> None:
    options = {"memory_reuse": pair, "pipeline": n, "pipeline_backward": pipeline_backward}
    n_backward = pipeline_backward or n
    travels = world > 1 or not bypass_local
    sent_again = pair.dispatched == "communicate"
    messages = (2 * n + 1 + (2 + sent_again) * n_backward + 1) * travels
    # Of each chunk T_DI and T_M, as far as they are offloaded, of rows that travel and of rows that stay.
    copies_a_chunk = (pair.dispatched, pair.hidden).count("offload") * (travels + bypass_local)
    for report in ranks(world).run(steps_job, {**options, "expert": expert, "bypass_local": bypass_local}):
        assert report.findings == set()
        assert report.num_messages == STEPS * messages
        assert report.copy_tasks[Lane.COPY_OUT] == STEPS * n * copies_a_chunk
        assert report.copy_tasks[Lane.COPY_IN] == STEPS * n_backward * copies_a_chunk


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dispatched", ["keep", "communicate"])
@pytest.mark.parametrize("world", [1, 2])
def test_what_does_not_fit_on_the_host_is_made_again_without_a_race(world: int, dispatched: str) -> None:
    """T_M of 2048 rows is 96 KiB on one rank."""
    pair = Restore(dispatched, "offload")
    options = {"memory_reuse": pair, "pipeline": 4, "bypass_local": False}
    for report in ranks(world).run(steps_job, options, "none", 60 * 1024):
        assert report.findings == set()
        assert 0 < report.copy_tasks[Lane.COPY_OUT] < STEPS * 4


@pytest.mark.parametrize(
    "world, pair, bypass_local", spread([1, 2], ["S1", "S2", "S3", "S4"], [True, False], every=5)
)
def test_layers_on_two_streams_share_lanes_and_host_memory_without_a_race(
    world: int, pair: str, bypass_local: bool
) -> None:
    options = {"pipeline": 3, "bypass_local": bypass_local, "memory_reuse": pair}
    for report in ranks(world).run(two_streams_job, options):
        assert report.findings == set()
        assert (report.copy_tasks.total() > 0) == (pair != "S4")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["compute", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_error_in_an_expert_leaves_no_message_in_freed_buffers(world: int, method: str) -> None:
    for report in ranks(world).run(failing_job, method):
        assert report.findings == set()
        assert report.num_messages > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "mistake, first, then",
    [
        ("compute waits for no message", "S0 forward", "C0 forward"),
        ("messages wait for no compute", "G0 forward", "S0 forward"),
        ("messages end unseen", "S0 forward", "C0 forward"),
        ("finish does nothing", "P backward", OUTSIDE),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_planted_race_is_found(world: int, mistake: str, first: str, then: str) -> None:
    for report in ranks(world).run(steps_job, {"pipeline": 3, "bypass_local": False}, mistake):
        assert Finding(first=first, then=then) in report.findings


@pytest.mark.parametrize(
    "method, first",
    [
        ("compute", "S2 forward"),
        ("input_gradient", "S2 backward"),
        ("weight_gradient", "R1 backward"),  # the first comes right after R1
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_an_error_that_abandons_nothing_is_found_to_free_early(world: int, method: str, first: str) -> None:
    for report in ranks(world).run(failing_job, method, "abandon does nothing"):
        assert Finding(first=first, then=FREE) in report.findings


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "world, pair, method",
    spread([1, 2], ["S1", "S2", "S3", "S4"], ["compute", "input_gradient", "weight_gradient"], every=3),
)
def test_an_error_in_an_expert_leaves_no_copy_in_freed_buffers(world: int, pair: str, method: str) -> None:
    """The error comes in the second call, while the first chunk is being copied."""
    for report in ranks(world).run(failing_job, method, "none", pair, 2):
        assert report.findings == set()
        assert (report.copy_tasks.total() > 0) == (pair != "S4")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "method, pair, first",
    [
        ("compute", "S1", "DM0 forward"),
        ("input_gradient", "S1", "HI0 backward"),
        ("weight_gradient", "S2", "HM0 backward"),
        ("input_gradient", "S4", "SI0 backward"),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_an_error_that_abandons_nothing_is_found_to_free_rings_early(
    world: int, method: str, pair: str, first: str
) -> None:
    for report in ranks(world).run(failing_job, method, "abandon does nothing", pair, 2):
        assert Finding(first=first, then=FREE) in report.findings


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "mistake, pair, first, then",
    [
        ("copies out wait for nothing", "S1", "C0 forward", "DM0 forward"),
        ("compute waits for no copy in", "S1", "HI0 backward", "W0 backward"),
        ("compute waits for no copy in", "S2", "HM0 backward", "C0 backward"),
        ("rings are reused too early", "S1", "DM0 forward", "C2 forward"),
        ("rings are reused too early", "S1", "W2 backward", "HM0 backward"),
        ("finish waits for no copy", "S1", "DM2 forward", FREE),
        ("finish waits for no copy", "S1", "DM2 forward", "HM2 backward"),  # on the host
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_planted_race_of_rings_and_copies_is_found(
    world: int, mistake: str, pair: str, first: str, then: str
) -> None:
    options = {"pipeline": 3, "bypass_local": False, "memory_reuse": pair}
    for report in ranks(world).run(steps_job, options, mistake):
        assert Finding(first=first, then=then) in report.findings


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", ["DM0 forward", "C0 backward"])
@pytest.mark.parametrize("world", [1, 2])
def test_what_modules_save_is_found_to_be_freed_early(world: int, first: str) -> None:
    """Forward's tensors are made on the compute lane and copied by another lane.

    In backward it is the other way round.
    """
    options = {"pipeline": 3, "bypass_local": False, "memory_reuse": "S1", "expert": Gated}
    for report in ranks(world).run(steps_job, options, "modules' tensors are not held"):
        assert Finding(first=first, then=FREE) in report.findings


@pytest.mark.parametrize("world", [1, 2])
def test_a_part_of_what_a_module_saves_is_found_to_be_freed_early(world: int) -> None:
    """The saved tensors are halves of a tensor, and only whole tensors are held for the copy."""
    options = {"pipeline": 3, "bypass_local": False, "memory_reuse": "S1", "expert": Gated}
    for report in ranks(world).run(steps_job, options, "parts of modules' tensors are not held"):
        assert report.findings == {Finding(first=f"DM{i} forward", then=FREE) for i in range(3)}


def test_host_memory_handed_out_while_it_is_read_is_found() -> None:
    """Another layer gets the memory, on another stream: on the same stream every pass waits for the last.

    Rows that are sent would use the same communication lane, which orders the two as well.
    """
    options = {"pipeline": 3, "memory_reuse": "S1"}
    for report in ranks(1).run(two_streams_job, options, "host memory is handed out too early"):
        assert Finding(first="LHM0 backward", then="LDM0 forward") in report.findings
