"""The table of the features that each runner, each source of row counts and each prediction supports.

A feature is a property that a layer with default options does not have. A runner, source or prediction
refuses all layers with a feature that its entry does not name. So a new feature must be added to each entry
that supports it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Feature(str, enum.Enum):
    """A property that layers with default options do not have, such as a shared expert.

    The value of each member is a text for error messages and warnings: the reason why a runner or a
    prediction refuses a layer with this feature. A name in braces, such as {wire}, stands for the value of
    that option.
    """

    RANKS = "rows travel between ranks"
    SHARDED = "experts are sharded over the ranks of a node"
    HIERARCHICAL = "rows do not travel by flat all-to-alls"
    OWN_EXCHANGE = "dispatch or combine is an exchange of one's own"
    SEND_ONCE = "rows travel once (send_once=True)"
    WIRE = "dispatched rows are sent in another form (wire={wire}, wire_backward={wire_backward})"
    WIRE_COMBINE = "results return in another form (wire_combine={wire_combine})"
    TO_OWN_RANK = "rows are sent to their own rank (bypass_local=False)"
    CALLBACKS = "there are callbacks"
    HOOKS = "callbacks see rows between the gate and the end of combine"
    SHARED_EXPERT = "there is a shared expert"
    GRADIENTS = "other layers' gradients are reduced inside its backward pass"
    ROTATES = "buffers rotate through ring slots (memory_reuse={memory_reuse})"
    OFFLOADS = "memory_reuse ({memory_reuse}) may offload"
    MESSAGES = "T_DI may stay in the messages in which it came (memory_reuse={memory_reuse}, allow={allow})"
    HIDDEN_E4M3 = "T_M may stay in e4m3 (memory_reuse={memory_reuse}, allow={allow})"
    PRODUCTS = "operands of the experts' products are rounded (products={products})"
    CHUNKS = "pipeline ({pipeline}) cuts the batch into chunks"
    BUDGET = "there is a memory_budget ({memory_budget})"
    CAPACITY = "rows are dropped over a capacity (capacity_factor={capacity_factor})"
    NO_CAPACITY = "capacity_factor is {capacity_factor}, which sets no capacity"
    PADDED = "rows are padded to capacity (pad_to_capacity=True)"
    CHECK_FINITE = "the logits are checked (check_finite=True)"
    FUSED = "kernels are fused (fused={fused})"
    PERSISTENT = "a pass is one persistent kernel (fused={fused})"
    PROGRAM = "passes may run as compiled programs (program=True)"
    SEQUENTIAL = "steps are timed one after the other (sequential=True)"
    ONE_LANE = "collectives wait for each other (one_lane=True)"
    OWN_ORDER = "the order is a {order}"
    PICKS_TOKENS = "the gate ({gate}) mixes tokens or picks them for each expert"
    KEEPS_ITSELF = "the gate ({gate}) decides itself which rows are dropped"
    OTHER_GATE = "the gate is a {gate}, neither topk nor switch"
    OWN_GATE = "gate ({gate}) is a module of one's own"
    GATE_MODULE = "gate ({gate}) is a module"
    EXTERNAL_ROUTING = "the routing comes from outside (ExternalGate)"
    MODULE_EXPERTS = "experts ({experts}) are modules of one's own"
    OTHER_EXPERTS = "the experts are {experts}, neither ffn nor swiglu"
    LATENT = "experts have another width than the layer (d_latent={d_latent})"
    COPIES = "busy experts may have copies (balance={balance})"
    ADAPTERS = "experts have adapters (pmoe.add_lora; pmoe.merge_lora puts them into the weights)"


F = Feature
"""Short name of `Feature` for the tables below."""

BY_FUSED_KERNELS = frozenset(
    {F.RANKS, F.ROTATES, F.OFFLOADS, F.CHUNKS, F.CAPACITY, F.NO_CAPACITY, F.CHECK_FINITE}
    | {F.KEEPS_ITSELF, F.OTHER_GATE, F.OWN_GATE, F.GATE_MODULE, F.EXTERNAL_ROUTING, F.CALLBACKS}
    | {F.SHARED_EXPERT}
)
"""The features that both kinds of fused kernels support.

