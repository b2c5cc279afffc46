"""`pmoe plan`: the n and the restore pair that a stored profile recommends for a layer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmoe.cli.arguments import byte_count, refused_as
from pmoe.cli.layer_arguments import add_layer_sizes, describe_layer, layer_fields, layer_shape, python_line
from pmoe.cli.output import Output, mib, ms, pair_name
from pmoe.measure.profile import find_profile, load_profile
from pmoe.planner.candidates import Advice, PricedChoice, advise, step_bars
from pmoe.planner.drawing import Point, inline_svg, page, part, scatter_figure
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.planner.timeline import drawing
from pmoe.text import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "n and the restore pair for a layer, from a stored profile"


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_layer_sizes(command)
    add = command.add_argument
    add("--budget", type=byte_count, help="most bytes on the device, such as 2GiB or '500 MB'")
    add("--profile", type=Path, metavar="FILE", help="default: the stored one that fits")
    add("--folder", type=Path, help="of stored profiles (default $PMOE_CACHE, ~/.cache/pmoe)")
    add("--html", type=Path, metavar="FILE", help="also write one page with pictures")


def run_command(args: argparse.Namespace) -> Output:
    layer_shape(args, "cpu")  # bad sizes first
    path, profile = _profile_for(args)
    shape = layer_shape(args, profile.device_type)
    try:
        advice = advise(shape, profile, args.tokens, budget=args.budget, slack=args.slack)
    except ValueError as error:
        raise ValueError(str(error).replace("memory_budget", "--budget", 1)) from None
    if args.html is not None:
        _write_page(args, shape, profile, advice)
    return Output(_fields(args, path, profile, advice), _lines(args, path, profile, advice))


def _profile_for(args: argparse.Namespace) -> tuple[Path, Profile]:
    if args.profile is None:
        return find_profile(args.folder, num_ranks=args.ranks, dtype=args.dtype)
    with (
        refused_as(f"--profile ({args.profile}) must be a file to read", OSError),
        refused_as(f"--profile ({args.profile}) must hold a profile", ValueError),
    ):
        profile = load_profile(args.profile)
    held_of = {"ranks": profile.num_ranks, "dtype": profile.dtype}
    for name, held in held_of.items():
        asked = getattr(args, name)
        if asked != held:
            raise ValueError(f"--{name} ({asked}) must be that of --profile {args.profile} ({held})")
    return args.profile, profile


def _lines(args: argparse.Namespace, path: Path, profile: Profile, advice: Advice) -> Iterator[str]:
    yield describe_layer(args, profile.device_type)
    yield f"profile: {path}\n  {profile}\n"
    header, *rows = _candidate_rows(advice, args.budget)
    marks = ("<-" if each is advice.decision else "" for each in advice.candidates)
    yield table([header, *([*row, mark] for row, mark in zip(rows, marks, strict=True))])
    yield from _conclusions(advice)
    if args.html is not None:
        yield f"wrote {args.html}"
    yield f"  {_python(args, advice)}"


def _python(args: argparse.Namespace, advice: Advice) -> str:
    restore = advice.decision.restore
    return python_line(args, pipeline=advice.decision.forward, memory_reuse=restore.strategy or restore)


def _candidate_rows(advice: Advice, budget: int | None) -> list[list[str]]:
    """A header and one row for each candidate; with a budget, the last column says whether it fits."""
    rows = [["pair", "n", "simulated ms", "Eq. 10 ms", "promised MiB", "host MiB", "fits"]]
    for each in advice.candidates:
        seconds = ms(each.seconds), ms(advice.eq10[each.restore])
        memory = mib(each.memory.promised), mib(each.memory.host)
        fits = "yes" if _fits(each, budget) else "no"
        rows.append([pair_name(each.restore), str(each.forward), *seconds, *memory, fits])
    return rows if budget is not None else [row[:-1] for row in rows]


def _fits(candidate: PricedChoice, budget: int | None) -> bool:
    return budget is None or candidate.memory.promised <= budget


def _conclusions(advice: Advice) -> list[str]:
    lines = [f"decision: {_candidate_line(advice.decision)}", f"  {advice.why}"]
    if advice.fastest is not advice.decision:
        lines.append(f"fastest of all: {_candidate_line(advice.fastest)}")
    return lines


def _candidate_line(candidate: PricedChoice) -> str:
    memory = candidate.memory
    on_host = f" and {mib(memory.host)} on the host" if memory.host else ""
    return (
        f"n={candidate.forward}, {pair_name(candidate.restore)}: {ms(candidate.seconds)} ms a step, "
        f"at most {mib(memory.promised)} MiB on the device{on_host}"
    )


def _write_page(args: argparse.Namespace, shape: LayerSizes, profile: Profile, advice: Advice) -> None:
    path = args.html
    with refused_as(f"--html ({path}) must be left out without matplotlib", ImportError):
        pictures = _pictures(args, shape, profile, advice)
    header, *rows = _candidate_rows(advice, args.budget)
    marked = [i for i, each in enumerate(advice.candidates) if each is advice.decision]
    candidates = part("table", header, rows, marked, words=1)
    budget = "" if args.budget is None else f", budget {mib(args.budget)} MiB"
    lines = [line.strip() for line in _conclusions(advice)]
    sentences = [f"{line[:1].upper()}{line[1:]}." for line in lines]
    about = [describe_layer(args, profile.device_type) + budget, f"Profile: {profile}.", *sentences]
    code = part("code", "In Python:", _python(args, advice))
    text = page("pmoe plan", [*about, *pictures, candidates, code])
    with refused_as(f"--html ({path}) must be a file to write", OSError):
        path.write_text(text, encoding="utf-8")


def time_over_memory(advice: Advice, budget: int | None) -> Figure:
    """Every candidate's time over its bytes. Needs matplotlib."""
    points = [
        Point(
            group=pair_name(each.restore),
            label=str(each.forward),
            mib=each.memory.promised / 2**20,
            milliseconds=each.seconds * 1e3,
            chosen=each is advice.decision,
        )
        for each in advice.candidates
    ]
    title = "numbers: n; ringed: the decision" + "; dashed: the budget" * (budget is not None)
    return scatter_figure(points, title, budget)


