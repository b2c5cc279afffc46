"""Predicts the bytes that a layer's two passes take, and refuses layers that it cannot predict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pmoe.arguments import check_count, check_int, check_kind, plain_int
from pmoe.call.modules import LayerModules
from pmoe.call.narrow_pairs import check_narrow, possible_pairs
from pmoe.call.sizes import counted_degrees, memory_shape, rows_of_call
from pmoe.choose.trials import trials_pay
from pmoe.comm.counts import RankCounts, cuts
from pmoe.planner.degree import MOST_CHUNKS, Choice, all_choices
from pmoe.planner.layer_sizes import CopyNumbers, LayerSizes
from pmoe.planner.memory import PredictedMemory, predict
from pmoe.planner.priced_choices import PricedChoice, bound, within_budget
from pmoe.planner.rows_per_pass import counted_rows
from pmoe.planner.trial_memory import searching_peak
from pmoe.runners.features import Feature
from pmoe.schedule.restore import Restore, StrategyName, parse_restore

USERS_OWN = {
    Feature.CALLBACKS: "callbacks: what they allocate is not counted",
    Feature.OWN_GATE: "the gate is a user's module: counted as one score for each token and expert",
    Feature.OWN_ORDER: "the order is a user's: what it allocates is not counted",
    Feature.OWN_EXCHANGE: "dispatch or combine is a user's: what it allocates is not counted",
    Feature.MODULE_EXPERTS: "experts are a user's modules: counted as feed-forward experts of width d_hidden",
}
"""Notes for `PredictedMemory.unknown`: a user's own modules, and tensors whose memory pmoe does not count.

