"""The documentation says what the code does, and the site builds completely.

Snippets run, and the commands, messages, variables and numbers of the pages exist in the code.
"""

from __future__ import annotations

import argparse
import ast
import functools
import html
import importlib.util
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import pmoe
from docs import pictures, tables
from pmoe import cli
from pmoe.measure.profile import save_profile
from pmoe.papers import (
    comet_figures,
    comet_layers,
    flashdmoe_figures,
    fsmoe_models,
    lancet_figures,
    mpipemoe_figures,
)
from pmoe.papers.fsmoe_table5 import ASSUMPTIONS
from pmoe.runners.features import SUPPORTED, Feature
from pmoe.schedule.restore import STRATEGIES
from tests.browser import Page
from tests.kept import digest, kept
from tests.snippets import GUIDES, PAGES, ROOT, Block, Command, blocks, commands, python_blocks, run_snippet

DOCS = ROOT / "docs"
RESULTS = ROOT / "bench" / "results"
ALONE = [block for block in python_blocks() if block.num_ranks == 1]
COMMANDS = [command for page in GUIDES for command in commands(page)]
USERS_OWN = {"train.py"}
EXTENSIONS = ("pmoe._cuda", "pmoe._nvshmem")
"""The extension's module. Pages mention it, but a clone without a build has no such file."""


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# ---- snippets