No kernel computes a shared expert: the layer calls it as a module (`LayerModules.calls_shared_expert`).
"""

SUPPORTED: dict[str, frozenset[Feature]] = {
    # ---- runners
    "pipeline": frozenset(Feature),
    # Pass programs send and compute what the engine does, without Python between the calls of a pass.
    "program": frozenset(
        {F.PROGRAM, F.RANKS, F.TO_OWN_RANK, F.CALLBACKS, F.ROTATES, F.OFFLOADS, F.CHUNKS, F.BUDGET}
        | {F.NO_CAPACITY, F.CHECK_FINITE, F.SEQUENTIAL, F.ONE_LANE, F.OTHER_GATE, F.GATE_MODULE, F.LATENT}
    ),
    "fused": BY_FUSED_KERNELS | {F.FUSED, F.SHARDED},
    "persistent": BY_FUSED_KERNELS | {F.PERSISTENT, F.PADDED},
    # On one rank no row travels, so the kind of exchange does not matter.
    "one rank": frozenset(
        {F.NO_CAPACITY, F.FUSED, F.PERSISTENT, F.HIERARCHICAL, F.OWN_EXCHANGE, F.WIRE, F.ONE_LANE, F.PROGRAM}
        | {F.CALLBACKS}
    ),
    # This runner has no chunks and no buffers. So it lacks the features about these, and the engine runs a
    # layer that has one of them.
    "few rows": frozenset(
        {F.RANKS, F.CAPACITY, F.NO_CAPACITY, F.CHECK_FINITE, F.KEEPS_ITSELF, F.OTHER_GATE, F.OWN_GATE}
        | {F.GATE_MODULE, F.EXTERNAL_ROUTING, F.OTHER_EXPERTS, F.ADAPTERS, F.LATENT, F.CALLBACKS, F.PROGRAM}
    ),
    # A layer in a graph of torch.compile(model, backend="pmoe"). The backend chooses chunks itself.
    "whole graph": frozenset(
        {F.RANKS, F.OWN_EXCHANGE, F.SHARED_EXPERT, F.GRADIENTS, F.CHUNKS, F.CAPACITY, F.NO_CAPACITY}
        | {F.CHECK_FINITE, F.KEEPS_ITSELF, F.OTHER_GATE}
    ),
    # ---- sources of row counts
    "padded counts": frozenset(
        {F.RANKS, F.OWN_EXCHANGE, F.TO_OWN_RANK, F.GRADIENTS, F.ROTATES, F.OFFLOADS, F.CHUNKS, F.BUDGET}
        | {F.WIRE, F.CAPACITY, F.PADDED, F.SEQUENTIAL, F.ONE_LANE, F.OWN_ORDER, F.OTHER_GATE, F.GATE_MODULE}
        | {F.MODULE_EXPERTS, F.OTHER_EXPERTS, F.PERSISTENT, F.ADAPTERS, F.LATENT, F.MESSAGES, F.HIDDEN_E4M3}
        | {F.WIRE_COMBINE, F.PRODUCTS, F.CALLBACKS, F.PROGRAM}
    ),
    "one rank's counts": frozenset(
        {
            F.NO_CAPACITY,
            F.FUSED,
            F.PERSISTENT,
            F.WIRE,
            F.ROTATES,
            F.OFFLOADS,
            F.CHUNKS,
            F.CALLBACKS,
            F.PROGRAM,
        }
    ),
    # Calls by the persistent kernel whose row counts the host does not read (`pmoe.BoundedSteps`).
    "bounded rows": frozenset(
        {F.RANKS, F.ROTATES, F.OFFLOADS, F.CHUNKS, F.NO_CAPACITY, F.CHECK_FINITE, F.OTHER_GATE}
        | {F.GATE_MODULE, F.SHARED_EXPERT, F.PERSISTENT}
    ),
    # Calls by pass programs over heaps whose row counts the host does not read (`pmoe.BoundedSteps`). Rows
    # for this rank's own experts stay there, and nothing is copied to the host.
    "bounded programs": frozenset(
        {F.PROGRAM, F.RANKS, F.ROTATES, F.CHUNKS, F.NO_CAPACITY, F.CHECK_FINITE, F.SEQUENTIAL, F.ONE_LANE}
        | {F.OTHER_GATE, F.GATE_MODULE}
    ),
    # ---- predictions, and calls in a CUDA graph
    # The bytes of a budget are guaranteed, so "memory budget" supports less than "memory" below: that
    # prediction may leave memory out, and says so.
    "memory budget": frozenset(
        {F.RANKS, F.SHARDED, F.OWN_EXCHANGE, F.TO_OWN_RANK, F.GRADIENTS, F.ROTATES, F.OFFLOADS, F.CHUNKS}
        | {F.BUDGET, F.WIRE, F.CAPACITY, F.NO_CAPACITY, F.CHECK_FINITE, F.SEQUENTIAL, F.ONE_LANE}
        | {F.EXTERNAL_ROUTING, F.OTHER_EXPERTS, F.FUSED, F.PERSISTENT, F.COPIES, F.ADAPTERS}
        | {F.MESSAGES, F.HIDDEN_E4M3, F.WIRE_COMBINE, F.PRODUCTS, F.PROGRAM}
    ),
}
SUPPORTED["memory"] = SUPPORTED["memory budget"] | (
    {F.HIERARCHICAL, F.SEND_ONCE, F.CALLBACKS, F.HOOKS, F.SHARED_EXPERT, F.PADDED, F.OWN_ORDER}
    | {F.PICKS_TOKENS}
    | {F.KEEPS_ITSELF, F.OTHER_GATE, F.OWN_GATE, F.GATE_MODULE, F.MODULE_EXPERTS, F.LATENT}
)
SUPPORTED["copies"] = frozenset(
    {F.RANKS, F.HIERARCHICAL, F.OWN_EXCHANGE, F.TO_OWN_RANK, F.CALLBACKS, F.HOOKS, F.SHARED_EXPERT}
    | {F.GRADIENTS}
    | {F.ROTATES, F.CHUNKS, F.CAPACITY, F.NO_CAPACITY, F.CHECK_FINITE, F.SEQUENTIAL, F.ONE_LANE, F.OWN_ORDER}
    | {F.PICKS_TOKENS, F.KEEPS_ITSELF, F.OTHER_GATE, F.OWN_GATE, F.GATE_MODULE, F.EXTERNAL_ROUTING}
    | {F.OTHER_EXPERTS, F.OFFLOADS, F.BUDGET, F.COPIES, F.LATENT, F.SHARDED, F.SEND_ONCE, F.WIRE, F.ADAPTERS}
    | {F.MODULE_EXPERTS, F.PROGRAM}
)
"""A layer on several ranks with ``balance``, whose busy experts may have copies on other ranks."""
SUPPORTED["batch invariance"] = frozenset(
    {F.RANKS, F.HIERARCHICAL, F.TO_OWN_RANK, F.SHARED_EXPERT, F.GRADIENTS, F.ROTATES, F.OFFLOADS, F.CHUNKS}
    | {F.NO_CAPACITY, F.CHECK_FINITE, F.SEQUENTIAL, F.ONE_LANE, F.OWN_ORDER, F.OTHER_GATE, F.GATE_MODULE}
    | {F.EXTERNAL_ROUTING, F.OTHER_EXPERTS, F.COPIES}
)
"""A layer whose output for a token is the same bits in every batch (`pmoe.make_batch_invariant`).

