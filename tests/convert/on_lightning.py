"""`pmoe.integrations.lightning` and Lightning's ModelParallelStrategy, beside plain PyTorch on one rank."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.integrations.lightning import SpreadDDPStrategy
from tests.convert.compare import group

BATCH, M, STEPS, EPOCHS = 16, 16, 3, 2


def network(ranks: Any, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layer = pmoe.MoELayer(M, 32, num_experts=4, top_k=2, group=ranks)
    return nn.Sequential(nn.Linear(M, M), layer, nn.Linear(M, 4))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    rows = BATCH * STEPS
    return TensorDataset(torch.randn(rows, M, generator=generator), torch.randn(rows, 4, generator=generator))


def plain_losses(accumulates: int = 1) -> list[str]:
    """Returns the losses of the training on one rank.

    accumulates: the number of batches of an optimizer step.
    """
    model = network(Ranks.single(), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for at, (x, y) in enumerate(EPOCHS * list(DataLoader(data(), batch_size=BATCH)), start=1):
        loss = (model(x) - y).square().mean()
        (loss / accumulates).backward()
        losses.append(f"{loss.item():.4f}")
        if at % accumulates == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


class Module(LightningModule):
    def __init__(self, seed: int = 0, is_sharded: bool = False) -> None:
        """is_sharded: whether FSDP2 shards the dense part."""
        super().__init__()
        self.seed, self.is_sharded, self.losses = seed, is_sharded, list[str]()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        self.net = network(mesh.get_group("ep"), self.seed)
        pmoe.parallelize(self, mesh)
        if self.is_sharded:
            fully_shard(self.net, mesh=mesh, ignored_params=pmoe.expert_parameters(self))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        assert self.net is not None
        loss: Tensor = (self.net(x) - y).square().mean()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        self.losses.append(f"{mean.item():.4f}")
        return loss

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pmoe.clip_grad_norm_(self, 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(pmoe.parameter_groups(self), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        sampler = DistributedSampler(data(), shuffle=False)  # Lightning's own would shuffle
        return DataLoader(data(), batch_size=BATCH // dist.get_world_size(), sampler=sampler)


def fit(
    module: LightningModule, strategy: Any, callbacks: list[Callback], path: Any = None, **own_options: Any
) -> list[str]:
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False} | own_options
    trainer = Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_epochs=EPOCHS,
        callbacks=callbacks, enable_checkpointing=bool(callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=path)
    return module.losses


# ---- what does not fit


class WithoutExperts(Module):
    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(self.seed)
            self.net = nn.Sequential(nn.Linear(M, M), nn.Linear(M, 4))


class Wider(Module):
    """Its experts have more hidden columns than those of `Module`."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        super().configure_model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        self.net[1] = pmoe.MoELayer(M, 48, num_experts=4, top_k=2, group=mesh.get_group("ep"))
        pmoe.parallelize(self, mesh)


class WrappedTwice(Module):
    def configure_model(self) -> None:
        if self.net is not None:
            return
        super().configure_model()
        self.net = nn.parallel.DistributedDataParallel(self.net)


class WrongPart(Module):
    """Parallelizes the dense part."""

    def configure_model(self) -> None:
        if self.net is not None:
            return
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        self.net = network(mesh.get_group("ep"), self.seed)
        pmoe.parallelize(self.net[0], mesh)


class ClippedByLightning(Module):
    configure_gradient_clipping = LightningModule.configure_gradient_clipping


def refused(words: str, module: LightningModule, *arguments: Any, **options: Any) -> None:
    """Trains a module, which must raise an error with these words, on this rank as on all others."""
    try:
        fit(module, SpreadDDPStrategy(), *arguments, **options)
    except (ValueError, OSError) as error:
        assert words in str(error), f"{error}\nlacks: {words}"
        return
    raise AssertionError(f"not refused: {words}")


