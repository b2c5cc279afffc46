"""Programs whose ranks run the same backward passes: they go on without an error or a warning.

Ranks compare which backward passes they have run (`pmoe.comm.meeting`). A comparison that is too strict would
end a program in which nothing is wrong. Programs whose ranks differ raise on every rank, and name the cause.
"""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.comm import group_record
from pmoe.comm.meeting import Meeting
from pmoe.engine.passes.backward import Backward
from pmoe.training.parallel import make_meshes, reduce_gradients
from tests.gloo.kit import error_of
from tests.pool import Pool, ranks

M, H, E = 6, 8, 4
TIMEOUT_SECONDS = 20.0
"""The timeout of groups whose ranks differ. A rank that waits so long has not seen what its peers do."""


class Model(nn.Module):
    """A dense module and three layers: two of one process group, and one of another group.

    Messages of the layers have equal sizes where ranks have equally many tokens.
    """

    def __init__(self, world: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(M, M)
        group = dist.new_group(list(range(world)))
        self.first = pmoe.MoELayer(M, H, E, 2, group=group, **options)
        self.second = pmoe.MoELayer(M, H, E, 2, group=group, **options)
        self.third = pmoe.MoELayer(M, H, E, 2, group=dist.new_group(list(range(world))), **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.first(self.dense(x)).sin()).sin())
        return y


