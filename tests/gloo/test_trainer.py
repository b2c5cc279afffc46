"""transformers' Trainer and accelerate on two ranks, saved and resumed on other numbers of ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import pmoe
from tests.pool import ranks
from tests.tiny_transformers import batch, make_model

pytestmark = pytest.mark.timeout(300)

SAMPLES = 8
"""Samples of an optimizer step, on any number of ranks."""


def as_launched(rank: int, world: int) -> None:
    """Sets what a launcher sets, which accelerate reads, and forgets what it read in an earlier test."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# ---- models of transformers


def arguments_of(out: Path, world: int, **changes: Any) -> Any:
    """Returns TrainingArguments for 8 steps of `SAMPLES` samples, with a checkpoint every 4 steps."""
    import transformers

    options: dict[str, Any] = {"save_only_model": True, "save_steps": 4, "gradient_accumulation_steps": 2}
    options |= {"per_device_train_batch_size": SAMPLES // world // 2, "max_steps": 8, "learning_rate": 1e-2}
    options |= {"lr_scheduler_type": "cosine", "optim": "adamw_torch", "optim_args": "foreach=False"}
    options |= {"output_dir": str(out), "use_cpu": True, "logging_steps": 1, "report_to": [], "seed": 1}
    return transformers.TrainingArguments(disable_tqdm=True, **(options | changes))


def trainer_of(model: Any, out: Path, world: int, rows: list[dict[str, Any]], **changes: Any) -> Any:
    import transformers

    from pmoe.integrations.transformers import SpreadCheckpoints

    class SpreadTrainer(SpreadCheckpoints, transformers.Trainer):
        pass

    arguments = arguments_of(out, world, **changes)
    return SpreadTrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)


def losses_of(trainer: Any) -> list[float]:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def trainer_job(
    rank: int,
    world: int,
    path: Path,
    out: Path,
    resume: bool,
    frozen: str = "no parameter",
    changes: dict[str, Any] | None = None,
) -> list[float]:
    """Returns the losses of all steps, those before the checkpoint included.

    frozen: parameters with this text in their name are not trained.
    changes: changes of the TrainingArguments.
    """
    as_launched(rank, world)
    torch._dynamo.reset()
    import transformers
    from transformers.distributed import DistributedConfig

    import pmoe.integrations.transformers as integration

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    integration.configure(pipeline=2, memory_reuse="S4")
    spread = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="pmoe")
    model = transformers.MixtralForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=spread
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    rows = [{"input_ids": row, "labels": row} for row in batch(48)]
    trainer = trainer_of(model, out, world, rows, **(changes or {}))
    trainer.train(resume_from_checkpoint=True if resume else None)
    return losses_of(trainer)


def interrupted(out: Path, copy: Path) -> Path:
    """Returns a copy of a folder of checkpoints, as it was after step 4."""
    shutil.copytree(out, copy, ignore=shutil.ignore_patterns("checkpoint-8"))
    return copy


@pytest.mark.slow
def test_a_trainer_with_spread_experts_resumes_on_other_numbers_of_ranks_with_the_same_losses(
    tmp_path: Path,
) -> None:
    make_model("Mixtral", "eager").save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    whole = ranks(2).run(trainer_job, tmp_path / "model", out, False, timeout=240)[0]
    assert len(whole) == 8 and len(set(whole)) == 8
    for world in (2, 1):
        copy = interrupted(out, tmp_path / f"on {world}")
        resumed = ranks(world).run(trainer_job, tmp_path / "model", copy, True, timeout=240)[0]
        assert [f"{loss:.4f}" for loss in resumed] == [f"{loss:.4f}" for loss in whole], world
        assert (copy / "checkpoint-8" / "pmoe" / "latest.json").is_file()


CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
VARIED: dict[str, tuple[str, dict[str, Any]]] = {
    "a frozen router, compiled": (
        "gate.weight",
        CHECKPOINTED | {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    ),
    "frozen experts": ("experts", {}),
    "a fused optimizer": ("no parameter", {"optim": "adamw_torch_fused", "optim_args": None}),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("frozen, changes", VARIED.values(), ids=VARIED)
def test_what_is_frozen_compiled_or_fused_resumes_too(
    frozen: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    make_model("Mixtral", "eager").save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    whole = ranks(2).run(trainer_job, tmp_path / "model", out, False, frozen, changes, timeout=240)[0]
    for world in (2, 1):
        copy = interrupted(out, tmp_path / f"on {world}")
        resumed = ranks(world).run(trainer_job, tmp_path / "model", copy, True, frozen, changes, timeout=240)[
            0
        ]
        assert [f"{loss:.4f}" for loss in resumed] == [f"{loss:.4f}" for loss in whole], world


@pytest.mark.slow
def test_dropout_goes_on_as_if_the_training_had_not_been_interrupted(tmp_path: Path) -> None:
    make_model("Mixtral", "eager", attention_dropout=0.3).save_pretrained(tmp_path / "model")
    whole = ranks(2).run(trainer_job, tmp_path / "model", tmp_path / "out", False, timeout=240)[0]
    copy = interrupted(tmp_path / "out", tmp_path / "copy")
    assert ranks(2).run(trainer_job, tmp_path / "model", copy, True, timeout=240)[0] == whole


# ---- a module with MoE layers


class Regression(nn.Module):
    """A model with the interface that the Trainer asks for: a forward that returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.moe = pmoe.MoELayer(8, 16, num_experts=4, top_k=2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.moe(torch.tanh(self.first(x))) - labels).square().mean()}


def own_model(world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    layer = Regression()
    layer.moe = pmoe.MoELayer(8, 16, num_experts=4, top_k=2, group=mesh.get_group("ep"))
    model = pmoe.parallelize(layer, mesh)
    return model, torch.optim.AdamW(pmoe.parameter_groups(model), lr=1e-2)


def rows_of(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(8, generator=generator), "labels": torch.randn(8, generator=generator)}
        for _ in range(count)
    ]


def own_trainer_job(rank: int, world: int, out: Path, resume: bool) -> list[float]:
    as_launched(rank, world)
    import transformers

    from pmoe.integrations.transformers import SpreadCheckpoints

    class SpreadTrainer(SpreadCheckpoints, transformers.Trainer):
        pass

    model, optimizer = own_model(world)
    arguments = transformers.TrainingArguments(
        output_dir=str(out), use_cpu=True, per_device_train_batch_size=SAMPLES // world, max_steps=8,
        logging_steps=1, save_steps=4, save_only_model=True, report_to=[], disable_tqdm=True, max_grad_norm=0,
    )  # fmt: skip
    trainer = SpreadTrainer(
        model=model, args=arguments, train_dataset=rows_of(48), optimizers=(optimizer, None)
    )
    trainer.train(resume_from_checkpoint=True if resume else None)
    return losses_of(trainer)


@pytest.mark.slow
def test_a_trainer_saves_and_resumes_a_module_with_moe_layers(tmp_path: Path) -> None:
    whole = ranks(2).run(own_trainer_job, tmp_path / "out", False, timeout=240)[0]
    assert len(set(whole)) == 8
    for world in (2, 1):
        copy = interrupted(tmp_path / "out", tmp_path / f"on {world}")
        resumed = ranks(world).run(own_trainer_job, copy, True, timeout=240)[0]
        assert [f"{loss:.4f}" for loss in resumed] == [f"{loss:.4f}" for loss in whole], world


# ---- what is refused


def test_a_checkpoint_without_optimizer_state_is_refused_with_the_newest_that_has_it(tmp_path: Path) -> None:
    model = make_model("Mixtral", "eager")
    rows = [{"input_ids": row, "labels": row} for row in batch(16)]
    with pytest.raises(ValueError, match=r"save_only_model \(False\) must be True with SpreadCheckpoints"):
        trainer_of(model, tmp_path, 1, rows, save_only_model=False)
    trainer = trainer_of(model, tmp_path, 1, rows, max_steps=1, save_steps=1)
    trainer.train()
    interrupted_one = tmp_path / "checkpoint-2"
    interrupted_one.mkdir()
    (interrupted_one / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"checkpoint-2\) must be .*It has not both.*\n?.*checkpoint-1\"\)"):
        trainer.train(resume_from_checkpoint=True)
    shutil.rmtree(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match=r"load the weights, with a new optimizer: from_pretrained\("):
        trainer.train(resume_from_checkpoint=True)


def test_another_number_of_samples_a_step_is_warned_of(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in batch(16)]
    trainer_of(make_model("Mixtral", "eager"), tmp_path, 1, rows, max_steps=1, save_steps=1).train()
    other = trainer_of(
        make_model("Mixtral", "eager"), tmp_path, 1, rows, max_steps=2, per_device_train_batch_size=2
    )
    with pytest.warns(UserWarning, match="another number of samples than in the checkpoint: 4, not 8"):
        other.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in other.state.log_history if "loss" in entry] == [1, 2]
    assert json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["global_step"] == 1


def test_another_weight_of_auxiliary_losses_is_warned_of(tmp_path: Path) -> None:
    """The Trainer adds up one auxiliary loss for each micro-batch, whatever the size of a micro-batch."""
    rows = [{"input_ids": row, "labels": row} for row in batch(16)]
    for has_loss, message in ((True, "adds up another number of auxiliary losses .*: 1, not 2"), (False, "")):
        model = make_model("OLMoE", "eager", output_router_logits=has_loss)
        out = tmp_path / str(has_loss)
        trainer_of(model, out, 1, rows, max_steps=1, save_steps=1).train()
        whole = {"per_device_train_batch_size": SAMPLES, "gradient_accumulation_steps": 1}
        other = trainer_of(model, out, 1, rows, max_steps=2, **whole)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            other.train(resume_from_checkpoint=True)
        told = [str(one.message) for one in found if "a step of the Trainer" in str(one.message)]
        assert len(told) == has_loss and all(re.search(message, text) for text in told), told


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    import transformers

    rows = [{"input_ids": row, "labels": row} for row in batch(16)]
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 3.0}
    trainer = trainer_of(make_model("Mixtral", "eager"), tmp_path, 1, rows, max_steps=3, save_steps=1, **best)
    trainer.train()
    path = trainer.state.best_model_checkpoint
    assert path is not None and not path.endswith("-3"), path  # the last step is worse, by its learning rate
    saved = dict(transformers.MixtralForCausalLM.from_pretrained(path).named_parameters())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, saved[name]), name


# ---- experts that FSDP2 and expert parallelism split by the same dimension


class Stack(nn.Module):
    """Experts as transformers holds them: split over "ep" first, then over "efsdp"."""

    def __init__(self, whole: torch.Tensor, world: int, copies: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(whole)
        if world > 1:
            mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=("efsdp", "ep"))
            ep = world // copies
            placements = (_StridedShard(0, split_factor=ep), Shard(0))
            place = (dist.get_rank() % ep) * copies + dist.get_rank() // ep
            own = whole.chunk(world)[place].clone()
            self.experts = nn.Parameter(DTensor.from_local(own, mesh, placements, run_check=False))


def stack_job(rank: int, world: int, folder: Path, copies: int, save: bool) -> torch.Tensor:
    experts = torch.arange(8.0).view(8, 1).expand(8, 3).contiguous()
    model = Stack(experts if save else torch.zeros(8, 3), world, copies)
    if save:
        pmoe.save_checkpoint(folder, model, step=1)
    else:
        pmoe.load_checkpoint(folder, model)
    own = model.experts.to_local() if isinstance(model.experts, DTensor) else model.experts
    return own.detach()[:, 0].clone()


@pytest.mark.parametrize(("world", "copies"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_every_expert_of_such_a_stack_is_loaded_on_one_rank(world: int, copies: int, tmp_path: Path) -> None:
    parts = ranks(world).run(stack_job, tmp_path, copies, True)
    (whole,) = ranks(1).run(stack_job, tmp_path, 1, False)
    assert whole.tolist() == list(range(8))
    again = ranks(world).run(stack_job, tmp_path, copies, False)
    assert [part.tolist() for part in again] == [part.tolist() for part in parts]


# ---- the example


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "trainer.py"


@pytest.mark.slow
def test_the_example_trains_and_resumes_under_torchrun(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(EXAMPLE.parents[1]), "OMP_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    printed = []
    for world, more in ((2, []), (1, ["--resume"])):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc_per_node={world}", str(EXAMPLE), "--steps=6", "--save-steps=3", *more]
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr[-3000:]
        printed.append([line for line in found.stdout.splitlines() if line.startswith("step ")])
        shutil.rmtree(tmp_path / "trained" / "checkpoint-6")
    assert len(printed[0]) == 6 and printed[1] == printed[0]


# ---- accelerate without Trainer


def accelerate_job(rank: int, world: int, folder: Path, resume: bool) -> list[float]:
    as_launched(rank, world)
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = own_model(world)
    loader = torch.utils.data.DataLoader(rows_of(64), batch_size=SAMPLES // world)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = pmoe.load_checkpoint(folder, model, optimizer).step if resume else 0
    losses = []
    for x in accelerate.skip_first_batches(loader, first * 2):
        with accelerator.accumulate(model):
            loss = model(**x)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                pmoe.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if not resume and len(losses) == 4:
            pmoe.save_checkpoint(folder, model, optimizer, step=2)
    return losses


def test_accelerate_trains_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = ranks(2).run(accelerate_job, tmp_path, False)[0]
    (alone,) = ranks(1).run(accelerate_job, tmp_path / "alone", False)
    assert len(set(whole)) == 8 and [f"{loss:.5f}" for loss in whole] == [f"{loss:.5f}" for loss in alone]
    for world in (2, 1):
        resumed = ranks(world).run(accelerate_job, tmp_path, True)[0]
        assert [f"{loss:.5f}" for loss in resumed] == [f"{loss:.5f}" for loss in whole[4:]], world
