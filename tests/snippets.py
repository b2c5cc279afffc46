"""What the documentation shows: its code blocks and the commands it names, with the lines they stand on."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]

FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PROGRAMS = ("pmoe", "python", "torchrun", "make", "sudo")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. output: the ```text block right behind a ```python block, None where there is none."""

    page: Path
    line: int
    language: str
    text: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def num_ranks(self) -> int:
        """1 without a process group, 2 with one, or as many as a comment says: "# 4 processes"."""
        said = re.search(r"# (\d+) processes", self.text)
        return int(said[1]) if said else 1 + ("init_process_group" in self.text)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    made = []
    for i, fence in enumerate(found):
        behind = found[i + 1] if i + 1 < len(found) else None
        follows = behind is not None and not text[fence.end() : behind.start()].strip()
        shown = behind[2] if behind and follows and (fence[1], behind[1]) == ("python", "text") else None
        line = text.count("\n", 0, fence.start()) + 2
        made.append(Block(page=page, line=line, language=fence[1], text=fence[2], output=shown))
    return made


def python_blocks() -> list[Block]:
    return [block for page in GUIDES for block in blocks(page) if block.language == "python"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """whole: a line of a ```sh block, which must run as it stands; inline code may leave arguments out."""

    page: Path
    line: int
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {shlex.join(self.words)}"


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        if block.language == "sh":
            line = block.line
            for command in re.split(r"(?<!\\)\n", block.text):  # a line that ends in a backslash goes on
                words = shlex.split(command.replace("\\\n", " "), comments=True)
                if words:
                    yield Command(page=page, line=line, words=tuple(words), whole=True)
                line += 1 + command.count("\n")
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    for code in INLINE.finditer(prose):
        words = shlex.split(code[1]) if code[1].startswith(tuple(f"{each} " for each in PROGRAMS)) else []
        if words:
            line = prose.count("\n", 0, code.start()) + 1
            yield Command(page=page, line=line, words=tuple(words), whole=False)


def run_snippet(name: str, code: str) -> str:
    """Runs a block as a file of its own would run, and returns what it printed.

    The process group exists already.
    """
    code = code.replace('device="cuda"', 'device="meta"')  # a layer that is built but not run, without a GPU
    printed = io.StringIO()
    with (
        torch.random.fork_rng(devices=[]),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        # Not with the future imports of this file, which change what annotations are.
        exec(compile(code, name, "exec", dont_inherit=True), {"__name__": "snippet"})
    return printed.getvalue()
