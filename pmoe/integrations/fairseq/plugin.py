"""The plugin: importing this module registers pmoe's models, criteria and trainer with fairseq.

Parameters of experts have the attribute ``expert``. fairseq's trainer (with legacy_ddp) does not reduce their
gradients over ranks. If experts are spread over the data-parallel ranks, `MoETrainer` does three more things:

- It scales the gradients. fairseq takes each gradient for a mean over ranks, and multiplies it by the number
  of ranks. But the gradient of an expert is a sum over the tokens of all ranks already. So `MoETrainer` first
  divides the gradients of experts by the number of ranks.
- It includes the experts of all ranks in the norm that --clip-norm limits.
- It sends all experts to rank 0, because only rank 0 writes checkpoints.

fairseq has no registry of trainers. Its training command finds the trainer class by its name in a module, so
this plugin replaces the class in that module. For a model without experts, the new trainer does the same as
fairseq's.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

import fairseq.trainer
import numpy
import torch
import torch.distributed as dist
from fairseq.nan_detector import NanDetector
from fairseq.trainer import Trainer
from torch import Tensor, nn

from pmoe import Gate
from pmoe.call.modules import LayerModules
from pmoe.choose.search import results_for_checkpoint, take_results
from pmoe.comm.ranks import Ranks
from pmoe.integrations.fairseq import criterions  # noqa: F401
from pmoe.integrations.fairseq.checkpoint import for_inference, gather_model, gather_optimizer, own_optimizer
from pmoe.integrations.fairseq.checks import check_training
from pmoe.integrations.fairseq.models import ExpertParallelModel
from pmoe.training.gradient_mean import MeanOverRanks
from pmoe.training.parallel import make_meshes
from pmoe.warn import log

logger: logging.Logger = logging.getLogger(__name__)

TRIALS = "moe_trials"
"""The key of a checkpoint's extra state under which the results of trials are (``--moe-pipeline true``)."""


class NanDetectorBesideGates(NanDetector):  # type: ignore[misc]
    """fairseq's search for NaNs after a failed step, without hooks on gates.

    fairseq's hooks work only on modules that return tensors, but a gate returns a `pmoe.Routing`.
    """

    def add_hooks(self, module: nn.Module) -> None:
        """Adds fairseq's hooks that look for NaNs to a module, unless the module is a gate."""
        if not isinstance(module, Gate):
            super().add_hooks(module)


