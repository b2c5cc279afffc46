"""pmoe in fairseq: ``transformer_lm_pmoe`` and ``transformer_pmoe``, their criteria, and what training needs.

`__main__` is fairseq's commands with this plugin in them. Where fairseq imports by itself (Python 3.10, or
the fork fairseq-fixed), its own commands do as well: ``fairseq-train --user-dir`` and what ``python -m
pmoe.integrations.fairseq user-dir`` prints.

`options` reads the options, `checks` refuses what cannot work, `models` puts experts into
fairseq's transformers, `criterions` adds the auxiliary loss, `plugin` mends what data parallelism does to
experts, and `checkpoint` brings all ranks' experts into one file and takes a rank's own out of it. Nothing of
fairseq is imported before it is used.
"""

from __future__ import annotations

from pathlib import Path

USER_DIR = Path(__file__).resolve().parent / "user_dir" / "pmoe_fairseq"
"""What ``--user-dir`` takes. fairseq imports that folder by its own name and puts the folder above it on
sys.path: so the name is one that nothing else has, and there is nothing else beside it."""
