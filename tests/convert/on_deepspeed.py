"""`pmoe.integrations.deepspeed` under ZeRO 0, 1 and 2, beside plain PyTorch on one rank."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.integrations import deepspeed as adapter
from tests.convert.compare import group

BATCH, M, H, E, STEPS = 16, 16, 32, 4, 6
CLIP = 0.5
RATES = {"AdamW": 1e-2, "SGD": 0.5}
"""Learning rates, by optimizer. AdamW's steps do not show by which factor gradients are scaled, SGD's do."""


def model_of(ranks: Any, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    layers = [pmoe.MoELayer(M, H, num_experts=E, top_k=2, group=ranks, **options) for _ in range(2)]
    return nn.Sequential(nn.Linear(M, M), layers[0], nn.LayerNorm(M), layers[1], nn.Linear(M, 4))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, M, generator=generator), torch.randn(BATCH, 4, generator=generator))
        for _ in range(STEPS)
    ]


def plain_losses(clip: float, kind: str = "AdamW") -> list[str]:
    """Losses of the training on one rank, without DeepSpeed."""
    model = model_of(Ranks.single())
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=RATES[kind])
    losses = []
    for x, y in batches():
        loss = (model(x) - y).square().mean()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    return losses


def config_of(
    ranks: int, stage: int, clip: float = 0.0, bf16: bool = False, kind: str = "AdamW"
) -> dict[str, Any]:
    own = {"weight_decay": 0.01, "torch_adam": True} if kind == "AdamW" else {}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": kind, "params": {"lr": RATES[kind], **own}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }


def engine_of(ranks: int, stage: int, ep: int, seed: int = 0, **options: Any) -> Any:
    model = model_of(adapter.group(ep), seed)
    return adapter.initialize(model, config_of(ranks, stage, **options))[0]


def train(engine: Any, steps: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Trains an engine on this rank's part of each batch. Returns the mean losses of all ranks."""
    losses = []
    kind = next(engine.module.parameters()).dtype
    for batch in steps:
        x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
        loss = (engine(x.to(kind)).float() - y).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def digits(losses: list[float]) -> list[str]:
    return [f"{loss:.4f}" for loss in losses]


def compare_losses(ranks: int) -> None:
    """Float32, with and without clipping: the losses of one rank, whatever the size of expert parallelism."""
    for clip, kind in ((0.0, "AdamW"), (CLIP, "AdamW"), (0.0, "SGD")):
        wanted = plain_losses(clip, kind)
        for stage in (0, 1, 2):
            for ep in sorted({1, ranks}):
                found = digits(train(engine_of(ranks, stage, ep, clip=clip, kind=kind), batches()))
                case = f"stage {stage}, ep {ep}, clip {clip}, {kind}"
                assert found == wanted, f"{case}: {found}, not {wanted}"
                print(f"{case}: losses of one rank {found}")


def compare_bf16(ranks: int) -> None:
    """Bfloat16: experts over all ranks give the losses of experts on each rank, to three digits."""
    for stage in (1, 2):
        alone, spread = (
            train(engine_of(ranks, stage, ep, clip=CLIP, bf16=True), batches()) for ep in (1, ranks)
        )
        assert all(abs(a - b) < 2e-3 * abs(a) for a, b in zip(alone, spread, strict=True)), (alone, spread)
        print(f"stage {stage} in bfloat16: losses of experts on each rank")


