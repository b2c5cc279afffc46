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
"""Commands of fairseq that `main` can run; each is a module of fairseq_cli. score takes no --user-dir."""

INSTALL = (
    'pip install "numpy<2" hydra-core==1.3.2 omegaconf==2.3.0 bitarray cffi cython regex sacrebleu tqdm && '
    "pip install --no-deps fairseq==0.12.2"
)
"""The shell commands that install fairseq, as error messages show them."""


def main(arguments: list[str]) -> None:
    """Runs one command: "options", "user-dir", "--help", or a command of fairseq with pmoe's plugin.

    arguments: the arguments of the command line, without the program name.

    Exits with a message if there is no such command.
    """
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
    """Runs a command of fairseq with pmoe's plugin.

    name: the command, one of `COMMANDS`.
    rest: its arguments. Unless they set --user-dir (for hydra-train: common.user_dir), the plugin's folder is
        added.

    Exits with the commands of `INSTALL` in a message if fairseq cannot be imported.
    """
    try:
        importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        sys.exit(f"fairseq cannot be imported ({error}): {INSTALL}")
    command = importlib.import_module(f"fairseq_cli.{name.replace('-', '_')}")
    given_names = {argument.partition("=")[0] for argument in rest}
    added_arguments: list[str] = []
    if name == "hydra-train":
        # hydra needs the models to compose its configuration, which happens before it reads
        # common.user_dir. So the plugin is imported first.
        import pmoe.integrations.fairseq.plugin  # noqa: F401 - it registers the models

        added_arguments = [] if "common.user_dir" in given_names else [f"common.user_dir={USER_DIR}"]
    elif name != "score" and "--user-dir" not in given_names:
        added_arguments = ["--user-dir", str(USER_DIR)]
    sys.argv = [f"fairseq-{name}", *added_arguments, *rest]
    command.cli_main()


def leave_groups() -> None:
    """Destroys all process groups, which fairseq's commands leave open. Does nothing if there are none.

    If groups stayed open, gloo's threads could free tensors while Python ends. The process would then abort
    (SIGABRT), although its training is complete (pytorch/pytorch#179291).
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _print_options() -> None:
    """Prints every --moe option with its default and its description.

    fairseq's own --help cannot print them, because it ends before fairseq has read the options of the chosen
    architecture.
    """
    from pmoe.integrations.fairseq.options import PLACES, layer_options

    for option in (*PLACES, *layer_options()):
        print(f"{option.flag} ({option.default})")
        print(textwrap.fill(option.help, 100, initial_indent="    ", subsequent_indent="    "))


if __name__ == "__main__":
    # fairseq starts a process for each GPU. multiprocessing imports the main module in each of them, but
    # not if the module is a __main__.py. With the shim as main module, these processes can import fairseq.
    __spec__ = importlib.util.find_spec("pmoe.integrations.fairseq.shim")
    main(sys.argv[1:])
    leave_groups()
