"""The environment that these tests run fairseq in, and the commands and texts they run it on.

fairseq wants numpy below 2, so it has an environment of its own (environment.sh, ``make .venv-fairseq``).
pytest itself runs in pmoe's; every fairseq is a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-fairseq"
PYTHON = FOLDER / "bin" / "python"

MODULES = ("argparse.py", "typing.py", "ast.py", "inspect.py")
"""Of Python's standard library, the text that is trained on; HELD_OUT's is not."""
HELD_OUT = ("textwrap.py", "bisect.py")


class FailedError(AssertionError):
    """A command that ended with another status than 0. output: all it printed."""

    def __init__(self, command: list[str], output: str) -> None:
        super().__init__(f"{' '.join(command)}\n{output[-6000:]}")
        self.output = output


def check_environment() -> None:
    """AssertionError, never a skip, where `FOLDER` is not there or is not what environment.sh now makes."""
    made, wanted = FOLDER / "requirements.txt", Path(__file__).parent / "requirements.txt"
    fresh = made.exists() and made.read_text() == wanted.read_text()
    assert fresh, f"{FOLDER} is missing or out of date: make .venv-fairseq"


def run(
    *arguments: object, ranks: int = 1, program: tuple[str, ...] = (), timeout: float = 400, **variables: str
) -> str:
    """Returns what ``python -m pmoe.integrations.fairseq`` printed, on both streams.

    program: arguments of python to use in place of ``-m pmoe.integrations.fairseq``.
    ranks: number of ranks. Several run under torchrun, on the CPU.

    Raises AssertionError, with what was printed, if the command failed.
    """
    check_environment()
    program = program or ("-m", "pmoe.integrations.fairseq")
    launcher: list[str] = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launcher += [f"--nproc-per-node={ranks}"]
    elif program[0] == "-m":
        program, launcher = program[1:], ["-m"]
    command = [str(PYTHON), "-W", "ignore", *launcher, *program, *map(str, arguments)]
    paths = [variables.pop("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        command,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise FailedError(command, done.stdout)
    return done.stdout


def tokens_of(names: tuple[str, ...]) -> list[str]:
    """Lines of the standard library's modules, their tokens apart."""
    library = Path(sysconfig.get_path("stdlib"))
    lines = []
    for name in names:
        for line in (library / name).read_text(encoding="utf-8").splitlines():
            if tokens := re.findall(r"\w+|[^\w\s]", line):
                lines.append(" ".join(tokens))
    return lines


@dataclass(frozen=True)
class Ended:
    """What a command printed, and the message of the ValueError that refused it."""

    output: str
    refusal: str


def run_together(commands: Mapping[str, Sequence[object]], folder: Path, ranks: int) -> dict[str, Ended]:
    """Commands by name, one after another in one process a rank: starting fairseq takes longer than most."""
    listed = folder / f"commands{ranks}.json"
    listed.write_text(
        json.dumps([list(map(str, command)) for command in commands.values()]), encoding="utf-8"
    )
    try:
        printed = run(listed, ranks=ranks, program=("-m", "tests.fairseq.commands"), timeout=850)
    except FailedError as error:
        others = [path.read_text()[-3000:] for path in sorted(folder.glob(f"{listed.name}.rank*"))]
        raise AssertionError("\n".join([str(error), *others])) from None
    found = re.findall(r"^COMMAND\n(.*?)^ENDED (.*?)$", printed, re.MULTILINE | re.DOTALL)
    assert len(found) == len(commands), printed[-6000:]
    return {
        name: Ended(output, json.loads(refusal))
        for name, (output, refusal) in zip(commands, found, strict=True)
    }