@pytest.mark.parametrize("block", ALONE, ids=str)
def test_a_snippet_runs_as_it_stands(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_snippet(str(block), block.text)
    if options := sys.modules.get("pmoe.integrations.transformers"):
        options.configure()  # for the tests that follow
    if block.output is not None:
        assert printed == block.output


# ---- commands


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (each for each in cli.build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    choices: dict[str, argparse.ArgumentParser] = found.choices
    return choices


def check_pmoe(words: tuple[str, ...], whole: bool) -> None:
    if whole:
        cli.build_parser().parse_args(words)
        return
    name, *rest = words
    known = (
        subcommands()[name].format_help() if not name.startswith("-") else cli.build_parser().format_help()
    )
    for flag in (word for word in rest if word.startswith("--")):
        assert re.search(rf"{flag}\b", known), flag


def sources(script: Path) -> set[Path]:
    """Returns a script and all files that it imports, directly or through others.

    Files beside the script and in its package count.
    """
    found, new = set(), {script}
    while new:
        found |= new
        names = {name for path in new for name in imported_names(path)}
        new = {path for name in names for path in (script.parent / f"{name}.py",) if path.is_file()} - found
    return found


def imported_names(path: Path) -> Iterator[str]:
    """Yields the last part of each imported module's name, and the names that are imported from modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = node.module if isinstance(node, ast.ImportFrom) else None
            yield from (name.rpartition(".")[2] for name in [*names, *([module] if module else [])])


def flags_of(script: Path) -> set[str]:
    """Returns the options of a script's command line: those given to ``add_argument`` in the files of
    `sources`.
    """
    return {
        node.value
        for path in sources(script)
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        for node in call.args
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--")
    }


def check_script(words: tuple[str, ...]) -> None:
    script, *rest = words
    if script not in USERS_OWN:
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= flags_of(ROOT / script)


def test_a_flag_of_another_script_is_noticed() -> None:
    check_script(("examples/train_lm.py", "--dense"))
    with pytest.raises(AssertionError):
        check_script(("examples/train_lm.py", "--wrap", "ddp"))  # which is examples/data_parallel.py's


def check_make(words: tuple[str, ...]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_that_a_page_names_exists(command: Command) -> None:
    words = tuple(itertools.dropwhile(lambda word: word == "sudo" or "=" in word, command.words))
    program, *rest = words
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    if program == "pmoe":
        check_pmoe(tuple(rest), command.whole)
    elif ("-m", "pmoe") in zip(words, words[1:], strict=False):
        check_pmoe(words[words.index("pmoe") + 1 :], command.whole)
    elif any(word.startswith("pmoe.") for word in words):
        (module,) = (word for word in words if word.startswith("pmoe."))
        assert ROOT.joinpath(*module.split("."), "__main__.py").is_file()
    elif program == "make":
        check_make(tuple(rest))
    elif "pytest" in words:
        assert all((ROOT / words[i]).is_file() for i in scripts)
        assert scripts
    elif scripts:
        check_script(words[scripts[0] :])
    elif program == "pip":
        assert rest[0] == "install"
    elif program == "torchrun":
        assert words[-1] == "..."  # whatever is trained
    else:
        assert program == "python" and rest[0] == "-m" and importlib.util.find_spec(rest[1])


def test_the_commands_of_choosing_options_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path))
    save_profile(pictures.PROFILE, tmp_path / "profile.json")
    ran = []
    for command in commands(DOCS / "choosing.md"):
        if command.whole and command.words[:2] in (("pmoe", "memory"), ("pmoe", "plan")):
            assert cli.main(command.words[1:]) == 0
            ran.append(command.words[1])
    assert ran == ["memory", "plan"]
    assert "decision: n=" in capsys.readouterr().out


def test_a_file_that_a_page_names_exists() -> None:
    named = [
        (each.name, path)
        for each in GUIDES
        for path in re.findall(
            r"`((?:bench|cuda|docs|examples|pmoe|tests)/[\w./]+)`", each.read_text("utf-8")
        )
    ]
    assert len(named) > 10
    for name, path in named:
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_a_name_that_a_page_gives_exists() -> None:
    named = [
        (each.name, name)
        for each in GUIDES
        for name in re.findall(r"(?<!not built yet \()`(pmoe(?:\.\w+)+)", each.read_text(encoding="utf-8"))
    ]
    assert len(named) > 30
    # Where nobody has compiled an extension, there is nothing to import: setup.py says that it can be.
    for extension in EXTENSIONS:
        assert extension in (ROOT / "setup.py").read_text(encoding="utf-8")
    for page_name, name in named:
        if name in EXTENSIONS:
            continue
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise AssertionError(f"{page_name} names {name}") from error


def test_the_readme_tells_what_every_folder_holds() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 220
    tree = text.partition("\n## Where things are\n")[2]
    told = re.findall(r"^([a-z]\w*(?:/\w+)?)/  +\S", tree, re.MULTILINE)
    packages = {f"pmoe/{path.parent.name}" for path in (ROOT / "pmoe").glob("*/__init__.py")}
    assert len(packages) > 10
    assert sorted(told) == sorted(packages | {"bench", "cuda", "docs", "examples", "tests"})
    assert all((ROOT / path).is_dir() for path in told)


def test_every_subcommand_is_named_by_a_page() -> None:
    guides = "".join(each.read_text(encoding="utf-8") for each in GUIDES)
    for name in subcommands():
        assert f"pmoe {name}" in guides, name


# ---- the table of options


def test_the_table_of_options_is_that_of_the_features() -> None:
    assert SUPPORTED["pipeline"] == frozenset(Feature)
    heading, _, *body = (
        [cell.strip() for cell in row[1:-1].split("|")] for row in tables.options().split("\n")
    )
    assert heading[1:] == [component for component in SUPPORTED if SUPPORTED[component] != frozenset(Feature)]
    for feature, (words, *cells) in zip(Feature, body, strict=True):
        assert "{" not in words and words.split()[0] in feature.value
        assert cells == ["yes" if feature in SUPPORTED[component] else "no" for component in heading[1:]], (
            words
        )


def test_every_column_of_the_table_of_options_is_explained() -> None:
    told = re.findall(r"^\| ([\w' ]+) \|", page("choosing.md").partition("| column |")[2], re.MULTILINE)
    assert told == tables.REFUSERS


# ---- messages


@functools.cache
def trees() -> tuple[ast.Module, ...]:
    files = [*sorted((ROOT / "pmoe").rglob("*.py")), ROOT / "setup.py"]
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in files)


def strings(tree: ast.Module) -> Iterator[list[str]]:
    """Yields the literal parts of each string. A formatted string is split where values are inserted."""
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(value) for node in formatted for value in node.values}
    for node in formatted:
        parts = [""]
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts[-1] += value.value
            else:
                parts.append("")
        yield parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield re.split(r"\{\w+\}", node.value)  # of a template, too


@functools.cache
def patterns() -> tuple[tuple[str, str], ...]:
    """Returns a pattern for each string of the code that may be a message, as (its longest word, pattern).

    Each group of a pattern is a literal part of the message.
    """
    found = []
    for tree in trees():
        for parts in strings(tree):
            words = " ".join(parts).split()
            if sum(map(len, words)) >= 8:
                spaced = (r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts)
                found.append((max(words, key=len), ".+?".join(f"({part})" for part in spaced)))
    return tuple(found)


def messages() -> list[Block]:
    """Returns the blocks of docs/troubleshooting.md that quote messages. Output of snippets does not
    count.
    """
    return [block for block in blocks(DOCS / "troubleshooting.md") if block.language == "text"]


FORMATTED = {
    "MoELayer",
    "rank",
    "ranks",
    "of",
    "chunk",
    "in",
    "and",
    "torch",
    "model",
    "cpu",
    "True",
    "KeyError",
    "has",
}
"""Words of values that are formatted into the quoted messages. Other words of letters must be the code's."""
PREFIX = re.compile(r"\w*(Error|Warning): (?:pmoe: )?|pmoe(?: plan: error)?: ")
"""Words that Python, warnings or the command line write before a message."""


def words_of_nobody(message: str) -> set[str]:
    """Returns the words of a quoted message that no message of the code has.

    Words that stand for formatted values are left out (`FORMATTED`).
    """
    prefix = PREFIX.match(message)
    begin = prefix.end() if prefix else 0
    left = list(message)
    for word, pattern in patterns():
        if word in message and (found := re.search(pattern, message)):
            for group in range(1, 1 + found.re.groups):
                left[slice(*found.span(group))] = " " * len(found[group])
    words = {word.strip(",;:().<>") for word in "".join(left[begin:]).split()}
    return {word for word in words if word.isalpha() and word not in FORMATTED}


@pytest.mark.slow
def test_messages_of_the_troubleshooting_page_are_the_codes_own() -> None:
    found = messages()
    assert len(found) >= 15
    for block in found:
        assert words_of_nobody(" ".join(block.text.split())) == set(), block


@pytest.mark.slow
def test_a_message_that_the_code_does_not_tell_is_noticed() -> None:
    true = "memory_budget (9 bytes) must be at least 10 for these tokens, with any routing (n=1, S4)"
    assert words_of_nobody(true) == words_of_nobody(f"ValueError: {true}") == set()
    assert "than" in words_of_nobody(true.replace("at least", "more than"))
    assert words_of_nobody(f"{true}; it was refused") == {"it", "was", "refused"}


# ---- variables


def test_every_environment_variable_is_on_its_page() -> None:
    read = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read |= set(re.findall(r"^PMOE_[A-Z_]+$", node.value))
    assert "PMOE_CACHE" in read
    told = set(re.findall(r"^\| `(PMOE_[A-Z_]+)", page("commands.md"), re.MULTILINE))
    assert told == read


# ---- numbers


def stored(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_measured_numbers_of_the_papers_page_are_the_stored_ones() -> None:
    text = page("papers.md")
    by_batch = stored("choices_modelled.json")["batches"]["rows"]
    smallest, *larger = by_batch
    (best,) = {row["best n"] for row in larger}
    first, last = (larger[at]["tokens"] for at in (0, -1))
    assert f"n = {smallest['best n']} is best for a step of {smallest['tokens']:,} tokens" in text
    assert f"n = {best} at every batch size from {first:,} to {last:,}" in text

    breakdown = {
        row["tokens"]: row["ratios"]["model states"]
        for row in stored("memory_breakdown.json")["rows"]
        if row["model"] == "MoE-GPT3-S" and row["source"].startswith("Eq.")
    }
    assert f"from {breakdown[256]:.0%} at 256".replace("%", " %") in text
    assert f"to {breakdown[16384]:.0%} at 16k".replace("%", " %") in text

    shares: dict[str, list[float]] = {}
    for row in stored("memory_saving.json")["rows"]:
        shares.setdefault(row["pair"].split()[-1], []).append(row["share"])
    for pair in ("S1", "S4"):
        assert f"{pair}: {min(shares[pair]):.2f} to {max(shares[pair]):.2f}" in text, pair

    reuse = {row["variant"]: row for row in stored("reuse_modelled_auto.json")["rows"]}
    at_4 = {name.split()[-1]: row for name, row in reuse.items() if " n=4" in name}
    told = [f"{pair} {at_4[pair]['peak/plain']:.2f} in {at_4[pair]['step/plain']:.2f}" for pair in STRATEGIES]
    kept = reuse["keep/keep n=4"]
    kept_told = f"keep/keep {kept['peak/plain']:.2f} of the peak in {kept['step/plain']:.2f} of the time"
    assert ", ".join([kept_told, *told]) in text

    esp = stored("esp_modelled.json")["at_best_n"]
    ratios = (esp["forward"]["one_lane_over_two"], esp["step"]["one_lane_over_two"])
    assert "forward {:.2f} times as fast as with one lane, a step {:.2f} times".format(*ratios) in text

    ways = {row["way"]: row for row in stored("gradients_modelled.json")["rows"]}
    plain, cut = ways["plain"], ways["partitioned"]
    assert f"of a {plain['step ms'] / 1e3:.1f} s step, {plain['exposed ms']:,.0f} ms" in text
    assert f"{cut['exposed ms']:.0f} ms of the reducer's" in text

    routing = [100 * row["all / layer"] for row in stored("gates.json")["rows"]]
    assert f"{min(routing):.1f} to {max(routing):.1f} %" in text


def test_the_error_of_predicted_steps_is_the_stored_one() -> None:
    found = []
    for link in ("modelled", "real"):
        for rate in ("auto", "auto-step"):
            rows = stored(f"overlap_{link}_{rate}.json")["rows"]
            found += [row["predicted/step"] for row in rows if row["run"].startswith("n=")]
    error = sum(abs(1 - ratio) for ratio in found) / len(found)
    told = f"mean error of a step {100 * error:.1f} % over {len(found)} overlapped runs"
    assert f"{told}, {min(found):.2f} to {max(found):.2f}" in page("papers.md")


@pytest.mark.slow
def test_simulated_numbers_of_the_papers_page_are_those_of_the_simulators() -> None:
    text, table5 = page("papers.md"), page("fsmoe_table5.md")
    (row,) = re.findall(r"^\| FSMoE \| ([\d.]+) .*? \| ([\d.]+) .*? \| ([\d.]+) \|$", table5, re.MULTILINE)
    assert "FSMoE {} on ideal lanes, {} with contention 1.25; the paper measured {}".format(*row) in text
    cases = comet_figures.figure8()
    moved = {(case["tp"], case["tokens"]): (case["paper"], case["model"]) for case in cases}
    (paper_few, few), (paper_many, many) = moved[8, 4096], moved[8, 16384]
    assert f"moves from {paper_few} to {paper_many}, the model from {few} to {many}" in text
    paper, model = moved[4, 16384]
    assert f"the paper's {paper} at TP = 4 is {model} in the model" in text
    fused, whole, *_ = (each["seconds"] * 1e3 for each in comet_figures.beside())
    assert f"{fused:.3f} ms fused, {whole:.3f} ms in one chunk" in text
    assert all(each["computed_bytes"] == each["paper_bytes"] for each in comet_figures.table3())


@pytest.mark.nightly
def test_simulated_figures_of_the_papers_page_are_those_of_the_simulators() -> None:
    text = " ".join(page("papers.md").split())
    mpipemoe, fsmoe = mpipemoe_figures.tables(), fsmoe_models.tables()
    comet, flashdmoe = comet_layers.tables(), flashdmoe_figures.tables()
    mean = next(row for row in mpipemoe["speed_ups"] if row["speed-up"] == "mean over FasterMoE")
    assert f"{mean['TF32: all']:.2f} times as fast as FasterMoE on average" in text
    assert f"and {mean['TF32: PipeMoE']:.2f} times if only PipeMoE uses" in text
    best = {row["B"] // 1024: row["best"] for row in mpipemoe["figure12"]}
    assert "2 is best at 2k to 8k tokens, 4 at 12k to 32k, 8 at 48k and 64k" in text
    assert [best[k] for k in (2, 8, 12, 32, 48, 64)] == [2, 2, 4, 4, 8, 8]

    here = {(row["figure"], row["over"]): row["here"] for row in fsmoe["means"]}
    of_six = [here["6, A and B", over] for over in ("Tutel", "PipeMoE+Lina", "FSMoE-No-IIO")]
    said = "{:.2f} times as fast as Tutel on average, {:.2f} as PipeMoE+Lina and {:.2f} as FSMoE-No-IIO"
    assert said.format(*of_six) in text
    gains = [row["FSMoE"] for row in fsmoe["figure6"] if row["testbed"] != "B, Fig. 5"]
    assert f"Over DeepSpeed-MoE {min(gains):.2f} to {max(gains):.2f}" in text
    of_seven = [here[f"7, L = {tokens}, P = 48", "Tutel"] for tokens in (512, 1024, 2048)]
    assert "over Tutel {:.2f}, {:.2f} and {:.2f} for L".format(*of_seven) in text
    assert f"over Tutel {here['8', 'Tutel']:.2f} with two pipeline stages" in text

    ratios = {
        row["figure"]: [row[name] for name in ("Tutel", "CUTLASS", "TE", "FasterMoE")]
        for row in comet["speed_ups"]
    }
    for figure, words in (("10", "times as fast as the others"), ("13", "times as fast on average")):
        assert f"{min(ratios[figure]):.2f} to {max(ratios[figure]):.2f} {words}" in text
    on_l20 = ratios["14, right"]
    assert f"On L20 {min(on_l20):.2f} to {max(on_l20):.2f} times as fast" in text
    left = [row["over CUTLASS"] for row in comet["figure14_left"]]
    assert f"Megatron-CUTLASS from {left[0]:.2f} to {left[-1]:.2f}" in text
    first, *_, last = comet["figure12"]
    slower = [last[f"{name}_seconds"] / first[f"{name}_seconds"] for name in ("COMET", "CUTLASS")]
    assert "COMET takes {:.2f} times as long, Megatron-CUTLASS {:.2f} times".format(*slower) in text

    most = {(row["figure"], row["GPUs"], row["over"]): row["most"] for row in flashdmoe["speed_ups"]}
    assert f"up to {most['6.1', 4, 'Megatron-TE']:.2f} times as fast as Megatron-TE" in text
    assert f"At most {most['6.5', 8, 'all']:.2f} times as fast" in text
    (uniform,) = {f"{row['FlashDMoE ms']:.2f}" for row in flashdmoe["figure65"]}
    assert f"{uniform} ms with 8 to 128 experts" in text

    ratio = [row["all-to-all / experts"] for row in lancet_figures.figure2()]
    assert f"take {min(ratio):.1f} to {max(ratio):.1f} times as long as experts on V100" in text
    rows = {(row["figure"], row["range"]): row["best ms"] for row in lancet_figures.figure6()}
    small = (rows["(a)", "0 ms"], rows["(a)", "half of all"])
    assert "GPT2-S falls from {:.1f} ms (Tutel's range) to {:.1f};".format(*small) in text
    assert "GPT2-L from {:.1f} to {:.1f} with 1 ms".format(rows["(b)", "0 ms"], rows["(b)", "1 ms"]) in text


def test_pages_name_the_machine_that_their_pictures_assume() -> None:
    text = " ".join(page("how_it_works.md").split())
    assert pictures.MACHINE in text
    assert pictures.BUDGET.replace("GiB", " GiB") in text


# ---- the pictures


def difference(some: Path, other: Path) -> float:
    """Returns the mean difference of the grey levels (0 to 255) of two pictures.

    The pictures are made small first, because fonts may differ.
    """
    grey = [Image.open(path).convert("L").resize((320, 160)).tobytes() for path in (some, other)]
    return sum(abs(a - b) for a, b in zip(*grey, strict=True)) / len(grey[0])


@pytest.mark.slow
def test_pictures_of_the_pages_say_simulated_and_are_those_that_the_planner_draws_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_marked = dict[str, bool]()
    save = Figure.savefig

    def and_read(figure: Figure, path: Path, **options: Any) -> None:
        texts = [text.get_text() for text in figure.findobj(Text)]
        is_marked[path.name] = any("simulated" in text for text in texts)
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", and_read)
    pictures.write(tmp_path)
    assert is_marked == dict.fromkeys(pictures.NAMES, True)
    for name in pictures.NAMES:
        assert difference(tmp_path / name, DOCS / name) < 2, f"{name}: python docs/pictures.py docs"
    assert difference(DOCS / "chunks.png", DOCS / "pairs.png") > 10  # another picture would be noticed


def test_pictures_are_there_without_a_build() -> None:
    shown = [
        (each, path)
        for each in GUIDES
        for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", each.read_text(encoding="utf-8"))
    ]
    assert len(shown) > 8
    for each, path in shown:
        picture = (each.parent / path).resolve().relative_to(ROOT)
        assert picture.parts[0] in ("bench", "docs"), f"{each.name} shows {path}"
        assert (ROOT / picture).is_file(), f"{each.name} shows {path}"


# ---- the site

REFERENCE = sorted(DOCS.glob("reference*.rst"))


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(each.read_text(encoding="utf-8") for each in REFERENCE)
    described = re.findall(r"^\.\. auto\w+:: pmoe\.(\w+)$", text, re.MULTILINE)
    assert sorted(described) == sorted(set(pmoe.__all__) - {"__version__"})
    listed = (DOCS / "reference.rst").read_text(encoding="utf-8")
    for each in REFERENCE:
        assert each.stem == "reference" or listed.count(f"{each.stem}\n") == 1, each.name


class Found(HTMLParser):
    """The contents of a page that are checked: its ids, its links, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.headings = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.headings += tag == "h1"
        if given.get("id"):
            self.ids.add(str(given["id"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in ("img", "script") and given.get("src"):
            self.loaded.append(str(given["src"]))
        if tag == "link" and given.get("href"):
            self.loaded.append(str(given["href"]))


def built_site(file: Path) -> None:
    """Builds the site into an archive. Warnings are errors."""
    folder = file.parent / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(file.parent / "trees")]
    built = subprocess.run(
        [*command, str(DOCS), str(folder)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, f"{built.stdout}\n{built.stderr}\nmake setup installs what is missing"
    assert built.stderr == ""
    with tarfile.open(file, "w") as archive:
        archive.add(folder, "site")


def sources_of_the_site() -> list[str | Path]:
    """Returns everything that Sphinx reads: pages, pmoe and results, and the versions of the tools that
    build.
    """
    folders = (each.rglob("*") for each in (DOCS, ROOT / "pmoe", ROOT / "bench"))
    files = [path for found in folders for path in sorted(found) if path.is_file()]
    files = [path for path in files if path.suffix not in (".pyc", ".so")] + [ROOT / "README.md"]
    versions = [
        f"{name} {version(name)}" for name in ("sphinx", "myst-parser", "furo", "torch", "matplotlib")
    ]
    return [sys.version, *versions, *(part for path in files for part in (str(path.relative_to(ROOT)), path))]


def test_no_file_holds_the_marks_of_a_conflict() -> None:
    """A merge that was committed unfinished leaves two versions of a text, between marks that git writes."""
    folders = (ROOT / each for each in ("bench", "cuda", "docs", "examples", "pmoe", "tests"))
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    files = [
        path for path in files if path.suffix in (".md", ".rst", ".py", ".toml", ".h", ".cuh", ".cu", ".cpp")
    ]
    assert len(files) > 500
    mark = re.compile(r"^(<<<<<<<|>>>>>>>) ", re.MULTILINE)
    assert [path for path in files if mark.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.timeout(400)  # Sphinx and its imports take ten seconds of a processor that is free
@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_is_whole(tmp_path: Path, browser: Page) -> None:
    with tarfile.open(kept(f"site-{digest(sources_of_the_site())}.tar", built_site)) as archive:
        archive.extractall(tmp_path, filter="data")
    site = tmp_path / "site"
    pages = {path: Found(path.read_text(encoding="utf-8")) for path in site.glob("*.html")}
    names = {path.name for path in pages}
    assert {f"{each.stem}.html" for each in [*PAGES, *REFERENCE]} <= names
    for path, found in pages.items():
        check_links(path, found, pages)
        check_nothing_is_fetched(path, found)
    for each in [*PAGES, *REFERENCE]:
        assert pages[site / f"{each.stem}.html"].headings == 1, each.name
    described = set().union(*(pages[site / f"{each.stem}.html"].ids for each in REFERENCE))
    for name in pmoe.__all__:
        assert name == "__version__" or any(each.endswith(f".{name}") for each in described), name
    told = (site / "commands.html").read_text(encoding="utf-8")
    for name, parser in subcommands().items():
        assert f"pmoe {name}" in told
        assert str(parser.description)[:30] in told
    options = (site / "choosing.html").read_text(encoding="utf-8")
    assert [feature for feature in Feature if tables.words_of(feature) not in html.unescape(options)] == []
    assumed = html.unescape((site / "fsmoe_table5.html").read_text(encoding="utf-8"))
    assert [name for name, told in ASSUMPTIONS.items() if told[:40] not in assumed] == []
    assert any(link == "plan.html" for link in pages[site / "how_it_works.html"].links)
    for name in pictures.NAMES:
        assert (site / "_images" / name).stat().st_size > 10_000, name
    check_looks(browser, site.glob("*.html"))


def check_looks(browser: Page, names: Iterator[Path]) -> None:
    """Opens pages on a phone and on a desktop. None may be wider than its window, and everything must
    load.
    """
    for path in sorted(names):
        browser.open(path)
        for width, is_phone in ((390, True), (1280, False)):
            browser.resize(width, 900, is_phone=is_phone)
            found = browser.run(LOOKS)
            assert found["width"] <= width, f"{path.name} is {found['width']} wide in {width}"
            assert found["missing"] == [], path.name
            assert browser.messages() == [], path.name
            assert found["height"] <= MOST_PIXELS or not path.name.startswith("reference"), path.name


MOST_PIXELS = 18_000
"""Largest height of a page of the reference: one of 43,000 pixels is a list to search, not a page to read."""

LOOKS = """
return {
    width: document.documentElement.scrollWidth,
    height: innerWidth < 1000 ? 0 : document.documentElement.scrollHeight,
    missing: [...document.images].filter(each => each.naturalWidth == 0).map(each => each.src),
}
"""


def check_links(path: Path, found: Found, pages: dict[Path, Found]) -> None:
    """Checks that everything exists that a page links to or loads, also the places in other pages."""
    for link in [*found.links, *found.loaded]:
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        assert target.is_file(), f"{path.name} links to {link}"
        if parts.fragment and target in pages:
            assert unquote(parts.fragment) in pages[target].ids, f"{path.name} links to {link}"


def check_nothing_is_fetched(path: Path, found: Found) -> None:
    for source in found.loaded:
        assert not urlsplit(source).netloc, f"{path.name} loads {source}"
