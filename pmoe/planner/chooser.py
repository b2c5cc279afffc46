"""Chooses the restore pair and n of one layer, from numbers that all its ranks share, and remembers.

Letters: B the largest number of tokens of a rank, n chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pmoe.planner.candidates import evaluate, within_budget
from pmoe.planner.cost_model import cheapest_pair
from pmoe.planner.degree import Choice
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.profile import Profile
from pmoe.schedule.restore import Restore

log = logging.getLogger("pmoe")


class Chooser:
    """Chooses for one layer and remembers by B.

    pairs: to choose from. budget: bytes for any routing, or None. slack: rows of a slot over the balanced
    share. bins: into which rows are counted.
    """

    def __init__(
        self, *, pairs: Sequence[Restore], budget: int | None, slack: float, bins: int | None = None
    ) -> None:
        self.pairs, self.budget, self.slack, self.bins = tuple(pairs), budget, slack, bins
        self._known: dict[tuple[object, ...], Choice | None] = {}
        self._pairs: dict[tuple[object, ...], Restore] = {}

    def pair(self, sizes: LayerSizes, max_tokens: int, profile: Callable[[], Profile]) -> Restore:
        """The cheapest pair by Eq. 10. profile: asked only where there is something to choose."""
        if len(self.pairs) == 1 or max_tokens == 0:
            return self.pairs[0]
        tokens = _rounded_up(max_tokens)
        key = (sizes, tokens, self.pairs)
        if key not in self._pairs:
            found, seconds = cheapest_pair(sizes, profile(), tokens, self.pairs)
            if found not in self._pairs.values():
                told = ", ".join(f"{pair}: {time * 1e3:.3g} ms" for pair, time in seconds.items())
                log.info(
                    "memory_reuse=True takes %s for %d tokens a rank (Eq. 10: %s)", found, max_tokens, told
                )
            self._pairs[key] = found
        return self._pairs[key]

    def fitting(
        self,
        sizes: LayerSizes,
        max_tokens: int,
        degrees: Sequence[tuple[int, int]],
        profile: Callable[[], Profile],
        *,
        host_is_full: bool = False,
    ) -> Choice:
        """The fastest choice within the budget; none that offloads T_DI where the host is full.

        degrees: (forward, backward) to choose from.
        Raises ValueError with the least budget that would do.
        """
        pairs = self.pairs
        if host_is_full:
            pairs = tuple(pair for pair in pairs if pair.dispatched != "offload") or tuple(
                Restore("communicate", pair.hidden) for pair in pairs
            )
        # What holds for more tokens holds for fewer: few numbers are decided on. None where nothing holds.
        for tokens in (_rounded_up(max_tokens), max_tokens):
            key = (sizes, tokens, tuple(degrees), pairs)
            if key not in self._known:
                try:
                    self._known[key] = self._fit(sizes, tokens, degrees, pairs, profile)
                except ValueError:
                    if tokens == max_tokens:
                        raise
                    self._known[key] = None
            found = self._known[key]
            if found is not None:
                return found
        raise AssertionError("unreachable: the last number of tokens fits or raises")

    def _fit(
        self,
        sizes: LayerSizes,
        tokens: int,
        degrees: Sequence[tuple[int, int]],
        pairs: Sequence[Restore],
        profile: Callable[[], Profile],
    ) -> Choice:
        assert self.budget is not None
        several = len(pairs) * len(degrees) > 1
        candidates = evaluate(
            sizes,
            tokens,
            degrees=degrees,
            pairs=pairs,
            profile=profile() if several else None,
            slack=self.slack,
            bins=self.bins,
        )
        best = within_budget(candidates, self.budget)
        log.info("memory_budget=%d takes %s for up to %d tokens a rank", self.budget, best, tokens)
        return best


def _rounded_up(tokens: int) -> int:
    """To three significant bits.

    Example: 1000 -> 1024, 1100 -> 1280.
    """
    step = 1 << max(tokens.bit_length() - 3, 0)
    return -(-tokens // step) * step
