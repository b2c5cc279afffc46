"""Which kernel computes a product: each candidate is asked why not; of two that would, the faster is taken.

A `Request` describes one product. By rule, without any measurement:

    in deterministic mode   the first willing candidate, in the order of priority: on every rank and in every
                            run the same; nothing is measured, read or written
    settled                 the faster of the two that compete, as `Registry.settle` measured or found it
    not settled             the baseline where it is willing, else the first willing: a kernel that nobody has
                            timed never takes the baseline's place

`Registry.settle` is collective, and what it settles is the same on every rank: see there. It keeps its
results in one file for each device, torch and build of the kernels, in $PMOE_CACHE or ~/.cache/pmoe. With
PMOE_LOG_KERNELS=1 every choice is logged once for each request, by the logger "pmoe".
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

from pmoe.kernels.architecture import Architecture, build_id, loaded_architecture

log = logging.getLogger("pmoe")

FORMAT = 1
"""Of the file. Rises with every change of what a field means."""

TIE = 0.01
"""Within this part of the baseline's seconds the baseline is taken."""

WARM_UP, LEAST_ROUNDS, MOST_ROUNDS, SPAN_SECONDS = 2, 3, 15, 0.03
"""How often each candidate runs before it counts; how often it counts, within about so many seconds."""

LEAD_CYCLES = 3_000_000
"""The device sleeps so long, some 2 ms, while the host enqueues what is timed: the device's time counts."""

Form = Literal["forward", "input", "weight"]
Piece = Callable[[], object]

Agree = Callable[[Sequence[float]], list[float]]
"""Of each value the largest that a rank has, exactly (float64). Collective: every rank gives as many."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One product of a layer: rows times a matrix an expert (forward), the gradient of those rows (input), or
    that of the matrices (weight). rows: a bucket, see `bucket`; devices of one name count as one."""

    form: Form
    device: torch.device = field(compare=False)
    device_name: str
    dtype: torch.dtype
    experts: int
    rows: int
    in_features: int
    out_features: int
    bias: bool = False

    @property
    def key(self) -> str:
        """Of the file, whose devices are all of one name."""
        bias = " bias" if self.bias else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.form} {dtype} experts={self.experts} rows={self.rows} in={self.in_features} "
            f"out={self.out_features}{bias}"
        )

    def __str__(self) -> str:
        return f"{self.key} on {self.device_name}"


def bucket(rows: int) -> int:
    """The least power of two that is not below ``rows``: so there are few requests.

    Example: 1000 -> 1024, 1024 -> 1024, 0 -> 1.
    """
    return 1 << max(rows - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to compute products.

    reasons: why it would not compute such a request, on this device; nothing where it would. misfit: why it
    would not take these operands, where it does take such a request: strides, alignment. run: computes them.
    """

    name: str
    reasons: Callable[[Request], list[str]]
    run: Callable[[Request, Any], object]
    misfit: Callable[[Any], str | None] = lambda operands: None


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What two candidates take, on the slowest rank, and which of them is taken. when: ISO 8601, UTC."""

    choice: str
    seconds: Mapping[str, float]
    when: str


class Machine:
    """What a registry asks of devices and of this installation. Tests put another in its place."""

    def seconds(self, pieces: Mapping[str, Piece], device: torch.device) -> dict[str, float]:
        """Of each piece the median, on the current stream. Rounds of all pieces alternate: a clock that
        changes, or a cache that fills, meets them alike."""

        def run_round() -> list[tuple[str, torch.cuda.Event, torch.cuda.Event]]:
            found = []
            for name, piece in pieces.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                piece()
                end.record()
                found.append((name, begin, end))
            return found

        def timed(rounds: int) -> dict[str, list[float]]:
            torch.cuda.synchronize(device)
            torch.cuda._sleep(LEAD_CYCLES)
            marks = [mark for _ in range(rounds) for mark in run_round()]
            torch.cuda.synchronize(device)
            times: dict[str, list[float]] = {name: [] for name in pieces}
            for name, begin, end in marks:
                times[name].append(begin.elapsed_time(end) / 1e3)
            return times

        with torch.cuda.device(device):
            warm = timed(WARM_UP)
            span = sum(times[-1] for times in warm.values())
            rounds = int(SPAN_SECONDS / span) if span > 0 else MOST_ROUNDS
            counted = timed(min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS))
        return {name: statistics.median(times) for name, times in counted.items()}

    def free_bytes(self, device: torch.device) -> int:
        """What a tensor may still take: the device's own, and what torch holds without using it."""
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def release(self, device: torch.device) -> None:
        """After measuring: torch need not hold what the operands took."""
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

    def architecture(self, device: torch.device) -> Architecture:
        return loaded_architecture(device)

    def build(self) -> str:
        return build_id()

    def folder(self) -> Path:
        return Path(os.environ.get("PMOE_CACHE") or Path.home() / ".cache" / "pmoe")


