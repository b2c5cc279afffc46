"""`SpreadCheckpoints`: transformers' Trainer saves and resumes models with experts on several ranks.

The Trainer by itself refuses to resume such models, because it writes optimizer states by `torch.save` on one
rank. Here each checkpoint folder of the Trainer has one more folder, which `pmoe.save_checkpoint` writes:

    OUTPUT_DIR/checkpoint-N/
        config.json  model.safetensors ...   the whole model, which transformers writes for from_pretrained
        trainer_state.json                   steps, epochs and logs, which transformers writes
        pmoe/step_N/                         model, optimizer, scheduler and random states of all ranks

The Trainer's own code decides when to save and which checkpoints to delete. When training is resumed, the
Trainer also skips the data of the steps that were already made.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pmoe.training import checkpoint_files as files
from pmoe.training.checkpoint import load_checkpoint, save_checkpoint
from pmoe.warn import warn_once

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

FOLDER = "pmoe"
"""Folder of pmoe's files, inside of each checkpoint folder of the Trainer."""
STATE = "trainer_state.json"
"""File of the Trainer's own state. The Trainer writes it last."""


class SpreadCheckpoints(Trainer):
    """A base class that lets a Trainer resume from its checkpoints on any number of ranks.

    The number of ranks must divide the number of experts. Put this class before the Trainer that you use
    (transformers' own, a subclass of it, or one of TRL), and set ``save_only_model=True``: pmoe saves what
    the Trainer then leaves out. `Trainer.train(resume_from_checkpoint=...)` works as usual.

    If a step has as many samples as before (per_device_train_batch_size * gradient_accumulation_steps *
    number of ranks), losses after resuming equal those of a run without an interruption. A model with an
    auxiliary loss (output_router_logits=True) also needs the same per_device_train_batch_size, because the
    Trainer adds the auxiliary losses of all micro-batches of all ranks. Random numbers, such as those of
    dropout, also continue if the number of ranks is the same.

    A model of transformers is also saved as a whole, for from_pretrained. Other models are not, because a
    file from one rank would lack experts.

    Example:
        class MyTrainer(SpreadCheckpoints, Trainer): ...
        trainer = MyTrainer(model, TrainingArguments("out", save_steps=100, save_only_model=True), ...)
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._generators: dict[str, Any] | None = None
        super().__init__(*args, **kwargs)
        if self.args.save_strategy != "no" and not self.args.save_only_model:
            raise ValueError(
                f"save_only_model ({self.args.save_only_model}) must be True with SpreadCheckpoints, which "
                "saves the optimizer itself: TrainingArguments(..., save_only_model=True)"
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model, with the experts of all ranks, as from_pretrained loads it.

        The Trainer also calls this method for its checkpoints. A model without save_pretrained, which is no
        model of transformers, is then not written, because pmoe's part of the checkpoint has its weights.

        output_dir: the folder; None is that of the TrainingArguments.
        """
        if _internal_call and output_dir is not None and not hasattr(self.model, "save_pretrained"):
            os.makedirs(output_dir, exist_ok=True)
            return
        super().save_model(output_dir, _internal_call)

    # The methods below override private methods of the Trainer. Its callbacks would run too late: after the
    # Trainer has chosen the data and the state with which it resumes.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves a checkpoint: first pmoe's files, then the Trainer's.

        If saving is interrupted, the folder may lack the Trainer's state. A folder that has this state also
        has pmoe's files, so it is complete.

        model, trial: arguments of the Trainer's own method.
        """
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{step}" / FOLDER
        scheduler = getattr(self, "lr_scheduler", None)
        scaler = getattr(self.accelerator, "scaler", None)
        extra = {
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "samples": self._samples_of_step(),
            "auxiliary_losses": self._num_auxiliary_losses(),
        }
        save_checkpoint(folder, self._own_model(), self.optimizer, step=step, extra=extra)
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Checks that training can be resumed from a folder. `_load_optimizer_and_scheduler` loads the files.

        Raises ValueError if a part of the folder is missing. The message names the newest complete checkpoint
        beside it.
        """
        path = Path(resume_from_checkpoint)
        if _is_complete(path):
            return
        others = sorted(filter(_is_complete, path.parent.glob("checkpoint-*")), key=_step_of)
        advice = "call trainer.train() without it"
        if (path / "config.json").is_file():
            advice = f'load the weights, with a new optimizer: from_pretrained("{path}", ...)'
        if others:
            advice = f'trainer.train(resume_from_checkpoint="{others[-1]}")'
        raise ValueError(
            f"resume_from_checkpoint ({path}) must be a checkpoint folder of a Trainer with "
            f"SpreadCheckpoints, with {STATE} and {FOLDER}/. It has not both: another Trainer saved it, or "
            f"saving it was interrupted. To go on: {advice}"
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the model, the optimizer, the scheduler and the loss scale of a checkpoint.

        The random states are only read. The Trainer sets them later, by `_load_rng_state`.

        checkpoint: the folder; None loads nothing.
        """
        if checkpoint is None:
            return
        before = _generators()
        loaded = load_checkpoint(Path(checkpoint) / FOLDER, self._own_model(), self.optimizer)
        if loaded.random:
            # The Trainer makes the order of the data next, and sets random states after that.
            self._generators = _generators()
            files.set_random(before)
        if loaded.extra["scheduler"] is not None and self.lr_scheduler is not None:
            _load_scheduler(self.lr_scheduler, loaded.extra["scheduler"])
        if loaded.extra["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(loaded.extra["scaler"])
        saved = loaded.extra["samples"]
        if saved != self._samples_of_step():
            warn_once(
                "a step of the Trainer now has another number of samples than in the checkpoint: "
                f"{self._samples_of_step()}, not {saved}. Data are skipped by steps, so some samples come "
                "twice or not at all; change per_device_train_batch_size or gradient_accumulation_steps"
            )
        num_losses = self._num_auxiliary_losses()
        num_saved = loaded.extra.get("auxiliary_losses", num_losses)  # older checkpoints do not have it
        if num_saved != num_losses:
            warn_once(
                "a step of the Trainer now adds up another number of auxiliary losses than in the "
                f"checkpoint: {num_losses}, not {num_saved}. So their weight has changed, and losses differ "
                "from those of a run without an interruption; keep per_device_train_batch_size, and change "
                "gradient_accumulation_steps"
            )

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint (``load_best_model_at_end``)."""
        best = self.state.best_model_checkpoint
        assert best is not None  # the Trainer has checked it
        before = _generators()
        load_checkpoint(Path(best) / FOLDER, self._own_model())
        files.set_random(before)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Sets the random states of a loaded checkpoint, after the Trainer has skipped data."""
        if self._generators is not None:
            files.set_random(self._generators)
            self._generators = None

    def _own_model(self) -> nn.Module:
        """Returns the model of the Trainer, which must not be None."""
        assert self.model is not None
        return self.model

    def _samples_of_step(self) -> int:
        """Returns the number of samples of an optimizer step on all ranks."""
        arguments = self.args
        each: int = self._train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
        return each

    def _num_auxiliary_losses(self) -> int:
        """Returns how many auxiliary losses of the model the Trainer adds up in an optimizer step.

        The Trainer lets the model divide the labels' loss by the labels of the whole step, and then adds up
        the losses of all micro-batches and ranks. The auxiliary loss of a micro-batch is in that sum, but it
        is not divided by anything (https://github.com/huggingface/transformers/issues/48690).

        0 if the model has no auxiliary loss, 1 if the Trainer takes the mean.
        """
        config = getattr(self.model, "config", None)
        if not getattr(config, "output_router_logits", False):
            return 0
        if not self.model_accepts_loss_kwargs:
            return 1
        count: int = self.args.gradient_accumulation_steps
        if self.args.average_tokens_across_devices:
            count *= self.args.world_size // self.get_tp_size()
        return count


def _is_complete(path: Path) -> bool:
    """Returns whether a checkpoint folder has the Trainer's state and pmoe's files."""
    return (path / STATE).is_file() and (path / FOLDER / files.POINTER).is_file()


def _step_of(path: Path) -> int:
    """Returns the number at the end of a folder's name: 12 for checkpoint-12; -1 if there is none."""
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _load_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Loads the state of a learning-rate scheduler, also into another number of parameter groups.

    The number may differ, because the Trainer makes more groups if experts are spread: an optimizer cannot
    take parameters of several meshes in one group. Lists with a value for each group are then not loaded.
    Instead, the learning rates come from the optimizer's groups, which were loaded before. Functions of the
    scheduler stay as this run made them.

    scheduler: the scheduler, which is changed.
    saved: its saved state.
    """
    own = scheduler.state_dict()
    groups = scheduler.optimizer.param_groups
    if len(saved.get("base_lrs", groups)) == len(groups):
        scheduler.load_state_dict(dict(saved))
        return
    lists = {key: own[key] for key, value in saved.items() if isinstance(value, list) and key in own}
    lists["base_lrs"] = [group["initial_lr"] for group in groups]
    lists["_last_lr"] = [group["lr"] for group in groups]
    scheduler.load_state_dict({**saved, **lists})


def _generators() -> dict[str, Any]:
    """Returns the states of the random generators that a checkpoint holds, by name."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