def run_apart(command: Sequence[object], folder: Path, ranks: int) -> tuple[list[str], float]:
    """Runs a command with a process for each rank, which no launcher ends if another one dies.

    Returns what each rank printed, and the seconds between the end of the first and of the last process.
    """
    check_environment()
    listed = folder / "apart.json"
    listed.write_text(json.dumps([list(map(str, command))]), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    address |= {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    outputs = [folder / f"{listed.name}.rank{rank}" for rank in range(ranks)]
    started = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            started.append(
                subprocess.Popen(
                    [str(PYTHON), "-W", "ignore", "-m", "tests.fairseq.commands", str(listed)],
                    env=os.environ | address | {"RANK": str(rank)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        deadline = time.monotonic() + 400
        while all(process.poll() is None for process in started):
            assert time.monotonic() < deadline, "no rank ended"
            time.sleep(0.1)
        first_end = time.monotonic()
        for process in started:
            process.wait(timeout=400)
        return [output.read_text() for output in outputs], time.monotonic() - first_end
    finally:
        for process in started:
            process.kill()


def write_text(folder: Path) -> tuple[object, ...]:
    """A language model's text, and the command that makes data of it in folder/data."""
    folder.mkdir()
    for split, names in (("train", MODULES), ("valid", HELD_OUT)):
        (folder / f"{split}.txt").write_text("\n".join(tokens_of(names)) + "\n", encoding="utf-8")
    prefixes = ("--trainpref", folder / "train.txt", "--validpref", folder / "valid.txt")
    return ("preprocess", "--only-source", *prefixes, "--destdir", folder / "data", "--nwordssrc", 600)


def write_pairs(folder: Path) -> tuple[object, ...]:
    """Text to translate, and the command that makes data of it in folder/data: lines, and the same lines
    backwards. Lengths differ, so batches are padded, and 430 lines are 9 batches of 48: on two ranks one is
    left over."""
    folder.mkdir()
    lines = [line for line in tokens_of(MODULES[:1]) if len(line.split()) <= 20]
    for split, part in (("train", lines[:430]), ("valid", lines[-37:])):
        backwards = [" ".join(reversed(line.split())) for line in part]
        (folder / f"{split}.a").write_text("\n".join(part) + "\n", encoding="utf-8")
        (folder / f"{split}.b").write_text("\n".join(backwards) + "\n", encoding="utf-8")
    prefixes = ("--trainpref", folder / "train", "--validpref", folder / "valid")
    languages = ("-s", "a", "-t", "b", "--joined-dictionary", "--nwordssrc", 400)
    return ("preprocess", *languages, *prefixes, "--destdir", folder / "data")


COMMON = (
    *("--cpu", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--num-workers", 0),
    *("--moe-num-experts", 4, "--moe-top-k", 2, "--moe-pipeline", 2, "--dropout", 0),
    *("--log-interval", 1, "--log-format", "json", "--no-epoch-checkpoints"),
)

LANGUAGE_MODEL = (
    *("--task", "language_modeling", "--arch", "transformer_lm_pmoe", "--criterion", "cross_entropy_pmoe"),
    *(
        "--decoder-layers",
        2,
        "--decoder-embed-dim",
        32,
        "--decoder-input-dim",
        32,
        "--decoder-output-dim",
        32,
    ),
    *("--decoder-ffn-embed-dim", 64, "--decoder-attention-heads", 2),
    *("--tokens-per-sample", 32, "--batch-size", 8, *COMMON),
)

TRANSLATION = (
    *("--task", "translation", "--arch", "transformer_pmoe", "--share-all-embeddings"),
    *("--criterion", "label_smoothed_cross_entropy_pmoe", "--label-smoothing", 0.1),
    *("--encoder-layers", 2, "--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64),
    *("--decoder-layers", 2, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64),
    *("--encoder-attention-heads", 2, "--decoder-attention-heads", 2, "--batch-size", 48, *COMMON),
)

AUTOMATIC = ("--moe-pipeline", "true", "--moe-memory-reuse", "true")
PLAIN_STEPS = ("--moe-pipeline", 1, "--moe-memory-reuse", "false")

BY_TOKENS = (
    *LANGUAGE_MODEL[: LANGUAGE_MODEL.index("--tokens-per-sample")],
    *("--sample-break-mode", "eos", "--tokens-per-sample", 64, "--max-tokens", 4096, *COMMON),
)
"""A language model of single lines in batches of up to 4,096 tokens, each of another size.

More than 1,024 tokens are enough for trials."""

ADAM = ("--optimizer", "adam", "--lr", 0.01, "--clip-norm", 1.0, "--moe-capacity-factor", 1.25)
SGD = ("--optimizer", "sgd", "--momentum", 0.9, "--lr", 0.05, "--clip-norm", 0.5, "--moe-aux-weight", 0.1)
QUIET = ("--disable-validation",)

# Every option of the layer is given at its default by one of the two trainings that are compared.
TRANSLATION_SGD = (
    *("--optimizer", "sgd", "--lr", 0.1, "--clip-norm", 0.5, "--moe-aux-weight", 0.1, "--max-epoch", 1),
    *("--batch-size-valid", 8, "--required-batch-size-multiple", 1),
)


def logged(output: str, key: str, kind: str = "train_inner") -> list[float]:
    """Returns the values of ``key`` in the lines of a kind in the log of a training.

    kind: "train_inner" or "valid".
    """
    lines = re.findall(rf"\| {kind} \| (?:epoch \d+ \| )?(\{{.*\}})", output)
    found = [re.search(rf'"{key}": "?([-\w.]+)', line) for line in lines]
    return [float(each[1]) for each in found if each]


def load(path: Path) -> dict[str, Any]:
    import argparse

    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
