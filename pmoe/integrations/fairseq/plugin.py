"""Importing this registers everything with fairseq: models, criteria, and the trainer.

fairseq has no registry of trainers. Its training command takes the class by its name, from the module that it
is read in, so this is where it is replaced; for a model without experts the new one does what the old one
does.
"""

from __future__ import annotations

import argparse
import sys

import fairseq.trainer
import torch

from pmoe.integrations.fairseq import criterions, models  # noqa: F401
from pmoe.integrations.fairseq.trainer import MoETrainer, NanDetectorBesideGates

# Checkpoints of models that take their options from argparse hold a Namespace, which torch.load refuses
# otherwise.
torch.serialization.add_safe_globals([argparse.Namespace])

_replaced = MoETrainer.__base__
fairseq.trainer.Trainer = MoETrainer
fairseq.trainer.NanDetector = NanDetectorBesideGates
for _name in ("fairseq_cli.train", "__main__"):
    _module = sys.modules.get(_name)
    if getattr(_module, "Trainer", None) is _replaced:
        _module.Trainer = MoETrainer  # type: ignore[union-attr]