class MoETrainer(Trainer):  # type: ignore[misc]
    """fairseq's trainer, changed for models with experts: gradients, gradient norm and checkpoints.

    For a model without experts it does the same as fairseq's trainer.

    has_experts: whether the model is one of pmoe's.
    """

    has_experts: bool

    def __init__(self, cfg: Any, task: Any, model: Any, criterion: Any, quantizer: Any = None) -> None:
        """Checks the options, then constructs fairseq's trainer from its arguments.

        Raises ValueError for options with which a model with experts cannot be trained, and for pmoe's
        criteria with a model without experts.
        """
        self.has_experts = isinstance(model, ExpertParallelModel)
        self._gathered: dict[str, Any] | None = None
        self._is_stepping = False
        if self.has_experts:
            check_training(
                cfg,
                criterion,
                num_ranks=cfg.distributed_training.distributed_world_size,
                device_type="cuda" if torch.cuda.is_available() and not cfg.common.cpu else "cpu",
            )
        elif hasattr(criterion, "moe_aux_weight"):
            raise ValueError(
                f"--criterion ({cfg.criterion._name}) must be one of fairseq's for --arch "
                f"({cfg.model._name}), which has no experts"
            )
        super().__init__(cfg, task, model, criterion, quantizer)
        if self.data_parallel_rank > 0:
            # fairseq lets ranks other than 0 log warnings only. All ranks choose the same numbers of chunks,
            # so rank 0 logs them for all.
            log.setLevel(max(log.level, logging.getLogger().level))
        if self.is_spread:
            # Each rank reads the file and takes its own experts from it. Otherwise rank 0 would read the file
            # and send the whole content to the other ranks, with a pickled configuration that torch.load
            # refuses since torch 2.6.
            cfg.checkpoint.load_checkpoint_on_all_dp_ranks = True
            self.ranks: Ranks = model.moe_layers[0].fc1.ranks
            size = self.ranks.size
            num_ranks = self.data_parallel_world_size
            copies = Ranks(make_meshes(ep=size).group("edp")) if size < num_ranks else Ranks.single()
            self._reduce = MeanOverRanks(num_ranks, copies)

    @property
    def is_spread(self) -> bool:
        """Whether the model has experts and several ranks train it.

        Each rank then holds a part of the experts, or a copy of all.
        """
        return self.has_experts and self.data_parallel_world_size > 1

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        """Runs fairseq's training step, then updates the balancing biases of gates that have biases.

        If experts are on several ranks, a batch that does not fit into memory raises an error, even if
        raise_oom is False. fairseq would skip the batch, but then the other ranks would wait for this rank.

        samples: this rank's batches of the step (--update-freq). Empty ones stand for dummy batches.
        """
        if self.has_experts:
            # If the last batch is a dummy, fairseq leaves the sizes of all batches out of the denominator of
            # the gradient. The criterion returns a size of 0 for dummies, so another batch must be the last.
            samples = sorted(samples, key=bool)
        self._is_stepping = True
        try:
            # Without raise_oom, fairseq skips a batch that does not fit into memory, and the other ranks
            # would wait for this rank.
            logged = super().train_step(samples, raise_oom=raise_oom or self.is_spread)
        finally:
            self._is_stepping = False
            self._tell_whether_dummy(False)
        for layer in self._model.moe_layers if self.has_experts else ():
            if hasattr(layer.fc1.gate, "update_bias"):
                layer.fc1.gate.update_bias()
        return logged

    def _prepare_sample(self, sample: Any, is_dummy: bool = False) -> tuple[Any, bool]:
        """Moves a batch to the device as fairseq does, and tells the layers whether it is a dummy batch.

        Experts take no tokens of a dummy batch: these would use capacity, count in the loads of gates, and
        take time.

        sample: the batch. fairseq replaces an empty one by a dummy batch.
        is_dummy: whether ``sample`` is already the batch that replaces an empty one.

        Returns the batch, and whether it is a dummy.
        """
        prepared, is_dummy_batch = super()._prepare_sample(sample, is_dummy)
        self._tell_whether_dummy(is_dummy_batch)
        return prepared, is_dummy_batch

    def _tell_whether_dummy(self, is_dummy: bool) -> None:
        """Tells each MoE layer whether the batches that come next are dummies."""
        for layer in self._model.moe_layers if self.has_experts else ():
            layer.fc1.is_dummy = is_dummy

    def valid_step(self, sample: Any, raise_oom: bool = False) -> Any:
        """Runs fairseq's validation step.

        If experts are on several ranks, a batch that does not fit into memory raises an error, even if
        raise_oom is False. fairseq would skip the batch, but then the other ranks would wait for this rank.
        """
        try:
            return super().valid_step(sample, raise_oom=raise_oom or self.is_spread)
        finally:
            self._tell_whether_dummy(False)

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        """Scales all gradients down if their norm exceeds ``clip_norm``. Returns the norm, a scalar.

        The norm includes the experts of all ranks, so it is the same on every rank.
        """
        if not self.has_experts:
            return super().clip_grad_norm(clip_norm)  # type: ignore[no-any-return]
        return self.optimizer.clip_grad_norm(clip_norm, aggregate_norm_fn=self.with_experts)  # type: ignore[no-any-return]

    @torch.no_grad()
    def with_experts(self, dense_norm: Tensor) -> Tensor:
        """Reduces the gradients of experts over ranks, and returns the norm of all gradients, a scalar.

        dense_norm: a scalar, the norm of the gradients of all other parameters.

        Gradients of an expert are summed over the copies of the expert, and scaled to means over ranks, as
        other gradients are. The norm includes the experts of other ranks. fairseq calls this method after the
        backward pass, when its optimiser's gradients are complete, and scales all of them afterwards.
        """
        gradients = [
            parameter.grad
            for parameter in self.optimizer.params
            if hasattr(parameter, "expert") and parameter.grad is not None
        ]
        if self.is_spread:
            self._reduce(gradients)
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        squared_norm = torch.stack([dense_norm.new_zeros(()), *norms]).double().square().sum()
        if self.is_spread:
            dist.all_reduce(squared_norm)
            squared_norm /= self._reduce.copies.size
        return (dense_norm.double().square() + squared_norm).sqrt().to(dense_norm.dtype)

    def consolidate_optimizer(self) -> None:
        """Gathers all experts and their optimiser state on rank 0, for the checkpoint that it writes next.

        fairseq calls this method on every rank before it saves a checkpoint. fairseq also calls it after a
        step has failed, perhaps on a single rank. Nothing is gathered then, because the other ranks would not
        take part.
        """
        super().consolidate_optimizer()
        if not self.is_spread or self._is_stepping:
            return
        self._gathered = {"model": gather_model(self._model, self._model.state_dict())}
        if not self.cfg.checkpoint.no_save_optimizer_state:
            state = self.optimizer.state_dict()
            self._gathered["last_optimizer_state"] = gather_optimizer(
                self.optimizer.optimizer, state, self.ranks
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the trainer's state dict for a checkpoint, with the experts of all ranks.

        Raises RuntimeError if experts are on several ranks and `consolidate_optimizer` has not gathered them.
        """
        state: dict[str, Any] = super().state_dict()
        if not self.has_experts:
            return state
        state["extra_state"][TRIALS] = results_for_checkpoint(self._layers_with_experts())
        state["cfg"]["model"] = for_inference(state["cfg"]["model"])
        if self.is_spread:
            if self._gathered is None:
                raise RuntimeError("consolidate_optimizer must be called on every rank before state_dict")
            state.update(self._gathered)
            self._gathered = None
        return state

    def load_checkpoint(self, filename: str, *args: Any, **options: Any) -> Any:
        """Loads a checkpoint as fairseq does, and the results of earlier trials (``--moe-pipeline true``).

        A trial finds the fastest number of chunks for batches of one size. If the checkpoint has a result for
        a size, batches of this size take it without a new trial. Every rank must call this method.

        Returns the checkpoint's extra state; None if there is no checkpoint.
        """
        extra_state = super().load_checkpoint(filename, *args, **options)
        if self.is_spread:
            take_results(self._layers_with_experts(), (extra_state or {}).get(TRIALS, []))
        return extra_state

    def _layers_with_experts(self) -> list[LayerModules]:
        """Returns the modules and options of each MoE layer of the model."""
        return [layer.fc1.layer_modules for layer in self._model.moe_layers]

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> None:
        """Writes a checkpoint as fairseq does. In a failed step with several ranks, only logs a warning.

        After a failure, the experts of the other ranks cannot be gathered.
        """
        if self.is_spread and self._is_stepping:
            what = "is not written: the other ranks' experts cannot be fetched in a failing step"
            logger.warning(f"{os.path.basename(filename)} {what}")
            return
        super().save_checkpoint(filename, extra_state)

    def _build_optimizer(self) -> None:
        """Builds fairseq's optimiser, changed to load only this rank's experts from a checkpoint with all."""
        super()._build_optimizer()
        if not self.is_spread:
            return
        load = self._optimizer.load_state_dict

        def load_own(state: dict[str, Any], overrides: Any = None) -> None:
            """Loads this rank's part of an optimiser's state dict that has all experts.

            overrides: passed on to fairseq's method unchanged.
            """
            load(own_optimizer(self._optimizer.optimizer, state, self.ranks), overrides)

        self._optimizer.load_state_dict = load_own


# ---- registration with fairseq

# torch.load refuses types that are not declared safe. Checkpoints hold a Namespace if the model's options
# come from argparse, and numpy arrays if a validation's metrics are arrays (--eval-bleu).
_arrays: Any = numpy.core.multiarray  # type: ignore[attr-defined]
torch.serialization.add_safe_globals(
    [
        argparse.Namespace,
        numpy.ndarray,
        numpy.dtype,
        *(type(numpy.dtype(name)) for name in ("int64", "float32", "float64")),
        _arrays._reconstruct,
        _arrays.scalar,
    ]
)

fairseq.trainer.Trainer = MoETrainer
fairseq.trainer.NanDetector = NanDetectorBesideGates
for _name in ("fairseq_cli.train", "__main__"):
    _module = sys.modules.get(_name)
    if getattr(_module, "Trainer", None) is Trainer:
        _module.Trainer = MoETrainer  # type: ignore[union-attr]
