"""pmoe in fairseq: two models with experts, two criteria with the load-balance loss, and a trainer.

The models are ``transformer_lm_pmoe`` (language model) and ``transformer_pmoe`` (translation). fairseq loads
them as a plugin, in one of two ways:

- ``python -m pmoe.integrations.fairseq train ...`` runs fairseq's commands with this plugin (`__main__`).
- fairseq's own commands take ``--user-dir FOLDER``, where FOLDER is what ``python -m
  pmoe.integrations.fairseq user-dir`` prints. For this, ``import fairseq`` must work: it works with Python
  3.10, or with the fork fairseq-fixed.

Modules:

- `options` defines the --moe options of the command line.
- `checks` refuses options that cannot work together.
- `models` puts experts into fairseq's transformers.
- `criterions` adds the load-balance loss.
- `plugin` has the trainer, which treats gradients, norms and checkpoints of experts correctly under data
  parallelism.
- `checkpoint` gathers the experts of all ranks into one file, and picks a rank's own experts out of it.

This package imports nothing of fairseq until fairseq itself is used.
"""

from __future__ import annotations

from pathlib import Path

USER_DIR = Path(__file__).resolve().parent / "user_dir" / "pmoe_fairseq"
"""The folder to pass as fairseq's ``--user-dir``.

fairseq adds the parent folder to sys.path and imports this folder as a top-level module. So its name must be
unique, and its parent folder must hold nothing else.
"""