UNKNOWN, UNWILLING = 0, 9
"""Codes of requests, beside 1 and 2 for the two candidates that compete. The largest wins."""


class Registry:
    """Candidates in the order of priority, the choices among them, and why.

    compete: the two that are measured, the challenger and the baseline. operands: makes what a request
    describes, for measuring. The last candidate should refuse nothing.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        compete: tuple[str, str],
        operands: Callable[[Request], Any],
        machine: Machine | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.compete = compete
        self.machine = Machine() if machine is None else machine
        self.forced: str | None = None
        self._by_name = {candidate.name: candidate for candidate in candidates}
        self._operands = operands
        self._settled: dict[Request, Settled] = {}
        self._unmeasured: dict[Request, str] = {}
        self._ranked: dict[tuple[Request, bool], tuple[Candidate, ...]] = {}
        self._told: set[str] = set()

    # ---- choosing

    def choose(self, request: Request, operands: Any = None) -> str:
        """The name of the candidate that computes this: the first willing one that the operands fit, as in
        the rule above. A first candidate that is passed over is told of once for each reason.

        Raises NotImplementedError, with `explain`, where nobody would.
        """
        if self.forced is not None:
            fits = operands is None or self._by_name[self.forced].misfit(operands) is None
            return self.forced if fits else self.candidates[-1].name
        for candidate in self._rank(request):
            why = None if operands is None else candidate.misfit(operands)
            if why is None:
                return candidate.name
            self._tell_fallback(candidate, request, [why])
        raise NotImplementedError(self.explain(request))

    def settled(self, request: Request) -> Settled | None:
        return self._settled.get(request)

    @contextmanager
    def forcing(self, name: str) -> Iterator[None]:
        """Every choice in the block, on any device and thread, is ``name`` where the operands fit it, else
        the last candidate. For tests and benchmarks."""
        if name not in self._by_name:
            raise ValueError(f"name ({name!r}) must be one of {', '.join(self._by_name)}")
        before, self.forced = self.forced, name
        try:
            yield
        finally:
            self.forced = before

    def forget(self) -> None:
        """All that was settled in this process, and what was told; the file stays."""
        for kept in (self._settled, self._unmeasured, self._ranked, self._told):
            kept.clear()

    def _rank(self, request: Request) -> tuple[Candidate, ...]:
        key = (request, torch.are_deterministic_algorithms_enabled())
        found = self._ranked.get(key)
        if found is None:
            refusals = self._refusals(request)
            willing = [candidate for candidate in self.candidates if not refusals[candidate.name]]
            first, _ = self._first(request, [candidate.name for candidate in willing])
            # Stable: behind the first they stay in the order of priority.
            found = self._ranked[key] = tuple(sorted(willing, key=lambda each: each.name != first))
            preferred = self.candidates[0]
            self._tell_fallback(preferred, request, refusals[preferred.name])
            if os.environ.get("PMOE_LOG_KERNELS", "") not in ("", "0"):
                log.warning("%s", self.explain(request))  # a level that shows: it was asked for
        return found

    def _refusals(self, request: Request) -> dict[str, list[str]]:
        return {candidate.name: candidate.reasons(request) for candidate in self.candidates}

    def _first(self, request: Request, willing: Sequence[str]) -> tuple[str | None, str]:
        """(its name, why); None where nobody is willing."""
        challenger, baseline = self.compete
        if not willing:
            return None, "nobody computes it"
        if torch.are_deterministic_algorithms_enabled():
            return willing[0], "deterministic mode: the first that is willing, whatever it takes"
        settled = self._settled.get(request)
        if settled is not None and settled.choice in willing:
            rule = "as fast, or faster" if settled.choice == baseline else "faster"
            return settled.choice, f"{rule}, measured {settled.when}"
        if challenger in willing and baseline in willing:
            return baseline, self._unmeasured.get(request, "not measured, and nothing untimed replaces it")
        if baseline in willing:
            return baseline, f"{challenger} refuses"
        return willing[0], "the first that is willing"

    def explain(self, request: Request) -> str:
        """The request, of each candidate why not or how long it takes, and the choice with its reason.

        forward bfloat16 experts=8 rows=4096 in=1024 out=4096 on NVIDIA H200
          pmoe        0.104 ms
          grouped_mm  0.131 ms
          loop        willing
          takes pmoe: faster, measured 2026-01-31T12:00:00+00:00
        """
        refusals = self._refusals(request)
        first, why = self._first(request, [name for name, reasons in refusals.items() if not reasons])
        settled, width = self._settled.get(request), max(map(len, refusals))
        lines = [str(request)]
        for name, reasons in refusals.items():
            told = "willing"
            if reasons:
                told = f"refuses: {'; '.join(reasons)}"
            elif settled is not None and name in settled.seconds:
                told = f"{settled.seconds[name] * 1e3:.3g} ms"
            lines.append(f"  {name.ljust(width)}  {told}")
        lines.append(f"  takes {first or 'none'}: {why}")
        return "\n".join(lines)

    def _tell_fallback(self, candidate: Candidate, request: Request, reasons: Iterable[str]) -> None:
        if candidate is self.candidates[0] and request.device.type == "cuda":
            for reason in reasons:
                self._tell(f"products are computed without {candidate.name}'s kernels: {reason}")

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warnings.warn(f"pmoe: {message}", stacklevel=3)

    # ---- settling

    def settle(self, requests: Sequence[Request], agree: Agree) -> None:
        """Decides between the two that compete, on every rank alike, for requests that both would compute.

        Collective: one reduction where all ranks know the same, else up to three; between them the ranks
        measure, each what it can. requests must follow from numbers that all ranks share; where ranks come
        with different ones nevertheless, nothing is settled, and a warning says so. All of them are of one
        device. Known is what was settled in this process before, or by another one and is in the file; what
        not all ranks know, or know differently, is measured on all. The slowest rank's seconds count.

        Nothing happens in deterministic mode, which must be on for all ranks or for none.
        Raises ValueError on every rank where kernels are loaded on some and the ranks' code or compute
        capability differs. Trouble on one rank (no memory left, a file that cannot be read) leaves requests
        unsettled or has them measured, and is told by a warning, never by an exception on one rank alone.
        """
        if not requests or torch.are_deterministic_algorithms_enabled():
            return
        device = requests[0].device
        here, known = self.machine.architecture(device), self._known(requests)
        codes = [self._code(request, known) for request in requests]
        of_requests, of_codes = digest(each.key for each in requests), digest(map(str, codes))
        facts = [here.binary_version, here.ptx_version, here.capability, of_requests, of_codes]
        least, most = _range(facts, agree)
        _check_alike(here, least, most)
        if least[3] != most[3]:
            self._tell("the ranks' experts are of unlike sizes: their products are not measured")
            return
        low, high = (codes, codes) if least[4] == most[4] else _range(codes, agree)
        unsettled = []
        for request, lowest, highest in zip(requests, low, high, strict=True):
            if highest == UNWILLING:
                continue
            if lowest == highest != UNKNOWN:
                self._settled[request] = known[request]
            else:
                unsettled.append(request)
        if unsettled:
            self._measure(unsettled, agree)
        for request in requests:
            self._ranked.pop((request, False), None)

    def _code(self, request: Request, known: Mapping[Request, Settled]) -> int:
        if any(self._by_name[name].reasons(request) for name in self.compete):
            return UNWILLING
        return 1 + self.compete.index(known[request].choice) if request in known else UNKNOWN

    def _measure(self, requests: Sequence[Request], agree: Agree) -> None:
        own = [second for request in requests for second in self._seconds(request)]
        self.machine.release(requests[0].device)
        slowest = agree(own)
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        found: dict[Request, Settled] = {}
        for i, request in enumerate(requests):
            seconds = dict(zip(self.compete, slowest[2 * i : 2 * i + 2], strict=True))
            if all(map(math.isfinite, seconds.values())):
                found[request] = Settled(choice=self._faster(seconds), seconds=seconds, when=when)
            else:
                self._settled.pop(request, None)  # other ranks do not have it
                self._unmeasured.setdefault(request, "could not be measured on every rank")
        self._settled.update(found)
        self._save(requests[0], found)

    def _faster(self, seconds: Mapping[str, float]) -> str:
        challenger, baseline = self.compete
        return challenger if seconds[challenger] < (1 - TIE) * seconds[baseline] else baseline

    def _seconds(self, request: Request) -> list[float]:
        """Of the two, here; infinite where they cannot be measured. Raises nothing: the others wait."""
        try:
            wanted, free = _bytes(request), self.machine.free_bytes(request.device)
            if wanted > free // 2:
                raise MemoryError(f"{wanted} bytes are needed, and half of {free} free ones may be used")
            kind = request.device.type
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
                operands = self._operands(request)
                pieces = {
                    name: functools.partial(self._by_name[name].run, request, operands)
                    for name in self.compete
                }
                found = self.machine.seconds(pieces, request.device)
            return [found[name] for name in self.compete]
        except Exception as error:
            self._unmeasured[request] = f"not measured: {error}"
            self._tell(f"some products could not be measured, and {self.compete[1]} computes them: {error}")
            return [math.inf, math.inf]

    # ---- the file

    def path(self, request: Request) -> Path:
        """The file of the request's device, with this torch and this build of the kernels."""
        parts = ["kernels", *self._whose(request).values(), f"v{FORMAT}"]
        slugs = (re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)
        return self.machine.folder() / ("_".join(slugs) + ".json")

    def _whose(self, request: Request) -> dict[str, str]:
        return {
            "device": request.device_name,
            "torch": str(torch.__version__),
            "build": self.machine.build(),
        }

    def _known(self, requests: Sequence[Request]) -> dict[Request, Settled]:
        stored = self._load(requests[0])
        found = {each: stored[each.key] for each in requests if each.key in stored}
        return found | {each: self._settled[each] for each in requests if each in self._settled}

    def _load(self, request: Request) -> dict[str, Settled]:
        """By key, what the file holds; nothing where it cannot be used, which is told once."""
        try:
            path = self.path(request)
            try:
                return self._parsed(path.read_bytes(), self._whose(request))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        except FileNotFoundError:
            return {}
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no home
            self._tell(f"stored choices of kernels are not used: {error}")
            return {}

    def _parsed(self, text: bytes, whose: Mapping[str, str]) -> dict[str, Settled]:
        held = json.loads(text)
        if not isinstance(held, dict) or held.get("format") != FORMAT:
            raise ValueError(f"must be an object of format {FORMAT}")
        for name, here in whose.items():
            if held.get(name) != here:
                raise ValueError(f"{name} ({held.get(name)!r}) must be {here!r}")
        choices = held.get("choices")
        if not isinstance(choices, dict):
            raise ValueError(f"choices ({choices!r}) must be an object")
        return {key: self._restored(key, value) for key, value in choices.items()}

    def _restored(self, key: str, value: Any) -> Settled:
        if isinstance(value, dict) and value.get("choice") in self.compete:
            seconds = value.get("seconds")
            if isinstance(seconds, dict) and set(seconds) == set(self.compete):
                times = seconds.values()
                if all(isinstance(each, float) and 0 <= each < math.inf for each in times):
                    return Settled(choice=value["choice"], seconds=seconds, when=str(value.get("when")))
        raise ValueError(
            f"{key} ({value!r}) must have the choice and seconds of {' and '.join(self.compete)}"
        )

    def _save(self, like: Request, found: Mapping[Request, Settled]) -> None:
        """Beside what is there. Every rank does, since each node may have a folder of its own; the whole file
        takes the old one's place. Of two at once one may lose what it added: it is measured again later."""
        if not found:
            return
        held = self._load(like)
        added = {request.key: settled for request, settled in found.items()}
        if all(key in held and held[key].choice == each.choice for key, each in added.items()):
            return  # another rank of this node was here
        choices = {
            key: {"choice": each.choice, "seconds": dict(each.seconds), "when": each.when}
            for key, each in sorted((held | added).items())
        }
        text = json.dumps({"format": FORMAT, **self._whose(like), "choices": choices}, indent=1) + "\n"
        try:
            write_whole(self.path(like), text)
        except (OSError, RuntimeError) as error:  # must not stop one rank alone
            self._tell(f"measured products could not be saved, and will be measured again: {error}")


