"""PEFT's adapters of transformers models whose experts are spread over ranks, beside PEFT on one rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from tests.gloo.test_trainer import as_launched, losses_of, trainer_of
from tests.gloo.test_transformers import (
    QUICK,
    SHARED,
    SPREAD,
    load,
    num_batches,
    on_ranks,
    parts,
    saved,
    whole,
)
from tests.tiny_transformers import batch, make_model, relative

__all__ = ["saved"]

pytestmark = pytest.mark.timeout(300)

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6, "init_lora_weights": False}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STEPS = 3


def config_of(**changes: Any) -> Any:
    """Returns settings of adapters of attention and of experts, with random values in place of zeros."""
    return peft.LoraConfig(**(LORA | {"target_modules": ["q_proj"], "target_parameters": EXPERTS} | changes))


def adapters(model: Any) -> dict[str, Tensor]:
    return {name: whole(each).clone() for name, each in model.named_parameters() if "lora_" in name}


def train(model: Any, batches: list[Tensor], share: float) -> tuple[list[float], dict[str, Tensor]]:
    """Returns this rank's share of the losses, and the gradients of the first step."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    losses = []
    first = {}
    model.train()
    for step in range(STEPS):
        total = 0.0
        for ids in batches:
            torch.manual_seed(3)
            loss = share * model(input_ids=ids, labels=ids).loss
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        if step == 0:
            first = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def spread_job(
    rank: int,
    world: int,
    path: Path,
    name: str,
    spread: dict[str, Any],
    out: Path,
    checkpointing: bool,
    targets: list[str] | None,
) -> dict[str, Any]:
    from pmoe.integrations.transformers.adapters import spread_adapters

    model = load(path, name, spread, QUICK)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    torch.manual_seed(rank)  # ranks draw other values, of which rank 0's are taken
    adapted = spread_adapters(peft.get_peft_model(model, config_of(target_parameters=targets)))
    spread_adapters(adapted)  # a second call changes nothing
    adapted.save_pretrained(out / "first", is_main_process=rank == 0)
    own = parts(batch(4), num_batches(world, spread))[rank // spread.get("tp_size", 1)]
    losses, first = train(adapted, [own, own[:1]], 0.5)  # two batches a step, so that gradients accumulate
    adapted.save_pretrained(out / "last", is_main_process=rank == 0)
    result = {"losses": losses, "gradients": first, "adapters": adapters(adapted)}
    with torch.no_grad():
        result["logits"] = whole(adapted.eval()(own).logits)
        result["without"] = whole(adapted.disable_adapter_layers() or adapted(own).logits)
    return result


def assert_trains_as_one_rank(
    path: Path,
    name: str,
    spread: dict[str, Any],
    out: Path,
    world: int = 2,
    checkpointing: bool = False,
    targets: list[str] | None = EXPERTS,
) -> None:
    found = on_ranks(world, spread_job, path, name, spread, out, checkpointing, targets)
    plain = peft.PeftModel.from_pretrained(make_model(name, "eager"), out / "first", is_trainable=True)
    batches = parts(batch(4), num_batches(world, spread))
    shares = [each for own in batches for each in (own, own[:1])]
    losses, first = train(plain, shares, 0.5 / len(batches))
    plain.eval()
    with torch.no_grad():
        logits = [plain(own).logits for own in batches]
        plain.disable_adapter_layers()
        without = [plain(own).logits for own in batches]
    ranks_of_a_batch = world // len(batches)
    mean = [sum(each["losses"][step] for each in found) / world for step in range(STEPS)]
    assert mean == pytest.approx(losses, rel=1e-5)
    for rank, each in enumerate(found):
        own = rank // ranks_of_a_batch
        assert relative(each["without"], without[own]) < 1e-5
        assert relative(each["logits"], logits[own]) < 1e-4
        assert each["gradients"].keys() == first.keys()
        worst = max((relative(each["gradients"][key], first[key]), key) for key in first)
        assert worst[0] < 1e-5, worst
        for key, value in adapters(plain).items():
            assert relative(each["adapters"][key], value) < 1e-4, key
    read = peft.PeftModel.from_pretrained(make_model(name, "eager"), out / "last").eval()
    with torch.no_grad():
        assert relative(read(batches[0]).logits, logits[0]) < 1e-4


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "spread", "checkpointing"),
    [
        ("Mixtral", SPREAD, False),
        ("gpt-oss", SPREAD, True),
        ("Qwen3-MoE", SPREAD, False),
        ("gpt-oss", SHARED, False),
    ],
    ids=str,
)
def test_losses_gradients_and_files_of_adapters_equal_those_of_one_rank(
    name: str, spread: dict[str, Any], checkpointing: bool, saved: Any, tmp_path: Path
) -> None:
    assert_trains_as_one_rank(saved(name), name, spread, tmp_path, checkpointing=checkpointing)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp_size": 4, "ep_size": 2},
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
        {"fsdp_size": 4},
    ],
    ids=str,
)
def test_adapters_of_copies_of_experts_stay_equal_on_four_ranks(
    sizes: dict[str, Any], saved: Any, tmp_path: Path
) -> None:
    spread = sizes | ({"ep_implementation": "pmoe"} if "ep_size" in sizes else {})
    targets = EXPERTS if "ep_size" in sizes else None  # FSDP2 alone: adapters of attention are averaged too
    assert_trains_as_one_rank(saved("gpt-oss"), "gpt-oss", spread, tmp_path, 4, targets=targets)


