"""`SpreadDeepSpeedStrategy`: Lightning's DeepSpeed strategy for modules whose experts are spread over ranks.

Lightning calls ``deepspeed.initialize`` itself, which does not know pmoe's layers. This strategy calls
`pmoe.integrations.deepspeed.initialize` in its place. Checkpoints are DeepSpeed's: a file for each expert,
and Lightning's own entries beside them.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pmoe.comm.agreement import all_fail_together
from pmoe.comm.ranks import Ranks
from pmoe.integrations.deepspeed import initialize, zero_stage
from pmoe.integrations.lightning import check_no_weights, warn_of_release

try:
    from lightning.pytorch.strategies import DeepSpeedStrategy
except ImportError as error:
    raise ImportError(f"lightning must be installed: pip install lightning==2.6.6 ({error})") from error

__all__ = ["SpreadDeepSpeedStrategy"]


class SpreadDeepSpeedStrategy(DeepSpeedStrategy):  # type: ignore[misc]
    """The strategy "deepspeed" for modules whose experts are spread over ranks, with ZeRO 0, 1 or 2.

    Its arguments are those of Lightning's DeepSpeedStrategy. In ``configure_model`` of the LightningModule,
    build layers with ``group=pmoe.integrations.deepspeed.group(ep_size)``. In ``configure_optimizers``, make
    the optimizer of `pmoe.integrations.deepspeed.trained_groups`. DeepSpeed clips gradients by
    ``gradient_clip_val`` of the Trainer.

    ``fit(ckpt_path=...)`` continues with the same number of ranks and the same ``ep_size``. Without ZeRO, the
    number of ranks may change. Otherwise it raises ValueError.

    Raises ValueError for ZeRO's stage 3.

    Example: Trainer(strategy=SpreadDeepSpeedStrategy(stage=2), gradient_clip_val=1.0, devices=8)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        warn_of_release()
        zero_stage(self.config)  # Lightning would build the model for stage 3 before `initialize` refuses it

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        """Makes DeepSpeed's engine and optimizer. Lightning calls it at the start of ``fit``.

        model: the LightningModule.
        optimizer: the optimizer of ``configure_optimizers``; None if DeepSpeed's configuration names one.
        lr_scheduler: its scheduler, or None.

        Raises what `pmoe.integrations.deepspeed.initialize` raises.
        """
        index = self.root_device.index
        engine, made, _, _ = initialize(
            model,
            self.config,
            args=None if index is None else argparse.Namespace(device_rank=index),
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, made

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns {}, because DeepSpeed saves the model itself, outside of Lightning's dict."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint of DeepSpeed, with Lightning's dict in it. Lightning calls it on every rank.

        checkpoint: Lightning's dict.
        filepath: the folder of the checkpoint.
        storage_options: must be None.

        Raises ValueError on every rank if a callback has put the model's weights into Lightning's dict. Also
        raises the errors of Lightning's own strategy.
        """
        with all_fail_together(Ranks(), stage="saving Lightning's part of a checkpoint"):
            check_no_weights(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """Raises ValueError: Lightning would remove the hooks by which layers load their experts.

        Lightning calls it at the start of ``validate``, ``test`` and ``predict``. ``fit`` validates with the
        engine that it trains.
        """
        raise ValueError(
            f"{type(model).__name__} (with SpreadDeepSpeedStrategy) must be evaluated in Trainer.fit, "
            "because Lightning's validate, test and predict remove hooks of its layers: pass val_dataloaders "
            "to fit, or load DeepSpeed's checkpoint by engine.load_checkpoint in a script of your own"
        )
