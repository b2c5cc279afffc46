"""`pmoe simulate`: an experiment of a paper, from the costs of tasks that the paper states."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pmoe.cli.arguments import refused_as, slack
from pmoe.cli.output import Output, ms
from pmoe.papers import comet_figures, fsmoe_layers, lancet_figures
from pmoe.papers.comet_figures import Beside
from pmoe.papers.fsmoe_table5 import CONTENTION, PAPER_DIFFERING, Table5, table5
from pmoe.planner.timeline import draw
from pmoe.text import table

Rows = Sequence[Mapping[str, Any]]

ABOUT = "a paper's experiment from its own task costs"
ASSUMED = {
    "fsmoe-table5": fsmoe_layers.ASSUMPTIONS,
    "comet": comet_figures.ASSUMPTIONS,
    "lancet": lancet_figures.ASSUMPTIONS,
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    told = (
        "FSMoE's Table 5: five systems, 1,458 layers, Testbed B; COMET's Table 3, the moves of n_c in its "
        "Fig. 8, and a fused layer beside a chunked one; or Lancet's section 7: a step of GPT-2 by system"
    )
    add("experiment", choices=list(ASSUMED), help=told)
    both = "fsmoe-table5: seconds of collectives of both lanes together, over those alone"
    add("--contention", type=slack, metavar="C", help=f"{both} (default {CONTENTION})")
    drawn = "comet: the fused layer beside the chunked one, as a PNG"
    add("--draw", type=Path, metavar="FILE", help=drawn)
    add("--assumptions", action="store_true", help="print what is assumed, and simulate nothing")


def run_command(args: argparse.Namespace) -> Output:
    name = args.experiment
    if name != "fsmoe-table5" and args.contention is not None:
        raise ValueError(f"--contention ({args.contention:g}) is for fsmoe-table5, not for {name}")
    if args.draw is not None and (name != "comet" or args.assumptions):
        raise ValueError(f"--draw ({args.draw}) is for comet, without --assumptions")
    if args.assumptions:
        return Output(ASSUMED[name], _wrapped(ASSUMED[name]))
    if name == "lancet":
        return _lancet()
    return _comet(args.draw) if name == "comet" else _table5(args.contention)


def _wrapped(texts: Mapping[str, str]) -> Iterator[str]:
    """Each name with its text beside it, which continues below itself."""
    width = max(map(len, texts)) + 2
    for name, text in texts.items():
        yield textwrap.fill(text, 110, initial_indent=name.ljust(width), subsequent_indent=" " * width)


# ---- COMET's Table 3 and Fig. 8, and a fused layer beside a chunked one


def _comet(picture: Path | None) -> Output:
    cases, beside = comet_figures.figure8(), comet_figures.beside()
    moves = comet_figures.moves(cases)
    if picture is not None:
        _draw(picture, beside)
    fields = {
        "table3": comet_figures.table3(),
        "figure8": cases,
        "moves": moves,
        "beside": {**asdict(beside), "fused": beside.fused},
        "machine": asdict(comet_figures.H800),
        "assumptions": dict(comet_figures.ASSUMPTIONS),
    }
    return Output(fields, _comet_lines(cases, moves, beside))


def _draw(path: Path, beside: Beside) -> None:
    title = f"Mixtral 8x7B, EP = 8, M = {beside.tokens}: a rank of 8 H800, simulated"
    with (
        refused_as(f"--draw ({path}) must be left out without matplotlib", ImportError),
        refused_as(f"--draw ({path}) must be a file to write", OSError, ValueError),
    ):
        draw(path, comet_figures.panels(beside), title)


def _comet_lines(cases: Rows, moves: Sequence[str], beside: Beside) -> Iterator[str]:
    yield "COMET's Table 3: MB (2^20 bytes) of the communication buffer, 2 M N bytes\n"
    rows = [
        (each["model"], f"{each['tokens']}", f"{each['paper_mb']}", f"{each['num_bytes'] / 2**20:g}")
        for each in comet_figures.table3()
    ]
    yield table([("model", "M", "paper", "computed"), *rows])
    yield (
        "\nCOMET's Fig. 8: the n_c of 132 blocks with which layer 1 is fastest; also the model's where "
        "communicating\nblocks are half as fast, and where M is of a TP group; us with the model's n_c and "
        "the paper's\n"
    )
    yield table(_case_rows(cases))
    yield "\n" + "\n".join(moves)
    yield textwrap.fill(comet_figures.WHY, 110)
    yield _beside_line(beside)
    yield "\nassumed: pmoe simulate comet --assumptions"


def _case_rows(cases: Rows) -> Iterator[Sequence[str]]:
    yield "TP", "M", "paper", "model", "half rate", "M W / TP", "us", "us, paper's"
    for case in cases:
        names = ("tp", "tokens", "paper", "model", "half_rate", "per_group")
        given = [str(case[name] or "-") for name in names]
        yield *given, *(f"{s * 1e6:.0f}" if s else "-" for s in (case["seconds"], case["paper_seconds"]))


def _beside_line(beside: Beside) -> str:
    dispatch, combine = beside.dispatch, beside.combine
    chunked = ", ".join(f"{ms(seconds)} with n = {n}" for n, seconds in beside.chunked.items())
    return (
        f"\nMixtral 8x7B, EP = 8, M = {beside.tokens}: fused {ms(beside.fused)} ms (layer 0 "
        f"{ms(dispatch.seconds)} with n_c = {dispatch.division.n_c}, layer 1 "
        f"{ms(combine.seconds)} with n_c = {combine.division.n_c}\nand T_N = "
        f"{combine.division.chunk_columns}), chunked {chunked}"
    )


# ---- Lancet's section 7


def _lancet() -> Output:
    rows, best = lancet_figures.section7(), lancet_figures.largest_gains
    fields = {"rows": rows, "paper": lancet_figures.PAPER, "assumptions": lancet_figures.ASSUMPTIONS}
    return Output(fields, _lancet_lines(rows, best(rows)))


def _lancet_lines(rows: Rows, best: Mapping[str, float]) -> Iterator[str]:
    yield "Lancet's section 7: a training step by system, ms; its two passes alone and together\n"
    cells = [
        [f"{each:.2f}" if isinstance(each, float) else f"{each}" for each in row.values()] for row in rows
    ]
    yield table([[*rows[0]], *cells], left=range(2))
    yield ""
    for name, told in lancet_figures.PAPER.items():
        yield f"{name}: {best[name]:.2f} at most; paper: {told}"
    yield textwrap.fill(lancet_figures.WHY, 110)
    yield "\nassumed: pmoe simulate lancet --assumptions"


# ---- FSMoE's Table 5, and its Table 2 beside the model


def _table5(contention: float | None) -> Output:
    ideal, operations = table5(1.0), fsmoe_layers.table2()
    contended = table5(CONTENTION if contention is None else contention)
    fields = {
        "ideal": asdict(ideal),
        "contended": asdict(contended),
        "paper_differing": PAPER_DIFFERING,
        "table2": operations,
        "assumptions": dict(fsmoe_layers.ASSUMPTIONS),
    }
    return Output(fields, _table5_lines(ideal, contended, operations))


def _table5_lines(ideal: Table5, contended: Table5, operations: Rows) -> Iterator[str]:
    yield (
        f"speed-up over Tutel, mean of {ideal.num_layers} layers; C: how many times as long communication "
        "between nodes\nand inside the node take beside each other\n"
    )
    yield table(_system_rows(ideal, contended))
    yield (
        f"\nlayers whose best degrees of both passes differ: {ideal.differing} ({ideal.differing_alone} "
        f"where backward carries no gradients), paper {PAPER_DIFFERING}\n"
    )
    yield "FSMoE's Table 2, Testbed B: ms of an operation in one pass, all of them beside nothing"
    yield table(_operation_rows(operations), left=range(2))
    yield "\nassumed: pmoe simulate fsmoe-table5 --assumptions"


def _system_rows(ideal: Table5, contended: Table5) -> Iterator[Sequence[str]]:
    yield "system", "C = 1", "of one layer", f"C = {contended.contention:g}", "of one layer", "paper"
    for name, alone in ideal.systems.items():
        beside = contended.systems[name]
        spans = [f"{each.smallest:.2f} - {each.largest:.2f}" for each in (alone, beside)]
        paper = "-" if alone.paper is None else f"{alone.paper:.2f}"
        yield name, f"{alone.mean:.3f}", spans[0], f"{beside.mean:.3f}", spans[1], paper


def _operation_rows(operations: Rows) -> Iterator[Sequence[str]]:
    yield "pass", "operation", "measured", "modelled", "modelled / measured"
    for each in operations:
        seconds = measured, modelled = each["measured"], each["modelled"]
        ratio = f"{modelled / measured:.2f}" if measured else "-"
        name = f"{each['model']} {each['direction']}"
        yield name, each["name"], *(f"{s * 1e3:.1f}" for s in seconds), ratio
