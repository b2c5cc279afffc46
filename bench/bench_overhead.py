"""What does a call cost the host, whatever its tensors? On a GPU this is the time to launch it.

    python bench/bench_overhead.py [--against /path/to/another/clone] [--rounds 12] [--calls 40]

One rank of gloo with one thread, 64 tokens, d_model 16, d_hidden 32, one expert, top-1. Every row is sent to
the rank itself. Three clocks are read: CPU seconds of the calling thread, CPU seconds of the process (gloo's
threads included), and elapsed seconds. A time is the median, over the rounds, of a round's median call.

With ``--against``, two versions run in alternating rounds, each in a process of its own. A ratio is the
median over the rounds of (this version / the other).

Operations are those that torch dispatches. Views are the operations that only return a part of their
argument. An operation belongs to the innermost file of pmoe on the stack, or to autograd if there is none. A
file's milliseconds are its share of a call under ``sys.setprofile``, times the thread's CPU time of a call
without it.

No pass can take less time than its operators. So they are called once more on the same tensors, one after the
other in a plain loop without autograd: "operators ms" is the thread's CPU time of these calls, and "messages
ms" that of the all-to-alls and their waits. Both are lower bounds: the caches are warmer than in a call.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent.parent
TOKENS, D_MODEL, D_HIDDEN = 64, 16, 32
CASES: dict[str, dict[str, Any]] = {
    "n=4, S4": {"pipeline": 4, "memory_reuse": "S4"},
    "n=1": {"pipeline": 1},
}
PASSES = ("forward", "backward")
COUNTS = ("tasks", "operations", "views")
WARMUP = 20
ANSWER = "answer: "
MAX_FILES = 14

CLOCKS: dict[str, Callable[[], float]] = {
    "thread": time.thread_time,
    "process": time.process_time,
    "wall": time.perf_counter,
}


# ---- in the process of one version


class Counting(TorchDispatchMode):
    """Counts the dispatched operations by file of pmoe, and how many of them are views."""

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package
        self.by_file: collections.Counter[str] = collections.Counter()
        self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_file[owner_of(sys._getframe(1), self.package) or "autograd"] += 1
        returned = [result.alias_info for result in func._schema.returns]
        self.views += any(alias is not None and not alias.is_write for alias in returned)
        return func(*args, **(kwargs or {}))


def owner_of(frame: FrameType | None, package: str) -> str | None:
    """Returns the path, in the package, of the innermost file of the package on the stack; None if none
    is.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(package):
            return name[len(package) :]
        frame = frame.f_back
    return None


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function with its arguments."""


class Recording(TorchDispatchMode):
    """Records the dispatched operations with their arguments, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def shortest(call: Call) -> Call:
    """Returns the call by a function of torch that dispatches exactly this operation.

    Such functions take less time than the operation's own object, which reads its arguments in Python. An
    operation without such a function is returned unchanged.
    """
    operation, args, kwargs = call
    given = {name: value for name, value in kwargs.items() if value is not None}
    name = operation._schema.name.partition("::")[2]
    for owner in (Tensor, torch, torch._C._nn):
        function = getattr(owner, name, None)
        if not callable(function):
            continue
        try:
            with Recording() as recording:
                function(*args, **given)
        except Exception:  # the function takes other arguments than the operation
            continue
        if [recorded for recorded, _, _ in recording.calls] == [operation]:
            return function, args, given
    return call


def send(call: Call) -> None:
    """Runs a recorded all-to-all by torch.distributed's function, and waits for it."""
    _, (out, rows, _, recv_rows, send_rows, *_), _ = call
    dist.all_to_all_single(out, rows, list(recv_rows), list(send_rows), async_op=True).wait()


@torch.no_grad()
def seconds_alone(recording: Recording, calls: int) -> dict[str, float]:
    """Returns the median seconds in which the recorded operators, and the messages, run by themselves."""
    messages = [call for call in recording.calls if call[0].namespace == "c10d"]
    operators = [shortest(call) for call in recording.calls if call[0].namespace != "c10d"]
    seconds: dict[str, list[float]] = {"operators": [], "messages": []}
    for _ in range(calls):
        begin = time.thread_time()
        for function, args, kwargs in operators:
            function(*args, **kwargs)
        middle = time.thread_time()
        for call in messages:
            send(call)
        seconds["operators"].append(middle - begin)
        seconds["messages"].append(time.thread_time() - middle)
    return {kind: median(samples) for kind, samples in seconds.items()}


class Clocked:
    """Adds up the seconds that each file of the package takes, as a function for ``sys.setprofile``.

    A moment counts for the innermost file of the package on the stack, or for "autograd" if there is none.
    """

    def __init__(self, package: str) -> None:
        self.package, self.seconds = package, collections.Counter[str]()
        self._owners, self._since = ["autograd"], time.thread_time()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "return"):
            return
        now = time.thread_time()
        self.seconds[self._owners[-1]] += now - self._since
        if event == "call":
            name = frame.f_code.co_filename
            ours = name.startswith(self.package)
            self._owners.append(name[len(self.package) :] if ours else self._owners[-1])
        elif len(self._owners) > 1:
            self._owners.pop()
        self._since = time.thread_time()


