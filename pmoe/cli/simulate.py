"""`pmoe simulate`: an experiment of a paper, or large models on many ranks, from stated costs of tasks."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pmoe.cli.arguments import refused_as, slack
from pmoe.cli.cluster import load_cluster, tomllib
from pmoe.cli.output import Output, by_key, ms
from pmoe.papers import comet_figures, flashdmoe_figures, lancet_figures
from pmoe.papers.assumptions import assumptions, wrapped
from pmoe.papers.comet_figures import Beside
from pmoe.papers.fsmoe_table5 import CONTENTION, PAPER_DIFFERING, table2, table5
from pmoe.planner.scale import ScaledModel, scaling, scaling_ends
from pmoe.text import table

Fields = Mapping[str, Any]
Rows = Sequence[Fields]

ABOUT = "a paper's experiment, or large models on many ranks, from stated task costs"
TOLD = {
    "fsmoe-table5": "FSMoE's Table 5: five systems, 1,458 layers, Testbed B",
    "comet": "COMET's Table 3, the moves of n_c in its Fig. 8, and a fused layer beside a chunked one",
    "flashdmoe": "FlashDMoE's Table 6.2, and its actors beside other layers, with a late peer, too",
    "lancet": "Lancet's section 7: a step of GPT-2 by system",
    "scale": "a step of three models on 8 to 4,096 ranks, and where they stop scaling",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("experiment", choices=list(TOLD), help="; ".join(f"{name}: {told}" for name, told in TOLD.items()))
    both = "fsmoe-table5: seconds of collectives of both lanes together, over those alone"
    add("--contention", type=slack, metavar="C", help=f"{both} (default {CONTENTION})")
    drawn = "comet: the fused layer beside the chunked one; flashdmoe: a rank's actors; as a PNG"
    add("--draw", type=Path, metavar="FILE", help=drawn)
    add("--assumptions", action="store_true", help="print what is assumed, and simulate nothing")


def run_command(args: argparse.Namespace) -> Output:
    name, picture = args.experiment, args.draw
    if name != "fsmoe-table5" and args.contention is not None:
        raise ValueError(f"--contention ({args.contention:g}) is for fsmoe-table5, not for {name}")
    if picture is not None and (name not in FIGURES or args.assumptions):
        raise ValueError(f"--draw ({picture}) is for {', '.join(FIGURES)}, without --assumptions")
    assumed = assumptions(name)
    if args.assumptions:
        return Output(assumed, wrapped(assumed))
    if picture is not None:
        with (
            refused_as(f"--draw ({picture}) must be left out without matplotlib", ImportError),
            refused_as(f"--draw ({picture}) must be a file to write", OSError, ValueError),
        ):
            FIGURES[name]().savefig(picture, dpi=130)
    fields, lines = _table5(args.contention) if name == "fsmoe-table5" else PRINTED[name]()
    told = f"\nassumed: pmoe simulate {name} --assumptions"
    return Output({**fields, "assumptions": dict(assumed)}, itertools.chain(lines, [told]))


# ---- COMET's Table 3 and Fig. 8, and a fused layer beside a chunked one


def _comet() -> Output:
    cases, beside, buffers = comet_figures.figure8(), comet_figures.beside(), comet_figures.table3()
    moves = comet_figures.moves(cases)
    fields = {
        "table3": buffers,
        "figure8": cases,
        "moves": moves,
        "beside": {**asdict(beside), "fused": beside.fused},
        "machine": asdict(comet_figures.H800),
    }
    lines = (
        "COMET's Table 3: the communication buffer, 2 M N bytes; the paper's MB are MiB\n",
        table(by_key(buffers)),
        "\nCOMET's Fig. 8: the n_c of 132 blocks with which layer 1 is fastest, and its ms, by the model\n"
        "and with the paper's; also the model's n_c where communicating blocks are half as fast, and\n"
        "where the tokens are a TP group's\n",
        table(by_key(cases)),
        "\n" + "\n".join(moves),
        *wrapped(assumptions("comet, why")),
        _beside_line(beside),
    )
    return Output(fields, lines)


def _beside_line(beside: Beside) -> str:
    dispatch, combine = beside.dispatch, beside.combine
    chunked = ", ".join(f"{ms(seconds)} with n = {n}" for n, seconds in beside.chunked.items())
    return (
        f"\nMixtral 8x7B, EP = 8, M = {beside.tokens}: fused {ms(beside.fused)} ms (layer 0 "
        f"{ms(dispatch.seconds)} with n_c = {dispatch.division.n_c}, layer 1 "
        f"{ms(combine.seconds)} with n_c = {combine.division.n_c}\nand T_N = "
        f"{combine.division.chunk_columns}), chunked {chunked}"
    )


# ---- FlashDMoE's Table 6.2 and its actors


def _flashdmoe() -> Output:
    tables = {
        "Table 6.2, MB (2^20 bytes); rest: bookkeeping less a hidden activation": flashdmoe_figures.table62(),
        "actors beside a synchronous layer, 8,192 tokens a rank": flashdmoe_figures.scaled_layers(),
        "one of 8 peers late: what it adds": flashdmoe_figures.late_peers(),
        "three ways by tokens a rank of 8, alone and with a late peer": flashdmoe_figures.ways_by_size(),
    }
    lines = (f"{title}\n\n{table(by_key(rows))}\n" for title, rows in tables.items())
    return Output(tables, itertools.chain(lines, wrapped(assumptions("flashdmoe, why"))))


# ---- Lancet's section 7


def _lancet() -> Output:
    rows, paper = lancet_figures.section7(), lancet_figures.PAPER
    best = lancet_figures.largest_gains(rows)
    lines = (
        "Lancet's section 7: a training step by system, ms; its two passes alone and together\n",
        table(by_key(rows), left=range(2)) + "\n",
        *(f"{name}: {best[name]:.2f} at most; paper: {told}" for name, told in paper.items()),
        *wrapped(assumptions("lancet, why")),
    )
    return Output({"rows": rows, "paper": paper}, lines)


# ---- FSMoE's Table 5, and its Table 2 beside the model


def _table5(contention: float | None) -> Output:
    ideal, operations = table5(1.0), table2()
    contended = table5(CONTENTION if contention is None else contention)
    fields = {"ideal": ideal, "contended": contended, "table2": operations}
    systems = [
        {"system": name, "C": found["contention"], **row}
        for found in (ideal, contended)
        for name, row in found["systems"].items()
    ]
    lines = (
        f"speed-up over Tutel of {ideal['num_layers']} layers, and the paper's; C: how many times as long\n"
        "communication between nodes and inside the node take beside each other\n",
        table(by_key(systems)),
        f"\nlayers whose best degrees of both passes differ: {ideal['differing']} "
        f"({ideal['differing_alone']} where backward carries no gradients), paper {PAPER_DIFFERING}\n",
        "FSMoE's Table 2, Testbed B: an operation in one pass, measured by the paper and by the model",
        table(by_key(operations), left=range(3)),
    )
    return Output({**fields, "paper_differing": PAPER_DIFFERING}, lines)


# ---- large models on many ranks


def _models() -> dict[str, ScaledModel]:
    stated = tomllib.loads(Path(__file__).with_name("scale.toml").read_text(encoding="utf-8"))
    return {name: ScaledModel(**each) for name, each in stated.items()}


def _scale() -> Output:
    fields, lines = dict[str, Any](), list[str]()
    rates = load_cluster(Path(__file__).with_name("scale_cluster.toml"), None)
    for name, strong in (("weak", False), ("strong", True)):
        rows = scaling(_models(), rates, strong=strong)
        ends = scaling_ends(rows, strong=strong)
        fields[name] = {"rows": rows, "ends": ends}
        lines += [f"{name} scaling\n", table(by_key(rows)), ""]
        for model, end in ends.items():
            lines.append(
                f"{model} stops scaling at {end['ranks']:,} ranks, which wait for {end['waits for']}"
            )
        lines.append("")
    return Output(fields, [*lines, *wrapped({"columns": assumptions("scale")["columns"]})])


PRINTED = {"comet": _comet, "flashdmoe": _flashdmoe, "lancet": _lancet, "scale": _scale}
FIGURES = {"comet": comet_figures.beside_figure, "flashdmoe": flashdmoe_figures.actors_figure}
