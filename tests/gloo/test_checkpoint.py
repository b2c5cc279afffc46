"""Checkpoints of several ranks: loaded by other numbers of ranks bit by bit, and refused by all ranks
together.

If a rank is killed while a checkpoint is written, an older one is complete.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import pmoe
from pmoe.experts.operands import local_part
from pmoe.training import checkpoint_files
from pmoe.training.checkpoint import CheckpointError
from tests.gloo.lm import SLOW_IMPORT, batch, build, loss_of, shared, whole
from tests.own_experts import mlp
from tests.pool import Pool, ranks

ROOT = Path(__file__).resolve().parents[2]

Mesh = dict[str, int]
"""Sizes of a mesh's dimensions, by name."""


def make_mesh(sizes: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def make(sizes: Mesh | None, wrap: str, expert: Any) -> tuple[nn.Module, AdamW]:
    """Returns a model and its optimizer, over a mesh of these sizes, or in one process."""
    if sizes is None:
        model = build(None, expert=expert)
        return model, AdamW(model.parameters(), lr=1e-2)
    mesh = make_mesh(sizes)
    inner = mesh[tuple(name for name in sizes if name in ("ep", "esp"))]
    bare = pmoe.parallelize(build(inner, expert=expert), mesh)
    model = bare if wrap == "none" else shared(wrap, bare)
    return model, AdamW(pmoe.parameter_groups(model), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, world: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step, world).chunk(world)[rank]).backward()
        optimizer.step()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns every parameter and all of its state as one process has them, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        found[name] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = whole(value)
    return found


def saved(rank: int, world: int, folder: Path, sizes: Mesh, wrap: str, expert: Any) -> dict[str, Tensor]:
    model, optimizer = make(sizes, wrap, expert)
    train(model, optimizer, range(2), rank, world)
    pmoe.save_checkpoint(folder, model, optimizer, step=2, extra={"seen": [1, 2]})
    return contents(model, optimizer)


def loaded(rank: int, world: int, folder: Path, sizes: Mesh | None, wrap: str, expert: Any) -> Any:
    """Loads into a model with other values and an optimizer with another rate, before its first step."""
    model, optimizer = make(sizes, wrap, expert)
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).add_(1.0)
    optimizer.param_groups[0]["lr"] = 0.5
    found = pmoe.load_checkpoint(folder, model, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    return contents(model, optimizer), found.step, found.extra, found.random, rates


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


CASES = {
    "copies, ddp to fsdp": ({"dp": 2, "ep": 2}, "ddp", "ffn", {"ep": 2}, "fsdp"),
    "copies, fsdp to ddp": ({"dp": 2, "ep": 2}, "fsdp", "ffn", {"dp": 2, "ep": 1}, "ddp"),
    "split": ({"dp": 1, "ep": 2, "esp": 2}, "ddp", "swiglu", {"ep": 1, "esp": 2}, "ddp"),
    "modules": ({"dp": 2, "ep": 2}, "ddp", mlp, {"ep": 2}, "ddp"),
}


SLOW = CASES.keys() - {"modules", "split"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES]
)
def test_what_four_ranks_saved_one_and_two_load_to_the_bit(case: str, tmp_path: Path) -> None:
    sizes, wrap, expert, others, other_wrap = CASES[case]
    written = ranks(4).run(saved, tmp_path, sizes, wrap, expert, timeout=SLOW_IMPORT)
    if expert is mlp:  # each rank knows its own by its own names
        alone, *_ = loaded(0, 1, tmp_path, None, "none", expert)
        for rank, found in enumerate(written):
            assert_same(found, {name: alone[of_all(name, rank % 2)] for name in found})
        for rank, (found, *_) in enumerate(
            ranks(2).run(loaded, tmp_path, others, other_wrap, expert, timeout=SLOW_IMPORT)
        ):
            assert_same(found, {name: alone[of_all(name, rank)] for name in found})
        return
    for found in written[1:]:
        assert_same(found, written[0])
    alone, step, extra, random, rates = loaded(0, 1, tmp_path, None, "none", expert)
    assert_same(alone, written[0])
    assert (step, extra, random, rates) == (2, {"seen": [1, 2]}, False, [1e-2])
    two = ranks(2).run(loaded, tmp_path, others, other_wrap, expert, timeout=SLOW_IMPORT)
    for found, step, _, random, rates in two:
        assert_same(found, written[0])
        assert (step, random, rates) == (2, False, [1e-2, 1e-2])


