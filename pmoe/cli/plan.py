"""`pmoe plan`: chooses how to run a layer, from a measured profile or from a described cluster.

The choice is n, the number of chunks (micro-batches), and the restore pair, which says how backward gets the
dispatched rows (T_DI) and the hidden activation (T_M) of forward: kept, offloaded or made again. For a
described cluster it is also the all-to-all, and the number of ranks that share each expert (the ESP degree).
Nothing runs: all times and bytes are predicted.

A plan (`Advice`) has the best n and restore pair for one combination of an all-to-all and an ESP degree.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pmoe.arguments import check_int
from pmoe.cli import layer_arguments as layer
from pmoe.cli.arguments import add_allow, byte_count, refused_as
from pmoe.cli.cluster import load_cluster
from pmoe.cli.output import Output, by_key, mib, pair_name
from pmoe.measure.profile import find_profile, load_profile
from pmoe.planner.cluster import Cluster, links_of
from pmoe.planner.cluster_candidates import plan_combinations, sensitivity
from pmoe.planner.copy_price import copy_prices
from pmoe.planner.drawing import Point, inline_svg, part, scatter_figure, template
from pmoe.planner.priced_choices import Advice, PricedChoice, step_bars
from pmoe.planner.profile import Profile
from pmoe.planner.timeline import drawing
from pmoe.text import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "choose n and the restore pair for a layer, by a stored profile or for machines in a file"


def add_arguments(command: argparse.ArgumentParser) -> None:
    layer.add_layer_sizes(command)
    add = command.add_argument
    copies = "copies of busy experts on a rank (default 0); without --budget as if later calls use the copies"
    add("--budget", type=byte_count, help="limit of bytes on the device, such as 2GiB or '500 MB'")
    add("--balance", type=int, default=0, metavar="K", help=copies)
    add_allow(add)
    add("--profile", type=Path, metavar="FILE", help="profile to use (default: the stored one that fits)")
    add("--folder", type=Path, help="folder of stored profiles (default $PMOE_CACHE, ~/.cache/pmoe)")
    described = "machines that you do not have (docs/cluster.md); --profile fills in what it leaves out"
    add("--cluster", type=Path, metavar="FILE", help=described)
    add("--html", type=Path, metavar="FILE", help="also write a page with pictures to this file")


def run_command(args: argparse.Namespace) -> Output:
    """Returns the best n (number of chunks) and restore pair for a layer, and a table of all candidates.

    A restore pair says how backward gets the dispatched rows (T_DI) and the hidden activation (T_M) of
    forward. For a described cluster, the output has two more tables. One compares all-to-alls and ESP degrees
    (numbers of ranks that share each expert). The other says how the choice would change if a rate of the
    cluster were lower or higher.
    """
    layer.layer_shape(args, "cpu")  # called for its error about wrong sizes, before any file is read
    check_int(0, **{"--balance": args.balance})
    path, rates = _rates(args)
    others = args.num_experts - args.num_experts // args.ranks
    if args.balance > others:
        raise ValueError(
            f"--balance ({args.balance}) must be at most {others}, the number of experts of the other ranks"
        )
    options = {"layer": layer.constructor_arguments(args), "num_tokens": args.tokens}
    options |= {"budget": args.budget, "slack": args.slack, "copies": args.balance, "allow": args.allow}
    try:
        plans = plan_combinations(rates, **options)
    except ValueError as error:
        raise ValueError(str(error).replace("memory_budget", "--budget", 1)) from None
    advice = plans[0]
    # With a budget, a layer keeps no copies for later calls.
    copies_may_stay = args.balance > 0 and args.budget is None
    fields = {
        **layer.layer_fields(args),
        "slack": args.slack,
        "device": advice.profile.device_type,
        "budget_bytes": args.budget,
        "allow": args.allow,
        "balance": args.balance,
        "copy_price_rows": _copy_prices(advice, rates, stay=False) if args.balance else None,
        "kept_copy_price_rows": _copy_prices(advice, rates, stay=True) if copies_may_stay else None,
        "profile": {"path": str(path), **asdict(advice.profile.identity), "when": advice.profile.when},
        "ways": [*map(_advice_fields, plans)],
        "sensitivity": list(sensitivity(rates, plans, **options)) if isinstance(rates, Cluster) else [],
        "decision": {**_candidate_fields(advice.decision, advice, args.budget), "why": advice.why},
        "fastest": _candidate_fields(advice.fastest, advice, args.budget),
        "candidates": [_candidate_fields(candidate, advice, args.budget) for candidate in advice.candidates],
        "python": _python(args, advice),
    }
    if args.html is not None:
        _write_page(args, advice, fields)
    return Output(fields, _lines(args, advice, fields))


def _copy_prices(advice: Advice, rates: Profile | Cluster, *, stay: bool) -> tuple[int, int]:
    """Returns the prices of a copy of a busy expert on its owner's node and on another node, in rows.

    The price of a copy is the number of rows that a rank could compute while the copy is sent. A copy pays
    for itself if it saves the busiest rank more rows than its price.

    advice: the sizes of the layer, and the profile.
    rates: the measured profile, or the described cluster.
    stay: whether later calls use the copy again, so that backward does not send it again.
    """
    sizes = advice.sizes
    expert_elements = sizes.d_model * (sizes.columns.hidden + sizes.columns.scratch)
    return copy_prices(
        advice.profile,
        rates.links if isinstance(rates, Cluster) else links_of(rates),
        multiply_adds=expert_elements,
        row_bytes=sizes.d_model * sizes.element_size,
        expert_bytes=expert_elements * sizes.element_size,
        num_ranks=sizes.num_ranks,
        trains=True,
        restore=advice.decision.restore,
        stay=stay,
    )


def _rates(args: argparse.Namespace) -> tuple[Path, Profile | Cluster]:
    """Returns (path of the file with the rates, the rates: a measured profile or a described cluster).

    Without --profile and --cluster, the rates are those of the stored profile for this dtype and number of
    ranks. With --cluster but without --ranks, ``args.ranks`` becomes the cluster's number of ranks.

    Raises ValueError if --ranks is not the number of ranks of the profile or cluster.
    """
    if args.profile is None and args.cluster is None:
        return find_profile(args.folder, num_ranks=args.ranks, dtype=args.dtype)
    rates: Profile | Cluster
    if args.cluster is None:
        path = args.profile
        rates = _named_profile(args)
    else:
        of_part = None if args.profile is None else _named_profile(args)
        path = args.cluster
        rates = load_cluster(args.cluster, of_part)
        args.ranks = rates.num_ranks if args.ranks == 1 else args.ranks
    if args.ranks != rates.num_ranks:
        raise ValueError(f"--ranks ({args.ranks}) must be the number of ranks in {path} ({rates.num_ranks})")
    return path, rates


def _named_profile(args: argparse.Namespace) -> Profile:
    """Returns the profile in the file --profile.

    Raises ValueError if the file cannot be read, holds no valid profile, or one of another dtype.
    """
    path = args.profile
    with (
        refused_as(f"--profile ({path}) must be a file to read", OSError),
        refused_as(f"--profile ({path}) must hold a profile", ValueError),
    ):
        profile = load_profile(path)
    if args.dtype != profile.dtype:
        raise ValueError(f"--dtype ({args.dtype}) must be the dtype of --profile {path} ({profile.dtype})")
    return profile


def _python(args: argparse.Namespace, advice: Advice) -> str:
    """Returns the Python code that builds the layer with the chosen options, so that a user can copy it.

    args: the options of the command.
    advice: the chosen all-to-all, ESP degree (number of ranks that share each expert), n and restore pair.
    """
    profile = advice.profile
    esp = advice.sizes.esp_size
    restore = advice.decision.restore
    options: dict[str, Any] = {"memory_reuse": restore.strategy or restore}
    if advice.dispatch != "flat":
        options |= {"dispatch": advice.dispatch, "nodes": profile.num_ranks // profile.num_nodes}
    options["balance"] = args.balance or None
    if args.balance:  # without the budget, the layer would keep copies, whose bytes the plan did not count
        options["memory_budget"] = args.budget
    line = layer.python_line(args, pipeline=advice.decision.forward, **options)
    if esp == 1:
        return line
    mesh = f"make_meshes(ep={profile.num_ranks // esp}, esp={esp}).experts"
    return f"from pmoe.training.parallel import make_meshes\n{line[:-1]}, mesh={mesh})"


def _tables(advice: Advice, fields: Mapping[str, Any]) -> Iterator[tuple[list[list[str]], int | None]]:
    """Yields the tables of the output, each as a pair (rows of cells, index of the row to highlight).

    The first row of cells is the header. Index 0 is the row below the header; None highlights no row.

    advice: the chosen all-to-all and ESP degree (number of ranks that share each expert), with its
        candidates.
    fields: the JSON output.
    """
    if fields["sensitivity"]:
        yield by_key(fields["ways"]), 0
        yield by_key(fields["sensitivity"]), None
    yield by_key(fields["candidates"]), advice.candidates.index(advice.decision)


def _lines(args: argparse.Namespace, advice: Advice, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of the output: the layer, the profile, the tables, the decision, and Python code.

    args: the options of the command.
    advice: the chosen all-to-all and ESP degree (number of ranks that share each expert), with the decision
        about n (number of chunks) and the restore pair.
    fields: the JSON output.
    """
    yield layer.describe_layer(args, fields["device"])
    yield f"rates: {fields['profile']['path']}\n  {advice.profile}\n"
    for rows, marked in _tables(advice, fields):
        yield table([[*row, "<-" * (i - 1 == marked)] for i, row in enumerate(rows)]) + "\n"
    yield from _conclusions(advice)
    yield from _about_copies(fields)
    if args.html is not None:
        yield f"wrote {args.html}"
    yield fields["python"]


