"""`SpreadDDPStrategy`: Lightning's ddp strategy with checkpoints of all ranks' experts.

Lightning's own strategy writes one file from rank 0, which lacks the experts of the other ranks. Here a
checkpoint is a folder, under the name that Lightning chooses:

    epoch=0-step=3.ckpt/
        lightning_3.ckpt    Lightning's dict without model and optimizers: loops, callbacks, schedulers
        step_00000003/      model and optimizers of all ranks, by `pmoe.save_checkpoint`
        latest.json         names step_00000003; written last, so after a kill the older checkpoint is valid

Training continues from it on any number of ranks that divides the number of experts.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pmoe.comm.agreement import all_fail_together, check_same
from pmoe.comm.ranks import Ranks
from pmoe.integrations.model_layers import check_not_wrapped
from pmoe.layer import MoELayer
from pmoe.training import checkpoint_files as files
from pmoe.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from pmoe.training.clipping import GradScaler
from pmoe.warn import warn_of_other_release

try:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(f"lightning must be installed: pip install lightning==2.6.6 ({error})") from error

TESTED = "2.6"
"""The release of Lightning with which this module was tested."""

FILE = "lightning_{step}.ckpt"
"""File of a checkpoint that Lightning itself writes and reads, for each step."""

__all__ = ["SpreadDDPStrategy"]


class SpreadDDPStrategy(DDPStrategy):  # type: ignore[misc]
    """The strategy "ddp" for modules whose experts are spread over ranks: checkpoints hold all experts.

    Its arguments are those of Lightning's DDPStrategy. Call `pmoe.parallelize` in ``configure_model`` of the
    LightningModule, and let ModelCheckpoint and ``fit(ckpt_path=...)`` save and load as usual. A checkpoint
    is loaded into the model and the optimizers of ``fit``; ``load_from_checkpoint`` of a LightningModule is
    not supported.

    Example: Trainer(strategy=SpreadDDPStrategy(process_group_backend="nccl"), devices=8)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loaded: _Checkpoint | None = None
        warn_of_release()

    def setup(self, trainer: Any) -> None:
        """Prepares the module and its optimizers. Lightning calls it on every rank.

        trainer: Lightning's Trainer.

        Raises ValueError on every rank if Lightning would clip or scale gradients in a way that is wrong for
        experts on several ranks, if a wrapper is inside of the module, or if only some ranks have loaded a
        checkpoint.
        """
        # A rank that finds no checkpoint comes here while others load one (`load_checkpoint`). So both
        # methods have the same collectives.
        with all_fail_together(Ranks(), stage="checking a Trainer with SpreadDDPStrategy"):
            _check_trainer(trainer)
        self._compare_checkpoints()
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns {}, because `save_checkpoint` saves the model itself, outside of Lightning's dict."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns {}, because `save_checkpoint` saves the optimizers itself, outside of Lightning's dict."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Saves a checkpoint. Lightning calls it on every rank.

        checkpoint: Lightning's dict, without model and optimizers.
        filepath: the folder of the checkpoint.
        storage_options: must be None, because pmoe writes to a file system that all ranks see.

        Raises ValueError on every rank if storage_options is not None, or if a callback has put the model's
        weights into Lightning's dict. Raises OSError on every rank if rank 0 cannot write, and
        CheckpointError as `pmoe.save_checkpoint` does.
        """
        step = int(checkpoint["global_step"])
        optimizers = list(self.optimizers) if checkpoint.get("optimizer_states") else None
        own = Path(filepath) / FILE.format(step=step)
        with all_fail_together(Ranks(), stage="saving Lightning's part of a checkpoint"):
            if storage_options is not None:
                raise ValueError(f"storage_options ({storage_options!r}) must be None with SpreadDDPStrategy")
            check_no_weights(checkpoint)
            if self.is_global_zero:
                os.makedirs(filepath, exist_ok=True)
                self.checkpoint_io.save_checkpoint(checkpoint, own)
        save_checkpoint(filepath, self.lightning_module, optimizers, step=step, keep=1)
        if self.is_global_zero:  # Lightning saves last.ckpt into the same folder again and again.
            for other in set(own.parent.glob(FILE.format(step="*"))) - {own}:
                other.unlink(missing_ok=True)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads Lightning's dict of a checkpoint. Model and optimizers are loaded later from the same folder.

        checkpoint_path: the folder of the checkpoint.
        weights_only: passed on to Lightning.

        Collective. Raises ValueError on every rank if the path of any rank is not a folder that this strategy
        wrote, or if ranks have different checkpoints.
        """
        path = Path(checkpoint_path)
        with all_fail_together(Ranks(), stage="reading Lightning's part of a checkpoint"):
            own = _file_of(path)
            options = {} if weights_only is None else {"weights_only": weights_only}  # new in Lightning 2.6
            loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(own, **options)
            self._loaded = _Checkpoint(path, own.name, zlib.crc32(own.read_bytes()))
        self._compare_checkpoints()
        return loaded

    def _compare_checkpoints(self) -> None:
        """Raises ValueError on every rank if ranks have loaded different checkpoints. Collective."""
        check_same(
            Ranks(),
            {"ckpt_path": self._loaded},
            stage="comparing checkpoints of Lightning",
            cure="All ranks must see the folder, and load the same checkpoint",
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model from the folder that `load_checkpoint` was called for.

        Raises ValueError if ``strict`` is False, CheckpointError if the checkpoint does not fit the model.
        """
        if not strict:
            raise ValueError("strict_loading (False) must be True with SpreadDDPStrategy")
        assert self._loaded is not None
        load_checkpoint(self._loaded.folder, self.lightning_module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers from the folder that `load_checkpoint` was called for."""
        assert self._loaded is not None
        load_checkpoint(self._loaded.folder, self.lightning_module, list(self.optimizers))


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint that was loaded. Two are equal if Lightning's file has the same name and content.

    folder: the folder; ranks may see the same folder under different paths.
    file: the name of the file that Lightning wrote.
    checksum: the checksum of the file's content.
    """

    folder: Path = field(compare=False)
    file: str
    checksum: int

    def __str__(self) -> str:
        return str(self.folder)


def warn_of_release() -> None:
    """Warns once if the release of Lightning is not the one that was tested."""
    warn_of_other_release("lightning", str(lightning.__version__), TESTED)


def _file_of(path: Path) -> Path:
    """Returns the path of Lightning's own file in a checkpoint of `SpreadDDPStrategy`.

    path: the folder of the checkpoint.

    Raises ValueError if the folder is missing, if another strategy wrote it, or if it lacks the file.
    """
    try:
        step = int(re.findall(r"step_(\d+)", files.find(path, None))[0])
        own = path / FILE.format(step=step)
        if own.is_file():
            return own
        reason = f"there is no {own.name}"
    except (CheckpointError, OSError, ValueError, IndexError) as error:
        reason = "a file" if path.is_file() else str(error)
    raise ValueError(
        f"ckpt_path ({path}) must be a folder of SpreadDDPStrategy, but it is not ({reason}): "
        "another strategy wrote it, or saving it was interrupted. Continue with the strategy that "
        "wrote it, or from another checkpoint. All ranks must see the folder"
    )


def _check_trainer(trainer: Any) -> None:
    """Raises ValueError if Lightning's Trainer does not fit a module whose experts are on several ranks.

    trainer: the Trainer, with its LightningModule.
    """
    module: nn.Module = trainer.lightning_module
    check_not_wrapped(
        module,
        (DistributedDataParallel, FullyShardedDataParallel, FSDPModule),
        "SpreadDDPStrategy wraps the LightningModule itself. Leave the wrapper out, or take "
        "ModelParallelStrategy for fully_shard",
    )
    layers = [layer for layer in module.modules() if isinstance(layer, MoELayer)]
    if not any(layer.ranks.size > 1 for layer in layers):
        return
    if trainer.gradient_clip_val and not is_overridden("configure_gradient_clipping", module):
        raise ValueError(
            f"gradient_clip_val ({trainer.gradient_clip_val}) must be None, because Lightning would take "
            "each rank's experts for all experts: call pmoe.clip_grad_norm_(self, value) in "
            "configure_gradient_clipping of the LightningModule"
        )
    precision = trainer.precision_plugin
    scaler = getattr(precision, "scaler", None)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ValueError(
            f"the scaler of precision {precision.precision!r} ({type(scaler).__name__}) must be pmoe's, "
            "which skips a step on all ranks or on none: pass "
            'plugins=[MixedPrecision("16-mixed", "cuda", scaler=pmoe.GradScaler("cuda"))] to the Trainer'
        )


def check_no_weights(checkpoint: Mapping[str, Any]) -> None:
    """Raises ValueError if Lightning's dict has weights of the model, which would be lost or be one rank's.

    checkpoint: Lightning's dict.
    """
    for name in checkpoint["state_dict"]:
        raise ValueError(
            f"checkpoint (with {name} in its state_dict) must not have weights, because they "
            "would be lost, or be those of one rank. A callback has put them there, such as WeightAveraging: "
            "average by torch.optim.swa_utils.AveragedModel in the LightningModule"
        )
