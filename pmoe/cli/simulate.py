"""`pmoe simulate`: simulates a paper's experiment, or large models on many ranks, from assumed task costs."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pmoe.cli.arguments import refused_as, slack
from pmoe.cli.cluster import load_cluster, tomllib
from pmoe.cli.output import Output, by_key
from pmoe.papers import (
    comet_figures,
    comet_layers,
    flashdmoe_figures,
    fsmoe_models,
    fsmoe_table5,
    lancet_figures,
    mpipemoe_figures,
)
from pmoe.papers.assumptions import assumptions, wrapped
from pmoe.papers.scale import ScaledModel, scaling, scaling_ends
from pmoe.text import table
from pmoe.warn import warn_once

Simulation = Mapping[str, Sequence[Mapping[str, Any]]]

ABOUT = "simulate a paper's experiment, or large models on many ranks, from stated task costs"
TOLD = {
    "mpipemoe": "MPipeMoE's Fig. 8 and 12: three systems, and the best n by batch size",
    "fsmoe": "FSMoE's Table 5 (1,458 layers, Testbed B) and Fig. 6 to 8 (whole models)",
    "comet": "COMET's Table 3, the moves of n_c in its Fig. 8, and layers by system (Fig. 10 to 14)",
    "flashdmoe": "FlashDMoE's Table 6.2 and Fig. 6.1 to 6.5: one persistent kernel beside other layers",
    "lancet": "Lancet's section 7, Fig. 2 and 6: a step of GPT-2 by system and by what is cut",
    "scale": "a step of three models on 8 to 4,096 ranks, and where they stop scaling",
}
"""Maps the name of each experiment to its description in the help."""

OLD_NAMES = {"fsmoe-table5": "fsmoe"}
"""Earlier names of experiments, which work until pmoe 0.2."""


def experiment(name: str) -> str:
    """Returns the name of an experiment. For an old name it warns, and returns the new one."""
    if name not in OLD_NAMES:
        return name
    message = f"the experiment {name} is called {OLD_NAMES[name]} now: the old name goes with pmoe 0.2"
    warn_once(message, FutureWarning)
    return OLD_NAMES[name]


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    about = "; ".join(f"{name}: {text}" for name, text in TOLD.items())
    add("experiment", type=experiment, choices=list(TOLD), help=about)
    both = "fsmoe: how many times as long collectives take while both lanes send"
    add("--contention", type=slack, metavar="C", help=f"{both} (default {fsmoe_table5.CONTENTION})")
    drawn = "comet, flashdmoe: draw the simulated kernel beside others, as a PNG in this file"
    add("--draw", type=Path, metavar="FILE", help=drawn)
    add("--assumptions", action="store_true", help="print the assumptions and simulate nothing")


def run_command(args: argparse.Namespace) -> Output:
    """Returns the tables of a simulated experiment, or with --assumptions the assumptions behind them.

    With --draw, it also writes a picture. Raises ValueError for options that do not belong to the experiment.
    """
    name = args.experiment
    picture = args.draw
    if name != "fsmoe" and args.contention is not None:
        raise ValueError(f"--contention ({args.contention:g}) is for fsmoe, not for {name}")
    if picture is not None and (name not in FIGURES or args.assumptions):
        raise ValueError(f"--draw ({picture}) is for {', '.join(FIGURES)}, without --assumptions")
    assumed = assumptions(name)
    if args.assumptions:
        return Output(assumed, wrapped(assumed))
    if picture is not None:
        with (
            refused_as(
                f"--draw ({picture}) needs matplotlib: install it, or leave the option out", ImportError
            ),
            refused_as(f"--draw ({picture}) must be a file to write", OSError, ValueError),
        ):
            FIGURES[name]().savefig(picture, dpi=130)
    simulation = TABLES[name](**{} if args.contention is None else {"contention": args.contention})
    hint = f"\nprint the assumptions with: pmoe simulate {name} --assumptions"
    return Output(
        {**simulation, "assumptions": dict(assumed)}, itertools.chain(_lines(name, simulation), [hint])
    )


def _lines(name: str, simulation: Simulation) -> Iterator[str]:
    """Yields the lines of the output: each table under its title, and then explanations of the numbers.

    name: the experiment. Its titles and explanations are sections of papers/assumptions.md.
    simulation: the rows of each table.
    """
    titles = assumptions(f"{name}, tables")
    for key, rows in simulation.items():
        text_columns = [0, *(i for i, cell in enumerate(rows[0].values()) if isinstance(cell, str))]
        yield f"{textwrap.fill(titles[key], 110)}\n\n{table(by_key(rows), text_columns)}\n"
    yield from wrapped(assumptions(f"{name}, why"))


# ---- large models on many ranks


def _models() -> dict[str, ScaledModel]:
    """Returns the models of the experiment "scale", by name, from the file scale.toml."""
    stated = tomllib.loads(Path(__file__).with_name("scale.toml").read_text(encoding="utf-8"))
    return {name: ScaledModel(**fields) for name, fields in stated.items()}


def _scale() -> Simulation:
    """Returns the tables of the experiment "scale": a training step on 8 to 4,096 ranks.

    With weak scaling, the number of tokens of each rank stays the same as ranks are added. With strong
    scaling, the number of tokens of all ranks together stays the same. Two further tables list the number of
    ranks at which each model stops scaling.
    """
    rates = load_cluster(Path(__file__).with_name("scale_cluster.toml"), None)
    simulation = dict[str, Any]()
    for name, strong in (("weak", False), ("strong", True)):
        simulation[name] = scaling(_models(), rates, strong=strong)
        ends = scaling_ends(simulation[name], strong=strong).values()
        columns = ("model", "ranks", "waits for")
        simulation |= {f"{name} ends": [{key: end[key] for key in columns} for end in ends]} if ends else {}
    return simulation


def _fsmoe(contention: float = fsmoe_table5.CONTENTION) -> Simulation:
    """Returns the tables of the experiment "fsmoe".

    contention: while a collective between nodes and a collective inside the node both run, each takes this
        many times as long.
    """
    return {**fsmoe_table5.tables(contention), **fsmoe_models.tables(contention)}


def _comet() -> Simulation:
    """Returns the tables of the experiment "comet"."""
    return {**comet_figures.tables(), **comet_layers.tables()}


TABLES: Mapping[str, Callable[..., Simulation]] = {
    "mpipemoe": mpipemoe_figures.tables,
    "fsmoe": _fsmoe,
    "comet": _comet,
    "flashdmoe": flashdmoe_figures.tables,
    "lancet": lancet_figures.tables,
    "scale": _scale,
}
"""Functions that return the tables of each experiment, by the experiment's name.

A table is a list of rows, and a row maps column names to values.
"""
FIGURES: Mapping[str, Callable[[], Any]] = {
    "comet": comet_figures.beside_figure,
    "flashdmoe": flashdmoe_figures.actors_figure,
}
"""Functions that draw an experiment as a matplotlib figure, by the experiment's name."""