def _conclusions(advice: Advice) -> list[str]:
    """Returns lines of text: the decision, its reason, and the fastest candidate if it was not chosen.

    The fastest candidate is not chosen if it exceeds the memory budget. It may also not be chosen if Eq. 10
    of the MPipeMoE paper, and not the simulated times, decides on the restore pair.

    advice: the chosen all-to-all and ESP degree (number of ranks that share each expert), with its
        candidates.
    """
    lines = [f"decision: {advice.decision}", advice.why]
    return lines + [f"fastest of all: {advice.fastest}"] * (advice.fastest is not advice.decision)


def _about_copies(fields: Mapping[str, Any]) -> list[str]:
    """Returns lines of text that say when a copy of a busy expert pays for itself; [] without --balance.

    fields: the JSON output.
    """
    if not fields["balance"]:
        return []
    once = fields["copy_price_rows"]
    kept = fields["kept_copy_price_rows"]
    lines = [
        f"a copy of a busy expert pays if it saves the busiest rank more than {_prices(once)}; the bytes "
        f"count {fields['balance']} on each rank"
    ]
    if kept not in (None, once):
        lines.append(
            "a copy that later calls use again (gradient accumulation) pays if it saves the busiest rank "
            f"more than {_prices(kept)}; the later calls pay nothing for it"
        )
    return lines


