"""Row counts of a layer with ``pipeline="solve"``, whose number of chunks depends on the row counts.

Rows are counted in bins, equal parts of the batch. A chunk consists of whole bins, so n chunks need a number
of bins that is a multiple of n. A multiple of all n from 1 to 16 would be too many bins: 720720. So the
number of bins is only a multiple of the last call's numbers of chunks. If the solver then takes other numbers
of chunks, rows are counted again and the counts are exchanged again. Example:

    The last call had 3 chunks in forward and 4 in backward.
    This call counts rows in 12 bins (or a multiple of 12), and exchanges the counts.
    - If the solver takes 3 and 4 chunks again, these counts are used.
    - If the solver takes 5 and 5 chunks, the call counts rows in 5 bins (or a multiple of 5), and exchanges
      the counts a second time.

All ranks take the same steps, because the solver's answer follows from numbers that all ranks have.
"""

from __future__ import annotations

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice
from pmoe.call.modules import LayerModules
from pmoe.choose.choose import choose
from pmoe.comm.counts import RankCounts
from pmoe.comm.failures import publishing_failures
from pmoe.decide.exact_counts import ExactCounts, LoadedExchange
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import SortedSlots


class SolverCounts(ExactCounts):
    """Gets a call's row counts with ``pipeline="solve"``, by one exchange or two.

    A call has one number of chunks for forward and one for backward. The layer expects the same two numbers
    as in its last call, and counts the rows for both. If the solver then chooses other numbers, the rows are
    counted again and the counts are exchanged again.
    """

    _counts: RankCounts

    def __init__(self, call: Call, degrees: tuple[int, ...] | None = None) -> None:
        super().__init__(call, degrees or call.modules.counted_degrees)

    def finish_exchange(self) -> RankCounts:
        self._counts = super().finish_exchange()
        return self._counts

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        self.orders.modules = modules
        counts = self.finish_exchange()
        choice = choose(self.call.modules, counts, inputs, self.orders, rows_for=self.rows_for)
        return self.counted(AgreedChoice(choice=choice))

    def counted(self, agreed: AgreedChoice) -> AgreedChoice:
        """Returns ``agreed`` with row counts for the chunks of forward and the chunks of backward.

        The layer also stores the two numbers of chunks, because its next call counts rows for these numbers.
        If this call has counted its rows for other numbers, they are counted again, and the ranks exchange
        the counts again.

        agreed: the choice of the numbers of chunks and the restore pair.
        """
        assert agreed.choice is not None
        counts, _ = self.rows_for(agreed.choice.degrees)
        self.call.modules.cache.counted = agreed.choice.degrees
        return agreed._replace(counts=counts)

    def rows_for(self, degrees: tuple[int, ...]) -> tuple[RankCounts, SortedSlots]:
        """Returns row counts for some numbers of chunks, and the sorted (token, choice) slots of the call.

        Rows are counted in bins, equal parts of the batch. The number of bins is a multiple of each n in
        ``degrees``, so that n chunks consist of whole bins. The method is collective if rows must be counted
        again.

        degrees: the numbers of chunks n. They follow from the largest number of tokens of any rank, so they
            are the same on all ranks.
        """
        modules = self.call.modules
        if set(degrees) != set(self._degrees):
            with publishing_failures(modules.ranks, "the exchange of row counts"):
                bins = modules.bins_for(degrees)
                self._degrees = degrees
                self._once_FP = self.orders.count_once(bins)
                self._counts_FE = self.orders.count(bins)
                exchange = LoadedExchange(modules, self.routed, self._begin_exchange)
            self._counts = exchange.finish()
        return self._counts, self.orders
