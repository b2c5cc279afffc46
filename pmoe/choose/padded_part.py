"""Cuts off the first tokens of a batch with ``pad_to_capacity``. Trials run on them: timed steps.

In such a layer every rank sends every expert the same number of rows, the capacity, with any routing
(`pmoe.engine.variants.padding`). The capacity follows from the number of tokens. So fewer tokens also mean
fewer rows, and no row counts are exchanged.

Letters: T tokens of this rank, K choices of a token, E experts of all ranks, N padded rows.
"""

from __future__ import annotations

from dataclasses import replace

from pmoe.call.sizes import splits_of
from pmoe.choose.trials import TrialBatch, first_inputs
from pmoe.engine.variants.padding import make_padding
from pmoe.ordering.sorted import Tokens


def first_padded_tokens(batch: TrialBatch, share: float) -> TrialBatch:
    """Returns a routed batch with only the first tokens, padded to the capacity of so many tokens.

    The result is for the measurement of times only. A choice that the whole batch drops, because its expert
    has no room, goes to expert 0 here. This changes no time, because every expert computes equally many rows.

    batch: the routed batch of all tokens, with padding.
    share: the fraction of each rank's tokens to take, between 0 and 1. All ranks have equally many tokens.
    """
    modules = batch.modules
    x_TM = batch.inputs.x_TM
    padding = batch.orders.padding
    assert padding is not None
    count = int(share * x_TM.shape[0])
    row_TK = padding.position_TK[:count]
    top_k = row_TK.shape[1]
    rows_a_bin = max(int(batch.counts.send[0, 0, 0]), 1)
    splits = splits_of(modules, count, top_k, batch.degrees)
    orders = type(batch.orders)(
        batch.orders.modules, splits.expert_of_rows(row_TK.device), None, Tokens(splits.num_rows)
    )
    # Rows are sorted by bin, then by expert. A dropped choice has row N, which gives expert 0.
    orders.padding, _ = make_padding(row_TK // rows_a_bin % splits.num_experts, splits)
    counts = splits.counts(
        modules.ranks.size,
        x_TM.device,
        max_tokens=-(-splits.num_rows // top_k),
        needs_grad=batch.counts.needs_grad,
    )
    inputs = first_inputs(batch.inputs, count, count)
    return replace(batch, counts=counts, inputs=inputs, orders=orders, rows_for=None)