def _prices(rows: tuple[int, int]) -> str:
    """Returns the prices of a copy on its owner's node and on another node as text. Example: "5 rows"."""
    near, far = rows
    return f"{near} rows" + (f" ({far} on another node)" if far != near else "")


def _write_page(args: argparse.Namespace, advice: Advice, fields: Mapping[str, Any]) -> None:
    """Writes the HTML page of --html: the output with pictures.

    args: the options of the command.
    advice: the chosen all-to-all and ESP degree (number of ranks that share each expert), with its
        candidates.
    fields: the JSON output.

    Raises ValueError if matplotlib is not installed or the file cannot be written.
    """
    path = args.html
    with refused_as(f"--html ({path}) needs matplotlib: install it, or leave the option out", ImportError):
        pictures = _pictures(advice, args.budget)
    tables = [
        part("table", head, rows, [marked], words=1) for (head, *rows), marked in _tables(advice, fields)
    ]
    budget = "" if args.budget is None else f", budget {mib(args.budget)} MiB"
    lines = [*_conclusions(advice), *_about_copies(fields)]
    sentences = [f"{line[:1].upper()}{line[1:]}." for line in lines]
    described = layer.describe_layer(args, fields["device"]) + budget
    code = part("code", "In Python:", fields["python"])
    parts = [described, f"Profile: {advice.profile}.", *sentences, *pictures, *tables, code]
    text = template().render(title="pmoe plan", parts=parts).strip() + "\n"
    with refused_as(f"--html ({path}) must be a file to write", OSError):
        path.write_text(text, encoding="utf-8")