class Subject:
    """The layers of one version of pmoe, which are measured."""

    def __init__(self, root: str) -> None:
        sys.path.insert(0, root)
        import pmoe

        self.pmoe, self.package = pmoe, str(Path(pmoe.__file__).parent) + "/"
        torch.set_num_threads(1)
        store = Path(tempfile.mkdtemp(prefix="pmoe-overhead-")) / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        torch.manual_seed(0)
        self.layers = {name: all_travel(pmoe, options) for name, options in CASES.items()}
        self.x = torch.randn(TOKENS, D_MODEL).requires_grad_()
        self.dy = torch.randn(TOKENS, D_MODEL)

    def facts(self) -> dict[str, Any]:
        """Returns, for each case and pass, the numbers of tasks, operations, views, and operations by
        file.
        """
        return {name: self._facts(name) for name in CASES}

    def _facts(self, case: str) -> dict[str, Any]:
        self._step(case)
        with self.pmoe.recording() as journal:
            self._step(case)
        if not any(span.name == "S0" for span in journal.spans):
            sys.exit(f"bench_overhead: {case} sends no rows, see all_travel in {__file__}")
        tasks = collections.Counter(span.direction for span in journal.spans)
        facts: dict[str, Any] = {}

        @contextmanager
        def counted(name: str) -> Iterator[None]:
            with Counting(self.package) as counting:
                yield
            facts[name] = {
                "tasks": tasks[name],
                "operations": sum(counting.by_file.values()),
                "views": counting.views,
                "operations by file": dict(counting.by_file.most_common()),
            }

        self._step(case, counted)
        return facts

    def times(self, calls: int) -> dict[str, Any]:
        """Returns the median seconds of a number of calls, for each case, pass and clock."""
        samples: dict[str, Any] = {
            case: {name: {clock: [] for clock in CLOCKS} for name in PASSES} for case in CASES
        }
        for _ in range(calls):
            for case in CASES:
                self._step(case, lambda name, of=samples[case]: timed(of[name]))
        return {
            case: {
                name: {clock: median(seconds) for clock, seconds in clocks.items()}
                for name, clocks in of.items()
            }
            for case, of in samples.items()
        }

    def shares(self, calls: int) -> dict[str, Any]:
        """Returns, for each case and pass, the share of a call's time that each file takes.

        The times are those under ``sys.setprofile``.
        """
        shares: dict[str, Any] = {}
        for case in CASES:
            clocked = {name: Clocked(self.package) for name in PASSES}

            @contextmanager
            def profiled(name: str, of: dict[str, Clocked] = clocked) -> Iterator[None]:
                of[name]._since = time.thread_time()
                sys.setprofile(of[name])
                yield
                sys.setprofile(None)

            for _ in range(calls):
                self._step(case, profiled)
            shares[case] = {name: watch.seconds for name, watch in clocked.items()}
            for seconds in shares[case].values():
                total = sum(seconds.values())
                for file in seconds:
                    seconds[file] /= total
        return shares

    def alone(self, calls: int) -> dict[str, Any]:
        """Returns, for each case and pass, the median seconds of its operators and of its messages alone."""
        found: dict[str, Any] = {}
        for case in CASES:
            recordings: dict[str, Recording] = {}

            @contextmanager
            def recorded(name: str, of: dict[str, Recording] = recordings) -> Iterator[None]:
                with Recording() as of[name]:
                    yield

            self._step(case, recorded)
            found[case] = {name: seconds_alone(recording, calls) for name, recording in recordings.items()}
        return found

    def _step(self, case: str, around: Callable[[str], Any] | None = None) -> None:
        layer = self.layers[case]
        layer.zero_grad(set_to_none=True)
        self.x.grad = None
        y = _in(around, "forward", lambda: layer(self.x))
        _in(around, "backward", lambda: y.backward(self.dy))


def _in(around: Callable[[str], Any] | None, name: str, function: Callable[[], Tensor]) -> Tensor:
    if around is None:
        return function()
    with around(name):
        return function()


@contextmanager
def timed(samples: dict[str, list[float]]) -> Iterator[None]:
    begin = {clock: now() for clock, now in CLOCKS.items()}
    yield
    for clock, now in CLOCKS.items():
        samples[clock].append(now() - begin[clock])


def all_travel(pmoe: Any, options: dict[str, Any]) -> Any:
    """Returns a layer that sends all rows, also those to its own rank, in any version of pmoe.

    Older versions have an argument of the constructor for this, newer ones a switch.
    """
    sizes = (D_MODEL, D_HIDDEN, 1, 1)
    try:
        return pmoe.MoELayer(*sizes, bypass_local=False, **options)
    except TypeError:
        layer = pmoe.MoELayer(*sizes, **options)
        layer.switches = replace(layer.switches, bypass_local=False)
        return layer


