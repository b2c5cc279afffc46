"""Builds the documentation site: make docs, or sphinx-build -W docs build/docs. Needs no network.

Beside Markdown, Sphinx reads here the public names of pmoe, the help texts of its command and the tables of
`docs.tables`, so that no page can miss one, and runs `pmoe plan` for a page that it links to.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docutils import nodes  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx.ext.napoleon import Config, GoogleDocstring  # noqa: E402
from sphinx.transforms.post_transforms import SphinxPostTransform  # noqa: E402
from sphinx.util.docutils import SphinxDirective  # noqa: E402

import pmoe  # noqa: E402
from docs import pictures, tables  # noqa: E402
from pmoe import cli  # noqa: E402

PLAN = ROOT / "build" / "docs-plan" / "plan.html"
"""Made by the build: nothing is written beside the sources."""

project = "pmoe"
author = "pmoe authors"
version = release = pmoe.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]

myst_heading_anchors = 4
smartquotes_action = "D"  # dashes only: names in quotes are copied
default_role = "py:obj"  # of `names` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "class"
add_module_names = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"pmoe {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_extra_path = [str(PLAN)]
html_show_copyright = html_copy_source = html_show_sourcelink = False
html_show_sphinx = False


class LinkedPictures(SphinxPostTransform):
    """A picture leads to its file: on a phone it must be enlarged to be read."""

    default_priority = 500
    formats = ("html",)

    def run(self, **options: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            if image["uri"] in self.env.images and not isinstance(image.parent, nodes.reference):
                _, name = self.env.images[image["uri"]]
                link = nodes.reference("", "", refuri=f"_images/{name}", internal=True)
                image.replace_self(link)
                link += image


class TableCells(SphinxPostTransform):
    """Tells the style sheet what a column holds: sentences need room, numbers line up."""

    default_priority = 500
    formats = ("html",)

    def run(self, **options: Any) -> None:
        for body in list(self.document.findall(nodes.tbody)):
            for column in zip(*(row.children for row in body.children), strict=True):
                texts = [cell.astext() for cell in column]
                longest = max(map(len, texts))
                kind = "sentence" if longest > 40 else "number" if all(map(is_number, texts)) else ""
                for cell in column if kind else ():
                    cell["classes"].append(kind)


def is_number(text: str) -> bool:
    return re.fullmatch(r"(-?[\d.,]+( %| x)?|-)?", text) is not None


class PublicNames(SphinxDirective):
    """``.. public:: pmoe.training.parallel``: every public name of the module, with its docstring.

    The option ``:without:`` lists names that another page describes.
    """

    required_arguments = 1
    option_spec: ClassVar = {"without": str.split}

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        lines = [".. py:currentmodule:: " + module.__name__, ""]
        without = self.options.get("without", [])
        for name in public_names(module):
            if name in without:
                continue
            lines += directive(module, name)
        return self.parse_text_to_nodes("\n".join(lines))


def public_names(module: ModuleType) -> list[str]:
    """``__all__``, or what is defined in the module: the layer, other types, then functions. What pmoe itself
    names is described there."""
    names = getattr(module, "__all__", None)
    if names is None:
        own = (
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        )
        names = [name for name in own if not name.startswith("_")]
    above = () if module is pmoe else public_names(pmoe)
    documented = [name for name in names if callable(getattr(module, name)) and name not in above]
    return sorted(documented, key=lambda name: (_rank(getattr(module, name)), name.lower()))


def _rank(member: object) -> int:
    return 0 if member is pmoe.MoELayer else 1 if inspect.isclass(member) else 2


def directive(module: ModuleType, name: str) -> list[str]:
    kind = "autoclass" if inspect.isclass(getattr(module, name)) else "autofunction"
    members = ["   :members:"] if kind == "autoclass" else []
    return [f".. {kind}:: {module.__name__}.{name}", *members, ""]


class Docstring(SphinxDirective):
    """``.. docstring:: pmoe.integrations.fairseq``, or a function's: read and not imported, for modules that
    need packages which need not be here."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        text = docstring(self.arguments[0])
        return [nodes.literal_block(text, text, language="none")]