The key is the feature that a layer with such a module or tensor has.
"""


def predict_memory(
    modules: LayerModules,
    num_tokens: int,
    row_counts: RankCounts | None,
    pipeline: int | None,
    pipeline_backward: int | None,
    memory_reuse: StrategyName | Restore | None,
) -> PredictedMemory:
    """Predicts the bytes that one forward and one backward pass of a layer take on this rank.

    `pmoe.MoELayer.predict_memory` is the method for users and lists the errors.

    modules: the layer's modules and options.
    num_tokens: number of this rank's tokens; without row_counts, the largest number of any rank.
    row_counts: row counts of a batch; None predicts an upper bound for any routing.
    pipeline, pipeline_backward: number of chunks (micro-batches) of forward and of backward; None takes the
        layer's own.
    memory_reuse: how backward gets back received rows (T_DI) and hidden activations (T_M), "S1" to "S4" or a
        Restore; None takes the layer's own.

    If the layer itself chooses the numbers of chunks or memory_reuse, the result is the prediction for the
    choice with the largest peak. Its ``candidates`` are the predictions for all choices. If only one choice
    is left, as with an argument for n and one for the pair, ``searching_peak`` is ``peak``: trials compare
    choices.
    """
    for name, value in (("pipeline", pipeline), ("pipeline_backward", pipeline_backward)):
        if value is not None:
            check_count(MOST_CHUNKS, **{name: value})
    check_int(0, num_tokens=num_tokens)
    check_kind((RankCounts, type(None)), "None or what layer.row_counts holds", row_counts=row_counts)
    check_predictable(modules)
    num_tokens, pipeline, pipeline_backward = map(plain_int, (num_tokens, pipeline, pipeline_backward))
    choices = _choices(modules, pipeline, pipeline_backward, memory_reuse)
    rotates = modules.options.rotates or memory_reuse is not None
    sizes = replace(memory_shape(modules), rotates=rotates)
    if row_counts is not None and modules.options.solves and pipeline is None:
        # Rows were counted for the numbers of chunks of that call only.
        choices = [choice for choice in choices if _is_counted(choice, row_counts)] or choices
    memory_of = {choice: _of_choice(modules, sizes, num_tokens, row_counts, choice) for choice in choices}
    arguments = (row_counts, pipeline, pipeline_backward, memory_reuse)
    if (budget := modules.options.budget) is not None and all(argument is None for argument in arguments):
        priced = [
            PricedChoice(**vars(choice), seconds=0.0, memory=memory) for choice, memory in memory_of.items()
        ]
        within_budget(priced, budget)  # raises ValueError if no choice stays within the budget
        memory_of = {choice: memory for choice, memory in memory_of.items() if memory.promised <= budget}
    if len(memory_of) > 1:
        memory_of = _with_trials(modules, sizes, num_tokens, row_counts, memory_of)
    largest = max(memory_of.values(), key=lambda memory: memory.peak)
    return replace(
        largest,
        searching_peak=max(memory.searching_peak for memory in memory_of.values()),
        unknown=unknown(modules),
        candidates=memory_of if len(memory_of) > 1 else {},
    )


def _with_trials(
    modules: LayerModules,
    sizes: LayerSizes,
    num_tokens: int,
    row_counts: RankCounts | None,
    memory_of: Mapping[Choice, PredictedMemory],
) -> dict[Choice, PredictedMemory]:
    """Returns predictions that also say the peak of a step that finds each choice by trials.

    A trial is a timed run of both passes inside a step. The predictions are unchanged if the layer runs no
    trials for so many tokens.

    modules: the layer's modules and options.
    sizes: sizes of the layer.
    num_tokens: number of this rank's tokens.
    row_counts: row counts of a batch; None if ``num_tokens`` is the largest number of any rank.
    memory_of: the prediction for each choice (numbers of chunks, and a restore pair) that the layer may take.
    """
    most_tokens = num_tokens if row_counts is None else row_counts.max_tokens
    if not trials_pay(modules, most_tokens * modules.options.top_k):
        return dict(memory_of)
    # The solver may try choices for which the rows were not counted.
    tried = None if modules.options.solves else memory_of.values()

    def peak_of_search(choice: Choice, memory: PredictedMemory) -> int:
        call = rows_of_call(modules, num_tokens, counted_degrees(modules, choice))
        return searching_peak(memory, sizes, call, tried, modules.options.budget)

    return {
        choice: replace(memory, searching_peak=peak_of_search(choice, memory))
        for choice, memory in memory_of.items()
    }


def check_predictable(modules: LayerModules) -> None:
    """Raises ValueError for a layer whose memory cannot be predicted.

    There are two reasons: a feature of the layer takes memory that pmoe does not count, or the layer uses
    fused kernels, which allocate memory of their own for rows.

    modules: the layer's modules and options.
    """
    reason = modules.refusal("memory")
    if reason is None and modules.options.fused:
        from pmoe.decide.fused_choice import fused_pair

        if modules.scheduled.fused_refusal is None and fused_pair(modules) is not None:
            reason = f"kernels are fused (fused={modules.options.fused!r})"
    if reason is not None:
        raise ValueError(f"predict_memory must not be called where {reason}: its memory is not predicted")


def check_budget(modules: LayerModules) -> None:
    """Raises ValueError if a layer cannot promise a memory budget, because part of its memory is unknown.

    modules: the layer's modules and options.
    """
    reason = modules.refusal("memory budget")
    like = modules.reference_parameter
    if reason is None and not modules.experts.columns("cpu" if like is None else like.device.type).hidden:
        reason = f"experts ({type(modules.experts).__name__}) do not say what they save"
    if reason is not None:
        raise ValueError(
            f"memory_budget ({modules.options.memory_budget!r}) must be left out where {reason}: its memory "
            "is not predicted"
        )


def unknown(modules: LayerModules) -> tuple[str, ...]:
    """Returns notes about the user's own modules in a layer: their memory is not fully predicted.

    modules: the layer's modules and options.

    The notes are for `PredictedMemory.unknown`. There are none if all modules are pmoe's own.
    """
    features = set(modules.features)
    if modules.experts.is_batch_invariant:
        features.discard(Feature.OWN_ORDER)  # such a layer has the order `pmoe.ordering.in_turn`
    notes = [note for feature, note in USERS_OWN.items() if feature in features]
    shared = modules.shared_expert
    if shared is not None and not shared.columns("cpu").hidden:
        notes.append("the shared expert is a user's module: what it saves is not counted")
    return tuple(notes)


def _choices(
    modules: LayerModules,
    pipeline: int | None,
    pipeline_backward: int | None,
    memory_reuse: StrategyName | Restore | None,
) -> list[Choice]:
    """Lists the settings for which memory is predicted: chunks of both passes, and a restore pair.

    A restore pair says how backward gets back T_DI (received rows) and T_M (hidden activations). An argument
    that is not None fixes its value in all settings. Values that are not fixed appear in every combination
    that the layer's options allow. If arguments and options leave no choice, the list has one element.

    modules: the layer's modules and options.
    pipeline, pipeline_backward: number of chunks of forward and of backward; None takes what the layer's
        options allow.
    memory_reuse: the restore pair, "S1" to "S4" or a Restore; None takes what the layer's options allow.

    Raises ValueError if memory_reuse names no pair.
    """
    options = modules.options
    pairs = modules.pairs
    if memory_reuse is not None:
        pair = parse_restore(memory_reuse)
        if not isinstance(pair, Restore):
            raise ValueError(f"memory_reuse ({memory_reuse!r}) must be None, one of S1 to S4 or a Restore")
        check_narrow(modules, pair)
        pairs = possible_pairs(modules, (pair,))
    n = pipeline or options.fixed_degree
    n_backward = pipeline_backward or options.pipeline_backward
    if options.solves and n is None and n_backward is None:
        return [choice for pair in pairs for choice in all_choices(modules.degree_pairs(pair), [pair])]
    forward = options.degrees if n is None else (n,)
    return all_choices([(n, n_backward or n) for n in forward], pairs)


def _is_counted(choice: Choice, counts: RankCounts) -> bool:
    """Returns whether the row counts of a call tell the rows of each chunk of a choice.

    Rows are counted in equal parts of the batch (bins). The counts of n chunks follow if n divides the number
    of bins. With ``pipeline="solve"`` a call counts rows only for the numbers of chunks that the solver may
    take in that call.

    choice: the numbers of chunks of forward and of backward.
    counts: the row counts of the call.
    """
    bins = counts.send.shape[0]
    return all(bins % n == 0 and n in (counts.depth or {n}) for n in choice.degrees)


def _of_choice(
    modules: LayerModules, sizes: LayerSizes, num_tokens: int, counts: RankCounts | None, choice: Choice
) -> PredictedMemory:
    """Predicts the memory that a call takes with one `Choice`: numbers of chunks and a restore pair.

    modules: the layer's modules and options.
    sizes: sizes of the layer.
    num_tokens: number of this rank's tokens.
    counts: row counts of a batch, for each of F bins (equal parts of the batch). None predicts an upper bound
        for any routing.
    choice: the number of chunks of forward and of backward, and the restore pair (how backward gets the
        experts' input and hidden activation).

    Raises ValueError if F is not a multiple of both numbers of chunks. Each chunk must consist of whole bins.
    """
    sizes = replace(sizes, rotates=sizes.rotates or choice.rearranged)
    counted = counted_degrees(modules, choice)
    call = rows_of_call(modules, num_tokens, counted)
    if counts is None:
        return bound(sizes, call, choice, modules.options.slack, modules.bins_for(counted))
    copies = CopyNumbers(
        hosted=counts.hosted_copies,
        sent=counts.expert_messages,
        relays=counts.relays_copies,
        stay=counts.copies_stay,
    )
    sizes = replace(sizes, copies=copies)
    bins = counts.send.shape[0]
    degrees = (choice.forward, choice.backward)
    if any(bins % n for n in degrees):
        raise ValueError(f"pipeline {degrees} must divide the {bins} bins of row_counts")
    # A batch with skewed routing was cut into more chunks than the choice says.
    forward_n, backward_n = (cuts(n, bins)[counts.depth.get(n, 0)] for n in degrees)
    rank = modules.ranks.rank
    place = modules.grid.esp.rank
    forward, backward = (counted_rows(sizes, counts, rank, n, place) for n in (forward_n, backward_n))
    return predict(sizes, call, forward, backward, choice.restore, rearranged=forward_n != backward_n)
