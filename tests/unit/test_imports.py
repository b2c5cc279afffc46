"""Imports between folders of pmoe/ go in one direction only, as docs/architecture.md draws it."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pmoe
from pmoe.runners.features import Feature
from tests import fresh, source_imports

ROOT = Path(__file__).resolve().parents[2]

# From the top of the house to its ground. A module may import its own part and those further down.
FLOORS: list[set[str]] = [
    {"pmoe.__main__"},
    {"pmoe.cli"},
    {"pmoe.integrations"},
    {"pmoe.papers"},
    {"pmoe"},  # __init__.py, which names what users import
    {"pmoe.graph"},
    {"pmoe.training"},
    {"pmoe.convert"},
    {"pmoe.layer"},
    {"pmoe.decide"},
    {"pmoe.choose"},
    {"pmoe.call"},
    {"pmoe.runners"},
    {"pmoe.checkpointing"},
    {"pmoe.program"},
    {"pmoe.engine"},
    {"pmoe.measure"},
    {"pmoe.planner"},
    {"pmoe.gates", "pmoe.ordering", "pmoe.experts", "pmoe.comm"},
    {"pmoe.kernels"},
    {"pmoe.schedule"},
    {"pmoe.arguments", "pmoe.settings", "pmoe.text", "pmoe.warn"},
]
# Imports that do not point downwards. The stages of one floor know nothing of each other. pmoe/__init__.py
# imports `stats` at its first use; what stands in the file is for type checkers alone. A layer
# imports the file in which it is one operator of a graph only where torch.compile traces it.
NEIGHBOURS: set[tuple[str, str]] = {("pmoe", "pmoe.integrations"), ("pmoe.layer", "pmoe.graph")}

FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}


def part_of(module: str) -> str:
    """Returns the folder of a module. Example: pmoe.experts.ffn -> pmoe.experts."""
    return ".".join(module.split(".")[:2])


def module_of(path: Path) -> str:
    return source_imports.module_name(path, ROOT)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, module) for each import statement of a file, also inside functions."""
    for one in source_imports.imports_of(path, ROOT):
        yield one.line, one.module


FILES = sorted((ROOT / "pmoe").rglob("*.py"))


def test_every_file_of_pmoe_belongs_to_a_part_of_the_house() -> None:
    assert len(FILES) > 20
    unknown = {part_of(module_of(path)) for path in FILES} - set(FLOOR_OF)
    assert not unknown, f"{sorted(unknown)}: give it a place in FLOORS, as in docs/architecture.md"


def test_imports_point_downwards() -> None:
    wrong = []
    for path in FILES:
        here = part_of(module_of(path))
        for line, module in imports_of(path):
            there = part_of(module)
            if there.split(".")[0] != "pmoe" or there == here or (here, there) in NEIGHBOURS:
                continue
            if FLOOR_OF[here] >= FLOOR_OF[there]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {here} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_nothing_of_pmoe_imports_tests_examples_or_benchmarks() -> None:
    for path in FILES:
        for line, module in imports_of(path):
            assert module.split(".")[0] not in ("tests", "bench", "examples"), (path, line)


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pmoe" / "comm").mkdir(parents=True)
    (tmp_path / "pmoe" / "layer.py").touch()
    file = tmp_path / "pmoe" / "comm" / "flat.py"
    file.write_text(
        "import os, pmoe.layer\nfrom pmoe import layer\nfrom pmoe.layer import MoELayer\n"
        "def f():\n    from .. import layer\n    from . import counts\n    from .ranks import Ranks\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(imports_of(file)) == [
        (1, "os"),
        (1, "pmoe.layer"),
        (2, "pmoe.layer"),
        (3, "pmoe.layer"),
        (5, "pmoe.layer"),
        (6, "pmoe.comm"),
        (7, "pmoe.comm.ranks"),
    ]


