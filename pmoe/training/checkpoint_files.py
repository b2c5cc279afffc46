"""Files of a checkpoint, written so that a kill at any moment leaves a complete checkpoint.

    folder/latest.json               {"folder": "step_00000400", "step": 400}
    folder/step_00000400/
        .metadata  __0_0.distcp ...  tensors, as torch.distributed.checkpoint (DCP) writes them
        plain.pt                     written by rank 0: step, the caller's extra data, options of optimizers
        random_0.pt  random_1.pt ... written by each rank: the states of its random generators
        sums_0.json  sums_1.json ... written by each rank: a CRC-32 of each file that it wrote

A checkpoint is published in three steps. After a kill between any two of them, latest.json still names a
complete checkpoint:

1. All ranks write their files to step_N.tmp and wait until the disk has them.
2. The folder is renamed to step_N.
3. latest.json, which names the folder, is replaced in one rename.

A folder that latest.json has named is never written to again.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath
from typing import IO, Any, TypeVar

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from pmoe.measure.store import load_json, save_json

T = TypeVar("T")
POINTER, PLAIN, LIST = "latest.json", "plain.pt", ".metadata"
FORMAT = 1

RECORDS = frozenset(
    {("torch", "Size"), ("torch.serialization", "_get_layout")}
    | {(FileSystemReader.__module__, "_StorageInfo"), (Metadata.__module__, "_MEM_FORMAT_ENCODING")}
    | {(Metadata.__module__, name) for name in metadata.__all__}
)
"""The classes that the pickled list of a checkpoint's tensors may contain, as pairs (module, name).

`PATHS` has further classes. All others are refused, because unpickling them could run any program.
"""
PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
"""PosixPath as a pair (module, name): Python 3.13 pickles the second pair, other versions the first."""


OF_OTHERS = {
    PLAIN: ("one step of pmoe", "pass the folder above it"),
    "adapter_config.json": ("PEFT", "load it with pmoe.load_lora, and other modules' adapters with PEFT"),
    "latest_checkpointed_iteration.txt": ("Megatron", "load it with Megatron's load_checkpoint"),
    "latest": ("DeepSpeed", "load it with engine.load_checkpoint"),
    "trainer_state.json": ("transformers' Trainer", "load it with trainer.train(resume_from_checkpoint=...)"),
    "config.json": ("transformers", "load it with from_pretrained (docs/weights.md)"),
    LIST: ("torch.distributed.checkpoint", "load it with torch.distributed.checkpoint.load"),
}
"""Files that show which program's checkpoint a folder has: {file: (program, how to load the checkpoint)}.

The files are looked for in this order. The order matters, because the folder of one step of pmoe also has the
last file, the list of torch.distributed.checkpoint.
"""


class CheckpointError(ValueError):
    """A checkpoint could not be saved, does not exist, is damaged or does not fit. Raised on every rank."""


# ---- writing


def new_folder(folder: Path, step: int) -> Path:
    """Makes and returns the temporary folder, step_N.tmp, to which a checkpoint is written.

    Removes the unfinished folders that a killed run left in ``folder``. If the same step was saved before,
    the new folder's name gets a number: step_00000400-2.tmp.

    folder: folder of all checkpoints of the run.
    step: N, number of the training step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in (*folder.glob("step_*.tmp"), *folder.glob(f".{POINTER}.*.tmp")):
        is_folder = leftover.is_dir() and not leftover.is_symlink()
        shutil.rmtree(leftover, ignore_errors=True) if is_folder else leftover.unlink()
    name = f"step_{step:08d}"
    number = 1
    while (folder / name).exists():
        number += 1
        name = f"step_{step:08d}-{number}"
    part = folder / f"{name}.tmp"
    part.mkdir()
    return part


def check_plain(plain: Mapping[str, Any]) -> None:
    """Raises ValueError if ``plain`` cannot be written, or if torch.load would refuse to read it back.

    torch.load reads only plain data and tensors here, so that no code from a file runs.

    plain: everything of a checkpoint that is not a model's or optimizer's tensor.
    """
    memory = io.BytesIO()
    try:
        torch.save(plain, memory)
        memory.seek(0)
        torch.load(memory, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            "extra, extra states of modules and options of optimizers must be plain data and tensors: "
            f"{reason}"
        ) from None


