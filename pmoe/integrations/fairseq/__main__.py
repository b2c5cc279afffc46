"""fairseq's commands, with pmoe's plugin.

    python -m pmoe.integrations.fairseq train DATA --arch transformer_lm_pmoe ...
    torchrun --standalone --nproc-per-node 2 -m pmoe.integrations.fairseq train ...
    python -m pmoe.integrations.fairseq hydra-train task=language_modeling model=transformer_lm_pmoe ...
    python -m pmoe.integrations.fairseq eval-lm DATA --path checkpoint_last.pt ...
    python -m pmoe.integrations.fairseq options         # every --moe option, its default, what it does
    python -m pmoe.integrations.fairseq user-dir        # what fairseq-train --user-dir takes

Every other argument is fairseq's or the plugin's. --user-dir (hydra-train: common.user_dir) is set, unless
you give one: then its package must import pmoe.integrations.fairseq.plugin.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import textwrap

from pmoe.integrations.fairseq.shim import allow_fairseq_defaults

allow_fairseq_defaults()

from pmoe.integrations.fairseq import USER_DIR  # noqa: E402

COMMANDS = ("train", "hydra-train", "preprocess", "eval-lm", "generate", "interactive", "validate", "score")
"""Those of fairseq_cli; score knows no --user-dir."""

INSTALL = (
    'pip install "numpy<2" hydra-core==1.3.2 omegaconf==2.3.0 bitarray cffi cython regex sacrebleu tqdm && '
    "pip install --no-deps fairseq==0.12.2"
)


def main(arguments: list[str]) -> None:
    name, *rest = arguments or ["--help"]
    if name == "user-dir":
        print(USER_DIR)
    elif name == "options":
        _print_options()
    elif name in ("-h", "--help"):
        print(__doc__.strip() + "\n\ncommands: options, user-dir, " + ", ".join(COMMANDS))
    elif name in COMMANDS:
        _run(name, rest)
    else:
        sys.exit(f"command ({name}) must be options, user-dir or one of {', '.join(COMMANDS)}")


def _run(name: str, rest: list[str]) -> None:
    try:
        importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        sys.exit(f"fairseq cannot be imported ({error}): {INSTALL}")
    command = importlib.import_module(f"fairseq_cli.{name.replace('-', '_')}")
    given = {each.partition("=")[0] for each in rest}
    added: list[str] = []
    if name == "hydra-train":
        # Its configuration is put together before it reads common.user_dir.
        importlib.import_module("pmoe.integrations.fairseq.plugin")
        added = [] if "common.user_dir" in given else [f"common.user_dir={USER_DIR}"]
    elif name != "score" and "--user-dir" not in given:
        added = ["--user-dir", str(USER_DIR)]
    sys.argv = [f"fairseq-{name}", *added, *rest]
    command.cli_main()


def _print_options() -> None:
    """fairseq's own --help ends before it knows the architecture's options."""
    from pmoe.integrations.fairseq.options import PLACES, layer_options

    for option in (*PLACES, *layer_options()):
        print(f"{option.flag} ({option.default})")
        print(textwrap.fill(option.help, 100, initial_indent="    ", subsequent_indent="    "))


if __name__ == "__main__":
    # What the processes that fairseq starts, one a GPU, import as their main module: never a __main__.py.
    __spec__ = importlib.util.find_spec("pmoe.integrations.fairseq.shim")
    main(sys.argv[1:])
