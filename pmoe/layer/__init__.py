"""The MoE layer: gate, order, dispatch, experts, combine, in the order a token meets them.

`module` has the layer and a call in five lines. `decision` decides a call and runs it, by the row counts of
`exact_counts`, `padded_counts` or `one_rank_counts`. `route` asks the gate, `choose` says n and the pair.

Letters of this folder: T tokens of this rank, K choices, E experts of the group, F bins, N rows, M = d_model.
"""

from pmoe.layer.moe_layer import MoELayer

__all__ = ["MoELayer"]
