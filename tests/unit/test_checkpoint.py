"""Checkpoints of one process: which are kept, what is restored, and what is refused before anything
changes.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.optim import SGD, AdamW, Optimizer

import pmoe
from pmoe.training.checkpoint import CheckpointError
from pmoe.training.checkpoint_files import _Records


def make(width: int = 6, **options: Any) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), pmoe.MoELayer(4, width, 2), nn.BatchNorm1d(4))
    return model, AdamW(model.parameters(), lr=1e-2, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


def contents(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters() if optimizer else ():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value.clone()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_parameters_buffers_and_optimizer_come_back_to_the_bit(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 3)
    path = pmoe.save_checkpoint(tmp_path, model, optimizer, step=3, extra={"epoch": 1, "losses": [0.5]})
    assert path == tmp_path / "step_00000003"
    other, fresh = make()
    found = pmoe.load_checkpoint(str(tmp_path), other, fresh)
    assert (found.path, found.step, found.extra) == (path, 3, {"epoch": 1, "losses": [0.5]})
    assert_same(contents(other, fresh), contents(model, optimizer))
    train(model, optimizer)
    train(other, fresh)
    assert_same(contents(other, fresh), contents(model, optimizer))


def test_random_generators_come_back(tmp_path: Path) -> None:
    model, _ = make()
    pmoe.save_checkpoint(tmp_path, model, step=0)
    drawn = torch.rand(3), random.random()
    assert pmoe.load_checkpoint(tmp_path, model).random
    assert torch.equal(torch.rand(3), drawn[0]) and random.random() == drawn[1]


def test_how_a_step_is_computed_stays_the_new_runs_and_options_are_the_old_ones(tmp_path: Path) -> None:
    model, optimizer = make(foreach=True, weight_decay=0.3)
    train(model, optimizer)
    pmoe.save_checkpoint(tmp_path, model, optimizer, step=1)
    other, fresh = make(fused=True, weight_decay=0.1)
    pmoe.load_checkpoint(tmp_path, other, fresh)
    group = fresh.param_groups[0]
    assert (group["fused"], group["foreach"], group["weight_decay"], group["lr"]) == (True, None, 0.3, 1e-2)
    train(other, fresh)


def test_parameters_may_be_grouped_otherwise_where_options_were_alike(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    pmoe.save_checkpoint(tmp_path, model, optimizer, step=1)
    other, _ = make()
    weights = [each for each in other.parameters() if each.dim() > 1]
    rest = [each for each in other.parameters() if each.dim() == 1]
    apart = AdamW([{"params": weights, "weight_decay": 0.7}, {"params": rest}], lr=torch.tensor(9.0))
    pmoe.load_checkpoint(tmp_path, other, apart)
    assert_same(contents(other, apart), contents(model, optimizer))
    assert [group["weight_decay"] for group in apart.param_groups] == [1e-2, 1e-2]
    assert [float(group["lr"]) for group in apart.param_groups] == pytest.approx([1e-2, 1e-2])
    apart.param_groups[1]["weight_decay"] = 0.5
    pmoe.save_checkpoint(tmp_path, other, apart, step=2)
    with pytest.raises(CheckpointError, match=r"optimizer.0.weight, now in one group, had different options"):
        pmoe.load_checkpoint(tmp_path, model, optimizer)


def test_state_of_parameters_that_had_none_is_dropped(tmp_path: Path) -> None:
    model, optimizer = make()
    unused = nn.Parameter(torch.zeros(2))
    model.unused = unused
    optimizer.add_param_group({"params": [unused]})
    train(model, optimizer)
    pmoe.save_checkpoint(tmp_path, model, optimizer, step=1)
    unused.grad = torch.ones(2)
    optimizer.step()
    assert unused in optimizer.state
    pmoe.load_checkpoint(tmp_path, model, optimizer)
    assert unused not in optimizer.state and len(optimizer.state) == 9
    never, before = make()
    pmoe.save_checkpoint(tmp_path, never, before, step=2)  # before the first step there is none at all
    assert not before.state
    train(never, before)
    pmoe.load_checkpoint(tmp_path, never, before)
    assert not before.state


def test_a_load_between_backward_and_step_keeps_gradients_and_options(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, 2)
    pmoe.save_checkpoint(tmp_path, model, optimizer, step=2)
    other, fresh = make(fused=True)
    other(torch.ones(5, 4)).sum().backward()
    gradients = [each.grad for each in other.parameters()]
    pmoe.load_checkpoint(tmp_path, other, fresh)
    assert all(each.grad is grad for each, grad in zip(other.parameters(), gradients, strict=True))
    assert_same(contents(other, fresh), contents(model, optimizer))

    class Failing(AdamW):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("out of order")

    failing = Failing(other.parameters(), lr=0.5)
    message = refused(tmp_path, other, failing)
    assert message.endswith("RuntimeError: out of order")
    assert all(each.grad is grad for each, grad in zip(other.parameters(), gradients, strict=True))


def test_wrappers_leave_no_trace_and_tied_parameters_stay_tied(tmp_path: Path) -> None:
    def tied() -> tuple[nn.Module, AdamW]:
        model, _ = make()
        model.append(nn.Linear(4, 4))
        model[3].weight = model[0].weight
        return model, AdamW(model.parameters(), lr=1e-2)

    model, optimizer = tied()
    model[1] = checkpoint_wrapper(model[1])
    train(model, optimizer, 2)
    pmoe.save_checkpoint(tmp_path, model, optimizer, step=1)
    of_wrapped = contents(model, optimizer)
    expected = {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in of_wrapped.items()}
    bare, fresh = tied()
    pmoe.load_checkpoint(tmp_path, bare, fresh)
    assert bare[3].weight is bare[0].weight
    assert_same(contents(bare, fresh), expected)
    wrapped, anew = tied()
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    pmoe.load_checkpoint(tmp_path, wrapped, anew)
    assert_same(contents(wrapped, anew), contents(model, optimizer))


def test_several_optimizers_and_ones_without_state(tmp_path: Path) -> None:
    model, _ = make()
    dense, experts = list(model[0].parameters()), list(model[1].parameters())
    both = [SGD(dense, lr=0.1), AdamW(experts, lr=0.2)]
    for each in both:
        train(model, each)
    pmoe.save_checkpoint(tmp_path, model, both, step=1)
    expected = contents(model, both[1])
    other, _ = make()
    anew = [SGD(other[0].parameters(), lr=1.0), AdamW(other[1].parameters(), lr=1.0)]
    pmoe.load_checkpoint(tmp_path, other, anew)
    assert_same(contents(other, anew[1]), expected)
    assert [each.param_groups[0]["lr"] for each in anew] == [0.1, 0.2]


# ---- folders --------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_stay_and_any_of_them_loads(tmp_path: Path) -> None:
    model, _ = make()
    for step in (5, 10, 3):
        with torch.no_grad():
            model[0].bias.fill_(step)
        pmoe.save_checkpoint(tmp_path, model, step=step, keep=2)
    assert names(tmp_path) == ["latest.json", "step_00000003", "step_00000010"]
    assert pmoe.load_checkpoint(tmp_path, model).step == 3  # the last that was saved
    assert pmoe.load_checkpoint(tmp_path, model, step=10).step == 10
    assert model[0].bias.tolist() == [10] * 4
    with pytest.raises(CheckpointError, match=r"step \('3'\) must be an int of at least 0"):
        pmoe.load_checkpoint(tmp_path, model, step="3")
    with pytest.raises(CheckpointError, match=r"step \(5\) must be one of those in .*step_00000003"):
        pmoe.load_checkpoint(tmp_path, model, step=5)


def test_the_same_step_again_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    model, _ = make()
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model[0].bias.fill_(value)
        pmoe.save_checkpoint(tmp_path, model, step=1, keep=2)
    assert names(tmp_path) == ["latest.json", "step_00000001-2", "step_00000001-3"]
    model[0].bias.data.zero_()
    assert pmoe.load_checkpoint(tmp_path, model).step == 1
    assert model[0].bias.tolist() == [3] * 4
    assert pmoe.load_checkpoint(tmp_path, model, step=1).path.name == "step_00000001-3"


def test_a_removal_that_was_cut_short_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = make()
    pmoe.save_checkpoint(tmp_path, model, step=1)

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", stopped)
        pmoe.save_checkpoint(tmp_path, model, step=2, keep=1)
    assert names(tmp_path) == ["latest.json", "step_00000001.tmp", "step_00000002"]
    assert pmoe.load_checkpoint(tmp_path, model).step == 2
    pmoe.save_checkpoint(tmp_path, model, step=3, keep=1)
    assert names(tmp_path) == ["latest.json", "step_00000003"]


# ---- refused --------------------------------------------------------------------------------------


def refused(folder: Path, model: nn.Module, optimizer: Optimizer | None = None) -> str:
    """Loads a checkpoint that must be refused. Returns the error's text, after checking that nothing
    changed.
    """
    before, groups = contents(model, optimizer), optimizer and str(optimizer.param_groups)
    with pytest.raises(CheckpointError) as error:
        pmoe.load_checkpoint(folder, model, optimizer)
    assert_same(contents(model, optimizer), before)
    assert groups == (optimizer and str(optimizer.param_groups))
    return str(error.value)


def test_another_shape_type_or_name_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    path = pmoe.save_checkpoint(tmp_path, model, optimizer, step=1)
    message = refused(tmp_path, *make(8))
    assert message == (
        f"checkpoint {path} does not fit the model: model.1.experts.b1 has shape (2, 6) in it, "
        "(2, 8) in this run; model.1.experts.w1 has shape (2, 6, 4) in it, (2, 8, 4) in this run; "
        "model.1.experts.w2 has shape (2, 4, 6) in it, (2, 4, 8) in this run"
    )
    doubled, _ = make()
    assert "model.0.bias has torch.float32 in it, torch.float64 in this run" in refused(
        tmp_path, doubled.double()
    )
    longer, _ = make()
    longer.append(nn.Linear(4, 4))
    assert "model.3.bias is not in it; model.3.weight is not in it" in refused(tmp_path, longer)
    shorter = make()[0][:2]
    assert "model.2.bias is only in it; model.2.num_batches_tracked is only in it" in refused(
        tmp_path, shorter
    )
    many = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
    assert refused(tmp_path, many).endswith(" more")


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer)
    pmoe.save_checkpoint(tmp_path, model, optimizer, step=1)
    other, _ = make()
    message = refused(tmp_path, other, SGD(other.parameters(), lr=0.1, momentum=0.9))
    assert "does not fit the optimizer" in message
    assert "optimizer.0.bias.momentum_buffer is not in it" in message
    assert "optimizer.0.bias.exp_avg is only in it" in message
    only_some = AdamW(list(other[1].parameters()))
    assert "optimizer.0.bias.exp_avg is only in it" in refused(tmp_path, other, only_some)
    stranger = AdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(
        CheckpointError, match=r"optimizer \(a parameter of shape \(3,\)\) must have parameters of the model"
    ):
        pmoe.load_checkpoint(tmp_path, other, stranger)
    pmoe.save_checkpoint(tmp_path, model, step=2)
    assert "optimizer.0.weight is missing" in refused(tmp_path, other, AdamW(other.parameters()))


def test_nothing_to_load_and_damage_are_told_apart(tmp_path: Path) -> None:
    model, _ = make()
    assert f"there is no {tmp_path / 'latest.json'}" in refused(tmp_path, model)
    path = pmoe.save_checkpoint(tmp_path, model, step=1)
    data = path / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:-200])
    assert "__0_0.distcp is damaged: its checksum is not the one in sums_0.json" in refused(tmp_path, model)
    data.unlink()
    assert "FileNotFoundError" in refused(tmp_path, model)
    data.write_bytes(whole)
    listing = (path / ".metadata").read_bytes()
    for damaged in (b"", b"no pickle", listing[:200]):
        (path / ".metadata").write_bytes(damaged)
        assert ".metadata is damaged" in refused(tmp_path, model)
    (path / ".metadata").unlink()
    assert f"No such file or directory: '{path / '.metadata'}'" in refused(tmp_path, model)
    (path / ".metadata").write_bytes(listing)
    (path / "plain.pt").write_bytes(b"no archive")
    assert "plain.pt is damaged" in refused(tmp_path, model)
    for damaged in (b'{"fol', b"\xff\xfe"):
        (tmp_path / "latest.json").write_bytes(damaged)
        assert "latest.json is damaged" in refused(tmp_path, model)
    (tmp_path / "latest.json").write_text(json.dumps({"folder": "step_00000009"}))
    assert "must name a folder beside it ('step_00000009'): load another with step=" in refused(
        tmp_path, model
    )


class Odd:
    """An object that is not plain data, so that a checkpoint may not contain it."""


def test_bad_arguments_write_nothing(tmp_path: Path) -> None:
    model, _ = make()
    folder = tmp_path / "new"
    for arguments, match in (
        ({"step": -1}, r"step \(-1\) must be an int of at least 0"),
        ({"step": True}, r"step \(True\) must be"),
        ({"step": 1, "keep": 0}, r"keep \(0\) must be at least 1"),
        ({"step": 1, "extra": {"odd": Odd()}}, r"extra, .* options of optimizers must be plain data"),
        ({"step": 1, "extra": {"odd": lambda: 1}}, r"extra, .* options of optimizers must be plain data"),
        ({"step": 1, "extra": 5}, r"extra \(5\) must be a mapping"),
    ):
        with pytest.raises(CheckpointError, match=match):
            pmoe.save_checkpoint(folder, model, **arguments)
    assert not folder.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"making the folder: .*Error"):
        pmoe.save_checkpoint(tmp_path / "file", model, step=1)


FOREIGN = [
    ("adapter_config.json", "PEFT do: load it with pmoe.load_lora"),
    ("latest_checkpointed_iteration.txt", "Megatron do: load it with Megatron's"),
    ("latest", "DeepSpeed do: load it with engine.load_checkpoint"),
    ("trainer_state.json", "Trainer do: load it with trainer.train"),
    ("config.json", "transformers do: load it with from_pretrained"),
    (".metadata", "torch.distributed.checkpoint do: load it with torch.distributed.checkpoint.load"),
]


def test_a_checkpoint_of_another_system_is_named_with_what_loads_it(tmp_path: Path) -> None:
    """The error only said that there is no latest.json, whatever the folder held."""
    model, _ = make()
    for at, (name, wanted) in enumerate(FOREIGN):
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / name).write_text("{}")
        for options in ({}, {"step": 3}):
            with pytest.raises(CheckpointError, match=f"{folder}.*has {name}, as checkpoints of .*{wanted}"):
                pmoe.load_checkpoint(folder, model, **options)
    own = pmoe.save_checkpoint(tmp_path / "own", model, step=1)
    with pytest.raises(CheckpointError, match="one step of pmoe do: pass the folder above it"):
        pmoe.load_checkpoint(own, model)
    torch.save(model.state_dict(), tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"folder \(.*last.ckpt\) must be a folder .* torch.load"):
        pmoe.load_checkpoint(tmp_path / "last.ckpt", model)


class AsInPython3112:
    """A member of an enum, pickled as by Python 3.11.0 to 3.11.3, such as Debian 12's."""

    def __init__(self, of: object, name: str) -> None:
        self.reduced = (getattr, (of, name))

    def __reduce__(self) -> Any:
        return self.reduced


def test_members_of_enums_are_read_as_any_python_pickles_them() -> None:
    formats = _MEM_FORMAT_ENCODING
    data = pickle.dumps(AsInPython3112(formats, "TORCH_CONTIGUOUS_FORMAT"))
    assert _Records(io.BytesIO(data)).load() is formats.TORCH_CONTIGUOUS_FORMAT
    for of, name in ((formats, "__new__"), (torch.Size, "mro")):
        with pytest.raises(CheckpointError, match=f"it names {name} of .*, which no checkpoint holds"):
            _Records(io.BytesIO(pickle.dumps(AsInPython3112(of, name)))).load()