def tokens(rank: int, count: int = 5) -> Tensor:
    return torch.randn(count, M, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def in_thread(run: Callable[[], Any]) -> Any:
    """Returns what a function returns that runs in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


# ---- programs of which each rank runs the same


def programs(model: Model, rank: int) -> dict[str, Callable[[], object]]:
    """Returns programs by their names. Rank 1 has no tokens in some of their calls."""

    def x(count: int = 5) -> Tensor:
        return tokens(rank, count)

    def two_groups() -> None:
        first = model.first(x()).sum()
        third = model.third(x()).sum()
        second = model.second(x()).sum()
        for loss in (third, first, second):
            loss.backward()

    def two_optimizers() -> None:
        scaler = pmoe.GradScaler("cpu", init_scale=4.0)
        optimizers = [
            torch.optim.SGD([*model.first.parameters(), *model.dense.parameters()], lr=0.0),
            torch.optim.SGD([*model.second.parameters(), *model.third.parameters()], lr=0.0),
        ]
        for has_second_loss in (True, False, True):
            scaler.scale(model.first(model.dense(x())).sum()).backward()
            unused = model.third(model.second(x()))
            if has_second_loss:
                scaler.scale(unused.sum()).backward()
            scaler.unscale_(optimizers[0])
            pmoe.clip_grad_norm_(model.first, 1.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

    def forward_in_a_thread() -> None:
        y = in_thread(lambda: model(x()))
        y.sum().backward()
        in_thread(lambda: model(x()))  # without a backward pass

    def backward_in_a_thread() -> None:
        loss = model(x()).sum()
        in_thread(loss.backward)

    def clipped_in_a_thread() -> None:
        model(x())
        in_thread(lambda: pmoe.clip_grad_norm_(model, 1.0))

    def called_in_a_hook() -> None:
        y = model.first(x())

        def call(_: Tensor) -> None:
            with torch.no_grad():
                model.third(x())
            with torch.enable_grad():
                model.second(x()).sum().backward()

        y.register_hook(call)
        y.sum().backward()

    def called_in_its_own_hooks() -> None:
        """Hooks of the gate and of the experts call the same layer again, once."""
        hooks = []

        def call(module: nn.Module, *_: Any) -> None:
            hooks.pop(0).remove()
            with torch.no_grad():
                model.first(x(2))

        hooks.append(model.first.gate.register_forward_hook(call))
        hooks.append(model.first.experts.register_forward_pre_hook(call))
        model.first(x()).sum().backward()
        assert not hooks

    def hooked_gradients() -> None:
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
            for parameter in model.second.parameters()
        ]
        hooks.append(model.first.register_full_backward_hook(lambda *_: None))
        model(x()).sum().backward()
        for hook in hooks:
            hook.remove()

    def many_open_calls() -> None:
        with mock.patch.object(group_record, "MOST_OPEN", 4):
            outputs = [model.first(x()) for _ in range(7)]
            for at in (6, 0, 3, 1):  # calls 0 and 1 are no longer recorded
                outputs[at].sum().backward()
            pmoe.clip_grad_norm_(model, 1.0)
            model.first(x()).sum().backward()

    def accumulated() -> None:
        for count in (5, 0 if rank else 7, 3 + rank, 0):
            (model(x(count)).sum() / 4).backward()

    def checkpointed(**kind: Any) -> None:
        for _ in range(2):
            h = checkpoint(lambda each: model.second(model.first(each).sin()), x(), **kind)
            checkpoint(model.third, h, **kind).sum().backward()

    def called_twice() -> None:
        h = model.first(x())
        (model.first(h.sin()) + model.first(h.cos())).sum().backward()

    def part_of_the_graph() -> None:
        h = model.first(x())
        y = model.second(h)
        (gradient,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
        pmoe.clip_grad_norm_(model, 1.0)
        h.backward(gradient)

    def kept_graph() -> None:
        loss = model(x()).sum()
        for keeps in (True, True, False):
            loss.backward(retain_graph=keeps)

    def used_twice() -> None:
        y = model.first(x())
        (y.sum() + (2 * y).sum()).backward(retain_graph=True)
        (y * y).sum().backward()

    def evaluated_between() -> None:
        loss = model(x()).sum()
        averaged = copy.deepcopy(model.first).eval()
        with torch.no_grad():
            model(x(3))
            averaged(x(2))
        with torch.inference_mode():
            model.second(x(4))
        loss.backward()

    def halves() -> None:
        """The second halves send nothing, so ranks may run them in different orders."""
        calls = []
        for _ in range(3):
            inputs = x()
            y = model.first(inputs)
            dy = torch.ones_like(y)
            torch.autograd.grad(y, inputs, dy, retain_graph=True)
            calls.append((y, dy))
        for y, dy in calls[:: 1 if rank else -1]:
            torch.autograd.grad(y, [*model.first.experts.parameters()], dy)

    def one_forward_one_backward() -> None:
        outputs = [model(x(count)) for count in (5, 3)]
        for count in (2, 0, 4):
            outputs.pop(0).sum().backward()
            outputs.append(model(x(count)))
        for y in outputs:
            y.sum().backward()

    def of_l_aux() -> None:
        model.first(x())
        assert model.first.l_aux is not None
        model.first.l_aux.backward()

    def gate_alone() -> None:
        """Only one rank trains its experts."""
        experts = [*model.first.experts.parameters()]
        for parameter in experts:
            parameter.requires_grad_(rank == 0)
        model.first(model.dense(x())).sum().backward()
        with torch.no_grad():
            for parameter in experts:
                parameter.requires_grad_()

    def freed_graph() -> None:
        """The same error at the same place, twice: no rank begins to send."""
        loss = model.first(x()).sum()
        loss.backward()
        for _ in range(2):
            assert "backward through the graph a second time" in error_of(loss.backward)

    def changed_in_place() -> None:
        loss = model.first(x()).sum()
        with torch.no_grad():
            model.first.experts.w1.mul_(1.0)
        assert "modified by an inplace operation" in error_of(loss.backward)

    def bad_input() -> None:
        assert "d_model" in error_of(lambda: model.first(x()[:, :2]))
        loss = model(x()).sum()
        assert "d_model" in error_of(lambda: model.second(x()[:, :2]))
        loss.backward()

    return {
        "two groups": two_groups,
        "two optimizers": two_optimizers,
        "forward in a thread": forward_in_a_thread,
        "backward in a thread": backward_in_a_thread,
        "clipped in a thread": clipped_in_a_thread,
        "called in a hook": called_in_a_hook,
        "called in its own hooks": called_in_its_own_hooks,
        "hooks of gradients": hooked_gradients,
        "many open calls": many_open_calls,
        "accumulated": accumulated,
        "older checkpoint": lambda: checkpointed(use_reentrant=True),
        "newer checkpoint": lambda: checkpointed(use_reentrant=False),
        "pmoe's checkpoint": lambda: checkpointed(use_reentrant=False, context_fn=pmoe.checkpoint_contexts),
        "called twice": called_twice,
        "a part of the graph": part_of_the_graph,
        "a graph that is kept": kept_graph,
        "used twice": used_twice,
        "evaluated between the passes": evaluated_between,
        "halves": halves,
        "one forward, one backward": one_forward_one_backward,
        "of l_aux alone": of_l_aux,
        "a gate alone": gate_alone,
        "a graph that is freed": freed_graph,
        "changed in place": changed_in_place,
        "bad input": bad_input,
    }


def programs_job(rank: int, world: int, options: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the error and the warnings of each program. A step and a reduction follow each program."""
    model = Model(world, **options)
    found = {}
    for name, program in programs(model, rank).items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            told = [error_of(program)]
            told.append(error_of(lambda: model(tokens(rank)).sum().backward()))
            told.append(error_of(lambda: pmoe.clip_grad_norm_(model, 1.0)))
            told.append(error_of(lambda: model(tokens(rank)).sum().backward()))
        texts = [str(each.message) for each in caught]
        found[name] = [text for text in (*told, *texts) if text and "inputs have requires_grad" not in text]
    return found


@pytest.mark.parametrize("options", [{}, {"pipeline": 2, "memory_reuse": "S4"}], ids=str)
def test_programs_that_every_rank_runs_have_no_error_and_no_warning(options: dict[str, Any]) -> None:
    for found in ranks(2).run(programs_job, options):
        assert {name: texts for name, texts in found.items() if texts} == {}


def slow_job(rank: int, world: int) -> list[str]:
    """Both ranks reduce gradients between two passes. Rank 1 is slow to leave the meeting."""
    meshes = make_meshes(ep=world)
    layers = nn.ModuleList([pmoe.MoELayer(M, H, E, 2, mesh=meshes.experts) for _ in range(2)])
    leave = Meeting.leave

    def slow_leave(own: Meeting) -> bool:
        time.sleep(1.5 if rank == 1 else 0.0)
        return leave(own)

    first, second = (layer(tokens(rank)).sum() for layer in layers)
    second.backward()
    if rank == 0:
        time.sleep(1.0)  # so rank 1 has to publish that it waits
    with mock.patch.object(Meeting, "leave", slow_leave):
        # Each expert is on one rank only, so nothing is sent after the meeting.
        told = [error_of(lambda: reduce_gradients(layers, meshes, experts_only=True))]
        told.append(error_of(first.backward))
    told.append(error_of(lambda: layers[0](tokens(rank)).sum().backward()))
    return told


def test_a_rank_that_is_slow_to_leave_a_meeting_is_not_taken_for_one_that_skips_a_pass() -> None:
    """The other rank read what the slow one had published before all had come, and raised."""
    assert ranks(2).run(slow_job) == [["", "", ""]] * 2


def before_rows_job(rank: int, world: int) -> list[str]:
    """Each rank fails before a backward pass sends rows: one before, one after the pass was counted."""
    layer = pmoe.MoELayer(M, H, E, 2, group=dist.new_group(list(range(world))))

    def step() -> None:
        layer(tokens(rank)).sum().backward()

    def unpack(_: Any) -> Any:
        raise MemoryError("planted")

    @contextmanager
    def failing() -> Iterator[None]:
        if rank == 0:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
                yield
        else:
            with mock.patch.object(Backward, "__init__", mock.Mock(side_effect=MemoryError("planted"))):
                yield

    told = [error_of(step)]
    with failing():
        told.append(error_of(step))
    return [*told, *(error_of(step) for _ in range(2))]


def test_ranks_that_all_fail_before_a_pass_sends_rows_go_on() -> None:
    """One had counted the pass and the other not, so the next call said that passes differ."""
    assert ranks(2).run(before_rows_job) == [["", "MemoryError: planted", "", ""]] * 2


# ---- programs whose ranks differ


def other_checkpoint_order(model: Model, rank: int) -> None:
    """Rank 1 runs the passes of two checkpointed layers in the other order (ByteDance-Seed/VeOmni#979)."""
    outputs = [
        checkpoint(layer, tokens(rank), use_reentrant=False).sum() for layer in (model.first, model.second)
    ]
    for loss in outputs[:: 1 if rank else -1]:
        loss.backward()


def part_on_one_rank(model: Model, rank: int) -> None:
    """Rank 1 differentiates the second of two layers only."""
    h = model.first(tokens(rank))
    y = model.second(h).sum()
    if rank == 1:
        torch.autograd.grad(y, h)
    else:
        y.backward()


def evaluated_on_one_rank(model: Model, rank: int) -> None:
    """Rank 1 evaluates between the passes."""
    loss = model.first(tokens(rank)).sum()
    if rank == 1:
        with torch.no_grad():
            model.first(tokens(rank))
    loss.backward()


def changed_on_one_rank(model: Model, rank: int) -> None:
    """Rank 1 changes its experts between the passes, as an optimizer step at the wrong place does."""
    loss = model.first(tokens(rank)).sum()
    if rank == 1:
        with torch.no_grad():
            model.first.experts.w1.mul_(1.0)
    loss.backward()


DIFFERENT: dict[str, tuple[Callable[[Model, int], None], str]] = {
    "checkpoints": (other_checkpoint_order, "backward"),
    "a part of the graph": (part_on_one_rank, "goes on without the backward pass of MoELayer 1"),
    "an evaluation": (evaluated_on_one_rank, "goes on without the backward pass of MoELayer 1"),
    "a change in place": (changed_on_one_rank, "modified by an inplace operation"),
}
"""Programs whose ranks differ, and a part of the errors that they raise."""


def different_job(rank: int, world: int, name: str) -> tuple[list[str], float]:
    """Returns the errors of the program, of a clip and of two steps, and how many seconds they took."""
    model = Model(world)
    model(tokens(rank)).sum().backward()
    start = time.monotonic()
    told = [error_of(lambda: DIFFERENT[name][0](model, rank))]
    told.append(error_of(lambda: pmoe.clip_grad_norm_(model, 1.0)) if not told[0] else "")
    told += [error_of(lambda: model(tokens(rank)).sum().backward()) for _ in range(2)]
    return told, time.monotonic() - start


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DIFFERENT)
def test_programs_that_differ_raise_on_every_rank(name: str) -> None:
    with Pool(2, TIMEOUT_SECONDS) as pool:
        found = pool.run(different_job, name, timeout=100)
    for told, seconds in found:
        errors = [text for text in told if text]
        assert errors and DIFFERENT[name][1] in " ".join(errors), found
        assert "took longer than the group's timeout" not in errors[0], found
        assert seconds < TIMEOUT_SECONDS, found
