"""fairseq's commands, with pmoe's plugin.

    python -m pmoe.integrations.fairseq train DATA --arch transformer_lm_pmoe ...
    torchrun --standalone --nproc-per-node 2 -m pmoe.integrations.fairseq train ...
    python -m pmoe.integrations.fairseq hydra-train task=language_modeling model=transformer_lm_pmoe ...
    python -m pmoe.integrations.fairseq eval-lm DATA --path checkpoint_last.pt ...
    python -m pmoe.integrations.fairseq options         # prints every --moe option, its default and meaning
    python -m pmoe.integrations.fairseq user-dir        # prints the folder for fairseq-train --user-dir

All other arguments are options of fairseq or of the plugin. The plugin sets --user-dir (for hydra-train:
common.user_dir). If you set it yourself, your package must import pmoe.integrations.fairseq.plugin.
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
"""fairseq's commands, the modules of fairseq_cli. score has no --user-dir."""

INSTALL = (
    'pip install "numpy<2" hydra-core==1.3.2 omegaconf==2.3.0 bitarray cffi cython regex sacrebleu tqdm && '
    "pip install --no-deps fairseq==0.12.2"
)
"""The commands that install fairseq, as error messages show them."""


def main(arguments: list[str]) -> None:
    """Runs one command. arguments: those of the command line, without the program."""
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
    """Runs one of fairseq's commands with these arguments and the plugin.

    Exits with the commands of `INSTALL` if fairseq cannot be imported.
    """
    try:
        importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        sys.exit(f"fairseq cannot be imported ({error}): {INSTALL}")
    command = importlib.import_module(f"fairseq_cli.{name.replace('-', '_')}")
    given_names = {argument.partition("=")[0] for argument in rest}
    added_arguments: list[str] = []
    if name == "hydra-train":
        # hydra composes its configuration, and needs the models for it, before it reads common.user_dir.
        import pmoe.integrations.fairseq.plugin  # noqa: F401 - it registers the models

        added_arguments = [] if "common.user_dir" in given_names else [f"common.user_dir={USER_DIR}"]
    elif name != "score" and "--user-dir" not in given_names:
        added_arguments = ["--user-dir", str(USER_DIR)]
    sys.argv = [f"fairseq-{name}", *added_arguments, *rest]
    command.cli_main()


def _print_options() -> None:
    """Prints all --moe options. fairseq's own --help ends before it has read those of the architecture."""
    from pmoe.integrations.fairseq.options import PLACES, layer_options

    for option in (*PLACES, *layer_options()):
        print(f"{option.flag} ({option.default})")
        print(textwrap.fill(option.help, 100, initial_indent="    ", subsequent_indent="    "))


if __name__ == "__main__":
    # fairseq starts a process for each GPU. multiprocessing imports the main module there, but never a
    # __main__.py; the shim makes fairseq importable in these processes.
    __spec__ = importlib.util.find_spec("pmoe.integrations.fairseq.shim")
    main(sys.argv[1:])
