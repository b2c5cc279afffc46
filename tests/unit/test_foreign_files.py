"""Files from outside (`tests/foreign.py`): no code in them runs, and none of them is lost.

A fault in a file is either named, with what to do about it, or does no harm.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch

import pmoe
import pmoe.warn
from pmoe.integrations.logging import StatsWriter
from pmoe.training import checkpoint_files
from pmoe.training.checkpoint import CheckpointError
from tests.foreign import (
    HARMS,
    KINDS,
    MAYBE,
    NO_FOREIGN_FILE,
    RAN,
    SAME,
    TOLD,
    Bomb,
    Kind,
    load,
    made_checkpoint,
    nobody,
    of_torch,
    with_right_sums,
)
from tests.unit.test_checkpoint import make

ROOT = Path(__file__).resolve().parents[2]

OF_THE_SYSTEM = "No such file|Is a directory|Not a directory|Permission denied|Too many levels|there is no"
"""Messages of the operating system that say by themselves what to do."""

# ---- every kind with every harm


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Makes a folder that other users may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="pmoe-foreign-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


WHOLE: dict[str, tuple[Path, Path, object]] = {}
"""Files without faults, by kind: their folder, the path of the file, and what is read from it."""


def whole(name: str, folder: Path) -> tuple[Path, Path, object]:
    if name not in WHOLE:
        kind, made, copied = KINDS[name], folder / f"whole {len(WHOLE)}" / "in", folder / "first" / "in"
        made.mkdir(parents=True)
        path = kind.make(made).relative_to(made)
        shutil.copytree(made, copied)
        told, value = outcome(kind, copied / path)
        assert not told
        shutil.rmtree(folder / "first")
        WHOLE[name] = made, path, value
    return WHOLE[name]


def outcome(kind: Kind, path: Path) -> tuple[str, object]:
    """Reads a file. Returns (text of the error or the warning, what was read; None with an error)."""
    pmoe.warn.GIVEN.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value, told = kind.read(path), ""
        except (OSError, ValueError) as error:
            value, told = None, str(error)
    return told or "\n".join(str(each.message) for each in caught if "pmoe" in str(each.message)), value


Files = dict[str, str | bytes]


def files_in(folder: Path) -> Files:
    """Returns the bytes of all files in a folder, and the targets of links."""
    return {
        str(each.relative_to(folder)): os.readlink(each) if each.is_symlink() else each.read_bytes()
        for each in sorted(folder.rglob("*"))
        if each.is_symlink() or each.is_file()
    }


def applies(kind: Kind, harm: str) -> bool:
    if kind.is_folder:
        return HARMS[harm].to_folders
    if harm == "another version":
        return kind.other_version is not None
    if harm == "values of other types":
        return kind.is_json
    return harm != "a file" and (kind.has_numbers or harm != "a huge number")


CASES = [(kind, harm) for kind in KINDS for harm in HARMS if applies(KINDS[kind], harm)]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("name", "harm"), CASES)
def test_what_is_wrong_with_a_file_is_named_with_what_to_do(name: str, harm: str, folder: Path) -> None:
    kind, (made, path, expected) = KINDS[name], whole(name, folder)
    ways = HARMS[harm].ways(kind, made / path)
    assert ways
    for way in ways:
        copied = folder / "harmed" / "in"
        shutil.rmtree(copied.parent, ignore_errors=True)
        shutil.copytree(made, copied)
        for each in copied.rglob("*"):
            each.chmod(0o777)
        way(copied / path)
        before = files_in(copied)
        with nobody() if HARMS[harm].by_nobody else contextlib.nullcontext():
            told, value = outcome(kind, copied / path)
        if HARMS[harm].by_nobody:
            (copied / path).chmod(0o755)
        check_told(kind, harm, copied / path, told, value == expected)
        assert not (copied / path).with_name(RAN).exists()
        check_kept(before, files_in(copied), grows=kind.grows)


def check_told(kind: Kind, harm: str, path: Path, told: str, is_same: bool) -> None:
    ends = TOLD if kind.has_sum and HARMS[harm].ends == MAYBE else HARMS[harm].ends
    assert ends != SAME or is_same and not told, told
    assert told or ends != TOLD or (harm == "a dangling link" and kind.may_be_missing)
    if told:
        assert re.search(f"{re.escape(path.name)}|{kind.also_named}", told), told
        assert re.search(f"{kind.remedy}|{OF_THE_SYSTEM}", told), told


def check_kept(before: Files, after: Files, *, grows: bool) -> None:
    """Checks that no file was lost: all are as before, or have whole lines added.

    grows: whether lines may have been added.
    """
    if not grows:
        assert after == before
    for name, held in before.items():
        if isinstance(held, bytes) and name.endswith(".csv"):
            assert after[name].startswith(held[: held.rfind(b"\n") + 1])  # type: ignore[arg-type]


# ---- programs that somebody hid on purpose


@pytest.mark.parametrize("name", ["plain.pt", "random_0.pt", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("way", ["pickle", "torch"])
def test_a_program_is_not_run_where_its_sum_is_right(name: str, way: str, tmp_path: Path) -> None:
    path, bomb = made_checkpoint(tmp_path), Bomb(tmp_path / RAN)
    file = path / name
    program = pickle.dumps(bomb) if way == "pickle" else of_torch(bomb)
    file.write_bytes(program.ljust(file.stat().st_size, b"\0"))  # not cut short
    with_right_sums(file)
    with pytest.raises(CheckpointError, match=name if name != "__0_0.distcp" else "Unpickling|weights"):
        pmoe.load_checkpoint(path.parent, *make())
    assert not (tmp_path / RAN).exists()


def test_a_program_in_a_list_of_tensors_is_not_run_though_dcp_would(tmp_path: Path) -> None:
    path = made_checkpoint(tmp_path)
    file = path / ".metadata"
    listed = pickle.loads(file.read_bytes())
    listed.planner_data = Bomb(tmp_path / RAN)
    file.write_bytes(pickle.dumps(listed))
    with_right_sums(file)
    with pytest.raises(CheckpointError, match=r"it names posix.mkdir, which no checkpoint holds"):
        pmoe.load_checkpoint(path.parent, *make())
    assert not (tmp_path / RAN).exists()
    with open(file, "rb") as whole:
        pickle.load(whole)
    assert (tmp_path / RAN).exists()  # the program works


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_checkpoint_of_python_3_13_is_read_by_every_python(module: str, tmp_path: Path) -> None:
    path = made_checkpoint(tmp_path)
    file = path / ".metadata"
    listed = pickle.loads(file.read_bytes())
    text = pickle.dumps(listed, protocol=2).replace(
        f"c{PosixPath.__module__}\n".encode(), f"c{module}\n".encode()
    )
    assert module.encode() in text
    file.write_bytes(text)
    with_right_sums(file)
    assert pmoe.load_checkpoint(path.parent, *make()).step == 2


def test_a_list_that_is_changed_after_it_was_read_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = made_checkpoint(tmp_path), checkpoint_files.read

    def then_changed(*args: Any) -> Any:
        found = read(*args)
        (path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / RAN)))
        return found

    monkeypatch.setattr(checkpoint_files, "read", then_changed)
    assert load(path / "plain.pt") == (2, {"epoch": 1})
    assert not (tmp_path / RAN).exists()


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "a/../.."])
def test_a_pointer_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    path = made_checkpoint(tmp_path)
    (path.parent / "latest.json").write_text(json.dumps({"folder": name, "step": 2}))
    with pytest.raises(CheckpointError, match="latest.json is damaged: it must name a folder beside it"):
        load(path / "plain.pt")
    assert pmoe.load_checkpoint(path.parent, *make(), step=2).step == 2  # as the message advises


def test_a_checkpoint_without_a_rank_s_sums_is_refused(tmp_path: Path) -> None:
    path = made_checkpoint(tmp_path)
    (path / "sums_0.json").unlink()
    with pytest.raises(CheckpointError, match=r"must have a sums_\*.json of each rank, 1 in all"):
        load(path / "plain.pt")


def test_a_save_writes_through_no_link(tmp_path: Path) -> None:
    """The name that the next save will use is a link to somebody else's file."""
    path, precious = made_checkpoint(tmp_path), tmp_path / "precious"
    precious.write_text("of somebody else")
    (path.parent / ".latest.json.0.tmp").symlink_to(precious)
    (path.parent / "step_00000003.tmp").symlink_to(tmp_path)
    pmoe.save_checkpoint(path.parent, *make(), step=3)
    assert precious.read_text() == "of somebody else"
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "latest.json",
        "step_00000002",
        "step_00000003",
    ]