def of_all(name: str, place: int) -> str:
    """Returns the name among all experts of a tensor that a rank at ``place`` of two calls ``name``."""
    before, found, after = name.partition(".experts.local.")
    number, _, rest = after.partition(".")
    return f"{before}{found}{int(number) + 2 * place}.{rest}" if found else name


@pytest.mark.parametrize(
    "expert, sizes, more",
    [
        ("ffn", {"dp": 1, "ep": 2}, {"dp": 1, "ep": 2, "esp": 2}),
        pytest.param("ffn", {"dp": 2, "ep": 2}, {"dp": 1, "ep": 2, "esp": 4}, marks=pytest.mark.slow),
        pytest.param("swiglu", {"dp": 2, "ep": 2}, {"dp": 1, "ep": 2, "esp": 4}, marks=pytest.mark.slow),
        pytest.param("swiglu", {"dp": 2, "ep": 2}, {"dp": 2, "ep": 4}, marks=pytest.mark.slow),
    ],
    ids=["two to four", "four to eight", "gated, four to eight", "gated, four to more groups of eight"],
)
@pytest.mark.slow
def test_what_some_ranks_saved_twice_as_many_load_to_the_bit(
    expert: str, sizes: Mesh, more: Mesh, tmp_path: Path
) -> None:
    few, many = math.prod(sizes.values()), math.prod(more.values())
    written = ranks(few).run(saved, tmp_path, sizes, "fsdp", expert, timeout=SLOW_IMPORT)
    for found, *_ in ranks(many).run(loaded, tmp_path, more, "fsdp", expert, timeout=2 * SLOW_IMPORT):
        assert_same(found, written[0])


def raw(rank: int, world: int, folder: Path, sizes: Mesh, saves: bool) -> dict[str, Tensor]:
    """Saves or loads with torch's own functions only."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = make(sizes, "ddp", "ffn")
    if saves:
        train(model, optimizer, range(2), rank, world)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    assert isinstance(of_model["blocks.0.moe.experts.w1"], DTensor)
    state = {"model": of_model, "optimizer": of_optimizer}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return contents(model, optimizer)


def test_torchs_own_checkpoint_functions_take_experts_as_sharded_tensors(tmp_path: Path) -> None:
    written = ranks(4).run(raw, tmp_path, {"dp": 2, "ep": 2}, True)
    for found in ranks(2).run(raw, tmp_path, {"dp": 1, "ep": 2}, False):
        assert_same(found, written[0])


def resumed(rank: int, world: int, folder: Path, stops: bool) -> tuple[dict[str, Tensor], Tensor]:
    # Not DDP: a new one sums its first gradients in other buckets, to other roundings.
    model, optimizer = make({"dp": 2, "ep": 2}, "fsdp", "ffn")
    torch.manual_seed(50 + rank)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        if stops and step == 2:
            extra = {"schedule": schedule.state_dict()}
            pmoe.save_checkpoint(folder, model, optimizer, step=step, extra=extra)
            model, optimizer = make({"dp": 2, "ep": 2}, "fsdp", "ffn")
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            found = pmoe.load_checkpoint(folder, model, optimizer)
            assert found.random and found.step == 2
            schedule.load_state_dict(found.extra["schedule"])
        train(model, optimizer, range(step, step + 1), rank, world)
        schedule.step()
    return contents(model, optimizer), torch.rand(3)


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = ranks(4).run(resumed, tmp_path, False, timeout=SLOW_IMPORT)
    stopped = ranks(4).run(resumed, tmp_path, True, timeout=SLOW_IMPORT)
    for (found, drawn), (expected, expected_drawn) in zip(stopped, straight, strict=True):
        assert_same(found, expected)
        assert torch.equal(drawn, expected_drawn)
    assert not torch.equal(straight[0][1], straight[1][1])


# ---- a rank dies ----------------------------------------------------------------------------------


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle(writer: Any, plan: Any, planner: Any) -> None:
    """Kills the process when half of a file is written."""
    (Path(writer.path) / "__0_0.distcp").write_bytes(b"half")
    die()


def before(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns ``call``, changed to kill the process when it would use a path with ``name`` in it."""

    def replaced(*paths: Any, **options: Any) -> Any:
        if any(name in str(path) for path in paths):
            die()
        return call(*paths, **options)

    return replaced


WRITE = "torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data"

MOMENTS: dict[str, tuple[int, Any]] = {
    "while tensors are written": (1, mock.patch(WRITE, die_in_the_middle)),
    "while tensors are written, the first rank": (0, mock.patch(WRITE, die_in_the_middle)),
    "before its random state is written": (1, mock.patch.object(checkpoint_files, "write_beside", die)),
    "before the folder is renamed": (0, mock.patch("os.replace", before(os.replace, "step_"))),
    "before the pointer is replaced": (0, mock.patch("os.replace", before(os.replace, "latest"))),
}