def serve(root: str) -> None:
    """Runs in a measuring process: reads requests from stdin, and prints the answers.

    A request is a line with a JSON list: the name of a method of `Subject`, and its arguments.

    root: folder of the version of pmoe.
    """
    subject = Subject(root)
    subject.times(WARMUP)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        print(ANSWER + json.dumps(getattr(subject, what)(*arguments)), flush=True)


# ---- in the process that compares


class Version:
    """A version of pmoe, which is measured in a process of its own (`serve`)."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, arguments]) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        sys.exit(f"bench_overhead: the process of a version ended with {self.process.wait()}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(roots: dict[str, Path], rounds: int, calls: int) -> dict[str, Any]:
    """Measures all versions. Returns for each version the facts, the shares, and the times of each round.

    The versions take turns to begin a round.

    roots: by name of a version, its folder.
    """
    versions = {name: Version(root) for name, root in roots.items()}
    results: dict[str, Any] = {name: {"facts": version.ask("facts")} for name, version in versions.items()}
    samples: dict[str, list[Any]] = {name: [] for name in versions}
    names = list(versions)
    for round_ in range(rounds):
        print(f"round {round_ + 1} of {rounds}", file=sys.stderr, flush=True)
        for turn in range(len(names)):
            name = names[(turn + round_) % len(names)]
            samples[name].append(versions[name].ask("times", calls))
    for name, version in versions.items():
        results[name] |= {"times": samples[name], "shares": version.ask("shares", 2 * calls)}
        results[name] |= {"alone": version.ask("alone", 2 * calls)}
        version.close()
    return results


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the table: one row for each case, pass and version; with two versions also their ratios."""
    rows = []
    for case in CASES:
        for name in PASSES:
            place = {"layer": case, "pass": name}
            rows += [{**place, "version": version, **_row(of, case, name)} for version, of in results.items()]
            if len(results) == 2:
                this, other = results.values()
                rows.append({**place, "version": "this / other", **_ratios(this, other, case, name)})
    return rows


def _row(of: dict[str, Any], case: str, name: str) -> dict[str, Any]:
    facts = of["facts"][case][name]
    times = {f"{clock} ms": 1e3 * median(series(of, case, name, clock)) for clock in CLOCKS}
    alone = {f"{kind} ms": 1e3 * seconds for kind, seconds in of["alone"][case][name].items()}
    return {key: facts[key] for key in COUNTS} | times | alone


def _ratios(this: dict[str, Any], other: dict[str, Any], case: str, name: str) -> dict[str, Any]:
    own_facts, other_facts = (version["facts"][case][name] for version in (this, other))
    row = {key: own_facts[key] / other_facts[key] for key in COUNTS}
    for clock in CLOCKS:
        rounds = zip(series(this, case, name, clock), series(other, case, name, clock), strict=True)
        row[f"{clock} ms"] = median(a / b for a, b in rounds)
    for kind, seconds in this["alone"][case][name].items():
        row[f"{kind} ms"] = seconds / other["alone"][case][name][kind]
    return row


def series(of: dict[str, Any], case: str, name: str, clock: str) -> list[float]:
    """Returns the seconds of each round, for one case, pass and clock."""
    return [round_[case][name][clock] for round_ in of["times"]]


def by_file(of: dict[str, Any], case: str) -> list[dict[str, Any]]:
    """Returns the operations and the milliseconds of each file for one case, the slowest file first."""
    rows: dict[str, dict[str, Any]] = {}
    for name in PASSES:
        shares, counts = of["shares"][case][name], of["facts"][case][name]["operations by file"]
        whole = 1e3 * median(series(of, case, name, "thread"))
        for file in {*shares, *counts}:
            row = rows.setdefault(
                file, {"file": file} | {f"{c} {p}": 0 for p in PASSES for c in ("ops", "ms")}
            )
            row |= {f"ops {name}": counts.get(file, 0), f"ms {name}": whole * shares.get(file, 0.0)}
    return sorted(rows.values(), key=lambda row: -sum(row[f"ms {name}"] for name in PASSES))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another clone of pmoe, run in turn with this one")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=40, help="of each layer in a round")
    parser.add_argument("--out", type=Path, help="folder of the results; none by default")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    sys.path.insert(0, str(HERE))  # run from a clone without installing
    from bench.timing import machine, table, write_json

    if arguments.against and not (arguments.against / "pmoe").is_dir():
        parser.error(f"--against ({arguments.against}) must be the folder of another clone of pmoe")
    roots = {"this": HERE} | ({"other": arguments.against.resolve()} if arguments.against else {})
    results = measure(roots, arguments.rounds, arguments.calls)
    rows = rows_of(results)
    print(f"{machine()}\nmedians of {arguments.rounds} rounds of {arguments.calls} calls")
    for name, root in roots.items():
        print(f"{name}: {root}")
    print(table(rows))
    for name, of in results.items():
        for case in CASES:
            print(f"\n{case}, {name}: operations and thread time by file")
            print(table(by_file(of, case)[:MAX_FILES]))
    if arguments.out:
        path = arguments.out / "overhead.json"
        write_json(path, roots={name: str(root) for name, root in roots.items()}, rows=rows, found=results)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