def write_beside(part: Path, rank: int, plain: Mapping[str, Any]) -> None:
    """Writes this rank's files that torch.distributed.checkpoint does not write.

    They are a file of random states and a file of checksums. Rank 0 also writes a file of all data that are
    not tensors.

    part: the temporary folder of the checkpoint.
    rank: this rank.
    plain: everything of the checkpoint that is not a model's or optimizer's tensor.
    """
    generators: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    path = part / f"random_{rank}.pt"
    _write_to_disk(generators, path)
    own = [*part.glob(f"__{rank}_*"), path]
    if rank == 0:
        _write_to_disk(plain, part / PLAIN)
        own += [part / PLAIN, part / LIST]
    save_json(part / f"sums_{rank}.json", {path.name: _sum(path) for path in own})


def publish(part: Path, step: int, keep: int) -> Path:
    """Renames a finished temporary folder to its final name and makes it the latest checkpoint.

    Removes all but the newest ``keep`` checkpoints. Returns the folder's path.

    part: the temporary folder, step_N.tmp.
    step: number of the training step, for latest.json.
    """
    folder = part.parent
    path = part.with_suffix("")
    _sync_folder(part)
    os.replace(part, path)
    _sync_folder(folder)
    save_json(folder / POINTER, {"folder": path.name, "step": step})
    _sync_folder(folder)
    by_age = sorted(
        _complete(folder), key=lambda candidate: (candidate == path, (candidate / PLAIN).stat().st_mtime_ns)
    )
    for old in by_age[:-keep]:
        renamed = old.with_name(f"{old.name}.tmp")
        os.replace(old, renamed)  # renamed first: a removal that a kill interrupts leaves no folder step_N
        shutil.rmtree(renamed, ignore_errors=True)
    return path


# ---- reading


def find(folder: Path, step: int | None) -> str:
    """Returns the folder name of the checkpoint of a training step, or of the latest checkpoint.

    folder: folder of all checkpoints of the run.
    step: number of a training step; None takes the latest checkpoint.

    Raises CheckpointError if there is no checkpoint of this step, or no checkpoint at all.
    """
    if folder.is_file():
        raise CheckpointError(
            f"folder ({folder}) must be a folder that pmoe.save_checkpoint has written, and is a file. "
            "torch.save and Lightning write files: load it with torch.load and load_state_dict"
        )
    if step is None:
        return _last(folder / POINTER)
    pattern = re.compile(rf"step_{step:08d}(-(\d+))?")
    numbered = {
        int(match[2] or 1): path.name for path in _complete(folder) if (match := pattern.fullmatch(path.name))
    }
    if not numbered:
        known = sorted(path.name for path in _complete(folder))
        owner = "" if known else _owner(folder)
        raise CheckpointError(f"step ({step}) must be one of those in {folder} ({known}){owner}")
    return numbered[max(numbered)]


def read(path: Path, rank: int, num_ranks: int) -> tuple[dict[str, Any], Metadata, dict[str, Any] | None]:
    """Reads everything of a checkpoint except its tensors, and checks that all files are complete.

    Returns (data in plain.pt, DCP's list of tensors, states of this rank's random generators). DCP is
    torch.distributed.checkpoint. The states are None if another number of ranks saved the checkpoint.

    The checksums of all files are compared here, because torch compares none. Each file sums_*.json lists
    some files with their checksums. The ranks share the work: in the list of all sums_*.json, sorted by name,
    rank r takes the entries r, r + num_ranks, r + 2 * num_ranks, and so on. It checks the files that these
    sums_*.json list.

    path: folder of the checkpoint.
    rank: this rank.
    num_ranks: number of ranks that load the checkpoint.

    Raises OSError or ValueError if a file is missing, damaged or too short.
    """
    sums = sorted(path.glob("sums_*.json"))
    for file in sums[rank::num_ranks]:
        for name, expected in load_json(file, dict, "it holds the sums of files").items():
            if _sum(path / Path(name).name) != expected:
                raise ValueError(f"{path / name} is damaged: its checksum is not the one in {file.name}")
    plain = _read_plain(path / PLAIN)
    if (version := plain.get("format", FORMAT)) != FORMAT:
        raise ValueError(
            f"{path / PLAIN}: format ({version!r}) must be {FORMAT}: load it with the pmoe that saved it"
        )
    if len(sums) != plain.get("ranks"):
        raise ValueError(f"{path} must have a sums_*.json of each rank, {plain.get('ranks')} in all")
    generators = _read_plain(path / f"random_{rank}.pt") if plain["ranks"] == num_ranks else None
    return plain, _read_metadata(path), generators


def set_random(generators: Mapping[str, Any]) -> None:
    """Sets the random generators of torch, Python and the current CUDA device to saved states.

    generators: the content of random_N.pt: a state for "torch", "python" and, if the run had a GPU, "cuda".
    """
    torch.set_rng_state(generators["torch"])
    random.setstate(generators["python"])
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])


