"""`pmoe.integrations.lightning` and Lightning's ModelParallelStrategy, beside plain PyTorch on one rank."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
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


def plain_losses() -> list[str]:
    model = network(Ranks.single(), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in EPOCHS * list(DataLoader(data(), batch_size=BATCH)):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(f"{loss.item():.4f}")
    return losses


class Module(LightningModule):
    def __init__(self, seed: int = 0, is_sharded: bool = False) -> None:
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


def fit(module: Module, strategy: Any, callbacks: list[Callback], path: str | None = None) -> list[str]:
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_epochs=EPOCHS,
        callbacks=callbacks, enable_checkpointing=bool(callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=path)
    return module.losses


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
    foreign = folder / "saved" / "foreign.ckpt"
    if dist.get_rank() == 0:
        torch.save({"state_dict": {}}, foreign)
    dist.barrier()
    try:
        fit(Module(), SpreadDDPStrategy(), [], str(foreign))
    except ValueError as error:
        assert "must be a folder of SpreadDDPStrategy, but it is not (a file)" in str(error)
        print("refusals: named")
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
