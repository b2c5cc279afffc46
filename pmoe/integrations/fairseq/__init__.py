"""pmoe in fairseq: models ``transformer_lm_pmoe`` and ``transformer_pmoe``, criteria and a trainer.

`__main__` runs fairseq's commands with this plugin. If fairseq can be imported without help (Python 3.10, or
the fork fairseq-fixed), its own commands work too: ``fairseq-train --user-dir``, followed by the folder that
``python -m pmoe.integrations.fairseq user-dir`` prints.

- `options` reads the options of the command line.
- `checks` refuses options that cannot work.
- `models` puts experts into fairseq's transformers.
- `criterions` adds the auxiliary loss.
- `plugin` corrects how data parallelism treats the gradients, norms and checkpoints of experts.
- `checkpoint` gathers all ranks' experts into one file, and takes a rank's own out of it.

Nothing of fairseq is imported before it is used.
"""

from __future__ import annotations

from pathlib import Path

USER_DIR = Path(__file__).resolve().parent / "user_dir" / "pmoe_fairseq"
"""The folder for ``--user-dir``.

fairseq puts the folder above it on sys.path and imports this one as a top-level module. So its name must be
unique, and nothing else may lie beside it.
"""
