"""Text of train_lm.py: the bytes to train on, the bytes held out, and the windows that each step sees.

Letters: B sequences of a batch (of all ranks together), C bytes of context.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_SHARE = 0.05
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


class DataError(ValueError):
    """The text that the user named is missing, empty or too short."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training text and held-out text.

    train, valid: (number of bytes,) uint8 each.
    description: the same in words, for the log.
    """

    train: Tensor
    valid: Tensor
    description: str
    fingerprint: str
    """Hash of both texts. A run may only be resumed with the text with which it began."""


def load_corpus(paths: Sequence[Path] | None, context: int) -> Corpus:
    """Reads the named files and folders, or the sources of Python's standard library if ``paths`` is None.

    About 5 % of the bytes are held out. Whole files are held out, in the order of a hash of their names,
    until the share is reached. If there is only one file, its end is held out.

    context: number C of bytes that both texts must exceed.

    Raises DataError if a text is missing, empty or too short.
    """
    files = python_library() if paths is None else named_files(paths)
    texts = {name: path.read_bytes() for name, path in sorted(files.items())}
    texts = {name: text for name, text in texts.items() if text}
    if not texts:
        raise DataError(f"no text: all {len(files)} files are empty")
    if len(texts) == 1:
        train, valid = split_by_position(next(iter(texts.values())))
        how = "one file, its end held out"
    else:
        held_out = choose_held_out({name: len(text) for name, text in texts.items()})
        train = b"".join(text for name, text in texts.items() if name not in held_out)
        valid = b"".join(text for name, text in texts.items() if name in held_out)
        how = f"{len(texts)} files, {len(held_out)} of them held out"
    for name, text in (("training", train), ("held-out", valid)):
        if len(text) <= context:
            raise DataError(f"the {name} text has {len(text)} bytes; it needs more than context ({context})")
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        valid=torch.frombuffer(bytearray(valid), dtype=torch.uint8),
        description=f"{how}: {len(train) / 1e6:.1f} MB to train on, {len(valid) / 1e6:.2f} MB held out",
        fingerprint=hashlib.sha256(train + valid).hexdigest(),
    )


def python_library() -> dict[str, Path]:
    """Returns the sources of the running Python's standard library, tests included, by relative path."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.py")}
    files = {name: path for name, path in files.items() if not NOT_THE_LIBRARY & set(Path(name).parts)}
    if not files:
        raise DataError(f"no *.py files in {folder}: name a text with --data")
    return files


def named_files(paths: Sequence[Path]) -> dict[str, Path]:
    """Returns the named files, and all files in the named folders, by name.

    The names do not depend on the machine.
    """
    files: dict[str, Path] = {}
    for path in paths:
        if path.is_dir():
            new_files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
        elif path.is_file():
            new_files = {path.name: path}
        else:
            raise DataError(f"--data {path}: no such file or folder")
        for name, file in new_files.items():
            if name in files:
                name = str(file)  # two folders may hold files of the same name
            files[name] = file
    if not files:
        raise DataError(f"--data {' '.join(map(str, paths))}: no files there")
    return files


def choose_held_out(sizes: dict[str, int]) -> set[str]:
    """Returns the names of the files to hold out: at least one, never all.

    Files are taken in the order of a hash of their names, not of the names. So neighbours (a module and its
    test) may go to different texts, and adding a file moves few others.
    """
    by_hash = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    wanted = HELD_OUT_SHARE * sum(sizes.values())
    held_out: set[str] = set()
    for name in by_hash[:-1]:
        if sum(sizes[chosen] for chosen in held_out) >= wanted:
            break
        held_out.add(name)
    return held_out


def split_by_position(text: bytes) -> tuple[bytes, bytes]:
    """Returns (the beginning, the last 5 %) of a text: to train on, and to hold out."""
    split_at = len(text) - max(1, round(len(text) * HELD_OUT_SHARE))
    return text[:split_at], text[split_at:]


def training_offsets(length: int, context: int, batch: int, *, seed: int, step: int) -> Tensor:
    """Returns the offsets (B,) of a step's windows. They depend on seed and step alone.

    So every rank can draw the offsets of the whole batch and take its slice. Any number of ranks sees the
    same windows, and a resumed run needs no saved state.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)  # seeds have 32 bits
    return torch.randint(length - context, (batch,), generator=generator)


def validation_offsets(length: int, context: int, batch: int, num_bytes: int) -> Tensor:
    """Returns the offsets of about num_bytes / C evenly spaced windows. Their number is a multiple of B.

    They are the same at every evaluation.
    """
    batches = max(1, num_bytes // (batch * context))
    return torch.linspace(0, length - context - 1, batches * batch, dtype=torch.float64).long()


def windows(text: Tensor, offsets: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, both (len(offsets), C) int64.

    A target is the byte that follows its input.
    """
    positions = offsets[:, None] + torch.arange(context + 1)
    window = text[positions].long()
    return window[:, :-1], window[:, 1:]
