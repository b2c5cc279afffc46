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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pmoe.training import checkpoint_files as files
from pmoe.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from pmoe.warn import warn_once

try:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
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
        self._loaded_from: Path | None = None
        version = str(lightning.__version__)
        if not version.startswith(f"{TESTED}."):
            warn_once(
                f"lightning {version} is not {TESTED}, with which pmoe was tested: if something fails, "
                f'pip install "lightning=={TESTED}.*"'
            )

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

        Raises ValueError if storage_options is not None, CheckpointError as `pmoe.save_checkpoint` does.
        """
        if storage_options is not None:
            raise ValueError(f"storage_options ({storage_options!r}) must be None with SpreadDDPStrategy")
        step = int(checkpoint["global_step"])
        optimizers = list(self.optimizers) if checkpoint.get("optimizer_states") else None
        own = Path(filepath) / FILE.format(step=step)
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

        Raises ValueError if the path is not a folder that this strategy wrote.
        """
        path = Path(checkpoint_path)
        try:
            step = int(re.findall(r"step_(\d+)", files.find(path, None))[0])
        except (CheckpointError, OSError, ValueError, IndexError) as error:
            reason = "a file" if path.is_file() else str(error)
            raise ValueError(
                f"ckpt_path ({path}) must be a folder of SpreadDDPStrategy, but it is not ({reason}): "
                "another strategy wrote it, or saving it was interrupted. Continue with the strategy that "
                "wrote it, or from another checkpoint"
            ) from error
        self._loaded_from = path
        loaded: dict[str, Any] = self.checkpoint_io.load_checkpoint(
            path / FILE.format(step=step), weights_only=weights_only
        )
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model from the folder that `load_checkpoint` was called for.

        Raises ValueError if ``strict`` is False, CheckpointError if the checkpoint does not fit the model.
        """
        if not strict:
            raise ValueError("strict_loading (False) must be True with SpreadDDPStrategy")
        assert self._loaded_from is not None
        load_checkpoint(self._loaded_from, self.lightning_module)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers from the folder that `load_checkpoint` was called for."""
        assert self._loaded_from is not None
        load_checkpoint(self._loaded_from, self.lightning_module, list(self.optimizers))