Its classes of gates and experts are in `pmoe.layer.batch_invariant`.
"""
SUPPORTED["rounded products"] = frozenset(
    {F.RANKS, F.SHARDED, F.HIERARCHICAL, F.OWN_EXCHANGE, F.SEND_ONCE, F.WIRE, F.WIRE_COMBINE, F.TO_OWN_RANK}
    | {F.CALLBACKS, F.HOOKS, F.SHARED_EXPERT, F.GRADIENTS, F.ROTATES, F.OFFLOADS, F.MESSAGES}
    | {F.HIDDEN_E4M3}
    | {F.PRODUCTS, F.CHUNKS, F.CAPACITY, F.NO_CAPACITY, F.PADDED, F.CHECK_FINITE, F.SEQUENTIAL, F.ONE_LANE}
    | {F.OWN_ORDER, F.PICKS_TOKENS, F.KEEPS_ITSELF, F.OTHER_GATE, F.OWN_GATE, F.GATE_MODULE}
    | {F.EXTERNAL_ROUTING, F.OTHER_EXPERTS, F.LATENT, F.FUSED, F.PERSISTENT, F.BUDGET, F.PROGRAM}
)
"""A layer with ``products``, whose experts compute with operands rounded to float8."""
SUPPORTED["graph capture"] = SUPPORTED["padded counts"] - (
    {F.GRADIENTS, F.OFFLOADS, F.PERSISTENT, F.ADAPTERS, F.LATENT, F.MESSAGES, F.HIDDEN_E4M3}
    | {F.WIRE_COMBINE, F.PRODUCTS, F.CALLBACKS}
)
"""The features that each runner, source of row counts or prediction supports, by its name.

The pipeline runner supports all features, because it computes the calls that no other runner takes.
"""


def refused(component: str, features: Iterable[Feature]) -> Feature | None:
    """Returns the first of a layer's features that an entry of `SUPPORTED` lacks; None if it lacks none.

    component: the key of the entry: the name of a runner, a source of row counts or a prediction.
    features: the features of the layer.
    """
    missing = frozenset(features) - SUPPORTED[component]
    return next((feature for feature in Feature if feature in missing), None) if missing else None
