"""Importing this registers everything with fairseq: models, criteria, and the trainer.

fairseq has no registry of trainers. Its training command takes the class by its name, from the module that it
is read in, so this is where it is replaced; for a model without experts the new one does what the old one
does.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import fairseq.trainer
import numpy
import torch

from pmoe.integrations.fairseq import criterions, models  # noqa: F401
from pmoe.integrations.fairseq.trainer import MoETrainer, NanDetectorBesideGates

# Checkpoints of models that take their options from argparse hold a Namespace; where a validation's metrics
# were arrays (--eval-bleu), they hold arrays. torch.load refuses both otherwise.
_arrays: Any = numpy.core.multiarray  # type: ignore[attr-defined]
torch.serialization.add_safe_globals(
    [
        argparse.Namespace,
        numpy.ndarray,
        numpy.dtype,
        *(type(numpy.dtype(each)) for each in ("int64", "float32", "float64")),
        _arrays._reconstruct,
        _arrays.scalar,
    ]
)

_replaced = MoETrainer.__base__
fairseq.trainer.Trainer = MoETrainer
fairseq.trainer.NanDetector = NanDetectorBesideGates
for _name in ("fairseq_cli.train", "__main__"):
    _module = sys.modules.get(_name)
    if getattr(_module, "Trainer", None) is _replaced:
        _module.Trainer = MoETrainer  # type: ignore[union-attr]