def compare_checkpoints(ranks: int, folder: Path) -> None:
    """DeepSpeed's checkpoints: training resumes with the same losses, and weights load with another ep."""
    for stage in (0, 1, 2):
        engine = engine_of(ranks, stage, ranks, clip=CLIP)
        train(engine, batches()[:3])
        place = str(folder / f"stage {stage}")
        engine.save_checkpoint(place, tag="third")
        if dist.get_rank() == 0:
            names = {file.name for file in (folder / f"stage {stage}" / "third").iterdir()}
            wanted = {
                f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
                for layer in (0, 1)
                for expert in range(E)
            }
            assert wanted <= names, names
        whole = train(engine, batches()[3:])
        resumed = engine_of(ranks, stage, ranks, seed=5, clip=CLIP)
        assert adapter.EP_SIZES not in resumed.load_checkpoint(place)[1]
        assert train(resumed, batches()[3:]) == whole, f"stage {stage}"
        x = batches()[3][0].chunk(ranks)[dist.get_rank()]
        engine.load_checkpoint(place)
        other = engine_of(ranks, stage, 1, seed=6)
        if ranks > 1:
            words = "checkpoint (experts of 1 over 2 ranks) must be loaded with experts over as many ranks"
            refused(lambda other=other, place=place: other.load_checkpoint(place), words, "(ep_size=2), or")
        other.load_checkpoint(place, load_module_only=True)
        with torch.no_grad():
            torch.testing.assert_close(other.module(x), engine.module(x), rtol=1e-5, atol=1e-6)
        print(f"stage {stage}: resumed with the same losses")


# ---- models of which a part is frozen


def adapted(ranks: Any, seed: int = 0) -> nn.Module:
    """Only adapters of experts are trained."""
    model = model_of(ranks, seed).requires_grad_(False)
    torch.manual_seed(seed)
    pmoe.add_lora(model, rank=2)
    return model


def adapted_and_dense(ranks: Any, seed: int = 0) -> nn.Module:
    """Adapters of experts and a norm are trained, in bfloat16 if DeepSpeed says so."""
    model = adapted(ranks, seed)
    model[2].requires_grad_(True)
    return model


def half_frozen(ranks: Any, seed: int = 0) -> nn.Module:
    """The experts of the first layer are frozen, and those of the second are pruned."""
    model = model_of(ranks, seed)
    model[1].experts.requires_grad_(False)
    pruned = model[3]
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(E, H, M, generator=generator) > 0.3
    own = slice(pruned.first_expert, pruned.first_expert + pruned.num_local_experts)
    prune.custom_from_mask(pruned.experts, "w1", mask[own])
    return model


def all_of(engine: Any) -> dict[str, Tensor]:
    """The module's state on this rank, its master weights and its optimizer states, by name."""
    tensors = {name: value for name, value in engine.module.state_dict().items() if isinstance(value, Tensor)}
    zero = engine.optimizer
    masters = getattr(zero, "single_partition_of_fp32_groups", [])
    tensors |= {f"master weights {number}": value for number, value in enumerate(masters)}
    optimizer = getattr(zero, "optimizer", zero)
    for group_number, options in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(options["params"]):
            for name, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{name} of parameter {number} of group {group_number}"] = torch.as_tensor(value)
    return {name: value.detach().clone() for name, value in tensors.items()}