def saved_twice(rank: int, world: int, folder: Path, moment: str) -> Any:
    model, optimizer = make({"ep": 2}, "none", "ffn")
    pmoe.save_checkpoint(folder, model, optimizer, step=1)
    expected = contents(model, optimizer)
    if rank == 0:
        torch.save(expected, folder / "expected.pt")
    train(model, optimizer, range(2), rank, world)
    who, patch = MOMENTS[moment]
    if rank == who:
        with patch:
            pmoe.save_checkpoint(folder, model, optimizer, step=2, keep=1)
    with pytest.raises(RuntimeError):  # the peer is gone
        pmoe.save_checkpoint(folder, model, optimizer, step=2, keep=1)


QUICK = {"while tensors are written", "before the pointer is replaced"}


@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in MOMENTS]
)
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(moment: str, tmp_path: Path) -> None:
    pool = Pool(2, timeout_seconds=10)
    pool.start(saved_twice, tmp_path, moment)
    who = MOMENTS[moment][0]
    with pytest.raises(AssertionError, match="died with exit code -9"):
        pool.answer(who, timeout=SLOW_IMPORT)
    pool.answer(1 - who, timeout=SLOW_IMPORT)  # which was told, and lives
    pool.stop()
    model, optimizer = make(None, "none", "ffn")
    assert pmoe.load_checkpoint(tmp_path, model, optimizer).step == 1
    assert_same(contents(model, optimizer), torch.load(tmp_path / "expected.pt"))
    path = pmoe.save_checkpoint(tmp_path, model, optimizer, step=2, keep=1)  # what was left is no hindrance
    left = {each.name for each in tmp_path.glob("step_*")}
    assert left == {path.name}


# ---- refused --------------------------------------------------------------------------------------


