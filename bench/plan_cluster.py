"""How should a layer run on machines that one does not have? `pmoe plan`, for a file that describes them.

    python bench/plan_cluster.py --cluster cluster.toml --d-model 4096 --d-hidden 14336 --num-experts 8192 \
        --tokens 8192 --top-k 2 --dtype bfloat16

docs/cluster.md says what is in the file and what the answer means. --profile gives what the file leaves out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.cluster import Way, plan_ways, sensitivity
from pmoe.cli.arguments import byte_count, refused_as
from pmoe.cli.layer_arguments import add_layer_sizes, constructor_arguments, describe_layer, python_line
from pmoe.cli.output import mib, ms
from pmoe.measure.profile import load_profile
from pmoe.measure.store import typed
from pmoe.planner.cluster import Cluster, fields_of
from pmoe.planner.cost_model import Interference
from pmoe.planner.profile import Profile
from pmoe.text import table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_cluster(path: Path, profile: Profile | None) -> Cluster:
    """What the file says; of what it leaves out, what ``profile`` tells, which is of a part of the machines.

    Raises ValueError, naming the file, where it cannot be read, where a key is missing, unknown or of no
    such value, and for a profile of other machines.
    """
    with refused_as(f"--cluster ({path}) must be a file to read", OSError, ValueError):
        text = path.read_bytes()
    with refused_as(f"--cluster ({path}) must describe a cluster", ValueError, RecursionError):
        said = tomllib.loads(text.decode())
        _refuse_unknown(Cluster, said, "")
        measured = {} if profile is None else fields_of(profile)
        fields = {"interference": vars(Interference()), "measured": ""} | measured | said
        links = ("inside", "outside")
        for number, (link, unused) in {"machines": links, "ranks_per_machine": links[::-1]}.items():
            if fields.get(number) == 1 and link in fields:
                fields.setdefault(unused, fields[link])
        cluster: Cluster = typed(Cluster, fields, "cluster")
        if profile is not None:
            cluster.check_part(profile)
    return cluster


def _refuse_unknown(kind: Any, said: Mapping[str, Any], within: str) -> None:
    known = typing.get_type_hints(kind)
    for name, value in said.items():
        if name not in known:
            raise ValueError(f"{within}{name} is no key of it: {', '.join(known)} are")
        if isinstance(value, dict) and dataclasses.is_dataclass(known[name]):
            _refuse_unknown(known[name], value, f"{name}.")


# ---- what is printed, as JSON and as cells of a table


def way_fields(way: Way) -> dict[str, Any]:
    num_bytes = {"even_bytes": way.even_bytes, "promised_bytes": way.advice.decision.memory.promised}
    return {**way.name, "seconds": way.seconds, "exposed_seconds": way.exposed_seconds, **num_bytes}


def rows_of(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A header and one row for each; seconds as ms, bytes as MiB, changes in percent."""
    rows = [[name.replace("seconds", "ms").replace("bytes", "MiB").replace("_", " ") for name in found[0]]]
    shown = {"seconds": ms, "bytes": mib, "change": "{:+.1%}".format}
    for each in found:
        cells = ((shown.get(name.rpartition("_")[2], str), value) for name, value in each.items())
        rows.append(["" if value is None else show(value) for show, value in cells])
    return rows


def candidate_fields(way: Way) -> Iterator[dict[str, Any]]:
    """Every n and pair of a way."""
    for each in way.advice.candidates:
        memory = {"promised_bytes": each.memory.promised, "host_bytes": each.memory.host}
        yield {"n": each.forward, "restore": str(each.restore), "seconds": each.seconds, **memory}


def to_copy(args: argparse.Namespace, cluster: Cluster, way: Way) -> str:
    """The layer in Python."""
    took = way.advice.decision
    options: dict[str, Any] = {"memory_reuse": took.restore.strategy or took.restore}
    if way.dispatch != "flat":
        options |= {"dispatch": way.dispatch, "nodes": cluster.ranks_per_machine}
    line = python_line(args, pipeline=took.forward, **options)
    if way.esp == 1:
        return line
    mesh = f"make_meshes(ep={cluster.num_ranks // way.esp}, esp={way.esp}).experts"
    return f"from pmoe.training.parallel import make_meshes\n{line[:-1]}, mesh={mesh})"


# ---- the command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_layer_sizes(made)
    made.add_argument(
        "--cluster", type=Path, metavar="FILE", required=True, help="that describes the machines"
    )
    made.add_argument("--profile", type=Path, metavar="FILE", help="of a part, as `pmoe profile` stores it")
    made.add_argument("--budget", type=byte_count, help="most bytes on the device, such as 2GiB or '500 MB'")
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the answer. Raises SystemExit(2), after a message, for bad arguments."""
    made = parser()
    args = made.parse_args(argv)
    try:
        fields = answer(args)
    except ValueError as error:
        made.error(str(error).replace("memory_budget", "--budget", 1))
    if args.json:
        print(json.dumps(fields))
        return
    print(f"{describe_layer(args, fields['device'])}\ncluster: {args.cluster}\n  {fields['profile']}")
    for name in ("ways", "sensitivity", "candidates"):
        print(f"\n{table(rows_of(fields[name]))}")
    print(f"\ndecision: the first way; {fields['why']}\n{fields['python']}")


def answer(args: argparse.Namespace) -> dict[str, Any]:
    """The ways, the best first, how rates move the answer, candidates of the best way, a line of Python."""
    cluster = load_cluster(args.cluster, None if args.profile is None else profile_of_part(args))
    if args.ranks not in (1, cluster.num_ranks):
        raise ValueError(f"--ranks ({args.ranks}) must be left out, or --cluster's ({cluster.num_ranks})")
    args.ranks = cluster.num_ranks
    options = {"layer": constructor_arguments(args), "num_tokens": args.tokens}
    options |= {"budget": args.budget, "slack": args.slack}
    ways = plan_ways(cluster, **options)
    return {
        "ranks": cluster.num_ranks,
        "device": cluster.device_type,
        "profile": str(ways[0].profile),
        "ways": [*map(way_fields, ways)],
        "sensitivity": list(sensitivity(cluster, ways, **options)),
        "candidates": list(candidate_fields(ways[0])),
        "why": ways[0].advice.why,
        "python": to_copy(args, cluster, ways[0]),
    }


def profile_of_part(args: argparse.Namespace) -> Profile:
    with (
        refused_as(f"--profile ({args.profile}) must be a file to read", OSError),
        refused_as(f"--profile ({args.profile}) must hold a profile", ValueError),
    ):
        profile = load_profile(args.profile)
    if profile.dtype != args.dtype:
        raise ValueError(f"--dtype ({args.dtype}) must be that of --profile {args.profile} ({profile.dtype})")
    return profile


if __name__ == "__main__":
    main()