def _pictures(args: argparse.Namespace, shape: LayerSizes, profile: Profile, advice: Advice) -> list[str]:
    name = f"n={advice.decision.forward}, {pair_name(advice.decision.restore)}"
    bars = {name: step_bars(shape, profile, args.tokens, advice.decision)}
    points = time_over_memory(advice, args.budget)
    figures = {
        "Predicted time of a step over the bytes that no routing exceeds": points,
        f"The schedule of the decision, {name}, as simulated": drawing(bars, "one step, simulated"),
    }
    return [part("picture", inline_svg(figure, about), about) for about, figure in figures.items()]


def _fields(args: argparse.Namespace, path: Path, profile: Profile, advice: Advice) -> dict[str, Any]:
    return {
        **layer_fields(args),
        "slack": args.slack,
        "device": profile.device_type,
        "budget_bytes": args.budget,
        "profile": {"path": str(path), **asdict(profile.identity), "when": profile.when},
        "decision": {**_candidate_fields(advice.decision, advice, args.budget), "why": advice.why},
        "fastest": _candidate_fields(advice.fastest, advice, args.budget),
        "candidates": [_candidate_fields(each, advice, args.budget) for each in advice.candidates],
        "python": _python(args, advice),
    }


def _candidate_fields(each: PricedChoice, advice: Advice, budget: int | None) -> dict[str, Any]:
    return {
        "n": each.forward,
        "restore": str(each.restore),
        "strategy": each.restore.strategy,
        "seconds": each.seconds,
        "eq10_seconds": advice.eq10[each.restore],
        "promised_bytes": each.memory.promised,
        "peak_bytes": each.memory.peak,
        "host_bytes": each.memory.host,
        "fits": _fits(each, budget),
    }