def newly_imported(statement: str) -> set[str]:
    """Returns the modules that ``statement`` loads in a new Python, besides those of torch.distributed."""
    program = (
        "import sys, torch, torch.distributed\n"
        f"before = set(sys.modules)\n{statement}\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    return set(fresh.run(program).split())


MOST_MODULES = {"import pmoe": 2, "import pmoe\npmoe.MoELayer": 89}
"""The most modules of pmoe that a statement may load: `import pmoe`, and then the first use of a layer.

A number may only fall: programs that import pmoe wait for these modules.
"""


@pytest.mark.parametrize("statement", MOST_MODULES)
def test_importing_pmoe_loads_few_modules(statement: str) -> None:
    """`import pmoe` once loaded 99 modules, which took half as long again as the 63 of an older release."""
    found = sorted(name for name in newly_imported(statement) if name.split(".")[0] == "pmoe")
    assert len(found) <= MOST_MODULES[statement], found


def test_importing_pmoe_loads_no_optional_dependency_and_no_compiler() -> None:
    found = newly_imported("import pmoe\npmoe.MoELayer")
    assert "pmoe.layer" in found
    roots = {name.split(".")[0] for name in found}
    assert not roots & {"matplotlib", "tqdm", "numpy", "transformers", "fairseq", "triton"}, sorted(found)
    compiler = [name for name in found if name.startswith(("torch._dynamo", "torch._inductor"))]
    assert not compiler, compiler


def test_importing_pmoe_starts_no_process_group_and_no_cuda() -> None:
    program = (
        "import torch, torch.distributed as dist, pmoe\n"
        "pmoe.MoELayer\n"
        "assert not dist.is_initialized() and not torch.cuda.is_initialized()"
    )
    fresh.run(program)


# ---- what `import pmoe` gives, although it loads almost nothing


@pytest.mark.parametrize(
    "name",
    [
        "arguments.check_int",
        "call.options.Switches",
        "checkpointing.replay.Replay",
        "comm.ranks.Ranks",
        "decide.experts_call.ExpertsCall",
        "engine.buffers.arena.pool",
        "experts.base.ExpertRows",
        "gates.TopKGate",
        "kernels.grouped_gemm.product",
        "kernels.permute.permute",
        "kernels.route.route",
        "kernels.status",
        "layer.MoELayer",
        "ordering.SortedOrder",
        "planner.degree.SOLVE",
        "runners.features.Feature",
        "schedule.restore.Restore",
        "settings.ModuleWithSettings",
        "text.table",
        "warn.warn_once",
        "MoELayer",
        "Restore",
        "pool",
    ],
)
def test_a_part_of_pmoe_needs_no_import_of_its_own(name: str) -> None:
    """Programs write pmoe.gates.TopKGate after `import pmoe`, when all these modules were loaded."""
    fresh.run(f"import pmoe\nassert pmoe.{name} is not None")


def test_the_parts_are_those_that_a_layer_loads() -> None:
    program = (
        "import sys, pmoe\n"
        "pmoe.MoELayer\n"
        "loaded = {name.split('.')[1] for name in sys.modules if name.startswith('pmoe.')}\n"
        "assert loaded == {*pmoe._PARTS, 'warn'}, loaded ^ {*pmoe._PARTS, 'warn'}"
    )
    fresh.run(program)


IMPORTED_FIRST = sorted(
    {module_of(path) for path in FILES if path.name == "__init__.py"}
    | {f"pmoe.{part}" for part in pmoe._PARTS}
    | set(pmoe._LATER.values())
)
"""Each package of pmoe, and each module that the first use of a name of pmoe imports."""


@pytest.mark.slow
@pytest.mark.parametrize("module", IMPORTED_FIRST)
def test_any_part_of_pmoe_may_be_imported_first(module: str) -> None:
    """Modules that import each other in a circle may fail only if one of them is the first.

    Integrations may lack their framework here.
    """
    program = (
        f"try:\n    import {module}\n"
        "except ModuleNotFoundError as error:\n"
        "    if error.name.split('.')[0] == 'pmoe':\n        raise"
    )
    fresh.run(program)


def test_type_checkers_know_all_parts() -> None:
    """They knew 5 of 16. A type checker does not run `pmoe.__getattr__`, but reads lines of imports."""
    source = (ROOT / "pmoe" / "__init__.py").read_text(encoding="utf-8")
    assert re.findall(r"^    from pmoe import (\w+) as \1$", source, re.MULTILINE) == list(pmoe._PARTS)


def test_all_names_are_listed_before_any_is_loaded() -> None:
    program = (
        "import sys, pmoe\n"
        "missing = {*pmoe.__all__, *pmoe._PARTS} - set(dir(pmoe))\n"
        "assert not missing, missing\n"
        "assert 'pmoe.layer' not in sys.modules\n"
        "from pmoe import *\n"
        "assert MoELayer is pmoe.MoELayer and vars(pmoe)['MoELayer'] is MoELayer"
    )
    fresh.run(program)


@pytest.mark.parametrize(
    "package", ["pmoe", "pmoe.kernels.grouped_gemm", "pmoe.kernels.permute", "pmoe.kernels.route"]
)
def test_a_mistyped_name_raises_as_in_any_module(package: str) -> None:
    program = (
        f"import pmoe, importlib\n"
        f"try:\n    importlib.import_module({package!r}).MoELayers\n"
        f"except AttributeError as error:\n    assert str(error) == \"module '{package}' has no attribute "
        f"'MoELayers'\", error\n"
        f"else:\n    raise AssertionError('no error')"
    )
    fresh.run(program)


def test_threads_may_load_the_first_names_together() -> None:
    program = (
        "import threading, pmoe\n"
        "names = ['MoELayer', 'gates', 'Gate', 'experts', 'Restore', 'kernels', 'pool', 'Callback'] * 2\n"
        "start = threading.Barrier(len(names))\n"
        "values = []\n"
        "def load(name):\n"
        "    start.wait()\n"
        "    values.append(getattr(pmoe, name))\n"
        "threads = [threading.Thread(target=load, args=(name,), daemon=True) for name in names]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join(60) for thread in threads]\n"
        "assert len(values) == len(names), len(values)"
    )
    fresh.run(program)


def test_importing_pmoe_warns_of_an_untested_release_of_torch() -> None:
    program = (
        "import sys, warnings, torch\n"
        "torch.__version__ = '9.1.0'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import pmoe\n"
        "assert 'torch 9.1.0 is newer than' in str(caught[0].message), caught\n"
        "assert 'pmoe.layer' not in sys.modules"
    )
    fresh.run(program)


# ---- files that mention pmoe's classes are read after `import pmoe` alone, or without it


def test_a_pickle_finds_its_classes() -> None:
    layer = pmoe.MoELayer(4, 8, num_experts=2, memory_reuse="S4")
    content = pickle.dumps((pmoe.Restore("keep", "recompute"), Feature.WIRE, layer))
    program = (
        "import pickle, sys, torch\n"
        "assert 'pmoe' not in sys.modules\n"
        f"pair, feature, layer = pickle.loads({content!r})\n"
        "import pmoe\n"
        "assert pair == pmoe.Restore('keep', 'recompute')\n"
        "assert feature is pmoe.runners.features.Feature.WIRE\n"
        "assert isinstance(layer, pmoe.MoELayer)\n"
        "assert str(layer.restore) == 'communicate/recompute', layer.restore\n"
        "layer(torch.ones(3, 4)).sum().backward()"
    )
    fresh.run(program)


def test_torch_loads_checkpoints_with_and_without_classes_of_pmoe(tmp_path: Path) -> None:
    layer = pmoe.MoELayer(4, 8, num_experts=2)
    files = {name: tmp_path / f"{name}.pt" for name in ("state", "pair", "layer")}
    torch.save(layer.state_dict(), files["state"])
    torch.save({"pair": pmoe.Restore("keep", "recompute")}, files["pair"])
    torch.save(layer, files["layer"])
    program = (
        "import torch, pmoe\n"
        f"state = torch.load({str(files['state'])!r}, weights_only=True)\n"
        "layer = pmoe.MoELayer(4, 8, num_experts=2)\n"
        "layer.load_state_dict(state)\n"
        "with torch.serialization.safe_globals([pmoe.Restore]):\n"
        f"    pair = torch.load({str(files['pair'])!r}, weights_only=True)['pair']\n"
        "assert pair == pmoe.Restore('keep', 'recompute')\n"
        f"same = torch.load({str(files['layer'])!r}, weights_only=False)\n"
        "assert torch.equal(same.experts.w1, layer.experts.w1)"
    )
    fresh.run(program)


@pytest.mark.parametrize(
    ("used", "operators"),
    [
        ("permute.permute", ["permute", "unpermute", "permute_backward", "unpermute_backward"]),
        (
            "grouped_gemm.grouped_product",
            ["grouped_product", "grouped_input_gradient", "grouped_weight_gradient"],
        ),
        ("route.route", ["route", "route_backward"]),
    ],
)
def test_operators_are_registered_with_their_functions(used: str, operators: list[str]) -> None:
    """`torch.ops.pmoe` gets an operator with its function or its file. `import pmoe` registers none."""
    package = used.partition(".")[0]
    for first in (f"import pmoe\npmoe.kernels.{used}", f"import pmoe.kernels.{package}.operators"):
        fresh.run(
            f"import torch\n{first}\n" + "\n".join(f"torch.ops.pmoe.{name}.default" for name in operators)
        )
