"""`SpreadDeepSpeedStrategy` beside plain PyTorch on one rank.

Lightning refuses its DeepSpeed strategy on a CPU. The class here leaves that check out.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy

from pmoe.integrations.deepspeed import group as group_of
from pmoe.integrations.deepspeed import trained_groups
from pmoe.integrations.lightning_deepspeed import SpreadDeepSpeedStrategy
from tests.convert.compare import group
from tests.convert.on_lightning import EPOCHS, Module, fit, network, plain_losses


class OnCpu(SpreadDeepSpeedStrategy):
    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Spread(Module):
    """Its experts are spread over ``ep`` ranks, and DeepSpeed clips its gradients."""

    ep = 1
    configure_gradient_clipping = Module.__base__.configure_gradient_clipping

    def configure_model(self) -> None:
        if self.net is None:
            self.net = network(group_of(self.ep), self.seed)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trained_groups(self), lr=1e-2)


class WeightsAlone(Spread):
    """It begins with the weights of a checkpoint, and with new optimizer states."""

    path = ""

    def on_train_start(self) -> None:
        self.trainer.strategy.deepspeed_engine.load_checkpoint(self.path, load_module_only=True)


class Validated(Spread):
    def validation_step(self, batch: Any) -> None:
        self.training_step(batch)


class OneGroup(Spread):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def refused(act: Callable[[], Any], *words: str) -> None:
    try:
        act()
    except ValueError as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"not refused: {words}")


def compare_resumed(ranks: int, folder: Path, wanted: list[str]) -> None:
    """The losses of one rank, also after resuming on as many ranks, and a file for each expert."""
    for stage in (0, 1, 2):
        for ep in sorted({1, ranks}):
            Spread.ep = ep
            case = f"stage {stage}, ep {ep}"
            every = ModelCheckpoint(dirpath=folder / case, every_n_epochs=1, save_top_k=-1, save_last=True)
            found = fit(Spread(), OnCpu(stage=stage), [every], gradient_clip_val=0.5)
            assert found == wanted, f"{case}: {found}, not {wanted}"
            saved = folder / case / "epoch=0-step=3.ckpt"
            names = {file.name for file in (saved / "checkpoint").glob("layer_*")}
            assert names == {f"layer_0_expert_{at}_mp_rank_00_model_states.pt" for at in range(4)}, names
            resumed = fit(Spread(seed=5), OnCpu(stage=stage), [], saved, gradient_clip_val=0.5)
            assert resumed == wanted[3:], f"{case}: {resumed}, not {wanted[3:]}"
            last = folder / case / "last.ckpt"
            assert fit(Spread(seed=5), OnCpu(stage=stage), [], last, gradient_clip_val=0.5) == []
            print(f"{case}: losses of one rank, also after resuming")


def compare_other_ranks(ranks: int, folder: Path, wanted: list[str], saved_on: int) -> None:
    """Checkpoints whose optimizer states belong to other ranks are refused, and their weights load.

    folder: checkpoints of `compare_resumed`.
    saved_on: on how many ranks that ran.
    """
    for stage in (0, 1, 2):
        for ep, own_ep in ((1, 1), (1, ranks), (saved_on, 1)):
            if (ep, saved_on) == (own_ep, ranks):
                continue
            Spread.ep = own_ep
            saved = folder / f"stage {stage}, ep {ep}" / "epoch=0-step=3.ckpt"

            def resume(stage: int = stage, saved: Path = saved) -> list[str]:
                return fit(Spread(seed=5), OnCpu(stage=stage), [], saved, gradient_clip_val=0.5)

            if ep != own_ep:
                refused(resume, f"experts of net.1 over {ep} ranks) must", f"group(ep_size={ep})")
            elif stage:
                refused(resume, f"of {saved_on} ranks) must be loaded on as many ranks, not on {ranks}")
            else:
                assert resume() == wanted[3:]
            WeightsAlone.path = str(saved)
            found = fit(WeightsAlone(seed=5), OnCpu(stage=stage), [], gradient_clip_val=0.5)
            assert found[0] == wanted[3], f"{found}, not {wanted[3]}"
    print(f"checkpoints of {saved_on} ranks: loaded or refused by name")


def compare_refusals(ranks: int, folder: Path) -> None:
    """What does not fit is named on all ranks, with what to do."""
    refused(lambda: fit(OneGroup(), OnCpu(stage=2), []), "optimizer (AdamW) must", "trained_groups(model)")
    refused(lambda: fit(Spread(), OnCpu(stage=3), []), "stage 3", "Use stage 2")
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", devices=ranks, strategy=OnCpu(stage=2), max_epochs=EPOCHS, **options)
    module = Validated()
    refused(lambda: trainer.validate(module, module.train_dataloader()), "evaluated in Trainer.fit")
    averages = [ModelCheckpoint(dirpath=folder / "averages", every_n_epochs=1), WeightAveraging()]
    refused(lambda: fit(Spread(), OnCpu(stage=2), averages), "in its state_dict) must not have weights")
    print("refusals: named")


def main(ranks: int, folder: Path) -> None:
    deepspeed.comm.torch.build_shm_op = lambda: None  # a shortcut of its collectives, which it would compile
    rank = str(dist.get_rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(ranks), GROUP_RANK="0", LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(TORCHELASTIC_RUN_ID="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed(dist_backend="gloo")
    wanted = plain_losses()
    compare_resumed(ranks, folder, wanted)
    Spread.ep = ranks
    for stage in (0, 1, 2):
        options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
        found = fit(Spread(), OnCpu(stage=stage), [], **options)
        assert found == plain_losses(3), f"stage {stage}, accumulated: {found}, not {plain_losses(3)}"
    if ranks > 1:
        compare_other_ranks(ranks, folder, wanted, ranks)
    earlier = os.environ.get("PMOE_EARLIER")
    if earlier:
        compare_other_ranks(ranks, Path(earlier), wanted, 2 if ranks == 1 else 1)
    Spread.ep = ranks
    compare_refusals(ranks, folder)


if __name__ == "__main__":
    with group() as (_, ranks):
        main(ranks, Path(sys.argv[1]).parent)