# ---- files of the Trainer


def trainer_job(rank: int, world: int, path: Path, out: Path, resume: bool) -> list[float]:
    as_launched(rank, world)
    from pmoe.integrations.transformers.adapters import spread_adapters

    spread = {"fsdp_size": world, "ep_size": world, "ep_implementation": "pmoe"}
    model = load(path, "Mixtral", spread, QUICK)
    torch.manual_seed(5)
    adapted = spread_adapters(peft.get_peft_model(model, config_of()))
    rows = [{"input_ids": row, "labels": row} for row in batch(48)]
    trainer = trainer_of(adapted, out, world, rows)
    trainer.train(resume_from_checkpoint=True if resume else None)
    return losses_of(trainer)


@pytest.mark.slow
def test_the_trainer_resumes_adapters_on_another_number_of_ranks(saved: Any, tmp_path: Path) -> None:
    path = saved("Mixtral")
    out = tmp_path / "two"
    whole_run = on_ranks(2, trainer_job, path, out, False)[0]
    assert len(whole_run) == 8
    shutil.rmtree(out / "checkpoint-8")
    for resumed in on_ranks(1, trainer_job, path, out, True):
        assert resumed[-4:] == pytest.approx(whole_run[-4:], rel=1e-5)
    assert (out / "checkpoint-8" / "adapter_model.safetensors").is_file()


# ---- what is refused


def refused_job(rank: int, world: int, path: Path) -> dict[str, str]:
    from pmoe.integrations.transformers.adapters import spread_adapters

    found = {}

    def note(name: str, spread: dict[str, Any], **changes: Any) -> None:
        adapted = peft.get_peft_model(load(path, "gpt-oss", spread, QUICK), config_of(**changes))
        try:
            spread_adapters(adapted)
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)

    note("theirs", SPREAD | {"ep_implementation": "all_to_all"})
    note("no experts", {"fsdp_size": 2}, target_parameters=["experts.down_proj"])
    note("bias", SPREAD, target_parameters=["experts.down_proj_bias"])
    note("different", SPREAD, r=4 + rank, target_parameters=None)
    return found


def test_adapters_that_cannot_be_spread_are_named(saved: Any) -> None:
    for found in on_ranks(2, refused_job, saved("gpt-oss")):
        cure = 'DistributedConfig(..., ep_size=N, ep_implementation="pmoe")'
        for name, parameter in (
            ("theirs", "down_proj"),
            ("no experts", "down_proj"),
            ("bias", "down_proj_bias"),
        ):
            assert f"target_parameters (with {parameter} of base_model" in found[name], found
            assert cure in found[name]
        for text in (
            "must be the same on every rank: only rank 0 has base_model",
            "lora_A.default.weight (5, ",
        ):
            assert text in found["different"]


def test_a_model_on_one_rank_stays_as_it_is() -> None:
    from pmoe.integrations.transformers.adapters import spread_adapters

    adapted = peft.get_peft_model(make_model("Mixtral", "pmoe"), config_of())
    kinds = [type(module) for module in adapted.modules()]
    assert spread_adapters(adapted) is adapted and [type(module) for module in adapted.modules()] == kinds
    with pytest.raises(TypeError, match=r"model \('a model'\)"):
        spread_adapters("a model")  # type: ignore[arg-type]