def compare_frozen(ranks: int, folder: Path) -> None:
    """The losses of one rank, and a checkpoint restores all of every rank, whatever is frozen.

    DeepSpeed gave each rank the frozen experts of rank 0 with ZeRO 2, and rank 0's masks in any stage.
    """
    for build, kind in ((adapted, "SGD"), (adapted_and_dense, "AdamW"), (half_frozen, "AdamW")):
        plain = build(Ranks.single())
        trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        optimizer = getattr(torch.optim, kind)(trained, lr=RATES[kind])
        wanted = []
        for x, y in batches():
            optimizer.zero_grad()
            loss = (plain(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            wanted.append(f"{loss.item():.4f}")
        for stage in (0, 1, 2):
            for ep in sorted({1, ranks}):
                case = f"{build.__name__}, stage {stage}, ep {ep}"
                config = config_of(ranks, stage, kind=kind)
                engine = adapter.initialize(build(adapter.group(ep)), config)[0]
                found = train(engine, batches()[:3])
                engine.save_checkpoint(str(folder / case), tag="third")
                saved = all_of(engine)
                found += train(engine, batches()[3:])
                assert digits(found) == wanted, f"{case}: {found}, not {wanted}"
                resumed = adapter.initialize(build(adapter.group(ep), seed=5), config)[0]
                resumed.load_checkpoint(str(folder / case))
                loaded = all_of(resumed)
                assert loaded.keys() == saved.keys(), case
                wrong = [name for name in saved if not torch.equal(saved[name], loaded[name])]
                assert not wrong, f"{case}: {wrong} of rank {dist.get_rank()} were not restored"
                assert train(resumed, batches()[3:]) == found[3:], case
        print(f"{build.__name__}: losses and checkpoints of one process")


def compare_adapters_alone(ranks: int, folder: Path) -> None:
    """A checkpoint without frozen parameters has only adapters in the files of experts, and restores them."""
    for stage in (0, 1, 2):
        config = config_of(ranks, stage)
        place = folder / f"adapters alone {stage}"
        engine = adapter.initialize(adapted(adapter.group(ranks)), config)[0]
        train(engine, batches()[:3])
        engine.save_checkpoint(str(place), tag="third", exclude_frozen_parameters=True)
        file = torch.load(place / "third" / "layer_1_expert_3_mp_rank_00_model_states.pt")
        assert len(file) == 4 and all(".adapters.default.w" in name for name in file), list(file)
        saved = all_of(engine)
        resumed = adapter.initialize(adapted(adapter.group(ranks)), config)[0]
        with torch.no_grad():
            for parameter in pmoe.lora_adapters(resumed.module).parameters():
                parameter.fill_(0.5)
        resumed.load_checkpoint(str(place), load_module_strict=False)
        loaded = all_of(resumed)
        wrong = [name for name in saved if not torch.equal(saved[name], loaded[name])]
        assert not wrong, f"stage {stage}: {wrong} of rank {dist.get_rank()} were not restored"
    print("adapters alone: restored")


def refused(act: Callable[[], Any], *words: str) -> None:
    try:
        act()
    except (ValueError, TypeError, OSError) as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"not refused: {words}")


def compare_refusals(ranks: int, folder: Path) -> None:
    """What does not fit is named, with what to do."""
    group_of_all = adapter.group(ranks)
    config = config_of(ranks, 1)
    refused(lambda: adapter.initialize(model_of(group_of_all), config_of(ranks, 3)), "stage 3", "stage 2")
    refused(lambda: adapter.initialize(nn.Linear(2, 2), config), "must contain a pmoe.MoELayer")
    refused(lambda: adapter.group(ranks + 1), f"must divide the number of ranks ({ranks})")
    before = config | {"use_data_before_expert_parallelism": True}
    refused(lambda: adapter.initialize(model_of(group_of_all), before), "must be False")
    model = model_of(group_of_all)
    pmoe.add_lora(model, rank=2, shared=True)  # its rows would be saved as if they were experts
    refused(lambda: adapter.initialize(model, config), "an adapter that all experts share", "shared=False")
    model = model_of(group_of_all)
    frozen = model_of(group_of_all)
    for layer in (frozen[1], frozen[3]):
        layer.experts.requires_grad_(False)
    refused(lambda: adapter.initialize(frozen, config), "one parameter of its experts with ZeRO 1", "stage 0")
    model[1].experts.register_buffer("extra", torch.zeros(E + 1))
    refused(lambda: adapter.initialize(model, config), "1 (experts' extra of shape (5,)) must", "dimension 0")
    del model[1].experts.extra
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(
        lambda: adapter.initialize(model, config, optimizer=optimizer),
        "optimizer (SGD) must have the parameters of experts in groups of their own", "trained_groups(",
    )  # fmt: skip
    made = adapter.initialize(
        model_of(group_of_all), config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1)
    )
    assert [bool(options.get("moe")) for options in made[1].param_groups].count(True) > 0
    if ranks == 1:
        return
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    spread = pmoe.parallelize(model_of(mesh.get_group("ep")), mesh)
    refused(lambda: adapter.initialize(spread, config), "must not be changed by pmoe.parallelize", "group(")
    # A checkpoint of a layer with other options.
    engine = engine_of(ranks, 1, ranks)
    engine.save_checkpoint(str(folder / "other"), tag="first")
    torch.manual_seed(0)
    wider = nn.Sequential(
        *list(model_of(group_of_all))[:1],
        pmoe.MoELayer(M, 2 * H, num_experts=E, top_k=2, group=group_of_all),
        *list(model_of(group_of_all))[2:],
    )
    other = adapter.initialize(wider, config)[0]
    refused(lambda: other.load_checkpoint(str(folder / "other")), "must be one of the experts'", "as it was")