def _last(pointer: Path) -> str:
    """Returns the name of the folder that latest.json names.

    Raises CheckpointError if the file is missing or damaged, or if there is no folder of this name.

    pointer: path of latest.json.
    """
    try:
        name = load_json(pointer, lambda content: content["folder"])
    except FileNotFoundError:
        raise CheckpointError(f"there is no {pointer}{_owner(pointer.parent)}") from None
    except (ValueError, KeyError):
        name = None
    if not isinstance(name, str) or Path(name).name != name or not (pointer.parent / name).is_dir():
        raise CheckpointError(
            f"{pointer} is damaged: it must name a folder beside it ({name!r}): load another with step="
        )
    return name


def _owner(folder: Path) -> str:
    """Returns the end of an error message: which program's checkpoint a folder has, and how to load it.

    The result is "" if the folder has none of the files in `OF_OTHERS`.
    """
    for name, (owner, cure) in OF_OTHERS.items():
        if (folder / name).exists():
            return f". The folder has {name}, as checkpoints of {owner} do: {cure}"
    return ""


def _complete(folder: Path) -> list[Path]:
    """Returns the folders of published checkpoints: those without ".tmp" in their name and with plain.pt.

    folder: folder of all checkpoints of the run.
    """
    return [path for path in folder.glob("step_*") if path.suffix != ".tmp" and (path / PLAIN).exists()]


def _member(of_class: object, name: str) -> Any:
    """Returns a member of an enum. Python 3.11.0 to 3.11.3 pickle a member as a call of ``getattr``.

    of_class: the enum, from `RECORDS`.
    name: the member's name.

    Raises CheckpointError for anything else, because ``getattr`` could reach any function.
    """
    if isinstance(of_class, enum.EnumMeta) and name in of_class.__members__:
        return of_class[name]
    raise CheckpointError(f"it names {name} of {of_class!r}, which no checkpoint holds")


class _Records(pickle.Unpickler):
    """Unpickles only plain data and the records of torch.distributed.checkpoint.

    An arbitrary pickle could run any program.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PATHS:
            return PosixPath
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in RECORDS or module == "torch" and isinstance(getattr(torch, name), torch.dtype):
            return super().find_class(module, name)
        raise CheckpointError(f"it names {module}.{name}, which no checkpoint holds")


def _read_metadata(path: Path) -> Metadata:
    """Reads the list of a checkpoint's tensors from the file .metadata of torch.distributed.checkpoint.

    Raises ValueError if a file that the list names is shorter than the tensors in it.

    path: folder of the checkpoint.
    """
    tensor_list, ends = _opened(path / LIST, _listed)
    for name, end in ends.items():
        if Path(name).name != name:
            raise ValueError(f"{path / LIST} is damaged: it names {name}, which is not in its folder")
        length = (path / name).stat().st_size
        if length < end:
            raise ValueError(f"{path / name} ({length} bytes) must have at least {end}")
    return tensor_list


def _listed(file: IO[bytes]) -> tuple[Metadata, dict[str, int]]:
    """Unpickles the list of a checkpoint's tensors that torch.distributed.checkpoint has written.

    Returns the list, and for each data file the byte at which its last tensor ends.

    file: the opened file .metadata.
    """
    tensor_list = _Records(file).load()
    ends = dict[str, int]()
    for place in tensor_list.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return tensor_list, ends


def _read_plain(path: Path) -> dict[str, Any]:
    return _opened(path, lambda file: dict(torch.load(file, map_location="cpu", weights_only=True)))


def _opened(path: Path, load: Callable[[IO[bytes]], T]) -> T:
    """Opens a file for reading and returns load(file).

    Raises OSError if the file cannot be opened. Any other error means that the file is damaged, and becomes a
    ValueError with the file's path.
    """
    try:
        with open(path, "rb") as file:
            return load(file)
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            raise
        reason = error if isinstance(error, CheckpointError) else "it cannot be read"
        raise ValueError(f"{path} is damaged: {reason}") from None


def _sum(path: Path) -> int:
    """Returns the CRC-32 of a file, which is read in blocks of 4 MiB."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum


# ---- the disk


def _write_to_disk(value: object, path: Path) -> None:
    """Writes ``value`` to a new file with `torch.save`, and waits until the file is on the disk.

    Without the wait, the file might be in the operating system's cache only, and be lost when the machine
    fails.
    """
    with open(path, "xb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Waits until the folder's entries, such as new files and renames, are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
