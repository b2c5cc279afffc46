"""The MoE layer: gate, order, dispatch, experts, combine, in the order a token meets them.

`module` has the layer and a call in five lines. `decision` decides a call and runs it, by the row counts of
`exact_counts`, `padded_counts` or `one_rank_counts`. `route` asks the gate, `choose` says n and the pair.
"""

from pmoe.layer.module import MoELayer

__all__ = ["MoELayer"]