def compare_refusals(ranks: int, folder: Path, saved: Path) -> None:
    """What does not fit is named on all ranks, with what to do.

    saved: a checkpoint of `Module` after three steps.
    """
    rank = dist.get_rank()
    refused("net (FSDPSequential) must not be wrapped: SpreadDDPStrategy wraps", Module(is_sharded=True), [])
    refused("net (DistributedDataParallel) must not be wrapped", WrappedTwice(), [])
    refused("model (Linear) must have a pmoe.MoELayer", WrongPart(), [])
    if ranks > 1:
        refused("call pmoe.clip_grad_norm_(self, value)", ClippedByLightning(), [], gradient_clip_val=0.5)
        half = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        refused("precision '16-mixed' (GradScaler) must be pmoe's", Module(), [], plugins=[half])
    # Checkpoints of other stacks, and those that lack a part.
    others = {
        "trainer": ("trainer_state.json", "checkpoints of transformers' Trainer do"),
        "deepspeed": ("latest", "checkpoints of DeepSpeed do"),
        "dcp": (".metadata", "checkpoints of torch.distributed.checkpoint do"),
        "empty": ("other", "there is no"),
    }
    if rank == 0:
        for name, (file, _) in others.items():
            (folder / name).mkdir()
            (folder / name / file).write_text("{}")
        torch.save({"state_dict": {}}, folder / "file.ckpt")
        shutil.copytree(saved, folder / "part", ignore=shutil.ignore_patterns("lightning_*"))
    dist.barrier()
    for name, (_, words) in others.items():
        refused(words, Module(), [], folder / name)
    refused(
        "must be a folder of SpreadDDPStrategy, but it is not (a file)", Module(), [], folder / "file.ckpt"
    )
    refused("there is no lightning_3.ckpt", Module(), [], folder / "part")
    refused("does not fit the model: ", Wider(), [], saved)
    refused("does not fit the model: ", WithoutExperts(), [], saved)
    if ranks > 1:
        missing = folder / "not on this rank"
        refused(f"{missing}) must be a folder", Module(), [], (saved, missing)[rank])
        refused(f"{missing}) must be a folder", Module(), [], (missing, saved)[rank])
        other = saved.with_name("epoch=1-step=6.ckpt")
        differs = "ckpt_path must be the same on every rank, and differs: rank 0: "
        refused(f"{differs}{saved}; rank 1: {other}", Module(), [], (saved, other)[rank])
        refused(f"{differs}{saved}; rank 1: None", Module(), [], (saved, None)[rank])
        refused(f"{differs}None; rank 1: {saved}", Module(), [], (None, saved)[rank])
    averages = [ModelCheckpoint(dirpath=folder / "averages", every_n_epochs=1), WeightAveraging()]
    refused("in its state_dict) must not have weights", Module(), averages)

    class SavingIntoFile(Module):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(folder / "file.ckpt" / "below")

    refused("file.ckpt", SavingIntoFile(), [])
    # A module without experts trains and resumes, too.
    whole = fit(
        WithoutExperts(),
        SpreadDDPStrategy(),
        [ModelCheckpoint(dirpath=folder / "dense", every_n_epochs=1, save_top_k=-1)],
    )
    path = folder / "dense" / "epoch=0-step=3.ckpt"
    assert fit(WithoutExperts(seed=5), SpreadDDPStrategy(), [], path) == whole[3:]
    print("refusals: named")


def main(ranks: int, folder: Path) -> None:
    rank = str(dist.get_rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(ranks), GROUP_RANK="0", LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(TORCHELASTIC_RUN_ID="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    warnings.filterwarnings("ignore", module="lightning")
    wanted = plain_losses()
    every = ModelCheckpoint(dirpath=folder / "saved", every_n_epochs=1, save_top_k=-1, save_last=True)
    found = fit(Module(), SpreadDDPStrategy(), [every])
    assert found == wanted, f"{found}, not {wanted}"
    print("ddp: losses of one rank", found)
    saved = folder / "saved" / "epoch=0-step=3.ckpt"
    assert (saved / "latest.json").is_file() and (saved / "lightning_3.ckpt").is_file()
    resumed = fit(Module(seed=5), SpreadDDPStrategy(), [], str(saved))
    assert resumed == wanted[3:], f"{resumed}, not {wanted[3:]}"
    print("ddp: resumed with the same losses")
    # Lightning wrote last.ckpt once an epoch, into one folder.
    last = folder / "saved" / "last.ckpt"
    if dist.get_rank() == 0:
        names = sorted(file.name for file in last.iterdir())
        assert names == ["latest.json", "lightning_6.ckpt", "step_00000006"], names
    assert fit(Module(seed=5), SpreadDDPStrategy(), [], str(last)) == []
    compare_refusals(ranks, folder, saved)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(lightning, "__version__", "2.7.0"):
        warnings.simplefilter("always")
        SpreadDDPStrategy()
    assert any("lightning 2.7.0 is not 2.6" in str(warning.message) for warning in caught), caught
    earlier = os.environ.get("PMOE_EARLIER")
    if earlier:
        resumed = fit(Module(seed=5), SpreadDDPStrategy(), [], earlier)
        assert resumed == wanted[3:], f"{resumed}, not {wanted[3:]}"
        print("ddp: resumed on another number of ranks")
    if ranks > 1:
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        found = fit(Module(is_sharded=True), strategy, [])
        assert found == wanted, f"{found}, not {wanted}"
        print("ModelParallelStrategy: losses of one rank")


if __name__ == "__main__":
    with group() as (_, ranks):
        main(ranks, Path(sys.argv[1]).parent)