def refused(rank: int, world: int, act: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        act(*args)
    return str(error.value)


def other_model(rank: int, world: int, folder: Path) -> tuple[str, bool]:
    """Loads into a model that has one block more and another width."""
    model, optimizer = make({"ep": 2}, "none", "ffn")
    pmoe.save_checkpoint(folder, model, optimizer, step=1)
    mesh = make_mesh({"ep": 2})
    other = build(mesh["ep"])
    other.blocks[1].moe = pmoe.MoELayer(8, 16, 4, 2, mesh=mesh["ep"])
    other.more = nn.Linear(2, 2)
    del other.blocks[0].norm
    pmoe.parallelize(other, mesh)
    before = {name: local_part(each).clone() for name, each in other.named_parameters()}
    message = refused(rank, world, pmoe.load_checkpoint, folder, other)
    after = {name: local_part(each) for name, each in other.named_parameters()}
    return message, all(torch.equal(after[name], value) for name, value in before.items())


def test_a_checkpoint_of_another_model_is_refused_by_name_before_anything_changes(tmp_path: Path) -> None:
    for message, unchanged in ranks(2).run(other_model, tmp_path):
        assert unchanged
        assert re_shape("blocks.1.moe.experts.w1", (4, 12, 8), (4, 16, 8)) in message
        assert "model.more.weight is not in it" in message
        assert "model.blocks.0.norm.weight is only in it" in message
        assert "model.head.weight" not in message


def re_shape(name: str, there: tuple[int, ...], here: tuple[int, ...]) -> str:
    return f"model.{name} has shape {there} in it, {here} in this run"


def unreadable(rank: int, world: int, folder: Path) -> tuple[str, bool, int]:
    """Loads with a file that only one rank cannot see."""
    model, optimizer = make({"ep": 2}, "none", "ffn")
    pmoe.save_checkpoint(folder, model, optimizer, step=1)
    train(model, optimizer, range(1), rank, world)
    before = contents(model, optimizer)
    stat = Path.stat

    def without(path: Path, **options: Any) -> os.stat_result:
        if rank == 1 and path.name == "__0_0.distcp":
            raise FileNotFoundError(2, "No such file", str(path))
        return stat(path, **options)

    with mock.patch.object(Path, "stat", without):
        message = refused(rank, world, pmoe.load_checkpoint, folder, model, optimizer)
    after = contents(model, optimizer)
    dist.barrier()
    return message, all(torch.equal(after[name], each) for name, each in before.items()), len(before)


def test_a_file_missing_on_one_rank_is_an_error_on_all_before_anything_changes(tmp_path: Path) -> None:
    (message, *_), (other, *_) = found = ranks(2).run(unreadable, tmp_path)
    assert message == other
    assert "rank 1: FileNotFoundError" in message and "rank 0" not in message
    assert all(unchanged and count > 30 for _, unchanged, count in found)


def damaged(rank: int, world: int, folder: Path) -> tuple[dict[str, str], bool]:
    """Flips a bit in each file of both ranks. Returns the errors, and whether nothing was changed by
    loading.
    """
    model, optimizer = make({"ep": 2}, "none", "ffn")
    path = pmoe.save_checkpoint(folder, model, optimizer, step=1)
    train(model, optimizer, range(1), rank, world)
    before, told = contents(model, optimizer), {}
    for name in sorted(each.name for each in path.iterdir()):
        file, whole = path / name, (path / name).read_bytes()
        dist.barrier()
        if rank == 0:
            at = len(whole) // 2
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        dist.barrier()
        told[name] = refused(rank, world, pmoe.load_checkpoint, folder, model, optimizer)
        dist.barrier()
        if rank == 0:
            file.write_bytes(whole)
    after = contents(model, optimizer)
    return told, all(torch.equal(after[name], each) for name, each in before.items())


def test_a_flipped_bit_in_any_ranks_file_is_named_on_all_before_anything_changes(tmp_path: Path) -> None:
    (told, unchanged), (other, also_unchanged) = ranks(2).run(damaged, tmp_path)
    assert told == other and unchanged and also_unchanged
    by_rank = {
        f"{name}_{rank}{end}" for rank in range(2) for name, end in (("random", ".pt"), ("sums", ".json"))
    }
    assert set(told) == by_rank | {"plain.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"}
    for name, message in told.items():
        assert name in message and "step= loads another" in message


def full_disk(rank: int, world: int, folder: Path) -> tuple[str, list[str], int]:
    model, optimizer = make({"ep": 2}, "none", "ffn")
    pmoe.save_checkpoint(folder, model, optimizer, step=1)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write = fails if rank == 1 else checkpoint_files.write_beside
    with mock.patch.object(checkpoint_files, "write_beside", write):
        message = refused(rank, world, save_step_2, folder, model, optimizer)
    dist.barrier()
    return message, sorted(each.name for each in folder.iterdir()), pmoe.load_checkpoint(folder, model).step


def save_step_2(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pmoe.save_checkpoint(folder, model, optimizer, step=2)


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    for message, left, step in ranks(2).run(full_disk, tmp_path):
        assert message == "checkpoint: writing: rank 1: OSError: [Errno 28] No space left on device"
        assert left == ["latest.json", "step_00000001"] and step == 1


class Stateful(nn.Module):
    """A module with extra state that one rank cannot save: it raises, or is not plain data."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def get_extra_state(self) -> object:
        if dist.get_rank() == 0:
            return {"plain": 1}
        if self.how == "raises":
            raise RuntimeError("out of order")
        return lambda: 1

    def set_extra_state(self, state: object) -> None:
        pass


def wrong_on_rank_1(rank: int, world: int, folder: Path) -> list[str]:
    model, optimizer = make({"ep": 2}, "none", "ffn")
    raises, lambdas = (nn.Sequential(model, Stateful(how)) for how in ("raises", "not plain"))
    extra: Any = 5 if rank else {"epoch": 1}
    return [
        refused(rank, world, lambda: pmoe.save_checkpoint(folder, model, optimizer, step=1, extra=extra)),
        refused(rank, world, lambda: pmoe.save_checkpoint(folder, model, optimizer, step=3 + rank)),
        refused(rank, world, lambda: pmoe.save_checkpoint(folder, raises, step=1)),
        refused(rank, world, lambda: pmoe.save_checkpoint(folder, lambdas, step=1)),
    ]


def test_what_is_wrong_on_one_rank_is_an_error_on_all_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    first, second = ranks(2).run(wrong_on_rank_1, folder)
    assert first == second
    extra, step, raises, lambdas = first
    assert extra == "checkpoint: collecting: rank 1: TypeError: extra (5) must be a mapping of names, or None"
    rule = "checkpoint: step must be the same on every rank, and differs"
    assert step == f"{rule}: rank 0: 3; rank 1: 4. Pass the same step on every rank"
    assert raises == "checkpoint: collecting: rank 1: RuntimeError: out of order"
    assert "rank 1: extra, extra states of modules and options" in lambdas and "rank 0" not in lambdas
    assert not folder.exists()


def frozen_later(rank: int, world: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Trains all, then freezes the MoE layers and goes on. Saves, and loads into a new frozen model."""
    found = []
    for is_saved in (True, False):
        model, optimizer = make({"ep": 2}, "ddp", "ffn")
        layers = [module for module in model.modules() if isinstance(module, pmoe.MoELayer)]
        if is_saved:
            train(model, optimizer, range(2), rank, world)
        for layer in layers:
            layer.requires_grad_(False)
        if is_saved:
            pmoe.save_checkpoint(folder, model, optimizer, step=2)
        else:
            pmoe.load_checkpoint(folder, model, optimizer)
        found.append(contents(model, optimizer))
        is_frozen = not any(p.requires_grad for layer in layers for p in layer.parameters())
    return found[0], found[1], is_frozen


def test_states_of_parameters_that_were_frozen_later_load_into_frozen_ones(tmp_path: Path) -> None:
    """torch makes no state for a frozen parameter, so the saved states seemed not to fit the optimizer."""
    for saved_contents, loaded_contents, is_frozen in ranks(2).run(frozen_later, tmp_path):
        assert any("experts.w1/exp_avg" in name for name in saved_contents)
        assert_same(loaded_contents, saved_contents)
        assert is_frozen


def different_arguments(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Calls both functions with arguments that differ between the ranks, as a script by mistake does."""
    model, optimizer = make({"ep": 2}, "none", "ffn")
    pmoe.save_checkpoint(folder, model, optimizer, step=1)
    save, load = pmoe.save_checkpoint, pmoe.load_checkpoint
    own = None if rank else optimizer
    other = folder / "of_rank_1" if rank else folder
    either = (lambda: load(folder, model)) if rank else (lambda: save(folder, model, step=2))
    calls: dict[str, Callable[[], object]] = {
        "load optimizer": lambda: load(folder, model, own),
        "load optimizers": lambda: load(folder, model, [optimizer, *([optimizer] if rank else [])]),
        "load folder": lambda: load(other, model, optimizer),
        "load step": lambda: load(folder, model, optimizer, step=None if rank else 1),
        "save optimizer": lambda: save(folder, model, own, step=2),
        "save folder": lambda: save(other, model, optimizer, step=2),
        "save keep": lambda: save(folder, model, optimizer, step=2, keep=2 + rank),
        "either": either,
    }
    messages = {name: refused(rank, world, call) for name, call in calls.items()}
    assert [each.name for each in folder.glob("step_*")] == ["step_00000001"]
    return messages


def test_arguments_that_differ_between_ranks_are_named_on_all_at_once(tmp_path: Path) -> None:
    first, second = ranks(2).run(different_arguments, tmp_path)
    assert first == second
    folder = tmp_path
    values = {
        "load optimizer": ("optimizer", "rank 0: AdamW; rank 1: None"),
        "load optimizers": ("optimizer", "rank 0: AdamW; rank 1: AdamW, AdamW"),
        "load folder": ("folder", f"rank 0: {folder}; rank 1: {folder}/of_rank_1"),
        "load step": ("step", "rank 0: 1; rank 1: None"),
        "save optimizer": ("optimizer", "rank 0: AdamW; rank 1: None"),
        "save folder": ("folder", f"rank 0: {folder}; rank 1: {folder}/of_rank_1"),
        "save keep": ("keep", "rank 0: 2; rank 1: 3"),
        "either": ("the function", "rank 0: save_checkpoint; rank 1: load_checkpoint"),
    }
    for name, (argument, of_ranks) in values.items():
        rule = f"checkpoint: {argument} must be the same on every rank, and differs: {of_ranks}. "
        assert first[name].startswith(rule), first[name]


def unparallelized(rank: int, world: int, folder: Path) -> str:
    model = build(None)  # over the default group
    return refused(rank, world, lambda: pmoe.save_checkpoint(folder, model, step=1))


def test_experts_of_several_ranks_under_one_name_are_not_saved(tmp_path: Path) -> None:
    for message in ranks(2).run(unparallelized, tmp_path):
        assert "blocks.0.moe" in message and "call pmoe.parallelize(model, mesh)" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_example_goes_on_with_other_ranks_and_another_wrapper(tmp_path: Path) -> None:
    def run(count: int, *options: str) -> list[float]:
        launch = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node"
        script = [str(ROOT / "examples" / "data_parallel.py"), "--folder", str(tmp_path / "run"), *options]
        found = subprocess.run(
            [sys.executable, "-W", "ignore", *launch.split(), str(count), *script],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert found.returncode == 0, found.stderr
        return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", found.stdout, re.MULTILINE)]

    first = run(4, "--steps", "20")
    then = run(2, "--steps", "30", "--wrap", "fsdp")
    assert len(first) == 2 and len(then) == 1
    assert then[0] < first[1] < first[0]
