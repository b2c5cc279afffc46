"""`pmoe plan`: how to run a layer, by a stored profile, or by the description of machines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pmoe.cli import layer_arguments as layer
from pmoe.cli.arguments import byte_count, refused_as
from pmoe.cli.cluster import load_cluster, rows_of, way_fields
from pmoe.cli.output import Output, mib, ms, pair_name
from pmoe.measure.profile import find_profile, load_profile
from pmoe.planner.candidates import Advice, PricedChoice, advise, step_bars
from pmoe.planner.cluster import plan_ways, sensitivity
from pmoe.planner.drawing import Point, inline_svg, page, part, scatter_figure
from pmoe.planner.profile import Profile
from pmoe.planner.timeline import drawing
from pmoe.text import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "n and the restore pair for a layer, from a stored profile or for machines that a file describes"


class Planned(NamedTuple):
    """What was found for the arguments. path: of the profile, or of the cluster's file.

    ways: the best first; one alone by a profile. moves: how a cluster's rates move the answer.
    """

    args: argparse.Namespace
    path: Path
    ways: Sequence[Advice]
    moves: Sequence[Mapping[str, Any]] = ()

    @property
    def python(self) -> str:
        """The layer, to copy."""
        way, profile, esp = self.ways[0], self.ways[0].profile, self.ways[0].sizes.inside
        restore = way.decision.restore
        options: dict[str, Any] = {"memory_reuse": restore.strategy or restore}
        if way.dispatch != "flat":
            options |= {"dispatch": way.dispatch, "nodes": profile.num_ranks // profile.num_nodes}
        line = layer.python_line(self.args, pipeline=way.decision.forward, **options)
        if esp == 1:
            return line
        mesh = f"make_meshes(ep={profile.num_ranks // esp}, esp={esp}).experts"
        return f"from pmoe.training.parallel import make_meshes\n{line[:-1]}, mesh={mesh})"


def add_arguments(command: argparse.ArgumentParser) -> None:
    layer.add_layer_sizes(command)
    add = command.add_argument
    add("--budget", type=byte_count, help="most bytes on the device, such as 2GiB or '500 MB'")
    add("--profile", type=Path, metavar="FILE", help="default: the stored one that fits")
    add("--folder", type=Path, help="of stored profiles (default $PMOE_CACHE, ~/.cache/pmoe)")
    described = "machines that one does not have (docs/cluster.md); what it leaves out is that of --profile"
    add("--cluster", type=Path, metavar="FILE", help=described)
    add("--html", type=Path, metavar="FILE", help="also write one page with pictures")


def run_command(args: argparse.Namespace) -> Output:
    try:
        planned = _by_profile(args) if args.cluster is None else _for_cluster(args)
    except ValueError as error:
        raise ValueError(str(error).replace("memory_budget", "--budget", 1)) from None
    if args.html is not None:
        _write_page(planned)
    return Output(_fields(planned), _lines(planned))


def _by_profile(args: argparse.Namespace) -> Planned:
    layer.layer_shape(args, "cpu")  # bad sizes first
    if args.profile is None:
        path, profile = find_profile(args.folder, num_ranks=args.ranks, dtype=args.dtype)
    else:
        path, profile = args.profile, _named_profile(args, "ranks", "dtype")
    sizes = layer.layer_shape(args, profile.device_type)
    advice = advise(sizes, profile, args.tokens, budget=args.budget, slack=args.slack)
    return Planned(args, path, [advice])


def _for_cluster(args: argparse.Namespace) -> Planned:
    cluster = load_cluster(args.cluster, None if args.profile is None else _named_profile(args, "dtype"))
    if args.ranks not in (1, cluster.num_ranks):
        raise ValueError(f"--ranks ({args.ranks}) must be left out, or --cluster's ({cluster.num_ranks})")
    args.ranks = cluster.num_ranks
    options = {"layer": layer.constructor_arguments(args), "num_tokens": args.tokens}
    options |= {"budget": args.budget, "slack": args.slack}
    ways = plan_ways(cluster, **options)
    return Planned(args, args.cluster, ways, list(sensitivity(cluster, ways, **options)))


def _named_profile(args: argparse.Namespace, *must_agree: str) -> Profile:
    with (
        refused_as(f"--profile ({args.profile}) must be a file to read", OSError),
        refused_as(f"--profile ({args.profile}) must hold a profile", ValueError),
    ):
        profile = load_profile(args.profile)
    held_of = {"ranks": profile.num_ranks, "dtype": profile.dtype}
    for name in must_agree:
        asked, held = getattr(args, name), held_of[name]
        if asked != held:
            raise ValueError(f"--{name} ({asked}) must be that of --profile {args.profile} ({held})")
    return profile


def _lines(planned: Planned) -> Iterator[str]:
    args, way = planned.args, planned.ways[0]
    yield layer.describe_layer(args, way.profile.device_type)
    yield f"{'cluster' if planned.moves else 'profile'}: {planned.path}\n  {way.profile}\n"
    for rows, marked in _tables(planned):
        yield table([row + ["<-"] * (i - 1 in marked) for i, row in enumerate(rows)]) + "\n"
    yield from _conclusions(way)
    if args.html is not None:
        yield f"wrote {args.html}"
    yield "  " + planned.python.replace("\n", "\n  ")


def _tables(planned: Planned) -> Iterator[tuple[list[list[str]], list[int]]]:
    """The rows of each, a header first, and which of them are marked."""
    if planned.moves:
        yield rows_of([*map(way_fields, planned.ways)]), [0]
        yield rows_of(planned.moves), []
    advice = planned.ways[0]
    marked = [i for i, each in enumerate(advice.candidates) if each is advice.decision]
    yield (
        rows_of([_candidate_fields(each, advice, planned.args.budget) for each in advice.candidates]),
        marked,
    )


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


def _write_page(planned: Planned) -> None:
    args, way, path = planned.args, planned.ways[0], planned.args.html
    with refused_as(f"--html ({path}) must be left out without matplotlib", ImportError):
        pictures = _pictures(planned)
    tables = [part("table", *(rows[0], rows[1:], marked), words=1) for rows, marked in _tables(planned)]
    budget = "" if args.budget is None else f", budget {mib(args.budget)} MiB"
    lines = [line.strip() for line in _conclusions(way)]
    sentences = [f"{line[:1].upper()}{line[1:]}." for line in lines]
    about = [
        layer.describe_layer(args, way.profile.device_type) + budget,
        f"Profile: {way.profile}.",
        *sentences,
    ]
    code = part("code", "In Python:", planned.python)
    text = page("pmoe plan", [*about, *pictures, *tables, code])
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


def _pictures(planned: Planned) -> list[str]:
    args, advice = planned.args, planned.ways[0]
    name = f"n={advice.decision.forward}, {pair_name(advice.decision.restore)}"
    bars = {name: step_bars(advice.sizes, advice.profile, args.tokens, advice.decision)}
    points = time_over_memory(advice, args.budget)
    figures = {
        "Predicted time of a step over the bytes that no routing exceeds": points,
        f"The schedule of the decision, {name}, as simulated": drawing(bars, "one step, simulated"),
    }
    return [part("picture", inline_svg(figure, about), about) for about, figure in figures.items()]


def _fields(planned: Planned) -> dict[str, Any]:
    args, profile, advice = planned.args, planned.ways[0].profile, planned.ways[0]
    return {
        **layer.layer_fields(args),
        "slack": args.slack,
        "device": profile.device_type,
        "budget_bytes": args.budget,
        "profile": {"path": str(planned.path), **asdict(profile.identity), "when": profile.when},
        "decision": {**_candidate_fields(advice.decision, advice, args.budget), "why": advice.why},
        "fastest": _candidate_fields(advice.fastest, advice, args.budget),
        "candidates": [_candidate_fields(each, advice, args.budget) for each in advice.candidates],
        "python": planned.python,
        "ways": [*map(way_fields, planned.ways)],
        "sensitivity": planned.moves,
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
