"""Which kernel computes a product: each is asked why not; of two that would, the faster is taken.

The rule, without any measurement of its own:

    in deterministic mode   the first willing candidate, in the order of priority: on every rank and in every
                            run the same, whatever was measured
    measured                the faster of the two that compete; see `pmoe.measure.product_choices`
    not measured            the baseline where it is willing, else the first willing: a kernel that nobody has
                            timed never takes the baseline's place

With PMOE_LOG_KERNELS=1 every choice is logged once for each request, by the logger "pmoe".
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pmoe.kernels.product_request import ProductRequest
from pmoe.warn import warn_once

log = logging.getLogger("pmoe")


@dataclass(frozen=True, kw_only=True)
class ProductCandidate:
    """A way to compute products.

    reasons: why it would not compute a request, on its device; nothing where it would.
    misfit: why it would not take these operands of a request that it would compute: strides, alignment.
    """

    name: str
    reasons: Callable[[ProductRequest], list[str]]
    misfit: Callable[[Any], str | None] = lambda operands: None


@dataclass(frozen=True, kw_only=True)
class MeasuredChoice:
    """The faster of two candidates, and the seconds of both on the slowest rank. when: ISO 8601, UTC."""

    choice: str
    seconds: Mapping[str, float]
    when: str


class Registry:
    """Candidates in the order of priority, the choices among them, and why.

    compete: the two that are measured, the challenger and the baseline.
    The last candidate should refuse nothing.
    """

    def __init__(self, candidates: Sequence[ProductCandidate], *, compete: tuple[str, str]) -> None:
        self.candidates = tuple(candidates)
        self.compete = compete
        self.forced: str | None = None
        self._measured: dict[ProductRequest, MeasuredChoice] = {}
        self._unmeasured: dict[ProductRequest, str] = {}
        self._ranked: dict[tuple[ProductRequest, bool], tuple[ProductCandidate, ...]] = {}

    # ---- what was measured

    def measured(self, request: ProductRequest) -> MeasuredChoice | None:
        return self._measured.get(request)

    def learn(self, request: ProductRequest, found: MeasuredChoice) -> None:
        """From now on the rule takes this choice."""
        self._measured[request] = found
        self._ranked.pop((request, False), None)

    def learn_failure(self, request: ProductRequest, why: str) -> None:
        """From now on the request counts as not measured."""
        self._measured.pop(request, None)
        self._unmeasured[request] = why
        self._ranked.pop((request, False), None)

    def forget(self) -> None:
        """All that was measured or chosen in this process."""
        for held in (self._measured, self._unmeasured, self._ranked):
            held.clear()

    # ---- choosing

    def choose(self, request: ProductRequest, operands: Any = None) -> str:
        """The name of the first candidate that is willing and that the operands fit, as the rule ranks them.

        Warns once for each reason for which the very first is passed over. Raises NotImplementedError, with
        `explain`, where nobody would.
        """
        if self.forced is not None:
            (candidate,) = (each for each in self.candidates if each.name == self.forced)
            fits = operands is None or candidate.misfit(operands) is None
            return self.forced if fits else self.candidates[-1].name
        for candidate in self._rank(request):
            why = None if operands is None else candidate.misfit(operands)
            if why is None:
                return candidate.name
            self._warn_of_fallback(candidate, request, [why])
        raise NotImplementedError(self.explain(request))

    @contextmanager
    def forcing(self, name: str) -> Iterator[None]:
        """Every choice in the block, on any device and thread, is ``name`` where the operands fit it.

        The last candidate computes the others. For tests and benchmarks.
        """
        names = [each.name for each in self.candidates]
        if name not in names:
            raise ValueError(f"name ({name!r}) must be one of {', '.join(names)}")
        before, self.forced = self.forced, name
        try:
            yield
        finally:
            self.forced = before

    def both_willing(self, request: ProductRequest) -> bool:
        """Whether the two that compete would compute this."""
        return not any(each.reasons(request) for each in self.candidates if each.name in self.compete)

    def _rank(self, request: ProductRequest) -> tuple[ProductCandidate, ...]:
        key = (request, torch.are_deterministic_algorithms_enabled())
        found = self._ranked.get(key)
        if found is None:
            refusals = self._refusals(request)
            willing = [candidate for candidate in self.candidates if not refusals[candidate.name]]
            first, _ = self._first(request, [candidate.name for candidate in willing])
            # Stable: behind the first they stay in the order of priority.
            found = self._ranked[key] = tuple(sorted(willing, key=lambda each: each.name != first))
            preferred = self.candidates[0]
            self._warn_of_fallback(preferred, request, refusals[preferred.name])
            if os.environ.get("PMOE_LOG_KERNELS", "") not in ("", "0"):
                log.warning("%s", self.explain(request))  # a level that shows: it was asked for
        return found

    def _refusals(self, request: ProductRequest) -> dict[str, list[str]]:
        return {candidate.name: candidate.reasons(request) for candidate in self.candidates}

    def _first(self, request: ProductRequest, willing: Sequence[str]) -> tuple[str | None, str]:
        """(its name, why); None where nobody is willing."""
        challenger, baseline = self.compete
        if not willing:
            return None, "nobody computes it"
        if torch.are_deterministic_algorithms_enabled():
            return willing[0], "deterministic mode: the first that is willing, whatever it takes"
        measured = self._measured.get(request)
        if measured is not None and measured.choice in willing:
            rule = "as fast, or faster" if measured.choice == baseline else "faster"
            return measured.choice, f"{rule}, measured {measured.when}"
        if challenger in willing and baseline in willing:
            return baseline, self._unmeasured.get(request, "not measured, and nothing untimed replaces it")
        if baseline in willing:
            return baseline, f"{challenger} refuses"
        return willing[0], "the first that is willing"

    def explain(self, request: ProductRequest) -> str:
        """The request, of each candidate why not or how long it takes, and the choice with its reason.

        forward bfloat16 experts=8 rows=4096 in=1024 out=4096 on NVIDIA H200
          pmoe        0.104 ms
          grouped_mm  0.131 ms
          loop        willing
          takes pmoe: faster, measured 2026-01-31T12:00:00+00:00
        """
        refusals = self._refusals(request)
        first, why = self._first(request, [name for name, reasons in refusals.items() if not reasons])
        measured, width = self._measured.get(request), max(map(len, refusals))
        lines = [str(request)]
        for name, reasons in refusals.items():
            state = "willing"
            if reasons:
                state = f"refuses: {'; '.join(reasons)}"
            elif measured is not None and name in measured.seconds:
                state = f"{measured.seconds[name] * 1e3:.3g} ms"
            lines.append(f"  {name.ljust(width)}  {state}")
        lines.append(f"  takes {first or 'none'}: {why}")
        return "\n".join(lines)

    def _warn_of_fallback(
        self, candidate: ProductCandidate, request: ProductRequest, reasons: Iterable[str]
    ) -> None:
        if candidate is self.candidates[0] and request.device.type == "cuda":
            for reason in reasons:
                message = f"products are computed without {candidate.name}'s kernels: {reason}"
                warn_once(message, for_each_reason=True)