def docstring(name: str) -> str:
    """Of a module, or of a function in one."""
    parts = name.split(".")
    package, file = ROOT.joinpath(*parts, "__init__.py"), ROOT.joinpath(*parts).with_suffix(".py")
    if package.exists() or file.exists():
        node: ast.AST = parsed(package if package.exists() else file)
    else:
        (node,) = (node for node in parsed(file.parent.with_suffix(".py")).body if named(node) == parts[-1])
    text = ast.get_docstring(node)
    if not text:
        raise ValueError(f"{name} must have a docstring")
    return text


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(node: ast.stmt) -> str | None:
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


class MadeTable(SphinxDirective):
    """``.. made-table:: options``: a table of `docs.tables`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(tables.TABLES[self.arguments[0]]())


class CommandHelp(SphinxDirective):
    """``.. command-help::``: every subcommand of pmoe with what --help prints."""

    def run(self) -> list[nodes.Node]:
        return [self.section(f"pmoe {name}", text) for name, text in command_helps()]

    def section(self, title: str, text: str) -> nodes.section:
        """One that the page's contents list."""
        section = nodes.section("", nodes.title("", title), ids=[nodes.make_id(title)], names=[title])
        self.state.document.note_explicit_target(section)
        section += nodes.literal_block(text, text, language="none")
        return section


def command_helps() -> Iterator[tuple[str, str]]:
    """(subcommand, its help), as wide as a page is."""
    os.environ["COLUMNS"] = "92"
    (commands,) = (
        action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    for name, parser in commands.choices.items():
        yield name, parser.format_help()


def write_plan(app: Sphinx, config: object) -> None:
    PLAN.parent.mkdir(parents=True, exist_ok=True)
    PLAN.write_text(pictures.plan_page(), encoding="utf-8")


def point_inside(app: Sphinx, docname: str, source: list[str]) -> None:
    """The first page begins with the README. Links to files that are pages of the site, too, lead there; so
    does the mention of one that is on the site alone."""
    if docname == "index":
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        source[0] = re.sub(r"\]\((?=bench/.*\.png)", "](../", text.replace("](docs/", "](")) + source[0]
    source[0] = re.sub(r"\((\.\./)*bench/results/README\.md", "(results.md", source[0])
    source[0] = re.sub(r"\((\.\./)?CONTRIBUTING\.md", "(contributing.md", source[0])
    source[0] = source[0].replace("the whole page is what", '<a href="plan.html">the whole page</a> is what')


def read_sections(
    app: Sphinx, kind: str, name: str, member: object, options: object, lines: list[str]
) -> None:
    """Args, Returns, Attributes of a docstring; those of attributes have none, and may have colons."""
    if kind not in ("attribute", "data", "property"):
        lines[:] = listed(lines)
        config = Config(napoleon_use_ivar=True)  # attributes that it lists become no entries of their own
        lines[:] = GoogleDocstring(lines, config, app, kind, name, member, options).lines()


def listed(lines: list[str]) -> list[str]:
    """Paragraphs of ``name: text`` with indented continuations as a list, an item a name.

    A paragraph that is indented by different widths is code.
    """
    items: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        rows = paragraph.split("\n")
        starts = [re.match(r"\w[\w, ]*: \S", row) is not None for row in rows]
        indents = {len(row) - len(row.lstrip()) for row in rows}
        if min(indents) == 4 and len(indents) > 1:
            items += ["::", ""]
        if starts[0] and any(row.startswith("    ") for row in rows):
            rows = [
                "* " + row if start else "  " + row.strip() for row, start in zip(rows, starts, strict=True)
            ]
        items += [*rows, ""]
    return items


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public", PublicNames)
    app.add_directive("docstring", Docstring)
    app.add_directive("command-help", CommandHelp)
    app.add_directive("made-table", MadeTable)
    app.add_post_transform(LinkedPictures)
    app.add_post_transform(TableCells)
    app.connect("config-inited", write_plan, priority=100)  # before html_extra_path is looked at
    app.connect("source-read", point_inside)
    app.connect("autodoc-process-docstring", read_sections)
    return {"parallel_read_safe": True}