def compare_differences(group_of_all: dist.ProcessGroup) -> None:
    """If one rank differs, all ranks raise the error with its values, and nobody waits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    differs = "must be the same on every rank, and differs: rank 0:"
    refused(lambda: adapter.group(1 + rank), f"ep_size {differs} 1; rank 1: 2")
    refused(lambda: adapter.group((1, "2")[rank]), "ep_size ('2') must be an int")
    config = config_of(ranks, 1)
    for entry, value, words in (
        ("zero_optimization", {"stage": 2}, f"config's zero_optimization (stage) {differs} 1; rank 1: 2"),
        ("zero_optimization", {"stage": 3}, "zero_optimization (stage 3) must be 0, 1 or 2"),
        ("gradient_clipping", 0.5, f"config's gradient_clipping {differs} 0.0; rank 1: 0.5"),
        ("bf16", {"enabled": True}, "config's bf16 must be the same"),
    ):
        own = (config, config | {entry: value})[rank]
        refused(lambda own=own: adapter.initialize(model_of(group_of_all), own), words)
    refused(lambda: adapter.initialize(model_of(group_of_all), (config, "no file")[rank]), "no file")
    groups = (adapter.group(1), group_of_all)
    refused(lambda: adapter.initialize(model_of(groups[rank]), config), f"1's ep_size {differs} 1; rank 1: 2")
    partly = model_of(group_of_all)
    partly[rank].requires_grad_(False)
    refused(
        lambda: adapter.initialize(partly, config),
        f"0.weight's requires_grad {differs} False; rank 1: True. Freeze the same parameters",
    )
    fewer = nn.Sequential(*list(model_of(group_of_all))[: (5, 2)[rank]])
    refused(lambda: adapter.initialize(fewer, config), f"3's ep_size {differs} 2; rank 1: missing")
    refused(lambda: adapter.initialize((fewer, nn.Linear(2, 2))[rank], config), "model (Linear) must contain")
    wrapped = nn.parallel.DistributedDataParallel(model_of(group_of_all))
    refused(lambda: adapter.initialize((wrapped, fewer)[rank], config), "must not be wrapped: DeepSpeed")
    assert digits(train(engine_of(ranks, 1, ranks), batches())) == plain_losses(0.0)  # nothing is left behind
    print("differences between ranks: named")


def main(ranks: int, folder: Path) -> None:
    deepspeed.comm.torch.build_shm_op = lambda: None  # a shortcut of its collectives, which it would compile
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # DeepSpeed asks for what a launcher sets
    deepspeed.init_distributed(dist_backend="gloo")
    compare_losses(ranks)
    if ranks > 1:
        compare_bf16(ranks)
    compare_checkpoints(ranks, folder)
    compare_frozen(ranks, folder)
    compare_adapters_alone(ranks, folder)
    compare_refusals(ranks, folder)
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(deepspeed, "__version__", "0.20.1"),
    ):
        warnings.simplefilter("always")
        adapter.mark(model_of(adapter.group(ranks)))
    assert any("deepspeed 0.20.1 is not 0.19" in str(warning.message) for warning in caught), caught
    print("refusals: named")
    if ranks > 1:
        compare_differences(group_of_all=adapter.group(ranks))


if __name__ == "__main__":
    with group() as (_, ranks):
        main(ranks, Path(sys.argv[1]).parent)