def time_over_memory(advice: Advice, budget: int | None) -> Figure:
    """Draws a figure with one point for each candidate: time upwards, bytes to the right. Needs matplotlib.

    advice: the candidates and the decision.
    budget: limit of bytes, drawn as a line; None for none.
    """
    points = [
        Point(
            group=pair_name(candidate.restore),
            label=str(candidate.forward),
            mib=candidate.memory.promised / 2**20,
            milliseconds=candidate.seconds * 1e3,
            chosen=candidate is advice.decision,
        )
        for candidate in advice.candidates
    ]
    title = "simulated; numbers: n; ringed: the decision" + "; dashed: the budget" * (budget is not None)
    return scatter_figure(points, title, budget)


def _pictures(advice: Advice, budget: int | None) -> list[str]:
    """Returns the two pictures of the report as HTML.

    The first shows the time of each candidate over its bytes. The second is a timeline of the chosen
    schedule.

    advice: the candidates and the decision.
    budget: limit of bytes; None for none.
    """
    name = f"n={advice.decision.forward}, {pair_name(advice.decision.restore)}"
    bars = {name: step_bars(advice.sizes, advice.profile, advice.num_tokens, advice.decision)}
    points = time_over_memory(advice, budget)
    figures = {
        "Predicted time of a step over the bytes that no routing exceeds": points,
        f"The schedule of the decision, {name}, as simulated": drawing(bars, "one step, simulated"),
    }
    return [part("picture", inline_svg(figure, about), about) for about, figure in figures.items()]


def _advice_fields(advice: Advice) -> dict[str, Any]:
    """Returns a row of the table that compares all-to-alls and ESP degrees, as values by column name.

    An ESP degree is the number of ranks that share each expert. The row has the best n (number of chunks) and
    restore pair, predicted seconds and bytes.

    advice: the predictions for one all-to-all and ESP degree.
    """
    num_bytes = {"even_bytes": advice.even_bytes, "promised_bytes": advice.decision.memory.promised}
    return {**advice.choice_fields, "exposed_seconds": advice.exposed_seconds, **num_bytes}


def _candidate_fields(candidate: PricedChoice, advice: Advice, budget: int | None) -> dict[str, Any]:
    """Returns a row of the table of candidates, as values by column name.

    candidate: the candidate: n (number of chunks) and restore pair, with predicted seconds and bytes.
    advice: the advice to which the candidate belongs.
    budget: limit of bytes; None for none.
    """
    return {
        "restore": str(candidate.restore),
        "strategy": candidate.restore.strategy,
        "n": candidate.forward,
        "seconds": candidate.seconds,
        "eq10_seconds": advice.eq10[candidate.restore],
        "promised_bytes": candidate.memory.promised,
        "peak_bytes": candidate.memory.peak,
        "host_bytes": candidate.memory.host,
        "fits": budget is None or candidate.memory.promised <= budget,
    }