def write_whole(path: Path, text: str) -> None:
    """Writes the whole file or none: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".kernels-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _range(values: Sequence[float], agree: Agree) -> tuple[list[float], list[float]]:
    """The least and the most of each that a rank has, by one reduction."""
    found = agree([*values, *(-value for value in values)])
    return [-value for value in found[len(values) :]], found[: len(values)]


def digest(parts: Iterable[str]) -> int:
    """48 bits: a float holds them exactly."""
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:6], "big")


def _check_alike(here: Architecture, least: Sequence[float], most: Sequence[float]) -> None:
    """Where no rank has kernels there are none to differ."""
    if least[:3] != most[:3] and most[0]:
        names = ("binary version", "PTX version", "compute capability times 10")
        found = [
            f"{name} {int(low)} to {int(high)}"
            for name, low, high in zip(names, least[:3], most[:3], strict=True)
        ]
        raise ValueError(
            f"mixed architectures: the kernels of this rank ({here}) must be those of all ranks, which have "
            f"{', '.join(found)}"
        )


def _bytes(request: Request) -> int:
    """Of operands, of a result in its place, and of one that is made elsewhere first."""
    rows, columns = request.rows, request.in_features + request.out_features
    weights = request.experts * request.in_features * request.out_features
    if request.form == "weight":
        elements = rows * columns + 2 * weights
    else:
        elements = rows * (columns + max(request.in_features, request.out_features)) + weights
    return elements * request.dtype.itemsize