def test_a_log_is_not_begun_over_another_file(tmp_path: Path) -> None:
    """A file that is no log may look like a log with an unfinished line, if it has no end of line."""
    for name in ("scalars.csv", "layers.csv"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes(b"of somebody else")
        with pytest.raises(ValueError, match=f"{name} must begin with the columns step,"):
            StatsWriter(folder, torch.nn.Linear(1, 1))
        assert (folder / name).read_bytes() == b"of somebody else"


# ---- no reader is forgotten


MODULES = {"json", "pickle", "torch", "csv", "marshal", "shelve", "tomllib", "yaml", "numpy", "np", "jit"}
"""Modules of which the functions load, loads and reader read files."""


def opens(node: ast.AST) -> bool:
    """Returns whether a node of the code calls, or names, a function that opens a file."""
    match node:
        case ast.Call(func=ast.Name(id="open" | "FileSystemReader")) | ast.Name(id="load_json"):
            return True
        case ast.Call(func=ast.Attribute(value=of, attr="open")):
            own = ("saved_slots", "self", "tasks")  # objects with an open() that opens no file
            return not isinstance(of, ast.Attribute) and ast.unparse(of) not in own
        case ast.Attribute(value=ast.Name(id=module), attr="load" | "loads" | "reader"):
            return module in MODULES
        case ast.Attribute(attr="read_text" | "read_bytes" | "fdopen" | "Unpickler"):
            return True
    return False


def openers(node: ast.AST, within: str) -> Iterator[str]:
    """Yields the names of functions and classes that open a file, such as "Class.function"."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield from openers(child, f"{within}.{child.name}".lstrip("."))
        else:
            if opens(child):
                yield within
            yield from openers(child, within)


def test_each_function_that_opens_a_file_is_of_a_kind_in_the_table() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{name}"
        for path in sorted((ROOT / "pmoe").rglob("*.py"))
        for name in openers(ast.parse(path.read_text()), "")
    }
    listed = {each for kind in KINDS.values() for each in kind.opened_by}
    assert found == listed | set(NO_FOREIGN_FILE)
